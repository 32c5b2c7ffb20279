//! Answering those who ask for a checkpoint, or for way: each on a thread of its own, so that a client that is slow, hangs or goes
//! away is nobody else's trouble.

use super::{Line, Request, VERSION, Wish, Word};
use crate::checkpointer::desk::{Desk, Ticket};
use crate::failure::{Failure, Result};
use crate::taken::Asked;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a client may take for its question, and to take in what it is told.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it is told how far the checkpoint is.
const PERIOD: Duration = Duration::from_millis(100);
/// How many are served at the same time.
const MOST: usize = 64;

/// Everybody who is being served.
#[derive(Debug, Default)]
pub struct Clients {
    /// One more reference for each.
    all: Arc<()>,
    /// One more reference for each who has asked for a checkpoint and not heard of its outcome.
    waiting: Arc<()>,
}

impl Clients {
    /// Whether somebody waits for an outcome.
    pub fn are_waiting(&self) -> bool {
        Arc::strong_count(&self.waiting) > 1
    }

    /// Takes the calls that have come in.
    pub fn accept(&self, listener: &UnixListener, desk: &Desk) {
        while let Ok((stream, _)) = listener.accept() {
            // One that is not served hears that nobody is there.
            if Arc::strong_count(&self.all) > MOST || stream.set_nonblocking(false).is_err() {
                continue;
            }
            let (place, waiting, desk) = (self.all.clone(), Arc::downgrade(&self.waiting), desk.clone());
            let serve = move || {
                // A client that is gone needs no answer.
                let _ = serve(stream, &desk, &waiting);
                drop(place);
            };
            let _ = std::thread::Builder::new().name("client".into()).spawn(serve);
        }
    }
}

fn serve(stream: UnixStream, desk: &Desk, waiting: &Weak<()>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    if let Err(failure) = check_peer(&stream) {
        return Line::new(stream).say(&Word::Failed(failure));
    }
    let mut line = Line::new(stream);
    line.say(&Word::Hello { version: VERSION })?;
    let wish = match line.hear::<Request>() {
        Ok(None) => return Ok(()), // only wanted to know whether we live
        Ok(Some(Request { version: VERSION, wish })) => wish,
        Ok(Some(_)) | Err(_) => {
            let what =
                "the supervisor of this job does not understand what it is asked: it is of another version";
            return line.say(&Word::Failed(Failure::failed(what)));
        }
    };
    let _waiting = waiting.upgrade();
    match wish {
        Wish::Checkpoint(asked) => follow(&line, asked, desk),
        Wish::GiveWay {} => give_way(&line, desk),
    }
}

/// Only the owner of the store may ask, and root; the permissions of folder and socket say the same.
pub fn check_peer(stream: &UnixStream) -> Result<()> {
    let user = stillpoint_linux::sockets::peer_user(stream)?;
    match user == 0 || user == rustix::process::geteuid().as_raw() {
        true => Ok(()),
        false => Err(Failure::usage("the job belongs to another user")),
    }
}

/// Waits until nobody follows the job, behind what was asked for before.
fn give_way(line: &Line, desk: &Desk) -> std::io::Result<()> {
    let way = desk.give_way();
    loop {
        match way.recv_timeout(PERIOD) {
            Ok(true) => return line.say(&Word::GivesWay {}),
            Ok(false) => {
                let why = "its checkpoints cannot give way";
                return line.say(&Word::Failed(Failure::refused(why)));
            }
            Err(RecvTimeoutError::Timeout) => line.say(&Word::Progress { total: 0, done: 0 })?,
            Err(RecvTimeoutError::Disconnected) => {
                return line.say(&Word::Failed(Failure::failed("nobody takes checkpoints any more")));
            }
        }
    }
}

/// Hands the checkpoint in, and tells the client how it goes.
fn follow(line: &Line, asked: Asked, desk: &Desk) -> std::io::Result<()> {
    let ticket: Ticket = desk.hand_in(asked);
    loop {
        match ticket.wait(PERIOD) {
            Some(Ok(taken)) => return line.say(&Word::Taken(taken)),
            Some(Err(failure)) => return line.say(&Word::Failed(failure)),
            None => {
                let (total, done) = ticket.progress();
                line.say(&Word::Progress { total, done })?;
            }
        }
    }
}
