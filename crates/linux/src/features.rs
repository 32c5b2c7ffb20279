//! What this kernel and this process can do, asked of ourselves.

use crate::{Error, Result};
use std::sync::OnceLock;

/// `PR_TIMER_CREATE_RESTORE_IDS` and its argument `GET`.
const PR_TIMER_CREATE_RESTORE_IDS: (i32, u64) = (77, 2);
const ARCH_SET_CPUID: i32 = 0x1012;
const ARCH_GET_XCOMP_SUPP: i32 = 0x1021;

/// Whether POSIX timers can be made with ids of one's choice (`PR_TIMER_CREATE_RESTORE_IDS`, Linux 6.15).
pub fn timer_ids() -> bool {
    let (option, get) = PR_TIMER_CREATE_RESTORE_IDS;
    // SAFETY: plain numbers; the call changes nothing.
    unsafe { libc::syscall(libc::SYS_prctl, option, get, 0u64, 0u64, 0u64) >= 0 }
}

/// Whether threads may choose about speculation of a kind (`PR_SPEC_*`), or need not as it is off for all.
pub fn may_choose_speculation(kind: u64) -> bool {
    const BY_THREAD: i32 = linux_raw_sys::prctl::PR_SPEC_PRCTL as i32;
    const ON: i32 = linux_raw_sys::prctl::PR_SPEC_ENABLE as i32;
    // SAFETY: plain numbers.
    let state = unsafe { libc::prctl(linux_raw_sys::prctl::PR_GET_SPECULATION_CTRL as i32, kind, 0, 0, 0) };
    state >= 0 && (state & BY_THREAD != 0 || state & ON == 0)
}

/// Features of the extended state that a process must ask for (`ARCH_REQ_XCOMP_PERM`): AMX. 0 where there are none.
pub fn xfeatures_on_demand() -> u64 {
    const TILE_DATA: u64 = 1 << 18;
    let mut supported = 0u64;
    // SAFETY: the kernel writes one word.
    let r = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_GET_XCOMP_SUPP, &raw mut supported) };
    if r == 0 { supported & TILE_DATA } else { 0 }
}

/// Whether programs can put themselves into Landlock domains. `landlock_create_ruleset(2)`.
pub fn landlock() -> bool {
    static VERSION: OnceLock<i64> = OnceLock::new();
    const VERSION_ONLY: u32 = 1;
    // SAFETY: without attributes the kernel reads nothing, and tells the version of its interface.
    let ask = || unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, VERSION_ONLY)
    };
    *VERSION.get_or_init(ask) > 0
}

/// Whether programs can have the `cpuid` instruction fault (`ARCH_SET_CPUID`).
pub fn cpuid_faulting() -> bool {
    // SAFETY: plain numbers; the instruction stays allowed, as it is.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_CPUID, 1u64) == 0 }
}

/// `PR_GET_SECUREBITS` of the calling thread.
///
/// # Errors
/// [`Error::Call`].
pub fn own_securebits() -> Result<u32> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_prctl, libc::PR_GET_SECUREBITS, 0u64, 0u64, 0u64, 0u64) };
    if r < 0 { Err(Error::call("read securebits", std::io::Error::last_os_error())) } else { Ok(r as u32) }
}
