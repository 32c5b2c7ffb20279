//! What page servers know, in memory that outlives each of them: one that is killed at any instruction is followed by
//! another, which goes on from here.

use super::placement::{Piece, Placement};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use stillpoint_linux::shared::SharedWords;
use stillpoint_linux::userfault::EVENT_WORDS;

/// Copies that programs make of themselves, at a time.
pub const COPIES: usize = 255;
/// Events that are read at a time.
pub const EVENTS: usize = 64;

/// Words in front of the programs: counts, handles of the last processes that were made to serve.
const PROGRAMS: usize = 64;
const PROCESSES: usize = 16;
/// In place of the handle of a process that has ended.
const ENDED: i32 = -1;
/// Words of a program: counts, the text of a failure, how often somebody waited in which time. Behind the programs is the descriptor of each space (one more than its
/// number), then come the spaces.
const PROGRAM: usize = TIMES + SLOTS;
const TEXT: usize = 16;
const TIMES: usize = TEXT + 64;
/// Times that are told apart, each a fifth longer than the one before.
const SLOTS: usize = 128;
/// Words of a space before its events.
const SPACE_HEAD: usize = 8;

/// Things that are counted once for all programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Page servers that were started.
    Servers,
    /// Servers that ended by themselves, because of a failure inside.
    Broken,
    /// Processes that were ever made to serve.
    Enlisted,
    /// Whether there is nothing left to do.
    Done,
    /// How many of the programs run.
    Runs,
}

/// Things that are counted for each program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
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
    /// Runs of the touch set that had to be there first, and were.
    Head,
    /// Runs of the touch set that were there when the page servers began.
    Touched,
    /// Pages that could have come later, and were there before the program ran.
    Before,
    /// One more than the pages that were there before the program ran, and that it had not used when all was there; 0 if that is not known.
    InVain,
    /// When the program began to run, microseconds since the restore began; 0 before.
    RanUs,
}

/// The board.
#[derive(Debug)]
pub struct Board {
    words: SharedWords,
    pages: u64,
    /// Most pieces of a placement.
    room: usize,
    programs: usize,
}

impl Board {
    /// For so many pages in so many mappings of each of so many programs.
    pub fn new(pages: u64, mappings: usize, programs: usize) -> Result<Self> {
        let room = (4 * mappings).max(1 << 12);
        let spaces = programs + COPIES;
        let head = PROGRAMS + programs * PROGRAM + spaces;
        let words = SharedWords::new(head + spaces * words_of_space(pages, room))?;
        Ok(Board { words, pages, room, programs })
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
    ///
    /// The handle is there before the number counts as taken: whoever looks never finds one without the other. If we are
    /// killed between the two, the next one counts for us.
    pub fn enlist(&self, handle: i32) -> u64 {
        let count = &self.words[Count::Enlisted as usize];
        loop {
            let number = count.load(Ordering::Acquire);
            let place = self.process(number);
            let before = place.load(Ordering::Acquire);
            let own = (number + 1) << 32 | handle as u64;
            let is_free = before >> 32 != number + 1;
            let taken =
                is_free && place.compare_exchange(before, own, Ordering::AcqRel, Ordering::Acquire).is_ok();
            let _ = count.compare_exchange(number, number + 1, Ordering::AcqRel, Ordering::Acquire);
            if taken {
                return number;
            }
        }
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
        end.saturating_sub((PROGRAMS - PROCESSES) as u64)..end
    }

    fn process(&self, number: u64) -> &AtomicU64 {
        &self.words[PROCESSES + number as usize % (PROGRAMS - PROCESSES)]
    }

    /// How many programs there are.
    pub fn programs(&self) -> usize {
        self.programs
    }

    /// A program.
    pub fn program(&self, number: usize) -> Program<'_> {
        let from = PROGRAMS + number * PROGRAM;
        Program(&self.words[from..from + PROGRAM])
    }

    fn descriptors(&self) -> &[AtomicU64] {
        let from = PROGRAMS + self.programs * PROGRAM;
        &self.words[from..from + self.programs + COPIES]
    }

    /// A space, whether it is in use or not. That of each program has the number of the program; the others are for copies
    /// that they make of themselves.
    pub fn space(&self, number: usize) -> Space<'_> {
        let descriptors = self.descriptors();
        let len = words_of_space(self.pages, self.room);
        let from = PROGRAMS + self.programs * PROGRAM + descriptors.len() + number * len;
        Space { descriptor: &descriptors[number], words: &self.words[from..from + len], room: self.room }
    }

    /// Numbers of the spaces in use.
    pub fn spaces(&self) -> impl Iterator<Item = usize> {
        self.numbers(0, true)
    }

    /// Numbers of spaces that are free for copies.
    pub fn free(&self) -> impl Iterator<Item = usize> {
        self.numbers(self.programs, false)
    }

    fn numbers(&self, from: usize, used: bool) -> impl Iterator<Item = usize> {
        let descriptors = self.descriptors().iter().enumerate().skip(from);
        let is_used = |word: &AtomicU64| word.load(Ordering::Acquire) != 0;
        descriptors.filter(move |(_, word)| is_used(word) == used).map(|(number, _)| number)
    }
}

/// What is known of one program.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a>(&'a [AtomicU64]);

impl Program<'_> {
    /// Adds to a count.
    pub fn add(&self, tally: Tally, more: u64) {
        self.0[tally as usize].fetch_add(more, Ordering::Relaxed);
    }

    /// A count.
    pub fn get(&self, tally: Tally) -> u64 {
        self.0[tally as usize].load(Ordering::Acquire)
    }

    /// Somebody waits for pages of the checkpoint, now, on the clock of the page servers.
    pub fn demand(&self, now_us: u64) {
        self.add(Tally::Demands, 1);
        let ran = self.get(Tally::BeganUs) + self.get(Tally::RanUs);
        self.0[TIMES + slot(now_us.saturating_sub(ran))].fetch_add(1, Ordering::Relaxed);
    }

    /// How often somebody waited for pages of the checkpoint since the time before: microseconds since the program ran, and
    /// a number.
    pub fn demand_times(&self) -> Vec<(u64, u64)> {
        let counts = self.0[TIMES..].iter().map(|w| w.load(Ordering::Relaxed));
        counts.enumerate().filter(|(_, n)| *n > 0).map(|(slot, n)| (end_of(slot), n)).collect()
    }

    /// Notes why loading failed; false if it was noted before.
    pub fn fail(&self, why: &str) -> bool {
        if self.get(Tally::Failure) > 0 {
            return false;
        }
        let room = (TIMES - TEXT) * 8;
        let why = &why.as_bytes()[..why.len().min(room)];
        for (word, bytes) in self.0[TEXT..TIMES].iter().zip(why.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
        }
        self.0[Tally::Failure as usize].swap(why.len() as u64, Ordering::AcqRel) == 0
    }

    /// Why loading failed, if it did.
    pub fn failure(&self) -> Option<String> {
        let len = self.get(Tally::Failure) as usize;
        let text = self.0[TEXT..TIMES].iter();
        let bytes: Vec<u8> = text.flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
        (len > 0).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Which of the times a number of microseconds belongs to: four for each power of two.
fn slot(us: u64) -> usize {
    let power = us.max(1).ilog2();
    let slot = if power < 2 { us } else { u64::from(power - 1) << 2 | (us >> (power - 2) & 3) };
    (slot as usize).min(SLOTS - 1)
}

/// The first microsecond behind a time.
fn end_of(slot: usize) -> u64 {
    let next = slot as u64 + 1;
    if next < 8 { next } else { (4 | next & 3) << ((next >> 2) - 1) }
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
const OF: usize = 3; // the program

impl<'a> Space<'a> {
    /// The descriptor that follows it; none if it is not in use.
    pub fn descriptor(&self) -> Option<i32> {
        self.descriptor.load(Ordering::Acquire).checked_sub(1).map(|fd| fd as i32)
    }

    /// Begins to use it for a program or a copy of it; all else must be in place.
    pub fn begin(&self, descriptor: i32, program: usize) {
        self.words[OF].store(program as u64, Ordering::Relaxed);
        self.descriptor.store(descriptor as u64 + 1, Ordering::Release);
    }

    /// Whose it is: the program's own, or that of a copy of it.
    pub fn program(&self) -> usize {
        self.words[OF].load(Ordering::Relaxed) as usize
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
            let board = Board::new(340, 1, 2).unwrap();
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

    proptest! {
        /// Each moment lies before the end of its time, and behind that of the time before.
        #[test]
        fn moments_have_their_times(us in prop_oneof![0u64..1 << 8, 0u64..1 << 32]) {
            let slot = slot(us);
            prop_assert!(us < end_of(slot));
            prop_assert!(slot == 0 || end_of(slot - 1) <= us);
        }
    }

    #[test]
    fn waits_are_told_with_their_times() {
        let board = Board::new(1, 1, 2).unwrap();
        let program = board.program(1);
        program.add(Tally::BeganUs, 1_000);
        program.add(Tally::RanUs, 500);
        for now in [900, 1_500, 1_509, 1_508, u64::MAX] {
            program.demand(now);
        }
        let times = program.demand_times();
        assert_eq!(times[..2], [(1, 2), (10, 2)]);
        assert_eq!((times.len(), times[2].1, program.get(Tally::Demands)), (3, 1, 5));
        assert!(board.program(0).demand_times().is_empty());
    }

    #[test]
    fn processes_have_numbers() {
        let board = Board::new(1, 1, 1).unwrap();
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
        let board = Board::new(10, 1, 3).unwrap();
        assert_eq!((board.spaces().count(), board.free().next()), (0, Some(3)));
        let space = board.space(1);
        let piece = |then, now, len| Piece { then, now, len };
        for count in [2, 1, 3] {
            let placement = Placement::new((0..count).map(|i| piece(i * 100, 5000 - i * 200, 50)));
            space.set_placement(&placement).unwrap();
            assert_eq!(space.placement(), placement);
        }
        let many = Placement::new((0..5000).map(|i| piece(i * 2, i * 2, 1)));
        assert!(space.set_placement(&many).is_err());
        space.begin(0, 1);
        let copy = board.space(3);
        copy.begin(7, 1);
        assert_eq!(board.spaces().collect::<Vec<_>>(), [1, 3]);
        assert_eq!((space.descriptor(), copy.descriptor(), copy.program()), (Some(0), Some(7), 1));
        // Those of programs are nobody else's, also when they are not used any more.
        space.end();
        assert_eq!((board.spaces().next(), board.free().next()), (Some(3), Some(4)));
        assert_eq!(board.free().count(), COPIES - 1);
    }

    #[test]
    fn programs_fail_one_by_one() {
        let board = Board::new(10, 1, 2).unwrap();
        let (one, other) = (board.program(0), board.program(1));
        assert_eq!(one.failure(), None);
        assert!(one.fail("it was so") && !one.fail("or so"));
        assert_eq!(one.failure().as_deref(), Some("it was so"));
        assert_eq!(other.failure(), None);
        let long = "x".repeat(2000);
        assert!(other.fail(&long));
        assert_eq!(other.failure().map(|text| text.len()), Some(512));
        other.add(Tally::Demands, 3);
        assert_eq!((one.get(Tally::Demands), other.get(Tally::Demands)), (0, 3));
        assert_eq!(one.failure().as_deref(), Some("it was so"));
    }
}
