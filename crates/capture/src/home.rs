//! Where the ids of an image are told: in our own pid namespace, or in one that a restore of ours made because ids were taken. And what is
//! around a program that is not its own.

use crate::Result;
use stillpoint_linux::proc::{Namespace, NamespaceKind, Proc, Status};
use stillpoint_linux::{namespaces, rootless};

/// The pid namespace around a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Home {
    /// Place of its ids among those that a process has, of which the first are ours.
    pub level: usize,
    /// Where it is not ours: it, the mount namespace that belongs to it, and the user namespace around it, if an ordinary user's restore
    /// made one; that alone, if the program was started in one.
    pub private: Vec<Namespace>,
    /// Its process 1 then, as we see it.
    pub first: Option<u32>,
    /// If that user namespace is not ours: the bounding set that whoever restored the program could give it. He has all privileges there,
    /// and could give others to what is there, which would count everywhere once it is restored elsewhere.
    pub most: Option<u64>,
}

impl Home {
    /// That of the program whose root this is.
    ///
    /// # Errors
    /// That it cannot be looked at.
    pub fn of(root: &Proc) -> Result<Self> {
        let own = Proc::process(std::process::id())?;
        let level = own.status()?.ns_tgid.len().saturating_sub(1);
        let home = match restored_privately(&own, root)? {
            None => started_apart(&own, root, level)?,
            restored => restored,
        };
        Ok(home.unwrap_or(Home { level, ..Home::default() }))
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
fn restored_privately(own: &Proc, root: &Proc) -> Result<Option<Home>> {
    let level = own.status()?.ns_tgid.len() + 1;
    let status = root.status()?;
    let mut pid = if status.ns_tgid.len() < level { 0 } else { status.ppid };
    while pid > 1 {
        let Ok(ancestor) = Proc::process(pid) else { return Ok(None) };
        let status = ancestor.status()?;
        if status.ns_tgid.len() == level && status.own_pid() == 1 {
            let same = |a: &Proc, b: &Proc| executable(a).zip(executable(b)).is_some_and(|(a, b)| a == b);
            if !same(own, &ancestor) {
                return Ok(None);
            }
            let kinds = [NamespaceKind::Pid, NamespaceKind::Mount, NamespaceKind::User];
            let Ok(private) = ancestor.namespaces_of(&kinds) else { return Ok(None) };
            let ours = own.namespaces_of(&[NamespaceKind::User])?;
            let is_ours = ours.iter().all(|users| private.contains(users));
            if !is_ours && !is_of_a_restore(&ancestor, &ours)? {
                return Ok(None);
            }
            let most = if is_ours { None } else { Some(most(own, &status)?) };
            return Ok(Some(Home { level: level - 1, private, first: Some(pid), most }));
        }
        pid = status.ppid;
    }
    Ok(None)
}

/// Whether the program lives in a user namespace that was made for it when it was started ([`rootless::Apart`]), with all else that we have.
fn started_apart(own: &Proc, root: &Proc, level: usize) -> Result<Option<Home>> {
    if !rootless::is_apart(root)? {
        return Ok(None);
    }
    let users = |of: &Proc| of.namespaces_of(&[NamespaceKind::User]);
    let (ours, private) = (users(own)?, users(root)?);
    if ours == private || !is_of_a_restore(root, &ours)? {
        return Ok(None);
    }
    let most = Some(most(own, &root.status()?)?);
    Ok(Some(Home { level, private, first: None, most }))
}

/// The name of what a process executes, also of one that has been put in its place meanwhile.
fn executable(process: &Proc) -> Option<Vec<u8>> {
    let name = process.link("exe").ok()?;
    Some(name.strip_suffix(b" (deleted)").unwrap_or(&name).to_vec())
}

/// Whether the user namespace of a process is as a restore makes one: right within ours, with one user and one group, who are called there
/// as they are here.
fn is_of_a_restore(first: &Proc, ours: &[Namespace]) -> Result<bool> {
    let (file, _) = namespaces::open(&format!("/proc/{}", first.pid()), NamespaceKind::User)?;
    let is_within = namespaces::parent(&file)?.is_some_and(|(_, id)| ours.iter().any(|users| users.id == id));
    let names_one = |map: &str| -> Result<bool> {
        let text = first.read_optional(map)?.unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let words: Vec<&str> = text.split_whitespace().collect();
        Ok(matches!(words[..], [inside, outside, "1"] if inside == outside))
    };
    let keeps_groups = first.read_optional("setgroups")?.is_some_and(|text| text.starts_with(b"deny"));
    Ok(is_within && keeps_groups && names_one("uid_map")? && names_one("gid_map")?)
}

/// [`Home::most`] of a process 1: what we have ourselves, if we have no privileges; otherwise what its maker has, if he is still there.
fn most(own: &Proc, first: &Status) -> Result<u64> {
    const EFFECTIVE: usize = 2;
    const BOUNDING: usize = 3;
    let own = own.status()?;
    if own.caps[EFFECTIVE] == 0 {
        return Ok(own.caps[BOUNDING]);
    }
    let maker = Proc::process(first.ppid).and_then(|maker| maker.status()).ok();
    Ok(maker.filter(|maker| maker.uid == first.uid).map_or(0, |maker| maker.caps[BOUNDING]))
}
