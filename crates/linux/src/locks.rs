//! File locks: `flock(2)`, POSIX record locks, open file description locks.

use crate::descriptors::check;
use crate::{Error, Result};
use std::os::fd::{AsFd, AsRawFd};

/// A byte range to lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRange {
    /// Exclusive rather than shared.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte; `None`: to the end of the file, however it grows.
    pub end: Option<u64>,
}

impl LockRange {
    /// All of a file, for one alone.
    pub const ALL: LockRange = LockRange { exclusive: true, start: 0, end: None };

    /// The range as a `struct flock`, whose raw bytes `fcntl(F_SETLK)` reads.
    pub fn to_flock(self) -> Result<libc::flock> {
        let bad = || Error::Other(format!("lock range {self:?} is out of bounds"));
        let start = i64::try_from(self.start).map_err(|_| bad())?;
        let len = match self.end {
            None => 0,
            Some(end) => {
                let len = end.checked_sub(self.start).and_then(|n| n.checked_add(1)).ok_or_else(bad)?;
                i64::try_from(len).map_err(|_| bad())?
            }
        };
        let kind = if self.exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
        let whence = libc::SEEK_SET as i16;
        Ok(libc::flock { l_type: kind as i16, l_whence: whence, l_start: start, l_len: len, l_pid: 0 })
    }

    /// The bytes of [`LockRange::to_flock`].
    pub fn to_bytes(self) -> Result<Vec<u8>> {
        let flock = self.to_flock()?;
        let mut bytes = vec![0u8; size_of::<libc::flock>()];
        bytes[0..2].copy_from_slice(&flock.l_type.to_ne_bytes());
        bytes[2..4].copy_from_slice(&flock.l_whence.to_ne_bytes());
        bytes[8..16].copy_from_slice(&flock.l_start.to_ne_bytes());
        bytes[16..24].copy_from_slice(&flock.l_len.to_ne_bytes());
        Ok(bytes)
    }
}

const _: () = assert!(size_of::<libc::flock>() == 32 && std::mem::offset_of!(libc::flock, l_start) == 8);

const F_OFD_GETLK: i32 = 36;
const F_OFD_SETLK: i32 = 37;

/// Takes a lock that belongs to the open file description, without waiting.
pub fn lock_description(fd: impl AsFd, range: LockRange) -> Result<()> {
    let flock = range.to_flock()?;
    // SAFETY: F_OFD_SETLK reads one valid `struct flock` (l_pid is 0 as it demands).
    let r = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_OFD_SETLK, &raw const flock) };
    check(|| "lock a range of a file".into(), r.into()).map(drop)
}

/// Lets go of what the description has locked of a range.
pub fn unlock_description(fd: impl AsFd, range: LockRange) -> Result<()> {
    let flock = libc::flock { l_type: libc::F_UNLCK as i16, ..range.to_flock()? };
    // SAFETY: F_OFD_SETLK reads one valid `struct flock` (l_pid is 0 as it demands).
    let r = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_OFD_SETLK, &raw const flock) };
    check(|| "unlock a range of a file".into(), r.into()).map(drop)
}

/// Takes a `flock(2)` lock without waiting.
pub fn flock(fd: impl AsFd, exclusive: bool) -> Result<()> {
    let how = if exclusive { libc::LOCK_EX } else { libc::LOCK_SH };
    // SAFETY: flock touches no memory.
    let r = unsafe { libc::flock(fd.as_fd().as_raw_fd(), how | libc::LOCK_NB) };
    check(|| "lock a file".into(), r.into()).map(drop)
}

/// Who holds a POSIX or description lock that conflicts with this range: `Some(pid)`, -1 for a description lock.
pub fn holder(fd: impl AsFd, range: LockRange) -> Result<Option<i32>> {
    let mut flock = range.to_flock()?;
    // SAFETY: F_OFD_GETLK reads and writes one valid `struct flock`.
    let r = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_OFD_GETLK, &raw mut flock) };
    check(|| "test a lock".into(), r.into())?;
    Ok((i32::from(flock.l_type) != libc::F_UNLCK).then_some(flock.l_pid))
}

/// A file that somebody has for himself, by an exclusive `flock(2)` or a lease for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flocked {
    /// Major and minor number of the device, as the kernel calls it (not always as `stat(2)` does: major number 0).
    pub device: (u32, u32),
    /// Inode number.
    pub inode: u64,
}

/// All exclusive locks of `flock(2)` that processes of our pid namespace hold. Nobody notices that they are looked at.
///
/// # Errors
/// If `/proc/locks` cannot be read.
pub fn flocked() -> Result<Vec<Flocked>> {
    all_exclusive("FLOCK")
}

/// All leases for writing that processes of our pid namespace hold (`F_SETLEASE`). Nobody notices that they are looked at.
///
/// # Errors
/// If `/proc/locks` cannot be read.
pub fn leased() -> Result<Vec<Flocked>> {
    all_exclusive("LEASE")
}

fn all_exclusive(kind: &str) -> Result<Vec<Flocked>> {
    let text = std::fs::read_to_string("/proc/locks").map_err(|e| Error::file("/proc/locks", e))?;
    Ok(text.lines().filter_map(|line| exclusive(kind, line)).collect())
}

/// `1: FLOCK  ADVISORY  WRITE 709 fd:01:1044 0 EOF`; waiters have `->` behind the number.
fn exclusive(kind: &str, line: &str) -> Option<Flocked> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let is_one = words.next()? == kind && words.next().is_some() && words.next()? == "WRITE";
    let mut place = words.nth(1).filter(|_| is_one)?.split(':');
    let mut hex = || u32::from_str_radix(place.next()?, 16).ok();
    let device = (hex()?, hex()?);
    Some(Flocked { device, inode: place.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn lines_of_locks() {
        let found = Flocked { device: (0xfd, 1), inode: 1044 };
        assert_eq!(exclusive("LEASE", "4: LEASE  ACTIVE    WRITE 709 fd:01:1044 0 EOF"), Some(found));
        assert_eq!(exclusive("FLOCK", "1: FLOCK  ADVISORY  WRITE 709 fd:01:1044 0 EOF"), Some(found));
        for other in [
            "1: FLOCK  ADVISORY  READ  709 fd:01:1044 0 EOF",
            "1: -> FLOCK  ADVISORY  WRITE 709 fd:01:1044 0 EOF",
            "2: POSIX  ADVISORY  WRITE 709 fd:01:1044 0 EOF",
            "3: FLOCK",
            "",
        ] {
            assert_eq!(exclusive("FLOCK", other), None, "{other}");
        }
    }

    #[test]
    fn a_lock_of_ours_is_seen() {
        let file = tempfile::tempfile().expect("a file");
        let inode = file.metadata().expect("metadata").ino();
        let is_seen = || flocked().expect("reads").iter().any(|lock| lock.inode == inode);
        flock(&file, false).expect("locks");
        assert!(!is_seen());
        flock(&file, true).expect("locks");
        assert!(is_seen());
    }
}
