//! Files that a process holds without having descriptors of them: `io_uring_register(2)`.
//!
//! They are registered with a ring, and the ring with the process's main thread; all descriptors of it in the process are
//! closed. The files stay open until whoever has the ring takes them out, or that thread ends, or executes another program.
//! Neither the process itself nor its copies (`fork(2)`) see anything of it.

use crate::program::{Arg, Program, Run};
use crate::remote::Remote;
use crate::{Error, Result, descriptors};
use linux_raw_sys::io_uring::io_uring_register_op::{
    IORING_REGISTER_FILES, IORING_REGISTER_FILES_UPDATE, IORING_REGISTER_RING_FDS,
};
use linux_raw_sys::io_uring::{io_uring_files_update, io_uring_params, io_uring_rsrc_update};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// In place of a descriptor: no file.
const NONE: i32 = -1;

/// Makes a process that is being built hold up to `room` files, none at first; returns the ring.
///
/// # Errors
/// That the kernel has no rings, or not for us (`kernel.io_uring_disabled`). The process is as before.
pub fn make(remote: &mut Remote<'_>, pidfd: BorrowedFd<'_>, room: usize) -> Result<OwnedFd> {
    let mut setup = Program::new();
    let params = setup.room(size_of::<io_uring_params>());
    let entries = Arg::Value(1);
    setup.call("io_uring_setup", libc::SYS_io_uring_setup, [entries, params]);
    let fd = remote.run(&setup)?.results[0] as u32;
    let ring = descriptors::duplicate_from(pidfd, fd);
    let mut register = Program::new();
    // struct io_uring_rsrc_update: any place, the descriptor.
    let mut update = Vec::from(u32::MAX.to_le_bytes());
    update.resize(size_of::<io_uring_rsrc_update>() - 8, 0);
    update.extend(u64::from(fd).to_le_bytes());
    let update = register.data(&update);
    let (fd, one) = (Arg::Value(fd.into()), Arg::Value(1));
    let op = Arg::Value(IORING_REGISTER_RING_FDS as u64);
    let registered = register.attempt("register it", libc::SYS_io_uring_register, [fd, op, update, one]);
    register.call("close", libc::SYS_close, [fd]);
    let done = remote.run(&register)?.results[registered.0 as usize];
    if done != 1 {
        return Err(Error::call("IORING_REGISTER_RING_FDS", std::io::Error::from_raw_os_error(-done as i32)));
    }
    let ring = ring?;
    let none = vec![NONE; room];
    // SAFETY: the kernel reads so many descriptors.
    unsafe { change(&ring, IORING_REGISTER_FILES as u32, none.as_ptr().cast(), room as u32) }?;
    Ok(ring)
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
