//! `stillpoint resume`: jobs that were running when the machine went down go on.

use crate::args::{Common, Files, Restore, Resume, Tcp};
use crate::commands::restore::{Revived, use_copies};
use crate::detach::{Answer, in_background};
use crate::failure::{FAILED, Failure, Result};
use crate::jobs::State;
use crate::lives::Lives;
use crate::{jobs, output};
use clap::ValueEnum;
use rustix::fd::BorrowedFd;
use serde_json::{Value, json};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio as Stream};
use stillpoint_restore::Stdio;
use stillpoint_store::history::What;
use stillpoint_store::{Store, Terms};

/// Runs the command.
pub fn run(common: &Common, args: &Resume) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    if args.jobs.is_empty() && !args.all {
        return Err(Failure::usage("resume: name jobs, or take all that were cut off with --all")
            .hint("stillpoint ls lists the jobs, and tells which are resumable"));
    }
    if let [job] = args.jobs.as_slice()
        && (args.one || !common.json)
    {
        return one(common, &store, job);
    }
    // Each by a command of its own: what becomes of one is nothing to the others.
    let jobs = if args.all { resumable(&store)? } else { args.jobs.clone() };
    let several: Vec<(String, Result<Child>)> =
        jobs.into_iter().map(|job| (job.clone(), start(&store, &job))).collect();
    let outcomes: Vec<(String, Outcome)> = several
        .into_iter()
        .map(|(job, child)| (job, child.map_or_else(Outcome::Failed, Outcome::of)))
        .collect();
    tell(common, &store, &outcomes, args.all)
}

/// The jobs that can be resumed.
fn resumable(store: &Store) -> Result<Vec<String>> {
    let mut list = Vec::new();
    for job in jobs::within_reach(store)?.0 {
        if let State::Resumable(..) = jobs::settled_state(store, &job)? {
            list.push(job);
        }
    }
    Ok(list)
}

/// Resumes one, in the background.
fn one(common: &Common, store: &Store, job: &str) -> Result<ExitCode> {
    let terms = check(store, job)?;
    let args = restore_of(job, &terms)?;
    in_background(
        common.json,
        |relay| {
            let lives = args.restart.map(|most| Lives::begin(most, Stdio::Null)).transpose()?;
            revive(store, job, &args, relay).map(|revived| (revived, lives))
        },
        |(revived, lives), tell| {
            let name = job.to_string();
            let tell = move |answer: Answer| tell(Answer { text: goes_on(&name, &answer.json), ..answer });
            revived.supervise(lives.map(|l| l.of_restored(&args)), None, false, tell)
        },
    )
}

/// One line for people on a job that runs again.
fn goes_on(job: &str, restored: &Value) -> String {
    let from = restored["from"].as_str().unwrap_or(job);
    format!("{job} goes on from {from}@{} as process {}", restored["id"], restored["pid"])
}

/// On which terms a job runs that can be resumed; why it cannot be, otherwise.
fn check(store: &Store, job: &str) -> Result<Terms> {
    match jobs::settled_state(store, job)? {
        State::Resumable(terms, _) => Ok(terms),
        State::Runs(running) => {
            let failure = Failure::usage(format!("job {job} runs already, as process {}", running.pid));
            Err(match jobs::is_supervised(&running) {
                true => failure,
                false => failure.hint(format!(
                    "its supervisor was killed; stillpoint adopt {} gives it another",
                    running.pid
                )),
            })
        }
        State::Restarts(_) => Err(Failure::usage(format!(
            "job {job} has crashed, and is about to be brought back by its supervisor"
        ))),
        State::Ends | State::Ended => {
            let ids = store.checkpoints(job).map_err(jobs::store_failure)?;
            let what = match store.terms(job) {
                Ok(Some(_)) => format!(
                    "job {job} was cut off before its first checkpoint: there is nothing to go on from"
                ),
                _ => format!("job {job} was not cut off: it has ended, or was ended or released"),
            };
            let failure = Failure::usage(what);
            Err(if ids.is_empty() {
                failure
            } else {
                failure.hint(format!("stillpoint restore {job} brings it back from its newest checkpoint"))
            })
        }
    }
}

/// A restore on the terms on which a job runs.
fn restore_of(job: &str, terms: &Terms) -> Result<Restore> {
    let plain = Restore::plain(job, &jobs::periodic(terms))?;
    let files = terms.files.as_deref().and_then(|files| Files::from_str(files, false).ok());
    let tcp = terms.tcp.as_deref().and_then(|tcp| Tcp::from_str(tcp, false).ok());
    Ok(Restore {
        detach: true,
        files: files.unwrap_or(plain.files),
        tcp: tcp.unwrap_or(plain.tcp),
        streams: jobs::streams(terms),
        restart: terms.restart,
        memory_limit: terms.memory_limit,
        ..plain
    })
}

fn revive(store: &Store, job: &str, args: &Restore, relay: BorrowedFd<'_>) -> Result<Revived> {
    let claim = jobs::claim(store, job)?;
    // From here on nobody else resumes it; perhaps somebody just has.
    let terms = check(store, job)?;
    let mut notes = Vec::new();
    let checkpoint = jobs::last_whole(store, job, &terms, &mut notes)?;
    let mut checkpoint =
        checkpoint.ok_or_else(|| Failure::failed(format!("the checkpoints of {job} have been removed")))?;
    notes.extend(use_copies(store, &mut checkpoint)?);
    let before = Some(terms);
    Revived::revive_as(
        store,
        claim,
        &checkpoint,
        args,
        Stdio::Null,
        Some(relay),
        false,
        notes,
        before,
        What::Resume,
    )
}

/// Starts the command that resumes one of several.
fn start(store: &Store, job: &str) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("stillpoint").args(["resume", "--one", "--json", job, "--store"]).arg(store.path());
    command.stdin(Stream::null()).stdout(Stream::piped()).stderr(Stream::piped());
    command.spawn().map_err(|e| Failure::failed(format!("cannot start a process: {e}")))
}

/// What became of one of several.
enum Outcome {
    /// It runs again; what its restore told.
    GoesOn(Value),
    /// It does not.
    Failed(Failure),
}

impl Outcome {
    /// Waits for the command that resumes it.
    fn of(child: Child) -> Self {
        let output = match child.wait_with_output() {
            Ok(output) => output,
            Err(e) => return Outcome::Failed(Failure::failed(format!("cannot wait for a process: {e}"))),
        };
        match serde_json::from_slice(&output.stdout) {
            Ok(restored) if output.status.success() => Outcome::GoesOn(restored),
            _ => {
                let said = String::from_utf8_lossy(&output.stderr);
                let what = said.trim().strip_prefix("stillpoint: ").unwrap_or(said.trim());
                let what = if what.is_empty() { "it ended without a word" } else { what };
                let code = output.status.code().and_then(|code| u8::try_from(code).ok());
                let code = code.filter(|code| *code > 0).unwrap_or(FAILED);
                Outcome::Failed(Failure { code, what: what.to_string(), hint: None })
            }
        }
    }
}

/// Tells what became of all, and returns the code of the first that failed.
fn tell(common: &Common, store: &Store, outcomes: &[(String, Outcome)], all: bool) -> Result<ExitCode> {
    let (mut resumed, mut failed, mut notes, mut code) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (job, outcome) in outcomes {
        match outcome {
            Outcome::GoesOn(restored) => {
                resumed.push(restored.clone());
                if !common.json {
                    output::line(&goes_on(job, restored))?;
                    let notes = restored["notes"].as_array().into_iter().flatten().filter_map(Value::as_str);
                    notes.for_each(|note| output::note(&format!("  {note}")));
                }
            }
            // Somebody else was a moment faster.
            Outcome::Failed(_) if all && matches!(jobs::state(store, job)?, State::Runs(_)) => {
                notes.push(format!("job {job} has been resumed meanwhile"));
            }
            Outcome::Failed(failure) => {
                code = if code == 0 { failure.code } else { code };
                failed.push(json!({"job": job, "code": failure.code, "what": failure.what}));
                if !common.json {
                    output::note(&format!("stillpoint: {job} cannot be resumed: {}", failure.what));
                }
            }
        }
    }
    if common.json {
        output::json(&json!({"resumed": resumed, "failed": failed, "notes": notes}))?;
    } else {
        notes.iter().for_each(|note| output::note(&format!("stillpoint: {note}")));
        if outcomes.is_empty() {
            output::note(&format!("stillpoint: no job in {} is to be resumed", store.path().display()));
        }
    }
    Ok(ExitCode::from(code))
}
