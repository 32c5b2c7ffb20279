//! Those who page a job's memory, what is heard of them, and what becomes of the job when all of them are killed.

use crate::loading::{Missed, is_served, kill_all};
use crate::terminal::Line;
use rustix::fd::{AsFd, BorrowedFd};
use std::time::Duration;
use stillpoint_linux::supervise::{Change, wait};
use stillpoint_pager::{Heard, Pagers};
use stillpoint_store::Store;

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

/// Who hears what is wrong with the paging of a job's memory: whoever lists jobs. Of what was wrong before nothing is left.
pub fn heard(store: &Store, job: &str) -> Heard {
    // There is a place for it also when there is no more room.
    let _ = store.set_paging_trouble(job, None);
    let (store, job) = (store.clone(), job.to_owned());
    Box::new(move |why: Option<&str>| drop(store.set_paging_trouble(&job, why)))
}

impl Paging {
    /// Begins to keep the memory of a process that runs within a limit, bytes; or tells, here and in the store, why it is not.
    pub fn begin(store: &Store, job: &str, pid: u32, limit: u64) -> Result<Self, String> {
        stillpoint_pager::start(store, job, pid, limit, heard(store, job)).map(Self::watch).map_err(|e| {
            let why = format!("its memory is not kept within the limit: {e}");
            let _ = store.set_paging_trouble(job, Some(&why));
            why
        })
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
