//! Small files that people may read: lines of key and value, closed by a checksum.
//!
//! ```text
//! stillpoint running 1
//! pid 4711
//! command ./simulate
//! command two%20words
//! crc 89abcdef
//! ```

use crate::medium::Medium;
use crate::{Error, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A record: keys and values in order; a key may come more than once.
#[derive(Debug)]
pub(crate) struct Record {
    kind: &'static str,
    fields: Vec<(String, Vec<u8>)>,
}

impl Record {
    pub fn new(kind: &'static str) -> Self {
        Record { kind, fields: Vec::new() }
    }

    pub fn with(mut self, key: &str, value: impl AsRef<[u8]>) -> Self {
        self.fields.push((key.to_owned(), value.as_ref().to_owned()));
        self
    }

    pub fn number(self, key: &str, value: u64) -> Self {
        self.with(key, value.to_string())
    }

    /// All values of a key.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.iter().filter(move |(k, _)| k == key).map(|(_, v)| v.as_slice())
    }

    /// All values of a key that are text.
    pub fn texts(&self, key: &str) -> Vec<String> {
        self.all(key).filter_map(|value| String::from_utf8(value.to_vec()).ok()).collect()
    }

    pub fn text(&self, key: &str) -> Option<String> {
        String::from_utf8(self.all(key).next()?.to_vec()).ok()
    }

    pub fn get(&self, key: &str) -> Option<u64> {
        self.text(key)?.parse().ok()
    }

    /// All values of a key that are numbers.
    pub fn numbers(&self, key: &str) -> Vec<u64> {
        self.all(key).filter_map(|value| std::str::from_utf8(value).ok()?.parse().ok()).collect()
    }

    fn encode(&self) -> Vec<u8> {
        let mut text = format!("stillpoint {} 1\n", self.kind);
        for (key, value) in &self.fields {
            text += &format!("{key} {}\n", escape(value));
        }
        text += &format!("crc {:08x}\n", crc32fast::hash(text.as_bytes()));
        text.into_bytes()
    }

    fn decode(kind: &'static str, bytes: &[u8]) -> Option<Record> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (lines, crc) = text.strip_suffix('\n')?.rsplit_once('\n')?;
        let sealed = &text[..lines.len() + 1];
        if crc != format!("crc {:08x}", crc32fast::hash(sealed.as_bytes())) {
            return None;
        }
        let fields = lines.strip_prefix(&format!("stillpoint {kind} 1"))?;
        let field = |line: &str| {
            let (key, value) = line.split_once(' ')?;
            Some((key.to_owned(), unescape(value)?))
        };
        Some(Record { kind, fields: fields.lines().skip(1).map(field).collect::<Option<_>>()? })
    }

    /// Replaces the file with this record.
    pub fn write(&self, medium: &Medium, path: &Path) -> Result<()> {
        medium.replace(path, &self.encode())
    }

    /// As [`Record::write`], for what is of no use any more once the machine has crashed: it is not made durable, and an
    /// empty file counts as none.
    pub fn write_for_now(&self, medium: &Medium, path: &Path) -> Result<()> {
        medium.replace_for_now(path, &self.encode())
    }

    /// Writes over a record that is there already, for which a medium that is full has room.
    pub fn write_in_place(&self, path: &Path) -> Result<()> {
        let bytes = self.encode();
        let write = || {
            let file = File::options().write(true).open(path)?;
            file.write_all_at(&bytes, 0)?;
            file.set_len(bytes.len() as u64)
        };
        write().map_err(Error::io("write", path))
    }

    /// Reads a record; `None` if there is no file.
    pub fn read(kind: &'static str, path: &Path) -> Result<Option<Record>> {
        match std::fs::read(path) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            Err(e) => Err(Error::io("read", path)(e)),
            Ok(bytes) if bytes.is_empty() => Ok(None),
            Ok(bytes) => match Record::decode(kind, &bytes) {
                Some(record) => Ok(Some(record)),
                None => Err(Error::Record { path: path.to_owned(), kind }),
            },
        }
    }
}

/// Everything but printable ASCII as `%XX`.
fn escape(value: &[u8]) -> String {
    let mut text = String::with_capacity(value.len());
    for &byte in value {
        match byte {
            b'!'..=b'~' if byte != b'%' => text.push(char::from(byte)),
            _ => text += &format!("%{byte:02x}"),
        }
    }
    text
}

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut value = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            value.push(byte);
            continue;
        }
        let digit = |b: Option<u8>| char::from(b?).to_digit(16).map(|d| d as u8);
        value.push(digit(bytes.next())? << 4 | digit(bytes.next())?);
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_survive() {
        let all: Vec<u8> = (0..=255).collect();
        let record = Record::new("test").with("a", &all).with("b", "").number("n", 7).with("a", "two");
        let bytes = record.encode();
        let back = Record::decode("test", &bytes).expect("decodes");
        assert_eq!(back.fields, record.fields);
        assert!(Record::decode("other", &bytes).is_none());
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::decode("test", &flipped).is_none(), "bit {bit}");
        }
    }
}
