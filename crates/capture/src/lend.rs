//! One thread of a frozen program, lent for system calls.

use crate::freeze::Frozen;
use crate::gate::{Gate, Gates};
use crate::target::gadgets;
use crate::{Error, Refusal, Result, attributes};
use stillpoint_image::Thread;
use stillpoint_linux::arch::{self, Gadgets};
use stillpoint_linux::batch::{self, Departure, Origin, Place, Signal};
use stillpoint_linux::bpf::{self, FilteredCall};
use stillpoint_linux::inject::{Planted, Site, Stack, Visit, outside_critical_section};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::program::{Outcome, Program};
use stillpoint_linux::ptrace::Stopped;
use stillpoint_linux::twin;
use syscalls::Sysno;

/// What lending a thread needs to know of the program.
#[derive(Clone, Copy, Debug)]
pub struct Lender<'a> {
    /// Its `/proc` folder.
    pub process: &'a Proc,
    /// Its memory.
    pub memory: &'a Memory,
    /// Where in its code calls can be made, if there is such a place.
    pub gadgets: Option<Gadgets>,
    /// The lowest stack pointer in the main stack, if that is not the main thread's ([`crate::inspect::lowest_pointer`]).
    pub lowest: Option<u64>,
}

impl Lender<'_> {
    /// Lends the main thread of a frozen program to `work`, which may make `calls` in it: numbers and arguments. All
    /// of the program's memory is as before when it returns, and the thread is back among the frozen ones.
    ///
    /// # Errors
    /// [`Error::Incapable`] if the thread may not make these calls and come home, [`Error::Failed`] if it cannot; those of `work`.
    pub fn main_thread<T>(
        &self,
        frozen: &mut Frozen,
        calls: &[(i64, [u64; 6])],
        work: impl FnOnce(&Site<'_>, &mut Visit<'_>) -> Result<T>,
    ) -> Result<T> {
        let leader = &frozen.threads[0];
        let maps = self.process.maps()?;
        let find = |name: &[u8]| maps.iter().find(|v| v.name == name);
        let planted = match (self.gadgets, find(b"[vdso]")) {
            (None, Some(vdso)) => Planted::plant(self.memory, (vdso.start, vdso.end))?,
            _ => None,
        };
        let no = |why: &str| Error::Failed(format!("its main thread cannot be asked: {why}"));
        let gadgets = gadgets(self.gadgets, planted.as_ref(), self.memory, &maps);
        let gadgets = gadgets.ok_or_else(|| no("it has no way to make a system call"))?;
        let stack = find(b"[stack]").ok_or_else(|| no("its stack is unmapped"))?;
        let Gate { gadgets, .. } = self.gate(frozen, &maps, gadgets, calls)?;
        let sp = self.lowest.map_or_else(|| leader.regs().map(|regs| regs.sp()), Ok)?;
        let stack = Stack { start: stack.start, end: stack.end, sp };
        let xstate_len = leader.xstate()?.len();
        let site = Site::choose(self.memory, gadgets, stack, xstate_len, 1, twin::site_data_len(xstate_len))?;
        let mut visit = site.visit(0, frozen.threads.remove(0))?;
        let result = work(&site, &mut visit);
        frozen.threads.insert(0, visit.leave()?);
        site.clean()?;
        result
    }
}

/// The main thread of a frozen program, lent for many system calls ([`Lender::bench`]).
#[derive(Debug)]
pub struct Bench<'a> {
    site: &'a Site<'a>,
    memory: &'a Memory,
    process: &'a Proc,
    frozen: &'a mut Frozen,
    /// Where a table of calls can be run with a single stop.
    planted: Option<&'a Planted<'a>>,
    is_filtered: bool,
}

/// Most calls of one table.
const CALLS: usize = 128;
/// Bytes of data that go with each.
const CALL_DATA: usize = 40;

impl Lender<'_> {
    /// As [`Lender::main_thread`], for programs of many calls.
    ///
    /// # Errors
    /// As there. The calling OS thread is to end then: what it may still trace is let go with it.
    pub fn bench<T>(
        &self,
        frozen: &mut Frozen,
        calls: &[(i64, [u64; 6])],
        work: impl FnOnce(&mut Bench<'_>) -> Result<T>,
    ) -> Result<T> {
        let leader = &frozen.threads[0];
        let maps = self.process.maps()?;
        let find = |name: &[u8]| maps.iter().find(|v| v.name == name);
        let planted = match find(b"[vdso]") {
            Some(vdso) => Planted::plant(self.memory, (vdso.start, vdso.end))?,
            None => None,
        };
        let no = |why: &str| Error::Failed(format!("its main thread cannot be asked: {why}"));
        let gadgets = gadgets(self.gadgets, planted.as_ref(), self.memory, &maps);
        let gadgets = gadgets.ok_or_else(|| no("it has no way to make a system call"))?;
        let stack = find(b"[stack]").ok_or_else(|| no("its stack is unmapped"))?;
        let gate = self.gate(frozen, &maps, gadgets, calls)?;
        let sp = self.lowest.map_or_else(|| leader.regs().map(|regs| regs.sp()), Ok)?;
        let stack = Stack { start: stack.start, end: stack.end, sp };
        let xstate = leader.xstate()?;
        let table = (CALLS + 1) * (batch::ENTRY + CALL_DATA);
        let data_len = table.max(twin::site_data_len(xstate.len()));
        let site = Site::choose(self.memory, gate.gadgets, stack, xstate.len(), 1, data_len)?;
        let is_filtered = self.process.status()?.seccomp != 0;
        let fits = |planted: &&Planted<'_>| {
            let ip = leader.regs().map_or(0, |regs| regs.ip());
            arch::reaches_plain_memory(&xstate) && !planted.holds(ip) && gate.lets_through(planted.batch_ip())
        };
        let planted = planted.as_ref().filter(fits);
        let mut bench =
            Bench { site: &site, memory: self.memory, process: self.process, frozen, planted, is_filtered };
        let result = work(&mut bench);
        site.clean()?;
        result
    }
}

impl Bench<'_> {
    /// Makes calls that follow from each other.
    pub fn visit<T>(&mut self, work: impl FnOnce(&Site<'_>, &mut Visit<'_>) -> Result<T>) -> Result<T> {
        let mut visit = self.site.visit(0, self.frozen.threads.remove(0))?;
        let result = work(self.site, &mut visit);
        self.frozen.threads.insert(0, visit.leave()?);
        result
    }

    /// Most calls of a program for [`Bench::run`], of at most 40 bytes of data each.
    pub fn most_calls() -> usize {
        CALLS
    }

    /// Makes calls that do not, with a single stop where that can be.
    pub fn run(&mut self, program: &Program) -> Result<Outcome> {
        let leader = &self.frozen.threads[0];
        let mask = leader.sigmask()?;
        let status = self.process.status()?;
        let signal = Signal::choose(&status, mask).filter(|_| !self.is_filtered && batch::can_run(program));
        let (Some(planted), Some(signal)) = (self.planted, signal) else {
            return self.visit(|site, visit| Ok(site.run(visit, program)?));
        };
        let xstate = leader.xstate()?;
        let regs = outside_critical_section(self.memory, leader, leader.regs()?)?;
        let thread = self.frozen.threads.remove(0);
        let origin = Origin { regs: &regs, xstate: &xstate, mask };
        let place = Place::SlotAndData(0);
        let mut away = self.site.send(planted, vec![Departure { thread, origin, place, signal, program }])?;
        let away = away.pop().ok_or_else(|| Error::Failed("its main thread was not asked".into()))?;
        let (thread, answers) = away.wait(&regs)?;
        self.frozen.threads.insert(0, thread);
        let outcome = self.site.outcomes(&[answers])?.pop();
        outcome.ok_or_else(|| Error::Failed("its main thread did not answer".into()))
    }
}

impl Lender<'_> {
    /// Where the main thread makes these calls, and comes home: its seccomp filters must let it, as, if we died meanwhile, a filter
    /// would kill it. `common` is where others make some.
    fn gate(
        &self,
        frozen: &Frozen,
        maps: &[Vma],
        common: Gadgets,
        calls: &[(i64, [u64; 6])],
    ) -> Result<Gate> {
        let failed =
            |e: &dyn std::fmt::Display| Error::Failed(format!("its main thread cannot be asked: {e}"));
        let status = self.process.status().map_err(|e| failed(&e))?;
        let what = attributes::target::named(self.process.pid());
        let incapable = |why: String, hint: &str| {
            Error::Incapable(Refusal { what: what.clone(), why, hint: hint.into() })
        };
        if status.seccomp == 1 {
            return Err(incapable(
                "it is in strict seccomp mode and can make no system call for us".into(),
                "",
            ));
        }
        let mut builder = crate::Builder::new();
        let mut thread = Thread::default();
        let told = attributes::thread::stopped(&mut builder, &frozen.threads[0], status.seccomp, &mut thread);
        told.map_err(|e| failed(&e))?;
        if let Some(refusal) = builder.refusals.pop() {
            return Err(Error::Incapable(refusal));
        }
        let selectors = match thread.dispatch {
            None => Vec::new(),
            Some(_) => selectors(frozen)?,
        };
        let mut gates = Gates::new(self.memory, maps, common, selectors);
        let gate = gates.of(&thread, &what).map_err(Error::Incapable)?;
        let (ip, home) = (gate.gadgets.call_ip(), gate.gadgets.sigreturn_ip());
        let home = FilteredCall { nr: libc::SYS_rt_sigreturn, ip: home, args: [0; 6] };
        let calls = calls.iter().map(|&(nr, args)| FilteredCall { nr, ip, args });
        let mut calls = calls.chain([home]);
        match calls.find(|call| !thread.seccomp.iter().all(|f| bpf::allows(&f.program.0, call))) {
            Some(call) => {
                let name = usize::try_from(call.nr).ok().and_then(Sysno::new);
                let name = name.map_or_else(|| format!("system call {}", call.nr), |name| name.to_string());
                let why = format!("its seccomp filter forbids {name}, which it is to call for us");
                Err(incapable(why, "allow that call in the filter"))
            }
            None => Ok(gate),
        }
    }
}

/// Addresses of the selectors of all threads that dispatch their calls.
fn selectors(frozen: &Frozen) -> Result<Vec<u64>> {
    let all = frozen.threads.iter().map(Stopped::dispatch).collect::<Result<Vec<_>, _>>()?;
    Ok(all.into_iter().flatten().map(|dispatch| dispatch.selector).collect())
}
