//! Asking the process that keeps a program's snapshots.

use super::{Answer, Ask, Place, start_time};
use crate::control::Line;
use crate::failure::{Failure, Result};
use crate::jobs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_capture::attributes::target::has_ended;
use stillpoint_store::Store;

/// How long an answer may take: the first snapshot of a large program that cannot have a twin is a copy. A rollback may read and keep
/// any amount of files, and is done in any case: its end is waited for, or that of who does it, when the socket ends.
const PATIENCE: Duration = Duration::from_secs(120);

/// Asks for something about a process. Only for a snapshot is somebody started who keeps them.
pub fn ask(store: &Store, pid: u32, ask: &Ask) -> Result<Answer> {
    let none = || {
        Failure::usage(format!("there are no snapshots of process {pid}"))
            .hint("stillpoint snapshot takes one")
    };
    let may_start = matches!(ask, Ask::Snapshot { .. });
    if matches!(ask, Ask::Snapshot { alone: false, .. }) && has_made_us(pid) {
        let why = format!("process {pid} has started this very command, which cannot stop itself");
        return Err(Failure::refused(why).hint("ask from elsewhere, or with --alone for the one process"));
    }
    // One who is just about to leave does not answer.
    for _ in 0..3 {
        let place = Place::of(store, pid, start_time(pid)?)?;
        let stream = match UnixStream::connect(place.socket()) {
            Ok(stream) => stream,
            Err(_) if !may_start && has_ended(pid) => return Err(ended(pid)),
            Err(_) if !may_start => return Err(none()),
            Err(_) => start(&place, store, pid)?,
        };
        drop(place);
        let patience = Some(PATIENCE).filter(|_| !matches!(ask, Ask::Rollback { .. }));
        stream.set_read_timeout(patience).map_err(|e| Failure::failed(format!("socket: {e}")))?;
        let mut line = Line::new(stream);
        let heard = line.say(ask).and_then(|()| line.hear::<Answer>());
        match heard {
            Ok(Some(Answer::Failed(failure))) => return Err(failure),
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) if may_start => {}
            // Whoever was not heard has asked for nothing.
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
            // It leaves when the program ends.
            Ok(None) | Err(_) if has_ended(pid) => return Err(ended(pid)),
            Ok(None) => {
                return Err(Failure::failed(format!("who kept the snapshots of process {pid} has ended")));
            }
            Err(e) => return Err(Failure::failed(format!("who keeps the snapshots of process {pid}: {e}"))),
        }
    }
    if has_ended(pid) {
        return Err(ended(pid));
    }
    Err(Failure::failed(format!("nobody could be started to keep snapshots of process {pid}")))
}

fn ended(pid: u32) -> Failure {
    Failure::usage(format!("process {pid} has ended"))
}

/// Whether we are a descendant of a process.
fn has_made_us(pid: u32) -> bool {
    let mut above = jobs::stat_of(std::process::id()).map(|stat| stat.ppid);
    while let Some(ancestor) = above.filter(|ancestor| *ancestor > 1) {
        if ancestor == pid {
            return true;
        }
        above = jobs::stat_of(ancestor).map(|stat| stat.ppid);
    }
    false
}

/// Starts one who keeps snapshots, and connects to them.
fn start(place: &Place, store: &Store, pid: u32) -> Result<UnixStream> {
    let failed = |e: std::io::Error| Failure::failed(format!("keep snapshots of process {pid}: {e}"));
    let _ = std::fs::remove_file(place.socket());
    let listener = UnixListener::bind(place.socket()).map_err(failed)?;
    let stream = UnixStream::connect(place.socket()).map_err(failed)?;
    let mut command = Command::new("/proc/self/exe");
    command.arg("--store").arg(store.path()).args(["brancher", &pid.to_string()]);
    command.stdin(OwnedFd::from(listener)).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
    // It lives on by itself: nobody waits for it.
    command.spawn().map_err(failed)?;
    Ok(stream)
}
