//! Why a checkpoint was not restored.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint was not restored. Whatever it is, no half process is left behind.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The world is not as the program left it (exit code 3): one line for each thing.
    #[error("{}", .0.join("\n"))]
    Refused(Vec<String>),
    /// The kernel refused an operation (exit code 1).
    #[error(transparent)]
    Kernel(#[from] stillpoint_linux::Error),
    /// Anything else that failed (exit code 1).
    #[error("{0}")]
    Failed(String),
}
