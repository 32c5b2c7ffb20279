//! How often checkpoints pay (`--every auto`): the interval of Young and Daly, from what a checkpoint of this job costs the
//! program and how often it fails.
//!
//! J. W. Young, *A first order approximation to the optimum checkpoint interval*, Commun. ACM 17 (1974); J. T. Daly, *A higher
//! order estimate of the optimum checkpoint interval for restart dumps*, Future Generation Computer Systems 22 (2006), equation
//! 37.

use crate::output;
use crate::supervise::is_wish;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stillpoint_linux::proc::{Proc, descendants};
use stillpoint_store::history::{History, What};
use stillpoint_store::{Pace, Store};

/// The first checkpoint is taken after so long: before, nothing is known of what one costs.
pub const FIRST: Duration = Duration::from_secs(10);
/// What is assumed of the failure rate before a job has a history: one failure in a week.
const ASSUMED: Duration = Duration::from_secs(7 * 86_400);
/// How much the newest measurement counts against those before.
const WEIGHT: f64 = 0.3;

/// The time between two checkpoints by which least is lost, seconds, where one costs `cost` seconds and there are `mtbf` seconds
/// between failures. Daly's higher-order estimate holds for a cost below twice that time; beyond, it is that time.
pub fn optimum(cost: f64, mtbf: f64) -> f64 {
    if cost >= 2.0 * mtbf {
        return mtbf;
    }
    let x = cost / (2.0 * mtbf);
    (2.0 * cost * mtbf).sqrt() * (1.0 + x.sqrt() / 3.0 + x / 9.0) - cost
}

/// How often a job fails: so many times in so long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Failures {
    count: u64,
    observed: Duration,
}

impl Failures {
    /// Those in a history: crashes, and times at which it was cut off. What somebody wished is no failure.
    fn of(history: &History) -> Self {
        let (mut failures, mut begun, mut last) = (Self::default(), None::<u64>, 0);
        let mut over = |begun: &mut Option<u64>, at: u64| {
            let ran = begun.take().map_or(0, |begun| at.saturating_sub(begun));
            failures.observed += Duration::from_nanos(ran);
        };
        let mut count = 0;
        for event in &history.events {
            match &event.what {
                What::Start(_) | What::Restore(_) | What::Restart(_) | What::Resume(_) => {
                    over(&mut begun, last);
                    begun = Some(event.at_ns);
                    count += u64::from(matches!(event.what, What::Resume(_)));
                }
                What::Crash { signal } => {
                    over(&mut begun, event.at_ns);
                    count += u64::from(!is_wish(*signal));
                }
                What::End { .. } | What::Release => over(&mut begun, event.at_ns),
                What::Earlier(earlier) => {
                    count += earlier.crashes;
                    begun.get_or_insert(earlier.since_ns);
                }
                _ => {}
            }
            last = event.at_ns;
        }
        over(&mut begun, output::now_ns().max(last));
        Self { count, ..failures }
    }

    /// Mean time between them; with what is assumed, as if one had been seen in that time.
    fn mtbf(self) -> Duration {
        (ASSUMED + self.observed) / u32::try_from(self.count + 1).unwrap_or(u32::MAX)
    }
}

/// Processor time that a program has had, and for how long its threads have waited for a processor, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    ran: u64,
    waited: u64,
}

impl Load {
    fn of(pid: u32) -> Self {
        let mut load = Self::default();
        for pid in descendants(&[pid]).into_iter().chain([pid]) {
            // One that ends meanwhile is not counted.
            let Ok(threads) = Proc::process(pid).and_then(|p| p.threads()) else { continue };
            for tid in threads {
                let text =
                    std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).unwrap_or_default();
                let mut numbers = text.split_whitespace().map_while(|word| word.parse::<u64>().ok());
                load.ran += numbers.next().unwrap_or_default();
                load.waited += numbers.next().unwrap_or_default();
            }
        }
        load
    }

    fn since(self, before: Self) -> Self {
        Self { ran: self.ran.saturating_sub(before.ran), waited: self.waited.saturating_sub(before.waited) }
    }
}

/// What a checkpoint cost the program, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cost {
    /// It stood still.
    pause: f64,
    /// It had to fault in what it wrote.
    faults: f64,
    /// It waited for a processor that was at work on the checkpoint.
    delay: f64,
    /// Within a memory limit, it waited for pages that were held back until the checkpoint was taken.
    waits: f64,
}

impl Cost {
    /// Of a checkpoint, from what its threads had and waited for before and meanwhile, and the time that a fault takes.
    fn of(taken: Taken, fault: Duration, before: Load, during: Load) -> Self {
        let seconds = |ns: f64| ns / 1e9;
        let wanted = (during.ran + during.waited) as f64;
        let held = taken.waited.as_nanos() as f64;
        // As many threads as were at work, or would have been, shared what was lost.
        let threads = ((wanted + held) / (taken.wall.as_nanos() as f64).max(1.0)).max(1.0);
        let usual = before.waited as f64 / ((before.ran + before.waited) as f64).max(1.0);
        let delay = (during.waited as f64 - usual * wanted).max(0.0);
        Cost {
            pause: taken.pause.as_secs_f64(),
            faults: fault.as_secs_f64() * taken.pages as f64 / threads,
            delay: seconds(delay / threads),
            waits: seconds(held / threads),
        }
    }

    fn total(self) -> f64 {
        self.pause + self.faults + self.delay + self.waits
    }

    /// The newest, and what was known before.
    fn mixed(self, before: Self) -> Self {
        let mix = |new: f64, old: f64| WEIGHT * new + (1.0 - WEIGHT) * old;
        Cost {
            pause: mix(self.pause, before.pause),
            faults: mix(self.faults, before.faults),
            delay: mix(self.delay, before.delay),
            waits: mix(self.waits, before.waits),
        }
    }
}

/// A checkpoint as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// For how long the program stood still in all.
    pub pause: Duration,
    /// Pages that were stored: those that the program has written since the one before.
    pub pages: u64,
    /// For how long threads, all together, waited for pages that were held back until it was taken.
    pub waited: Duration,
    /// How long it took.
    pub wall: Duration,
    /// Only what had changed was stored.
    pub incremental: bool,
}

/// Finds out how often checkpoints of a job pay.
#[derive(Debug)]
pub struct Pacer {
    pid: u32,
    given: Option<Duration>,
    failures: Failures,
    since: Instant,
    /// Time that a fault takes.
    fault: Duration,
    cost: Option<(Cost, bool)>,
    /// At the end of the last checkpoint, and at the begin of this one.
    marks: [Load; 2],
}

impl Pacer {
    /// For a process of a job, whose mean time between failures may be known.
    pub fn new(store: &Store, job: &str, pid: u32, mtbf: Option<Duration>) -> Self {
        let failures = Failures::of(&store.history(job).unwrap_or_default());
        let load = Load::of(pid);
        let (given, since) = (mtbf, Instant::now());
        Self { pid, given, failures, since, fault: fault_time(), cost: None, marks: [load, load] }
    }

    /// A checkpoint begins.
    pub fn begin(&mut self) {
        self.marks[1] = Load::of(self.pid);
    }

    /// It is over. Returns when the next is due, and why.
    pub fn end(&mut self, taken: Taken) -> Pace {
        let now = Load::of(self.pid);
        let [last, begin] = self.marks;
        let (before, during) = (begin.since(last), now.since(begin));
        let new = Cost::of(taken, self.fault, before, during);
        // A complete one tells nothing of those that save what changed.
        let cost = match self.cost {
            Some((old, alike)) if alike == taken.incremental => new.mixed(old),
            _ => new,
        };
        self.cost = Some((cost, taken.incremental));
        self.marks = [now, now];
        self.pace(cost, taken.wall)
    }

    fn pace(&self, cost: Cost, wall: Duration) -> Pace {
        let failures = Failures { observed: self.failures.observed + self.since.elapsed(), ..self.failures };
        let mtbf = self.given.unwrap_or_else(|| failures.mtbf());
        let optimum = optimum(cost.total().max(1e-6), mtbf.as_secs_f64());
        let ns = |seconds: f64| (seconds.max(0.0) * 1e9) as u64;
        let write_ns = wall.as_nanos() as u64;
        Pace {
            interval_ns: ns(optimum).max(write_ns),
            bounded: ns(optimum) < write_ns,
            pause_ns: ns(cost.pause),
            faults_ns: ns(cost.faults),
            delay_ns: ns(cost.delay),
            waits_ns: ns(cost.waits),
            write_ns,
            mtbf_ns: mtbf.as_nanos() as u64,
            given: self.given.is_some(),
            failures: failures.count,
            observed_ns: failures.observed.as_nanos() as u64,
        }
    }
}

/// How long the first touch of a page takes here.
fn fault_time() -> Duration {
    const PAGES: usize = 1024;
    const LEAST: Duration = Duration::from_nanos(250);
    let mut memory = vec![0_u8; PAGES * 4096];
    let began = Instant::now();
    memory.iter_mut().step_by(4096).for_each(|byte| *black_box(byte) = 1);
    (began.elapsed() / PAGES as u32).max(LEAST)
}

/// Why checkpoints are taken as often as they are, for people.
pub fn why(pace: &Pace) -> String {
    let short = |ns: u64| output::short(Duration::from_nanos(ns));
    let expected = match pace.given {
        true => format!("a failure every {} is expected, as --mtbf says", short(pace.mtbf_ns)),
        false => format!(
            "a failure every {} is expected ({} in {} of this job, and one in {} assumed)",
            short(pace.mtbf_ns),
            match pace.failures {
                0 => "none".into(),
                failures => failures.to_string(),
            },
            short(pace.observed_ns),
            output::long(ASSUMED.as_secs()),
        ),
    };
    let waits = match pace.waits_ns {
        0 => String::new(),
        waits => format!(", memory limit {}", short(waits)),
    };
    let bound = if pace.bounded { "; no more often, for so long one takes to write" } else { "" };
    format!(
        "every {}: one costs the program {} (pause {}, faults {}, processor {}{waits}), and {expected}{bound}",
        short(pace.interval_ns),
        short(pace.cost_ns()),
        short(pace.pause_ns),
        short(pace.faults_ns),
        short(pace.delay_ns),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stillpoint_store::history::{Back, Event, Start};

    /// Time lost for each second of work, by Daly's complete model (equation 20), without the constant factor of restarts.
    fn overhead(interval: f64, cost: f64, mtbf: f64) -> f64 {
        mtbf * (((interval + cost) / mtbf).exp() - 1.0) / interval
    }

    #[test]
    fn it_is_what_was_published() {
        // Young's first-order interval of five minutes and 24 hours is two hours; Daly's correction by hand.
        let close = |a: f64, b: f64| (a - b).abs() < 1e-3 * b;
        assert!(close(optimum(5.0, 1440.0), 116.690), "{}", optimum(5.0, 1440.0));
        // Where the cost is nothing against the time between failures, it is Young's.
        assert!(close(optimum(1e-3, 1e6), (2.0_f64 * 1e-3 * 1e6).sqrt()));
        // Beyond twice that time, it is that time; and there is no jump of more than the estimate is off.
        assert_eq!((optimum(20.0, 10.0), optimum(1e9, 10.0)), (10.0, 10.0));
        assert!((optimum(19.999, 10.0) / 10.0 - 1.0).abs() < 0.12, "{}", optimum(19.999, 10.0));
    }

    proptest! {
        /// Among all intervals hardly one is better by the complete model: within 0.3 % up to a cost of a half of the time between
        /// failures, as the paper has it.
        #[test]
        fn none_is_much_better(share in -6.0_f64..-0.31, mtbf in 1.0_f64..1e7, other in -2.0_f64..2.0) {
            let cost = mtbf * 10_f64.powf(share);
            let chosen = optimum(cost, mtbf);
            let other = chosen * 10_f64.powf(other);
            prop_assert!(overhead(chosen, cost, mtbf) <= overhead(other, cost, mtbf) * 1.003);
        }

        /// What costs more is done less often, and what fails more rarely is saved less often.
        #[test]
        fn it_grows_with_both(cost in 1e-6_f64..1e3, mtbf in 1.0_f64..1e8, more in 1.0_f64..10.0) {
            let base = optimum(cost, mtbf);
            prop_assert!(base > 0.0 && base.is_finite());
            prop_assert!(optimum(cost, mtbf * more) >= base * 0.999);
            // The estimate itself bends down where checkpoints take up nearly all time: there it is only bounded.
            if cost * more < mtbf / 4.0 {
                prop_assert!(optimum(cost * more, mtbf) >= base * 0.999);
            }
        }

        /// So does the time between failures that is learned.
        #[test]
        fn more_failures_mean_less_time_between(count in 0_u64..1000, seconds in 0_u64..1 << 32) {
            let of = |count, seconds| Failures { count, observed: Duration::from_secs(seconds) }.mtbf();
            prop_assert!(of(count + 1, seconds) < of(count, seconds));
            prop_assert!(of(count, seconds + 3600) >= of(count, seconds));
        }
    }

    #[test]
    fn failures_are_learned() {
        let hour = 3_600_000_000_000_u64;
        let back = || Back::default();
        let events = [
            (0, What::Start(Start::default())),
            (1, What::Crash { signal: 11 }),
            (1, What::Restart(back())),
            // Cut off, an hour after what was heard of it last.
            (2, What::Unknown),
            (9, What::Resume(back())),
            (10, What::Crash { signal: 15 }),
        ];
        let events = events.into_iter().map(|(at, what)| Event { at_ns: at * hour, what }).collect();
        let failures = Failures::of(&History { events, unreadable: 0 });
        assert_eq!(failures, Failures { count: 2, observed: Duration::from_secs(3 * 3600) });
        assert_eq!(failures.mtbf(), Duration::from_secs((7 * 24 + 3) * 1200));
        assert_eq!(Failures::default().mtbf(), ASSUMED);
    }

    /// A checkpoint that took 100 ms.
    fn taken(waited: Duration) -> Taken {
        let (pause, wall) = (Duration::from_millis(2), Duration::from_millis(100));
        Taken { pause, pages: 1000, waited, wall, incremental: true }
    }

    #[test]
    fn pages_that_are_held_back_cost_each_thread_its_part() {
        let of = |ran_ms: u64, waited_ms| {
            let during = Load { ran: ran_ms * 1_000_000, waited: 0 };
            let taken = taken(Duration::from_millis(waited_ms));
            Cost::of(taken, Duration::ZERO, Load::default(), during)
        };
        let close = |cost: Cost, waits: f64| (cost.waits - waits).abs() < 1e-9;
        // One thread that waited for half of the time.
        assert!(close(of(50, 50), 0.050) && (of(50, 50).total() - 0.052).abs() < 1e-9);
        // Four of them: it took as much longer.
        assert!(close(of(200, 200), 0.050));
        // Two, of which one never waited.
        assert!(close(of(100, 100), 0.050));
        assert!(close(of(100, 0), 0.0));
        // What is waited for counts as the rest does.
        let old = Cost { waits: 0.1, ..Cost::default() };
        assert!((of(100, 0).mixed(old).waits - 0.07).abs() < 1e-9);
    }

    #[test]
    fn what_it_waited_for_anyway_is_no_cost() {
        let ms = 1_000_000;
        let of = |before: (u64, u64), during: (u64, u64)| {
            let [before, during] =
                [before, during].map(|(ran, waited)| Load { ran: ran * ms, waited: waited * ms });
            Cost::of(taken(Duration::ZERO), Duration::from_micros(1), before, during)
        };
        // One thread that lost a tenth.
        let cost = of((1000, 0), (90, 10));
        assert!((cost.delay - 0.010).abs() < 1e-9 && (cost.faults - 0.001).abs() < 1e-9, "{cost:?}");
        assert!((cost.total() - 0.013).abs() < 1e-9);
        // As before.
        assert!(of((900, 100), (90, 10)).delay.abs() < 1e-9);
        // Four that lost a tenth each: it took a tenth longer.
        assert!((of((4000, 0), (360, 40)).delay - 0.010).abs() < 1e-9);
        // It slept.
        assert_eq!(of((0, 0), (0, 0)).delay, 0.0);
    }

    #[test]
    fn a_fault_takes_some_time() {
        assert!((Duration::from_nanos(250)..Duration::from_millis(1)).contains(&fault_time()));
    }
}
