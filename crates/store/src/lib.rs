//! Where checkpoints live: segments, manifests, commit, verify, prune.
//!
//! STUB of branch `cli`: to be replaced by the real store.
#![allow(missing_docs, clippy::missing_errors_doc)]

use std::path::{Path, PathBuf};
use stillpoint_image::{Image, Meta, PageMap};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("no such checkpoint: {0}")]
    Missing(String),
}
pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub struct Store {
    path: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    pub pid: u32,
    pub start_time: u64,
    pub boot_id: String,
}

#[derive(Debug)]
pub struct Checkpoint {
    pub image: Image,
    pub pages: PageMap,
}

impl Store {
    pub fn open(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path.join("jobs"))
            .map_err(|source| Error::File { path: path.into(), source })?;
        Ok(Self { path: path.into() })
    }
    pub fn path(&self) -> &Path {
        &self.path
    }
    fn record(&self, job: &str) -> PathBuf {
        self.path.join("jobs").join(job).join("running")
    }
    pub fn jobs(&self) -> Result<Vec<String>> {
        let dir = self.path.join("jobs");
        let entries = std::fs::read_dir(&dir).map_err(|source| Error::File { path: dir, source })?;
        let mut names: Vec<String> =
            entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        Ok(names)
    }
    pub fn running(&self, job: &str) -> Result<Option<Running>> {
        let Ok(text) = std::fs::read_to_string(self.record(job)) else { return Ok(None) };
        let mut f = text.split_whitespace();
        let mut number = || f.next().and_then(|w| w.parse::<u64>().ok()).unwrap_or(0);
        let (pid, start_time) = (number() as u32, number());
        Ok(Some(Running { pid, start_time, boot_id: f.next().unwrap_or("").into() }))
    }
    pub fn set_running(&self, job: &str, r: &Running) -> Result<()> {
        let path = self.record(job);
        let _ = std::fs::create_dir_all(path.parent().unwrap_or(&path));
        std::fs::write(&path, format!("{} {} {}\n", r.pid, r.start_time, r.boot_id))
            .map_err(|source| Error::File { path, source })
    }
    pub fn clear_running(&self, job: &str) -> Result<()> {
        let _ = std::fs::remove_file(self.record(job));
        let _ = std::fs::remove_dir(self.path.join("jobs").join(job));
        Ok(())
    }
    pub fn checkpoints(&self, _job: &str) -> Result<Vec<Meta>> {
        Ok(Vec::new())
    }
    pub fn checkpoint(&self, job: &str, id: Option<u64>) -> Result<Checkpoint> {
        Err(Error::Missing(format!("{job}@{id:?}")))
    }
}
