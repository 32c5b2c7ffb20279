//! What was taken out and is not stored yet, and what is being taken out just now, in memory that outlives each process that serves.

use crate::Result;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stillpoint_image::Range;
use stillpoint_linux::shared::{SharedPages, SharedWords};
use stillpoint_linux::split;

/// Most runs of pages that are moved at a time.
pub const RUNS: usize = 4096;

/// Things that are known of the program, each a word.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    /// What is stored has been told to whoever takes a checkpoint, which is not done yet.
    Held,
    /// One more than the descriptor of the ring with which the program holds what follows its memory.
    Ring,
    /// Where in the program pages are moved to, if anywhere …
    Aside,
    /// … bytes of that …
    AsideLen,
    /// … and one more than the descriptor of what follows that.
    AsideFollowed,
    /// How many runs are being moved there.
    Moving,
    /// How many have claimed the program.
    Claims,
    /// Pages that were taken out.
    Out,
    /// Pages that were written for that.
    Written,
    /// Pages that were put back in.
    In,
    /// How often the program was stopped for it.
    Stops,
    /// Microseconds that it stood still.
    StoppedUs,
    /// Whether it is known that the limit cannot be kept.
    Exceeded,
    /// Whoever takes a checkpoint wants the program not to be stopped by others.
    Rests,
    /// Whether some page that is out may have no mark: then the want of one says nothing.
    Unmarked,
    /// Microseconds that its threads, all together, have waited for pages that were held back for the sake of checkpoints.
    WaitedUs,
    /// Those of them that whoever takes checkpoints has been told of.
    WaitedToldUs,
}

/// Words in front of the runs.
const HEAD: usize = 32;
const _: () = assert!(HEAD > Word::WaitedToldUs as usize);

/// What is known, and the cells: a page each.
#[derive(Debug)]
pub struct Cells {
    words: SharedWords,
    pages: SharedPages,
}

impl Cells {
    /// So many cells.
    pub fn new(cells: usize) -> Result<Self> {
        Ok(Cells { words: SharedWords::new(HEAD + 2 * RUNS)?, pages: SharedPages::new(cells)? })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Their contents.
    pub fn with<T>(&self, cells: std::ops::Range<usize>, work: impl FnOnce(&mut [u8]) -> T) -> T {
        self.pages.with(cells, work)
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        &self.words[word as usize]
    }

    /// A word.
    pub fn get(&self, word: Word) -> u64 {
        self.word(word).load(Ordering::Acquire)
    }

    /// Sets a word.
    pub fn set(&self, word: Word, value: u64) {
        self.word(word).store(value, Ordering::Release);
    }

    /// Adds to a word.
    pub fn add(&self, word: Word, more: u64) {
        self.word(word).fetch_add(more, Ordering::AcqRel);
    }

    /// The program has been stopped for so long.
    pub fn count_stop(&self, pause: Duration) {
        self.add(Word::Stops, 1);
        self.add(Word::StoppedUs, pause.as_micros() as u64);
    }

    /// A descriptor of the table that all who serve share.
    pub fn descriptor(&self, word: Word) -> Option<BorrowedFd<'static>> {
        let number = self.get(word).checked_sub(1)?;
        Some(split::shared_descriptor(number as i32))
    }

    /// Notes a descriptor that has no owner from now on, or that there is none.
    pub fn keep(&self, word: Word, descriptor: Option<BorrowedFd<'_>>) {
        self.set(word, descriptor.map_or(0, |fd| fd.as_raw_fd() as u64 + 1));
    }

    /// These are moved aside from now on, one behind the other.
    pub fn begin_moving(&self, runs: &[Range]) {
        for (words, run) in self.words[HEAD..].chunks_exact(2).zip(runs) {
            words[0].store(run.start, Ordering::Relaxed);
            words[1].store(run.len, Ordering::Relaxed);
        }
        self.set(Word::Moving, runs.len() as u64);
    }

    /// What was being moved when somebody died.
    pub fn moving(&self) -> Vec<Range> {
        let words = self.words[HEAD..].chunks_exact(2).take(self.get(Word::Moving) as usize);
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        words.map(|words| Range { start: load(&words[0]), len: load(&words[1]) }).collect()
    }
}
