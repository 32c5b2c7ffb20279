//! Locks taken through a description, and who gets its signals.

use super::Scan;
use super::descriptions::Description;
use crate::Result;
use rustix::fs::FileType;
use stillpoint_image::{FileOwner, Lock, LockKind};
use stillpoint_linux::fdinfo::LockLine;

/// Locks of a description, and its lease. What breaks a lease is somebody who opens the file: we do not, if that would.
pub(crate) fn locks(scan: &mut Scan<'_>, d: &Description) -> Result<Vec<Lock>> {
    let mut locks = Vec::new();
    for (process, line) in &d.locks {
        let kind = match line.kind.as_str() {
            "FLOCK" => LockKind::Flock,
            "POSIX" => LockKind::Posix,
            "OFDLCK" => LockKind::Ofd,
            "LEASE" if line.breaking => {
                let why = "somebody waits for the program to give up its lease on the file";
                scan.builder.refuse(d.name(), why, "try again when the program has given it up");
                continue;
            }
            "LEASE" => LockKind::Lease,
            other => {
                let why = format!("it holds a {} on the file", other.to_lowercase());
                scan.builder.refuse(d.name(), why, "close it before the checkpoint");
                continue;
            }
        };
        if is_broken_by_opening(line) {
            scan.builder.noticed.add_lease(d.inode());
        }
        let process = match kind {
            LockKind::Posix => scan.inner_pid(scan.target.holders[*process].pid),
            _ => None,
        };
        locks.push(Lock { kind, exclusive: line.exclusive, start: line.start, end: line.end, process });
    }
    Ok(locks)
}

/// Whether the program is asked to give it up when the file is opened for reading.
pub(crate) fn is_broken_by_opening(line: &LockLine) -> bool {
    line.kind == "LEASE" && line.exclusive
}

/// Who gets the signals of a description (`F_SETOWN`, `F_SETSIG`).
pub(crate) fn signal_owner(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileOwner>> {
    if d.is_path_handle() {
        return Ok(None);
    }
    let owner = stillpoint_linux::descriptors::signal_owner(&d.file)?;
    if owner.id == 0 && owner.signal == 0 {
        return Ok(None);
    }
    if owner.id != 0 && FileType::from_raw_mode(d.stat.st_mode) == FileType::Directory {
        let why = "somebody gets signals through it: the program may have asked to be told of changes in this directory \
                   (F_NOTIFY), which nobody can read";
        return scan.refuse(d, why, "close it before the checkpoint");
    }
    let id = owner.id as u32;
    let inner = match owner.kind {
        _ if id == 0 => Some(0),
        0 => scan.inner_id(id),
        1 => scan.inner_pid(id),
        2 => scan.stats().iter().find(|(stat, _)| stat.pgrp == id).map(|(_, group)| *group),
        _ => None,
    };
    let Some(id) = inner else {
        let why = format!("its signals go to {}, which is not the program", owner.id);
        return scan.refuse(d, why, "");
    };
    Ok(Some(FileOwner { kind: owner.kind as u32, id, signal: owner.signal as u32 }))
}
