//! Asking threads what only they themselves can be asked, by system calls that they make.
//!
//! All of them at once, and each with a single stop ([`stillpoint_linux::batch`]). A thread with which that is not
//! possible, because it handles every signal that could tell its return, or there is no room in the vdso, is visited
//! alone, with two stops for each call ([`stillpoint_linux::inject`]).

use crate::attributes::inside::{ProcessQuery, ThreadQuery};
use crate::attributes::target::Seen;
use crate::freeze::Frozen;
use crate::inspect::Known;
use crate::{Builder, Error, Result};
use std::collections::VecDeque;
use stillpoint_image::{AddressSpace, PAGE, Process, Thread};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::{self, Gadgets, Regs};
use stillpoint_linux::batch::{self, Away, Departure, Origin, Place, Signal};
use stillpoint_linux::bpf::{self, FilteredCall};
use stillpoint_linux::inject::{Planted, Site, Stack, Visit};
use stillpoint_linux::pagemap::{Category, Query};
use stillpoint_linux::proc::Vma;
use stillpoint_linux::program::{Outcome, Program};
use stillpoint_linux::ptrace::Stopped;

/// Most threads on their way at a time.
const SLOTS: usize = 16;

/// What visits need to know.
pub(crate) struct Visits<'a> {
    /// What was learned before the freeze.
    pub known: &'a Known,
    /// The mappings as they are now.
    pub maps: &'a [Vma],
    /// What `/proc` tells of the threads, in the order in which they were frozen.
    pub threads: &'a [Seen],
}

/// How a thread is asked.
#[derive(Clone, Copy)]
enum Way {
    /// Together with others; it tells its return by this signal.
    Batch(Signal),
    /// Alone.
    Alone,
}

/// Which question a thread is away for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Question {
    Process,
    Thread,
}

/// Threads on their way, and what for.
type Group<'a> = Vec<((usize, Question), Away<'a>)>;

/// The questions, and where the answers belong.
struct Round<'a> {
    ways: Vec<Way>,
    of_thread: &'a ThreadQuery,
    of_process: &'a ProcessQuery,
    ids: Vec<u32>,
    process: &'a mut Process,
    space: &'a mut AddressSpace,
    builder: &'a mut Builder,
    threads: Vec<Option<Stopped>>,
}

impl Visits<'_> {
    /// Asks the process and all its threads. Refuses where that cannot be done.
    pub fn make(
        &self,
        builder: &mut Builder,
        frozen: &mut Frozen,
        process: &mut Process,
        space: &mut AddressSpace,
    ) -> Result<()> {
        let find = |name: &[u8]| self.maps.iter().find(|v| v.name == name);
        let planted = match find(b"[vdso]") {
            Some(vdso) => Planted::plant(&self.known.target.memory, (vdso.start, vdso.end))?,
            None => None,
        };
        let Some(gadgets) = self.known.target.gadgets.or(planted.as_ref().map(|p| p.gadgets)) else {
            builder.refuse(
                "its code",
                "it has no way to make a system call and return from it, and no vdso",
                "",
            );
            return Ok(());
        };
        let Some(vma) = find(b"[stack]") else {
            let hint = "only programs with their original main stack can be asked about their threads";
            builder.refuse("main stack", "the program has unmapped it", hint);
            return Ok(());
        };
        let sp = registers(&process.threads[0])?.sp();
        let stack = Stack { start: vma.start, end: vma.end, sp };
        let ways = self.ways(process, planted.as_ref())?;
        let timers = self.known.target.process.timers()?;
        let free = self.free_page();
        let probed = if matches!(ways[0], Way::Batch(_)) && process.threads[0].seccomp.is_empty() {
            free
        } else {
            None
        };
        let of_process = ProcessQuery::new(&self.threads[0].look.status, &timers, probed);
        let of_thread = ThreadQuery::new();
        for thread in &process.threads {
            check_filters(builder, thread, of_thread.program(), gadgets);
        }
        check_filters(builder, &process.threads[0], of_process.program(), gadgets);
        if !builder.refusals.is_empty() {
            return Ok(());
        }
        let data_len = batch::room_for(of_process.program());
        let (slots, xstate_len) = (SLOTS.min(ways.len()), process.threads[0].xstate.0.len());
        let site = Site::choose(&self.known.target.memory, gadgets, stack, xstate_len, slots, data_len)?;
        let mut round = Round {
            ways,
            of_thread: &of_thread,
            of_process: &of_process,
            ids: frozen.threads.iter().map(Stopped::tid).collect(),
            process,
            space,
            builder,
            threads: frozen.threads.drain(..).map(Some).collect(),
        };
        let result = match &planted {
            Some(planted) => round.together(&site, planted),
            None => Ok(()),
        };
        let result =
            result.and_then(|()| round.alone(&site, self.known, if probed.is_none() { free } else { None }));
        frozen.threads.extend(round.threads.into_iter().flatten());
        site.clean()?;
        result
    }

    /// How each thread is to be asked.
    fn ways(&self, process: &Process, planted: Option<&Planted<'_>>) -> Result<Vec<Way>> {
        let Some(planted) = planted else { return Ok(vec![Way::Alone; self.threads.len()]) };
        let mut ways = Vec::with_capacity(self.threads.len());
        for (thread, seen) in process.threads.iter().zip(self.threads) {
            if planted.holds(registers(thread)?.ip()) {
                let why =
                    "a checkpoint that was killed has left a thread in the middle of an answer; try again";
                return Err(Error::Failed(why.into()));
            }
            let signal = Signal::choose(&seen.look.status, thread.sigmask);
            let can_tell = |signal: &Signal| {
                let (nr, args) = signal.call();
                allows(thread, &FilteredCall { nr, ip: planted.batch_loop().0 + arch::batch_loop().1, args })
            };
            ways.push(match signal.filter(can_tell) {
                Some(signal) if arch::reaches_plain_memory(&thread.xstate.0) => Way::Batch(signal),
                _ => Way::Alone,
            });
        }
        Ok(ways)
    }

    /// Address of a page with nothing mapped near it.
    fn free_page(&self) -> Option<u64> {
        let first = self.maps.first().map_or(0, |v| v.start);
        // Just below the lowest mapping, or in the first gap that is large enough to leave its neighbours alone.
        let gap =
            self.maps.windows(2).find(|w| w[1].start - w[0].end > 1 << 20).map(|w| w[0].end + (1 << 19));
        if first > 1 << 20 { Some(first - (1 << 19)) } else { gap }
    }
}

impl<'a> Round<'a> {
    /// Asks those that can be asked together, the main thread first: its answers take longest. While some are on their
    /// way, as many others are set off.
    fn together(&mut self, site: &Site<'_>, planted: &Planted<'_>) -> Result<()> {
        // Of the main thread there are two questions, which it is asked in turn.
        let others = (1..self.ways.len()).map(|i| (i, Question::Thread));
        let mut all: Vec<(usize, Question)> = [(0, Question::Process)].into_iter().chain(others).collect();
        all.retain(|&(i, _)| matches!(self.ways[i], Way::Batch(_)));
        let at_a_time = (site.slots() / 2).max(1);
        let mut groups: Vec<Vec<(usize, Question)>> = all.chunks(at_a_time).map(<[_]>::to_vec).collect();
        if matches!(self.ways[0], Way::Batch(_)) {
            match groups.last_mut() {
                Some(last) if last.len() < at_a_time && last[0].0 != 0 => last.push((0, Question::Thread)),
                _ => groups.push(vec![(0, Question::Thread)]),
            }
        }
        let mut away = VecDeque::new();
        for (n, group) in groups.into_iter().enumerate() {
            // Two groups at a time, each in its half of the slots; but nobody can be away twice.
            let most =
                if site.slots() > 1 && group.iter().all(|&(i, _)| self.threads[i].is_some()) { 1 } else { 0 };
            while away.len() > most {
                self.back(site, away.pop_front())?;
            }
            let first = if site.slots() > 1 { n % 2 * at_a_time } else { 0 };
            away.push_back(self.set_off(site, planted, &group, first)?);
        }
        while !away.is_empty() {
            self.back(site, away.pop_front())?;
        }
        Ok(())
    }

    /// Sets threads off, with the slots from `first` on.
    fn set_off(
        &mut self,
        site: &Site<'_>,
        planted: &Planted<'_>,
        group: &[(usize, Question)],
        first: usize,
    ) -> Result<Group<'a>> {
        let mut regs = Vec::with_capacity(group.len());
        for &(i, _) in group {
            regs.push(registers(&self.process.threads[i])?);
        }
        let mut departures = Vec::with_capacity(group.len());
        for (slot, (&(i, question), regs)) in group.iter().zip(&regs).enumerate() {
            let (Way::Batch(signal), Some(stopped)) = (self.ways[i], self.threads[i].take()) else {
                return Err(Error::Failed("a thread was to be asked that is not there".into()));
            };
            let thread = &self.process.threads[i];
            let origin = Origin { regs, xstate: &thread.xstate.0, mask: thread.sigmask };
            let (program, place) = match question {
                Question::Process => (self.of_process.program(), Place::SlotAndData(first + slot)),
                Question::Thread => (self.of_thread.program(), Place::Slot(first + slot)),
            };
            departures.push(Departure { thread: stopped, origin, place, signal, program });
        }
        let away = site.send(planted, departures)?;
        Ok(group.iter().copied().zip(away).collect())
    }

    /// Waits for threads and notes their answers.
    fn back(&mut self, site: &Site<'_>, group: Option<Group<'a>>) -> Result<()> {
        let (mut questions, mut answers) = (Vec::new(), Vec::new());
        for ((i, question), away) in group.into_iter().flatten() {
            let (stopped, answer) = away.wait(&registers(&self.process.threads[i])?)?;
            self.threads[i] = Some(stopped);
            questions.push((i, question));
            answers.push(answer);
        }
        for ((i, question), outcome) in questions.into_iter().zip(site.outcomes(&answers)?) {
            self.note(i, question, &outcome);
        }
        Ok(())
    }

    fn note(&mut self, i: usize, question: Question, outcome: &Outcome) {
        match question {
            Question::Thread => self.of_thread.decode(outcome, &mut self.process.threads[i]),
            Question::Process => {
                self.of_process.decode(outcome, &self.ids, self.builder, self.process, self.space);
            }
        }
    }

    /// Asks the others, one by one; `free` is where the main thread may make a mapping, if it still has to.
    fn alone(&mut self, site: &Site<'_>, known: &Known, free: Option<u64>) -> Result<()> {
        for i in 0..self.ways.len() {
            let by_itself = matches!(self.ways[i], Way::Alone);
            if !by_itself && (i > 0 || free.is_none()) {
                continue;
            }
            let Some(stopped) = self.threads[i].take() else { continue };
            let mut visit = site.visit(0, stopped)?;
            if by_itself {
                let outcome = site.run(&mut visit, self.of_thread.program())?;
                self.note(i, Question::Thread, &outcome);
            }
            if i == 0 && by_itself {
                let outcome = site.run(&mut visit, self.of_process.program())?;
                self.note(i, Question::Process, &outcome);
            }
            if i == 0 {
                self.space.lock_future = lock_future(&mut visit, known, free)?;
            }
            let stopped = visit.leave()?;
            // From here on the thread goes on as the image says.
            stopped.set_regs(&registers(&self.process.threads[i])?)?;
            self.threads[i] = Some(stopped);
        }
        Ok(())
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
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    let map = [at, PAGE, (libc::PROT_READ | libc::PROT_WRITE) as u64, flags, u64::MAX, 0];
    let unmap = (libc::SYS_munmap, [at, PAGE, 0, 0, 0, 0]);
    if visit.call_with_undo(libc::SYS_mmap, map, unmap)? as u64 != at {
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

/// Refuses a thread whose seccomp filters would not let it make these calls and come home: if we died while it is
/// lent to us, its filter would kill it.
fn check_filters(builder: &mut Builder, thread: &Thread, program: &Program, gadgets: Gadgets) {
    let what = || format!("thread {} ({})", thread.tid, thread.name);
    if thread.seccomp_strict {
        builder.refuse(what(), "it is in strict seccomp mode and cannot be asked about its state", "");
        return;
    }
    let ip = gadgets.call.0 + 2;
    let home =
        ("rt_sigreturn", FilteredCall { nr: libc::SYS_rt_sigreturn, ip: gadgets.sigreturn.0, args: [0; 6] });
    let calls = program.calls().map(|(what, nr, args)| (what, FilteredCall { nr, ip, args }));
    for (name, call) in calls.chain([home]) {
        if !allows(thread, &call) {
            let why = format!("its seccomp filter forbids {name}, by which its state is asked");
            builder.refuse(what(), why, "allow that call in the filter");
            return;
        }
    }
}

fn allows(thread: &Thread, call: &FilteredCall) -> bool {
    thread.seccomp.iter().all(|f| bpf::allows(&f.program.0, call))
}
