//! File locks: those of descriptions are taken here, those of the process when it stands.

use super::Opening;
use crate::{Error, Result};
use std::os::fd::OwnedFd;
use stillpoint_image::{FileKind, Lock, LockKind};
use stillpoint_linux::locks::{self, LockRange};

/// The range of a lock.
pub(super) fn range(lock: &Lock) -> LockRange {
    LockRange { exclusive: lock.exclusive, start: lock.start, end: lock.end }
}

/// All locks with the descriptions they were taken through.
fn all<'a>(opening: &'a Opening<'_>) -> impl Iterator<Item = (&'a OwnedFd, &'a Lock)> {
    let rows = opening.image.files.iter().zip(&opening.files.sources);
    rows.filter_map(|(file, source)| Some((source.as_ref()?, file)))
        .flat_map(|(fd, file)| file.locks.iter().map(move |lock| (fd, lock)))
}

/// Refuses if somebody else holds a lock that the program had. Before anything is made.
pub(super) fn check(opening: &Opening<'_>) -> Result<()> {
    let mut refusals = Vec::new();
    let lies_in_ranges = |lock: &Lock| matches!(lock.kind, LockKind::Posix | LockKind::Ofd);
    for (fd, lock) in all(opening).filter(|(_, lock)| lies_in_ranges(lock)) {
        if let Some(pid) = locks::holder(fd, range(lock))? {
            let who = if pid > 0 { format!("process {pid}") } else { "another program".into() };
            refusals.push(format!("{}: {who} holds a lock that the program held", name(opening, fd)));
        }
    }
    for file in opening.image.files.iter().filter(|f| f.locks.iter().any(|l| l.kind == LockKind::Lease)) {
        let FileKind::Path(row) = file.kind else { continue };
        let Some(path) = opening.image.paths.get(row as usize).map(|p| p.path.as_path()) else { continue };
        if opening.files.cuts.iter().any(|cut| cut.way == path) {
            let why = "it has grown, and cannot be cut back, as the program holds a lease on it";
            refusals.push(format!("{}: {why}", path.display()));
        }
    }
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// Takes the locks that belong to descriptions.
pub(super) fn take(opening: &Opening<'_>) -> Result<()> {
    for (fd, lock) in all(opening) {
        let taken = match lock.kind {
            LockKind::Flock => locks::flock(fd, lock.exclusive),
            LockKind::Ofd => locks::lock_description(fd, range(lock)),
            LockKind::Posix | LockKind::Lease => Ok(()),
        };
        match taken {
            Err(e) if matches!(e.errno(), Some(libc::EAGAIN | libc::EACCES)) => {
                let line =
                    format!("{}: another program holds a lock that the program held", name(opening, fd));
                return Err(Error::Refused(vec![line]));
            }
            other => other?,
        }
    }
    Ok(())
}

fn name(_opening: &Opening<'_>, fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    let link = stillpoint_linux::fdinfo::link(std::process::id(), fd.as_raw_fd() as u32);
    String::from_utf8_lossy(&link.unwrap_or_default()).into_owned()
}
