//! CRIU.

use super::{Dump, Tool, on_path, run, sync};
use crate::heartbeat::Heartbeat;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

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

    fn dump(&self, pid: u32, place: &Path, extra: &[&str]) -> Result<Dump> {
        let _ = std::fs::remove_dir_all(place);
        std::fs::create_dir_all(place)?;
        let mut command = Command::new(&self.binary);
        command.args(["dump", "-t", &pid.to_string(), "-D"]).arg(place).args(extra);
        let (_, took) = run(&mut command)?;
        // CRIU leaves its images in the page cache.
        Ok(Dump { done: took, durable: took + sync(place)? })
    }
}

impl Tool for Criu {
    fn name(&self) -> &str {
        "CRIU"
    }

    fn launcher(&self, _: &Path) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn checkpoint(&self, pid: u32, place: &Path) -> Result<Dump> {
        self.dump(pid, &place.join("images"), &["--leave-running"])
    }

    fn kill_and_restore(&self, program: &mut Heartbeat, place: &Path) -> Result<(Duration, Duration)> {
        let images = place.join("images");
        self.dump(program.pid, &images, &[])?;
        program.reap();
        let began = Instant::now();
        let (_, runs) = run(Command::new(&self.binary).arg("restore").arg("-d").arg("-D").arg(&images))?;
        program.longest_gap()?;
        Ok((runs, began.elapsed()))
    }
}
