//! Processes, from outside.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Ends a process.
pub const SIGKILL: Signal = Signal::KILL;
/// Ends a process with a core dump.
pub const SIGABRT: Signal = Signal::ABORT;
/// Means to a process what it likes.
pub const SIGUSR1: Signal = Signal::USR1;
/// Stops a process.
pub const SIGSTOP: Signal = Signal::STOP;
/// Lets a stopped process go on.
pub const SIGCONT: Signal = Signal::CONT;
/// `SIGTSTP`.
pub const SIGTSTP: Signal = Signal::TSTP;

/// All process ids.
pub fn processes() -> Vec<u32> {
    numbers(Path::new("/proc"))
}

/// Thread ids of a process, ascending.
pub fn threads(pid: u32) -> Vec<u32> {
    let mut tids = numbers(Path::new(&format!("/proc/{pid}/task")));
    tids.sort_unstable();
    tids
}

/// What a process is called in its own pid namespace, if that is not ours.
pub fn id_within(pid: u32) -> Option<u32> {
    let ids = |pid: u32| status(pid, "NSpid").unwrap_or_default();
    let (theirs, ours) = (ids(pid), ids(std::process::id()));
    let is_deeper = theirs.split_whitespace().count() > ours.split_whitespace().count();
    is_deeper.then(|| theirs.split_whitespace().last()?.parse().ok()).flatten()
}

/// What we call the process that had this id when it was killed at its checkpoint, once it is restored: the same, if we are privileged;
/// otherwise it lives in a pid namespace. `mark` is in its environment.
pub fn restored(pid: u32, mark: &str) -> Option<u32> {
    if is_root() {
        return Some(pid);
    }
    let is_it = |p: &u32| {
        let environment = std::fs::read(format!("/proc/{p}/environ")).unwrap_or_default();
        id_within(*p) == Some(pid) && environment.windows(mark.len()).any(|w| w == mark.as_bytes())
    };
    processes().into_iter().find(is_it)
}

/// Processes, also ended ones, that a process is to wait for.
pub fn children(pid: u32) -> Vec<u32> {
    let parent = |p: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{p}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    processes().into_iter().filter(|&p| parent(p) == Some(pid)).collect()
}

/// Names of a directory that are numbers.
pub fn numbers(directory: &Path) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// State letter of a process, `None` if there is none.
pub fn state(pid: u32) -> Option<char> {
    state_in(&format!("/proc/{pid}/stat"))
}

/// State letter of a thread.
pub fn thread_state(pid: u32, tid: u32) -> Option<char> {
    state_in(&format!("/proc/{pid}/task/{tid}/stat"))
}

fn state_in(path: &str) -> Option<char> {
    let stat = std::fs::read_to_string(path).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether there is such a process and it is no zombie: a thread of it lives, be it not the first.
pub fn alive(pid: u32) -> bool {
    // A main thread may have made another one since they were listed, and have ended.
    let look =
        |_| threads(pid).into_iter().any(|tid| thread_state(pid, tid).is_some_and(|s| s != 'Z' && s != 'X'));
    (0..2).any(look)
}

/// Sends a signal; a process that is gone is fine.
pub fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Waits until a process is gone or a zombie; panics after `patience`.
pub fn wait_gone(pid: u32, patience: Duration) {
    crate::wait_for(&format!("process {pid} to end"), patience, || (!alive(pid)).then_some(()));
}

/// Whether a process is there, and nobody traces it.
pub fn is_untraced(pid: u32) -> bool {
    status(pid, "TracerPid").is_some_and(|tracer| tracer == "0")
}

/// A process, and not the one that has its id after it.
#[derive(Debug)]
pub struct Life(Option<OwnedFd>);

impl Life {
    /// That of the process that has the id now; one that is over if nobody has.
    pub fn of(pid: u32) -> Self {
        let named = Pid::from_raw(pid as i32);
        Life(named.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
    }

    /// Waits until it is over; panics after `patience`.
    #[track_caller]
    pub fn wait_over(&self, patience: Duration) {
        let Some(handle) = &self.0 else { return };
        crate::wait_for("a process to end", patience, || {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&now)).is_ok_and(|n| n > 0).then_some(())
        });
    }
}

/// Waits until all threads of a process are stopped, and looks whether they stay so. Each that somebody has stopped tracing has to run
/// once more to stop again.
#[track_caller]
pub fn stays_stopped(pid: u32) {
    let is_stopped = || threads(pid).iter().all(|&tid| thread_state(pid, tid) == Some('T'));
    crate::wait_for(&format!("process {pid} to stop"), Duration::from_secs(60), || {
        is_stopped().then_some(())
    });
    std::thread::sleep(Duration::from_millis(20));
    assert!(is_stopped(), "process {pid} does not stay stopped");
}

/// Waits until the id of a process that is gone is free: somebody has to bury it. Where nobody does, not for ever.
pub fn wait_free(pid: u32) {
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while Path::new(&format!("/proc/{pid}")).exists() && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A field of `/proc/PID/status`.
pub fn status(pid: u32, field: &str) -> Option<String> {
    status_in(&format!("/proc/{pid}/status"), field)
}

/// A field of a `status` file of procfs.
pub fn status_in(path: &str, field: &str) -> Option<String> {
    let status = std::fs::read_to_string(path).ok()?;
    status.lines().find_map(|l| Some(l.strip_prefix(field)?.strip_prefix(':')?.trim().to_owned()))
}

/// Whether this is the superuser.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether this is the superuser, and may make namespaces as unshare(1) does with these flags.
pub fn can_unshare(flags: &[&str]) -> bool {
    let permitted = || Command::new("unshare").args(flags).arg("true").status().is_ok_and(|s| s.success());
    is_root() && permitted()
}

/// Whether this kernel has file systems of a kind, by now.
pub fn has_file_system(kind: &str) -> bool {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    known.lines().any(|line| line.split_whitespace().last() == Some(kind))
}

/// Where a command is found on `PATH`.
pub fn which(name: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|d| d.join(name)).find(|p| p.is_file())
}

/// Processes with what each of their threads is doing, for messages: a line each, and one for every thread, of which there
/// may be so many that only the first are told.
pub fn whereabouts(pids: &[u32]) -> String {
    const THREADS: usize = 8;
    let thread = |pid: u32, tid: u32| {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}")).unwrap_or_default()
        };
        let (state, call, stack) = (thread_state(pid, tid).unwrap_or('?'), read("syscall"), read("stack"));
        let calls = stack.lines().filter_map(|l| l.split_whitespace().nth(1)).collect::<Vec<_>>();
        format!("    {tid} {state} syscall {} in {}\n", call.trim(), calls.join(" < "))
    };
    let process = |&pid: &u32| {
        let threads = threads(pid).into_iter().take(THREADS).map(|tid| thread(pid, tid)).collect::<String>();
        format!("is there: {}\n{threads}", describe(&[pid]))
    };
    pids.iter().map(process).collect()
}

/// Processes with their command lines, for messages.
pub fn describe(pids: &[u32]) -> String {
    let name = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        format!("{pid} ({})", String::from_utf8_lossy(&line).replace('\0', " ").trim())
    };
    pids.iter().map(name).collect::<Vec<_>>().join(", ")
}
