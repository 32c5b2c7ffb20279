//! Bringing all threads of a process to rest, and letting them go.
//!
//! Everything here must happen on one OS thread, the tracer; when that thread ends, the kernel lets go of whatever
//! it still traces. A checkpoint therefore runs on a thread of its own.

use crate::attributes::target;
use crate::{Error, Refusal, Result};
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use stillpoint_linux::cgroups::{self, Group};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::ptrace::{Ended, Seized, Stop, Stopped, Waited, options};
use stillpoint_linux::sched::{self, SchedAttr};

/// How long a thread may stay in an uninterruptible sleep before a checkpoint gives up.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a thread is waited for without sleeping between looks.
const EAGER: Duration = Duration::from_millis(3);

/// A process whose threads all stand still. Dropping it lets them go.
#[derive(Debug)]
pub struct Frozen {
    /// Process id in our namespace.
    pub pid: u32,
    /// Its threads, the leader first.
    pub threads: Vec<Stopped>,
    /// When the first thread was asked to stop.
    pub since: Instant,
}

impl Frozen {
    /// Stops all threads of a process. On failure none stays stopped.
    pub fn freeze(process: &Arc<Proc>) -> Result<Self> {
        refuse_frozen(process)?;
        let mut stopping = Stopping::begin(process)?;
        let mut wait = Wait::new();
        while !stopping.advance(&wait)? {
            wait.a_little();
        }
        stopping.frozen()
    }

    /// The signal by which job control had stopped the process, if it had.
    pub fn stopped_by(&self) -> Option<u32> {
        match self.threads[0].stop() {
            Stop::Group(signal) => Some(signal as u32),
            _ => None,
        }
    }

    /// These threads are the first ones to be let go.
    pub fn let_go_first(&mut self, tids: &[u32]) {
        // The last one goes first.
        self.threads.sort_by_key(|thread| tids.contains(&thread.tid()));
    }

    /// Lets all threads run on; returns how long the process stood still. A thread that has been killed meanwhile
    /// is no failure.
    pub fn thaw(mut self) -> Duration {
        self.release();
        self.since.elapsed()
    }

    /// Lets all threads go; returns those that were killed, of which [`see_ends`] is to see the ends.
    pub(crate) fn let_go(&mut self) -> Vec<u32> {
        let tids = self.threads.drain(..).rev().map(|thread| (thread.tid(), thread.detach()));
        // The only error is that it was killed.
        tids.filter(|(_, detached)| detached.is_err()).map(|(tid, _)| tid).collect()
    }

    fn release(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        let killed = self.let_go();
        see_ends(killed, PATIENCE);
    }
}

/// Sees threads end that were killed, as we, who trace them, must before anyone else.
///
/// That of a main thread is seen when those of the others have been, and that of process 1 of a pid namespace when those of all in it
/// have been. What takes too long is seen when we, the thread that traces, end.
pub(crate) fn see_ends(killed: Vec<u32>, patience: Duration) {
    let start = Instant::now();
    let mut left: Vec<Seized> = killed.into_iter().map(Seized::born).collect();
    let mut last = start;
    while !left.is_empty() && start.elapsed() < patience {
        let before = left.len();
        left = left.into_iter().filter_map(|thread| thread.poll().ok()?.err()).collect();
        if left.len() < before {
            last = Instant::now();
        } else if last.elapsed() > BURIAL && left.iter().all(|thread| waits_for_burials(thread.tid())) {
            return;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// How long those in a pid namespace may take to be buried by others than us, when we have seen their ends.
pub(crate) const BURIAL: Duration = Duration::from_millis(100);

/// Whether a process that was killed is process 1 of a pid namespace below ours: it ends when all in it have been buried, some of
/// them perhaps by somebody outside who takes his time.
pub(crate) fn waits_for_burials(pid: u32) -> bool {
    let status = Proc::process(pid).and_then(|p| p.status());
    status.is_ok_and(|status| status.ns_tgid.len() > 1 && status.own_pid() == 1 && status.state != b'Z')
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.release();
    }
}

/// Of a thread that does not come to rest: why.
fn restless(pid: u32, tid: u32) -> Error {
    let thread = Proc::thread(pid, tid);
    let state = thread.as_ref().ok().and_then(|thread| Some(thread.stat().ok()?.state));
    let place = thread.and_then(|thread| thread.wchan()).unwrap_or_default();
    let why = match state {
        Some(b'R') => "it gets no processor for long; try again when the machine is less busy".into(),
        _ => format!(
            "it is in an uninterruptible wait in the kernel ({}); try again when its device or file system answers",
            if place.is_empty() { "?".into() } else { String::from_utf8_lossy(&place) }
        ),
    };
    Error::Failed(format!("thread {tid} does not come to rest: {why}"))
}

/// While it lives, the calling thread (and those that it starts) comes before others: where processors are few, a
/// program that stands still should not wait for those that do not. Needs `CAP_SYS_NICE`, and does nothing without.
#[derive(Debug)]
pub struct Hurry {
    before: Option<SchedAttr>,
}

impl Hurry {
    /// From now on.
    pub fn begin() -> Self {
        const FIRST: i32 = -20;
        let before = sched::attributes(0).ok();
        let hurried = before.filter(|b| sched::set_attributes(0, &SchedAttr { nice: FIRST, ..*b }).is_ok());
        Hurry { before: hurried }
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        // It was allowed to be less in a hurry before.
        let _ = self.before.map(|before| sched::set_attributes(0, &before));
    }
}

/// Refuses a process that a control group holds frozen (`docker pause`): it would make no call for us before somebody thaws it, and
/// whoever waits for it would wait as long. Before anything is stopped, as it takes a while to find out.
pub(crate) fn refuse_frozen(process: &Proc) -> Result<()> {
    static MOUNTS: OnceLock<String> = OnceLock::new();
    let mounts = MOUNTS.get_or_init(|| cgroups::mounts().unwrap_or_default());
    let lines = process.cgroup().unwrap_or_default();
    let freezes =
        |controllers: &str| controllers.is_empty() || controllers.split(',').any(|c| c == "freezer");
    let groups = lines.iter().filter_map(|line| cgroups::parse(line)).filter(|(of, _)| freezes(of));
    let mut found = groups.filter_map(|(of, path)| Group::find(of, path, mounts));
    let Some(group) = found.find(Group::is_frozen) else { return Ok(()) };
    Err(Error::Refused(vec![Refusal {
        what: target::named(process.pid()),
        why: format!("its control group {} is frozen", group.folder.display()),
        hint: "thaw it first".into(),
    }]))
}

/// Seizes the threads that are not yet known.
fn seize_new(process: &Proc, known: &mut HashSet<u32>, seized: &mut Vec<Seized>) -> Result<()> {
    let pid = process.pid();
    let ended = || Error::Target(format!("process {pid} ended"));
    for tid in process.threads().map_err(|_| ended())? {
        if !known.insert(tid) {
            continue;
        }
        match seize(process, tid) {
            Ok(thread) => seized.push(thread),
            Err(Error::Kernel(stillpoint_linux::Error::Gone(_))) => {}
            Err(_) if is_ending(process, tid) && tid != pid => {}
            Err(_) if is_ending(process, tid) && is_replaced_by_exec(process) => return Err(Error::Replaced),
            Err(_) if is_ending(process, tid) => return Err(ended()),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Seizes a thread. Whoever traced it may have let go of it between our attempt and the look who that is. That may be
/// ourselves: one that is killed while it stands still cannot be let go of, and stays ours until it has ended.
fn seize(process: &Proc, tid: u32) -> Result<Seized> {
    const TRIES: usize = 20;
    let mut tries = 0;
    loop {
        let error = match Seized::seize(tid, options::SYSCALL_GOOD) {
            Err(e) if e.errno() == Some(libc::EPERM) && !is_ending(process, tid) => e,
            other => return Ok(other?),
        };
        if let Some(traced) = target::tracer(process, tid).filter(|_| !is_ours(process, tid)) {
            return Err(traced);
        }
        tries += 1;
        if tries == TRIES {
            // Of an earlier try, from which it has not come to rest so far that it could be let go.
            return Err(if is_ours(process, tid) { restless(process.pid(), tid) } else { error.into() });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a thread of ours traces it.
fn is_ours(process: &Proc, tid: u32) -> bool {
    let tracer = process.sibling(tid).and_then(|t| t.status()).map_or(0, |s| s.tracer);
    Proc::thread(std::process::id(), tracer).is_ok()
}

/// Whether it has ended, or is ending, or has been killed.
fn is_ending(process: &Proc, tid: u32) -> bool {
    let look = process.sibling(tid).and_then(|t| Ok((t.stat()?, t.status()?)));
    look.map_or(true, |(stat, status)| stat.ends() || target::is_killed(&status))
}

/// Whether a main thread that had ended is alive again after a moment: another thread has become it by `execve(2)`.
fn is_replaced_by_exec(process: &Proc) -> bool {
    (0..20).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        !is_ending(process, process.pid())
    })
}

/// Waiting for threads to come to rest.
pub(crate) struct Wait {
    since: Instant,
}

impl Wait {
    pub fn new() -> Self {
        Wait { since: Instant::now() }
    }

    /// How long it has taken.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Between two looks.
    pub fn a_little(&mut self) {
        if self.elapsed() > EAGER {
            std::thread::sleep(Duration::from_micros(200));
        } else {
            std::thread::yield_now();
        }
    }
}

/// A process on its way to rest.
///
/// 1. All threads in `/proc/PID/task` are seized, which does not stop them.
/// 2. All are interrupted; only then is any waited for, so that they come to rest at the same time.
/// 3. A thread that was not yet interrupted may have made new ones: again from 1 until there are none.
///
/// A thread that replaces the program by another (`execve(2)`) ends all others first:
///
/// 1. The kernel kills the others and waits for their ends. Of those that we trace, also of those that stand still already,
///    somebody must have waited before they count as ended.
/// 2. It becomes the main thread: its own id is gone, and its interrupt brings the *main* thread's id to rest.
///
/// Dropping it lets all threads go: whoever traces may live on, and trace others.
pub(crate) struct Stopping {
    process: Arc<Proc>,
    known: HashSet<u32>,
    running: Vec<Seized>,
    stopped: Vec<Stopped>,
    since: Instant,
    rests: bool,
}

impl Stopping {
    /// Interrupts all threads.
    pub fn begin(process: &Arc<Proc>) -> Result<Self> {
        let mut stopping = Stopping {
            process: process.clone(),
            known: HashSet::new(),
            running: Vec::new(),
            stopped: Vec::new(),
            since: Instant::now(),
            rests: false,
        };
        seize_new(process, &mut stopping.known, &mut stopping.running)?;
        stopping.since = Instant::now();
        interrupt(&stopping.running)?;
        Ok(stopping)
    }

    /// Its process has ended: there is nothing to be let go.
    pub fn has_ended(mut self) {
        self.running.clear();
        self.stopped.clear();
    }

    /// The process.
    pub fn process(&self) -> &Proc {
        &self.process
    }

    /// Whether all its threads rest.
    pub fn rests(&self) -> bool {
        self.rests
    }

    /// Its threads that do, by their ids.
    pub fn at_rest(&self) -> Vec<u32> {
        self.stopped.iter().map(Stopped::tid).collect()
    }

    /// When its first thread was asked to stop.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Looks at those that still run; whether all rest now.
    pub fn advance(&mut self, wait: &Wait) -> Result<bool> {
        if self.rests {
            return Ok(true);
        }
        let pid = self.process.pid();
        for thread in std::mem::take(&mut self.running) {
            let tid = thread.tid();
            match look(thread)? {
                Look::Rests(thread) => self.stopped.push(thread),
                Look::Runs(thread) => self.running.push(thread),
                Look::Ended(Ended::Unknown) if tid != pid => {
                    self.stopped.retain(|t| t.tid() != pid);
                    self.running.retain(|t: &Seized| t.tid() != pid);
                    self.running.push(Seized::born(pid));
                }
                Look::Ended(_) => {}
            }
        }
        if self.running.is_empty() {
            seize_new(&self.process, &mut self.known, &mut self.running)?;
            self.rests = self.running.is_empty();
            interrupt(&self.running)?;
        }
        if let Some(first) = self.running.first().filter(|_| wait.elapsed() > PATIENCE) {
            return Err(restless(pid, first.tid()));
        }
        if !self.rests && wait.elapsed() > EAGER {
            self.stopped = without_ended(std::mem::take(&mut self.stopped))?;
        }
        Ok(self.rests)
    }

    /// The process, at rest.
    pub fn frozen(mut self) -> Result<Frozen> {
        let pid = self.process.pid();
        self.stopped.sort_by_key(|t| (t.tid() != pid, t.tid()));
        if self.stopped.first().map(Stopped::tid) != Some(pid) {
            if is_replaced_by_exec(&self.process) {
                return Err(Error::Replaced);
            }
            return Err(Error::Target(format!("process {pid} ended while it was being stopped")));
        }
        Ok(Frozen { pid, threads: std::mem::take(&mut self.stopped), since: self.since })
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        call_off(std::slice::from_mut(self));
    }
}

thread_local! {
    static KEEPS_SOMEBODY: Cell<bool> = const { Cell::new(false) };
}

/// Whether this OS thread still traces somebody whom it could not let go, because he does not come to rest: he would stop when
/// he does, and run on only when this thread ends.
pub fn keeps_somebody() -> bool {
    KEEPS_SOMEBODY.get()
}

/// Lets go of processes that were not all brought to rest: of all together, as some may rest only when others run. A thread can be let
/// go when it has stopped.
pub(crate) fn call_off(stopping: &mut [Stopping]) {
    const PATIENCE: Duration = Duration::from_secs(1);
    for process in &*stopping {
        // Those that were seized and not yet asked to.
        let _ = interrupt(&process.running);
    }
    let mut wait = Wait::new();
    loop {
        for process in &mut *stopping {
            for thread in std::mem::take(&mut process.running) {
                match look(thread) {
                    Ok(Look::Rests(thread)) => process.stopped.push(thread),
                    Ok(Look::Runs(thread)) => process.running.push(thread),
                    Ok(Look::Ended(_)) | Err(_) => {}
                }
            }
            for thread in process.stopped.drain(..) {
                let tid = thread.tid();
                if thread.detach().is_err() {
                    process.running.push(Seized::born(tid)); // It was killed: we see its end, as nobody else can before.
                }
            }
        }
        let left = stopping.iter().any(|process| !process.running.is_empty());
        if !left || wait.elapsed() > PATIENCE {
            KEEPS_SOMEBODY.set(KEEPS_SOMEBODY.get() || left);
            stopping.iter_mut().for_each(|process| process.running.clear());
            return;
        }
        wait.a_little();
    }
}

fn interrupt(threads: &[Seized]) -> Result<()> {
    for thread in threads {
        match thread.interrupt() {
            Ok(()) | Err(stillpoint_linux::Error::Gone(_)) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Sees the ends of threads that were killed since they stopped.
fn without_ended(stopped: Vec<Stopped>) -> Result<Vec<Stopped>> {
    let mut left = Vec::with_capacity(stopped.len());
    for thread in stopped {
        match Seized::born(thread.tid()).poll()? {
            Ok(Waited::Ended(_)) => {}
            Ok(Waited::Stopped(again)) => left.push(again),
            Err(_) => left.push(thread),
        }
    }
    Ok(left)
}

/// What a look at an interrupted thread shows.
enum Look {
    Rests(Stopped),
    Runs(Seized),
    Ended(Ended),
}

/// Looks at an interrupted thread. A signal that reaches it first is delivered: the interrupt is still to come.
fn look(mut thread: Seized) -> Result<Look> {
    loop {
        match thread.poll()? {
            Ok(Waited::Ended(how)) => return Ok(Look::Ended(how)),
            Ok(Waited::Stopped(s)) => match s.stop() {
                Stop::Signal(signal) => thread = s.resume(signal)?,
                Stop::Interrupt | Stop::Group(_) => return Ok(Look::Rests(s)),
                _ => thread = s.resume(0)?,
            },
            Err(running) => return Ok(Look::Runs(running)),
        }
    }
}
