//! Asking threads what only they themselves can be asked, by system calls that they make.
//!
//! All of them at once, in all processes, and each with a single stop ([`stillpoint_linux::batch`]). A thread with which that is not
//! possible, because it handles every signal that could tell its return, there is no room in the vdso, or it dispatches calls from
//! there to itself ([`crate::gate`]), is visited alone, with two stops for each call ([`stillpoint_linux::inject`]).

use crate::attributes::expiries;
use crate::attributes::hidden::Hidden;
use crate::attributes::inside::{
    Asks, ChildrenQuery, ProcessQuery, ThreadQuery, page_to_lock, who_continued,
};
use crate::attributes::target::Seen;
use crate::freeze::Frozen;
use crate::gate::{Gate, Gates};
use crate::inspect::{Known, Portrait, lowest_pointer};
use crate::target::gadgets;
use crate::{Builder, Error, Result};
use std::collections::VecDeque;
use stillpoint_image::{PAGE, Process, Thread};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::{self, Gadgets, Regs};
use stillpoint_linux::batch::{self, Away, Departure, Origin, Place, Signal};
use stillpoint_linux::bpf::{self, FilteredCall};
use stillpoint_linux::inject::{Planted, Site, Stack, Visit};
use stillpoint_linux::pagemap::{Category, Query};
use stillpoint_linux::proc::{Status, Vma};
use stillpoint_linux::program::{Outcome, Program};
use stillpoint_linux::ptrace::Stopped;

/// Most threads on their way at a time.
const SLOTS: usize = 16;

/// How a thread is asked.
#[derive(Clone, Copy)]
enum Way {
    /// Together with others; it tells its return by this signal.
    Batch(Signal),
    /// Alone, at a place of its own.
    Alone(Gadgets),
}

/// What is to be asked of one process, and where in it.
pub(crate) struct Visits<'a> {
    known: &'a Known,
    ways: Vec<Way>,
    of_thread: ThreadQuery,
    of_process: ProcessQuery,
    site: Site<'a>,
    planted: Option<Planted<'a>>,
    /// Where the main thread is to make a mapping, if that cannot be done together with the rest.
    free: Option<u64>,
}

impl<'a> Visits<'a> {
    /// Gets ready to ask a process, of these mappings, and all its threads. Refuses where that cannot be done. `sharers` are all
    /// who have its memory, itself among them.
    pub fn plan(
        builder: &mut Builder,
        known: &'a Known,
        maps: &[Vma],
        portrait: &Portrait,
        sharers: &[&Process],
    ) -> Result<Option<Self>> {
        let Portrait { process, threads, .. } = portrait;
        let find = |name: &[u8]| maps.iter().find(|v| v.name == name);
        let planted = match find(b"[vdso]") {
            Some(vdso) => Planted::plant(&known.target.memory, (vdso.start, vdso.end))?,
            None => None,
        };
        let target = &known.target;
        let Some(gadgets) = gadgets(target.gadgets, planted.as_ref(), &target.memory, maps) else {
            builder.refuse(
                "its code",
                "it has no way to make a system call and return from it, and no vdso",
                "",
            );
            return Ok(None);
        };
        let Some(vma) = find(b"[stack]") else {
            let hint = "only programs with their original main stack can be asked about their threads";
            builder.refuse("main stack", "the program has unmapped it", hint);
            return Ok(None);
        };
        let sp = lowest_pointer(sharers, vma.start..vma.end);
        let stack = Stack { start: vma.start, end: vma.end, sp };
        let dispatches = sharers.iter().flat_map(|one| &one.threads).filter_map(|thread| thread.dispatch);
        let selectors = dispatches.map(|dispatch| dispatch.selector).collect();
        let gates = Gates::new(&known.target.memory, maps, gadgets, selectors);
        let Some(gates) = each_gate(builder, process, gates) else { return Ok(None) };
        let ways = ways(process, threads, &gates, gadgets, planted.as_ref())?;
        let timers = known.target.process.timers()?;
        let free = free_page(maps);
        let together = matches!(ways[0], Way::Batch(_)) && process.threads[0].seccomp.is_empty();
        let (probed, free) = if together && free.is_some() { (free, None) } else { (None, free) };
        // One that may not ask so can hardly be told of it, or have made such a table.
        let main = gates[0].gadgets;
        let may_call = |nr, args| allows(&process.threads[0], &FilteredCall { nr, ip: main.call_ip(), args });
        let may_ask = |pid| {
            let [kind, pid, _, told] = who_continued(pid);
            may_call(libc::SYS_waitid, [kind, pid, 0, told, 0, 0])
        };
        let child = portrait.children.first();
        let asks = Asks {
            children: child.is_some_and(|child| may_ask(None) && may_ask(Some(child.pid))),
            descriptors: may_call(libc::SYS_modify_ldt, [0; 6]),
            // What stays as it is needs not be given back.
            hidden: if builder.stays { Hidden::default() } else { hidden(known, portrait, &gates) },
        };
        let of_thread = ThreadQuery::new(asks.hidden);
        let of_process = ProcessQuery::new(&threads[0].look.status, &timers, probed, asks);
        for (i, (thread, gate)) in process.threads.iter().zip(&gates).enumerate() {
            let program = if i == 0 { of_process.program() } else { of_thread.program() };
            check_filters(builder, thread, program, gate.gadgets);
        }
        let status = &threads[0].look.status;
        let free = free.and_then(|at| may_ask_locking(builder, &process.threads[0], at, main, status));
        if !builder.refusals.is_empty() {
            return Ok(None);
        }
        let data_len = batch::room_for(of_process.program());
        let (slots, xstate_len) = (SLOTS.min(ways.len()), process.threads[0].xstate.0.len());
        let site = Site::choose(&known.target.memory, gadgets, stack, xstate_len, slots, data_len)?;
        Ok(Some(Visits { known, ways, of_thread, of_process, site, planted, free }))
    }

    fn program(&self, thread: usize) -> &Program {
        if thread == 0 { self.of_process.program() } else { self.of_thread.program() }
    }

    /// Borrows a thread, to make calls one by one where it can.
    fn visit(&self, thread: usize, stopped: Stopped) -> Result<Visit<'_>> {
        Ok(match self.ways[thread] {
            Way::Batch(_) => self.site.visit(0, stopped)?,
            Way::Alone(gadgets) => self.site.visit_by(0, stopped, gadgets)?,
        })
    }
}

/// Where each thread makes calls. Refuses those that cannot.
fn each_gate(builder: &mut Builder, process: &Process, mut gates: Gates<'_>) -> Option<Vec<Gate>> {
    let mut all = Vec::with_capacity(process.threads.len());
    for thread in &process.threads {
        match gates.of(thread, &named(thread)) {
            Ok(gate) => all.push(gate),
            Err(refusal) => builder.refusals.push(refusal),
        }
    }
    (all.len() == process.threads.len()).then_some(all)
}

/// How each thread is to be asked. `common` is where those make calls that are asked together.
fn ways(
    process: &Process,
    threads: &[Seen],
    gates: &[Gate],
    common: Gadgets,
    planted: Option<&Planted<'_>>,
) -> Result<Vec<Way>> {
    let Some(planted) = planted else {
        return Ok(gates.iter().map(|gate| Way::Alone(gate.gadgets)).collect());
    };
    let mut ways = Vec::with_capacity(threads.len());
    for ((thread, seen), gate) in process.threads.iter().zip(threads).zip(gates) {
        if planted.holds(registers(thread)?.ip()) {
            let why = "a checkpoint that was killed has left a thread in the middle of an answer; try again";
            return Err(Error::Failed(why.into()));
        }
        let signal = Signal::choose(&seen.look.status, thread.sigmask);
        let can_tell = |signal: &Signal| {
            let (nr, args) = signal.call();
            allows(thread, &FilteredCall { nr, ip: planted.batch_ip(), args })
        };
        let may_join = gate.gadgets == common
            && gate.lets_through(planted.batch_ip())
            && arch::reaches_plain_memory(&thread.xstate.0);
        ways.push(match signal.filter(can_tell) {
            Some(signal) if may_join => Way::Batch(signal),
            _ => Way::Alone(gate.gadgets),
        });
    }
    Ok(ways)
}

/// Address of a page with nothing mapped near it.
fn free_page(maps: &[Vma]) -> Option<u64> {
    let first = maps.first().map_or(0, |v| v.start);
    // Just below the lowest mapping, or in the first gap that is large enough to leave its neighbours alone.
    let gap = maps.windows(2).find(|w| w[1].start - w[0].end > 1 << 20).map(|w| w[0].end + (1 << 19));
    if first > 1 << 20 { Some(first - (1 << 19)) } else { gap }
}

/// Asks processes, by their places, and all their threads, each of them at the same time as the others; `meanwhile` is done
/// while they are on their way.
pub(crate) fn make(
    all: &[(usize, Visits<'_>)],
    builder: &mut Builder,
    frozen: &mut [Frozen],
    portraits: &mut [Portrait],
    meanwhile: impl FnOnce(&mut Builder, &mut [Portrait]) -> Result<()>,
) -> Result<()> {
    let mut rounds: Vec<Round<'_>> =
        all.iter().map(|(place, visits)| Round::new(visits, &mut frozen[*place])).collect();
    let ask = || -> Result<()> {
        for (round, (place, _)) in rounds.iter_mut().zip(all) {
            round.set_off(&portraits[*place])?;
        }
        builder.laps.end("threads set off to make calls");
        meanwhile(builder, portraits)?;
        builder.laps.end("processes");
        for (round, (place, _)) in rounds.iter_mut().zip(all) {
            round.complete(builder, &mut portraits[*place])?;
        }
        builder.laps.end("threads come back from calls");
        Ok(())
    };
    let result = ask();
    // With an error, those that are still away are waited for here.
    for (round, (place, _)) in rounds.into_iter().zip(all) {
        frozen[*place].threads.extend(round.threads.into_iter().flatten());
    }
    let cleaned = all.iter().try_for_each(|(_, visits)| Ok(visits.site.clean()?));
    result.and(cleaned)?;
    all.iter()
        .try_for_each(|(place, _)| expiries::add(&frozen[*place].threads, &mut portraits[*place].process))
}

/// The threads of a process that is being asked.
struct Round<'a> {
    visits: &'a Visits<'a>,
    threads: Vec<Option<Stopped>>,
    /// Those that are still to be set off together, and the first slot that is theirs.
    left: VecDeque<(usize, Vec<usize>)>,
    away: VecDeque<Group<'a>>,
}

/// Threads on their way.
type Group<'a> = Vec<(usize, Away<'a>)>;

impl<'a> Round<'a> {
    fn new(visits: &'a Visits<'a>, frozen: &mut Frozen) -> Self {
        let threads = frozen.threads.drain(..).map(Some).collect();
        let together = |i: &usize| matches!(visits.ways[*i], Way::Batch(_)) && visits.planted.is_some();
        // The main thread first: its answers take longest.
        let all: Vec<usize> = (0..visits.ways.len()).filter(together).collect();
        let at_a_time = (visits.site.slots() / 2).max(1);
        let slot = |n: usize| if visits.site.slots() > 1 { n % 2 * at_a_time } else { 0 };
        let left = all.chunks(at_a_time).enumerate().map(|(n, group)| (slot(n), group.to_vec())).collect();
        Round { visits, threads, left, away: VecDeque::new() }
    }

    /// Sets off as many as there is room for: two groups at a time, each in its half of the slots.
    fn set_off(&mut self, portrait: &Portrait) -> Result<()> {
        let most = if self.visits.site.slots() > 1 { 2 } else { 1 };
        while self.away.len() < most {
            let Some((first, group)) = self.left.pop_front() else { break };
            let group = self.send(portrait, &group, first)?;
            self.away.push_back(group);
        }
        Ok(())
    }

    /// Sets threads off, with the slots from `first` on.
    fn send(&mut self, portrait: &Portrait, group: &[usize], first: usize) -> Result<Group<'a>> {
        let visits = self.visits;
        let place = |slot, i| if i == 0 { Place::SlotAndData(slot) } else { Place::Slot(slot) };
        let all = group.iter().enumerate().map(|(n, &i)| (i, place(first + n, i), visits.program(i)));
        let away = self.send_through(portrait, &all.collect::<Vec<_>>())?;
        Ok(group.iter().copied().zip(away).collect())
    }

    /// Sets threads off, each through a program that lies in that place.
    fn send_through<'p>(
        &mut self,
        portrait: &Portrait,
        all: &[(usize, Place, &'p Program)],
    ) -> Result<Vec<Away<'p>>> {
        let visits = self.visits;
        let missing = || Error::Failed("a thread was to be asked that is not there".into());
        let planted = visits.planted.as_ref().ok_or_else(missing)?;
        let mut regs = Vec::with_capacity(all.len());
        for &(i, ..) in all {
            regs.push(registers(&portrait.process.threads[i])?);
        }
        let mut departures = Vec::with_capacity(all.len());
        for (&(i, place, program), regs) in all.iter().zip(&regs) {
            let (Way::Batch(signal), Some(stopped)) = (visits.ways[i], self.threads[i].take()) else {
                return Err(missing());
            };
            let thread = &portrait.process.threads[i];
            let origin = Origin { regs, xstate: &thread.xstate.0, mask: thread.sigmask };
            departures.push(Departure { thread: stopped, origin, place, signal, program });
        }
        Ok(visits.site.send(planted, departures)?)
    }

    /// Waits for all threads and notes their answers.
    fn complete(&mut self, builder: &mut Builder, portrait: &mut Portrait) -> Result<()> {
        while let Some(group) = self.away.pop_front() {
            let (mut asked, mut answers) = (Vec::with_capacity(group.len()), Vec::with_capacity(group.len()));
            for (i, away) in group {
                let (stopped, answer) = away.wait(&registers(&portrait.process.threads[i])?)?;
                self.threads[i] = Some(stopped);
                asked.push(i);
                answers.push(answer);
            }
            for (i, outcome) in asked.into_iter().zip(self.visits.site.outcomes(&answers)?) {
                self.note(i, &outcome, builder, portrait);
            }
            self.set_off(portrait)?;
        }
        self.alone(builder, portrait)?;
        if portrait.has_continued_child { self.children(portrait) } else { Ok(()) }
    }

    fn note(&self, i: usize, outcome: &Outcome, builder: &mut Builder, portrait: &mut Portrait) {
        let Portrait { process, space, threads, has_continued_child, .. } = portrait;
        if i > 0 {
            return self.visits.of_thread.decode(outcome, &mut process.threads[i], builder);
        }
        let ids: Vec<u32> = threads.iter().map(|seen| seen.tid).collect();
        self.visits.of_process.decode(outcome, &ids, builder, process, space);
        *has_continued_child = self.visits.of_process.has_continued_child(outcome);
    }

    /// Asks the others, one by one; the main thread also where it still has to make a mapping.
    fn alone(&mut self, builder: &mut Builder, portrait: &mut Portrait) -> Result<()> {
        let visits = self.visits;
        for i in 0..visits.ways.len() {
            let by_itself = matches!(visits.ways[i], Way::Alone(_));
            if !by_itself && (i > 0 || visits.free.is_none()) {
                continue;
            }
            let Some(stopped) = self.threads[i].take() else { continue };
            let mut visit = visits.visit(i, stopped)?;
            if by_itself {
                let outcome = visits.site.run(&mut visit, visits.program(i))?;
                self.note(i, &outcome, builder, portrait);
            }
            if i == 0 && visits.free.is_some() {
                portrait.space.lock_future = lock_future(&mut visit, visits.known, visits.free)?;
            }
            self.leave(i, visit, portrait)?;
        }
        Ok(())
    }

    /// Sends a thread home that was visited alone. From here on it goes on as the image says.
    fn leave(&mut self, i: usize, visit: Visit<'_>, portrait: &Portrait) -> Result<()> {
        let stopped = visit.leave()?;
        stopped.set_regs(&registers(&portrait.process.threads[i])?)?;
        self.threads[i] = Some(stopped);
        Ok(())
    }

    /// Asks which of its children go on after a stop of which it has not been told: as many at a time as there is room for.
    fn children(&mut self, portrait: &mut Portrait) -> Result<()> {
        let most = ChildrenQuery::most(self.visits.site.data_len());
        for some in std::mem::take(&mut portrait.children).chunks(most) {
            let query = ChildrenQuery::new(some.iter().map(|child| child.pid));
            let Some(outcome) = self.ask_main(query.program(), portrait)? else { continue };
            let continued = some.iter().zip(query.decode(&outcome)).filter(|(_, continued)| *continued);
            portrait.continued.extend(continued.map(|(child, _)| child.place));
        }
        Ok(())
    }

    /// Asks the main thread once more, after all others have come home.
    fn ask_main(&mut self, program: &Program, portrait: &Portrait) -> Result<Option<Outcome>> {
        let site = &self.visits.site;
        if matches!(self.visits.ways[0], Way::Batch(_)) {
            let away = self.send_through(portrait, &[(0, Place::SlotAndData(0), program)])?;
            let mut answers = Vec::with_capacity(away.len());
            for away in away {
                let (stopped, answer) = away.wait(&registers(&portrait.process.threads[0])?)?;
                self.threads[0] = Some(stopped);
                answers.push(answer);
            }
            return Ok(site.outcomes(&answers)?.pop());
        }
        let Some(stopped) = self.threads[0].take() else { return Ok(None) };
        let mut visit = self.visits.visit(0, stopped)?;
        let outcome = site.run(&mut visit, program)?;
        self.leave(0, visit, portrait)?;
        Ok(Some(outcome))
    }
}

/// The registers with which a thread goes on.
fn registers(thread: &Thread) -> Result<Regs> {
    Regs::from_bytes(&thread.regs.0)
        .ok_or_else(|| Error::Failed(format!("thread {}: no registers", thread.tid)))
}

/// Whether future mappings are locked in memory (`mlockall(MCL_FUTURE)`: 1, on fault: 2), which only a new mapping
/// shows: one is made, looked at, and unmapped.
fn lock_future(visit: &mut Visit<'_>, known: &Known, free: Option<u64>) -> Result<u32> {
    let Some(at) = free else { return Ok(0) };
    let locked = || Ok::<_, Error>(known.target.process.status()?.locked);
    let before = locked()?;
    let [map, unmap] = locking_calls(at);
    let mapped = visit.call_with_undo(map.0, map.1, unmap)?;
    if mapped == -i64::from(libc::EAGAIN) {
        return Ok(1); // mmap(2): it would be locked, and more may not be (whether once it is touched does not show)
    }
    if mapped as u64 != at {
        return Ok(0); // no mapping more is allowed, let alone a locked one
    }
    let (after, mut present) = (locked()?, Vec::new());
    let query = Query { any: Category::PRESENT, ..Query::default() };
    known.target.pagemap.scan(RemoteAddr(at), RemoteAddr(at + PAGE), query, &mut present)?;
    visit.call(unmap.0, unmap.1)?;
    Ok(if after <= before {
        0
    } else if present.is_empty() {
        2
    } else {
        1
    })
}

/// The calls by which [`lock_future`] asks: a mapping is made, and unmapped.
fn locking_calls(at: u64) -> [(i64, [u64; 6]); 2] {
    let [at, len, access, flags] = page_to_lock(at);
    [(libc::SYS_mmap, [at, len, access, flags, u64::MAX, 0]), (libc::SYS_munmap, [at, len, 0, 0, 0, 0])]
}

/// Where the main thread may map a page to see whether it is locked; nowhere if its seccomp filters forbid that. Then what is locked
/// now tells that nothing will be: it is refused if anything is.
fn may_ask_locking(
    builder: &mut Builder,
    thread: &Thread,
    at: u64,
    gadgets: Gadgets,
    status: &Status,
) -> Option<u64> {
    let ip = gadgets.call_ip();
    let is_allowed = |&(nr, args): &(i64, [u64; 6])| allows(thread, &FilteredCall { nr, ip, args });
    if locking_calls(at).iter().all(is_allowed) {
        return Some(at);
    }
    if status.locked > 0 {
        let what = named(thread);
        let why = "it has memory that is locked, and its seccomp filter forbids mmap or munmap, by which is told whether what it maps later \
                   is to be locked, too";
        builder.refuse(what, why, "allow these calls in the filter");
    }
    None
}

/// What all threads of a process may be asked of what nobody is told.
fn hidden(known: &Known, portrait: &Portrait, gates: &[Gate]) -> Hidden {
    let may_call = |nr, args| {
        let mut threads = portrait.process.threads.iter().zip(gates);
        threads.all(|(thread, gate)| allows(thread, &FilteredCall { nr, ip: gate.gadgets.call_ip(), args }))
    };
    Hidden::of(portrait.threads.iter().map(|seen| &seen.look.status), may_call, known.is_near)
}

/// Refuses a thread whose seccomp filters would not let it make these calls and come home: if we died while it is
/// lent to us, its filter would kill it.
fn check_filters(builder: &mut Builder, thread: &Thread, program: &Program, gadgets: Gadgets) {
    let what = || named(thread);
    if thread.seccomp_strict {
        builder.refuse(what(), "it is in strict seccomp mode and cannot be asked about its state", "");
        return;
    }
    let (ip, home) = (gadgets.call_ip(), gadgets.sigreturn_ip());
    let home = ("rt_sigreturn", FilteredCall { nr: libc::SYS_rt_sigreturn, ip: home, args: [0; 6] });
    let calls = program.calls().map(|(what, nr, args)| (what, FilteredCall { nr, ip, args }));
    for (name, call) in calls.chain([home]) {
        if !allows(thread, &call) {
            let why = format!("its seccomp filter forbids {name}, by which its state is asked");
            builder.refuse(what(), why, "allow that call in the filter");
            return;
        }
    }
}

/// What a thread is called in refusals.
fn named(thread: &Thread) -> String {
    format!("thread {} ({})", thread.tid, thread.name)
}

fn allows(thread: &Thread, call: &FilteredCall) -> bool {
    thread.seccomp.iter().all(|f| bpf::allows(&f.program.0, call))
}
