//! What an ordinary user may do: a user namespace of his own, in which he and his group are called as they are outside, and in which he has
//! the privileges that it takes to make processes as they were. user_namespaces(7)
//!
//! Supplementary groups stay as they are there, but only those outside can tell what they are called.

use crate::proc::Proc;
use crate::supervise::{check, show_own_processes};
use crate::{Error, Result, probe};
use std::sync::OnceLock;

const CAP_SYS_ADMIN: u64 = 1 << 21;
const CAP_CHECKPOINT_RESTORE: u64 = 1 << 40;

/// What this process was before it went into such a namespace.
static BEFORE: OnceLock<Before> = OnceLock::new();

/// What an ordinary user has outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Before {
    /// Effective user and group.
    uid: u32,
    gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding and ambient capabilities.
    pub caps: [u64; 5],
}

/// Whether this process lacks the privileges to make a process with its old id, and the program's executable.
///
/// # Errors
/// That its status cannot be read.
pub fn is_ordinary() -> Result<bool> {
    Ok(before()?.caps[2] & (CAP_SYS_ADMIN | CAP_CHECKPOINT_RESTORE) == 0)
}

/// What this process was outside, if it is in such a namespace now.
pub fn outside() -> Option<&'static Before> {
    BEFORE.get()
}

/// Whether a namespace of other kinds is to be had by this process in a user namespace of its own alone.
///
/// # Errors
/// That its status cannot be read.
pub fn needs_users() -> Result<bool> {
    Ok(without_privilege()?.is_some())
}

/// What a process that may not make other namespaces by itself is now; nothing if it may.
pub(crate) fn without_privilege() -> Result<Option<Before>> {
    Ok(Some(before()?).filter(|before| before.caps[2] & CAP_SYS_ADMIN == 0))
}

fn before() -> Result<Before> {
    let status = Proc::process(std::process::id())?.status()?;
    Ok(Before { uid: status.uid[1], gid: status.gid[1], groups: status.groups, caps: status.caps })
}

impl Before {
    /// In a new user namespace: the user and his group are called as they were. To be called while `/proc` is still that of outside.
    pub(crate) fn take_names(self) -> Result<()> {
        let write = |file: &str, text: String| {
            let path = format!("/proc/self/{file}");
            std::fs::write(&path, text).map_err(|e| Error::file(&path, e))
        };
        // The kernel asks for this of whoever has no privilege over groups outside.
        write("setgroups", "deny".into())?;
        write("uid_map", format!("{0} {0} 1", self.uid))?;
        write("gid_map", format!("{0} {0} 1", self.gid))?;
        let _ = BEFORE.set(self);
        Ok(())
    }
}

/// Whether this user can have such a namespace, with pids and a `/proc` of its own; otherwise what stands against it.
///
/// # Errors
/// What the kernel says of the step that failed.
pub fn probe() -> Result<()> {
    let before = before()?;
    let errno = |e: Error| e.errno().unwrap_or(libc::EIO);
    let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS;
    let first = move || {
        // SAFETY: the copy leaves at once.
        let shown = probe::in_child("show processes", || show_own_processes().map_or_else(errno, |()| 0));
        shown.map_or_else(errno, |()| 0)
    };
    probe::in_child("a user namespace with pids and a /proc of its own", move || {
        // SAFETY: unshare(2) takes no pointers; this is the only thread of the copy.
        match check("unshare", unsafe { libc::unshare(flags) }) {
            Ok(()) => before.take_names().map_or_else(errno, |()| first()),
            Err(e) => errno(e),
        }
    })
}

/// Whether a pid namespace is to be had as [`crate::supervise::private_namespace`] makes one; otherwise what stands against it.
///
/// # Errors
/// What the kernel says.
pub fn probe_private() -> Result<()> {
    if needs_users()? { probe() } else { probe::pid_namespace() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_of_ones_own_is_to_be_had() {
        // Where the kernel lets nobody have one it says so, and nothing else goes wrong.
        let told = probe();
        assert!(told.is_ok() || matches!(told.unwrap_err().errno(), Some(libc::EPERM | libc::ENOSPC)));
        assert_eq!(outside(), None);
    }
}
