//! How long a tree of processes stands still, and how soon it is back.

use crate::bench::{Bench, Failures, size_name};
use crate::programs::Program;
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, test_kill_process_group};
use std::time::{Duration, Instant};

const ABOUT: &str = "\
Twenty processes share a tree and the memory; each wakes every millisecond, writes a page, and notes how late it woke. The
tree is checkpointed again and again, by each engine in turn. `late` is the latest that any process woke; `stopped` leaves out
the time for which that process was ready and waited for a processor; `own` is the command's stopwatch, from the first process
that stood still to the last that went on. `none` is the tree left alone for a moment. Then it is killed at a checkpoint and
restored again and again, its checkpoint in the page cache: `runs` is the time until all of it runs; most of its memory follows. At
the end each process checks its memory.";

/// Processes.
const PROCESSES: u64 = 20;
/// Their memory in all, MiB: little, so that what is not memory shows, and much.
const SIZES: [u64; 2] = [20, 1024];
/// Time for which the tree is left alone.
const ALONE: Duration = Duration::from_millis(300);

#[derive(Default)]
struct Pauses {
    late: Series,
    stopped: Series,
    own: Series,
}

/// Measures all sizes.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("tree", ABOUT);
    let columns =
        ["size, MiB", "by", "late, ms", "least", "most", "stopped, ms", "own, ms", "least", "most", "runs"];
    let mut pauses = Table::new("tree-pause", "Pauses; medians.", &columns);
    let columns = ["size, MiB", "runs, ms", "least", "most", "runs"];
    let mut restores = Table::new("tree-restore", "Restores; medians.", &columns);
    for mebibytes in SIZES {
        let mut failures = Failures::default();
        let measured = pauses_of(bench, mebibytes, &mut failures)?;
        for (name, m) in &measured {
            let late = [m.late.median(), m.late.least(), m.late.most(), m.stopped.median()];
            let own = [m.own.median(), m.own.least(), m.own.most()];
            let mut row = vec![mebibytes.to_string(), name.clone()];
            row.extend(late.into_iter().chain(own).map(number));
            row.push(m.late.count().to_string());
            pauses.row(row);
        }
        failures.tell(&mut section);
        let runs = restores_of(bench, mebibytes)?;
        let numbers = [runs.median(), runs.least(), runs.most()].map(number).to_vec();
        restores.row([vec![mebibytes.to_string()], numbers, vec![runs.count().to_string()]].concat());
        section.promises.push(promise(bench, mebibytes, &measured, &runs));
    }
    section.tables.extend([pauses, restores]);
    Ok(section)
}

fn start(bench: &Bench, mebibytes: u64) -> Result<Program> {
    let arguments = [mebibytes, PROCESSES].map(|n| n.to_string());
    bench.programs.start("family", &bench.plan.place("tree")?.join("program"), &arguments, &[])
}

fn pauses_of(bench: &Bench, mebibytes: u64, failures: &mut Failures) -> Result<Vec<(String, Pauses)>> {
    let program = start(bench, mebibytes)?;
    let store = bench.plan.place("tree-store")?;
    let names = bench.engines.iter().map(|e| e.name).chain(["none"]);
    let mut measured: Vec<_> = names.map(|name| (name.to_owned(), Pauses::default())).collect();
    for run in 0..=bench.plan.runs {
        let sides = bench.engines.iter().copied().map(Some).chain([None]);
        for (engine, (_, pauses)) in sides.zip(&mut measured) {
            program.longest_gap()?; // forget what came before
            let own = match engine {
                Some(engine) => {
                    let Some(cut) = failures.checkpoint(bench, program.pid, &store, engine) else { continue };
                    cut.own_pause_ms()
                }
                None => {
                    std::thread::sleep(ALONE);
                    f64::NAN
                }
            };
            let gap = program.longest_gap()?;
            if run > 0 {
                pauses.late.add_time(gap.seen);
                pauses.stopped.add_time(gap.stopped);
                pauses.own.add(own);
            }
        }
    }
    program.finish()?;
    Ok(measured)
}

fn restores_of(bench: &Bench, mebibytes: u64) -> Result<Series> {
    let mut program = start(bench, mebibytes)?;
    let store = bench.plan.place("tree-store")?;
    bench.stillpoint.kill(&mut program, &store)?;
    let mut series = Series::default();
    for run in 0..=bench.plan.runs {
        let (runs, _) = bench.stillpoint.bring_back(&program, &store, &[])?;
        if run > 0 {
            series.add_time(runs);
        }
        if run < bench.plan.runs {
            program.kill_restored()?;
            await_end(program.pid)?;
        }
    }
    program.finish()?;
    Ok(series)
}

/// Waits until no process of the tree is left: their ids must be free.
fn await_end(leader: u32) -> Result<()> {
    let group = i32::try_from(leader).ok().and_then(Pid::from_raw).context("process id")?;
    let until = Instant::now() + Duration::from_secs(30);
    while test_kill_process_group(group).is_ok() {
        if Instant::now() > until {
            bail!("the tree of process {leader} does not end");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn promise(bench: &Bench, mebibytes: u64, measured: &[(String, Pauses)], runs: &Series) -> Promise {
    if mebibytes == SIZES[0] {
        return Promise {
            what: format!("restore of {PROCESSES} processes with {}: at most 60 ms", size_name(mebibytes)),
            reached: Figure(runs.median(), "ms"),
            peer: None,
            limit: Limit::AtMost(60.0),
        };
    }
    let engine = bench.default_engine().name;
    let of = |by: &str| measured.iter().find(|(name, _)| name == by).map(|(_, m)| m);
    let size = size_name(mebibytes);
    Promise {
        what: format!(
            "pause of {PROCESSES} processes with {size} in all ({engine}): at most 3 ms; beside stop-and-copy"
        ),
        reached: Figure(of(engine).map_or(f64::NAN, |m| m.own.median()), "ms"),
        peer: of("stop").map(|m| ("stop".to_owned(), Figure(m.own.median(), "ms"))),
        limit: Limit::AtMost(3.0),
    }
}
