//! Setting lazy loading up in a process that is being built.

use super::board::{Board, COPIES, Count, Tally};
use super::cores;
use super::keepers::{self, Parted};
use super::plan::Plan;
use super::template::{Place, Steward, Waiting};
use super::turns::monotonic_us;
use super::work::{self, Stock, Touch, Work};
use crate::pace::{Pace, Rate, is_slow};
use crate::rebuild::{Heard, Lazily, Options};
use crate::{Error, Result, Stdio, loader};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use stillpoint_image::{AddressSpace, Extent, FileKind, Image, PAGE, Process, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::descriptors::{self, duplicate_from, pidfd_open};
use stillpoint_linux::hold;
use stillpoint_linux::host;
use stillpoint_linux::line;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::remote::Remote;
use stillpoint_linux::supervise::Child;
use stillpoint_linux::userfault::{self, Mode, Put, Userfault};
use stillpoint_store::{Checkpoint, Reader, TouchSet};

/// So much of what was wanted first the last time is there before the program runs, bytes …
const FIRST: u64 = 2 << 20;
/// … and what more can be loaded in this part of the time that all but memory took; where it is known that the program waits for it,
/// all, if that can be had quickly. The rest follows at once.
const PART_OF_SKELETON: u32 = 2;
/// Loaded by one thread at a time, bytes.
const PART: u64 = 256 << 10;
/// Most entries of a robust list that are followed (`ROBUST_LIST_LIMIT`).
const ROBUST: usize = 2048;

/// In a tree, a process with less than this part of what may be loaded first has all of it first.
const SMALL: u64 = 8;
/// To let the memory of another process wait takes as long as to load so much of it, bytes.
const EACH: u64 = 3 << 20;
/// So many descriptors of ours, and more, a process takes whose memory waits.
const DESCRIPTORS: u64 = 16;

/// Processes whose memory waits for pages, none of which is there yet.
pub struct Later<'a> {
    /// All processes of the program, by row.
    members: Vec<Option<Member>>,
    reader: &'a Reader,
    touch: Option<&'a TouchSet>,
    board: Arc<Board>,
    served: Served<'a>,
    limit: Option<u64>,
    pace: Pace,
    is_heard: bool,
    is_followed: bool,
    learns: bool,
    origin: (String, u64, u64),
    /// Runs of the touch set that had to be there first.
    head: AtomicUsize,
}

/// One of them.
struct Member {
    plan: Arc<Plan>,
    userfault: Userfault,
    /// With which the process holds it, too.
    hold: Option<OwnedFd>,
    /// Its pidfd.
    handle: OwnedFd,
    /// Its number on the board.
    program: usize,
}

/// Who serves it.
enum Served<'a> {
    /// Processes of its own.
    Alone(Heard<'a>),
    /// Those that serve all clones.
    Together(&'a dyn Place),
    /// Those who page it from then on.
    Paged(&'a dyn Steward),
}

/// The memory of a program that comes while it runs: how far it is.
#[derive(Clone, Debug)]
pub struct Coming {
    board: Arc<Board>,
    /// Its processes that wait for pages, by their numbers on the board.
    programs: Vec<usize>,
    /// Pages that were not there when the program began.
    pub pages: u64,
}

impl Coming {
    pub(super) fn new(board: &Arc<Board>, programs: Vec<usize>, pages: u64) -> Self {
        Coming { board: Arc::clone(board), programs, pages }
    }

    /// Of all its processes together.
    pub fn tally(&self, tally: Tally) -> u64 {
        let each = || self.programs.iter().map(|&number| self.board.program(number).get(tally));
        match tally {
            Tally::LoadedUs => {
                let waits = |&number: &usize| {
                    let is_loaded = self.board.program(number).get(tally) > 0;
                    !is_loaded && self.board.space(number).descriptor().is_some()
                };
                each().max().filter(|_| !self.programs.iter().any(waits)).unwrap_or(0)
            }
            // One more than a number, if that is known.
            Tally::InVain if each().any(|n| n == 0) => 0,
            Tally::InVain => 1 + each().map(|n| n - 1).sum::<u64>(),
            Tally::BeganUs | Tally::RanUs => each().max().unwrap_or(0),
            _ => each().sum(),
        }
    }

    /// Of all programs that are served together.
    pub fn count(&self, count: Count) -> u64 {
        self.board.get(count)
    }

    /// When somebody waited for pages: microseconds since the program ran, and how often since the time before.
    pub fn demand_times(&self) -> Vec<(u64, u64)> {
        let mut times: Vec<(u64, u64)> = Vec::new();
        let mut all: Vec<_> =
            self.programs.iter().flat_map(|&number| self.board.program(number).demand_times()).collect();
        all.sort_unstable();
        for (until, often) in all {
            match times.last_mut().filter(|last| last.0 == until) {
                Some(last) => last.1 += often,
                None => times.push((until, often)),
            }
        }
        times
    }

    /// Why a page could not be had.
    pub fn failure(&self) -> Option<String> {
        self.programs.iter().find_map(|&number| self.board.program(number).failure())
    }

    /// The program runs.
    pub(crate) fn runs(&self, since_began: Duration) {
        let us = since_began.as_micros().max(1) as u64;
        self.programs.iter().for_each(|&number| self.board.program(number).add(Tally::RanUs, us));
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
    /// The processes of a tree, root first: ids in our pid namespace, and pidfds.
    pub members: Vec<(u32, OwnedFd)>,
}

/// Who brings memory that comes later, if they are ours, and when those who do have parted from us.
pub type Begun = (Option<Pager>, Option<Parted>);

impl<'a> Later<'a> {
    /// Lets the memory of new processes, in which all is mapped, and nothing filled but what is inherited, wait for its pages;
    /// `rows`, with the pages that are to come, and `remotes` are all of the program. None if nothing is to wait; with notes that
    /// tell where that cannot be, if it would be of use.
    pub fn begin(
        checkpoint: &'a Checkpoint,
        rows: &[(&Process, &AddressSpace, &[Extent])],
        remotes: &mut [Remote<'_>],
        options: &Options,
        lazily: Lazily<'a>,
    ) -> Result<(Option<Self>, Vec<String>)> {
        let (plans, board, first, served) = match lazily {
            Lazily::Not => return Ok((None, Vec::new())),
            Lazily::Alone(heard) => {
                let plan = |(process, space, extents): &(&Process, &AddressSpace, &[Extent])| {
                    // Who loads it tells processes apart, and there it would have several.
                    if rows.iter().filter(|(other, ..)| other.space == process.space).count() > 1 {
                        return Arc::default();
                    }
                    Arc::new(Plan::lazy(space, process, extents))
                };
                (rows.iter().map(plan).collect::<Vec<_>>(), None, 0, Served::Alone(heard))
            }
            Lazily::Clone(template, number, place) => {
                let (plan, board) = template.parts();
                (vec![plan], Some(board), number, Served::Together(place))
            }
            Lazily::Paged(steward) => {
                let [(process, space, extents)] = rows else {
                    let why = "all of its memory was loaded first: of several processes one is paged";
                    return Ok((None, vec![why.into()]));
                };
                (vec![Arc::new(Plan::paged(space, process, extents))], None, 0, Served::Paged(steward))
            }
        };
        let pages: u64 = plans.iter().map(|plan| plan.pages()).sum();
        let others = if options.eager_below == 0 { 0 } else { rows.len() as u64 - 1 };
        if pages == 0 || pages * PAGE < options.eager_below + others * EACH {
            return Ok((None, Vec::new()));
        }
        if holds_memory_file(&checkpoint.image) {
            let why = "all of its memory was loaded first: it holds a memory file of /proc, through which nobody waits \
                       for pages";
            return Ok((None, vec![why.into()]));
        }
        if descriptors::raise_descriptor_limit().is_ok_and(|(_, most)| rows.len() as u64 * DESCRIPTORS > most)
        {
            let why = "all of its memory was loaded first: so many processes take more descriptors than there may be";
            return Ok((None, vec![why.into()]));
        }
        let least = if rows.len() > 1 { options.eager_below / SMALL } else { options.eager_below };
        let board = match board {
            Some(board) => board,
            None => {
                let pages = plans.iter().map(|plan| plan.pages()).max().unwrap_or(0);
                let mappings = plans.iter().map(|plan| plan.mappings.len()).max().unwrap_or(0);
                Arc::new(Board::new(pages, mappings, rows.len())?)
            }
        };
        let (mut members, mut reasons) = (Vec::with_capacity(plans.len()), BTreeSet::new());
        for ((row, plan), remote) in plans.into_iter().enumerate().zip(remotes) {
            let waits = plan.pages() > 0 && plan.pages() * PAGE >= least;
            let made = waits.then(|| Member::make(plan, first + row, remote)).transpose()?;
            let made = made.map(|made| made.and_then(|member| served.suits(member)));
            members.push(made.and_then(|made| made.map_err(|why| reasons.insert(why)).ok()));
        }
        let nothing_waits = members.iter().all(Option::is_none);
        let how_much = if nothing_waits { "all" } else { "some" };
        let note = |why| format!("{how_much} of its memory was loaded first: {why}");
        let notes = reasons.into_iter().map(note).collect();
        if nothing_waits {
            return Ok((None, notes));
        }
        // What is wanted first is told apart by addresses only.
        // Who pages it must be told all that is there.
        let is_paged = matches!(served, Served::Paged(_));
        let touch = checkpoint.touch.as_ref().filter(|_| rows.len() == 1 && !is_paged);
        let meta = &checkpoint.image.meta;
        let later = Later {
            members,
            reader: &checkpoint.reader,
            touch,
            board,
            served,
            limit: options.limit,
            pace: Pace::new(options.limit),
            is_heard: options.stdio == Stdio::Current,
            is_followed: options.is_followed && rows.len() == 1,
            learns: options.learns,
            origin: (meta.job.clone(), meta.id, meta.taken_ns),
            head: AtomicUsize::new(0),
        };
        Ok((Some(later), notes))
    }

    /// Whether the memory of this process waits for pages.
    pub fn has(&self, row: usize) -> bool {
        self.members[row].is_some()
    }

    /// What must be there of a process before the program runs, bytes.
    pub fn first_bytes(&self, row: usize) -> u64 {
        let first = |member: &Member| {
            let extents = member.plan.first.iter().chain(&member.plan.touch);
            extents.map(Extent::len).sum()
        };
        self.members[row].as_ref().map_or(0, first)
    }

    /// Loads that. `done` hears how much is there.
    pub fn load_first(&self, row: usize, memory: &Memory, done: &(dyn Fn(u64) + Sync)) -> Result<()> {
        let Some(member) = &self.members[row] else { return Ok(()) };
        let (first, touch) = (&member.plan.first, &member.plan.touch);
        if self.load_head(member, memory) {
            self.head.store(first.len() + touch.len(), Ordering::Relaxed);
            done(first.iter().chain(touch).map(Extent::len).sum());
            return Ok(());
        }
        loader::load(self.reader, first, memory, &self.pace, done)?;
        let mut bytes = Vec::new();
        for extent in touch {
            bytes.resize(extent.len() as usize, 0);
            self.pace.travel(extent.len());
            self.reader.read(extent, &mut bytes)?;
            member.put(extent, &bytes)?;
            done(extent.len());
        }
        Ok(())
    }

    /// Loads it from the head of the touch set, where all of it lies together after an earlier restore; false if it does not.
    fn load_head(&self, member: &Member, memory: &Memory) -> bool {
        let Some(set) = self.touch else { return false };
        let (first, touch) = (&member.plan.first, &member.plan.touch);
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
            member.put(extent, now).is_ok()
        })
    }

    /// Loads what was wanted first the last time, on all processors; returns the first run that it left. `began` is when the restore did.
    ///
    /// What the program is known to wait for takes less time before it runs than beside it, from a store that is nearly as fast as
    /// memory; from a slower one, some of it may come while it does something else.
    fn load_touched(&self, began: Instant) -> usize {
        let (Some(touch), Some(member)) = (self.touch, self.members.iter().flatten().next()) else {
            return 0;
        };
        let head = self.head.load(Ordering::Relaxed);
        let parts = parts(touch, head);
        // What many clones want they load at the same time.
        let is_learnt = work::is_learnt(touch, head) && matches!(self.served, Served::Alone(_));
        let (reading, putting) = (Rate::default(), Rate::default());
        let (skeleton, since) = (began.elapsed(), Instant::now());
        let (next, loaded, failed) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let may_run = || {
            let is_due =
                loaded.load(Ordering::Relaxed) >= FIRST && since.elapsed() > skeleton / PART_OF_SKELETON;
            // Where processors are few, most take longer than they would.
            let is_slow = || is_slow(reading.best(), putting.best());
            is_due && (!is_learnt || failed.load(Ordering::Relaxed) || is_slow())
        };
        let work = || {
            let mut bytes = Vec::new();
            while !may_run() {
                let Some(runs) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                let len = runs.clone().map(|run| touch.run(run).len).sum();
                let asked = Instant::now();
                self.pace.travel(len);
                // One that cannot be read is no loss: all is in the checkpoint, too.
                if touch.read(runs.clone(), &mut bytes).is_ok() {
                    let read = Instant::now();
                    reading.note(len, read - asked);
                    let put = self.put_runs(member, touch, runs.clone(), &bytes);
                    if put > 0 {
                        putting.note(put, read.elapsed());
                    }
                } else {
                    failed.store(true, Ordering::Relaxed);
                }
                loaded.fetch_add(len, Ordering::Relaxed);
            }
        };
        let helpers = host::processors() - 1;
        std::thread::scope(|scope| {
            let others: Vec<_> = (0..helpers.min(parts.len() / 2)).map(|_| scope.spawn(work)).collect();
            work();
            // Nobody may be about to end when this process is copied; the end of the scope is not that of its threads.
            others.into_iter().for_each(|other| drop(other.join()));
        });
        parts.get(next.into_inner()).map_or(touch.len(), |left| left.start)
    }

    /// Puts in what of some runs is still missing; these are their contents. Returns how many bytes that was.
    fn put_runs(&self, member: &Member, touch: &TouchSet, runs: std::ops::Range<usize>, bytes: &[u8]) -> u64 {
        let Member { plan, program, userfault, .. } = member;
        let settled = self.board.space(*program).settled();
        let (mut at, mut put) = (0, 0);
        for run in runs.map(|run| touch.run(run)) {
            for index in plan.extents_in(run.start, run.end()) {
                let extent = &plan.later[index];
                let (from, to) = (run.start.max(extent.address), run.end().min(extent.end()));
                let pages = plan.page(index, from)..plan.page(index, to);
                let here = &bytes[(at + from - run.start) as usize..(at + to - run.start) as usize];
                if settled.unset(pages.clone()) == Some(pages.clone())
                    && matches!(userfault.put(RemoteAddr(from), here), Ok(Put::All))
                {
                    let pages = settled.set(pages);
                    self.board.program(*program).add(Tally::Before, pages);
                    put += pages * PAGE;
                }
            }
            at += run.len;
        }
        put
    }

    /// Begins to load the rest of these processes, which are all of the program. `began` is when the restore did. Returns also
    /// who does, if they are ours; the program is not to run before they have parted from us.
    pub fn start(self, processes: &[(&Memory, &Process)], began: Instant) -> Result<(Coming, Begun)> {
        let done = self.load_touched(began);
        let Later { members, reader, touch, board, served, limit, .. } = self;
        let (is_heard, is_followed, learns, origin, head) =
            (self.is_heard, self.is_followed, self.learns, self.origin, self.head.into_inner());
        let waiting = members.iter().flatten();
        for (member, (memory, _)) in members.iter().zip(processes) {
            let Some(member) = member else { continue };
            // What comes from now on is referenced from the beginning.
            let _ = Proc::process(memory.pid()).and_then(|process| process.forget_references());
            board.space(member.program).set_placement(&member.plan.placement())?;
        }
        let pages = waiting.clone().map(|member| member.plan.pages()).sum();
        let coming = Coming::new(&board, waiting.map(|member| member.program).collect(), pages);
        let waits: Vec<bool> = members.iter().map(Option::is_some).collect();
        let pager = match served {
            Served::Alone(heard) => {
                let is_tree = members.len() > 1;
                let everybody = match is_tree {
                    true => everybody(processes)?,
                    false => Vec::new(),
                };
                // Whose core dumps are seen to.
                let root = processes.first().filter(|_| waits[0]);
                let dumps = root.map(|(memory, process)| cores::Origin::new(memory.pid(), process.own_pid()));
                let alone = members.first().and_then(Option::as_ref).filter(|_| !is_tree);
                let line = alone.and_then(|member| line::listen(member.handle.as_fd()));
                let touch = touch.map(|set| Touch { set, head, done });
                let (mut stocks, mut programs, mut followed) = (Vec::new(), Vec::new(), Vec::new());
                for member in members {
                    let program = member.map(|Member { plan, userfault, hold, handle, program }| {
                        let stock = stocks.len();
                        stocks.push(Stock::new(plan, touch));
                        followed.push((program, userfault.into_fd()));
                        work::Program { stock, handle, hold }
                    });
                    programs.push(program);
                }
                #[rustfmt::skip]
                let work = Work {
                    stocks, reader, limit, board, dumps, programs, heard, is_heard, is_followed, learns, origin, line,
                    is_tree,
                };
                let (child, parted) = keepers::start(&work, followed, Some(began.elapsed()))?;
                let (coming, members) = (coming.clone(), everybody);
                (Some(Pager { child, coming, members }), Some(parted))
            }
            Served::Together(place) => {
                for Member { userfault, hold, handle, program, .. } in members.into_iter().flatten() {
                    let tallies = board.program(program);
                    tallies.add(Tally::Head, head as u64);
                    tallies.add(Tally::Touched, done as u64);
                    let elapsed = began.elapsed().as_micros() as u64;
                    tallies.add(Tally::BeganUs, monotonic_us().saturating_sub(elapsed));
                    place.be_served(userfault.as_fd(), handle.as_fd(), hold.as_ref().map(AsFd::as_fd))?;
                    // From now on it is theirs.
                }
                (None, None)
            }
            Served::Paged(steward) => {
                let member = members.into_iter().flatten().zip(processes).next();
                let taken = member.map(|(Member { plan, userfault, hold, handle, .. }, (memory, _))| {
                    let waiting = Waiting { userfault: userfault.into_fd(), program: handle, hold };
                    steward.take_over(memory.pid(), waiting, &plan.later)
                });
                (None, taken.transpose()?)
            }
        };
        for ((memory, process), _) in processes.iter().zip(waits).filter(|(_, waits)| *waits) {
            touch_robust_lists(memory, process)?;
        }
        Ok((coming, pager))
    }
}

impl Served<'_> {
    /// A process that can be served so; or why it cannot.
    fn suits(&self, member: Member) -> std::result::Result<Member, String> {
        match self {
            // If all who page it were killed at once, it would go on with zeros.
            Served::Paged(_) if member.hold.is_none() => {
                Err("it cannot hold what follows its memory (io_uring, kernel.io_uring_disabled)".into())
            }
            _ => Ok(member),
        }
    }
}

impl Member {
    /// Lets the memory of a process wait; or tells why that cannot be.
    fn make(
        plan: Arc<Plan>,
        program: usize,
        remote: &mut Remote<'_>,
    ) -> Result<std::result::Result<Self, String>> {
        let handle = match pidfd_open(remote.tid(), 0) {
            Ok(handle) => handle,
            Err(e) => return Ok(Err(e.to_string())),
        };
        let mut making = Program::new();
        let followed =
            making.attempt("userfaultfd", libc::SYS_userfaultfd, [Arg::Value(userfault::OPEN_FLAGS)]);
        let ring = hold::make(&mut making);
        let made = remote.run(&making)?.results;
        let [fd, ring] = [followed, ring].map(|step| made[step.0 as usize]);
        let taken = u32::try_from(fd).map(|fd| duplicate_from(handle.as_fd(), fd));
        // Where that cannot be, those who load it hold it alone.
        let hold = hold::take(handle.as_fd(), ring, 1 + COPIES).ok();
        let mut closing = Program::new();
        let held = u32::try_from(ring).ok().map(|ring| hold::keep(&mut closing, ring));
        if fd >= 0 {
            closing.call("close", libc::SYS_close, [Arg::Value(fd as u64)]);
        }
        let closed = remote.run(&closing)?.results;
        let is_held = held.is_some_and(|held| closed[held.0 as usize] == 1);
        let Ok(taken) = taken else {
            let why = std::io::Error::from_raw_os_error(-fd as i32);
            return Ok(Err(format!("its memory cannot be made to wait (userfaultfd: {why})")));
        };
        let userfault = match taken.and_then(|fd| Userfault::new(fd, remote.tid(), Mode::Missing)) {
            Ok(userfault) => userfault,
            Err(e) => return Ok(Err(e.to_string())),
        };
        for mapping in &plan.mappings {
            userfault.register_missing(RemoteAddr(mapping.start), RemoteAddr(mapping.end()))?;
            userfault.make_dumpable(RemoteAddr(mapping.start), RemoteAddr(mapping.start + PAGE));
        }
        let hold = hold.filter(|hold| is_held && hold::put(hold, 0, Some(userfault.as_fd())).is_ok());
        Ok(Ok(Member { plan, userfault, hold, handle, program }))
    }

    fn put(&self, extent: &Extent, bytes: &[u8]) -> Result<()> {
        let at = RemoteAddr(extent.address);
        match self.userfault.put(at, bytes)? {
            Put::All | Put::Present(0) => Ok(()),
            other => Err(Error::Failed(format!("pages cannot be put in at {at}: {other:?}"))),
        }
    }
}

/// Handles to all processes of a tree.
fn everybody(processes: &[(&Memory, &Process)]) -> Result<Vec<(u32, OwnedFd)>> {
    let handle = |(memory, _): &(&Memory, &Process)| Ok((memory.pid(), pidfd_open(memory.pid(), 0)?));
    processes.iter().map(handle).collect()
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
