//! Copies, fills and atomic instructions in mirrored memory. Addresses elsewhere are taken, too, and treated as usual.
#![allow(unsafe_code)]

use crate::barrier::{self, Section};
use crate::layout::PAGE;
use std::arch::x86_64::__m128i;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, compiler_fence};

/// `memmove`: the two may overlap.
///
/// # Safety
/// As for `ptr::copy`; a mirror is open.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        match len <= SHORT {
            true => copy_short(from, to, len),
            false => copy_long(from, to, len),
        }
    }
}

/// # Safety
/// As [`copy`].
#[inline(never)]
unsafe fn copy_long(from: *const u8, to: *mut u8, len: usize) {
    let distance = (from as usize).abs_diff(to as usize);
    if distance >= len || len <= PAGE {
        // SAFETY: pieces of at most a page at a time may overlap; longer ones do not.
        unsafe {
            barrier::change(to as usize, len, |at, piece| {
                std::ptr::copy(from.add(at - to as usize), at as *mut u8, piece);
            });
        }
        return;
    }
    // Overlapping: as one piece.
    let section = Section::enter();
    // SAFETY: as the caller promises.
    unsafe {
        let delta = section.delta(to as usize, len);
        std::ptr::copy(from, to, len);
        if delta != 0 {
            std::ptr::copy_nonoverlapping(to, (to as usize + delta) as *mut u8, len);
        }
    }
}

/// Longest copy that is made without a call, bytes.
const SHORT: usize = 64;

/// Stores what both ends hold, twice: parts of one size that cover all of it, and may overlap each other.
macro_rules! ends {
    ($type:ty, $from:expr, $to:expr, $len:expr) => {{
        let back = $len - size_of::<$type>();
        let first = $from.cast::<$type>().read_unaligned();
        let last = $from.add(back).cast::<$type>().read_unaligned();
        let section = Section::enter();
        let delta = section.delta($to as usize, $len);
        $to.cast::<$type>().write_unaligned(first); // W3
        $to.add(back).cast::<$type>().write_unaligned(last);
        compiler_fence(Ordering::SeqCst);
        let there = ($to as usize + delta) as *mut u8;
        there.cast::<$type>().write_unaligned(first); // W4
        there.add(back).cast::<$type>().write_unaligned(last);
    }};
}

/// All is read before anything is stored, so it does not matter whether the two overlap.
///
/// # Safety
/// As [`copy`], for at most [`SHORT`] bytes.
#[inline(always)]
unsafe fn copy_short(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises; within the bytes, and the shadow is mapped where the primary is.
    unsafe {
        match len {
            8..=16 => ends!(u64, from, to, len),
            17..=32 => ends!(__m128i, from, to, len),
            33..=64 => ends!([__m128i; 2], from, to, len),
            4..8 => ends!(u32, from, to, len),
            2..4 => ends!(u16, from, to, len),
            1 => ends!(u8, from, to, len),
            _ => (),
        }
    }
}

/// `memset`.
///
/// # Safety
/// As for `ptr::write_bytes`; a mirror is open.
#[inline]
pub unsafe fn fill(at: *mut u8, value: u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        barrier::change(at as usize, len, |at, piece| std::ptr::write_bytes(at as *mut u8, value, piece))
    }
}

/// An integer that the processor can change atomically.
pub trait Word: Copy + PartialEq {
    #[doc(hidden)]
    unsafe fn swap(at: *mut Self, value: Self) -> Self;
    #[doc(hidden)]
    unsafe fn compare(at: *mut Self, current: Self, new: Self) -> Result<Self, Self>;
    #[doc(hidden)]
    unsafe fn update(at: *mut Self, update: impl FnMut(Self) -> Self) -> Self;
}

macro_rules! word {
    ($($int:ty, $atomic:ty;)*) => { $(
        impl Word for $int {
            unsafe fn swap(at: *mut Self, value: Self) -> Self {
                // SAFETY: aligned and mapped, as the caller of `replace` promises.
                unsafe { <$atomic>::from_ptr(at) }.swap(value, Ordering::SeqCst)
            }
            unsafe fn compare(at: *mut Self, current: Self, new: Self) -> Result<Self, Self> {
                // SAFETY: as above.
                unsafe { <$atomic>::from_ptr(at) }.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
            }
            unsafe fn update(at: *mut Self, mut update: impl FnMut(Self) -> Self) -> Self {
                // SAFETY: as above.
                let atomic = unsafe { <$atomic>::from_ptr(at) };
                let mut current = atomic.load(Ordering::SeqCst);
                loop {
                    let tried = atomic.compare_exchange_weak(current, update(current), Ordering::SeqCst, Ordering::SeqCst);
                    match tried {
                        Ok(before) => return before,
                        Err(now) => current = now,
                    }
                }
            }
        }
    )* };
}
word! { u8, AtomicU8; u16, AtomicU16; u32, AtomicU32; u64, AtomicU64; }

/// Atomic exchange; also the way to make an atomic store. Returns what was there.
///
/// # Safety
/// `at` is aligned, valid, and changed by atomic instructions only while others may look at it; a mirror is open.
#[inline]
pub unsafe fn replace<T: Word>(at: *mut T, value: T) -> T {
    // SAFETY: as the caller promises.
    unsafe { barrier::atomic(at as usize, size_of::<T>(), || T::swap(at, value)) }
}

/// Atomic compare-and-exchange; the value that was there, as `Ok` if it was `current`.
///
/// # Safety
/// As [`replace`].
#[inline]
pub unsafe fn compare_exchange<T: Word>(at: *mut T, current: T, new: T) -> Result<T, T> {
    // SAFETY: as the caller promises.
    unsafe { barrier::atomic(at as usize, size_of::<T>(), || T::compare(at, current, new)) }
}

/// Atomic change by a function of the value; returns what was there. Each try is one instruction; under contention there
/// may be several.
///
/// # Safety
/// As [`replace`].
#[inline]
pub unsafe fn fetch_update<T: Word>(at: *mut T, update: impl FnMut(T) -> T) -> T {
    // SAFETY: as the caller promises.
    unsafe { barrier::atomic(at as usize, size_of::<T>(), || T::update(at, update)) }
}
