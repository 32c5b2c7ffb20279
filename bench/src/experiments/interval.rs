//! The papers' second table: pages copied and checkpoint time of a matrix multiplication at intervals of 10 and 20 s.

use super::published;
use crate::bench::Bench;
use crate::programs::Program;
use crate::report::{Chart, Scale, Section, Table, number};
use crate::series::Series;
use crate::tools::{Cut, Engine, Request};
use crate::workloads::MAT_AT_INTERVALS;
use anyhow::Result;
use std::time::Duration;

const JOB: &str = "interval";
/// The papers' intervals, seconds.
const INTERVALS: [u64; 2] = [10, 20];

#[derive(Default)]
struct Measured {
    pages: Series,
    wall: Series,
    pause: Series,
}

impl Measured {
    fn add(&mut self, cut: &Cut) {
        self.pages.add(cut.written() / 4096.0);
        self.wall.add_time(cut.wall);
        self.pause.add(cut.own_pause_ms());
    }
}

/// Measures both intervals with each engine that follows changes.
pub fn run(bench: &Bench) -> Result<Section> {
    let scale = bench.plan.time_scale;
    let about = format!(
        "A job multiplies two matrices of 4096 × 4096 numbers and is checkpointed at intervals, incrementally and in full in\n\
         turn. Pages are those that were copied. The papers' intervals are shortened {scale} times here\n\
         (`BENCH_TIME_SCALE=1`: not at all), so that a program changes less between two checkpoints than it would in them."
    );
    let mut section = bench.section("interval", &about);
    let mut kinds = vec!["--incremental", "--full"];
    if !bench.stillpoint.is_incremental() {
        section.note("Incremental checkpoints are skipped: this command has none");
        kinds.remove(0);
    }
    let columns = ["engine", "interval, s", "checkpoint", "pages copied", "time, ms", "pause, ms", "runs"];
    let mut table = Table::new("interval", "Medians.", &columns);
    let mut chart = Chart::new("Checkpoint time at intervals", "ms", Scale::Logarithmic);
    let mut saved = [Series::default(), Series::default()];
    for engine in bench.tracking_engines() {
        for (seconds, saved) in INTERVALS.iter().zip(&mut saved) {
            let interval = Duration::from_secs(*seconds) / scale as u32;
            let measured = match measure(bench, engine, interval, &kinds) {
                Ok(measured) => measured,
                Err(why) => {
                    section.note(format!("{} is skipped: {why:#}", engine.name));
                    break;
                }
            };
            for (kind, m) in kinds.iter().zip(&measured) {
                let kind = kind.trim_start_matches('-');
                let names = vec![engine.name.to_owned(), number(interval.as_secs_f64()), kind.to_owned()];
                let numbers = [&m.pages, &m.wall, &m.pause].map(|s| number(s.median())).to_vec();
                table.row([names, numbers, vec![m.wall.count().to_string()]].concat());
                chart.bar(&format!("{}, {} s", engine.name, interval.as_secs_f64()), kind, m.wall.median());
            }
            if let [part, full] = &measured[..] {
                saved.add(100.0 * (1.0 - part.wall.median() / full.wall.median()));
            }
        }
    }
    let [saved_10, saved_20] = saved;
    let rows = [(published::INCREMENTAL_10, saved_10), (published::INCREMENTAL_20, saved_20)];
    section.tables.push(table);
    section.tables.push(published::table("interval-published", &rows));
    section.chart = Some(chart);
    Ok(section)
}

fn measure(
    bench: &Bench,
    engine: Engine,
    interval: Duration,
    kinds: &[&'static str],
) -> Result<Vec<Measured>> {
    let place = bench.plan.place("interval")?;
    let (store, directory) = (place.join("store"), bench.plan.place("interval/program")?);
    let command_line = MAT_AT_INTERVALS.command_line(&bench.programs, &directory, true);
    let job = bench.stillpoint.run(&store, JOB, &directory, &command_line)?;
    let program = Program::adopt(job.pid, &directory)?;
    let request = |mode| Request { engine: Some(engine), mode: Some(mode), ..Request::default() };
    // Something for the first incremental one to follow.
    bench.stillpoint.checkpoint(JOB, &store, request("--full"))?;
    let mut measured: Vec<_> = kinds.iter().map(|_| Measured::default()).collect();
    for _ in 0..bench.plan.runs.min(3) {
        for (kind, measured) in kinds.iter().zip(&mut measured) {
            std::thread::sleep(interval);
            let cut = bench.stillpoint.checkpoint(JOB, &store, request(*kind))?;
            measured.add(&if *kind == "--incremental" { cut.must_be_incremental()? } else { cut });
            bench.stillpoint.keep(&store, JOB, 1)?;
        }
    }
    program.finish()?;
    job.wait()?;
    Ok(measured)
}
