//! The process as a whole: programs for its main thread.

use super::last::is_expiry_of;
use crate::{Error, Result};
use linux_raw_sys::prctl::{
    PR_SET_CHILD_SUBREAPER, PR_SET_MEMORY_MERGE, PR_SET_MM, PR_SET_MM_MAP, PR_SET_THP_DISABLE,
    PR_TIMER_CREATE_RESTORE_IDS, PR_TIMER_CREATE_RESTORE_IDS_OFF, PR_TIMER_CREATE_RESTORE_IDS_ON,
};
use std::collections::HashMap;
use stillpoint_image::{AddressSpace, Layout, PosixTimer, Process};
use stillpoint_linux::program::{Arg, Outcome, Program};
use stillpoint_linux::sched::counts_work;
use stillpoint_linux::{features, layout as kernel};

const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
/// Without [`PR_TIMER_CREATE_RESTORE_IDS`] a timer's id is reached by making and deleting all before it.
const MOST_TIMER_STEPS: u32 = 10_000;

/// Whether there may be huge pages ([`AddressSpace::thp_disable`]).
pub fn huge_pages(disable: u32) -> Program {
    let mut p = Program::new();
    let (disable, flags) = (u64::from(disable & 1), u64::from(disable & !1));
    prctl(&mut p, "PR_SET_THP_DISABLE", PR_SET_THP_DISABLE, [disable.into(), flags.into()]);
    p
}

/// What comes before memory is built: states of the
/// address space that new mappings inherit and that the memory's own states then override; leave to use large
/// registers, without which [`stillpoint_image::Thread::xstate`] cannot be set.
pub fn early(process: &Process, space: &AddressSpace) -> Program {
    let mut p = Program::new();
    if space.memory_merge {
        prctl(&mut p, "PR_SET_MEMORY_MERGE", PR_SET_MEMORY_MERGE, [1.into()]);
    }
    // Only these features are not everybody's from the start.
    let on_demand = process.xfeatures & 1 << 18;
    for bit in (0..64u64).filter(|bit| on_demand & 1 << bit != 0) {
        let what = format!("use register set {bit} of the extended state");
        p.call(what, libc::SYS_arch_prctl, [ARCH_REQ_XCOMP_PERM.into(), bit.into()]);
    }
    p
}

/// The addresses that the kernel keeps about the program (`/proc/PID/cmdline`, `environ`, `auxv`, `exe`, brk), once the
/// mappings they point to exist and the old executable is mapped no more. `exe_fd` is the executable's descriptor
/// inside the process; `None` leaves the link as it is. Needs `CAP_CHECKPOINT_RESTORE`. prctl(2), `PR_SET_MM_MAP`
pub fn layout(space: &AddressSpace, exe_fd: Option<u32>) -> Program {
    set_layout(space.layout, &space.auxv.0, exe_fd)
}

/// The same while its memory is built, without command line and environment: where ours were there is nothing any more, or
/// room for a stack to grow, as it would for whoever reads `/proc/PID/cmdline` or `environ` (`__access_remote_vm` in the kernel).
pub fn wordless_layout(space: &AddressSpace) -> Program {
    let l = space.layout;
    set_layout(Layout { arg_end: l.arg_start, env_end: l.env_start, ..l }, &[], None)
}

fn set_layout(l: Layout, auxv: &[u8], exe_fd: Option<u32>) -> Program {
    let mut p = Program::new();
    let mut map = kernel::words(&[
        l.start_code,
        l.end_code,
        l.start_data,
        l.end_data,
        l.start_brk,
        l.brk,
        l.start_stack,
        l.arg_start,
        l.arg_end,
        l.env_start,
        l.env_end,
        0, // the auxiliary vector's address: linked below
    ]);
    map.extend((auxv.len() as u32).to_le_bytes());
    map.extend(exe_fd.unwrap_or(u32::MAX).to_le_bytes());
    let data = p.data(auxv);
    let map = p.data(&map);
    if !auxv.is_empty() {
        p.link(map, kernel::MM_MAP as u32 - 16, data);
    }
    let args = [u64::from(PR_SET_MM_MAP).into(), map, (kernel::MM_MAP as u64).into()];
    prctl(&mut p, "PR_SET_MM_MAP", PR_SET_MM, args);
    p
}

/// Signal actions, umask, child reaping, memory barriers. Actions come before pending signals: setting one to "ignore"
/// drops what is pending.
pub fn settled(process: &Process, space: &AddressSpace) -> Program {
    let mut p = Program::new();
    p.call("umask", libc::SYS_umask, [u64::from(process.umask).into()]);
    let reap = u64::from(process.child_subreaper);
    prctl(&mut p, "PR_SET_CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, [reap.into()]);
    // Every one: the process starts with what we ourselves ignore.
    let default = p.room(kernel::SIGACTION);
    for signal in (1..=64u32).filter(|&s| s != libc::SIGKILL as u32 && s != libc::SIGSTOP as u32) {
        let data = match process.actions.iter().find(|a| a.signal == signal) {
            Some(a) => p.data(&kernel::words(&[a.handler, a.flags, a.restorer, a.mask])),
            None => default,
        };
        let args = [u64::from(signal).into(), data, 0.into(), 8.into()];
        p.call(format!("rt_sigaction {signal}"), libc::SYS_rt_sigaction, args);
    }
    for bit in (0..32).filter(|bit| space.membarrier & 1 << bit != 0) {
        let what = format!("register for memory barriers of kind {bit}");
        p.call(what, libc::SYS_membarrier, [(1u64 << bit).into()]);
    }
    p
}

/// POSIX timers with their ids, disarmed. The threads they notify must exist.
#[derive(Debug)]
pub struct Timers {
    program: Program,
    made: Vec<(u32, Arg)>,
}

impl Timers {
    /// Plans the timers of a process.
    ///
    /// # Errors
    /// [`Error::Failed`] if this kernel cannot give a timer its id in a reasonable number of steps.
    pub fn new(process: &Process) -> Result<Self> {
        let mut this = Timers { program: Program::new(), made: Vec::new() };
        let mut timers: Vec<&PosixTimer> = process.timers.iter().collect();
        timers.sort_by_key(|t| t.id);
        if timers.is_empty() {
            return Ok(this);
        }
        if features::timer_ids() {
            this.switch_ids(PR_TIMER_CREATE_RESTORE_IDS_ON);
            timers.iter().for_each(|t| this.make(t, process));
            this.switch_ids(PR_TIMER_CREATE_RESTORE_IDS_OFF);
        } else {
            this.count_up(&timers, process)?;
        }
        Ok(this)
    }

    fn switch_ids(&mut self, to: u32) {
        let what = "PR_TIMER_CREATE_RESTORE_IDS";
        prctl(&mut self.program, what, PR_TIMER_CREATE_RESTORE_IDS, [u64::from(to).into()]);
    }

    /// Before 6.15 a new process counts its timers' ids up from 0, whether they were deleted or not.
    fn count_up(&mut self, timers: &[&PosixTimer], process: &Process) -> Result<()> {
        let last = timers.last().map_or(0, |t| t.id);
        if last > MOST_TIMER_STEPS {
            return Err(Error::Failed(format!(
                "POSIX timer {last}: only Linux 6.15 and later can give a timer so high an id"
            )));
        }
        let mut next = 0;
        for timer in timers {
            while next < timer.id {
                let filler =
                    PosixTimer { id: next, clock: libc::CLOCK_MONOTONIC, notify: 1, ..Default::default() };
                self.make(&filler, process);
                let args = [u64::from(next).into()];
                self.program.call(format!("timer_delete {next}"), libc::SYS_timer_delete, args);
                next += 1;
            }
            self.make(timer, process);
            next += 1;
        }
        Ok(())
    }

    fn make(&mut self, timer: &PosixTimer, process: &Process) {
        let p = &mut self.program;
        // A timer whose thread has ended notifies nobody, but its id stays taken.
        let thread = process.threads.iter().find(|t| t.tid == timer.tid);
        let (notify, tid) = match (timer.tid, thread) {
            (0, _) => (timer.notify, 0),
            (_, None) => (libc::SIGEV_NONE as u32, 0),
            (_, Some(thread)) => (timer.notify | libc::SIGEV_THREAD_ID as u32, thread.own_tid()),
        };
        let mut event = vec![0; kernel::SIGEVENT];
        event[..8].copy_from_slice(&timer.value.to_le_bytes());
        event[8..12].copy_from_slice(&timer.signal.to_le_bytes());
        event[12..16].copy_from_slice(&notify.to_le_bytes());
        event[16..20].copy_from_slice(&tid.to_le_bytes());
        let (event, id) = (p.data(&event), p.data(&timer.id.to_le_bytes()));
        // CPU clocks are negative and name their process or thread, which has its old id.
        let args = [(timer.clock as i64 as u64).into(), event, id];
        p.call(format!("timer_create {} on clock {}", timer.id, timer.clock), libc::SYS_timer_create, args);
        self.made.push((timer.id, id));
    }

    /// The program to run in the main thread.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Checks that the kernel gave the ids that were asked for.
    ///
    /// # Errors
    /// [`Error::Failed`] if it did not.
    pub fn check(&self, outcome: &Outcome) -> Result<()> {
        for &(wanted, at) in &self.made {
            let got = kernel::half(outcome.bytes(at, 4), 0);
            if got != wanted {
                return Err(Error::Failed(format!("POSIX timer {wanted}: the kernel gave it the id {got}")));
            }
        }
        Ok(())
    }
}

/// Starts interval timers and POSIX timers with the time they had left. As late as can be: they run from here on. `run` runs
/// programs in the main thread.
///
/// # Errors
/// Those of `run`.
pub fn start_timers<E>(
    process: &Process,
    mut run: impl FnMut(&Program) -> std::result::Result<Outcome, E>,
) -> std::result::Result<(), E> {
    let (ask, clocks) = clocks(process);
    let mut now = HashMap::new();
    if !ask.is_empty() {
        let told = run(&ask)?;
        now.extend(clocks.iter().map(|&(clock, at)| {
            let bytes = told.bytes(at, kernel::TIMESPEC);
            (clock, kernel::word(bytes, 0) * NS + kernel::word(bytes, 1))
        }));
    }
    let arm = arm(process, &now);
    if !arm.is_empty() {
        run(&arm)?;
    }
    Ok(())
}

/// Nanoseconds in a second.
const NS: u64 = 1_000_000_000;

/// Asks for the time of all clocks of which a periodic timer has an expiry pending.
fn clocks(process: &Process) -> (Program, Vec<(i32, Arg)>) {
    let (mut p, mut clocks) = (Program::new(), Vec::<(i32, Arg)>::new());
    for timer in process.timers.iter().filter(|t| t.interval_ns != 0 && expires_at_once(process, t)) {
        if !counts_work(timer.clock) && clocks.iter().all(|(c, _)| *c != timer.clock) {
            let time = p.room(kernel::TIMESPEC);
            let args = [(timer.clock as u64).into(), time];
            p.call(format!("clock_gettime {}", timer.clock), libc::SYS_clock_gettime, args);
            clocks.push((timer.clock, time));
        }
    }
    (p, clocks)
}

fn arm(process: &Process, now: &HashMap<i32, u64>) -> Program {
    let mut p = Program::new();
    let alarm_is_pending =
        process.pending.iter().any(|info| kernel::half(&info.0, 0) == libc::SIGALRM as u32);
    for (which, t) in process.itimers.iter().enumerate() {
        let interval = t.interval_us;
        let value = match t.value_us {
            // The real one stands still from its expiry on until its signal is taken, which only one that has expired goes on with.
            // Its second signal is the one that waits.
            0 if which as i32 == libc::ITIMER_REAL && interval != 0 && alarm_is_pending => 1,
            0 => continue,
            left => left,
        };
        let [vs, vu, is, iu] =
            [value / 1_000_000, value % 1_000_000, interval / 1_000_000, interval % 1_000_000];
        let data = p.data(&kernel::words(&[is, iu, vs, vu]));
        p.call(format!("setitimer {which}"), libc::SYS_setitimer, [(which as u64).into(), data]);
    }
    for t in &process.timers {
        let (flags, first) = match expires_at_once(process, t) {
            true => now.get(&t.clock).map_or((0, 1), |&now| (libc::TIMER_ABSTIME, expired(t, now))),
            false if t.remaining_ns == 0 => continue,
            false => (0, t.remaining_ns),
        };
        let words = [t.interval_ns / NS, t.interval_ns % NS, first / NS, first % NS];
        let data = p.data(&kernel::words(&words));
        let args = [u64::from(t.id).into(), (flags as u64).into(), data];
        p.call(format!("timer_settime {}", t.id), libc::SYS_timer_settime, args);
    }
    p
}

/// When a periodic timer last expired, by its clock: from then on the kernel counts, once that expiry is taken.
fn expired(timer: &PosixTimer, now: u64) -> u64 {
    (now + timer.remaining_ns).saturating_sub(timer.interval_ns).max(1)
}

/// Whether a timer has an expiry pending that is let come anew.
fn expires_at_once(process: &Process, timer: &PosixTimer) -> bool {
    let mut pending = process.pending.iter().chain(process.threads.iter().flat_map(|t| &t.pending));
    expires_anew(timer) && pending.any(|info| is_expiry_of(timer, info))
}

/// Whether an expiry that is pending is the new timer's own, which is let expire at once: the kernel takes it back when the
/// timer is set anew or deleted, and counts overruns and the time to the next from there on. Not if the timer has been set anew since
/// (before Linux 6.13 the old expiry stays), nor where time passes only as the program works.
pub(super) fn expires_anew(timer: &PosixTimer) -> bool {
    match timer.remaining_ns {
        0 => !counts_work(timer.clock),
        _ => timer.interval_ns != 0,
    }
}

/// A prctl(2) that must succeed.
pub(super) fn prctl<const N: usize>(p: &mut Program, name: &str, option: u32, args: [Arg; N]) {
    let mut all = [Arg::Value(0); 5];
    all[0] = u64::from(option).into();
    all[1..=N].copy_from_slice(&args);
    p.call(format!("prctl {name}"), libc::SYS_prctl, all);
}
