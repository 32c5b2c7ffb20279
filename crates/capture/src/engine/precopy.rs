//! The engine `precopy`: pages are copied while the program runs, again when it has written them meanwhile, and the
//! few that are left at the cut.
//!
//! A page is written to the store straight from the program; of several copies the last one counts. A page that the
//! program dropped or unmapped since it was copied is found missing at the cut, and forgotten.

use super::tracking::{Found, Look, Looking, Tracking, WORTH_HELPERS, writes_unnoticed};
use super::{AtRest, Copied, Cut, Engine, Kept, Loading, MemoryEngine, Running, Still, politely, put_error};
use crate::regions::{Span, spans, spans_of_maps, zeros};
use crate::target::Target;
use crate::{Error, Result};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_image::{Extent, PAGE, Range};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Vma;

/// Rounds of copying before a cut.
const ROUNDS: usize = 8;
/// So little is left for the cut, bytes, that another round would not be worth it.
const LITTLE: u64 = 256 << 10;
/// Room for what the cut copies, at least; bytes.
const ROOM: u64 = 1 << 20;
/// For so many checkpoints a program that wrote faster than can be copied is taken to do so; for half as many of one that is paged, which is
/// looked at twice by each.
pub(crate) const PACE_KEPT: u32 = 8;
/// Cuts that may turn out to be too much.
const TRIES: usize = 3;

/// What lies behind a checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Behind {
    /// What the checkpoint has that it is relative to.
    pub base: Vec<Extent>,
    /// What the one has that holds what is still to be loaded.
    pub source: Vec<Extent>,
    /// A claim to a program that is not followed yet, and is still being loaded.
    pub loading: Option<Loading>,
}

/// At work on one checkpoint.
#[derive(Debug)]
pub(crate) struct Precopy {
    tracking: Option<Tracking>,
    /// A claim to a program that is not followed yet.
    loading: Option<Loading>,
    /// What the base checkpoint has.
    base: Vec<Extent>,
    /// What the checkpoint has that holds what is still to be loaded.
    source: Vec<Extent>,
    incremental: bool,
    /// Written since they were copied last, and whether zeros matter there: to be copied again.
    left: Vec<(Range, bool)>,
    /// A look since the program came to rest.
    resting: Option<Looking>,
    /// Pages that the cut copied.
    copied: Copied,
    /// All own pages at the cut.
    own: Vec<Range>,
    /// Most bytes that the cut may copy.
    most: u64,
    tries: usize,
    /// It writes faster than can be copied, and no other engine can save it: each round would write all of it once more.
    outpaced: bool,
    /// Why another engine must take over, if that turned out late.
    unfit: Option<String>,
    /// Something has been copied.
    started: bool,
    /// When the program's memory was looked at last, in this checkpoint if there has been a round.
    looked: Instant,
    rounds_before: bool,
    /// What looking and copying took in the cut.
    took: (Duration, Duration),
}

impl Precopy {
    /// With the tracking of the session, and `most` bytes to be copied at the cut.
    pub fn new(tracking: Option<Tracking>, behind: Behind, most: u64) -> Self {
        let copied = Copied::default();
        let Behind { base, source, loading } = behind;
        Precopy {
            tracking,
            loading,
            incremental: !base.is_empty(),
            base,
            source,
            left: Vec::new(),
            resting: None,
            copied,
            own: Vec::new(),
            most,
            tries: 0,
            outpaced: false,
            unfit: None,
            started: false,
            looked: Instant::now(),
            rounds_before: false,
            took: Default::default(),
        }
    }

    /// Whether no other engine can save the program: not all of its memory is there.
    fn is_paged(&self) -> bool {
        let of_tracking = self.tracking.as_ref().and_then(|tracking| tracking.loading.as_ref());
        of_tracking.or(self.loading.as_ref()).is_some_and(Loading::is_paged)
    }

    /// Copies until little is left.
    fn rounds(&mut self, running: &mut Running<'_>) -> Result<()> {
        if self.outpaced {
            return Ok(());
        }
        let was_outpaced = self.tracking.as_mut().is_some_and(|tracking| {
            let was_outpaced = tracking.outpaced > 0;
            tracking.outpaced = tracking.outpaced.saturating_sub(1);
            was_outpaced
        });
        let (mut before, mut last) = (u64::MAX, 0);
        for _ in 0..ROUNDS {
            let since = self.looked.elapsed();
            let bytes = self.find(running)?;
            last = bytes;
            // What is written during a round grows with the time it takes: when that does not shrink any more, it
            // will not.
            let few = bytes <= self.most;
            let shrinks = bytes <= before / 4 * 3 && !was_outpaced;
            if !shrinks && bytes > LITTLE && self.is_paged() {
                // Another round would leave as much. The cut copies it, and that of the next checkpoints does so at once.
                let found_out = self.tracking.iter_mut().filter(|_| !was_outpaced);
                found_out.for_each(|tracking| tracking.outpaced = PACE_KEPT);
                if !few {
                    (self.outpaced, self.tries) = (true, TRIES - 1);
                }
                break;
            }
            // The cut copies that as fast. Where all is to be saved there is no such round: much is found in the first.
            if bytes <= LITTLE && self.incremental {
                break;
            }
            self.copy_found(running)?;
            let rate = match std::mem::replace(&mut self.rounds_before, true) {
                false => String::new(),
                true => {
                    format!(", at {:.0} written pages a second", (bytes / PAGE) as f64 / since.as_secs_f64())
                }
            };
            running.log.tell(format!("copied {} pages while it ran{rate}", bytes / PAGE));
            if !shrinks && !few {
                return Err(Error::Lost("the program writes faster than can be copied".into()));
            }
            if bytes <= LITTLE || !shrinks {
                break;
            }
            before = bytes;
        }
        // More than the last round found will hardly be left. Of much, twice as much would be too much memory.
        self.copied.reserve(match self.outpaced {
            true => last + last / 4,
            false => self.most.min(ROOM.max(2 * last)),
        });
        Ok(())
    }

    /// Refers to what is still to be loaded; tells how many pages that are, if it is being loaded.
    fn refer(&mut self, running: &mut Running<'_>) -> Result<Option<u64>> {
        let tracking = self.tracking.as_mut();
        let Some(loading) = tracking.and_then(|t| t.loading.as_mut()) else { return Ok(None) };
        let missing = loading.references(&self.source, running.target.owner());
        match loading.is_paged() {
            true => running.writer.share(&missing)?,
            false => running.writer.reuse(&missing)?,
        }
        Ok(Some(missing.iter().map(|e| u64::from(e.pages)).sum()))
    }

    /// Finds what is to be copied; tells how many bytes that are.
    fn find(&mut self, running: &mut Running<'_>) -> Result<u64> {
        let spans = || Ok(spans_of_maps(&running.target.process.maps()?));
        let Some(tracking) = &mut self.tracking else {
            return Err(Error::Failed("it is not followed".into()));
        };
        let pause = tracking.enroll(running.target, running.earlier)?;
        running.log.pauses.extend(pause);
        self.looked = Instant::now();
        let Found { dirty, .. } = tracking.look(running.target, spans, Look::Ahead)?;
        // Looked at after pages were protected and before they are copied: see there.
        if writes_unnoticed(running.target.pid)? {
            let why = "it reads files past the page cache (O_DIRECT), or has its own memory open as a file";
            return Err(Error::Failed(why.into()));
        }
        self.left.extend(dirty);
        self.refer(running)?;
        unite(&mut self.left);
        let bytes = self.left.iter().map(|(r, _)| r.len).sum();
        if !std::mem::replace(&mut self.started, true) {
            running.progress.start(bytes);
        }
        Ok(bytes)
    }

    /// Copies what was found, or as much of it as is still there.
    fn copy_found(&mut self, running: &mut Running<'_>) -> Result<()> {
        let left = std::mem::take(&mut self.left);
        for zeros_matter in [false, true] {
            let alike: Vec<Range> = left.iter().filter(|l| l.1 == zeros_matter).map(|l| l.0).collect();
            let missed = put_what_is_there(&running.target.memory, &alike, zeros_matter, running)?;
            self.left.extend(missed.into_iter().map(|r| (r, zeros_matter)));
        }
        Ok(())
    }
}

impl MemoryEngine for Precopy {
    fn engine(&self) -> Engine {
        Engine::Precopy
    }

    fn name(&self) -> &'static str {
        // Those who page it have saved most of it.
        if self.is_paged() { "paging" } else { self.engine().name() }
    }

    fn prepare(&mut self, running: &mut Running<'_>) -> Result<()> {
        if self.tracking.is_none() {
            self.tracking = Some(Tracking::start(running, self.loading.take())?);
        }
        running.writer.reuse(&std::mem::take(&mut self.base))?;
        self.rounds(running)
    }

    fn is_incremental(&self) -> bool {
        self.incremental
    }

    fn converge(&mut self, running: &mut Running<'_>) -> Result<()> {
        match self.rounds(running) {
            // The cut will find out how much is left.
            Err(Error::Lost(_)) => Ok(()),
            Err(e @ (Error::Failed(_) | Error::Followed(_))) => {
                self.unfit = Some(e.to_string());
                Ok(())
            }
            done => done,
        }
    }

    fn marks_are_gone(&mut self, range: Range) {
        self.tracking.iter_mut().for_each(|tracking| tracking.owe(range));
    }

    fn rest<'s>(&'s mut self, target: &'s Target, maps: &[Vma], many: bool) -> Result<Option<AtRest<'s>>> {
        let spans = spans_of_maps(maps);
        let worth_it = many || spans.iter().map(|s| s.range.len).sum::<u64>() >= WORTH_HELPERS;
        let Some(tracking) = self.tracking.as_mut().filter(|_| worth_it && self.unfit.is_none()) else {
            return Ok(None);
        };
        tracking.ask()?;
        let looking = self.resting.insert(tracking.begin(target, spans, Look::AtRest)?);
        Ok(Some(Box::new(|| tracking.work(target, looking))))
    }

    fn cut(&mut self, still: &mut Still<'_>) -> Result<Cut> {
        if let Some(why) = self.unfit.take() {
            return Ok(Cut::Impossible(why));
        }
        let spans = spans(&still.builder.image.spaces[still.target.space as usize]);
        let is_last_resort = self.is_paged() && self.tries + 1 >= TRIES;
        let Some(tracking) = &mut self.tracking else {
            return Err(Error::Failed("it is not followed".into()));
        };
        for look in [Look::AtRest, Look::Protect] {
            let began = Instant::now();
            let found = match self.resting.take() {
                Some(looking) if looking.spans == spans => tracking.end(looking),
                other => {
                    // What was found has been told.
                    self.left.extend(other.map(|looking| tracking.end(looking).dirty).unwrap_or_default());
                    tracking.look(still.target, || Ok(spans.clone()), look)?
                }
            };
            self.took = (began.elapsed(), Duration::ZERO);
            self.left = still_there(&self.left, &found.own);
            self.left.extend(&found.dirty);
            // What was left by a look while it ran may have been something else than it is.
            self.left = as_they_are(&self.left, &spans);
            let bytes: u64 = self.left.iter().map(|(r, _)| r.len).sum();
            // Much of it may have been dropped, which a closer look tells.
            if look == Look::AtRest && bytes > self.most {
                continue;
            }
            // Where nobody else could save it all of that is copied in the end.
            if bytes > self.most && !is_last_resort {
                self.tries += 1;
                let pages = bytes / PAGE;
                still.log.tell(format!("{pages} pages were left at the cut, too many to copy in it"));
                return Ok(Cut::TooMuch);
            }
            let copied = self.copied.copy(&still.target.memory, &self.left);
            self.took.1 = began.elapsed() - self.took.0;
            self.own = found.own;
            match copied {
                // One was dropped in a way that leaves nothing to read; a closer look tells.
                Err(_) if look == Look::AtRest => {}
                copied => return copied.map(|()| Cut::Taken),
            }
        }
        Err(Error::Failed("its memory cannot be read".into()))
    }

    fn finish(&mut self, running: &mut Running<'_>) -> Result<()> {
        let pages = self.copied.len() / PAGE;
        let (look, copy) = self.took;
        running.log.tell(format!("the cut looked for {look:.0?} and copied {pages} pages in {copy:.0?}"));
        if let Some(pages) = self.refer(running)? {
            let loading = self.tracking.as_ref().and_then(|t| t.loading.as_ref());
            let what = if loading.is_some_and(|l| l.is_paged()) { "paged out" } else { "still to be loaded" };
            running.log.tell(format!("{pages} pages are {what}, and stay where they are stored"));
        }
        self.copied.put(running.target.owner(), running.writer)?;
        running.writer.keep_only(running.target.owner(), std::mem::take(&mut self.own));
        Ok(())
    }

    fn kept(self: Box<Self>) -> Kept {
        Kept { tracking: self.tracking, ..Kept::default() }
    }

    fn try_again(&self) -> bool {
        self.tries < TRIES
    }
}

/// The parts of ranges that are among the own pages (ascending).
fn still_there(ranges: &[(Range, bool)], own: &[Range]) -> Vec<(Range, bool)> {
    let mut there = Vec::new();
    for &(range, zeros_matter) in ranges {
        let first = own.partition_point(|o| o.end() <= range.start);
        for part in own[first..].iter().take_while(|o| o.start < range.end()) {
            let (start, end) = (part.start.max(range.start), part.end().min(range.end()));
            there.push((Range { start, len: end - start }, zeros_matter));
        }
    }
    there
}

/// The parts of ranges that lie in these spans, ascending and apart, and whether zeros matter there.
fn as_they_are(ranges: &[(Range, bool)], spans: &[Span]) -> Vec<(Range, bool)> {
    let ranges = Range::joined(ranges.iter().map(|(range, _)| *range).collect());
    spans.iter().flat_map(|s| s.range.parts_of(&ranges).map(|part| (part, s.zeros_matter))).collect()
}

/// Makes ranges ascend and lie apart.
fn unite(ranges: &mut Vec<(Range, bool)>) {
    ranges.sort_unstable_by_key(|(r, _)| r.start);
    ranges.dedup_by(|(next, next_matters), (last, matters)| {
        let joins = next.start <= last.end() && next_matters == matters;
        if joins {
            last.len = last.len.max(next.end() - last.start);
        }
        joins
    });
}

/// Puts the pages of ranges of a running program; returns those that could not be read: they may be on their way to
/// somewhere else.
fn put_what_is_there(
    memory: &Memory,
    ranges: &[Range],
    zeros_matter: bool,
    running: &mut Running<'_>,
) -> Result<Vec<Range>> {
    let missed = Mutex::new(Vec::new());
    let progress = running.progress;
    let fill = |batch: &[Range], buffer: &mut [u8]| {
        progress.advance(buffer.len() as u64);
        let ranges: Vec<(u64, u64)> = batch.iter().map(|r| (r.start, r.len)).collect();
        if memory.read_many(&ranges, buffer).is_ok() {
            return Ok::<(), stillpoint_linux::Error>(());
        }
        let mut rest = buffer;
        for range in batch {
            let (now, later) = rest.split_at_mut(range.len as usize);
            rest = later;
            if memory.read_many(&[(range.start, range.len)], now).is_err() {
                now.fill(0);
                missed.lock().unwrap_or_else(PoisonError::into_inner).push(*range);
            }
        }
        Ok(())
    };
    let (writer, owner) = (&mut *running.writer, running.target.owner());
    let put = politely(|| writer.put_parallel(owner, ranges, zeros(zeros_matter), &fill));
    put.map_err(put_error)?;
    Ok(missed.into_inner().unwrap_or_else(PoisonError::into_inner))
}
