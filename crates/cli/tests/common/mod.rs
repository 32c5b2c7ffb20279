//! What the tests of the command share: a store of their own, and runs of the command on it.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses some of it; a failed unwrap fails the test

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The command under test.
pub const STILLPOINT: &str = env!("CARGO_BIN_EXE_stillpoint");

/// A folder with a store in it, removed in the end.
pub struct Bench {
    /// The folder.
    pub dir: TempDir,
}

impl Bench {
    /// An empty one.
    pub fn new() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The store.
    pub fn store(&self) -> PathBuf {
        self.path("store")
    }

    /// The command with the store given by the environment, and nothing on its standard input.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(STILLPOINT);
        command.args(arguments).env("STILLPOINT_STORE", self.store()).stdin(Stdio::null());
        command
    }

    /// Runs the command to its end.
    pub fn run(&self, arguments: &[&str]) -> Outcome {
        Outcome::of(self.command(arguments).output().unwrap())
    }

    /// Runs the command to its end; its answer as JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let outcome = self.run(&[&["--json"], arguments].concat());
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:?}"))
    }

    /// The process of a job that runs.
    pub fn pid_of(&self, job: &str) -> Option<u32> {
        let jobs = self.json(&["ls"]);
        let job = jobs.as_array().unwrap().iter().find(|j| j["job"] == job)?;
        job["running"]["pid"].as_u64().map(|pid| pid as u32)
    }
}

/// What a command that ended left.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code; `None` if a signal killed it.
    pub code: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// From what the standard library tells.
    pub fn of(output: Output) -> Self {
        use std::os::unix::process::ExitStatusExt;
        Self {
            code: output.status.code(),
            signal: output.status.signal(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Fails the test unless the command failed with this code and one sentence that holds all of `words`.
    pub fn assert_fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.stderr.starts_with("stillpoint: "), "{self:?}");
        assert!(!self.stderr.contains("panicked") && !self.stderr.contains("RUST_BACKTRACE"), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not in {self:?}");
        }
    }
}

/// Waits until something holds; fails the test after a minute.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}: not after a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process is there and not a zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Sends a signal.
pub fn kill(pid: u32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Contents of a file, nothing if there is none.
pub fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
