//! Files in the file system.

use super::{Opening, mapped_rows, missing, objects, open_flags, seek};
use crate::Result;
use rustix::fs::{FileType, Mode, OFlags};
use std::os::fd::OwnedFd;
use stillpoint_image::{FileKind, PathFile};
use stillpoint_linux::Error as Kernel;

/// Opens the rows that are files, directories, devices, `O_PATH` handles.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    let rows = opening.rows(|f| match f.kind {
        FileKind::Path(path) => Some(path),
        _ => None,
    });
    for (row, file, path) in rows {
        let fd = open_row(opening, path, open_flags(file.flags))?;
        let kind = FileType::from_raw_mode(opening.image.paths[path as usize].mode);
        if matches!(kind, FileType::RegularFile | FileType::Directory)
            && file.flags & libc::O_PATH as u32 == 0
        {
            seek(&fd, file.position)?;
        }
        opening.put(row, fd)?;
    }
    Ok(())
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
        let fd = match open_row(opening, path, flags | libc::O_NOCTTY) {
            // A directory to stand in may be searchable without being readable.
            Err(_) if flags & libc::O_DIRECTORY != 0 => open_row(opening, path, libc::O_PATH | flags)?,
            other => other?,
        };
        opening.files.mapped.insert((path, write), fd);
    }
    Ok(())
}

/// Opens a file by its path; a deleted one is made anew first.
fn open_row(opening: &mut Opening<'_>, row: u32, flags: i32) -> Result<OwnedFd> {
    let file = opening.image.paths.get(row as usize).ok_or_else(|| missing("file", row))?;
    if !file.deleted {
        return open_path(file, flags);
    }
    if !opening.deleted.contains_key(&row) {
        let made = objects::recreate(row, file, opening.contents)?;
        opening.deleted.insert(row, made);
    }
    opening.deleted[&row].open(flags)
}

fn open_path(file: &PathFile, flags: i32) -> Result<OwnedFd> {
    let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC;
    Ok(rustix::fs::open(file.path.as_path(), flags, Mode::empty())
        .map_err(|e| Kernel::file(file.path.as_path(), e))?)
}
