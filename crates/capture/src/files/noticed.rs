//! What the program would notice if we opened or read it: files that it watches (inotify, fanotify), and those it has a lease on.
//!
//! These are not opened. Places are looked at by `lstat(2)` and by handles (`O_PATH`, which makes no event from Linux 6.10 on), files
//! without a name are read through a mapping of the program's own description, and what needs more is left out, or refused.

use super::locks::is_broken_by_opening;
use rustix::fs::{AtFlags, CWD, StatxFlags, stat, statfs, statx};
use std::collections::HashSet;
use std::path::Path;
use stillpoint_linux::fdinfo::{Detail, FanotifyLine, FdInfo, Inode, InotifyLine, Marked};
use stillpoint_linux::watches::handle_of;

/// The events of opening, reading and closing a file: the same numbers for inotify and fanotify.
const OURS: u32 = libc::IN_OPEN | libc::IN_ACCESS | libc::IN_CLOSE_NOWRITE;
/// Of fanotify: folders are told of, too, and what lies in a folder.
const FAN_ONDIR: u32 = 0x4000_0000;
const FAN_EVENT_ON_CHILD: u32 = 0x0800_0000;

/// Why something is refused that could only be read by opening it, and what can be done.
pub(crate) const WATCHED: (&str, &str) = (
    "the program watches it, or its folder, for being opened or read, and could not tell a look at it from others",
    "let the program remove the watch (inotify, fanotify) before the checkpoint",
);

/// Whether what `/proc/PID/fd` calls so is a group of watches.
pub(crate) fn is_of_watches(link: &[u8]) -> bool {
    matches!(link, b"anon_inode:inotify" | b"anon_inode:[fanotify]")
}

/// What the processes of a program would notice.
#[derive(Clone, Debug, Default)]
pub struct Noticed {
    /// Leases that are broken by opening: device and inode.
    leases: HashSet<(u64, u64)>,
    /// The marks of each group of watches.
    groups: Vec<Vec<Watch>>,
    /// Inodes that are marked, as of [`Place`]: there may be thousands, and most places are none of them.
    inodes: HashSet<(u64, u64)>,
    handles: HashSet<Handle>,
    /// Whole mounts or file systems are marked.
    is_wide: bool,
}

/// A mark of a group of watches.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Watch {
    on: Marked,
    /// Those of [`OURS`] that are told, and those that are not, whatever other marks say.
    told: u32,
    ignored: u32,
    /// It is about folders, too, that are opened or read; and about what lies in the one it is on.
    of_folders: bool,
    of_children: bool,
}

/// Type and bytes of a handle.
type Handle = (i32, Vec<u8>);

/// What is to be opened, or the folder it lies in. On file systems of several layers inode numbers are told in more than one way, and handles
/// in one.
struct Place {
    /// Device, in the kernel's own encoding, and inode number; none of a folder that is gone, or lies elsewhere.
    inode: Option<(u64, u64)>,
    handle: Option<Handle>,
}

impl Place {
    fn is(&self, inode: &Inode) -> bool {
        self.inode.is_none_or(|own| own == (inode.sdev, inode.ino))
            || self.handle.as_ref().is_some_and(|handle| *handle == inode.handle)
    }
}

impl Noticed {
    /// Adds a file with a lease that somebody breaks who opens it, by device and inode number.
    pub(crate) fn add_lease(&mut self, inode: (u64, u64)) {
        self.leases.insert(inode);
    }

    /// Adds what a descriptor watches, and a lease on what it leads to, by device and inode number.
    pub fn add_open(&mut self, info: &FdInfo, inode: (u64, u64)) {
        self.add(&info.detail);
        if info.locks.iter().any(is_broken_by_opening) {
            self.add_lease(inode);
        }
    }

    /// Adds what a descriptor watches, if it does.
    pub(crate) fn add(&mut self, detail: &Detail) {
        let mut marks: Vec<Watch> = match detail {
            Detail::Inotify(lines) => {
                let watch = |line: &InotifyLine| Watch {
                    on: Marked::Inode(line.inode.clone()),
                    told: line.mask & OURS,
                    ignored: 0,
                    of_folders: true,
                    of_children: true,
                };
                lines.iter().map(watch).collect()
            }
            Detail::Fanotify { marks, .. } => {
                let watch = |mark: &FanotifyLine| Watch {
                    on: mark.on.clone(),
                    told: mark.mask & OURS,
                    ignored: mark.ignored & OURS,
                    of_folders: mark.mask & FAN_ONDIR != 0,
                    of_children: mark.mask & FAN_EVENT_ON_CHILD != 0,
                };
                marks.iter().map(watch).collect()
            }
            _ => return,
        };
        marks.retain(|mark| mark.told | mark.ignored != 0);
        if marks.iter().all(|mark| mark.told == 0) || self.groups.contains(&marks) {
            return;
        }
        for mark in &marks {
            match &mark.on {
                Marked::Inode(inode) => {
                    self.inodes.insert((inode.sdev, inode.ino));
                    self.handles.extend(Some(inode.handle.clone()).filter(|handle| !handle.1.is_empty()));
                }
                _ => self.is_wide = true,
            }
        }
        self.groups.push(marks);
    }

    /// Whether the program would notice that a file was opened, read or closed, by a path to it as we see it, and its device and inode
    /// number. What is watched tells of what is in it, too, and goes on to when that has no name any more.
    pub fn is(&self, path: &Path, inode: (u64, u64)) -> bool {
        self.leases.contains(&inode) || self.tells(path, inode, false)
    }

    /// The same of a folder.
    pub(crate) fn is_folder(&self, path: &Path, inode: (u64, u64)) -> bool {
        self.tells(path, inode, true)
    }

    fn tells(&self, path: &Path, inode: (u64, u64), is_folder: bool) -> bool {
        if self.groups.is_empty() {
            return false;
        }
        let of = |path: &Path, inode: Option<(u64, u64)>| Place {
            inode: inode.map(|(device, number)| (kernel_device(device), number)),
            handle: handle_of(path),
        };
        let place = of(path, Some(inode));
        let parent = path.parent().filter(|_| path.is_absolute());
        let parent =
            parent.map(|parent| of(parent, stat(parent).ok().map(|stat| (stat.st_dev, stat.st_ino))));
        let is_marked = |place: &Place| {
            place.inode.is_none_or(|inode| self.inodes.contains(&inode))
                || place.handle.as_ref().is_some_and(|handle| self.handles.contains(handle))
        };
        if !self.is_wide && !is_marked(&place) && !parent.as_ref().is_some_and(is_marked) {
            return false;
        }
        self.groups.iter().any(|marks| {
            let is_on = |mark: &&Watch| mark.is_on(path, &place, parent.as_ref());
            let of_it: Vec<&Watch> = marks.iter().filter(is_on).collect();
            // What is ignored of a file itself is told by no other mark.
            let ignores = of_it.iter().filter(|mark| !is_folder && mark.is_on_itself(&place));
            let ignored = ignores.fold(0, |all, mark| all | mark.ignored);
            of_it.iter().any(|mark| mark.told & !ignored != 0 && mark.is_about(is_folder))
        })
    }
}

impl Watch {
    fn is_about(&self, is_folder: bool) -> bool {
        self.of_folders || !is_folder
    }

    fn is_on_itself(&self, place: &Place) -> bool {
        matches!(&self.on, Marked::Inode(inode) if place.inode.is_some() && place.is(inode))
    }

    /// Whether it is on a place, or on the folder that this lies in.
    fn is_on(&self, path: &Path, place: &Place, parent: Option<&Place>) -> bool {
        match &self.on {
            Marked::Inode(inode) => {
                place.is(inode) || self.of_children && parent.is_some_and(|parent| parent.is(inode))
            }
            Marked::FileSystem(device) => {
                place.inode.is_none_or(|(own, _)| own == *device) || is_layered(path)
            }
            // Of what has no name any more it is not known on which mount it lies.
            Marked::Mount(id) => mount_of(path).is_none_or(|mount| mount == *id),
            Marked::Unknown => true,
        }
    }
}

/// Whether files are told to be on other devices than their file system (btrfs, overlays, bcachefs).
fn is_layered(path: &Path) -> bool {
    const LAYERED: [u64; 3] = [0x9123_683e, 0x794c_7630, 0xca45_1a4e];
    statfs(path).map_or(true, |found| LAYERED.contains(&(found.f_type as u64 & 0xffff_ffff)))
}

/// The number of the mount that a path leads to, if it leads anywhere.
fn mount_of(path: &Path) -> Option<u64> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    statx(CWD, path, flags, StatxFlags::MNT_ID).ok().map(|found| found.stx_mnt_id)
}

/// A device number as the kernel has it.
pub(crate) fn kernel_device(dev: u64) -> u64 {
    u64::from(rustix::fs::major(dev)) << 20 | u64::from(rustix::fs::minor(dev))
}
