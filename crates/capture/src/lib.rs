//! A running process becomes a checkpoint: freeze, inspect, memory engines.
#![forbid(unsafe_code)]

mod ahead;
pub mod attributes;
pub mod blocked;
pub mod brief;
pub mod builder;
pub mod checkpoint;
pub mod engine;
pub mod error;
pub mod files;
pub mod freeze;
mod gate;
mod groups;
pub mod herd;
mod holes;
pub mod home;
pub mod inspect;
pub mod keeper;
mod kin;
mod laps;
pub mod lend;
pub mod mappings;
mod names;
pub mod namespaces;
mod ours;
pub mod regions;
pub mod relations;
pub mod target;
mod visits;
pub(crate) mod work;

pub use builder::{Builder, Content, Source};
pub use checkpoint::{Options, Progress, Report, Session, check, checkpoint};
pub use engine::Engine;
pub use error::{Error, Refusal, Result, list};
pub use work::calls_of;
