//! The process that takes the checkpoints of a running job. It follows what the job writes from checkpoint to
//! checkpoint, answers those who ask for one, and looks at the clock.
//!
//! It is not the supervisor itself but a process beside it, for three reasons. The kernel reports stops of a traced
//! child to its parent *or* its tracer when both are threads of one process (`wait_consider_task`, which recommends
//! two). A supervisor stops with its job when Ctrl-Z stops that; whoever serves the job's page faults must not. And
//! whatever becomes of a checkpoint, signals and the end of the job pass through the supervisor.

mod beside;
pub mod desk;

pub use beside::{Beside, Errand, inherited};

use crate::args::Periodic;
use crate::control::server::Clients;
use crate::failure::{Failure, Result};
use crate::pace::Pacer;
use crate::periodic::Clock;
use crate::taken::Asked;
use desk::{Desk, Pacing, Taker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};
use stillpoint_capture::{Engine, Session};
use stillpoint_linux::supervise::Signals;
use stillpoint_store::{Store, Trouble};

/// Memory for pages on their way, bytes, unless told otherwise.
const BUFFER: u64 = 16 << 20;
/// How long clients may take to hear the outcome once the job has ended.
const PATIENCE: Duration = Duration::from_secs(2);

/// What there is to do.
#[derive(Debug)]
pub struct Work {
    /// Where checkpoints go.
    pub store: Store,
    /// The job.
    pub job: String,
    /// Its process.
    pub pid: u32,
    /// Its process.
    pub pidfd: OwnedFd,
    /// Streams besides the standard ones that it was started with.
    pub inherited: Vec<(u32, Vec<u8>)>,
    /// Checkpoints as time passes.
    pub periodic: Periodic,
    /// Where those who want one call; not everywhere can there be such a socket.
    pub listener: Option<UnixListener>,
    /// Signals end the work; otherwise the job's end does, and that of a parent.
    pub heeds_signals: bool,
}

impl Work {
    /// Does it until the job ends or we are told to leave; what was begun is brought to an end. Tells whether the job has ended.
    pub fn serve(self, signals: &Signals) -> Result<bool> {
        let mut clock = Clock::new(self.periodic.every)?;
        let desk = Desk::open(self.taker(&clock)?)?;
        let clients = Clients::default();
        if let Some(listener) = &self.listener {
            listener.set_nonblocking(true).map_err(|e| Failure::failed(format!("control socket: {e}")))?;
        }
        loop {
            let mut sources = vec![self.pidfd.as_fd(), signals.as_fd()];
            sources.extend(self.listener.as_ref().map(AsFd::as_fd));
            sources.extend(clock.source());
            wait(&sources, clock.left(Instant::now()))?;
            if has_ended(self.pidfd.as_fd()) || self.is_told_to_leave(signals)? {
                break;
            }
            if let Some(listener) = &self.listener {
                clients.accept(listener, &desk);
            }
            // One that comes while another is taken is taken after it; more than one is not made up for.
            if clock.ticks(Instant::now())? && !desk.has_waiting() {
                desk.tick(self.periodic_checkpoint());
            }
        }
        self.bring_to_an_end(&desk, &clients, signals)?;
        if desk.is_idle() && self.periodic.keep.is_some() {
            // What cannot be given back now goes with the next that is pruned.
            let _ = self.store.end_rolling(&self.job);
        }
        Ok(has_ended(self.pidfd.as_fd()))
    }

    fn taker(&self, clock: &Clock) -> Result<Taker> {
        let pacer = || Pacer::new(&self.store, &self.job, self.pid, self.periodic.mtbf);
        let keep = self.periodic.keep.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let pacing = clock.hears()?.map(|clock| Pacing { pacer: pacer(), last: None, clock });
        Ok(Taker {
            store: self.store.clone(),
            job: self.job.clone(),
            session: Session::new(self.pid),
            inherited: self.inherited.clone(),
            every: self.periodic.every,
            can_give_way: self.periodic.every.is_none()
                || !matches!(self.periodic.engine, Some(Engine::Precopy | Engine::Wp)),
            rolling: self.store.rolling(&self.job, keep.unwrap_or(usize::MAX)),
            trouble: Trouble::default(),
            pacing,
        })
    }

    fn periodic_checkpoint(&self) -> Asked {
        Asked {
            target: self.job.clone(),
            job: self.job.clone(),
            label: None,
            engine: self.periodic.engine.unwrap_or_default(),
            buffer: self.periodic.buffer.unwrap_or(BUFFER),
            full: false,
            kill: false,
        }
    }

    fn is_told_to_leave(&self, signals: &Signals) -> Result<bool> {
        let mut told = false;
        while let Some(signal) = signals.next()? {
            told |= self.heeds_signals && signal.would_end_us();
        }
        Ok(told)
    }

    /// Waits until what was asked for is done and told. A second signal has no patience.
    fn bring_to_an_end(&self, desk: &Desk, clients: &Clients, signals: &Signals) -> Result<()> {
        let mut done: Option<Instant> = None;
        while !desk.is_idle() || clients.are_waiting() {
            if desk.is_idle() && done.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                break;
            }
            if self.is_told_to_leave(signals)? {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// Whether the process of a pidfd has ended.
fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n > 0)
}

/// Waits until one of the sources has something, or as long as is left.
fn wait(sources: &[BorrowedFd<'_>], left: Option<Duration>) -> Result<()> {
    let mut polled: Vec<PollFd<'_>> =
        sources.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let left = left.and_then(|l| Timespec::try_from(l).ok());
    match poll(&mut polled, left.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Failure::failed(format!("poll: {e}"))),
    }
}
