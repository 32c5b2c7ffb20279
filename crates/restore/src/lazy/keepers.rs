//! Processes that keep the memory of programs in reach: one serves their pages, and others stand by to serve when that one is
//! killed.
//!
//! They share a table of descriptors, so that what follows the program's memory stays open as long as any of them lives:
//! if it was closed, the kernel would give the program zeros instead of its pages. Who was made first serves; each of the
//! others waits for the ends of all that were made before it. Who serves sees to it that others stand by. Those have
//! another name: whoever kills all that is called stillpoint does not mean the program that it brought back.

use super::board::{Board, Count, Tally};
use super::claim::Claim;
use super::server::{self, Served};
use super::turns::monotonic_us;
use super::work::Work;
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::process::setsid;
use std::io::{PipeReader, Read};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use stillpoint_linux::Error as Kernel;
use stillpoint_linux::descriptors::{null, pidfd_open};
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::pager::{self, Role};
use stillpoint_linux::split::{self, Split};
use stillpoint_linux::supervise::{Child, wait};
use stillpoint_linux::userfault::{EVENT_WORDS, Event, logged};

/// How many stand by.
const BY: usize = 2;
/// Servers that end because of a failure of their own before the program is given up.
const BROKEN: u64 = 5;
/// So many are made at a time, at most.
const PLENTY: usize = 16;
/// Between two tries of what may work in a moment.
const PAUSE: Duration = Duration::from_millis(1);

/// What processes that keep memory in reach are there for.
pub trait Duty {
    /// What outlives each of them.
    fn board(&self) -> &Board;

    /// The descriptors that they need from the beginning to the end, besides those on the board.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// Whether standard error leads to somebody.
    fn is_heard(&self) -> bool;

    /// What the one that serves is called.
    fn role(&self) -> Role;

    /// Serves until there is nothing left to do, or one of those who stand `by` has died. `claim` is that of whoever follows the
    /// program.
    ///
    /// # Errors
    /// Whatever kept it from going on; another one tries then.
    fn serve(&self, by: &[BorrowedFd<'_>], claim: &mut Claim) -> Result<Served>;

    /// No program that waits for pages must go on.
    fn give_up(&self, why: &Error);
}

impl Duty for Work<'_> {
    fn board(&self) -> &Board {
        &self.board
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Work::descriptors(self)
    }

    fn is_heard(&self) -> bool {
        self.is_heard
    }

    fn role(&self) -> Role {
        Role::Serves
    }

    fn serve(&self, by: &[BorrowedFd<'_>], claim: &mut Claim) -> Result<Served> {
        server::serve(self, by, claim)
    }

    fn give_up(&self, why: &Error) {
        self.give_up_all(why);
    }
}

/// Tells when processes that serve have let go of all that they had from us and do not need.
#[derive(Debug)]
pub struct Parted(PipeReader);

impl Parted {
    /// Waits for it, or for their end.
    pub fn wait(mut self) {
        let _ = self.0.read(&mut [0]); // nobody ever writes
    }
}

/// Begins to serve the memory that userfaults follow, each that of the program of this number, in processes of their own;
/// returns the first of them. No program whose descriptors are here must run before they have [`Parted`]. To be called while no
/// other thread of ours holds a lock. `elapsed` is how long ago the restore began, unless each program has told.
pub fn start(
    work: &dyn Duty,
    followed: Vec<(usize, OwnedFd)>,
    elapsed: Option<Duration>,
) -> Result<(Child, Parted)> {
    let (parted, tells) = std::io::pipe().map_err(|e| Kernel::call("pipe", e))?;
    for (program, userfault) in &followed {
        work.board().space(*program).begin(userfault.as_raw_fd(), *program);
    }
    match split::copy()? {
        Split::Original(child) => {
            // From now on they are theirs: when the last of them closes one, nobody else holds it.
            drop((followed, tells));
            Ok((child, Parted(parted)))
        }
        Split::Copy => {
            // Among the rest is all that the program has open, and `tells`. Once it runs, to ask about an epoll of its, or to
            // be the last who closes what one watches, is to wait for a thread that may wait for its memory, and so for us.
            split::close_all_but(&needed(work));
            std::mem::forget((parted, tells));
            let _ = setsid(); // neither the terminal nor a shell's job control is its concern
            leave_streams(work.is_heard());
            if let Some(elapsed) = elapsed {
                let began = monotonic_us().saturating_sub(elapsed.as_micros() as u64);
                let programs = followed.iter().map(|(program, _)| work.board().program(*program));
                programs.for_each(|program| program.add(Tally::BeganUs, began));
            }
            std::mem::forget(followed);
            keep(work)
        }
    }
}

/// Leaves standard streams to the program; errors may be told where somebody hears them.
fn leave_streams(is_heard: bool) {
    if let Ok(null) = null() {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        if !is_heard {
            let _ = rustix::stdio::dup2_stderr(&null);
        }
    }
}

/// One of the processes, from its beginning to its end.
fn keep(work: &dyn Duty) -> ! {
    // Who made this process: it served then, and as long as it lives nobody that it made does.
    let mut maker = None;
    'life: loop {
        pager::take_role(Role::StandsBy);
        // The handle is everybody's, in the table that all share.
        let handle = loop {
            match pidfd_open(std::process::id(), 0) {
                Ok(handle) => break handle.into_raw_fd(),
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        let number = work.board().enlist(handle);
        loop {
            match living(work.board(), 0..number).first() {
                Some(earlier) => await_end(*earlier),
                None if maker.is_some_and(is_our_parent) => std::thread::sleep(PAUSE),
                None => break,
            }
        }
        pager::take_role(work.role());
        let mut claim = Claim::default();
        loop {
            if work.board().get(Count::Done) > 0 {
                split::leave(0);
            }
            tidy(work, &claim);
            let mut by = living(work.board(), number + 1..u64::MAX);
            let mut made = 0;
            // If they die as fast as they are made, the program is served by those that live.
            while by.len() < BY && made < PLENTY {
                let (enlisted, own) = (work.board().get(Count::Enlisted), std::process::id());
                match split::copy_sharing_descriptors() {
                    Ok(Split::Copy) => {
                        maker = Some(own);
                        continue 'life;
                    }
                    Ok(Split::Original(child)) => {
                        made += 1;
                        // Whoever is made next comes after it.
                        while work.board().get(Count::Enlisted) == enlisted && !has_ended(child.pidfd.as_fd())
                        {
                            std::thread::sleep(PAUSE / 20);
                        }
                        // Nobody else buries it.
                        drop(wait(child.pidfd.as_fd()));
                        by = living(work.board(), number + 1..u64::MAX);
                    }
                    // No memory, no process or no descriptor to be had: there may be in a moment.
                    Err(_) => {
                        tidy(work, &claim);
                        std::thread::sleep(PAUSE);
                        by = living(work.board(), number + 1..u64::MAX);
                    }
                }
            }
            match serve(work, &by, &mut claim) {
                Ok(Served::All) => {
                    work.board().add(Count::Done, 1);
                    split::leave(0)
                }
                // Buried if it was a child of ours.
                Ok(Served::Deserted) => by.iter().for_each(|process| drop(wait(*process))),
                Err(e) => {
                    work.board().add(Count::Broken, 1);
                    if work.board().get(Count::Broken) >= BROKEN {
                        work.give_up(&e);
                    }
                    split::leave(1)
                }
            }
        }
    }
}

/// Whether this process, which has made us, lives.
fn is_our_parent(pid: u32) -> bool {
    rustix::process::getppid().is_some_and(|parent| parent.as_raw_pid() as u32 == pid)
}

/// Those with these numbers that live.
fn living(board: &Board, numbers: Range<u64>) -> Vec<BorrowedFd<'static>> {
    let recent = board.recent().filter(|number| numbers.contains(number));
    let handles = recent.filter_map(|number| patiently(|| board.enlisted(number))?);
    handles.map(split::shared_descriptor).filter(|process| !has_ended(*process)).collect()
}

/// Who has just taken a number tells their handle in the next moment, if they are not killed in between.
fn patiently<T>(look: impl Fn() -> Option<T>) -> Option<T> {
    for _ in 0..100 {
        if let Some(seen) = look() {
            return Some(seen);
        }
        std::thread::sleep(PAUSE);
    }
    None
}

fn serve(work: &dyn Duty, by: &[BorrowedFd<'_>], claim: &mut Claim) -> Result<Served> {
    catch_unwind(AssertUnwindSafe(|| work.serve(by, claim)))
        .unwrap_or_else(|_| Err(Error::Failed("the page server failed inside stillpoint".into())))
}

/// Waits for the end of a process, but not for ever: its handle may have become that of another one in the moment before.
fn await_end(process: BorrowedFd<'_>) {
    poll_for(process, Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
}

/// Whether a process has ended, or its handle has been closed because it had.
fn has_ended(process: BorrowedFd<'_>) -> bool {
    poll_for(process, Timespec { tv_sec: 0, tv_nsec: 0 })
}

fn poll_for(process: BorrowedFd<'_>, patience: Timespec) -> bool {
    poll(&mut [PollFd::from_borrowed_fd(process, PollFlags::IN)], Some(&patience)).is_ok_and(|n| n > 0)
}

/// Closes what a server that was killed left open in the table that we share. Handles to processes that live stay: one that
/// was just made, and has not told its number yet, may have made it, and what is opened from now on is not ours either.
fn tidy(work: &dyn Duty, claim: &Claim) {
    let mut keep = needed(work);
    keep.extend(claim.descriptor());
    for number in work.board().recent() {
        let Some(Some(handle)) = work.board().enlisted(number) else { continue };
        if has_ended(split::shared_descriptor(handle)) {
            // What has this number next is not its handle.
            work.board().discharge(number);
        } else {
            keep.push(handle);
        }
    }
    // Servers that are killed faster than they tidy up leave so many handles of each other that nothing can be opened any more.
    let folders = Folders::open(std::process::id()).or_else(|_| {
        let left_over = (3..split::most_descriptors()).filter(|fd| !keep.contains(fd));
        left_over.filter(|&fd| split::is_handle_of_nobody(fd)).for_each(split::close_shared);
        Folders::open(std::process::id())
    });
    let Ok(folders) = folders else { return };
    keep.extend(folders.descriptors().map(|fd| fd.as_raw_fd()));
    let is_left_over = |fd: u32| match folders.process_of(fd) {
        Ok(Some(_)) => has_ended(split::shared_descriptor(fd as i32)),
        Ok(None) => true,
        // Somebody who shares the table has closed it.
        Err(_) => false,
    };
    for fd in folders.list().unwrap_or_default() {
        if !keep.contains(&(fd as i32)) && is_left_over(fd) {
            split::close_shared(fd as i32);
        }
    }
}

/// Descriptors that are needed as long as anything is served, those of spaces and of copies that are just being made among them.
fn needed(work: &dyn Duty) -> Vec<i32> {
    let mut needed: Vec<i32> = work.descriptors().iter().map(AsRawFd::as_raw_fd).chain(0..=2).collect();
    for number in work.board().spaces() {
        let space = work.board().space(number);
        needed.extend(space.descriptor());
        needed.extend(space.log().chunks_exact(EVENT_WORDS).filter_map(|words| match logged(words) {
            Some(Event::Forked(descriptor)) => Some(descriptor),
            _ => None,
        }));
    }
    needed
}
