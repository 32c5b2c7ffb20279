//! The line from whoever asks for a checkpoint of a job to the process that takes them: a socket in the job's folder,
//! over which lines of JSON go.
//!
//! ```text
//! server  {"hello":{"version":1}}
//! client  {"version":1,"checkpoint":{…}}                    or  {"version":1,"give_way":{}}
//! server  {"progress":{"total":1073741824,"done":4096}}     again and again, also while others have their turn
//! server  {"taken":{…}}  or  {"failed":{…}}                or  {"gives_way":{}}
//! ```
//!
//! Who keeps snapshots of a job asks that its checkpoints give way: only one can follow what a program writes. From then on each of them
//! saves all.

pub mod client;
pub mod server;

use crate::failure::{Failure, Result};
use crate::jobs;
use crate::taken::{Asked, Taken};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use stillpoint_store::Store;

/// Version of the language.
const VERSION: u32 = 1;
/// Longest line, bytes. A label may be as long as an argument can be, and grow as JSON.
const LONGEST: u64 = 1 << 20;

/// What the client says.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    version: u32,
    #[serde(flatten)]
    wish: Wish,
}

/// What it wants.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Wish {
    /// A checkpoint.
    Checkpoint(Asked),
    /// That nobody follows what the job writes until the next checkpoint.
    GiveWay {},
}

/// What the server says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    /// At once: somebody is there.
    Hello { version: u32 },
    /// How far it is, bytes. While others have their turn, nothing is to be done yet.
    Progress { total: u64, done: u64 },
    /// The checkpoint is in the store.
    Taken(Taken),
    /// Nobody follows what it writes.
    GivesWay {},
    /// There is no checkpoint.
    Failed(Failure),
}

/// The socket of a job by a name that is short enough for a socket (unix(7) allows 107 bytes), for as long as the
/// descriptor lives.
fn place(store: &Store, job: &str) -> Result<(OwnedFd, PathBuf)> {
    let path = store.control(job).map_err(jobs::store_failure)?;
    let (folder, name) = (path.parent().unwrap_or(&path), path.file_name().unwrap_or_default());
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Failure::failed(format!("{}: {}", folder.display(), std::io::Error::from(e))))?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    Ok((folder, short))
}

/// Makes the socket of a job whose name we hold; one that a supervisor left behind when it was killed makes way.
pub fn listen(store: &Store, job: &str) -> Result<UnixListener> {
    let failed = |e: std::io::Error| Failure::failed(format!("control socket of job {job}: {e}"));
    let (_folder, path) = place(store, job)?;
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).map_err(failed)?;
    // Its folder is for its owner only as well.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Removes the socket of a job.
pub fn remove(store: &Store, job: &str) {
    // One that stays is no harm: nobody answers there.
    if let Ok(path) = store.control(job) {
        let _ = std::fs::remove_file(path);
    }
}

/// One end of the line.
pub struct Line {
    reader: BufReader<UnixStream>,
}

impl Line {
    /// Of a connected socket.
    pub fn new(stream: UnixStream) -> Self {
        Self { reader: BufReader::new(stream) }
    }

    /// Its socket.
    pub fn stream(&self) -> &UnixStream {
        self.reader.get_ref()
    }

    /// Says a word.
    pub fn say(&self, word: &impl Serialize) -> std::io::Result<()> {
        let mut text = serde_json::to_vec(word)?;
        text.push(b'\n');
        self.stream().write_all(&text)
    }

    /// Says a word as far as that is possible without waiting; returns what is still to be said.
    pub fn say_at_once(&self, word: &impl Serialize) -> std::io::Result<Vec<u8>> {
        let mut text = serde_json::to_vec(word)?;
        text.push(b'\n');
        match rustix::net::send(self.stream(), &text, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(said) => Ok(text.split_off(said)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(text),
            Err(e) => Err(e.into()),
        }
    }

    /// Says the rest of a word.
    pub fn go_on(&self, rest: &[u8]) -> std::io::Result<()> {
        self.stream().write_all(rest)
    }

    /// The next word; `Ok(None)` when the other side has hung up.
    pub fn hear<T: for<'a> Deserialize<'a>>(&mut self) -> std::io::Result<Option<T>> {
        let mut text = Vec::new();
        self.reader.by_ref().take(LONGEST).read_until(b'\n', &mut text)?;
        if text.pop() != Some(b'\n') {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&text)?))
    }
}
