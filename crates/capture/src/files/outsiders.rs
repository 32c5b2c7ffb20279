//! Which other processes hold the same pipes, sockets and terminals as the target.

use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use stillpoint_linux::proc::{self, Proc, Vma};

/// Who holds what outside the target, as far as we may see it: links of `/proc/*/fd`.
#[derive(Debug, Default)]
pub struct Outsiders {
    holders: HashMap<Vec<u8>, Vec<Holder>>,
    /// Inode numbers of nameless shared memory that the target has mapped.
    memory: Vec<u64>,
}

/// A process that holds an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its id.
    pub pid: u32,
    /// Its name (`comm`).
    pub name: String,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

impl Outsiders {
    /// Looks through the descriptors of all processes but `except` and ourselves, and through their mappings for `memory`:
    /// nameless shared memory (memfds and shared anonymous memory), by the inode numbers of what the target has mapped.
    /// Processes that end meanwhile or that we may not look at are left out: the state of the objects themselves is asked
    /// as well.
    pub fn scan(except: &[u32], mut memory: Vec<u64>) -> Self {
        memory.sort_unstable();
        memory.dedup();
        let mut outsiders = Outsiders { holders: HashMap::new(), memory };
        let pids = proc::processes().unwrap_or_default();
        outsiders.look_at(pids.into_iter().filter(|pid| !except.contains(pid)));
        outsiders
    }

    /// These belong to the target.
    pub fn leave_out(&mut self, pids: &[u32]) {
        self.holders.values_mut().for_each(|holders| holders.retain(|h| !pids.contains(&h.pid)));
    }

    /// Looks at further processes.
    pub fn look_at(&mut self, pids: impl IntoIterator<Item = u32>) {
        for pid in pids.into_iter().filter(|pid| *pid != std::process::id()) {
            let links: HashSet<Vec<u8>> = links(pid).chain(self.mapped(pid)).collect();
            if !links.is_empty() {
                let holder = Holder { pid, name: name_of(pid) };
                links.into_iter().for_each(|l| self.holders.entry(l).or_default().push(holder.clone()));
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

    /// Who holds the object that a link of `/proc/PID/fd` names; for a memfd see [`Outsiders::memory`].
    pub fn holder(&self, link: &[u8]) -> Option<&Holder> {
        // Whoever it was may have let go of it, or ended.
        let still = |h: &&Holder| links(h.pid).chain(self.mapped(h.pid)).any(|l| l == link);
        self.holders.get(link)?.iter().find(still)
    }

    /// Who holds the memfd or has mapped the shared memory with this inode number.
    pub fn memory(&self, ino: u64) -> Option<&Holder> {
        self.holder(&memory_key(ino))
    }
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

/// What to remember an object by: its link, unless that says nothing of which object it is.
fn identity(fd: &std::path::Path) -> Option<Vec<u8>> {
    use std::os::unix::fs::MetadataExt;
    let link = std::fs::read_link(fd).ok()?;
    let link = link.as_os_str().as_bytes();
    if link.starts_with(b"anon_inode:") {
        return None;
    }
    if link.starts_with(b"/memfd:") {
        return Some(memory_key(std::fs::metadata(fd).ok()?.ino()));
    }
    Some(link.to_vec())
}

fn name_of(pid: u32) -> String {
    let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&comm).trim_end().to_owned()
}
