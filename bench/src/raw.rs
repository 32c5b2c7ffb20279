//! The same bytes, written as fast as this disk takes them: direct, in large blocks, several in flight, and durable.

use anyhow::{Context, Result};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const BLOCK: usize = 4 << 20;
const IN_FLIGHT: usize = 4;
const ALIGNMENT: usize = 4096;
/// Largest source, bytes.
const MOST: u64 = 1 << 30;

/// Memory to write from: as cold as a program's, not a block that stays in the processor's cache.
pub struct Source {
    buffer: Vec<u8>,
    skip: usize,
}

impl Source {
    /// Bytes for writes of up to `bytes`; longer ones begin again from the start.
    pub fn new(bytes: u64) -> Self {
        let size = bytes.clamp(BLOCK as u64, MOST).next_multiple_of(BLOCK as u64) as usize;
        let mut x = 1u64;
        let mut buffer = Vec::with_capacity(size + ALIGNMENT);
        while buffer.len() < size + ALIGNMENT {
            x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            buffer.extend(x.to_le_bytes());
        }
        let skip = buffer.as_ptr().align_offset(ALIGNMENT);
        Source { buffer, skip }
    }

    fn block(&self, at: u64, length: usize) -> &[u8] {
        let size = (self.buffer.len() - ALIGNMENT) / BLOCK * BLOCK;
        let from = self.skip + at as usize % size;
        &self.buffer[from..from + length]
    }

    /// Writes `bytes` (rounded up to whole pages) to a new file, syncs it, removes it; gives the time to the sync's end.
    pub fn write(&self, path: &Path, bytes: u64) -> Result<Duration> {
        let bytes = bytes.next_multiple_of(ALIGNMENT as u64);
        let _ = std::fs::remove_file(path);
        let began = Instant::now();
        let file = open(path)?;
        let next = AtomicU64::new(0);
        let write_blocks = || -> std::io::Result<()> {
            loop {
                let at = next.fetch_add(BLOCK as u64, Relaxed);
                if at >= bytes {
                    return Ok(());
                }
                let length = (bytes - at).min(BLOCK as u64) as usize;
                file.write_all_at(self.block(at, length), at)?;
            }
        };
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..IN_FLIGHT).map(|_| scope.spawn(write_blocks)).collect();
            let join = |w: std::thread::ScopedJoinHandle<'_, _>| {
                w.join().unwrap_or_else(|_| Err(std::io::Error::other("a writer panicked")))
            };
            writers.into_iter().try_for_each(join)
        })
        .context("raw write")?;
        file.sync_all()?;
        let took = began.elapsed();
        std::fs::remove_file(path)?;
        Ok(took)
    }
}

/// Direct where the file system takes it.
fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    let direct = options.clone().custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(path);
    direct
        .or_else(|_| options.create_new(false).create(true).open(path))
        .with_context(|| path.display().to_string())
}
