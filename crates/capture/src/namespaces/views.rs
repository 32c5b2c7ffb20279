//! The program's own mount namespaces as seen from here: which one a file is in, and how it is reached.

use crate::Result;
use rustix::fs::AtFlags;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use stillpoint_linux::mounts;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::proc::mounts::Mount;

/// All of them that are described.
#[derive(Debug, Default)]
pub(crate) struct Views {
    all: Vec<View>,
    /// Mounts by their numbers, with the rows of their namespaces.
    by_mount: HashMap<u64, u32>,
    /// Device numbers of file systems that a restore makes anew.
    mounted_anew: HashSet<u64>,
    /// Those of them that are part of the checkpoint.
    made_anew: HashSet<u64>,
    /// Mounts of our own namespace, once they were asked for.
    ours: OnceLock<Vec<Mount>>,
}

#[derive(Debug)]
struct View {
    row: u32,
    root: Arc<OwnedFd>,
    mounts: Vec<Mount>,
    pids: Vec<u32>,
}

impl Views {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Adds the namespace of this row, in which these processes are.
    pub fn add(&mut self, row: u32, root: Arc<OwnedFd>, mounts: Vec<Mount>, pids: Vec<u32>) {
        self.by_mount.extend(mounts.iter().map(|mount| (mount.id, row)));
        self.all.push(View { row, root, mounts, pids });
    }

    /// This file system is mounted anew by a restore; `is_saved`: with what is in it. False if that is so already.
    pub fn add_mounted_anew(&mut self, device: u64, is_saved: bool) -> bool {
        if is_saved {
            self.made_anew.insert(device);
        }
        self.mounted_anew.insert(device)
    }

    /// File systems that nobody else may have, by device number.
    pub fn mounted_anew(&self) -> impl Iterator<Item = u64> {
        self.mounted_anew.iter().copied()
    }

    /// Whether the contents of a file system are saved.
    pub fn is_made_anew(&self, device: u64) -> bool {
        self.made_anew.contains(&device)
    }

    /// The row of the namespace that a process is in.
    pub fn of_process(&self, pid: u32) -> Option<u32> {
        self.all.iter().find(|view| view.pids.contains(&pid)).map(|view| view.row)
    }

    /// The row of the namespace in which a file was opened.
    pub fn of_file(&self, file: impl AsFd) -> Result<Option<u32>> {
        self.of_file_at(file, "", AtFlags::EMPTY_PATH)
    }

    /// The same of what a path leads to.
    pub fn of_file_at(&self, folder: impl AsFd, path: &str, flags: AtFlags) -> Result<Option<u32>> {
        if self.is_empty() {
            return Ok(None);
        }
        Ok(self.by_mount.get(&mounts::number_at(folder, path, flags)?).copied())
    }

    /// Where we find a path of a namespace; `None`: as it is.
    pub fn reach(&self, row: Option<u32>, path: &[u8]) -> PathBuf {
        let view = row.and_then(|row| self.all.iter().find(|view| view.row == row));
        match view {
            Some(view) if path.first() == Some(&b'/') => reach(&view.root, path),
            _ => Path::new(OsStr::from_bytes(path)).to_owned(),
        }
    }

    /// Mounts of our own namespace.
    pub fn ours(&self) -> Result<&[Mount]> {
        if self.ours.get().is_none() {
            let _ = self.ours.set(Proc::process(std::process::id())?.mounts()?);
        }
        Ok(self.ours.get().map_or(&[], Vec::as_slice))
    }

    /// What we find in a namespace, as it is called there; `None`: as it is.
    pub fn mounts(&self, row: u32) -> &[Mount] {
        self.all.iter().find(|view| view.row == row).map_or(&[], |view| &view.mounts)
    }
}

/// Where we find a path that begins at a directory.
pub(super) fn reach(root: &OwnedFd, path: &[u8]) -> PathBuf {
    let mut all = format!("/proc/self/fd/{}", root.as_raw_fd()).into_bytes();
    if path.first() != Some(&b'/') {
        all.push(b'/');
    }
    all.extend_from_slice(path);
    PathBuf::from(OsStr::from_bytes(&all))
}
