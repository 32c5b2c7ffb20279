//! `stillpoint restore --clone`, and [`super::fork`]: many programs from one checkpoint, beside each other and beside the original,
//! each in a pid namespace of its own in which it has its old process ids. (Twins may also be in our own, where they get new ones; then what
//! is said here of process 1 goes for a process of ours beside each twin.)
//!
//! 1. We split off process 1 of each namespace; each rebuilds its clone, all at the same time.
//! 2. A clone whose memory is to come later hands over what follows that memory, and waits. When all have, we start the page
//!    servers, out here, where the end of no namespace reaches them.
//! 3. A clone that stands hands over its pidfd, and waits. When all stand, we write down who they are, and all run. If one
//!    fails before, or we die, none does.
//! 4. We supervise the first processes, which supervise the clones, and take the clones' checkpoints: only out here it is
//!    seen who still loads their memory.

use super::private::{heard_end, last_word};
use super::restore::{Again, Back, Name, Origin, check_connections, failure, load, record_of};
use super::run::Record;
use crate::args::{Common, Files, Periodic, Restore};
use crate::checkpointer::Beside;
use crate::detach::{Answer, in_background};
use crate::failure::{Failure, Result};
use crate::lives::with_restore;
use crate::loading::{Loading, Tell};
use crate::pumps::start_pumps;
use crate::supervise::{ABANDONED, End, GiveUp, Requests, Supervisor, is_for_job, let_go, stop_at, wait_for};
use crate::terminal;
use crate::{chronicle, jobs, output};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::process::{Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use stillpoint_image::{Bytes, Meta, PAGE};
use stillpoint_linux::descriptors::{duplicate_from, null, pidfd_open, raise_descriptor_limit};
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::headroom::headroom;
use stillpoint_linux::passing;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::spawn::reap;
use stillpoint_linux::supervise::{
    Change, Child, Private, Signals, forward, private_namespace, second, wait,
};
use stillpoint_restore::files::{check_alone, in_common, set_apart};
use stillpoint_restore::{Coming, Error, Ids, Lazily, Pager, Place, Restored, Stdio, Template, Waiting};
use stillpoint_store::history::What;
use stillpoint_store::{Checkpoint, Claim, Running, Store};

/// Runs the command.
pub fn run(common: &Common, args: &Restore) -> Result<ExitCode> {
    if args.files != Files::Keep {
        return Err(Failure::usage(
            "clones take files as they are, for others use them too: --files keep is the only policy",
        ));
    }
    if !args.detach {
        return in_foreground(common, args);
    }
    in_background(
        common.json,
        |relay| Flock::revive(common, args, Stdio::Null, Some(relay)),
        |flock, tell| flock.supervise(None, common.json, tell),
    )
}

fn in_foreground(common: &Common, args: &Restore) -> Result<ExitCode> {
    // They cannot share our input. What they say goes where we would say it.
    rustix::stdio::dup2_stdin(null()?).map_err(|e| Failure::failed(format!("dup2: {e}")))?;
    let flock = Flock::revive(common, args, Stdio::Current, None)?;
    let stderr = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3);
    let (mut stderr, json) = (stderr.map(std::fs::File::from), common.json);
    let tell = move |answer: Answer| {
        let _ = stderr.as_mut().map(|stderr| stderr.write_all(answer.lines(json).as_bytes()));
    };
    let on = terminal::Line::on_stderr(!json);
    let_go()?;
    flock.supervise(on, json, tell)
}

/// What process 1 of a namespace tells.
#[derive(Serialize, Deserialize)]
enum Word {
    /// The clone waits to be served; with it come what follows its memory, and its pidfd. That with which it holds the first,
    /// which cannot be sent, is our descriptor of this number.
    Waits(Option<u32>),
    /// The clone is ready to run; with it comes its pidfd.
    Stands,
    /// It runs.
    Runs(Back),
    /// There is no clone.
    Failed(Failure),
}

/// A clone that is being rebuilt, as seen from outside.
struct Birth {
    /// Process 1 of its namespace.
    child: Child,
    line: Line,
    /// It has said so.
    waits: bool,
    waiting: Option<Waiting>,
    /// Its process id out here.
    pid: Option<u32>,
    back: Option<Back>,
}

impl Birth {
    /// Takes in what was said.
    fn hear(&mut self) -> Result<()> {
        if !self.line.fill()? {
            return Err(Failure::failed("the restore of a clone ended without a word"));
        }
        while let Some(text) = self.line.next() {
            let word = serde_json::from_str(&text);
            match word.map_err(|e| Failure::failed(format!("a clone said what it should not: {e}")))? {
                Word::Waits(held) => {
                    let (userfault, program) = (self.line.descriptor()?, self.line.descriptor()?);
                    let hold = held.and_then(|fd| duplicate_from(self.child.pidfd.as_fd(), fd).ok());
                    self.waits = true;
                    self.waiting = Some(Waiting { userfault, program, hold });
                }
                Word::Stands => self.pid = Some(process_of(&self.line.descriptor()?)?),
                Word::Runs(back) => self.back = Some(back),
                Word::Failed(failure) => return Err(failure),
            }
        }
        Ok(())
    }
}

/// The process of a pidfd.
fn process_of(pidfd: &OwnedFd) -> Result<u32> {
    match Folders::open(std::process::id())?.process_of(pidfd.as_raw_fd() as u32)? {
        Some(pid) if pid > 0 => Ok(pid as u32),
        _ => Err(Failure::failed("a clone ended before it ran")),
    }
}

/// Clones that are being rebuilt; all of them are ended if they are dropped.
#[derive(Default)]
struct Births(Vec<Birth>);

impl Births {
    /// Listens until all are so far.
    fn hear(&mut self, is_so_far: impl Fn(&Birth) -> bool) -> Result<()> {
        loop {
            let mut rest: Vec<&mut Birth> = self.0.iter_mut().filter(|birth| !is_so_far(birth)).collect();
            if rest.is_empty() {
                return Ok(());
            }
            let mut polled: Vec<PollFd<'_>> =
                rest.iter().map(|birth| PollFd::new(&birth.line.socket, PollFlags::IN)).collect();
            match poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Failure::failed(format!("poll: {e}"))),
            }
            let told: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
            for (birth, _) in rest.iter_mut().zip(told).filter(|(_, told)| *told) {
                birth.hear()?;
            }
        }
    }

    /// In a process that is none of their parents.
    fn forget(mut self) {
        self.0.clear();
    }
}

impl Drop for Births {
    fn drop(&mut self) {
        for birth in &self.0 {
            let _ = pidfd_send_signal(&birth.child.pidfd, Signal::KILL);
        }
        // Each ends when all that lives in its namespace has.
        self.0.iter().for_each(|birth| reap(birth.child.pid));
    }
}

/// Our end of the line to process 1 of a namespace.
struct Line {
    socket: UnixStream,
    heard: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Line {
    fn new(socket: UnixStream) -> Self {
        Line { socket, heard: Vec::new(), descriptors: Vec::new() }
    }

    /// Receives more; false at the end.
    fn fill(&mut self) -> Result<bool> {
        let mut room = [0; 4096];
        let received = passing::receive(&self.socket, &mut room, &mut self.descriptors)?;
        self.heard.extend_from_slice(&room[..received]);
        Ok(received > 0)
    }

    /// The next line that was received.
    fn next(&mut self) -> Option<String> {
        let end = self.heard.iter().position(|&byte| byte == b'\n')?;
        let line: Vec<u8> = self.heard.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).into_owned())
    }

    /// The next descriptor that was received.
    fn descriptor(&mut self) -> Result<OwnedFd> {
        match self.descriptors.is_empty() {
            true => Err(Failure::failed("a clone handed over less than it said")),
            false => Ok(self.descriptors.remove(0)),
        }
    }

    /// The last line, once whoever had the other end has ended.
    fn last(&mut self) -> Option<String> {
        // There is no more to come.
        self.socket.set_nonblocking(true).ok()?;
        while self.fill().unwrap_or(false) {}
        let mut last = None;
        while let Some(line) = self.next() {
            last = Some(line);
        }
        last
    }
}

/// Words to all clones at once: a byte for each of them, in a pipe that they share. One write makes it heard by all or, if we
/// die before it, by none; then the pipe ends.
struct Call {
    hear: PipeReader,
    say: PipeWriter,
}

impl Call {
    fn new() -> Result<Self> {
        let (hear, say) = std::io::pipe().map_err(|e| Failure::failed(format!("pipe: {e}")))?;
        Ok(Call { hear, say })
    }

    fn to(&mut self, clones: usize) -> Result<()> {
        let failed = |e| Failure::failed(format!("the clones do not listen: {e}"));
        self.say.write_all(&vec![b'.'; clones]).map_err(failed)
    }
}

/// Waits for a word.
fn await_call(mut call: &PipeReader) -> stillpoint_restore::Result<()> {
    call.read_exact(&mut [0]).map_err(|_| Error::Failed("whoever asked for the clones has gone".into()))
}

/// What process 1 of a namespace has to do with the outside.
struct Host {
    line: UnixStream,
    served: PipeReader,
    run: PipeReader,
}

impl Host {
    fn say(&self, word: &Word, with: &[BorrowedFd<'_>]) -> stillpoint_restore::Result<()> {
        let text = serde_json::to_string(word).unwrap_or_default() + "\n";
        Ok(passing::send(&self.line, text.as_bytes(), with)?)
    }

    /// Rebuilds the clone and tells the outside; nothing if that failed.
    fn rebuild(
        &self,
        settled: stillpoint_linux::Result<()>,
        again: &Again<'_>,
        lazily: Lazily<'_>,
        signals: &Signals,
    ) -> Result<Option<Restored>> {
        let watch = GiveUp::watch(signals, None)?;
        let restored = settled.map_err(Error::from);
        let restored = restored.and_then(|()| again.rebuild(lazily, &mut |pid| self.stands(pid)));
        drop(watch);
        match restored {
            Ok(mut restored) => {
                let notes = std::mem::take(&mut restored.notes);
                let _ = self.say(&Word::Runs(Back::of(&restored, notes)), &[]);
                Ok(Some(restored))
            }
            Err(e) => {
                let failure = match e {
                    Error::PidTaken(pid) => Failure::refused(format!(
                        "cannot restore {}: process id {pid} (or the id of one of its threads) is taken in a new pid \
                         namespace, too",
                        again.origin
                    )),
                    e => failure(e, again.origin),
                };
                let _ = self.say(&Word::Failed(failure), &[]);
                Ok(None)
            }
        }
    }

    fn stands(&self, pid: u32) -> stillpoint_restore::Result<()> {
        let handle = pidfd_open(pid, 0)?;
        // All run if the word has been given, whatever becomes of us then; and if it never is, the pipe ends.
        die_with_parent(false)?;
        self.say(&Word::Stands, &[handle.as_fd()])?;
        await_call(&self.run)
    }

    /// Supervises the clone to its end. Returns the exit code.
    fn supervise(self, restored: Restored, signals: Signals, ids: Ids) -> Result<i32> {
        let Restored { pid, pidfd, pumps, .. } = restored;
        let_go()?;
        start_pumps(pumps)?;
        let supervisor = Supervisor::new(signals, pid, pidfd);
        let supervisor = if ids == Ids::Same { supervisor.with_orphans() } else { supervisor };
        Ok(last_word(supervisor.watch()?, self.line))
    }
}

impl Place for Host {
    fn be_served(
        &self,
        userfault: BorrowedFd<'_>,
        program: BorrowedFd<'_>,
        hold: Option<BorrowedFd<'_>>,
    ) -> stillpoint_restore::Result<()> {
        let held = hold.map(|hold| hold.as_raw_fd() as u32);
        self.say(&Word::Waits(held), &[userfault, program])?;
        await_call(&self.served)
    }
}

/// Whether the end of whoever made this process ends it, too.
fn die_with_parent(with: bool) -> stillpoint_restore::Result<()> {
    rustix::process::set_parent_process_death_signal(with.then_some(Signal::KILL))
        .map_err(|e| Error::Failed(format!("PR_SET_PDEATHSIG: {e}")))
}

/// Clones that run.
pub(super) struct Flock {
    clones: Vec<Living>,
    /// Loads what is not there yet.
    pager: Option<Pager>,
    signals: Signals,
    periodic: Periodic,
    origin: Origin,
}

/// A clone that runs.
struct Living {
    /// Process 1 of its namespace.
    child: Child,
    line: Line,
    back: Back,
    name: Name,
    /// How far its memory is, where it comes later.
    coming: Option<Coming>,
    record: Option<Record>,
}

impl Flock {
    /// Brings all clones of a stored checkpoint back, or none.
    fn revive(common: &Common, args: &Restore, stdio: Stdio, relay: Option<BorrowedFd<'_>>) -> Result<Self> {
        let store = jobs::open_store(common.store.as_deref())?;
        let name = &args.checkpoint;
        let (checkpoint, stand_ins) = load(&store, name)?;
        let origin = Origin::of(&checkpoint.image.meta);
        let mut flock = Self::rebuild(store, checkpoint, origin, (args, Ids::Same), stdio, relay)?;
        flock.remark(stand_ins.as_ref());
        Ok(flock)
    }

    /// Has the answer tell something more of each.
    pub(super) fn remark(&mut self, note: Option<&String>) {
        self.clones.iter_mut().for_each(|clone| clone.back.notes.extend(note.cloned()));
    }

    /// Brings all clones back, or none; they become jobs of the store. While they are not complete, a signal (or the end of whoever
    /// listens at `relay`) ends us, and what there is of them with us.
    pub(super) fn rebuild(
        store: Store,
        mut checkpoint: Checkpoint,
        mut origin: Origin,
        (args, ids): (&Restore, Ids),
        stdio: Stdio,
        relay: Option<BorrowedFd<'_>>,
    ) -> Result<Self> {
        let signals = Signals::take()?;
        raise_descriptor_limit()?;
        let count = args.count.unwrap_or(1) as usize;
        check_connections(&checkpoint.image, args)?;
        check_alone(&checkpoint.image, count).map_err(|e| failure(e, &origin))?;
        set_apart(&mut checkpoint.image).map_err(|e| failure(e, &origin))?;
        let shared = note_of(&in_common(&checkpoint.image));
        let again = Again {
            store: &store,
            checkpoint: &checkpoint,
            origin: &origin,
            job: origin.job(),
            args,
            stdio,
            ids,
            quiet: true,
            is_asked_for: true,
        };
        check_room(&origin, &checkpoint.image.meta, count)?;
        let of = |e: Error| failure(e, &origin);
        let template = match args.eager || checkpoint.image.processes.len() > 1 {
            true => None,
            false => Some(Template::new(&checkpoint, count).map_err(of)?),
        };
        let (mut served, mut run) = (Call::new()?, Call::new()?);
        let mut births = Births::default();
        for number in 0..count {
            let (ours, theirs) = UnixStream::pair().map_err(|e| Failure::failed(format!("socket: {e}")))?;
            let split = match ids {
                Ids::Same => private_namespace(),
                Ids::New => second(),
            };
            match split {
                Err(e) if ids == Ids::New => return Err(e.into()),
                Err(e) => return Err(not_to_be_had(origin.of_many(), &e)),
                Ok(Private::Outside(child)) => births.0.push(Birth {
                    child,
                    line: Line::new(ours),
                    waits: false,
                    waiting: None,
                    pid: None,
                    back: None,
                }),
                Ok(Private::Inside(settled)) => {
                    let _ = die_with_parent(true);
                    births.forget();
                    drop((ours, served.say, run.say));
                    let host = Host { line: theirs, served: served.hear, run: run.hear };
                    let lazily = match &template {
                        None => Lazily::Not,
                        Some(template) => Lazily::Clone(template, number, &host),
                    };
                    let restored = host.rebuild(settled, &again, lazily, &signals);
                    // Nothing of the checkpoint is kept open longer than it is needed.
                    drop((template, checkpoint));
                    let code = match restored {
                        Ok(Some(restored)) => host.supervise(restored, signals, ids).ok(),
                        _ => None,
                    };
                    std::process::exit(code.unwrap_or(crate::failure::FAILED.into()))
                }
            }
        }
        let watch = GiveUp::watch(&signals, relay)?;
        let claims = claim(&store, &origin, count)?;
        births.hear(|birth| birth.waits || birth.pid.is_some())?;
        let waiting: Vec<Option<Waiting>> = births.0.iter_mut().map(|birth| birth.waiting.take()).collect();
        let to_serve = waiting.iter().flatten().count();
        let pager = match &template {
            Some(template) => again
                .with_heard(|heard| template.serve(&checkpoint, waiting, &again.options(), heard))
                .map_err(of)?,
            None => None,
        };
        served.to(to_serve)?;
        births.hear(|birth| birth.pid.is_some())?;
        let mut records = write_records(&store, &again, claims, &births);
        // From now on a signal is for the clones, and waits until they are supervised.
        drop(watch);
        run.to(count)?;
        births.hear(|birth| birth.back.is_some())?;
        origin.is_made();
        let mut clones = Vec::new();
        for (number, birth) in std::mem::take(&mut births.0).into_iter().enumerate() {
            let (job, record) = records.remove(0);
            let mut back = birth.back.unwrap_or_default();
            let inside = std::mem::replace(&mut back.pid, birth.pid.unwrap_or_default());
            back.private_pid = (ids == Ids::Same).then_some(inside);
            back.notes.extend(shared.clone());
            let record =
                record.map_err(|e| back.notes.push(format!("stillpoint ls will not show {job}: {}", e.what)));
            let mut record = record.ok();
            if let Some(record) = record.as_mut().filter(|_| !back.pumped.is_empty()) {
                let running = jobs::with_pumped(record.running().clone(), &back.pumped);
                let told = record.runs_as(running);
                back.notes.extend(told.err().map(|e| e.what));
            }
            back.notes.extend(record.iter().flat_map(|record| record.notes.clone()));
            let coming = template.as_ref().filter(|_| birth.waits).map(|template| template.coming(number));
            back.load(coming.as_ref());
            let name = Name { job, origin: origin.clone() };
            clones.push(Living { child: birth.child, line: birth.line, back, name, coming, record });
        }
        Ok(Flock { clones, pager, signals, periodic: args.periodic.clone(), origin })
    }

    /// Supervises the clones until all have ended, and ends like the first that failed. `tell` hears that they are back; with
    /// `json`, which has more to tell, when all of their memory is.
    pub(super) fn supervise(
        mut self,
        on: Option<terminal::Line>,
        json: bool,
        tell: impl FnOnce(Answer) + 'static,
    ) -> Result<ExitCode> {
        let origin = self.origin;
        let loading = match (self.pager.take(), json) {
            (Some(pager), true) => {
                let all: Vec<_> = self
                    .clones
                    .iter_mut()
                    .map(|c| (c.back.clone(), c.name.clone(), c.coming.take()))
                    .collect();
                let told: Tell = Box::new(move || {
                    let answer = |(mut back, name, coming): (Back, Name, Option<Coming>)| {
                        back.load(coming.as_ref());
                        back.answer(&name)
                    };
                    tell(together(&origin, all.into_iter().map(answer).collect()));
                });
                Some(Loading::watch(pager, Some(told)).on(on))
            }
            (pager, _) => {
                tell(together(&origin, self.clones.iter().map(Living::answer).collect()));
                pager.map(|pager| Loading::watch(pager, None).on(on))
            }
        };
        let begin = |clone: Living| {
            let mut record = clone.record;
            let checkpointer = record.as_mut().map(|r| r.checkpointer(clone.back.pid, &self.periodic));
            Ward { child: clone.child, pid: clone.back.pid, line: clone.line, record, checkpointer }
        };
        let wards = self.clones.into_iter().map(begin).collect();
        Wards { signals: self.signals, wards, leaving: Vec::new(), loading, end: End::Exited(0) }
            .watch()?
            .follow()
    }
}

/// Why there can be no clones or twins, whose `name` this is.
pub(super) fn not_to_be_had(name: &str, why: &stillpoint_linux::Error) -> Failure {
    Failure::refused(format!("{name} live in pid namespaces of their own, which are not to be had: {why}"))
        .hint("stillpoint doctor tells which privileges are missing")
}

/// A remark on files that are mapped shared, if there are any.
fn note_of(files: &[&Bytes]) -> Option<String> {
    let (first, rest) = files.split_first()?;
    let (what, is, it) = match rest.len() {
        0 => (first.to_string(), "is", "it"),
        n => (format!("{first} and {n} more"), "are", "them"),
    };
    Some(format!(
        "{what} {is} mapped shared: the program and its copies read what any of them writes to {it}"
    ))
}

/// In the end each has all of its memory to itself. Were there too little, the kernel would kill them, or others.
fn check_room(origin: &Origin, meta: &Meta, count: usize) -> Result<()> {
    let needed = meta.pages * PAGE * count as u64;
    let left = Proc::process(std::process::id()).and_then(|own| headroom(&own)).unwrap_or(u64::MAX);
    if count == 1 || needed <= left {
        return Ok(());
    }
    let (needed, left, name) = (output::bytes(needed), output::bytes(left), origin.of_many());
    let what = match origin {
        Origin::Checkpoint { .. } => origin.to_string(),
        Origin::Program { job, .. } => job.clone(),
    };
    Err(Failure::refused(format!("{count} {name} of {what} take {needed} of memory, and {left} are left"))
        .hint("ask for fewer"))
}

/// Names for the clones.
fn claim(store: &Store, origin: &Origin, count: usize) -> Result<Vec<Claim>> {
    let base = match origin {
        Origin::Checkpoint { job, .. } => job,
        // That name is the program's, also if it is no job yet.
        Origin::Program { job, .. } => &format!("{job}-twin"),
    };
    (0..count).map(|_| jobs::claim_new(store, base)).collect()
}

/// Records that they run: whoever hears of a clone by something it does finds it in the store.
fn write_records(
    store: &Store,
    again: &Again<'_>,
    claims: Vec<Claim>,
    births: &Births,
) -> Vec<(String, Result<Record>)> {
    let meta = &again.checkpoint.image.meta;
    let from = matches!(again.origin, Origin::Checkpoint { .. }).then_some(meta.id);
    let record = |(claim, birth): (Claim, &Birth)| {
        let job = claim.job().to_string();
        let pid = birth.pid.unwrap_or_default();
        let running = record_of(pid, again.checkpoint, again.args, again.stdio);
        let running = running.map(|running| Running { restored_from: from, ..running });
        let terms = with_restore(jobs::terms(store, &job, &again.args.periodic), again.args);
        // A copy that nobody saves has nothing of its own to go on from.
        let is_saved = again.args.periodic.every.is_some();
        let written = is_saved.then(|| store.set_terms(&job, &terms));
        let record = running.and_then(|running| Record::write(store.clone(), claim, running));
        let begun = |r: &Record| match from {
            None => chronicle::started(r.running()),
            Some(_) => What::Restore(chronicle::back(r.running(), Some(again.origin.job().into()), None)),
        };
        let record = record.map(|record| {
            let begun = begun(&record);
            let record = record.with_control().with_event(begun);
            match written {
                Some(written) => record.keeps(written),
                None => record,
            }
        });
        (job, record)
    };
    claims.into_iter().zip(&births.0).map(record).collect()
}

impl Living {
    fn answer(&self) -> Answer {
        self.back.answer(&self.name)
    }
}

/// One answer of many.
fn together(origin: &Origin, answers: Vec<Answer>) -> Answer {
    let line = |answer: &Answer| {
        let job = answer.json["job"].as_str().unwrap_or_default();
        format!("{job}: {}", answer.text)
    };
    let text: Vec<String> = answers.iter().map(line).collect();
    let mut notes: Vec<String> = Vec::new();
    for note in answers.iter().flat_map(|answer| &answer.notes) {
        if !notes.contains(note) {
            notes.push(note.clone());
        }
    }
    let all: Vec<Value> = answers.into_iter().map(|answer| answer.json).collect();
    Answer { text: text.join("\n"), json: json!({ origin.of_many(): all }), notes }
}

/// A clone that is supervised.
struct Ward {
    /// Process 1 of its namespace.
    child: Child,
    /// The program's id in our namespace.
    pid: u32,
    line: Line,
    record: Option<Record>,
    checkpointer: Option<Beside>,
}

/// Clones that are supervised.
struct Wards {
    signals: Signals,
    wards: Vec<Ward>,
    /// Those that take the checkpoints of clones that have ended, and are not done.
    leaving: Vec<(Beside, Option<Record>)>,
    /// Their memory, while that is still being loaded.
    loading: Option<Loading>,
    /// How the first ended that did not end well.
    end: End,
}

impl Wards {
    /// Passes signals on to all until all have ended.
    fn watch(mut self) -> Result<End> {
        loop {
            self.bury()?;
            self.loading.take_if(|l| !l.attend()).into_iter().for_each(Loading::finish);
            self.leaving.retain_mut(|(checkpointer, _)| !checkpointer.has_left());
            if self.wards.is_empty() {
                self.loading.take().into_iter().for_each(Loading::finish);
                self.leaving
                    .into_iter()
                    .for_each(|(checkpointer, _)| checkpointer.finish(&self.signals, |_| ()));
                return Ok(self.end);
            }
            self.give_up_abandoned();
            self.wards.iter_mut().filter_map(|w| w.checkpointer.as_mut()).for_each(Beside::attend);
            let mut sources = vec![self.signals.as_fd()];
            sources.extend(self.wards.iter().map(|ward| ward.child.pidfd.as_fd()));
            sources.extend(self.loading.as_ref().and_then(Loading::source));
            let checkpointers = self.wards.iter().filter_map(|ward| ward.checkpointer.as_ref());
            sources.extend(checkpointers.filter_map(Beside::source));
            sources.extend(self.leaving.iter().filter_map(|(checkpointer, _)| checkpointer.source()));
            wait_for(&sources, self.loading.as_ref().and_then(Loading::period))?;
            while let Some(signal) = self.signals.next()? {
                for child in self.wards.iter().map(|ward| &ward.child) {
                    if is_for_job(&signal, child.pid, false) {
                        forward(child.pidfd.as_fd(), &signal)?;
                    }
                }
                stop_at(&signal);
            }
        }
    }

    /// Kills those that wait for memory which nobody is left to load.
    fn give_up_abandoned(&mut self) {
        let programs: Vec<u32> = self.wards.iter().map(|ward| ward.pid).collect();
        let Some(loading) = self.loading.as_mut().filter(|_| !programs.is_empty()) else { return };
        if loading.is_abandoned(&programs) {
            loading.complain(ABANDONED);
            for ward in &self.wards {
                loading.kill_all((ward.child.pid, ward.child.pidfd.as_fd()));
            }
        }
    }

    /// Takes leave of those that have ended.
    fn bury(&mut self) -> Result<()> {
        let mut at = 0;
        while let Some(ward) = self.wards.get(at) {
            let seen = match wait(ward.child.pidfd.as_fd())? {
                Some(Change::Exited(code)) => End::Exited(code),
                Some(Change::Killed(signal)) => End::Killed(signal),
                Some(Change::Stopped(_) | Change::Continued) => continue,
                None => {
                    at += 1;
                    continue;
                }
            };
            let mut ward = self.wards.remove(at);
            let end = heard_end(seen, ward.line.last());
            if self.end == End::Exited(0) {
                self.end = end;
            }
            ward.record.iter_mut().for_each(|record| {
                record.note_end((end, Requests::default()));
            });
            // A checkpoint that was begun is brought to its end under the name of the clone.
            self.leaving.extend(ward.checkpointer.map(|checkpointer| (checkpointer, ward.record)));
        }
        Ok(())
    }
}
