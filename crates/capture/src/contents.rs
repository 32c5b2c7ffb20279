//! Contents of files and memory objects: saved as pages, or told by a digest.

use crate::{Builder, Content, Error, Result};
use rustix::fs::{Mode, OFlags};
use std::os::fd::OwnedFd;
use stillpoint_image::{Bytes, Digest, Image, PathFile, Usage};
use stillpoint_linux::digest;
use stillpoint_store::{PutError, Writer, Zeros};

/// Saves the contents of a file or object as pages; `done` hears the bytes as they are read.
pub fn save(content: &Content, writer: &mut Writer, done: &mut dyn FnMut(u64)) -> Result<()> {
    for range in &content.ranges {
        let mut fill = |offset: u64, buffer: &mut [u8]| {
            done(buffer.len() as u64);
            digest::read_at(&content.source, offset, buffer)
        };
        writer.put(content.owner, *range, Zeros::Omit, &mut fill).map_err(|e| match e {
            PutError::Fill(e) => Error::Failed(format!("{}: {e}", content.what)),
            PutError::Store(e) => Error::Store(e),
        })?;
    }
    Ok(())
}

/// Takes digests of the files of one usage that a restore will check. Those the program writes must be taken while
/// it stands still; all others change only by others' hands, and are taken when it runs again. A file that did
/// change since it was described gets none. What `known` (an earlier checkpoint) told of an unchanged file is kept.
pub fn take_digests(builder: &mut Builder, usage: Usage, known: Option<&Image>) {
    let wanted: Vec<u32> =
        builder.wants_digest().filter(|(_, p)| p.usage == usage).map(|(row, _)| row).collect();
    for row in wanted {
        let path = &mut builder.image.paths[row as usize];
        path.digest = earlier(known, path).or_else(|| take(path));
    }
}

fn earlier(known: Option<&Image>, path: &PathFile) -> Option<Digest> {
    // Through a shared mapping a file can change without a new time.
    if !path.mapped_ranges.is_empty() {
        return None;
    }
    let key = |p: &PathFile| (p.dev, p.ino, p.size, p.mtime_ns, p.ctime_ns);
    known?.paths.iter().find(|p| p.path == path.path && key(p) == key(path))?.digest.clone()
}

fn take(path: &PathFile) -> Option<Digest> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file: OwnedFd = rustix::fs::open(path.path.as_path(), flags, Mode::empty()).ok()?;
    if !is_same(&file, path) {
        return None;
    }
    let skip: Vec<(u64, u64)> = path.mapped_ranges.iter().map(|r| (r.start, r.len)).collect();
    let (hash, sampled) = digest::digest(&file, path.size, &skip).ok()?;
    is_same(&file, path).then(|| Digest { blake3: Bytes(hash.to_vec()), sampled })
}

/// Whether the file is still as it was described.
fn is_same(file: &OwnedFd, path: &PathFile) -> bool {
    rustix::fs::fstat(file).is_ok_and(|s| {
        let mtime = s.st_mtime.saturating_mul(1_000_000_000).saturating_add(s.st_mtime_nsec as i64);
        (s.st_dev, s.st_ino, s.st_size as u64, mtime) == (path.dev, path.ino, path.size, path.mtime_ns)
    })
}
