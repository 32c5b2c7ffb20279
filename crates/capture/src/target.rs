//! One process of a program, before it is stopped.

use crate::attributes::target;
use crate::freeze::Frozen;
use crate::home::Home;
use crate::{Builder, Error, Result, files};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::SystemTime;
use stillpoint_image::{Image, Meta, Owner, Process};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::Gadgets;
use stillpoint_linux::inject::{Planted, find_gadgets};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::{Proc, Vma, own_time_offsets};

/// One process of a program, before it is stopped.
#[derive(Debug)]
pub struct Target {
    /// Its id in our pid namespace.
    pub pid: u32,
    /// Where its ids are told.
    pub home: Arc<Home>,
    /// Row of its address space in the image, under which its pages are stored. Processes that share it have the same.
    pub space: u32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
    /// Its `/proc` folder.
    pub process: Arc<Proc>,
    /// Its memory.
    pub memory: Memory,
    /// Its page map.
    pub pagemap: Pagemap,
    /// Where in its code a system call can be made; none if that was not looked for, or there is no such place.
    pub gadgets: Option<Gadgets>,
    /// Where 16 bytes are that tell it from what it may become (`AT_RANDOM`).
    random: Option<RemoteAddr>,
    /// What its clocks differ by from ours, nanoseconds.
    clock_shift: (i64, i64),
}

/// Where a system call can be made in a program: where that is `known`, in what was planted there, or in its code. That is looked through
/// last; who came in the freeze and has taken the vdso away, as below Valgrind, has nothing else.
pub(crate) fn gadgets(
    known: Option<Gadgets>,
    planted: Option<&Planted<'_>>,
    memory: &Memory,
    maps: &[Vma],
) -> Option<Gadgets> {
    known.or(planted.map(|planted| planted.gadgets)).or_else(|| in_code(memory, maps, &ANYWHERE))
}

/// All addresses.
const ANYWHERE: [(u64, u64); 1] = [(0, u64::MAX)];

/// Where in a program's code one can be made, within some ranges of addresses, if there is such a place.
pub(crate) fn in_code(memory: &Memory, maps: &[Vma], within: &[(u64, u64)]) -> Option<Gadgets> {
    let code = maps.iter().filter(|v| v.prot & libc::PROT_EXEC as u32 != 0);
    let mut code: Vec<_> = code.filter(|v| v.name != b"[vsyscall]").collect();
    // The C library has both.
    code.sort_by_key(|v| !v.name.windows(4).any(|w| w == b"libc"));
    let parts = code
        .into_iter()
        .flat_map(|v| within.iter().map(|(start, end)| (v.start.max(*start), v.end.min(*end))));
    find_gadgets(memory, &parts.filter(|(start, end)| start < end).collect::<Vec<_>>())
}

impl Target {
    /// Refuses what cannot be captured, before anything is done to it. `home`: that of the root, if this is not the root.
    ///
    /// # Errors
    /// [`Error::Target`], [`Error::Refused`], and what cannot be read.
    pub fn open(pid: u32, space: u32, home: Option<Arc<Home>>) -> Result<Self> {
        let mut target = Self::open_quickly(pid, space, home)?;
        let mut builder = Builder::new();
        files::refuse_questions(&mut builder, pid)?;
        builder.refuse_if_needed()?;
        target.gadgets = in_code(&target.memory, &target.process.maps()?, &ANYWHERE);
        Ok(target)
    }

    /// As [`Target::open`], without a look through its code, which takes long: calls are then made in its vdso.
    ///
    /// # Errors
    /// As [`Target::open`].
    pub fn open_quickly(pid: u32, space: u32, home: Option<Arc<Home>>) -> Result<Self> {
        let gone = || Error::Target(format!("there is no process {pid}"));
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
        let pidfd = pidfd_open(id, PidfdFlags::empty()).map_err(|_| gone())?;
        let process = Arc::new(target::find(pid)?);
        // A process whose main thread has ended has no memory by its own name.
        let mut builder = Builder::new();
        target::leader_ended_for_good(&mut builder, &process)?;
        builder.refuse_if_needed()?;
        let (memory, pagemap) = (Memory::open(pid)?, Pagemap::open(pid)?);
        let clock_shift = clock_shift(&process);
        let home = match home {
            Some(home) => home,
            None => Arc::new(Home::of(&process)?),
        };
        let auxv = process.auxv().unwrap_or_default();
        let random = auxv.iter().find(|(kind, _)| *kind == libc::AT_RANDOM).map(|(_, at)| RemoteAddr(*at));
        Ok(Target { pid, home, space, pidfd, process, memory, pagemap, gadgets: None, random, clock_shift })
    }

    /// Brings all threads to rest.
    ///
    /// # Errors
    /// [`Error::Replaced`] if what is known of it is of another program than it is now.
    pub fn freeze(&self) -> Result<Frozen> {
        let frozen = Frozen::freeze(&self.process)?;
        match self.is_replaced() {
            true => Err(Error::Replaced),
            false => Ok(frozen),
        }
    }

    /// Whether it has become another program (`execve(2)`) since it was opened: its memory of then is no more, or, if it shared
    /// that, others'.
    pub fn is_replaced(&self) -> bool {
        // Nobody waits here for a page that is still to be loaded: that is one of a program that was not replaced.
        let is_others = |random| self.pagemap.has_page(random) && !self.memory.is_still_its_own(random);
        self.has_no_memory() || self.random.is_some_and(is_others)
    }

    /// Whether nobody has the memory any more that it had when it was opened.
    pub fn has_no_memory(&self) -> bool {
        self.pagemap.is_of_the_past()
    }

    /// Its monotonic and boot time, nanoseconds.
    pub fn clocks(&self) -> (i64, i64) {
        let now = |clock| {
            let t = clock_gettime(clock);
            t.tv_sec * 1_000_000_000 + t.tv_nsec
        };
        (now(ClockId::Monotonic) + self.clock_shift.0, now(ClockId::Boottime) + self.clock_shift.1)
    }

    /// Notes the moment of the cut.
    pub fn stamp(&self, meta: &mut Meta) {
        meta.taken_ns = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
        (meta.monotonic_ns, meta.boottime_ns) = self.clocks();
    }

    /// Whose its pages are.
    pub fn owner(&self) -> Owner {
        Owner::Space(self.space)
    }

    /// Its row in an image that describes it.
    ///
    /// # Errors
    /// That it is not described there.
    pub fn described<'i>(&self, image: &'i Image) -> Result<&'i Process> {
        let mut all = image.processes.iter().filter(|p| p.space == self.space);
        let own = match (all.next(), all.next()) {
            (own, None) => own,
            // They share it.
            _ => {
                let pid = self.process.status()?.own_pid();
                image.processes.iter().find(|p| p.space == self.space && p.pid == pid)
            }
        };
        own.ok_or_else(|| Error::Failed(format!("process {} has not been described", self.pid)))
    }
}

/// What the target's monotonic and boot time differ by from ours, nanoseconds.
fn clock_shift(process: &Proc) -> (i64, i64) {
    let theirs = process.time_offsets().ok().flatten().unwrap_or_default();
    let own = own_time_offsets();
    (theirs.0 - own.0, theirs.1 - own.1)
}
