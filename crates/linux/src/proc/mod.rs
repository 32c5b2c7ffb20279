//! `/proc`: what the kernel tells about a process in text ([proc(5)]).
//!
//! [`Proc`] holds the folder of one process or thread open, so that it can never become that of another one that got
//! the same number. Each file has its module with a `parse` for its text and a method of [`Proc`] that reads it.
//! No parser panics, whatever the text; none trusts a name that a program chose for itself.
//!
//! [proc(5)]: https://man7.org/linux/man-pages/man5/proc.5.html

pub mod auxv;
pub mod held;
pub mod maps;
pub mod mounts;
pub mod namespaces;
pub mod sched;
pub mod smaps;
pub mod stat;
pub mod status;
pub mod syscall;
pub mod task;
mod text;
pub mod timers;

pub use held::Held;
pub use maps::Vma;
pub use namespaces::{HeldNamespaces, Namespace, NamespaceKind, own_time_offsets};
pub use sched::SchedStat;
pub use smaps::{Smap, VmFlags};
pub use stat::{Stat, TaskFlags};
pub use status::Status;
pub use syscall::CurrentCall;
pub use task::descendants;
pub use timers::{PosixTimerInfo, TimerNotify};

use crate::{Error, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The folder of one process (`/proc/PID`) or thread (`/proc/PID/task/TID`), held open.
#[derive(Debug)]
pub struct Proc {
    pid: u32,
    tid: u32,
    path: PathBuf,
    folder: OwnedFd,
    /// Files of it that stay open ([`Proc::keep_open`]).
    kept: OnceLock<Vec<(&'static str, Held)>>,
    /// The folder of its threads, if it stays open.
    tasks: OnceLock<OwnedFd>,
}

impl Proc {
    /// Opens the folder of a process.
    ///
    /// # Errors
    /// [`Error::Gone`] if there is none.
    pub fn process(pid: u32) -> Result<Proc> {
        Self::open(pid, pid, PathBuf::from(format!("/proc/{pid}")))
    }

    /// Opens the folder of a thread.
    ///
    /// # Errors
    /// [`Error::Gone`] (with the thread's id) if there is none.
    pub fn thread(pid: u32, tid: u32) -> Result<Proc> {
        Self::open(pid, tid, PathBuf::from(format!("/proc/{pid}/task/{tid}")))
    }

    /// Opens the folder of a thread, whatever process it belongs to.
    ///
    /// # Errors
    /// [`Error::Gone`] if there is none.
    pub fn thread_by_tid(tid: u32) -> Result<Proc> {
        let direct = Self::open(tid, tid, PathBuf::from(format!("/proc/{tid}")))?;
        Self::thread(direct.status()?.tgid, tid)
    }

    fn open(pid: u32, tid: u32, path: PathBuf) -> Result<Proc> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(folder) => Ok(Proc { pid, tid, path, folder, kept: OnceLock::new(), tasks: OnceLock::new() }),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::SRCH) => Err(Error::Gone(tid)),
            Err(e) => Err(Error::file(path, e)),
        }
    }

    /// Process id, in the pid namespace of our `/proc`.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Thread id, in the pid namespace of our `/proc`; that of the leader for a process.
    pub fn tid(&self) -> u32 {
        self.tid
    }

    /// The folder's path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the folder of a thread of this process. Unlike [`Proc::thread`] this cannot find another process's.
    pub fn sibling(&self, tid: u32) -> Result<Proc> {
        let path = PathBuf::from(format!("/proc/{}/task/{tid}", self.pid));
        let name = if self.is_thread() { format!("../{tid}") } else { format!("task/{tid}") };
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.folder, name, flags, Mode::empty()) {
            Ok(folder) => {
                Ok(Proc { pid: self.pid, tid, path, folder, kept: OnceLock::new(), tasks: OnceLock::new() })
            }
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::SRCH) => Err(Error::Gone(tid)),
            Err(e) => Err(Error::file(path, e)),
        }
    }

    /// Whether this is a folder below `task`, as opposed to that of a whole process.
    fn is_thread(&self) -> bool {
        self.path.parent().is_some_and(|p| p.ends_with("task"))
    }

    /// Opens a file of the folder for reading.
    ///
    /// # Errors
    /// [`Error::Gone`] if the process is; [`Error::File`] if the file is missing or forbidden.
    pub fn open_file(&self, name: &str) -> Result<OwnedFd> {
        self.open_with(name, OFlags::RDONLY | OFlags::CLOEXEC)
    }

    fn open_with(&self, name: &str, flags: OFlags) -> Result<OwnedFd> {
        rustix::fs::openat(&self.folder, name, flags, Mode::empty()).map_err(|e| self.error(name, e))
    }

    /// Opens what a link of the folder leads to as a mere handle (`O_PATH`): a directory, a file of any kind.
    ///
    /// # Errors
    /// As [`Proc::open_file`].
    pub fn open_handle(&self, name: &str) -> Result<OwnedFd> {
        self.open_with(name, OFlags::PATH | OFlags::CLOEXEC)
    }

    /// Reads a whole file of the folder.
    ///
    /// # Errors
    /// As [`Proc::open_file`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        if let Some((_, kept)) = self.kept.get().and_then(|all| all.iter().find(|(kept, _)| *kept == name)) {
            return kept.text();
        }
        // The kernel hands out about a page at a time, whatever the room; no need to ask for more.
        self.read_by(name, &mut [0; 4096])
    }

    /// Reads a whole file of the folder, as much at a time as the buffer holds.
    ///
    /// For files of long records each of which takes the kernel time to make: of those that it makes at a time, the last one
    /// may not fit its page, and is made again for the next read. Asked for less than a record's length, it makes one.
    ///
    /// # Errors
    /// As [`Proc::open_file`].
    pub fn read_by(&self, name: &str, buffer: &mut [u8]) -> Result<Vec<u8>> {
        let file = self.open_file(name)?;
        let mut text = Vec::with_capacity(8192);
        loop {
            match rustix::io::read(&file, &mut *buffer) {
                Ok(0) => return Ok(text),
                Ok(n) => text.extend_from_slice(&buffer[..n]),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(self.error(name, e)),
            }
        }
    }

    /// Reads a file that may be missing on this kernel or closed to us.
    ///
    /// # Errors
    /// As [`Proc::open_file`], but `None` where the kernel lacks the file or refuses it (`ENOENT`, `EACCES`, `EPERM`,
    /// `EINVAL`, `EOPNOTSUPP`).
    pub fn read_optional(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match self.read(name) {
            Ok(text) => Ok(Some(text)),
            Err(e) if matches!(e.errno(), Some(libc::ENOENT | libc::EACCES | libc::EPERM)) => Ok(None),
            Err(e) if matches!(e.errno(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Writes a whole file of the folder in one go.
    ///
    /// # Errors
    /// As [`Proc::open_file`].
    pub fn write(&self, name: &str, text: &[u8]) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file =
            rustix::fs::openat(&self.folder, name, flags, Mode::empty()).map_err(|e| self.error(name, e))?;
        rustix::io::write(&file, text).map_err(|e| self.error(name, e))?;
        Ok(())
    }

    /// Target of a link of the folder (`exe`, `cwd`, `ns/net`, `fd/3`).
    ///
    /// # Errors
    /// As [`Proc::open_file`].
    pub fn link(&self, name: &str) -> Result<Vec<u8>> {
        let target = rustix::fs::readlinkat(&self.folder, name, Vec::new());
        Ok(target.map_err(|e| self.error(name, e))?.into_bytes())
    }

    /// Names in a folder below this one, without `.` and `..`.
    ///
    /// # Errors
    /// As [`Proc::open_file`].
    pub fn list(&self, name: &str) -> Result<Vec<Vec<u8>>> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(&self.folder, name, flags, Mode::empty());
        let folder = folder.map_err(|e| self.error(name, e))?;
        let entries = rustix::fs::Dir::new(folder).map_err(|e| self.error(name, e))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| self.error(name, e))?;
            let bytes = entry.file_name().to_bytes();
            if bytes != b"." && bytes != b".." {
                names.push(bytes.to_vec());
            }
        }
        Ok(names)
    }

    /// Name of the process or thread (`comm`), as it is: any bytes but zero, at most 15 (more in kernel threads).
    pub fn comm(&self) -> Result<Vec<u8>> {
        Ok(without_newline(self.read("comm")?))
    }

    /// Command line, one entry an argument. Empty for zombies and kernel threads.
    pub fn cmdline(&self) -> Result<Vec<Vec<u8>>> {
        let text = self.read("cmdline")?;
        let text = text.strip_suffix(b"\0").unwrap_or(&text);
        if text.is_empty() {
            return Ok(Vec::new());
        }
        Ok(text.split(|&b| b == 0).map(<[u8]>::to_vec).collect())
    }

    /// `personality`: flags of personality(2).
    pub fn personality(&self) -> Result<u32> {
        let text = self.read("personality")?;
        flags(&text).ok_or_else(|| self.nonsense("personality", &text))
    }

    /// `coredump_filter`: which mappings a core dump holds ([core(5)]).
    ///
    /// [core(5)]: https://man7.org/linux/man-pages/man5/core.5.html
    pub fn coredump_filter(&self) -> Result<u32> {
        let text = self.read("coredump_filter")?;
        if text.is_empty() {
            return Err(Error::Gone(self.pid())); // it has no memory any more, and ends
        }
        flags(&text).ok_or_else(|| self.nonsense("coredump_filter", &text))
    }

    /// `oom_score_adj`, -1000 to 1000.
    pub fn oom_score_adj(&self) -> Result<i32> {
        let text = self.read("oom_score_adj")?;
        let value = text::signed(text.trim_ascii()).and_then(|v| i32::try_from(v).ok());
        value.ok_or_else(|| self.nonsense("oom_score_adj", &text))
    }

    /// `loginuid`: whose login it belongs to, all bits set for nobody's; `None` where the kernel does not tell.
    pub fn login_uid(&self) -> Result<Option<u32>> {
        let Some(text) = self.read_optional("loginuid")? else { return Ok(None) };
        let value = number(&text).and_then(|v| u32::try_from(v).ok());
        value.map(Some).ok_or_else(|| self.nonsense("loginuid", &text))
    }

    /// Lines of `cgroup`: hierarchy, controllers and path, separated by colons.
    pub fn cgroup(&self) -> Result<Vec<String>> {
        let text = self.read("cgroup")?;
        Ok(text::lines(&text).map(|line| String::from_utf8_lossy(line).into_owned()).collect())
    }

    /// Kernel function in which the thread sleeps (`wchan`), empty if it runs.
    pub fn wchan(&self) -> Result<Vec<u8>> {
        let text = self.read("wchan")?;
        Ok(if text == b"0" { Vec::new() } else { text })
    }

    /// A file that does not read as expected.
    pub(crate) fn nonsense(&self, name: &str, text: &[u8]) -> Error {
        nonsense(&self.path.join(name), text)
    }

    /// An error on a file of the folder. A missing file (`ENOENT`) or a link that we may not follow (`EACCES`) and an ended
    /// process look the same at first; the latter has lost all its files.
    fn error(&self, name: &str, e: rustix::io::Errno) -> Error {
        use rustix::io::Errno;
        let gone = match e {
            Errno::SRCH => true,
            Errno::NOENT | Errno::ACCESS => {
                rustix::fs::statat(&self.folder, "stat", AtFlags::empty()).is_err()
            }
            _ => false,
        };
        if gone { Error::Gone(self.tid) } else { Error::file(self.path.join(name), e) }
    }
}

impl AsFd for Proc {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}

/// Ids of all processes there are, in our pid namespace, ascending.
///
/// # Errors
/// [`Error::File`] if `/proc` is not there.
pub fn processes() -> Result<Vec<u32>> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder =
        rustix::fs::openat(CWD, "/proc", flags, Mode::empty()).map_err(|e| Error::file("/proc", e))?;
    let mut pids = Vec::new();
    for entry in rustix::fs::Dir::new(folder).map_err(|e| Error::file("/proc", e))? {
        let entry = entry.map_err(|e| Error::file("/proc", e))?;
        pids.extend(text::dec(entry.file_name().to_bytes()).and_then(|n| u32::try_from(n).ok()));
    }
    pids.sort_unstable();
    Ok(pids)
}

/// The id that was last given to a process or thread in our pid namespace (`/proc/sys/kernel/ns_last_pid`); the next
/// one gets the next free number, from the start again at the highest. `None` where the kernel does not tell.
pub fn last_pid() -> Option<u32> {
    let file =
        rustix::fs::open("/proc/sys/kernel/ns_last_pid", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let mut text = [0; 32];
    let len = rustix::io::read(file.ok()?, &mut text).ok()?;
    number(&text[..len])?.try_into().ok()
}

/// Processes and threads that may have been made since each of these was the last one ([`last_pid`]): the numbers since then, some
/// of which nobody has, or all processes where that cannot be told or there are many.
///
/// # Errors
/// As [`processes`].
pub fn made_since(looks: impl IntoIterator<Item = Option<u32>>) -> Result<Vec<u32>> {
    const MANY: u32 = 1000;
    let now = last_pid();
    let mut oldest = now;
    for look in looks {
        match look.zip(now) {
            Some((last, now)) if last <= now => oldest = oldest.min(look),
            // The numbers have come round since.
            _ => return processes(),
        }
    }
    match oldest.zip(now) {
        Some((oldest, now)) if now - oldest < MANY => Ok((oldest + 1..=now).collect()),
        Some(_) => processes(),
        None => Ok(Vec::new()),
    }
}

/// A decimal number on a line of its own.
pub fn number(text: &[u8]) -> Option<u64> {
    text::dec(text.trim_ascii())
}

/// A setting (`/proc/sys`) as one read hands it out: of a list, or of several numbers, the kernel begins at the beginning only, and tells
/// nothing further on.
pub fn setting(path: &Path) -> std::io::Result<Vec<u8>> {
    let file = std::fs::File::open(path)?;
    let mut room = vec![0; 4096];
    loop {
        let len = file.read_at(&mut room, 0)?;
        if len < room.len() {
            room.truncate(len);
            return Ok(room);
        }
        room.resize(2 * len, 0);
    }
}

/// A hexadecimal number of 32 bits on a line of its own, as `personality` has it.
pub fn flags(text: &[u8]) -> Option<u32> {
    text::hex(text.trim_ascii())?.try_into().ok()
}

/// Ids of processes in a file like `children`.
pub fn pids(text: &[u8]) -> Option<Vec<u32>> {
    text::words(text.trim_ascii()).map(|w| text::dec(w)?.try_into().ok()).collect()
}

/// A name as `comm` has it, without its newline.
pub fn without_newline(mut name: Vec<u8>) -> Vec<u8> {
    if name.last() == Some(&b'\n') {
        name.pop();
    }
    name
}

/// The error for text that does not read as expected; long text is cut.
pub(crate) fn nonsense(path: &Path, text: &[u8]) -> Error {
    let cut = &text[..text.len().min(200)];
    Error::Parse { path: path.to_owned(), line: String::from_utf8_lossy(cut).into_owned() }
}
