//! Serving the writes of a program whose writers wait, and copying what they are about to overwrite.
//!
//! 1. Whoever writes to a protected page sleeps in the kernel until the page is released. One lock keeps what is known
//!    of the pages, and a page is released under the same hold of it that notes the release; so when the lock is free,
//!    each page is protected exactly if it says so.
//! 2. Events are read from the kernel under the lock too: a thread that drops pages goes on as soon as its event was
//!    read, and by the time it has come to rest for a cut, the cut knows.
//! 3. Contents are copied without the lock, while the page is *copying*: it stays protected until the copy is complete.
//!    They count only if every page of them is found still protected afterwards. A page that was unmapped, replaced,
//!    dropped or moved meanwhile is not: its contents at the cut are lost, and the checkpoint is void. So it is if others
//!    were moved to its place, which come protected: of that the kernel tells, and it is listened to before contents count.
//! 4. Nobody waits for the medium with the lock, or with a claim on pages. Copies for waiting writers go into a bounded
//!    buffer; where that is full, the writer waits until the threads that write to the store have taken some out.

use super::around::Around;
use super::copies::Copies;
use super::pages::{Pages, State};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use stillpoint_image::{PAGE, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::{Category, Pagemap, Query, Run};
use stillpoint_linux::userfault::{Event, Userfault};
use stillpoint_store::Source;

/// Most runs that the sweep takes at a time, as many as one system call reads.
const RUNS: usize = 1024;
/// Runs no further apart than this, bytes, are looked at in one step.
const CLOSE: u64 = 64 * PAGE;

/// What happened since the program's writers wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Figures {
    /// Writes that waited, in all.
    pub waited: u64,
    /// Writes that waited for a copy.
    pub copied: u64,
    /// Pages that were copied for them.
    pub pages: u64,
    /// Writes that waited for room in the buffer.
    pub held_back: u64,
}

/// What the lock protects.
#[derive(Debug)]
pub(super) struct Shelf {
    pub pages: Pages,
    /// An instant is being saved: unsaved pages are copied before they are released. Otherwise writes are only noted.
    pub saving: bool,
    /// Pages stay protected once they are saved.
    pub keep: bool,
    /// Pages whose writers have to be served.
    queue: VecDeque<u64>,
    /// Pages whose writers wait for a copy that is under way.
    waiting: Vec<u64>,
    /// Pages whose writers wait for room in the buffer.
    held_back: Vec<u64>,
    pub copies: Copies,
    pub around: Around,
    /// A checkpoint is under way.
    pub attentive: bool,
    /// Where pages were dropped or moved during this checkpoint, since the cut if there has been one.
    pub changed: Vec<Range>,
    /// Where the sweep is.
    pub cursor: u64,
    /// What it takes first.
    pub urgent: Vec<Range>,
    /// Why the instant cannot be saved any more, and what was gone.
    pub lost: Option<String>,
    pub gone: Vec<Range>,
    pub figures: Figures,
}

impl Shelf {
    /// Unsaved pages for the sweep, at most `most` bytes.
    fn claim(&mut self, most: u64) -> Vec<Range> {
        while let Some(first) = self.urgent.last() {
            let runs = self.pages.claim(*first, most, RUNS);
            if !runs.is_empty() {
                return runs;
            }
            self.urgent.pop();
        }
        for start in [self.cursor, 0] {
            let runs = self.pages.claim(Range { start, len: u64::MAX - start }, most, RUNS);
            if let Some(last) = runs.last() {
                self.cursor = last.end();
                return runs;
            }
        }
        Vec::new()
    }
}

/// What all threads share.
#[derive(Debug)]
pub(super) struct Desk {
    pub userfault: Userfault,
    pub memory: Memory,
    pub pagemap: Pagemap,
    shelf: Mutex<Shelf>,
    /// Something was copied, or is lost.
    copied: Condvar,
    /// Wakes the serving threads.
    bell: OwnedFd,
    stop: AtomicBool,
}

/// The lock, held.
pub(super) type Held<'a> = MutexGuard<'a, Shelf>;

impl Desk {
    pub fn new(userfault: Userfault, memory: Memory, pagemap: Pagemap) -> crate::Result<Self> {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|e| crate::Error::Failed(format!("eventfd: {e}")))?;
        let shelf = Shelf {
            pages: Pages::default(),
            saving: false,
            keep: false,
            queue: VecDeque::new(),
            waiting: Vec::new(),
            held_back: Vec::new(),
            copies: Copies::new(0),
            around: Around::new(1, false),
            attentive: false,
            changed: Vec::new(),
            cursor: 0,
            urgent: Vec::new(),
            lost: None,
            gone: Vec::new(),
            figures: Figures::default(),
        };
        let (stop, copied) = (AtomicBool::new(false), Condvar::new());
        Ok(Desk { userfault, memory, pagemap, shelf: Mutex::new(shelf), copied, bell, stop })
    }

    pub fn hold(&self) -> Held<'_> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the serving threads.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.ring();
    }

    fn ring(&self) {
        // Fails only when it rings already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// A serving thread.
    pub fn serve(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            let mut held = self.hold();
            if !self.read_events(&mut held) {
                return;
            }
            match self.next_copy(&mut held) {
                Some(run) => {
                    if !held.queue.is_empty() {
                        self.ring();
                    }
                    drop(held);
                    self.copy_for_writer(run);
                }
                None => {
                    drop(held);
                    self.wait();
                }
            }
        }
    }

    fn wait(&self) {
        let mut fds = [PollFd::new(&self.userfault, PollFlags::IN), PollFd::new(&self.bell, PollFlags::IN)];
        // Interrupted or not, the caller looks at everything again.
        let _ = poll(&mut fds, None);
        if fds[1].revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
            // Whoever has not woken yet must hear it too.
            if self.stop.load(Ordering::SeqCst) {
                self.ring();
            }
        }
    }

    /// Reads what the kernel has to tell. False when there is no such address space any more.
    fn read_events(&self, held: &mut Held<'_>) -> bool {
        let mut events = Vec::new();
        if self.userfault.events(&mut events).is_err() {
            return false;
        }
        for event in events {
            match event {
                Event::Write { page, .. } => {
                    held.figures.waited += 1;
                    held.queue.push_back(page.0);
                }
                Event::Moved { from, to, len } => self.note_moved(held, from.0, Range { start: to.0, len }),
                Event::Dropped { start, end } if held.attentive => {
                    held.changed.push(Range { start: start.0, len: end.0 - start.0 });
                }
                // The others only where pages are waited for.
                Event::Dropped { .. } | Event::Missing { .. } | Event::Forked(_) => {}
            }
        }
        true
    }

    /// Pages, or marks, come protected to where they are moved, and look like what was there at the cut.
    fn note_moved(&self, held: &mut Held<'_>, from: u64, to: Range) {
        if held.attentive {
            held.changed.push(Range { start: from, len: to.len });
            held.changed.push(to);
        }
        let is_there = |page: u64| matches!(held.pages.state(page), State::Unsaved | State::Copying);
        if held.saving && (to.start..to.end()).step_by(PAGE as usize).any(is_there) {
            self.give_up(held, vec![to]);
        }
        // What is protected there now was saved for another place: here it counts as written.
        held.pages.set(to, State::Kept);
        self.release(held, to);
    }

    /// Whatever was moved before pages were found protected has been heard of when this returns: from before it moves anything
    /// until it was heard, the kernel refuses to protect. Asked for a page that is protected already.
    fn hear(&self, held: &mut Held<'_>, protected: u64) {
        let page = RemoteAddr(protected);
        let refuses = || self.userfault.protect(page, RemoteAddr(page.0 + PAGE)).map_err(|e| e.errno());
        while refuses() == Err(Some(libc::EAGAIN)) && self.read_events(held) {
            std::thread::yield_now();
        }
    }

    /// Serves the writers that need no copy; the next one that does is given back as what is to be copied for it.
    fn next_copy(&self, held: &mut Held<'_>) -> Option<Range> {
        while let Some(page) = held.queue.pop_front() {
            match (held.saving, held.pages.state(page)) {
                (true, State::Copying) => held.waiting.push(page),
                (true, State::Unsaved) if held.copies.room() < PAGE => {
                    held.figures.held_back += 1;
                    held.held_back.push(page);
                }
                (true, State::Unsaved) => {
                    let room = held.copies.room() / PAGE;
                    let window = held.around.pages(page).min(1 << room.ilog2());
                    let run = held.pages.take_around(page, window, State::Copying);
                    held.copies.take_room(run.len);
                    held.figures.copied += 1;
                    held.figures.pages += run.len / PAGE;
                    return Some(run);
                }
                // While it is being armed, what is released has to be protected again.
                (saving, State::Kept) if saving || !held.attentive => {
                    let window = held.around.pages(page);
                    let run = held.pages.take_around(page, window, State::Written);
                    self.release(held, run);
                }
                _ => self.let_write(held, page),
            }
        }
        None
    }

    /// Releases a page that need not be copied, and notes it.
    fn let_write(&self, held: &mut Held<'_>, page: u64) {
        let run = Range { start: page, len: PAGE };
        held.pages.set(run, State::Written);
        self.release(held, run);
    }

    /// Copies pages that a writer waits for into the buffer, and releases them.
    fn copy_for_writer(&self, run: Range) {
        let mut bytes = vec![0; run.len as usize];
        let result = self.read(&[run], &mut bytes);
        let mut held = self.hold();
        if result.is_ok() {
            self.hear(&mut held, run.start);
        }
        match result {
            // What has been given up is not wanted.
            Ok(()) if held.lost.is_some() => held.copies.give_room(run.len),
            Ok(()) => held.copies.push(run, bytes),
            Err(gone) => {
                held.copies.give_room(run.len);
                let _ = self.give_up(&mut held, gone);
            }
        }
        held.waiting.retain(|page| !(run.start..run.end()).contains(page));
        held.pages.set(run, State::Written);
        self.release(&mut held, run);
        self.copied.notify_all();
    }

    /// Reads contents of claimed pages; tells runs whose contents are not certainly those of the cut.
    fn read(&self, runs: &[Range], bytes: &mut [u8]) -> Result<(), Vec<Range>> {
        let from: Vec<(u64, u64)> = runs.iter().map(|r| (r.start, r.len)).collect();
        let read = self.memory.read_many(&from, bytes);
        if read.is_ok() && self.protected(runs).unwrap_or(false) {
            return Ok(());
        }
        let gone = |run: &&Range| !self.protected(&[**run]).unwrap_or(false);
        Err(runs.iter().filter(gone).copied().collect())
    }

    /// Whether all pages of some runs (ascending) exist and have been protected all the time. (Only what is released
    /// here can be written, and only a cut protects pages again.)
    fn protected(&self, runs: &[Range]) -> crate::Result<bool> {
        let there =
            Query { none: Category::WRITTEN, any: Category::PRESENT | Category::SWAPPED, ..Query::default() };
        let mut found: Vec<Run> = Vec::new();
        let mut rest = runs;
        while let [first, ..] = rest {
            let apart = rest.windows(2).position(|w| w[1].start - w[0].end() > CLOSE);
            let (group, later) = rest.split_at(apart.map_or(rest.len(), |n| n + 1));
            let end = group[group.len() - 1].end();
            self.pagemap.scan(RemoteAddr(first.start), RemoteAddr(end), there, &mut found)?;
            rest = later;
        }
        let mut found = found.iter().peekable();
        Ok(runs.iter().all(|run| {
            while found.next_if(|f| f.end <= run.start).is_some() {}
            found.peek().is_some_and(|f| f.start <= run.start && run.end() <= f.end)
        }))
    }

    /// The instant is lost: from now on writes are only noted.
    fn give_up(&self, held: &mut Held<'_>, gone: Vec<Range>) -> String {
        let first = gone.first().map_or(0, |run| run.start);
        let why = format!("memory at {first:#x} was unmapped, dropped or moved before it was saved");
        held.gone.extend(gone);
        let why = held.lost.get_or_insert(why).clone();
        self.stop_saving(held);
        why
    }

    /// Whoever waits for a copy or for room goes on; from now on writes are only noted.
    pub fn stop_saving(&self, held: &mut Held<'_>) {
        held.saving = false;
        let mut waiting = std::mem::take(&mut held.waiting);
        waiting.append(&mut held.held_back);
        for page in waiting {
            self.let_write(held, page);
        }
        self.copied.notify_all();
        self.ring();
    }

    /// Releases pages and wakes their writers. Where part of it is no longer followed, the rest is.
    fn release(&self, held: &mut Held<'_>, run: Range) {
        self.each_mapping(held, run, &|start, end| self.userfault.release(start, end));
    }

    /// Protects pages. Where part of it is no longer followed, the rest is.
    pub fn protect(&self, held: &mut Held<'_>, run: Range) {
        self.each_mapping(held, run, &|start, end| self.userfault.protect(start, end));
    }

    /// Releases a page that is looked after otherwise.
    pub fn leave_out(&self, held: &mut Held<'_>, page: u64) {
        let run = Range { start: page, len: PAGE };
        held.pages.set(run, State::Kept);
        self.release(held, run);
    }

    /// The kernel stops at the first mapping of a range that is not followed, and refuses all while a thread that
    /// drops pages has not been heard.
    fn each_mapping(
        &self,
        held: &mut Held<'_>,
        run: Range,
        work: &dyn Fn(RemoteAddr, RemoteAddr) -> stillpoint_linux::Result<()>,
    ) {
        loop {
            match work(RemoteAddr(run.start), RemoteAddr(run.end())).map_err(|e| e.errno()) {
                Err(Some(libc::EAGAIN)) => {
                    if !self.read_events(held) {
                        return;
                    }
                    std::thread::yield_now();
                }
                Err(Some(libc::ENOENT)) if run.len > PAGE => {
                    let half = (run.len / 2).next_multiple_of(PAGE);
                    self.each_mapping(held, Range { start: run.start, len: half }, work);
                    let rest = Range { start: run.start + half, len: run.len - half };
                    return self.each_mapping(held, rest, work);
                }
                // Done; or nobody can wait there.
                _ => return,
            }
        }
    }

    /// Copies that wait in the buffer, as much as fits; nothing if there are none.
    fn take_copies(&self, held: Held<'_>, buffer: &mut [u8]) -> Vec<Range> {
        let mut held = held;
        let copies = held.copies.pop(buffer.len() as u64);
        drop(held);
        let mut at = 0;
        for (run, bytes) in &copies {
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
            at += run.len as usize;
        }
        let mut held = self.hold();
        held.copies.give_room(at as u64);
        let held_back = std::mem::take(&mut held.held_back);
        if !held_back.is_empty() {
            held.queue.extend(held_back);
            self.ring();
        }
        copies.into_iter().map(|(run, _)| run).collect()
    }

    /// Saves claimed pages for the sweep.
    fn sweep(&self, runs: &[Range], bytes: &mut [u8]) -> Result<(), String> {
        let mut result = self.read(runs, bytes);
        let mut held = self.hold();
        if result.is_ok()
            && let [first, ..] = runs
        {
            self.hear(&mut held, first.start);
            if held.lost.is_some() {
                result = Err(Vec::new());
            }
        }
        let of_ours = |page: &u64| {
            runs.get(runs.partition_point(|r| r.end() <= *page)).is_some_and(|r| r.start <= *page)
        };
        let waiting = std::mem::take(&mut held.waiting);
        let (ours, others): (Vec<u64>, _) = waiting.into_iter().partition(of_ours);
        held.waiting = others;
        if held.keep && result.is_ok() {
            runs.iter().for_each(|run| held.pages.set(*run, State::Kept));
            ours.into_iter().for_each(|page| self.let_write(&mut held, page));
        } else {
            for run in runs {
                held.pages.set(*run, State::Written);
                self.release(&mut held, *run);
            }
        }
        self.copied.notify_all();
        result.map_err(|gone| self.give_up(&mut held, gone))
    }
}

/// The store takes copies out of the buffer first, so that writers need not wait for room, then sweeps the rest.
impl Source for Desk {
    type Error = String;

    fn next(&self, buffer: &mut [u8]) -> Result<Vec<Range>, String> {
        let mut held = self.hold();
        loop {
            if let Some(why) = &held.lost {
                return Err(why.clone());
            }
            if !held.copies.is_empty() {
                return Ok(self.take_copies(held, buffer));
            }
            let runs = held.claim(buffer.len() as u64);
            if !runs.is_empty() {
                drop(held);
                let len: u64 = runs.iter().map(|r| r.len).sum();
                self.sweep(&runs, &mut buffer[..len as usize])?;
                return Ok(runs);
            }
            if held.pages.copying() == 0 {
                return Ok(Vec::new());
            }
            held = self.copied.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
