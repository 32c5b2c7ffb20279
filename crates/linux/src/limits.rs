//! Resource limits of other processes. prlimit(2).

use crate::{Error, Result};

/// Names of the limits, by number (`RLIMIT_*` of `asm-generic/resource.h`).
pub const NAMES: [&str; 16] = [
    "CPU",
    "FSIZE",
    "DATA",
    "STACK",
    "CORE",
    "RSS",
    "NPROC",
    "NOFILE",
    "MEMLOCK",
    "AS",
    "LOCKS",
    "SIGPENDING",
    "MSGQUEUE",
    "NICE",
    "RTPRIO",
    "RTTIME",
];

const _: () = assert!(libc::RLIMIT_NOFILE == 7 && libc::RLIMIT_AS == 9 && libc::RLIMIT_RTTIME == 15);

/// Soft and hard limit of a resource; `u64::MAX` is infinity.
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EPERM` for another user's process.
pub fn get(pid: u32, resource: u32) -> Result<(u64, u64)> {
    change(pid, resource, None)
}

/// Sets soft and hard limit of a resource.
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EPERM` for a hard limit above the present one without `CAP_SYS_RESOURCE`.
pub fn set(pid: u32, resource: u32, soft: u64, hard: u64) -> Result<()> {
    change(pid, resource, Some([soft, hard])).map(drop)
}

fn change(pid: u32, resource: u32, new: Option<[u64; 2]>) -> Result<(u64, u64)> {
    let mut old = [0u64; 2];
    let new = new.as_ref().map_or(std::ptr::null(), |n| n.as_ptr());
    // SAFETY: `struct rlimit64` is two 64-bit words; the kernel reads `new` (or finds null) and writes `old`.
    let r = unsafe { libc::syscall(libc::SYS_prlimit64, pid, resource, new, old.as_mut_ptr()) };
    if r == 0 {
        return Ok((old[0], old[1]));
    }
    let source = std::io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ESRCH) => Err(Error::Gone(pid)),
        _ => {
            let name = NAMES.get(resource as usize).unwrap_or(&"?");
            Err(Error::call(format!("RLIMIT_{name} of process {pid}"), source))
        }
    }
}
