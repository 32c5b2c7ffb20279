//! How the processes of a tree belong together: parents, sessions, process groups, and children that have ended.

use crate::attributes::target::{Seen, named, refuse_sharer};
use crate::builder::Sharing;
use crate::home::Home;
use crate::target::Target;
use crate::{Builder, Error, Result, namespaces};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use stillpoint_image::pids::{Pids, namespace_of};
use stillpoint_image::{Ended, Image, LostLeader, Namespace, tree};
use stillpoint_linux::Error as Kernel;
use stillpoint_linux::proc::{self, Proc, Stat, Status};
use stillpoint_linux::sharing::{self, Shared};

/// What `/proc` tells of a process that was described, in the order of the rows.
pub struct Relative {
    /// Its id in our pid namespace.
    pub pid: u32,
    /// What was seen of its threads, the main thread first.
    pub threads: Vec<Seen>,
}

/// Ids as we see them and as the program does.
#[derive(Clone, Copy)]
struct Ids {
    pid: u32,
    own: u32,
    session: u32,
    own_session: u32,
    group: u32,
    own_group: u32,
}

impl Ids {
    fn of(home: &Home, stat: &Stat, status: &Status) -> Self {
        // In a private pid namespace, session and group may lie outside: 0 there.
        Ids {
            pid: stat.pid,
            own: home.pid(status),
            session: stat.session,
            own_session: home.id(&status.ns_sid, stat.session),
            group: stat.pgrp,
            own_group: home.id(&status.ns_pgid, stat.pgrp),
        }
    }
}

/// Fills in the relations of all processes of the image, and refuses what cannot be had again.
///
/// # Errors
/// That a child cannot be looked at.
pub fn describe(builder: &mut Builder, relatives: &[Relative]) -> Result<()> {
    let row_of: HashMap<u32, usize> = relatives.iter().enumerate().map(|(row, r)| (r.pid, row)).collect();
    let mut all = Vec::with_capacity(relatives.len());
    let mut ended: Vec<(usize, Ids, Ended)> = Vec::new();
    let mut leaders = Leaders::default();
    let home = builder.home.clone();
    for (row, relative) in relatives.iter().enumerate() {
        let look = &relative.threads[0].look;
        all.push(Ids::of(&home, &look.stat, &look.status));
        leaders.see(&home, namespace_of(&builder.image, &builder.image.processes[row]), &look.status);
        let process = &mut builder.image.processes[row];
        process.parent = row_of.get(&look.stat.ppid).filter(|_| row > 0).map(|&parent| parent as u32);
        let signal = look.stat.exit_signal;
        process.exit_signal = (signal != libc::SIGCHLD && row > 0).then_some(signal.max(0) as u32);
        for (place, thread) in relative.threads.iter().enumerate() {
            let parent_thread = (place > 0).then(|| home.tid(&thread.look.status));
            for child in &thread.look.children {
                match row_of.get(child) {
                    Some(&child) => builder.image.processes[child].parent_thread = parent_thread,
                    None => {
                        let found = zombie(builder, *child, &mut leaders)?;
                        ended.extend(found.map(|(ids, e)| (row, ids, Ended { parent_thread, ..e })));
                    }
                }
            }
        }
    }
    let members: Vec<Ids> = all.iter().copied().chain(ended.iter().map(|e| e.1)).collect();
    let root = all[0];
    for (row, ids) in all.iter().enumerate() {
        let (session, group) = belonging(builder, root, &members, ids);
        let process = &mut builder.image.processes[row];
        (process.session, process.group) = (session, group);
    }
    for (row, ids, mut end) in ended {
        (end.session, end.group) = belonging(builder, root, &members, &ids);
        builder.image.processes[row].ended.get_or_insert_with(Vec::new).push(end);
    }
    leaders.note(&mut builder.image);
    Ok(())
}

/// What is told, in pid namespaces of the program's own, of those who lead (or led) sessions and process groups: by their ids, where
/// they were and what they are called there.
#[derive(Default)]
struct Leaders(HashMap<u32, (Option<u32>, Vec<u32>)>);

impl Leaders {
    /// Takes in what a member tells, who is in this namespace.
    fn see(&mut self, home: &Home, namespace: Option<u32>, status: &Status) {
        if namespace.is_none() {
            return;
        }
        for ids in [&status.ns_sid, &status.ns_pgid] {
            let inner = home.inner(ids);
            let known = self.0.entry(home.id(ids, 0)).or_default();
            if inner.len() > known.1.len() {
                *known = (namespace, inner);
            }
        }
    }

    /// Notes those who are no more.
    fn note(self, image: &mut Image) {
        let mut found = Vec::new();
        let pids = Pids::of(image);
        for pid in tree::lost_leaders(image) {
            let Some((mut namespace, inner)) = self.0.get(&pid).cloned() else { continue };
            // It is one of those around the member, or the same.
            while pids.depth(namespace) > inner.len() {
                namespace = namespace.and_then(|namespace| pids.parent(namespace));
            }
            found.extend(namespace.map(|namespace| LostLeader { pid, namespace, inner }));
        }
        image.leaders = found;
    }
}

/// How long we wait for a child that is just ending, while the program stands still: most take less than a millisecond.
const ENDING: Duration = Duration::from_millis(20);

/// A child that is not part of the tree: it has ended, or is about to.
fn zombie(builder: &mut Builder, pid: u32, leaders: &mut Leaders) -> Result<Option<(Ids, Ended)>> {
    let Ok(folder) = Proc::process(pid) else { return Ok(None) };
    let began = Instant::now();
    let (stat, status) = loop {
        match folder.stat().and_then(|stat| Ok((stat, folder.status()?))) {
            Ok((stat, _)) if stat.state != b'Z' && stat.ends() && began.elapsed() < ENDING => {
                std::thread::sleep(Duration::from_micros(100));
            }
            Ok(both) => break both,
            // Nobody has to wait for it.
            Err(Kernel::Gone(_)) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    };
    if stat.state != b'Z' {
        builder.refuse(format!("child {}", named(pid)), "it is just beginning or ending", "try again");
        return Ok(None);
    }
    let home = builder.home.clone();
    let ids = Ids::of(&home, &stat, &status);
    let signal = stat.exit_signal;
    let exit_signal = (signal != libc::SIGCHLD).then_some(signal.max(0) as u32);
    let inner = home.inner(&status.ns_tgid);
    let namespace = if inner.is_empty() { None } else { namespaces::of_ended(builder, pid)? };
    leaders.see(&home, namespace, &status);
    if inner.last() == Some(&1) && !matches!(stat.exit_code as i32 & 0x7f, 0 | libc::SIGKILL) {
        let why = "it was process 1 of a pid namespace, and has ended by a signal that none can be sent";
        builder.refuse(format!("child {}", named(pid)), why, "try again when the program has waited for it");
    }
    let (pid, status) = (ids.own, stat.exit_code);
    let ended = Ended { pid, status, exit_signal, namespace, inner, ..Ended::default() };
    Ok(Some((ids, ended)))
}

/// Session and group of a process, as far as they are its tree's own.
fn belonging(builder: &mut Builder, root: Ids, members: &[Ids], ids: &Ids) -> (Option<u32>, Option<u32>) {
    let is_led = |id: u32| members.iter().any(|m| m.pid == id);
    let what = || named(ids.pid);
    let outside = |id: u32| Proc::process(id).is_ok();
    let session = match ids.session {
        session if is_led(session) => Some(ids.own_session),
        session if session == root.session => None,
        session if outside(session) || ids.own_session == 0 => {
            let why = format!("it is in the session of {}, which is not part of the program", named(session));
            builder.refuse(what(), why, "");
            None
        }
        // Its leader has ended, and the session goes on.
        _ => Some(ids.own_session),
    };
    let group = match ids.group {
        group if is_led(group) => Some(ids.own_group),
        group if group == root.group => None,
        group if outside(group) || ids.own_group == 0 => {
            let why =
                format!("it is in the process group of {}, which is not part of the program", named(group));
            builder.refuse(what(), why, "");
            None
        }
        // Its leader has ended, and the group goes on.
        _ => Some(ids.own_group),
    };
    (session, group)
}

/// Refuses what no process of ours could make again ([`tree::steps`]).
pub fn check(builder: &mut Builder, pids: &[u32]) {
    if !builder.refusals.is_empty() {
        return;
    }
    if let Err(tree::NotInherited { row, what }) = tree::steps(&builder.image) {
        let what = what.name();
        let why = format!("it has descendants whose {what} they cannot have inherited from it");
        builder.refuse(named(pids[row]), why, "");
    }
}

/// Refuses processes outside of the tree (whose processes are `pids`) with which it shares descriptors or directories. While
/// it `runs`, it may have others by now.
pub fn refuse_sharers(builder: &mut Builder, pids: &[u32], runs: bool) {
    let inside = |pid: u32| if runs { descends(pid, pids) } else { pids.contains(&pid) };
    let outside = |s: &&Sharing| !inside(s.other);
    for found in builder.sharing.iter().filter(outside).copied().collect::<Vec<_>>() {
        // It may have ended meanwhile, or have left what it shared.
        if sharing::shared(found.process, found.other, found.object).unwrap_or(false) {
            let name = match found.object {
                Shared::Files => "descriptors",
                Shared::Memory => "memory",
                _ => "current directory",
            };
            refuse_sharer(builder, found.other, name);
        }
    }
    refuse_sharers_of_threads(builder);
}

/// Refuses processes that share directories with a thread that has some of its own.
fn refuse_sharers_of_threads(builder: &mut Builder) {
    let apart = builder.apart.clone();
    let all = if apart.is_empty() { Vec::new() } else { proc::processes().unwrap_or_default() };
    let share = |one, other| sharing::shared(one, other, Shared::FileSystem).unwrap_or(false);
    for &(process, tid) in &apart {
        let of_main = all.iter().filter(|&&other| other != process && share(other, tid)).copied();
        let of_others = apart.iter().filter(|(other, thread)| *other != process && share(*thread, tid));
        let found: Vec<u32> = of_main.chain(of_others.map(|(other, _)| *other)).collect();
        for other in found {
            let why = format!("it shares its current directory with thread {tid} of process {process}");
            builder.refuse(named(other), why, "");
        }
    }
}

/// Refuses processes that share memory and have clocks of their own: nobody enters a time namespace who does.
pub fn check_clocks(builder: &mut Builder, pids: &[u32]) {
    let image = &builder.image;
    let is_time = |n: &u32| matches!(image.namespaces[*n as usize], Namespace::Time { .. });
    let mut firsts: HashMap<u32, usize> = HashMap::new();
    let mut found = Vec::new();
    for (row, process) in image.processes.iter().enumerate() {
        let first = *firsts.entry(process.space).or_insert(row);
        let mut namespaces = process.namespaces.iter().chain(&image.processes[first].namespaces);
        if first != row && namespaces.any(is_time) {
            found.push(row);
        }
    }
    for row in found {
        let why = "it shares its memory with another process, and is in another time namespace than the root";
        builder.refuse(named(pids[row]), why, "");
    }
}

/// Makes sure that those processes of the tree share memory that are said to, and nobody else does.
///
/// # Errors
/// [`Error::Passing`] if one of them has become another program just before it came to rest.
pub fn check_memory(builder: &Builder, targets: &[&Target]) -> Result<()> {
    let shared = |one, other| sharing::shared(one, other, Shared::Memory);
    let changed = |pid| Err(Error::Passing(format!("{} has just become another program", named(pid))));
    let mut firsts: HashMap<u32, u32> = HashMap::new();
    for target in targets {
        let first = *firsts.entry(target.space).or_insert(target.pid);
        if first != target.pid && !shared(first, target.pid)? {
            return changed(target.pid);
        }
    }
    let space = |pid| targets.iter().find(|t| t.pid == pid).map(|t| t.space);
    for found in builder.sharing.iter().filter(|s| s.object == Shared::Memory) {
        let (Some(one), Some(other)) = (space(found.process), space(found.other)) else { continue };
        if one != other && shared(found.process, found.other).unwrap_or(false) {
            return changed(found.process);
        }
    }
    Ok(())
}

/// Notes who shares signal actions, of those that share their memory.
///
/// # Errors
/// That they cannot be compared.
pub fn describe_actions(builder: &mut Builder, pids: &[u32]) -> Result<()> {
    for row in 1..builder.image.processes.len() {
        let (before, of_it) = builder.image.processes.split_at(row);
        let firsts = before.iter().enumerate().filter(|(_, p)| p.space == of_it[0].space);
        let firsts: Vec<usize> = firsts.filter(|(_, p)| p.shares_actions.is_none()).map(|(i, _)| i).collect();
        for first in firsts {
            if sharing::shared(pids[first], pids[row], Shared::SignalActions)? {
                builder.image.processes[row].shares_actions = Some(first as u32);
                break;
            }
        }
    }
    Ok(())
}

/// Whether a process is one of these, or a descendant of one.
pub(crate) fn descends(mut pid: u32, from: &[u32]) -> bool {
    while pid > 1 && !from.contains(&pid) {
        pid = Proc::process(pid).and_then(|p| p.stat()).map_or(0, |stat| stat.ppid);
    }
    from.contains(&pid)
}

/// For each process of the tree the first one, by its place, with which it shares an object: itself if there is none before it.
pub fn sharing(builder: &Builder, pids: &[u32], object: Shared) -> Vec<usize> {
    let mut first: Vec<usize> = (0..pids.len()).collect();
    let place = |pid: u32| pids.iter().position(|&p| p == pid);
    for found in builder.sharing.iter().filter(|s| s.object == object) {
        let (Some(one), Some(other)) = (place(found.process), place(found.other)) else { continue };
        if sharing::shared(found.process, found.other, object).unwrap_or(false) {
            let (low, high) = (first[one].min(first[other]), first[one].max(first[other]));
            first.iter_mut().filter(|f| **f == high).for_each(|f| *f = low);
        }
    }
    first
}
