//! What devices tell of themselves.

use crate::{Error, Result};
use std::io::Error as IoError;
use std::os::fd::{AsFd, AsRawFd};

/// `TUNGETIFF`.
const TUN_INTERFACE: libc::c_ulong = 0x8004_54d2;
/// Length of `struct ifreq`, bytes.
const INTERFACE: usize = 40;

/// Whether a descriptor of `/dev/net/tun` belongs to an interface.
///
/// # Errors
/// That it does not tell.
pub fn is_interface(tun: impl AsFd) -> Result<bool> {
    let mut interface = [0u64; INTERFACE / 8];
    // SAFETY: TUNGETIFF writes a `struct ifreq`, for which there is room.
    let r = unsafe { libc::ioctl(tun.as_fd().as_raw_fd(), TUN_INTERFACE, interface.as_mut_ptr()) };
    let e = IoError::last_os_error();
    match e.raw_os_error() {
        _ if r >= 0 => Ok(true),
        Some(libc::EBADFD) => Ok(false),
        _ => Err(Error::call("look for the interface of a tun device", e)),
    }
}
