//! What can go wrong in a store.

use std::borrow::Cow;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_image::wire::WireError;
use stillpoint_image::{Codec, Owner};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong in a store: with what, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name cannot be the name of a job.
    #[error("{name:?} cannot be the name of a job: {why}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// There is no such job.
    #[error("no job {job} in {store}")]
    NoJob {
        /// The job asked for.
        job: String,
        /// The store looked into.
        store: PathBuf,
    },
    /// There is no such checkpoint.
    #[error("no checkpoint {job}@{id} in {store}")]
    NoCheckpoint {
        /// The job asked for.
        job: String,
        /// The checkpoint asked for.
        id: u64,
        /// The store looked into.
        store: PathBuf,
    },
    /// The job has no checkpoint yet.
    #[error("job {job} has no checkpoint yet")]
    NoneYet {
        /// The job asked for.
        job: String,
    },
    /// The name belongs to a job that is starting or running.
    #[error("job {job} is already running: choose another name")]
    NameTaken {
        /// The job.
        job: String,
    },
    /// Somebody else adds to the job, or removes from it, right now.
    #[error("job {job} is being checkpointed or pruned by another process: try again later")]
    Busy {
        /// The job.
        job: String,
    },
    /// The operating system refused an operation.
    #[error("{action} {}: {source}{}", .path.display(), hint(.path, .source))]
    Io {
        /// What was being done.
        action: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// The reason the system gave.
        source: io::Error,
    },
    /// A manifest cannot be read.
    #[error("checkpoint {job}@{id}: {source}")]
    Manifest {
        /// The job.
        job: String,
        /// The checkpoint.
        id: u64,
        /// What is wrong with it.
        source: WireError,
    },
    /// A manifest says it is another checkpoint's.
    #[error("checkpoint {job}@{id}: its manifest is that of {found}: the file was moved or copied here")]
    Misplaced {
        /// The job looked into.
        job: String,
        /// The checkpoint looked for.
        id: u64,
        /// Who the manifest says it belongs to.
        found: String,
    },
    /// A segment that a checkpoint needs is not there.
    #[error("checkpoint {job}@{id}: segment {} is missing", .path.display())]
    SegmentMissing {
        /// The job.
        job: String,
        /// The checkpoint.
        id: u64,
        /// Path of the segment.
        path: PathBuf,
    },
    /// A file that should be a segment is none, or another one, or has been cut.
    #[error("segment {}: {why}", .path.display())]
    Segment {
        /// Path of the segment.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Page data has changed since it was written.
    #[error(
        "checkpoint {job}@{id}: memory at {address:#x} ({pages} pages of {owner}) is damaged: {} at offset {offset} \
         does not match its checksum", .path.display()
    )]
    Damaged {
        /// The job.
        job: String,
        /// The checkpoint.
        id: u64,
        /// Path of the segment.
        path: PathBuf,
        /// Offset of the damaged block, bytes.
        offset: u64,
        /// What the pages belong to.
        owner: Owner,
        /// Address of the first page in the program, or its offset in the object or file.
        address: u64,
        /// Number of pages.
        pages: u32,
    },
    /// Stored with an encoding that this program does not have.
    #[error("checkpoint {job}@{id}: stored with {codec:?} compression, which this stillpoint cannot read")]
    Codec {
        /// The job.
        job: String,
        /// The checkpoint.
        id: u64,
        /// The encoding.
        codec: Codec,
    },
    /// The pages of an older checkpoint are no longer where they were.
    #[error(
        "segment {segment} of job {job} is gone: load the newest checkpoint again before reusing its pages"
    )]
    Stale {
        /// The job.
        job: String,
        /// The segment.
        segment: u64,
    },
    /// The image to be committed contradicts itself: a bug of whoever made it.
    #[error("the description of the program is inconsistent: {0}")]
    Image(#[from] stillpoint_image::validate::Invalid),
    /// An earlier write of this checkpoint failed, so nothing more can be added to it; whether that was because there was no room left.
    #[error("this checkpoint has already failed ({0}): begin a new one")]
    Failed(String, bool),
    /// A small file of the store is not what it should be.
    #[error("{}: not a {kind} record, or damaged: remove the file", .path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What it should be.
        kind: &'static str,
    },
}

impl Error {
    /// Whether the user asked for something that cannot be (exit code 2), rather than something having failed.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Error::Name { .. }
                | Error::NoJob { .. }
                | Error::NoCheckpoint { .. }
                | Error::NoneYet { .. }
                | Error::NameTaken { .. }
        )
    }

    /// Names what was being done, and to which file, when the system refused it.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { action, path: path.to_owned(), source }
    }

    /// Whether we were not allowed to look, which tells nothing of what is there.
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Whether the medium has no room left.
    pub fn is_full(&self) -> bool {
        match self {
            Error::Io { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            Error::Failed(_, full) => *full,
            _ => false,
        }
    }
}

fn hint(path: &Path, error: &io::Error) -> Cow<'static, str> {
    let owner =
        || std::fs::symlink_metadata(path).or_else(|_| std::fs::metadata(path.parent().unwrap_or(path)));
    let own = rustix::process::geteuid().as_raw();
    if error.kind() == io::ErrorKind::PermissionDenied
        && let Some(uid) = owner().ok().map(|file| file.uid()).filter(|uid| *uid != own)
    {
        return format!(" (it belongs to user {uid}: be that user, or root, or change its owner by chown)")
            .into();
    }
    let hint = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            " (make room, prune older checkpoints, or choose another store)"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            " (choose a store you may write to)"
        }
        _ if error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) => {
            " (raise the limit on open files: ulimit -n)"
        }
        _ => "",
    };
    hint.into()
}

/// Why pages could not be put into a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum PutError<E> {
    /// The store failed. The writer refuses everything from now on.
    #[error(transparent)]
    Store(#[from] Error),
    /// Whoever fills the buffers failed. Nothing of this call's last batch was stored; the writer can go on.
    #[error("{0}")]
    Fill(E),
}
