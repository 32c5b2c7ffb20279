//! The checkpointer: a thread of low priority that waits, saves, writes and resynchronises, so that no writer has to.
#![allow(unsafe_code)]

use crate::backing::{Backing, Pages};
use crate::barrier::{self, NOTED, OFFSET, WATCH};
use crate::error::Error;
use crate::layout::{self, ATTACHED, DETACHED, PAGE, Span, card};
use crate::threads;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// What a cycle is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// Every store goes to both copies.
    Attached = 0,
    /// The instant is taken; stores that are part of it come to their end.
    Cutting = 1,
    /// The shadow is written to the backing file.
    Writing = 2,
    /// The shadow catches up.
    Resynchronising = 3,
    /// The mirror is closed.
    Closed = 4,
}

/// How the mirror is detached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switch {
    /// By one store to an offset.
    #[default]
    Offset,
    /// By remapping the shadow's pages, as in the paper: for one writing thread, which waits for the kernel if it stores
    /// at that moment. Everything that was ever stored is written each time.
    Remap,
}

/// A complete checkpoint, or one that failed, as told to `on_complete`.
#[derive(Debug)]
pub struct Completed {
    /// Its sequence number.
    pub sequence: u64,
    /// Bytes written, or why there is no new checkpoint.
    pub result: Result<u64, Error>,
}

type Hook = Box<dyn FnMut(&Completed) + Send>;

/// Nanoseconds of the parts of a cycle.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// From the instant until the shadow stands still.
    pub cut: u64,
    /// Writing.
    pub write: u64,
    /// Resynchronising.
    pub resync: u64,
    /// All of it.
    pub cycle: u64,
}

#[derive(Default)]
struct Outcome {
    /// Checkpoints that have come to their end, complete or not.
    ended: u64,
    complete: u64,
    failed: u64,
    last_error: Option<String>,
    bytes: u64,
    last_bytes: u64,
    times: Times,
    total: Duration,
}

/// What the checkpointer shares with everybody else.
pub struct Shared {
    /// All mirrored memory.
    pub spans: Vec<Span>,
    switch: Switch,
    phase: AtomicU32,
    /// Checkpoints that were begun.
    begun: AtomicU64,
    /// When the newest one began, nanoseconds of the monotonic clock.
    since: AtomicU64,
    outcome: Mutex<Outcome>,
    changed: Condvar,
    hooks: Mutex<Vec<Hook>>,
    every: AtomicU64,
}

/// Nanoseconds of the monotonic clock.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: Option<Duration>) {
    let time =
        timeout.map(|t| libc::timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: futex(2) with a word and a timeout that live as long as the call.
    unsafe { libc::syscall(libc::SYS_futex, word, operation | libc::FUTEX_PRIVATE_FLAG, value, time) };
}

/// What `stats` tells.
#[derive(Clone, Debug)]
pub struct Stats {
    /// What the checkpointer is doing.
    pub phase: Phase,
    /// Complete checkpoints since this process opened the mirror.
    pub complete: u64,
    /// Those that failed.
    pub failed: u64,
    /// The last failure.
    pub last_error: Option<String>,
    /// Bytes written in all.
    pub bytes: u64,
    /// Bytes written by the last checkpoint.
    pub last_bytes: u64,
    /// The parts of the last cycle.
    pub last: Times,
    /// Part of the time since the mirror was opened in which the checkpointer was at work, 0 to 1.
    pub overhead: f64,
    /// Stores that had to note a page.
    pub noted: u64,
    /// Bytes of memory that are mirrored; as many are their shadow.
    pub mirrored: usize,
    /// Threads that are known to store.
    pub threads: usize,
}

impl Shared {
    /// For these spans.
    pub fn new(spans: Vec<Span>, switch: Switch) -> Self {
        Shared {
            spans,
            switch,
            phase: AtomicU32::new(Phase::Attached as u32),
            begun: AtomicU64::new(0),
            since: AtomicU64::new(0),
            outcome: Mutex::default(),
            changed: Condvar::new(),
            hooks: Mutex::default(),
            every: AtomicU64::new(0),
        }
    }

    fn outcome(&self) -> std::sync::MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What the checkpointer is doing.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Attached,
            1 => Phase::Cutting,
            2 => Phase::Writing,
            3 => Phase::Resynchronising,
            _ => Phase::Closed,
        }
    }

    /// Steps C1 and C2: the instant. Everything that happened before is in the checkpoint, nothing that happens after.
    /// Returns its number among those of this process.
    pub fn begin(&self) -> Result<u64, Error> {
        let cutting = Phase::Cutting as u32;
        let (attached, order) = (Phase::Attached as u32, Ordering::SeqCst);
        if self.phase.compare_exchange(attached, cutting, order, order).is_err() {
            return Err(if self.phase() == Phase::Closed { Error::Closed } else { Error::InProgress });
        }
        // The checkpointer is known, too, and does not store.
        if self.switch == Switch::Remap && threads::count() > 2 {
            self.phase.store(attached, order);
            return Err(Error::RemapThreads(threads::count() - 1));
        }
        self.since.store(now(), order);
        if self.switch == Switch::Offset {
            WATCH.store(1, order);
            OFFSET.store(DETACHED, order);
        }
        let number = self.begun.fetch_add(1, order) + 1;
        futex(&self.phase, libc::FUTEX_WAKE, 1, None);
        Ok(number)
    }

    /// Waits until a checkpoint has come to its end; an error tells why it is not complete.
    pub fn wait(&self, number: u64) -> Result<(), Error> {
        let mut outcome = self.outcome();
        while outcome.ended < number {
            if self.phase() == Phase::Closed {
                return Err(Error::Closed);
            }
            let wait = self.changed.wait_timeout(outcome, Duration::from_millis(100));
            outcome = wait.unwrap_or_else(|e| e.into_inner()).0;
        }
        Ok(())
    }

    /// Number of the newest complete checkpoint, and what became of the last one.
    pub fn last_failure(&self) -> Option<String> {
        self.outcome().last_error.clone()
    }

    /// Calls a function after each checkpoint, on the checkpointer's thread.
    pub fn hook(&self, hook: Hook) {
        self.hooks.lock().unwrap_or_else(|e| e.into_inner()).push(hook);
    }

    /// Lets the checkpointer begin a checkpoint by itself whenever this much time has passed since the last one began.
    pub fn every(&self, interval: Option<Duration>) {
        self.every.store(interval.map_or(0, |i| i.as_nanos().max(1) as u64), Ordering::SeqCst);
        futex(&self.phase, libc::FUTEX_WAKE, 1, None);
    }

    /// What has been done so far.
    pub fn stats(&self, opened: Instant) -> Stats {
        let outcome = self.outcome();
        Stats {
            phase: self.phase(),
            complete: outcome.complete,
            failed: outcome.failed,
            last_error: outcome.last_error.clone(),
            bytes: outcome.bytes,
            last_bytes: outcome.last_bytes,
            last: outcome.times,
            overhead: outcome.total.as_secs_f64() / opened.elapsed().as_secs_f64().max(1e-9),
            noted: NOTED.load(Ordering::Relaxed),
            mirrored: self.spans.iter().map(|s| s.len).sum(),
            threads: threads::count(),
        }
    }

    /// Ends the checkpointer once it is idle.
    pub fn close(&self) {
        self.every.store(0, Ordering::SeqCst);
        loop {
            let (attached, closed) = (Phase::Attached as u32, Phase::Closed as u32);
            match self.phase.compare_exchange(attached, closed, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) | Err(4) => break,
                Err(_) => std::thread::sleep(Duration::from_micros(200)),
            }
        }
        futex(&self.phase, libc::FUTEX_WAKE, i32::MAX as u32, None);
        self.changed.notify_all();
    }
}

/// The checkpointer's own.
pub struct Cycle<'a> {
    shared: &'a Shared,
    backing: Option<Backing>,
    dirty: Pages,
    aside: Vec<Aside>,
}

impl<'a> Cycle<'a> {
    /// With everything dirty, unless the image that memory was recovered from is known.
    pub fn new(shared: &'a Shared, backing: Option<Backing>, fresh: bool, aside: Vec<Aside>) -> Self {
        let count = shared.spans.iter().map(|s| s.len / PAGE).sum();
        Cycle { shared, backing, dirty: Pages::new(count, fresh), aside }
    }

    /// Works until the mirror is closed; gives the backing file back.
    pub fn run(mut self) -> Option<Backing> {
        loop {
            match self.shared.phase() {
                Phase::Closed => return self.backing,
                Phase::Cutting => self.cycle(),
                _ => self.idle(),
            }
        }
    }

    fn idle(&self) {
        let every = self.shared.every.load(Ordering::SeqCst);
        let since = now().saturating_sub(self.shared.since.load(Ordering::SeqCst));
        if every > 0 && since >= every {
            let _ = self.shared.begin();
        } else {
            let left =
                if every > 0 { Duration::from_nanos(every - since) } else { Duration::from_secs(3600) };
            futex(&self.shared.phase, libc::FUTEX_WAIT, Phase::Attached as u32, Some(left));
        }
    }

    fn phase(&self, phase: Phase) {
        self.shared.phase.store(phase as u32, Ordering::SeqCst);
    }

    fn cycle(&mut self) {
        let begin = self.shared.since.load(Ordering::SeqCst);
        let number = self.shared.begun.load(Ordering::SeqCst);
        let mut times = Times::default();
        let mut result = self.stand_still();
        times.cut = now() - begin;
        if result.is_ok() {
            self.phase(Phase::Writing);
            let start = now();
            result = self.write();
            times.write = now() - start;
        }
        self.phase(Phase::Resynchronising);
        let start = now();
        // A thread that is stuck inside a barrier must not be left with half a mirror: nothing is attached before it is out.
        let attached = loop {
            match self.resynchronise() {
                Err(Error::Stuck { .. }) if self.shared.phase() != Phase::Closed => continue,
                other => break other,
            }
        };
        times.resync = now() - start;
        times.cycle = now() - begin;
        let result = attached.and(result);
        {
            let mut outcome = self.shared.outcome();
            outcome.ended = number;
            outcome.times = times;
            outcome.total += Duration::from_nanos(times.cycle);
            match &result {
                Ok(bytes) => {
                    outcome.complete += 1;
                    outcome.bytes += bytes;
                    outcome.last_bytes = *bytes;
                    outcome.last_error = None;
                }
                Err(why) => {
                    outcome.failed += 1;
                    outcome.last_error = Some(why.to_string());
                }
            }
        }
        let sequence = self.backing.as_ref().map_or(number, |b| b.sequence);
        self.phase(Phase::Attached);
        self.shared.changed.notify_all();
        let told = Completed { sequence, result };
        let mut hooks = self.shared.hooks.lock().unwrap_or_else(|e| e.into_inner());
        hooks.iter_mut().for_each(|hook| hook(&told));
    }

    fn pages(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        self.shared.spans.clone().into_iter().flat_map(Span::pages).enumerate()
    }

    /// Steps C3 to C6.
    fn stand_still(&mut self) -> Result<u64, Error> {
        if self.shared.switch == Switch::Remap {
            return self.remap(true).map(|()| 0);
        }
        // SAFETY: mirrored pages; the mirror is detached.
        unsafe {
            // C3: what atomic instructions have met, as it was at the instant.
            fence(Ordering::SeqCst);
            for (_, page) in self.pages() {
                if layout::met(page).load(Ordering::SeqCst) != 0 {
                    (page..page + PAGE).step_by(8).for_each(|word| barrier::save(word));
                }
            }
        }
        // C4.
        WATCH.store(0, Ordering::SeqCst);
        // C5: no section that stores into the shadow is left.
        threads::grace()?;
        // C6.
        self.take_dirty();
        Ok(0)
    }

    fn take_dirty(&mut self) {
        for (number, page) in self.pages() {
            // SAFETY: mirrored pages. Nobody is attached, so nobody else stores these cards.
            let attached = unsafe { layout::card_of(page, ATTACHED) };
            if attached.load(Ordering::Relaxed) == card::HOT {
                self.dirty.add(number);
                if self.shared.switch == Switch::Offset {
                    attached.store(card::FRESH_ATTACHED, Ordering::Relaxed);
                }
            }
        }
    }

    fn write(&mut self) -> Result<u64, Error> {
        let Some(backing) = &mut self.backing else { return Ok(0) };
        let mut sources = Vec::new();
        for (i, span) in self.shared.spans.iter().enumerate() {
            let shadow = match self.shared.switch {
                Switch::Offset => span.base + ATTACHED,
                Switch::Remap => self.aside[i].at,
            };
            sources.extend((0..span.len).step_by(PAGE).map(|o| shadow + o));
        }
        // SAFETY: the shadow stands still until the mirror is attached again.
        let result = unsafe { backing.commit(&self.dirty, |page| sources[page]) };
        // Dirty pages of a failed attempt are remembered by the backing file.
        self.dirty = Pages::new(sources.len(), false);
        result
    }

    /// Steps R1 to R4.
    fn resynchronise(&mut self) -> Result<(), Error> {
        if self.shared.switch == Switch::Remap {
            self.remap(false)?;
            return self.resynchronise_all();
        }
        // After a cut that failed, sections of before may still be there.
        WATCH.store(0, Ordering::SeqCst);
        // R1.
        OFFSET.store(ATTACHED, Ordering::SeqCst);
        // R2: every store that went to one copy alone has noted its page.
        threads::grace()?;
        // SAFETY: mirrored pages; attached.
        unsafe {
            for (_, page) in self.pages() {
                let detached = layout::card_of(page, DETACHED);
                if matches!(detached.load(Ordering::Relaxed), card::SKIP | card::SLOW_NOTED) {
                    // R3.
                    layout::card_of(page, ATTACHED).store(card::HOT, Ordering::SeqCst);
                    copy_page(page);
                    detached.store(card::FRESH, Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    // Whoever meets the page says so before it looks at the card.
                    if layout::met(page).load(Ordering::SeqCst) != 0 {
                        detached.store(card::SLOW, Ordering::SeqCst);
                    }
                }
                // R4.
                if layout::met(page).load(Ordering::SeqCst) != 0 {
                    (page..page + PAGE).step_by(8).for_each(|word| barrier::unsave(word));
                }
            }
        }
        Ok(())
    }

    fn resynchronise_all(&mut self) -> Result<(), Error> {
        threads::grace()?;
        for (_, page) in self.pages() {
            // SAFETY: mirrored pages; attached.
            unsafe {
                if layout::card_of(page, ATTACHED).load(Ordering::Relaxed) == card::HOT {
                    copy_page(page);
                }
            }
        }
        Ok(())
    }

    /// Puts the dummy's pages where the shadow is, or the other way round: one call, so that a store meets the old pages,
    /// or waits for the kernel and meets the new ones.
    fn remap(&mut self, detach: bool) -> Result<(), Error> {
        for (span, aside) in self.shared.spans.iter().zip(&self.aside) {
            let object = if detach { &aside.dummy } else { &aside.shadow };
            object.map(span.base + ATTACHED, span.len, true)?;
        }
        if detach {
            threads::grace()?;
            self.take_dirty();
        }
        Ok(())
    }
}

/// Memory that can be mapped at several places.
pub struct Object(OwnedFd);

impl Object {
    /// Of `len` zeros.
    pub fn new(len: usize) -> Result<Self, Error> {
        let error = |address| Error::Map {
            what: "memory to remap",
            address,
            len,
            why: std::io::Error::last_os_error(),
        };
        // SAFETY: a constant name; the descriptor is ours alone.
        let object = unsafe {
            match libc::memfd_create(c"mirror".as_ptr(), libc::MFD_CLOEXEC) {
                -1 => return Err(error(0)),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        // SAFETY: no pointers.
        match unsafe { libc::ftruncate(object.as_raw_fd(), len as i64) } {
            0 => Ok(Object(object)),
            _ => Err(error(0)),
        }
    }

    /// Maps all of it, in memory from the start; `replace` if there is a mapping of ours to give way.
    pub fn map(&self, address: usize, len: usize, replace: bool) -> Result<(), Error> {
        let fixed = if replace { libc::MAP_FIXED } else { libc::MAP_FIXED_NOREPLACE };
        let (flags, access) =
            (libc::MAP_SHARED | libc::MAP_POPULATE | fixed, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: replaces nothing but what the caller says is ours.
        let got =
            unsafe { libc::mmap(address as *mut libc::c_void, len, access, flags, self.0.as_raw_fd(), 0) };
        if got == libc::MAP_FAILED {
            let why = std::io::Error::last_os_error();
            return Err(Error::Map { what: "the shadow", address, len, why });
        }
        Ok(())
    }
}

/// What the remapping switch needs for a span.
pub struct Aside {
    /// A second mapping of the shadow.
    pub at: usize,
    /// The shadow itself.
    pub shadow: Object,
    /// What lies in its place while it is detached.
    pub dummy: Object,
}

/// Step R3: makes a page of the shadow equal to the primary while writers store into both, primary first.
///
/// # Safety
/// A mirrored page, attached, and every section that was not has ended.
pub unsafe fn copy_page(page: usize) {
    // SAFETY: words of the page.
    unsafe {
        for at in (page..page + PAGE).step_by(8) {
            let value = layout::word(at).load(Ordering::Relaxed);
            if layout::word(at + ATTACHED).load(Ordering::Relaxed) != value {
                layout::word(at + ATTACHED).store(value, Ordering::Relaxed);
            }
        }
        fence(Ordering::SeqCst);
        for at in (page..page + PAGE).step_by(8) {
            if layout::word(at).load(Ordering::Relaxed) != layout::word(at + ATTACHED).load(Ordering::Relaxed)
            {
                (at..at + 8).for_each(|byte| copy_byte(byte));
            }
        }
    }
}

/// # Safety
/// As [`copy_page`].
unsafe fn copy_byte(at: usize) {
    // SAFETY: bytes of the page.
    unsafe {
        let (primary, shadow) = (layout::byte(at), layout::byte(at + ATTACHED));
        loop {
            let value = primary.load(Ordering::SeqCst);
            shadow.store(value, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // Unchanged since: a writer that changes it later stores into the shadow after us. Or the shadow was changed
            // after us: by a writer whose store is newer than what we read. Atomic words are made at the cut.
            if primary.load(Ordering::SeqCst) == value
                || shadow.load(Ordering::SeqCst) != value
                || layout::states(at & !7).load(Ordering::SeqCst) >> (8 * (at & 7)) & 0xff != 0
            {
                return;
            }
        }
    }
}
