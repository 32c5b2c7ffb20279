//! The line between those who load a program's memory behind it and whoever takes its checkpoints meanwhile: the latter
//! hears what is missing, and lets the former leave when it follows the memory itself.
//!
//! Its address is an abstract name with the inode number of the program's pidfd, which no other process has while the
//! machine runs (`pidfs`, Linux 6.9). Both ends make sure who is at the other.

use crate::descriptors::pidfd_open;
use crate::{Error, RemoteAddr, Result};
use rustix::fd::{AsFd, BorrowedFd};
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// `PID_FS_MAGIC`.
const PIDFS: i64 = 0x5049_4446;
/// How long an answer may take: those who give it may have been killed, and others follow.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long whoever asked may take to hear an answer: the program may be waiting for a page.
const HEARING: Duration = Duration::from_millis(50);
/// Most words of an answer.
const MOST: u64 = 1 << 26;

/// A run of memory: where it was in the checkpoint that the program was restored from, where it is now, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First address in the checkpoint.
    pub then: u64,
    /// First address now.
    pub now: u64,
    /// Bytes.
    pub len: u64,
}

impl Piece {
    /// First address behind it in the checkpoint.
    pub fn then_end(&self) -> u64 {
        self.then + self.len
    }

    /// First address behind it now.
    pub fn now_end(&self) -> u64 {
        self.now + self.len
    }

    /// The part of it that is now within `[from, to)`; none if it is empty.
    pub fn within(&self, from: u64, to: u64) -> Option<Piece> {
        let (start, end) = (self.now.max(from), self.now_end().min(to));
        (start < end).then(|| Piece { then: self.then + (start - self.now), now: start, len: end - start })
    }
}

/// What is asked of those who load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Who wants to follow the program asks this first.
    Claim,
    /// What is there and what is missing.
    State,
    /// The memory of `[start, end)`, of which nothing is missing, is not to be followed any longer.
    LetGo {
        /// First address.
        start: u64,
        /// First address behind.
        end: u64,
    },
    /// All of the program's memory is followed by who asks: there is nothing left to do.
    Taken,
}

impl Request {
    fn words(self) -> [u64; 3] {
        match self {
            Request::Claim => [1, 0, 0],
            Request::State => [2, 0, 0],
            Request::LetGo { start, end } => [3, start, end],
            Request::Taken => [4, 0, 0],
        }
    }

    fn of([kind, start, end]: [u64; 3]) -> Option<Self> {
        match kind {
            1 => Some(Request::Claim),
            2 => Some(Request::State),
            3 => Some(Request::LetGo { start, end }),
            4 => Some(Request::Taken),
            _ => None,
        }
    }
}

/// What a program was restored from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Job of the checkpoint.
    pub job: String,
    /// Its number.
    pub id: u64,
    /// How many have claimed the program so far. Whoever is the first finds pages that are not marked as written as they
    /// are in the checkpoint.
    pub claims: u64,
}

/// What is there and what is missing of a program's memory. All that had happened when it was asked for is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Nothing is missing any more.
    pub is_complete: bool,
    /// The memory that came from the checkpoint and waited for pages, ascending by where it is now.
    pub pieces: Vec<Piece>,
    /// Where memory has been moved to since this was asked for the last time by the same caller: address and bytes.
    pub moved: Vec<(u64, u64)>,
    /// The parts of it that are missing, ascending by where they are now.
    pub missing: Vec<Piece>,
}

impl State {
    fn words(&self) -> Vec<u64> {
        let counts = [self.moved.len(), self.pieces.len()].map(|n| n as u64);
        let mut words = vec![u64::from(self.is_complete), counts[0], counts[1]];
        words.extend(self.moved.iter().flat_map(|&(start, len)| [start, len]));
        words.extend(self.pieces.iter().chain(&self.missing).flat_map(|p| [p.then, p.now, p.len]));
        words
    }

    fn of(words: &[u64]) -> Option<Self> {
        let (&[is_complete, moved, count], rest) = words.split_first_chunk()?;
        let (moved, rest) = rest.split_at_checked(usize::try_from(moved).ok()?.checked_mul(2)?)?;
        let moved = moved.chunks_exact(2).map(|w| (w[0], w[1])).collect();
        let mut pieces: Vec<Piece> =
            rest.chunks_exact(3).map(|w| Piece { then: w[0], now: w[1], len: w[2] }).collect();
        let missing = (count <= pieces.len() as u64).then(|| pieces.split_off(count as usize))?;
        Some(State { is_complete: is_complete != 0, pieces, moved, missing })
    }
}

/// The end of whoever takes checkpoints.
#[derive(Debug)]
pub struct Line(UnixStream);

impl Line {
    /// Calls those who load the memory of a process; none if there are none.
    pub fn call(pid: u32) -> Option<Self> {
        let address = address(pidfd_open(pid, 0).ok()?.as_fd())?;
        let stream = UnixStream::connect_addr(&address).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream.set_write_timeout(Some(PATIENCE)).ok()?;
        is_trusted(&stream).then_some(Self(stream))
    }

    /// Claims the program, from now until this is dropped.
    ///
    /// # Errors
    /// Somebody else has, or those who load have ended meanwhile, as for all that is asked.
    pub fn claim(&mut self) -> Result<Origin> {
        let words = self.ask(Request::Claim)?;
        let job = |bytes: &[u64]| {
            let bytes: Vec<u8> = bytes.iter().map(|&b| b as u8).collect();
            String::from_utf8(bytes).ok()
        };
        match words.as_slice() {
            [id, claims, name @ ..] => job(name).map(|job| Origin { job, id: *id, claims: *claims }),
            _ => None,
        }
        .ok_or_else(garbled)
    }

    /// What is there and what is missing.
    pub fn state(&mut self) -> Result<State> {
        State::of(&self.ask(Request::State)?).ok_or_else(garbled)
    }

    /// Lets the memory of `[start, end)` be followed no longer; what was not written since looks as if it was. Whether that
    /// could be done.
    pub fn let_go(&mut self, start: RemoteAddr, end: RemoteAddr) -> Result<bool> {
        Ok(self.ask(Request::LetGo { start: start.0, end: end.0 })? == [0])
    }

    /// There is nothing left to do; waits for a while until they have left.
    pub fn taken(mut self) -> Result<()> {
        self.ask(Request::Taken)?;
        let gone = self.0.read(&mut [0]);
        gone.map(|_| ()).map_err(|e| Error::call("wait for those who load the program's memory", e))
    }

    fn ask(&mut self, request: Request) -> Result<Vec<u64>> {
        self.exchange(request).map_err(|e| Error::call("ask those who load the program's memory", e))
    }

    fn exchange(&mut self, request: Request) -> std::io::Result<Vec<u64>> {
        self.0.write_all(&bytes(&request.words()))?;
        let mut len = [0; 8];
        self.0.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len > MOST {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut answer = vec![0; len as usize * 8];
        self.0.read_exact(&mut answer)?;
        Ok(words(&answer))
    }
}

/// The end of those who load, when somebody has called.
#[derive(Debug)]
pub struct Caller {
    stream: UnixStream,
    /// A request that has not come whole.
    part: Vec<u8>,
}

impl Caller {
    /// Whoever waits at the listener; none if nobody does that may.
    pub fn answer_call(listener: &UnixListener) -> Option<Self> {
        let (stream, _) = listener.accept().ok()?;
        stream.set_nonblocking(true).ok()?;
        is_trusted(&stream).then(|| Caller { stream, part: Vec::new() })
    }

    /// What is asked now, if anything.
    ///
    /// # Errors
    /// They have hung up.
    pub fn request(&mut self) -> Result<Option<Request>> {
        let mut bytes = [0; 24];
        match self.stream.read(&mut bytes[self.part.len()..]) {
            Ok(0) => Err(hung_up(ErrorKind::UnexpectedEof.into())),
            Ok(n) => {
                let from = self.part.len();
                self.part.extend_from_slice(&bytes[from..from + n]);
                if self.part.len() < 24 {
                    return Ok(None);
                }
                let [kind, a, b] = words(&std::mem::take(&mut self.part))[..] else { return Ok(None) };
                Request::of([kind, a, b]).map(Some).ok_or_else(garbled)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(e) => Err(hung_up(e)),
        }
    }

    /// Answers [`Request::Claim`].
    pub fn tell_origin(&mut self, origin: &Origin) -> Result<()> {
        let name = origin.job.bytes().map(u64::from);
        self.tell(&[origin.id, origin.claims].into_iter().chain(name).collect::<Vec<_>>())
    }

    /// Answers [`Request::State`].
    pub fn tell_state(&mut self, state: &State) -> Result<()> {
        self.tell(&state.words())
    }

    /// Answers the others.
    pub fn tell_done(&mut self, done: bool) -> Result<()> {
        self.tell(&[u64::from(!done)])
    }

    fn tell(&mut self, words: &[u64]) -> Result<()> {
        let mut message = bytes(&[words.len() as u64]);
        message.extend(bytes(words));
        let blocking = |on: bool| self.stream.set_nonblocking(!on);
        let told = blocking(true)
            .and_then(|()| self.stream.set_write_timeout(Some(HEARING)))
            .and_then(|()| (&self.stream).write_all(&message))
            .and_then(|()| blocking(false));
        told.map_err(hung_up)
    }
}

impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Takes calls about a program; none where it has no address.
pub fn listen(program: BorrowedFd<'_>) -> Option<UnixListener> {
    let listener = UnixListener::bind_addr(&address(program)?).ok()?;
    listener.set_nonblocking(true).ok().map(|()| listener)
}

fn address(program: BorrowedFd<'_>) -> Option<SocketAddr> {
    let is_pidfs = rustix::fs::fstatfs(program).ok()?.f_type as i64 == PIDFS;
    let number = rustix::fs::fstat(program).ok().filter(|_| is_pidfs)?.st_ino;
    SocketAddr::from_abstract_name(format!("stillpoint memory {number}")).ok()
}

/// Whether at the other end is root or who we are.
fn is_trusted(stream: &UnixStream) -> bool {
    let uid = rustix::net::sockopt::socket_peercred(stream).map(|peer| peer.uid);
    uid.is_ok_and(|uid| uid.is_root() || uid == rustix::process::geteuid())
}

fn hung_up(e: std::io::Error) -> Error {
    Error::call("answer who takes checkpoints", e)
}

fn garbled() -> Error {
    Error::Other("those who load the program's memory say what cannot be understood".into())
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default())).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_asked_is_answered() {
        let program = pidfd_open(std::process::id(), 0).unwrap();
        let Some(listener) = listen(program.as_fd()) else { return }; // before Linux 6.9
        assert!(listen(program.as_fd()).is_none());
        let origin = Origin { job: "a job".into(), id: 7, claims: 1 };
        let piece = |n: u64| Piece { then: n, now: n + 1, len: 4096 };
        let state = State {
            is_complete: false,
            pieces: vec![piece(1)],
            moved: vec![(5, 6), (7, 8)],
            missing: (0..30_000).map(piece).collect(),
        };
        let (told, known) = (origin.clone(), state.clone());
        let asking = std::thread::spawn(move || {
            let mut line = Line::call(std::process::id()).unwrap();
            assert_eq!(line.claim().unwrap(), told);
            assert_eq!(line.state().unwrap(), known);
            assert!(line.let_go(RemoteAddr(4096), RemoteAddr(8192)).unwrap());
            assert!(!line.let_go(RemoteAddr(0), RemoteAddr(8192)).unwrap());
            line.taken().unwrap();
        });
        let mut caller = loop {
            if let Some(caller) = Caller::answer_call(&listener) {
                break caller;
            }
        };
        loop {
            match caller.request() {
                Ok(Some(Request::Claim)) => caller.tell_origin(&origin).unwrap(),
                Ok(Some(Request::State)) => caller.tell_state(&state).unwrap(),
                Ok(Some(Request::LetGo { start, .. })) => caller.tell_done(start > 0).unwrap(),
                Ok(Some(Request::Taken)) => {
                    caller.tell_done(true).unwrap();
                    break;
                }
                Ok(None) => std::thread::sleep(Duration::from_micros(50)),
                Err(_) => break,
            }
        }
        drop(caller);
        asking.join().unwrap();
        drop(listener);
        assert!(Line::call(std::process::id()).is_none());
    }

    proptest! {
        /// Whatever comes over the line is understood or refused.
        #[test]
        fn no_answer_is_misread(words in prop::collection::vec(0u64..9, 0..40)) {
            if let Some(state) = State::of(&words) {
                let rest = words.len() - 3 - 2 * state.moved.len();
                prop_assert_eq!(state.words().len(), words.len() - rest % 3);
            }
        }
    }
}
