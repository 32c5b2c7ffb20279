//! Every change that a store makes to its medium, in one place.
//!
//! The tests put a [`Fault`] in between: a disk that fails after so many operations, or one whose power may be cut.

use crate::{Error, Result};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A change to the medium.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    MakeFolder,
    Create,
    Write,
    Preallocate,
    Free,
    Truncate,
    Sync,
    SyncFolder,
    Rename,
    Remove,
}

/// A change to the medium, with what it changes.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    MakeFolder(&'a Path),
    Create(&'a Path),
    Write { path: &'a Path, offset: u64, bytes: &'a [u8] },
    Preallocate { path: &'a Path, end: u64 },
    Free { path: &'a Path, from: u64, len: u64 },
    Truncate { path: &'a Path, len: u64 },
    Sync(&'a Path),
    SyncFolder(&'a Path),
    Rename { from: &'a Path, to: &'a Path },
    Remove(&'a Path),
    RemoveTree(&'a Path),
}

/// Decides, before each change, whether it fails, and may record what is changed.
#[doc(hidden)]
pub trait Fault: Send + Sync {
    /// An error is returned to the store instead of the change; of a failing write, the first half is done.
    fn before(&self, op: Op, path: &Path) -> io::Result<()>;

    /// A change that was let through begins. What is returned names it when it has ended.
    fn begins(&self, _: Change<'_>) -> u64 {
        0
    }

    /// It has ended; whether it has done what it should.
    fn has_ended(&self, _: u64, _done: bool) {}

    /// Which boot of the machine this is, if not the real one.
    fn boot(&self) -> Option<String> {
        None
    }
}

impl Change<'_> {
    fn op(&self) -> (Op, &Path) {
        match *self {
            Change::MakeFolder(path) => (Op::MakeFolder, path),
            Change::Create(path) => (Op::Create, path),
            Change::Write { path, .. } => (Op::Write, path),
            Change::Preallocate { path, .. } => (Op::Preallocate, path),
            Change::Free { path, .. } => (Op::Free, path),
            Change::Truncate { path, .. } => (Op::Truncate, path),
            Change::Sync(path) => (Op::Sync, path),
            Change::SyncFolder(path) => (Op::SyncFolder, path),
            Change::Rename { to, .. } => (Op::Rename, to),
            Change::Remove(path) | Change::RemoveTree(path) => (Op::Remove, path),
        }
    }
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

    /// Which boot of the machine this is. What was not synced in an earlier one may have been lost.
    pub fn boot(&self) -> String {
        static BOOT: OnceLock<String> = OnceLock::new();
        let read = || std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let real = || BOOT.get_or_init(|| read().trim_end().to_owned()).clone();
        self.fault.as_ref().and_then(|fault| fault.boot()).unwrap_or_else(real)
    }

    /// Makes a change.
    fn make<T>(&self, change: Change<'_>, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let Some(fault) = &self.fault else { return act() };
        let (op, path) = change.op();
        fault.before(op, path)?;
        let number = fault.begins(change);
        let done = act();
        fault.has_ended(number, done.is_ok());
        done
    }

    /// Creates a folder and those above it, durably.
    pub fn make_folders(&self, path: &Path) -> Result<()> {
        if path.is_dir() {
            return Ok(());
        }
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            self.make_folders(parent)?;
        }
        let made = self.make(Change::MakeFolder(path), || private_folder().create(path));
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
        let open = || rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).map_err(io::Error::from);
        self.make(Change::Create(path), open).map(File::from).map_err(Error::io("create", path))
    }

    /// Writes all bytes at an offset.
    pub fn write_at(&self, file: &File, path: &Path, bytes: &[u8], offset: u64) -> Result<()> {
        let mut is_let = self.fault.is_none();
        let written = self.make(Change::Write { path, offset, bytes }, || {
            is_let = true;
            file.write_all_at(bytes, offset)
        });
        if !is_let {
            // A write that fails may well have done something. (Whole blocks, as direct I/O demands.)
            let half = bytes.len() / 2;
            let half = if half >= 4096 { half & !4095 } else { half };
            let _ = file.write_all_at(&bytes[..half], offset);
        }
        written.map_err(Error::io("write", path))
    }

    /// Reserves room up to a size, so that writes need not extend the file. Errors only mean that nothing was won.
    pub fn preallocate(&self, file: &File, path: &Path, from: u64, len: u64) -> io::Result<()> {
        let reserve = || Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), from, len)?);
        self.make(Change::Preallocate { path, end: from + len }, reserve)
    }

    /// Gives back the room of a part of a file, which reads as zeros from then on. Errors mean that it stays: not every file system can.
    pub fn free(&self, file: &File, path: &Path, from: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let free = || Ok(rustix::fs::fallocate(file, flags, from, len)?);
        self.make(Change::Free { path, from, len }, free)
    }

    /// Sets the size of a file.
    pub fn truncate(&self, file: &File, path: &Path, len: u64) -> Result<()> {
        let done = self.make(Change::Truncate { path, len }, || file.set_len(len));
        done.map_err(Error::io("truncate", path))
    }

    /// Makes the contents of a file durable.
    pub fn sync(&self, file: &File, path: &Path) -> Result<()> {
        let done = self.make(Change::Sync(path), || file.sync_data());
        done.map_err(Error::io("sync", path))
    }

    /// Makes the names in a folder durable.
    pub fn sync_folder(&self, path: &Path) -> Result<()> {
        let done = self.make(Change::SyncFolder(path), || File::open(path)?.sync_all());
        done.map_err(Error::io("sync folder", path))
    }

    /// Makes all of these durable at the same time: a file system brings what several wait for to its medium in one go.
    pub fn sync_together(&self, all: &[Unsynced<'_>]) -> Result<()> {
        let sync = |one: &Unsynced<'_>| match *one {
            Unsynced::File(file, path) => self.sync(file, path),
            Unsynced::Folder(path) => self.sync_folder(path),
        };
        let Some((first, others)) = all.split_first() else { return Ok(()) };
        std::thread::scope(|scope| {
            let start = |one| std::thread::Builder::new().spawn_scoped(scope, move || sync(one));
            let started: Vec<_> = others.iter().map(|one| (one, start(one))).collect();
            let mut done = sync(first);
            for (one, thread) in started {
                let synced = match thread.map(|thread| thread.join()) {
                    Ok(Ok(synced)) => synced,
                    // Nobody else is there to do it.
                    _ => sync(one),
                };
                done = done.and(synced);
            }
            done
        })
    }

    /// Gives a file or folder another name; whatever had it before is gone.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let done = self.make(Change::Rename { from, to }, || std::fs::rename(from, to));
        done.map_err(Error::io("rename to", to))
    }

    /// Removes a file; one that is not there is fine.
    pub fn remove(&self, path: &Path) -> Result<()> {
        match self.make(Change::Remove(path), || std::fs::remove_file(path)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
            _ => Ok(()),
        }
    }

    /// Removes a folder with all that is in it; one that is not there is fine.
    pub fn remove_tree(&self, path: &Path) -> Result<()> {
        match self.make(Change::RemoveTree(path), || std::fs::remove_dir_all(path)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
            _ => Ok(()),
        }
    }

    /// Writes a small file durably under a temporary name in the same folder, to be renamed by the caller.
    pub fn write_temporary(&self, temporary: &Path, bytes: &[u8]) -> Result<()> {
        let file = self.write_new(temporary, bytes)?;
        self.sync(&file, temporary)
    }

    /// As [`Medium::write_temporary`], not made durable yet.
    pub fn write_new(&self, temporary: &Path, bytes: &[u8]) -> Result<File> {
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

/// What is to be made durable.
#[derive(Clone, Copy)]
pub(crate) enum Unsynced<'a> {
    /// Contents of an open file.
    File(&'a File, &'a Path),
    /// Names in a folder.
    Folder(&'a Path),
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
