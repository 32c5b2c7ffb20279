//! What a command tells when it fails: one clear sentence, a line of what to do, an exit code.

use serde::{Deserialize, Serialize};
use std::fmt::Display;

/// Exit code: failed, the target is unharmed.
pub const FAILED: u8 = 1;
/// Exit code: usage or bad input.
pub const USAGE: u8 = 2;
/// Exit code: refused.
pub const REFUSED: u8 = 3;

/// A failed command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    /// What went wrong; further lines name one thing each.
    pub what: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Result of a command.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// The command failed.
    pub fn failed(what: impl Display) -> Self {
        Self { code: FAILED, what: what.to_string(), hint: None }
    }

    /// The user asked for something that does not exist or makes no sense.
    pub fn usage(what: impl Display) -> Self {
        Self { code: USAGE, what: what.to_string(), hint: None }
    }

    /// Something cannot be captured or put back.
    pub fn refused(what: impl Display) -> Self {
        Self { code: REFUSED, what: what.to_string(), hint: None }
    }

    /// Says what was being done.
    pub fn within(mut self, doing: &str) -> Self {
        self.what = format!("{doing}: {}", self.what);
        self
    }

    /// Adds what to do.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let indented = self.what.replace('\n', "\n  ").replace("\n  \n", "\n\n");
        write!(f, "stillpoint: {indented}")?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "\n  {hint}"))
    }
}

impl From<stillpoint_linux::Error> for Failure {
    fn from(error: stillpoint_linux::Error) -> Self {
        // The program's own limits are told of by whoever met them.
        let is_ours = !matches!(error, stillpoint_linux::Error::Remote { .. });
        let number = error.errno();
        let failure = Failure::failed(error);
        match number {
            Some(1 | 13) => failure.hint("stillpoint doctor tells which privileges are missing"), // EPERM, EACCES
            Some(24) if is_ours => match stillpoint_linux::descriptors::raise_descriptor_limit() {
                // EMFILE
                Ok((_, most)) => failure.hint(format!(
                    "it takes more open files than the {most} that stillpoint may have here: ulimit -n, prlimit(1)"
                )),
                Err(_) => failure,
            },
            _ => failure,
        }
    }
}

impl From<stillpoint_linux::supervise::SpawnError> for Failure {
    fn from(error: stillpoint_linux::supervise::SpawnError) -> Self {
        use stillpoint_linux::supervise::SpawnError;
        match error {
            SpawnError::Exec(..) => Failure::usage(error),
            SpawnError::Kernel(e) => e.into(),
        }
    }
}
