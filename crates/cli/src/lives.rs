//! A job that outlives its crashes: its supervisor brings it back from its last whole checkpoint, where it was.
//!
//! What made it crash may be in that checkpoint already. So one from which the job crashed again, before it was past the place where it
//! had crashed, counts as tried, and the next life begins at an older one ([`Terms::checkpoints`]). The job is past that place when
//! it has run for as long as it had from the checkpoint to the crash, and [a minute](MARGIN) more; when a checkpoint of that
//! time is in the store, the row of crashes is over. A job that crashes at the same place each time never gets there, however
//! far it is taken back, and is given up.

use crate::args::{Periodic, Pipes, Restore};
use crate::commands::restore::{Revived, use_copies};
use crate::commands::run::Record;
use crate::failure::{Failure, Result};
use crate::supervise::{End, Requests, let_go, stop_at, wait_for};
use crate::terminal::Settings;
use crate::{chronicle, jobs, output, units};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FileType, OFlags};
use std::collections::BTreeSet;
use std::io::Write;
use std::time::{Duration, Instant};
use stillpoint_linux::descriptors::{self, keep_at, pass_on};
use stillpoint_linux::host::is_going_down;
use stillpoint_linux::proc::descendants;
use stillpoint_linux::supervise::{Signals, inherited_streams, reap_orphans};
use stillpoint_restore::Stdio;
use stillpoint_store::history::{Back, What};
use stillpoint_store::{Checkpoint, Store, Terms};

/// The first pause before a job is brought back; each further one is twice as long, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// So much later than it crashed before, a job is past that place.
const MARGIN: Duration = Duration::from_secs(60);
/// So long it may take until those whom a crashed job has left behind are no more.
const BURIAL: Duration = Duration::from_secs(10);

/// Crashes that came one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    most: u64,
    length: u64,
}

impl Row {
    /// One more crash. Returns how long to wait before the job is brought back; nothing if it is not.
    fn crash(&mut self) -> Option<Duration> {
        self.length += 1;
        if self.length > self.most {
            return None;
        }
        let doublings = u32::try_from(self.length - 1).unwrap_or(u32::MAX).min(16);
        Some((FIRST_PAUSE * 2_u32.pow(doublings)).min(LONGEST_PAUSE))
    }
}

/// What a job needs for further lives.
#[derive(Debug)]
pub struct Lives {
    row: Row,
    streams: Streams,
    /// The terminal as it was before the job.
    settings: Option<Settings>,
    /// As it is brought back.
    restore: Option<Restore>,
    /// When its first life under this supervisor began, nanoseconds since 1970.
    since_ns: u64,
    /// What is still to be told.
    untold: Vec<String>,
}

impl Lives {
    /// Gets ready, before the job begins: it may be brought back so many times in a row. Its standard streams are those of this
    /// process, or lead nowhere.
    pub fn begin(most: u64, stdio: Stdio) -> Result<Self> {
        if stdio == Stdio::Current
            && matches!(kind(std::io::stdin()), Some(FileType::Fifo | FileType::Socket))
        {
            return Err(Failure::usage(
                "--restart: standard input is a pipe or socket, and what the program has read of it cannot be read again",
            )
            .hint("give it a file, a terminal or /dev/null: stillpoint run --restart on-crash -- COMMAND </dev/null"));
        }
        // Whom the job leaves behind when it crashes would be in the way of its next life.
        let us = rustix::process::getpid();
        rustix::process::set_child_subreaper(Some(us))
            .map_err(|e| Failure::failed(format!("PR_SET_CHILD_SUBREAPER: {e}")))?;
        let row = Row { most, length: 0 };
        let current = stdio == Stdio::Current;
        let streams = if current { Streams::of_us()? } else { Streams::default() };
        if let Some(number) = streams.read_once() {
            return Err(Failure::usage(format!(
                "--restart: descriptor {number} is a pipe, and what the program has read of it cannot be read again"
            ))
            .hint(format!("give it a file instead, or close it: stillpoint run --restart on-crash -- COMMAND {number}<&-")));
        }
        let settings = current.then(Settings::keep).flatten();
        Ok(Self { row, streams, settings, restore: None, since_ns: 0, untold: Vec::new() })
    }

    /// The same for a program that was restored, which comes back in the same way each time.
    pub fn of_restored(self, args: &Restore) -> Self {
        Self { restore: Some(args.clone()), ..self }
    }

    /// Puts the streams of the job by: from here on they are not ours.
    pub fn put_by(&self) -> Result<()> {
        self.streams.put_by()
    }

    /// Brings the job back each time that it crashes, after such a life. Returns how it ended in the end.
    pub fn outlive(
        mut self,
        life: (End, Requests),
        record: &mut Record,
        signals: &Signals,
        periodic: &Periodic,
    ) -> Result<End> {
        let mut life = life;
        self.since_ns = record.running().since_ns;
        loop {
            let (end, requests) = life;
            let End::Killed(signal) = end else { return Ok(record.note_end((end, requests))) };
            if requests.explain(signal) || record.was_ended() || is_going_down() {
                return Ok(record.note_end((end, requests)));
            }
            record.ends(end);
            match self.next_life(signal, record, signals, periodic) {
                Ok(Next::Life(revived)) => life = revived.live(None, true, true, |_| ())?,
                Ok(Next::End(end)) => return Ok(record.note_end((end, requests))),
                Err(failure) => {
                    let why = failure.to_string();
                    let why = why.strip_prefix("stillpoint: ").unwrap_or(&why);
                    self.say(&format!("{} is not brought back: {why}", record.job()));
                    self.tell_by(None);
                    return Ok(end);
                }
            }
        }
    }

    fn next_life(
        &mut self,
        signal: i32,
        record: &mut Record,
        signals: &Signals,
        periodic: &Periodic,
    ) -> Result<Next> {
        let (store, job) = (record.store().clone(), record.job().to_string());
        let (died, died_ns) = (Instant::now(), output::now_ns());
        let what = output::signal(signal);
        if let Some(settings) = &self.settings {
            settings.put_back();
        }
        let mut terms = store.terms(&job).map_err(jobs::store_failure)?.unwrap_or_default();
        if terms.checkpoints(&store, &job).map_err(jobs::store_failure)?.is_empty() {
            return Err(Failure::failed(format!("{what} killed it before its first checkpoint")));
        }
        let source = source(record, &terms);
        self.judge(source.as_ref(), died_ns, &mut terms, record);
        let Some(pause) = self.row.crash() else {
            let tried = match jobs::named(&job, &terms.tried) {
                tried if tried.is_empty() => String::new(),
                tried => format!(", brought back from {tried}"),
            };
            let length = self.row.length;
            return Err(Failure::failed(format!("{what} killed it {length} times in a row{tried}")));
        };
        bury(record)?;
        let mut running = record.running().clone();
        running.crashes += 1;
        running.crash = Some((output::now_ns(), what.clone()));
        record.runs_as(running.clone())?;
        let mut notes = passing_over(&store, &job, &terms)?;
        let checkpoint = jobs::last_whole(&store, &job, &terms, &mut notes)?;
        let mut checkpoint =
            checkpoint.ok_or_else(|| Failure::failed("its checkpoints have been removed"))?;
        notes.extend(use_copies(&store, &mut checkpoint)?);
        let meta = &checkpoint.image.meta;
        // How far it had come from there at most, under this supervisor.
        let came = died_ns.saturating_sub(meta.taken_ns.max(self.since_ns));
        terms.past_ns = Some(output::now_ns() + came + (pause + MARGIN).as_nanos() as u64);
        store.set_terms(&job, &terms).map_err(jobs::store_failure)?;
        let (of, lost) = (format!("{}@{}", meta.job, meta.id), output::age(meta.taken_ns));
        self.say(&format!(
            "{what} killed {job}: it goes on from {of}, taken {lost}, in {} ({} of {} in a row)",
            output::short(pause),
            self.row.length,
            self.row.most
        ));
        notes.iter().for_each(|note| self.say(note));
        if let Some(asked) = wait(pause.saturating_sub(died.elapsed()), signals)? {
            // It would have ended the job.
            return Ok(Next::End(End::Killed(asked)));
        }
        let revived = match self.bring_back(&checkpoint, &terms, running.clone(), record, signals, periodic) {
            // What an older one needs may be gone; then there is still the one that the job was brought back from before.
            Err(refused) => {
                let last = source.filter(|last| is_newer(last, &checkpoint, &job));
                let Some((of, id)) = last else { return Err(refused) };
                self.say(&format!("{}; it goes on from {of}@{id} once more", refused.what));
                checkpoint = store.load(&of, Some(id)).map_err(jobs::store_failure)?;
                notes = use_copies(&store, &mut checkpoint)?.into_iter().collect();
                notes.iter().for_each(|note| self.say(note));
                bury(record)?;
                self.bring_back(&checkpoint, &terms, running, record, signals, periodic)?
            }
            revived => revived?,
        };
        let meta = &checkpoint.image.meta;
        let other = (meta.job != job).then(|| meta.job.clone());
        let back = chronicle::back(record.running(), other, None);
        let (attempt, waited_ns) = (self.row.length, pause.as_nanos() as u64);
        let passed = terms.tried.iter().copied().filter(|&id| id > meta.id || meta.job != job).collect();
        chronicle::tell(&store, &job, What::Restart(Back { attempt, passed, waited_ns, ..back }));
        Ok(Next::Life(Box::new(revived)))
    }

    /// What a crash says of the checkpoint that the life before it began with. The first crash says nothing: until then the
    /// job had not crashed from there.
    fn judge(&mut self, source: Option<&(String, u64)>, died_ns: u64, terms: &mut Terms, record: &Record) {
        let (store, job) = (record.store(), record.job());
        if terms.is_past(store, job) {
            self.row.length = 0;
            terms.tried.clear();
            terms.past_ns = None;
            return;
        }
        let was_past = terms.past_ns.is_some_and(|past_ns| died_ns >= past_ns);
        if let Some((of, id)) = source
            && self.row.length > 0
            && !was_past
            && of == job
            && !terms.tried.contains(id)
        {
            terms.tried.push(*id);
        }
    }

    fn bring_back(
        &mut self,
        checkpoint: &Checkpoint,
        terms: &Terms,
        running: stillpoint_store::Running,
        record: &mut Record,
        signals: &Signals,
        periodic: &Periodic,
    ) -> Result<Revived> {
        let meta = &checkpoint.image.meta;
        let mut args = match &self.restore {
            Some(args) => args.clone(),
            None => Restore { memory_limit: terms.memory_limit, ..Restore::plain(&meta.job, periodic)? },
        };
        args.checkpoint.id = Some(meta.id);
        args.checkpoint.job.clone_from(&meta.job);
        self.streams.take_back()?;
        let stdio = if self.streams.0.is_empty() { Stdio::Null } else { Stdio::Current };
        let revived = Revived::again(checkpoint, &args, stdio, record, running, signals.try_clone()?);
        let put_by = self.streams.put_by();
        let revived = revived?;
        put_by?;
        revived.back.notes.iter().for_each(|note| self.say(note));
        self.tell_by(Some(revived.back.pid));
        Ok(revived)
    }

    /// Tells the user; at once, unless standard error is a file: that one is cut back with the others when the job comes back.
    fn say(&mut self, what: &str) {
        self.untold.push(format!("stillpoint: {what}\n"));
        if self.streams.stderr().is_some_and(|stderr| !is_file(&stderr)) {
            self.tell_by(None);
        }
    }

    /// Tells what is still to be told, through the descriptor of the program where that is the same file: its offset is the
    /// one that counts then, and the program writes on behind what is told.
    fn tell_by(&mut self, program: Option<u32>) {
        let untold = std::mem::take(&mut self.untold).concat();
        let Some(ours) = self.streams.stderr() else { return };
        let theirs = program.filter(|_| is_file(&ours)).and_then(|pid| {
            let pidfd = descriptors::pidfd_open(pid, 0).ok()?;
            let theirs = descriptors::duplicate_from(pidfd.as_fd(), 2).ok()?;
            (identity(&theirs)? == identity(&ours)?).then_some(theirs)
        });
        if theirs.is_none() && is_file(&ours) {
            // Those that came back had an offset of their own, and ours is where they first were.
            let _ = rustix::fs::seek(&ours, rustix::fs::SeekFrom::End(0));
        }
        // Nobody may be left to hear it.
        let _ = std::fs::File::from(theirs.unwrap_or(ours)).write_all(untold.as_bytes());
    }
}

/// What comes after a crash.
enum Next {
    Life(Box<Revived>),
    End(End),
}

/// The checkpoint that a job was brought back from.
fn source(record: &Record, terms: &Terms) -> Option<(String, u64)> {
    let id = record.running().restored_from?;
    let from = terms.from.clone().filter(|(_, from)| *from == id);
    Some(from.unwrap_or_else(|| (record.job().to_string(), id)))
}

fn is_newer((of, id): &(String, u64), than: &Checkpoint, job: &str) -> bool {
    let meta = &than.image.meta;
    of == job && (meta.job != *job || *id > meta.id)
}

/// That there are checkpoints which the job is not brought back from.
fn passing_over(store: &Store, job: &str, terms: &Terms) -> Result<Vec<String>> {
    let best = terms.checkpoints(store, job).map_err(jobs::store_failure)?.into_iter().next();
    let there = store.checkpoints(job).map_err(jobs::store_failure)?;
    let tried: Vec<u64> = terms.tried.iter().copied().filter(|id| there.contains(id)).collect();
    if tried.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![match best {
        Some((of, id)) if of == job && tried.contains(&id) => {
            format!(
                "{job} has crashed again from each of its checkpoints; {job}@{id} is the oldest that is kept"
            )
        }
        _ => format!("{} passed over: brought back from there, {job} crashed again", are(job, &tried)),
    }])
}

fn are(job: &str, ids: &[u64]) -> String {
    format!("{} {}", jobs::named(job, ids), if ids.len() == 1 { "is" } else { "are" })
}

/// Waits; a signal that would have ended the job ends this, too, and is returned.
fn wait(pause: Duration, signals: &Signals) -> Result<Option<i32>> {
    let until = Instant::now() + pause;
    loop {
        while let Some(signal) = signals.next()? {
            if signal.would_end_us() {
                return Ok(Some(signal.signal));
            }
            stop_at(&signal);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        wait_for(&[signals.as_fd()], Some(left))?;
    }
}

/// Ends whatever a crashed job has left behind: it would hold ids and files that the next life needs. What of its memory is
/// still to come is held by others among them, and whoever waits for it would go on with zeros if those ended first: so all
/// are stopped before.
fn bury(record: &Record) -> Result<()> {
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let send = |to: &[OwnedFd], signal| {
        for pidfd in to {
            let _ = pidfd_send_signal(pidfd, signal); // one that has ended meanwhile is no concern
        }
    };
    let us = std::process::id();
    let began = Instant::now();
    while !descendants(&[us]).is_empty() {
        let (mut seen, mut stopped) = (BTreeSet::new(), Vec::new());
        loop {
            let new: Vec<u32> = descendants(&[us]).into_iter().filter(|pid| seen.insert(*pid)).collect();
            if new.is_empty() {
                break;
            }
            let pids = new.into_iter().filter_map(|pid| Pid::from_raw(pid as i32));
            let new: Vec<OwnedFd> =
                pids.filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()).collect();
            send(&new, Signal::STOP);
            stopped.extend(new);
        }
        send(&stopped, Signal::KILL);
        reap_orphans(&[])?;
        if began.elapsed() > BURIAL {
            let job = record.job();
            return Err(Failure::failed(format!("processes that {job} left behind cannot be killed")));
        }
        if !descendants(&[us]).is_empty() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    Ok(())
}

fn kind(fd: impl AsFd) -> Option<FileType> {
    rustix::fs::fstat(fd).ok().map(|stat| FileType::from_raw_mode(stat.st_mode))
}

fn is_file(fd: &OwnedFd) -> bool {
    kind(fd) == Some(FileType::RegularFile)
}

fn identity(fd: &OwnedFd) -> Option<(u64, u64)> {
    rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// The streams that a job was started with, to be its own again in its next life: the number of each, and a duplicate.
#[derive(Debug, Default)]
struct Streams(Vec<(u32, OwnedFd)>);

impl Streams {
    fn of_us() -> Result<Self> {
        let further = inherited_streams()?.into_iter().map(|(number, _)| number).filter(|number| *number > 2);
        let streams = (0..=2).chain(further);
        let streams = streams.filter_map(|number| Some((number, descriptors::inherited(number)?)));
        Ok(Self(streams.collect()))
    }

    /// A pipe besides standard input that the job can only read. One of which it has both ends, such as the tokens of `make`, is no input.
    fn read_once(&self) -> Option<u32> {
        let access = |fd: &OwnedFd| rustix::fs::fcntl_getfl(fd).map(|flags| flags & OFlags::ACCMODE).ok();
        let is_written = |of: &OwnedFd| {
            let mut others = self.0.iter().filter(|(_, fd)| identity(fd) == identity(of));
            others.any(|(_, fd)| access(fd) != Some(OFlags::RDONLY))
        };
        let mut further = self.0.iter().filter(|(number, _)| *number > 2);
        let found = further.find(|(_, fd)| {
            kind(fd) == Some(FileType::Fifo) && access(fd) == Some(OFlags::RDONLY) && !is_written(fd)
        });
        found.map(|(number, _)| *number)
    }

    /// What belongs to the job is not ours any more, but kept at its number, where it is not passed on.
    fn put_by(&self) -> Result<()> {
        for (number, _) in self.0.iter().filter(|(number, _)| *number > 2) {
            pass_on(*number, false)?;
        }
        let_go()
    }

    /// Makes them ours again.
    fn take_back(&self) -> Result<()> {
        for (number, stream) in &self.0 {
            keep_at(stream, *number)?;
        }
        Ok(())
    }

    fn stderr(&self) -> Option<OwnedFd> {
        self.0.iter().find(|(number, _)| *number == 2)?.1.try_clone().ok()
    }
}

/// On which terms a restored program runs, where it is brought back.
pub fn with_restore(terms: Terms, args: &Restore) -> Terms {
    use clap::ValueEnum;
    let name = |value: Option<clap::builder::PossibleValue>| value.map(|value| value.get_name().to_string());
    Terms {
        restart: args.restart,
        memory_limit: args.memory_limit,
        files: name(args.files.to_possible_value()),
        tcp: name(args.tcp.to_possible_value()),
        // Later nobody has what was there for this restore.
        pipes: name(args.streams.pipes.to_possible_value()).filter(|_| args.streams.pipes != Pipes::Follow),
        connections: args.streams.connections.iter().filter_map(units::told_connection).collect(),
        ..terms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_crashes_ends() {
        let mut row = Row { most: 3, length: 0 };
        let ms = |pause: Option<Duration>| pause.map(|pause| pause.as_millis());
        assert_eq!([(); 4].map(|()| ms(row.crash())), [Some(250), Some(500), Some(1000), None]);
    }

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let mut row = Row { most: u64::MAX, length: 0 };
        let pauses: Vec<Duration> = (0..100).filter_map(|_| row.crash()).collect();
        assert!(pauses.is_sorted() && pauses.len() == 100);
        assert_eq!(pauses.last(), Some(&LONGEST_PAUSE));
    }
}
