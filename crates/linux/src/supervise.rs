//! What the supervisor of a job needs from the kernel: to start the job exactly as it would have been started without
//! a supervisor, to hear of signals, stops and its end, and to end the way the job ended.

use crate::rootless::{self, Apart};
use crate::{Error, Result};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use std::ffi::{CString, OsString};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::mem::{size_of, zeroed};
use std::os::unix::ffi::OsStringExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether `SIGPIPE` was ignored when this process was started. Rust's runtime ignores it before `main`, so that the
/// answer has to be taken earlier; the job must find what it would have found without us.
static SIGPIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_sigpipe() {
    // SAFETY: zero is a valid `sigaction`, and sigaction(2) with a null new action only reads the old one.
    let ignored = unsafe {
        let mut old: libc::sigaction = zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut old) == 0 && old.sa_sigaction == libc::SIG_IGN
    };
    SIGPIPE_WAS_IGNORED.store(ignored, Ordering::Relaxed);
}

// SAFETY: the dynamic loader calls the functions of .init_array before main, with arguments that this one does not
// look at; it touches nothing but the atomic above.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_SIGPIPE: extern "C" fn() = note_sigpipe;

/// Signals that are left alone: those that cannot be blocked, and those that report a fault of the program itself.
const OWN: [i32; 9] = [
    libc::SIGKILL,
    libc::SIGSTOP,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];

/// All signals of this process, taken over as a stream of events; what was in force before is kept for the job.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
    mask: libc::sigset_t,
    sigchld: libc::sigaction,
}

/// A signal that was sent to this process.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// Which.
    pub signal: i32,
    /// The kernel sent it: for keyboard signals, a hang-up or a new window size, to the whole process group.
    pub from_kernel: bool,
    /// Process id of the sender, 0 if the kernel sent it.
    pub sender: u32,
    queued: Option<u64>,
    uid: u32,
}

impl Signals {
    /// Blocks all signals in this thread (and in those it starts) and opens the stream. Call it before other threads
    /// exist: a thread that does not block a signal takes it away from the stream.
    pub fn take() -> Result<Self> {
        std::hint::black_box(&NOTE_SIGPIPE); // keeps the object file with the static among those linked
        // SAFETY: zero is a valid `sigset_t` and `sigaction`; every call gets pointers to live local values, and
        // signalfd(2) returns a new descriptor that nobody else owns.
        unsafe {
            let mut set: libc::sigset_t = zeroed();
            libc::sigfillset(&mut set);
            for signal in OWN {
                libc::sigdelset(&mut set, signal);
            }
            let mut mask: libc::sigset_t = zeroed();
            check("rt_sigprocmask", libc::sigprocmask(libc::SIG_BLOCK, &set, &mut mask))?;
            // An ignored SIGCHLD would make the kernel reap the job behind our back (wait(2), notes).
            let default: libc::sigaction = zeroed();
            let mut sigchld: libc::sigaction = zeroed();
            check("rt_sigaction", libc::sigaction(libc::SIGCHLD, &default, &mut sigchld))?;
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            check("signalfd", fd)?;
            Ok(Self { fd: OwnedFd::from_raw_fd(fd), mask, sigchld })
        }
    }

    /// Another handle of the same stream, for another thread.
    pub fn try_clone(&self) -> Result<Self> {
        let fd = self.fd.try_clone().map_err(|e| Error::call("dup signalfd", e))?;
        Ok(Self { fd, mask: self.mask, sigchld: self.sigchld })
    }

    /// The next signal, if one is waiting.
    pub fn next(&self) -> Result<Option<Received>> {
        let mut buffer = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.fd, &mut buffer) {
            Ok(n) if n == buffer.len() => {}
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(e) => return Err(Error::call("read signalfd", e)),
        }
        // SAFETY: the buffer has the size of the structure, whose fields are plain integers.
        let info: libc::signalfd_siginfo = unsafe { std::ptr::read_unaligned(buffer.as_ptr().cast()) };
        Ok(Some(Received {
            signal: info.ssi_signo as i32,
            from_kernel: info.ssi_code == libc::SI_KERNEL,
            sender: info.ssi_pid,
            queued: (info.ssi_code == libc::SI_QUEUE).then_some(info.ssi_ptr),
            uid: info.ssi_uid,
        }))
    }
}

impl Received {
    /// Whether it would have ended this process, had the signals not been taken.
    pub fn would_end_us(&self) -> bool {
        const HARMLESS: [i32; 7] = [
            libc::SIGCHLD,
            libc::SIGCONT,
            libc::SIGURG,
            libc::SIGWINCH,
            libc::SIGTSTP,
            libc::SIGTTIN,
            libc::SIGTTOU,
        ];
        // SAFETY: zero is a valid `sigaction`, and sigaction(2) with a null new action only reads the old one.
        let ignored = unsafe {
            let mut now: libc::sigaction = zeroed();
            libc::sigaction(self.signal, std::ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
        };
        !ignored && !HARMLESS.contains(&self.signal)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The first fields of `siginfo_t` of a queued signal, filled up to its size.
#[repr(C)]
struct QueuedInfo {
    signo: i32,
    errno: i32,
    code: i32,
    _align: i32,
    pid: u32,
    uid: u32,
    value: u64,
    _rest: [u8; 96],
}
const _: () = assert!(size_of::<QueuedInfo>() == size_of::<libc::siginfo_t>());

/// Passes a signal on, with the value it was queued with.
pub fn forward(pidfd: BorrowedFd<'_>, signal: &Received) -> Result<()> {
    let info = signal.queued.map(|value| QueuedInfo {
        signo: signal.signal,
        errno: 0,
        code: libc::SI_QUEUE,
        _align: 0,
        pid: signal.sender,
        uid: signal.uid,
        value,
        _rest: [0; 96],
    });
    let pointer = info.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: pidfd_send_signal(2) reads a siginfo_t from the pointer, or takes null for that of kill(2).
    let done =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal.signal, pointer, 0) };
    match check("pidfd_send_signal", done as i32) {
        Err(e) if e.errno() == Some(libc::ESRCH) => Ok(()), // it ended meanwhile
        other => other,
    }
}

/// Why a command could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The file is missing, not executable, in a foreign format, …: the user's to mend.
    #[error("cannot run {0}: {1}")]
    Exec(String, std::io::Error),
    /// Anything before that.
    #[error(transparent)]
    Kernel(#[from] Error),
}

/// A child process.
#[derive(Debug)]
pub struct Child {
    /// Its process id, valid until it is reaped by [`wait`].
    pub pid: u32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
}

/// Starts a command (looked up in `PATH`) with our descriptors, process group, session and environment, and with the
/// signal mask and dispositions that were in force before `signals` was taken; `apart`, in a user namespace of its own. It does not die
/// with us.
///
/// `ready` is told its process id before the command begins; if it fails, there is no command.
pub fn spawn<E: From<SpawnError>>(
    argv: &[OsString],
    signals: &Signals,
    apart: Option<&Apart>,
    ready: impl FnOnce(u32) -> Result<(), E>,
) -> Result<Child, E> {
    let waiting = fork_waiting(argv, signals, apart)?;
    match ready(waiting.child.pid) {
        Ok(()) => Ok(waiting.go()?),
        Err(e) => {
            waiting.forget();
            Err(e)
        }
    }
}

/// A child that waits for the word to begin.
struct Waiting {
    child: Child,
    name: String,
    word: PipeWriter,
    answer: PipeReader,
}

impl Waiting {
    /// Lets it begin; returns when the command runs.
    fn go(mut self) -> Result<Child, SpawnError> {
        self.word.write_all(b"go").map_err(|e| Error::call("write to the child", e))?;
        let mut errno = [0; 4];
        if self.answer.read_exact(&mut errno).is_err() {
            return Ok(self.child);
        }
        let error =
            SpawnError::Exec(self.name.clone(), std::io::Error::from_raw_os_error(i32::from_ne_bytes(errno)));
        self.forget();
        Err(error)
    }

    /// It leaves when it finds that the word will not come.
    fn forget(self) {
        drop(self.word);
        // SAFETY: waits for our own child, which is about to leave.
        unsafe { libc::waitpid(self.child.pid as i32, std::ptr::null_mut(), 0) };
    }
}

fn fork_waiting(argv: &[OsString], signals: &Signals, apart: Option<&Apart>) -> Result<Waiting, SpawnError> {
    let name = argv.first().map(|a| a.to_string_lossy().into_owned()).unwrap_or_default();
    let exec_error = |e| SpawnError::Exec(name.clone(), e);
    let strings: Vec<CString> = argv
        .iter()
        .map(|a| CString::new(a.clone().into_vec()).map_err(|e| exec_error(e.into())))
        .collect::<Result<_, _>>()?;
    let mut pointers: Vec<*const libc::c_char> = strings.iter().map(|s| s.as_ptr()).collect();
    pointers.push(std::ptr::null());
    let pipe = || std::io::pipe().map_err(|e| Error::call("pipe", e));
    let ((mut hear, word), (answer, mut say)) = (pipe()?, pipe()?);
    // SAFETY: between fork and exec the child only makes calls that are safe there (signal-safety(7); glibc's execvp
    // does not allocate) and leaves by exec or _exit, so that no destructor of ours runs twice.
    let pid = unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::close(word.as_raw_fd());
            if hear.read_exact(&mut [0; 2]).is_err() {
                libc::_exit(127);
            }
            give_back_signals(signals);
            let errno = match apart.map_or(Ok(()), |apart| apart.enter()) {
                Ok(()) => {
                    libc::execvp(pointers[0], pointers.as_ptr());
                    *libc::__errno_location()
                }
                Err(errno) => errno,
            };
            let _ = say.write_all(&errno.to_ne_bytes());
            libc::_exit(127);
        }
        pid
    };
    check("fork", pid)?;
    let child = Child { pid: pid as u32, pidfd: pidfd_of(pid as u32)? };
    Ok(Waiting { child, name, word, answer })
}

/// # Safety
/// Only in a forked child that is about to call exec: it changes the dispositions of the whole process.
unsafe fn give_back_signals(signals: &Signals) {
    // SAFETY: all pointers are to live values; the caller promises the rest.
    unsafe {
        let mut sigpipe: libc::sigaction = zeroed();
        if SIGPIPE_WAS_IGNORED.load(Ordering::Relaxed) {
            sigpipe.sa_sigaction = libc::SIG_IGN;
        }
        libc::sigaction(libc::SIGPIPE, &sigpipe, std::ptr::null_mut());
        libc::sigaction(libc::SIGCHLD, &signals.sigchld, std::ptr::null_mut());
        libc::sigprocmask(libc::SIG_SETMASK, &signals.mask, std::ptr::null_mut());
    }
}

fn pidfd_of(pid: u32) -> Result<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid as i32).ok_or(Error::Gone(pid))?;
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        .map_err(|e| Error::call("pidfd_open", e))
}

/// What happened to a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It exited with this code.
    Exited(i32),
    /// A signal killed it.
    Killed(i32),
    /// A signal stopped it (job control).
    Stopped(i32),
    /// It goes on after a stop.
    Continued,
}

/// The next change of a child, if there is one; it is reaped when it ended.
pub fn wait(pidfd: BorrowedFd<'_>) -> Result<Option<Change>> {
    let options =
        WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::CONTINUED | WaitIdOptions::NOHANG;
    let status = loop {
        match waitid(WaitId::PidFd(pidfd), options) {
            Err(rustix::io::Errno::INTR) => continue,
            other => break other.map_err(|e| Error::call("waitid", e))?,
        }
    };
    Ok(status.and_then(|s| {
        let exited = s.exit_status().map(Change::Exited);
        let killed = s.terminating_signal().map(Change::Killed);
        let stopped = s.stopping_signal().map(Change::Stopped);
        exited.or(killed).or(stopped).or(s.continued().then_some(Change::Continued))
    }))
}

/// Which of the two processes [`background`] returned in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that called it.
    Front,
    /// The new one: leader of a session without a terminal.
    Back,
}

/// Splits this process in two: the caller, and a copy in a session of its own.
pub fn background() -> Result<Side> {
    single_threaded("go to the background")?;
    // SAFETY: there is one thread, so the copy is complete and no lock is held by a thread that it lacks.
    let pid = unsafe { libc::fork() };
    check("fork", pid)?;
    if pid != 0 {
        return Ok(Side::Front);
    }
    rustix::process::setsid().map_err(|e| Error::call("setsid", e))?;
    Ok(Side::Back)
}

/// Pipes, sockets and terminals that this process was started with, and a program that it starts will be: descriptor and what
/// `/proc/self/fd` calls it.
pub fn inherited_streams() -> Result<Vec<(u32, Vec<u8>)>> {
    let own = crate::proc::Proc::process(std::process::id())?;
    let mut streams = Vec::new();
    for name in own.list("fd")? {
        let Some(number) = std::str::from_utf8(&name).ok().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(link) = own.link(&format!("fd/{number}")) else { continue };
        if let Some(fd) = crate::descriptors::inherited(number)
            && is_stream(&fd)
        {
            streams.push((number, link));
        }
    }
    Ok(streams)
}

fn is_stream(fd: &OwnedFd) -> bool {
    use rustix::fs::FileType;
    rustix::fs::fstat(fd).is_ok_and(|s| match FileType::from_raw_mode(s.st_mode) {
        FileType::Fifo | FileType::Socket => true,
        FileType::CharacterDevice => rustix::termios::isatty(fd),
        _ => false,
    })
}

/// A copy of this process is only complete while it has one thread.
pub(crate) fn single_threaded(to_do: &str) -> Result<()> {
    let tasks = std::fs::read_dir("/proc/self/task").map_err(|e| Error::file("/proc/self/task", e))?.count();
    if tasks == 1 { Ok(()) } else { Err(Error::Other(format!("cannot {to_do} once threads run"))) }
}

/// Closes every descriptor above 2 that was inherited (that is, which an exec would pass on): a pipe or lock that
/// belongs to the job must not stay open because its supervisor holds it too.
pub fn drop_inherited() -> Result<()> {
    let dir = std::fs::read_dir("/proc/self/fd").map_err(|e| Error::file("/proc/self/fd", e))?;
    let numbers: Vec<i32> = dir.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|&n| n > 2) {
        // SAFETY: the number came from our own table; it is only borrowed for the question, and the answer EBADF (the
        // directory's own descriptor) is harmless.
        let flags = fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) });
        if flags.is_ok_and(|f| !f.contains(FdFlags::CLOEXEC)) {
            // SAFETY: everything that Rust opens is close-on-exec, so that no owner of ours knows this descriptor.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
    Ok(())
}

/// Stops this process by a job-control signal, as the job was stopped, and returns when it is continued. In an
/// orphaned process group the kernel does not stop it, and it returns at once.
pub fn stop_like(signal: i32) {
    take_effect(signal);
}

/// Ends this process the way the job ended: by the same signal, without a core dump of our own.
pub fn die_of(signal: i32) -> ! {
    // SAFETY: setrlimit(2) reads a live structure.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 }) };
    take_effect(signal);
    std::process::exit(128 + signal); // the signal does not kill (SIGCHLD, …), or not process 1 of a namespace
}

/// Sends this process a signal and lets it have its default effect, once: it is sent while it is blocked, where it
/// becomes one with the same signal from the terminal that may be pending, and only then is it let in.
fn take_effect(signal: i32) {
    // SAFETY: zero is a valid `sigset_t`, and a `sigaction` that means SIG_DFL; all pointers are to live values. A
    // signal that is pending when sigprocmask(2) unblocks it is delivered before that returns.
    unsafe {
        let mut set: libc::sigset_t = zeroed();
        libc::sigaddset(&mut set, signal);
        libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        let default: libc::sigaction = zeroed();
        let mut before: libc::sigaction = zeroed();
        libc::sigaction(signal, &default, &mut before);
        libc::kill(libc::getpid(), signal);
        libc::sigprocmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        libc::sigaction(signal, &before, std::ptr::null_mut());
    }
}

pub(crate) fn check(call: &str, result: i32) -> Result<()> {
    if result < 0 { Err(Error::call(call, std::io::Error::last_os_error())) } else { Ok(()) }
}

/// Which of the two processes [`private_namespace`] or [`second`] returned in.
#[derive(Debug)]
pub enum Private {
    /// The caller, with its new child.
    Outside(Child),
    /// The child; if asked for, process 1 of a pid namespace of its own, with a `/proc` that shows it, or why it has not come to that.
    Inside(Result<()>),
}

/// Splits this process in two: the caller, and a copy beside it. fork(2)
pub fn second() -> Result<Private> {
    Ok(split("make a second process", 0)?.map_or(Private::Inside(Ok(())), Private::Outside))
}

/// Splits this process in two: the caller, and a copy that is the first process of a new pid namespace
/// (`pid_namespaces(7)`), in a mount namespace where `/proc` shows that one. When the copy ends, the kernel kills
/// whatever else lives there. Without `CAP_SYS_ADMIN` the two belong to a new user namespace, in which the copy is called as outside and
/// has all privileges ([`rootless`]).
pub fn private_namespace() -> Result<Private> {
    let before = rootless::without_privilege()?;
    let users = if before.is_some() { libc::CLONE_NEWUSER } else { 0 };
    let namespaces = (libc::CLONE_NEWPID | libc::CLONE_NEWNS | users) as u64;
    if let Some(child) = split("make a pid namespace", namespaces)? {
        return Ok(Private::Outside(child));
    }
    let named = before.map_or(Ok(()), rootless::Before::take_names);
    Ok(Private::Inside(named.and_then(|()| show_own_processes())))
}

/// Makes a copy of this process; nothing in the copy.
fn split(what: &str, flags: u64) -> Result<Option<Child>> {
    single_threaded(what)?;
    let mut pidfd: i32 = -1;
    let args = crate::spawn::CloneArgs {
        flags: flags | libc::CLONE_PIDFD as u64,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..Default::default()
    };
    // SAFETY: as `fork`: there is one thread, so the copy is complete and no lock is held by a thread that it lacks.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    check(&format!("clone3 ({what})"), pid as i32)?;
    // SAFETY: the kernel stored a new descriptor that nobody else owns.
    let child = || Child { pid: pid as u32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } };
    Ok((pid != 0).then(child))
}

pub(crate) fn show_own_processes() -> Result<()> {
    use rustix::mount::{MountFlags, MountPropagationFlags as Propagation, mount, mount_change};
    // Mounts made outside still appear here, but not the other way round.
    mount_change("/", Propagation::DOWNSTREAM | Propagation::REC)
        .map_err(|e| Error::call("make / a slave", e))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None).map_err(|e| Error::call("mount /proc", e))
}

/// Collects children that ended, except some: process 1 inherits orphans.
pub fn reap_orphans(except: &[u32]) -> Result<()> {
    let children = crate::proc::Proc::process(std::process::id())?.children()?;
    for child in children.into_iter().filter(|c| !except.contains(c)) {
        // SAFETY: no pointers; a child that has not ended is left alone.
        unsafe { libc::waitpid(child as i32, std::ptr::null_mut(), libc::WNOHANG) };
    }
    Ok(())
}
