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
use linux_raw_sys::io_uring::{io_uring_files_update, io_uring_params, io_uring_rsrc_update};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// In place of a descriptor: no file.
const NONE: i32 = -1;

/// Adds the making of a ring to what a process that is being built does; its result is a descriptor, or that there is none.
pub fn make(program: &mut Program) -> Step {
    let params = program.room(size_of::<io_uring_params>());
    program.attempt("io_uring_setup", libc::SYS_io_uring_setup, [Arg::Value(1), params])
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
    let mut update = Vec::from(u32::MAX.to_le_bytes());
    update.resize(size_of::<io_uring_rsrc_update>() - 8, 0);
    update.extend(u64::from(made).to_le_bytes());
    let update = program.data(&update);
    let (fd, one) = (Arg::Value(made.into()), Arg::Value(1));
    let op = Arg::Value(IORING_REGISTER_RING_FDS as u64);
    let held = program.attempt("register it", libc::SYS_io_uring_register, [fd, op, update, one]);
    program.call("close", libc::SYS_close, [fd]);
    held
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
