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
use stillpoint_store::Store;

/// How long an answer may take: the first snapshot of a large program that cannot have a twin is a copy.
const PATIENCE: Duration = Duration::from_secs(120);

/// Asks for something about a process. Only for a snapshot is somebody started who keeps them.
pub fn ask(store: &Store, pid: u32, ask: &Ask) -> Result<Answer> {
    let none = || {
        Failure::usage(format!("there are no snapshots of process {pid}"))
            .hint("stillpoint snapshot takes one")
    };
    let may_start = matches!(ask, Ask::Snapshot { .. });
    // One who is just about to leave does not answer.
    for _ in 0..3 {
        let place = Place::of(store, pid, start_time(pid)?)?;
        let stream = match UnixStream::connect(place.socket()) {
            Ok(stream) => stream,
            Err(_) if !may_start => return Err(none()),
            Err(_) => start(&place, store, pid)?,
        };
        drop(place);
        stream.set_read_timeout(Some(PATIENCE)).map_err(|e| Failure::failed(format!("socket: {e}")))?;
        let mut line = Line::new(stream);
        let heard = line.say(ask).and_then(|()| line.hear::<Answer>());
        match heard {
            Ok(Some(Answer::Failed(failure))) => return Err(failure),
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) if may_start => {}
            Err(e) if may_start && matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
            }
            Ok(None) => {
                return Err(Failure::failed(format!("who kept the snapshots of process {pid} has ended")));
            }
            Err(e) => return Err(Failure::failed(format!("who keeps the snapshots of process {pid}: {e}"))),
        }
    }
    if jobs::stat_of(pid).is_none_or(|stat| stat.state == b'Z') {
        return Err(Failure::usage(format!("process {pid} has ended")));
    }
    Err(Failure::failed(format!("nobody could be started to keep snapshots of process {pid}")))
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
