//! Jobs that outlive crashes and power cuts: brought back by their supervisors, or by `resume`, at random moments, until
//! they end with what they would have written undisturbed.

use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use stillpoint_tests::programs::{installed, source, text};
use stillpoint_tests::stillpoint::{binary, is_of_the_command};
use stillpoint_tests::target::alone;
use stillpoint_tests::{
    Build, Scratch, Stillpoint, kernel, right, right_eq, skipped, tier, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(90);

/// A program that only appends to files, what it reads, and what it writes.
struct Program {
    command: Vec<String>,
    input: Option<Vec<u8>>,
    outputs: &'static [&'static str],
}

impl Program {
    fn new(command: &[&str], outputs: &'static [&'static str]) -> Self {
        Program { command: command.iter().map(|&word| word.into()).collect(), input: None, outputs }
    }

    /// Files written by an undisturbed run, and its exit code.
    fn undisturbed(&self, scratch: &Scratch) -> (Vec<Vec<u8>>, Option<i32>) {
        let directory = self.directory(scratch, "undisturbed");
        let mut command = alone(&self.command[0]);
        command.args(&self.command[1..]);
        let mut child = self.start(command, &directory);
        (child.wait().map(|status| (self.written(&directory), status.code()))).expect("runs")
    }

    fn directory(&self, scratch: &Scratch, name: &str) -> PathBuf {
        let directory = scratch.directory(name);
        if let Some(input) = &self.input {
            fs::write(directory.join("input"), input).expect("input");
        }
        directory
    }

    fn start(&self, mut command: Command, directory: &Path) -> Child {
        let open = |name: &str| fs::File::create(directory.join(name)).expect(name);
        command.current_dir(directory).stdin(Stdio::null()).stdout(open("out")).stderr(open("errors"));
        command.spawn().expect("starts")
    }

    fn written(&self, directory: &Path) -> Vec<Vec<u8>> {
        let names = self.outputs.iter().chain(&["out"]);
        names.map(|name| fs::read(directory.join(name)).unwrap_or_default()).collect()
    }

    /// Starts it as a job.
    fn run(&self, stillpoint: &Stillpoint, directory: &Path, options: &[&str]) -> Child {
        let mut words = vec!["run", "--name", "job", "--every", "60ms", "--keep", "4"];
        words.extend(options);
        words.push("--");
        words.extend(self.command.iter().map(String::as_str));
        self.start(stillpoint.command(&words), directory)
    }
}

/// What `ls` tells of a job.
fn listed(stillpoint: &Stillpoint, job: &str) -> Value {
    let jobs = stillpoint.run(&["ls", "--json"]).ok().json();
    jobs.as_array().expect("array").iter().find(|j| j["job"] == job).cloned().unwrap_or_default()
}

fn process(stillpoint: &Stillpoint, job: &str, which: &str) -> Option<u32> {
    listed(stillpoint, job)["running"][which].as_u64().map(|pid| pid as u32)
}

fn newest(stillpoint: &Stillpoint, job: &str) -> Option<u64> {
    listed(stillpoint, job)["newest"]["id"].as_u64()
}

/// How often something is in the history of a job.
fn noted(stillpoint: &Stillpoint, job: &str, kind: &str) -> usize {
    let history = fs::read_to_string(stillpoint.store().join("jobs").join(job).join("history"));
    let kind = format!("\"kind\":\"{kind}\"");
    history.unwrap_or_default().lines().filter(|line| line.contains(&kind)).count()
}

/// Waits until a job runs and has a checkpoint newer than `than`; `None` if it ended before.
fn saved(stillpoint: &Stillpoint, job: &str, than: u64, ended: &mut dyn FnMut() -> bool) -> Option<u32> {
    wait_for("a checkpoint", PATIENCE, || {
        let pid = process(stillpoint, job, "pid");
        match pid {
            Some(pid) if newest(stillpoint, job).is_some_and(|id| id > than) => Some(Some(pid)),
            _ if ended() => Some(None),
            _ => None,
        }
    })
}

/// Kills a program again and again, by all signals of crashes.
fn crashes(program: &Program) {
    // It may end before it has been saved.
    assert!((0..5).any(|_| has_crashed(program)), "it always ended before it could crash");
}

/// Whether it could be killed before it ended, or was not to be.
fn has_crashed(program: &Program) -> bool {
    const SIGNALS: [Signal; 4] = [Signal::SEGV, Signal::KILL, Signal::ABORT, Signal::BUS];
    let scratch = Scratch::new();
    let (expected, code) = program.undisturbed(&scratch);
    if undisturbed_only() {
        return true;
    }
    let (stillpoint, directory) = (scratch.stillpoint(), program.directory(&scratch, "crashing"));
    let mut child = program.run(&stillpoint, &directory, &["--restart", "on-crash=50"]);
    let supervisor = child.id();
    let (mut crashes, mut than) = (0, 0);
    for &signal in SIGNALS.iter().take(tier::times("STILLPOINT_KILLS", 2, 4) as usize) {
        let mut ended = || child.try_wait().expect("wait").is_some();
        let Some(pid) = saved(&stillpoint, "job", than, &mut ended) else { break };
        std::thread::sleep(Duration::from_millis(scratch.random().below(120)));
        than = newest(&stillpoint, "job").unwrap_or(than);
        kernel::kill(pid, signal);
        let back = wait_for("the program to come back, or to have ended", PATIENCE, || {
            let back = noted(&stillpoint, "job", "restart") > crashes;
            (back || child.try_wait().expect("wait").is_some()).then_some(back)
        });
        if !back {
            break;
        }
        crashes += 1;
        if let Some(listed) = listed(&stillpoint, "job")["running"].as_object() {
            assert_eq!(listed["supervisor_pid"], supervisor);
            assert!(listed["crashes"].as_u64() >= Some(1), "{listed:?}");
        }
    }
    let status = child.wait().expect("wait");
    let errors = fs::read_to_string(directory.join("errors")).unwrap_or_default();
    assert_eq!(status.code(), code, "{errors}");
    right!(program.written(&directory) == expected, "what it wrote is not the same: {errors}");
    let has_crashed = noted(&stillpoint, "job", "restart") > 0;
    assert_eq!(errors.contains("it goes on from job@"), has_crashed, "{errors}");
    scratch.nothing_is_left("in the end");
    has_crashed
}

/// Kills a job with everything that is ours, at the same instant, and resumes it.
fn power_cuts(program: &Program) {
    let scratch = Scratch::new();
    let (expected, code) = program.undisturbed(&scratch);
    if undisturbed_only() {
        return;
    }
    let (stillpoint, directory) = (scratch.stillpoint(), program.directory(&scratch, "cut"));
    let options = ["--detach", "--restart", "on-crash"];
    assert!(program.run(&stillpoint, &directory, &options).wait().expect("run").success());
    let (mut cuts, mut than) = (0, 0);
    while cuts < tier::times("STILLPOINT_KILLS", 2, 4) as usize {
        let mut ended = || listed(&stillpoint, "job")["state"] == "ended";
        if saved(&stillpoint, "job", than, &mut ended).is_none() {
            break;
        }
        std::thread::sleep(Duration::from_millis(scratch.random().below(120)));
        if !cut(&scratch, &stillpoint) {
            break;
        }
        than = newest(&stillpoint, "job").unwrap_or(than);
        assert_eq!(listed(&stillpoint, "job")["state"], "resumable");
        let answer = stillpoint.run(&["resume", "--all", "--json"]).ok().json();
        assert_eq!(answer["resumed"].as_array().map(Vec::len), Some(1), "{answer}");
        cuts += 1;
        // Its options came with it.
        if let Some(running) = listed(&stillpoint, "job")["running"].as_object() {
            assert_eq!((&running["every_s"], &running["keep"]), (&0.06.into(), &4.into()), "{running:?}");
        }
    }
    wait_for("its end", PATIENCE, || (listed(&stillpoint, "job")["state"] == "ended").then_some(()));
    assert!(cuts > 0, "it ended before the power could be cut");
    right!(program.written(&directory) == expected, "what it wrote is not the same");
    let history = fs::read_to_string(stillpoint.store().join("jobs/job/history")).expect("history");
    let end = history.lines().last().unwrap_or_default();
    assert!(end.contains(&format!("\"code\":{}", code.unwrap_or(-1))), "{end}");
    assert_eq!(noted(&stillpoint, "job", "resume"), cuts);
    stillpoint.run(&["resume", "job"]).fails(2, &["has ended"]);
    scratch.nothing_is_left("in the end");
}

/// All processes of the test stop, and are killed then; `false` if the job had ended.
pub(crate) fn cut(scratch: &Scratch, stillpoint: &Stillpoint) -> bool {
    let mut seen = Vec::new();
    // Ours first: no checkpoint may be of a program that is stopped.
    for of in [is_of_the_command as fn(u32) -> bool, |_| true] {
        loop {
            let all = scratch.processes().into_iter();
            let new: Vec<u32> = all.filter(|&pid| !seen.contains(&pid) && of(pid)).collect();
            if new.is_empty() {
                break;
            }
            new.iter().for_each(|&pid| kernel::kill(pid, Signal::STOP));
            seen.extend(new);
        }
    }
    let runs = process(stillpoint, "job", "pid").is_some();
    for &pid in &seen {
        kernel::kill(pid, if runs { Signal::KILL } else { Signal::CONT });
    }
    if runs {
        seen.iter().for_each(|&pid| kernel::wait_gone(pid, PATIENCE));
    }
    runs
}

fn sieve() -> Option<Program> {
    let binary = Build::Dynamic.of(&source("sieve.c"));
    if binary.is_none() {
        skipped("no C compiler (Debian package gcc)");
    }
    Some(Program::new(&[binary?.to_str()?, &tier::size(6000).to_string()], &["counts"]))
}

fn python() -> Option<Program> {
    let python = installed(&["/usr/bin/python3", "python3"], "python3")?;
    const COUNT: &str = "
import hashlib, sys, time
log = open('log', 'w')
block = bytes(1 << 16)
last = time.monotonic_ns()
for i in range(40000):
    now = time.monotonic_ns()
    if now < last:
        sys.exit(f'the clock went back by {last - now} ns')
    last = now
    block = hashlib.sha256(block).digest() * 2048
    log.write(f'{i} {block[:8].hex()}\\n')
    log.flush()
print('done', i)
sys.exit(7)
";
    Some(Program::new(&[python.to_str()?, "-c", COUNT], &["log"]))
}

fn xz() -> Option<Program> {
    let xz = installed(&["xz"], "xz-utils")?;
    let words = [xz.to_str()?, "-T2", "-4", "--block-size=1MiB", "-k", "-c", "input"];
    Some(Program { input: Some(text(10 << 20)), ..Program::new(&words, &[]) })
}

fn sqlite() -> Option<Program> {
    let sqlite = installed(&["sqlite3"], "sqlite3")?;
    let mut script = String::from("create table t (n integer primary key, sum integer);\n");
    for n in 0..500 {
        script += &format!(
            "insert into t values ({n}, (with recursive c(i) as (select 0 union all select i + 1 from c where i < 4000) \
             select sum(i * {n}) from c)); select sum(sum) from t;\n"
        );
    }
    script += "pragma integrity_check;\n";
    let words = [sqlite.to_str()?, "-batch", ":memory:", ".read input"];
    Some(Program { input: Some(script.into_bytes()), ..Program::new(&words, &[]) })
}

#[test]
fn a_static_computation_outlives_crashes() {
    sieve().iter().for_each(crashes);
}

#[test]
fn python_outlives_crashes() {
    python().iter().for_each(crashes);
}

#[test]
fn xz_outlives_crashes() {
    xz().iter().for_each(crashes);
}

#[test]
fn sqlite_outlives_crashes() {
    sqlite().iter().for_each(crashes);
}

#[test]
fn a_static_computation_outlives_power_cuts() {
    sieve().iter().for_each(power_cuts);
}

#[test]
fn python_outlives_power_cuts() {
    python().iter().for_each(power_cuts);
}

#[test]
fn xz_outlives_power_cuts() {
    xz().iter().for_each(power_cuts);
}

#[test]
fn sqlite_outlives_power_cuts() {
    sqlite().iter().for_each(power_cuts);
}

/// A shell that waits, as the job `name`.
fn waits(stillpoint: &Stillpoint, scratch: &Scratch, name: &str, options: &[&str]) -> Child {
    let words = [&["run", "--name", name], options, &["--", "sleep", "1000"]].concat();
    let errors = fs::File::create(scratch.path().join(format!("{name}.errors"))).expect("file");
    let mut command = stillpoint.command(&words);
    let before = noted(stillpoint, name, "start");
    let child = command.stdout(Stdio::null()).stderr(errors).spawn().expect("starts");
    // Its process is there before it is told to become the program.
    wait_for("the job to run", PATIENCE, || (noted(stillpoint, name, "start") > before).then_some(()));
    assert!(process(stillpoint, name, "pid").is_some());
    child
}

fn errors(scratch: &Scratch, name: &str) -> String {
    fs::read_to_string(scratch.path().join(format!("{name}.errors"))).unwrap_or_default()
}

fn signal_of(child: &mut Child) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    child.wait().expect("wait").signal()
}

#[test]
fn whoever_ends_a_job_has_ended_it() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    const RESTART: [&str; 2] = ["--restart", "on-crash"];
    // Passed on by the supervisor.
    let mut job = waits(&stillpoint, &scratch, "a", &RESTART);
    stillpoint.checkpoint("a", "a", &[]);
    kernel::kill(job.id(), Signal::QUIT);
    assert_eq!(signal_of(&mut job), Some(Signal::QUIT.as_raw()));
    // Asked to end by somebody else.
    let mut job = waits(&stillpoint, &scratch, "b", &RESTART);
    stillpoint.checkpoint("b", "b", &[]);
    kernel::kill(process(&stillpoint, "b", "pid").expect("runs"), Signal::TERM);
    assert_eq!(signal_of(&mut job), Some(Signal::TERM.as_raw()));
    // Killed by its checkpoint, once through its supervisor and once without.
    for frozen in [false, true] {
        let mut job = waits(&stillpoint, &scratch, "c", &RESTART);
        if frozen {
            kernel::kill(job.id(), Signal::STOP);
        }
        stillpoint.checkpoint("c", "c", &["--kill"]);
        kernel::kill(job.id(), Signal::CONT);
        assert_eq!(signal_of(&mut job), Some(Signal::KILL.as_raw()));
    }
    for name in ["a", "b", "c"] {
        assert_eq!(noted(&stillpoint, name, "restart"), 0, "{}", errors(&scratch, name));
        assert_eq!(listed(&stillpoint, name)["state"], "ended");
        stillpoint.run(&["resume", name]).fails(2, &["ended"]);
    }
    // Nor is one continued that was adopted and released.
    let mut program = alone("sleep")
        .arg("1000")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("sleep");
    stillpoint.run(&["adopt", &program.id().to_string(), "--name", "d"]).ok();
    stillpoint.checkpoint("d", "d", &[]);
    stillpoint.run(&["release", "d"]).ok();
    program.kill().and_then(|()| program.wait()).expect("killed");
    stillpoint.run(&["resume", "d"]).fails(2, &["released"]);
    stillpoint.run(&["resume", "--all"]).ok();
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_row_of_crashes_ends() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    // Without a checkpoint there is nothing to go back to.
    let mut job = waits(&stillpoint, &scratch, "early", &["--restart", "on-crash"]);
    kernel::kill(process(&stillpoint, "early", "pid").expect("runs"), Signal::SEGV);
    assert_eq!(signal_of(&mut job), Some(Signal::SEGV.as_raw()));
    assert!(
        errors(&scratch, "early").contains("before its first checkpoint"),
        "{}",
        errors(&scratch, "early")
    );

    let mut job = waits(&stillpoint, &scratch, "again", &["--restart", "on-crash=2"]);
    stillpoint.checkpoint("again", "again", &[]);
    for restarts in 0..3 {
        wait_for("the job to be back", PATIENCE, || {
            (noted(&stillpoint, "again", "restart") == restarts).then_some(())
        });
        kernel::kill(process(&stillpoint, "again", "pid").expect("runs"), Signal::SEGV);
        wait_for("its crash to be seen", PATIENCE, || {
            (noted(&stillpoint, "again", "crash") > restarts).then_some(())
        });
    }
    assert_eq!(signal_of(&mut job), Some(Signal::SEGV.as_raw()));
    let said = errors(&scratch, "again");
    assert!(
        said.contains("(2 of 2 in a row)") && said.contains("SIGSEGV killed it 3 times in a row"),
        "{said}"
    );
    assert_eq!(listed(&stillpoint, "again")["state"], "ended");
}

/// Starts `damaged.c` in a directory of its own, and takes one checkpoint of it before its crash and one in its crash handler; then
/// it is let go. What its supervisor says comes by a pipe: a file is cut back with the others.
fn damaged(stillpoint: &Stillpoint, scratch: &Scratch, restart: &str) -> Option<(Program, PathBuf, Child)> {
    let binary = Build::Dynamic.of(&source("damaged.c"));
    if binary.is_none() {
        skipped("no C compiler (Debian package gcc)");
    }
    let (program, directory) = (Program::new(&[binary?.to_str()?], &[]), scratch.directory("damaged"));
    let says = |name: &str| {
        let file = directory.join(name);
        wait_for(name, PATIENCE, || file.exists().then_some(()));
    };
    let tell = |name: &str| fs::write(directory.join(name), "").expect("tells");
    let words = ["run", "--name", "job", "--restart", restart, "--", &program.command[0]];
    let mut command = stillpoint.command(&words);
    let out = fs::File::create(directory.join("out")).expect("out");
    command.current_dir(&directory).stdin(Stdio::null()).stdout(out).stderr(Stdio::piped());
    let job = command.spawn().expect("starts");
    tell("bad");
    says("ready");
    stillpoint.checkpoint("job", "job", &[]);
    tell("begin");
    says("crashing");
    stillpoint.checkpoint("job", "job", &[]);
    Some((program, directory, job))
}

fn heard(job: &mut Child) -> String {
    use std::io::Read;
    let mut said = String::new();
    job.stderr.take().expect("pipe").read_to_string(&mut said).expect("reads");
    said
}

fn ids(stillpoint: &Stillpoint) -> Vec<u64> {
    let list = stillpoint.run(&["ls", "job", "--json"]).ok().json();
    list.as_array().expect("array").iter().filter_map(|checkpoint| checkpoint["id"].as_u64()).collect()
}

#[test]
fn a_checkpoint_of_a_crash_is_passed_over() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let Some((program, directory, mut job)) = damaged(&stillpoint, &scratch, "on-crash") else { return };
    // The cause is gone; what is in the handler cannot but crash all the same.
    fs::remove_file(directory.join("bad")).expect("removed");
    fs::write(directory.join("go"), "").expect("tells");
    wait_for("it to be past the crash", PATIENCE, || directory.join("waiting").exists().then_some(()));
    wait_for("the job to be listed", PATIENCE, || {
        (listed(&stillpoint, "job")["running"]["restored_from"] == 1).then_some(())
    });
    assert_eq!(listed(&stillpoint, "job")["passed_over"], serde_json::json!([2]));
    assert_eq!(stillpoint.run(&["show", "job@2", "--json"]).ok().json()["passed_over"], true);
    assert_eq!(stillpoint.run(&["show", "job@1", "--json"]).ok().json()["passed_over"], false);
    // Until it is past that place, neither the one that it goes on from nor those that are passed over make room.
    stillpoint.checkpoint("job", "job", &["--keep", "1"]);
    stillpoint.checkpoint("job", "job", &["--keep", "1"]);
    assert_eq!(ids(&stillpoint), [1, 2, 4]);
    wait_for("the restart to be noted", PATIENCE, || {
        (noted(&stillpoint, "job", "restart") == 2).then_some(())
    });
    // It goes on from what it has saved since.
    fs::write(directory.join("end"), "").expect("tells");
    assert_eq!(job.wait().expect("wait").code(), Some(7));
    right_eq!(program.written(&directory), [b"499500\n"]);
    let said = heard(&mut job);
    let of = |what: &str| said.find(what).unwrap_or_else(|| panic!("{what:?} is not in {said}"));
    assert!(of("it goes on from job@2") < of("it goes on from job@1"), "{said}");
    assert!(of("job@2 is passed over") > of("it goes on from job@1"), "{said}");
    let history = fs::read_to_string(stillpoint.store().join("jobs/job/history")).expect("history");
    assert!(history.contains("\"passed\":[2]"), "{history}");
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_job_that_always_crashes_is_not_taken_back_for_ever() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let Some((_, directory, mut job)) = damaged(&stillpoint, &scratch, "on-crash=3") else { return };
    fs::write(directory.join("go"), "").expect("tells");
    assert_eq!(signal_of(&mut job), Some(Signal::SEGV.as_raw()));
    let said = heard(&mut job);
    let from: Vec<&str> = said.split("it goes on from ").skip(1).map(|line| &line[..5]).collect();
    assert_eq!(from, ["job@2", "job@1", "job@1"], "{said}");
    assert!(said.contains("4 times in a row, brought back from job@2, job@1"), "{said}");
    assert_eq!(ids(&stillpoint), [1, 2]);
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_restart_that_is_refused_ends_like_the_crash() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let file = scratch.path().join("file");
    let script = format!("exec 5>'{}'; echo first >&5; sleep 1000 & wait", file.display());
    let words = ["run", "--name", "job", "--restart", "on-crash", "--", "sh", "-c", &script];
    let mut command = stillpoint.command(&words);
    let mut job = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
    wait_for("the file", PATIENCE, || fs::read(&file).is_ok_and(|text| !text.is_empty()).then_some(()));
    stillpoint.checkpoint("job", "job", &[]);
    fs::write(&file, "other").expect("writes");
    kernel::kill(process(&stillpoint, "job", "pid").expect("runs"), Signal::SEGV);
    assert_eq!(signal_of(&mut job), Some(Signal::SEGV.as_raw()));
    let said = heard(&mut job);
    assert!(said.contains("job is not brought back: cannot restore job@1"), "{said}");
    assert!(said.contains(file.to_str().expect("path")), "{said}");
    // What it had left behind is no more.
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_job_is_never_resumed_twice() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut job = waits(&stillpoint, &scratch, "job", &["--every", "1h"]);
    let pid = process(&stillpoint, "job", "pid").expect("runs");
    stillpoint.checkpoint("job", "job", &[]);
    // The supervisor alone is killed.
    kernel::kill(job.id(), Signal::KILL);
    job.wait().expect("wait");
    stillpoint.run(&["resume", "job"]).fails(2, &["runs already"]);
    let answer = stillpoint.run(&["resume", "--all", "--json"]).ok().json();
    assert_eq!(answer["resumed"], Value::Array(Vec::new()), "{answer}");
    // It is given another, with which it goes on; and killed with that one.
    stillpoint.run(&["adopt", &pid.to_string()]).ok();
    let supervisor = process(&stillpoint, "job", "supervisor_pid").expect("supervised");
    for process in [supervisor, pid] {
        kernel::kill(process, Signal::KILL);
        kernel::wait_gone(process, PATIENCE);
    }
    assert_eq!(listed(&stillpoint, "job")["state"], "resumable");
    // Whoever is given a name takes none that is still needed.
    let namesake = scratch.path().join("job");
    symlink("/bin/true", &namesake).expect("link");
    stillpoint.run(&["run", "--", namesake.to_str().expect("utf-8")]).ok();
    assert_eq!(listed(&stillpoint, "job")["state"], "resumable");
    // Several at once: one does it.
    let resume = || {
        let mut command = stillpoint.command(&["resume", "--all", "--json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts")
    };
    let all: Vec<Child> = (0..4).map(|_| resume()).collect();
    let mut resumed = 0;
    for child in all {
        let output = child.wait_with_output().expect("ends");
        assert!(output.status.success(), "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).expect("json");
        resumed += answer["resumed"].as_array().map_or(0, Vec::len);
    }
    assert_eq!(resumed, 1);
    assert_eq!(noted(&stillpoint, "job", "resume"), 1);
    kernel::kill(process(&stillpoint, "job", "supervisor_pid").expect("supervised"), Signal::TERM);
    scratch.nothing_is_left("in the end");
}

#[test]
fn one_that_fails_does_not_keep_the_others() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut jobs = Vec::new();
    for name in ["first", "lost", "never", "third"] {
        let mut job = waits(&stillpoint, &scratch, name, &[]);
        if name != "never" {
            stillpoint.checkpoint(name, name, &[]);
        }
        let pid = process(&stillpoint, name, "pid").expect("runs");
        for process in [job.id(), pid] {
            kernel::kill(process, Signal::KILL);
        }
        job.wait().expect("wait");
        kernel::wait_gone(pid, PATIENCE);
        jobs.push(name);
    }
    // Its only checkpoint is damaged.
    fs::write(stillpoint.store().join("jobs/lost/checkpoints/1"), "torn").expect("writes");
    let output = stillpoint.run(&["resume", "--all", "--json"]);
    let answer = output.json();
    let names = |list: &Value| -> Vec<String> {
        let list = list.as_array().cloned().unwrap_or_default();
        list.iter().filter_map(|one| Some(one["job"].as_str()?.to_owned())).collect()
    };
    assert_eq!(names(&answer["resumed"]), ["first", "third"], "{output}");
    assert_eq!(names(&answer["failed"]), ["lost"], "{output}");
    assert_eq!(output.code(), 1, "{output}");
    stillpoint.run(&["resume", "never"]).fails(2, &["before its first checkpoint"]);
    stillpoint.run(&["resume", "none"]).fails(2, &["no job none"]);
    stillpoint.run::<&str>(&["resume"]).fails(2, &["--all"]);
    // A whole one before a damaged one is taken, and the other is named.
    kernel::kill(process(&stillpoint, "first", "supervisor_pid").expect("supervised"), Signal::TERM);
    let name = "third";
    stillpoint.checkpoint(name, name, &[]);
    let pids = ["supervisor_pid", "pid"].map(|which| process(&stillpoint, name, which).expect("runs"));
    pids.iter().for_each(|&pid| kernel::kill(pid, Signal::KILL));
    pids.iter().for_each(|&pid| kernel::wait_gone(pid, PATIENCE));
    fs::write(stillpoint.store().join(format!("jobs/{name}/checkpoints/2")), "torn").expect("writes");
    let answer = stillpoint.run(&["resume", name, "--json"]).ok().json();
    let resumed = &answer["resumed"][0];
    assert_eq!(resumed["id"], 1, "{answer}");
    assert!(resumed["notes"].to_string().contains("third@2 cannot be used"), "{answer}");
    kernel::kill(process(&stillpoint, name, "supervisor_pid").expect("supervised"), Signal::TERM);
    scratch.nothing_is_left("in the end");
}

#[test]
fn only_checkpoints_of_this_run_count() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut job = waits(&stillpoint, &scratch, "job", &[]);
    for _ in 0..3 {
        stillpoint.checkpoint("job", "job", &[]);
    }
    kernel::kill(job.id(), Signal::TERM);
    job.wait().expect("wait");
    let both = || {
        let pids = ["supervisor_pid", "pid"].map(|which| process(&stillpoint, "job", which).expect("runs"));
        pids.iter().for_each(|&pid| kernel::kill(pid, Signal::KILL));
        pids
    };
    // Another run of the same name has none yet.
    let mut job = waits(&stillpoint, &scratch, "job", &[]);
    let [_, pid] = both();
    job.wait().expect("wait");
    kernel::wait_gone(pid, PATIENCE);
    stillpoint.run(&["resume", "job"]).fails(2, &["before its first checkpoint"]);
    // One that was restored from an older one goes on from that, and not from newer ones that it has nothing to do with.
    stillpoint.restore_detached("job@2", &[]);
    both().iter().for_each(|&pid| kernel::wait_gone(pid, PATIENCE));
    let answer = stillpoint.run(&["resume", "job", "--json"]).ok().json();
    assert_eq!(answer["resumed"][0]["id"], 2, "{answer}");
    stillpoint.checkpoint("job", "job", &[]);
    both().iter().for_each(|&pid| kernel::wait_gone(pid, PATIENCE));
    let answer = stillpoint.run(&["resume", "job", "--json"]).ok().json();
    assert_eq!(answer["resumed"][0]["id"], 4, "{answer}");
    kernel::kill(process(&stillpoint, "job", "supervisor_pid").expect("supervised"), Signal::TERM);
    scratch.nothing_is_left("in the end");
}

#[test]
fn bad_input_is_told() {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let run = |options: &[&str]| stillpoint.run(&[&["run"], options, &["--", "true"]].concat());
    run(&["--restart", "always"]).fails(2, &["write on-crash"]);
    run(&["--restart", "on-crash=0"]).fails(2, &["from 1 on"]);
    run(&["--every", "sometimes"]).fails(2, &["auto"]);
    run(&["--every", "auto", "--mtbf", "0d"]).fails(2, &["longer than nothing"]);
    run(&["--every", "10s", "--mtbf", "30d"]).fails(2, &["--every auto"]);
    run(&["--mtbf", "30d"]).fails(2, &["--every"]);
    // What comes through a pipe cannot be read again.
    let mut command = stillpoint.command(&["run", "--restart", "on-crash", "--", "true"]);
    command.stdin(Stdio::piped());
    Stillpoint::wait(command, scratch.path()).fails(2, &["cannot be read again"]);
}

/// The script at boot, as it is installed, does what it is there for; and systemd understands the unit.
#[test]
fn what_is_installed_for_boot_works() {
    let scratch = Scratch::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // What is built there, as far as the script installs it.
    let built = scratch.directory("built").join("release");
    fs::create_dir_all(&built).expect("folder");
    std::os::unix::fs::symlink(binary(), built.join("stillpoint")).expect("link");
    ["libstillpoint.so", "libstillpoint.a"]
        .iter()
        .for_each(|name| fs::write(built.join(name), "").expect("writes"));
    let prefix = scratch.directory("a & b");
    let install = |words: &[&str]| {
        let mut command = Command::new("sh");
        command.arg(root.join("scripts/install.sh")).args(words).arg(&prefix).current_dir(&root);
        command.env("CARGO_TARGET_DIR", built.parent().expect("folder")).env_remove("DESTDIR");
        Stillpoint::wait(command, scratch.path()).ok()
    };
    install(&[]);
    let (rc, unit) = (
        prefix.join("share/stillpoint/stillpoint.rc"),
        prefix.join("lib/systemd/system/stillpoint-resume.service"),
    );
    let text = fs::read_to_string(&unit).expect("unit");
    assert!(
        text.contains(&format!("ExecStart=\"{}/bin/stillpoint\" resume --all", prefix.display())),
        "{text}"
    );
    let checks: [&[&str]; 2] = [&["sh", "-n"], &["shellcheck"]];
    for words in checks.iter().filter(|words| kernel::which(words[0]).is_some()) {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(&rc);
        Stillpoint::wait(command, scratch.path()).ok();
    }
    if undisturbed_only() {
        return;
    }

    let stillpoint = scratch.stillpoint();
    let settings = scratch.path().join("settings");
    fs::write(&settings, format!("STILLPOINT_STORE='{}'\n", stillpoint.store().display())).expect("writes");
    let script = |action: &str| {
        let mut command = Command::new(&rc);
        command.arg(action).stdin(Stdio::null()).env("STILLPOINT_SETTINGS", &settings);
        command.env(stillpoint_tests::scratch::MARK, scratch.path());
        Stillpoint::wait(command, scratch.path())
    };
    script("start").ok();
    let mut job = waits(&stillpoint, &scratch, "job", &[]);
    stillpoint.checkpoint("job", "job", &[]);
    let pid = process(&stillpoint, "job", "pid").expect("runs");
    [job.id(), pid].iter().for_each(|&pid| kernel::kill(pid, Signal::KILL));
    job.wait().expect("wait");
    kernel::wait_gone(pid, PATIENCE);
    let said = script("start").ok();
    assert!(said.stdout.contains("job goes on from job@1"), "{said}");
    assert!(script("status").ok().stdout.contains("job"));
    script("stop").ok();
    assert!(process(&stillpoint, "job", "pid").is_some());
    script("sideways").fails(2, &["usage"]);
    kernel::kill(process(&stillpoint, "job", "supervisor_pid").expect("supervised"), Signal::TERM);
    scratch.nothing_is_left("in the end");
    install(&["--remove"]);
    assert!(!rc.exists() && !unit.exists());
}

#[test]
fn systemd_understands_the_unit() {
    if kernel::which("systemd-analyze").is_none() {
        return skipped("systemd-analyze is not installed (Debian package systemd)");
    }
    let scratch = Scratch::new();
    let prefix = scratch.directory("prefix");
    fs::create_dir_all(prefix.join("bin")).expect("folder");
    std::os::unix::fs::symlink(binary(), prefix.join("bin/stillpoint")).expect("link");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/boot/stillpoint-resume.service.in");
    let text = fs::read_to_string(source).expect("unit");
    let unit = scratch.path().join("stillpoint-resume.service");
    fs::write(&unit, text.replace("@PREFIX@", prefix.to_str().expect("path"))).expect("writes");
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no"]).arg(&unit);
    let said = Stillpoint::wait(command, scratch.path());
    let about_us = said.stderr.lines().filter(|line| line.contains("stillpoint-resume")).count();
    assert!(said.status.success() && about_us == 0, "{said}");
}
