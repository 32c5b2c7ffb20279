//! What the doubled stores cost real programs: compiled with the pass and run in a mirror, against the plain build.

use crate::bench::Bench;
use crate::mirrored::{Builder, numbers, said};
use crate::report::{Chart, Figure, Limit, Promise, Scale, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;

const ABOUT: &str = "\
Each program is compiled by the same clang with the same options, plainly and with the barrier pass; the latter runs with its
whole heap in the region, attached, without checkpoints. Times are those of the thread's own clock; results must be equal. The
seven are C counterparts of the paper's SPECjvm98 programs, whose overhead there was 3.6 to 20.5 %.";

/// A package and the folder in it; `None` for programs of one file.
type Sources = Option<(&'static str, &'static str)>;

/// Name, program, arguments, package of its sources and folder in it.
const PROGRAMS: [(&str, &str, &[&str], Sources); 7] = [
    ("compress (bzip2)", "compress", &[], Some(("bzip2-sys", "bzip2-1.0.8"))),
    ("expert system (Lua)", "lua", &["rules"], Some(("lua-src", "lua-5.4.9"))),
    ("database (SQLite)", "database", &[], Some(("libsqlite3-sys", "sqlite3"))),
    ("compiler (Lua's)", "lua", &["compiler"], Some(("lua-src", "lua-5.4.9"))),
    ("audio coding", "audio", &[], None),
    ("ray tracing", "ray", &[], None),
    ("parser generator", "parsers", &[], None),
];

/// Measures all seven.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("barrier", ABOUT);
    let builder = Builder::new(bench, "barrier")?;
    let columns = ["program", "plain, s", "mirrored, s", "overhead, %"];
    let mut table = Table::new("barrier", "Medians; runs in turn.", &columns);
    let mut chart = Chart::new("Overhead of the barrier", "%", Scale::Linear);
    let mut sum = 0.0;
    for (name, program, arguments, package) in PROGRAMS {
        let (plain, mirrored) = measure(bench, &builder, program, arguments, package).context(name)?;
        let overhead = 100.0 * (mirrored.median() / plain.median() - 1.0);
        sum += overhead;
        table.row(vec![name.into(), number(plain.median()), number(mirrored.median()), number(overhead)]);
        chart.bar(name, "mirrored", overhead);
        section.promises.push(Promise {
            what: format!("barrier overhead of {name}: at most the paper's 20.5 %"),
            reached: Figure(overhead, "%"),
            peer: None,
            limit: Limit::AtMost(20.5),
        });
    }
    section.promises.push(Promise {
        what: "barrier overhead, mean of seven programs: at most 8 %".into(),
        reached: Figure(sum / PROGRAMS.len() as f64, "%"),
        peer: None,
        limit: Limit::AtMost(8.0),
    });
    section.tables.push(table);
    section.chart = Some(chart);
    Ok(section)
}

fn measure(
    bench: &Bench,
    builder: &Builder,
    program: &str,
    arguments: &[&str],
    package: Sources,
) -> Result<(Series, Series)> {
    let folder = package.map(|(name, folder)| builder.sources(name, folder)).transpose()?;
    let mut files: Vec<PathBuf> = Vec::new();
    if let Some(folder) = &folder {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let wanted = match program {
                "compress" => [
                    "blocksort.c",
                    "compress.c",
                    "crctable.c",
                    "decompress.c",
                    "huffman.c",
                    "randtable.c",
                    "bzlib.c",
                ]
                .contains(&name.as_str()),
                "database" => name == "sqlite3.c",
                _ => name.ends_with(".c"),
            };
            if wanted {
                files.push(path);
            }
        }
    }
    let more = ["-DSQLITE_THREADSAFE=0"];
    let build = |mirrored| builder.build(program, mirrored, folder.as_deref(), &files, &more);
    let (plain, mirrored) = (build(None)?, build(Some(&["--globals=none"]))?);
    let mut times = [Series::default(), Series::default()];
    let mut digest = None;
    for run in 0..=2 * bench.plan.runs {
        for side in [run % 2, 1 - run % 2] {
            let mut command = Command::new(if side == 0 { &plain } else { &mirrored });
            command.args(arguments);
            if side == 1 {
                let _ = std::fs::remove_file(builder.file());
                command.env("STILLPOINT_MIRROR", builder.file()).env("STILLPOINT_MIRROR_MIB", "256");
            }
            let said = said(&mut command)?;
            let this = said.get("digest").and_then(|d| d.first()).context("no digest")?.clone();
            ensure!(*digest.get_or_insert(this.clone()) == this, "results differ");
            if run > 0 {
                times[side].add(numbers(&said, "seconds")?[0]);
            }
        }
    }
    let [plain, mirrored] = times;
    Ok((plain, mirrored))
}
