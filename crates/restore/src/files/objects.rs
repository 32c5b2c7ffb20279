//! Memory objects and deleted files, made anew with their contents.

use super::detour::Detour;
use super::{Contents, TMPFILE, open_flags};
use crate::{Error, Result};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use stillpoint_image::{Bytes, MemoryObject, Owner, PAGE, PathFile, Status, Times};
use stillpoint_linux::{Error as Kernel, memfd};

/// Makes a memory object with its contents, not yet sealed.
pub(super) fn memory(row: u32, object: &MemoryObject, contents: &dyn Contents) -> Result<OwnedFd> {
    let fd = match &object.memfd {
        Some(name) => memfd::create(&name.0, object.huge_page)?,
        None => return shared_anonymous(row, object, contents),
    };
    resize(&fd, object.size)?;
    fill(&fd, Owner::Object(row), object.size, object.huge_page, contents)?;
    Ok(fd)
}

/// Size of a memfd, bytes.
pub(super) fn resize(fd: impl AsFd, size: u64) -> Result<()> {
    Ok(rustix::fs::ftruncate(fd, size).map_err(|e| Kernel::call("set the size of a memfd", e))?)
}

/// Access mode and owner of a memfd; after everything was opened, as we may lock ourselves out.
pub(super) fn finish_memory(object: &MemoryObject, fd: impl AsFd) -> Result<()> {
    if object.memfd.is_none() {
        return Ok(());
    }
    own(&fd, object.uid, object.gid, object.mode).map_err(|e| Kernel::call("set the owner of a memfd", e))?;
    Ok(())
}

fn shared_anonymous(row: u32, object: &MemoryObject, contents: &dyn Contents) -> Result<OwnedFd> {
    let fd = memfd::shared_anonymous(object.size, object.huge_page)?;
    fill(&fd, Owner::Object(row), object.size, object.huge_page, contents)?;
    Ok(fd)
}

/// Writes the contents of an object that holds only zeros.
pub(super) fn fill_object(
    fd: &OwnedFd,
    row: u32,
    object: &MemoryObject,
    contents: &dyn Contents,
) -> Result<()> {
    fill(fd, Owner::Object(row), object.size, object.huge_page, contents)
}

/// Writes the contents, without what is zero.
pub(crate) fn fill(
    fd: &OwnedFd,
    owner: Owner,
    size: u64,
    huge_page: u64,
    contents: &dyn Contents,
) -> Result<()> {
    let piece = huge_page.max(64 << 10);
    for range in contents.stored(owner, size) {
        let (mut at, end) = (range.start, range.end().min(size));
        while at < end {
            let n = (piece - at % piece).min(end - at) as usize;
            let mut buffer = vec![0u8; n];
            contents.read(owner, at, &mut buffer)?;
            write_sparsely(fd, at, &buffer, huge_page)?;
            at += n as u64;
        }
    }
    Ok(())
}

/// Writes runs of pages that are not zero; the others stay holes.
fn write_sparsely(fd: &OwnedFd, at: u64, buffer: &[u8], huge_page: u64) -> Result<()> {
    let page = if huge_page > 0 { buffer.len().max(1) } else { PAGE as usize };
    let is_zero = |page: &[u8]| page.iter().all(|b| *b == 0);
    let pages: Vec<&[u8]> = buffer.chunks(page).collect();
    let mut offset = 0;
    for run in pages.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let len: usize = run.iter().map(|p| p.len()).sum();
        if !is_zero(run[0]) {
            memfd::write_at(fd, at + offset as u64, &buffer[offset..offset + len], huge_page)?;
        }
        offset += len;
    }
    Ok(())
}

/// `fd` may be a handle (`O_PATH`).
fn own(fd: impl AsFd, uid: u32, gid: u32, mode: u32) -> rustix::io::Result<()> {
    let stat = rustix::fs::fstat(&fd)?;
    if (stat.st_uid, stat.st_gid) != (uid, gid) {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::fs::chownat(&fd, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
    }
    if stat.st_mode & 0o7777 != mode & 0o7777 {
        rustix::fs::chmod(link_of(&fd), Mode::from_raw_mode(mode & 0o7777))?;
    }
    Ok(())
}

/// The name of what we have open.
fn link_of(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Gives a file its extended attributes; `of` may be a handle (`O_PATH`). Returns a remark on those that it cannot have here.
pub(super) fn give_attributes(of: impl AsFd, attributes: &[(Bytes, Bytes)], what: &str) -> Option<String> {
    let mut lost = Vec::new();
    for (name, value) in attributes {
        let (name, way) = (OsStr::from_bytes(&name.0), link_of(&of));
        let mut now = vec![0; value.0.len() + 1];
        let has = rustix::fs::getxattr(&way, name, &mut now);
        if has.is_ok_and(|length| now[..length] == value.0) {
            continue;
        }
        if let Err(e) = rustix::fs::setxattr(&way, name, &value.0, XattrFlags::empty()) {
            lost.push(format!("{} ({e})", name.to_string_lossy()));
        }
    }
    (!lost.is_empty()).then(|| format!("{what}: without its extended attributes {}", lost.join(", ")))
}

/// Gives something its times; `of` may be a handle (`O_PATH`).
pub(super) fn give_times(of: impl AsFd, times: &Times) -> rustix::io::Result<()> {
    let time =
        |ns: i64| Timespec { tv_sec: ns.div_euclid(1_000_000_000), tv_nsec: ns.rem_euclid(1_000_000_000) };
    let times = Timestamps { last_access: time(times.atime_ns), last_modification: time(times.mtime_ns) };
    rustix::fs::utimensat(of, c"", &times, AtFlags::EMPTY_PATH)
}

/// Gives a pipe or socket the owner, mode and times that it had.
pub(super) fn give_status(of: impl AsFd, status: &Status) -> rustix::io::Result<()> {
    own(&of, status.uid, status.gid, status.mode)?;
    let is = rustix::fs::fstat(&of)?;
    let now = Times::of((is.st_atime, is.st_atime_nsec), (is.st_mtime, is.st_mtime_nsec));
    if now == status.times { Ok(()) } else { give_times(of, &status.times) }
}

/// A deleted file that was made anew. It has a name for the moment, so that it can be opened.
#[derive(Debug)]
pub(super) struct Recreated {
    /// For reading and writing; a directory for reading; a FIFO or device as a handle (`O_PATH`).
    pub file: OwnedFd,
    name: Option<PathBuf>,
    /// The name it had.
    lost: PathBuf,
    directory: bool,
    /// It is the machine's own device of that number, which stays as it is.
    is_the_machines: bool,
}

impl Drop for Recreated {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            let flags = if self.directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            let _ = rustix::fs::unlinkat(rustix::fs::CWD, &name, flags);
        }
    }
}

impl Recreated {
    /// Whether it was not made, but is the machine's own device of that number.
    pub fn is_the_machines(&self) -> bool {
        self.is_the_machines
    }

    /// Opens it once more, with flags as fdinfo shows them, by the name it had if that is free: `/proc/PID/fd` goes on to show it.
    pub fn open(&self, shown: u32) -> Result<OwnedFd> {
        let flags = open_flags(shown);
        let Some(name) = &self.name else {
            // Only the description that it was made with tells that it was made without a name.
            if shown & TMPFILE != 0 && flags & libc::O_ACCMODE == libc::O_RDWR {
                return Ok(self.file.try_clone().map_err(|e| Kernel::call("duplicate a descriptor", e))?);
            }
            // By way of a link, which that flag forbids; it matters only while a file is opened.
            let flags = flags & !libc::O_NOFOLLOW;
            return Ok(stillpoint_linux::descriptors::reopen(&self.file, flags)?);
        };
        let lends = !self.directory
            && rustix::fs::linkat(rustix::fs::CWD, name, rustix::fs::CWD, &self.lost, AtFlags::empty())
                .is_ok();
        let name = if lends { &self.lost } else { name };
        let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC;
        let opened = rustix::fs::open(name, flags, Mode::empty());
        if lends {
            rustix::fs::unlink(name).map_err(|e| Kernel::file(name, e))?;
        }
        Ok(opened.map_err(|e| Kernel::file(name, e))?)
    }

    /// Owner and extended attributes; after everything was opened. Returns which attributes it cannot have here.
    pub fn finish(&self, row: &PathFile) -> Result<Option<String>> {
        let named = |e| Kernel::file(row.path.as_path(), e);
        own(&self.file, row.uid, row.gid, row.mode).map_err(named)?;
        Ok(give_attributes(&self.file, &row.attributes, &format!("{} (deleted)", row.path)))
    }

    /// A handle by which times are given to it at the end. It does not keep anybody from executing the file, as one for writing would.
    pub fn handle(&self) -> Result<OwnedFd> {
        Ok(stillpoint_linux::descriptors::reopen(&self.file, libc::O_PATH)?)
    }
}

/// Makes a deleted file anew. The name that it has meanwhile is removed when the result is dropped; what it lies in is there by
/// the detour, if it is gone. Where nothing can be made in its
/// file system, it is made in another one, of which a note tells. `is_nameless`: it was made without a name (`O_TMPFILE`), and can be given
/// one as long as it has had none.
pub(super) fn recreate(
    row: u32,
    file: &PathFile,
    is_nameless: bool,
    contents: &dyn Contents,
    detour: &mut Detour,
    notes: &mut Vec<String>,
) -> Result<Recreated> {
    let path = file.path.as_path();
    match FileType::from_raw_mode(file.mode) {
        FileType::Directory => {
            // Others may lie in it: then it goes after them.
            detour.lead_to(&path.join("within"))?;
            match detour.take(path) {
                true => open_directory(path, None, path),
                false => recreate_directory(path),
            }
        }
        FileType::RegularFile => {
            let made = or_elsewhere(path, notes, |path| nameless(path).or_else(|_| named(path)), detour)?;
            rustix::fs::ftruncate(&made.file, file.size).map_err(|e| Kernel::file(path, e))?;
            fill(&made.file, Owner::File(row), file.size, 0, contents)?;
            Ok(if is_nameless { made } else { give_name(made) })
        }
        FileType::Fifo => or_elsewhere(path, notes, |path| node(path, FileType::Fifo, 0), detour),
        kind @ FileType::CharacterDevice => {
            or_elsewhere(path, notes, |path| node(path, kind, file.rdev), detour).or_else(|e| {
                let (own, made) = machines_own(path, file.rdev).ok_or(e)?;
                let what = path.display();
                notes.push(format!(
                    "{what}: is deleted, and open: it cannot be made anew here, and is {own} instead"
                ));
                Ok(made)
            })
        }
        _ => Err(Error::Failed(format!("{path:?}: a deleted file of a kind that cannot be made anew"))),
    }
}

/// Makes a deleted file at its place, or where temporary files are if it cannot be made there, of which a note tells.
fn or_elsewhere(
    path: &Path,
    notes: &mut Vec<String>,
    make: impl Fn(&Path) -> Result<Recreated>,
    detour: &mut Detour,
) -> Result<Recreated> {
    detour.lead_to(path).and_then(|()| make(path)).or_else(|e| {
        let elsewhere = std::env::temp_dir().join(path.file_name().unwrap_or_default());
        let made = make(&elsewhere).map_err(|_| e)?;
        let there = elsewhere.parent().unwrap_or(Path::new("/")).display();
        notes.push(format!(
            "{}: is deleted, and open: it is made anew in {there}, as it cannot be at its place",
            path.display()
        ));
        Ok(made)
    })
}

/// Names beside a deleted file: its old one may be somebody else's now, be it another deleted file's.
fn names(path: &Path) -> impl Iterator<Item = PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let ours = format!(".{name}.stillpoint-{}", std::process::id());
    (0..100).map(move |i| path.with_file_name(format!("{ours}-{i}")))
}

/// Does something with the first of some names that is not in use.
fn with_free_name<T>(
    names: impl Iterator<Item = PathBuf>,
    mut act: impl FnMut(&Path) -> rustix::io::Result<T>,
) -> rustix::io::Result<(PathBuf, T)> {
    for name in names {
        match act(&name) {
            Err(rustix::io::Errno::EXIST) => {}
            other => return other.map(|done| (name, done)),
        }
    }
    Err(rustix::io::Errno::EXIST)
}

/// A file without a name: if we are killed while it is filled, nothing is left.
fn nameless(path: &Path) -> Result<Recreated> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|e| Kernel::file(directory, e))?;
    Ok(Recreated { file, name: None, lost: path.to_owned(), directory: false, is_the_machines: false })
}

/// For file systems without `O_TMPFILE`.
fn named(path: &Path) -> Result<Recreated> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let make = |name: &Path| rustix::fs::open(name, flags, Mode::RUSR | Mode::WUSR);
    let (name, file) = with_free_name(names(path), make).map_err(|e| Kernel::file(path, e))?;
    let lost = path.to_owned();
    Ok(Recreated { file, name: Some(name), lost, directory: false, is_the_machines: false })
}

/// The machine's own memory device of a number, and its name.
fn machines_own(lost: &Path, device: u64) -> Option<(&'static str, Recreated)> {
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"].into_iter().find_map(|name| {
        let file = rustix::fs::open(name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&file).ok()?;
        let is_it =
            FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == device;
        let made =
            Recreated { file, name: None, lost: lost.to_owned(), directory: false, is_the_machines: true };
        is_it.then_some((name, made))
    })
}

/// A FIFO or a memory device. A FIFO is not opened for that: its other end would see it.
fn node(path: &Path, kind: FileType, device: u64) -> Result<Recreated> {
    let mode = Mode::RUSR | Mode::WUSR;
    let make = |name: &Path| rustix::fs::mknodat(rustix::fs::CWD, name, kind, mode, device);
    let (name, ()) = with_free_name(names(path), make).map_err(|e| Kernel::file(path, e))?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(&name, flags, Mode::empty()).map_err(|e| Kernel::file(&name, e))?;
    // Whoever owns the folder may have put another file there.
    let stat = rustix::fs::fstat(&file).map_err(|e| Kernel::file(&name, e))?;
    let is_device = kind == FileType::CharacterDevice;
    let is_ours = FileType::from_raw_mode(stat.st_mode) == kind && stat.st_nlink == 1;
    if !is_ours || is_device && stat.st_rdev != device {
        return Err(Error::Failed(format!("{}: another file came in its place", name.display())));
    }
    let lost = path.to_owned();
    let made = Recreated { file, name: Some(name), lost, directory: false, is_the_machines: false };
    if is_device {
        // Some file systems have devices that cannot be opened (`nodev`).
        stillpoint_linux::descriptors::reopen(&made.file, libc::O_RDONLY)?;
    }
    Ok(made)
}

/// Gives a nameless file a name: without any, it cannot be opened with `O_NOFOLLOW`, as `shm_open(3)` does.
fn give_name(mut made: Recreated) -> Recreated {
    if made.name.is_none() {
        let link = link_of(&made.file);
        let give = |name: &Path| {
            rustix::fs::linkat(rustix::fs::CWD, &link, rustix::fs::CWD, name, AtFlags::SYMLINK_FOLLOW)
        };
        made.name = with_free_name(names(&made.lost), give).ok().map(|(name, ())| name);
    }
    made
}

fn recreate_directory(path: &Path) -> Result<Recreated> {
    let all = std::iter::once(path.to_owned()).chain(names(path));
    let make = |name: &Path| rustix::fs::mkdir(name, Mode::RWXU);
    let (name, ()) = with_free_name(all, make).map_err(|e| Kernel::file(path, e))?;
    open_directory(&name, Some(name.clone()), path)
}

/// A directory that was made anew; `name`: to be removed with it.
fn open_directory(place: &Path, name: Option<PathBuf>, lost: &Path) -> Result<Recreated> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let file = rustix::fs::open(place, flags, Mode::empty()).map_err(|e| Kernel::file(place, e))?;
    Ok(Recreated { file, name, lost: lost.to_owned(), directory: true, is_the_machines: false })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_device_that_cannot_be_made_is_the_machines_own() {
        let zero = rustix::fs::stat("/dev/zero").unwrap().st_rdev;
        let (name, made) = machines_own(Path::new("/gone/zero"), zero).unwrap();
        assert!(name == "/dev/zero" && made.is_the_machines());
        let opened = made.open(libc::O_RDWR as u32).unwrap();
        let mut read = [1; 3];
        assert_eq!(rustix::io::read(&opened, &mut read).unwrap(), 3);
        assert_eq!(read, [0; 3]);
        drop(made);
        assert_eq!(rustix::fs::stat("/dev/zero").unwrap().st_rdev, zero);
        assert!(machines_own(Path::new("/gone/other"), u64::MAX).is_none());
    }
}
