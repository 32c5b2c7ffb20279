//! Storing the contents of files and objects, and digests of the files a restore will check.

use super::{memory, paths};
use crate::builder::Source;
use crate::{Builder, Content, Error, Result};
use rustix::fs::OFlags;
use std::time::SystemTime;
use stillpoint_image::{Bytes, Digest, Owner, PathFile, Range, Usage};
use stillpoint_linux::{digest, silent};
use stillpoint_store::{PutError, Writer, Zeros};

/// Stores contents, and tells which ranges; `progress` hears how many bytes were read.
pub fn copy_content(
    content: &Content,
    writer: &mut Writer,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<Range>> {
    // The file that is there at a restore may hold anything where pages of a shared mapping are to be written back:
    // zeros matter. Objects and deleted files are made anew.
    let zeros = if matches!(content.owner, Owner::File(_)) { Zeros::Record } else { Zeros::Omit };
    if let (Source::Mapped(spans), None) = (&content.source, &content.ranges) {
        memory::check_empty(spans, &content.what)?;
    }
    let source = content.source.open()?;
    let mut fill = |offset: u64, buffer: &mut [u8]| {
        progress(buffer.len() as u64);
        source.read_at(offset, buffer)
    };
    let ranges = content.to_be_read(&source)?;
    for range in &ranges {
        writer.put(content.owner, *range, zeros, &mut fill).map_err(|e| match e {
            PutError::Fill(e) => Error::Failed(format!("{}: {e}", content.what)),
            PutError::Store(e) => Error::Store(e),
        })?;
    }
    Ok(ranges)
}

/// When digests are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The program runs. A file that is no longer as it was described gets no digest; nor does one that it writes and
    /// has just written.
    Running,
    /// The program stands still, and should not for long: only so many bytes in all, of the smallest files first.
    Still(u64),
}

/// Times of files may be as coarse as this (a tick of the kernel's clock), nanoseconds: a younger change may be
/// followed by another one with the same time.
const TICK_NS: i64 = 20_000_000;

/// Takes the digests of the files with this usage that have none.
pub fn take_digests_of(builder: &mut Builder, usage: Usage, moment: Moment) {
    let wanted = builder.wants_digest().filter(|(_, p)| p.usage == usage && p.digest.is_none());
    let mut rows: Vec<(u64, u32)> =
        wanted.filter(|(_, p)| is_time_for(p, moment)).map(|(row, p)| (p.size, row)).collect();
    rows.sort_unstable();
    let mut left = match moment {
        Moment::Running => u64::MAX,
        Moment::Still(most) => most,
    };
    for (size, row) in rows {
        if size > left {
            break;
        }
        left -= size;
        let digest = digest_of(builder, &builder.image.paths[row as usize]);
        builder.image.paths[row as usize].digest = digest;
    }
}

fn is_time_for(file: &PathFile, moment: Moment) -> bool {
    match moment {
        Moment::Running => {
            let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as i64;
            file.usage == Usage::Read
                || file.is_wholly_mapped()
                || now - file.ctime_ns.max(file.mtime_ns) > TICK_NS
        }
        Moment::Still(_) => true,
    }
}

/// A file that cannot be read (write-only for us) has no digest, nor has one that the program watches (see `noticed`); a restore then
/// goes by their times. That of one that is mapped
/// whole leaves all contents out, so writes through the mapping, which change its times, are no matter.
fn digest_of(builder: &Builder, row: &PathFile) -> Option<Digest> {
    let path = builder.views.reach(row.namespace, &row.path.0);
    let file = silent::open(path, OFlags::NONBLOCK | OFlags::NOCTTY).ok()?;
    let same = || {
        let now = paths::describe(&row.path.0, &rustix::fs::fstat(&file).ok()?, row.usage);
        let times = |p: &PathFile| (!row.is_wholly_mapped()).then_some((p.mtime_ns, p.ctime_ns));
        let identity = |p: &PathFile| (p.dev, p.ino, p.size, times(p));
        (identity(&now) == identity(row)).then_some(())
    };
    same()?;
    let skip: Vec<(u64, u64)> = row.mapped_ranges.iter().map(|r| (r.start, r.len)).collect();
    let (hash, sampled) = digest::digest(&file, row.size, &skip).ok()?;
    same()?;
    Some(Digest { blake3: Bytes(hash.to_vec()), sampled })
}
