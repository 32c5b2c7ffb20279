//! What comes last in each thread: it takes privileges away, or must not be disturbed any more.

use super::credentials;
use super::process::{expires_anew, prctl};
use linux_raw_sys::prctl::{
    PR_SET_DUMPABLE, PR_SET_MDWE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, PR_SET_SECCOMP,
};
use stillpoint_image::{AddressSpace, Bytes, Credentials, PosixTimer, Process, Thread};
use stillpoint_linux::layout;
use stillpoint_linux::program::Program;

pub use super::credentials::verify;

const SECCOMP_SET_MODE_STRICT: u64 = 1;
const SECCOMP_SET_MODE_FILTER: u64 = 1;
const SECCOMP_FILTER_FLAG_TSYNC: u64 = 1;

/// How the end phase is run.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// What the thread's credentials are now ([`credentials::current`]).
    pub now: Credentials,
    /// What they are to be, as they are called where the thread is.
    pub want: Credentials,
    /// Whether the tracer has set `PTRACE_O_SUSPEND_SECCOMP`: filters that are installed do not apply while it lives.
    pub seccomp_suspended: bool,
}

/// The end phase of `process.threads[index]`, to be run in it with all signals blocked; the main thread's (0) after all
/// others.
///
/// 1. `no_new_privs` and, where suspended, seccomp filters: they may need the privileges that the next step gives up.
/// 2. Credentials. 3. Parent-death signal and (main thread) dumpable, which changes of credentials reset.
/// 4. (main thread) `PR_SET_MDWE`, after the last change of executable memory.
/// 5. Pending signals: blocked ones are kept even if they are ignored, and in a process's own name any siginfo will
///    do. 6. Seccomp filters where they apply at once: nothing can be counted on after them. Without suspension they
///    need `no_new_privs` or that the program still has `CAP_SYS_ADMIN`.
///
/// An expiry of a timer (`SI_TIMER`) that was pending is not queued: [`super::process::start_timers`] lets the new timer
/// expire at once instead, so that it counts overruns from there on. (Those before the cut are lost: the kernel adds
/// them up only on delivery.) Others are queued as their bare siginfo.
pub fn program(process: &Process, space: &AddressSpace, index: usize, conditions: &Conditions) -> Program {
    let mut p = Program::new();
    let Some(thread) = process.threads.get(index) else { return p };
    let leader = index == 0;
    if thread.no_new_privs {
        prctl(&mut p, "PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, [1.into()]);
    }
    if conditions.seccomp_suspended {
        seccomp(&mut p, process, thread, leader);
    }
    credentials::program(&mut p, &conditions.now, &conditions.want);
    prctl(&mut p, "PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, [u64::from(thread.pdeath_signal).into()]);
    if leader {
        // 2 can only come about by itself; 0 lets nobody more near.
        let dumpable = u64::from(space.dumpable == 1);
        prctl(&mut p, "PR_SET_DUMPABLE", PR_SET_DUMPABLE, [dumpable.into()]);
        if space.mdwe != 0 {
            prctl(&mut p, "PR_SET_MDWE", PR_SET_MDWE, [u64::from(space.mdwe).into()]);
        }
        queue(&mut p, process, &process.pending, None);
    }
    queue(&mut p, process, &thread.pending, Some(thread.own_tid()));
    if !conditions.seccomp_suspended {
        seccomp(&mut p, process, thread, leader);
    }
    if thread.seccomp_strict {
        prctl(&mut p, "PR_SET_SECCOMP", PR_SET_SECCOMP, [SECCOMP_SET_MODE_STRICT.into()]);
    }
    p
}

/// Filters, oldest first. Where all threads have the same ones, the main thread installs them in all: they are then
/// one chain, as they were, and the program may add to them for all its threads later (`TSYNC` refuses threads that
/// went separate ways).
fn seccomp(p: &mut Program, process: &Process, thread: &Thread, leader: bool) {
    let same = |t: &Thread| t.seccomp == thread.seccomp && t.no_new_privs == thread.no_new_privs;
    let common = process.threads.len() > 1 && process.threads.iter().all(same);
    if common && !leader {
        return;
    }
    for filter in &thread.seccomp {
        let code = p.data(&filter.program.0);
        let mut head = (filter.program.0.len() as u64 / 8).to_le_bytes().to_vec();
        head.extend([0; 8]);
        let head = p.data(&head);
        p.link(head, 8, code);
        let flags = filter.flags | if common { SECCOMP_FILTER_FLAG_TSYNC } else { 0 };
        let args = [SECCOMP_SET_MODE_FILTER.into(), flags.into(), head];
        p.call("seccomp (install a filter)", libc::SYS_seccomp, args);
    }
}

/// Queues signals to the process (only its main thread may, with any siginfo) or to the running thread.
fn queue(p: &mut Program, process: &Process, pending: &[Bytes], tid: Option<u32>) {
    let (pid, timers) = (process.own_pid(), &process.timers);
    for info in pending {
        let signal = layout::half(&info.0, 0);
        if is_late(process, signal) || timers.iter().any(|t| expires_anew(t) && is_expiry_of(t, info)) {
            continue;
        }
        let mut info = info.0.clone();
        info.resize(layout::SIGINFO, 0);
        if layout::expiry(&info).is_some() {
            // `si_sys_private`, the kernel's own mark of the timer that sent it, which is no more.
            info[32..36].fill(0);
        }
        let info = p.data(&info);
        let [pid, signal] = [pid, signal].map(|n| u64::from(n).into());
        match tid {
            Some(tid) => {
                let args = [pid, u64::from(tid).into(), signal, info];
                p.call("rt_tgsigqueueinfo", libc::SYS_rt_tgsigqueueinfo, args);
            }
            None => {
                p.call("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, [pid, signal, info]);
            }
        }
    }
}

/// Whether a siginfo tells that this timer expired.
pub(super) fn is_expiry_of(timer: &PosixTimer, info: &Bytes) -> bool {
    layout::expiry(&info.0) == Some((timer.signal, timer.id))
}

/// Signals that cannot be blocked while programs run in the process: `SIGKILL`, `SIGSTOP`, and `SIGTRAP`, which ends
/// each program; and those that a stop, or its end, takes away, where the process is to be stopped and told to go on
/// ([`crate::job_control`]).
fn is_late(process: &Process, signal: u32) -> bool {
    match signal as i32 {
        libc::SIGKILL | libc::SIGSTOP | libc::SIGTRAP => true,
        libc::SIGCONT | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => process.continued,
        _ => false,
    }
}

/// Pending signals that [`program`] leaves out, to be sent from outside when the threads have their own signal masks:
/// the thread (`None`: the process) and the signal. Their siginfo is that of a signal from us.
pub fn late_signals(process: &Process) -> Vec<(Option<u32>, u32)> {
    let late = |pending: &[Bytes], tid| {
        let signals = pending.iter().map(|info| layout::half(&info.0, 0));
        signals.filter(|&s| is_late(process, s)).map(|s| (tid, s)).collect::<Vec<_>>()
    };
    let mut all = late(&process.pending, None);
    for thread in &process.threads {
        all.extend(late(&thread.pending, Some(thread.tid)));
    }
    all
}
