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

use std::os::fd::{AsRawFd, OwnedFd};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stdio {
    /// To the standard streams of the restoring process.
    Current,
    /// To `/dev/null`.
    #[default]
    Null,
}

/// What becomes of pipes of which a process outside had an end, other than the streams that the program was started with (`--pipes`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pipes {
    /// They are those that were kept since the program was killed at its checkpoint. With another one that is not
    /// [connected](Streams::connections) the program is not restored.
    #[default]
    Kept,
    /// They become the descriptors with the same numbers of whoever restores.
    Follow,
    /// Who had the other end has left.
    Closed,
}

/// Where what led outside of the program leads after the restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Pipes other than those that it was started with.
    pub pipes: Pipes,
    /// What is connected by hand: one for each descriptor.
    pub connections: Vec<Connection>,
}

/// A descriptor of the program that is connected by hand (`--fd`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its number in the first process of the program.
    pub number: u32,
    /// With what.
    pub to: To,
}

/// What a descriptor of the program is connected with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum To {
    /// A file, which is made if the program writes to it and it is not there; what is written comes at its end.
    File(std::path::PathBuf),
    /// The descriptor with this number of whoever restores.
    Descriptor(u32),
}

/// What comes in later from where the program was reading, to be written behind what it had not yet read.
#[derive(Debug)]
pub struct Pump {
    /// The number under which the program had it.
    pub number: u32,
    /// Where it comes from.
    pub from: OwnedFd,
    /// A pipe that the program reads.
    pub to: OwnedFd,
}

impl Pump {
    /// What `/proc/PID/fd` calls the pipe, and where it comes from.
    ///
    /// # Errors
    /// That the kernel does not tell.
    pub fn links(&self) -> Result<[Vec<u8>; 2]> {
        let own = stillpoint_linux::proc::Proc::process(std::process::id())?;
        let link = |fd: &OwnedFd| own.link(&format!("fd/{}", fd.as_raw_fd()));
        Ok([link(&self.to)?, link(&self.from)?])
    }
}
