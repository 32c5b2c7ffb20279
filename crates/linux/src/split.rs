//! Splitting a process of ours in two, where both go on with our own code. `fork(2)`, `clone3(2)`.

use crate::supervise::{Child, check, single_threaded};
use crate::{Error, Result};
use rustix::fd::{BorrowedFd, FromRawFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Which of the two processes it returned in.
#[derive(Debug)]
pub enum Split {
    /// The one that called, with its new child.
    Original(Child),
    /// The child.
    Copy,
}

/// Makes a copy of this process with the calling thread alone. Other threads of ours must hold no lock that the copy will
/// want, besides those of the allocator. One such is a lock of the standard library that each thread takes when it begins and
/// when it ends: no thread may do either meanwhile, so those that have done their work must have been joined (at the end of
/// a [`std::thread::scope`] they need not have ended), or the copy cannot start any.
pub fn copy() -> Result<Split> {
    // SAFETY: glibc puts its own locks, those of the allocator too, in order for the copy; the caller vouches for ours.
    let pid = unsafe { libc::fork() };
    check("fork", pid)?;
    if pid == 0 {
        return Ok(Split::Copy);
    }
    let named = Pid::from_raw(pid).ok_or_else(|| Error::Other("fork told no process id".into()))?;
    let pidfd = pidfd_open(named, PidfdFlags::empty()).map_err(|e| Error::call("pidfd_open", e))?;
    Ok(Split::Original(Child { pid: pid as u32, pidfd }))
}

/// As [`copy`], from a process of one thread; the two share one table of descriptors. What one opens the other has, also if
/// the first is killed in the next moment.
pub fn copy_sharing_descriptors() -> Result<Split> {
    single_threaded("make a copy of this process")?;
    let mut pidfd: i32 = -1;
    let args = crate::spawn::CloneArgs {
        flags: (libc::CLONE_FILES | libc::CLONE_PIDFD) as u64,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..Default::default()
    };
    // SAFETY: as `fork`: there is one thread, so the copy is complete and no lock is held by a thread that it lacks.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    check("clone3 (shared descriptors)", pid as i32)?;
    if pid == 0 {
        return Ok(Split::Copy);
    }
    // SAFETY: the kernel stored a new descriptor; the copy, in whose table it is too, does not know of it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Split::Original(Child { pid: pid as u32, pidfd }))
}

/// Closes all descriptors but these, whoever in this process owns them: for a copy that needs nothing else of the original
/// and leaves by [`leave`].
pub fn close_all_but(keep: &[i32]) {
    let mut keep: Vec<u32> = keep.iter().map(|&fd| fd as u32).collect();
    keep.sort_unstable();
    keep.dedup();
    let mut first = 0;
    for kept in keep.into_iter().map(Some).chain([None]) {
        let last = kept.map_or(u32::MAX, |kept| kept.wrapping_sub(1));
        if kept != Some(first) && (kept.is_none() || last >= first) {
            // SAFETY: close_range(2) takes no pointers; the caller vouches that nobody uses what is closed.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
        first = kept.map_or(first, |kept| kept + 1);
    }
}

/// A descriptor of the table that processes of ours share, by its number. It has no owner: it stays open for as long as
/// they agree that it does.
pub fn shared_descriptor(number: i32) -> BorrowedFd<'static> {
    // SAFETY: if it has been closed after all, the kernel says so whenever it is used; no memory is at stake.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Whether a descriptor is a handle of a process that has ended and is buried. Unlike a look at its `fdinfo` this opens nothing:
/// where no descriptor is left, it still tells (pidfd_send_signal(2): `ESRCH` then, `EBADF` for what is no such handle).
pub fn is_handle_of_nobody(number: i32) -> bool {
    // SAFETY: signal 0 is sent to nobody, and without information about it nothing is read.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, number, 0, std::ptr::null::<u8>(), 0) };
    sent < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

/// The most descriptors that this process may have.
pub fn most_descriptors() -> i32 {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    most.and_then(|most| i32::try_from(most).ok()).unwrap_or(i32::MAX)
}

/// Closes a descriptor that has no owner.
pub fn close_shared(number: i32) {
    // SAFETY: close(2) takes no pointers; whoever shares the table agreed that nobody uses it any more.
    unsafe { libc::close(number) };
}

/// Ends this process at once: nothing of what the original left unfinished is finished here.
pub fn leave(code: i32) -> ! {
    // SAFETY: it does not return.
    unsafe { libc::_exit(code) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::supervise::{Change, wait};
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::fd::{AsFd, AsRawFd};
    use std::io::{Read, Write};

    #[test]
    fn handles_of_those_who_are_buried_are_told_apart() {
        let other = std::fs::File::open("/dev/null").unwrap();
        let own = pidfd_open(Pid::from_raw(std::process::id() as i32).unwrap(), PidfdFlags::empty()).unwrap();
        assert!(!is_handle_of_nobody(other.as_raw_fd()) && !is_handle_of_nobody(own.as_raw_fd()));
        match copy().unwrap() {
            Split::Copy => leave(0),
            Split::Original(child) => {
                poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], None).unwrap();
                assert!(!is_handle_of_nobody(child.pidfd.as_raw_fd()), "it is not buried yet");
                wait(child.pidfd.as_fd()).unwrap();
                assert!(is_handle_of_nobody(child.pidfd.as_raw_fd()));
            }
        }
        assert!((1..1 << 30).contains(&most_descriptors()), "{}", most_descriptors());
    }

    #[test]
    fn a_copy_keeps_only_what_it_is_told_to() {
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let other = std::fs::File::open("/dev/null").unwrap();
        match copy().unwrap() {
            Split::Copy => {
                close_all_but(&[writer.as_raw_fd()]);
                let closed = rustix::io::fcntl_getfd(&other).is_err();
                let _ = writer.write_all(if closed { b"y" } else { b"n" });
                leave(7)
            }
            Split::Original(child) => {
                drop(writer);
                let mut said = String::new();
                reader.read_to_string(&mut said).unwrap();
                assert_eq!(said, "y");
                poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], None).unwrap();
                assert_eq!(wait(child.pidfd.as_fd()).unwrap(), Some(Change::Exited(7)));
            }
        }
    }
}
