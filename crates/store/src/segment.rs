//! Segment files: a header of one page, then blocks of page data.

use crate::buffer::Buffer;
use crate::folder::Folder;
use crate::medium::Medium;
use crate::{Error, Result, spare};
use rustix::fs::{FlockOperation, OFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use stillpoint_image::PAGE;

/// Length of the header, bytes: a page, so that everything behind it is aligned.
pub(crate) const HEADER: u64 = PAGE;
const MAGIC: [u8; 8] = *b"STILLSEG";
const VERSION: u32 = 1;
/// Room is reserved in steps of so many bytes,
const RESERVE: u64 = 256 << 20;
/// or of so many where there was some.
const MORE: u64 = 16 << 20;
/// Where so few bytes are missing none is reserved: to free the rest of it takes longer than these take to write.
const LITTLE: u64 = 4 << 20;

/// A segment that is open.
#[derive(Debug)]
pub(crate) struct Segment {
    pub id: u64,
    pub path: PathBuf,
    pub file: File,
    /// Bytes that are allocated, and may have been written before it became this segment.
    pub room: u64,
}

impl Segment {
    /// Creates a segment, from the spare if there is one. Its file takes direct I/O if the file system does, which is settled
    /// here, by writing the header.
    pub fn create(medium: &Medium, folder: &Folder, id: u64) -> Result<Segment> {
        let path = folder.segment(id);
        let direct = Segment::create_with(medium, folder, id, OFlags::DIRECT);
        let file = match direct {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::InvalidInput => {
                medium.remove(&path)?;
                Segment::create_with(medium, folder, id, OFlags::empty())
            }
            other => other,
        };
        let looked =
            file.and_then(|file| Ok((file.metadata().map_err(Error::io("look at", &path))?.len(), file)));
        match looked {
            Ok((len, file)) => Ok(Segment { id, path, file, room: if len > HEADER { len } else { 0 } }),
            Err(e) => {
                let _ = medium.remove(&path);
                Err(e)
            }
        }
    }

    fn create_with(medium: &Medium, folder: &Folder, id: u64, flags: OFlags) -> Result<File> {
        let path = &folder.segment(id);
        let file = match spare::take(medium, folder, path, flags)? {
            Some(file) => file,
            None => medium.create(path, flags)?,
        };
        let mut header = Buffer::new(HEADER as usize);
        header.bytes_mut().copy_from_slice(&encode_header(id));
        medium.write_at(&file, path, header.bytes(), 0)?;
        Ok(file)
    }

    /// Opens a segment for reading and checks its header; `None` if there is no such file. As long as it is open it is locked:
    /// nobody writes it anew. (Only who holds the exclusive reader lock locks it otherwise, for a moment.)
    pub fn open(folder: &Folder, id: u64) -> Result<Option<Segment>> {
        let path = folder.segment(id);
        let file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(Error::io("open", &path))?,
        };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared)
            .map_err(|e| Error::io("lock", &path)(e.into()))?;
        let mut header = [0; HEADER as usize];
        let wrong = |why: &str| Error::Segment { path: path.clone(), why: why.to_owned() };
        match file.read_exact_at(&mut header, 0) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(wrong("it has been cut")),
            other => other.map_err(Error::io("read", &path))?,
        }
        check_header(&header, id).map_err(|why| wrong(&why))?;
        Ok(Some(Segment { id, path, file, room: 0 }))
    }

    /// Up to where, bytes, room is to be reserved for writes up to `end`, if it is up to `from` now; nothing if it need not be. What is not used
    /// is freed in the end, which takes time.
    pub fn reservation(&self, from: u64, end: u64) -> Option<u64> {
        let step = if self.room > 0 { MORE } else { RESERVE };
        (end > from && end > self.room + LITTLE).then(|| end.next_multiple_of(step))
    }

    /// Its length in bytes.
    pub fn len(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(Error::io("look at", &self.path))?.len())
    }

    /// Bytes of it that have not been given back. (A file system that knows no holes tells that all is data.)
    pub fn held(&self) -> Result<u64> {
        let len = self.len()?;
        let find = |whence| match rustix::fs::seek(&self.file, whence) {
            Ok(found) => Ok(found.min(len)),
            Err(Errno::NXIO) => Ok(len), // behind the last data
            Err(e) => Err(Error::io("look for holes in", &self.path)(e.into())),
        };
        let (mut at, mut held) = (0, 0);
        while at < len {
            let data = find(SeekFrom::Data(at))?;
            at = find(SeekFrom::Hole(data))?;
            held += at - data;
        }
        Ok(held)
    }
}

fn encode_header(id: u64) -> [u8; HEADER as usize] {
    let mut header = [0; HEADER as usize];
    header[0..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(HEADER as u32).to_le_bytes());
    header[16..24].copy_from_slice(&id.to_le_bytes());
    let (body, crc) = header.split_at_mut(HEADER as usize - 4);
    crc.copy_from_slice(&crc32fast::hash(body).to_le_bytes());
    header
}

fn check_header(header: &[u8; HEADER as usize], id: u64) -> Result<(), String> {
    if header[0..8] != MAGIC {
        return Err("not a segment".into());
    }
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    if number(HEADER as usize - 4) != crc32fast::hash(&header[..HEADER as usize - 4]) {
        return Err("its header is damaged".into());
    }
    if number(8) > VERSION {
        return Err(format!("written in format version {}: use a newer stillpoint", number(8)));
    }
    if header != &encode_header(id) {
        return Err("it is another segment, moved or copied here".into());
    }
    Ok(())
}
