//! The image under construction: each kernel object gets one row, however many ways lead to it.

use crate::files::connections::Found;
use crate::files::memory::{data_ranges, whole};
use crate::files::noticed::{Noticed, WATCHED};
use crate::files::segments::Attached;
use crate::home::Home;
use crate::laps::Laps;
use crate::namespaces::Namespaces;
use crate::namespaces::tmpfs::open_below;
use crate::namespaces::views::Views;
use crate::{Error, Refusal, Result};
use rustix::fs::OFlags;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use stillpoint_image::{Image, MemoryObject, Owner, PathFile, Usage};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::sharing::Shared;
use stillpoint_linux::{Error as Kernel, RemoteAddr, digest, silent};

/// Contents that are read from a descriptor of ours (a deleted file, a memfd, shared memory) and stored as pages.
#[derive(Debug)]
pub struct Content {
    /// Whose pages they are.
    pub owner: Owner,
    /// Where to read them: offset in the file is the address of the page.
    pub source: Source,
    /// Byte ranges to read; if nothing is told, all that are not holes when it is stored.
    pub ranges: Option<Vec<stillpoint_image::Range>>,
    /// What it is, for error messages.
    pub what: String,
}

/// What can be done about what the kernel opens, or tells, to the privileged alone.
pub(crate) const AS_PRIVILEGED: &str = "do it as root, or give stillpoint CAP_CHECKPOINT_RESTORE";

/// Why a file is refused whose contents are part of the checkpoint, and what can be done.
const FORBIDDEN: (&str, &str) = (
    "its contents are for others to read, and the program has it open for writing alone",
    "ask for it as root, or let it be readable",
);

/// Where contents are read.
#[derive(Debug)]
pub enum Source {
    /// In an open file.
    File(OwnedFd),
    /// In a file that the program watches, or that we may not open, by a mapping of this duplicate of a description of its own, whose
    /// position is not ours.
    Watched(OwnedFd),
    /// In a file below a directory: there may be more of them than files can be open.
    Below(Arc<OwnedFd>, Vec<u8>),
    /// In the memory of processes that have it mapped, where the kernel opens what is behind a mapping for the privileged alone.
    Mapped(Arc<Vec<Span>>),
}

/// A part of an object, and where a process has it mapped.
#[derive(Clone, Debug)]
pub struct Span {
    /// In the object.
    pub range: stillpoint_image::Range,
    /// In the process.
    pub address: u64,
    /// The memory of the process.
    pub memory: Arc<Memory>,
    /// What of it the process has in its page tables: that is certainly there.
    pub present: Vec<stillpoint_image::Range>,
    /// It is in no file: what is not in memory, or swapped out, is nowhere.
    pub is_memory: bool,
}

impl Source {
    /// Of an open file that has no name, or none that we would open, by any descriptor of it: by a description of our own, or unnoticed.
    /// If neither can be had, `what` is refused: unnoticed, or without permission, it takes one of the program's own that is open for reading.
    ///
    /// # Errors
    /// That it cannot be opened.
    pub(crate) fn of(
        builder: &mut Builder,
        file: impl AsFd,
        is_noticed: bool,
        what: &str,
    ) -> Result<Option<Self>> {
        if !is_noticed {
            match silent::reopen(&file) {
                Err(e) if e.errno() == Some(libc::EACCES) => {}
                opened => return Ok(Some(Source::File(opened?))),
            }
        }
        let failed = |e| Kernel::call("look at a descriptor", e);
        let flags = rustix::fs::fcntl_getfl(&file).map_err(|e| failed(e.into()))?;
        if flags.contains(OFlags::PATH) || flags & OFlags::ACCMODE == OFlags::WRONLY {
            let (why, hint) = if is_noticed { WATCHED } else { FORBIDDEN };
            builder.refuse(what, why, hint);
            return Ok(None);
        }
        Ok(Some(Source::Watched(file.as_fd().try_clone_to_owned().map_err(failed)?)))
    }

    /// Opens it for reading.
    ///
    /// # Errors
    /// That it cannot be opened.
    pub fn open(&self) -> Result<Opened> {
        let duplicate =
            |file: &OwnedFd| file.try_clone().map_err(|e| Kernel::call("duplicate a descriptor", e));
        Ok(match self {
            Source::File(file) => Opened::File(duplicate(file)?),
            Source::Watched(file) => Opened::Watched(duplicate(file)?),
            Source::Below(folder, path) => Opened::File(open_below(folder, path)?),
            Source::Mapped(spans) => Opened::Mapped(spans.clone()),
        })
    }
}

/// A [`Source`] that is open.
#[derive(Debug)]
pub enum Opened {
    /// A description of our own.
    File(OwnedFd),
    /// One of the program's.
    Watched(OwnedFd),
    /// Memory of processes.
    Mapped(Arc<Vec<Span>>),
}

impl Opened {
    /// Reads at an offset; what is behind the end of the file is zero.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> stillpoint_linux::Result<()> {
        match self {
            Opened::File(file) => digest::read_at(file, offset, buffer),
            Opened::Watched(file) => silent::read_at(file, offset, buffer),
            Opened::Mapped(spans) => read_mapped(spans, offset, buffer),
        }
    }
}

/// Reads pages of an object where processes have them mapped.
fn read_mapped(spans: &[Span], offset: u64, buffer: &mut [u8]) -> stillpoint_linux::Result<()> {
    let (mut at, end) = (offset, offset + buffer.len() as u64);
    while at < end {
        let span = spans.iter().find(|span| (span.range.start..span.range.end()).contains(&at));
        let span = span.ok_or_else(|| Kernel::Other(format!("nobody has {at:#x} of it mapped")))?;
        let until = span.range.end().min(end);
        let part = &mut buffer[(at - offset) as usize..(until - offset) as usize];
        span.memory.read(RemoteAddr(span.address + (at - span.range.start)), part)?;
        at = until;
    }
    Ok(())
}

impl Content {
    /// What is to be read of its file.
    ///
    /// # Errors
    /// That it cannot be asked what it holds.
    pub fn to_be_read(&self, opened: &Opened) -> Result<Vec<stillpoint_image::Range>> {
        match (&self.ranges, opened) {
            (Some(ranges), _) => Ok(ranges.clone()),
            // To look for holes moves the position.
            (None, Opened::Watched(file)) => whole(file),
            (None, Opened::File(file)) => data_ranges(file),
            (None, Opened::Mapped(spans)) => {
                Ok(stillpoint_image::Range::joined(spans.iter().map(|span| span.range).collect()))
            }
        }
    }
}

/// Device number of what is opened to make a pseudo-terminal: 5, 2.
const MULTIPLEXER: u64 = 5 << 8 | 2;

/// Why a file is refused that is on a file system of [`Builder::foreign`], and what can be done.
pub(crate) const FOREIGN: (&str, &str) = (
    "it is in a file system that the program has mounted for itself",
    "try again when the program has closed or left it",
);

/// What two processes have in common, as was seen at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharing {
    /// The one that was looked at, in our pid namespace.
    pub process: u32,
    /// The other one.
    pub other: u32,
    /// What it is.
    pub object: Shared,
}

/// An image under construction.
#[derive(Debug, Default)]
pub struct Builder {
    /// What the time is spent on for which the program stands still.
    pub laps: Laps,
    /// The program does not go on.
    pub kills: bool,
    /// It is described to be led back itself: what no restore could give it stays with it.
    pub stays: bool,
    /// The image so far.
    pub image: Image,
    /// Contents still to be stored.
    pub contents: Vec<Content>,
    /// What was found that cannot be captured.
    pub refusals: Vec<Refusal>,
    /// TCP connections that were found.
    pub(crate) connections: Vec<Found>,
    /// Sockets in whose queue something may wait, or at whose other end somebody does: row and duplicate.
    pub(crate) waiting: Vec<(u32, OwnedFd)>,
    /// Pipes of which somebody outside has an end, if the program is killed: row and duplicate of the first description.
    pub(crate) outside: Vec<(u32, OwnedFd)>,
    /// Locks on pipes that supervisors fill: until the program has been killed nothing is brought to it.
    pub(crate) stopped: Vec<OwnedFd>,
    /// System V shared memory that was found so far.
    pub segments: Vec<Attached>,
    /// Mapped files, by what mappings tell, that have turned out not to be devices.
    pub(crate) no_devices: HashSet<(u64, u64)>,
    /// Who shares descriptors or current directory with whom, without being a thread of it.
    pub(crate) sharing: Vec<Sharing>,
    /// Threads whose directories are apart from those of the main thread: process and thread, in our pid namespace.
    pub(crate) apart: Vec<(u32, u32)>,
    /// What the program would notice if it were opened.
    pub(crate) noticed: Noticed,
    /// Namespaces of the program's own.
    pub namespaces: Namespaces,
    /// Where ids are told.
    pub(crate) home: Arc<Home>,
    /// File systems that only the program has mounted, by device number.
    pub(crate) foreign: HashSet<u64>,
    /// Terminals in those of them that are a devpts, by its device number: their numbers.
    pub(crate) terminals: HashMap<u64, Vec<u32>>,
    /// Mount namespaces of the program's own.
    pub(crate) views: Views,
    paths: HashMap<(u64, u64, Vec<u8>, Option<u32>), u32>,
    objects: HashMap<(u64, u64), u32>,
}

impl Builder {
    /// An empty image.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty image of a program whose ids are told there.
    pub fn at(home: &Arc<Home>) -> Self {
        Builder { home: home.clone(), ..Self::default() }
    }

    /// Lets go of the duplicates of sockets and pipes: while they are there, what the program closes does not end.
    pub fn forget_duplicates(&mut self) {
        self.connections.clear();
        self.waiting.clear();
        self.outside.clear();
    }

    /// Notes something that cannot be captured.
    pub fn refuse(&mut self, what: impl Into<String>, why: impl Into<String>, hint: impl Into<String>) {
        let refusal = Refusal { what: what.into(), why: why.into(), hint: hint.into() };
        if !self.refusals.contains(&refusal) {
            self.refusals.push(refusal);
        }
    }

    /// What was found that cannot be captured, as an error, if there is anything.
    ///
    /// # Errors
    /// [`Error::Refused`].
    pub fn refuse_if_needed(&mut self) -> Result<()> {
        match self.refusals.is_empty() {
            true => Ok(()),
            false => Err(Error::Refused(std::mem::take(&mut self.refusals))),
        }
    }

    /// Row of a file, one for each (device, inode, path and mount namespace); the stronger [`Usage`] wins. Returns the row and whether it
    /// is new.
    pub fn path(&mut self, file: PathFile) -> (u32, bool) {
        let is_multiplexer = file.rdev == MULTIPLEXER && self.terminals.contains_key(&file.dev);
        if self.foreign.contains(&file.dev) && !is_multiplexer {
            self.refuse(format!("the file {}", file.path), FOREIGN.0, FOREIGN.1);
        }
        // What has no name any more is one file, by whichever name it was opened.
        let key = match file.deleted && file.ino != 0 {
            true => (file.dev, file.ino, Vec::new(), None),
            false => (file.dev, file.ino, file.path.0.clone(), file.namespace),
        };
        if let Some(&row) = self.paths.get(&key) {
            let known = &mut self.image.paths[row as usize];
            known.usage = known.usage.max(file.usage);
            return (row, false);
        }
        let row = self.image.paths.len() as u32;
        self.image.paths.push(file);
        self.paths.insert(key, row);
        (row, true)
    }

    /// Row of a file that was found under this name since the program stands still, if it was, and has not been deleted; outside
    /// of mount namespaces of the program's own.
    pub fn known_path(&mut self, dev: u64, ino: u64, path: &[u8], usage: Usage) -> Option<u32> {
        let row = *self.paths.get(&(dev, ino, path.to_vec(), None))?;
        let known = &mut self.image.paths[row as usize];
        if known.deleted {
            return None;
        }
        known.usage = known.usage.max(usage);
        Some(row)
    }

    /// Row of a memory object, one for each (device, inode) of the kernel's internal tmpfs. Returns the row and
    /// whether it is new; the caller of a new one adds its [`Content`].
    pub fn object(&mut self, dev: u64, ino: u64, make: impl FnOnce() -> MemoryObject) -> (u32, bool) {
        if let Some(&row) = self.objects.get(&(dev, ino)) {
            return (row, false);
        }
        let row = self.image.objects.len() as u32;
        self.image.objects.push(make());
        self.objects.insert((dev, ino), row);
        (row, true)
    }

    /// Row of a memory object that was found.
    pub(crate) fn object_row(&self, (dev, ino): (u64, u64)) -> Option<u32> {
        self.objects.get(&(dev, ino)).copied()
    }

    /// Files that need a digest: those whose contents a restore will check.
    pub fn wants_digest(&self) -> impl Iterator<Item = (u32, &PathFile)> {
        let rows = self.image.paths.iter().enumerate();
        let is_noticed =
            |p: &PathFile| self.noticed.is(&self.views.reach(p.namespace, &p.path.0), (p.dev, p.ino));
        let can_be_read = move |p: &PathFile| !p.deleted && !p.made_anew && !is_noticed(p);
        rows.filter(move |(_, p)| p.usage > Usage::Path && can_be_read(p)).map(|(i, p)| (i as u32, p))
    }
}
