//! The frame of an archive: its header, and the blocks that all else is in.

use crate::codec::{self, Encoding};
use crate::{Error, Result};
use std::io::{self, Read, Write};
use stillpoint_image::PAGE;

const MAGIC: [u8; 8] = *b"STILLARC";
/// Version that is written, and the newest that is read.
pub(crate) const VERSION: u32 = 1;
const HEADER: usize = 64;
/// Longest header that a later version may have, bytes.
const MAX_HEADER: usize = 4096;
/// Most bytes in a block, before it is compressed: bounds what has to be in memory.
pub(crate) const BLOCK: usize = 1 << 20;
const BLOCK_HEADER: usize = 32;
/// Contents of the last block: how many were in front of it, and BLAKE3 of all bytes up to there.
const END: usize = 8 + 32;

/// How much there is of what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// Length of the description, bytes.
    pub description: u64,
    /// Length of the page map, bytes.
    pub map: u64,
    /// Bytes of page contents.
    pub pages: u64,
    /// Number of files.
    pub files: u32,
    /// Bytes of all files.
    pub file_bytes: u64,
}

/// What is in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Description,
    Map,
    File,
    Contents,
    Pages,
    End,
}

impl Kind {
    const ALL: [Kind; 6] = [Kind::Description, Kind::Map, Kind::File, Kind::Contents, Kind::Pages, Kind::End];

    fn to_byte(self) -> u8 {
        self as u8 + 1
    }

    fn of_byte(byte: u8) -> Option<Self> {
        Kind::ALL.into_iter().find(|kind| kind.to_byte() == byte)
    }

    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Description => "description",
            Kind::Map => "page map",
            Kind::File => "the name of a file",
            Kind::Contents => "the contents of a file",
            Kind::Pages => "memory",
            Kind::End => "end mark",
        }
    }
}

/// A block as it is stored.
#[derive(Debug)]
pub(crate) struct Block {
    pub kind: Kind,
    encoding: Encoding,
    stored: Vec<u8>,
    len: usize,
    /// Where it begins, bytes.
    pub at: u64,
}

impl Block {
    /// A block of these bytes, compressed if that makes it smaller.
    pub fn new(kind: Kind, raw: Vec<u8>, compression: crate::Compression) -> Self {
        debug_assert!(raw.len() <= BLOCK);
        let len = raw.len();
        let (encoding, stored) = codec::encode(compression, raw);
        Block { kind, encoding, stored, len, at: 0 }
    }

    /// Length of what is in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is stored as it is.
    pub fn is_raw(&self) -> bool {
        self.encoding == Encoding::Raw
    }

    /// What is in it.
    pub fn decode(self) -> Result<Vec<u8>> {
        let Block { kind, encoding, stored, len, at } = self;
        codec::decode(encoding, stored, len).ok_or_else(|| Error::Inconsistent {
            at,
            what: format!("{} cannot be decompressed", kind.name()),
        })
    }
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[0..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(HEADER as u32).to_le_bytes());
        header[16..24].copy_from_slice(&self.description.to_le_bytes());
        header[24..32].copy_from_slice(&self.map.to_le_bytes());
        header[32..40].copy_from_slice(&self.pages.to_le_bytes());
        header[40..48].copy_from_slice(&self.file_bytes.to_le_bytes());
        header[48..52].copy_from_slice(&self.files.to_le_bytes());
        seal(&mut header);
        header
    }

    fn decode(header: &[u8]) -> Option<Self> {
        let found = Header {
            description: long(header, 16),
            map: long(header, 24),
            pages: long(header, 32),
            file_bytes: long(header, 40),
            files: word(header, 48),
        };
        let sums = found.pages.is_multiple_of(PAGE) && found.pages.checked_add(found.file_bytes).is_some();
        (header == found.encode() && sums).then_some(found)
    }
}

/// Writes an archive.
pub(crate) struct Blocks<W> {
    to: W,
    hash: blake3::Hasher,
    number: u64,
    /// Bytes so far.
    pub bytes: u64,
}

impl<W: Write> Blocks<W> {
    pub fn begin(to: W, header: &Header) -> Result<Self> {
        let mut blocks = Blocks { to, hash: blake3::Hasher::new(), number: 0, bytes: 0 };
        blocks.write(&header.encode())?;
        Ok(blocks)
    }

    pub fn put(&mut self, block: &Block) -> Result<()> {
        let mut header = [0; BLOCK_HEADER];
        header[0] = block.kind.to_byte();
        header[1] = block.encoding.to_byte();
        header[4..8].copy_from_slice(&(block.stored.len() as u32).to_le_bytes());
        header[8..12].copy_from_slice(&(block.len as u32).to_le_bytes());
        header[12..16].copy_from_slice(&crc32fast::hash(&block.stored).to_le_bytes());
        header[16..24].copy_from_slice(&self.number.to_le_bytes());
        seal(&mut header);
        self.number += 1;
        self.write(&header)?;
        self.write(&block.stored)
    }

    /// Writes the end mark; gives back where to, and how many bytes there are.
    pub fn end(mut self) -> Result<(W, u64)> {
        let mut end = self.number.to_le_bytes().to_vec();
        end.extend(self.hash.finalize().as_bytes());
        self.put(&Block::new(Kind::End, end, crate::Compression::None))?;
        self.to.flush().map_err(Error::Write)?;
        Ok((self.to, self.bytes))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.to.write_all(bytes).map_err(Error::Write)
    }
}

/// Reads an archive; checks everything that can be checked without decoding it.
pub(crate) struct Incoming<R> {
    from: R,
    hash: blake3::Hasher,
    number: u64,
    at: u64,
}

impl<R: Read> Incoming<R> {
    pub fn begin(from: R) -> Result<(Self, Header)> {
        let mut incoming = Incoming { from, hash: blake3::Hasher::new(), number: 0, at: 0 };
        let mut header = [0; HEADER];
        let found = incoming.read(&mut header)?;
        if found < MAGIC.len() || header[..8] != MAGIC {
            return Err(if found == 0 { Error::Truncated { at: 0 } } else { Error::Foreign });
        }
        if found < HEADER {
            return Err(Error::Truncated { at: found as u64 });
        }
        let (version, len) = (word(&header, 8), word(&header, 12) as usize);
        let damaged = || Error::Damaged { at: 0, what: "its header does not match its checksum".into() };
        if !(HEADER..=MAX_HEADER).contains(&len) {
            return Err(damaged());
        }
        let mut whole = header.to_vec();
        whole.resize(len, 0);
        if incoming.read(&mut whole[HEADER..])? < len - HEADER {
            return Err(Error::Truncated { at: incoming.at });
        }
        if !is_sealed(&whole) {
            return Err(damaged());
        }
        if version > VERSION {
            return Err(Error::Newer { found: version });
        }
        let contradiction = || Error::Inconsistent { at: 0, what: "its header".into() };
        Ok((incoming, Header::decode(&whole).ok_or_else(contradiction)?))
    }

    /// The next block. Behind the last one nothing follows, and that is checked with it.
    pub fn next(&mut self) -> Result<Block> {
        let at = self.at;
        // The end tells what was in front of it.
        let before = self.hash.clone();
        let mut header = [0; BLOCK_HEADER];
        self.fill(&mut header)?;
        if !is_sealed(&header) {
            return Err(Error::Damaged {
                at,
                what: "the header of a block does not match its checksum".into(),
            });
        }
        let (stored, len) = (word(&header, 4) as usize, word(&header, 8) as usize);
        let parts = Kind::of_byte(header[0]).zip(Encoding::of_byte(header[1]));
        let wrong = |what: &str| Error::Inconsistent { at, what: what.into() };
        let (kind, encoding) = parts.ok_or_else(|| wrong("a block of no known kind"))?;
        if len > BLOCK || stored > len || (encoding == Encoding::Raw && stored != len) {
            return Err(wrong("the length of a block"));
        }
        if long(&header, 16) != self.number {
            return Err(wrong("a block is missing, or in another place"));
        }
        if header[2..4] != [0; 2] || header[24..28] != [0; 4] {
            return Err(wrong("the header of a block"));
        }
        self.number += 1;
        let mut block = Block { kind, encoding, stored: vec![0; stored], len, at };
        self.fill(&mut block.stored)?;
        if crc32fast::hash(&block.stored) != word(&header, 12) {
            return Err(Error::Damaged { at, what: format!("{} does not match its checksum", kind.name()) });
        }
        if kind == Kind::End {
            self.check_end(&block, &before)?;
        }
        Ok(block)
    }

    fn check_end(&mut self, block: &Block, before: &blake3::Hasher) -> Result<()> {
        let (at, number) = (block.at, self.number - 1);
        let is_right = block.stored.len() == END
            && block.stored[..8] == number.to_le_bytes()
            && block.stored[8..] == *before.finalize().as_bytes();
        if !is_right {
            return Err(Error::Inconsistent { at, what: "its end mark is that of another one".into() });
        }
        let behind = self.at;
        match self.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(Error::Trailing { at: behind }),
        }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let found = self.read(bytes)?;
        if found < bytes.len() { Err(Error::Truncated { at: self.at }) } else { Ok(()) }
    }

    /// As much as there is.
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let mut found = 0;
        while found < bytes.len() {
            match self.from.read(&mut bytes[found..]) {
                Ok(0) => break,
                Ok(more) => found += more,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::Read(e)),
            }
        }
        self.hash.update(&bytes[..found]);
        self.at += found as u64;
        Ok(found)
    }
}

/// Puts the checksum of what is in front of them into the last four bytes.
fn seal(header: &mut [u8]) {
    let (body, crc) = header.split_at_mut(header.len() - 4);
    crc.copy_from_slice(&crc32fast::hash(body).to_le_bytes());
}

fn is_sealed(header: &[u8]) -> bool {
    let (body, crc) = header.split_at(header.len() - 4);
    crc == crc32fast::hash(body).to_le_bytes()
}

pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

pub(crate) fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}
