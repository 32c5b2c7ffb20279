//! What a program holds of processes that have ended and been waited for: handles to them, and files of procfs about them. They are
//! made of others that end likewise.

use super::{Opening, missing, open_flags};
use crate::Result;
use rustix::fs::{Mode, OFlags, SeekFrom};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use stillpoint_image::{FileKind, OpenFile};
use stillpoint_linux::{Error as Kernel, descriptors, spawn};

/// Makes handles.
pub(super) fn open_handles(opening: &mut Opening<'_>) -> Result<()> {
    let mut ended = HashMap::new();
    for (row, file) in opening.image.files.iter().enumerate() {
        let FileKind::Ended { process, status } = file.kind else { continue };
        let corpse = match ended.entry(process) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(spawn::corpse(status)?),
        };
        let handle = descriptors::pidfd_open(corpse.pid, file.flags & libc::O_EXCL as u32)?;
        opening.put(row, handle)?;
    }
    Ok(())
}

/// Makes files of procfs: of processes that have the same numbers, as their paths tell, where these are free.
pub(super) fn open_files(opening: &mut Opening<'_>) -> Result<()> {
    let mut doomed: HashMap<u32, spawn::Doomed> = HashMap::new();
    for (row, file) in opening.image.files.iter().enumerate() {
        let FileKind::EndedProc(path) = file.kind else { continue };
        let named = opening.image.paths.get(path as usize).ok_or_else(|| missing("file", path))?;
        let Some((number, below)) = named.of_process() else { return Err(missing("file", path)) };
        let process = match doomed.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(spawn::doomed(number)?),
        };
        let at = place(process.pid(), below);
        let opened = open(&at, file)?;
        if at != named.path.as_path() {
            let line =
                format!("{}: is about a process that has ended, and is now {}", named.path, at.display());
            opening.files.notes.push(line);
        }
        opening.put(row, opened)?;
    }
    Ok(())
}

/// Where that lies of a process of one thread.
fn place(pid: u32, below: &Path) -> PathBuf {
    let mut at = PathBuf::from(format!("/proc/{pid}"));
    let mut parts = below.iter();
    while let Some(part) = parts.next() {
        at.push(part);
        if part == "task" && parts.next().is_some() {
            at.push(pid.to_string());
        }
    }
    at
}

fn open(at: &Path, file: &OpenFile) -> Result<OwnedFd> {
    let flags = OFlags::from_bits_retain(open_flags(file.flags) as u32) | OFlags::CLOEXEC;
    let opened = rustix::fs::open(at, flags, Mode::empty()).map_err(|e| Kernel::file(at, e))?;
    if file.position != 0 {
        rustix::fs::seek(&opened, SeekFrom::Start(file.position)).map_err(|e| Kernel::file(at, e))?;
    }
    Ok(opened)
}
