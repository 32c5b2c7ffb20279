//! How a program waits for pages, time after time: whether it does anything else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stillpoint_linux::host;

/// A program that waits again before so many times of what serving it took does little else: of that time, it needs as much to notice
/// that it has been served, and to say that it waits.
const DENSE: u64 = 4;
/// Who is served so quickly that it waits again before so many times of that, is not slept for: to be woken would take as long.
const AT_ONCE: u64 = 8;
/// Nobody who sleeps is woken later than after that, where a processor is free.
const WOKEN: Duration = Duration::from_micros(100);
/// Longest time between two waits that is told from longer ones: one long time is enough for many short ones.
const LONGEST: Duration = Duration::from_millis(10);

/// How a program waits for pages. One thread serves it, and tells; all can ask.
#[derive(Debug)]
pub struct Rhythm {
    since: Instant,
    /// When it was served last, nanoseconds; 0 if it never was.
    last: AtomicU64,
    /// What serving it takes of late, nanoseconds …
    serving: AtomicU64,
    /// … and at the quickest …
    quickest: AtomicU64,
    /// … and what passes until it waits again.
    between: AtomicU64,
}

impl Rhythm {
    /// Of a program that has not waited yet.
    pub fn new() -> Self {
        let (last, serving, between) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(ns(LONGEST)));
        Rhythm { since: Instant::now(), last, serving, quickest: AtomicU64::new(ns(LONGEST)), between }
    }

    /// It waited, was served from `began` on, and has been `now`. Each time counts for a quarter.
    pub fn served(&self, began: Instant, now: Instant) {
        let of_late = |known: &AtomicU64, this: u64| {
            let before = known.load(Ordering::Relaxed);
            known.store(before - before / 4 + this / 4, Ordering::Relaxed);
        };
        let last = Duration::from_nanos(self.last.load(Ordering::Relaxed));
        of_late(&self.serving, ns(now - began));
        self.quickest.fetch_min(ns(now - began), Ordering::Relaxed);
        of_late(&self.between, ns((began - self.since).saturating_sub(last).min(LONGEST)));
        self.last.store(ns(now - self.since), Ordering::Relaxed);
    }

    /// Whether it did little but wait when it was served last.
    pub fn is_dense(&self) -> bool {
        self.between.load(Ordering::Relaxed) < DENSE * self.serving.load(Ordering::Relaxed)
    }

    /// Whether it is sure to wait again before anybody could have slept. On the only processor it could not run until then.
    pub fn waits_soon(&self) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        let soon = (AT_ONCE * self.quickest.load(Ordering::Relaxed)).min(ns(WOKEN));
        let since_then = || ns(self.since.elapsed()).saturating_sub(last);
        last > 0
            && host::processors() > 1
            && self.between.load(Ordering::Relaxed) < soon
            && since_then() < soon
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_dense_as_long_as_it_does_little_but_wait() {
        let rhythm = Rhythm::new();
        let us = Duration::from_micros;
        let mut at = rhythm.since;
        assert!(!rhythm.is_dense() && !rhythm.waits_soon());
        let mut wait = |after: u64, served: u64| {
            let began = at + us(after);
            at = began + us(served);
            rhythm.served(began, at);
            rhythm.is_dense()
        };
        // It has to be shown.
        assert!(!wait(20, 10) && !wait(20, 10));
        assert!((0..40).map(|_| wait(20, 10)).last().expect("some"));
        assert!(!wait(10_000, 10));
        assert!((0..40).map(|_| wait(20, 10)).last().expect("some"));
        // Whether serving takes long or not.
        assert!(!(0..40).map(|_| wait(100, 10)).last().expect("some"));
        assert!((0..40).map(|_| wait(100, 50)).last().expect("some"));
    }
}
