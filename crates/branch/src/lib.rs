//! A running program goes back to where it was: snapshots in memory, and rollback.
#![forbid(unsafe_code)]

mod attributes;
mod between;
mod connections;
mod descriptors;
pub mod error;
pub mod files;
pub mod history;
pub mod layout;
mod member;
pub mod program;
mod still;

pub use error::{Error, Result};
pub use history::Id;
pub use program::{Program, Rolled, State, Taken, Terms};
