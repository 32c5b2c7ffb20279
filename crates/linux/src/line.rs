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
    /// Of those who page: what is stored of the program's memory. From now on nothing more is taken out of it, until all of this
    /// is [`Request::Saved`].
    Stored,
    /// What is in `[start, end)` is not as it is stored by those who page: it was found to be written. Not answered.
    Written {
        /// First address.
        start: u64,
        /// First address behind.
        end: u64,
    },
    /// A checkpoint has been taken.
    Saved,
    /// Of those who page: the program is not to be stopped by them until all is [`Request::Saved`], or it [`Request::GoesOn`]. Answered
    /// when nobody of them stops it any more.
    Rest,
    /// There is no checkpoint after all.
    GoesOn,
}

impl Request {
    fn words(self) -> [u64; 3] {
        match self {
            Request::Claim => [1, 0, 0],
            Request::State => [2, 0, 0],
            Request::LetGo { start, end } => [3, start, end],
            Request::Taken => [4, 0, 0],
            Request::Stored => [5, 0, 0],
            Request::Written { start, end } => [6, start, end],
            Request::Saved => [7, 0, 0],
            Request::Rest => [8, 0, 0],
            Request::GoesOn => [9, 0, 0],
        }
    }

    fn of([kind, start, end]: [u64; 3]) -> Option<Self> {
        match kind {
            1 => Some(Request::Claim),
            2 => Some(Request::State),
            3 => Some(Request::LetGo { start, end }),
            4 => Some(Request::Taken),
            5 => Some(Request::Stored),
            6 => Some(Request::Written { start, end }),
            7 => Some(Request::Saved),
            8 => Some(Request::Rest),
            9 => Some(Request::GoesOn),
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
    /// Its memory is paged: there is no checkpoint that has what is missing, but [`Request::Stored`] tells.
    pub is_paged: bool,
    /// Which job or checkpoint of that name it is, as there may be another in another store.
    pub mark: Mark,
}

/// What tells a job or a checkpoint from others of its name, in other stores or at other times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// When the checkpoint was taken, nanoseconds since 1970.
    TakenAt(u64),
    /// Device and inode number of the job's folder.
    Folder(u64, u64),
}

impl Origin {
    fn words(&self) -> Vec<u64> {
        let mark = match self.mark {
            Mark::TakenAt(ns) => [0, ns, 0],
            Mark::Folder(device, inode) => [1, device, inode],
        };
        let head = [self.id, self.claims, self.is_paged.into()];
        head.into_iter().chain(mark).chain(self.job.bytes().map(u64::from)).collect()
    }

    fn of(words: &[u64]) -> Option<Self> {
        let (&[id, claims, paged, kind, a, b], name) = words.split_first_chunk()?;
        let mark = match kind {
            0 => Mark::TakenAt(a),
            1 => Mark::Folder(a, b),
            _ => return None,
        };
        let name: Option<Vec<u8>> = name.iter().map(|&byte| byte.try_into().ok()).collect();
        Some(Origin { job: String::from_utf8(name?).ok()?, id, claims, is_paged: paged != 0, mark })
    }
}

/// A page that is stored by those who page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPage {
    /// Its address.
    pub address: u64,
    /// Segment of the job.
    pub segment: u64,
    /// Offset of its block in that, bytes.
    pub offset: u64,
    /// Bytes of the block as it is stored.
    pub length: u32,
    /// Pages of the block.
    pub block_pages: u16,
    /// Pages of the block in front of it.
    pub skip: u16,
    /// How the block is encoded, by number.
    pub codec: u8,
    /// CRC-32 of the block as it is stored.
    pub crc: u32,
    /// It is not in memory.
    pub is_missing: bool,
}

/// What is stored of a program's memory that is paged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredPages {
    /// Where memory has been moved to since this was asked for the last time: address and bytes.
    pub moved: Vec<(u64, u64)>,
    /// The pages, ascending.
    pub pages: Vec<StoredPage>,
}

impl StoredPages {
    fn words(&self) -> Vec<u64> {
        let mut words = vec![self.moved.len() as u64];
        words.extend(self.moved.iter().flat_map(|&(start, len)| [start, len]));
        let page = |p: &StoredPage| {
            let block = u64::from(p.block_pages) << 16 | u64::from(p.skip) | u64::from(p.codec) << 32;
            let stored = u64::from(p.length) << 32 | u64::from(p.crc);
            [p.address | u64::from(p.is_missing), p.segment, p.offset, block, stored]
        };
        words.extend(self.pages.iter().flat_map(page));
        words
    }

    fn of(words: &[u64]) -> Option<Self> {
        let (&moved, rest) = words.split_first()?;
        let (moved, rest) = rest.split_at_checked(usize::try_from(moved).ok()?.checked_mul(2)?)?;
        let moved = moved.chunks_exact(2).map(|w| (w[0], w[1])).collect();
        let pages = rest.chunks_exact(5).map(|w| StoredPage {
            address: w[0] & !1,
            is_missing: w[0] & 1 != 0,
            segment: w[1],
            offset: w[2],
            block_pages: (w[3] >> 16) as u16,
            skip: w[3] as u16,
            codec: (w[3] >> 32) as u8,
            length: (w[4] >> 32) as u32,
            crc: w[4] as u32,
        });
        Some(StoredPages { moved, pages: pages.collect() })
    }
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
        Origin::of(&self.ask(Request::Claim)?).ok_or_else(garbled)
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

    /// Those who page the program do not stop it from now on, until all is [`Line::saved`], it goes on, or this is dropped.
    pub fn rest(&mut self) -> Result<()> {
        self.ask(Request::Rest).map(|_| ())
    }

    /// They may stop it again.
    pub fn goes_on(&mut self) -> Result<()> {
        self.ask(Request::GoesOn).map(|_| ())
    }

    /// What is stored of memory that is paged; it stays so until all is [`Line::saved`], or this is dropped.
    pub fn stored(&mut self) -> Result<StoredPages> {
        StoredPages::of(&self.ask(Request::Stored)?).ok_or_else(garbled)
    }

    /// A checkpoint has been taken, for which these ranges were found to be written. Returns for how long the program's threads, all
    /// together, have waited for pages for the sake of checkpoints since this was said the last time.
    pub fn saved(&mut self, written: impl Iterator<Item = (u64, u64)>) -> Result<Duration> {
        let all: Vec<u64> =
            written.flat_map(|(start, end)| Request::Written { start, end }.words()).collect();
        self.0
            .write_all(&bytes(&all))
            .map_err(|e| Error::call("tell those who page the program's memory", e))?;
        // Those of an earlier version do not tell.
        Ok(self.ask(Request::Saved)?.get(1).map_or(Duration::ZERO, |us| Duration::from_micros(*us)))
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
        self.tell(&origin.words())
    }

    /// Answers [`Request::State`].
    pub fn tell_state(&mut self, state: &State) -> Result<()> {
        self.tell(&state.words())
    }

    /// Answers [`Request::Stored`].
    pub fn tell_stored(&mut self, stored: &StoredPages) -> Result<()> {
        self.tell(&stored.words())
    }

    /// Answers [`Request::Saved`], with how long has been waited.
    pub fn tell_saved(&mut self, waited: Duration) -> Result<()> {
        self.tell(&[0, waited.as_micros() as u64])
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
        let mark = Mark::Folder(3, 1 << 40);
        let origin = Origin { job: "a job".into(), id: 7, claims: 1, is_paged: true, mark };
        let piece = |n: u64| Piece { then: n, now: n + 1, len: 4096 };
        let state = State {
            is_complete: false,
            pieces: vec![piece(1)],
            moved: vec![(5, 6), (7, 8)],
            missing: (0..30_000).map(piece).collect(),
        };
        let page = |n: u64| StoredPage {
            address: n << 12,
            segment: 2,
            offset: n << 13,
            length: n as u32 + 7,
            block_pages: n as u16 | 1 << 15,
            skip: !(n as u16),
            codec: n as u8,
            crc: n as u32,
            is_missing: n.is_multiple_of(3),
        };
        let stored = StoredPages { moved: vec![(7, 8)], pages: (1..9000).map(page).collect() };
        let (told, known, paged) = (origin.clone(), state.clone(), stored.clone());
        let mut written = Vec::new();
        let asking = std::thread::spawn(move || {
            let mut line = Line::call(std::process::id()).unwrap();
            assert_eq!(line.claim().unwrap(), told);
            assert_eq!(line.state().unwrap(), known);
            line.rest().unwrap();
            line.goes_on().unwrap();
            assert_eq!(line.stored().unwrap(), paged);
            let waited = line.saved([(4096, 8192), (1 << 20, 2 << 20)].into_iter()).unwrap();
            assert_eq!(waited, Duration::from_micros(1_234_567));
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
                Ok(Some(Request::Stored)) => caller.tell_stored(&stored).unwrap(),
                Ok(Some(Request::Written { start, end })) => written.push((start, end)),
                Ok(Some(Request::Saved)) => caller.tell_saved(Duration::from_micros(1_234_567)).unwrap(),
                Ok(Some(Request::Rest | Request::GoesOn)) => caller.tell_done(true).unwrap(),
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
        assert_eq!(written, [(4096, 8192), (1 << 20, 2 << 20)]);
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
