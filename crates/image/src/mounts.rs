//! Mounts of the program's own, in a mount namespace of its own.

use crate::Bytes;
use minicbor::{Decode, Encode};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Kinds of file systems that are made anew.
pub const MADE_ANEW: [&str; 6] = ["tmpfs", "proc", "sysfs", "mqueue", "devpts", OVERLAY];
/// Kinds of file systems of which a machine has one each, which is mounted once more.
pub const OF_THE_MACHINE: [&str; 7] =
    ["debugfs", "tracefs", "securityfs", "pstore", "fusectl", "configfs", "binfmt_misc"];
/// The kind that lies over directories.
pub const OVERLAY: &str = "overlay";

/// What is mounted in a mount namespace, where that differs from what is around it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Mounts {
    /// Its root is the first of `all`, and nothing is in it that is not told here. Otherwise what is around it is in it as well.
    #[n(0)]
    pub is_apart: bool,
    /// Where nothing is mounted that is around it, the topmost first.
    #[n(1)]
    pub gone: Vec<Bytes>,
    /// File systems that only it has.
    #[n(2)]
    pub systems: Vec<FileSystem>,
    /// Its mounts, each behind that on which it is.
    #[n(3)]
    pub all: Vec<Mount>,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Mount {
    /// Where it is, as a path in the namespace.
    #[n(0)]
    pub point: Bytes,
    /// The mount on which it is; none for the root, and for one that is around the namespace, too.
    #[n(1)]
    pub parent: Option<u32>,
    /// What is mounted.
    #[n(2)]
    pub what: Mounted,
    /// Its options (`MOUNT_ATTR_*`), if it has others than it would have anyway.
    #[n(3)]
    pub options: Option<u64>,
    /// What it passes on and receives, if that is something else than it would be anyway.
    #[n(4)]
    pub sharing: Option<Sharing>,
}

/// What is mounted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum Mounted {
    /// What is mounted there around the namespace.
    #[default]
    #[n(0)]
    Kept,
    /// A file or directory that has this path around the namespace.
    #[n(1)]
    Around(#[n(0)] Bytes),
    /// One of the [`Mounts::systems`].
    #[n(2)]
    System {
        /// Its row.
        #[n(0)]
        row: u32,
        /// What of it, an absolute path there.
        #[n(1)]
        root: Bytes,
    },
}

/// What a mount passes on to others, and receives from them. mount_namespaces(7)
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Sharing {
    /// It is in this peer group, all of which are mounts of the namespace.
    #[n(0)]
    pub shares: Option<u32>,
    /// It receives what is mounted in this one.
    #[n(1)]
    pub receives: Option<Receives>,
    /// It cannot be mounted elsewhere.
    #[n(2)]
    pub is_unbindable: bool,
}

/// The peer group that a mount receives from.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Receives {
    /// That of the mount with this path around the namespace.
    #[n(0)]
    Around(#[n(0)] Bytes),
    /// One of the namespace.
    #[n(1)]
    Own(#[n(0)] u32),
}

/// A file system that is made anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FileSystem {
    /// Its kind, one of [`MADE_ANEW`] or [`OF_THE_MACHINE`].
    #[n(0)]
    pub kind: String,
    /// What it is called where its source is told.
    #[n(1)]
    pub source: Bytes,
    /// Its options, with commas between them.
    #[n(2)]
    pub settings: Bytes,
    /// The namespace of the program's own that it shows: of process ids, network or IPC. A row before this.
    #[n(3)]
    pub namespace: Option<u32>,
    /// What is in it (tmpfs), in the order of paths.
    #[n(4)]
    pub entries: Vec<Entry>,
    /// The directories that it lies over (overlay): the topmost first, then its own two, if it has them.
    #[n(5)]
    #[cbor(default)]
    pub layers: Vec<Layer>,
}

/// A directory that an overlay lies over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Layer {
    /// What it is to the overlay.
    #[n(0)]
    pub role: Role,
    /// What the overlay's options call it.
    #[n(1)]
    pub name: Bytes,
    /// Where it is: never what is mounted somewhere around.
    #[n(2)]
    pub at: Mounted,
    /// What it is told from all others by, if it is around the namespace: kind and bytes of what `name_to_handle_at(2)` tells.
    #[n(3)]
    pub id: Bytes,
}

/// The path that the name of a directory is, from a root in which there are no links; one that does not begin there begins there, too.
pub fn named_by(name: &[u8]) -> PathBuf {
    let mut path = PathBuf::from("/");
    for part in name.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(path.pop()),
            part => path.push(OsStr::from_bytes(part)),
        }
    }
    path
}

/// Whether what directories of an overlay are called leaves no place for one of them, below another: of those that are read, the root
/// can be one only if there is no other.
pub fn are_within_each_other<'n>(names: impl Iterator<Item = (Role, &'n [u8])>) -> bool {
    let all: Vec<(Role, PathBuf)> = names.map(|(role, name)| (role, named_by(name))).collect();
    let is_alone = all.iter().filter(|(role, _)| *role == Role::Lower).count() == 1;
    let hides = |one: usize, other: usize| {
        let is_root = all[one].0 == Role::Lower && is_alone && all[one].1 == Path::new("/");
        one != other && !is_root && all[other].1.starts_with(&all[one].1)
    };
    (0..all.len()).any(|one| (0..all.len()).any(|other| hides(one, other)))
}

/// What a directory is to an overlay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub enum Role {
    /// It is read.
    #[default]
    #[n(0)]
    Lower,
    /// What is changed is kept in it.
    #[n(1)]
    Upper,
    /// Files are prepared in it.
    #[n(2)]
    Work,
}

/// A file of any kind in a file system that is made anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Entry {
    /// Its path from the root of the file system, which has an empty one.
    #[n(0)]
    pub path: Bytes,
    /// Its other names (hard links).
    #[n(1)]
    pub also: Vec<Bytes>,
    /// `st_mode`, type included.
    #[n(2)]
    pub mode: u32,
    /// Owner.
    #[n(3)]
    pub uid: u32,
    /// Group.
    #[n(4)]
    pub gid: u32,
    /// `st_rdev` of a device.
    #[n(5)]
    pub rdev: u64,
    /// Inode number.
    #[n(6)]
    pub ino: u64,
    /// Size in bytes.
    #[n(7)]
    pub size: u64,
    /// Access time, nanoseconds since 1970.
    #[n(8)]
    pub atime_ns: i64,
    /// Modification time, nanoseconds since 1970.
    #[n(9)]
    pub mtime_ns: i64,
    /// Where a symbolic link leads.
    #[n(10)]
    pub target: Bytes,
    /// Extended attributes: names and values.
    #[n(11)]
    pub attributes: Vec<(Bytes, Bytes)>,
    /// The row of [`crate::Image::paths`] under which its contents are saved, if it has any.
    #[n(12)]
    pub content: Option<u32>,
}
