//! Files that a process holds without having descriptors of them: `io_uring_register(2)`.
//!
//! They are registered with a ring, and the ring with the process's main thread; all descriptors of it in the process are
//! closed. The files stay open until whoever has the ring takes them out, or that thread ends, or executes another program.
//! Neither the process itself nor its copies (`fork(2)`) see anything of it.

use crate::program::{Arg, Program, Step};
use crate::{Error, Result, descriptors};
use linux_raw_sys::io_uring::io_uring_register_op::{
    IORING_REGISTER_FILES, IORING_REGISTER_FILES_UPDATE, IORING_REGISTER_RING_FDS,
};
use linux_raw_sys::io_uring::{
    IORING_ENTER_GETEVENTS, IORING_OFF_SQ_RING, IORING_OFF_SQES, io_uring_files_update, io_uring_op,
    io_uring_params, io_uring_rsrc_update, io_uring_sqe_flags_bit,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// In place of a descriptor: no file.
const NONE: i32 = -1;

/// Requests that a ring has room for: those of [`Queue::read_and_hold`].
const REQUESTS: u32 = 2;

/// Adds the making of a ring to what a process that is being built does; its result is a descriptor, or that there is none.
pub fn make(program: &mut Program) -> Step {
    let params = program.room(size_of::<io_uring_params>());
    program.attempt("io_uring_setup", libc::SYS_io_uring_setup, [Arg::Value(REQUESTS.into()), params])
}

/// Takes the ring with this descriptor from the process, with room for so many files, none at first.
///
/// # Errors
/// That the kernel has no rings, or not for us (`kernel.io_uring_disabled`): then `made` is no descriptor.
pub fn take(pidfd: BorrowedFd<'_>, made: i64, room: usize) -> Result<OwnedFd> {
    let fd = u32::try_from(made);
    let why = |_| Error::call("io_uring_setup", std::io::Error::from_raw_os_error(-made as i32));
    let ring = descriptors::duplicate_from(pidfd, fd.map_err(why)?)?;
    let none = vec![NONE; room];
    // SAFETY: the kernel reads so many descriptors.
    unsafe { change(&ring, IORING_REGISTER_FILES as u32, none.as_ptr().cast(), room as u32) }?;
    Ok(ring)
}

/// Adds to what a process does that its main thread holds the ring from now on, without a descriptor. The result is 1 if it
/// does.
pub fn keep(program: &mut Program, made: u32) -> Step {
    // struct io_uring_rsrc_update: any place, the descriptor.
    let update = program.data(&keeping(made));
    let (fd, one) = (Arg::Value(made.into()), Arg::Value(1));
    let op = Arg::Value(IORING_REGISTER_RING_FDS as u64);
    let held = program.attempt("register it", libc::SYS_io_uring_register, [fd, op, update, one]);
    program.call("close", libc::SYS_close, [fd]);
    held
}

/// Bytes that [`making_call`] and [`keeping_call`] want at an address in the process, all zero but for [`keeping`].
pub const ROOM: usize = size_of::<io_uring_params>();

/// The call by which a process that runs already makes a ring: number and arguments, with [`ROOM`] at `room`.
pub fn making_call(room: u64) -> (i64, [u64; 6]) {
    (libc::SYS_io_uring_setup, [REQUESTS.into(), room, 0, 0, 0, 0])
}

/// As [`keep`]: the call, with [`keeping`] at `room`. The descriptor is to be closed then.
pub fn keeping_call(made: u32, room: u64) -> (i64, [u64; 6]) {
    (libc::SYS_io_uring_register, [made.into(), IORING_REGISTER_RING_FDS as u64, room, 1, 0, 0])
}

/// What [`keeping_call`] wants in its room.
pub fn keeping(made: u32) -> Vec<u8> {
    let mut update = Vec::from(u32::MAX.to_le_bytes());
    update.resize(size_of::<io_uring_rsrc_update>() - 8, 0);
    update.extend(u64::from(made).to_le_bytes());
    update
}

/// From now on, this file (or none) is held in a place, instead of the one before.
pub fn put(ring: impl AsFd, place: usize, file: Option<BorrowedFd<'_>>) -> Result<()> {
    let fd = file.map_or(NONE, |file| file.as_raw_fd());
    let update = io_uring_files_update { offset: place as u32, resv: 0, fds: (&raw const fd) as u64 };
    let op = IORING_REGISTER_FILES_UPDATE as u32;
    // SAFETY: the kernel reads one record, and the one descriptor that it points to.
    unsafe { change(&ring, op, (&raw const update).cast(), 1) }
}

/// # Safety
/// What the operation reads at `arg` must be there.
unsafe fn change(ring: &impl AsFd, op: u32, arg: *const libc::c_void, count: u32) -> Result<()> {
    let ring = ring.as_fd().as_raw_fd();
    // SAFETY: the caller vouches for the argument.
    match unsafe { libc::syscall(libc::SYS_io_uring_register, ring, op, arg, count) } {
        0.. => Ok(()),
        _ => Err(Error::call("io_uring_register", std::io::Error::last_os_error())),
    }
}

/// `struct io_uring_sqe`, as far as it is used here.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Request {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    operation_flags: u32,
    name: u64,
    rest: [u64; 3],
}
const _: () = assert!(size_of::<Request>() == 64);

/// `struct io_uring_cqe`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Completion {
    name: u64,
    result: i32,
    flags: u32,
}

/// A ring as this process sees it, to have two things done in one system call. One process uses it at a time; one that was killed
/// in the middle of that leaves nothing behind.
#[derive(Debug)]
pub struct Queue {
    rings: Mapped,
    requests: Mapped,
    params: io_uring_params,
    asked: u64,
}

/// A part of a file in memory, shared; unmapped on drop.
#[derive(Debug)]
struct Mapped {
    at: *mut u8,
    len: usize,
}

// SAFETY: the mapping is this owner's alone in this process, whichever thread it is in.
unsafe impl Send for Mapped {}

impl Mapped {
    fn of(file: &impl AsFd, offset: u32, len: usize) -> Result<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: a new mapping, which nobody else knows of.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, fd, offset.into()) };
        if at == libc::MAP_FAILED {
            return Err(Error::call("mmap", std::io::Error::last_os_error()));
        }
        Ok(Mapped { at: at.cast(), len })
    }

    /// Where a `T` is, so many bytes in.
    fn place<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the mapping.
        unsafe { self.at.add(offset).cast() }
    }

    /// A word that the kernel and we share.
    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: inside the mapping, aligned, and nobody reads or writes it in another way.
        unsafe { &*self.place(offset as usize) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `of`.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

impl Queue {
    /// Of a ring that [`make`] has made, in whatever process.
    ///
    /// # Errors
    /// That it cannot be mapped, or that we have no rings.
    pub fn of(ring: &impl AsFd) -> Result<Self> {
        // Its maker was told where things are in it. They are where they would be in one of ours.
        // SAFETY: all zero is what the kernel expects, and it fills it in.
        let mut params: io_uring_params = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, REQUESTS, &raw mut params) };
        if fd < 0 {
            return Err(Error::call("io_uring_setup", std::io::Error::last_os_error()));
        }
        // SAFETY: a new descriptor, ours.
        drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
        let order = params.sq_off.array as usize + params.sq_entries as usize * size_of::<u32>();
        let completions = params.cq_off.cqes as usize + params.cq_entries as usize * size_of::<Completion>();
        let rings = Mapped::of(ring, IORING_OFF_SQ_RING, order.max(completions))?;
        let requests = Mapped::of(ring, IORING_OFF_SQES, params.sq_entries as usize * size_of::<Request>())?;
        Ok(Queue { rings, requests, params, asked: u64::from(std::process::id()) << 32 })
    }

    /// Reads `from` into `words`, and has the ring hold, in a place, the file whose descriptor is in them from then on, at `at`
    /// bytes. The kernel does both before it lets anybody stop or kill this process. The results: of the read, and how many files
    /// are held, or `-errno`: `EAGAIN` if there is nothing to read, `EOPNOTSUPP` if the kernel cannot read from it without waiting
    /// (before 6.10, of `userfaultfd`s).
    ///
    /// # Errors
    /// That the ring does not take requests.
    pub fn read_and_hold(
        &mut self,
        ring: impl AsFd,
        from: impl AsFd,
        words: &[AtomicU64],
        at: usize,
        place: usize,
    ) -> Result<[i32; 2]> {
        assert!(at + size_of::<i32>() <= size_of_val(words));
        self.asked += 1;
        let (address, name) = (words.as_ptr() as u64, self.asked << 1);
        let read = Request {
            opcode: io_uring_op::IORING_OP_READ as u8,
            flags: 1 << io_uring_sqe_flags_bit::IOSQE_IO_LINK_BIT as u8,
            fd: from.as_fd().as_raw_fd(),
            address,
            len: size_of_val(words) as u32,
            // That the file does not block is not enough: a ring would wait until it can be read.
            operation_flags: libc::RWF_NOWAIT as u32,
            name,
            ..Request::default()
        };
        let hold = Request {
            opcode: io_uring_op::IORING_OP_FILES_UPDATE as u8,
            fd: NONE,
            offset: place as u64,
            address: address + at as u64,
            len: 1,
            name: name | 1,
            ..Request::default()
        };
        // SAFETY: the kernel writes no more than `words`, which anybody may write at any time, and reads one descriptor of them.
        unsafe { self.run(&ring.as_fd(), [read, hold]) }
    }

    /// Has requests done that are linked, and waits for their results.
    ///
    /// # Safety
    /// What they point to must be there.
    unsafe fn run(&mut self, ring: &BorrowedFd<'_>, requests: [Request; 2]) -> Result<[i32; 2]> {
        let (rings, sq, cq) = (&self.rings, self.params.sq_off, self.params.cq_off);
        let (head, tail) = (rings.word(sq.head), rings.word(sq.tail));
        let (done, ready) = (rings.word(cq.head), rings.word(cq.tail));
        // Of what somebody before us asked for, nothing is wanted.
        done.store(ready.load(Ordering::Acquire), Ordering::Release);
        let (first, mask) = (head.load(Ordering::Acquire), rings.word(sq.ring_mask).load(Ordering::Relaxed));
        for (n, request) in requests.iter().enumerate() {
            let index = first.wrapping_add(n as u32) & mask;
            // SAFETY: inside the mapping, and the kernel reads it only when it is told to, below.
            unsafe { self.requests.place::<Request>(index as usize * size_of::<Request>()).write(*request) };
            rings.word(sq.array + index * size_of::<u32>() as u32).store(index, Ordering::Relaxed);
        }
        let last = first.wrapping_add(requests.len() as u32);
        tail.store(last, Ordering::Release);
        loop {
            let (submit, wanted) = (last.wrapping_sub(head.load(Ordering::Acquire)), requests.len());
            let (fd, wait) = (ring.as_raw_fd(), IORING_ENTER_GETEVENTS);
            // SAFETY: the caller vouches for what the requests point to.
            let r =
                unsafe { libc::syscall(libc::SYS_io_uring_enter, fd, submit, wanted, wait, 0usize, 0usize) };
            let e = std::io::Error::last_os_error();
            if r < 0 && e.raw_os_error() != Some(libc::EINTR) {
                return Err(Error::call("io_uring_enter", e));
            }
            if ready.load(Ordering::Acquire).wrapping_sub(done.load(Ordering::Relaxed)) < wanted as u32 {
                continue;
            }
            let mut results = [0; 2];
            let mut seen = done.load(Ordering::Relaxed);
            while seen != ready.load(Ordering::Acquire) {
                let mask = rings.word(cq.ring_mask).load(Ordering::Relaxed);
                let at = cq.cqes as usize + (seen & mask) as usize * size_of::<Completion>();
                // SAFETY: inside the mapping; the kernel has written it, as the tail tells.
                let completion = unsafe { rings.place::<Completion>(at).read() };
                let n = requests.iter().position(|request| request.name == completion.name);
                n.into_iter().for_each(|n| results[n] = completion.result);
                seen = seen.wrapping_add(1);
            }
            done.store(seen, Ordering::Release);
            return Ok(results);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_is_read_is_held() {
        // SAFETY: as in `Queue::of`.
        let mut params: io_uring_params = unsafe { std::mem::zeroed() };
        // SAFETY: as there.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, REQUESTS, &raw mut params) };
        if fd < 0 {
            return; // rings are not to be had here
        }
        // SAFETY: a new descriptor.
        let ring = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let none = [NONE; 3];
        // SAFETY: three descriptors.
        unsafe { change(&ring, IORING_REGISTER_FILES as u32, none.as_ptr().cast(), 3) }.unwrap();
        let mut queue = Queue::of(&ring).unwrap();
        for turn in 0..100 {
            let (from, mut tell) = std::io::pipe().unwrap();
            let (held, mut end) = std::io::pipe().unwrap();
            let words = [const { AtomicU64::new(0) }; 4];
            let mut message = [7u64, u64::from(end.as_raw_fd() as u32), 8, 9];
            tell.write_all(&message.map(u64::to_le_bytes).concat()).unwrap();
            assert_eq!(queue.read_and_hold(&ring, &from, &words, 8, turn % 3).unwrap(), [32, 1]);
            assert_eq!(words.each_ref().map(|w| w.load(Ordering::Relaxed)), message);
            // It is open now, also when it is closed.
            end.write_all(b"x").unwrap();
            drop(end);
            let mut seen = [0; 1];
            assert_eq!(rustix::io::read(&held, &mut seen).unwrap(), 1);
            rustix::io::ioctl_fionbio(&held, true).unwrap();
            assert_eq!(rustix::io::read(&held, &mut seen).unwrap_err(), rustix::io::Errno::AGAIN);
            put(&ring, turn % 3, None).unwrap();
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            // The kernel lets go of it in its own time.
            while rustix::io::read(&held, &mut seen) != Ok(0) {
                assert!(std::time::Instant::now() < deadline);
            }
            // What is no descriptor is not held; and where nothing can be read nothing is.
            message[1] = 1 << 30;
            tell.write_all(&message.map(u64::to_le_bytes).concat()).unwrap();
            assert_eq!(queue.read_and_hold(&ring, &from, &words, 8, 0).unwrap(), [32, -libc::EBADF]);
            rustix::io::ioctl_fionbio(&from, true).unwrap();
            let none = queue.read_and_hold(&ring, &from, &words, 8, 0).unwrap();
            assert_eq!(none, [-libc::EAGAIN, -libc::ECANCELED]);
        }
    }
}
