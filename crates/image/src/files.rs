//! Files, descriptors, pipes, sockets, terminals.

use crate::Bytes;
use minicbor::{Decode, Encode};
use std::path::{Component, Path};

/// A file in the file system, told by path and identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct PathFile {
    /// Absolute path, without the kernel's ` (deleted)`.
    #[n(0)]
    pub path: Bytes,
    /// Device of the file system (`st_dev`).
    #[n(1)]
    pub dev: u64,
    /// Inode number.
    #[n(2)]
    pub ino: u64,
    /// `st_mode`, type included.
    #[n(3)]
    pub mode: u32,
    /// Owner.
    #[n(4)]
    pub uid: u32,
    /// Group.
    #[n(5)]
    pub gid: u32,
    /// `st_rdev` of a device.
    #[n(6)]
    pub rdev: u64,
    /// Size in bytes at the cut.
    #[n(7)]
    pub size: u64,
    /// Modification time at the cut, nanoseconds since 1970.
    #[n(8)]
    pub mtime_ns: i64,
    /// Status change time at the cut, nanoseconds since 1970.
    #[n(9)]
    pub ctime_ns: i64,
    /// Digest of the contents `[0, size)` at the cut, where it was taken.
    #[n(10)]
    pub digest: Option<Digest>,
    /// How the program holds it; decides what restore must check.
    #[n(11)]
    pub usage: Usage,
    /// The file has no name any more; its contents are saved under [`crate::Owner::File`] with this row's index.
    #[n(12)]
    pub deleted: bool,
    /// Access time, nanoseconds since 1970 (given back to deleted files).
    #[n(13)]
    pub atime_ns: i64,
    /// Written through a shared mapping: the mapped ranges are saved under [`crate::Owner::File`] as well and
    /// written back on restore.
    #[n(14)]
    pub mapped_ranges: Vec<crate::Range>,
    /// The store has a copy of it, under this digest: BLAKE3 of its length (8 bytes) and contents.
    #[n(15)]
    pub copy: Option<Bytes>,
    /// The mount namespace of the program's own that the path is told in; none: that of whoever took the checkpoint.
    #[n(16)]
    pub namespace: Option<u32>,
    /// It is in a file system that is made anew, with what is in it.
    #[n(17)]
    #[cbor(default)]
    pub made_anew: bool,
    /// Extended attributes of a deleted file or directory, or of the file of a unix socket: names and values.
    #[n(18)]
    #[cbor(default)]
    pub attributes: Vec<(Bytes, Bytes)>,
}

impl PathFile {
    /// Whether it is memory rather than a file: it has no name any more, or that of POSIX shared memory (`shm_open(3)`, `sem_open(3)`).
    pub fn is_memory(&self) -> bool {
        self.deleted || self.path.0.starts_with(b"/dev/shm/")
    }

    /// Of a file of procfs about a process: the number of that, and what lies below its folder.
    pub fn of_process(&self) -> Option<(u32, &Path)> {
        let mut parts = self.path.as_path().strip_prefix("/proc").ok()?.components();
        let Some(Component::Normal(first)) = parts.next() else { return None };
        let below = parts.as_path();
        let is_plain = parts.all(|part| matches!(part, Component::Normal(_)));
        Some((first.to_str()?.parse().ok()?, below)).filter(|_| is_plain)
    }

    /// Whether all of its contents were mapped for writing, and so are part of the checkpoint.
    pub fn is_wholly_mapped(&self) -> bool {
        self.mapped_ranges.first().is_some_and(|r| r.start == 0 && r.len >= self.size)
    }
}

/// Whether a character device, by its number (`st_rdev`), is one without any state: `null`, `zero`, `full`, `random`, `urandom`.
pub fn is_memory_device(device: u64) -> bool {
    matches!(numbers(device), (1, 3 | 5 | 7 | 8 | 9))
}

/// Whether a character device, by its number, is the log of the kernel (`/dev/kmsg`).
pub fn is_kernel_log(device: u64) -> bool {
    numbers(device) == (1, 11)
}

/// Whether a character device, by its number, is one of those that `/proc/misc` lists.
pub fn is_miscellaneous(device: u64) -> bool {
    numbers(device).0 == 10
}

/// Major and minor number of a device, as the kernel puts them together (`new_encode_dev` in 64 bits).
fn numbers(device: u64) -> (u64, u64) {
    ((device >> 8) & 0xfff | (device >> 32) & !0xfff, device & 0xff | (device >> 12) & !0xff & 0xffff_ffff)
}

/// When something was read and changed, as `fstat(2)` tells it; when its status changed cannot be given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Times {
    /// Access time, nanoseconds since 1970.
    #[n(0)]
    pub atime_ns: i64,
    /// Modification time, nanoseconds since 1970.
    #[n(1)]
    pub mtime_ns: i64,
}

impl Times {
    /// As a `stat` tells them: seconds and nanoseconds of reading, and of changing.
    pub fn of(read: (i64, u64), changed: (i64, u64)) -> Self {
        Times { atime_ns: nanoseconds(read), mtime_ns: nanoseconds(changed) }
    }
}

/// Nanoseconds since 1970, of a time as a `stat` tells it.
pub fn nanoseconds((seconds, more): (i64, u64)) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(more as i64)
}

/// What `fstat(2)` tells of a pipe or socket: it decides who may open it again by `/proc/PID/fd`, and whose a socket is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Status {
    /// Access mode bits.
    #[n(0)]
    pub mode: u32,
    /// Owner.
    #[n(1)]
    pub uid: u32,
    /// Group.
    #[n(2)]
    pub gid: u32,
    /// Its times.
    #[n(3)]
    pub times: Times,
}

/// How a program holds a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub enum Usage {
    /// Only its path matters (a directory, a device, an `O_PATH` descriptor).
    #[default]
    #[n(0)]
    Path,
    /// Read or mapped privately: contents are expected to be the same.
    #[n(1)]
    Read,
    /// Open for writing: `--files` decides.
    #[n(2)]
    Write,
}

/// Digest of a file's contents.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Digest {
    /// BLAKE3.
    #[n(0)]
    pub blake3: Bytes,
    /// Whole contents, or (for very large files) head, tail and evenly spaced samples only.
    #[n(1)]
    pub sampled: bool,
}

/// A descriptor table (`files_struct`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FileTable {
    /// Descriptors in ascending order.
    #[n(0)]
    pub descriptors: Vec<Descriptor>,
}

/// One descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Descriptor {
    /// Its number.
    #[n(0)]
    pub fd: u32,
    /// Index into [`crate::Image::files`]; equal for descriptors that share a description.
    #[n(1)]
    pub file: u32,
    /// `FD_CLOEXEC`.
    #[n(2)]
    pub close_on_exec: bool,
}

/// An open file description (`struct file`).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct OpenFile {
    /// `O_*` as `/proc/PID/fdinfo` tells them, without `O_CLOEXEC`.
    #[n(0)]
    pub flags: u32,
    /// Offset in bytes.
    #[n(1)]
    pub position: u64,
    /// What is open.
    #[n(2)]
    pub kind: FileKind,
    /// `F_SETOWN`/`F_SETSIG`, if any.
    #[n(3)]
    pub owner: Option<FileOwner>,
    /// Locks that go with this description (flock, OFD) or with the process through it (POSIX).
    #[n(4)]
    pub locks: Vec<Lock>,
}

/// What an open file description refers to.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum FileKind {
    /// Regular file, directory, device or `O_PATH` handle: index into [`crate::Image::paths`].
    #[n(0)]
    Path(#[n(0)] u32),
    /// Standard stream from outside the job (0, 1, 2): becomes the one of whoever restores.
    #[n(1)]
    Stdio(#[n(0)] u32),
    /// `/dev/tty`.
    #[n(2)]
    ControllingTerminal,
    /// One end of a pipe or FIFO: index into [`crate::Image::pipes`]. Access mode is in the flags.
    #[n(3)]
    Pipe(#[n(0)] u32),
    /// Index into [`crate::Image::sockets`].
    #[n(4)]
    Socket(#[n(0)] u32),
    /// Pty master: index into [`crate::Image::ptys`].
    #[n(5)]
    PtyMaster(#[n(0)] u32),
    /// Pty slave whose master is inside the job: index into [`crate::Image::ptys`].
    #[n(6)]
    PtySlave(#[n(0)] u32),
    /// Memfd (or a handle to shared memory): index into [`crate::Image::objects`].
    #[n(7)]
    Memory(#[n(0)] u32),
    /// eventfd.
    #[n(8)]
    Event {
        /// Counter.
        #[n(0)]
        count: u64,
        /// `EFD_SEMAPHORE`.
        #[n(1)]
        semaphore: bool,
    },
    /// timerfd.
    #[n(9)]
    Timer(#[n(0)] TimerFd),
    /// signalfd with its mask.
    #[n(10)]
    Signal(#[n(0)] u64),
    /// epoll.
    #[n(11)]
    Epoll(#[n(0)] Vec<EpollWatch>),
    /// inotify.
    #[n(12)]
    Inotify(#[n(0)] Vec<InotifyWatch>),
    /// pidfd of a process of the job, by pid.
    #[n(13)]
    Pid(#[n(0)] u32),
    /// A file of procfs, opened again by path when the process stands: index into [`crate::Image::paths`].
    #[n(14)]
    Proc(#[n(0)] u32),
    /// POSIX message queue: index into [`crate::Image::queues`].
    #[n(20)]
    Queue(#[n(0)] u32),
    /// fanotify group.
    #[n(21)]
    Fanotify(#[n(0)] Fanotify),
    /// pidfd of a process (or thread, by the flags) that has ended, and been waited for.
    #[n(22)]
    Ended {
        /// Inode number of the pidfd: the same for the same process.
        #[n(0)]
        process: u64,
        /// How it ended, as `wait(2)` tells it; 0 where the kernel does not tell that any more.
        #[n(1)]
        status: u32,
    },
    /// A file of procfs about a process (or thread) that has ended, and been waited for: index into [`crate::Image::paths`].
    #[n(23)]
    EndedProc(#[n(0)] u32),
    /// A pseudo-terminal's slave that was hung up: there is nothing to read, and nothing can be written.
    #[n(24)]
    HungUp,
}

/// State of a timerfd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct TimerFd {
    /// `CLOCK_*`.
    #[n(0)]
    pub clock: i32,
    /// Expirations not yet read.
    #[n(1)]
    pub ticks: u64,
    /// `TFD_TIMER_*` flags of the last `timerfd_settime`.
    #[n(2)]
    pub flags: u32,
    /// Time to the next expiry, nanoseconds; 0: disarmed.
    #[n(3)]
    pub remaining_ns: u64,
    /// Interval, nanoseconds.
    #[n(4)]
    pub interval_ns: u64,
    /// Wall-clock time of the next expiry, nanoseconds since 1970, of a timer that was set to an absolute time of a
    /// clock that tells it (`CLOCK_REALTIME`); it holds while the program does not run.
    #[n(5)]
    pub expires_ns: Option<u64>,
}

/// One watch of an epoll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct EpollWatch {
    /// Descriptor number it was added under.
    #[n(0)]
    pub fd: u32,
    /// Event mask, with its input flags.
    #[n(1)]
    pub events: u32,
    /// User data.
    #[n(2)]
    pub data: u64,
    /// The watched description, index into [`crate::Image::files`] (the number may since mean another file).
    #[n(3)]
    pub file: u32,
}

/// One watch of an inotify.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct InotifyWatch {
    /// Watch descriptor.
    #[n(0)]
    pub wd: i32,
    /// Event mask.
    #[n(1)]
    pub mask: u32,
    /// Watched path: index into [`crate::Image::paths`].
    #[n(2)]
    pub path: u32,
}

/// A fanotify group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Fanotify {
    /// `FAN_*` flags of `fanotify_init`.
    #[n(0)]
    pub flags: u32,
    /// `O_*` flags with which the files of its events are opened.
    #[n(1)]
    pub event_flags: u32,
    /// It was made by somebody without `CAP_SYS_ADMIN`, to whom it tells nothing of other processes.
    #[n(2)]
    pub unprivileged: bool,
    /// Its marks.
    #[n(3)]
    pub marks: Vec<FanotifyMark>,
}

/// A mark of a fanotify group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FanotifyMark {
    /// What it is on.
    #[n(0)]
    pub on: FanotifyPlace,
    /// A path that leads there: index into [`crate::Image::paths`].
    #[n(1)]
    pub path: u32,
    /// `FAN_MARK_*` flags that it keeps: evictable, and how it ignores.
    #[n(2)]
    pub flags: u32,
    /// Event mask.
    #[n(3)]
    pub mask: u32,
    /// Events that are ignored.
    #[n(4)]
    pub ignored: u32,
}

/// What a mark of a fanotify group is on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum FanotifyPlace {
    /// A file or directory.
    #[default]
    #[n(0)]
    Inode,
    /// The mount of this mount point.
    #[n(1)]
    Mount,
    /// The file system of this mount point.
    #[n(2)]
    FileSystem,
}

/// Who gets the signals of a description.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FileOwner {
    /// `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
    #[n(0)]
    pub kind: u32,
    /// Its id.
    #[n(1)]
    pub id: u32,
    /// `F_GETSIG` (0: SIGIO).
    #[n(2)]
    pub signal: u32,
}

/// A file lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Lock {
    /// Which kind.
    #[n(0)]
    pub kind: LockKind,
    /// Exclusive (write) or shared (read).
    #[n(1)]
    pub exclusive: bool,
    /// First byte (0 for flock).
    #[n(2)]
    pub start: u64,
    /// Last byte, inclusive; `None`: to the end of the file.
    #[n(3)]
    pub end: Option<u64>,
    /// Process that holds it, if it is one of a process; none: the root of the tree.
    #[n(4)]
    pub process: Option<u32>,
}

/// Kind of a file lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum LockKind {
    /// `flock`.
    #[n(0)]
    Flock,
    /// `fcntl(F_SETLK)`: owned by the process.
    #[n(1)]
    Posix,
    /// `fcntl(F_OFD_SETLK)`: owned by the description.
    #[n(2)]
    Ofd,
    /// `fcntl(F_SETLEASE)`: owned by the description.
    #[n(3)]
    Lease,
}

/// A pipe or FIFO with the data in it.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Pipe {
    /// Capacity in bytes (`F_GETPIPE_SZ`).
    #[n(0)]
    pub capacity: u64,
    /// Unread data: one entry a packet (and an empty one behind a single packet), or at most one of what is in no packets. Of both beside each
    /// other, an empty entry stands in front of what is in no packet.
    #[n(1)]
    pub data: Vec<Bytes>,
    /// Path of a FIFO, index into [`crate::Image::paths`].
    #[n(2)]
    pub fifo: Option<u32>,
    /// Set where this is not a pipe, but what was not yet read of a stream from outside, that of [`FileKind::Stdio`] with this number.
    #[n(3)]
    pub stdio: Option<u32>,
    /// Of a FIFO: its readers (rows of [`crate::Image::files`]) that are told of writers who have left (`POLLHUP`), as others that never
    /// saw one are not; none: not known.
    #[n(4)]
    pub hung_up: Option<Vec<u32>>,
    /// Of a pipe that is no FIFO: owner, mode and times.
    #[n(5)]
    pub status: Option<Status>,
    /// Set where an end of it that the program does not have was open outside: who had it, `process 4712 (tee)`, as far as that could
    /// be seen. A restore of the program does not have that end either.
    #[n(6)]
    pub outside: Option<String>,
    /// Of what was not yet read of a stream: device and inode number of the pipe or socket. It may still be there, with it in it, where
    /// somebody else has it, too.
    #[n(7)]
    pub inode: Option<(u64, u64)>,
    /// Its place among what is kept for a restore ([`crate::Image::kept`]): there, what is in it is still in it.
    #[n(8)]
    pub kept: Option<u32>,
}

/// A socket.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Socket {
    /// `AF_*`.
    #[n(0)]
    pub family: u32,
    /// `SOCK_*`, without flags.
    #[n(1)]
    pub kind: u32,
    /// `IPPROTO_*`.
    #[n(2)]
    pub protocol: u32,
    /// Local address: raw `sockaddr`, empty if unbound.
    #[n(3)]
    pub local: Bytes,
    /// Listening with this backlog.
    #[n(4)]
    pub listening: Option<u32>,
    /// Peer within the job: index into [`crate::Image::sockets`].
    #[n(5)]
    pub peer: Option<u32>,
    /// Options that can be set again, in the order to set them.
    #[n(6)]
    pub options: Vec<SocketOption>,
    /// Received and unread: one entry a message (datagram, seqpacket) or one in all (stream).
    #[n(7)]
    pub queue: Vec<Bytes>,
    /// `SHUT_RD` 1, `SHUT_WR` 2, both 3.
    #[n(8)]
    pub shutdown: u32,
    /// Path of a bound unix socket that is a name in the file system: index into [`crate::Image::paths`].
    #[n(9)]
    pub path: Option<u32>,
    /// Address of the peer outside the job that a datagram socket sends to: raw `sockaddr`, empty if none.
    #[n(10)]
    pub remote: Bytes,
    /// It was connected and its peer is gone.
    #[n(11)]
    pub orphan: bool,
    /// A TCP connection. Its queue is in one piece; if its peer is within the job, that is a connection too.
    #[n(12)]
    pub connection: Option<Connection>,
    /// Connections that waited to be accepted, which are not part of the checkpoint.
    #[n(13)]
    pub unaccepted: Option<u32>,
    /// Who sent the datagrams in the queue, in the same order: raw `sockaddr`s.
    #[n(14)]
    pub senders: Option<Vec<Bytes>>,
    /// Its place among what is kept for a restore ([`crate::Image::kept`]).
    #[n(15)]
    pub kept: Option<u32>,
    /// Received and unread, where more than bytes goes with it; then `queue` is empty.
    #[n(20)]
    #[cbor(default)]
    pub messages: Vec<Message>,
    /// Connections that wait to be accepted by this listening socket, in their order: indices into
    /// [`crate::Image::sockets`] of their other ends.
    #[n(21)]
    #[cbor(default)]
    pub pending: Vec<u32>,
    /// A unix socket that was connected to one outside the job. Unless it was kept, it is restored as one whose peer is gone.
    #[n(22)]
    #[cbor(default)]
    pub outside: bool,
    /// The mount namespace of the program's own in which names of this unix socket are looked up.
    #[n(23)]
    pub mounts: Option<u32>,
    /// The name that it was bound to, if its file has been renamed since: index into [`crate::Image::paths`]. It still tells that one,
    /// and is reached by [`Socket::path`].
    #[n(24)]
    pub renamed_from: Option<u32>,
    /// Its local address was not one of the machine's: it was bound all the same (`IP_FREEBIND`), or the machine has lost it since.
    #[n(25)]
    #[cbor(default)]
    pub foreign: bool,
    /// The one of the program's to which `remote` leads: index into [`crate::Image::sockets`].
    #[n(26)]
    pub sends_to: Option<u32>,
    /// Owner, mode and times.
    #[n(27)]
    pub status: Option<Status>,
    /// Who made the other end of this unix socket, as it tells (`SO_PEERCRED`, `SO_PEERGROUPS`); of one that listens whoever made it do so,
    /// of whom those are told who connect to it. None: it tells of nobody, or (before version 9) nobody has looked.
    #[n(28)]
    pub told: Option<Identity>,
    /// Who made this unix connection, of whom the one is told that is to accept it; only where it waits for that.
    #[n(29)]
    pub waits_as: Option<Identity>,
}

/// By which somebody is known to the other end of a unix socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(map)]
pub struct Identity {
    /// User.
    #[n(0)]
    pub uid: u32,
    /// Group.
    #[n(1)]
    pub gid: u32,
    /// Further groups, ascending.
    #[n(2)]
    pub groups: Vec<u32>,
}

impl Socket {
    /// One of its options, if a new socket does not have that value by itself.
    pub fn option(&self, (level, name): (u32, u32)) -> Option<&SocketOption> {
        self.options.iter().find(|option| (option.level, option.name) == (level, name))
    }

    /// Whether an option that a new socket does not have is switched on.
    pub fn is_set(&self, option: (u32, u32)) -> bool {
        self.option(option).is_some_and(|option| option.value.0.iter().any(|byte| *byte != 0))
    }
}

/// A TCP connection at the cut.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Connection {
    /// Its state, as `TCP_INFO` tells it.
    #[n(0)]
    pub state: u8,
    /// Address of the other end: raw `sockaddr`, empty where the connection was over.
    #[n(1)]
    pub remote: Bytes,
    /// Sent, and not received by the other end within the job.
    #[n(2)]
    pub unsent: Bytes,
    /// It had failed, and the program had not been told.
    #[n(3)]
    pub failed: bool,
}

/// An unread message of a unix socket, or a run of bytes of a stream.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Message {
    /// Its bytes.
    #[n(0)]
    pub data: Bytes,
    /// Descriptors in it (`SCM_RIGHTS`): indices into [`crate::Image::files`].
    #[n(1)]
    pub files: Vec<u32>,
    /// Who sent it, where the socket asks for that (`SO_PASSCRED`) and it is known.
    #[n(2)]
    pub credentials: Option<Sender>,
    /// Name of the socket that sent it: raw `sockaddr`, empty if it has none.
    #[n(3)]
    pub sender: Bytes,
}

/// Credentials that go with a message (`SCM_CREDENTIALS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(map)]
pub struct Sender {
    /// Process, as the program sees it.
    #[n(0)]
    pub pid: u32,
    /// User.
    #[n(1)]
    pub uid: u32,
    /// Group.
    #[n(2)]
    pub gid: u32,
}

/// A socket option.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SocketOption {
    /// `SOL_*` or protocol.
    #[n(0)]
    pub level: u32,
    /// Option number.
    #[n(1)]
    pub name: u32,
    /// Value as `getsockopt` gave it.
    #[n(2)]
    pub value: Bytes,
}

/// A pseudo-terminal whose master is inside the job.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Pty {
    /// Number of its slave (`/dev/pts/N`).
    #[n(0)]
    pub number: u32,
    /// Its settings.
    #[n(1)]
    pub terminal: Terminal,
    /// `TIOCSPTLCK` state.
    #[n(2)]
    pub locked: bool,
    /// Packet mode (`TIOCPKT`).
    #[n(3)]
    pub packet_mode: bool,
    /// The slave was open once and no longer is: the master reads an end.
    #[n(4)]
    pub hung_up: bool,
    /// It was the controlling terminal of a session of the program.
    #[n(5)]
    pub controlling: bool,
    /// That session, by the id of its leader; none: the session of the root.
    #[n(6)]
    pub session: Option<u32>,
    /// Process group in the foreground there, if it is within the tree.
    #[n(7)]
    pub foreground: Option<u32>,
    /// Which sides are in exclusive mode (`TIOCEXCL`): 1 the master, 2 the slave, 3 both.
    #[n(8)]
    pub exclusive: Option<u32>,
    /// What was opened to make it, if it is in a devpts of the program's own: index into [`crate::Image::paths`].
    #[n(9)]
    pub multiplexer: Option<u32>,
    /// Owner, group and permissions of the slave, where it was open.
    #[n(10)]
    pub owner: Option<TerminalOwner>,
    /// Open files that are this terminal by its general name (`/dev/tty`), as who is in its session has it: indices into
    /// [`crate::Image::files`]. None: nobody has looked, and all such files are of the terminal of who has them.
    #[n(11)]
    pub controls: Option<Vec<u32>>,
}

/// Whose a terminal is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct TerminalOwner {
    /// User.
    #[n(0)]
    pub uid: u32,
    /// Group.
    #[n(1)]
    pub gid: u32,
    /// Permissions.
    #[n(2)]
    pub mode: u32,
}

/// Settings of a terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Terminal {
    /// Raw `struct termios2`.
    #[n(0)]
    pub termios: Bytes,
    /// Rows, columns, x pixels, y pixels.
    #[n(1)]
    pub window: [u16; 4],
}

/// A POSIX message queue, which was empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct MessageQueue {
    /// Its name, without the leading slash.
    #[n(0)]
    pub name: Bytes,
    /// Its name has been taken away (`mq_unlink`).
    #[n(1)]
    pub unlinked: bool,
    /// Access mode bits.
    #[n(2)]
    pub mode: u32,
    /// Owner.
    #[n(3)]
    pub uid: u32,
    /// Group.
    #[n(4)]
    pub gid: u32,
    /// Most messages it holds.
    #[n(5)]
    pub maximum: u64,
    /// Longest message, bytes.
    #[n(6)]
    pub size: u64,
    /// Inode number.
    #[n(7)]
    pub ino: u64,
    /// The program's own IPC namespace that it is in, index into [`crate::Image::namespaces`]; none: that of whoever restores.
    #[n(8)]
    pub namespace: Option<u32>,
}
