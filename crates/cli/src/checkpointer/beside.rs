//! The supervisor's side: starting the process that takes the checkpoints, and outliving it.

use crate::args::Periodic;
use crate::failure::{Failure, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_linux::supervise::Signals;
use stillpoint_store::Store;

/// One that ends sooner than this would end so again.
const WORTHWHILE: Duration = Duration::from_secs(10);

/// What the process beside us has to know.
#[derive(Debug)]
struct Errand {
    store: PathBuf,
    job: String,
    pid: u32,
    inherited: Vec<(u32, Vec<u8>)>,
    periodic: Periodic,
    listener: Option<UnixListener>,
}

/// The process beside a supervisor that takes the checkpoints of its job.
#[derive(Debug)]
pub struct Beside {
    errand: Errand,
    child: Child,
    pidfd: OwnedFd,
    started: Instant,
}

impl Beside {
    /// Starts it for the job's process as we see it. Calls that come in at `listener` before it is ready wait for it.
    /// To be called when nothing is open any more that belongs to the job.
    pub fn start(
        store: &Store,
        job: &str,
        pid: u32,
        inherited: Vec<(u32, Vec<u8>)>,
        periodic: &Periodic,
        listener: Option<UnixListener>,
    ) -> Result<Self> {
        let (store, job, periodic) = (store.path().to_owned(), job.to_string(), periodic.clone());
        Self::begin(Errand { store, job, pid, inherited, periodic, listener })
    }

    fn begin(errand: Errand) -> Result<Self> {
        let failed = |what: &str, e: std::io::Error| {
            Failure::failed(format!("cannot start the checkpointer: {what}{e}"))
        };
        let listener = errand.listener.as_ref().map(|l| l.as_fd().try_clone_to_owned()).transpose();
        let stdin = listener.map_err(|e| failed("", e))?.map_or_else(Stdio::null, Stdio::from);
        // A process group of its own: what the terminal sends to the job's is not for it.
        let started = Command::new("/proc/self/exe")
            .arg0("stillpoint")
            .args(errand.arguments())
            .process_group(0)
            .stdin(stdin)
            .spawn();
        let mut child = started.map_err(|e| failed("", e))?;
        let pidfd = Pid::from_raw(child.id() as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        match pidfd {
            Some(Ok(pidfd)) => Ok(Self { errand, child, pidfd, started: Instant::now() }),
            _ => {
                let _ = child.kill().and_then(|()| child.wait());
                Err(Failure::failed("cannot start the checkpointer: no pidfd of it"))
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// It, if it lives. It should not end before the job; if it was killed, another takes its place, unless that would
    /// end as soon.
    pub fn alive(mut self) -> Option<Self> {
        if matches!(self.child.try_wait(), Ok(None)) {
            return Some(self);
        }
        (self.started.elapsed() >= WORTHWHILE).then(|| Self::begin(self.errand).ok()).flatten()
    }

    /// Waits for its end after that of the job: a checkpoint that the job has lived long enough for is brought to its
    /// end. A signal that would end us has no patience.
    pub fn finish(mut self, signals: &Signals) {
        self.errand.listener = None;
        while matches!(self.child.try_wait(), Ok(None)) {
            let sources = [self.pidfd.as_fd(), signals.as_fd()];
            let mut polled = sources.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let _ = poll(&mut polled, None);
            while let Ok(Some(signal)) = signals.next() {
                if signal.would_end_us() {
                    let _ = self.child.kill();
                }
            }
        }
    }
}

impl AsFd for Beside {
    /// Becomes readable when it has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Errand {
    /// As `args::Checkpointer` reads them.
    fn arguments(&self) -> Vec<OsString> {
        let mut list: Vec<OsString> = vec!["checkpointer".into(), self.job.clone().into()];
        let mut option = |name: &str, value: OsString| list.extend([name.into(), value]);
        option("--store", self.store.clone().into());
        option("--process", self.pid.to_string().into());
        option("--supervisor", std::process::id().to_string().into());
        for (fd, name) in &self.inherited {
            let value = [format!("{fd}=").as_bytes(), name].concat();
            option("--inherited", OsString::from_vec(value));
        }
        let Periodic { every, keep, engine, buffer } = &self.periodic;
        let numbers = [
            ("--every", every.map(|e| format!("{}ms", e.as_millis()))),
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
