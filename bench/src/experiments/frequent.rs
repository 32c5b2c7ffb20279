//! What very frequent checkpoints cost a job that changes one page in a hundred between them.

use crate::bench::Bench;
use crate::programs::{Outcome, Program};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::{Result, ensure};
use std::time::Instant;

const ABOUT: &str = "\
A computation of one thread with 64 MiB of memory changes 1 % of its pages between two checkpoints, which are taken by
`--every`: once a second, and a hundred times. Its time is by its own clock, in turn undisturbed and as a job. `taken` is how
many there were in a second of its life.";

/// MiB, and ticks of about a millisecond.
const SIZE: u64 = 64;
const TICKS: u64 = 8_000;
/// Period, checkpoints in a second, and the slowdown that is promised, percent.
const RATES: [(&str, u64, f64); 2] = [("1s", 1, 1.0), ("10ms", 100, 25.0)];
const JOB: &str = "frequent";

/// Measures both rates.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("frequent", ABOUT);
    let columns = ["every", "undisturbed, s", "as a job, s", "slowdown, %", "taken", "runs"];
    let mut table = Table::new("frequent", "Medians.", &columns);
    for (every, a_second, most) in RATES {
        let (mut undisturbed, mut disturbed, mut taken) =
            (Series::default(), Series::default(), Series::default());
        let arguments = [SIZE, TICKS, a_second * SIZE * 256 / 100].map(|n| n.to_string());
        for run in 0..bench.plan.runs {
            let mut digests = Vec::new();
            for as_job in [run % 2 == 1, run % 2 == 0] {
                let outcome = if as_job {
                    let (outcome, checkpoints) = as_a_job(bench, every, &arguments)?;
                    taken.add(checkpoints);
                    disturbed.add(outcome.seconds()?);
                    outcome
                } else {
                    let place = bench.plan.place("frequent/program")?;
                    let outcome = bench.programs.start("steady", &place, &arguments, &[])?.outcome()?;
                    undisturbed.add(outcome.seconds()?);
                    outcome
                };
                digests.push(outcome.get("digest")?.to_owned());
            }
            ensure!(digests[0] == digests[1], "results differ: {digests:?}");
        }
        let slowdown = 100.0 * (disturbed.median() / undisturbed.median() - 1.0);
        let numbers = [undisturbed.median(), disturbed.median(), slowdown, taken.median()].map(number);
        table.row([vec![every.to_owned()], numbers.to_vec(), vec![disturbed.count().to_string()]].concat());
        section.promises.push(Promise {
            what: format!("slowdown of a job with 1 % dirty, checkpointed every {every}: at most {most} %"),
            reached: Figure(slowdown, "%"),
            peer: None,
            limit: Limit::AtMost(most),
        });
        // A slowdown says nothing where fewer are taken than were asked for.
        section.promises.push(Promise {
            what: format!(
                "checkpoints in a second of that job, every {every}: at least 0.9 × those asked for"
            ),
            reached: Figure(taken.median(), ""),
            peer: Some(("asked for".to_owned(), Figure(a_second as f64, ""))),
            limit: Limit::AtLeastTimesPeer(0.9),
        });
    }
    section.tables.push(table);
    Ok(section)
}

/// One run as a job; how it ended, and how many checkpoints there were in a second of it.
fn as_a_job(bench: &Bench, every: &str, arguments: &[String]) -> Result<(Outcome, f64)> {
    let place = bench.plan.place("frequent")?;
    let (store, directory) = (place.join("store"), bench.plan.place("frequent/program")?);
    let command_line = bench.programs.command_line("steady", &directory, arguments);
    let options = ["--every", every, "--keep", "2"];
    let job = bench.stillpoint.run_with(&store, JOB, &directory, &options, &command_line)?;
    let (began, outcome) = (Instant::now(), Program::adopt(job.pid, &directory)?.outcome()?);
    let life = began.elapsed();
    job.wait()?;
    let newest = bench.stillpoint.show(&store, JOB)?["id"].as_f64().unwrap_or_default();
    std::fs::remove_dir_all(&store)?;
    Ok((outcome, newest / life.as_secs_f64()))
}
