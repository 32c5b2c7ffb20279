//! Who gets a processor where they are few: the program, those who put in what it waits for, and those who fill in ahead.

use rustix::time::{ClockId, clock_gettime};
use stillpoint_linux::sched::{self, SchedAttr};

/// `SCHED_IDLE`.
const SCHED_IDLE: u32 = 5;

/// Time on the clock that all page servers of a program have: it is the program's own, and not that of those who started
/// them.
pub fn monotonic_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

/// Whose turn it is where processors are few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// This thread is one like any other.
    Ours,
    /// Until then, microseconds, it runs only where nobody else wants to.
    Others(u64),
}

impl Turn {
    /// This thread takes it.
    pub fn take(self) {
        self.take_for(0);
    }

    /// A thread takes it; 0 is this one.
    pub fn take_for(self, tid: u32) {
        let policy = match self {
            Turn::Others(until) if monotonic_us() < until => SCHED_IDLE,
            _ => libc::SCHED_OTHER as u32,
        };
        let _ = sched::set_attributes(tid, &SchedAttr { policy, ..SchedAttr::default() });
    }
}

/// A short time in which this thread is not kept from its processor: it holds what another one waits for, for which the
/// program waits. Then it is as it was.
#[derive(Debug)]
pub struct Prompt(Turn);

impl Prompt {
    /// From now on; then it is its turn as before.
    pub fn begin(then: Turn) -> Self {
        at_once();
        Prompt(then)
    }
}

/// From now on this thread gets a processor whenever it wants one; false if it may not.
pub fn at_once() -> bool {
    let attributes = SchedAttr { policy: libc::SCHED_FIFO as u32, priority: 1, ..SchedAttr::default() };
    sched::set_attributes(0, &attributes).is_ok()
}

impl Drop for Prompt {
    fn drop(&mut self) {
        self.0.take();
    }
}
