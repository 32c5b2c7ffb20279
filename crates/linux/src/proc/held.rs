//! Files of `/proc` that are held open, to be read again when there is no time to open them.

use super::{Proc, nonsense};
use crate::{Error, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::mem::MaybeUninit;
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
}

impl Proc {
    /// Keeps files of one record of the folder open, so that [`Proc::read`] need not open them each time. Those that cannot be
    /// opened are read as before.
    pub fn keep_open(&self, names: &[&'static str]) {
        self.kept
            .get_or_init(|| names.iter().filter_map(|name| Some((*name, self.hold(name).ok()?))).collect());
    }

    /// Keeps the folder of its threads open, so that [`Proc::threads`] need not open it each time.
    pub fn keep_threads_open(&self) {
        if let Ok(folder) = self.open_with("task", OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC) {
            let _ = self.tasks.set(folder);
        }
    }
}

impl Held {
    /// Its path, for messages.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Hands the whole text, as it is now, to `work`.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process or thread is, or [`Error::File`]; those of `work`.
    pub fn with<T>(&self, work: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        let mut room = [const { MaybeUninit::<u8>::uninit() }; 4096];
        let len = self.fill(&mut room, 0)?;
        // SAFETY: so many bytes have just been written there.
        let text = unsafe { std::slice::from_raw_parts(room.as_ptr().cast::<u8>(), len) };
        if len < room.len() {
            return work(text);
        }
        let mut text = text.to_vec();
        loop {
            // The kernel hands out a record as a whole if there is room for it.
            text.reserve(32 << 10);
            let at = text.len() as u64;
            let len = self.fill(text.spare_capacity_mut(), at)?;
            // SAFETY: so many bytes have just been written there.
            unsafe { text.set_len(text.len() + len) };
            if text.len() < text.capacity() {
                return work(&text);
            }
        }
    }

    /// The whole text, as it is now, also of a file of many records.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process or thread is, or [`Error::File`].
    pub fn text(&self) -> Result<Vec<u8>> {
        let mut text: Vec<u8> = Vec::with_capacity(8 << 10);
        loop {
            // The kernel hands out as many records as go into a page of its own, and tells by nothing more that there are no others.
            text.reserve(4 << 10);
            let at = text.len() as u64;
            let len = self.fill(text.spare_capacity_mut(), at)?;
            // SAFETY: so many bytes have just been written there.
            unsafe { text.set_len(text.len() + len) };
            if len == 0 {
                return Ok(text);
            }
        }
    }

    fn fill(&self, room: &mut [MaybeUninit<u8>], at: u64) -> Result<usize> {
        loop {
            match rustix::io::pread(&self.file, &mut *room, at) {
                Ok((text, _)) => return Ok(text.len()),
                Err(Errno::INTR) => {}
                Err(Errno::SRCH | Errno::NOENT) => return Err(Error::Gone(self.tid)),
                Err(e) => return Err(Error::file(&self.path, e)),
            }
        }
    }

    /// Reads and parses it.
    ///
    /// # Errors
    /// As [`Held::with`], or [`Error::Parse`].
    pub fn parse<T>(&self, parse: impl FnOnce(&[u8]) -> Option<T>) -> Result<T> {
        self.with(|text| parse(text).ok_or_else(|| nonsense(&self.path, text)))
    }
}
