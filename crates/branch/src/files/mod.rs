//! Files that a program can write to: what they are at a snapshot, what has become of them since, and how they become that again.
//!
//! Nothing of them is remembered but what tells whether they are the same: sizes, times, and a digest of what is in them ([`Digests`]).
//! So a file that has only grown can be cut back ([`cuts`]), and of all others it can be told what has happened to them ([`changes`]).
//! What can be written through a shared mapping, where times tell little, is remembered itself, as far as it is little.

mod changes;
mod cuts;
mod seen;
mod systems;

pub use changes::{Changed, Fate, How};
pub use cuts::{Keep, Plan};
pub use systems::Systems;

use crate::Result;
use crate::descriptors::Table;
use rustix::fs::{Mode, OFlags};
use seen::{Clock, Identity, Instant, Seen, Stamp, now_ns};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stillpoint_capture::Builder;
use stillpoint_capture::files::{Moment, Noticed, note_open, take_digests_of};
use stillpoint_image::{Backing, Image, Mapping, PathFile, Range, Usage};
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::{Error as Kernel, digest, silent};

/// So much is read of all files while the program stands still, bytes: what is more has no digest, unless it was at rest before.
const READ_AT_REST: u64 = 4 << 20;
/// So much of what can be written through mappings is remembered at each snapshot, bytes.
const MOST_MAPPED: u64 = 16 << 20;
/// So much is read of all files before, while it runs, bytes.
const READ_AHEAD: u64 = digest::WHOLE;
/// A file that has not changed for so long is read ahead, nanoseconds.
const AT_REST_NS: i64 = 1_000_000_000;

/// A process at rest, as far as it is about files.
#[derive(Clone, Copy, Debug)]
pub struct Holder<'a> {
    /// Its id.
    pub pid: u32,
    /// What it has open.
    pub table: &'a Table,
    /// It, as it was described.
    pub image: &'a Image,
    /// Its mappings.
    pub maps: &'a [Vma],
}

/// BLAKE3.
type Digest = [u8; 32];

/// What is in some ranges of a file.
type Kept = Vec<(Range, Vec<u8>)>;

/// A file that a program at rest can write to.
#[derive(Clone, Debug)]
struct Writable {
    /// What the kernel calls it.
    name: Vec<u8>,
    /// Where its name begins, as seen from here.
    root: PathBuf,
    /// Leads to it, whatever its name is.
    way: PathBuf,
    seen: Seen,
    /// What of it can be written through mappings, ascending.
    mapped: Vec<Range>,
    /// What of it goes back with memory, ascending.
    memory: Vec<Range>,
}

/// A file as it was at a snapshot.
#[derive(Clone, Debug)]
struct Noted {
    file: Writable,
    /// Of its contents but for what is kept; none if that would have taken too long.
    digest: Option<Digest>,
    /// What could be written through mappings; none if it was too much. Snapshots have it in common as long as it is the same.
    kept: Option<Arc<Kept>>,
}

/// The files that a program could write to at a snapshot.
#[derive(Debug, Default)]
pub struct Files {
    all: Vec<Noted>,
    /// The names of those that could not be looked at.
    unseen: Vec<Vec<u8>>,
    at: Instant,
}

impl Writable {
    /// Its name, as seen from here.
    fn path(&self) -> PathBuf {
        below(&self.root, &self.name)
    }

    /// Ranges that end where the file does.
    fn within(&self, ranges: &[Range]) -> Vec<Range> {
        let all = [Range { start: 0, len: self.seen.stamp.size }];
        ranges.iter().flat_map(|range| range.parts_of(&all)).collect()
    }

    /// Whether all that is in it goes back with memory.
    fn is_memory(&self) -> bool {
        let all = Range { start: 0, len: self.seen.stamp.size };
        !self.memory.is_empty() && Range::without(&[all], &self.memory).is_empty()
    }

    /// Whether whoever changes it after this look changes its times too.
    fn would_show_changes(&self) -> bool {
        self.mapped.is_empty() && self.seen.would_show_changes()
    }

    /// Whether so much of it can be read at once, and nobody else has to be waited for.
    fn may_be_read(&self, size: u64) -> bool {
        self.seen.clock != Clock::Foreign && size <= digest::WHOLE
    }

    /// Opens it, if what its way leads to is the file that was seen: a name may lead elsewhere by now, and to what is not to be opened.
    fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        let failed = |e: rustix::io::Errno| Kernel::file(self.path(), e);
        // This opens nothing: neither device nor FIFO hears of it, and nobody is waited for.
        let place =
            rustix::fs::open(&self.way, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        if self.seen.again_of(&place)?.identity != self.seen.identity {
            return Err(Kernel::file(self.path(), rustix::io::Errno::STALE).into());
        }
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
        let way = format!("/proc/self/fd/{}", place.as_raw_fd());
        match flags.contains(OFlags::RDWR) {
            true => Ok(rustix::fs::open(&way, flags | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?),
            false => Ok(silent::open(&way, flags)?),
        }
    }

    /// Digest of what is in its first bytes but in these ranges; none if it cannot be told without being noticed, or waited for.
    fn digest(&self, size: u64, but: &[Range], noticed: &Noticed) -> Option<Digest> {
        if !self.may_be_read(size) || noticed.is(&self.path(), self.seen.identity.inode) {
            return None;
        }
        let file = self.open(OFlags::RDONLY).ok()?;
        let skip: Vec<(u64, u64)> = but.iter().map(|range| (range.start, range.len)).collect();
        digest::digest(&file, size, &skip).ok().map(|(digest, _)| digest)
    }

    /// What is in some ranges of it; none if it cannot be told so.
    fn contents(&self, ranges: &[Range], noticed: &Noticed) -> Option<Kept> {
        if self.seen.clock == Clock::Foreign || noticed.is(&self.path(), self.seen.identity.inode) {
            return None;
        }
        let file = self.open(OFlags::RDONLY).ok()?;
        let read = |range: &Range| {
            let mut bytes = vec![0; range.len as usize];
            digest::read_at(&file, range.start, &mut bytes).ok()?;
            Some((*range, bytes))
        };
        ranges.iter().map(read).collect()
    }
}

/// A path in a root directory.
fn below(root: &Path, path: &[u8]) -> PathBuf {
    root.join(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(path)))
}

/// Where names begin that the kernel tells us of what a process has open. In our mount namespace they are told from our root, whatever
/// root directory the process has; in another one from the root of that.
fn root_of_names(pid: u32) -> PathBuf {
    let namespace = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/mnt")).ok();
    match namespace("self") == namespace(&pid.to_string()) {
        true => PathBuf::from("/"),
        false => PathBuf::from(format!("/proc/{pid}/root")),
    }
}

/// The way to what is open under a number.
fn way_to(pid: u32, fd: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/fd/{fd}"))
}

/// What processes would notice.
fn noticed(holders: &[Holder<'_>]) -> Noticed {
    let mut noticed = Noticed::default();
    let held = holders.iter().flat_map(|holder| holder.table.held.values());
    held.for_each(|held| noticed.add_open(&held.info, held.identity));
    noticed
}

/// Files that processes can write to.
#[derive(Debug, Default)]
struct Found {
    all: Vec<Writable>,
    /// The names of those that cannot be looked at, as who serves them is no more: that is no reason to do nothing else.
    unseen: Vec<Vec<u8>>,
}

/// All files that processes can write to, through descriptors or mappings: each once, however many have it.
fn writable(holders: &[Holder<'_>], systems: &Systems) -> Found {
    let mut systems = systems.clone();
    systems.note(holders);
    let (mut all, mut unseen) = (BTreeMap::new(), Vec::new());
    for holder in holders {
        let root = root_of_names(holder.pid);
        for (&fd, held) in holder.table.held.iter().filter(|(_, held)| held.is_file() && held.writes()) {
            let Entry::Vacant(place) = all.entry(held.identity) else { continue };
            match Writable::new(&held.link, &root, way_to(holder.pid, fd), &systems) {
                Ok(file) if file.seen.is_view => {}
                Ok(file) => drop(place.insert(file)),
                Err(_) => unseen.push(held.link.clone()),
            }
        }
        let mappings = holder.image.spaces.iter().flat_map(|space| &space.mappings);
        for mapping in mappings.filter(|mapping| mapping.shared) {
            if let Err(name) = holder.add_mapping(mapping, &root, &systems, &mut all) {
                unseen.push(name);
            }
        }
    }
    for file in all.values_mut() {
        file.mapped = Range::joined(std::mem::take(&mut file.mapped));
        file.memory = Range::joined(std::mem::take(&mut file.memory));
    }
    unseen.sort_unstable();
    unseen.dedup();
    Found { all: all.into_values().collect(), unseen }
}

impl Writable {
    fn new(name: &[u8], root: &Path, way: PathBuf, systems: &Systems) -> Result<Self> {
        let seen = Seen::at(&way, systems)?;
        let (name, root) = (name.to_vec(), root.to_owned());
        Ok(Writable { name, root, way, seen, mapped: Vec::new(), memory: Vec::new() })
    }
}

impl Holder<'_> {
    /// Adds what can be written through a shared mapping, be it after `mprotect(2)`: where a page has been written before, that takes no
    /// fault, and changes no time of the file. What goes back with memory is no file, unless it is open, too.
    ///
    /// # Errors
    /// The name of a file that cannot be looked at.
    fn add_mapping(
        &self,
        mapping: &Mapping,
        root: &Path,
        systems: &Systems,
        all: &mut BTreeMap<(u64, u64), Writable>,
    ) -> Result<(), Vec<u8>> {
        let after = self.maps.partition_point(|vma| vma.end <= mapping.start);
        let Some(vma) = self.maps.get(after).filter(|vma| vma.start <= mapping.start) else { return Ok(()) };
        let is_writable = mapping.prot & libc::PROT_WRITE as u32 != 0;
        let file = match &mapping.backing {
            Backing::File { path, may_write: true, .. } => self.image.paths.get(*path as usize),
            Backing::Object { .. } => None,
            _ => return Ok(()),
        };
        let range = Range { start: vma.offset + (mapping.start - vma.start), len: mapping.len() };
        match file.filter(|file| !file.is_memory()) {
            None if !is_writable => {}
            None => {
                let inode = file.map_or((vma.dev, vma.ino), |file| (file.dev, file.ino));
                all.get_mut(&inode).into_iter().for_each(|file| file.memory.push(range));
            }
            Some(file) => {
                let known = match all.entry((file.dev, file.ino)) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(place) => {
                        let way = PathBuf::from(format!("/proc/{}/{}", self.pid, vma.link_name()));
                        let name = std::fs::read_link(&way).map_err(|_| file.path.0.clone())?;
                        let name = name.as_os_str().as_bytes();
                        place.insert(Writable::new(name, root, way, systems).map_err(|_| name.to_vec())?)
                    }
                };
                known.mapped.push(range);
            }
        }
        Ok(())
    }
}

/// Digests of files from one snapshot to the next: what has not changed is not read again.
#[derive(Debug)]
pub struct Digests {
    known: HashMap<Identity, (Stamp, Digest)>,
    /// What could be written through mappings at the last snapshot.
    kept: HashMap<Identity, Arc<Kept>>,
    /// The mounts of the program, as they were before it was stopped.
    systems: Systems,
    /// Whether a file may have had none at the last snapshot, though there could be one.
    is_any_missing: bool,
}

impl Default for Digests {
    fn default() -> Self {
        Digests {
            known: HashMap::new(),
            kept: HashMap::new(),
            systems: Systems::default(),
            is_any_missing: true,
        }
    }
}

impl Digests {
    /// Reads files that processes can write to while they run, if these have been at rest for a while.
    pub fn look_ahead(&mut self, pids: &[u32]) {
        self.systems = Systems::learn(pids);
        if !self.is_any_missing {
            return;
        }
        let mut builder = Builder::new();
        // One that ends meanwhile has nothing open.
        pids.iter().for_each(|pid| drop(note_open(&mut builder, *pid)));
        // What is written through a mapping may not show in the times of a file.
        let mapped = mapped_by(pids);
        let mut files: Vec<&mut PathFile> = builder.image.paths.iter_mut().collect();
        files.sort_by_key(|file| file.size);
        let mut left = READ_AHEAD;
        for file in files {
            if mapped.contains(&file.ino) || file.size > left || !self.is_to_be_read_ahead(file) {
                file.usage = Usage::Path;
            } else if file.usage == Usage::Write {
                left -= file.size;
            }
        }
        take_digests_of(&mut builder, Usage::Write, Moment::Running);
        for file in &builder.image.paths {
            let digest = file.digest.as_ref().and_then(|digest| digest.blake3.0.as_slice().try_into().ok());
            let seen = still_the_same(file, &self.systems).filter(Seen::would_show_changes);
            if let (Some(digest), Some(seen)) = (digest, seen) {
                self.known.insert(seen.identity, (seen.stamp, digest));
            }
        }
    }

    fn is_to_be_read_ahead(&self, file: &PathFile) -> bool {
        let is_at_rest = now_ns() - file.ctime_ns.max(file.mtime_ns) > AT_REST_NS;
        let seen = still_the_same(file, &self.systems).filter(|seen| seen.clock != Clock::Foreign);
        let is_known =
            |seen: &Seen| self.known.get(&seen.identity).is_some_and(|(then, _)| *then == seen.stamp);
        is_at_rest && seen.is_some_and(|seen| !is_known(&seen))
    }

    /// Notes the files of a program at rest.
    pub fn note(&mut self, holders: &[Holder<'_>]) -> Files {
        let found = writable(holders, &self.systems);
        Files { unseen: found.unseen, ..self.note_all(found.all, &noticed(holders)) }
    }

    /// A file is what it was at a snapshot again, though it has other times.
    fn note_return(&mut self, noted: &mut Noted, seen: Seen) {
        noted.file.seen = seen;
        if let Some(digest) = noted.digest.filter(|_| noted.file.would_show_changes()) {
            self.known.insert(seen.identity, (seen.stamp, digest));
        }
    }

    fn note_all(&mut self, mut files: Vec<Writable>, noticed: &Noticed) -> Files {
        // As many as possible.
        files.sort_by_key(|file| file.seen.stamp.size);
        let (before, mut kept_before) = (std::mem::take(&mut self.known), std::mem::take(&mut self.kept));
        let (mut left, mut room) = (READ_AT_REST, MOST_MAPPED);
        self.is_any_missing = false;
        let all = files.into_iter().map(|file| {
            let Seen { identity, stamp, .. } = file.seen;
            let kept = keep(&file, &mut room, noticed).map(|kept| {
                let same = kept_before.remove(&identity).filter(|before| **before == kept);
                same.unwrap_or_else(|| Arc::new(kept))
            });
            if let Some(kept) = kept.as_ref().filter(|kept| !kept.is_empty()) {
                self.kept.insert(identity, Arc::clone(kept));
            }
            let known = before.get(&identity).filter(|(then, _)| *then == stamp && file.mapped.is_empty());
            let digest = match known {
                Some((_, digest)) => Some(*digest),
                None if stamp.size > left => {
                    self.is_any_missing |= file.may_be_read(stamp.size) && file.mapped.is_empty();
                    None
                }
                None => {
                    left -= stamp.size;
                    file.digest(stamp.size, &ranges(&kept), noticed)
                }
            };
            if let Some(digest) = digest.filter(|_| file.would_show_changes()) {
                self.known.insert(identity, (stamp, digest));
            }
            Noted { file, digest, kept }
        });
        Files { all: all.collect(), unseen: Vec::new(), at: Instant::now() }
    }
}

/// What a path leads to, if that is what was described, and has not changed since.
fn still_the_same(file: &PathFile, systems: &Systems) -> Option<Seen> {
    let stamp = Stamp { size: file.size, mtime_ns: file.mtime_ns, ctime_ns: file.ctime_ns };
    let seen = Seen::at(file.path.as_path(), systems).ok()?;
    (seen.stamp == stamp && seen.identity.inode == (file.dev, file.ino)).then_some(seen)
}

/// Inode numbers of files that running processes have shared mappings of.
fn mapped_by(pids: &[u32]) -> HashSet<u64> {
    let maps = |pid: &u32| Proc::process(*pid).and_then(|process| process.maps()).unwrap_or_default();
    pids.iter().flat_map(maps).filter(|vma| vma.shared).map(|vma| vma.ino).collect()
}

/// What can be written to a file through mappings, if there is room for it.
fn keep(file: &Writable, room: &mut u64, noticed: &Noticed) -> Option<Kept> {
    let mapped = file.within(&file.mapped);
    let len: u64 = mapped.iter().map(|range| range.len).sum();
    *room = room.checked_sub(len)?;
    match mapped.is_empty() {
        true => Some(Vec::new()),
        false => file.contents(&mapped, noticed),
    }
}

/// Where that was.
fn ranges(kept: &Option<Arc<Kept>>) -> Vec<Range> {
    kept.iter().flat_map(|kept| kept.iter()).map(|(range, _)| *range).collect()
}
