//! Where everything lies: fixed distances, so that a barrier finds shadow, card and state of an address by arithmetic.
//!
//! ```text
//! address p            the primary: what the program reads and writes
//! p + ATTACHED         its shadow: the mirror
//! p + STATES           a byte for each byte of the primary: how atomic instructions have met it
//! (p + offset) >> 12   its card: a byte for each page, in one table for each value of the offset
//! ```
//!
//! The tables of cards begin at 4 GiB and have room for every address that a user program can have. They are reserved, not
//! allocated: only what a mirrored page or a store next to it looks at becomes memory.
#![allow(unsafe_code)]

use crate::error::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64};

/// Bytes that a card stands for; the unit of dirtiness, also where memory is mapped with huge pages.
pub const PAGE: usize = 4096;
/// Where regions begin, unless the options say otherwise.
pub const REGION: usize = 0x1100_0000_0000;
/// Largest region, bytes.
pub const MOST: usize = 1 << 39;
/// From an address to its shadow. Also the value of the offset while the mirror is attached. It is not a power of two:
/// processors that guess a line's place in the first cache from bits 12 to 27 of its address (AMD's do) would take the two
/// copies for each other, and every store would be a miss: five times the time.
pub const ATTACHED: usize = 0x1000_0a60_0000;
/// Value of the offset while the mirror is detached. Nothing is ever stored there: it only leads to other cards.
pub const DETACHED: usize = ATTACHED + USER;
/// From an address to the state of its byte.
pub const STATES: usize = 0x2000_0000_0000;

/// Room for addresses of user programs.
const USER: usize = 1 << 47;
/// Leads to the table of pages that atomic instructions have met.
const MET: usize = DETACHED + USER;
const TABLES: usize = (ATTACHED >> 12) & !(PAGE - 1);
const TABLES_LEN: usize = 3 * (USER >> 12) + PAGE;

/// Cards of the table that an offset leads to.
pub mod card {
    /// Nothing to be mirrored here: not mirrored memory, or detached and noted already.
    pub const SKIP: u8 = 0;
    /// Mirrored, attached and noted: store into the shadow as well.
    pub const HOT: u8 = 1;
    /// Mirrored, detached, and to be noted with care: atomic instructions have met the page.
    pub const SLOW: u8 = 2;
    /// Detached, noted, and still to be looked at because atomic words are being saved.
    pub const SLOW_NOTED: u8 = 3;
    /// Mirrored, detached, and to be noted: becomes `SKIP`. For this and the next the lowest bit tells what it becomes.
    pub const FRESH: u8 = 4;
    /// Mirrored, attached, and to be noted: becomes `HOT`.
    pub const FRESH_ATTACHED: u8 = 5;
}

/// The card of an address under an offset.
///
/// # Safety
/// The tables are mapped ([`map_tables`]), and `address` is below 2^47.
#[inline]
pub unsafe fn card_of(address: usize, offset: usize) -> &'static AtomicU8 {
    // SAFETY: the tables have a byte for each page of each address below 2^47, and are never unmapped.
    unsafe { &*(((address + offset) >> 12) as *const AtomicU8) }
}

/// Whether atomic instructions have met the page of an address.
///
/// # Safety
/// As [`card_of`].
#[inline]
pub unsafe fn met(address: usize) -> &'static AtomicU8 {
    // SAFETY: as the caller promises.
    unsafe { card_of(address, MET) }
}

/// The states of the eight bytes of an aligned word.
///
/// # Safety
/// `word` is a multiple of 8 within mirrored memory.
#[inline]
pub unsafe fn states(word: usize) -> &'static AtomicU64 {
    // SAFETY: states are mapped for every mirrored byte.
    unsafe { &*((word + STATES) as *const AtomicU64) }
}

/// An aligned word of primary or shadow.
///
/// # Safety
/// `word` is a multiple of 8 within mirrored memory or its shadow.
#[inline]
pub unsafe fn word(word: usize) -> &'static AtomicU64 {
    // SAFETY: mapped and aligned, as the caller promises; other threads' stores are single instructions on this processor.
    unsafe { &*(word as *const AtomicU64) }
}

/// A byte of primary or shadow.
///
/// # Safety
/// `byte` is within mirrored memory or its shadow.
#[inline]
pub unsafe fn byte(byte: usize) -> &'static AtomicU8 {
    // SAFETY: as above.
    unsafe { &*(byte as *const AtomicU8) }
}

static TABLES_MAPPED: Mutex<bool> = Mutex::new(false);

/// Reserves the tables of cards, once in a process.
pub fn map_tables() -> Result<(), Error> {
    let mut mapped = TABLES_MAPPED.lock().unwrap_or_else(|e| e.into_inner());
    if !*mapped {
        map(TABLES, TABLES_LEN, libc::PROT_READ | libc::PROT_WRITE, 0, "the tables of cards")?;
        // SAFETY: our own mapping. What is left out of a core dump is of no use there.
        unsafe {
            libc::madvise(TABLES as *mut libc::c_void, TABLES_LEN, libc::MADV_DONTDUMP);
            libc::madvise(TABLES as *mut libc::c_void, TABLES_LEN, libc::MADV_NOHUGEPAGE);
        }
        *mapped = true;
    }
    Ok(())
}

/// Maps anonymous memory at an address where there is nothing yet.
pub fn map(address: usize, len: usize, protection: i32, flags: i32, what: &'static str) -> Result<(), Error> {
    // Huge pages that are not reserved would be missing only when they are touched.
    let lazy = if flags & libc::MAP_HUGETLB == 0 { libc::MAP_NORESERVE } else { 0 };
    let fixed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | lazy;
    // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping (mmap(2)).
    let got = unsafe { libc::mmap(address as *mut libc::c_void, len, protection, fixed | flags, -1, 0) };
    if got == libc::MAP_FAILED {
        let why = std::io::Error::last_os_error();
        return Err(match why.raw_os_error() {
            Some(libc::EEXIST) => Error::AddressTaken { what, address, len },
            _ => Error::Map { what, address, len, why },
        });
    }
    if got as usize != address {
        // A kernel older than 4.17 takes the address for a hint.
        // SAFETY: what was mapped just now.
        unsafe { libc::munmap(got, len) };
        return Err(Error::AddressTaken { what, address, len });
    }
    Ok(())
}

/// Takes a mapping of ours away.
///
/// # Safety
/// Nobody uses it any more.
pub unsafe fn unmap(address: usize, len: usize) {
    // SAFETY: as the caller promises.
    unsafe { libc::munmap(address as *mut libc::c_void, len) };
}

/// A span of mirrored memory, whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its first address.
    pub base: usize,
    /// Bytes.
    pub len: usize,
}

impl Span {
    /// The whole pages that hold these bytes.
    pub fn around(address: usize, len: usize) -> Self {
        let base = address & !(PAGE - 1);
        Span { base, len: (address + len).next_multiple_of(PAGE) - base }
    }

    /// Addresses of its pages.
    pub fn pages(self) -> impl Iterator<Item = usize> {
        (self.base..self.base + self.len).step_by(PAGE)
    }
}
