//! A way to the store that is to be used at a limited rate (`--limit-bandwidth`), or takes no more.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time for which somebody sleeps who has been overtaken, or may be told to give up.
const NAP: Duration = Duration::from_millis(10);

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

#[cfg(test)]
mod tests {
    use super::*;

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
