//! The store as a whole: which jobs and checkpoints there are, and the ways to them.

use crate::folder::{Folder, names};
use crate::lock::Lock;
use crate::medium::{Fault, Medium, TEMPORARY};
use crate::reader::{Checkpoint, Reader};
use crate::spare::Room;
use crate::touch::TouchSet;
use crate::writer::Writer;
use crate::{Error, Result, check_name, sweep};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use stillpoint_image::{Meta, wire};

/// How long is waited for another writer of the same job, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(30);

/// A folder of checkpoints. Cheap to clone; any number of processes may use the same one at the same time.
#[derive(Clone)]
pub struct Store {
    path: PathBuf,
    pub(crate) medium: Medium,
    patience: Duration,
}

/// What a checkpoint is called and how big its manifest is.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Name, time, size, host.
    pub meta: Meta,
    /// Size of the manifest, bytes.
    pub manifest_bytes: u64,
}

impl Store {
    /// Opens a store and removes what dead writers have left behind. The folder need not exist: then the store is
    /// empty, and the first write makes it.
    ///
    /// # Errors
    /// [`Error::Io`] if there is something at `path` that cannot be listed.
    pub fn open(path: &Path) -> Result<Store> {
        Store::open_on(path, Medium::default())
    }

    /// Opens a store on a medium that fails; for tests.
    #[doc(hidden)]
    pub fn open_faulty(path: &Path, fault: Arc<dyn Fault>) -> Result<Store> {
        Store::open_on(path, Medium::faulty(fault))
    }

    fn open_on(path: &Path, medium: Medium) -> Result<Store> {
        let store = Store { path: path.to_owned(), medium, patience: PATIENCE };
        for name in names(&store.jobs_folder())? {
            // A store that can be read but not written is cleaned up by those who can write it.
            let _ = match name.starts_with(TEMPORARY) {
                true => store.medium.remove_tree(&store.jobs_folder().join(name)),
                false if check_name(&name).is_err() => continue, // not ours
                false => sweep::clean(&store, &store.folder_unchecked(&name)),
            };
        }
        let _ = store.clean_copies();
        Ok(store)
    }

    /// How long to wait for another writer of the same job before giving up with [`Error::Busy`]; 30 s by default.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all jobs, in order, also of those without a checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder of jobs cannot be listed.
    pub fn jobs(&self) -> Result<Vec<String>> {
        let mut jobs = names(&self.jobs_folder())?;
        jobs.retain(|name| check_name(name).is_ok() && self.jobs_folder().join(name).is_dir());
        jobs.sort_unstable();
        Ok(jobs)
    }

    /// Whether this user may not look into a job, as it is another's.
    pub fn is_closed(&self, job: &str) -> bool {
        let looked = std::fs::read_dir(self.folder_unchecked(job).path);
        looked.is_err_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied)
    }

    /// Numbers of a job's checkpoints, oldest first.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn checkpoints(&self, job: &str) -> Result<Vec<u64>> {
        self.known(job)?.checkpoint_ids()
    }

    /// Loads a checkpoint, the newest if `id` is `None`. What is returned stays readable whatever is removed later.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::NoCheckpoint`], [`Error::NoneYet`]; [`Error::Manifest`], [`Error::Misplaced`],
    /// [`Error::Segment`], [`Error::SegmentMissing`], [`Error::Codec`] if it cannot be trusted; [`Error::Io`].
    pub fn load(&self, job: &str, id: Option<u64>) -> Result<Checkpoint> {
        let folder = self.known(job)?;
        let _lock = Lock::shared(&folder.reader_lock())?;
        let (id, manifest) = self.manifest(&folder, id)?;
        let wrong = |source| Error::Manifest { job: job.to_owned(), id, source };
        let (image, pages) = wire::decode(&manifest).map_err(wrong)?;
        check_place(&image.meta, job, id)?;
        let reader = Reader::open(&folder, id, &pages)?;
        let touch = TouchSet::open(&folder, &image.meta);
        Ok(Checkpoint { image, pages, manifest_bytes: manifest.len() as u64, reader, touch })
    }

    /// Reads what a checkpoint is called, without its page map and its data.
    ///
    /// # Errors
    /// As [`Store::load`], as far as the manifest is concerned.
    pub fn summary(&self, job: &str, id: Option<u64>) -> Result<Summary> {
        let folder = self.known(job)?;
        let (id, manifest) = self.manifest(&folder, id)?;
        let wrong = |source| Error::Manifest { job: job.to_owned(), id, source };
        let meta = wire::decode_meta(&manifest).map_err(wrong)?;
        check_place(&meta, job, id)?;
        Ok(Summary { meta, manifest_bytes: manifest.len() as u64 })
    }

    /// What a job takes on the medium, bytes: all of its files, also those that only wait to be written anew.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`].
    pub fn room(&self, job: &str) -> Result<u64> {
        Ok(room(&self.known(job)?.path))
    }

    /// What tells a job's folder from all others: device and inode number.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn place(&self, job: &str) -> Result<(u64, u64)> {
        let folder = self.known(job)?.path;
        let metadata = folder.metadata().map_err(Error::io("look at", &folder))?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// The file of which somebody holds an exclusive `flock` who adds to a job, or removes from it.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`].
    pub fn lock_of_writers(&self, job: &str) -> Result<PathBuf> {
        Ok(self.known(job)?.writer_lock())
    }

    /// Begins a checkpoint. There is one writer at a time for each job.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Busy`] if another writer does not end in time, [`Error::Io`].
    pub fn begin(&self, job: &str) -> Result<Writer> {
        let (folder, lock) = self.made(job, |folder| self.writer_lock(folder))?;
        if sweep::has_leftovers(&self.medium, &folder)? {
            sweep::sweep(self, &folder, sweep::Rewriting::No, Room::GivenBack)?;
        }
        Writer::begin(self.medium.clone(), folder, lock)
    }

    /// Reads a manifest; returns its id as well.
    fn manifest(&self, folder: &Folder, id: Option<u64>) -> Result<(u64, Vec<u8>)> {
        let newest = || folder.checkpoint_ids().map(|ids| ids.last().copied());
        let none = || Error::NoneYet { job: folder.job.clone() };
        let id = id.map_or_else(newest, |id| Ok(Some(id)))?.ok_or_else(none)?;
        let path = folder.checkpoint(id);
        match std::fs::read(&path) {
            Ok(manifest) => Ok((id, manifest)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Err(Error::NoCheckpoint { job: folder.job.clone(), id, store: self.path.clone() })
            }
            Err(e) => Err(Error::io("read", &path)(e)),
        }
    }

    pub(crate) fn jobs_folder(&self) -> PathBuf {
        self.path.join("jobs")
    }

    pub(crate) fn folder_unchecked(&self, job: &str) -> Folder {
        Folder { job: job.to_owned(), path: self.jobs_folder().join(job) }
    }

    /// The folder of a job that exists.
    pub(crate) fn known(&self, job: &str) -> Result<Folder> {
        check_name(job)?;
        let folder = self.folder_unchecked(job);
        match folder.path.is_dir() {
            true => Ok(folder),
            false => Err(Error::NoJob { job: job.to_owned(), store: self.path.clone() }),
        }
    }

    /// The folder of a job, made if it does not exist.
    pub(crate) fn make(&self, job: &str) -> Result<Folder> {
        check_name(job)?;
        let folder = self.folder_unchecked(job);
        self.medium.make_folders(&folder.segments())?;
        self.medium.make_folders(&folder.checkpoints())?;
        Ok(folder)
    }

    /// The folder of a job, made if it does not exist, and a lock in it. It may be removed in between, and is made again then.
    pub(crate) fn made<T>(&self, job: &str, lock: impl Fn(&Folder) -> Result<T>) -> Result<(Folder, T)> {
        loop {
            let folder = self.make(job)?;
            match lock(&folder) {
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                other => return Ok((folder, other?)),
            }
        }
    }

    /// The right to add to a job and to remove from it.
    pub(crate) fn writer_lock(&self, folder: &Folder) -> Result<Lock> {
        let busy = || Error::Busy { job: folder.job.clone() };
        Lock::exclusive(&folder.writer_lock(), self.patience)?.ok_or_else(busy)
    }
}

/// What the files in a folder take. Those that go meanwhile count for nothing.
fn room(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => room(&entry.path()),
        Ok(metadata) => metadata.blocks() * 512,
        Err(_) => 0,
    };
    entries.map(of).sum()
}

/// Checks that a manifest is the one it was looked for as.
fn check_place(meta: &Meta, job: &str, id: u64) -> Result<()> {
    if (meta.job.as_str(), meta.id) == (job, id) {
        return Ok(());
    }
    Err(Error::Misplaced { job: job.to_owned(), id, found: format!("{}@{}", meta.job, meta.id) })
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.path.display())
    }
}
