//! The command and its peers, driven from outside.

use crate::heartbeat::Heartbeat;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Another tool that does the same.
pub trait Tool {
    /// Its name.
    fn name(&self) -> &str;
    /// What a program has to be started with so that it can be checkpointed; empty: any program can.
    fn launcher(&self, place: &Path) -> Result<Vec<String>>;
    /// Checkpoints a process that goes on; time until it is on disk.
    fn checkpoint(&self, pid: u32, place: &Path) -> Result<Duration>;
    /// Checkpoints and kills a program and restores it; time of the restore until the program answers.
    fn kill_and_restore(&self, program: &mut Heartbeat, place: &Path) -> Result<Duration>;
}

/// Runs a command that must succeed; gives its output and how long it took.
fn run(command: &mut Command) -> Result<(String, Duration)> {
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    let took = began.elapsed();
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), took))
}

fn on_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|d| d.join(name)).find(|p| p.is_file())
}

/// A checkpoint of ours.
pub struct Cut {
    /// Time of the whole command.
    pub wall: Duration,
    /// Pause by our own stopwatch.
    pub own_pause_ms: f64,
    /// Bytes that were written.
    pub bytes: u64,
}

/// The command.
pub struct Stillpoint {
    binary: PathBuf,
}

impl Stillpoint {
    /// `STILLPOINT_BIN`, or the one beside this program.
    pub fn find() -> Result<Self> {
        let beside = || Some(std::env::current_exe().ok()?.with_file_name("stillpoint"));
        let binary =
            std::env::var_os("STILLPOINT_BIN").map(PathBuf::from).or_else(beside).context("no stillpoint")?;
        if !binary.is_file() {
            bail!("{} is missing: build the workspace first", binary.display());
        }
        Ok(Stillpoint { binary })
    }

    fn json(&self, store: &Path, arguments: &[&str]) -> Result<(Value, Duration)> {
        let mut command = Command::new(&self.binary);
        let (out, took) = run(command.args(arguments).arg("--json").env("STILLPOINT_STORE", store))?;
        Ok((serde_json::from_str(&out).with_context(|| out.clone())?, took))
    }

    /// Checkpoints a process that goes on. Only the newest checkpoint is kept.
    pub fn checkpoint(&self, pid: u32, store: &Path) -> Result<Cut> {
        let pid = pid.to_string();
        let (json, wall) = self.json(store, &["checkpoint", &pid, "--name", "bench", "--engine", "stop"])?;
        self.json(store, &["prune", "bench", "--keep", "1"])?;
        let bytes = json["written_bytes"].as_u64().or_else(|| json["bytes"].as_u64()).context("no bytes")?;
        Ok(Cut { wall, own_pause_ms: json["pause_ms"].as_f64().context("no pause_ms")?, bytes })
    }

    /// As [`Tool::kill_and_restore`].
    pub fn kill_and_restore(&self, program: &mut Heartbeat, store: &Path) -> Result<Duration> {
        let pid = program.pid.to_string();
        self.json(store, &["checkpoint", &pid, "--name", "restore", "--kill"])?;
        program.reap();
        let began = Instant::now();
        self.json(store, &["restore", "restore", "--detach"])?;
        program.longest_gap()?;
        let took = began.elapsed();
        self.json(store, &["prune", "restore", "--keep", "1"])?;
        Ok(took)
    }
}

/// CRIU, where it works on this kernel.
pub struct Criu {
    binary: PathBuf,
}

impl Criu {
    /// CRIU on `PATH`, if it passes its own check.
    pub fn find() -> Result<Box<dyn Tool>> {
        let binary = on_path("criu").context("CRIU is skipped: it is not installed")?;
        let check = Command::new(&binary).arg("check").output()?;
        if !check.status.success() {
            let said = String::from_utf8_lossy(&check.stderr).into_owned();
            let error = |l: &str| Some(l.trim().strip_prefix("Error ")?.split_once("): ")?.1.to_owned());
            let errors: Vec<_> = said.lines().filter_map(error).collect();
            bail!("CRIU is skipped: `criu check` fails on this kernel ({})", errors.join("; "));
        }
        Ok(Box::new(Criu { binary }))
    }

    fn dump(&self, pid: u32, place: &Path, extra: &[&str]) -> Result<Duration> {
        let _ = std::fs::remove_dir_all(place);
        std::fs::create_dir_all(place)?;
        let mut command = Command::new(&self.binary);
        command.args(["dump", "-t", &pid.to_string(), "-D"]).arg(place).args(extra);
        let (_, took) = run(&mut command)?;
        // CRIU leaves its images in the page cache: durable is what counts.
        let began = Instant::now();
        run(Command::new("sync").arg("-f").arg(place))?;
        Ok(took + began.elapsed())
    }
}

impl Tool for Criu {
    fn name(&self) -> &str {
        "CRIU"
    }

    fn launcher(&self, _: &Path) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn checkpoint(&self, pid: u32, place: &Path) -> Result<Duration> {
        self.dump(pid, &place.join("images"), &["--leave-running"])
    }

    fn kill_and_restore(&self, program: &mut Heartbeat, place: &Path) -> Result<Duration> {
        let images = place.join("images");
        self.dump(program.pid, &images, &[])?;
        program.reap();
        let began = Instant::now();
        run(Command::new(&self.binary).arg("restore").arg("-d").arg("-D").arg(&images))?;
        program.longest_gap()?;
        Ok(began.elapsed())
    }
}

/// DMTCP, where it is installed.
pub struct Dmtcp;

impl Dmtcp {
    /// DMTCP on `PATH`.
    pub fn find() -> Result<Box<dyn Tool>> {
        for name in ["dmtcp_launch", "dmtcp_command", "dmtcp_restart"] {
            on_path(name).context("DMTCP is skipped: it is not installed")?;
        }
        Ok(Box::new(Dmtcp))
    }

    /// Each place has a coordinator of its own, on a port of its own.
    fn port(place: &Path) -> String {
        let sum: u32 = place.as_os_str().as_encoded_bytes().iter().map(|&b| u32::from(b)).sum();
        (20_000 + sum % 20_000).to_string()
    }

    fn command(place: &Path, argument: &str) -> Result<Duration> {
        Ok(run(Command::new("dmtcp_command").args(["-p", &Self::port(place), argument]))?.1)
    }
}

impl Tool for Dmtcp {
    fn name(&self) -> &str {
        "DMTCP"
    }

    fn launcher(&self, place: &Path) -> Result<Vec<String>> {
        std::fs::create_dir_all(place)?;
        let place_name = place.display().to_string();
        Ok(["dmtcp_launch", "--no-gzip", "-p", &Self::port(place), "--ckptdir", &place_name]
            .map(String::from)
            .to_vec())
    }

    fn checkpoint(&self, _: u32, place: &Path) -> Result<Duration> {
        let took = Self::command(place, "-bc")?; // blocks until it is written
        let began = Instant::now();
        run(Command::new("sync").arg("-f").arg(place))?;
        Ok(took + began.elapsed())
    }

    fn kill_and_restore(&self, program: &mut Heartbeat, place: &Path) -> Result<Duration> {
        Self::command(place, "-bc")?;
        Self::command(place, "-k")?;
        program.reap();
        let images = std::fs::read_dir(place)?.flatten().map(|e| e.path());
        let image =
            images.filter(|p| p.extension().is_some_and(|e| e == "dmtcp")).max().context("no image")?;
        let began = Instant::now();
        let mut restart = Command::new("dmtcp_restart");
        restart.args(["-p", &Self::port(place)]).arg(image).stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = restart.spawn()?;
        program.longest_gap()?;
        let took = began.elapsed();
        std::thread::spawn(move || child.wait());
        Ok(took)
    }
}
