//! Removing older checkpoints for whoever takes one after the other: their names go at once, room is given back a few times a second.
//!
//! 1. `owes-room` is there, locked by whoever owes. Where nobody has it locked, the next who opens the store or writes to the job sees
//!    to what is owed.
//! 2. Manifests are removed, which is not made durable: one that comes back after a power cut has all that it points to.
//! 3. From time to time the folder of manifests becomes durable, and then room is given back as after any removal.
//! 4. `owes-room` goes.

use crate::folder::Folder;
use crate::lock::is_at;
use crate::medium::Medium;
use crate::rewrite::{MAX_SEGMENTS, segments_of};
use crate::spare::Room;
use crate::sweep::{Freed, Rewriting, sweep};
use crate::{Error, Result, Store};
use rustix::fs::{FlockOperation, OFlags};
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use stillpoint_image::wire;

/// Room is given back so often at most; whoever rolls does so soon after ([`Rolling::due`]).
const OWED: Duration = Duration::from_millis(250);
/// Where not all of it could be given back, or nothing, it is tried again after so long.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// So many segments are kept at most, to be written anew.
const MOST_SPARES: usize = 64;

/// Keeps the newest checkpoints of a job while others are added.
#[derive(Debug)]
pub struct Rolling {
    store: Store,
    job: String,
    keep: usize,
    /// Locked for as long as this lives, once there is something to owe.
    marker: Option<File>,
    /// When room was given back last, or could not be.
    given_back: Option<Instant>,
    /// So many checkpoints have been removed since: as many segments will be wanted before room is given back again.
    removed: usize,
    /// There is something to give back.
    owes: bool,
    /// Highest number of a segment when it was last looked into how many segments the newest checkpoint needs.
    looked: u64,
    /// Why not all was given back the last time.
    held_up: Option<String>,
}

impl Store {
    /// Begins to keep the newest `keep` checkpoints of a job, as [`Store::roll`] does; `usize::MAX` keeps all, and only sees to it that none
    /// needs too many segments. Dropped, it leaves what it owes to the next who opens the store; [`Store::end_rolling`] gives all of it back.
    pub fn rolling(&self, job: &str, keep: usize) -> Rolling {
        let (store, job) = (self.clone(), job.to_owned());
        let (marker, given_back, held_up) = (None, None, None);
        // Who rolled before may have died in the middle.
        let owes = keep < usize::MAX;
        Rolling { store, job, keep, marker, given_back, removed: 0, owes, looked: 0, held_up }
    }
}

impl Rolling {
    /// Removes older checkpoints, and gives room back if that was done a while ago.
    ///
    /// # Errors
    /// As [`Store::roll`].
    pub fn roll(&mut self) -> Result<Freed> {
        let checkpoints = self.unlist()?;
        Ok(Freed { checkpoints, ..self.settle()? })
    }

    /// Gives room back if that was done a while ago, and joins segments where the newest checkpoint needs too many of them.
    ///
    /// # Errors
    /// As [`Rolling::give_back`].
    pub fn settle(&mut self) -> Result<Freed> {
        if self.next_at().is_some_and(|at| Instant::now() < at) {
            return Ok(Freed::default());
        }
        self.owes |= self.needs_joining()?;
        self.give_back()
    }

    /// When what is owed is to be given back by [`Rolling::settle`], if anything is owed.
    pub fn due(&self) -> Option<Instant> {
        self.next_at().filter(|_| self.owes)
    }

    /// Why not all that could be given back was, the last time: it is tried again from time to time.
    pub fn held_up(&self) -> Option<&str> {
        self.held_up.as_deref()
    }

    fn next_at(&self) -> Option<Instant> {
        let pause = if self.held_up.is_some() { AFTER_FAILURE } else { OWED };
        self.given_back.map(|last| last + pause)
    }

    /// Whether the newest checkpoint needs so many segments that some are to be joined. Looked into once in many segments: there are many
    /// also where each checkpoint needs few.
    fn needs_joining(&mut self) -> Result<bool> {
        let folder = self.store.known(&self.job)?;
        let segments = folder.segment_ids()?;
        let highest = segments.last().copied().unwrap_or(0);
        if segments.len() <= MAX_SEGMENTS || highest < self.looked + MAX_SEGMENTS as u64 / 2 {
            return Ok(false);
        }
        self.looked = highest;
        let Some(newest) = folder.checkpoint_ids()?.last().copied() else { return Ok(false) };
        // Of one that is gone meanwhile, or damaged, others tell.
        let pages = std::fs::read(folder.checkpoint(newest)).ok().and_then(|m| wire::decode_pages(&m).ok());
        Ok(pages.is_some_and(|pages| segments_of(&pages).len() > MAX_SEGMENTS))
    }

    /// Removes older checkpoints, which are there no more for anybody. Their room is owed. Returns which ones, oldest first.
    ///
    /// # Errors
    /// As [`Store::roll`].
    pub fn unlist(&mut self) -> Result<Vec<u64>> {
        if self.keep == usize::MAX {
            return Ok(Vec::new());
        }
        let folder = self.store.known(&self.job)?;
        let spared = self.store.spared(&self.job);
        // Where there is nothing to remove no lock is waited for.
        if self.store.older(&folder, self.keep, &spared)?.is_empty() {
            return Ok(Vec::new());
        }
        let _lock = self.store.writer_lock(&folder)?;
        let ids = self.store.older(&folder, self.keep, &spared)?;
        let Some(newest) = folder.checkpoint_ids()?.last().copied().filter(|_| !ids.is_empty()) else {
            return Ok(ids);
        };
        self.marker = mark(&self.store.medium, &folder, self.marker.take())?;
        // The number of the newest is remembered by its name.
        if self.marker.is_none() || ids.contains(&newest) {
            return Ok(self.store.drop_checkpoints(&folder, ids, Room::Reused(1))?.checkpoints);
        }
        self.owes = true;
        for id in &ids {
            self.store.medium.remove(&folder.checkpoint(*id))?;
            self.removed += 1;
        }
        Ok(ids)
    }

    /// Gives back what is owed, whoever owes it.
    ///
    /// # Errors
    /// As [`Store::roll`].
    pub fn give_back(&mut self) -> Result<Freed> {
        let room = match self.removed {
            0 => Room::GivenBack,
            removed => Room::Reused(removed.min(MOST_SPARES)),
        };
        self.give_back_as(Rewriting::Yes, room)
    }

    /// Gives back all room at once, also what is kept to be written anew: something did not fit.
    ///
    /// # Errors
    /// As [`Store::roll`].
    pub fn make_room(&mut self) -> Result<Freed> {
        self.owes = true;
        // What could not be moved a moment ago cannot be moved now.
        let rewriting = if self.held_up.is_some() { Rewriting::No } else { Rewriting::Yes };
        self.give_back_as(rewriting, Room::GivenBack)
    }

    fn give_back_as(&mut self, rewriting: Rewriting, room: Room) -> Result<Freed> {
        let folder = self.store.known(&self.job)?;
        let given = self.sweep(&folder, rewriting, room);
        self.given_back = Some(Instant::now());
        match &given {
            Err(e) => self.held_up = Some(e.to_string()),
            Ok(freed) if freed.unfinished.is_some() => {
                self.held_up = freed.unfinished.as_ref().map(ToString::to_string);
            }
            Ok(_) if rewriting == Rewriting::No => {}
            Ok(_) => (self.held_up, self.owes, self.removed) = (None, false, 0),
        }
        given
    }

    fn sweep(&self, folder: &Folder, rewriting: Rewriting, room: Room) -> Result<Freed> {
        if !self.owes && !folder.owes_room().exists() {
            return Ok(Freed::default());
        }
        let _lock = self.store.writer_lock(folder)?;
        sweep(&self.store, folder, rewriting, room)
    }
}

/// Makes sure that the marker is there, and ours; the caller holds the writer lock. `None` if it is somebody else's, who lives.
fn mark(medium: &Medium, folder: &Folder, ours: Option<File>) -> Result<Option<File>> {
    let path = folder.owes_room();
    if let Some(ours) = ours.filter(|ours| is_at(ours, &path)) {
        return Ok(Some(ours));
    }
    let marker = match path.exists() {
        // (NFS locks exclusively only what is open for writing.)
        true => File::options().read(true).write(true).open(&path).map_err(Error::io("open", &path))?,
        false => match medium.create(&path, OFlags::empty()) {
            // Room can be given back even where there is none for that.
            Err(e) if e.is_full() => return Ok(None),
            other => other?,
        },
    };
    let is_ours = try_lock(&marker, &path, FlockOperation::NonBlockingLockExclusive)?;
    Ok(is_ours.then_some(marker))
}

/// Locks the marker, if nobody has.
fn try_lock(marker: &File, path: &Path, how: FlockOperation) -> Result<bool> {
    match rustix::fs::flock(marker, how) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(Error::io("lock", path)(e.into())),
    }
}

/// Whether somebody owed room and has died.
pub(crate) fn is_owed_by_the_dead(folder: &Folder) -> Result<bool> {
    let path = folder.owes_room();
    match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        other => {
            let marker = other.map_err(Error::io("open", &path))?;
            try_lock(&marker, &path, FlockOperation::NonBlockingLockShared)
        }
    }
}
