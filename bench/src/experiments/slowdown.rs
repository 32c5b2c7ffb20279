//! What checkpoints cost a computation: its own time with one every second, against undisturbed runs.

use crate::bench::Bench;
use crate::programs::{Outcome, Program};
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::Series;
use crate::tools::Request;
use crate::workloads::{FIVE, Workload};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

const ABOUT: &str = "\
Each computation runs on all processors, in turn undisturbed and as a job that is checkpointed every second; its time is
by its own clock. The results of all runs must be equal, and each run checks its own.";

const EVERY: Duration = Duration::from_secs(1);
const JOB: &str = "slowdown";

/// Runs of one computation, seconds.
#[derive(Default)]
struct Measured {
    undisturbed: Series,
    disturbed: Series,
    checkpoints: Series,
}

impl Measured {
    /// Percent.
    fn slowdown(&self) -> f64 {
        100.0 * (self.disturbed.median() / self.undisturbed.median() - 1.0)
    }
}

/// Measures all five.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("slowdown", ABOUT);
    let engine = bench.default_engine().name;
    let columns =
        ["program", "undisturbed, s", "with checkpoints, s", "slowdown, %", "checkpoints in a run", "runs"];
    let title = format!("A checkpoint every second by `{engine}`, medians.");
    let mut table = Table::new("slowdown", &title, &columns);
    let mut chart = Chart::new("Slowdown with a checkpoint every second", "%", Scale::Linear);
    for workload in FIVE {
        let m = measure(bench, workload).with_context(|| workload.name)?;
        let numbers = [m.undisturbed.median(), m.disturbed.median(), m.slowdown(), m.checkpoints.median()];
        let runs = m.disturbed.count().to_string();
        table.row([vec![workload.name.to_owned()], numbers.map(number).to_vec(), vec![runs]].concat());
        chart.bar(workload.name, engine, m.slowdown());
        section.promises.push(Promise {
            what: format!(
                "slowdown of {} with a checkpoint every second ({engine}): at most 2 %",
                workload.name
            ),
            reached: Figure(m.slowdown(), "%"),
            peer: None,
            limit: Limit::AtMost(2.0),
        });
    }
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(section)
}

fn measure(bench: &Bench, workload: Workload) -> Result<Measured> {
    let place = bench.plan.place("slowdown")?;
    let mut measured = Measured::default();
    let mut digest = None;
    let mut same = |outcome: &Outcome| -> Result<()> {
        let this = outcome.get("digest")?.to_owned();
        let first = digest.get_or_insert_with(|| this.clone());
        ensure!(*first == this, "results differ: {first} and {this}");
        Ok(())
    };
    // No warm-up: medians are compared. Who is first changes, so that a drift of the machine meets both sides.
    for run in 0..bench.plan.runs {
        for disturbed in [run % 2 == 1, run % 2 == 0] {
            let outcome = if disturbed {
                let (outcome, checkpoints) = run_disturbed(bench, workload)?;
                measured.checkpoints.add(checkpoints);
                measured.disturbed.add(outcome.seconds()?);
                outcome
            } else {
                let outcome = workload.start(&bench.programs, &place)?.outcome()?;
                measured.undisturbed.add(outcome.seconds()?);
                outcome
            };
            same(&outcome)?;
        }
    }
    Ok(measured)
}

/// One run as a job; how it ended, and the number of checkpoints.
fn run_disturbed(bench: &Bench, workload: Workload) -> Result<(Outcome, f64)> {
    let place = bench.plan.place("slowdown")?;
    let (store, directory) = (place.join("store"), bench.plan.place("slowdown/program")?);
    let command_line = workload.command_line(&bench.programs, &directory, false);
    let job = bench.stillpoint.run(&store, JOB, &directory, &command_line)?;
    let program = Program::adopt(job.pid, &directory)?;
    let request = Request { engine: Some(bench.default_engine()), ..Request::default() };
    let mut checkpoints = 0.0;
    let mut due = Instant::now() + EVERY;
    while wait_until(due, &program) {
        match bench.stillpoint.checkpoint(JOB, &store, request) {
            Ok(_) => checkpoints += 1.0,
            // It may have come to its end meanwhile.
            Err(_) if ends(&program) => break,
            Err(why) => return Err(why),
        }
        due += EVERY;
    }
    let outcome = program.outcome()?;
    job.wait()?;
    Ok((outcome, checkpoints))
}

/// Whether the program still runs at that time.
fn wait_until(due: Instant, program: &Program) -> bool {
    while Instant::now() < due {
        if program.ended() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    !program.ended()
}

/// Whether the program ends within a moment.
fn ends(program: &Program) -> bool {
    !wait_until(Instant::now() + Duration::from_millis(500), program)
}
