//! Tails of files that a restore cuts back to the size they had: they are kept, so that nothing is ever lost.
//!
//! `tails/N.data` is the tail itself, to be appended to the file again with any tool; `tails/N.info` tells what it was
//! cut from. The latter gets its name last: a tail without it is one whose file was not cut.

use crate::folder::numbers;
use crate::lock::Lock;
use crate::medium::TEMPORARY;
use crate::record::Record;
use crate::{Error, Result, Store};
use rustix::fs::OFlags;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use stillpoint_image::Bytes;

/// For so long a program that is rolled back stands still while somebody else keeps tails in the same folder.
const PATIENCE: Duration = Duration::from_secs(2);

/// A tail that was cut from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Where the bytes are.
    pub data: PathBuf,
    /// The file they were cut from.
    pub file: Bytes,
    /// Offset in that file at which it was cut.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// CRC-32 of the bytes.
    pub crc: u32,
    /// Checkpoint to which the job was restored.
    pub checkpoint: u64,
    /// When it was cut, nanoseconds since 1970.
    pub cut_ns: u64,
}

impl Store {
    /// Keeps what is about to be cut from a file: all that `source` yields, which stood at `offset` of `file`. When
    /// this returns, the copy is durable and the file may be cut. Returns the path of the copy.
    ///
    /// Tails belong to the job and go only with it ([`Store::remove_job`]).
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Io`]; then nothing was kept and the file must not be cut.
    pub fn keep_tail(
        &self,
        job: &str,
        checkpoint: u64,
        file: &Path,
        offset: u64,
        source: &mut dyn Read,
    ) -> Result<PathBuf> {
        let folder = self.make(job)?;
        self.keep_in(&folder.tails(), Duration::MAX, ("checkpoint", checkpoint), file, offset, source)
    }

    /// As [`Store::keep_tail`], for the rollback of a program to a snapshot, which need not be a job. What is kept so stays until
    /// somebody removes it.
    ///
    /// # Errors
    /// [`Error::Io`], also if somebody else keeps others there for long; then nothing was kept and the file must not be cut.
    pub fn keep_branch_tail(
        &self,
        snapshot: u64,
        file: &Path,
        offset: u64,
        source: &mut dyn Read,
    ) -> Result<PathBuf> {
        let folder = self.path().join("branches").join("tails");
        self.clean_tails(&folder)?;
        self.keep_in(&folder, PATIENCE, ("snapshot", snapshot), file, offset, source)
    }

    fn keep_in(
        &self,
        folder: &Path,
        patience: Duration,
        of: (&str, u64),
        file: &Path,
        offset: u64,
        source: &mut dyn Read,
    ) -> Result<PathBuf> {
        self.medium.make_folders(folder)?;
        let lock = folder.join("lock");
        let Some(_lock) = Lock::exclusive(&lock, patience)? else {
            let why = "somebody else keeps what is cut off files right now: try again later";
            return Err(Error::io("lock", &lock)(io::Error::new(io::ErrorKind::TimedOut, why)));
        };
        let number = numbers(folder, ".data")?.last().map_or(1, |last| last + 1);
        let data = folder.join(format!("{number}.data"));
        let kept = self.copy_tail(&data, file, source).and_then(|(length, crc)| {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let info = Record::new("tail")
                .with("file", &Bytes::from(file).0)
                .number("offset", offset)
                .number("length", length)
                .number("crc", crc.into())
                .number(of.0, of.1)
                .number("cut-ns", now.map_or(0, |since| since.as_nanos() as u64));
            info.write(&self.medium, &data.with_extension("info"))?;
            self.medium.sync_folder(folder)
        });
        if kept.is_err() {
            let _ = self.medium.remove(&data.with_extension("info"));
            let _ = self.medium.remove(&data);
        }
        kept.map(|()| data)
    }

    /// Copies a tail durably; returns its length and checksum.
    fn copy_tail(&self, data: &Path, file: &Path, source: &mut dyn Read) -> Result<(u64, u32)> {
        let copy = self.medium.create(data, OFlags::empty())?;
        let mut buffer = vec![0; 1 << 20];
        let mut checksum = crc32fast::Hasher::new();
        let mut length = 0;
        loop {
            let bytes = match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => &buffer[..n],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Error::io("read", file)(e)),
            };
            checksum.update(bytes);
            self.medium.write_at(&copy, data, bytes, length)?;
            length += bytes.len() as u64;
        }
        self.medium.sync(&copy, data)?;
        Ok((length, checksum.finalize()))
    }

    /// The tails kept for a job, oldest first.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`]; [`Error::Record`] if one of them is damaged.
    pub fn tails(&self, job: &str) -> Result<Vec<Tail>> {
        let folder = self.known(job)?.tails();
        let numbers = numbers(&folder, ".info")?;
        numbers.into_iter().map(|number| read_tail(&folder.join(format!("{number}.info")))).collect()
    }

    /// Removes copies whose file was never cut, because whoever made them died.
    pub(crate) fn clean_tails(&self, tails: &Path) -> Result<()> {
        let orphans = || -> Result<Vec<PathBuf>> {
            let whole = numbers(tails, ".info")?;
            let mut orphans: Vec<PathBuf> = numbers(tails, ".data")?
                .into_iter()
                .filter(|number| !whole.contains(number))
                .map(|number| tails.join(format!("{number}.data")))
                .collect();
            let names = crate::folder::names(tails)?;
            orphans.extend(names.into_iter().filter(|n| n.starts_with(TEMPORARY)).map(|n| tails.join(n)));
            Ok(orphans)
        };
        if !tails.join("lock").exists() || orphans()?.is_empty() {
            return Ok(());
        }
        let Some(_lock) = Lock::exclusive(&tails.join("lock"), Duration::ZERO)? else { return Ok(()) };
        orphans()?.iter().try_for_each(|path| self.medium.remove(path))
    }
}

fn read_tail(info: &Path) -> Result<Tail> {
    let wrong = || Error::Record { path: info.to_owned(), kind: "tail" };
    let record = Record::read("tail", info)?.ok_or_else(wrong)?;
    let number = |key| record.get(key).ok_or_else(wrong);
    Ok(Tail {
        data: info.with_extension("data"),
        file: Bytes(record.all("file").next().ok_or_else(wrong)?.to_vec()),
        offset: number("offset")?,
        length: number("length")?,
        crc: number("crc")? as u32,
        checkpoint: number("checkpoint")?,
        cut_ns: number("cut-ns")?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A program stands still meanwhile.
    #[test]
    fn a_rollback_does_not_wait_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let keep = || store.keep_branch_tail(1, Path::new("/log"), 4, &mut &b"more"[..]);
        let kept = keep().unwrap();
        assert_eq!(std::fs::read(&kept).unwrap(), b"more");
        let lock = Lock::exclusive(&kept.with_file_name("lock"), Duration::MAX).unwrap();
        assert!(keep().unwrap_err().to_string().contains("try again"));
        drop(lock);
        assert_ne!(keep().unwrap(), kept);
    }
}
