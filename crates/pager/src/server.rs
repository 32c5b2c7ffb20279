//! Serves a program whose memory is paged: puts in what is waited for, and follows what the program does with its memory.
//!
//! One thread reads what happens and serves those who wait; another one takes out ([`crate::evict`]). What changes where a page is
//! known to be happens under one lock, the *gate*; what a page is read from the medium for does not.

use crate::cells::Word;
use crate::queue::{Queues, UNIT};
use crate::slots::Slots;
use crate::table::{At, Entry, View};
use crate::teller::Teller;
use crate::work::Work;
use crate::{Error, Result, arm, evict};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_image::{Codec, PAGE, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::hold::{self, Queue};
use stillpoint_linux::line::{Mark, Origin, Request, StoredPage, StoredPages};
use stillpoint_linux::pagemap::{Category, Pagemap, Query};
use stillpoint_linux::proc::{Proc, VmFlags};
use stillpoint_linux::sched::{self, SchedAttr};
use stillpoint_linux::spawn::ADDRESS_SPACE;
use stillpoint_linux::split;
use stillpoint_linux::userfault::{EVENT_WORDS, Event, Put, SharedUserfault, Userfault, logged};
use stillpoint_restore::lazy::Served;
use stillpoint_restore::lazy::board::EVENTS;
use stillpoint_restore::lazy::claim::{Claim, Moves};
use stillpoint_store::Working;

/// Between two looks at who has ended, where nothing happens.
const PAUSE: Duration = Duration::from_millis(10);
/// Between two looks whether an address space is still there.
const LOOK: Duration = Duration::from_millis(50);
/// How long a page that cannot be read is tried again.
const PATIENCE: Duration = Duration::from_secs(2);
/// Who uses memory in no order gets this many pages with the one that they wait for, at most, if they are stored beside it.
const CLOSE: u64 = 4;
/// Most units that are read ahead of a program that uses its memory in order.
const AHEAD: u64 = 16;
/// Whoever wants a page waits for so long, at most, until others have left …
const FOR_OTHERS: Duration = Duration::from_millis(50);
/// … and for so long where none can leave, for the sake of a checkpoint: or all would come in before it is taken. The more is in
/// memory above the limit, the longer: once more for each eighth of it.
const FOR_CHECKPOINT: Duration = Duration::from_millis(5);
/// Who cannot be given a page for so long may wait for something that is not going to happen.
const STUCK: Duration = Duration::from_millis(100);
/// So long it is waited that what follows the program is there, before somebody is told what it says.
const ARMED: Duration = Duration::from_millis(500);
/// So many such orders are told apart.
const STREAMS: usize = 8;
/// Pages that a copy of the program is given at a time, while nothing else is to do.
const FILLED: usize = 256;

/// Whoever takes over looks so often, at most, until nothing happens in the program meanwhile.
const REFRESHED: usize = 200;

/// Bytes of a unit.
pub(crate) const UNIT_LEN: u64 = UNIT * PAGE;

/// Serves until the program has ended, or one of those who stand `by` has died.
pub(crate) fn serve(work: &Work<'_>, by: &[BorrowedFd<'_>], claim: &mut Claim) -> Result<Served> {
    let table = work.table.view();
    let server = Server {
        work,
        slots: Slots::new(&work.working, &work.sums),
        table,
        gate: Mutex::default(),
        queues: Mutex::default(),
        waiting: Mutex::default(),
        leave: AtomicBool::new(false),
        busy: AtomicBool::new(false),
        stopping: AtomicBool::new(false),
        brought: AtomicU64::new(0),
        flushed: AtomicU64::new(0),
        moves: claim.moves().clone(),
        pagemap: Mutex::default(),
        rings: Mutex::default(),
        teller: Teller::new(work),
    };
    server.adopt()?;
    std::thread::scope(|scope| {
        let _leaving = Leaving(&server);
        scope.spawn(|| server.teller.run());
        let taking = scope.spawn(|| evict::run(&server));
        let served = server.attend(by, claim);
        server.leave.store(true, Ordering::SeqCst);
        taking.thread().unpark();
        while !taking.is_finished() {
            // Somebody whom it waits for may wait for us.
            for number in work.board.spaces().collect::<Vec<_>>() {
                let _ = server.read_events(&mut server.gate(), number);
            }
            server.serve_waiting(&mut Streams::default())?;
            std::thread::sleep(Duration::from_micros(200));
        }
        let taken =
            taking.join().unwrap_or_else(|_| Err(Error::Failed("taking pages out failed inside".into())));
        served.and_then(|served| taken.map(|()| served))
    })
}

/// However serving ends, nobody goes on beside it.
struct Leaving<'a, 's>(&'a Server<'s>);

impl Drop for Leaving<'_, '_> {
    fn drop(&mut self) {
        self.0.leave.store(true, Ordering::SeqCst);
        self.0.teller.end();
    }
}

pub(crate) struct Server<'a> {
    pub work: &'a Work<'a>,
    pub slots: Slots<'a>,
    pub table: View<'a>,
    gate: Mutex<Gate>,
    queues: Mutex<Queues>,
    /// Those who wait.
    waiting: Mutex<Vec<Waiter>>,
    pub leave: AtomicBool,
    /// Pages are being taken out.
    pub busy: AtomicBool,
    /// The program is just being stopped: whoever waits for a page may have to get it before.
    pub stopping: AtomicBool,
    /// Pages that were put in.
    pub brought: AtomicU64,
    /// How often cells were written to slots; changed by whoever has the gate. What was read from a slot before may have been
    /// something else than what is there now.
    pub flushed: AtomicU64,
    moves: Moves,
    /// Which pages the program has.
    pagemap: Mutex<Option<Pagemap>>,
    /// The way to the ring of the program, once it has been needed.
    rings: Mutex<HashMap<i32, Option<Queue>>>,
    pub teller: Teller<'a>,
}

/// A thread that waits for a page.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    space: usize,
    page: RemoteAddr,
    /// Since when.
    since: Instant,
    /// Since when for the sake of a checkpoint, if that is so.
    held: Option<Instant>,
}

/// What is known by whoever has the gate.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Cells in use, and which pages of the program they hold.
    pub cells: HashMap<u64, u64>,
    /// What is known of moves while others may be told of late.
    pub unsettled: Unsettled,
}

/// Moves of the program's memory that have been told of, while it is changed in ways that have not.
///
/// The kernel tells of what was done after it has let go of the mappings. So it may tell late, of a place where others have memory by now:
///
/// 1. A moves memory away from R, or unmaps it; of a move it tells twice, that it was made, and then that R was unmapped.
/// 2. B moves other memory to R, and is told of.
/// 3. A is told of.
///
/// What is out has a mark in its place, which says where it is. When nothing is under way any more, all has been told.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    /// Where memory has been moved to.
    arrived: Vec<Range>,
    /// What was out where it was moved to: it may have been moved away before.
    displaced: Vec<(u64, Entry)>,
    /// What has been unmapped, or what was there before it.
    doubtful: Vec<Range>,
}

impl Unsettled {
    fn has_arrived(&self, start: u64, end: u64) -> bool {
        self.arrived.iter().any(|range| range.start < end && start < range.end())
    }

    fn take_displaced(&mut self, start: u64, end: u64) -> Vec<(u64, Entry)> {
        self.displaced.extract_if(.., |(address, _)| (start..end).contains(&*address)).collect()
    }

    /// Slots of what is in no table at the time.
    pub fn slots(&self) -> impl Iterator<Item = u64> {
        self.displaced.iter().filter_map(|(_, entry)| entry.slot())
    }

    /// What of it is in a cell is in a slot from now on; tells whether there was such.
    pub fn flushed(&mut self, cell: u64, slot: u64) -> bool {
        let stored = Entry::Stored { at: At::Slot(slot), is_in: false };
        let found = self.displaced.iter_mut().find(|(_, entry)| *entry == Entry::Cell(cell));
        found.map(|(_, entry)| *entry = stored).is_some()
    }
}

/// Orders in which the program uses its memory: the unit that would be next, and how many were read the last time.
#[derive(Debug, Default)]
pub(crate) struct Streams(Vec<(u64, u64)>);

impl Streams {
    /// How many units are to be read from one on.
    fn from(&mut self, unit: u64) -> u64 {
        let known = self.0.iter().position(|(next, _)| (*next..*next + 2).contains(&unit));
        let units = known.map_or(1, |at| (self.0.remove(at).1 * 2).min(AHEAD));
        self.0.truncate(STREAMS - 1);
        self.0.insert(0, (unit + units, units));
        units
    }
}

/// What whoever takes checkpoints waits to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// That nobody of us stops the program any more.
    Rest,
    /// What is stored.
    Stored,
}

/// Whether something could be put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Did {
    All,
    /// Something happens in the process that has to be read first.
    NotYet,
}

impl Server<'_> {
    pub fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waiter>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers of the spaces of copies of the program.
    pub fn copies(&self) -> impl Iterator<Item = usize> {
        self.work.board.spaces().filter(|number| *number > 0)
    }

    /// What follows a space.
    pub fn userfault(&self, space: usize) -> Option<SharedUserfault> {
        self.work.board.space(space).descriptor().map(Userfault::from_shared)
    }

    /// Takes over where the server before us left it.
    fn adopt(&self) -> Result<()> {
        let mut gate = self.gate();
        gate.cells.extend(self.table.all_cells(0));
        evict::recover(self, &mut gate)?;
        let logs = || self.work.board.spaces().map(|number| self.work.board.space(number).log());
        let has_moves = logs()
            .any(|log| log.chunks_exact(EVENT_WORDS).any(|w| matches!(logged(w), Some(Event::Moved { .. }))));
        if !has_moves {
            self.table.moved();
        }
        for number in self.work.board.spaces().collect::<Vec<_>>() {
            // What the one before us had read is applied, and those whom it was about to serve ask once more.
            self.apply_log(&mut gate, number)?;
            let woken = self
                .userfault(number)
                .map(|u| u.wake(RemoteAddr(ADDRESS_SPACE.0), RemoteAddr(ADDRESS_SPACE.1)));
            drop(woken); // fails if it is no more
        }
        self.refresh(&mut gate)?;
        if self.work.cells.get(Word::Held) > 0 {
            // Whoever took a checkpoint has to begin again.
            self.distrust(&mut gate);
        }
        Ok(())
    }

    /// Pages that the server before us has put in may not be noted as such.
    fn refresh(&self, gate: &mut Gate) -> Result<()> {
        let mut present = Vec::new();
        // Where a page is known to be says nothing of what is there while something happens that has not been read of.
        for _ in 0..REFRESHED {
            while self.read_events(gate, 0)? > 0 {}
            let Some(runs) = evict::present(self)? else { return Ok(()) };
            present = runs;
            if self.userfault(0).is_none_or(|userfault| !is_changing(&userfault)) {
                break;
            }
            std::thread::sleep(PAUSE / 100);
        }
        for run in present {
            let mut known = Vec::new();
            self.table.each(0, run.start, run.end(), |address, entry| known.push((address, entry)));
            for (address, entry) in known {
                let now = match entry {
                    Entry::Stored { at, .. } => Entry::Stored { at, is_in: true },
                    Entry::Cell(cell) => {
                        gate.cells.remove(&cell);
                        Entry::Nothing
                    }
                    Entry::Nothing => continue,
                };
                self.table.set(0, address, now)?;
            }
        }
        Ok(())
    }

    /// Reads what happens, and serves those who wait.
    fn attend(&self, by: &[BorrowedFd<'_>], claim: &mut Claim) -> Result<Served> {
        let mut streams = Streams::default();
        let (mut looked, mut wish, mut asked) = (Instant::now(), None, Instant::now());
        let prompt = SchedAttr { policy: libc::SCHED_FIFO as u32, priority: 2, ..SchedAttr::default() };
        let _ = sched::set_attributes(0, &prompt);
        loop {
            let numbers: Vec<usize> = self.work.board.spaces().collect();
            let userfaults: Vec<_> = numbers.iter().filter_map(|n| Some((*n, self.userfault(*n)?))).collect();
            let line = self.work.line.as_ref();
            let all = by.iter().copied().chain([self.work.program.as_fd()]);
            let all = all.chain(userfaults.iter().map(|(_, u)| u.as_fd())).chain(claim.sources(line));
            let mut polled: Vec<PollFd<'_>> =
                all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            // Those who have to go on first need a processor.
            let pause = if self.waiting().is_empty() && wish.is_none() { PAUSE } else { PAUSE / 100 };
            match poll(&mut polled, Timespec::try_from(pause).ok().as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::Failed(format!("poll: {e}"))),
            }
            let told: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
            drop(polled);
            let (deserted, told) = told.split_at(by.len());
            if deserted.contains(&true) {
                return Ok(Served::Deserted);
            }
            if self.leave.load(Ordering::Relaxed) {
                return Err(Error::Failed("pages cannot be taken out any more".into()));
            }
            let (has_ended, told) = (told[0], &told[1..]);
            let (told, calls) = told.split_at(userfaults.len());
            for ((number, _), _) in userfaults.iter().zip(told).filter(|(_, told)| **told) {
                self.read_events(&mut self.gate(), *number)?;
            }
            if calls.contains(&true) {
                while let Some(request) = claim.request() {
                    wish = self.comply(request, claim)?;
                    asked = Instant::now();
                }
            }
            // What one who has hung up left is seen to before the next one is heard.
            if !claim.is_made() {
                wish = None;
                self.work.cells.set(Word::Rests, 0);
                if self.work.cells.get(Word::Held) > 0 {
                    self.distrust(&mut self.gate());
                }
            }
            if calls.contains(&true) {
                claim.take_calls(line);
            }
            wish = self.grant(wish, asked, claim)?;
            self.serve_waiting(&mut streams)?;
            if looked.elapsed() > LOOK || has_ended {
                looked = Instant::now();
                self.bury()?;
                if has_ended && self.work.board.spaces().next().is_none() {
                    return Ok(Served::All);
                }
            }
            self.fill()?;
        }
    }

    fn serve_waiting(&self, streams: &mut Streams) -> Result<()> {
        let waiting = std::mem::take(&mut *self.waiting());
        for mut waiter in waiting {
            let Waiter { space, page, since, .. } = waiter;
            let has_to_wait = self.must_wait(space, since);
            self.hold(&mut waiter, has_to_wait && self.is_checkpointed());
            if has_to_wait || self.serve(space, page, streams)? == Did::NotYet {
                if !has_to_wait && since.elapsed() > STUCK {
                    self.free(space, page)?;
                }
                self.waiting().push(waiter);
            }
        }
        Ok(())
    }

    /// Somebody waits for the sake of a checkpoint, or does not any more: then it is counted for how long they have.
    fn hold(&self, waiter: &mut Waiter, is_held: bool) {
        match (waiter.held, is_held) {
            (None, true) => waiter.held = Some(Instant::now()),
            (Some(since), false) => {
                self.work.cells.add(Word::WaitedUs, since.elapsed().as_micros() as u64);
                waiter.held = None;
            }
            _ => {}
        }
    }

    /// A checkpoint is over. Tells for how long was waited for its sake, all threads together.
    fn release(&self) -> Duration {
        self.waiting().iter_mut().for_each(|waiter| self.hold(waiter, false));
        let cells = &self.work.cells;
        let waited = cells.get(Word::WaitedUs);
        let new = waited.saturating_sub(cells.get(Word::WaitedToldUs));
        cells.set(Word::WaitedToldUs, waited);
        Duration::from_micros(new)
    }

    /// Lets go of the mapping of a page that cannot be put in, if nothing is missing there.
    ///
    /// A locked mapping that grows while it is moved (`mremap(2)`) waits for its new pages before it tells of the move; and as long as
    /// it has not, the kernel lets nobody put in any. Nothing of it has ever been taken out.
    fn free(&self, space: usize, page: RemoteAddr) -> Result<()> {
        let mut gate = self.gate();
        let (Some(userfault), true) = (self.userfault(space), space == 0) else { return Ok(()) };
        let maps = Proc::process(self.work.pid).and_then(|process| process.maps()).unwrap_or_default();
        let mapping = |address: u64| {
            let next = maps.partition_point(|vma| vma.end <= address);
            maps.get(next).filter(|vma| vma.start <= address)
        };
        let Some(vma) = mapping(page.0) else { return Ok(()) };
        // What is being moved is known where it was, which is not mapped any more.
        let (mut misses, mut known) = (false, Vec::new());
        self.table.all(0, |address, entry| {
            if mapping(address).is_none_or(|other| other.start == vma.start) {
                misses |= entry.is_missing();
                known.push(address);
            }
        });
        // From now on all of it counts as written, and nobody tells what becomes of it: what was known is of no use any more.
        if !misses && userfault.unregister(RemoteAddr(vma.start), RemoteAddr(vma.end)).is_ok() {
            known.iter().for_each(|address| self.forget(&mut gate, 0, *address, address + PAGE));
        }
        Ok(())
    }

    /// Whether as much has to leave first as is to come in.
    fn must_wait(&self, space: usize, since: Instant) -> bool {
        let is_taken_out = || !self.stopping.load(Ordering::SeqCst) && !self.leave.load(Ordering::Relaxed);
        let is = |word| self.work.cells.get(word) > 0;
        if space > 0 || is(Word::Exceeded) || !is_taken_out() {
            return false;
        }
        let limit = self.work.limit;
        let taken = evict::private_bytes(self.work.pid).unwrap_or(0);
        let patience = match self.is_checkpointed() {
            true => FOR_CHECKPOINT * (1 + 8 * taken.saturating_sub(limit) / limit) as u32,
            false => FOR_OTHERS,
        };
        taken > limit && since.elapsed() < patience.min(FOR_OTHERS)
    }

    /// How much the program may still take, bytes.
    fn room(&self) -> u64 {
        self.work.limit.saturating_sub(evict::private_bytes(self.work.pid).unwrap_or(0))
    }

    /// Whether nothing can leave, for the sake of a checkpoint.
    fn is_checkpointed(&self) -> bool {
        [Word::Held, Word::Rests].iter().any(|word| self.work.cells.get(*word) > 0)
    }

    /// Gives up spaces that are no more.
    fn bury(&self) -> Result<()> {
        for number in self.work.board.spaces().collect::<Vec<_>>() {
            let Some(userfault) = self.userfault(number) else { continue };
            if matches!(probe(&userfault), Ok(Put::Ended)) {
                self.end(&mut self.gate(), number);
            }
        }
        Ok(())
    }

    fn end(&self, gate: &mut Gate, number: usize) {
        self.waiting().retain(|waiter| waiter.space != number);
        self.table.end(number);
        if number == 0 {
            *gate = Gate::default();
            *self.queues() = Queues::default();
            arm::disarm(self.work);
            return;
        }
        let space = self.work.board.space(number);
        let descriptor = space.descriptor();
        if let Some(ring) = self.work.cells.descriptor(Word::Ring) {
            let _ = hold::put(ring, number, None);
        }
        space.end();
        descriptor.iter().for_each(|fd| split::close_shared(*fd));
    }

    /// Tells what is waited for, when that can be told; what is left to be told.
    fn grant(&self, wish: Option<Wish>, asked: Instant, claim: &mut Claim) -> Result<Option<Wish>> {
        let cells = &self.work.cells;
        // Who takes it out sees that the program rests or is seen to be busy.
        let is_busy = || {
            fence(Ordering::SeqCst);
            self.busy.load(Ordering::SeqCst)
        };
        match wish {
            // By then what follows the program is there, unless that cannot be.
            Some(Wish::Rest)
                if self.work.board.space(0).descriptor().is_some() || asked.elapsed() > ARMED =>
            {
                cells.set(Word::Rests, 1);
                if is_busy() {
                    return Ok(wish);
                }
                claim.tell(|c| c.tell_done(true));
            }
            Some(Wish::Stored) if !is_busy() => {
                // What is on its way is stored nowhere yet; while it cannot be, there is no checkpoint.
                match self.flush() {
                    Ok(()) => self.tell_stored(claim)?,
                    Err(_) => claim.hang_up(),
                }
            }
            _ => return Ok(wish),
        }
        Ok(None)
    }

    /// Does what whoever takes checkpoints asks for, or notes what they are to be told.
    fn comply(&self, request: Request, claim: &mut Claim) -> Result<Option<Wish>> {
        match request {
            Request::Claim => {
                self.work.cells.add(Word::Claims, 1);
                let (job, claims) = (self.work.job.clone(), self.work.cells.get(Word::Claims));
                let mark = Mark::Folder(self.work.folder.0, self.work.folder.1);
                claim.tell(|c| c.tell_origin(&Origin { job, id: 0, claims, is_paged: true, mark }));
            }
            Request::Stored => {
                self.work.cells.set(Word::Held, 1);
                return Ok(Some(Wish::Stored));
            }
            Request::Written { start, end } => {
                let _gate = self.gate();
                let mut written = Vec::new();
                self.table.each(0, start, end, |address, entry| {
                    if matches!(entry, Entry::Stored { .. }) {
                        written.push(address);
                    }
                });
                written.iter().try_for_each(|address| self.table.set(0, *address, Entry::Nothing))?;
            }
            Request::Saved => {
                self.work.cells.set(Word::Held, 0);
                self.work.cells.set(Word::Rests, 0);
                let waited = self.release();
                claim.tell(|c| c.tell_saved(waited));
            }
            Request::Rest => return Ok(Some(Wish::Rest)),
            Request::GoesOn => {
                self.work.cells.set(Word::Rests, 0);
                claim.tell(|c| c.tell_done(true));
            }
            // There is always something to do.
            Request::State | Request::LetGo { .. } | Request::Taken => claim.hang_up(),
        }
        Ok(None)
    }

    /// Tells what is stored. All that has happened until now is part of it.
    fn tell_stored(&self, claim: &mut Claim) -> Result<()> {
        let mut gate = self.gate();
        while self.read_events(&mut gate, 0)? > 0 {}
        self.forget_dropped(&mut gate, 0, ADDRESS_SPACE.1, None);
        self.unmark_freed();
        evict::follow_all(self)?;
        let (mut slots, mut pages) = (Vec::new(), Vec::new());
        self.table.all(0, |address, entry| {
            if let Entry::Stored { at, is_in } = entry {
                slots.extend(entry.slot());
                pages.extend(self.stored(at, address, !is_in));
            }
        });
        self.slots.make_permanent(slots.into_iter());
        let stored = StoredPages { moved: self.moves.take(), pages };
        claim.tell(|c| c.tell_stored(&stored));
        Ok(())
    }

    /// Where a page is stored.
    fn stored(&self, at: At, address: u64, is_missing: bool) -> Option<StoredPage> {
        let work = self.work;
        match at {
            At::Origin(page) => work.origin.as_ref()?.tell(page, address, is_missing),
            At::Slot(slot) => {
                let (segment, offset, crc) = (work.working.id(), Working::offset(slot), work.sums.get(slot));
                let (length, block_pages, skip, codec) = (PAGE as u32, 1, 0, Codec::Raw.number());
                Some(StoredPage {
                    address,
                    segment,
                    offset,
                    length,
                    block_pages,
                    skip,
                    codec,
                    crc,
                    is_missing,
                })
            }
        }
    }

    /// Pages that are in memory may have been written without a trace: whoever looked at them took that away, and does not say what
    /// they saw.
    fn distrust(&self, _: &mut Gate) {
        let mut all = Vec::new();
        self.table.all(0, |address, entry| {
            if matches!(entry, Entry::Stored { is_in: true, .. }) {
                all.push(address);
            }
        });
        all.iter().for_each(|address| drop(self.table.set(0, *address, Entry::Nothing)));
        self.work.cells.set(Word::Held, 0);
    }

    /// Reads events of a space; returns how many there were.
    pub fn read_events(&self, gate: &mut Gate, number: usize) -> Result<usize> {
        let Some(userfault) = self.userfault(number) else { return Ok(0) };
        // A copy of the process needs a place of its own; without one, it waits.
        let room = self.work.board.free().take(EVENTS).count() * EVENT_WORDS;
        let log = &self.work.board.space(number).log()[..room];
        if room == 0 {
            return Ok(0);
        }
        if number == 0 {
            self.settle(gate, &userfault);
        }
        let told = match self.log_and_hold(&userfault, log)? {
            Some(told) => told,
            None => userfault.log_events(log)?,
        };
        self.apply_log(gate, number)?;
        Ok(told)
    }

    /// Reads events such that copies of the process, which run as soon as they have been read of, are held by the program as well
    /// from the beginning; nothing where that cannot be.
    fn log_and_hold(&self, userfault: &Userfault, log: &[AtomicU64]) -> Result<Option<usize>> {
        let Some(ring) = self.work.cells.descriptor(Word::Ring) else { return Ok(None) };
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let key = self.work.cells.get(Word::Ring) as i32;
        let entry = rings.entry(key).or_insert_with(|| Queue::of(&ring).ok());
        let Some(queue) = entry else { return Ok(None) };
        let told = userfault.log_events_held(log, queue, ring, self.work.board.free())?;
        if told.is_none() {
            *entry = None;
        }
        Ok(told)
    }

    /// Applies what is in the log of a space.
    fn apply_log(&self, gate: &mut Gate, number: usize) -> Result<()> {
        self.hold_copies(number);
        for (at, words) in self.work.board.space(number).log().chunks_exact(EVENT_WORDS).enumerate() {
            let Some(event) = logged(words) else { continue };
            match event {
                Event::Missing { page, .. } => {
                    let since = Instant::now();
                    self.waiting().push(Waiter { space: number, page, since, held: None });
                }
                Event::Write { .. } => {} // noted by the kernel
                Event::Dropped { start, end }
                    if number == 0 && gate.unsettled.has_arrived(start.0, end.0) =>
                {
                    self.doubt(gate, start.0, end.0)?;
                }
                Event::Dropped { start, end } => self.forget(gate, number, start.0, end.0),
                Event::Moved { from, to, len } => {
                    let event = (number as u64) << 32 | (at as u64 + 1);
                    match number {
                        0 => self.move_to(gate, from.0, to.0, len, event)?,
                        _ => drop(self.table.move_to(number, from.0, to.0, len, event)?),
                    }
                }
                Event::Forked(descriptor) => self.begin_copy(number, descriptor)?,
            }
            words[0].store(0, Ordering::Release);
            if matches!(event, Event::Moved { .. }) {
                self.table.moved();
            }
        }
        Ok(())
    }

    /// `len` bytes have been moved, as far as they had not been before ([`Unsettled`]).
    fn move_to(&self, gate: &mut Gate, from: u64, to: u64, len: u64, event: u64) -> Result<()> {
        let mut displaced = Vec::new();
        self.table.each(0, to, to + len, |address, entry| {
            if entry.is_missing() {
                displaced.push((address, entry));
            }
        });
        let mut moved = gate.unsettled.take_displaced(from, from + len);
        gate.unsettled.displaced.extend(displaced);
        if !gate.unsettled.has_arrived(from, from + len) {
            gate.cells.extend(self.table.move_to(0, from, to, len, event)?);
        } else {
            // What has arrived there since has not been moved by this.
            let marked = self.kept(from, from + len, false).unwrap_or_default();
            let mut gone = Vec::new();
            self.table.each(0, from, from + len, |address, entry| {
                let page = Range { start: address, len: PAGE };
                if !entry.is_missing() || !page.overlaps_any(&marked) {
                    gone.push((address, entry));
                }
            });
            self.table.forget(0, to, to + len);
            gone.iter().try_for_each(|(address, _)| self.table.set(0, *address, Entry::Nothing))?;
            gone.retain(|(_, entry)| entry.is_missing());
            match moved.is_empty() {
                true => moved = gone,
                // It has been moved away, too, and that is told of later.
                false => gate.unsettled.displaced.extend(gone),
            }
        }
        for (address, entry) in moved {
            let now = to + (address - from);
            self.table.set(0, now, entry)?;
            if let Entry::Cell(cell) = entry {
                gate.cells.insert(cell, now);
            }
        }
        gate.unsettled.arrived.push(Range { start: to, len });
        self.moves.note(to, len);
        Ok(())
    }

    /// `[start, end)` has been unmapped, or what was there before others have moved theirs to it.
    fn doubt(&self, gate: &mut Gate, start: u64, end: u64) -> Result<()> {
        gate.unsettled.take_displaced(start, end);
        gate.unsettled.doubtful.push(Range { start, len: end - start });
        // It counts as written.
        let mut present = Vec::new();
        self.table.each(0, start, end, |address, entry| {
            if !entry.is_missing() {
                present.push(address);
            }
        });
        present.iter().try_for_each(|address| self.table.set(0, *address, Entry::Nothing))
    }

    /// If nothing is under way any more, all has been told: what is still thought to be out is where its mark is.
    fn settle(&self, gate: &mut Gate, userfault: &Userfault) {
        let Unsettled { arrived, doubtful, .. } = &gate.unsettled;
        if arrived.is_empty() && doubtful.is_empty() || !matches!(probe(userfault), Ok(Put::Unmapped(_))) {
            return;
        }
        for range in std::mem::take(&mut gate.unsettled).doubtful {
            self.forget_dropped(gate, range.start, range.end(), None);
        }
    }

    /// Copies that were read of are held in the places of the spaces that they are going to have, if they are not yet.
    fn hold_copies(&self, number: usize) {
        let Some(ring) = self.work.cells.descriptor(Word::Ring) else { return };
        let mut free = self.work.board.free();
        for words in self.work.board.space(number).log().chunks_exact(EVENT_WORDS) {
            if let Some(Event::Forked(descriptor)) = logged(words)
                && !self.has_begun(descriptor)
                && let Some(place) = free.next()
            {
                let _ = hold::put(ring, place, Some(split::shared_descriptor(descriptor)));
            }
        }
    }

    /// Whether a copy has a space, given to it by a server that died right afterwards.
    fn has_begun(&self, descriptor: i32) -> bool {
        self.work.board.spaces().any(|n| self.work.board.space(n).descriptor() == Some(descriptor))
    }

    /// What is in `[start, end)` now is not wanted any more.
    fn forget(&self, gate: &mut Gate, number: usize, start: u64, end: u64) {
        let mut slots = Vec::new();
        self.table.each(number, start, end, |_, entry| {
            slots.extend(entry.slot());
            if let (Entry::Cell(cell), 0) = (entry, number) {
                gate.cells.remove(&cell);
            }
        });
        self.table.forget(number, start, end);
        if self.is_alone() {
            self.slots.give_back(&slots);
        }
    }

    /// Whether there is nobody else who knows what the program does.
    pub fn is_alone(&self) -> bool {
        self.work.board.spaces().all(|number| number == 0) && self.work.cells.get(Word::Held) == 0
    }

    /// A copy of a process misses what the original does.
    fn begin_copy(&self, number: usize, descriptor: i32) -> Result<()> {
        if self.has_begun(descriptor) {
            return Ok(());
        }
        let board = &self.work.board;
        let free = board.free().next();
        let free = free.ok_or_else(|| Error::Failed("it made too many copies of itself".into()))?;
        self.table.end(free);
        self.table.copy(number, free)?;
        if number == 0 {
            wiped(self.work.pid).iter().for_each(|range| self.table.forget(free, range.start, range.end()));
        }
        board.space(free).begin(descriptor, 0);
        if !self.misses(free) {
            self.let_go(free);
        }
        Ok(())
    }

    fn misses(&self, space: usize) -> bool {
        let mut misses = false;
        self.table.all(space, |_, entry| misses |= entry.is_missing());
        misses
    }

    /// Nothing is missing in a copy: nobody needs to follow it. When its descriptor is closed, those who wait go on.
    fn let_go(&self, number: usize) {
        self.end(&mut Gate::default(), number);
    }

    /// Gives copies what they miss, while nobody waits.
    fn fill(&self) -> Result<()> {
        for number in self.copies().collect::<Vec<_>>() {
            let mut missing = Vec::new();
            self.table.all(number, |address, entry| {
                if entry.is_missing() && missing.len() < FILLED {
                    missing.push(address);
                }
            });
            let mut units: Vec<u64> = missing.iter().map(|address| address / UNIT_LEN).collect();
            units.dedup();
            for unit in &units {
                if self.bring(number, unit * UNIT_LEN, (unit + 1) * UNIT_LEN, None)? == Did::NotYet {
                    return Ok(());
                }
            }
            if units.is_empty() && !self.misses(number) {
                self.let_go(number);
            }
        }
        Ok(())
    }

    /// Puts in a page that is waited for, and those beside it.
    fn serve(&self, space: usize, page: RemoteAddr, streams: &mut Streams) -> Result<Did> {
        let unit = page.0 / UNIT_LEN;
        if self.table.get(space, page.0) == Entry::Nothing {
            let did = self.put_zeros(space, page)?;
            if space == 0 && did == Did::All {
                self.queues().admit(unit);
            }
            return Ok(did);
        }
        let most = (self.work.at_a_time() as u64 / UNIT).max(1);
        // Each page more that comes in is one more that has to leave.
        let close = page.0 / (CLOSE * PAGE) * (CLOSE * PAGE);
        let units = match space == 0 && !self.is_checkpointed() {
            true => streams.from(unit).min(most).min(self.room() / UNIT_LEN).max(1),
            false => 1,
        };
        match units {
            1 => self.bring(space, close, close + CLOSE * PAGE, Some(page)),
            _ => self.bring(space, unit * UNIT_LEN, (unit + units) * UNIT_LEN, Some(page)),
        }
    }

    /// Puts in pages of zeros: the one that is waited for, and those behind it in its unit.
    fn put_zeros(&self, space: usize, page: RemoteAddr) -> Result<Did> {
        let _gate = self.gate();
        let Some(userfault) = self.userfault(space) else { return Ok(Did::All) };
        if self.table.get(space, page.0) != Entry::Nothing {
            return Ok(Did::NotYet); // it came to be known meanwhile
        }
        let end = (page.0 / UNIT_LEN + 1) * UNIT_LEN;
        let is_zero = |at: &u64| self.table.get(space, *at) == Entry::Nothing;
        let more = (page.0 + PAGE..end).step_by(PAGE as usize).take_while(is_zero).count() as u64;
        for end in [page.0 + PAGE + more * PAGE, page.0 + PAGE] {
            match userfault.put_zeros(page, RemoteAddr(end))? {
                Put::Changing(0) => return Ok(Did::NotYet),
                Put::Unmapped(0) if end > page.0 + PAGE => continue,
                // It came while it was waited for; or it was out when it was freed lazily, which leaves the mark.
                Put::Unmapped(0) | Put::Present(0) => {
                    let is_marked = space == 0
                        && self.kept(page.0, page.0 + PAGE, false).is_some_and(|kept| !kept.is_empty());
                    if is_marked {
                        let _ = userfault.release(page, RemoteAddr(page.0 + PAGE));
                        return Ok(Did::NotYet);
                    }
                    let _ = userfault.wake(page, RemoteAddr(page.0 + PAGE));
                }
                _ => {}
            }
            break;
        }
        Ok(Did::All)
    }

    /// Puts in what is missing of `[start, end)`; if one of these pages is waited for, it must be among it.
    fn bring(&self, space: usize, start: u64, end: u64, waited: Option<RemoteAddr>) -> Result<Did> {
        // What is stored is read without the gate; whether it is still what is wanted shows under it.
        let flushed = self.flushed.load(Ordering::Acquire);
        let mut wanted: Vec<(u64, At)> = Vec::new();
        self.table.each(space, start, end, |address, entry| {
            let is_waited = waited.is_some_and(|page| page.0 == address);
            match entry {
                Entry::Stored { at, is_in } if !is_in || is_waited => wanted.push((address, at)),
                _ => {}
            }
        });
        if end - start <= CLOSE * PAGE
            && let Some(page) = waited
        {
            let is_beside = |run: &&[(u64, At)]| run.iter().any(|(address, _)| *address == page.0);
            wanted = wanted.chunk_by(|a, b| b.1.follows(a.1)).find(is_beside).unwrap_or_default().to_vec();
        }
        let mut read: Vec<(u64, At, usize)> = Vec::with_capacity(wanted.len());
        let mut buffer = Aligned::new(wanted.len());
        let mut at = 0;
        for run in wanted.chunk_by(|a, b| b.1.follows(a.1)) {
            let bytes = buffer.pages(at..at + run.len());
            if let Err(why) = self.read_patiently(run, bytes) {
                let is_waited = |(address, place): &(u64, At)| {
                    waited.is_some_and(|page| page.0 == *address) && self.is_at(space, *address, *place)
                };
                if run.iter().any(is_waited) {
                    self.work.give_up(&format!("a page of it cannot be read back: {why}"));
                }
            } else {
                read.extend(run.iter().enumerate().map(|(n, (address, place))| (*address, *place, at + n)));
            }
            at += run.len();
        }
        self.install(space, (start, end), (&read, flushed), &mut buffer, waited)
    }

    fn install(
        &self,
        space: usize,
        (start, end): (u64, u64),
        (read, flushed): (&[(u64, At, usize)], u64),
        buffer: &mut Aligned,
        waited: Option<RemoteAddr>,
    ) -> Result<Did> {
        let mut gate = self.gate();
        let Some(userfault) = self.userfault(space) else { return Ok(Did::All) };
        if space == 0 && self.forget_dropped(&mut gate, start, end, waited) {
            return Ok(Did::NotYet);
        }
        if !read.is_empty() && self.flushed.load(Ordering::Acquire) != flushed {
            // A page may have left again, and its slot be one that has been free and is written anew.
            return Ok(Did::NotYet);
        }
        let is_still = |&&(address, place, _): &&(u64, At, usize)| self.is_at(space, address, place);
        let read: Vec<_> = read.iter().filter(is_still).copied().collect();
        let (mut brought, mut units) = (0, Vec::new());
        for run in read.chunk_by(|a, b| b.0 == a.0 + PAGE && b.2 == a.2 + 1) {
            let mut left = run;
            while let Some(&(address, _, at)) = left.first() {
                let bytes = buffer.pages(at..at + left.len());
                let done = match userfault.put(RemoteAddr(address), bytes)? {
                    Put::All => left.len(),
                    Put::Changing(0) => return Ok(Did::NotYet),
                    Put::Present(0) => 1,
                    Put::Unmapped(0) => {
                        // The rest may lie in another mapping, or in none.
                        let put = userfault.put(RemoteAddr(address), &bytes[..PAGE as usize])?;
                        match settled(put, &userfault) {
                            Put::Changing(0) => return Ok(Did::NotYet),
                            _ => 1,
                        }
                    }
                    Put::Changing(n) | Put::Present(n) | Put::Unmapped(n) => (n / PAGE) as usize,
                    Put::Ended => return Ok(Did::All),
                };
                for &(address, at, _) in &left[..done] {
                    self.table.set(space, address, Entry::Stored { at, is_in: true })?;
                    units.push(address / UNIT_LEN);
                }
                brought += done as u64;
                left = &left[done..];
            }
        }
        // What is on its way to a slot comes back as it is, and counts as written.
        for (cell, address) in self.table.cells(space, start, end) {
            let at = cell as usize;
            let put = self
                .work
                .cells
                .with(at..at + 1, |bytes| userfault.put_written(RemoteAddr(address), bytes))?;
            match settled(put, &userfault) {
                Put::Changing(_) => return Ok(Did::NotYet),
                // It stays where it is.
                Put::Unmapped(_) => continue,
                Put::Ended => return Ok(Did::All),
                Put::All | Put::Present(_) => {
                    self.table.set(space, address, Entry::Nothing)?;
                    if space == 0 {
                        gate.cells.remove(&cell);
                    }
                    units.push(address / UNIT_LEN);
                }
            }
            brought += 1;
        }
        if let Some(page) = waited {
            // Whoever put it in before us has not woken who came later.
            let _ = userfault.wake(page, RemoteAddr(page.0 + PAGE));
        }
        self.brought.fetch_add(brought, Ordering::Relaxed);
        self.work.cells.add(Word::In, brought);
        if space == 0 {
            units.dedup();
            units.into_iter().for_each(|unit| self.queues().admit(unit));
        }
        Ok(Did::All)
    }

    /// Forgets what is out of `[start, end)` of the program, as far as we know, and has been dropped in a way that nobody tells of, as
    /// by a guard region (`MADV_GUARD_INSTALL`): where it was there is no mark any more. The same holds for a page that is waited
    /// for. Tells whether there was something.
    fn forget_dropped(&self, gate: &mut Gate, start: u64, end: u64, waited: Option<RemoteAddr>) -> bool {
        let mut out = Vec::new();
        self.table.each(0, start, end, |address, entry| {
            let is_waited = waited.is_some_and(|page| page.0 == address) && entry != Entry::Nothing;
            if entry.is_missing() || is_waited {
                out.push(Range { start: address, len: PAGE });
            }
        });
        if out.is_empty() || self.work.cells.get(Word::Unmarked) > 0 {
            return false;
        }
        let Some(kept) = self.kept(start, end, true) else { return false };
        let dropped = Range::without(&Range::joined(out), &kept);
        // What is just being moved leaves no mark either, and is told of; where there is another program by now, nothing matters.
        let is_told = || self.userfault(0).is_none_or(|u| !matches!(probe(&u), Ok(Put::Unmapped(_))));
        if dropped.is_empty() || is_told() {
            return !dropped.is_empty();
        }
        dropped.iter().for_each(|range| self.forget(gate, 0, range.start, range.end()));
        true
    }

    /// Takes the marks away of what was freed lazily (`MADV_FREE`) while it was out, which leaves them: it would look as if it was there.
    /// The kernel refuses while anything is under way, and it is not known where what is out has been moved to.
    fn unmark_freed(&self) {
        let (Some(userfault), Some(marked)) = (self.userfault(0), self.kept(0, ADDRESS_SPACE.1, false))
        else {
            return;
        };
        let mut out = Vec::new();
        self.table.all(0, |address, entry| {
            if entry.is_missing() {
                out.push(Range { start: address, len: PAGE });
            }
        });
        for freed in Range::without(&marked, &Range::joined(out)) {
            let _ = userfault.release(RemoteAddr(freed.start), RemoteAddr(freed.end()));
        }
    }

    /// Which pages of `[start, end)` of the program are marked as being out, or also those that are in memory; nothing if that cannot
    /// be told.
    fn kept(&self, start: u64, end: u64, or_in: bool) -> Option<Vec<Range>> {
        let mut pagemap = self.pagemap.lock().unwrap_or_else(PoisonError::into_inner);
        if pagemap.as_ref().is_none_or(Pagemap::is_of_the_past) {
            *pagemap = Some(Pagemap::open(self.work.pid).ok()?);
        }
        let any = Category::PRESENT | Category::SWAPPED;
        let query =
            Query { any, report: Category::PRESENT | Category::WRITTEN, ..Query::none_of(Category::GUARD) };
        let mut runs = Vec::new();
        pagemap.as_ref()?.scan(RemoteAddr(start), RemoteAddr(end), query, &mut runs).ok()?;
        runs.retain(|run| match run.categories.contains(Category::PRESENT) {
            true => or_in,
            false => !run.categories.contains(Category::WRITTEN),
        });
        Some(runs.iter().map(|run| Range { start: run.start, len: run.end - run.start }).collect())
    }

    /// Whether a page is stored there now.
    fn is_at(&self, space: usize, address: u64, place: At) -> bool {
        matches!(self.table.get(space, address), Entry::Stored { at, .. } if at == place)
    }

    /// Reads pages that are stored one behind the other, and checks each.
    fn read_patiently(&self, run: &[(u64, At)], bytes: &mut [u8]) -> Result<()> {
        let began = Instant::now();
        let Some(&(_, first)) = run.first() else { return Ok(()) };
        loop {
            let read = match first {
                At::Slot(slot) => self.read_slots(slot, bytes),
                At::Origin(page) => match &self.work.origin {
                    Some(origin) => origin.read(page, bytes),
                    None => Err(Error::Failed("it was not restored from a checkpoint".into())),
                },
            };
            match read {
                Err(_) if began.elapsed() < PATIENCE && !self.leave.load(Ordering::Relaxed) => {
                    std::thread::sleep(PAUSE);
                }
                other => return other,
            }
        }
    }
}

/// What is told of memory where nothing is followed: nothing happens there, besides that it is told whether something is just
/// changing, or there is no memory at all.
fn probe(userfault: &Userfault) -> stillpoint_linux::Result<Put> {
    let nowhere = RemoteAddr(ADDRESS_SPACE.0);
    userfault.put_zeros(nowhere, RemoteAddr(nowhere.0 + PAGE))
}

/// What became of a page that was put in. The kernel looks for the mapping after it has looked whether one is moved: it may be on its way
/// to somewhere else since.
fn settled(put: Put, userfault: &Userfault) -> Put {
    match put {
        Put::Unmapped(0) if is_changing(userfault) => Put::Changing(0),
        put => put,
    }
}

/// Whether pages are just being dropped or moved, or a process copied, which has to be read first.
fn is_changing(userfault: &Userfault) -> bool {
    matches!(probe(userfault), Ok(Put::Changing(_)))
}

impl Server<'_> {
    fn read_slots(&self, first: u64, bytes: &mut [u8]) -> Result<()> {
        self.work.working.read(first, bytes)?;
        let mut pages = bytes.chunks_exact(PAGE as usize).zip(first..);
        let wrong = pages.find(|(page, slot)| crc32fast::hash(page) != self.work.sums.get(*slot));
        wrong.map_or(Ok(()), |(_, slot)| Err(self.work.working.damaged(slot).into()))
    }
}

/// Pages that lie where direct I/O can write to them.
struct Aligned {
    bytes: Vec<u8>,
    from: usize,
}

impl Aligned {
    fn new(pages: usize) -> Self {
        let bytes = vec![0; (pages + 1) * PAGE as usize];
        let from = bytes.as_ptr().align_offset(PAGE as usize);
        Aligned { bytes, from }
    }

    fn pages(&mut self, pages: std::ops::Range<usize>) -> &mut [u8] {
        let at = |page: usize| self.from + page * PAGE as usize;
        let (from, to) = (at(pages.start), at(pages.end));
        &mut self.bytes[from..to]
    }
}

/// What is zeros in the copies that a process makes of itself (`MADV_WIPEONFORK`). One that has just ended has made none.
fn wiped(pid: u32) -> Vec<Range> {
    let maps = Proc::process(pid).and_then(|process| process.smaps()).unwrap_or_default();
    let wiped = maps.iter().filter(|smap| smap.flags.contains(VmFlags::WIPE_ON_FORK));
    wiped.map(|smap| Range { start: smap.vma.start, len: smap.vma.end - smap.vma.start }).collect()
}
