//! Pipes and FIFOs: their capacity, and their contents without consuming them.

use crate::descriptors::{check, readable};
use crate::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const F_SETPIPE_SZ: i32 = 1031;
const F_GETPIPE_SZ: i32 = 1032;

const PAGE: u64 = 4096;

/// A new pipe: read end and write end; `flags` as for `pipe2(2)` (close-on-exec is added).
pub fn pipe(flags: i32) -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0i32; 2];
    // SAFETY: pipe2 writes two descriptors that nobody owns yet.
    unsafe {
        check(|| "make a pipe".into(), libc::pipe2(fds.as_mut_ptr(), flags | libc::O_CLOEXEC).into())?;
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

/// Capacity in bytes.
pub fn capacity(pipe: impl AsFd) -> Result<u64> {
    // SAFETY: F_GETPIPE_SZ touches no memory.
    let r = unsafe { libc::fcntl(pipe.as_fd().as_raw_fd(), F_GETPIPE_SZ) };
    Ok(check(|| "read the capacity of a pipe".into(), r.into())? as u64)
}

/// Sets the capacity in bytes.
pub fn set_capacity(pipe: impl AsFd, bytes: u64) -> Result<()> {
    let wanted = i32::try_from(bytes).map_err(|_| Error::Other(format!("no pipe holds {bytes} bytes")))?;
    // SAFETY: F_SETPIPE_SZ touches no memory of ours.
    let r = unsafe { libc::fcntl(pipe.as_fd().as_raw_fd(), F_SETPIPE_SZ, wanted) };
    check(|| format!("set the capacity of a pipe to {bytes} bytes"), r.into()).map(drop)
}

/// Makes a pipe at least so large, in bytes.
///
/// # Errors
/// What the kernel says, such as that only the privileged may have one so large; then it is as it was.
pub fn enlarge(pipe: impl AsFd, bytes: u64) -> Result<()> {
    if capacity(&pipe)? < bytes { set_capacity(pipe, bytes) } else { Ok(()) }
}

/// The capacity that a pipe needs at most, in bytes, for parts of these lengths to be written to it: each may begin a page.
pub fn room(parts: impl IntoIterator<Item = usize>) -> u64 {
    parts.into_iter().map(|length| (length as u64).next_multiple_of(PAGE)).sum()
}

/// The unread contents of a pipe, left where they are: one entry for each packet, or one for all that is not in
/// packets. Behind a packet that is alone comes an empty entry: more may follow that are to stay apart from it. `read_end` needs read
/// access. Others may write to it and read from it meanwhile: it is what was in it at some instant.
///
/// `tee(2)` links all of the pipe's buffers at once into a pipe of ours with as many slots, so that all of them fit; a packet keeps
/// its boundary there, and reading ends at it.
///
/// # Errors
/// What the kernel says.
pub fn contents(read_end: impl AsFd) -> Result<Vec<Vec<u8>>> {
    if readable(&read_end)? == 0 {
        return Ok(Vec::new());
    }
    loop {
        let (out, into) = pipe(libc::O_NONBLOCK)?;
        let slots = capacity(&read_end)?;
        set_capacity(&into, slots.max(2 * PAGE))?;
        // SAFETY: tee touches no memory of ours.
        let linked = unsafe {
            let (from, to) = (read_end.as_fd().as_raw_fd(), into.as_raw_fd());
            libc::tee(from, to, i32::MAX as usize, libc::SPLICE_F_NONBLOCK)
        };
        let linked = match check(|| "copy the contents of a pipe".into(), linked as i64) {
            // Somebody has just read all of it.
            Err(e) if e.errno() == Some(libc::EAGAIN) => return Ok(Vec::new()),
            linked => linked? as usize,
        };
        // Nobody has made it larger meanwhile.
        if capacity(&read_end)? <= slots {
            return parts(&out, &into, linked);
        }
    }
}

/// All that is in a pipe of ours, `left` bytes, packet by packet. A byte is put behind it: what is read together with that is no packet,
/// and neither is what leaves no room for it, which is more than one slot.
fn parts(out: &OwnedFd, into: &OwnedFd, mut left: usize) -> Result<Vec<Vec<u8>>> {
    let is_marked = left > 0 && rustix::io::write(into, &[0]).is_ok();
    left += usize::from(is_marked);
    let mut parts = Vec::new();
    while left > 0 {
        let mut part = vec![0u8; left];
        let n = rustix::io::read(out, &mut part).map_err(|e| Error::call("read the copy of a pipe", e))?;
        if n == 0 {
            return Err(Error::Other("a pipe's copy ended early".into()));
        }
        part.truncate(n);
        left -= n;
        parts.push(part);
    }
    if is_marked {
        parts.last_mut().and_then(Vec::pop);
        // Two or more are packets in any case.
        if parts.len() > 2 {
            parts.pop_if(|part| part.is_empty());
        }
    }
    Ok(parts)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn contents_stay_in_the_pipe() {
        let (r, w) = pipe(0).unwrap();
        let data: Vec<u8> = (0..60_000u32).map(|i| i as u8).collect();
        rustix::io::write(&w, &data).unwrap();
        assert_eq!(contents(&r).unwrap(), vec![data.clone()]);
        assert_eq!(contents(&r).unwrap(), vec![data]);
        assert_eq!(readable(&r).unwrap(), 60_000);
    }

    #[test]
    fn packets_keep_their_boundaries() {
        let (r, w) = pipe(libc::O_DIRECT).unwrap();
        for packet in [&b"one"[..], b"second", b"3"] {
            rustix::io::write(&w, packet).unwrap();
        }
        assert_eq!(contents(&r).unwrap(), vec![b"one".to_vec(), b"second".to_vec(), b"3".to_vec()]);
    }

    #[test]
    fn a_packet_that_is_alone_is_told_from_what_is_none() {
        for capacity in [1, 2, 16] {
            let (r, w) = pipe(libc::O_DIRECT).unwrap();
            set_capacity(&w, capacity * PAGE).unwrap();
            rustix::io::write(&w, b"one").unwrap();
            assert_eq!(contents(&r).unwrap(), vec![b"one".to_vec(), Vec::new()]);
            let (r, w) = pipe(0).unwrap();
            set_capacity(&w, capacity * PAGE).unwrap();
            let all = vec![7; (capacity * PAGE) as usize];
            for length in [3, all.len()] {
                rustix::io::write(&w, &all[readable(&r).unwrap() as usize..length]).unwrap();
                assert_eq!(contents(&r).unwrap(), vec![all[..length].to_vec()]);
            }
        }
    }

    #[test]
    fn a_full_pipe_of_unusual_capacity_is_read_whole() {
        let (r, w) = pipe(libc::O_NONBLOCK).unwrap();
        set_capacity(&w, 1 << 20).unwrap();
        let mut total = 0;
        while let Ok(n) = rustix::io::write(&w, &[7; 5000]) {
            total += n;
        }
        assert_eq!(contents(&r).unwrap().concat().len(), total);
    }

    #[test]
    fn others_write_and_read_meanwhile() {
        let (r, w) = pipe(0).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (mine, theirs) = (r.try_clone().unwrap(), &done);
            scope.spawn(move || {
                for i in 0..20_000u32 {
                    rustix::io::write(&w, &[i as u8; 7]).unwrap();
                }
            });
            scope.spawn(move || {
                let mut seven = [0; 7];
                for _ in 0..20_000 {
                    let mut read = 0;
                    while read < 7 {
                        read += rustix::io::read(&mine, &mut seven[read..]).unwrap();
                    }
                }
                theirs.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let all = contents(&r).unwrap().concat();
                let same = all.chunk_by(|a, b| a == b);
                // Each that was written is there as a whole, but for one that is being read.
                assert!(same.skip(1).all(|seven| seven.len() % 7 == 0), "{all:?}");
            }
        });
    }
}
