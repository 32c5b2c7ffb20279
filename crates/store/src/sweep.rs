//! Giving room back: dropping checkpoints, deleting segments that nothing points to, clearing up behind the dead.

use crate::folder::{Folder, names};
use crate::ledger::Ledger;
use crate::lock::Lock;
use crate::medium::{Medium, TEMPORARY, temporary};
use crate::rewrite::{self, Usage};
use crate::spare::{self, Room, held};
use crate::{Claim, Error, Result, Store, rolling, working};
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
        let lock = self.writer_lock(&folder)?;
        if !folder.checkpoint(id).exists() {
            return Err(Error::NoCheckpoint { job: job.to_owned(), id, store: self.path().to_owned() });
        }
        let freed = self.drop_checkpoints(&folder, vec![id], Room::GivenBack)?;
        drop(lock);
        self.collect_copies()?;
        Ok(freed)
    }

    /// Keeps the newest `keep` checkpoints of a job and removes the others. Segments of which less than half (of those that were
    /// written anew: 40 %) is still pointed to are rewritten, so that the room a job takes stays bounded by about twice what its
    /// checkpoints need.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Busy`] while the job is being checkpointed, [`Error::Io`].
    pub fn prune(&self, job: &str, keep: usize) -> Result<Freed> {
        let freed = self.keep_newest(job, keep, &[], Room::GivenBack)?;
        self.collect_copies()?;
        Ok(freed)
    }

    /// As [`Store::prune`], for whoever goes on writing checkpoints: of the segments that nothing points to any more, one may be
    /// kept, to be written anew, until [`Store::prune`] or [`Store::end_rolling`] gives it back. While a job goes on from an older
    /// checkpoint because it crashed from newer ones, all of these stay, beside those that are kept: whether the older one was
    /// better is not known yet, and what is wrong with the newer ones may still be looked for.
    ///
    /// # Errors
    /// As [`Store::prune`].
    pub fn roll(&self, job: &str, keep: usize) -> Result<Freed> {
        self.keep_newest(job, keep, &self.spared(job), Room::Reused(1))
    }

    /// Gives back what [`Store::roll`] has kept, and what [`Rolling`](crate::Rolling) owes, unless somebody is at work on the job just now.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Io`].
    pub fn end_rolling(&self, job: &str) -> Result<()> {
        let folder = self.known(job)?;
        // Who is only looking, or clearing up, is done in a moment.
        match Lock::exclusive(&folder.writer_lock(), Duration::from_secs(1))? {
            Some(_lock) if folder.owes_room().exists() => {
                sweep(self, &folder, Rewriting::Yes, Room::GivenBack)?;
            }
            Some(_lock) => drop(spare::remove_all(&self.medium, &folder)?),
            None => return Ok(()),
        }
        self.collect_copies()
    }

    /// The checkpoints of a job that stay when it rolls, however old they are.
    pub(crate) fn spared(&self, job: &str) -> Vec<u64> {
        let mut spared = Vec::new();
        if let Ok(Some(terms)) = self.terms(job) {
            spared.extend(terms.passed_over(self, job));
        }
        if !spared.is_empty()
            && let Ok(Some(running)) = self.running(job)
        {
            spared.extend(running.restored_from);
        }
        spared
    }

    /// All but the newest `keep` checkpoints, and those that are spared; oldest first.
    pub(crate) fn older(&self, folder: &Folder, keep: usize, spared: &[u64]) -> Result<Vec<u64>> {
        let mut ids = folder.checkpoint_ids()?;
        ids.retain(|id| !spared.contains(id));
        ids.truncate(ids.len().saturating_sub(keep));
        Ok(ids)
    }

    fn keep_newest(&self, job: &str, keep: usize, spared: &[u64], room: Room) -> Result<Freed> {
        let folder = self.known(job)?;
        let _lock = self.writer_lock(&folder)?;
        let ids = self.older(&folder, keep, spared)?;
        self.drop_checkpoints(&folder, ids, room)
    }

    /// Removes a job with all its checkpoints and tails.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Busy`] while it is being checkpointed, [`Error::NameTaken`] while it runs,
    /// [`Error::Io`].
    pub fn remove_job(&self, job: &str) -> Result<()> {
        let folder = self.known(job)?;
        {
            let _name = self.claim(job)?;
            let _writer = self.writer_lock(&folder)?;
            self.drop_job(&folder)?;
        }
        self.collect_copies()
    }

    /// Removes a job of which nothing has become: one without checkpoints that nobody runs. Does nothing to others.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Io`].
    pub fn forget(&self, claim: Claim) -> Result<()> {
        let folder = self.known(claim.job())?;
        let _writer = self.writer_lock(&folder)?;
        let has_any = folder.running().exists() || folder.tails().exists();
        if has_any || !folder.checkpoint_ids()?.is_empty() {
            return Ok(());
        }
        self.drop_job(&folder)
    }

    /// Removes the folder of a job; the caller holds its name and its writer lock.
    fn drop_job(&self, folder: &Folder) -> Result<()> {
        let _readers = Lock::exclusive(&folder.reader_lock(), Duration::MAX)?;
        // One rename makes it invisible; what a crash leaves of it goes at the next open.
        let hidden = temporary(&folder.path);
        self.medium.remove_tree(&hidden)?;
        self.medium.rename(&folder.path, &hidden)?;
        self.medium.sync_folder(&self.jobs_folder())?;
        self.medium.remove_tree(&hidden)
    }

    /// Removes checkpoints, and gives back what only they needed; the caller holds the writer lock.
    pub(crate) fn drop_checkpoints(&self, folder: &Folder, ids: Vec<u64>, room: Room) -> Result<Freed> {
        // Remember the highest id before its manifest goes, so that it never comes again. A full medium must not keep
        // anyone from making room: then it is remembered afterwards.
        let found = Ledger::read(folder)?;
        let beyond = found.beyond || ids.contains(&found.checkpoint);
        let ledger = Ledger { pending: Some(0), beyond, ..found };
        let remembered = ledger.write(&self.medium, folder);
        if let Err(e) = &remembered
            && !e.is_full()
        {
            return remembered.map(|()| Freed::default());
        }
        if folder.checkpoints().is_dir() && !ids.is_empty() {
            // What stays may be of somebody who died before its name was durable.
            self.medium.sync_folder(&folder.checkpoints())?;
        }
        for id in &ids {
            self.medium.remove(&folder.checkpoint(*id))?;
        }
        let mut freed = sweep(self, folder, Rewriting::Yes, room)?;
        if remembered.is_err() {
            let late =
                Ledger { checkpoint: ledger.checkpoint, pending: None, beyond, ..Ledger::read(folder)? };
            late.write(&self.medium, folder)?;
        }
        freed.checkpoints = ids;
        Ok(freed)
    }
}

/// Clears up behind a dead writer, if there was one and nobody is at work now.
pub(crate) fn clean(store: &Store, folder: &Folder) -> Result<()> {
    store.clean_tails(&folder.tails())?;
    if has_leftovers(&store.medium, folder)?
        && let Some(_lock) = Lock::exclusive(&folder.writer_lock(), Duration::ZERO)?
        && has_leftovers(&store.medium, folder)?
    {
        sweep(store, folder, Rewriting::No, Room::GivenBack)?;
    }
    Ok(())
}

/// Whether something looks left behind. It may be a living writer's: only with the writer lock is it certain.
pub(crate) fn has_leftovers(medium: &Medium, folder: &Folder) -> Result<bool> {
    let ledger = Ledger::read(folder)?;
    let is_begun = || Ok::<_, Error>(folder.ledger().exists() || !folder.segment_ids()?.is_empty());
    Ok(!hidden(folder)?.is_empty()
        || working::has_stale_pins(folder)?
        || rolling::is_owed_by_the_dead(folder)?
        || ledger.unfinished(folder)
        || ledger.is_of_another_boot(medium) && is_begun()?)
}

/// Temporary files of those who died before the rename. Not those of the records that a supervisor writes: that is done
/// without the writer lock, possibly right now, and the next record takes its place anyway.
fn hidden(folder: &Folder) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    let supervisors = [folder.running(), folder.terms(), folder.pace(), folder.trouble(), folder.paging()]
        .map(|record| temporary(&record));
    for place in [folder.path.clone(), folder.checkpoints()] {
        let temporary = names(&place)?.into_iter().filter(|name| name.starts_with(TEMPORARY));
        found.extend(temporary.map(|name| place.join(name)).filter(|path| !supervisors.contains(path)));
    }
    Ok(found)
}

/// Gives back all room that no checkpoint needs; the caller holds the writer lock.
pub(crate) fn sweep(store: &Store, folder: &Folder, rewriting: Rewriting, room: Room) -> Result<Freed> {
    if folder.checkpoints().is_dir() {
        // Manifests were removed, possibly by who has died, whose names are still durable: none may come back without its segments.
        store.medium.sync_folder(&folder.checkpoints())?;
    }
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
    working::remove_pins(&store.medium, folder)?;
    let mut dead = Vec::new();
    for id in folder.segment_ids()?.into_iter().filter(|id| !usage.knows(*id)) {
        if !working::is_pinned(folder, id)? {
            dead.push(id);
        }
    }
    if room == Room::GivenBack {
        freed.bytes = spare::remove_all(&store.medium, folder)?;
    }
    freed.bytes += delete_segments(store, folder, &dead, room)?;
    if rewriting == Rewriting::Yes {
        match rewrite::rewrite(store, folder, &usage, room) {
            Ok(saved) => freed.bytes += saved,
            Err(e) => freed.unfinished = Some(e),
        }
    }
    if freed.unfinished.is_none() {
        store.medium.remove(&folder.owes_room())?;
    }
    // Whatever was under way is now completed or undone.
    let ledger = Ledger::read(folder)?;
    let is_open = ledger.pending.is_some() || ledger.is_of_another_boot(&store.medium);
    if is_open && freed.unfinished.is_none() {
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

/// Deletes segments while nobody is between a manifest and its segments; some may become spares. Returns the bytes given back.
pub(crate) fn delete_segments(store: &Store, folder: &Folder, ids: &[u64], room: Room) -> Result<u64> {
    let spares = match room {
        Room::GivenBack => 0,
        Room::Reused(most) => most,
    };
    if ids.is_empty() && (spares == 0 || folder.spares()?.is_empty()) {
        return Ok(0);
    }
    let _lock = Lock::exclusive(&folder.reader_lock(), Duration::MAX)?;
    let mut bytes = 0;
    let kept = match spares {
        0 => Vec::new(),
        most => spare::keep(&store.medium, folder, ids, most)?,
    };
    for id in ids.iter().filter(|id| !kept.contains(id)) {
        let path = folder.segment(*id);
        bytes += held(&path);
        store.medium.remove(&path)?;
    }
    Ok(bytes)
}
