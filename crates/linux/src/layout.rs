//! Kernel structures that travel in programs as bytes: their sizes, and words in and out of them.
//!
//! Each is a sequence of little-endian words whose order the assertions below hold against the C definitions.

use linux_raw_sys::general::kernel_sigaction;
use linux_raw_sys::prctl::prctl_mm_map;
use std::mem::offset_of;

/// `struct kernel_sigaction`: handler, flags, restorer, mask; 8 bytes each.
pub const SIGACTION: usize = 32;
/// `stack_t`: address, flags (4 bytes, 4 unused), size.
pub const STACK: usize = 24;
/// `struct itimerval`: interval and value, each seconds and microseconds.
pub const ITIMERVAL: usize = 32;
/// `struct itimerspec`: interval and value, each seconds and nanoseconds.
pub const ITIMERSPEC: usize = 32;
/// `struct timespec`: seconds, nanoseconds.
pub const TIMESPEC: usize = 16;
/// `struct sigevent`: value, signal (4), notify (4), thread id (4), unused.
pub const SIGEVENT: usize = 64;
/// `struct prctl_mm_map`: eleven addresses, pointer to the auxiliary vector, its size in bytes (4), descriptor of the
/// executable (4).
pub const MM_MAP: usize = 104;
/// `struct __user_cap_header_struct` (version, pid; 4 bytes each).
pub const CAP_HEADER: usize = 8;
/// Version 3 of `capget(2)`: two `struct __user_cap_data_struct` (effective, permitted, inheritable; 4 bytes each).
pub const CAP_VERSION: u32 = 0x2008_0522;
/// `siginfo_t`: signal, error number, code (4 bytes each, 4 unused), and what depends on the code.
pub const SIGINFO: usize = 128;
/// Code of a signal that a POSIX timer has sent; its kernel id comes first then.
pub const SI_TIMER: i32 = -2;
/// Code of a signal from the kernel: of interval timers, too.
pub const SI_KERNEL: i32 = 0x80;

const _: () = assert!(size_of::<kernel_sigaction>() == SIGACTION);
const _: () = assert!(offset_of!(kernel_sigaction, sa_flags) == 8);
const _: () = assert!(offset_of!(kernel_sigaction, sa_restorer) == 16);
const _: () = assert!(offset_of!(kernel_sigaction, sa_mask) == 24);
const _: () = assert!(size_of::<libc::stack_t>() == STACK && offset_of!(libc::stack_t, ss_size) == 16);
const _: () = assert!(offset_of!(libc::stack_t, ss_flags) == 8);
const _: () =
    assert!(size_of::<libc::itimerval>() == ITIMERVAL && offset_of!(libc::itimerval, it_value) == 16);
const _: () =
    assert!(size_of::<libc::itimerspec>() == ITIMERSPEC && offset_of!(libc::itimerspec, it_value) == 16);
const _: () =
    assert!(size_of::<libc::sigevent>() == SIGEVENT && offset_of!(libc::sigevent, sigev_signo) == 8);
const _: () = assert!(offset_of!(libc::sigevent, sigev_notify) == 12);
const _: () = assert!(offset_of!(libc::sigevent, sigev_notify_thread_id) == 16);
const _: () = assert!(size_of::<prctl_mm_map>() == MM_MAP && offset_of!(prctl_mm_map, env_end) == 80);
const _: () = assert!(offset_of!(prctl_mm_map, auxv) == 88 && offset_of!(prctl_mm_map, auxv_size) == 96);
const _: () = assert!(offset_of!(prctl_mm_map, exe_fd) == 100);
const _: () = assert!(size_of::<libc::siginfo_t>() == SIGINFO);

/// Words as bytes.
pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// The `index`th 8-byte word; 0 behind the end.
pub fn word(bytes: &[u8], index: usize) -> u64 {
    bytes.as_chunks::<8>().0.get(index).map_or(0, |&w| u64::from_le_bytes(w))
}

/// The `index`th 4-byte word; 0 behind the end.
pub fn half(bytes: &[u8], index: usize) -> u32 {
    bytes.as_chunks::<4>().0.get(index).map_or(0, |&w| u32::from_le_bytes(w))
}

/// The POSIX timer whose expiry a `siginfo_t` tells of: signal and kernel id.
pub fn expiry(info: &[u8]) -> Option<(u32, u32)> {
    (half(info, 2) as i32 == SI_TIMER).then(|| (half(info, 0), half(info, 4)))
}
