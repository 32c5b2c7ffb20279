//! When the next periodic checkpoint is due.

use std::time::{Duration, Instant};

/// A beat that does not drift: the n-th tick is at the start plus n periods, however long anything takes.
#[derive(Clone, Copy, Debug)]
pub struct Beat {
    start: Instant,
    period: Duration,
    /// Number of the next tick, from 1.
    next: u64,
}

impl Beat {
    /// The first tick is one period after `start`.
    pub fn new(start: Instant, period: Duration) -> Self {
        Self { start, period, next: 1 }
    }

    /// How long it is until the next tick.
    pub fn left(&self, now: Instant) -> Duration {
        let due = self.period.as_nanos() * u128::from(self.next);
        let passed = now.saturating_duration_since(self.start).as_nanos();
        Duration::from_nanos(due.saturating_sub(passed).try_into().unwrap_or(u64::MAX))
    }

    /// The ticks that have come since this was asked last.
    pub fn ticks(&mut self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.start).as_nanos();
        let last = u64::try_from(passed / self.period.as_nanos().max(1)).unwrap_or(u64::MAX - 1);
        let ticks = (last + 1).saturating_sub(self.next);
        self.next += ticks;
        ticks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_come_when_they_are_due() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut beat = Beat::new(start, Duration::from_millis(100));
        assert_eq!((beat.ticks(at(0)), beat.left(at(0)).as_millis()), (0, 100));
        assert_eq!((beat.ticks(at(99)), beat.left(at(99)).as_millis()), (0, 1));
        // Late by 30 ms: the next is not.
        assert_eq!((beat.ticks(at(130)), beat.left(at(130)).as_millis()), (1, 70));
        // Away for a while.
        assert_eq!((beat.ticks(at(555)), beat.left(at(555)).as_millis()), (4, 45));
        assert_eq!(beat.ticks(at(555)), 0);
        assert_eq!(beat.left(at(601)).as_millis(), 0);
    }
}
