//! The computations of the papers' experiments (`programs/mat.c` …).

use crate::programs::{Program, Programs};
use anyhow::Result;
use std::path::Path;

/// A computation of a certain size.
#[derive(Clone, Copy)]
pub struct Workload {
    /// Name in the tables.
    pub name: &'static str,
    program: &'static str,
    /// Size in the program's own measure.
    pub size: u64,
    /// Rounds that take about five seconds on two processors of today.
    rounds: u64,
}

const fn workload(name: &'static str, program: &'static str, size: u64, rounds: u64) -> Workload {
    Workload { name, program, size, rounds }
}

/// The five, at the sizes at which their slowdown is measured.
pub const FIVE: [Workload; 5] = [
    workload("MAT", "mat", 1024, 32),
    workload("FFT", "fft", 21, 20),
    workload("SORT", "sort", 8_000_000, 13),
    workload("PM", "pm", 64, 44),
    workload("JPA", "jpa", 2048, 2200),
];

/// Those of the downtime table: MAT at several sizes, then the others.
pub const DOWNTIME: [Workload; 8] = [
    workload("MAT 512", "mat", 512, 0),
    workload("MAT 1024", "mat", 1024, 0),
    workload("MAT 2048", "mat", 2048, 0),
    workload("MAT 4096", "mat", 4096, 0),
    workload("PM", "pm", 128, 0),
    workload("SORT", "sort", 16_000_000, 0),
    workload("FFT", "fft", 22, 0),
    workload("JPA", "jpa", 2048, 0),
];

/// What is computed while checkpoints are taken at intervals: a product that is not finished before they end.
pub const MAT_AT_INTERVALS: Workload = workload("MAT 4096", "mat", 4096, 0);

impl Workload {
    /// Arguments of the program: its rounds, or until it is told to stop.
    fn arguments(&self, endless: bool, watched: bool) -> Vec<String> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(64));
        let rounds = if endless { 0 } else { self.rounds };
        let mut arguments = [self.size, rounds, threads as u64].map(|n| n.to_string()).to_vec();
        if watched {
            arguments.push("watch".into());
        }
        arguments
    }

    /// Starts it, to end after its rounds.
    pub fn start(&self, programs: &Programs, place: &Path) -> Result<Program> {
        programs.start(self.program, place, &self.arguments(false, false), &[])
    }

    /// Starts it, to go on until it is told to stop, with a thread that watches for pauses.
    pub fn start_endless(&self, programs: &Programs, place: &Path) -> Result<Program> {
        programs.start(self.program, place, &self.arguments(true, true), &[])
    }

    /// What to run as a job; it ends after its rounds, or when told to stop if it is to be endless.
    pub fn command_line(&self, programs: &Programs, place: &Path, endless: bool) -> Vec<String> {
        programs.command_line(self.program, place, &self.arguments(endless, false))
    }
}

#[cfg(test)]
mod tests {
    use super::FIVE;
    use crate::programs::{Programs, clear};

    /// The result is the same however the work is split, and the program's own check is satisfied.
    #[test]
    fn results_do_not_depend_on_threads() {
        let place = std::env::temp_dir().join(format!("stillpoint-bench.{}", std::process::id()));
        clear(&place).expect("a directory");
        let programs = Programs::build(&place.join("programs")).expect("cc");
        for (workload, size) in FIVE.iter().zip([64, 10, 10_000, 1, 64]) {
            let digest = |threads: u32| {
                let arguments = [size.to_string(), "3".into(), threads.to_string()];
                let program = programs.start(workload.program, &place.join("run"), &arguments, &[]);
                let outcome = program.and_then(|p| p.outcome()).expect(workload.name);
                outcome.get("digest").expect(workload.name).to_owned()
            };
            let one = digest(1);
            assert_eq!([digest(2), digest(3)], [one.clone(), one], "{}", workload.name);
        }
        let _ = std::fs::remove_dir_all(&place);
    }
}
