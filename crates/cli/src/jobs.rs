//! Which job is meant, and which process is it now?

use crate::failure::{Failure, Result};
use crate::names::{job_from, numbered};
use rustix::process::{Pid, test_kill_process};
use std::path::{Path, PathBuf};
use stillpoint_store::{Running, Store};

/// Opens the store that the user means.
pub fn open_store(chosen: Option<&Path>) -> Result<Store> {
    let path = store_path(chosen)?;
    Store::open(&path).map_err(|e| store_failure(e, &path))
}

/// Where the store is: the option, else the environment, else the user's data directory.
pub fn store_path(chosen: Option<&Path>) -> Result<PathBuf> {
    let from = |variable: &str| std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
    let path = match chosen {
        Some(path) if path.as_os_str().is_empty() => return Err(Failure::usage("--store is empty")),
        Some(path) => path.to_path_buf(),
        None => from("STILLPOINT_STORE")
            .or_else(|| from("XDG_DATA_HOME").map(|d| d.join("stillpoint")))
            .or_else(|| from("HOME").map(|d| d.join(".local/share/stillpoint")))
            .ok_or_else(|| {
                Failure::usage("no store is given and $HOME is not set").hint("name a directory with --store")
            })?,
    };
    // A supervisor may change its directory, and a job may be found from another one.
    std::path::absolute(&path).map_err(|e| Failure::usage(format!("{}: {e}", path.display())))
}

/// A failure of the store, with what to do about it.
pub fn store_failure(error: stillpoint_store::Error, path: &Path) -> Failure {
    let failure = Failure::failed(format!("store {}: {error}", path.display()));
    failure.hint("another store can be named with --store DIR or $STILLPOINT_STORE")
}

/// Identifies a process beyond its pid: the record of a job that runs as this process.
pub fn running_record(pid: u32) -> Result<Running> {
    let start_time = Stat::of(pid).map(|s| s.start_time);
    let start_time = start_time.ok_or_else(|| Failure::failed(format!("process {pid} ended")))?;
    Ok(Running { pid, start_time, boot_id: boot_id() })
}

fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|s| s.trim().to_string()).unwrap_or_default()
}

/// Whether the process of a record is still there (and not another one that got its pid).
pub fn is_alive(record: &Running) -> bool {
    record.boot_id == boot_id()
        && Stat::of(record.pid).is_some_and(|s| s.start_time == record.start_time && s.state != 'Z')
}

/// The process of a job, if it runs.
pub fn running(store: &Store, job: &str) -> Result<Option<Running>> {
    let record = store.running(job).map_err(|e| store_failure(e, store.path()))?;
    Ok(record.filter(is_alive))
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug)]
struct Stat {
    name: String,
    state: char,
    parent: u32,
    start_time: u64,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        let bytes = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let (head, rest) = text.rsplit_once(") ")?; // the name may hold anything, parentheses included
        let fields: Vec<&str> = rest.split_whitespace().collect(); // from field 3 of proc_pid_stat(5)
        Some(Self {
            name: head.split_once(" (")?.1.to_string(),
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            start_time: fields.get(19)?.parse().ok()?,
        })
    }
}

/// What a TARGET turned out to be.
#[derive(Debug)]
pub struct Target {
    /// The process.
    pub pid: u32,
    /// The job that its checkpoints belong to, unless the user says otherwise.
    pub job: String,
    /// A remark for the user.
    pub note: Option<String>,
}

/// Finds the process that TARGET means: a number is a process id, anything else the name of a running job.
pub fn target(store: &Store, text: &str) -> Result<Target> {
    if text.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty() {
        return process(store, text);
    }
    let job = crate::names::parse_job(text).map_err(|e| Failure::usage(format!("TARGET {text:?}: {e}")))?;
    let record = store.running(&job).map_err(|e| store_failure(e, store.path()))?;
    match record {
        Some(record) if is_alive(&record) => Ok(Target { pid: record.pid, job, note: None }),
        Some(record) => Err(Failure::usage(format!("job {job} does not run: its process {} ended", record.pid))
            .hint(format!("stillpoint restore {job} brings it back from its newest checkpoint"))),
        None => Err(Failure::usage(format!("no job {job} runs (store {})", store.path().display()))
            .hint("stillpoint ls lists the jobs; a program that runs without a job is named by its process id")),
    }
}

fn process(store: &Store, text: &str) -> Result<Target> {
    let no_such = || {
        Failure::usage(format!("there is no process {text}")).hint("ps -e lists processes, stillpoint ls jobs")
    };
    let pid = text.parse().ok().filter(|&p: &i32| p > 0).ok_or_else(no_such)?;
    // Permission is not the question here: a process of another user exists too.
    let exists = Pid::from_raw(pid).map(test_kill_process);
    if !matches!(exists, Some(Ok(()) | Err(rustix::io::Errno::PERM))) {
        return Err(no_such());
    }
    let pid = pid as u32;
    let stat = Stat::of(pid).ok_or_else(no_such)?;
    let jobs = store.jobs().map_err(|e| store_failure(e, store.path()))?;
    for job in jobs {
        let Some(record) = running(store, &job)? else { continue };
        if record.pid == pid {
            return Ok(Target { pid, job, note: None });
        }
        // What a shell knows of a job (`$!`) is its supervisor.
        if Stat::of(record.pid).is_some_and(|s| s.parent == pid) && is_supervisor(pid) {
            let note = format!("process {pid} is the supervisor of job {job}, which is process {}", record.pid);
            return Ok(Target { pid: record.pid, job, note: Some(note) });
        }
    }
    Ok(Target { pid, job: job_from(&format!("{}-{pid}", stat.name)), note: None })
}

/// Whether a process runs this very program.
fn is_supervisor(pid: u32) -> bool {
    let exe = |p: String| std::fs::metadata(format!("/proc/{p}/exe")).ok();
    use std::os::unix::fs::MetadataExt;
    let id = |m: std::fs::Metadata| (m.dev(), m.ino());
    pid != std::process::id() && exe(pid.to_string()).map(id) == exe("self".into()).map(id)
}

/// Names of jobs that are tried before giving up.
const NAMES: u32 = 10_000;

/// A name for a job that is about to run: `wanted`, or `wanted-2`, `wanted-3`, … while a job of that name runs. A name
/// whose job has ended is taken up again: its checkpoints go on being numbered.
pub fn free_name(store: &Store, wanted: &str) -> Result<String> {
    for n in 1..NAMES {
        let name = numbered(wanted, n);
        if running(store, &name)?.is_none() {
            return Ok(name);
        }
    }
    Err(Failure::failed(format!("{NAMES} jobs named {wanted} run")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_an_older_one_is_not() {
        let record = running_record(std::process::id()).expect("we run");
        assert!(is_alive(&record));
        assert!(!is_alive(&Running { start_time: record.start_time + 1, ..record.clone() }));
        assert!(!is_alive(&Running { boot_id: "other".into(), ..record }));
    }
}
