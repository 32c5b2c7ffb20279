//! From the store into a file or a pipe.

use crate::frame::{BLOCK, Block, Blocks, Header, Kind};
use crate::layout::Layout;
use crate::order::in_order;
use crate::{Compression, Error, Progress, Result};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_image::{Backing, Image, PAGE, PathFile, Usage, wire};
use stillpoint_linux::digest;
use stillpoint_store::{Checkpoint, Store, content_digest};

/// What was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Pages of memory.
    pub pages: u64,
    /// Files that go with it.
    pub files: u64,
    /// Bytes of these.
    pub file_bytes: u64,
    /// Bytes of the archive.
    pub bytes: u64,
}

/// A file that goes along.
#[derive(Debug)]
pub struct Companion {
    /// Which one, row of [`Image::paths`].
    row: u32,
    /// Where it is read.
    source: PathBuf,
    length: u64,
    executable: bool,
    digest: [u8; 32],
}

impl Companion {
    /// Those of a checkpoint: files that it has copies of in the store and, if it is to be `portable`, all that its program executes
    /// or has mapped and does not write. They must be as they were at the checkpoint.
    ///
    /// # Errors
    /// [`Error::Files`] names each that is not.
    pub fn all_of(store: &Store, image: &Image, portable: bool) -> Result<Vec<Companion>> {
        let mut all = Vec::new();
        let mut wrong = Vec::new();
        for row in rows(image, portable) {
            let file = &image.paths[row as usize];
            match Companion::of(store, row, file) {
                Ok(companion) => all.push(companion),
                Err(why) => wrong.push(format!("{}: {why}", file.path)),
            }
        }
        if wrong.is_empty() { Ok(all) } else { Err(Error::Files(wrong)) }
    }

    fn of(store: &Store, row: u32, file: &PathFile) -> Result<Self, String> {
        let copy = store.copy_of(file);
        let source = copy.clone().unwrap_or_else(|| file.path.as_path().to_owned());
        let mut open = open(&source)?;
        let found = open.metadata().map_err(|e| e.to_string())?;
        let length = found.len();
        let digest = content_digest(&mut open, length).map_err(|e| e.to_string())?;
        let is_same = match (&file.copy, &file.digest) {
            (Some(kept), _) => kept.0 == digest,
            (None, Some(known)) if !known.sampled => length == file.size && known.blake3.0 == digest,
            (None, Some(known)) => {
                length == file.size
                    && digest::digest(&open, length, &[]).is_ok_and(|(now, _)| known.blake3.0 == now)
            }
            (None, None) => {
                let changed = found.mtime().saturating_mul(1_000_000_000).saturating_add(found.mtime_nsec());
                (found.dev(), found.ino(), length, changed) == (file.dev, file.ino, file.size, file.mtime_ns)
            }
        };
        match is_same {
            true => Ok(Companion { row, source, length, executable: file.mode & 0o111 != 0, digest }),
            false if copy.is_some() => Err("its copy in the store is damaged".into()),
            false => Err("it has changed since the checkpoint".into()),
        }
    }

    /// Where it is read.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Row of [`Image::paths`].
    pub fn row(&self) -> u32 {
        self.row
    }

    /// Its length, bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Whether it can be executed.
    pub fn is_executable(&self) -> bool {
        self.executable
    }

    /// BLAKE3 of its length and contents.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }
}

/// Keeps in the store copies of all files that the program of a checkpoint executes or has mapped and does not write, so that it
/// can be restored where they are others. Returns how many there are, and their bytes.
///
/// # Errors
/// [`Error::Files`] names each file that has changed since the checkpoint; [`Error::Store`]. Then it is as it was.
pub fn make_portable(store: &Store, job: &str, id: u64) -> Result<(u64, u64)> {
    let image = store.load(job, Some(id))?.image;
    let companions = Companion::all_of(store, &image, true)?;
    let copies = store.add_copies()?;
    let mut buffer = vec![0; BLOCK];
    for file in &companions {
        let name = image.paths[file.row as usize].path.as_path();
        let failed = |why: &str| changed(&image, file, why);
        let mut copy = copies.begin(name, file.length, file.executable)?;
        let mut open = open(&file.source).map_err(|why| failed(&why))?.take(file.length);
        loop {
            match open.read(&mut buffer).map_err(|e| failed(&e.to_string()))? {
                0 => break,
                n => copy.write(&buffer[..n])?,
            }
        }
        if !copy.finish(&file.digest)? {
            return Err(failed("it has changed while it was read"));
        }
    }
    let known: Vec<(u32, [u8; 32])> = companions.iter().map(|file| (file.row, file.digest)).collect();
    store.note_copies(job, id, &known)?;
    Ok((companions.len() as u64, companions.iter().map(|file| file.length).sum()))
}

/// A regular file, without waiting for anybody if it is none.
fn open(path: &Path) -> Result<File, String> {
    let metadata = path.metadata().map_err(|e| e.to_string())?;
    if !metadata.is_file() {
        return Err("it is no regular file any more".into());
    }
    File::open(path).map_err(|e| e.to_string())
}

/// Rows of the files that go along.
fn rows(image: &Image, portable: bool) -> Vec<u32> {
    let mappings = image.spaces.iter().flat_map(|space| &space.mappings);
    let mapped = mappings.filter_map(|mapping| match mapping.backing {
        Backing::File { path, .. } => Some(path),
        _ => None,
    });
    let mut rows: Vec<u32> = mapped.chain(image.processes.iter().map(|process| process.exe)).collect();
    rows.sort_unstable();
    rows.dedup();
    rows.retain(|row| {
        image.paths.get(*row as usize).is_some_and(|file| {
            let is_regular = file.mode & 0o170_000 == 0o100_000;
            let is_read = file.usage == Usage::Read && file.mapped_ranges.is_empty() && !file.deleted;
            // What is reached through mounts of the program's own is found by way of these.
            is_regular && is_read && file.namespace.is_none() && (portable || file.copy.is_some())
        })
    });
    rows
}

/// Something to be put into a block, or into several.
enum Piece {
    Raw(Kind, Vec<u8>),
    Block(Kind, Vec<u8>),
}

/// Writes a checkpoint with some files to a stream, which is given back.
///
/// # Errors
/// [`Error::Write`]; [`Error::Store`] if the checkpoint is damaged, [`Error::Files`] if a file changes meanwhile. What has been
/// written then has no end mark.
pub fn export<W: Write>(
    checkpoint: &Checkpoint,
    companions: &[Companion],
    compression: Compression,
    to: W,
    progress: &dyn Progress,
) -> Result<(W, Exported)> {
    let layout = Layout::of(&checkpoint.pages);
    let (description, map) = wire::encode_parts(&checkpoint.image, &layout.map);
    let header = Header {
        description: description.len() as u64,
        map: map.len() as u64,
        pages: layout.pages * PAGE,
        files: companions.len() as u32,
        file_bytes: companions.iter().map(|file| file.length).sum(),
    };
    progress.start(header.pages + header.file_bytes);
    let mut blocks = Blocks::begin(to, &header)?;
    let mut source = Source {
        checkpoint,
        description: &description,
        map: &map,
        companions,
        layout: &layout,
        step: Step::Description(0),
    };
    in_order(
        || source.next(),
        |piece| match piece {
            Piece::Raw(kind, bytes) => Ok(Block::new(kind, bytes, Compression::None)),
            Piece::Block(kind, bytes) => Ok(Block::new(kind, bytes, compression)),
        },
        |block| {
            if matches!(block.kind, Kind::Pages | Kind::Contents) {
                progress.advance(block.len() as u64);
            }
            blocks.put(&block)
        },
    )?;
    let (to, bytes) = blocks.end()?;
    let files = u64::from(header.files);
    Ok((to, Exported { pages: layout.pages, files, file_bytes: header.file_bytes, bytes }))
}

/// Where in the archive it is.
enum Step {
    /// Bytes done.
    Description(usize),
    Map(usize),
    /// Files done.
    Files(usize),
    /// In a file: which one, and what has been read.
    Within(usize, File, u64, Box<blake3::Hasher>),
    /// Extents done, and pages of the next one.
    Pages(usize, u64),
}

/// What goes into the archive, piece by piece.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    description: &'a [u8],
    map: &'a [u8],
    companions: &'a [Companion],
    layout: &'a Layout,
    step: Step,
}

impl Source<'_> {
    fn next(&mut self) -> Result<Option<Piece>> {
        loop {
            match &mut self.step {
                Step::Description(done) => match some(self.description, done) {
                    // These are decoded as a whole: they are stored as they are, so that a short archive is never a long one.
                    Some(bytes) => return Ok(Some(Piece::Raw(Kind::Description, bytes))),
                    None => self.step = Step::Map(0),
                },
                Step::Map(done) => match some(self.map, done) {
                    Some(bytes) => return Ok(Some(Piece::Raw(Kind::Map, bytes))),
                    None => self.step = Step::Files(0),
                },
                Step::Files(done) => {
                    let number = *done;
                    let Some(file) = self.companions.get(number) else {
                        self.step = Step::Pages(0, 0);
                        continue;
                    };
                    let open =
                        open(&file.source).map_err(|why| changed(&self.checkpoint.image, file, &why))?;
                    let mut hash = Box::new(blake3::Hasher::new());
                    hash.update(&file.length.to_le_bytes());
                    self.step = Step::Within(number, open, 0, hash);
                    return Ok(Some(Piece::Raw(Kind::File, encode_file(file))));
                }
                Step::Within(number, open, done, hash) => {
                    let file = &self.companions[*number];
                    let most = (file.length - *done).min(BLOCK as u64);
                    if most == 0 {
                        if hash.finalize().as_bytes() != &file.digest {
                            return Err(changed(
                                &self.checkpoint.image,
                                file,
                                "it has changed while it was read",
                            ));
                        }
                        self.step = Step::Files(*number + 1);
                        continue;
                    }
                    let mut bytes = vec![0; most as usize];
                    open.read_exact(&mut bytes)
                        .map_err(|e| changed(&self.checkpoint.image, file, &e.to_string()))?;
                    hash.update(&bytes);
                    *done += most;
                    return Ok(Some(Piece::Block(Kind::Contents, bytes)));
                }
                Step::Pages(..) => return self.pages(),
            }
        }
    }

    /// The next pages, as many as go into a block.
    fn pages(&mut self) -> Result<Option<Piece>> {
        let Step::Pages(done, within) = &mut self.step else { return Ok(None) };
        let mut bytes = Vec::with_capacity(BLOCK);
        while bytes.len() < BLOCK {
            let Some(extent) = self.layout.order.get(*done) else { break };
            let room = ((BLOCK - bytes.len()) as u64 / PAGE).min(u64::from(extent.pages) - *within);
            let from = extent.address + *within * PAGE;
            let part = extent.part(from, from + room * PAGE);
            let old = bytes.len();
            bytes.resize(old + part.len() as usize, 0);
            self.checkpoint.reader.read(&part, &mut bytes[old..])?;
            *within += room;
            if *within == u64::from(extent.pages) {
                (*done, *within) = (*done + 1, 0);
            }
        }
        Ok((!bytes.is_empty()).then_some(Piece::Block(Kind::Pages, bytes)))
    }
}

/// The next piece of something that is in memory.
fn some(bytes: &[u8], done: &mut usize) -> Option<Vec<u8>> {
    let next = &bytes[*done..];
    let next = &next[..next.len().min(BLOCK)];
    *done += next.len();
    (!next.is_empty()).then(|| next.to_vec())
}

fn changed(image: &Image, file: &Companion, why: &str) -> Error {
    let path = image.paths.get(file.row as usize).map(|p| p.path.to_string()).unwrap_or_default();
    Error::Files(vec![format!("{path}: {why}")])
}

/// Row (4), whether it can be executed (4), length (8), digest (32).
fn encode_file(file: &Companion) -> Vec<u8> {
    let mut bytes = file.row.to_le_bytes().to_vec();
    bytes.extend(u32::from(file.executable).to_le_bytes());
    bytes.extend(file.length.to_le_bytes());
    bytes.extend(file.digest);
    bytes
}
