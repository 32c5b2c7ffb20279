//! A checkpoint becomes a running process: rebuild, loaders.
#![forbid(unsafe_code)]

mod attach;
pub mod attributes;
mod burial;
pub mod clock;
pub mod error;
pub mod family;
pub mod files;
mod groups;
mod heritage;
mod job_control;
pub mod lazy;
pub mod loader;
mod mounts;
mod namespaces;
mod overlays;
pub mod owners;
mod pace;
pub mod rebuild;
mod rehearsal;
mod remembered;
pub mod space;
mod tmpfs;
mod users;

pub use error::{Error, Result};
pub use lazy::{Coming, Pager, Parted, Place, Steward, Template, Waiting};
pub use rebuild::{Heard, Ids, Lazily, Options, Progress, Restored, restore};
pub use rehearsal::rehearse;

/// What to do about files that the program had open for writing and that changed since (`--files`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FilesPolicy {
    /// A file that only grew is cut back to its recorded size (the tail is kept in the store); any other change
    /// is refused.
    #[default]
    Rollback,
    /// Files are taken as they are.
    Keep,
    /// Any change is refused.
    Refuse,
}

/// What becomes of the program's TCP connections with others (`--tcp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TcpPolicy {
    /// Those that were kept since it was killed at its checkpoint go on; all others are over.
    #[default]
    Established,
    /// All are over.
    Close,
}

/// Where standard streams from outside the job lead after the restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdio {
    /// To the standard streams of the restoring process.
    Current,
    /// To `/dev/null`.
    Null,
}
