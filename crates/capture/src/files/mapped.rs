//! Files behind mappings.

use super::paths;
use crate::builder::{AS_PRIVILEGED, Source};
use crate::{Builder, Content, Result};
use rustix::fs::{FileType, Mode, OFlags};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use stillpoint_image::{Owner, PAGE, PathFile, Range, Usage};
use stillpoint_linux::proc::Vma;
use stillpoint_linux::{Error, silent};

/// The file behind a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Row of the file.
    pub path: u32,
    /// It is a character device.
    pub is_device: bool,
}

/// Row of the file behind a mapping of a process; `None` if it was refused. `written` is the range of the file that the program
/// can write through the mapping: its contents are saved too, as nothing tells what is written there after the cut.
pub fn mapped_file(
    builder: &mut Builder,
    pid: u32,
    vma: &Vma,
    usage: Usage,
    written: Option<Range>,
) -> Result<Option<Mapped>> {
    // All processes have the same libraries, several mappings of each. In another mount namespace the name leads elsewhere.
    let is_here = builder.views.of_process(pid).is_none();
    if written.is_none()
        && is_here
        && !vma.deleted
        && let Some(path) = builder.known_path(vma.dev, vma.ino, &vma.name, usage)
        && is_regular(&builder.image.paths[path as usize])
    {
        return Ok(Some(Mapped { path, is_device: false }));
    }
    let name = std::path::Path::new(std::ffi::OsStr::from_bytes(&vma.name));
    // Most files are where they were: no need to open each mapping of each library.
    if let Ok(stat) = rustix::fs::lstat(name)
        && (stat.st_dev, stat.st_ino) == (vma.dev, vma.ino)
        && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && !vma.deleted
        && is_here
        && written.is_none()
    {
        let path = builder.path(paths::describe(&vma.name, &stat, usage)).0;
        return Ok(Some(Mapped { path, is_device: false }));
    }
    let link_path = format!("/proc/{pid}/{}", vma.link_name());
    let what = format!("mapping {:x}-{:x} ({})", vma.start, vma.end, name.display());
    let (link, file) = match open_link(&link_path) {
        // The privileged alone are led there: then the name must do.
        Err(e) if e.errno() == Some(libc::EPERM) && !vma.deleted => {
            let path = builder.views.reach(builder.views.of_process(pid), &vma.name);
            let file = rustix::fs::open(&path, HANDLE, Mode::empty()).map_err(|e| Error::file(&path, e))?;
            let stat = rustix::fs::fstat(&file).map_err(|e| Error::file(&path, e))?;
            let is_it = (stat.st_dev, stat.st_ino) == (vma.dev, vma.ino)
                || stat.st_ino == vma.ino
                    && silent::as_mapped(&file).is_ok_and(|mapped| mapped == (vma.dev, vma.ino));
            if !is_it {
                let why = "another file has its name now, and only the privileged can open what it was";
                builder.refuse(what, why, AS_PRIVILEGED);
                return Ok(None);
            }
            (PathBuf::from(OsStr::from_bytes(&vma.name)), file)
        }
        opened => opened?,
    };
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::file(&link_path, e))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let device = kind == FileType::CharacterDevice;
    let memory_device = device && rustix::fs::major(stat.st_rdev) == 1;
    if kind != FileType::RegularFile && !memory_device {
        builder.refuse(what, "it maps a device, whose state cannot be captured", "");
        return Ok(None);
    }
    let usage = if device { Usage::Path } else { usage };
    let Some(path) = paths::path_file(builder, link.as_os_str().as_bytes(), &file, usage, &what)? else {
        return Ok(None);
    };
    if let Some(range) = written
        && !device
        && !builder.image.paths[path as usize].deleted
        && !builder.image.paths[path as usize].made_anew
    {
        let row = &builder.image.paths[path as usize];
        let place = builder.views.reach(row.namespace, &row.path.0);
        let is_noticed = builder.noticed.is(&place, (stat.st_dev, stat.st_ino));
        let Some(source) = Source::of(builder, &file, is_noticed, &what)? else { return Ok(None) };
        save_range(builder, path, source, range, what);
    }
    Ok(Some(Mapped { path, is_device: device }))
}

const HANDLE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// What a link of `/proc/PID/map_files` tells, and a handle to where it leads.
fn open_link(link: &str) -> Result<(PathBuf, OwnedFd), Error> {
    let name = std::fs::read_link(link).map_err(|e| Error::file(link, e))?;
    Ok((name, rustix::fs::open(link, HANDLE, Mode::empty()).map_err(|e| Error::file(link, e))?))
}

fn is_regular(file: &PathFile) -> bool {
    FileType::from_raw_mode(file.mode) == FileType::RegularFile
}

/// Adds a range to what is saved of a file; each byte once.
fn save_range(builder: &mut Builder, path: u32, source: Source, range: Range, what: String) {
    let row = &mut builder.image.paths[path as usize];
    let end = range.end().min(row.size.next_multiple_of(PAGE));
    if range.start >= end {
        return;
    }
    row.mapped_ranges.push(Range { start: range.start, len: end - range.start });
    row.mapped_ranges = Range::joined(std::mem::take(&mut row.mapped_ranges));
    row.digest = None; // it leaves these ranges out
    let ranges = row.mapped_ranges.clone();
    let owner = Owner::File(path);
    match builder.contents.iter_mut().find(|c| c.owner == owner) {
        Some(content) => content.ranges = Some(ranges),
        None => {
            builder.contents.push(Content { owner, source, ranges: Some(ranges), what });
        }
    }
}
