//! The folder of a job: names of the files in it.

use crate::medium::temporary;
use crate::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};

/// The folder of a job.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    /// Name of the job.
    pub job: String,
    /// `STORE/jobs/JOB`.
    pub path: PathBuf,
}

impl Folder {
    pub fn segments(&self) -> PathBuf {
        self.path.join("segments")
    }

    pub fn segment(&self, id: u64) -> PathBuf {
        self.segments().join(format!("{id}.pages"))
    }

    /// A segment file that is kept to be written anew.
    pub fn spare(&self) -> PathBuf {
        self.segments().join("spare")
    }

    /// One of several that are kept.
    pub fn further_spare(&self, id: u64) -> PathBuf {
        self.segments().join(format!("{id}.spare"))
    }

    /// All segment files that are kept to be written anew.
    pub fn spares(&self) -> Result<Vec<PathBuf>> {
        let first = Some(self.spare()).filter(|spare| spare.exists());
        let further = numbers(&self.segments(), ".spare")?.into_iter().map(|id| self.further_spare(id));
        Ok(first.into_iter().chain(further).collect())
    }

    /// Locked for as long as somebody works in a segment.
    pub fn pin(&self, id: u64) -> PathBuf {
        self.segments().join(format!("{id}.pin"))
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    pub fn checkpoint(&self, id: u64) -> PathBuf {
        self.checkpoints().join(id.to_string())
    }

    pub fn temporary_checkpoint(&self, id: u64) -> PathBuf {
        temporary(&self.checkpoint(id))
    }

    pub fn tails(&self) -> PathBuf {
        self.path.join("tails")
    }

    pub fn touch_sets(&self) -> PathBuf {
        self.path.join("touch")
    }

    pub fn touch_set(&self, id: u64) -> PathBuf {
        self.touch_sets().join(id.to_string())
    }

    pub fn ledger(&self) -> PathBuf {
        self.path.join("ledger")
    }

    /// There while checkpoints have been removed whose room was not given back; locked by whoever does so later.
    pub fn owes_room(&self) -> PathBuf {
        self.path.join("owes-room")
    }

    pub fn running(&self) -> PathBuf {
        self.path.join("running")
    }

    pub fn terms(&self) -> PathBuf {
        self.path.join("terms")
    }

    pub fn pace(&self) -> PathBuf {
        self.path.join("pace")
    }

    pub fn trouble(&self) -> PathBuf {
        self.path.join("trouble")
    }

    pub fn paging(&self) -> PathBuf {
        self.path.join("paging")
    }

    pub fn history(&self) -> PathBuf {
        self.path.join("history")
    }

    pub fn control(&self) -> PathBuf {
        self.path.join("control")
    }

    pub fn writer_lock(&self) -> PathBuf {
        self.path.join("writer.lock")
    }

    pub fn reader_lock(&self) -> PathBuf {
        self.path.join("reader.lock")
    }

    pub fn name_lock(&self) -> PathBuf {
        self.path.join("name.lock")
    }

    /// Ids of the committed checkpoints, ascending.
    pub fn checkpoint_ids(&self) -> Result<Vec<u64>> {
        numbers(&self.checkpoints(), "")
    }

    /// Ids of the segment files, ascending, whether anything points to them or not.
    pub fn segment_ids(&self) -> Result<Vec<u64>> {
        numbers(&self.segments(), ".pages")
    }

    /// Ids of the segments that somebody works in, or did until they died.
    pub fn pin_ids(&self) -> Result<Vec<u64>> {
        numbers(&self.segments(), ".pin")
    }
}

/// Names in a folder, in no order; none if there is no such folder.
pub(crate) fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(Error::io("list", folder))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(Error::io("list", folder))?.file_name();
        names.extend(name.into_string()); // none of ours is anything but UTF-8
    }
    Ok(names)
}

/// Numbers `N` of the files `N<suffix>` in a folder, ascending.
pub(crate) fn numbers(folder: &Path, suffix: &str) -> Result<Vec<u64>> {
    let number = |name: &String| {
        let digits = name.strip_suffix(suffix)?;
        digits.parse().ok().filter(|n: &u64| n.to_string() == digits)
    };
    let mut ids: Vec<u64> = names(folder)?.iter().filter_map(number).collect();
    ids.sort_unstable();
    Ok(ids)
}
