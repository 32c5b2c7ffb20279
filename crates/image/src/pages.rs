//! Where the contents of pages are stored.

use crate::PAGE;

/// What a run of pages belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// Private pages at virtual addresses of this address space (index into [`crate::Image::spaces`]).
    Space(u32),
    /// Pages at offsets of this memory object (index into [`crate::Image::objects`]).
    Object(u32),
    /// Pages at offsets of this file (index into [`crate::Image::paths`]): deleted files, shared writable mappings.
    File(u32),
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
}

/// Where the contents of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All bytes are zero. Pages in no extent read as their mapping does by itself: zero for anonymous memory, the
    /// file's own bytes for a private file mapping; so this is only needed where that default is not zero.
    Zero,
    /// In a segment.
    Stored {
        /// Number of the segment within the job.
        segment: u64,
        /// Offset in the segment file, bytes.
        offset: u64,
        /// Stored length in bytes (equal to the extent's own length unless compressed).
        length: u32,
        /// How it is encoded.
        codec: Codec,
        /// CRC-32 (IEEE) of the stored bytes.
        crc: u32,
    },
}

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
