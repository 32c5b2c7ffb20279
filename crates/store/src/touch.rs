//! Touch sets: what a program wanted first after it was restored, in that order, one behind the other.
//!
//! `touch/ID` is about checkpoint ID and holds a copy of some of its pages. It is a hint: without it, or with a damaged one,
//! a restart takes longer, and nothing else. So it is not made durable, and who reads it checks every byte.

use crate::folder::{Folder, numbers};
use crate::lock::Lock;
use crate::reader::Checkpoint;
use crate::{Error, Result, Store};
use bitflags::bitflags;
use rustix::fs::OFlags;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use stillpoint_image::{Extent, Meta, Owner, PAGE, Range};

const MAGIC: [u8; 8] = *b"STILLTCH";
const VERSION: u32 = 2;
/// Length of the header, bytes: magic, version (4), number of runs (4), number of the checkpoint, when that was taken,
/// where it comes from (4), checksum of all that and of the table (4).
const HEADER: usize = 40;
/// Length of a run in the table, bytes: address, pages (4), checksum of its contents (4).
const RUN: usize = 16;

bitflags! {
    /// How it is known what a program wants first.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Sources: u32 {
        /// It waited for it after earlier restores.
        const RESTORES = 1 << 0;
        /// It wrote to it right after the checkpoint was taken.
        const WRITES = 1 << 1;
    }
}

/// A run of pages of a touch set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    range: Range,
    crc: u32,
    /// Where its contents are in the file, bytes.
    offset: u64,
}

/// The touch set of a checkpoint, open.
#[derive(Debug)]
pub struct TouchSet {
    path: PathBuf,
    file: File,
    runs: Vec<Run>,
    sources: Sources,
}

impl TouchSet {
    /// Number of runs of pages.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes of all runs.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.range.len).sum()
    }

    /// Where it comes from.
    pub fn sources(&self) -> Sources {
        self.sources
    }

    /// A run: addresses of whole pages.
    pub fn run(&self, index: usize) -> Range {
        self.runs[index].range
    }

    /// Reads the pages of some runs, one behind the other, and checks them.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Segment`]; what is in `out` then is meaningless.
    pub fn read(&self, runs: std::ops::Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let runs = &self.runs[runs];
        let Some(first) = runs.first() else {
            out.clear();
            return Ok(());
        };
        out.resize(runs.iter().map(|run| run.range.len as usize).sum(), 0);
        self.file.read_exact_at(out, first.offset).map_err(Error::io("read", &self.path))?;
        let mut rest = out.as_slice();
        for run in runs {
            let (bytes, later) = rest.split_at(run.range.len as usize);
            rest = later;
            if crc32fast::hash(bytes) != run.crc {
                let why = "it does not match its checksum".to_owned();
                return Err(Error::Segment { path: self.path.clone(), why });
            }
        }
        Ok(())
    }

    /// The file that it reads from.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Opens that of a checkpoint; nothing if there is none that can be used.
    pub(crate) fn open(folder: &Folder, meta: &Meta) -> Option<TouchSet> {
        let path = folder.touch_set(meta.id);
        let file = File::open(&path).ok()?;
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0).ok()?;
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let len = file.metadata().ok()?.len();
        let table_len = (word(12) as usize).checked_mul(RUN).filter(|&table| table as u64 <= len)?;
        let mut table = vec![0; table_len];
        file.read_exact_at(&mut table, HEADER as u64).ok()?;
        let sources = Sources::from_bits_retain(word(32));
        if header != *head(meta, sources, &table) {
            return None;
        }
        let mut offset = (HEADER + table.len()) as u64;
        let mut runs = Vec::with_capacity(table.len() / RUN);
        for bytes in table.as_chunks::<RUN>().0 {
            let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
            let start = u64::from(half(0)) | u64::from(half(4)) << 32;
            let range = Range { start, len: u64::from(half(8)) * PAGE };
            start.checked_add(range.len)?;
            runs.push(Run { range, crc: half(12), offset });
            offset += range.len;
        }
        (offset == len).then_some(TouchSet { path, file, runs, sources })
    }
}

/// The header of a touch set with this table.
fn head(meta: &Meta, sources: Sources, table: &[u8]) -> Box<[u8; HEADER]> {
    let mut header = Box::new([0; HEADER]);
    header[0..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&((table.len() / RUN) as u32).to_le_bytes());
    header[16..24].copy_from_slice(&meta.id.to_le_bytes());
    header[24..32].copy_from_slice(&meta.taken_ns.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    header[32..36].copy_from_slice(&sources.bits().to_le_bytes());
    crc.update(&header[..36]);
    crc.update(table);
    header[36..40].copy_from_slice(&crc.finalize().to_le_bytes());
    header
}

impl Store {
    /// Keeps what was wanted first of the memory of a checkpoint's first address space: ranges of whole pages, in that order.
    /// What of them the checkpoint does not have is left out. It takes the place of what was kept before.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Damaged`], [`Error::NoCheckpoint`] if it was removed meanwhile.
    pub fn keep_touch_set(&self, checkpoint: &Checkpoint, wanted: &[Range], sources: Sources) -> Result<()> {
        let meta = &checkpoint.image.meta;
        let folder = self.known(&meta.job)?;
        let extents = checkpoint.pages.of(Owner::Space(0));
        let runs: Vec<Extent> = wanted.iter().flat_map(|range| parts(extents, *range)).collect();
        self.medium.make_folders(&folder.touch_sets())?;
        // One at a time. What is left if the checkpoint is removed in this moment goes with the next that is.
        let _lock = Lock::exclusive(&folder.touch_sets().join("lock"), std::time::Duration::MAX)?;
        if !folder.checkpoint(meta.id).exists() {
            let (job, store) = (meta.job.clone(), self.path().to_owned());
            return Err(Error::NoCheckpoint { job, id: meta.id, store });
        }
        self.medium.replace_by(&folder.touch_set(meta.id), |temporary| {
            self.medium.remove(temporary)?; // of somebody who died before the rename
            self.write_touch_set(temporary, checkpoint, &runs, sources)
        })
    }

    fn write_touch_set(
        &self,
        path: &std::path::Path,
        checkpoint: &Checkpoint,
        runs: &[Extent],
        sources: Sources,
    ) -> Result<()> {
        let file = self.medium.create(path, OFlags::empty())?;
        let mut table = vec![0; runs.len() * RUN];
        let mut offset = (HEADER + table.len()) as u64;
        let mut places = Vec::with_capacity(runs.len());
        for (run, row) in runs.iter().zip(table.as_chunks_mut::<RUN>().0) {
            places.push((run, row, offset));
            offset += run.len();
        }
        // Each block is read once, however many runs are part of it.
        places.sort_unstable_by_key(|(run, ..)| run.address);
        let mut bytes = Vec::new();
        for (run, row, offset) in places {
            bytes.resize(run.len() as usize, 0);
            checkpoint.reader.read(run, &mut bytes)?;
            self.medium.write_at(&file, path, &bytes, offset)?;
            row[..8].copy_from_slice(&run.address.to_le_bytes());
            row[8..12].copy_from_slice(&run.pages.to_le_bytes());
            row[12..].copy_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
        }
        let header = head(&checkpoint.image.meta, sources, &table);
        self.medium.write_at(&file, path, &[header.as_slice(), &table].concat(), 0)
    }

    /// Removes touch sets of checkpoints that are no more.
    pub(crate) fn clean_touch_sets(&self, folder: &Folder) -> Result<()> {
        for id in numbers(&folder.touch_sets(), "")? {
            if !folder.checkpoint(id).exists() {
                self.medium.remove(&folder.touch_set(id))?;
            }
        }
        Ok(())
    }
}

/// The parts of a range that extents (ascending) hold.
fn parts(extents: &[Extent], range: Range) -> impl Iterator<Item = Extent> {
    let first = extents.partition_point(|e| e.end() <= range.start);
    let inside = extents[first..].iter().take_while(move |e| e.address < range.end());
    inside.map(move |e| e.part(e.address.max(range.start), e.end().min(range.end())))
}
