//! A thread that is lent to us comes home: with us, and without us.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{sleeps_on, wait_for};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_linux::arch::Gadgets;
use stillpoint_linux::batch::{Departure, Origin, Place, Signal};
use stillpoint_linux::inject::{Planted, Site, Stack, find_gadgets};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program};
use stillpoint_linux::ptrace::{Seized, Stop, Stopped, options};

fn maps(pid: u32) -> Vec<(u64, u64, String)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let parse = |l: &str| {
        let (range, rest) = l.split_once(' ').unwrap();
        let (a, b) = range.split_once('-').unwrap();
        let hex = |s| u64::from_str_radix(s, 16).unwrap();
        (hex(a), hex(b), rest.to_string())
    };
    text.lines().map(parse).collect()
}

fn stop(pid: u32) -> Stopped {
    let seized = Seized::seize(pid, options::SYSCALL_GOOD).unwrap();
    seized.interrupt().unwrap();
    let mut stopped = seized.wait().unwrap().stopped(pid).unwrap();
    while let Stop::Signal(signal) = stopped.stop() {
        // One of its own came first.
        let running = stopped.resume(signal).unwrap();
        running.interrupt().unwrap();
        stopped = running.wait().unwrap().stopped(pid).unwrap();
    }
    assert_eq!(stopped.stop(), Stop::Interrupt);
    stopped
}

/// Where a thread can make calls that it does not dispatch to itself.
fn gadgets(memory: &Memory, all: &[(u64, u64, String)], thread: &Stopped) -> Gadgets {
    let region = thread.dispatch().unwrap().map_or(vec![(0, u64::MAX)], |dispatch| dispatch.ranges());
    let (start, end) = region[0];
    let code = all.iter().filter(|m| m.2.starts_with("r-xp")).map(|m| (m.0.max(start), m.1.min(end)));
    find_gadgets(memory, &code.filter(|(start, end)| start < end).collect::<Vec<_>>()).unwrap()
}

/// Visits the only thread of `pid` and dies (by dropping out with exit) after `steps` operations, if so many come.
fn visit(pid: u32, steps: u32) {
    let mut left = steps;
    let mut step = || {
        if left == 0 {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
        left -= 1;
    };
    let memory = Memory::open(pid).unwrap();
    let all = maps(pid);
    let stack = all.iter().find(|m| m.2.ends_with("[stack]")).unwrap();
    let thread = stop(pid);
    let gadgets = gadgets(&memory, &all, &thread);
    let (sp, xstate) = (thread.regs().unwrap().sp(), thread.xstate().unwrap().len());
    let stack = Stack { start: stack.0, end: stack.1, sp };
    let site = Site::choose(&memory, gadgets, stack, xstate, 1, 4096).unwrap();
    step();
    let mut visit = site.visit(0, thread).unwrap();
    step();
    for _ in 0..3 {
        visit.begin(libc::SYS_getpid, [0; 6]).unwrap();
        step();
        visit.enter().unwrap();
        step();
        assert_eq!(visit.finish().unwrap(), i64::from(pid));
        step();
    }
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    let (at, unmap) = (0x10_0000_0000, (libc::SYS_munmap, [0x10_0000_0000, 4096, 0, 0, 0, 0]));
    let mapped = visit.call_with_undo(libc::SYS_mmap, [at, 4096, 3, flags, u64::MAX, 0], unmap).unwrap();
    assert_eq!(mapped as u64, at);
    step();
    assert_eq!(visit.call(unmap.0, unmap.1).unwrap(), 0);
    step();
    let mut program = Program::new();
    let old = program.data(&[0xff; 24]);
    program.call("sigaltstack", libc::SYS_sigaltstack, [0u64.into(), old]);
    assert_ne!(site.run(&mut visit, &program).unwrap().bytes(old, 24), [0xff; 24]);
    step();
    let thread = visit.leave().unwrap();
    step();
    if thread.dispatch().unwrap().is_some() {
        return; // the vdso is not in its region
    }
    let vdso = all.iter().find(|m| m.2.ends_with("[vdso]")).unwrap();
    let planted = Planted::plant(&memory, (vdso.0, vdso.1)).unwrap().unwrap();
    step();
    let (regs, mask, xstate) = (thread.regs().unwrap(), thread.sigmask().unwrap(), thread.xstate().unwrap());
    let origin = Origin { regs: &regs, xstate: &xstate, mask };
    let signal = Signal::choose(&Proc::process(pid).unwrap().status().unwrap(), mask).unwrap();
    let getpid = program.attempt("getpid", libc::SYS_getpid, []);
    let mapping = [at, 4096, 3, flags].map(Arg::Value);
    let mapping = program.call("mmap", libc::SYS_mmap, mapping);
    let unmapped = program.call("munmap", libc::SYS_munmap, [mapping.into(), 4096.into()]);
    let departure = Departure { thread, origin, place: Place::Slot(0), signal, program: &program };
    let away = site.send(&planted, vec![departure]).unwrap().remove(0);
    step();
    let (thread, answers) = away.wait(&regs).unwrap();
    let outcome = site.outcomes(&[answers]).unwrap().remove(0);
    assert_ne!(outcome.bytes(old, 24), [0xff; 24]);
    assert_eq!(outcome.result(getpid), i64::from(pid));
    assert_eq!((outcome.result(mapping) as u64, outcome.result(unmapped)), (at, 0));
    step();
    drop(planted);
    site.clean().unwrap();
    step();
    thread.detach().unwrap();
}

#[test]
fn a_visited_sleeper_sleeps_on_for_the_rest_of_its_time() {
    sleeps_on(|pid| visit(pid, u32::MAX));
}

/// Programs whose only thread is visited, each by somebody who dies after one step more: they say what they are to say.
fn comes_home_from_every_step(command: impl Fn() -> Command, expected: &str) {
    comes_home_from_each_of(19, command, expected);
}

fn comes_home_from_each_of(all_steps: u32, command: impl Fn() -> Command, expected: &str) {
    for steps in 0..all_steps {
        let mut child = command().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut all = String::new();
        said.read_line(&mut all).unwrap();
        let before = maps(child.id());
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "visitor", "--ignored", "--nocapture"])
            .env("VISIT_PID", child.id().to_string())
            .env("VISIT_STEPS", steps.to_string())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(9), "the visitor should have been killed at step {steps}");
        let names = |m: &[(u64, u64, String)]| m.iter().map(|m| m.2.clone()).collect::<Vec<_>>();
        // It may still be on its way home.
        wait_for(&format!("its mappings after step {steps}"), || names(&before) == names(&maps(child.id())));
        drop(child.stdin.take());
        said.read_to_string(&mut all).unwrap();
        let status = child.wait().unwrap();
        assert!(
            status.success() && all == expected,
            "WRONG: after the visit that ended at step {steps}: {status}: {all}"
        );
    }
}

#[test]
fn an_abandoned_thread_finds_home_from_every_step() {
    // A tight loop whose state is in registers; it tells the result when it is asked.
    let script = "echo begins; i=0; s=1; while [ $i -lt 300000 ]; do s=$(( (s * 31 + i) % 1000003 )); i=$((i+1)); done; \
                  read -r _; echo $s";
    let shell = || {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    };
    let undisturbed = shell().stdin(Stdio::null()).output().unwrap();
    comes_home_from_every_step(shell, &String::from_utf8(undisturbed.stdout).unwrap());
}

/// Wide registers come home with it: the kernel takes those of a signal frame only if the frame's extended state is no larger than that
/// of the thread, and ptrace's is where the processor has tiles that the program has not asked for (AMX).
#[test]
fn an_abandoned_thread_keeps_its_wide_registers() {
    if !std::arch::is_x86_feature_detected!("avx") {
        eprintln!("skipped: this processor has no AVX");
        return;
    }
    let (_directory, program) = built("wide");
    comes_home_from_every_step(|| Command::new(&program), "begins\nok\n");
}

/// One that dispatches its calls to itself makes ours, and goes home, within its region; nothing of that is dispatched.
#[test]
fn an_abandoned_thread_that_dispatches_its_calls_finds_home() {
    let (_directory, program) = built("dispatching");
    comes_home_from_each_of(15, || Command::new(&program), "begins\nok\n");
}

/// A program of this folder, and where it is for as long as that is kept.
fn built(name: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c"));
    let built = Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(source).status();
    assert!(built.is_ok_and(|status| status.success()));
    (directory, program)
}

#[test]
#[ignore = "the other half of the tests above"]
fn visitor() {
    let number = |name| std::env::var(name).ok().and_then(|v: String| v.parse().ok());
    if let (Some(pid), Some(steps)) = (number("VISIT_PID"), number("VISIT_STEPS")) {
        visit(pid, steps);
    }
}
