//! Why a checkpoint was not taken.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint was not taken. Whatever it is, the target runs on unharmed and the store is as before.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The target holds something that cannot be captured (exit code 3).
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// It is not able to make the system calls that this way takes; another may not take them (exit code 3).
    #[error("{0}")]
    Incapable(Refusal),
    /// There is no such target, or it cannot be a target (exit code 2): a zombie, a kernel thread, ourselves, …
    #[error("{0}")]
    Target(String),
    /// A state of it that does not last, but kept it from being stopped (exit code 1).
    #[error("{0}; try again")]
    Passing(String),
    /// Another of us has stopped it, for a moment (exit code 2).
    #[error("{0}")]
    Busy(String),
    /// The checkpoint could not be stored (exit code 1).
    #[error(transparent)]
    Store(#[from] stillpoint_store::Error),
    /// The kernel refused an operation (exit code 1).
    #[error(transparent)]
    Kernel(#[from] stillpoint_linux::Error),
    /// The program has done away with memory of the instant before it was saved: another instant, or another engine,
    /// may do better (exit code 1).
    #[error("the checkpoint could not be completed: {0}")]
    Lost(String),
    /// It was restored a moment ago, and some of its memory is still being loaded (exit code 1).
    #[error("its memory is still being loaded")]
    Loading,
    /// It has become another program while it was looked at (`execve(2)`), again and again (exit code 1).
    #[error("it replaces itself by another program all the time")]
    Replaced,
    /// Somebody else follows what it writes, as only one can (exit code 3).
    #[error("{0} follows what it writes already")]
    Followed(String),
    /// Anything else that failed (exit code 1).
    #[error("{0}")]
    Failed(String),
}

/// One thing that cannot be captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What it is: `descriptor 5 (socket:[1234])`.
    pub what: String,
    /// Why it cannot be captured.
    pub why: String,
    /// What the user can do about it.
    pub hint: String,
}

impl Refusal {
    /// What the hints begin with where nothing has to be done but to wait for the program.
    const WAIT: &str = "try again";

    /// Whether it is about a moment: somebody is between `vfork(2)` and `execve(2)`, or something is on its way.
    pub fn will_pass(&self) -> bool {
        self.hint.starts_with(Self::WAIT)
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.what, self.why)?;
        if !self.hint.is_empty() {
            write!(f, " ({})", self.hint)?;
        }
        Ok(())
    }
}

/// The refusals, a line for each reason with the first that it holds for, and how many more.
pub fn list(refusals: &[Refusal]) -> String {
    const NAMED: usize = 6;
    let mut lines: Vec<(&Refusal, Vec<&str>)> = Vec::new();
    for refusal in refusals {
        match lines.iter_mut().find(|(l, _)| l.why == refusal.why && l.hint == refusal.hint) {
            Some((_, all)) => all.push(&refusal.what),
            None => lines.push((refusal, vec![&refusal.what])),
        }
    }
    let line = |(refusal, all): (&Refusal, Vec<&str>)| {
        let mut what = all[..all.len().min(NAMED)].join(", ");
        if all.len() > NAMED {
            what += &format!(" and {} more", all.len() - NAMED);
        }
        Refusal { what, ..refusal.clone() }.to_string()
    };
    lines.into_iter().map(line).collect::<Vec<_>>().join("\n")
}
