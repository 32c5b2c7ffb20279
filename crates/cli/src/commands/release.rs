//! `stillpoint release`: a program that was adopted is no job any more.

use crate::args::{Common, Release};
use crate::failure::{Failure, Result};
use crate::{jobs, output};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;
use std::process::ExitCode;
use stillpoint_store::Running;

/// Runs the command.
pub fn run(common: &Common, args: &Release) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let job = &args.job;
    let Some(running) = jobs::running(&store, job)? else {
        return Err(Failure::usage(format!("no job {job} runs (store {})", store.path().display()))
            .hint("stillpoint ls lists the jobs"));
    };
    if !running.adopted {
        return Err(Failure::usage(format!("job {job} was not adopted: its supervisor is its parent")));
    }
    tell_supervisor(&running)?;
    // One that was killed has left its record.
    if store.running(job).is_ok_and(|now| now.as_ref() == Some(&running)) {
        store.clear_running(job).map_err(jobs::store_failure)?;
    }
    store.clear_terms(job).map_err(jobs::store_failure)?;
    match common.json {
        true => output::json(&json!({"job": job, "pid": running.pid}))?,
        false => output::line(&format!("process {} is no job any more", running.pid))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks the supervisor to leave, as anybody could with `kill`, and waits until it has: what it has begun is brought to
/// its end.
fn tell_supervisor(running: &Running) -> Result<()> {
    let pid = i32::try_from(running.supervisor_pid).ok().and_then(Pid::from_raw);
    let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    // Once we hold it, the process is the one that the record means, or it is not.
    let Some(pidfd) = pidfd.filter(|_| jobs::is_supervised(running)) else { return Ok(()) };
    let failed = |e| Failure::failed(format!("process {}: {e}", running.supervisor_pid));
    for signal in [Signal::TERM, Signal::CONT] {
        match pidfd_send_signal(&pidfd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    while poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None) == Err(rustix::io::Errno::INTR) {}
    Ok(())
}
