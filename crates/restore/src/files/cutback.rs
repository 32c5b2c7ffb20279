//! Cutting files that grew back to their size at the checkpoint; the very last step of a restore.

use super::writers::{Writer, writers};
use super::{KeepTail, OpenFiles};
use crate::{Error, Result};
use rustix::fs::SeekFrom;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};
use stillpoint_image::{FileKind, Image, OpenFile, Owner, PathFile, Range};
use stillpoint_linux::{Error as Kernel, memfd};

use super::Contents;

/// A file to be cut back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Which.
    pub path: PathBuf,
    /// How we come to it.
    pub way: PathBuf,
    /// Its size at the checkpoint.
    pub size: u64,
    /// Its modification time at the checkpoint, nanoseconds since 1970.
    pub mtime_ns: i64,
}

/// What is written back into a file that the program shares with others through a mapping.
#[derive(Debug)]
pub(super) struct WriteBack {
    path: PathBuf,
    row: u32,
    size: u64,
    ranges: Vec<Range>,
}

/// `called`: with paths as they are in their mount namespaces, `image`: with those that lead there.
pub(super) fn cuts(called: &Image, image: &Image, grown: &[u32]) -> Vec<Cut> {
    let files = grown.iter().filter_map(|row| {
        let row = *row as usize;
        Some((called.paths.get(row)?.path.as_path().to_owned(), image.paths.get(row)?))
    });
    let cut = |(path, f): (PathBuf, &PathFile)| {
        let way = f.path.as_path().to_owned();
        Cut { path, way, size: f.size, mtime_ns: f.mtime_ns }
    };
    files.map(cut).collect()
}

/// Of files that grew, those to which somebody else writes, and who; and those to be cut.
pub(super) fn shared(image: &Image, grown: &[u32], own_output: bool) -> (Vec<(u32, Writer)>, Vec<u32>) {
    let inode = |row: u32| {
        let stat = rustix::fs::stat(image.paths.get(row as usize)?.path.as_path()).ok()?;
        Some((stat.st_dev, stat.st_ino))
    };
    let inodes: HashSet<_> = grown.iter().filter_map(|row| inode(*row)).collect();
    let writers = writers(&inodes, own_output, &[]);
    let writer = |row: u32| inode(row).and_then(|inode| writers.get(&inode)).cloned();
    let shared: Vec<_> = grown.iter().filter_map(|row| Some((*row, writer(*row)?))).collect();
    let cut = grown.iter().copied().filter(|row| shared.iter().all(|(other, _)| other != row)).collect();
    (shared, cut)
}

/// Descriptions that stood at the end of one of these files: they go on there, behind what others have written.
pub(super) fn moved_on(image: &Image, shared: &[(u32, Writer)]) -> Vec<usize> {
    let stood_at_end = |file: &OpenFile| {
        let FileKind::Path(row) = file.kind else { return false };
        let is_path = file.flags & libc::O_PATH as u32 != 0;
        let size = image.paths.get(row as usize).map(|file| file.size);
        !is_path && shared.iter().any(|(other, _)| *other == row) && Some(file.position) == size
    };
    let rows = image.files.iter().enumerate();
    rows.filter(|(_, file)| stood_at_end(file)).map(|(row, _)| row).collect()
}

/// What is said of a file that is not cut.
pub(super) fn told(called: &Image, image: &Image, row: u32, writer: &Writer) -> Option<String> {
    let (called, file) = (called.paths.get(row as usize)?, image.paths.get(row as usize)?);
    let now = rustix::fs::stat(file.path.as_path()).ok()?.st_size;
    Some(format!(
        "{}: {now} bytes, {} at the checkpoint: not cut back, as {writer}; what the program wrote since may stand there twice",
        called.path, file.size
    ))
}

pub(super) fn write_backs(image: &Image) -> Vec<WriteBack> {
    let rows = image.paths.iter().enumerate().filter(|(_, f)| !f.deleted && !f.mapped_ranges.is_empty());
    let one = |(row, f): (usize, &stillpoint_image::PathFile)| WriteBack {
        path: f.path.as_path().to_owned(),
        row: row as u32,
        size: f.size,
        ranges: f.mapped_ranges.clone(),
    };
    rows.map(one).collect()
}

impl OpenFiles {
    /// Writes back what shared mappings of files, and shared memory that outlived the program, held at the checkpoint.
    /// To be called at the end, before [`OpenFiles::cut_back`] and while nothing runs.
    pub fn write_back(&self, image: &Image, contents: &dyn Contents) -> Result<()> {
        self.set_segments_back(image, contents)?;
        let (mut buffer, mut there) = (vec![0u8; 1 << 20], vec![0u8; 1 << 20]);
        for back in &self.write_backs {
            let failed = |e| Kernel::file(&back.path, e);
            let file = OpenOptions::new().write(true).open(&back.path).map_err(failed)?;
            // What is as it was is not written: nobody is to see another time.
            let now = OpenOptions::new().read(true).custom_flags(libc::O_NOATIME).open(&back.path).ok();
            for range in &back.ranges {
                let (mut at, end) = (range.start, range.end().min(back.size));
                while at < end {
                    let n = buffer.len().min((end - at) as usize);
                    contents.read(Owner::File(back.row), at, &mut buffer[..n])?;
                    let is_same = now.as_ref().is_some_and(|now| {
                        now.read_exact_at(&mut there[..n], at).is_ok() && there[..n] == buffer[..n]
                    });
                    if !is_same {
                        memfd::write_at(&file, at, &buffer[..n], 0)?;
                    }
                    at += n as u64;
                }
            }
        }
        Ok(())
    }

    /// Cuts files that only grew back to their size at the checkpoint. `keep` must have made the tail durable when
    /// it returns. From here on the restore counts as done: nothing that was created is removed any more.
    ///
    /// 1. The tail, from the recorded size to the end, goes to `keep`.
    /// 2. The size is looked at again: if the file grew meanwhile, somebody else writes to it whom we have not seen, and we stop.
    /// 3. The file is truncated. (A writer that appends between 2 and 3 loses what it wrote; nothing can be done
    ///    about that from user space.)
    ///
    /// If we are killed in between, the next restore finds the file grown and starts over.
    pub fn cut_back(&mut self, keep: &mut KeepTail<'_>) -> Result<()> {
        for cut in std::mem::take(&mut self.cuts) {
            self.notes.extend(cut_one(&cut, keep)?);
        }
        for &row in &self.shared {
            let Some(file) = self.sources.get(row).and_then(Option::as_ref) else { continue };
            rustix::fs::seek(file, SeekFrom::End(0))
                .map_err(|e| Kernel::call("seek to the end of a file", e))?;
        }
        self.created.keep();
        self.keep_segments();
        self.queues.keep();
        Ok(())
    }
}

/// Cuts a file back, and tells so if it was longer.
fn cut_one(cut: &Cut, keep: &mut KeepTail<'_>) -> Result<Option<String>> {
    let named = |e| Kernel::file(&cut.path, e);
    let file = OpenOptions::new().read(true).write(true).open(&cut.way).map_err(named)?;
    let before = keep_behind(&file, &cut.path, cut.size, keep)?;
    let has_time = shorten(&file, &cut.path, (before, cut.size), cut.mtime_ns)?;
    file.sync_all().map_err(named)?;
    let (path, size) = (cut.path.display(), cut.size);
    let time = if has_time { "" } else { "; its modification time is now, as it belongs to somebody else" };
    Ok((before > size).then(|| {
        format!("{path}: cut back from {before} bytes to {size}, as at the checkpoint; what was behind is kept (stillpoint show){time}")
    }))
}

/// Gives what is behind an offset of a file to `keep`, if there is anything; its size.
///
/// # Errors
/// [`Error::Refused`] if the file is shorter; that it cannot be read, or kept. It must not be cut then.
pub fn keep_behind(file: &File, path: &Path, size: u64, keep: &mut KeepTail<'_>) -> Result<u64> {
    let before = file.metadata().map_err(|e| Kernel::file(path, e))?.len();
    if before < size {
        let line = format!("{}: is {} bytes shorter than at the checkpoint", path.display(), size - before);
        return Err(Error::Refused(vec![line]));
    }
    if before > size {
        keep(path, size, &mut Tail { file, at: size, end: before })?;
    }
    Ok(before)
}

/// Cuts a file of one size back to another one, and gives it a modification time, nanoseconds since 1970; whether it has that now. Who
/// may write to a file, and does not own it, may not say when it was modified.
///
/// # Errors
/// [`Error::Refused`] if it has another size by now; that it cannot be cut.
pub fn shorten(file: &File, path: &Path, (before, size): (u64, u64), mtime_ns: i64) -> Result<bool> {
    let named = |e| Kernel::file(path, e);
    if file.metadata().map_err(named)?.len() != before {
        return Err(Error::Refused(vec![format!("{}: another program writes to it", path.display())]));
    }
    if before > size {
        file.set_len(size).map_err(named)?;
    }
    // As the program left it, and so that whoever compares need not read the file to see that it is unchanged.
    let mtime = UNIX_EPOCH + Duration::from_nanos(mtime_ns.max(0) as u64);
    Ok(file.set_modified(mtime).is_ok())
}

struct Tail<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for Tail<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer.len().min((self.end - self.at) as usize);
        let n = self.file.read_at(&mut buffer[..most], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}
