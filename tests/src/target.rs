//! The purpose-made programs of `targets/`: started, told to go on, judged.

use crate::kernel;
use crate::scratch::MARK;
use crate::stillpoint::{Stillpoint, binary};
use crate::verdict::{self, Judgement};
use crate::{fault, right};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How a C program is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Build {
    /// Against shared glibc, as most programs are.
    Dynamic,
    /// Against static glibc, not relocatable.
    Static,
    /// Against static musl.
    Musl,
    /// 32-bit.
    Bits32,
}

impl Build {
    /// The program of a source file, which `build.rs` has built before any test ran; `None` where the compiler for it is
    /// missing.
    pub fn of(self, source: &Path) -> Option<PathBuf> {
        let here = source.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap_or(source).with_extension("");
        let build = format!("{self:?}").to_lowercase();
        let program = Path::new(env!("OUT_DIR")).join(format!("{}-{build}", here.display()));
        if program.exists() {
            return Some(program);
        }
        let missing = program.with_extension("missing");
        assert!(
            missing.exists(),
            "{} is not built as {self:?}: tests/build.rs lists what is",
            source.display()
        );
        None
    }
}

/// A command in a session of its own, with no descriptors but its standard streams, whatever this process was started
/// with. Standard output and the like are still to be set.
pub fn alone(program: impl AsRef<OsStr>) -> Command {
    const CLOSE: &str =
        r#"for f in /proc/self/fd/*; do n=${f##*/}; [ "$n" -gt 2 ] && eval "exec $n>&-"; done; exec "$@""#;
    let mut command = Command::new("bash");
    command.args(["-c", CLOSE, "bash", "setsid"]).arg(program);
    command
}

/// One scenario of a target program.
#[derive(Clone, Debug)]
pub struct Target {
    /// Compiled program.
    pub program: PathBuf,
    /// Scenario, its first argument.
    pub scenario: String,
}

impl Target {
    /// A scenario of `targets/NAME.c`; `None` where it cannot be built this way.
    pub fn new(name: &str, scenario: &str, build: Build) -> Option<Self> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("targets").join(format!("{name}.c"));
        Some(Target { program: build.of(&source)?, scenario: scenario.to_owned() })
    }

    /// The command that starts it in a session of its own, with its output in `DIRECTORY/out`.
    pub fn command(&self, directory: &Path, mark: &Path) -> Command {
        let out =
            File::create(directory.join("out")).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
        let err = out.try_clone().unwrap_or_else(|e| panic!("{e}"));
        let mut command = alone(&self.program);
        command.arg(&self.scenario).arg(directory).current_dir(directory);
        command.env(MARK, mark).stdin(Stdio::null()).stdout(out).stderr(err);
        command
    }

    /// Starts it and waits until it is ready.
    #[track_caller]
    pub fn start(&self, directory: &Path, mark: &Path) -> Running {
        let child = self.command(directory, mark).spawn().unwrap_or_else(|e| panic!("setsid: {e}"));
        let running = Running::new(child, directory);
        running.await_ready();
        running
    }
}

/// A job in the background, with its supervisor.
#[derive(Debug)]
pub struct Job {
    /// The target.
    pub running: Running,
    /// Process id of its supervisor.
    pub supervisor: u32,
}

impl Target {
    /// Starts it by `run --detach` as the job `name`, and waits until it is ready.
    #[track_caller]
    pub fn start_job(&self, stillpoint: &Stillpoint, name: &str, directory: &Path) -> Job {
        let out =
            File::create(directory.join("out")).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
        let mut command = alone(binary());
        command.args(["run", "--name", name, "--detach", "--json", "--"]);
        command.arg(&self.program).arg(&self.scenario).arg(directory).current_dir(directory);
        let like = stillpoint.command::<&str>(&[]);
        command.envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
        // The job keeps standard output, so the report goes to standard error.
        let done = command.stdin(Stdio::null()).stdout(out).stderr(Stdio::piped()).output();
        let done = done.unwrap_or_else(|e| panic!("run: {e}"));
        let report = String::from_utf8_lossy(&done.stderr).into_owned();
        let json: serde_json::Value =
            serde_json::from_str(report.trim()).unwrap_or_else(|e| panic!("run: {e}: {report}"));
        let number = |key: &str| json[key].as_u64().unwrap_or_else(|| panic!("no {key} in {json}")) as u32;
        let running = Running { pid: number("pid"), child: None, directory: directory.to_owned() };
        running.await_ready();
        Job { running, supervisor: number("supervisor_pid") }
    }
}

/// A target that was started, or restored, in a directory.
#[derive(Debug)]
pub struct Running {
    /// Process id.
    pub pid: u32,
    child: Option<Child>,
    directory: PathBuf,
}

impl Running {
    /// A target that is a child of ours.
    pub fn new(child: Child, directory: &Path) -> Self {
        Running { pid: child.id(), child: Some(child), directory: directory.to_owned() }
    }

    /// A target that is not.
    pub fn restored(pid: u32, directory: &Path) -> Self {
        fault::restored(pid);
        Running { pid, child: None, directory: directory.to_owned() }
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What it has said.
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.directory.join("out")).unwrap_or_default()).into_owned()
    }

    /// Waits for its "ready" (or its end).
    #[track_caller]
    pub fn await_ready(&self) {
        crate::wait_for("the target to be ready", Duration::from_secs(60), || {
            let said = self.said();
            (said.contains("ready\n") || said.contains("skip: ") || !kernel::alive(self.pid)).then_some(())
        });
        assert!(self.said().contains("ready\n") || self.skip().is_some(), "not ready: {}", self.said());
        // What it writes can be read a moment before its descriptor has moved on.
        crate::wait_for("its output's offset", Duration::from_secs(60), || {
            let info = std::fs::read_to_string(format!("/proc/{}/fdinfo/1", self.pid)).unwrap_or_default();
            (info.lines().next() != Some("pos:\t0")).then_some(())
        });
    }

    /// Why it does nothing here, if it said so.
    pub fn skip(&self) -> Option<String> {
        let said = self.said();
        said.lines().find_map(|l| l.strip_prefix("skip: ").map(str::to_owned))
    }

    /// Tells it to check everything and to end.
    pub fn go(&self) {
        // Two ways to say it: a file that appears, and a byte in a file that it holds open.
        let byte = self.directory.join("go.file");
        if byte.exists() {
            std::fs::write(&byte, "g").unwrap_or_else(|e| panic!("{}: {e}", byte.display()));
        }
        let go = self.directory.join("go");
        std::fs::write(&go, "").unwrap_or_else(|e| panic!("{}: {e}", go.display()));
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(mut self) {
        kernel::kill(self.pid, kernel::SIGKILL);
        self.reap();
    }

    /// Waits for an end that somebody else brought about, so that its process id is free.
    pub fn reap(&mut self) {
        match self.child.take() {
            Some(mut child) => {
                let _ = child.wait();
            }
            None => {
                kernel::wait_gone(self.pid, Duration::from_secs(60));
                kernel::wait_free(self.pid);
            }
        }
    }

    /// Waits for its end; its exit status if it was a child of ours.
    #[track_caller]
    pub fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        match self.child.as_mut() {
            Some(child) => {
                let said = self.directory.join("out");
                let pid = self.pid;
                let status =
                    crate::wait_for(&format!("process {pid} to end ({})", said.display()), patience, || {
                        child.try_wait().unwrap_or_else(|e| panic!("{e}"))
                    });
                self.child = None;
                Some(status)
            }
            None => {
                kernel::wait_gone(self.pid, patience);
                None
            }
        }
    }

    /// Lets it go, waits for its end, and requires its "ok".
    #[track_caller]
    pub fn finish(mut self, what: &str) -> String {
        self.go();
        let status = self.wait(Duration::from_secs(90));
        let said = self.said();
        judge(&said, what);
        if let Some(status) = status {
            right!(status.success(), "{what}: the target ended with {status}:\n{said}");
        }
        said
    }
}

/// Panics unless a target found all as it was. Undisturbed, what it finds is its own fault, or the machine's.
#[track_caller]
pub fn judge(said: &str, what: &str) {
    let first = said.lines().find(|line| line.starts_with("differs: ")).unwrap_or("it says nothing more");
    let found = format!("{what}: the target found differences: {first}\n{said}");
    match Judgement::of(said) {
        Judgement::Right => {}
        Judgement::Late => panic!("{what}: the target took longer than it should:\n{said}"),
        Judgement::Wrong if what.contains("undisturbed") => panic!("{found}"),
        Judgement::Wrong => verdict::wrong(found),
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        kernel::kill(self.pid, kernel::SIGKILL);
        // Whoever traces it, and hangs, keeps it from its end: it is waited for, but not for ever.
        let until = Instant::now() + Duration::from_secs(5);
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
