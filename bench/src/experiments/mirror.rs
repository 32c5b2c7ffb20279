//! Writers beside checkpoints of mirrored memory: bursts to cold pages, a periodic task, and the cycle itself.

use crate::bench::Bench;
use crate::mirrored::{Builder, numbers, said};
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

const ABOUT: &str = "\
The writing thread has a real-time priority and its memory is locked, where that is allowed. A burst is 16,384 writes, one to
each page of 64 MiB: plainly, in a mirror without and during a checkpoint, in a mirror that is detached by remapping, and with
copy-on-write in three ways. The periodic task writes to random places of 24 MiB each 150 ms (shortened by `BENCH_TIME_SCALE`) and each 1 ms, without
checkpoints and while one follows the other; periods are started by an absolute timer.";

const BURSTS: [&str; 7] = ["plain", "attached", "checkpoint", "remap", "mprotect", "userfaultfd", "fork"];

/// Measures all three.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("mirror", ABOUT);
    let builder = Builder::new(bench, "mirror")?;
    let program = builder.build("realtime", Some(&["--globals=none", "--heap=0"]), None, &[], &[])?;
    bursts(bench, &builder, &program, &mut section).context("bursts")?;
    cycles(bench, &builder, &program, &mut section).context("cycles")?;
    // Microseconds and samples; the paper's longer period is shortened as its other intervals are (`BENCH_TIME_SCALE`).
    for (period, samples) in [(1_000, 4_000), (150_000 / bench.plan.time_scale, 2_000)] {
        periodic(&builder, &program, (period, samples), &mut section).context("periodic task")?;
    }
    Ok(section)
}

fn bursts(bench: &Bench, builder: &Builder, program: &Path, section: &mut Section) -> Result<()> {
    let mut all = vec![Series::default(); BURSTS.len()];
    let mut high = true;
    for _ in 0..bench.plan.runs {
        for (mode, series) in BURSTS.iter().zip(&mut all) {
            let said = said(Command::new(program).args(["writes", mode, "5"]).arg(builder.file()))?;
            numbers(&said, "ms")?.into_iter().for_each(|ms| series.add(ms));
            high &= numbers(&said, "fifo")? == [1.0] && numbers(&said, "locked")? == [1.0];
            if matches!(*mode, "checkpoint" | "remap") {
                ensure!(
                    numbers(&said, "phase")?.iter().all(|p| *p == 2.0),
                    "a checkpoint was over before the writes"
                );
            }
        }
    }
    if !high {
        section.note("Real-time priorities or locked memory are not allowed here: the figures are those of an ordinary thread.");
    }
    let columns = ["burst", "median, ms", "most, ms", "to that without a checkpoint"];
    let mut table = Table::new("mirror-bursts", "16,384 writes, one to each page of 64 MiB.", &columns);
    let mut chart = Chart::new("16,384 writes, one to each page", "ms", Scale::Logarithmic);
    let base = all[1].median();
    for (mode, series) in BURSTS.iter().zip(&all) {
        let [median, most, ratio] = [series.median(), series.most(), series.median() / base].map(number);
        table.row(vec![(*mode).into(), median, most, ratio]);
        chart.bar(mode, "median", series.median());
    }
    section.promises.push(Promise {
        what: "burst of 16,384 writes during a checkpoint of the mirror: at most 1.1 × that without one"
            .into(),
        reached: Figure(all[2].median(), "ms"),
        peer: Some(("no checkpoint".into(), Figure(base, "ms"))),
        limit: Limit::TimesPeer(1.1),
    });
    for i in 4..BURSTS.len() {
        section.promises.push(Promise {
            what: format!(
                "burst of 16,384 writes: {} at least 100 × slower than during a checkpoint of the mirror",
                BURSTS[i]
            ),
            reached: Figure(all[i].median(), "ms"),
            peer: Some(("mirror".into(), Figure(all[2].median(), "ms"))),
            limit: Limit::AtLeastTimesPeer(100.0),
        });
    }
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(())
}

fn cycles(bench: &Bench, builder: &Builder, program: &Path, section: &mut Section) -> Result<()> {
    let runs = (2 * bench.plan.runs).to_string();
    let said = said(Command::new(program).args(["cycle", &runs]).arg(builder.file()))?;
    let series = |key: &str| -> Result<Series> {
        let mut series = Series::default();
        numbers(&said, key)?.into_iter().for_each(|v| series.add(v));
        Ok(series)
    };
    let columns = ["cycle of 64 MiB", "median, ms"];
    let mut table = Table::new("mirror-cycles", "From the request until it is durable.", &columns);
    for (name, key) in [
        ("all pages dirty", "full"),
        ("1 % dirty", "little"),
        ("of these: until the shadow stands still", "cut"),
        ("writing", "write"),
        ("resynchronising", "resync"),
    ] {
        table.row(vec![name.into(), number(series(key)?.median())]);
    }
    section.promises.push(Promise {
        what: "checkpoint cycle of 64 MiB with 1 % dirty: at most 10 % of a full one".into(),
        reached: Figure(series("little")?.median(), "ms"),
        peer: Some(("full".into(), Figure(series("full")?.median(), "ms"))),
        limit: Limit::TimesPeer(0.1),
    });
    section.tables.push(table);
    Ok(())
}

fn periodic(
    builder: &Builder,
    program: &Path,
    (period, samples): (u64, usize),
    section: &mut Section,
) -> Result<()> {
    let title = format!("A task each {} ms, {samples} samples, µs.", period as f64 / 1e3);
    let columns = ["side", "what", "50 %", "90 %", "99 %", "99.9 %", "most", "checkpoints"];
    let mut table = Table::new(&format!("mirror-periodic-{period}"), &title, &columns);
    let mut tails = Vec::new();
    let rounds = (samples / 500).max(1);
    for mode in ["plain", "attached", "checkpoint"] {
        let arguments =
            ["periodic", mode, &period.to_string(), &(rounds * 500).to_string()].map(str::to_owned);
        let said = said(Command::new(program).args(arguments).arg(builder.file()))?;
        let count = said.get("checkpoints").and_then(|c| c.first()).cloned().unwrap_or("–".into());
        for what in ["time", "late"] {
            let values: Vec<f64> = ["50", "90", "99", "99.9", "max"]
                .iter()
                .map(|p| Ok(numbers(&said, &format!("{what}_{p}"))?[0]))
                .collect::<Result<_>>()?;
            let name = if what == "time" { "task's time" } else { "wake-up latency" };
            let cells: Vec<String> = values.iter().copied().map(number).collect();
            table.row([&[mode.into(), name.into()][..], &cells, std::slice::from_ref(&count)].concat());
            tails.push(values[3]);
        }
    }
    let every = format!("task each {} ms", period as f64 / 1e3);
    section.promises.push(Promise {
        what: format!(
            "{every}: 99.9th percentile of its time with continuous checkpoints: at most 1.1 × without"
        ),
        reached: Figure(tails[4], "µs"),
        peer: Some(("no checkpoints".into(), Figure(tails[2], "µs"))),
        limit: Limit::TimesPeer(1.1),
    });
    section.promises.push(Promise {
        what: format!("{every}: 99.9th percentile of its wake-up latency: at most 50 µs more than without"),
        reached: Figure(tails[5] - tails[3], "µs"),
        peer: None,
        limit: Limit::AtMost(50.0),
    });
    section.tables.push(table);
    Ok(())
}
