//! What it costs a user to have no privileges.

use crate::bench::{Bench, size_name};
use crate::heartbeat::{Heartbeat, Load};
use crate::report::{Figure, Limit, Promise, Section, Table, number};
use crate::series::Series;
use anyhow::{Context, Result};
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::time::Instant;

const ABOUT: &str = "\
A program is checkpointed while it writes, killed at a checkpoint, and restored again and again, by root and in turn by a user without any \
privilege, its checkpoint in the page cache. `gap` and `pause` are those of a checkpoint of a program that goes on, as the program saw it \
and by the command's own stopwatch; `runs` is the time from the start of the restore command until the program runs, `answers` that until it \
has answered. An ordinary user's program cannot let its memory wait (`vm.unprivileged_userfaultfd` is 0): all of it is loaded before it \
runs, as root does with `--eager`. At the end each program checks all of its memory.";

const WRITES: u64 = 20_000;
const NOBODY: u32 = 65534;
const AS_NOBODY: [&str; 5] =
    ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];
/// The directory of a program is new.
const GIVE_IT_HIM: [&str; 4] = ["sh", "-c", "chown 65534:65534 . && exec \"$@\"", "sh"];

struct Who {
    name: &'static str,
    /// Options of a restore.
    way: &'static [&'static str],
    is_root: bool,
}

#[derive(Default)]
struct Measured {
    gap: Series,
    pause: Series,
    runs: Series,
    answers: Series,
}

/// Measures root, root who loads everything first, and a user.
pub fn run(bench: &Bench) -> Result<Section> {
    let mut section = bench.section("unprivileged", ABOUT);
    let mebibytes = bench.base_size();
    let all = [
        Who { name: "root", way: &[], is_root: true },
        Who { name: "root, eager", way: &["--eager"], is_root: true },
        Who { name: "a user", way: &[], is_root: false },
    ];
    let mut measured = Vec::new();
    for who in &all {
        measured.push((who.name, measure(bench, who, mebibytes).with_context(|| who.name)?));
    }
    let columns = ["by", "gap, ms", "pause, ms", "runs, ms", "least", "most", "answers, ms", "runs"];
    let mut table = Table::new("unprivileged", "Medians.", &columns);
    for (name, Measured { gap, pause, runs, answers }) in &measured {
        let numbers =
            [gap.median(), pause.median(), runs.median(), runs.least(), runs.most(), answers.median()];
        let mut row = vec![(*name).to_owned()];
        row.extend(numbers.map(number).into_iter().chain([runs.count().to_string()]));
        table.row(row);
    }
    section.tables.push(table);
    let [(_, root), (_, eager), (_, user)] = &measured[..] else { return Ok(section) };
    let size = size_name(mebibytes);
    section.promises = vec![
        Promise {
            what: format!("pause of {size}, {WRITES} writes/s, of a user without privileges; beside root's"),
            reached: Figure(user.gap.median(), "ms"),
            peer: Some(("root".into(), Figure(root.gap.median(), "ms"))),
            limit: Limit::None,
        },
        Promise {
            what: format!(
                "restore of {size} by a user without privileges until the program runs; beside root's, all of it first"
            ),
            reached: Figure(user.runs.median(), "ms"),
            peer: Some(("root".into(), Figure(eager.runs.median(), "ms"))),
            limit: Limit::None,
        },
    ];
    Ok(section)
}

fn measure(bench: &Bench, who: &Who, mebibytes: u64) -> Result<Measured> {
    let place = bench.plan.place("unprivileged")?;
    let [store, directory]: [PathBuf; 2] = ["store", "program"].map(|name| place.join(name));
    std::fs::create_dir_all(&store)?;
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let (mut launcher, mut starter) = (Vec::new(), Vec::new());
    if !who.is_root {
        chown(&store, Some(NOBODY), Some(NOBODY))?;
        launcher = owned(&AS_NOBODY);
        starter = [owned(&GIVE_IT_HIM), launcher.clone()].concat();
    }
    let mut program = Heartbeat::start(&bench.programs, &directory, Load::new(mebibytes, WRITES), &starter)?;
    let stillpoint = bench.stillpoint.by(&launcher);
    let mut measured = Measured::default();
    for run in 0..=bench.plan.runs {
        program.longest_gap()?; // forget what came before
        let cut = stillpoint.checkpoint_process(program.pid, &store, bench.default_engine())?;
        let (cut, gap) = (cut.context("no checkpoint")?, program.longest_gap()?);
        if run > 0 {
            measured.gap.add_time(gap.seen);
            measured.pause.add(cut.own_pause_ms());
        }
    }
    stillpoint.kill(&mut program, &store)?;
    for run in 0..=bench.plan.runs {
        let (runs, job) = stillpoint.restore_at_once(&store, "restore", who.way)?;
        let restored = Heartbeat::adopt(job.pid, &directory)?;
        let began = Instant::now();
        restored.ask()?;
        let answers = runs + began.elapsed();
        if run > 0 {
            measured.runs.add_time(runs);
            measured.answers.add_time(answers);
        }
        if run == bench.plan.runs {
            restored.finish()?;
            job.wait()?;
        } else {
            bench.stillpoint.await_pagers()?;
            job.cut_off()?;
        }
    }
    Ok(measured)
}
