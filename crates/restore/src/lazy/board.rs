//! What page servers know, in memory that outlives each of them: one that is killed at any instruction is followed by
//! another, which goes on from here.

use super::placement::{Piece, Placement};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use stillpoint_linux::shared::SharedWords;
use stillpoint_linux::userfault::EVENT_WORDS;

/// Address spaces at a time: that of the program, and of copies that it made of itself.
pub const SPACES: usize = 256;
/// Events that are read at a time.
pub const EVENTS: usize = 64;

/// Words in front of the spaces: counts, handles of the last processes that were made to serve, the text of a failure, the
/// descriptor of each space (one more than its number).
const HEAD: usize = DESCRIPTORS + SPACES;
const PROCESSES: usize = 16;
/// In place of the handle of a process that has ended.
const ENDED: i32 = -1;
const TEXT: usize = 64;
const DESCRIPTORS: usize = 128;
/// Words of a space before its events.
const SPACE_HEAD: usize = 8;

/// Things that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Page servers that were started.
    Servers,
    /// Times that somebody waited for pages of the checkpoint.
    Demands,
    /// Times that somebody waited for pages that are zeros.
    ZeroDemands,
    /// Pages put in because somebody waited, with those beside them.
    Demanded,
    /// Pages put in ahead.
    Ahead,
    /// When the restore began, microseconds on the clock of the page servers.
    BeganUs,
    /// Microseconds until everything was there, since the restore began; 0 before.
    LoadedUs,
    /// Whether what the program wanted first has been told, as far as it was to be.
    Recorded,
    /// How many have claimed the program, to follow it themselves.
    Claims,
    /// Length of the text that tells why loading failed, bytes; 0 if it did not.
    Failure,
    /// Servers that ended by themselves, because of a failure inside.
    Broken,
    /// Processes that were ever made to serve.
    Enlisted,
    /// Whether there is nothing left to do.
    Done,
    /// Whether the program runs.
    Runs,
}

/// The board.
#[derive(Debug)]
pub struct Board {
    words: SharedWords,
    pages: u64,
    /// Most pieces of a placement.
    room: usize,
}

impl Board {
    /// For so many pages in so many mappings.
    pub fn new(pages: u64, mappings: usize) -> Result<Self> {
        let room = (4 * mappings).max(1 << 12);
        let words = SharedWords::new(HEAD + SPACES * words_of_space(pages, room))?;
        Ok(Board { words, pages, room })
    }

    /// Adds to a count.
    pub fn add(&self, count: Count, more: u64) {
        self.words[count as usize].fetch_add(more, Ordering::Relaxed);
    }

    /// A count.
    pub fn get(&self, count: Count) -> u64 {
        self.words[count as usize].load(Ordering::Acquire)
    }

    /// A process takes its place among those who serve, behind all that have: which. `handle` is a descriptor of the table
    /// that they share, a pidfd of it.
    pub fn enlist(&self, handle: i32) -> u64 {
        let number = self.words[Count::Enlisted as usize].fetch_add(1, Ordering::AcqRel);
        self.process(number).store((number + 1) << 32 | handle as u64, Ordering::Release);
        number
    }

    /// The handle of the process with a number, unless it is known to have ended; nothing if that was long ago, or if it has
    /// taken the number in this moment.
    pub fn enlisted(&self, number: u64) -> Option<Option<i32>> {
        let word = self.process(number).load(Ordering::Acquire);
        let handle = Some(word as u32 as i32).filter(|&handle| handle != ENDED);
        (word >> 32 == number + 1).then_some(handle)
    }

    /// The process with a number has ended.
    pub fn discharge(&self, number: u64) {
        self.process(number).store((number + 1) << 32 | u64::from(ENDED as u32), Ordering::Release);
    }

    /// Numbers that were taken so recently that their processes are known.
    pub fn recent(&self) -> Range<u64> {
        let end = self.get(Count::Enlisted);
        end.saturating_sub((TEXT - PROCESSES) as u64)..end
    }

    fn process(&self, number: u64) -> &AtomicU64 {
        &self.words[PROCESSES + number as usize % (TEXT - PROCESSES)]
    }

    /// Notes why loading failed; false if it was noted before.
    pub fn fail(&self, why: &str) -> bool {
        if self.get(Count::Failure) > 0 {
            return false;
        }
        let room = (DESCRIPTORS - TEXT) * 8;
        let why = &why.as_bytes()[..why.len().min(room)];
        for (word, bytes) in self.words[TEXT..DESCRIPTORS].iter().zip(why.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
        }
        self.words[Count::Failure as usize].swap(why.len() as u64, Ordering::AcqRel) == 0
    }

    /// Why loading failed, if it did.
    pub fn failure(&self) -> Option<String> {
        let len = self.get(Count::Failure) as usize;
        let text = self.words[TEXT..DESCRIPTORS].iter();
        let bytes: Vec<u8> = text.flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
        (len > 0).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A space, whether it is in use or not.
    pub fn space(&self, number: usize) -> Space<'_> {
        let len = words_of_space(self.pages, self.room);
        let words = &self.words[HEAD + number * len..HEAD + (number + 1) * len];
        Space { descriptor: &self.words[DESCRIPTORS + number], words, room: self.room }
    }

    /// Numbers of the spaces in use.
    pub fn spaces(&self) -> impl Iterator<Item = usize> {
        (0..SPACES).filter(|&n| self.space(n).descriptor().is_some())
    }

    /// Numbers that are free.
    pub fn free(&self) -> impl Iterator<Item = usize> {
        (0..SPACES).filter(|&n| self.space(n).descriptor().is_none())
    }
}

/// Words of a space: head, events, twice the pieces, a bit for each page.
fn words_of_space(pages: u64, room: usize) -> usize {
    SPACE_HEAD + EVENTS * EVENT_WORDS + 2 * room * 3 + pages.div_ceil(64) as usize
}

/// What is known of one address space.
#[derive(Clone, Copy, Debug)]
pub struct Space<'a> {
    descriptor: &'a AtomicU64,
    words: &'a [AtomicU64],
    room: usize,
}

// Words of the head.
const ACTIVE: usize = 0; // which of the two placements holds
const LENGTHS: usize = 1; // and 2: number of their pieces

impl<'a> Space<'a> {
    /// The descriptor that follows it; none if it is not in use.
    pub fn descriptor(&self) -> Option<i32> {
        self.descriptor.load(Ordering::Acquire).checked_sub(1).map(|fd| fd as i32)
    }

    /// Begins to use it; all else must be in place.
    pub fn begin(&self, descriptor: i32) {
        self.descriptor.store(descriptor as u64 + 1, Ordering::Release);
    }

    /// It is not used any more.
    pub fn end(&self) {
        self.descriptor.store(0, Ordering::Release);
    }

    /// Where events are read to.
    pub fn log(&self) -> &'a [AtomicU64] {
        &self.words[SPACE_HEAD..SPACE_HEAD + EVENTS * EVENT_WORDS]
    }

    /// Where pages are.
    pub fn placement(&self) -> Placement {
        let active = self.words[ACTIVE].load(Ordering::Acquire) as usize;
        let len = self.words[LENGTHS + active].load(Ordering::Relaxed) as usize;
        let words = self.pieces(active)[..len * 3].chunks_exact(3);
        Placement::new(words.map(|w| {
            let [then, now, len] = [0, 1, 2].map(|i| w[i].load(Ordering::Relaxed));
            Piece { then, now, len }
        }))
    }

    /// Where pages are from now on: all of it or, if we die here, none.
    ///
    /// # Errors
    /// The program has moved its memory about in more pieces than there is room for.
    pub fn set_placement(&self, placement: &Placement) -> Result<()> {
        let pieces = placement.pieces();
        if pieces.len() > self.room {
            return Err(Error::Failed(format!("its memory was moved about in {} pieces", pieces.len())));
        }
        let next = 1 - self.words[ACTIVE].load(Ordering::Relaxed) as usize;
        for (words, piece) in self.pieces(next).chunks_exact(3).zip(pieces) {
            for (word, value) in words.iter().zip([piece.then, piece.now, piece.len]) {
                word.store(value, Ordering::Relaxed);
            }
        }
        self.words[LENGTHS + next].store(pieces.len() as u64, Ordering::Relaxed);
        self.words[ACTIVE].store(next as u64, Ordering::Release);
        Ok(())
    }

    fn pieces(&self, which: usize) -> &'a [AtomicU64] {
        let from = SPACE_HEAD + EVENTS * EVENT_WORDS + which * self.room * 3;
        &self.words[from..from + self.room * 3]
    }

    /// Which pages are settled: are there, or are not wanted any more.
    pub fn settled(&self) -> Bits<'a> {
        Bits(&self.words[SPACE_HEAD + EVENTS * EVENT_WORDS + 2 * self.room * 3..])
    }
}

/// A bit for each page.
#[derive(Clone, Copy, Debug)]
pub struct Bits<'a>(&'a [AtomicU64]);

impl Bits<'_> {
    /// Whether a page's bit is set.
    pub fn is_set(&self, page: u64) -> bool {
        self.0[(page / 64) as usize].load(Ordering::Acquire) >> (page % 64) & 1 != 0
    }

    /// Sets the bits of `pages`; returns how many were not set.
    pub fn set(&self, pages: Range<u64>) -> u64 {
        let mut new = 0;
        let mut at = pages.start;
        while at < pages.end {
            let until = (at / 64 * 64 + 64).min(pages.end);
            let ones = u64::MAX >> (64 - (until - at)) << (at % 64);
            let before = self.0[(at / 64) as usize].fetch_or(ones, Ordering::AcqRel);
            new += u64::from((ones & !before).count_ones());
            at = until;
        }
        new
    }

    /// The first run of pages within `pages` whose bits are not set.
    pub fn unset(&self, pages: Range<u64>) -> Option<Range<u64>> {
        let start = self.find(pages.clone(), false)?;
        let end = self.find(start..pages.end, true).unwrap_or(pages.end);
        Some(start..end)
    }

    /// The first page within `pages` whose bit is `set`.
    fn find(&self, pages: Range<u64>, set: bool) -> Option<u64> {
        let mut at = pages.start;
        while at < pages.end {
            let word = self.0[(at / 64) as usize].load(Ordering::Acquire);
            let left = (if set { word } else { !word }) >> (at % 64);
            if left != 0 {
                return Some(at + u64::from(left.trailing_zeros())).filter(|&found| found < pages.end);
            }
            at = at / 64 * 64 + 64;
        }
        None
    }

    /// Becomes as `other`.
    pub fn become_as(&self, other: Bits<'_>) {
        for (mine, theirs) in self.0.iter().zip(other.0) {
            mine.store(theirs.load(Ordering::Acquire), Ordering::Release);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against an array of flags.
        #[test]
        fn bits_are_set_and_found(
            steps in prop::collection::vec((0u64..200, 0u64..140), 1..12),
            asked in (0u64..200, 0u64..200),
        ) {
            let board = Board::new(340, 1).unwrap();
            let bits = board.space(3).settled();
            let mut model = [false; 340];
            for (from, len) in steps {
                let run = &mut model[from as usize..(from + len) as usize];
                prop_assert_eq!(bits.set(from..from + len), run.iter().filter(|set| !**set).count() as u64);
                run.fill(true);
            }
            let (from, to) = (asked.0.min(asked.1), asked.0.max(asked.1));
            prop_assert!((0..340).all(|p| bits.is_set(p) == model[p as usize]));
            let start = (from..to).find(|&p| !model[p as usize]);
            let end = start.map(|s| (s..to).find(|&p| model[p as usize]).unwrap_or(to));
            prop_assert_eq!(bits.unset(from..to), start.zip(end).map(|(s, e)| s..e));
            let other = board.space(4).settled();
            other.become_as(bits);
            prop_assert!((0..340).all(|p| other.is_set(p) == bits.is_set(p)));
        }
    }

    #[test]
    fn processes_have_numbers() {
        let board = Board::new(1, 1).unwrap();
        for number in 0..100 {
            assert_eq!(board.enlist(1000 + number as i32), number);
            assert_eq!(board.enlisted(number), Some(Some(1000 + number as i32)));
        }
        assert!(board.enlisted(0).is_none() && board.enlisted(100).is_none());
        assert!(board.recent().all(|number| board.enlisted(number).is_some()));
        assert_eq!(board.recent(), 52..100);
        board.discharge(77);
        assert_eq!(board.enlisted(77), Some(None));
    }

    #[test]
    fn spaces_keep_what_they_are_told() {
        let board = Board::new(10, 1).unwrap();
        assert_eq!((board.spaces().count(), board.free().next()), (0, Some(0)));
        let space = board.space(0);
        let piece = |then, now, len| Piece { then, now, len };
        for count in [2, 1, 3] {
            let placement = Placement::new((0..count).map(|i| piece(i * 100, 5000 - i * 200, 50)));
            space.set_placement(&placement).unwrap();
            assert_eq!(space.placement(), placement);
        }
        let many = Placement::new((0..5000).map(|i| piece(i * 2, i * 2, 1)));
        assert!(space.set_placement(&many).is_err());
        space.begin(0);
        assert_eq!(
            (board.spaces().next(), space.descriptor(), board.free().next()),
            (Some(0), Some(0), Some(1))
        );
        assert_eq!(board.failure(), None);
        assert!(board.fail("it was so") && !board.fail("or so"));
        assert_eq!(board.failure().as_deref(), Some("it was so"));
    }
}
