//! Page data through several threads at a time, each of which fills a buffer, checks it and writes it.
//!
//! What a processor has just read it checks while it is still in its cache, and no buffer changes hands. While one
//! thread waits for the medium, another reads.

use crate::alike::{Alike, Found};
use crate::buffer::Buffer;
use crate::medium::Medium;
use crate::pipeline::{BLOCK_PAGES, Fill, PAGE_BYTES, is_zero};
use crate::segment::Segment;
use crate::{PutError, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use stillpoint_image::{Codec, Extent, Owner, PAGE, Place, Range};

/// Size of a buffer, and so of a write, in bytes.
const BUFFER: usize = 1 << 20;
/// Threads for each processor: one reads while the other's write is under way.
const THREADS_EACH: usize = 2;
/// Most threads.
const MOST: usize = 16;

/// A run of pages that was put.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Piece {
    /// Zeros.
    Empty { address: u64, pages: u32 },
    /// Stored.
    Stored(Extent),
    /// Stored before.
    Known(Extent),
}

/// Where page data goes.
pub(crate) struct Target<'a> {
    pub medium: &'a Medium,
    pub segment: &'a Segment,
    pub owner: Owner,
    pub alike: &'a Alike,
    /// First free byte of the segment.
    pub end: AtomicU64,
    /// End of the room that is reserved in the file; `None` where that does not work.
    pub reserved: Mutex<Option<u64>>,
}

/// Where pages come from that are put as they come; asked by several threads at a time.
pub trait Source: Sync {
    /// Why it has failed.
    type Error: Send;

    /// Fills the front of the buffer, 1 MiB, with the contents of some ranges of whole pages, one behind the other,
    /// and returns these. May wait for more; no ranges mean that there will be none.
    fn next(&self, buffer: &mut [u8]) -> Result<Vec<Range>, Self::Error>;
}

/// How many processors there are; asked once, as it takes longer than to write some pages.
pub(crate) fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Puts the pages of some ranges; returns what was put, in no order.
pub(crate) fn put<E: Send>(
    target: &Target<'_>,
    ranges: &[Range],
    fill: &Fill<'_, E>,
) -> Result<Vec<Piece>, PutError<E>> {
    let total: u64 = ranges.iter().map(|r| r.len).sum();
    let useful = (total / BUFFER as u64 + 1).min(MOST as u64) as usize;
    put_from(target, &Known { batches: Mutex::new(Batches::new(ranges)), fill }, useful)
}

/// Puts the pages that a source gives, by at most `useful` threads; returns what was put, in no order.
pub(crate) fn put_from<S: Source>(
    target: &Target<'_>,
    source: &S,
    useful: usize,
) -> Result<Vec<Piece>, PutError<S::Error>> {
    let work = Work { target, source, stop: AtomicBool::new(false) };
    let processors = processors();
    std::thread::scope(|scope| {
        let start = |_| scope.spawn(|| work.run());
        let threads: Vec<_> = (1..useful.min(MOST).min(processors * THREADS_EACH)).map(start).collect();
        let mut pieces = work.run();
        for thread in threads {
            match thread.join() {
                Ok(theirs) => pieces = both(pieces, theirs),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        pieces
    })
}

/// Ranges that are known from the start.
struct Known<'a, E> {
    batches: Mutex<Batches<'a>>,
    fill: &'a Fill<'a, E>,
}

impl<E: Send> Source for Known<'_, E> {
    type Error = E;

    fn next(&self, buffer: &mut [u8]) -> Result<Vec<Range>, E> {
        let next = self.batches.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(batch) = next else { return Ok(Vec::new()) };
        let len: u64 = batch.iter().map(|r| r.len).sum();
        (self.fill)(&batch, &mut buffer[..len as usize])?;
        Ok(batch)
    }
}

fn both<E>(
    a: Result<Vec<Piece>, PutError<E>>,
    b: Result<Vec<Piece>, PutError<E>>,
) -> Result<Vec<Piece>, PutError<E>> {
    let (mut a, b) = (a?, b?);
    a.extend(b);
    Ok(a)
}

/// What the threads share.
struct Work<'a, S> {
    target: &'a Target<'a>,
    source: &'a S,
    /// One has failed: the others need not go on.
    stop: AtomicBool,
}

impl<S: Source> Work<'_, S> {
    fn run(&self) -> Result<Vec<Piece>, PutError<S::Error>> {
        let mut buffer = Buffer::new(BUFFER);
        let mut pieces = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            match self.one(&mut buffer, &mut pieces) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => {
                    self.stop.store(true, Ordering::Relaxed);
                    return Err(e);
                }
            }
        }
        Ok(pieces)
    }

    /// False if there is nothing more.
    fn one(&self, buffer: &mut Buffer, pieces: &mut Vec<Piece>) -> Result<bool, PutError<S::Error>> {
        let batch = self.source.next(buffer.bytes_mut()).map_err(PutError::Fill)?;
        if batch.is_empty() {
            return Ok(false);
        }
        let len: u64 = batch.iter().map(|r| r.len).sum();
        let bytes = &mut buffer.bytes_mut()[..len as usize];
        let first = pieces.len();
        let found = self.target.alike.find(self.target.owner, &batch, bytes);
        let used = pack(bytes, self.target, &batch, &found, pieces);
        if used > 0 {
            let Target { medium, segment, .. } = self.target;
            let at = self.target.end.fetch_add(used as u64, Ordering::Relaxed);
            self.reserve(at + used as u64);
            medium.write_at(&segment.file, &segment.path, &bytes[..used], at)?;
            pieces[first..].iter_mut().for_each(|p| p.move_by(at));
        }
        self.target.alike.note(self.target.owner, &found, pieces[first..].iter().filter_map(Piece::extent));
        Ok(true)
    }

    /// Reserves room ahead of the writes. Inside the size of a file they run in parallel, at its end one by one.
    fn reserve(&self, end: u64) {
        let mut reserved = self.target.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(from) = *reserved else { return };
        let Target { medium, segment, .. } = self.target;
        if let Some(to) = segment.reservation(from, end) {
            // Not every file system can, and a nearly full one may still have room for what is really written.
            let done = medium.preallocate(&segment.file, &segment.path, from, to - from);
            *reserved = done.is_ok().then_some(to);
        }
    }
}

impl Piece {
    pub fn address(&self) -> u64 {
        match self {
            Piece::Empty { address, .. } => *address,
            Piece::Stored(extent) | Piece::Known(extent) => extent.address,
        }
    }

    fn extent(&self) -> Option<Extent> {
        match self {
            Piece::Empty { .. } => None,
            Piece::Stored(extent) | Piece::Known(extent) => Some(*extent),
        }
    }

    fn move_by(&mut self, by: u64) {
        if let Piece::Stored(Extent { place: Place::Stored { offset, .. }, .. }) = self {
            *offset += by;
        }
    }
}

/// Closes up what is neither zero nor stored already to the front of the buffer and notes every run, with offsets from the
/// buffer's start; returns the bytes in use.
fn pack(
    bytes: &mut [u8],
    target: &Target<'_>,
    batch: &[Range],
    found: &Found,
    pieces: &mut Vec<Piece>,
) -> usize {
    let first = pieces.len();
    let known = |address: u64| found.get(&address).and_then(|(_, place)| *place);
    let (mut from, mut used) = (0, 0);
    for range in batch {
        let end = from + range.len as usize;
        let mut address = range.start;
        while from < end {
            if let Some(known) = known(address) {
                refer(Extent { owner: target.owner, ..known }, pieces, first);
                from += PAGE_BYTES;
                address += PAGE;
                continue;
            }
            let zero = is_zero(&bytes[from..from + PAGE_BYTES]);
            let most = if zero { usize::MAX } else { usize::from(BLOCK_PAGES) - 1 };
            let pages = bytes[from..end].chunks_exact(PAGE_BYTES).skip(1).take(most);
            let alike =
                |(i, page): &(u64, &[u8])| is_zero(page) == zero && known(address + i * PAGE).is_none();
            let run = 1 + (1..).zip(pages).take_while(alike).count();
            let len = run * PAGE_BYTES;
            if zero {
                pieces.push(Piece::Empty { address, pages: run as u32 });
            } else {
                if from != used {
                    bytes.copy_within(from..from + len, used);
                }
                let crc = crc32fast::hash(&bytes[used..used + len]);
                pieces.push(Piece::Stored(extent(target, address, run as u16, used as u64, crc)));
                used += len;
            }
            from += len;
            address += len as u64;
        }
    }
    used
}

/// Adds a page that is stored already, to the piece before where it goes on in the same block; from `first` on they are of the
/// same batch.
fn refer(page: Extent, pieces: &mut Vec<Piece>, first: usize) {
    if let Some(Piece::Known(last)) = pieces[first..].last_mut()
        && last.end() == page.address
        && (Extent { pages: last.pages + 1, ..*last }).part(page.address, page.end()).place == page.place
    {
        last.pages += 1;
        return;
    }
    pieces.push(Piece::Known(page));
}

fn extent(target: &Target<'_>, address: u64, pages: u16, offset: u64, crc: u32) -> Extent {
    let place = Place::Stored {
        segment: target.segment.id,
        offset,
        length: u32::from(pages) * PAGE as u32,
        block_pages: pages,
        skip: 0,
        codec: Codec::Raw,
        crc,
    };
    Extent { owner: target.owner, address, pages: u32::from(pages), place }
}

/// Ranges cut into pieces that each fill a buffer.
struct Batches<'a> {
    ranges: std::slice::Iter<'a, Range>,
    left: Range,
}

impl<'a> Batches<'a> {
    fn new(ranges: &'a [Range]) -> Self {
        Batches { ranges: ranges.iter(), left: Range::default() }
    }
}

impl Iterator for Batches<'_> {
    type Item = Vec<Range>;

    fn next(&mut self) -> Option<Vec<Range>> {
        let (mut batch, mut room) = (Vec::new(), BUFFER as u64);
        while room > 0 {
            if self.left.len == 0 {
                match self.ranges.next() {
                    Some(range) => self.left = *range,
                    None => break,
                }
            }
            let len = self.left.len.min(room);
            if len > 0 {
                batch.push(Range { start: self.left.start, len });
            }
            self.left = Range { start: self.left.start + len, len: self.left.len - len };
            room -= len;
        }
        (!batch.is_empty()).then_some(batch)
    }
}
