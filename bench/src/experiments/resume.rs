//! Time from a power cut to running again: from the command on.

use crate::bench::Bench;
use crate::heartbeat::{Heartbeat, Load};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use crate::tools::Request;
use anyhow::{Context, Result};
use std::fs;
use std::time::Instant;

const ABOUT: &str = "\
A job of 1 GiB is checkpointed, and killed together with its supervisor and all that is ours, which stands for a power cut. `runs`
is the time of `stillpoint resume JOB`, which returns when the program runs; `answers` until the program has answered besides. Once
with the checkpoint in the page cache, and, where that is permitted, after caches were dropped, as they are after a reboot.";

const SIZE: u64 = 1024;
const JOB: &str = "resume";

/// Measures both.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("resume", ABOUT);
    let mut table =
        Table::new("resume", "Medians.", &["page cache", "runs, ms", "answers, ms", "most, ms", "runs"]);
    for cold in [false, true] {
        if cold && drop_caches().is_err() {
            section.note("After caches were dropped: skipped, for that is not permitted");
            continue;
        }
        let (mut runs, mut answers) = (Series::default(), Series::default());
        for _ in 0..bench.plan.runs {
            let (ran, answered) = measure(bench, cold)?;
            runs.add(ran);
            answers.add(answered);
        }
        let cache = if cold { "dropped" } else { "warm" };
        let numbers = [runs.median(), answers.median(), runs.most()].map(number);
        table.row([vec![cache.to_owned()], numbers.to_vec(), vec![runs.count().to_string()]].concat());
        section.promises.push(Promise {
            what: format!("from the command to running again after a power cut, 1 GiB, page cache {cache}: at most 200 ms"),
            reached: Figure(runs.median(), "ms"),
            peer: None,
            limit: Limit::AtMost(200.0),
        });
    }
    section.tables.push(table);
    Ok(section)
}

fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("drop caches")
}

/// Milliseconds until it runs, and until it answers.
fn measure(bench: &Bench, cold: bool) -> Result<(f64, f64)> {
    let place = bench.plan.place("resume")?;
    let (store, directory) = (place.join("store"), bench.plan.place("resume/program")?);
    let command_line = Load::new(SIZE, 1000).command_line(&bench.programs, &directory);
    let job = bench.stillpoint.run(&store, JOB, &directory, &command_line)?;
    let program = Heartbeat::adopt(job.pid, &directory)?;
    bench.stillpoint.checkpoint(JOB, &store, Request::default())?;
    bench.stillpoint.verify(&store, JOB)?;
    job.cut_off()?;
    if cold {
        drop_caches()?;
    }
    let began = Instant::now();
    let job = bench.stillpoint.resume(&store, JOB)?;
    let ran = began.elapsed();
    program.longest_gap()?;
    let answered = began.elapsed();
    bench.stillpoint.await_pagers()?;
    drop(program);
    job.cut_off()?;
    fs::remove_dir_all(&store)?;
    Ok((ran.as_secs_f64() * 1e3, answered.as_secs_f64() * 1e3))
}
