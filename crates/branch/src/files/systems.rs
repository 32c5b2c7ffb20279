//! Which file systems may be asked for something while a program stands still.
//!
//! `statfs(2)` asks whoever serves a file system (FUSE, NFS), who may be one of the processes that stand still: then nobody would ever
//! answer. So who serves them is told from the mounts, which are read before.

use super::Holder;
use crate::Result;
use rustix::fs::statfs;
use std::collections::HashSet;
use std::path::Path;
use stillpoint_linux::Error as Kernel;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::proc::mounts::Mount;

/// Kinds of file systems that ask another machine or program.
const SERVED: [&[u8]; 17] = [
    b"fuse",
    b"fuseblk",
    b"virtiofs",
    b"nfs",
    b"nfs4",
    b"cifs",
    b"smb3",
    b"9p",
    b"ceph",
    b"afs",
    b"coda",
    b"lustre",
    b"orangefs",
    b"beegfs",
    b"gfs2",
    b"ocfs2",
    b"glusterfs",
];
/// What a server of FUSE has open.
const SERVER: &[u8] = b"/dev/fuse";

/// The mounts of a program.
#[derive(Clone, Debug, Default)]
pub struct Systems {
    known: HashSet<u64>,
    served: HashSet<u64>,
    /// Whether one of its processes serves a file system.
    is_server: bool,
}

impl Systems {
    /// Those that running processes see.
    pub fn learn(pids: &[u32]) -> Self {
        let mut systems = Systems::default();
        let mut namespaces = HashSet::new();
        for pid in pids {
            // Processes of one namespace see the same mounts, but for those outside of a root directory of their own.
            let places =
                ["ns/mnt", "root"].map(|place| std::fs::read_link(format!("/proc/{pid}/{place}")).ok());
            if namespaces.insert(places) {
                let mounts = Proc::process(*pid).and_then(|process| process.mounts()).unwrap_or_default();
                systems.add(&mounts);
            }
        }
        systems
    }

    fn add(&mut self, mounts: &[Mount]) {
        self.known.extend(mounts.iter().map(|mount| mount.id));
        self.served.extend(mounts.iter().filter(|mount| is_served(&mount.kind)).map(|mount| mount.id));
    }

    /// Notes what processes at rest are.
    pub fn note(&mut self, holders: &[Holder<'_>]) {
        let mut held = holders.iter().flat_map(|holder| holder.table.held.values());
        self.is_server = held.any(|held| held.link == SERVER);
    }

    /// The magic number of the file system on which a path leads, by its mount; none if somebody would have to be asked for it.
    ///
    /// # Errors
    /// That it leads nowhere.
    pub fn magic(&self, way: &Path, mount: u64) -> Result<Option<u64>> {
        // What is mounted elsewhere, or nowhere any more, may be of anybody.
        let asks = if self.known.contains(&mount) { self.served.contains(&mount) } else { self.is_server };
        if asks {
            return Ok(None);
        }
        let found = statfs(way).map_err(|e| Kernel::file(way, e))?;
        Ok(Some(found.f_type as u64 & 0xffff_ffff))
    }
}

fn is_served(kind: &[u8]) -> bool {
    kind.starts_with(b"fuse.") || SERVED.contains(&kind)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn who_serves_a_file_system_is_not_asked() {
        let here = Path::new("/");
        let mount = |id, kind: &[u8]| Mount { id, kind: kind.to_vec(), ..Mount::default() };
        let mut systems = Systems::default();
        systems.add(&[mount(1, b"ext4"), mount(2, b"fuse.sshfs"), mount(3, b"nfs4"), mount(4, b"fuseblk")]);
        let asked = |systems: &Systems, mount| systems.magic(here, mount).unwrap().is_some();
        assert_eq!([1, 2, 3, 4, 5].map(|mount| asked(&systems, mount)), [true, false, false, false, true]);
        systems.is_server = true;
        assert_eq!([1, 2, 5].map(|mount| asked(&systems, mount)), [true, false, false]);
    }

    #[test]
    fn mounts_of_a_process_are_known() {
        let systems = Systems::learn(&[std::process::id()]);
        assert!(!systems.known.is_empty());
        assert!(systems.known.is_superset(&systems.served));
    }
}
