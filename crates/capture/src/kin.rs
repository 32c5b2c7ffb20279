//! Processes that still have memory in common with others, by copy on write: it remains in common, and what is in common with a
//! parent is stored once.

use crate::Result;
use crate::attributes::target::has_ended;
use crate::target::Target;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use stillpoint_image::{Owner, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::proc::{self, Proc, Stat};
use stillpoint_store::Writer;

/// Tells the writer of those of a tree who were made as copies of their parents and have not executed a program since.
pub(crate) fn relate<'a>(writer: &mut Writer, tree: impl Iterator<Item = &'a Arc<Target>>) {
    // Who is about to end needs nothing of it.
    let all: Vec<(&Arc<Target>, Stat)> =
        tree.filter_map(|target| Some((target, target.process.stat().ok()?))).collect();
    let by_pid: HashMap<u32, &(&Arc<Target>, Stat)> = all.iter().map(|each| (each.0.pid, each)).collect();
    // Those that share memory have it once: the first of them counts.
    let mut seen = HashSet::new();
    let firsts = all.iter().filter(|(target, _)| seen.insert(target.space));
    let parent_of = |target: &Target, stat: &Stat| {
        let (parent, theirs) = by_pid.get(&stat.ppid)?;
        (parent.space != target.space && is_copy(stat, theirs)).then(|| parent.owner())
    };
    let bearing: HashSet<Owner> = all.iter().filter_map(|(target, stat)| parent_of(target, stat)).collect();
    for (target, stat) in firsts {
        let parent = parent_of(target, stat);
        if parent.is_none() && !bearing.contains(&target.owner()) {
            continue;
        }
        let looked_at = (*target).clone();
        let hint = move |batch: &[Range]| {
            let mut shared = Vec::new();
            for range in batch {
                let (start, end) = (RemoteAddr(range.start), RemoteAddr(range.end()));
                let _ = looked_at.pagemap.may_be_shared(start, end, &mut shared);
            }
            shared
        };
        writer.relate(target.owner(), parent, Box::new(hint));
    }
}

/// Sees to it that nobody gets copies of pages in common because they are read. The others need not be part of the tree.
pub(crate) fn keep_in_common<'a>(tree: impl Iterator<Item = &'a Arc<Target>>) -> Result<()> {
    let all = proc::processes()?.into_iter().filter_map(|pid| Proc::process(pid).and_then(|p| p.stat()).ok());
    let mut known: HashMap<(u64, u64), usize> = HashMap::new();
    all.for_each(|stat| *known.entry(layout(&stat)).or_default() += 1);
    for target in tree {
        // One that has just ended has none.
        let Ok(stat) = target.process.stat() else { continue };
        if known.get(&layout(&stat)).is_some_and(|&others| others > 1) {
            match target.memory.keep_shared() {
                Err(_) if has_ended(target.pid) => {}
                kept => kept?,
            }
        }
    }
    Ok(())
}

/// Whether a process has the program that its parent had when it made it: each start of one places it anew.
fn is_copy(child: &Stat, parent: &Stat) -> bool {
    layout(child) == layout(parent)
}

fn layout(stat: &Stat) -> (u64, u64) {
    (stat.start_code, stat.start_stack)
}
