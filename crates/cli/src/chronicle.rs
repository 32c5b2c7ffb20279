//! Writing down what becomes of a job. Nobody depends on it: what cannot be written is left out.

use crate::supervise::End;
use crate::taken::Asked;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;
use stillpoint_capture::Report;
use stillpoint_store::history::{Back, Event, Failed, Saved, Start, What, Why};
use stillpoint_store::{Running, Store};

/// Notes that something has happened to a job.
pub fn tell(store: &Store, job: &str, what: What) {
    let _ = store.note(job, &Event::now(what));
    let _ = store.thin_history(job);
}

/// A program has been started, or adopted.
pub fn started(running: &Running) -> What {
    What::Start(Start {
        pid: running.pid,
        command: running.command.iter().map(ToString::to_string).collect(),
        adopted: running.adopted,
        every_ns: running.every_ns,
        keep: running.keep,
        options: Vec::new(),
    })
}

/// A program has been brought back from a checkpoint of this job, if it runs under another name.
pub fn back(running: &Running, job: Option<String>, took: Option<Duration>) -> Back {
    Back {
        pid: running.pid,
        from: running.restored_from.unwrap_or_default(),
        job,
        running_ns: took.map(ns),
        every_ns: running.every_ns,
        keep: running.keep,
        ..Back::default()
    }
}

/// A program has ended.
pub fn ended(end: End) -> What {
    match end {
        End::Exited(code) => What::End { code: Some(code) },
        End::Killed(signal) => What::Crash { signal },
    }
}

/// A checkpoint that is being taken by this process.
#[derive(Debug)]
pub struct Taking {
    why: Why,
    interval: Option<Duration>,
    cpu: Duration,
}

impl Taking {
    /// It begins now.
    pub fn begin(why: Why, interval: Option<Duration>) -> Self {
        Self { why, interval, cpu: cpu() }
    }

    /// Notes how it went. The history may be long by then.
    pub fn note(
        self,
        store: &Store,
        asked: &Asked,
        outcome: &Result<Report, stillpoint_capture::Error>,
    ) -> Option<()> {
        let what = match outcome {
            Ok(report) => What::Checkpoint(Box::new(self.saved(store, asked, report))),
            Err(e) => What::Failed(Failed {
                wanted: self.why,
                reason: e.to_string(),
                refused: matches!(
                    e,
                    stillpoint_capture::Error::Refused(_) | stillpoint_capture::Error::Incapable(_)
                ),
                ..Failed::default()
            }),
        };
        store.note(&asked.job, &Event::now(what)).ok()
    }

    fn saved(&self, store: &Store, asked: &Asked, report: &Report) -> Saved {
        let committed = &report.committed;
        let paging = store.paging(&asked.job).ok().flatten();
        let stored: u64 = committed.heat.iter().map(stillpoint_store::Area::pages).sum();
        Saved {
            id: report.id,
            taken_ns: committed.taken_ns,
            why: self.why,
            engine: report.engine.to_string(),
            incremental: report.incremental,
            label: asked.label.clone(),
            pause_ns: ns(report.pause),
            other_stops: report.other_pauses.len() as u64,
            other_stops_ns: ns(report.other_pauses.iter().sum()),
            wall_ns: ns(report.wall),
            cpu_ns: ns(cpu().saturating_sub(self.cpu)),
            processes: report.processes as u64,
            pages: report.pages,
            written_pages: committed.stored_pages,
            written_bytes: report.written_bytes,
            manifest_bytes: committed.manifest_bytes,
            dirty_pages: report.incremental.then_some(stored),
            interval_ns: self.interval.map(ns),
            paged: paging.and_then(|paging| paging.limit.map(|_| paging.paged)),
            killed: asked.kill,
            heat: committed.heat.clone(),
            merged: None,
        }
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Processor time that this process, with all of its threads, has taken so far.
fn cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
