//! eventfd, timerfd, signalfd, epoll, inotify. Watches of epolls and the time of timers are set when the process
//! stands.

use super::{Opening, missing};
use crate::Result;
use std::os::fd::AsFd;
use stillpoint_image::FileKind;
use stillpoint_linux::watches;

/// Makes all of them but inotify.
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

/// Reads an inotify empty, whether it blocks or not.
pub(super) fn forget_events(fd: impl AsFd, flags: u32) -> Result<()> {
    super::set_status_flags(&fd, flags | libc::O_NONBLOCK as u32)?;
    watches::drain(&fd)?;
    super::set_status_flags(&fd, flags)
}
