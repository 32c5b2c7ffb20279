//! What page servers work with.

use super::board::Board;
use super::cores;
use super::plan::Plan;
use crate::Error;
use crate::rebuild::Heard;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Signal, pidfd_send_signal};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use stillpoint_linux::hold;
use stillpoint_store::{Reader, Sources, TouchSet};

/// All that page servers work with.
pub struct Work<'a> {
    /// What comes later of each address space of the checkpoint.
    pub stocks: Vec<Stock<'a>>,
    /// Reads it.
    pub reader: &'a Reader,
    /// So much of it is read at most, bytes a second, if that is limited.
    pub limit: Option<u64>,
    /// What outlives a server.
    pub board: Arc<Board>,
    /// The program whose core dumps are seen to.
    pub dumps: Option<cores::Origin>,
    /// The programs that wait for pages, by their numbers.
    pub programs: Vec<Option<Program>>,
    /// Who hears of it.
    pub heard: Heard<'a>,
    /// Whether standard error leads to somebody.
    pub is_heard: bool,
    /// The checkpoint: job and number, and when it was taken.
    pub origin: (String, u64, u64),
    /// Where whoever follows the program calls, where that can be.
    pub line: Option<UnixListener>,
    /// Whether somebody is going to.
    pub is_followed: bool,
    /// Whether it is learnt what the program wants first, if that takes some time.
    pub learns: bool,
    /// The programs are processes of one tree: who waits for the memory of one waits for that of all.
    pub is_tree: bool,
}

/// The memory of one process of a checkpoint.
pub struct Stock<'a> {
    /// What comes later.
    pub plan: Arc<Plan>,
    /// Its extents, in the order in which they are put in ahead.
    pub order: Vec<usize>,
    /// What was wanted first the last time.
    pub touch: Option<Touch<'a>>,
}

impl<'a> Stock<'a> {
    /// Of this plan.
    pub fn new(plan: Arc<Plan>, touch: Option<Touch<'a>>) -> Self {
        let order = plan.order();
        Stock { plan, order, touch }
    }

    /// Whether an earlier restore learnt what is wanted first.
    pub fn was_learnt(&self) -> bool {
        self.touch.is_some_and(|touch| is_learnt(touch.set, touch.head))
    }
}

/// A program that waits for pages.
#[derive(Debug)]
pub struct Program {
    /// The number of the stock from which they come.
    pub stock: usize,
    /// Its pidfd.
    pub handle: OwnedFd,
    /// With which it holds what follows its memory, and that of its copies ([`stillpoint_linux::hold`]), where that can be.
    pub hold: Option<OwnedFd>,
}

/// A touch set that is being put in.
#[derive(Clone, Copy, Debug)]
pub struct Touch<'a> {
    /// It.
    pub set: &'a TouchSet,
    /// The first of its runs that need not have been there before the program ran.
    pub head: usize,
    /// The first that is not there yet.
    pub done: usize,
}

/// Whether a touch set has what an earlier restore learnt, behind the runs of its head.
pub fn is_learnt(set: &TouchSet, head: usize) -> bool {
    set.sources().contains(Sources::RESTORES) && set.len() > head
}

impl Touch<'_> {
    /// The runs that need not have been there before the program ran: start, end, number.
    pub fn by_address(self) -> Vec<(u64, u64, usize)> {
        let run = |number| {
            let range = self.set.run(number);
            (range.start, range.end(), number)
        };
        let mut runs: Vec<_> = (self.head..self.set.len()).map(run).collect();
        runs.sort_unstable();
        runs
    }

    /// Bytes of these.
    pub fn bytes(self) -> u64 {
        (self.head..self.set.len()).map(|number| self.set.run(number).len).sum()
    }
}

impl Work<'_> {
    /// The descriptors it needs.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = self.reader.descriptors();
        all.extend(self.stocks.iter().filter_map(|stock| stock.touch.map(|touch| touch.set.descriptor())));
        all.extend((0..self.programs.len()).filter_map(|number| self.handle(number)));
        all.extend(
            self.programs.iter().flatten().filter_map(|program| program.hold.as_ref()).map(AsFd::as_fd),
        );
        all.extend(self.line.as_ref().map(AsFd::as_fd));
        all
    }

    /// A program, until its memory is all there.
    pub fn program(&self, number: usize) -> Option<BorrowedFd<'_>> {
        self.board.space(number).descriptor()?;
        self.programs.get(number)?.as_ref().map(|program| program.handle.as_fd())
    }

    /// Whether the programs are clones, each of which is on its own.
    pub fn has_clones(&self) -> bool {
        self.programs.len() > 1 && !self.is_tree
    }

    /// The handle of a program: of a clone, until its memory is all there, as it is closed then. Others are found by it until
    /// that of their whole tree is, also of processes that were made meanwhile.
    fn handle(&self, number: usize) -> Option<BorrowedFd<'_>> {
        match self.has_clones() {
            true => self.program(number),
            false => self.programs[number].as_ref().map(|program| program.handle.as_fd()),
        }
    }

    /// Lets a program hold what follows a space of it, or none any more: should all of us be killed, nobody goes on with zeros.
    pub fn hold(&self, space: usize, program: usize, userfault: Option<BorrowedFd<'_>>) {
        if let Some((hold, place)) = self.held(space, program) {
            drop(hold::put(hold, place, userfault));
        }
    }

    /// With what a program holds a space of it, and where in that.
    pub fn held(&self, space: usize, program: usize) -> Option<(BorrowedFd<'_>, usize)> {
        let hold = self.programs.get(program)?.as_ref()?.hold.as_ref()?;
        // One of its own, then those of copies.
        let place = if space == program { 0 } else { 1 + space - self.programs.len() };
        Some((hold.as_fd(), place))
    }

    /// Of which program it is noted what it wants: the first that waits for pages.
    pub fn noted(&self) -> usize {
        self.programs.iter().position(Option::is_some).unwrap_or(0)
    }

    /// From which stock that one's pages come.
    pub fn noted_stock(&self) -> Option<&Stock<'_>> {
        let program = self.programs.get(self.noted())?.as_ref()?;
        self.stocks.get(program.stock)
    }

    /// A program must not go on without what cannot be had.
    pub fn give_up(&self, program: usize, why: &Error) {
        self.fail(program, &why.to_string());
        // Fails if it has ended by itself.
        let _ = self.program(program).map(|handle| pidfd_send_signal(handle, Signal::KILL));
    }

    /// No program that still waits for pages must go on.
    pub fn give_up_all(&self, why: &Error) {
        let all = (0..self.programs.len()).filter(|&number| self.program(number).is_some());
        all.for_each(|program| self.give_up(program, why));
    }

    /// Tells once that a page cannot be had.
    pub fn fail(&self, program: usize, why: &str) {
        let is_told =
            (0..self.programs.len()).any(|n| self.board.program(n).failure().as_deref() == Some(why));
        if self.board.program(program).fail(why) && !is_told {
            (self.heard.failed)(why);
        }
    }
}

impl std::fmt::Debug for Work<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pages to come", self.stocks.iter().map(|stock| stock.plan.pages()).sum::<u64>())
    }
}
