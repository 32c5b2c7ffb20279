//! STUB of branch `cli`: to be replaced by the real orchestration.

use crate::{Error, Result};
use std::time::Duration;
use stillpoint_store::Store;

/// How memory is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The program stands still while its memory is written.
    Stop,
}

impl std::str::FromStr for Engine {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        if s == "stop" { Ok(Engine::Stop) } else { Err(format!("unknown engine {s}")) }
    }
}

/// What to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// Job.
    pub job: String,
    /// Label.
    pub label: Option<String>,
    /// Engine.
    pub engine: Engine,
    /// Kill the target after the commit.
    pub kill: bool,
}

/// Hears how far the work is.
pub trait Progress {
    /// It begins.
    fn start(&self, total_bytes: u64);
    /// Some more is done.
    fn advance(&self, bytes: u64);
}

/// What was done.
#[derive(Clone, Debug)]
pub struct Report {
    /// Job.
    pub job: String,
    /// Number of the checkpoint.
    pub id: u64,
    /// Memory described, bytes.
    pub bytes: u64,
    /// Memory described, pages.
    pub pages: u64,
    /// Bytes written to the store.
    pub written_bytes: u64,
    /// How long the target stood still.
    pub pause: Duration,
    /// How long all took.
    pub wall: Duration,
    /// Engine.
    pub engine: &'static str,
    /// Remarks.
    pub notes: Vec<String>,
}

/// Takes a checkpoint.
pub fn checkpoint(_pid: u32, _store: &Store, _options: &Options, _progress: &dyn Progress) -> Result<Report> {
    Err(Error::Failed("checkpoints are not there yet".into()))
}
