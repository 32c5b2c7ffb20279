//! Why there was no snapshot, or no rollback.

use stillpoint_capture::Refusal;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why there was no snapshot, or no rollback. But for [`Error::Killed`], the program runs on as if nothing had happened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It holds, or has done, something that cannot be undone (exit code 3).
    #[error("{}", stillpoint_capture::list(.0))]
    Refused(Vec<Refusal>),
    /// There is no such snapshot (exit code 2).
    #[error("there is no snapshot {0} of this program")]
    Unknown(String),
    /// It could not be looked at, or has ended.
    #[error(transparent)]
    Capture(#[from] stillpoint_capture::Error),
    /// Something could not be rebuilt in it.
    #[error(transparent)]
    Restore(#[from] stillpoint_restore::Error),
    /// The kernel refused an operation.
    #[error(transparent)]
    Kernel(#[from] stillpoint_linux::Error),
    /// The rollback failed half-way: what was left was neither then nor now, and was killed.
    #[error("the rollback failed half-way, and the program was killed: {0}")]
    Killed(String),
    /// Anything else that failed.
    #[error("{0}")]
    Failed(String),
}
