//! A segment that a running job's memory is paged to.
//!
//! It is cut into slots of one page each. What is in a slot is tentative until a manifest points to it; from then on the slot is
//! never written again, until no manifest does any more. A slot of which nobody knows anything is free.
//!
//! As long as somebody works in a segment, or needs what is in it where it is, they hold a lock of its pin (`segments/ID.pin`): it is
//! neither removed nor rewritten, whatever points to it. Behind somebody who has died it is a segment like any other.

use crate::folder::Folder;
use crate::ledger::Ledger;
use crate::lock::Lock;
use crate::medium::Medium;
use crate::reader::Reader;
use crate::segment::{HEADER, Segment};
use crate::{Error, Result, Store};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;
use stillpoint_image::{PAGE, Place, wire};

/// A segment to work in.
pub struct Working {
    medium: Medium,
    folder: Folder,
    segment: Segment,
    pin: File,
}

impl Store {
    /// Begins a segment to work in.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Busy`], [`Error::Io`].
    pub fn working(&self, job: &str) -> Result<Working> {
        let folder = self.make(job)?;
        let _lock = self.writer_lock(&folder)?;
        let mut ledger = Ledger::read(&folder)?;
        ledger.segment += 1;
        ledger.write(&self.medium, &folder)?;
        let path = folder.pin(ledger.segment);
        self.medium.remove(&path)?;
        let pin = self.medium.create(&path, rustix::fs::OFlags::empty())?;
        rustix::fs::flock(&pin, FlockOperation::NonBlockingLockExclusive)
            .map_err(|e| Error::io("lock", &path)(e.into()))?;
        let segment = Segment::create(&self.medium, &folder, ledger.segment)?;
        Ok(Working { medium: self.medium.clone(), folder, segment, pin })
    }
}

/// Segments that are left as they are, as long as this lives.
#[derive(Debug)]
pub struct Pinned(Vec<File>);

impl Store {
    /// Sees to it that what a checkpoint of this job was read from is neither removed nor rewritten; none where it is not the
    /// job's own, or that cannot be, because it has been already or somebody else works there.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Busy`], [`Error::Io`].
    pub fn pin(&self, job: &str, reader: &Reader) -> Result<Option<Pinned>> {
        if reader.job() != job {
            return Ok(None);
        }
        let folder = self.known(job)?;
        let _lock = self.writer_lock(&folder)?;
        let mut pins = Vec::new();
        for segment in reader.segments() {
            let path = folder.pin(segment.id);
            if !is_still(segment, &folder)? || is_pinned(&folder, segment.id)? {
                return Ok(None);
            }
            self.medium.remove(&path)?;
            let pin = self.medium.create(&path, rustix::fs::OFlags::empty())?;
            rustix::fs::flock(&pin, FlockOperation::NonBlockingLockExclusive)
                .map_err(|e| Error::io("lock", &path)(e.into()))?;
            pins.push(pin);
        }
        Ok(Some(Pinned(pins)))
    }
}

/// Whether an open segment is the one that is in the store under its number.
fn is_still(segment: &Segment, folder: &Folder) -> Result<bool> {
    let path = folder.segment(segment.id);
    let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let open = segment.file.metadata().map(place).map_err(Error::io("look at", &segment.path))?;
    match std::fs::metadata(&path).map(place) {
        Ok(stored) => Ok(stored == open),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io("look at", &path)(e)),
    }
}

impl Pinned {
    /// The files that it needs.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }
}

impl Working {
    /// Its number within the job.
    pub fn id(&self) -> u64 {
        self.segment.id
    }

    /// Where a slot is in it, bytes.
    pub fn offset(slot: u64) -> u64 {
        HEADER + slot * PAGE
    }

    /// The files that it needs.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.segment.file.as_fd(), self.pin.as_fd()]
    }

    /// Reserves room for the slots from one to another.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::is_full`] tells whether there is no room.
    pub fn reserve(&self, from: u64, to: u64) -> Result<()> {
        let (start, len) = (Working::offset(from), (to - from) * PAGE);
        let path = &self.segment.path;
        match self.medium.preallocate(&self.segment.file, path, start, len) {
            // Not every file system can reserve room; then a write tells whether there is some.
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                self.medium.truncate(&self.segment.file, path, start + len)
            }
            other => other.map_err(Error::io("reserve room in", path)),
        }
    }

    /// Writes whole pages to slots that follow each other. They lie at an address that is a multiple of a page.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, slot: u64, pages: &[u8]) -> Result<()> {
        self.medium.write_at(&self.segment.file, &self.segment.path, pages, Working::offset(slot))
    }

    /// Reads whole pages from slots that follow each other, to an address that is a multiple of a page. Nothing is checked.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(&self, slot: u64, pages: &mut [u8]) -> Result<()> {
        let read = self.segment.file.read_exact_at(pages, Working::offset(slot));
        read.map_err(Error::io("read", &self.segment.path))
    }

    /// What is wrong with a slot whose contents are not what was written to it.
    pub fn damaged(&self, slot: u64) -> Error {
        let why = format!("the page at offset {} is not what was written there", Working::offset(slot));
        Error::Segment { path: self.segment.path.clone(), why }
    }

    /// The slots that checkpoints point to; none can be told while a checkpoint is being written.
    ///
    /// # Errors
    /// [`Error::Manifest`] where one is damaged, [`Error::Io`].
    pub fn permanent(&self) -> Result<Option<Vec<u64>>> {
        let Some(_lock) = Lock::exclusive(&self.folder.writer_lock(), Duration::ZERO)? else {
            return Ok(None);
        };
        // What is written over must not be pointed to by a manifest that was removed, and comes back after a power cut.
        self.medium.sync_folder(&self.folder.checkpoints())?;
        let mut slots = Vec::new();
        for id in self.folder.checkpoint_ids()? {
            let path = self.folder.checkpoint(id);
            let manifest = std::fs::read(&path).map_err(Error::io("read", &path))?;
            let wrong = |source| Error::Manifest { job: self.folder.job.clone(), id, source };
            for extent in wire::decode_pages(&manifest).map_err(wrong)?.extents {
                if let Place::Stored { segment, offset, length, .. } = extent.place
                    && segment == self.segment.id
                {
                    let first = (offset - HEADER) / PAGE;
                    slots.extend(first..first + u64::from(length).div_ceil(PAGE));
                }
            }
        }
        slots.sort_unstable();
        slots.dedup();
        Ok(Some(slots))
    }
}

impl std::fmt::Debug for Working {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Working({}, segment {})", self.folder.job, self.segment.id)
    }
}

/// Whether somebody who worked in a segment has died.
pub(crate) fn has_stale_pins(folder: &Folder) -> Result<bool> {
    for id in folder.pin_ids()? {
        if !is_pinned(folder, id)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether somebody works in a segment.
pub(crate) fn is_pinned(folder: &Folder, id: u64) -> Result<bool> {
    let path = folder.pin(id);
    let file = match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.map_err(Error::io("open", &path))?,
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(e) => Err(Error::io("lock", &path)(e.into())),
    }
}

/// Removes the pins of those who have died; the caller holds the writer lock.
pub(crate) fn remove_pins(medium: &Medium, folder: &Folder) -> Result<()> {
    for id in folder.pin_ids()? {
        if !is_pinned(folder, id)? {
            medium.remove(&folder.pin(id))?;
        }
    }
    Ok(())
}
