//! Snapshots of a running program: the process that keeps them, beside the program, and how it is asked.
//!
//! It is one process for each program, started by whoever asks first, and it ends with the program, or when the last snapshot
//! is forgotten. Lines of JSON go over a socket in the store's folder `branches`, and over the one that the program's own
//! library has brought along ([`server::Keeper`]).

pub mod client;
pub mod server;

use crate::args::Files;
use crate::failure::{Failure, Result};
use crate::jobs;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use stillpoint_branch::files::{Changed, Fate};
use stillpoint_store::Store;

/// What is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ask {
    /// Another snapshot.
    Snapshot {
        /// The user's name for it.
        name: Option<String>,
        /// Of the one process, whatever others it has made.
        #[serde(default)]
        alone: bool,
    },
    /// Back to one.
    Rollback {
        /// Number or name; none: the one that the program has gone on from.
        snapshot: Option<String>,
        /// Children that were made since are killed.
        #[serde(default)]
        kill_children: bool,
        /// What becomes of files that the program writes and that changed since.
        #[serde(default = "keep")]
        files: Files,
        /// What the call returns that took the snapshot, if the program took it itself.
        #[serde(default = "one")]
        value: i64,
    },
    /// Which there are.
    List,
    /// One is not needed any more.
    Forget {
        /// As with a rollback.
        snapshot: Option<String>,
    },
    /// A checkpoint in the store.
    Checkpoint {
        /// Job it belongs to; none: named after the program.
        name: Option<String>,
    },
    /// A twin in a pid namespace of its own.
    Fork {},
}

fn one() -> i64 {
    1
}

fn keep() -> Files {
    Files::Keep
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// A snapshot was taken; or a program that took one itself is back there.
    Taken {
        /// Its number.
        snapshot: u64,
        /// How long the program stood still.
        pause_ms: f64,
        /// Pages that were copied.
        pages: u64,
        /// 0, or what the rollback gave.
        value: i64,
        /// Of so many processes.
        processes: usize,
        /// After a rollback: files that were not as they were.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        files: Vec<ChangedFile>,
    },
    /// The program is back.
    Rolled {
        /// Where.
        snapshot: u64,
        /// How long it stood still.
        pause_ms: f64,
        /// Pages that were put back.
        pages: u64,
        /// Of so many processes.
        processes: usize,
        /// What is not as it was.
        notes: Vec<String>,
        /// Files that were not as they were.
        #[serde(default)]
        files: Vec<ChangedFile>,
    },
    /// All snapshots, oldest first.
    List(Vec<Row>),
    /// It is forgotten.
    Forgotten {
        /// Which one.
        snapshot: u64,
    },
    /// There is a checkpoint.
    Checkpointed {
        /// Its number.
        id: u64,
    },
    /// There is a twin.
    Forked {
        /// Its process id.
        pid: u32,
    },
    /// Nothing was done.
    Failed(Failure),
}

/// A file that was not as it was at the snapshot that a program went back to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangedFile {
    /// Its name.
    pub file: String,
    /// Bytes at the snapshot; none if it was not open for writing then.
    pub size_then: Option<u64>,
    /// Bytes before the rollback; none if it could not be reached any more.
    pub size_now: Option<u64>,
    /// In which ways it had changed, a word for each.
    pub changes: Vec<String>,
    /// Whether it is as it was again.
    pub brought_back: bool,
    /// Where there is what was cut off.
    pub tail: Option<PathBuf>,
    /// All of that in words.
    pub what: String,
}

impl ChangedFile {
    /// Of what a rollback tells.
    fn of(changed: &Changed) -> Self {
        let brought_back = changed.fate == Fate::Back;
        let tail = changed.tail.clone().filter(|_| brought_back);
        let mut what = changed.to_string();
        if let Some(tail) = &tail {
            what += &format!("; what was cut off is in {}", tail.display());
        }
        ChangedFile {
            file: changed.file.clone(),
            size_then: changed.size_then,
            size_now: changed.size_now,
            changes: changed.how.iter().map(|how| how.word().to_owned()).collect(),
            brought_back,
            tail,
            what,
        }
    }
}

/// A snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Its number.
    pub snapshot: u64,
    /// The user's name for it.
    pub name: Option<String>,
    /// The one it was taken after.
    pub parent: Option<u64>,
    /// The program has gone on from it.
    pub current: bool,
    /// Of so many processes.
    pub processes: usize,
    /// When it was taken, nanoseconds since 1970.
    pub taken_ns: u64,
}

/// Where a program is asked for by name: held while this lives.
struct Place {
    /// The folder.
    folder: OwnedFd,
    name: String,
}

impl Place {
    /// Of a process, by its id and when it started. Nobody else looks for it there as long as this lives.
    fn of(store: &Store, pid: u32, start_time: u64) -> Result<Self> {
        let path = store.path().join("branches");
        let failed = |e: std::io::Error| Failure::failed(format!("{}: {e}", path.display()));
        DirBuilder::new().mode(0o700).recursive(true).create(&path).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        flock(&folder, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
        Ok(Place { folder, name: format!("{pid}-{start_time}") })
    }

    /// The socket by a name that is short enough for a socket.
    fn socket(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{}", self.folder.as_raw_fd(), self.name))
    }
}

/// When a process started, in ticks since the system did.
fn start_time(pid: u32) -> Result<u64> {
    let gone = || Failure::usage(format!("there is no process {pid}"));
    jobs::stat_of(pid).map(|stat| stat.start_time).ok_or_else(gone)
}
