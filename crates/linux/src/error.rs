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

    /// A failed access to a file below `/proc/PID`: [`Error::Gone`] if it failed because the process has ended, all of whose files
    /// are missing then (`ENOENT`), or which has no memory any more that they could tell of (`ESRCH`).
    pub(crate) fn file_of(pid: u32, path: impl Into<PathBuf>, source: impl Into<std::io::Error>) -> Self {
        let source = source.into();
        let gone = match source.raw_os_error() {
            Some(libc::ESRCH) => true,
            Some(libc::ENOENT) => !std::path::Path::new(&format!("/proc/{pid}")).exists(),
            _ => false,
        };
        if gone { Error::Gone(pid) } else { Error::file(path, source) }
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
