//! In which order pages travel, and how the page map tells where each is.
//!
//! Pages are numbered in the order of the page map. What several extents have in common travels once: memory that processes have
//! in common by copy on write.

use std::collections::{BTreeMap, HashMap};
use stillpoint_image::{Codec, Extent, PAGE, PageMap, Place};

/// What travels.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// The page map: what is stored is a block by itself, whose offset is the number of its first page, times the size of one.
    pub map: PageMap,
    /// Where the pages are in the store, in the order in which they travel.
    pub order: Vec<Extent>,
    /// How many there are.
    pub pages: u64,
}

/// Runs of pages of one block that have their numbers: first page in the block to number of pages and first number.
type Numbered = BTreeMap<u16, (u16, u64)>;

impl Layout {
    /// Of the pages of a checkpoint.
    pub fn of(pages: &PageMap) -> Self {
        let mut layout = Layout::default();
        let mut blocks: HashMap<(u64, u64), Numbered> = HashMap::new();
        for extent in &pages.extents {
            match extent.place {
                Place::Zero => layout.map.extents.push(*extent),
                Place::Stored { segment, offset, .. } => {
                    layout.add(extent, blocks.entry((segment, offset)).or_default());
                }
            }
        }
        layout
    }

    fn add(&mut self, extent: &Extent, numbered: &mut Numbered) {
        let Place::Stored { skip: first, .. } = extent.place else { return };
        let end = first + extent.pages as u16; // it fits its block
        let mut at = first;
        while at < end {
            let known = numbered.range(..=at).next_back().map(|(from, run)| (*from, *run));
            let (until, number) = match known {
                Some((from, (pages, number))) if at < from + pages => {
                    (end.min(from + pages), number + u64::from(at - from))
                }
                _ => {
                    let next = numbered.range(at..).next().map_or(end, |(from, _)| end.min(*from));
                    let number = self.pages;
                    numbered.insert(at, (next - at, number));
                    self.order.push(part(extent, at - first, next - first));
                    self.pages += u64::from(next - at);
                    (next, number)
                }
            };
            self.place(&part(extent, at - first, until - first), number);
            at = until;
        }
    }

    fn place(&mut self, part: &Extent, number: u64) {
        let place = Place::Stored {
            segment: 0,
            offset: number * PAGE,
            length: part.pages * PAGE as u32,
            block_pages: part.pages as u16,
            skip: 0,
            codec: Codec::Raw,
            crc: 0,
        };
        self.map.extents.push(Extent { place, ..*part });
    }
}

/// Pages `from` to `to` of an extent.
fn part(extent: &Extent, from: u16, to: u16) -> Extent {
    let at = |page: u16| extent.address + u64::from(page) * PAGE;
    extent.part(at(from), at(to))
}

/// Whether a page map that came with so many bytes of pages is such as this program writes.
pub(crate) fn is_sound(map: &PageMap, bytes: u64) -> bool {
    map.extents.iter().all(|extent| match extent.place {
        Place::Zero => true,
        Place::Stored { segment, offset, length, block_pages, skip, codec, crc } => {
            let plain = (segment, skip, codec, crc) == (0, 0, Codec::Raw, 0);
            let inside = offset.checked_add(u64::from(length)).is_some_and(|end| end <= bytes);
            plain && inside && u32::from(block_pages) == extent.pages
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_image::{Owner, validate};

    fn extent(owner: u32, page: u64, pages: u32, block: u64, block_pages: u16, skip: u16) -> Extent {
        let place = Place::Stored {
            segment: 3,
            offset: block,
            length: u32::from(block_pages) * PAGE as u32,
            block_pages,
            skip,
            codec: Codec::Raw,
            crc: 9,
        };
        Extent { owner: Owner::Space(owner), address: page * PAGE, pages, place }
    }

    #[test]
    fn what_is_in_common_travels_once() {
        let extents = vec![
            extent(0, 10, 4, 4096, 8, 2), // pages 2 to 5 of a block
            extent(0, 20, 1, 8 * 4096, 1, 0),
            extent(1, 0, 8, 4096, 8, 0), // all of it
            extent(2, 7, 3, 4096, 8, 1),
        ];
        let map = PageMap { extents };
        let layout = Layout::of(&map);
        assert_eq!(layout.pages, 9);
        assert_eq!(layout.order.iter().map(|e| u64::from(e.pages)).sum::<u64>(), 9);
        validate::page_map(&layout.map).expect("valid");
        assert!(is_sound(&layout.map, 9 * PAGE));
        assert!(!is_sound(&layout.map, 8 * PAGE));
        // Each page of the map has the number under which its contents travel.
        let pages = |map: &PageMap| -> Vec<(Owner, u64, u64, u64)> {
            let one = |e: &Extent, n: u64| {
                let Place::Stored { offset, skip, .. } = e.place else { panic!("stored") };
                (e.owner, e.address / PAGE + n, offset, u64::from(skip) + n)
            };
            map.extents
                .iter()
                .flat_map(|e| (0..u64::from(e.pages)).map(|n| one(e, n)).collect::<Vec<_>>())
                .collect()
        };
        let travels: Vec<(u64, u64)> = pages(&PageMap { extents: layout.order.clone() })
            .into_iter()
            .map(|(_, _, b, n)| (b, n))
            .collect();
        for ((owner, page, block, n), (owner_now, page_now, offset, within)) in
            pages(&map).into_iter().zip(pages(&layout.map))
        {
            assert_eq!((owner, page), (owner_now, page_now));
            assert_eq!(travels[(offset / PAGE + within) as usize], (block, n));
        }
    }
}
