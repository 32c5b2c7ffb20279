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

/// Writes `bytes` (rounded up to whole pages) to a new file, syncs it, removes it; gives the time to the sync's end.
pub fn write(path: &Path, bytes: u64) -> Result<Duration> {
    let bytes = bytes.next_multiple_of(ALIGNMENT as u64);
    let _ = std::fs::remove_file(path);
    // Not zeros: some disks know those.
    let buffer: Vec<u8> =
        (0..BLOCK + ALIGNMENT).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let skip = buffer.as_ptr().align_offset(ALIGNMENT);
    let block = &buffer[skip..skip + BLOCK];
    let began = Instant::now();
    let file = open(path)?;
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..IN_FLIGHT)
            .map(|_| {
                scope.spawn(|| -> std::io::Result<()> {
                    loop {
                        let at = next.fetch_add(BLOCK as u64, Relaxed);
                        if at >= bytes {
                            return Ok(());
                        }
                        let length = (bytes - at).min(BLOCK as u64) as usize;
                        file.write_all_at(&block[..length], at)?;
                    }
                })
            })
            .collect();
        writers
            .into_iter()
            .try_for_each(|w| w.join().unwrap_or_else(|_| Err(std::io::Error::other("a writer panicked"))))
    })
    .context("raw write")?;
    file.sync_all()?;
    let took = began.elapsed();
    std::fs::remove_file(path)?;
    Ok(took)
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
