//! The experiments of FREM (Li and Lan, 2008): how long a restart takes with and without a touch set.

use crate::bench::Bench;
use crate::real::{self, Measured, Real, Saved, Setting, Ways};
use crate::report::{Chart, Curves, Scale, Section, Table, number};
use anyhow::{Context, Result};

const ABOUT: &str = "\
Programs that nobody here wrote are checkpointed in the middle of their work, killed, and restored: eagerly, lazily for the
first time, and lazily after that was recorded. `latency` is the time from the start of the restore command to the end of the
program's next unit of work: its answer to a request that was there before it ran, or the second line of output of one that
goes on by itself. `runs` is the time until its first instruction. Every result was compared with that of the undisturbed
program. A fast store is the page cache; a slow one is read at a limited rate.";

/// MiB that a program is asked to fill, and lookups of a unit of work.
const SIZE: u64 = 220;
const LOOKUPS: u64 = 1_000;
/// Restores of each kind from a slow store, which differ little.
const SLOW_RUNS: usize = 1;
/// The first moment that is shown of those, milliseconds.
const SOONEST: f64 = 0.1;
/// Programs whose waits are shown over time.
const SHOWN: [&str; 2] = ["redis", "python"];

/// Measures all programs that are installed.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("touchset", ABOUT);
    let slow = bench.plan.bandwidth.clone();
    let mut results = Results::new(&slow);
    let mut programs =
        Table::new("touchset-programs", "The programs.", &["program", "heap, and unit of work"]);
    for real in real::ALL {
        if let Some(lack) = real.lacks() {
            section.note(format!("{} is skipped: {lack}", real.name));
            continue;
        }
        // One that fails does not take the figures of the others with it.
        match measure(bench, real, &slow) {
            Ok(found) => {
                programs.row(vec![real.name.to_owned(), real.about.to_owned()]);
                results.add(real.name, &found);
            }
            Err(why) => section.note(format!("{} is skipped: {why:#}", real.name)),
        }
    }
    let Results { table, charts: [fast_chart, slow_chart], curves } = results;
    section.tables.extend([programs, table]);
    section.chart = Some(fast_chart);
    section.picture("slow", slow_chart.svg());
    section.picture("faults", curves.svg());
    Ok(section)
}

/// What was measured of a program.
struct Found {
    bytes: u64,
    undisturbed_ms: f64,
    fast: Ways,
    slow: Ways,
}

fn measure(bench: &Bench, real: &Real, slow: &str) -> Result<Found> {
    let place = bench.plan.place("touchset")?;
    let saved = Saved::make(bench, real, Setting::new(&place, SIZE, LOOKUPS))?;
    let fast = Ways::measure(&saved, bench.plan.runs, 1, &[]).context("fast store")?;
    let slow = Ways::measure(&saved, SLOW_RUNS, 0, &["--limit-bandwidth", slow]).context("slow store")?;
    Ok(Found { bytes: saved.bytes, undisturbed_ms: saved.undisturbed_ms, fast, slow })
}

/// Table and pictures.
struct Results {
    table: Table,
    charts: [Chart; 2],
    curves: Curves,
}

impl Results {
    fn new(slow: &str) -> Self {
        let columns = [
            "program",
            "store",
            "image, MiB",
            "touch set, MiB",
            "touch set, pages",
            "undisturbed unit, ms",
            "eager runs, ms",
            "eager latency, ms",
            "first runs, ms",
            "first latency, ms",
            "then runs, ms",
            "then latency, ms",
            "then, of eager",
            "then, of first",
            "first faults",
            "then faults",
            "runs",
        ];
        let chart =
            |store: &str| Chart::new(&format!("restart latency, {store} store"), "ms", Scale::Logarithmic);
        let curves = Curves::new("waits for pages since the first instruction, fast store", "ms", "waits");
        Results {
            table: Table::new("touchset", "Medians.", &columns),
            charts: [chart("fast"), chart(&format!("slow ({slow})"))],
            curves,
        }
    }

    fn add(&mut self, name: &str, found: &Found) {
        for ((store, ways), chart) in
            [("fast", &found.fast), ("slow", &found.slow)].into_iter().zip(&mut self.charts)
        {
            let mebibytes = |bytes: f64| bytes / f64::from(1 << 20);
            let touch_set = ways.touch_set.median();
            let latency = |m: &Measured| m.latency.median();
            let mut row = vec![name.to_owned(), store.to_owned()];
            let size = [mebibytes(found.bytes as f64), mebibytes(touch_set), touch_set / 4096.0];
            let times = ways.named().map(|(_, m)| [m.runs.median(), latency(m)]).concat();
            let then = latency(&ways.then);
            let rest = [
                then / latency(&ways.eager),
                then / latency(&ways.first),
                ways.first.faults.median(),
                ways.then.faults.median(),
            ];
            let numbers = size.into_iter().chain([found.undisturbed_ms]).chain(times).chain(rest);
            row.extend(numbers.map(number));
            row.push(ways.then.latency.count().to_string());
            self.table.row(row);
            for (way, m) in ways.named() {
                chart.bar(name, way, latency(m));
            }
        }
        if SHOWN.contains(&name) {
            for (way, m) in found.fast.named().into_iter().skip(1) {
                self.curves.line(&format!("{name}, {way}"), sums(&m.fault_times));
            }
        }
    }
}

/// How often it had been by each time. When the program began to run is known to a few tenths of a millisecond.
fn sums(times: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut sum = 0.0;
    let add = |&(time, count): &(f64, f64)| {
        sum += count;
        (time.max(SOONEST), sum)
    };
    times.iter().map(add).collect()
}
