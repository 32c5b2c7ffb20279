//! One thread of a frozen program, lent for system calls.

use crate::freeze::Frozen;
use crate::{Error, Result, attributes};
use stillpoint_image::Thread;
use stillpoint_linux::arch::Gadgets;
use stillpoint_linux::bpf::{self, FilteredCall};
use stillpoint_linux::inject::{Planted, Site, Stack, Visit};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::twin;

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
    /// [`Error::Failed`] with the reason if the thread cannot make these calls and come home; those of `work`.
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
        let gadgets = self.gadgets.or(planted.as_ref().map(|p| p.gadgets));
        let gadgets = gadgets.ok_or_else(|| no("it has no way to make a system call"))?;
        let stack = find(b"[stack]").ok_or_else(|| no("its stack is unmapped"))?;
        permitted(self.process, frozen, gadgets, calls).map_err(|why| no(&why))?;
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

/// Whether the thread's seccomp filters let it make the calls and come home: if we died meanwhile, a filter would
/// kill it.
fn permitted(
    process: &Proc,
    frozen: &Frozen,
    gadgets: Gadgets,
    calls: &[(i64, [u64; 6])],
) -> Result<(), String> {
    let status = process.status().map_err(|e| e.to_string())?;
    if status.seccomp == 1 {
        return Err("it is in strict seccomp mode".into());
    }
    let mut builder = crate::Builder::new();
    let mut thread = Thread::default();
    let told = attributes::thread::stopped(&mut builder, &frozen.threads[0], status.seccomp, &mut thread);
    told.map_err(|e| e.to_string())?;
    if let Some(refusal) = builder.refusals.first() {
        return Err(refusal.why.clone());
    }
    let ip = gadgets.call.0 + 2;
    let home = FilteredCall { nr: libc::SYS_rt_sigreturn, ip: gadgets.sigreturn.0, args: [0; 6] };
    let calls = calls.iter().map(|&(nr, args)| FilteredCall { nr, ip, args });
    let mut calls = calls.chain([home]);
    match calls.find(|call| !thread.seccomp.iter().all(|f| bpf::allows(&f.program.0, call))) {
        Some(call) => Err(format!("its seccomp filter forbids system call {}", call.nr)),
        None => Ok(()),
    }
}
