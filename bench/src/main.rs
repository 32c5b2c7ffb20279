//! Measures what a user of a checkpointed program sees, and writes it to `bench/results`.
//!
//! Rates on a shared machine mean nothing alone: ours and the other side are measured in turn in one run, and medians are
//! compared. The pause is the longest gap that the program itself saw (`programs/heartbeat.c`), beside our stopwatch.
//!
//! Environment:
//!
//! * `BENCH_ONLY`: names of experiments, with commas between: `pause`, `tree`, `twins`, `branch`, `durable`, `restore`, `unprivileged`, `restart`,
//!   `touchset`, `streaming`, `incremental`, `slowdown`, `downtime`, `interval`, `chain`, `deadline`, `resume`, `frequent`, `paging`, `mirror`, `barrier`,
//!   `redis`, `pgbench` (all)
//! * `BENCH_SIZES`: MiB of the programs whose pauses are measured (`1024,4096,8192`)
//! * `BENCH_WRITES`: their random page writes per second (`0,20000,200000`)
//! * `BENCH_RUNS`: measurements of each kind (5)
//! * `BENCH_ENGINES`: names of engines (all that the command has)
//! * `BENCH_TIME_SCALE`: by how much the papers' intervals of 10 and 20 s are shortened (10)
//! * `BENCH_BANDWIDTH`: rate of the slow store from which programs are restored (`100MB/s`)
//! * `BENCH_DIRECTORY`: where stores and raw files go (beside this program)
//! * `BENCH_RESULTS`: where results go (`bench/results`)
//! * `STILLPOINT_BIN`: the command (beside this program)
#![forbid(unsafe_code)]

mod bench;
mod experiments;
mod heartbeat;
mod latency;
mod mirrored;
mod plan;
mod programs;
mod raw;
mod real;
mod report;
mod series;
mod tools;
mod workloads;

use anyhow::{Result, bail};
use bench::Bench;
use experiments::EXPERIMENTS;
use plan::Plan;
use report::Report;
use std::time::Instant;

fn main() -> Result<()> {
    let names: Vec<_> = EXPERIMENTS.iter().map(|(name, _)| *name).collect();
    let plan = Plan::from_environment(&names)?;
    let report = Report::new(&plan.results, &plan.directory, names)?;
    let bench = Bench::new(plan)?;
    let mut failed = Vec::new();
    for (name, experiment) in EXPERIMENTS {
        if !bench.plan.wants(name) {
            continue;
        }
        eprintln!("{name}");
        let began = Instant::now();
        // One that fails does not take the figures of the others with it.
        match experiment(&bench).and_then(|section| report.write(&section)) {
            Ok(()) => eprintln!("{name}: {:.0} s", began.elapsed().as_secs_f64()),
            Err(why) => {
                eprintln!("{name} failed: {why:#}");
                failed.push(*name);
            }
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}
