//! What a checkpoint is: plain data and its wire format; no I/O, no system calls.
//!
//! A program is described as the kernel holds it: processes, threads, address spaces, memory objects, file tables,
//! open files, pipes and sockets are tables of one [`Image`] whose rows refer to each other by id. One process is a
//! tree of one. Page contents are not here: the [`PageMap`] tells where each run of pages is stored.
//!
//! Every structure is a CBOR map with numbered keys, so that later versions may add optional fields and older
//! checkpoints stay readable. [`wire`] frames the whole with lengths and checksums that are checked before decoding.
#![forbid(unsafe_code)]

pub mod anew;
pub mod files;
pub mod memory;
pub mod mounts;
pub mod namespaces;
mod outside;
pub mod pages;
pub mod pids;
pub mod process;
mod records;
pub mod tree;
pub mod users;
pub mod validate;
pub mod wire;

use minicbor::{Decode, Encode};

pub use files::*;
pub use memory::*;
pub use mounts::*;
pub use namespaces::*;
pub use pages::*;
pub use process::*;

/// Size of a page in bytes on every architecture that is supported so far.
pub const PAGE: u64 = 4096;

/// An uninterpreted byte string: a path, a kernel structure, queued data. Paths are bytes because the kernel's are.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct Bytes(#[cbor(n(0), with = "minicbor::bytes")] pub Vec<u8>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.len() <= 256 {
            write!(f, "\"{}\"", self.0.escape_ascii())
        } else {
            write!(f, "[{} bytes]", self.0.len())
        }
    }
}

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", String::from_utf8_lossy(&self.0))
    }
}

impl Bytes {
    /// The bytes as a path of the operating system.
    pub fn as_path(&self) -> &std::path::Path {
        use std::os::unix::ffi::OsStrExt;
        std::path::Path::new(std::ffi::OsStr::from_bytes(&self.0))
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(v: Vec<u8>) -> Self {
        Bytes(v)
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<&std::path::Path> for Bytes {
    fn from(p: &std::path::Path) -> Self {
        use std::os::unix::ffi::OsStrExt;
        Bytes(p.as_os_str().as_bytes().to_vec())
    }
}

/// Everything of a checkpoint except the contents of its pages.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Image {
    /// What the checkpoint is called and where it was taken.
    #[n(0)]
    pub meta: Meta,
    /// The processes; the first is the root of the tree.
    #[n(1)]
    pub processes: Vec<Process>,
    /// The address spaces ([`Process::space`] indexes them).
    #[n(2)]
    pub spaces: Vec<AddressSpace>,
    /// Memory that is not a file in the file system: shared anonymous memory and memfds.
    #[n(3)]
    pub objects: Vec<MemoryObject>,
    /// Descriptor tables ([`Process::table`] indexes them).
    #[n(4)]
    pub tables: Vec<FileTable>,
    /// Open file descriptions.
    #[n(5)]
    pub files: Vec<OpenFile>,
    /// Files in the file system that the program has open, mapped, executes or stands in.
    #[n(6)]
    pub paths: Vec<PathFile>,
    /// Pipes and FIFOs.
    #[n(7)]
    pub pipes: Vec<Pipe>,
    /// Sockets.
    #[n(8)]
    pub sockets: Vec<Socket>,
    /// Pseudo-terminals of which the program holds the master.
    #[n(9)]
    pub ptys: Vec<Pty>,
    /// The terminal the program's standard streams were on, if they were.
    #[n(10)]
    pub terminal: Option<Terminal>,
    /// Under this name (abstract, of a unix socket) a process of ours keeps sockets and pipes of the program, which was killed at the
    /// cut: whoever restores it there can have them.
    #[n(11)]
    pub kept: Option<Bytes>,
    /// POSIX message queues.
    #[n(20)]
    #[cbor(default)]
    pub queues: Vec<MessageQueue>,
    /// Control groups that the processes were in ([`Process::cgroup`]), each behind those that it lies in.
    #[n(21)]
    #[cbor(default)]
    pub groups: Vec<ControlGroup>,
    /// Namespaces that the program made for itself ([`Process::namespaces`] indexes them).
    #[n(30)]
    #[cbor(default)]
    pub namespaces: Vec<Namespace>,
    /// All sockets are in this network namespace of the program's own, index into [`Image::namespaces`]; none: in that of whoever
    /// restores.
    #[n(31)]
    pub network: Option<u32>,
    /// Leaders of sessions and process groups who are not among the processes, not even as ended ones, and had ids of their own in pid
    /// namespaces.
    #[n(32)]
    #[cbor(default)]
    pub leaders: Vec<LostLeader>,
    /// The user namespace whose privileges count in each of the [`Image::namespaces`], a row of them before it; none: that of whoever
    /// restores, as in those that are not told of. (Of a user namespace that is its parent, which is not told here.)
    #[n(33)]
    #[cbor(default)]
    pub owners: Vec<Option<u32>>,
}

/// What a checkpoint is called, when and where it was taken.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Meta {
    /// Name of the job.
    #[n(0)]
    pub job: String,
    /// Number of the checkpoint within its job, from 1.
    #[n(1)]
    pub id: u64,
    /// The user's own words (`--label`).
    #[n(2)]
    pub label: Option<String>,
    /// Wall-clock time of the cut, nanoseconds since 1970 (UTC).
    #[n(3)]
    pub taken_ns: u64,
    /// Name of the memory engine that took it.
    #[n(4)]
    pub engine: String,
    /// Memory of the program that this checkpoint describes, in pages of [`PAGE`] bytes that are not zero.
    #[n(5)]
    pub pages: u64,
    /// Bytes of page data that this checkpoint added to the store.
    #[n(6)]
    pub written_bytes: u64,
    /// How long the program stood still, in nanoseconds, by our own clock.
    #[n(7)]
    pub pause_ns: u64,
    /// Command line of the root process, for people.
    #[n(8)]
    pub command: Vec<Bytes>,
    /// Where it was taken.
    #[n(9)]
    pub host: Host,
    /// The program's `CLOCK_MONOTONIC` at the cut, nanoseconds (its time namespace included).
    #[n(10)]
    pub monotonic_ns: i64,
    /// The program's `CLOCK_BOOTTIME` at the cut, nanoseconds (its time namespace included).
    #[n(11)]
    pub boottime_ns: i64,
    /// It came here from another store.
    #[n(12)]
    pub imported: Option<Imported>,
}

/// What an imported checkpoint was called where it came from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Imported {
    /// Name of the job there.
    #[n(0)]
    pub job: String,
    /// Number of the checkpoint there.
    #[n(1)]
    pub id: u64,
}

/// The machine and kernel a checkpoint was taken on.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Host {
    /// `uname -m`.
    #[n(0)]
    pub machine: String,
    /// `uname -r`.
    #[n(1)]
    pub kernel: String,
    /// `/proc/sys/kernel/random/boot_id`.
    #[n(2)]
    pub boot_id: String,
    /// Extended-state features in use by the kernel (XCR0), whose registers [`Thread::xstate`] holds.
    #[n(3)]
    pub xfeatures: u64,
    /// BLAKE3 of the vdso's code; restored programs call into it at remembered addresses.
    #[n(4)]
    pub vdso: Bytes,
    /// Instructions that not every processor has, by name; programs choose among them when they start. Empty: not known.
    #[n(5)]
    #[cbor(default)]
    pub instructions: Vec<String>,
}
