//! Storing the contents of files and objects, and digests of the files a restore will check.

use super::paths;
use crate::{Builder, Content, Error, Result};
use rustix::fs::{Mode, OFlags};
use stillpoint_image::{Bytes, Digest, Owner, PathFile, Usage};
use stillpoint_linux::digest;
use stillpoint_store::{PutError, Writer, Zeros};

/// Stores contents; `progress` hears how many bytes were read.
pub fn copy_content(content: &Content, writer: &mut Writer, progress: &mut dyn FnMut(u64)) -> Result<()> {
    // The file that is there at a restore may hold anything where pages of a shared mapping are to be written back:
    // zeros matter. Objects and deleted files are made anew.
    let zeros = if matches!(content.owner, Owner::File(_)) { Zeros::Record } else { Zeros::Omit };
    let mut fill = |offset: u64, buffer: &mut [u8]| {
        progress(buffer.len() as u64);
        digest::read_at(&content.source, offset, buffer)
    };
    for range in &content.ranges {
        writer.put(content.owner, *range, zeros, &mut fill).map_err(|e| match e {
            PutError::Fill(e) => Error::Failed(format!("{}: {e}", content.what)),
            PutError::Store(e) => Error::Failed(e.to_string()),
        })?;
    }
    Ok(())
}

/// Takes the digests of all files whose contents a restore will check.
pub fn take_digests(builder: &mut Builder) -> Result<()> {
    take_digests_of(builder, Usage::Write)?;
    take_digests_of(builder, Usage::Read)
}

/// Takes the digests of the files with this usage. It may be done after the program was let go on: a file that is no
/// longer as it was at the cut gets none. (For files that are read or mapped this is the rule; for those that are
/// written, it is only worth trying while the program stands still.)
pub fn take_digests_of(builder: &mut Builder, usage: Usage) -> Result<()> {
    let rows: Vec<u32> = builder
        .wants_digest()
        .filter(|(_, p)| p.usage == usage && p.digest.is_none())
        .map(|(row, _)| row)
        .collect();
    for row in rows {
        let digest = digest_of(&builder.image.paths[row as usize]);
        builder.image.paths[row as usize].digest = digest;
    }
    Ok(())
}

/// A file that cannot be read (write-only for us) has no digest; a restore then goes by its times.
fn digest_of(row: &PathFile) -> Option<Digest> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(row.path.as_path(), flags, Mode::empty()).ok()?;
    let same = || {
        let now = paths::describe(&row.path.0, &rustix::fs::fstat(&file).ok()?, row.usage);
        let identity = |p: &PathFile| (p.dev, p.ino, p.size, p.mtime_ns, p.ctime_ns);
        (identity(&now) == identity(row)).then_some(())
    };
    same()?;
    let skip: Vec<(u64, u64)> = row.mapped_ranges.iter().map(|r| (r.start, r.len)).collect();
    let (hash, sampled) = digest::digest(&file, row.size, &skip).ok()?;
    same()?;
    Some(Digest { blake3: Bytes(hash.to_vec()), sampled })
}
