//! The process that keeps the snapshots of a program.

use super::{Answer, Ask, Place, Row, start_time};
use crate::control::{Line, server::check_peer};
use crate::failure::{FAILED, Failure, Result};
use crate::taken;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};
use stillpoint_branch::{Error, Id, Program};
use stillpoint_linux::descriptors::{pidfd_open, raise_descriptor_limit};
use stillpoint_store::Store;

/// How long somebody who asks may take for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long it is waited for the first who asks.
const IDLE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Keeps snapshots, and does what is asked.
pub struct Keeper {
    pid: u32,
    pidfd: OwnedFd,
    store: PathBuf,
    listener: UnixListener,
    /// The program itself, by way of its library.
    own: Option<Line>,
    /// None before the first snapshot.
    program: Option<Program>,
    /// Snapshots that the program took itself: somebody in it waits for an answer there.
    of_its_own: BTreeSet<Id>,
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
        let store = store.path().to_owned();
        Ok(Keeper { pid, pidfd, store, listener, own, program: None, of_its_own: BTreeSet::new() })
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
            if next == Next::Leave {
                break;
            }
        }
        // From here on nobody comes here any more.
        let place = Place::of(store, self.pid, start_time)?;
        let _ = std::fs::remove_file(place.socket());
        Ok(())
    }

    /// Whether the program has ended, somebody calls, the program has said something; nothing: all were silent for long.
    fn wait(&self) -> Result<[bool; 3]> {
        let mut sources = vec![self.pidfd.as_fd(), self.listener.as_fd()];
        sources.extend(self.own.as_ref().map(|line| line.stream().as_fd()));
        let mut polled: Vec<PollFd<'_>> =
            sources.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let idle = (self.program.is_none() && self.own.is_none()).then_some(&IDLE);
        loop {
            match poll(&mut polled, idle) {
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Failure::failed(format!("poll: {e}"))),
                Ok(_) => break,
            }
        }
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
        let (answer, next) = self.act(&ask);
        if let Answer::Rolled { snapshot, pause_ms, pages, .. } = answer
            && let Ask::Rollback { value, .. } = ask
        {
            self.tell_the_program(snapshot, pause_ms, pages, value);
        }
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
        let (answer, next) = self.act(&ask);
        match (&answer, &ask) {
            // Who asked is no more. Whoever took the snapshot hears.
            (Answer::Rolled { snapshot, pause_ms, pages, .. }, Ask::Rollback { value, .. }) => {
                self.tell_the_program(*snapshot, *pause_ms, *pages, *value);
            }
            (Answer::Taken { snapshot, .. }, _) => {
                self.of_its_own.insert(*snapshot);
                self.say(&answer);
            }
            _ => self.say(&answer),
        }
        Ok(next)
    }

    /// Tells whoever waits in the program that it is back.
    fn tell_the_program(&self, snapshot: Id, pause_ms: f64, pages: u64, value: i64) {
        if self.of_its_own.contains(&snapshot) {
            self.say(&Answer::Taken { snapshot, pause_ms, pages, value });
        }
    }

    fn say(&self, answer: &Answer) {
        if let Some(line) = &self.own {
            let _ = line.say(answer);
        }
    }

    /// Does what is asked.
    fn act(&mut self, ask: &Ask) -> (Answer, Next) {
        let done = match ask {
            Ask::Snapshot { name } => self.snapshot(name.clone()),
            Ask::Rollback { snapshot, kill_children, .. } => {
                self.rollback(snapshot.as_deref(), *kill_children)
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

    fn snapshot(&mut self, name: Option<String>) -> Result<Answer, Error> {
        let taken = match &mut self.program {
            Some(program) => program.snapshot(name)?,
            None => {
                let (program, taken) = Program::begin(self.pid, name)?;
                self.program = Some(program);
                taken
            }
        };
        Ok(Answer::Taken {
            snapshot: taken.id,
            pause_ms: milliseconds(taken.pause),
            pages: taken.pages,
            value: 0,
        })
    }

    fn rollback(&mut self, which: Option<&str>, kill_children: bool) -> Result<Answer, Error> {
        let (program, snapshot) = self.find(which)?;
        let rolled = program.rollback(snapshot, kill_children)?;
        Ok(Answer::Rolled {
            snapshot,
            pause_ms: milliseconds(rolled.pause),
            pages: rolled.pages,
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
        command.arg("--store").arg(&self.store).arg("--json").args(arguments).stdin(Stdio::null());
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

/// The answer to what a command has told, if it has told it.
fn answered<T>(told: Result<Option<T>>, answer: impl FnOnce(T) -> Answer) -> Answer {
    let strange = || Failure::failed("a command gave a strange answer");
    told.and_then(|told| told.ok_or_else(strange)).map_or_else(Answer::Failed, answer)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
