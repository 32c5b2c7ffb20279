//! System calls inside a stopped thread of a program that must not notice, not even if we die meanwhile.
//!
//! When a tracer dies, the kernel lets its tracees run on from wherever they stand. A thread that is lent to us
//! therefore always stands where it can find its way home by itself:
//!
//! 1. Far below everything that the main thread's stack holds lies a signal frame with the thread's own registers,
//!    extended state and signal mask ([`arch::home_frame`]).
//! 2. A call is made at a `syscall; ret` of the program's own code, with the frame's first word as return address:
//!    it leads to `rt_sigreturn`, also the program's own code, and so through the frame to where the thread was.
//! 3. With us alive, a stop at entry to and exit from the call hands the thread to us before it returns.
//! 4. Going home with us alive, registers and mask are put back from outside: no `rt_sigreturn` runs, which would
//!    make the kernel forget how to go on with an interrupted sleep.
//!
//! No code and no mapping is added to the program at any time. The order of setting registers and mask matters:
//! registers first when entering, mask first when leaving, so that at each moment the frame repairs the other.
//! A call that could not be left to complete by itself must not be made this way.

use crate::arch::{self, Gadgets, Regs};
use crate::memory::Memory;
use crate::program::{Arg, OnError, Outcome, Program};
use crate::ptrace::{Stop, Stopped, options};
use crate::{Error, RemoteAddr, Result};
use memchr::memmem;

/// Where threads of one process can be made to run system calls.
#[derive(Debug)]
pub struct Site<'a> {
    memory: &'a Memory,
    gadgets: Gadgets,
    start: RemoteAddr,
    frame_len: u64,
    slot_len: u64,
    slots: usize,
    data_len: usize,
    saved: Vec<u8>,
}

/// What choosing a [`Site`] needs to know of the program.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    /// Lowest mapped address of the main thread's stack.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// The main thread's stack pointer.
    pub sp: u64,
}

/// Distance kept from the live part of the stack, bytes.
const STACK_MARGIN: u64 = 16 << 10;

impl<'a> Site<'a> {
    /// Chooses room for up to `slots` threads at a time and `data_len` bytes of data at the low end of the main thread's
    /// stack: for as many as there is room below its live part, but for one at least, growing it where it is too short. All threads of the program must be stopped, and stay so until
    /// [`Site::clean`].
    pub fn choose(
        memory: &'a Memory,
        gadgets: Gadgets,
        stack: Stack,
        xstate_len: usize,
        slots: usize,
        data_len: usize,
    ) -> Result<Self> {
        // A slot holds the frame home and the one of a call that undoes another.
        let frame_len = (arch::home_frame_len(xstate_len) as u64).next_multiple_of(64);
        let slot_len = 2 * frame_len;
        let data_len = data_len.next_multiple_of(64);
        let live = if (stack.start..stack.end).contains(&stack.sp) { stack.sp } else { stack.start };
        let room = (live - stack.start).saturating_sub(STACK_MARGIN + data_len as u64 + 4096);
        let slots = slots.min((room / slot_len) as usize).max(1);
        let len = (slot_len * slots as u64 + data_len as u64).next_multiple_of(4096);
        let start = if live - stack.start >= len + STACK_MARGIN { stack.start } else { stack.start - len };
        if start < stack.start {
            // A write below the stack grows it, as the program's own would. Where somebody else has to put in the new page, it
            // has grown, but this kind of write does not wait for that.
            let grown = memory.write_forced(RemoteAddr(start), &[0]);
            grown.or_else(|_| memory.write(RemoteAddr(start), &[0])).map_err(|e| {
                Error::Other(format!("process {}: its stack cannot grow by {len} bytes ({e})", memory.pid()))
            })?;
        }
        let mut saved = vec![0; len as usize];
        memory.read(RemoteAddr(start), &mut saved)?;
        Ok(Site { memory, gadgets, start: RemoteAddr(start), frame_len, slot_len, slots, data_len, saved })
    }

    /// Where calls are made and frames returned through.
    pub fn gadgets(&self) -> Gadgets {
        self.gadgets
    }

    /// The program's memory.
    pub fn memory(&self) -> &'a Memory {
        self.memory
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Address of a slot, and how many bytes of it a frame home takes. As many again are free behind.
    pub(crate) fn slot(&self, slot: usize) -> (u64, u64) {
        debug_assert!(slot < self.slots);
        (self.start.0 + slot as u64 * self.slot_len, self.frame_len)
    }

    /// Length of the data area, bytes.
    pub fn data_len(&self) -> usize {
        self.data_len
    }

    /// Address of the data area.
    pub fn data(&self) -> RemoteAddr {
        RemoteAddr(self.start.0 + self.slot_len * self.slots as u64)
    }

    /// Puts into a copy of the program's address space what was in the memory that visits use.
    pub fn clean_copy(&self, copy: &Memory) -> Result<()> {
        copy.write(self.start, &self.saved)
    }

    /// Puts back what was in the memory that visits used. No visit may be under way.
    pub fn clean(&self) -> Result<()> {
        self.memory.write(self.start, &self.saved)
    }

    /// Borrows a stopped thread; `slot` must not be in use by another visit.
    pub fn visit(&'a self, slot: usize, thread: Stopped) -> Result<Visit<'a>> {
        self.visit_by(slot, thread, self.gadgets)
    }

    /// As [`Site::visit`], of a thread that makes its calls, and goes home, elsewhere than others do.
    pub fn visit_by(&'a self, slot: usize, thread: Stopped, gadgets: Gadgets) -> Result<Visit<'a>> {
        debug_assert!(slot < self.slots);
        let original = outside_critical_section(self.memory, &thread, thread.regs()?)?;
        let mask = thread.sigmask()?;
        let base = self.start.0 + slot as u64 * self.slot_len;
        let xstate = thread.xstate()?;
        let frame = arch::home_frame(base, &original.reissue(), &xstate, mask, gadgets.sigreturn);
        self.memory.write(RemoteAddr(base), &frame)?;
        let born = Vec::new();
        Ok(Visit {
            site: self,
            gadgets,
            thread: Some(thread),
            original,
            xstate,
            mask,
            base,
            used: false,
            held: 0,
            born,
        })
    }

    /// Runs a program in a visited thread, one call after the other. Its data must fit the data area.
    pub fn run(&self, visit: &mut Visit<'_>, program: &Program) -> Result<Outcome> {
        if program.data.len() > self.data_len {
            return Err(Error::Other(format!(
                "program of {} bytes of data does not fit",
                program.data.len()
            )));
        }
        self.memory.write(self.data(), &program.placed(self.data().0))?;
        let mut results: Vec<i64> = Vec::with_capacity(program.calls.len());
        for call in &program.calls {
            let args = call.args.map(|a| match a {
                Arg::Value(v) => v,
                Arg::Data(at) => self.data().0 + u64::from(at),
                Arg::Result(step) => results[step.0 as usize] as u64,
            });
            let result = visit.call(call.nr, args)?;
            if failed(result) && call.on_error == OnError::Stop {
                return Err(remote_error(&call.what, self.memory.pid(), result));
            }
            results.push(result);
        }
        let mut data = vec![0; program.data.len()];
        self.memory.read(self.data(), &mut data)?;
        Ok(Outcome { results, data })
    }
}

/// Whether the result of a system call is an error.
pub(crate) fn failed(result: i64) -> bool {
    (-4095..0).contains(&result)
}

pub(crate) fn remote_error(call: &str, pid: u32, result: i64) -> Error {
    let source = std::io::Error::from_raw_os_error(-result as i32);
    Error::Remote { call: call.to_string(), pid, source }
}

/// A thread that is lent to us. Dropping it sends it home too; [`Visit::leave`] tells whether that worked.
#[derive(Debug)]
pub struct Visit<'a> {
    site: &'a Site<'a>,
    gadgets: Gadgets,
    thread: Option<Stopped>,
    original: Regs,
    xstate: Vec<u8>,
    mask: u64,
    base: u64,
    used: bool,
    /// A stop signal that arrived meanwhile and is sent again afterwards.
    held: i32,
    /// Processes that its calls made ([`Visit::trace_births`]).
    born: Vec<u32>,
}

impl Visit<'_> {
    /// Thread id.
    pub fn tid(&self) -> u32 {
        self.thread.as_ref().map_or(0, Stopped::tid)
    }

    /// Process id, in our pid namespace.
    pub fn pid(&self) -> u32 {
        self.site.memory.pid()
    }

    /// Where its calls are made.
    pub fn gadgets(&self) -> Gadgets {
        self.gadgets
    }

    /// The registers it came with, and will leave with.
    pub fn original(&self) -> &Regs {
        &self.original
    }

    /// Makes one system call and returns its result (`-errno` if it failed).
    pub fn call(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        self.begin(nr, args)?;
        self.enter()?;
        self.finish()
    }

    /// Makes a call that changes the program, which `undo` reverses: should we die before the caller made `undo`
    /// itself, the thread makes it on its way home.
    pub fn call_with_undo(&mut self, nr: i64, args: [u64; 6], undo: (i64, [u64; 6])) -> Result<i64> {
        let base = self.base + self.site.frame_len;
        self.place_call(RemoteAddr(base), undo.0, undo.1)?;
        self.begin_from(base, nr, args)?;
        self.enter()?;
        self.finish()
    }

    /// Where the first argument of `undo` lies while [`Visit::call_with_undo`] is under way: a call that stores what
    /// it made there tells its undoing.
    pub fn undo_argument(&self) -> RemoteAddr {
        RemoteAddr(self.base + self.site.frame_len + arch::FRAME_FIRST_ARGUMENT)
    }

    /// Writes a frame to `at` (64-byte aligned) through which a thread whose stack pointer that is makes a call, and
    /// then goes this thread's way home, if the call returns.
    pub fn place_call(&self, at: RemoteAddr, nr: i64, args: [u64; 6]) -> Result<()> {
        let gadgets = self.gadgets;
        let regs = self.original.for_call(gadgets.call, self.base, nr, args);
        let frame = arch::home_frame(at.0, &regs, &self.xstate, u64::MAX, gadgets.sigreturn);
        self.site.memory.write(at, &frame)
    }

    /// Whether processes and threads that its calls make are traced from birth, when they stop by themselves.
    pub fn trace_births(&mut self, traced: bool) -> Result<()> {
        let births = if traced { options::TRACE_CLONE } else { 0 };
        match &self.thread {
            Some(thread) => thread.set_options(options::SYSCALL_GOOD | births),
            None => Err(Error::Gone(self.site.memory.pid())),
        }
    }

    /// Processes and threads that its calls made since this was last asked, in our pid namespace.
    pub fn take_born(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.born)
    }

    /// Sets the thread off into a call, to stop at its entry.
    pub fn begin(&mut self, nr: i64, args: [u64; 6]) -> Result<()> {
        self.begin_from(self.base, nr, args)
    }

    /// As [`Visit::begin`], with the way home through the frame at `frame`.
    fn begin_from(&mut self, frame: u64, nr: i64, args: [u64; 6]) -> Result<()> {
        let thread = self.take()?;
        let regs = self.original.for_call(self.gadgets.call, frame, nr, args);
        let r = thread
            .set_regs(&regs)
            .and_then(|()| if self.used { Ok(()) } else { thread.set_sigmask(u64::MAX) });
        self.used = true;
        self.go(thread, r)
    }

    /// Waits for the entry and sets it off into the call proper.
    pub fn enter(&mut self) -> Result<()> {
        self.wait_for_call()?;
        let thread = self.take()?;
        self.go(thread, Ok(()))
    }

    /// Waits for the call to complete.
    pub fn finish(&mut self) -> Result<i64> {
        self.wait_for_call()?;
        match &self.thread {
            Some(t) => Ok(t.regs()?.rax as i64),
            None => Err(Error::Gone(0)),
        }
    }

    fn take(&mut self) -> Result<Stopped> {
        self.thread.take().ok_or(Error::Gone(self.site.memory.pid()))
    }

    /// Resumes to the next entry or exit; a thread that could not be prepared stays stopped with us.
    fn go(&mut self, thread: Stopped, prepared: Result<()>) -> Result<()> {
        if let Err(e) = prepared {
            self.thread = Some(thread);
            return Err(e);
        }
        self.running(thread.resume_to_call()?)
    }

    /// Waits for the next stop of a running thread and keeps it.
    fn running(&mut self, running: crate::ptrace::Seized) -> Result<()> {
        let tid = running.tid();
        self.thread = Some(running.wait()?.stopped(tid)?);
        Ok(())
    }

    /// All signals but two are blocked: stop signals are held back and sent again when the visit is over; job
    /// control that stops the other threads leaves a stop pending, which takes effect when we detach.
    fn wait_for_call(&mut self) -> Result<()> {
        loop {
            let thread = self.take()?;
            match thread.stop() {
                Stop::Call => {
                    self.thread = Some(thread);
                    return Ok(());
                }
                Stop::Signal(s) => self.held = s,
                Stop::Clone => self.born.push(thread.event_message()? as u32),
                _ => {}
            }
            let running = thread.resume_to_call()?;
            self.running(running)?;
        }
    }

    /// Sends the thread home: stopped exactly as it came.
    pub fn leave(mut self) -> Result<Stopped> {
        self.go_home()?;
        self.take()
    }

    fn go_home(&mut self) -> Result<()> {
        let Some(mut thread) = self.thread.take() else { return Ok(()) };
        if self.used {
            // From the exit of a call the kernel would not look at an interrupted call any more. Stopped on the way
            // to user mode it does, and finds the registers that tell it how to go on.
            let tid = thread.tid();
            thread.interrupt()?;
            thread = thread.resume(0)?.wait()?.stopped(tid)?;
            while let Stop::Signal(s) = thread.stop() {
                self.held = s;
                thread = thread.resume(0)?.wait()?.stopped(tid)?;
            }
            thread.set_sigmask(self.mask)?;
            self.used = false;
        }
        thread.set_regs(&self.original)?;
        if self.held != 0 {
            crate::spawn::tgkill(self.site.memory.pid(), thread.tid(), self.held)?;
            self.held = 0;
        }
        self.thread = Some(thread);
        Ok(())
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        // An error here means that the thread is gone, or that it finds home through its frame when we detach.
        if self.go_home().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.detach();
        }
    }
}

/// The registers as the kernel itself will correct them when a preempted thread runs on: inside a restartable
/// sequence it goes to the abort handler. The kernel looks at the instruction pointer for that, so whoever moves it
/// elsewhere must do the correction first. `rseq(2)`.
pub fn outside_critical_section(memory: &Memory, thread: &Stopped, regs: Regs) -> Result<Regs> {
    match thread.rseq().ok().and_then(|c| c.section()) {
        Some(at) => outside(memory, memory.read_u64(RemoteAddr(at))?, regs),
        None => Ok(regs),
    }
}

/// As [`outside_critical_section`], for a thread of which the word at [`crate::ptrace::RseqConfiguration::section`] is
/// known.
pub fn outside(memory: &Memory, descriptor: u64, regs: Regs) -> Result<Regs> {
    if descriptor == 0 {
        return Ok(regs);
    }
    // struct rseq_cs: version, flags (32 bit each), start_ip, post_commit_offset, abort_ip
    let word = |i: u64| memory.read_u64(RemoteAddr(descriptor + 8 * i));
    let (start, length, abort) = (word(1)?, word(2)?, word(3)?);
    if regs.ip().wrapping_sub(start) >= length {
        return Ok(regs);
    }
    Ok(Regs { rip: abort, orig_rax: arch::NO_SYSCALL, ..regs })
}

/// Length of what [`Planted`] writes.
const PLANT_LEN: u64 = 64;

/// The batch loop ([`crate::batch`]), and gadgets for a program that has none of its own (a static one of few calls):
/// written into the unused end of the kernel's vdso in its address space, which every program has. If we die, these
/// bytes, which nobody reads, stay, for as long as a thread of the program may still be on its way home through them.
#[derive(Debug)]
pub struct Planted<'a> {
    memory: &'a Memory,
    at: RemoteAddr,
    /// They were there before: a thread may yet need them.
    found: bool,
    /// Where the gadgets are.
    pub gadgets: Gadgets,
}

impl<'a> Planted<'a> {
    /// Writes the code; all threads must be stopped. `vdso` is the mapping's range. `None` if its end is in use.
    pub fn plant(memory: &'a Memory, vdso: (u64, u64)) -> Result<Option<Self>> {
        let at = RemoteAddr(vdso.1 - PLANT_LEN);
        // Twice the room, so that what lies before is no code that runs into it.
        let mut room = [0; 2 * PLANT_LEN as usize];
        memory.read(RemoteAddr(vdso.1 - 2 * PLANT_LEN), &mut room)?;
        let [long, _] = arch::SIGRETURN_GADGETS;
        let (code, _) = arch::batch_loop();
        let mut plant = [code, arch::CALL_GADGET, long].concat();
        debug_assert!(plant.len() <= PLANT_LEN as usize);
        plant.resize(PLANT_LEN as usize, 0);
        let (before, place) = room.split_at(PLANT_LEN as usize);
        let found = *place == plant;
        if before.iter().any(|&b| b != 0) || (!found && place.iter().any(|&b| b != 0)) {
            return Ok(None);
        }
        if !found {
            memory.write_forced(at, &plant)?;
        }
        let call = RemoteAddr(at.0 + code.len() as u64);
        let sigreturn = RemoteAddr(call.0 + arch::CALL_GADGET.len() as u64);
        let gadgets = Gadgets { call, sigreturn, sigreturn_len: long.len() as u64 };
        Ok(Some(Planted { memory, at, found, gadgets }))
    }

    /// The batch loop.
    pub fn batch_loop(&self) -> RemoteAddr {
        self.at
    }

    /// Where a thread that makes its calls stands for the kernel: behind the instruction.
    pub fn batch_ip(&self) -> u64 {
        self.at.0 + arch::batch_loop().1
    }

    /// Whether a thread stands in the code that an earlier stillpoint planted before it died.
    pub fn holds(&self, ip: u64) -> bool {
        self.found && (self.at.0..self.at.0 + PLANT_LEN).contains(&ip)
    }
}

impl Drop for Planted<'_> {
    fn drop(&mut self) {
        if !self.found {
            // Fails only if the program is gone.
            let _ = self.memory.write_forced(self.at, &[0; PLANT_LEN as usize]);
        }
    }
}

/// Looks for the gadgets in executable ranges of a program; it may be running.
pub fn find_gadgets(memory: &Memory, executable: &[(u64, u64)]) -> Option<Gadgets> {
    let (mut call, mut sigreturn) = (None, None);
    for &(start, end) in executable {
        let mut at = start;
        while at < end && (call.is_none() || sigreturn.is_none()) {
            let len = (end - at).min(1 << 20);
            let mut code = vec![0; len as usize];
            if memory.read(RemoteAddr(at), &mut code).is_err() {
                break;
            }
            let find = |pattern: &[u8]| memmem::find(&code, pattern).map(|i| RemoteAddr(at + i as u64));
            call = call.or_else(|| find(arch::CALL_GADGET));
            let home = |pattern: &&[u8]| Some((find(pattern)?, pattern.len() as u64));
            sigreturn = sigreturn.or_else(|| arch::SIGRETURN_GADGETS.iter().find_map(home));
            at += len.max(17) - 16; // a gadget may lie across two reads
            if len <= 16 {
                break;
            }
        }
    }
    let (sigreturn, sigreturn_len) = sigreturn?;
    Some(Gadgets { call: call?, sigreturn, sigreturn_len })
}
