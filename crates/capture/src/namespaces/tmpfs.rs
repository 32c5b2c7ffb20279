//! What is in a file system in memory that only the program has mounted.
//!
//! It is read while the program stands still: names, and contents, belong to the same instant as its memory.

use super::views::reach;
use crate::builder::Source;
use crate::files::noticed::WATCHED;
use crate::files::{describe, paths};
use crate::{Builder, Content, Error, Result};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::Arc;
use stillpoint_image::{Bytes, Entry, Owner, PathFile, Usage};
use stillpoint_linux::Error as Kernel;

/// More than this is not saved, bytes: it is all read and stored while the program stands still.
pub(super) const MOST_BYTES: u64 = 1 << 30;
/// More files are not saved.
pub(super) const MOST_FILES: usize = 20_000;

/// What is being walked through.
pub(super) struct Walk<'b> {
    pub builder: &'b mut Builder,
    /// For messages.
    pub what: String,
    /// Where files of it are in the namespace, and which that is.
    pub point: Vec<u8>,
    pub row: u32,
    entries: Vec<Entry>,
    /// By inode number.
    known: HashMap<u64, usize>,
}

impl<'b> Walk<'b> {
    pub fn new(builder: &'b mut Builder, what: String, point: Vec<u8>, row: u32) -> Self {
        Walk { builder, what, point, row, entries: Vec::new(), known: HashMap::new() }
    }

    /// Describes all that is below a directory, a copy of the mount of which is nowhere else. `root`: where it is in the file
    /// system, without a slash at either end.
    pub fn describe(mut self, root: &[u8], copy: &Arc<OwnedFd>) -> Result<Vec<Entry>> {
        // What lies above it cannot be seen; without it there would be no way to it.
        for (at, _) in root.iter().enumerate().filter(|(at, b)| *at == 0 || **b == b'/') {
            let path = Bytes(root[..at].to_vec());
            let mode = libc::S_IFDIR | 0o755;
            self.entries.push(Entry { path, mode, ..Entry::default() });
        }
        let mut left = vec![Vec::new()];
        while let Some(below) = left.pop() {
            if self.entries.len() > MOST_FILES {
                let why = format!("there are more than {MOST_FILES} files in it");
                self.builder.refuse(&self.what, why, "let the program keep them in a file system that stays");
                break;
            }
            let is_folder = self.entry(root, &below, copy)?;
            if is_folder {
                let path = reach(copy, &below);
                for entry in std::fs::read_dir(&path).map_err(|e| Kernel::file(&path, e))? {
                    let name = entry.map_err(|e| Kernel::file(&path, e))?.file_name().into_vec();
                    left.push(joined(&below, &name));
                }
            }
        }
        self.entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(self.entries)
    }

    /// Describes one file; whether it is a directory.
    fn entry(&mut self, root: &[u8], below: &[u8], copy: &Arc<OwnedFd>) -> Result<bool> {
        let path = reach(copy, below);
        // The way to it is a link; what it leads to is looked at.
        let path = if below.is_empty() { path.join(".") } else { path };
        let stat = rustix::fs::lstat(&path).map_err(|e| Kernel::file(&path, e))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let name = Bytes(joined(root, below));
        if let Some(&known) = self.known.get(&stat.st_ino).filter(|_| kind != FileType::Directory) {
            self.entries[known].also.push(name);
            return Ok(false);
        }
        let is_opened = matches!(kind, FileType::RegularFile | FileType::Directory);
        let (noticed, inode) = (&self.builder.noticed, (stat.st_dev, stat.st_ino));
        let is_noticed = match kind {
            FileType::Directory => noticed.is_folder(&path, inode),
            FileType::RegularFile => noticed.is(&path, inode),
            _ => false,
        };
        if is_noticed {
            self.builder.refuse(format!("/{name} of {}", self.what), WATCHED.0, WATCHED.1);
            return Ok(false);
        }
        if is_opened && has_flags(&path) {
            let why = format!("{name} has attributes of its file system (lsattr) that are not saved");
            self.builder.refuse(&self.what, why, "take them away with chattr(1)");
        }
        let mut entry = Entry {
            mode: stat.st_mode,
            uid: stat.st_uid,
            gid: stat.st_gid,
            rdev: stat.st_rdev,
            ino: stat.st_ino,
            size: if kind == FileType::RegularFile { stat.st_size as u64 } else { 0 },
            atime_ns: describe(&[], &stat, Usage::Path).atime_ns,
            mtime_ns: describe(&[], &stat, Usage::Path).mtime_ns,
            attributes: attributes(&path)?,
            path: name,
            ..Entry::default()
        };
        if kind == FileType::Symlink {
            let target = rustix::fs::readlink(&path, Vec::new()).map_err(|e| Kernel::file(&path, e))?;
            entry.target = Bytes(target.into_bytes());
        }
        if kind == FileType::RegularFile && stat.st_size > 0 {
            entry.content = Some(self.content(below, &stat, copy));
        }
        self.known.insert(stat.st_ino, self.entries.len());
        self.entries.push(entry);
        Ok(kind == FileType::Directory)
    }

    /// Has the contents of a file saved.
    fn content(&mut self, below: &[u8], stat: &Stat, copy: &Arc<OwnedFd>) -> u32 {
        let path = [self.point.strip_suffix(b"/").unwrap_or(&self.point), b"/", below].concat();
        let file =
            PathFile { namespace: Some(self.row), made_anew: true, ..describe(&path, stat, Usage::Path) };
        let what = file.path.to_string();
        let (row, _) = self.builder.path(file);
        let source = Source::Below(copy.clone(), below.to_vec());
        self.builder.contents.push(Content { owner: Owner::File(row), source, ranges: None, what });
        row
    }
}

fn joined(folder: &[u8], name: &[u8]) -> Vec<u8> {
    match (folder, name) {
        ([], name) => name.to_vec(),
        (folder, []) => folder.to_vec(),
        (folder, name) => [folder, b"/", name].concat(),
    }
}

/// Opens a file below a directory for reading, without a trace.
pub(crate) fn open_below(folder: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    let path = reach(folder, path);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOATIME;
    Ok(rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| Kernel::file(&path, e))?)
}

/// Whether a file has flags such as that it is immutable.
fn has_flags(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOATIME;
    let file = rustix::fs::open(path, flags, Mode::empty());
    file.ok().and_then(|file| rustix::fs::ioctl_getflags(file).ok()).is_some_and(|flags| !flags.is_empty())
}

/// The extended attributes of a file.
fn attributes(path: &Path) -> Result<Vec<(Bytes, Bytes)>> {
    let failed = |e| Error::from(Kernel::file(path, e));
    paths::attributes(
        |names| rustix::fs::llistxattr(path, names),
        |name, value| rustix::fs::lgetxattr(path, name, value),
    )
    .map_err(failed)
}
