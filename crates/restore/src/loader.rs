//! Filling memory: the eager loader reads everything before the program runs.

use crate::pace::Pace;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use stillpoint_image::{Extent, PAGE, Place};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::host;
use stillpoint_linux::memory::Memory;
use stillpoint_store::Reader;

/// Fewer spans than this are not worth another thread.
const FEW: usize = 4;

/// Most that is read in one go where blocks are smaller, bytes.
const SPAN: u64 = 1 << 20;
/// What is not needed between two blocks is read with them up to this size, bytes.
const GAP: u64 = 32 << 10;

/// Writes extents of an address space into a process, with a loader on every processor. `done` hears the number of bytes of
/// each span.
///
/// In the order in which they are stored: after many incremental checkpoints, neighbours in memory lie far from each other
/// there, in blocks of a page or two. Each block is read once, and many with one call.
pub(crate) fn load(
    reader: &Reader,
    extents: &[Extent],
    memory: &Memory,
    pace: &Pace,
    done: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let mut extents: Vec<&Extent> = extents.iter().collect();
    extents.sort_by_key(|e| (block(e), e.address));
    let spans = spans(&extents);
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let work = || -> Result<()> {
        let mut buffer = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let Some(span) = spans.get(next.fetch_add(1, Ordering::Relaxed)) else { return Ok(()) };
            pace.travel(stored(span));
            if let Err(e) = place(reader, span, memory, &mut buffer) {
                failed.store(true, Ordering::Relaxed);
                return Err(e);
            }
            done(span.iter().map(|e| e.len()).sum());
        }
        Ok(())
    };
    let loaders = host::processors().min(spans.len() / FEW + 1);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..loaders).map(|_| scope.spawn(work)).collect();
        let mut result = work();
        for other in others {
            let theirs = other.join().unwrap_or_else(|_| Err(Error::Failed("a loader failed".into())));
            result = result.and(theirs);
        }
        result
    })
}

/// Segment, start and end of the block of an extent, if it is stored.
pub fn block(extent: &Extent) -> Option<(u64, u64, u64)> {
    match extent.place {
        Place::Stored { segment, offset, length, .. } => Some((segment, offset, offset + u64::from(length))),
        Place::Zero => None,
    }
}

/// Extents, in the order of their blocks, in spans that are read in one go; zeros are one each.
fn spans<'a>(mut rest: &'a [&'a Extent]) -> Vec<&'a [&'a Extent]> {
    let mut spans = Vec::new();
    while let Some(first) = rest.first() {
        let mut end = block(first);
        let goes_on = |extent: &&&Extent| {
            let (Some(first), Some(last), Some(next)) = (block(first), end, block(extent)) else {
                return false;
            };
            let near = last.0 == next.0 && next.1 <= last.2 + GAP;
            end = Some(next);
            last == next || (near && next.2 - first.1 <= SPAN)
        };
        let (span, later) = rest.split_at(1 + rest[1..].iter().take_while(goes_on).count());
        spans.push(span);
        rest = later;
    }
    spans
}

/// Bytes that are read for a span.
fn stored(span: &[&Extent]) -> u64 {
    let ends = span.first().zip(span.last()).and_then(|(first, last)| block(first).zip(block(last)));
    ends.map_or(0, |((_, start, _), (_, _, end))| end - start)
}

/// Puts the extents of a span into their places.
fn place(reader: &Reader, extents: &[&Extent], memory: &Memory, buffer: &mut Vec<u8>) -> Result<()> {
    let Some((_, start, _)) = extents.first().and_then(|e| block(e)) else {
        for zeros in extents {
            buffer.clear();
            buffer.resize(zeros.len() as usize, 0);
            memory.write(RemoteAddr(zeros.address), buffer)?;
        }
        return Ok(());
    };
    reader.read_span(extents, buffer)?;
    let part = |extent: &&Extent| {
        let Place::Stored { offset, skip, .. } = extent.place else { return (RemoteAddr(0), &buffer[..0]) };
        let from = (offset - start + u64::from(skip) * PAGE) as usize;
        (RemoteAddr(extent.address), &buffer[from..from + extent.len() as usize])
    };
    Ok(memory.write_many(&extents.iter().map(part).collect::<Vec<_>>())?)
}

/// Reads `buf.len()` bytes at `offset` of an owner whose extents these are; zero where nothing is stored.
pub fn read(reader: &Reader, extents: &[Extent], offset: u64, buf: &mut [u8]) -> Result<()> {
    buf.fill(0);
    let end = offset + buf.len() as u64;
    let first = extents.partition_point(|e| e.end() <= offset);
    let mut block = Vec::new();
    for extent in extents[first..].iter().take_while(|e| e.address < end) {
        block.resize(extent.len() as usize, 0);
        reader.read(extent, &mut block)?;
        let (from, to) = (extent.address.max(offset), extent.end().min(end));
        let piece = &block[(from - extent.address) as usize..(to - extent.address) as usize];
        buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(piece);
    }
    Ok(())
}
