//! The experiments, in the order of the summary.

mod anatomy;
mod barrier;
mod branch;
mod chain;
mod deadline;
mod downtime;
mod durable;
mod frequent;
mod incremental;
mod interval;
mod mirror;
mod paging;
mod pause;
mod pgbench;
mod published;
mod redis;
mod restart;
mod restore;
mod resume;
mod slowdown;
mod streaming;
mod touchset;
mod tree;
mod twins;
mod unprivileged;

use crate::bench::Bench;
use crate::report::Section;
use anyhow::Result;

/// An experiment: measures, and says what it found.
pub type Experiment = fn(&Bench) -> Result<Section>;

/// All of them by name.
pub const EXPERIMENTS: &[(&str, Experiment)] = &[
    ("pause", pause::run),
    ("anatomy", anatomy::run),
    ("tree", tree::run),
    ("twins", twins::run),
    ("branch", branch::run),
    ("redis", redis::run),
    ("pgbench", pgbench::run),
    ("durable", durable::run),
    ("restore", restore::run),
    ("unprivileged", unprivileged::run),
    ("restart", restart::run),
    ("touchset", touchset::run),
    ("streaming", streaming::run),
    ("incremental", incremental::run),
    ("slowdown", slowdown::run),
    ("downtime", downtime::run),
    ("interval", interval::run),
    ("chain", chain::run),
    ("deadline", deadline::run),
    ("resume", resume::run),
    ("frequent", frequent::run),
    ("paging", paging::run),
    ("mirror", mirror::run),
    ("barrier", barrier::run),
];
