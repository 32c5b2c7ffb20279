//! Terminals and pseudo-terminals.

use crate::descriptors::{check, ioctl_int, ioctl_set_int};
use crate::{Error, Result};
use rustix::fs::{major, makedev, minor};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `struct termios2` of the kernel.
const TERMIOS2: usize = 44;
const TCGETS2: u64 = 0x802c_542a;
const TCSETS2: u64 = 0x402c_542b;
const TIOCGPTLCK: u64 = 0x8004_5439;
const TIOCGPKT: u64 = 0x8004_5438;
const TIOCGPTPEER: u64 = 0x5441;
const TIOCGEXCL: u64 = 0x8004_5440;
const TIOCGDEV: u64 = 0x8004_5432;

/// Major device numbers of slaves, each with [`PER_MAJOR`] of them (`UNIX98_PTY_SLAVE_MAJOR`).
const SLAVES: std::ops::RangeInclusive<u32> = 136..=143;
const PER_MAJOR: u32 = 256;

/// Device number of the slave of a pseudo-terminal, by its number within its devpts.
pub fn slave_device(number: u32) -> u64 {
    makedev(SLAVES.start() + number / PER_MAJOR, number % PER_MAJOR)
}

/// Number of a pseudo-terminal within its devpts, by the device number of its slave; none of other devices.
pub fn slave_number(device: u64) -> Option<u32> {
    let major = major(device);
    SLAVES.contains(&major).then(|| (major - SLAVES.start()) * PER_MAJOR + minor(device))
}

/// Settings of a terminal: raw `struct termios2`.
pub fn settings(tty: impl AsFd) -> Result<Vec<u8>> {
    let mut raw = vec![0u8; TERMIOS2];
    // SAFETY: TCGETS2 writes one `struct termios2` of 44 bytes.
    let r = unsafe { libc::ioctl(tty.as_fd().as_raw_fd(), TCGETS2 as libc::Ioctl, raw.as_mut_ptr()) };
    check(|| "read the settings of a terminal".into(), r.into())?;
    Ok(raw)
}

/// Gives a terminal settings that [`settings`] returned.
pub fn set_settings(tty: impl AsFd, raw: &[u8]) -> Result<()> {
    if raw.len() != TERMIOS2 {
        return Err(Error::Other(format!("terminal settings of {} bytes", raw.len())));
    }
    // SAFETY: TCSETS2 reads one `struct termios2`, whose length was checked.
    let r = unsafe { libc::ioctl(tty.as_fd().as_raw_fd(), TCSETS2 as libc::Ioctl, raw.as_ptr()) };
    check(|| "set the settings of a terminal".into(), r.into()).map(drop)
}

/// Rows, columns, x pixels, y pixels.
pub fn window(tty: impl AsFd) -> Result<[u16; 4]> {
    let mut size = [0u16; 4];
    // SAFETY: TIOCGWINSZ writes a `struct winsize`, four shorts.
    let r = unsafe { libc::ioctl(tty.as_fd().as_raw_fd(), libc::TIOCGWINSZ, size.as_mut_ptr()) };
    check(|| "read the window size of a terminal".into(), r.into())?;
    Ok(size)
}

/// Sets the window size.
pub fn set_window(tty: impl AsFd, size: [u16; 4]) -> Result<()> {
    // SAFETY: TIOCSWINSZ reads a `struct winsize`, four shorts.
    let r = unsafe { libc::ioctl(tty.as_fd().as_raw_fd(), libc::TIOCSWINSZ, size.as_ptr()) };
    check(|| "set the window size of a terminal".into(), r.into()).map(drop)
}

/// Number of the line discipline of a terminal; 0 (`N_TTY`): the one of terminals.
pub fn discipline(tty: impl AsFd) -> Result<i32> {
    ioctl_int(tty, libc::TIOCGETD, "read the line discipline of a terminal")
}

/// Number of the slave of a master.
pub fn number(master: impl AsFd) -> Result<u32> {
    Ok(ioctl_int(master, libc::TIOCGPTN, "read the number of a pty")? as u32)
}

/// Whether the slave of a master cannot be opened.
pub fn locked(master: impl AsFd) -> Result<bool> {
    Ok(ioctl_int(master, TIOCGPTLCK, "read the lock of a pty")? != 0)
}

/// Locks or unlocks the slave of a master.
pub fn set_locked(master: impl AsFd, locked: bool) -> Result<()> {
    ioctl_set_int(master, libc::TIOCSPTLCK, locked.into(), "set the lock of a pty")
}

/// Whether a master is in packet mode.
pub fn packet_mode(master: impl AsFd) -> Result<bool> {
    Ok(ioctl_int(master, TIOCGPKT, "read the packet mode of a pty")? != 0)
}

/// Switches packet mode of a master.
pub fn set_packet_mode(master: impl AsFd, on: bool) -> Result<()> {
    ioctl_set_int(master, libc::TIOCPKT, on.into(), "set the packet mode of a pty")
}

/// Device number of the terminal behind a descriptor, which may have been opened by another name (`/dev/tty`).
pub fn device(tty: impl AsFd) -> Result<u64> {
    Ok(u64::from(ioctl_int(tty, TIOCGDEV, "read the device of a terminal")? as u32))
}

/// Whether a terminal is in exclusive mode.
pub fn exclusive(tty: impl AsFd) -> Result<bool> {
    Ok(ioctl_int(tty, TIOCGEXCL, "read the exclusive mode of a terminal")? != 0)
}

/// Puts a terminal in exclusive mode (`TIOCEXCL`): it cannot be opened any more, but by those with `CAP_SYS_ADMIN`.
pub fn set_exclusive(tty: impl AsFd) -> Result<()> {
    // SAFETY: TIOCEXCL takes no argument.
    let r = unsafe { libc::ioctl(tty.as_fd().as_raw_fd(), libc::TIOCEXCL) };
    check(|| "set the exclusive mode of a terminal".into(), r.into()).map(drop)
}

/// The session that the slave of a master controls, by the id of its leader.
pub fn session(master: impl AsFd) -> Result<Option<u32>> {
    match ioctl_int(master, libc::TIOCGSID, "read the session of a pty") {
        Ok(session) => Ok(u32::try_from(session).ok().filter(|s| *s != 0)),
        Err(e) if e.errno() == Some(libc::ENOTTY) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Opens the slave of a master, whatever its name is in this mount namespace (`TIOCGPTPEER`).
pub fn open_slave(master: impl AsFd, flags: i32) -> Result<OwnedFd> {
    // Asked for here, close-on-exec would also stay among the status flags of the description.
    let flags = (flags | libc::O_NOCTTY) & !libc::O_CLOEXEC;
    // SAFETY: TIOCGPTPEER takes flags by value and returns a new descriptor nobody owns.
    let slave = unsafe {
        let r = libc::ioctl(master.as_fd().as_raw_fd(), TIOCGPTPEER as libc::Ioctl, flags);
        let fd = check(|| "open the slave of a pty".into(), r.into())?;
        OwnedFd::from_raw_fd(fd as i32)
    };
    rustix::io::fcntl_setfd(&slave, rustix::io::FdFlags::CLOEXEC).map_err(|e| Error::call("F_SETFD", e))?;
    Ok(slave)
}

/// `TIOCSCTTY` of `ioctl_tty(2)`.
pub const TIOCSCTTY: u64 = 0x540e;
