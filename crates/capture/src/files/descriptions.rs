//! Which descriptors share an open file description.

use super::Target;
use crate::Result;
use rustix::fs::Stat;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use stillpoint_linux::Error;
use stillpoint_linux::descriptors::{OfProcess, compare, duplicate_from};
use stillpoint_linux::fdinfo::{Detail, FdInfo, Folders, LockLine};

/// A descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The process that holds it, by its place among the [`Target::holders`].
    pub process: usize,
    /// Process id in our pid namespace.
    pub pid: u32,
    /// Its number.
    pub fd: u32,
    /// Whether it closes on exec.
    pub close_on_exec: bool,
}

/// An open file description of the target.
#[derive(Debug)]
pub struct Description {
    /// Its descriptors, ascending by process and number; none if it is only in an unread message.
    pub held: Vec<Held>,
    /// Our duplicate of it.
    pub file: OwnedFd,
    /// `fstat`.
    pub stat: Stat,
    /// `/proc/PID/fd/N`.
    pub link: Vec<u8>,
    /// `/proc/PID/fdinfo/N` of the first one, without locks.
    pub info: FdInfo,
    /// Locks, and the process through which each was seen, by its place among the [`Target::holders`]: those of a process show
    /// in its own only.
    pub locks: Vec<(usize, LockLine)>,
}

impl Description {
    /// Number of the first descriptor; one that none has if it is only in an unread message.
    pub fn fd(&self) -> u32 {
        self.held.first().map_or(i32::MAX as u32, |held| held.fd)
    }

    /// Process that holds the first descriptor, in our pid namespace; 0 if none does.
    pub fn pid(&self) -> u32 {
        self.held.first().map_or(0, |held| held.pid)
    }

    /// The first descriptor.
    pub fn first(&self) -> OfProcess {
        (self.pid(), self.fd())
    }

    /// Numbers of its descriptors, in whichever process.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.held.iter().map(|h| h.fd)
    }

    /// For messages: `descriptor 5 (socket:[1234])`.
    pub fn name(&self) -> String {
        let link = String::from_utf8_lossy(&self.link);
        match self.held.first() {
            None => format!("descriptor in a message ({link})"),
            Some(Held { process: 0, fd, .. }) => format!("descriptor {fd} ({link})"),
            Some(Held { pid, fd, .. }) => format!("descriptor {fd} of process {pid} ({link})"),
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

/// All open file descriptions of the target, ordered by the first process that holds them, and their lowest descriptor.
pub fn read(target: &Target<'_>) -> Result<Vec<Description>> {
    let mut all: Vec<Description> = Vec::new();
    // Only descriptors of the same inode and name can share a description. Each group is kept in kcmp's order.
    let mut groups: HashMap<(u64, u64, Vec<u8>), Vec<usize>> = HashMap::new();
    // By number, the last one that was found: most descriptors of a process are those that it was made with.
    let mut of_number: HashMap<u32, usize> = HashMap::new();
    for (process, holder) in target.holders.iter().enumerate() {
        if target.shares_table_of(process) != process {
            continue;
        }
        let folders = Folders::open(holder.pid)?;
        for fd in folders.list()? {
            if let Some(&known) = of_number.get(&fd)
                && compare(all[known].first(), (holder.pid, fd))? == Ordering::Equal
            {
                all[known].add(process, holder.pid, fd, folders.read(fd)?);
                continue;
            }
            let found = describe(target, process, &folders, fd)?;
            let key = (found.stat.st_dev, found.stat.st_ino, found.link.clone());
            let group = groups.entry(key).or_default();
            match place(group, &all, found.first())? {
                Ok(known) => {
                    all[known].join(found);
                    of_number.insert(fd, known);
                }
                Err(at) => {
                    of_number.insert(fd, all.len());
                    group.insert(at, all.len());
                    all.push(found);
                }
            }
        }
    }
    Ok(all)
}

impl Description {
    /// Another descriptor of the same description, and what its fdinfo tells.
    fn add(&mut self, process: usize, pid: u32, fd: u32, info: FdInfo) {
        self.notice(process, info.locks.into_iter().map(|line| (process, line)));
        self.held.push(Held { process, pid, fd, close_on_exec: closes_on_exec(info.flags) });
    }

    /// As [`Description::add`], of one that was looked at as a whole.
    fn join(&mut self, other: Description) {
        self.notice(other.held[0].process, other.locks);
        self.held.extend(other.held);
    }

    /// Locks of a process, if it is the first time that it is looked at.
    fn notice(&mut self, process: usize, locks: impl IntoIterator<Item = (usize, LockLine)>) {
        if !self.held.iter().any(|h| h.process == process) {
            self.locks.extend(locks.into_iter().filter(|(_, line)| line.kind == POSIX));
        }
    }
}

fn closes_on_exec(flags: u32) -> bool {
    flags & libc::O_CLOEXEC as u32 != 0
}

/// What fdinfo calls locks that belong to a process.
pub const POSIX: &str = "POSIX";

/// An index into all descriptions, or where in its group a new one belongs.
type Place = std::result::Result<usize, usize>;

/// Binary search of a descriptor among descriptions in kcmp's order: the one it shares, or where a new one belongs.
fn place(group: &[usize], all: &[Description], descriptor: OfProcess) -> Result<Place, Error> {
    let (mut low, mut high) = (0, group.len());
    while low < high {
        let middle = (low + high) / 2;
        match compare(all[group[middle]].first(), descriptor)? {
            Ordering::Equal => return Ok(Ok(group[middle])),
            Ordering::Less => low = middle + 1,
            Ordering::Greater => high = middle,
        }
    }
    Ok(Err(low))
}

/// Looks at one descriptor. The target stands still: what we have a duplicate of does not end when a program closes it. An
/// epoll would go on to tell of it, the other end of a connection hear of no end, and what was being written could not be
/// executed.
fn describe(target: &Target<'_>, process: usize, folders: &Folders, fd: u32) -> Result<Description, Error> {
    let holder = &target.holders[process];
    let file = duplicate_from(holder.pidfd, fd)?;
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call(format!("fstat descriptor {fd}"), e))?;
    let link = folders.link(fd)?;
    let mut info = folders.read(fd)?;
    let locks = std::mem::take(&mut info.locks).into_iter().map(|line| (process, line)).collect();
    let held = vec![Held { process, pid: holder.pid, fd, close_on_exec: closes_on_exec(info.flags) }];
    Ok(Description { held, file, stat, link, info, locks })
}
