//! Memory that a process has in common with its parent by copy on write: the parent has it before it makes the process.
//!
//! What is in common is told by the page maps: the same stored page at the same address. Mappings that hold such pages are
//! made, and the pages put in, before there are children, who inherit them; what a child does not have in common it drops at
//! once, and all else comes afterwards as it does for any process. What a mapping is (its protection, locks, names) is settled
//! when all is there, for each process by itself.

use crate::pace::Pace;
use crate::space::{self, Backings, Filled};
use crate::{Error, Result, loader};
use std::borrow::Cow;
use std::collections::HashMap;
use stillpoint_image::{
    AddressSpace, Backing, Extent, Image, Mapping, MappingFlags, Owner, PageMap, Place, Range,
};
use stillpoint_linux::program::{Program, Run};
use stillpoint_linux::remote::Remote;
use stillpoint_store::{Checkpoint, Reader};

/// Less than that is not worth the trouble, bytes of a process.
const LEAST: u64 = 256 << 10;

/// What processes inherit, by their rows.
pub(crate) struct Heritage<'a> {
    reader: &'a Reader,
    image: &'a Image,
    pages: &'a PageMap,
    pace: &'a Pace,
    room: u64,
    rows: Vec<Share<'a>>,
}

/// What one process inherits, and leaves.
#[derive(Debug, Default)]
struct Share<'a> {
    /// Its mappings that it inherits, and those of its parent that hold them.
    kept: Vec<(&'a Mapping, &'a Mapping)>,
    /// Pages that it has in common with its parent.
    common: Vec<Range>,
    /// Its mappings of which children inherit some.
    left: Vec<&'a Mapping>,
    /// Its pages that children have in common with it.
    lasting: Vec<Range>,
}

impl<'a> Share<'a> {
    /// The mappings that are there when it has children; some of them twice.
    fn mappings(&self) -> impl Iterator<Item = &'a Mapping> {
        self.kept.iter().map(|(own, _)| *own).chain(self.left.iter().copied())
    }

    /// The pages that are there when it has children.
    fn present(&self) -> Vec<Range> {
        Range::joined([self.common.as_slice(), &self.lasting].concat())
    }

    /// Drops what is not inherited of what the parent had when it made the process.
    fn renounce(&self, parent: &Share<'_>) -> Program {
        let mut program = Program::new();
        let kept = Range::joined(self.kept.iter().map(|(own, _)| range(own)).collect());
        let there = Range::joined(parent.mappings().map(range).collect());
        for gone in Range::without(&there, &kept) {
            program.call(
                "unmap what is not inherited",
                libc::SYS_munmap,
                [gone.start.into(), gone.len.into()],
            );
        }
        let present = parent.present();
        let inherited: Vec<Range> = kept.iter().flat_map(|kept| kept.parts_of(&present)).collect();
        for gone in Range::without(&inherited, &self.common) {
            let args = [gone.start.into(), gone.len.into(), (libc::MADV_DONTNEED as u64).into()];
            program.call("drop what is not inherited", libc::SYS_madvise, args);
        }
        program
    }
}

impl<'a> Heritage<'a> {
    /// Finds what the processes of a checkpoint have in common. `room` is that of the area for remote programs.
    pub fn of(checkpoint: &'a Checkpoint, pace: &'a Pace, room: u64) -> Self {
        let (image, pages) = (&checkpoint.image, &checkpoint.pages);
        let mut rows: Vec<Share<'a>> = image.processes.iter().map(|_| Share::default()).collect();
        // What several share is made once, by one of them.
        let mut users: HashMap<u32, usize> = HashMap::new();
        image.processes.iter().for_each(|p| *users.entry(p.space).or_default() += 1);
        let is_shared = |space: u32| users.get(&space).is_some_and(|&users| users > 1);
        let space = |row: usize| image.spaces.get(image.processes[row].space as usize);
        let mut leaves_kernels = vec![true; rows.len()];
        for (row, process) in image.processes.iter().enumerate() {
            let Some(parent) = process.parent.map(|parent| parent as usize) else { continue };
            leaves_kernels[parent] &=
                space(row).zip(space(parent)).is_some_and(|(own, theirs)| can_have_kernels_of(own, theirs));
        }
        for (row, process) in image.processes.iter().enumerate() {
            let Some(parent) = process.parent.map(|parent| parent as usize) else { continue };
            let spaces = (process.space, image.processes[parent].space);
            if is_shared(spaces.0) || is_shared(spaces.1) || !leaves_kernels[parent] {
                continue;
            }
            let (kept, common) = in_common(image, pages, spaces);
            if common.iter().map(|r| r.len).sum::<u64>() < LEAST {
                continue;
            }
            rows[parent].left.extend(kept.iter().map(|(_, theirs)| *theirs));
            rows[parent].lasting.extend(&common);
            (rows[row].kept, rows[row].common) = (kept, common);
        }
        for share in &mut rows {
            share.left.sort_by_key(|m| m.start);
            share.left.dedup_by_key(|m| m.start);
            share.lasting = Range::joined(std::mem::take(&mut share.lasting));
        }
        Heritage { reader: &checkpoint.reader, image, pages, pace, room, rows }
    }

    /// Whether anybody inherits anything.
    pub fn is_any(&self) -> bool {
        self.rows.iter().any(|share| !share.left.is_empty())
    }

    /// To be done in a process that was just made: what it does not inherit goes.
    pub fn renounce(&self, row: usize, remote: &mut Remote<'_>) -> Result<()> {
        if let Some(parent) = self.image.processes[row].parent {
            remote.run(&self.rows[row].renounce(&self.rows[parent as usize]))?;
        }
        Ok(())
    }

    /// To be done in a process before it makes any: what children inherit comes. There must be no huge pages of it: they would have
    /// zeros beside what is put in, where the other pages are to come later.
    pub fn leave(&self, row: usize, remote: &mut Remote<'_>) -> Result<()> {
        let (share, process) = (&self.rows[row], &self.image.processes[row]);
        if share.left.is_empty() {
            return Ok(());
        }
        let space = &self.image.spaces[process.space as usize];
        let extents = self.pages.of(Owner::Space(process.space));
        space::settle(remote, space, self.room)?;
        let is_new = |m: &Mapping| {
            let is = |other: &Mapping| other.start == m.start;
            share.left.iter().any(|left| is(left)) && !share.kept.iter().any(|(kept, _)| is(kept))
        };
        space::map(remote, space, &Filled::of(self.pages, process.space), &NoBackings, &is_new)?;
        space::advise_before(remote, space, &is_new)?;
        let missing = Range::without(&share.lasting, &share.common);
        loader::load(self.reader, &within(extents, &missing), remote.memory(), self.pace, &|_| ())
    }

    /// Whether a mapping is there already when all processes are.
    pub fn has(&self, row: usize, mapping: &Mapping) -> bool {
        self.rows[row].mappings().any(|m| m.start == mapping.start)
    }

    /// The pages of a process that are not there yet when all processes are.
    pub fn rest(&self, row: usize) -> Cow<'a, [Extent]> {
        let extents = self.pages.of(Owner::Space(self.image.processes[row].space));
        let present = self.rows[row].present();
        match present.is_empty() {
            true => extents.into(),
            false => {
                let all = Range::joined(extents.iter().map(Extent::range).collect());
                within(extents, &Range::without(&all, &present)).into()
            }
        }
    }
}

/// What is inherited is anonymous.
struct NoBackings;

impl Backings for NoBackings {
    fn file(&self, _: u32, _: bool) -> Result<i32> {
        Err(Error::Failed("a mapping of a file is not inherited".into()))
    }

    fn object(&self, _: u32, _: bool) -> Result<i32> {
        Err(Error::Failed("a mapping of an object is not inherited".into()))
    }
}

type Kept<'a> = Vec<(&'a Mapping, &'a Mapping)>;

/// What a process (its address space, and that of its parent) has in common with its parent: mappings, and pages in them.
fn in_common<'a>(image: &'a Image, pages: &PageMap, (own, parent): (u32, u32)) -> (Kept<'a>, Vec<Range>) {
    let none = (Vec::new(), Vec::new());
    let (Some(ours), Some(theirs)) = (image.spaces.get(own as usize), image.spaces.get(parent as usize))
    else {
        return none;
    };
    // They are moved to their places in the parent before there are children.
    if own == parent || !kernels(ours).eq(kernels(theirs)) {
        return none;
    }
    let (mut kept, mut common) = (Vec::new(), Vec::new());
    let same = same_pages(pages.of(Owner::Space(own)), pages.of(Owner::Space(parent)));
    for mapping in ours.mappings.iter().filter(|m| can_be_inherited(m)) {
        let mut inside = range(mapping).parts_of(&same).peekable();
        let holder = theirs.mappings.partition_point(|m| m.end <= mapping.start);
        let holds = |m: &&Mapping| m.start <= mapping.start && mapping.end <= m.end;
        let holder = theirs.mappings.get(holder).filter(holds);
        let holder = holder.filter(|m| can_be_inherited(m) && is_alike(m, mapping));
        if let Some(holder) = holder.filter(|_| inside.peek().is_some()) {
            kept.push((mapping, holder));
            common.extend(inside);
        }
    }
    (kept, common)
}

/// The kernel's own mappings.
fn kernels(space: &AddressSpace) -> impl Iterator<Item = &Mapping> {
    space.mappings.iter().filter(|m| matches!(m.backing, Backing::Special(_)))
}

/// Whether one that is made of another can have all of the kernel's mappings that it is to have: they cannot be had anew.
fn can_have_kernels_of(own: &AddressSpace, parent: &AddressSpace) -> bool {
    kernels(own).all(|m| kernels(parent).any(|p| p.backing == m.backing && p.len() == m.len()))
}

fn can_be_inherited(mapping: &Mapping) -> bool {
    let others = MappingFlags::GROWS_DOWN | MappingFlags::DROPPABLE;
    mapping.backing == Backing::Anonymous
        && !mapping.shared
        && mapping.huge_page == 0
        && !mapping.flags.intersects(others)
}

/// Whether two mappings are made in the same way, and have the same advice, of which one can have another but not none again.
fn is_alike(a: &Mapping, b: &Mapping) -> bool {
    let advice = MappingFlags::HUGE_PAGE | MappingFlags::NO_HUGE_PAGE;
    let made = MappingFlags::NO_RESERVE | MappingFlags::ACCOUNTED | advice;
    a.flags & made == b.flags & made
}

/// Where two address spaces have the same stored pages at the same addresses.
fn same_pages(a: &[Extent], b: &[Extent]) -> Vec<Range> {
    let mut same: Vec<Range> = Vec::new();
    let mut others = b.iter().peekable();
    for extent in a {
        while others.next_if(|other| other.end() <= extent.address).is_some() {}
        // The last one may reach into the next extent, too.
        for other in others.clone().take_while(|other| other.address < extent.end()) {
            let (from, to) = (extent.address.max(other.address), extent.end().min(other.end()));
            let (own, theirs) = (extent.part(from, to), other.part(from, to));
            if own.place == theirs.place && own.place != Place::Zero {
                same.push(Range { start: from, len: to - from });
            }
        }
    }
    Range::joined(same)
}

fn range(mapping: &Mapping) -> Range {
    Range { start: mapping.start, len: mapping.len() }
}

/// The parts of extents that lie in ranges; both ascend.
fn within(extents: &[Extent], ranges: &[Range]) -> Vec<Extent> {
    extents.iter().flat_map(|extent| extent.parts_in(ranges)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use stillpoint_image::{Codec, PAGE};

    fn place(seed: u64) -> Place {
        let (codec, crc) = (Codec::Raw, 0);
        Place::Stored {
            segment: 1,
            offset: seed << 20,
            length: 64 << 12,
            block_pages: 64,
            skip: 0,
            codec,
            crc,
        }
    }

    /// Extents of runs: gap, length, block.
    fn extents(runs: &[(u64, u32, u64)]) -> Vec<Extent> {
        let mut at = 0;
        let owner = Owner::Space(0);
        let make = |&(gap, pages, seed): &(u64, u32, u64)| {
            let address = at + gap * PAGE;
            at = address + u64::from(pages) * PAGE;
            Extent { owner, address, pages, place: place(seed) }
        };
        runs.iter().map(make).collect()
    }

    fn pages(extents: &[Extent]) -> BTreeMap<u64, Place> {
        let each = |e: &Extent| {
            let e = *e;
            (e.address..e.end()).step_by(PAGE as usize).map(move |at| (at, e.part(at, at + PAGE).place))
        };
        extents.iter().flat_map(each).collect()
    }

    fn addresses(ranges: &[Range]) -> Vec<u64> {
        ranges.iter().flat_map(|r| (r.start..r.end()).step_by(PAGE as usize)).collect()
    }

    proptest! {
        #[test]
        fn what_is_in_common(
            a in prop::collection::vec((0u64..4, 1u32..9, 0u64..2), 0..12),
            b in prop::collection::vec((0u64..4, 1u32..9, 0u64..2), 0..12),
        ) {
            let (a, b) = (extents(&a), extents(&b));
            let (ours, theirs) = (pages(&a), pages(&b));
            let same = same_pages(&a, &b);
            let expected: Vec<u64> =
                ours.iter().filter(|(at, place)| theirs.get(at) == Some(place)).map(|(at, _)| *at).collect();
            prop_assert_eq!(addresses(&same), expected.clone());
            let all = Range::joined(a.iter().map(Extent::range).collect());
            let rest = Range::without(&all, &same);
            let parts = within(&a, &rest);
            prop_assert!(pages(&parts).into_iter().eq(ours.iter().filter(|(at, _)| !expected.contains(at)).map(|(a, p)| (*a, *p))));
        }
    }
}
