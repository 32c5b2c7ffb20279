//! DMTCP.

use super::{Dump, Tool, on_path, run, sync};
use crate::heartbeat::Heartbeat;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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

    fn checkpoint(&self, _: u32, place: &Path) -> Result<Dump> {
        let took = Self::command(place, "-bc")?; // blocks until it is written
        Ok(Dump { done: took, durable: took + sync(place)? })
    }

    fn kill_and_restore(&self, program: &mut Heartbeat, place: &Path) -> Result<(Duration, Duration)> {
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
        // It stays in the foreground: when the program runs, nobody says.
        Ok((took, took))
    }
}
