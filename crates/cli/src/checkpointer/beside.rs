//! The supervisor's side: starting the process that takes the checkpoints, and outliving it.

use crate::args::Periodic;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_linux::supervise::{Received, Signals};
use stillpoint_store::{Store, Trouble};

/// One that ends sooner than this would end so again.
const WORTHWHILE: Duration = Duration::from_secs(10);

/// What the process beside us has to know.
#[derive(Debug)]
pub struct Errand {
    /// The store.
    pub store: Store,
    /// The job.
    pub job: String,
    /// Its process, as we see it.
    pub pid: u32,
    /// Streams besides the standard ones that it was started with.
    pub inherited: Vec<(u32, Vec<u8>)>,
    /// Checkpoints as time passes.
    pub periodic: Periodic,
}

/// The process beside a supervisor that takes the checkpoints of its job. It is started when there is something to do.
#[derive(Debug)]
pub struct Beside {
    errand: Errand,
    /// Calls that come in before it is there wait for it. Nobody listens any more once it has turned out useless.
    listener: Option<UnixListener>,
    process: Option<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    pidfd: OwnedFd,
    started: Instant,
    /// What it writes to its standard error: why it could not go on. Ours may be the job's, or lead nowhere.
    said: File,
}

impl Beside {
    /// Gets ready to start it. From now on nothing may be open that belongs to the job.
    pub fn new(errand: Errand, listener: Option<UnixListener>) -> Self {
        let mut beside = Self { errand, listener, process: None };
        if beside.errand.periodic.every.is_some() {
            beside.start();
        }
        beside
    }

    /// Its process id, if it is there.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|p| p.child.id())
    }

    /// What to wait for: a call, or its end.
    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        let end = self.process.as_ref().map(|p| p.pidfd.as_fd());
        end.or_else(|| self.listener.as_ref().map(AsFd::as_fd))
    }

    /// Starts it if somebody calls, or if it was killed.
    pub fn attend(&mut self) {
        if let Some(process) = &mut self.process {
            let how = match process.child.try_wait() {
                Ok(None) => return,
                Ok(Some(status)) => format!(" ({status})"),
                Err(_) => String::new(),
            };
            let useless = process.started.elapsed() < WORTHWHILE;
            let said = process.last_words().map(|said| format!(": {said}")).unwrap_or_default();
            self.process = None;
            if useless {
                let why = "the process that takes checkpoints ends as soon as it is started";
                self.give_up(&format!("{why}{how}{said}"));
            } else if self.errand.periodic.every.is_some() {
                self.start();
            }
        } else if self.listener.as_ref().is_some_and(|l| is_ready(l.as_fd())) {
            self.start();
        }
    }

    /// Starts it if it is not there: for as long as we stand still, we cannot.
    pub fn start(&mut self) {
        if self.process.is_none() && (self.listener.is_some() || self.errand.periodic.every.is_some()) {
            match Process::start(&self.errand, self.listener.as_ref()) {
                Ok(process) => self.process = Some(process),
                Err(e) => self.give_up(&format!("the process that takes checkpoints cannot be started: {e}")),
            }
        }
    }

    /// The job goes on without. Whoever calls finds nobody, and takes the checkpoint without us.
    fn give_up(&mut self, why: &str) {
        self.listener = None;
        self.errand.periodic.every = None;
        let failing = Some((crate::output::now_ns(), why.to_string()));
        let _ = self.errand.store.set_trouble(&self.errand.job, &Trouble { failing, ..Trouble::default() });
    }

    /// The job has ended: whether it has, too. A checkpoint that the job has lived long enough for is brought to its end.
    pub fn has_left(&mut self) -> bool {
        let Some(process) = &mut self.process else { return true };
        let _ = pidfd_send_signal(&process.pidfd, Signal::CONT); // as in `finish`
        !matches!(process.child.try_wait(), Ok(None))
    }

    /// Waits for its end after that of the job: a checkpoint that the job has lived long enough for is brought to its
    /// end. A signal that would end us has no patience. `heard` is told of those that come.
    pub fn finish(self, signals: &Signals, mut heard: impl FnMut(&Received)) {
        let Some(Process { mut child, pidfd, .. }) = self.process else { return };
        let _ = pidfd_send_signal(&pidfd, Signal::CONT); // whoever stopped it had the job in mind
        while matches!(child.try_wait(), Ok(None)) {
            let sources = [pidfd.as_fd(), signals.as_fd()];
            let mut polled = sources.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let _ = poll(&mut polled, None);
            while let Ok(Some(signal)) = signals.next() {
                heard(&signal);
                if signal.would_end_us() {
                    let _ = child.kill();
                    return; // it may hang in a system call; it does not outlive us
                }
            }
        }
    }
}

impl Process {
    fn start(errand: &Errand, listener: Option<&UnixListener>) -> std::io::Result<Self> {
        let listener = listener.map(|l| l.as_fd().try_clone_to_owned()).transpose()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("stillpoint").args(errand.arguments());
        command.stdin(listener.map_or_else(Stdio::null, Stdio::from));
        let said = File::from(memfd_create("last words", MemfdFlags::CLOEXEC)?);
        command.stderr(said.try_clone()?);
        // A process group of its own: what the terminal sends to the job's is not for it.
        let mut child = command.process_group(0).spawn()?;
        let pid = Pid::from_raw(child.id() as i32);
        match pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(pidfd)) => Ok(Self { child, pidfd, started: Instant::now(), said }),
            failed => {
                let _ = child.kill().and_then(|()| child.wait());
                Err(failed.and_then(Result::err).map_or_else(|| ErrorKind::Other.into(), Into::into))
            }
        }
    }

    /// The first line of what it said, without our name.
    fn last_words(&self) -> Option<String> {
        const ENOUGH: usize = 1024;
        let mut buffer = [0; ENOUGH];
        let n = self.said.read_at(&mut buffer, 0).unwrap_or(0);
        let text = String::from_utf8_lossy(&buffer[..n]);
        let line = text.lines().next().map(|line| line.trim_start_matches("stillpoint: ").to_string());
        line.filter(|line| !line.is_empty())
    }
}

fn is_ready(fd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n > 0)
}

impl Errand {
    /// As `args::Checkpointer` reads them.
    fn arguments(&self) -> Vec<OsString> {
        let mut list: Vec<OsString> = vec!["checkpointer".into(), self.job.clone().into()];
        let mut option = |name: &str, value: OsString| list.extend([name.into(), value]);
        option("--store", self.store.path().into());
        option("--process", self.pid.to_string().into());
        option("--supervisor", std::process::id().to_string().into());
        for (fd, name) in &self.inherited {
            let value = [format!("{fd}=").as_bytes(), name].concat();
            option("--inherited", OsString::from_vec(value));
        }
        let Periodic { every, mtbf, keep, engine, buffer } = &self.periodic;
        let time = |time: Duration| format!("{}ms", time.as_millis());
        let numbers = [
            ("--every", every.map(|every| every.time().map_or("auto".into(), time))),
            ("--mtbf", mtbf.map(time)),
            ("--keep", keep.map(|n| n.to_string())),
        ];
        let others =
            [("--engine", engine.map(|e| e.name().to_string())), ("--buffer", buffer.map(|b| b.to_string()))];
        for (name, value) in numbers.into_iter().chain(others) {
            if let Some(value) = value {
                option(name, value.into());
            }
        }
        list
    }
}

/// Reads back what [`Errand::arguments`] wrote: `FD=NAME`.
pub fn inherited(argument: &OsString) -> Option<(u32, Vec<u8>)> {
    let bytes = argument.as_bytes();
    let equals = bytes.iter().position(|&b| b == b'=')?;
    let fd = std::str::from_utf8(&bytes[..equals]).ok()?.parse().ok()?;
    Some((fd, bytes[equals + 1..].to_vec()))
}
