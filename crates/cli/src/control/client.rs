//! Asking for a checkpoint, or for way.

use super::{Line, Request, VERSION, Wish, Word, place};
use crate::failure::{Failure, Result};
use crate::taken::{Asked, Taken};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use stillpoint_capture::Progress;
use stillpoint_store::Store;

/// How long a living server may take for its first word.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long it may be silent later. It says how far it is several times a second.
const SILENCE: Duration = Duration::from_secs(60);

/// What came of asking.
#[derive(Debug)]
pub enum Asking {
    /// The outcome.
    Answered(Box<Result<Taken>>),
    /// Nobody listens: the supervisor was killed, or never offered this.
    Nobody,
    /// Somebody listens and does not answer as we understand it: why.
    Deaf(String),
}

/// Asks whoever takes the checkpoints of a job.
pub fn ask(store: &Store, job: &str, asked: &Asked, progress: &dyn Progress) -> Asking {
    match begin(store, job, Wish::Checkpoint(asked.clone())) {
        Ok(mut line) => Asking::Answered(Box::new(listen(&mut line, job, asked, progress))),
        Err(asking) => asking,
    }
}

/// Asks whoever takes the checkpoints of a job not to follow what it writes until the next one; whether nobody does now.
pub fn ask_for_way(store: &Store, job: &str) -> bool {
    let Ok(mut line) = begin(store, job, Wish::GiveWay {}) else { return false };
    let began = Instant::now();
    loop {
        match line.hear() {
            // Behind a checkpoint that is being taken.
            Ok(Some(Word::Progress { .. })) if began.elapsed() < SILENCE => {}
            heard => return matches!(heard, Ok(Some(Word::GivesWay {}))),
        }
    }
}

/// Reaches them, and says what is wanted.
fn begin(store: &Store, job: &str, wish: Wish) -> std::result::Result<Line, Asking> {
    let stream = match reach(store, job) {
        Ok(stream) => stream,
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            return Err(deaf(job, "does not answer; it may be stopped"));
        }
        Err(_) => return Err(Asking::Nobody),
    };
    let mut line = Line::new(stream);
    match line.hear() {
        Ok(Some(Word::Hello { version: VERSION })) => {}
        Ok(Some(Word::Hello { .. })) => return Err(deaf(job, "is of another version of stillpoint")),
        Err(e) if is_timeout(&e) => return Err(deaf(job, "does not answer; it may be stopped")),
        Ok(Some(Word::Failed(failure))) => return Err(Asking::Answered(Box::new(Err(failure)))),
        Err(e) if e.kind() != ErrorKind::InvalidData => return Err(Asking::Nobody), // it hung up
        Ok(None) => return Err(Asking::Nobody),
        Ok(Some(_)) | Err(_) => return Err(deaf(job, "says what this version does not understand")),
    }
    let _ = line.stream().set_read_timeout(Some(SILENCE));
    match line.say(&Request { version: VERSION, wish }) {
        Ok(()) => Ok(line),
        Err(_) => Err(Asking::Nobody),
    }
}

fn deaf(job: &str, what: &str) -> Asking {
    Asking::Deaf(format!("the supervisor of job {job} {what}: this checkpoint was taken without it"))
}

fn is_timeout(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Connects; a server that does not take its calls makes us wait no longer than [`PATIENCE`] (unix(7), `SO_SNDTIMEO`).
fn reach(store: &Store, job: &str) -> std::io::Result<UnixStream> {
    let (_folder, path) = place(store, job).map_err(|f| std::io::Error::other(f.what))?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for direction in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, direction, Some(PATIENCE))?;
    }
    connect(&socket, &SocketAddrUnix::new(path.as_path())?)?;
    Ok(UnixStream::from(socket))
}

/// Follows the checkpoint to its end.
fn listen(line: &mut Line, job: &str, asked: &Asked, progress: &dyn Progress) -> Result<Taken> {
    let mut known = (0, 0);
    loop {
        match line.hear() {
            Ok(Some(Word::Taken(taken))) => return Ok(taken),
            Ok(Some(Word::Failed(failure))) => return Err(failure),
            Ok(Some(Word::Progress { total, done })) => {
                if total != known.0 {
                    progress.start(total);
                }
                progress.advance(done.saturating_sub(known.1));
                known = (total, done.max(known.1));
            }
            Ok(Some(Word::Hello { .. } | Word::GivesWay {})) => {}
            Err(e) if is_timeout(&e) => {
                return Err(Failure::failed(format!(
                    "checkpoint {}: the supervisor of job {job} has been silent for {} s",
                    asked.target,
                    SILENCE.as_secs()
                ))
                .hint(format!("stillpoint ls {job} tells whether there is a checkpoint")));
            }
            Ok(None) | Err(_) => {
                return Err(Failure::failed(format!(
                    "checkpoint {}: the supervisor of job {job} ended before it was complete",
                    asked.target
                ))
                .hint(format!("stillpoint ls {job} tells whether there is a checkpoint")));
            }
        }
    }
}
