//! A periodic real-time task: deadlines missed while checkpoints are taken.

use crate::bench::{Bench, Failures};
use crate::report::{Chart, Scale, Section, Table, number};
use crate::tools::Engine;
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

const ABOUT: &str = "\
Every 20 ms a task computes for about 5 ms and writes 4 MiB of its 256 MiB, each job the next; a job must be done when the
next is due. It has a real-time priority where that is allowed. Each engine in turn takes one checkpoint in a window of half a
second; `none` is the task left alone. A response is the time from when a job was due to its end.";

const MEBIBYTES: u64 = 256;
const COST_US: u64 = 5_000;
const PERIOD_US: u64 = 20_000;
const WINDOW: Duration = Duration::from_millis(500);

/// What happened to the jobs of one side's windows.
#[derive(Clone, Copy, Default)]
struct Jobs {
    all: u64,
    missed: u64,
    /// Nanoseconds.
    lateness: u64,
    /// Nanoseconds.
    response: u64,
}

/// Measures all engines.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("deadline", ABOUT);
    let place = bench.plan.place("deadline")?;
    let arguments = [MEBIBYTES, COST_US, PERIOD_US].map(|n| n.to_string());
    let program = bench.programs.start("deadline", &place.join("program"), &arguments, &[])?;
    let sides: Vec<Option<Engine>> = bench.engines.iter().copied().map(Some).chain([None]).collect();
    let mut jobs = vec![Jobs::default(); sides.len()];
    let mut failures = Failures::default();
    for run in 0..=bench.plan.runs {
        for (side, sum) in sides.iter().zip(&mut jobs) {
            program.ask()?; // forget what came before
            let began = Instant::now();
            if let Some(engine) = side {
                failures.checkpoint(bench, program.pid, &place.join("store"), *engine);
            }
            std::thread::sleep(WINDOW.saturating_sub(began.elapsed()));
            let answer: [u64; 4] = program.ask()?.try_into().ok().context("four numbers were expected")?;
            if run > 0 {
                let [all, missed, lateness, response] = answer;
                sum.all += all;
                sum.missed += missed;
                sum.lateness = sum.lateness.max(lateness);
                sum.response = sum.response.max(response);
            }
        }
    }
    let outcome = program.finish()?;
    failures.tell(&mut section);
    let title =
        format!("{} windows each; the task's priority is {}.", bench.plan.runs, outcome.get("priority")?);
    let columns = ["by", "jobs", "missed", "largest lateness, ms", "longest response, ms"];
    let mut table = Table::new("deadline", &title, &columns);
    let mut chart = Chart::new("Longest response of a task with a deadline of 20 ms", "ms", Scale::Linear);
    for (side, jobs) in sides.iter().zip(&jobs).filter(|(side, _)| !side.is_some_and(|e| failures.has(e))) {
        let name = side.map_or("none", |e| e.name);
        let [lateness, response] = [jobs.lateness, jobs.response].map(|ns| ns as f64 / 1e6);
        let counts = [name.to_owned(), jobs.all.to_string(), jobs.missed.to_string()];
        table.row([&counts[..], &[number(lateness), number(response)]].concat());
        chart.bar(name, "longest response", response);
    }
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(section)
}
