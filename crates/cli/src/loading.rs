//! Memory that is loaded behind a restored program: how far it is, and who hears of it.

use crate::output;
use rustix::fd::{AsFd, BorrowedFd};
use serde_json::{Value, json};
use std::time::Duration;
use stillpoint_linux::supervise::{Change, wait};
use stillpoint_restore::Pager;
use stillpoint_restore::lazy::board::Count;

/// Between two looks at what is loaded.
const PERIOD: Duration = Duration::from_millis(20);

/// Hears when all is loaded, or will not be any more.
pub type Tell = Box<dyn FnOnce(&Pager)>;

/// The loading of a program.
pub struct Loading {
    pager: Pager,
    /// The one of its processes that is our child has ended: others may go on.
    is_left_to_others: bool,
    tell: Option<Tell>,
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pager.fmt(f)
    }
}

impl Loading {
    /// Begins to watch it.
    pub fn watch(pager: Pager, tell: Option<Tell>) -> Self {
        Self { pager, is_left_to_others: false, tell }
    }

    /// Our child among its processes.
    pub fn pid(&self) -> u32 {
        self.pager.child.pid
    }

    /// What to wait for.
    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_left_to_others).then(|| self.pager.child.pidfd.as_fd())
    }

    /// How long to wait at most.
    pub fn period(&self) -> Option<Duration> {
        (self.is_left_to_others || !self.is_loaded()).then_some(PERIOD)
    }

    /// Whether all of the program's memory is there.
    pub fn is_loaded(&self) -> bool {
        self.pager.board.get(Count::Recorded) > 0
    }

    /// Looks how far it is; whether it goes on.
    pub fn attend(&mut self) -> bool {
        if let Some(pidfd) = self.source()
            && let Ok(Some(Change::Exited(_) | Change::Killed(_))) = wait(pidfd)
        {
            self.is_left_to_others = true;
        }
        if self.is_loaded() {
            self.tell();
        }
        // Its last word is that it is done.
        self.pager.board.get(Count::Done) == 0
    }

    /// It is over, or nobody needs it any more.
    pub fn finish(mut self) {
        self.tell();
    }

    fn tell(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell(&self.pager);
        }
    }
}

/// Figures for `--json`. Without a pager all was loaded at once.
pub fn figures(pager: Option<&Pager>, pages: u64, running_ms: f64) -> Value {
    let Some(pager) = pager else {
        return json!({"lazy": false, "touch_set_pages": pages, "loaded_ms": running_ms, "demand_faults": 0,
            "demand_pages": 0, "zero_faults": 0, "prefetched_pages": 0, "page_servers": 0});
    };
    let get = |count| pager.board.get(count);
    let loaded = get(Count::LoadedUs);
    let loaded = (loaded > 0).then(|| output::ms(Duration::from_micros(loaded)));
    json!({"lazy": true, "touch_set_pages": pages - pager.pages, "loaded_ms": loaded,
        "demand_faults": get(Count::Demands), "demand_pages": get(Count::Demanded),
        "zero_faults": get(Count::ZeroDemands), "prefetched_pages": get(Count::Ahead),
        "page_servers": get(Count::Servers), "failed": pager.board.failure()})
}
