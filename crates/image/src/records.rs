//! Page maps as bytes: records of a few bytes each, which say what differs from what was to be expected.
//!
//! After many incremental checkpoints of a program that writes at random, nearly every page is an extent of its own: its record
//! takes nine bytes, of which four are the checksum.

use crate::{Codec, Extent, Owner, PAGE, PageMap, Place};
use integer_encoding::VarInt;
use std::collections::BTreeMap;

/// First byte of a record: what follows it, and what does not because it is as expected.
mod tag {
    /// Another owner than that of the record before.
    pub const OWNER: u8 = 1 << 0;
    /// Begins where the extent before ended (for the first one of an owner: at 0).
    pub const NEXT: u8 = 1 << 1;
    /// Of one page.
    pub const PAGE: u8 = 1 << 2;
    /// Stored; otherwise zeros, and nothing of what is below.
    pub const STORED: u8 = 1 << 3;
    /// In the segment of the last record that was stored.
    pub const SEGMENT: u8 = 1 << 4;
    /// In the block that was the last one of its segment.
    pub const BLOCK: u8 = 1 << 5;
    /// Behind the block that was the last one of its segment.
    pub const BEHIND: u8 = 1 << 6;
    /// All of its block, which is stored as it is.
    pub const WHOLE: u8 = 1 << 7;
}

/// A block in its segment.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Block {
    offset: u64,
    length: u32,
    pages: u16,
    codec: u8,
    crc: u32,
}

impl Block {
    fn end(&self) -> u64 {
        self.offset.wrapping_add(self.length.into())
    }
}

/// What the next record is compared with.
struct Expected {
    owner: Owner,
    address: u64,
    segment: u64,
    /// The last block of each segment.
    blocks: BTreeMap<u64, Block>,
}

impl Expected {
    fn new() -> Self {
        Expected { owner: Owner::Space(0), address: 0, segment: 0, blocks: BTreeMap::new() }
    }
}

/// Encodes a page map.
pub(crate) fn encode(pages: &PageMap) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 * pages.extents.len());
    let mut expected = Expected::new();
    pages.extents.iter().for_each(|extent| put(&mut out, extent, &mut expected));
    out
}

fn put(out: &mut Vec<u8>, extent: &Extent, expected: &mut Expected) {
    let at = out.len();
    out.push(0);
    let mut tags = 0;
    if extent.owner != expected.owner {
        tags |= tag::OWNER;
        let (kind, row) = match extent.owner {
            Owner::Space(row) => (0, row),
            Owner::Object(row) => (1, row),
            Owner::File(row) => (2, row),
        };
        out.push(kind);
        number(out, row.into());
        (expected.owner, expected.address) = (extent.owner, 0);
    }
    match extent.address == expected.address {
        true => tags |= tag::NEXT,
        false => distance(out, extent.address.wrapping_sub(expected.address)),
    }
    expected.address = extent.address.wrapping_add(extent.len());
    match extent.pages {
        1 => tags |= tag::PAGE,
        pages => number(out, pages.into()),
    }
    if let Place::Stored { segment, offset, length, block_pages, skip, codec, crc } = extent.place {
        tags |= tag::STORED;
        match segment == expected.segment {
            true => tags |= tag::SEGMENT,
            false => number(out, segment),
        }
        expected.segment = segment;
        let last = expected.blocks.entry(segment).or_default();
        let block = Block { offset, length, pages: block_pages, codec: codec.number(), crc };
        let whole = skip == 0
            && u32::from(block_pages) == extent.pages
            && codec == Codec::Raw
            && u64::from(length) == extent.len();
        if block == *last {
            tags |= tag::BLOCK;
        } else {
            match offset == last.end() {
                true => tags |= tag::BEHIND,
                false => distance(out, offset.wrapping_sub(last.end())),
            }
            out.extend_from_slice(&crc.to_le_bytes());
            if !whole {
                out.push(block.codec);
                number(out, length.into());
                number(out, block_pages.into());
            }
            *last = block;
        }
        match whole {
            true => tags |= tag::WHOLE,
            false => number(out, skip.into()),
        }
    }
    out[at] = tags;
}

fn number(out: &mut Vec<u8>, value: u64) {
    let mut bytes = [0; 10];
    let len = value.encode_var(&mut bytes);
    out.extend_from_slice(&bytes[..len]);
}

/// From one place to another, with either sign: mostly whole pages, which take few bytes.
fn distance(out: &mut Vec<u8>, bytes: u64) {
    let bytes = bytes as i64;
    match bytes % PAGE as i64 {
        0 => number(out, zigzag(bytes / PAGE as i64) << 1),
        _ => {
            number(out, 1);
            out.extend_from_slice(&bytes.to_le_bytes());
        }
    }
}

/// Small numbers of either sign as small numbers.
fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// Decodes a page map that was not validated yet; the number of the record that is none, if one is.
pub(crate) fn decode(mut bytes: &[u8]) -> Result<PageMap, usize> {
    let mut extents = Vec::with_capacity(bytes.len() / 12);
    let mut expected = Expected::new();
    while !bytes.is_empty() {
        extents.push(take(&mut bytes, &mut expected).ok_or(extents.len())?);
    }
    Ok(PageMap { extents })
}

fn take(bytes: &mut &[u8], expected: &mut Expected) -> Option<Extent> {
    let tags = byte(bytes)?;
    let has = |tag: u8| tags & tag != 0;
    if has(tag::OWNER) {
        let kind = byte(bytes)?;
        let row = get(bytes)?;
        expected.owner = match kind {
            0 => Owner::Space(row),
            1 => Owner::Object(row),
            2 => Owner::File(row),
            _ => return None,
        };
        expected.address = 0;
    }
    let address = match has(tag::NEXT) {
        true => expected.address,
        false => expected.address.wrapping_add(far(bytes)?),
    };
    let pages = if has(tag::PAGE) { 1 } else { get(bytes)? };
    let place = match has(tag::STORED) {
        true => stored(bytes, tags, pages, expected)?,
        false if tags & !(tag::OWNER | tag::NEXT | tag::PAGE) == 0 => Place::Zero,
        false => return None,
    };
    let extent = Extent { owner: expected.owner, address, pages, place };
    expected.address = address.wrapping_add(extent.len());
    Some(extent)
}

fn stored(bytes: &mut &[u8], tags: u8, pages: u32, expected: &mut Expected) -> Option<Place> {
    let has = |tag: u8| tags & tag != 0;
    if !has(tag::SEGMENT) {
        expected.segment = get(bytes)?;
    }
    let segment = expected.segment;
    let block = expected.blocks.entry(segment).or_default();
    if !has(tag::BLOCK) {
        let end = block.end();
        let offset = if has(tag::BEHIND) { end } else { end.wrapping_add(far(bytes)?) };
        let crc = u32::from_le_bytes(array(bytes)?);
        let (codec, length, pages) = match has(tag::WHOLE) {
            true => (0, pages.checked_mul(PAGE as u32)?, pages.try_into().ok()?),
            false => (byte(bytes)?, get(bytes)?, get(bytes)?),
        };
        *block = Block { offset, length, pages, codec, crc };
    }
    let skip = if has(tag::WHOLE) { 0 } else { get(bytes)? };
    let Block { offset, length, pages: block_pages, codec, crc } = *block;
    let codec = Codec::numbered(codec)?;
    Some(Place::Stored { segment, offset, length, block_pages, skip, codec, crc })
}

fn byte(bytes: &mut &[u8]) -> Option<u8> {
    bytes.split_off_first().copied()
}

fn array<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    bytes.split_off(..N)?.try_into().ok()
}

/// A number that is small enough for its type.
fn get<T: TryFrom<u64>>(bytes: &mut &[u8]) -> Option<T> {
    let (value, len) = u64::decode_var(bytes)?;
    *bytes = bytes.get(len..)?;
    value.try_into().ok()
}

fn far(bytes: &mut &[u8]) -> Option<u64> {
    let value: u64 = get(bytes)?;
    match value & 1 {
        0 => {
            let value = value >> 1;
            let pages = (value >> 1) as i64 ^ -((value & 1) as i64);
            Some(pages.wrapping_mul(PAGE as i64) as u64)
        }
        _ if value == 1 => Some(u64::from_le_bytes(array(bytes)?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of a program that writes at random, and one written behind it in the same checkpoint.
    #[test]
    fn a_page_takes_nine_bytes() {
        let place = |segment, offset, crc| Place::Stored {
            segment,
            offset,
            length: PAGE as u32,
            block_pages: 1,
            skip: 0,
            codec: Codec::Raw,
            crc,
        };
        let extent =
            |page: u64, place| Extent { owner: Owner::Space(0), address: page * PAGE, pages: 1, place };
        let map = PageMap {
            extents: (0..1000)
                .map(|n| extent(3 * n, place(n % 3 + 1, (n / 3 + 1) * PAGE, !(n as u32))))
                .collect(),
        };
        let bytes = encode(&map);
        assert!(bytes.len() < 8 * 1000, "{}", bytes.len());
        assert_eq!(decode(&bytes), Ok(map));
    }
}
