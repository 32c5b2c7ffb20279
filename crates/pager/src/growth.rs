//! How much has to be left free below a program's limit, so that it stays within while pages are being taken out.
//!
//! What counts is what the program takes by itself. What is put back is no growth: that waits where there is no room.

use std::time::{Duration, Instant};

/// Looks that are closer together than this say nothing: the kernel counts pages of each processor in batches.
const LEAST: Duration = Duration::from_millis(2);
/// So much may be of such batches, bytes.
const BLUR: u64 = 256 << 10;
/// After so long without growth half of it is expected.
const HALF: Duration = Duration::from_millis(250);
/// Until it is known, it takes so long for a batch to leave.
const TAKES: Duration = Duration::from_millis(10);

/// What a program took at some moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// When that was.
    pub at: Instant,
    /// What it takes, and what has been taken out and put back until then, bytes.
    pub taken: u64,
    pub out: u64,
    pub back: u64,
}

/// How fast a program grows by itself.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    last: Option<Look>,
    /// Bytes a second, of late.
    rate: f64,
    /// How long the last batch took to leave.
    takes: Option<Duration>,
}

impl Growth {
    /// What it takes now.
    pub fn seen(&mut self, now: Look) {
        let Some(last) = self.last else {
            self.last = Some(now);
            return;
        };
        let passed = now.at.saturating_duration_since(last.at);
        if passed < LEAST {
            return;
        }
        let own = |look: Look| (look.taken + look.out).saturating_sub(look.back);
        let grown = own(now).saturating_sub(own(last)).saturating_sub(BLUR);
        let decayed = self.rate * 0.5f64.powf(passed.as_secs_f64() / HALF.as_secs_f64());
        self.rate = decayed.max(grown as f64 / passed.as_secs_f64());
        self.last = Some(now);
    }

    /// A batch took so long to leave.
    pub fn left_in(&mut self, took: Duration) {
        self.takes = Some(took);
    }

    /// So many bytes are to be left free: what it will have taken before a batch has left and the next one, too; at least half a
    /// batch, which is what is put back meanwhile, and at most two.
    pub fn headroom(&self, batch: u64) -> u64 {
        let until = 2.0 * self.takes.unwrap_or(TAKES).max(TAKES / 4).as_secs_f64();
        (batch / 2 + (self.rate * until) as u64).min(2 * batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What is left free after looks, each so many milliseconds after the beginning, at what is taken, out and back; MiB.
    fn after(looks: &[(u64, u64, u64, u64)]) -> u64 {
        let (began, mut growth) = (Instant::now(), Growth::default());
        for &(ms, taken, out, back) in looks {
            let at = began + Duration::from_millis(ms);
            growth.seen(Look { at, taken: taken * MIB, out: out * MIB, back: back * MIB });
        }
        growth.headroom(2 * MIB)
    }

    #[test]
    fn what_does_not_grow_has_almost_all_of_its_limit() {
        assert_eq!(after(&[(0, 30, 0, 0), (10, 30, 0, 0), (20, 30, 0, 0)]), MIB);
    }

    #[test]
    fn what_is_taken_out_and_put_back_is_no_growth() {
        assert_eq!(after(&[(0, 30, 0, 0), (10, 28, 2, 0), (20, 31, 2, 3), (30, 30, 4, 4)]), MIB);
    }

    #[test]
    fn what_grows_fast_is_met_early_and_for_a_while() {
        assert_eq!(after(&[(0, 10, 0, 0), (10, 20, 0, 0)]), 4 * MIB);
        // Pages leave as fast as it grows.
        assert_eq!(after(&[(0, 30, 0, 0), (10, 30, 10, 0)]), 4 * MIB);
        assert_eq!(after(&[(0, 10, 0, 0), (10, 20, 0, 0), (20, 20, 0, 0), (30, 20, 0, 0)]), 4 * MIB);
        let later = after(&[(0, 10, 0, 0), (10, 20, 0, 0), (5010, 20, 0, 0)]);
        assert!(later < MIB + MIB / 10, "{later}");
    }
}
