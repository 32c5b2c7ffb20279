//! Memory that processes of ours share: it outlives each of them.

use crate::{Error, Result};
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Words that this process shares with the copies that are made of it (`fork(2)`), zero at first. Memory is only taken for
/// those that are written.
#[derive(Debug)]
pub struct SharedWords {
    at: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the words are atomic, and the mapping is only unmapped by whoever owns it.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// So many words.
    pub fn new(len: usize) -> Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping that nothing refers to.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len * 8, prot, flags, -1, 0) };
        match NonNull::new(at.cast::<AtomicU64>()) {
            Some(words) if at != libc::MAP_FAILED => Ok(SharedWords { at: words, len }),
            _ => Err(Error::call("map shared memory", std::io::Error::last_os_error())),
        }
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: a mapping of this length, page-aligned, that lives as long as we do. Zero is a valid word.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; other processes have mappings of their own.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len * 8) };
    }
}

/// Pages that this process shares with the copies that are made of it, zero at first: fit for direct I/O.
#[derive(Debug)]
pub struct SharedPages(SharedWords);

impl SharedPages {
    /// So many pages.
    pub fn new(pages: usize) -> Result<Self> {
        SharedWords::new(pages * 512).map(SharedPages)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len / 512
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets `work` read and write some of them. Of all processes that share them one is at work at a time, and in that one
    /// nobody else is with these.
    pub fn with<T>(&self, pages: Range<usize>, work: impl FnOnce(&mut [u8]) -> T) -> T {
        assert!(pages.start <= pages.end && pages.end <= self.len());
        // SAFETY: inside the mapping, which lives as long as we do; any bytes are valid. What another process might write at the
        // same time, against the word of the caller, would be other bytes and nothing worse.
        let bytes = unsafe {
            let at = self.0.at.as_ptr().cast::<u8>().add(pages.start * 4096);
            std::slice::from_raw_parts_mut(at, pages.len() * 4096)
        };
        work(bytes)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn words_are_zero_and_can_be_written() {
        let words = SharedWords::new(1 << 20).unwrap();
        assert!(words.iter().step_by(4096).all(|w| w.load(Ordering::Relaxed) == 0));
        words[77].store(3, Ordering::Relaxed);
        assert_eq!(words[77].load(Ordering::Relaxed), 3);
    }

    #[test]
    fn pages_keep_what_is_written() {
        let pages = SharedPages::new(4).unwrap();
        pages.with(1..3, |bytes| bytes.fill(7));
        let sums = [0..1, 1..3, 3..4]
            .map(|range| pages.with(range, |b| b.iter().map(|b| u64::from(*b)).sum::<u64>()));
        assert_eq!((sums, pages.len()), ([0, 7 * 8192, 0], 4));
    }
}
