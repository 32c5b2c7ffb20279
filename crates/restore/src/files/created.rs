//! Names in the file system that a restore made, to be removed if it fails.

use std::path::{Path, PathBuf};

/// Names to be removed when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Created {
    names: Vec<PathBuf>,
}

impl Created {
    /// Notes a name.
    pub fn note(&mut self, name: &Path) {
        self.names.push(name.to_owned());
    }

    /// They stay.
    pub fn keep(&mut self) {
        self.names.clear();
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = std::fs::remove_file(name);
        }
    }
}
