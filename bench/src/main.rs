//! Measures what a user of a checkpointed program sees, and writes it to `bench/results`.
//!
//! Rates on a shared machine mean nothing alone: each figure is a ratio of medians, ours and the other side measured in
//! turn in one run. The pause is the longest gap that the program itself saw (see [`heartbeat`]), not our stopwatch.
//!
//! Environment: `BENCH_SIZES` (MiB, `64,1024,4096`), `BENCH_RUNS` (5), `BENCH_WRITES` (page writes per second, 20000),
//! `BENCH_DIRECTORY` (where stores and raw files go), `STILLPOINT_BIN` (the command).
#![forbid(unsafe_code)]

mod heartbeat;
mod raw;
mod report;
mod tools;

use anyhow::{Context, Result};
use heartbeat::Heartbeat;
use report::{Report, Row, Series};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tools::{Criu, Dmtcp, Stillpoint, Tool};

/// What is measured, and how often.
struct Plan {
    sizes: Vec<u64>,
    runs: usize,
    writes: u64,
    directory: PathBuf,
}

impl Plan {
    fn from_environment() -> Result<Self> {
        let var = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
        let sizes = var("BENCH_SIZES", "64,1024,4096");
        let sizes =
            sizes.split(',').map(|s| s.trim().parse().context("BENCH_SIZES")).collect::<Result<_>>()?;
        let runs = var("BENCH_RUNS", "5").parse().context("BENCH_RUNS")?;
        let writes = var("BENCH_WRITES", "20000").parse().context("BENCH_WRITES")?;
        // Beside this program: the build directory is on a disk, where /tmp may be memory.
        let beside = std::env::current_exe()?.parent().unwrap_or(Path::new(".")).to_owned();
        let base = std::env::var_os("BENCH_DIRECTORY").map_or(beside, PathBuf::from);
        let directory = base.canonicalize()?.join(format!(".bench.{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        Ok(Plan { sizes, runs, writes, directory })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|a| a == "heartbeat") {
        return heartbeat::run(&arguments[2..]);
    }
    let plan = Plan::from_environment()?;
    let mut report = Report::new(&plan.directory)?;
    let stillpoint = Stillpoint::find()?;
    let mut peers: Vec<Box<dyn Tool>> = Vec::new();
    for peer in [Criu::find(), Dmtcp::find()] {
        match peer {
            Ok(tool) => peers.push(tool),
            Err(why) => report.note(&format!("{why:#}")),
        }
    }
    for &mebibytes in &plan.sizes {
        checkpoints(&plan, mebibytes, &stillpoint, &peers, &mut report)
            .with_context(|| format!("checkpoints of {mebibytes} MiB"))?;
    }
    let restored =
        plan.sizes.iter().copied().find(|&s| s >= 1024).unwrap_or(plan.sizes[plan.sizes.len() - 1]);
    restores(&plan, restored, &stillpoint, &peers, &mut report)
        .with_context(|| format!("restores of {restored} MiB"))?;
    report.write(Path::new("bench/results"))
}

/// Pause and time to a durable checkpoint, each in turn with a raw write of the same bytes and with the peers.
fn checkpoints(
    plan: &Plan,
    mebibytes: u64,
    stillpoint: &Stillpoint,
    peers: &[Box<dyn Tool>],
    report: &mut Report,
) -> Result<()> {
    let directory = plan.directory.join(format!("{mebibytes}"));
    let mut ours = Heartbeat::start(&directory.join("ours"), mebibytes, plan.writes, &[])?;
    let mut theirs = Vec::new();
    let (mut wall, mut pause, mut own, mut raw) =
        (Series::default(), Series::default(), Series::default(), Series::default());
    let mut peer_series = Vec::new();
    for peer in peers {
        let launcher = peer.launcher(&directory.join(peer.name()))?;
        theirs.push(if launcher.is_empty() {
            None
        } else {
            Some(Heartbeat::start(
                &directory.join(peer.name()).join("program"),
                mebibytes,
                plan.writes,
                &launcher,
            )?)
        });
        peer_series.push((Series::default(), Series::default()));
    }
    let source = raw::Source::new(mebibytes << 20);
    for run in 0..=plan.runs {
        ours.longest_gap()?; // forget what came before
        let cut = stillpoint.checkpoint(ours.pid, &directory.join("store"))?;
        let gap = ours.longest_gap()?;
        let written = source.write(&directory.join("raw"), cut.bytes)?;
        let warm_up = run == 0;
        if !warm_up {
            wall.add(cut.wall);
            pause.add(gap);
            own.add(Duration::from_secs_f64(cut.own_pause_ms / 1e3));
            raw.add(written);
        }
        for ((peer, program), (peer_pause, peer_wall)) in peers.iter().zip(&mut theirs).zip(&mut peer_series)
        {
            let target = program.as_mut().unwrap_or(&mut ours);
            target.longest_gap()?;
            let took = peer.checkpoint(target.pid, &directory.join(peer.name()))?;
            let gap = target.longest_gap()?;
            if !warm_up {
                peer_wall.add(took);
                peer_pause.add(gap);
            }
        }
    }
    ours.finish()?;
    for program in theirs.into_iter().flatten() {
        program.finish()?;
    }
    let what = format!("{mebibytes} MiB");
    report.row(Row {
        promise: format!("durable checkpoint of {what} in at most 1.25 × a raw direct write"),
        reached: wall.clone(),
        peer: Some(("raw write".into(), raw)),
        most: Some(1.25),
    });
    if peers.is_empty() {
        report.row(Row {
            promise: format!("pause of {what}"),
            reached: pause.clone(),
            peer: None,
            most: None,
        });
    }
    for (peer, (peer_pause, peer_wall)) in peers.iter().zip(peer_series) {
        let name = peer.name().to_owned();
        report.row(Row {
            promise: format!("pause of {what}"),
            reached: pause.clone(),
            peer: Some((name.clone(), peer_pause)),
            most: None,
        });
        report.row(Row {
            promise: format!("checkpoint of {what}"),
            reached: wall.clone(),
            peer: Some((name, peer_wall)),
            most: None,
        });
    }
    report.row(Row {
        promise: format!("pause of {what} by our own stopwatch"),
        reached: own,
        peer: None,
        most: None,
    });
    report.bar(&what, &pause, &wall);
    Ok(())
}

/// Time from the command to a program that answers, all memory loaded.
fn restores(
    plan: &Plan,
    mebibytes: u64,
    stillpoint: &Stillpoint,
    peers: &[Box<dyn Tool>],
    report: &mut Report,
) -> Result<()> {
    let directory = plan.directory.join("restore");
    let mut reached = Series::default();
    let mut peer_series: Vec<Series> = peers.iter().map(|_| Series::default()).collect();
    for run in 0..=plan.runs {
        let mut program = Heartbeat::start(&directory.join("ours"), mebibytes, 0, &[])?;
        let took = stillpoint.kill_and_restore(&mut program, &directory.join("store"))?;
        program.finish()?;
        if run > 0 {
            reached.add(took);
        }
        for (peer, series) in peers.iter().zip(&mut peer_series) {
            let place = directory.join(peer.name());
            let mut program =
                Heartbeat::start(&directory.join("theirs"), mebibytes, 0, &peer.launcher(&place)?)?;
            let took = peer.kill_and_restore(&mut program, &place)?;
            program.finish()?;
            if run > 0 {
                series.add(took);
            }
        }
    }
    let what = format!("eager restore of {mebibytes} MiB");
    if peers.is_empty() {
        report.row(Row { promise: what.clone(), reached: reached.clone(), peer: None, most: None });
    }
    for (peer, series) in peers.iter().zip(peer_series) {
        report.row(Row {
            promise: format!("{what} not slower than {}", peer.name()),
            reached: reached.clone(),
            peer: Some((peer.name().to_owned(), series)),
            most: Some(1.0),
        });
    }
    Ok(())
}
