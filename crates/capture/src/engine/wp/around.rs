//! How many neighbours of a page are copied and released with it.

use stillpoint_image::{PAGE, Range};

/// Most pages.
const MOST: u64 = 64;
/// Places that are remembered: as many threads may each go through memory of their own.
const PLACES: usize = 8;

/// Fault-around that adapts: it grows while writes come next to where others were, and shrinks while they do not.
#[derive(Debug)]
pub(super) struct Around {
    pages: u64,
    least: u64,
    most: u64,
    places: [Range; PLACES],
    oldest: usize,
}

impl Around {
    /// From `least` pages (a power of two) on; exactly one if it is not to adapt.
    pub fn new(least: u64, adapts: bool) -> Self {
        let most = if adapts { MOST } else { least };
        let places = [Range { start: 0, len: 0 }; PLACES];
        Around { pages: least, least, most, places, oldest: 0 }
    }

    /// Pages, a power of two, of the aligned window to be released around a page that is about to be written.
    pub fn pages(&mut self, page: u64) -> u64 {
        let near = self.pages * PAGE;
        let beside = |p: &Range| p.len > 0 && page + near >= p.start && page < p.end() + near;
        let place = self.places.iter().position(beside);
        self.pages = match place {
            Some(_) => (self.pages * 2).min(self.most),
            None => (self.pages / 2).max(self.least),
        };
        let window = self.pages * PAGE;
        let place = place.unwrap_or_else(|| {
            self.oldest = (self.oldest + 1) % PLACES;
            self.oldest
        });
        self.places[place] = Range { start: page - page % window, len: window };
        self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_along_a_path_and_shrinks_at_random() {
        let mut around = Around::new(1, true);
        let (mut at, mut faults) = (1 << 30, 0);
        while at < (1 << 30) + 1024 * PAGE {
            let pages = around.pages(at);
            at = at - at % (pages * PAGE) + pages * PAGE;
            faults += 1;
        }
        assert!(faults < 30, "{faults}");
        for i in 0..20 {
            around.pages((i * 7919 % 65536) * 300 * PAGE);
        }
        assert_eq!(around.pages(5 << 40), 1);
        assert_eq!(Around::new(1, false).pages(4096), 1);
    }
}
