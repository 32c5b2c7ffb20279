//! From a file or a pipe into the store.

use crate::frame::{Block, Header, Incoming, Kind, long, word};
use crate::order::in_order;
use crate::{Error, Progress, Result, layout};
use std::convert::Infallible;
use std::io::Read;
use stillpoint_image::{Image, Meta, Owner, PAGE, PageMap, Range, wire};
use stillpoint_store::{Committed, Copies, Copy, PutError, Store, Writer, Zeros};

/// Under whose name pages are put until it is known whose they are.
const ASIDE: Owner = Owner::Object(u32::MAX);
/// Length of what is told of a file, bytes.
const FILE: usize = 48;

/// What was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The checkpoint that it has become.
    pub checkpoint: Committed,
    /// Files that came with it.
    pub files: u64,
    /// Bytes of these.
    pub file_bytes: u64,
}

/// An archive of which the description was read.
pub struct Import<R> {
    incoming: Incoming<R>,
    header: Header,
    image: Image,
    map: PageMap,
}

impl<R: Read + Send> Import<R> {
    /// Reads what it is.
    ///
    /// # Errors
    /// Those for which [`Error::is_input`] says so; [`Error::Read`].
    pub fn open(from: R) -> Result<Self> {
        let (mut incoming, header) = Incoming::begin(from)?;
        let description = whole(&mut incoming, Kind::Description, header.description)?;
        let map = whole(&mut incoming, Kind::Map, header.map)?;
        let (mut image, map) = wire::decode_parts(&description, &map)?;
        if !layout::is_sound(&map, header.pages) {
            return Err(Error::Inconsistent {
                at: 0,
                what: "its page map tells of pages that do not come".into(),
            });
        }
        // Copies that are in another store.
        image.paths.iter_mut().for_each(|file| file.copy = None);
        Ok(Import { incoming, header, image, map })
    }

    /// What the checkpoint was called, and where it was taken.
    pub fn meta(&self) -> &Meta {
        &self.image.meta
    }

    /// Reads all of it into the store, as the next checkpoint of a job.
    ///
    /// # Errors
    /// Those for which [`Error::is_input`] says so; [`Error::Read`], [`Error::Store`]. Nothing of it is left then.
    pub fn into_store(self, store: &Store, job: &str, progress: &dyn Progress) -> Result<Imported> {
        let Import { mut incoming, header, image, map } = self;
        progress.start(header.pages + header.file_bytes);
        // In this order: the copies' lock is let go of last.
        let copies = (header.files > 0).then(|| store.add_copies()).transpose()?;
        let mut arrival = Arrival {
            writer: store.begin(job)?,
            image,
            header,
            copies: copies.as_ref(),
            files: 0,
            file_bytes: 0,
            file: None,
            pages: 0,
            is_whole: false,
        };
        let mut ended = false;
        in_order(
            || {
                if ended {
                    return Ok(None);
                }
                let block = incoming.next()?;
                ended = block.kind == Kind::End;
                Ok(Some(block))
            },
            |block: Block| {
                let (kind, at) = (block.kind, block.at);
                Ok((kind, at, block.decode()?))
            },
            |(kind, at, bytes): (Kind, u64, Vec<u8>)| {
                if matches!(kind, Kind::Pages | Kind::Contents) {
                    progress.advance(bytes.len() as u64);
                }
                arrival.take(kind, at, bytes)
            },
        )?;
        let Arrival { writer, mut image, files, file_bytes, is_whole, .. } = arrival;
        debug_assert!(is_whole, "the end mark has come");
        let Meta { job, id, .. } = &image.meta;
        image.meta.imported = Some(stillpoint_image::Imported { job: job.clone(), id: *id });
        let checkpoint = writer.commit_placed(image, ASIDE, map)?;
        Ok(Imported { checkpoint, files: u64::from(files), file_bytes })
    }
}

/// Reads something that is decoded as a whole. It is not compressed, so it takes no more memory than it has bytes.
fn whole<R: Read>(incoming: &mut Incoming<R>, kind: Kind, len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < len {
        let block = incoming.next()?;
        let at = block.at;
        let is_next = block.kind == kind && block.is_raw() && block.len() > 0;
        if !is_next || bytes.len() as u64 + block.len() as u64 > len {
            return Err(Error::Inconsistent { at, what: format!("here should be its {}", kind.name()) });
        }
        bytes.append(&mut block.decode()?);
    }
    Ok(bytes)
}

/// What has come so far.
struct Arrival<'a> {
    writer: Writer,
    image: Image,
    header: Header,
    copies: Option<&'a Copies>,
    files: u32,
    file_bytes: u64,
    /// The file that is coming: bytes still to come, and its digest.
    file: Option<(Copy<'a>, u32, u64, [u8; 32])>,
    /// Bytes of pages.
    pages: u64,
    is_whole: bool,
}

impl Arrival<'_> {
    fn take(&mut self, kind: Kind, at: u64, bytes: Vec<u8>) -> Result<()> {
        let wrong = |what: &str| Error::Inconsistent { at, what: what.into() };
        match (kind, &mut self.file) {
            (Kind::File, None) if self.pages == 0 => self.begin_file(at, &bytes)?,
            (Kind::Contents, Some((copy, _, left, _)))
                if !bytes.is_empty() && bytes.len() as u64 <= *left =>
            {
                copy.write(&bytes)?;
                *left -= bytes.len() as u64;
            }
            (Kind::Pages, None) if self.files == self.header.files => self.put(at, &bytes)?,
            (Kind::End, None) => {
                let is_all = (self.files, self.file_bytes, self.pages)
                    == (self.header.files, self.header.file_bytes, self.header.pages);
                if !is_all {
                    return Err(wrong("it ends before all is there"));
                }
                self.is_whole = true;
            }
            _ => return Err(wrong(&format!("{} in a place where that cannot be", kind.name()))),
        }
        self.end_file(at)
    }

    fn begin_file(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let wrong = || Error::Inconsistent { at, what: "what is told of a file".into() };
        let copies = self.copies.filter(|_| bytes.len() == FILE && self.files < self.header.files);
        let copies = copies.ok_or_else(wrong)?;
        let (row, executable, length) = (word(bytes, 0), word(bytes, 4), long(bytes, 8));
        let digest = std::array::from_fn(|i| bytes[16 + i]);
        let file = self.image.paths.get(row as usize).filter(|file| file.copy.is_none());
        let file = file.ok_or_else(wrong)?;
        let total = self.file_bytes.checked_add(length).filter(|total| *total <= self.header.file_bytes);
        self.file_bytes = total.ok_or_else(wrong)?;
        self.files += 1;
        let copy = copies.begin(file.path.as_path(), length, executable == 1)?;
        self.file = Some((copy, row, length, digest));
        Ok(())
    }

    /// Once all of a file has come.
    fn end_file(&mut self, at: u64) -> Result<()> {
        let Some((copy, row, _, digest)) = self.file.take_if(|(_, _, left, _)| *left == 0) else {
            return Ok(());
        };
        if !copy.finish(&digest)? {
            return Err(Error::Inconsistent {
                at,
                what: "the contents of a file are not those it is to have".into(),
            });
        }
        self.image.paths[row as usize].copy = Some(digest.to_vec().into());
        Ok(())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let len = bytes.len() as u64;
        if len == 0 || !len.is_multiple_of(PAGE) || self.pages + len > self.header.pages {
            return Err(Error::Inconsistent { at, what: "more or less memory than there is to be".into() });
        }
        let range = Range { start: self.pages, len };
        let start = self.pages;
        let put = self.writer.put(ASIDE, range, Zeros::Record, |address, buffer| {
            let from = (address - start) as usize;
            buffer.copy_from_slice(&bytes[from..from + buffer.len()]);
            Ok::<_, Infallible>(())
        });
        put.map_err(|e| match e {
            PutError::Store(e) => Error::Store(e),
            PutError::Fill(never) => match never {},
        })?;
        self.pages += len;
        Ok(())
    }
}
