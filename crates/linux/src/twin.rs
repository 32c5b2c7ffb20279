//! A copy-on-write twin of a stopped program: another process with the same memory, that of one instant, which stands
//! still and is read while the program runs on. `clone(2)`.
//!
//! One thread of the program is made to fork ([`crate::inject`]). It must not learn that it has, so there are two
//! births:
//!
//! ```text
//! program ── clone(CLONE_FILES) ──▶ between          a copy of the memory; no signal when it ends
//!                                   between ── clone(CLONE_VM) ──▶ twin       holds the same copy
//!                                   between exits
//! program ── wait4(between)                           nothing is left of it
//!                                                     twin: an orphan, buried by whoever buries orphans
//! ```
//!
//! All of this happens while every thread of the program stands still. What it could notice, and why it does not:
//!
//! * *Waiting for children.* A child whose exit signal is not `SIGCHLD` is no child to `wait`, unless `__WALL` or
//!   `__WCLONE` is given; no thread runs that could ask, and one that blocks there is interrupted and asks again.
//! * *Descriptors.* `between` shares the table for a moment and takes an empty one of its own
//!   (`CLOSE_RANGE_UNSHARE`, close_range(2)), without ever holding a reference: pipes still end and locks are still
//!   released when the program closes them.
//! * *Current directory, exec of set-user-id programs.* `CLONE_FS` would make the latter lose their rights.
//! * *Memory.* Only `clone` itself stores there, into a frame below the stack. The copy has no robust list and no
//!   thread id to clear.
//!
//! Whenever we die:
//!
//! 1. Before `between` is ours, it leaves by itself: its stack pointer leads through a frame to `exit_group`.
//! 2. From then on it and the twin, which is traced from birth, are killed with us (`PTRACE_O_EXITKILL`).
//! 3. The program's thread finds behind its `clone` a frame for `wait4`, into which `clone` has stored the process id
//!    before the child could run (`CLONE_PARENT_SETTID`), and behind that its way home.
//!
//! What remains visible: the resources that `between` used count as those of a child that was waited for
//! (getrusage(2), `RUSAGE_CHILDREN`).

use crate::arch::{ERESTARTNOINTR, Regs};
use crate::inject::{Site, Visit, failed, remote_error};
use crate::memory::Memory;
use crate::proc::Proc;
use crate::ptrace::{Ended, Seized, Stop, Stopped, Waited, options};
use crate::{Error, RemoteAddr, Result, arch, spawn};

const BETWEEN: u64 = (libc::CLONE_FILES | libc::CLONE_PARENT_SETTID) as u64;
const TWIN: u64 = (libc::CLONE_VM | libc::CLONE_FILES) as u64;
const WAIT_ALL: u64 = libc::__WALL as u32 as u64;
/// No process id: `wait4` says `ESRCH` at once.
const NOBODY: u64 = i32::MIN as u32 as u64;
/// How often a call that a stop signal keeps from starting is made again.
const ATTEMPTS: usize = 100;

/// Bytes of data that a [`Site`] must have room for, to fork there with extended state of `xstate_len` bytes.
pub fn site_data_len(xstate_len: usize) -> usize {
    arch::home_frame_len(xstate_len)
}

/// The calls that the forking thread and the copies make, for seccomp filters to judge: number and arguments (0 where
/// they are addresses or not yet known).
pub fn calls() -> Vec<(i64, [u64; 6])> {
    let call = |nr, [a, b, c]: [u64; 3]| (nr, [a, b, c, 0, 0, 0]);
    vec![
        call(libc::SYS_clone, [BETWEEN, 0, 0]),
        call(libc::SYS_clone, [TWIN, 0, 0]),
        call(libc::SYS_wait4, [0, 0, WAIT_ALL]),
        call(libc::SYS_close_range, ALL_DESCRIPTORS),
        call(libc::SYS_setsid, [0; 3]),
        call(libc::SYS_munmap, [0; 3]),
        call(libc::SYS_madvise, [0, 0, libc::MADV_DONTNEED as u64]),
        call(libc::SYS_exit_group, [0; 3]),
    ]
}

/// Arguments of `close_range`: all of a table that becomes our own.
const ALL_DESCRIPTORS: [u64; 3] = [0, u32::MAX as u64, libc::CLOSE_RANGE_UNSHARE as u64];

/// The twin: stopped, ours, gone when this is dropped or when we die.
#[derive(Debug)]
pub struct Twin {
    puppet: Puppet,
    memory: Memory,
}

impl Twin {
    /// Forks. Every thread of the program must be stopped; `visit` is of one of them, at a site with room for
    /// [`site_data_len`]. The main stack and the gadgets must not be mapped `MADV_DONTFORK` or `MADV_WIPEONFORK`.
    ///
    /// The twin's memory is the program's but for those mappings, and for `MAP_SHARED` ones, which it shares.
    ///
    /// # Errors
    /// [`Error::Remote`] where the kernel refuses (`EAGAIN`: too many processes; `ENOMEM`), [`Error::Gone`] if the
    /// program has been killed meanwhile. The program then is as if nothing had happened.
    pub fn fork(site: &Site<'_>, visit: &mut Visit<'_>) -> Result<Self> {
        let exit = site.data();
        visit.place_call(exit, libc::SYS_exit_group, [0; 6])?;
        visit.trace_births(true)?;
        let made = clone_between(visit, exit);
        let (between, pid) = match made {
            Ok(made) => made,
            Err(e) => {
                visit.trace_births(false)?;
                return Err(e);
            }
        };
        let twin = between.and_then(|mut between| {
            let twin = bear(&mut between, exit)?;
            between.end()?;
            Ok(twin)
        });
        let buried = visit.call(libc::SYS_wait4, [pid as u64, 0, WAIT_ALL, 0, 0, 0])?;
        visit.trace_births(false)?;
        let twin = twin?;
        if buried != pid {
            return Err(remote_error("wait4", visit.pid(), buried));
        }
        let memory = Memory::open_shared(twin.pid)?;
        // Only now: until here this was its way out.
        site.clean_copy(&memory)?;
        Ok(Twin { puppet: twin, memory })
    }

    /// Process id, in our pid namespace.
    pub fn pid(&self) -> u32 {
        self.puppet.pid
    }

    /// Its memory, at the same addresses as the program's.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// What can be done when the program runs again: the twin leaves the program's session and process group, so that
    /// job control neither reaches nor counts it, and offers itself to the kernel's killer when memory is short.
    pub fn settle(&mut self) -> Result<()> {
        self.puppet.expect("setsid", libc::SYS_setsid, [0; 6])?;
        Proc::process(self.pid())?.write("oom_score_adj", b"1000")
    }

    /// Gives the pages of a range back (`MADV_DONTNEED`): the program's next writes there copy nothing any more.
    ///
    /// # Errors
    /// [`Error::Remote`] where the kernel keeps them (`EPERM`: sealed mappings): they are given back at the end.
    pub fn release(&mut self, start: RemoteAddr, len: u64) -> Result<()> {
        let args = [start.0, len, libc::MADV_DONTNEED as u64, 0, 0, 0];
        self.puppet.expect("madvise", libc::SYS_madvise, args).map(drop)
    }

    /// Lets go of a mapping, such as one that the twin shares with the program: what it holds of a file, or of what is
    /// locked or sealed there, ends then as the program expects. The main stack and the gadgets are needed.
    ///
    /// # Errors
    /// As [`Twin::release`].
    pub fn unmap(&mut self, start: RemoteAddr, len: u64) -> Result<()> {
        self.puppet.expect("munmap", libc::SYS_munmap, [start.0, len, 0, 0, 0, 0]).map(drop)
    }

    /// Whether it still is what it was. A twin that was killed (memory was short) cannot be read; what was read
    /// before is good.
    pub fn check(&mut self) -> Result<()> {
        self.puppet.check()
    }

    /// Ends it, and waits until it is gone.
    pub fn end(self) -> Result<()> {
        self.puppet.end()
    }
}

/// Has the visited thread make the process between; returns that with its id in the program's pid namespace. The
/// thread then is where it waits for that process, should we die.
fn clone_between(visit: &mut Visit<'_>, exit: RemoteAddr) -> Result<(Result<Puppet>, i64)> {
    let args = [BETWEEN, exit.0, visit.undo_argument().0, 0, 0, 0];
    let undo = (libc::SYS_wait4, [NOBODY, 0, WAIT_ALL, 0, 0, 0]);
    let mut result = 0;
    for _ in 0..ATTEMPTS {
        result = visit.call_with_undo(libc::SYS_clone, args, undo)?;
        if result != -ERESTARTNOINTR {
            break;
        }
    }
    if failed(result) {
        return Err(remote_error("clone", visit.pid(), result));
    }
    let born = visit.take_born().pop().ok_or_else(|| Error::Other("a process was born untraced".into()))?;
    Ok((Puppet::take_over(born, visit), result))
}

/// Has the process between make the twin.
fn bear(between: &mut Puppet, exit: RemoteAddr) -> Result<Puppet> {
    let [first, last, flags] = ALL_DESCRIPTORS;
    between.expect("close_range", libc::SYS_close_range, [first, last, flags, 0, 0, 0])?;
    let args = [TWIN, exit.0, 0, 0, 0, 0];
    let mut result = -ERESTARTNOINTR;
    for _ in 0..ATTEMPTS {
        result = between.call(libc::SYS_clone, args)?;
        if result != -ERESTARTNOINTR {
            break;
        }
    }
    if failed(result) {
        return Err(remote_error("clone", between.pid, result));
    }
    let born = between.born.pop().ok_or_else(|| Error::Other("a process was born untraced".into()))?;
    let mut twin = Puppet { pid: born, thread: None, born: Vec::new(), ..*between };
    twin.wait_for_birth()?;
    Ok(twin)
}

/// A process of ours that stands still, in which calls are made one at a time at the program's own `syscall`.
#[derive(Debug)]
struct Puppet {
    /// Its id; 0 once it is no more.
    pid: u32,
    thread: Option<Stopped>,
    base: Regs,
    gadget: RemoteAddr,
    born: Vec<u32>,
}

impl Puppet {
    /// A newborn child of a visited thread; it is killed with us from now on, as are its own children.
    fn take_over(pid: u32, visit: &Visit<'_>) -> Result<Self> {
        let base = *visit.original();
        let mut puppet = Puppet { pid, thread: None, base, gadget: visit.gadgets().call, born: Vec::new() };
        puppet.wait_for_birth()?;
        Ok(puppet)
    }

    fn wait_for_birth(&mut self) -> Result<()> {
        let thread = self.wait(Seized::born(self.pid))?;
        thread.set_options(options::SYSCALL_GOOD | options::TRACE_CLONE | options::EXIT_KILL)?;
        self.base = thread.regs()?;
        self.thread = Some(thread);
        Ok(())
    }

    fn take(&mut self) -> Result<Stopped> {
        self.thread.take().ok_or(Error::Gone(self.pid))
    }

    fn wait(&mut self, running: Seized) -> Result<Stopped> {
        match running.wait()? {
            Waited::Stopped(thread) => Ok(thread),
            Waited::Ended(_) => Err(self.gone()),
        }
    }

    fn gone(&mut self) -> Error {
        Error::Gone(std::mem::take(&mut self.pid))
    }

    /// Makes a call and returns its result (`-errno` if it failed).
    fn call(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        let thread = self.take()?;
        thread.set_regs(&self.base.for_call(self.gadget, self.base.sp(), nr, args))?;
        let entered = self.until_call(thread)?;
        let left = self.until_call(entered)?;
        let result = left.regs()?.rax as i64;
        self.thread = Some(left);
        Ok(result)
    }

    /// As [`Puppet::call`]; a call that fails is an error.
    fn expect(&mut self, what: &str, nr: i64, args: [u64; 6]) -> Result<i64> {
        let result = self.call(nr, args)?;
        if failed(result) { Err(remote_error(what, self.pid, result)) } else { Ok(result) }
    }

    /// Resumes to the next entry or exit of a call. Signals are not for it.
    fn until_call(&mut self, thread: Stopped) -> Result<Stopped> {
        let mut running = thread.resume_to_call()?;
        loop {
            let thread = self.wait(running)?;
            match thread.stop() {
                Stop::Call => return Ok(thread),
                Stop::Clone => self.born.push(thread.event_message()? as u32),
                _ => {}
            }
            running = thread.resume_to_call()?;
        }
    }

    fn check(&mut self) -> Result<()> {
        match Seized::born(self.pid).poll()? {
            Ok(Waited::Ended(_)) => Err(self.gone()),
            Ok(Waited::Stopped(thread)) => {
                self.thread = Some(thread);
                Ok(())
            }
            Err(_) if self.thread.is_some() => Ok(()),
            Err(_) => Err(Error::Gone(self.pid)),
        }
    }

    /// Has it exit by itself, which nothing forbids, and sees to its end.
    fn end(mut self) -> Result<()> {
        match self.leave()? {
            Ended::Exited(_) | Ended::Unknown => Ok(()),
            Ended::Killed(s) => Err(Error::Other(format!("a copy of the program was killed by signal {s}"))),
        }
    }

    fn leave(&mut self) -> Result<Ended> {
        let thread = self.take()?;
        thread.set_regs(&self.base.for_call(self.gadget, self.base.sp(), libc::SYS_exit_group, [0; 6]))?;
        let mut running = thread.resume(0)?;
        loop {
            match running.wait()? {
                Waited::Stopped(thread) => running = thread.resume(0)?,
                Waited::Ended(ended) => {
                    self.pid = 0;
                    return Ok(ended);
                }
            }
        }
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        // It cannot leave only if it has been killed already, or was lost in the middle of a call.
        if self.pid == 0 || self.leave().is_ok() {
            return;
        }
        if spawn::tgkill(self.pid, self.pid, libc::SIGKILL).is_ok() {
            while let Ok(Waited::Stopped(_)) = Seized::born(self.pid).wait() {}
        }
    }
}
