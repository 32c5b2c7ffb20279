//! Memory files: memfds with their seals, and filling files sparsely.

use crate::descriptors::check;
use crate::{Error, Result};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const F_ADD_SEALS: i32 = 1033;
const F_GET_SEALS: i32 = 1034;
/// `F_SEAL_SEAL`: no seal can be added any more.
pub const SEAL_SEAL: u32 = 1;

/// `F_SEAL_WRITE`: nothing can be written any more.
pub const SEAL_WRITE: u32 = 8;

/// A new, empty memfd that can be sealed. `huge_page` is its page size in bytes, 0 for ordinary pages.
pub fn create(name: &[u8], huge_page: u64) -> Result<OwnedFd> {
    let c = CString::new(name).map_err(|e| Error::Other(e.to_string()))?;
    let mut flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    if huge_page > 0 {
        flags |= libc::MFD_HUGETLB | (huge_page.trailing_zeros() << libc::MFD_HUGE_SHIFT);
    }
    // SAFETY: a valid C string; the result is a new descriptor nobody owns.
    unsafe {
        let r = libc::memfd_create(c.as_ptr(), flags);
        let fd = check(|| format!("make memfd {}", String::from_utf8_lossy(name)), r.into())?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Name of a memfd that is what shared anonymous memory is called in `/proc/PID/maps`: it is there in its place ([`shared_anonymous`]).
pub const IN_PLACE_OF_SHARED: &[u8] = b"dev/zero";

/// Shared anonymous memory as `mmap(MAP_SHARED | MAP_ANONYMOUS)` makes it, as a descriptor to map it from.
///
/// The kernel hands out the file behind a mapping through `/proc/self/map_files`, with `CAP_CHECKPOINT_RESTORE`; without that it is a memfd,
/// which is the same kind of memory under another name.
pub fn shared_anonymous(size: u64, huge_page: u64) -> Result<OwnedFd> {
    let len = usize::try_from(size).map_err(|e| Error::Other(e.to_string()))?;
    let mut flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    if huge_page > 0 {
        flags |= libc::MAP_HUGETLB | ((huge_page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT);
    }
    // SAFETY: a new mapping that nothing refers to and that is not accessed.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(Error::call("map shared memory", std::io::Error::last_os_error()));
    }
    let step = huge_page.max(4096);
    let path = format!("/proc/self/map_files/{:x}-{:x}", at as u64, at as u64 + size.next_multiple_of(step));
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    let opened = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).map_err(|e| Error::file(&path, e));
    // SAFETY: exactly the mapping made above.
    unsafe { libc::munmap(at, len) };
    match opened {
        Err(e) if e.errno() == Some(libc::EPERM) => {
            let made = create(IN_PLACE_OF_SHARED, huge_page)?;
            rustix::fs::ftruncate(&made, size).map_err(|e| Error::call("give a memfd its size", e))?;
            Ok(made)
        }
        opened => opened,
    }
}

/// Seals of a memfd; `None` for a file that cannot have any.
pub fn seals(fd: impl AsFd) -> Result<Option<u32>> {
    // SAFETY: F_GET_SEALS touches no memory.
    let r = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_GET_SEALS) };
    match check(|| "read the seals of a memfd".into(), r.into()) {
        Ok(seals) => Ok(Some(seals as u32)),
        Err(e) if e.errno() == Some(libc::EINVAL) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Adds seals.
pub fn add_seals(fd: impl AsFd, seals: u32) -> Result<()> {
    // SAFETY: F_ADD_SEALS touches no memory.
    let r = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_ADD_SEALS, seals) };
    check(|| "seal a memfd".into(), r.into()).map(drop)
}

/// Writes into a file at an offset, also into hugetlb files, which take no `write(2)`.
pub fn write_at(fd: impl AsFd, offset: u64, bytes: &[u8], huge_page: u64) -> Result<()> {
    if huge_page > 0 {
        return write_mapped(fd, offset, bytes, huge_page);
    }
    let (mut at, mut rest) = (offset, bytes);
    while !rest.is_empty() {
        let n = rustix::io::pwrite(&fd, rest, at).map_err(|e| Error::call(format!("write at {at}"), e))?;
        if n == 0 {
            return Err(Error::Other(format!("nothing could be written at {at}")));
        }
        (at, rest) = (at + n as u64, &rest[n..]);
    }
    Ok(())
}

fn write_mapped(fd: impl AsFd, offset: u64, bytes: &[u8], huge_page: u64) -> Result<()> {
    let start = offset / huge_page * huge_page;
    let skip = (offset - start) as usize;
    let len = (skip + bytes.len()).next_multiple_of(huge_page as usize);
    let size = rustix::fs::fstat(&fd).map_err(|e| Error::call("fstat", e))?.st_size as u64;
    if start + len as u64 > size.next_multiple_of(huge_page) {
        return Err(Error::Other(format!(
            "{} bytes at {offset} are behind the end of the file",
            bytes.len()
        )));
    }
    // Huge pages that are not there would be a SIGBUS on access; MAP_POPULATE does not tell, fallocate does.
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&fd, flags, start, len as u64).map_err(|e| Error::call("reserve huge pages", e))?;
    // SAFETY: a new shared mapping of a file of ours, inside its size and with all its pages allocated, is written
    // within its bounds and unmapped before anything else can refer to it.
    unsafe {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let raw = fd.as_fd().as_raw_fd();
        let at = libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, raw, start as i64);
        if at == libc::MAP_FAILED {
            return Err(Error::call("map huge pages", std::io::Error::last_os_error()));
        }
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.cast::<u8>().add(skip), bytes.len());
        libc::munmap(at, len);
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn shared_anonymous_memory_is_a_file_of_its_own_kind() {
        let fd = shared_anonymous(3 * 4096, 0).unwrap();
        write_at(&fd, 5000, b"x", 0).unwrap();
        let link = crate::fdinfo::link(std::process::id(), fd.as_raw_fd() as u32).unwrap();
        assert_eq!(link, b"/dev/zero (deleted)");
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, 3 * 4096);
    }

    #[test]
    fn seals_are_read_and_added() {
        let fd = create(b"x", 0).unwrap();
        assert_eq!(seals(&fd).unwrap(), Some(0));
        add_seals(&fd, 6).unwrap();
        assert_eq!(seals(&fd).unwrap(), Some(6));
        let file = tempfile::tempfile().unwrap();
        let _ = seals(&file).unwrap();
    }
}
