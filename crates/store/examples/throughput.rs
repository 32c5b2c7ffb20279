//! How fast a checkpoint becomes durable, against a raw direct write of the same bytes on the same medium.
//!
//! `cargo run --release -p stillpoint-store --example throughput -- FOLDER [MEBIBYTES] [ROUNDS]`
//!
//! Both sides are measured in turn in one run, and the ratio of the medians is what counts.

use rustix::fs::{FallocateFlags, OFlags};
use std::convert::Infallible;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use stillpoint_image::{Image, Owner, PAGE, Range};
use stillpoint_store::{Store, Zeros};

const MIB: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: throughput FOLDER [MEBIBYTES] [ROUNDS]")?;
    let size = arguments.next().map_or(Ok(1024), |n| n.parse::<usize>())? * MIB;
    let rounds = arguments.next().map_or(Ok(5), |n| n.parse::<usize>())?;
    let folder = Path::new(&folder).join("throughput");
    std::fs::create_dir_all(&folder)?;

    let memory = noise(size);
    let mut times = [Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new()];
    let names =
        ["raw direct write", "checkpoint", "checkpoint, every 2nd page zero", "verify", "read, one thread"];
    for _ in 0..rounds {
        times[0].push(raw(&folder.join("raw"), &memory)?);
        let store = Store::open(&folder.join("store"))?;
        times[1].push(checkpoint(&store, &memory, false)?);
        times[3].push(verify(&store)?);
        times[4].push(read(&store)?);
        store.remove_job("full")?;
        times[2].push(checkpoint(&store, &memory, true)?);
        store.remove_job("full")?;
    }
    std::fs::remove_dir_all(&folder)?;
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let medians: Vec<f64> = times.iter_mut().map(median).collect();
    println!("{} MiB, {rounds} rounds, medians", size / MIB);
    for (name, seconds) in names.iter().zip(&medians) {
        let rate = size as f64 / seconds / 1e9;
        println!("{name:32} {seconds:7.3} s  {rate:6.2} GB/s  x{:.2}", seconds / medians[0]);
    }
    Ok(())
}

/// Bytes without a zero page, quickly made.
fn noise(size: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut memory = vec![0; size];
    for word in memory.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    memory
}

/// The other side: the same memory through aligned buffers to a preallocated file, four writes in flight.
fn raw(path: &Path, memory: &[u8]) -> Result<f64, Box<dyn Error>> {
    let _ = std::fs::remove_file(path);
    let start = Instant::now();
    let direct = OFlags::DIRECT.bits() as i32;
    let open = |flags| File::options().write(true).create(true).truncate(true).custom_flags(flags).open(path);
    let file = open(direct).or_else(|_| open(0))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, memory.len() as u64)?;
    let next = AtomicU64::new(0);
    let work = || -> std::io::Result<()> {
        let mut buffer = vec![0; MIB + PAGE as usize];
        let aligned = buffer.as_ptr().align_offset(PAGE as usize);
        let buffer = &mut buffer[aligned..aligned + MIB];
        loop {
            let offset = next.fetch_add(MIB as u64, Ordering::Relaxed);
            let Some(piece) = memory.get(offset as usize..offset as usize + MIB) else { return Ok(()) };
            buffer.copy_from_slice(piece);
            file.write_all_at(buffer, offset)?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| std::io::Error::other("panicked"))?)
    })?;
    file.sync_data()?;
    let seconds = start.elapsed().as_secs_f64();
    std::fs::remove_file(path)?;
    Ok(seconds)
}

fn checkpoint(store: &Store, memory: &[u8], holes: bool) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    let mut writer = store.begin("full")?;
    let range = Range { start: 0, len: memory.len() as u64 };
    writer.put(Owner::Space(0), range, Zeros::Omit, |address, buffer| {
        buffer.copy_from_slice(&memory[address as usize..address as usize + buffer.len()]);
        if holes {
            buffer.chunks_exact_mut(PAGE as usize).step_by(2).for_each(|page| page.fill(0));
        }
        Ok::<_, Infallible>(())
    })?;
    let image = Image { spaces: vec![Default::default()], ..Image::default() };
    writer.commit(image)?;
    Ok(start.elapsed().as_secs_f64())
}

fn verify(store: &Store) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    let report = store.verify("full", None)?;
    assert!(report.problems.is_empty());
    Ok(start.elapsed().as_secs_f64())
}

fn read(store: &Store) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    let checkpoint = store.load("full", None)?;
    let mut buffer = vec![0; MIB];
    for extent in &checkpoint.pages.extents {
        checkpoint.reader.read(extent, &mut buffer[..extent.len() as usize])?;
    }
    Ok(start.elapsed().as_secs_f64())
}
