//! The page map of a checkpoint under construction: what was put later covers what was put earlier.

use std::collections::BTreeMap;
use stillpoint_image::{Extent, Owner, PAGE, PageMap, Place, Range};

/// What happened to a run of pages.
#[derive(Clone, Copy, Debug)]
struct Layer {
    extent: Extent,
    /// The pages are in no extent of the result; `extent.place` means nothing.
    hole: bool,
}

/// Extents and holes in the order they were put.
#[derive(Debug, Default)]
pub(crate) struct Layers {
    log: Vec<Layer>,
    /// Of these owners, only these ranges (ascending) count.
    kept: BTreeMap<Owner, Vec<Range>>,
}

impl Layers {
    /// Adds an extent, over whatever was there; returns its row.
    pub fn put(&mut self, extent: Extent) -> usize {
        self.log.push(Layer { extent, hole: false });
        self.log.len() - 1
    }

    /// Adds zero pages or a hole, joined to the row before where it continues that.
    pub fn put_empty(&mut self, owner: Owner, address: u64, pages: u32, hole: bool) {
        if let Some(Layer { extent: last, hole: before }) = self.log.last_mut() {
            let joins = last.owner == owner && last.end() == address && last.place == Place::Zero;
            if joins && *before == hole && last.pages.checked_add(pages).is_some() {
                last.pages += pages;
                return;
            }
        }
        self.log.push(Layer { extent: Extent { owner, address, pages, place: Place::Zero }, hole });
    }

    /// The extent of a row, if it is the last one.
    pub fn last(&self, row: usize) -> Option<&Extent> {
        self.log.last().filter(|_| row + 1 == self.log.len()).map(|layer| &layer.extent)
    }

    /// Makes the extent of a row, stored and the last one so far, longer.
    pub fn extend(&mut self, row: usize, more: u16) {
        let extent = &mut self.log[row].extent;
        extent.pages += u32::from(more);
        if let Place::Stored { length, block_pages, .. } = &mut extent.place {
            *block_pages += more;
            *length += u32::from(more) * PAGE as u32;
        }
    }

    /// Fills in the checksum of a row, which is known only when the block is written.
    pub fn seal(&mut self, row: usize, checksum: u32) {
        if let Place::Stored { crc, .. } = &mut self.log[row].extent.place {
            *crc = checksum;
        }
    }

    /// Of an owner's pages, only those in these ranges (ascending) will be in the result.
    pub fn keep_only(&mut self, owner: Owner, ranges: Vec<Range>) {
        self.kept.insert(owner, ranges);
    }

    /// The page map: of overlapping layers the last one counts.
    pub fn flatten(mut self) -> PageMap {
        let kept = std::mem::take(&mut self.kept);
        let mut map = self.flatten_all();
        if !kept.is_empty() {
            map.extents = kept_parts(&map.extents, &kept);
        }
        map
    }

    fn flatten_all(mut self) -> PageMap {
        if !self.log.is_sorted_by_key(|layer| (layer.extent.owner, layer.extent.address)) {
            if self.overlap_when_sorted() {
                return self.overlay();
            }
            self.log.sort_by_key(|layer| (layer.extent.owner, layer.extent.address));
        }
        if overlap(self.log.iter().map(|layer| &layer.extent)) {
            return self.overlay();
        }
        PageMap { extents: self.log.into_iter().filter(|l| !l.hole).map(|l| l.extent).collect() }
    }

    fn overlap_when_sorted(&self) -> bool {
        let mut sorted: Vec<&Extent> = self.log.iter().map(|layer| &layer.extent).collect();
        sorted.sort_by_key(|extent| (extent.owner, extent.address));
        overlap(sorted.into_iter())
    }

    fn overlay(self) -> PageMap {
        let mut map: BTreeMap<(Owner, u64), Layer> = BTreeMap::new();
        for layer in self.log {
            cut(&mut map, &layer.extent);
            map.insert((layer.extent.owner, layer.extent.address), layer);
        }
        PageMap { extents: map.into_values().filter(|l| !l.hole).map(|l| l.extent).collect() }
    }
}

/// The parts of extents (ascending) that lie in the ranges kept of their owner.
fn kept_parts(extents: &[Extent], kept: &BTreeMap<Owner, Vec<Range>>) -> Vec<Extent> {
    let mut parts = Vec::with_capacity(extents.len());
    for extent in extents {
        let Some(ranges) = kept.get(&extent.owner) else {
            parts.push(*extent);
            continue;
        };
        let first = ranges.partition_point(|r| r.end() <= extent.address);
        for range in ranges[first..].iter().take_while(|r| r.start < extent.end()) {
            parts.push(extent.part(range.start.max(extent.address), range.end().min(extent.end())));
        }
    }
    parts
}

fn overlap<'e>(extents: impl Iterator<Item = &'e Extent>) -> bool {
    let mut last: Option<&Extent> = None;
    for extent in extents {
        if last.is_some_and(|l| l.owner == extent.owner && l.end() > extent.address) {
            return true;
        }
        last = Some(extent);
    }
    false
}

/// Takes the pages of `over` out of the map.
fn cut(map: &mut BTreeMap<(Owner, u64), Layer>, over: &Extent) {
    let (owner, from, to) = (over.owner, over.address, over.end());
    let before = map.range(..(owner, from)).next_back().map(|(key, layer)| (*key, *layer));
    let inside = map.range((owner, from)..(owner, to)).map(|(key, layer)| (*key, *layer));
    let touched: Vec<_> = before.into_iter().chain(inside).collect();
    for (key, layer) in touched {
        let extent = layer.extent;
        if extent.owner != owner || extent.end() <= from {
            continue;
        }
        map.remove(&key);
        if extent.address < from {
            map.insert(key, Layer { extent: extent.part(extent.address, from), ..layer });
        }
        if extent.end() > to {
            map.insert((owner, to), Layer { extent: extent.part(to, extent.end()), ..layer });
        }
    }
}
