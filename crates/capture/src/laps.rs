//! What the time for which a program stands still is spent on.

use std::time::{Duration, Instant};

/// Steps that follow each other, with what each has taken. To note one costs some 30 ns, and no memory once there are as many as
/// there are names.
#[derive(Clone, Debug, Default)]
pub struct Laps {
    last: Option<Instant>,
    steps: Vec<(&'static str, Duration)>,
}

impl Laps {
    /// Steps begin at this time.
    pub fn begin(&mut self, at: Instant) {
        self.steps.clear();
        self.steps.reserve(32);
        self.last = Some(at);
    }

    /// A step has ended, which began when the one before it did. Those of one name count together.
    pub fn end(&mut self, step: &'static str) {
        let Some(last) = &mut self.last else { return };
        let now = Instant::now();
        let took = now - std::mem::replace(last, now);
        match self.steps.iter_mut().find(|(known, _)| *known == step) {
            Some((_, sum)) => *sum += took,
            None => self.steps.push((step, took)),
        }
    }

    /// What each step has taken, in the order in which they first ended.
    pub fn into_steps(self) -> Vec<(&'static str, Duration)> {
        self.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_one_name_count_together_and_leave_nothing_out() {
        let mut laps = Laps::default();
        laps.end("before it begins");
        let begin = Instant::now();
        laps.begin(begin);
        for _ in 0..3 {
            for step in ["one", "two"] {
                std::thread::sleep(Duration::from_millis(1));
                laps.end(step);
            }
        }
        let elapsed = begin.elapsed();
        let steps = laps.into_steps();
        assert_eq!(steps.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["one", "two"]);
        assert!(steps.iter().all(|(_, took)| *took >= Duration::from_millis(3)));
        let sum: Duration = steps.iter().map(|(_, took)| *took).sum();
        assert!(sum <= elapsed && sum + Duration::from_millis(1) > elapsed, "{sum:?} of {elapsed:?}");
    }
}
