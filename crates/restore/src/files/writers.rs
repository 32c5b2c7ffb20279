//! Who else writes to a file that grew: what they have written since the checkpoint is theirs, and is not cut off. And who has it
//! mapped: whoever looks at a page of a mapping that lies behind the end of its file is killed.

use rustix::fs::{AtFlags, CWD, Stat, StatxFlags, fstat, makedev, stat, statx};
use std::collections::{HashMap, HashSet};
use std::fmt;
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::proc::{self, Proc};

/// Device and inode number.
pub type Inode = (u64, u64);

/// Somebody who has a file open for writing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Writer {
    /// A process, by its id and name.
    Process(u32, String),
    /// A process that only has it mapped.
    Mapped(u32, String),
    /// Our own standard output, or error output.
    Ourselves,
}

impl fmt::Display for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Writer::Process(pid, name) => write!(f, "process {pid} ({name}) has it open for writing"),
            Writer::Mapped(pid, name) => write!(f, "process {pid} ({name}) has it mapped"),
            Writer::Ourselves => f.write_str("it is the output of this command"),
        }
    }
}

/// Of these files those that somebody else has open for writing. Processes of this command do not count, as supervisors have the output
/// of their jobs open, and write nothing there; `own_output`: ours does. Nor do `but` some others. No file system is asked for what it
/// has not told.
pub fn writers(files: &HashSet<Inode>, own_output: bool, but: &[u32]) -> HashMap<Inode, Writer> {
    let mut found = HashMap::new();
    if files.is_empty() {
        return found;
    }
    if own_output {
        let outputs = [fstat(rustix::stdio::stdout()), fstat(rustix::stdio::stderr())];
        let inodes = outputs.into_iter().flatten().map(|stat: Stat| (stat.st_dev, stat.st_ino));
        found.extend(inodes.filter(|inode| files.contains(inode)).map(|inode| (inode, Writer::Ourselves)));
    }
    let own = stat("/proc/self/exe").map(|exe| (exe.st_dev, exe.st_ino)).ok();
    let all = proc::processes().unwrap_or_default();
    let is_ours = |pid: u32| {
        own.is_some() && stat(format!("/proc/{pid}/exe")).map(|e| (e.st_dev, e.st_ino)).ok() == own
    };
    for pid in all.into_iter().filter(|pid| !but.contains(pid)) {
        // One that ends meanwhile, or that we may not look at, is none that we know.
        let Ok(folders) = Folders::open(pid) else { continue };
        for fd in folders.list().unwrap_or_default() {
            let Some(inode) =
                inode_of(pid, fd).filter(|inode| files.contains(inode) && !found.contains_key(inode))
            else {
                continue;
            };
            let writes = folders
                .read(fd)
                .is_ok_and(|info| info.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32);
            if writes && !is_ours(pid) {
                found.insert(inode, Writer::Process(pid, name_of(pid)));
            }
        }
    }
    found
}

/// Of these files those that processes have mapped, but for some.
pub fn mapped(files: &HashSet<Inode>, but: &[u32]) -> HashMap<Inode, Writer> {
    let mut found = HashMap::new();
    if files.is_empty() {
        return found;
    }
    for pid in proc::processes().unwrap_or_default().into_iter().filter(|pid| !but.contains(pid)) {
        let maps = Proc::process(pid).and_then(|process| process.maps()).unwrap_or_default();
        // Their devices may differ from those of the files (btrfs, overlayfs).
        for vma in maps.iter().filter(|vma| files.iter().any(|(_, number)| *number == vma.ino)) {
            let inode = inode_at(&format!("/proc/{pid}/{}", vma.link_name()));
            if let Some(inode) = inode.filter(|inode| files.contains(inode)) {
                found.entry(inode).or_insert_with(|| Writer::Mapped(pid, name_of(pid)));
            }
        }
    }
    found
}

fn name_of(pid: u32) -> String {
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(name.trim_ascii_end()).into_owned()
}

fn inode_of(pid: u32, fd: u32) -> Option<Inode> {
    inode_at(&format!("/proc/{pid}/fd/{fd}"))
}

/// Which file a path leads to.
fn inode_at(path: &str) -> Option<Inode> {
    let stat = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino))
}
