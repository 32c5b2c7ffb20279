//! Reading and writing another process's memory. `process_vm_readv(2)`, `/proc/PID/mem`.

use crate::pagemap::Pagemap;
use crate::{Error, RemoteAddr, Result};
use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// Most ranges of one call (`UIO_MAXIOV`).
const MOST: usize = 1024;
const PAGE: u64 = 4096;

/// A range (address, length) in another process.
fn remote(&(start, len): &(u64, u64)) -> libc::iovec {
    libc::iovec { iov_base: start as *mut _, iov_len: len as usize }
}

/// Another process's memory.
#[derive(Debug)]
pub struct Memory {
    pid: u32,
    mem: File,
    /// Read by `process_vm_readv` where that works.
    pinning: bool,
    /// Tells which pages are not to be read so, as others have them too.
    sharing: OnceLock<Pagemap>,
}

impl Memory {
    /// Opens the memory of a process (any thread id of it will do).
    ///
    /// # Errors
    /// [`Error::Gone`] if there is no such process any more, [`Error::File`] if it is not ours to look at.
    pub fn open(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let mem =
            File::options().read(true).write(true).open(&path).map_err(|e| Error::file_of(pid, &path, e))?;
        Ok(Memory { pid, mem, pinning: true, sharing: OnceLock::new() })
    }

    /// As [`Memory::open`], for a process that shares its pages copy-on-write with another one: they stay shared when
    /// they are read. `process_vm_readv` pins what it reads, for which the kernel first gives the process a copy of
    /// its own (`FAULT_FLAG_UNSHARE`): twice the memory, and half the speed.
    pub fn open_shared(pid: u32) -> Result<Self> {
        Ok(Memory { pinning: false, ..Self::open(pid)? })
    }

    /// From now on, of pages that it shares with others copy-on-write none gets a copy because [`Memory::read_many`] reads it. That
    /// takes a look at the page map for each range; pages of its own are read as ever.
    pub fn keep_shared(&self) -> Result<()> {
        if self.sharing.get().is_none() {
            let _ = self.sharing.set(Pagemap::open(self.pid)?);
        }
        Ok(())
    }

    /// Whether pages that it shares remain shared when they are read.
    pub fn keeps_shared(&self) -> bool {
        !self.pinning || self.sharing.get().is_some()
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process still has the memory that was opened, told by 16 bytes of it that are different in every program
    /// (`AT_RANDOM`, getauxval(3)). It should be at rest.
    pub fn is_still_its_own(&self, random: RemoteAddr) -> bool {
        let (mut opened, mut now) = ([0; 16], [0; 16]);
        let opened = self.mem.read_exact_at(&mut opened, random.0).is_ok().then_some(opened);
        // What it shares is not to become its own because it is looked at.
        let fast = !self.keeps_shared() && self.read_fast(random, &mut now) == now.len();
        let mem = || File::open(format!("/proc/{}/mem", self.pid));
        let is_read = fast || mem().and_then(|mem| mem.read_exact_at(&mut now, random.0)).is_ok();
        opened == is_read.then_some(now)
    }

    /// Reads `buf.len()` bytes; the fast way first, then the one that also reads what the program itself may not
    /// (`PROT_NONE`, execute-only).
    pub fn read(&self, from: RemoteAddr, buf: &mut [u8]) -> Result<()> {
        let done = if self.pinning { self.read_fast(from, buf) } else { 0 };
        self.read_slow(RemoteAddr(from.0 + done as u64), &mut buf[done..])
    }

    /// Reads ranges (address, length) one behind the other into `buf`, many with each call.
    pub fn read_many(&self, ranges: &[(u64, u64)], buf: &mut [u8]) -> Result<()> {
        let mut rest = buf;
        if !self.pinning {
            for &(start, len) in ranges {
                let (now, later) = rest.split_at_mut(len as usize);
                rest = later;
                self.read_slow(RemoteAddr(start), now)?;
            }
            return Ok(());
        }
        match self.sharing.get() {
            Some(pagemap) => self.read_kept(pagemap, ranges, rest),
            None => self.read_pinning(ranges, rest),
        }
    }

    /// As [`Memory::read_many`], at once, whether others have the same pages or not.
    pub fn read_pinning(&self, ranges: &[(u64, u64)], buf: &mut [u8]) -> Result<()> {
        let mut rest = buf;
        for part in ranges.chunks(MOST) {
            let len: u64 = part.iter().map(|r| r.1).sum();
            let (now, later) = rest.split_at_mut(len as usize);
            rest = later;
            let remote: Vec<libc::iovec> = part.iter().map(remote).collect();
            let local = libc::iovec { iov_base: now.as_mut_ptr().cast(), iov_len: now.len() };
            // SAFETY: `local` describes `now`, which is ours to write; the remote addresses are only used in the target.
            let n = unsafe {
                libc::process_vm_readv(self.pid as i32, &local, 1, remote.as_ptr(), remote.len() as u64, 0)
            };
            if n == now.len() as isize {
                continue;
            }
            // Something among them needs the slow way.
            let mut at = 0;
            for &(start, len) in part {
                self.read(RemoteAddr(start), &mut now[at..at + len as usize])?;
                at += len as usize;
            }
        }
        Ok(())
    }

    /// Reads runs of pages that nobody else has at once, and the others so that they stay what they are.
    fn read_kept(&self, pagemap: &Pagemap, ranges: &[(u64, u64)], buf: &mut [u8]) -> Result<()> {
        let mut rest = buf;
        let mut shared = Vec::new();
        for &(start, len) in ranges {
            let (first, end) = (start / PAGE, (start + len).div_ceil(PAGE));
            shared.clear();
            pagemap.may_be_shared(RemoteAddr(first * PAGE), RemoteAddr(end * PAGE), &mut shared)?;
            let mut at = start;
            for run in shared.chunk_by(|a, b| a == b) {
                let to = (at / PAGE * PAGE + run.len() as u64 * PAGE).min(start + len);
                let (now, later) = rest.split_at_mut((to - at) as usize);
                rest = later;
                match run[0] {
                    true => self.read_slow(RemoteAddr(at), now)?,
                    false => self.read(RemoteAddr(at), now)?,
                }
                at = to;
            }
        }
        Ok(())
    }

    /// As much as `process_vm_readv` reads.
    fn read_fast(&self, from: RemoteAddr, buf: &mut [u8]) -> usize {
        let local = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
        let remote = libc::iovec { iov_base: from.0 as *mut _, iov_len: buf.len() };
        // SAFETY: `local` describes `buf`, which is ours to write; the remote address is only used in the target.
        let n = unsafe { libc::process_vm_readv(self.pid as i32, &local, 1, &remote, 1, 0) };
        n.max(0) as usize
    }

    fn read_slow(&self, from: RemoteAddr, buf: &mut [u8]) -> Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let what = || format!("read {} bytes at {from} of process {}", buf.len(), self.pid);
        let what = what();
        self.mem.read_exact_at(buf, from.0).map_err(|e| Error::call(what, e))
    }

    /// Writes bytes the program itself may write.
    pub fn write(&self, to: RemoteAddr, bytes: &[u8]) -> Result<()> {
        let local = IoSlice::new(bytes);
        let remote = libc::iovec { iov_base: to.0 as *mut _, iov_len: bytes.len() };
        // SAFETY: `IoSlice` is layout-compatible with `iovec` and only read; the remote address is only used in the
        // target.
        let n =
            unsafe { libc::process_vm_writev(self.pid as i32, (&raw const local).cast(), 1, &remote, 1, 0) };
        if n == bytes.len() as isize {
            return Ok(());
        }
        self.write_forced(to, bytes)
    }

    /// Writes to many addresses, many with each call.
    pub fn write_many(&self, parts: &[(RemoteAddr, &[u8])]) -> Result<()> {
        for parts in parts.chunks(MOST) {
            let local: Vec<IoSlice<'_>> = parts.iter().map(|(_, bytes)| IoSlice::new(bytes)).collect();
            let remote: Vec<libc::iovec> =
                parts.iter().map(|(to, bytes)| remote(&(to.0, bytes.len() as u64))).collect();
            // SAFETY: as in `write`.
            let n = unsafe {
                let (local, count) = (local.as_ptr().cast(), parts.len() as u64);
                libc::process_vm_writev(self.pid as i32, local, count, remote.as_ptr(), count, 0)
            };
            if n == parts.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() as isize {
                continue;
            }
            for &(to, bytes) in parts {
                self.write(to, bytes)?;
            }
        }
        Ok(())
    }

    /// Writes bytes even where the program itself may not, and below a stack that grows (`FOLL_FORCE`).
    pub fn write_forced(&self, to: RemoteAddr, bytes: &[u8]) -> Result<()> {
        let what = format!("write {} bytes at {to} of process {}", bytes.len(), self.pid);
        self.mem.write_all_at(bytes, to.0).map_err(|e| Error::call(what, e))
    }

    /// Reads one little-endian word.
    pub fn read_u64(&self, from: RemoteAddr) -> Result<u64> {
        let mut b = [0; 8];
        self.read(from, &mut b)?;
        Ok(u64::from_le_bytes(b))
    }
}
