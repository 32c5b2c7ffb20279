//! Directories that are gone, and needed for a moment: a socket is bound to a name in them, or a deleted file made anew.

use crate::{Error, Result};
use rustix::fs::Mode;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Directories that are there only for as long as this is.
#[derive(Debug, Default)]
pub(super) struct Detour {
    made: Vec<PathBuf>,
    taken: HashSet<PathBuf>,
}

impl Detour {
    /// Makes those on the way to `path` that are missing.
    pub fn to(path: &Path) -> Result<Detour> {
        let mut detour = Detour::default();
        detour.lead_to(path)?;
        Ok(detour)
    }

    /// Whether it has made a directory that nobody has taken for one of the program's yet.
    pub fn take(&mut self, directory: &Path) -> bool {
        self.made.iter().any(|made| made == directory) && self.taken.insert(directory.to_owned())
    }

    /// The same, besides those that are there already because of it.
    pub fn lead_to(&mut self, path: &Path) -> Result<()> {
        let missing: Vec<&Path> = path.ancestors().skip(1).take_while(|d| !d.exists()).collect();
        for directory in missing.into_iter().rev() {
            let failed = |e| {
                let why = format!("its directory is gone, and cannot be made for a moment: {e}");
                Error::Refused(vec![format!("{}: {why}", path.display())])
            };
            rustix::fs::mkdir(directory, Mode::RWXU).map_err(failed)?;
            self.made.push(directory.to_owned());
        }
        Ok(())
    }
}

impl Drop for Detour {
    fn drop(&mut self) {
        for directory in self.made.iter().rev() {
            let _ = std::fs::remove_dir(directory);
        }
    }
}
