//! `/proc/PID/smaps`: the mappings with their states and sizes. Slow (it walks page tables): not for the freeze of big
//! programs.

use super::maps::{self, Vma};
use super::{Proc, nonsense, text};
use crate::Result;
use bitflags::bitflags;
use std::path::Path;

bitflags! {
    /// States of a mapping: the two-letter codes of `VmFlags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct VmFlags: u64 {
        /// `rd`: readable.
        const READ = 1 << 0;
        /// `wr`: writable.
        const WRITE = 1 << 1;
        /// `ex`: executable.
        const EXEC = 1 << 2;
        /// `sh`: shared.
        const SHARED = 1 << 3;
        /// `mr`: may be made readable.
        const MAY_READ = 1 << 4;
        /// `mw`: may be made writable.
        const MAY_WRITE = 1 << 5;
        /// `me`: may be made executable.
        const MAY_EXEC = 1 << 6;
        /// `ms`: may be shared.
        const MAY_SHARE = 1 << 7;
        /// `gd`: grows downwards.
        const GROWS_DOWN = 1 << 8;
        /// `pf`: pure page frames, no `struct page`.
        const PFN_MAP = 1 << 9;
        /// `lo`: locked.
        const LOCKED = 1 << 10;
        /// `io`: memory-mapped I/O.
        const IO = 1 << 11;
        /// `sr`: `MADV_SEQUENTIAL`.
        const SEQUENTIAL = 1 << 12;
        /// `rr`: `MADV_RANDOM`.
        const RANDOM = 1 << 13;
        /// `dc`: `MADV_DONTFORK`.
        const DONT_FORK = 1 << 14;
        /// `de`: cannot be expanded by mremap.
        const DONT_EXPAND = 1 << 15;
        /// `lf`: `MLOCK_ONFAULT`.
        const LOCK_ON_FAULT = 1 << 16;
        /// `ac`: accounted.
        const ACCOUNT = 1 << 17;
        /// `nr`: `MAP_NORESERVE`.
        const NO_RESERVE = 1 << 18;
        /// `ht`: huge pages of hugetlbfs.
        const HUGETLB = 1 << 19;
        /// `sf`: synchronous page faults (`MAP_SYNC`).
        const SYNC = 1 << 20;
        /// `ar`: architecture-specific.
        const ARCH = 1 << 21;
        /// `wf`: `MADV_WIPEONFORK`.
        const WIPE_ON_FORK = 1 << 22;
        /// `dd`: `MADV_DONTDUMP`.
        const DONT_DUMP = 1 << 23;
        /// `sd`: soft-dirty.
        const SOFT_DIRTY = 1 << 24;
        /// `mm`: mixed page frames and pages.
        const MIXED_MAP = 1 << 25;
        /// `hg`: `MADV_HUGEPAGE`.
        const HUGE_PAGE = 1 << 26;
        /// `nh`: `MADV_NOHUGEPAGE`.
        const NO_HUGE_PAGE = 1 << 27;
        /// `mg`: `MADV_MERGEABLE`.
        const MERGEABLE = 1 << 28;
        /// `um`: userfaultfd, missing pages.
        const UFFD_MISSING = 1 << 29;
        /// `uw`: userfaultfd, write-protection.
        const UFFD_WP = 1 << 30;
        /// `ui`: userfaultfd, minor faults.
        const UFFD_MINOR = 1 << 31;
        /// `ss`: shadow stack.
        const SHADOW_STACK = 1 << 32;
        /// `sl`: sealed.
        const SEALED = 1 << 33;
        /// `dp`: `MAP_DROPPABLE`.
        const DROPPABLE = 1 << 34;
        /// `gu`: may hold guard regions.
        const MAYBE_GUARD = 1 << 35;
        /// A code that is not in this list.
        const UNKNOWN = 1 << 63;
    }
}

/// Two-letter codes of `fs/proc/task_mmu.c` (Documentation/filesystems/proc.rst), in the order of the bits above.
const CODES: [&[u8; 2]; 36] = [
    b"rd", b"wr", b"ex", b"sh", b"mr", b"mw", b"me", b"ms", b"gd", b"pf", b"lo", b"io", b"sr", b"rr", b"dc",
    b"de", b"lf", b"ac", b"nr", b"ht", b"sf", b"ar", b"wf", b"dd", b"sd", b"mm", b"hg", b"nh", b"mg", b"um",
    b"uw", b"ui", b"ss", b"sl", b"dp", b"gu",
];
const _: () = assert!(VmFlags::MAYBE_GUARD.bits() == 1 << (CODES.len() - 1));

/// A mapping with its states and sizes. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Smap {
    /// What `maps` tells.
    pub vma: Vma,
    /// Its states.
    pub flags: VmFlags,
    /// Codes among `VmFlags` that [`VmFlags`] does not know.
    pub unknown: Vec<[u8; 2]>,
    /// Protection key (0 where there are none).
    pub pkey: u32,
    /// Page size of its backing; more than a page for hugetlb only.
    pub kernel_page_size: u64,
    /// Page size of the page tables.
    pub mmu_page_size: u64,
    /// Resident.
    pub rss: u64,
    /// Resident and modified, in this process or others.
    pub dirty: u64,
    /// Resident and used since [`Proc::forget_references`].
    pub referenced: u64,
    /// Resident and anonymous.
    pub anonymous: u64,
    /// Resident in huge pages.
    pub anon_huge: u64,
    /// Swapped out.
    pub swap: u64,
    /// Locked.
    pub locked: u64,
    /// Resident in hugetlb pages (not in [`Smap::rss`]).
    pub hugetlb: u64,
}

impl Proc {
    /// Mappings with their states, in ascending order. Empty for kernel threads and zombies.
    ///
    /// # Errors
    /// [`crate::Error::Gone`], [`crate::Error::Parse`] with the offending line, or that reading is forbidden.
    pub fn smaps(&self) -> Result<Vec<Smap>> {
        // Each of the kernel's records is longer; one of a large mapping takes it milliseconds.
        parse(&self.read_by("smaps", &mut [0; 512])?, &self.path.join("smaps"))
    }

    /// From now on, anonymous memory that is resident counts as referenced when it is used the next time.
    pub fn forget_references(&self) -> Result<()> {
        self.write("clear_refs", b"2")
    }
}

/// Parses the text of `smaps`.
///
/// # Errors
/// [`crate::Error::Parse`] with the offending line.
pub fn parse(text: &[u8], path: &Path) -> Result<Vec<Smap>> {
    let mut all: Vec<Smap> = Vec::new();
    for line in text::lines(text) {
        // A head begins with a lower-case hexadecimal digit, a detail with a capital: `Size:`, `VmFlags:`.
        if line[0].is_ascii_uppercase() {
            let last = all.last_mut().ok_or_else(|| nonsense(path, line))?;
            detail(last, line).ok_or_else(|| nonsense(path, line))?;
        } else {
            let vma = maps::parse_line(line).ok_or_else(|| nonsense(path, line))?;
            maps::give_way(&mut all, vma.start, |smap| &mut smap.vma);
            all.push(Smap { vma, ..Smap::default() });
        }
    }
    Ok(all)
}

fn detail(smap: &mut Smap, line: &[u8]) -> Option<()> {
    // There are two dozen lines for each mapping: most are passed over by their first letters.
    if matches!(&line[..line.len().min(2)], b"Si" | b"Ps" | b"Fi" | b"TH" | b"LA" | b"KS") {
        return Some(());
    }
    let (key, value) = text::cut(line, b':')?;
    match key {
        b"VmFlags" => flags(smap, value)?,
        b"ProtectionKey" => smap.pkey = text::dec(value.trim_ascii())?.try_into().ok()?,
        b"KernelPageSize" => smap.kernel_page_size = bytes(value)?,
        b"MMUPageSize" => smap.mmu_page_size = bytes(value)?,
        b"Rss" => smap.rss = bytes(value)?,
        b"Referenced" => smap.referenced = bytes(value)?,
        b"Shared_Dirty" | b"Private_Dirty" => smap.dirty = smap.dirty.checked_add(bytes(value)?)?,
        b"Anonymous" => smap.anonymous = bytes(value)?,
        b"AnonHugePages" => smap.anon_huge = bytes(value)?,
        b"Swap" => smap.swap = bytes(value)?,
        b"Locked" => smap.locked = bytes(value)?,
        b"Shared_Hugetlb" | b"Private_Hugetlb" => smap.hugetlb = smap.hugetlb.checked_add(bytes(value)?)?,
        _ => {}
    }
    Some(())
}

/// `  12 kB`
fn bytes(value: &[u8]) -> Option<u64> {
    text::dec(value.trim_ascii().strip_suffix(b" kB")?)?.checked_mul(1024)
}

fn flags(smap: &mut Smap, value: &[u8]) -> Option<()> {
    for word in text::words(value) {
        let code: &[u8; 2] = word.try_into().ok()?;
        match CODES.iter().position(|c| *c == code) {
            Some(bit) => smap.flags |= VmFlags::from_bits_retain(1 << bit),
            None => {
                smap.flags |= VmFlags::UNKNOWN;
                smap.unknown.push(*code);
            }
        }
    }
    Some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_mapping() {
        let text = b"7f00-8000 rw-p 00000000 00:00 0    [heap]\nSize: 4 kB\nKernelPageSize:        4 kB\n\
            Rss: 8 kB\nShared_Dirty: 1 kB\nPrivate_Dirty: 2 kB\nSwap: 12 kB\nTHPeligible:           0\n\
            ProtectionKey:         3\nVmFlags: rd wr mr mw me ac sd qq \n8000-9000 ---p 0 0:0 0\nVmFlags: \n";
        let all = parse(text, Path::new("smaps")).unwrap();
        assert_eq!(all.len(), 2);
        let one = &all[0];
        assert_eq!(
            (one.kernel_page_size, one.rss, one.dirty, one.swap, one.pkey),
            (4096, 8192, 3072, 12288, 3)
        );
        let known =
            VmFlags::READ | VmFlags::WRITE | VmFlags::MAY_READ | VmFlags::MAY_WRITE | VmFlags::MAY_EXEC;
        assert_eq!(one.flags, known | VmFlags::ACCOUNT | VmFlags::SOFT_DIRTY | VmFlags::UNKNOWN);
        assert_eq!(one.unknown, [*b"qq"]);
        assert!(parse(b"Size: 4 kB\n", Path::new("smaps")).is_err());
    }
}
