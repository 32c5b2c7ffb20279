//! Which pages are there before the program runs, and which come later.

use super::placement::{Piece, Placement};
use crate::loader::block;
use stillpoint_image::{AddressSpace, Backing, Extent, Mapping, MappingFlags, PAGE, Process, Range};

/// Of a thread's stack so much is there before it runs, bytes above its stack pointer …
const STACK_ABOVE: u64 = 64 << 10;
/// … and below it, with the red zone.
const STACK_BELOW: u64 = PAGE;

/// The pages of an address space, in two parts.
#[derive(Debug, Default)]
pub struct Plan {
    /// What must be there before the program runs …
    pub first: Vec<Extent>,
    /// … and so must this, of the mappings that wait for pages.
    pub touch: Vec<Extent>,
    /// What comes later, ascending by address.
    pub later: Vec<Extent>,
    /// Number of pages of `later` before each of its extents, and of all.
    before: Vec<u64>,
    /// The mappings that hold `later`, ascending.
    pub mappings: Vec<Range>,
}

impl Plan {
    /// Pages of anonymous memory come later, besides those that the kernel itself touches where it cannot wait, and those
    /// that are sure to be wanted at once.
    pub fn lazy(space: &AddressSpace, process: &Process, extents: &[Extent]) -> Self {
        Self::of(space, process, extents, |_| true)
    }

    /// The same for a program whose memory is paged: what never leaves it is there from the beginning.
    pub fn paged(space: &AddressSpace, process: &Process, extents: &[Extent]) -> Self {
        Self::of(space, process, extents, can_leave)
    }

    fn of(
        space: &AddressSpace,
        process: &Process,
        extents: &[Extent],
        may_wait: impl Fn(&Mapping) -> bool,
    ) -> Self {
        let wanted = wanted(process);
        let mut plan = Plan { before: vec![0], ..Plan::default() };
        let mut rest = extents;
        for mapping in &space.mappings {
            let (_, from) = rest.split_at(rest.partition_point(|e| e.end() <= mapping.start));
            let (inside, later) = from.split_at(from.partition_point(|e| e.address < mapping.end));
            // An extent may go on in the next mapping.
            rest = if inside.last().is_some_and(|e| e.end() > mapping.end) {
                &from[inside.len() - 1..]
            } else {
                later
            };
            let parts = inside.iter().map(|e| e.part(e.address.max(mapping.start), e.end().min(mapping.end)));
            if !can_wait(mapping, space) || !may_wait(mapping) {
                plan.first.extend(parts);
                continue;
            }
            let had = plan.later.len();
            let touched = plan.touch.len();
            let mut parts = parts.peekable();
            if loses_account(mapping)
                && let Some(part) = parts.peek_mut()
            {
                plan.touch.push(part.part(part.address, part.address + PAGE));
                match part.pages {
                    1 => drop(parts.next()),
                    _ => *part = part.part(part.address + PAGE, part.end()),
                }
            }
            parts.for_each(|part| plan.divide(part, &wanted));
            if plan.later.len() == had {
                let touched: Vec<Extent> = plan.touch.drain(touched..).collect();
                plan.first.extend(touched);
            } else {
                plan.mappings.push(Range { start: mapping.start, len: mapping.len() });
            }
        }
        plan
    }

    /// Cuts out of an extent what is wanted first.
    fn divide(&mut self, extent: Extent, wanted: &[Range]) {
        let mut at = extent.address;
        let first = wanted.partition_point(|r| r.end() <= at);
        for range in wanted[first..].iter().take_while(|r| r.start < extent.end()) {
            let (from, to) = (range.start.max(at), range.end().min(extent.end()));
            self.push_later(extent, at, from);
            self.touch.push(extent.part(from, to));
            at = to;
        }
        self.push_later(extent, at, extent.end());
    }

    fn push_later(&mut self, extent: Extent, from: u64, to: u64) {
        if from < to {
            let before = self.before.last().copied().unwrap_or(0);
            self.later.push(extent.part(from, to));
            self.before.push(before + (to - from) / PAGE);
        }
    }

    /// The extents that come later, in the order in which they are stored.
    pub fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.later.len()).collect();
        order.sort_by_key(|&i| block(&self.later[i]));
        order
    }

    /// Pages that come later.
    pub fn pages(&self) -> u64 {
        self.before.last().copied().unwrap_or(0)
    }

    /// Number, among all pages that come later, of the one at an address of extent `index`, or of the one behind its last.
    pub fn page(&self, index: usize, address: u64) -> u64 {
        self.before[index] + (address - self.later[index].address) / PAGE
    }

    /// Where the pages are at first.
    pub fn placement(&self) -> Placement {
        Placement::new(self.mappings.iter().map(|m| Piece { then: m.start, now: m.start, len: m.len }))
    }

    /// The extent that holds an address.
    pub fn extent_at(&self, address: u64) -> Option<usize> {
        let after = self.later.partition_point(|e| e.address <= address);
        let index = after.checked_sub(1)?;
        (address < self.later[index].end()).then_some(index)
    }

    /// The extents that reach into `[from, to)`.
    pub fn extents_in(&self, from: u64, to: u64) -> std::ops::Range<usize> {
        let first = self.later.partition_point(|e| e.end() <= from);
        first..self.later.partition_point(|e| e.address < to).max(first)
    }
}

/// Whether pages of a mapping can be put in while the program runs. What is shared may be read by others, who do not
/// wait; what is locked was promised to be there; what is wiped in children (`MADV_WIPEONFORK`) would come to them, too, if it were
/// missing when they are made.
fn can_wait(mapping: &Mapping, space: &AddressSpace) -> bool {
    let not = MappingFlags::LOCKED
        | MappingFlags::LOCK_ON_FAULT
        | MappingFlags::DROPPABLE
        | MappingFlags::SEALED
        | MappingFlags::WIPE_ON_FORK;
    mapping.backing == Backing::Anonymous
        && !mapping.shared
        && mapping.huge_page == 0
        && !mapping.flags.intersects(not)
        && space.lock_future == 0
}

/// Whether pages of a mapping that can wait may also be taken out of a program that runs: not those of its main stack, where calls are
/// made in it, nor those of its code.
fn can_leave(mapping: &Mapping) -> bool {
    const BOTH: u32 = (libc::PROT_READ | libc::PROT_WRITE) as u32;
    mapping.prot == BOTH && !mapping.flags.contains(MappingFlags::GROWS_DOWN)
}

/// Whether the kernel would forget that a mapping was writable once, in its account of committed memory, if it lost that
/// protection before it has any page.
fn loses_account(mapping: &Mapping) -> bool {
    mapping.flags.contains(MappingFlags::ACCOUNTED) && mapping.prot & libc::PROT_WRITE as u32 == 0
}

/// What is touched at once, or by the kernel when a thread ends, which does not wait for anybody then: ascending ranges
/// of whole pages that do not touch.
fn wanted(process: &Process) -> Vec<Range> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for thread in &process.threads {
        let around = |at: u64, below: u64, above: u64| (at.saturating_sub(below), at.saturating_add(above));
        if let Some(regs) = stillpoint_linux::arch::Regs::from_bytes(&thread.regs.0) {
            ranges.push(around(regs.sp(), STACK_BELOW, STACK_ABOVE));
            ranges.push(around(regs.thread_pointer(), PAGE, PAGE));
            let call = thread.blocked.map_or(regs.orig_rax, |call| call.nr);
            if call == libc::SYS_futex as u64 {
                // Where the kernel itself writes to the word (locks that inherit priorities), it does not wait but fails.
                let [word, _, _, _, other, _] = regs.call_args();
                ranges.extend([around(word, 0, 4), around(other, 0, 4)]);
            }
        }
        ranges.push(around(thread.clear_child_tid, 0, 4));
        ranges.push(around(thread.robust_list.start, 0, thread.robust_list.len));
        ranges.extend(thread.rseq.map(|rseq| around(rseq.address, 0, u64::from(rseq.size))));
    }
    let pages = |(from, to): (u64, u64)| (from / PAGE * PAGE, to.min(u64::MAX - PAGE).next_multiple_of(PAGE));
    let mut ranges: Vec<_> =
        ranges.into_iter().map(pages).filter(|(from, to)| *from > 0 && from < to).collect();
    ranges.sort_unstable();
    let mut joined: Vec<Range> = Vec::new();
    for (from, to) in ranges {
        match joined.last_mut() {
            Some(last) if last.end() >= from => last.len = last.len.max(to - last.start),
            _ => joined.push(Range { start: from, len: to - from }),
        }
    }
    joined
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stillpoint_image::{Owner, Place, Thread};
    use stillpoint_linux::arch::Regs;

    fn mapping(start: u64, end: u64, flags: MappingFlags) -> Mapping {
        let (prot, backing) = (3, Backing::Anonymous);
        let (pkey, huge_page, guards, name) = (0, 0, Vec::new(), None);
        Mapping { start, end, prot, shared: false, backing, flags, pkey, huge_page, guards, name }
    }

    fn extent(address: u64, pages: u32) -> Extent {
        Extent { owner: Owner::Space(0), address, pages, place: Place::Zero }
    }

    #[test]
    fn the_word_that_a_thread_waits_for_is_there() {
        let (word, other) = ((1 << 20) + 3 * PAGE + 8, (1 << 20) + 9 * PAGE);
        let first_of = |nr: i64| {
            let regs = Regs { orig_rax: nr as u64, rdi: word, r8: other, ..Regs::default() };
            let thread = Thread { regs: regs.to_bytes().into(), ..Thread::default() };
            let process = Process { threads: vec![thread], ..Process::default() };
            let mappings = vec![mapping(1 << 20, (1 << 20) + 16 * PAGE, MappingFlags::empty())];
            let space = AddressSpace { mappings, ..AddressSpace::default() };
            let plan = Plan::lazy(&space, &process, &[extent(1 << 20, 16)]);
            plan.touch.iter().map(|e| (e.address, e.pages)).collect::<Vec<_>>()
        };
        assert_eq!(first_of(libc::SYS_futex), [(word - 8, 1), (other, 1)]);
        assert_eq!(first_of(libc::SYS_pause), []);
    }

    proptest! {
        /// Every page is in one of the two parts, once; what must be there first is; and pages are found again.
        #[test]
        fn each_page_has_its_place(
            runs in prop::collection::vec((0u64..3, 1u32..6), 1..20),
            cuts in prop::collection::vec((1u64..9, any::<bool>()), 1..12),
            head in 0u64..90,
        ) {
            let mut at = 1 << 20;
            let extents: Vec<Extent> = runs.iter().map(|&(gap, pages)| {
                let extent = extent(at + gap * PAGE, pages);
                at = extent.end();
                extent
            }).collect();
            let mut start = 1 << 20;
            let mut mappings = Vec::new();
            for &(pages, locked) in cuts.iter().cycle().take(200) {
                let flags = if locked { MappingFlags::LOCKED } else { MappingFlags::empty() };
                mappings.push(mapping(start, start + pages * PAGE, flags));
                start += pages * PAGE;
            }
            let robust_list = Range { start: (1 << 20) + head * PAGE + 8, len: 24 };
            let process = Process { threads: vec![Thread { robust_list, ..Thread::default() }], ..Process::default() };
            let space = AddressSpace { mappings, ..AddressSpace::default() };
            let plan = Plan::lazy(&space, &process, &extents);
            let pages = |extents: &[Extent]| -> Vec<u64> {
                extents.iter().flat_map(|e| (e.address..e.end()).step_by(PAGE as usize)).collect()
            };
            let mut both = [pages(&plan.first), pages(&plan.touch), pages(&plan.later)].concat();
            both.sort_unstable();
            prop_assert_eq!(both, pages(&extents));
            let of = |page: u64| space.mappings.iter().find(|m| m.start <= page && page < m.end).unwrap();
            for (number, page) in pages(&plan.later).into_iter().enumerate() {
                prop_assert!(of(page).flags.is_empty() && page != robust_list.start - 8);
                let index = plan.extent_at(page).unwrap();
                let found = plan.page(index, page);
                prop_assert_eq!(found, number as u64);
                prop_assert!(plan.extents_in(page, page + PAGE).eq(index..index + 1));
                prop_assert!(plan.mappings.iter().any(|m| m.start <= page && page < m.end()));
            }
            let waits = |page| plan.mappings.iter().any(|m| m.start <= page && page < m.end());
            for page in pages(&plan.first) {
                prop_assert!(!of(page).flags.is_empty() || page == robust_list.start - 8);
                prop_assert!(plan.extent_at(page).is_none() && !waits(page));
            }
            prop_assert!(pages(&plan.touch).into_iter().all(|p| p == robust_list.start - 8 && waits(p)));
        }
    }
}
