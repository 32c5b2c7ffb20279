//! Taking pages out of a program.
//!
//! 1. All threads stand still, and what happened until now has been read: nobody is just dropping or moving memory.
//! 2. What is about to leave is noted. From now on, whoever of us dies, each of these pages is in its place or aside.
//! 3. The program's main thread moves the pages aside (`UFFDIO_MOVE`), each with all that was ever written to it. It does not matter
//!    whether the others run meanwhile, as they would if we died.
//! 4. Pages that were written since they were stored are copied to cells. Where each page is now is noted, and then that nothing is
//!    on its way any more.
//! 5. What is aside is unmapped, and the program runs on.
//! 6. The cells are written to slots, which is noted, and are free again.
//!
//! A server that comes after one which died in 3 or 4 lets nothing more be moved aside, for which the program need not stand still:
//! what follows the place aside is told to let go, which waits for a move that is just under way. Then each page that is aside is
//! copied to a cell. What is still mapped aside is unmapped the next time that pages are taken out.

use crate::cells::{RUNS, Word};
use crate::growth::{Growth, Look};
use crate::queue::UNIT;
use crate::server::{Gate, Server, UNIT_LEN};
use crate::table::{At, Entry};
use crate::{Error, Result, arm};
use rustix::fd::{AsFd, AsRawFd, IntoRawFd};
use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use stillpoint_capture::blocked::Earlier;
use stillpoint_capture::brief::stop_briefly;
use stillpoint_capture::freeze::Frozen;
use stillpoint_capture::lend::Bench;
use stillpoint_capture::target::Target;
use stillpoint_image::{PAGE, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::descriptors::duplicate_from;
use stillpoint_linux::fdinfo;
use stillpoint_linux::inject::outside;
use stillpoint_linux::pagemap::{Category, Query, Run};
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::program::{Arg, Program};
use stillpoint_linux::ptrace;
use stillpoint_linux::sched;
use stillpoint_linux::userfault::{MOVE, MOVE_LEN, MOVED_AT, Mode, OPEN_FLAGS, Userfault, move_argument};
use stillpoint_restore::lazy::turns::{Prompt, Turn};

/// A program that cannot be stopped, or asked, may be in a moment.
const AGAIN: Duration = Duration::from_millis(2);
/// Between two tries to find room on the medium.
const FULL: Duration = Duration::from_millis(200);
/// Longest and shortest time between two looks at how much memory the program takes, while there is enough.
const LOOKS: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(100));
/// A program may take so much more in a second, bytes.
const GROWS: u64 = 4 << 30;
/// To look through all memory may take one part in so many of the time.
const SPARING: u32 = 20;
/// Most entries of a robust list that are followed (`ROBUST_LIST_LIMIT`).
const ROBUST: usize = 2048;
/// After so many batches in a row from which nothing was taken out, the limit counts as exceeded.
const IN_VAIN: u32 = 20;
/// A program that cannot be followed is asked so often, unless it takes too much.
const FOLLOWED_IN_VAIN: u32 = 5;

type Captured<T> = stillpoint_capture::Result<T>;

/// Takes pages out whenever there are too many, until all are to leave.
pub(crate) fn run(server: &Server<'_>) -> Result<()> {
    let mut taker = Taker {
        server,
        target: None,
        earlier: Earlier::default(),
        looked: None,
        in_vain: 0,
        armed_in_vain: 0,
        density: UNIT,
        growth: Growth::default(),
    };
    while !server.leave.load(Ordering::Relaxed) {
        if let Err(e) = taker.turn() {
            // The next server begins anew.
            server.leave.store(true, Ordering::SeqCst);
            return Err(e);
        }
    }
    Ok(())
}

struct Taker<'a, 's> {
    server: &'a Server<'s>,
    target: Option<Target>,
    earlier: Earlier,
    /// When all memory was looked through last, and how long that took.
    looked: Option<(Instant, Duration)>,
    in_vain: u32,
    /// How often in a row the program could not be followed before it takes too much.
    armed_in_vain: u32,
    /// How many pages of a unit are in memory, about.
    density: u64,
    growth: Growth,
}

/// A page that is to leave.
#[derive(Clone, Copy, Debug)]
struct Leaving {
    address: u64,
    /// It is not as it is stored.
    is_dirty: bool,
}

impl Taker<'_, '_> {
    fn turn(&mut self) -> Result<()> {
        let Server { work, .. } = self.server;
        let pause = |pause: Duration| std::thread::park_timeout(pause);
        let Some(taken) = private_bytes(work.pid) else {
            // It ends.
            pause(LOOKS.1);
            return Ok(());
        };
        // Whoever takes its checkpoints leaves it to us to follow what it writes.
        let is_wanted = work.cells.get(Word::Claims) > 0 && work.board.space(0).descriptor().is_none();
        if is_wanted && self.armed_in_vain < FOLLOWED_IN_VAIN {
            match self.in_turn(Self::armed) {
                Ok(Some(())) => self.armed_in_vain = 0,
                Ok(None) => {}
                Err(_) => self.armed_in_vain += 1,
            }
        }
        let batch = work.at_a_time() as u64 * PAGE;
        let [out, back] = [Word::Out, Word::In].map(|word| work.cells.get(word) * PAGE);
        self.growth.seen(Look { at: Instant::now(), taken, out, back });
        let low = work.limit.saturating_sub(self.growth.headroom(batch)).max(work.limit / 2);
        if taken <= low {
            self.tell_exceeded(None);
            let left = Duration::from_nanos((low - taken).saturating_mul(1_000_000_000) / GROWS);
            pause(left.clamp(LOOKS.0, LOOKS.1));
            return Ok(());
        }
        let began = Instant::now();
        match self.in_turn(Self::batch).map(Option::flatten) {
            Ok(Some(0)) => {
                self.in_vain += 1;
                if self.in_vain > IN_VAIN && taken > work.limit {
                    self.tell_exceeded(Some(taken));
                    pause(LOOKS.1);
                }
                pause(AGAIN);
            }
            Ok(Some(_)) => {
                self.in_vain = 0;
                self.growth.left_in(began.elapsed());
            }
            Ok(None) => pause(AGAIN),
            Err(e) if e.is_full() => self.wait_for_room(&e)?,
            Err(Error::Store(e)) => {
                // It may pass. Until then it takes more than its limit, which is better than to lose something.
                self.server.teller.trouble(Some(format!("its memory cannot be paged: {e}")));
                work.cells.set(Word::Exceeded, 1);
                pause(FULL);
            }
            Err(e @ (Error::Capture(_) | Error::Kernel(_))) => {
                // It ends, is another program by now, or is looked at by somebody else.
                if self.target.as_ref().is_none_or(Target::is_replaced) {
                    self.target = None;
                }
                self.in_vain += 1;
                if self.in_vain == IN_VAIN && taken > work.limit {
                    self.server.teller.trouble(Some(format!("its memory cannot be paged: {e}")));
                    work.cells.set(Word::Exceeded, 1);
                }
                pause(if self.in_vain > IN_VAIN { LOOKS.1 } else { AGAIN });
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn tell_exceeded(&self, taken: Option<u64>) {
        let work = self.server.work;
        let (is_known, is_told) = (work.cells.get(Word::Exceeded) > 0, self.server.teller.has_trouble());
        match taken {
            // What the server before us has told is not told any more.
            Some(taken) if !is_known || !is_told => {
                let (taken, limit) = (taken >> 20, work.limit >> 20);
                let why = format!(
                    "it takes {taken} MiB of private memory that cannot leave, more than its limit of {limit} MiB"
                );
                self.server.teller.trouble(Some(why));
                work.cells.set(Word::Exceeded, 1);
            }
            None if is_known || is_told => {
                self.server.teller.trouble(None);
                work.cells.set(Word::Exceeded, 0);
            }
            _ => {}
        }
    }

    /// Lets the program stand still while there is no room on the medium, but for a moment now and then: a signal may end it.
    fn wait_for_room(&mut self, why: &Error) -> Result<()> {
        let why = format!("it is paused, as there is no room for its memory to be paged: {why}");
        self.server.teller.trouble(Some(why));
        self.server.work.cells.set(Word::Exceeded, 0);
        while !self.server.leave.load(Ordering::Relaxed) && self.target.is_some() {
            // A checkpoint may come between two stops, and make room by one that is not kept.
            match self.in_turn(Self::stand_still) {
                Ok(Some(true)) => break,
                Ok(_) => std::thread::sleep(AGAIN),
                // It has ended, or is stopped by somebody else.
                Err(Error::Capture(_) | Error::Kernel(_)) => break,
                Err(e) => return Err(e),
            }
        }
        self.server.teller.trouble(None);
        Ok(())
    }

    /// Stops the program until there is room, for a while; tells whether there is.
    fn stand_still(&mut self) -> Result<bool> {
        let server = self.server;
        let Some(target) = &self.target else { return Ok(false) };
        let mut has_room = false;
        server.stopping.store(true, Ordering::SeqCst);
        let stopped = stop_briefly(target, &mut self.earlier, |_| {
            let until = Instant::now() + FULL;
            while !has_room && Instant::now() < until && !server.leave.load(Ordering::Relaxed) {
                has_room = server.make_room().is_ok();
                if !has_room {
                    std::thread::sleep(FULL / 10);
                }
            }
            Ok(())
        });
        server.stopping.store(false, Ordering::SeqCst);
        let ((), pause) = stopped.map_err(Error::Capture)?;
        server.work.cells.count_stop(pause);
        Ok(has_room)
    }

    /// Works unless the program is not to be stopped now, for the sake of a checkpoint.
    fn in_turn<T: Send>(&mut self, work: impl FnOnce(&mut Self) -> Result<T> + Send) -> Result<Option<T>> {
        self.server.busy.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let is_ours = [Word::Held, Word::Rests].iter().all(|word| self.server.work.cells.get(*word) == 0);
        let done = if is_ours { self.apart(work).map(Some) } else { Ok(None) };
        self.server.busy.store(false, Ordering::SeqCst);
        done
    }

    /// Works on a thread of its own: what it may still trace when it fails is let go of when it ends.
    fn apart<T: Send>(&mut self, work: impl FnOnce(&mut Self) -> Result<T> + Send) -> Result<T> {
        let done = ptrace::on_a_thread_of_its_own(|| work(self));
        done.unwrap_or_else(|_| Err(Error::Failed("taking pages out failed inside".into())))
    }

    /// Opens the program, and sees to it that what follows its memory is there.
    fn armed(&mut self) -> Result<()> {
        let server = self.server;
        if self.target.as_ref().is_some_and(Target::is_replaced) {
            self.target = None;
        }
        let target = match self.target.take() {
            Some(target) => target,
            None => Target::open(server.work.pid, 0, None).map_err(Error::Capture)?,
        };
        let target = self.target.insert(target);
        if server.work.board.space(0).descriptor().is_none() {
            let prompt = Prompt::begin(Turn::Ours);
            server.stopping.store(true, Ordering::SeqCst);
            let armed = arm::arm(server.work, target, &mut self.earlier);
            server.stopping.store(false, Ordering::SeqCst);
            drop(prompt);
            armed?;
        }
        Ok(())
    }

    /// Takes out as much as is taken out at a time; tells how many pages that were, none if it could not be tried.
    fn batch(&mut self) -> Result<Option<usize>> {
        let server = self.server;
        let work = server.work;
        self.armed()?;
        let Some(target) = &self.target else { return Ok(None) };
        server.flush()?;
        server.make_room()?;
        let most = work.at_a_time() as u64 / self.density;
        if server.queues().len() < 2 * most as usize
            || self.looked.is_none_or(|(at, took)| at.elapsed() > SPARING * took.max(LOOKS.1))
        {
            let began = Instant::now();
            server.discover(target)?;
            self.looked = Some((began, began.elapsed()));
        }
        let units: BTreeSet<u64> = {
            let mut queues = server.queues();
            (0..most).map_while(|_| queues.take()).collect()
        };
        if units.is_empty() {
            return Ok(Some(0));
        }
        let mut took = Ok((0, HashSet::new()));
        // The program waits meanwhile. For longer than that nobody else is to wait for the sake of a limit.
        let prompt = Prompt::begin(Turn::Ours);
        server.stopping.store(true, Ordering::SeqCst);
        let stopped = stop_briefly(target, &mut self.earlier, |frozen| {
            took = take_out(server, target, frozen, &units);
            Ok(())
        });
        server.stopping.store(false, Ordering::SeqCst);
        drop(prompt);
        if let Ok((_, pause)) = &stopped {
            work.cells.count_stop(*pause);
        }
        let stopped = stopped.map_err(Error::Capture);
        let (pages, stay) = match stopped.and(took) {
            Ok(took) => took,
            Err(e) => {
                units.iter().for_each(|unit| server.queues().keep(*unit));
                return Err(e);
            }
        };
        stay.iter().for_each(|unit| server.queues().keep(*unit));
        let left = units.len().saturating_sub(stay.len()).max(1) as u64;
        self.density = (pages as u64 / left).clamp(1, UNIT);
        server.flush()?;
        Ok(Some(pages))
    }
}

/// Private memory that a process takes, bytes.
pub(crate) fn private_bytes(pid: u32) -> Option<u64> {
    let process = Proc::process(pid).ok()?;
    let statm = process.read("statm").ok()?;
    let mut words = std::str::from_utf8(&statm).ok()?.split(' ').skip(1);
    let (resident, shared): (u64, u64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(resident.saturating_sub(shared) * PAGE)
}

/// Whether pages of a mapping can be moved aside.
fn can_leave(vma: &Vma) -> bool {
    const BOTH: u32 = (libc::PROT_READ | libc::PROT_WRITE) as u32;
    let is_special = vma.name.starts_with(b"[") && vma.name != b"[heap]" && !vma.name.starts_with(b"[anon:");
    vma.prot == BOTH && !vma.shared && vma.ino == 0 && !is_special
}

/// Mappings that lie in these and can leave.
fn leaving_mappings(server: &Server<'_>, target: &Target) -> Result<Vec<Vma>> {
    let cells = &server.work.cells;
    let aside = cells.get(Word::Aside);
    let mut maps = target.process.maps()?;
    maps.retain(|vma| can_leave(vma) && vma.start != aside);
    Ok(maps)
}

/// Runs of pages of the program that are in memory; none where nobody follows it.
pub(crate) fn present(server: &Server<'_>) -> Result<Option<Vec<Range>>> {
    if server.work.board.space(0).descriptor().is_none() {
        return Ok(None);
    }
    let Ok(target) = Target::open_quickly(server.work.pid, 0, None) else { return Ok(None) };
    let mut runs = Vec::new();
    for vma in target.process.maps()?.iter().filter(|vma| !vma.shared) {
        let any = Category::PRESENT | Category::SWAPPED;
        let query = Query { any, report: any | Category::WRITTEN, ..Query::default() };
        // What is just being unmapped is told of by an event.
        let _ = target.pagemap.scan(RemoteAddr(vma.start), RemoteAddr(vma.end), query, &mut runs);
    }
    // A mark, too, looks as if it was swapped out, and not written.
    runs.retain(|run| run.categories.intersects(Category::PRESENT | Category::WRITTEN));
    Ok(Some(runs.iter().map(|run| Range { start: run.start, len: run.end - run.start }).collect()))
}

/// Follows what is written in all private memory; nothing is waited for where it was not before.
pub(crate) fn follow_all(server: &Server<'_>) -> Result<()> {
    let Some(userfault) = server.userfault(0) else { return Ok(()) };
    let Ok(target) = Target::open_quickly(server.work.pid, 0, None) else { return Ok(()) };
    for vma in target.process.maps()?.iter().filter(|vma| !vma.shared) {
        let (start, end) = (RemoteAddr(vma.start), RemoteAddr(vma.end));
        if target.pagemap.is_followed(start, end).unwrap_or(true) || userfault.register(start, end).is_err() {
            continue;
        }
        release_marks(&userfault, &target, vma)?;
    }
    Ok(())
}

/// What was followed once, and then not, has marks that say nothing.
fn release_marks(userfault: &Userfault, target: &Target, vma: &Vma) -> Result<()> {
    let query = Query { any: Category::PRESENT | Category::SWAPPED, ..Query::none_of(Category::WRITTEN) };
    let mut marked = Vec::new();
    target.pagemap.scan(RemoteAddr(vma.start), RemoteAddr(vma.end), query, &mut marked)?;
    for run in marked {
        let _ = userfault.release(RemoteAddr(run.start), RemoteAddr(run.end));
    }
    Ok(())
}

/// Pages that the threads of a program are about to use, or the kernel for them in a way that waits for nobody; those that the main
/// thread needs when it is lent are there now.
fn hot(target: &Target, frozen: &Frozen) -> Captured<HashSet<u64>> {
    let mut pages = HashSet::new();
    let mut around = |at: u64, below: u64, above: u64| {
        let (from, to) = (at.saturating_sub(below) / PAGE, at.saturating_add(above) / PAGE);
        (from..=to).take(64).for_each(|page| _ = pages.insert(page));
    };
    for thread in &frozen.threads {
        let regs = thread.regs()?;
        // Whatever a register points to: the word of a lock that is just being taken, for one.
        for word in regs.to_bytes().chunks_exact(8) {
            around(word.try_into().map_or(0, u64::from_le_bytes), 0, 8);
        }
        around(regs.sp(), PAGE, 4 * PAGE);
        around(regs.thread_pointer(), PAGE, PAGE);
        if let Some(rseq) = thread.rseq().ok().and_then(|rseq| rseq.section()) {
            around(rseq, 32, 32);
        }
        let (head, len) = sched::robust_list(thread.tid())?;
        if len == 0 {
            continue;
        }
        around(head.0, 0, len);
        // struct robust_list_head: the first entry, the offset of the lock in an entry, the entry that is being added.
        let [first, offset, pending] =
            [0, 8, 16].map(|at| target.memory.read_u64(RemoteAddr(head.0 + at)).unwrap_or(0));
        let mut entry = first;
        for _ in 0..ROBUST {
            if entry & !1 == head.0 || entry == 0 {
                break;
            }
            around(entry & !1, 0, 8);
            around((entry & !1).wrapping_add(offset), 0, 8);
            entry = target.memory.read_u64(RemoteAddr(entry & !1)).unwrap_or(0);
        }
        if pending != 0 {
            around(pending & !1, 0, 8);
            around((pending & !1).wrapping_add(offset), 0, 8);
        }
    }
    let leader = &frozen.threads[0];
    if let Some(at) = leader.rseq().ok().and_then(|rseq| rseq.section()) {
        // struct rseq_cs, which the kernel looks at, and so do we, before the thread runs on.
        let section = target.memory.read_u64(RemoteAddr(at))?;
        outside(&target.memory, section, leader.regs()?)?;
        around(section, 0, 32);
    }
    // The kernel looks at it when the thread makes a call.
    if let Some(dispatch) = leader.dispatch()?.filter(|dispatch| dispatch.selector != 0) {
        let _ = target.memory.read(RemoteAddr(dispatch.selector), &mut [0]); // without it, it makes calls that do not ask for it
        around(dispatch.selector, 0, 0);
    }
    for gadget in target.gadgets.iter().flat_map(|gadgets| [gadgets.call, gadgets.sigreturn]) {
        target.memory.read(gadget, &mut [0])?;
    }
    Ok(pages)
}

/// What is to be done with the program standing still.
struct Plan {
    /// Runs that are moved, in order.
    runs: Vec<Range>,
    /// All pages of them that are in memory.
    pages: Vec<Leaving>,
    stay: HashSet<u64>,
}

/// Takes units out of a program that stands still; tells how many pages, and which units stay.
///
/// What may be missing of the program's own memory is put in by whoever gets the gate. So all that is looked at there, and all that
/// the lent thread uses, is looked at before the gate is taken; with the program standing still, it is there until we take it out.
fn take_out(
    server: &Server<'_>,
    target: &Target,
    frozen: &mut Frozen,
    units: &BTreeSet<u64>,
) -> Result<(usize, HashSet<u64>)> {
    let hot = hot(target, frozen).map_err(Error::Capture)?;
    let number = arm::lowest_free(&fdinfo::list(target.pid)?);
    let calls = [
        (libc::SYS_userfaultfd, [OPEN_FLAGS, 0, 0, 0, 0, 0]),
        (libc::SYS_mmap, [0, PAGE, 3, 0x4022, u64::MAX, 0]),
        (libc::SYS_ioctl, [number, MOVE, 0, 0, 0, 0]),
        (libc::SYS_munmap, [0, PAGE, 0, 0, 0, 0]),
        (libc::SYS_close, [number, 0, 0, 0, 0, 0]),
    ];
    let taken = arm::lender(target).bench(frozen, &calls, |bench| {
        let mut gate = server.gate();
        server.stopping.store(false, Ordering::SeqCst);
        let taken = take_out_by(server, &mut gate, target, bench, &hot, units, number);
        let cells = &server.work.cells;
        let followed = cells.get(Word::AsideFollowed);
        if cells.get(Word::Moving) > 0 {
            return Ok(recover(server, &mut gate).and(taken));
        }
        if followed > 0 {
            cells.set(Word::AsideFollowed, 0);
            stillpoint_linux::split::close_shared(followed as i32 - 1);
        }
        Ok(taken)
    });
    taken.map_err(Error::Capture)?
}

/// The same by whoever has the gate and the lent thread.
fn take_out_by(
    server: &Server<'_>,
    gate: &mut Gate,
    target: &Target,
    bench: &mut Bench<'_>,
    hot: &HashSet<u64>,
    units: &BTreeSet<u64>,
    number: u64,
) -> Result<(usize, HashSet<u64>)> {
    let cells = &server.work.cells;
    while server.read_events(gate, 0)? > 0 {}
    let Some(userfault) = server.userfault(0) else { return Ok((0, HashSet::new())) };
    let mut plan = plan(server, target, hot, &userfault, units)?;
    let mut stay = std::mem::take(&mut plan.stay);
    let aside = || (cells.get(Word::Aside), cells.get(Word::AsideLen));
    let unmap = |bench: &mut Bench<'_>| match aside() {
        (0, _) => Ok(()),
        left => unmap(server, bench, left).map_err(Error::Capture),
    };
    unmap(bench)?;
    let moved = move_aside(server, target, bench, &plan, number, &mut stay).map_err(Error::Capture)?;
    settle(server, gate, target, &plan, &moved, aside().0).map_err(Error::Capture)?;
    // What is aside of one that failed is still to be copied.
    unmap(bench)?;
    Ok((moved.iter().filter(|moved| **moved).count(), stay))
}

/// Chooses the pages of some units that can leave.
fn plan(
    server: &Server<'_>,
    target: &Target,
    hot: &HashSet<u64>,
    userfault: &Userfault,
    units: &BTreeSet<u64>,
) -> Result<Plan> {
    let maps = leaving_mappings(server, target)?;
    let mut plan = Plan { runs: Vec::new(), pages: Vec::new(), stay: HashSet::new() };
    let mut spans: Vec<Range> = Vec::new();
    for unit in units {
        match spans.last_mut().filter(|last| last.end() == unit * UNIT_LEN) {
            Some(last) => last.len += UNIT_LEN,
            None => spans.push(Range { start: unit * UNIT_LEN, len: UNIT_LEN }),
        }
    }
    for vma in &maps {
        let mut is_followed = false;
        for span in &spans {
            let (from, to) = (span.start.max(vma.start), span.end().min(vma.end));
            if from >= to {
                continue;
            }
            if !is_followed {
                let before = target.pagemap.is_followed(RemoteAddr(vma.start), RemoteAddr(vma.end))?;
                if userfault.register_missing(RemoteAddr(vma.start), RemoteAddr(vma.end)).is_err() {
                    break; // somebody else follows it
                }
                if !before {
                    release_marks(userfault, target, vma)?;
                }
                is_followed = true;
            }
            let mut runs: Vec<Run> = Vec::new();
            let query = Query {
                all: Category::PRESENT,
                report: Category::WRITTEN | Category::ZERO,
                ..Query::none_of(Category::FILE)
            };
            target.pagemap.scan(RemoteAddr(from), RemoteAddr(to), query, &mut runs)?;
            for page in runs
                .iter()
                .flat_map(|run| (run.start..run.end).step_by(PAGE as usize).map(|at| (at, run.categories)))
            {
                plan.add(server, hot, page)?;
            }
        }
    }
    Ok(plan)
}

impl Plan {
    fn add(&mut self, server: &Server<'_>, hot: &HashSet<u64>, (address, is): (u64, Category)) -> Result<()> {
        let room = server.work.at_a_time();
        if hot.contains(&(address / PAGE)) || self.pages.len() >= room || self.runs.len() >= RUNS {
            self.stay.insert(address / UNIT_LEN);
            return Ok(());
        }
        // Where it is going to be noted must not fail any more.
        server.table.make(0, address)?;
        let is_stored = matches!(server.table.get(0, address), Entry::Stored { is_in: true, .. });
        let is_dirty = is.contains(Category::WRITTEN) || !is_stored;
        self.pages.push(Leaving { address, is_dirty });
        match self.runs.last_mut().filter(|run| run.end() == address) {
            Some(run) => run.len += PAGE,
            None => self.runs.push(Range { start: address, len: PAGE }),
        }
        Ok(())
    }
}

/// Unmaps what pages were moved to.
fn unmap(server: &Server<'_>, bench: &mut Bench<'_>, (aside, len): (u64, u64)) -> Captured<()> {
    bench.visit(|_, visit| Ok(visit.call(libc::SYS_munmap, [aside, len, 0, 0, 0, 0])?))?;
    server.work.cells.set(Word::Aside, 0);
    Ok(())
}

/// Moves pages aside; tells of each whether it was.
fn move_aside(
    server: &Server<'_>,
    target: &Target,
    bench: &mut Bench<'_>,
    plan: &Plan,
    number: u64,
    stay: &mut HashSet<u64>,
) -> Captured<Vec<bool>> {
    let len = plan.pages.len() as u64 * PAGE;
    if len == 0 {
        return Ok(Vec::new());
    }
    let close = (libc::SYS_close, [number, 0, 0, 0, 0, 0]);
    let failed = |what: &str, r: i64| {
        stillpoint_capture::Error::Failed(format!("{what}: {}", std::io::Error::from_raw_os_error(-r as i32)))
    };
    // From its making to the end of the moves, should we die, it is closed.
    let (fd, made) = bench.visit(|_, visit| {
        let fd = visit.call_with_undo(libc::SYS_userfaultfd, [OPEN_FLAGS, 0, 0, 0, 0, 0], close)?;
        if fd < 0 {
            return Err(failed("userfaultfd", fd));
        }
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        let mapping = [0, len, (libc::PROT_READ | libc::PROT_WRITE) as u64, flags, u64::MAX, 0];
        Ok((fd as u64, visit.call_with_undo(libc::SYS_mmap, mapping, close)?))
    })?;
    let mut moved = vec![false; plan.pages.len()];
    let done = match made {
        ..0 => Err(failed("mmap", made)),
        aside => move_to(server, target, bench, plan, (fd, aside as u64, len), &mut moved, stay),
    };
    bench.visit(|_, visit| Ok(visit.call(libc::SYS_close, [fd, 0, 0, 0, 0, 0])?))?;
    done.map(|()| moved)
}

fn move_to(
    server: &Server<'_>,
    target: &Target,
    bench: &mut Bench<'_>,
    plan: &Plan,
    (fd, aside, len): (u64, u64, u64),
    moved: &mut [bool],
    stay: &mut HashSet<u64>,
) -> Captured<()> {
    let cells = &server.work.cells;
    cells.set(Word::AsideLen, len);
    cells.set(Word::Aside, aside);
    let followed =
        Userfault::new(duplicate_from(target.pidfd.as_fd(), fd as u32)?, target.pid, Mode::Moving)?;
    followed.register_destination(RemoteAddr(aside), RemoteAddr(aside + len))?;
    cells.set(Word::AsideFollowed, followed.into_fd().into_raw_fd() as u64 + 1);
    cells.begin_moving(&plan.runs);
    let mut left: Vec<(Range, u64)> = Vec::with_capacity(plan.runs.len());
    let mut to = aside;
    for run in &plan.runs {
        left.push((*run, to));
        to += run.len;
    }
    while !left.is_empty() {
        let now = left.split_off(left.len().saturating_sub(Bench::most_calls()));
        let mut program = Program::new();
        let calls: Vec<_> = now
            .iter()
            .map(|(run, to)| {
                let argument = program.data(&move_argument(RemoteAddr(run.start), RemoteAddr(*to), run.len));
                let arguments = [Arg::Value(fd), Arg::Value(MOVE), argument];
                (program.attempt("UFFDIO_MOVE", libc::SYS_ioctl, arguments), argument)
            })
            .collect();
        let outcome = bench.run(&program)?;
        for ((run, to), (call, argument)) in now.into_iter().zip(calls) {
            let result = outcome.result(call);
            let told = outcome.bytes(argument, MOVE_LEN)[MOVED_AT..].try_into().map_or(0, i64::from_le_bytes);
            let done = if result == 0 { run.len } else { told.clamp(0, run.len as i64) as u64 / PAGE * PAGE };
            let first = (to - aside) / PAGE;
            moved[first as usize..(first + done / PAGE) as usize].fill(true);
            if done == run.len {
                continue;
            }
            // Somebody else has this page, too, or uses it past the program's mappings; or all of them are locked.
            stay.insert((run.start + done) / UNIT_LEN);
            let skipped = if result == -i64::from(libc::EINVAL) { run.len } else { done + PAGE };
            if skipped < run.len {
                left.push((Range { start: run.start + skipped, len: run.len - skipped }, to + skipped));
            }
        }
    }
    Ok(())
}

/// Notes where each page is, with those that are not stored in cells; then nothing is on its way any more.
fn settle(
    server: &Server<'_>,
    gate: &mut Gate,
    target: &Target,
    plan: &Plan,
    moved: &[bool],
    aside: u64,
) -> Captured<()> {
    let work = server.work;
    let leaving = || plan.pages.iter().zip(moved).enumerate().filter(|(_, (_, moved))| **moved);
    let dirty: Vec<(u64, u64)> = leaving()
        .filter(|(_, (page, _))| page.is_dirty)
        .map(|(n, (page, _))| (page.address, aside + n as u64 * PAGE))
        .collect();
    let from: Vec<(u64, u64)> = dirty.iter().map(|(_, at)| (*at, PAGE)).collect();
    let mut is_zero = Vec::with_capacity(dirty.len());
    work.cells.with(0..dirty.len(), |bytes| -> Captured<()> {
        target.memory.read_pinning(&from, bytes)?;
        is_zero.extend(bytes.chunks_exact(PAGE as usize).map(|page| page.iter().all(|byte| *byte == 0)));
        Ok(())
    })?;
    let failed = |e: Error| stillpoint_capture::Error::Failed(e.to_string());
    let zeros: HashSet<u64> =
        dirty.iter().zip(&is_zero).filter_map(|(page, is_zero)| is_zero.then_some(page.0)).collect();
    mark(server, leaving().map(|(_, (page, _))| page.address).filter(|address| !zeros.contains(address)));
    let mut old = Vec::new();
    for (_, (page, _)) in leaving().filter(|(_, (page, _))| !page.is_dirty) {
        if let Entry::Stored { at, .. } = server.table.get(0, page.address) {
            server.table.set(0, page.address, Entry::Stored { at, is_in: false }).map_err(failed)?;
        }
    }
    for (cell, ((address, _), is_zero)) in dirty.iter().zip(is_zero).enumerate() {
        old.extend(server.table.get(0, *address).slot());
        let entry = if is_zero { Entry::Nothing } else { Entry::Cell(cell as u64) };
        server.table.set(0, *address, entry).map_err(failed)?;
        if !is_zero {
            gate.cells.insert(cell as u64, *address);
        }
    }
    work.cells.set(Word::Moving, 0);
    work.cells.add(Word::Out, leaving().count() as u64);
    if server.is_alone() {
        server.slots.give_back(&old);
    }
    Ok(())
}

/// Marks the places of pages that have just left.
fn mark(server: &Server<'_>, pages: impl Iterator<Item = u64>) {
    let Some(userfault) = server.userfault(0) else { return };
    server.work.mark(&userfault, pages.map(|start| Range { start, len: PAGE }).collect());
}

/// Ends what somebody was at who died: nothing more is moved aside, and what is there is copied to cells.
pub(crate) fn recover(server: &Server<'_>, gate: &mut Gate) -> Result<()> {
    let cells = &server.work.cells;
    let followed = cells.descriptor(Word::AsideFollowed);
    let (aside, len, moving) = (cells.get(Word::Aside), cells.get(Word::AsideLen), cells.moving());
    if let Some(followed) = followed {
        let userfault = Userfault::from_shared(followed.as_raw_fd());
        // Waits for a move that is under way; fails if the program is no more.
        let _ = userfault.unregister(RemoteAddr(aside), RemoteAddr(aside + len));
        if !moving.is_empty()
            && let Ok(target) = Target::open_quickly(server.work.pid, 0, None)
        {
            let mut runs = Vec::new();
            // One that the kernel is just moving to other memory, or has swapped out, is there, too.
            let query = Query { any: Category::PRESENT | Category::SWAPPED, ..Query::default() };
            target.pagemap.scan(RemoteAddr(aside), RemoteAddr(aside + len), query, &mut runs)?;
            let mut to = aside;
            let places = moving.iter().flat_map(|run| (run.start..run.end()).step_by(PAGE as usize));
            let places: Vec<(u64, u64)> = places
                .map(|address| {
                    to += PAGE;
                    (address, to - PAGE)
                })
                .collect();
            let is_there = |at: u64| runs.iter().any(|run| (run.start..run.end).contains(&at));
            mark(server, places.iter().filter(|(_, at)| is_there(*at)).map(|(address, _)| *address));
            for (cell, (address, at)) in places.iter().filter(|(_, at)| is_there(*at)).enumerate() {
                let read = cells.with(cell..cell + 1, |bytes| target.memory.read(RemoteAddr(*at), bytes));
                read?;
                server.table.set(0, *address, Entry::Cell(cell as u64))?;
                gate.cells.insert(cell as u64, *address);
            }
        }
    }
    cells.set(Word::Moving, 0);
    if let Some(followed) = followed {
        cells.set(Word::AsideFollowed, 0);
        stillpoint_linux::split::close_shared(followed.as_raw_fd());
    }
    Ok(())
}

impl Server<'_> {
    /// Sees to it that what is taken out next can be written.
    fn make_room(&self) -> Result<()> {
        let known = || {
            // What is moved meanwhile, from behind where we look to where we have looked, would be overlooked.
            let gate = self.gate();
            let mut slots: Vec<u64> = gate.unsettled.slots().collect();
            for number in std::iter::once(0).chain(self.copies()) {
                self.table.all(number, |_, entry| slots.extend(entry.slot()));
            }
            (slots, gate)
        };
        self.slots.make_room(self.work.at_a_time() as u64, known)
    }

    /// Finds what is in memory and is not known yet.
    fn discover(&self, target: &Target) -> Result<()> {
        for vma in leaving_mappings(self, target)? {
            let mut runs = Vec::new();
            let query = Query { all: Category::PRESENT, ..Query::none_of(Category::FILE) };
            // It may just be unmapped.
            let _ = target.pagemap.scan(RemoteAddr(vma.start), RemoteAddr(vma.end), query, &mut runs);
            let mut queues = self.queues();
            for run in runs {
                (run.start / UNIT_LEN..=(run.end - 1) / UNIT_LEN).for_each(|unit| queues.discover(unit));
            }
        }
        Ok(())
    }

    /// The cells in use, ascending: a copy of the program may want one that the program itself does not any more.
    fn cells(&self) -> BTreeSet<u64> {
        let gate = self.gate();
        let mut cells: BTreeSet<u64> = gate.cells.keys().copied().collect();
        cells.extend(self.copies().flat_map(|copy| self.table.all_cells(copy)).map(|(cell, _)| cell));
        cells
    }

    /// Writes all cells to slots, which are free from then on.
    pub fn flush(&self) -> Result<()> {
        let cells = self.cells();
        if cells.is_empty() {
            return Ok(());
        }
        self.make_room()?;
        let mut runs = self.slots.take(cells.len() as u64).into_iter();
        let (mut places, mut run) = (Vec::with_capacity(cells.len()), (0, 0));
        for cell in &cells {
            if run.1 == 0 {
                run = runs.next().ok_or_else(|| Error::Failed("there are too few slots".into()))?;
            }
            places.push((*cell, run.0));
            run = (run.0 + 1, run.1 - 1);
        }
        let written = places.chunk_by(|a, b| b.0 == a.0 + 1 && b.1 == a.1 + 1).try_for_each(|part| {
            let (cell, slot) = (part[0].0 as usize, part[0].1);
            self.work.cells.with(cell..cell + part.len(), |bytes| {
                for (page, (_, slot)) in bytes.chunks_exact(PAGE as usize).zip(part) {
                    self.work.sums.set(*slot, crc32fast::hash(page));
                }
                self.work.working.write(slot, bytes)
            })
        });
        if let Err(e) = written {
            self.slots.give_back(&places.iter().map(|(_, slot)| *slot).collect::<Vec<_>>());
            return Err(e.into());
        }
        self.work.cells.add(Word::Written, cells.len() as u64);
        let mut gate = self.gate();
        self.flushed.fetch_add(1, Ordering::Relaxed);
        let mut unwanted = Vec::new();
        for (cell, slot) in &places {
            match gate.cells.remove(cell) {
                Some(address) if self.table.get(0, address) == Entry::Cell(*cell) => {
                    self.table.set(0, address, Entry::Stored { at: At::Slot(*slot), is_in: false })?;
                }
                _ if gate.unsettled.flushed(*cell, *slot) => {}
                _ => unwanted.push(*slot),
            }
        }
        let copies: Vec<usize> = self.copies().collect();
        for copy in &copies {
            for (cell, address) in self.table.all_cells(*copy) {
                let Some((_, slot)) = places.iter().find(|(c, _)| *c == cell) else {
                    return Err(Error::Failed("a copy of it knows a cell that nobody else does".into()));
                };
                let entry = Entry::Stored { at: At::Slot(*slot), is_in: false };
                self.table.set(*copy, address, entry)?;
            }
        }
        if copies.is_empty() {
            self.slots.give_back(&unwanted);
        }
        Ok(())
    }
}
