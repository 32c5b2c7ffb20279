//! The command and its peers, driven from outside.

mod criu;
mod dmtcp;
mod stillpoint;

pub use criu::Criu;
pub use dmtcp::Dmtcp;
pub use stillpoint::{Cut, Engine, Job, Request, Stillpoint};

use crate::heartbeat::Heartbeat;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Another tool that does the same.
pub trait Tool {
    /// Its name.
    fn name(&self) -> &str;
    /// What a program has to be started with so that it can be checkpointed; empty: any program can.
    fn launcher(&self, place: &Path) -> Result<Vec<String>>;
    /// Checkpoints a process that goes on.
    fn checkpoint(&self, pid: u32, place: &Path) -> Result<Dump>;
    /// Checkpoints and kills a program and restores it; time of the restore until the program runs, and until it answers.
    fn kill_and_restore(&self, program: &mut Heartbeat, place: &Path) -> Result<(Duration, Duration)>;
}

/// Another tool's checkpoint.
pub struct Dump {
    /// Time until the tool is done.
    pub done: Duration,
    /// Time until it would survive a crash.
    pub durable: Duration,
}

/// A tool's name and why it is left out.
pub type Absent = (&'static str, String);

/// The tools that are installed and work here, and those that are not or do not.
pub fn peers() -> (Vec<Box<dyn Tool>>, Vec<Absent>) {
    let mut found = Vec::new();
    let mut missing = Vec::new();
    for (name, peer) in [("CRIU", Criu::find()), ("DMTCP", Dmtcp::find())] {
        match peer {
            Ok(tool) => found.push(tool),
            Err(why) => missing.push((name, format!("{why:#}"))),
        }
    }
    (found, missing)
}

/// Runs a command that must succeed; gives its output and how long it took.
fn run(command: &mut Command) -> Result<(String, Duration)> {
    let began = Instant::now();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    let took = began.elapsed();
    if !output.status.success() {
        // It stands in results, where places of this machine say nothing.
        let program = Path::new(command.get_program()).file_name().unwrap_or_default().display();
        bail!("{program}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), took))
}

/// Makes what was written there durable; how long that took.
pub fn sync(place: &Path) -> Result<Duration> {
    Ok(run(Command::new("sync").arg("-f").arg(place))?.1)
}

fn on_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|d| d.join(name)).find(|p| p.is_file())
}
