//! What a report tells: the history of a job, with what the store still has of it.

use crate::jobs;
use crate::output::now_ns;
use crate::paging::paged_json;
use crate::supervise::is_wish;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use stillpoint_store::history::{Earlier, Event, Failed, Saved, What};
use stillpoint_store::{Paged, Store};

/// A checkpoint that was begun while a program ran may be committed so many nanoseconds after its end was seen.
const LATE: u64 = 60_000_000_000;

/// A time in which the program ran.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its begin, nanoseconds since 1970.
    pub begin_ns: u64,
    /// Its end, or now.
    pub end_ns: u64,
    /// It goes on.
    pub is_on: bool,
}

/// What kind of thing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A program was started, or adopted.
    Start,
    /// It was brought back.
    Back,
    /// A signal ended it.
    Crash,
    /// It ended.
    End,
    /// A checkpoint failed.
    Failed,
}

impl Kind {
    /// All there are.
    pub const ALL: [Kind; 5] = [Kind::Start, Kind::Back, Kind::Crash, Kind::Failed, Kind::End];

    /// In words, for a legend.
    pub fn words(self) -> &'static str {
        match self {
            Kind::Start => "started",
            Kind::Back => "brought back",
            Kind::Crash => "ended by a signal",
            Kind::End => "ended",
            Kind::Failed => "checkpoint failed",
        }
    }

    /// The class of its marks.
    pub fn class(self) -> &'static str {
        match self {
            Kind::Start => "start",
            Kind::Back => "back",
            Kind::Crash => "crash",
            Kind::End => "end",
            Kind::Failed => "failed",
        }
    }
}

/// Something besides checkpoints that happened.
#[derive(Clone, Debug)]
pub struct Mark {
    /// When, nanoseconds since 1970.
    pub at_ns: u64,
    /// What kind of thing.
    pub kind: Kind,
    /// What exactly.
    pub words: String,
}

/// All that a report tells.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The job.
    pub job: String,
    /// Its store.
    pub store: String,
    /// The command line that it was started with last.
    pub command: Vec<String>,
    /// When this was so, nanoseconds since 1970.
    pub now_ns: u64,
    /// Checkpoints, oldest first.
    pub saved: Vec<Saved>,
    /// Those that are still there.
    pub kept: BTreeSet<u64>,
    /// What else happened, oldest first.
    pub marks: Vec<Mark>,
    /// When it ran, oldest first, apart.
    pub runs: Vec<Run>,
    /// Checkpoints since the program was started last; those of an earlier run had other addresses.
    pub lineage: usize,
    /// What older events came to that are left out.
    pub earlier: Earlier,
    /// So many lines of the history could not be read.
    pub unreadable: usize,
    /// What it takes in the store, bytes.
    pub stored: u64,
    /// What the paging of its memory has come to, if it runs and that is kept within a limit.
    pub paging: Option<Paged>,
}

impl Facts {
    /// What is known of a job; nothing of one that has never been.
    pub fn of(store: &Store, job: &str) -> crate::failure::Result<Option<Self>> {
        let Ok(history) = store.history(job) else { return Ok(None) };
        let running = jobs::running(store, job)?;
        let kept: BTreeSet<u64> = store.checkpoints(job).unwrap_or_default().into_iter().collect();
        if history.events.is_empty() && kept.is_empty() && running.is_none() {
            return Ok(None);
        }
        let mut facts = Facts {
            job: job.to_string(),
            store: store.path().display().to_string(),
            now_ns: now_ns(),
            unreadable: history.unreadable,
            stored: store.room(job).unwrap_or(0),
            paging: jobs::paging(store, job, running.as_ref())
                .and_then(|paging| paging.limit.map(|_| paging.paged)),
            ..Facts::default()
        };
        history.events.into_iter().for_each(|event| facts.hear(event));
        // Of those that the history does not know, their manifests tell.
        let known: BTreeSet<u64> = facts.saved.iter().map(|s| s.id).collect();
        for id in kept.difference(&known) {
            let Ok(summary) = store.summary(job, Some(*id)) else { continue };
            facts.saved.push(Saved {
                id: *id,
                taken_ns: summary.meta.taken_ns,
                engine: summary.meta.engine,
                label: summary.meta.label,
                pause_ns: summary.meta.pause_ns,
                pages: summary.meta.pages,
                written_bytes: summary.meta.written_bytes,
                manifest_bytes: summary.manifest_bytes,
                ..Saved::default()
            });
        }
        facts.saved.sort_by_key(|s| (s.taken_ns, s.id));
        facts.kept = kept;
        facts.close(running.is_some());
        Ok(Some(facts))
    }

    fn hear(&mut self, event: Event) {
        let at_ns = event.at_ns;
        match event.what {
            What::Start(start) => {
                self.lineage = self.saved.len();
                self.begin(at_ns);
                let words = if start.adopted { "adopted" } else { "started" };
                self.mark(at_ns, Kind::Start, format!("{words} as process {}", start.pid));
                self.command = start.command;
            }
            What::Restore(back) => {
                let from = back.job.unwrap_or_else(|| self.job.clone());
                self.back(at_ns, format!("restored from {from}@{}", back.from));
            }
            What::Restart(back) => {
                let from = back.job.as_ref().unwrap_or(&self.job);
                let past = match back.passed.as_slice() {
                    [] => String::new(),
                    passed => format!(", passing over {}", jobs::named(&self.job, passed)),
                };
                self.back(at_ns, format!("restarted from {from}@{} after a crash{past}", back.from))
            }
            What::Resume(back) => self.back(at_ns, format!("resumed from {}@{}", self.job, back.from)),
            What::Checkpoint(saved) => {
                self.run_on(at_ns);
                saved.merged.iter().for_each(|merged| self.leave_out(merged));
                self.saved.push(*saved);
            }
            What::Failed(failed) => self.failed(at_ns, &failed),
            What::Crash { signal } => {
                let is_wanted = signal == 9 && self.saved.last().is_some_and(|s| s.killed);
                let by = crate::output::signal(signal);
                match is_wanted {
                    true => self.end(at_ns, Kind::End, "killed after its checkpoint".into()),
                    false if is_wish(signal) => {
                        self.end(at_ns, Kind::End, format!("ended, asked to by {by}"))
                    }
                    false => self.end(at_ns, Kind::Crash, format!("ended by {by}")),
                }
            }
            What::End { code: Some(code) } => {
                self.end(at_ns, Kind::End, format!("ended with exit code {code}"))
            }
            What::End { code: None } => self.end(at_ns, Kind::End, "ended".into()),
            What::Release => self.end(at_ns, Kind::End, "released".into()),
            What::Earlier(earlier) => self.leave_out(&earlier),
            What::Unknown => {}
        }
    }

    fn back(&mut self, at_ns: u64, words: String) {
        self.begin(at_ns);
        self.mark(at_ns, Kind::Back, words);
    }

    fn failed(&mut self, at_ns: u64, failed: &Failed) {
        self.run_on(at_ns);
        self.earlier.failed += failed.others;
        let others = match failed.others {
            0 => String::new(),
            n => format!(" (and {n} others before, for the same reason)"),
        };
        let what = if failed.refused { "checkpoint refused" } else { "checkpoint failed" };
        self.mark(at_ns, Kind::Failed, format!("{what}: {}{others}", failed.reason));
    }

    fn leave_out(&mut self, other: &Earlier) {
        let sums = &mut self.earlier;
        sums.checkpoints += other.checkpoints;
        sums.failed += other.failed;
        sums.crashes += other.crashes;
        sums.written_bytes = sums.written_bytes.saturating_add(other.written_bytes);
        sums.dirty_pages = sums.dirty_pages.saturating_add(other.dirty_pages);
        sums.stopped_ns = sums.stopped_ns.saturating_add(other.stopped_ns);
        sums.longest_pause_ns = sums.longest_pause_ns.max(other.longest_pause_ns);
        if sums.since_ns == 0 || other.since_ns < sums.since_ns {
            sums.since_ns = other.since_ns;
        }
    }

    fn mark(&mut self, at_ns: u64, kind: Kind, words: String) {
        self.marks.push(Mark { at_ns, kind, words });
    }

    /// Of the run before nobody saw the end if it goes on here.
    fn begin(&mut self, at_ns: u64) {
        self.runs.iter_mut().for_each(|run| run.is_on = false);
        let at_ns = at_ns.max(self.runs.last().map_or(0, |run| run.end_ns));
        self.runs.push(Run { begin_ns: at_ns, end_ns: at_ns, is_on: true });
    }

    /// It was seen to run.
    fn run_on(&mut self, at_ns: u64) {
        match self.runs.last_mut() {
            Some(run) if run.is_on => run.end_ns = run.end_ns.max(at_ns),
            // A checkpoint of a program that is no job, or one that outlived its job's end.
            Some(run) if at_ns <= run.end_ns.saturating_add(LATE) => run.end_ns = run.end_ns.max(at_ns),
            _ => self.runs.push(Run { begin_ns: at_ns, end_ns: at_ns, is_on: true }),
        }
    }

    fn end(&mut self, at_ns: u64, kind: Kind, words: String) {
        self.run_on(at_ns);
        self.runs.iter_mut().for_each(|run| run.is_on = false);
        self.mark(at_ns, kind, words);
    }

    fn close(&mut self, is_running: bool) {
        let now_ns = self.now_ns;
        if self.runs.is_empty() {
            self.runs.extend(self.saved.first().zip(self.saved.last()).map(|(first, last)| Run {
                begin_ns: first.taken_ns,
                end_ns: last.taken_ns,
                is_on: is_running,
            }));
        }
        if let Some(run) = self.runs.last_mut() {
            run.is_on = is_running;
            if is_running {
                run.end_ns = run.end_ns.max(now_ns);
            }
        }
        self.lineage = self.lineage.min(self.saved.len());
    }

    /// How many things of a kind happened, also of those that are left out.
    pub fn count(&self, kind: Kind) -> u64 {
        let earlier = match kind {
            Kind::Crash => self.earlier.crashes,
            Kind::Failed => self.earlier.failed,
            _ => 0,
        };
        earlier + self.marks.iter().filter(|m| m.kind == kind).count() as u64
    }

    /// All checkpoints there ever were.
    pub fn checkpoints(&self) -> u64 {
        self.saved.len() as u64 + self.earlier.checkpoints
    }

    /// All page data that was ever added, bytes.
    pub fn written(&self) -> u64 {
        self.saved.iter().fold(self.earlier.written_bytes, |sum, s| sum.saturating_add(s.written_bytes))
    }

    /// The pauses below which so many of a hundred are.
    pub fn pause(&self, percent: usize) -> Option<Duration> {
        let mut pauses: Vec<u64> = self.saved.iter().map(|s| s.pause_ns).collect();
        pauses.sort_unstable();
        if percent >= 100 {
            let longest = pauses.last().copied().max(Some(self.earlier.longest_pause_ns).filter(|&p| p > 0));
            return longest.map(Duration::from_nanos);
        }
        let rank = (pauses.len() * percent).div_ceil(100).saturating_sub(1);
        pauses.get(rank).map(|&ns| Duration::from_nanos(ns))
    }

    /// How long it has run.
    pub fn uptime(&self) -> Duration {
        self.runs.iter().map(|run| Duration::from_nanos(run.end_ns.saturating_sub(run.begin_ns))).sum()
    }

    /// How long it stood still for its checkpoints.
    pub fn stood_still(&self) -> Duration {
        let earlier = Duration::from_nanos(self.earlier.stopped_ns);
        earlier
            + self
                .saved
                .iter()
                .flat_map(|s| [s.pause_ns, s.other_stops_ns])
                .map(Duration::from_nanos)
                .sum::<Duration>()
    }

    /// The run that a time is in, counted from 1.
    pub fn run_of(&self, at_ns: u64) -> usize {
        self.runs.partition_point(|run| run.begin_ns <= at_ns)
    }

    /// What the paging of its memory came to in all runs, as far as their checkpoints tell; nothing if there was no limit.
    pub fn paged(&self) -> Option<Paged> {
        let mut last_of_run = BTreeMap::new();
        for saved in &self.saved {
            if let Some(paged) = saved.paged {
                last_of_run.insert(self.run_of(saved.taken_ns), paged);
            }
        }
        if let Some(now) = self.paging {
            last_of_run.insert(self.run_of(self.now_ns), now);
        }
        last_of_run.into_values().reduce(|sum, run| Paged {
            out: sum.out + run.out,
            written: sum.written + run.written,
            back: sum.back + run.back,
            stops: sum.stops + run.stops,
            stopped_ns: sum.stopped_ns + run.stopped_ns,
            waited_ns: sum.waited_ns + run.waited_ns,
        })
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let ms = |percent| self.pause(percent).map(crate::output::ms);
        json!({
            "job": self.job,
            "checkpoints": self.checkpoints(),
            "failed": self.count(Kind::Failed),
            "crashes": self.count(Kind::Crash),
            "brought_back": self.count(Kind::Back),
            "kept": self.kept,
            "pause_ms": {"median": ms(50), "p99": ms(99), "max": ms(100)},
            "written_bytes": self.written(),
            "stored_bytes": self.stored,
            "paged": self.paged().as_ref().map(paged_json),
            "uptime_s": crate::output::ms(self.uptime()).round() / 1e3,
            "runs": self.runs.len(),
        })
    }
}
