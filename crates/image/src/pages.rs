//! Where the contents of pages are stored.

use crate::{PAGE, Range};

/// What a run of pages belongs to.
///
/// Ordered as written here: address spaces, then objects, then files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// Private pages at virtual addresses of this address space (index into [`crate::Image::spaces`]).
    Space(u32),
    /// Pages at offsets of this memory object (index into [`crate::Image::objects`]).
    Object(u32),
    /// Pages at offsets of this file (index into [`crate::Image::paths`]): deleted files, shared writable mappings.
    File(u32),
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Owner::Space(row) => write!(f, "address space {row}"),
            Owner::Object(row) => write!(f, "memory object {row}"),
            Owner::File(row) => write!(f, "file {row}"),
        }
    }
}

/// A run of pages of one owner that is stored in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// What it belongs to.
    pub owner: Owner,
    /// Virtual address, or offset in the object or file: a multiple of [`PAGE`].
    pub address: u64,
    /// Number of pages.
    pub pages: u32,
    /// Where the contents are.
    pub place: Place,
}

impl Extent {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        u64::from(self.pages) * PAGE
    }

    /// Whether it has no pages; never true in a valid map.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// First address behind it.
    pub fn end(&self) -> u64 {
        self.address + self.len()
    }

    /// The addresses of its pages.
    pub fn range(&self) -> Range {
        Range { start: self.address, len: self.len() }
    }

    /// Its parts that lie in some ranges of whole pages (ascending, apart).
    pub fn parts_in(&self, ranges: &[Range]) -> impl Iterator<Item = Extent> {
        let extent = *self;
        extent.range().parts_of(ranges).map(move |part| extent.part(part.start, part.end()))
    }

    /// The part of it within `[from, to)`, which must lie inside it and be whole pages.
    pub fn part(&self, from: u64, to: u64) -> Extent {
        debug_assert!(self.address <= from && from < to && to <= self.end());
        let mut part = *self;
        part.address = from;
        part.pages = ((to - from) / PAGE) as u32;
        if let Place::Stored { skip, .. } = &mut part.place {
            *skip += ((from - self.address) / PAGE) as u16;
        }
        part
    }
}

/// Where the contents of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All bytes are zero. Pages in no extent read as their mapping does by itself: zero for anonymous memory, the
    /// file's own bytes for a private file mapping; so this is only needed where that default is not zero.
    Zero,
    /// In a block of a segment.
    ///
    /// A block is what one checksum covers and what is read in one piece. An extent may be only part of it: when a
    /// later checkpoint replaces some pages of a block, its other pages stay where they are.
    Stored {
        /// Number of the segment within the job.
        segment: u64,
        /// Offset of the block in the segment file, bytes.
        offset: u64,
        /// Stored length of the block in bytes.
        length: u32,
        /// Pages that the whole block decodes to, at most [`MAX_BLOCK_PAGES`].
        block_pages: u16,
        /// Pages of the block in front of this extent.
        skip: u16,
        /// How the block is encoded.
        codec: Codec,
        /// CRC-32 (IEEE) of the stored bytes of the block.
        crc: u32,
    },
}

/// Most pages a block may have; bounds the memory that reading one needs. (Writers use far smaller ones.)
pub const MAX_BLOCK_PAGES: u16 = 1024;

/// Encoding of stored pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Codec {
    /// As they are.
    #[default]
    Raw,
    /// LZ4 block.
    Lz4,
    /// Zstandard frame.
    Zstd,
}

impl Codec {
    /// All there are.
    pub const ALL: [Codec; 3] = [Codec::Raw, Codec::Lz4, Codec::Zstd];

    /// Its number in records.
    pub fn number(self) -> u8 {
        match self {
            Codec::Raw => 0,
            Codec::Lz4 => 1,
            Codec::Zstd => 2,
        }
    }

    /// The one of this number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.number() == number)
    }
}

/// All extents of a checkpoint, ordered by owner and address, not overlapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageMap {
    /// The extents.
    pub extents: Vec<Extent>,
}

impl PageMap {
    /// Extents of one owner, in ascending order of address.
    pub fn of(&self, owner: Owner) -> &[Extent] {
        let from = self.extents.partition_point(|e| e.owner < owner);
        let to = self.extents.partition_point(|e| e.owner <= owner);
        &self.extents[from..to]
    }

    /// Number of pages that are stored (not zero).
    pub fn stored_pages(&self) -> u64 {
        self.extents.iter().filter(|e| e.place != Place::Zero).map(|e| u64::from(e.pages)).sum()
    }
}
