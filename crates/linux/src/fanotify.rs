//! Groups of fanotify: made, marked, read empty (`fanotify(7)`).

use crate::descriptors::check;
use crate::{Error, Result};
use rustix::buffer::spare_capacity;
use rustix::fs::FileType;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub use libc::{
    FAN_MARK_EVICTABLE, FAN_MARK_FILESYSTEM, FAN_MARK_IGNORE, FAN_MARK_IGNORED_MASK,
    FAN_MARK_IGNORED_SURV_MODIFY, FAN_MARK_MOUNT, FAN_UNLIMITED_QUEUE,
};

/// The bits of a group's flags that tell its class: those who are asked whether something may be done have one.
pub const CLASS: u32 = libc::FAN_CLASS_CONTENT | libc::FAN_CLASS_PRE_CONTENT;
/// Flags that only who has `CAP_SYS_ADMIN` may ask for.
const PRIVILEGED: u32 = CLASS
    | libc::FAN_UNLIMITED_QUEUE
    | libc::FAN_UNLIMITED_MARKS
    | libc::FAN_REPORT_PIDFD
    | libc::FAN_REPORT_TID
    | FAN_REPORT_FD_ERROR;
const FAN_REPORT_FD_ERROR: u32 = 0x2000;
/// Mounts that come and go are told, rather than what is done to files (Linux 6.14).
const FAN_REPORT_MNT: u32 = 0x4000;
/// Events have handles of files rather than open ones.
const HANDLES: u32 =
    libc::FAN_REPORT_FID | libc::FAN_REPORT_DIR_FID | libc::FAN_REPORT_NAME | libc::FAN_REPORT_TARGET_FID;

/// Whether a group of these flags can be made by somebody without privileges.
pub fn is_for_all(flags: u32) -> bool {
    flags & PRIVILEGED == 0 && flags & (HANDLES | FAN_REPORT_MNT) != 0
}

/// What a mark is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// A file or directory.
    Inode,
    /// A mount.
    Mount,
    /// A file system.
    FileSystem,
}

/// Makes a group. `privileged`: whether as by somebody with `CAP_SYS_ADMIN`, or as by one without, to whom nothing is told of
/// other processes. It is closed by `execve(2)`.
pub fn group(flags: u32, event_flags: u32, privileged: bool) -> Result<OwnedFd> {
    if privileged {
        return make(flags, event_flags);
    }
    // Capabilities are a thread's, and this one ends.
    std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            let all = capabilities(None).map_err(|e| Error::call("capget", e))?;
            let effective = all.effective.difference(CapabilitySet::SYS_ADMIN);
            set_capabilities(None, CapabilitySets { effective, ..all })
                .map_err(|e| Error::call("capset", e))?;
            make(flags, event_flags)
        });
        made.join()
            .unwrap_or_else(|_| Err(Error::Other("making a fanotify group failed inside stillpoint".into())))
    })
}

fn make(flags: u32, event_flags: u32) -> Result<OwnedFd> {
    // SAFETY: touches no memory.
    let r = unsafe { libc::fanotify_init(flags, event_flags) };
    let fd = check(|| "make a fanotify group".into(), r.into())?;
    // SAFETY: a new descriptor that nobody owns.
    let made = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // Asked for above, it would stay among the flags of the group.
    fcntl_setfd(&made, FdFlags::CLOEXEC).map_err(|e| Error::call("F_SETFD", e))?;
    Ok(made)
}

/// Makes a mark on what a path leads to (a symbolic link at its end is not followed): what is told, what is ignored, and the
/// flags that it keeps.
pub fn mark(group: impl AsFd, on: On, path: &Path, flags: u32, mask: u32, ignored: u32) -> Result<()> {
    let kind = match on {
        On::Inode => libc::FAN_MARK_INODE,
        On::Mount => FAN_MARK_MOUNT,
        On::FileSystem => FAN_MARK_FILESYSTEM,
    };
    let always = libc::FAN_MARK_ADD | libc::FAN_MARK_DONT_FOLLOW | kind | flags & FAN_MARK_EVICTABLE;
    // The older way to ignore is told by no flag.
    let how = match flags & FAN_MARK_IGNORE {
        0 => FAN_MARK_IGNORED_MASK,
        new => new,
    };
    let parts = [(mask, always), (ignored, always | how | flags & FAN_MARK_IGNORED_SURV_MODIFY)];
    let is_folder =
        rustix::fs::lstat(path).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory);
    for (events, flags) in parts.into_iter().filter(|(events, _)| *events != 0) {
        let mut events = u64::from(events);
        if !is_folder || on != On::Inode {
            // The kernel adds this by itself, and refuses some groups that ask for it.
            events &= !libc::FAN_EVENT_ON_CHILD;
        }
        add(&group, flags, events, path)?;
    }
    Ok(())
}

fn add(group: impl AsFd, flags: u32, mask: u64, path: &Path) -> Result<()> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| Error::Other(e.to_string()))?;
    // SAFETY: a valid C string.
    let r =
        unsafe { libc::fanotify_mark(group.as_fd().as_raw_fd(), flags, mask, libc::AT_FDCWD, name.as_ptr()) };
    check(|| format!("mark {} for fanotify", path.display()), r.into()).map(drop)
}

/// Reads a non-blocking group empty; what is opened for its events is closed.
pub fn drain(group: impl AsFd) -> Result<()> {
    /// So many files of events may be such that they cannot be opened any more; those events are gone all the same.
    const MOST_FAILURES: u32 = 1 << 20;
    let mut failures = 0;
    loop {
        let mut events: Vec<u8> = Vec::with_capacity(1 << 16);
        match rustix::io::read(&group, spare_capacity(&mut events)) {
            Ok(0) | Err(Errno::AGAIN) => return Ok(()),
            Ok(_) => drop(opened(&events)),
            Err(Errno::INTR) => {}
            Err(e) if can_be_of_an_event(e) && failures < MOST_FAILURES => failures += 1,
            Err(e) => return Err(Error::call("read a fanotify group empty", e)),
        }
    }
}

/// Errors that tell of an event's file rather than of the group.
fn can_be_of_an_event(e: Errno) -> bool {
    !matches!(e, Errno::BADF | Errno::INVAL | Errno::FAULT | Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

/// What the kernel has opened for events that were read: files, and handles to processes.
fn opened(events: &[u8]) -> Vec<OwnedFd> {
    const HEAD: usize = 24;
    const PIDFD: u8 = 4; // FAN_EVENT_INFO_TYPE_PIDFD
    let int = |at: usize| events.get(at..at + 4).map(|b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    let (mut at, mut found) = (0, Vec::new());
    while let Some(length) = int(at).map(|n| n as usize).filter(|n| *n >= HEAD) {
        found.extend(int(at + 16));
        let (mut record, end) = (at + HEAD, at + length);
        while record + 4 <= end.min(events.len()) {
            let size = usize::from(u16::from_ne_bytes([events[record + 2], events[record + 3]]));
            if events[record] == PIDFD {
                found.extend(int(record + 4));
            }
            record += size.max(4);
        }
        at = end;
    }
    // SAFETY: the kernel made these for whoever reads the events, which is us, and nobody else knows their numbers.
    found.into_iter().filter(|fd| *fd >= 0).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::fdinfo::{Detail, FanotifyLine, Marked, read};

    fn told(group: &OwnedFd) -> (u32, u32, Vec<FanotifyLine>) {
        let info = read(std::process::id(), group.as_raw_fd() as u32).unwrap();
        let Detail::Fanotify { flags, event_flags, marks } = info.detail else { panic!("{info:?}") };
        (flags, event_flags, marks)
    }

    const CREATE: u32 = libc::FAN_CREATE as u32;
    const OPEN: u32 = libc::FAN_OPEN as u32;

    #[test]
    fn a_group_is_as_it_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let kept = FAN_MARK_EVICTABLE | FAN_MARK_IGNORE | FAN_MARK_IGNORED_SURV_MODIFY;
        let flags = libc::FAN_REPORT_FID | libc::FAN_NONBLOCK;
        for privileged in [true, false] {
            let made = group(flags, libc::O_RDONLY as u32, privileged).unwrap();
            mark(&made, On::Inode, dir.path(), kept, CREATE, OPEN).unwrap();
            let (now, _, marks) = told(&made);
            assert_eq!((now, marks.len()), (flags, 1));
            assert!(matches!(marks[0].on, Marked::Inode(..)), "{marks:?}");
            assert_eq!((marks[0].flags, marks[0].mask, marks[0].ignored), (kept, CREATE, OPEN));
        }
        assert!(group(libc::FAN_REPORT_PIDFD, 0, false).is_err());
        assert!(
            !is_for_all(0) && !is_for_all(libc::FAN_REPORT_FID | libc::FAN_REPORT_TID) && is_for_all(flags)
        );
    }

    #[test]
    fn who_has_no_privilege_is_told_of_no_process() {
        let dir = tempfile::tempdir().unwrap();
        for privileged in [true, false] {
            let made = group(libc::FAN_REPORT_FID | libc::FAN_NONBLOCK, 0, privileged).unwrap();
            mark(&made, On::Inode, dir.path(), 0, CREATE, 0).unwrap();
            let file = dir.path().join(privileged.to_string());
            assert!(std::process::Command::new("touch").arg(file).status().unwrap().success());
            let mut event = vec![0u8; 4096];
            assert!(rustix::io::read(&made, &mut event[..]).unwrap() > 24);
            assert_eq!(i32::from_ne_bytes(event[20..24].try_into().unwrap()) != 0, privileged);
        }
    }

    #[test]
    fn what_is_read_to_be_forgotten_leaves_nothing_open() {
        let dir = tempfile::tempdir().unwrap();
        let flags = libc::FAN_NONBLOCK | libc::FAN_REPORT_PIDFD;
        let made = group(flags, libc::O_RDONLY as u32, true).unwrap();
        let children = libc::FAN_EVENT_ON_CHILD as u32;
        mark(&made, On::Inode, dir.path(), 0, OPEN | children, 0).unwrap();
        let names: Vec<_> = (0..50).map(|n| dir.path().join(n.to_string())).collect();
        names.iter().for_each(|name| std::fs::write(name, b"").unwrap());
        std::fs::remove_file(&names[7]).unwrap();
        let open_here = || {
            let all = crate::fdinfo::list(std::process::id()).unwrap();
            let named = all.into_iter().filter_map(|fd| crate::fdinfo::link(std::process::id(), fd).ok());
            named.filter(|link| link.starts_with(dir.path().as_os_str().as_bytes())).count()
        };
        assert!(crate::descriptors::readable(&made).unwrap() > 0);
        drain(&made).unwrap();
        assert_eq!(crate::descriptors::readable(&made).unwrap(), 0);
        assert_eq!(open_here(), 0);
    }
}
