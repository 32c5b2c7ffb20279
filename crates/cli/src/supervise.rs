//! The supervisor: it stands between whoever started a job (a shell, a script, a service manager) and the job, and
//! tries not to be noticed. Signals, stops and the end pass through it in both directions.

use crate::checkpointer::Beside;
use crate::failure::{Failure, Result};
use crate::loading::Loading;
use crate::paging::Paging;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Pid, Signal};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io::{PipeReader, PipeWriter, Write};
use std::rc::Rc;
use std::time::{Duration, Instant};
use stillpoint_linux::descriptors;
use stillpoint_linux::proc::{Proc, Stat};
use stillpoint_linux::supervise::{
    Change, Received, Signals, die_of, drop_inherited, forward, reap_orphans, stop_like, wait,
};

/// Why a job is killed that waits for memory.
pub const ABANDONED: &str =
    "those who load the memory of the program have been killed: it is killed, too; restore it once more";

/// For so long a core dump is waited for, into which those who load a program put what was missing.
const DUMPED: Duration = Duration::from_secs(60);

/// What was asked of a job through us that may end it.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    seen: BTreeSet<i32>,
    terminated: Option<Instant>,
}

/// A job that was asked to terminate may be given so long before it is killed.
const GRACE: Duration = Duration::from_secs(90);

impl Requests {
    fn note(&mut self, signal: &Received) {
        if signal.would_end_us() {
            self.seen.insert(signal.signal);
        }
        if signal.signal == libc_signal::TERM {
            self.terminated = Some(Instant::now());
        }
    }

    /// Whether a signal that killed the job is no crash but somebody's wish: it is [one](is_wish) by which nobody crashes, or it came through us, or the job had been asked to
    /// terminate through us and did not do so by itself.
    pub fn explain(&self, signal: i32) -> bool {
        is_wish(signal)
            || self.seen.contains(&signal)
            || self.terminated.is_some_and(|when| when.elapsed() < GRACE)
    }
}

/// Whether a signal is one by which programs are asked to end, or that says that their reader has left or their time is up:
/// nobody crashes by these.
pub fn is_wish(signal: i32) -> bool {
    use Signal as S;
    [S::HUP, S::INT, S::TERM, S::PIPE, S::XCPU].iter().any(|wish| wish.as_raw() == signal)
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exited with this code.
    Exited(i32),
    /// This signal killed it.
    Killed(i32),
}

impl End {
    /// Ends this process in the same way.
    pub fn follow(self) -> ! {
        match self {
            End::Exited(code) => std::process::exit(code),
            End::Killed(signal) => die_of(signal),
        }
    }
}

/// What process 1 of a private pid namespace tells of the job that it supervises there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// This signal has stopped it, as Ctrl-Z does.
    Stopped(i32),
    /// It goes on.
    Continued,
}

impl Told {
    /// By its line.
    pub fn of(line: &str) -> Option<Self> {
        match line.trim().split_once(' ') {
            None => (line.trim() == "continued").then_some(Told::Continued),
            Some((word, signal)) => {
                let signal = signal.parse().ok()?;
                (word == "stopped").then_some(Told::Stopped(signal))
            }
        }
    }
}

/// The line from such a process 1.
pub trait Within: Debug {
    /// Where something comes in.
    fn source(&self) -> BorrowedFd<'_>;
    /// What has come in since.
    fn told(&mut self) -> Vec<Told>;
}

/// A supervised job.
#[derive(Debug)]
pub struct Supervisor {
    signals: Signals,
    pid: u32,
    pidfd: OwnedFd,
    terminal: Option<Foreground>,
    /// Takes its checkpoints.
    checkpointer: Option<Beside>,
    /// Its memory, while that is still being loaded.
    loading: Option<Loading>,
    /// Its memory, where that is kept within a limit.
    paging: Option<Paging>,
    stopped: bool,
    /// We are process 1, which nothing stops from within: whoever is outside is told of stops here.
    teller: Option<PipeWriter>,
    /// Who supervises it in a pid namespace of its own.
    within: Option<Rc<RefCell<dyn Within>>>,
    /// The job's orphans become our children.
    init: bool,
    requests: Requests,
}

impl Supervisor {
    /// Supervises a child of ours.
    pub fn new(signals: Signals, pid: u32, pidfd: OwnedFd) -> Self {
        Self {
            signals,
            pid,
            pidfd,
            terminal: None,
            checkpointer: None,
            loading: None,
            paging: None,
            stopped: false,
            teller: None,
            within: None,
            init: false,
            requests: Requests::default(),
        }
    }

    /// The job gets the terminal whenever that is ours to give.
    pub fn with_terminal(self, terminal: Option<Foreground>) -> Self {
        Self { terminal, ..self }
    }

    /// We are process 1 of the job's pid namespace, or adopt what it leaves behind: its orphans become ours.
    pub fn with_orphans(mut self) -> Self {
        self.init = true;
        self
    }

    /// Stops of the job are told there: we are process 1 of a pid namespace, and cannot stop with it.
    pub fn with_teller(self, teller: PipeWriter) -> Self {
        Self { teller: Some(teller), ..self }
    }

    /// The child is process 1 of a pid namespace, which supervises the job there.
    pub fn with_within(self, within: Option<Rc<RefCell<dyn Within>>>) -> Self {
        Self { within, ..self }
    }

    /// This one takes the job's checkpoints.
    pub fn with_checkpointer(self, checkpointer: Option<Beside>) -> Self {
        Self { checkpointer, ..self }
    }

    /// Some of its memory is still being loaded.
    pub fn with_loading(self, loading: Option<Loading>) -> Self {
        Self { loading, ..self }
    }

    /// Its memory is kept within a limit.
    pub fn with_paging(self, paging: Option<Paging>) -> Self {
        Self { paging, ..self }
    }

    /// Passes signals and stops through until the job ends.
    pub fn watch(self) -> Result<End> {
        self.watch_requests().map(|(end, _)| end)
    }

    /// As [`Supervisor::watch`]; also tells what was asked of the job.
    pub fn watch_requests(mut self) -> Result<(End, Requests)> {
        self.give_terminal();
        loop {
            if let Some(end) = self.changes()? {
                if matches!(end, End::Killed(signal) if dumps_core(signal)) {
                    self.loading.iter_mut().for_each(|loading| loading.await_end(DUMPED));
                }
                self.loading.take().into_iter().for_each(Loading::finish);
                // What ended both of us at once is here by now.
                while let Some(signal) = self.signals.next()? {
                    self.requests.note(&signal);
                }
                if let Some(checkpointer) = self.checkpointer.take() {
                    checkpointer.finish(&self.signals, |signal| self.requests.note(signal));
                }
                return Ok((end, self.requests));
            }
            self.checkpointer.iter_mut().for_each(Beside::attend);
            self.loading.take_if(|l| !l.attend()).into_iter().for_each(Loading::finish);
            if let Some(loading) = &mut self.loading
                && loading.is_abandoned(&[self.pid])
            {
                loading.complain(ABANDONED);
                // It waits for ever.
                loading.kill_all((self.pid, self.pidfd.as_fd()));
            }
            let job = (self.pid, self.pidfd.as_fd());
            self.paging.iter_mut().for_each(|paging| paging.attend(job));
            if self.loading.as_ref().is_some_and(Loading::is_loaded) {
                // From now on it is the checkpointer's to follow what the job writes.
                self.checkpointer.iter_mut().for_each(Beside::start);
            }
            if self.init {
                let checkpointer = self.checkpointer.as_ref().and_then(Beside::pid);
                let loader = self.loading.as_ref().map(Loading::pid);
                let pager = self.paging.as_ref().map(Paging::pid);
                let ours = [checkpointer, loader, pager, Some(self.pid)];
                reap_orphans(&ours.into_iter().flatten().collect::<Vec<_>>())?;
            }
            let told = self.within.as_ref().map_or(Vec::new(), |within| within.borrow_mut().told());
            for told in told {
                match told {
                    Told::Continued => self.stopped = false,
                    Told::Stopped(signal) => {
                        self.stopped = true;
                        self.stop(signal);
                    }
                }
            }
            let within = self.within.as_ref().map(|within| within.borrow());
            let mut sources = vec![self.signals.as_fd(), self.pidfd.as_fd()];
            sources.extend(within.as_ref().map(|within| within.source()));
            sources.extend(self.loading.as_ref().and_then(Loading::source));
            sources.extend(self.checkpointer.as_ref().and_then(Beside::source));
            sources.extend(self.paging.as_ref().and_then(Paging::source));
            let periods = [
                self.loading.as_ref().and_then(Loading::period),
                self.paging.as_ref().and_then(Paging::period),
            ];
            wait_for(&sources, periods.into_iter().flatten().min())?;
            drop(within);
            while let Some(signal) = self.signals.next()? {
                self.requests.note(&signal);
                if is_for_job(&signal, self.pid, self.stopped) {
                    forward(self.pidfd.as_fd(), &signal)?;
                }
            }
        }
    }

    /// Takes note of what happened to the job; `Some` when it ended.
    fn changes(&mut self) -> Result<Option<End>> {
        while let Some(change) = wait(self.pidfd.as_fd())? {
            match change {
                Change::Exited(code) => return Ok(Some(End::Exited(code))),
                Change::Killed(signal) => return Ok(Some(End::Killed(signal))),
                Change::Continued => {
                    self.stopped = false;
                    self.tell(Told::Continued);
                }
                Change::Stopped(signal) => {
                    self.stopped = true;
                    self.stop(signal);
                }
            }
        }
        Ok(None)
    }

    /// Stops with the job, so that the shell takes the terminal and shows the job as stopped. A plain SIGSTOP was meant
    /// for the job alone: whoever sent it will continue it, and would not continue us.
    fn stop(&mut self, signal: i32) {
        if !matches!(signal, libc_signal::TSTP | libc_signal::TTIN | libc_signal::TTOU) {
            return;
        }
        if let Some(terminal) = &self.terminal {
            if signal != libc_signal::TSTP && terminal.is_given() {
                // It used the terminal in the moment before it was given to it.
                terminal.continue_group();
                return;
            }
            terminal.take_back();
        }
        if self.teller.is_some() {
            self.tell(Told::Stopped(signal));
            return;
        }
        // The job can be checkpointed while it is stopped, and we cannot see to it then.
        self.checkpointer.iter_mut().for_each(Beside::start);
        stop_like(signal);
        self.give_terminal();
    }

    /// Tells whoever is outside, if somebody is.
    fn tell(&mut self, told: Told) {
        let text = match told {
            Told::Stopped(signal) => format!("stopped {signal}\n"),
            Told::Continued => "continued\n".into(),
        };
        // Without him nobody supervises us either.
        let _ = self.teller.as_mut().map(|teller| teller.write_all(text.as_bytes()));
    }

    fn give_terminal(&self) {
        if let Some(terminal) = &self.terminal
            && terminal.give()
        {
            terminal.continue_group();
        }
    }
}

/// Whether a process that a signal ends leaves a core dump, if it may. `signal(7)`.
fn dumps_core(signal: i32) -> bool {
    use Signal as S;
    let dumping = [S::QUIT, S::ILL, S::TRAP, S::ABORT, S::BUS, S::FPE, S::SEGV, S::XCPU, S::XFSZ, S::SYS];
    dumping.iter().any(|dumping| dumping.as_raw() == signal)
}

/// Whether a job that is process `pid` has not got this signal already.
pub fn is_for_job(signal: &Received, pid: u32, is_stopped: bool) -> bool {
    match signal.signal {
        libc_signal::CHLD => false,
        // The shell continues the whole group; a second SIGCONT would run the job's handler twice.
        libc_signal::CONT => is_stopped,
        _ if signal.sender == pid => false, // it signalled its own group, or its parent
        _ => !(signal.from_kernel && in_our_group(pid)),
    }
}

/// Whether what the terminal sends to our process group has reached a job already.
fn in_our_group(pid: u32) -> bool {
    relations(pid).zip(relations(std::process::id())).is_none_or(|(job, ours)| job.pgrp == ours.pgrp)
}

/// Stops us, if this is the terminal's Ctrl-Z.
pub fn stop_at(signal: &Received) {
    if signal.from_kernel && signal.signal == libc_signal::TSTP {
        stop_like(signal.signal);
    }
}

/// Signal numbers, named as in signal(7).
mod libc_signal {
    use rustix::process::Signal;
    pub const CHLD: i32 = Signal::CHILD.as_raw();
    pub const CONT: i32 = Signal::CONT.as_raw();
    pub const TERM: i32 = Signal::TERM.as_raw();
    pub const TSTP: i32 = Signal::TSTP.as_raw();
    pub const TTIN: i32 = Signal::TTIN.as_raw();
    pub const TTOU: i32 = Signal::TTOU.as_raw();
}

/// Process group and session of a process. A group that was made outside our pid namespace is called 0 here (a first
/// process that did not make one of its own is in such a group), and so is a session.
fn relations(pid: u32) -> Option<Stat> {
    Proc::process(pid).and_then(|p| p.stat()).ok()
}

/// The foreground of our terminal, lent to the process group of the job; it comes back on drop. All signals are
/// blocked, SIGTTOU among them, so that a background process may do this too (tcsetpgrp(3)).
#[derive(Debug)]
pub struct Foreground {
    terminal: OwnedFd,
    group: Pid,
    ours: Pid,
    /// Who gets it the first time.
    first: Cell<Option<Pid>>,
}

impl Foreground {
    /// That of a job, if it leads a process group of its own in our session; at first another group of it is in front,
    /// `in_front`, if there is one. Nothing if a group has no name here.
    pub fn of(job: u32, in_front: Option<u32>) -> Option<Self> {
        let (job, ours) = (relations(job)?, relations(std::process::id())?);
        if job.session != ours.session || job.pgrp == ours.pgrp {
            return None;
        }
        let named = |group: u32| Pid::from_raw(group as i32);
        let (group, ours) = (named(job.pgrp)?, named(ours.pgrp)?);
        let first = Cell::new(in_front.and_then(named));
        Some(Self { terminal: crate::terminal::controlling()?, group, ours, first })
    }

    /// Gives the foreground to the job if we have it. A job that comes back gets it before it runs: a shell that is not in
    /// front and reads takes its terminal for gone.
    pub fn give(&self) -> bool {
        let ours_to_give = rustix::termios::tcgetpgrp(&self.terminal) == Ok(self.ours);
        let group = self.first.take().unwrap_or(self.group);
        ours_to_give && rustix::termios::tcsetpgrp(&self.terminal, group).is_ok()
    }

    fn is_given(&self) -> bool {
        rustix::termios::tcgetpgrp(&self.terminal) == Ok(self.group)
    }

    fn take_back(&self) {
        if self.is_given() {
            let _ = rustix::termios::tcsetpgrp(&self.terminal, self.ours); // fails once the terminal hung up
        }
    }

    fn continue_group(&self) {
        let _ = rustix::process::kill_process_group(self.group, rustix::process::Signal::CONT);
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        // The job has ended. If a group of its children is in front and has ended too, nobody else takes the terminal
        // back; a group that lives is the shell's affair: we may have been put in the background.
        let front = rustix::termios::tcgetpgrp(&self.terminal);
        let vanished = |g| rustix::process::test_kill_process_group(g) == Err(rustix::io::Errno::SRCH);
        if self.is_given() || front.is_ok_and(vanished) {
            let _ = rustix::termios::tcsetpgrp(&self.terminal, self.ours);
        }
    }
}

/// Whether the foreground of our terminal is ours to give.
pub fn is_in_front() -> bool {
    let front = crate::terminal::controlling().and_then(|terminal| rustix::termios::tcgetpgrp(terminal).ok());
    front == Some(rustix::process::getpgrp())
}

/// Gives the foreground of our terminal to the process group of a job in our session, where those outside of our pid
/// namespace who have it, and get it back, have no names.
pub fn bring_to_front(job: u32, in_front: Option<u32>) {
    let (Some(job), Some(ours)) = (relations(job), relations(std::process::id())) else { return };
    let group = in_front.unwrap_or(job.pgrp);
    if job.session != ours.session || job.pgrp == ours.pgrp {
        return;
    }
    if let (Some(terminal), Some(group)) = (crate::terminal::controlling(), Pid::from_raw(group as i32)) {
        let _ = rustix::termios::tcsetpgrp(terminal, group); // it may have hung up
    }
}

/// Ends this process when a signal asks for it, or when the command in front has gone, for as long as it lives: while a
/// program is being brought back there is nobody to pass signals to.
#[derive(Debug)]
pub struct GiveUp {
    stop: PipeWriter,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl GiveUp {
    /// Watches in a thread of its own.
    pub fn watch(signals: &Signals, relay: Option<BorrowedFd<'_>>) -> Result<Self> {
        let failed = |e: std::io::Error| Failure::failed(format!("cannot watch for signals: {e}"));
        let (stopped, stop) = std::io::pipe().map_err(failed)?;
        let signals = signals.try_clone()?;
        let relay = relay.map(|r| r.try_clone_to_owned()).transpose().map_err(failed)?;
        let work = move || give_up(&signals, &stopped, relay.as_ref());
        let thread = std::thread::Builder::new().name("signals".into()).spawn(work).map_err(failed)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for GiveUp {
    fn drop(&mut self) {
        let _ = self.stop.write_all(b"."); // its reader is ours, and waits
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn give_up(signals: &Signals, stopped: &PipeReader, relay: Option<&OwnedFd>) {
    loop {
        let mut polled = vec![
            PollFd::new(stopped, PollFlags::IN),
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
        ];
        // Nothing is asked of the relay; that its reader has gone is told unasked.
        polled.extend(relay.map(|r| PollFd::new(r, PollFlags::empty())));
        let _ = poll(&mut polled, None);
        let told: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
        if told[0] {
            return;
        }
        if told.get(2) == Some(&true) {
            std::process::exit(crate::failure::FAILED.into());
        }
        while let Ok(Some(signal)) = signals.next() {
            if signal.would_end_us() {
                die_of(signal.signal);
            }
        }
    }
}

/// Waits until one of the sources has something, or for a period.
pub fn wait_for(sources: &[BorrowedFd<'_>], period: Option<Duration>) -> Result<()> {
    let mut polled: Vec<PollFd<'_>> =
        sources.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let period = period.and_then(|p| Timespec::try_from(p).ok());
    match poll(&mut polled, period.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Failure::failed(format!("poll: {e}"))),
    }
}

/// Lets go of what belongs to the job: a pipe whose other end waits for the job to close it must not stay open because
/// we hold it too.
pub fn let_go() -> Result<()> {
    let null = descriptors::null()?;
    let failed = |e| Failure::failed(format!("dup2: {e}"));
    rustix::stdio::dup2_stdin(&null).map_err(failed)?;
    rustix::stdio::dup2_stdout(&null).map_err(failed)?;
    rustix::stdio::dup2_stderr(&null).map_err(failed)?;
    Ok(drop_inherited()?)
}
