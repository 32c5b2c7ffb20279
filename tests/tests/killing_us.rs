//! SIGKILL for the command itself, at random moments: the target is never harmed, no partial checkpoint is ever seen,
//! no half process is left behind.
#![allow(missing_docs)]

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use stillpoint_tests::observe::Facts;
use stillpoint_tests::target::Running;
use stillpoint_tests::{Build, Scratch, Stillpoint, Target, kernel, undisturbed_only};

/// How often each test kills.
fn kills() -> u64 {
    std::env::var("STILLPOINT_KILLS").ok().and_then(|k| k.parse().ok()).unwrap_or(300)
}

/// The counters that the target keeps in a shared file: rounds of each thread, and how often something was wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Counters {
    rounds: Vec<u64>,
    wrong: u64,
    interrupted: u64,
}

const KINDS: usize = 12;
const PATIENCE: Duration = Duration::from_secs(60);

impl Counters {
    fn of(running: &Running) -> Option<Self> {
        let file = fs::File::open(running.directory().join("counters")).ok()?;
        let mut bytes = [0u8; 18 * 8];
        file.read_exact_at(&mut bytes, 0).ok()?;
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|c| c.iter().rev().fold(0, |w, b| w << 8 | u64::from(*b))).collect();
        Some(Counters { rounds: words[..KINDS].to_vec(), wrong: words[16], interrupted: words[17] })
    }
}

/// What must be as before, from outside: all but the mask of the thread that changes its own, and its signals.
fn facts(pid: u32) -> Facts {
    let mut facts = Facts::of(pid);
    // Threads come and go in no test here; masks and pending signals are the target's own to check.
    facts
        .0
        .retain(|name, _| !name.contains("SigBlk") && !name.contains("SigPnd") && !name.contains("ShdPnd"));
    facts
}

/// Polls until the target is as before and every thread of it makes progress.
#[track_caller]
fn unharmed(running: &Running, before: &Facts, what: &str) {
    let began = Instant::now();
    let patience = Duration::from_secs(20);
    let from = loop {
        match Counters::of(running) {
            Some(counters) => break counters,
            None => assert!(began.elapsed() < patience, "{what}: no counters"),
        }
    };
    loop {
        assert!(kernel::alive(running.pid), "{what}: the target is dead:\n{}", running.said());
        let now = Counters::of(running).expect("counters");
        assert_eq!(now.wrong, 0, "{what}: the target found differences:\n{}", running.said());
        let stuck: Vec<usize> = (0..KINDS).filter(|&k| now.rounds[k] <= from.rounds[k]).collect();
        let differences = before.differences(&facts(running.pid));
        if stuck.is_empty() && differences.is_empty() {
            return;
        }
        assert!(
            began.elapsed() < patience,
            "{what}: threads without progress: {stuck:?}; these differ:\n{differences}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn start(scratch: &Scratch) -> Running {
    let target = Target::new("invariants", "everything", Build::Dynamic).expect("cc");
    target.start(&scratch.directory("target"), scratch.path())
}

fn spawn(stillpoint: &Stillpoint, arguments: &[&str]) -> Child {
    stillpoint.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("stillpoint")
}

#[test]
fn the_target_alone() {
    let scratch = Scratch::new();
    let running = start(&scratch);
    let before = facts(running.pid);
    for _ in 0..5 {
        unharmed(&running, &before, "undisturbed");
    }
    running.finish("undisturbed");
}

#[test]
fn during_checkpoint() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = start(&scratch);
    let before = facts(running.pid);
    unharmed(&running, &before, "undisturbed");
    let pid = running.pid.to_string();
    let arguments = ["checkpoint", &pid, "--name", "job", "--json"];
    let mut whole = Vec::new();
    let mut durations: Vec<Duration> = (0..3)
        .map(|_| {
            let output = stillpoint.run(&arguments).ok();
            whole.push(output.json()["id"].as_u64().expect("id"));
            output.wall
        })
        .collect();
    durations.sort();
    let typical = durations[1];
    unharmed(&running, &before, "after whole checkpoints");

    let (mut interrupted, mut frozen, mut late) = (0, 0, 0);
    for n in 0..kills() {
        let aimed = n % 2 == 1;
        let mut child = spawn(&stillpoint, &arguments);
        let delay = if aimed {
            // Wait until it has hold of the target, then kill it within the little time that it has.
            let until = Instant::now() + Duration::from_secs(5);
            while kernel::status(running.pid, "TracerPid").is_some_and(|t| t == "0") && Instant::now() < until
            {
                if child.try_wait().expect("wait").is_some() {
                    break;
                }
            }
            scratch.random().fraction() * 0.5
        } else {
            scratch.random().fraction() * 1.1
        };
        let delay = typical.mul_f64(delay);
        std::thread::sleep(delay);
        if kernel::status(running.pid, "TracerPid").is_some_and(|t| t != "0") {
            frozen += 1;
        }
        kernel::kill(child.id(), kernel::SIGKILL);
        let status = child.wait().expect("wait");
        if status.success() {
            late += 1
        } else {
            interrupted += 1
        }
        let what = format!("kill {n} after {delay:?} of {typical:?}");
        unharmed(&running, &before, &what);
        if n % 20 == 0 {
            let listed = stillpoint.checkpoints("job");
            assert!(whole.iter().all(|id| listed.contains(id)), "{what}: {whole:?} became {listed:?}");
            stillpoint.run(&["verify"]).ok();
            stillpoint.run(&["prune", "job", "--keep", "2"]).ok();
            whole = stillpoint.checkpoints("job");
        }
    }
    eprintln!(
        "killed {interrupted} ({frozen} with the target frozen), {late} came too late; typical {typical:?}"
    );
    assert!(interrupted > kills() / 10, "hardly any of the kills came in time");
    stillpoint.run(&["verify"]).ok();

    // And all still works.
    let mut running = running;
    stillpoint.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    let restored = stillpoint.restore_detached("job", &[]);
    let running = Running::restored(restored, running.directory());
    unharmed(&running, &before, "restored");
    running.finish("restored");
    scratch.nothing_is_left("in the end");
}

/// A process that follows the target from checkpoint to checkpoint dies between two of them, or in one.
#[test]
fn during_a_session() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = start(&scratch);
    let before = facts(running.pid);
    unharmed(&running, &before, "undisturbed");
    let pid = running.pid.to_string();
    let engines = ["auto", "precopy", "wp", "fork"];
    for round in 0..kills() / 4 {
        let engine = engines[round as usize % engines.len()];
        let every = format!("{}ms", 1 + scratch.random().below(30));
        let adopt = ["adopt", &pid, "--name", "job", "--every", &every, "--keep", "3", "--json"];
        let answer = stillpoint.run(&[&adopt[..], &["--engine", engine]].concat()).ok().json();
        let supervisor = answer["supervisor_pid"].as_u64().expect("supervisor") as u32;
        let newest = || stillpoint.checkpoints("job").last().copied();
        if round % 2 == 0 {
            let before = newest();
            stillpoint_tests::wait_for("a checkpoint", PATIENCE, || (newest() > before).then_some(()));
        }
        let pause = Duration::from_micros(scratch.random().below(200_000));
        std::thread::sleep(pause);
        kernel::kill(supervisor, kernel::SIGKILL);
        kernel::wait_gone(supervisor, PATIENCE);
        let what = format!("round {round}, engine {engine}, every {every}, killed after {pause:?}");
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("smaps");
        let followed = smaps.lines().any(|l| l.starts_with("VmFlags:") && l.contains(" uw"));
        assert!(!followed, "{what}: its writes are still followed");
        unharmed(&running, &before, &what);
    }
    stillpoint.run(&["verify"]).ok();
    running.finish("after all");
}

#[test]
fn during_restore() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut running = start(&scratch);
    let before = facts(running.pid);
    let pid = running.pid;
    stillpoint.checkpoint(pid, "job", &["--kill"]);
    running.reap();
    let directory = running.directory().to_owned();
    let kept = scratch.directory("kept");
    for name in ["counters", "out"] {
        fs::copy(directory.join(name), kept.join(name)).expect("copy");
    }
    let mut durations: Vec<Duration> = (0..3)
        .map(|_| {
            let output = stillpoint.run(&["restore", "job", "--detach", "--json"]).ok();
            Running::restored(pid, &directory).kill();
            output.wall
        })
        .collect();
    durations.sort();
    let typical = durations[1];
    let (mut none, mut whole) = (0, 0);
    for n in 0..kills() / 2 {
        scratch.sweep();
        let foreground = n % 2 == 0;
        let mut child = spawn(
            &stillpoint,
            if foreground { &["restore", "job"] } else { &["restore", "job", "--detach"] },
        );
        let delay = typical.mul_f64(scratch.random().fraction() * 1.5);
        std::thread::sleep(delay);
        kernel::kill(child.id(), kernel::SIGKILL);
        child.wait().expect("wait");
        let what = format!(
            "kill {n} after {delay:?} of {typical:?}, {}",
            if foreground { "foreground" } else { "detached" }
        );
        // Either nothing is there, or all of it: whoever is left takes a moment to notice.
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let left = scratch.processes();
            if left.is_empty() {
                none += 1;
                break;
            }
            let target = Running::restored(pid, &directory);
            if left.contains(&pid) && before.differences(&facts(pid)).is_empty() {
                // Whole. Whoever looks after it may still decide to end it, as nobody was told that it is back.
                std::thread::sleep(Duration::from_millis(300));
                if kernel::alive(pid) {
                    unharmed(&target, &before, &what);
                    whole += 1;
                    break;
                }
            }
            assert!(
                Instant::now() < until,
                "{what}: half a process is left: {left:?}\n{}",
                before.differences(&facts(pid))
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    eprintln!("killed {} restores: {none} left nothing, {whole} a whole process", none + whole);
    scratch.sweep();
    stillpoint.run(&["verify"]).ok();
    let restored = stillpoint.restore_detached("job", &[]);
    let running = Running::restored(restored, &directory);
    unharmed(&running, &before, "restored in the end");
    running.finish("restored in the end");
}

/// The target is killed, or ends, while it is checkpointed: one clear sentence, no partial checkpoint.
#[test]
fn the_target_dies_midway() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("files", "large", Build::Dynamic).expect("cc");
    let mut typical = Duration::from_millis(50);
    for n in 0..20 {
        let running = target.start(&scratch.directory(&format!("target-{n}")), scratch.path());
        let pid = running.pid.to_string();
        if n == 0 {
            typical = stillpoint.run(&["checkpoint", &pid, "--name", "job", "--json"]).ok().wall;
        }
        let delay = typical.mul_f64(scratch.random().fraction());
        let killer = std::thread::spawn({
            let pid = running.pid;
            move || {
                std::thread::sleep(delay);
                kernel::kill(pid, kernel::SIGKILL);
            }
        });
        let output = stillpoint.run(&["checkpoint", &pid, "--name", "job", "--json"]);
        killer.join().expect("killer");
        running.kill();
        if !output.status.success() {
            assert_eq!(output.code(), if output.code() == 2 { 2 } else { 1 }, "{output}");
            let code = output.code();
            output.fails(
                code,
                &[
                    "ended",
                    "exited",
                    "died",
                    "killed",
                    "gone",
                    "no process",
                    "no such process",
                    "ending",
                    "zombie",
                ],
            );
        }
        stillpoint.run(&["verify"]).ok();
    }
}
