//! Where in a program's memory the pages are that a checkpoint stored: a coarse map, for the history of its job.

use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use stillpoint_image::{AddressSpace, Backing, Bytes, Extent, Image, Mapping, Owner, PAGE, PageMap, Place};

/// Cells of a map at most, so that it takes a few kilobytes.
const MOST_CELLS: u64 = 256;
/// Areas of a map at most: those with the most stored pages. One more stands for the others.
const MOST_AREAS: usize = 32;
/// Mappings of the same kind that are no further apart, bytes, are one area: guard pages between stacks are no border.
const NEAR: u64 = 1 << 20;
/// Longest name, characters.
const LONGEST_NAME: usize = 80;

/// Mappings side by side, and how many pages of them were stored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Area {
    /// `[heap]`, `[stack]`, `anonymous`, the file name of what is mapped.
    pub name: String,
    /// The process that it is of, where there are several with memory of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// First address; of memory that is mapped in several places, 0.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Pages of a cell: a power of two. Cells begin at multiples of that, and the first has the page at `start` in it.
    pub cell_pages: u64,
    /// Stored pages in each cell; what is missing at the end is 0. One cell alone may stand for areas that are not listed.
    pub cells: Vec<u32>,
}

impl Area {
    /// Stored pages in it.
    pub fn pages(&self) -> u64 {
        self.cells.iter().map(|&pages| u64::from(pages)).sum()
    }

    /// The first address of its first cell, which may be one before its own.
    pub fn first_cell(&self) -> u64 {
        let cell = self.cell_pages.max(1).saturating_mul(PAGE);
        self.start / cell * cell
    }
}

/// An area before it is known whether it is worth to be listed.
struct Candidate {
    owner: Owner,
    name: String,
    pid: Option<u32>,
    start: u64,
    end: u64,
    pages: u64,
}

/// The map of what is stored in this segment.
pub(crate) fn map(image: &Image, pages: &PageMap, segment: u64) -> Vec<Area> {
    let is_own = |e: &&Extent| matches!(e.place, Place::Stored { segment: of, .. } if of == segment);
    let stored: Vec<&Extent> = pages.extents.iter().filter(is_own).collect();
    let mut candidates = candidates(image, &stored);
    let mut counts = vec![0; candidates.len()];
    each_part(&stored, &candidates, |area, part| counts[area] += u64::from(part.pages));
    candidates.iter_mut().zip(counts).for_each(|(candidate, pages)| candidate.pages = pages);
    candidates.retain(|c| c.pages > 0);
    candidates.sort_by_key(|c| Reverse(c.pages));
    let others: u64 = candidates.iter().skip(MOST_AREAS).map(|c| c.pages).sum();
    candidates.truncate(MOST_AREAS);
    candidates.sort_by_key(|c| (c.owner, c.start));
    let all: u64 = candidates.iter().map(|c| c.end - c.start).sum();
    let mut areas: Vec<Area> = candidates.iter().map(|candidate| area(candidate, all)).collect();
    each_part(&stored, &candidates, |number, part| fill(&mut areas[number], part));
    if others > 0 {
        let cells = vec![u32::try_from(others).unwrap_or(u32::MAX)];
        areas.push(Area { name: "other mappings".into(), cells, ..Area::default() });
    }
    areas
}

/// All areas in the order of the page map.
fn candidates(image: &Image, stored: &[&Extent]) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    for (row, space) in image.spaces.iter().enumerate() {
        let owner = Owner::Space(row as u32);
        let of = image.processes.iter().find(|p| p.space as usize == row);
        let pid = of.map(|p| p.pid).filter(|_| image.spaces.len() > 1);
        for mapping in space.mappings.iter().filter(|m| !matches!(m.backing, Backing::Special(_))) {
            let name = name(image, space, mapping);
            match all
                .last_mut()
                .filter(|l| l.owner == owner && l.name == name && mapping.start <= l.end + NEAR)
            {
                Some(last) => last.end = mapping.end,
                None => {
                    let (start, end) = (mapping.start, mapping.end);
                    all.push(Candidate { owner, name, pid, start, end, pages: 0 });
                }
            }
        }
    }
    let others = |name: String, owner, end| Candidate { owner, name, pid: None, start: 0, end, pages: 0 };
    let end_of = |owner| stored.iter().rev().find(|e| e.owner == owner).map_or(0, |e| e.end());
    let objects = image.objects.iter().enumerate().map(|(row, object)| {
        let name = match (&object.memfd, &object.segment) {
            (Some(name), _) => format!("memfd {name}"),
            (None, Some(_)) => format!("System V memory {row}"),
            (None, None) => format!("shared memory {row}"),
        };
        let owner = Owner::Object(row as u32);
        others(name, owner, object.size.next_multiple_of(PAGE).max(end_of(owner)))
    });
    all.extend(objects);
    let mut files: Vec<u32> = Vec::new();
    files.extend(stored.iter().filter_map(|e| if let Owner::File(row) = e.owner { Some(row) } else { None }));
    files.dedup();
    all.extend(
        files.into_iter().map(|row| others(path(image, row), Owner::File(row), end_of(Owner::File(row)))),
    );
    all.iter_mut().for_each(|c| c.name = c.name.chars().take(LONGEST_NAME).collect());
    all
}

fn name(image: &Image, space: &AddressSpace, mapping: &Mapping) -> String {
    let layout = &space.layout;
    match &mapping.backing {
        Backing::File { path: row, .. } | Backing::Device { path: row, .. } => path(image, *row),
        Backing::Object { .. } | Backing::Segment { .. } => "shared memory".into(),
        Backing::Special(name) => name.clone(),
        Backing::Anonymous => match &mapping.name {
            Some(name) => format!("[anon:{name}]"),
            None if mapping.start.max(layout.start_brk) < mapping.end.min(layout.brk) => "[heap]".into(),
            None if (mapping.start..mapping.end).contains(&layout.start_stack) => "[stack]".into(),
            None => "anonymous".into(),
        },
    }
}

/// The file name of a path.
fn path(image: &Image, row: u32) -> String {
    let path = image.paths.get(row as usize).map_or(&[][..], |p| p.path.0.as_slice());
    let name = path.rsplit(|&b| b == b'/').next().unwrap_or_default();
    Bytes(name.to_vec()).to_string()
}

/// Tells which parts of extents lie in which areas, by number: both are in ascending order.
fn each_part(stored: &[&Extent], areas: &[Candidate], mut tell: impl FnMut(usize, Extent)) {
    let mut from = 0;
    for extent in stored {
        let is_before = |a: &Candidate| (a.owner, a.end) <= (extent.owner, extent.address);
        while areas.get(from).is_some_and(is_before) {
            from += 1;
        }
        for (number, area) in areas.iter().enumerate().skip(from) {
            if (area.owner, area.start) >= (extent.owner, extent.end()) {
                break;
            }
            let (start, end) = (extent.address.max(area.start), extent.end().min(area.end));
            if area.owner == extent.owner && start < end {
                tell(number, extent.part(start, end));
            }
        }
    }
}

/// An area with its share of the cells, all of them empty.
fn area(candidate: &Candidate, all: u64) -> Area {
    let Candidate { ref name, pid, start, end, .. } = *candidate;
    let room = MOST_CELLS - MOST_AREAS as u64;
    let share = u128::from(end - start) * u128::from(room) / u128::from(all.max(1));
    // One that begins within a cell may reach into one more; so there are room for all, and one for each area.
    let cell_pages = ((end - start) / PAGE).div_ceil((share as u64).max(1)).next_power_of_two();
    Area { name: name.clone(), pid, start, end, cell_pages, cells: Vec::new() }
}

fn fill(area: &mut Area, part: Extent) {
    let (first, size) = (area.first_cell(), area.cell_pages * PAGE);
    let mut at = part.address;
    while at < part.end() {
        let cell = (at - first) / size;
        let end = (first + (cell + 1) * size).min(part.end());
        let cell = cell as usize;
        if area.cells.len() <= cell {
            area.cells.resize(cell + 1, 0);
        }
        area.cells[cell] += ((end - at) / PAGE) as u32;
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stillpoint_image::{Codec, Layout, MappingFlags, Process};

    fn mapping(start: u64, end: u64, backing: Backing) -> Mapping {
        let (prot, shared, flags, pkey) = (3, false, MappingFlags::empty(), 0);
        Mapping {
            start,
            end,
            prot,
            shared,
            backing,
            flags,
            pkey,
            huge_page: 0,
            guards: Vec::new(),
            name: None,
        }
    }

    fn image(mappings: Vec<Mapping>) -> Image {
        let layout =
            Layout { start_brk: 0x50_0000, brk: 0x60_0000, start_stack: 0x7fff_0000, ..Layout::default() };
        let space = AddressSpace { mappings, layout, ..AddressSpace::default() };
        Image { spaces: vec![space], processes: vec![Process::default()], ..Image::default() }
    }

    fn stored(address: u64, pages: u32, segment: u64) -> Extent {
        let (offset, length, crc, block_pages, skip) = (4096, pages * 4096, 0, pages as u16, 0);
        let place = Place::Stored { segment, offset, length, crc, codec: Codec::Raw, block_pages, skip };
        Extent { owner: Owner::Space(0), address, pages, place }
    }

    #[test]
    fn areas_have_names_and_what_was_stored_of_them() {
        let image = image(vec![
            mapping(0x50_0000, 0x60_0000, Backing::Anonymous),
            mapping(0x7f00_0000, 0x7f10_0000, Backing::Anonymous),
            mapping(0x7f10_0000, 0x7f20_0000, Backing::Anonymous),
            mapping(0x7ffe_0000, 0x8000_0000, Backing::Anonymous),
        ]);
        let extents = vec![
            stored(0x50_0000, 2, 7),
            stored(0x50_3000, 1, 6),
            stored(0x7f0f_e000, 4, 7),
            stored(0x7fff_f000, 1, 7),
        ];
        let areas = map(&image, &PageMap { extents }, 7);
        let told: Vec<_> = areas.iter().map(|a| (a.name.as_str(), a.start, a.end, a.pages())).collect();
        let expected = [
            ("[heap]", 0x50_0000, 0x60_0000, 2),
            ("anonymous", 0x7f00_0000, 0x7f20_0000, 4),
            ("[stack]", 0x7ffe_0000, 0x8000_0000, 1),
        ];
        assert_eq!(told, expected);
        let cell = areas[1].cell_pages * PAGE;
        assert_eq!(areas[1].cells[(0xf_e000 / cell) as usize..].iter().sum::<u32>(), 4);
    }

    proptest! {
        #[test]
        fn every_stored_page_is_counted_and_the_map_is_small(
            sizes in prop::collection::vec((1_u64..5_000, 0_u64..3_000), 1..80),
            picks in prop::collection::vec((0_usize..80, 0_u64..5_000, 1_u32..700, prop::bool::ANY), 0..200),
        ) {
            let (mut mappings, mut at) = (Vec::new(), 0x10_0000);
            for (pages, gap) in &sizes {
                at += gap * PAGE;
                mappings.push(mapping(at, at + pages * PAGE, Backing::Anonymous));
                at += pages * PAGE;
            }
            let mut extents = Vec::new();
            for (which, page, pages, own) in picks {
                let Some(mapping) = mappings.get(which) else { continue };
                let start = mapping.start + page * PAGE;
                if start < mapping.end {
                    let pages = u64::from(pages).min((mapping.end - start) / PAGE) as u32;
                    extents.push(stored(start, pages, if own { 7 } else { 6 }));
                }
            }
            extents.sort_by_key(|e| e.address);
            let mut end = 0;
            extents.retain(|e| { let fits = e.address >= end; end = end.max(e.end()); fits });
            let all: u64 = extents.iter().filter(|e| matches!(e.place, Place::Stored { segment: 7, .. }))
                .map(|e| u64::from(e.pages)).sum();
            let areas = map(&image(mappings), &PageMap { extents }, 7);
            prop_assert_eq!(areas.iter().map(Area::pages).sum::<u64>(), all);
            prop_assert!(areas.len() <= MOST_AREAS + 1);
            prop_assert!(areas.iter().map(|a| a.cells.len() as u64).sum::<u64>() <= MOST_CELLS + 1);
            prop_assert!(areas.iter().all(|a| a.cell_pages.is_power_of_two() || a.name == "other mappings"));
        }
    }
}
