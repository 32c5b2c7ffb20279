//! The wire format of a manifest: a header at fixed offsets, the image as CBOR, the page map as [records](crate::records).
//!
//! Byte by byte in `docs/format.md`. Sizes and checksums are checked before anything is decoded, and what is decoded
//! is [validated](crate::validate): a manifest from anywhere gives an error or a consistent image, never a panic, and
//! never takes more memory than a multiple of its own size.

use crate::validate::{self, Invalid};
use crate::{Codec, Extent, Image, Meta, Owner, PageMap, Place, records};
use minicbor::Decode;
use std::ops::Range;

/// First bytes of every manifest.
pub const MAGIC: [u8; 8] = *b"STILLPNT";
/// Version of the format that is written, and the newest that is read.
pub const VERSION: u32 = 10;
/// Length of the header of this version, bytes.
pub const HEADER: usize = 64;
/// Length of one record of the page map in version 1, bytes.
const RECORD: usize = 48;
/// Longest header that a later version may have, bytes.
const MAX_HEADER: usize = 4096;

/// Why a manifest cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It does not begin as a manifest does.
    #[error("not a checkpoint manifest")]
    Foreign,
    /// Written by a later version of the program.
    #[error("written in format version {found}, this program reads up to {VERSION}: use a newer stillpoint")]
    Newer {
        /// Its version.
        found: u32,
    },
    /// Shorter or longer than it says.
    #[error("{found} bytes long where {expected} were written: the file was cut or added to")]
    Length {
        /// Bytes it should have.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// A part of it has changed since it was written.
    #[error("its {part} is damaged (checksum {found:08x} instead of {expected:08x})")]
    Checksum {
        /// `header`, `description` or `page map`.
        part: &'static str,
        /// Checksum that was written.
        expected: u32,
        /// Checksum of what is there.
        found: u32,
    },
    /// The lengths in its header contradict each other, although the checksum holds.
    #[error("its header contradicts itself")]
    Header,
    /// The description is not what this version writes, although the checksum holds.
    #[error("its description cannot be decoded: {0}")]
    Body(String),
    /// A record of the page map is not what this version writes, although the checksum holds.
    #[error("record {0} of its page map cannot be decoded")]
    Record(usize),
    /// What it describes is inconsistent.
    #[error("what it describes is inconsistent: {0}")]
    Invalid(#[from] Invalid),
}

/// Where the parts of a manifest are, once its header has been checked.
struct Frame {
    version: u32,
    body: Range<usize>,
    map: Range<usize>,
    body_crc: u32,
    map_crc: u32,
}

/// Encodes a manifest.
pub fn encode(image: &Image, pages: &PageMap) -> Vec<u8> {
    assemble(&encode_body(image), pages)
}

fn encode_body(image: &Image) -> Vec<u8> {
    let mut body = Vec::with_capacity(64 << 10);
    let result: Result<(), minicbor::encode::Error<std::convert::Infallible>> =
        minicbor::encode(image, &mut body);
    debug_assert!(result.is_ok(), "writing to memory cannot fail, and no field refuses to be encoded");
    body
}

/// Encodes a manifest again with another page map. Its description stays as it is, byte for byte, so that fields of
/// later versions that this one does not know are kept.
///
/// # Errors
/// As [`decode`], as far as the manifest's header and description are concerned.
pub fn with_pages(manifest: &[u8], pages: &PageMap) -> Result<Vec<u8>, WireError> {
    let frame = Frame::of(manifest)?;
    Ok(assemble(frame.body_of(manifest)?, pages))
}

/// Encodes a manifest again with another description. Its page map stays as it is.
///
/// # Errors
/// As [`decode`], as far as the manifest's header and page map are concerned.
pub fn with_image(manifest: &[u8], image: &Image) -> Result<Vec<u8>, WireError> {
    Ok(assemble(&encode_body(image), &decode_pages(manifest)?))
}

fn assemble(body: &[u8], pages: &PageMap) -> Vec<u8> {
    let map = records::encode(pages);
    let total = HEADER + body.len() + map.len();
    let mut out = Vec::with_capacity(total);
    out.resize(HEADER, 0);
    out.extend_from_slice(body);
    out.extend_from_slice(&map);
    let body_crc = crc32fast::hash(body);
    let map_crc = crc32fast::hash(&map);

    let header = &mut out[..HEADER];
    header[0..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(HEADER as u32).to_le_bytes());
    header[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    header[24..32].copy_from_slice(&(map.len() as u64).to_le_bytes());
    header[32..40].copy_from_slice(&(total as u64).to_le_bytes());
    header[40..44].copy_from_slice(&body_crc.to_le_bytes());
    header[44..48].copy_from_slice(&map_crc.to_le_bytes());
    let crc = crc32fast::hash(&header[..HEADER - 4]);
    header[HEADER - 4..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Decodes and validates a manifest.
///
/// # Errors
/// [`WireError`] for anything that is not exactly a manifest of this or an earlier version.
pub fn decode(manifest: &[u8]) -> Result<(Image, PageMap), WireError> {
    let frame = Frame::of(manifest)?;
    let body = frame.body_of(manifest)?;
    let map = frame.map(manifest)?;
    let image: Image = decode_body(body)?;
    validate::image(&image)?;
    validate::owners(&image, &map)?;
    Ok((image, map))
}

/// Decodes and validates only the description; the page map is neither checked nor decoded.
///
/// # Errors
/// As [`decode`], as far as header and description are concerned.
pub fn decode_image(manifest: &[u8]) -> Result<Image, WireError> {
    let frame = Frame::of(manifest)?;
    let image: Image = decode_body(frame.body_of(manifest)?)?;
    validate::image(&image)?;
    Ok(image)
}

/// Encodes a description and a page map one by one, for those who frame them in another way.
pub fn encode_parts(image: &Image, pages: &PageMap) -> (Vec<u8>, Vec<u8>) {
    (encode_body(image), records::encode(pages))
}

/// Decodes and validates what [`encode_parts`] has encoded.
///
/// # Errors
/// [`WireError::Body`], [`WireError::Record`], [`WireError::Invalid`].
pub fn decode_parts(description: &[u8], map: &[u8]) -> Result<(Image, PageMap), WireError> {
    let image: Image = decode_body(description)?;
    let map = records::decode(map).map_err(WireError::Record)?;
    validate::image(&image)?;
    validate::page_map(&map)?;
    validate::owners(&image, &map)?;
    Ok((image, map))
}

/// Decodes only what the checkpoint is called and where it was taken; the page map is neither checked nor decoded.
///
/// # Errors
/// As [`decode`], as far as header and description are concerned.
pub fn decode_meta(manifest: &[u8]) -> Result<Meta, WireError> {
    #[derive(Decode)]
    #[cbor(map)]
    struct MetaOnly {
        #[n(0)]
        meta: Meta,
    }
    let frame = Frame::of(manifest)?;
    Ok(decode_body::<MetaOnly>(frame.body_of(manifest)?)?.meta)
}

/// Decodes and validates only the page map; the description is neither checked nor decoded, nor are owners compared
/// with it.
///
/// # Errors
/// As [`decode`], as far as header and page map are concerned.
pub fn decode_pages(manifest: &[u8]) -> Result<PageMap, WireError> {
    Frame::of(manifest)?.map(manifest)
}

impl Frame {
    /// Checks the header and the length of the whole.
    fn of(manifest: &[u8]) -> Result<Frame, WireError> {
        let cut =
            |expected: usize| WireError::Length { expected: expected as u64, found: manifest.len() as u64 };
        if !manifest.starts_with(&MAGIC) {
            return Err(WireError::Foreign);
        }
        let fixed = manifest.get(..16).ok_or_else(|| cut(HEADER))?;
        let header_len = u32_at(fixed, 12) as usize;
        if !(HEADER..=MAX_HEADER).contains(&header_len) || !header_len.is_multiple_of(4) {
            return Err(WireError::Header);
        }
        let header = manifest.get(..header_len).ok_or_else(|| cut(header_len))?;
        check("header", u32_at(header, header_len - 4), &header[..header_len - 4])?;
        let version = u32_at(header, 8);
        if version > VERSION {
            return Err(WireError::Newer { found: version });
        }
        if version == 0 || header_len != HEADER || header[48..60] != [0; 12] {
            return Err(WireError::Header);
        }
        Frame::lengths(header, version, manifest.len())
    }

    /// Checks the lengths in an intact header of this version against each other and the file.
    fn lengths(header: &[u8], version: u32, found: usize) -> Result<Frame, WireError> {
        let (body, map, total) = (u64_at(header, 16), u64_at(header, 24), u64_at(header, 32));
        let sum = (HEADER as u64).checked_add(body).and_then(|n| n.checked_add(map));
        if sum != Some(total) {
            return Err(WireError::Header);
        }
        if total != found as u64 {
            return Err(WireError::Length { expected: total, found: found as u64 });
        }
        let body_end = HEADER + body as usize; // fits: not longer than the file that is in memory
        Ok(Frame {
            version,
            body: HEADER..body_end,
            map: body_end..found,
            body_crc: u32_at(header, 40),
            map_crc: u32_at(header, 44),
        })
    }

    fn body_of<'m>(&self, manifest: &'m [u8]) -> Result<&'m [u8], WireError> {
        let body = &manifest[self.body.clone()];
        check("description", self.body_crc, body)?;
        Ok(body)
    }

    fn map(&self, manifest: &[u8]) -> Result<PageMap, WireError> {
        let bytes = &manifest[self.map.clone()];
        check("page map", self.map_crc, bytes)?;
        let map = match self.version {
            1 => decode_version_1(bytes)?,
            _ => records::decode(bytes).map_err(WireError::Record)?,
        };
        validate::page_map(&map)?;
        Ok(map)
    }
}

fn check(part: &'static str, expected: u32, bytes: &[u8]) -> Result<(), WireError> {
    let found = crc32fast::hash(bytes);
    if found == expected { Ok(()) } else { Err(WireError::Checksum { part, expected, found }) }
}

fn decode_body<'b, T: Decode<'b, ()>>(body: &'b [u8]) -> Result<T, WireError> {
    let mut decoder = minicbor::Decoder::new(body);
    let value = decoder.decode().map_err(|e| WireError::Body(e.to_string()))?;
    if decoder.position() != body.len() {
        return Err(WireError::Body("more bytes than its fields take".into()));
    }
    Ok(value)
}

/// A page map of version 1: records of fixed size.
fn decode_version_1(records: &[u8]) -> Result<PageMap, WireError> {
    if !records.len().is_multiple_of(RECORD) {
        return Err(WireError::Header);
    }
    let mut extents = Vec::with_capacity(records.len() / RECORD);
    for (row, record) in records.chunks_exact(RECORD).enumerate() {
        extents.push(decode_record(record).ok_or(WireError::Record(row))?);
    }
    Ok(PageMap { extents })
}

fn decode_record(record: &[u8]) -> Option<Extent> {
    let row = u32_at(record, 4);
    let owner = match record[0] {
        0 => Owner::Space(row),
        1 => Owner::Object(row),
        2 => Owner::File(row),
        _ => return None,
    };
    let codec = match record[2] {
        0 => Codec::Raw,
        1 => Codec::Lz4,
        2 => Codec::Zstd,
        _ => return None,
    };
    let place = match record[1] {
        0 if record[20..] == [0; RECORD - 20] && record[2] == 0 => Place::Zero,
        1 => Place::Stored {
            length: u32_at(record, 20),
            segment: u64_at(record, 24),
            offset: u64_at(record, 32),
            codec,
            crc: u32_at(record, 40),
            block_pages: u16_at(record, 44),
            skip: u16_at(record, 46),
        },
        _ => return None,
    };
    let extent = Extent { owner, address: u64_at(record, 8), pages: u32_at(record, 16), place };
    (record[3] == 0).then_some(extent)
}

/// Little-endian numbers; the callers have checked the length.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}
