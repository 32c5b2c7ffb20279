//! `stillpoint restore`: a program comes back from the store.

use crate::args::{
    CheckpointName, Common, EAGER_BELOW, Files, Periodic, Restore, Streams as StreamArgs, Tcp,
};
use crate::checkpointer::Beside;
use crate::commands::clones;
use crate::commands::private::{self, Inside, Why};
use crate::commands::run::Record;
use crate::detach::{Answer, in_background};
use crate::failure::{Failure, Result};
use crate::lives::{Lives, with_restore};
use crate::loading::{Loading, Tell, figures};
use crate::paging::{self, Paging};
use crate::progress::Bar;
use crate::pumps::start_pumps;
use crate::supervise::{End, Foreground, GiveUp, Requests, Supervisor, Within, let_go};
use crate::{chronicle, jobs, output, terminal, units};
use rustix::fd::BorrowedFd;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::{Display, Formatter};
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};
use stillpoint_capture::attributes::target::has_ended;
use stillpoint_image::tree::in_front;
use stillpoint_image::{Image, Meta, Range};
use stillpoint_linux::host::boot_id;
use stillpoint_linux::supervise::{Child, Signals};
use stillpoint_pager::Restoring;
use stillpoint_restore::files::{connectable, read_once, shared_inputs, stand_in, stay_apart, untold};
use stillpoint_restore::{
    Coming, Connection, Error, Heard, Ids, Lazily, Options, Pager, Pump, Restored, Stdio, Streams, TcpPolicy,
    To, restore,
};
use stillpoint_store::history::{Back as CameBack, What};
use stillpoint_store::{Checkpoint, Claim, Running, Sources, Store, Terms, TouchSet};

/// Runs the command.
pub fn run(common: &Common, args: &Restore) -> Result<ExitCode> {
    args.periodic.check()?;
    if args.clone {
        return clones::run(common, args);
    }
    if !args.detach {
        return in_foreground(common, args);
    }
    in_background(
        common.json,
        |relay| {
            let lives = args.restart.map(|most| Lives::begin(most, Stdio::Null)).transpose()?;
            Revived::revive(common, args, Stdio::Null, Some(relay)).map(|revived| (revived, lives))
        },
        |(revived, lives), tell| {
            revived.supervise(lives.map(|l| l.of_restored(args)), None, common.json, tell)
        },
    )
}

impl Restore {
    /// A restore without any options.
    pub(crate) fn plain(job: &str, periodic: &Periodic) -> Result<Self> {
        Ok(Self {
            checkpoint: CheckpointName { job: job.to_string(), id: None },
            detach: false,
            eager: false,
            eager_below: units::size(EAGER_BELOW).map_err(Failure::failed)?,
            limit_bandwidth: None,
            clone: false,
            count: None,
            files: Files::Rollback,
            tcp: Tcp::Established,
            streams: StreamArgs::default(),
            pid: None,
            restart: None,
            memory_limit: None,
            periodic: periodic.clone(),
        })
    }
}

fn in_foreground(common: &Common, args: &Restore) -> Result<ExitCode> {
    let lives = args.restart.map(|most| Lives::begin(most, Stdio::Current)).transpose()?;
    let revived = Revived::revive(common, args, Stdio::Current, None)?;
    // Standard output belongs to the program. Of what belongs to it we keep nothing longer than there is something to say.
    let stderr = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3);
    let (mut stderr, json) = (stderr.map(std::fs::File::from), common.json);
    let tell = move |answer: Answer| {
        let _ = stderr.as_mut().map(|stderr| stderr.write_all(answer.lines(json).as_bytes()));
    };
    let line = terminal::Line::on_stderr(!json);
    match &lives {
        Some(lives) => lives.put_by()?,
        None => let_go()?,
    }
    revived.supervise(lives.map(|lives| lives.of_restored(args)), line, json, tell)
}

/// A program that has come back.
pub(crate) struct Revived {
    /// What there is to supervise: the program, or process 1 of the pid namespace it lives in.
    pub(super) child: Child,
    pub(crate) back: Back,
    pub(super) lent: Lent,
    /// What is to be brought to it.
    pub(super) pumps: Vec<Pump>,
    /// Loads what is not there yet.
    pub(super) pager: Option<Pager>,
    /// Keeps its memory within a limit.
    pub(super) paging: Option<Paging>,
    /// Tells how the program in a private pid namespace ended.
    pub(super) inside: Option<Rc<RefCell<Inside>>>,
    /// Process 1 of that has its own checkpointer.
    pub(super) has_checkpointer: bool,
    pub(super) record: Option<Record>,
    pub(super) signals: Signals,
    pub(super) meta: Meta,
    pub(super) job: String,
    pub(super) periodic: Periodic,
    /// Takes its checkpoints.
    pub(super) beside: Option<Beside>,
}

/// The record of a program that was brought back, and has our streams or none.
pub(super) fn record_of(pid: u32, checkpoint: &Checkpoint, args: &Restore, stdio: Stdio) -> Result<Running> {
    let meta = &checkpoint.image.meta;
    let running = jobs::running_record(pid, meta.command.clone(), Some(meta.id), &args.periodic)?;
    let connections = &args.streams.connections;
    let inherited = jobs::connected(jobs::inherited(&running), connections, &checkpoint.image, stdio);
    let inherited = inherited.into_iter().map(|(number, link)| (number, link.into())).collect();
    Ok(Running { inherited, ..running })
}

/// What a program that may have further lives has read of a pipe cannot be read again.
fn check_input(checkpoint: &Checkpoint, args: &Restore) -> Result<()> {
    let Image { meta, .. } = &checkpoint.image;
    let number = args.restart.and_then(|_| read_once(&checkpoint.image, &args.streams.policy()));
    let Some(number) = number else { return Ok(()) };
    Err(Failure::refused(format!(
        "--restart: {} of {}@{} is a pipe or has unread data, and what it has read of it cannot be read again",
        output::stream(number), meta.job, meta.id
    ))
    .hint("restore it without --restart"))
}

/// Only what led outside can be connected.
pub(super) fn check_connections(image: &Image, args: &Restore) -> Result<()> {
    let connectable = connectable(image);
    let mut seen = HashSet::new();
    for Connection { number, to } in &args.streams.connections {
        if !seen.insert(number) {
            return Err(Failure::usage(format!("--fd {number} is given twice")));
        }
        if !connectable.contains(number) {
            let list: Vec<String> = connectable.iter().map(u32::to_string).collect();
            let hint = match list.is_empty() {
                true => "nothing that it had open led outside".to_string(),
                false => format!("these descriptors did: {}", list.join(", ")),
            };
            let what = format!("--fd {number}: descriptor {number} of the program did not lead outside");
            return Err(Failure::usage(what).hint(hint));
        }
        if let (To::Descriptor(own), Some(_)) = (to, args.restart) {
            let what = format!(
                "--fd {number}=fd:{own}: with --restart, what is connected must be there for later lives, too"
            );
            return Err(Failure::usage(what).hint(format!("name a file: --fd {number}=PATH")));
        }
    }
    let streams = args.streams.policy();
    let hint = "name files (--fd N=PATH), or choose --pipes closed";
    if let Some(told) = untold(image, &streams).filter(|_| args.restart.is_some()) {
        let what = format!("{told}: with --restart, what the program has must be there for later lives, too");
        return Err(Failure::refused(what).hint(hint));
    }
    let shared = shared_inputs(image, &streams);
    if args.count.is_some_and(|count| count > 1) && !shared.is_empty() {
        let what =
            format!("{}: several clones would take from each other what comes from there", shared.join(", "));
        return Err(Failure::refused(what).hint(hint));
    }
    Ok(())
}

impl Revived {
    /// Brings the program back. While it is not complete, a signal (or the end of whoever listens at `relay`) ends us,
    /// and what there is of it with us.
    fn revive(common: &Common, args: &Restore, stdio: Stdio, relay: Option<BorrowedFd<'_>>) -> Result<Self> {
        let store = jobs::open_store(common.store.as_deref())?;
        let name = &args.checkpoint;
        let (mut checkpoint, stand_ins) = load(&store, name)?;
        check_connections(&checkpoint.image, args)?;
        let apart = stay_apart_if_it_runs(&store, &mut checkpoint.image, args)?;
        let (claim, mut notes) = claim(&store, &name.job)?;
        notes.extend(stand_ins.into_iter().chain(apart));
        let quiet = common.json;
        Self::revive_as(&store, claim, &checkpoint, args, stdio, relay, quiet, notes, None, What::Restore)
    }

    /// The same for a checkpoint that has been loaded, under this name; a job that goes on has terms from before.
    #[allow(clippy::too_many_arguments, reason = "each is another thing that is known by now")]
    pub(super) fn revive_as(
        store: &Store,
        claim: Claim,
        checkpoint: &Checkpoint,
        args: &Restore,
        stdio: Stdio,
        relay: Option<BorrowedFd<'_>>,
        quiet: bool,
        mut notes: Vec<String>,
        before: Option<Terms>,
        how: fn(CameBack) -> What,
    ) -> Result<Self> {
        check_input(checkpoint, args)?;
        let signals = Signals::take()?;
        let job = claim.job().to_string();
        let from = Some((checkpoint.image.meta.job.clone(), checkpoint.image.meta.id));
        let terms = Terms { from, ..with_restore(jobs::terms(store, &job, &args.periodic), args) };
        let is_asked_for = before.is_none();
        let terms = before.map_or(terms.clone(), |before| jobs::carried(before, terms));
        let origin = Origin::of(&checkpoint.image.meta);
        store.clear_paging(&job).map_err(jobs::store_failure)?;
        let again = Again {
            store,
            checkpoint,
            origin: &origin,
            job: &job,
            args,
            stdio,
            ids: Ids::Same,
            quiet,
            is_asked_for,
        };
        let mut watch = Some(GiveUp::watch(&signals, relay)?);
        let mut lent = Lent::default();
        let record_of = |pid| record_of(pid, checkpoint, args, stdio);
        // Whoever hears of the program by something it does finds it in the store, with the terms, which end with it.
        let mut written = None;
        let was_cut_off = matches!(store.terms(&job), Ok(Some(_)));
        let mut begun = |pid| {
            written = Some(store.set_terms(&job, &terms));
            let _ = record_of(pid).map(|record| store.set_running(&job, &record));
        };
        let restored = again.restore(&mut |pid| {
            begun(pid);
            // From now on a signal waits until the program is supervised: the terminal is to be given back.
            watch = None;
            if stdio == Stdio::Current {
                lent = Lent::to(pid, &checkpoint.image);
            }
        });
        drop(watch);
        let mut revived = again.or_apart(restored, signals, lent, relay, &mut begun).inspect_err(|_| {
            if !was_cut_off {
                let _ = store.clear_terms(&job);
            }
            if written.is_some() {
                let _ = store.clear_running(&job);
            }
        })?;
        let written = written.unwrap_or_else(|| store.set_terms(&job, &terms));
        let record = record_of(revived.back.pid);
        let record = record.map(|running| jobs::with_pumped(running, &revived.back.pumped));
        let record = record.and_then(|running| Record::write(store.clone(), claim, running));
        // The program runs already: it is worth more than its record.
        let record =
            record.map_err(|e| notes.push(format!("stillpoint ls will not show it: {}", e.what))).ok();
        let took = Duration::from_secs_f64(revived.back.running_ms / 1e3);
        if let Some(record) = &record {
            let other = (origin.job() != job).then(|| origin.job().to_string());
            chronicle::tell(store, &job, how(chronicle::back(record.running(), other, Some(took))));
        }
        // It has opened the socket already, then.
        let is_inside = revived.has_checkpointer;
        let record = record.map(|record| record.keeps(written));
        revived.record = record.map(|r| if is_inside { r } else { r.with_control() });
        notes.extend(revived.record.iter().flat_map(|r| r.notes.clone()));
        revived.back.notes.splice(0..0, notes);
        Ok(revived)
    }

    /// Brings a job back whose last life has ended, where that was, as whose record remains.
    pub(crate) fn again(
        checkpoint: &Checkpoint,
        args: &Restore,
        stdio: Stdio,
        record: &mut Record,
        before: Running,
        signals: Signals,
    ) -> Result<Self> {
        check_input(checkpoint, args)?;
        let (store, job) = (record.store().clone(), record.job().to_string());
        let origin = Origin::of(&checkpoint.image.meta);
        let (store, origin, job, ids, quiet) = (&store, &origin, &*job, Ids::Same, true);
        let again = Again { store, checkpoint, origin, job, args, stdio, ids, quiet, is_asked_for: false };
        let mut lent = Lent::default();
        let running = |pid| {
            let now: Running = record_of(pid, checkpoint, args, stdio)?;
            let (crashes, crash) = (before.crashes, before.crash.clone());
            Ok::<_, Failure>(Running { crashes, crash, inherited: before.inherited.clone(), ..now })
        };
        let mut begun = |pid| drop(running(pid).map(|running| store.set_running(job, &running)));
        let restored = again.restore(&mut |pid| {
            begun(pid);
            if stdio == Stdio::Current {
                lent = Lent::to(pid, &checkpoint.image);
            }
        });
        let mut revived = again.or_apart(restored, signals, lent, None, &mut begun)?;
        record.runs_as(jobs::with_pumped(running(revived.back.pid)?, &revived.back.pumped))?;
        if !revived.has_checkpointer {
            record.listen();
            revived.beside = Some(record.checkpointer(revived.back.pid, &args.periodic));
        }
        Ok(revived)
    }

    /// Supervises the program to its end, and ends like it. `tell` hears that it is back; with `json`, which has more to
    /// tell, when all of its memory is. If it crashes, it may have further lives.
    pub(super) fn supervise(
        mut self,
        lives: Option<Lives>,
        line: Option<terminal::Line>,
        json: bool,
        tell: impl FnOnce(Answer) + 'static,
    ) -> Result<ExitCode> {
        let signals = self.signals.try_clone()?;
        self.beside = self.checkpointer();
        let (mut record, periodic) = (self.record.take(), self.periodic.clone());
        let life = self.live(line, lives.is_some(), json, tell);
        let end = match (lives, &mut record) {
            (Some(lives), Some(record)) => {
                life.and_then(|life| lives.outlive(life, record, &signals, &periodic))
            }
            (_, Some(record)) => life.map(|life| record.note_end(life)),
            (_, None) => life.map(|(end, _)| end),
        };
        drop(record);
        end?.follow()
    }

    /// Supervises it to the end of this life.
    pub(crate) fn live(
        mut self,
        line: Option<terminal::Line>,
        adopts: bool,
        json: bool,
        tell: impl FnOnce(Answer) + 'static,
    ) -> Result<(End, Requests)> {
        start_pumps(std::mem::take(&mut self.pumps))?;
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
        let Child { pid, pidfd } = self.child;
        let supervisor = Supervisor::new(self.signals, pid, pidfd);
        let supervisor = supervisor.with_terminal(self.lent.foreground);
        let supervisor = if adopts { supervisor.with_orphans() } else { supervisor };
        let supervisor = supervisor.with_checkpointer(self.beside.take()).with_loading(loading);
        let supervisor = supervisor.with_paging(self.paging.take());
        let within = self.inside.clone().map(|inside| inside as Rc<RefCell<dyn Within>>);
        let life = supervisor.with_within(within).watch_requests();
        drop(self.lent.settings);
        let end = |end| self.inside.map_or(end, |inside| inside.borrow_mut().end(end));
        life.map(|(seen, requests)| (end(seen), requests))
    }

    /// Who takes its checkpoints; process 1 of a private pid namespace has its own.
    fn checkpointer(&mut self) -> Option<Beside> {
        let record = self.record.as_mut().filter(|_| !self.has_checkpointer)?;
        Some(record.checkpointer(self.back.pid, &self.periodic))
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

    /// The job that it is of.
    pub(super) fn job(&self) -> &str {
        match self {
            Origin::Checkpoint { job, .. } | Origin::Program { job, .. } => job,
        }
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
pub(crate) struct Back {
    pub(crate) pid: u32,
    pub(super) private_pid: Option<u32>,
    pages: u64,
    skeleton_ms: f64,
    running_ms: f64,
    /// How its memory was loaded.
    figures: Value,
    pub(crate) notes: Vec<String>,
    /// What is brought to it, and from where: the number of the stream, and what `/proc/PID/fd` calls them.
    pub(super) pumped: Vec<(u32, Vec<u8>)>,
}

impl Back {
    pub(super) fn of(restored: &Restored, notes: Vec<String>) -> Self {
        let Restored { pid, pages, skeleton, running, .. } = *restored;
        let (skeleton_ms, running_ms) = (output::ms(skeleton), output::ms(running));
        let links = |pump: &Pump| Some(pump.links().ok()?.map(|link| (pump.number, link)));
        let pumped = restored.pumps.iter().filter_map(links).flatten().collect();
        let (private_pid, figures) = (None, Value::Null);
        let mut back = Self { pid, private_pid, pages, skeleton_ms, running_ms, figures, notes, pumped };
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
    /// The job that it is to be.
    pub(super) job: &'a str,
    pub(super) args: &'a Restore,
    pub(super) stdio: Stdio,
    pub(super) ids: Ids,
    pub(super) quiet: bool,
    /// Somebody asked for this restore, and it does not only go on with a job whose output ours is.
    pub(super) is_asked_for: bool,
}

/// A restored program, and who keeps its memory within a limit.
type Outcome = std::result::Result<(Restored, Option<Paging>), Error>;

impl Again<'_> {
    /// What came of it: in this pid namespace, or in one of its own where it could not be had here.
    fn or_apart(
        &self,
        restored: Outcome,
        signals: Signals,
        lent: Lent,
        relay: Option<BorrowedFd<'_>>,
        begun: &mut dyn FnMut(u32),
    ) -> Result<Revived> {
        let why = match &restored {
            Err(Error::PidTaken(_)) => Some(Why::Taken),
            Err(Error::PidTooHigh(_)) => Some(Why::TooHigh),
            Err(Error::NoPidPrivilege(_)) => Some(Why::Ordinary),
            _ => None,
        };
        match why.filter(|_| self.args.pid.is_none()) {
            Some(why) => private::revive(self, why, signals, relay, begun),
            None => self.revived(restored, signals, lent),
        }
    }

    /// What came of it, in this pid namespace.
    fn revived(&self, restored: Outcome, signals: Signals, lent: Lent) -> Result<Revived> {
        let (r, paging) = restored.map_err(|e| failure(e, self.origin))?;
        Ok(Revived {
            back: Back::of(&r, r.notes.clone()),
            child: Child { pid: r.pid, pidfd: r.pidfd },
            lent,
            pumps: r.pumps,
            pager: r.pager,
            paging,
            inside: None,
            has_checkpointer: false,
            record: None,
            signals,
            meta: self.checkpoint.image.meta.clone(),
            job: self.job.to_string(),
            periodic: self.args.periodic.clone(),
            beside: None,
        })
    }

    /// Restores it; also those who keep its memory within a limit, where that was asked for.
    pub(super) fn restore(&self, ready: &mut dyn FnMut(u32)) -> Outcome {
        let mut ready = |pid| {
            ready(pid);
            Ok(())
        };
        let restored = match (self.args.memory_limit, self.args.eager) {
            (Some(limit), _) => return self.restore_within(limit, &mut ready),
            (None, true) => self.rebuild(Lazily::Not, &mut ready),
            (None, false) => self.with_heard(|heard| self.rebuild(Lazily::Alone(heard), &mut ready)),
        };
        restored.map(|restored| (restored, None))
    }

    /// What is in the checkpoint counts as paged out, and stays where it is; where that cannot be, all of it is loaded first.
    fn restore_within(
        &self,
        limit: u64,
        ready: &mut dyn FnMut(u32) -> stillpoint_restore::Result<()>,
    ) -> Outcome {
        let (store, job, reader) = (self.store, self.job, &self.checkpoint.reader);
        let pinned = match self.args.eager {
            true => Ok(None),
            false => store.pin(job, reader).map_err(|e| e.to_string()).and_then(|pinned| {
                pinned
                    .map(Some)
                    .ok_or_else(|| "its checkpoint is that of another job, or is being rewritten".into())
            }),
        };
        let (mut restored, pagers) = match pinned {
            Ok(Some(pinned)) => {
                let heard = paging::heard(store, job, limit);
                let restoring = Restoring::new(store, job, limit, heard, reader, pinned);
                let restored = self.rebuild(Lazily::Paged(&restoring), ready)?;
                (restored, restoring.pagers())
            }
            not => {
                let mut restored = self.rebuild(Lazily::Not, ready)?;
                let note =
                    |why| format!("all of its memory was loaded before it is kept within its limit: {why}");
                restored.notes.extend(not.err().map(note));
                (restored, None)
            }
        };
        let (paging, why) = match pagers {
            Some(pagers) => (Some(Paging::watch(pagers)), None),
            None => Paging::begin(store, job, restored.pid, limit),
        };
        restored.notes.extend(why);
        Ok((restored, paging))
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

    /// What was said of streams, as far as it is about this checkpoint: where the program has run on since it was said, what it has
    /// under that number may be something else.
    fn streams(&self) -> Streams {
        let mut streams = self.args.streams.policy();
        if !self.is_asked_for {
            let connectable = connectable(&self.checkpoint.image);
            streams.connections.retain(|connection| connectable.contains(&connection.number));
        }
        streams
    }

    pub(super) fn options(&self) -> Options {
        let args = self.args;
        let tcp = match args.tcp {
            Tcp::Established => TcpPolicy::Established,
            Tcp::Close => TcpPolicy::Close,
        };
        let below = args.eager_below;
        Options {
            files: args.files.into(),
            tcp,
            stdio: self.stdio,
            streams: self.streams(),
            joins: self.stdio == Stdio::Current && !args.clone,
            own_output: self.is_asked_for,
            // What is loaded first is to be within the limit, with some room.
            eager_below: args.memory_limit.map_or(below, |limit| below.min(limit / 2)),
            limit: args.limit_bandwidth,
            is_followed: true,
            // A job that goes on has newer checkpoints soon.
            learns: self.is_asked_for,
            ids: self.ids,
        }
    }
}

/// A checkpoint to be restored, with its own copies of files where they are needed.
pub(super) fn load(store: &Store, name: &CheckpointName) -> Result<(Checkpoint, Option<String>)> {
    let mut checkpoint = store.load(&name.job, name.id).map_err(jobs::store_failure)?;
    let note = use_copies(store, &mut checkpoint)?;
    Ok((checkpoint, note))
}

/// Nothing that a program uses is changed by its own past; a remark tells what both write to.
fn stay_apart_if_it_runs(store: &Store, image: &mut Image, args: &Restore) -> Result<Option<String>> {
    let Some(pid) = still_runs(store, image)? else { return Ok(None) };
    let streams = stay_apart(image, args.files.into()).map_err(|e| {
        let what = Origin::of(&image.meta);
        match e {
            Error::Refused(_) => failure(e, &format!("{what} while the program still runs (process {pid})"))
                .hint("end it first, or take files as they are (--clone, or --files keep)"),
            e => failure(e, &what),
        }
    })?;
    let names: Vec<String> = streams.iter().map(ToString::to_string).collect();
    let note = || {
        format!("{}: the program, which still runs (process {pid}), writes to it as well", names.join(", "))
    };
    Ok((!names.is_empty()).then(note))
}

/// The process of a job, if it runs. One that has been killed is waited for: until its last thread is gone, its ports and files are in
/// use.
fn running(store: &Store, job: &str) -> Result<Option<Running>> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let began = Instant::now();
    loop {
        match jobs::running(store, job)? {
            Some(record) if has_ended(record.pid) && began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            found => return Ok(found),
        }
    }
}

/// The process of a checkpoint's program that runs now: as the job, or under its old id.
fn still_runs(store: &Store, image: &Image) -> Result<Option<u32>> {
    if let Some(record) = running(store, &image.meta.job)? {
        return Ok(Some(record.pid));
    }
    let first = image.processes.first().filter(|_| image.meta.host.boot_id == boot_id());
    let runs = first.filter(|process| {
        let executable = std::fs::read_link(format!("/proc/{}/exe", process.pid));
        let then = image.paths.get(process.exe as usize);
        then.is_some_and(|then| executable.is_ok_and(|now| now == then.path.as_path()))
    });
    Ok(runs.map(|process| process.pid))
}

/// Copies of files that a checkpoint brought along stand in for what is not here, or not as it was: a remark says so.
pub(crate) fn use_copies(store: &Store, checkpoint: &mut Checkpoint) -> Result<Option<String>> {
    let origin = Origin::of(&checkpoint.image.meta);
    let replaced =
        stand_in(&mut checkpoint.image, |file| store.copy_of(file)).map_err(|e| failure(e, &origin))?;
    Ok(replaced.first().map(|first| match replaced.len() {
        1 => format!("{first} is not here as it was: the checkpoint's own copy is used"),
        n => format!(
            "{first} and {} more are not here as they were: the checkpoint's own copies are used",
            n - 1
        ),
    }))
}

/// The name that the restored program runs under: that of its job, or, while that runs, a new one.
fn claim(store: &Store, job: &str) -> Result<(Claim, Vec<String>)> {
    if let Some(record) = running(store, job)? {
        let claim = jobs::claim_new(store, job)?;
        let note = format!("job {job} still runs (process {}): this one is job {}", record.pid, claim.job());
        return Ok((claim, vec![note]));
    }
    Ok((jobs::claim(store, job)?, Vec::new()))
}

pub(super) fn failure(error: Error, name: &dyn Display) -> Failure {
    match error {
        Error::Refused(things) => {
            let list: Vec<String> = things.iter().map(|t| format!("\n{t}")).collect();
            Failure::refused(format!("cannot restore {name}:{}", list.concat()))
        }
        Error::PidTaken(_) | Error::PidTooHigh(_) | Error::NoPidPrivilege(_) => {
            Failure::refused(format!("cannot restore {name}: {error}"))
                .hint("without --pid same it is restored in a private pid namespace")
        }
        Error::TooDeep(_) => Failure::refused(format!("cannot restore {name}: {error}"))
            .hint("restore it where it ran, while its process ids are free"),
        Error::Store(e) => jobs::store_failure(e),
        Error::Kernel(e) => Failure::from(e).within(&format!("restore {name}")),
        Error::Failed(what) => Failure::failed(what).within(&format!("restore {name}")),
    }
}
