//! What a program with much memory feels when a live twin of it is made, beside fork(2) of the same memory.

use crate::bench::{Bench, size_name};
use crate::heartbeat::{Heartbeat, Load};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::{Series, ms};
use anyhow::Result;
use std::time::Duration;

const ABOUT: &str = "\
A program of eight threads, of which one looks at the clock all the time and one writes random pages, gets a live twin \
(`stillpoint fork --isolated`), and in turn calls fork(2) itself, with a child that ends at once. `stopped` is for how long it stood \
still: the longest gap that the clock thread saw, without the time for which it was ready and waited for a processor (`gap` has that, \
too; the threads of the twin run on the same processors, and its memory is being loaded), or the time that the call took. fork(2) copies \
the thread that calls it; the others go on. `own` is the command's stopwatch, \
`made` the time until the twin runs. At the end the program checks its memory.";

const THREADS: u64 = 8;
const WRITES: u64 = 20_000;

#[derive(Default)]
struct Measured {
    gap: Series,
    stopped: Series,
    own: Series,
    made: Series,
}

/// Measures both ways at the size at which figures are promised.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("twins", ABOUT);
    let mebibytes = bench.base_size();
    let load = Load { mebibytes, writes: WRITES, threads: THREADS };
    let program = Heartbeat::start(&bench.programs, &bench.plan.place("twins")?.join("program"), load, &[])?;
    let store = bench.plan.place("twins-store")?;
    let (mut twin, mut plain) = (Measured::default(), Measured::default());
    for run in 0..=bench.plan.runs {
        program.longest_gap()?; // forget what came before
        let made = bench.stillpoint.twin(program.pid, &store)?;
        let gap = program.longest_gap()?;
        let took = program.fork()?;
        let gap_of_fork = program.longest_gap()?;
        if run > 0 {
            twin.gap.add_time(gap.seen);
            twin.stopped.add_time(gap.stopped);
            twin.own.add(made.pause_ms);
            twin.made.add_time(made.runs);
            plain.gap.add_time(gap_of_fork.seen);
            plain.stopped.add_time(took);
            plain.made.add_time(took);
        }
    }
    program.finish()?;
    let columns =
        ["by", "stopped, ms", "least", "most", "gap of another thread, ms", "own, ms", "made, ms", "runs"];
    let mut table = Table::new("twins", "Medians.", &columns);
    for (name, m) in [("twin", &twin), ("fork(2)", &plain)] {
        let numbers = [m.stopped.median(), m.stopped.least(), m.stopped.most(), m.gap.median()];
        let numbers = numbers.into_iter().chain([m.own.median(), m.made.median()]).map(number);
        let mut row = vec![name.to_owned()];
        row.extend(numbers.chain([m.stopped.count().to_string()]));
        table.row(row);
    }
    section.tables.push(table);
    let theirs = plain.stopped.median();
    section.promises.push(Promise {
        what: format!(
            "pause of a program of {} and {THREADS} threads when a twin of it is made: at most 1.3 × fork(2) + 0.5 ms",
            size_name(mebibytes)
        ),
        reached: Figure(twin.stopped.median(), "ms"),
        peer: Some(("fork(2)".to_owned(), Figure(theirs, "ms"))),
        limit: Limit::AtMost(1.3 * theirs + ms(Duration::from_micros(500))),
    });
    Ok(section)
}
