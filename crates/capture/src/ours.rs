//! Processes of ours among those of a tree, and those that are at work on one.
//!
//! Below a shell that runs `stillpoint run` there is not only the job but also who supervises it, who takes its checkpoints, and who brings
//! it its memory. What these hold cannot be had again: page faults of others that only they can serve, namespaces for processes to come, a
//! socket in the job's folder. The program knows nothing of that, so its user is told whose it is.

use crate::attributes::target::named;
use crate::inspect::handles_page_faults;
use crate::target::Target;
use crate::{Error, Refusal, Result};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{metadata, read_link};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use stillpoint_linux::host::boot_id;
use stillpoint_linux::pager::holds;
use stillpoint_linux::proc::{NamespaceKind, Proc, processes};
use stillpoint_store::Store;

/// Command lines are shown up to this length, characters.
const SHOWN: usize = 100;

/// Refuses a tree with processes of ours that cannot be captured, by the names of the jobs that they are at work on.
///
/// # Errors
/// [`Error::Refused`].
pub(crate) fn refuse(targets: &[Arc<Target>], store: &Store) -> Result<()> {
    let ours: Vec<&Arc<Target>> = targets.iter().filter(|target| is_ours(target.pid)).collect();
    if ours.is_empty() {
        return Ok(());
    }
    let supervisors = supervisors(store);
    let is_at_work =
        |target: &&&Arc<Target>| supervisors.contains_key(&target.pid) || cannot_be_captured(&target.process);
    let at_work = ours.iter().filter(is_at_work).map(|target| target.pid);
    let refusals: Vec<Refusal> = at_work.map(|pid| refusal(pid, job_of(pid, &supervisors))).collect();
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// Whether an error means that somebody else follows what a process writes.
pub(crate) fn is_followed(error: &Error) -> bool {
    matches!(error, Error::Kernel(e) if e.errno() == Some(libc::EBUSY))
}

/// Says who that is. It takes a look at all processes, so the program should run meanwhile.
pub(crate) fn name_follower(error: Error, pid: u32) -> Error {
    match is_followed(&error) {
        true => Error::Followed(follower(pid)),
        false => error,
    }
}

/// Who follows what a process writes, as far as it is one of us.
fn follower(pid: u32) -> String {
    let us = std::process::id();
    let follows =
        |other: &u32| *other != us && is_ours(*other) && holds(*other, pid) && handles_page_faults(*other);
    let found = processes().unwrap_or_default().into_iter().find(follows);
    found.map_or_else(|| "somebody else".into(), |other| format!("{} ({})", named(other), command(other)))
}

fn refusal(pid: u32, job: Option<&String>) -> Refusal {
    let (why, hint) = match job {
        Some(job) => (
            format!("it is stillpoint itself, at work on job {job}"),
            format!("checkpoint that job by its name: stillpoint checkpoint {job}"),
        ),
        None => (
            format!("it is stillpoint itself, as \"{}\"", command(pid)),
            "checkpoint the job that it is at work on, by its name and in its store (--store DIR)".into(),
        ),
    };
    Refusal { what: named(pid), why, hint }
}

/// Its command line, for people.
fn command(pid: u32) -> String {
    let words = Proc::process(pid).and_then(|process| process.cmdline()).unwrap_or_default();
    let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word)).collect();
    words.join(" ").escape_debug().take(SHOWN).collect()
}

/// Whether a process runs the program that we are, or one of its name.
fn is_ours(pid: u32) -> bool {
    let [theirs, own] = [format!("/proc/{pid}/exe"), "/proc/self/exe".into()];
    let file = |path: &str| metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let name = |path: &str| read_link(path).ok().and_then(|to| to.file_name().map(OsStr::to_owned));
    file(&theirs).is_some_and(|file_of_it| file(&own) == Some(file_of_it))
        || name(&theirs).is_some_and(|name_of_it| name(&own) == Some(name_of_it))
}

/// Whether it has what a restore could not make.
fn cannot_be_captured(process: &Proc) -> bool {
    let clocks = process.namespaces_of(&[NamespaceKind::Time, NamespaceKind::TimeForChildren]);
    clocks.is_ok_and(|clocks| clocks.windows(2).any(|two| two[0].id != two[1].id))
        || handles_page_faults(process.pid())
}

/// The supervisors of the jobs that run: their ids, and the jobs' names.
fn supervisors(store: &Store) -> HashMap<u32, String> {
    let boot = boot_id();
    let supervisor = |job: String| {
        let running = store.running(&job).ok().flatten().filter(|running| running.boot_id == boot)?;
        let stat = Proc::process(running.supervisor_pid).and_then(|process| process.stat()).ok()?;
        (stat.start_time == running.supervisor_start_time).then_some((running.supervisor_pid, job))
    };
    store.jobs().unwrap_or_default().into_iter().filter_map(supervisor).collect()
}

/// The job whose supervisor a process of ours is, or has been made by.
fn job_of(pid: u32, supervisors: &HashMap<u32, String>) -> Option<&String> {
    let mut at = pid;
    while at > 1 && is_ours(at) {
        if let Some(job) = supervisors.get(&at) {
            return Some(job);
        }
        at = Proc::process(at).and_then(|process| process.stat()).ok()?.ppid;
    }
    None
}
