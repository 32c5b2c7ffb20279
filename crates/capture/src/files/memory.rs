//! Memfds.

use super::descriptions::Description;
use super::noticed::WATCHED;
use super::{Scan, paths};
use crate::builder::Source;
use crate::{Builder, Content, Result};
use rustix::fs::SeekFrom;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use stillpoint_image::{Bytes, FileKind, MemoryObject, Owner, PAGE, Range};
use stillpoint_linux::{Error, memfd};

const HUGETLBFS: u64 = 0x9584_58f6;
const TMPFS: u64 = 0x0102_1994;

/// Whether a description is a memfd: a nameless file of that name on a file system in memory.
pub(crate) fn is_memfd(d: &Description) -> Result<bool> {
    if !d.link.starts_with(b"/memfd:") || d.stat.st_nlink != 0 {
        return Ok(false);
    }
    let fs = rustix::fs::fstatfs(&d.file).map_err(|e| Error::call("fstatfs", e))?;
    Ok(matches!(fs.f_type as u64, TMPFS | HUGETLBFS))
}

/// The file system of memfds, shared anonymous memory and System V shared memory, by its device number.
pub(crate) fn internal_device() -> Option<u64> {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    let look = || rustix::fs::fstat(memfd::create(b"", 0).ok()?).ok().map(|s| s.st_dev);
    *DEVICE.get_or_init(look)
}

/// Whether a description is of shared memory that has no name: it was opened by way of a mapping
/// (`/proc/self/map_files`).
pub(crate) fn is_nameless(d: &Description) -> bool {
    d.stat.st_nlink == 0 && Some(d.stat.st_dev) == internal_device()
}

/// Captures a memfd, or a handle to shared anonymous memory.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    if let Some(holder) = scan.target.outsiders.memory(d.stat.st_ino) {
        let why = format!("its memory is shared with {holder}");
        return scan.refuse(d, why, "end the other process");
    }
    if d.link.starts_with(b"/SYSV") {
        return scan.refuse(
            d,
            "it is a descriptor of System V shared memory",
            "close it before the checkpoint",
        );
    }
    let name = d.link.starts_with(b"/memfd:").then(|| memfd_name(&d.link));
    let row = memory_object(scan.builder, name, d.file.as_fd(), &d.name())?;
    Ok(Some(FileKind::Memory(row)))
}

/// The name given to `memfd_create`, from `/memfd:NAME (deleted)`.
pub fn memfd_name(link: &[u8]) -> &[u8] {
    let name = link.strip_prefix(b"/memfd:").unwrap_or(link);
    name.strip_suffix(b" (deleted)").unwrap_or(name)
}

/// Row of a memory object: a memfd (with its name), or shared anonymous memory (reached through
/// `/proc/PID/map_files`). `file` may be any descriptor of it; contents are read from a description of our own.
pub fn memory_object(
    builder: &mut Builder,
    memfd_name: Option<&[u8]>,
    file: BorrowedFd<'_>,
    what: &str,
) -> Result<u32> {
    let stat = rustix::fs::fstat(file).map_err(|e| Error::call(format!("fstat {what}"), e))?;
    let fs = rustix::fs::fstatfs(file).map_err(|e| Error::call(format!("fstatfs {what}"), e))?;
    let huge_page = if fs.f_type as u64 == HUGETLBFS { fs.f_bsize as u64 } else { 0 };
    let seals = memfd::seals(file)?.unwrap_or(memfd::SEAL_SEAL);
    let (row, new) = builder.object(stat.st_dev, stat.st_ino, || MemoryObject {
        size: stat.st_size as u64,
        memfd: memfd_name.map(|n| Bytes(n.to_vec())),
        seals,
        huge_page,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        segment: None,
        times: Some(paths::times(&stat)),
    });
    if new {
        // It is in no folder.
        let is_noticed = builder.noticed.is(Path::new(""), (stat.st_dev, stat.st_ino));
        let Some(source) = Source::of(file, is_noticed)? else {
            builder.refuse(what, WATCHED.0, WATCHED.1);
            return Ok(row);
        };
        let (owner, what) = (Owner::Object(row), what.to_owned());
        builder.contents.push(Content { owner, source, ranges: None, what });
    }
    Ok(row)
}

/// All of a file, rounded up to pages.
pub(crate) fn whole(file: &OwnedFd) -> Result<Vec<Range>> {
    let size = rustix::fs::fstat(file).map_err(|e| Error::call("fstat", e))?.st_size as u64;
    Ok(if size > 0 { vec![Range { start: 0, len: size.next_multiple_of(PAGE) }] } else { Vec::new() })
}

/// Ranges of a file that are not holes, rounded outwards to pages.
pub(crate) fn data_ranges(file: &OwnedFd) -> Result<Vec<Range>> {
    let size = rustix::fs::fstat(file).map_err(|e| Error::call("fstat", e))?.st_size as u64;
    let fs = rustix::fs::fstatfs(file).map_err(|e| Error::call("fstatfs", e))?;
    let end = size.next_multiple_of(PAGE);
    if fs.f_type as u64 == HUGETLBFS {
        // hugetlbfs does not tell its holes.
        return whole(file);
    }
    let mut ranges: Vec<Range> = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(rustix::io::Errno::INVAL) => 0,
            Err(e) => return Err(Error::call("look for data", e).into()),
        };
        let stop = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap_or(size).max(start + 1);
        let (from, to) = (start / PAGE * PAGE, stop.next_multiple_of(PAGE).min(end));
        match ranges.last_mut() {
            Some(last) if last.end() >= from => last.len = to - last.start,
            _ => ranges.push(Range { start: from, len: to - from }),
        }
        at = stop;
    }
    Ok(ranges)
}
