//! Programs that take less memory than they use: whatever they do with it, and whatever becomes of those who page it, what they
//! come to is the same.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use stillpoint_tests::programs::source;
use stillpoint_tests::tmpfs::Tmpfs;
use stillpoint_tests::{Scratch, Stillpoint, kernel, right, right_eq, skipped, tier, wait_for};

const PATIENCE: Duration = Duration::from_secs(120);

/// A program of `tests/programs`, built.
pub(crate) fn built(name: &str, scratch: &Scratch) -> PathBuf {
    let binary = scratch.path().join(name);
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-pthread", "-o"]).arg(&binary).arg(source(&format!("{name}.c")));
    assert!(compiler.status().is_ok_and(|status| status.success()), "cc {name}.c");
    binary
}

/// How often a program does what it does: `once` in a test, `all` in a soak.
fn rounds(once: u64, all: u64) -> &'static str {
    tier::times("STILLPOINT_ROUNDS", once, all).to_string().leak()
}

fn said(binary: &Path, arguments: &[&str]) -> String {
    let output = Command::new(binary).args(arguments).output().expect("it runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The job `it` with this limit.
fn begin(stillpoint: &Stillpoint, limit: &str, binary: &Path, arguments: &[&str]) -> Child {
    let binary = binary.to_string_lossy();
    let all = ["run", "--name", "it", "--memory-limit", limit, "--", &binary];
    let mut command = stillpoint.command(&[&all[..], arguments].concat());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts")
}

fn end(job: Child) -> String {
    let output = job.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {said}", output.status);
    said
}

fn listed(stillpoint: &Stillpoint) -> Option<serde_json::Value> {
    let jobs = stillpoint.run(&["ls", "--json"]).json();
    jobs.as_array()?.iter().find(|job| job["job"] == "it").cloned()
}

fn pid(stillpoint: &Stillpoint) -> Option<u32> {
    listed(stillpoint)?["running"]["pid"].as_u64().map(|pid| pid as u32)
}

/// The newest checkpoint of the job, if there is any.
fn newest(stillpoint: &Stillpoint) -> Option<u64> {
    listed(stillpoint)?["newest"]["id"].as_u64()
}

/// Those who page the memory of a process, or stand by for that: by their name, and by a handle of the process.
fn pagers(pid: u32, named: &str) -> Vec<u32> {
    let is_it = |of: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{of}/comm")).unwrap_or_default();
        name.trim_end() == named && has_handle(*of, pid)
    };
    kernel::processes().into_iter().filter(is_it).collect()
}

fn has_handle(of: u32, pid: u32) -> bool {
    let entries = std::fs::read_dir(format!("/proc/{of}/fdinfo")).into_iter().flatten().flatten();
    let line = format!("Pid:\t{pid}");
    entries
        .filter_map(|entry| std::fs::read_to_string(entry.path()).ok())
        .any(|info| info.lines().any(|l| l == line))
}

fn may_page() -> bool {
    let may = kernel::is_root();
    if !may {
        skipped("paging takes root");
    }
    may
}

/// A place for a job, and its program, where memory may be paged; otherwise says what is skipped.
fn paged(name: &str) -> Option<(Scratch, Stillpoint, PathBuf)> {
    let scratch = may_page().then(Scratch::new)?;
    let (stillpoint, binary) = (scratch.stillpoint(), built(name, &scratch));
    Some((scratch, stillpoint, binary))
}

/// What is restored from a checkpoint, without a limit, comes to what was expected.
#[track_caller]
fn comes_to(stillpoint: &Stillpoint, checkpoint: &str, expected: &str) {
    let restored = stillpoint.command(&["restore", checkpoint]).output().expect("it runs");
    assert!(restored.status.success(), "{checkpoint}: {restored:?}");
    let said = String::from_utf8_lossy(&restored.stdout).into_owned();
    right!(said.contains(expected.trim()), "{checkpoint} came to {said}, not {expected}");
}

#[test]
fn a_job_of_ten_times_its_limit_comes_to_the_same() {
    if !may_page() {
        return;
    }
    let scratch = Scratch::new();
    let binary = built("writers", &scratch);
    let arguments = ["80", "3", "1000"];
    let job = begin(&scratch.stillpoint(), "8MiB", &binary, &arguments);
    right_eq!(end(job), said(&binary, &arguments));
}

/// What the job is told of its memory that is paged.
fn trouble(stillpoint: &Stillpoint) -> Option<String> {
    Some(listed(stillpoint)?["running"]["paging"].as_str()?.to_owned())
}

/// Waits for something about a job; false if that has ended before.
#[track_caller]
fn before_its_end(job: &mut Child, what: &str, mut found: impl FnMut() -> bool) -> bool {
    wait_for(what, PATIENCE, || match job.try_wait().expect("wait") {
        Some(_) => Some(false),
        None => found().then_some(true),
    })
}

/// Runs what needs a store in a small file system, for programs that take more and more memory, until one of them has met that. The program
/// may be done before whoever pages it has begun.
fn in_little_room(size: &str, meets: impl Fn(&Stillpoint, &Tmpfs, &Path, &str) -> bool) {
    for memory in ["80", "160", "320"] {
        let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
        let Some(small) = Tmpfs::new(scratch.directory("small"), size) else {
            return skipped("not permitted to mount a file system");
        };
        let stillpoint = stillpoint.with_store(&small.0.join("store"));
        if meets(&stillpoint, &small, &binary, memory) {
            return;
        }
    }
    panic!("it ended each time before there was no room for it");
}

fn is_full(stillpoint: &Stillpoint) -> bool {
    trouble(stillpoint).is_some_and(|what| what.contains("no room"))
}

/// Nothing is dropped: where there is no room for what is to leave, it waits, and goes on when there is some.
#[test]
fn a_job_without_room_stands_still_until_there_is_some() {
    in_little_room("40m", |stillpoint, small, binary, memory| {
        let arguments = [memory, "3", "1000"];
        let mut job = begin(stillpoint, "8MiB", binary, &arguments);
        let is_met = before_its_end(&mut job, "the store to be full", || is_full(stillpoint));
        small.resize("500m");
        right_eq!(end(job), said(binary, &arguments));
        is_met
    });
}

/// Slots that only a checkpoint had are room for memory again when it is removed, though the file system has none.
#[test]
fn slots_of_checkpoints_that_are_removed_are_room() {
    in_little_room("110m", |stillpoint, small, binary, _| {
        let arguments = ["80", "3", "4000"];
        let mut job = begin(stillpoint, "8MiB", binary, &arguments);
        let is_out = before_its_end(&mut job, "most of it to be paged out", || {
            let room = rustix::fs::statvfs(&small.0).expect("statvfs");
            (room.f_blocks - room.f_bfree) * room.f_frsize > 60 << 20
        });
        let is_met = is_out
            && stillpoint.run(&["checkpoint", "it"]).code() == 0
            && before_its_end(&mut job, "the store to be full", || is_full(stillpoint));
        if is_met {
            stillpoint.run(&["rm", "it@1"]).ok();
            // What that has given back is taken by somebody else.
            let mut other = std::fs::File::create(small.0.join("other")).expect("a file");
            while std::io::Write::write_all(&mut other, &[0; 4096]).is_ok() {}
        } else {
            small.resize("500m");
        }
        right_eq!(end(job), said(binary, &arguments));
        is_met
    });
}

#[test]
fn whatever_a_program_does_with_its_memory_is_right() {
    if !may_page() {
        return;
    }
    let scratch = Scratch::new();
    let binary = built("mappings", &scratch);
    for forks in ["0", "1"] {
        let seed = scratch.random().below(1 << 30).to_string();
        let job = begin(&scratch.stillpoint(), "8MiB", &binary, &[&seed, rounds(70, 300), forks]);
        right_eq!(end(job), "good\n", "seed {seed}, forks {forks}");
    }
}

/// What programs do to memory that nobody tells of, and what the kernel does: each of them knows what has to be in its pages.
#[test]
fn what_drops_pages_without_a_word_is_noticed() {
    let Some((scratch, _, binary)) = paged("guarded") else { return };
    for _ in 0..tier::times("STILLPOINT_TURNS", 1, 3) {
        let seed = scratch.random().below(1 << 30).to_string();
        let job = begin(&scratch.stillpoint(), "8MiB", &binary, &[&seed, rounds(1500, 3000)]);
        let output = job.wait_with_output().expect("it ends");
        if output.status.code() == Some(77) {
            return skipped("this kernel has no guard regions");
        }
        right_eq!(String::from_utf8_lossy(&output.stdout), "good\n", "seed {seed}");
    }
}

#[test]
fn what_is_freed_lazily_may_go_at_any_moment() {
    let Some((scratch, _, binary)) = paged("freed") else { return };
    for _ in 0..tier::times("STILLPOINT_TURNS", 1, 3) {
        let job = begin(&scratch.stillpoint(), "8MiB", &binary, &[rounds(4000, 8000)]);
        right_eq!(end(job), "good\n");
    }
}

/// Of what was done to mappings the kernel tells late: by then others may have memory there.
#[test]
fn memory_goes_where_others_have_just_been() {
    let Some((scratch, _, binary)) = paged("moved") else { return };
    for _ in 0..tier::times("STILLPOINT_TURNS", 1, 3) {
        right_eq!(end(begin(&scratch.stillpoint(), "8MiB", &binary, &["12", rounds(400, 800)])), "good\n");
    }
}

#[test]
fn threads_see_what_they_wrote_in_whatever_way() {
    let Some((scratch, _, binary)) = paged("laid") else { return };
    let file = scratch.path().join("file").to_string_lossy().into_owned();
    let arguments = ["24", "6", rounds(800, 1500), &file];
    if said(&binary, &arguments).starts_with("no vectors") {
        return skipped("this processor has no AVX2");
    }
    right_eq!(end(begin(&scratch.stillpoint(), "8MiB", &binary, &arguments)), "good\n");
}

/// A job with the database of `ledger.py`, to begin or to be restored. What the program says is in a file: that goes back with it,
/// so a checkpoint of after it has spoken is no reason to miss what it said, or to hear it twice.
fn ledger(stillpoint: &Stillpoint, what: &[&str], program: &[&str], said: Stdio) -> Child {
    let terms = ["--memory-limit", "16MiB", "--every", "200ms", "--keep", "3"];
    let mut command = stillpoint.command(&[what, &terms, program].concat());
    command.stdin(Stdio::null()).stdout(said).stderr(Stdio::piped()).spawn().expect("it starts")
}

/// What is looked for in a job that runs, once it is there; nothing where the job ends before.
fn unless_it_ends<T>(job: &mut Child, look: impl Fn() -> Option<T>) -> Option<T> {
    stillpoint_tests::wait_for("the job to come so far, or to end", PATIENCE, || {
        let has_ended = job.try_wait().expect("it can be asked").is_some();
        look().map(Some).or_else(|| has_ended.then_some(None))
    })
}

#[test]
fn a_database_that_is_killed_again_and_again_comes_to_the_same() {
    let Some(scratch) = may_page().then(Scratch::new) else { return };
    let python = "/usr/bin/python3";
    let has_it = Command::new(python).args(["-c", "import sqlite3"]).stderr(Stdio::null()).status();
    if !has_it.is_ok_and(|status| status.success()) {
        return skipped("needs python3 with sqlite3");
    }
    let stillpoint = scratch.stillpoint();
    let program = source("ledger.py").to_string_lossy().into_owned();
    let seed = scratch.random().below(1 << 30).to_string();
    let arguments = [&*program, &seed, "40000", "16000"];
    let expected = said(Path::new(python), &arguments);
    let anew = ["--", python, arguments[0], arguments[1], arguments[2], arguments[3]];
    let file = scratch.path().join("said");
    let has_said = || std::fs::read_to_string(&file).unwrap_or_default();
    let begin = || {
        let said = std::fs::File::create(&file).expect("a file");
        ledger(&stillpoint, &["run", "--name", "it"], &anew, said.into())
    };
    let (mut job, mut lives, mut ends) = (begin(), 0, String::new());
    for turn in 0..7 {
        let before = newest(&stillpoint);
        let mut root = unless_it_ends(&mut job, || pid(&stillpoint)).filter(|_| turn < 6);
        if turn % 2 == 0 && root.is_some() {
            // However slow it is, it gets on.
            let look = || newest(&stillpoint).filter(|newest| before.is_none_or(|before| *newest > before));
            root = unless_it_ends(&mut job, look).and(root);
        }
        let was_alive = root.is_some_and(|root| {
            std::thread::sleep(Duration::from_millis(scratch.random().below(1500)));
            let was_alive = kernel::alive(root);
            kernel::kill(root, kernel::SIGKILL);
            was_alive
        });
        let output = job.wait_with_output().expect("it ends");
        let complaints = String::from_utf8_lossy(&output.stderr);
        ends +=
            &format!("life {turn}, from {before:?}: {}, said {:?} {complaints}\n", output.status, has_said());
        if output.status.success() {
            right_eq!(has_said(), expected, "seed {seed}\n{ends}");
        } else {
            // It was killed here, and by nobody else; while it was being restored, the command says so.
            let is_wrong = ["have been killed", "panicked"].iter().any(|word| complaints.contains(word));
            right!(was_alive && !is_wrong, "seed {seed}\n{ends}");
        }
        if turn == 6 {
            break;
        }
        job = match newest(&stillpoint) {
            Some(_) => {
                lives += 1;
                ledger(&stillpoint, &["restore", "it"], &[], Stdio::null())
            }
            None => begin(),
        };
    }
    assert!(lives > 0, "it never lived long enough for a checkpoint\n{ends}");
}

#[test]
fn what_is_wiped_in_children_does_not_come_to_them() {
    let Some((scratch, _, binary)) = paged("wiped") else { return };
    right_eq!(end(begin(&scratch.stillpoint(), "8MiB", &binary, &[])), "good\n");
}

/// What was locked, and grew while it was moved, is let go of for that: what was known of it before says nothing any more.
#[test]
fn what_was_locked_and_grew_and_was_dropped_is_zeros() {
    let Some((scratch, _, binary)) = paged("regrown") else { return };
    for _ in 0..tier::times("STILLPOINT_TURNS", 1, 3) {
        let job = begin(&scratch.stillpoint(), "8MiB", &binary, &[]);
        right_eq!(end(job), "good\n");
    }
}

#[test]
fn those_who_page_may_be_killed_at_any_moment() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let arguments = ["40", "2", rounds(3000, 6000)];
    let mut job = begin(&stillpoint, "8MiB", &binary, &arguments);
    let mut kills = 0;
    let root = stillpoint_tests::wait_for("the job", PATIENCE, || pid(&stillpoint));
    while job.try_wait().expect("it can be asked").is_none() {
        // If all of them were killed at the same moment it would wait for ever.
        let is_safe = pagers(root, "page keeper").len() > 1;
        for pager in pagers(root, "stillpoint swap").into_iter().filter(|_| is_safe) {
            kernel::kill(pager, rustix::process::Signal::KILL);
            kills += 1;
        }
        std::thread::sleep(Duration::from_micros(scratch.random().below(40_000)));
    }
    right_eq!(end(job), said(&binary, &arguments), "after {kills} kills");
}

/// Bytes in segments of the job.
fn stored(stillpoint: &Stillpoint) -> u64 {
    let segments =
        std::fs::read_dir(stillpoint.store().join("jobs/it/segments")).into_iter().flatten().flatten();
    segments.filter_map(|segment| segment.metadata().ok()).map(|data| data.len()).sum()
}

#[test]
fn a_job_that_nobody_pages_any_more_is_ended() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let binary = binary.to_string_lossy();
    let all = ["run", "--name", "it", "--memory-limit", "8MiB", "--", &binary, "40", "2", "30000000"];
    let mut command = stillpoint.command(&all);
    let mut job = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
    let root = stillpoint_tests::wait_for("the job", PATIENCE, || pid(&stillpoint));
    stillpoint_tests::wait_for("pages to leave", PATIENCE, || (stored(&stillpoint) > 20 << 20).then_some(()));
    let ours = || ["stillpoint swap", "page keeper"].into_iter().flat_map(|name| pagers(root, name));
    let all = stillpoint_tests::wait_for("all three of them", PATIENCE, || {
        Some(ours().collect::<Vec<u32>>()).filter(|all| all.len() > 2)
    });
    // None of them may see another one end.
    for signal in [rustix::process::Signal::STOP, rustix::process::Signal::KILL] {
        all.iter().for_each(|pager| kernel::kill(*pager, signal));
    }
    assert!(!job.wait().expect("it ends").success());
    assert!(!kernel::alive(root));
    scratch.nothing_is_left("in the end");
}

#[test]
fn checkpoints_of_a_job_that_is_paged_come_to_the_same() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let arguments = ["40", "2", "30000000"];
    let expected = said(&binary, &arguments);
    // Under its limit it would take hours; restored, it has all of its memory.
    let mut job = begin(&stillpoint, "8MiB", &binary, &arguments);
    let root = stillpoint_tests::wait_for("the job", PATIENCE, || pid(&stillpoint));
    let mut taken = Vec::new();
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(100 + scratch.random().below(200)));
        let output = stillpoint.run(&["checkpoint", "it", "--json"]);
        assert!(!output.stderr.contains("is traced by"), "those who page it are in the way: {output:?}");
        if output.code() != 0 {
            assert!(!kernel::alive(root), "{output:?}");
            break;
        }
        taken.extend(output.json()["id"].as_u64());
    }
    assert!(!taken.is_empty());
    kernel::kill(root, rustix::process::Signal::KILL);
    let _ = job.wait();
    stillpoint.run(&["verify", "it"]).ok();
    for id in taken {
        comes_to(&stillpoint, &format!("it@{id}"), &expected);
    }
}

/// What a field of the status of a process tells, KiB.
fn status_kib(pid: u32, field: &str) -> u64 {
    let text = kernel::status(pid, field).unwrap_or_default();
    text.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[test]
fn a_restored_job_is_kept_within_its_limit() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let arguments = ["40", "2", "30000000"];
    let expected = said(&binary, &arguments);
    let mut job = begin(&stillpoint, "8MiB", &binary, &arguments);
    stillpoint_tests::wait_for("pages to leave", PATIENCE, || (stored(&stillpoint) > 40 << 20).then_some(()));
    for life in 0..3 {
        let root = stillpoint_tests::wait_for("the job", PATIENCE, || pid(&stillpoint));
        stillpoint_tests::wait_for("its memory to be within the limit", PATIENCE, || {
            (1..=8 << 10).contains(&status_kib(root, "RssAnon")).then_some(())
        });
        // Restored, it never has all of its memory at once; what it began as, a process of the command, counts, too.
        let most = status_kib(root, "VmHWM");
        assert!(life == 0 || (1..=32 << 10).contains(&most), "it took {most} KiB in its life {life}");
        std::thread::sleep(Duration::from_millis(100 + scratch.random().below(300)));
        let taken = stillpoint.run(&["checkpoint", "it", "--json"]).ok().json();
        assert!(life == 0 || taken["engine"] == "paging", "{taken}");
        // What its pages were read from is of use to it, whatever is removed meanwhile.
        if life > 0 {
            stillpoint.run(&["prune", "it", "--keep", "1"]).ok();
        }
        kernel::kill(root, rustix::process::Signal::KILL);
        let _ = job.wait();
        stillpoint.run(&["verify", "it"]).ok();
        let mut command = stillpoint.command(&["restore", "it", "--memory-limit", "8MiB"]);
        job = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts");
    }
    let root = stillpoint_tests::wait_for("the job", PATIENCE, || pid(&stillpoint));
    stillpoint.run(&["checkpoint", "it"]).ok();
    kernel::kill(root, rustix::process::Signal::KILL);
    let _ = job.wait();
    // Under its limit it would take hours.
    comes_to(&stillpoint, "it", &expected);
}

#[test]
fn a_job_that_crashes_is_brought_back_within_its_limit() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let said_to = scratch.path().join("said");
    let arguments = ["40", "2", rounds(3000, 15_000)];
    let all = [
        "run",
        "--name",
        "it",
        "--memory-limit",
        "8MiB",
        "--restart",
        "on-crash=9",
        "--every",
        "100ms",
        "--",
    ];
    let program = binary.to_string_lossy();
    let command_line = [&all[..], &[&*program], &arguments].concat();
    let expected = said(&binary, &arguments);
    // Where it has used all of its memory before anybody looks it may have come to its end before a checkpoint.
    for _ in 0..20 {
        let mut command = stillpoint.command(&command_line);
        // It may be killed when it has spoken, and before it has ended. A file goes back with it.
        let file = std::fs::File::create(&said_to).expect("a file");
        let mut job = command.stdin(Stdio::null()).stdout(file).spawn().expect("it starts");
        let listed = || listed(&stillpoint);
        let before = listed().and_then(|it| it["checkpoints"].as_u64()).unwrap_or(0);
        let mut lives = 0;
        for crash in 0..3u64 {
            // Its process may have the same id each time.
            let look = || {
                let it = listed()?;
                let is_saved = it["checkpoints"].as_u64()? > crash + before;
                it["running"]["pid"].as_u64().filter(|_| is_saved).map(|pid| pid as u32)
            };
            let Some(root) = unless_it_ends(&mut job, look) else { break };
            lives += 1;
            kernel::kill(root, rustix::process::Signal::KILL);
        }
        end(job);
        let said = std::fs::read_to_string(&said_to).expect("it is there");
        right_eq!(said, expected, "after {lives} crashes");
        if lives > 0 {
            return;
        }
    }
    panic!("it never lived long enough for a checkpoint");
}

/// What is paged out is with the job: a checkpoint of another one cannot have it, also if its segments have the same numbers.
#[test]
fn only_checkpoints_of_the_job_have_what_is_paged_out() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let job = begin(&stillpoint, "8MiB", &binary, &["64", "3", "100000000"]);
    let pid = stillpoint_tests::wait_for("the job", PATIENCE, || pid(&stillpoint));
    stillpoint_tests::wait_for("pages to leave", PATIENCE, || (stored(&stillpoint) > 20 << 20).then_some(()));
    stillpoint.run(&["checkpoint", "it"]).ok();
    for name in ["other", "it"] {
        let away = scratch.path().join("away");
        let (store, target) = match name {
            "it" => (stillpoint.with_store(&away), pid.to_string()),
            _ => (stillpoint.clone(), "it".to_string()),
        };
        let mut sleeper = Command::new("sleep")
            .arg("1000")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("sleep");
        // Its segments have the numbers of those that the job is paged to.
        for _ in 0..3 {
            store.checkpoint(sleeper.id(), name, &[]);
        }
        sleeper.kill().and_then(|()| sleeper.wait()).expect("killed");
        for kill in [&[][..], &["--kill"]] {
            let arguments = [&["checkpoint", &target, "--name", name], kill].concat();
            store.run(&arguments).fails(3, &["stillpoint checkpoint it", "by the name of the job"]);
        }
        right_eq!(store.checkpoints(name), [1, 2, 3]);
    }
    right!(kernel::alive(pid));
    stillpoint.run(&["checkpoint", "it", "--kill"]).ok();
    drop(job.wait_with_output());
}

/// Arguments of `writers` with which it takes hours within a limit, but seconds without.
const LONG: [&str; 3] = ["40", "2", "30000000"];
const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// What `ls` tells of how the limit of the job is kept.
fn memory(stillpoint: &Stillpoint) -> Option<serde_json::Value> {
    Some(listed(stillpoint)?["running"]["memory"].clone()).filter(|memory| !memory.is_null())
}

fn number(value: &serde_json::Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} is not a number: {value}"))
}

/// Waits until more than so many bytes have left memory, and some have come back.
fn paged_out(stillpoint: &Stillpoint, bytes: u64) -> serde_json::Value {
    wait_for("pages to leave and to come back", PATIENCE, || {
        let is_so =
            |m: &serde_json::Value| number(m, "out_pages") * PAGE > bytes && number(m, "in_pages") > 0;
        memory(stillpoint).filter(is_so)
    })
}

#[test]
fn what_leaves_and_comes_back_is_told() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let mut job = begin(&stillpoint, "8MiB", &binary, &LONG);
    let first = paged_out(&stillpoint, 60 * MIB);
    let root = wait_for("the job", PATIENCE, || pid(&stillpoint));
    assert_eq!(number(&first, "limit_bytes"), 8 * MIB, "{first}");
    // It goes on, and each of the counts with it.
    let counts = ["out_pages", "written_pages", "in_pages", "stops"];
    let second = wait_for("all counts to grow", PATIENCE, || {
        let grows = |now: &serde_json::Value| counts.iter().all(|key| number(now, key) > number(&first, key));
        memory(&stillpoint).filter(grows)
    });
    assert!(second["stopped_ms"].as_f64() > first["stopped_ms"].as_f64(), "{first} {second}");
    // They fit each other: what comes back, and what is written, has left before.
    let [out, written, back, _] = counts.map(|key| number(&second, key));
    assert!(written <= out && back <= out, "{second}");
    // They fit what the store holds: all that is out has a place there, and each place has been written.
    let it = listed(&stillpoint).expect("it is listed");
    let (stored, now) = (number(&it, "stored_bytes"), it["running"]["memory"].clone());
    let is_out = (number(&now, "out_pages") - number(&now, "in_pages")) * PAGE;
    assert!(stored + 8 * MIB > is_out, "{stored} bytes are stored, {is_out} are out");
    assert!(stored < number(&now, "written_pages") * PAGE + 32 * MIB, "{it}");

    let seen = wait_for("pages to be seen to leave", PATIENCE, || {
        let seen = stillpoint.run(&["top", "--json", "it"]).ok().json()["jobs"][0].clone();
        (number(&seen, "out_bytes_per_s") > 0 && number(&seen, "in_bytes_per_s") > 0).then_some(seen)
    });
    assert_eq!(number(&seen, "limit_bytes"), 8 * MIB, "{seen}");
    let table = stillpoint.run(&["top", "--once", "it"]).ok().stdout;
    assert!(["LIMIT", "OUT/s", "IN/s", "8.0 MiB"].iter().all(|word| table.contains(word)), "{table}");

    stillpoint.run(&["checkpoint", "it"]).ok();
    let shown = stillpoint.run(&["show", "it", "--json"]).ok().json()["memory"].clone();
    assert!(number(&shown, "out_pages") >= out, "{shown}");
    let text = stillpoint.run(&["show", "it"]).ok().stdout;
    assert!(text.contains("8.0 MiB: ") && text.contains(" came back; it was stopped "), "{text}");
    kernel::kill(root, kernel::SIGKILL);
    let _ = job.wait();
    // Now nothing moves any more.
    assert!(memory(&stillpoint).is_none());
    wait_for("ls and top to tell of the same room", PATIENCE, || {
        let seen = stillpoint.run(&["top", "--json", "it"]).ok().json()["jobs"][0]["stored_bytes"].clone();
        (listed(&stillpoint)?["stored_bytes"] == seen).then_some(())
    });
    let file = scratch.path().join("it.html").to_string_lossy().into_owned();
    let told = stillpoint.run(&["report", "it", "--json", "-o", &file]).ok().json();
    assert!(number(&told["paged"], "out_pages") >= out, "{told}");
    assert!(std::fs::read_to_string(&file).expect("a page").contains("Memory that came back a second"));
}

/// While a checkpoint is taken nothing leaves, and whoever misses a page waits: that is part of what it costs.
#[test]
fn what_is_waited_for_in_checkpoints_is_a_cost_of_theirs() {
    let Some((_scratch, stillpoint, binary)) = paged("writers") else { return };
    let terms = ["run", "--name", "it", "--memory-limit", "8MiB", "--every", "auto", "--mtbf", "1h", "--"];
    let program = binary.to_string_lossy();
    let mut command = stillpoint.command(&[&terms[..], &[&*program], &LONG].concat());
    let mut job = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
    let root = wait_for("the job", PATIENCE, || pid(&stillpoint));
    let pace = wait_for("a checkpoint that was waited for", PATIENCE, || {
        let pace = listed(&stillpoint)?["running"]["auto"].clone();
        pace["waits_s"].as_f64().is_some_and(|waits| waits > 0.0).then_some(pace)
    });
    let seconds = |key: &str| pace[key].as_f64().unwrap_or_else(|| panic!("{key} is not told: {pace}"));
    let parts: f64 = ["pause_s", "faults_s", "delay_s", "waits_s"].map(seconds).iter().sum();
    assert!((seconds("cost_s") - parts).abs() < 1e-6, "{pace}");
    let waited = wait_for("what was waited to be told", PATIENCE, || {
        memory(&stillpoint)?["waited_ms"].as_f64().filter(|waited| *waited > 0.0)
    });
    assert!(waited < PATIENCE.as_millis() as f64 * 2.0, "{waited}");
    let words = stillpoint.run(&["show", "it"]).ok().stdout;
    assert!(words.contains(", memory limit "), "{words}");
    kernel::kill(root, kernel::SIGKILL);
    let _ = job.wait();
}

/// A checkpoint points to what was paged out before; elsewhere there is nothing but what travels.
#[test]
fn checkpoints_of_a_job_that_is_paged_travel() {
    let Some((scratch, stillpoint, binary)) = paged("writers") else { return };
    let expected = said(&binary, &LONG);
    let mut job = begin(&stillpoint, "8MiB", &binary, &LONG);
    let root = wait_for("the job", PATIENCE, || pid(&stillpoint));
    let there = stillpoint.with_store(&scratch.path().join("there"));
    paged_out(&stillpoint, 40 * MIB);
    for (name, options) in [("one", &[][..]), ("two", &["--compress", "none"])] {
        std::thread::sleep(Duration::from_millis(scratch.random().below(300)));
        let taken = stillpoint.run(&["checkpoint", "it", "--json"]).ok().json();
        let [all, anew] = ["bytes", "written_bytes"].map(|key| number(&taken, key));
        assert!(anew < all / 2, "it does not point to what was paged out: {taken}");
        // What it is paged to is written all the time meanwhile.
        crate::export::send(&stillpoint, "it", options, &there, name);
    }
    kernel::kill(root, kernel::SIGKILL);
    let _ = job.wait();
    stillpoint.run(&["rm", "it"]).ok();
    for name in ["one", "two"] {
        there.run(&["verify", name]).ok();
        comes_to(&there, name, &expected);
    }
}
