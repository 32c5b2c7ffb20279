//! Files of `/proc` that are held open, to be read again when there is no time to open them.

use super::{Proc, nonsense};
use crate::{Error, Result};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// A file of one record of the folder of a process or thread (not `maps`), held open. Each reading tells the state at that moment; once its
/// process or thread is gone there is nothing to read, whoever gets the number next.
#[derive(Debug)]
pub struct Held {
    tid: u32,
    path: PathBuf,
    file: OwnedFd,
}

impl Proc {
    /// Opens a file of the folder to be read later, any number of times.
    ///
    /// # Errors
    /// As [`Proc::open_file`].
    pub fn hold(&self, name: &str) -> Result<Held> {
        Ok(Held { tid: self.tid, path: self.path.join(name), file: self.open_file(name)? })
    }

    /// As [`Proc::hold`], for what [`Proc::timer_slack_ns`] reads.
    ///
    /// # Errors
    /// As [`Proc::hold`].
    pub fn hold_timer_slack(&self) -> Result<Held> {
        Self::open(self.pid, self.tid, PathBuf::from(format!("/proc/{}", self.tid)))?.hold("timerslack_ns")
    }
}

impl Held {
    /// Its path, for messages.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// The whole text as it is now.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process or thread is, or [`Error::File`].
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut text: Vec<u8> = Vec::with_capacity(4096);
        loop {
            let at = text.len() as u64;
            match rustix::io::pread(&self.file, rustix::buffer::spare_capacity(&mut text), at) {
                // The kernel hands out a record as a whole if there is room for it.
                Ok(_) if text.len() < text.capacity() => return Ok(text),
                Ok(_) => text.reserve(32 << 10),
                Err(Errno::INTR) => {}
                Err(Errno::SRCH | Errno::NOENT) => return Err(Error::Gone(self.tid)),
                Err(e) => return Err(Error::file(&self.path, e)),
            }
        }
    }

    /// Reads and parses it.
    ///
    /// # Errors
    /// As [`Held::read`], or [`Error::Parse`].
    pub fn parse<T>(&self, parse: impl FnOnce(&[u8]) -> Option<T>) -> Result<T> {
        let text = self.read()?;
        parse(&text).ok_or_else(|| nonsense(&self.path, &text))
    }
}
