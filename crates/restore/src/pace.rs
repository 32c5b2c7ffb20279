//! A way to the store that is to be used at a limited rate (`--limit-bandwidth`), or takes no more, and the rate at which it is used.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time for which somebody sleeps who has been overtaken, or may be told to give up.
const NAP: Duration = Duration::from_millis(10);

/// A store is slow where reading takes so many times as long as putting in.
const SLOWER: u64 = 4;

/// A way to the store. All who use it take turns.
#[derive(Debug)]
pub struct Pace {
    /// Bytes a second, if that is limited.
    limit: Option<u64>,
    /// When the way is free.
    free: Mutex<Instant>,
}

impl Pace {
    /// One that takes so many bytes a second, or any number of them.
    pub fn new(limit: Option<u64>) -> Self {
        Pace { limit, free: Mutex::new(Instant::now()) }
    }

    /// Takes as long as so many bytes take.
    pub fn travel(&self, bytes: u64) {
        self.travel_unless(bytes, false, &|| false);
    }

    /// Takes as long as so many bytes take, unless it is given up meanwhile. What is urgent goes first.
    pub fn travel_unless(&self, bytes: u64, urgent: bool, given_up: &dyn Fn() -> bool) {
        let Some(limit) = self.limit else { return };
        let time = Duration::from_secs_f64(bytes as f64 / limit as f64);
        while !given_up() {
            let now = Instant::now();
            let arrives = {
                let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
                let starts = (*free).max(now);
                if starts == now || urgent {
                    *free = starts + time;
                    Ok(*free)
                } else {
                    Err(starts)
                }
            };
            match arrives {
                Ok(arrives) => return std::thread::sleep(arrives - now),
                Err(free) => std::thread::sleep((free - now).min(NAP)),
            }
        }
    }
}

/// How fast something goes here, found out while it does, in nanoseconds for a MiB.
#[derive(Debug, Default)]
pub struct Rate {
    /// The least that was seen: who had to wait for a processor says nothing of it.
    best: AtomicU64,
    /// What it comes to now: each time counts for an eighth.
    now: AtomicU64,
}

impl Rate {
    /// So many bytes took so long.
    pub fn note(&self, bytes: u64, took: Duration) {
        let each = took.as_nanos().saturating_mul(1 << 20) / u128::from(bytes.max(1));
        let each = u64::try_from(each).unwrap_or(u64::MAX / 8).clamp(1, u64::MAX / 8);
        let known = |known: &AtomicU64| Some(known.load(Ordering::Relaxed)).filter(|&ns| ns > 0);
        let best = known(&self.best).map_or(each, |best| best.min(each));
        let now = known(&self.now).map_or(each, |now| now - now / 8 + each / 8);
        // What another thread notes meanwhile may be lost.
        self.best.store(best, Ordering::Relaxed);
        self.now.store(now.max(1), Ordering::Relaxed);
    }

    /// The best that was seen, 0 where nothing was.
    pub fn best(&self) -> u64 {
        self.best.load(Ordering::Relaxed)
    }

    /// What it comes to of late, 0 where nothing was seen.
    pub fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }
}

/// Whether a store is much slower than memory, if reading a MiB of it and putting that in take so long, nanoseconds; 0 where that is not
/// known.
pub fn is_slow(reading: u64, putting: u64) -> bool {
    putting > 0 && reading > SLOWER * putting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_best_and_what_it_comes_to_of_late() {
        let rate = Rate::default();
        assert_eq!((rate.best(), rate.now()), (0, 0));
        rate.note(1 << 20, Duration::from_millis(8));
        rate.note(2 << 20, Duration::from_millis(2));
        assert_eq!((rate.best(), rate.now()), (1_000_000, 7_125_000));
        for _ in 0..100 {
            rate.note(1 << 20, Duration::from_millis(2));
        }
        assert!((1_900_000..2_100_000).contains(&rate.now()) && rate.best() == 1_000_000, "{rate:?}");
        for took in [Duration::ZERO, Duration::MAX] {
            rate.note(0, took);
            assert!(rate.best() > 0 && rate.now() > 0);
        }
    }

    #[test]
    fn bytes_take_their_time() {
        let began = Instant::now();
        Pace::new(None).travel(1 << 40);
        assert!(began.elapsed() < Duration::from_secs(10));
        let pace = Pace::new(Some(1 << 20));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| pace.travel(16 << 10));
            }
        });
        assert!(began.elapsed() >= Duration::from_micros(62_500));
    }
}
