//! What a program waits for that takes snapshots of itself and goes back to them, beside copying its memory by hand.

use crate::bench::{Bench, size_name};
use crate::mirrored::{Said, numbers, said};
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

const ABOUT: &str = "\
A program with a vector of 64 MiB, one thread that measures and others that wake every millisecond, links the library \
(`sp_snapshot`, `sp_rollback`). `copy` is a memcpy(3) of the vector to memory that is there, `first` its first snapshot, `again` \
another one after 16 random pages were changed, `back` a rollback after 100 were, with all that the caller waits for: to the answer \
of the process that does the work, and back.

The second program does what that of Carothers & Szymanski does (Dr. Dobb's Journal, 2002): its threads change a part of the vector, each in its own half, quarter or eighth, meet, and then the vector is copied, or a snapshot taken and the last one forgotten, round after round. With copy-on-write in the kernel, by a system call of their own, they were 25 to 67 times faster than a copy by hand with two threads, above 4 times with four and above 2 times with eight.";

const THREADS: [u64; 3] = [2, 4, 8];
/// Sizes of the vector, MiB.
const SIZES: [u64; 6] = [1, 4, 16, 64, 256, 1024];
/// What is changed in each round while the size varies, bytes.
const CHANGED: u64 = 64 << 10;
/// What is changed in each round of the whole program, KiB.
const CHANGES: [u64; 5] = [4, 16, 64, 256, 1024];
const ROUNDS: u64 = 40;
const WHOLE_ROUNDS: u64 = 200;

/// The programs, built against the library of now.
struct Programs<'a> {
    bench: &'a Bench,
    place: PathBuf,
}

impl Programs<'_> {
    fn build(&self, name: &str) -> Result<()> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let library = std::env::current_exe()?.with_file_name("libstillpoint.so");
        ensure!(library.exists(), "{} is not built", library.display());
        let folder = library.parent().unwrap_or(Path::new("/"));
        let mut build = Command::new("cc");
        build.args(["-O2", "-pthread", "-I"]).arg(root.join("crates/library/include"));
        build
            .arg("-o")
            .arg(self.place.join(name))
            .arg(root.join(format!("bench/branch/{name}.c")))
            .arg(&library);
        build.arg(format!("-Wl,-rpath,{}", folder.display()));
        ensure!(build.status().context("cc")?.success(), "bench/branch/{name}.c does not build");
        Ok(())
    }

    fn run(&self, name: &str, arguments: &[String]) -> Result<Said> {
        let mut command = Command::new(self.place.join(name));
        command.args(arguments).env("STILLPOINT_BIN", self.bench.stillpoint.path());
        said(command.env("STILLPOINT_STORE", self.place.join("store")))
    }

    fn rounds(&self, how: &str, mebibytes: u64, threads: u64, changed: u64, rounds: u64) -> Result<Said> {
        let numbers = [mebibytes << 20, threads, changed, rounds].map(|n| n.to_string());
        self.run("rounds", &[vec![how.to_owned()], numbers.to_vec()].concat())
    }
}

/// Measures all of it.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("branch", ABOUT);
    let programs = Programs { bench, place: bench.plan.place("branch")? };
    programs.build("vector")?;
    programs.build("rounds")?;
    one_of_each(&programs, &mut section)?;
    by_size(&programs, &mut section)?;
    whole(&programs, &mut section)?;
    first_writes(&programs, &mut section)?;
    Ok(section)
}

/// What one snapshot and one rollback take.
fn one_of_each(programs: &Programs<'_>, section: &mut Section) -> Result<()> {
    let columns =
        ["threads", "copy, ms", "first, ms", "again, ms", "copy / first", "copy / again", "back, ms"];
    let mut table = Table::new("branch", "Medians.", &columns);
    for threads in THREADS {
        let mut of = ["copy", "first", "again", "back"].map(|key| (key, Series::default()));
        for _ in 0..programs.bench.plan.runs {
            let said = programs.run("vector", &[threads.to_string(), "16".into(), "100".into()])?;
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
    Ok(())
}

/// How much faster a snapshot is than a copy, against the size of the vector.
fn by_size(programs: &Programs<'_>, section: &mut Section) -> Result<()> {
    let title = format!("Against the size of the vector, {} KiB changed between (medians).", CHANGED >> 10);
    let columns = ["vector", "threads", "copy, ms", "snapshot, ms", "copy / snapshot"];
    let mut table = Table::new("branch-sizes", &title, &columns);
    let mut chart = Chart::new("Copy by hand / snapshot, against the size", "times", Scale::Logarithmic);
    for mebibytes in SIZES {
        for threads in THREADS {
            let median = |how| -> Result<f64> {
                let said = programs.rounds(how, mebibytes, threads, CHANGED, ROUNDS)?;
                let mut series = Series::default();
                // The first one is another matter.
                numbers(&said, "save")?.into_iter().skip(1).for_each(|ms| series.add(ms));
                Ok(series.median())
            };
            let (copy, snapshot) = (median("copy")?, median("snapshot")?);
            let cells = [copy, snapshot, copy / snapshot].map(number);
            table.row([vec![size_name(mebibytes), threads.to_string()], cells.to_vec()].concat());
            chart.bar(&size_name(mebibytes), &format!("{threads} threads"), copy / snapshot);
        }
    }
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(())
}

/// A program from start to finish, with its first snapshot.
fn whole(programs: &Programs<'_>, section: &mut Section) -> Result<()> {
    let title = format!("From start to finish: {WHOLE_ROUNDS} rounds, 64 MiB, 2 threads.");
    let columns =
        ["changed each round, KiB", "nothing saved, ms", "copies, ms", "snapshots, ms", "copies / snapshots"];
    let mut table = Table::new("branch-whole", &title, &columns);
    for kibibytes in CHANGES {
        let took = |how| -> Result<f64> {
            let said = programs.rounds(how, 64, 2, kibibytes << 10, WHOLE_ROUNDS)?;
            numbers(&said, "whole")?.first().copied().context("nothing was said")
        };
        let (plain, copies, snapshots) = (took("none")?, took("copy")?, took("snapshot")?);
        let cells = [plain, copies, snapshots, copies / snapshots].map(number);
        table.row([vec![kibibytes.to_string()], cells.to_vec()].concat());
        section.promises.push(Promise {
            what: format!("program of {WHOLE_ROUNDS} rounds, 2 threads, 64 MiB, {kibibytes} KiB changed in each: at least 8 × faster than with copies"),
            reached: Figure(snapshots, "ms"),
            peer: Some(("memcpy".to_owned(), Figure(copies, "ms"))),
            limit: Limit::TimesPeer(1.0 / 8.0),
        });
    }
    section.tables.push(table);
    Ok(())
}

/// What the first write to a page costs.
fn first_writes(programs: &Programs<'_>, section: &mut Section) -> Result<()> {
    let (mut first, mut next) = (Series::default(), Series::default());
    for _ in 0..programs.bench.plan.runs {
        let said = programs.rounds("writes", 64, 1, 0, 0)?;
        numbers(&said, "write_after_first")?.into_iter().for_each(|us| first.add(us));
        numbers(&said, "write_after_next")?.into_iter().for_each(|us| next.add(us));
    }
    let mut table = Table::new(
        "branch-writes",
        "The first write to a page after a snapshot, above any other write (64 MiB, one after the other; medians).",
        &["snapshot", "a page, µs"],
    );
    table.row(vec!["the first one: the page is copied".into(), number(first.median())]);
    table.row(vec!["further ones".into(), number(next.median())]);
    section.tables.push(table);
    section.promises.push(Promise {
        what: "first write to a page after a repeated snapshot: at most 1 µs".into(),
        reached: Figure(next.median(), "µs"),
        peer: None,
        limit: Limit::AtMost(1.0),
    });
    Ok(())
}
