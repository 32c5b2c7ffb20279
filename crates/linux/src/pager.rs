//! How processes of ours that put pages into a program are known: by their names, and by a handle to the program.

use crate::fdinfo::Folders;
use crate::proc::{Proc, processes};
use crate::spawn;
use std::ffi::CStr;

/// What such a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It puts in pages.
    Serves,
    /// It will when the others are dead.
    StandsBy,
    /// It puts in pages, but there are some that it cannot have.
    Lacks,
    /// It puts pages in and takes them out, as long as the program lives.
    Pages,
}

impl Role {
    /// The name in `/proc/PID/comm`.
    fn name(self) -> &'static CStr {
        match self {
            Role::Serves => c"stillpoint page",
            Role::StandsBy => c"page keeper",
            Role::Lacks => c"stillpoint lack",
            Role::Pages => c"stillpoint swap",
        }
    }
}

/// Tells by the name of this process what it does.
pub fn take_role(role: Role) {
    spawn::take_name(role.name());
}

fn role_of(pid: u32) -> Option<Role> {
    let name = Proc::process(pid).and_then(|p| p.comm()).unwrap_or_default();
    [Role::Serves, Role::StandsBy, Role::Lacks, Role::Pages]
        .into_iter()
        .find(|role| role.name().to_bytes() == name)
}

/// What those do that still put pages into this process, if there are any.
pub fn servers_of(pid: u32) -> Vec<Role> {
    let role = |server: u32| role_of(server).filter(|_| holds(server, pid));
    processes().unwrap_or_default().into_iter().filter_map(role).collect()
}

/// Whether a process has a handle (pidfd) to another one.
pub fn holds(holder: u32, pid: u32) -> bool {
    let Ok(folders) = Folders::open(holder) else { return false };
    let is_handle = |fd: u32| folders.process_of(fd).is_ok_and(|of| of == Some(pid.into()));
    folders.list().unwrap_or_default().into_iter().any(is_handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_serves_us() {
        assert!(servers_of(std::process::id()).is_empty());
    }
}
