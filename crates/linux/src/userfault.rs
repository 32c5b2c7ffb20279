//! Following what another process writes, and putting its pages into their places when it touches them. `userfaultfd(2)`,
//! `ioctl_userfaultfd(2)`, Documentation/admin-guide/mm/userfaultfd.rst.
//!
//! The descriptor is made inside the process it follows and taken out. When its last holder closes it, or dies, the
//! kernel takes back every registration and lets every waiting thread go on.

use crate::pagemap::{Category, Pagemap, Query, Run};
use crate::{Error, RemoteAddr, Result, hold};
use bitflags::bitflags;
use linux_raw_sys::general::{
    _UFFDIO_COPY, _UFFDIO_WRITEPROTECT, UFFD_EVENT_FORK, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP,
    UFFD_EVENT_REMOVE, UFFD_EVENT_UNMAP, UFFD_FEATURE_EVENT_FORK, UFFD_FEATURE_EVENT_REMAP,
    UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_EVENT_UNMAP, UFFD_FEATURE_PAGEFAULT_FLAG_WP,
    UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
    UFFD_FEATURE_WP_UNPOPULATED, UFFD_PAGEFAULT_FLAG_WP, UFFDIO_REGISTER_MODE_MISSING,
    UFFDIO_REGISTER_MODE_WP,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

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
        const EVENT_FORK = UFFD_FEATURE_EVENT_FORK as u64;
        const EVENT_REMOVE = UFFD_FEATURE_EVENT_REMOVE as u64;
        const EVENT_REMAP = UFFD_FEATURE_EVENT_REMAP as u64;
        const EVENT_UNMAP = UFFD_FEATURE_EVENT_UNMAP as u64;
        const WP_SHMEM = UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        const WP_UNPOPULATED = UFFD_FEATURE_WP_UNPOPULATED as u64;
        const WP_ASYNC = UFFD_FEATURE_WP_ASYNC as u64;
    }
}

/// What is waited for and what is noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The kernel notes the first write to a protected page and lets the writer go on; [`crate::pagemap`] tells which pages
    /// were written.
    Noted,
    /// As `Noted`; and whoever drops or moves pages (`madvise`, `mremap`) waits until that has been read.
    Told,
    /// Whoever writes to a protected page waits until it is released; [`Userfault::events`] tells of it. Whoever drops or
    /// moves pages (`madvise`, `munmap`, `mremap`) waits until that has been read too.
    Waits,
    /// As `Noted`; and whoever touches a page that is not there waits until it is put in. Whoever drops or moves pages, or
    /// makes a copy of the process, waits until that has been read.
    Missing,
    /// Nothing: it only serves to move pages within the process ([`MOVE`]).
    Moving,
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

/// `struct uffdio_copy`.
#[repr(C)]
#[derive(Debug)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}
const _: () = assert!(size_of::<Copy>() == 40);

/// `struct uffdio_zeropage`.
#[repr(C)]
#[derive(Debug)]
struct ZeroPage {
    range: Range,
    mode: u64,
    zeropage: i64,
}
const _: () = assert!(size_of::<ZeroPage>() == 32);

/// `_IOWR(UFFDIO, 8, struct uffdio_poison)`, whose structure is that of `uffdio_zeropage` (Linux 6.6).
const UFFDIO_POISON: u32 = 0xc020_aa08;
/// `_IOWR(UFFDIO, 5, struct uffdio_move)` (Linux 6.8), which the process itself has to call: pages, with all that was ever
/// written to them, are from one instant to the next at another address.
pub const MOVE: u64 = 0xc028_aa05;
/// Number of that among the calls that a range allows.
const MOVE_NUMBER: u32 = 5;
/// `UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`.
const WITH_HOLES: u64 = 2;
/// Bytes of `struct uffdio_move`, and where the kernel says in it how many bytes were moved, or what was wrong.
pub const MOVE_LEN: usize = 40;
/// As above.
pub const MOVED_AT: usize = 32;

/// The argument of [`MOVE`]: the pages that are in `len` bytes from `from` on, to the same places from `to` on.
pub fn move_argument(from: RemoteAddr, to: RemoteAddr, len: u64) -> [u8; MOVE_LEN] {
    let mut argument = [0; MOVE_LEN];
    for (field, word) in argument.chunks_exact_mut(8).zip([to.0, from.0, len, WITH_HOLES, 0]) {
        field.copy_from_slice(&word.to_le_bytes());
    }
    argument
}

const COPY_PROTECTED: u64 = 2; // UFFDIO_COPY_MODE_WP
const PROTECT: u64 = 1; // UFFDIO_WRITEPROTECT_MODE_WP
const DONT_WAKE: u64 = 2; // UFFDIO_WRITEPROTECT_MODE_DONTWAKE

/// `struct uffd_msg`: for a page fault flags, address, thread; for dropped pages start, end; for moved ones from, to,
/// length; for a copy of the process its descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    words: [u64; 3],
}
const _: () = assert!(size_of::<Message>() == 32);

/// Memory is released in pieces of this size, bytes, so that the program's own page faults get their turn.
const PIECE: u64 = 4 << 20;
/// They are not larger than this where there seems to be nothing, bytes.
const LARGEST_PIECE: u64 = 512 << 20;
/// A piece that takes less has hardly a page.
const AT_ONCE: Duration = Duration::from_micros(5);

/// Words that one event takes in [`Userfault::log_events`].
pub const EVENT_WORDS: usize = size_of::<Message>() / 8;

/// What happened in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits to write to a page.
    Write {
        /// The page.
        page: RemoteAddr,
        /// The thread.
        thread: u32,
    },
    /// A thread waits for a page that is not there.
    Missing {
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
    /// The process has been copied (`fork(2)`); what is missing is missing in the copy too. This descriptor, of the
    /// process that read the event, follows the copy.
    Forked(i32),
}

impl Message {
    fn event(&self) -> Option<Event> {
        let [a, b, c] = self.words;
        let (page, thread) = (RemoteAddr(b & !4095), c as u32);
        match u32::from(self.event) {
            UFFD_EVENT_PAGEFAULT if a & u64::from(UFFD_PAGEFAULT_FLAG_WP) == 0 => {
                Some(Event::Missing { page, thread })
            }
            UFFD_EVENT_PAGEFAULT => Some(Event::Write { page, thread }),
            UFFD_EVENT_REMOVE | UFFD_EVENT_UNMAP => {
                Some(Event::Dropped { start: RemoteAddr(a), end: RemoteAddr(b) })
            }
            UFFD_EVENT_REMAP => Some(Event::Moved { from: RemoteAddr(a), to: RemoteAddr(b), len: c }),
            UFFD_EVENT_FORK => Some(Event::Forked(a as u32 as i32)),
            _ => None,
        }
    }
}

/// How far pages could be put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// All are there now.
    All,
    /// So many bytes are, and then there is a page that was there before.
    Present(u64),
    /// So many bytes are. Pages are just being dropped or moved, or the process copied: that has to be read first.
    Changing(u64),
    /// So many bytes are, and behind them is no memory that is followed.
    Unmapped(u64),
    /// The memory is no more: its process has ended, or become another program.
    Ended,
}

/// What follows one address space.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    pid: u32,
}

/// Goes through memory in pieces that take a moment each. Where nothing is mapped in, as in almost all of what a sanitizer
/// reserves (some 15 TiB), they grow, or there would be millions of them.
fn in_pieces(start: RemoteAddr, end: RemoteAddr, work: impl Fn(RemoteAddr, RemoteAddr)) {
    let (mut at, mut piece) = (start.0, PIECE);
    while at < end.0 {
        let next = at.saturating_add(piece).min(end.0);
        let began = Instant::now();
        work(RemoteAddr(at), RemoteAddr(next));
        piece = if began.elapsed() < AT_ONCE { (piece * 2).min(LARGEST_PIECE) } else { PIECE };
        at = next;
    }
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
            Mode::Told => common | Features::WP_ASYNC | Features::EVENT_REMOVE | Features::EVENT_REMAP,
            Mode::Waits => {
                let events = Features::EVENT_REMOVE | Features::EVENT_REMAP | Features::EVENT_UNMAP;
                common | events | Features::FAULT_FLAG_WP | Features::THREAD_ID
            }
            Mode::Missing => {
                let events = Features::EVENT_REMOVE | Features::EVENT_REMAP | Features::EVENT_UNMAP;
                common | events | Features::EVENT_FORK | Features::WP_ASYNC | Features::THREAD_ID
            }
            Mode::Moving => Features::empty(),
        };
        let userfault = Userfault { fd, pid };
        let mut api = Api { api: API, features: features.bits(), ioctls: 0 };
        userfault.control("choose its mode", UFFDIO_API, &mut api)?;
        Ok(userfault)
    }

    /// One that follows this process; of the kernel's own accesses it need not hear (`UFFD_USER_MODE_ONLY`), so that every user
    /// may have it.
    pub(crate) fn of_ourselves(mode: Mode) -> Result<Self> {
        // SAFETY: userfaultfd(2) takes no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, OPEN_FLAGS | 1) };
        if fd < 0 {
            return Err(Error::call("userfaultfd", std::io::Error::last_os_error()));
        }
        // SAFETY: a new descriptor, ours.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        Userfault::new(fd, std::process::id(), mode)
    }

    /// Takes over a descriptor on which a mode has been chosen, such as one that follows a copy of a process
    /// ([`Event::Forked`]).
    pub fn from_shared(number: i32) -> SharedUserfault {
        // SAFETY: it is never closed by this owner.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        SharedUserfault(ManuallyDrop::new(Userfault { fd, pid: 0 }))
    }

    /// The descriptor, to be handed to somebody else.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Follows a mapping from now on: all of `[start, end)`, which must lie in mappings, and be private or shared memory.
    /// Its pages count as written until they are protected. Doing it twice changes nothing.
    pub fn register(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        self.register_for(start, end, UFFDIO_REGISTER_MODE_WP, _UFFDIO_WRITEPROTECT)
    }

    /// As [`Userfault::register`] with [`Mode::Missing`]: pages that are not there are waited for.
    pub fn register_missing(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        self.register_for(start, end, UFFDIO_REGISTER_MODE_WP | UFFDIO_REGISTER_MODE_MISSING, _UFFDIO_COPY)
    }

    /// Lets pages be moved to `[start, end)`, a mapping of its own ([`Mode::Moving`]). Nobody waits there for what is not: a page that
    /// was freed lazily (`MADV_FREE`) may go at any moment, and is zeros then.
    pub fn register_destination(&self, start: RemoteAddr, end: RemoteAddr) -> Result<()> {
        self.register_for(start, end, UFFDIO_REGISTER_MODE_WP, MOVE_NUMBER)
    }

    fn register_for(&self, start: RemoteAddr, end: RemoteAddr, mode: u32, needed: u32) -> Result<()> {
        let range = Range { start: start.0, len: end.0 - start.0 };
        let mut register = Register { range, mode: u64::from(mode), ioctls: 0 };
        self.control("follow", UFFDIO_REGISTER, &mut register)?;
        match register.ioctls & 1 << needed {
            0 => Err(Error::Other(format!("the kernel cannot follow memory at {start}"))),
            _ => Ok(()),
        }
    }

    /// Puts pages into their places, protected, and lets threads go on that wait for them.
    pub fn put(&self, at: RemoteAddr, pages: &[u8]) -> Result<Put> {
        let (src, len) = (pages.as_ptr() as u64, pages.len() as u64);
        let mut copy = Copy { dst: at.0, src, len, mode: COPY_PROTECTED, copy: 0 };
        let done = self.control("put pages into", UFFDIO_COPY, &mut copy);
        put(done, copy.copy, len)
    }

    /// As [`Userfault::put`]; the pages count as written.
    pub fn put_written(&self, at: RemoteAddr, pages: &[u8]) -> Result<Put> {
        let (src, len) = (pages.as_ptr() as u64, pages.len() as u64);
        let mut copy = Copy { dst: at.0, src, len, mode: 0, copy: 0 };
        let done = self.control("put pages into", UFFDIO_COPY, &mut copy);
        put(done, copy.copy, len)
    }

    /// Makes the mapping of `[start, end)`, which is missing, one that has had pages of its own: others are not in core dumps.
    /// Nothing is put in.
    pub fn make_dumpable(&self, start: RemoteAddr, end: RemoteAddr) {
        // The kernel gets the mapping ready for a page before it finds that there is nothing to copy.
        let mut copy = Copy { dst: start.0, src: 0, len: end.0 - start.0, mode: COPY_PROTECTED, copy: 0 };
        let _ = self.control("make dumpable", UFFDIO_COPY, &mut copy);
    }

    /// Lets `[start, end)` be pages whose contents are lost: who touches one gets `SIGBUS`.
    pub fn poison(&self, start: RemoteAddr, end: RemoteAddr) -> Result<Put> {
        let range = Range { start: start.0, len: end.0 - start.0 };
        let mut poison = ZeroPage { range, mode: 0, zeropage: 0 };
        let done = self.control("poison", UFFDIO_POISON, &mut poison);
        put(done, poison.zeropage, range.len)
    }

    /// Lets `[start, end)` be zeros; they count as written.
    pub fn put_zeros(&self, start: RemoteAddr, end: RemoteAddr) -> Result<Put> {
        let range = Range { start: start.0, len: end.0 - start.0 };
        let mut zero = ZeroPage { range, mode: 0, zeropage: 0 };
        let done = self.control("put zeros into", UFFDIO_ZEROPAGE, &mut zero);
        put(done, zero.zeropage, range.len)
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

    /// Releases the pages of `[start, end)`, as far as they are mapped, piece by piece: in one step, and when the descriptor
    /// is closed, the program's own page faults would wait for all of it.
    pub fn release_gently(&self, start: RemoteAddr, end: RemoteAddr) {
        // Fails where the program has unmapped it.
        in_pieces(start, end, |from, to| drop(self.release(from, to)));
    }

    /// Follows `[start, end)` no longer, as far as it is mapped, piece by piece as [`Userfault::release_gently`].
    pub fn unregister_gently(&self, start: RemoteAddr, end: RemoteAddr) {
        in_pieces(start, end, |from, to| drop(self.unregister(from, to)));
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
        let told = &messages[..self.told(n)?];
        events.extend(told.iter().filter_map(Message::event));
        Ok(())
    }

    /// As [`Userfault::events`], into shared memory that outlives this process: from the moment at which an event is told,
    /// it is there. `log` has [`EVENT_WORDS`] words for each event, all zero; [`logged`] reads them. Returns how many.
    pub fn log_events(&self, log: &[AtomicU64]) -> Result<usize> {
        let room = log.len() / EVENT_WORDS * size_of::<Message>();
        // SAFETY: the kernel writes whole `struct uffd_msg`s, no more than fit, to words that anybody may write at any time.
        let n = unsafe { libc::read(self.fd.as_raw_fd(), log.as_ptr().cast_mut().cast(), room) };
        self.told(n)
    }

    /// As [`Userfault::log_events`]; and what follows copies of the process is held by whoever has the ring, from the moment at which
    /// it exists, in one of these places each, for as long as there are any. Nothing if the kernel cannot do that.
    pub fn log_events_held(
        &self,
        log: &[AtomicU64],
        queue: &mut hold::Queue,
        ring: BorrowedFd<'_>,
        mut places: impl Iterator<Item = usize>,
    ) -> Result<Option<usize>> {
        let (mut next, mut told) = (places.next(), 0);
        for words in log.chunks_exact(EVENT_WORDS) {
            let Some(place) = next else {
                return Ok(Some(told + self.log_events(&log[told * EVENT_WORDS..])?));
            };
            match self.log_event_held(words, queue, ring, place)? {
                Some(0) => break,
                Some(_) => told += 1,
                None if told == 0 => return Ok(None),
                None => break,
            }
            if matches!(logged(words), Some(Event::Forked(_))) {
                next = places.next();
            }
        }
        Ok(Some(told))
    }

    /// One event, held in one place.
    fn log_event_held(
        &self,
        words: &[AtomicU64],
        queue: &mut hold::Queue,
        ring: BorrowedFd<'_>,
        place: usize,
    ) -> Result<Option<usize>> {
        let at = std::mem::offset_of!(Message, words);
        let [told, held] = queue.read_and_hold(ring, &self.fd, words, at, place)?;
        let number = words[at / 8].load(Ordering::Relaxed) as u32;
        // What is no descriptor may look like one. (Our standard streams lead nowhere.)
        if held == 1 && number > 2 && !matches!(logged(words), Some(Event::Forked(_))) {
            hold::put(ring, place, None)?;
        }
        match -told {
            ..=0 => Ok(Some(told as usize / size_of::<Message>())),
            libc::EAGAIN | libc::EINTR | libc::ECANCELED => Ok(Some(0)),
            libc::EOPNOTSUPP | libc::EINVAL => Ok(None),
            errno => {
                let e = std::io::Error::from_raw_os_error(errno);
                Err(Error::call(format!("read faults of process {}", self.pid), e))
            }
        }
    }

    /// How many events a read told.
    fn told(&self, n: isize) -> Result<usize> {
        if n >= 0 {
            return Ok(n as usize / size_of::<Message>());
        }
        let e = std::io::Error::last_os_error();
        match e.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Ok(0),
            _ => Err(Error::call(format!("read faults of process {}", self.pid), e)),
        }
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

/// The event that these words of a log are; none if they are zero.
pub fn logged(words: &[AtomicU64]) -> Option<Event> {
    let word = |i: usize| words[i].load(Ordering::Relaxed);
    let event = word(0).to_le_bytes()[0];
    Message { event, reserved: [0; 7], words: [word(1), word(2), word(3)] }.event()
}

/// What `UFFDIO_COPY` and `UFFDIO_ZEROPAGE` did: they stop at the first page that they cannot put in, and tell how far they
/// came, or what stopped them at the very first.
fn put(result: Result<()>, told: i64, len: u64) -> Result<Put> {
    let errno = match &result {
        Ok(()) if told as u64 == len => return Ok(Put::All),
        Ok(()) => libc::EAGAIN,
        Err(e) => e.errno().unwrap_or(0),
    };
    let done = told.max(0) as u64;
    match (result, errno) {
        (_, libc::EAGAIN) => Ok(Put::Changing(done)),
        (_, libc::EEXIST) => Ok(Put::Present(done)),
        // EINVAL: a range that is not all of one mapping that is followed.
        (_, libc::ENOENT | libc::EINVAL) => Ok(Put::Unmapped(done)),
        (_, libc::ESRCH) => Ok(Put::Ended),
        (result, _) => result.map(|()| Put::All),
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
    let userfault = Userfault::of_ourselves(Mode::Noted)?;
    let pid = userfault.pid;
    // SAFETY: a new mapping, which nobody else knows of.
    let start = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), 2 * TABLE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if start == libc::MAP_FAILED {
        return Err(Error::call("mmap", std::io::Error::last_os_error()));
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

/// What follows an address space, by a descriptor that processes of ours share ([`crate::split`]): it is not closed when
/// this is dropped.
#[derive(Debug)]
pub struct SharedUserfault(ManuallyDrop<Userfault>);

impl Deref for SharedUserfault {
    type Target = Userfault;

    fn deref(&self) -> &Userfault {
        &self.0
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn pieces_are_all_there_is_and_few_where_there_is_nothing() {
        const START: u64 = 0x7fff_8000;
        const END: u64 = 0x1000_7fff_8000 + 4096;
        let (at, pieces, largest) = (Cell::new(START), Cell::new(0u64), Cell::new(0));
        in_pieces(RemoteAddr(START), RemoteAddr(END), |from, to| {
            assert_eq!(from.0, at.replace(to.0));
            assert!(from.0 < to.0);
            largest.set(largest.get().max(to.0 - from.0));
            pieces.set(pieces.get() + 1);
        });
        assert_eq!(at.get(), END);
        assert_eq!(largest.get(), LARGEST_PIECE);
        let small = Cell::new(0);
        in_pieces(RemoteAddr(0), RemoteAddr(10 * PIECE), |_, _| {
            std::thread::sleep(AT_ONCE * 10);
            small.set(small.get() + 1);
        });
        assert_eq!(small.get(), 10, "what takes a moment is done in small pieces");
        assert!(pieces.get() < (END - START) / PIECE / 4, "{} pieces", pieces.get());
    }

    #[test]
    fn it_is_found_out_what_missing_pages_count_as() {
        match missing_counts_as_written() {
            Ok(found) => assert_eq!(found, what_is_missing_counts_as_written()),
            // Not every kernel or user may have one.
            Err(e) => assert!(matches!(e.errno(), Some(libc::EPERM | libc::ENOSYS | libc::EINVAL)), "{e}"),
        }
    }
}
