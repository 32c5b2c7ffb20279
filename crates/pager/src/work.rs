//! What those who page a program's memory work with, and how they begin.

use crate::cells::{Cells, Word};
use crate::origin::Source;
use crate::server;
use crate::slots::Sums;
use crate::table::{At, Entry, Table};
use crate::{Error, Result};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::process::{Signal, pidfd_send_signal};
use std::os::unix::net::UnixListener;
use std::sync::{Mutex, PoisonError};
use stillpoint_image::{Extent, PAGE, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::descriptors::{pidfd_open, poll_now};
use stillpoint_linux::line;
use stillpoint_linux::pager::Role;
use stillpoint_linux::supervise::Child;
use stillpoint_linux::userfault::Userfault;
use stillpoint_restore::lazy::board::Board;
use stillpoint_restore::lazy::claim::Claim;
use stillpoint_restore::lazy::keepers::{self, Duty};
use stillpoint_restore::lazy::{Parted, Served, Steward, Waiting};
use stillpoint_store::{Paged, Paging, Pinned, Reader, Store, Working};

/// Least that a program may be left, bytes.
pub const LEAST: u64 = 1 << 20;
/// One part in so many of the limit is taken out at a time …
const PART: u64 = 16;
/// … but at least, and at most, so much, bytes.
const AT_A_TIME: std::ops::RangeInclusive<u64> = (128 << 10)..=(4 << 20);

/// Who hears how it fares: what it has come to, at most once a second, and at once what is wrong.
pub type Heard = Box<dyn Fn(&Paging) + Send + Sync>;

/// All that they work with.
pub(crate) struct Work<'a> {
    /// Who serves, and what happens to the program's memory and that of its copies.
    pub board: Board,
    /// Where its pages are.
    pub table: Table,
    /// Checksums of slots.
    pub sums: Sums,
    /// What is on its way.
    pub cells: Cells,
    /// Where it goes.
    pub working: Working,
    /// What has not been wanted since the program was restored.
    pub origin: Option<Source<'a>>,
    /// The program.
    pub pid: u32,
    /// Its pidfd.
    pub program: OwnedFd,
    /// Where whoever takes checkpoints calls.
    pub line: Option<UnixListener>,
    /// The job.
    pub job: String,
    /// Its folder: device and inode number.
    pub folder: (u64, u64),
    /// Most that its private memory is to take, bytes.
    pub limit: u64,
    /// Who hears how it fares.
    pub heard: Heard,
}

/// Those who page a program's memory.
#[derive(Debug)]
pub struct Pagers {
    /// The first of them, a child of ours. It ends when the program has.
    pub child: Child,
    board: Board,
}

impl Pagers {
    /// Whether the program would wait for ever for what it misses if none of them is left.
    pub fn are_needed(&self) -> bool {
        self.board.space(0).descriptor().is_some()
    }
}

/// Begins to keep the private memory of a job's process within a limit, bytes. To be called while no other thread of ours holds a
/// lock.
///
/// # Errors
/// What those who do it need cannot be had.
pub fn start(store: &Store, job: &str, pid: u32, limit: u64, heard: Heard) -> Result<Pagers> {
    let work = Work::of(store, job, pid, pidfd_open(pid, 0)?, limit, heard)?;
    let (child, parted) = keepers::start(&work, Vec::new(), None)?;
    // Of the program nothing is open here but a handle.
    drop(parted);
    Ok(Pagers { child, board: work.board })
}

/// Those who page a program from its restore on: what is in its checkpoint counts as taken out, and is left where it is.
pub struct Restoring<'a> {
    store: &'a Store,
    job: &'a str,
    limit: u64,
    heard: Mutex<Option<Heard>>,
    reader: &'a Reader,
    pinned: Pinned,
    pagers: Mutex<Option<Pagers>>,
}

impl<'a> Restoring<'a> {
    /// For a checkpoint of the job, whose segments are to be left as they are.
    pub fn new(
        store: &'a Store,
        job: &'a str,
        limit: u64,
        heard: Heard,
        reader: &'a Reader,
        pinned: Pinned,
    ) -> Self {
        let (heard, pagers) = (Mutex::new(Some(heard)), Mutex::new(None));
        Restoring { store, job, limit, heard, reader, pinned, pagers }
    }

    /// They, if they have taken the program over.
    pub fn pagers(self) -> Option<Pagers> {
        self.pagers.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, pid: u32, program: Waiting, later: &[Extent]) -> Result<Parted> {
        let Waiting { userfault, program, hold } = program;
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner).take();
        let heard = heard.ok_or_else(|| Error::Failed("it has been taken over already".into()))?;
        let mut work = Work::of(self.store, self.job, pid, program, self.limit, heard)?;
        let origin = Source::new(self.reader, later, &self.pinned);
        let table = work.table.view();
        for page in origin.pages() {
            table.set(0, page * PAGE, Entry::Stored { at: At::Origin(page), is_in: false })?;
        }
        drop(table);
        let ranges: Vec<Range> = origin.pages().map(|page| Range { start: page * PAGE, len: PAGE }).collect();
        work.mark(&Userfault::from_shared(userfault.as_raw_fd()), ranges);
        work.origin = Some(origin);
        work.cells.keep(Word::Ring, hold.as_ref().map(AsFd::as_fd));
        let (child, parted) = keepers::start(&work, vec![(0, userfault)], None)?;
        // From now on what follows the program is theirs, and so is the ring.
        let pagers = Pagers { child, board: work.board };
        *self.pagers.lock().unwrap_or_else(PoisonError::into_inner) = Some(pagers);
        Ok(parted)
    }
}

impl Steward for Restoring<'_> {
    fn take_over(
        &self,
        pid: u32,
        program: Waiting,
        later: &[Extent],
    ) -> Result<Parted, stillpoint_restore::Error> {
        Ok(self.begin(pid, program, later)?)
    }
}

impl std::fmt::Debug for Restoring<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Restoring({}, within {} bytes)", self.job, self.limit)
    }
}

impl<'a> Work<'a> {
    fn of(store: &Store, job: &str, pid: u32, program: OwnedFd, limit: u64, heard: Heard) -> Result<Self> {
        if limit < LEAST {
            return Err(Error::Failed(format!("a program cannot be kept within {limit} bytes")));
        }
        let at_a_time = (limit / PART).clamp(*AT_A_TIME.start(), *AT_A_TIME.end());
        Ok(Work {
            board: Board::new(0, 1, 1)?,
            table: Table::new()?,
            sums: Sums::new()?,
            cells: Cells::new((at_a_time / PAGE) as usize)?,
            working: store.working(job)?,
            origin: None,
            line: line::listen(program.as_fd()),
            program,
            pid,
            job: job.to_owned(),
            folder: store.place(job)?,
            limit,
            heard,
        })
    }

    /// Most that is taken out at a time, pages.
    pub fn at_a_time(&self) -> usize {
        self.cells.len()
    }

    /// Marks the places of pages that are out: whoever drops one takes its mark as well, told of by an event or not
    /// (`Server::forget_dropped`). The mark is the kernel's for what is to be protected when it comes.
    pub fn mark(&self, userfault: &Userfault, pages: Vec<Range>) {
        let protect = |run: &Range| userfault.protect(RemoteAddr(run.start), RemoteAddr(run.end()));
        if Range::joined(pages).iter().any(|run| protect(run).is_err()) {
            // A page without one would be taken for dropped.
            self.cells.set(Word::Unmarked, 1);
        }
    }

    /// What it has come to.
    pub fn paged(&self) -> Paged {
        let count = |word| self.cells.get(word);
        Paged {
            out: count(Word::Out),
            written: count(Word::Written),
            back: count(Word::In),
            stops: count(Word::Stops),
            stopped_ns: count(Word::StoppedUs) * 1000,
            waited_ns: count(Word::WaitedUs) * 1000,
        }
    }

    /// The same with the limit.
    pub fn paging(&self) -> Paging {
        Paging { limit: Some(self.limit), paged: self.paged(), ..Paging::default() }
    }

    /// Whether the program has ended.
    pub fn has_ended(&self) -> bool {
        poll_now(&self.program, libc::POLLIN).is_ok_and(|events| events != 0)
    }

    /// The program cannot go on.
    pub fn give_up(&self, why: &str) {
        (self.heard)(&Paging { trouble: Some(why.into()), ..self.paging() });
        // Fails if it has ended by itself.
        let _ = pidfd_send_signal(&self.program, Signal::KILL);
    }
}

impl Duty for Work<'_> {
    fn board(&self) -> &Board {
        &self.board
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = self.working.descriptors();
        all.push(self.program.as_fd());
        all.extend(self.origin.iter().flat_map(Source::descriptors));
        all.extend(self.line.as_ref().map(AsFd::as_fd));
        all.extend(
            [Word::Ring, Word::AsideFollowed].into_iter().filter_map(|word| self.cells.descriptor(word)),
        );
        all
    }

    fn is_heard(&self) -> bool {
        false
    }

    fn role(&self) -> Role {
        Role::Pages
    }

    fn serve(&self, by: &[BorrowedFd<'_>], claim: &mut Claim) -> Result<Served, stillpoint_restore::Error> {
        Ok(server::serve(self, by, claim)?)
    }

    fn give_up(&self, why: &stillpoint_restore::Error) {
        Work::give_up(self, &format!("its memory cannot be paged: {why}"));
    }
}
