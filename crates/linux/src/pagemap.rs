//! Which pages a process has, by the `PAGEMAP_SCAN` ioctl (Linux 6.7) of `/proc/PID/pagemap`.

use crate::{Error, RemoteAddr, Result};
use bitflags::bitflags;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

bitflags! {
    /// Categories of a page (`PAGE_IS_*`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Category: u64 {
        /// Lies in a range registered for asynchronous write-protection.
        const WP_ALLOWED = 1;
        /// Written since it was last protected (or never protected).
        const WRITTEN = 2;
        /// Belongs to a file or to shared memory.
        const FILE = 4;
        /// In memory.
        const PRESENT = 8;
        /// Swapped out (or another marker in its place).
        const SWAPPED = 16;
        /// The shared page of zeros.
        const ZERO = 32;
        /// Part of a huge page.
        const HUGE = 64;
        /// Soft-dirty.
        const SOFT_DIRTY = 128;
        /// In a guard region (Linux 6.15).
        const GUARD = 256;
    }
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<Region>() == 24);

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Debug, Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<ScanArg>() == 96);

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

/// `PM_SCAN_WP_MATCHING`: protect what is selected and written.
const PROTECT_MATCHING: u64 = 1;
/// `PM_SCAN_CHECK_WPASYNC`: fail where writes are not noted.
const FOLLOWED_ONLY: u64 = 2;

/// Bits of an entry of the map: in memory, or swapped out; of a file or shared memory; of this process alone.
const THERE: u64 = 3 << 62;
const OF_A_FILE: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;

/// A run of pages of the same categories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// What was asked for and holds.
    pub categories: Category,
}

/// Which pages to report.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query {
    /// Every one of these must hold …
    pub all: Category,
    /// … and none of these …
    pub none: Category,
    /// … and at least one of these, unless empty.
    pub any: Category,
    /// Categories to tell apart in the answer.
    pub report: Category,
}

impl Query {
    /// Pages in none of these categories.
    pub fn none_of(none: Category) -> Self {
        Query { none, ..Query::default() }
    }
}

/// `/proc/PID/pagemap`.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    pid: u32,
    /// Categories that this kernel knows.
    known: Category,
}

impl Pagemap {
    /// Opens the page map of a process.
    ///
    /// # Errors
    /// [`Error::Gone`] if there is no such process any more, [`Error::File`] if it is not ours to look at, and that this kernel
    /// cannot tell which pages a program has.
    pub fn open(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        let file = File::open(&path).map_err(|e| Error::file_of(pid, &path, e))?;
        let mut pagemap = Pagemap { file, pid, known: Category::all() };
        // Guard regions came with 6.13, their category with 6.15.
        let nowhere = RemoteAddr(1 << 30);
        let end = RemoteAddr(nowhere.0 + 4096);
        if pagemap.scan(nowhere, end, Query::none_of(Category::GUARD), &mut vec![]).is_err() {
            pagemap.known -= Category::GUARD;
            match pagemap.scan(nowhere, end, Query::none_of(Category::ZERO), &mut vec![]) {
                Err(e) if e.errno() == Some(libc::ENOTTY) => {
                    let what = "this kernel cannot tell which pages a program has (PAGEMAP_SCAN): Linux 6.7 or newer is needed";
                    return Err(Error::Other(what.into()));
                }
                other => other?,
            }
        }
        Ok(pagemap)
    }

    /// Whether the memory that this is the map of is no more: its process has ended, or become another program.
    pub fn is_of_the_past(&self) -> bool {
        // Reading of the map itself ends at once then (fs/proc/task_mmu.c, pagemap_read).
        self.file.read_at(&mut [0; 8], 0).is_ok_and(|n| n == 0)
    }

    /// Whether there is a page at an address, or one that is swapped out.
    pub fn has_page(&self, at: RemoteAddr) -> bool {
        let mut entry = [[0; 8]];
        self.read_entries(at, &mut entry).is_ok() && u64::from_le_bytes(entry[0]) & THERE != 0
    }

    /// What the map says of each page from `start` on, in 64 bits.
    fn read_entries(&self, start: RemoteAddr, entries: &mut [[u8; 8]]) -> std::io::Result<()> {
        self.file.read_exact_at(entries.as_flattened_mut(), start.0 / 4096 * 8)
    }

    /// Whether the kernel tells guard regions.
    pub fn knows_guards(&self) -> bool {
        self.known.contains(Category::GUARD)
    }

    /// Appends, for each page of `[start, end)`, whether other processes may have the same page of memory by copy on write.
    ///
    /// # Errors
    /// What the kernel says; then the answer for each is no.
    pub fn may_be_shared(&self, start: RemoteAddr, end: RemoteAddr, shared: &mut Vec<bool>) -> Result<()> {
        let mut entries = vec![[0; 8]; ((end.0 - start.0) / 4096) as usize];
        let read = self.read_entries(start, &mut entries);
        let may_be = |entry| entry & THERE != 0 && entry & (OF_A_FILE | EXCLUSIVE) == 0;
        let is_read = read.is_ok();
        shared.extend(entries.into_iter().map(|entry| is_read && may_be(u64::from_le_bytes(entry))));
        read.map_err(|e| Error::file(format!("/proc/{}/pagemap", self.pid), e))
    }

    /// Appends the runs of pages in `[start, end)` that the query selects, in ascending order.
    pub fn scan(&self, start: RemoteAddr, end: RemoteAddr, query: Query, runs: &mut Vec<Run>) -> Result<()> {
        self.walk(start, end, query, 0, runs).map(|_| ())
    }

    /// As [`Pagemap::scan`], and protects those of the selected pages that are [`Category::WRITTEN`] in the same step:
    /// a write is told of either now or by a later scan. The range must lie in one mapping. False, and nothing was
    /// done, if that is not followed by a userfaultfd that notes writes.
    pub fn scan_and_protect(
        &self,
        start: RemoteAddr,
        end: RemoteAddr,
        query: Query,
        runs: &mut Vec<Run>,
    ) -> Result<bool> {
        self.walk(start, end, query, PROTECT_MATCHING | FOLLOWED_ONLY, runs)
    }

    /// As [`Pagemap::scan`], in one mapping that is followed by a userfaultfd that notes writes; false if it is not. A
    /// query for [`Category::WRITTEN`] alone takes a quarter of the time of others.
    pub fn scan_followed(
        &self,
        start: RemoteAddr,
        end: RemoteAddr,
        query: Query,
        runs: &mut Vec<Run>,
    ) -> Result<bool> {
        self.walk(start, end, query, FOLLOWED_ONLY, runs)
    }

    /// Whether all mappings in a range are followed by some userfaultfd that notes writes. No page is looked at.
    pub fn is_followed(&self, start: RemoteAddr, end: RemoteAddr) -> Result<bool> {
        self.scan_followed(start, end, Query::none_of(Category::WP_ALLOWED), &mut Vec::new())
    }

    /// False if the kernel refuses because the range is not followed.
    fn walk(
        &self,
        start: RemoteAddr,
        end: RemoteAddr,
        query: Query,
        flags: u64,
        runs: &mut Vec<Run>,
    ) -> Result<bool> {
        // Not cleared: most looks find little, and there may be one for each of many mappings.
        let mut regions = [const { MaybeUninit::<Region>::uninit() }; 512];
        let mut at = start.0;
        while at < end.0 {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                flags,
                start: at,
                end: end.0,
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                category_inverted: (query.none & self.known).bits(),
                category_mask: ((query.all | query.none) & self.known).bits(),
                category_anyof_mask: query.any.bits(),
                return_mask: (query.report & self.known).bits(),
                ..ScanArg::default()
            };
            // SAFETY: `arg` and the regions it points to outlive the call; the kernel writes at most `vec_len`
            // regions and `walk_end` (Documentation/admin-guide/mm/pagemap.rst).
            let n = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &mut arg) };
            if n < 0 {
                let e = std::io::Error::last_os_error();
                if flags & FOLLOWED_ONLY != 0 && e.raw_os_error() == Some(libc::EPERM) {
                    return Ok(false);
                }
                if e.raw_os_error() == Some(libc::ESRCH) {
                    return Err(Error::Gone(self.pid)); // it has no memory any more
                }
                return Err(Error::call(format!("scan pages {at:#x}-{end} of process {}", self.pid), e));
            }
            for region in &regions[..n as usize] {
                // SAFETY: the kernel has written the first `n`; any bits are a valid `Region`.
                let r = unsafe { region.assume_init() };
                let categories = Category::from_bits_retain(r.categories);
                push(runs, Run { start: r.start, end: r.end, categories });
            }
            if arg.walk_end <= at {
                break;
            }
            at = arg.walk_end;
        }
        Ok(true)
    }
}

/// Joins runs that a full answer cut in two.
fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end == run.start && last.categories == run.categories => last.end = run.end,
        _ => runs.push(run),
    }
}
