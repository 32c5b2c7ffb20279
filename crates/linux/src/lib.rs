//! The kernel interfaces: remote system calls, ptrace, `/proc`, pagemap, sockets' state.
//!
//! The only room with `unsafe` and architecture-specific code. Nothing here knows what a checkpoint is.
#![allow(unsafe_code)] // each block says why it holds

pub mod error;
pub mod probe;
pub mod program;
pub mod supervise;

pub use error::{Error, Result};

/// An address in another process. It is never dereferenced here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteAddr(pub u64);

impl std::fmt::Display for RemoteAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
