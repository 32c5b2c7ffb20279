//! What threads and the process have told the kernel about themselves, as it was.

use crate::still::place;
use crate::{Error, Result};
use rustix::fs::AtFlags;
use std::collections::HashMap;
use stillpoint_capture::Refusal;
use stillpoint_image::{AddressSpace, Bytes, Image, IntervalTimer, Process, Rlimit, Thread};
use stillpoint_linux::layout;
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::remote::{FAULTS, Remote};
use stillpoint_restore::attributes::{
    credentials, last, outside, process as of_process, thread as of_thread,
};

/// Limits that may be lifted while a process goes back, for which it takes some memory.
pub const IN_THE_WAY: [u32; 3] = [libc::RLIMIT_AS, libc::RLIMIT_DATA, libc::RLIMIT_MEMLOCK];

/// What has changed since and cannot be changed back.
pub fn refused(
    then: (&Process, &AddressSpace),
    now: (&Process, &AddressSpace),
    image: (&Image, &Image),
) -> Vec<Refusal> {
    let mut all = Vec::new();
    let mut refuse = |what: String, why: &str| {
        all.push(Refusal { what, why: why.into(), hint: String::new() });
    };
    let ((then, space), (now, space_now)) = (then, now);
    let leader = now.threads.first();
    for thread in &then.threads {
        // One that has ended is made by the main thread, and begins as that is.
        let same = now.threads.iter().find(|t| t.tid == thread.tid).or(leader);
        let Some(same) = same else { continue };
        let who = || format!("thread {} ({})", thread.tid, thread.name);
        if thread.creds != same.creds {
            refuse(who(), "its credentials have changed since");
        }
        let confined = |t: &Thread| (t.seccomp.len(), t.seccomp_strict, t.no_new_privs);
        if confined(thread) != confined(same) {
            refuse(who(), "it has been confined since (seccomp, no_new_privs)");
        }
        // Not all of them can be taken back.
        if thread.choices != same.choices {
            refuse(
                who(),
                "it has chosen otherwise since what becomes of failures of memory, speculation or I/O (prctl)",
            );
        }
        if same.tid == thread.tid && same.rseq != thread.rseq {
            refuse(
                who(),
                "it has registered other restartable sequences since, or is another one with the same id",
            );
        }
        if thread.directories.is_some() || same.directories.is_some() {
            refuse(who(), "it has directories of its own (unshare)");
        }
    }
    let kept =
        |s: &AddressSpace| (s.personality, s.mdwe, s.dumpable, s.thp_disable, s.memory_merge, s.lock_future);
    if kept(space) != kept(space_now) {
        refuse(
            "the process".into(),
            "it has changed since how the kernel treats its memory (prctl, mlockall)",
        );
    }
    if place(image.0, then.root) != place(image.1, now.root) {
        refuse("the process".into(), "it has another root directory now (chroot)");
    }
    if then.stopped.is_some() || now.stopped.is_some() {
        refuse("the process".into(), "job control has stopped it (let it go on: kill -CONT)");
    }
    if now.threads.iter().any(|t| t.seccomp_strict) {
        refuse("the process".into(), "it is in strict seccomp mode, and can make no calls");
    }
    if kinds(then) != kinds(now) && !stillpoint_linux::features::timer_ids() {
        refuse(
            "POSIX timers".into(),
            "they are others now, and this kernel cannot give them their ids (Linux 6.15 can)",
        );
    }
    all
}

/// Gives threads, and the process, what they had. `made`: ids of threads that were made just now.
pub fn put_back(
    threads: &mut [Remote<'_>],
    then: (&Process, &AddressSpace),
    now: (&Process, &AddressSpace),
    made: &[u32],
    undone: &Undone<'_>,
) -> Result<()> {
    let ((process, space), (now, space_now)) = (then, now);
    let before: HashMap<u32, &Thread> = now.threads.iter().map(|t| (t.tid, t)).collect();
    for (remote, thread) in threads.iter_mut().zip(&process.threads) {
        let was = before.get(&thread.tid);
        if was.is_none_or(|was| told(was) != told(thread)) {
            // Its restartable sequences are registered with the kernel as long as it lives.
            let rseq = thread.rseq.filter(|_| made.contains(&thread.tid));
            remote.run(&of_thread::thread(&Thread { rseq, choices: Vec::new(), ..thread.clone() }, space))?;
        }
        if was.is_none_or(|was| (&was.sched, was.ioprio) != (&thread.sched, thread.ioprio)) {
            outside::thread(remote.tid(), thread)?;
        }
    }
    let leader = &mut threads[0];
    if process.actions != now.actions
        || process.umask != now.umask
        || process.child_subreaper != now.child_subreaper
    {
        leader.run(&of_process::settled(process, space))?;
    }
    // Some were lifted meanwhile.
    let is_finite = |limit: &Rlimit| (limit.soft, limit.hard) != (u64::MAX, u64::MAX);
    let is_lifted = |limit: &Rlimit| IN_THE_WAY.contains(&limit.resource) && is_finite(limit);
    if process.rlimits.iter().any(is_lifted) || limits(process, space) != limits(now, space_now) {
        outside::process(leader.pid(), process, space, false)?;
    }
    // They go on only when what they have sent is gone: it is theirs of the time since, and not of what is to come.
    stop_timers(leader, process, now)?;
    let is_armed = now.itimers.iter().any(|t| *t != IntervalTimer::default())
        || now.timers.iter().any(|t| t.remaining_ns != 0);
    let mut of_process = Vec::new();
    for (index, remote) in threads.iter_mut().enumerate().rev() {
        let thread = &process.threads[index];
        let was = before.get(&thread.tid);
        // A thread takes what was sent to itself before it takes what was sent to the process.
        let mut taken = match was {
            Some(was)
                if is_armed
                    || !was.pending.is_empty()
                    || !now.pending.is_empty()
                    || !undone.killed.is_empty() =>
            {
                take_signals(remote)?
            }
            _ => Vec::new(),
        };
        of_process.extend(taken.split_off(was.map_or(0, |was| was.pending.len()).min(taken.len())));
        let mut owed = process.clone();
        owed.threads[index].pending = pending(&thread.pending, taken, now, undone);
        owed.pending = Vec::new();
        if index == 0 {
            owed.pending = pending(&process.pending, std::mem::take(&mut of_process), now, undone);
        }
        let is_new = made.contains(&thread.tid);
        let dies_with = was.is_some_and(|was| was.pdeath_signal == thread.pdeath_signal);
        if !is_new && dies_with && owed.threads[index].pending.is_empty() && owed.pending.is_empty() {
            continue;
        }
        // Filters are inherited.
        owed.threads[index].seccomp.clear();
        let now = credentials::current(remote.tid())?;
        let conditions = last::Conditions { now, want: thread.creds.clone(), seccomp_suspended: false };
        remote.run(&last::program(&owed, space, index, &conditions))?;
        last::verify(remote.tid(), &thread.creds)?;
    }
    of_process::start_timers(process, |program| threads[0].run(program))?;
    Ok(())
}

/// Whose signals of the time since are undone with all else, beside the process's own; by their ids as the program sees them.
#[derive(Clone, Copy, Debug)]
pub struct Undone<'a> {
    /// Children that were made since, and are no more.
    pub killed: &'a [u32],
    /// Processes that go back with it.
    pub others: &'a [u32],
}

impl Undone<'_> {
    fn has(&self, sender: u32) -> bool {
        self.killed.contains(&sender) || self.others.contains(&sender)
    }
}

/// Takes all signals that are pending for a thread and its process, all of which are blocked.
fn take_signals(remote: &mut Remote<'_>) -> Result<Vec<Bytes>> {
    const AT_ONCE: usize = 16;
    let mut all = Vec::new();
    loop {
        let mut p = Program::new();
        // (The trap that ends a program is not one of them.)
        let (set, at_once) = (p.data(&(!(1u64 << (libc::SIGTRAP - 1))).to_le_bytes()), p.room(16));
        let calls: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                let info = p.room(layout::SIGINFO);
                (
                    info,
                    p.attempt("rt_sigtimedwait", libc::SYS_rt_sigtimedwait, [set, info, at_once, 8.into()]),
                )
            })
            .collect();
        let outcome = remote.run(&p)?;
        let taken = calls.iter().take_while(|(_, step)| outcome.result(*step) > 0);
        let taken: Vec<Bytes> =
            taken.map(|(info, _)| outcome.bytes(*info, layout::SIGINFO).to_vec().into()).collect();
        let more = taken.len() == AT_ONCE;
        all.extend(taken);
        if !more {
            return Ok(all);
        }
    }
}

/// What is to be pending: what was, and what others than the program itself have sent since.
fn pending(then: &[Bytes], now: Vec<Bytes>, process: &Process, undone: &Undone<'_>) -> Vec<Bytes> {
    const OF_INTERVAL_TIMERS: [i32; 3] = [libc::SIGALRM, libc::SIGVTALRM, libc::SIGPROF];
    const SENT: [i32; 3] = [0, -1, -6]; // SI_USER, SI_QUEUE, SI_TKILL
    let is_fault = |signal, code| (FAULTS.contains(&signal) || signal == libc::SIGTRAP) && code > 0;
    let is_own = |info: &Bytes| {
        let (signal, code) = (layout::half(&info.0, 0) as i32, layout::half(&info.0, 2) as i32);
        let sender = layout::half(&info.0, 4);
        let of_killed = signal == libc::SIGCHLD && undone.killed.contains(&sender);
        let of_timer =
            code == layout::SI_TIMER || code == layout::SI_KERNEL && OF_INTERVAL_TIMERS.contains(&signal);
        of_killed
            || of_timer
            || is_fault(signal, code)
            || SENT.contains(&code) && (sender == process.own_pid() || undone.has(sender))
    };
    let mut all = then.to_vec();
    all.extend(now.into_iter().filter(|info| !is_own(info) && !then.contains(info)));
    all
}

/// What others, too, may set of a process.
pub fn limits(process: &Process, space: &AddressSpace) -> impl PartialEq + use<> {
    (process.rlimits.clone(), process.oom_score_adj, space.coredump_filter)
}

/// What a thread has told the kernel by calls of its own.
fn told(thread: &Thread) -> impl PartialEq {
    let Thread { name, altstack, clear_child_tid, robust_list, tsc, timer_slack_ns, personality, .. } =
        thread.clone();
    (name, altstack, clear_child_tid, robust_list, tsc, timer_slack_ns, personality)
}

/// Which POSIX timers there are.
fn kinds(process: &Process) -> Vec<impl PartialEq + use<>> {
    process.timers.iter().map(|t| (t.id, t.clock, t.notify, t.signal, t.value, t.tid)).collect()
}

/// Stops interval timers and POSIX timers, and makes those that there were.
fn stop_timers(leader: &mut Remote<'_>, then: &Process, now: &Process) -> Result<()> {
    let mut p = Program::new();
    for (which, _) in now.itimers.iter().enumerate().filter(|(_, t)| **t != IntervalTimer::default()) {
        let zero = p.room(32);
        p.call(format!("setitimer {which}"), libc::SYS_setitimer, [(which as u64).into(), zero]);
    }
    let same = kinds(then) == kinds(now);
    for timer in &now.timers {
        let (id, zero) = (u64::from(timer.id).into(), p.room(32));
        match same {
            true => {
                p.call(format!("timer_settime {}", timer.id), libc::SYS_timer_settime, [id, 0.into(), zero])
            }
            false => p.call(format!("timer_delete {}", timer.id), libc::SYS_timer_delete, [id]),
        };
    }
    if !p.is_empty() {
        leader.run(&p)?;
    }
    if !same && !then.timers.is_empty() {
        let made = of_process::Timers::new(then)?;
        made.check(&leader.run(made.program())?)?;
    }
    Ok(())
}

/// Goes to the directory that was the current one.
pub fn current_directory(leader: &mut Remote<'_>, then: (&Image, u32), now: (&Image, u32)) -> Result<()> {
    if place(then.0, then.1) == place(now.0, now.1) {
        return Ok(());
    }
    let Some(directory) = then.0.paths.get(then.1 as usize) else { return Ok(()) };
    let mut p = Program::new();
    let path = p.string(&directory.path.0);
    p.call(format!("chdir {}", directory.path), libc::SYS_chdir, [path]);
    leader.run(&p)?;
    let link = format!("/proc/{}/cwd", leader.pid());
    let stat = rustix::fs::statat(rustix::fs::CWD, &link, AtFlags::empty());
    match stat {
        Ok(stat) if (stat.st_dev, stat.st_ino) == (directory.dev, directory.ino) => Ok(()),
        _ => Err(Error::Failed(format!("{} is another directory now", directory.path))),
    }
}

/// Ends children that were made since, and sees to it that the program does not hear of them.
pub fn bury(leader: &mut Remote<'_>, children: &[u32]) -> Result<()> {
    let mut p = Program::new();
    for &child in children {
        let how = (libc::__WALL | libc::WNOHANG) as u32;
        let args: [Arg; 4] = [u64::from(child).into(), 0.into(), u64::from(how).into(), 0.into()];
        p.attempt(format!("wait4 {child}"), libc::SYS_wait4, args);
    }
    leader.run(&p)?;
    Ok(())
}
