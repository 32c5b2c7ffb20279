//! Where each page of a program is, in memory that outlives each process that serves it.
//!
//! A table has an entry of one word for each page that was ever taken out: it changes from one instant to the next. An entry of a
//! page that is in memory and was written since is of no use, and harmless: nobody looks at it before that page is taken out
//! again, and then it is replaced.

use crate::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use stillpoint_image::PAGE;
use stillpoint_linux::shared::SharedWords;

/// Pages of a chunk, which is what room is taken for at a time.
const CHUNK: u64 = 512;
/// Most chunks: 512 GiB of pages that were taken out.
const CHUNKS: usize = 1 << 18;

/// Behind all addresses that something can be known of.
const END: u64 = u64::MAX - PAGE;

const SLOT: u64 = 1 << 62;
const CELL: u64 = 2 << 62;
const ORIGIN: u64 = 3 << 62;
const KIND: u64 = 3 << 62;
/// The page is in memory, as far as we know.
const IN: u64 = 1 << 61;
const NUMBER: u64 = (1 << 48) - 1;

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing: a page that is not in memory is zeros.
    Nothing,
    /// The contents are in the store.
    Stored {
        /// Where.
        at: At,
        /// The page is in memory, too, and if it was not written since is the same.
        is_in: bool,
    },
    /// The contents are in memory of ours, on their way to a slot.
    Cell(u64),
}

/// Where in the store a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// In the slot of this number.
    Slot(u64),
    /// In the checkpoint that the program was restored from, where its address divided by its length was this number.
    Origin(u64),
}

impl At {
    /// Whether it is the page behind another one.
    pub fn follows(self, other: At) -> bool {
        match (other, self) {
            (At::Slot(a), At::Slot(b)) | (At::Origin(a), At::Origin(b)) => b == a + 1,
            _ => false,
        }
    }
}

impl Entry {
    /// The page is not in memory, and not zeros.
    pub fn is_missing(self) -> bool {
        matches!(self, Entry::Stored { is_in: false, .. } | Entry::Cell(_))
    }

    /// The slot that it is in.
    pub fn slot(self) -> Option<u64> {
        match self {
            Entry::Stored { at: At::Slot(slot), .. } => Some(slot),
            _ => None,
        }
    }

    fn of(word: u64) -> Self {
        let is_in = word & IN != 0;
        match word & KIND {
            SLOT => Entry::Stored { at: At::Slot(word & NUMBER), is_in },
            ORIGIN => Entry::Stored { at: At::Origin(word & NUMBER), is_in },
            CELL => Entry::Cell(word & NUMBER),
            _ => Entry::Nothing,
        }
    }

    fn word(self) -> u64 {
        match self {
            Entry::Nothing => 0,
            Entry::Stored { at, is_in } => {
                let place = match at {
                    At::Slot(slot) => SLOT | slot,
                    At::Origin(page) => ORIGIN | page,
                };
                place | if is_in { IN } else { 0 }
            }
            Entry::Cell(cell) => CELL | cell,
        }
    }
}

/// The table of all address spaces: 0 is that of the program, others are of copies of it.
#[derive(Debug)]
pub struct Table {
    /// For each chunk in use whose it is, then the chunks, then what is known of a move that is under way.
    words: SharedWords,
}

/// A table as one process sees it that serves.
#[derive(Debug)]
pub struct View<'a> {
    table: &'a Table,
    index: RwLock<Index>,
}

#[derive(Debug, Default)]
struct Index {
    /// Space and number of a chunk (its address divided by its length): where it is.
    chunks: BTreeMap<(usize, u64), usize>,
    free: Vec<usize>,
    next: usize,
}

/// Words about a move: how far it is, from, to, bytes.
const MOVE: usize = CHUNKS * (1 + CHUNK as usize);
/// Where it goes to is being cleared …
const CLEARS: u64 = 1;
/// … pages are being moved …
const MOVES: u64 = 2;
/// … it is done.
const DONE: u64 = 3;

impl Table {
    /// An empty one.
    pub fn new() -> Result<Self> {
        Ok(Table { words: SharedWords::new(MOVE + 8)? })
    }

    /// What is in it.
    pub fn view(&self) -> View<'_> {
        let mut index = Index::default();
        for (number, owner) in self.words[..CHUNKS].iter().enumerate() {
            let owner = owner.load(Ordering::Acquire);
            if owner != 0 {
                index.chunks.insert(((owner >> 40) as usize - 1, owner & ((1 << 40) - 1)), number);
                index.free.extend(index.next..number);
                index.next = number + 1;
            }
        }
        View { table: self, index: RwLock::new(index) }
    }
}

impl View<'_> {
    /// What is known of a page.
    pub fn get(&self, space: usize, address: u64) -> Entry {
        self.entry(space, address).map_or(Entry::Nothing, |word| Entry::of(word.load(Ordering::Acquire)))
    }

    /// Notes what is known of a page.
    ///
    /// # Errors
    /// There is no room for more.
    pub fn set(&self, space: usize, address: u64, entry: Entry) -> Result<()> {
        if let Some(word) = self.entry(space, address) {
            word.store(entry.word(), Ordering::Release);
        } else if entry != Entry::Nothing {
            self.make(space, address)?;
            return self.set(space, address, entry);
        }
        Ok(())
    }

    /// Makes room for what is known of a page, so that it can be noted without fail.
    pub fn make(&self, space: usize, address: u64) -> Result<()> {
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        let key = (space, address / PAGE / CHUNK);
        if index.chunks.contains_key(&key) {
            return Ok(());
        }
        let free = index.free.pop().or_else(|| {
            index.next += 1;
            (index.next <= CHUNKS).then_some(index.next - 1)
        });
        let number =
            free.ok_or_else(|| Error::Failed("more has been paged out than there is room to note".into()))?;
        self.table.words[number].store((key.0 as u64 + 1) << 40 | key.1, Ordering::Release);
        index.chunks.insert(key, number);
        Ok(())
    }

    fn entry(&self, space: usize, address: u64) -> Option<&AtomicU64> {
        let page = address / PAGE;
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let number = *index.chunks.get(&(space, page / CHUNK))?;
        Some(&self.chunk(number)[(page % CHUNK) as usize])
    }

    fn chunk(&self, number: usize) -> &[AtomicU64] {
        let from = CHUNKS + number * CHUNK as usize;
        &self.table.words[from..from + CHUNK as usize]
    }

    /// All that is known of pages in `[from, to)` of a space, by address.
    pub fn each(&self, space: usize, from: u64, to: u64, mut see: impl FnMut(u64, Entry)) {
        let (from, to) = (from / PAGE, to.div_ceil(PAGE));
        let chunks: Vec<(u64, usize)> = {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            let range = (space, from / CHUNK)..=(space, to.saturating_sub(1) / CHUNK);
            index.chunks.range(range).map(|((_, chunk), number)| (*chunk, *number)).collect()
        };
        for (chunk, number) in chunks {
            let first = chunk * CHUNK;
            let (start, end) = (from.max(first), to.min(first + CHUNK));
            for page in start..end.max(start) {
                let word = self.chunk(number)[(page - first) as usize].load(Ordering::Acquire);
                if word != 0 {
                    see(page * PAGE, Entry::of(word));
                }
            }
        }
    }

    /// All that is known of a space, by address.
    pub fn all(&self, space: usize, see: impl FnMut(u64, Entry)) {
        self.each(space, 0, END, see);
    }

    /// The cells that pages in `[from, to)` of a space are in, each with the page, by address.
    pub fn cells(&self, space: usize, from: u64, to: u64) -> Vec<(u64, u64)> {
        let mut cells = Vec::new();
        self.each(space, from, to, |address, entry| {
            if let Entry::Cell(cell) = entry {
                cells.push((cell, address));
            }
        });
        cells
    }

    /// All cells that a space knows, each with the page, by address.
    pub fn all_cells(&self, space: usize) -> Vec<(u64, u64)> {
        self.cells(space, 0, END)
    }

    /// Nothing is known of `[from, to)` of a space any more.
    pub fn forget(&self, space: usize, from: u64, to: u64) {
        let mut known = Vec::new();
        self.each(space, from, to, |address, _| known.push(address));
        known.iter().for_each(|address| drop(self.set(space, *address, Entry::Nothing)));
    }

    /// A space is no more.
    pub fn end(&self, space: usize) {
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        let ended: Vec<_> =
            index.chunks.range((space, 0)..=(space, u64::MAX)).map(|(k, n)| (*k, *n)).collect();
        for (key, number) in ended {
            self.chunk(number).iter().for_each(|word| word.store(0, Ordering::Relaxed));
            self.table.words[number].store(0, Ordering::Release);
            index.chunks.remove(&key);
            index.free.push(number);
        }
    }

    /// A new space is as another one.
    ///
    /// # Errors
    /// As [`View::set`].
    pub fn copy(&self, from: usize, to: usize) -> Result<()> {
        let mut all = Vec::new();
        self.all(from, |address, entry| all.push((address, entry)));
        all.into_iter().try_for_each(|(address, entry)| self.set(to, address, entry))
    }

    /// `len` bytes from `from` have been moved to `to`; tells the cells that have. `event` tells this move from others, and may come
    /// again if we die before [`View::moved`].
    ///
    /// # Errors
    /// As [`View::set`].
    pub fn move_to(&self, space: usize, from: u64, to: u64, len: u64, event: u64) -> Result<Vec<(u64, u64)>> {
        let state = &self.table.words[MOVE..MOVE + 5];
        let is_known =
            [event, from, to, len].iter().zip(&state[1..]).all(|(a, b)| *a == b.load(Ordering::Acquire));
        let mut at = if is_known { state[0].load(Ordering::Acquire) } else { 0 };
        if at == 0 {
            // What it was before says nothing, until all of this is there.
            state[0].store(0, Ordering::Release);
            let words = [event, from, to, len];
            words.iter().zip(&state[1..]).for_each(|(word, place)| place.store(*word, Ordering::Relaxed));
            at = CLEARS;
            state[0].store(at, Ordering::Release);
        }
        if at == CLEARS {
            // What was there has been unmapped. (The kernel does not move memory onto a part of itself.)
            self.forget(space, to, to + len);
            at = MOVES;
            state[0].store(at, Ordering::Release);
        }
        let mut cells = Vec::new();
        if at == MOVES {
            let mut all = Vec::new();
            self.each(space, from, from + len, |address, entry| all.push((address, entry)));
            for (address, entry) in all {
                let now = to + (address - from);
                self.set(space, now, entry)?;
                self.set(space, address, Entry::Nothing)?;
                if let Entry::Cell(cell) = entry {
                    cells.push((cell, now));
                }
            }
            state[0].store(DONE, Ordering::Release);
        }
        Ok(cells)
    }

    /// The event of the last move is done with.
    pub fn moved(&self) {
        self.table.words[MOVE].store(0, Ordering::Release);
    }
}
