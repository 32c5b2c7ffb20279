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

    /// Adds extents in ascending order, over whatever was there.
    pub fn put_all(&mut self, extents: &[Extent]) {
        self.log.extend(extents.iter().map(|&extent| Layer { extent, hole: false }));
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

    /// Makes all pages of an owner those of another one, whatever that had before. Rows are others afterwards.
    pub fn give(&mut self, from: Owner, to: Owner) {
        self.log.retain(|layer| layer.extent.owner != to);
        let given = self.log.iter_mut().filter(|layer| layer.extent.owner == from);
        given.for_each(|layer| layer.extent.owner = to);
    }

    /// Forgets all pages of an owner. Rows are others afterwards.
    pub fn forget(&mut self, owner: Owner) {
        self.log.retain(|layer| layer.extent.owner != owner);
        self.kept.remove(&owner);
    }

    /// All extents, also those that are covered by others.
    pub fn extents(&self) -> impl Iterator<Item = &Extent> {
        self.log.iter().map(|layer| &layer.extent)
    }

    /// Of an owner's pages, only those in these ranges (ascending) will be in the result.
    pub fn keep_only(&mut self, owner: Owner, ranges: Vec<Range>) {
        self.kept.insert(owner, ranges);
    }

    /// Lays all over each other, of which nothing may be changed any more. More may be put over the result.
    pub fn settle(&mut self) {
        let log = std::mem::take(&mut self.log);
        let map = Layers { log, kept: BTreeMap::new() }.flatten_all();
        self.put_all(&map.extents);
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

    /// The log is a few ascending runs, one for each time that memory was gone through: of two neighbours, the later one
    /// is laid over the earlier one until one is left.
    fn flatten_all(self) -> PageMap {
        let mut runs = runs(self.log);
        while runs.len() > 1 {
            let mut halved = Vec::with_capacity(runs.len().div_ceil(2));
            let mut rest = runs.into_iter();
            while let Some(below) = rest.next() {
                halved.push(match rest.next() {
                    Some(above) => lay_over(below, above),
                    None => below,
                });
            }
            runs = halved;
        }
        PageMap { extents: runs.into_iter().flatten().filter(|l| !l.hole).map(|l| l.extent).collect() }
    }
}

/// Ascending layers that do not overlap.
type Run = Vec<Layer>;

fn runs(log: Vec<Layer>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for layer in log {
        match runs.last_mut() {
            Some(run) if run.last().is_some_and(|l| ends_before(&l.extent, &layer.extent)) => run.push(layer),
            _ => runs.push(vec![layer]),
        }
    }
    runs
}

fn ends_before(a: &Extent, b: &Extent) -> bool {
    a.owner < b.owner || (a.owner == b.owner && a.end() <= b.address)
}

/// Both runs as one: where they overlap, what is above counts.
fn lay_over(below: Run, above: Run) -> Run {
    let mut all = Vec::with_capacity(below.len() + above.len());
    let mut below = below.into_iter();
    let mut current = below.next();
    for top in above {
        let over = top.extent;
        while let Some(layer) = current.filter(|layer| !ends_before(&over, &layer.extent)) {
            let extent = layer.extent;
            if ends_before(&extent, &over) {
                all.push(layer);
            } else if extent.address < over.address {
                all.push(Layer { extent: extent.part(extent.address, over.address), ..layer });
            }
            if !ends_before(&extent, &over) && extent.end() > over.end() {
                current = Some(Layer { extent: extent.part(over.end(), extent.end()), ..layer });
                break;
            }
            current = below.next();
        }
        all.push(top);
    }
    all.extend(current);
    all.extend(below);
    all
}

/// The parts of extents (ascending) that lie in the ranges kept of their owner.
fn kept_parts(extents: &[Extent], kept: &BTreeMap<Owner, Vec<Range>>) -> Vec<Extent> {
    let mut parts = Vec::with_capacity(extents.len());
    for extent in extents {
        let Some(ranges) = kept.get(&extent.owner) else {
            parts.push(*extent);
            continue;
        };
        parts.extend(extent.parts_in(ranges));
    }
    parts
}
