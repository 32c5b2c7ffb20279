//! A checkpoint being read.

use crate::folder::Folder;
use crate::segment::Segment;
use crate::touch::TouchSet;
use crate::{Error, Result, codec};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use stillpoint_image::{Extent, Image, PAGE, PageMap, Place};

/// Blocks kept for extents that are only part of one; neighbours in a page map mostly take turns among few blocks.
const CACHED: usize = 16;

/// A checkpoint that was loaded.
#[derive(Debug)]
pub struct Checkpoint {
    /// Everything except the contents of pages; validated.
    pub image: Image,
    /// Where the contents of pages are; validated.
    pub pages: PageMap,
    /// Size of the manifest, bytes.
    pub manifest_bytes: u64,
    /// Reads the contents.
    pub reader: Reader,
    /// What was wanted first after an earlier restore, if one was recorded.
    pub touch: Option<TouchSet>,
}

/// Reads the pages of a checkpoint, from as many threads as you like.
///
/// It holds the segments open: the checkpoint stays readable even if it is removed from the store meanwhile (its space
/// is then given back when the reader is dropped).
#[derive(Debug)]
pub struct Reader {
    job: String,
    id: u64,
    segments: BTreeMap<u64, Segment>,
    cache: [Mutex<Option<Block>>; CACHED],
}

/// A block that was read and checked.
#[derive(Clone, Debug)]
struct Block {
    segment: u64,
    offset: u64,
    bytes: Arc<Vec<u8>>,
}

impl Reader {
    /// Opens all segments that a page map points into; the caller holds the job's reader lock.
    pub(crate) fn open(folder: &Folder, id: u64, pages: &PageMap) -> Result<Reader> {
        let job = folder.job.clone();
        let mut ends: BTreeMap<u64, u64> = BTreeMap::new();
        for extent in &pages.extents {
            let Place::Stored { segment, offset, length, codec, .. } = extent.place else { continue };
            if !codec::is_known(codec) {
                return Err(Error::Codec { job, id, codec });
            }
            let end = ends.entry(segment).or_default();
            *end = (*end).max(offset + u64::from(length));
        }
        let mut segments = BTreeMap::new();
        for (number, end) in ends {
            let Some(segment) = Segment::open(folder, number)? else {
                return Err(Error::SegmentMissing { job, id, path: folder.segment(number) });
            };
            let len = segment.len()?;
            if len < end {
                let why = format!("it has been cut: {len} bytes long where {job}@{id} needs {end}");
                return Err(Error::Segment { path: segment.path, why });
            }
            segments.insert(number, segment);
        }
        Ok(Reader { job, id, segments, cache: Default::default() })
    }

    /// The job of the checkpoint.
    pub(crate) fn job(&self) -> &str {
        &self.job
    }

    /// What it reads from.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.values()
    }

    /// The files that it reads from.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.segments.values().map(|s| s.file.as_fd()).collect()
    }

    /// Reads the pages of an extent into `out`, and checks them first of all: after an error, what is in `out` is
    /// meaningless. Fastest for extents that are a whole block, as all of a full checkpoint are.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the stored bytes do not match their checksum, [`Error::Io`] if they cannot be read.
    ///
    /// # Panics
    /// If `out` is not as long as the extent, or the extent is of another checkpoint.
    pub fn read(&self, extent: &Extent, out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len() as u64, extent.len(), "the buffer must be as long as the extent");
        let Place::Stored { block_pages, skip, .. } = extent.place else {
            out.fill(0);
            return Ok(());
        };
        if skip == 0 && u32::from(block_pages) == extent.pages {
            return self.read_block(extent, out);
        }
        let block = self.block(extent)?;
        let from = usize::from(skip) * PAGE as usize;
        out.copy_from_slice(&block.bytes[from..from + out.len()]);
        Ok(())
    }

    /// Reads the pages of an extent alone, not the block that they are part of. They are those that are meant if their checksums
    /// ([`page_sums`]) are what they were when the whole block was read and checked: to see to that is the caller's.
    ///
    /// # Errors
    /// [`Error::Io`] if they cannot be read.
    ///
    /// # Panics
    /// As [`Reader::read`].
    pub fn read_pages(&self, extent: &Extent, out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len() as u64, extent.len(), "the buffer must be as long as the extent");
        match extent.place {
            Place::Stored { offset, skip, .. } => {
                self.read_stored(extent, offset + u64::from(skip) * PAGE, out)
            }
            Place::Zero => {
                out.fill(0);
                Ok(())
            }
        }
    }

    /// Reads all that lies between the first and the last of these extents of one segment, and checks the blocks that they are
    /// part of. They are in the order of their blocks, and so is what `out` becomes, from the first block's first byte on.
    ///
    /// # Errors
    /// As [`Reader::read`].
    ///
    /// # Panics
    /// If an extent is not stored, or is of another segment or checkpoint.
    pub fn read_span(&self, extents: &[&Extent], out: &mut Vec<u8>) -> Result<()> {
        let Some(first) = extents.first() else { return Ok(()) };
        let start = stored(first).1;
        let end = extents.iter().map(|e| stored(e).1 + u64::from(stored(e).2)).max().unwrap_or(start);
        out.resize((end - start) as usize, 0);
        self.read_stored(first, start, out)?;
        let mut checked = None;
        for extent in extents {
            let Place::Stored { segment, offset, length, crc, .. } = extent.place else {
                panic!("{extent:?} is not stored")
            };
            assert_eq!(segment, stored(first).0, "extents of one segment");
            if checked.replace((offset, length, crc)) != Some((offset, length, crc)) {
                let from = (offset - start) as usize;
                self.check(extent, &out[from..from + length as usize])?;
            }
        }
        Ok(())
    }

    /// Reads and checks the block that an extent is in.
    fn read_block(&self, extent: &Extent, out: &mut [u8]) -> Result<()> {
        self.read_stored(extent, stored(extent).1, out)?;
        self.check(extent, out)
    }

    /// Reads from the segment that an extent is in.
    fn read_stored(&self, extent: &Extent, offset: u64, out: &mut [u8]) -> Result<()> {
        let Some(segment) = self.segments.get(&stored(extent).0) else {
            panic!("{extent:?} is not of {}@{}", self.job, self.id);
        };
        match segment.file.read_exact_at(out, offset) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                let why = "it has been cut while it was read".to_owned();
                Err(Error::Segment { path: segment.path.clone(), why })
            }
            other => other.map_err(Error::io("read", &segment.path)),
        }
    }

    /// Whether these are the bytes of the block that an extent is in.
    fn check(&self, extent: &Extent, bytes: &[u8]) -> Result<()> {
        let Place::Stored { segment, offset, crc, .. } = extent.place else { return Ok(()) };
        if crc32fast::hash(bytes) == crc {
            return Ok(());
        }
        Err(Error::Damaged {
            job: self.job.clone(),
            id: self.id,
            path: self.segments[&segment].path.clone(),
            offset,
            owner: extent.owner,
            address: extent.address,
            pages: extent.pages,
        })
    }

    /// The block that an extent is part of, from the cache or the medium.
    fn block(&self, extent: &Extent) -> Result<Block> {
        let Place::Stored { segment, offset, length, .. } = extent.place else {
            return Ok(Block { segment: 0, offset: 0, bytes: Arc::default() });
        };
        let mixed = (segment ^ (offset / PAGE)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let slot = &self.cache[(mixed >> 60) as usize % CACHED];
        let cached = slot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(block) = cached.filter(|b| (b.segment, b.offset) == (segment, offset)) {
            return Ok(block);
        }
        let mut bytes = vec![0; length as usize];
        self.read_block(extent, &mut bytes)?;
        let block = Block { segment, offset, bytes: Arc::new(bytes) };
        let before = slot.lock().unwrap_or_else(PoisonError::into_inner).replace(block.clone());
        drop(before); // to free it takes a while, and others want the place
        Ok(block)
    }
}

/// Checksums of pages, one after the other.
pub fn page_sums(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks(PAGE as usize).map(crc32fast::hash)
}

/// Segment, offset and length of the block that an extent is in.
fn stored(extent: &Extent) -> (u64, u64, u32) {
    match extent.place {
        Place::Stored { segment, offset, length, .. } => (segment, offset, length),
        Place::Zero => panic!("{extent:?} is not stored"),
    }
}
