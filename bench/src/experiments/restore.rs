//! Time from the command to a program that answers.

use crate::bench::{Bench, size_name};
use crate::heartbeat::{Heartbeat, Load};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::Result;

const ABOUT: &str = "\
A program is checkpointed, killed and restored, all of its memory loaded; the time is from the restore command's start to
the program's first answer. At the end the program checks all of its memory.";

/// Measures one size.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("restore", ABOUT);
    let mebibytes = bench.base_size();
    let place = bench.plan.place("restore")?;
    let load = Load::new(mebibytes, 0);
    let mut ours = Series::default();
    let mut theirs: Vec<Series> = bench.peers.iter().map(|_| Series::default()).collect();
    for run in 0..=bench.plan.runs {
        let mut program = Heartbeat::start(&bench.programs, &place.join("ours"), load, &[])?;
        let took = bench.stillpoint.kill_and_restore(&mut program, &place.join("store"))?;
        program.finish()?;
        if run > 0 {
            ours.add_time(took);
        }
        for (peer, series) in bench.peers.iter().zip(&mut theirs) {
            let there = place.join(peer.name());
            let launcher = peer.launcher(&there)?;
            let mut program = Heartbeat::start(&bench.programs, &place.join("theirs"), load, &launcher)?;
            let took = peer.kill_and_restore(&mut program, &there)?;
            program.finish()?;
            if run > 0 {
                series.add_time(took);
            }
        }
    }
    let mut table = Table::new("restore", "Medians.", &["size, MiB", "by", "ms", "least", "most", "runs"]);
    let names = std::iter::once("stillpoint").chain(bench.peers.iter().map(|p| p.name()));
    for (name, series) in names.zip(std::iter::once(&ours).chain(&theirs)) {
        let numbers = [series.median(), series.least(), series.most()].map(number).to_vec();
        let row = [vec![mebibytes.to_string(), name.to_owned()], numbers, vec![series.count().to_string()]];
        table.row(row.concat());
    }
    section.tables.push(table);
    let row = |peer| Promise {
        what: format!("eager restore of {}", size_name(mebibytes)),
        reached: Figure(ours.median(), "ms"),
        peer,
        limit: Limit::None,
    };
    if theirs.is_empty() {
        section.promises.push(row(None));
    }
    for (peer, series) in bench.peers.iter().zip(&theirs) {
        section.promises.push(row(Some((peer.name().to_owned(), Figure(series.median(), "ms")))));
    }
    Ok(section)
}
