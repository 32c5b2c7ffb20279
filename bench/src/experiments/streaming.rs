//! How fast the rest of a program's memory comes behind it, against the kernel call that puts it in.

use crate::bench::Bench;
use crate::real::{Real, Saved, Setting};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result};
use stillpoint_linux::filling;

const ABOUT: &str = "\
A program that does nothing is restored lazily, its checkpoint in the page cache: `streaming` is the rate at which the rest of
its memory comes behind it, which is read, checked, and put in by `UFFDIO_COPY`. `UFFDIO_COPY` is the rate at which that call
alone does it in this machine: as many bytes in the same order and in pieces of the same length, from memory that is not in a
processor's cache either, by as many threads as there are processors. `eager` is the rate of a restore that loads all first.";

/// MiB of the program's heap.
const SIZE: u64 = 2000;
/// Bytes that are put in at a time, as page servers do.
const AT_A_TIME: usize = 64 << 10;

/// Measures both sides in turn.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("streaming", ABOUT);
    let columns = ["way", "MiB", "MiB/s", "least", "most", "runs"];
    let mut table = Table::new("streaming", "Medians.", &columns);
    let real = Real::named("redis")?;
    if let Some(lack) = real.lacks() {
        section.note(format!("This is skipped: {lack}"));
        return Ok(section);
    }
    let place = bench.plan.place("streaming")?;
    // A single lookup: it has to run to be seen, and is idle then.
    let saved = Saved::make(bench, real, Setting::new(&place, SIZE, 1))?;
    let threads = std::thread::available_parallelism()?.get();
    let mebibytes = |pages: f64| pages / 256.0;
    let [mut streaming, mut raw, mut eager] = [Series::default(), Series::default(), Series::default()];
    let (mut came, mut all) = (f64::NAN, f64::NAN);
    for run in 0..=bench.plan.runs {
        saved.forget()?;
        let lazily = saved.restore(&[])?;
        let eagerly = saved.restore(&["--eager"])?;
        came = mebibytes(lazily.number("prefetched_pages"));
        all = mebibytes(lazily.number("pages"));
        let took = filling::time((came as usize) << 20, AT_A_TIME, threads).context("UFFDIO_COPY")?;
        if run > 0 {
            let ms = lazily.number("loaded_ms") - lazily.number("running_ms");
            streaming.add(came / ms * 1e3);
            raw.add(came.floor() / took.as_secs_f64());
            eager.add(all / eagerly.number("running_ms") * 1e3);
        }
    }
    for (way, size, rate) in
        [("streaming", came, &streaming), ("UFFDIO_COPY", came, &raw), ("eager", all, &eager)]
    {
        let numbers = [size, rate.median(), rate.least(), rate.most()].map(number).to_vec();
        table.row([vec![way.to_owned()], numbers, vec![rate.count().to_string()]].concat());
    }
    section.tables.push(table);
    section.promises.push(Promise {
        what: "streaming the rest of a program's memory: at least 80 % of what UFFDIO_COPY can do".into(),
        reached: Figure(streaming.median(), "MiB/s"),
        peer: Some(("UFFDIO_COPY".into(), Figure(raw.median(), "MiB/s"))),
        limit: Limit::AtLeastTimesPeer(0.8),
    });
    Ok(section)
}
