//! A checkpoint that was taken, or was not, as the user hears of it; it may have to travel from a supervisor to them.

use crate::detach::Answer;
use crate::failure::Failure;
use crate::{jobs, output};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;
use stillpoint_capture::{Engine, Error, Options, Progress, Report};
use stillpoint_image::Image;
use stillpoint_store::Store;

/// What is asked of a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Asked {
    /// What the user calls the program.
    pub target: String,
    /// Job that it belongs to.
    pub job: String,
    /// The user's words for it.
    pub label: Option<String>,
    /// How memory is saved.
    pub engine: Engine,
    /// Memory for pages on their way, bytes.
    pub buffer: u64,
    /// Save all pages, also those that an earlier checkpoint has.
    pub full: bool,
    /// Kill the program afterwards.
    pub kill: bool,
}

impl Asked {
    /// The same for the one who does it.
    pub fn options(&self, inherited: Vec<(u32, Vec<u8>)>) -> Options {
        Options {
            job: self.job.clone(),
            label: self.label.clone(),
            engine: self.engine,
            buffer: self.buffer,
            full: self.full,
            kill: self.kill,
            inherited,
        }
    }
}

/// Hears how far a checkpoint is, and that it kills a job: that one has been ended, then, and has not crashed.
pub struct Ending<'a> {
    /// Hears how far it is.
    pub progress: &'a (dyn Progress + Sync),
    /// Where the job is.
    pub store: &'a Store,
    /// The job.
    pub job: &'a str,
}

impl Progress for Ending<'_> {
    fn start(&self, total_bytes: u64) {
        self.progress.start(total_bytes);
    }

    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }

    fn rehearse(&self, image: &Image, is_still: bool) -> Vec<String> {
        stillpoint_restore::rehearse(image, is_still)
    }

    fn kills(&self) {
        // A process that is no job has no terms.
        let _ = self.store.clear_terms(self.job);
    }
}

/// What a checkpoint was like; see [`Report`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Taken {
    job: String,
    id: u64,
    bytes: u64,
    pages: u64,
    written_bytes: u64,
    #[serde(default)]
    stored_pages: u64,
    processes: usize,
    pause: Duration,
    #[serde(default)]
    steps: Vec<(String, Duration)>,
    other_pauses: Vec<Duration>,
    #[serde(default)]
    waited: Duration,
    wall: Duration,
    engine: String,
    /// Only what changed was saved.
    pub incremental: bool,
    /// Why this engine, and what it did.
    pub story: Vec<String>,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

impl From<Report> for Taken {
    fn from(r: Report) -> Self {
        Self {
            job: r.job,
            id: r.id,
            bytes: r.bytes,
            pages: r.pages,
            written_bytes: r.written_bytes,
            stored_pages: r.committed.stored_pages,
            processes: r.processes,
            pause: r.pause,
            steps: r.steps.into_iter().map(|(step, took)| (step.to_string(), took)).collect(),
            other_pauses: r.other_pauses,
            waited: r.waited,
            wall: r.wall,
            engine: r.engine.to_string(),
            incremental: r.incremental,
            story: r.story,
            notes: r.notes,
        }
    }
}

impl Taken {
    /// How long it all took.
    pub fn wall(&self) -> Duration {
        self.wall
    }

    /// Number of the checkpoint.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What matters of it to how often checkpoints pay.
    pub fn paced(&self) -> crate::pace::Taken {
        crate::pace::Taken {
            pause: self.pause + self.other_pauses.iter().sum(),
            pages: self.stored_pages,
            waited: self.waited,
            wall: self.wall,
            incremental: self.incremental,
        }
    }

    /// Name of the engine.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// What the user hears: the program is process `pid` to them, and the store is at `store`.
    pub fn answer(&self, asked: &Asked, pid: u32, store: &std::path::Path) -> Answer {
        let Taken { job, id, .. } = self;
        let processes = match self.processes {
            0 | 1 => String::new(),
            several => format!("{several} processes  "),
        };
        let text = format!(
            "{job}@{id}  {processes}{} in {} pages  pause {}  {}",
            output::bytes(self.bytes),
            output::count(self.pages),
            output::short(self.pause),
            output::short(self.wall),
        );
        let json = json!({
            "job": job,
            "id": id,
            "pid": pid,
            "bytes": self.bytes,
            "pages": self.pages,
            "written_bytes": self.written_bytes,
            "processes": self.processes,
            "pause_ms": output::ms(self.pause),
            "pause_steps": self.steps.iter().map(|(step, took)| json!({"step": step, "ms": output::ms(*took)})).collect::<Vec<_>>(),
            "other_pauses_ms": self.other_pauses.iter().map(|&p| output::ms(p)).collect::<Vec<_>>(),
            "wall_ms": output::ms(self.wall),
            "engine": self.engine,
            "incremental": self.incremental,
            "label": asked.label,
            "killed": asked.kill,
            "store": store.to_string_lossy(),
            "story": self.story,
            "notes": self.notes,
        });
        Answer { text, json, notes: self.notes.clone() }
    }
}

/// Why what is to be done (`verb`) with what the user calls `target` cannot be: there is no checkpoint of it.
pub fn failure(error: Error, verb: &str, target: &str) -> Failure {
    let what = format!("{verb} {target}");
    match error {
        Error::Refused(refusals) => {
            let list = stillpoint_capture::list(&refusals);
            Failure::refused(format!("cannot {what}, which runs on unharmed:\n{list}"))
        }
        Error::Incapable(refusal) => {
            Failure::refused(format!("cannot {what}, which runs on unharmed:\n{refusal}"))
        }
        Error::Target(what) | Error::Busy(what) => Failure::usage(what),
        Error::Store(e) => jobs::store_failure(e).within(&what),
        Error::Kernel(e) => Failure::from(e).within(&what),
        Error::Followed(_) => Failure::refused(error.to_string()).within(&what),
        Error::Replaced | Error::Loading | Error::Passing(_) => {
            Failure::failed(error.to_string()).within(&what)
        }
        Error::Failed(why) | Error::Lost(why) => Failure::failed(why).within(&what),
    }
}
