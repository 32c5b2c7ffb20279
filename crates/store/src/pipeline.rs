//! Page data on its way to a segment: filled by the caller, checksummed and written by a few threads.
//!
//! The caller fills one buffer while others are being written. Zero pages fall out at once and the rest closes up, so
//! a buffer that is written has no gaps. Memory is bounded by the number of buffers: a caller that is faster than the
//! medium waits for one.

use crate::alike::Alike;
use crate::buffer::Buffer;
use crate::layers::Layers;
use crate::medium::Medium;
use crate::parallel::{self, Piece, Source};
use crate::segment::{self, Segment};
use crate::writer::Zeros;
use crate::{Error, PutError, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use stillpoint_image::{Codec, Extent, Owner, PAGE, Place, Range};

/// Size of a buffer, and so of a write, in bytes.
const BUFFER: usize = 1 << 20;
/// Buffers in all: one is being filled, the others are in flight.
const BUFFERS: usize = 8;
/// Writing threads, and so writes in flight.
const THREADS: usize = 4;
/// Pages of a block: what one checksum covers and one lazy fault reads, 256 KiB.
pub(crate) const BLOCK_PAGES: u16 = 64;
pub(crate) const PAGE_BYTES: usize = PAGE as usize;

/// Fills a buffer with the contents of ranges, one behind the other; from several threads at a time.
pub type Fill<'a, E> = dyn Fn(&[Range], &mut [u8]) -> Result<(), E> + Sync + 'a;

/// A piece of a buffer that one checksum covers.
#[derive(Clone, Copy, Debug)]
struct Block {
    row: usize,
    from: usize,
    len: usize,
}

/// A buffer to be written.
struct Filled {
    buffer: Buffer,
    used: usize,
    offset: u64,
    blocks: Vec<Block>,
}

/// A buffer that was written, or not.
struct Written {
    buffer: Buffer,
    checksums: Vec<(usize, u32)>,
    result: Result<()>,
}

/// What the writing threads share.
struct Shared {
    medium: Medium,
    segment: Segment,
    queue: Mutex<Receiver<Filled>>,
    /// Something failed, or nobody wants the data any more: what is queued need not be written.
    stopped: AtomicBool,
}

/// The way into a segment.
pub(crate) struct Pipeline {
    shared: Arc<Shared>,
    queue: Option<Sender<Filled>>,
    written: Receiver<Written>,
    threads: Vec<JoinHandle<()>>,
    free: Vec<Buffer>,
    buffers: usize,
    in_flight: usize,
    /// The buffer being filled, the bytes of it that are in use, and the blocks in those.
    current: Option<Buffer>,
    used: usize,
    blocks: Vec<Block>,
    /// Where in the segment the current buffer will go.
    offset: u64,
    reserved: u64,
    reserves: bool,
    /// Bytes in front of it that have been given back.
    freed: u64,
    /// Some of what was put has been forgotten since.
    has_forgotten: bool,
    failed: Option<(String, bool)>,
    /// What has been put so far.
    pub layers: Layers,
    /// Whose pages may be as those of whom.
    pub alike: Alike,
}

impl Pipeline {
    /// A way into a new segment.
    pub fn new(medium: Medium, segment: Segment) -> Self {
        let (queue, receiver) = channel();
        let (sender, written) = channel();
        let shared = Shared { medium, segment, queue: Mutex::new(receiver), stopped: AtomicBool::new(false) };
        let shared = Arc::new(shared);
        let start = |_| {
            let (shared, sender) = (shared.clone(), sender.clone());
            std::thread::spawn(move || write_all(&shared, &sender))
        };
        Pipeline {
            threads: (0..THREADS).map(start).collect(),
            queue: Some(queue),
            written,
            free: Vec::new(),
            buffers: 0,
            in_flight: 0,
            current: None,
            used: 0,
            blocks: Vec::new(),
            offset: segment::HEADER,
            reserved: shared.segment.room,
            reserves: true,
            freed: 0,
            has_forgotten: false,
            failed: None,
            layers: Layers::default(),
            alike: Alike::default(),
            shared,
        }
    }

    /// The segment.
    pub fn segment(&self) -> &Segment {
        &self.shared.segment
    }

    /// Bytes of page data so far, without those that have been given back.
    pub fn bytes(&self) -> u64 {
        self.offset - segment::HEADER - self.freed + self.used as u64
    }

    /// Whether nothing has failed so far.
    pub fn check(&self) -> Result<()> {
        match &self.failed {
            Some((why, full)) => Err(Error::Failed(why.clone(), *full)),
            None => Ok(()),
        }
    }

    /// Puts the pages of some ranges; see [`crate::Writer::put_ranges`].
    pub fn put<E>(
        &mut self,
        owner: Owner,
        ranges: &[Range],
        zeros: Zeros,
        mut fill: impl FnMut(&[Range], &mut [u8]) -> Result<(), E>,
    ) -> Result<(), PutError<E>> {
        let mut batch = Vec::new();
        let mut rest = ranges.iter().copied();
        let mut next = rest.next();
        while next.is_some() {
            let room = self.room()?;
            let mut len = 0;
            batch.clear();
            while let Some(range) = next {
                let free = (room.len() - len) as u64;
                if free == 0 {
                    break;
                }
                let taken = range.len.min(free);
                if taken > 0 {
                    batch.push(Range { start: range.start, len: taken });
                    len += taken as usize;
                }
                let left = Range { start: range.start + taken, len: range.len - taken };
                next = if left.len > 0 { Some(left) } else { rest.next() };
            }
            if len > 0 {
                fill(&batch, &mut room[..len]).map_err(PutError::Fill)?;
                self.absorb(owner, &batch, zeros);
            }
        }
        Ok(())
    }

    /// As [`Pipeline::put`], by several threads at a time that each fill, check and write.
    pub fn put_parallel<E: Send>(
        &mut self,
        owner: Owner,
        ranges: &[Range],
        zeros: Zeros,
        fill: &Fill<'_, E>,
    ) -> Result<(), PutError<E>> {
        self.put_pieces(owner, zeros, |target| parallel::put(target, ranges, fill))
    }

    /// Puts the pages that a source gives, by several threads at a time.
    pub fn put_from<S: Source>(
        &mut self,
        owner: Owner,
        zeros: Zeros,
        source: &S,
    ) -> Result<(), PutError<S::Error>> {
        self.put_pieces(owner, zeros, |target| parallel::put_from(target, source, usize::MAX))
    }

    fn put_pieces<E>(
        &mut self,
        owner: Owner,
        zeros: Zeros,
        put: impl FnOnce(&parallel::Target<'_>) -> Result<Vec<Piece>, PutError<E>>,
    ) -> Result<(), PutError<E>> {
        self.check()?;
        self.submit();
        let target = parallel::Target {
            medium: &self.shared.medium,
            segment: &self.shared.segment,
            owner,
            alike: &self.alike,
            end: AtomicU64::new(self.offset),
            reserved: Mutex::new(self.reserves.then_some(self.reserved)),
        };
        let pieces = put(&target);
        self.offset = target.end.into_inner();
        let reserved = target.reserved.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.reserves = reserved.is_some();
        self.reserved = reserved.unwrap_or(self.reserved);
        match pieces {
            Ok(mut pieces) => {
                pieces.sort_unstable_by_key(Piece::address);
                for piece in pieces {
                    match piece {
                        Piece::Stored(extent) | Piece::Known(extent) => drop(self.layers.put(extent)),
                        Piece::Empty { address, pages } => {
                            self.layers.put_empty(owner, address, pages, zeros == Zeros::Omit);
                        }
                    }
                }
                Ok(())
            }
            Err(e) => {
                if let PutError::Store(e) = &e {
                    self.fail(e.to_string(), e.is_full());
                }
                Err(e)
            }
        }
    }

    /// The free part of the current buffer, at least a page.
    fn room(&mut self) -> Result<&mut [u8]> {
        self.check()?;
        if self.used == BUFFER {
            self.submit();
        }
        if self.current.is_none() {
            self.current = Some(self.buffer()?);
        }
        match &mut self.current {
            Some(buffer) => Ok(&mut buffer.bytes_mut()[self.used..]),
            None => Ok(&mut []), // it was just put there
        }
    }

    /// An empty buffer: a free one, a new one while there may be more, else the first that comes back.
    fn buffer(&mut self) -> Result<Buffer> {
        loop {
            while let Ok(written) = self.written.try_recv() {
                self.take_back(written);
            }
            self.check()?;
            if let Some(buffer) = self.free.pop() {
                return Ok(buffer);
            }
            if self.buffers < BUFFERS {
                self.buffers += 1;
                return Ok(Buffer::new(BUFFER));
            }
            self.wait();
        }
    }

    /// Waits for one buffer to come back.
    fn wait(&mut self) {
        match self.written.recv() {
            Ok(written) => self.take_back(written),
            Err(_) => self.fail("the writing threads are gone".into(), false),
        }
    }

    fn take_back(&mut self, written: Written) {
        self.in_flight -= 1;
        self.free.push(written.buffer);
        written.checksums.into_iter().for_each(|(row, crc)| self.layers.seal(row, crc));
        if let Err(e) = written.result {
            self.fail(e.to_string(), e.is_full());
        }
    }

    /// Refuses everything from now on, for this reason or an earlier one; whether it is that there is no room left.
    pub fn fail(&mut self, why: String, full: bool) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.failed.get_or_insert((why, full));
    }

    /// Takes up what was filled in behind the used part: notes zero pages, closes up the others.
    fn absorb(&mut self, owner: Owner, batch: &[Range], zeros: Zeros) {
        let mut from = self.used;
        for range in batch {
            let end = from + range.len as usize;
            let mut address = range.start;
            while from < end {
                let Some(buffer) = &mut self.current else { return };
                let bytes = buffer.bytes_mut();
                let zero = is_zero(&bytes[from..from + PAGE_BYTES]);
                let pages = bytes[from..end].chunks_exact(PAGE_BYTES);
                let run = 1 + pages.skip(1).take_while(|page| is_zero(page) == zero).count();
                let len = run * PAGE_BYTES;
                if zero {
                    self.layers.put_empty(owner, address, run as u32, zeros == Zeros::Omit);
                } else {
                    if from != self.used {
                        bytes.copy_within(from..from + len, self.used);
                    }
                    self.note(owner, address, run);
                }
                from += len;
                address += len as u64;
            }
        }
    }

    /// Adds pages that stand right behind the used part to the page map, in blocks.
    fn note(&mut self, owner: Owner, mut address: u64, mut pages: usize) {
        while pages > 0 {
            let room = self.open_block(owner, address);
            let taken = pages.min(usize::from(room.map_or(BLOCK_PAGES, |(_, room)| room)));
            match room {
                Some((row, _)) => {
                    self.layers.extend(row, taken as u16);
                    if let Some(block) = self.blocks.last_mut() {
                        block.len += taken * PAGE_BYTES;
                    }
                }
                None => {
                    let row = self.layers.put(self.extent(owner, address, taken as u16));
                    self.blocks.push(Block { row, from: self.used, len: taken * PAGE_BYTES });
                }
            }
            self.used += taken * PAGE_BYTES;
            address += (taken * PAGE_BYTES) as u64;
            pages -= taken;
        }
    }

    /// The last block's row and the pages it may still take, if it is continued at this address.
    fn open_block(&self, owner: Owner, address: u64) -> Option<(usize, u16)> {
        let block = self.blocks.last()?;
        let last = self.layers.last(block.row)?;
        let pages = (block.len / PAGE_BYTES) as u16;
        (last.owner == owner && last.end() == address && pages < BLOCK_PAGES)
            .then_some((block.row, BLOCK_PAGES - pages))
    }

    fn extent(&self, owner: Owner, address: u64, pages: u16) -> Extent {
        let place = Place::Stored {
            segment: self.shared.segment.id,
            offset: self.offset + self.used as u64,
            length: u32::from(pages) * PAGE as u32,
            block_pages: pages,
            skip: 0,
            codec: Codec::Raw,
            crc: 0, // known when it is written
        };
        Extent { owner, address, pages: u32::from(pages), place }
    }

    /// Hands the current buffer over to be written.
    fn submit(&mut self) {
        let Some(buffer) = self.current.take() else { return };
        if self.used == 0 {
            self.free.push(buffer);
            return;
        }
        self.reserve(self.offset + self.used as u64);
        let filled =
            Filled { buffer, used: self.used, offset: self.offset, blocks: std::mem::take(&mut self.blocks) };
        self.offset += self.used as u64;
        self.used = 0;
        let sent = self.queue.as_ref().is_some_and(|queue| queue.send(filled).is_ok());
        if sent {
            self.in_flight += 1;
        } else {
            self.fail("the writing threads are gone".into(), false);
        }
    }

    /// Reserves room ahead of the writes. Inside the size of a file they run in parallel, at its end one by one.
    fn reserve(&mut self, end: u64) {
        let Shared { medium, segment, .. } = &*self.shared;
        let from = self.reserved;
        let Some(to) = segment.reservation(from, end).filter(|_| self.reserves) else { return };
        self.reserved = to;
        // Not every file system can, and a nearly full one may still have room for what is really written.
        let done = medium.preallocate(&segment.file, &segment.path, from, self.reserved - from);
        self.reserves = done.is_ok();
    }

    /// Writes what was put so far, and lays its layers over each other.
    pub fn settle(&mut self) -> Result<()> {
        self.drain()?;
        self.layers.settle();
        Ok(())
    }

    /// Forgets all that was put for an owner. What is put next takes the room that nobody needs at the end of the segment; what is in front
    /// of that is given back in the end.
    pub fn forget(&mut self, owner: Owner) {
        if self.layers.extents().all(|extent| extent.owner != owner) || self.drain().is_err() {
            return;
        }
        self.layers.forget(owner);
        self.alike.forget(owner);
        self.has_forgotten = true;
        let known = self.alike.extents();
        let ends = self.layers.extents().chain(&known).filter_map(|extent| self.own_block(extent));
        self.offset = ends.map(|block| block.end()).max().unwrap_or(segment::HEADER);
    }

    /// Where in the segment the block of an extent is, if it is in this one.
    fn own_block(&self, extent: &Extent) -> Option<Range> {
        match extent.place {
            Place::Stored { segment, offset, length, .. } if segment == self.segment().id => {
                Some(Range { start: offset, len: length.into() })
            }
            _ => None,
        }
    }

    /// Gives back the room of blocks that are in none of these extents, which are all that will ever be needed: of several copies of a page
    /// only the last one counts. It is not worth it for a few of them: to free blocks makes others wait who need the disk.
    pub fn give_back(&mut self, extents: &[Extent]) -> Result<()> {
        /// What is shorter stays, bytes.
        const WORTH_IT: u64 = BLOCK_PAGES as u64 * PAGE;
        let needed = Range::joined(extents.iter().filter_map(|extent| self.own_block(extent)).collect());
        let whole = Range { start: segment::HEADER, len: self.offset - segment::HEADER };
        let mut dead = Range::without(&[whole], &needed);
        let len = |ranges: &[Range]| ranges.iter().map(|range| range.len).sum::<u64>();
        if !self.has_forgotten && len(&dead) <= len(&needed) {
            return Ok(());
        }
        if let Some(last) = dead.pop_if(|last| last.end() == self.offset) {
            self.offset = last.start;
        }
        dead.retain(|range| range.len >= WORTH_IT);
        for Range { start, len } in dead {
            let Shared { medium, segment, .. } = &*self.shared;
            if medium.free(&segment.file, &segment.path, start, len).is_err() {
                break;
            }
            self.freed += len;
        }
        Ok(())
    }

    /// Waits for all that was put to be written.
    pub fn drain(&mut self) -> Result<()> {
        self.submit();
        while self.in_flight > 0 && self.failed.is_none() {
            self.wait();
        }
        self.check()
    }

    /// Writes what is left, and makes all of it durable.
    pub fn finish(&mut self) -> Result<()> {
        self.complete()?;
        let Shared { medium, segment, .. } = &*self.shared;
        let durable = medium.sync(&segment.file, &segment.path);
        if let Err(e) = &durable {
            self.fail(e.to_string(), e.is_full());
        }
        durable
    }

    /// Writes what is left, to be made durable by the caller. The segment then has the size it needs, or a quarter more if it had
    /// that before.
    pub fn complete(&mut self) -> Result<()> {
        self.drain()?;
        self.stop();
        let Shared { medium, segment, .. } = &*self.shared;
        let most = if segment.room > 0 { self.offset + self.offset / 4 } else { self.offset };
        let fits = self.reserved == segment.room && segment.len()? <= most;
        let cut = || medium.truncate(&segment.file, &segment.path, self.offset);
        let cut = if fits { Ok(()) } else { cut() };
        if let Err(e) = &cut {
            self.fail(e.to_string(), e.is_full());
        }
        cut
    }

    fn stop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.stop();
    }
}

/// A writing thread.
fn write_all(shared: &Shared, done: &Sender<Written>) {
    loop {
        let next = shared.queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(filled) = next else { return };
        let mut written = Written { buffer: filled.buffer, checksums: Vec::new(), result: Ok(()) };
        if !shared.stopped.load(Ordering::Relaxed) {
            let bytes = &written.buffer.bytes()[..filled.used];
            let checksum = |b: &Block| (b.row, crc32fast::hash(&bytes[b.from..b.from + b.len]));
            let checksums = filled.blocks.iter().map(checksum).collect();
            let Shared { medium, segment, .. } = shared;
            written.result = medium.write_at(&segment.file, &segment.path, bytes, filled.offset);
            written.checksums = checksums;
        }
        if written.result.is_err() {
            shared.stopped.store(true, Ordering::Relaxed);
        }
        if done.send(written).is_err() {
            return;
        }
    }
}

/// Whether a page is all zeros. The first bytes settle it for nearly all others.
pub(crate) fn is_zero(page: &[u8]) -> bool {
    page.chunks_exact(128).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}
