//! Why a checkpoint was not restored.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint was not restored. Whatever it is, no half process is left behind.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The world is not as the program left it (exit code 3): one line for each thing.
    #[error("{}", .0.join("\n"))]
    Refused(Vec<String>),
    /// Another process has the program's id, or the id of one of its threads (exit code 3).
    #[error("process id {0} (or the id of one of its threads) is taken")]
    PidTaken(u32),
    /// Ids as high as the program's are not given out here (exit code 3).
    #[error("process id {0} is higher than they go here (kernel.pid_max)")]
    PidTooHigh(u32),
    /// Its pid namespaces would lie deeper than the kernel lets them (exit code 1).
    #[error("process {0} cannot be made here: the kernel lets no more pid namespaces lie within each other")]
    TooDeep(u32),
    /// Choosing process ids is not allowed (exit code 1).
    #[error("not allowed to make a process with id {0}: this needs CAP_CHECKPOINT_RESTORE or root")]
    NoPidPrivilege(u32),
    /// The checkpoint cannot be read (exit code 1).
    #[error(transparent)]
    Store(#[from] stillpoint_store::Error),
    /// The kernel refused an operation (exit code 1).
    #[error(transparent)]
    Kernel(#[from] stillpoint_linux::Error),
    /// Anything else that failed (exit code 1).
    #[error("{0}")]
    Failed(String),
}
