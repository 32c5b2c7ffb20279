//! `stillpoint run`: a program becomes a job.

use crate::args::{Common, Periodic, Run};
use crate::checkpointer::{Beside, Errand};
use crate::detach::{Answer, Detached, Relay, background_stdio, detach, stays};
use crate::failure::{Failure, Result};
use crate::names::job_from;
use crate::supervise::{Supervisor, let_go};
use crate::{control, jobs, output};
use rustix::fd::AsFd;
use serde_json::json;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use stillpoint_image::Bytes;
use stillpoint_linux::supervise::{Child, Signals, die_of, spawn};
use stillpoint_store::{Claim, Running, Store, Trouble};

/// Runs the command.
pub fn run(common: &Common, args: &Run) -> Result<ExitCode> {
    if !args.detach {
        let started = Started::start(common, args)?;
        started.record.notes.iter().for_each(|n| output::note(&format!("stillpoint: {n}")));
        let_go(false)?;
        return started.supervise();
    }
    let stdout_is_taken = stays(std::io::stdout().as_fd());
    match detach()? {
        Detached::Front(answer) => {
            answer?.tell(common.json, stdout_is_taken)?;
            Ok(ExitCode::SUCCESS)
        }
        Detached::Back(relay) => in_background(common, args, relay),
    }
}

/// A job that has been started.
struct Started {
    record: Record,
    child: Child,
    signals: Signals,
    periodic: Periodic,
}

impl Started {
    fn start(common: &Common, args: &Run) -> Result<Self> {
        let store = jobs::open_store(common.store.as_deref())?;
        let claim = match &args.name {
            Some(name) => jobs::claim(&store, name)?,
            None => jobs::claim_new(&store, &default_name(args))?,
        };
        let signals = Signals::take()?;
        // A Ctrl-C from before the job exists is for us: the job would never hear of it.
        while let Some(signal) = signals.next()? {
            if signal.would_end_us() {
                die_of(signal.signal);
            }
        }
        let command = args.command.iter().map(|a| Bytes::from(Path::new(a))).collect();
        let mut record = None;
        // Whoever hears of the job by something it does finds it in the store.
        let child = spawn(&args.command, &signals, |pid| {
            let running = jobs::running_record(pid, command, None, &args.periodic)?;
            record = Some(Record::write(store, claim, running)?.with_control());
            Ok::<_, Failure>(())
        })?;
        let record = record.ok_or_else(|| Failure::failed("the job was started without a record"))?;
        Ok(Self { record, child, signals, periodic: args.periodic.clone() })
    }

    /// Supervises the job to its end, and ends like it.
    fn supervise(mut self) -> Result<ExitCode> {
        let checkpointer = self.record.checkpointer(self.child.pid, &self.periodic);
        let supervisor = Supervisor::new(self.signals, self.child.pid, self.child.pidfd);
        let end = supervisor.with_checkpointer(Some(checkpointer)).watch();
        drop(self.record);
        end?.follow()
    }
}

/// The file name of the command, as far as it can be the name of a job.
fn default_name(args: &Run) -> String {
    let command = args.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
    job_from(&command.to_string_lossy())
}

fn in_background(common: &Common, args: &Run, relay: Relay) -> Result<ExitCode> {
    let started = background_stdio().and_then(|lost| Ok((Started::start(common, args)?, lost)));
    let (answer, started) = match started {
        Ok((started, lost)) => (Ok(started.answer(&lost)), Some(started)),
        Err(failure) => (Err(failure), None),
    };
    // Whether anybody still listens or not: the job runs.
    let _ = relay.send(&answer);
    let Some(started) = started else { return Ok(ExitCode::FAILURE) };
    let_go(false)?;
    let _ = std::env::set_current_dir("/"); // a supervisor must not keep a file system busy
    started.supervise()
}

impl Started {
    fn answer(&self, lost: &[&str]) -> Answer {
        let (job, pid) = (self.record.job(), self.child.pid);
        let mut notes = self.record.notes.clone();
        if !lost.is_empty() {
            notes.push(format!("its {} is /dev/null; redirect it to a file to keep it", lost.join(" and ")));
        }
        Answer {
            text: format!("{job} runs as process {pid}"),
            json: json!({
                "job": job,
                "pid": pid,
                "supervisor_pid": std::process::id(),
                "store": self.record.store.path().to_string_lossy(),
                "notes": notes,
            }),
            notes,
        }
    }
}

/// The record in the store that a job runs, and its name, for as long as this lives.
#[derive(Debug)]
pub struct Record {
    store: Store,
    claim: Claim,
    running: Running,
    listener: Option<UnixListener>,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl Record {
    /// Writes the record.
    pub fn write(store: Store, claim: Claim, running: Running) -> Result<Self> {
        store.set_running(claim.job(), &running).map_err(jobs::store_failure)?;
        // An earlier run's, if its supervisor was killed.
        store.set_trouble(claim.job(), &Trouble::default()).map_err(jobs::store_failure)?;
        Ok(Self { store, claim, running, listener: None, notes: Vec::new() })
    }

    /// Opens the control socket. Calls wait there until they are taken.
    pub fn with_control(mut self) -> Self {
        match control::listen(&self.store, self.claim.job()) {
            Ok(listener) => self.listener = Some(listener),
            // The job is worth more than this.
            Err(e) => self.notes.push(all_complete(&e)),
        }
        self
    }

    /// The job.
    pub fn job(&self) -> &str {
        self.claim.job()
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The control socket, if it is open and nobody has it yet.
    pub fn take_control(&mut self) -> Option<UnixListener> {
        self.listener.take()
    }

    /// Who takes its checkpoints.
    pub fn checkpointer(&mut self, pid: u32, periodic: &Periodic) -> Beside {
        let errand = Errand {
            store: self.store.clone(),
            job: self.claim.job().to_string(),
            pid,
            inherited: jobs::inherited(&self.running),
            periodic: periodic.clone(),
        };
        Beside::new(errand, self.take_control())
    }
}

/// A job whose checkpointer cannot be asked.
pub fn all_complete(why: &Failure) -> String {
    format!("checkpoints that are asked for will all be complete ones: {}", why.what)
}

impl Drop for Record {
    fn drop(&mut self) {
        control::remove(&self.store, self.claim.job());
        let _ = self.store.set_trouble(self.claim.job(), &Trouble::default());
        // A record that stays is no harm: it names a process that is no more.
        if let Err(e) = self.store.clear_running(self.claim.job()) {
            output::note(&format!("stillpoint: {e}"));
        }
    }
}
