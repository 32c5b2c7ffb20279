//! `stillpoint ls`: the jobs, or the checkpoints of one.

use crate::args::{Common, Ls};
use crate::failure::{Failure, Result};
use crate::jobs::State;
use crate::pace::why;
use crate::{jobs, output, paging};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use stillpoint_image::{Bytes, Meta, PAGE};
use stillpoint_store::{Every, Pace, Paging, Running, Store, Summary, Trouble};

/// Widest command line in a table.
const COMMAND_WIDTH: usize = 48;

/// Runs the command.
pub fn run(common: &Common, args: &Ls) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    match &args.job {
        None => list_jobs(common, &store)?,
        Some(job) => list_checkpoints(common, &store, job)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A checkpoint of a list; a damaged one is named too.
struct Row {
    id: u64,
    summary: stillpoint_store::Result<Summary>,
}

fn rows(store: &Store, job: &str) -> Result<Vec<Row>> {
    let ids = store.checkpoints(job).map_err(jobs::store_failure)?;
    Ok(ids.into_iter().map(|id| Row { id, summary: store.summary(job, Some(id)) }).collect())
}

/// A job of a list.
struct Job {
    name: String,
    state: State,
    running: Option<Running>,
    trouble: Trouble,
    pace: Option<Pace>,
    paging: Option<Paging>,
    /// Checkpoints that it does not go on from after a crash.
    passed: Vec<u64>,
    /// How often checkpoints are taken.
    every: Option<Every>,
    rows: Vec<Row>,
    /// What it takes in the store, bytes of the medium.
    stored: u64,
}

impl Job {
    fn newest(&self) -> Option<&Meta> {
        self.rows.iter().rev().find_map(|r| r.summary.as_ref().ok()).map(|s| &s.meta)
    }

    fn command(&self) -> &[Bytes] {
        let newest = self.newest().map(|m| m.command.as_slice());
        self.running.as_ref().map(|r| r.command.as_slice()).or(newest).unwrap_or_default()
    }

    fn as_json(&self) -> Value {
        json!({
            "job": self.name,
            "state": match self.state {
                State::Runs(_) => "running",
                State::Restarts(_) => "restarting",
                State::Resumable(..) => "resumable",
                State::Ends | State::Ended => "ended",
            },
            "passed_over": self.passed,
            "resumable_from": match &self.state {
                State::Resumable(_, (job, id)) => json!({"job": job, "id": id}),
                _ => Value::Null,
            },
            "running": self.running.as_ref().map(|r| json!({
                "pid": r.pid,
                "supervisor_pid": r.supervisor_pid,
                "since": output::utc(r.since_ns),
                "restored_from": r.restored_from,
                "adopted": r.adopted,
                "every_s": r.every_ns.or(self.pace.map(|pace| pace.interval_ns)).map(|ns| ns as f64 / 1e9),
                "auto": self.pace.as_ref().map(pace_json),
                "keep": r.keep,
                "crashes": r.crashes,
                "last_crash": r.crash.as_ref().map(|(when_ns, what)| json!({
                    "at": output::utc(*when_ns),
                    "signal": what,
                })),
                "failing": self.trouble.failing.as_ref().map(|(since_ns, what)| json!({
                    "since": output::utc(*since_ns),
                    "what": what,
                })),
                "slow": self.trouble.slow,
                "paging": self.trouble.paging,
                "memory": self.paging.as_ref().and_then(paging::json),
            })),
            "checkpoints": self.rows.len(),
            "newest": self.newest().map(meta_json),
            "stored_bytes": self.stored,
            "command": command_json(self.command()),
        })
    }

    fn as_row(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            match &self.state {
                State::Runs(running) => running.pid.to_string(),
                State::Restarts(_) => "restarts".into(),
                State::Resumable(..) => "resumable".into(),
                State::Ends | State::Ended => "-".into(),
            },
            match (self.every, &self.pace) {
                (Some(Every::Time(time)), _) => output::short(time),
                (Some(Every::Auto), Some(pace)) => {
                    format!("auto {}", output::short(Duration::from_nanos(pace.interval_ns)))
                }
                (Some(Every::Auto), None) => "auto".into(),
                (None, _) => "-".into(),
            },
            self.rows.len().to_string(),
            self.newest().map_or("-".into(), |m| output::age(m.taken_ns)),
            output::bytes(self.stored),
            output::command(self.command(), COMMAND_WIDTH),
        ]
    }
}

fn list_jobs(common: &Common, store: &Store) -> Result<()> {
    let mut list = Vec::new();
    let (within_reach, closed) = jobs::within_reach(store)?;
    for job in closed {
        output::note(&format!("{job}: is another user's, who may look at it"));
    }
    for name in within_reach {
        let state = jobs::state(store, &name)?;
        let running = if let State::Runs(running) = &state { Some(running.clone()) } else { None };
        let trouble = trouble(store, &name, running.as_ref());
        let pace = pace(store, &name, running.as_ref());
        let paging = jobs::paging(store, &name, running.as_ref());
        let every = running.as_ref().and_then(|_| store.terms(&name).ok().flatten()?.every);
        let passed = passed_over(store, &name);
        let (rows, stored) = (rows(store, &name)?, store.room(&name).unwrap_or(0));
        let job = Job { state, running, trouble, pace, paging, passed, every, rows, stored, name };
        // A job that ended and left nothing is no job any more.
        if !matches!(job.state, State::Ends | State::Ended) || !job.rows.is_empty() {
            list.push(job);
        }
    }
    if common.json {
        return output::json(&list.iter().map(Job::as_json).collect());
    }
    if list.is_empty() {
        output::note(&format!("no jobs in {}", store.path().display()));
        return Ok(());
    }
    let header = ["JOB", "PROCESS", "EVERY", "CHECKPOINTS", "NEWEST", "STORED", "COMMAND"];
    output::line(&output::table(&header, list.iter().map(Job::as_row).collect(), &[1, 2, 3, 5]))?;
    for job in &list {
        tell_trouble(&job.name, &job.trouble);
        tell_state(&job.name, &job.state);
        tell_passed(&job.name, &job.passed);
    }
    Ok(())
}

/// Checkpoints of a job that it does not go on from after a crash, because it crashed again from there.
pub fn passed_over(store: &Store, job: &str) -> Vec<u64> {
    let terms = store.terms(job).ok().flatten();
    terms.map(|terms| terms.passed_over(store, job).to_vec()).unwrap_or_default()
}

fn tell_passed(job: &str, passed: &[u64]) {
    if !passed.is_empty() {
        let names = jobs::named(job, passed);
        output::note(&format!("{job}: {names}: passed over, as it crashed again from there"));
    }
}

/// That a job has crashed, or was cut off, and what becomes of it.
fn tell_state(job: &str, state: &State) {
    match state {
        State::Runs(running) => {
            let Some((when_ns, what)) = &running.crash else { return };
            let times =
                if running.crashes == 1 { "once".into() } else { format!("{} times", running.crashes) };
            output::note(&format!("{job}: it crashed {times}, last by {what}, {}", output::age(*when_ns)));
        }
        State::Restarts(running) => {
            let what = running.crash.as_ref().map_or("a signal", |(_, what)| what);
            output::note(&format!("{job}: {what} killed it, and it is about to be brought back"));
        }
        State::Resumable(_, (of, id)) => output::note(&format!(
            "{job}: it was cut off while it ran; stillpoint resume {job} lets it go on from {of}@{id}"
        )),
        State::Ends | State::Ended => {}
    }
}

/// What is wrong with the checkpoints of a job that runs.
fn trouble(store: &Store, job: &str, running: Option<&Running>) -> Trouble {
    running.and_then(|_| store.trouble(job).ok()).unwrap_or_default()
}

/// How often checkpoints of a job that runs pay, if that was asked for.
fn pace(store: &Store, job: &str, running: Option<&Running>) -> Option<Pace> {
    running.and_then(|_| store.pace(job).ok().flatten())
}

/// How often checkpoints pay, for programs.
pub fn pace_json(pace: &Pace) -> Value {
    let s = |ns: u64| ns as f64 / 1e9;
    json!({
        "interval_s": s(pace.interval_ns),
        "cost_s": s(pace.cost_ns()),
        "pause_s": s(pace.pause_ns),
        "faults_s": s(pace.faults_ns),
        "delay_s": s(pace.delay_ns),
        "waits_s": s(pace.waits_ns),
        "write_s": s(pace.write_ns),
        "bounded_by_write": pace.bounded,
        "mtbf_s": s(pace.mtbf_ns),
        "mtbf_given": pace.given,
        "failures": pace.failures,
        "observed_s": s(pace.observed_ns),
    })
}

fn tell_trouble(job: &str, trouble: &Trouble) {
    if let Some((since_ns, what)) = &trouble.failing {
        output::note(&format!("{job}: periodic checkpoints fail since {}: {what}", output::utc(*since_ns)));
    }
    if let Some(what) = &trouble.slow {
        output::note(&format!("{job}: {what}"));
    }
    if let Some(what) = &trouble.paging {
        output::note(&format!("{job}: {what}"));
    }
}

fn list_checkpoints(common: &Common, store: &Store, job: &str) -> Result<()> {
    let (rows, running) = (rows(store, job)?, jobs::running(store, job)?);
    if rows.is_empty() && running.is_none() {
        return Err(Failure::usage(format!("no job {job} in {}", store.path().display()))
            .hint("stillpoint ls lists the jobs; --store DIR names another store"));
    }
    if common.json {
        let value = |r: &Row| match &r.summary {
            Ok(summary) => meta_json(&summary.meta),
            Err(e) => json!({"job": job, "id": r.id, "error": e.to_string()}),
        };
        return output::json(&rows.iter().map(value).collect());
    }
    tell_trouble(job, &trouble(store, job, running.as_ref()));
    tell_state(job, &jobs::state(store, job)?);
    tell_passed(job, &passed_over(store, job));
    if let Some(pace) = pace(store, job, running.as_ref()) {
        output::note(&format!("{job}: checkpoints as often as pays, {}", why(&pace)));
    }
    if let Some(words) = jobs::paging(store, job, running.as_ref()).as_ref().and_then(paging::words) {
        output::note(&format!("{job}: memory limit {words}"));
    }
    if rows.is_empty() {
        output::note(&format!("job {job} has no checkpoint yet"));
        return Ok(());
    }
    let header = ["CHECKPOINT", "TAKEN", "MEMORY", "WRITTEN", "PAUSE", "ENGINE", "LABEL"];
    output::line(&output::table(&header, rows.iter().map(|r| checkpoint_row(job, r)).collect(), &[2, 3, 4]))
}

fn checkpoint_row(job: &str, row: &Row) -> Vec<String> {
    let name = format!("{job}@{}", row.id);
    match &row.summary {
        Ok(Summary { meta, .. }) => vec![
            name,
            output::age(meta.taken_ns),
            output::bytes(meta.pages * PAGE),
            output::bytes(meta.written_bytes),
            output::short(Duration::from_nanos(meta.pause_ns)),
            meta.engine.clone(),
            meta.label.clone().unwrap_or_default(),
        ],
        Err(_) => vec![name, "damaged".into()],
    }
}

/// A checkpoint, for programs.
pub fn meta_json(meta: &Meta) -> Value {
    json!({
        "job": meta.job,
        "id": meta.id,
        "label": meta.label,
        "taken": output::utc(meta.taken_ns),
        "taken_ns": meta.taken_ns,
        "engine": meta.engine,
        "bytes": meta.pages * PAGE,
        "pages": meta.pages,
        "written_bytes": meta.written_bytes,
        "pause_ms": output::ms(Duration::from_nanos(meta.pause_ns)),
        "command": command_json(&meta.command),
    })
}

fn command_json(command: &[Bytes]) -> Vec<String> {
    command.iter().map(Bytes::to_string).collect()
}
