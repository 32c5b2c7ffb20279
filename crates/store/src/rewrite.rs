//! Moving the live pages of segments that are mostly dead.
//!
//! 1. The ledger says that a rewrite is under way, and in which segment.
//! 2. Live pages are read, checked, and written to the new segment; it becomes durable.
//! 3. Manifests that pointed to the old segments are replaced, each by one rename, by ones that point to the new one.
//! 4. The folder of manifests becomes durable, then the old segments are deleted.
//!
//! Until 4 the old segments are there, and from 2 on the new one is: whichever manifest a crash leaves in place is
//! whole. The next sweep removes whichever segments nothing points to any more.

use crate::folder::Folder;
use crate::ledger::Ledger;
use crate::pipeline::Pipeline;
use crate::segment::{HEADER, Segment};
use crate::spare::Room;
use crate::sweep::delete_segments;
use crate::writer::Zeros;
use crate::{Error, PutError, Result, Store, working};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::FileExt;
use stillpoint_image::{Codec, Extent, MAX_BLOCK_PAGES, Owner, PAGE, PageMap, Place, Range, wire};

/// More segments than this of one checkpoint are joined, because a reader holds all of its segments open. At most as many at a time.
pub(crate) const MAX_SEGMENTS: usize = 128;
/// Where a block is in the job: segment and offset.
type BlockKey = (u64, u64);
/// Moved blocks are put under made-up addresses, this far apart from each other: never adjacent.
const STRIDE: u64 = 2 * MAX_BLOCK_PAGES as u64 * PAGE;
const MOVED: Owner = Owner::File(0);

/// A block that some checkpoint points to.
#[derive(Clone, Debug)]
struct Live {
    length: u32,
    codec: Codec,
    crc: u32,
    /// Which of its pages are pointed to.
    pages: Vec<bool>,
}

/// Which pages of which blocks are pointed to.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    blocks: BTreeMap<BlockKey, Live>,
    segments: BTreeSet<u64>,
    /// Those of the checkpoint that needs most of them.
    widest: BTreeSet<u64>,
}

/// The segments that a page map points to.
pub(crate) fn segments_of(pages: &PageMap) -> BTreeSet<u64> {
    let segment = |extent: &Extent| match extent.place {
        Place::Stored { segment, .. } => Some(segment),
        _ => None,
    };
    pages.extents.iter().filter_map(segment).collect()
}

impl Usage {
    /// Adds what a page map points to.
    pub fn add(&mut self, pages: &PageMap) {
        let own = segments_of(pages);
        self.segments.extend(&own);
        if own.len() > self.widest.len() {
            self.widest = own;
        }
        for extent in &pages.extents {
            let Place::Stored { segment, offset, length, block_pages, skip, codec, crc } = extent.place
            else {
                continue;
            };
            let none = || Live { length, codec, crc, pages: vec![false; usize::from(block_pages)] };
            let live = self.blocks.entry((segment, offset)).or_insert_with(none);
            let used = live.pages.iter_mut().skip(usize::from(skip)).take(extent.pages as usize);
            used.for_each(|page| *page = true);
        }
    }

    /// Whether anything points into a segment.
    pub fn knows(&self, segment: u64) -> bool {
        self.segments.contains(&segment)
    }

    fn blocks_of(&self, segment: u64) -> impl Iterator<Item = (&BlockKey, &Live)> {
        self.blocks.range((segment, 0)..=(segment, u64::MAX))
    }

    /// Bytes up to the end of the last block that is pointed to. (A segment that was written anew may be longer than all its blocks.)
    fn used(&self, segment: u64) -> u64 {
        let end = |((_, offset), block): (&BlockKey, &Live)| offset + u64::from(block.length) - HEADER;
        self.blocks_of(segment).last().map_or(0, end)
    }

    fn live_bytes(&self, segment: u64) -> u64 {
        let live = |block: &Live| block.pages.iter().filter(|page| **page).count() as u64;
        self.blocks_of(segment).map(|(_, block)| live(block)).sum::<u64>() * PAGE
    }

    /// Segments worth rewriting: less than half of what was written alive, or less than 40 % of what they hold; and the smallest, where a checkpoint needs too many.
    fn candidates(&self, folder: &Folder) -> Result<Vec<Segment>> {
        let mut chosen = Vec::new();
        let mut others = Vec::new();
        for &id in &self.segments {
            // One that is missing or damaged is left for `verify` to name.
            let Ok(Some(segment)) = Segment::open(folder, id) else { continue };
            // Who works in it knows its pages by where they are.
            if working::is_pinned(folder, id)? {
                continue;
            }
            if self.blocks_of(id).any(|(_, block)| block.codec != Codec::Raw) {
                continue;
            }
            let (live, held) = (self.live_bytes(id), segment.held()?.saturating_sub(HEADER));
            if live * 2 < held.min(self.used(id)) || live * 5 < held * 2 {
                chosen.push(segment)
            } else if self.widest.contains(&id) {
                others.push((live, segment))
            }
        }
        if others.len() > MAX_SEGMENTS {
            others.sort_by_key(|(live, _)| *live);
            others.truncate((others.len() - MAX_SEGMENTS / 2).min(MAX_SEGMENTS));
            chosen.extend(others.into_iter().map(|(_, segment)| segment));
        }
        Ok(chosen)
    }
}

/// Where the moved blocks are now.
struct Moves {
    /// Number of each block, which is its made-up address divided by [`STRIDE`].
    numbers: HashMap<BlockKey, u64>,
    /// The new places, under made-up addresses.
    places: PageMap,
}

/// Rewrites what is worth it; the caller holds the writer lock. Returns the bytes given back.
pub(crate) fn rewrite(store: &Store, folder: &Folder, usage: &Usage, room: Room) -> Result<u64> {
    let candidates = usage.candidates(folder)?;
    if candidates.is_empty() {
        return Ok(0);
    }
    let mut ledger = Ledger::read(folder)?;
    ledger.segment += 1;
    ledger.pending = Some(0);
    ledger.write(&store.medium, folder)?;
    let new = folder.segment(ledger.segment);
    let copied = copy(store, folder, usage, &candidates, ledger.segment);
    let (moves, moved, written) = match copied {
        Ok(done) => done,
        Err(e) => {
            let _ = store.medium.remove(&new); // nothing points to it yet
            return Err(e);
        }
    };
    if moved.is_empty() {
        store.medium.remove(&new)?;
        return Ok(0);
    }
    store.medium.sync_folder(&folder.segments())?;
    for id in folder.checkpoint_ids()? {
        recommit(store, folder, id, &moves)?;
    }
    store.medium.sync_folder(&folder.checkpoints())?;
    let freed = delete_segments(store, folder, &moved, room)?;
    Ok(freed.saturating_sub(written))
}

/// Copies the live pages of the candidates into a new segment. Returns where they are now, which segments were moved
/// (a damaged one stays, so that its damage stays visible) and the size of the new segment.
fn copy(
    store: &Store,
    folder: &Folder,
    usage: &Usage,
    candidates: &[Segment],
    new: u64,
) -> Result<(Moves, Vec<u64>, u64)> {
    let mut pipeline = Pipeline::new(store.medium.clone(), Segment::create(&store.medium, folder, new)?);
    let mut numbers = HashMap::new();
    let mut moved = Vec::new();
    let mut next = 0_u64;
    for segment in candidates {
        let mut own = Vec::new();
        let mut intact = true;
        for (key, live) in usage.blocks_of(segment.id) {
            intact = copy_block(&mut pipeline, segment, key.1, live, next)?;
            if !intact {
                break;
            }
            own.push((*key, next));
            next += 1;
        }
        next += 1; // numbers of a block that was given up are not used again
        if intact {
            numbers.extend(own);
            moved.push(segment.id);
        }
    }
    pipeline.finish()?;
    let written = HEADER + pipeline.bytes();
    let places = std::mem::take(&mut pipeline.layers).flatten();
    Ok((Moves { numbers, places }, moved, written))
}

/// Copies the live pages of one block; `false` if it is damaged.
fn copy_block(
    pipeline: &mut Pipeline,
    segment: &Segment,
    offset: u64,
    live: &Live,
    number: u64,
) -> Result<bool> {
    let mut block = vec![0; live.length as usize];
    if segment.file.read_exact_at(&mut block, offset).is_err() || crc32fast::hash(&block) != live.crc {
        return Ok(false);
    }
    let page_of = |page: usize| page * PAGE as usize;
    let mut ranges = Vec::new();
    let mut page = 0;
    while page < live.pages.len() {
        let run = live.pages[page..].iter().take_while(|alive| **alive == live.pages[page]).count();
        if live.pages[page] {
            ranges.push(Range { start: page_of(page) as u64, len: page_of(run) as u64 });
        }
        page += run;
    }
    for range in ranges {
        let put = Range { start: number * STRIDE + range.start, len: range.len };
        let mut rest = &block[range.start as usize..range.end() as usize];
        let fill = |_: &[Range], buffer: &mut [u8]| -> Result<(), Error> {
            let (now, later) = rest.split_at(buffer.len());
            buffer.copy_from_slice(now);
            rest = later;
            Ok(())
        };
        match pipeline.put(MOVED, &[put], Zeros::Record, fill) {
            Ok(()) => {}
            Err(PutError::Store(e) | PutError::Fill(e)) => return Err(e),
        }
    }
    Ok(true)
}

/// Replaces a manifest by one that points to where the pages are now, if any of them has moved.
fn recommit(store: &Store, folder: &Folder, id: u64, moves: &Moves) -> Result<()> {
    let path = folder.checkpoint(id);
    let manifest = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let wrong = |source| Error::Manifest { job: folder.job.clone(), id, source };
    let old = wire::decode_pages(&manifest).map_err(wrong)?;
    let mut changed = false;
    let mut extents = Vec::with_capacity(old.extents.len());
    for extent in old.extents {
        match moves.number(&extent) {
            Some(number) => {
                changed = true;
                moves.translate(&extent, number, &mut extents);
            }
            None => extents.push(extent),
        }
    }
    if !changed {
        return Ok(());
    }
    let manifest = wire::with_pages(&manifest, &PageMap { extents }).map_err(wrong)?;
    store.medium.replace(&path, &manifest)
}

impl Moves {
    fn number(&self, extent: &Extent) -> Option<u64> {
        let Place::Stored { segment, offset, .. } = extent.place else { return None };
        self.numbers.get(&(segment, offset)).copied()
    }

    /// Adds the pieces in which the pages of an extent now are.
    fn translate(&self, extent: &Extent, number: u64, out: &mut Vec<Extent>) {
        let Place::Stored { skip, .. } = extent.place else { return };
        translate(extent, number * STRIDE + u64::from(skip) * PAGE, &self.places.extents, out);
    }
}

/// Adds the pieces in which the pages of an extent are, which were put under made-up addresses from `from` on.
pub(crate) fn translate(extent: &Extent, from: u64, places: &[Extent], out: &mut Vec<Extent>) {
    let to = from + extent.len();
    let first = places.partition_point(|moved| moved.end() <= from);
    for moved in places[first..].iter().take_while(|moved| moved.address < to) {
        let mut part = moved.part(moved.address.max(from), moved.end().min(to));
        part.address = extent.address + (part.address - from);
        part.owner = extent.owner;
        out.push(part);
    }
}
