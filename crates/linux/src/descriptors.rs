//! Duplicates of other processes' descriptors, and what can be asked of them without changing anything.

use crate::{Error, Result};
use std::cmp::Ordering;
use std::io::Error as IoError;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

/// Turns the result of a libc call into a [`Result`].
pub(crate) fn check(what: impl FnOnce() -> String, result: i64) -> Result<i64> {
    if result < 0 { Err(Error::call(what(), IoError::last_os_error())) } else { Ok(result) }
}

/// A duplicate of the descriptor of this number, if this process was started with it (whatever it opens itself is
/// close-on-exec).
pub fn inherited(number: u32) -> Option<OwnedFd> {
    let number = i32::try_from(number).ok()?;
    // SAFETY: only borrowed for two questions; if the number is not open, both answer EBADF.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = rustix::io::fcntl_getfd(fd).ok()?;
    let passed_on = !flags.contains(rustix::io::FdFlags::CLOEXEC);
    passed_on.then(|| rustix::io::fcntl_dupfd_cloexec(fd, 3).ok()).flatten()
}

/// Whether a program that this process starts is passed the descriptor of this number.
pub fn pass_on(number: u32, passed: bool) -> Result<()> {
    let flags = if passed { rustix::io::FdFlags::empty() } else { rustix::io::FdFlags::CLOEXEC };
    // SAFETY: only borrowed to set its flags; if the number is not open, the answer is EBADF.
    let fd = unsafe { BorrowedFd::borrow_raw(number as i32) };
    rustix::io::fcntl_setfd(fd, flags).map_err(|e| Error::call("F_SETFD", e))
}

/// Makes a number the duplicate of a descriptor that a program which this process starts is passed. The number is free, or one
/// that this process was started with.
pub fn keep_at(fd: impl AsFd, number: u32) -> Result<()> {
    // SAFETY: dup2(2) touches no memory. What it closes at this number is not owned by any value of ours: those are opened
    // elsewhere, close-on-exec, by whoever owns them.
    let done = unsafe { libc::dup2(fd.as_fd().as_raw_fd(), number as i32) };
    check(|| format!("duplicate a descriptor to {number}"), done.into()).map(drop)
}

/// Duplicates descriptor `fd` of a process into ours (`pidfd_getfd(2)`). The duplicate shares the open file
/// description: reading from it, seeking and changing its flags would be seen by the process.
pub fn duplicate_from(pidfd: BorrowedFd<'_>, fd: u32) -> Result<OwnedFd> {
    // SAFETY: pidfd_getfd touches no memory of ours; a result that is not negative is a new descriptor nobody owns.
    unsafe {
        let r = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0);
        let new = check(|| format!("duplicate descriptor {fd} of the target"), r)?;
        Ok(OwnedFd::from_raw_fd(new as i32))
    }
}

/// Opens `/dev/null` for reading and writing.
pub fn null() -> Result<OwnedFd> {
    let file = std::fs::File::options().read(true).write(true).open("/dev/null");
    file.map(OwnedFd::from).map_err(|e| Error::file("/dev/null", e))
}

/// Opens a pidfd (`pidfd_open(2)`); `flags` may be `PIDFD_THREAD` (`O_EXCL`).
pub fn pidfd_open(pid: u32, flags: u32) -> Result<OwnedFd> {
    // SAFETY: as in `duplicate_from`.
    unsafe {
        let r = libc::syscall(libc::SYS_pidfd_open, pid, flags);
        let new = check(|| format!("open a handle to process {pid}"), r)?;
        Ok(OwnedFd::from_raw_fd(new as i32))
    }
}

/// How the process of a pidfd ended, as `wait(2)` tells it, be it waited for or not (`PIDFD_GET_INFO` of `pidfd_open(2)`, Linux 6.15); none if
/// it has not, or the kernel does not tell.
///
/// # Errors
/// That the kernel refuses to answer.
pub fn exit_status(pidfd: impl AsFd) -> Result<Option<u32>> {
    /// `struct pidfd_info` of the first size: mask, cgroup, eleven ids, status.
    const WORDS: usize = 8;
    const EXIT: u64 = 1 << 3; // PIDFD_INFO_EXIT
    const REQUEST: u64 = 3 << 30 | (WORDS as u64 * 8) << 16 | 0xff << 8 | 11; // PIDFD_GET_INFO
    let mut info = [EXIT, 0, 0, 0, 0, 0, 0, 0u64];
    // SAFETY: the kernel fills in as many bytes as the request tells, which the array has.
    let r = unsafe { libc::ioctl(pidfd.as_fd().as_raw_fd(), REQUEST as libc::Ioctl, info.as_mut_ptr()) };
    match check(|| "ask a handle to a process how that ended".into(), r.into()) {
        Ok(_) if info[0] & EXIT != 0 => Ok(Some((info[WORDS - 1] >> 32) as u32)),
        Ok(_) => Ok(None),
        // The kernel knows no such question, or nothing of a process that is no more.
        Err(e) if matches!(e.errno(), Some(libc::ENOTTY | libc::EINVAL | libc::ESRCH)) => Ok(None),
        Err(e) => Err(e),
    }
}

const KCMP_FILE: i32 = 0;
const KCMP_EPOLL_TFD: i32 = 7;

/// `struct kcmp_epoll_slot`.
#[repr(C)]
struct EpollSlot {
    efd: u32,
    tfd: u32,
    toff: u32,
}

/// A descriptor of a process: process id and number.
pub type OfProcess = (u32, u32);

/// Compares the open file descriptions of two descriptors (`kcmp(2)`, `KCMP_FILE`). The order is arbitrary but total, and
/// stays the same while they are open.
pub fn compare(a: OfProcess, b: OfProcess) -> Result<Ordering> {
    // SAFETY: KCMP_FILE touches no memory.
    let r = unsafe { libc::syscall(libc::SYS_kcmp, a.0, b.0, KCMP_FILE, a.1, b.1) };
    let what = || format!("compare descriptor {} of process {} and {} of {}", a.1, a.0, b.1, b.0);
    match check(what, r)? {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        _ => Ok(Ordering::Greater),
    }
}

/// Whether a descriptor is the file that an epoll watches under number `watched`, in the `nth` watch of that number
/// (`kcmp(2)`, `KCMP_EPOLL_TFD`).
pub fn is_watched(file: OfProcess, epoll: OfProcess, watched: u32, nth: u32) -> Result<bool> {
    let slot = EpollSlot { efd: epoll.1, tfd: watched, toff: nth };
    // SAFETY: the kernel reads a `struct kcmp_epoll_slot` from a valid address.
    let r =
        unsafe { libc::syscall(libc::SYS_kcmp, file.0, epoll.0, KCMP_EPOLL_TFD, file.1, &raw const slot) };
    Ok(check(|| format!("look up what epoll descriptor {} of process {} watches", epoll.1, epoll.0), r)? == 0)
}

/// Who gets the signals of a description: `F_GETOWN_EX` and `F_GETSIG`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignalOwner {
    /// `F_OWNER_TID` 0, `F_OWNER_PID` 1 or `F_OWNER_PGRP` 2.
    pub kind: i32,
    /// Its id in our pid namespace; 0: nobody.
    pub id: i32,
    /// Signal that is sent (0: `SIGIO`).
    pub signal: i32,
}

/// `F_SETOWN_EX` of `fcntl(2)`.
pub const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;
/// `F_SETSIG` of `fcntl(2)`.
pub const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;

/// Who gets the signals of a description.
pub fn signal_owner(fd: impl AsFd) -> Result<SignalOwner> {
    let raw = fd.as_fd().as_raw_fd();
    let mut owner = [0i32; 2];
    // SAFETY: F_GETOWN_EX writes a `struct f_owner_ex`, two ints; F_GETSIG touches no memory.
    unsafe {
        check(|| "F_GETOWN_EX".into(), libc::fcntl(raw, F_GETOWN_EX, owner.as_mut_ptr()).into())?;
        let signal = check(|| "F_GETSIG".into(), libc::fcntl(raw, F_GETSIG).into())? as i32;
        Ok(SignalOwner { kind: owner[0], id: owner[1], signal })
    }
}

/// Duplicates a descriptor to the lowest free number from `from` on, close-on-exec.
pub fn duplicate_above(fd: impl AsFd, from: u32) -> Result<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC touches no memory; its result is a new descriptor nobody owns.
    unsafe {
        let r = libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_DUPFD_CLOEXEC, from as i32);
        let new = check(|| format!("duplicate a descriptor above {from}"), r.into())?;
        Ok(OwnedFd::from_raw_fd(new as i32))
    }
}

/// `ioctl(2)` with an integer result, such as `FIONREAD`.
pub(crate) fn ioctl_int(fd: impl AsFd, request: u64, what: &str) -> Result<i32> {
    let mut value = 0i32;
    // SAFETY: callers pass only requests that write one int.
    let r = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as libc::Ioctl, &raw mut value) };
    check(|| what.to_owned(), r.into())?;
    Ok(value)
}

/// `ioctl(2)` with a pointer to an integer as input.
pub(crate) fn ioctl_set_int(fd: impl AsFd, request: u64, value: i32, what: &str) -> Result<()> {
    // SAFETY: callers pass only requests that read one int.
    let r = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as libc::Ioctl, &raw const value) };
    check(|| what.to_owned(), r.into()).map(drop)
}

/// Bytes that can be read (`FIONREAD`).
pub fn readable(fd: impl AsFd) -> Result<u32> {
    Ok(ioctl_int(fd, libc::FIONREAD, "FIONREAD")? as u32)
}

/// Events of `poll(2)` that are pending on a descriptor at this moment.
pub fn poll_now(fd: impl AsFd, events: i16) -> Result<i16> {
    let mut poll = libc::pollfd { fd: fd.as_fd().as_raw_fd(), events, revents: 0 };
    // SAFETY: one valid pollfd; a timeout of zero returns at once.
    let r = unsafe { libc::poll(&raw mut poll, 1, 0) };
    check(|| "poll".into(), r.into())?;
    Ok(poll.revents)
}

/// Opens a file again through our own `/proc/self/fd`: a new open file description of the same file.
pub fn reopen(fd: impl AsFd, flags: i32) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let c = std::ffi::CString::new(path.clone()).map_err(|e| Error::Other(e.to_string()))?;
    // SAFETY: a valid C string; the result is a new descriptor nobody owns.
    unsafe {
        let r = libc::open(c.as_ptr(), flags | libc::O_CLOEXEC);
        if r < 0 {
            return Err(Error::file(path, IoError::last_os_error()));
        }
        Ok(OwnedFd::from_raw_fd(r))
    }
}

/// Makes room for so many more descriptors at once. The kernel waits for all CPUs (`synchronize_rcu`, 10 ms and more)
/// whenever the table of a process with several threads outgrows its size.
pub fn make_room(count: usize) {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let highest = (open + count) as libc::rlim_t;
    let limit = raise_descriptor_limit().map_or(0, |(_, most)| most);
    if let Ok(folder) = std::fs::File::open("/proc/self/fd")
        && limit > 0
    {
        // Closing it again leaves the table as large as it is.
        let _ = duplicate_above(folder, highest.min(limit - 1) as u32);
    }
}

/// The soft and the hard limit on descriptor numbers of this process; raises the soft one to the hard one, and that to a million, as
/// far as the kernel allows (`fs.nr_open`, with `CAP_SYS_RESOURCE`).
pub fn raise_descriptor_limit() -> Result<(u64, u64)> {
    /// Somebody who goes through all numbers there may be has an end of it.
    const ENOUGH: u64 = 1 << 20;
    static MOST: OnceLock<Option<u64>> = OnceLock::new();
    let most = MOST.get_or_init(|| std::fs::read_to_string("/proc/sys/fs/nr_open").ok()?.trim().parse().ok());
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and writes valid rlimits.
    unsafe {
        check(|| "read RLIMIT_NOFILE".into(), libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit).into())?;
        let before = limit.rlim_cur;
        if let Some(most) = most.map(|most| most.min(ENOUGH)).filter(|most| *most > limit.rlim_max) {
            let higher = libc::rlimit { rlim_cur: most, rlim_max: most };
            if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const higher) == 0 {
                return Ok((before, most));
            }
        }
        limit.rlim_cur = limit.rlim_max;
        check(
            || "raise RLIMIT_NOFILE".into(),
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit).into(),
        )?;
        Ok((before, limit.rlim_max))
    }
}
