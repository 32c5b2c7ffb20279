//! `stillpoint run`: a program becomes a job.

use crate::args::{Common, Periodic, Run, UserNamespace};
use crate::checkpointer::{Beside, Errand};
use crate::detach::{Answer, Detached, Relay, background_stdio, detach, stays};
use crate::failure::{Failure, Result};
use crate::lives::Lives;
use crate::names::job_from;
use crate::paging::Paging;
use crate::supervise::{End, Requests, Supervisor, let_go};
use crate::{chronicle, control, jobs, output};
use rustix::fd::AsFd;
use serde_json::json;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use stillpoint_image::Bytes;
use stillpoint_linux::host;
use stillpoint_linux::rootless::{self, Apart};
use stillpoint_linux::supervise::{Child, Signals, die_of, spawn};
use stillpoint_restore::Stdio;
use stillpoint_store::history::What;
use stillpoint_store::{Claim, Running, Store, Terms, Trouble};

/// Runs the command.
pub fn run(common: &Common, args: &Run) -> Result<ExitCode> {
    args.periodic.check()?;
    if !args.detach {
        let lives = args.restart.map(|most| Lives::begin(most, Stdio::Current)).transpose()?;
        let started = Started::start(common, args, lives)?;
        started.record.notes.iter().for_each(|n| output::note(&format!("stillpoint: {n}")));
        started.let_go()?;
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
    lives: Option<Lives>,
    paging: Option<Paging>,
}

impl Started {
    fn start(common: &Common, args: &Run, lives: Option<Lives>) -> Result<Self> {
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
        let terms = jobs::terms(&store, claim.job(), &args.periodic);
        // An earlier run's, if its supervisor was killed.
        store.clear_paging(claim.job()).map_err(jobs::store_failure)?;
        let terms = Terms { restart: args.restart, memory_limit: args.memory_limit, ..terms };
        let (apart, remark) = apart(args)?;
        let mut record = None;
        // Whoever hears of the job by something it does finds it in the store.
        let child = spawn(&args.command, &signals, apart.as_ref(), |pid| {
            let running = jobs::running_record(pid, command, None, &args.periodic)?;
            let written = store.set_terms(claim.job(), &terms);
            record = Some((Record::write(store, claim, running)?.with_control(), written));
            Ok::<_, Failure>(())
        })?;
        // The command has begun with the limit that it is to have; checkpoints that are read for its next lives have many files open.
        let _ = stillpoint_linux::descriptors::raise_descriptor_limit();
        let (record, written): (Record, _) =
            record.ok_or_else(|| Failure::failed("the job was started without a record"))?;
        let begun = chronicle::started(record.running());
        let mut record = record.with_event(begun);
        let paging = args.memory_limit.and_then(|limit| record.page(child.pid, limit));
        let mut record = record.keeps(written);
        record.notes.extend(remark);
        Ok(Self { record, child, signals, periodic: args.periodic.clone(), lives, paging })
    }

    /// Lets go of what belongs to the job, or puts it by for its next life.
    fn let_go(&self) -> Result<()> {
        self.lives.as_ref().map_or_else(let_go, Lives::put_by)
    }

    /// Supervises the job to its end, and ends like it.
    fn supervise(mut self) -> Result<ExitCode> {
        let checkpointer = self.record.checkpointer(self.child.pid, &self.periodic);
        let signals = self.signals.try_clone()?;
        let supervisor = Supervisor::new(self.signals, self.child.pid, self.child.pidfd);
        let supervisor = match &self.lives {
            Some(_) => supervisor.with_orphans(),
            None => supervisor,
        };
        let supervisor = supervisor.with_checkpointer(Some(checkpointer)).with_paging(self.paging);
        let life = supervisor.watch_requests();
        let end = match self.lives {
            Some(lives) => {
                life.and_then(|life| lives.outlive(life, &mut self.record, &signals, &self.periodic))
            }
            None => life.map(|life| self.record.note_end(life)),
        };
        drop(self.record);
        end?.follow()
    }
}

/// The user namespace that the job is to begin in, if it is to be in one of its own, and what is to be said of that.
fn apart(args: &Run) -> Result<(Option<Apart>, Option<String>)> {
    match args.user_namespace {
        UserNamespace::Never => Ok((None, None)),
        UserNamespace::Auto if !rootless::is_kept_off()? => Ok((None, None)),
        UserNamespace::Always => {
            let apart = Apart::new().map_err(|e| {
                Failure::refused(format!("a user namespace of its own is not to be had: {e}"))
                    .hint("stillpoint doctor tells what is missing")
            })?;
            Ok((Some(apart), None))
        }
        UserNamespace::Auto => {
            let yama = "kernel.yama.ptrace_scope keeps you from programs of your own";
            Ok(match Apart::new() {
                Ok(apart) => {
                    let why = "so it lives in a user namespace, in which sudo and its like do not work, and root's files are nobody's (see \
                               --user-namespace)";
                    (Some(apart), Some(format!("{yama}, {why}")))
                }
                Err(e) => {
                    let why = "which is not to be had: it cannot be checkpointed";
                    (None, Some(format!("{yama}, unless they live in a user namespace, {why} ({e})")))
                }
            })
        }
    }
}

/// The file name of the command, as far as it can be the name of a job.
fn default_name(args: &Run) -> String {
    let command = args.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
    job_from(&command.to_string_lossy())
}

fn in_background(common: &Common, args: &Run, relay: Relay) -> Result<ExitCode> {
    let started = background_stdio().and_then(|lost| {
        let lives = args.restart.map(|most| Lives::begin(most, Stdio::Current)).transpose()?;
        Ok((Started::start(common, args, lives)?, lost))
    });
    let (answer, started) = match started {
        Ok((started, lost)) => (Ok(started.answer(&lost)), Some(started)),
        Err(failure) => (Err(failure), None),
    };
    // Whether anybody still listens or not: the job runs.
    let _ = relay.send(&answer);
    let Some(started) = started else { return Ok(ExitCode::FAILURE) };
    started.let_go()?;
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
    /// The terms in the store are those of this run; until then they may be of one that was cut off.
    is_kept: bool,
    /// The job goes on when the machine is up again.
    goes_on: bool,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl Record {
    /// Writes the record. Terms that are to [last](Self::keeps) are in the store before it: whoever hears that the job runs may end
    /// it at once.
    pub fn write(store: Store, claim: Claim, running: Running) -> Result<Self> {
        store.set_running(claim.job(), &running).map_err(jobs::store_failure)?;
        store.set_trouble(claim.job(), &Trouble::default()).map_err(jobs::store_failure)?;
        store.set_pace(claim.job(), None).map_err(jobs::store_failure)?;
        Ok(Self { store, claim, running, listener: None, is_kept: false, goes_on: false, notes: Vec::new() })
    }

    /// The terms on which the job runs were written, or could not be: from now on they outlive a crash of the machine, so that the
    /// job can be continued then.
    pub fn keeps(mut self, written: stillpoint_store::Result<()>) -> Self {
        self.is_kept = true;
        if let Err(e) = written.and_then(|()| self.store.settle_terms(self.claim.job())) {
            // The job is worth more than this.
            self.notes.push(format!("stillpoint resume will not know it: {e}"));
        }
        self
    }

    /// The job runs as another process now.
    pub fn runs_as(&mut self, running: Running) -> Result<()> {
        self.running = running;
        self.store.set_running(self.claim.job(), &self.running).map_err(jobs::store_failure)
    }

    /// Whether somebody has ended the job by way of the store, as `checkpoint --kill` does.
    pub fn was_ended(&self) -> bool {
        matches!(self.store.terms(self.claim.job()), Ok(None))
    }

    /// The job is left to itself. One that goes down with the machine is to be continued.
    pub fn leave(&mut self) {
        self.goes_on = host::is_going_down();
    }

    /// Takes note of how the job ended: one that went down with the machine is to be continued.
    pub fn note_end(&mut self, (end, _): (End, Requests)) -> End {
        self.ends(end);
        self.goes_on = matches!(end, End::Killed(_)) && host::is_going_down();
        end
    }

    /// Opens the control socket. Calls wait there until they are taken.
    pub fn with_control(mut self) -> Self {
        self.listen();
        self
    }

    /// The same once more, for another life of the job.
    pub fn listen(&mut self) {
        match control::listen(&self.store, self.claim.job()) {
            Ok(listener) => self.listener = Some(listener),
            // The job is worth more than this.
            Err(e) => self.notes.push(all_complete(&e)),
        }
    }

    /// Notes in the history of the job how it began.
    pub fn with_event(self, begun: What) -> Self {
        chronicle::tell(&self.store, self.job(), begun);
        self
    }

    /// Notes how it ended.
    pub fn ends(&self, end: End) {
        chronicle::tell(&self.store, self.job(), chronicle::ended(end));
    }

    /// Who runs it.
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// The job.
    pub fn job(&self) -> &str {
        self.claim.job()
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Streams besides the standard ones that the job was started with.
    pub fn inherited(&self) -> Vec<(u32, Vec<u8>)> {
        jobs::inherited(&self.running)
    }

    /// The control socket, if it is open and nobody has it yet.
    pub fn take_control(&mut self) -> Option<UnixListener> {
        self.listener.take()
    }

    /// Keeps the memory of its process within a limit, bytes.
    pub fn page(&mut self, pid: u32, limit: u64) -> Option<Paging> {
        let (paging, why) = Paging::begin(&self.store, self.job(), pid, limit);
        self.notes.extend(why);
        paging
    }

    /// Who takes its checkpoints.
    pub fn checkpointer(&mut self, pid: u32, periodic: &Periodic) -> Beside {
        let errand = Errand {
            store: self.store.clone(),
            job: self.claim.job().to_string(),
            pid,
            inherited: self.inherited(),
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
        let _ = self.store.set_pace(self.claim.job(), None);
        if self.is_kept
            && !self.goes_on
            && let Err(e) = self.store.clear_terms(self.claim.job())
        {
            output::note(&format!(
                "stillpoint: {e}; stillpoint resume will take the job for one that was cut off"
            ));
        }
        let _ = self.store.clear_paging(self.claim.job());
        // A record that stays is no harm: it names a process that is no more.
        if let Err(e) = self.store.clear_running(self.claim.job()) {
            output::note(&format!("stillpoint: {e}"));
        }
    }
}
