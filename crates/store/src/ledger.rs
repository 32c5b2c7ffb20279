//! What must be remembered of a job beyond its files: ids that were given out, and work that is under way.

use crate::Result;
use crate::folder::Folder;
use crate::medium::Medium;
use crate::record::Record;

/// The ledger of a job. Written by the holder of `writer.lock` only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    /// Highest id of a checkpoint that was ever visible (as far as it was recorded; see [`Ledger::read`]).
    pub checkpoint: u64,
    /// Highest id ever given to a segment.
    pub segment: u64,
    /// What is under way: the checkpoint that the highest segment was begun for, or 0 while something is removed.
    pub pending: Option<u64>,
    /// In which boot of the machine it was written. Removals are not synced one by one: after a power cut some of them may not have
    /// happened, although the ledger says that all is done.
    pub boot: Option<String>,
    /// It tells what cannot be made up from the files: what had the highest ids is gone.
    pub beyond: bool,
}

impl Ledger {
    /// Reads the ledger and brings it up to date with the files. One that is missing or damaged is made up from the
    /// files alone: then ids of removed checkpoints may come again, and nothing worse.
    pub fn read(folder: &Folder) -> Result<Ledger> {
        let mut ledger = match Record::read("ledger", &folder.ledger()) {
            Ok(Some(record)) => Ledger {
                checkpoint: record.get("checkpoint").unwrap_or(0),
                segment: record.get("segment").unwrap_or(0),
                pending: record.get("pending"),
                boot: record.text("boot"),
                beyond: false,
            },
            Ok(None) | Err(crate::Error::Record { .. }) => Ledger::default(),
            Err(e) => return Err(e),
        };
        let highest = |ids: Vec<u64>| ids.last().copied().unwrap_or(0);
        let (checkpoint, segment) = (highest(folder.checkpoint_ids()?), highest(folder.segment_ids()?));
        ledger.beyond = ledger.checkpoint > checkpoint || ledger.segment > segment;
        ledger.checkpoint = ledger.checkpoint.max(checkpoint);
        ledger.segment = ledger.segment.max(segment);
        Ok(ledger)
    }

    /// Replaces it. It is made durable only if it tells what the files do not: a crash of the machine may then leave the old one, a new
    /// one or an empty one, and all is looked through after that anyway.
    pub fn write(&self, medium: &Medium, folder: &Folder) -> Result<()> {
        let mut record =
            Record::new("ledger").number("checkpoint", self.checkpoint).number("segment", self.segment);
        record = record.with("boot", medium.boot());
        if let Some(id) = self.pending {
            record = record.number("pending", id);
        }
        match self.beyond {
            true => record.write(medium, &folder.ledger()),
            false => record.write_for_now(medium, &folder.ledger()),
        }
    }

    /// Whether the machine has been started anew since it was written.
    pub fn is_of_another_boot(&self, medium: &Medium) -> bool {
        self.boot.as_ref() != Some(&medium.boot())
    }

    /// Whether work was begun and neither completed nor undone.
    pub fn unfinished(&self, folder: &Folder) -> bool {
        match self.pending {
            None => false,
            Some(0) => true,
            Some(id) => folder.segment(self.segment).exists() && !folder.checkpoint(id).exists(),
        }
    }
}
