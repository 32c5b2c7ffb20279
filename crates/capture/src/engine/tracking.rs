//! What a process has written since its last checkpoint, as the kernel notes it.

use super::{Base, Loading, Running};
use crate::blocked::{Earlier, would_be_noticed};
use crate::brief::stop_briefly;
use crate::freeze::Frozen;
use crate::lend::Lender;
use crate::regions::{Span, range, spans_of_maps, within};
use crate::target::Target;
use crate::{Error, Refusal, Result, attributes, ours};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use stillpoint_image::{PAGE, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::descriptors::duplicate_from;
use stillpoint_linux::fdinfo::{self, Folders};
use stillpoint_linux::host;
use stillpoint_linux::pagemap::{Category, Pagemap, Query, Run};
use stillpoint_linux::userfault::{self, Mode, Userfault, what_is_missing_counts_as_written};

/// At least so much is looked at in one go, bytes.
const LOOK: u64 = 256 << 20;
/// From here on a look is worth several threads, bytes: it takes at least 0.2 ms for each GiB, and a thread on a processor that
/// was idle 0.1 to 0.3 ms to come to speed.
pub(crate) const WORTH_HELPERS: u64 = 2 << 30;
/// Pages that are written in more places than this, or own in more runs (what is missing between them counts as
/// written), are looked at one by one: that is faster then.
const FEW: usize = 256;
/// Of fewer own pages all are looked at in less time than two looks take, bytes.
const MANY: u64 = 8 << 20;
/// So much of what is mapped in is taken over in one brief stop, bytes …
const TAKEN: u64 = 64 << 20;
/// … in so many pieces.
const TOGETHER: usize = 16;
/// How often, and after how long, it is looked again whether a stop would be noticed.
const TRIES: usize = 100;
const TRY: Duration = Duration::from_millis(2);
/// Of more pieces, to take them over would take too many stops.
const PIECES: usize = 512;
/// Pages in more runs than this are protected by a look at all.
const SETTLED: usize = 512;
/// So much of what has come since, bytes, is worth a stop to follow it.
pub(crate) const WORTH_A_STOP: u64 = 1 << 20;
/// Written pages this close to each other are looked at together, bytes: a look at so much takes as long as one more call.
const NEAR: u64 = 256 * PAGE;

/// Follows the writes of one address space. When it is dropped, nothing of it stays behind.
#[derive(Debug)]
pub struct Tracking {
    userfault: Userfault,
    /// None before the first checkpoint, and after one that failed.
    pub(crate) base: Option<Base>,
    /// Spans that were followed at the last look, ascending.
    followed: Vec<Range>,
    /// Those of them that have begun to be followed since: pages there may have marks of an earlier time.
    fresh: Vec<Range>,
    /// Spans that could not be registered when that was tried last: no reason to stop the program again.
    hopeless: Vec<Range>,
    /// Those of them that were taken for memory in which pages of zeros need not be kept. While the program runs, something else
    /// may take their place before they are looked at.
    zeros_omitted: Vec<Range>,
    /// What that look found, piece by piece, ascending.
    seen: Vec<Seen>,
    /// Some of it is followed by those who load it, until it is taken over.
    pub(crate) loading: Option<Loading>,
    /// All of it is followed by those who page it, and by nobody else: what is marked is theirs.
    is_paged: bool,
    /// Written, and not found by any look yet, because the marks that tell have gone.
    owed: Vec<Range>,
    /// For so many checkpoints, what a paged program has written since the last one is left to the cut: it writes faster than can be
    /// copied.
    pub(crate) outpaced: u32,
}

/// What came of beginning to follow a span.
struct Claimed {
    /// What we follow that we did not.
    ours: Vec<Range>,
    /// Nothing of it could not be registered.
    is_whole: bool,
}

/// What a look leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The program runs. All pages that are followed are protected again, so that each write is found by this look or by the next. Nothing
    /// else begins to be followed (see [`Tracking::enroll`]): it is dirty.
    Ahead,
    /// As [`Look::Ahead`] of a program that stands still: what is not followed is from here on.
    Protect,
    /// The program stands still, and what was written may stay as it is: the next look finds it once more. Among what is
    /// told to be own and dirty may be pages that were dropped since the last look, which read as zeros, or not at all.
    AtRest,
}

/// A look under way.
#[derive(Debug)]
pub(crate) struct Looking {
    /// What is looked at.
    pub spans: Vec<Span>,
    /// In pieces, the next one to be taken, and what was found so far.
    pieces: Vec<Span>,
    look: Look,
    next: AtomicUsize,
    seen: Mutex<Vec<Seen>>,
}

impl Looking {
    /// How much is looked at.
    pub fn bytes(&self) -> u64 {
        self.spans.iter().map(|s| s.range.len).sum()
    }
}

/// What a look at a piece of a span found.
#[derive(Debug)]
struct Seen {
    piece: Range,
    /// All of it is followed: what has changed since counts as written.
    followed: bool,
    own: Vec<Range>,
    dirty: Vec<Range>,
    /// What was written or dropped, or is a guard, and is no own page, if only such pages were looked at.
    rest: Option<Vec<Range>>,
}

impl Seen {
    /// Own pages in `runs`; with `known` false, all of them are dirty.
    fn all(piece: &Span, known: bool, runs: &[Run]) -> Self {
        let mut seen =
            Seen { piece: piece.range, followed: known, own: Vec::new(), dirty: Vec::new(), rest: None };
        for run in runs {
            push(&mut seen.own, range(run));
            if !(known && is_clean(run.categories, piece)) {
                push(&mut seen.dirty, range(run));
            }
        }
        seen
    }
}

/// What a look at the private memory found.
#[derive(Debug, Default)]
pub struct Found {
    /// Own pages, ascending.
    pub own: Vec<Range>,
    /// Those of them that no checkpoint has yet, and whether zeros matter there.
    pub dirty: Vec<(Range, bool)>,
    /// Where guard regions may be, ascending: they count as written, and nobody protects them.
    pub guards: Vec<Range>,
}

impl Tracking {
    /// Begins to follow a process, for which all of it stands still for a moment.
    pub(crate) fn start(running: &mut Running<'_>, loading: Option<Loading>) -> Result<Self> {
        let (tracking, pause) = Self::open(running.target, running.earlier, loading)?;
        running.log.pauses.push(pause);
        Ok(tracking)
    }

    /// Begins to follow a process that nobody loads; tells for how long it stood still.
    ///
    /// # Errors
    /// That this kernel does not follow writes, or somebody else follows those of this process.
    pub fn begin_with(target: &Target, earlier: &mut Earlier) -> Result<(Self, Duration)> {
        Self::open(target, earlier, None)
    }

    /// As [`Tracking::start`]; tells for how long it stood still.
    pub(crate) fn open(
        target: &Target,
        earlier: &mut Earlier,
        mut loading: Option<Loading>,
    ) -> Result<(Self, Duration)> {
        // Those who page it stop it all the time, until they are asked.
        loading.iter_mut().filter(|loading| loading.is_paged()).try_for_each(Loading::ask)?;
        let open = |frozen: &mut Frozen| {
            let mut tracking = Tracking {
                userfault: open_inside(target, frozen, Mode::Noted)?,
                base: None,
                followed: Vec::new(),
                fresh: Vec::new(),
                hopeless: Vec::new(),
                zeros_omitted: Vec::new(),
                seen: Vec::new(),
                is_paged: loading.as_ref().is_some_and(Loading::is_paged),
                loading,
                owed: Vec::new(),
                outpaced: 0,
            };
            tracking.enroll_now(target)?;
            Ok(tracking)
        };
        stop_briefly(target, earlier, open).map_err(|e| ours::name_follower(e, target.pid))
    }

    /// Begins to follow what private memory has come since, if there is much in it; tells for how long the program stood still.
    ///
    /// That takes a stop. A mapping may grow between the moment at which it is listed and that at which it is registered: it would be
    /// registered in part, which makes two of it for the kernel, and the program could not move, grow or shrink it as one (`mremap(2)`:
    /// `EFAULT`). So mappings are listed and registered within one stop, or at the cut; what is neither counts as written.
    ///
    /// # Errors
    /// As [`Tracking::look`].
    pub(crate) fn enroll(&mut self, target: &Target, earlier: &mut Earlier) -> Result<Option<Duration>> {
        let spans = spans_of_maps(&target.process.maps()?);
        // Where something else has been mapped since, at the same place, nothing is followed any more.
        let lost: Vec<Range> =
            self.seen.iter().filter(|seen| !seen.followed).map(|seen| seen.piece).collect();
        let mut still = Vec::with_capacity(self.followed.len());
        for range in std::mem::take(&mut self.followed) {
            let is_doubtful = range.parts_of(&lost).next().is_some() && !self.hopeless.contains(&range);
            if !is_doubtful || target.pagemap.is_followed(RemoteAddr(range.start), RemoteAddr(range.end()))? {
                still.push(range);
            }
        }
        self.followed = still;
        let known = Range::joined([&self.followed[..], &self.hopeless].concat());
        if there_beside(target, &spans, &known)? < WORTH_A_STOP {
            return Ok(None);
        }
        let enrolled = stop_briefly(target, earlier, |_| self.enroll_now(target));
        let ((), pause) = enrolled.map_err(|e| ours::name_follower(e, target.pid))?;
        Ok(Some(pause))
    }

    /// Follows all private memory. The program stands still.
    fn enroll_now(&mut self, target: &Target) -> Result<()> {
        let spans = spans_of_maps(&target.process.maps()?);
        let before = std::mem::take(&mut self.followed);
        self.hopeless.clear();
        for span in &spans {
            match self.claim(target, span, &before) {
                Ok(Claimed { ours, is_whole }) => {
                    self.fresh.extend(ours);
                    self.followed.push(span.range);
                    self.hopeless.extend((!is_whole).then_some(span.range));
                }
                Err(e) => {
                    // What somebody else follows is not ours to release.
                    self.followed = before;
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Follows by itself what those follow who have loaded it, piece by piece, in a brief stop each: the marks of what was
    /// not written go when they let go, and are made again before the program runs on. Then they can leave.
    pub(crate) fn take_over(&mut self, target: &Target, earlier: &mut Earlier) -> Result<()> {
        let Some(mut loading) = self.loading.take() else { return Ok(()) };
        if !loading.is_complete()? {
            return Err(Error::Loading);
        }
        if loading.pieces() > PIECES {
            return Err(Error::Failed("its memory lies in too many pieces".into()));
        }
        let (mut at, mut followed) = (Some(0), Vec::new());
        while let Some(from) = at {
            // Nobody has asked for a checkpoint: the program may as well be spared for a moment.
            for _ in 0..TRIES {
                if !would_be_noticed(&target.process) {
                    break;
                }
                std::thread::sleep(TRY);
            }
            let part = |_: &mut Frozen| self.take_over_parts(target, &mut loading, from, &mut followed);
            (at, _) = stop_briefly(target, earlier, part)?;
        }
        self.followed = replaced(&self.followed, &followed, followed.clone());
        self.seen = Vec::new();
        loading.taken();
        Ok(())
    }

    /// Takes over some of it from an address on; tells where to go on. The program stands still.
    fn take_over_parts(
        &mut self,
        target: &Target,
        loading: &mut Loading,
        from: u64,
        followed: &mut Vec<Range>,
    ) -> Result<Option<u64>> {
        // What has been moved about meanwhile is not where its marks say that it is as it was.
        let maps = target.process.maps()?;
        let mappings = maps.iter().map(|vma| Range { start: vma.start, len: vma.end - vma.start });
        let reach = |range, most| reach(&target.pagemap, range, most);
        let (parts, moved) = loading.next_parts(from, mappings, (TAKEN, reach), TOGETHER)?;
        self.owed.extend(moved);
        for &part in &parts {
            let (start, end) = (RemoteAddr(part.start), RemoteAddr(part.end()));
            let any = Category::PRESENT | Category::SWAPPED;
            let query =
                Query { any, all: Category::WRITTEN, none: Category::ZERO, report: Category::empty() };
            let mut written = Vec::new();
            target.pagemap.scan(start, end, query, &mut written)?;
            // Where it has been unmapped, what is there now is followed like anything new.
            if !loading.let_go(part)? || self.userfault.register(start, end).is_err() {
                continue;
            }
            self.owed.extend(written.iter().map(range));
            let all = Query { any, ..Query::default() };
            if target.pagemap.scan_and_protect(start, end, all, &mut Vec::new())? {
                push(followed, part);
            }
        }
        Ok(parts.last().map(Range::end))
    }

    /// Looks at all private memory; what was written since the last look, or has not been followed before, is dirty.
    /// `spans` tells where that is, for those who load it are asked first: what they tell to have been moved must be there.
    ///
    /// # Errors
    /// That somebody else follows its writes, or it has become another program.
    pub fn look(
        &mut self,
        target: &Target,
        spans: impl FnOnce() -> Result<Vec<Span>>,
        look: Look,
    ) -> Result<Found> {
        self.ask()?;
        let looking = self.begin(target, spans()?, look)?;
        let helpers = match looking.bytes() {
            0..WORTH_HELPERS => 0,
            _ => host::processors() - 1,
        };
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(|| self.work(target, &looking))).collect();
            let done = self.work(target, &looking);
            helpers.into_iter().fold(done, |done, helper| done.and(joined_with(helper.join())))
        })?;
        Ok(self.end(looking))
    }

    /// Takes it that pages are as they are to be, in a program at rest, of which all that was written since the last look is among these
    /// (ascending), or was dropped: from here on only what is written after this counts. `spans` as in [`Tracking::look`].
    ///
    /// # Errors
    /// As [`Tracking::look`].
    pub fn settle(
        &mut self,
        target: &Target,
        spans: impl FnOnce() -> Result<Vec<Span>>,
        pages: &[Range],
    ) -> Result<()> {
        let spans = spans()?;
        let is_same = self.followed.iter().copied().eq(spans.iter().map(|s| s.range));
        if !is_same || self.loading.is_some() || pages.len() > SETTLED {
            return self.look(target, || Ok(spans), Look::Protect).map(drop);
        }
        let all: Vec<Span> = groups(&spans).iter().flat_map(pieces).collect();
        let mut seen = std::mem::take(&mut self.seen);
        for piece in &mut seen {
            let windows: Vec<Range> = piece.piece.parts_of(pages).collect();
            let place = all.binary_search_by_key(&piece.piece.start, |span| span.range.start);
            let span = place.ok().map(|place| &all[place]);
            let span = span.filter(|span| piece.followed && span.range == piece.piece);
            let Some(span) = span else { continue };
            let mut now = Vec::new();
            for range in &windows {
                let (known, runs) = self.scan(target, &Span { range: *range, ..*span }, Look::Protect)?;
                // It was not what it was taken for: at the next look all counts as written.
                piece.followed &= known;
                now.extend(runs.iter().map(self::range));
            }
            piece.own = replaced(&piece.own, &windows, now);
        }
        self.seen = seen;
        Ok(())
    }

    /// What was written since the last look, and is still there, besides what is `known`. It counts as written at the next one,
    /// too.
    pub(crate) fn written_beside(&self, pagemap: &Pagemap, known: &[Range]) -> Result<Vec<Range>> {
        let any = Category::PRESENT | Category::SWAPPED;
        let all = Category::WRITTEN | Category::WP_ALLOWED;
        let query = Query { any, all, none: Category::ZERO, report: Category::empty() };
        let mut runs = Vec::new();
        for range in &self.followed {
            pagemap.scan(RemoteAddr(range.start), RemoteAddr(range.end()), query, &mut runs)?;
        }
        let mut written = Vec::new();
        runs.iter().for_each(|run| push(&mut written, range(run)));
        Ok(replaced(&written, known, Vec::new()))
    }

    /// The marks of what was written in a range have gone.
    pub fn owe(&mut self, range: Range) {
        self.owed.push(range);
    }

    /// Asks those who load it what has happened to its memory, before it is looked where that is.
    pub(crate) fn ask(&mut self) -> Result<()> {
        self.loading.as_mut().map_or(Ok(()), Loading::ask)
    }

    /// Begins a [`Tracking::look`], which is over when [`Tracking::work`] has returned in all threads that called it.
    pub(crate) fn begin(&mut self, target: &Target, spans: Vec<Span>, look: Look) -> Result<Looking> {
        let before = std::mem::take(&mut self.followed);
        for kept in spans.iter().filter(|s| s.zeros_matter) {
            self.owed.extend(kept.range.parts_of(&self.zeros_omitted));
        }
        self.zeros_omitted = spans.iter().filter(|s| !s.zeros_matter).map(|s| s.range).collect();
        for span in &spans {
            let known = before.binary_search_by_key(&span.range.start, |r| r.start);
            if known.is_ok_and(|i| before[i] == span.range) {
                self.followed.push(span.range);
            } else if look == Look::Ahead {
                // Of one that has grown, or was parted, what was followed is so still.
                self.followed.extend(span.range.parts_of(&before));
            } else {
                match self.claim(target, span, &before) {
                    Ok(claimed) => {
                        self.fresh.extend(claimed.ours);
                        self.followed.push(span.range);
                    }
                    Err(e) => {
                        // What somebody else follows is not ours to release.
                        self.followed = before;
                        return Err(e);
                    }
                }
            }
        }
        while let Some(fresh) = self.fresh.last() {
            self.unmark(target, RemoteAddr(fresh.start), RemoteAddr(fresh.end()))?;
            self.fresh.pop();
        }
        let pieces = groups(&spans).iter().flat_map(pieces).collect();
        Ok(Looking { spans, pieces, look, next: AtomicUsize::new(0), seen: Mutex::default() })
    }

    /// Looks at one piece after the other, beside whoever else does.
    pub(crate) fn work(&self, target: &Target, looking: &Looking) -> Result<()> {
        while let Some(piece) = looking.pieces.get(looking.next.fetch_add(1, Ordering::Relaxed)) {
            let seen = self.see(target, piece, &looking.spans, looking.look)?;
            looking.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
        }
        Ok(())
    }

    /// What a look found that is over.
    pub(crate) fn end(&mut self, looking: Looking) -> Found {
        let mut seen = looking.seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        seen.sort_by_key(|seen| seen.piece.start);
        let mut found = Found::default();
        // Whoever followed it before may have looked, which takes marks away, and saved nothing.
        let is_trusted = self.loading.as_ref().is_none_or(Loading::is_trusted);
        // Of what is paged out a mark is there, which says that it is as it is stored.
        let out = self.loading.as_ref().map(Loading::paged_out).unwrap_or_default();
        for (span, seen) in looking.pieces.iter().zip(&seen) {
            seen.own.iter().for_each(|own| push(&mut found.own, *own));
            found.dirty.extend(seen.dirty.iter().map(|dirty| (*dirty, span.zeros_matter)));
            if !is_trusted {
                let here = Range::without(&seen.own, &out);
                found.dirty.extend(here.into_iter().map(|dirty| (dirty, span.zeros_matter)));
            }
            for owed in &self.owed {
                let there = within(&seen.own, owed.start, owed.start.saturating_add(owed.len));
                let there = Range::without(&there, &out);
                found.dirty.extend(there.into_iter().map(|range| (range, span.zeros_matter)));
            }
        }
        let mut from = 0;
        for (seen, rest) in seen.iter().filter_map(|seen| Some((seen, seen.rest.as_ref()?))) {
            found.guards.push(Range { start: from, len: seen.piece.start - from });
            found.guards.extend(rest);
            from = seen.piece.end();
        }
        found.guards.push(Range { start: from, len: u64::MAX - from });
        self.seen = seen;
        self.owed.clear();
        if let Some(loading) = &mut self.loading {
            loading.amend(&mut found);
        }
        found
    }

    /// Looks at a piece of one or several spans, at what was written only if that tells all.
    fn see(&self, target: &Target, piece: &Span, spans: &[Span], look: Look) -> Result<Seen> {
        let before = self.seen.binary_search_by_key(&piece.range.start, |s| s.piece.start);
        let before = before.ok().map(|i| &self.seen[i]).filter(|s| s.piece == piece.range && s.followed);
        // What is loaded comes without being written.
        let before = before.filter(|_| self.loading.is_none());
        let few = before.filter(|s| s.own.len() <= FEW && bytes(&s.own) >= MANY);
        // Behind a file what is dropped leaves the mark of what was not written.
        let tells_all = piece.swapped_is_clean && what_is_missing_counts_as_written();
        if let Some(before) = few.filter(|_| tells_all)
            && let Some(seen) = self.glance(target, piece, before, look)?
        {
            return Ok(seen);
        }
        let first = spans.partition_point(|s| s.range.end() <= piece.range.start);
        let inside = &spans[first..spans.partition_point(|s| s.range.start < piece.range.end())];
        let (start, end) = (RemoteAddr(piece.range.start), RemoteAddr(piece.range.end()));
        if inside.len() > 1 && !target.pagemap.is_followed(start, end)? {
            // One that cannot be followed is no reason to save the others.
            let mut seen =
                Seen { piece: piece.range, followed: false, own: Vec::new(), dirty: Vec::new(), rest: None };
            for span in inside {
                let start = span.range.start.max(piece.range.start);
                let range = Range { start, len: span.range.end().min(piece.range.end()) - start };
                let (known, runs) = self.scan(target, &Span { range, ..*span }, look)?;
                let part = Seen::all(span, known, &runs);
                seen.own.extend(part.own);
                seen.dirty.extend(part.dirty);
            }
            return Ok(seen);
        }
        let (known, runs) = self.scan(target, piece, look)?;
        Ok(Seen::all(piece, known, &runs))
    }

    /// Looks at what was written or dropped since the look `before`; `None`, and nothing was done, if it takes more than
    /// that.
    fn glance(&self, target: &Target, piece: &Span, before: &Seen, look: Look) -> Result<Option<Seen>> {
        let (start, end) = (RemoteAddr(piece.range.start), RemoteAddr(piece.range.end()));
        let query = Query { all: Category::WRITTEN, report: Category::WRITTEN, ..Query::default() };
        let mut written = Vec::new();
        if !target.pagemap.scan_followed(start, end, query, &mut written)? {
            return Ok(None);
        }
        let written: Vec<Range> = written.iter().map(range).collect();
        let windows = match look {
            Look::Ahead | Look::Protect => joined(written.iter().copied(), NEAR),
            // Of what was the program's own before, there is nothing more to ask.
            Look::AtRest => joined(replaced(&written, &before.own, Vec::new()).into_iter(), NEAR),
        };
        if windows.len() > FEW {
            return Ok(None);
        }
        let rest = replaced(&written, &windows, Vec::new());
        let mut seen = Seen { piece: piece.range, followed: true, own: Vec::new(), dirty: rest, rest: None };
        let mut now = Vec::new();
        for part in &windows {
            let (known, runs) = self.scan(target, &Span { range: *part, ..*piece }, look)?;
            if !known {
                // It was replaced meanwhile, and what was found before is protected already.
                let (_, runs) = self.scan(target, piece, look)?;
                return Ok(Some(Seen::all(piece, false, &runs)));
            }
            let part = Seen::all(piece, true, &runs);
            now.extend(part.own);
            seen.dirty.extend(part.dirty);
        }
        seen.own = replaced(&before.own, &windows, now);
        seen.dirty.sort_unstable_by_key(|r| r.start);
        seen.rest = Some(Range::without(&written, &seen.own));
        Ok(Some(seen))
    }

    /// Begins to follow a span of a program that stands still, `before` being what was followed at the last look; tells what we follow
    /// that we did not. Where somebody else follows the process, it would look as if we did, what they have seen would count as
    /// unwritten, and what we see would be hidden from them.
    fn claim(&self, target: &Target, span: &Span, before: &[Range]) -> Result<Claimed> {
        let Range { start, .. } = span.range;
        let new = match target.pagemap.is_followed(RemoteAddr(start), RemoteAddr(span.range.end()))? {
            // A mapping that has grown is followed where it is new, too.
            true => Range::without(&[span.range], before),
            false => vec![span.range],
        };
        let (mut ours, mut is_whole) = (Vec::with_capacity(new.len()), true);
        for part in new {
            match self.register(RemoteAddr(part.start), RemoteAddr(part.end())) {
                Ok(()) => ours.push(part),
                // By those who load it: their marks serve us as well, and are theirs to take away.
                Err(Error::Kernel(e)) if e.errno() == Some(libc::EBUSY) && self.loading.is_some() => {}
                Err(e) if ours::is_followed(&e) => return Err(e),
                // Whether it can be followed shows when it is looked at.
                Err(_) => is_whole = false,
            }
        }
        Ok(Claimed { ours, is_whole })
    }

    fn register(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        if self.loading.as_ref().is_some_and(Loading::is_paged) {
            // They follow all of it, and could not take out what we do.
            return Err(Error::Failed("those who page its memory do not follow it yet".into()));
        }
        Ok(self.userfault.register(start, end)?)
    }

    /// Follows a range of a program that stands still; all that is there counts as written.
    fn follow(&self, target: &Target, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        self.register(start, end)?;
        self.unmark(target, start, end)
    }

    /// Takes marks of an earlier time away from what has just begun to be followed. A mapping ceases to be followed when another one is
    /// moved next to it and the kernel makes one of the two (`mremap(2)`). Its pages keep the marks of what was not written, and would
    /// be written unnoticed.
    fn unmark(&self, target: &Target, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        let mut marked = Vec::new();
        let query = Query { any: Category::PRESENT | Category::SWAPPED, ..Query::none_of(Category::WRITTEN) };
        target.pagemap.scan(start, end, query, &mut marked)?;
        for run in marked {
            match self.userfault.release(RemoteAddr(run.start), RemoteAddr(run.end)) {
                // It has been unmapped, moved or parted since: what is there now is not what was registered.
                Err(e) if matches!(e.errno(), Some(libc::ENOENT | libc::EAGAIN | libc::EINVAL)) => {}
                released => released?,
            }
        }
        Ok(())
    }

    /// Runs of own pages of a span. With false, all of them are dirty, whatever their categories: because they have not
    /// been followed, or because the look failed half-way (a part of the span has been replaced since it was listed)
    /// and what it had found by then is lost.
    fn scan(&self, target: &Target, span: &Span, look: Look) -> Result<(bool, Vec<Run>)> {
        let report = Category::WP_ALLOWED | Category::WRITTEN | Category::SWAPPED;
        let query = Query { report, ..span.query() };
        let (start, end) = (RemoteAddr(span.range.start), RemoteAddr(span.range.end()));
        let mut runs = Vec::new();
        if target.pagemap.scan_and_protect(start, end, query, &mut runs)? {
            return Ok((true, runs));
        }
        runs.clear();
        // Of a running program it may be another mapping by now, which must not be registered in part. Whether there is such a program
        // any more is told by what does nothing where it is not followed.
        let begin = || match look {
            Look::Ahead => {
                self.userfault.release(start, RemoteAddr(start.0 + PAGE))?;
                Err(Error::Failed("it is not followed".into()))
            }
            Look::Protect | Look::AtRest => self.follow(target, start, end),
        };
        match begin() {
            Ok(()) if target.pagemap.scan_and_protect(start, end, query, &mut runs)? => {
                return Ok((false, runs));
            }
            Err(Error::Kernel(e)) if e.errno() == Some(libc::ESRCH) => {
                return Err(Error::Failed("the program has replaced itself".into()));
            }
            // It is gone, or of a kind that cannot be followed.
            _ => {}
        }
        runs.clear();
        target.pagemap.scan(start, end, query, &mut runs)?;
        Ok((false, runs))
    }
}

/// What a helper did, which may have been to panic.
pub(crate) fn joined_with(helper: std::thread::Result<Result<()>>) -> Result<()> {
    helper.unwrap_or_else(|_| Err(Error::Failed("looking at memory failed inside stillpoint".into())))
}

/// How much is in spans beside what is known, bytes.
pub(crate) fn there_beside(target: &Target, spans: &[Span], known: &[Range]) -> Result<u64> {
    let mut there = 0;
    for span in spans {
        for new in Range::without(&[span.range], known) {
            let mut runs = Vec::new();
            let (start, end) = (RemoteAddr(new.start), RemoteAddr(new.end()));
            target.pagemap.scan(start, end, span.query(), &mut runs)?;
            there += runs.iter().map(|run| run.end - run.start).sum::<u64>();
        }
    }
    Ok(there)
}

/// Spans of the same kind that touch, as one: a look takes as long as many pages, and the stacks of threads lie side by
/// side, each with its guard.
fn groups(spans: &[Span]) -> Vec<Span> {
    let mut groups: Vec<Span> = Vec::new();
    for span in spans {
        let kind = |s: &Span| (s.zeros_matter, s.swapped_is_clean);
        match groups.last_mut() {
            Some(last) if last.range.end() == span.range.start && kind(last) == kind(span) => {
                last.range.len += span.range.len;
            }
            _ => groups.push(*span),
        }
    }
    groups
}

/// A span in pieces that one thread looks at, so that one large mapping is work for several. (A reservation of
/// terabytes, in which there is nothing to see, is not cut into thousands.)
fn pieces(span: &Span) -> impl Iterator<Item = Span> {
    let span = *span;
    let most = LOOK.max((span.range.len / 16).next_multiple_of(LOOK));
    in_steps(span.range, most).map(move |range| Span { range, ..span })
}

/// A range in parts of at most so many bytes.
fn in_steps(range: Range, most: u64) -> impl Iterator<Item = Range> {
    let starts = (range.start..range.end()).step_by(most as usize);
    starts.map(move |start| Range { start, len: most.min(range.end() - start) })
}

fn bytes(ranges: &[Range]) -> u64 {
    ranges.iter().map(|r| r.len).sum()
}

/// Ascending ranges, as one where the gap between two is less than `near` bytes.
fn joined(ranges: impl Iterator<Item = Range>, near: u64) -> Vec<Range> {
    let mut all: Vec<Range> = Vec::new();
    for next in ranges {
        match all.last_mut() {
            Some(last) if next.start - last.end() < near => last.len = next.end() - last.start,
            _ => all.push(next),
        }
    }
    all
}

/// Ranges of which the parts inside of `windows` are replaced by `now`, which lie there. All are ascending.
fn replaced(before: &[Range], windows: &[Range], now: Vec<Range>) -> Vec<Range> {
    let mut all = now;
    let mut ahead = windows.iter().peekable();
    for own in before {
        let mut start = own.start;
        while ahead.next_if(|w| w.end() <= start).is_some() {}
        let mut touching = ahead.clone();
        while start < own.end() {
            let window = touching.next().filter(|w| w.start < own.end());
            let end = window.map_or(own.end(), |w| w.start);
            if end > start {
                all.push(Range { start, len: end - start });
            }
            start = window.map_or(own.end(), |w| w.end());
        }
    }
    all.sort_unstable_by_key(|r| r.start);
    let mut joined = Vec::with_capacity(all.len());
    all.into_iter().for_each(|r| push(&mut joined, r));
    joined
}

/// Whether pages of these categories are as they were when they were last protected.
fn is_clean(categories: Category, span: &Span) -> bool {
    categories.contains(Category::WP_ALLOWED)
        && !categories.contains(Category::WRITTEN)
        && (span.swapped_is_clean || !categories.contains(Category::SWAPPED))
}

/// How far from the start of a range so many bytes of what is mapped in go, and how many there are in that: of what a sanitizer reserves
/// (some 15 TiB) hardly any is. Looks no further ahead than it has come.
fn reach(pagemap: &Pagemap, range: Range, most: u64) -> Result<(u64, u64)> {
    let query = Query { any: Category::PRESENT | Category::SWAPPED, ..Query::default() };
    let (mut len, mut there, mut window) = (0, 0, most);
    while len < range.len {
        let (from, to) = (range.start + len, range.start + (len + window).min(range.len));
        let mut runs = Vec::new();
        pagemap.scan(RemoteAddr(from), RemoteAddr(to), query, &mut runs)?;
        for run in runs.iter().map(self::range) {
            if there + run.len >= most {
                return Ok((run.start + (most - there) - range.start, most));
            }
            there += run.len;
        }
        len = to - range.start;
        window = len;
    }
    Ok((range.len, there))
}

/// Appends a range, joined to the last one where it continues that.
fn push(ranges: &mut Vec<Range>, next: Range) {
    match ranges.last_mut() {
        Some(last) if last.end() == next.start => last.len += next.len,
        _ => ranges.push(next),
    }
}

impl Drop for Tracking {
    fn drop(&mut self) {
        if self.is_paged {
            return;
        }
        // Closing the descriptor would release everything in one step, with the program's page faults waiting.
        for range in &self.followed {
            self.userfault.release_gently(RemoteAddr(range.start), RemoteAddr(range.end()));
        }
    }
}

/// Makes a userfaultfd inside a frozen program, takes it out, and closes it there.
///
/// 1. All threads stand still, so the descriptor gets the lowest free number, and nobody sees it.
/// 2. Should we die before it is closed, the thread closes it on its way home.
pub(crate) fn open_inside(target: &Target, frozen: &mut Frozen, mode: Mode) -> Result<Userfault> {
    let number = lowest_free(&fdinfo::list(target.pid)?);
    // A program without CAP_SYS_PTRACE may only make one that does not stop the kernel itself. Where writes are only
    // noted, nothing stops anyway.
    let user_mode_only = if matches!(mode, Mode::Noted | Mode::Told) { 1 } else { 0 };
    let open = |flags: u64| (libc::SYS_userfaultfd, [userfault::OPEN_FLAGS | flags, 0, 0, 0, 0, 0]);
    let close = (libc::SYS_close, [number, 0, 0, 0, 0, 0]);
    let lender =
        Lender { process: &target.process, memory: &target.memory, gadgets: target.gadgets, lowest: None };
    let (nr, arguments) = open(user_mode_only);
    lender.main_thread(frozen, &[(nr, arguments), close], |_, visit| {
        let fd = visit.call_with_undo(nr, arguments, close)?;
        if fd == -i64::from(libc::EMFILE) {
            return Err(Error::Incapable(Refusal {
                what: attributes::target::named(target.pid),
                why: "it has as many descriptors open as it may have (RLIMIT_NOFILE), and one more is needed for a moment".into(),
                hint: "raise its limit: prlimit --nofile".into(),
            }));
        }
        if fd < 0 {
            let why = std::io::Error::from_raw_os_error(-fd as i32);
            return Err(Error::Failed(format!("no userfaultfd can be made in it: {why}")));
        }
        let taken = duplicate_from(target.pidfd.as_fd(), fd as u32);
        visit.call(libc::SYS_close, [fd as u64, 0, 0, 0, 0, 0])?;
        Ok(Userfault::new(taken?, target.pid, mode)?)
    })
}

/// Lowest number that is not in use, of numbers in ascending order.
fn lowest_free(used: &[u32]) -> u64 {
    let in_order = used.iter().zip(0..).take_while(|&(&fd, n)| fd == n);
    in_order.count() as u64
}

/// Whether a process holds a descriptor by which devices write into its memory without a page fault (`O_DIRECT`). What
/// such a transfer writes after its page was protected is not noted; it does not outlast a freeze, which waits for
/// threads in such calls.
///
/// The same goes for memory files of `/proc`: a write there looks a page up, and copies into it when it may be protected
/// again. (So does `process_vm_writev(2)` into the program's own memory, but of that there is nothing to see.)
pub(crate) fn writes_unnoticed(pid: u32) -> Result<bool> {
    let is_direct =
        |folders: &Folders, fd| folders.read(fd).is_ok_and(|info| info.flags & libc::O_DIRECT as u32 != 0);
    // What has no path is not for such transfers, and whoever reads the fdinfo of what the program closes meanwhile keeps it
    // open for as long.
    any_descriptor(pid, |folders, fd, link| {
        is_memory(link) || link.starts_with(b"/") && is_direct(folders, fd)
    })
}

/// Whether a process holds a descriptor of some process's memory.
pub(crate) fn writes_through_proc(pid: u32) -> Result<bool> {
    any_descriptor(pid, |_, _, link| is_memory(link))
}

fn any_descriptor(pid: u32, is_it: impl Fn(&Folders, u32, &[u8]) -> bool) -> Result<bool> {
    let folders = Folders::open(pid)?;
    // One that is closed meanwhile has no link: nothing goes on there.
    let is_it = |fd: &u32| folders.link(*fd).is_ok_and(|link| is_it(&folders, *fd, &link));
    Ok(folders.list()?.iter().any(is_it))
}

fn is_memory(link: &[u8]) -> bool {
    link.starts_with(b"/proc/") && link.ends_with(b"/mem")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges(pages: &[bool]) -> Vec<Range> {
        let mut all = Vec::new();
        let set = (0..).zip(pages).filter(|(_, set)| **set);
        set.for_each(|(page, _)| push(&mut all, Range { start: page * PAGE, len: PAGE }));
        all
    }

    fn holds(ranges: &[Range], page: usize) -> bool {
        ranges.iter().any(|r| r.start <= page as u64 * PAGE && (page as u64) * PAGE < r.end())
    }

    proptest! {
        /// Against a bit for each page.
        #[test]
        fn what_changed_is_replaced(
            before in prop::collection::vec(any::<bool>(), 40),
            written in prop::collection::vec(any::<bool>(), 40),
            after in prop::collection::vec(any::<bool>(), 40),
            near in 0u64..5,
        ) {
            let windows = joined(ranges(&written).into_iter(), near * PAGE);
            prop_assert!((0..40).all(|p| !written[p] || holds(&windows, p)));
            prop_assert!(windows.windows(2).all(|w| w[1].start - w[0].end() >= (near * PAGE).max(1)));
            let now: Vec<bool> = (0..40).map(|p| after[p] && holds(&windows, p)).collect();
            let own = replaced(&ranges(&before), &windows, ranges(&now));
            let expected: Vec<bool> =
                (0..40).map(|p| if holds(&windows, p) { after[p] } else { before[p] }).collect();
            prop_assert_eq!(own, ranges(&expected));
        }
    }
}
