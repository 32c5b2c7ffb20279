//! What only the target itself can ask: programs of system calls to be run in it, and what their outcome means.
//!
//! Where a thread is asked alone, each call costs two stops, so a program holds none that is not needed. All read only.

use super::hidden::{Hidden, Questions};
use crate::Builder;
use linux_raw_sys::prctl::{
    PR_GET_CHILD_SUBREAPER, PR_GET_DUMPABLE, PR_GET_MDWE, PR_GET_MEMORY_MERGE, PR_GET_PDEATHSIG,
    PR_GET_SECUREBITS, PR_GET_THP_DISABLE, PR_GET_TID_ADDRESS, PR_GET_TIMERSLACK, PR_GET_TSC,
};
use stillpoint_image::{
    AddressSpace, AltStack, IntervalTimer, PAGE, PosixTimer, Process, SignalAction, Thread,
};
use stillpoint_linux::batch;
use stillpoint_linux::proc::{PosixTimerInfo, Status, TimerNotify};
use stillpoint_linux::program::{Arg, Outcome, Program, Step};
use stillpoint_linux::{features, layout};

const ARCH_GET_CPUID: u64 = 0x1011;
const ARCH_GET_XCOMP_PERM: u64 = 0x1022;
const MEMBARRIER_CMD_GET_REGISTRATIONS: u64 = 512;
/// Low bits of a CPU clock's id: which time, and whether of a thread (`CPUCLOCK_PERTHREAD_MASK`).
const CPU_CLOCK_OF_THREAD: i32 = 4;

/// What to ask in the main thread, about the process as a whole and about itself.
#[derive(Clone, Debug)]
pub struct ProcessQuery {
    program: Program,
    of_thread: ThreadAnswers,
    actions: Vec<(u32, Arg)>,
    itimers: Vec<Arg>,
    timers: Vec<TimerQuery>,
    subreaper: Arg,
    xfeatures: Option<(Step, Arg)>,
    cpuid: Option<Step>,
    brk: Step,
    dumpable: Step,
    mdwe: Step,
    thp_disable: Step,
    memory_merge: Step,
    membarrier: Step,
    locking: Option<LockQuery>,
    continued: Option<Arg>,
    descriptors: Option<Step>,
    hidden: Questions,
}

/// Entry of a local descriptor table, bytes.
const DESCRIPTOR: usize = 8;

/// Questions that are left out where they need not be answered, or may not be asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asks {
    /// Whether a child goes on after a stop.
    pub children: bool,
    /// Whether there is a local descriptor table.
    pub descriptors: bool,
    /// What nobody is told.
    pub hidden: Hidden,
}

/// Whether future mappings are locked in memory (`mlockall(MCL_FUTURE)`), which only a new mapping shows.
#[derive(Clone, Debug)]
struct LockQuery {
    present: Arg,
    drop: Step,
    map: Step,
}

#[derive(Clone, Debug)]
struct TimerQuery {
    info: PosixTimerInfo,
    time: Arg,
    read: Step,
    overrun: Step,
}

impl ProcessQuery {
    /// The questions for a process with these signals and POSIX timers, as `/proc` tells them. `free` is the address of
    /// a page at which nothing is mapped: if given, a mapping is made there for a moment.
    pub fn new(status: &Status, timers: &[PosixTimerInfo], free: Option<u64>, asks: Asks) -> Self {
        let mut p = Program::new();
        // SIGCHLD may have flags (SA_NOCLDWAIT) that matter even with the default action.
        let mask = status.sig_caught | status.sig_ignored | 1 << (libc::SIGCHLD - 1);
        let uncatchable = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
        let actions = (1..=64u32).filter(|s| mask & !uncatchable & 1 << (s - 1) != 0);
        let actions = actions.map(|signal| (signal, ask_action(&mut p, signal))).collect();
        let itimers = (0..3u64).map(|which| {
            let room = p.room(layout::ITIMERVAL);
            p.call(format!("getitimer {which}"), libc::SYS_getitimer, [which.into(), room]);
            room
        });
        let itimers = itimers.collect();
        let timers = timers.iter().map(|info| ask_timer(&mut p, *info)).collect();
        let subreaper = p.room(4);
        let args = [u64::from(PR_GET_CHILD_SUBREAPER).into(), subreaper];
        p.call("prctl PR_GET_CHILD_SUBREAPER", libc::SYS_prctl, args);
        let xfeatures = (features::xfeatures_on_demand() != 0).then(|| {
            let room = p.room(8);
            let args = [ARCH_GET_XCOMP_PERM.into(), room];
            (p.attempt("arch_prctl ARCH_GET_XCOMP_PERM", libc::SYS_arch_prctl, args), room)
        });
        let cpuid = features::cpuid_faulting()
            .then(|| p.attempt("arch_prctl ARCH_GET_CPUID", libc::SYS_arch_prctl, [ARCH_GET_CPUID.into()]));
        let brk = p.call("brk", libc::SYS_brk, [0.into()]);
        let mut get = |what: &str, option: u32| p.attempt(what, libc::SYS_prctl, [u64::from(option).into()]);
        let dumpable = get("prctl PR_GET_DUMPABLE", PR_GET_DUMPABLE);
        let mdwe = get("prctl PR_GET_MDWE", PR_GET_MDWE);
        let thp_disable = get("prctl PR_GET_THP_DISABLE", PR_GET_THP_DISABLE);
        let memory_merge = get("prctl PR_GET_MEMORY_MERGE", PR_GET_MEMORY_MERGE);
        let args = [MEMBARRIER_CMD_GET_REGISTRATIONS.into()];
        let membarrier = p.attempt("membarrier", libc::SYS_membarrier, args);
        let locking = free.map(|at| ask_locking(&mut p, at));
        let continued = asks.children.then(|| ask_continued(&mut p, None));
        let descriptors = asks.descriptors.then(|| {
            let args = [0.into(), p.room(DESCRIPTOR), (DESCRIPTOR as u64).into()];
            p.attempt("modify_ldt", libc::SYS_modify_ldt, args)
        });
        let hidden = asks.hidden.ask_process(&mut p);
        let of_thread = ThreadAnswers::ask(&mut p, asks.hidden);
        #[rustfmt::skip]
        let query = ProcessQuery {
            program: p, of_thread, actions, itimers, timers, subreaper, xfeatures, cpuid, brk, dumpable, mdwe, thp_disable,
            memory_merge, membarrier, locking, continued, descriptors, hidden,
        };
        query
    }

    /// Whether a child goes on after a stop of which it has not been told.
    pub fn has_continued_child(&self, outcome: &Outcome) -> bool {
        self.continued.is_some_and(|at| tells_of_one(outcome, at))
    }

    /// The program to run in the main thread.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Puts the answers where they belong. `threads` are the ids of the process's threads, in our pid namespace.
    pub fn decode(
        &self,
        outcome: &Outcome,
        threads: &[u32],
        builder: &mut Builder,
        process: &mut Process,
        space: &mut AddressSpace,
    ) {
        let number = |step| u32::try_from(outcome.result(step)).unwrap_or(0);
        if let Some(main) = process.threads.first_mut() {
            self.of_thread.decode(outcome, main, builder);
        }
        self.hidden.decode(outcome, builder, || format!("process {}", process.pid));
        process.actions = self.actions.iter().map(|&(signal, at)| action(signal, outcome, at)).collect();
        process.actions.retain(|a| *a != SignalAction { signal: a.signal, ..SignalAction::default() });
        process.itimers = self.itimers.iter().map(|&at| interval_timer(outcome, at)).collect();
        process.timers.clear();
        for query in &self.timers {
            let timer = posix_timer(query, outcome, threads, &process.threads, builder);
            process.timers.extend(timer);
        }
        process.timers.sort_by_key(|t| t.id);
        process.child_subreaper = layout::half(outcome.bytes(self.subreaper, 4), 0) != 0;
        process.xfeatures = match self.xfeatures {
            Some((step, at)) if outcome.result(step) == 0 => layout::word(outcome.bytes(at, 8), 0),
            _ => 0,
        };
        if self.cpuid.is_some_and(|step| outcome.result(step) == 0) {
            builder.refuse("the program", "it has the cpuid instruction fault (ARCH_SET_CPUID)", "");
        }
        // So many bytes as the table has, or it has room for.
        if self.descriptors.is_some_and(|step| outcome.result(step) > 0) {
            let why = "it has a local descriptor table (modify_ldt), which is not given back";
            builder.refuse("its address space", why, "");
        }
        space.layout.brk = outcome.result(self.brk) as u64;
        space.dumpable = number(self.dumpable);
        space.mdwe = number(self.mdwe);
        space.thp_disable = number(self.thp_disable);
        space.memory_merge = number(self.memory_merge) == 1;
        space.membarrier = number(self.membarrier);
        space.lock_future = self.locking.as_ref().map_or(0, |query| lock_future(query, outcome));
    }
}

/// Asks a process which of some children go on after a stop of which it has not been told.
#[derive(Debug)]
pub(crate) struct ChildrenQuery {
    program: Program,
    told: Vec<Arg>,
}

impl ChildrenQuery {
    /// How many can be asked for at a time where a program and its data may take so many bytes: one at least, as this is less than
    /// a [`ProcessQuery`] takes.
    pub fn most(room: usize) -> usize {
        (room / (batch::ENTRY + layout::SIGINFO)).saturating_sub(1).max(1)
    }

    /// The questions for children with these ids, as their parent sees them.
    pub fn new(children: impl Iterator<Item = u32>) -> Self {
        let mut program = Program::new();
        let told = children.map(|pid| ask_continued(&mut program, Some(pid))).collect();
        ChildrenQuery { program, told }
    }

    /// The program to run in the main thread.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Of each whether it does.
    pub fn decode<'a>(&'a self, outcome: &'a Outcome) -> impl Iterator<Item = bool> + 'a {
        self.told.iter().map(|&at| tells_of_one(outcome, at))
    }
}

/// The first arguments of `waitid`, but for where it answers: whether a child, or any, goes on after a stop. That stays to be told.
pub(crate) fn who_continued(pid: Option<u32>) -> [u64; 4] {
    let told = libc::WCONTINUED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    [pid.map_or(libc::P_ALL, |_| libc::P_PID).into(), pid.unwrap_or(0).into(), 0, told as u64]
}

fn ask_continued(p: &mut Program, pid: Option<u32>) -> Arg {
    let (room, [kind, pid, _, told]) = (p.room(layout::SIGINFO), who_continued(pid).map(Arg::Value));
    p.attempt("waitid", libc::SYS_waitid, [kind, pid, room, told]);
    room
}

/// Whether what `waitid` has put there tells of a child.
fn tells_of_one(outcome: &Outcome, at: Arg) -> bool {
    layout::half(outcome.bytes(at, layout::SIGINFO), 0) == libc::SIGCHLD as u32
}

fn ask_action(p: &mut Program, signal: u32) -> Arg {
    let room = p.room(layout::SIGACTION);
    let args = [u64::from(signal).into(), 0.into(), room, 8.into()];
    p.call(format!("rt_sigaction {signal}"), libc::SYS_rt_sigaction, args);
    room
}

fn ask_timer(p: &mut Program, info: PosixTimerInfo) -> TimerQuery {
    let id = Arg::Value(u64::from(info.id));
    let time = p.room(layout::ITIMERSPEC);
    // May fail: the timer of the CPU clock of a thread that ended.
    let read = p.attempt(format!("timer_gettime {}", info.id), libc::SYS_timer_gettime, [id, time]);
    let overrun = p.attempt(format!("timer_getoverrun {}", info.id), libc::SYS_timer_getoverrun, [id]);
    TimerQuery { info, time, read, overrun }
}

/// The first arguments of `mmap` for a page of which is looked whether it is locked.
pub(crate) fn page_to_lock(at: u64) -> [u64; 4] {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    [at, PAGE, (libc::PROT_READ | libc::PROT_WRITE) as u64, flags]
}

/// A page is mapped, looked at and unmapped. Where a call fails, its result is no address, and the others do nothing.
fn ask_locking(p: &mut Program, at: u64) -> LockQuery {
    let map = page_to_lock(at).map(Arg::Value);
    let map = p.attempt("mmap", libc::SYS_mmap, map);
    let present = p.room(1);
    p.attempt("mincore", libc::SYS_mincore, [map.into(), PAGE.into(), present]);
    let drop = [map.into(), PAGE.into(), (libc::MADV_DONTNEED as u64).into()];
    let drop = p.attempt("madvise MADV_DONTNEED", libc::SYS_madvise, drop);
    p.attempt("munmap", libc::SYS_munmap, [map.into(), PAGE.into()]);
    LockQuery { present, drop, map }
}

/// 0, 1: locked and present (`MCL_FUTURE`), 2: locked once it is touched (`MCL_ONFAULT`).
fn lock_future(query: &LockQuery, outcome: &Outcome) -> u32 {
    // madvise(2): what is locked cannot be dropped.
    let locked = outcome.result(query.drop) == -i64::from(libc::EINVAL);
    let mapped = outcome.result(query.map);
    if mapped == -i64::from(libc::EAGAIN) {
        1 // mmap(2): it would be locked, and more may not be (whether once it is touched does not show)
    } else if mapped < 0 || !locked {
        0 // no mapping more is allowed, let alone a locked one
    } else if outcome.bytes(query.present, 1)[0] & 1 == 0 {
        2
    } else {
        1
    }
}

fn action(signal: u32, outcome: &Outcome, at: Arg) -> SignalAction {
    let raw = outcome.bytes(at, layout::SIGACTION);
    let [handler, flags, restorer, mask] = [0, 1, 2, 3].map(|i| layout::word(raw, i));
    SignalAction { signal, handler, flags, restorer, mask }
}

fn interval_timer(outcome: &Outcome, at: Arg) -> IntervalTimer {
    let raw = outcome.bytes(at, layout::ITIMERVAL);
    let us = |i| layout::word(raw, i).saturating_mul(1_000_000).saturating_add(layout::word(raw, i + 1));
    IntervalTimer { interval_us: us(0), value_us: us(2) }
}

fn posix_timer(
    query: &TimerQuery,
    outcome: &Outcome,
    threads: &[u32],
    described: &[Thread],
    builder: &mut Builder,
) -> Option<PosixTimer> {
    let info = &query.info;
    // Clocks are told as the program named them, threads by the ids that we see.
    let as_told = |(place, tid): (usize, &u32)| described.get(place).map_or(*tid, Thread::own_tid);
    let own: Vec<u32> = threads.iter().enumerate().map(as_told).collect();
    let place = threads.iter().position(|tid| *tid == info.target);
    let target = place.and_then(|place| described.get(place)).map_or(info.target, |thread| thread.tid);
    if let Some(why) = foreign_clock(info.clock, &own) {
        builder.refuse(format!("POSIX timer {}", info.id), why, "");
        return None;
    }
    let raw = outcome.bytes(query.time, layout::ITIMERSPEC);
    let ns = |i| layout::word(raw, i).saturating_mul(1_000_000_000).saturating_add(layout::word(raw, i + 1));
    let read = outcome.result(query.read) == 0;
    Some(PosixTimer {
        id: info.id,
        clock: info.clock,
        notify: match info.notify {
            TimerNotify::Signal => libc::SIGEV_SIGNAL,
            TimerNotify::None => libc::SIGEV_NONE,
            TimerNotify::Thread => libc::SIGEV_THREAD,
        } as u32,
        signal: info.signal,
        value: info.value,
        tid: if info.to_thread { target } else { 0 },
        remaining_ns: if read { ns(2) } else { 0 },
        interval_ns: if read { ns(0) } else { 0 },
        overrun: u32::try_from(outcome.result(query.overrun)).unwrap_or(0),
    })
}

/// Why a timer cannot be made again on its clock, if it cannot.
fn foreign_clock(clock: i32, threads: &[u32]) -> Option<String> {
    if clock == libc::CLOCK_THREAD_CPUTIME_ID && threads.len() > 1 {
        return Some("it is on the CPU clock of one thread, and the kernel does not tell of which".into());
    }
    if clock >= 0 {
        return None;
    }
    // clock_getcpuclockid(3): the id is `!pid << 3 | kind`; type 3 is a clock that is a file (`/dev/ptp0`).
    if clock & 3 == 3 {
        return Some("it is on the clock of a device".into());
    }
    let whose = !(clock >> 3) as u32;
    let known = whose == 0
        || if clock & CPU_CLOCK_OF_THREAD != 0 {
            threads.contains(&whose)
        } else {
            threads.first() == Some(&whose)
        };
    (!known).then(|| format!("it is on the CPU clock of another process or an ended thread ({whose})"))
}

/// What to ask in each thread but the main one.
#[derive(Clone, Debug)]
pub struct ThreadQuery {
    program: Program,
    answers: ThreadAnswers,
}

/// Where in a program the answers about a thread will be.
#[derive(Clone, Copy, Debug)]
struct ThreadAnswers {
    altstack: Arg,
    clear_child_tid: Arg,
    pdeath_signal: Arg,
    tsc: Arg,
    securebits: Step,
    timer_slack: Step,
    hidden: Questions,
}

impl ThreadQuery {
    /// The questions: six calls, and what else may be asked of all of a process's threads.
    pub fn new(hidden: Hidden) -> Self {
        let mut program = Program::new();
        let answers = ThreadAnswers::ask(&mut program, hidden);
        ThreadQuery { program, answers }
    }

    /// The program to run in the thread.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Puts the answers where they belong.
    pub fn decode(&self, outcome: &Outcome, thread: &mut Thread, builder: &mut Builder) {
        self.answers.decode(outcome, thread, builder);
    }
}

impl ThreadAnswers {
    /// Adds the questions to a program.
    fn ask(p: &mut Program, hidden: Hidden) -> Self {
        let altstack = p.room(layout::STACK);
        p.call("sigaltstack", libc::SYS_sigaltstack, [0.into(), altstack]);
        let mut get = |what: &str, option: u32, len| {
            let room = p.room(len);
            p.attempt(what, libc::SYS_prctl, [u64::from(option).into(), room]);
            room
        };
        let clear_child_tid = get("prctl PR_GET_TID_ADDRESS", PR_GET_TID_ADDRESS, 8);
        let pdeath_signal = get("prctl PR_GET_PDEATHSIG", PR_GET_PDEATHSIG, 4);
        let tsc = get("prctl PR_GET_TSC", PR_GET_TSC, 4);
        let args = [u64::from(PR_GET_SECUREBITS).into()];
        let securebits = p.call("prctl PR_GET_SECUREBITS", libc::SYS_prctl, args);
        // /proc tells it to the privileged alone.
        let args = [u64::from(PR_GET_TIMERSLACK).into()];
        let timer_slack = p.call("prctl PR_GET_TIMERSLACK", libc::SYS_prctl, args);
        let hidden = hidden.ask_thread(p);
        ThreadAnswers { altstack, clear_child_tid, pdeath_signal, tsc, securebits, timer_slack, hidden }
    }

    fn decode(&self, outcome: &Outcome, thread: &mut Thread, builder: &mut Builder) {
        self.hidden.decode(outcome, builder, || format!("thread {} ({})", thread.tid, thread.name));
        let stack = outcome.bytes(self.altstack, layout::STACK);
        thread.altstack = AltStack {
            sp: layout::word(stack, 0),
            // "On the stack" is told of the stack pointer that our call ran with.
            flags: layout::half(stack, 2) & !(libc::SS_ONSTACK as u32),
            size: layout::word(stack, 2),
        };
        thread.clear_child_tid = layout::word(outcome.bytes(self.clear_child_tid, 8), 0);
        thread.pdeath_signal = layout::half(outcome.bytes(self.pdeath_signal, 4), 0);
        thread.tsc = layout::half(outcome.bytes(self.tsc, 4), 0);
        thread.creds.securebits = u32::try_from(outcome.result(self.securebits)).unwrap_or(0);
        thread.timer_slack_ns = outcome.result(self.timer_slack) as u64;
    }
}
