//! The checkpoint that a program was restored from: what nobody has wanted yet is there, and stays there.

use crate::Result;
use rustix::fd::BorrowedFd;
use stillpoint_image::{Extent, PAGE, Place};
use stillpoint_linux::line::StoredPage;
use stillpoint_store::{Pinned, Reader};

/// Where pages come from that were not there when the program began.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    reader: &'a Reader,
    /// They, ascending by where they were.
    extents: Vec<Extent>,
    pinned: &'a Pinned,
}

impl<'a> Source<'a> {
    /// These pages of a checkpoint, whose segments are left as they are.
    pub fn new(reader: &'a Reader, extents: &[Extent], pinned: &'a Pinned) -> Self {
        let stored = |extent: &&Extent| matches!(extent.place, Place::Stored { .. });
        Source { reader, extents: extents.iter().filter(stored).copied().collect(), pinned }
    }

    /// The files that it needs.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        [self.reader.descriptors(), self.pinned.descriptors()].concat()
    }

    /// The numbers of all of them.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.extents.iter().flat_map(|extent| extent.address / PAGE..extent.end() / PAGE)
    }

    /// Reads pages from this number on, and checks them.
    pub fn read(&self, first: u64, mut out: &mut [u8]) -> Result<()> {
        let mut at = first * PAGE;
        while !out.is_empty() {
            let Some(extent) = self.extent(at) else {
                return Err(crate::Error::Failed(format!("page {:x} is not in its checkpoint", at / PAGE)));
            };
            let part = extent.part(at, extent.end().min(at + out.len() as u64));
            let (now, rest) = out.split_at_mut(part.len() as usize);
            self.reader.read(&part, now)?;
            (at, out) = (part.end(), rest);
        }
        Ok(())
    }

    /// Where a page is, that is at this address now.
    pub fn tell(&self, page: u64, address: u64, is_missing: bool) -> Option<StoredPage> {
        let extent = self.extent(page * PAGE)?.part(page * PAGE, (page + 1) * PAGE);
        let Place::Stored { segment, offset, length, block_pages, skip, codec, crc } = extent.place else {
            return None;
        };
        let codec = codec.number();
        Some(StoredPage { address, segment, offset, length, block_pages, skip, codec, crc, is_missing })
    }

    fn extent(&self, address: u64) -> Option<&Extent> {
        let behind = self.extents.partition_point(|extent| extent.address <= address);
        self.extents[..behind].last().filter(|extent| address < extent.end())
    }
}
