//! How long requests took, over several windows of time.

use crate::report::{Table, number};
use crate::series::Series;

/// What clients noticed while one thing was done again and again.
#[derive(Default)]
pub struct Measured {
    /// Of their requests.
    pub latencies: Latencies,
    /// Of what was done by its own account, ms.
    pub pause: Series,
    /// How long it took.
    pub takes: Series,
}

/// A table of what clients noticed while each of these things was done.
pub fn meanwhile(name: &str, title: &str, requests: &str, measured: &[(String, Measured)]) -> Table {
    let head =
        ["meanwhile", "p50, ms", "p99, ms", "p99.9, ms", "longest, ms", "most, ms", "pause, ms", "takes, ms"];
    let columns: Vec<&str> = head.into_iter().chain([requests, "checkpoints", "runs"]).collect();
    let mut table = Table::new(name, title, &columns);
    for (what, Measured { latencies: l, pause, takes }) in measured {
        let mut row = vec![what.clone()];
        let others = [l.longest(), l.most(), pause.median(), takes.median()];
        row.extend(l.quantiles().into_iter().chain(others).map(number));
        row.extend([l.count(), pause.count(), l.windows()].map(|n| n.to_string()));
        table.row(row);
    }
    table
}

/// Latencies, ms. A window is what was asked while one thing was done. Each figure is that of every window by itself, of which
/// the median is told: one window in which the machine did something else does not spoil the others.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    count: usize,
    quantiles: [Series; QUANTILES.len()],
    longest: Series,
}

/// Parts of all requests.
const QUANTILES: [f64; 3] = [0.5, 0.99, 0.999];

impl Latencies {
    /// All of one window.
    pub fn add(&mut self, mut window: Vec<f64>) {
        window.sort_by(f64::total_cmp);
        let Some(&longest) = window.last() else { return };
        self.count += window.len();
        self.longest.add(longest);
        for (part, series) in QUANTILES.iter().zip(&mut self.quantiles) {
            let at = (part * window.len() as f64).ceil() as usize;
            series.add(window[at.clamp(1, window.len()) - 1]);
        }
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of windows.
    pub fn windows(&self) -> usize {
        self.longest.count()
    }

    /// So long half of them took at most, 99 %, and 99.9 %.
    pub fn quantiles(&self) -> [f64; 3] {
        self.quantiles.each_ref().map(Series::median)
    }

    /// So long 99.9 % of them took at most.
    pub fn rare(&self) -> f64 {
        self.quantiles()[2]
    }

    /// The longest.
    pub fn longest(&self) -> f64 {
        self.longest.median()
    }

    /// The longest of all windows.
    pub fn most(&self) -> f64 {
        self.longest.most()
    }
}

#[cfg(test)]
mod tests {
    use super::Latencies;

    #[test]
    fn quantiles_and_longest() {
        let mut latencies = Latencies::default();
        assert!(latencies.rare().is_nan() && latencies.longest().is_nan());
        latencies.add((1..=1000).rev().map(f64::from).collect());
        latencies.add(Vec::new());
        assert_eq!(latencies.quantiles(), [500.0, 990.0, 999.0]);
        latencies.add(vec![3000.0]);
        assert_eq!(latencies.quantiles(), [1750.0, 1995.0, 1999.5]);
        assert_eq!((latencies.longest(), latencies.most()), (2000.0, 3000.0));
        assert_eq!((latencies.count(), latencies.windows()), (1001, 2));
    }
}
