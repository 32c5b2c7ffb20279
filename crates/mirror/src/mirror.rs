//! A mirror: a region, further memory beside it, an allocator, and the checkpointer that serves them.
#![allow(unsafe_code)]

use crate::backing::{Backing, MOST_SPANS};
use crate::barrier;
use crate::cycle::{Aside, Completed, Cycle, Object, Phase, Shared, Stats, Switch};
use crate::error::Error;
use crate::heap::{Heap, LEAST};
use crate::layout::{self, ATTACHED, DETACHED, MOST, PAGE, REGION, STATES, Span, card};
use crate::threads;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pages that the region and its shadow are mapped with. Dirtiness is told in pages of 4 KiB either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageSize {
    /// 4 KiB.
    #[default]
    Small,
    /// 2 MiB: from the pool (`vm.nr_hugepages`) if it has enough, else transparent ones as far as the kernel has them;
    /// [`Mirror::notes`] tells which.
    Huge,
}

/// Where checkpoints go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: cycles without writing, to measure and to test.
    #[default]
    Nowhere,
    /// A file of its own.
    File(PathBuf),
    /// A name within a store's directory: the file is `STORE/mirrors/NAME`.
    Store {
        /// The store's directory.
        directory: PathBuf,
        /// The mirror's name.
        name: String,
    },
}

impl Place {
    fn path(&self) -> Option<PathBuf> {
        match self {
            Place::Nowhere => None,
            Place::File(path) => Some(path.clone()),
            Place::Store { directory, name } => Some(directory.join("mirrors").join(name)),
        }
    }
}

/// How a mirror is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the region: the allocator's memory. Rounded up to whole pages.
    pub size: usize,
    /// Where checkpoints go.
    pub place: Place,
    /// Pages of the region.
    pub page_size: PageSize,
    /// How the mirror is detached.
    pub switch: Switch,
    /// Address of the region; 0 for the usual one. It must be the same for a recovery.
    pub base: usize,
    /// Further memory to be mirrored, such as global variables: address and bytes. Whole pages around it are followed and
    /// written; exactly these bytes are recovered.
    pub beside: Vec<(usize, usize)>,
    /// Locks region and shadow into memory; without the right to, [`Mirror::notes`] says so.
    pub lock: bool,
    /// Nice value of the checkpointer's thread.
    pub nice: i32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            size: 64 << 20,
            place: Place::Nowhere,
            page_size: PageSize::Small,
            switch: Switch::Offset,
            base: 0,
            beside: Vec::new(),
            lock: false,
            nice: 19,
        }
    }
}

/// Whether this process has a mirror.
static OPEN: AtomicBool = AtomicBool::new(false);

struct Opening;
impl Drop for Opening {
    fn drop(&mut self) {
        OPEN.store(false, Ordering::SeqCst);
    }
}

/// Mappings of ours; they go when this does.
#[derive(Default)]
struct Mappings(Vec<(usize, usize)>);

impl Drop for Mappings {
    fn drop(&mut self) {
        for (address, len) in &self.0 {
            // SAFETY: mapped by us; whoever drops a mirror has promised that nobody uses its memory any more.
            unsafe { layout::unmap(*address, *len) };
        }
    }
}

/// Mirrored memory and its checkpointer. There is one in a process: all mirrored memory is cut at one instant.
pub struct Mirror {
    shared: Arc<Shared>,
    heap: Heap,
    thread: Option<JoinHandle<Option<Backing>>>,
    recovered: Option<u64>,
    /// What is recovered: the region and what lies beside it, to the byte.
    wanted: Vec<(usize, usize)>,
    notes: Vec<String>,
    opened: Instant,
    // In this order: mappings go before the next mirror may come.
    _mappings: Mappings,
    _opening: Opening,
}

enum Way {
    Create,
    Recover,
    Either,
}

impl Mirror {
    /// Makes a new one; the region is zeros. Fails if the backing file exists.
    pub fn create(options: &Options) -> Result<Self, Error> {
        Self::open_by(options, Way::Create)
    }

    /// Brings the last complete checkpoint back, at the same addresses. Fails without a backing file or checkpoint.
    pub fn recover(options: &Options) -> Result<Self, Error> {
        Self::open_by(options, Way::Recover)
    }

    /// Recovers if there is a complete checkpoint, else begins anew; [`Mirror::recovered`] tells which.
    pub fn open(options: &Options) -> Result<Self, Error> {
        Self::open_by(options, Way::Either)
    }

    fn open_by(options: &Options, way: Way) -> Result<Self, Error> {
        let size = checked_size(options)?;
        if OPEN.swap(true, Ordering::SeqCst) {
            return Err(Error::AlreadyOpen);
        }
        let opening = Opening;
        let region = Span { base: if options.base == 0 { REGION } else { options.base }, len: size };
        let spans = spans(region, &options.beside)?;
        threads::prepare()?;
        threads::register();
        layout::map_tables()?;
        let (mut backing, old) = open_backing(options, &spans, &way)?;
        let mut notes = Vec::new();
        let mut mappings = Mappings::default();
        let aside = map_all(options, &spans, &mut mappings, &mut notes)?;
        let own = std::iter::once((region.base, region.len));
        let wanted: Vec<_> = own.chain(options.beside.iter().copied()).collect();
        let mut recovered = None;
        if let (Some(backing), true) = (&mut backing, old) {
            recovered = restore(backing, &spans, &wanted, &way)?;
        }
        if let Some(backing) = &backing {
            if !backing.asynchronous() {
                notes.push("io_uring is not to be had here: writes are made one after the other".into());
            }
            if !backing.direct {
                notes.push("the file system takes no direct writes: they go through the page cache".into());
            }
        }
        lock_memory(options, &spans, &mut notes);
        barrier::REMAPS.store(u8::from(options.switch == Switch::Remap), Ordering::SeqCst);
        attach(&spans, recovered.is_none());
        let heap = Heap::new(region);
        if recovered.is_none() {
            // SAFETY: mapped just now.
            unsafe { heap.format() };
        }
        let shared = Arc::new(Shared::new(spans, options.switch));
        let thread = start(&shared, backing, recovered.is_none(), aside, options.nice)?;
        Ok(Mirror {
            shared,
            heap,
            thread: Some(thread),
            recovered,
            wanted,
            notes,
            opened: Instant::now(),
            _mappings: mappings,
            _opening: opening,
        })
    }

    /// Sequence number of the checkpoint that was recovered.
    pub fn recovered(&self) -> Option<u64> {
        self.recovered
    }

    /// What was asked for and is done otherwise, such as huge pages that there are not.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The region: address and bytes.
    pub fn region(&self) -> (usize, usize) {
        (self.shared.spans[0].base, self.shared.spans[0].len)
    }

    /// The region's allocator.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Memory for a value of a type, and its first value.
    ///
    /// `None` if there is no room.
    pub fn put<T: Copy>(&self, value: T) -> Option<*mut T> {
        let at = self.heap.alloc(size_of::<T>(), align_of::<T>())? as *mut T;
        // SAFETY: a block of that size and alignment that nobody else has.
        unsafe { barrier::store(at, value) };
        Some(at)
    }

    /// Begins a checkpoint: this moment is the instant that it holds. Returns at once, with a number to be waited for;
    /// [`Error::InProgress`] if the last one has not come to its end.
    pub fn checkpoint(&self) -> Result<u64, Error> {
        self.shared.begin()
    }

    /// Waits until a checkpoint has come to its end; what [`Mirror::stats`] tells as `last_error` is why it failed.
    pub fn wait(&self, number: u64) -> Result<(), Error> {
        self.shared.wait(number)
    }

    /// Takes a checkpoint as soon as the last one is over and waits until it is durable. Returns bytes written.
    pub fn checkpoint_now(&self) -> Result<u64, String> {
        loop {
            match self.checkpoint() {
                Ok(number) => {
                    self.wait(number).map_err(|e| e.to_string())?;
                    let stats = self.stats();
                    return stats.last_error.map_or(Ok(stats.last_bytes), Err);
                }
                Err(Error::InProgress) => std::thread::sleep(Duration::from_micros(100)),
                Err(why) => return Err(why.to_string()),
            }
        }
    }

    /// Lets the checkpointer begin checkpoints by itself: one whenever so much time has passed since the last one began.
    pub fn every(&self, interval: Option<Duration>) {
        self.shared.every(interval);
    }

    /// Calls a function after each checkpoint, on the checkpointer's thread; it must not close the mirror.
    pub fn on_complete(&self, hook: impl FnMut(&Completed) + Send + 'static) {
        self.shared.hook(Box::new(hook));
    }

    /// What has been done so far.
    pub fn stats(&self) -> Stats {
        self.shared.stats(self.opened)
    }

    /// Bytes of the shadow that differ from the primary, without those that atomic instructions have met. Of meaning only
    /// while the mirror is attached and nobody stores: 0 then, or a store went by the barrier.
    pub fn differing(&self) -> usize {
        if self.shared.phase() != Phase::Attached {
            return 0;
        }
        let mut count = 0;
        for (base, len) in &self.wanted {
            for at in (base & !7..base + len).step_by(8) {
                // SAFETY: mirrored memory.
                let (primary, shadow) = unsafe {
                    (
                        layout::word(at).load(Ordering::Relaxed),
                        layout::word(at + ATTACHED).load(Ordering::Relaxed),
                    )
                };
                if primary != shadow {
                    // SAFETY: states of mirrored memory.
                    let states = unsafe { layout::states(at) }.load(Ordering::Relaxed).to_le_bytes();
                    let bytes =
                        primary.to_le_bytes().into_iter().zip(shadow.to_le_bytes()).zip(states).zip(at..);
                    let stale = |(((p, s), state), at): &(((u8, u8), u8), usize)| {
                        p != s && *state == 0 && (*base..base + len).contains(at)
                    };
                    count += bytes.filter(stale).count();
                }
            }
        }
        count
    }

    /// What `wait` and hooks use.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Mirror {
    /// Waits for the checkpoint in progress, then takes all mirrored memory away: nobody may use it any more. What lies
    /// beside the region stays.
    fn drop(&mut self) {
        self.shared.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        barrier::OFFSET.store(DETACHED, Ordering::SeqCst);
        for page in self.shared.spans.iter().copied().flat_map(Span::pages) {
            // SAFETY: the tables are mapped.
            unsafe {
                layout::card_of(page, ATTACHED).store(card::SKIP, Ordering::SeqCst);
                layout::card_of(page, DETACHED).store(card::SKIP, Ordering::SeqCst);
                layout::met(page).store(0, Ordering::SeqCst);
            }
        }
        // Stores beside the region may still be on their way to its shadow.
        let _ = threads::grace();
    }
}

const HUGE: usize = 2 << 20;

fn checked_size(options: &Options) -> Result<usize, Error> {
    if options.size < LEAST {
        return Err(Error::TooSmall { size: options.size, least: LEAST });
    }
    if options.size > MOST {
        return Err(Error::TooLarge { size: options.size, most: MOST });
    }
    Ok(options.size.next_multiple_of(if options.page_size == PageSize::Huge { HUGE } else { PAGE }))
}

/// The region, and the pages around what lies beside it; those that touch are one.
fn spans(region: Span, beside: &[(usize, usize)]) -> Result<Vec<Span>, Error> {
    let mut others: Vec<Span> = beside.iter().filter(|b| b.1 > 0).map(|b| Span::around(b.0, b.1)).collect();
    others.sort_by_key(|s| s.base);
    let mut spans = vec![region];
    for span in others {
        match spans[1..].last_mut() {
            Some(last) if span.base <= last.base + last.len => {
                last.len = last.len.max(span.base + span.len - last.base);
            }
            _ => spans.push(span),
        }
    }
    if spans.len() > MOST_SPANS {
        return Err(Error::TooLarge { size: spans.len(), most: MOST_SPANS });
    }
    Ok(spans)
}

/// The backing file, and whether it was there.
fn open_backing(options: &Options, spans: &[Span], way: &Way) -> Result<(Option<Backing>, bool), Error> {
    let Some(path) = options.place.path() else {
        return match way {
            Way::Recover => Err(Error::Missing(PathBuf::from("no place for checkpoints"))),
            _ => Ok((None, false)),
        };
    };
    if let Place::Store { directory, .. } = &options.place {
        let mirrors = directory.join("mirrors");
        let error = |why| Error::Io { path: mirrors.clone(), what: "create", why };
        std::fs::create_dir_all(&mirrors).map_err(error)?;
    }
    let size = if options.page_size == PageSize::Huge { HUGE } else { PAGE };
    let create = |path: &Path| Backing::create(path, spans, size).map(|b| (Some(b), false));
    match way {
        Way::Create => create(&path),
        Way::Either if !path.exists() => create(&path),
        _ => Backing::open(&path, spans, size).map(|b| (Some(b), true)),
    }
}

fn map_all(
    options: &Options,
    spans: &[Span],
    mappings: &mut Mappings,
    notes: &mut Vec<String>,
) -> Result<Vec<Aside>, Error> {
    let mut aside = Vec::new();
    let mut map = |address, len, what| -> Result<(), Error> {
        if options.page_size == PageSize::Huge && address % HUGE == 0 && len % HUGE == 0 {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let pool = libc::MAP_HUGETLB | libc::MAP_POPULATE;
            match layout::map(address, len, access, pool, what) {
                Err(Error::Map { why, .. }) => {
                    let note = format!(
                        "{what}: no huge pages from the pool ({why}): transparent ones are asked for"
                    );
                    notes.push(note);
                }
                other => {
                    other?;
                    mappings.0.push((address, len));
                    return Ok(());
                }
            }
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        layout::map(address, len, access, 0, what)?;
        mappings.0.push((address, len));
        populate(address, len, options.page_size == PageSize::Huge, what)
    };
    map(spans[0].base, spans[0].len, "the region")?;
    if options.switch == Switch::Offset {
        for span in spans {
            map(span.base + ATTACHED, span.len, "the shadow")?;
        }
    }
    if options.switch == Switch::Remap {
        for span in spans {
            let at = span.base + ATTACHED + (MOST << 1);
            let item = Aside { at, shadow: Object::new(span.len)?, dummy: Object::new(span.len)? };
            item.shadow.map(span.base + ATTACHED, span.len, false)?;
            mappings.0.push((span.base + ATTACHED, span.len));
            item.shadow.map(at, span.len, false)?;
            mappings.0.push((at, span.len));
            aside.push(item);
        }
    }
    for span in spans {
        // States become memory where atomic instructions are used.
        layout::map(span.base + STATES, span.len, libc::PROT_READ | libc::PROT_WRITE, 0, "states")?;
        mappings.0.push((span.base + STATES, span.len));
    }
    Ok(aside)
}

/// Brings all of a mapping into memory: writers take no faults.
fn populate(address: usize, len: usize, huge: bool, what: &'static str) -> Result<(), Error> {
    let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // SAFETY: a mapping of ours. Advice that the kernel does not know changes nothing.
    let failed = unsafe {
        libc::madvise(address as *mut libc::c_void, len, advice);
        libc::madvise(address as *mut libc::c_void, len, libc::MADV_POPULATE_WRITE) != 0
    };
    if failed {
        let why = std::io::Error::last_os_error();
        if why.raw_os_error() != Some(libc::EINVAL) {
            return Err(Error::Map { what, address, len, why });
        }
        for page in (address..address + len).step_by(PAGE) {
            // SAFETY: mapped just now, and zeros.
            unsafe { (page as *mut u8).write_volatile(0) };
        }
    }
    Ok(())
}

fn lock_memory(options: &Options, spans: &[Span], notes: &mut Vec<String>) {
    if !options.lock {
        return;
    }
    for span in spans {
        for at in [span.base, span.base + ATTACHED] {
            // SAFETY: mapped.
            if unsafe { libc::mlock(at as *const libc::c_void, span.len) } != 0 {
                let why = std::io::Error::last_os_error();
                notes.push(format!("{} bytes at {at:#x} are not locked into memory: {why}", span.len));
                return;
            }
        }
    }
}

/// Copies the newest checkpoint to where it was; `None` if there is none and that is well.
fn restore(
    backing: &mut Backing,
    spans: &[Span],
    wanted: &[(usize, usize)],
    way: &Way,
) -> Result<Option<u64>, Error> {
    let pages: Vec<usize> = spans.iter().copied().flat_map(Span::pages).collect();
    let place = |number: usize, contents: &[u8]| {
        let page = pages[number];
        for (base, len) in wanted {
            let (from, to) = (page.max(*base), (page + PAGE).min(base + len));
            if from < to {
                // SAFETY: mirrored memory that nobody uses yet.
                unsafe {
                    let source = contents[from - page..].as_ptr();
                    std::ptr::copy_nonoverlapping(source, from as *mut u8, to - from);
                }
            }
        }
    };
    match (backing.recover(place), way) {
        (Err(Error::NoCheckpoint(_)), Way::Either) => Ok(None),
        (result, _) => result.map(Some),
    }
}

/// Makes the shadow equal to the primary and lets stores go to both.
fn attach(spans: &[Span], fresh: bool) {
    for page in spans.iter().copied().flat_map(Span::pages) {
        // SAFETY: mapped; nobody stores here yet, but for globals, whose stores are not in two places before this.
        unsafe {
            let contents = std::slice::from_raw_parts(page as *const u64, PAGE / 8);
            if contents.iter().any(|w| *w != 0) {
                std::ptr::copy_nonoverlapping(page as *const u8, (page + ATTACHED) as *mut u8, PAGE);
            }
            let first = if fresh { card::HOT } else { card::FRESH_ATTACHED };
            layout::card_of(page, DETACHED).store(card::FRESH, Ordering::SeqCst);
            layout::card_of(page, ATTACHED).store(first, Ordering::SeqCst);
        }
    }
    barrier::OFFSET.store(ATTACHED, Ordering::SeqCst);
}

fn start(
    shared: &Arc<Shared>,
    backing: Option<Backing>,
    fresh: bool,
    aside: Vec<Aside>,
    nice: i32,
) -> Result<JoinHandle<Option<Backing>>, Error> {
    let shared = shared.clone();
    let body = move || {
        threads::register();
        // SAFETY: no pointers. Signals are for the program's own threads.
        unsafe {
            libc::setpriority(libc::PRIO_PROCESS, 0, nice);
            let mut all = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
        }
        Cycle::new(&shared, backing, fresh, aside).run()
    };
    std::thread::Builder::new().name("mirror".into()).spawn(body).map_err(Error::Thread)
}
