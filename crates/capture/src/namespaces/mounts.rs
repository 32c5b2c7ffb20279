//! What is in a mount namespace: most often the mounts that are around the program, and perhaps procfs of a pid namespace of its
//! own. What else there is, is described mount by mount ([`Look`]).

use super::mounted::Look;
use super::{Other, Own, When};
use crate::attributes::target::named;
use crate::{Builder, Result};
use rustix::fs::makedev;
use std::collections::HashMap;
use std::sync::Arc;
use stillpoint_image::{Namespace, Propagation};
use stillpoint_linux::mounts::{self, View};
use stillpoint_linux::proc::mounts::Mount;
use stillpoint_linux::proc::{NamespaceKind, Proc};

/// Options with which procfs is mounted (`unshare --mount-proc`, and most others).
const PROC: &[u8] = b"rw,nosuid,nodev,noexec,relatime";

/// Refuses processes that could not be put into theirs: it is entered by a process whose directories are its own alone, and in it.
pub(crate) fn check(builder: &mut Builder, pids: &[u32]) {
    let is_mount =
        |row: &u32| matches!(builder.image.namespaces.get(*row as usize), Some(Namespace::Mount { .. }));
    let image = &builder.image;
    let all = &image.processes;
    let shares = |row: usize| {
        all[row].shares_fs.is_some() || all.iter().any(|other| other.shares_fs == Some(row as u32))
    };
    let by_thread = |row: usize| {
        all[row].ended().iter().any(|e| e.parent_thread.is_some())
            || all.iter().any(|p| p.parent == Some(row as u32) && p.parent_thread.is_some())
    };
    let apart = |row: usize| all[row].threads.iter().any(|thread| thread.directories.is_some());
    let mut found = Vec::new();
    for (row, process) in all.iter().enumerate() {
        let own = process.namespaces.iter().copied().find(is_mount);
        if own.is_some() && (shares(row) || by_thread(row) || apart(row)) {
            let why = "it is in a mount namespace of the program's own, and shares its directories with others, or has children \
                       of a thread";
            found.push((row, why));
        }
        let elsewhere = |path: u32| image.paths.get(path as usize).is_some_and(|path| path.namespace != own);
        let root = image.paths.get(process.root as usize);
        let is_changed = root.is_some_and(|root| root.path.0 != b"/");
        if elsewhere(process.root) || is_changed && elsewhere(process.cwd) {
            let why = "its root (chroot), or its current directory beside that, is in another mount namespace than it is";
            found.push((row, why));
        }
    }
    for (row, why) in found {
        builder.refuse(named(pids[row]), why, "");
    }
}

/// Describes a namespace; it may show some of the others of the program's own.
pub(super) fn describe(
    builder: &mut Builder,
    own: &Own,
    row: u32,
    others: &[Other],
    when: When,
) -> Result<Namespace> {
    let around = Proc::process(builder.home.first.unwrap_or_else(std::process::id))?.mounts()?;
    let View { root, mounts: within } = match when {
        When::Running => settled(own)?,
        _ => mounts::view(&own.file)?,
    };
    let root = Arc::new(root);
    let plain = as_around(&around, &within, own, others, when);
    let described = match plain {
        Some((propagation, proc)) => {
            if let Some((mount, _)) = proc {
                builder.foreign.insert(makedev(mount.device.0, mount.device.1));
            }
            let proc = proc.and_then(|(_, row)| row);
            Namespace::Mount { propagation, proc, mounts: None }
        }
        None => {
            let look = Look { around: &around, within: &within, root: &root, own, others, row, when };
            let (propagation, mounts) = look.describe(builder)?;
            Namespace::Mount { propagation, proc: None, mounts: Some(mounts) }
        }
    };
    if when != When::Running {
        builder.views.add(row, root, within, own.pids.clone());
    }
    Ok(described)
}

/// A namespace whose mounts may change meanwhile. Their list is read piece by piece: one that began before a change and ended after it
/// tells what has never been.
fn settled(own: &Own) -> Result<View> {
    const TRIES: usize = 10;
    let mut seen = mounts::view(&own.file)?;
    for _ in 0..TRIES {
        let again = mounts::view(&own.file)?;
        let is_settled = again.mounts == seen.mounts;
        seen = again;
        if is_settled {
            break;
        }
    }
    Ok(seen)
}

/// A procfs on `/proc`, and the row of the pid namespace that it shows.
type OwnProc<'a> = Option<(&'a Mount, Option<u32>)>;

/// What the mounts of a namespace share with those around it, and its procfs, if they are the same but for that.
fn as_around<'a>(
    around: &[Mount],
    within: &'a [Mount],
    own: &Own,
    others: &[Other],
    when: When,
) -> Option<(Propagation, OwnProc<'a>)> {
    let mut differences = Vec::new();
    let added = compare(around, within, &mut differences);
    let mut of = None;
    for mount in added {
        let is_proc = mount.kind == b"proc" && mount.point == b"/proc" && mount.root == b"/";
        let pids = || others.iter().filter(|other| other.space.kind == NamespaceKind::Pid);
        let known = match when {
            // To look into it would keep the program from unmounting it.
            When::Running => pids().next().filter(|_| is_proc),
            _ => {
                let shows = own.pids.iter().find_map(|pid| is_proc.then(|| shown_by(*pid)).flatten());
                pids().find(|other| Some(other.space.id) == shows)
            }
        };
        let is_plain = mount.options == PROC && mount.settings == b"rw" && !is_shared(mount);
        let known = known.filter(|_| is_plain && of.is_none() && is_top(mount, within))?;
        of = Some((mount, known.row));
    }
    let propagation = propagation(around, within, of.is_some())?;
    differences.is_empty().then_some((propagation, of))
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(super) fn is_shared(mount: &Mount) -> bool {
    mount.shared.is_some() || mount.master.is_some() || mount.is_special || mount.is_unbindable
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
    if within.iter().any(|mount| mount.is_special || mount.is_unbindable) {
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
