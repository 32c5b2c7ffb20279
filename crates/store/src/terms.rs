//! The terms on which a job runs: what was asked for when it was started, kept so that it can go on after a crash of
//! the machine.

use crate::record::Record;
use crate::{Error, Result, Store};
use std::fs::File;
use std::io;
use std::time::Duration;

/// The terms on which a job runs. They are durable, and there for exactly as long as the job is to run: whoever sees
/// its end removes them. Terms without a process are those of a job that was running when the machine, or all of its
/// processes, went down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Since when it runs on them, nanoseconds since 1970.
    pub since_ns: u64,
    /// Checkpoint that it was restored from, if it was: job and number.
    pub from: Option<(String, u64)>,
    /// Number of the newest checkpoint of an earlier run; 0 if there was none. Only newer ones are of this run.
    pub newer_than: u64,
    /// How often a checkpoint is taken, if that was asked for.
    pub every: Option<Every>,
    /// How many of the newest checkpoints such a one leaves, if not all.
    pub keep: Option<u64>,
    /// How such a one saves memory, if that was asked for.
    pub engine: Option<String>,
    /// Memory that such a one may use, bytes.
    pub buffer: Option<u64>,
    /// Mean time between failures that the user expects, nanoseconds.
    pub mtbf_ns: Option<u64>,
    /// How many times in a row it may be brought back after a crash, if at all.
    pub restart: Option<u64>,
    /// Size within which its memory was kept, bytes.
    pub memory_limit: Option<u64>,
    /// Its checkpoints from which it was brought back after a crash, only to crash again before it was past that place: others are
    /// better to go on from.
    pub tried: Vec<u64>,
    /// A checkpoint that is taken then or later shows that the job has got past the place where it crashed, nanoseconds since 1970.
    pub past_ns: Option<u64>,
    /// What becomes of files that it writes, as `restore --files` has it.
    pub files: Option<String>,
    /// What becomes of its connections, as `restore --tcp` has it.
    pub tcp: Option<String>,
    /// What becomes of pipes that led outside, as `restore --pipes` has it.
    pub pipes: Option<String>,
    /// Descriptors that were connected with files, as `restore --fd` has it.
    pub connections: Vec<String>,
}

/// How often checkpoints are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    /// Whenever so much time has passed.
    Time(Duration),
    /// As often as pays.
    Auto,
}

impl Every {
    /// The period, where it is a fixed one.
    pub fn time(self) -> Option<Duration> {
        match self {
            Every::Time(time) => Some(time),
            Every::Auto => None,
        }
    }
}

impl Terms {
    /// The checkpoints that the job may go on from, the best one first: those of this run, the newest first, and the one that it
    /// began with. Those that were tried come last, the oldest first: it has least of what led to the crash.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn checkpoints(&self, store: &Store, job: &str) -> Result<Vec<(String, u64)>> {
        let own = store.checkpoints(job)?.into_iter().filter(|&id| id > self.newer_than);
        let (tried, mut others): (Vec<u64>, Vec<u64>) = own.partition(|id| self.tried.contains(id));
        others.reverse();
        let name = |ids: Vec<u64>| ids.into_iter().map(|id| (job.to_owned(), id));
        let mut list: Vec<(String, u64)> = name(others).collect();
        if let Some((from, id)) = &self.from
            && !list.iter().any(|(of, own)| of == from && own == id)
            && !(from == job && tried.contains(id))
            && store.checkpoints(from).is_ok_and(|ids| ids.contains(id))
        {
            list.push((from.clone(), *id));
        }
        list.extend(name(tried));
        Ok(list)
    }

    /// The checkpoints that are passed over: those that were tried, as long as the job has not got past the place where it crashed.
    pub fn passed_over(&self, store: &Store, job: &str) -> &[u64] {
        match self.tried.is_empty() || self.is_past(store, job) {
            true => &[],
            false => &self.tried,
        }
    }

    /// Whether a checkpoint shows that the job has got past the place where it crashed.
    pub fn is_past(&self, store: &Store, job: &str) -> bool {
        let Some(past_ns) = self.past_ns else { return false };
        let newest = store.summary(job, None);
        newest.is_ok_and(|newest| newest.meta.id > self.newer_than && newest.meta.taken_ns >= past_ns)
    }
}

impl Store {
    /// Records on which terms a job runs that is about to begin: who ends it by way of the store removes them, and must not come
    /// before they are there. They are durable once they have been [settled](Self::settle_terms), or at once where they take the
    /// place of others, which would be lost in between.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Io`].
    pub fn set_terms(&self, job: &str, terms: &Terms) -> Result<()> {
        let folder = self.make(job)?;
        let mut record =
            Record::new("terms").number("since-ns", terms.since_ns).number("newer-than", terms.newer_than);
        if let Some((job, id)) = &terms.from {
            record = record.with("from-job", job).number("from-id", *id);
        }
        record = match terms.every {
            Some(Every::Time(time)) => record.number("every-ns", time.as_nanos() as u64),
            Some(Every::Auto) => record.with("every", "auto"),
            None => record,
        };
        let numbers = [
            ("keep", terms.keep),
            ("buffer", terms.buffer),
            ("mtbf-ns", terms.mtbf_ns),
            ("restart", terms.restart),
            ("memory-limit", terms.memory_limit),
            ("past-ns", terms.past_ns),
        ];
        for (key, value) in numbers {
            if let Some(value) = value {
                record = record.number(key, value);
            }
        }
        let texts = [
            ("engine", &terms.engine),
            ("files", &terms.files),
            ("tcp", &terms.tcp),
            ("pipes", &terms.pipes),
        ];
        for (key, value) in texts {
            if let Some(value) = value {
                record = record.with(key, value);
            }
        }
        record = terms.connections.iter().fold(record, |record, connection| record.with("fd", connection));
        record = terms.tried.iter().fold(record, |record, &id| record.number("tried", id));
        if !folder.terms().exists() {
            return record.write_for_now(&self.medium, &folder.terms());
        }
        record.write(&self.medium, &folder.terms())?;
        self.medium.sync_folder(&folder.path)
    }

    /// Makes the terms of a job durable; nothing happens if it has been ended meanwhile.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn settle_terms(&self, job: &str) -> Result<()> {
        let folder = self.known(job)?;
        let path = folder.terms();
        match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => self.medium.sync(&opened.map_err(Error::io("open", &path))?, &path)?,
        }
        self.medium.sync_folder(&folder.path)
    }

    /// On which terms a job runs, or ran when it was cut off; nothing if it has ended.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`]; [`Error::Record`] if the record is damaged.
    pub fn terms(&self, job: &str) -> Result<Option<Terms>> {
        let path = self.known(job)?.terms();
        let Some(record) = Record::read("terms", &path)? else { return Ok(None) };
        let every = match record.get("every-ns") {
            Some(ns) => Some(Every::Time(Duration::from_nanos(ns))),
            None => record.text("every").filter(|every| every == "auto").map(|_| Every::Auto),
        };
        let decode = || {
            Some(Terms {
                since_ns: record.get("since-ns")?,
                from: record.text("from-job").zip(record.get("from-id")),
                newer_than: record.get("newer-than")?,
                every,
                keep: record.get("keep"),
                engine: record.text("engine"),
                buffer: record.get("buffer"),
                mtbf_ns: record.get("mtbf-ns"),
                restart: record.get("restart"),
                memory_limit: record.get("memory-limit"),
                tried: record.numbers("tried"),
                past_ns: record.get("past-ns"),
                files: record.text("files"),
                tcp: record.text("tcp"),
                pipes: record.text("pipes"),
                connections: record.texts("fd"),
            })
        };
        decode().map(Some).ok_or(Error::Record { path, kind: "terms" })
    }

    /// The job has ended, durably; nothing happens if that is known.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn clear_terms(&self, job: &str) -> Result<()> {
        let folder = self.known(job)?;
        if !folder.terms().exists() {
            return Ok(());
        }
        self.medium.remove(&folder.terms())?;
        self.medium.sync_folder(&folder.path)
    }
}
