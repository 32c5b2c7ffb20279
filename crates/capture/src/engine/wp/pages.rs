//! What is known of each page that is followed.
//!
//! | state | protected | contents of the cut | the first write to it |
//! | --- | --- | --- | --- |
//! | kept | yes | in the store, or there are none | is noted |
//! | unsaved | yes | in the page alone | waits until they are copied |
//! | copying | yes | being copied | waits until they are copied |
//! | written | no | in the store, or there are none | is not seen |
//!
//! Arming makes written pages unsaved; copying makes unsaved pages kept or written; a write makes kept pages written.

use std::collections::BTreeMap;
use stillpoint_image::{PAGE, Range};

/// Pages of a chunk: as many as a page table describes.
const PAGES: u64 = 512;
/// Bytes of a chunk.
pub(super) const CHUNK: u64 = PAGES * PAGE;

/// State of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Kept,
    Unsaved,
    Copying,
    Written,
}

/// A set of the pages of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Set([u64; PAGES as usize / 64]);

impl Set {
    fn has(&self, page: u64) -> bool {
        self.0[page as usize / 64] >> (page % 64) & 1 == 1
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    fn change(&mut self, from: u64, to: u64, included: bool) {
        for (word, bits) in self.0.iter_mut().zip(0..) {
            let mask = mask(from, to, bits * 64);
            *word = if included { *word | mask } else { *word & !mask };
        }
    }

    fn count(&self, from: u64, to: u64) -> u64 {
        let words = self.0.iter().zip(0..);
        words.map(|(word, bits)| u64::from((word & mask(from, to, bits * 64)).count_ones())).sum()
    }

    /// First page at or behind `from` that is in the set, or not.
    fn next(&self, from: u64, included: bool) -> Option<u64> {
        let mut at = from;
        while at < PAGES {
            let word = self.0[at as usize / 64];
            let word = (if included { word } else { !word }) >> (at % 64);
            if word != 0 {
                return Some(at + u64::from(word.trailing_zeros()));
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

/// Bits of the word that begins at page `first` for the pages `[from, to)`.
fn mask(from: u64, to: u64, first: u64) -> u64 {
    let (from, to) = (from.clamp(first, first + 64) - first, to.clamp(first, first + 64) - first);
    let below = |n: u64| if n == 64 { u64::MAX } else { (1 << n) - 1 };
    below(to) & !below(from)
}

/// The pages of a chunk. No page is in two sets.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    unsaved: Set,
    copying: Set,
    written: Set,
}

/// The pages of an address space. Those that were never heard of are kept.
#[derive(Debug, Default)]
pub(super) struct Pages {
    chunks: BTreeMap<u64, Box<Chunk>>,
    unsaved: u64,
    copying: u64,
}

impl Pages {
    /// State of the page at an address.
    pub fn state(&self, address: u64) -> State {
        let (chunk, page) = (address / CHUNK, address / PAGE % PAGES);
        match self.chunks.get(&chunk) {
            Some(c) if c.unsaved.has(page) => State::Unsaved,
            Some(c) if c.copying.has(page) => State::Copying,
            Some(c) if c.written.has(page) => State::Written,
            _ => State::Kept,
        }
    }

    /// Pages that are unsaved.
    pub fn unsaved(&self) -> u64 {
        self.unsaved
    }

    /// Pages that are being copied.
    pub fn copying(&self) -> u64 {
        self.copying
    }

    /// Puts pages into a state, whatever they were.
    pub fn set(&mut self, range: Range, state: State) {
        if state == State::Kept {
            return self.forget(range);
        }
        for (number, from, to) in parts(range) {
            let chunk = self.chunks.entry(number).or_default();
            self.unsaved -= chunk.unsaved.count(from, to);
            self.copying -= chunk.copying.count(from, to);
            chunk.unsaved.change(from, to, state == State::Unsaved);
            chunk.copying.change(from, to, state == State::Copying);
            chunk.written.change(from, to, state == State::Written);
            self.unsaved += chunk.unsaved.count(from, to);
            self.copying += chunk.copying.count(from, to);
        }
    }

    /// Pages become kept. The range may be huge: only chunks with other pages are looked at.
    fn forget(&mut self, range: Range) {
        let numbers = range.start / CHUNK..range.end().div_ceil(CHUNK);
        let mut empty = Vec::new();
        for (&number, chunk) in self.chunks.range_mut(numbers) {
            let page = |address: u64| address.saturating_sub(number * CHUNK).min(CHUNK) / PAGE;
            let (from, to) = (page(range.start), page(range.end()));
            self.unsaved -= chunk.unsaved.count(from, to);
            self.copying -= chunk.copying.count(from, to);
            [&mut chunk.unsaved, &mut chunk.copying, &mut chunk.written]
                .into_iter()
                .for_each(|set| set.change(from, to, false));
            if chunk.unsaved.is_empty() && chunk.copying.is_empty() && chunk.written.is_empty() {
                empty.push(number);
            }
        }
        empty.iter().for_each(|number| drop(self.chunks.remove(number)));
    }

    /// Pages that are in a state become another.
    pub fn change(&mut self, range: Range, from: State, to: State) {
        let mut at = range.start;
        while at < range.end() {
            let state = self.state(at);
            let mut end = at + PAGE;
            while end < range.end() && self.state(end) == state {
                end += PAGE;
            }
            if state == from {
                self.set(Range { start: at, len: end - at }, to);
            }
            at = end;
        }
    }

    /// All written pages of a range, which become unsaved.
    pub fn arm(&mut self, range: Range) -> Vec<Range> {
        let mut runs = Vec::new();
        let numbers = range.start / CHUNK..range.end().div_ceil(CHUNK);
        for (&number, chunk) in self.chunks.range_mut(numbers) {
            let page = |address: u64| address.saturating_sub(number * CHUNK).min(CHUNK) / PAGE;
            let (from, to) = (page(range.start), page(range.end()));
            for run in runs_of(&chunk.written, number, from) {
                let first = run.start / PAGE % PAGES;
                let behind = (first + run.len / PAGE).min(to);
                if first < behind {
                    chunk.unsaved.change(first, behind, true);
                    self.unsaved += behind - first;
                    push(&mut runs, Range { start: run.start, len: (behind - first) * PAGE });
                }
            }
            chunk.written.change(from, to, false);
        }
        runs
    }

    /// The run of pages in the same state around a page that lies in the aligned window of `pages` pages (a power of
    /// two). They are in another state from now on.
    pub fn take_around(&mut self, address: u64, pages: u64, to: State) -> Range {
        let window = address - address % (pages * PAGE);
        let state = self.state(address);
        let mut start = address;
        while start > window && self.state(start - PAGE) == state {
            start -= PAGE;
        }
        let mut end = address + PAGE;
        while end < window + pages * PAGE && self.state(end) == state {
            end += PAGE;
        }
        let run = Range { start, len: end - start };
        self.set(run, to);
        run
    }

    /// The first runs of unsaved pages in a range, at most `most` bytes and `runs` runs. They are being copied from now
    /// on.
    pub fn claim(&mut self, range: Range, most: u64, runs: usize) -> Vec<Range> {
        let mut claimed: Vec<Range> = Vec::new();
        let mut left = most / PAGE * PAGE;
        let numbers = range.start / CHUNK..range.end().div_ceil(CHUNK);
        'chunks: for (number, chunk) in self.chunks.range(numbers) {
            let first = if *number == range.start / CHUNK { range.start / PAGE % PAGES } else { 0 };
            for run in runs_of(&chunk.unsaved, *number, first) {
                if range.end() <= run.start {
                    break 'chunks;
                }
                let run = Range { start: run.start, len: run.len.min(left).min(range.end() - run.start) };
                left -= run.len;
                push(&mut claimed, run);
                if left == 0 || claimed.len() >= runs {
                    break 'chunks;
                }
            }
        }
        claimed.iter().for_each(|run| self.set(*run, State::Copying));
        claimed
    }
}

/// Runs of a set of pages of a chunk, from page `first` of it on, as ranges of addresses.
fn runs_of(set: &Set, chunk: u64, first: u64) -> impl Iterator<Item = Range> {
    let mut at = first;
    std::iter::from_fn(move || {
        let from = set.next(at, true)?;
        let to = set.next(from, false).unwrap_or(PAGES);
        at = to;
        Some(Range { start: chunk * CHUNK + from * PAGE, len: (to - from) * PAGE })
    })
}

/// A range cut into chunks: number, first page, page behind the last.
fn parts(range: Range) -> impl Iterator<Item = (u64, u64, u64)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        (at < range.end()).then(|| {
            let (number, from) = (at / CHUNK, at / PAGE % PAGES);
            let end = range.end().min((number + 1) * CHUNK);
            let to = from + (end - at) / PAGE;
            at = end;
            (number, from, to)
        })
    })
}

/// Appends a range, joined to the last one where it continues that.
pub(super) fn push(ranges: &mut Vec<Range>, next: Range) {
    match ranges.last_mut() {
        Some(last) if last.end() == next.start => last.len += next.len,
        _ => ranges.push(next),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Pages that the tests use: some chunks, from the middle of one.
    const FIRST: u64 = 5 * PAGES - 100;
    const COUNT: u64 = 3 * PAGES;

    #[derive(Clone, Debug)]
    enum Step {
        Set(u64, u64, u8),
        Arm(u64, u64),
        Around(u64, u32),
        Claim(u64, u64, u64, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let page = FIRST..FIRST + COUNT;
        prop_oneof![
            4 => (page.clone(), 1..200u64, 0..4u8).prop_map(|(p, n, s)| Step::Set(p, n, s)),
            1 => (page.clone(), 1..900u64).prop_map(|(p, n)| Step::Arm(p, n)),
            3 => (page.clone(), 0..7u32).prop_map(|(p, w)| Step::Around(p, w)),
            2 => (page, 1..600u64, 1..300u64, 1..20usize).prop_map(|(p, l, n, r)| Step::Claim(p, l, n, r)),
        ]
    }

    fn state(number: u8) -> State {
        [State::Kept, State::Unsaved, State::Copying, State::Written][usize::from(number)]
    }

    fn pages_of(ranges: &[Range]) -> Vec<u64> {
        ranges.iter().flat_map(|r| r.start / PAGE..r.end() / PAGE).collect()
    }

    proptest! {
        #[test]
        fn as_a_map_of_pages(steps in proptest::collection::vec(step(), 1..60)) {
            let mut pages = Pages::default();
            let mut model: BTreeMap<u64, State> = (FIRST..FIRST + COUNT + 512).map(|p| (p, State::Kept)).collect();
            for step in steps {
                match step {
                    Step::Set(page, count, number) => {
                        pages.set(Range { start: page * PAGE, len: count * PAGE }, state(number));
                        (page..page + count).for_each(|p| { model.insert(p, state(number)); });
                    }
                    Step::Arm(page, len) => {
                        let armed = pages_of(&pages.arm(Range { start: page * PAGE, len: len * PAGE }));
                        let written: Vec<u64> = model
                            .range(page..page + len)
                            .filter(|(_, s)| **s == State::Written)
                            .map(|(p, _)| *p)
                            .collect();
                        prop_assert_eq!(&armed, &written);
                        written.iter().for_each(|p| { model.insert(*p, State::Unsaved); });
                    }
                    Step::Around(page, shift) => {
                        let window = page >> shift << shift;
                        let before = model[&page];
                        let same = |p: &u64| model.get(p).copied().unwrap_or(State::Kept) == before;
                        let below = (window..page).rev().take_while(same).count() as u64;
                        let above = (page..window + (1 << shift)).take_while(same).count() as u64;
                        let run = pages.take_around(page * PAGE, 1 << shift, State::Copying);
                        let expected: Vec<u64> = (page - below..page + above).collect();
                        prop_assert_eq!(pages_of(&[run]), expected.clone());
                        expected.iter().for_each(|p| { model.insert(*p, State::Copying); });
                    }
                    Step::Claim(page, len, most, runs) => {
                        let range = Range { start: page * PAGE, len: len * PAGE };
                        let claimed = pages.claim(range, most * PAGE, runs);
                        let unsaved: Vec<u64> = model
                            .range(page..page + len).filter(|(_, s)| **s == State::Unsaved).map(|(p, _)| *p).collect();
                        let got = pages_of(&claimed);
                        prop_assert_eq!(&got[..], &unsaved[..got.len()]);
                        let whole = got.len() == unsaved.len() || got.len() as u64 == most;
                        prop_assert!(whole || claimed.len() >= runs);
                        got.iter().for_each(|p| { model.insert(*p, State::Copying); });
                    }
                }
                for (page, state) in &model {
                    prop_assert_eq!(pages.state(page * PAGE), *state);
                }
                let count = |s: State| model.values().filter(|m| **m == s).count() as u64;
                prop_assert_eq!(pages.unsaved(), count(State::Unsaved));
                prop_assert_eq!(pages.copying(), count(State::Copying));
                prop_assert!(pages.chunks.len() <= 5);
            }
        }
    }
}
