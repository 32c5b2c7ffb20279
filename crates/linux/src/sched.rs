//! Scheduling of other threads: what counts as their work, policy, priority, CPUs, I/O priority. sched(7), sched_setattr(2), ioprio_set(2).

use crate::{Error, Result};

/// Scheduling policy and parameters of a thread, `struct sched_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedAttr {
    /// Set by [`set_attributes`].
    pub size: u32,
    /// `SCHED_*`.
    pub policy: u32,
    /// `SCHED_FLAG_*`.
    pub flags: u64,
    /// Nice value; of `SCHED_OTHER` and `SCHED_BATCH` only.
    pub nice: i32,
    /// Real-time priority, 1 to 99.
    pub priority: u32,
    /// Deadline policy: run time, nanoseconds. Fair policies: time slice (since 6.12; 0: the default).
    pub runtime: u64,
    /// Deadline policy: deadline, nanoseconds.
    pub deadline: u64,
    /// Deadline policy: period, nanoseconds.
    pub period: u64,
    /// Lower clamp of utilisation, 0 to 1024.
    pub util_min: u32,
    /// Upper clamp of utilisation, 0 to 1024; 0 with `util_min` 0 where the kernel has no clamps.
    pub util_max: u32,
}

const _: () = assert!(size_of::<SchedAttr>() == 56);

/// `SCHED_FLAG_RESET_ON_FORK`, `SCHED_FLAG_RECLAIM`, `SCHED_FLAG_DL_OVERRUN`: flags that a thread keeps.
pub const KEPT_FLAGS: u64 = 1 | 2 | 4;
/// `SCHED_FLAG_UTIL_CLAMP_MIN | SCHED_FLAG_UTIL_CLAMP_MAX`: set the clamps too.
pub const SET_UTIL: u64 = 0x20 | 0x40;

/// Whether a clock counts the time that a process or thread works.
pub fn counts_work(clock: i32) -> bool {
    clock < 0 || matches!(clock, libc::CLOCK_PROCESS_CPUTIME_ID | libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Policy and parameters of a thread (sched_getattr(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`].
pub fn attributes(tid: u32) -> Result<SchedAttr> {
    let mut attr = SchedAttr::default();
    let len = size_of::<SchedAttr>();
    // SAFETY: the kernel writes at most `len` bytes to `attr`.
    let r = unsafe { libc::syscall(libc::SYS_sched_getattr, tid, &raw mut attr, len, 0) };
    check(r, tid, "read scheduling").map(|_| attr)
}

/// Sets policy and parameters of a thread (sched_setattr(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EPERM` without `CAP_SYS_NICE` for what `RLIMIT_RTPRIO` and `RLIMIT_NICE` do not
/// allow, `EBUSY` if the CPUs cannot take another deadline.
pub fn set_attributes(tid: u32, attr: &SchedAttr) -> Result<()> {
    let attr = SchedAttr { size: size_of::<SchedAttr>() as u32, ..*attr };
    // SAFETY: the kernel reads `size` bytes of `attr`.
    let r = unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attr, 0) };
    check(r, tid, "set scheduling").map(drop)
}

/// CPUs a thread may run on: bit mask, little-endian, in whole 8-byte words (sched_getaffinity(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`].
pub fn affinity(tid: u32) -> Result<Vec<u8>> {
    // The kernel refuses masks that are shorter than its own: 8192 CPUs at most.
    let mut mask = vec![0u8; 1024];
    // SAFETY: the kernel writes at most `mask.len()` bytes.
    let r = unsafe { libc::syscall(libc::SYS_sched_getaffinity, tid, mask.len(), mask.as_mut_ptr()) };
    mask.truncate(check(r, tid, "read CPU affinity")? as usize);
    Ok(mask)
}

/// Sets the CPUs a thread may run on (sched_setaffinity(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EINVAL` if none of the CPUs exists or its cpuset allows none.
pub fn set_affinity(tid: u32, mask: &[u8]) -> Result<()> {
    // SAFETY: the kernel reads `mask.len()` bytes.
    let r = unsafe { libc::syscall(libc::SYS_sched_setaffinity, tid, mask.len(), mask.as_ptr()) };
    check(r, tid, "set CPU affinity").map(drop)
}

/// While it lives, the calling thread runs on one CPU, if it may run there at all.
#[derive(Debug)]
pub struct Pinned {
    before: Option<Vec<u8>>,
}

impl Pinned {
    /// To this CPU.
    pub fn to(cpu: u32) -> Self {
        let mut mask = vec![0u8; (cpu as usize / 64 + 1) * 8];
        mask[cpu as usize / 8] |= 1 << (cpu % 8);
        let before = affinity(0).ok();
        Pinned { before: before.filter(|_| set_affinity(0, &mask).is_ok()) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.before.take().map(|before| set_affinity(0, &before));
    }
}

/// Sets the nice value of a thread, whatever its policy (setpriority(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EACCES` without `CAP_SYS_NICE` for less than `RLIMIT_NICE` allows.
pub fn set_nice(tid: u32, nice: i32) -> Result<()> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, tid, nice) };
    check(r, tid, "set nice value").map(drop)
}

const IOPRIO_WHO_PROCESS: i32 = 1;

/// I/O priority of a thread: class << 13 | level; 0: follows the nice value (ioprio_get(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`].
pub fn io_priority(tid: u32) -> Result<u32> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, tid) };
    check(r, tid, "read I/O priority").map(|r| r as u32)
}

/// Sets the I/O priority of a thread (ioprio_set(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EPERM` for the real-time class without `CAP_SYS_NICE`.
pub fn set_io_priority(tid: u32, priority: u32) -> Result<()> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, tid, priority) };
    check(r, tid, "set I/O priority").map(drop)
}

/// Head of the robust futex list of a thread and length of the head; (0, 0) if it has none (get_robust_list(2)).
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EPERM` if we may not trace it.
pub fn robust_list(tid: u32) -> Result<(crate::RemoteAddr, u64)> {
    let (mut head, mut len) = (0u64, 0u64);
    // SAFETY: the kernel writes one word to each pointer.
    let r = unsafe { libc::syscall(libc::SYS_get_robust_list, tid, &raw mut head, &raw mut len) };
    check(r, tid, "read robust list")?;
    Ok((crate::RemoteAddr(head), if head == 0 { 0 } else { len }))
}

fn check(r: i64, tid: u32, what: &str) -> Result<i64> {
    if r >= 0 {
        return Ok(r);
    }
    let source = std::io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ESRCH) => Err(Error::Gone(tid)),
        _ => Err(Error::call(format!("{what} of thread {tid}"), source)),
    }
}
