//! What a writer does: sections, stores into both copies, atomic instructions. No lock, no call, no fault, no waiting.
//!
//! `docs/mirror.md` has the argument why this makes one instant and leaves no stale word; names and steps are the same there.
#![allow(unsafe_code)]

use crate::layout::{self, ATTACHED, DETACHED, PAGE, card};
use crate::threads::{self, Words};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence};

/// Where the second store of a barrier goes: the one word that attaches and detaches the mirror.
#[unsafe(export_name = "stillpoint_mirror_offset")]
pub static OFFSET: AtomicUsize = AtomicUsize::new(DETACHED);

/// Whether atomic words are being saved: from before the mirror is detached until all are.
pub static WATCH: AtomicU8 = AtomicU8::new(0);

/// Whether the mirror is detached by remapping: then there is one writing thread, and atomic instructions are stores.
pub static REMAPS: AtomicU8 = AtomicU8::new(0);

/// How often a barrier had to note a page.
pub static NOTED: AtomicU64 = AtomicU64::new(0);

/// From reading the offset to the last store that depends on it.
pub struct Section {
    words: &'static Words,
    before: u8,
    /// What the offset was.
    pub offset: usize,
}

impl Section {
    /// Step W1 and W2: says that this thread is inside, then reads the offset.
    #[inline(always)]
    pub fn enter() -> Self {
        let words = threads::words();
        if words.registered.load(Ordering::Relaxed) == 0 {
            threads::register();
        }
        let before = words.inside.load(Ordering::Relaxed);
        words.inside.store(1, Ordering::Relaxed);
        // The processor's order is the checkpointer's business (membarrier); the compiler's is ours.
        compiler_fence(Ordering::SeqCst);
        Section { words, before, offset: OFFSET.load(Ordering::Acquire) }
    }

    /// How far from here the second store goes; 0 if there is none to be made (then the first is made twice). To be
    /// asked before the first store.
    ///
    /// # Safety
    /// The tables are mapped, and the bytes are the caller's to write.
    #[inline(always)]
    pub unsafe fn delta(&self, address: usize, len: usize) -> usize {
        // SAFETY: as the caller promises.
        let (first, last) = unsafe {
            let first = layout::card_of(address, self.offset).load(Ordering::Relaxed);
            let end = address + len.max(1) - 1;
            let last = match (address & (PAGE - 1)) + len <= PAGE {
                true => first,
                false => layout::card_of(end, self.offset).load(Ordering::Relaxed),
            };
            (first, last)
        };
        match (first, last) {
            (card::HOT, card::HOT) if len <= 2 * PAGE => self.offset,
            (card::SKIP, card::SKIP) if len <= 2 * PAGE => 0,
            // SAFETY: as the caller promises.
            _ => unsafe { note(address, len, self.offset) },
        }
    }
}

impl Drop for Section {
    #[inline(always)]
    fn drop(&mut self) {
        // Step W5. Stores of this processor become visible in program order.
        self.words.inside.store(self.before, Ordering::Release);
    }
}

/// Notes the pages of a store that is about to be made; returns how far from it the second store goes.
///
/// # Safety
/// In a section that read `offset`; otherwise as [`Section::delta`].
#[cold]
pub unsafe fn note(address: usize, len: usize, offset: usize) -> usize {
    let end = address + len.max(1);
    let mut delta = 0;
    NOTED.fetch_add(1, Ordering::Relaxed);
    for page in (address & !(PAGE - 1)..end).step_by(PAGE) {
        // SAFETY: the tables are mapped.
        let (attached, now) = unsafe { (layout::card_of(page, ATTACHED), layout::card_of(page, offset)) };
        if attached.load(Ordering::Relaxed) == card::SKIP {
            continue; // not mirrored
        }
        if offset == ATTACHED {
            attached.store(card::HOT, Ordering::Relaxed);
            delta = ATTACHED;
        } else if now.load(Ordering::Relaxed) != card::SKIP {
            // SAFETY: a mirrored page.
            unsafe { note_detached(page, address.max(page), end.min(page + PAGE)) };
        }
    }
    delta
}

/// Notes a page for the resynchronisation. While atomic words are being saved, those that the store is about to overwrite
/// are saved first.
///
/// # Safety
/// The bytes are in a mirrored page; in a section that read `DETACHED`.
unsafe fn note_detached(page: usize, from: usize, to: usize) {
    // SAFETY: the tables are mapped.
    let (now, met) = unsafe { (layout::card_of(page, DETACHED), layout::met(page)) };
    if WATCH.load(Ordering::SeqCst) == 0 {
        now.store(card::SKIP, Ordering::SeqCst);
        return;
    }
    if met.load(Ordering::SeqCst) == 0 {
        now.store(card::SKIP, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // Who meets the page meanwhile says so before it looks at the card; so one of us two sees the other.
        if met.load(Ordering::SeqCst) == 0 {
            return;
        }
    }
    now.store(card::SLOW_NOTED, Ordering::SeqCst);
    for word in (from & !7..to).step_by(8) {
        // SAFETY: words of a mirrored page.
        unsafe { save(word) };
    }
}

const NONE: u8 = 0;
/// Atomic instructions have met this byte; its shadow is made at the cut.
const MET: u8 = 1;
/// As `MET`, and the value at the cut is in the shadow.
const SAVED: u8 = 3;

/// The bytes of a word that have a state.
fn in_state(states: u64, state: u8) -> u64 {
    let mut mask = 0;
    for byte in 0..8 {
        if (states >> (8 * byte)) as u8 == state {
            mask |= 0xff << (8 * byte);
        }
    }
    mask
}

/// Stores the masked bytes of a value into a word of the shadow, in as few stores as there can be: what was one atomic
/// variable stays whole.
///
/// # Safety
/// `at` is an aligned word of the shadow.
unsafe fn store_masked(at: usize, value: u64, mask: u64) {
    let part =
        |at: usize, size: usize| (value >> (8 * at), (mask >> (8 * at)) & (u64::MAX >> (64 - 8 * size)));
    // SAFETY: within the word, and aligned.
    unsafe {
        if mask == u64::MAX {
            return layout::word(at).store(value, Ordering::Relaxed);
        }
        for four in [0, 4] {
            if part(four, 4).1 == 0xffff_ffff {
                (*((at + four) as *const std::sync::atomic::AtomicU32))
                    .store(part(four, 4).0 as u32, Ordering::Relaxed);
                continue;
            }
            for two in [four, four + 2] {
                if part(two, 2).1 == 0xffff {
                    (*((at + two) as *const std::sync::atomic::AtomicU16))
                        .store(part(two, 2).0 as u16, Ordering::Relaxed);
                    continue;
                }
                for one in [two, two + 1] {
                    if part(one, 1).1 == 0xff {
                        layout::byte(at + one).store(part(one, 1).0 as u8, Ordering::Relaxed);
                    }
                }
            }
        }
    }
}

/// Steps S1 to S4: copies what atomic instructions have met of a word, and was not saved yet, to the shadow.
///
/// # Safety
/// `word` is an aligned word of a mirrored page; the mirror is detached.
pub unsafe fn save(word: usize) {
    // SAFETY: mapped for mirrored memory.
    let (states, primary) = unsafe { (layout::states(word), layout::word(word)) };
    // S0: whatever the cut has of other threads is visible from here on. (Here the processor sees to that by itself; the model
    // checker has shown that weaker orders need it.)
    fence(Ordering::SeqCst);
    // States only go up while the mirror is detached, so this ends.
    loop {
        let before = states.load(Ordering::SeqCst);
        let mask = in_state(before, MET);
        if mask == 0 {
            return;
        }
        // S1. S2: nothing that came after the cut has changed them as long as they are not marked as saved.
        let value = primary.load(Ordering::SeqCst);
        if states.load(Ordering::SeqCst) != before {
            continue;
        }
        // SAFETY: the shadow is mapped.
        unsafe {
            // S3.
            if (layout::word(word + ATTACHED).load(Ordering::Relaxed) ^ value) & mask != 0 {
                layout::card_of(word, ATTACHED).store(card::HOT, Ordering::Relaxed);
            }
            store_masked(word + ATTACHED, value, mask);
        }
        fence(Ordering::SeqCst);
        if (primary.load(Ordering::SeqCst) ^ value) & mask != 0 {
            // A store that is in the cut was on its way. There is at most one for each thread.
            continue;
        }
        // S4.
        let after = before | (mask & 0x0303_0303_0303_0303);
        if states.compare_exchange(before, after, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return;
        }
    }
}

/// Makes states of saved bytes those of met ones again.
///
/// # Safety
/// `word` is an aligned word of a mirrored page.
pub unsafe fn unsave(word: usize) {
    // SAFETY: mapped for mirrored memory.
    let states = unsafe { layout::states(word) };
    let again = |before| Some(before & !(in_state(before, SAVED) & 0x0202_0202_0202_0202));
    let _ = states.fetch_update(Ordering::SeqCst, Ordering::SeqCst, again);
}

/// Makes a card one that is not noted without care, and keeps what it says. A barrier may note it at the same time.
fn look_closely(card: &AtomicU8) {
    let closer = |now| match now {
        card::SKIP => Some(card::SLOW_NOTED),
        card::FRESH => Some(card::SLOW),
        _ => None,
    };
    let _ = card.fetch_update(Ordering::SeqCst, Ordering::SeqCst, closer);
}

/// Says that an atomic instruction is about to change the bytes, and saves them if they must be.
///
/// # Safety
/// In a section that read `offset`; the bytes are mirrored and within one word.
unsafe fn meet(address: usize, len: usize, offset: usize) {
    let word = address & !7;
    let mine = (u64::MAX >> (64 - 8 * len)) << (8 * (address & 7));
    // SAFETY: mapped for mirrored memory.
    let (states, met) = unsafe { (layout::states(word), layout::met(address)) };
    let saving = offset != ATTACHED && WATCH.load(Ordering::SeqCst) != 0;
    loop {
        let before = states.load(Ordering::SeqCst);
        let new = in_state(before, NONE) & mine;
        if new == 0 {
            break;
        }
        // M1: from now on nobody notes this page without looking whether something is to be saved.
        met.store(1, Ordering::SeqCst);
        // SAFETY: the tables are mapped.
        unsafe { look_closely(layout::card_of(address, DETACHED)) };
        fence(Ordering::SeqCst);
        // M2: if the cut has come meanwhile, the shadow holds these bytes as they were at the cut already, for only plain
        // stores have met them; else whoever comes after the cut has seen M1.
        let attached = offset == ATTACHED && OFFSET.load(Ordering::SeqCst) == ATTACHED;
        let fresh = if attached || !(saving || offset == ATTACHED) { MET } else { SAVED };
        let after = before | (new & (u64::from(fresh) * 0x0101_0101_0101_0101));
        if states.compare_exchange(before, after, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            break;
        }
    }
    if saving {
        // SAFETY: detached, a word of a mirrored page.
        unsafe { save(word) };
    }
}

/// Executes an atomic instruction on `len` bytes, in the mirror's order if they are mirrored.
///
/// # Safety
/// The bytes are the caller's to write, aligned to `len`, which is at most 8; the tables are mapped.
#[inline]
pub unsafe fn atomic<R>(address: usize, len: usize, instruction: impl FnOnce() -> R) -> R {
    let section = Section::enter();
    // SAFETY: as the caller promises.
    unsafe {
        if layout::card_of(address, ATTACHED).load(Ordering::Relaxed) != card::SKIP {
            if REMAPS.load(Ordering::Relaxed) != 0 {
                let delta = section.delta(address, len);
                let result = instruction();
                std::ptr::copy_nonoverlapping(address as *const u8, (address + delta) as *mut u8, len);
                return result;
            }
            meet(address, len, section.offset);
        }
    }
    let result = instruction();
    drop(section);
    result
}

/// Stores a value.
///
/// # Safety
/// As for `ptr::write`; the tables are mapped.
#[inline(always)]
pub unsafe fn store<T: Copy>(at: *mut T, value: T) {
    let section = Section::enter();
    // SAFETY: as the caller promises; the shadow is mapped where the primary is.
    unsafe {
        let delta = section.delta(at as usize, size_of::<T>());
        at.write_volatile(value); // W3
        ((at as usize + delta) as *mut T).write_volatile(value); // W4
    }
}

/// Bytes that are stored within one section: it stays short, whatever the length of the whole.
const PIECE: usize = 64 << 10;

/// Makes a change to bytes, piece by piece, and mirrors it: `write(address, len)` writes that part of the primary.
///
/// # Safety
/// The bytes are the caller's to write; the tables are mapped.
#[inline]
pub unsafe fn change(address: usize, len: usize, mut write: impl FnMut(usize, usize)) {
    let mut at = address;
    while at < address + len {
        let piece = (address + len - at).min(PIECE);
        let section = Section::enter();
        // SAFETY: as the caller promises.
        unsafe {
            let delta = section.delta(at, piece);
            write(at, piece);
            if delta != 0 {
                std::ptr::copy_nonoverlapping(at as *const u8, (at + delta) as *mut u8, piece);
            }
        }
        drop(section);
        at += piece;
    }
}

/// Mirrors bytes that something else has written into the primary, such as the kernel for `read`. They must not be visible
/// to other threads yet.
///
/// # Safety
/// As [`change`].
pub unsafe fn written(address: usize, len: usize) {
    // SAFETY: as the caller promises.
    unsafe { change(address, len, |_, _| ()) }
}
