//! Spares: segment files that nothing points to any more, kept to be written anew.
//!
//! To free a file's blocks and to allocate others makes everybody who waits for the same disk wait longer than to overwrite
//! them, and takes twice the time. So a job that is checkpointed again and again keeps one file at a time, or as many as it will need until
//! there are more. They are such that no loaded checkpoint still reads: each holds shared locks of its segments, and nobody is between a manifest
//! and its segments while one becomes a spare.

use crate::Result;
use crate::folder::Folder;
use crate::medium::Medium;
use rustix::fs::{FlockOperation, OFlags};
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What becomes of segments that nothing points to any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// They are deleted, and so are spares.
    GivenBack,
    /// They are deleted, but for so many that may be or become spares.
    Reused(usize),
}

/// What a file takes on the medium, bytes: parts of it may have been given back.
pub(crate) fn held(path: &Path) -> u64 {
    path.metadata().map_or(0, |m| m.len().min(m.blocks() * 512))
}

/// Removes all spares. Returns what they took, bytes.
pub(crate) fn remove_all(medium: &Medium, folder: &Folder) -> Result<u64> {
    let mut bytes = 0;
    for spare in folder.spares()? {
        bytes += held(&spare);
        medium.remove(&spare)?;
    }
    Ok(bytes)
}

/// Makes some of these segments spares, such as are about as large as the newest of the others, so that there are at most so many; spares
/// that are worse go. The caller holds the exclusive reader lock. Returns which ones.
pub(crate) fn keep(medium: &Medium, folder: &Folder, ids: &[u64], most: usize) -> Result<Vec<u64>> {
    let living = folder.segment_ids()?.into_iter().rfind(|id| !ids.contains(id));
    let newest = living.map_or(0, |id| held(&folder.segment(id)));
    let differs = |path: &Path| newest.abs_diff(held(path));
    let fits = |path: &Path| held(path) / 3 <= newest / 2 && newest / 2 <= held(path);
    let spares = folder.spares()?.into_iter().map(|path| (None, path));
    let segments = ids.iter().map(|&id| (Some(id), folder.segment(id))).filter(|(_, path)| is_free(path));
    let (mut chosen, mut others): (Vec<_>, Vec<_>) = spares.chain(segments).partition(|(_, path)| fits(path));
    chosen.sort_by_key(|(_, path)| differs(path)); // of those that are alike, spares stay in front
    others.extend(chosen.split_off(chosen.len().min(most)));
    for (_, path) in others.iter().filter(|(id, _)| id.is_none()) {
        medium.remove(path)?;
    }
    let mut kept = Vec::new();
    for (id, path) in chosen {
        let Some(id) = id else { continue };
        let is_first = !folder.spare().exists();
        medium.rename(&path, &if is_first { folder.spare() } else { folder.further_spare(id) })?;
        kept.push(id);
    }
    Ok(kept)
}

/// Whether a segment is nobody's but ours: no other name leads to it, as those that backups make do; it belongs to who we are; and
/// nobody has loaded a checkpoint that points into it.
fn is_free(path: &Path) -> bool {
    let Ok(file) = File::options().read(true).write(true).open(path) else { return false };
    let is_ours = |m: Metadata| m.nlink() == 1 && m.uid() == rustix::process::geteuid().as_raw();
    file.metadata().is_ok_and(is_ours)
        && rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Gives a spare the name of a new segment and opens it; `None` if there is none that can be had.
pub(crate) fn take(medium: &Medium, folder: &Folder, path: &Path, flags: OFlags) -> Result<Option<File>> {
    let Some(spare) = folder.spares()?.pop() else { return Ok(None) };
    medium.rename(&spare, path)?;
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
        Ok(file) => Ok(Some(file.into())),
        // A new one does as well.
        Err(_) => medium.remove(path).map(|()| None),
    }
}
