//! The papers' first table: checkpoint time and reduced downtime of five computations.

use super::published::{self, Published};
use crate::bench::{Bench, Failures};
use crate::programs::Program;
use crate::report::{Chart, Scale, Section, Table, number};
use crate::series::Series;
use crate::tools::{Cut, Engine};
use crate::workloads::{DOWNTIME, Workload};
use anyhow::{Context, Result};
use std::time::Duration;

const ABOUT: &str = "\
Full checkpoints of computations that use all processors, by each engine in turn. Downtime is all of the time for which
the program stood still, by the command's own stopwatch, without what single writes waited for afterwards; PRDT is the
percentage of reduced downtime against `stop`, (T_stop - T) / T_stop. `late` is the longest time by which a thread was late that wakes every 100 µs. `CLL` is `wp` as it
was before TIC-CKPT: all memory is protected in the cut, and a fault saves one page.

The papers' figures for each computation could not be had, so there is no column for them: the second table has what
their abstracts state.";

/// How long a computation runs before it is checkpointed.
const WARM: Duration = Duration::from_millis(200);

#[derive(Default)]
struct Measured {
    downtime: Series,
    late: Series,
    wall: Series,
    pages: Series,
    buffer: Series,
    waited: Series,
}

impl Measured {
    fn add(&mut self, cut: &Cut, late: f64) {
        self.downtime.add(cut.downtime_ms());
        self.late.add(late);
        self.wall.add_time(cut.wall);
        self.pages.add(cut.pages());
        self.buffer.add(cut.buffer_kib().unwrap_or(f64::NAN));
        self.waited.add(cut.writes_that_waited().unwrap_or(f64::NAN));
    }
}

/// What each engine did to one computation.
struct Row {
    workload: Workload,
    engines: Vec<(Engine, Measured)>,
}

impl Row {
    fn of(&self, name: &str) -> Option<&Measured> {
        self.engines.iter().find(|(e, _)| e.name == name).map(|(_, m)| m)
    }

    /// Percentage of reduced downtime against stop-and-copy.
    fn prdt(&self, measured: &Measured) -> f64 {
        let stop = self.of("stop").map_or(f64::NAN, |m| m.downtime.median());
        100.0 * (stop - measured.downtime.median()) / stop
    }
}

/// Measures all computations.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("downtime", ABOUT);
    let mut engines = bench.engines.clone();
    if let Some(at) = engines.iter().position(|e| e.name == "wp") {
        engines.insert(at, Engine::CLL);
    }
    let mut failures = Failures::default();
    let mut rows = Vec::new();
    for workload in DOWNTIME {
        rows.push(measure(bench, workload, &engines, &mut failures).with_context(|| workload.name)?);
    }
    failures.tell(&mut section);
    section.tables.push(table(&rows));
    section.tables.push(published::table("downtime-published", &comparisons(&rows)));
    section.chart = Some(chart(&rows));
    Ok(section)
}

fn measure(bench: &Bench, workload: Workload, engines: &[Engine], failures: &mut Failures) -> Result<Row> {
    let place = bench.plan.place("downtime")?;
    let program = workload.start_endless(&bench.programs, &place.join("program"))?;
    std::thread::sleep(WARM);
    let mut row = Row { workload, engines: engines.iter().map(|&e| (e, Measured::default())).collect() };
    for run in 0..=bench.plan.runs {
        for (engine, measured) in &mut row.engines {
            lateness(&program)?; // forget what came before
            let cut = failures.checkpoint(bench, program.pid, &place.join("store"), *engine);
            let late = lateness(&program)?;
            if let Some(cut) = cut.filter(|_| run > 0) {
                measured.add(&cut, late);
            }
        }
    }
    program.finish()?;
    Ok(row)
}

/// Milliseconds by which the watching thread was late since the last call.
fn lateness(program: &Program) -> Result<f64> {
    let answer = program.ask()?;
    Ok(*answer.first().context("an empty answer")? as f64 / 1e6)
}

fn table(rows: &[Row]) -> Table {
    let columns = [
        "program",
        "engine",
        "pages",
        "checkpoint time, ms",
        "downtime, ms",
        "PRDT, %",
        "late, ms",
        "writes that waited",
        "buffer, KiB",
        "runs",
    ];
    let mut table = Table::new("downtime", "Medians.", &columns);
    for row in rows {
        for (engine, m) in &row.engines {
            let prdt = if engine.name == "stop" { f64::NAN } else { row.prdt(m) };
            let medians = [&m.pages, &m.wall, &m.downtime].map(Series::median);
            let numbers =
                [&medians[..], &[prdt, m.late.median(), m.waited.median(), m.buffer.median()]].concat();
            let names = vec![row.workload.name.to_owned(), engine.name.to_owned()];
            let numbers = numbers.into_iter().map(number).collect();
            table.row([names, numbers, vec![m.wall.count().to_string()]].concat());
        }
    }
    table
}

/// Each program at its largest size.
fn chart(rows: &[Row]) -> Chart {
    let mut chart = Chart::new("Downtime", "ms", Scale::Logarithmic);
    let family = |row: &Row| row.workload.name.split(' ').next();
    let is_last = |i: usize| rows.get(i + 1).is_none_or(|next| family(next) != family(&rows[i]));
    for row in rows.iter().enumerate().filter(|(i, _)| is_last(*i)).map(|(_, row)| row) {
        for (engine, m) in &row.engines {
            chart.bar(row.workload.name, engine.name, m.downtime.median());
        }
    }
    chart
}

/// What the papers' abstracts state, beside the same quantity here: its range over all computations.
fn comparisons(rows: &[Row]) -> Vec<(Published, Series)> {
    let less = |engine: &str, than: &str, of: fn(&Measured) -> f64| {
        let mut all = Series::default();
        for row in rows {
            if let (Some(ours), Some(theirs)) = (row.of(engine), row.of(than)) {
                all.add(100.0 * (of(theirs) - of(ours)) / of(theirs));
            }
        }
        all
    };
    let mut times = Series::default();
    for row in rows {
        if let (Some(fork), Some(stop)) = (row.of("fork"), row.of("stop")) {
            times.add(stop.downtime.median() / fork.downtime.median());
        }
    }
    let downtime = |m: &Measured| m.downtime.median();
    vec![
        (published::LESS_DOWNTIME_THAN_STOP, less("wp", "stop", downtime)),
        (published::LESS_DOWNTIME_THAN_CLL, less("wp", "CLL", downtime)),
        (published::LESS_TIME_THAN_CLL, less("wp", "CLL", |m| m.wall.median())),
        (published::FORK_AGAINST_COPY, times),
    ]
}
