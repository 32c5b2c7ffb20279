//! Time from the command to a program that runs, and to one that answers.

use crate::bench::{Bench, size_name};
use crate::heartbeat::{Heartbeat, Load};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::Result;

const ABOUT: &str = "\
A program is checkpointed, killed and restored again and again, its checkpoint in the page cache. `runs` is the time from the
start of the restore command until the program runs, when the command returns; `answers` that until the program has
answered. `lazy` loads most of the memory behind the running program, `eager` loads all of it first. A lazy restore records what
the program waits for, of which the next one loads as much as it can before the program runs; `lazy, first` knows nothing of
that. At the end the program checks all of its memory.";

/// Sizes, MiB: that at which others are measured, one for eager loading, and one that is large.
const SIZES: [u64; 3] = [1024, 4096, 8192];

/// The way of a restore before which there was none.
const FIRST: &str = "lazy, first";

/// Ways to restore: name and options.
const WAYS: [(&str, &[&str]); 3] = [(FIRST, &[]), ("lazy", &[]), ("eager", &["--eager"])];

#[derive(Default)]
struct Measured {
    runs: Series,
    answers: Series,
}

/// Measures all sizes.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("restore", ABOUT);
    let columns = ["size, MiB", "by", "runs, ms", "least", "most", "answers, ms", "runs"];
    let mut table = Table::new("restore", "Medians.", &columns);
    let mut all: Vec<(u64, &str, Measured)> = Vec::new();
    for mebibytes in SIZES {
        if mebibytes * 2 > bench.plan.memory() {
            section.note(format!("{} is skipped: there is not enough memory", size_name(mebibytes)));
            continue;
        }
        let place = bench.plan.place("restore")?;
        let load = Load::new(mebibytes, 0);
        let mut program = Heartbeat::start(&bench.programs, &place.join("ours"), load, &[])?;
        let store = place.join("store");
        bench.stillpoint.kill(&mut program, &store)?;
        for (name, way) in WAYS {
            let mut measured = Measured::default();
            for run in 0..=bench.plan.runs {
                if name == FIRST {
                    bench.stillpoint.forget_touch_sets(&store)?;
                }
                let (runs, answers) = bench.stillpoint.bring_back(&program, &store, way)?;
                if run > 0 {
                    measured.runs.add_time(runs);
                    measured.answers.add_time(answers);
                }
                // What it waited for is recorded when all is there.
                bench.stillpoint.await_pagers()?;
                program.kill_restored()?;
            }
            all.push((mebibytes, name, measured));
        }
        bench.stillpoint.bring_back(&program, &store, &[])?;
        program.finish()?;
        // Other tools take their time in proportion: it is enough to see them up to the second size.
        for peer in bench.peers.iter().filter(|_| mebibytes < SIZES[2]) {
            let mut measured = Measured::default();
            let there = place.join(peer.name());
            for run in 0..=bench.plan.runs {
                let launcher = peer.launcher(&there)?;
                let mut program = Heartbeat::start(&bench.programs, &place.join("theirs"), load, &launcher)?;
                let (runs, answers) = peer.kill_and_restore(&mut program, &there)?;
                program.finish()?;
                if run > 0 {
                    measured.runs.add_time(runs);
                    measured.answers.add_time(answers);
                }
            }
            all.push((mebibytes, peer.name(), measured));
        }
    }
    for (mebibytes, name, Measured { runs, answers }) in &all {
        let numbers = [runs.median(), runs.least(), runs.most(), answers.median()].map(number).to_vec();
        let row = [vec![mebibytes.to_string(), (*name).to_owned()], numbers, vec![runs.count().to_string()]];
        table.row(row.concat());
    }
    section.tables.push(table);
    section.promises = promises(&all);
    Ok(section)
}

fn promises(all: &[(u64, &str, Measured)]) -> Vec<Promise> {
    let find = |size: u64, by: &str| all.iter().find(|(s, b, _)| (*s, *b) == (size, by)).map(|(_, _, m)| m);
    let runs = |size: u64, by: &str| find(size, by).map(|m| m.runs.median());
    let mut promises = Vec::new();
    for size in [SIZES[0], SIZES[2]] {
        let Some(lazy) = runs(size, "lazy") else { continue };
        let small = runs(SIZES[0], "lazy").filter(|_| size != SIZES[0]);
        let name = size_name(size);
        promises.push(Promise {
            what: format!("restore of {name} until the program runs: at most 15 ms"),
            reached: Figure(lazy, "ms"),
            peer: None,
            limit: Limit::AtMost(15.0),
        });
        promises.extend(small.map(|small| Promise {
            what: format!(
                "restore of {name} until the program runs: at most 1.3 × that of {}",
                size_name(SIZES[0])
            ),
            reached: Figure(lazy, "ms"),
            peer: Some((size_name(SIZES[0]), Figure(small, "ms"))),
            limit: Limit::TimesPeer(1.3),
        }));
        let ways = [("lazy", ""), (FIRST, ", without a touch set")].into_iter();
        let ways = ways.filter_map(|(way, how)| Some((runs(size, way)?, how, runs(size, "CRIU")?)));
        promises.extend(ways.map(|(lazy, how, criu)| Promise {
            what: format!("restore of {name} until the program runs{how}: at least 40 × faster than CRIU's"),
            reached: Figure(lazy, "ms"),
            peer: Some(("CRIU".into(), Figure(criu, "ms"))),
            limit: Limit::TimesPeer(1.0 / 40.0),
        }));
    }
    if let (Some(eager), Some(criu)) = (runs(SIZES[1], "eager"), runs(SIZES[1], "CRIU")) {
        promises.push(Promise {
            what: format!("eager restore of {}: faster than CRIU's", size_name(SIZES[1])),
            reached: Figure(eager, "ms"),
            peer: Some(("CRIU".into(), Figure(criu, "ms"))),
            limit: Limit::TimesPeer(1.0),
        });
    }
    promises
}
