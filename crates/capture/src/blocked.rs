//! System calls that the freeze interrupts.
//!
//! Most start again by themselves. Two kinds need care:
//!
//! * Calls with a relative timeout (`nanosleep`, `poll`, `futex`) go on through `restart_syscall`, and only this
//!   kernel task knows how much time is left. The program itself is not affected; for the image the remaining time
//!   is found out: where the call reports it, from there, else from the time at which the thread went to sleep.
//! * Some calls fail with `EINTR` when a thread is stopped, even without a signal handler (`signal(7)`). Those that
//!   would have waited for ever are made again, so that the program never learns of the stop. Those with a timeout
//!   return `EINTR` as they do after any stop: the kernel does not tell the time that is left, and the registers of
//!   the program are not ours to change.

use std::borrow::Borrow;
use std::collections::HashMap;
use stillpoint_image::BlockedCall;
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::{Interrupted, Regs};
use stillpoint_linux::layout;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::{CurrentCall, Proc};
use stillpoint_linux::sched::Pinned;
use stillpoint_linux::sched::counts_work;

/// What a thread was waiting for before it was stopped.
#[derive(Clone, Debug, Default)]
pub struct Waiting {
    /// The call that it was in; none if that was `restart_syscall`, which goes on with another one.
    call: Option<u64>,
    /// Kernel function it slept in, where only that tells the call.
    wchan: String,
    /// When it had gone to sleep (`CLOCK_MONOTONIC`), nanoseconds.
    since_ns: Option<u64>,
}

/// The calls that an earlier stop of the same process found interrupted.
#[derive(Clone, Debug, Default)]
pub struct Earlier {
    /// When that was, on the process's own monotonic clock, nanoseconds.
    pub at_ns: i64,
    /// By thread, as the process itself numbers them.
    pub calls: HashMap<u32, BlockedCall>,
}

impl Earlier {
    /// So much may be wrong with what was told of a call, nanoseconds: of one that goes on some time was left.
    const ERROR: u64 = 20_000_000;

    /// The calls with the time that is left at `now_ns`; not known of those that would be over since long: others have been made then.
    pub fn calls_at(&self, now_ns: i64) -> HashMap<u32, BlockedCall> {
        let since = now_ns.saturating_sub(self.at_ns).max(0) as u64;
        let left = |left: u64| (left + Self::ERROR >= since).then_some(left.saturating_sub(since));
        let later = |call: &BlockedCall| call.remaining_ns.and_then(left);
        self.calls.iter().map(|(&tid, c)| (tid, BlockedCall { remaining_ns: later(c), ..*c })).collect()
    }
}

/// What the scheduler's clocks of processors have said, beside ours.
#[derive(Debug, Default)]
pub struct Clocks(HashMap<u32, (u64, Option<u64>)>);

impl Clocks {
    /// What is said is of use for so long, nanoseconds: then the machine may have taken the processor away for a moment.
    const FRESH: u64 = 20_000_000;

    /// Time on our clock and on that of a processor, at some moment not long ago.
    fn of(&mut self, processor: u32) -> (u64, Option<u64>) {
        let is_fresh = |(at, _): &&(u64, _)| monotonic_ns().saturating_sub(*at) < Self::FRESH;
        if let Some(known) = self.0.get(&processor).filter(is_fresh) {
            return *known;
        }
        // Each processor has a scheduler's clock of its own, which stands still while the machine takes the processor away.
        let there = Pinned::to(processor);
        let both = now_on_both_clocks();
        drop(there);
        self.0.insert(processor, both);
        both
    }
}

/// Files of a thread that [`observe`] reads, to be kept open ([`Proc::keep_open`]).
pub const FILES: [&str; 4] = ["syscall", "stat", "sched", "wchan"];

/// Looks at running threads, what those are waiting for whose calls go on with the time that is left; called shortly before the
/// freeze.
pub fn observe<T: Borrow<Proc>>(
    threads: impl Iterator<Item = (u32, T)>,
    clocks: &mut Clocks,
) -> HashMap<u32, Waiting> {
    threads.filter_map(|(tid, thread)| Some((tid, observe_thread(thread.borrow(), clocks)?))).collect()
}

fn observe_thread(thread: &Proc, clocks: &mut Clocks) -> Option<Waiting> {
    let call = match thread.syscall() {
        Ok(CurrentCall::Inside { nr, args, .. }) if has_restart_block(nr, &args) => nr,
        _ => return None,
    };
    let call = Some(call).filter(|call| *call as i64 != libc::SYS_restart_syscall);
    let (now_ns, scheduler_ns) = clocks.of(thread.stat().map_or(0, |s| s.processor));
    // It may have gone to sleep since: the difference has a sign.
    let on_ours = |t: u64| Some(now_ns.wrapping_add(t.wrapping_sub(scheduler_ns?)));
    let since_ns = exec_start_ns(thread).and_then(on_ours);
    let mut wchan = String::new();
    if call.is_none() {
        wchan = String::from_utf8(thread.wchan().unwrap_or_default()).unwrap_or_default();
    }
    Some(Waiting { call, wchan, since_ns })
}

fn exec_start_ns(thread: &Proc) -> Option<u64> {
    Some(thread.sched().ok()??.exec_start_ns)
}

fn has_restart_block(nr: u64, args: &[u64; 6]) -> bool {
    match nr as i64 {
        // Without a timeout it begins anew.
        libc::SYS_futex => args[3] != 0,
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_poll | libc::SYS_restart_syscall => true,
        _ => false,
    }
}

/// Time now on the monotonic clock and on the scheduler's. On a busy machine we may lose the processor between the
/// looks at the two: the closest pair of a few is taken.
fn now_on_both_clocks() -> (u64, Option<u64>) {
    const CLOSE: u64 = 2_000_000; // nanoseconds
    let pair = || {
        let before = monotonic_ns();
        let scheduler = scheduler_now_ns();
        let after = monotonic_ns();
        (after - before, (after, scheduler))
    };
    let mut best = pair();
    for _ in 0..8 {
        if best.0 < CLOSE {
            break;
        }
        let next = pair();
        best = if next.0 < best.0 { next } else { best };
    }
    best.1
}

/// Time now on the clock of `se.exec_start`, the scheduler's: when this thread last went on a CPU, which is now.
fn scheduler_now_ns() -> Option<u64> {
    std::thread::yield_now();
    let id = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    exec_start_ns(&Proc::thread(std::process::id(), id).ok()?)
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The call that a stopped thread will go on with through `restart_syscall`.
///
/// `earlier` is what an earlier checkpoint of the same thread found, as time left now: a call that was already
/// restarted once no longer tells when it first began. `stopped_ns` is when it was stopped (our `CLOCK_MONOTONIC`), the
/// moment for which the time that is left is told.
pub fn interrupted_call(
    memory: &Memory,
    regs: &Regs,
    waiting: &Waiting,
    earlier: Option<BlockedCall>,
    stopped_ns: u64,
) -> Option<BlockedCall> {
    if regs.interrupted() != Interrupted::RestartBlock {
        return None;
    }
    let args = regs.call_args();
    let restarted = regs.orig_rax as i64 == libc::SYS_restart_syscall;
    let nr = if restarted { first_call(waiting, args).or(earlier.map(|e| e.nr))? } else { regs.orig_rax };
    let remaining_ns = match reported(memory, nr, args) {
        Some(left) => Some(left),
        None if restarted => earlier.filter(|e| e.nr == nr).and_then(|e| e.remaining_ns),
        None => {
            requested(memory, nr, args).zip(waited(waiting, stopped_ns)).map(|(r, w)| r.saturating_sub(w))
        }
    };
    Some(BlockedCall { nr, remaining_ns })
}

/// Which call a thread in `restart_syscall` had made, by where it slept and by its arguments. Of one that had not yet come to
/// sleep again when it was looked at, as right after another stop, only that other stop can tell.
fn first_call(waiting: &Waiting, args: [u64; 6]) -> Option<u64> {
    let nr = match waiting.wchan.as_str() {
        // It has been interrupted since by somebody else.
        "" => return waiting.call,
        w if w.contains("poll") => libc::SYS_poll,
        w if w.contains("futex") => libc::SYS_futex,
        // All others sleep, in functions that the kernel does not name because they belong to its scheduler. The
        // first argument of one is a clock: a small number, or a negative one made of a process id; of the other a pointer.
        _ => {
            const MOST_NEGATIVE: i32 = -(1 << 26); // process ids are less than 2^22, and take 3 bits more
            let is_int = [args[0] as i32 as i64 as u64, u64::from(args[0] as u32)].contains(&args[0]);
            let is_clock = is_int && (MOST_NEGATIVE..4096).contains(&(args[0] as i32));
            if is_clock { libc::SYS_clock_nanosleep } else { libc::SYS_nanosleep }
        }
    };
    Some(nr as u64)
}

/// The time left as the call itself reports it to the program.
fn reported(memory: &Memory, nr: u64, args: [u64; 6]) -> Option<u64> {
    let at = match nr as i64 {
        libc::SYS_nanosleep => args[1],
        libc::SYS_clock_nanosleep => args[3],
        _ => 0,
    };
    (at != 0).then(|| timespec(memory, at)).flatten()
}

/// The timeout the program asked for, if it is relative.
fn requested(memory: &Memory, nr: u64, args: [u64; 6]) -> Option<u64> {
    const FUTEX_WAIT: u64 = 0;
    match nr as i64 {
        libc::SYS_nanosleep => timespec(memory, args[0]),
        // Of the time that somebody works, another clock does not tell how much has passed.
        libc::SYS_clock_nanosleep if counts_work(args[0] as i32) => None,
        libc::SYS_clock_nanosleep => timespec(memory, args[2]),
        // Milliseconds; negative: for ever.
        libc::SYS_poll => Some(u64::try_from(args[2] as i32).ok()? * 1_000_000),
        // Every other operation takes a point in time, so starting over is right.
        libc::SYS_futex if args[1] & 0x7f == FUTEX_WAIT => timespec(memory, args[3]),
        _ => None,
    }
}

fn timespec(memory: &Memory, at: u64) -> Option<u64> {
    let mut bytes = [0; layout::TIMESPEC];
    memory.read(RemoteAddr(at), &mut bytes).ok()?;
    layout::word(&bytes, 0).checked_mul(1_000_000_000)?.checked_add(layout::word(&bytes, 1))
}

fn waited(waiting: &Waiting, stopped_ns: u64) -> Option<u64> {
    Some(stopped_ns.saturating_sub(waiting.since_ns?))
}

/// The registers with which a thread should go on: a call without a timeout that the stop made fail is made again.
/// `deliverable` tells whether a signal is about to be delivered, which is then the reason of the failure.
pub fn unbroken(regs: &Regs, deliverable: bool) -> Regs {
    let failed = regs.rax as i64 == -i64::from(libc::EINTR);
    if failed && !deliverable && waits_for_ever(regs) { regs.repeat_call() } else { *regs }
}

fn waits_for_ever(regs: &Regs) -> bool {
    fails_when_stopped(regs.orig_rax as i64, &regs.call_args()) == Some(Wait::ForEver)
}

/// How long a call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    ForEver,
    ForATime,
}

/// How long a call waits that fails with `EINTR` when a thread is stopped in it; none of other calls.
fn fails_when_stopped(nr: i64, args: &[u64; 6]) -> Option<Wait> {
    let for_ever = match nr {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => (args[3] as i32) < 0,
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => args[3] == 0,
        libc::SYS_rt_sigtimedwait => args[2] == 0,
        libc::SYS_semop => true,
        libc::SYS_io_getevents | libc::SYS_io_uring_enter => false,
        _ => return None,
    };
    Some(if for_ever { Wait::ForEver } else { Wait::ForATime })
}

/// Whether a stop of this process would be noticed now: a thread waits in a call that would fail.
pub fn would_be_noticed(process: &Proc) -> bool {
    let fails = |tid: u32| match process.sibling(tid).and_then(|thread| thread.syscall()) {
        Ok(CurrentCall::Inside { nr, args, .. }) => {
            fails_when_stopped(nr as i64, &args) == Some(Wait::ForATime)
        }
        _ => false,
    };
    process.threads().is_ok_and(|threads| threads.into_iter().any(fails))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(nr: i64, result: i64, timeout: u64) -> Regs {
        Regs { orig_rax: nr as u64, rax: result as u64, r10: timeout, rip: 1000, ..Regs::default() }
    }

    #[test]
    fn only_endless_waits_are_made_again() {
        let eintr = -i64::from(libc::EINTR);
        let again = unbroken(&after(libc::SYS_epoll_wait, eintr, u64::MAX), false);
        assert_eq!((again.rip, again.rax), (998, libc::SYS_epoll_wait as u64));
        for kept in [
            after(libc::SYS_epoll_wait, eintr, 1000),
            after(libc::SYS_epoll_wait, 3, u64::MAX),
            after(libc::SYS_read, eintr, 0),
        ] {
            assert_eq!(unbroken(&kept, false), kept);
        }
        let signalled = after(libc::SYS_epoll_wait, eintr, u64::MAX);
        assert_eq!(unbroken(&signalled, true), signalled);
    }

    /// Of a call that goes on some time was left, whatever was told before.
    #[test]
    fn a_call_that_should_be_over_ends_at_once() {
        let call = |left: u64| BlockedCall { nr: libc::SYS_nanosleep as u64, remaining_ns: Some(left) };
        let earlier = Earlier { at_ns: 1_000, calls: [(1, call(50_000_000))].into() };
        let left = |now_ns: i64| earlier.calls_at(now_ns)[&1].remaining_ns;
        assert_eq!(left(20_001_000), Some(30_000_000));
        assert_eq!(left(60_001_000), Some(0), "what was told is not that exact");
        assert_eq!(left(600_001_000), None, "it is another one by now");
    }

    /// One that was stopped again before it had come to sleep is known by the stop before.
    #[test]
    fn a_call_is_the_one_that_an_earlier_stop_found() {
        let memory = Memory::open(std::process::id()).expect("memory");
        let regs = after(libc::SYS_restart_syscall, -516, 0);
        let earlier = BlockedCall { nr: libc::SYS_futex as u64, remaining_ns: Some(7) };
        let found = |earlier| interrupted_call(&memory, &regs, &Waiting::default(), earlier, 0);
        assert_eq!(found(Some(earlier)), Some(earlier));
        assert_eq!(found(None), None);
        let slept = Waiting { wchan: "do_sys_poll".into(), ..Waiting::default() };
        let polls = interrupted_call(&memory, &regs, &slept, Some(earlier), 0);
        assert_eq!(polls, Some(BlockedCall { nr: libc::SYS_poll as u64, remaining_ns: None }));
    }
}
