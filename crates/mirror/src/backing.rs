//! The backing file: two images of all mirrored memory, so that a complete one always exists.
//!
//! ```text
//! block 0        what the file is: magic, version, page size, spans (base, length); never written again
//! block 1, 2     commit record of image 0, 1: sequence number, root, checksum of its table, checksum of the record
//! then           tables of image 0, 1: a CRC-32 for each page
//! then           images 0, 1
//! ```
//!
//! Blocks are 4,096 bytes, numbers little-endian. Checkpoint n goes to image n mod 2: the pages that differ from what is
//! there, the blocks of the table that changed, a sync, then the commit record, durably. The other image is not touched, so
//! a crash, a full disk or a power cut at any point leaves it whole. What is assumed of the medium: a write that was synced
//! stays, and a torn commit record does not have the right checksum.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::layout::{PAGE, Span};
use crate::ring::{Write, Writer};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 8] = b"stillMIR";
const COMMIT: &[u8; 8] = b"stillCUT";
const VERSION: u32 = 1;
/// Spans that fit into block 0.
pub const MOST_SPANS: usize = 64;

/// Memory that direct I/O takes.
struct Blocks {
    at: *mut u8,
    len: usize,
}
// SAFETY: owned memory.
unsafe impl Send for Blocks {}

impl Blocks {
    fn new(len: usize) -> Self {
        let len = len.next_multiple_of(PAGE).max(PAGE);
        let Ok(layout) = Layout::from_size_align(len, PAGE) else { unreachable!("sizes are bounded") };
        // SAFETY: not of size zero.
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            handle_alloc_error(layout);
        }
        Blocks { at, len }
    }
}

impl std::ops::Deref for Blocks {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: ours, initialised.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl std::ops::DerefMut for Blocks {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: ours, initialised, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        if let Ok(layout) = Layout::from_size_align(self.len, PAGE) {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.at, layout) };
        }
    }
}

/// A set of pages, by their number over all spans.
#[derive(Clone)]
pub struct Pages(Vec<u64>);

impl Pages {
    /// The empty set, or that of all.
    pub fn new(count: usize, all: bool) -> Self {
        let mut pages = Pages(vec![0; count.div_ceil(64)]);
        if all {
            (0..count).for_each(|p| pages.add(p));
        }
        pages
    }

    /// Adds one.
    pub fn add(&mut self, page: usize) {
        self.0[page / 64] |= 1 << (page % 64);
    }

    /// Adds those of another set.
    pub fn join(&mut self, other: &Pages) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(i, &word)| {
            std::iter::successors((word != 0).then_some(word), |w| Some(w & (w - 1)).filter(|w| *w != 0))
                .map(move |w| i * 64 + w.trailing_zeros() as usize)
        })
    }
}

struct Image {
    table: Blocks,
    /// What differs from memory's last cut; `None` after a failure: nothing is known.
    stale: Pages,
}

/// An open backing file.
pub struct Backing {
    file: File,
    path: PathBuf,
    spans: Vec<Span>,
    images: [Image; 2],
    record: Blocks,
    writer: Writer,
    /// Whether the page cache is passed by.
    pub direct: bool,
    /// Of the newest complete checkpoint.
    pub sequence: u64,
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn get(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// The last four bytes of a block are the checksum of the others.
fn seal(block: &mut [u8]) {
    let sum = crc32fast::hash(&block[..PAGE - 4]);
    block[PAGE - 4..].copy_from_slice(&sum.to_le_bytes());
}

fn sealed(block: &[u8]) -> bool {
    crc32fast::hash(&block[..PAGE - 4]).to_le_bytes() == block[PAGE - 4..]
}

/// Where things are in the file.
struct Places {
    table: u64,
    pages: u64,
}

impl Places {
    fn new(pages: usize) -> Self {
        Places { table: (pages * 4).next_multiple_of(PAGE) as u64, pages: (pages * PAGE) as u64 }
    }
    fn table(&self, image: usize) -> u64 {
        3 * PAGE as u64 + image as u64 * self.table
    }
    fn image(&self, image: usize) -> u64 {
        3 * PAGE as u64 + 2 * self.table + image as u64 * self.pages
    }
    fn end(&self) -> u64 {
        self.image(2)
    }
}

fn page_count(spans: &[Span]) -> usize {
    spans.iter().map(|s| s.len / PAGE).sum()
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<(File, bool)> {
    match options.custom_flags(libc::O_DIRECT | libc::O_CLOEXEC).open(path) {
        Ok(file) => Ok((file, true)),
        Err(why) if why.raw_os_error() == Some(libc::EINVAL) => {
            Ok((options.custom_flags(libc::O_CLOEXEC).open(path)?, false))
        }
        Err(why) => Err(why),
    }
}

/// One process at a time: the lock goes with the open file. That of a process that was killed ends with the last of its
/// writes, which must be over before ours begin; that takes a moment, on a slow disk a longer one.
fn lock(file: &File, path: &Path) -> Result<(), Error> {
    /// How long one may hold it who runs, and one who was killed.
    const PATIENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];
    let begin = Instant::now();
    loop {
        // SAFETY: flock(2) takes no pointers.
        match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
            0 => return Ok(()),
            _ if begin.elapsed() > PATIENCE[1] => return Err(Error::Busy(path.into())),
            _ if begin.elapsed() > PATIENCE[0] && is_locked_by_a_living_one(file) => {
                return Err(Error::Busy(path.into()));
            }
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Whether a process that has locked a file is there. `proc_locks(5)`: that of one who has ended is not listed, or has a number that
/// nobody has.
fn is_locked_by_a_living_one(file: &File) -> bool {
    let (Ok(of), Ok(locks)) = (file.metadata(), std::fs::read_to_string("/proc/locks")) else { return true };
    let place = format!(":{}", of.ino());
    locks.lines().filter(|lock| lock.contains(" FLOCK ") && !lock.contains("->")).any(|lock| {
        let words: Vec<&str> = lock.split_whitespace().collect();
        matches!(words[..], [.., pid, at, _, _] if at.ends_with(&place) && lives(pid))
    })
}

/// Whether a process is there, has not ended, and has not been killed.
fn lives(pid: &str) -> bool {
    const KILLED: u64 = 1 << (libc::SIGKILL - 1);
    let Ok(status) = std::fs::read_to_string(Path::new("/proc").join(pid).join("status")) else {
        return false;
    };
    let value = |key: &str| status.lines().find_map(|line| Some(line.strip_prefix(key)?.trim()));
    let is_killed =
        |key| value(key).and_then(|v| u64::from_str_radix(v, 16).ok()).is_some_and(|v| v & KILLED != 0);
    !value("State:").is_some_and(|state| state.starts_with(['Z', 'X']))
        && !is_killed("SigPnd:")
        && !is_killed("ShdPnd:")
}

fn io_error(path: &Path, what: &'static str) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |why| Error::Io { path: path.clone(), what, why }
}

impl Backing {
    /// Makes a new file, all of it allocated and written once, so that no later write has to allocate. It gets its name
    /// when it is whole.
    pub fn create(path: &Path, spans: &[Span], page_size: usize) -> Result<Self, Error> {
        let error = |what| io_error(path, what);
        if path.exists() {
            return Err(Error::Exists(path.into()));
        }
        let mut name = path.as_os_str().to_owned();
        name.push(".part");
        let part = PathBuf::from(name);
        let mut options = OpenOptions::new();
        let (file, direct) = open(&part, options.read(true).write(true).create(true).truncate(false))
            .map_err(error("create"))?;
        lock(&file, path)?;
        file.set_len(0).map_err(error("create"))?;
        let places = Places::new(page_count(spans));
        // SAFETY: fallocate(2) takes no pointers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, places.end() as i64) } != 0 {
            let why = io::Error::last_os_error();
            if why.raw_os_error() != Some(libc::EOPNOTSUPP) {
                let _ = std::fs::remove_file(&part);
                return Err(error("allocate")(why));
            }
        }
        let zeros = Blocks::new(1 << 20);
        let mut at = 0;
        while at < places.end() {
            let len = (places.end() - at).min(zeros.len() as u64) as usize;
            file.write_all_at(&zeros[..len], at).map_err(error("allocate"))?;
            at += len as u64;
        }
        let mut head = Blocks::new(PAGE);
        head[..8].copy_from_slice(MAGIC);
        put(&mut head, 8, u64::from(VERSION));
        put(&mut head, 16, page_size as u64);
        put(&mut head, 24, spans.len() as u64);
        for (i, span) in spans.iter().enumerate() {
            put(&mut head, 64 + 16 * i, span.base as u64);
            put(&mut head, 72 + 16 * i, span.len as u64);
        }
        seal(&mut head);
        file.write_all_at(&head, 0).map_err(error("write"))?;
        file.sync_all().map_err(error("sync"))?;
        std::fs::rename(&part, path).map_err(error("rename"))?;
        let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(directory).and_then(|d| d.sync_all()).map_err(error("sync the directory"))?;
        Ok(Self::with(file, path, spans, direct, Writer::new()))
    }

    fn with(file: File, path: &Path, spans: &[Span], direct: bool, writer: Writer) -> Self {
        let count = page_count(spans);
        let image = || Image { table: Blocks::new(count * 4), stale: Pages::new(count, true) };
        Backing {
            file,
            path: path.into(),
            spans: spans.to_vec(),
            images: [image(), image()],
            record: Blocks::new(PAGE),
            writer,
            direct,
            sequence: 0,
        }
    }

    /// Whether writes are asynchronous.
    pub fn asynchronous(&self) -> bool {
        self.writer.is_ring()
    }

    /// Opens a file that was made for these spans.
    pub fn open(path: &Path, spans: &[Span], page_size: usize) -> Result<Self, Error> {
        let (file, direct) = match open(path, OpenOptions::new().read(true).write(true)) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Err(Error::Missing(path.into())),
            other => other.map_err(io_error(path, "open"))?,
        };
        lock(&file, path)?;
        let found = read_head(&file, path)?;
        let layout = |what, found: String, wanted: String| Error::OtherLayout {
            path: path.into(),
            what,
            found,
            wanted,
        };
        if found.page_size != page_size as u64 {
            return Err(layout("page size", found.page_size.to_string(), page_size.to_string()));
        }
        let show = |spans: &[Span]| {
            let text: Vec<_> = spans.iter().map(|s| format!("{} bytes at {:#x}", s.len, s.base)).collect();
            text.join(", ")
        };
        if found.spans != spans {
            return Err(layout("memory", show(&found.spans), show(spans)));
        }
        let places = Places::new(page_count(spans));
        let size = file.metadata().map_err(io_error(path, "stat"))?.len();
        if size < places.end() {
            return Err(Error::Damaged { path: path.into(), what: format!("the end (after byte {size})") });
        }
        let mut backing = Self::with(file, path, spans, direct, Writer::new());
        backing.sequence = backing.newest()?.map_or(0, |(sequence, _)| sequence);
        Ok(backing)
    }

    /// Sequence number and image of the newest checkpoint.
    fn newest(&self) -> Result<Option<(u64, usize)>, Error> {
        let mut newest = None;
        let mut block = Blocks::new(PAGE);
        for image in 0..2 {
            self.file
                .read_exact_at(&mut block, (1 + image) as u64 * PAGE as u64)
                .map_err(io_error(&self.path, "read a commit record"))?;
            let sequence = get(&block, 8);
            if block[..8] == *COMMIT && sealed(&block) && newest.is_none_or(|(s, _)| s < sequence) {
                newest = Some((sequence, image));
            }
        }
        Ok(newest)
    }

    /// Checks the newest checkpoint and copies it: `place(page number, contents)` takes each page. Nothing is placed
    /// before all of it was found whole.
    pub fn recover(&mut self, mut place: impl FnMut(usize, &[u8])) -> Result<u64, Error> {
        let Some((sequence, image)) = self.newest()? else {
            return Err(Error::NoCheckpoint(self.path.clone()));
        };
        let count = page_count(&self.spans);
        let places = Places::new(count);
        let (mut table, mut record) = (Blocks::new(count * 4), Blocks::new(PAGE));
        let error = || io_error(&self.path, "read");
        self.file.read_exact_at(&mut record, (1 + image) as u64 * PAGE as u64).map_err(error())?;
        self.file.read_exact_at(&mut table, places.table(image)).map_err(error())?;
        let damaged = |what: String| Error::Damaged { path: self.path.clone(), what };
        if get(&record, 16) != u64::from(crc32fast::hash(&table)) {
            return Err(damaged(format!("the table of checkpoint {sequence}")));
        }
        let mut buffer = Blocks::new(1 << 20);
        for check in [true, false] {
            let mut page = 0;
            while page < count {
                let some = (count - page).min(buffer.len() / PAGE);
                let bytes = &mut buffer[..some * PAGE];
                self.file.read_exact_at(bytes, places.image(image) + (page * PAGE) as u64).map_err(error())?;
                for (i, bytes) in bytes.chunks_exact(PAGE).enumerate() {
                    // The second reading is checked, too: a medium may answer differently.
                    if crc32fast::hash(bytes).to_le_bytes() != table[4 * (page + i)..][..4] {
                        return Err(damaged(format!("page {} of checkpoint {sequence}", page + i)));
                    }
                    if !check {
                        place(page + i, bytes);
                    }
                }
                page += some;
            }
        }
        self.images[image].table.copy_from_slice(&table);
        self.images[image].stale = Pages::new(count, false);
        self.sequence = sequence;
        Ok(sequence)
    }

    /// Writes the next checkpoint: the changed pages, and those by which the image was behind. Durable when it returns.
    /// Returns bytes written.
    ///
    /// # Safety
    /// `source(page number)` is the address of that page's contents, which nobody changes meanwhile.
    pub unsafe fn commit(&mut self, changed: &Pages, source: impl Fn(usize) -> usize) -> Result<u64, Error> {
        self.images.iter_mut().for_each(|i| i.stale.join(changed));
        let sequence = self.sequence + 1;
        let number = (sequence % 2) as usize;
        // SAFETY: as the caller promises.
        let result = unsafe { self.write_image(sequence, number, &source) };
        let count = page_count(&self.spans);
        // What a failed write left there is not known.
        self.images[number].stale = Pages::new(count, result.is_err());
        if result.is_ok() {
            self.sequence = sequence;
        }
        result.map_err(io_error(&self.path, "write a checkpoint"))
    }

    /// # Safety
    /// As [`Backing::commit`].
    unsafe fn write_image(
        &mut self,
        sequence: u64,
        number: usize,
        source: &impl Fn(usize) -> usize,
    ) -> io::Result<u64> {
        let count = page_count(&self.spans);
        let places = Places::new(count);
        let image = &mut self.images[number];
        let mut writes: Vec<Write> = Vec::new();
        let mut blocks = Pages::new(image.table.len() / PAGE, image.stale.count() == count);
        for page in image.stale.iter() {
            let from = source(page);
            // SAFETY: a page, as the caller promises.
            let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, PAGE) };
            image.table[4 * page..][..4].copy_from_slice(&crc32fast::hash(bytes).to_le_bytes());
            blocks.add(4 * page / PAGE);
            let at = places.image(number) + (page * PAGE) as u64;
            match writes.last_mut() {
                Some(w) if w.from + w.len == from && w.at + w.len as u64 == at => w.len += PAGE,
                _ => writes.push(Write { from, len: PAGE, at }),
            }
        }
        for block in blocks.iter() {
            let at = places.table(number) + (block * PAGE) as u64;
            writes.push(Write { from: image.table.as_ptr() as usize + block * PAGE, len: PAGE, at });
        }
        let bytes: usize = writes.iter().map(|w| w.len).sum::<usize>() + PAGE;
        // SAFETY: pages as the caller promises; the table is ours.
        unsafe { self.writer.write(&self.file, &writes)? };
        self.record.fill(0);
        self.record[..8].copy_from_slice(COMMIT);
        put(&mut self.record, 8, sequence);
        put(&mut self.record, 16, u64::from(crc32fast::hash(&image.table)));
        seal(&mut self.record);
        self.file.write_all_at(&self.record, (1 + number) as u64 * PAGE as u64)?;
        self.file.sync_data()?;
        Ok(bytes as u64)
    }
}

/// A complete checkpoint, read without being mapped.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its sequence number.
    pub sequence: u64,
    /// Addresses and contents of what was mirrored; the region comes first.
    pub contents: Vec<(usize, Vec<u8>)>,
}

impl Checkpoint {
    /// Reads and checks the newest complete one of a backing file, which may be in use.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(io_error(path, "open"))?;
        let spans = read_head(&file, path)?.spans;
        let mut backing = Backing::with(file, path, &spans, false, Writer::Plain);
        let mut all = Vec::with_capacity(page_count(&spans) * PAGE);
        let sequence = backing.recover(|_, page| all.extend_from_slice(page))?;
        let mut rest = all.as_slice();
        let mut contents = Vec::new();
        for span in spans {
            let (own, others) = rest.split_at(span.len);
            contents.push((span.base, own.to_vec()));
            rest = others;
        }
        Ok(Checkpoint { sequence, contents })
    }

    /// Bytes at an address; `None` if they are not in it.
    pub fn bytes(&self, address: usize, len: usize) -> Option<&[u8]> {
        self.contents.iter().find_map(|(base, bytes)| {
            let from = address.checked_sub(*base)?;
            bytes.get(from..from.checked_add(len)?)
        })
    }
}

struct Head {
    page_size: u64,
    spans: Vec<Span>,
}

fn read_head(file: &File, path: &Path) -> Result<Head, Error> {
    let not = |what: &str| Error::NotABacking { path: path.into(), what: what.into() };
    let mut head = Blocks::new(PAGE);
    match file.read_exact_at(&mut head, 0) {
        Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(not("too short for a backing file"));
        }
        other => other.map_err(io_error(path, "read"))?,
    }
    if head[..8] != *MAGIC {
        return Err(not("not a backing file of a mirror"));
    }
    let version = get(&head, 8);
    if version != u64::from(VERSION) {
        return Err(not(&format!("format {version}; this library knows {VERSION}")));
    }
    let count = get(&head, 24) as usize;
    if !sealed(&head) || count > MOST_SPANS {
        return Err(Error::Damaged { path: path.into(), what: "the first block".into() });
    }
    let span =
        |i: usize| Span { base: get(&head, 64 + 16 * i) as usize, len: get(&head, 72 + 16 * i) as usize };
    Ok(Head { page_size: get(&head, 16), spans: (0..count).map(span).collect() })
}
