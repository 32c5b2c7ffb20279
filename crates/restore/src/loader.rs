//! Filling memory: the eager loader reads everything before the program runs.

use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use stillpoint_image::Extent;
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::memory::Memory;
use stillpoint_store::Reader;

/// Extents that one loader takes at a time.
const BATCH: usize = 16;

/// Writes extents of an address space into a process, with a loader on every processor. `done` hears the
/// number of bytes of each batch.
pub fn load(reader: &Reader, extents: &[Extent], memory: &Memory, done: &(dyn Fn(u64) + Sync)) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let work = || -> Result<()> {
        let mut buffer = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let from = next.fetch_add(BATCH, Ordering::Relaxed);
            let Some(batch) = extents.get(from..extents.len().min(from + BATCH)).filter(|b| !b.is_empty())
            else {
                return Ok(());
            };
            for extent in batch {
                if let Err(e) = place(reader, extent, memory, &mut buffer) {
                    failed.store(true, Ordering::Relaxed);
                    return Err(e);
                }
            }
            done(batch.iter().map(Extent::len).sum());
        }
        Ok(())
    };
    let loaders = std::thread::available_parallelism().map_or(1, usize::from).min(extents.len() / BATCH + 1);
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

fn place(reader: &Reader, extent: &Extent, memory: &Memory, buffer: &mut Vec<u8>) -> Result<()> {
    buffer.resize(extent.len() as usize, 0);
    reader.read(extent, buffer)?;
    memory.write(RemoteAddr(extent.address), buffer)?;
    Ok(())
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
