//! System calls that the kernel does not make, but hands back to the thread as a signal (`PR_SET_SYSCALL_USER_DISPATCH`). Wine
//! runs programs of another system so. `Documentation/admin-guide/syscall-user-dispatch.rst`.

use linux_raw_sys::prctl::{
    PR_SYS_DISPATCH_EXCLUSIVE_ON, PR_SYS_DISPATCH_INCLUSIVE_ON, PR_SYS_DISPATCH_OFF,
    SYSCALL_DISPATCH_FILTER_ALLOW,
};
use linux_raw_sys::ptrace::ptrace_sud_config;

const _: () = assert!(size_of::<ptrace_sud_config>() == 32);

/// Which calls of a thread are dispatched to it: those from outside of a region of addresses, if a byte of its memory says so. Neither a
/// new thread nor a new process inherits it, and `execve(2)` ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// First address of the region.
    pub offset: u64,
    /// Its length, bytes. It may go on from the end of all addresses to their beginning: the kernel tells one in which all calls are
    /// dispatched by what is around it.
    pub len: u64,
    /// Address of the selector, the byte by which dispatching is switched ([`LETS_ALL_THROUGH`]); 0: there is none, and it is always on.
    pub selector: u64,
}

/// With this in the selector no call is dispatched.
pub const LETS_ALL_THROUGH: u8 = SYSCALL_DISPATCH_FILTER_ALLOW as u8;

impl Dispatch {
    /// Calls from within `len` bytes from `offset` on go through, others if the byte at `selector` says so.
    pub fn new(offset: u64, len: u64, selector: u64) -> Self {
        Dispatch { offset, len, selector }
    }

    /// Whether a call goes through, whatever the selector says. `ip` is the address behind its instruction
    /// (`syscall_user_dispatch` in kernel/entry/syscall_user_dispatch.c).
    pub fn lets_through(&self, ip: u64) -> bool {
        ip.wrapping_sub(self.offset) < self.len
    }

    /// The region as ranges that do not go past the end of all addresses.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        match self.offset.checked_add(self.len) {
            Some(end) => vec![(self.offset, end)],
            None => vec![(self.offset, u64::MAX), (0, self.offset.wrapping_add(self.len))],
        }
    }

    /// What the kernel tells of a thread.
    pub(crate) fn of_config(config: &ptrace_sud_config) -> Option<Self> {
        let &ptrace_sud_config { mode, selector, offset, len } = config;
        (mode != u64::from(PR_SYS_DISPATCH_OFF)).then_some(Dispatch { offset, len, selector })
    }

    /// What it takes to be told for that. A region that goes past the end of all addresses is taken only as what is around it.
    pub(crate) fn config(&self) -> ptrace_sud_config {
        let &Dispatch { offset, len, selector } = self;
        let end = offset.wrapping_add(len);
        let (mode, offset, len) = match offset != 0 && end <= offset {
            true => (PR_SYS_DISPATCH_INCLUSIVE_ON, end, len.wrapping_neg()),
            false => (PR_SYS_DISPATCH_EXCLUSIVE_ON, offset, len),
        };
        ptrace_sud_config { mode: mode.into(), selector, offset, len }
    }
}

/// What tells the kernel that no call is dispatched.
pub(crate) fn off() -> ptrace_sud_config {
    ptrace_sud_config { mode: PR_SYS_DISPATCH_OFF.into(), selector: 0, offset: 0, len: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_go_through_within_the_region() {
        let dispatch = |offset, len| Dispatch { offset, len, selector: 0 };
        let plain = dispatch(0x1000, 0x100);
        let through = |d: &Dispatch| [0xfff, 0x1000, 0x10ff, 0x1100].map(|ip| d.lets_through(ip));
        assert_eq!(through(&plain), [false, true, true, false]);
        assert_eq!(plain.ranges(), [(0x1000, 0x1100)]);
        assert_eq!(through(&dispatch(0, 0)), [false; 4]);
        assert_eq!(through(&dispatch(0, u64::MAX)), [true; 4]);
        let around = dispatch(0x1100, 0x100_u64.wrapping_neg());
        assert_eq!(through(&around), [true, false, false, true]);
        assert_eq!(around.ranges(), [(0x1100, u64::MAX), (0, 0x1000)]);
    }

    #[test]
    fn a_region_is_told_as_the_kernel_takes_it() {
        let told = |offset, len| {
            let config = Dispatch { offset, len, selector: 7 }.config();
            (config.mode, config.offset, config.len, config.selector)
        };
        assert_eq!(told(0, 0), (1, 0, 0, 7));
        assert_eq!(told(0, u64::MAX), (1, 0, u64::MAX, 7));
        assert_eq!(told(0x1000, 0x100), (1, 0x1000, 0x100, 7));
        assert_eq!(told(0x1100, 0x100_u64.wrapping_neg()), (2, 0x1000, 0x100, 7));
        assert_eq!(told(0x100, 0x100_u64.wrapping_neg()), (2, 0, 0x100, 7));
    }
}
