//! The ways to restore a program, measured in turn.

use super::{Restart, Saved};
use crate::series::Series;
use anyhow::Result;

/// What was measured of one way.
#[derive(Default)]
pub struct Measured {
    /// From the start of the command to the end of the unit of work, milliseconds.
    pub latency: Series,
    /// Until the program runs, milliseconds.
    pub runs: Series,
    /// From its first instruction to the end of the unit of work, milliseconds.
    pub work: Series,
    /// How often it waited for a page.
    pub faults: Series,
    /// When it did, the last time that was measured.
    pub fault_times: Vec<(f64, f64)>,
}

impl Measured {
    fn add(&mut self, restart: &Restart) {
        self.latency.add(restart.latency_ms);
        self.runs.add(restart.number("running_ms"));
        self.work.add(restart.work_ms());
        self.faults.add(restart.number("demand_faults"));
        self.fault_times = restart.fault_times();
    }
}

/// All ways.
#[derive(Default)]
pub struct Ways {
    /// All memory is loaded first.
    pub eager: Measured,
    /// Memory comes later, and nothing is known of what the program will wait for.
    pub first: Measured,
    /// What it waited for that time is known.
    pub then: Measured,
    /// Bytes of that.
    pub touch_set: Series,
}

impl Ways {
    /// The ways and their names in the tables.
    pub fn named(&self) -> [(&'static str, &Measured); 3] {
        [("eagerly", &self.eager), ("lazily, first", &self.first), ("lazily, then", &self.then)]
    }

    /// Restores a program in each way, so often, after so many times that do not count.
    pub fn measure(saved: &Saved<'_>, runs: usize, idle_runs: usize, options: &[&str]) -> Result<Self> {
        let mut ways = Ways::default();
        for run in 0..idle_runs + runs {
            let eager = saved.restore(&[&["--eager"], options].concat())?;
            saved.forget()?;
            let first = saved.restore(options)?;
            let touch_set = saved.touch_set()?;
            let then = saved.restore(options)?;
            if run >= idle_runs {
                ways.eager.add(&eager);
                ways.first.add(&first);
                ways.then.add(&then);
                ways.touch_set.add(touch_set as f64);
            }
        }
        Ok(ways)
    }
}
