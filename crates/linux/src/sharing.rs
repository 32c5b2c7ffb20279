//! Which kernel objects two threads or processes share. kcmp(2).

use crate::{Error, Result};
use std::cmp::Ordering;

/// A kernel object that threads may share or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// Address space (`CLONE_VM`).
    Memory = 1,
    /// Descriptor table (`CLONE_FILES`).
    Files = 2,
    /// Current directory, root and umask (`CLONE_FS`).
    FileSystem = 3,
    /// Signal actions (`CLONE_SIGHAND`).
    SignalActions = 4,
    /// System V semaphore undo list (`CLONE_SYSVSEM`). Threads that both have none count as sharing.
    SemaphoreUndo = 6,
}

/// Whether two threads share an object.
///
/// # Errors
/// [`Error::Gone`] with the first id if either is gone; [`Error::Call`] if we may not trace either (`EPERM`) or the
/// kernel was built without `CONFIG_KCMP` (`ENOSYS`).
pub fn shared(a: u32, b: u32, object: Shared) -> Result<bool> {
    Ok(compare(a, b, object)?.is_eq())
}

/// In which order the kernel has the objects of two threads, which is the same until it boots again; equal if they share one.
///
/// # Errors
/// As [`shared`].
pub fn compare(a: u32, b: u32, object: Shared) -> Result<Ordering> {
    // SAFETY: these kinds of comparison take no pointers.
    let r = unsafe { libc::syscall(libc::SYS_kcmp, a, b, object as i32, 0, 0) };
    match r {
        0 => return Ok(Ordering::Equal),
        1 => return Ok(Ordering::Less),
        2.. => return Ok(Ordering::Greater),
        _ => {}
    }
    let source = std::io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ESRCH) => Err(Error::Gone(a)),
        _ => Err(Error::call(format!("compare threads {a} and {b}"), source)),
    }
}
