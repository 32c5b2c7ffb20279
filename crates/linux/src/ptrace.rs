//! Threads under ptrace: seized and running, or stopped. `ptrace(2)`.
//!
//! The state is in the type: only a [`Stopped`] thread has registers. When a tracer dies the kernel lets its tracees
//! run on from wherever they stand, so nothing here is ever done to a thread that it could not run on from.
//! All calls for one thread must come from the OS thread that seized it; the types are therefore not `Send`.

use crate::arch::Regs;
use crate::dispatch::{self, Dispatch};
use crate::proc::Proc;
use crate::spawn::tgkill;
use crate::{Error, RemoteAddr, Result};
use linux_raw_sys::ptrace::{
    PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG,
};
use rustix::io::Errno;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a thread is waited for without sleeping.
const EAGER: Duration = Duration::from_micros(100);
/// A thread with a stop signal that has not taken it for so long has none any more.
const CONTINUED: Duration = Duration::from_secs(1);
/// After so long it is looked whether it can come at all.
const SUSPICIOUS: Duration = Duration::from_millis(20);

/// Options a thread is seized with, and further ones that can be set later.
pub mod options {
    /// Tell stops at system calls from real `SIGTRAP`s.
    pub const SYSCALL_GOOD: usize = libc::PTRACE_O_TRACESYSGOOD as usize;
    /// Trace threads and processes that the thread makes; they start stopped.
    pub const TRACE_CLONE: usize = libc::PTRACE_O_TRACECLONE as usize;
    /// Trace processes that the thread forks; they start stopped.
    pub const TRACE_FORK: usize = libc::PTRACE_O_TRACEFORK as usize;
    /// Kill the thread when the tracer dies.
    pub const EXIT_KILL: usize = libc::PTRACE_O_EXITKILL as usize;
    /// Seccomp filters do not apply while the tracer lives (`CAP_SYS_ADMIN`).
    pub const SUSPEND_SECCOMP: usize = libc::PTRACE_O_SUSPEND_SECCOMP as usize;
}

/// Does work on a thread of its own, and waits until the kernel, too, has done with that thread: what it still traced runs on then, and
/// somebody else may trace it. Who has only joined it may come before that: the kernel wakes him, and lets go behind that (`mm_release`
/// and `exit_notify`), on a busy machine seconds later.
///
/// # Errors
/// What the work has panicked with.
pub fn on_a_thread_of_its_own<T: Send>(work: impl FnOnce() -> T + Send) -> std::thread::Result<T> {
    const PATIENCE: Duration = Duration::from_secs(60);
    let own = AtomicU32::new(0);
    let done = std::thread::scope(|scope| {
        let begin = || {
            own.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Relaxed);
            work()
        };
        scope.spawn(begin).join()
    });
    let (own, us, joined) = (own.into_inner(), std::process::id(), Instant::now());
    while own != 0 && tgkill(us, own, 0).is_ok() && joined.elapsed() < PATIENCE {
        match joined.elapsed() < EAGER {
            true => std::thread::yield_now(),
            false => std::thread::sleep(EAGER),
        }
    }
    done
}

/// How a traced thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// `exit(code)`.
    Exited(i32),
    /// Killed by a signal.
    Killed(i32),
    /// It is gone and someone else saw how (or it became the leader by `exec`).
    Unknown,
}

/// Why a thread stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It followed [`Seized::interrupt`], or was just created by a traced thread.
    Interrupt,
    /// Job control stopped it with this signal.
    Group(i32),
    /// A signal is about to be delivered.
    Signal(i32),
    /// Entry to or exit from a system call ([`Stopped::resume_to_call`]).
    Call,
    /// It made a thread or process.
    Clone,
    /// Some other event of ptrace, by its number.
    Event(i32),
}

/// A traced thread that runs (or is about to stop by itself).
#[derive(Debug)]
pub struct Seized {
    tid: u32,
    not_send: PhantomData<*const ()>,
}

/// A traced thread that stands still.
#[derive(Debug)]
pub struct Stopped {
    tid: u32,
    stop: Stop,
    not_send: PhantomData<*const ()>,
}

/// What waiting for a thread brought.
#[derive(Debug)]
pub enum Waited {
    /// It stopped.
    Stopped(Stopped),
    /// It is no more.
    Ended(Ended),
}

impl Waited {
    /// The stopped thread; an error if it is no more.
    pub fn stopped(self, tid: u32) -> Result<Stopped> {
        match self {
            Waited::Stopped(s) => Ok(s),
            Waited::Ended(_) => Err(Error::Gone(tid)),
        }
    }
}

fn ptrace(request: u32, tid: u32, addr: usize, data: usize) -> Result<i64, Errno> {
    // SAFETY: every caller in this file passes, for the request it names, either plain numbers or pointers to memory
    // of ours that the kernel may read or write to the length the request implies (ptrace(2)).
    let r = unsafe { libc::ptrace(request as _, tid as libc::pid_t, addr, data) };
    if r == -1 {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    } else {
        Ok(r)
    }
}

fn failed(what: &str, tid: u32, e: Errno) -> Error {
    if e == Errno::SRCH { Error::Gone(tid) } else { Error::call(format!("{what} thread {tid}"), e) }
}

impl Seized {
    /// Attaches to a thread without stopping it (`PTRACE_SEIZE`) with [`options`].
    pub fn seize(tid: u32, options: usize) -> Result<Self> {
        ptrace(libc::PTRACE_SEIZE, tid, 0, options).map_err(|e| failed("attach to", tid, e))?;
        Ok(Seized { tid, not_send: PhantomData })
    }

    /// A thread that tracing made ours at its birth ([`options::TRACE_CLONE`]).
    pub fn born(tid: u32) -> Self {
        Seized { tid, not_send: PhantomData }
    }

    /// Thread id in our pid namespace.
    pub fn tid(&self) -> u32 {
        self.tid
    }

    /// Asks it to stop, and returns at once (`PTRACE_INTERRUPT`).
    pub fn interrupt(&self) -> Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0).map(drop).map_err(|e| failed("interrupt", self.tid, e))
    }

    /// Waits until it stops or ends.
    pub fn wait(self) -> Result<Waited> {
        // Most are back in less time than it takes to fall asleep and to be woken on another processor.
        let began = Instant::now();
        let mut others = None;
        loop {
            if let Some(waited) = wait(self.tid, libc::WNOHANG)? {
                return Ok(waited);
            }
            let waited_for = began.elapsed();
            if waited_for < EAGER {
                std::thread::yield_now();
            } else if !*others.get_or_insert_with(|| has_others(self.tid)) {
                // Nobody keeps its end back.
                let waited = wait(self.tid, 0)?;
                return waited.ok_or_else(|| Error::Other(format!("thread {}: no wait", self.tid)));
            } else if waited_for > SUSPICIOUS && is_dead(self.tid) {
                // 1. Somebody kills the process: all of its threads end. 2. The end of the main thread is told when no other one is
                // left (`delay_group_leader`). 3. They are, as long as whoever traces them has not heard of their ends. And that
                // is us, waiting for the main thread.
                let waited = wait(self.tid, libc::WNOHANG)?;
                return Ok(waited.unwrap_or(Waited::Ended(Ended::Unknown)));
            } else {
                std::thread::sleep((waited_for / 8).min(Duration::from_millis(2)));
            }
        }
    }

    /// Waits until it stops or ends, or for so long; gives it back if it still runs then.
    fn wait_for(self, most: Duration) -> Result<Result<Waited, Self>> {
        let (mut running, began) = (self, Instant::now());
        loop {
            running = match running.poll()? {
                Err(running) if began.elapsed() < most => running,
                done => return Ok(done),
            };
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Looks whether it has stopped or ended; gives it back if it still runs.
    pub fn poll(self) -> Result<Result<Waited, Self>> {
        Ok(wait(self.tid, libc::WNOHANG)?.ok_or(self))
    }
}

/// Whether a thread is not alone in its process, as far as that can be told.
fn has_others(tid: u32) -> bool {
    Proc::process(tid).and_then(|process| process.threads()).is_ok_and(|threads| threads.len() > 1)
}

/// Whether a thread has ended, told or not.
fn is_dead(tid: u32) -> bool {
    Proc::process(tid)
        .and_then(|process| process.stat())
        .map_or(true, |stat| matches!(stat.state, b'Z' | b'X'))
}

/// The one place that waits for tracees.
fn wait(tid: u32, flags: i32) -> Result<Option<Waited>> {
    let mut status = 0;
    loop {
        // SAFETY: `status` outlives the call.
        let r = unsafe { libc::waitpid(tid as libc::pid_t, &mut status, libc::__WALL | flags) };
        if r == 0 {
            return Ok(None);
        }
        if r > 0 {
            return Ok(Some(classify(tid, status)));
        }
        let e = std::io::Error::last_os_error();
        match e.raw_os_error() {
            Some(libc::EINTR) => continue,
            Some(libc::ECHILD) => return Ok(Some(Waited::Ended(Ended::Unknown))),
            _ => return Err(Error::call(format!("wait for thread {tid}"), e)),
        }
    }
}

fn classify(tid: u32, status: i32) -> Waited {
    if libc::WIFEXITED(status) {
        return Waited::Ended(Ended::Exited(libc::WEXITSTATUS(status)));
    }
    if libc::WIFSIGNALED(status) {
        return Waited::Ended(Ended::Killed(libc::WTERMSIG(status)));
    }
    let signal = libc::WSTOPSIG(status);
    let stop = match status >> 16 {
        libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupt,
        libc::PTRACE_EVENT_STOP => Stop::Group(signal),
        libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK => Stop::Clone,
        0 if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        0 => Stop::Signal(signal),
        event => Stop::Event(event),
    };
    Waited::Stopped(Stopped { tid, stop, not_send: PhantomData })
}

impl Stopped {
    /// Thread id in our pid namespace.
    pub fn tid(&self) -> u32 {
        self.tid
    }

    /// Why it stopped.
    pub fn stop(&self) -> Stop {
        self.stop
    }

    /// General registers.
    pub fn regs(&self) -> Result<Regs> {
        let mut regs = Regs::default();
        let mut iov = libc::iovec { iov_base: (&raw mut regs).cast(), iov_len: size_of::<Regs>() };
        self.regset(libc::PTRACE_GETREGSET, libc::NT_PRSTATUS as usize, &mut iov)?;
        Ok(regs)
    }

    /// Sets the general registers.
    pub fn set_regs(&self, regs: &Regs) -> Result<()> {
        let mut regs = *regs;
        let mut iov = libc::iovec { iov_base: (&raw mut regs).cast(), iov_len: size_of::<Regs>() };
        self.regset(libc::PTRACE_SETREGSET, libc::NT_PRSTATUS as usize, &mut iov)
    }

    /// Extended state in the standard XSAVE format.
    pub fn xstate(&self) -> Result<Vec<u8>> {
        let mut state: Vec<u8> = Vec::with_capacity(16 << 10);
        let mut iov = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.capacity() };
        self.regset(libc::PTRACE_GETREGSET, NT_X86_XSTATE, &mut iov)?;
        // SAFETY: the kernel has written `iov_len` bytes, which it only ever makes less.
        unsafe { state.set_len(iov.iov_len) };
        state.shrink_to_fit();
        Ok(state)
    }

    /// Sets the extended state.
    pub fn set_xstate(&self, state: &[u8]) -> Result<()> {
        let mut state = state.to_vec();
        let mut iov = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
        self.regset(libc::PTRACE_SETREGSET, NT_X86_XSTATE, &mut iov)
    }

    fn regset(&self, request: u32, set: usize, iov: &mut libc::iovec) -> Result<()> {
        let r = ptrace(request, self.tid, set, (&raw mut *iov) as usize);
        r.map(drop).map_err(|e| failed("registers of", self.tid, e))
    }

    /// Blocked signals; the mask to return to if a call replaced it for its duration.
    pub fn sigmask(&self) -> Result<u64> {
        let mut mask = 0u64;
        ptrace(libc::PTRACE_GETSIGMASK, self.tid, 8, (&raw mut mask) as usize)
            .map_err(|e| failed("signal mask of", self.tid, e))?;
        Ok(mask)
    }

    /// Sets the blocked signals.
    pub fn set_sigmask(&self, mask: u64) -> Result<()> {
        let r = ptrace(libc::PTRACE_SETSIGMASK, self.tid, 8, (&raw const mask) as usize);
        r.map(drop).map_err(|e| failed("signal mask of", self.tid, e))
    }

    /// Signals that are pending, in queue order, as raw `siginfo_t`: those of the process or of this thread alone.
    pub fn pending(&self, of_process: bool) -> Result<Vec<[u8; 128]>> {
        let mut all = Vec::new();
        loop {
            let mut batch = [[0u8; 128]; 16];
            let args = libc::ptrace_peeksiginfo_args {
                off: all.len() as u64,
                flags: if of_process { 1 } else { 0 }, // PTRACE_PEEKSIGINFO_SHARED
                nr: batch.len() as i32,
            };
            let data = batch.as_mut_ptr() as usize;
            let n = ptrace(libc::PTRACE_PEEKSIGINFO, self.tid, (&raw const args) as usize, data)
                .map_err(|e| failed("pending signals of", self.tid, e))?;
            all.extend_from_slice(&batch[..n as usize]);
            if n == 0 {
                return Ok(all);
            }
        }
    }

    /// Registration of restartable sequences: address, size, signature, flags; address 0 if there is none.
    pub fn rseq(&self) -> Result<RseqConfiguration> {
        let mut c = RseqConfiguration::default();
        let (size, data) = (size_of::<RseqConfiguration>(), (&raw mut c) as usize);
        let r = ptrace(PTRACE_GET_RSEQ_CONFIGURATION, self.tid, size, data);
        r.map_err(|e| failed("restartable sequences of", self.tid, e))?;
        Ok(c)
    }

    /// One classic BPF program of the thread's seccomp filters, `index` 0 being the oldest, as 8-byte instructions;
    /// `None` behind the last one.
    pub fn seccomp_filter(&self, index: usize) -> Result<Option<Vec<u8>>> {
        let read = |data: usize| match ptrace(PTRACE_SECCOMP_GET_FILTER, self.tid, index, data) {
            Ok(n) => Ok(Some(n as usize)),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(failed("seccomp filter of", self.tid, e)),
        };
        let Some(n) = read(0)? else { return Ok(None) };
        let mut program = vec![0u8; n * 8];
        read(program.as_mut_ptr() as usize)?;
        Ok(Some(program))
    }

    /// How it dispatches its system calls to itself, if it does.
    pub fn dispatch(&self) -> Result<Option<Dispatch>> {
        let mut config = dispatch::off();
        let (size, data) = (size_of_val(&config), (&raw mut config) as usize);
        ptrace(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, self.tid, size, data)
            .map_err(|e| failed("system call dispatch of", self.tid, e))?;
        Ok(Dispatch::of_config(&config))
    }

    /// Sets how it dispatches its system calls to itself; it makes no call for that.
    pub fn set_dispatch(&self, dispatch: Option<Dispatch>) -> Result<()> {
        let config = dispatch.map_or_else(dispatch::off, |dispatch| dispatch.config());
        let (size, data) = (size_of_val(&config), (&raw const config) as usize);
        let r = ptrace(PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG, self.tid, size, data);
        r.map(drop).map_err(|e| failed("system call dispatch of", self.tid, e))
    }

    /// Sets [`options`].
    pub fn set_options(&self, options: usize) -> Result<()> {
        let r = ptrace(libc::PTRACE_SETOPTIONS, self.tid, 0, options);
        r.map(drop).map_err(|e| failed("set options of", self.tid, e))
    }

    /// Id of the thread or process it just made, at [`Stop::Clone`].
    pub fn event_message(&self) -> Result<u64> {
        let mut message = 0u64;
        ptrace(libc::PTRACE_GETEVENTMSG, self.tid, 0, (&raw mut message) as usize)
            .map_err(|e| failed("event of", self.tid, e))?;
        Ok(message)
    }

    /// Lets it run; delivers `signal` if that is not 0 and it is stopped at a signal.
    pub fn resume(self, signal: i32) -> Result<Seized> {
        self.restart(libc::PTRACE_CONT, signal)
    }

    /// Lets it run to the next entry to or exit from a system call.
    pub fn resume_to_call(self) -> Result<Seized> {
        self.restart(libc::PTRACE_SYSCALL, 0)
    }

    fn restart(self, request: u32, signal: i32) -> Result<Seized> {
        ptrace(request, self.tid, 0, signal as usize).map_err(|e| failed("resume", self.tid, e))?;
        Ok(Seized { tid: self.tid, not_send: PhantomData })
    }

    /// Asks for a stop before it runs its next instruction in user mode; takes effect when it is resumed.
    pub fn interrupt(&self) -> Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0).map(drop).map_err(|e| failed("interrupt", self.tid, e))
    }

    /// Stops the process of this thread by a stop signal that is its own, as job control does, while all of its other threads stand still:
    /// those stop, too, as soon as they are let go, or [`join_stop`](Stopped::join_stop). None of them takes a signal that is pending before, which this one is kept from by
    /// a mask; afterwards it has `mask`.
    ///
    /// 1. The first stop signal that a thread takes stops all of its process (`do_signal_stop`). 2. A thread that is to stop does so before
    ///    it takes a signal (`get_signal`). 3. One that is let go when it is stopped so stays that (`__ptrace_unlink`). 4. If somebody lets it
    ///    go on by `SIGCONT` in these microseconds, the signal is gone, and the thread runs: it is then left as one that was not stopped.
    ///
    /// # Errors
    /// [`Error::Gone`], or that of a call.
    pub fn stop_process(self, pid: u32, signal: i32, mask: u64) -> Result<Self> {
        self.set_sigmask(!(1 << (signal - 1)))?;
        crate::spawn::tgkill(pid, self.tid, signal)?;
        let stopped = self.take(signal, signal)?;
        stopped.set_sigmask(mask)?;
        Ok(stopped)
    }

    /// Has this thread, another one of a process that [`stop_process`](Stopped::stop_process) stops, stop with it. Its parent is told when the
    /// last one has.
    ///
    /// # Errors
    /// [`Error::Gone`], or that of a call.
    pub fn join_stop(self) -> Result<Self> {
        // If the stop has been ended meanwhile, it does not run, either.
        self.interrupt()?;
        let tid = self.tid;
        self.resume(0)?.wait()?.stopped(tid)
    }

    /// Has the process of this thread, all of whose threads have just stopped by job control, go on as by `SIGCONT`, of which its parent is
    /// told. The threads stand still, and none takes the signal; this one has `mask` afterwards.
    ///
    /// # Errors
    /// [`Error::Gone`], or that of a call.
    pub fn continue_process(self, pid: u32, mask: u64) -> Result<Self> {
        self.set_sigmask(!(1 << (libc::SIGCONT - 1)))?;
        crate::spawn::tgkill(pid, self.tid, libc::SIGCONT)?;
        // Its parent is told on the way (`get_signal`).
        let stopped = self.take(libc::SIGCONT, 0)?;
        stopped.set_sigmask(mask)?;
        Ok(stopped)
    }

    /// Has it come to a signal that is pending, if it still is, and go on to its next stop with `instead`.
    fn take(self, signal: i32, instead: i32) -> Result<Self> {
        let (tid, mut stopped) = (self.tid, self);
        while stopped.stop != Stop::Signal(signal) {
            stopped = match stopped.resume(0)?.wait_for(CONTINUED)? {
                Ok(waited) => waited.stopped(tid)?,
                Err(running) => {
                    running.interrupt()?;
                    return running.wait()?.stopped(tid);
                }
            };
        }
        // Where the kernel does not stop it for that (an orphaned process group), it does not run, either.
        stopped.interrupt()?;
        stopped.resume(instead)?.wait()?.stopped(tid)
    }

    /// The thread, which is about to be given a signal, without that signal.
    pub fn without_signal(self) -> Self {
        match self.stop {
            Stop::Signal(_) => Stopped { stop: Stop::Interrupt, ..self },
            _ => self,
        }
    }

    /// Lets it go for good.
    pub fn detach(self) -> Result<()> {
        let signal = match self.stop {
            Stop::Signal(s) => s,
            _ => 0,
        };
        let r = ptrace(libc::PTRACE_DETACH, self.tid, 0, signal as usize);
        r.map(drop).map_err(|e| failed("detach from", self.tid, e))
    }
}

const NT_X86_XSTATE: usize = 0x202;
const PTRACE_GET_RSEQ_CONFIGURATION: u32 = 0x420f;
const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RseqConfiguration {
    /// Address of the thread's `struct rseq`; 0: not registered.
    pub address: u64,
    /// Registered length.
    pub size: u32,
    /// Signature before every abort handler.
    pub signature: u32,
    /// Registration flags.
    pub flags: u32,
    /// Always zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<RseqConfiguration>() == 24);

impl RseqConfiguration {
    /// Address of the thread's `struct rseq`, if it registered one.
    pub fn registered(&self) -> Option<RemoteAddr> {
        (self.address != 0).then_some(RemoteAddr(self.address))
    }

    /// Address of the word that leads to the restartable sequence the thread is in, 0 if it is in none (`rseq_cs`).
    pub fn section(&self) -> Option<u64> {
        self.registered().map(|area| area.0 + 8)
    }
}
