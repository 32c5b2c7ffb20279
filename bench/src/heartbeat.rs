//! The program that feels its own pauses (`programs/heartbeat.c`).

use crate::programs::{Outcome, Program, Programs};
use anyhow::{Context, Result};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::Duration;

/// What a heartbeat program does.
#[derive(Clone, Copy)]
pub struct Load {
    /// Its memory, MiB.
    pub mebibytes: u64,
    /// Random page writes per second.
    pub writes: u64,
    /// Threads, with the one that beats, the one that writes and the main one.
    pub threads: u64,
}

impl Load {
    /// A program of the fewest threads.
    pub fn new(mebibytes: u64, writes: u64) -> Self {
        Load { mebibytes, writes, threads: 3 }
    }

    fn arguments(self) -> [String; 3] {
        [self.mebibytes, self.writes, self.threads].map(|n| n.to_string())
    }

    /// What to run as a job.
    pub fn command_line(self, programs: &Programs, place: &Path) -> Vec<String> {
        programs.command_line("heartbeat", place, &self.arguments())
    }
}

/// A running heartbeat program.
pub struct Heartbeat(Program);

impl Heartbeat {
    /// Starts it in a new directory, through a launcher if there is one, and waits until it runs.
    pub fn start(programs: &Programs, place: &Path, load: Load, launcher: &[String]) -> Result<Self> {
        Ok(Heartbeat(programs.start("heartbeat", place, &load.arguments(), launcher)?))
    }

    /// One that runs as a job.
    pub fn adopt(pid: u32, place: &Path) -> Result<Self> {
        Ok(Heartbeat(Program::adopt(pid, place)?))
    }

    /// Writes that many different pages, spread over its memory.
    pub fn touch(&self, pages: u64) -> Result<()> {
        self.0.request("touch", &pages.to_string())
    }

    /// Lets it fork a child that ends at once; how long the call took.
    pub fn fork(&self) -> Result<Duration> {
        self.0.request("fork", "")?;
        let [took] = self.0.numbers("forked")?.try_into().ok().context("a number was expected")?;
        Ok(Duration::from_nanos(took))
    }

    /// Ends it; an error unless all of its memory is right.
    pub fn finish(self) -> Result<Outcome> {
        self.0.finish()
    }
}

impl Deref for Heartbeat {
    type Target = Program;

    fn deref(&self) -> &Program {
        &self.0
    }
}

impl DerefMut for Heartbeat {
    fn deref_mut(&mut self) -> &mut Program {
        &mut self.0
    }
}
