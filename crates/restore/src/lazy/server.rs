//! The page server: puts pages where they are waited for, and the others behind them in a row.
//!
//! One thread reads what happens and serves those who wait; others fill in the rest. What each needs to know outlives it
//! on the [`super::board`].

use super::board::{Bits, Count, EVENTS, Tally};
use super::claim::{Claim, Moves};
use super::cores::{Core, Cores};
use super::placement::{Piece, Placement};
use super::plan::Plan;
use super::rhythm::Rhythm;
use super::sums::Sums;
use super::turns::{Prompt, Turn, at_once, monotonic_us};
use super::wanted::{Wanted, around};
use super::work::{Program, Stock, Touch, Work};
use crate::loader::block;
use crate::pace::{Pace, Rate, is_slow};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::Scope;
use std::time::{Duration, Instant};
use stillpoint_image::{PAGE, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::hold::Queue;
use stillpoint_linux::host;
use stillpoint_linux::line::{Mark, Origin, Request, State};
use stillpoint_linux::pager::{self, Role};
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::sched::{self, SchedAttr};
use stillpoint_linux::spawn::ADDRESS_SPACE;
use stillpoint_linux::split;
use stillpoint_linux::userfault::{EVENT_WORDS, Event, Put, SharedUserfault, Userfault, logged};

/// Pages of zeros that are put in together.
const ZEROS: u64 = 16;
/// Most of what must be there first that is kept in a touch set, bytes.
const HEAD: u64 = 32 << 20;
/// Runs of the touch set that are put in together.
const TOGETHER: usize = 16;
/// How long a page that cannot be read is tried again.
const PATIENCE: Duration = Duration::from_secs(2);
/// Until what could not be had is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Put in at a time by those who fill in ahead, bytes: whoever waits does not wait long for that.
const AT_A_TIME: usize = 64 << 10;
/// A program that has not waited for any page for so long has what it wants for now.
const CALM_US: u64 = 5_000;
/// Of what takes that long the rest is spared for at most this part of the time that it takes …
const PART: u64 = 4;
/// … of what does not, for so many halves of that, while it is learnt what the program wants first …
const LEARNING: u64 = 6;
/// … once that has been learnt, for it does not want much else …
const LEARNT: u64 = 1;
/// … where nothing is learnt …
const NOTHING: u64 = 0;
/// … and never for longer, microseconds.
const SPARED_US: u64 = 2_000_000;
/// For so long after all is there, who is to follow the program from then on is waited for.
const EXPECTED_US: u64 = 2_000_000;
/// For so long those who put in ahead what nobody is sure to want run only where nobody else does.
const GIVES_WAY_US: u64 = 1_000_000;
/// For so long it is waited for that the program runs: whoever let it run may have died before they could say so.
const RUNS_US: u64 = 5_000_000;
/// Between two looks at what is left, and at who has died, where nothing happens.
const PAUSE: Duration = Duration::from_millis(10);

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// There is nothing left to do.
    All,
    /// One of those who would serve after us is no more.
    Deserted,
}

/// Serves until all is there, or nobody is left who wants it, or one of those who stand by has died. `claim` is that of
/// whoever follows the program.
pub fn serve(work: &Work<'_>, by: &[BorrowedFd<'_>], claim: &mut Claim) -> Result<Served> {
    work.board.add(Count::Servers, 1);
    let sees_all = work.board.get(Count::Servers) == 1;
    let leave = AtomicBool::new(false);
    let pace = Pace::new(work.limit);
    let wanted = Mutex::default();
    let lacking = AtomicBool::new(false);
    let demanded_us = AtomicU64::new(0);
    let room = work.noted_stock().filter(|_| work.learns).map_or(0, |stock| {
        // More than a quarter of the memory is not a matter of what comes first.
        (stock.plan.pages() * PAGE / 4).saturating_sub(stock.touch.map_or(0, Touch::bytes))
    });
    let server = Server {
        work,
        shelves: work.stocks.iter().map(Shelf::of).collect(),
        spaces: RwLock::default(),
        leave,
        lacking,
        demanded_us,
        rhythm: Rhythm::new(),
        began_us: AtomicU64::new(u64::MAX),
        reading: Rate::default(),
        putting: Rate::default(),
        spares: AtomicU64::new(match work.noted_stock().is_some_and(Stock::was_learnt) {
            _ if !work.learns => NOTHING,
            true => LEARNT,
            // What the processes of a tree want is not told apart.
            false if work.is_tree => NOTHING,
            false => LEARNING,
        }),
        sees_all,
        pace,
        yielding: Mutex::default(),
        wanted,
        // What the processes of a tree want is not told apart.
        records: AtomicBool::new(work.is_tree),
        moves: claim.moves().clone(),
        queues: Mutex::default(),
        room,
    };
    for number in work.board.spaces() {
        server.adopt(number)?;
    }
    let fillers = host::processors();
    std::thread::scope(|scope| {
        let fillers: Vec<_> = (0..fillers).map(|_| scope.spawn(|| server.fill())).collect();
        let lifter = scope.spawn(|| server.lift());
        let served = server.attend(scope, by, claim);
        server.leave.store(true, Ordering::Relaxed);
        lifter.thread().unpark();
        // One that leaves its processor to others just now would take long to hear of it.
        while !fillers.iter().all(|filler| filler.is_finished()) {
            server.give_back();
            std::thread::sleep(PAUSE / 20);
        }
        let mut result = served;
        for filler in fillers {
            let filled = filler.join().unwrap_or_else(|_| Err(Error::Failed("a loader failed".into())));
            result = result.and_then(|served| filled.map(|()| served));
        }
        if matches!(result, Ok(Served::All)) && !server.records.load(Ordering::Relaxed) {
            server.record();
        }
        result
    })
}

struct Server<'a> {
    work: &'a Work<'a>,
    /// How far the stocks have been put in.
    shelves: Vec<Shelf<'a>>,
    spaces: RwLock<Vec<Arc<Space<'a>>>>,
    leave: AtomicBool,
    /// Some pages cannot be had.
    lacking: AtomicBool,
    /// When a page was waited for last, microseconds; the greatest number as long as one is.
    demanded_us: AtomicU64,
    /// How often it is.
    rhythm: Rhythm,
    /// When the program began to run, or this server after it, microseconds.
    began_us: AtomicU64,
    /// How fast pages are read, for whoever waits for them …
    reading: Rate,
    /// … and are put in.
    putting: Rate,
    /// For so many halves of the time that it takes to load the rest that is spared, from a store that is not slow.
    spares: AtomicU64,
    /// Whether it is the first server, and so knows all that the program has done away with.
    sees_all: bool,
    /// The way to the store.
    pace: Pace,
    /// Threads that leave their processors to others for a while.
    yielding: Mutex<Vec<u32>>,
    /// What was waited for, in order.
    wanted: Mutex<Wanted>,
    /// What was waited for is told, or has been, or need not be.
    records: AtomicBool,
    moves: Moves,
    /// Ways to the rings of programs, once they have been needed.
    queues: Mutex<HashMap<usize, Option<Queue>>>,
    /// So much more may be noted of what is waited for, bytes.
    room: u64,
}

/// A stock, and how far it has been put in.
struct Shelf<'a> {
    stock: &'a Stock<'a>,
    /// The next run of the touch set to be put in.
    touched: AtomicUsize,
    /// The next extent to be put in ahead where the programs miss it.
    next: AtomicUsize,
    /// The next extent to be read and checked ahead.
    checked: AtomicUsize,
    /// For each extent, whether it was read before: another part of it, which the system has kept since, is quicker to be had.
    met: Vec<AtomicBool>,
    /// Of those that were.
    sums: Sums,
    /// Runs of the touch set that need not have been there before the program ran, by address: start, end, number.
    known: Vec<(u64, u64, usize)>,
}

impl<'a> Shelf<'a> {
    fn of(stock: &'a Stock<'a>) -> Self {
        let touched = AtomicUsize::new(stock.touch.map_or(0, |touch| touch.done));
        let met = stock.plan.later.iter().map(|_| AtomicBool::new(false)).collect();
        let known = stock.touch.map(Touch::by_address).unwrap_or_default();
        let sums = Sums::of(stock.plan.later.len());
        Shelf { stock, touched, next: AtomicUsize::new(0), checked: AtomicUsize::new(0), met, sums, known }
    }
}

/// An address space that is being filled.
struct Space<'a> {
    number: usize,
    /// Whose it is.
    program: usize,
    /// The stock that its pages come from.
    stock: usize,
    /// The program, where this is its own.
    handle: Option<BorrowedFd<'a>>,
    /// Others like it are served with it: its handle is closed when it is done.
    is_clone: bool,
    userfault: SharedUserfault,
    /// Nobody needs it any more.
    done: AtomicBool,
    /// Events are read and applied under the lock for writing; pages are put in under that for reading, by those who have
    /// seen under it that they are still wanted. So none is put in that was dropped before.
    placement: RwLock<Placement>,
    settled: Bits<'a>,
    /// It is no more.
    ended: AtomicBool,
    /// The next extent to be put in ahead, if it is that of a copy.
    next: AtomicUsize,
    /// All pages before this one are settled.
    low: AtomicU64,
}

impl Drop for Space<'_> {
    fn drop(&mut self) {
        // Whoever comes after us needs it, unless all is done. The last filler has let go of it.
        if self.done.load(Ordering::Acquire) {
            split::close_shared(self.userfault.as_fd().as_raw_fd());
            // Whoever looks for servers of the program finds none from now on.
            let handle = self.handle.filter(|_| self.is_clone);
            handle.iter().for_each(|handle| split::close_shared(handle.as_raw_fd()));
        }
    }
}

impl Space<'_> {
    fn read(&self) -> RwLockReadGuard<'_, Placement> {
        self.placement.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Placement> {
        self.placement.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Whether it is the program's own, and not that of a copy.
    fn is_own(&self) -> bool {
        self.number == self.program
    }

    /// Whether some of these pages are still to come.
    fn misses(&self, pages: std::ops::Range<u64>) -> bool {
        !self.has_ended() && self.settled.unset(pages).is_some()
    }
}

/// When one leaves, all do.
struct Leaving<'a>(&'a AtomicBool);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whether something could be put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Did {
    All,
    /// Something happens in the process that has to be read first.
    NotYet,
}

impl<'a> Server<'a> {
    /// Takes a space from the board, where the server before us left it.
    fn adopt(&self, number: usize) -> Result<()> {
        let space = self.work.board.space(number);
        let Some(descriptor) = space.descriptor() else { return Ok(()) };
        let userfault = Userfault::from_shared(descriptor);
        let (placement, settled, program) = (space.placement(), space.settled(), space.program());
        let stock = self.work.programs[program].as_ref().map_or(0, |program: &Program| program.stock);
        let handle = self.work.program(number);
        let space = Arc::new(Space {
            number,
            program,
            stock,
            handle,
            is_clone: self.work.has_clones(),
            userfault,
            placement: RwLock::new(placement),
            settled,
            done: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            next: AtomicUsize::new(0),
            low: AtomicU64::new(0),
        });
        // What the one before us had read is applied, and those whom it was about to serve ask once more.
        self.apply_log(&space, &mut space.write())?;
        space.userfault.wake(RemoteAddr(ADDRESS_SPACE.0), RemoteAddr(ADDRESS_SPACE.1))?;
        self.write_spaces().push(space);
        Ok(())
    }

    fn plan(&self, space: &Space<'a>) -> &'a Plan {
        &self.shelves[space.stock].stock.plan
    }

    fn read_spaces(&self) -> Vec<Arc<Space<'a>>> {
        self.spaces.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn write_spaces(&self) -> RwLockWriteGuard<'_, Vec<Arc<Space<'a>>>> {
        self.spaces.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what happens, and serves those who wait.
    fn attend<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        by: &[BorrowedFd<'_>],
        claim: &mut Claim,
    ) -> Result<Served> {
        // Those who could not be served yet.
        let mut waiting: Vec<(Arc<Space<'a>>, RemoteAddr)> = Vec::new();
        let mut bytes = Vec::new();
        let mut told_that_it_lacks = false;
        let mut cores = self.work.dumps.as_ref().and_then(Cores::of);
        let prompt = SchedAttr { policy: libc::SCHED_FIFO as u32, priority: 2, ..SchedAttr::default() };
        let _ = sched::set_attributes(0, &prompt);
        loop {
            let lacks = self.lacking.load(Ordering::Relaxed);
            if lacks != told_that_it_lacks {
                told_that_it_lacks = lacks;
                pager::take_role(if lacks { Role::Lacks } else { Role::Serves });
            }
            let spaces = self.read_spaces();
            for space in spaces {
                let is_complete = !space.has_ended() && self.is_complete(&space);
                if is_complete && space.is_own() {
                    self.loaded(&space, scope);
                }
                if space.has_ended() || is_complete && self.may_leave(&space, claim) {
                    match cores.as_ref().filter(|_| space.number == self.work.noted()) {
                        Some(cores) if space.has_ended() => {
                            // What cannot be written is as it would be without us.
                            let _ = cores.find().map(|core| self.complete(&core, &space));
                        }
                        // What came while it is written is not in it.
                        Some(cores) if cores.is_being_written() => continue,
                        _ => {}
                    }
                    waiting.retain(|(s, _)| s.number != space.number);
                    self.finish(space, claim)?;
                }
            }
            let spaces = self.read_spaces();
            // Who fills in leaves before us only by a failure.
            if spaces.is_empty() || self.leave.load(Ordering::Relaxed) {
                return Ok(Served::All);
            }
            cores.iter_mut().for_each(Cores::look);
            // Of a program's end there is nothing more to learn once its memory is done with.
            let programs = spaces.iter().filter_map(|space| Some((space, space.handle?)));
            let programs: Vec<_> = programs.collect();
            let all = by.iter().copied().chain(programs.iter().map(|(_, handle)| *handle));
            let all = all.chain(spaces.iter().map(|space| space.userfault.as_fd()));
            let mut polled: Vec<PollFd<'_>> =
                all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            let line = self.work.line.as_ref();
            let calls = claim.sources(line).into_iter();
            polled.extend(calls.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            // Those who have to go on first need a processor.
            let pause = match waiting.is_empty() {
                true if self.rhythm.waits_soon() => Duration::ZERO,
                true => PAUSE,
                false => PAUSE / 200,
            };
            let pause = Timespec::try_from(pause).ok();
            match poll(&mut polled, pause.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::Failed(format!("poll: {e}"))),
            }
            let told: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
            let (deserted, told) = told.split_at(by.len());
            if deserted.contains(&true) {
                return Ok(Served::Deserted);
            }
            let (ended, told) = told.split_at(programs.len());
            for ((space, _), _) in programs.iter().zip(ended).filter(|(_, ended)| **ended) {
                space.ended.store(true, Ordering::Relaxed);
            }
            let (told, calls) = told.split_at(spaces.len());
            for (space, _) in spaces.iter().zip(told).filter(|(_, told)| **told) {
                let (pages, _) = self.read_events(space)?;
                waiting.extend(pages.into_iter().map(|page| (Arc::clone(space), page)));
            }
            if calls.contains(&true) {
                let space = spaces.iter().find(|s| s.number == 0);
                while let Some(request) = claim.request() {
                    let pages = self.comply(request, space, claim)?;
                    waiting.extend(space.into_iter().flat_map(|s| pages.iter().map(|p| (Arc::clone(s), *p))));
                }
                claim.take_calls(line);
            }
            let (mut left, began) = (Vec::new(), Instant::now());
            let (is_any, last) = (!waiting.is_empty(), waiting.len().saturating_sub(1));
            for (place, (space, page)) in waiting.into_iter().enumerate() {
                if self.serve(&space, page, place == last, &mut bytes)? == Did::NotYet {
                    left.push((space, page));
                }
            }
            if is_any && left.is_empty() {
                self.rhythm.served(began, Instant::now());
            }
            waiting = left;
        }
    }

    /// All of a program's memory is there. What it wanted first is told by another thread, which may take a while; that of many
    /// programs, when all of them have theirs.
    fn loaded<'s>(&'s self, space: &Space<'a>, scope: &'s Scope<'s, '_>) {
        let program = self.work.board.program(space.program);
        let is_first = program.get(Tally::LoadedUs) == 0;
        if is_first {
            let us = monotonic_us().saturating_sub(program.get(Tally::BeganUs));
            program.add(Tally::LoadedUs, us.max(1));
        }
        let records = self.work.programs.len() == 1 && !self.records.swap(true, Ordering::Relaxed);
        if !is_first && !records {
            return;
        }
        let (handle, placement) = (space.handle, space.read().clone());
        scope.spawn(move || {
            Turn::Ours.take();
            if is_first {
                let unused = handle.and_then(|handle| unused_pages(handle, &placement));
                unused.iter().for_each(|pages| program.add(Tally::InVain, 1 + pages));
            }
            if records {
                self.record();
                program.add(Tally::Recorded, 1);
            }
        });
    }

    /// Whether nobody follows a program, of which all is there, from now on, or somebody does already.
    fn may_leave(&self, space: &Space<'a>, claim: &Claim) -> bool {
        let program = self.work.board.program(space.program);
        let since = || monotonic_us() - program.get(Tally::BeganUs) - program.get(Tally::LoadedUs);
        let is_expected =
            || self.work.is_followed && program.get(Tally::Claims) == 0 && since() < EXPECTED_US;
        space.number != 0 || claim.is_taken() || !claim.is_made() && !is_expected()
    }

    /// Does what whoever follows the program asks for; returns the pages that are waited for.
    fn comply(
        &self,
        request: Request,
        space: Option<&Arc<Space<'a>>>,
        claim: &mut Claim,
    ) -> Result<Vec<RemoteAddr>> {
        let mut waiting = Vec::new();
        match (request, space) {
            (Request::Claim, _) => {
                let program = self.work.board.program(0);
                program.add(Tally::Claims, 1);
                let (job, id, taken_ns) = self.work.origin.clone();
                let (claims, mark) = (program.get(Tally::Claims), Mark::TakenAt(taken_ns));
                claim.tell(|c| c.tell_origin(&Origin { job, id, claims, is_paged: false, mark }));
            }
            (Request::State, Some(space)) => {
                // All that has happened until now is part of it.
                loop {
                    let (pages, told) = self.read_events(space)?;
                    waiting.extend(pages);
                    if told == 0 {
                        break;
                    }
                }
                let state = self.state(space);
                claim.tell(|c| c.tell_state(&state));
            }
            (Request::LetGo { start, end }, Some(space)) => {
                let done = space.userfault.unregister(RemoteAddr(start), RemoteAddr(end)).is_ok();
                claim.tell(|c| c.tell_done(done));
            }
            // Nothing is ever taken out.
            (
                Request::Stored | Request::Written { .. } | Request::Saved | Request::Rest | Request::GoesOn,
                Some(_),
            ) => claim.hang_up(),
            (Request::Taken, _) => {
                claim.take();
                claim.tell(|c| c.tell_done(true));
            }
            // The program has ended.
            (_, None) => claim.hang_up(),
        }
        Ok(waiting)
    }

    fn state(&self, space: &Space<'a>) -> State {
        let placement = space.read();
        let plan = self.plan(space);
        let mut missing: Vec<Piece> = Vec::new();
        for piece in placement.pieces() {
            for index in plan.extents_in(piece.then, piece.then_end()) {
                let extent = &plan.later[index];
                let (from, to) = (piece.then.max(extent.address), piece.then_end().min(extent.end()));
                let (mut at, end) = (plan.page(index, from), plan.page(index, to));
                let first = at;
                while let Some(run) = space.settled.unset(at..end) {
                    at = run.end;
                    let then = from + (run.start - first) * PAGE;
                    let now = piece.now + (then - piece.then);
                    let len = (run.end - run.start) * PAGE;
                    match missing.last_mut() {
                        Some(last) if last.now_end() == now && last.then_end() == then => last.len += len,
                        _ => missing.push(Piece { then, now, len }),
                    }
                }
            }
        }
        let (pieces, moved) = (placement.pieces().to_vec(), self.moves.take());
        State { is_complete: missing.is_empty(), pieces, moved, missing }
    }

    /// Reads events of a space; returns the pages that are waited for, and how many events there were.
    fn read_events(&self, space: &Space<'a>) -> Result<(Vec<RemoteAddr>, usize)> {
        // A copy of the process needs a place of its own; without one, it waits.
        let room = self.work.board.free().take(EVENTS).count() * EVENT_WORDS;
        if room == 0 {
            self.bury();
            return Ok((Vec::new(), 0));
        }
        let mut placement = space.write();
        let log = &self.work.board.space(space.number).log()[..room];
        let told = match self.log_and_hold(space, log)? {
            Some(told) => told,
            None => space.userfault.log_events(log)?,
        };
        Ok((self.apply_log(space, &mut placement)?, told))
    }

    /// Applies what is in the log of a space; returns the pages that are waited for.
    fn apply_log(&self, space: &Space<'a>, placement: &mut Placement) -> Result<Vec<RemoteAddr>> {
        self.hold_copies(space);
        let mut pages = Vec::new();
        for words in self.work.board.space(space.number).log().chunks_exact(EVENT_WORDS) {
            let Some(event) = logged(words) else { continue };
            match event {
                Event::Missing { page, .. } => pages.push(page),
                Event::Write { .. } => {} // noted by the kernel
                Event::Dropped { start, end } => self.forget(space, placement, start.0, end.0),
                Event::Moved { from, to, len } => {
                    placement.move_to(from.0, to.0, len);
                    if space.number == 0 {
                        self.moves.note(to.0, len);
                    }
                    self.work.board.space(space.number).set_placement(placement)?;
                }
                Event::Forked(descriptor) => self.begin_copy(space, placement, descriptor)?,
            }
            words[0].store(0, Ordering::Release);
        }
        Ok(pages)
    }

    /// Reads events such that copies of the process, which run as soon as they have been read of, are held by more than us from the
    /// beginning; nothing where that cannot be.
    fn log_and_hold(&self, space: &Space<'a>, log: &[AtomicU64]) -> Result<Option<usize>> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = self.work.held(space.program, space.program).map(|(ring, _)| ring);
        let entry = queues.entry(space.program).or_insert_with(|| Queue::of(&ring?).ok());
        let (Some(queue), Some(ring)) = (entry.as_mut(), ring) else { return Ok(None) };
        let places = self.work.board.free().map_while(|number| self.work.held(number, space.program));
        let told = space.userfault.log_events_held(log, queue, ring, places.map(|(_, place)| place))?;
        if told.is_none() {
            *entry = None;
        }
        Ok(told)
    }

    /// Copies that were read of are held in the places of the spaces that they are going to have, if they are not yet.
    fn hold_copies(&self, space: &Space<'a>) {
        let board = &self.work.board;
        let mut free = board.free();
        for words in board.space(space.number).log().chunks_exact(EVENT_WORDS) {
            if let Some(Event::Forked(descriptor)) = logged(words)
                && !self.has_begun(descriptor)
                && let Some(number) = free.next()
            {
                self.work.hold(number, space.program, Some(split::shared_descriptor(descriptor)));
            }
        }
    }

    /// Whether a copy has a space, given to it by a server that died right afterwards.
    fn has_begun(&self, descriptor: i32) -> bool {
        self.work.board.spaces().any(|n| self.work.board.space(n).descriptor() == Some(descriptor))
    }

    /// What is in `[start, end)` now is not wanted any more.
    fn forget(&self, space: &Space<'a>, placement: &Placement, start: u64, end: u64) {
        for piece in placement.inside(start, end) {
            self.settle(space, piece.then, piece.then + piece.len);
            if space.number == self.work.noted() {
                self.wanted().forgotten.push(Range { start: piece.then, len: piece.len });
            }
        }
    }

    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts into a core dump what was missing when it was written.
    fn complete(&self, core: &Core, space: &Space<'a>) -> Result<()> {
        let (plan, placement) = (self.plan(space), space.read());
        let forgotten = Range::joined(self.wanted().forgotten.clone());
        // What is settled may have come, or been done away with.
        let was_missing = |page: u64, then: u64, at: u64| {
            let is_kept = || self.sees_all && !Range { start: then, len: PAGE }.overlaps_any(&forgotten);
            !space.settled.is_set(page) || is_kept() && core.lacks(at)
        };
        for &(start, len, offset) in &core.segments {
            for piece in placement.inside(start, start + len) {
                for index in plan.extents_in(piece.then, piece.then_end()) {
                    let extent = &plan.later[index];
                    let pages = piece.then.max(extent.address)..piece.then_end().min(extent.end());
                    let mut bytes = Vec::new();
                    for then in pages.step_by(PAGE as usize) {
                        let at = offset + (piece.now + (then - piece.then) - start);
                        if !was_missing(plan.page(index, then), then, at) {
                            continue;
                        }
                        if bytes.is_empty() {
                            bytes.resize(extent.len() as usize, 0);
                            self.work.reader.read(extent, &mut bytes)?;
                        }
                        core.write(at, &bytes[(then - extent.address) as usize..][..PAGE as usize])?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Tells what was wanted first, for the next time.
    fn record(&self) {
        if !self.work.learns {
            return;
        }
        let wanted = std::mem::take(&mut *self.wanted());
        self.wanted().forgotten.clone_from(&wanted.forgotten);
        let Some(Stock { plan, touch, .. }) = self.work.noted_stock() else { return };
        let touch = *touch;
        let before = touch.into_iter().flat_map(|t| (t.head..t.set.len()).map(move |run| t.set.run(run)));
        // What must be there first is read in one piece then.
        let first = plan.first.iter().chain(&plan.touch).map(|e| Range { start: e.address, len: e.len() });
        let first: Vec<Range> = first.collect();
        let fits = first.iter().map(|r| r.len).sum::<u64>() <= HEAD;
        let is_new = touch.is_none_or(|touch| touch.head < first.len()) && fits;
        let forgotten = Range::joined(wanted.forgotten);
        let is_forgotten = |run: &Range| run.overlaps_any(&forgotten);
        let runs = before.chain(wanted.runs.iter().copied()).filter(|run| !is_forgotten(run));
        let head = first.into_iter().filter(|_| fits);
        if is_new || !wanted.runs.is_empty() || !forgotten.is_empty() {
            (self.work.heard.wanted)(&head.chain(runs).collect::<Vec<_>>());
        }
    }

    /// The pages of `[from, to)` of the checkpoint are there, or not wanted.
    fn settle(&self, space: &Space<'a>, from: u64, to: u64) -> u64 {
        let plan = self.plan(space);
        let mut new = 0;
        for index in plan.extents_in(from, to) {
            let extent = &plan.later[index];
            let page = |address: u64| plan.page(index, address);
            new += space.settled.set(page(from.max(extent.address))..page(to.min(extent.end())));
        }
        new
    }

    /// A copy of a process misses what the original does.
    fn begin_copy(&self, space: &Space<'a>, placement: &Placement, descriptor: i32) -> Result<()> {
        let board = &self.work.board;
        if self.has_begun(descriptor) {
            return Ok(());
        }
        let number =
            board.free().next().ok_or_else(|| Error::Failed("it made too many copies of itself".into()))?;
        let copy = board.space(number);
        copy.settled().become_as(space.settled);
        copy.set_placement(placement)?;
        copy.begin(descriptor, space.program);
        self.adopt(number)
    }

    /// Gives up spaces that are no more.
    fn bury(&self) {
        for space in self.read_spaces() {
            // Where nothing is followed nothing happens, besides that it is told if there is no memory at all.
            let nowhere = RemoteAddr(ADDRESS_SPACE.0);
            if matches!(space.userfault.put_zeros(nowhere, RemoteAddr(nowhere.0 + PAGE)), Ok(Put::Ended)) {
                space.ended.store(true, Ordering::Relaxed);
            }
        }
    }

    fn is_complete(&self, space: &Space<'a>) -> bool {
        let low = space.settled.unset(space.low.load(Ordering::Relaxed)..self.plan(space).pages());
        if let Some(low) = &low {
            space.low.store(low.start, Ordering::Relaxed);
        }
        low.is_none()
    }

    /// Lets go of a space in which there is nothing left to do.
    fn finish(&self, space: Arc<Space<'a>>, claim: &Claim) -> Result<()> {
        let is_taken = space.number == 0 && claim.is_taken();
        if !space.has_ended() && !is_taken {
            for piece in space.read().pieces() {
                space.userfault.release_gently(RemoteAddr(piece.now), RemoteAddr(piece.now + piece.len));
            }
        }
        self.work.hold(space.number, space.program, None);
        self.write_spaces().retain(|s| s.number != space.number);
        self.work.board.space(space.number).end();
        space.done.store(true, Ordering::Release);
        Ok(())
    }

    /// Puts in a page that is waited for, and those beside it; of the last one that is, also the rest of its block where that pays.
    fn serve(
        &self,
        space: &Arc<Space<'a>>,
        page: RemoteAddr,
        is_last: bool,
        bytes: &mut Vec<u8>,
    ) -> Result<Did> {
        let plan = self.plan(space);
        let then = space.read().then(page.0);
        let wanted = then.and_then(|then| {
            let index = plan.extent_at(then)?;
            let number = plan.page(index, then);
            (!space.settled.is_set(number)).then_some((index, then))
        });
        let Some((index, then)) = wanted else { return self.put_zeros(space, page) };
        self.work.board.program(space.program).demand(monotonic_us());
        self.demanded_us.store(u64::MAX, Ordering::Relaxed);
        let did = self.serve_known(space, page, then).and_then(|did| match did {
            Some(did) => Ok(did),
            None => self.serve_stored(space, page, (index, then), is_last, bytes),
        });
        self.demanded_us.store(monotonic_us(), Ordering::Relaxed);
        did
    }

    /// Puts in a page that is waited for, which is that at `then` of extent `index`, and those beside it.
    fn serve_stored(
        &self,
        space: &Arc<Space<'a>>,
        page: RemoteAddr,
        (index, then): (usize, u64),
        is_last: bool,
        bytes: &mut Vec<u8>,
    ) -> Result<Did> {
        let (plan, shelf) = (self.plan(space), &self.shelves[space.stock]);
        let extent = &plan.later[index];
        let is_noted_space = space.number == self.work.noted();
        let (around, is_noted) = {
            let mut wanted = self.wanted();
            let place = (space.number, index);
            let around = around(extent, then, wanted.extents.get(&place).copied());
            wanted.extents.insert(place, around);
            (around, is_noted_space && wanted.note(around, self.room))
        };
        if is_noted_space && !is_noted {
            self.spares.store(NOTHING, Ordering::Relaxed);
        }
        // To come back for the rest would take longer than to put it in; but as long as it is noted what is waited for, the next time
        // gains more from that.
        let wants_all = || if self.is_slow() { !is_noted } else { !self.is_patient() };
        if !wants_all() && self.read_alone(space, index, around, bytes) {
            return self.serve_with(space, page, around, bytes);
        }
        bytes.resize(extent.len() as usize, 0);
        let asked = Instant::now();
        let is_new = self.travel_to(shelf, index, true);
        if let Err(why) = self.read_patiently(std::slice::from_ref(space), index, bytes) {
            return self.fail(space, page, &why);
        }
        if is_new && let Some((_, start, end)) = block(extent) {
            self.reading.note(end - start, asked.elapsed());
        }
        let part = (around.start - extent.address) as usize..(around.end() - extent.address) as usize;
        let did = self.serve_with(space, page, around, &bytes[part])?;
        if did == Did::NotYet {
            return Ok(did);
        }
        match wants_all() {
            true if is_last => {
                // What cannot be put in just now is as if nobody had tried.
                let all = Range { start: extent.address, len: extent.len() };
                self.install(space, all, bytes, Tally::Ahead)?;
            }
            true => {}
            false => shelf.sums.note(index, bytes),
        }
        Ok(did)
    }

    /// Puts in a page that is waited for, with others, whose contents these are.
    fn serve_with(&self, space: &Space<'a>, page: RemoteAddr, range: Range, bytes: &[u8]) -> Result<Did> {
        let did = self.install(space, range, bytes, Tally::Demanded)?;
        if did == Did::All {
            // Whoever put it in before us has not woken who came later.
            space.userfault.wake(page, RemoteAddr(page.0 + PAGE))?;
            self.share(space, range, bytes)?;
        }
        Ok(did)
    }

    /// Reads a part of an extent alone, if it has been read and checked before, and is the same; then it is in `bytes`.
    fn read_alone(&self, space: &Space<'a>, index: usize, part: Range, bytes: &mut Vec<u8>) -> bool {
        let (extent, sums) = (&self.plan(space).later[index], &self.shelves[space.stock].sums);
        if !sums.are_known(index) {
            return false;
        }
        bytes.resize(part.len as usize, 0);
        let page = |address: u64| ((address - extent.address) / PAGE) as usize;
        let pages = page(part.start)..page(part.end());
        let part = extent.part(part.start, part.end());
        self.work.reader.read_pages(&part, bytes).is_ok() && sums.fit(index, pages, bytes)
    }

    /// Puts in a page that is waited for, and those of its run in the touch set: little is to be read for it. `None` if it is not
    /// there.
    fn serve_known(&self, space: &Space<'a>, page: RemoteAddr, then: u64) -> Result<Option<Did>> {
        let Shelf { stock, known, .. } = &self.shelves[space.stock];
        let Some(touch) = stock.touch else { return Ok(None) };
        let behind = known.partition_point(|(start, ..)| *start <= then);
        let found = behind.checked_sub(1).map(|at| known[at]).filter(|(_, end, _)| then < *end);
        let Some((.., number)) = found else { return Ok(None) };
        let range = touch.set.run(number);
        self.travel(range.len, true);
        let mut bytes = Vec::new();
        if touch.set.read(number..number + 1, &mut bytes).is_err() {
            return Ok(None);
        }
        self.serve_with(space, page, range, &bytes).map(Some)
    }

    /// What one clone waited for the others will want in the next moment, and reading it takes longer than putting it in.
    fn share(&self, space: &Space<'a>, range: Range, bytes: &[u8]) -> Result<()> {
        if self.work.programs.len() == 1 || !space.is_own() {
            return Ok(());
        }
        for other in self.read_spaces() {
            let is_alike = other.is_own() && other.stock == space.stock;
            if is_alike && other.number != space.number && !other.has_ended() {
                // One in which something happens that has to be read first will ask for it.
                self.install(&other, range, bytes, Tally::Ahead)?;
            }
        }
        Ok(())
    }

    fn count(&self, space: &Space<'a>, tally: Tally, more: u64) {
        self.work.board.program(space.program).add(tally, more);
    }

    /// Takes as long as so many bytes take on a way to the store that is limited. What is urgent goes first.
    fn travel(&self, bytes: u64, urgent: bool) {
        self.pace.travel_unless(bytes, urgent, &|| self.leave.load(Ordering::Relaxed));
    }

    /// The same, for an extent, if it was not read before. Whether it was not.
    fn travel_to(&self, shelf: &Shelf<'_>, index: usize, urgent: bool) -> bool {
        let is_new = !shelf.met[index].swap(true, Ordering::Relaxed);
        if is_new {
            self.travel(shelf.stock.plan.later[index].len(), urgent);
        }
        is_new
    }

    /// Reads an extent of the stock of some spaces.
    fn read_patiently(&self, spaces: &[Arc<Space<'a>>], index: usize, bytes: &mut [u8]) -> Result<()> {
        let Some(first) = spaces.first() else { return Ok(()) };
        let extent = &self.plan(first).later[index];
        let began = Instant::now();
        let is_wanted = || began.elapsed() < PATIENCE && spaces.iter().any(|space| !space.has_ended());
        loop {
            match self.work.reader.read(extent, bytes) {
                Err(_) if is_wanted() => std::thread::sleep(PAUSE),
                other => return Ok(other?),
            }
        }
    }

    /// A page that is waited for cannot be had: the program must not go on without it.
    fn fail(&self, space: &Space<'a>, page: RemoteAddr, why: &Error) -> Result<Did> {
        if space.is_own() {
            self.work.give_up(space.program, why);
        } else {
            self.work.fail(space.program, &why.to_string());
            space.userfault.poison(page, RemoteAddr(page.0 + PAGE))?;
        }
        Ok(Did::All)
    }

    /// Puts in pages of zeros: the one that is waited for, and some behind it.
    fn put_zeros(&self, space: &Space<'a>, page: RemoteAddr) -> Result<Did> {
        let placement = space.read();
        let plan = self.plan(space);
        let end = (page.0 / PAGE / ZEROS * ZEROS + ZEROS) * PAGE;
        // The first one behind it that is stored, and all that is none of the checkpoint's memory.
        let is_zero = |at: &u64| placement.then(*at).is_some_and(|then| plan.extent_at(then).is_none());
        let more = (page.0 + PAGE..end).step_by(PAGE as usize).take_while(is_zero).count() as u64;
        for end in [page.0 + PAGE + more * PAGE, page.0 + PAGE] {
            match space.userfault.put_zeros(page, RemoteAddr(end))? {
                Put::Changing(0) => return Ok(Did::NotYet),
                Put::Unmapped(0) if end > page.0 + PAGE => continue,
                Put::Ended => space.ended.store(true, Ordering::Relaxed),
                // It came while it was waited for.
                Put::Unmapped(0) | Put::Present(0) => {
                    self.work.board.program(space.program).demand(monotonic_us());
                    space.userfault.wake(page, RemoteAddr(page.0 + PAGE))?;
                }
                _ => self.count(space, Tally::ZeroDemands, 1),
            }
            break;
        }
        Ok(Did::All)
    }

    /// Puts in what of a range of the checkpoint, whose contents these are, is still wanted.
    fn install(&self, space: &Space<'a>, range: Range, bytes: &[u8], tally: Tally) -> Result<Did> {
        let placement = space.read();
        let plan = self.plan(space);
        for index in plan.extents_in(range.start, range.end()) {
            let extent = &plan.later[index];
            let page_of = |address: u64| plan.page(index, address);
            for part in placement.parts(range.start.max(extent.address), range.end().min(extent.end())) {
                let (page, end) = (page_of(part.then), page_of(part.then + part.len));
                let mut at = page;
                while let Some(run) = space.settled.unset(at..end) {
                    at = run.end;
                    let skip = (run.start - page) * PAGE;
                    let len = (run.end - run.start) * PAGE;
                    let piece = Piece { then: part.then + skip, now: part.now + skip, len };
                    let from = (piece.then - range.start) as usize;
                    if self.put(space, piece, &bytes[from..from + len as usize], tally)? == Did::NotYet {
                        return Ok(Did::NotYet);
                    }
                }
            }
        }
        Ok(Did::All)
    }

    fn put(&self, space: &Space<'a>, piece: Piece, bytes: &[u8], tally: Tally) -> Result<Did> {
        let mut done = 0;
        // As much at a time as lies in one mapping.
        let mut step = bytes.len() as u64;
        while done < bytes.len() as u64 {
            let now = &bytes[done as usize..(done + step).min(bytes.len() as u64) as usize];
            let began = Instant::now();
            let (settled, is_new) = match space.userfault.put(RemoteAddr(piece.now + done), now)? {
                Put::All => {
                    self.putting.note(now.len() as u64, began.elapsed());
                    (now.len() as u64, true)
                }
                Put::Changing(0) => return Ok(Did::NotYet),
                Put::Unmapped(0) if now.len() as u64 > PAGE => {
                    step = PAGE;
                    continue;
                }
                // Another has put it in, and may be about to say so: whoever says so first counts it.
                Put::Present(0) => (PAGE, true),
                // It has been unmapped.
                Put::Unmapped(0) => (PAGE, false),
                Put::Changing(more) | Put::Present(more) | Put::Unmapped(more) => (more, true),
                Put::Ended => {
                    space.ended.store(true, Ordering::Relaxed);
                    break;
                }
            };
            let new = self.settle(space, piece.then + done, piece.then + done + settled);
            self.count(space, tally, if is_new { new } else { 0 });
            done += settled;
        }
        Ok(Did::All)
    }

    /// Puts in ahead what nobody waits for yet: what was wanted first the last time, then the rest of the programs' own
    /// pages, each for all of them at once, then those of their copies.
    fn fill(&self) -> Result<()> {
        // However it ends: nobody else comes back for what it had taken on, but the next server does.
        let _leaving = Leaving(&self.leave);
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.yielding().push(tid);
        let filled = self.fill_until_left();
        // Somebody else may have the number soon.
        self.yielding().retain(|other| *other != tid);
        filled
    }

    fn fill_until_left(&self) -> Result<()> {
        // Where processors are few, the program should not have to wait for one, but for what it is sure to want. Whoever may
        // not take a processor at once might not get one back that they have left to others.
        let yields = at_once();
        let mut turn = Turn::Ours;
        turn.take();
        self.await_program();
        let (mut bytes, mut idle_since, began) = (Vec::new(), Instant::now(), monotonic_us());
        self.began_us.fetch_min(began, Ordering::Relaxed);
        while !self.leave.load(Ordering::Relaxed) {
            let whose = {
                let _prompt = (turn != Turn::Ours).then(|| Prompt::begin(turn));
                self.unfilled()
            };
            let Some((shelf, whose)) = whose else {
                std::thread::sleep(PAUSE);
                self.begin_again(&mut idle_since);
                continue;
            };
            let is_own = whose[0].is_own();
            if is_own && self.fill_touched(shelf, &whose, &mut bytes)? {
                continue;
            }
            let is_busy = self.is_busy();
            let spares = is_busy && self.is_patient();
            // Who only takes what others leave never comes to an end on a machine that is always busy; and a program that does nothing
            // but wait wants this more than its processors.
            let until = began + GIVES_WAY_US;
            let yields = yields && (spares || !is_busy || !self.rhythm.is_dense()) && monotonic_us() < until;
            let due = if yields { Turn::Others(until) } else { Turn::Ours };
            if turn != due {
                turn = due;
                turn.take();
            }
            if spares {
                if self.is_slow() || !self.check_ahead(shelf, &whose, &mut bytes) {
                    std::thread::sleep(PAUSE / 20);
                }
                continue;
            }
            let next = if is_own { &shelf.next } else { &whose[0].next };
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(&index) = shelf.stock.order.get(place) else { continue };
            self.fill_in(turn, shelf, &whose, index, &mut bytes)?;
        }
        Ok(())
    }

    /// Waits until the program runs; clones, until all of them stand.
    fn await_program(&self) {
        let since = monotonic_us();
        let is_due = || self.work.board.get(Count::Runs) > 0 || monotonic_us() - since > RUNS_US;
        while !is_due() && !self.leave.load(Ordering::Relaxed) {
            std::thread::sleep(if self.work.programs.len() == 1 { PAUSE / 50 } else { PAUSE / 10 });
        }
    }

    fn yielding(&self) -> MutexGuard<'_, Vec<u32>> {
        self.yielding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives those their processors back who have left them to others for long enough. Where others never cease to want them,
    /// they could not do so themselves, and whoever waits for a lock that they hold would wait as long.
    fn lift(&self) {
        self.await_program();
        // They begin a moment later.
        let (began, after) = (Instant::now(), Duration::from_micros(GIVES_WAY_US) + 10 * PAUSE);
        while began.elapsed() < after && !self.leave.load(Ordering::Relaxed) {
            std::thread::park_timeout(after.saturating_sub(began.elapsed()));
        }
        self.give_back();
    }

    fn give_back(&self) {
        self.yielding().iter().for_each(|tid| Turn::Ours.take_for(*tid));
    }

    /// What could not be had a while ago may be to be had now.
    fn begin_again(&self, since: &mut Instant) {
        if since.elapsed() < AGAIN {
            return;
        }
        *since = Instant::now();
        if self.lacking.swap(false, Ordering::Relaxed) {
            self.shelves.iter().for_each(|shelf| shelf.next.store(0, Ordering::Relaxed));
            self.read_spaces().iter().for_each(|space| space.next.store(0, Ordering::Relaxed));
        }
    }

    /// The spaces of one stock of which there are extents that nobody has taken on: those of the programs, or one of a copy.
    fn unfilled(&self) -> Option<(&Shelf<'a>, Vec<Arc<Space<'a>>>)> {
        let is_left =
            |shelf: &Shelf<'_>, next: &AtomicUsize| next.load(Ordering::Relaxed) < shelf.stock.order.len();
        let mut spaces = self.read_spaces();
        spaces.retain(|space| !space.has_ended());
        for (number, shelf) in
            self.shelves.iter().enumerate().filter(|(_, shelf)| is_left(shelf, &shelf.next))
        {
            let own = spaces.iter().filter(|space| space.is_own() && space.stock == number);
            let own: Vec<_> = own.cloned().collect();
            if !own.is_empty() {
                return Some((shelf, own));
            }
        }
        let shelf_of = |space: &Space<'_>| &self.shelves[space.stock];
        let copy =
            spaces.into_iter().find(|space| !space.is_own() && is_left(shelf_of(space), &space.next))?;
        Some((shelf_of(&copy), vec![copy]))
    }

    /// Puts in some of the touch set; false if all of it has been taken on.
    fn fill_touched(&self, shelf: &Shelf<'a>, whose: &[Arc<Space<'a>>], bytes: &mut Vec<u8>) -> Result<bool> {
        let Some(touch) = shelf.stock.touch.map(|touch| touch.set) else { return Ok(false) };
        let from = shelf.touched.fetch_add(TOGETHER, Ordering::Relaxed);
        if from >= touch.len() {
            return Ok(false);
        }
        let runs = from..(from + TOGETHER).min(touch.len());
        self.travel(runs.clone().map(|run| touch.run(run).len).sum(), false);
        // One that cannot be read is no loss: all is in the checkpoint, too.
        if touch.read(runs.clone(), bytes).is_err() {
            return Ok(true);
        }
        let mut rest = bytes.as_slice();
        let mut all = Vec::with_capacity(TOGETHER);
        for run in runs.map(|run| touch.run(run)) {
            let (now, later) = rest.split_at(run.len as usize);
            rest = later;
            all.push((run, now));
        }
        for space in whose {
            self.fill_runs(space, &all)?;
        }
        Ok(true)
    }

    /// Puts in ranges with their contents, small ones together.
    fn fill_runs(&self, space: &Space<'a>, runs: &[(Range, &[u8])]) -> Result<()> {
        let mut left = runs.iter().peekable();
        while let Some(&&(run, bytes)) = left.peek() {
            if bytes.len() > AT_A_TIME {
                self.fill_range(space, run, bytes, Turn::Ours)?;
                left.next();
                continue;
            }
            let mut did = Did::All;
            {
                let _prompt = Prompt::begin(Turn::Ours);
                let mut put = 0;
                while did == Did::All
                    && let Some(&&(run, bytes)) = left.peek()
                    && put + bytes.len() <= AT_A_TIME
                {
                    did = self.install(space, run, bytes, Tally::Ahead)?;
                    put += bytes.len();
                    if did == Did::All {
                        left.next();
                    }
                }
            }
            if self.leave.load(Ordering::Relaxed) || space.has_ended() {
                return Ok(());
            }
            if did == Did::NotYet {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    /// Reads an extent once, and puts it in wherever it is missing.
    fn fill_in(
        &self,
        turn: Turn,
        shelf: &Shelf<'a>,
        whose: &[Arc<Space<'a>>],
        index: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let plan = &shelf.stock.plan;
        let extent = &plan.later[index];
        let pages = plan.page(index, extent.address)..plan.page(index, extent.end());
        let missing: Vec<_> = whose.iter().filter(|space| space.misses(pages.clone())).cloned().collect();
        if missing.is_empty() {
            return Ok(());
        }
        bytes.resize(extent.len() as usize, 0);
        self.travel_to(shelf, index, false);
        if let Err(why) = self.read_patiently(&missing, index, bytes) {
            // It may never be wanted. If it is, the program is told then.
            let why = why.to_string();
            missing.iter().for_each(|space| self.work.fail(space.program, &why));
            self.lacking.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let range = Range { start: extent.address, len: extent.len() };
        missing.iter().try_for_each(|space| self.fill_range(space, range, bytes, turn))
    }

    /// Reads an extent and notes the checksums of its pages, so that whoever waits for one of them waits for no other; false if all
    /// have been.
    fn check_ahead(&self, shelf: &Shelf<'a>, whose: &[Arc<Space<'a>>], bytes: &mut Vec<u8>) -> bool {
        shelf.checked.fetch_max(shelf.next.load(Ordering::Relaxed), Ordering::Relaxed);
        let place = shelf.checked.fetch_add(1, Ordering::Relaxed);
        let Some(&index) = shelf.stock.order.get(place) else { return false };
        let plan = &shelf.stock.plan;
        let extent = &plan.later[index];
        let pages = plan.page(index, extent.address)..plan.page(index, extent.end());
        if shelf.sums.are_known(index) || !whose.iter().any(|space| space.misses(pages.clone())) {
            return true;
        }
        bytes.resize(extent.len() as usize, 0);
        self.travel_to(shelf, index, false);
        // What cannot be read is told to whoever wants it.
        if self.work.reader.read(extent, bytes).is_ok() {
            shelf.sums.note(index, bytes);
        }
        true
    }

    fn fill_range(&self, space: &Space<'a>, range: Range, bytes: &[u8], turn: Turn) -> Result<()> {
        // Nobody gets a processor while it is put in, and one who would leave his to others should not be in the way.
        let at_a_time = if turn == Turn::Ours { AT_A_TIME } else { AT_A_TIME / 4 };
        for (n, part) in bytes.chunks(at_a_time).enumerate() {
            let start = range.start + (n * at_a_time) as u64;
            let part_range = Range { start, len: part.len() as u64 };
            loop {
                let did = {
                    let _prompt = Prompt::begin(turn);
                    self.install(space, part_range, part, Tally::Ahead)?
                };
                if did == Did::All {
                    break;
                }
                if self.leave.load(Ordering::Relaxed) || space.has_ended() {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    /// Whether the program waits for pages all the time.
    fn is_busy(&self) -> bool {
        monotonic_us().saturating_sub(self.demanded_us.load(Ordering::Relaxed)) < CALM_US
    }

    /// Whether the store is much slower than memory: what is read of it is missing to others.
    fn is_slow(&self) -> bool {
        is_slow(self.reading.now(), self.putting.best())
    }

    /// Whether what the program waits for still goes before all the rest: it has not waited for long yet, against the time that it takes
    /// to load the rest. From a store that is nearly as fast as memory that is worth it while it is learnt what the program wants, for the
    /// next times, or if that is there already: then it waits for little else.
    fn is_patient(&self) -> bool {
        // How fast things are is found out by doing them.
        if self.putting.best() == 0 {
            return false;
        }
        let left = |shelf: &Shelf<'_>| {
            let (done, all) = (shelf.next.load(Ordering::Relaxed), shelf.stock.order.len());
            shelf.stock.plan.pages() * PAGE * all.saturating_sub(done) as u64 / all.max(1) as u64
        };
        // Each clone has all of it put in.
        let often = if self.work.has_clones() { self.work.programs.len() as u64 } else { 1 };
        let each_ns = match self.is_slow() {
            true => self.reading.now() / PART,
            false => {
                let each = (self.reading.now() + often * self.putting.best()) / host::processors() as u64;
                self.spares.load(Ordering::Relaxed) * each / 2
            }
        };
        let kib = self.shelves.iter().map(left).sum::<u64>() >> 10;
        let rest_us = (kib.saturating_mul(each_ns) >> 10) / 1000;
        let since = self.began_us.load(Ordering::Relaxed);
        monotonic_us().saturating_sub(since) < rest_us.min(SPARED_US)
    }
}

/// Pages of a program that were there when it began to run, and that it has not used since then.
fn unused_pages(program: BorrowedFd<'_>, placement: &Placement) -> Option<u64> {
    let pid = Folders::open(std::process::id()).ok()?.process_of(program.as_raw_fd() as u32).ok()??;
    let smaps = Proc::process(pid.try_into().ok()?).and_then(|process| process.smaps()).ok()?;
    let pieces = placement.pieces();
    let is_ours = |vma: &Vma| pieces.iter().any(|p| p.now < vma.end && vma.start < p.now_end());
    let unused = smaps.iter().filter(|smap| is_ours(&smap.vma));
    Some(unused.map(|smap| smap.anonymous.saturating_sub(smap.referenced) / PAGE).sum())
}
