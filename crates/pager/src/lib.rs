//! A program takes less memory than it uses: what it does not need now is in the job's store, where its checkpoints find it.
//!
//! Hsu and Chang joined checkpointing with paging in 1997: pages that leave memory are thereby saved, and a checkpoint writes only
//! what is in memory and was changed. Here the pages of an unmodified program are taken out and put back from user space.
//!
//! * [`table`] tells where each page is, `origin` those of the checkpoint that a program was restored from, [`slots`] which parts of the working segment are free, [`queue`] what leaves memory first.
//! * `server` puts in what is waited for, and follows what the program does with its memory.
//! * `evict` takes out. Pages are not copied and dropped, but moved (`UFFDIO_MOVE`), each with all that was ever written to it,
//!   from one instant to the next: whoever of us dies when, each page is in one place.
//! * `teller` tells what it has come to.
//!
//! Three processes stand in for each other, as those do that load the memory of a restored program
//! ([`stillpoint_restore::lazy::keepers`]); what they know is in memory that outlives each of them.
#![forbid(unsafe_code)]

mod arm;
mod cells;
mod evict;
mod growth;
mod origin;
pub mod queue;
mod server;
pub mod slots;
pub mod table;
mod teller;
mod work;

pub use work::{Heard, LEAST, Pagers, Restoring, start};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why memory cannot be paged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused an operation.
    #[error(transparent)]
    Kernel(#[from] stillpoint_linux::Error),
    /// The store did.
    #[error(transparent)]
    Store(#[from] stillpoint_store::Error),
    /// The program cannot be stopped, or asked.
    #[error(transparent)]
    Capture(#[from] stillpoint_capture::Error),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// Whether there is no room on the medium.
    pub fn is_full(&self) -> bool {
        matches!(self, Error::Store(e) if e.is_full())
    }
}

impl From<Error> for stillpoint_restore::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Kernel(e) => e.into(),
            Error::Store(e) => e.into(),
            e => stillpoint_restore::Error::Failed(e.to_string()),
        }
    }
}

impl From<stillpoint_restore::Error> for Error {
    fn from(e: stillpoint_restore::Error) -> Self {
        Error::Failed(e.to_string())
    }
}
