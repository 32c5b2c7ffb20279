//! How the processes of a tree belong together: parents, sessions, process groups, and children that have ended.

use crate::attributes::target::{Seen, named, refuse_sharer};
use crate::builder::Sharing;
use crate::{Builder, Result};
use std::collections::HashMap;
use stillpoint_image::{Ended, tree};
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
    fn of(stat: &Stat, status: &Status) -> Self {
        // In a pid namespace of its own, session and group may lie outside: 0 there.
        let inner = |ids: &[u32], outer: u32| ids.last().copied().unwrap_or(outer);
        Ids {
            pid: stat.pid,
            own: status.own_pid(),
            session: stat.session,
            own_session: inner(&status.ns_sid, stat.session),
            group: stat.pgrp,
            own_group: inner(&status.ns_pgid, stat.pgrp),
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
    for (row, relative) in relatives.iter().enumerate() {
        let look = &relative.threads[0].look;
        all.push(Ids::of(&look.stat, &look.status));
        let process = &mut builder.image.processes[row];
        process.parent = row_of.get(&look.stat.ppid).filter(|_| row > 0).map(|&parent| parent as u32);
        let signal = look.stat.exit_signal;
        process.exit_signal = (signal != libc::SIGCHLD && row > 0).then_some(signal.max(0) as u32);
        for (place, thread) in relative.threads.iter().enumerate() {
            let parent_thread = (place > 0).then(|| thread.look.status.own_tid());
            for child in &thread.look.children {
                match row_of.get(child) {
                    Some(&child) => builder.image.processes[child].parent_thread = parent_thread,
                    None => {
                        let found = zombie(builder, *child)?;
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
    Ok(())
}

/// A child that is not part of the tree: it has ended, or is about to.
fn zombie(builder: &mut Builder, pid: u32) -> Result<Option<(Ids, Ended)>> {
    let Ok(folder) = Proc::process(pid) else { return Ok(None) };
    let (stat, status) = (folder.stat()?, folder.status()?);
    if stat.state != b'Z' {
        builder.refuse(format!("child {}", named(pid)), "it is just beginning or ending", "try again");
        return Ok(None);
    }
    let ids = Ids::of(&stat, &status);
    let signal = stat.exit_signal;
    let exit_signal = (signal != libc::SIGCHLD).then_some(signal.max(0) as u32);
    let ended = Ended { pid: ids.own, status: stat.exit_code, exit_signal, ..Ended::default() };
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
