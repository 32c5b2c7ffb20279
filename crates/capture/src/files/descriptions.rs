//! Which descriptors share an open file description.

use super::Target;
use crate::Result;
use rustix::fs::Stat;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use stillpoint_linux::Error;
use stillpoint_linux::descriptors::{compare, duplicate_from};
use stillpoint_linux::fdinfo::{self, Detail, FdInfo, Folders};

/// An open file description of the target.
#[derive(Debug)]
pub struct Description {
    /// Its descriptors and whether each closes on exec, ascending; none if it is only in an unread message.
    pub fds: Vec<(u32, bool)>,
    /// Our duplicate of it.
    pub file: OwnedFd,
    /// `fstat`.
    pub stat: Stat,
    /// `/proc/PID/fd/N`.
    pub link: Vec<u8>,
    /// `/proc/PID/fdinfo/N`.
    pub info: FdInfo,
}

impl Description {
    /// Lowest descriptor; a number that none has if it is only in an unread message.
    pub fn fd(&self) -> u32 {
        self.fds.first().map_or(i32::MAX as u32, |fd| fd.0)
    }

    /// For messages: `descriptor 5 (socket:[1234])`.
    pub fn name(&self) -> String {
        let link = String::from_utf8_lossy(&self.link);
        match self.fds.first() {
            Some((fd, _)) => format!("descriptor {fd} ({link})"),
            None => format!("descriptor in a message ({link})"),
        }
    }

    /// Device and inode number.
    pub fn inode(&self) -> (u64, u64) {
        (self.stat.st_dev, self.stat.st_ino)
    }

    /// Whether the access mode allows reading.
    pub fn can_read(&self) -> bool {
        self.info.flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
    }

    /// Whether the access mode allows writing.
    pub fn can_write(&self) -> bool {
        self.info.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32
    }

    /// Whether it is a handle to a path only (`O_PATH`).
    pub fn is_path_handle(&self) -> bool {
        self.info.flags & libc::O_PATH as u32 != 0
    }

    /// Whether it is an object of the kernel without a place in the file system.
    pub fn is_anonymous(&self) -> bool {
        self.link.starts_with(b"anon_inode:") || self.info.detail != Detail::None
    }
}

/// All open file descriptions of the target, ordered by their lowest descriptor.
pub fn read(target: &Target<'_>) -> Result<Vec<Description>> {
    let mut all: Vec<Description> = Vec::new();
    // Only descriptors of the same inode and name can share a description. Each group is kept in kcmp's order.
    let mut groups: HashMap<(u64, u64, Vec<u8>), Vec<usize>> = HashMap::new();
    let folders = Folders::open(target.pid)?;
    for fd in fdinfo::list(target.pid)? {
        let Some(found) = describe(target, &folders, fd)? else { continue };
        let key = (found.stat.st_dev, found.stat.st_ino, found.link.clone());
        let group = groups.entry(key).or_default();
        let placed = match place(target.pid, group, &all, fd) {
            // The target runs and closed one of them since: take it for one of its own.
            Err(e) if !target.frozen && e.errno() == Some(libc::EBADF) => Err(group.len()),
            placed => placed?,
        };
        match placed {
            Ok(known) => all[known].fds.extend(found.fds),
            Err(at) => {
                group.insert(at, all.len());
                all.push(found);
            }
        }
    }
    Ok(all)
}

/// An index into all descriptions, or where in its group a new one belongs.
type Place = std::result::Result<usize, usize>;

/// Binary search of a descriptor among descriptions in kcmp's order: the one it shares, or where a new one belongs.
fn place(pid: u32, group: &[usize], all: &[Description], fd: u32) -> Result<Place, Error> {
    let (mut low, mut high) = (0, group.len());
    while low < high {
        let middle = (low + high) / 2;
        match compare(pid, all[group[middle]].fd(), fd)? {
            Ordering::Equal => return Ok(Ok(group[middle])),
            Ordering::Less => low = middle + 1,
            Ordering::Greater => high = middle,
        }
    }
    Ok(Err(low))
}

/// Looks at one descriptor; `None` if the target, which then runs, closed it meanwhile.
fn describe(target: &Target<'_>, folders: &Folders, fd: u32) -> Result<Option<Description>> {
    let gone = |e: &Error| !target.frozen && matches!(e.errno(), Some(libc::ENOENT | libc::EBADF));
    let look = || -> Result<Description, Error> {
        let file = duplicate_from(target.pidfd, fd)?;
        let stat = rustix::fs::fstat(&file).map_err(|e| Error::call(format!("fstat descriptor {fd}"), e))?;
        let link = folders.link(fd)?;
        let info = folders.read(fd)?;
        let close_on_exec = info.flags & libc::O_CLOEXEC as u32 != 0;
        Ok(Description { fds: vec![(fd, close_on_exec)], file, stat, link, info })
    };
    match look() {
        Ok(found) => Ok(Some(found)),
        Err(e) if gone(&e) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
