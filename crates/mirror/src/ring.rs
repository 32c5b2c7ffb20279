//! Writes to the backing file: many in flight by `io_uring`, or one after the other where there is none.
#![allow(unsafe_code)]

use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const DEPTH: u32 = 128;
/// Bytes of the largest single write, and those handed over by one call. The kernel pins their pages before it lets anybody
/// else run on this processor, a real-time thread included: 256 KiB take it some 10 µs.
const LARGEST: usize = 64 << 10;
const BATCH: usize = 256 << 10;

/// One write: memory and where it goes.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// Address of the bytes.
    pub from: usize,
    /// How many.
    pub len: usize,
    /// Offset in the file.
    pub at: u64,
}

/// How writes are made.
pub enum Writer {
    /// Asynchronously.
    Ring(Box<IoUring>),
    /// By `pwrite`.
    Plain,
}

impl Writer {
    /// The best that this kernel and its filters allow.
    pub fn new() -> Self {
        match IoUring::builder().dontfork().build(DEPTH) {
            Ok(ring) => Writer::Ring(Box::new(ring)),
            Err(_) => Writer::Plain,
        }
    }

    /// Whether writes are asynchronous.
    pub fn is_ring(&self) -> bool {
        matches!(self, Writer::Ring(_))
    }

    /// Makes all the writes, then syncs the data (`fdatasync`).
    ///
    /// # Safety
    /// The memory is mapped and nobody writes to it meanwhile.
    pub unsafe fn write(&mut self, file: &File, writes: &[Write]) -> io::Result<()> {
        match self {
            // SAFETY: as the caller promises.
            Writer::Ring(ring) => unsafe { in_flight(ring, file, writes)? },
            Writer::Plain => {
                for w in writes {
                    // SAFETY: as the caller promises.
                    let bytes = unsafe { std::slice::from_raw_parts(w.from as *const u8, w.len) };
                    file.write_all_at(bytes, w.at)?;
                }
            }
        }
        file.sync_data()
    }
}

/// # Safety
/// As [`Writer::write`].
unsafe fn in_flight(ring: &mut IoUring, file: &File, writes: &[Write]) -> io::Result<()> {
    // Parts that are still to be written; what a short write leaves is put back.
    let mut parts: Vec<Write> = writes.iter().rev().flat_map(split).collect();
    let mut flying = vec![None; DEPTH as usize];
    let mut count = 0;
    let mut failed = None;
    while count > 0 || (failed.is_none() && !parts.is_empty()) {
        let mut handed = 0;
        while handed < BATCH {
            if failed.is_some() || count == DEPTH as usize {
                break;
            }
            let Some(part) = parts.pop() else { break };
            let slot = flying.iter().position(Option::is_none).unwrap_or(0);
            let entry =
                opcode::Write::new(types::Fd(file.as_raw_fd()), part.from as *const u8, part.len as u32)
                    .offset(part.at)
                    .build()
                    .user_data(slot as u64);
            // SAFETY: the memory stays as it is until the completion is seen below.
            if unsafe { ring.submission().push(&entry) }.is_err() {
                parts.push(part);
                break;
            }
            flying[slot] = Some(part);
            count += 1;
            handed += part.len;
        }
        let full = count == DEPTH as usize || parts.is_empty() || failed.is_some();
        match ring.submit_and_wait(usize::from(full)) {
            Ok(_) => (),
            Err(why) if matches!(why.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => (),
            // The kernel may still read from memory: nothing may be said to be over before all of it is.
            Err(why) => failed = Some(why),
        }
        for done in ring.completion() {
            let Some(part) = flying.get_mut(done.user_data() as usize).and_then(Option::take) else {
                continue;
            };
            count -= 1;
            match done.result() {
                e if e < 0 && matches!(-e, libc::EINTR | libc::EAGAIN) => parts.push(part),
                e if e < 0 => failed = Some(io::Error::from_raw_os_error(-e)),
                0 => failed = Some(io::ErrorKind::WriteZero.into()),
                n => {
                    let n = n as usize;
                    if n < part.len {
                        let rest = Write { from: part.from + n, len: part.len - n, at: part.at + n as u64 };
                        parts.push(rest);
                    }
                }
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

fn split(whole: &Write) -> impl Iterator<Item = Write> + use<> {
    let whole = *whole;
    (0..whole.len).step_by(LARGEST).map(move |o| Write {
        from: whole.from + o,
        len: LARGEST.min(whole.len - o),
        at: whole.at + o as u64,
    })
}
