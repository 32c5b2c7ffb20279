//! How long a program stands still: by size, write rate, number of threads, engine, and other tools.

use crate::bench::{Bench, Failures, size_name};
use crate::heartbeat::{Heartbeat, Load};
use crate::programs::Gap;
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::{Series, ms};
use crate::tools::Tool;
use anyhow::{Context, Result};
use std::time::Duration;

const ABOUT: &str = "\
A program of one thread that looks at the clock all the time and one that writes random pages is checkpointed again and
again, by each engine in turn. The gap is the longest that the clock thread saw; `stopped` leaves out the time for which
that thread was ready and waited for a processor, which the checkpoint's own work may have taken; `own` is the command's
stopwatch. `none` is the program left alone for a moment. Other tools are measured at one size and rate.";

/// Time for which the program is left alone, as a measure of what the machine does by itself.
const ALONE: Duration = Duration::from_millis(300);

/// The writer at which pauses are promised.
const WRITES: u64 = 20_000;
/// One that outruns tracking.
const MANY_WRITES: u64 = 200_000;
/// The program of many threads.
const THREADS: Load = Load { mebibytes: 64, writes: WRITES, threads: 64 };

/// What one engine did to one program.
#[derive(Default)]
struct Measured {
    gap: Series,
    stopped: Series,
    own: Series,
    wall: Series,
}

impl Measured {
    fn add(&mut self, gap: Gap, own_ms: f64, wall: Duration) {
        self.gap.add_time(gap.seen);
        self.stopped.add_time(gap.stopped);
        self.own.add(own_ms);
        self.wall.add_time(wall);
    }
}

/// One program, and what each side did to it, by name.
struct Case {
    load: Load,
    measured: Vec<(String, Measured)>,
    engines: Vec<&'static str>,
}

impl Case {
    fn of(&self, name: &str) -> Option<&Measured> {
        self.measured.iter().find(|(n, _)| n == name).map(|(_, m)| m)
    }

    fn gap(&self, name: &str) -> Option<f64> {
        self.of(name).map(|m| m.gap.median())
    }

    /// The engine with the shortest pause.
    fn best(&self) -> (&'static str, f64) {
        let gap = |name: &&'static str| (*name, self.gap(name).unwrap_or(f64::NAN));
        let all = self.engines.iter().map(gap).filter(|(_, gap)| !gap.is_nan());
        all.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(("none", f64::NAN))
    }

    /// What users get: `auto`, or before there is such a thing the engine with the shortest pause.
    fn usual(&self) -> (&'static str, f64) {
        self.gap("auto").map_or_else(|| self.best(), |gap| ("auto", gap))
    }

    fn name(&self) -> String {
        let size = size_name(self.load.mebibytes);
        match self.load.threads {
            64 => format!("64 threads, {size}"),
            _ => format!("{size}, {} writes/s", self.load.writes),
        }
    }
}

/// Measures all cases.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("pause", ABOUT);
    let loads = bench
        .plan
        .sizes
        .iter()
        .flat_map(|&mebibytes| bench.plan.writes.iter().map(move |&writes| Load::new(mebibytes, writes)));
    let mut cases = Vec::new();
    for load in loads.chain([THREADS]) {
        // A twin of the program and what the disk has not taken yet need room, too.
        if load.mebibytes * 3 / 2 > bench.plan.memory() {
            section.note(format!("{} is skipped: there is not enough memory", size_name(load.mebibytes)));
            continue;
        }
        let mut failures = Failures::default();
        cases.push(measure(bench, load, &mut failures).with_context(|| size_name(load.mebibytes))?);
        failures.tell(&mut section);
    }
    section.tables.push(table(&cases));
    section.chart = Some(chart(bench, &cases));
    section.promises = promises(bench, &cases);
    Ok(section)
}

/// Other tools stop a program in proportion to its memory: it is enough to see them at one size.
fn peers_for(bench: &Bench, load: Load) -> &[Box<dyn Tool>] {
    let shown =
        load.writes == WRITES && (load.mebibytes == bench.base_size() || load.threads == THREADS.threads);
    if shown { &bench.peers } else { &[] }
}

fn measure(bench: &Bench, load: Load, failures: &mut Failures) -> Result<Case> {
    let place = bench.plan.place("pause")?;
    let start = |name: &str, launcher: &[String]| {
        Heartbeat::start(&bench.programs, &place.join("programs").join(name), load, launcher)
    };
    let ours = start("ours", &[])?;
    let peers = peers_for(bench, load);
    let mut theirs = Vec::new();
    for peer in peers {
        let launcher = peer.launcher(&place.join(peer.name()))?;
        theirs.push(if launcher.is_empty() { None } else { Some(start(peer.name(), &launcher)?) });
    }
    let names = bench.engines.iter().map(|e| e.name).chain(peers.iter().map(|p| p.name())).chain(["none"]);
    let mut measured: Vec<_> = names.map(|name| (name.to_owned(), Measured::default())).collect();
    for run in 0..=bench.plan.runs {
        let mut results = Vec::new();
        for &engine in &bench.engines {
            ours.longest_gap()?; // forget what came before
            let cut = failures.checkpoint(bench, ours.pid, &place.join("store"), engine);
            let gap = ours.longest_gap()?;
            results.push(cut.map(|cut| (gap, cut.own_pause_ms(), cut.wall)));
        }
        for (peer, program) in peers.iter().zip(&theirs) {
            let target = program.as_ref().unwrap_or(&ours);
            target.longest_gap()?;
            let took = peer.checkpoint(target.pid, &place.join(peer.name()))?;
            results.push(Some((target.longest_gap()?, f64::NAN, took.durable)));
        }
        ours.longest_gap()?;
        std::thread::sleep(ALONE);
        results.push(Some((ours.longest_gap()?, f64::NAN, ALONE)));
        let warm_up = run == 0;
        for ((_, series), result) in measured.iter_mut().zip(results) {
            if let Some((gap, own, wall)) = result.filter(|_| !warm_up) {
                series.add(gap, own, wall);
            }
        }
    }
    ours.finish()?;
    for program in theirs.into_iter().flatten() {
        program.finish()?;
    }
    Ok(Case { load, measured, engines: bench.engines.iter().map(|e| e.name).collect() })
}

fn table(cases: &[Case]) -> Table {
    let columns = [
        "size, MiB",
        "threads",
        "writes/s",
        "by",
        "gap, ms",
        "least",
        "most",
        "stopped, ms",
        "own, ms",
        "durable, ms",
        "runs",
    ];
    let mut table = Table::new("pause", "Medians.", &columns);
    for case in cases {
        for (name, m) in &case.measured {
            let Load { mebibytes, writes, threads } = case.load;
            let wall = if name == "none" { f64::NAN } else { m.wall.median() };
            let numbers =
                [m.gap.median(), m.gap.least(), m.gap.most(), m.stopped.median(), m.own.median(), wall];
            let mut row = vec![mebibytes.to_string(), threads.to_string(), writes.to_string(), name.clone()];
            row.extend(numbers.map(number));
            row.push(m.gap.count().to_string());
            table.row(row);
        }
    }
    table
}

/// One size at all rates and one rate at all sizes: all of it would be too wide to read.
fn chart(bench: &Bench, cases: &[Case]) -> Chart {
    let mut chart = Chart::new("Pause as the program saw it", "ms", Scale::Logarithmic);
    let shown = |case: &&Case| case.load.writes == WRITES || case.load.mebibytes == bench.base_size();
    for case in cases.iter().filter(shown) {
        for (name, m) in &case.measured {
            chart.bar(&case.name(), name, m.gap.median());
        }
    }
    chart
}

fn promises(bench: &Bench, cases: &[Case]) -> Vec<Promise> {
    let find = |mebibytes: u64, writes: u64| {
        cases.iter().find(|c| (c.load.mebibytes, c.load.writes, c.load.threads) == (mebibytes, writes, 3))
    };
    let base = bench.base_size();
    let mut promises = Vec::new();
    if let Some(case) = find(base, WRITES) {
        promises.extend(at_most(case, 1.0));
        promises.extend(against_peers(bench, case));
        promises.extend(alone(case));
        let larger = bench.plan.sizes.iter().filter(|&&s| s > base).filter_map(|&s| find(s, WRITES));
        promises.extend(larger.map(|larger| by_size(case, larger)));
    }
    promises.extend(find(base, MANY_WRITES).into_iter().flat_map(|case| at_most(case, 5.0)));
    let threads = cases.iter().find(|c| c.load.threads == THREADS.threads);
    promises.extend(threads.into_iter().flat_map(|case| at_most(case, 2.0)));
    promises
}

/// A pause of a number of milliseconds, beside that of stop-and-copy: as it was seen, and without what is the scheduler's.
fn at_most(case: &Case, most: f64) -> [Promise; 2] {
    let (engine, _) = case.usual();
    let row = |how: &str, of: fn(&Measured) -> &Series| {
        let median = |name: &str| Some(of(case.of(name)?).median());
        let stop = median("stop").filter(|_| engine != "stop");
        Promise {
            what: format!("pause of {} ({engine}): at most {most} ms{how}", case.name()),
            reached: Figure(median(engine).unwrap_or(f64::NAN), "ms"),
            peer: stop.map(|pause| ("stop".into(), Figure(pause, "ms"))),
            limit: Limit::AtMost(most),
        }
    };
    [row("", |m| &m.gap), row(", not counting waits for a processor", |m| &m.stopped)]
}

/// Against tools in use; one that is not here has its row, too, without a verdict.
fn against_peers(bench: &Bench, case: &Case) -> Vec<Promise> {
    let (engine, gap) = case.usual();
    let row = |name: &str, theirs: Option<f64>| {
        let shown = if theirs.is_some() { name.to_owned() } else { format!("{name} (not here)") };
        Promise {
            what: format!("pause of {} ({engine}): at least 1,000 × shorter than {name}'s", case.name()),
            reached: Figure(gap, "ms"),
            peer: Some((shown, Figure(theirs.unwrap_or(f64::NAN), "ms"))),
            limit: if theirs.is_some() { Limit::TimesPeer(0.001) } else { Limit::None },
        }
    };
    let measured = bench.peers.iter().map(|p| row(p.name(), case.gap(p.name())));
    measured.chain(bench.absent_peers.iter().map(|name| row(name, None))).collect()
}

/// How much of the gap the machine makes by itself, and what the command's own stopwatch says.
fn alone(case: &Case) -> Option<Promise> {
    let (engine, _) = case.usual();
    let measured = case.of(engine)?;
    Some(Promise {
        what: format!(
            "pause of {} ({engine}) by the command's own stopwatch; the peer is the program left alone for {} ms",
            case.name(),
            ms(ALONE)
        ),
        reached: Figure(measured.own.median(), "ms"),
        peer: Some(("none".into(), Figure(case.gap("none")?, "ms"))),
        limit: Limit::None,
    })
}

fn by_size(base: &Case, larger: &Case) -> Promise {
    let ((_, small), (engine, large)) = (base.best(), larger.best());
    Promise {
        what: format!(
            "pause of {}, best engine ({engine}): at most 1.5 × that of {}",
            larger.name(),
            size_name(base.load.mebibytes)
        ),
        reached: Figure(large, "ms"),
        peer: Some((size_name(base.load.mebibytes), Figure(small, "ms"))),
        limit: Limit::TimesPeer(1.5),
    }
}
