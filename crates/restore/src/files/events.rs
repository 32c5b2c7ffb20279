//! eventfd, timerfd, signalfd, epoll, inotify, fanotify. Watches of epolls and the time of timers are set when the process
//! stands.

use super::{Opening, missing};
use crate::{Error, Result};
use std::os::fd::{AsFd, AsRawFd};
use stillpoint_image::{FanotifyMark, FanotifyPlace, FileKind, OpenFile};
use stillpoint_linux::fanotify::On;
use stillpoint_linux::fdinfo::{self, Detail, FanotifyLine, Marked};
use stillpoint_linux::{fanotify, mounts, watches};

/// Makes all of them but inotify and fanotify.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    for (row, file) in opening.image.files.iter().enumerate() {
        let fd = match &file.kind {
            &FileKind::Event { count, semaphore } => watches::eventfd(count, semaphore)?,
            FileKind::Timer(timer) => watches::timerfd(timer.clock)?,
            &FileKind::Signal(mask) => watches::signalfd(mask)?,
            FileKind::Epoll(_) => watches::epoll()?,
            _ => continue,
        };
        opening.put(row, fd)?;
    }
    Ok(())
}

/// Makes inotifies with their watches.
pub(super) fn open_inotify(opening: &mut Opening<'_>) -> Result<()> {
    for (row, file) in opening.image.files.iter().enumerate() {
        let FileKind::Inotify(list) = &file.kind else { continue };
        let fd = watches::inotify()?;
        let mut list = list.clone();
        list.sort_by_key(|w| w.wd);
        for watch in &list {
            let path =
                opening.image.paths.get(watch.path as usize).ok_or_else(|| missing("file", watch.path))?;
            watches::inotify_watch(&fd, path.path.as_path(), watch.mask, watch.wd)?;
        }
        watches::drain(&fd)?;
        opening.put(row, fd)?;
    }
    Ok(())
}

/// Makes groups of fanotify with their marks.
pub(super) fn open_fanotify(opening: &mut Opening<'_>) -> Result<()> {
    for (row, file) in opening.image.files.iter().enumerate() {
        let FileKind::Fanotify(group) = &file.kind else { continue };
        let fd = fanotify::group(group.flags, group.event_flags, !group.unprivileged)?;
        for mark in &group.marks {
            let path =
                opening.image.paths.get(mark.path as usize).ok_or_else(|| missing("file", mark.path))?;
            let (path, on) = (path.path.as_path(), on(mark.on));
            let refused = |why: &str| {
                let line = format!("{}: {why}, and the program watches it (fanotify)", path.display());
                Error::Refused(vec![opening.files.namespaces.told(&line)])
            };
            if on != On::Inode && !mounts::is_mount_point(path)? {
                return Err(refused("nothing is mounted there"));
            }
            fanotify::mark(&fd, on, path, mark.flags, mark.mask, mark.ignored)?;
            if !is_as_asked(&fd, mark)? {
                // The kernel passes over what is to be ignored until the file is written where it may just be.
                return Err(refused("somebody has it open for writing"));
            }
        }
        opening.put(row, fd)?;
    }
    Ok(())
}

fn on(place: FanotifyPlace) -> On {
    match place {
        FanotifyPlace::Inode => On::Inode,
        FanotifyPlace::Mount => On::Mount,
        FanotifyPlace::FileSystem => On::FileSystem,
    }
}

/// Whether a group has a mark with all that was asked for.
fn is_as_asked(group: impl AsFd, mark: &FanotifyMark) -> Result<bool> {
    let info = fdinfo::read(std::process::id(), group.as_fd().as_raw_fd() as u32)?;
    let Detail::Fanotify { marks, .. } = info.detail else { return Ok(false) };
    let is_on = |marked: &Marked| match mark.on {
        FanotifyPlace::Inode => matches!(marked, Marked::Inode(_)),
        FanotifyPlace::Mount => matches!(marked, Marked::Mount(_)),
        FanotifyPlace::FileSystem => matches!(marked, Marked::FileSystem(_)),
    };
    // How nothing is ignored does not matter.
    let flags = if mark.ignored == 0 { fanotify::FAN_MARK_EVICTABLE } else { !0 };
    let is_it = |m: &FanotifyLine| {
        (m.flags & flags, m.mask, m.ignored) == (mark.flags & flags, mark.mask, mark.ignored)
    };
    Ok(marks.iter().any(|m| is_on(&m.on) && is_it(m)))
}

/// Reads an inotify or a fanotify group empty, whether it blocks or not.
pub(super) fn forget_events(fd: impl AsFd, file: &OpenFile) -> Result<()> {
    super::set_status_flags(&fd, file.flags | libc::O_NONBLOCK as u32)?;
    match file.kind {
        FileKind::Fanotify(_) => fanotify::drain(&fd)?,
        _ => watches::drain(&fd)?,
    }
    super::set_status_flags(&fd, file.flags)
}
