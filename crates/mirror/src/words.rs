//! Copies, fills and atomic instructions in mirrored memory. Addresses elsewhere are taken, too, and treated as usual.
#![allow(unsafe_code)]

use crate::barrier::{self, Section};
use crate::layout::PAGE;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// `memmove`: the two may overlap.
///
/// # Safety
/// As for `ptr::copy`; a mirror is open.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
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
