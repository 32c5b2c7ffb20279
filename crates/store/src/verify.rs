//! Reading a whole checkpoint back to see whether it is intact.

use crate::{Checkpoint, Error, Result, Store, parallel};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use stillpoint_image::{Extent, Place};

/// What a verification has found.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of the checkpoint.
    pub id: u64,
    /// Extents that were read.
    pub extents: u64,
    /// Pages in them.
    pub pages: u64,
    /// What is wrong, by address. Empty: all is as it was written.
    pub problems: Vec<Error>,
}

impl Store {
    /// Reads a checkpoint completely, the newest if `id` is `None`: its manifest, and all pages it points to.
    ///
    /// # Errors
    /// As [`Store::load`]; damage in the pages themselves is in the report.
    pub fn verify(&self, job: &str, id: Option<u64>) -> Result<Report> {
        let checkpoint = self.load(job, id)?;
        let mut order: Vec<&Extent> =
            checkpoint.pages.extents.iter().filter(|e| e.place != Place::Zero).collect();
        // As it lies on the medium.
        order.sort_by_key(|extent| match extent.place {
            Place::Stored { segment, offset, skip, .. } => (segment, offset, skip),
            Place::Zero => (0, 0, 0),
        });
        let mut problems = read_all(&checkpoint, &order);
        problems.sort_by_key(|(extent, _)| (extent.owner, extent.address));
        Ok(Report {
            id: checkpoint.image.meta.id,
            extents: order.len() as u64,
            pages: checkpoint.pages.stored_pages(),
            problems: problems.into_iter().map(|(_, problem)| problem).collect(),
        })
    }
}

/// Reads extents on all processors.
fn read_all<'e>(checkpoint: &Checkpoint, order: &[&'e Extent]) -> Vec<(&'e Extent, Error)> {
    let problems = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = Vec::new();
        // Some at a time, so that each thread reads forward.
        while let Some(some) = order.get(next.fetch_add(16, Ordering::Relaxed)..).filter(|s| !s.is_empty()) {
            for extent in some.iter().take(16) {
                buffer.resize(extent.len() as usize, 0);
                if let Err(e) = checkpoint.reader.read(extent, &mut buffer) {
                    problems.lock().unwrap_or_else(PoisonError::into_inner).push((*extent, e));
                }
            }
        }
    };
    let threads = parallel::processors();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    problems.into_inner().unwrap_or_else(PoisonError::into_inner)
}
