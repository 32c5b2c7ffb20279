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

/// Soft and hard limits of all resources, in the order of [`NAMES`], as `/proc/PID/limits` tells them: that is open to
/// whoever may trace the process, while prlimit(2) asks for `CAP_SYS_RESOURCE` on another user's.
///
/// # Errors
/// [`Error::Gone`] or [`Error::Parse`].
pub fn all(process: &crate::proc::Proc) -> Result<Vec<(u64, u64)>> {
    let bytes = process.read("limits")?;
    let text = String::from_utf8_lossy(&bytes);
    // A head line, then one line for each resource in order: name (with spaces), soft, hard, unit (may be missing).
    let limits: Vec<_> = text.lines().skip(1).filter_map(limit_of).collect();
    if limits.len() != NAMES.len() {
        return Err(Error::Parse { path: process.path().join("limits"), line: text.into_owned() });
    }
    Ok(limits)
}

fn limit_of(line: &str) -> Option<(u64, u64)> {
    let number = |w: &str| if w == "unlimited" { Some(u64::MAX) } else { w.parse().ok() };
    // Names are in a column of their own; some end in a number of words, none in a number.
    let mut values = line.get(26..)?.split_whitespace().map_while(number);
    Some((values.next()?, values.next()?))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::Proc;

    #[test]
    fn both_ways_tell_the_same() {
        let pid = std::process::id();
        let all = all(&Proc::process(pid).expect("own folder")).expect("own limits");
        for (resource, limit) in all.into_iter().enumerate() {
            assert_eq!(limit, get(pid, resource as u32).expect("own limit"), "{}", NAMES[resource]);
        }
    }
}
