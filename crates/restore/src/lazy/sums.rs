//! Checksums of pages whose blocks were read and checked: such a page can be read alone, and checked, the next time.

use std::ops::Range;
use std::sync::OnceLock;
use stillpoint_image::PAGE;
use stillpoint_store::page_sums;

/// The checksums of the pages of each extent that was read.
pub struct Sums(Vec<OnceLock<Box<[u32]>>>);

impl Sums {
    /// Of so many extents none was.
    pub fn of(extents: usize) -> Self {
        Sums((0..extents).map(|_| OnceLock::new()).collect())
    }

    /// Notes those of an extent, whose checked contents these are.
    pub fn note(&self, extent: usize, bytes: &[u8]) {
        let _ = self.0[extent].get_or_init(|| page_sums(bytes).collect());
    }

    /// Whether those of an extent are known.
    pub fn are_known(&self, extent: usize) -> bool {
        self.0[extent].get().is_some()
    }

    /// Whether these are the contents of those pages of an extent, as far as is known.
    pub fn fit(&self, extent: usize, pages: Range<usize>, bytes: &[u8]) -> bool {
        let known = self.0[extent].get().and_then(|sums| sums.get(pages.clone()));
        bytes.len() == pages.len() * PAGE as usize
            && known.is_some_and(|sums| page_sums(bytes).eq(sums.iter().copied()))
    }
}

#[cfg(test)]
mod tests {
    use super::Sums;

    #[test]
    fn only_what_was_noted_fits() {
        let sums = Sums::of(2);
        let bytes: Vec<u8> = (0..3 * 4096).map(|i| (i / 7) as u8).collect();
        assert!(!sums.are_known(1) && !sums.fit(1, 0..3, &bytes));
        sums.note(1, &bytes);
        assert!(sums.are_known(1) && !sums.are_known(0) && !sums.fit(0, 0..3, &bytes));
        assert!(sums.fit(1, 0..3, &bytes) && sums.fit(1, 1..2, &bytes[4096..8192]));
        assert!(
            !sums.fit(1, 1..3, &bytes[..8192])
                && !sums.fit(1, 0..2, &bytes[..4096])
                && !sums.fit(1, 2..4, &bytes[4096..])
        );
        let mut other = bytes.clone();
        other[9000] ^= 1;
        assert!(!sums.fit(1, 0..3, &other));
    }
}
