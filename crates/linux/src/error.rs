//! What can go wrong when talking to the kernel.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed kernel operation, with the object it was done to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call of ours failed.
    #[error("{what}: {source}")]
    Call {
        /// The operation and its object, for people.
        what: String,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A file of the kernel does not read as expected.
    #[error("{}: cannot make sense of {line:?}", path.display())]
    Parse {
        /// Which file.
        path: PathBuf,
        /// The offending text.
        line: String,
    },
    /// A system call that was run inside another process failed.
    #[error("{call} inside process {pid}: {source}")]
    Remote {
        /// Name of the system call and, where it helps, its object.
        call: String,
        /// Process it ran in.
        pid: u32,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The process ended.
    #[error("process {0} ended")]
    Gone(u32),
    /// Anything else, in words.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// A failed system call of ours on some object.
    pub fn call(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Error::Call { what: what.into(), source: source.into() }
    }

    /// A failed access to a file.
    pub fn file(path: impl Into<PathBuf>, source: impl Into<std::io::Error>) -> Self {
        Error::File { path: path.into(), source: source.into() }
    }

    /// The operating system's error number, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Error::Call { source, .. } | Error::File { source, .. } | Error::Remote { source, .. } => {
                source.raw_os_error()
            }
            _ => None,
        }
    }
}
