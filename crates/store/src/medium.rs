//! Every change that a store makes to its medium, in one place.
//!
//! The tests put a [`Fault`] in between: a disk that fails after so many operations.

use crate::{Error, Result};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::sync::Arc;

/// A change to the medium.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    MakeFolder,
    Create,
    Write,
    Preallocate,
    Truncate,
    Sync,
    SyncFolder,
    Rename,
    Remove,
}

/// Decides, before each change, whether it fails.
#[doc(hidden)]
pub trait Fault: Send + Sync {
    /// An error is returned to the store instead of the change; of a failing write, the first half is done.
    fn before(&self, op: Op, path: &Path) -> io::Result<()>;
}

/// The medium: the file system, with a fault in front of it in tests.
#[derive(Clone, Default)]
pub(crate) struct Medium {
    fault: Option<Arc<dyn Fault>>,
}

impl Medium {
    pub fn faulty(fault: Arc<dyn Fault>) -> Self {
        Medium { fault: Some(fault) }
    }

    fn step(&self, op: Op, path: &Path) -> io::Result<()> {
        match &self.fault {
            Some(fault) => fault.before(op, path),
            None => Ok(()),
        }
    }

    /// Creates a folder and those above it, durably.
    pub fn make_folders(&self, path: &Path) -> Result<()> {
        if path.is_dir() {
            return Ok(());
        }
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            self.make_folders(parent)?;
        }
        let made = self.step(Op::MakeFolder, path).and_then(|()| private_folder().create(path));
        match made {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            Err(e) => Err(Error::io("create folder", path)(e)),
            Ok(()) => match path.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => self.sync_folder(parent),
                _ => Ok(()),
            },
        }
    }

    /// Creates a file that must not exist, for reading and writing.
    pub fn create(&self, path: &Path, flags: OFlags) -> Result<File> {
        let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let made = self.step(Op::Create, path);
        let open = || rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).map_err(io::Error::from);
        made.and_then(|()| open()).map(File::from).map_err(Error::io("create", path))
    }

    /// Writes all bytes at an offset.
    pub fn write_at(&self, file: &File, path: &Path, bytes: &[u8], offset: u64) -> Result<()> {
        let written = match self.step(Op::Write, path) {
            Ok(()) => file.write_all_at(bytes, offset),
            Err(e) => {
                // A write that fails may well have done something. (Whole blocks, as direct I/O demands.)
                let half = bytes.len() / 2;
                let half = if half >= 4096 { half & !4095 } else { half };
                let _ = file.write_all_at(&bytes[..half], offset);
                Err(e)
            }
        };
        written.map_err(Error::io("write", path))
    }

    /// Reserves room up to a size, so that writes need not extend the file. Errors only mean that nothing was won.
    pub fn preallocate(&self, file: &File, path: &Path, from: u64, len: u64) -> io::Result<()> {
        self.step(Op::Preallocate, path)?;
        Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), from, len)?)
    }

    /// Sets the size of a file.
    pub fn truncate(&self, file: &File, path: &Path, len: u64) -> Result<()> {
        let done = self.step(Op::Truncate, path).and_then(|()| file.set_len(len));
        done.map_err(Error::io("truncate", path))
    }

    /// Makes the contents of a file durable.
    pub fn sync(&self, file: &File, path: &Path) -> Result<()> {
        let done = self.step(Op::Sync, path).and_then(|()| file.sync_data());
        done.map_err(Error::io("sync", path))
    }

    /// Makes the names in a folder durable.
    pub fn sync_folder(&self, path: &Path) -> Result<()> {
        let sync = || File::open(path)?.sync_all();
        let done = self.step(Op::SyncFolder, path).and_then(|()| sync());
        done.map_err(Error::io("sync folder", path))
    }

    /// Gives a file or folder another name; whatever had it before is gone.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let done = self.step(Op::Rename, to).and_then(|()| std::fs::rename(from, to));
        done.map_err(Error::io("rename to", to))
    }

    /// Removes a file; one that is not there is fine.
    pub fn remove(&self, path: &Path) -> Result<()> {
        match self.step(Op::Remove, path).and_then(|()| std::fs::remove_file(path)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
            _ => Ok(()),
        }
    }

    /// Removes a folder with all that is in it; one that is not there is fine.
    pub fn remove_tree(&self, path: &Path) -> Result<()> {
        match self.step(Op::Remove, path).and_then(|()| std::fs::remove_dir_all(path)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
            _ => Ok(()),
        }
    }

    /// Writes a small file durably under a temporary name in the same folder, to be renamed by the caller.
    pub fn write_temporary(&self, temporary: &Path, bytes: &[u8]) -> Result<()> {
        let file = self.write_new(temporary, bytes)?;
        self.sync(&file, temporary)
    }

    fn write_new(&self, temporary: &Path, bytes: &[u8]) -> Result<File> {
        self.remove(temporary)?; // of somebody who died before the rename
        let file = self.create(temporary, OFlags::empty())?;
        self.write_at(&file, temporary, bytes, 0)?;
        Ok(file)
    }

    /// Replaces a small file: readers see the old contents or the new, never a mixture.
    pub fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        self.replace_by(path, |temporary| self.write_temporary(temporary, bytes))
    }

    /// As [`Medium::replace`], but a crash of the machine may leave an empty file.
    pub fn replace_for_now(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        self.replace_by(path, |temporary| self.write_new(temporary, bytes).map(drop))
    }

    /// Replaces a file by what `write` writes under a temporary name, of which nothing is left if it fails.
    pub fn replace_by(&self, path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let temporary = temporary(path);
        let done = write(&temporary).and_then(|()| self.rename(&temporary, path));
        if done.is_err() {
            let _ = self.remove(&temporary);
        }
        done
    }
}

/// Folders are for their owner only, as files are: they hold memory of programs.
fn private_folder() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

/// How temporary names begin. Nobody else's files are called so: what has this in front may be removed.
pub(crate) const TEMPORARY: &str = ".stillpoint-";

/// The temporary name of a file: hidden, in the same folder.
pub(crate) fn temporary(path: &Path) -> std::path::PathBuf {
    let mut name = std::ffi::OsString::from(TEMPORARY);
    name.push(path.file_name().unwrap_or_default());
    path.with_file_name(name)
}
