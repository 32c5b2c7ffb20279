//! An allocator whose tables are in the region and mirrored like everything else.
//!
//! ```text
//! page 0          header: root, lists of free blocks by size class, lists of free runs of pages by size
//! then            a word for each page: part of a slab of a class, first page of a large block, first or last of a free run
//! then            slabs and large blocks
//! ```
//!
//! An operation is one section: a cut has all of it or nothing.
#![allow(unsafe_code)]

use crate::barrier::Section;
use crate::layout::{PAGE, Span};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Size classes: steps of 16 bytes up to 128, then four for each doubling up to 32 KiB.
const CLASSES: usize = 8 + 4 * 8;
const BINS: usize = 28;
/// Least region: header, table and some pages.
pub const LEAST: usize = 64 << 10;

/// Whether there is one thread that allocates, so that no lock is needed. Said by compiled programs, which announce threads.
pub static ALONE: AtomicBool = AtomicBool::new(false);

#[repr(C)]
struct Header {
    root: u64,
    /// First page that was never used, by number.
    fresh: u64,
    free: [u64; CLASSES],
    /// What is left of a slab: next block and end.
    open: [[u64; 2]; CLASSES],
    runs: [u64; BINS],
}
const _: () = assert!(size_of::<Header>() <= PAGE);

const SLAB: u32 = 1;
const LARGE: u32 = 2;
const FREE: u32 = 3;
const FREE_END: u32 = 4;

/// The allocator of a region. It has no state outside of the region but its lock.
pub struct Heap {
    span: Span,
    lock: Mutex<()>,
}

fn class_of(size: usize) -> usize {
    if size <= 128 {
        return size.max(1).div_ceil(16) - 1;
    }
    let top = (size - 1).ilog2() as usize; // 7 for 129..=256
    8 + (top - 7) * 4 + (((size - 1) >> (top - 2)) & 3)
}

fn size_of_class(class: usize) -> usize {
    if class < 8 {
        return 16 * (class + 1);
    }
    let (top, step) = ((class - 8) / 4 + 7, (class - 8) % 4);
    (1 << top) + ((step + 1) << (top - 2))
}

const LARGEST_SMALL: usize = 32 << 10;

fn slab_pages(size: usize) -> usize {
    (8 * size).div_ceil(PAGE).clamp(1, 16)
}

/// One operation: reads the primary, stores into both.
struct Change {
    section: Section,
}

impl Change {
    /// # Safety
    /// An aligned word of the region.
    #[inline(always)]
    unsafe fn get<T: Copy>(&self, at: usize) -> T {
        // SAFETY: as the caller promises.
        unsafe { (at as *const T).read() }
    }

    /// # Safety
    /// As [`Change::get`].
    #[inline(always)]
    unsafe fn put<T: Copy>(&self, at: usize, value: T) {
        // SAFETY: as the caller promises.
        unsafe {
            let delta = self.section.delta(at, size_of::<T>());
            (at as *mut T).write_volatile(value);
            ((at + delta) as *mut T).write_volatile(value);
        }
    }
}

macro_rules! field {
    ($heap:expr, $($path:tt)*) => { $heap.span.base + std::mem::offset_of!(Header, $($path)*) };
}

impl Heap {
    /// Of a region, which is zeros or was recovered.
    pub fn new(span: Span) -> Self {
        Heap { span, lock: Mutex::new(()) }
    }

    /// Sets up a region of zeros.
    ///
    /// # Safety
    /// The region is mapped, and nobody uses it.
    pub unsafe fn format(&self) {
        let change = Change { section: Section::enter() };
        let first = 1 + (self.span.len / PAGE * 4).div_ceil(PAGE);
        // SAFETY: a word of the header.
        unsafe { change.put(field!(self, fresh), first as u64) };
    }

    fn locked(&self) -> Option<MutexGuard<'_, ()>> {
        match ALONE.load(Ordering::Relaxed) {
            true => None,
            false => Some(self.lock.lock().unwrap_or_else(|e| e.into_inner())),
        }
    }

    /// The lock, to be held over `fork`.
    pub fn hold(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether an address is in the region.
    #[inline]
    pub fn holds(&self, address: usize) -> bool {
        address.wrapping_sub(self.span.base) < self.span.len
    }

    /// The word by which a program finds its data again.
    pub fn root(&self) -> usize {
        // SAFETY: the header is mapped.
        unsafe { (field!(self, root) as *const u64).read_volatile() as usize }
    }

    /// Sets it.
    pub fn set_root(&self, root: usize) {
        let change = Change { section: Section::enter() };
        // SAFETY: a word of the header.
        unsafe { change.put(field!(self, root), root as u64) };
    }

    fn entry_at(&self, page: usize) -> usize {
        self.span.base + PAGE + 4 * page
    }

    fn page_of(&self, address: usize) -> usize {
        (address - self.span.base) / PAGE
    }

    fn address_of(&self, page: usize) -> usize {
        self.span.base + page * PAGE
    }

    /// Memory of a size, aligned to 16 bytes or to `align`; its contents are whatever was there. `None` if there is no room.
    #[inline]
    pub fn alloc(&self, size: usize, align: usize) -> Option<usize> {
        if !align.is_power_of_two() || size > self.span.len || align > self.span.len {
            return None;
        }
        // Slabs begin at pages: blocks of a power of two are aligned to it.
        let size = match align > 16 && size <= LARGEST_SMALL && align <= PAGE {
            true => size.max(align).next_power_of_two(),
            false => size,
        };
        let _lock = self.locked();
        let change = Change { section: Section::enter() };
        // SAFETY: under the lock, in a mapped region whose tables only this file changes.
        unsafe {
            match size <= LARGEST_SMALL && align <= PAGE {
                true => self.alloc_small(&change, class_of(size)),
                false => self.alloc_large(&change, size.div_ceil(PAGE), align.div_ceil(PAGE)),
            }
        }
    }

    /// # Safety
    /// Under the lock.
    #[inline]
    unsafe fn alloc_small(&self, change: &Change, class: usize) -> Option<usize> {
        let list = field!(self, free) + 8 * class;
        // SAFETY: words of the header and of free blocks.
        unsafe {
            let block: u64 = change.get(list);
            if block != 0 {
                change.put(list, change.get::<u64>(block as usize));
                return Some(block as usize);
            }
            let open = field!(self, open) + 16 * class;
            let size = size_of_class(class);
            let (mut next, mut end): (u64, u64) = (change.get(open), change.get(open + 8));
            if next + size as u64 > end {
                let pages = slab_pages(size);
                let slab = self.take_run(change, pages)?;
                for page in self.page_of(slab)..self.page_of(slab) + pages {
                    change.put(self.entry_at(page), (class as u32) << 3 | SLAB);
                }
                (next, end) = (slab as u64, (slab + pages * PAGE) as u64);
                change.put(open + 8, end);
            }
            change.put(open, next + size as u64);
            Some(next as usize)
        }
    }

    /// # Safety
    /// Under the lock.
    unsafe fn alloc_large(&self, change: &Change, pages: usize, align: usize) -> Option<usize> {
        // SAFETY: as the caller promises.
        unsafe {
            let extra = if align > 1 { align } else { 0 };
            let run = self.take_run(change, pages.max(1) + extra)?;
            let at = if extra > 0 { run.next_multiple_of(align * PAGE) } else { run };
            change.put(self.entry_at(self.page_of(at)), (pages.max(1) as u32) << 3 | LARGE);
            let (before, after) = ((at - run) / PAGE, extra - (at - run) / PAGE);
            if before > 0 {
                self.give_run(change, self.page_of(run), before);
            }
            if after > 0 {
                self.give_run(change, self.page_of(at) + pages.max(1), after);
            }
            Some(at)
        }
    }

    /// Takes pages: from the smallest bin that has enough, else fresh ones.
    ///
    /// # Safety
    /// Under the lock.
    unsafe fn take_run(&self, change: &Change, pages: usize) -> Option<usize> {
        // SAFETY: words of the header, of the table, and of free pages.
        unsafe {
            for bin in pages.ilog2() as usize..BINS {
                let mut run: u64 = change.get(field!(self, runs) + 8 * bin);
                // In its own bin a run may be too short; not all of them are looked at.
                for _ in 0..32 {
                    if run == 0 {
                        break;
                    }
                    let page = self.page_of(run as usize);
                    let length = (change.get::<u32>(self.entry_at(page)) >> 3) as usize;
                    if length >= pages {
                        self.unlink(change, page, length);
                        change.put(self.entry_at(page), 0u32);
                        if length > pages {
                            self.link(change, page + pages, length - pages);
                        }
                        return Some(run as usize);
                    }
                    run = change.get(run as usize);
                }
            }
            let fresh: u64 = change.get(field!(self, fresh));
            if fresh as usize + pages > self.span.len / PAGE {
                return None;
            }
            change.put(field!(self, fresh), fresh + pages as u64);
            Some(self.address_of(fresh as usize))
        }
    }

    /// # Safety
    /// Under the lock; the pages belong to nobody.
    unsafe fn give_run(&self, change: &Change, mut page: usize, mut pages: usize) {
        // SAFETY: words of the table and of free pages.
        unsafe {
            change.put(self.entry_at(page), 0u32);
            let fresh = change.get::<u64>(field!(self, fresh)) as usize;
            let entry = |page: usize| change.get::<u32>(self.entry_at(page));
            if page + pages < fresh && entry(page + pages) & 7 == FREE {
                let length = (entry(page + pages) >> 3) as usize;
                self.unlink(change, page + pages, length);
                pages += length;
            }
            let before = entry(page - 1);
            if before & 7 == FREE_END || before == 1 << 3 | FREE {
                let length = (before >> 3) as usize;
                page -= length;
                self.unlink(change, page, length);
                pages += length;
            }
            if page + pages == fresh {
                change.put(field!(self, fresh), page as u64);
            } else {
                self.link(change, page, pages);
            }
        }
    }

    /// # Safety
    /// Under the lock; the pages belong to nobody.
    unsafe fn link(&self, change: &Change, page: usize, pages: usize) {
        let (list, run) = (field!(self, runs) + 8 * pages.ilog2() as usize, self.address_of(page));
        // SAFETY: words of the header, of the table, and of free pages.
        unsafe {
            let next: u64 = change.get(list);
            change.put(run, next);
            change.put(run + 8, 0u64);
            if next != 0 {
                change.put(next as usize + 8, run as u64);
            }
            change.put(list, run as u64);
            change.put(self.entry_at(page), (pages as u32) << 3 | FREE);
            if pages > 1 {
                change.put(self.entry_at(page + pages - 1), (pages as u32) << 3 | FREE_END);
            }
        }
    }

    /// # Safety
    /// Under the lock; a linked run.
    unsafe fn unlink(&self, change: &Change, page: usize, pages: usize) {
        let (list, run) = (field!(self, runs) + 8 * pages.ilog2() as usize, self.address_of(page));
        // SAFETY: words of the header, of the table, and of free pages.
        unsafe {
            let (next, before): (u64, u64) = (change.get(run), change.get(run + 8));
            change.put(if before == 0 { list } else { before as usize }, next);
            if next != 0 {
                change.put(next as usize + 8, before);
            }
            change.put(self.entry_at(page), 0u32);
            change.put(self.entry_at(page + pages - 1), 0u32);
        }
    }

    /// Bytes that a block has room for; `None` if there is no block at that address.
    pub fn usable(&self, address: usize) -> Option<usize> {
        if !self.holds(address) {
            return None;
        }
        // SAFETY: the table is mapped; entries of blocks that are in use do not change.
        let entry = unsafe { (self.entry_at(self.page_of(address)) as *const u32).read_volatile() };
        match entry & 7 {
            SLAB => Some(size_of_class((entry >> 3) as usize)),
            LARGE if address.is_multiple_of(PAGE) => Some((entry >> 3) as usize * PAGE),
            _ => None,
        }
    }

    /// Gives a block back. `false` if there is no block at that address.
    pub fn free(&self, address: usize) -> bool {
        if !self.holds(address) || !address.is_multiple_of(16) {
            return false;
        }
        let _lock = self.locked();
        let change = Change { section: Section::enter() };
        let page = self.page_of(address);
        // SAFETY: under the lock; words of the header, of the table, and of the block.
        unsafe {
            let entry: u32 = change.get(self.entry_at(page));
            match entry & 7 {
                SLAB => {
                    let list = field!(self, free) + 8 * (entry >> 3) as usize;
                    change.put(address, change.get::<u64>(list));
                    change.put(list, address as u64);
                }
                LARGE if address.is_multiple_of(PAGE) => self.give_run(&change, page, (entry >> 3) as usize),
                _ => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_their_sizes_and_waste_little() {
        for size in 1..=LARGEST_SMALL {
            let class = class_of(size);
            assert!(class < CLASSES, "{size}");
            assert!(size_of_class(class) >= size, "{size}");
            assert!(class == 0 || size_of_class(class - 1) < size, "{size} would fit into the class below");
        }
    }
}
