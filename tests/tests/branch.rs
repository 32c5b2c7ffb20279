//! Snapshots of running programs, and rollback: programs that check themselves all the time are sent back and forth at random, and
//! must find all as they left it, whoever is killed meanwhile.

use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use stillpoint_tests::counter::{COUNTER, Counter};
use stillpoint_tests::observe::Facts;
use stillpoint_tests::programs::{built_by_go, installed, source};
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Output, Scratch, Stillpoint, Target, kernel, right, right_eq, skipped, tier, undisturbed_only,
    wait_for,
};

/// How often a test goes back and forth.
fn turns() -> u64 {
    tier::times("STILLPOINT_TURNS", 8, 50)
}

/// A program of which snapshots are taken.
struct Branched {
    scratch: Scratch,
    stillpoint: Stillpoint,
    running: Running,
}

impl Branched {
    /// What is taken by whoever keeps its snapshots, MiB, when it has given back what its allocator keeps in hand: it does when nobody
    /// has asked for 2 s.
    fn memory_of_keeper(&self) -> u64 {
        std::thread::sleep(Duration::from_secs(3));
        keepers_of(self.running.pid).into_iter().map(memory).max().unwrap_or(0)
    }

    /// Nothing where only undisturbed runs are asked for, or it cannot run here.
    fn start(program: &str, scenario: &str, build: Build) -> Option<Self> {
        let Some(target) = Target::new(program, scenario, build) else {
            skipped("no compiler for it");
            return None;
        };
        let scratch = Scratch::new();
        let running = target.start(&scratch.directory("target"), scratch.path());
        if let Some(why) = running.skip() {
            skipped(&why);
            return None;
        }
        // A thread that only begins has not registered its restartable sequences: there is no way back to before that.
        let _ = Facts::settled(running.pid);
        if undisturbed_only() {
            running.finish("undisturbed");
            return None;
        }
        let stillpoint = scratch.stillpoint();
        Some(Branched { scratch, stillpoint, running })
    }

    #[track_caller]
    fn does(&self, arguments: &[&str]) -> Value {
        let mut all = arguments.to_vec();
        all.push("--json");
        self.run(&all).ok().json()
    }

    /// Runs a command about the program. Should that fail as the program has ended, it is told what that had said.
    fn run(&self, arguments: &[&str]) -> Output {
        let mut output = self.stillpoint.run(arguments);
        if output.code() != 0 && !kernel::alive(self.running.pid) {
            output.stderr += &format!("\n--- the program has ended, and said\n{}", self.running.said());
        }
        output
    }

    fn pid(&self) -> String {
        self.running.pid.to_string()
    }

    #[track_caller]
    fn snapshot(&self) -> u64 {
        let told = self.does(&["snapshot", &self.pid()]);
        told["snapshot"].as_u64().unwrap_or_else(|| panic!("no number in {told}"))
    }

    /// Back to a snapshot; false if that is refused for this reason.
    #[track_caller]
    fn try_rollback(&self, snapshot: u64, reason: &str) -> bool {
        let output = self.run(&["rollback", &format!("{}@{snapshot}", self.pid()), "--kill-children"]);
        match output.code() {
            3 => drop(output.fails(3, &[reason])),
            _ => return output.ok().status.success(),
        }
        false
    }

    #[track_caller]
    fn forget(&self, snapshot: u64) {
        self.does(&["forget", &format!("{}@{snapshot}", self.pid())]);
    }

    fn rest(&self) {
        std::thread::sleep(Duration::from_micros(self.scratch.random().below(30_000)));
    }

    /// To random snapshots and back, with others taken and forgotten.
    #[track_caller]
    fn back_and_forth(&self, turns: u64) {
        let mut there = vec![self.snapshot()];
        for _ in 0..turns {
            self.rest();
            let any = there[self.scratch.random().below(there.len() as u64) as usize];
            match self.scratch.random().below(6) {
                0 | 1 => there.push(self.snapshot()),
                2 if there.len() > 1 => {
                    self.forget(any);
                    there.retain(|id| *id != any);
                }
                // What is shared cannot be mapped again.
                _ => drop(self.try_rollback(any, "shared memory has been unmapped since")),
            }
            right!(kernel::alive(self.running.pid), "it has ended:\n{}", self.running.said());
        }
        there.iter().for_each(|id| self.forget(*id));
    }

    #[track_caller]
    fn finish(self, what: &str) {
        let pid = self.running.pid;
        self.running.finish(what);
        wait_for("who kept its snapshots to leave", Duration::from_secs(60), || {
            keepers_of(pid).is_empty().then_some(())
        });
        self.scratch.nothing_is_left(what);
    }
}

/// Those that keep snapshots of a process.
fn keepers_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let wanted = format!("\0brancher\0{pid}\0");
    let keeps = |other: &u32| {
        let line = std::fs::read(format!("/proc/{other}/cmdline")).unwrap_or_default();
        line.windows(wanted.len()).any(|w| w == wanted.as_bytes())
    };
    pids.filter(keeps).collect()
}

#[track_caller]
fn returns(program: &str, scenario: &str, build: Build) {
    let Some(branched) = Branched::start(program, scenario, build) else { return };
    // These last two seconds, also where a turn takes long.
    branched.back_and_forth(if program == "sleeps" { 6 } else { turns() });
    branched.finish("after all");
}

macro_rules! return_of {
    ($($program:ident: $($name:ident)*;)*) => {
        $(
            mod $program {
                $(
                    #[test]
                    fn $name() {
                        crate::branch::returns(stringify!($program), stringify!($name), super::Build::Dynamic);
                    }
                )*
            }
        )*
    };
}

return_of! {
    instant: sequences mapped_twice rolling queue swapped_pages private_file;
    mappings: moves overlaid drops replacements protections collapses zeros everything;
    threads: many life_after locks rseq sections scheduling;
    storms: heap stacks threads;
    pages: transparent locked merged;
    kernel_writes: futexes vm_writes;
    descriptors: regular duplicates directories pipes eventfds epolls signalfds;
    attributes: seccomp_filters seccomp_no_mappings seccomp_per_thread limits directories odds capabilities;
    dispatch: within_libc within_a_page around as_wine always let_through several;
    timers: interval_timers interval_fires pending_alarm pending_alarm_once posix_timers pending_timer pending_timer_once pending_timer_goes_on timer_threads timer_descriptors;
    signals: masks actions queued_realtime_order delivered_once alternate_stacks handler_running storm faulting;
    registers: general sse avx x87 segment_bases red_zone small_stack;
    memory: anonymous stack_growth heap_growth guards no_access;
    sleeps: relative_nanosleep poll_timeout futex_relative cond_timedwait;
}

/// What a program has set of its pipes and memory since is as it was.
#[test]
fn what_was_set_otherwise_goes_back() {
    let Some(branched) = Branched::start("descriptors", "set_otherwise", Build::Dynamic) else { return };
    let directory = branched.running.directory().to_owned();
    let snapshot = branched.snapshot();
    std::fs::write(directory.join("change"), "").expect("told to change");
    let changed = || directory.join("changed").exists().then_some(());
    wait_for("it to set all otherwise", Duration::from_secs(10), changed);
    std::fs::remove_file(directory.join("change")).expect("not told any more");
    assert!(branched.try_rollback(snapshot, ""));
    branched.forget(snapshot);
    branched.finish("back");
}

#[test]
fn a_static_program() {
    returns("threads", "many", Build::Static);
}

#[test]
fn a_musl_program() {
    returns("threads", "life_after", Build::Musl);
}

/// A C program against the library that was built now, run to its end; what it said.
#[track_caller]
fn by_itself(scratch: &Scratch, source: &str, arguments: &[&str]) -> Option<String> {
    let program = built(scratch, source)?;
    let mut run = Command::new(&program);
    run.args(arguments);
    Some(ran(scratch, &run))
}

/// A C program against the library that was built now; otherwise says what is skipped.
#[track_caller]
fn built(scratch: &Scratch, source: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let Some(folder) = library() else {
        skipped("the library does not build here");
        return None;
    };
    let program = scratch.path().join("program");
    let mut build = Command::new("cc");
    build
        .args(["-O1", "-g", "-pthread", "-I"])
        .arg(root.join("crates/library/include"))
        .arg("-o")
        .arg(&program);
    build.arg(root.join(source)).arg(folder.join("libstillpoint.so"));
    let built = build.arg(format!("-Wl,-rpath,{}", folder.display())).output().expect("cc");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    (!undisturbed_only()).then_some(program)
}

/// Runs a program that takes snapshots of itself to its end, which must be a good one; what it said.
#[track_caller]
fn ran(scratch: &Scratch, program: &Command) -> String {
    let mut run = alone("timeout");
    run.arg("400").arg(program.get_program()).args(program.get_args()).current_dir(scratch.path());
    run.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    run.env("STILLPOINT_BIN", stillpoint_tests::stillpoint::binary());
    run.env("STILLPOINT_STORE", scratch.directory("store")).env(MARK, scratch.path());
    let output = run.output().expect("timeout");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() != Some(124), "it took too long: {said}\n{complaints}");
    // That a rollback is refused, for a connection that has ended meanwhile, harms nothing, and may be tried again.
    let refused = "it has been closed or changed since, and cannot be had again";
    assert!(!complaints.contains(refused), "{}: {said}\n{complaints}", output.status);
    right!(output.status.success(), "{}: {said}\n{complaints}", output.status);
    said
}

/// Where the library of this workspace is, built now.
fn library() -> Option<PathBuf> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        if let Some(folder) = std::env::var_os("STILLPOINT_LIBRARY") {
            return Some(PathBuf::from(folder));
        }
        let folder = std::env::current_exe().ok()?.ancestors().nth(2)?.to_owned();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "-p", "stillpoint-library"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if folder.file_name().is_some_and(|n| n == "release") {
            build.arg("--release");
        }
        build.status().is_ok_and(|s| s.success()).then_some(folder)
    };
    BUILT.get_or_init(build).clone()
}

#[test]
fn a_program_by_itself() {
    let scratch = Scratch::new();
    if let Some(said) = by_itself(&scratch, "tests/programs/branching.c", &["30"]) {
        right_eq!(said, "ok\n");
        scratch.nothing_is_left("in the end");
    }
}

/// What is known of it from the last snapshot is not taken for what it has set since.
#[test]
fn nothing_is_overlooked() {
    let scratch = Scratch::new();
    if let Some(said) = by_itself(&scratch, "tests/programs/overlooked.c", &["3"]) {
        right_eq!(said, "ok\n");
        scratch.nothing_is_left("in the end");
    }
}

#[test]
fn guard_regions_that_come_and_go() {
    let scratch = Scratch::new();
    if let Some(said) = by_itself(&scratch, "tests/programs/guards.c", &["60"]) {
        right!(said == "ok\n" || said.contains("no guard regions"), "{said}");
    }
}

#[test]
fn a_python_program_by_itself() {
    let (scratch, python) = (Scratch::new(), "/usr/bin/python3");
    let has_arrays =
        Command::new(python).args(["-c", "import numpy"]).output().is_ok_and(|o| o.status.success());
    let Some(folder) = library().filter(|_| has_arrays && !undisturbed_only()) else {
        skipped("needs python3-numpy");
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut run = Command::new(python);
    run.arg(root.join("programs/branching.py")).arg("12").env("PYTHONDONTWRITEBYTECODE", "1");
    run.env("STILLPOINT_LIBRARY", folder.join("libstillpoint.so")).env("PYTHONPATH", root.join("../python"));
    let said = ran(&scratch, &run);
    right_eq!(said, "ok\n");
    scratch.nothing_is_left("in the end");
}

/// Cells are undone, by whoever talks to the kernel as a notebook does.
#[test]
fn a_notebook() {
    let (scratch, python) = (Scratch::new(), "/usr/bin/python3");
    let has_kernel =
        Command::new(python).args(["-c", "import ipykernel, jupyter_client"]).stderr(Stdio::null()).status();
    let has_kernel = has_kernel.is_ok_and(|s| s.success());
    let Some(folder) = library().filter(|_| has_kernel && !undisturbed_only()) else {
        skipped("needs python3-ipykernel and python3-jupyter-client");
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut run = Command::new(python);
    run.arg(root.join("programs/notebook.py")).arg(scratch.path());
    run.arg(root.join("../crates/library/examples/undo.ipynb"));
    run.env("PYTHONDONTWRITEBYTECODE", "1").env("HOME", scratch.directory("home"));
    run.env("STILLPOINT_LIBRARY", folder.join("libstillpoint.so")).env("PYTHONPATH", root.join("../python"));
    right_eq!(ran(&scratch, &run), "ok\n");
    scratch.nothing_is_left("in the end");
}

/// It makes a twin, which checks itself and ends; and a checkpoint, which it is restored from when it is gone.
#[test]
fn a_program_that_lasts() {
    let scratch = Scratch::new();
    let Some(program) = built(&scratch, "tests/programs/lasting.c") else { return };
    let stillpoint = scratch.stillpoint();
    let mut run = Command::new(&program);
    run.current_dir(scratch.path()).env(MARK, scratch.path()).stdin(Stdio::null());
    run.stderr(File::create(scratch.path().join("complaints")).expect("a file"));
    run.env("STILLPOINT_BIN", stillpoint_tests::stillpoint::binary());
    run.env("STILLPOINT_STORE", stillpoint.store());
    let mut running = run.spawn().expect("the program");
    let says = |name: &str| {
        wait_for(&format!("the program to say {name}"), Duration::from_secs(60), || {
            let said = std::fs::read_to_string(scratch.path().join("complaints")).expect("complaints");
            assert_eq!(said, "");
            scratch.path().join(name).exists().then_some(())
        });
    };
    says("twin");
    says("checkpointed");
    running.kill().and_then(|()| running.wait()).expect("killed");
    let pid = stillpoint.restore_at_once("lasting", &[]);
    assert_eq!(pid, running.id());
    says("restored");
    kernel::wait_gone(pid, Duration::from_secs(60));
    scratch.nothing_is_left("in the end");
}

/// A program that checks itself all the time and says so in lines, of which snapshots are taken from outside.
struct Talking {
    branched: Branched,
}

impl Talking {
    fn start(scratch: Scratch, command: &[&str]) -> Self {
        // What it says is appended, also when it has gone back.
        let said = scratch.path().join("out");
        let output = File::options().append(true).create(true).open(said).expect("a file");
        let mut run = alone(command[0]);
        run.args(&command[1..]).stdin(Stdio::null());
        run.stdout(output.try_clone().expect("a file")).stderr(output);
        run.current_dir(scratch.path()).env(MARK, scratch.path());
        let running = Running::new(run.spawn().expect("the program"), scratch.path());
        let stillpoint = scratch.stillpoint();
        let talking = Talking { branched: Branched { scratch, stillpoint, running } };
        talking.goes_on(3);
        talking
    }

    fn said(&self) -> String {
        self.branched.running.said()
    }

    /// It says so many more lines.
    #[track_caller]
    fn goes_on(&self, lines: usize) {
        let until = self.said().lines().count() + lines;
        wait_for("the program to count", Duration::from_secs(60), || {
            let said = self.said();
            right!(!said.contains("wrong") && kernel::alive(self.branched.running.pid), "{said}");
            (said.lines().count() >= until).then_some(())
        });
    }

    fn end(self) {
        let Branched { scratch, running, .. } = self.branched;
        let mut all = vec![running.pid];
        let mut at = 0;
        while at < all.len() {
            all.extend(kernel::children(all[at]));
            at += 1;
        }
        all.into_iter().for_each(|pid| kernel::kill(pid, kernel::SIGKILL));
        drop(running);
        scratch.nothing_is_left("in the end");
    }
}

#[track_caller]
fn goes_back(scratch: Scratch, command: &[&str]) {
    if undisturbed_only() {
        return;
    }
    let talking = Talking::start(scratch, command);
    talking.branched.back_and_forth(3 * turns());
    talking.goes_on(3);
    talking.end();
}

/// By so much memory two footprints may differ, MiB.
const LEEWAY: u64 = 24;

/// What a program, and whoever keeps its snapshots, take.
#[derive(Debug)]
struct Footprint {
    descriptors: Vec<u32>,
    threads: usize,
    /// Resident, MiB.
    memory: u64,
    of_keeper: usize,
    processes: usize,
}

/// Resident memory, MiB.
fn memory(pid: u32) -> u64 {
    let told = kernel::status(pid, "VmRSS").unwrap_or_default();
    told.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) >> 10
}

impl Footprint {
    fn of(branched: &Branched) -> Self {
        let descriptors = |pid: u32| kernel::numbers(&Path::new("/proc").join(pid.to_string()).join("fd"));
        let pid = branched.running.pid;
        Footprint {
            descriptors: descriptors(pid),
            threads: kernel::threads(pid).len(),
            memory: memory(pid),
            // Beside the one that keeps them there may be one that watches it.
            of_keeper: keepers_of(pid).into_iter().map(|k| descriptors(k).len()).max().unwrap_or(0),
            processes: branched.scratch.processes().len(),
        }
    }

    fn grow_to(&mut self, other: &Footprint) {
        self.threads = self.threads.max(other.threads);
        self.memory = self.memory.max(other.memory);
        self.of_keeper = self.of_keeper.max(other.of_keeper);
        self.processes = self.processes.max(other.processes);
    }

    /// Whether it is not larger than another one. Memory may differ by what the program does in the first moments.
    fn is_within(&self, other: &Footprint) -> bool {
        self.descriptors == other.descriptors
            && self.threads <= other.threads
            && self.memory <= other.memory + LEEWAY
            && self.of_keeper <= other.of_keeper
            && self.processes <= other.processes
    }
}

/// As [`goes_back`], to one snapshot again and again; nothing grows. `STILLPOINT_TURNS=250` makes it a thousand times.
#[track_caller]
fn leaks_nothing(scratch: Scratch, command: &[&str]) {
    leaks_nothing_in(turns(), scratch, command);
}

fn leaks_nothing_in(turns: u64, scratch: Scratch, command: &[&str]) {
    if undisturbed_only() {
        return;
    }
    let talking = Talking::start(scratch, command);
    let branched = &talking.branched;
    let here = branched.snapshot();
    let once = || {
        branched.rest();
        assert!(branched.try_rollback(here, "shared memory has been unmapped since"));
        Footprint::of(branched)
    };
    // Buffers grow to their sizes, and a thread may be made before it is looked at.
    let (mut first, all, mut kept) = (once(), 4 * turns, 0);
    for turn in 0..all {
        if turn % 8 == 0 {
            let other = branched.snapshot();
            branched.rest();
            branched.forget(other);
        }
        let now = once();
        if turn < all / 2 {
            first.grow_to(&now);
        }
        if turn + 1 == all / 2 {
            kept = branched.memory_of_keeper();
        }
    }
    let mut last = once();
    for _ in 0..30 {
        if last.is_within(&first) {
            break;
        }
        last = once();
    }
    assert!(last.is_within(&first), "after {all} rollbacks {last:?}, and at half of them {first:?}");
    let mut now = branched.memory_of_keeper();
    for _ in 0..10 {
        if now <= kept + LEEWAY {
            break;
        }
        now = branched.memory_of_keeper();
    }
    assert!(
        now <= kept + LEEWAY,
        "the keeper takes {now} MiB after {all} rollbacks, and {kept} at half of them"
    );
    branched.forget(here);
    talking.goes_on(3);
    talking.end();
}

#[test]
fn a_program_of_either_c_library_leaks_nothing() {
    let heap = source("heap.c");
    for build in [Build::Dynamic, Build::Musl] {
        match build.of(&heap) {
            Some(program) => leaks_nothing(Scratch::new(), &[&program.to_string_lossy()]),
            None => skipped("no compiler for it"),
        }
    }
}

#[test]
fn a_jvm_leaks_nothing() {
    let scratch = Scratch::new();
    if let Some(java) = jvm(&scratch) {
        leaks_nothing(scratch, &[&java.to_string_lossy(), "-Xmx96m", "Churn"]);
    }
}

#[test]
fn node_leaks_nothing() {
    let Some(node) = installed(&["node"], "nodejs") else { return };
    leaks_nothing(Scratch::new(), &[&node.to_string_lossy(), &source("churn.js").to_string_lossy()]);
}

#[test]
fn go_leaks_nothing() {
    let scratch = Scratch::new();
    let Some(binary) = built_by_go("churn.go", &scratch) else { return };
    leaks_nothing(scratch, &[&binary.to_string_lossy()]);
}

#[test]
fn python_leaks_nothing() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    leaks_nothing(Scratch::new(), &[&python.to_string_lossy(), &source("churn.py").to_string_lossy()]);
}

#[test]
fn python_goes_back() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    goes_back(Scratch::new(), &[&python.to_string_lossy(), &source("churn.py").to_string_lossy()]);
}

/// The machine for `Churn`, which is built now.
fn jvm(scratch: &Scratch) -> Option<PathBuf> {
    let java = installed(&["java"], "default-jdk-headless")?;
    let javac = installed(&["javac"], "default-jdk-headless")?;
    let built = Command::new(javac).arg("-d").arg(scratch.path()).arg(source("Churn.java")).status();
    assert!(built.expect("javac").success(), "Churn.java does not build");
    Some(java)
}

#[test]
fn a_jvm_goes_back() {
    let scratch = Scratch::new();
    if let Some(java) = jvm(&scratch) {
        goes_back(scratch, &[&java.to_string_lossy(), "-Xmx96m", "Churn"]);
    }
}

#[test]
fn node_goes_back() {
    let Some(node) = installed(&["node"], "nodejs") else { return };
    goes_back(Scratch::new(), &[&node.to_string_lossy(), &source("churn.js").to_string_lossy()]);
}

#[test]
fn go_goes_back() {
    let scratch = Scratch::new();
    let Some(binary) = built_by_go("churn.go", &scratch) else { return };
    goes_back(scratch, &[&binary.to_string_lossy()]);
}

#[test]
fn a_search_that_backtracks() {
    let scratch = Scratch::new();
    if let Some(said) = by_itself(&scratch, "crates/library/examples/queens.c", &["6"]) {
        right_eq!(said, "1 3 5 0 2 4\n");
        scratch.nothing_is_left("in the end");
    }
}

#[test]
fn a_simulation_that_speculates() {
    let scratch = Scratch::new();
    if let Some(said) = by_itself(&scratch, "crates/library/examples/timewarp.c", &["4", "20"]) {
        right!(said.ends_with("rollbacks: as by one thread\n"), "{said}");
        assert!(!said.contains(" 0 rollbacks"), "{said}");
        scratch.nothing_is_left("in the end");
    }
}

/// The program goes on whoever kept its snapshots is killed at whatever moment, unless that was in the middle of a rollback.
#[test]
fn killed_keepers() {
    let Some(branched) = Branched::start("threads", "many", Build::Dynamic) else { return };
    let pid = branched.pid();
    for turn in 0..turns() {
        branched.snapshot();
        let killer = std::thread::spawn({
            let (pid, wait) = (branched.running.pid, branched.scratch.random().below(6_000));
            move || {
                std::thread::sleep(Duration::from_micros(wait));
                keepers_of(pid).into_iter().for_each(|keeper| kernel::kill(keeper, kernel::SIGKILL));
            }
        });
        // It may be too late, or just in time.
        let output = branched.stillpoint.run(&["snapshot", &pid]);
        assert!([0, 1].contains(&output.code()), "turn {turn}: {output}");
        killer.join().expect("killed");
        assert!(
            kernel::alive(branched.running.pid),
            "turn {turn}: it has ended:\n{}",
            branched.running.said()
        );
    }
    branched.finish("after all");
}

/// A program that ends while something is done with it is told to have ended, in words for people, and leaves nothing behind.
#[test]
fn a_program_that_ends_meanwhile() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    for turn in 0..2 * turns() {
        for command in ["snapshot", "rollback", "checkpoint", "fork"] {
            let mut run = alone("sh");
            run.args(["-c", "sleep 1000 & sleep 1000 & wait"]).stdin(Stdio::null()).env(MARK, scratch.path());
            let running = Running::new(run.spawn().expect("the program"), scratch.path());
            let pid = running.pid;
            let sleepers = children(pid, 2);
            if command == "rollback" {
                stillpoint.run(&["snapshot", &pid.to_string()]).ok();
            }
            let wait = Duration::from_micros(scratch.random().below(120_000));
            let killer = std::thread::spawn(move || {
                std::thread::sleep(wait);
                kernel::kill(pid, kernel::SIGKILL);
            });
            let output = stillpoint.run(&[command, &pid.to_string(), "--json"]);
            killer.join().expect("killed");
            drop(running);
            if output.code() == 0 && command == "fork" {
                let twins = output.json()["twins"].as_array().cloned().unwrap_or_default();
                let twins = twins.iter().filter_map(|twin| twin["pid"].as_u64());
                let twins: Vec<u32> = twins.map(|twin| u32::try_from(twin).expect("a pid")).collect();
                let all = twins.iter().flat_map(|twin| [kernel::children(*twin), vec![*twin]].concat());
                all.collect::<Vec<_>>().into_iter().for_each(|pid| kernel::kill(pid, kernel::SIGKILL));
            } else if output.code() != 0 {
                let said = [output.stdout.as_str(), &output.stderr].concat();
                let is_clear =
                    ["ended", "is ending", "there is no process"].iter().any(|words| said.contains(words));
                assert!(
                    is_clear && !said.contains("os error"),
                    "turn {turn}, {command} after {wait:?}: {said}"
                );
            }
            sleepers.into_iter().for_each(|pid| kernel::kill(pid, kernel::SIGKILL));
        }
    }
    scratch.nothing_is_left("in the end");
}

#[test]
fn mistakes_are_told() {
    let Some(branched) = Branched::start("threads", "many", Build::Dynamic) else { return };
    let pid = branched.pid();
    let run = |arguments: &[&str]| branched.stillpoint.run(arguments);
    run(&["rollback", &pid]).fails(2, &["there are no snapshots"]);
    run(&["snapshots", &pid]).fails(2, &["there are no snapshots"]);
    run(&["snapshot", &pid, "--name", "5"]).fails(2, &["is no name"]);
    run(&["snapshot", "4000000"]).fails(2, &["no process"]);
    run(&["snapshot", &pid, "--name", "first"]).ok();
    run(&["rollback", &format!("{pid}@7")]).fails(2, &["there is no snapshot 7"]);
    run(&["rollback", &format!("{pid}@")]).fails(2, &["nothing behind the @"]);
    run(&["rollback", &format!("{pid}@first")]).ok();
    run(&["rollback", &pid]).ok();
    let rows = branched.does(&["snapshots", &pid]);
    assert_eq!(
        (rows[0]["name"].as_str(), rows[0]["current"].as_bool()),
        (Some("first"), Some(true)),
        "{rows}"
    );
    run(&["forget", &format!("{pid}@first")]).ok();
    branched.finish("after all");
}

/// Nothing would lead back.
#[test]
fn no_snapshot_is_of_a_program_that_is_stopped() {
    let Some(branched) = Branched::start("tree", "stopped", Build::Dynamic) else { return };
    let pid = branched.pid();
    branched.stillpoint.run(&["snapshot", &pid]).fails(3, &["job control has stopped it"]);
    branched.stillpoint.run(&["snapshots", &pid]).fails(2, &["there are no snapshots"]);
    branched.finish("after all");
}

/// Whoever may lift its limits brings it back; to others it is refused, and not begun.
#[test]
fn limits_that_leave_no_memory_harm_nobody() {
    let Some(branched) = Branched::start("attributes", "short_of_memory", Build::Dynamic) else { return };
    let pid = branched.pid();
    branched.stillpoint.run(&["snapshot", &pid]).ok();
    let back = branched.stillpoint.run(&["rollback", &pid]);
    if back.code() != 0 {
        back.fails(3, &["CAP_SYS_RESOURCE"]);
    }
    branched.finish("after all");
}

/// It would be neither then nor now, and be killed.
#[test]
fn as_many_mappings_as_there_can_be_leave_no_way_back() {
    let Some(branched) = Branched::start("mappings", "no_more_of_them", Build::Dynamic) else { return };
    let (pid, stillpoint) = (branched.pid(), &branched.stillpoint);
    stillpoint.run(&["checkpoint", &pid, "--name", "full"]).ok();
    stillpoint.run(&["snapshot", &pid]).ok();
    stillpoint.run(&["rollback", &pid]).fails(3, &["vm.max_map_count"]);
    stillpoint.run(&["restore", "full", "--clone", "--detach"]).fails(3, &["vm.max_map_count"]);
    branched.finish("after all");
}

/// A program that checks itself, made from C; otherwise says what is skipped.
fn made(name: &str) -> Option<String> {
    let Some(program) = Build::Dynamic.of(&source(name)) else {
        skipped("no compiler for it");
        return None;
    };
    (!undisturbed_only()).then(|| program.to_str().expect("a path").to_owned())
}

#[test]
fn processes_go_back_together() {
    let Some(program) = made("workers.c") else { return };
    goes_back(Scratch::new(), &[&program]);
}

#[test]
fn processes_go_back_together_where_orphans_are_adopted() {
    let Some(program) = made("workers.c") else { return };
    goes_back(Scratch::new(), &[&program, "adopts"]);
}

#[test]
fn processes_leak_nothing() {
    let Some(program) = made("workers.c") else { return };
    leaks_nothing(Scratch::new(), &[&program]);
}

/// What is on its way in connections, pipes and counters goes back with who has sent it and who is to read it.
#[test]
fn what_a_process_says_to_itself_goes_back() {
    let Some(program) = made("channels.c") else { return };
    goes_back(Scratch::new(), &[&program]);
}

#[test]
fn what_processes_say_to_each_other_goes_back() {
    let Some(program) = made("channels.c") else { return };
    goes_back(Scratch::new(), &[&program, "apart"]);
}

#[test]
fn connections_leak_nothing() {
    let Some(program) = made("channels.c") else { return };
    // What is on its way is kept with a snapshot: some 100 MiB where all is full.
    leaks_nothing_in(turns().max(12), Scratch::new(), &[&program, "apart", "small"]);
}

/// Who has many children that ended, and waits for none, may be no one who buries a twin. That is not found out by waiting, for the
/// program stands still: it would for five seconds each time.
#[test]
fn a_parent_that_buries_nobody_makes_no_snapshot_last() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let script = "
import os, time
for _ in range(20):
    if not os.fork(): os._exit(0)
if not os.fork(): os.execlp('sleep', 'sleep', '1000')
time.sleep(1000)";
    let mut parent = alone(python);
    parent.args(["-c", script]).env(MARK, scratch.path());
    parent.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut parent = parent.spawn().expect("python");
    let sleeps = |pid: &u32| std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"sleep\n");
    let pid = wait_for("a parent of many", Duration::from_secs(60), || {
        let children = kernel::children(parent.id());
        let ended = children.iter().filter(|pid| !kernel::alive(**pid)).count();
        children.into_iter().find(|pid| sleeps(pid) && ended == 20)
    });
    let pauses = (0..4).map(|_| {
        let told = scratch.stillpoint().run(&["snapshot", &pid.to_string(), "--json"]).ok().json();
        told["pause_ms"].as_f64().expect("a pause")
    });
    let all: f64 = pauses.sum();
    assert!(all < 15_000.0, "it stood still for {all} ms");
    parent.kill().and_then(|()| parent.wait()).expect("killed");
}

/// A server and its client in one process, as of a program that tests itself.
#[test]
fn a_python_server_of_its_own_goes_back() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    let script = r#"
import asyncio
async def serve(reader, writer):
    while True:
        line = await reader.readexactly(2000)
        writer.write(line)
        await writer.drain()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    n = 0
    while True:
        for i in range(8): writer.write(b"%07d" % (n + i) + bytes(1993))
        for i in range(8):
            got = (await reader.readexactly(2000))[:7]
            if got != b"%07d" % (n + i): print("wrong", n + i, got, flush=True)
        n += 8
        if n % 80 == 0: print(n, flush=True)
asyncio.run(main())
"#;
    goes_back(Scratch::new(), &[python.to_str().expect("a path"), "-c", script]);
}

/// It has taken more than its size, in pieces that are not told from outside.
#[test]
fn a_full_socket_goes_back() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    let script = r#"
import random, socket, time
a, b = socket.socketpair()
b.settimeout(20)
n = 0
while True:
    n += 1
    data = random.Random(n).randbytes(5 * 36544 + 24000 + 36544)
    at = 0
    for piece in (36544, 36544, 36544, 36544, 36544, 24000, 36544):
        if a.send(data[at:at + piece]) != piece: print("wrong: it does not fit", flush=True)
        at += piece
    time.sleep(0.02)
    got = b""
    while len(got) < len(data): got += b.recv(1 << 20)
    if got != data: print("wrong", n, flush=True)
    print(n, flush=True)
"#;
    goes_back(Scratch::new(), &[python.to_str().expect("a path"), "-c", script]);
}

#[test]
fn a_pipeline_goes_back() {
    let script = r#"i=0; while :; do i=$((i + 1)); echo $i; done |
        awk '{ if ($1 != n + 1) { print "wrong", n, $1; exit 1 }; n = $1; if (n % 500 == 0) { print n; fflush() } }'"#;
    goes_back(Scratch::new(), &["sh", "-c", script]);
}

#[test]
fn a_python_pool_goes_back() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    let script = r#"
import multiprocessing
def work(x):
    s = 0
    for i in range(300): s = (s * 31 + x + i) & 0xffffffff
    return s
with multiprocessing.Pool(3) as pool:
    n = 0
    while True:
        for x, got in zip(range(n, n + 20), pool.imap(work, range(n, n + 20))):
            if got != work(x): print("wrong", x, got, flush=True)
        n += 20
        print(n, flush=True)
"#;
    goes_back(Scratch::new(), &[python.to_str().expect("a path"), "-c", script]);
}

/// Children of a process, which are to be so many.
#[track_caller]
fn children(pid: u32, count: usize) -> Vec<u32> {
    wait_for(&format!("{count} children"), Duration::from_secs(60), || {
        let children = kernel::children(pid);
        (children.len() == count).then_some(children)
    })
}

#[test]
fn children_made_since_are_killed_and_others_are_missed() {
    const WORKERS: usize = 4;
    for how in ["", "adopts"] {
        let Some(program) = made("workers.c") else { return };
        let talking = Talking::start(Scratch::new(), &[program.as_str(), how]);
        let branched = &talking.branched;
        let (pid, name) = (branched.running.pid, branched.pid());
        let first = branched.snapshot();
        kernel::kill(pid, kernel::SIGUSR1);
        let child = children(pid, WORKERS + 1)[WORKERS];
        let grandchild = children(child, 1)[0];
        let back = |snapshot: u64| format!("{name}@{snapshot}");
        branched.stillpoint.run(&["rollback", &back(first)]).fails(3, &["made since", "--kill-children"]);
        let second = branched.snapshot();
        assert!(branched.try_rollback(second, ""));
        talking.goes_on(3);
        right!(kernel::alive(child) && kernel::alive(grandchild));
        branched.stillpoint.run(&["rollback", &back(first)]).fails(3, &["made since", "--kill-children"]);
        assert!(branched.try_rollback(first, ""));
        children(pid, WORKERS);
        right!(!kernel::alive(child) && !kernel::alive(grandchild));
        talking.goes_on(3);
        assert!(!branched.try_rollback(second, "has ended since, and does not come back"));
        talking.goes_on(3);
        assert!(branched.try_rollback(first, ""));
        branched.forget(second);
        talking.goes_on(3);
        talking.end();
    }
}

/// Children end while they are looked at, and are between `vfork` and `exec`.
#[test]
fn children_that_come_and_go_are_in_no_snapshots_way() {
    const SNAPSHOTS: usize = 80;
    let Some(program) = Build::Dynamic.of(&source("passers.c")) else {
        skipped("no compiler for it");
        return;
    };
    if undisturbed_only() {
        return;
    }
    let talking = Talking::start(Scratch::new(), &[program.to_str().expect("a path")]);
    let first = talking.branched.snapshot();
    for _ in 1..SNAPSHOTS {
        let snapshot = talking.branched.snapshot();
        talking.branched.forget(snapshot);
    }
    talking.goes_on(3);
    talking.branched.forget(first);
    talking.end();
}

/// Whoever goes back is killed at whatever moment: all of the program goes on, or nothing is left of it.
#[test]
fn killed_in_the_middle_of_a_rollback_of_several() {
    let Some(program) = made("workers.c") else { return };
    let mut talking = Talking::start(Scratch::new(), &[&program]);
    for turn in 0..2 * turns() {
        let branched = &talking.branched;
        branched.snapshot();
        branched.snapshot();
        let pid = branched.running.pid;
        let all = [vec![pid], kernel::children(pid)].concat();
        let keepers = keepers_of(pid);
        let wait = branched.scratch.random().below(20_000);
        // The one that watches stays: it is the younger one.
        let keeper = keepers.iter().copied().min().expect("a keeper");
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(wait));
            kernel::kill(keeper, kernel::SIGKILL);
        });
        let output = branched.stillpoint.run(&["rollback", &branched.pid()]);
        killer.join().expect("killed");
        for keeper in keepers {
            kernel::wait_gone(keeper, Duration::from_secs(60));
        }
        let left = || -> Vec<u32> { all.iter().copied().filter(|pid| kernel::alive(*pid)).collect() };
        // Those who have been killed may still be ending, one after the other.
        let what = format!("all of {all:?} to be left, or none, in turn {turn}; {output}");
        let left = wait_for(&what, Duration::from_secs(60), || {
            let before = left();
            std::thread::sleep(Duration::from_millis(50));
            Some(before).filter(|b| *b == left() && (b.is_empty() || b.len() == all.len()))
        });
        if left.is_empty() {
            talking.end();
            talking = Talking::start(Scratch::new(), &[&program]);
        } else {
            talking.goes_on(2);
        }
    }
    talking.end();
}

#[test]
fn what_cannot_go_back_together_is_refused() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let python = python.to_str().expect("a path");
    // What each does at SIGUSR1 cannot be undone.
    let since = [
        ("other.shutdown(socket.SHUT_WR)", "it has been shut down since"),
        ("other.close()", "cannot be had again"),
        ("other.sendall(b'more'); other.close()", "cannot be had again"),
        ("fresh.connect(server.getsockname())", "that was not yet accepted"),
        ("fresh.connect(server.getsockname()); server.accept()[0].close()", "it has been connected since"),
        ("fresh.bind(('127.0.0.1', 0)); fresh.listen()", "it listens since then"),
        ("ended.recv(2)", "its other end is gone, and cannot send again"),
        ("half.recv(2)", "its other end is shut down, and cannot send again"),
        ("unix.shutdown(socket.SHUT_WR)", "it has been shut down since"),
        ("left.recv(2)", "its other end is shut down, and cannot send again"),
        ("plain.connect(door.getsockname())", "waits there to be accepted"),
    ];
    for (does, why) in since {
        let connected = r#"
import signal, socket, time
def connected(server):
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]
server = socket.create_server(("127.0.0.1", 0))
client, other = connected(server)
ended, gone = connected(server)
gone.sendall(b"some"); gone.close()
half, shut = connected(server)
shut.sendall(b"some"); shut.shutdown(socket.SHUT_WR)
fresh = socket.socket()
unix, peer = socket.socketpair()
left, lost = socket.socketpair()
lost.sendall(b"some"); lost.close()
door = socket.socket(socket.AF_UNIX); door.bind("\0DOOR"); door.listen()
plain = socket.socket(socket.AF_UNIX)
def act(*_):
    global client, unix
    DOES
    print("done", flush=True)
signal.signal(signal.SIGUSR1, act)
while True:
    if client.fileno() >= 0 and unix.fileno() >= 0: print("turn", flush=True)
    time.sleep(0.01)
"#;
        let door = format!("stillpoint-test-{}-{}", std::process::id(), does.len());
        let connected = connected.replace("DOES", does).replace("DOOR", &door);
        let talking = Talking::start(Scratch::new(), &[python, "-c", &connected]);
        let branched = &talking.branched;
        let here = branched.snapshot();
        assert!(branched.try_rollback(here, ""), "{does}");
        talking.goes_on(2);
        kernel::kill(branched.running.pid, kernel::SIGUSR1);
        wait_for("it to be done", Duration::from_secs(20), || talking.said().contains("done").then_some(()));
        assert!(!branched.try_rollback(here, why), "{does}");
        talking.goes_on(2);
        talking.end();
    }
    let two = r#"
import os, time
if os.fork() == 0:
    while True: time.sleep(1)
while True:
    print("turn", flush=True); time.sleep(0.01)
"#;
    let talking = Talking::start(Scratch::new(), &[python, "-c", two]);
    let (branched, pid) = (&talking.branched, talking.branched.pid());
    let run = |arguments: &[&str]| branched.stillpoint.run(arguments);
    run(&["snapshot", &pid, "--alone"]).ok();
    run(&["snapshot", &pid]).fails(3, &["snapshots of it alone"]);
    talking.goes_on(3);
    talking.end();
    let closing = r#"
import os, signal, time
read, write = os.pipe()
file = os.open("/dev/null", os.O_RDONLY)
if os.fork() == 0:
    signal.signal(signal.SIGUSR1, lambda *_: os.close(file))
    while True: time.sleep(0.01)
def close(*_):
    os.close(write)
signal.signal(signal.SIGUSR1, close)
while True:
    print("turn", flush=True); time.sleep(0.01)
"#;
    let talking = Talking::start(Scratch::new(), &[python, "-c", closing]);
    let branched = &talking.branched;
    let here = branched.snapshot();
    kernel::kill(children(branched.running.pid, 1)[0], kernel::SIGUSR1);
    talking.goes_on(5);
    assert!(!branched.try_rollback(here, "it has been closed since, and other processes have it too"));
    talking.goes_on(3);
    talking.end();
}

/// A program that does what it is told in Python, and says nothing by itself, of which snapshots are taken.
struct Told {
    branched: Branched,
}

impl Told {
    const PROGRAM: &str = r#"
import mmap, os, time
def act():
    try:
        text = open("do").read()
    except FileNotFoundError:
        return
    exec(text, globals())
    os.rename("do", "done")
while True:
    act()
    time.sleep(0.002)
"#;

    /// Nothing where there is no Python, or only undisturbed runs are asked for.
    fn start(first: &str) -> Option<Self> {
        let python = installed(&["python3"], "python3")?;
        if undisturbed_only() {
            return None;
        }
        let scratch = Scratch::new();
        let mut run = alone(python);
        run.args(["-c", Self::PROGRAM]).current_dir(scratch.path()).env(MARK, scratch.path());
        run.stdin(Stdio::null()).stdout(Stdio::null());
        run.stderr(File::create(scratch.path().join("out")).expect("a file"));
        let running = Running::new(run.spawn().expect("python"), scratch.path());
        drop(run);
        let stillpoint = scratch.stillpoint();
        let told = Told { branched: Branched { scratch, stillpoint, running } };
        told.does(first);
        Some(told)
    }

    /// Has it do something, and waits until that is done.
    #[track_caller]
    fn does(&self, what: &str) {
        let path = |name: &str| self.branched.scratch.path().join(name);
        std::fs::write(path("new"), what)
            .and_then(|()| std::fs::rename(path("new"), path("do")))
            .expect("a file");
        wait_for(what, Duration::from_secs(60), || {
            let said = self.branched.running.said();
            right!(kernel::alive(self.branched.running.pid) && said.is_empty(), "{said}");
            (!path("do").exists()).then_some(())
        });
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.branched.scratch.path().join(name)).unwrap_or_default()
    }

    /// Goes back to the snapshot that it was at last.
    fn back(&self, files: &str) -> Output {
        self.branched.run(&["rollback", &self.branched.pid(), "--files", files, "--json"])
    }

    /// In which ways files are told to have changed, by their names.
    #[track_caller]
    fn changes(&self, files: &str) -> std::collections::BTreeMap<String, Vec<String>> {
        let told = self.back(files).ok().json();
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let row = |file: &Value| {
            let name = text(&file["file"]);
            let name = name.rsplit('/').next().unwrap_or(&name).to_owned();
            (name, file["changes"].as_array().expect("changes").iter().map(text).collect())
        };
        told["files"].as_array().expect("files").iter().map(row).collect()
    }

    fn end(self) {
        Talking { branched: self.branched }.end();
    }
}

/// What is told of files by their names.
fn changes<const N: usize>(all: [(&str, &[&str]); N]) -> std::collections::BTreeMap<String, Vec<String>> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    all.into_iter().map(|(name, how)| (name.to_owned(), words(how))).collect()
}

/// By what it is, and not by a mishap that another try would not meet.
#[test]
fn programs_that_cannot_be_followed_are_told_why() {
    let full = r#"
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
act = lambda: None
try:
    while True: os.dup(0)
except OSError: pass
"#;
    let filtered = r#"
import ctypes, struct
calls, errno, allow = 323, 0x50001, 0x7fff0000
code = [(0x20, 0, 0, 0), (0x15, 0, 1, calls), (0x06, 0, 0, errno), (0x06, 0, 0, allow)]
code = b"".join(struct.pack("HBBI", *one) for one in code)
held = ctypes.create_string_buffer(code, len(code))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(held)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter) == 0
"#;
    for (what, why) in [(full, "RLIMIT_NOFILE"), (filtered, "seccomp filter forbids userfaultfd")] {
        let Some(told) = Told::start(what) else { return };
        let pid = told.branched.pid();
        told.branched.run(&["snapshot", &pid]).fails(3, &[why]);
        told.branched.run(&["checkpoint", &pid]).ok();
        told.end();
    }
}

#[test]
fn files_that_were_written_since_are_named() {
    let open = r#"
flags = os.O_CREAT | os.O_RDWR | os.O_APPEND
grown, written, shortened, removed, renamed, same, closed, empty = [os.open(name, flags, 0o644) for name in
    ["grown", "written", "shortened", "removed", "renamed", "same", "closed", "empty"]]
for fd in (grown, written, shortened, removed, renamed, same, closed): os.write(fd, b"0123456789")
later = os.open("later", flags, 0o644); os.write(later, b"0123456789"); os.close(later)
"#;
    let Some(told) = Told::start(open) else { return };
    told.branched.snapshot();
    assert_eq!(told.changes("refuse"), changes([]), "nothing has been written");
    assert_eq!(told.changes("rollback"), changes([]), "nothing has been written");
    // What is done before the rollback is to be done in the program that comes back: the descriptors are the same.
    told.does(
        r#"
os.write(grown, b"more"); os.write(empty, b"more")
place = os.open("written", os.O_WRONLY); os.pwrite(place, b"x", 3); os.close(place)
os.ftruncate(shortened, 5)
os.unlink("removed")
os.rename("renamed", "elsewhere")
os.utime("same")
os.write(closed, b"more"); os.close(closed)
later = os.open("later", flags); os.write(later, b"more")
made = os.open("made", flags, 0o644)
"#,
    );
    let all: [(&str, &[&str]); 9] = [
        ("grown", &["grew"]),
        ("empty", &["grew"]),
        ("written", &["written"]),
        ("shortened", &["shortened"]),
        ("removed", &["removed"]),
        ("renamed", &["renamed"]),
        ("closed", &["grew"]),
        ("later", &["opened", "modified"]),
        ("made", &["made"]),
    ];
    let named =
        |names: [&str; 6]| names.map(|name| format!("{}/{name}", told.branched.scratch.path().display()));
    let wrong = named(["written", "shortened", "removed", "renamed", "later", "made"]);
    let wrong: Vec<&str> = wrong.iter().map(String::as_str).collect();
    let refused =
        told.back("rollback").fails(3, &wrong).fails(3, &["--files keep", "cannot be brought back"]);
    assert!(!refused.stderr.contains("/grown"), "{refused}");
    told.back("refuse")
        .fails(3, &wrong)
        .fails(3, &["/grown", "/closed", "/empty", "14 bytes, 10 at the snapshot"]);
    right_eq!(told.file("grown"), "0123456789more", "a rollback that is refused has changed nothing");
    assert_eq!(told.changes("keep"), changes(all));
    right_eq!(told.file("grown"), "0123456789more");
    told.does("os.write(grown, b'behind')");
    right_eq!(told.file("grown"), "0123456789morebehind");
    told.end();
}

/// A log whose lines are a chain, of which the program has the last link in memory.
const CHAIN: &str = r#"
import os, sys, zlib
log = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
n, link = 0, 0
while True:
    n += 1
    salt = int.from_bytes(os.urandom(4), "little")
    link = zlib.crc32(b"%d" % salt, link)
    os.write(log, b"%d %d %d\n" % (n, salt, link))
    if n % 100 == 0 and len(sys.argv) < 3: print(n, flush=True)
"#;

/// Whether a log is the chain that a single life has written.
#[track_caller]
fn is_a_chain(log: &Path) {
    let check = r#"
import sys, zlib
n, link, lines = 0, 0, open(sys.argv[1]).read().split("\n")
for line in lines[:-1]:
    n += 1
    number, salt, told = map(int, line.split())
    link = zlib.crc32(b"%d" % salt, link)
    assert (number, told) == (n, link), (n, line)
assert n > 100, n
"#;
    let output = Command::new("python3").args(["-c", check]).arg(log).output().expect("python");
    right!(
        output.status.success(),
        "memory and log do not agree: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// To random snapshots and back: its log is as long as its memory knows, whenever that is. A snapshot to which it would have to go
/// forward, or on another way, is refused.
#[test]
fn a_log_goes_back_with_the_memory_of_who_writes_it() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let talking = Talking::start(Scratch::new(), &[python.to_str().expect("a path"), "-c", CHAIN, "log"]);
    let branched = &talking.branched;
    let (mut there, mut backs) = (vec![branched.snapshot()], 0);
    for turn in 0..2 * turns() {
        branched.rest();
        if branched.scratch.random().below(3) == 0 {
            there.push(branched.snapshot());
            continue;
        }
        let any = there[branched.scratch.random().below(there.len() as u64) as usize];
        let name = format!("{}@{any}", branched.pid());
        let output = branched.run(&["rollback", &name, "--files", "rollback", "--json"]);
        match output.code() {
            3 => drop(output.fails(3, &["/log"])),
            _ => {
                backs += 1;
                let told = output.ok().json();
                let files = told["files"].as_array().expect("files");
                for file in files {
                    assert_eq!(file["brought_back"], true, "turn {turn}: {told}");
                    let tail = File::open(file["tail"].as_str().expect("a tail")).and_then(|f| f.metadata());
                    let cut = file["size_now"].as_u64().zip(file["size_then"].as_u64());
                    assert_eq!(
                        Some(tail.expect("a tail").len()),
                        cut.map(|(now, then)| now - then),
                        "{told}"
                    );
                }
            }
        }
    }
    let first = format!("{}@{}", branched.pid(), there[0]);
    branched.run(&["rollback", &first, "--files", "rollback"]).ok();
    talking.goes_on(3);
    let log = branched.scratch.path().join("log");
    kernel::kill(branched.running.pid, kernel::SIGKILL);
    kernel::wait_gone(branched.running.pid, Duration::from_secs(60));
    is_a_chain(&log);
    assert!(backs > 0, "it never went back");
    talking.end();
}

/// All processes of the program write, each to a log of its own, and both logs go back.
#[test]
fn logs_of_several_processes_go_back_together() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let (python, scratch) = (python.to_str().expect("a path"), Scratch::new());
    let both = format!("'{python}' -c \"$0\" other quiet & '{python}' -c \"$0\" log");
    let talking = Talking::start(scratch, &["sh", "-c", &both, CHAIN]);
    let branched = &talking.branched;
    let logs = ["log", "other"].map(|name| branched.scratch.path().join(name));
    let sizes = || logs.each_ref().map(|log| log.metadata().map_or(0, |file| file.len()));
    let both_grow = || {
        let before = sizes();
        wait_for("both to write", Duration::from_secs(60), || {
            sizes().iter().zip(&before).all(|(now, before)| now > before).then_some(())
        });
    };
    both_grow();
    let here = format!("{}@{}", branched.pid(), branched.snapshot());
    for _ in 0..turns() {
        both_grow();
        let told = branched.does(&["rollback", &here, "--files", "rollback"]);
        let is_back = |log: &PathBuf| {
            let mut files = told["files"].as_array().expect("files").iter();
            files.any(|file| file["file"].as_str() == log.to_str() && file["brought_back"] == true)
        };
        assert!(is_back(&logs[0]) && is_back(&logs[1]), "{told}");
    }
    talking.goes_on(3);
    let all = [vec![branched.running.pid], kernel::children(branched.running.pid)].concat();
    all.iter().for_each(|pid| kernel::kill(*pid, kernel::SIGKILL));
    all.iter().for_each(|pid| kernel::wait_gone(*pid, Duration::from_secs(60)));
    logs.iter().for_each(|log| is_a_chain(log));
    talking.end();
}

/// Its log grows, and its index is written through a mapping: both go back with what it has in memory.
#[test]
fn a_database_goes_back_with_its_log() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    // Its log grows slowly, as only so much of it is read at the snapshot.
    let script = r#"
import sqlite3, time
db = sqlite3.connect("base.db", isolation_level=None)
db.execute("pragma page_size=512"); db.execute("pragma journal_mode=wal"); db.execute("pragma wal_autocheckpoint=0"); db.execute("pragma synchronous=off")
db.execute("create table t (n integer, data blob)")
n = 0
while True:
    n += 1
    db.execute("insert into t values (?, randomblob(30))", (n,))
    time.sleep(0.005)
    got = db.execute("select count(*), max(n), sum(n) from t").fetchone()
    if got != (n, n, n * (n + 1) // 2): print("wrong", n, got, flush=True)
    if n % 20 == 0: print(n, flush=True)
"#;
    let talking = Talking::start(Scratch::new(), &[python.to_str().expect("a path"), "-c", script]);
    let branched = &talking.branched;
    let here = format!("{}@{}", branched.pid(), branched.snapshot());
    for _ in 0..turns() {
        talking.goes_on(1);
        let told = branched.does(&["rollback", &here, "--files", "rollback"]);
        let files = told["files"].to_string();
        assert!(files.contains("base.db-wal") && files.contains("base.db-shm"), "{told}");
        talking.goes_on(1);
    }
    kernel::kill(branched.running.pid, kernel::SIGKILL);
    kernel::wait_gone(branched.running.pid, Duration::from_secs(60));
    let check = r#"
import sqlite3
db = sqlite3.connect("base.db")
assert db.execute("pragma integrity_check").fetchall() == [("ok",)]
count, most = db.execute("select count(*), max(n) from t").fetchone()
assert count == most, (count, most)
"#;
    let checked = Command::new(python).args(["-c", check]).current_dir(branched.scratch.path()).output();
    let checked = checked.expect("python");
    right!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    talking.end();
}

/// What is in it may be theirs.
#[test]
fn a_file_that_others_write_to_is_left() {
    let open = "log, own = [os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644) for name in ('log', 'own')]";
    let Some(told) = Told::start(open) else { return };
    let log = told.branched.scratch.path().join("log");
    let other = File::options().append(true).open(&log).expect("the log");
    told.branched.snapshot();
    told.does("os.write(log, b'line'); os.write(own, b'line')");
    std::io::Write::write_all(&mut &other, b"other").expect("written");
    let back = told.back("rollback").ok().json();
    let by = format!("process {} (", std::process::id());
    let files = back["files"].as_array().expect("files");
    let of = |name: &str| files.iter().find(|f| f["file"].as_str().is_some_and(|file| file.ends_with(name)));
    let (left, cut) = (of("/log").expect("the log"), of("/own").expect("its own"));
    assert_eq!((&left["brought_back"], &cut["brought_back"]), (&false.into(), &true.into()), "{back}");
    assert!(left["what"].as_str().is_some_and(|what| what.contains(&by)), "{back}");
    right_eq!((told.file("log"), told.file("own")), ("lineother".into(), String::new()));
    drop(other);
    told.back("rollback").ok();
    right_eq!(told.file("log"), "");
    told.end();
}

/// Who looks at a page behind the end of its file is killed.
#[test]
fn a_file_that_others_have_mapped_is_left() {
    let open =
        "log = os.open('log', os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644); os.write(log, b'0123456789')";
    let Some(told) = Told::start(open) else { return };
    told.branched.snapshot();
    told.does("os.write(log, b'x' * 10000)");
    let reader = r#"
import mmap
file = open("log", "rb"); there = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close()
print("mapped", flush=True); input(); print(there[9999:10000], flush=True)
"#;
    let mut reader = Command::new("python3")
        .args(["-c", reader])
        .current_dir(told.branched.scratch.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python");
    let mut says = std::io::BufReader::new(reader.stdout.take().expect("a pipe"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut says, &mut line).expect("a line");
    let back = told.back("rollback").ok().json();
    let by = format!("process {} (", reader.id());
    let what = back["files"][0]["what"].as_str().expect("words");
    assert!(
        what.contains(&by) && what.contains("has it mapped") && back["files"][0]["brought_back"] == false,
        "{back}"
    );
    std::io::Write::write_all(&mut reader.stdin.take().expect("a pipe"), b"\n").expect("written");
    std::io::BufRead::read_line(&mut says, &mut line).expect("a line");
    assert_eq!(line, "mapped\nb'x'\n");
    assert!(reader.wait().expect("its end").success());
    told.back("rollback").ok();
    right_eq!(told.file("log"), "0123456789");
    told.end();
}

/// To make a page writable that has been written before takes no fault when it is written again, so no time of the file tells.
#[test]
fn what_was_written_through_a_protected_mapping_goes_back() {
    let open = r#"
import ctypes
libc = ctypes.CDLL(None)
file = os.open("file", os.O_CREAT | os.O_RDWR, 0o644); os.write(file, b"a" * 4096)
there = mmap.mmap(file, 4096); there[0] = 98
place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(there)))
def protect(how):
    assert libc.mprotect(place, 4096, how) == 0
protect(1)
"#;
    let Some(told) = Told::start(open) else { return };
    told.branched.snapshot();
    let then = told.file("file");
    assert_eq!(told.changes("refuse"), changes([]));
    told.does("protect(3); there[0:5] = b'other'; protect(1)");
    assert_eq!(told.changes("rollback"), changes([("file", &["written"])]));
    right_eq!(told.file("file"), then);
    told.end();
}

/// It is told of what it watches, and of nothing that was looked at: so a file is compared by what is told of it without.
#[test]
fn nobody_hears_of_a_look_at_files() {
    let open = r#"
import ctypes, struct, fcntl, termios, array
log = os.open("log", os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644); os.write(log, b"0123456789")
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0o4000)
libc.inotify_add_watch(watch, b"log", 0x1 | 0x8 | 0x10 | 0x20)
def unread():
    waiting = array.array("i", [0]); fcntl.ioctl(watch, termios.FIONREAD, waiting); return waiting[0]
"#;
    let Some(told) = Told::start(open) else { return };
    told.branched.snapshot();
    assert_eq!(told.changes("refuse"), changes([]));
    told.does("os.write(log, b'more')");
    told.back("rollback").fails(3, &["/log", "it has grown, it may have been written in place"]);
    assert_eq!(told.changes("keep"), changes([("log", &["grew", "perhaps written"])]));
    told.does("assert unread() == 0, unread()");
    told.does("open('log').close(); assert unread() > 0");
    told.end();
}

/// What is written through a mapping shows in no time, and comes back as memory does.
#[test]
fn what_was_written_through_a_mapping_goes_back() {
    let open = r#"
file = os.open("file", os.O_CREAT | os.O_RDWR, 0o644); os.write(file, b"a" * 10000)
half = mmap.mmap(file, 4096, mmap.MAP_SHARED, offset=4096)
half[0] = 1
"#;
    let Some(told) = Told::start(open) else { return };
    told.branched.snapshot();
    let then = told.file("file");
    assert_eq!(told.changes("refuse"), changes([]));
    for _ in 0..2 {
        told.does("half[0:5] = b'other'; os.pwrite(file, b'more', 10000)");
        assert_eq!(told.changes("rollback"), changes([("file", &["grew", "written"])]));
        right_eq!(told.file("file"), then);
        told.does("assert half[0:5] == b'\\1aaaa', half[0:5]");
    }
    told.does("half[0:5] = b'other'; os.pwrite(file, b'more', 0)");
    told.back("rollback").fails(3, &["/file", "it has been written in place"]);
    assert_eq!(told.changes("keep"), changes([("file", &["written"])]));
    told.does("assert half[0:5] == b'other'");
    told.end();
}

/// A job that is checkpointed again and again has snapshots, too: its checkpoints give way, and follow it again when there are none any more.
#[test]
fn of_a_job_that_is_checkpointed() {
    let Some(python) = installed(&["/usr/bin/python3", "python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let python = python.to_str().expect("a path");
    for of_a_shell in [&[][..], &["sh", "-c", "\"$@\" & wait", "sh"]] {
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("job"));
        let run = ["run", "--detach", "--name", "job", "--every", "300ms", "--keep", "3", "--"];
        let mut run = stillpoint.command(&[&run[..], of_a_shell, &[python, "-c", COUNTER]].concat());
        run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir(&directory);
        assert!(run.status().expect("run").success());
        let counter = Counter::of(&directory);
        counter.goes_on();
        let is_incremental = || {
            let taken = stillpoint.run(&["checkpoint", "job", "--json"]).ok().json();
            (taken["incremental"] == true).then_some(())
        };
        for _ in 0..3 {
            wait_for("a checkpoint of what it has written", Duration::from_secs(60), is_incremental);
            stillpoint.run(&["snapshot", "job"]).ok();
            counter.sees();
            let taken = stillpoint.run(&["checkpoint", "job", "--json"]).ok().json();
            assert_eq!(taken["incremental"], false, "{taken}");
            stillpoint.run(&["rollback", "job"]).ok();
            right!(!counter.goes_on(), "it knows after its rollback what it has seen since the snapshot");
            stillpoint.run(&["forget", "job"]).ok();
        }
        stillpoint.run(&["checkpoint", "job", "--kill"]).ok();
        let pid = stillpoint.restore_detached("job", &[]);
        right!(!counter.goes_on());
        let all = [&[pid][..], &kernel::children(pid)].concat();
        all.iter().for_each(|pid| kernel::kill(*pid, kernel::SIGKILL));
        all.iter().for_each(|pid| kernel::wait_gone(*pid, Duration::from_secs(60)));
        scratch.nothing_is_left("in the end");
    }
}

/// Checkpoints that only an engine can take which follows the program do not give way: there would be none any more.
#[test]
fn of_a_job_that_is_followed_for_good() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut run =
        stillpoint.command(&["run", "--detach", "--name", "job", "--every", "1h", "--engine", "precopy"]);
    run.args(["--", "sleep", "1000"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(run.status().expect("run").success());
    stillpoint.run(&["checkpoint", "job", "--engine", "precopy"]).ok();
    stillpoint.run(&["snapshot", "job"]).fails(3, &["follows what it writes already", "checkpointer job"]);
    let taken = stillpoint.run(&["checkpoint", "job", "--engine", "precopy", "--json"]).ok().json();
    assert_eq!(taken["incremental"], true, "{taken}");
    let pid =
        stillpoint.run(&["ls", "--json"]).ok().json()[0]["running"]["pid"].as_u64().expect("it runs") as u32;
    kernel::kill(pid, kernel::SIGKILL);
    kernel::wait_gone(pid, Duration::from_secs(60));
}
