//! What is in a mount namespace: the mounts that are around the program, and perhaps procfs of a pid namespace of its own.
//!
//! Any other difference is refused. So each path leads to the same file within and around it, but for those below `/proc`.

use super::{HINT, Own, name};
use crate::attributes::target::named;
use crate::{Builder, Result};
use std::collections::HashMap;
use stillpoint_image::{Namespace, Propagation};
use stillpoint_linux::proc::mounts::Mount;
use stillpoint_linux::proc::{NamespaceKind, Proc};

/// Options with which procfs is mounted (`unshare --mount-proc`, and most others).
const PROC: &[u8] = b"rw,nosuid,nodev,noexec,relatime";
/// So many differences are told.
const FEW: usize = 5;

/// Refuses processes that could not be put into theirs: it is entered by a process whose directories are its own alone.
pub(crate) fn check(builder: &mut Builder, pids: &[u32]) {
    let is_mount =
        |row: &u32| matches!(builder.image.namespaces.get(*row as usize), Some(Namespace::Mount { .. }));
    let all = &builder.image.processes;
    let shares = |row: usize| {
        all[row].shares_fs.is_some() || all.iter().any(|other| other.shares_fs == Some(row as u32))
    };
    let by_thread = |row: usize| {
        all[row].ended().iter().any(|e| e.parent_thread.is_some())
            || all.iter().any(|p| p.parent == Some(row as u32) && p.parent_thread.is_some())
    };
    let apart = |row: usize| all[row].threads.iter().any(|thread| thread.directories.is_some());
    let inside = (0..all.len()).filter(|&row| all[row].namespaces.iter().any(is_mount));
    let found: Vec<usize> = inside.filter(|&row| shares(row) || by_thread(row) || apart(row)).collect();
    for row in found {
        let why = "it is in a mount namespace of the program's own, and shares its directories with others, or has children of a \
                   thread";
        builder.refuse(named(pids[row]), why, "");
    }
}

/// Describes a namespace. `pids`: pid namespaces of the program's own by their inode numbers, with their rows.
pub(super) fn describe(builder: &mut Builder, own: &Own, pids: &[(u64, Option<u32>)]) -> Result<Namespace> {
    let around = Proc::process(builder.home.first.unwrap_or_else(std::process::id))?.mounts()?;
    // Whoever has another root sees fewer.
    let seen = own.pids.iter().filter_map(|&pid| Some((pid, Proc::process(pid).ok()?.mounts().ok()?)));
    let Some((pid, within)) = seen.max_by_key(|(_, mounts)| mounts.len()) else {
        return Ok(Namespace::Mount { propagation: Propagation::Private, proc: None });
    };
    let mut differences = Vec::new();
    let added = compare(&around, &within, &mut differences);
    let mut of = None;
    for mount in added {
        let is_proc = mount.kind == b"proc" && mount.point == b"/proc" && mount.root == b"/";
        let shows = is_proc.then(|| shown_by(pid)).flatten();
        let known = shows.and_then(|id| pids.iter().find(|(known, _)| *known == id));
        let is_plain = mount.options == PROC && mount.settings == b"rw" && !is_shared(mount);
        match known.filter(|_| is_plain && of.is_none() && is_top(mount, &within)) {
            Some((_, row)) => {
                of = Some(*row);
                builder.foreign.insert(rustix::fs::makedev(mount.device.0, mount.device.1));
            }
            None => differences.push(format!("{} on {} is new", text(&mount.kind), text(&mount.point))),
        }
    }
    let propagation = propagation(&around, &within, of.is_some());
    if propagation.is_none() {
        differences.push("what its mounts pass on to others, and receive from them".into());
    }
    if !differences.is_empty() {
        let more = differences.len().saturating_sub(FEW);
        differences.truncate(FEW);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let why = format!("its mounts are not those around the program: {}{more}", differences.join(", "));
        builder.refuse(name(NamespaceKind::Mount), why, HINT);
    }
    Ok(Namespace::Mount { propagation: propagation.unwrap_or(Propagation::Private), proc: of.flatten() })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn is_shared(mount: &Mount) -> bool {
    mount.shared.is_some() || mount.master.is_some() || mount.is_special
}

/// What a mount is, but for its number and what it shares with others.
type Key<'a> = ((u32, u32), [&'a [u8]; 5]);

fn key(mount: &Mount) -> Key<'_> {
    (mount.device, [&mount.root, &mount.point, &mount.options, &mount.kind, &mount.settings])
}

/// What all mounts are, each with that on which it is.
fn keys(all: &[Mount]) -> impl Iterator<Item = ((Key<'_>, Option<Key<'_>>), &Mount)> {
    let by_id: HashMap<u64, &Mount> = all.iter().map(|mount| (mount.id, mount)).collect();
    all.iter().map(move |mount| {
        let below = by_id.get(&mount.parent).filter(|below| below.id != mount.id);
        ((key(mount), below.map(|below| key(below))), mount)
    })
}

/// The mounts within a namespace that are not around it; notes those that are around it only.
fn compare<'a>(around: &[Mount], within: &'a [Mount], differences: &mut Vec<String>) -> Vec<&'a Mount> {
    let mut left: HashMap<_, Vec<&Mount>> = HashMap::new();
    keys(around).for_each(|(key, mount)| left.entry(key).or_default().push(mount));
    let mut added = Vec::new();
    for (key, mount) in keys(within) {
        if left.get_mut(&key).and_then(Vec::pop).is_none() {
            added.push(mount);
        }
    }
    for mount in left.into_values().flatten() {
        differences.push(format!("{} on {} is not there", text(&mount.kind), text(&mount.point)));
    }
    added
}

/// Whether nothing is mounted on it.
fn is_top(mount: &Mount, all: &[Mount]) -> bool {
    !all.iter().any(|other| other.parent == mount.id && other.id != mount.id)
}

/// The pid namespace that procfs shows to a process.
fn shown_by(pid: u32) -> Option<u64> {
    let link = std::fs::read_link(format!("/proc/{pid}/root/proc/1/ns/pid")).ok()?;
    link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// The peer groups that a mount shares events with, and receives them from.
type Peers = (Option<u64>, Option<u64>);

/// What all mounts that are around it, too, have in common: that they pass nothing on, that they only receive, or that they share as
/// those around. `has_more`: there is one that is not around it, and shares nothing.
fn propagation(around: &[Mount], within: &[Mount], has_more: bool) -> Option<Propagation> {
    if within.iter().any(|mount| mount.is_special) {
        return None;
    }
    if within.iter().all(|mount| !is_shared(mount)) {
        return Some(Propagation::Private);
    }
    let shares: HashMap<_, _> =
        around.iter().map(|m| ((&m.root, &m.point, m.device), (m.shared, m.master))).collect();
    // Several on one place cannot be told apart here.
    if shares.len() != around.len() || has_more {
        return None;
    }
    let all = |fits: fn(Peers, Peers) -> bool| {
        within.iter().all(|mount| {
            let of_it = shares.get(&(&mount.root, &mount.point, mount.device));
            of_it.is_some_and(|around| fits(*around, (mount.shared, mount.master)))
        })
    };
    if all(|around, within| around == within) {
        return Some(Propagation::Unchanged);
    }
    let receives = |around: Peers, within: Peers| within.0.is_none() && within.1 == around.0.or(around.1);
    all(receives).then_some(Propagation::Slave)
}
