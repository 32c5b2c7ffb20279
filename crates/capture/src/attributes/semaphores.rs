//! System V semaphores, which stay when the program ends; but what it did to them with `SEM_UNDO` the kernel undoes then.
//!
//! Nobody can read what is to be undone. What can be told: a process whose list of it was never made has nothing in it
//! (`kcmp` finds the same nothing as in a new process), and neither has one that was never the last to operate on a
//! semaphore that is there. (A process with threads always has a list.)

use crate::{Builder, Result};
use stillpoint_linux::sharing::{self, Shared};
use stillpoint_linux::{spawn, sysv, sysv::SemaphoreSet};

/// Refuses processes that may have operations to be undone.
pub fn refuse_undo(builder: &mut Builder, pids: &[u32]) -> Result<()> {
    let ours = sysv::semaphores()?;
    let mut users = Vec::new();
    for &pid in pids {
        let used = |set: &&SemaphoreSet| set.last_users.contains(&pid);
        let set = match builder.namespaces.has_ipc_of(pid) {
            true => builder.namespaces.in_ipc_of(pid, sysv::semaphores)?.iter().find(used).cloned(),
            false => ours.iter().find(used).cloned(),
        };
        users.extend(set.map(|set| (pid, set)));
    }
    if users.is_empty() {
        return Ok(());
    }
    // A new process has no list.
    let fresh = spawn::shell(&[], 0)?;
    let shared = |(pid, set)| Ok((sharing::shared(fresh.pid, pid, Shared::SemaphoreUndo)?, set));
    let looked: Result<Vec<_>> = users.into_iter().map(shared).collect();
    let _ = rustix::process::pidfd_send_signal(&fresh.pidfd, rustix::process::Signal::KILL);
    spawn::reap(fresh.pid);
    for (_, set) in looked?.into_iter().filter(|(none, _)| !none) {
        let what = format!("semaphore set {} (key {:#x})", set.id, set.key);
        let why = "the program has operated on it, and may have asked that to be undone when it ends (SEM_UNDO), \
                   which nobody can read";
        builder.refuse(
            what,
            why,
            "remove the set (ipcrm -s), or let another process be the last one to operate on it",
        );
    }
    Ok(())
}
