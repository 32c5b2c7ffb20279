//! A program whose memory is still being loaded behind it, or has just been: those who load it follow its writes from
//! its first instruction on.
//!
//! What is missing is in the checkpoint that the program was restored from, and what was not written since it came is as
//! it is there. So a checkpoint can be taken meanwhile that refers to the one for what is missing and is relative to it in
//! all else. When all is there, whoever takes checkpoints follows the program by a descriptor of their own, and those
//! who loaded leave.

use super::tracking::Found;
use crate::regions::within;
use crate::{Error, Result};
use std::time::Duration;
use stillpoint_image::{Codec, Extent, Owner, PAGE, Place, Range};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::line::{Line, Mark, Origin, Piece, State, StoredPage};
use stillpoint_store::Store;

/// Mappings up to this size are taken over whole, bytes: it takes some 12 ms for each GiB.
const WHOLE: u64 = 128 << 20;

/// A claim to such a program.
#[derive(Debug)]
pub(crate) struct Loading {
    line: Line,
    /// The checkpoint (job, number, and when it was taken) that has what is missing; where memory is paged, the job.
    pub source: (String, u64, u64),
    /// The folder of the job that it is paged to: device and inode number.
    paged_to: Option<(u64, u64)>,
    /// Where memory was in that one.
    at_source: Places,
    /// Whether it has been looked at, by us.
    has_looked: bool,
    /// Whether what is not marked as written is as it was at the last look, or in the checkpoint before the first one.
    is_trusted: bool,
    /// When it was asked last.
    now: State,
    /// Where memory has been moved to since the last look.
    moved: Vec<Range>,
    /// Whether some ever has been.
    moves: bool,
    /// What was missing at some look, and has not been referred to since. It may have come by now.
    missing: Vec<Piece>,
    /// Its memory is paged: what is missing or was not written since then is where this tells.
    stored: Option<Vec<StoredPage>>,
    /// What was found to be written since the last checkpoint: that is not as it is stored.
    written: Vec<Range>,
}

/// Where memory was at some time.
#[derive(Clone, Debug)]
enum Places {
    /// Where it was in the checkpoint that the program was restored from.
    AsThen,
    /// Moved about since.
    Moved(Vec<Piece>),
}

impl Places {
    /// Where the parts of a piece of the checkpoint were, and where they are now: address, and the part.
    fn parts(&self, piece: Piece) -> Vec<(u64, Piece)> {
        let Places::Moved(pieces) = self else { return vec![(piece.then, piece)] };
        let mut parts: Vec<(u64, Piece)> = pieces
            .iter()
            .filter_map(|was| {
                let (from, to) = (was.then.max(piece.then), was.then_end().min(piece.then_end()));
                let part = || Piece { then: from, now: piece.now + (from - piece.then), len: to - from };
                (from < to).then(|| (was.now + (from - was.then), part()))
            })
            .collect();
        parts.sort_unstable_by_key(|(_, part)| part.now);
        parts
    }
}

impl Loading {
    /// Claims a process whose memory is being loaded; none if it is not, or if somebody else has claimed it.
    pub fn claim(pid: u32) -> Option<Self> {
        let mut line = Line::call(pid)?;
        let Origin { job, id, claims, is_paged, mark } = line.claim().ok()?;
        let (taken_ns, paged_to) = match mark {
            Mark::TakenAt(ns) => (ns, None),
            Mark::Folder(device, inode) => (0, Some((device, inode))),
        };
        Some(Self {
            line,
            source: (job, id, taken_ns),
            paged_to,
            at_source: Places::AsThen,
            has_looked: false,
            // Whoever claimed it before may have looked, and looking takes the marks away.
            is_trusted: claims == 1,
            now: State::default(),
            moved: Vec::new(),
            moves: false,
            missing: Vec::new(),
            stored: is_paged.then(Vec::new),
            written: Vec::new(),
        })
    }

    /// Whether it will never be all there: those who load it take pages out as well.
    pub fn is_paged(&self) -> bool {
        self.stored.is_some()
    }

    /// Whether what is paged out can be referred to by checkpoints of a job: it is in their own segments.
    pub fn is_paged_to(&self, store: &Store, job: &str) -> bool {
        self.paged_to.is_some_and(|folder| store.place(job).is_ok_and(|place| place == folder))
    }

    /// Whether what is not marked as written is as it is in the source.
    pub fn is_trusted(&self) -> bool {
        self.is_trusted
    }

    /// There is no checkpoint any more that has what was not written.
    pub fn distrust(&mut self) {
        self.is_trusted = false;
    }

    /// Whether nothing is missing any more.
    ///
    /// # Errors
    /// [`Error::Loading`]: those who load cannot be asked, as for all that follows.
    pub fn is_complete(&mut self) -> Result<bool> {
        self.ask().map(|()| self.now.is_complete)
    }

    /// Those who page the program do not stop it, until a checkpoint has been taken or it [`Loading::goes_on`].
    ///
    /// # Errors
    /// [`Error::Busy`]: they do not answer, as when there is no room for what is to leave.
    pub fn rest(&mut self, pid: u32) -> Result<()> {
        let why = || {
            Error::Busy(format!(
                "process {pid} is being paged, and those who do that let nobody else stop it"
            ))
        };
        self.line.rest().map_err(|_| why())
    }

    /// They may stop it again.
    ///
    /// # Errors
    /// [`Error::Loading`]: they cannot be asked.
    pub fn goes_on(&mut self) -> Result<()> {
        self.line.goes_on().map_err(|_| Error::Loading)
    }

    /// Begins a look: asks what is missing. What comes until memory is looked at is found to be there as well, and is the same.
    pub fn ask(&mut self) -> Result<()> {
        if let Some(stored) = &mut self.stored {
            let told = self.line.stored().map_err(|_| Error::Loading)?;
            if told.pages.iter().any(|page| place(page).is_none()) {
                return Err(Error::Failed("those who page its memory say what cannot be understood".into()));
            }
            *stored = told.pages;
            self.moved.extend(told.moved.iter().map(|&(start, len)| Range { start, len }));
            return Ok(());
        }
        self.now = self.line.state().map_err(|_| Error::Loading)?;
        self.moves |= !self.now.moved.is_empty() || self.now.pieces.iter().any(|p| p.then != p.now);
        self.moved.extend(self.now.moved.iter().map(|&(start, len)| Range { start, len }));
        Ok(())
    }

    /// What was paged out when it was asked last, ascending; where pages are out, marks are, which move as pages do.
    pub fn paged_out(&self) -> Vec<Range> {
        let out = self.stored.iter().flatten().filter(|page| page.is_missing);
        Range::joined(out.map(|page| Range { start: page.address, len: PAGE }).collect())
    }

    /// Ends a look: what is missing is the program's own, too, and what has been moved since the last one counts as
    /// written.
    pub fn amend(&mut self, found: &mut Found) {
        let out = self.paged_out();
        for Range { start, len } in self.moved() {
            let inside = Range::without(&within(&found.own, start, start.saturating_add(len)), &out);
            found.dirty.extend(inside.into_iter().map(|range| (range, false)));
        }
        // Some have come since they were told to be missing, and may have been written and saved.
        let missing: Vec<Piece> =
            self.now.missing.iter().flat_map(|missing| without(*missing, &found.own)).collect();
        found.own.extend(missing.iter().map(|p| Range { start: p.now, len: p.len }));
        self.missing.extend(missing);
        if self.stored.is_some() {
            found.own.extend(out);
            self.written.extend(found.dirty.iter().map(|(range, _)| *range));
            self.written = Range::joined(std::mem::take(&mut self.written));
        }
        found.own = Range::joined(std::mem::take(&mut found.own));
        self.has_looked = true;
        self.is_trusted = true;
    }

    /// Where memory has been moved to since the last look.
    fn moved(&mut self) -> Vec<Range> {
        let mut moved = std::mem::take(&mut self.moved);
        if !self.has_looked {
            // Since it was restored: by then nothing was marked as not written but what came from the checkpoint.
            let elsewhere = self.now.pieces.iter().filter(|p| p.then != p.now);
            moved.extend(elsewhere.map(|p| Range { start: p.now, len: p.len }));
        }
        moved
    }

    /// Where the pages are stored that have been missing at looks since this was asked last; `source` is what the source has.
    /// They must be referred to before what those looks found to be written is saved: what comes later is not marked as
    /// written, wherever it has been moved to before.
    pub fn references(&mut self, source: &[Extent], owner: Owner) -> Vec<Extent> {
        if let Some(stored) = &self.stored {
            let extents = stored.iter().filter_map(|page| {
                Some(Extent { owner, address: page.address, pages: 1, place: place(page)? })
            });
            return extents.filter(|extent| !extent.range().overlaps_any(&self.written)).collect();
        }
        let mut references = Vec::new();
        for missing in std::mem::take(&mut self.missing) {
            for (was, part) in self.at_source.parts(missing) {
                let first = source.partition_point(|e| e.end() <= was);
                for extent in source[first..].iter().take_while(|e| e.address < was + part.len) {
                    let (from, to) = (extent.address.max(was), extent.end().min(was + part.len));
                    let part_of = extent.part(from, to);
                    references.push(Extent { address: part.now + (from - was), ..part_of });
                }
            }
        }
        references
    }

    /// A checkpoint has been taken of what the last look found. Returns for how long the program's threads, all together, have waited
    /// for pages that were held back until then.
    pub fn is_saved_in(&mut self, checkpoint: (String, u64, u64)) -> Duration {
        self.source = checkpoint;
        self.at_source = Places::Moved(self.now.pieces.clone());
        if !self.is_paged() {
            return Duration::ZERO;
        }
        let written = std::mem::take(&mut self.written);
        // If they cannot be told they hear that we hang up, and take nothing for stored that may have been written.
        let told = self.line.saved(written.iter().map(|range| (range.start, range.end())));
        told.unwrap_or_default()
    }

    /// In how many pieces it lies.
    pub fn pieces(&self) -> usize {
        self.now.pieces.len()
    }

    /// What to take over next, from an address on: parts of at most `bytes` together, of which `reach` tells how far so many go and
    /// how many there are in that, and at most `count`, but whole
    /// `mappings` (ascending) as long as they are not too large, and always if the program moves its memory about: it could not
    /// move what is followed by two. Tells also where memory has been moved to since the last time. The program stands still.
    ///
    /// # Errors
    /// As [`Loading::ask`].
    pub fn next_parts(
        &mut self,
        from: u64,
        mappings: impl Iterator<Item = Range>,
        (bytes, reach): (u64, impl Fn(Range, u64) -> Result<(u64, u64)>),
        count: usize,
    ) -> Result<(Vec<Range>, Vec<Range>)> {
        self.ask()?;
        let now = self.now.pieces.iter();
        let now = Range::joined(now.map(|p| Range { start: p.now, len: p.len }).collect());
        let whole = if self.moves { u64::MAX } else { WHOLE };
        let (mut parts, mut left) = (Vec::new(), bytes);
        for mapping in mappings.filter(|m| m.end() > from && m.overlaps_any(&now)) {
            let start = mapping.start.max(from);
            let (rest, is_whole) = (mapping.end() - start, mapping.len <= whole);
            if parts.len() == count || left == 0 || is_whole && !parts.is_empty() && rest > left {
                break;
            }
            let (len, there) = match is_whole {
                true => (rest, rest),
                false => reach(Range { start, len: rest }, left)?,
            };
            left = left.saturating_sub(there);
            parts.push(Range { start, len });
        }
        Ok((parts, self.moved()))
    }

    /// Has them no longer follow a range; false if they do not follow all of it.
    pub fn let_go(&mut self, range: Range) -> Result<bool> {
        self.line.let_go(RemoteAddr(range.start), RemoteAddr(range.end())).map_err(|_| Error::Loading)
    }

    /// All of it is followed by us, and they can leave; waits until they have.
    pub fn taken(self) {
        // They notice when we hang up, too.
        let _ = self.line.taken();
    }
}

/// Where a page is stored.
fn place(page: &StoredPage) -> Option<Place> {
    let StoredPage { segment, offset, length, block_pages, skip, codec, crc, .. } = *page;
    let codec = Codec::numbered(codec)?;
    Some(Place::Stored { segment, offset, length, block_pages, skip, codec, crc })
}

/// The parts of a piece that are now outside of `others`, which are ascending.
fn without(piece: Piece, others: &[Range]) -> Vec<Piece> {
    let (mut parts, mut at) = (Vec::new(), piece.now);
    let first = others.partition_point(|o| o.end() <= piece.now);
    for other in others[first..].iter().take_while(|o| o.start < piece.now_end()) {
        parts.extend(piece.within(at, other.start));
        at = other.end();
    }
    parts.extend(piece.within(at, u64::MAX));
    parts
}
