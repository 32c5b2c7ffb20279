//! When the next periodic checkpoint is due.

use crate::failure::{Failure, Result};
use crate::pace::FIRST;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use std::io::{PipeReader, PipeWriter, Read};
use std::time::{Duration, Instant};
use stillpoint_store::Every;

/// What asks for periodic checkpoints.
#[derive(Debug)]
pub enum Clock {
    /// Nothing does.
    Silent,
    /// A fixed period.
    Beat(Beat),
    /// Whoever takes them tells after each when the next is due, if one is.
    Paced {
        /// When it is due.
        due: Option<Instant>,
        /// Tells how long it is, nanoseconds.
        told: PipeReader,
        /// Its other end, for whoever takes them.
        teller: PipeWriter,
    },
}

impl Clock {
    /// Begins now.
    pub fn new(every: Option<Every>) -> Result<Self> {
        let now = Instant::now();
        Ok(match every {
            None => Clock::Silent,
            Some(Every::Time(period)) => Clock::Beat(Beat::new(now, period)),
            Some(Every::Auto) => {
                let (told, teller) = std::io::pipe().map_err(|e| Failure::failed(format!("pipe: {e}")))?;
                Clock::Paced { due: now.checked_add(FIRST), told, teller }
            }
        })
    }

    /// Where to tell it when the next is due, if it wants to be told.
    pub fn hears(&self) -> Result<Option<PipeWriter>> {
        let Clock::Paced { teller, .. } = self else { return Ok(None) };
        teller.try_clone().map(Some).map_err(|e| Failure::failed(format!("pipe: {e}")))
    }

    /// What to wait for.
    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Clock::Paced { told, .. } => Some(told.as_fd()),
            _ => None,
        }
    }

    /// How long to wait at most.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        match self {
            Clock::Silent => None,
            Clock::Beat(beat) => Some(beat.left(now)),
            Clock::Paced { due, .. } => due.map(|due| due.saturating_duration_since(now)),
        }
    }

    /// Whether a checkpoint is due.
    pub fn ticks(&mut self, now: Instant) -> Result<bool> {
        match self {
            Clock::Silent => Ok(false),
            Clock::Beat(beat) => Ok(beat.ticks(now) > 0),
            Clock::Paced { due, told, .. } => {
                if is_ready(told.as_fd()) {
                    let mut interval = [0; 8];
                    told.read_exact(&mut interval).map_err(|e| Failure::failed(format!("pipe: {e}")))?;
                    // One that is too far away never comes.
                    *due = now.checked_add(Duration::from_nanos(u64::from_le_bytes(interval)));
                }
                let ticks = due.is_some_and(|due| due <= now);
                if ticks {
                    *due = None;
                }
                Ok(ticks)
            }
        }
    }
}

fn is_ready(fd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n > 0)
}

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
    fn a_paced_clock_ticks_when_it_was_told() {
        use std::io::Write;
        let mut clock = Clock::new(Some(Every::Auto)).expect("a pipe");
        let start = Instant::now();
        assert!(clock.left(start).is_some_and(|left| left <= FIRST));
        assert!(!clock.ticks(start).expect("reads") && clock.ticks(start + FIRST).expect("reads"));
        // While the checkpoint is being taken, nothing is due.
        assert_eq!(clock.left(start + FIRST), None);
        let mut teller = clock.hears().expect("a pipe").expect("it wants to be told");
        teller.write_all(&7_000_000_u64.to_le_bytes()).expect("told");
        assert!(!clock.ticks(start).expect("reads"));
        assert_eq!(clock.left(start), Some(Duration::from_millis(7)));
        assert!(clock.ticks(start + Duration::from_millis(7)).expect("reads"));
    }

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
