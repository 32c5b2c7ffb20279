//! A program and its snapshots.
//!
//! Of each of its processes ([`crate::member`]) the first snapshot is a copy-on-write twin that stands still
//! ([`stillpoint_linux::twin`]), from which pages are read as they were; the kernel notes what the process writes from then on, and each
//! further snapshot copies that only ([`crate::history`]). A rollback puts back the pages that differ, and whatever else does: mappings,
//! threads, descriptors, what the kernel knows of them, and what lies between processes ([`crate::between`]). The processes stay the
//! same ones.

use crate::between::{Between, View};
use crate::files::{Changed, Digests, Files, Holder, Keep, Plan, Systems};
use crate::history::{History, Id};
use crate::member::{First, Member, Part, Returning, Way, bind, get_ready, kill_all, set_back, unbind};
use crate::still::{Guest, MOST_SHARED, Recalled, Still, Together, just_ended, lock, of};
use crate::{Error, Result, descriptors};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use stillpoint_capture::Refusal;
use stillpoint_capture::attributes::target::{has_ended, named};
use stillpoint_capture::engine::tracking::{Found, Look};
use stillpoint_capture::herd;
use stillpoint_capture::target::Target;
use stillpoint_image::Range;
use stillpoint_linux::guard::Guard;
use stillpoint_linux::proc::descendants;
use stillpoint_linux::spawn;
use stillpoint_restore::FilesPolicy;

/// So often it is tried to find all processes of a program while it makes others.
const TRIES: usize = 20;
/// How long it is waited before it is tried again.
const PAUSE: Duration = Duration::from_millis(2);
/// How long another of us may take who has stopped the program.
const BUSY: Duration = Duration::from_secs(10);
/// For so long, and as often as [`TRIES`] tells, it is tried again while all that stands in the way is something that passes: on a
/// busy machine one try may take all of that time.
const PASSING: Duration = Duration::from_millis(300);

/// A program of which there are snapshots. All of it has to be done in the thread that began it.
#[derive(Debug)]
pub struct Program {
    pid: u32,
    /// What its children do is no matter of its snapshots.
    alone: bool,
    /// Its processes that are part of a snapshot and run, the first one first.
    members: Vec<Member>,
    states: BTreeMap<Id, State>,
    digests: Digests,
    /// The last snapshot that was taken.
    last: Id,
    /// So many members there have been.
    joined: u64,
    /// Sees to it that all of them end if we do in the middle of a rollback.
    guard: Option<Guard>,
}

/// What was noted at a snapshot beside memory.
#[derive(Debug)]
pub struct State {
    /// The user's name for it.
    pub name: Option<String>,
    /// When it was taken.
    pub at: SystemTime,
    /// Of each process.
    parts: Vec<Part>,
    between: Between,
    files: Files,
}

/// A snapshot that was taken.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Its number.
    pub id: Id,
    /// How long the program stood still.
    pub pause: Duration,
    /// So many pages were copied.
    pub pages: u64,
    /// Of so many processes.
    pub processes: usize,
}

/// A rollback that was done.
#[derive(Clone, Debug)]
pub struct Rolled {
    /// How long the program stood still.
    pub pause: Duration,
    /// So many pages were put back.
    pub pages: u64,
    /// Of so many processes.
    pub processes: usize,
    /// What is not as it was.
    pub notes: Vec<String>,
    /// Files that were not as they were at the snapshot.
    pub files: Vec<Changed>,
}

/// What a rollback may do to others.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Children that were made since are killed; otherwise they are a reason not to go back.
    pub kill_children: bool,
    /// What becomes of files that the program can write to and that have changed since.
    pub files: FilesPolicy,
}

impl Program {
    /// Takes the first snapshot of a program, with all that it has made, or of this process `alone`.
    ///
    /// # Errors
    /// [`Error::Refused`] if it holds what cannot be put back, and others if it cannot be followed. It runs on.
    pub fn begin(pid: u32, name: Option<String>, alone: bool) -> Result<(Self, Taken)> {
        let mut program = Program {
            pid,
            alone,
            members: Vec::new(),
            states: BTreeMap::new(),
            digests: Digests::default(),
            last: 0,
            joined: 0,
            guard: None,
        };
        let taken = program.snapshot(name, |_| ())?;
        Ok((program, taken))
    }

    /// Whether its process has become another program (`execve(2)`), of which there are no snapshots.
    pub fn is_over(&self) -> bool {
        self.members.first().is_none_or(|root| root.target.is_replaced())
    }

    /// Whether its snapshots are of one process, whatever others it has made.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// Its snapshots, oldest first.
    pub fn snapshots(&self) -> impl Iterator<Item = (Id, &State)> {
        self.states.iter().map(|(id, state)| (*id, state))
    }

    /// The snapshot that it has gone on from.
    pub fn current(&self) -> Id {
        self.members.first().and_then(|root| root.history.as_ref()).map_or(self.last, History::current)
    }

    /// The snapshot that one was taken after.
    pub fn parent(&self, id: Id) -> Option<Id> {
        self.members.first()?.history.as_ref()?.parent(id)
    }

    /// Takes another snapshot. `tell` hears of it right before the program runs on: whoever waits there for the answer then has it
    /// when it wakes, and is not woken twice.
    ///
    /// # Errors
    /// As [`Program::begin`]; the snapshots that there are stay.
    pub fn snapshot(&mut self, name: Option<String>, tell: impl FnOnce(&Taken)) -> Result<Taken> {
        let mut tell = Some(tell);
        until_it_has_passed(|| {
            let hear = |taken: &Taken| tell.take().into_iter().for_each(|tell| tell(taken));
            self.try_to_take(name.clone(), hear)
        })
    }

    fn try_to_take(&mut self, name: Option<String>, tell: impl FnOnce(&Taken)) -> Result<Taken> {
        self.digests.look_ahead(&self.processes());
        let mut together = self.gather()?;
        let id = self.last + 1;
        let news: Vec<u64> = self.members.iter().filter(|m| m.history.is_none()).map(|m| m.who).collect();
        let (state, pages) = match self.remember(id, name, &mut together) {
            Ok(remembered) => remembered,
            Err(e) => {
                owe(&self.members, &together);
                for member in &mut self.members {
                    // It is as if there had been none.
                    let _ = member.forget(id);
                }
                self.members.retain(|member| !news.contains(&member.who));
                return Err(e);
            }
        };
        let processes = self.members.len();
        if let ([(still, _)], Some(part)) = (&mut together.all[..], state.parts.first()) {
            still.let_waiting_go_first(&part.image);
        }
        self.last = id;
        self.states.insert(id, state);
        tell(&Taken { id, pause: together.since().elapsed(), pages, processes });
        let shared: Vec<Vec<Range>> = match news.is_empty() {
            true => Vec::new(),
            false => together.all.iter().map(|(still, _)| still.all_shared()).collect(),
        };
        let pause = together.thaw();
        for (member, shared) in self.members.iter_mut().zip(&shared) {
            if news.contains(&member.who) {
                member.settle(shared)?;
            }
        }
        Ok(Taken { id, pause, pages, processes })
    }

    /// Forgets a snapshot; whether it was the last one, after which there is nothing more to do here.
    ///
    /// # Errors
    /// [`Error::Unknown`], and that pages cannot be read.
    pub fn forget(&mut self, id: Id) -> Result<bool> {
        if !self.states.contains_key(&id) {
            return Err(Error::Unknown(id.to_string()));
        }
        self.members.iter_mut().try_for_each(|member| member.forget(id))?;
        self.states.remove(&id);
        if !self.states.is_empty() {
            // Nobody will go back to a time when they were not.
            self.members.retain(|member| member.history.is_some());
        }
        Ok(self.states.is_empty())
    }

    /// Brings all processes to rest for a snapshot. They are the members then, in the same order; those that were none have no history yet.
    fn gather(&mut self) -> Result<Together> {
        let began = Instant::now();
        let mut tries = 0;
        loop {
            tries += 1;
            let had_others = self.has_others();
            let tried = match &mut self.members[..] {
                [root] if tries == 1 => {
                    let together = Together::of_one(root.guest(Look::Protect));
                    together.map(|together| self.if_complete(together, 1))
                }
                _ => self.try_to_gather(),
            };
            match tried {
                Ok(Some(together)) => return Ok(together),
                Ok(None) if tries >= TRIES => {
                    let why = "it makes processes all the time, so that they are never all at rest";
                    return Err(Error::Failed(why.into()));
                }
                Ok(None) => {}
                Err(e) if may_pass(began, tries) && will_pass(&e) => {}
                Err(e @ (Error::Refused(_) | Error::Killed(_))) => return Err(e),
                Err(e @ Error::Capture(stillpoint_capture::Error::Followed(_))) => return Err(e),
                Err(e) if tries >= TRIES || has_ended(self.pid) => return Err(e),
                // Somebody has just ended, who may be no descendant any more, or become another program.
                Err(e) if !(is_of_an_end(&e) || had_others || self.has_others()) => return Err(e),
                Err(_) => {}
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Its processes, as far as they are known without stopping it.
    fn processes(&self) -> Vec<u32> {
        let others = if self.alone { Vec::new() } else { descendants(&[self.pid]) };
        std::iter::once(self.pid).chain(others).collect()
    }

    /// Whether there are other processes that a snapshot is of.
    fn has_others(&self) -> bool {
        !self.alone && (self.members.len() > 1 || !descendants(&[self.pid]).is_empty())
    }

    /// What is at rest, if these, of which so many were `found`, are all there are.
    fn if_complete(&self, together: Together, found: usize) -> Option<Together> {
        let complete =
            together.others.is_empty() && (self.alone || found > 1 || !has_living_children(&together));
        if !complete {
            owe(&self.members, &together);
        }
        complete.then_some(together)
    }

    /// As [`Program::gather`]; none if there are others by now.
    fn try_to_gather(&mut self) -> Result<Option<Together>> {
        let found = match self.alone {
            true => Vec::new(),
            false => herd::find(self.pid)?,
        };
        let pids: Vec<u32> = match found.is_empty() {
            true => vec![self.pid],
            false => found.iter().map(|target| target.pid).collect(),
        };
        if self.members.first().is_some_and(Member::is_over) {
            return Err(Error::Capture(stillpoint_capture::Error::Replaced));
        }
        self.members.retain(|member| !member.is_over() && pids.contains(&member.target.pid));
        let mut news: Vec<(Arc<Target>, Recalled)> = Vec::new();
        for &pid in pids.iter().filter(|pid| self.members.iter().all(|m| m.target.pid != **pid)) {
            let home = found.first().map(|root| root.home.clone());
            let target = Target::open(pid, 0, home.filter(|_| pid != self.pid))?;
            if target.gadgets.is_none() {
                if has_ended(pid) {
                    return Err(just_ended(pid));
                }
                return Err(Error::Failed(format!(
                    "there is no place in the code of process {pid} where a system call can be made"
                )));
            }
            news.push((Arc::new(target), Recalled::default()));
        }
        if !news.is_empty() {
            if found.len() > 1 && self.guard.is_none() {
                self.guard = Some(Guard::start()?);
            }
            // A refusal comes before anything is done to it.
            if !self.rehearse(&found, &mut news)? {
                return Ok(None);
            }
            for (target, recalled) in news {
                self.joined += 1;
                self.members.push(Member::follow(self.joined, &target, recalled)?);
            }
            let place = |member: &Member| pids.iter().position(|pid| *pid == member.target.pid);
            self.members.sort_by_key(place);
        }
        let mut guests: Vec<Guest<'_>> = self.members.iter_mut().map(|m| m.guest(Look::Protect)).collect();
        let together = take(&found, &mut guests)?;
        Ok(self.if_complete(together, found.len()))
    }

    /// Goes through a snapshot without taking it; whether all processes are known.
    fn rehearse(&mut self, found: &[Arc<Target>], news: &mut [(Arc<Target>, Recalled)]) -> Result<bool> {
        let mut guests: Vec<Guest<'_>> = self.members.iter_mut().map(Member::guest_unseen).collect();
        guests.extend(news.iter_mut().map(|(target, memory)| Guest { target, memory, look: None }));
        guests.sort_by_key(|guest| found.iter().position(|target| target.pid == guest.target.pid));
        let together = take(found, &mut guests)?;
        let targets: Vec<&Target> = guests.iter().map(|guest| &**guest.target).collect();
        if found.len() > 1 {
            refuse_other_namespaces(&targets)?;
        }
        let views = targets.iter().zip(&together.all).zip(0..);
        let views: Vec<View<'_>> = views.map(|((t, (s, _)), who)| view(who, t, s)).collect();
        Between::read(&views, true)?;
        if found.len() > 1 {
            let mut covered = Covered::default();
            let left = |(still, _): &(Still, _)| covered.left(still).iter().map(|r| r.len).sum::<u64>();
            let shared: u64 = together.all.iter().map(left).sum();
            if shared > MOST_SHARED {
                return Err(Error::Refused(vec![Refusal {
                    what: format!("{} MiB of shared memory", shared >> 20),
                    why: format!(
                        "each snapshot has a copy of it, and of more than {} MiB none is made",
                        MOST_SHARED >> 20
                    ),
                    hint: String::new(),
                }]));
            }
        }
        let complete = together.others.is_empty();
        together.thaw();
        Ok(complete)
    }

    fn remember(&mut self, id: Id, name: Option<String>, together: &mut Together) -> Result<(State, u64)> {
        refuse_stopped(together)?;
        let views: Vec<View<'_>> = self
            .members
            .iter()
            .zip(&together.all)
            .map(|(m, (still, _))| view(m.who, &m.target, still))
            .collect();
        let between = Between::read(&views, true)?;
        let files = self.digests.note(&holders(&self.members, together));
        let (mut parts, mut pages, mut covered) =
            (Vec::with_capacity(self.members.len()), 0, Covered::default());
        let several = self.members.len() > 1;
        // A twin is an orphan, which one of them would find among its children.
        let adopts = |(still, _): &(Still, _)| {
            still.image.processes.first().is_some_and(|p| p.child_subreaper || p.own_pid() == 1)
        };
        let may_have_twins = !together.all.iter().any(adopts);
        for (member, (still, found)) in self.members.iter_mut().zip(&mut together.all) {
            pages += member.remember(id, still, found.take(), may_have_twins)?;
            if several {
                still.shared = covered.left(still);
            }
            parts.push(Part::of(member.who, &member.target, still)?);
        }
        Ok((State { name, at: SystemTime::now(), parts, between, files }, pages))
    }

    /// Brings the program back to a snapshot; `keep` takes what is cut off files. `tell` hears of it right before the program runs on,
    /// as of a [`Program::snapshot`].
    ///
    /// # Errors
    /// [`Error::Refused`] and others, after which it runs on as it was; [`Error::Killed`] if that was not possible any more.
    pub fn rollback(
        &mut self,
        id: Id,
        terms: Terms,
        keep: &mut Keep<'_>,
        tell: impl FnOnce(&Rolled),
    ) -> Result<Rolled> {
        let mut tell = Some(tell);
        until_it_has_passed(|| {
            let hear = |rolled: &Rolled| tell.take().into_iter().for_each(|tell| tell(rolled));
            self.try_to_roll_back(id, terms, keep, hear)
        })
    }

    fn try_to_roll_back(
        &mut self,
        id: Id,
        terms: Terms,
        keep: &mut Keep<'_>,
        tell: impl FnOnce(&Rolled),
    ) -> Result<Rolled> {
        let Program { pid, alone, members, states, digests, guard, .. } = self;
        let state = states.get_mut(&id).ok_or_else(|| Error::Unknown(id.to_string()))?;
        let found = others_now(*pid, *alone, members, state, terms.kill_children)?;
        let systems = Systems::learn(&members.iter().map(|member| member.target.pid).collect::<Vec<_>>());
        // Those that go back, in the order of the snapshot, and those that are no part of it.
        let mut left: Vec<Member> = std::mem::take(members);
        let mut going = Vec::with_capacity(state.parts.len());
        for part in &state.parts {
            going.extend(left.iter().position(|m| m.who == part.who).map(|at| left.remove(at)));
        }
        let goal = Goal { id, state, found: &found, terms, systems, alone: *alone };
        let done = go(&mut going, &goal, guard, keep, tell);
        *members = going;
        if let Err(Error::Killed(_)) = done {
            // Nobody is left who would not be what he was.
            let pids: Vec<u32> = members.iter().chain(&left).map(|member| member.target.pid).collect();
            kill_all(&pids);
        }
        if done.is_err() {
            members.append(&mut left);
            members.sort_by_key(|member| member.who);
        }
        let (rolled, files) = done?;
        files.note(&mut state.files, digests);
        Ok(rolled)
    }
}

impl State {
    /// Of how many processes it is.
    pub fn processes(&self) -> usize {
        self.parts.len()
    }
}

/// Brings processes to rest: those that were found, or the one guest.
fn take(found: &[Arc<Target>], guests: &mut Vec<Guest<'_>>) -> Result<Together> {
    match (guests.len(), found.len()) {
        (1, 0 | 1) => {
            let one = guests.pop().ok_or_else(|| Error::Failed("there is nothing to be stopped".into()))?;
            let again = Guest { target: one.target, memory: &mut *one.memory, look: one.look };
            let taken = Together::of_one(again)?;
            guests.push(one);
            Ok(taken)
        }
        _ => Together::take(found, guests),
    }
}

/// What was found at a look is to be found once more.
fn owe(members: &[Member], together: &Together) {
    for (member, (_, found)) in members.iter().zip(&together.all) {
        let written = found.iter().flat_map(|found| &found.dirty);
        written.for_each(|(range, _)| lock(&member.tracking).owe(*range));
    }
}

/// Tries something again while all that stands in its way is something that passes: a checkpoint that is being taken, say.
fn until_it_has_passed<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let (began, mut tries) = (Instant::now(), 0);
    loop {
        tries += 1;
        match attempt() {
            Err(Error::Capture(stillpoint_capture::Error::Busy(_))) if began.elapsed() < BUSY => {
                std::thread::sleep(PAUSE);
            }
            Err(e) if may_pass(began, tries) && will_pass(&e) => std::thread::sleep(PAUSE),
            done => return done,
        }
    }
}

/// Whether an error is about a moment, and nothing else.
fn will_pass(error: &Error) -> bool {
    match error {
        Error::Refused(all) | Error::Capture(stillpoint_capture::Error::Refused(all)) => {
            all.iter().all(Refusal::will_pass)
        }
        _ => false,
    }
}

/// Whether what passes is waited for once more.
fn may_pass(began: Instant, tries: usize) -> bool {
    began.elapsed() < PASSING || tries < TRIES
}

/// Refuses a program of which somebody was stopped before we did that: there would be no way back.
fn refuse_stopped(together: &Together) -> Result<()> {
    let processes = together.all.iter().flat_map(|(still, _)| &still.image.processes);
    let stopped = processes.filter(|process| process.stopped.is_some());
    let refusal = |process: &stillpoint_image::Process| Refusal {
        what: format!("process {} ({})", process.pid, String::from_utf8_lossy(&process.threads[0].name.0)),
        why: "job control has stopped it, and nothing leads back to a time when it was".into(),
        hint: "let it go on: kill -CONT".into(),
    };
    let refused: Vec<Refusal> = stopped.map(refusal).collect();
    if refused.is_empty() { Ok(()) } else { Err(Error::Refused(refused)) }
}

/// Whether it says that a process was no more when it was looked at.
fn is_of_an_end(error: &Error) -> bool {
    use stillpoint_capture::Error::{Kernel, Target};
    match error {
        Error::Capture(Target(_)) => true,
        // One that is just ending has no memory any more, and is still there.
        Error::Capture(Kernel(e)) | Error::Kernel(e) => {
            matches!(e, stillpoint_linux::Error::Gone(_)) || e.errno() == Some(libc::ESRCH)
        }
        _ => false,
    }
}

fn has_living_children(together: &Together) -> bool {
    together.all.iter().flat_map(|(still, _)| &still.children).any(|child| !has_ended(*child))
}

fn view<'a>(who: u64, target: &'a Target, still: &'a Still) -> View<'a> {
    View { who, pid: target.pid, pidfd: target.pidfd.as_fd(), table: &still.table }
}

/// Refuses processes that call others by other ids, or do not hear of each other's signals by the same ones.
fn refuse_other_namespaces(targets: &[&Target]) -> Result<()> {
    let depth = |target: &Target| target.process.status().map(|status| status.ns_tgid.len());
    let Some(root) = targets.first().and_then(|root| depth(root).ok()) else { return Ok(()) };
    let apart = targets.iter().filter(|target| depth(target).is_ok_and(|own| own != root));
    let refused: Vec<Refusal> = apart
        .map(|target| Refusal {
            what: named(target.pid),
            why: "it is in a pid namespace of its own, and snapshots are of processes in one".into(),
            hint: "--alone takes a snapshot of the one process".into(),
        })
        .collect();
    if refused.is_empty() { Ok(()) } else { Err(Error::Refused(refused)) }
}

/// Shared memory that somebody sees to.
#[derive(Default)]
struct Covered(HashMap<(u64, u64), Vec<Range>>);

impl Covered {
    /// Shared memory of a process that nobody before it has; now somebody does.
    fn left(&mut self, still: &Still) -> Vec<Range> {
        let mut all = Vec::new();
        for range in &still.shared {
            let vma = still.maps.iter().find(|v| v.start <= range.start && range.start < v.end);
            let Some(vma) = vma.filter(|v| range.end() <= v.end) else {
                all.push(*range);
                continue;
            };
            let there = self.0.entry((vma.dev, vma.ino)).or_default();
            let part = Range { start: vma.offset + (range.start - vma.start), len: range.len };
            if Range::without(&[part], there).is_empty() {
                continue;
            }
            *there = Range::joined([there.as_slice(), &[part]].concat());
            all.push(*range);
        }
        all
    }
}

/// Processes that the program has now, if it is to be seen to that all of them rest: where the snapshot is of several, or others are to
/// be killed.
///
/// # Errors
/// [`Error::Refused`] if some of the snapshot are no more.
fn others_now(
    pid: u32,
    alone: bool,
    members: &[Member],
    state: &State,
    kill_children: bool,
) -> Result<Vec<Arc<Target>>> {
    if members.first().is_some_and(|root| root.target.is_replaced()) {
        return Err(Error::Capture(stillpoint_capture::Error::Replaced));
    }
    let mut refused = Vec::new();
    for part in &state.parts {
        let why = match members.iter().find(|member| member.who == part.who) {
            Some(member) if !member.is_over() => continue,
            Some(member) if !has_ended(member.target.pid) && member.target.is_replaced() => {
                "it has become another program since (execve), and does not come back"
            }
            _ => "it has ended since, and does not come back",
        };
        refused.push(Refusal { what: format!("process {}", part.pid), why: why.into(), hint: String::new() });
    }
    if !refused.is_empty() {
        return Err(Error::Refused(refused));
    }
    if state.parts.len() > 1 || members.len() > 1 {
        return Ok(herd::find(pid)?);
    }
    let single = alone || !kill_children || descendants(&[pid]).is_empty();
    // One that cannot be looked at can be killed all the same.
    Ok(if single { Vec::new() } else { herd::find(pid).unwrap_or_default() })
}

/// Where a rollback leads.
struct Goal<'a> {
    id: Id,
    state: &'a State,
    /// Processes that the program has now, if all are to rest.
    found: &'a [Arc<Target>],
    terms: Terms,
    /// The mounts of the program.
    systems: Systems,
    /// What becomes of others that there were is no matter.
    alone: bool,
}

/// Brings members back, and files.
fn go(
    members: &mut [Member],
    goal: &Goal<'_>,
    guard: &mut Option<Guard>,
    keep: &mut Keep<'_>,
    tell: impl FnOnce(&Rolled),
) -> Result<(Rolled, Plan)> {
    let Goal { state, found, .. } = *goal;
    members.iter_mut().try_for_each(Member::check)?;
    let mut guests: Vec<Guest<'_>> = members.iter_mut().map(|m| m.guest(Look::AtRest)).collect();
    let mut together = take(found, &mut guests)?;
    drop(guests);
    let ready = plan(members, goal, &together, keep);
    // The marks of what was written may have gone.
    let (mut ways, between, mut files) = ready.inspect_err(|_| owe(members, &together))?;
    let since = together.since();
    let several = members.len() > 1;
    let watched = watch(guard.as_mut().filter(|_| several), members);
    watched.inspect_err(|_| owe(members, &together))?;
    let mut histories: Vec<History<First>> = members.iter_mut().filter_map(|m| m.history.take()).collect();
    let done = go_back(members, &mut histories, goal, &mut together, &ways, &between);
    let done = done.and_then(|pages| {
        files.bring_back();
        together.all.iter().try_for_each(|(still, _)| unbind(still))?;
        Ok(pages)
    });
    members.iter_mut().zip(histories).for_each(|(member, history)| member.history = Some(history));
    let pages = match done {
        Ok(pages) => pages,
        Err(e) => {
            // What is left is neither then nor now.
            members.iter().for_each(|m| drop(spawn::tgkill(m.target.pid, m.target.pid, libc::SIGKILL)));
            return Err(Error::Killed(e.to_string()));
        }
    };
    if let Some(guard) = guard.as_ref().filter(|_| several) {
        guard.end();
    }
    let told = ways.iter_mut().zip(&state.parts).flat_map(|(way, part)| {
        let notes = std::mem::take(&mut way.notes).into_iter();
        notes.map(move |note| if several { format!("process {}: {note}", part.pid) } else { note })
    });
    let notes = told.collect();
    let mut rolled = Rolled {
        pause: since.elapsed(),
        pages,
        processes: members.len(),
        notes,
        files: std::mem::take(&mut files.changed),
    };
    tell(&rolled);
    if let ([(still, _)], Some(part)) = (&mut together.all[..], state.parts.first()) {
        still.let_waiting_go_first(&part.image);
    }
    together.thaw();
    rolled.pause = since.elapsed();
    for (member, part) in members.iter_mut().zip(&state.parts) {
        if let Some(process) = part.image.processes.first() {
            member.recalled.earlier = stillpoint_capture::calls_of(&part.image, process);
            member.recalled.earlier.at_ns = member.target.clocks().0;
        }
    }
    Ok((rolled, files))
}

/// Has somebody see to it that all of them end if we do. He may have been killed; then there is another one.
fn watch(guard: Option<&mut Guard>, members: &[Member]) -> Result<()> {
    let Some(guard) = guard else { return Ok(()) };
    let pidfds: Vec<_> = members.iter().map(|member| member.target.pidfd.as_fd()).collect();
    let begin = |guard: &Guard| guard.know(&pidfds).and_then(|()| guard.begin());
    Ok(begin(guard).or_else(|_| {
        *guard = Guard::start()?;
        begin(guard)
    })?)
}

/// What leads each process back; what lies between them now; what becomes of files.
///
/// # Errors
/// [`Error::Refused`] with all reasons; nothing has been changed.
fn plan(
    members: &[Member],
    goal: &Goal<'_>,
    together: &Together,
    keep: &mut Keep<'_>,
) -> Result<(Vec<Way>, Between, Plan)> {
    let Goal { state, terms, alone, ref systems, .. } = *goal;
    let several = members.len() > 1;
    let (mut ways, mut refused) = (Vec::with_capacity(members.len()), Vec::new());
    for ((member, part), (still, _)) in members.iter().zip(&state.parts).zip(&together.all) {
        match Way::plan(&member.target, part, still, terms.kill_children, alone) {
            Ok(way) => ways.push(way),
            Err(Error::Refused(why)) if several => refused.extend(of(part.pid, why)),
            Err(e) => return Err(e),
        }
    }
    if !refused.is_empty() {
        return Err(Error::Refused(refused));
    }
    let views: Vec<View<'_>> =
        members.iter().zip(&together.all).map(|(m, (still, _))| view(m.who, &m.target, still)).collect();
    let now = Between::read(&views, false)?;
    let tables: Vec<&descriptors::Table> = state.parts.iter().map(|part| &part.table).collect();
    let mut plans: Vec<_> = ways.iter_mut().map(|way| std::mem::take(&mut way.descriptors)).collect();
    let refused = state.between.plan(&now, &views, &tables, &mut plans);
    if !refused.is_empty() {
        return Err(Error::Refused(refused));
    }
    ways.iter_mut().zip(plans).for_each(|(way, plan)| way.descriptors = plan);
    let ending = ending(together, &ways);
    let mut files = Plan::make(&state.files, &holders(members, together), &ending, systems, terms.files);
    if !files.refused.is_empty() {
        return Err(Error::Refused(files.refused));
    }
    // This may take long: should we be killed meanwhile, the program has been changed in nothing.
    files.keep(keep)?;
    let each = || members.iter().zip(&state.parts).zip(&together.all).zip(&ways);
    let ready = each()
        .try_for_each(|(((member, part), (still, _)), way)| get_ready(&member.target, part, still, way));
    if let Err(e) = ready {
        // Each is left as it is, if that can be had again.
        each().for_each(|(((member, _), (still, _)), _)| drop(set_back(&member.target, still)));
        return Err(e);
    }
    Ok((ways, now, files))
}

/// Processes that end in a rollback.
fn ending(together: &Together, ways: &[Way]) -> Vec<u32> {
    let children: Vec<u32> = ways.iter().flat_map(|way| way.children.iter().copied()).collect();
    let others = together.others.iter().map(|frozen| frozen.pid);
    others.chain(descendants(&children)).chain(children).collect()
}

/// Processes at rest, as far as it is about files.
fn holders<'a>(members: &'a [Member], together: &'a Together) -> Vec<Holder<'a>> {
    let holder = |(member, (still, _)): (&'a Member, &'a (Still, Option<Found>))| Holder {
        pid: member.target.pid,
        table: &still.table,
        image: &still.image,
        maps: &still.maps,
    };
    members.iter().zip(&together.all).map(holder).collect()
}

/// Makes processes at rest what they were, bound to end with us. If it fails, or we die, the program is killed; how many pages were put
/// back.
fn go_back(
    members: &[Member],
    histories: &mut [History<First>],
    goal: &Goal<'_>,
    together: &mut Together,
    ways: &[Way],
    between: &Between,
) -> Result<u64> {
    let Goal { id, state, .. } = *goal;
    together.all.iter().try_for_each(|(still, _)| bind(still))?;
    // They stand still, so that they leave nothing behind.
    let others = std::mem::take(&mut together.others);
    kill_all(&others.iter().map(|frozen| frozen.pid).collect::<Vec<_>>());
    drop(others);
    let none = Found::default();
    let mut returning = Vec::with_capacity(members.len());
    let of_each = members.iter().zip(histories).zip(&state.parts).zip(ways);
    for ((((member, history), part), way), (still, found)) in of_each.zip(&mut together.all) {
        let found = found.as_ref().unwrap_or(&none);
        returning.push(Returning::begin(member, history, (id, part), still, found, way)?);
    }
    let views: Vec<View<'_>> =
        members.iter().zip(&together.all).map(|(m, (still, _))| view(m.who, &m.target, still)).collect();
    state.between.put_back(between, &views)?;
    let own: Vec<u32> = match members.len() {
        1 => Vec::new(),
        _ => members
            .iter()
            .zip(&state.parts)
            .filter_map(|(_, p)| p.image.processes.first())
            .map(|p| p.own_pid())
            .collect(),
    };
    let mut pages = 0;
    for (returning, (still, _)) in returning.into_iter().zip(&mut together.all) {
        pages += returning.finish(still, &own)?;
    }
    Ok(pages)
}
