//! Memory that is loaded behind a restored program: how far it is, and who hears of it.

use crate::output;
use rustix::fd::{AsFd, BorrowedFd};
use serde_json::{Value, json};
use std::time::Duration;
use stillpoint_linux::supervise::{Change, wait};
use stillpoint_restore::lazy::board::{Count, Tally};
use stillpoint_restore::{Coming, Pager};

/// Between two looks at what is loaded.
const PERIOD: Duration = Duration::from_millis(20);

/// Hears when all is loaded, or will not be any more.
pub type Tell = Box<dyn FnOnce()>;

/// The loading of a program, or of many clones.
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
        self.pager.coming.tally(Tally::Recorded) > 0
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
        self.pager.coming.count(Count::Done) == 0
    }

    /// It is over, or nobody needs it any more.
    pub fn finish(mut self) {
        self.tell();
    }

    fn tell(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell();
        }
    }
}

/// Figures for `--json`. Where nothing comes later all was loaded at once.
pub fn figures(coming: Option<&Coming>, pages: u64, running_ms: f64) -> Value {
    let Some(coming) = coming else {
        return json!({"lazy": false, "touch_set_pages": pages, "loaded_ms": running_ms, "demand_faults": 0,
            "demand_pages": 0, "fault_times": [], "zero_faults": 0, "prefetched_pages": 0, "page_servers": 0});
    };
    let tally = |tally| coming.tally(tally);
    let loaded = tally(Tally::LoadedUs);
    let times = coming.demand_times().into_iter();
    let times: Vec<_> = times.map(|(us, n)| json!([output::ms(Duration::from_micros(us)), n])).collect();
    let loaded = (loaded > 0).then(|| output::ms(Duration::from_micros(loaded)));
    json!({"lazy": true, "touch_set_pages": pages - coming.pages, "loaded_ms": loaded,
        "demand_faults": tally(Tally::Demands), "demand_pages": tally(Tally::Demanded),
        "fault_times": times,
        "zero_faults": tally(Tally::ZeroDemands), "prefetched_pages": tally(Tally::Ahead),
        "page_servers": coming.count(Count::Servers), "failed": coming.failure()})
}
