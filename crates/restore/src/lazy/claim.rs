//! Whoever is to follow the program's writes from checkpoint to checkpoint: for as long as they hold on, the page server
//! does not let go of what it follows before they follow it themselves.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, PoisonError};
use stillpoint_linux::line::{Caller, Request};

/// Most moves that are told one by one.
const MOVES: usize = 10_000;

/// The claim to a program, of one at a time.
#[derive(Debug, Default)]
pub struct Claim {
    caller: Option<Caller>,
    is_taken: bool,
    moves: Moves,
}

/// Where the program has moved memory since it was told the last time: address and bytes.
#[derive(Clone, Debug, Default)]
pub struct Moves(Arc<Mutex<Vec<(u64, u64)>>>);

impl Moves {
    /// Notes one.
    pub fn note(&self, to: u64, len: u64) {
        let mut moves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if moves.len() == MOVES {
            *moves = vec![(0, u64::MAX)];
        }
        moves.push((to, len));
    }

    /// Those that have not been told.
    pub fn take(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Claim {
    /// Whether somebody has it.
    pub fn is_made(&self) -> bool {
        self.caller.is_some()
    }

    /// Whether all is followed by somebody else.
    pub fn is_taken(&self) -> bool {
        self.is_taken
    }

    /// It is.
    pub fn take(&mut self) {
        self.is_taken = true;
    }

    /// Where memory is moved to.
    pub fn moves(&self) -> &Moves {
        &self.moves
    }

    /// What to wait for.
    pub fn sources<'a>(&'a self, line: Option<&'a UnixListener>) -> Vec<BorrowedFd<'a>> {
        self.caller.as_ref().map(AsFd::as_fd).into_iter().chain(line.map(AsFd::as_fd)).collect()
    }

    /// A descriptor that is in use.
    pub fn descriptor(&self) -> Option<i32> {
        self.caller.as_ref().map(|caller| caller.as_fd().as_raw_fd())
    }

    /// Takes calls: the first one, if there is none yet. Others are turned away.
    pub fn take_calls(&mut self, line: Option<&UnixListener>) {
        while let Some(caller) = line.and_then(Caller::answer_call) {
            self.caller.get_or_insert(caller);
        }
    }

    /// What is asked, if anything.
    pub fn request(&mut self) -> Option<Request> {
        match self.caller.as_mut()?.request() {
            Ok(request) => request,
            Err(_) => {
                self.hang_up();
                None
            }
        }
    }

    /// Answers, unless they have hung up.
    pub fn tell(&mut self, tell: impl FnOnce(&mut Caller) -> stillpoint_linux::Result<()>) {
        if self.caller.as_mut().is_some_and(|caller| tell(caller).is_err()) {
            self.hang_up();
        }
    }

    /// It is free.
    pub fn hang_up(&mut self) {
        self.caller = None;
    }
}
