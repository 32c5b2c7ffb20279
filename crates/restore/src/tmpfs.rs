//! Filling a file system in memory with what was in it.

use crate::Result;
use crate::files::{Contents, fill};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use stillpoint_image::{Entry, FileSystem, Owner, Users};
use stillpoint_linux::Error as Kernel;

/// So many inode numbers are passed over, so that files have the ones that they had.
const PASSED_OVER: u64 = 200_000;

/// Makes all that was in a file system, which is empty. `root`: a mount of it.
///
/// Inode numbers of such a file system are given out in ascending order. So files are made in the order of theirs, under names
/// that are nobody's, and then take their places; numbers of files that are no more are passed over.
pub(crate) fn refill(system: &FileSystem, root: &OwnedFd, contents: &dyn Contents) -> Result<()> {
    let names = Names::free_of(system, root);
    let mut entries: Vec<(usize, &Entry)> = system.entries.iter().enumerate().collect();
    entries.sort_by_key(|(_, entry)| entry.ino);
    let mut left = PASSED_OVER;
    for (number, entry) in entries.iter().filter(|(_, entry)| !entry.path.0.is_empty()) {
        make(&names, *number, entry, &mut left)?;
    }
    // Directories before what is in them; and what is older first, as directories list it.
    entries.sort_by_key(|(_, entry)| (entry.path.0.iter().filter(|b| **b == b'/').count(), entry.ino));
    for &(number, entry) in entries.iter().filter(|(_, entry)| !entry.path.0.is_empty()) {
        let (from, to) = (names.made(number), names.place(&entry.path.0));
        rustix::fs::rename(&from, &to).map_err(|e| Kernel::file(&to, e))?;
    }
    for entry in &system.entries {
        let path = names.place(&entry.path.0);
        for other in &entry.also {
            let other = names.place(&other.0);
            rustix::fs::linkat(CWD, &path, CWD, &other, AtFlags::empty())
                .map_err(|e| Kernel::file(&other, e))?;
        }
        if let Some(row) = entry.content {
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| Kernel::file(&path, e))?;
            fill(&file, Owner::File(row), entry.size, 0, contents)?;
        }
    }
    for entry in &system.entries {
        give_attributes(&names.place(&entry.path.0), entry)?;
    }
    set_times(system, root)
}

/// Gives all files the times that they had.
pub(crate) fn set_times(system: &FileSystem, root: &OwnedFd) -> Result<()> {
    let names = Names { root: root.as_raw_fd(), free: String::new() };
    let time =
        |ns: i64| Timespec { tv_sec: ns.div_euclid(1_000_000_000), tv_nsec: ns.rem_euclid(1_000_000_000) };
    for entry in system.entries.iter().filter(|entry| entry.ino != 0) {
        let path = names.place(&entry.path.0);
        let times = Timestamps { last_access: time(entry.atime_ns), last_modification: time(entry.mtime_ns) };
        match rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW) {
            // The name of a socket that could not be bound where it was, or that was cut off at once.
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(Kernel::file(&path, e).into()),
        }
    }
    Ok(())
}

/// Paths of files in the file system, as they are made and in the end.
struct Names {
    root: i32,
    /// No name in it begins with this.
    free: String,
}

impl Names {
    fn free_of(system: &FileSystem, root: &OwnedFd) -> Self {
        let is_taken =
            |name: &str| system.entries.iter().any(|entry| entry.path.0.starts_with(name.as_bytes()));
        let free = (0..).map(|n| format!(".stillpoint-{n}-")).find(|name| !is_taken(name));
        Names { root: root.as_raw_fd(), free: free.unwrap_or_default() }
    }

    fn made(&self, number: usize) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{}{number}", self.root, self.free))
    }

    fn place(&self, path: &[u8]) -> PathBuf {
        // The root is what a link leads to, not the link.
        let path = if path.is_empty() { b"." } else { path };
        Path::new(&format!("/proc/self/fd/{}", self.root)).join(OsStr::from_bytes(path))
    }
}

/// Makes a file that is still empty; once more while it has a lower inode number than it had, if that is not too often.
fn make(names: &Names, number: usize, entry: &Entry, left: &mut u64) -> Result<()> {
    let path = names.made(number);
    let failed = |e| Kernel::file(entry.path.as_path(), e);
    loop {
        let kind = FileType::from_raw_mode(entry.mode);
        match kind {
            FileType::Directory => rustix::fs::mkdir(&path, Mode::RWXU),
            FileType::Symlink => rustix::fs::symlink(entry.target.as_path(), &path),
            _ => rustix::fs::mknodat(CWD, &path, kind, Mode::RUSR | Mode::WUSR, entry.rdev),
        }
        .map_err(failed)?;
        let made = rustix::fs::lstat(&path).map_err(failed)?.st_ino;
        if made >= entry.ino || entry.ino - made > *left {
            break;
        }
        *left -= 1;
        let flags = if kind == FileType::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        rustix::fs::unlinkat(CWD, &path, flags).map_err(failed)?;
    }
    if FileType::from_raw_mode(entry.mode) == FileType::RegularFile && entry.size > 0 {
        let file =
            rustix::fs::open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        rustix::fs::ftruncate(&file, entry.size).map_err(failed)?;
    }
    Ok(())
}

/// Owner, mode and extended attributes, in this order: each change takes away what comes after it.
fn give_attributes(path: &Path, entry: &Entry) -> Result<()> {
    let failed = |e| Kernel::file(entry.path.as_path(), e);
    let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
    rustix::fs::chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    if FileType::from_raw_mode(entry.mode) != FileType::Symlink {
        rustix::fs::chmod(path, Mode::from_raw_mode(entry.mode & 0o7777)).map_err(failed)?;
    }
    for (name, value) in &entry.attributes {
        let name = OsStr::from_bytes(&name.0);
        rustix::fs::lsetxattr(path, name, &value.0, XattrFlags::empty()).map_err(failed)?;
    }
    Ok(())
}

/// Settings of a file system as it is made with them: names and values.
pub(crate) fn settings(system: &FileSystem) -> Vec<(&[u8], Option<&[u8]>)> {
    let all = system.settings.0.split(|b| *b == b',').filter(|setting| !setting.is_empty());
    let parted = all.map(|setting| match setting.iter().position(|b| *b == b'=') {
        Some(at) => (&setting[..at], Some(&setting[at + 1..])),
        None => (setting, None),
    });
    // What is read-only is so when it is filled.
    let left_out: [&[u8]; 3] = [b"rw", b"ro", b"seclabel"];
    parted.filter(|(name, _)| !left_out.contains(name)).collect()
}

/// The value of a setting that is an id, as it is called in a user namespace.
pub(crate) fn called(users: &Users, name: &[u8], value: &[u8]) -> Option<Vec<u8>> {
    let id = std::str::from_utf8(value).ok()?.parse().ok()?;
    let called = match name {
        b"uid" => users.uid(id),
        b"gid" => users.gid(id),
        _ => None,
    };
    called.map(|id| id.to_string().into_bytes())
}

/// Whether nothing can be written to it.
pub(crate) fn is_read_only(system: &FileSystem) -> bool {
    system.settings.0.split(|b| *b == b',').any(|setting| setting == b"ro")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_parted() {
        let of =
            |text: &str| FileSystem { settings: text.as_bytes().to_vec().into(), ..FileSystem::default() };
        let system = of("ro,size=10k,noswap,mode=755");
        let expected: [(&[u8], Option<&[u8]>); 3] =
            [(b"size", Some(b"10k")), (b"noswap", None), (b"mode", Some(b"755"))];
        assert_eq!(settings(&system), expected);
        assert!(is_read_only(&system) && !is_read_only(&of("rw")) && settings(&of("rw")).is_empty());
    }
}
