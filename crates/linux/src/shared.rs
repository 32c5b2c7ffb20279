//! Memory that processes of ours share: it outlives each of them.

use crate::{Error, Result};
use std::ops::Deref;
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
}
