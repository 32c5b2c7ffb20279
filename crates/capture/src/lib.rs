//! A running process becomes a checkpoint: freeze, inspect, memory engines.
#![forbid(unsafe_code)]

mod ahead;
pub mod attributes;
pub mod blocked;
mod brief;
pub mod builder;
pub mod checkpoint;
pub mod engine;
pub mod error;
pub mod files;
pub mod freeze;
mod groups;
pub(crate) mod herd;
pub mod inspect;
pub mod keeper;
mod lend;
pub mod mappings;
pub mod namespaces;
pub mod regions;
mod relations;
pub(crate) mod target;
mod visits;
pub(crate) mod work;

pub use builder::{Builder, Content};
pub use checkpoint::{Options, Progress, Report, Session, checkpoint};
pub use engine::Engine;
pub use error::{Error, Refusal, Result, list};
