//! Reading files without a trace: `read(2)` changes the time of the last access, and is an event of inotify and fanotify. Looking at a
//! mapping is no event; to make one may count as an access.

use crate::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

const PAGE: u64 = 4096;

/// Opens a file for reading, with further flags, so that it is not told when it was read: that is for its owner and the privileged,
/// others leave that trace.
///
/// # Errors
/// That it cannot be opened.
pub fn open(path: impl AsRef<Path>, flags: OFlags) -> Result<OwnedFd> {
    let (path, flags) = (path.as_ref(), OFlags::RDONLY | OFlags::CLOEXEC | flags);
    let opened = match rustix::fs::open(path, flags | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => rustix::fs::open(path, flags, Mode::empty()),
        opened => opened,
    };
    opened.map_err(|e| Error::file(path, e))
}

/// As [`open`], of what a descriptor refers to: another description of the same file.
///
/// # Errors
/// As [`open`].
pub fn reopen(file: impl AsFd) -> Result<OwnedFd> {
    open(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()), OFlags::empty())
}

/// What `/proc/PID/maps` calls a file where it is mapped: device and inode number. On some file systems, such as btrfs, the device is
/// another one than stat(2) tells.
///
/// # Errors
/// That it cannot be opened or mapped.
pub fn as_mapped(file: impl AsFd) -> Result<(u64, u64)> {
    let own = reopen(file)?;
    let failed = |e: std::io::Error| Error::call("map a file", e);
    // SAFETY: a mapping of its own at a place that the kernel chooses, which is not accessed.
    let at = unsafe {
        mmap(std::ptr::null_mut(), PAGE as usize, ProtFlags::READ, MapFlags::PRIVATE, &own, 0)
            .map_err(|e| failed(e.into()))?
    };
    let maps = crate::proc::Proc::process(std::process::id()).and_then(|own| own.maps());
    // SAFETY: exactly the mapping made above.
    let _ = unsafe { munmap(at, PAGE as usize) };
    let found = maps?.into_iter().find(|vma| (vma.start..vma.end).contains(&(at as u64)));
    found.map(|vma| (vma.dev, vma.ino)).ok_or_else(|| Error::Other("a mapping of ours is not told".into()))
}

/// As [`crate::digest::read_at`]: reads at an offset, by a mapping of the file; what is behind its end is zero. Its position is not
/// touched.
///
/// # Errors
/// That it is not open for reading, or cannot be mapped or read.
pub fn read_at(file: impl AsFd, offset: u64, buffer: &mut [u8]) -> Result<()> {
    let failed = |e: std::io::Error| Error::call(format!("read at {offset} by a mapping"), e);
    let size = rustix::fs::fstat(&file).map_err(|e| failed(e.into()))?.st_size as u64;
    let there = size.saturating_sub(offset).min(buffer.len() as u64) as usize;
    buffer[there..].fill(0);
    if there == 0 {
        return Ok(());
    }
    let before = offset % PAGE;
    let len = before as usize + there;
    // SAFETY: a mapping of its own at a place that the kernel chooses.
    let mapped = unsafe {
        mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, offset - before)
            .map_err(|e| failed(e.into()))?
    };
    let read = copy(mapped as u64 + before, &mut buffer[..there]).and_then(|read| {
        // Where nothing can be read the file has been cut meanwhile, or cannot be read.
        let now = rustix::fs::fstat(&file)?.st_size as u64;
        let is_cut = read == there || offset + read as u64 >= now.next_multiple_of(PAGE);
        if is_cut { Ok(()) } else { Err(std::io::Error::from_raw_os_error(libc::EIO)) }
    });
    let read = read.map_err(failed);
    // SAFETY: the mapping made above, to which nothing refers.
    unsafe { munmap(mapped, len) }.map_err(|e| failed(e.into()))?;
    read
}

/// Copies from a mapping by the kernel, which tells where there is nothing to be read, and a look at it would end us (`SIGBUS`); how
/// much there is. The rest is zero.
fn copy(from: u64, to: &mut [u8]) -> std::io::Result<usize> {
    let mut done = 0;
    while done < to.len() {
        let rest = &mut to[done..];
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let remote = libc::iovec { iov_base: (from + done as u64) as *mut _, iov_len: rest.len() };
        // SAFETY: the kernel writes to `rest` only, and checks where it reads.
        let n =
            unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        match n {
            0 => break,
            n if n > 0 => done += n as usize,
            _ => match std::io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::EFAULT) => break,
                e if e.raw_os_error() == Some(libc::EINTR) => {}
                e => return Err(e),
            },
        }
    }
    to[done..].fill(0);
    Ok(done)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_is_told_as_by_stat() {
        // (Where that is so: not on btrfs.)
        let exe = open("/proc/self/exe", OFlags::empty()).unwrap();
        let vma = crate::proc::Proc::process(std::process::id()).unwrap().maps().unwrap().remove(0);
        assert_eq!(as_mapped(&exe).unwrap(), (vma.dev, vma.ino));
    }
    use std::io::{Seek, Write};
    use std::os::fd::AsFd;

    #[test]
    fn the_time_of_the_last_access_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "contents").unwrap();
        let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_times(std::fs::FileTimes::new().set_accessed(long_ago)).unwrap();
        let mut buffer = [0; 8];
        crate::digest::read_at(reopen(&file).unwrap(), 0, &mut buffer).unwrap();
        assert_eq!(&buffer, b"contents");
        assert_eq!(file.metadata().unwrap().accessed().unwrap(), long_ago);
    }

    #[test]
    fn what_is_read_is_no_event_and_moves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut file = std::fs::File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        let bytes: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
        file.write_all(&bytes).unwrap();
        file.seek(std::io::SeekFrom::Start(7)).unwrap();
        let watch = crate::watches::inotify().unwrap();
        crate::watches::inotify_watch(&watch, &path, libc::IN_ALL_EVENTS, 1).unwrap();
        let mut buffer = vec![1; 9_000];
        read_at(&file, 5_000, &mut buffer).unwrap();
        assert_eq!(buffer[..5_000], bytes[5_000..]);
        assert!(buffer[5_000..].iter().all(|b| *b == 0));
        assert_eq!(file.stream_position().unwrap(), 7);
        assert_eq!(crate::descriptors::readable(watch.as_fd()).unwrap(), 0);
        crate::digest::read_at(&file, 0, &mut buffer).unwrap();
        assert!(crate::descriptors::readable(watch.as_fd()).unwrap() > 0, "nobody would notice anything");
    }
}
