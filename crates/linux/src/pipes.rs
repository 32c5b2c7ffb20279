//! Pipes and FIFOs: their capacity, and their contents without consuming them.

use crate::descriptors::{check, readable};
use crate::{Error, Result};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
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
/// packets. Behind a packet that is alone comes an empty entry, and in front of bytes between packets that are none, as a program can have
/// them that sets or clears `O_DIRECT`. `read_end` needs read access. Others may write to it and read from it meanwhile: it is
/// what was in it at some instant.
///
/// `tee(2)` links all of the pipe's buffers at once into a pipe of ours with room for as many; a packet keeps its boundary there, and
/// reading ends at it.
///
/// # Errors
/// What the kernel says.
pub fn contents(read_end: impl AsFd) -> Result<Vec<Vec<u8>>> {
    if readable(&read_end)? == 0 {
        return Ok(Vec::new());
    }
    let Some(mut copy) = Copy::of(&read_end)? else { return Ok(Vec::new()) };
    if let Some(plain) = copy.as_no_packets()? {
        return Ok(vec![plain]);
    }
    // What was read of the first one does not tell where in it a packet begins.
    let Some(mut copy) = Copy::of(&read_end)? else { return Ok(Vec::new()) };
    Ok(told(copy.one_by_one()?))
}

/// What stands together in a pipe.
#[derive(Debug)]
pub struct Part {
    /// As they are read.
    pub bytes: Vec<u8>,
    /// Whether what is read ends with them, and what does not fit is lost (`O_DIRECT`).
    pub is_packet: bool,
}

/// Parts as [`contents`] tells them.
pub fn told(parts: Vec<Part>) -> Vec<Vec<u8>> {
    let has_packets = parts.iter().any(|part| part.is_packet);
    let is_alone = parts.len() == 1;
    let mut entries: Vec<Vec<u8>> = Vec::new();
    let mut goes_on = false;
    for part in parts {
        match entries.last_mut().filter(|_| goes_on && !part.is_packet) {
            Some(before) => before.extend(part.bytes),
            None => {
                let mark = (has_packets && !part.is_packet).then(Vec::new);
                entries.extend(mark.into_iter().chain([part.bytes]));
            }
        }
        goes_on = !part.is_packet;
    }
    entries.extend((has_packets && is_alone).then(Vec::new));
    entries
}

/// What stands together in a pipe, as told by [`contents`], each with whether it is a packet.
pub fn parts<T: AsRef<[u8]>>(entries: &[T]) -> Vec<(&[u8], bool)> {
    let mut is_packet = entries.len() > 1;
    let mut parts = Vec::new();
    for bytes in entries.iter().map(T::as_ref) {
        if bytes.is_empty() {
            is_packet = false;
            continue;
        }
        parts.push((bytes, is_packet));
        is_packet = true;
    }
    parts
}

/// Puts into a pipe what was told by [`contents`]; there has to be room for it. `write_end`: nobody else writes by this description
/// meanwhile, whose flags are changed, and are then what they were.
///
/// # Errors
/// What the kernel says.
pub fn fill<T: AsRef<[u8]>>(write_end: impl AsFd, entries: &[T]) -> Result<()> {
    let failed = |e| Error::call("fill a pipe", e);
    let before = fcntl_getfl(&write_end).map_err(failed)?;
    let put = || -> Result<()> {
        let parts = parts(entries);
        for (index, (bytes, is_packet)) in parts.iter().enumerate() {
            let mut flags = before | OFlags::NONBLOCK;
            flags.set(OFlags::DIRECT, *is_packet);
            fcntl_setfl(&write_end, flags).map_err(failed)?;
            match *is_packet || index + 1 == parts.len() {
                true => write_all(&write_end, bytes)?,
                false => put_apart(&write_end, bytes)?,
            }
        }
        Ok(())
    };
    let done = put();
    fcntl_setfl(&write_end, before).map_err(failed)?;
    done
}

fn write_all(write_end: impl AsFd, mut rest: &[u8]) -> Result<()> {
    while !rest.is_empty() {
        let n = rustix::io::write(&write_end, rest).map_err(|e| Error::call("fill a pipe", e))?;
        rest = &rest[n..];
    }
    Ok(())
}

/// Puts bytes into a pipe to which a packet can be added: what is written to a pipe goes to what was written before while the page of that
/// has room for it, in packet mode as well (`pipe_write`), but not to what came by `tee(2)`.
fn put_apart(write_end: impl AsFd, bytes: &[u8]) -> Result<()> {
    let (from, to) = pipe(libc::O_NONBLOCK)?;
    enlarge(&to, room([bytes.len()]))?;
    write_all(&to, bytes)?;
    match tee(&from, &write_end)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(Error::Other("a pipe has no room for what was in it".into())),
    }
}

/// Links all that is in a pipe into another one, as far as there is room; returns the bytes.
fn tee(from: impl AsFd, to: impl AsFd) -> Result<usize> {
    let (from, to) = (from.as_fd().as_raw_fd(), to.as_fd().as_raw_fd());
    // SAFETY: tee touches no memory of ours.
    let linked = unsafe { libc::tee(from, to, i32::MAX as usize, libc::SPLICE_F_NONBLOCK) };
    Ok(check(|| "copy the contents of a pipe".into(), linked as i64)? as usize)
}

/// A pipe of ours with all that is in another one.
struct Copy {
    out: OwnedFd,
    into: OwnedFd,
    left: usize,
}

impl Copy {
    /// Nothing if somebody has just read all of it.
    fn of(read_end: impl AsFd) -> Result<Option<Self>> {
        loop {
            let (out, into) = pipe(libc::O_NONBLOCK)?;
            let slots = capacity(&read_end)?;
            // Twice as many are not for everybody, and spare the look at each.
            if set_capacity(&into, slots * 2).is_err() {
                set_capacity(&into, slots)?;
            }
            let left = match tee(&read_end, &into) {
                Err(e) if e.errno() == Some(libc::EAGAIN) => return Ok(None),
                linked => linked?,
            };
            // Nobody has made it larger meanwhile.
            if capacity(&read_end)? <= slots {
                return Ok(Some(Copy { out, into, left }));
            }
        }
    }

    /// All that is in it if there is no packet among it, as far as that can be seen. A byte is put behind it: what is read together with that
    /// is none.
    fn as_no_packets(&mut self) -> Result<Option<Vec<u8>>> {
        if rustix::io::write(&self.into, &[0]).is_err() {
            return Ok(None);
        }
        let mut all = vec![0; self.left + 1];
        let n = read(&self.out, &mut all)?;
        all.pop();
        Ok((n > self.left).then_some(all))
    }

    /// All that is in it, buffer by buffer: each goes through a pipe that holds no more than one, to where a byte is put behind it.
    fn one_by_one(&mut self) -> Result<Vec<Part>> {
        let (from_one, one) = pipe(libc::O_NONBLOCK)?;
        let (from_two, two) = pipe(libc::O_NONBLOCK)?;
        set_capacity(&one, PAGE)?;
        set_capacity(&two, 2 * PAGE)?;
        let mut parts = Vec::new();
        while self.left > 0 {
            let length = splice(&self.out, &one, self.left)?;
            splice(&from_one, &two, length)?;
            rustix::io::write(&two, &[0]).map_err(|e| Error::call("mark the copy of a pipe", e))?;
            let mut bytes = vec![0; length + 1];
            let is_packet = read(&from_two, &mut bytes)? == length;
            if is_packet {
                read(&from_two, &mut [0])?;
            }
            bytes.pop();
            self.left -= length;
            parts.push(Part { bytes, is_packet });
        }
        Ok(parts)
    }
}

fn read(from: &OwnedFd, into: &mut [u8]) -> Result<usize> {
    match rustix::io::read(from, into) {
        Ok(0) => Err(Error::Other("a pipe's copy ended early".into())),
        n => n.map_err(|e| Error::call("read the copy of a pipe", e)),
    }
}

/// Moves buffers of one of our pipes to another one, as many as fit; returns their bytes.
fn splice(from: &OwnedFd, to: &OwnedFd, bytes: usize) -> Result<usize> {
    let none = std::ptr::null_mut();
    // SAFETY: splice touches no memory of ours; neither of both has an offset.
    let moved =
        unsafe { libc::splice(from.as_raw_fd(), none, to.as_raw_fd(), none, bytes, libc::SPLICE_F_NONBLOCK) };
    Ok(check(|| "move the copy of a pipe".into(), moved as i64)? as usize)
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
    fn packets_beside_plain_bytes_are_told_and_put_back() {
        let set = |end: &OwnedFd, is_in_packets: bool| {
            let mut flags = OFlags::NONBLOCK;
            flags.set(OFlags::DIRECT, is_in_packets);
            fcntl_setfl(end, flags).unwrap();
        };
        let all = |parts: &[(&[u8], bool)]| {
            let (r, w) = pipe(libc::O_NONBLOCK).unwrap();
            for (bytes, is_packet) in parts {
                set(&w, *is_packet);
                assert_eq!(rustix::io::write(&w, bytes).unwrap(), bytes.len());
            }
            (r, w)
        };
        let page = [7; PAGE as usize];
        let of: [&[(&[u8], bool)]; 6] = [
            &[(b"abcdef", false)],
            &[(b"ab", true)],
            &[(b"ab", true), (b"cdef", false)],
            &[(b"a", true), (b"b", true), (&page, false), (b"x", true), (b"cdef", false)],
            &[(&page, false), (b"AAAA", true)],
            &[(b"A", true), (b"B", true), (b"c", false)],
        ];
        for parts_of_it in of {
            for slots in [8, 16] {
                let (r, w) = all(parts_of_it);
                set_capacity(&w, slots * PAGE).unwrap();
                let told = contents(&r).unwrap();
                assert_eq!(parts(&told), parts_of_it);
                let (again, into) = pipe(libc::O_NONBLOCK).unwrap();
                fill(&into, &told).unwrap();
                assert_eq!(contents(&again).unwrap(), told);
                assert_eq!(fcntl_getfl(&into).unwrap() & OFlags::DIRECT, OFlags::empty());
            }
        }
        // A packet behind what has room for it, as most of that was read.
        let (r, w) = all(of[4]);
        rustix::io::read(&r, &mut [0; PAGE as usize - 6]).unwrap();
        let told = contents(&r).unwrap();
        assert_eq!(parts(&told), [(&page[..6], false), (b"AAAA", true)]);
        let (again, into) = pipe(libc::O_NONBLOCK).unwrap();
        fill(&into, &told).unwrap();
        assert_eq!(contents(&again).unwrap(), told);
        drop(w);
        // Full, with a packet at its end.
        let (r, w) = pipe(libc::O_NONBLOCK).unwrap();
        set_capacity(&w, 2 * PAGE).unwrap();
        rustix::io::write(&w, &page).unwrap();
        set(&w, true);
        rustix::io::write(&w, b"last").unwrap();
        assert_eq!(parts(&contents(&r).unwrap()), [(&page[..], false), (b"last", true)]);
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
