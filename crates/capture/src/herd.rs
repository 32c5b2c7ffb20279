//! All processes of a tree: found while they run, and brought to rest together.

use crate::attributes::target::{Has, VFORK, has_ended, named, of_another, waits_for_child};
use crate::freeze::{Frozen, Stopping, Wait, call_off, refuse_frozen, see_ends};
use crate::home::Home;
use crate::inspect::Known;
use crate::target::Target;
use crate::{Error, Refusal, Result};
use std::cmp::Ordering;
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
    let mut all = vec![Arc::new(Target::open(root, 0, None)?)];
    let (mut at, mut refusals) = (0, Vec::new());
    let mut spaces = Spaces::default();
    spaces.number(root, 0);
    while let Some(parent) = all.get(at).cloned() {
        at += 1;
        let Ok(children) = parent.process.children() else { continue };
        for child in children {
            if of_another(child, parent.pid) == Has::ForAMoment {
                let why =
                    "it has its parent's memory until it executes another program (vfork), and takes long to";
                refusals.push(Refusal {
                    what: named(child),
                    why: why.into(),
                    hint: "try again later".into(),
                });
                continue;
            }
            let row = spaces.number(child, all.len() as u32);
            match Target::open(child, row, Some(parent.home.clone())) {
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

/// Which address space each of some processes has.
#[derive(Default)]
struct Spaces {
    /// The first process of each, in the kernel's order of what they have, with its number.
    order: Vec<(u32, u32)>,
}

impl Spaces {
    /// The number of a process's address space: that of those that it shares it with, or this one.
    fn number(&mut self, pid: u32, new: u32) -> u32 {
        let compare = |other: u32| sharing::compare(other, pid, Shared::Memory).unwrap_or(Ordering::Less);
        match self.order.binary_search_by(|(other, _)| compare(*other)) {
            Ok(at) => self.order[at].1,
            Err(at) => {
                self.order.insert(at, (pid, new));
                new
            }
        }
    }

    /// Whether two address spaces have this number.
    fn has_two(&self, number: u32) -> bool {
        self.order.iter().filter(|(_, n)| *n == number).count() > 1
    }
}

fn unfit(pid: u32, why: String) -> Refusal {
    let what = named(pid);
    let why = why.strip_prefix(&format!("{what} ")).map_or(why.clone(), |why| format!("it {why}"));
    Refusal { what, why, hint: "end it first".into() }
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
    /// `known`: the root first. Processes that were not known get numbers from `rows` on. Of those that have been `looked_at` files are
    /// held open that tell their children sooner.
    pub fn freeze(known: &[Arc<Target>], rows: u32, looked_at: &[&Known]) -> Result<Self> {
        let Some((root, home)) = known.first().map(|t| (t.pid, t.home.clone())) else {
            return Err(Error::Failed("there is nothing to be stopped".into()));
        };
        known.iter().try_for_each(|target| refuse_frozen(&target.process))?;
        let looked_at: HashMap<u32, &Known> = looked_at.iter().map(|known| (known.pid(), *known)).collect();
        let mut stopping = Vec::with_capacity(known.len());
        for target in known {
            match Stopping::begin(&target.process) {
                Ok(process) => stopping.push(process),
                Err(e) => left_out(target.pid, root, e).inspect_err(|_| call_off(&mut stopping))?,
            }
        }
        let since = stopping.first().map_or_else(Instant::now, Stopping::since);
        let all = bring_to_rest(stopping, root, &looked_at)?;
        let tree = descendants(all, root)?;
        let newcomers = newcomers(known, &tree, rows, &home)?;
        Ok(FrozenTree { processes: tree, newcomers, since })
    }

    /// Lets all run on; returns how long the tree stood still.
    pub fn thaw(mut self) -> Duration {
        self.release();
        self.since.elapsed()
    }

    fn release(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(10);
        // All first: who was killed may end only when others have been let go.
        let killed = self.processes.iter_mut().flat_map(Frozen::let_go).collect();
        see_ends(killed, PATIENCE);
        self.processes.clear();
    }
}

impl Drop for FrozenTree {
    fn drop(&mut self) {
        self.release();
    }
}

/// Those of a tree at rest that are not known, or have become other programs.
///
/// Where some of those that are known share memory, and where there are others, it is made sure who does; where what is known does
/// not fit together, somebody has just become another program.
fn newcomers(
    known: &[Arc<Target>],
    tree: &[Frozen],
    rows: u32,
    home: &Arc<Home>,
) -> Result<Vec<Arc<Target>>> {
    let known: HashMap<u32, &Arc<Target>> = known.iter().map(|t| (t.pid, t)).collect();
    let is_old = |pid: &u32| known.get(pid).is_some_and(|t| !t.is_replaced());
    let (old, new): (Vec<u32>, Vec<u32>) = tree.iter().map(|frozen| frozen.pid).partition(is_old);
    let numbers: HashSet<u32> = known.values().map(|t| t.space).collect();
    if numbers.len() == known.len() && new.is_empty() {
        return Ok(Vec::new());
    }
    let (mut spaces, mut newcomers) = (Spaces::default(), Vec::new());
    for pid in old {
        let number = known[&pid].space;
        if spaces.number(pid, number) != number || spaces.has_two(number) {
            return Err(Error::Passing(format!("{} has just become another program", named(pid))));
        }
    }
    for pid in new {
        if tree.first().is_some_and(|root| root.pid == pid) {
            return Err(Error::Replaced);
        }
        let row = spaces.number(pid, rows + newcomers.len() as u32);
        newcomers.push(Arc::new(Target::open_quickly(pid, row, Some(home.clone()))?));
    }
    Ok(newcomers)
}

/// What is no error of the tree: one of its processes, not the root, has ended.
fn left_out(pid: u32, root: u32, e: Error) -> Result<()> {
    if pid != root && (has_ended(pid) || matches!(e, Error::Kernel(stillpoint_linux::Error::Gone(_)))) {
        return Ok(());
    }
    Err(e)
}

/// Waits until all rest, and those that they make meanwhile. If that fails, all are let go.
fn bring_to_rest(
    mut stopping: Vec<Stopping>,
    root: u32,
    looked_at: &HashMap<u32, &Known>,
) -> Result<Vec<Frozen>> {
    wait_for_all(&mut stopping, root, looked_at).inspect_err(|_| call_off(&mut stopping))?;
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

fn wait_for_all(stopping: &mut Vec<Stopping>, root: u32, looked_at: &HashMap<u32, &Known>) -> Result<()> {
    let mut known: HashSet<u32> = stopping.iter().map(|s| s.process().pid()).collect();
    let mut wait = Wait::new();
    let mut asked = HashSet::new();
    loop {
        let (mut made, mut gone) = (Vec::new(), Vec::new());
        let mut all_rest = true;
        for process in &mut *stopping {
            let pid = process.process().pid();
            match process.advance(&wait) {
                Ok(rests) => all_rest &= rests,
                Err(e) => {
                    left_out(pid, root, e)?;
                    gone.push(pid);
                    continue;
                }
            }
            if process.rests() && asked.insert(pid) {
                let told = looked_at.get(&pid).and_then(|known| known.children(&process.at_rest()).ok());
                let children = told.unwrap_or_else(|| process.process().children().unwrap_or_default());
                made.extend(children.into_iter().filter(|child| known.insert(*child)));
            }
        }
        for ended in stopping.extract_if(.., |s| gone.contains(&s.process().pid())) {
            ended.has_ended();
        }
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
            && let Some(pid) =
                stopping.iter().filter(|s| !s.rests()).find_map(|s| waits_for_vfork(s, stopping))
        {
            let what = named(pid);
            let why = "has its parent's memory until it executes another program (vfork), and takes long to";
            return Err(Error::Passing(format!("{what} {why}")));
        }
        wait.a_little();
    }
    Ok(())
}

/// The child for which a thread of a process that does not come to rest waits, if that is why. Those that rest are not waited
/// for: they share its memory for good (`known`), unless it looks as if it waited for one.
fn waits_for_vfork(stopping: &Stopping, known: &[Stopping]) -> Option<u32> {
    let parent = stopping.process();
    let children = parent.children().unwrap_or_default();
    let rests = |child: u32| known.iter().any(|s| s.process().pid() == child && s.rests());
    let shares = |child: u32| sharing::shared(child, parent.pid(), Shared::Memory).unwrap_or(false);
    let mut children = children.into_iter().filter(|&child| shares(child));
    children.find(|&child| !rests(child) || waits_for_child(parent.pid()))
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
