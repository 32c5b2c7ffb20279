//! Files in the file system.

use super::{Opening, TMPFILE, mapped_rows, missing, objects, open_flags, seek};
use crate::Result;
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use std::os::fd::OwnedFd;
use stillpoint_image::{FileKind, OpenFile, PathFile, is_kernel_log};
use stillpoint_linux::{Error as Kernel, descriptors};

/// Makes files anew that are gone; what they held is written back at the end.
pub(super) fn remake(opening: &mut Opening<'_>, rows: &[u32]) -> Result<()> {
    for &row in rows {
        let file = opening.image.paths.get(row as usize).ok_or_else(|| missing("file", row))?;
        let path = file.path.as_path();
        let failed = |e| Kernel::file(path, e);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let made = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        opening.files.created.note(path);
        rustix::fs::ftruncate(&made, file.size).map_err(failed)?;
        let (uid, gid) = (rustix::process::Uid::from_raw(file.uid), rustix::process::Gid::from_raw(file.gid));
        rustix::fs::fchown(&made, Some(uid), Some(gid)).map_err(failed)?;
        rustix::fs::fchmod(&made, Mode::from_raw_mode(file.mode & 0o7777)).map_err(failed)?;
        opening
            .files
            .notes
            .push(format!("{} was gone: it is made anew as the program had it mapped", file.path));
    }
    Ok(())
}

/// Opens the rows that are files, directories, devices, `O_PATH` handles; not those of sockets.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    open_those(opening, |kind| kind != FileType::Socket)
}

/// Opens the handles of files of sockets, when those are bound: some are the program's own.
pub(super) fn open_sockets(opening: &mut Opening<'_>) -> Result<()> {
    open_those(opening, |kind| kind == FileType::Socket)
}

fn open_those(opening: &mut Opening<'_>, pick: impl Fn(FileType) -> bool) -> Result<()> {
    let image = opening.image;
    let kind = |path: u32| image.paths.get(path as usize).map(|file| FileType::from_raw_mode(file.mode));
    let rows = opening.rows(|f| match f.kind {
        FileKind::Path(path) => Some(path).filter(|path| kind(*path).is_none_or(&pick)),
        _ => None,
    });
    for (row, file, path) in rows {
        let kind = FileType::from_raw_mode(opening.image.paths[path as usize].mode);
        // An end of a FIFO would wait for the other one.
        let does_not_wait = if kind == FileType::Fifo { libc::O_NONBLOCK as u32 } else { 0 };
        let mut fd = open_row(opening, path, file.flags | does_not_wait)?;
        if let Some(own) = joined(opening, row, &fd, file).filter(|_| kind == FileType::RegularFile) {
            fd = own;
        } else if matches!(kind, FileType::RegularFile | FileType::Directory)
            && file.flags & libc::O_PATH as u32 == 0
        {
            seek(&fd, file.position)?;
        }
        let flags = file.flags as i32;
        let reads = flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_WRONLY;
        if reads && is_kernel_log(opening.image.paths[path as usize].rdev) {
            // The program had read all that there was.
            rustix::fs::seek(&fd, SeekFrom::End(0))
                .map_err(|e| Kernel::call("seek to the end of /dev/kmsg", e))?;
        }
        opening.put(row, fd)?;
    }
    Ok(())
}

/// The description of the same file that we were started with under a number that the program has it under, if there is one that is open
/// in the same way. Then whoever started us, such as a shell that runs one command after the other with the same output, has it in common
/// with the program once more: what comes after that comes behind it.
///
/// It has to be where the program was, or goes to the end with it. A shell that has read on in a script, or a list, would begin again.
fn joined(opening: &Opening<'_>, row: usize, opened: &OwnedFd, file: &OpenFile) -> Option<OwnedFd> {
    let root = opening.image.processes.first().filter(|_| opening.joins)?;
    let table = opening.image.tables.get(root.table as usize)?;
    let numbers = table.descriptors.iter().filter(|d| d.file as usize == row).map(|d| d.fd);
    let what = |fd: &OwnedFd| {
        let (stat, flags) = (rustix::fs::fstat(fd).ok()?, rustix::fs::fcntl_getfl(fd).ok()?);
        Some((stat.st_dev, stat.st_ino, flags))
    };
    let opened = what(opened)?;
    let goes_to_end =
        file.flags as i32 & libc::O_ACCMODE == libc::O_WRONLY && opening.files.shared.contains(&row);
    let is_there = |own: &OwnedFd| rustix::fs::tell(own) == Ok(file.position);
    let own = numbers.filter_map(descriptors::inherited).find(|own| what(own) == Some(opened))?;
    (goes_to_end || is_there(&own)).then_some(own)
}

/// Opens what mappings are made from, the executable, and the directories the process stands in.
pub(super) fn open_for_mappings(opening: &mut Opening<'_>) -> Result<()> {
    for (path, write) in mapped_rows(opening.image) {
        let Some(file) = opening.image.paths.get(path as usize) else {
            // An image without processes or mappings, as in tests, names row 0 whether it is there or not.
            continue;
        };
        let flags = match FileType::from_raw_mode(file.mode) {
            FileType::Directory => libc::O_RDONLY | libc::O_DIRECTORY,
            FileType::RegularFile | FileType::CharacterDevice if write => libc::O_RDWR,
            FileType::RegularFile | FileType::CharacterDevice => libc::O_RDONLY,
            _ => continue,
        };
        let fd = match open_row(opening, path, flags as u32) {
            // A directory to stand in may be searchable without being readable.
            Err(_) if flags & libc::O_DIRECTORY != 0 => {
                open_row(opening, path, (libc::O_PATH | flags) as u32)?
            }
            other => other?,
        };
        opening.files.mapped.insert((path, write), fd);
    }
    Ok(())
}

/// Opens a file by its path, with flags as fdinfo shows them; a deleted one is made anew first.
pub(super) fn open_row(opening: &mut Opening<'_>, row: u32, flags: u32) -> Result<OwnedFd> {
    let file = opening.image.paths.get(row as usize).ok_or_else(|| missing("file", row))?;
    if !file.deleted {
        return open_path(file, open_flags(flags));
    }
    if !opening.deleted.contains_key(&row) {
        let is_of_row = |f: &&OpenFile| f.kind == FileKind::Path(row);
        let is_nameless = opening.image.files.iter().filter(is_of_row).any(|f| f.flags & TMPFILE != 0);
        let Opening { contents, detour, files, .. } = &mut *opening;
        let made = objects::recreate(row, file, is_nameless, *contents, detour, &mut files.notes)?;
        opening.deleted.insert(row, made);
    }
    opening.deleted[&row].open(flags)
}

fn open_path(file: &PathFile, flags: i32) -> Result<OwnedFd> {
    let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC;
    Ok(rustix::fs::open(file.path.as_path(), flags, Mode::empty())
        .map_err(|e| Kernel::file(file.path.as_path(), e))?)
}
