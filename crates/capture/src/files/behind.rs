//! What waits behind a pipe that a supervisor of ours fills.
//!
//! A restored program that was reading from outside finds what it had not yet read in a pipe, into which its supervisor brings what
//! comes in now. While that pipe is full, the rest is where it comes from, and ends with the supervisor.
//!
//! Who brings something locks the pipe meanwhile, and so do we while we look at both. If the program is to be killed, the lock is held
//! until it has been: what came later would be in neither place for the next restore. The locks are those of descriptions
//! (`F_OFD_SETLK`) for writing, of which a program that has the pipe to read knows nothing.

use super::Scan;
use super::descriptions::Description;
use crate::{Error, Result};
use rustix::fs::FileType;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use stillpoint_image::{Bytes, Pipe};
use stillpoint_linux::descriptors::{duplicate_from, pidfd_open, readable, reopen};
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::locks::{LockRange, lock_description};
use stillpoint_linux::pipes;

/// So long somebody may take who is just bringing something: he waits for nothing while he does, but for a processor.
const PATIENCE: Duration = Duration::from_millis(300);

/// Where the supervisor takes from what it brings.
struct Source {
    supervisor: u32,
    descriptor: u32,
    kind: FileType,
    folders: Folders,
}

impl Source {
    fn duplicate(&self) -> Result<OwnedFd> {
        Ok(duplicate_from(pidfd_open(self.supervisor, 0)?.as_fd(), self.descriptor)?)
    }

    fn has_something(&self) -> bool {
        self.duplicate().is_ok_and(|from| readable(from).is_ok_and(|bytes| bytes > 0))
    }

    /// Somebody else's pipe may not be ours to open; and whose descriptors we may not have (Yama), his files we may open.
    fn open(&self) -> Result<OwnedFd> {
        let reopened = |_| {
            let handle = self.folders.handle(self.descriptor)?;
            Ok(reopen(handle, libc::O_RDONLY | libc::O_NONBLOCK)?)
        };
        self.duplicate().or_else(reopened)
    }
}

/// What the program has not yet read of a pipe from outside, which it was started with under this number: what is in that pipe, and what
/// is still where it comes from.
pub(super) fn unread(scan: &mut Scan<'_>, d: &Description, number: u32) -> Result<Vec<Pipe>> {
    let Some(source) = source(scan, d, number) else {
        return Ok(vec![contents(&d.file, number, d.inode())?]);
    };
    // That we could read it must not be: who brings something is to see that the program is gone before the lock is.
    let lock = reopen(&d.file, libc::O_WRONLY | libc::O_NONBLOCK)?;
    if !is_locked(&lock)? {
        scan.refuse::<()>(d, "its supervisor takes long to bring something to it", "try again")?;
        return Ok(Vec::new());
    }
    let mut all = vec![contents(&d.file, number, d.inode())?];
    match source.kind {
        FileType::Fifo => {
            // Nothing more comes if it has been closed.
            if let Ok(stat) = source.folders.stat(source.descriptor) {
                all.push(contents(&source.open()?, number, (stat.st_dev, stat.st_ino))?);
            }
        }
        FileType::Socket if scan.builder.kills && source.has_something() => {
            let why = "it comes from a socket, in which something waits to be brought to it";
            scan.refuse::<()>(d, why, "try again when the program has read more, or without --kill")?;
        }
        _ => {}
    }
    if scan.builder.kills {
        scan.builder.stopped.push(lock);
    }
    Ok(all)
}

/// Whether a restore can put all that into a pipe.
pub(super) fn can_be_held(unread: &[Pipe]) -> bool {
    let room = pipes::room(unread.iter().flat_map(|pipe| &pipe.data).map(|part| part.0.len()));
    pipes::pipe(0).and_then(|(_, pipe)| pipes::enlarge(pipe, room)).is_ok()
}

fn contents(pipe: &OwnedFd, number: u32, inode: (u64, u64)) -> Result<Pipe> {
    let data = pipes::contents(pipe)?.into_iter().map(Bytes).collect();
    let (capacity, stdio, inode) = (pipes::capacity(pipe)?, Some(number), Some(inode));
    Ok(Pipe { capacity, data, stdio, inode, ..Pipe::default() })
}

/// Where the supervisor brings it from, if it does. A pipe that the program has itself is captured as that.
fn source(scan: &Scan<'_>, d: &Description, number: u32) -> Option<Source> {
    let others: Vec<&[u8]> = scan
        .target
        .inherited
        .iter()
        .filter(|(of, link)| *of == number && *link != d.link)
        .map(|(_, link)| link.as_slice())
        .collect();
    let root = scan.target.holders.first().filter(|_| !others.is_empty())?;
    // Whatever cannot be looked at has ended, and brings nothing.
    let supervisor = root.process.stat().ok()?.ppid;
    let folders = Folders::open(supervisor).ok()?;
    let links = folders.list().ok()?.into_iter().filter_map(|fd| Some((fd, folders.link(fd).ok()?)));
    let links: Vec<(u32, Vec<u8>)> = links.collect();
    links.iter().find(|(_, link)| *link == d.link)?;
    let (descriptor, link) = links.iter().find(|(_, link)| others.contains(&link.as_slice()))?;
    let kind = FileType::from_raw_mode(folders.stat(*descriptor).ok()?.st_mode);
    let is_of_program = scan.all.iter().any(|d| d.link == *link);
    let is_ours_alone = kind != FileType::Fifo || !is_of_program;
    let descriptor = *descriptor;
    is_ours_alone.then_some(Source { supervisor, descriptor, kind, folders })
}

fn is_locked(pipe: &OwnedFd) -> Result<bool> {
    let began = Instant::now();
    loop {
        match lock_description(pipe, LockRange::ALL) {
            Ok(()) => return Ok(true),
            Err(e) if matches!(e.errno(), Some(libc::EAGAIN | libc::EACCES)) => {
                if began.elapsed() > PATIENCE {
                    return Ok(false);
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            Err(e) => return Err(Error::from(e)),
        }
    }
}
