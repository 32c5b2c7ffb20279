//! `stillpoint restore`: a program comes back from the store.

use crate::args::{Common, Files, Periodic, Restore, Tcp};
use crate::checkpointer::Beside;
use crate::commands::clones;
use crate::commands::private::{self, Inside};
use crate::commands::run::Record;
use crate::detach::{Answer, in_background};
use crate::failure::{Failure, Result};
use crate::loading::{Loading, Tell, figures};
use crate::progress::Bar;
use crate::supervise::{Foreground, GiveUp, Supervisor, let_go};
use crate::{jobs, output, terminal};
use rustix::fd::{BorrowedFd, OwnedFd};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt::{Display, Formatter};
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use stillpoint_image::tree::in_front;
use stillpoint_image::{Image, Meta, Range};
use stillpoint_linux::supervise::{Child, Signals};
use stillpoint_restore::{
    Coming, Error, FilesPolicy, Heard, Lazily, Options, Pager, Restored, Stdio, TcpPolicy, restore,
};
use stillpoint_store::{Checkpoint, Claim, Sources, Store, TouchSet};

/// Runs the command.
pub fn run(common: &Common, args: &Restore) -> Result<ExitCode> {
    if args.clone {
        return clones::run(common, args);
    }
    if !args.detach {
        return in_foreground(common, args);
    }
    in_background(
        common.json,
        |relay| Revived::revive(common, args, Stdio::Null, Some(relay)),
        |revived, tell| revived.supervise(None, common.json, tell),
    )
}

fn in_foreground(common: &Common, args: &Restore) -> Result<ExitCode> {
    let mut revived = Revived::revive(common, args, Stdio::Current, None)?;
    let pump = revived.stdin_pump.take();
    // Standard output belongs to the program. Of what belongs to it we keep nothing longer than there is something to say.
    let stderr = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3);
    let (mut stderr, json) = (stderr.map(std::fs::File::from), common.json);
    let tell = move |answer: Answer| {
        let _ = stderr.as_mut().map(|stderr| stderr.write_all(answer.lines(json).as_bytes()));
    };
    let line = terminal::Line::on_stderr(!json);
    let_go(pump.is_some())?;
    pump.map(start_pump).transpose()?;
    revived.supervise(line, json, tell)
}

/// Copies what is left of our standard input into the pipe that the program reads.
pub(super) fn start_pump(pipe: OwnedFd) -> Result<()> {
    let copy = move || {
        let mut pipe = std::fs::File::from(pipe);
        // Ends with the input or with the reader; the program sees either as it always would.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut pipe);
    };
    let started = std::thread::Builder::new().name("stdin".into()).spawn(copy);
    started.map(drop).map_err(|e| Failure::failed(format!("cannot start a thread: {e}")))
}

/// A program that has come back.
pub(super) struct Revived {
    /// What there is to supervise: the program, or process 1 of the pid namespace it lives in.
    pub(super) child: Child,
    pub(super) back: Back,
    pub(super) lent: Lent,
    pub(super) stdin_pump: Option<OwnedFd>,
    /// Loads what is not there yet.
    pub(super) pager: Option<Pager>,
    /// Tells how the program in a private pid namespace ended.
    pub(super) inside: Option<Inside>,
    pub(super) record: Option<Record>,
    pub(super) signals: Signals,
    pub(super) meta: Meta,
    pub(super) job: String,
    pub(super) periodic: Periodic,
}

impl Revived {
    /// Brings the program back. While it is not complete, a signal (or the end of whoever listens at `relay`) ends us,
    /// and what there is of it with us.
    fn revive(common: &Common, args: &Restore, stdio: Stdio, relay: Option<BorrowedFd<'_>>) -> Result<Self> {
        let store = jobs::open_store(common.store.as_deref())?;
        let name = &args.checkpoint;
        let checkpoint = store.load(&name.job, name.id).map_err(jobs::store_failure)?;
        let (claim, mut notes) = claim(&store, &name.job)?;
        let signals = Signals::take()?;
        let job = claim.job().to_string();
        let origin = Origin::of(&checkpoint.image.meta);
        let again = Again {
            store: &store,
            checkpoint: &checkpoint,
            origin: &origin,
            args,
            stdio,
            quiet: common.json,
        };
        let mut watch = Some(GiveUp::watch(&signals, relay)?);
        let mut lent = Lent::default();
        let record_of = |pid| {
            let command = checkpoint.image.meta.command.clone();
            jobs::running_record(pid, command, Some(checkpoint.image.meta.id), &args.periodic)
        };
        // Whoever hears of the program by something it does finds it in the store.
        let restored = again.restore(&mut |pid| {
            let _ = record_of(pid).map(|record| store.set_running(claim.job(), &record));
            // From now on a signal waits until the program is supervised: the terminal is to be given back.
            watch = None;
            if stdio == Stdio::Current {
                lent = Lent::to(pid, &checkpoint.image);
            }
        });
        drop(watch);
        let mut revived = match restored {
            Err(Error::PidTaken(_)) if args.pid.is_none() => private::revive(&again, &job, signals, relay)?,
            other => {
                let r = other.map_err(|e| failure(e, &origin))?;
                let back = Back::of(&r, r.notes.clone());
                let child = Child { pid: r.pid, pidfd: r.pidfd };
                Self {
                    child,
                    back,
                    lent,
                    stdin_pump: r.stdin_pump,
                    pager: r.pager,
                    inside: None,
                    record: None,
                    signals,
                    meta: checkpoint.image.meta.clone(),
                    job: job.clone(),
                    periodic: args.periodic.clone(),
                }
            }
        };
        let record = record_of(revived.back.pid);
        let record = record.and_then(|running| Record::write(store.clone(), claim, running));
        // The program runs already: it is worth more than its record.
        let record =
            record.map_err(|e| notes.push(format!("stillpoint ls will not show it: {}", e.what))).ok();
        // Process 1 of a private pid namespace has opened the socket already.
        let is_inside = revived.inside.is_some();
        revived.record = record.map(|r| if is_inside { r } else { r.with_control() });
        notes.extend(revived.record.iter().flat_map(|r| r.notes.clone()));
        revived.back.notes.splice(0..0, notes);
        Ok(revived)
    }

    /// Supervises the program to its end, and ends like it. `tell` hears that it is back; with `json`, which has more to
    /// tell, when all of its memory is.
    fn supervise(
        mut self,
        line: Option<terminal::Line>,
        json: bool,
        tell: impl FnOnce(Answer) + 'static,
    ) -> Result<ExitCode> {
        let loading = match (self.pager.take(), json) {
            (Some(pager), true) => {
                let (mut back, name, coming) = (self.back.clone(), self.name(), pager.coming.clone());
                let told: Tell = Box::new(move || {
                    back.load(Some(&coming));
                    tell(back.answer(&name));
                });
                Some(Loading::watch(pager, Some(told)).on(line))
            }
            (pager, _) => {
                tell(self.back.answer(&self.name()));
                pager.map(|pager| Loading::watch(pager, None).on(line))
            }
        };
        let checkpointer = self.checkpointer();
        let Child { pid, pidfd } = self.child;
        let supervisor = Supervisor::new(self.signals, pid, pidfd);
        let supervisor = supervisor.with_terminal(self.lent.foreground);
        let supervisor = supervisor.with_checkpointer(checkpointer).with_loading(loading);
        let end = supervisor.watch();
        let end = end.map(|end| self.inside.map_or(end, |inside| inside.end(end)));
        drop(self.lent.settings);
        drop(self.record);
        end?.follow()
    }

    /// Who takes its checkpoints; process 1 of a private pid namespace has its own.
    fn checkpointer(&mut self) -> Option<Beside> {
        let record = self.record.as_mut().filter(|_| self.inside.is_none())?;
        Some(record.checkpointer(self.child.pid, &self.periodic))
    }

    fn name(&self) -> Name {
        Name { job: self.job.clone(), origin: Origin::of(&self.meta) }
    }
}

/// Our terminal, as a program has it that comes back.
#[derive(Debug, Default)]
pub(super) struct Lent {
    pub(super) foreground: Option<Foreground>,
    pub(super) settings: Option<terminal::Settings>,
}

impl Lent {
    /// Lends it to a program that does not run yet.
    fn to(pid: u32, image: &Image) -> Self {
        let settings = image.terminal.as_ref().and_then(|recorded| {
            let settings = terminal::Settings::keep()?;
            settings.change(recorded);
            Some(settings)
        });
        let foreground = Foreground::of(pid, in_front(image));
        if let Some(foreground) = &foreground {
            foreground.give();
        }
        Lent { foreground, settings }
    }
}

/// What was restored, and under which name it runs.
#[derive(Clone)]
pub(super) struct Name {
    pub(super) job: String,
    pub(super) origin: Origin,
}

/// What is brought back.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Origin {
    /// A checkpoint in the store.
    Checkpoint { job: String, id: u64 },
    /// A running program, of a moment ago: for how long it was stopped, when that was asked for, and how long it took until this ran.
    Program { job: String, pause: Duration, began: Instant, made: Duration },
}

impl Origin {
    /// A checkpoint.
    pub(super) fn of(meta: &Meta) -> Self {
        Origin::Checkpoint { job: meta.job.clone(), id: meta.id }
    }

    /// What many of it are called.
    pub(super) fn of_many(&self) -> &'static str {
        match self {
            Origin::Checkpoint { .. } => "clones",
            Origin::Program { .. } => "twins",
        }
    }

    /// What is brought back runs now.
    pub(super) fn is_made(&mut self) {
        if let Origin::Program { began, made, .. } = self {
            *made = began.elapsed();
        }
    }

    fn json(&self) -> Value {
        match self {
            Origin::Checkpoint { job, id } => json!({ "from": job, "id": id }),
            Origin::Program { job, pause, made, .. } => {
                json!({ "of": job, "pause_ms": output::ms(*pause), "made_ms": output::ms(*made) })
            }
        }
    }
}

impl Display for Origin {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Checkpoint { job, id } => write!(f, "{job}@{id}"),
            Origin::Program { job, .. } => write!(f, "a twin of {job}"),
        }
    }
}

/// What a restore brought back; it also travels from inside a private pid namespace to the outside.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Back {
    pub(super) pid: u32,
    pub(super) private_pid: Option<u32>,
    pages: u64,
    skeleton_ms: f64,
    running_ms: f64,
    /// How its memory was loaded.
    figures: Value,
    pub(super) notes: Vec<String>,
}

impl Back {
    pub(super) fn of(restored: &Restored, notes: Vec<String>) -> Self {
        let Restored { pid, pages, skeleton, running, .. } = *restored;
        let (skeleton_ms, running_ms) = (output::ms(skeleton), output::ms(running));
        let mut back =
            Self { pid, private_pid: None, pages, skeleton_ms, running_ms, figures: Value::Null, notes };
        back.load(restored.pager.as_ref().map(|pager| &pager.coming));
        back
    }

    /// Takes over how far loading is.
    pub(super) fn load(&mut self, coming: Option<&Coming>) {
        self.figures = figures(coming, self.pages, self.running_ms);
    }

    pub(super) fn answer(&self, name: &Name) -> Answer {
        let Back { pid, private_pid, pages, .. } = *self;
        let bytes = pages * stillpoint_image::PAGE;
        let seen = private_pid.map_or(String::new(), |p| format!(" (it sees itself as {p})"));
        let bytes_text = output::bytes(bytes);
        let text = match &name.origin {
            from @ Origin::Checkpoint { .. } => format!(
                "{from} restored as pid {pid}{seen}  {bytes_text}  skeleton {}, running {}",
                short(self.skeleton_ms),
                short(self.running_ms),
            ),
            of @ Origin::Program { pause, made, .. } => format!(
                "{of} runs as pid {pid}{seen}  {bytes_text}  pause {}, made in {}",
                output::short(*pause),
                output::short(*made),
            ),
        };
        let mut json = json!({
            "job": name.job,
            "pid": pid,
            "private_pid": private_pid,
            "supervisor_pid": std::process::id(),
            "bytes": bytes,
            "pages": pages,
            "skeleton_ms": self.skeleton_ms,
            "running_ms": self.running_ms,
            "notes": self.notes,
        });
        for more in [name.origin.json(), self.figures.clone()] {
            if let (Some(json), Value::Object(more)) = (json.as_object_mut(), more) {
                json.extend(more);
            }
        }
        Answer { text, json, notes: self.notes.clone() }
    }
}

fn short(ms: f64) -> String {
    output::short(Duration::from_secs_f64(ms / 1e3))
}

/// All that a restore needs; it may be tried a second time.
pub(super) struct Again<'a> {
    pub(super) store: &'a Store,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) origin: &'a Origin,
    pub(super) args: &'a Restore,
    pub(super) stdio: Stdio,
    pub(super) quiet: bool,
}

impl Again<'_> {
    pub(super) fn restore(&self, ready: &mut dyn FnMut(u32)) -> std::result::Result<Restored, Error> {
        let mut ready = |pid| {
            ready(pid);
            Ok(())
        };
        match self.args.eager {
            true => self.rebuild(Lazily::Not, &mut ready),
            false => self.with_heard(|heard| self.rebuild(Lazily::Alone(heard), &mut ready)),
        }
    }

    /// The restore itself.
    pub(super) fn rebuild(
        &self,
        lazily: Lazily<'_>,
        ready: &mut dyn FnMut(u32) -> stillpoint_restore::Result<()>,
    ) -> std::result::Result<Restored, Error> {
        let bar = Bar::new("restore", self.quiet);
        let Meta { job, id, .. } = &self.checkpoint.image.meta;
        let mut keep_tail = |path: &Path, offset: u64, tail: &mut dyn Read| {
            self.store.keep_tail(job, *id, path, offset, tail).map_err(Error::Store)?;
            Ok(())
        };
        restore(self.checkpoint, &self.options(), lazily, &mut keep_tail, ready, &bar)
    }

    /// Who hears of memory that comes later.
    pub(super) fn with_heard<T>(&self, act: impl FnOnce(Heard<'_>) -> T) -> T {
        let name = self.origin;
        let (store, checkpoint) = (self.store, self.checkpoint);
        let failed = move |why: &str| {
            let why = format!("stillpoint: cannot load the memory of {name}: {why}\n");
            let _ = rustix::io::write(rustix::stdio::stderr(), why.as_bytes());
        };
        // What is not kept is recorded anew the next time.
        let before = checkpoint.touch.as_ref().map_or(Sources::empty(), TouchSet::sources);
        let sources = before | Sources::RESTORES;
        let wanted = |runs: &[Range]| drop(store.keep_touch_set(checkpoint, runs, sources));
        act(Heard { failed: &failed, wanted: &wanted })
    }

    pub(super) fn options(&self) -> Options {
        options(self.args, self.stdio)
    }
}

fn options(args: &Restore, stdio: Stdio) -> Options {
    let files = match args.files {
        Files::Rollback => FilesPolicy::Rollback,
        Files::Keep => FilesPolicy::Keep,
        Files::Refuse => FilesPolicy::Refuse,
    };
    let tcp = match args.tcp {
        Tcp::Established => TcpPolicy::Established,
        Tcp::Close => TcpPolicy::Close,
    };
    Options {
        files,
        tcp,
        stdio,
        eager_below: args.eager_below,
        limit: args.limit_bandwidth,
        is_followed: true,
    }
}

/// The name that the restored program runs under: that of its job, or, while that runs, a new one.
fn claim(store: &Store, job: &str) -> Result<(Claim, Vec<String>)> {
    if let Some(record) = jobs::running(store, job)? {
        let claim = jobs::claim_new(store, job)?;
        let note = format!("job {job} still runs (process {}): this one is job {}", record.pid, claim.job());
        return Ok((claim, vec![note]));
    }
    Ok((jobs::claim(store, job)?, Vec::new()))
}

pub(super) fn failure(error: Error, name: &Origin) -> Failure {
    match error {
        Error::Refused(things) => {
            let list: Vec<String> = things.iter().map(|t| format!("\n{t}")).collect();
            Failure::refused(format!("cannot restore {name}:{}", list.concat()))
        }
        Error::PidTaken(_) => Failure::refused(format!("cannot restore {name}: {error}"))
            .hint("without --pid same it is restored in a private pid namespace"),
        Error::TooDeep(_) => Failure::refused(format!("cannot restore {name}: {error}"))
            .hint("restore it where it ran, while its process ids are free"),
        Error::NoPidPrivilege(_) => Failure::failed(error).within(&format!("restore {name}")),
        Error::Store(e) => jobs::store_failure(e),
        Error::Kernel(e) => Failure::from(e).within(&format!("restore {name}")),
        Error::Failed(what) => Failure::failed(what).within(&format!("restore {name}")),
    }
}
