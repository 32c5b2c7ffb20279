//! What can go wrong; the message says what and where.

use std::path::PathBuf;

/// Why a mirror could not be made, recovered or checkpointed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A region holds its own tables and at least some pages for the program.
    #[error("a region of {size} bytes is too small: at least {least}")]
    TooSmall {
        /// What was asked for, bytes.
        size: usize,
        /// The least, bytes.
        least: usize,
    },
    /// Sizes are bounded by the address space.
    #[error("a region of {size} bytes is too large: at most {most}")]
    TooLarge {
        /// What was asked for, bytes.
        size: usize,
        /// The most, bytes.
        most: usize,
    },
    /// There is one mirror in a process: all mirrored memory is cut at one instant.
    #[error("this process has a mirror already")]
    AlreadyOpen,
    /// Something else lies where mirrored memory must lie.
    #[error("{what}: something is mapped within {address:#x}, {len} bytes, already")]
    AddressTaken {
        /// What was to be mapped.
        what: &'static str,
        /// Where.
        address: usize,
        /// Bytes.
        len: usize,
    },
    /// The kernel gives no memory.
    #[error("{what}: mapping {len} bytes at {address:#x}: {why}")]
    Map {
        /// What was to be mapped.
        what: &'static str,
        /// Where.
        address: usize,
        /// Bytes.
        len: usize,
        /// The kernel's reason.
        why: std::io::Error,
    },
    /// The kernel lacks what the checkpointer needs.
    #[error("membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) is not to be had here: {0}")]
    Membarrier(std::io::Error),
    /// The backing file exists where a new one is to be made.
    #[error("{0}: there is a file already")]
    Exists(PathBuf),
    /// There is no backing file to be recovered.
    #[error("{0}: no such backing file")]
    Missing(PathBuf),
    /// Another process has the backing file.
    #[error("{0}: another process uses this backing file")]
    Busy(PathBuf),
    /// The file is not a backing file, or not of a version that is known here.
    #[error("{path}: {what}")]
    NotABacking {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The backing file was made for another layout.
    #[error("{path}: its {what} is {found}, not {wanted}: it was made for another layout")]
    OtherLayout {
        /// The file.
        path: PathBuf,
        /// Which property differs.
        what: &'static str,
        /// What the file says.
        found: String,
        /// What the options say.
        wanted: String,
    },
    /// No checkpoint was completed yet.
    #[error("{0}: holds no complete checkpoint")]
    NoCheckpoint(PathBuf),
    /// Bytes that were read back are not those that were written.
    #[error("{path}: {what} is damaged")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which part.
        what: String,
    },
    /// Reading or writing failed.
    #[error("{path}: {what}: {why}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// The kernel's reason.
        why: std::io::Error,
    },
    /// A checkpoint is still being taken.
    #[error("a checkpoint is being taken")]
    InProgress,
    /// The mirror is closed, or its checkpointer has ended.
    #[error("the mirror is closed")]
    Closed,
    /// A thread could not be started.
    #[error("starting the checkpointer's thread: {0}")]
    Thread(std::io::Error),
    /// Remapping has no single instant for several threads.
    #[error("the remapping switch is for one writing thread, and there are {0}")]
    RemapThreads(usize),
    /// A thread does not come to a point where it is known not to be storing.
    #[error("thread {thread} did not leave its store within {seconds} s")]
    Stuck {
        /// Its id.
        thread: i32,
        /// How long it was waited for.
        seconds: u64,
    },
}
