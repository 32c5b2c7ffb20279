//! Following another process's writes: userfaultfd in its write-protecting modes. `userfaultfd(2)`, `ioctl_userfaultfd(2)`,
//! Documentation/admin-guide/mm/userfaultfd.rst.
//!
//! The descriptor is made inside the process it follows and taken out. When its last holder closes it, or dies, the
//! kernel takes back every registration and lets every waiting thread go on.

use crate::pagemap::{Category, Pagemap, Query, Run};
use crate::{Error, RemoteAddr, Result};
use bitflags::bitflags;
use linux_raw_sys::general::{
    _UFFDIO_WRITEPROTECT, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP, UFFD_EVENT_REMOVE, UFFD_EVENT_UNMAP,
    UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_EVENT_UNMAP,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_ASYNC,
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, UFFDIO_REGISTER_MODE_WP,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

/// Flags with which the descriptor is made inside the program.
pub const OPEN_FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;

/// What the kernel calls the version of this interface (`UFFD_API`).
const API: u64 = 0xaa;

bitflags! {
    /// What is asked of the kernel (`UFFD_FEATURE_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Features: u64 {
        const FAULT_FLAG_WP = UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        const THREAD_ID = UFFD_FEATURE_THREAD_ID as u64;
        const EVENT_REMOVE = UFFD_FEATURE_EVENT_REMOVE as u64;
        const EVENT_REMAP = UFFD_FEATURE_EVENT_REMAP as u64;
        const EVENT_UNMAP = UFFD_FEATURE_EVENT_UNMAP as u64;
        const WP_SHMEM = UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        const WP_UNPOPULATED = UFFD_FEATURE_WP_UNPOPULATED as u64;
        const WP_ASYNC = UFFD_FEATURE_WP_ASYNC as u64;
    }
}

/// What happens at the first write to a protected page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The kernel notes it and lets the writer go on; [`crate::pagemap`] tells which pages were written.
    Noted,
    /// The writer waits until the page is released; [`Userfault::events`] tells of it. Whoever drops or moves pages
    /// (`madvise`, `munmap`, `mremap`) waits until that has been read too.
    Waits,
}

/// `struct uffdio_api`.
#[repr(C)]
#[derive(Debug)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}
const _: () = assert!(size_of::<Api>() == 24);

/// `struct uffdio_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    len: u64,
}
const _: () = assert!(size_of::<Range>() == 16);

/// `struct uffdio_register`.
#[repr(C)]
#[derive(Debug)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}
const _: () = assert!(size_of::<Register>() == 32);

/// `struct uffdio_writeprotect`.
#[repr(C)]
#[derive(Debug)]
struct WriteProtect {
    range: Range,
    mode: u64,
}
const _: () = assert!(size_of::<WriteProtect>() == 24);

const PROTECT: u64 = 1; // UFFDIO_WRITEPROTECT_MODE_WP
const DONT_WAKE: u64 = 2; // UFFDIO_WRITEPROTECT_MODE_DONTWAKE

/// `struct uffd_msg`: for a page fault flags, address, thread; for dropped pages start, end; for moved ones from, to,
/// length.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    words: [u64; 3],
}
const _: () = assert!(size_of::<Message>() == 32);

/// What happened in a process whose writers wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits to write to a page.
    Write {
        /// The page.
        page: RemoteAddr,
        /// The thread.
        thread: u32,
    },
    /// Pages of `[start, end)` are about to be dropped, or freed lazily, or have been unmapped; their protection goes
    /// with them.
    Dropped {
        /// First address.
        start: RemoteAddr,
        /// First address behind.
        end: RemoteAddr,
    },
    /// Pages were moved with their protection. Where they are now may belong to a longer mapping.
    Moved {
        /// Where they were.
        from: RemoteAddr,
        /// Where they are.
        to: RemoteAddr,
        /// Bytes.
        len: u64,
    },
}

impl Message {
    fn event(&self) -> Option<Event> {
        let [a, b, c] = self.words;
        match u32::from(self.event) {
            UFFD_EVENT_PAGEFAULT => Some(Event::Write { page: RemoteAddr(b & !4095), thread: c as u32 }),
            UFFD_EVENT_REMOVE | UFFD_EVENT_UNMAP => {
                Some(Event::Dropped { start: RemoteAddr(a), end: RemoteAddr(b) })
            }
            UFFD_EVENT_REMAP => Some(Event::Moved { from: RemoteAddr(a), to: RemoteAddr(b), len: c }),
            _ => None,
        }
    }
}

/// What follows one address space.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    pid: u32,
}

impl Userfault {
    /// Takes over a descriptor made in process `pid`, on which no mode has been chosen yet.
    ///
    /// # Errors
    /// That this kernel does not have the mode.
    pub fn new(fd: OwnedFd, pid: u32, mode: Mode) -> Result<Self> {
        let common = Features::WP_SHMEM | Features::WP_UNPOPULATED;
        let features = match mode {
            Mode::Noted => common | Features::WP_ASYNC,
            Mode::Waits => {
                let events = Features::EVENT_REMOVE | Features::EVENT_REMAP | Features::EVENT_UNMAP;
                common | events | Features::FAULT_FLAG_WP | Features::THREAD_ID
            }
        };
        let userfault = Userfault { fd, pid };
        let mut api = Api { api: API, features: features.bits(), ioctls: 0 };
        userfault.control("choose its mode", UFFDIO_API, &mut api)?;
        Ok(userfault)
    }

    /// Follows a mapping from now on: all of `[start, end)`, which must lie in mappings, and be private or shared memory.
    /// Its pages count as written until they are protected. Doing it twice changes nothing.
    pub fn register(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        let range = Range { start: start.0, len: end.0 - start.0 };
        let mut register = Register { range, mode: u64::from(UFFDIO_REGISTER_MODE_WP), ioctls: 0 };
        self.control("follow", UFFDIO_REGISTER, &mut register)?;
        match register.ioctls & 1 << _UFFDIO_WRITEPROTECT {
            0 => Err(Error::Other(format!("the kernel cannot protect pages at {start}"))),
            _ => Ok(()),
        }
    }

    /// Follows `[start, end)` no longer, and releases what is protected there.
    pub fn unregister(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        let mut range = Range { start: start.0, len: end.0 - start.0 };
        self.control("let go of", UFFDIO_UNREGISTER, &mut range)
    }

    /// Protects the pages of `[start, end)`, also those that do not exist yet.
    pub fn protect(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        self.write_protect(start, end, PROTECT)
    }

    /// Releases the pages of `[start, end)` and lets the threads go on that wait for them.
    pub fn release(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        self.write_protect(start, end, 0)
    }

    /// Releases the pages of `[start, end)`; whoever waits for them goes on with [`Userfault::wake`].
    pub fn release_quietly(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        self.write_protect(start, end, DONT_WAKE)
    }

    /// Lets threads that wait for pages of `[start, end)` try again.
    pub fn wake(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        let mut range = Range { start: start.0, len: end.0 - start.0 };
        self.control("wake", UFFDIO_WAKE, &mut range)
    }

    /// Appends what happened and has not been told yet, at most 64 events; none if there are none (the descriptor can
    /// be polled for more).
    ///
    /// Until all events but writes are read, protecting and releasing fail with `EAGAIN`, and for a moment longer.
    pub fn events(&self, events: &mut Vec<Event>) -> Result<()> {
        let mut messages = [Message::default(); 64];
        // SAFETY: the kernel writes whole `struct uffd_msg`s, no more than fit (userfaultfd(2)).
        let n =
            unsafe { libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), size_of_val(&messages)) };
        if n < 0 {
            let e = std::io::Error::last_os_error();
            return match e.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(()),
                _ => Err(Error::call(format!("read faults of process {}", self.pid), e)),
            };
        }
        let told = &messages[..n as usize / size_of::<Message>()];
        events.extend(told.iter().filter_map(Message::event));
        Ok(())
    }

    fn write_protect(&self, start: RemoteAddr, end: RemoteAddr, mode: u64) -> Result<()> {
        let range = Range { start: start.0, len: end.0 - start.0 };
        self.control("protect", UFFDIO_WRITEPROTECT, &mut WriteProtect { range, mode })
    }

    fn control<T>(&self, what: &str, request: u32, argument: &mut T) -> Result<()> {
        // SAFETY: each request is used with its own structure, whose size is asserted above; the kernel writes only there.
        let done = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::c_ulong::from(request), argument) };
        if done < 0 {
            let e = std::io::Error::last_os_error();
            return Err(Error::call(format!("{what} memory of process {}", self.pid), e));
        }
        Ok(())
    }
}

/// Whether the pages of a followed range that do not exist count as written for [`crate::pagemap`], even those of a whole
/// page table: whatever is dropped then shows, without a look at every page. Found out once, on memory of our own.
pub fn what_is_missing_counts_as_written() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| missing_counts_as_written().unwrap_or(false))
}

fn missing_counts_as_written() -> Result<bool> {
    const TABLE: usize = 2 << 20; // bytes that one page table maps
    let call = |what: &str| Error::call(what, std::io::Error::last_os_error());
    // SAFETY: userfaultfd(2) takes no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, OPEN_FLAGS | 1) };
    if fd < 0 {
        return Err(call("userfaultfd"));
    }
    // SAFETY: a new descriptor, ours.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let pid = std::process::id();
    let userfault = Userfault::new(fd, pid, Mode::Noted)?;
    // SAFETY: a new mapping, which nobody else knows of.
    let start = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), 2 * TABLE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if start == libc::MAP_FAILED {
        return Err(call("mmap"));
    }
    let first = (start as u64).next_multiple_of(TABLE as u64);
    let (first, end) = (RemoteAddr(first), RemoteAddr(first + TABLE as u64));
    let mut runs = Vec::new();
    let query = Query { all: Category::WRITTEN, report: Category::WRITTEN, ..Query::default() };
    let scanned = userfault
        .register(first, end)
        .and_then(|()| Pagemap::open(pid)?.scan_followed(first, end, query, &mut runs));
    // SAFETY: the mapping made above.
    unsafe { libc::munmap(start, 2 * TABLE) };
    Ok(scanned? && matches!(runs[..], [Run { start, end: last, .. }] if start == first.0 && last == end.0))
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_found_out_what_missing_pages_count_as() {
        match missing_counts_as_written() {
            Ok(found) => assert_eq!(found, what_is_missing_counts_as_written()),
            // Not every kernel or user may have one.
            Err(e) => assert!(matches!(e.errno(), Some(libc::EPERM | libc::ENOSYS | libc::EINVAL)), "{e}"),
        }
    }
}
