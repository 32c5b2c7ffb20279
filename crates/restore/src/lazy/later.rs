//! Setting lazy loading up in a process that is being built.

use super::board::{Board, COPIES, Count, Tally};
use super::cores;
use super::keepers;
use super::plan::Plan;
use super::template::Place;
use super::turns::monotonic_us;
use super::work::{Program, Touch, Work};
use crate::pace::Pace;
use crate::rebuild::{Heard, Lazily, Options, Progress};
use crate::{Error, Result, Stdio, loader};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use stillpoint_image::{AddressSpace, Extent, FileKind, Image, Owner, PAGE, Process, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::descriptors::duplicate_from;
use stillpoint_linux::hold;
use stillpoint_linux::line;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::Run;
use stillpoint_linux::remote::Remote;
use stillpoint_linux::supervise::Child;
use stillpoint_linux::userfault::{self, Mode, Put, Userfault};
use stillpoint_store::{Checkpoint, Reader, TouchSet};

/// So much of what was wanted first the last time is there before the program runs, bytes …
const FIRST: u64 = 2 << 20;
/// … and what more can be loaded until so long after the restore began. The rest follows at once.
const READY: Duration = Duration::from_millis(9);
/// Loaded by one thread at a time, bytes.
const PART: u64 = 256 << 10;
/// Most entries of a robust list that are followed (`ROBUST_LIST_LIMIT`).
const ROBUST: usize = 2048;

/// A process whose memory waits for pages, none of which is there yet.
pub struct Later<'a> {
    plan: Arc<Plan>,
    reader: &'a Reader,
    touch: Option<&'a TouchSet>,
    userfault: Userfault,
    /// With which the process holds it, too.
    hold: Option<OwnedFd>,
    board: Arc<Board>,
    /// Its number on the board.
    program: usize,
    served: Served<'a>,
    limit: Option<u64>,
    pace: Pace,
    is_heard: bool,
    is_followed: bool,
    origin: (String, u64),
    /// Runs of the touch set that had to be there first.
    head: usize,
}

/// Who serves it.
enum Served<'a> {
    /// Processes of its own.
    Alone(Heard<'a>),
    /// Those that serve all clones.
    Together(&'a dyn Place),
}

/// The memory of a program that comes while it runs: how far it is.
#[derive(Clone, Debug)]
pub struct Coming {
    board: Arc<Board>,
    program: usize,
    /// Pages that were not there when the program began.
    pub pages: u64,
}

impl Coming {
    pub(super) fn new(board: &Arc<Board>, program: usize, pages: u64) -> Self {
        Coming { board: Arc::clone(board), program, pages }
    }

    /// Of this program.
    pub fn tally(&self, tally: Tally) -> u64 {
        self.board.program(self.program).get(tally)
    }

    /// Of all programs that are served together.
    pub fn count(&self, count: Count) -> u64 {
        self.board.get(count)
    }

    /// When somebody waited for pages: microseconds since the program ran, and how often since the time before.
    pub fn demand_times(&self) -> Vec<(u64, u64)> {
        self.board.program(self.program).demand_times()
    }

    /// Why a page could not be had.
    pub fn failure(&self) -> Option<String> {
        self.board.program(self.program).failure()
    }

    /// The program runs.
    pub(crate) fn runs(&self, since_began: Duration) {
        self.board.program(self.program).add(Tally::RanUs, since_began.as_micros().max(1) as u64);
        self.board.add(Count::Runs, 1);
    }
}

/// What loads memory behind a program, or many, that run already.
#[derive(Debug)]
pub struct Pager {
    /// Our child, which ends when all is there.
    pub child: Child,
    /// How far it is.
    pub coming: Coming,
}

impl<'a> Later<'a> {
    /// Lets the memory of a new process, in which all is mapped and nothing filled, wait for its pages. `Err` tells why
    /// that cannot be, if it would be of use.
    pub fn begin(
        checkpoint: &'a Checkpoint,
        process: &Process,
        space: &AddressSpace,
        remote: &mut Remote<'_>,
        pidfd: BorrowedFd<'_>,
        options: &Options,
        lazily: Lazily<'a>,
    ) -> Result<Result<Self, Option<String>>> {
        let (plan, board, program, served) = match lazily {
            Lazily::Not => return Ok(Err(None)),
            Lazily::Alone(heard) => {
                let plan = Plan::lazy(space, process, checkpoint.pages.of(Owner::Space(process.space)));
                (Arc::new(plan), None, 0, Served::Alone(heard))
            }
            Lazily::Clone(template, number, place) => {
                let (plan, board) = template.parts();
                (plan, Some(board), number, Served::Together(place))
            }
        };
        if plan.later.is_empty() || plan.pages() * PAGE < options.eager_below {
            return Ok(Err(None));
        }
        if holds_memory_file(&checkpoint.image) {
            return Ok(Err(Some(
                "it holds a memory file of /proc, through which nobody waits for pages".into(),
            )));
        }
        let fd = remote.step(libc::SYS_userfaultfd, [userfault::OPEN_FLAGS, 0, 0, 0, 0, 0])?;
        if fd < 0 {
            let why = std::io::Error::from_raw_os_error(-fd as i32);
            return Ok(Err(Some(format!("its memory cannot be made to wait (userfaultfd: {why})"))));
        }
        let taken = duplicate_from(pidfd, fd as u32);
        remote.step(libc::SYS_close, [fd as u64, 0, 0, 0, 0, 0])?;
        let userfault = match taken.and_then(|fd| Userfault::new(fd, remote.pid(), Mode::Missing)) {
            Ok(userfault) => userfault,
            Err(e) => return Ok(Err(Some(e.to_string()))),
        };
        for mapping in &plan.mappings {
            userfault.register_missing(RemoteAddr(mapping.start), RemoteAddr(mapping.end()))?;
            userfault.make_dumpable(RemoteAddr(mapping.start), RemoteAddr(mapping.start + PAGE));
        }
        // Where that cannot be, those who load it hold it alone.
        let hold = hold::make(remote, pidfd, 1 + COPIES).ok();
        let hold = hold.filter(|hold| hold::put(hold, 0, Some(userfault.as_fd())).is_ok());
        let board = match board {
            Some(board) => board,
            None => Arc::new(Board::new(plan.pages(), plan.mappings.len(), 1)?),
        };
        let (reader, touch, limit) = (&checkpoint.reader, checkpoint.touch.as_ref(), options.limit);
        let is_heard = options.stdio == Stdio::Current;
        let meta = &checkpoint.image.meta;
        Ok(Ok(Later {
            plan,
            reader,
            touch,
            userfault,
            hold,
            board,
            program,
            served,
            limit,
            pace: Pace::new(limit),
            is_heard,
            is_followed: options.is_followed,
            origin: (meta.job.clone(), meta.id),
            head: 0,
        }))
    }

    /// Loads what must be there before the program runs.
    pub fn load_first(&mut self, memory: &Memory, progress: &dyn Progress) -> Result<()> {
        let (first, touch) = (&self.plan.first, &self.plan.touch);
        progress.start(first.iter().chain(touch).map(Extent::len).sum());
        if self.load_head(memory) {
            self.head = first.len() + touch.len();
            progress.advance(first.iter().chain(touch).map(Extent::len).sum());
            return Ok(());
        }
        loader::load(self.reader, first, memory, &self.pace, &|bytes| progress.advance(bytes))?;
        let mut bytes = Vec::new();
        for extent in touch {
            bytes.resize(extent.len() as usize, 0);
            self.pace.travel(extent.len());
            self.reader.read(extent, &mut bytes)?;
            self.put(extent, &bytes)?;
            progress.advance(extent.len());
        }
        Ok(())
    }

    /// Loads it from the head of the touch set, where all of it lies together after an earlier restore; false if it does not.
    fn load_head(&self, memory: &Memory) -> bool {
        let Some(set) = self.touch else { return false };
        let (first, touch) = (&self.plan.first, &self.plan.touch);
        let head = first.len() + touch.len();
        let is_there = |(run, extent): (usize, &Extent)| {
            let Range { start, len } = set.run(run);
            (start, len) == (extent.address, extent.len())
        };
        let mut bytes = Vec::new();
        let found = head <= set.len() && first.iter().chain(touch).enumerate().all(|(i, e)| is_there((i, e)));
        if !found {
            return false;
        }
        self.pace.travel(first.iter().chain(touch).map(Extent::len).sum());
        if set.read(0..head, &mut bytes).is_err() {
            return false;
        }
        let mut rest = bytes.as_slice();
        let mut parts = Vec::with_capacity(first.len());
        for extent in first {
            let (now, later) = rest.split_at(extent.len() as usize);
            rest = later;
            parts.push((RemoteAddr(extent.address), now));
        }
        if memory.write_many(&parts).is_err() {
            return false;
        }
        touch.iter().all(|extent| {
            let (now, later) = rest.split_at(extent.len() as usize);
            rest = later;
            self.put(extent, now).is_ok()
        })
    }

    fn put(&self, extent: &Extent, bytes: &[u8]) -> Result<()> {
        let at = RemoteAddr(extent.address);
        match self.userfault.put(at, bytes)? {
            Put::All | Put::Present(0) => Ok(()),
            other => Err(Error::Failed(format!("pages cannot be put in at {at}: {other:?}"))),
        }
    }

    /// Loads the beginning of what was wanted first the last time, on all processors, for as long as may be; returns the first
    /// run that it left. `began` is when the restore did.
    fn load_touched(&self, began: Instant) -> usize {
        let Some(touch) = self.touch else { return 0 };
        let parts = parts(touch, self.head);
        let (next, loaded) = (AtomicUsize::new(0), AtomicU64::new(0));
        let work = || {
            let mut bytes = Vec::new();
            while loaded.load(Ordering::Relaxed) < FIRST || began.elapsed() < READY {
                let Some(runs) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                let len = runs.clone().map(|run| touch.run(run).len).sum();
                self.pace.travel(len);
                // One that cannot be read is no loss: all is in the checkpoint, too.
                if touch.read(runs.clone(), &mut bytes).is_ok() {
                    self.put_runs(touch, runs.clone(), &bytes);
                }
                loaded.fetch_add(len, Ordering::Relaxed);
            }
        };
        let helpers = std::thread::available_parallelism().map_or(0, |n| usize::from(n) - 1);
        std::thread::scope(|scope| {
            (0..helpers.min(parts.len() / 2)).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        parts.get(next.into_inner()).map_or(touch.len(), |left| left.start)
    }

    /// Puts in what of some runs is still missing; these are their contents.
    fn put_runs(&self, touch: &TouchSet, runs: std::ops::Range<usize>, bytes: &[u8]) {
        let settled = self.board.space(self.program).settled();
        let mut at = 0;
        for run in runs.map(|run| touch.run(run)) {
            for index in self.plan.extents_in(run.start, run.end()) {
                let extent = &self.plan.later[index];
                let (from, to) = (run.start.max(extent.address), run.end().min(extent.end()));
                let pages = self.plan.page(index, from)..self.plan.page(index, to);
                let here = &bytes[(at + from - run.start) as usize..(at + to - run.start) as usize];
                if settled.unset(pages.clone()) == Some(pages.clone())
                    && matches!(self.userfault.put(RemoteAddr(from), here), Ok(Put::All))
                {
                    self.board.program(self.program).add(Tally::Before, settled.set(pages));
                }
            }
            at += run.len;
        }
    }

    /// Begins to load the rest. `began` is when the restore did. Returns the first process that does, if it is ours.
    pub fn start(
        self,
        memory: &Memory,
        process: &Process,
        pidfd: BorrowedFd<'_>,
        began: Instant,
    ) -> Result<(Coming, Option<Child>)> {
        let done = self.load_touched(began);
        // What comes from now on is referenced from the beginning.
        let _ = Proc::process(memory.pid()).and_then(|process| process.forget_references());
        let Later { plan, reader, touch, userfault, hold, board, program, served, limit, .. } = self;
        let (is_heard, is_followed, origin, head) = (self.is_heard, self.is_followed, self.origin, self.head);
        board.space(program).set_placement(&plan.placement())?;
        let coming = Coming::new(&board, program, plan.pages());
        let child = match served {
            Served::Alone(heard) => {
                let handle = pidfd.try_clone_to_owned().map_err(|e| Error::Failed(format!("dup: {e}")))?;
                let touch = touch.map(|set| Touch { set, head, done });
                let (order, line) = (plan.order(), line::listen(pidfd));
                let dumps = Some(cores::Origin::new(memory.pid(), process.pid));
                let programs = vec![Some(Program { handle, hold })];
                #[rustfmt::skip]
                let work = Work {
                    plan, order, reader, touch, limit, board, dumps, programs, heard, is_heard, is_followed, origin, line,
                };
                Some(keepers::start(&work, vec![(0, userfault.into_fd())], Some(began.elapsed()))?)
            }
            Served::Together(place) => {
                let tallies = board.program(program);
                tallies.add(Tally::Head, head as u64);
                tallies.add(Tally::Touched, done as u64);
                tallies
                    .add(Tally::BeganUs, monotonic_us().saturating_sub(began.elapsed().as_micros() as u64));
                place.be_served(userfault.as_fd(), pidfd, hold.as_ref().map(AsFd::as_fd))?;
                // From now on it is theirs.
                drop((userfault, hold));
                None
            }
        };
        touch_robust_lists(memory, process)?;
        Ok((coming, child))
    }
}

/// The runs of a touch set behind `head`, in order, some together.
fn parts(touch: &TouchSet, head: usize) -> Vec<std::ops::Range<usize>> {
    let mut parts: Vec<std::ops::Range<usize>> = Vec::new();
    let mut bytes = PART;
    for run in head..touch.len() {
        match parts.last_mut().filter(|_| bytes < PART) {
            Some(last) => last.end = run + 1,
            None => {
                parts.push(run..run + 1);
                bytes = 0;
            }
        }
        bytes += touch.run(run).len;
    }
    parts
}

/// Whether there is a descriptor of some process's memory. Whoever reads or writes pages through it that are not there gets
/// `EIO`: there the kernel does not wait.
fn holds_memory_file(image: &Image) -> bool {
    image.files.iter().any(|file| match file.kind {
        FileKind::Proc(row) => image.paths.get(row as usize).is_some_and(|p| p.path.0.ends_with(b"/mem")),
        _ => false,
    })
}

/// Sees to it that the entries of robust lists are there: the kernel walks these when a thread ends, and does not wait then.
/// To look at them is to load them.
fn touch_robust_lists(memory: &Memory, process: &Process) -> Result<()> {
    for head in process.threads.iter().map(|t| t.robust_list.start).filter(|&head| head != 0) {
        // struct robust_list_head: the first entry, the offset of the lock in an entry, the entry that is being added.
        let offset = memory.read_u64(RemoteAddr(head + 8))?;
        let pending = memory.read_u64(RemoteAddr(head + 16))?;
        let mut entry = memory.read_u64(RemoteAddr(head))?;
        let look = |entry: u64| {
            // The lowest bit tells the kind of lock. What cannot be read is none of the kernel's concern either.
            let at = entry & !1;
            let _ = memory.read_u64(RemoteAddr(at.wrapping_add(offset)));
            memory.read_u64(RemoteAddr(at)).unwrap_or(head)
        };
        if pending != 0 {
            look(pending);
        }
        for _ in 0..ROBUST {
            if entry & !1 == head || entry == 0 {
                break;
            }
            entry = look(entry);
        }
    }
    Ok(())
}
