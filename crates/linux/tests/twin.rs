//! A copy-on-write twin: it is the instant at which it was made, and the program notices nothing, with us and without.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::inject::{Site, Stack, find_gadgets};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::{self, Proc};
use stillpoint_linux::ptrace::{Seized, Stop, Stopped, Waited, options};
use stillpoint_linux::twin::{self, Twin};
use stillpoint_tests::tier;

const PAGE: u64 = 4096;
const REGION: u64 = 64 * PAGE;

/// A running `twin.c`.
struct Program {
    child: Child,
    executable: PathBuf,
    addresses: [u64; 5],
    _folder: tempfile::TempDir,
}

/// What the program says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Report {
    rounds: [u64; 2],
    looks: u64,
    wrong: u64,
    signals: u64,
}

impl Program {
    fn start(arguments: &[&str]) -> Program {
        let folder = tempfile::tempdir().unwrap();
        let executable = folder.path().join("twin");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/twin.c");
        let built = Command::new("cc").args(["-O1", "-pthread", "-o"]).arg(&executable).arg(source).status();
        assert!(built.unwrap().success());
        let mut command = Command::new(&executable);
        let mut child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        Program { child, executable, addresses: parse(&line), _folder: folder }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn memory(&self) -> Memory {
        Memory::open(self.pid()).unwrap()
    }

    fn proc(&self) -> Proc {
        Proc::process(self.pid()).unwrap()
    }

    fn report(&self) -> Report {
        let bytes = read(&self.memory(), self.addresses[0], 40);
        let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap());
        Report { rounds: [word(0), word(1)], looks: word(2), wrong: word(3), signals: word(4) }
    }

    /// Everything about it that a fork could change: descriptors, mappings, threads, signals, children.
    fn facts(&self) -> Vec<String> {
        let p = self.proc();
        let mut facts: Vec<String> = Vec::new();
        for fd in p.list("fd").unwrap() {
            let name = String::from_utf8(fd).unwrap();
            facts.push(format!(
                "{name} {:?}",
                String::from_utf8_lossy(&p.link(&format!("fd/{name}")).unwrap())
            ));
        }
        // The stack may have grown: its extent does not count.
        facts.extend(p.maps().unwrap().iter().filter(|v| v.name != b"[stack]").map(|v| format!("{v:?}")));
        let status = String::from_utf8(p.read("status").unwrap()).unwrap();
        let kept = ["Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "TracerPid", "State:\tT"];
        facts.extend(status.lines().filter(|l| kept.iter().any(|k| l.starts_with(k))).map(String::from));
        facts.push(format!("children {:?}", p.children().unwrap()));
        facts
    }

    /// Processes that run this program's executable, apart from itself: copies.
    fn copies(&self) -> BTreeSet<u32> {
        let own = self.executable.to_str().unwrap().as_bytes();
        let is_copy = |&pid: &u32| {
            pid != self.pid() && Proc::process(pid).and_then(|p| p.link("exe")).is_ok_and(|exe| exe == own)
        };
        proc::processes().unwrap().into_iter().filter(is_copy).collect()
    }

    /// Polls until it is as before, alone, and makes progress in every thread.
    #[track_caller]
    fn unharmed(&self, before: &[String], what: &str) {
        let start = Instant::now();
        let from = self.report();
        loop {
            let (now, facts, copies) = (self.report(), self.facts(), self.copies());
            assert_eq!((now.wrong, now.signals), (0, 0), "{what}");
            let progress = now.looks > from.looks && (0..2).all(|i| now.rounds[i] > from.rounds[i]);
            if progress && facts == before && copies.is_empty() {
                return;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{what}: {from:?} {now:?}, copies {copies:?},\n{before:#?}\n{facts:#?}"
            );
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse(line: &str) -> [u64; 5] {
    let number = |w: &str| match w.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
        None => w.parse().unwrap(),
    };
    let words: Vec<u64> = line.split_whitespace().map(number).collect();
    words.try_into().unwrap()
}

fn read(memory: &Memory, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    memory.read(RemoteAddr(at), &mut bytes).unwrap();
    bytes
}

/// The first word of each page of a writer's region.
fn pages(memory: &Memory, at: u64) -> Vec<u64> {
    let bytes = read(memory, at, REGION);
    bytes.chunks(PAGE as usize).map(|p| u64::from_le_bytes(p[..8].try_into().unwrap())).collect()
}

/// All threads of a process, stopped; the leader first.
fn freeze(pid: u32) -> Vec<Stopped> {
    let seize = |tid| Seized::seize(tid, options::SYSCALL_GOOD).unwrap();
    let seized: Vec<Seized> = Proc::process(pid).unwrap().threads().unwrap().into_iter().map(seize).collect();
    seized.iter().for_each(|s| s.interrupt().unwrap());
    let rest = |s: Seized| {
        let tid = s.tid();
        s.wait().unwrap().stopped(tid).unwrap()
    };
    seized.into_iter().map(rest).collect()
}

/// Forks a twin of a process, looks at both while it stands still, and lets it go on.
fn fork(pid: u32, look: impl FnOnce(&Memory, Option<&Twin>)) -> stillpoint_linux::Result<Twin> {
    let process = Proc::process(pid).unwrap();
    let memory = Memory::open(pid).unwrap();
    let maps = process.maps().unwrap();
    let code = maps.iter().filter(|v| v.prot & libc::PROT_EXEC as u32 != 0 && v.name != b"[vsyscall]");
    let gadgets = find_gadgets(&memory, &code.map(|v| (v.start, v.end)).collect::<Vec<_>>()).unwrap();
    let stack = maps.iter().find(|v| v.name == b"[stack]").unwrap();
    let mut threads = freeze(pid);
    let leader = threads.remove(0);
    let (sp, xstate) = (leader.regs().unwrap().sp(), leader.xstate().unwrap().len());
    let stack = Stack { start: stack.start, end: stack.end, sp };
    let site = Site::choose(&memory, gadgets, stack, xstate, 1, twin::site_data_len(xstate)).unwrap();
    let mut visit = site.visit(0, leader).unwrap();
    let forked = Twin::fork(&site, &mut visit);
    let leader = visit.leave().unwrap();
    site.clean().unwrap();
    look(&memory, forked.as_ref().ok());
    threads.into_iter().for_each(|t| t.detach().unwrap());
    leader.detach().unwrap();
    forked
}

#[test]
fn it_is_the_instant_of_the_fork() {
    let program = Program::start(&["16"]);
    for _ in 0..20 {
        let mut then = Vec::new();
        let mut twin = fork(program.pid(), |memory, twin| {
            for vma in program.proc().maps().unwrap() {
                let private = !vma.shared && vma.prot & libc::PROT_WRITE as u32 != 0;
                if !private {
                    continue;
                }
                let copy = read(twin.unwrap().memory(), vma.start, vma.end - vma.start);
                let differs = |(a, b): (&[u8], &[u8])| a != b;
                let original = read(memory, vma.start, vma.end - vma.start);
                let page = original.chunks(4096).zip(copy.chunks(4096)).position(differs);
                // The kernel notes in a thread's restartable sequences area on which processor it runs.
                if let Some(page) = page {
                    let near = |c: &[u8]| c[page * 4096..][..4096].to_vec();
                    let different =
                        near(&original).iter().zip(near(&copy)).filter(|(a, b)| **a != *b).count();
                    assert!(different <= 32, "{vma:?}: page {page} differs in {different} bytes");
                }
            }
            then = program.addresses[3..].iter().map(|&at| pages(memory, at)).collect();
        })
        .unwrap();
        twin.settle().unwrap();
        for (then, &at) in then.iter().zip(&program.addresses[3..]) {
            while pages(&program.memory(), at) == *then {
                std::thread::sleep(Duration::from_millis(1)); // until the program has gone on
            }
            let copy = pages(twin.memory(), at);
            assert_eq!(copy, *then);
            assert!(copy.windows(2).all(|w| w[0] >= w[1]) && copy[0] - copy[63] <= 1, "{copy:?}");
        }
        twin.check().unwrap();
        twin.end().unwrap();
    }
}

#[test]
fn the_program_notices_nothing() {
    ["", "ignoring", "watchful"].iter().for_each(|kind| notices_nothing(kind));
}

fn notices_nothing(kind: &str) {
    let program = Program::start(&["16", kind]);
    let before = program.facts();
    for _ in 0..50 {
        let mut twin = fork(program.pid(), |_, _| {}).unwrap();
        assert_eq!(program.facts(), before);
        let copy = Proc::process(twin.pid()).unwrap();
        assert!(copy.list("fd").unwrap().is_empty(), "the twin holds descriptors");
        twin.settle().unwrap();
        let stat = copy.stat().unwrap();
        assert_ne!(stat.ppid, program.pid());
        assert_eq!(copy.oom_score_adj().unwrap(), 1000);
        assert_eq!(program.proc().oom_score_adj().unwrap(), 0);
        let pid = twin.pid();
        drop(twin);
        assert!(!program.copies().contains(&pid));
        program.unharmed(&before, "after a twin");
    }
}

#[test]
fn what_is_released_is_given_back_and_the_rest_stays() {
    let program = Program::start(&["16"]);
    let [_, filler, len, ..] = program.addresses;
    let mut twin = fork(program.pid(), |_, _| {}).unwrap();
    let rss = |pid| {
        let text = String::from_utf8(Proc::process(pid).unwrap().read("statm").unwrap()).unwrap();
        text.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
    };
    let (full, all) = (rss(twin.pid()), read(&program.memory(), filler, len));
    twin.release(RemoteAddr(filler), len / 2).unwrap();
    assert!(full - rss(twin.pid()) >= len / 2 / PAGE);
    let half = (len / 2) as usize;
    assert_eq!(read(twin.memory(), filler, len)[half..], all[half..]);
    assert_eq!(read(&program.memory(), filler, len), all);
    let shared = twin.memory().read_u64(RemoteAddr(program.addresses[0]));
    assert!(shared.is_ok());
    twin.unmap(RemoteAddr(program.addresses[0]), PAGE).unwrap();
    assert!(twin.memory().read_u64(RemoteAddr(program.addresses[0])).is_err());
    // A twin that somebody else ends is noticed.
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(twin.pid() as i32).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let patience = Instant::now() + Duration::from_secs(60);
    while twin.check().is_ok() {
        assert!(Instant::now() < patience, "its end is not noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(twin.memory().read(RemoteAddr(filler), &mut [0; 8]).is_err());
}

#[test]
fn a_program_that_may_have_no_more_processes_gets_none() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tried: only a privileged user can start the program as another user");
        return;
    }
    let program = Program::start(&["1", "limited"]);
    let before = program.facts();
    for _ in 0..10 {
        let error = fork(program.pid(), |_, _| {}).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EAGAIN), "{error}");
        program.unharmed(&before, "after a refusal");
    }
}

#[test]
fn a_group_that_may_have_no_more_processes_gets_none() {
    let program = Program::start(&["1"]);
    let before = program.facts();
    let group = PathBuf::from(format!("/sys/fs/cgroup/pids/stillpoint-twin-{}", program.pid()));
    let prepared = std::fs::create_dir(&group)
        .and_then(|()| std::fs::write(group.join("cgroup.procs"), program.pid().to_string()));
    if prepared.is_err() {
        eprintln!("not tried: no control group for process ids could be made");
        return;
    }
    // Three threads; then none more, or the process between but not the twin, or both.
    // A twin that nobody has buried yet still counts: only one.
    for (limit, rounds, possible) in [(3, 5, false), (4, 5, false), (5, 1, true)] {
        std::fs::write(group.join("pids.max"), limit.to_string()).unwrap();
        for _ in 0..rounds {
            let forked = fork(program.pid(), |_, _| {});
            let errno = forked.map(Twin::end).map_err(|e| e.errno()).err();
            assert_eq!(errno, (!possible).then_some(Some(libc::EAGAIN)), "limit {limit}");
            program.unharmed(&before, "after a refusal");
        }
    }
    drop(program);
    std::fs::remove_dir(group).unwrap();
}

#[test]
fn a_program_that_job_control_stopped_stays_stopped() {
    let program = Program::start(&["1"]);
    let before = program.facts();
    let pid = rustix::process::Pid::from_raw(program.pid() as i32).unwrap();
    for _ in 0..10 {
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        let rest = || while program.proc().stat().unwrap().state != b'T' {};
        rest();
        let stopped = program.facts();
        let mut twin = fork(program.pid(), |_, _| {}).unwrap();
        twin.settle().unwrap();
        twin.end().unwrap();
        // It goes back to being stopped by itself.
        rest();
        assert_eq!(program.facts(), stopped);
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
        program.unharmed(&before, "after a stop");
    }
}

#[test]
fn a_sleeper_sleeps_on_for_the_rest_of_its_time() {
    common::sleeps_on(|pid| fork(pid, |_, _| {}).unwrap().end().unwrap());
}

/// A process that makes a twin of the program, waiting for a word before it begins.
struct Visitor {
    child: Child,
    /// The thread that does it.
    tid: u32,
}

impl Visitor {
    fn start(program: &Program) -> Visitor {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "visitor", "--ignored", "--nocapture"])
            .env("VISIT_PID", program.pid().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = said.find_map(|l| l.unwrap().split("thread ").nth(1).map(String::from)).unwrap();
        Visitor { child, tid: line.parse().unwrap() }
    }

    fn begin(&mut self) {
        self.child.stdin.take().unwrap().write_all(b"!").unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
#[ignore = "the other half of the tests below"]
fn visitor() {
    let Some(pid) = std::env::var("VISIT_PID").ok().and_then(|v| v.parse().ok()) else { return };
    println!("thread {}", rustix::thread::gettid().as_raw_nonzero());
    std::io::stdin().read_exact(&mut [0]).unwrap();
    let mut twin = fork(pid, |_, _| {}).unwrap();
    twin.settle().unwrap();
    let stack = Proc::process(pid).unwrap().maps().unwrap();
    let stack = stack.iter().find(|v| v.name == b"[stack]").unwrap();
    read(twin.memory(), stack.start, stack.end - stack.start);
    twin.release(RemoteAddr(stack.start), stack.end - stack.start).unwrap();
    twin.check().unwrap();
    twin.end().unwrap();
    std::process::exit(0);
}

/// Kills the visitor at its first, second, … entry to and exit from a system call: at every third, whose turn it is, or at all.
#[test]
fn killed_at_any_of_our_system_calls_the_program_is_whole() {
    let program = Program::start(&["1"]);
    let before = program.facts();
    let turn = tier::turn("steps", &[0, 1, 2]);
    for step in (0..).filter(|step| turn.contains(&(step % 3))) {
        let mut visitor = Visitor::start(&program);
        let seized = Seized::seize(visitor.tid, options::SYSCALL_GOOD).unwrap();
        seized.interrupt().unwrap();
        let mut thread = seized.wait().unwrap().stopped(visitor.tid).unwrap();
        visitor.begin();
        let mut stops = 0;
        let ended = loop {
            let Waited::Stopped(stopped) = thread.resume_to_call().unwrap().wait().unwrap() else {
                break true;
            };
            thread = stopped;
            stops += i32::from(thread.stop() == Stop::Call);
            if stops > step {
                visitor.child.kill().unwrap();
                while let Ok(Waited::Stopped(_)) = Seized::born(visitor.tid).wait() {}
                break false;
            }
        };
        visitor.child.wait().unwrap();
        program.unharmed(&before, &format!("killed at step {step}"));
        if ended {
            assert!(step > 100, "only {step} steps");
            eprintln!("{step} steps");
            return;
        }
    }
}

#[test]
fn killed_at_random_moments_the_program_is_whole() {
    let program = Program::start(&["64"]);
    let before = program.facts();
    let whole = {
        let mut visitor = Visitor::start(&program);
        let start = Instant::now();
        visitor.begin();
        assert!(visitor.child.wait().unwrap().success());
        start.elapsed()
    };
    let kills = tier::times("STILLPOINT_KILLS", 40, 1000) as u32;
    for n in 0..kills {
        let mut visitor = Visitor::start(&program);
        visitor.begin();
        // Evenly over the time that it takes, in an order that does not matter.
        let delay = whole.mul_f64(f64::from(n * 37 % kills) / f64::from(kills) * 1.1);
        let start = Instant::now();
        while start.elapsed() < delay {}
        visitor.kill();
        program.unharmed(&before, &format!("killed after {delay:?} of {whole:?}"));
    }
}
