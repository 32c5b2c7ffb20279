//! Event sources: eventfd, timerfd, signalfd, epoll, inotify; and finding a file by its handle.

use crate::descriptors::check;
use crate::{Error, Result};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn owned(what: &str, r: i64) -> Result<OwnedFd> {
    let fd = check(|| what.to_owned(), r)?;
    // SAFETY: callers pass the result of a call that returns a new descriptor nobody owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A new eventfd with its counter.
pub fn eventfd(count: u64, semaphore: bool) -> Result<OwnedFd> {
    let flags = libc::EFD_CLOEXEC | if semaphore { libc::EFD_SEMAPHORE } else { 0 };
    // SAFETY: touches no memory.
    let fd = owned("make an eventfd", unsafe { libc::eventfd(0, flags) }.into())?;
    if count > 0 {
        rustix::io::write(&fd, &count.to_ne_bytes()).map_err(|e| Error::call("set an eventfd", e))?;
    }
    Ok(fd)
}

/// A new, disarmed timerfd.
pub fn timerfd(clock: i32) -> Result<OwnedFd> {
    // SAFETY: touches no memory.
    owned("make a timerfd", unsafe { libc::timerfd_create(clock, libc::TFD_CLOEXEC) }.into())
}

/// Makes the kernel bring the count of expirations up to date (`timerfd_gettime(2)`).
///
/// A periodic timer stands still between its first unread expiry and the next read or this call; both then account
/// for the periods that passed, so whoever reads it sees the same number either way.
pub fn settle_timerfd(fd: impl AsFd) -> Result<()> {
    let mut now = [0i64; 4];
    // SAFETY: timerfd_gettime writes one `struct itimerspec`, four longs.
    let r = unsafe { libc::timerfd_gettime(fd.as_fd().as_raw_fd(), now.as_mut_ptr().cast()) };
    check(|| "read a timerfd".into(), r.into()).map(drop)
}

/// `TFD_IOC_SET_TICKS` of `timerfd_create(2)`.
pub const TFD_IOC_SET_TICKS: u64 = 0x4008_5400;

/// The bytes of a `struct itimerspec`; times in nanoseconds.
pub fn itimerspec(value_ns: u64, interval_ns: u64) -> [u8; 32] {
    let mut raw = [0u8; 32];
    for (at, ns) in [(0, interval_ns), (16, value_ns)] {
        raw[at..at + 8].copy_from_slice(&(ns / 1_000_000_000).to_ne_bytes());
        raw[at + 8..at + 16].copy_from_slice(&(ns % 1_000_000_000).to_ne_bytes());
    }
    raw
}

/// A new signalfd for these signals (bit `n - 1` is signal `n`).
pub fn signalfd(mask: u64) -> Result<OwnedFd> {
    // SAFETY: the kernel reads 8 bytes, its `sigset_t`.
    let r = unsafe { libc::syscall(libc::SYS_signalfd4, -1, &raw const mask, 8, libc::SFD_CLOEXEC) };
    owned("make a signalfd", r)
}

/// A new epoll.
pub fn epoll() -> Result<OwnedFd> {
    // SAFETY: touches no memory.
    owned("make an epoll", unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }.into())
}

/// The bytes of a `struct epoll_event`.
pub fn epoll_event(events: u32, data: u64) -> Vec<u8> {
    // The structure is packed on x86-64 only.
    let pad = std::mem::offset_of!(libc::epoll_event, u64) - 4;
    let mut raw = events.to_ne_bytes().to_vec();
    raw.resize(4 + pad, 0);
    raw.extend_from_slice(&data.to_ne_bytes());
    raw
}

/// A new inotify without watches, non-blocking.
pub fn inotify() -> Result<OwnedFd> {
    // SAFETY: touches no memory.
    owned("make an inotify", unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) }.into())
}

/// Numbers of watches can only be counted up to: so far within a few seconds.
const MOST_WATCHES: i32 = 5_000_000;

/// Adds a watch that gets this very watch descriptor.
///
/// The kernel hands out watch descriptors in cyclic order, so the numbers below are used up first; watches must be
/// added in ascending order. Leaves events in the queue ([`drain`]).
pub fn inotify_watch(inotify: impl AsFd, path: &Path, mask: u32, wd: i32) -> Result<()> {
    if wd > MOST_WATCHES {
        return Err(Error::Other(format!(
            "watch {}: {wd} is too high a number to count up to",
            path.display()
        )));
    }
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| Error::Other(e.to_string()))?;
    let fd = inotify.as_fd().as_raw_fd();
    loop {
        // SAFETY: a valid C string.
        let r = unsafe { libc::inotify_add_watch(fd, name.as_ptr(), mask) };
        let got = check(|| format!("watch {}", path.display()), r.into())? as i32;
        if got == wd {
            return Ok(());
        }
        // SAFETY: touches no memory.
        let r = unsafe { libc::inotify_rm_watch(fd, got) };
        check(|| format!("remove the watch of {}", path.display()), r.into())?;
        if got > wd {
            return Err(Error::Other(format!("watch {}: number {wd} was passed over", path.display())));
        }
        if got % 1000 == 0 {
            drain(&inotify)?;
        }
    }
}

/// Reads a non-blocking descriptor empty.
pub fn drain(fd: impl AsFd) -> Result<()> {
    let mut buffer = vec![0u8; 1 << 16];
    loop {
        match rustix::io::read(&fd, &mut buffer) {
            Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::call("read an inotify empty", e)),
        }
    }
}

/// Opens a file by its handle (`open_by_handle_at(2)`) as an `O_PATH` descriptor. `folder` is a handle (`O_PATH`) to any folder on the
/// same mount: to open it for reading would be an event for those who watch it.
///
/// # Errors
/// That there is no such file, or no right to ask.
pub fn open_by_handle(folder: impl AsFd + Sync, kind: i32, handle: &[u8]) -> Result<OwnedFd> {
    let mut raw = Vec::with_capacity(8 + handle.len());
    raw.extend_from_slice(&(handle.len() as u32).to_ne_bytes());
    raw.extend_from_slice(&kind.to_ne_bytes());
    raw.extend_from_slice(handle);
    let open = || {
        // The call does not take such a handle, but the current folder: that of a thread that has one of its own.
        // SAFETY: file descriptors stay shared; whoever else could rely on the folder of this thread has just been parted from it.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) }
            .and_then(|()| rustix::process::fchdir(&folder))
            .map_err(|e| Error::call("go to a mount", e))?;
        // SAFETY: the kernel reads a `struct file_handle`: length, type, and as many bytes as the length says.
        let r = unsafe {
            let flags = libc::O_PATH | libc::O_CLOEXEC;
            libc::syscall(libc::SYS_open_by_handle_at, libc::AT_FDCWD, raw.as_ptr(), flags)
        };
        owned("open a file by its handle", r)
    };
    let failed = |_| Err(Error::Other("opening a file by its handle failed inside stillpoint".into()));
    std::thread::scope(|scope| scope.spawn(open).join().unwrap_or_else(failed))
}

/// Type and bytes of the handle of a file (`name_to_handle_at(2)`), as watches of it tell it; links are not followed. None where it has
/// none, or cannot be reached. To ask is no event for anybody.
pub fn handle_of(path: &Path) -> Option<(i32, Vec<u8>)> {
    /// A handle that identifies only, which more file systems have (from Linux 6.5 on).
    const AT_HANDLE_FID: i32 = 0x200;
    const LONGEST: usize = 128;
    let name = CString::new(path.as_os_str().as_bytes()).ok()?;
    for flags in [AT_HANDLE_FID, 0] {
        let mut raw = [0u32; 2 + LONGEST / 4];
        raw[0] = LONGEST as u32;
        let mut mount = 0;
        // SAFETY: a valid C string; room for a `struct file_handle` of that many bytes, and for a number.
        let r = unsafe {
            let (name, handle) = (name.as_ptr(), raw.as_mut_ptr());
            libc::syscall(libc::SYS_name_to_handle_at, libc::AT_FDCWD, name, handle, &raw mut mount, flags)
        };
        if r == 0 {
            let bytes = raw[2..].iter().flat_map(|word| word.to_ne_bytes());
            return Some((raw[1] as i32, bytes.take(raw[0] as usize).collect()));
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn watch_descriptors_come_back_with_their_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let sub = dir.path().join("sub");
        std::fs::create_dir(&sub).unwrap();
        let inotify = inotify().unwrap();
        inotify_watch(&inotify, dir.path(), libc::IN_CREATE, 3).unwrap();
        inotify_watch(&inotify, &sub, libc::IN_CREATE, 2500).unwrap();
        drain(&inotify).unwrap();
        let info = crate::fdinfo::read(std::process::id(), inotify.as_raw_fd() as u32).unwrap();
        let crate::fdinfo::Detail::Inotify(mut list) = info.detail else { panic!() };
        list.sort_by_key(|l| l.wd);
        assert_eq!(list.iter().map(|l| l.wd).collect::<Vec<_>>(), [3, 2500]);
        assert!(inotify_watch(&inotify, Path::new("/"), libc::IN_CREATE, 2).is_err());
    }

    #[test]
    fn files_are_found_by_handle() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let inotify = inotify().unwrap();
        inotify_watch(&inotify, &file, libc::IN_MODIFY, 1).unwrap();
        let info = crate::fdinfo::read(std::process::id(), inotify.as_raw_fd() as u32).unwrap();
        let crate::fdinfo::Detail::Inotify(list) = info.detail else { panic!() };
        assert_eq!(handle_of(&file).as_ref(), Some(&list[0].inode.handle));
        let all = crate::watches::inotify().unwrap();
        inotify_watch(&all, dir.path(), libc::IN_ALL_EVENTS, 1).unwrap();
        let mount =
            rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let found = open_by_handle(&mount, list[0].inode.handle.0, &list[0].inode.handle.1).unwrap();
        let path = crate::fdinfo::link(std::process::id(), found.as_raw_fd() as u32).unwrap();
        assert_eq!(path, file.canonicalize().unwrap().as_os_str().as_bytes());
        drop((found, mount));
        assert_eq!(crate::descriptors::readable(&all).unwrap(), 0, "it was noticed");
    }

    #[test]
    fn the_epoll_event_is_as_long_as_the_kernels() {
        assert_eq!(epoll_event(1, 2).len(), size_of::<libc::epoll_event>());
    }
}
