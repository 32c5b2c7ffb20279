//! What a program writes right after its checkpoint was taken: a restart will want the same first.

use super::tracking::Tracking;
use crate::Result;
use std::time::{Duration, Instant};
use stillpoint_image::{PAGE, Range};
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_store::{Committed, Sources, Store};

/// A smaller memory is loaded before its program runs, bytes.
const LEAST: u64 = 8 << 20;
/// Most that is kept, bytes; of a smaller memory a quarter of it.
const MOST: u64 = 32 << 20;
/// How fast memory comes back from a store of which nothing is known, bytes a second.
const RATE: u64 = 1 << 30;
/// From so many bytes on, how long they took to write tells how fast the store is.
const TELLING: u64 = 64 << 20;
/// The time in which all memory comes back is looked at in these parts: what was written in the first is wanted before the rest.
const PARTS: [f64; 3] = [0.125, 0.5, 1.0];

/// The time after a checkpoint.
#[derive(Debug)]
pub(crate) struct Aftermath {
    store: Store,
    job: String,
    id: u64,
    taken: Instant,
    /// As long as it takes to load what was saved.
    window: Duration,
    /// So many parts of it are over.
    parts: usize,
    most: u64,
    /// Written, in the order in which it was found.
    found: Vec<Range>,
}

impl Aftermath {
    /// Begins with what was saved a moment ago, which took so long; nothing if there is too little of it.
    pub fn begin(store: &Store, job: &str, committed: &Committed, took: Duration) -> Option<Self> {
        let bytes = committed.pages * PAGE;
        let rate = match committed.written_bytes {
            written if written >= TELLING => written as f64 / took.as_secs_f64().max(1e-3),
            _ => RATE as f64,
        };
        let window = Duration::from_secs_f64(bytes as f64 / rate);
        let (store, job, id, taken) = (store.clone(), job.to_owned(), committed.id, Instant::now());
        let most = MOST.min(bytes / 4);
        (bytes >= LEAST).then_some(Aftermath {
            store,
            job,
            id,
            taken,
            window,
            parts: 0,
            most,
            found: Vec::new(),
        })
    }

    /// Looks what has been written, when it is time. Whether it is not over yet.
    pub fn attend(&mut self, tracking: &Tracking, pagemap: &Pagemap) -> Result<bool> {
        let due = self.window.mul_f64(PARTS[self.parts]);
        if self.taken.elapsed() < due {
            return Ok(true);
        }
        let parts_over = |part: &&f64| self.taken.elapsed() >= self.window.mul_f64(**part);
        self.parts = PARTS.iter().take_while(parts_over).count();
        let mut known = self.found.clone();
        known.sort_unstable_by_key(|range| range.start);
        self.found.extend(tracking.written_beside(pagemap, &known)?);
        if self.parts < PARTS.len() {
            return Ok(true);
        }
        self.keep()?;
        Ok(false)
    }

    /// Tells the next restart.
    fn keep(&self) -> Result<()> {
        let mut room = self.most;
        let parts = self.found.iter().map(|range| {
            let len = range.len.min(room);
            room -= len;
            Range { start: range.start, len }
        });
        let wanted: Vec<Range> = parts.filter(|part| part.len > 0).collect();
        if !wanted.is_empty() {
            let checkpoint = self.store.load(&self.job, Some(self.id))?;
            self.store.keep_touch_set(&checkpoint, &wanted, Sources::WRITES)?;
        }
        Ok(())
    }
}
