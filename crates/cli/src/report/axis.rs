//! From times and values to places in a drawing, and the lines across it.

use super::facts::Run;
use std::time::Duration;

/// Where drawings begin and end, from left to right: in front of it stand the values.
pub const LEFT: f64 = 84.0;
/// Their right end.
pub const RIGHT: f64 = 980.0;
/// A gap between runs gets this much of the width, and all gaps together no more than a fifth.
const GAP: f64 = 18.0;

/// A piece of the time line in which places are in proportion to times.
#[derive(Clone, Copy, Debug)]
struct Piece {
    begin_ns: u64,
    end_ns: u64,
    left: f64,
    right: f64,
}

/// The time line: the times in which a program ran, in proportion; those in which it did not are short.
#[derive(Clone, Debug)]
pub struct Time {
    runs: Vec<Piece>,
}

/// A mark on the time line.
#[derive(Clone, Debug, PartialEq)]
pub struct Tick {
    /// Its place.
    pub at: f64,
    /// What stands there.
    pub text: String,
}

impl Time {
    /// Of runs that are in order and apart.
    pub fn of(runs: &[Run]) -> Self {
        let length = |run: &Run| run.end_ns.saturating_sub(run.begin_ns).max(1_000_000);
        let all: u128 = runs.iter().map(|run| u128::from(length(run))).sum();
        let gaps = runs.len().saturating_sub(1) as f64;
        let gap = GAP.min((RIGHT - LEFT) / 5.0 / gaps.max(1.0));
        let room = RIGHT - LEFT - gap * gaps;
        let mut left = LEFT;
        let piece = |run: &Run| {
            let right = left + room * length(run) as f64 / all.max(1) as f64;
            let piece = Piece {
                begin_ns: run.begin_ns,
                end_ns: run.begin_ns.saturating_add(length(run)),
                left,
                right,
            };
            left = right + gap;
            piece
        };
        Self { runs: runs.iter().map(piece).collect() }
    }

    /// The place of a time.
    pub fn at(&self, ns: u64) -> f64 {
        let next = self.runs.partition_point(|piece| piece.begin_ns <= ns);
        let Some(piece) = next.checked_sub(1).map(|i| &self.runs[i]) else { return LEFT };
        let of = (ns - piece.begin_ns) as f64 / (piece.end_ns - piece.begin_ns).max(1) as f64;
        if of <= 1.0 {
            return piece.left + of * (piece.right - piece.left);
        }
        // In the gap behind it.
        self.runs.get(next).map_or(piece.right, |after| (piece.right + after.left) / 2.0)
    }

    /// The runs, from place to place.
    pub fn runs(&self) -> impl Iterator<Item = (f64, f64)> {
        self.runs.iter().map(|piece| (piece.left, piece.right))
    }

    /// Times at round distances, far enough from each other to be read.
    pub fn ticks(&self) -> Vec<Tick> {
        const STEPS: [u64; 24] = [
            1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400,
            172_800, 604_800, 1_209_600, 2_592_000, 7_776_000, 31_536_000,
        ];
        let Some((first, last)) = self.runs.first().zip(self.runs.last()) else { return Vec::new() };
        let second = 1_000_000_000;
        let running: u64 = self.runs.iter().map(|p| (p.end_ns - p.begin_ns) / second).sum();
        let step = STEPS.into_iter().find(|step| running / step <= 8).unwrap_or(31_536_000) * second;
        let is_long = last.end_ns / (86_400 * second) != first.begin_ns / (86_400 * second);
        let (mut ticks, mut end): (Vec<Tick>, f64) = (Vec::new(), 0.0);
        for piece in &self.runs {
            let from = piece.begin_ns.div_ceil(step);
            // However many days one run had, there are some ten steps in all.
            for at_ns in
                (from..).map_while(|n| n.checked_mul(step)).take_while(|at| *at <= piece.end_ns).take(40)
            {
                let text = label(at_ns, is_long, step >= 60 * second);
                let (at, half) = (self.at(at_ns), text.len() as f64 * 3.4);
                if at - half > end && at + half < RIGHT + 20.0 {
                    end = at + half + 12.0;
                    ticks.push(Tick { at, text });
                }
            }
        }
        if ticks.is_empty() {
            ticks.push(Tick { at: first.left, text: label(first.begin_ns, is_long, false) });
        }
        ticks
    }
}

fn label(at_ns: u64, with_day: bool, without_seconds: bool) -> String {
    let utc = crate::output::utc(at_ns);
    let time = utc.get(11..if without_seconds { 16 } else { 19 }).unwrap_or_default();
    match with_day {
        true => format!("{} {time}", utc.get(5..10).unwrap_or_default()),
        false => time.into(),
    }
}

/// What values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds.
    Time,
    /// Bytes.
    Bytes,
}

impl Unit {
    /// A value in words.
    pub fn words(self, value: f64) -> String {
        match self {
            Unit::Time => crate::output::short(Duration::from_nanos(value as u64)),
            Unit::Bytes => crate::output::bytes(value as u64),
        }
    }

    /// A round value in words.
    fn label(self, value: f64) -> String {
        let round = |value: f64| {
            let text = format!("{value:.3}");
            text.trim_end_matches('0').trim_end_matches('.').to_string()
        };
        match self {
            Unit::Bytes => self.words(value).replace(".0 ", " "),
            Unit::Time => match value / 1e6 {
                ms if ms < 1.0 => format!("{} µs", round(ms * 1e3)),
                ms if ms < 1e3 => format!("{} ms", round(ms)),
                ms if ms < 120e3 => format!("{} s", round(ms / 1e3)),
                ms if ms < 7_200e3 => format!("{} min", round(ms / 60e3)),
                ms => format!("{} h", round(ms / 3_600e3)),
            },
        }
    }

    /// Steps that are round in this unit, ascending, around a value.
    fn round_step(self, about: f64) -> f64 {
        let base = match self {
            Unit::Time if about >= 60e9 => 60e9,
            Unit::Time => 10f64.powf(about.max(1.0).log10().floor()),
            Unit::Bytes => 1024f64.powf((about.max(1.0).ln() / 1024f64.ln()).floor()),
        };
        let steps = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1024.0, 2048.0, 5120.0];
        steps.iter().map(|step| step * base).find(|&step| step >= about * 0.999).unwrap_or(about)
    }
}

/// How values become heights.
#[derive(Clone, Debug)]
pub struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    unit: Unit,
}

impl Scale {
    /// For values. Where a few are very much larger than most, by powers of ten.
    pub fn of(values: &[f64], unit: Unit) -> Self {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| *v > 0.0).collect();
        sorted.sort_by(f64::total_cmp);
        let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else {
            return Self { low: 0.0, high: 1.0, is_log: false, unit };
        };
        let median = sorted[sorted.len() / 2];
        if most > 25.0 * median && sorted.len() > 2 {
            let floor = 10f64.powf(least.log10().floor());
            return Self { low: floor, high: most * 1.3, is_log: true, unit };
        }
        let step = unit.round_step(most / 4.0);
        Self { low: 0.0, high: (most / step).ceil().max(1.0) * step, is_log: false, unit }
    }

    /// The place of a value, from 0 at the bottom to 1.
    pub fn at(&self, value: f64) -> f64 {
        let of = match self.is_log {
            true => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        of.clamp(0.0, 1.0)
    }

    /// Whether it goes by powers of ten.
    pub fn is_log(&self) -> bool {
        self.is_log
    }

    /// Round values with their words.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let values: Vec<f64> = match self.is_log {
            true => self.powers(),
            false => {
                let step = self.unit.round_step(self.high / 4.5);
                (0..=6).map(|i| f64::from(i) * step).take_while(|v| *v <= self.high * 1.001).collect()
            }
        };
        let words = |v: f64| if v == 0.0 { "0".into() } else { self.unit.label(v) };
        values.into_iter().map(|value| (value, words(value))).collect()
    }

    /// Powers of the number that the unit counts by, in between as many as there is room for.
    fn powers(&self) -> Vec<f64> {
        let (base, steps): (f64, &[f64]) = match self.unit {
            Unit::Time => (10.0, &[1.0]),
            Unit::Bytes => (1024.0, &[1.0, 10.0, 100.0]),
        };
        let first = (self.low.ln() / base.ln()).floor() as i32;
        let powers = (first..first + 20).flat_map(|power| steps.iter().map(move |s| s * base.powi(power)));
        powers.filter(|v| (self.low * 0.999..=self.high).contains(v)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    fn run(begin: u64, end: u64) -> Run {
        Run { begin_ns: begin * SECOND, end_ns: end * SECOND, is_on: false }
    }

    #[test]
    fn gaps_are_short() {
        let time = Time::of(&[run(1_000, 1_060), run(1_000_000, 1_000_060)]);
        let at = |second: u64| time.at(second * SECOND);
        assert_eq!(at(1_000), LEFT);
        assert!((at(1_000_060) - RIGHT).abs() < 0.01);
        assert!((at(1_000_000) - at(1_060) - GAP).abs() < 0.01);
        assert!((at(500_000) - (at(1_060) + GAP / 2.0)).abs() < 0.01);
    }

    #[test]
    fn values_have_round_words() {
        let words = |values: &[f64], unit| {
            Scale::of(values, unit).ticks().into_iter().map(|(_, words)| words).collect::<Vec<_>>()
        };
        assert_eq!(words(&[1.7e6, 1e6], Unit::Time), ["0", "500 µs", "1 ms", "1.5 ms", "2 ms"]);
        assert_eq!(words(&[30e9], Unit::Time), ["0", "10 s", "20 s", "30 s"]);
        assert_eq!(words(&[45.0 * 1048576.0], Unit::Bytes), ["0", "20 MiB", "40 MiB", "60 MiB"]);
        assert_eq!(words(&[], Unit::Bytes).first().map(String::as_str), Some("0"));
    }

    proptest! {
        #[test]
        fn every_time_and_value_is_within(
            lengths in prop::collection::vec((0_u64..1_000_000, 0_u64..1_000_000), 0..40),
            values in prop::collection::vec(0.0..1e15, 0..30),
            at in any::<u64>(),
        ) {
            let (mut runs, mut end) = (Vec::new(), 1_000_000);
            for (gap, length) in lengths {
                runs.push(run(end + gap, end + gap + length));
                end += gap + length;
            }
            let time = Time::of(&runs);
            prop_assert!((LEFT..=RIGHT + 0.1).contains(&time.at(at)));
            prop_assert!(time.ticks().len() <= 20);
            for pair in time.ticks().windows(2) {
                prop_assert!(pair[0].at < pair[1].at);
            }
            for unit in [Unit::Time, Unit::Bytes] {
                let scale = Scale::of(&values, unit);
                prop_assert!(values.iter().all(|v| (0.0..=1.0).contains(&scale.at(*v))));
                let ticks = scale.ticks();
                prop_assert!(ticks.len() <= 30, "{ticks:?}");
            }
        }
    }
}
