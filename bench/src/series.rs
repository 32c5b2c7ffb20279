//! Measured numbers of one kind, and what is said of them.

use std::time::Duration;

/// Milliseconds of a time.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Repeated measurements of one quantity, in a unit that the owner knows.
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<f64>);

impl Series {
    /// One more.
    pub fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    /// One more, in milliseconds.
    pub fn add_time(&mut self, time: Duration) {
        self.add(ms(time));
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The median; not a number if there is none.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
        let n = sorted.len();
        if n % 2 == 1 { at(n / 2) } else { (at((n / 2).wrapping_sub(1)) + at(n / 2)) / 2.0 }
    }

    /// The smallest; not a number if there is none.
    pub fn least(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::min)
    }

    /// The largest; not a number if there is none.
    pub fn most(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::Series;

    #[test]
    fn median_of_odd_even_and_none() {
        let series = |values: &[f64]| Series(values.to_vec());
        assert_eq!(series(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(series(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert!(series(&[]).median().is_nan());
        assert_eq!(series(&[2.0, 5.0]).most(), 5.0);
    }
}
