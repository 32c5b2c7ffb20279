//! A running process becomes a checkpoint: freeze, inspect, memory engines.
#![forbid(unsafe_code)]

pub mod attributes;
pub mod blocked;
pub mod builder;
pub mod checkpoint;
pub mod error;
pub mod files;
pub mod freeze;
pub mod inspect;
pub mod mappings;
pub mod regions;
mod visits;

pub use builder::{Builder, Content};
pub use checkpoint::{Engine, Options, Progress, Report, checkpoint};
pub use error::{Error, Refusal, Result, list};
