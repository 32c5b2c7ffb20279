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

use super::tracking::{WORTH_A_STOP, open_inside, there_beside, writes_through_proc};
use super::{Base, Copied, Cut, Engine, Kept, MemoryEngine, Running, Still, politely};
use crate::brief::stop_briefly;
use crate::checkpoint::Progress;
use crate::freeze::Frozen;
use crate::regions::{Span, own_pages, range, spans, spans_of_maps};
use crate::target::Target;
use crate::{Error, Result};
use around::Around;
use copies::Copies;
use pages::{CHUNK, State};
use server::{Desk, Held};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use stillpoint_image::{Extent, PAGE, Range, Thread};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::Regs;
use stillpoint_linux::host;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::{Category, Pagemap, Query, Run};
use stillpoint_linux::userfault::{Mode, Userfault};
use stillpoint_store::{PutError, Source, Zeros};

/// Threads that serve waiting writers, where there are as many processors.
const SERVERS: usize = 2;
/// Memory is protected and let go of in pieces of this size, bytes, so that the program's own page faults get their turn.
const PIECE: u64 = 4 << 20;
/// Holes up to this size, bytes, get page tables (4 KiB for each 2 MiB), so that they need not be looked at in the cut.
const SMALL_HOLE: u64 = 8 * CHUNK;
/// The cut may copy so much, bytes, however small the buffer is to be.
const AT_MOST: u64 = 32 << 20;
/// What is new, or changes its place, may soon be gone: so much of it, bytes, is copied in the cut rather than
/// protected; four times as much at each try.
const EAGER: u64 = 1 << 20;
/// Mappings that have no more than this, bytes, are protected in the cut: their own, or with a thread's block.
const SMALL: u64 = 256 << 10;
const SMALL_WITH_THREAD: u64 = 1 << 20;
/// Where in a thread's block (at its thread pointer) the C library lets the kernel clear a word, at most, bytes.
const THREAD_BLOCK: u64 = 0x400;
/// More runs than this in a piece are protected all at once.
const MANY: usize = 16;
/// Rounds of protecting what was written meanwhile, at most.
const ROUNDS: usize = 8;
/// So few written pages are left for the cut that another round would not be worth it.
const FEW: u64 = 16;
/// Neighbours that are copied with a page when nothing speaks for more: they have to be saved anyway.
const LEAST_AROUND: u64 = 4;
/// Share of the buffer that the threads hold which write to the store, bytes.
const IN_FLIGHT: u64 = 4 << 20;
/// Instants that may be lost before another engine takes over.
const TRIES: usize = 3;

/// A process whose writers wait. When it is dropped, nothing of it stays behind.
#[derive(Debug)]
pub(crate) struct Armed {
    desk: Arc<Desk>,
    servers: Vec<JoinHandle<()>>,
    /// Where every page that appears is noted, because there is a page or a mark in each place.
    covered: Vec<Range>,
    /// Mappings that are registered, ascending, as they were when they were.
    enrolled: Vec<Range>,
    /// All that was followed.
    followed: Vec<Range>,
    /// Mappings of few pages, which are protected in the cut only.
    small: Vec<Range>,
    /// Pages that are never protected: into each the kernel writes when a thread ends, or goes on to wait for a lock that the kernel
    /// hands over, and does not wait for us.
    exempt: Vec<u64>,
    /// A checkpoint is complete: what is protected is saved, or known to be unsaved.
    complete: bool,
    /// Own pages that there were before the cut.
    own: Vec<Range>,
    /// Own pages that were found at the cut where nothing was known.
    found: Vec<Range>,
    /// None before the first checkpoint.
    pub base: Option<Base>,
}

/// At work on one checkpoint.
#[derive(Debug)]
pub(crate) struct Wp {
    armed: Option<Armed>,
    /// Writers wait, and are noted, also after this checkpoint.
    lasting: bool,
    /// What the base checkpoint has.
    base: Vec<Extent>,
    incremental: bool,
    /// Bytes that may be on their way.
    buffer: u64,
    plain: bool,
    /// Pages that are copied in the cut: what cannot be protected.
    copied: Copied,
    /// What was gone before it was saved, in an instant that was lost.
    fleeting: Vec<Range>,
    tries: usize,
    /// The checkpoint is complete, as far as private memory is concerned.
    done: bool,
}

impl Wp {
    /// With what the session has armed, and `base` what the checkpoint has that it is relative to; `buffer` bytes may be
    /// on their way to the store. `lasting`: there will be further checkpoints.
    pub fn new(armed: Option<Armed>, base: Vec<Extent>, buffer: u64, lasting: bool) -> Self {
        let plain = std::env::var_os("STILLPOINT_WP").is_some_and(|v| v == "plain");
        let lasting = lasting && !plain;
        Wp {
            armed,
            lasting,
            base,
            incremental: false,
            buffer,
            plain,
            copied: Copied::default(),
            fleeting: Vec::new(),
            tries: 0,
            done: false,
        }
    }

    fn armed(&mut self) -> Result<&mut Armed> {
        self.armed.as_mut().ok_or_else(|| Error::Failed("its writers do not wait".into()))
    }
}

impl MemoryEngine for Wp {
    fn engine(&self) -> Engine {
        Engine::Wp
    }

    fn prepare(&mut self, running: &mut Running<'_>) -> Result<()> {
        // There what it writes does not wait: it fails.
        if writes_through_proc(running.target.pid)? {
            let why = "it may write its own memory through /proc, which fails while its writers wait";
            return Err(Error::Lost(why.into()));
        }
        if self.base.is_empty() {
            self.armed = None;
        }
        let base = std::mem::take(&mut self.base);
        // After an instant that was lost all is saved.
        self.incremental = self.armed.is_some();
        match self.armed {
            Some(_) => running.writer.reuse(&base)?,
            None => self.armed = Some(Armed::start(running)?),
        }
        // It may have made children since it was armed.
        if running.target.memory.keeps_shared() {
            self.armed()?.desk.memory.keep_shared()?;
        }
        if self.plain {
            running.log.tell("plain: all is protected in the cut, and a fault copies one page");
        }
        self.copied.reserve(self.buffer);
        Ok(())
    }

    fn is_incremental(&self) -> bool {
        self.incremental
    }

    fn converge(&mut self, running: &mut Running<'_>) -> Result<()> {
        if self.plain { Ok(()) } else { self.armed()?.arm(running) }
    }

    fn cut(&mut self, still: &mut Still<'_>) -> Result<Cut> {
        let began = Instant::now();
        let (plain, buffer, lasting) = (self.plain, self.buffer, self.lasting);
        let desk = self.armed()?.desk.clone();
        let mut held = desk.hold();
        let spans = spans(&still.builder.image.spaces[still.target.space as usize]);
        let eager = if plain { 0 } else { EAGER << (2 * self.tries) };
        held.changed.extend(&self.fleeting);
        let threads = &still.target.described(&still.builder.image)?.threads;
        let others = self.armed()?.cut(&mut held, &spans, threads, eager)?;
        let bytes: u64 = others.iter().map(|(r, _)| r.len).sum();
        if bytes > buffer.max(AT_MOST) {
            still.log.tell(format!("{} MiB are in pages that cannot be protected", bytes >> 20));
            self.tries = TRIES;
            return Ok(Cut::TooMuch);
        }
        self.copied.copy(&still.target.memory, &others)?;
        still.log.tell(format!("the cut took {:?}", began.elapsed()));
        held.saving = true;
        held.keep = lasting;
        held.copies = Copies::new(buffer.saturating_sub(IN_FLIGHT));
        // What is released counts as written at the next checkpoint; if there is none, it is saved anyway.
        held.around = Around::new(if plain || lasting { 1 } else { LEAST_AROUND }, !plain);
        Ok(Cut::Taken)
    }

    fn finish(&mut self, running: &mut Running<'_>) -> Result<()> {
        self.tries += 1;
        let others: Vec<Range> = self.copied.ranges.iter().map(|r| r.0).collect();
        let saved = self.armed()?.save(running);
        if saved.is_err() {
            let gone = std::mem::take(&mut self.armed()?.desk.hold().gone);
            self.fleeting.extend(gone);
        }
        let own = saved?;
        self.copied.put(running.target.owner(), running.writer)?;
        running.writer.keep_only(running.target.owner(), Range::joined([own, others].concat()));
        self.armed()?.complete = true;
        self.done = true;
        Ok(())
    }

    fn kept(self: Box<Self>) -> Kept {
        let armed = self.armed.filter(|_| self.lasting && self.done);
        Kept { armed, ..Kept::default() }
    }

    fn try_again(&self) -> bool {
        self.tries < TRIES
    }
}

impl Armed {
    /// Makes the writers of a process wait for what is protected, for which all of it stands still for a moment.
    fn start(running: &mut Running<'_>) -> Result<Self> {
        let target = running.target;
        let open = |frozen: &mut Frozen| {
            let mut blocks = Vec::new();
            for thread in &frozen.threads {
                let regs = thread.regs()?;
                blocks.extend([regs.fs_base, regs.fs_base + THREAD_BLOCK]);
                blocks.extend(locks_in_kernel(&regs));
            }
            let userfault = open_inside(target, frozen, Mode::Waits)?;
            let enrolled = enroll_now(&userfault, target)?;
            Ok((userfault, blocks, enrolled))
        };
        let ((userfault, blocks, enrolled), pause) = stop_briefly(target, running.earlier, open)?;
        running.log.pauses.push(pause);
        let desk = Desk::new(userfault, Memory::open(target.pid)?, Pagemap::open(target.pid)?)?;
        let mut armed = Armed {
            desk: Arc::new(desk),
            servers: Vec::new(),
            covered: Vec::new(),
            enrolled,
            followed: Vec::new(),
            small: Vec::new(),
            exempt: pages_of(blocks.into_iter()),
            complete: false,
            own: Vec::new(),
            found: Vec::new(),
            base: None,
        };
        let processors = host::processors();
        for _ in 0..SERVERS.min(processors) {
            let desk = armed.desk.clone();
            let server = std::thread::Builder::new().name("wp".into()).spawn(move || desk.serve());
            armed.servers.push(server.map_err(|e| Error::Failed(format!("no thread: {e}")))?);
        }
        Ok(armed)
    }

    /// Protects everything while the program runs.
    fn arm(&mut self, running: &mut Running<'_>) -> Result<()> {
        let mut held = self.desk.hold();
        held.changed.clear();
        held.attentive = true;
        drop(held);
        self.covered.clear();
        self.followed.clear();
        self.small.clear();
        self.own.clear();
        let mut spans = spans_of_maps(&running.target.process.maps()?);
        spans.retain(can_wait);
        if there_beside(running.target, &spans, &self.enrolled)? >= WORTH_A_STOP {
            let target = running.target;
            let enroll = |_: &mut Frozen| enroll_now(&self.desk.userfault, target);
            let (enrolled, pause) = stop_briefly(target, running.earlier, enroll)?;
            running.log.pauses.push(pause);
            self.enrolled = enrolled;
        }
        for span in &spans {
            self.arm_span(span.range)?;
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

    /// Follows a mapping of a program that stands still; false if that is not possible. Twice is as good as once.
    fn follow(&mut self, span: Range) -> bool {
        let followed = self.desk.userfault.register(RemoteAddr(span.start), RemoteAddr(span.end())).is_ok();
        if followed {
            self.followed.push(span);
        }
        followed
    }

    /// Protects what there is in a mapping, and fills the page tables around it with marks.
    ///
    /// Where a thread ends, the kernel clears a word of its memory (`set_tid_address(2)`) without waiting for anybody:
    /// were that page protected just then, the word would stay, and whoever joins the thread would wait for ever. While
    /// the program runs, threads come that we do not know, so mappings that may be their stacks are left to the cut.
    fn arm_span(&mut self, span: Range) -> Result<()> {
        let pages = self.scan(span, there())?;
        let bytes: u64 = pages.iter().map(|r| r.end - r.start).sum();
        let has_thread = self.exempt.iter().any(|e| (span.start..span.end()).contains(e));
        // What has come since, or has grown, is not registered while the program runs: see `Tracking::enroll`.
        let is_enrolled = self.enrolled.binary_search_by_key(&span.start, |e| e.start);
        let is_enrolled = is_enrolled.is_ok_and(|i| self.enrolled[i] == span);
        if !is_enrolled || bytes <= if has_thread { SMALL_WITH_THREAD } else { SMALL } {
            self.small.push(span);
            return Ok(());
        }
        self.followed.push(span);
        // Only from here on it is told what is dropped: what was there a moment ago may be gone.
        self.own.extend(self.scan(span, there())?.iter().map(range));
        for covered in cover(&pages, span) {
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
        let bare = Query {
            all: Category::WRITTEN,
            none: Category::GUARD,
            report: Category::PRESENT | Category::SWAPPED | Category::ZERO,
            ..Query::default()
        };
        let bare = self.scan(piece, bare)?;
        let mut held = self.desk.hold();
        if bare.len() > MANY {
            // What is protected already stays so.
            self.desk.protect(&mut held, piece);
        }
        for run in &bare {
            if bare.len() <= MANY {
                self.desk.protect(&mut held, range(run));
            }
            held.pages.change(range(run), State::Written, State::Unsaved);
            if run.categories.contains(Category::SWAPPED) {
                held.pages.set(range(run), State::Unsaved);
            }
        }
        let present = Query {
            any: if swaps() { Category::PRESENT | Category::SWAPPED } else { Category::PRESENT },
            none: Category::ZERO | Category::GUARD,
            report: Category::WRITTEN,
            ..Query::default()
        };
        let bare: Vec<Range> = bare.iter().map(range).collect();
        for run in self.scan(piece, present)? {
            let written = run.categories.contains(Category::WRITTEN);
            let state = if written { State::Written } else { State::Unsaved };
            range(&run).parts_of(&bare).for_each(|part| held.pages.set(part, state));
        }
        for page in self.exempt.iter().filter(|e| (piece.start..piece.end()).contains(e)) {
            self.desk.leave_out(&mut held, *page);
        }
        Ok(())
    }

    /// Protects what was written since it was protected; tells how many pages.
    fn arm_written(&self) -> u64 {
        let mut held = self.desk.hold();
        let runs: Vec<Range> = self.covered.iter().flat_map(|c| held.pages.arm(*c)).collect();
        runs.iter().for_each(|run| self.desk.protect(&mut held, *run));
        runs.iter().map(|r| r.len).sum::<u64>() / PAGE
    }

    /// With the program at rest: everything of it is unsaved and protected from here on. Returns what is to be copied
    /// before it runs on, and whether zeros matter there: what cannot be protected, and what may not stay for long.
    fn cut(
        &mut self,
        held: &mut Held<'_>,
        spans: &[Span],
        threads: &[Thread],
        eager: u64,
    ) -> Result<Vec<(Range, bool)>> {
        let changed = Range::joined(std::mem::take(&mut held.changed));
        let mut cutting = Cutting { changed, eager, ..Cutting::default() };
        self.found.clear();
        let mut end = 0;
        for span in spans {
            if can_wait(span) && self.cut_span(held, span.range, &mut cutting)? {
                held.pages.set(Range { start: end, len: span.range.start - end }, State::Kept);
                end = span.range.end();
            } else {
                let mut own = Vec::new();
                own_pages(&self.desk.pagemap, span, &mut own)?;
                cutting.copy.extend(own.into_iter().map(|r| (r, span.zeros_matter)));
            }
        }
        held.pages.set(Range { start: end, len: u64::MAX / CHUNK * CHUNK - end }, State::Kept);
        let all = Range { start: 0, len: u64::MAX / CHUNK * CHUNK };
        let runs = held.pages.arm(all);
        runs.iter().for_each(|run| self.desk.protect(held, *run));
        self.covered = cutting.covered;
        let locks =
            threads.iter().filter_map(|t| Regs::from_bytes(&t.regs.0)).flat_map(|r| locks_in_kernel(&r));
        let words = threads.iter().map(|t| t.clear_child_tid).chain(locks);
        self.exempt = pages_of(self.exempt.iter().copied().chain(words));
        for &page in &self.exempt {
            let waits = |s: &&Span| can_wait(s) && (s.range.start..s.range.end()).contains(&page);
            let run = Range { start: page, len: PAGE };
            if spans.iter().find(waits).is_some() && !self.scan(run, there())?.is_empty() {
                self.desk.leave_out(held, page);
                cutting.copy.push((run, false));
            }
        }
        held.urgent.extend(cutting.urgent);
        held.cursor = 0;
        held.figures = server::Figures::default();
        Ok(cutting.copy)
    }

    /// Looks for pages that have appeared in a mapping without being noted. False if it cannot be followed.
    fn cut_span(&mut self, held: &mut Held<'_>, span: Range, cutting: &mut Cutting) -> Result<bool> {
        if self.small.binary_search_by_key(&span.start, |s| s.start).is_ok_and(|i| self.small[i] == span) {
            let trusted = self.complete && span.parts_of(&cutting.changed).next().is_none();
            return Ok(self.follow(span) && self.cut_hole(held, span, None, trusted).map(|()| true)?);
        }
        let covered: Vec<Range> = span.parts_of(&self.covered).collect();
        // A mapping that has replaced another is not followed, and the kernel says so.
        let same = covered.first().is_some_and(|c| {
            let page = RemoteAddr(c.start);
            self.desk.userfault.protect(page, RemoteAddr(page.0 + PAGE)).is_ok()
        });
        if !same && !self.follow(span) {
            return Ok(false);
        }
        if !same && !span.parts_of(&self.followed).any(|f| f == span) {
            // It was not there a moment ago, and may be gone a moment later.
            self.cut_hole(held, span, Some(cutting), false)?;
            return Ok(true);
        }
        let known = if same { Range::without(&covered, &cutting.changed) } else { Vec::new() };
        for hole in Range::without(&[span], &known) {
            let fleeting = hole.parts_of(&cutting.changed).next().is_some();
            self.cut_hole(held, hole, fleeting.then_some(&mut *cutting), false)?;
        }
        cutting.covered.extend(known);
        Ok(true)
    }

    /// Protects the pages that there are in a range where nothing was known. If it is fleeting, it comes first. Where
    /// what is protected can be trusted, it is as it was.
    fn cut_hole(
        &mut self,
        held: &mut Held<'_>,
        hole: Range,
        fleeting: Option<&mut Cutting>,
        trusted: bool,
    ) -> Result<()> {
        let mut runs = self.scan(hole, Query { report: Category::WRITTEN, ..there() })?;
        self.found.extend(runs.iter().map(range));
        if trusted {
            runs.retain(|r| r.categories.contains(Category::WRITTEN));
        } else {
            held.pages.set(hole, State::Kept);
        }
        let runs: Vec<Range> = runs.iter().map(range).collect();
        let bytes: u64 = runs.iter().map(|r| r.len).sum();
        if let Some(cutting) = fleeting {
            if bytes <= cutting.eager {
                cutting.eager -= bytes;
                cutting.copy.extend(runs.into_iter().map(|r| (r, false)));
                return Ok(());
            }
            cutting.urgent.extend(&runs);
        }
        for run in runs {
            held.pages.set(run, State::Unsaved);
            self.desk.protect(held, run);
        }
        Ok(())
    }

    /// Brings all unsaved pages of the cut to the store; returns all own pages that there were at the cut.
    fn save(&self, running: &mut Running<'_>) -> Result<Vec<Range>> {
        self.nothing_unnoticed()?;
        running.progress.start(self.desk.hold().pages.unsaved() * PAGE);
        let source = Sweep { desk: &self.desk, progress: running.progress, put: Mutex::default() };
        let (writer, owner) = (&mut *running.writer, running.target.owner());
        let put = politely(|| writer.put_from(owner, Zeros::Omit, &source));
        put.map_err(|e| match e {
            PutError::Fill(why) => Error::Lost(why),
            PutError::Store(e) => Error::Store(e),
        })?;
        self.same_program(running.target)?;
        let mut held = self.desk.hold();
        self.desk.stop_saving(&mut held);
        held.attentive = false;
        let f = held.figures;
        running.log.tell(format!(
            "{} writes waited, {} of them for a copy, {} for room; {} pages were copied for them, {} KiB at a time",
            f.waited, f.copied, f.held_back, f.pages, held.copies.most_used() >> 10
        ));
        let kept = self.covered.iter().flat_map(|c| c.parts_of(&self.own));
        let mut own: Vec<Range> = kept.chain(self.found.iter().copied()).collect();
        own.extend(source.put.into_inner().unwrap_or_else(PoisonError::into_inner));
        Ok(own)
    }

    /// Where every page is noted that appears, each one that is not protected must have been. And each one of which the contents
    /// are in the store must be there still: who drops pages goes on when that was noted, and drops them when it gets to run,
    /// which may be after all was protected although it was noted before.
    fn nothing_unnoticed(&self) -> Result<()> {
        for covered in &self.covered {
            let there: Vec<Range> = self.scan(*covered, there())?.iter().map(range).collect();
            for own in covered.parts_of(&self.own) {
                for missing in Range::without(&[own], &there) {
                    let held = self.desk.hold();
                    let mut pages = (missing.start..missing.end()).step_by(PAGE as usize);
                    let kept = |page: u64| {
                        held.pages.state(page) == State::Kept
                            && !held.changed.iter().any(|c| (c.start..c.end()).contains(&page))
                    };
                    if let Some(page) = pages.find(|p| kept(*p)) {
                        return Err(Error::Lost(format!("the page at {page:#x} was dropped unnoticed")));
                    }
                }
            }
        }
        let bare = Category::PRESENT | Category::WRITTEN;
        let query = Query { all: bare, none: Category::ZERO, ..Query::default() };
        for covered in &self.covered {
            for run in self.scan(*covered, query)? {
                let held = self.desk.hold();
                let mut pages = (run.start..run.end).step_by(PAGE as usize);
                let noted = |page: u64| {
                    held.pages.state(page) == State::Written
                        || self.exempt.binary_search(&page).is_ok()
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
        let now = Pagemap::open(target.pid)?;
        let mut held = self.desk.hold();
        for span in &self.followed {
            let page = Range { start: span.start, len: PAGE };
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
        if self.followed.is_empty() { Ok(()) } else { Err(Error::Replaced) }
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
            self.desk.userfault.release_gently(RemoteAddr(range.start), RemoteAddr(range.end()));
        }
        self.desk.stop();
        for server in self.servers.drain(..) {
            let _ = server.join();
        }
    }
}

/// A cut under way.
#[derive(Debug, Default)]
struct Cutting {
    /// Where pages were dropped or moved since all was protected.
    changed: Vec<Range>,
    /// Where every page that appears is noted.
    covered: Vec<Range>,
    /// To be copied before the program runs on, and whether zeros matter there.
    copy: Vec<(Range, bool)>,
    /// Bytes that may be copied although they can be protected.
    eager: u64,
    /// To be swept first.
    urgent: Vec<Range>,
}

/// The sweep, with what it tells the user.
struct Sweep<'a> {
    desk: &'a Desk,
    progress: &'a (dyn Progress + Sync),
    /// What was put so far.
    put: Mutex<Vec<Range>>,
}

impl Source for Sweep<'_> {
    type Error = String;

    fn next(&self, buffer: &mut [u8]) -> Result<Vec<Range>, String> {
        let runs = self.desk.next(buffer)?;
        self.progress.advance(runs.iter().map(|r| r.len).sum());
        self.put.lock().unwrap_or_else(PoisonError::into_inner).extend(&runs);
        Ok(runs)
    }
}

/// Words of a lock that the kernel writes itself, if a thread has just asked it to: where the page is protected, the call fails with
/// `EFAULT` (`fault_in_user_writeable` of kernel/futex/core.c waits for nobody), and the C library ends the program. Who waits for
/// such a lock asks once more after each stop.
fn locks_in_kernel(regs: &Regs) -> [u64; 2] {
    let [first, operation, .., second, _] = regs.call_args();
    let calls = [regs.orig_rax, regs.rax].contains(&(libc::SYS_futex as u64));
    match operation as i32 & libc::FUTEX_CMD_MASK {
        libc::FUTEX_LOCK_PI | libc::FUTEX_UNLOCK_PI | libc::FUTEX_TRYLOCK_PI | libc::FUTEX_LOCK_PI2
            if calls =>
        {
            [first, 0]
        }
        libc::FUTEX_WAKE_OP | libc::FUTEX_WAIT_REQUEUE_PI | libc::FUTEX_CMP_REQUEUE_PI if calls => {
            [first, second]
        }
        _ => [0, 0],
    }
}

/// The pages of some addresses, ascending.
fn pages_of(addresses: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut pages: Vec<u64> = addresses.map(|a| a / PAGE * PAGE).filter(|p| *p != 0).collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}

/// Registers all in which writers can be made to wait; tells what that is, ascending. The program stands still.
fn enroll_now(userfault: &Userfault, target: &Target) -> Result<Vec<Range>> {
    let spans = spans_of_maps(&target.process.maps()?);
    let ranges = spans.iter().filter(|span| can_wait(span)).map(|span| span.range);
    let is_registered = |r: &Range| userfault.register(RemoteAddr(r.start), RemoteAddr(r.end())).is_ok();
    Ok(ranges.filter(is_registered).collect())
}

/// Whether writers can be made to wait there.
fn can_wait(span: &Span) -> bool {
    !span.zeros_matter && span.swapped_is_clean
}

/// Whether pages can be swapped out at all.
fn swaps() -> bool {
    std::fs::read_to_string("/proc/swaps").is_ok_and(|s| s.lines().count() > 1)
}

/// Pages that a mapping of memory has of its own.
fn there() -> Query {
    let any = Category::PRESENT | Category::SWAPPED;
    Query { any, none: Category::ZERO | Category::GUARD, ..Query::default() }
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
