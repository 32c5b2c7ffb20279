//! `stillpoint checkpointer`: the process beside a supervisor, never called by users.

use crate::args::{Checkpointer, Common};
use crate::checkpointer::{Work, inherited};
use crate::failure::{Failure, Result};
use crate::jobs;
use rustix::fd::AsFd;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getppid, getrlimit, pidfd_open, setrlimit};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use stillpoint_linux::descriptors::null;
use stillpoint_linux::supervise::Signals;

/// Runs the command.
pub fn run(common: &Common, args: &Checkpointer) -> Result<ExitCode> {
    let signals = Signals::take()?;
    die_with(args.supervisor)?;
    let listener = control_socket()?;
    lift_limits();
    if args.periodic.every.is_none() && !may_write_checkpoints() {
        // Whoever asks takes the checkpoint by themselves, then, with limits of their own.
        return Err(Failure::failed("the limits of the job are too narrow for its checkpoints"));
    }
    let _ = rustix::thread::set_name(c"stillpoint"); // and not "exe", as which we were started
    let _ = std::env::set_current_dir("/"); // must not keep a file system busy
    let gone = || Failure::usage(format!("there is no process {}", args.process));
    let pid = i32::try_from(args.process).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    let work = Work {
        store: jobs::open_store(common.store.as_deref())?,
        job: args.job.clone(),
        pid: args.process,
        // It is a child of our parent, and waited for when we have ended: the id is still its own.
        pidfd: pidfd_open(pid, PidfdFlags::empty()).map_err(|_| gone())?,
        inherited: args.inherited.iter().filter_map(inherited).collect(),
        periodic: args.periodic.clone(),
        listener,
        heeds_signals: false,
    };
    work.serve(&signals)?;
    Ok(ExitCode::SUCCESS)
}

/// A supervisor that is killed takes us along, and with us goes everything that we have set up in the job.
fn die_with(supervisor: i32) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Failure::failed(format!("PR_SET_PDEATHSIG: {e}")))?;
    match getppid().map(Pid::as_raw_pid) == Some(supervisor) {
        true => Ok(()),
        false => Err(Failure::usage("this command is for the supervisor of a job")),
    }
}

/// Takes the control socket from standard input, if it is there.
fn control_socket() -> Result<Option<UnixListener>> {
    let failed = |e: std::io::Error| Failure::failed(format!("control socket: {e}"));
    let stdin = std::io::stdin();
    if !rustix::net::sockopt::socket_acceptconn(&stdin).unwrap_or(false) {
        return Ok(None);
    }
    let listener = stdin.as_fd().try_clone_to_owned().map_err(failed)?;
    rustix::stdio::dup2_stdin(null()?).map_err(|e| failed(e.into()))?;
    Ok(Some(listener.into()))
}

/// Limits were made for the job. (`ulimit -f` would forbid to write a checkpoint, `ulimit -t` end us in the middle.) As
/// far as they are hard, it takes `CAP_SYS_RESOURCE`.
fn lift_limits() {
    for resource in [Resource::As, Resource::Cpu, Resource::Data, Resource::Fsize, Resource::Nofile] {
        let hard = getrlimit(resource).maximum;
        let free = Rlimit { current: None, maximum: None };
        // How many descriptors there may be at most is a number.
        if matches!(resource, Resource::Nofile) || setrlimit(resource, free).is_err() {
            let _ = setrlimit(resource, Rlimit { current: hard, maximum: hard });
        }
    }
}

/// Whether files may be as large as they come, and enough of them be open.
fn may_write_checkpoints() -> bool {
    // Two checkpoints may be read at a time, each of nearly 200 segments.
    const ENOUGH: u64 = 512;
    let limit = |resource| getrlimit(resource).current;
    limit(Resource::Fsize).is_none() && limit(Resource::Nofile).is_none_or(|n| n >= ENOUGH)
}
