//! Which job is meant, and which process is it now?

use crate::args::{Periodic, Pipes, Streams};
use crate::failure::{Failure, Result};
use crate::names::job_from;
use crate::output;
use crate::units;
use clap::ValueEnum;
use rustix::process::{Pid, test_kill_process};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_capture::Engine;
use stillpoint_image::{Bytes, FileKind, Image};
use stillpoint_linux::host::boot_id;
use stillpoint_linux::proc::{Proc, Stat};
use stillpoint_linux::supervise::inherited_streams;
use stillpoint_restore::files::untold;
use stillpoint_restore::{Connection, Stdio, To};
use stillpoint_store::{Checkpoint, Claim, Every, Paging, Running, Store, Terms};

/// Opens the store that the user means.
pub fn open_store(chosen: Option<&Path>) -> Result<Store> {
    let path = store_path(chosen)?;
    Store::open(&path).map_err(store_failure)
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

/// The jobs of a store that this user may look at, and those of others, which do not keep him from his own.
pub fn within_reach(store: &Store) -> Result<(Vec<String>, Vec<String>)> {
    let jobs = store.jobs().map_err(store_failure)?;
    Ok(jobs.into_iter().partition(|job| !store.is_closed(job)))
}

/// A failure of the store, with what to do about it.
pub fn store_failure(error: stillpoint_store::Error) -> Failure {
    use stillpoint_store::Error;
    let failure = if error.is_usage() { Failure::usage(&error) } else { Failure::failed(&error) };
    match error {
        Error::NoJob { .. } => failure.hint("stillpoint ls lists the jobs; --store DIR names another store"),
        Error::NoCheckpoint { job, .. } => failure.hint(format!("stillpoint ls {job} lists its checkpoints")),
        Error::NoneYet { job } => {
            failure.hint(format!("stillpoint checkpoint {job} takes one while the job runs"))
        }
        Error::Manifest { .. }
        | Error::Misplaced { .. }
        | Error::SegmentMissing { .. }
        | Error::Segment { .. }
        | Error::Damaged { .. } => failure.hint("stillpoint verify tells which checkpoints are whole"),
        _ => failure,
    }
}

/// The record of a job that runs as process `pid`, supervised by this process.
pub fn running_record(
    pid: u32,
    command: Vec<Bytes>,
    restored_from: Option<u64>,
    periodic: &Periodic,
) -> Result<Running> {
    let start_of = |pid| -> Result<u64> {
        let stat = stat_of(pid).ok_or_else(|| Failure::failed(format!("process {pid} ended")))?;
        Ok(stat.start_time)
    };
    let supervisor_pid = std::process::id();
    let inherited = inherited_streams()?.into_iter().map(|(fd, name)| (fd, name.into())).collect();
    Ok(Running {
        inherited,
        pid,
        start_time: start_of(pid)?,
        boot_id: boot_id(),
        supervisor_pid,
        supervisor_start_time: start_of(supervisor_pid)?,
        since_ns: crate::output::now_ns(),
        restored_from,
        command,
        adopted: false,
        every_ns: periodic.every.and_then(Every::time).map(|every| every.as_nanos() as u64),
        keep: periodic.every.and(periodic.keep),
        crashes: 0,
        crash: None,
    })
}

/// The streams that a program begins with again whose descriptors are connected so: it has ours under its own numbers.
pub fn connected(
    mut inherited: Vec<(u32, Vec<u8>)>,
    connections: &[Connection],
    image: &Image,
    stdio: Stdio,
) -> Vec<(u32, Vec<u8>)> {
    let given = |to: &To| match to {
        To::Descriptor(own) => Some(*own),
        To::File(_) => None,
    };
    let is_connected = |number: u32| connections.iter().any(|connection| connection.number == number);
    let has_stream = |number: u32| {
        image.files.iter().any(|file| file.kind == FileKind::Stdio(number)) && !is_connected(number)
    };
    let theirs: Vec<(u32, Vec<u8>)> = connections
        .iter()
        .filter_map(|connection| {
            let own = given(&connection.to)?;
            let (_, link) = inherited.iter().find(|(number, _)| *number == own)?;
            Some((connection.number, link.clone()))
        })
        .collect();
    let is_given = |number: u32| connections.iter().any(|connection| given(&connection.to) == Some(number));
    // In the background none of ours is the program's by itself.
    let is_its_own = |number: u32| stdio == Stdio::Current && (!is_given(number) || has_stream(number));
    inherited.retain(|(number, _)| !is_connected(*number) && is_its_own(*number));
    inherited.extend(theirs);
    inherited
}

/// A record with what is brought to a restored program: that comes from outside, too.
pub fn with_pumped(mut running: Running, pumped: &[(u32, Vec<u8>)]) -> Running {
    running.inherited.extend(pumped.iter().map(|(number, link)| (*number, link.clone().into())));
    running
}

/// The terms on which a job runs that begins now: what was asked for, and which of its checkpoints are of this run.
pub fn terms(store: &Store, job: &str, periodic: &Periodic) -> Terms {
    let newest = store.checkpoints(job).ok().and_then(|ids| ids.last().copied());
    Terms {
        since_ns: crate::output::now_ns(),
        newer_than: newest.unwrap_or_default(),
        every: periodic.every,
        keep: periodic.keep,
        engine: periodic.engine.map(|engine| engine.name().to_string()),
        buffer: periodic.buffer,
        mtbf_ns: periodic.mtbf.map(|mtbf| mtbf.as_nanos() as u64),
        ..Terms::default()
    }
}

/// New terms of a job that goes on: its checkpoints stay those of one run, with what is known of them.
pub fn carried(before: Terms, terms: Terms) -> Terms {
    let Terms { from, newer_than, tried, past_ns, .. } = before;
    Terms { from, newer_than, tried, past_ns, ..terms }
}

/// Checkpoints of a job, for people.
pub fn named(job: &str, ids: &[u64]) -> String {
    let names: Vec<String> = ids.iter().map(|id| format!("{job}@{id}")).collect();
    names.join(", ")
}

/// The checkpoints as time passes that were asked for.
pub fn periodic(terms: &Terms) -> Periodic {
    Periodic {
        every: terms.every,
        mtbf: terms.mtbf_ns.map(Duration::from_nanos),
        keep: terms.keep,
        engine: terms.engine.as_deref().and_then(Engine::named),
        buffer: terms.buffer,
    }
}

/// What a job of the store is doing.
#[derive(Clone, Debug)]
pub enum State {
    /// It runs.
    Runs(Running),
    /// It has crashed, and its supervisor is about to bring it back.
    Restarts(Running),
    /// It was cut off while it ran, and can be continued from this checkpoint of this job.
    Resumable(Terms, (String, u64)),
    /// It has just ended, and its supervisor has not yet.
    Ends,
    /// It has ended, or was cut off and nothing is left of it to go on from.
    Ended,
}

/// What a job is doing. A damaged record says nothing.
pub fn state(store: &Store, job: &str) -> Result<State> {
    use stillpoint_store::Error;
    let record = match store.running(job) {
        Err(Error::Record { .. } | Error::NoJob { .. }) => None,
        other => other.map_err(store_failure)?,
    };
    let terms = match store.terms(job) {
        Err(Error::Record { .. } | Error::NoJob { .. }) => None,
        other => other.map_err(store_failure)?,
    };
    match (record, terms) {
        (Some(record), _) if is_alive(&record) => Ok(State::Runs(record)),
        (Some(record), Some(terms)) if is_supervised(&record) => match terms.restart {
            Some(_) => Ok(State::Restarts(record)),
            None => Ok(State::Ends),
        },
        (_, Some(terms)) => {
            let best = terms.checkpoints(store, job).map_err(store_failure)?.into_iter().next();
            Ok(best.map_or(State::Ended, |best| State::Resumable(terms, best)))
        }
        _ => Ok(State::Ended),
    }
}

/// The same once it is not just about to change.
pub fn settled_state(store: &Store, job: &str) -> Result<State> {
    let begin = Instant::now();
    loop {
        match state(store, job)? {
            State::Ends if begin.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(2)),
            settled => return Ok(settled),
        }
    }
}

/// Loads the last whole checkpoint that a job may go on from while nobody is there to be asked. Others are named in `notes`.
pub fn last_whole(
    store: &Store,
    job: &str,
    terms: &Terms,
    notes: &mut Vec<String>,
) -> Result<Option<Checkpoint>> {
    let (mut last, mut unanswered) = (None, None);
    for (of, id) in terms.checkpoints(store, job).map_err(store_failure)? {
        match store.load(&of, Some(id)) {
            Ok(checkpoint) => match untold(&checkpoint.image, &streams(terms).policy()) {
                None => return Ok(Some(checkpoint)),
                Some(what) => {
                    let why = format!(
                        "{of}@{id} is passed over: {what} led outside, and where it leads now is to be said"
                    );
                    notes.push(why.clone());
                    let hint = format!("stillpoint restore {of}@{id} with --fd or --pipes brings it back");
                    unanswered.get_or_insert_with(|| Failure::refused(why).hint(hint));
                }
            },
            // It was removed just now, to make room.
            Err(stillpoint_store::Error::NoCheckpoint { .. }) => {}
            Err(e) => {
                notes.push(format!("{of}@{id} cannot be used: {e}"));
                last = Some(e);
            }
        }
    }
    match unanswered {
        Some(failure) => Err(failure),
        None => last.map_or(Ok(None), |e| Err(store_failure(e))),
    }
}

/// Where what led outside of a job leads when it is brought back on these terms.
pub fn streams(terms: &Terms) -> Streams {
    let pipes = terms.pipes.as_deref().and_then(|pipes| Pipes::from_str(pipes, false).ok());
    let connections = terms.connections.iter().filter_map(|text| units::connection(text).ok()).collect();
    Streams { pipes: pipes.unwrap_or_default(), connections }
}

/// Whether the process of a record is still there (and not another one that got its pid).
pub fn is_alive(record: &Running) -> bool {
    record.boot_id == boot_id() && is_process(record.pid, record.start_time)
}

/// Whether the supervisor of a record is still there.
pub fn is_supervised(record: &Running) -> bool {
    record.boot_id == boot_id() && is_process(record.supervisor_pid, record.supervisor_start_time)
}

fn is_process(pid: u32, start_time: u64) -> bool {
    // A main thread may end before the others; one of them may become it (`execve(2)`).
    stat_of(pid).is_some_and(|s| s.start_time == start_time && (s.state != b'Z' || s.num_threads > 1))
}

/// The process of a job, if it runs. A damaged record is that of no process.
pub fn running(store: &Store, job: &str) -> Result<Option<Running>> {
    use stillpoint_store::Error;
    match store.running(job) {
        Ok(record) => Ok(record.filter(is_alive)),
        Err(Error::Record { .. } | Error::NoJob { .. }) => Ok(None),
        Err(e) => Err(store_failure(e)),
    }
}

/// How the paging of a job that runs fares, if its memory is kept within a limit. A damaged record says nothing.
pub fn paging(store: &Store, job: &str, running: Option<&Running>) -> Option<Paging> {
    running.and_then(|_| store.paging(job).ok().flatten())
}

pub fn stat_of(pid: u32) -> Option<Stat> {
    Proc::process(pid).and_then(|p| p.stat()).ok()
}

/// What a TARGET turned out to be.
#[derive(Debug)]
pub struct Target {
    /// The process.
    pub pid: u32,
    /// The job that its checkpoints belong to, unless the user says otherwise.
    pub job: String,
    /// That job's record, if the process is that of a job.
    pub running: Option<Running>,
    /// A remark for the user.
    pub note: Option<String>,
}

impl Target {
    /// Streams besides the standard ones that it was started with, as far as that is known.
    pub fn inherited(&self) -> Vec<(u32, Vec<u8>)> {
        self.running.as_ref().map(inherited).unwrap_or_default()
    }

    fn of_job(job: String, running: Running) -> Self {
        Self { pid: running.pid, job, running: Some(running), note: None }
    }
}

/// Finds the process that TARGET means: a number is a process id, anything else the name of a running job.
pub fn target(store: &Store, text: &str) -> Result<Target> {
    if text.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty() {
        return process(store, text);
    }
    let job = crate::names::parse_job(text).map_err(|e| Failure::usage(format!("TARGET {text:?}: {e}")))?;
    match running(store, &job)? {
        Some(record) => Ok(Target::of_job(job, record)),
        None if store.checkpoints(&job).is_ok_and(|ids| !ids.is_empty()) => {
            Err(Failure::usage(format!("job {job} does not run"))
                .hint(format!("stillpoint restore {job} brings it back from its newest checkpoint")))
        }
        None => Err(Failure::usage(format!("no job {job} runs (store {})", store.path().display()))
            .hint("stillpoint ls lists the jobs; a program that is no job is named by its process id")),
    }
}

/// Streams besides the standard ones that a job was started with.
pub fn inherited(record: &Running) -> Vec<(u32, Vec<u8>)> {
    record.inherited.iter().map(|(fd, name)| (*fd, name.0.clone())).collect()
}

fn process(store: &Store, text: &str) -> Result<Target> {
    let no_such = || {
        Failure::usage(format!("there is no process {text}"))
            .hint("ps -e lists processes, stillpoint ls jobs")
    };
    let pid = text.parse().ok().filter(|&p: &i32| p > 0).ok_or_else(no_such)?;
    // Permission is not the question here: a process of another user exists too.
    let exists = Pid::from_raw(pid).map(test_kill_process);
    if !matches!(exists, Some(Ok(()) | Err(rustix::io::Errno::PERM))) {
        return Err(no_such());
    }
    let pid = pid as u32;
    let stat = stat_of(pid).ok_or_else(no_such)?;
    let mut supervised = Vec::new();
    for job in within_reach(store)?.0 {
        let Some(record) = running(store, &job)? else { continue };
        if record.pid == pid {
            return Ok(Target::of_job(job, record));
        }
        if record.supervisor_pid == pid && record.supervisor_start_time == stat.start_time {
            supervised.push((job, record));
        }
    }
    if supervised.len() > 1 {
        let jobs: Vec<String> = supervised.into_iter().map(|(job, _)| job).collect();
        return Err(Failure::usage(format!("process {pid} is the supervisor of several jobs"))
            .hint(format!("name one of them: {}", jobs.join(", "))));
    }
    // What a shell knows of a job (`$!`) is its supervisor.
    if let Some((job, record)) = supervised.pop() {
        let note = format!("process {pid} is the supervisor of job {job}, which is process {}", record.pid);
        return Ok(Target { note: Some(note), ..Target::of_job(job, record) });
    }
    Ok(Target {
        pid,
        job: job_from(&format!("{}-{pid}", String::from_utf8_lossy(&stat.comm))),
        running: None,
        note: None,
    })
}

/// How long a supervisor may take to let go of the name of a job whose process has ended, on a machine that is busy, and after what time the
/// user is told.
const PATIENCE: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(2);

/// Takes the name of a job that is not running.
pub fn claim(store: &Store, job: &str) -> Result<Claim> {
    let begin = Instant::now();
    let mut is_told = false;
    loop {
        if let Some(record) = running(store, job)? {
            return Err(Failure::usage(format!("job {job} is running, as process {}", record.pid)));
        }
        match store.claim(job) {
            Ok(claim) => return Ok(claim),
            // Its process has ended, and its supervisor is about to; or another job of this name is just starting.
            Err(stillpoint_store::Error::NameTaken { .. }) if begin.elapsed() < PATIENCE => {
                if !is_told && begin.elapsed() > SILENCE {
                    output::note(&format!("waiting for whoever supervised job {job} to be done with it"));
                    is_told = true;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(store_failure(e)),
        }
    }
}

/// Takes a name that no job has: `base`, else `base-2`, `base-3`, …
pub fn claim_new(store: &Store, base: &str) -> Result<Claim> {
    // A job that left nothing but records of what is gone (the machine crashed) has no use for its name. One that can be resumed has.
    let is_left = || {
        let is_noted = matches!(store.running(base), Ok(Some(_))) || matches!(store.terms(base), Ok(Some(_)));
        let has_none = store.checkpoints(base).is_ok_and(|ids| ids.is_empty());
        is_noted && has_none && matches!(state(store, base), Ok(State::Ended))
    };
    if is_left()
        && let Ok(_claim) = store.claim(base)
        && is_left()
    {
        store.clear_running(base).and_then(|()| store.clear_terms(base)).map_err(store_failure)?;
    }
    store.claim_new(base).map_err(store_failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_an_older_one_is_not() {
        let record =
            running_record(std::process::id(), Vec::new(), None, &Periodic::default()).expect("we run");
        assert!(is_alive(&record));
        assert!(!is_alive(&Running { start_time: record.start_time + 1, ..record.clone() }));
        assert!(!is_alive(&Running { boot_id: "other".into(), ..record }));
    }
}
