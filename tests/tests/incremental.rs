//! Checkpoint after checkpoint of one program: what is given back in between is gone, the store stays bounded, memory that
//! is only reserved costs nothing, and neighbours of every kind do no harm. Each under every engine that the command offers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stillpoint_tests::observe::traces_of_us;
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Checkpoint, Scratch, Stillpoint, Target, engine, kernel, right, skipped, tier, undisturbed_only,
    wait_for,
};

/// One test for each function under each engine, in a module of the engine's name.
macro_rules! under {
    ($($engine:ident)*: $names:tt) => {
        $(
            mod $engine {
                each! { $engine $names }
            }
        )*
    };
}

macro_rules! each {
    ($engine:ident { $($name:ident,)* }) => {
        $(
            #[test]
            fn $name() {
                if !crate::incremental::undisturbed_only() {
                    match crate::incremental::engine::offered(stringify!($engine)) {
                        true => crate::incremental::$name(stringify!($engine)),
                        false => crate::incremental::skipped(concat!("the command has no engine ", stringify!($engine))),
                    }
                }
            }
        )*
    };
}

under! { stop precopy wp fork auto: {
    memory_given_back_between_checkpoints,
    reserved_memory_costs_nothing,
    two_at_once,
    a_stopped_program,
    a_traced_program,
} }

fn target(program: &str, scenario: &str) -> Target {
    Target::new(program, scenario, Build::Dynamic).expect("cc")
}

/// Restores a checkpoint once the process of the life before is gone.
#[track_caller]
fn restore(stillpoint: &Stillpoint, checkpoint: &Checkpoint, pid: u32, directory: &Path) -> Running {
    kernel::wait_free(pid);
    let _ = fs::remove_file(directory.join("go"));
    let pid = stillpoint.restore_detached(&checkpoint.name(), &[]);
    Running::restored(pid, directory)
}

/// Pages that were dropped, unmapped, moved or zeroed after one checkpoint must not come back with the next.
fn memory_given_back_between_checkpoints(engine: &str) {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("writer");
    let job = target("pages", "given_back").start_job(&stillpoint, "job", &directory);
    let running = job.running;
    let step_file = |step: u32| directory.join(format!("step.{step}"));
    let steps = 8;
    let mut history = vec![stillpoint.checkpoint("job", "job", &["--engine", engine])];
    for step in 1..=steps {
        fs::write(step_file(step), "").expect("write");
        wait_for("a step", Duration::from_secs(60), || {
            running.said().contains(&format!("step {step}\n")).then_some(())
        });
        history.push(stillpoint.checkpoint("job", "job", &["--engine", engine]));
    }
    let pid = running.pid;
    running.finish("after checkpoints");
    for (step, checkpoint) in history.iter().enumerate().rev() {
        // It must find what it had at that step, without doing the next.
        let _ = fs::remove_file(step_file(step as u32 + 1));
        restore(&stillpoint, checkpoint, pid, &directory).finish(&format!("restored after step {step}"));
    }
    scratch.nothing_is_left("in the end");
}

/// A number of `/proc/PID/status`, KiB.
fn kib(pid: u32, field: &str) -> u64 {
    let value = kernel::status(pid, field).unwrap_or_default();
    value.trim_end_matches(" kB").trim().parse().unwrap_or_default()
}

fn reserved_memory_costs_nothing(engine: &str) {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("writer");
    let job = target("pages", "sparse").start_job(&stillpoint, "job", &directory);
    if let Some(why) = job.running.skip() {
        return skipped(&why);
    }
    let pid = job.running.pid;
    let sizes = || ["VmRSS", "VmPTE"].map(|field| kib(pid, field));
    let before = sizes();
    let over = AtomicBool::new(false);
    let (most, walls) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = before;
            while !over.load(Ordering::Relaxed) {
                let now = sizes();
                most = [most[0].max(now[0]), most[1].max(now[1])];
                std::thread::sleep(Duration::from_millis(1));
            }
            most
        });
        // By its process id, and twice as a job: tracking may stay armed between those two.
        let targets = [pid.to_string(), "job".into(), "job".into()];
        let output = targets
            .map(|t| stillpoint.run(&["checkpoint", &t, "--name", "job", "--engine", engine, "--json"]));
        over.store(true, Ordering::Relaxed);
        (watcher.join().expect("watcher"), output.map(|o| o.ok().wall))
    });
    let after = sizes();
    let stored: u64 = stillpoint.files().iter().filter_map(|f| fs::metadata(f).ok()).map(|m| m.len()).sum();
    eprintln!(
        "{engine}: [RSS, page tables] KiB {before:?}, at most {most:?}, after {after:?}; {walls:?}; {stored} B"
    );
    for (field, n) in [("resident memory", 0), ("page tables", 1)] {
        assert!(most[n] < before[n] + 4096, "{field} grew from {} to {} KiB", before[n], most[n]);
    }
    assert!(stored < 8 << 20, "{stored} bytes are stored of half a megabyte");
    assert!(walls.iter().all(|w| *w < Duration::from_secs(10)), "{walls:?}");
    job.running.finish("after checkpoints");
    let newest = stillpoint.checkpoints("job").pop().expect("a checkpoint");
    let restored = stillpoint.restore_detached(&format!("job@{newest}"), &[]);
    Running::restored(restored, &directory).finish("restored");
}

/// Two commands for one program: each succeeds, or says that somebody else is at it.
fn two_at_once(engine: &str) {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = target("instant", "sequences").start(&scratch.directory("writer"), scratch.path());
    let (pid, directory) = (running.pid, running.directory().to_owned());
    for round in 0..4 {
        // Into one job, which allows only one writer, and into two.
        let names = if round % 2 == 0 { ["one", "one"] } else { ["one", "other"] };
        let outputs = std::thread::scope(|scope| {
            names
                .map(|name| {
                    let stillpoint = &stillpoint;
                    let pid = pid.to_string();
                    scope.spawn(move || {
                        stillpoint.run(&["checkpoint", &pid, "--name", name, "--engine", engine, "--json"])
                    })
                })
                .map(|t| t.join().expect("checkpoint"))
        });
        assert!(outputs.iter().any(|o| o.status.success()), "neither: {} {}", outputs[0], outputs[1]);
        for output in outputs.into_iter().filter(|o| !o.status.success()) {
            let code = output.code();
            assert!(matches!(code, 1..=3), "{output}");
            let words =
                ["trace", "another", "busy", "already", "in use", "debug", "userfaultfd", "try again"];
            output.fails(code, &words);
        }
        right!(kernel::alive(pid), "it is dead");
    }
    let traces = traces_of_us(pid, false);
    right!(traces.is_empty(), "left behind: {traces:#?}");
    stillpoint.verified();
    running.finish("after checkpoints");
    for name in ["one", "other"] {
        if stillpoint.run(&["ls", name, "--json"]).stdout.contains("\"id\"") {
            kernel::wait_free(pid);
            let _ = fs::remove_file(directory.join("go"));
            let restored = stillpoint.restore_detached(name, &[]);
            Running::restored(restored, &directory).finish("restored");
        }
    }
}

fn a_stopped_program(engine: &str) {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut running = target("instant", "sequences").start(&scratch.directory("writer"), scratch.path());
    kernel::kill(running.pid, rustix::process::Signal::STOP);
    kernel::stays_stopped(running.pid);
    for _ in 0..2 {
        stillpoint.checkpoint(running.pid, "job", &["--engine", engine]);
        kernel::stays_stopped(running.pid);
        let traces = traces_of_us(running.pid, false);
        right!(traces.is_empty(), "left behind: {traces:#?}");
    }
    // It goes on, and is stopped, while it is checkpointed.
    let pid = running.pid;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for signal in [kernel::SIGCONT, rustix::process::Signal::STOP] {
                    kernel::kill(pid, signal);
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
        });
        for _ in 0..3 {
            stillpoint.checkpoint(pid, "job", &["--engine", engine]);
        }
        over.store(true, Ordering::Relaxed);
    });
    kernel::stays_stopped(pid);
    stillpoint.checkpoint(pid, "job", &["--engine", engine, "--kill"]);
    running.reap();
    let pid = stillpoint.restore_detached("job", &[]);
    kernel::stays_stopped(pid);
    kernel::kill(pid, kernel::SIGCONT);
    Running::restored(pid, running.directory()).finish("after SIGCONT");
}

fn a_traced_program(engine: &str) {
    if kernel::which("strace").is_none() {
        return skipped("strace is not installed");
    }
    let scratch = Scratch::new();
    let running = target("instant", "sequences").start(&scratch.directory("writer"), scratch.path());
    let pid = running.pid;
    let mut command = alone("strace");
    command.args(["-qq", "-f", "-o", "/dev/null", "-e", "trace=none", "-p"]).arg(pid.to_string());
    let strace = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut strace = strace.expect("strace");
    wait_for("strace to attach", Duration::from_secs(60), || {
        kernel::status(pid, "TracerPid").filter(|t| t != "0")
    });
    let output =
        scratch.stillpoint().run(&["checkpoint", &pid.to_string(), "--name", "job", "--engine", engine]);
    assert!(matches!(output.code(), 1..=3), "{output}");
    let code = output.code();
    output.fails(code, &["trace", "debug"]);
    kernel::kill(strace.id(), rustix::process::Signal::TERM);
    let _ = strace.wait();
    let traces = traces_of_us(pid, false);
    right!(traces.is_empty(), "left behind after a refusal: {traces:#?}");
    running.finish("after a refusal");
}

// --- chains

/// How many checkpoints a chain has.
fn length_of_a_chain() -> usize {
    tier::times("STILLPOINT_CHAIN", 40, 300) as usize
}

/// Bytes of page data in the store.
fn page_data(stillpoint: &Stillpoint) -> u64 {
    let pages = |f: &PathBuf| f.extension().is_some_and(|e| e == "pages");
    let segments = stillpoint
        .files()
        .into_iter()
        .filter(pages)
        .filter(|f| !f.components().any(|c| c.as_os_str() == "first"));
    segments.filter_map(|f| fs::metadata(f).ok()).map(|m| m.blocks() * 512).sum()
}

/// Takes checkpoints of a job, keeps the newest five, and looks at the store after each.
#[track_caller]
fn chain(length: usize, engine_of: impl Fn(&Scratch) -> &'static str) {
    const KEPT: usize = 5;
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("writer");
    let job = target("instant", "lasting").start_job(&stillpoint, "job", &directory);
    let pid = job.running.pid;
    // A job of its own, so that the first one is there in the end.
    let first = stillpoint.checkpoint(pid, "first", &["--engine", engine_of(&scratch)]);
    let (mut history, mut most) = (Vec::new(), 0.0f64);
    let number = |c: &Checkpoint, key: &str| c.json[key].as_u64().unwrap_or_default();
    let mut incremental = 0;
    for n in 0..length {
        std::thread::sleep(Duration::from_millis(scratch.random().below(5)));
        let checkpoint = stillpoint.checkpoint("job", "job", &["--engine", engine_of(&scratch)]);
        incremental += usize::from(number(&checkpoint, "written_bytes") < number(&checkpoint, "bytes") / 2);
        history.push(checkpoint);
        stillpoint.run(&["prune", "job", "--keep", &KEPT.to_string()]).ok();
        let kept = &history[history.len().saturating_sub(KEPT)..];
        // Each page of the oldest that is kept, and what each later one has added.
        let live =
            number(&kept[0], "bytes") + kept[1..].iter().map(|c| number(c, "written_bytes")).sum::<u64>();
        let stored = page_data(&stillpoint);
        assert!(
            stored <= 2 * live + (1 << 20),
            "after {n} checkpoints {stored} bytes are stored, of which at most {live} are live"
        );
        most = most.max(stored as f64 / live as f64);
    }
    stillpoint.verified();
    let ids: Vec<u64> = history.iter().map(|c| c.id).collect();
    assert_eq!(stillpoint.checkpoints("job"), ids[ids.len().saturating_sub(KEPT)..]);
    job.running.finish("after a chain");
    let kept = &history[history.len().saturating_sub(KEPT)..];
    let any = &kept[scratch.random().below(kept.len() as u64) as usize];
    let mut walls = Vec::new();
    for checkpoint in [&first, any, &kept[kept.len() - 1]] {
        let began = std::time::Instant::now();
        let running = restore(&stillpoint, checkpoint, pid, &directory);
        walls.push(began.elapsed());
        running.finish(&format!("restored from {}", checkpoint.json));
    }
    eprintln!(
        "{length} checkpoints, {incremental} of them incremental; stored at most {most:.2} of what may be live; \
         restore of the first {:?}, of the last {:?}",
        walls[0], walls[2]
    );
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_chain() {
    if !undisturbed_only() {
        chain(length_of_a_chain(), |_| if engine::offered("auto") { "auto" } else { "stop" });
    }
}

/// Each checkpoint by another engine, at random.
#[test]
fn a_chain_of_all_engines() {
    if !undisturbed_only() {
        let engines: Vec<_> = engine::all().collect();
        chain(length_of_a_chain().div_ceil(3), |s| engines[s.random().below(engines.len() as u64) as usize]);
    }
}

/// A program that was not started as a job becomes one.
#[test]
fn adopted() {
    if !engine::has_command("adopt") {
        return skipped("the command has no adopt");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut running = target("instant", "lasting").start(&scratch.directory("writer"), scratch.path());
    let (pid, directory) = (running.pid, running.directory().to_owned());
    let mut command = stillpoint.command(&["adopt", &pid.to_string(), "--name", "job", "--json"]);
    let mut adopter = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("adopt");
    wait_for("the job to be known", Duration::from_secs(60), || {
        stillpoint.run(&["ls", "--json"]).stdout.contains("\"job\"").then_some(())
    });
    let history: Vec<_> = (0..4).map(|_| stillpoint.checkpoint("job", "job", &[])).collect();
    for checkpoint in &history[1..] {
        let [written, bytes] =
            ["written_bytes", "bytes"].map(|k| checkpoint.json[k].as_u64().unwrap_or_default());
        assert!(written < bytes / 4, "not incremental: {}", checkpoint.json);
    }
    kernel::kill(pid, kernel::SIGKILL);
    running.reap();
    let _ = adopter.wait();
    for checkpoint in &history {
        restore(&stillpoint, checkpoint, pid, &directory)
            .finish(&format!("restored from {}", checkpoint.json));
    }
}

/// Whichever engine saves it in the end, what was copied in vain is not in the store, and what is told of it is true.
#[test]
fn what_was_copied_in_vain_takes_no_room() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let program = crate::paging::built("writers", &scratch);
    let mut command = alone(&program);
    command.args(["96", "2", "1000000000"]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.env(MARK, scratch.path()).spawn().expect("writers");
    let size =
        || kernel::status(child.id(), "RssAnon").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    wait_for("its memory", Duration::from_secs(60), || size().filter(|kib| *kib > 90 << 10));
    for id in 1..4 {
        let checkpoint = stillpoint.checkpoint(child.id(), "writers", &["--engine", "auto"]);
        let number = |name: &str| checkpoint.json[name].as_u64().expect("a number");
        let segment = scratch.path().join(format!("store/jobs/writers/segments/{id}.pages"));
        let taken = fs::metadata(&segment).expect("a segment").blocks() * 512;
        let [bytes, written] = ["bytes", "written_bytes"].map(number);
        right!(written <= 2 * bytes, "{bytes} bytes, {written} written: {}", checkpoint.json);
        right!(taken.abs_diff(written) <= 1 << 20, "{written} written, {taken} taken: {}", checkpoint.json);
        if checkpoint.json["engine"] == "fork" {
            right!(written <= bytes + bytes / 16, "{bytes} bytes, {written} written: {}", checkpoint.json);
        }
    }
    stillpoint.verified();
    child.kill().and_then(|()| child.wait()).expect("killed");
}
