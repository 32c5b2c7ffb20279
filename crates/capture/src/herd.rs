//! All processes of a tree: found while they run, and brought to rest together.

use crate::attributes::target::{VFORK, has_ended, named, passes};
use crate::freeze::{Frozen, Stopping, Wait};
use crate::target::Target;
use crate::{Error, Refusal, Result};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::sharing::{self, Shared};

/// Finds a process and all its descendants, each behind its parent. Those that have ended are left out.
///
/// # Errors
/// As [`Target::open`], of the first one; [`Error::Refused`] with the reasons of all others that cannot be targets.
pub fn find(root: u32) -> Result<Vec<Arc<Target>>> {
    let mut all = vec![Arc::new(Target::open(root, 0)?)];
    let (mut at, mut refusals) = (0, Vec::new());
    while let Some(parent) = all.get(at).cloned() {
        at += 1;
        let Ok(children) = parent.process.children() else { continue };
        for child in children {
            // One that goes on sharing its parent's memory is refused by name.
            passes(child, parent.pid);
            match Target::open(child, all.len() as u32) {
                Ok(target) => all.push(Arc::new(target)),
                Err(_) if has_ended(child) => {}
                Err(Error::Target(why)) => refusals.push(unfit(child, why)),
                Err(Error::Refused(more)) => refusals.extend(more),
                Err(e) => return Err(e),
            }
        }
    }
    match refusals.is_empty() {
        true => Ok(all),
        false => Err(Error::Refused(refusals)),
    }
}

fn unfit(pid: u32, why: String) -> Refusal {
    let what = named(pid);
    let why = why.strip_prefix(&format!("{what} ")).map_or(why.clone(), |why| format!("it {why}"));
    Refusal { what, why, hint: "end it before the checkpoint".into() }
}

/// All processes of a tree at rest. Dropping it lets them go.
pub struct FrozenTree {
    /// Its processes, each behind its parent, the root first.
    pub processes: Vec<Frozen>,
    /// Those that were not known before.
    pub newcomers: Vec<Arc<Target>>,
    /// When the first thread was asked to stop.
    pub since: Instant,
}

impl FrozenTree {
    /// Brings all threads of all processes to rest, and those that they make meanwhile. On failure none stays stopped once the
    /// calling OS thread ends.
    ///
    /// 1. Of all known processes all threads are interrupted before any is waited for.
    /// 2. A process that rests makes no more children. Those that it has and that are not known are stopped in the same way.
    /// 3. A thread that waits for a child with its own memory (`vfork(2)`) does not come to rest before that has executed
    ///    another program or ended. Such a child is no child of a process at rest: it is not touched, and goes on.
    /// 4. When all rest, nobody can become a child of somebody else any more: who is not a descendant of the root now is
    ///    let go.
    ///
    /// `known`: the root first. Processes that were not known get numbers from `rows` on.
    pub fn freeze(known: &[Arc<Target>], rows: u32) -> Result<Self> {
        let Some(root) = known.first().map(|t| t.pid) else {
            return Err(Error::Failed("there is nothing to be stopped".into()));
        };
        let mut stopping = Vec::with_capacity(known.len());
        for target in known {
            match Stopping::begin(&target.process) {
                Ok(process) => stopping.push(process),
                Err(e) => left_out(target.pid, root, e)?,
            }
        }
        let since = stopping.first().map_or_else(Instant::now, Stopping::since);
        let all = bring_to_rest(stopping, root)?;
        let tree = descendants(all, root)?;
        let mut newcomers = Vec::new();
        for frozen in &tree {
            let same = |t: &&Arc<Target>| t.pid == frozen.pid && !t.is_replaced();
            if !known.iter().any(|t| same(&t)) {
                if frozen.pid == root {
                    return Err(Error::Replaced);
                }
                let row = rows + newcomers.len() as u32;
                newcomers.push(Arc::new(Target::open_quickly(frozen.pid, row)?));
            }
        }
        Ok(FrozenTree { processes: tree, newcomers, since })
    }

    /// Lets all run on; returns how long the tree stood still.
    pub fn thaw(mut self) -> Duration {
        self.processes.drain(..).for_each(drop);
        self.since.elapsed()
    }
}

/// What is no error of the tree: one of its processes, not the root, has ended.
fn left_out(pid: u32, root: u32, e: Error) -> Result<()> {
    if pid != root && (has_ended(pid) || matches!(e, Error::Kernel(stillpoint_linux::Error::Gone(_)))) {
        return Ok(());
    }
    Err(e)
}

/// Waits until all rest, and those that they make meanwhile.
fn bring_to_rest(mut stopping: Vec<Stopping>, root: u32) -> Result<Vec<Frozen>> {
    let mut known: HashSet<u32> = stopping.iter().map(|s| s.process().pid()).collect();
    let mut wait = Wait::new();
    let mut looked_at = HashSet::new();
    loop {
        let (mut made, mut gone) = (Vec::new(), Vec::new());
        let mut all_rest = true;
        for process in &mut stopping {
            let pid = process.process().pid();
            match process.advance(&wait) {
                Ok(rests) => all_rest &= rests,
                Err(e) => {
                    left_out(pid, root, e)?;
                    gone.push(pid);
                    continue;
                }
            }
            if process.rests() && looked_at.insert(pid) {
                let children = process.process().children().unwrap_or_default();
                made.extend(children.into_iter().filter(|child| known.insert(*child)));
            }
        }
        stopping.retain(|s| !gone.contains(&s.process().pid()));
        for pid in made {
            let begun = Proc::process(pid).map_err(Error::from).and_then(|p| Stopping::begin(&Arc::new(p)));
            match begun {
                Ok(process) => {
                    all_rest = false;
                    stopping.push(process);
                }
                Err(e) => left_out(pid, root, e)?,
            }
        }
        if all_rest {
            break;
        }
        if wait.elapsed() > VFORK
            && let Some(pid) = stopping.iter().filter(|s| !s.rests()).find_map(waits_for_vfork)
        {
            let what = named(pid);
            let why = "has its parent's memory until it executes another program (vfork), and takes long to";
            return Err(Error::Passing(format!("{what} {why}")));
        }
        wait.a_little();
    }
    let mut all = Vec::with_capacity(stopping.len());
    for process in stopping {
        let pid = process.process().pid();
        match process.frozen() {
            Ok(frozen) => all.push(frozen),
            Err(e) => left_out(pid, root, e)?,
        }
    }
    Ok(all)
}

/// The child for which a thread of a process that does not come to rest waits, if that is why.
fn waits_for_vfork(stopping: &Stopping) -> Option<u32> {
    let parent = stopping.process();
    let children = parent.children().unwrap_or_default();
    children.into_iter().find(|&child| sharing::shared(child, parent.pid(), Shared::Memory).unwrap_or(false))
}

/// The root and its descendants among processes at rest, each behind its parent; the others are let go.
fn descendants(all: Vec<Frozen>, root: u32) -> Result<Vec<Frozen>> {
    let mut children: HashMap<u32, Vec<Frozen>> = HashMap::new();
    let mut tree = Vec::with_capacity(all.len());
    let mut left = Vec::new();
    for frozen in all {
        match frozen.pid == root {
            true => tree.push(frozen),
            false => left.push((Proc::process(frozen.pid)?.stat()?.ppid, frozen)),
        }
    }
    left.sort_by_key(|(_, frozen)| frozen.pid);
    for (parent, frozen) in left {
        children.entry(parent).or_default().push(frozen);
    }
    let mut at = 0;
    while at < tree.len() {
        let pid = tree[at].pid;
        tree.extend(children.remove(&pid).unwrap_or_default());
        at += 1;
    }
    match children.into_values().flatten().next() {
        None => Ok(tree),
        Some(other) => Err(Error::Passing(format!("{} is no descendant of it any more", named(other.pid)))),
    }
}
