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
use crate::spare::Room;
use crate::sweep::{Freed, Rewriting, sweep};
use crate::{Error, Result, Store};
use rustix::fs::{FlockOperation, OFlags};
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// Room is owed for so long at most.
const OWED: Duration = Duration::from_millis(250);
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
    given_back: Option<Instant>,
    /// So many checkpoints have been removed since: as many segments will be wanted before room is given back again.
    removed: usize,
}

impl Store {
    /// Begins to keep the newest `keep` checkpoints of a job, as [`Store::roll`] does. Dropped, it leaves what it owes to the next who
    /// opens the store; [`Store::end_rolling`] gives all of it back.
    pub fn rolling(&self, job: &str, keep: usize) -> Rolling {
        Rolling { store: self.clone(), job: job.to_owned(), keep, marker: None, given_back: None, removed: 0 }
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

    /// Gives room back if that was done a while ago.
    ///
    /// # Errors
    /// As [`Rolling::give_back`].
    pub fn settle(&mut self) -> Result<Freed> {
        match self.given_back.is_none_or(|last| last.elapsed() >= OWED) {
            true => self.give_back(),
            false => Ok(Freed::default()),
        }
    }

    /// Removes older checkpoints, which are there no more for anybody. Their room is owed. Returns which ones, oldest first.
    ///
    /// # Errors
    /// As [`Store::roll`].
    pub fn unlist(&mut self) -> Result<Vec<u64>> {
        let folder = self.store.known(&self.job)?;
        let spared = self.store.spared(&self.job);
        let _lock = self.store.writer_lock(&folder)?;
        let ids = self.store.older(&folder, self.keep, &spared)?;
        self.removed += ids.len();
        let Some(newest) = folder.checkpoint_ids()?.last().copied().filter(|_| !ids.is_empty()) else {
            return Ok(ids);
        };
        self.marker = mark(&self.store.medium, &folder, self.marker.take())?;
        // The number of the newest is remembered by its name.
        if self.marker.is_none() || ids.contains(&newest) {
            return Ok(self.store.drop_checkpoints(&folder, ids, Room::Reused(1))?.checkpoints);
        }
        for id in &ids {
            self.store.medium.remove(&folder.checkpoint(*id))?;
        }
        Ok(ids)
    }

    /// Gives back what is owed, whoever owes it.
    ///
    /// # Errors
    /// As [`Store::roll`].
    pub fn give_back(&mut self) -> Result<Freed> {
        let folder = self.store.known(&self.job)?;
        let _lock = self.store.writer_lock(&folder)?;
        let freed = match folder.owes_room().exists() {
            true => {
                let room = Room::Reused(self.removed.clamp(1, MOST_SPARES));
                sweep(&self.store, &folder, Rewriting::Yes, room)?
            }
            false => Freed::default(),
        };
        self.removed = 0;
        self.given_back = Some(Instant::now());
        Ok(freed)
    }
}

/// Makes sure that the marker is there, and ours; the caller holds the writer lock. `None` if it is somebody else's, who lives.
fn mark(medium: &Medium, folder: &Folder, ours: Option<File>) -> Result<Option<File>> {
    let path = folder.owes_room();
    if let Some(ours) = ours.filter(|ours| is_at(ours, &path)) {
        return Ok(Some(ours));
    }
    let marker = match path.exists() {
        true => File::open(&path).map_err(Error::io("open", &path))?,
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
