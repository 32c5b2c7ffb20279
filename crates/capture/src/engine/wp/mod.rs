//! The engine `wp`: pages are protected at the cut, and the first write to one waits until its contents are copied.
//!
//! After Li, Naughton and Plank's concurrent low-latency checkpointing and Liao's TIC-CKPT, with the kernel's
//! userfaultfd in its synchronous write-protecting mode:
//!
//! * *Before the cut* everything is protected while the program runs. What it writes meanwhile is noted and released at
//!   once, and protected again round after round, so that little is left.
//! * *At the cut* the few written pages are protected once more. Pages that appear without a write to a protected page
//!   can do so only where there was no page table: such holes are looked at again, which the kernel does at a glance.
//!   Everywhere else the kernel holds a mark in place of a page that does not exist.
//! * *After the cut* the pages are swept to the store, and released. A write to a page that the sweep has not reached
//!   waits until a serving thread has copied it, with neighbours, into a bounded buffer.
//!
//! `STILLPOINT_WP=plain` takes away arming ahead and fault-around: what remains is the concurrent checkpoint that
//! others compare with.

mod around;
mod copies;
mod pages;
mod server;

use super::tracking::open_inside;
use super::{Copied, Cut, Engine, MemoryEngine, Running, Still};
use crate::brief::stop_briefly;
use crate::checkpoint::{Progress, Target};
use crate::regions::{Span, own_pages, range, spans, spans_of_maps};
use crate::{Error, Result};
use around::Around;
use copies::Copies;
use pages::{CHUNK, State, push};
use server::{Desk, Held};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;
use stillpoint_image::{Owner, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::{Category, Pagemap, Query, Run};
use stillpoint_linux::userfault::Mode;
use stillpoint_store::{PutError, Source, Zeros};

/// Threads that serve waiting writers, where there are as many processors.
const SERVERS: usize = 2;
/// Memory is protected and let go of in pieces of this size, bytes, so that the program's own page faults get their turn.
const PIECE: u64 = 4 << 20;
/// Holes up to this size, bytes, get page tables (4 KiB for each 2 MiB), so that they need not be looked at in the cut.
const SMALL_HOLE: u64 = 8 * CHUNK;
/// Rounds of protecting what was written meanwhile, at most.
const ROUNDS: usize = 8;
/// So few written pages are left for the cut that another round would not be worth it.
const FEW: u64 = 16;
/// Neighbours that are copied with a page when nothing speaks for more: they have to be saved anyway.
const LEAST_AROUND: u64 = 4;
/// Share of the buffer that the threads hold which write to the store, bytes.
const IN_FLIGHT: u64 = 4 << 20;
/// All addresses that a program can use.
const EVERYTHING: Range = Range { start: 0, len: 1 << 47 };
/// Instants that may be lost before another engine takes over.
const TRIES: usize = 3;

/// A process whose writers wait. When it is dropped, nothing of it stays behind.
#[derive(Debug)]
pub(crate) struct Armed {
    desk: Arc<Desk>,
    servers: Vec<JoinHandle<()>>,
    /// Where every page that appears is noted, because there is a page or a mark in each place.
    covered: Vec<Range>,
    /// All that was followed.
    followed: Vec<Range>,
}

/// At work on one checkpoint.
#[derive(Debug)]
pub(crate) struct Wp<'t> {
    armed: &'t mut Option<Armed>,
    /// Bytes that may be on their way.
    buffer: u64,
    plain: bool,
    /// Pages that are copied in the cut: what cannot be protected.
    copied: Copied,
    tries: usize,
}

impl<'t> Wp<'t> {
    /// With what the session has armed; `buffer` bytes may be on their way to the store.
    pub fn new(armed: &'t mut Option<Armed>, buffer: u64) -> Self {
        let plain = std::env::var_os("STILLPOINT_WP").is_some_and(|v| v == "plain");
        Wp { armed, buffer, plain, copied: Copied::default(), tries: 0 }
    }

    fn armed(&mut self) -> Result<&mut Armed> {
        self.armed.as_mut().ok_or_else(|| Error::Failed("its writers do not wait".into()))
    }
}

impl MemoryEngine for Wp<'_> {
    fn engine(&self) -> Engine {
        Engine::Wp
    }

    fn prepare(&mut self, running: &mut Running<'_>) -> Result<()> {
        *self.armed = None;
        let (armed, plain) = (Armed::start(running)?, self.plain);
        let armed = self.armed.insert(armed);
        if !plain {
            armed.arm(running)?;
        }
        self.copied.reserve(self.buffer);
        Ok(())
    }

    fn cut(&mut self, still: &mut Still<'_>) -> Result<Cut> {
        let began = Instant::now();
        let (plain, buffer) = (self.plain, self.buffer);
        let desk = self.armed()?.desk.clone();
        let mut held = desk.hold();
        let spans = spans(&still.builder.image.spaces[0]);
        let others = self.armed()?.cut(&mut held, &spans)?;
        let bytes: u64 = others.iter().map(|(r, _)| r.len).sum();
        if bytes > 4 * buffer {
            still.log.tell(format!("{} MiB are in pages that cannot be protected", bytes >> 20));
            self.tries = TRIES;
            return Ok(Cut::TooMuch);
        }
        self.copied.copy(&still.target.memory, &others)?;
        still.log.tell(format!("the cut took {:?}", began.elapsed()));
        held.saving = true;
        held.copies = Copies::new(buffer.saturating_sub(IN_FLIGHT));
        held.around = Around::new(if plain { 1 } else { LEAST_AROUND }, !plain);
        Ok(Cut::Taken)
    }

    fn finish(&mut self, running: &mut Running<'_>) -> Result<()> {
        // Of an instant that was lost, or of another engine, pages may be there that this instant does not have.
        running.writer.forget(Owner::Space(0), EVERYTHING);
        self.copied.put(running.writer)?;
        self.tries += 1;
        self.armed()?.save(running)?;
        *self.armed = None;
        Ok(())
    }

    fn try_again(&self) -> bool {
        self.tries < TRIES
    }
}

impl Drop for Wp<'_> {
    fn drop(&mut self) {
        *self.armed = None;
    }
}

impl Armed {
    /// Makes the writers of a process wait for what is protected, for which all of it stands still for a moment.
    fn start(running: &mut Running<'_>) -> Result<Self> {
        let target = running.target;
        let open = |frozen: &mut _| open_inside(target, frozen, Mode::Waits);
        let (userfault, pause) = stop_briefly(target, running.earlier, open)?;
        running.log.pauses.push(pause);
        let desk = Desk::new(userfault, Memory::open(target.pid)?, Pagemap::open(target.pid)?)?;
        let mut armed =
            Armed { desk: Arc::new(desk), servers: Vec::new(), covered: Vec::new(), followed: Vec::new() };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..SERVERS.min(processors) {
            let desk = armed.desk.clone();
            let server = std::thread::Builder::new().name("wp".into()).spawn(move || desk.serve());
            armed.servers.push(server.map_err(|e| Error::Failed(format!("no thread: {e}")))?);
        }
        Ok(armed)
    }

    /// Protects everything while the program runs.
    fn arm(&mut self, running: &mut Running<'_>) -> Result<()> {
        let spans = spans_of_maps(&running.target.process.maps()?);
        for span in spans.iter().filter(|s| can_wait(s)) {
            if self.follow(span.range) {
                self.arm_span(span.range)?;
            }
        }
        let mut before = u64::MAX;
        for round in 1..=ROUNDS {
            let pages = self.arm_written();
            running.log.tell(format!("round {round} protected {pages} written pages again"));
            if pages <= FEW || pages > before / 4 * 3 {
                break;
            }
            before = pages;
        }
        Ok(())
    }

    /// Follows a mapping; false if that is not possible. Twice is as good as once.
    fn follow(&mut self, span: Range) -> bool {
        let followed = self.desk.userfault.register(RemoteAddr(span.start), RemoteAddr(span.end())).is_ok();
        if followed {
            self.followed.push(span);
        }
        followed
    }

    /// Protects what there is in a mapping, and fills the page tables around it with marks.
    fn arm_span(&mut self, span: Range) -> Result<()> {
        let there =
            self.scan(span, Query { any: Category::PRESENT | Category::SWAPPED, ..Query::default() })?;
        for covered in cover(&there, span) {
            let mut at = covered.start;
            while at < covered.end() {
                let end = (at / PIECE * PIECE + PIECE).min(covered.end());
                self.arm_piece(Range { start: at, len: end - at })?;
                at = end;
            }
            self.covered.push(covered);
        }
        Ok(())
    }

    /// Protects a piece of a mapping. With the lock held, nobody notes a write meanwhile: those that wait are noted
    /// afterwards.
    ///
    /// 1. Pages that are swapped out are told before there are marks, which look the same.
    /// 2. A page that appears between the two looks is protected by then: without a page there is a mark.
    /// 3. A page that is dropped and appears again after that is not, and does not tell; but dropping it does.
    fn arm_piece(&self, piece: Range) -> Result<()> {
        let report = Category::PRESENT | Category::SWAPPED | Category::ZERO;
        let bare = self.scan(
            piece,
            Query { all: Category::WRITTEN, none: Category::GUARD, report, ..Query::default() },
        )?;
        let mut held = self.desk.hold();
        for run in &bare {
            self.desk.protect(&mut held, range(run));
            held.pages.change(range(run), State::Written, State::Unsaved);
            if run.categories.contains(Category::SWAPPED) {
                held.pages.set(range(run), State::Unsaved);
            }
        }
        let swaps = if swaps() { Category::PRESENT | Category::SWAPPED } else { Category::PRESENT };
        let there = Query {
            any: swaps,
            none: Category::ZERO | Category::GUARD,
            report: Category::WRITTEN,
            ..Query::default()
        };
        for run in self.scan(piece, there)? {
            let written = run.categories.contains(Category::WRITTEN);
            let state = if written { State::Written } else { State::Unsaved };
            held.pages.set(range(&run), state);
        }
        Ok(())
    }

    /// Protects what was written since it was protected; tells how many pages.
    fn arm_written(&self) -> u64 {
        let mut held = self.desk.hold();
        let runs = held.pages.arm();
        runs.iter().for_each(|run| self.desk.protect(&mut held, *run));
        runs.iter().map(|r| r.len).sum::<u64>() / stillpoint_image::PAGE
    }

    /// With the program at rest: everything of it is unsaved and protected from here on. Returns what cannot be
    /// protected, and whether zeros matter there.
    fn cut(&mut self, held: &mut Held<'_>, spans: &[Span]) -> Result<Vec<(Range, bool)>> {
        let mut others = Vec::new();
        let changed = std::mem::take(&mut held.changed);
        let mut end = 0;
        for span in spans {
            let waits = can_wait(span) && self.cut_span(held, span.range, &changed)?;
            if waits {
                held.pages.set(Range { start: end, len: span.range.start - end }, State::Kept);
                end = span.range.end();
            } else {
                let mut own = Vec::new();
                own_pages(&self.desk.pagemap, span, &mut own)?;
                others.extend(own.into_iter().map(|r| (r, span.zeros_matter)));
            }
        }
        held.pages.set(Range { start: end, len: u64::MAX / CHUNK * CHUNK - end }, State::Kept);
        let runs = held.pages.arm();
        runs.iter().for_each(|run| self.desk.protect(held, *run));
        held.cursor = 0;
        held.figures = server::Figures::default();
        Ok(others)
    }

    /// Looks for pages that have appeared in a mapping without being noted. False if it cannot be followed.
    fn cut_span(&mut self, held: &mut Held<'_>, span: Range, changed: &[Range]) -> Result<bool> {
        let known = within(&self.covered, span);
        // A mapping that has replaced another is not followed, and the kernel says so.
        let same = known.first().is_some_and(|c| {
            let page = RemoteAddr(c.start);
            self.desk.userfault.protect(page, RemoteAddr(page.0 + stillpoint_image::PAGE)).is_ok()
        });
        if !same && !self.follow(span) {
            return Ok(false);
        }
        let bare = within(changed, span);
        let known: Vec<Range> =
            known.iter().flat_map(|k| without(*k, &within(&bare, *k))).filter(|_| same).collect();
        for hole in without(span, &known) {
            self.cut_hole(held, hole)?;
        }
        self.covered.retain(|c| c.end() <= span.start || span.end() <= c.start);
        self.covered.extend(known);
        Ok(true)
    }

    /// Protects the pages that there are in a range where nothing was known.
    fn cut_hole(&self, held: &mut Held<'_>, hole: Range) -> Result<()> {
        let any = Category::PRESENT | Category::SWAPPED;
        let there = Query { any, none: Category::ZERO | Category::GUARD, ..Query::default() };
        held.pages.set(hole, State::Kept);
        for run in self.scan(hole, there)? {
            held.pages.set(range(&run), State::Unsaved);
            self.desk.protect(held, range(&run));
        }
        Ok(())
    }

    /// Brings all pages of the cut to the store.
    fn save(&self, running: &mut Running<'_>) -> Result<()> {
        self.nothing_unnoticed()?;
        running.progress.start(self.desk.hold().pages.unsaved() * stillpoint_image::PAGE);
        let source = Sweep { desk: &self.desk, progress: running.progress };
        running.writer.put_from(Owner::Space(0), Zeros::Omit, &source).map_err(|e| match e {
            PutError::Fill(why) => Error::Lost(why),
            PutError::Store(e) => Error::Store(e),
        })?;
        self.same_program(running.target)?;
        let held = self.desk.hold();
        let f = held.figures;
        running.log.tell(format!(
            "{} writes waited, {} of them for a copy, {} for room; {} pages were copied for them, {} KiB at a time",
            f.waited, f.copied, f.held_back, f.pages, held.copies.most_used() >> 10
        ));
        Ok(())
    }

    /// Where every page is noted that appears, each one that is not protected must have been.
    fn nothing_unnoticed(&self) -> Result<()> {
        let bare = Category::PRESENT | Category::WRITTEN;
        let query = Query { all: bare, none: Category::ZERO, ..Query::default() };
        for covered in &self.covered {
            for run in self.scan(*covered, query)? {
                let held = self.desk.hold();
                let mut pages = (run.start..run.end).step_by(stillpoint_image::PAGE as usize);
                let noted = |page: u64| {
                    held.pages.state(page) == State::Written
                        || held.changed.iter().any(|c| (c.start..c.end()).contains(&page))
                };
                if let Some(page) = pages.find(|p| !noted(*p)) {
                    return Err(Error::Lost(format!("the page at {page:#x} appeared unnoticed")));
                }
            }
        }
        Ok(())
    }

    /// Whether all that was read came from the program that was cut: reading goes by process id, and the process may
    /// have replaced its program. What is protected in the old one is seen in the new one only if they are the same.
    fn same_program(&self, target: &Target) -> Result<()> {
        let lost = || Error::Lost("the process has replaced its program".into());
        let now = Pagemap::open(target.pid)?;
        let mut held = self.desk.hold();
        for span in &self.followed {
            let page = Range { start: span.start, len: stillpoint_image::PAGE };
            self.desk.protect(&mut held, page);
            let mut runs: Vec<Run> = Vec::new();
            let (start, end) = (RemoteAddr(page.start), RemoteAddr(page.end()));
            let query = Query {
                any: Category::PRESENT | Category::SWAPPED,
                none: Category::WRITTEN,
                ..Query::default()
            };
            now.scan(start, end, query, &mut runs)?;
            let _ = self.desk.userfault.release(start, end);
            held.pages.change(page, State::Kept, State::Written);
            if !runs.is_empty() {
                return Ok(());
            }
        }
        // Nothing is followed of a program that has nothing to follow.
        if self.followed.is_empty() { Ok(()) } else { Err(lost()) }
    }

    fn scan(&self, range: Range, query: Query) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        self.desk.pagemap.scan(RemoteAddr(range.start), RemoteAddr(range.end()), query, &mut runs)?;
        Ok(runs)
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        let mut held = self.desk.hold();
        self.desk.stop_saving(&mut held);
        drop(held);
        // Closing the descriptor would release everything in one step, with the program's page faults waiting.
        for range in &self.followed {
            let mut at = range.start;
            while at < range.end() {
                let end = (at / PIECE * PIECE + PIECE).min(range.end());
                // Fails where the program has unmapped it.
                let _ = self.desk.userfault.unregister(RemoteAddr(at), RemoteAddr(end));
                at = end;
            }
        }
        self.desk.stop();
        for server in self.servers.drain(..) {
            let _ = server.join();
        }
    }
}

/// The sweep, with what it tells the user.
struct Sweep<'a> {
    desk: &'a Desk,
    progress: &'a (dyn Progress + Sync),
}

impl Source for Sweep<'_> {
    type Error = String;

    fn next(&self, buffer: &mut [u8]) -> Result<Vec<Range>, String> {
        let runs = self.desk.next(buffer)?;
        self.progress.advance(runs.iter().map(|r| r.len).sum());
        Ok(runs)
    }
}

/// Whether writers can be made to wait there.
fn can_wait(span: &Span) -> bool {
    !span.zeros_matter && span.swapped_is_clean
}

/// Whether pages can be swapped out at all.
fn swaps() -> bool {
    std::fs::read_to_string("/proc/swaps").is_ok_and(|s| s.lines().count() > 1)
}

/// Runs of pages, rounded to whole page tables, with the small holes between them, within a mapping.
fn cover(runs: &[Run], span: Range) -> Vec<Range> {
    let mut covered: Vec<Range> = Vec::new();
    for run in runs {
        let start = (run.start / CHUNK * CHUNK).max(span.start);
        let end = run.end.next_multiple_of(CHUNK).min(span.end());
        match covered.last_mut() {
            Some(last) if start <= last.end() + SMALL_HOLE => last.len = last.len.max(end - last.start),
            _ => covered.push(Range { start, len: end - start }),
        }
    }
    covered
}

/// The parts of ranges that lie within a span, ascending.
fn within(ranges: &[Range], span: Range) -> Vec<Range> {
    let clip = |r: &Range| {
        let (start, end) = (r.start.max(span.start), r.end().min(span.end()));
        (start < end).then(|| Range { start, len: end - start })
    };
    let mut parts: Vec<Range> = ranges.iter().filter_map(clip).collect();
    parts.sort_unstable_by_key(|r| r.start);
    parts
}

/// The parts of a span that are in none of some ranges within it (ascending).
fn without(span: Range, ranges: &[Range]) -> Vec<Range> {
    let mut parts = Vec::new();
    let mut at = span.start;
    for range in ranges {
        if at < range.start {
            push(&mut parts, Range { start: at, len: range.start - at });
        }
        at = at.max(range.end());
    }
    if at < span.end() {
        push(&mut parts, Range { start: at, len: span.end() - at });
    }
    parts
}
