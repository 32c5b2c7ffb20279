//! Those who page a job's memory, what is heard of them, and what becomes of the job when all of them are killed.

use crate::loading::{Missed, is_served, kill_all};
use crate::output;
use crate::terminal::Line;
use rustix::fd::{AsFd, BorrowedFd};
use serde_json::{Value, json};
use std::time::Duration;
use stillpoint_image::PAGE;
use stillpoint_linux::probe::{self, Protection};
use stillpoint_linux::supervise::{Change, wait};
use stillpoint_pager::{Heard, Pagers};
use stillpoint_store::{Paged, Paging as Told, Store};

/// Between two looks whether any of them is left, once the one that is our child is not.
const PERIOD: Duration = Duration::from_millis(100);

/// Why a job is killed that waits for memory which was paged out.
const ABANDONED: &str = "those who page the memory of the program have been killed: it is killed, too; restore its last checkpoint";

/// Watches them.
pub struct Paging {
    pagers: Pagers,
    /// The one that is our child has ended: others may go on.
    is_left_to_others: bool,
    missed: Missed,
    /// Where people are told, if there are any.
    line: Option<Line>,
}

impl std::fmt::Debug for Paging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pagers.fmt(f)
    }
}

/// Who hears how the paging of a job's memory within a limit, bytes, fares: whoever lists jobs. Of what was before nothing is left.
pub fn heard(store: &Store, job: &str, limit: u64) -> Heard {
    // There is a place for it also when there is no more room.
    let _ = store.set_paging(job, &Told { limit: Some(limit), ..Told::default() });
    let (store, job) = (store.clone(), job.to_owned());
    Box::new(move |told: &Told| drop(store.set_paging(&job, told)))
}

/// How it fares, for people; nothing of what an earlier version has told.
pub fn words(told: &Told) -> Option<String> {
    let limit = output::bytes(told.limit?);
    let Paged { out, back, stops, stopped_ns, .. } = told.paged;
    if stops == 0 {
        return Some(format!("{limit}, and nothing had to leave memory"));
    }
    let (out, back) = (output::bytes(out * PAGE), output::bytes(back * PAGE));
    let (times, still) = (output::count(stops), output::short(Duration::from_nanos(stopped_ns)));
    Some(format!(
        "{limit}: {out} left memory, {back} came back; it was stopped {times} times for that, {still} in all"
    ))
}

/// How it fares, for programs; nothing of what an earlier version has told.
pub fn json(told: &Told) -> Option<Value> {
    let mut value = paged_json(&told.paged);
    value["limit_bytes"] = told.limit?.into();
    value["out_bytes_per_s"] = (told.out_rate * PAGE).into();
    value["in_bytes_per_s"] = (told.in_rate * PAGE).into();
    Some(value)
}

/// What it has come to, for programs.
pub fn paged_json(paged: &Paged) -> Value {
    let ms = |ns: u64| output::ms(Duration::from_nanos(ns));
    json!({
        "out_pages": paged.out,
        "written_pages": paged.written,
        "in_pages": paged.back,
        "stops": paged.stops,
        "stopped_ms": ms(paged.stopped_ns),
        "waited_ms": ms(paged.waited_ns),
    })
}

impl Paging {
    /// Why a program that may no more than we may will not be kept within a limit when it comes to that.
    fn doubt() -> Option<String> {
        let error = probe::userfaultfd(Protection::Waits).err()?;
        let hint = "run it as root, or set the sysctl vm.unprivileged_userfaultfd to 1";
        Some(format!(
            "its memory will not be kept within the limit, as it may not be made to wait for it ({error}): {hint}"
        ))
    }

    /// Begins to keep the memory of a process that runs within a limit, bytes. What people should be told: why it is not (the store is told,
    /// too), or will not be.
    pub fn begin(store: &Store, job: &str, pid: u32, limit: u64) -> (Option<Self>, Option<String>) {
        let heard = heard(store, job, limit);
        match stillpoint_pager::start(store, job, pid, limit, heard) {
            Ok(pagers) => (Some(Self::watch(pagers)), Self::doubt()),
            Err(e) => {
                let why = format!("its memory is not kept within the limit: {e}");
                let told = Told { limit: Some(limit), trouble: Some(why.clone()), ..Told::default() };
                let _ = store.set_paging(job, &told);
                (None, Some(why))
            }
        }
    }

    /// Begins to watch them, while standard error is still that of whoever started the job.
    pub fn watch(pagers: Pagers) -> Self {
        let line = Line::on_stderr(true);
        Self { pagers, is_left_to_others: false, missed: Missed::default(), line }
    }

    /// Our child among them.
    pub fn pid(&self) -> u32 {
        self.pagers.child.pid
    }

    /// What to wait for.
    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_left_to_others).then(|| self.pagers.child.pidfd.as_fd())
    }

    /// How long to wait at most.
    pub fn period(&self) -> Option<Duration> {
        (self.is_left_to_others && self.pagers.are_needed()).then_some(PERIOD)
    }

    /// Ends a program that misses some of its memory and has nobody left who could put it in: it would wait for ever.
    pub fn attend(&mut self, (pid, pidfd): (u32, BorrowedFd<'_>)) {
        if let Some(child) = self.source()
            && let Ok(Some(Change::Exited(_) | Change::Killed(_))) = wait(child)
        {
            self.is_left_to_others = true;
        }
        let is_over =
            self.is_left_to_others && self.pagers.are_needed() && self.missed.is_certain(|| is_served(&pid));
        if is_over {
            self.line.iter_mut().for_each(|line| line.tell(&format!("stillpoint: {ABANDONED}")));
            kill_all(&[(pid, pidfd)]);
        }
    }
}
