//! What an ordinary user may do: a user namespace of his own, in which he and his group are called as they are outside, and in which he has
//! the privileges that it takes to make processes as they were. user_namespaces(7)
//!
//! Supplementary groups stay as they are there, but only those outside can tell what they are called.

use crate::proc::Proc;
use crate::supervise::{check, show_own_processes};
use crate::{Error, Result, probe};
use std::ffi::CString;
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

/// Whether the system keeps this process from looking into those that are not its children, unless they live in a user namespace of its own:
/// Yama (`kernel.yama.ptrace_scope`, Documentation/admin-guide/LSM/Yama.rst), and no `CAP_SYS_PTRACE`.
///
/// # Errors
/// That our status cannot be read.
pub fn is_kept_off() -> Result<bool> {
    const CAP_SYS_PTRACE: u64 = 1 << 19;
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let before = before()?;
    // Root has all capabilities in any namespace.
    let may_be_let_in = matches!(scope.trim(), "1" | "2") && before.uid != 0;
    Ok(may_be_let_in && before.caps[2] & CAP_SYS_PTRACE == 0)
}

/// How a command comes to be in a user namespace of its own: its user and group are called as outside, it may have no more capabilities than
/// before, and the namespace is marked as one that we made.
#[derive(Clone, Debug)]
pub struct Apart {
    /// What is written to which file.
    names: Vec<(CString, String)>,
    bounding: u64,
}

/// Maps a project id to itself. Nobody needs a privilege for that, and nobody has a use for it.
const MARK: [&str; 3] = ["5709", "5709", "1"];

impl Apart {
    /// For our user.
    ///
    /// # Errors
    /// That such a namespace is not to be had.
    pub fn new() -> Result<Self> {
        let before = before()?;
        let own = |id: u32| format!("{id} {id} 1");
        let maps = [
            ("setgroups", "deny".to_owned()),
            ("uid_map", own(before.uid)),
            ("gid_map", own(before.gid)),
            ("projid_map", MARK.join(" ")),
        ];
        let path = |name: &str| CString::new(format!("/proc/self/{name}")).unwrap_or_default();
        let names = maps.into_iter().map(|(name, text)| (path(name), text)).collect();
        let apart = Apart { names, bounding: before.caps[3] };
        let tried = apart.clone();
        // SAFETY: the copy of this process has one thread, and leaves at once.
        probe::in_child("a user namespace", move || unsafe { tried.enter() }.err().unwrap_or(0))?;
        Ok(apart)
    }

    /// Goes there. An error is what the kernel says.
    ///
    /// # Safety
    /// The process has one thread. (It may have been forked by one that has more: nothing is allocated, and no lock taken.)
    pub(crate) unsafe fn enter(&self) -> std::result::Result<(), i32> {
        // SAFETY: the kernel reads as many bytes as there are; what is opened is closed.
        unsafe {
            let told =
                |result: i64| if result < 0 { Err(*libc::__errno_location()) } else { Ok(result as i32) };
            told(libc::unshare(libc::CLONE_NEWUSER).into())?;
            for (path, text) in &self.names {
                let fd = told(libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC).into())?;
                let written = told(libc::write(fd, text.as_ptr().cast(), text.len()) as i64);
                libc::close(fd);
                written?;
            }
            for capability in (0..64u64).filter(|n| self.bounding & 1 << n == 0) {
                // There are fewer of them than that.
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
        }
        Ok(())
    }
}

/// Whether a process lives in a user namespace that was made for it by [`Apart`].
///
/// # Errors
/// That it cannot be looked at.
pub fn is_apart(process: &Proc) -> Result<bool> {
    let map = process.read_optional("projid_map")?.unwrap_or_default();
    Ok(String::from_utf8_lossy(&map).split_whitespace().eq(MARK))
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
