//! Which other processes hold the same pipes, sockets and terminals as the target.

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use stillpoint_linux::proc::{self, Proc, Vma};

/// Who holds what outside the target, as far as we may see it: links of `/proc/*/fd`.
#[derive(Debug, Default)]
pub struct Outsiders {
    holders: HashMap<Vec<u8>, Holder>,
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
    /// Looks through the descriptors of all processes but `except` and ourselves. Processes that end meanwhile or
    /// that we may not look at are left out: the state of the objects themselves is asked as well.
    pub fn scan(except: &[u32]) -> Self {
        let mut holders = HashMap::new();
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|e| e.file_name().to_str().and_then(|n| n.parse::<u32>().ok()));
        for pid in pids.filter(|pid| *pid != std::process::id() && !except.contains(pid)) {
            let mut holder: Option<Holder> = None;
            let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            for link in fds.filter_map(|fd| identity(&fd.path())) {
                let holder = holder.get_or_insert_with(|| Holder { pid, name: name_of(pid) });
                holders.entry(link).or_insert_with(|| holder.clone());
            }
        }
        Outsiders { holders }
    }

    /// Looks through the mappings of all processes but `except` and ourselves for nameless shared memory: memfds and
    /// shared anonymous memory, by the inode numbers of those that the target has mapped.
    pub fn scan_memory(&mut self, except: &[u32], wanted: &[u64]) {
        if wanted.is_empty() {
            return;
        }
        let pids = proc::processes().unwrap_or_default();
        for pid in pids.into_iter().filter(|pid| *pid != std::process::id() && !except.contains(pid)) {
            let maps = Proc::process(pid).and_then(|p| p.maps()).unwrap_or_default();
            for vma in maps.iter().filter(|v| is_nameless(v) && wanted.contains(&v.ino)) {
                let holder = || Holder { pid, name: name_of(pid) };
                self.holders.entry(memory_key(vma.ino)).or_insert_with(holder);
            }
        }
    }

    /// Who holds the object that a link of `/proc/PID/fd` names; for a memfd see [`Outsiders::memory`].
    pub fn holder(&self, link: &[u8]) -> Option<&Holder> {
        self.holders.get(link)
    }

    /// Who holds the memfd or has mapped the shared memory with this inode number.
    pub fn memory(&self, ino: u64) -> Option<&Holder> {
        self.holders.get(memory_key(ino).as_slice())
    }
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
