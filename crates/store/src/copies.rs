//! Copies of files that portable checkpoints bring along: executables, libraries, whatever a program has mapped.
//!
//! `files/DIGEST/NAME` is there once for each contents and name, for all jobs. Programs that are restored from such copies have them
//! mapped under these paths, and so may checkpoints of them name them. A copy goes when no manifest knows it any more.
//!
//! Who adds copies holds `files/lock` together with others until the manifest that knows them is committed, and has removed
//! `files/settled`, which says in which boot of the machine there was nothing to be cleared up; who removes some holds it alone, and the writer lock of every job: so nobody is between a program
//! that has a copy mapped and the manifest that says so.

use crate::folder::names;
use crate::lock::Lock;
use crate::medium::{Medium, TEMPORARY};
use crate::{Error, Result, Store, check_name};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stillpoint_image::{Image, PathFile, wire};

/// Longest name of a copy, bytes.
const LONGEST: usize = 200;

/// What identifies the contents of a file: BLAKE3 of its length (8 bytes) and all of it. A file that is shorter than it is said to
/// be is one of that length with zeros at its end.
///
/// # Errors
/// Those of reading.
pub fn content_digest(file: &mut dyn Read, length: u64) -> io::Result<[u8; 32]> {
    let mut hash = blake3::Hasher::new();
    hash.update(&length.to_le_bytes());
    let mut buffer = vec![0; 1 << 20];
    let mut left = length;
    while left > 0 {
        let most = left.min(buffer.len() as u64) as usize;
        match file.read(&mut buffer[..most]) {
            Ok(0) => {
                buffer[..most].fill(0);
                hash.update(&buffer[..most]);
                left -= most as u64;
            }
            Ok(n) => {
                hash.update(&buffer[..n]);
                left -= n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(*hash.finalize().as_bytes())
}

/// The right to add copies, until the manifest that knows them is committed.
#[derive(Debug)]
pub struct Copies {
    store: Store,
    lock: Option<Lock>,
}

/// A copy being written. Dropped before it is finished, it leaves nothing behind.
pub struct Copy<'a> {
    medium: &'a Medium,
    files: PathBuf,
    temporary: PathBuf,
    name: PathBuf,
    file: File,
    length: u64,
    written: u64,
    hash: blake3::Hasher,
}

impl Store {
    /// Begins to add copies.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn add_copies(&self) -> Result<Copies> {
        let files = self.files();
        self.medium.make_folders(&files)?;
        let lock = Lock::shared(&files.join("lock"))?;
        self.medium.remove(&self.settled())?;
        Ok(Copies { store: self.clone(), lock })
    }

    /// Where the copy of a file is, if the store has one.
    pub fn copy_of(&self, file: &PathFile) -> Option<PathBuf> {
        let digest = file.copy.as_ref()?;
        let path = self.files().join(hex(&digest.0)).join(copy_name(file.path.as_path()));
        path.is_file().then_some(path)
    }

    /// Notes in a checkpoint of which files (rows) the store has copies, by their digests.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::NoCheckpoint`], [`Error::Busy`], [`Error::Manifest`], [`Error::Io`]; then nothing is noted.
    pub fn note_copies(&self, job: &str, id: u64, copies: &[(u32, [u8; 32])]) -> Result<()> {
        let folder = self.known(job)?;
        let _lock = self.writer_lock(&folder)?;
        let path = folder.checkpoint(id);
        let manifest = std::fs::read(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Error::NoCheckpoint { job: job.into(), id, store: self.path().into() },
            _ => Error::io("read", &path)(e),
        })?;
        let wrong = |source| Error::Manifest { job: job.to_owned(), id, source };
        let mut image = wire::decode_image(&manifest).map_err(wrong)?;
        for (row, digest) in copies {
            if let Some(file) = image.paths.get_mut(*row as usize) {
                file.copy = Some(digest.to_vec().into());
            }
        }
        let manifest = wire::with_image(&manifest, &image).map_err(wrong)?;
        self.medium.replace(&path, &manifest)?;
        self.medium.sync_folder(&folder.checkpoints())
    }

    fn files(&self) -> PathBuf {
        self.path().join("files")
    }

    /// Clears up behind somebody who died while adding copies.
    pub(crate) fn clean_copies(&self) -> Result<()> {
        let is_settled =
            || std::fs::read_to_string(self.settled()).is_ok_and(|boot| boot == self.medium.boot());
        if !self.files().is_dir() || is_settled() { Ok(()) } else { self.collect_copies() }
    }

    fn settled(&self) -> PathBuf {
        self.files().join("settled")
    }

    /// Removes copies that no manifest knows; later, if somebody is at work just now, or if a manifest cannot be read
    /// (of another user's job, by whoever may).
    pub(crate) fn collect_copies(&self) -> Result<()> {
        let files = self.files();
        let all = names(&files)?;
        if all.is_empty() {
            return Ok(());
        }
        let mut writers = Vec::new();
        for job in self.jobs()? {
            if self.is_closed(&job) {
                return Ok(());
            }
            let folder = self.folder_unchecked(&job);
            match Lock::exclusive(&folder.writer_lock(), Duration::ZERO)? {
                Some(lock) => writers.push(lock),
                None => return Ok(()),
            }
        }
        let Some(_lock) = Lock::exclusive(&files.join("lock"), Duration::ZERO)? else { return Ok(()) };
        let Some(known) = self.known_copies()? else { return Ok(()) };
        if all.iter().any(|name| is_digest(name) && !known.contains(name)) {
            // No manifest that was removed may come back after a power cut without its copies.
            for job in self.jobs()? {
                let checkpoints = self.folder_unchecked(&job).checkpoints();
                if checkpoints.is_dir() {
                    self.medium.sync_folder(&checkpoints)?;
                }
            }
        }
        for name in all {
            let path = files.join(&name);
            match is_digest(&name) {
                true if !known.contains(&name) => self.medium.remove_tree(&path)?,
                false if name.starts_with(TEMPORARY) => self.medium.remove(&path)?,
                _ => {}
            }
        }
        // Not durable: a power cut ends this boot.
        self.medium.replace_for_now(&self.settled(), self.medium.boot().as_bytes())
    }

    /// Digests of the copies that manifests know, by name or by path; none if one cannot be read.
    fn known_copies(&self) -> Result<Option<BTreeSet<String>>> {
        let files = self.files().canonicalize().map_err(Error::io("look for", &self.files()))?;
        let mut known = BTreeSet::new();
        for job in self.jobs()? {
            let folder = self.folder_unchecked(&job);
            for id in folder.checkpoint_ids()? {
                let path = folder.checkpoint(id);
                let manifest = std::fs::read(&path).map_err(Error::io("read", &path))?;
                match wire::decode_image(&manifest) {
                    Ok(image) => known.extend(copies_in(&image, &files)),
                    Err(_) => return Ok(None),
                }
            }
        }
        Ok(Some(known))
    }
}

/// Digests of the copies that a checkpoint needs.
fn copies_in<'a>(image: &'a Image, files: &'a Path) -> impl Iterator<Item = String> {
    image.paths.iter().flat_map(move |file| {
        let named = file.copy.as_ref().map(|digest| hex(&digest.0));
        let within = file.path.as_path().strip_prefix(files).ok();
        let mapped = within.and_then(|p| p.iter().next()?.to_str().map(str::to_owned));
        named.into_iter().chain(mapped)
    })
}

impl Copies {
    /// Begins a copy of a file of this path and length, which can be executed or not.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn begin(&self, path: &Path, length: u64, executable: bool) -> Result<Copy<'_>> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let files = self.store.files();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = files.join(format!("{TEMPORARY}{}-{number}", std::process::id()));
        let medium = &self.store.medium;
        medium.remove(&temporary)?; // of somebody who died and had our process id
        let file = medium.create(&temporary, OFlags::empty())?;
        let mode = if executable { Mode::RUSR | Mode::XUSR } else { Mode::RUSR };
        rustix::fs::fchmod(&file, mode).map_err(|e| Error::io("set the mode of", &temporary)(e.into()))?;
        let mut hash = blake3::Hasher::new();
        hash.update(&length.to_le_bytes());
        let name = copy_name(path);
        Ok(Copy { medium, files, temporary, name, file, length, written: 0, hash })
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        drop(self.lock.take());
        // What this does not do, the next open does.
        let _ = self.store.collect_copies();
    }
}

impl Copy<'_> {
    /// Adds to it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.medium.write_at(&self.file, &self.temporary, bytes, self.written)?;
        self.hash.update(bytes);
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Whether it has this digest; if so, it is durable under its name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(self, digest: &[u8; 32]) -> Result<bool> {
        if self.written != self.length || self.hash.finalize().as_bytes() != digest {
            return Ok(false);
        }
        let folder = self.files.join(hex(digest));
        let path = folder.join(&self.name);
        if self.is_there(&path, digest) {
            return Ok(true);
        }
        self.medium.sync(&self.file, &self.temporary)?;
        self.medium.make_folders(&folder)?;
        self.medium.rename(&self.temporary, &path)?;
        self.medium.sync_folder(&folder)?;
        self.medium.sync_folder(&self.files)?;
        Ok(true)
    }

    /// Whether the same copy is there already, and whole. Programs may have it mapped: then it is to stay.
    fn is_there(&self, path: &Path, digest: &[u8; 32]) -> bool {
        let Ok(mut file) = File::open(path) else { return false };
        file.metadata().is_ok_and(|m| m.len() == self.length)
            && content_digest(&mut file, self.length).is_ok_and(|found| found == *digest)
    }
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        if self.temporary.exists() {
            let _ = self.medium.remove(&self.temporary);
        }
    }
}

/// What a copy is called: as the file was.
fn copy_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let fits = !name.is_empty() && name.len() <= LONGEST && !name.as_bytes().contains(&0);
    let hidden = name.as_bytes().starts_with(TEMPORARY.as_bytes());
    if fits && !hidden { name.into() } else { "file".into() }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_digest(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit()) && check_name(name).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(folder: &Path) -> Vec<String> {
        let mut all = names(folder).expect("names");
        all.sort();
        all
    }

    fn digest_of(bytes: &[u8]) -> [u8; 32] {
        content_digest(&mut &*bytes, bytes.len() as u64).expect("digest")
    }

    fn add(copies: &Copies, name: &str, bytes: &[u8]) -> [u8; 32] {
        let digest = digest_of(bytes);
        let mut copy = copies.begin(name.as_ref(), bytes.len() as u64, true).expect("begin");
        bytes.chunks(3).for_each(|some| copy.write(some).expect("write"));
        assert!(copy.finish(&digest).expect("finish"));
        digest
    }

    fn file(path: &str, digest: [u8; 32]) -> PathFile {
        PathFile {
            path: path.as_bytes().to_vec().into(),
            copy: Some(digest.to_vec().into()),
            ..PathFile::default()
        }
    }

    #[test]
    fn copies_live_as_long_as_a_checkpoint_knows_them() {
        let folder = tempfile::tempdir().expect("folder");
        let store = Store::open(folder.path()).expect("open");
        let copies = store.add_copies().expect("add");
        let digest = add(&copies, "/lib/libc.so.6", b"the contents of a library");
        let lost = add(&copies, "/lib/libm.so.6", b"of another one");
        let image = Image { paths: vec![file("/lib/libc.so.6", digest)], ..Image::default() };
        store.begin("web").expect("begin").commit(image.clone()).expect("commit");
        // Of somebody who goes on using the copy under its own name.
        let path = store.copy_of(&image.paths[0]).expect("copy");
        assert!(path.ends_with("libc.so.6"));
        drop(copies);
        assert_eq!(store.copy_of(&file("/lib/libm.so.6", lost)), None, "nobody knows it");
        let path = path.canonicalize().expect("path");
        let by_path = PathFile { path: path.as_path().into(), ..PathFile::default() };
        store
            .begin("web")
            .expect("begin")
            .commit(Image { paths: vec![by_path], ..Image::default() })
            .expect("commit");
        store.remove("web", 1).expect("remove");
        assert_eq!(std::fs::read(&path).expect("read"), b"the contents of a library");
        store.remove("web", 2).expect("remove");
        assert!(!path.exists());
        assert_eq!(sorted(&store.files()), ["lock", "settled"]);
    }

    #[test]
    fn a_wrong_copy_is_none() {
        let folder = tempfile::tempdir().expect("folder");
        let store = Store::open(folder.path()).expect("open");
        let copies = store.add_copies().expect("add");
        let mut copy = copies.begin("/bin/../".as_ref(), 4, false).expect("begin");
        copy.write(b"four").expect("write");
        assert!(!copy.finish(&digest_of(b"five")).expect("finish"));
        let mut copy = copies.begin("..".as_ref(), 5, false).expect("begin");
        copy.write(b"four").expect("write");
        assert!(!copy.finish(&digest_of(b"four")).expect("finish"));
        std::mem::forget(copies.begin("killed".as_ref(), 5, false).expect("begin"));
        drop(copies);
        assert_eq!(sorted(&store.files()), ["lock", "settled"]);
    }

    #[test]
    fn names_stay_within() {
        for (path, name) in
            [("/a/b", "b"), ("/", "file"), ("..", "file"), ("/x/.stillpoint-1", "file"), ("", "file")]
        {
            assert_eq!(copy_name(path.as_ref()), Path::new(name), "{path}");
        }
    }
}
