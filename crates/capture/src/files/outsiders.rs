//! Which other processes hold the same pipes, sockets and terminals as the target.

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::proc::{self, Proc, Vma};
use stillpoint_linux::tty;

/// Who holds what outside the target, as far as we may see it: links of `/proc/*/fd`.
#[derive(Debug)]
pub struct Outsiders {
    /// Those who belong to the target.
    inside: Vec<u32>,
    /// Inode numbers of nameless shared memory that the target has mapped.
    memory: Vec<u64>,
    /// Looked up when somebody asks first: there may be many processes, and most programs hold nothing that others might.
    holders: OnceLock<Holders>,
}

type Holders = HashMap<Vec<u8>, Vec<Holder>>;

/// A process that holds an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its id.
    pub pid: u32,
    /// Its name (`comm`).
    pub name: String,
}

/// What somebody outside can do with a FIFO that he has open.
#[derive(Clone, Debug)]
pub struct End {
    /// Who it is.
    pub holder: Holder,
    /// He can read.
    pub reads: bool,
    /// He can write.
    pub writes: bool,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

impl Outsiders {
    /// Of a target whose processes are `inside`, who has mapped `memory`: nameless shared memory (memfds and shared anonymous
    /// memory), by inode numbers.
    pub fn of(inside: &[u32], mut memory: Vec<u64>) -> Self {
        memory.sort_unstable();
        memory.dedup();
        Outsiders { inside: inside.to_vec(), memory, holders: OnceLock::new() }
    }

    /// Nobody holds anything.
    pub fn none() -> Self {
        Outsiders { inside: Vec::new(), memory: Vec::new(), holders: OnceLock::from(Holders::new()) }
    }

    /// Looks through the descriptors of all other processes, and through their mappings for memory of the target, unless that has
    /// been done. Processes that end meanwhile or that we may not look at are left out: the state of the objects themselves is
    /// asked as well.
    pub fn look(&self) -> &Holders {
        self.holders.get_or_init(|| {
            let mut holders = Holders::new();
            let pids = proc::processes().unwrap_or_default();
            self.add(&mut holders, pids.into_iter().filter(|pid| !self.inside.contains(pid)));
            holders
        })
    }

    /// These belong to the target; `newer` tells which others were made since it was begun to look, if that has been done.
    pub fn update(&mut self, inside: &[u32], newer: impl FnOnce() -> Vec<u32>) {
        self.inside = inside.to_vec();
        if let Some(mut holders) = self.holders.take() {
            holders.values_mut().for_each(|holders| holders.retain(|h| !inside.contains(&h.pid)));
            self.add(&mut holders, newer());
            self.holders = OnceLock::from(holders);
        }
    }

    fn add(&self, holders: &mut Holders, pids: impl IntoIterator<Item = u32>) {
        for pid in pids.into_iter().filter(|pid| *pid != std::process::id()) {
            let links: HashSet<Vec<u8>> = links(pid).chain(self.mapped(pid)).collect();
            if !links.is_empty() {
                let holder = Holder { pid, name: name_of(pid) };
                links.into_iter().for_each(|l| holders.entry(l).or_default().push(holder.clone()));
            }
        }
    }

    /// Nameless shared memory of the target that a process has mapped.
    fn mapped(&self, pid: u32) -> Vec<Vec<u8>> {
        if self.memory.is_empty() {
            return Vec::new();
        }
        let maps = Proc::process(pid).and_then(|p| p.maps()).unwrap_or_default();
        let of_target = maps.iter().filter(|v| is_nameless(v) && self.memory.binary_search(&v.ino).is_ok());
        of_target.map(|v| memory_key(v.ino)).collect()
    }

    /// Who holds the object that a link of `/proc/PID/fd` names; for a memfd see [`Outsiders::memory`], for the slave of a
    /// pseudo-terminal [`Outsiders::terminal`].
    pub fn holder(&self, link: &[u8]) -> Option<&Holder> {
        // Whoever it was may have let go of it, or ended.
        let still = |h: &&Holder| links(h.pid).chain(self.mapped(h.pid)).any(|l| l == link);
        self.look().get(link)?.iter().find(still)
    }

    /// Who has the FIFO open that has this name and this device and inode number, once for each descriptor.
    pub fn ends(&self, link: &[u8], inode: (u64, u64)) -> Vec<End> {
        self.look().get(link).into_iter().flatten().flat_map(|holder| ends_of(holder, link, inode)).collect()
    }

    /// Who holds the memfd or has mapped the shared memory with this inode number.
    pub fn memory(&self, ino: u64) -> Option<&Holder> {
        self.holder(&memory_key(ino))
    }

    /// Who holds the slave of a pseudo-terminal, by its device number and that of the devpts it is in; where that is not known, in
    /// any.
    pub fn terminal(&self, system: Option<u64>, device: u64) -> Option<&Holder> {
        if let Some(system) = system {
            return self.holder(&terminal_key(system, device));
        }
        let ends = terminal_end(device);
        self.look().keys().filter(|key| key.ends_with(ends.as_bytes())).find_map(|key| self.holder(key))
    }
}

/// The ends of a FIFO that a process has. What it lets go of meanwhile is none.
fn ends_of(holder: &Holder, link: &[u8], inode: (u64, u64)) -> Vec<End> {
    let Ok(folders) = Folders::open(holder.pid) else { return Vec::new() };
    let is_that = |fd: &u32| {
        folders.link(*fd).is_ok_and(|l| l == link)
            && folders.stat(*fd).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == inode)
    };
    let end = |fd: u32| {
        let mode = folders.read(fd).ok()?.flags as i32 & libc::O_ACCMODE;
        let (reads, writes) = (mode != libc::O_WRONLY, mode != libc::O_RDONLY);
        Some(End { holder: holder.clone(), reads, writes })
    };
    folders.list().unwrap_or_default().into_iter().filter(is_that).filter_map(end).collect()
}

/// What the descriptors of a process lead to.
fn links(pid: u32) -> impl Iterator<Item = Vec<u8>> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    fds.filter_map(|fd| identity(&fd.path()))
}

/// Whether a mapping is of nameless shared memory. (Inode numbers of System V segments are their ids, which may be those
/// of memfds too.)
fn is_nameless(v: &Vma) -> bool {
    v.deleted && v.shared && !v.name.starts_with(b"/SYSV")
}

fn memory_key(ino: u64) -> Vec<u8> {
    format!("/memfd:[{ino}]").into_bytes()
}

/// In each devpts there is a terminal of each number, and each may have any name.
fn terminal_key(system: u64, device: u64) -> Vec<u8> {
    format!("/devpts:[{system}{}", terminal_end(device)).into_bytes()
}

fn terminal_end(device: u64) -> String {
    format!("]:[{device}]")
}

/// The devpts and the device number of the slave of a pseudo-terminal. No file system is asked for what it has not told: it may be
/// one that does not answer.
fn terminal(fd: &Path) -> Option<(u64, u64)> {
    let stat = statx(CWD, fd, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
    let device = makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
    let is_slave = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::CharacterDevice
        && tty::slave_number(device).is_some();
    is_slave.then(|| (makedev(stat.stx_dev_major, stat.stx_dev_minor), device))
}

/// What to remember an object by: its link, unless that says nothing of which object it is.
fn identity(fd: &Path) -> Option<Vec<u8>> {
    use std::os::unix::fs::MetadataExt;
    let link = std::fs::read_link(fd).ok()?;
    let link = link.as_os_str().as_bytes();
    if link.starts_with(b"anon_inode:") {
        return None;
    }
    if link.starts_with(b"/memfd:") {
        return Some(memory_key(std::fs::metadata(fd).ok()?.ino()));
    }
    if link.starts_with(b"/")
        && let Some((system, device)) = terminal(fd)
    {
        return Some(terminal_key(system, device));
    }
    Some(link.to_vec())
}

fn name_of(pid: u32) -> String {
    let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&comm).trim_end().escape_debug().to_string()
}
