//! The line to the process that keeps our snapshots.

use serde_json::Value;
use std::ffi::CString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use stillpoint_linux::aside;

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
    Taken { snapshot: u64, value: i32 },
    Done,
}

/// A connection that belongs to a process: a child has one of its own.
struct Line {
    process: u32,
    stream: BufReader<UnixStream>,
}

/// Held by whoever waits for an answer, at a snapshot, too: so it is held by the same one when the program comes back there.
static LINE: Mutex<Option<Line>> = Mutex::new(None);

pub(crate) fn ask(question: &Value) -> Result<Answer, Error> {
    let mut held = LINE.lock().unwrap_or_else(PoisonError::into_inner);
    if held.as_ref().is_none_or(|line| line.process != std::process::id()) {
        *held = Some(open()?);
    }
    let Some(line) = held.as_mut() else { return Err(Error::strange()) };
    let said = line.stream.get_ref().write_all(format!("{question}\n").as_bytes());
    let mut text = String::new();
    let heard = said.and_then(|()| line.stream.read_line(&mut text));
    if !matches!(heard, Ok(n) if n > 0) {
        // Whoever it was is gone, and with them the snapshots; the next call starts another one.
        *held = None;
        return Err(Error { code: -libc::ENOSYS, what: "the process that keeps the snapshots could not be started, or has ended: \
             is there a `stillpoint` in PATH or STILLPOINT_BIN, and may it look into this process (stillpoint doctor)?".into() });
    }
    let answer: Value = serde_json::from_str(&text).map_err(|_| Error::strange())?;
    if let Some(failed) = answer.get("failed") {
        let what = failed["what"].as_str().unwrap_or("it failed").to_owned();
        let code = match failed["code"].as_u64() {
            // Of a snapshot that is to be taken it means that somebody else is at the program.
            Some(2) if question.get("snapshot").is_none() => -libc::ENOENT,
            Some(3) => -libc::EPERM,
            _ => -libc::EIO,
        };
        return Err(Error { code, what });
    }
    match answer.get("taken") {
        Some(taken) => {
            let number = |name: &str| taken[name].as_i64().ok_or_else(Error::strange);
            Ok(Answer::Taken { snapshot: number("snapshot")? as u64, value: number("value")? as i32 })
        }
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
    let (program, process) = (text(program.as_os_str().as_bytes())?, std::process::id());
    let pid = text(process.to_string().as_bytes())?;
    let keeper = aside::start(&program, &[c"brancher", &pid, c"--own"], &theirs);
    aside::let_look(keeper.map_err(|e| failed("start stillpoint", &e))?);
    Ok(Line { process, stream: BufReader::new(ours) })
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
