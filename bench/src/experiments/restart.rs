//! Time from the first instruction of a restored program to the end of its next unit of work.

use crate::bench::Bench;
use crate::real::{Real, Saved, Setting, Ways};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use anyhow::{Context, Result};

const ABOUT: &str = "\
Programs with heaps of about 1 GiB are checkpointed and killed, their checkpoint in the page cache, and restored; at once a
client asks for a unit of work. `work` is the time from the program's first instruction to the end of that work: restored
eagerly, lazily for the first time, and lazily after that was recorded. `faults` is how often the program waited for a page.
The result is always that of the undisturbed program.";

/// MiB of the heaps.
const SIZE: u64 = 1000;
/// Programs, and lookups of a unit of work.
const PROGRAMS: [(&str, u64); 3] = [("redis", 1_000), ("java", 10_000), ("python", 10_000)];

/// Measures all programs that are installed.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("restart", ABOUT);
    let columns =
        ["program", "restored", "runs, ms", "work, ms", "least", "most", "of eager", "faults", "runs"];
    let mut table = Table::new("restart", "Medians.", &columns);
    for (name, lookups) in PROGRAMS {
        let real = Real::named(name)?;
        if let Some(lack) = real.lacks() {
            section.note(format!("{name} is skipped: {lack}"));
            continue;
        }
        section.note(format!("{name}: {}; {lookups} a unit", real.about));
        let place = bench.plan.place("restart")?;
        let saved = Saved::make(bench, real, Setting::new(&place, SIZE, lookups)).context(name)?;
        let ways = Ways::measure(&saved, bench.plan.runs, 1, &[]).context(name)?;
        let eager = ways.eager.work.median();
        for (way, m) in ways.named() {
            let numbers = [m.runs.median(), m.work.median(), m.work.least(), m.work.most()];
            let mut row = vec![name.to_owned(), way.to_owned()];
            row.extend(numbers.into_iter().chain([m.work.median() / eager, m.faults.median()]).map(number));
            row.push(m.work.count().to_string());
            table.row(row);
        }
        section.promises.push(Promise {
            what: format!(
                "next unit of work of {name} after a restore that was recorded: at most 1.2 × eager"
            ),
            reached: Figure(ways.then.work.median(), "ms"),
            peer: Some(("eager".into(), Figure(eager, "ms"))),
            limit: Limit::TimesPeer(1.2),
        });
        section.promises.push(Promise {
            what: format!(
                "{name}: waits for pages after a restore that was recorded: at most 10 % of the first"
            ),
            reached: Figure(ways.then.faults.median(), ""),
            peer: Some(("first".into(), Figure(ways.first.faults.median(), ""))),
            limit: Limit::TimesPeer(0.1),
        });
    }
    section.tables.push(table);
    Ok(section)
}
