//! What is seen of a job from outside: from its records in the store and from `/proc`. The program does not notice that it is
//! looked at, and nothing is asked of whoever takes its checkpoints.

use crate::failure::Result;
use crate::jobs;
use crate::output::{self, now_ns};
use crate::supervise::is_wish;
use serde_json::{Value, json};
use std::time::Duration;
use stillpoint_image::{Bytes, PAGE};
use stillpoint_linux::proc::Proc;
use stillpoint_store::history::{Event, Saved, What, Why};
use stillpoint_store::{Running, Store};

/// Bytes of a history that tell of the last few checkpoints.
const RECENT: u64 = 128 << 10;
/// No tree is followed further down.
const MOST_PROCESSES: usize = 10_000;

/// How a job fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Its checkpoints fail.
    Failing,
    /// Its supervisor was killed: nobody takes checkpoints by themselves.
    Alone,
    /// A checkpoint of it is being taken, or room is made for one.
    Checkpointing,
    /// It runs.
    Running,
    /// It is stopped, by Ctrl-Z or the like.
    Stopped,
    /// A signal has ended it.
    Crashed,
    /// It has ended.
    Ended,
}

impl State {
    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            State::Failing => "failing",
            State::Alone => "unsupervised",
            State::Checkpointing => "checkpointing",
            State::Running => "running",
            State::Stopped => "stopped",
            State::Crashed => "crashed",
            State::Ended => "ended",
        }
    }

    /// Whether there is a process.
    pub fn is_alive(self) -> bool {
        !matches!(self, State::Crashed | State::Ended)
    }
}

/// A job as it is now. What is not known is missing.
#[derive(Clone, Debug)]
pub struct Sight {
    /// Its name.
    pub job: String,
    /// Its process.
    pub pid: Option<u32>,
    /// How it fares.
    pub state: State,
    /// What there is to say about that.
    pub why: Option<String>,
    /// Resident memory of all of its processes, bytes; what several share counts for each.
    pub memory: Option<u64>,
    /// How many processes it has.
    pub processes: usize,
    /// Memory that it changes, bytes a second, from its last checkpoint but one to its last.
    pub dirty: Option<f64>,
    /// Most private memory that its process is to take, bytes.
    pub limit: Option<u64>,
    /// Memory that leaves and that comes back for that, bytes a second.
    pub paged: Option<(u64, u64)>,
    /// Its last checkpoint since it began.
    pub last: Option<Last>,
    /// How often a checkpoint is taken.
    pub interval: Option<Duration>,
    /// When the next is due, nanoseconds since 1970.
    pub next_ns: Option<u64>,
    /// How many checkpoints there are.
    pub checkpoints: usize,
    /// What it takes in the store, bytes of the medium.
    pub stored: u64,
    /// Its command line.
    pub command: Vec<Bytes>,
}

/// A checkpoint.
#[derive(Clone, Debug)]
pub struct Last {
    /// Its number.
    pub id: u64,
    /// Its instant, nanoseconds since 1970.
    pub taken_ns: u64,
    /// How long the program stood still for it.
    pub pause: Duration,
    /// How long it took.
    pub wall: Duration,
    /// Page data that it added, bytes.
    pub written: u64,
}

/// Looks at a job; nothing is seen of one that has never been.
pub fn look(store: &Store, job: &str, at_work: &dyn Fn(&str) -> bool) -> Result<Option<Sight>> {
    let running = jobs::running(store, job)?;
    let checkpoints = store.checkpoints(job).unwrap_or_default();
    let events = store.recent_history(job, RECENT).unwrap_or_default().events;
    if running.is_none() && checkpoints.is_empty() && events.is_empty() {
        return Ok(None);
    }
    let recent = Recent::of(&events);
    let (state, why) = match &running {
        None => recent.end(),
        Some(running) => state(store, job, running, at_work),
    };
    let interval = recent.interval.or(running.as_ref().and_then(|r| r.every_ns)).filter(|_| state.is_alive());
    let processes = running.as_ref().map(|r| tree(r.pid)).unwrap_or_default();
    // Records of earlier versions have no limit, and count nothing.
    let paging = jobs::paging(store, job, running.as_ref()).filter(|paging| paging.limit.is_some());
    Ok(Some(Sight {
        job: job.to_string(),
        pid: running.as_ref().map(|r| r.pid),
        state,
        why,
        memory: running.as_ref().map(|_| processes.iter().map(|(_, rss)| rss).sum()),
        processes: processes.len(),
        dirty: recent.dirty,
        limit: paging.as_ref().and_then(|paging| paging.limit),
        paged: paging.map(|paging| (paging.out_rate * PAGE, paging.in_rate * PAGE)),
        last: recent.last,
        interval: interval.map(Duration::from_nanos),
        next_ns: interval.filter(|_| state != State::Alone).and_then(|every| due(recent.anchor_ns?, every)),
        checkpoints: checkpoints.len(),
        stored: store.room(job).unwrap_or(0),
        command: running.map(|r| r.command).unwrap_or(recent.command),
    }))
}

/// How a job fares that runs, and why.
fn state(
    store: &Store,
    job: &str,
    running: &Running,
    at_work: &dyn Fn(&str) -> bool,
) -> (State, Option<String>) {
    let trouble = store.trouble(job).unwrap_or_default();
    let slow = trouble.paging.or(trouble.slow);
    if !jobs::is_supervised(running) {
        let hint = format!("its supervisor was killed; stillpoint adopt {} gives it another", running.pid);
        return (State::Alone, Some(hint));
    }
    if let Some((since_ns, what)) = trouble.failing {
        return (State::Failing, Some(format!("since {}: {what}", output::utc(since_ns))));
    }
    if at_work(job) {
        return (State::Checkpointing, slow);
    }
    match jobs::stat_of(running.pid).map(|stat| stat.state) {
        Some(b'T') => (State::Stopped, slow),
        _ => (State::Running, slow),
    }
}

/// A process and its descendants, with their resident memory, bytes.
fn tree(root: u32) -> Vec<(u32, u64)> {
    let (mut found, mut left) = (Vec::new(), vec![root]);
    while let Some(pid) = left.pop() {
        // One that has ended meanwhile is not there any more.
        let Ok(process) = Proc::process(pid) else { continue };
        let Ok(status) = process.status() else { continue };
        found.push((pid, status.rss));
        left.extend(process.children().unwrap_or_default());
        if found.len() >= MOST_PROCESSES {
            break;
        }
    }
    found
}

/// When it is time again.
fn due(anchor_ns: u64, every_ns: u64) -> Option<u64> {
    let passed = now_ns().saturating_sub(anchor_ns);
    anchor_ns.checked_add((passed / every_ns.max(1) + 1).checked_mul(every_ns)?)
}

/// What the end of a history tells of the run that it ends with.
#[derive(Default)]
struct Recent {
    last: Option<Last>,
    dirty: Option<f64>,
    interval: Option<u64>,
    anchor_ns: Option<u64>,
    command: Vec<Bytes>,
    over: Option<(State, String)>,
    was_killed: bool,
}

impl Recent {
    fn of(events: &[Event]) -> Self {
        let mut recent = Recent::default();
        for event in events {
            recent.hear(event);
        }
        recent
    }

    fn hear(&mut self, event: &Event) {
        let begun =
            |every_ns| Recent { interval: every_ns, anchor_ns: Some(event.at_ns), ..Recent::default() };
        match &event.what {
            What::Start(start) => {
                let command = start.command.iter().map(|a| Bytes(a.clone().into_bytes())).collect();
                *self = Recent { command, ..begun(start.every_ns) };
            }
            What::Restore(back) | What::Restart(back) | What::Resume(back) => {
                *self = Recent { command: std::mem::take(&mut self.command), ..begun(back.every_ns) };
            }
            What::Checkpoint(saved) => self.checkpoint(event.at_ns, saved),
            What::Failed(failed) if failed.wanted == Why::Periodic => self.anchor_ns = Some(event.at_ns),
            What::Crash { signal } => {
                let by = output::signal(*signal);
                let word = match self.was_killed && *signal == 9 {
                    true => (State::Ended, "killed after its checkpoint".into()),
                    false if is_wish(*signal) => (State::Ended, format!("asked to by {by}")),
                    false => (State::Crashed, format!("by {by}")),
                };
                self.over = Some((word.0, format!("{}, {}", word.1, output::age(event.at_ns))));
            }
            What::End { code } => {
                let with = code.map_or(String::new(), |code| format!("with exit code {code}, "));
                self.over = Some((State::Ended, format!("{with}{}", output::age(event.at_ns))));
            }
            What::Release => {
                self.over = Some((State::Ended, format!("released {}", output::age(event.at_ns))));
            }
            _ => {}
        }
    }

    fn checkpoint(&mut self, at_ns: u64, saved: &Saved) {
        let span = self.last.as_ref().and_then(|last| saved.taken_ns.checked_sub(last.taken_ns));
        let rate = |span: u64| saved.dirty_pages.map(|pages| (pages * PAGE) as f64 / (span as f64 / 1e9));
        self.dirty = span.filter(|&span| span > 0).and_then(rate);
        self.was_killed = saved.killed;
        if saved.why == Why::Periodic {
            self.interval = saved.interval_ns.or(self.interval);
            self.anchor_ns = Some(at_ns.saturating_sub(saved.wall_ns));
        }
        self.last = Some(Last {
            id: saved.id,
            taken_ns: saved.taken_ns,
            pause: Duration::from_nanos(saved.pause_ns),
            wall: Duration::from_nanos(saved.wall_ns),
            written: saved.written_bytes,
        });
    }

    /// How a job fares that does not run.
    fn end(&self) -> (State, Option<String>) {
        match &self.over {
            Some((state, why)) => (*state, Some(why.clone())),
            // Nobody was left to see it end.
            None => (State::Ended, None),
        }
    }
}

impl Sight {
    /// For programs.
    pub fn json(&self) -> Value {
        let now = now_ns();
        json!({
            "job": self.job,
            "pid": self.pid,
            "state": self.state.word(),
            "why": self.why,
            "memory_bytes": self.memory,
            "processes": self.processes,
            "dirty_bytes_per_s": self.dirty.map(f64::round),
            "limit_bytes": self.limit,
            "out_bytes_per_s": self.paged.map(|(out, _)| out),
            "in_bytes_per_s": self.paged.map(|(_, back)| back),
            "last": self.last.as_ref().map(|last| json!({
                "id": last.id,
                "taken": output::utc(last.taken_ns),
                "taken_ns": last.taken_ns,
                "pause_ms": output::ms(last.pause),
                "wall_ms": output::ms(last.wall),
                "written_bytes": last.written,
            })),
            "interval_s": self.interval.map(|i| i.as_secs_f64()),
            "next_in_s": self.next_ns.map(|at| (at.saturating_sub(now) / 1_000_000) as f64 / 1e3),
            "checkpoints": self.checkpoints,
            "stored_bytes": self.stored,
            "command": self.command.iter().map(Bytes::to_string).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_store::history::{Back, Start};

    fn checkpoint(taken_ns: u64, dirty_pages: Option<u64>) -> Event {
        let saved = Saved { taken_ns, dirty_pages, why: Why::Periodic, wall_ns: 5, ..Saved::default() };
        Event { at_ns: taken_ns + 10, what: What::Checkpoint(saved.into()) }
    }

    #[test]
    fn the_rate_is_that_between_the_last_two_checkpoints_of_a_run() {
        let start = Event { at_ns: 1, what: What::Start(Start::default()) };
        let back = Event { at_ns: 6_000_000_000, what: What::Restore(Back::default()) };
        let rate = |events: &[Event]| Recent::of(events).dirty;
        let (full, small) = (checkpoint(1_000_000_000, None), checkpoint(3_000_000_000, Some(10)));
        assert_eq!(rate(&[start.clone(), full.clone()]), None);
        assert_eq!(rate(&[start.clone(), full.clone(), small.clone()]), Some(20_480.0));
        assert_eq!(rate(&[small.clone(), small.clone()]), None, "at the same instant");
        assert_eq!(rate(&[start, full, back, small]), None, "time in between did not pass for the program");
    }

    #[test]
    fn a_killed_program_has_not_crashed() {
        let killed = Saved { killed: true, ..Saved::default() };
        let crash = Event { at_ns: 2, what: What::Crash { signal: 9 } };
        let with = Event { at_ns: 1, what: What::Checkpoint(killed.into()) };
        assert_eq!(Recent::of(std::slice::from_ref(&crash)).end().0, State::Crashed);
        assert_eq!(Recent::of(&[with, crash]).end().0, State::Ended);
        let asked = Event { at_ns: 3, what: What::Crash { signal: 15 } };
        assert_eq!(Recent::of(&[asked]).end().0, State::Ended);
    }

    #[test]
    fn the_next_is_due_on_the_beat() {
        let now = now_ns();
        let second = 1_000_000_000;
        let due = due(now - 7 * second / 2, second).expect("due");
        assert!((now..=now + second).contains(&due), "{due} {now}");
        assert_eq!((due - (now - 7 * second / 2)) % second, 0);
    }
}
