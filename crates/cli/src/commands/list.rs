//! `stillpoint ls`: the jobs, or the checkpoints of one.

use crate::args::{Common, Ls};
use crate::failure::{Failure, Result};
use crate::{jobs, output};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use stillpoint_image::{Bytes, Meta, PAGE};
use stillpoint_store::{Running, Store, Summary, Trouble};

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
    running: Option<Running>,
    trouble: Trouble,
    rows: Vec<Row>,
}

impl Job {
    fn newest(&self) -> Option<&Meta> {
        self.rows.iter().rev().find_map(|r| r.summary.as_ref().ok()).map(|s| &s.meta)
    }

    /// What its checkpoints take in the store, bytes.
    fn stored(&self) -> u64 {
        let sizes = self.rows.iter().filter_map(|r| r.summary.as_ref().ok());
        sizes.map(|s| s.meta.written_bytes + s.manifest_bytes).sum()
    }

    fn command(&self) -> &[Bytes] {
        let newest = self.newest().map(|m| m.command.as_slice());
        self.running.as_ref().map(|r| r.command.as_slice()).or(newest).unwrap_or_default()
    }

    fn as_json(&self) -> Value {
        json!({
            "job": self.name,
            "running": self.running.as_ref().map(|r| json!({
                "pid": r.pid,
                "supervisor_pid": r.supervisor_pid,
                "since": output::utc(r.since_ns),
                "restored_from": r.restored_from,
                "adopted": r.adopted,
                "every_s": r.every_ns.map(|ns| ns as f64 / 1e9),
                "keep": r.keep,
                "failing": self.trouble.failing.as_ref().map(|(since_ns, what)| json!({
                    "since": output::utc(*since_ns),
                    "what": what,
                })),
                "slow": self.trouble.slow,
            })),
            "checkpoints": self.rows.len(),
            "newest": self.newest().map(meta_json),
            "stored_bytes": self.stored(),
            "command": command_json(self.command()),
        })
    }

    fn as_row(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.running.as_ref().map_or("-".into(), |r| r.pid.to_string()),
            self.rows.len().to_string(),
            self.newest().map_or("-".into(), |m| output::age(m.taken_ns)),
            output::bytes(self.stored()),
            output::command(self.command(), COMMAND_WIDTH),
        ]
    }
}

fn list_jobs(common: &Common, store: &Store) -> Result<()> {
    let mut list = Vec::new();
    for name in store.jobs().map_err(jobs::store_failure)? {
        let running = jobs::running(store, &name)?;
        let trouble = trouble(store, &name, running.as_ref());
        let job = Job { running, trouble, rows: rows(store, &name)?, name };
        // A job that ended and left nothing is no job any more.
        if job.running.is_some() || !job.rows.is_empty() {
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
    let header = ["JOB", "PROCESS", "CHECKPOINTS", "NEWEST", "STORED", "COMMAND"];
    output::line(&output::table(&header, list.iter().map(Job::as_row).collect(), &[1, 2, 4]))?;
    list.iter().for_each(|job| tell_trouble(&job.name, &job.trouble));
    Ok(())
}

/// What is wrong with the checkpoints of a job that runs.
fn trouble(store: &Store, job: &str, running: Option<&Running>) -> Trouble {
    running.and_then(|_| store.trouble(job).ok()).unwrap_or_default()
}

fn tell_trouble(job: &str, trouble: &Trouble) {
    if let Some((since_ns, what)) = &trouble.failing {
        output::note(&format!("{job}: periodic checkpoints fail since {}: {what}", output::utc(*since_ns)));
    }
    if let Some(what) = &trouble.slow {
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
