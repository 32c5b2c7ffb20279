//! The spare: a segment file that nothing points to any more, kept to be written anew.
//!
//! To free a file's blocks and to allocate others makes everybody who waits for the same disk wait longer than to overwrite
//! them, and takes twice the time. So a job that is checkpointed again and again keeps one file at a time. It is one that no
//! loaded checkpoint still reads: each holds shared locks of its segments, and nobody is between a manifest
//! and its segments while one becomes the spare.

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
    /// They are deleted, and so is the spare.
    GivenBack,
    /// They are deleted, but for one that may become the spare.
    Reused,
}

/// What a file takes on the medium, bytes: parts of it may have been given back.
pub(crate) fn held(path: &Path) -> u64 {
    path.metadata().map_or(0, |m| m.len().min(m.blocks() * 512))
}

/// Makes one of these segments the spare, if one is as large as the newest of the others, about, and better than the spare there is,
/// which goes if it is not. The caller holds the exclusive reader lock. Returns which one.
pub(crate) fn keep(medium: &Medium, folder: &Folder, ids: &[u64]) -> Result<Option<u64>> {
    let living = folder.segment_ids()?.into_iter().rfind(|id| !ids.contains(id));
    let newest = living.map_or(0, |id| held(&folder.segment(id)));
    let differs = |path: &Path| newest.abs_diff(held(path));
    let fits = |path: &Path| held(path) / 3 <= newest / 2 && newest / 2 <= held(path);
    let spare = folder.spare();
    if spare.exists() && !fits(&spare) {
        medium.remove(&spare)?;
    }
    let others = ids.iter().filter(|&&id| fits(&folder.segment(id)) && is_free(&folder.segment(id)));
    let Some(&chosen) = others.min_by_key(|&&id| differs(&folder.segment(id))) else { return Ok(None) };
    let path = folder.segment(chosen);
    if spare.exists() && differs(&spare) <= differs(&path) {
        return Ok(None);
    }
    medium.rename(&path, &spare)?;
    Ok(Some(chosen))
}

/// Whether a segment is nobody's but ours: no other name leads to it, as those that backups make do; it belongs to who we are; and
/// nobody has loaded a checkpoint that points into it.
fn is_free(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let is_ours = |m: Metadata| m.nlink() == 1 && m.uid() == rustix::process::geteuid().as_raw();
    file.metadata().is_ok_and(is_ours)
        && rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Gives the spare the name of a new segment and opens it; `None` if there is none that can be had.
pub(crate) fn take(medium: &Medium, folder: &Folder, path: &Path, flags: OFlags) -> Result<Option<File>> {
    let spare = folder.spare();
    if !spare.exists() {
        return Ok(None);
    }
    medium.rename(&spare, path)?;
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
        Ok(file) => Ok(Some(file.into())),
        // A new one does as well.
        Err(_) => medium.remove(path).map(|()| None),
    }
}
