//! System call filtering of a traced thread that `/proc` does not tell. ptrace(2), seccomp(2).

use crate::ptrace::Stopped;
use crate::{Error, Result};
use linux_raw_sys::ptrace::{
    PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, PTRACE_SECCOMP_GET_METADATA, ptrace_sud_config, seccomp_metadata,
};

const _: () = assert!(size_of::<seccomp_metadata>() == 16 && size_of::<ptrace_sud_config>() == 32);

/// `SECCOMP_FILTER_FLAG_*` of one filter of a thread, as far as they can be read back (`LOG`); index 0 is the oldest.
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; `EACCES` without `CAP_SYS_ADMIN`.
pub fn filter_flags(thread: &Stopped, index: u64) -> Result<u64> {
    let mut data = seccomp_metadata { filter_off: index, flags: 0 };
    let (request, len) = (PTRACE_SECCOMP_GET_METADATA, size_of::<seccomp_metadata>());
    // SAFETY: the kernel reads and writes at most `len` bytes of `data`.
    let r = unsafe { libc::syscall(libc::SYS_ptrace, request, thread.tid(), len, &raw mut data) };
    check(r, thread, "flags of a seccomp filter").map(|()| data.flags)
}

/// Whether the thread has its system calls dispatched to itself (`PR_SET_SYSCALL_USER_DISPATCH`). Calls that we make
/// it run would be dispatched too.
///
/// # Errors
/// [`Error::Gone`] or [`Error::Call`]; kernels before 6.4 do not tell (`EIO`).
pub fn dispatches_calls(thread: &Stopped) -> Result<bool> {
    let mut config = ptrace_sud_config { mode: 0, selector: 0, offset: 0, len: 0 };
    let (request, len) = (PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, size_of::<ptrace_sud_config>());
    // SAFETY: the kernel writes `len` bytes to `config`.
    let r = unsafe { libc::syscall(libc::SYS_ptrace, request, thread.tid(), len, &raw mut config) };
    check(r, thread, "system call dispatch").map(|()| config.mode != 0)
}

fn check(r: i64, thread: &Stopped, what: &str) -> Result<()> {
    if r >= 0 {
        return Ok(());
    }
    let source = std::io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ESRCH) => Err(Error::Gone(thread.tid())),
        _ => Err(Error::call(format!("{what} of thread {}", thread.tid()), source)),
    }
}
