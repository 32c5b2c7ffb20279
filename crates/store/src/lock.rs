//! Locks between processes.

use crate::{Error, Result};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How often a lock that somebody else holds is tried again.
const INTERVAL: Duration = Duration::from_millis(5);

/// A `flock`, held until dropped. It dies with the process, however that ends.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

impl Lock {
    /// Takes a lock exclusively, waiting up to `patience`; `None` if somebody else held it all the while.
    pub fn exclusive(path: &Path, patience: Duration) -> Result<Option<Lock>> {
        let open = || File::options().read(true).append(true).create(true).open(path);
        Lock::exclusive_with(path, open, patience)
    }

    /// As [`Lock::exclusive`], of a file that is opened in some other way.
    pub fn exclusive_with(
        path: &Path,
        open: impl Fn() -> io::Result<File>,
        patience: Duration,
    ) -> Result<Option<Lock>> {
        take(path, open, FlockOperation::NonBlockingLockExclusive, patience)
    }

    /// The file that is locked.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Takes a lock together with others. On a medium that cannot be written, where nobody can remove anything
    /// either, there may be no lock to take; then the answer is `None`.
    pub fn shared(path: &Path) -> Result<Option<Lock>> {
        let open = || match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                File::options().read(true).append(true).create(true).open(path)
            }
            other => other,
        };
        // Exclusive holders only delete files; none takes long.
        match take(path, open, FlockOperation::NonBlockingLockShared, Duration::MAX) {
            Err(Error::Io { action: "open", .. }) => Ok(None),
            other => other,
        }
    }
}

fn take(
    path: &Path,
    open: impl Fn() -> io::Result<File>,
    operation: FlockOperation,
    patience: Duration,
) -> Result<Option<Lock>> {
    let start = Instant::now();
    loop {
        let file = open().map_err(Error::io("open", path))?;
        match rustix::fs::flock(&file, operation) {
            Ok(()) if is_at(&file, path) => return Ok(Some(Lock { file })),
            // The file was removed with its folder between our opening and locking it: another one counts now.
            Ok(()) => continue,
            Err(rustix::io::Errno::WOULDBLOCK) if start.elapsed() >= patience => return Ok(None),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(INTERVAL),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("lock", path)(e.into())),
        }
    }
}

/// Whether the open file is still the one of this name.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), path.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}
