//! Restart time and size of the store against the number of incremental checkpoints behind it.

use crate::bench::Bench;
use crate::heartbeat::{Heartbeat, Load};
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::Series;
use crate::tools::{Job, Request};
use anyhow::{Context, Result};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

const ABOUT: &str = "\
A job of 256 MiB has a number of incremental checkpoints, before each of which its program writes 1 % of its pages, anywhere;
the newest five are kept. Then it is killed and restored from the newest, several times. The time is from the restore command's
start to the program's first answer; at the end the program checks all of its memory. The store is all that it takes on disk.";

const MEBIBYTES: u64 = 256;
const TOUCHED: u64 = MEBIBYTES * 256 / 100;
const LENGTHS: [u64; 4] = [1, 10, 100, 1000];
const KEPT: u64 = 5;
const JOB: &str = "chain";

/// Measures chains of all lengths.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("chain", ABOUT);
    if !bench.stillpoint.is_incremental() {
        section.note("Skipped: this command has no incremental checkpoints");
        return Ok(section);
    }
    let columns = ["incremental checkpoints", "restart, ms", "least", "most", "store, MiB", "runs"];
    let mut table = Table::new("chain", "Medians.", &columns);
    let mut chart = Chart::new("Restart after a number of incremental checkpoints", "ms", Scale::Linear);
    let mut medians = Vec::new();
    for length in LENGTHS {
        let (times, store) = measure(bench, length).with_context(|| format!("{length} checkpoints"))?;
        let store = store as f64 / 1048576.0;
        let numbers = [times.median(), times.least(), times.most(), store].map(number).to_vec();
        table.row([vec![length.to_string()], numbers, vec![times.count().to_string()]].concat());
        chart.bar(&length.to_string(), "restart", times.median());
        medians.push((times.median(), store));
    }
    if let [(first, _), .., (last, size)] = medians[..] {
        let after = format!("after {} incremental checkpoints", LENGTHS[LENGTHS.len() - 1]);
        section.promises.push(Promise {
            what: format!("restart {after}: as fast as after 1 (1.25 ×, for what the machine does)"),
            reached: Figure(last, "ms"),
            peer: Some(("after 1".into(), Figure(first, "ms"))),
            limit: Limit::TimesPeer(1.25),
        });
        // What the five together need: all pages once, and what each of the others has of its own.
        let live = (MEBIBYTES as f64) * (1.0 + (KEPT - 1) as f64 / 100.0);
        section.promises.push(Promise {
            what: format!("store {after}, {KEPT} kept: at most twice what they need"),
            reached: Figure(size, "MiB"),
            peer: Some(("needed".into(), Figure(live, "MiB"))),
            limit: Limit::TimesPeer(2.0),
        });
    }
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(section)
}

/// Times of restarts from a chain of that many incremental checkpoints.
fn measure(bench: &Bench, length: u64) -> Result<(Series, u64)> {
    let place = bench.plan.place("chain")?;
    let (store, directory) = (place.join("store"), bench.plan.place("chain/program")?);
    let command_line = Load::new(MEBIBYTES, 0).command_line(&bench.programs, &directory);
    let job = bench.stillpoint.run(&store, JOB, &directory, &command_line)?;
    let program = Heartbeat::adopt(job.pid, &directory)?;
    let request = |mode| Request { mode: Some(mode), ..Request::default() };
    let mut newest = bench.stillpoint.checkpoint(JOB, &store, request("--full"))?;
    for _ in 0..length {
        program.touch(TOUCHED)?;
        newest = bench.stillpoint.checkpoint(JOB, &store, request("--incremental"))?.must_be_incremental()?;
        bench.stillpoint.keep(&store, JOB, KEPT)?;
    }
    let size = on_disk(&store)?;
    let checkpoint = format!("{JOB}@{}", newest.id().context("no id")?);
    drop(program); // kills it
    job.wait()?;
    let mut times = Series::default();
    for run in 0..=bench.plan.runs {
        let (took, program, job) = restart(bench, &store, &checkpoint, &directory)?;
        if run > 0 {
            times.add_time(took);
        }
        if run == bench.plan.runs {
            program.finish()?;
        } else {
            drop(program);
        }
        job.wait()?;
    }
    Ok((times, size))
}

/// Bytes that a folder and all in it take on disk.
fn on_disk(path: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        bytes += meta.blocks() * 512 + if meta.is_dir() { on_disk(&entry.path())? } else { 0 };
    }
    Ok(bytes)
}

/// Time until the restored program answers.
fn restart(
    bench: &Bench,
    store: &Path,
    checkpoint: &str,
    directory: &Path,
) -> Result<(Duration, Heartbeat, Job)> {
    let began = Instant::now();
    let job = bench.stillpoint.restore(store, checkpoint)?;
    let program = Heartbeat::adopt(job.pid, directory)?;
    program.longest_gap()?;
    Ok((began.elapsed(), program, job))
}
