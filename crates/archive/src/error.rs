//! What can go wrong with an archive.

use std::io;
use stillpoint_image::wire::WireError;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint was not exported or imported. After a failed import nothing of it is in the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It does not begin as an archive does.
    #[error("not a checkpoint that was exported by stillpoint")]
    Foreign,
    /// Written by a later version of the program.
    #[error(
        "written in archive version {found}, this program reads up to {}: use a newer stillpoint",
        crate::frame::VERSION
    )]
    Newer {
        /// Its version.
        found: u32,
    },
    /// It ends before its end mark.
    #[error("it ends after {at} bytes, before its end mark: it was cut, or is not complete yet")]
    Truncated {
        /// Bytes that there are.
        at: u64,
    },
    /// Something follows its end mark.
    #[error("there is more behind its end mark, at byte {at}")]
    Trailing {
        /// Where that begins.
        at: u64,
    },
    /// A part of it has changed since it was written.
    #[error("it is damaged at byte {at}: {what}")]
    Damaged {
        /// Where the part begins.
        at: u64,
        /// Which part, and how that shows.
        what: String,
    },
    /// Its checksums hold, but its parts contradict each other: it was not made by this program.
    #[error("it contradicts itself at byte {at}: {what}")]
    Inconsistent {
        /// Where.
        at: u64,
        /// How.
        what: String,
    },
    /// What it describes is not a checkpoint.
    #[error("the checkpoint in it: {0}")]
    Manifest(#[from] WireError),
    /// Files that were to go along cannot: one line for each.
    #[error("{}", .0.join("\n"))]
    Files(Vec<String>),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] stillpoint_store::Error),
    /// It cannot be read.
    #[error("read: {0}")]
    Read(io::Error),
    /// It cannot be written.
    #[error("write: {0}")]
    Write(io::Error),
}

impl Error {
    /// Whether what was to be imported is at fault (exit code 2), rather than something having failed.
    pub fn is_input(&self) -> bool {
        use Error::*;
        matches!(
            self,
            Foreign
                | Newer { .. }
                | Truncated { .. }
                | Trailing { .. }
                | Damaged { .. }
                | Inconsistent { .. }
                | Manifest(_)
        )
    }
}
