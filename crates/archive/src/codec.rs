//! How blocks are compressed.

use crate::frame::BLOCK;
use std::str::FromStr;

/// How the blocks of an archive are compressed; each by itself, and only where that makes it smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// LZ4: as fast as a disk.
    Lz4,
    /// Zstandard, of this level.
    Zstd(i32),
}

/// Level of Zstandard unless another one is asked for; its authors' own choice.
const LEVEL: i32 = 3;

impl Default for Compression {
    fn default() -> Self {
        Compression::Zstd(LEVEL)
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let levels = zstd::compression_level_range();
        match text.split_once(':') {
            None if text == "none" => Ok(Compression::None),
            None if text == "lz4" => Ok(Compression::Lz4),
            None if text == "zstd" => Ok(Compression::default()),
            Some(("zstd", level)) => {
                let level = level.parse().ok().filter(|level| *level != 0 && levels.contains(level));
                level.map(Compression::Zstd).ok_or(format!("levels of zstd go from 1 to {}", levels.end()))
            }
            _ => Err("it is none, lz4, zstd or zstd:LEVEL".into()),
        }
    }
}

/// How a block is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Raw,
    Lz4,
    Zstd,
}

impl Encoding {
    pub fn to_byte(self) -> u8 {
        match self {
            Encoding::Raw => 0,
            Encoding::Lz4 => 1,
            Encoding::Zstd => 2,
        }
    }

    pub fn of_byte(byte: u8) -> Option<Self> {
        [Encoding::Raw, Encoding::Lz4, Encoding::Zstd].into_iter().find(|e| e.to_byte() == byte)
    }
}

/// Encodes a block; as it is, where nothing is won otherwise.
pub(crate) fn encode(compression: Compression, raw: Vec<u8>) -> (Encoding, Vec<u8>) {
    let (encoding, smaller) = match compression {
        Compression::None => return (Encoding::Raw, raw),
        Compression::Lz4 => (Encoding::Lz4, Some(lz4_flex::block::compress(&raw))),
        Compression::Zstd(level) => (Encoding::Zstd, zstd::bulk::compress(&raw, level).ok()),
    };
    match smaller.filter(|smaller| smaller.len() < raw.len()) {
        Some(smaller) => (encoding, smaller),
        None => (Encoding::Raw, raw),
    }
}

/// Decodes a block that is to be `len` bytes long, at most [`BLOCK`]; nothing if it is not.
pub(crate) fn decode(encoding: Encoding, stored: Vec<u8>, len: usize) -> Option<Vec<u8>> {
    debug_assert!(len <= BLOCK);
    let raw = match encoding {
        Encoding::Raw => stored,
        Encoding::Lz4 => {
            let mut raw = vec![0; len];
            let found = lz4_flex::block::decompress_into(&stored, &mut raw).ok()?;
            raw.truncate(found);
            raw
        }
        Encoding::Zstd => zstd::bulk::decompress(&stored, len).ok()?,
    };
    (raw.len() == len).then_some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for() {
        assert_eq!("zstd".parse(), Ok(Compression::Zstd(3)));
        assert_eq!("zstd:19".parse(), Ok(Compression::Zstd(19)));
        assert_eq!("lz4".parse(), Ok(Compression::Lz4));
        assert_eq!("none".parse(), Ok(Compression::None));
        for bad in ["", "zstd:", "zstd:0", "zstd:99", "lz4:1", "gzip", "zstd:x"] {
            assert!(bad.parse::<Compression>().is_err(), "{bad}");
        }
    }

    #[test]
    fn blocks_come_back() {
        let text = b"at the still point ".repeat(500);
        let noise: Vec<u8> = (0..9000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for raw in [text, noise, Vec::new()] {
            for compression in [Compression::None, Compression::Lz4, Compression::Zstd(1)] {
                let (encoding, stored) = encode(compression, raw.clone());
                assert!(stored.len() <= raw.len());
                assert_eq!(decode(encoding, stored.clone(), raw.len()), Some(raw.clone()));
                if !raw.is_empty() {
                    assert_eq!(decode(encoding, stored, raw.len() - 1), None);
                }
            }
        }
    }
}
