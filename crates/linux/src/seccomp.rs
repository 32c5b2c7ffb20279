//! System call filtering of a traced thread that `/proc` does not tell. ptrace(2), seccomp(2).

use crate::ptrace::Stopped;
use crate::{Error, Result};
use linux_raw_sys::ptrace::{PTRACE_SECCOMP_GET_METADATA, seccomp_metadata};

const _: () = assert!(size_of::<seccomp_metadata>() == 16);

/// `SECCOMP_FILTER_FLAG_*` of one filter of a thread, as far as they can be read back (`LOG`); index 0 is the oldest.
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EACCES` without `CAP_SYS_ADMIN`.
pub fn filter_flags(thread: &Stopped, index: u64) -> Result<u64> {
    let mut data = seccomp_metadata { filter_off: index, flags: 0 };
    let (request, len) = (PTRACE_SECCOMP_GET_METADATA, size_of::<seccomp_metadata>());
    // SAFETY: the kernel reads and writes at most `len` bytes of `data`.
    let r = unsafe { libc::syscall(libc::SYS_ptrace, request, thread.tid(), len, &raw mut data) };
    if r >= 0 {
        return Ok(data.flags);
    }
    let source = std::io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ESRCH) => Err(Error::Gone(thread.tid())),
        _ => Err(Error::call(format!("flags of a seccomp filter of thread {}", thread.tid()), source)),
    }
}
