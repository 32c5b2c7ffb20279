//! Objects of interprocess communication that outlive the program: what a restore finds of them, and who else uses them.

use std::io::Read;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use stillpoint_tests::target::Running;
use stillpoint_tests::turn::{self, Turn};
use stillpoint_tests::{
    Build, Scratch, Stillpoint, Target, kernel, right, right_eq, skipped, undisturbed_only,
};

/// A program with a segment that outlives it, checkpointed once.
struct Held {
    /// Segments of programs that run at the same time take each other's ids.
    _alone: Turn,
    running: Running,
    stillpoint: Stillpoint,
    scratch: Scratch,
    id: String,
}

impl Held {
    fn new() -> Option<Self> {
        if undisturbed_only() {
            return None;
        }
        let alone = Turn::of(turn::SYSTEM_V);
        let scratch = Scratch::new();
        let target = Target::new("sysv", "by_key", Build::Dynamic).expect("cc");
        let running = target.start(&scratch.directory("held"), scratch.path());
        if let Some(why) = running.skip() {
            skipped(&why);
            return None;
        }
        let id = std::fs::read_to_string(running.directory().join("id")).expect("the segment's id");
        Some(Held {
            _alone: alone,
            stillpoint: scratch.stillpoint(),
            running,
            scratch,
            id: id.trim().to_owned(),
        })
    }

    /// Checkpointed and killed.
    fn away() -> Option<Self> {
        let mut held = Held::new()?;
        held.stillpoint.checkpoint(held.running.pid, "held", &["--kill"]);
        held.running.reap();
        Some(held)
    }

    /// Another program that is attached to the segment, and has written to it.
    fn stranger(&self) -> Running {
        let target = Target::new("sysv", "stranger", Build::Dynamic).expect("cc");
        let directory = self.scratch.directory("stranger");
        std::fs::write(directory.join("id"), &self.id).expect("a file");
        target.start(&directory, self.scratch.path())
    }

    #[track_caller]
    fn comes_back(&self) {
        let pid = self.stillpoint.restore_detached("held", &[]);
        Running::restored(pid, self.running.directory()).finish("after restore");
    }

    /// The restore says no, and neither a process nor a change is left.
    #[track_caller]
    fn stays_away(&self, words: &[&str]) {
        let before = segments();
        self.stillpoint.run(&["restore", "held", "--detach"]).fails(3, words);
        right_eq!(segments(), before, "a refusal changes nothing");
        assert!(!kernel::alive(self.running.pid));
    }

    fn remove(&self) {
        run("ipcrm", &["-m", &self.id]);
    }
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).stdout(std::process::Stdio::null()).status();
    assert!(status.is_ok_and(|s| s.success()), "{program} {arguments:?}");
}

/// What the kernel tells of segments, but for times and who used them last.
fn segments() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/sysvipc/shm").expect("procfs");
    let first = |line: &str| line.split_whitespace().take(4).collect::<Vec<_>>().join(" ");
    let mut lines: Vec<_> = text.lines().map(first).collect();
    lines.sort();
    lines
}

#[test]
fn a_segment_that_is_gone_comes_back_with_its_id() {
    let Some(held) = Held::away() else { return };
    held.remove();
    held.comes_back();
}

#[test]
fn a_segment_that_was_written_to_is_set_back() {
    let Some(held) = Held::away() else { return };
    held.stranger().finish("detached");
    held.comes_back();
}

#[test]
fn a_segment_that_others_use_is_refused() {
    let Some(held) = Held::new() else { return };
    let stranger = held.stranger();
    let pid = stranger.pid.to_string();
    let target = held.running.pid.to_string();
    held.stillpoint.run(&["checkpoint", &target, "--name", "held"]).fails(3, &[&pid]);
    right!(kernel::alive(held.running.pid));
    stranger.finish("after a refusal");
    held.remove();
    kernel::kill(held.running.pid, rustix::process::Signal::KILL);
}

#[test]
fn a_segment_that_others_use_is_left_to_them() {
    let Some(held) = Held::away() else { return };
    let stranger = held.stranger();
    held.stays_away(&[&stranger.pid.to_string()]);
    stranger.finish("after a refusal");
    held.comes_back();
}

#[test]
fn an_id_that_is_taken_is_named() {
    let Some(held) = Held::away() else { return };
    if kernel::which("ipcmk").is_none() || !Path::new("/proc/sys/kernel/shm_next_id").exists() {
        held.remove();
        return skipped("no way to make a segment with an id");
    }
    held.remove();
    std::fs::write("/proc/sys/kernel/shm_next_id", &held.id).expect("is root");
    run("ipcmk", &["-M", "4096"]);
    held.stays_away(&[&format!("segment {} ", held.id)]);
    held.remove();
    held.comes_back();
}

#[test]
fn a_key_that_is_taken_is_named() {
    let Some(held) = Held::away() else { return };
    held.remove();
    let target = Target::new("sysv", "by_key_of", Build::Dynamic).expect("cc");
    let directory = held.scratch.directory("other");
    std::fs::write(directory.join("id"), held.running.pid.to_string()).expect("a file");
    let other = target.start(&directory, held.scratch.path());
    held.stays_away(&["key"]);
    other.finish("after a refusal");
    held.comes_back();
}

/// A program that sends to a socket outside, which is this test; checkpointed and killed.
fn logging(scratch: &Scratch) -> Option<(Stillpoint, Running, UnixDatagram)> {
    if undisturbed_only() {
        return None;
    }
    let directory = scratch.directory("logging");
    let log = UnixDatagram::bind(directory.join("log")).expect("a socket");
    log.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let target = Target::new("unix", "logging", Build::Dynamic).expect("cc");
    let mut running = target.start(&directory, scratch.path());
    right_eq!(heard(&log), "before");
    let stillpoint = scratch.stillpoint();
    stillpoint.checkpoint(running.pid, "logging", &["--kill"]);
    running.reap();
    Some((stillpoint, running, log))
}

fn heard(log: &UnixDatagram) -> String {
    let mut text = [0; 64];
    let n = log.recv(&mut text).expect("a message");
    String::from_utf8_lossy(&text[..n]).into_owned()
}

#[test]
fn who_sends_to_a_socket_outside_finds_it_again() {
    let scratch = Scratch::new();
    let Some((stillpoint, running, log)) = logging(&scratch) else { return };
    let pid = stillpoint.restore_detached("logging", &[]);
    Running::restored(pid, running.directory()).finish("after restore");
    right_eq!(heard(&log), "after");
}

#[test]
fn a_socket_outside_that_is_gone_is_named() {
    let scratch = Scratch::new();
    let Some((stillpoint, running, log)) = logging(&scratch) else { return };
    drop(log);
    stillpoint.run(&["restore", "logging", "--detach"]).fails(3, &["/log again"]);
    std::fs::remove_file(running.directory().join("log")).expect("a name");
    stillpoint.run(&["restore", "logging", "--detach"]).fails(3, &["/log again"]);
    let log = UnixDatagram::bind(running.directory().join("log")).expect("a socket");
    let pid = stillpoint.restore_detached("logging", &[]);
    Running::restored(pid, running.directory()).finish("after restore");
    right_eq!(heard(&log), "after");
}

/// It is in the first checkpoint; in a second one it would be missing, which is noticed.
#[test]
fn an_empty_message_is_not_lost() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("unix", "empty_inside", Build::Dynamic).expect("cc");
    let mut running = target.start(&scratch.directory("empty"), scratch.path());
    let pid = running.pid;
    stillpoint.checkpoint(pid, "empty", &[]);
    stillpoint.run(&["checkpoint", &pid.to_string(), "--name", "empty"]).fails(3, &["empty one"]);
    kernel::kill(pid, rustix::process::Signal::KILL);
    running.reap();
    let pid = stillpoint.restore_detached("empty", &[]);
    Running::restored(pid, running.directory()).finish("after restore");
}

#[test]
fn a_stranger_who_waits_to_be_accepted_is_refused() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let target = Target::new("unix", "listening", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("door"), scratch.path());
    let mut stranger = UnixStream::connect(running.directory().join("door")).expect("a connection");
    let arguments = ["checkpoint", &running.pid.to_string(), "--name", "door"];
    let us = format!("process {}", std::process::id());
    let output = scratch.stillpoint().run(&arguments).fails(3, &["waits to be accepted"]);
    assert!(output.stderr.contains(&us), "{output}");
    running.finish("after a refusal");
    let mut text = String::new();
    stranger.read_to_string(&mut text).expect("an answer");
    right_eq!(text, "welcome");
}
