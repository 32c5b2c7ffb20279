//! Giving room back: dropping checkpoints, deleting segments that nothing points to, clearing up behind the dead.

use crate::folder::{Folder, names};
use crate::ledger::Ledger;
use crate::lock::Lock;
use crate::medium::{TEMPORARY, temporary};
use crate::rewrite::{self, Usage};
use crate::spare::{self, Room};
use crate::{Error, Result, Store};
use std::time::Duration;
use stillpoint_image::wire;

/// What removing or pruning has done.
#[derive(Debug, Default)]
pub struct Freed {
    /// Checkpoints that are gone, oldest first.
    pub checkpoints: Vec<u64>,
    /// Bytes of page data that were given back, less those that were written anew to do so.
    pub bytes: u64,
    /// Why not everything that could be given back was: a damaged manifest, whose segments cannot be told from
    /// others, or no room to move live pages. The checkpoints are gone nevertheless, all others whole, and the next
    /// [`Store::prune`] tries again.
    pub unfinished: Option<Error>,
}

/// Whether segments that are mostly dead are rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rewriting {
    /// As far as it is worth it.
    Yes,
    /// Only whole segments are given back.
    No,
}

impl Store {
    /// Removes one checkpoint, and the segments that only it pointed to. The others stay as they are.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::NoCheckpoint`], [`Error::Busy`] while the job is being checkpointed, [`Error::Io`].
    pub fn remove(&self, job: &str, id: u64) -> Result<Freed> {
        let folder = self.known(job)?;
        let _lock = self.writer_lock(&folder)?;
        if !folder.checkpoint(id).exists() {
            return Err(Error::NoCheckpoint { job: job.to_owned(), id, store: self.path().to_owned() });
        }
        self.drop_checkpoints(&folder, vec![id], Room::GivenBack)
    }

    /// Keeps the newest `keep` checkpoints of a job and removes the others. Segments of which less than half (of those that were
    /// written anew: 40 %) is still pointed to are rewritten, so that the room a job takes stays bounded by about twice what its
    /// checkpoints need.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Busy`] while the job is being checkpointed, [`Error::Io`].
    pub fn prune(&self, job: &str, keep: usize) -> Result<Freed> {
        self.keep_newest(job, keep, Room::GivenBack)
    }

    /// As [`Store::prune`], for whoever goes on writing checkpoints: of the segments that nothing points to any more, one may be
    /// kept, to be written anew, until [`Store::prune`] or [`Store::end_rolling`] gives it back.
    ///
    /// # Errors
    /// As [`Store::prune`].
    pub fn roll(&self, job: &str, keep: usize) -> Result<Freed> {
        self.keep_newest(job, keep, Room::Reused)
    }

    /// Gives back what [`Store::roll`] has kept, unless somebody is at work on the job just now.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Io`].
    pub fn end_rolling(&self, job: &str) -> Result<()> {
        let folder = self.known(job)?;
        match Lock::exclusive(&folder.writer_lock(), Duration::ZERO)? {
            Some(_lock) => self.medium.remove(&folder.spare()),
            None => Ok(()),
        }
    }

    fn keep_newest(&self, job: &str, keep: usize, room: Room) -> Result<Freed> {
        let folder = self.known(job)?;
        let _lock = self.writer_lock(&folder)?;
        let mut ids = folder.checkpoint_ids()?;
        ids.truncate(ids.len().saturating_sub(keep));
        self.drop_checkpoints(&folder, ids, room)
    }

    /// Removes a job with all its checkpoints and tails.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Busy`] while it is being checkpointed, [`Error::NameTaken`] while it runs,
    /// [`Error::Io`].
    pub fn remove_job(&self, job: &str) -> Result<()> {
        let folder = self.known(job)?;
        let _name = self.claim(job)?;
        let _writer = self.writer_lock(&folder)?;
        let _readers = Lock::exclusive(&folder.reader_lock(), Duration::MAX)?;
        // One rename makes it invisible; what a crash leaves of it goes at the next open.
        let hidden = temporary(&folder.path);
        self.medium.remove_tree(&hidden)?;
        self.medium.rename(&folder.path, &hidden)?;
        self.medium.sync_folder(&self.jobs_folder())?;
        self.medium.remove_tree(&hidden)
    }

    fn drop_checkpoints(&self, folder: &Folder, ids: Vec<u64>, room: Room) -> Result<Freed> {
        // Remember the highest id before its manifest goes, so that it never comes again. A full medium must not keep
        // anyone from making room: then it is remembered afterwards.
        let ledger = Ledger { pending: Some(0), ..Ledger::read(folder)? };
        let remembered = ledger.write(&self.medium, folder);
        if let Err(e) = &remembered
            && !e.is_full()
        {
            return remembered.map(|()| Freed::default());
        }
        for id in &ids {
            self.medium.remove(&folder.checkpoint(*id))?;
        }
        self.medium.sync_folder(&folder.checkpoints())?;
        let mut freed = sweep(self, folder, Rewriting::Yes, room)?;
        if remembered.is_err() {
            let late = Ledger { checkpoint: ledger.checkpoint, pending: None, ..Ledger::read(folder)? };
            late.write(&self.medium, folder)?;
        }
        freed.checkpoints = ids;
        Ok(freed)
    }
}

/// Clears up behind a dead writer, if there was one and nobody is at work now.
pub(crate) fn clean(store: &Store, folder: &Folder) -> Result<()> {
    store.clean_tails(folder)?;
    if has_leftovers(folder)?
        && let Some(_lock) = Lock::exclusive(&folder.writer_lock(), Duration::ZERO)?
        && has_leftovers(folder)?
    {
        sweep(store, folder, Rewriting::No, Room::GivenBack)?;
    }
    Ok(())
}

/// Whether something looks left behind. It may be a living writer's: only with the writer lock is it certain.
pub(crate) fn has_leftovers(folder: &Folder) -> Result<bool> {
    Ok(!hidden(folder)?.is_empty() || Ledger::read(folder)?.unfinished(folder))
}

/// Temporary files of those who died before the rename. Not those of the records that a supervisor writes: that is done
/// without the writer lock, possibly right now, and the next record takes its place anyway.
fn hidden(folder: &Folder) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    let supervisors = [temporary(&folder.running()), temporary(&folder.trouble())];
    for place in [folder.path.clone(), folder.checkpoints()] {
        let temporary = names(&place)?.into_iter().filter(|name| name.starts_with(TEMPORARY));
        found.extend(temporary.map(|name| place.join(name)).filter(|path| !supervisors.contains(path)));
    }
    Ok(found)
}

/// Gives back all room that no checkpoint needs; the caller holds the writer lock.
pub(crate) fn sweep(store: &Store, folder: &Folder, rewriting: Rewriting, room: Room) -> Result<Freed> {
    for path in hidden(folder)? {
        store.medium.remove(&path)?;
    }
    store.clean_touch_sets(folder)?;
    let mut freed = Freed::default();
    let usage = match read_usage(folder) {
        Ok(usage) => usage,
        // Its segments are unknown, so none may go.
        Err(e @ Error::Manifest { .. }) => {
            freed.unfinished = Some(e);
            return Ok(freed);
        }
        Err(e) => return Err(e),
    };
    let dead: Vec<u64> = folder.segment_ids()?.into_iter().filter(|id| !usage.knows(*id)).collect();
    if room == Room::GivenBack {
        freed.bytes = folder.spare().metadata().map_or(0, |m| m.len());
        store.medium.remove(&folder.spare())?;
    }
    freed.bytes += delete_segments(store, folder, &dead, room)?;
    if rewriting == Rewriting::Yes {
        match rewrite::rewrite(store, folder, &usage, room) {
            Ok(saved) => freed.bytes += saved,
            Err(e) => freed.unfinished = Some(e),
        }
    }
    // Whatever was under way is now completed or undone.
    let ledger = Ledger::read(folder)?;
    if ledger.pending.is_some() && freed.unfinished.is_none() {
        let settled = Ledger { pending: None, ..ledger }.write(&store.medium, folder);
        settled.or_else(|e| if e.is_full() { Ok(()) } else { Err(e) })?;
    }
    Ok(freed)
}

/// Which pages of which segments the checkpoints point to.
fn read_usage(folder: &Folder) -> Result<Usage> {
    let mut usage = Usage::default();
    for id in folder.checkpoint_ids()? {
        let path = folder.checkpoint(id);
        let manifest = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let wrong = |source| Error::Manifest { job: folder.job.clone(), id, source };
        usage.add(&wire::decode_pages(&manifest).map_err(wrong)?);
    }
    Ok(usage)
}

/// Deletes segments while nobody is between a manifest and its segments; one may become the spare. Returns the bytes given back.
pub(crate) fn delete_segments(store: &Store, folder: &Folder, ids: &[u64], room: Room) -> Result<u64> {
    let rolls = room == Room::Reused;
    if ids.is_empty() && !(rolls && folder.spare().exists()) {
        return Ok(0);
    }
    let _lock = Lock::exclusive(&folder.reader_lock(), Duration::MAX)?;
    let mut bytes = 0;
    let kept = if rolls { spare::keep(&store.medium, folder, ids)? } else { None };
    for id in ids.iter().filter(|&&id| Some(id) != kept) {
        let path = folder.segment(*id);
        bytes += path.metadata().map_or(0, |m| m.len());
        store.medium.remove(&path)?;
    }
    Ok(bytes)
}
