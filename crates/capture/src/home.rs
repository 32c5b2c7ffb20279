//! Where the ids of an image are told: in our own pid namespace, or in one that a restore of ours made because ids were taken.

use crate::Result;
use stillpoint_linux::proc::{Namespace, NamespaceKind, Proc, Status};

/// The pid namespace around a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Home {
    /// Place of its ids among those that a process has, of which the first are ours.
    pub level: usize,
    /// Where it is not ours: it, and the mount namespace that belongs to it.
    pub private: Vec<Namespace>,
    /// Its process 1 then, as we see it.
    pub first: Option<u32>,
}

impl Home {
    /// That of the program whose root this is.
    ///
    /// # Errors
    /// That it cannot be looked at.
    pub fn of(root: &Proc) -> Result<Self> {
        let own = Proc::process(std::process::id())?;
        let level = own.status()?.ns_tgid.len().saturating_sub(1);
        Ok(match restored_privately(&own, root)? {
            Some((first, private)) => Home { level: level + 1, private, first: Some(first) },
            None => Home { level, private: Vec::new(), first: None },
        })
    }

    /// Id of a process there.
    pub fn pid(&self, status: &Status) -> u32 {
        status.pid_at(self.level)
    }

    /// Id of a thread there.
    pub fn tid(&self, status: &Status) -> u32 {
        status.tid_at(self.level)
    }

    /// One of several ids, such as those of a session; `outer`: the one that we see.
    pub fn id(&self, ids: &[u32], outer: u32) -> u32 {
        ids.get(self.level).or(ids.last()).copied().unwrap_or(outer)
    }

    /// Those of several ids that are told in namespaces of the program's own, as far as there are any.
    pub fn inner(&self, ids: &[u32]) -> Vec<u32> {
        ids.iter().skip(self.level + 1).copied().take_while(|id| *id != 0).collect()
    }
}

/// Whether the program lives in a pid namespace that a restore of ours made because its process ids were taken: with a stillpoint
/// as its process 1, one level below us. Its mounts are ours but for `/proc`.
fn restored_privately(own: &Proc, root: &Proc) -> Result<Option<(u32, Vec<Namespace>)>> {
    let level = own.status()?.ns_tgid.len() + 1;
    let status = root.status()?;
    let mut pid = if status.ns_tgid.len() < level { 0 } else { status.ppid };
    while pid > 1 {
        let Ok(ancestor) = Proc::process(pid) else { return Ok(None) };
        let status = ancestor.status()?;
        if status.ns_tgid.len() == level && status.own_pid() == 1 {
            let same =
                |a: &Proc, b: &Proc| a.link("exe").ok().zip(b.link("exe").ok()).is_some_and(|(a, b)| a == b);
            let spaces = ancestor.namespaces_of(&[NamespaceKind::Pid, NamespaceKind::Mount]);
            return Ok(spaces.ok().filter(|_| same(own, &ancestor)).map(|spaces| (pid, spaces)));
        }
        pid = status.ppid;
    }
    Ok(None)
}
