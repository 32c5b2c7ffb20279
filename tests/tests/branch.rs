//! Snapshots of running programs, and rollback: programs that check themselves all the time are sent back and forth at random, and
//! must find all as they left it, whoever is killed meanwhile.
#![allow(missing_docs)]

use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::Running;
use stillpoint_tests::{Build, Scratch, Stillpoint, Target, kernel, skipped, undisturbed_only, wait_for};

/// How often a test goes back and forth.
fn turns() -> u64 {
    std::env::var("STILLPOINT_TURNS").ok().and_then(|k| k.parse().ok()).unwrap_or(24)
}

/// A program of which snapshots are taken.
struct Branched {
    scratch: Scratch,
    stillpoint: Stillpoint,
    running: Running,
}

impl Branched {
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
        self.stillpoint.run(&all).ok().json()
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
        let output =
            self.stillpoint.run(&["rollback", &format!("{}@{snapshot}", self.pid()), "--kill-children"]);
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
            assert!(kernel::alive(self.running.pid), "it has ended:\n{}", self.running.said());
        }
        there.iter().for_each(|id| self.forget(*id));
    }

    #[track_caller]
    fn finish(self, what: &str) {
        let pid = self.running.pid;
        self.running.finish(what);
        wait_for("who kept its snapshots to leave", Duration::from_secs(20), || {
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
                        crate::returns(stringify!($program), stringify!($name), super::Build::Dynamic);
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
    attributes: seccomp_filters seccomp_per_thread limits directories odds capabilities;
    timers: interval_timers posix_timers timer_threads timer_descriptors;
    signals: masks actions queued_realtime_order delivered_once alternate_stacks handler_running storm;
    registers: general sse avx x87 segment_bases red_zone small_stack;
    memory: anonymous stack_growth heap_growth guards no_access;
    sleeps: relative_nanosleep poll_timeout futex_relative cond_timedwait;
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
    let mut run = Command::new("timeout");
    run.arg("400").arg(program.get_program()).args(program.get_args()).current_dir(scratch.path());
    run.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    run.env("STILLPOINT_BIN", stillpoint_tests::stillpoint::binary());
    run.env("STILLPOINT_STORE", scratch.directory("store")).env(MARK, scratch.path());
    let output = run.output().expect("timeout");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}\n{complaints}", output.status);
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
        assert_eq!(said, "ok\n");
        scratch.nothing_is_left("in the end");
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
    assert_eq!(said, "ok\n");
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
    assert_eq!(ran(&scratch, &run), "ok\n");
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
    kernel::wait_gone(pid, Duration::from_secs(10));
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_search_that_backtracks() {
    let scratch = Scratch::new();
    if let Some(said) = by_itself(&scratch, "crates/library/examples/queens.c", &["6"]) {
        assert_eq!(said, "1 3 5 0 2 4\n");
        scratch.nothing_is_left("in the end");
    }
}

#[test]
fn a_simulation_that_speculates() {
    let scratch = Scratch::new();
    if let Some(said) = by_itself(&scratch, "crates/library/examples/timewarp.c", &["4", "20"]) {
        assert!(said.ends_with("rollbacks: as by one thread\n"), "{said}");
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
