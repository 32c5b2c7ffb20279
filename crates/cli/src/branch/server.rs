//! The process that keeps the snapshots of a program.

use super::{Answer, Ask, ChangedFile, Place, Row, start_time};
use crate::control::{Line, server::check_peer};
use crate::failure::{FAILED, Failure, Result};
use crate::{control, jobs, taken};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use stillpoint_branch::{Error, Id, Program, Rolled, Taken, Terms};
use stillpoint_capture::Refusal;
use stillpoint_capture::attributes::target::has_ended;
use stillpoint_capture::freeze;
use stillpoint_linux::descriptors::{pidfd_open, raise_descriptor_limit};
use stillpoint_linux::local::{give_back_freed_memory, keep_freed_memory};
use stillpoint_linux::proc::descendants;
use stillpoint_store::Store;

/// How long somebody who asks may take for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// So much of the memory of pages that are not needed any more is kept for others, bytes.
const KEPT: i32 = 32 << 20;
/// How long it is waited for the first who asks.
const UNUSED: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// How long it is waited for the next before memory that is kept for others is given back.
const IDLE: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// Keeps snapshots, and does what is asked.
pub struct Keeper {
    pid: u32,
    pidfd: OwnedFd,
    store: Store,
    listener: UnixListener,
    /// The program itself, by way of its library.
    own: Option<Line>,
    /// None before the first snapshot.
    program: Option<Program>,
    /// Snapshots that the program took itself: somebody in it waits for an answer there.
    of_its_own: BTreeSet<Id>,
    /// What is still to be said of an answer to the program.
    unsaid: Vec<u8>,
    /// For how long a question of the program is waited for without sleeping.
    turns: Turns,
}

/// Who asks.
#[derive(Clone, Copy, PartialEq)]
enum Asker {
    /// The program itself.
    Program,
    /// Somebody else.
    Other,
}

/// Whether the next question is waited for without sleeping: one who asks again and again, as soon as it has its answer, would
/// wait for us to be woken, on another processor, for longer than it takes us to do much of what it asks for.
#[derive(Debug, Default)]
struct Turns {
    /// Questions that came in time since one that did not.
    in_time: u32,
}

impl Turns {
    /// How long a question may take to be waited for without sleeping.
    const LONG: Duration = Duration::from_micros(100);
    /// So many questions must have come so fast.
    const ENOUGH: u32 = 2;

    fn patience(&self) -> Duration {
        if self.in_time >= Self::ENOUGH { Self::LONG } else { Duration::ZERO }
    }

    fn note(&mut self, waited: Duration) {
        self.in_time = if waited < 2 * Self::LONG { self.in_time.saturating_add(1) } else { 0 };
    }
}

/// Whether there is more to do.
#[derive(Clone, Copy, PartialEq)]
enum Next {
    GoOn,
    Leave,
}

impl Keeper {
    /// For a process; `input` is the socket where those who ask call, or the line to the program's own library.
    pub fn new(store: &Store, pid: u32, input: OwnedFd, is_its_own: bool) -> Result<Self> {
        let failed = |e: std::io::Error| Failure::failed(format!("keep snapshots of process {pid}: {e}"));
        let pidfd = pidfd_open(pid, 0)?;
        raise_descriptor_limit()?;
        keep_freed_memory(KEPT);
        let (listener, own) = match is_its_own {
            false => (UnixListener::from(input), None),
            true => {
                let (place, line) =
                    (Place::of(store, pid, start_time(pid)?)?, Line::new(UnixStream::from(input)));
                if UnixStream::connect(place.socket()).is_ok() {
                    let failure = Failure::refused("there are snapshots of it that were taken from outside")
                        .hint(format!("stillpoint forget {pid} drops them"));
                    let _ = line.say(&Answer::Failed(failure));
                    return Err(Failure::failed("somebody else keeps its snapshots"));
                }
                let _ = std::fs::remove_file(place.socket());
                (UnixListener::bind(place.socket()).map_err(failed)?, Some(line))
            }
        };
        let store = store.clone();
        Ok(Keeper {
            pid,
            pidfd,
            store,
            listener,
            own,
            program: None,
            of_its_own: BTreeSet::new(),
            unsaid: Vec::new(),
            turns: Turns::default(),
        })
    }

    /// Serves until the program ends, or its last snapshot is forgotten.
    pub fn serve(mut self, store: &Store) -> Result<()> {
        let start_time = start_time(self.pid)?;
        loop {
            let [ended, called, spoken] = self.wait()?;
            let next = match (ended, called, spoken) {
                (true, ..) => Next::Leave,
                (_, _, true) => self.hear_the_program()?,
                (_, true, _) => self.answer_a_caller(),
                _ => Next::Leave,
            };
            // Who could not be let go runs on when we have ended.
            if next == Next::Leave || freeze::keeps_somebody() {
                break;
            }
        }
        // From here on nobody comes here any more.
        let place = Place::of(store, self.pid, start_time)?;
        let _ = std::fs::remove_file(place.socket());
        Ok(())
    }

    /// Whether the program has ended, somebody calls, the program has said something; nothing: all were silent for long.
    fn wait(&mut self) -> Result<[bool; 3]> {
        let mut sources = vec![self.pidfd.as_fd(), self.listener.as_fd()];
        sources.extend(self.own.as_ref().map(|line| line.stream().as_fd()));
        let mut polled: Vec<PollFd<'_>> =
            sources.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let is_unused = self.program.is_none() && self.own.is_none();
        let mut idle = Some(if is_unused { &UNUSED } else { &IDLE });
        let (began, at_once) = (Instant::now(), Timespec { tv_sec: 0, tv_nsec: 0 });
        let patience = self.turns.patience();
        loop {
            let turns = began.elapsed() < patience;
            match poll(&mut polled, if turns { Some(&at_once) } else { idle }) {
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Failure::failed(format!("poll: {e}"))),
                // Others may want the processor.
                Ok(0) if turns => std::thread::yield_now(),
                Ok(0) if !is_unused => {
                    give_back_freed_memory();
                    idle = None;
                }
                Ok(_) => break,
            }
        }
        self.turns.note(began.elapsed());
        let ready = |place: usize| polled.get(place).is_some_and(|p| !p.revents().is_empty());
        Ok([ready(0), ready(1), ready(2)])
    }

    fn answer_a_caller(&mut self) -> Next {
        let Ok((stream, _)) = self.listener.accept() else { return Next::GoOn };
        let limited =
            stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
        if limited.is_err() {
            return Next::GoOn;
        }
        if let Err(failure) = check_peer(&stream) {
            let _ = Line::new(stream).say(&Answer::Failed(failure));
            return Next::GoOn;
        }
        let mut line = Line::new(stream);
        let Ok(Some(ask)) = line.hear::<Ask>() else { return Next::GoOn };
        let (answer, next) = self.act(&ask, Asker::Other);
        self.finish_saying();
        // One who has gone away needs no answer.
        let _ = line.say(&answer);
        next
    }

    fn hear_the_program(&mut self) -> Result<Next> {
        let Some(line) = &mut self.own else { return Ok(Next::GoOn) };
        let Ok(Some(ask)) = line.hear::<Ask>() else {
            // It has closed it, or has become another program.
            self.own = None;
            let is_over = self.program.as_ref().is_none_or(Program::is_over);
            return Ok(if is_over { Next::Leave } else { Next::GoOn });
        };
        let (answer, next) = self.act(&ask, Asker::Program);
        self.finish_saying();
        // Of what was taken it has heard, and who asked for what was undone is no more.
        if !matches!(answer, Answer::Taken { .. } | Answer::Rolled { .. }) {
            self.say(&answer);
        }
        Ok(next)
    }

    /// Says what could not be said while the program stood still.
    fn finish_saying(&mut self) {
        let rest = std::mem::take(&mut self.unsaid);
        if let Some(line) = self.own.as_ref().filter(|_| !rest.is_empty()) {
            let _ = line.go_on(&rest);
        }
    }

    fn say(&self, answer: &Answer) {
        if let Some(line) = &self.own {
            let _ = line.say(answer);
        }
    }

    /// Does what is asked.
    fn act(&mut self, ask: &Ask, asker: Asker) -> (Answer, Next) {
        let done = match ask {
            Ask::Snapshot { name, alone } => self.snapshot(name.clone(), *alone, asker),
            Ask::Rollback { snapshot, kill_children, files, value } => {
                let terms = Terms { kill_children: *kill_children, files: (*files).into() };
                self.rollback(snapshot.as_deref(), terms, *value)
            }
            Ask::List => Ok(Answer::List(self.list())),
            Ask::Forget { snapshot } => self.forget(snapshot.as_deref()),
            Ask::Checkpoint { name } => Ok(self.checkpoint(name.as_deref())),
            Ask::Fork {} => Ok(self.fork()),
        };
        let next = match &self.program {
            Some(_) => Next::GoOn,
            None if self.own.is_some() => Next::GoOn,
            None => Next::Leave,
        };
        match done {
            Ok(answer) => (answer, next),
            // What is left of it belongs to a program that is no more.
            Err(e @ (Error::Killed(_) | Error::Capture(stillpoint_capture::Error::Replaced))) => {
                self.program = None;
                (Answer::Failed(self.failure(e, ask)), Next::Leave)
            }
            Err(e) => (Answer::Failed(self.failure(e, ask)), next),
        }
    }

    fn snapshot(&mut self, name: Option<String>, alone: bool, asker: Asker) -> Result<Answer, Error> {
        // A program that asks itself knows what it has made, and the keeper may be a child of it.
        let alone = alone || asker == Asker::Program;
        let Keeper { pid, program, own, unsaid, of_its_own, store, .. } = self;
        refuse_the_other_kind(*pid, program.as_ref(), alone)?;
        let answer = |taken: &Taken| Answer::Taken {
            snapshot: taken.id,
            pause_ms: milliseconds(taken.pause),
            pages: taken.pages,
            value: 0,
            processes: taken.processes,
            files: Vec::new(),
        };
        let mut tell = |taken: &Taken| {
            if asker == Asker::Program {
                of_its_own.insert(taken.id);
                say_at_once(own.as_ref(), &answer(taken), unsaid);
            }
        };
        let taken = match program {
            Some(program) => program.snapshot(name, tell)?,
            None => {
                let (begun, taken) = begin(store, *pid, name.as_deref(), alone)?;
                *program = Some(begun);
                tell(&taken);
                taken
            }
        };
        Ok(answer(&taken))
    }

    fn rollback(&mut self, which: Option<&str>, terms: Terms, value: i64) -> Result<Answer, Error> {
        let (_, snapshot) = self.find(which)?;
        let Keeper { program, own, unsaid, of_its_own, store, .. } = self;
        let program = program.as_mut().ok_or_else(|| Error::Unknown(snapshot.to_string()))?;
        let mut keep = |file: &Path, offset: u64, tail: &mut dyn Read| {
            Ok(store.keep_branch_tail(snapshot, file, offset, tail)?)
        };
        let files =
            |rolled: &Rolled| -> Vec<ChangedFile> { rolled.files.iter().map(ChangedFile::of).collect() };
        // Whoever took the snapshot hears of it, if it was the program itself.
        let tell = |rolled: &Rolled| {
            if of_its_own.contains(&snapshot) {
                let (pause_ms, pages, processes) =
                    (milliseconds(rolled.pause), rolled.pages, rolled.processes);
                let answer =
                    Answer::Taken { snapshot, pause_ms, pages, value, processes, files: files(rolled) };
                say_at_once(own.as_ref(), &answer, unsaid);
            }
        };
        let rolled = program.rollback(snapshot, terms, &mut keep, tell)?;
        let files = files(&rolled);
        Ok(Answer::Rolled {
            files,
            snapshot,
            pause_ms: milliseconds(rolled.pause),
            pages: rolled.pages,
            processes: rolled.processes,
            notes: rolled.notes,
        })
    }

    fn forget(&mut self, which: Option<&str>) -> Result<Answer, Error> {
        let (program, snapshot) = self.find(which)?;
        if program.forget(snapshot)? {
            self.program = None;
        }
        self.of_its_own.remove(&snapshot);
        Ok(Answer::Forgotten { snapshot })
    }

    fn checkpoint(&self, name: Option<&str>) -> Answer {
        let mut arguments = vec!["checkpoint".to_owned(), self.pid.to_string()];
        arguments.extend(name.map(|name| format!("--name={name}")));
        let id = self.command(&arguments).map(|told| told["id"].as_u64());
        answered(id, |id| Answer::Checkpointed { id })
    }

    fn fork(&self) -> Answer {
        let told = self.command(&["fork".to_owned(), self.pid.to_string(), "--isolated".into()]);
        let pid = told.map(|told| told["twins"][0]["pid"].as_u64().and_then(|pid| pid.try_into().ok()));
        answered(pid, |pid| Answer::Forked { pid })
    }

    /// Runs one of the other commands in a process of its own: nothing it does, and no end it finds, reaches the snapshots.
    fn command(&self, arguments: &[String]) -> Result<Value> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("--store").arg(self.store.path()).arg("--json").args(arguments).stdin(Stdio::null());
        let output = command.output().map_err(|e| Failure::failed(format!("start stillpoint: {e}")))?;
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).map_err(Failure::failed);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let what = said.trim_end().trim_start_matches("stillpoint: ").to_owned();
        let code = output.status.code().and_then(|code| code.try_into().ok()).unwrap_or(FAILED);
        Err(Failure { code, what, hint: None })
    }

    /// The snapshot that is meant: by number, by name (the newest of that name), or the one that the program has gone on from.
    fn find(&mut self, which: Option<&str>) -> Result<(&mut Program, Id), Error> {
        let unknown = || Error::Unknown(which.unwrap_or("").to_owned());
        let program = self.program.as_mut().ok_or_else(unknown)?;
        let Some(which) = which else {
            let current = program.current();
            return Ok((program, current));
        };
        let named = program.snapshots().filter(|(_, state)| state.name.as_deref() == Some(which)).last();
        let number = which.parse::<Id>().ok();
        let found = named.map(|(id, _)| id);
        let found = found.or_else(|| program.snapshots().map(|(id, _)| id).find(|id| Some(*id) == number));
        found.map(|id| (program, id)).ok_or_else(unknown)
    }

    fn list(&self) -> Vec<Row> {
        let Some(program) = &self.program else { return Vec::new() };
        let since =
            |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let row = |(snapshot, state): (Id, &stillpoint_branch::State)| Row {
            snapshot,
            name: state.name.clone(),
            parent: program.parent(snapshot),
            current: program.current() == snapshot,
            processes: state.processes(),
            taken_ns: since(state.at),
        };
        program.snapshots().map(row).collect()
    }

    fn failure(&self, error: Error, ask: &Ask) -> Failure {
        let verb = match ask {
            Ask::Snapshot { .. } => "take a snapshot of",
            Ask::Rollback { .. } => "roll back",
            Ask::List => "list snapshots of",
            Ask::Forget { .. } => "forget a snapshot of",
            Ask::Checkpoint { .. } => "checkpoint",
            Ask::Fork {} => "fork",
        };
        let target = format!("process {}", self.pid);
        match error {
            // Whatever could not be read or done, this is why.
            Error::Refused(_)
            | Error::Capture(_)
            | Error::Restore(_)
            | Error::Kernel(_)
            | Error::Failed(_)
                if has_ended(self.pid) =>
            {
                Failure::usage(format!("{target} has ended"))
            }
            Error::Refused(refusals) => {
                let list = stillpoint_capture::list(&refusals);
                Failure::refused(format!("cannot {verb} {target}, which runs on unharmed:\n{list}"))
            }
            Error::Unknown(_) => {
                Failure::usage(error).hint(format!("stillpoint snapshots {} lists them", self.pid))
            }
            Error::Capture(e) => taken::failure(e, verb, &target),
            Error::Kernel(e) => Failure::from(e).within(&format!("{verb} {target}")),
            error => Failure::failed(error).within(&format!("{verb} {target}")),
        }
    }
}

/// Takes the first snapshot of a program. Where it is a job, or of one, whose checkpoints follow what it writes, these give way.
fn begin(store: &Store, pid: u32, name: Option<&str>, alone: bool) -> Result<(Program, Taken), Error> {
    // The next checkpoint may come between.
    const ATTEMPTS: usize = 4;
    let begin = || Program::begin(pid, name.map(str::to_owned), alone);
    let mut begun = begin();
    for _ in 1..ATTEMPTS {
        match &begun {
            Err(Error::Capture(stillpoint_capture::Error::Followed(_)))
                if checkpoints_give_way(store, pid) =>
            {
                begun = begin();
            }
            _ => break,
        }
    }
    begun
}

/// Asks the checkpoints of the jobs that have to do with a process to give way; whether any does.
fn checkpoints_give_way(store: &Store, pid: u32) -> bool {
    let concerns =
        |of: u32| of == pid || descendants(&[of]).contains(&pid) || descendants(&[pid]).contains(&of);
    let is_followed =
        |job: &&String| jobs::running(store, job).ok().flatten().is_some_and(|job| concerns(job.pid));
    let (all, _) = jobs::within_reach(store).unwrap_or_default();
    let given: Vec<bool> =
        all.iter().filter(is_followed).map(|job| control::client::ask_for_way(store, job)).collect();
    given.contains(&true)
}

/// Refuses a snapshot of the one process where there are those of all that it has made, and the other way round.
fn refuse_the_other_kind(pid: u32, program: Option<&Program>, alone: bool) -> Result<(), Error> {
    let Some(program) = program.filter(|program| program.is_alone() != alone) else { return Ok(()) };
    let (why, hint) = match program.is_alone() {
        true if descendants(&[pid]).is_empty() => return Ok(()),
        true => (
            "there are snapshots of it alone, without the processes that it has made",
            "--alone takes another one",
        ),
        false => (
            "there are snapshots of it with all processes that it has made",
            "forget them first, or leave out --alone",
        ),
    };
    Err(Error::Refused(vec![Refusal { what: format!("process {pid}"), why: why.into(), hint: hint.into() }]))
}

/// Says to the program as much of an answer as can be said while it stands still; the rest is left.
fn say_at_once(line: Option<&Line>, answer: &Answer, unsaid: &mut Vec<u8>) {
    // One who has hung up needs no answer.
    *unsaid = line.and_then(|line| line.say_at_once(answer).ok()).unwrap_or_default();
}

/// The answer to what a command has told, if it has told it.
fn answered<T>(told: Result<Option<T>>, answer: impl FnOnce(T) -> Answer) -> Answer {
    let strange = || Failure::failed("a command gave a strange answer");
    told.and_then(|told| told.ok_or_else(strange)).map_or_else(Answer::Failed, answer)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
