//! Time to a durable full checkpoint, against a raw direct write of the same bytes.

use crate::bench::{Bench, Failures, size_name};
use crate::heartbeat::{Heartbeat, Load};
use crate::raw;
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result};

const ABOUT: &str = "\
A running program with a writer of 20,000 random pages per second is checkpointed in full by each engine, each time
followed by a raw write of the same number of bytes: direct, in large blocks, four in flight, synced. The time is that of
the whole command, which returns when the checkpoint is durable.";

const WRITES: u64 = 20_000;

#[derive(Default)]
struct Measured {
    wall: Series,
    bytes: Series,
    raw: Series,
}

/// Measures one size.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("durable", ABOUT);
    let mebibytes = bench.base_size();
    let place = bench.plan.place("durable")?;
    let program =
        Heartbeat::start(&bench.programs, &place.join("program"), Load::new(mebibytes, WRITES), &[])?;
    let source = raw::Source::new(mebibytes << 20);
    let mut ours: Vec<_> = bench.engines.iter().map(|&e| (e, Measured::default())).collect();
    let mut failures = Failures::default();
    for run in 0..=bench.plan.runs {
        for (engine, measured) in &mut ours {
            let store = place.join("store");
            let Some(cut) = failures.checkpoint(bench, program.pid, &store, *engine) else { continue };
            let raw = source.write(&place.join("raw"), cut.written() as u64)?;
            if run > 0 {
                measured.wall.add_time(cut.wall);
                measured.bytes.add(cut.written());
                measured.raw.add_time(raw);
            }
        }
    }
    program.finish()?;
    failures.tell(&mut section);
    let peers = measure_peers(bench, mebibytes)?;
    let usual = bench.default_engine();
    let what = format!("durable full checkpoint of {} ({})", size_name(mebibytes), usual.name);
    let (_, reached) = ours.iter().find(|(e, _)| *e == usual).context("the usual engine")?;
    let reached_ms = Figure(reached.wall.median(), "ms");
    section.promises.push(Promise {
        what: format!("{what}: at most 1.2 × a raw direct write"),
        reached: reached_ms,
        peer: Some(("raw write".into(), Figure(reached.raw.median(), "ms"))),
        limit: Limit::TimesPeer(1.2),
    });
    for (name, done, _) in &peers {
        section.promises.push(Promise {
            what: format!("{what}: faster than {name}'s, which is not durable yet"),
            reached: reached_ms,
            peer: Some((name.clone(), Figure(done.median(), "ms"))),
            limit: Limit::TimesPeer(1.0),
        });
    }
    let columns = ["by", "durable, ms", "least", "most", "written, MiB", "raw write, ms", "ratio", "runs"];
    let mut table = Table::new("durable", &format!("{}, medians.", size_name(mebibytes)), &columns);
    let mut chart = Chart::new("Time to a durable checkpoint", "ms", Scale::Linear);
    for (engine, m) in &ours {
        let (wall, raw) = (m.wall.median(), m.raw.median());
        let numbers = [wall, m.wall.least(), m.wall.most(), m.bytes.median() / 1048576.0, raw, wall / raw];
        table.row(
            [vec![engine.name.into()], numbers.map(number).to_vec(), vec![m.wall.count().to_string()]]
                .concat(),
        );
        chart.bar(engine.name, "checkpoint", wall);
        chart.bar(engine.name, "raw write", raw);
    }
    for (name, _, durable) in &peers {
        let numbers = [durable.median(), durable.least(), durable.most(), f64::NAN, f64::NAN, f64::NAN];
        table.row(
            [vec![name.clone()], numbers.map(number).to_vec(), vec![durable.count().to_string()]].concat(),
        );
        chart.bar(name, "checkpoint", durable.median());
    }
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(section)
}

/// Times of the other tools: done, and durable.
fn measure_peers(bench: &Bench, mebibytes: u64) -> Result<Vec<(String, Series, Series)>> {
    let mut measured = Vec::new();
    for peer in &bench.peers {
        let place = bench.plan.place("durable")?.join(peer.name());
        let launcher = peer.launcher(&place)?;
        let load = Load::new(mebibytes, WRITES);
        let program = Heartbeat::start(&bench.programs, &place.join("program"), load, &launcher)?;
        let (mut done, mut durable) = (Series::default(), Series::default());
        for run in 0..=bench.plan.runs {
            let took = peer.checkpoint(program.pid, &place)?;
            if run > 0 {
                done.add_time(took.done);
                durable.add_time(took.durable);
            }
        }
        program.finish()?;
        measured.push((peer.name().to_owned(), done, durable));
    }
    Ok(measured)
}
