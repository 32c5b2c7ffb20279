//! System calls inside a process that is being built: whole programs in one go.
//!
//! Unlike in [`crate::inject`] nothing has to survive our death: the process is killed with us
//! ([`crate::ptrace::options::EXIT_KILL`]) until the moment it is let go. The program loop ([`arch::program_loop`])
//! and its table live in an area of their own in the new process, which is unmapped last.

use crate::arch::{self, ENTRY_CONTINUE, ENTRY_WORDS, Regs};
use crate::inject::{failed, remote_error};
use crate::memory::Memory;
use crate::program::{Arg, OnError, Outcome, Program, Run};
use crate::ptrace::{Seized, Stop, Stopped};
use crate::{Error, RemoteAddr, Result};

/// Where the program loop and its tables are in a process.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    /// First byte; the loop's code starts here.
    pub start: RemoteAddr,
    /// Length in bytes.
    pub len: u64,
    /// Where the code is, if not at the start.
    pub code: RemoteAddr,
}

/// Signals by which the kernel tells a thread of faults of its own, besides traps.
pub const FAULTS: [i32; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGSYS];

/// Room for code at the start of an area.
const CODE_LEN: u64 = 4096;

impl Area {
    /// An area whose code is at its start.
    pub fn new(start: u64, len: u64) -> Self {
        Area { start: RemoteAddr(start), len, code: RemoteAddr(start) }
    }

    fn table(&self) -> u64 {
        self.start.0 + CODE_LEN
    }

    fn room(&self) -> usize {
        (self.len - CODE_LEN) as usize
    }
}

/// A thread of a process under construction, stopped.
#[derive(Debug)]
pub struct Remote<'a> {
    memory: &'a Memory,
    thread: Option<Stopped>,
    area: Area,
    base: Regs,
    pid: u32,
    /// Threads that calls made, told by tracing.
    born: Vec<u32>,
    /// It is on its way to a stop.
    away: Option<Seized>,
    /// It has run since it was taken over.
    has_run: bool,
}

impl<'a> Remote<'a> {
    /// Takes over a stopped thread; all its signals are blocked except the trap that ends a program.
    pub fn new(memory: &'a Memory, thread: Stopped, area: Area) -> Result<Self> {
        let base = thread.regs()?;
        thread.set_sigmask(!(1 << (libc::SIGTRAP - 1)))?;
        let pid = memory.pid();
        Ok(Remote {
            memory,
            thread: Some(thread),
            area,
            base,
            pid,
            born: Vec::new(),
            away: None,
            has_run: false,
        })
    }

    /// Thread id.
    pub fn tid(&self) -> u32 {
        self.thread.as_ref().map_or(0, Stopped::tid)
    }

    /// The process's memory.
    pub fn memory(&self) -> &'a Memory {
        self.memory
    }

    /// Where its programs run.
    pub fn area(&self) -> Area {
        self.area
    }

    /// Two words of memory in the area, where tables are while programs run; as many as there are places.
    pub fn scratch(&self, place: usize) -> RemoteAddr {
        RemoteAddr(self.area.table() + 16 * place as u64)
    }

    /// Uses another area from now on; its code must already be there.
    pub fn move_to(&mut self, area: Area) {
        self.area = area;
    }

    /// The stopped thread.
    pub fn thread(&self) -> Result<&Stopped> {
        self.thread.as_ref().ok_or(Error::Gone(self.pid))
    }

    /// Gives the stopped thread back.
    pub fn release(mut self) -> Result<Stopped> {
        self.thread.take().ok_or(Error::Gone(self.pid))
    }

    /// Threads that programs made since this was last asked; each starts stopped.
    pub fn take_born(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.born)
    }

    /// Makes one call by stepping to its entry and exit, without the trap at the end of a program: it works when
    /// the call unmaps its own code, or when traps are ignored. Returns its result.
    pub fn step(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        self.step_from(arch::step_address(self.area.code), nr, args)
    }

    /// As [`Remote::step`], by a `syscall` instruction anywhere in the process.
    pub fn step_from(&mut self, gadget: RemoteAddr, nr: i64, args: [u64; 6]) -> Result<i64> {
        let thread = self.take()?;
        thread.set_regs(&self.base.for_call(gadget, self.stack(), nr, args))?;
        let thread = until_call(thread)?;
        let thread = until_call(thread)?;
        let result = thread.regs()?.rax as i64;
        self.thread = Some(thread);
        Ok(result)
    }

    /// Lets it make a last call, from which it does not come back.
    pub fn leave_by(mut self, nr: i64, argument: u64) -> Result<Seized> {
        let thread = self.take()?;
        let (gadget, args) = (arch::step_address(self.area.code), [argument, 0, 0, 0, 0, 0]);
        thread.set_regs(&self.base.for_call(gadget, self.stack(), nr, args))?;
        thread.resume(0)
    }

    /// Sets the thread off to a stop on its way to user mode, where the kernel looks at interrupted calls ([`Remote::settled`]). One that
    /// has not run since it was stopped stands there already.
    pub fn settle(&mut self) -> Result<()> {
        if !self.has_run && self.thread()?.stop() == Stop::Interrupt {
            return Ok(());
        }
        let thread = self.take()?;
        thread.interrupt()?;
        self.away = Some(thread.resume(0)?);
        Ok(())
    }

    /// Waits until it is there.
    pub fn settled(&mut self) -> Result<()> {
        let Some(running) = self.away.take() else { return Ok(()) };
        let tid = running.tid();
        let mut thread = running.wait()?.stopped(tid)?;
        while thread.stop() != Stop::Interrupt {
            thread = thread.resume(0)?.wait()?.stopped(tid)?;
        }
        self.thread = Some(thread);
        Ok(())
    }

    /// Sets a thread off into a call of the program's own that is expected to block, in which it is to be interrupted: the
    /// kernel then holds the state by which the call goes on. [`Remote::interrupt_call`] and [`Remote::interrupted`] follow; many threads
    /// can be on their way.
    pub fn begin_call(&mut self, regs: &Regs) -> Result<()> {
        let thread = self.take()?;
        thread.set_regs(regs)?;
        self.away = Some(thread.resume_to_call()?);
        Ok(())
    }

    /// Waits until it is about to make the call, and lets it.
    pub fn interrupt_call(&mut self) -> Result<()> {
        let thread = at_call(self.away.take().ok_or(Error::Gone(self.pid))?)?;
        thread.interrupt()?;
        // Resumed from the entry of the call with an interrupt pending, it makes the call, which finds the
        // interrupt as soon as it would sleep.
        self.away = Some(thread.resume_to_call()?);
        Ok(())
    }

    /// The registers after the interruption.
    pub fn interrupted(&mut self) -> Result<Regs> {
        let thread = at_call(self.away.take().ok_or(Error::Gone(self.pid))?)?;
        let after = thread.regs()?;
        self.thread = Some(thread);
        Ok(after)
    }

    fn stack(&self) -> u64 {
        self.area.start.0 + self.area.len - 64
    }

    fn take(&mut self) -> Result<Stopped> {
        self.has_run = true;
        self.thread.take().ok_or(Error::Gone(self.pid))
    }

    /// Runs as many calls from `from` on as fit the area together with the data; returns how many were run.
    fn run_part(
        &mut self,
        program: &Program,
        from: usize,
        data_at: u64,
        results: &mut Vec<i64>,
    ) -> Result<()> {
        let calls = &program.calls[from..];
        let table = self.area.table();
        let result_at = |step: u32| table + (step as u64 - from as u64) * (ENTRY_WORDS as u64 * 8) + 64;
        let mut words: Vec<u64> = Vec::with_capacity(calls.len() * ENTRY_WORDS);
        let fit = ((data_at - table) as usize / (ENTRY_WORDS * 8)).min(calls.len());
        for call in &calls[..fit] {
            let mut flags = if call.on_error == OnError::Continue { ENTRY_CONTINUE } else { 0 };
            words.push(call.nr as u64);
            for (i, arg) in call.args.iter().enumerate() {
                words.push(match *arg {
                    Arg::Value(v) => v,
                    Arg::Data(at) => data_at + u64::from(at),
                    Arg::Result(s) if (s.0 as usize) < from => results[s.0 as usize] as u64,
                    Arg::Result(s) => {
                        flags |= 1 << i;
                        result_at(s.0)
                    }
                });
            }
            words.extend([flags, 0]);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.memory.write(RemoteAddr(table), &bytes)?;
        let stopped_at = self.execute(RemoteAddr(table), RemoteAddr(table + bytes.len() as u64))?;
        let done = (stopped_at.0 - table) as usize / (ENTRY_WORDS * 8);
        let mut after = vec![0; bytes.len()];
        self.memory.read(RemoteAddr(table), &mut after)?;
        let result = |i: usize| {
            let at = (i * ENTRY_WORDS + 8) * 8;
            i64::from_le_bytes(after[at..at + 8].try_into().unwrap_or_default())
        };
        results.extend((0..done).map(result));
        if done < fit {
            return Err(remote_error(&calls[done].what, self.pid, result(done)));
        }
        Ok(())
    }

    /// Makes room for the contents of tiles (AMX) in the thread's extended state, which its process must have leave to use.
    ///
    /// # Errors
    /// That it has no leave, or that there is no memory for it.
    pub fn make_room_for_tiles(&mut self) -> Result<()> {
        self.until_trap(&arch::tiles_regs(&self.base, self.area.code, self.stack())).map(drop)
    }

    /// Runs the table; returns the entry it stopped at.
    fn execute(&mut self, table: RemoteAddr, end: RemoteAddr) -> Result<RemoteAddr> {
        self.until_trap(&arch::loop_regs(&self.base, self.area.code, table, end, self.stack()))
    }

    /// Runs up to the trap at the end of the program loop; returns the entry of the table it stopped at.
    fn until_trap(&mut self, regs: &Regs) -> Result<RemoteAddr> {
        let thread = self.take()?;
        thread.set_regs(regs)?;
        let mut running = thread.resume(0)?;
        loop {
            let tid = running.tid();
            let stopped = running.wait()?.stopped(tid)?;
            match stopped.stop() {
                Stop::Signal(libc::SIGTRAP) => {
                    let at = stopped.regs()?.rbx;
                    self.thread = Some(stopped);
                    return Ok(RemoteAddr(at));
                }
                // One that has been pending all along comes before the trap, although it is blocked: the kernel takes the first
                // fault of the queue as soon as any is not (kernel/signal.c, dequeue_synchronous_signal). As it is blocked, it is put
                // behind the trap when it is to be delivered.
                Stop::Signal(s)
                    if FAULTS.contains(&s)
                        && stopped.regs()?.rip == arch::trapped(self.area.code).0
                        && stopped.sigmask()? & 1 << (s - 1) != 0 =>
                {
                    running = stopped.resume(s)?;
                    continue;
                }
                Stop::Signal(s @ (libc::SIGSEGV | libc::SIGBUS | libc::SIGILL)) => {
                    let regs = stopped.regs()?;
                    self.thread = Some(stopped);
                    return Err(Error::Other(format!(
                        "process {}: signal {s} at {:#x} while it was built",
                        self.pid, regs.rip
                    )));
                }
                Stop::Clone => self.born.push(stopped.event_message()? as u32),
                _ => {}
            }
            running = stopped.resume(0)?;
        }
    }
}

/// Resumes a thread to the next entry or exit of a call.
fn until_call(thread: Stopped) -> Result<Stopped> {
    at_call(thread.resume_to_call()?)
}

/// Waits until a thread enters or leaves a call.
fn at_call(mut running: Seized) -> Result<Stopped> {
    let tid = running.tid();
    loop {
        let stopped = running.wait()?.stopped(tid)?;
        if stopped.stop() == Stop::Call {
            return Ok(stopped);
        }
        running = stopped.resume_to_call()?;
    }
}

impl Run for Remote<'_> {
    fn run(&mut self, program: &Program) -> Result<Outcome> {
        let data_len = program.data.len().next_multiple_of(64);
        if data_len + ENTRY_WORDS * 8 > self.area.room() {
            return Err(Error::Other(format!("a program with {data_len} bytes of data is too large")));
        }
        let data_at = self.area.start.0 + self.area.len - 64 - data_len as u64;
        let data_at = data_at & !63;
        self.memory.write(RemoteAddr(data_at), &program.placed(data_at))?;
        let mut results = Vec::with_capacity(program.calls.len());
        while results.len() < program.calls.len() {
            let from = results.len();
            self.run_part(program, from, data_at, &mut results)?;
        }
        let mut data = vec![0; program.data.len()];
        self.memory.read(RemoteAddr(data_at), &mut data)?;
        debug_assert!(
            results.iter().zip(&program.calls).all(|(r, c)| !failed(*r) || c.on_error == OnError::Continue)
        );
        Ok(Outcome { results, data })
    }

    fn pid(&self) -> u32 {
        self.pid
    }
}
