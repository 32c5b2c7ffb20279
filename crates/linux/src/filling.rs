//! How fast this machine puts pages into memory that waits for them: what a restore can be measured against.

use crate::userfault::{Mode, Put, Userfault};
use crate::{Error, RemoteAddr, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Memory of this process. It is unmapped on drop.
struct Mapping {
    start: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, which nobody else knows of.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::call("mmap", std::io::Error::last_os_error()));
        }
        Ok(Mapping { start, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

/// Puts `len` bytes into new memory of this process by `UFFDIO_COPY`, in the order of their addresses, `at_a_time` bytes with
/// each call, by so many threads; tells how long that took. They come from memory that was written long before.
pub fn time(len: usize, at_a_time: usize, threads: usize) -> Result<Duration> {
    let source = vec![1u8; len];
    // The descriptor is closed first: who unmaps memory that is followed waits until somebody has read that.
    let memory = Mapping::new(len)?;
    let userfault = Userfault::of_ourselves(Mode::Missing)?;
    let start = memory.start as u64;
    userfault.register_missing(RemoteAddr(start), RemoteAddr(start + len as u64))?;
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        loop {
            let at = next.fetch_add(at_a_time, Ordering::Relaxed);
            if at >= len {
                return Ok(());
            }
            let pages = &source[at..(at + at_a_time).min(len)];
            match userfault.put(RemoteAddr(start + at as u64), pages)? {
                Put::All => {}
                other => return Err(Error::Other(format!("pages cannot be put in: {other:?}"))),
            }
        }
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker.join().unwrap_or_else(|_| Err(Error::Other("a thread failed".into())))
        })
    })?;
    Ok(began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_some_time() {
        match time(1 << 20, 64 << 10, 2) {
            Ok(took) => assert!(took > Duration::ZERO),
            // Not every kernel or user may have a userfaultfd.
            Err(e) => assert!(matches!(e.errno(), Some(libc::EPERM | libc::ENOSYS | libc::EINVAL)), "{e}"),
        }
    }
}
