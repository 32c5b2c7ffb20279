//! `stillpoint verify`: stored checkpoints are read back and every byte is checked.

use crate::args::{CheckpointName, Common, Verify};
use crate::failure::{FAILED, Failure, Result};
use crate::{jobs, output};
use serde_json::{Value, json};
use std::process::ExitCode;
use stillpoint_image::PAGE;
use stillpoint_store::{Error as Unreadable, Report, Store};

/// A checkpoint that was read back.
struct Checked {
    job: String,
    id: u64,
    pages: u64,
    problems: Vec<String>,
    /// Not all of it may be read, which says nothing about it.
    is_forbidden: bool,
}

/// What is to be checked.
struct Wanted {
    checkpoints: Vec<(String, u64)>,
    /// Jobs that may not be looked at.
    closed: Vec<String>,
}

/// Runs the command.
pub fn run(common: &Common, args: &Verify) -> Result<ExitCode> {
    let store = jobs::open_store(common.store.as_deref())?;
    let mut all = Vec::new();
    let is_one = args.checkpoint.as_ref().is_some_and(|name| name.id.is_some());
    let Wanted { checkpoints, closed } = wanted(&store, args.checkpoint.as_ref())?;
    for (job, id) in checkpoints {
        let checked = match store.verify(&job, Some(id)) {
            // Of a job that runs older ones go meanwhile.
            Err(Unreadable::NoCheckpoint { .. } | Unreadable::NoJob { .. }) if !is_one => continue,
            verified => check(verified, job, id)?,
        };
        if !common.json {
            output::line(&checked.line())?;
            checked.problems.iter().for_each(|p| output::note(&format!("  {p}")));
        }
        all.push(checked);
    }
    if common.json {
        output::json(&all.iter().map(Checked::as_json).collect())?;
    } else if all.is_empty() {
        output::note(&format!("no checkpoints in {}", store.path().display()));
    }
    for job in &closed {
        output::note(&format!("{job}: not checked: it is another user's, who may read it"));
    }
    let is_whole = closed.is_empty() && all.iter().all(|c| c.problems.is_empty());
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The checkpoints that are meant: one, those of a job, or all.
fn wanted(store: &Store, name: Option<&CheckpointName>) -> Result<Wanted> {
    let (jobs, closed) = match name {
        Some(CheckpointName { job, id: Some(id) }) => {
            return Ok(Wanted { checkpoints: vec![(job.clone(), *id)], closed: Vec::new() });
        }
        Some(CheckpointName { job, id: None }) => (vec![job.clone()], Vec::new()),
        None => jobs::within_reach(store)?,
    };
    let mut checkpoints = Vec::new();
    for job in jobs {
        let ids = store.checkpoints(&job).map_err(jobs::store_failure)?;
        if ids.is_empty() && name.is_some() {
            return Err(jobs::store_failure(stillpoint_store::Error::NoneYet { job }));
        }
        checkpoints.extend(ids.into_iter().map(|id| (job.clone(), id)));
    }
    Ok(Wanted { checkpoints, closed })
}

fn check(verified: Result<Report, Unreadable>, job: String, id: u64) -> Result<Checked> {
    match verified {
        Ok(report) => {
            let is_forbidden = report.problems.iter().all(stillpoint_store::Error::is_forbidden);
            let problems = report.problems.iter().map(ToString::to_string).collect();
            Ok(Checked { job, id, pages: report.pages, problems, is_forbidden })
        }
        Err(e) if e.is_usage() => Err(jobs::store_failure(e)),
        // Reading failed as such: also a reason not to rely on it.
        Err(e) => {
            let is_forbidden = e.is_forbidden();
            let problems = vec![Failure::failed(e).what];
            Ok(Checked { job, id, pages: 0, problems, is_forbidden })
        }
    }
}

impl Checked {
    fn line(&self) -> String {
        let size = output::bytes(self.pages * PAGE);
        match self.problems.len() {
            0 => format!("{}@{}  ok  {size}", self.job, self.id),
            _ if self.is_forbidden => format!("{}@{}  not checked: not permitted", self.job, self.id),
            n => format!(
                "{}@{}  DAMAGED: {n} {}",
                self.job,
                self.id,
                if n == 1 { "problem" } else { "problems" }
            ),
        }
    }

    fn as_json(&self) -> Value {
        json!({
            "job": self.job,
            "id": self.id,
            "ok": self.problems.is_empty(),
            "bytes": self.pages * PAGE,
            "problems": self.problems,
        })
    }
}
