//! SIGKILL for the command itself, and for the supervisor of a job, at random moments, under each engine: the target is
//! never harmed, nothing of ours stays in it, no partial checkpoint is ever seen, no half process is left behind.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use stillpoint_tests::aimed::{DEEDS, Shot};
use stillpoint_tests::observe::{Facts, has_mapping_with, traces_of_us};
use stillpoint_tests::target::Running;
use stillpoint_tests::{
    Aimed, Build, Scratch, Stillpoint, Target, engine, kernel, right, right_eq, skipped, tier,
    undisturbed_only,
};

/// How often the tests kill: the restoring command half as often, the checkpointing one so often under all engines together.
fn kills() -> u64 {
    tier::times("STILLPOINT_KILLS", 20, 1000)
}

/// The counters that the target keeps in a shared file: rounds of each thread, and how often something was wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Counters {
    rounds: Vec<u64>,
    wrong: u64,
    interrupted: u64,
}

const KINDS: usize = 12;
const PATIENCE: Duration = Duration::from_secs(120);

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
    own(Facts::of(pid))
}

/// The same of a target that has only begun.
fn first_facts(pid: u32) -> Facts {
    own(Facts::settled(pid))
}

fn own(mut facts: Facts) -> Facts {
    // Threads come and go in no test here; masks and pending signals are the target's own to check.
    facts
        .0
        .retain(|name, _| !name.contains("SigBlk") && !name.contains("SigPnd") && !name.contains("ShdPnd"));
    facts
}

/// The target is as before, and every thread of it makes progress.
#[track_caller]
fn unharmed(running: &Running, before: &Facts, what: &str) {
    right!(unharmed_or_dead(running, before, what), "{what}: the target is dead:\n{}", running.said());
}

/// Polls until the target is as before and every thread of it makes progress; false if it is dead.
#[track_caller]
fn unharmed_or_dead(running: &Running, before: &Facts, what: &str) -> bool {
    let began = Instant::now();
    let patience = PATIENCE;
    let from = loop {
        match Counters::of(running) {
            Some(counters) => break counters,
            None => assert!(began.elapsed() < patience, "{what}: no counters"),
        }
    };
    loop {
        if !kernel::alive(running.pid) {
            return false;
        }
        let now = Counters::of(running).expect("counters");
        right_eq!(now.wrong, 0, "{what}: the target found differences:\n{}", running.said());
        let stuck: Vec<usize> = (0..KINDS).filter(|&k| now.rounds[k] <= from.rounds[k]).collect();
        let differences = before.differences(&facts(running.pid));
        if stuck.is_empty() && differences.is_empty() {
            return true;
        }
        right!(
            began.elapsed() < patience,
            "{what}: threads without progress: {stuck:?}; these differ:\n{differences}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn start(scratch: &Scratch) -> Running {
    start_of("everything", scratch)
}

fn start_of(scenario: &str, scratch: &Scratch) -> Running {
    let target = Target::new("invariants", scenario, Build::Dynamic).expect("cc");
    target.start(&scratch.directory("target"), scratch.path())
}

fn spawn(stillpoint: &Stillpoint, arguments: &[&str]) -> Child {
    stillpoint.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("stillpoint")
}

#[test]
fn the_target_alone() {
    let scratch = Scratch::new();
    let running = start(&scratch);
    let before = first_facts(running.pid);
    for _ in 0..5 {
        unharmed(&running, &before, "undisturbed");
    }
    running.finish("undisturbed");
}

/// One test for each function under each engine, in a module of the engine's name.
macro_rules! under {
    ($($engine:ident)*) => {
        $(
            mod $engine {
                #[test]
                fn during_checkpoint() {
                    crate::killing_us::with(stringify!($engine), crate::killing_us::during_checkpoint);
                }

                #[test]
                fn at_a_deed() {
                    crate::killing_us::with(stringify!($engine), crate::killing_us::at_a_deed);
                }

                #[test]
                fn the_supervisor() {
                    crate::killing_us::with(stringify!($engine), crate::killing_us::the_supervisor);
                }
            }
        )*
    };
}

under! { stop precopy wp fork auto }

fn with(engine: &str, test: impl FnOnce(&str)) {
    match engine::offered(engine) {
        _ if undisturbed_only() => {}
        true => test(engine),
        false => skipped(&format!("the command has no engine {engine}")),
    }
}

/// How the moment of a kill is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Aim {
    /// Anywhere.
    Random,
    /// Soon after the target is stopped.
    Stopped,
    /// Soon after its memory is watched, if this engine does that.
    Watched,
}

impl Aim {
    /// Whether the moment has come to count from.
    fn reached(self, pid: u32) -> bool {
        match self {
            Aim::Random => true,
            Aim::Stopped => kernel::status(pid, "TracerPid").is_some_and(|t| t != "0"),
            Aim::Watched => has_mapping_with(pid, &["uw", "um"]),
        }
    }
}

fn during_checkpoint(engine: &str) {
    during_checkpoint_of("everything", engine);
}

/// Its threads make calls for us where they do not dispatch them to themselves, and find home from there.
#[test]
fn threads_that_dispatch_their_calls() {
    if !undisturbed_only() {
        during_checkpoint_of("dispatching", "auto");
    }
}

fn during_checkpoint_of(scenario: &str, engine: &str) {
    let kills = kills() / engine::all().count() as u64;
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = start_of(scenario, &scratch);
    let before = first_facts(running.pid);
    unharmed(&running, &before, "undisturbed");
    let pid = running.pid.to_string();
    let arguments = ["checkpoint", &pid, "--name", "job", "--json", "--engine", engine];
    let mut whole = Vec::new();
    let mut durations: Vec<Duration> = (0..3)
        .map(|_| {
            let output = stillpoint.run(&arguments).ok();
            whole.push(output.json()["id"].as_u64().expect("id"));
            output.wall
        })
        .collect();
    durations.sort();
    let mut typical = durations[1];
    unharmed(&running, &before, "after whole checkpoints");

    let (mut interrupted, mut frozen, mut watched, mut late) = (0, 0, 0, 0);
    // Where all came too late there are more.
    let is_enough = |n: u64, interrupted: u64| n >= kills && interrupted > kills / 10;
    for n in 0..4 * kills {
        if is_enough(n, interrupted) {
            break;
        }
        let aim = [Aim::Random, Aim::Stopped, Aim::Watched][(n % 3) as usize];
        let mut child = spawn(&stillpoint, &arguments);
        let until = Instant::now() + Duration::from_secs(5);
        while !aim.reached(running.pid) && Instant::now() < until {
            if child.try_wait().expect("wait").is_some() {
                break;
            }
        }
        let most = if aim == Aim::Random { 1.1 } else { 0.5 };
        let delay = typical.mul_f64(scratch.random().fraction() * most);
        std::thread::sleep(delay);
        frozen += u64::from(Aim::Stopped.reached(running.pid));
        watched += u64::from(Aim::Watched.reached(running.pid));
        kernel::kill(child.id(), kernel::SIGKILL);
        let status = child.wait().expect("wait");
        // How busy the machine is changes meanwhile.
        if status.success() {
            late += 1;
            typical = typical.mul_f64(0.7);
        } else {
            interrupted += 1;
            typical = typical.mul_f64(1.1);
        }
        let what = format!("kill {n} after {delay:?} of {typical:?} ({aim:?})");
        unharmed(&running, &before, &what);
        nothing_of_ours(running.pid, &what);
        if n % 20 == 0 {
            let listed = stillpoint.checkpoints("job");
            right!(whole.iter().all(|id| listed.contains(id)), "{what}: {whole:?} became {listed:?}");
            stillpoint.verified();
            stillpoint.run(&["prune", "job", "--keep", "2"]).ok();
            whole = stillpoint.checkpoints("job");
        }
    }
    eprintln!(
        "{engine}: killed {interrupted} ({frozen} with the target stopped, {watched} with its memory watched), \
         {late} came too late; typical {typical:?}"
    );
    assert!(interrupted > kills / 10, "hardly any of the kills came in time");
    stillpoint.verified();

    // And all still works.
    let mut running = running;
    stillpoint.checkpoint(running.pid, "job", &["--kill", "--engine", engine]);
    running.reap();
    let restored = stillpoint.restore_detached("job", &[]);
    assert_eq!(restored, running.pid, "it has its old process id");
    let running = Running::restored(restored, running.directory());
    unharmed(&running, &before, "restored");
    running.finish("restored");
    scratch.nothing_is_left("in the end");
}

/// Killed as it makes one of the system calls by which it does something to the target: some of them, or each in a soak.
fn at_a_deed(engine: &str) {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = start(&scratch);
    let before = first_facts(running.pid);
    unharmed(&running, &before, "undisturbed");
    let pid = running.pid.to_string();
    let arguments = ["checkpoint", &pid, "--name", "job", "--engine", engine];
    let checkpoint = |nth| Aimed::start(&stillpoint, scratch.path(), nth, DEEDS, &arguments).map(Aimed::wait);
    let Some(Shot { calls, .. }) = checkpoint(0) else { return skipped("no C compiler") };
    unharmed(&running, &before, "after a whole checkpoint");
    let kills = tier::times("STILLPOINT_DEEDS", 5, calls).clamp(1, calls);
    let first = scratch.random().below(calls / kills);
    for n in (1 + first..=calls).step_by((calls / kills) as usize) {
        let shot = checkpoint(n);
        let what = format!("killed at call {n} of {calls}: {shot:?}");
        unharmed(&running, &before, &what);
        nothing_of_ours(running.pid, &what);
    }
    stillpoint.verified();
    stillpoint.checkpoint(running.pid, "job", &["--engine", engine]);
    unharmed(&running, &before, "after all");
    running.finish("after all");
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
    let before = first_facts(running.pid);
    unharmed(&running, &before, "undisturbed");
    let pid = running.pid.to_string();
    let engines = ["auto", "precopy", "wp", "fork"];
    for round in 0..kills().div_ceil(8) {
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
        unharmed(&running, &before, &what);
        nothing_of_ours(running.pid, &what);
    }
    stillpoint.verified();
    running.finish("after all");
}

/// Whoever looks at once may still see what is being taken away.
#[track_caller]
fn nothing_of_ours(pid: u32, what: &str) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let traces = traces_of_us(pid, false);
        if traces.is_empty() {
            return;
        }
        right!(Instant::now() < until, "{what}: left behind: {traces:#?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The supervisor of a job, which follows its writes between checkpoints, is killed between two of them or in the middle of
/// one. The job runs on, unwatched, and can be checkpointed by its name.
fn the_supervisor(engine: &str) {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("invariants", "everything", Build::Dynamic).expect("cc");
    let arguments = ["checkpoint", "job", "--json", "--engine", engine];
    let (mut watched, mut traced) = (0, 0);
    for n in 0..kills().div_ceil(75) {
        let directory = scratch.directory(&format!("target-{n}"));
        let job = target.start_job(&stillpoint, "job", &directory);
        let (running, supervisor) = (job.running, job.supervisor);
        let before = first_facts(running.pid);
        let typical = stillpoint.run(&arguments).ok().wall;
        // Between two checkpoints; in the middle of one; both together, the command too.
        let mut child = (n % 3 != 0).then(|| spawn(&stillpoint, &arguments));
        std::thread::sleep(typical.mul_f64(scratch.random().fraction() * 1.1));
        watched += u64::from(Aim::Watched.reached(running.pid));
        traced += u64::from(Aim::Stopped.reached(running.pid));
        kernel::kill(supervisor, kernel::SIGKILL);
        if let Some(child) = &mut child {
            if n % 3 == 2 {
                kernel::kill(child.id(), kernel::SIGKILL);
            }
            child.wait().expect("wait");
        }
        let what = format!("supervisor killed, {n}");
        unharmed(&running, &before, &what);
        nothing_of_ours(running.pid, &what);
        stillpoint.verified();
        stillpoint.run(&arguments).ok();
        unharmed(&running, &before, "after a checkpoint by name");
        nothing_of_ours(running.pid, "after a checkpoint by name");
        running.finish("in the end");
    }
    eprintln!(
        "{engine}: {watched} supervisors killed with the memory watched, {traced} with the target stopped"
    );
    scratch.nothing_is_left("in the end");
}

#[test]
fn during_restore() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let (pid, directory, before) = killed_at_its_checkpoint(&scratch, &stillpoint);
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
        kernel::wait_free(pid);
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
        if is_whole_or_gone(&scratch, pid, &directory, &before, &what) {
            whole += 1;
        } else {
            none += 1;
        }
    }
    eprintln!("killed {} restores: {none} left nothing, {whole} a whole process", none + whole);
    scratch.sweep();
    kernel::wait_free(pid);
    stillpoint.verified();
    let restored = stillpoint.restore_detached("job", &[]);
    // If somebody else has its id by now, it has another one out here, and all that is compared has other names.
    assert_eq!(restored, pid, "it has its old process id");
    let running = Running::restored(restored, &directory);
    unharmed(&running, &before, "restored in the end");
    running.finish("restored in the end");
}

/// The process id, the directory and the looks of a target that is there only as the checkpoint `job`.
fn killed_at_its_checkpoint(scratch: &Scratch, stillpoint: &Stillpoint) -> (u32, PathBuf, Facts) {
    let mut running = start(scratch);
    let before = first_facts(running.pid);
    stillpoint.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    (running.pid, running.directory().to_owned(), before)
}

/// Either nothing is there, or all of it: whoever is left takes a moment to notice. Returns whether it is there.
#[track_caller]
fn is_whole_or_gone(scratch: &Scratch, pid: u32, directory: &Path, before: &Facts, what: &str) -> bool {
    let until = Instant::now() + PATIENCE;
    loop {
        let left = scratch.processes();
        if left.is_empty() {
            return false;
        }
        let target = Running::restored(pid, directory);
        if lives_apart(&left, pid) {
            return true;
        }
        if left.contains(&pid) && before.differences(&facts(pid)).is_empty() {
            // Whole. Whoever looks after it may still decide to end it, as nobody was told that it is back.
            std::thread::sleep(Duration::from_millis(300));
            if unharmed_or_dead(&target, before, what) {
                return true;
            }
        }
        right!(
            Instant::now() < until,
            "{what}: half a process is left: {}\n{}",
            kernel::describe(&left),
            before.differences(&facts(pid))
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Killed as it makes one of the system calls by which it does something to the program: some of them, or each in a soak.
#[test]
fn at_a_deed_of_a_restore() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let (pid, directory, before) = killed_at_its_checkpoint(&scratch, &stillpoint);
    // How many calls it made, and whether the program is there. It ends with it.
    let restore = |nth, what: &str| {
        kernel::wait_free(pid);
        let mut aimed = Aimed::start(&stillpoint, scratch.path(), nth, DEEDS, &["restore", "job"])?;
        let is_whole = || kernel::is_untraced(pid) && before.differences(&facts(pid)).is_empty();
        aimed.wait_or(|| is_whole() || lives_apart(&scratch.processes(), pid));
        let whole = is_whole_or_gone(&scratch, pid, &directory, &before, what);
        scratch.sweep();
        Some((aimed.wait().calls, whole))
    };
    let Some((calls, true)) = restore(0, "not killed") else { return skipped("no C compiler") };
    let kills = tier::times("STILLPOINT_DEEDS", 12, calls).clamp(1, calls);
    let first = scratch.random().below(calls / kills);
    let outcomes = (1 + first..=calls).step_by((calls / kills) as usize);
    let whole =
        outcomes.filter(|n| restore(*n, &format!("killed at call {n} of {calls}")).is_some_and(|o| o.1));
    eprintln!("of {kills} restores {} left a whole process", whole.count());
    stillpoint.verified();
    let running = Running::restored(stillpoint.restore_detached("job", &[]), &directory);
    unharmed(&running, &before, "restored in the end");
    running.finish("restored in the end");
}

/// Whether somebody else had an id of the program when it came back: it lives in a pid namespace of its own.
fn lives_apart(left: &[u32], pid: u32) -> bool {
    left.iter().any(|&p| p != pid && own_id(p) == pid)
}

/// The process id that a process has in its own pid namespace.
fn own_id(pid: u32) -> u32 {
    let ids = kernel::status(pid, "NSpid").unwrap_or_default();
    ids.split_whitespace().last().and_then(|id| id.parse().ok()).unwrap_or(pid)
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
        stillpoint.verified();
    }
}
