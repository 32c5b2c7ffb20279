//! What programs waited for: the next touch set.

use std::collections::HashMap;
use stillpoint_image::{Extent, PAGE, Range};

/// Pages that are put in together where one is waited for: so much is known to be wanted.
const AROUND: u64 = 2;

/// What programs waited for.
#[derive(Debug, Default)]
pub struct Wanted {
    /// What of each extent was put in last, for each space.
    pub extents: HashMap<(usize, usize), Range>,
    /// What one program waited for, in order.
    pub runs: Vec<Range>,
    /// Of these, bytes.
    pub bytes: u64,
    /// Done away with before all was there.
    pub forgotten: Vec<Range>,
}

impl Wanted {
    /// Notes a range, unless all of them are more than so many bytes. Whether it did.
    pub fn note(&mut self, range: Range, most: u64) -> bool {
        let fits = self.bytes + range.len <= most;
        if fits {
            self.bytes += range.len;
            self.runs.push(range);
        }
        fits
    }
}

/// What is put in together with the page at an address; `last` is what was put in before of the same extent. Who goes on
/// where that ended wants more, twice as much each time.
pub fn around(extent: &Extent, page: u64, last: Option<Range>) -> Range {
    let goes_on = last.filter(|last| (last.end()..last.end() + AROUND * PAGE).contains(&page));
    let (start, len) = match goes_on {
        Some(last) => (page, 2 * last.len),
        None => (page / PAGE / AROUND * AROUND * PAGE, AROUND * PAGE),
    };
    let (from, to) = (start.max(extent.address), (start + len).min(extent.end()));
    Range { start: from, len: to - from }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stillpoint_image::{Owner, Place};

    proptest! {
        /// The page itself is always among what is put in, within the extent; who reads on gets more and more of it.
        #[test]
        fn what_is_put_in_holds_the_page(first in 1u64..100, pages in 1u32..65, asked in prop::collection::vec(0u64..64, 1..40)) {
            let extent = Extent { owner: Owner::Space(0), address: first * PAGE, pages, place: Place::Zero };
            let mut last = None;
            for page in asked.into_iter().map(|n| extent.address + n % u64::from(pages) * PAGE) {
                let now = around(&extent, page, last);
                prop_assert!(now.start <= page && page < now.end() && now.len.is_multiple_of(PAGE));
                prop_assert!(extent.address <= now.start && now.end() <= extent.end());
                last = Some(now);
            }
        }
    }

    #[test]
    fn reading_on_takes_few_waits() {
        let extent = Extent { owner: Owner::Space(0), address: 64 * PAGE, pages: 64, place: Place::Zero };
        let (mut at, mut last, mut waits) = (extent.address, None, 0);
        while at < extent.end() {
            let now = around(&extent, at, last);
            (at, last, waits) = (now.end(), Some(now), waits + 1);
        }
        assert_eq!(waits, 6); // 2, 4, 8, 16, 32 and the last 2
    }
}
