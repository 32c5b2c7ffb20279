//! The line to the process that keeps our snapshots.

use serde_json::Value;
use std::ffi::CString;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use stillpoint_linux::proc::stat;
use stillpoint_linux::{aside, sockets};

/// Why something was not done: a code for programs, and words for people.
#[derive(Clone, Debug)]
pub struct Error {
    /// `-errno`.
    pub code: i32,
    /// What was not possible, and why.
    pub what: String,
}

impl Error {
    pub(crate) fn strange() -> Self {
        Error {
            code: -libc::ENOSYS,
            what: "stillpoint gives a strange answer: it is of another version".into(),
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {}

pub(crate) enum Answer {
    Taken {
        snapshot: u64,
        value: i32,
        /// After a rollback: what is told of files that were not as they were.
        files: Vec<String>,
    },
    Forked {
        pid: i32,
    },
    /// This is not the process that asked, but one that was made of it meanwhile: by a restore, or as a twin.
    Reborn,
    Done,
}

/// A connection that belongs to a process: a child has one of its own, and so has one that was restored.
struct Line {
    owner: Owner,
    stream: BufReader<UnixStream>,
}

/// A process: its id, which a restore gives back, and when it began, which nothing does.
#[derive(PartialEq, Eq)]
struct Owner {
    process: u32,
    began: Option<u64>,
}

impl Owner {
    fn current() -> Self {
        let path = Path::new("/proc/self/stat");
        let stat = std::fs::read(path).ok().and_then(|text| stat::parse(&text, path).ok());
        Owner { process: std::process::id(), began: stat.map(|stat| stat.start_time) }
    }
}

impl Line {
    /// What is answered; nothing if nobody is there any more.
    fn ask(&mut self, question: &Value) -> Option<String> {
        let (said, mut heard) = (format!("{question}\n"), String::new());
        let sent = sockets::send(self.stream.get_ref(), said.as_bytes()).ok()?;
        let read = self.stream.read_line(&mut heard).ok()?;
        (sent == said.len() && read > 0).then_some(heard)
    }
}

/// Held by whoever waits for an answer, at a snapshot, too: so it is held by the same one when the program comes back there.
static LINE: Mutex<Option<Line>> = Mutex::new(None);

pub(crate) fn ask(question: &Value) -> Result<Answer, Error> {
    let mut held = LINE.lock().unwrap_or_else(PoisonError::into_inner);
    let text = loop {
        if held.as_ref().is_none_or(|line| line.owner != Owner::current()) {
            *held = Some(open()?);
        }
        let Some(line) = held.as_mut() else { return Err(Error::strange()) };
        if let Some(text) = line.ask(question) {
            break text;
        }
        // Whoever it was is gone, and with them the snapshots; the next call starts another one.
        let is_reborn = line.owner != Owner::current();
        *held = None;
        if is_reborn && (question.get("checkpoint").is_some() || question.get("fork").is_some()) {
            return Ok(Answer::Reborn);
        }
        if !is_reborn {
            return Err(Error { code: -libc::ENOSYS, what: "the process that keeps the snapshots could not be started, or has ended: \
                 is there a `stillpoint` in PATH or STILLPOINT_BIN, and may it look into this process (stillpoint doctor)?".into() });
        }
    };
    let answer: Value = serde_json::from_str(&text).map_err(|_| Error::strange())?;
    if let Some(failed) = answer.get("failed") {
        let what = failed["what"].as_str().unwrap_or("it failed").to_owned();
        let code = match failed["code"].as_u64() {
            Some(2) if question.get("checkpoint").is_some() => -libc::EINVAL,
            // Of a snapshot that is to be taken it means that somebody else is at the program.
            Some(2) if question.get("rollback").is_some() || question.get("forget").is_some() => {
                -libc::ENOENT
            }
            Some(3) => -libc::EPERM,
            _ => -libc::EIO,
        };
        return Err(Error { code, what });
    }
    let number = |of: &Value, name: &str| of[name].as_i64().ok_or_else(Error::strange);
    if let Some(taken) = answer.get("taken") {
        let (snapshot, value) = (number(taken, "snapshot")? as u64, number(taken, "value")? as i32);
        let files = taken["files"].as_array().into_iter().flatten();
        let files = files.filter_map(|file| Some(file["what"].as_str()?.replace('\n', " "))).collect();
        return Ok(Answer::Taken { snapshot, value, files });
    }
    match answer.get("forked") {
        Some(forked) => Ok(Answer::Forked { pid: number(forked, "pid")? as i32 }),
        None => Ok(Answer::Done),
    }
}

/// Starts whoever keeps snapshots of this process.
fn open() -> Result<Line, Error> {
    let failed =
        |what: &str, e: &dyn std::fmt::Display| Error { code: -libc::EIO, what: format!("{what}: {e}") };
    let (ours, theirs) = UnixStream::pair().map_err(|e| failed("socketpair", &e))?;
    let program = find().ok_or_else(|| Error {
        code: -libc::ENOSYS,
        what: "there is no `stillpoint` in PATH, and STILLPOINT_BIN names none".into(),
    })?;
    let text = |bytes: &[u8]| CString::new(bytes).map_err(|e| failed("stillpoint", &e));
    let (program, owner) = (text(program.as_os_str().as_bytes())?, Owner::current());
    let pid = text(owner.process.to_string().as_bytes())?;
    let keeper = aside::start(&program, &[c"brancher", &pid, c"--own"], &theirs);
    aside::let_look(keeper.map_err(|e| failed("start stillpoint", &e))?);
    Ok(Line { owner, stream: BufReader::new(ours) })
}

/// The command.
fn find() -> Option<PathBuf> {
    if aside::is_privileged() {
        // The environment is that of somebody with fewer rights.
        let known = ["/usr/local/bin/stillpoint", "/usr/bin/stillpoint"].map(PathBuf::from);
        return known.into_iter().find(|path| is_executable(path));
    }
    if let Some(named) = std::env::var_os("STILLPOINT_BIN") {
        return Some(PathBuf::from(named)).filter(|path| is_executable(path));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&path).map(|folder| folder.join("stillpoint")).find(|path| is_executable(path))
}

fn is_executable(path: &std::path::Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}
