//! What a pause is spent on, step by step.

use crate::bench::{Bench, Failures};
use crate::report::{Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result};

const ABOUT: &str = "\
Programs of several kinds are checkpointed again and again by the engine that users get. Each column is one of them, each row a step of
the time for which it stands still, as the command's own stopwatch tells it: milliseconds, medians. The last rows are their sum, the
longest gap that a thread of the program saw meanwhile, and the time until the checkpoint was durable.";

/// A program: its name here, that of `programs`, and its arguments.
type Case = (&'static str, &'static str, &'static [&'static str]);

const CASES: [Case; 5] = [
    ("1 GiB", "heartbeat", &["1024", "20000", "3"]),
    ("64 threads", "heartbeat", &["64", "20000", "64"]),
    ("256 threads", "heartbeat", &["64", "20000", "256"]),
    ("1,024 threads that come and go", "comers", &["1024"]),
    ("20 processes", "family", &["1024", "20"]),
];

/// What was measured of one program.
#[derive(Default)]
struct Measured {
    steps: Vec<(String, Series)>,
    own: Series,
    gap: Series,
    wall: Series,
}

/// Measures all cases.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("anatomy", ABOUT);
    let mut failures = Failures::default();
    let mut all = Vec::new();
    for case in CASES {
        all.push(measure(bench, case, &mut failures).with_context(|| case.0)?);
    }
    failures.tell(&mut section);
    let columns: Vec<&str> = std::iter::once("step").chain(CASES.iter().map(|case| case.0)).collect();
    let mut table = Table::new("anatomy", "Milliseconds; medians.", &columns);
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in all.iter().flat_map(|measured| &measured.steps) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    for name in names {
        let of =
            |m: &Measured| m.steps.iter().find(|(step, _)| step == name).map_or(0.0, |(_, s)| s.median());
        table.row(row(name, all.iter().map(of)));
    }
    table.row(row("all of it", all.iter().map(|m| m.own.median())));
    table.row(row("longest gap", all.iter().map(|m| m.gap.median())));
    table.row(row("durable after", all.iter().map(|m| m.wall.median())));
    section.tables.push(table);
    Ok(section)
}

fn row(name: &str, values: impl Iterator<Item = f64>) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(values.map(number)).collect()
}

fn measure(bench: &Bench, (_, name, arguments): Case, failures: &mut Failures) -> Result<Measured> {
    let place = bench.plan.place("anatomy")?;
    let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
    let program = bench.programs.start(name, &place.join("program"), &arguments, &[])?;
    let engine = bench.default_engine();
    let mut measured = Measured::default();
    // The first one counts as practice.
    for run in 0..=bench.plan.runs {
        program.longest_gap()?; // forget what came before
        let Some(cut) = failures.checkpoint(bench, program.pid, &place.join("store"), engine) else {
            continue;
        };
        let gap = program.longest_gap()?;
        if run == 0 {
            continue;
        }
        for (step, took) in cut.pause_steps() {
            let known = measured.steps.iter().position(|(known, _)| *known == step);
            let place = known.unwrap_or_else(|| {
                measured.steps.push((step, Series::default()));
                measured.steps.len() - 1
            });
            measured.steps[place].1.add(took);
        }
        measured.own.add(cut.own_pause_ms());
        measured.gap.add_time(gap.seen);
        measured.wall.add_time(cut.wall);
    }
    program.finish()?;
    Ok(measured)
}
