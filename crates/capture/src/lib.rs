//! A running process becomes a checkpoint: freeze, inspect, memory engines.
#![forbid(unsafe_code)]

pub mod attributes;
pub mod builder;
pub mod error;
pub mod files;

pub use builder::{Builder, Content};
pub use error::{Error, Refusal, Result};
