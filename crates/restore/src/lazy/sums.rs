//! Checksums of pages whose blocks were read and checked: such a page can be read alone, and checked, the next time.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use stillpoint_store::page_sums;

/// The checksums of the pages of a plan, of those that are known.
pub struct Sums(Vec<AtomicU64>);

/// Set where one is known; what else is in a word is the checksum.
const KNOWN: u64 = 1 << 32;

impl Sums {
    /// Of so many pages none is known.
    pub fn of(pages: u64) -> Self {
        Sums((0..pages).map(|_| AtomicU64::new(0)).collect())
    }

    /// Notes those of pages from `first` on, whose checked contents these are.
    pub fn note(&self, first: u64, bytes: &[u8]) {
        for (word, sum) in self.0.iter().skip(first as usize).zip(page_sums(bytes)) {
            word.store(KNOWN | u64::from(sum), Ordering::Relaxed);
        }
    }

    /// Whether those of all these pages are known.
    pub fn are_known(&self, pages: Range<u64>) -> bool {
        self.of_pages(pages).all(|word| word & KNOWN != 0)
    }

    /// Whether these are the contents of pages from `first` on, all of which are known.
    pub fn fit(&self, first: u64, bytes: &[u8]) -> bool {
        let all = first..first + (bytes.len() as u64).div_ceil(stillpoint_image::PAGE);
        self.of_pages(all).zip(page_sums(bytes)).all(|(word, sum)| word == KNOWN | u64::from(sum))
    }

    fn of_pages(&self, pages: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        self.0[pages.start as usize..pages.end as usize].iter().map(|word| word.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::Sums;

    #[test]
    fn only_what_was_noted_fits() {
        let sums = Sums::of(8);
        let bytes: Vec<u8> = (0..3 * 4096).map(|i| (i / 7) as u8).collect();
        assert!(!sums.are_known(2..5) && !sums.fit(2, &bytes));
        sums.note(2, &bytes);
        assert!(sums.are_known(2..5) && !sums.are_known(1..5) && !sums.are_known(2..6));
        assert!(sums.fit(2, &bytes) && sums.fit(3, &bytes[4096..8192]) && !sums.fit(3, &bytes[..8192]));
        let mut other = bytes.clone();
        other[9000] ^= 1;
        assert!(!sums.fit(2, &other));
        // Of zeros, too, it is known whether they are.
        sums.note(0, &[0; 4096]);
        assert!(sums.fit(0, &[0; 4096]) && !sums.fit(1, &[0; 4096]));
    }
}
