//! What a checkpoint costs when little has changed since the last one.

use crate::bench::{Bench, size_name};
use crate::heartbeat::{Heartbeat, Load};
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::Series;
use crate::tools::{Engine, Request};
use anyhow::Result;

const ABOUT: &str = "\
A job's program writes 1 % of its pages, spread evenly over its memory, between a full checkpoint and an incremental one.
Time is that of the whole command, until the checkpoint is durable; bytes are those that were written for it.";

/// Part of the pages that are written between two checkpoints.
const CHANGED: f64 = 0.01;
const JOB: &str = "incremental";

/// Time and bytes of checkpoints of one kind.
#[derive(Default)]
struct Cost {
    wall: Series,
    written: Series,
}

/// Measures one size with each engine that follows changes.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("incremental", ABOUT);
    if !bench.stillpoint.is_incremental() {
        section.note("Skipped: this command has no incremental checkpoints");
        return Ok(section);
    }
    let mebibytes = bench.base_size();
    let columns = ["engine", "checkpoint", "time, ms", "of full, %", "written, MiB", "of full, %", "runs"];
    let title = format!("{}, of which 1 % changes; medians.", size_name(mebibytes));
    let mut table = Table::new("incremental", &title, &columns);
    let mut chart = Chart::new("A full checkpoint and one of 1 %", "ms", Scale::Logarithmic);
    for engine in bench.tracking_engines() {
        let [full, part] = match measure(bench, engine, mebibytes) {
            Ok(costs) => costs,
            Err(why) => {
                section.note(format!("{} is skipped: {why:#}", engine.name));
                continue;
            }
        };
        let time = 100.0 * part.wall.median() / full.wall.median();
        let bytes = 100.0 * part.written.median() / full.written.median();
        for (kind, cost, shares) in [("full", &full, [100.0, 100.0]), ("incremental", &part, [time, bytes])] {
            let written = cost.written.median() / 1048576.0;
            let numbers = [cost.wall.median(), shares[0], written, shares[1]].map(number).to_vec();
            let names = vec![engine.name.to_owned(), kind.to_owned()];
            table.row([names, numbers, vec![cost.wall.count().to_string()]].concat());
            chart.bar(engine.name, kind, cost.wall.median());
        }
        let what = format!("incremental, 1 % of {} changed ({})", size_name(mebibytes), engine.name);
        let pair = |of: &Cost, unit: &'static str| match unit {
            "ms" => Figure(of.wall.median(), unit),
            _ => Figure(of.written.median() / 1048576.0, unit),
        };
        for (most, unit, kind) in [(0.05, "ms", "5 % of the time"), (0.012, "MiB", "1.2 % of the bytes")] {
            section.promises.push(Promise {
                what: format!("{what}: at most {kind} of a full one"),
                reached: pair(&part, unit),
                peer: Some(("full".into(), pair(&full, unit))),
                limit: Limit::TimesPeer(most),
            });
        }
    }
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(section)
}

/// Costs of full and of incremental checkpoints, in turn.
fn measure(bench: &Bench, engine: Engine, mebibytes: u64) -> Result<[Cost; 2]> {
    let place = bench.plan.place("incremental")?;
    let (store, directory) = (place.join("store"), bench.plan.place("incremental/program")?);
    let load = Load::new(mebibytes, 0);
    let job =
        bench.stillpoint.run(&store, JOB, &directory, &load.command_line(&bench.programs, &directory))?;
    let program = Heartbeat::adopt(job.pid, &directory)?;
    let pages = mebibytes * 256;
    let mut costs = [Cost::default(), Cost::default()];
    for run in 0..=bench.plan.runs {
        for (cost, mode) in costs.iter_mut().zip(["--full", "--incremental"]) {
            let request = Request { engine: Some(engine), mode: Some(mode), ..Request::default() };
            let cut = bench.stillpoint.checkpoint(JOB, &store, request)?;
            let cut = if mode == "--incremental" { cut.must_be_incremental()? } else { cut };
            if run > 0 {
                cost.wall.add_time(cut.wall);
                cost.written.add(cut.written());
            }
            program.touch((pages as f64 * CHANGED) as u64)?;
        }
        bench.stillpoint.keep(&store, JOB, 1)?;
    }
    program.finish()?;
    job.wait()?;
    Ok(costs)
}
