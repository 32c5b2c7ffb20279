//! A checkpoint being written.

use crate::alike::Hint;
use crate::folder::Folder;
use crate::heat::{self, Area};
use crate::ledger::Ledger;
use crate::lock::Lock;
use crate::medium::{Medium, Unsynced};
use crate::parallel::Source;
use crate::pipeline::{Fill, Pipeline};
use crate::segment::Segment;
use crate::{Error, PutError, Result, rewrite};
use std::collections::BTreeSet;
use std::fs::File;
use stillpoint_image::{Extent, Image, Owner, PAGE, PageMap, Place, Range, validate, wire};

/// What becomes of pages that are all zeros. They are never stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// They are in no extent: they read as their mapping does by itself. Right for anonymous memory, objects, files.
    Omit,
    /// They are recorded as [`Place::Zero`]. Needed where a page would read otherwise by itself: in a private file
    /// mapping.
    Record,
}

/// A checkpoint being written, by one writer at a time for each job.
///
/// Nothing of it is visible before [`Writer::commit`] returns; dropped before that, or after any error, it leaves
/// nothing behind. Of pages that are put twice, the last call counts.
pub struct Writer {
    id: u64,
    folder: Folder,
    medium: Medium,
    pipeline: Pipeline,
    /// Whose pages will be whose.
    given: Vec<(Owner, Owner)>,
    /// Older segments known to be there.
    reused: BTreeSet<u64>,
    /// Those of them that are to be made durable: somebody works in them.
    shared: BTreeSet<u64>,
    committed: bool,
    /// Released last.
    _lock: Lock,
}

/// What a commit has added to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Number of the checkpoint within its job.
    pub id: u64,
    /// Pages of the program that are not zero, wherever they are stored.
    pub pages: u64,
    /// Pages that this checkpoint itself stored.
    pub stored_pages: u64,
    /// Bytes of page data that this checkpoint itself stored, as much of it as has not been given back.
    pub written_bytes: u64,
    /// Size of the manifest, bytes.
    pub manifest_bytes: u64,
    /// The instant that it is of, nanoseconds since 1970.
    pub taken_ns: u64,
    /// Where in the program's memory the pages are that this checkpoint itself stored.
    pub heat: Vec<Area>,
}

impl Writer {
    /// Begins a checkpoint; the caller holds the job's writer lock and has cleaned up behind dead writers.
    pub(crate) fn begin(medium: Medium, folder: Folder, lock: Lock) -> Result<Writer> {
        let mut ledger = Ledger::read(&folder)?;
        ledger.segment += 1;
        let id = ledger.checkpoint + 1;
        ledger.pending = Some(id);
        ledger.write(&medium, &folder)?;
        let segment = Segment::create(&medium, &folder, ledger.segment)?;
        let pipeline = Pipeline::new(medium.clone(), segment);
        let (given, reused, shared) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        Ok(Writer { id, folder, medium, pipeline, given, reused, shared, committed: false, _lock: lock })
    }

    /// Number that the checkpoint will have within its job.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Bytes of page data put so far, zero pages not counted.
    pub fn written_bytes(&self) -> u64 {
        self.pipeline.bytes()
    }

    /// Puts the pages of one range of addresses (or offsets, of an object or a file).
    ///
    /// `fill` is called with an address and a piece of one of the writer's page-aligned buffers, at most 1 MiB long,
    /// and fills all of it with the contents from that address on; piece after piece until the range is complete.
    /// Its bytes are not copied again. Waits only when the medium is slower than the caller and all buffers are in
    /// flight.
    ///
    /// # Errors
    /// [`PutError::Fill`] when `fill` fails: pieces before that one are put, the others are not.
    /// [`PutError::Store`] when a write, possibly of an earlier call, has failed.
    ///
    /// # Panics
    /// If the range is not whole pages.
    pub fn put<E>(
        &mut self,
        owner: Owner,
        range: Range,
        zeros: Zeros,
        mut fill: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), PutError<E>> {
        self.put_ranges(owner, &[range], zeros, |batch, buffer| fill(batch[0].start, buffer))
    }

    /// Puts the pages of many ranges, like [`Writer::put`]; made for `process_vm_readv`, which reads many at once.
    ///
    /// `fill` is called with a batch of ranges and a piece of buffer that is as long as they are together, and fills
    /// it with their contents one behind the other. Batches are cut where a buffer ends, also within a range.
    ///
    /// # Errors
    /// As [`Writer::put`].
    ///
    /// # Panics
    /// If a range is not whole pages.
    pub fn put_ranges<E>(
        &mut self,
        owner: Owner,
        ranges: &[Range],
        zeros: Zeros,
        fill: impl FnMut(&[Range], &mut [u8]) -> Result<(), E>,
    ) -> Result<(), PutError<E>> {
        ranges.iter().for_each(whole_pages);
        self.pipeline.put(owner, ranges, zeros, fill)
    }

    /// Puts the pages of many ranges, like [`Writer::put_ranges`], filling several buffers at a time.
    ///
    /// # Errors
    /// [`PutError::Fill`] when `fill` fails, [`PutError::Store`] when a write has failed; which ranges are put then is
    /// not known.
    ///
    /// # Panics
    /// If a range is not whole pages.
    pub fn put_parallel<E: Send>(
        &mut self,
        owner: Owner,
        ranges: &[Range],
        zeros: Zeros,
        fill: &Fill<'_, E>,
    ) -> Result<(), PutError<E>> {
        ranges.iter().for_each(whole_pages);
        self.pipeline.put_parallel(owner, ranges, zeros, fill)
    }

    /// Puts the pages that a source gives until it has no more, asking it from several threads at a time.
    ///
    /// # Errors
    /// As [`Writer::put_parallel`].
    pub fn put_from<S: Source>(
        &mut self,
        owner: Owner,
        zeros: Zeros,
        source: &S,
    ) -> Result<(), PutError<S::Error>> {
        self.pipeline.put_from(owner, zeros, source)
    }

    /// Takes pages over from an older checkpoint of the same job, where they stay.
    ///
    /// The extents must come from a checkpoint that was loaded, or committed, while nothing else was removed from the
    /// job; load the newest checkpoint after [`crate::Store::begin`] to be sure.
    ///
    /// # Errors
    /// [`Error::Stale`] if the segment of one is no longer there; then none is taken over, and the writer can go on.
    pub fn reuse(&mut self, extents: &[Extent]) -> Result<()> {
        self.pipeline.check()?;
        for extent in extents {
            if let Place::Stored { segment, .. } = extent.place
                && !self.reused.contains(&segment)
            {
                if segment == self.pipeline.segment().id || !self.folder.segment(segment).exists() {
                    return Err(Error::Stale { job: self.folder.job.clone(), segment });
                }
                self.reused.insert(segment);
            }
        }
        self.pipeline.layers.put_all(extents);
        Ok(())
    }

    /// As [`Writer::reuse`], of pages in segments that somebody works in ([`crate::Working`]), which have been written but need not
    /// be durable yet. They must stay what they are until this checkpoint is committed or given up.
    ///
    /// # Errors
    /// As [`Writer::reuse`].
    pub fn share(&mut self, extents: &[Extent]) -> Result<()> {
        self.reuse(extents)?;
        let segment = |extent: &Extent| match extent.place {
            Place::Stored { segment, .. } => Some(segment),
            Place::Zero => None,
        };
        self.shared.extend(extents.iter().filter_map(segment));
        Ok(())
    }

    /// Does ahead what a commit would otherwise do: waits for what was put to be on its way to the medium, and works out which of
    /// it counts. More can be put and kept afterwards.
    ///
    /// # Errors
    /// What has failed before.
    pub fn settle(&mut self) -> Result<()> {
        self.pipeline.settle()
    }

    /// Keeps, of all pages of an owner that were put or reused, only those in these ranges (ascending, apart); of the
    /// others there is nothing.
    ///
    /// # Panics
    /// If a range is not whole pages.
    pub fn keep_only(&mut self, owner: Owner, ranges: Vec<Range>) {
        ranges.iter().for_each(whole_pages);
        self.pipeline.layers.keep_only(owner, ranges);
    }

    /// Pages of `owner` that are as those of `parent` at the same addresses, put before, are stored once, as far as they are put by
    /// several threads. To be told of both, before their pages are put; `hint` says which of an owner's pages may be shared.
    pub fn relate(&mut self, owner: Owner, parent: Option<Owner>, hint: Box<Hint>) {
        self.pipeline.alike.relate(owner, parent, hint);
    }

    /// Forgets all pages of an owner that were put or reused, as they are going to be put anew. Their room is used again, or given back when
    /// the checkpoint is committed.
    pub fn forget(&mut self, owner: Owner) {
        self.pipeline.forget(owner);
    }

    /// When the checkpoint is committed, all pages that were put for `from` will be those of `to`, and whatever was put for that
    /// one is forgotten: for pages that are put before it is known whose they are.
    pub fn give(&mut self, from: Owner, to: Owner) {
        self.given.push((from, to));
    }

    /// Commits the checkpoint: page data, and the manifest under a temporary name, durable; then its name, then the
    /// folder. Sets `job`, `id`, `pages` and `written_bytes` of the image's [`stillpoint_image::Meta`].
    ///
    /// # Errors
    /// Whatever fails, nothing of the checkpoint stays: [`Error::Image`] if the image is inconsistent, [`Error::Io`],
    /// [`Error::Failed`].
    pub fn commit(mut self, image: Image) -> Result<Committed> {
        self.pipeline.drain()?;
        self.given.iter().for_each(|&(from, to)| self.pipeline.layers.give(from, to));
        let pages = std::mem::take(&mut self.pipeline.layers).flatten();
        self.pipeline.give_back(&pages.extents)?;
        self.pipeline.complete()?;
        self.commit_pages(image, pages)
    }

    /// As [`Writer::commit`], under a page map that was made elsewhere. All pages were put for one owner, which none of it is in
    /// the end; the offset of what the map calls stored is its address there.
    ///
    /// # Errors
    /// As [`Writer::commit`].
    pub fn commit_placed(mut self, image: Image, aside: Owner, map: PageMap) -> Result<Committed> {
        self.pipeline.complete()?;
        let put = std::mem::take(&mut self.pipeline.layers).flatten();
        let put = put.of(aside);
        let mut pages = PageMap { extents: Vec::with_capacity(map.extents.len()) };
        for extent in map.extents {
            match extent.place {
                Place::Zero => pages.extents.push(extent),
                Place::Stored { offset, skip, .. } => {
                    let from = offset + u64::from(skip) * PAGE;
                    rewrite::translate(&extent, from, put, &mut pages.extents);
                }
            }
        }
        self.commit_pages(image, pages)
    }

    fn commit_pages(mut self, mut image: Image, pages: PageMap) -> Result<Committed> {
        let own = self.pipeline.segment().id;
        let points_to_own = |e: &Extent| matches!(e.place, Place::Stored { segment, .. } if segment == own);
        let needed = pages.extents.iter().any(points_to_own);
        let written_bytes = if needed { self.pipeline.bytes() } else { 0 };
        image.meta.job.clone_from(&self.folder.job);
        image.meta.id = self.id;
        image.meta.pages = pages.stored_pages();
        image.meta.written_bytes = written_bytes;
        validate::image(&image)?;
        validate::page_map(&pages)?;
        validate::owners(&image, &pages)?;
        if !needed {
            self.medium.remove(&self.pipeline.segment().path)?;
        }
        let manifest_bytes = self.write_manifest(&image, &pages, needed)?;
        self.committed = true;
        Ok(Committed {
            id: self.id,
            pages: image.meta.pages,
            stored_pages: written_bytes / PAGE,
            written_bytes,
            manifest_bytes,
            taken_ns: image.meta.taken_ns,
            heat: heat::map(&image, &pages, own),
        })
    }

    /// The part of a commit that makes the checkpoint durable, and then visible; `needed`: it points to what it has stored itself.
    /// Returns the size of the manifest.
    fn write_manifest(&self, image: &Image, pages: &PageMap, needed: bool) -> Result<u64> {
        let manifest = wire::encode(image, pages);
        let temporary = self.folder.temporary_checkpoint(self.id);
        let written = self.medium.write_new(&temporary, &manifest)?;
        let mut shared = Vec::with_capacity(self.shared.len());
        for segment in &self.shared {
            let path = self.folder.segment(*segment);
            shared.push((File::open(&path).map_err(Error::io("open", &path))?, path));
        }
        let segments = self.folder.segments();
        let mut unsynced = vec![Unsynced::File(&written, &temporary), Unsynced::Folder(&segments)];
        if needed {
            let own = self.pipeline.segment();
            unsynced.push(Unsynced::File(&own.file, &own.path));
        }
        unsynced.extend(shared.iter().map(|(file, path)| Unsynced::File(file, path)));
        self.medium.sync_together(&unsynced)?;
        if self.folder.checkpoint_ids()?.is_empty() {
            // Whoever made the folders may have died before their names were durable.
            let mut above = self.folder.path.ancestors();
            above.by_ref().take(3).try_for_each(|path| self.medium.sync_folder(path))?;
            // The one that the store is in need not be ours to read.
            let _ = above.next().filter(|path| path.is_dir()).map(|path| self.medium.sync_folder(path));
        }
        self.medium.rename(&temporary, &self.folder.checkpoint(self.id))?;
        self.medium.sync_folder(&self.folder.checkpoints())?;
        Ok(manifest.len() as u64)
    }

    /// Undoes whatever was done. The segment goes only after the manifest is durably gone; if anything fails, what is
    /// left is either whole or removed at the next open.
    fn undo(&self) -> Result<()> {
        let visible = self.folder.checkpoint(self.id);
        if visible.exists() {
            self.medium.remove(&visible)?;
            self.medium.sync_folder(&self.folder.checkpoints())?;
        }
        self.medium.remove(&self.folder.temporary_checkpoint(self.id))?;
        self.medium.remove(&self.pipeline.segment().path)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.committed {
            self.pipeline.fail("it was given up".into(), false);
            let _ = self.undo();
        }
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Writer({}@{}, {} bytes)", self.folder.job, self.id, self.written_bytes())
    }
}

fn whole_pages(range: &Range) {
    let whole = range.start.is_multiple_of(PAGE) && range.len.is_multiple_of(PAGE);
    assert!(whole && range.start.checked_add(range.len).is_some(), "{range:x?} is not whole pages");
}
