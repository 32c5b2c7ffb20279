//! Job control: what was stopped is stopped again, and parents know of it what they knew.
//!
//! A stop is told to a parent twice: by `SIGCHLD`, and by `wait(2)`, until it has waited for it. The signals that were pending then come with
//! all others ([`crate::attributes::last`]), so those that come of our stops are taken away; and a stop that had been told is waited for once
//! more. So children are stopped before their parents are complete. That one goes on after a stop is told by `wait(2)` as well
//! (`WCONTINUED`): it is stopped and told to go on.

use crate::Result;
use stillpoint_image::{Image, Process};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program};
use stillpoint_linux::ptrace::Stopped;

/// Stops a process that was stopped, whose threads are all ready to run, the main thread first.
pub fn stop(image: &Image, process: &Process, pid: u32, threads: Vec<Stopped>) -> Result<Vec<Stopped>> {
    let signal = stop_signal(image, process).or_else(|| process.continued.then_some(libc::SIGSTOP));
    let Some(signal) = signal else { return Ok(threads) };
    let mask = process.threads.first().map_or(0, |thread| thread.sigmask);
    let mut threads = threads.into_iter();
    let Some(main) = threads.next() else { return Ok(Vec::new()) };
    let main = main.stop_process(pid, signal, mask)?;
    let others = threads.map(Stopped::join_stop).collect::<Result<Vec<_>, _>>()?;
    let main = if process.continued { main.continue_process(pid, mask)? } else { main };
    Ok(std::iter::once(main).chain(others).collect())
}

/// What a process does about its children that have been stopped: to be run in it as long as all signals are blocked and it has none of its
/// own. All of them are told with their ids in our pid namespace.
///
/// # Errors
/// That one of them has ended.
pub fn hear<'a>(parent: u32, children: impl Iterator<Item = (&'a Process, u32)>) -> Result<Program> {
    let stopped = children.filter(|(child, _)| child.stopped.is_some() || child.continued);
    let stopped: Vec<(&Process, u32)> = stopped.collect();
    let mut program = Program::new();
    if stopped.is_empty() {
        return Ok(program);
    }
    let status = |pid| Proc::process(pid)?.status();
    let level = status(parent)?.ns_tgid.len().saturating_sub(1);
    let how = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
    for (_, pid) in stopped.iter().filter(|(child, _)| child.stop_told == Some(true)) {
        let id = status(*pid)?.pid_at(level);
        let args = [libc::P_PID.into(), id.into(), 0, how as u64, 0].map(Arg::Value);
        program.attempt("waitid (a stop that was told)", libc::SYS_waitid, args);
    }
    let child = program.data(&(1u64 << (libc::SIGCHLD - 1)).to_le_bytes());
    let at_once = program.data(&[0; 16]);
    program.attempt("rt_sigtimedwait", libc::SYS_rt_sigtimedwait, [child, 0.into(), at_once, 8.into()]);
    Ok(program)
}

/// The signal that stops a process as it had been stopped, if it had. `SIGSTOP` if the signal of then would not: where it is blocked by
/// now or has an action, or in a process group that nobody could tell to go on (an orphaned one, `setpgid(2)`), in which the kernel passes
/// over those of terminals.
fn stop_signal(image: &Image, process: &Process) -> Option<i32> {
    let signal = process.stopped?;
    let (of_actions, mask) =
        (process.shares_actions, process.threads.first().map_or(0, |thread| thread.sigmask));
    let actions =
        of_actions.and_then(|row| image.processes.get(row as usize)).map_or(&process.actions, |p| &p.actions);
    let is_plain =
        actions.iter().all(|action| action.signal != signal) && mask & 1 << (signal.max(1) - 1) == 0;
    let (group, session) = (process.own_group(), process.own_session());
    let is_cared_for = image.processes.iter().filter(|member| member.own_group() == group).any(|member| {
        let parent = member.parent.and_then(|row| image.processes.get(row as usize));
        parent.is_some_and(|parent| parent.own_session() == session && parent.own_group() != group)
    });
    let of_terminals = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    let signal = i32::try_from(signal).ok().filter(|signal| of_terminals.contains(signal));
    Some(signal.filter(|_| is_plain && is_cared_for).unwrap_or(libc::SIGSTOP))
}
