//! What the end-to-end tests stand on.
//!
//! A test works in a [`Scratch`] directory with a store of its own, starts a [`Target`] (a purpose-made C program from
//! `targets/`) or a real program, drives the `stillpoint` command through [`Stillpoint`], and looks at processes from
//! outside through [`observe`]. [`Feature`] puts one scenario of a target through everything that can happen to it.
//!
//! Environment:
//!
//! * `STILLPOINT_BIN`: the command to test; by default the one of this workspace, built when needed.
//! * `STILLPOINT_SEED`: the seed of a run's random moments and of what has its turn in it; a failing test prints it.
//! * `STILLPOINT_TIER=soak`: all that a scenario can go through, not what has its turn.
//! * `STILLPOINT_RUN`: a folder for what a run has to tell (see [`verdict`]).
//! * `STILLPOINT_UNDISTURBED=1`: only run the programs and their checks, without any checkpoint.
//! * `STILLPOINT_FAULT`: a fault on purpose (see [`fault`]).
//! * `STILLPOINT_KILLS`: how many times the tests that kill the command do so (each).
//! * `STILLPOINT_CUTS`: how many checkpoints each life of a writer in `instant` goes through.
//! * `STILLPOINT_CHAIN`: how many checkpoints a chain in `incremental` has.
//! * `STILLPOINT_KEEP=1`: keep the directories of tests that pass, too.
#![forbid(unsafe_code)]

pub mod aimed;
pub mod client;
pub mod counter;
pub mod cuts;
pub mod engine;
pub mod fault;
pub mod feature;
pub mod kernel;
pub mod machine;
pub mod observe;
pub mod programs;
pub mod scratch;
pub mod stillpoint;
pub mod target;
pub mod terminal;
pub mod tier;
pub mod tmpfs;
pub mod turn;
pub mod verdict;

pub use aimed::Aimed;
pub use client::Client;
pub use cuts::Cuts;
pub use feature::Feature;
pub use scratch::{Rng, Scratch};
pub use stillpoint::{Checkpoint, Output, Stillpoint};
pub use target::{Build, Running, Target};
pub use terminal::Terminal;

use std::time::{Duration, Instant};

/// Whether only undisturbed runs are wanted.
pub fn undisturbed_only() -> bool {
    std::env::var_os("STILLPOINT_UNDISTURBED").is_some_and(|v| v != "0")
}

/// Says that a test did nothing, and why. Tests that cannot run here pass, but never in silence.
pub fn skipped(why: &str) {
    eprintln!("skipped: {}: {why}", scratch::test_name());
}

/// Polls until `done` gives something; panics with `what` after `patience`.
pub fn wait_for<T>(what: &str, patience: Duration, mut done: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + patience;
    loop {
        if let Some(t) = done() {
            return t;
        }
        assert!(Instant::now() < until, "waited {patience:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
