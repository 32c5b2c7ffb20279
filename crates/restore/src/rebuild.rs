//! STUB of branch `cli`: to be replaced by the real orchestration.

use crate::{Error, FilesPolicy, Result, Stdio};
use std::os::fd::OwnedFd;
use std::time::Duration;
use stillpoint_store::Checkpoint;

/// What to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// Changed files.
    pub files: FilesPolicy,
    /// Refuse another pid.
    pub same_pid_only: bool,
    /// Standard streams.
    pub stdio: Stdio,
}

/// Hears how far the work is.
pub trait Progress {
    /// It begins.
    fn start(&self, total_bytes: u64);
    /// Some more is done.
    fn advance(&self, bytes: u64);
}

/// A restored program.
#[derive(Debug)]
pub struct Restored {
    /// In our namespace.
    pub pid: u32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
    /// Pid as it sees itself, in a private pid namespace.
    pub private_pid: Option<u32>,
    /// Settings of its terminal.
    pub terminal: Option<stillpoint_image::Terminal>,
    /// Where the rest of standard input goes.
    pub stdin_pump: Option<OwnedFd>,
    /// Time to the skeleton.
    pub skeleton: Duration,
    /// Time to all of its memory.
    pub loaded: Duration,
    /// Pages.
    pub pages: u64,
    /// Remarks.
    pub notes: Vec<String>,
}

/// Restores a checkpoint.
pub fn restore(_checkpoint: &Checkpoint, _options: &Options, _progress: &dyn Progress) -> Result<Restored> {
    Err(Error::Failed("restoring is not there yet".into()))
}
