//! Many restores of one checkpoint at once, whose memory is loaded by the same processes.
//!
//! Each clone is rebuilt by a process of its own, in a pid namespace of its own, which would take page servers along when it
//! ends. So they are started by whoever made the [`Template`], and the clones come to them: each makes its memory wait, notes
//! on the board what is there, and hands over what follows the memory, and itself.

use super::board::{Board, Tally};
use super::keepers::{self, Parted};
use super::later::{Coming, Pager};
use super::plan::Plan;
use super::work::{Program, Stock, Touch, Work};
use crate::rebuild::{Heard, Options, only_process};
use crate::{Result, Stdio};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use stillpoint_image::{Extent, Owner};
use stillpoint_store::Checkpoint;

/// What the clones of a checkpoint have in common. To be made before the processes that rebuild them are split off.
#[derive(Debug)]
pub struct Template {
    plan: Arc<Plan>,
    board: Arc<Board>,
}

/// Where a clone that is being rebuilt finds those who serve it.
pub trait Place: Sync {
    /// Hands over what follows its memory, a handle to it, and that with which it holds the first; returns when it is served.
    fn be_served(
        &self,
        userfault: BorrowedFd<'_>,
        program: BorrowedFd<'_>,
        hold: Option<BorrowedFd<'_>>,
    ) -> Result<()>;
}

/// Who takes over the memory of a program that is being rebuilt, and takes out of it as well.
pub trait Steward: Sync {
    /// Puts in from now on what it waits for, of which these pages are to come: nothing of them is there, unless somebody else puts
    /// it in. The program does not run before what is returned has been waited for.
    ///
    /// # Errors
    /// That cannot be; there is no program then.
    fn take_over(&self, pid: u32, program: Waiting, later: &[Extent]) -> Result<Parted>;
}

/// A program whose memory waits for pages, as it was handed over ([`Place::be_served`], [`Steward::take_over`]).
#[derive(Debug)]
pub struct Waiting {
    /// What follows its memory.
    pub userfault: OwnedFd,
    /// Its pidfd.
    pub program: OwnedFd,
    /// With which it holds what follows its memory.
    pub hold: Option<OwnedFd>,
}

impl Template {
    /// For so many clones of a checkpoint.
    pub fn new(checkpoint: &Checkpoint, clones: usize) -> Result<Self> {
        let (process, space) = only_process(&checkpoint.image)?;
        let plan = Plan::lazy(space, process, checkpoint.pages.of(Owner::Space(process.space)));
        let board = Board::new(plan.pages(), plan.mappings.len(), clones)?;
        Ok(Template { plan: Arc::new(plan), board: Arc::new(board) })
    }

    pub(super) fn parts(&self) -> (Arc<Plan>, Arc<Board>) {
        (Arc::clone(&self.plan), Arc::clone(&self.board))
    }

    /// Begins to serve the clones, by their numbers; those whose memory waits for nothing are left out. `None` if there is
    /// none that waits.
    pub fn serve(
        &self,
        checkpoint: &Checkpoint,
        clones: Vec<Option<Waiting>>,
        options: &Options,
        heard: Heard<'_>,
    ) -> Result<Option<Pager>> {
        let (mut programs, mut followed) = (Vec::new(), Vec::new());
        for (number, clone) in clones.into_iter().enumerate() {
            let split = |c: Waiting| (c.userfault, Program { stock: 0, handle: c.program, hold: c.hold });
            let (userfault, program) = clone.map(split).unzip();
            followed.extend(userfault.map(|userfault| (number, userfault)));
            programs.push(program);
        }
        let Some(&(first, _)) = followed.first() else { return Ok(None) };
        let (plan, board) = self.parts();
        // What all of them have.
        let least = |tally| {
            let each = followed.iter().map(|(number, _)| board.program(*number).get(tally) as usize);
            each.min().unwrap_or(0)
        };
        let (head, done) = (least(Tally::Head), least(Tally::Touched));
        let touch = checkpoint.touch.as_ref().map(|set| Touch { set, head, done });
        let (reader, limit) = (&checkpoint.reader, options.limit);
        let is_heard = options.stdio == Stdio::Current;
        let stocks = vec![Stock::new(plan, touch)];
        let meta = &checkpoint.image.meta;
        let (origin, line, is_followed, dumps) =
            ((meta.job.clone(), meta.id, meta.taken_ns), None, false, None);
        let (is_tree, learns) = (false, options.learns);
        #[rustfmt::skip]
        let work = Work {
            stocks, reader, limit, board, dumps, programs, heard, is_heard, is_followed, learns, origin, line,
            is_tree,
        };
        let (child, parted) = keepers::start(&work, followed, None)?;
        // What clones have open is not here.
        drop(parted);
        Ok(Some(Pager { child, coming: self.coming(first), members: Vec::new() }))
    }

    /// How far the memory of a clone is.
    pub fn coming(&self, number: usize) -> Coming {
        Coming::new(&self.board, vec![number], self.plan.pages())
    }
}
