//! Memory that is loaded behind a restored program: how far it is, and who hears of it.

use crate::output;
use crate::terminal::Line;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use stillpoint_image::PAGE;
use stillpoint_linux::proc::descendants;
use stillpoint_linux::supervise::{Change, wait};
use stillpoint_linux::{descriptors, pager};
use stillpoint_restore::lazy::board::{Count, Tally};
use stillpoint_restore::{Coming, Pager};

/// Between two looks at what is loaded.
const PERIOD: Duration = Duration::from_millis(20);

/// How long loading may take before it is told how far it is, how often that is drawn, and how wide.
const PATIENCE: Duration = Duration::from_secs(1);
const DRAWN: Duration = Duration::from_millis(100);
const WIDTH: u64 = 30;
/// Between two looks whether anybody loads it.
const LOOK: Duration = Duration::from_millis(300);

/// Hears when all is loaded, or may not be any more.
pub type Tell = Box<dyn FnOnce()>;

/// The loading of a program, or of many clones.
pub struct Loading {
    pager: Pager,
    /// The one of its processes that is our child has ended: others may go on.
    is_left_to_others: bool,
    tell: Option<Tell>,
    line: Option<Line>,
    began: Instant,
    drawn: Instant,
    /// After our child had ended: whether anybody loads it.
    missed: Missed,
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pager.fmt(f)
    }
}

impl Loading {
    /// Begins to watch it.
    pub fn watch(pager: Pager, tell: Option<Tell>) -> Self {
        let now = Instant::now();
        let (line, began, drawn, missed) = (None, now, now, Missed::default());
        Self { pager, is_left_to_others: false, tell, line, began, drawn, missed }
    }

    /// Tells people here how far it is.
    pub fn on(self, line: Option<Line>) -> Self {
        Self { line, ..self }
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
            self.line = None;
        } else if self.pager.coming.failure().is_some() {
            // The rest may never come.
            self.tell();
        }
        self.show();
        // Its last word is that it is done; and our child is to be buried.
        self.pager.coming.count(Count::Done) == 0 || !self.is_left_to_others
    }

    /// Waits until its processes have left, which fill in what is missing in a core dump, but not for longer than that.
    pub fn await_end(&mut self, patience: Duration) {
        let began = Instant::now();
        while began.elapsed() < patience && !self.is_left_to_others && self.attend() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// It is over, or nobody needs it any more.
    pub fn finish(mut self) {
        self.tell();
    }

    /// Ends a program and all its processes.
    pub fn kill_all(&self, program: (u32, BorrowedFd<'_>)) {
        let members = self.pager.members.iter().map(|(pid, pidfd)| (*pid, pidfd.as_fd()));
        kill_all(&members.chain([program]).collect::<Vec<_>>());
    }

    /// Whether all those that load it were killed, and the programs will wait for ever.
    pub fn is_abandoned(&mut self, programs: &[u32]) -> bool {
        // Those who have loaded all let go of it before they leave.
        let is_over =
            self.pager.coming.tally(Tally::LoadedUs) > 0 || self.pager.coming.count(Count::Done) > 0;
        let mut members = self.pager.members.iter().map(|(pid, _)| pid).chain(programs);
        self.is_left_to_others && !is_over && self.missed.is_certain(|| members.any(is_served))
    }

    /// Tells people that it has failed.
    pub fn complain(&mut self, why: &str) {
        self.line.iter_mut().for_each(|line| line.tell(&format!("stillpoint: {why}")));
    }

    fn show(&mut self) {
        let since = self.began.elapsed();
        if since < PATIENCE || self.drawn.elapsed() < DRAWN {
            return;
        }
        self.drawn = Instant::now();
        let coming = &self.pager.coming;
        let there = [Tally::Before, Tally::Demanded, Tally::Ahead];
        let pages: u64 = there.into_iter().map(|tally| coming.tally(tally)).sum();
        let rate = (pages * PAGE) as f64 / since.as_secs_f64();
        let left = (coming.pages.saturating_sub(pages) * PAGE) as f64 / rate.max(1.0);
        let there = (pages * WIDTH / coming.pages.max(1)).min(WIDTH) as usize;
        let text = format!(
            "loading [{:<width$}] {} of {}  {}/s  {} left",
            "=".repeat(there),
            output::bytes(pages * PAGE),
            output::bytes(coming.pages * PAGE),
            output::bytes(rate as u64),
            output::short(Duration::from_secs_f64(left.min(1e6))),
            width = WIDTH as usize,
        );
        self.line.iter_mut().for_each(|line| line.show(&text));
    }

    fn tell(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell();
        }
    }
}

/// Looks for processes of ours on which a program waits, once it is not certain that there are any.
#[derive(Debug, Default)]
pub struct Missed {
    /// When it was looked last.
    when: Option<Instant>,
    /// How often in a row there was nobody.
    times: u32,
}

impl Missed {
    /// Whether there is nobody, and was not a moment ago.
    pub fn is_certain(&mut self, is_there: impl FnOnce() -> bool) -> bool {
        if self.when.is_some_and(|when| when.elapsed() < LOOK) {
            return false;
        }
        let times = if is_there() { 0 } else { self.times + 1 };
        *self = Missed { when: Some(Instant::now()), times };
        times > 1
    }
}

/// Whether somebody of ours puts pages into a process.
pub fn is_served(program: &u32) -> bool {
    !pager::servers_of(*program).is_empty()
}

/// Ends programs and all their processes. Nobody may see that another has ended: all are stopped before. And what copies of a
/// program that it has made since wait with is held by it: if it ended before them, they would go on with zeros.
pub fn kill_all(programs: &[(u32, BorrowedFd<'_>)]) {
    let send = |pidfd: BorrowedFd<'_>, signal| {
        // One that has ended meanwhile is no concern.
        let _ = pidfd_send_signal(pidfd, signal);
    };
    programs.iter().for_each(|(_, pidfd)| send(*pidfd, Signal::STOP));
    let pids: Vec<u32> = programs.iter().map(|(pid, _)| *pid).collect();
    let (mut seen, mut copies) = (BTreeSet::from_iter(pids.iter().copied()), Vec::new());
    loop {
        let new: Vec<u32> = descendants(&pids).into_iter().filter(|pid| seen.insert(*pid)).collect();
        if new.is_empty() {
            break;
        }
        let new: Vec<OwnedFd> =
            new.into_iter().filter_map(|pid| descriptors::pidfd_open(pid, 0).ok()).collect();
        new.iter().for_each(|pidfd| send(pidfd.as_fd(), Signal::STOP));
        copies.extend(new);
    }
    // Those of a clone are found with it: it comes after them.
    copies.iter().rev().for_each(|pidfd| send(pidfd.as_fd(), Signal::KILL));
    programs.iter().for_each(|(_, pidfd)| send(*pidfd, Signal::KILL));
}

/// Figures for `--json`. Where nothing comes later all was loaded at once.
pub fn figures(coming: Option<&Coming>, pages: u64, running_ms: f64) -> Value {
    let Some(coming) = coming else {
        return json!({"lazy": false, "touch_set_pages": pages, "loaded_ms": running_ms, "demand_faults": 0,
            "demand_pages": 0, "fault_times": [], "zero_faults": 0, "prefetched_pages": 0,
            "prefetched_in_vain": null, "page_servers": 0});
    };
    let tally = |tally| coming.tally(tally);
    let loaded = tally(Tally::LoadedUs);
    let times = coming.demand_times().into_iter();
    let times: Vec<_> = times.map(|(us, n)| json!([output::ms(Duration::from_micros(us)), n])).collect();
    let loaded = (loaded > 0).then(|| output::ms(Duration::from_micros(loaded)));
    json!({"lazy": true, "touch_set_pages": pages - coming.pages + tally(Tally::Before), "loaded_ms": loaded,
        "demand_faults": tally(Tally::Demands), "demand_pages": tally(Tally::Demanded),
        "fault_times": times,
        "zero_faults": tally(Tally::ZeroDemands), "prefetched_pages": tally(Tally::Ahead),
        "prefetched_in_vain": tally(Tally::InVain).checked_sub(1),
        "page_servers": coming.count(Count::Servers), "failed": coming.failure()})
}
