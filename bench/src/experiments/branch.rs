//! What a program waits for that takes snapshots of itself and goes back to them, beside copying its memory by hand.

use crate::bench::Bench;
use crate::mirrored::{numbers, said};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

const ABOUT: &str = "\
A program with a vector of 64 MiB, one thread that measures and others that wake every millisecond, links the library \
(`sp_snapshot`, `sp_rollback`). `copy` is a memcpy(3) of the vector to memory that is there, `first` its first snapshot, `again` \
another one after 16 random pages were changed, `back` a rollback after 100 were, with all that the caller waits for: to the answer \
of the process that does the work, and back.";

const THREADS: [u64; 3] = [2, 4, 8];

/// Measures all of it with each number of threads.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("branch", ABOUT);
    let place = bench.plan.place("branch")?;
    let program = place.join("vector");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = std::env::current_exe()?.with_file_name("libstillpoint.so");
    ensure!(library.exists(), "{} is not built", library.display());
    let folder = library.parent().unwrap_or(Path::new("/"));
    let mut build = Command::new("cc");
    build.args(["-O2", "-pthread", "-I"]).arg(root.join("crates/library/include")).arg("-o").arg(&program);
    build.arg(root.join("bench/branch/vector.c")).arg(&library);
    build.arg(format!("-Wl,-rpath,{}", folder.display()));
    ensure!(build.status().context("cc")?.success(), "bench/branch/vector.c does not build");
    let columns =
        ["threads", "copy, ms", "first, ms", "again, ms", "copy / first", "copy / again", "back, ms"];
    let mut table = Table::new("branch", "Medians.", &columns);
    for threads in THREADS {
        let mut of = ["copy", "first", "again", "back"].map(|key| (key, Series::default()));
        for _ in 0..bench.plan.runs {
            let mut command = Command::new(&program);
            command.args([threads.to_string(), "16".into(), "100".into()]);
            command
                .env("STILLPOINT_BIN", bench.stillpoint.path())
                .env("STILLPOINT_STORE", place.join("store"));
            let said = said(&mut command)?;
            for (key, series) in &mut of {
                numbers(&said, key)?.into_iter().for_each(|ms| series.add(ms));
            }
        }
        let [copy, first, again, back] = of.map(|(_, series)| series.median());
        let cells = [copy, first, again, copy / first, copy / again, back].map(number);
        table.row([vec![threads.to_string()], cells.to_vec()].concat());
        let peer = || Some(("memcpy".to_owned(), Figure(copy, "ms")));
        let faster = if threads == 2 { 25.0 } else { 15.0 };
        if threads == 2 {
            section.promises.push(Promise {
                what: "first sp_snapshot, 2 threads, 64 MiB: at least 5 × faster than memcpy".into(),
                reached: Figure(first, "ms"),
                peer: peer(),
                limit: Limit::TimesPeer(1.0 / 5.0),
            });
        }
        section.promises.push(Promise {
            what: format!(
                "repeated sp_snapshot, {threads} threads, 64 MiB: at least {faster} × faster than memcpy"
            ),
            reached: Figure(again, "ms"),
            peer: peer(),
            limit: Limit::TimesPeer(1.0 / faster),
        });
        if threads == 4 {
            section.promises.push(Promise {
                what: "rollback, 4 threads, 64 MiB, 100 pages changed: at most 1 ms".into(),
                reached: Figure(back, "ms"),
                peer: None,
                limit: Limit::AtMost(1.0),
            });
        }
    }
    section.tables.push(table);
    Ok(section)
}
