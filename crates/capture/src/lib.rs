//! A running process becomes a checkpoint: freeze, inspect, memory engines.
#![forbid(unsafe_code)]

pub mod attributes;
pub mod blocked;
mod brief;
pub mod builder;
pub mod checkpoint;
pub mod engine;
pub mod error;
pub mod files;
pub mod freeze;
pub mod inspect;
pub mod keeper;
mod lend;
pub mod mappings;
pub mod regions;
mod visits;

pub use builder::{Builder, Content};
pub use checkpoint::{Options, Progress, Report, Session, checkpoint};
pub use engine::Engine;
pub use error::{Error, Refusal, Result, list};
