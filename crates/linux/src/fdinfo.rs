//! `/proc/PID/fd` and `/proc/PID/fdinfo`: what the kernel tells about the descriptors of a process.

use crate::{Error, Result};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

/// What `/proc/PID/fdinfo/FD` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FdInfo {
    /// Offset in bytes.
    pub pos: u64,
    /// `O_*` flags of the description; `O_CLOEXEC` is the one of this descriptor.
    pub flags: u32,
    /// Locks taken through the description.
    pub locks: Vec<LockLine>,
    /// The lines that are particular to the kind of file.
    pub detail: Detail,
}

/// The lines of an fdinfo file that only one kind of file has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// None.
    #[default]
    None,
    /// eventfd: counter and `EFD_SEMAPHORE`.
    Event {
        /// The counter.
        count: u64,
        /// Whether each read takes one off.
        semaphore: bool,
    },
    /// timerfd.
    Timer(TimerLine),
    /// signalfd: the signals it takes (bit `n - 1` is signal `n`).
    Signal(u64),
    /// epoll: its watches, in the kernel's order.
    Epoll(Vec<EpollLine>),
    /// inotify: its watches.
    Inotify(Vec<InotifyLine>),
    /// A fanotify group.
    Fanotify {
        /// Those of `fanotify_init(2)`.
        flags: u32,
        /// `O_*` with which the files of its events are opened.
        event_flags: u32,
        /// Its marks.
        marks: Vec<FanotifyLine>,
    },
    /// pidfd: the process in the pid namespace of `/proc`, and in its own (-1: gone).
    Pid {
        /// `Pid:`.
        pid: i64,
        /// Last number of `NSpid:`.
        inner: i64,
    },
    /// A unix socket: descriptors that wait in its queue.
    Unix {
        /// `scm_fds:`.
        descriptors_in_queue: u32,
    },
    /// A pty master: number of its slave.
    Tty(u32),
}

/// A `lock:` line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockLine {
    /// `POSIX`, `FLOCK`, `OFDLCK`, `LEASE`, `DELEG`.
    pub kind: String,
    /// `WRITE` rather than `READ`.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte, `None` for the end of the file.
    pub end: Option<u64>,
    /// A lease that is just being broken.
    pub breaking: bool,
}

/// State of a timerfd; times in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimerLine {
    /// `CLOCK_*`.
    pub clock: i32,
    /// Expirations not yet read.
    pub ticks: u64,
    /// Flags of the last `timerfd_settime`.
    pub flags: u32,
    /// Time to the next expiry.
    pub value_ns: u64,
    /// Interval.
    pub interval_ns: u64,
}

/// A watch of an epoll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpollLine {
    /// Number under which the file was added.
    pub fd: u32,
    /// Events with input flags.
    pub events: u32,
    /// User data.
    pub data: u64,
}

/// A watch of an inotify.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InotifyLine {
    /// Watch descriptor.
    pub wd: i32,
    /// What it watches.
    pub inode: Inode,
    /// Events and flags.
    pub mask: u32,
}

/// A mark of a fanotify group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FanotifyLine {
    /// What it is on.
    pub on: Marked,
    /// `FAN_MARK_*` flags that it keeps.
    pub flags: u32,
    /// Events and flags.
    pub mask: u32,
    /// Events that are ignored.
    pub ignored: u32,
}

/// What a mark of a fanotify group is on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Marked {
    /// Something that nobody here knows.
    #[default]
    Unknown,
    /// A file or directory.
    Inode(Inode),
    /// A mount, by its number.
    Mount(u64),
    /// A file system: device, in the kernel's own encoding.
    FileSystem(u64),
}

/// An inode, as marks are told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inode {
    /// Inode number.
    pub ino: u64,
    /// Device, in the kernel's own encoding (`major << 20 | minor`).
    pub sdev: u64,
    /// Type of the file handle, and its bytes; empty where the file system has none.
    pub handle: (i32, Vec<u8>),
}

/// Descriptor numbers of a process, ascending.
pub fn list(pid: u32) -> Result<Vec<u32>> {
    Folders::open(pid)?.list()
}

/// The link `/proc/PID/fd/FD`: a path, or a name in the kernel's own notation (`pipe:[123]`).
pub fn link(pid: u32, fd: u32) -> Result<Vec<u8>> {
    Folders::open(pid)?.link(fd)
}

/// Reads `/proc/PID/fdinfo/FD`.
pub fn read(pid: u32, fd: u32) -> Result<FdInfo> {
    Folders::open(pid)?.read(fd)
}

/// `/proc/PID/fd` and `/proc/PID/fdinfo`, held open for many questions.
#[derive(Debug)]
pub struct Folders {
    pid: u32,
    fd: OwnedFd,
    info: OwnedFd,
}

impl Folders {
    /// Opens them.
    ///
    /// # Errors
    /// [`Error::Gone`] if there is no such process any more, [`Error::File`] if it is not ours to look at.
    pub fn open(pid: u32) -> Result<Self> {
        let open = |name: &str| {
            let path = PathBuf::from(format!("/proc/{pid}/{name}"));
            let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
            rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| Error::file_of(pid, &path, e))
        };
        Ok(Folders { pid, fd: open("fd")?, info: open("fdinfo")? })
    }

    /// As [`list`].
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is.
    pub fn list(&self) -> Result<Vec<u32>> {
        let failed = |e| Error::file_of(self.pid, format!("/proc/{}/fd", self.pid), e);
        let mut room = Vec::with_capacity(8192);
        rustix::fs::seek(&self.fd, rustix::fs::SeekFrom::Start(0)).map_err(failed)?;
        let mut entries = rustix::fs::RawDir::new(&self.fd, room.spare_capacity_mut());
        let mut fds = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(failed)?;
            fds.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()));
        }
        fds.sort_unstable();
        Ok(fds)
    }

    /// As [`link`].
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is, [`Error::File`] if the descriptor is not open.
    pub fn link(&self, fd: u32) -> Result<Vec<u8>> {
        let name = rustix::path::DecInt::new(fd);
        let link = rustix::fs::readlinkat(&self.fd, name.as_c_str(), Vec::with_capacity(256));
        link.map(|l| l.into_bytes()).map_err(|e| self.failed("fd", fd, e))
    }

    /// The process that a descriptor is a handle to, if it is a pidfd (-1: it is gone).
    ///
    /// Of any other nothing is read: whoever reads the fdinfo of an epoll waits, and cannot be killed, for as long as a thread
    /// in `epoll_wait(2)` waits for the memory that its events go to, and it may be the one who asks that has to bring that.
    ///
    /// # Errors
    /// As [`Folders::read`].
    pub fn process_of(&self, fd: u32) -> Result<Option<i64>> {
        if self.link(fd)? != b"anon_inode:[pidfd]" {
            return Ok(None);
        }
        Ok(match self.read(fd)?.detail {
            Detail::Pid { pid, .. } => Some(pid),
            _ => None,
        })
    }

    /// A handle to the place of what is open there (`O_PATH`): nothing is opened, and what is closed there is closed.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is, [`Error::File`] if the descriptor is not open.
    pub fn handle(&self, fd: u32) -> Result<OwnedFd> {
        let name = rustix::path::DecInt::new(fd);
        rustix::fs::openat(&self.fd, name.as_c_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| self.failed("fd", fd, e))
    }

    /// What stat(2) tells of what is open there.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is, [`Error::File`] if the descriptor is not open.
    pub fn stat(&self, fd: u32) -> Result<rustix::fs::Stat> {
        let name = rustix::path::DecInt::new(fd);
        rustix::fs::statat(&self.fd, name.as_c_str(), AtFlags::empty()).map_err(|e| self.failed("fd", fd, e))
    }

    /// The two descriptors of ours that this is.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.fd.as_fd(), self.info.as_fd()]
    }

    /// As [`read`].
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is, [`Error::File`] if the descriptor is not open, or [`Error::Parse`].
    pub fn read(&self, fd: u32) -> Result<FdInfo> {
        self.parse(fd, &self.text(fd)?)
    }

    /// The text of `/proc/PID/fdinfo/FD`.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is, [`Error::File`] if the descriptor is not open.
    pub fn text(&self, fd: u32) -> Result<Vec<u8>> {
        self.hold(fd)?.text()
    }

    /// Parses such a text.
    ///
    /// # Errors
    /// [`Error::Parse`].
    pub fn parse(&self, fd: u32, text: &[u8]) -> Result<FdInfo> {
        let path = || PathBuf::from(format!("/proc/{}/fdinfo/{fd}", self.pid));
        parse(&String::from_utf8_lossy(text)).map_err(|line| Error::Parse { path: path(), line })
    }

    /// Opens `/proc/PID/fdinfo/FD`, to be read again and again.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is, [`Error::File`] if the descriptor is not open.
    pub fn hold(&self, fd: u32) -> Result<Info> {
        let name = rustix::path::DecInt::new(fd);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.info, name.as_c_str(), flags, Mode::empty());
        file.map(|file| Info { pid: self.pid, fd, file }).map_err(|e| self.failed("fdinfo", fd, e))
    }

    fn failed(&self, folder: &str, fd: u32, e: Errno) -> Error {
        Error::file_of(self.pid, format!("/proc/{}/{folder}/{fd}", self.pid), e)
    }
}

/// `/proc/PID/fdinfo/FD`, held open. It holds nothing of the process open, and tells of what has the number when it is read.
#[derive(Debug)]
pub struct Info {
    pid: u32,
    fd: u32,
    file: OwnedFd,
}

impl Info {
    /// Its text.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is, [`Error::File`] if nothing is open there.
    pub fn text(&self) -> Result<Vec<u8>> {
        let mut text: Vec<u8> = Vec::with_capacity(1024);
        loop {
            let at = text.len() as u64;
            match rustix::io::pread(&self.file, rustix::buffer::spare_capacity(&mut text), at) {
                Ok(_) if text.len() == text.capacity() => text.reserve(8192),
                // It is one record, of which the kernel hands out all that there is room for.
                Ok(_) => return Ok(text),
                Err(Errno::INTR) => {}
                Err(e) => {
                    let path = format!("/proc/{}/fdinfo/{}", self.pid, self.fd);
                    return Err(Error::file_of(self.pid, path, e));
                }
            }
        }
    }
}

/// Parses the text of an fdinfo file; the error is the line that makes no sense.
pub fn parse(text: &str) -> Result<FdInfo, String> {
    let mut info = FdInfo::default();
    for line in text.lines() {
        parse_line(&mut info, line).ok_or_else(|| line.to_owned())?;
    }
    Ok(info)
}

fn parse_line(info: &mut FdInfo, line: &str) -> Option<()> {
    if let Some(rest) = line.strip_prefix("inotify ") {
        inotify_list(info).push(parse_inotify(rest)?);
        return Some(());
    }
    if let Some(rest) = line.strip_prefix("fanotify ") {
        return parse_fanotify(info, rest);
    }
    let Some((key, value)) = line.split_once(':') else { return Some(()) };
    let value = value.trim();
    match key {
        "pos" => info.pos = value.parse::<i64>().ok()? as u64,
        "flags" => info.flags = u32::from_str_radix(value, 8).ok()?,
        "lock" => info.locks.push(parse_lock(value)?),
        "eventfd-count" => {
            info.detail = Detail::Event { count: u64::from_str_radix(value, 16).ok()?, semaphore: false };
        }
        "eventfd-semaphore" => {
            if let Detail::Event { semaphore, .. } = &mut info.detail {
                *semaphore = value != "0";
            }
        }
        "clockid" => timer(info).clock = value.parse().ok()?,
        "ticks" => timer(info).ticks = value.parse().ok()?,
        "settime flags" => timer(info).flags = u32::from_str_radix(value, 8).ok()?,
        "it_value" => timer(info).value_ns = parse_time(value)?,
        "it_interval" => timer(info).interval_ns = parse_time(value)?,
        "sigmask" => info.detail = Detail::Signal(u64::from_str_radix(value, 16).ok()?),
        "tfd" => epoll_list(info).push(parse_epoll(value)?),
        "Pid" => info.detail = Detail::Pid { pid: value.parse().ok()?, inner: -1 },
        "NSpid" => {
            if let Detail::Pid { inner, .. } = &mut info.detail {
                *inner = value.split_whitespace().last()?.parse().ok()?;
            }
        }
        "scm_fds" => info.detail = Detail::Unix { descriptors_in_queue: value.parse().ok()? },
        "tty-index" => info.detail = Detail::Tty(value.parse().ok()?),
        _ => {}
    }
    Some(())
}

fn timer(info: &mut FdInfo) -> &mut TimerLine {
    if !matches!(info.detail, Detail::Timer(_)) {
        info.detail = Detail::Timer(TimerLine::default());
    }
    match &mut info.detail {
        Detail::Timer(t) => t,
        _ => unreachable!("set above"),
    }
}

fn epoll_list(info: &mut FdInfo) -> &mut Vec<EpollLine> {
    if !matches!(info.detail, Detail::Epoll(_)) {
        info.detail = Detail::Epoll(Vec::new());
    }
    match &mut info.detail {
        Detail::Epoll(list) => list,
        _ => unreachable!("set above"),
    }
}

fn inotify_list(info: &mut FdInfo) -> &mut Vec<InotifyLine> {
    if !matches!(info.detail, Detail::Inotify(_)) {
        info.detail = Detail::Inotify(Vec::new());
    }
    match &mut info.detail {
        Detail::Inotify(list) => list,
        _ => unreachable!("set above"),
    }
}

/// `1: POSIX  ADVISORY  WRITE 10273 fe:00:9977976 3 7`
fn parse_lock(value: &str) -> Option<LockLine> {
    let mut words = value.split_whitespace().skip(1);
    let kind = words.next()?.to_owned();
    let (state, access) = (words.next()?, words.next()?);
    let mut words = words.skip(2);
    let start = words.next()?.parse().ok()?;
    let end = match words.next()? {
        "EOF" => None,
        n => Some(n.parse().ok()?),
    };
    Some(LockLine { kind, exclusive: access == "WRITE", start, end, breaking: state == "BREAKING" })
}

/// `(0, 4452618)`: seconds and nanoseconds.
fn parse_time(value: &str) -> Option<u64> {
    let (s, ns) = value.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
    let (s, ns): (u64, u64) = (s.trim().parse().ok()?, ns.trim().parse().ok()?);
    s.checked_mul(1_000_000_000)?.checked_add(ns)
}

/// The rest of `tfd:        3 events: 80000019 data:                3  pos:0 ino:40e sdev:10`
fn parse_epoll(value: &str) -> Option<EpollLine> {
    let mut words = value.split_whitespace();
    let fd = words.next()?.parse().ok()?;
    let mut line = EpollLine { fd, ..Default::default() };
    while let Some(word) = words.next() {
        match word {
            "events:" => line.events = u32::from_str_radix(words.next()?, 16).ok()?,
            "data:" => line.data = u64::from_str_radix(words.next()?, 16).ok()?,
            _ => {}
        }
    }
    Some(line)
}

/// `wd:2 ino:1 sdev:1b mask:100 ignored_mask:0 fhandle-bytes:c fhandle-type:1 f_handle:9dbc…`
fn parse_inotify(rest: &str) -> Option<InotifyLine> {
    let mut line = InotifyLine::default();
    for word in rest.split_whitespace() {
        let (key, value) = word.split_once(':')?;
        match key {
            "wd" => line.wd = number(value)? as i32,
            "mask" => line.mask = number(value)? as u32,
            _ => parse_inode(&mut line.inode, key, value)?,
        }
    }
    Some(line)
}

/// `flags:e00 event-flags:8000`, or a mark: `ino:9c2031 sdev:fe00000 mflags:0 mask:2 ignored_mask:0 fhandle-bytes:8 …`,
/// `mnt_id:1e mflags:0 …`, `sdev:fe00000 mflags:0 …`
fn parse_fanotify(info: &mut FdInfo, rest: &str) -> Option<()> {
    let (mut line, mut inode, mut of_group) = (FanotifyLine::default(), Inode::default(), false);
    for word in rest.split_whitespace() {
        let (key, value) = word.split_once(':')?;
        match key {
            "flags" => {
                *group(info)?.0 = number(value)? as u32;
                of_group = true;
            }
            "event-flags" => *group(info)?.1 = number(value)? as u32,
            "mnt_id" => line.on = Marked::Mount(number(value)?),
            "mflags" => line.flags = number(value)? as u32,
            "mask" => line.mask = number(value)? as u32,
            "ignored_mask" => line.ignored = number(value)? as u32,
            _ => parse_inode(&mut inode, key, value)?,
        }
    }
    match inode {
        _ if of_group => return Some(()),
        Inode { ino: 1.., .. } => line.on = Marked::Inode(inode),
        Inode { sdev: 1.., .. } => line.on = Marked::FileSystem(inode.sdev),
        _ => {}
    }
    group(info)?.2.push(line);
    Some(())
}

/// Flags, event flags and marks of a fanotify group.
fn group(info: &mut FdInfo) -> Option<(&mut u32, &mut u32, &mut Vec<FanotifyLine>)> {
    if !matches!(info.detail, Detail::Fanotify { .. }) {
        info.detail = Detail::Fanotify { flags: 0, event_flags: 0, marks: Vec::new() };
    }
    match &mut info.detail {
        Detail::Fanotify { flags, event_flags, marks } => Some((flags, event_flags, marks)),
        _ => None,
    }
}

fn parse_inode(inode: &mut Inode, key: &str, value: &str) -> Option<()> {
    match key {
        "ino" => inode.ino = number(value)?,
        "sdev" => inode.sdev = number(value)?,
        "fhandle-type" => inode.handle.0 = number(value)? as i32,
        "f_handle" => inode.handle.1 = hex(value)?,
        _ => {}
    }
    Some(())
}

fn number(hex: &str) -> Option<u64> {
    u64::from_str_radix(hex, 16).ok()
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks_exact(2);
    digits.map(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 16).ok()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_line_is_understood() {
        let info = parse("pos:\t7\nflags:\t02100002\nmnt_id:\t17\nino:\t1038\nlock:\t1: POSIX  ADVISORY  WRITE 10273 fe:00:9977976 3 7\nlock:\t2: OFDLCK ADVISORY  READ -1 fe:00:9977977 0 EOF\n").unwrap();
        assert_eq!((info.pos, info.flags), (7, 0o2100002));
        let line = |kind: &str, exclusive, start, end| LockLine {
            kind: kind.into(),
            exclusive,
            start,
            end,
            breaking: false,
        };
        assert_eq!(info.locks, [line("POSIX", true, 3, Some(7)), line("OFDLCK", false, 0, None)]);
        let info = parse("lock:\t1: LEASE  BREAKING  READ  77 00:1b:1234 0 EOF\n").unwrap();
        assert_eq!(info.locks, [LockLine { breaking: true, ..line("LEASE", false, 0, None) }]);
        let info = parse("eventfd-count:                5f\neventfd-id: 1\neventfd-semaphore: 1\n").unwrap();
        assert_eq!(info.detail, Detail::Event { count: 0x5f, semaphore: true });
        let info = parse(
            "clockid: 1\nticks: 10\nsettime flags: 01\nit_value: (1, 4452618)\nit_interval: (0, 10000000)",
        )
        .unwrap();
        let timer =
            TimerLine { clock: 1, ticks: 10, flags: 1, value_ns: 1_004_452_618, interval_ns: 10_000_000 };
        assert_eq!(info.detail, Detail::Timer(timer));
        let info = parse("tfd:        3 events: 80000019 data: 7fe700000007  pos:0 ino:40e sdev:10").unwrap();
        assert_eq!(
            info.detail,
            Detail::Epoll(vec![EpollLine { fd: 3, events: 0x8000_0019, data: 0x7fe7_0000_0007 }])
        );
        let info = parse("inotify wd:2 ino:1 sdev:1b mask:100 ignored_mask:0 fhandle-bytes:c fhandle-type:1 f_handle:9dbc81e9").unwrap();
        let Detail::Inotify(list) = info.detail else { panic!() };
        assert_eq!(list[0].inode.handle, (1, vec![0x9d, 0xbc, 0x81, 0xe9]));
    }

    #[test]
    fn marks_of_fanotify_are_understood() {
        let info = parse(
            "pos:\t0\nflags:\t02004002\nmnt_id:\t17\nino:\t1038\nfanotify flags:e03 event-flags:8000\n\
             fanotify ino:9c2032 sdev:fe00000 mflags:40 mask:0 ignored_mask:2 fhandle-bytes:8 fhandle-type:1 f_handle:3220\n\
             fanotify sdev:fe00000 mflags:0 mask:2 ignored_mask:0\n\
             fanotify mnt_id:1e mflags:0 mask:40000038 ignored_mask:0\n\
             fanotify mnt_ns:4026531832 mflags:0 mask:3000000 ignored_mask:0\n",
        )
        .unwrap();
        let Detail::Fanotify { flags, event_flags, marks } = info.detail else { panic!() };
        assert_eq!((flags, event_flags), (0xe03, 0x8000));
        let inode = Inode { ino: 0x9c2032, sdev: 0xfe00000, handle: (1, vec![0x32, 0x20]) };
        let line = |on, flags, mask, ignored| FanotifyLine { on, flags, mask, ignored };
        let all = [
            line(Marked::Inode(inode), 0x40, 0, 2),
            line(Marked::FileSystem(0xfe00000), 0, 2, 0),
            line(Marked::Mount(0x1e), 0, 0x4000_0038, 0),
            line(Marked::Unknown, 0, 0x300_0000, 0),
        ];
        assert_eq!(marks, all);
    }

    #[test]
    fn damaged_lines_are_named() {
        assert_eq!(parse("flags:\t9\n"), Err("flags:\t9".into()));
        assert_eq!(parse("lock:\t1: POSIX\n"), Err("lock:\t1: POSIX".into()));
    }
}
