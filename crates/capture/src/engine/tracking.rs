//! What a process has written since its last checkpoint, as the kernel notes it.

use super::Running;
use crate::brief::stop_briefly;
use crate::checkpoint::Target;
use crate::freeze::Frozen;
use crate::lend::Lender;
use crate::regions::{Span, range};
use crate::{Error, Result};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use stillpoint_image::Range;
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::descriptors::duplicate_from;
use stillpoint_linux::fdinfo;
use stillpoint_linux::pagemap::{Category, Query, Run};
use stillpoint_linux::userfault::{self, Mode, Userfault};

/// Memory is released in pieces of this size, bytes, so that the program's own page faults get their turn.
const PIECE: u64 = 4 << 20;

/// At least so much is looked at in one go, bytes.
const LOOK: u64 = 256 << 20;
/// From here on a look is worth several threads, bytes: it takes 0.6 ms for each GiB, a thread 0.05 ms to start.
const WORTH_HELPERS: u64 = 512 << 20;

/// Follows the writes of one address space. When it is dropped, nothing of it stays behind.
#[derive(Debug)]
pub struct Tracking {
    userfault: Userfault,
    /// The checkpoint (job and number) that has every page that was not written since; none before the first, and
    /// after one that failed.
    pub base: Option<(String, u64)>,
    /// Spans that were followed at the last look.
    followed: Vec<Range>,
}

/// What a look at the private memory found.
#[derive(Debug, Default)]
pub struct Found {
    /// Own pages, ascending, and whether zeros matter.
    pub own: Vec<Range>,
    /// Those of them that no checkpoint has yet, and whether zeros matter there.
    pub dirty: Vec<(Range, bool)>,
}

impl Found {
    /// Bytes that are dirty.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty.iter().map(|(r, _)| r.len).sum()
    }
}

impl Tracking {
    /// Begins to follow a process, for which all of it stands still for a moment.
    pub(crate) fn start(running: &mut Running<'_>) -> Result<Self> {
        let open = |frozen: &mut Frozen| open_inside(running.target, frozen, Mode::Noted);
        let (userfault, pause) = stop_briefly(running.target, running.earlier, open)?;
        running.log.pauses.push(pause);
        Ok(Tracking { userfault, base: None, followed: Vec::new() })
    }

    /// Looks at all private memory; what was written since the last look, or has not been followed before, is dirty.
    /// It is protected again in the same step, so that each write is found by this look or by the next.
    pub(crate) fn look(&mut self, target: &Target, spans: &[Span]) -> Result<Found> {
        let before = std::mem::replace(&mut self.followed, spans.iter().map(|s| s.range).collect());
        for span in spans {
            let known = before.binary_search_by_key(&span.range.start, |r| r.start);
            if !known.is_ok_and(|i| before[i] == span.range) {
                self.claim(span)?;
            }
        }
        let pieces: Vec<Span> = spans.iter().flat_map(pieces).collect();
        let total: u64 = spans.iter().map(|s| s.range.len).sum();
        let looks = if total < WORTH_HELPERS {
            pieces.iter().map(|piece| self.scan(target, piece)).collect::<Result<Vec<_>>>()?
        } else {
            self.scan_on_all_processors(target, &pieces)?
        };
        let mut found = Found::default();
        for (span, (known, runs)) in pieces.iter().zip(looks) {
            for run in &runs {
                push(&mut found.own, range(run));
                if !(known && is_clean(run.categories, span)) {
                    found.dirty.push((range(run), span.zeros_matter));
                }
            }
        }
        Ok(found)
    }

    /// As [`Tracking::scan`] of each piece, several at a time.
    fn scan_on_all_processors(&self, target: &Target, pieces: &[Span]) -> Result<Vec<(bool, Vec<Run>)>> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.push((piece.range.start, self.scan(target, piece)?));
            }
            Ok::<_, Error>(done)
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let done = std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..processors).map(|_| scope.spawn(work)).collect();
            let mut done = work()?;
            for helper in helpers {
                done.extend(helper.join().map_err(|_| Error::Failed("looking at memory failed".into()))??);
            }
            Ok::<_, Error>(done)
        });
        let mut done = done?;
        done.sort_by_key(|(start, _)| *start);
        Ok(done.into_iter().map(|(_, look)| look).collect())
    }

    /// Begins to follow a span. Where somebody else follows the process, it would look as if we did, what they have seen
    /// would count as unwritten, and what we see would be hidden from them.
    fn claim(&self, span: &Span) -> Result<()> {
        match self.userfault.register(RemoteAddr(span.range.start), RemoteAddr(span.range.end())) {
            Err(e) if e.errno() == Some(libc::EBUSY) => {
                Err(Error::Failed("somebody else follows what it writes already".into()))
            }
            // Whether it can be followed shows when it is looked at.
            _ => Ok(()),
        }
    }

    /// Runs of own pages of a span. With false, all of them are dirty, whatever their categories: because they have not
    /// been followed, or because the look failed half-way (a part of the span has been replaced since it was listed)
    /// and what it had found by then is lost.
    fn scan(&self, target: &Target, span: &Span) -> Result<(bool, Vec<Run>)> {
        let report = Category::WP_ALLOWED | Category::WRITTEN | Category::SWAPPED;
        let query = Query { report, ..span.query() };
        let (start, end) = (RemoteAddr(span.range.start), RemoteAddr(span.range.end()));
        let mut runs = Vec::new();
        if target.pagemap.scan_and_protect(start, end, query, &mut runs)? {
            return Ok((true, runs));
        }
        runs.clear();
        match self.userfault.register(start, end) {
            Ok(()) if target.pagemap.scan_and_protect(start, end, query, &mut runs)? => {
                return Ok((false, runs));
            }
            Err(e) if e.errno() == Some(libc::ESRCH) => {
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

/// A span in pieces that one thread looks at, so that one large mapping is work for several. (A reservation of
/// terabytes, in which there is nothing to see, is not cut into thousands.)
fn pieces(span: &Span) -> impl Iterator<Item = Span> {
    let span = *span;
    let most = LOOK.max((span.range.len / 16).next_multiple_of(LOOK));
    (span.range.start..span.range.end()).step_by(most as usize).map(move |start| {
        let len = most.min(span.range.end() - start);
        Span { range: Range { start, len }, ..span }
    })
}

/// Whether pages of these categories are as they were when they were last protected.
fn is_clean(categories: Category, span: &Span) -> bool {
    categories.contains(Category::WP_ALLOWED)
        && !categories.contains(Category::WRITTEN)
        && (span.swapped_is_clean || !categories.contains(Category::SWAPPED))
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
        // Closing the descriptor would release everything in one step, with the program's page faults waiting.
        for range in &self.followed {
            let mut at = range.start;
            while at < range.end() {
                let end = (at + PIECE).min(range.end());
                // Fails where the program has unmapped it.
                let _ = self.userfault.release(RemoteAddr(at), RemoteAddr(end));
                at = end;
            }
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
    let user_mode_only = if mode == Mode::Noted { 1 } else { 0 };
    let open = |flags: u64| (libc::SYS_userfaultfd, [userfault::OPEN_FLAGS | flags, 0, 0, 0, 0, 0]);
    let close = (libc::SYS_close, [number, 0, 0, 0, 0, 0]);
    let lender = Lender { process: &target.process, memory: &target.memory, gadgets: target.gadgets };
    let (nr, arguments) = open(user_mode_only);
    lender.main_thread(frozen, &[(nr, arguments), close], |_, visit| {
        let fd = visit.call_with_undo(nr, arguments, close)?;
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
pub(crate) fn writes_unnoticed(pid: u32) -> Result<bool> {
    // One that is closed meanwhile cannot be read: nothing goes on there.
    let direct = |fd: u32| fdinfo::read(pid, fd).is_ok_and(|i| i.flags & libc::O_DIRECT as u32 != 0);
    Ok(fdinfo::list(pid)?.into_iter().any(direct))
}
