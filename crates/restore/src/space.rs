//! Rebuilding an address space in a new process.
//!
//! The process starts as a copy of ours. A small area that neither we nor the program use holds the code and tables
//! of the remote programs; everything else but the kernel's own mappings is unmapped, those are moved to where the
//! program had them, and the program's mappings are made around them.

use crate::{Error, Result};
use stillpoint_image::{AddressSpace, Backing, Mapping, MappingFlags, Owner, PageMap};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::ptrace::Stopped;
use stillpoint_linux::remote::{Area, Remote};
pub use stillpoint_linux::spawn::find_gap;
use stillpoint_linux::spawn::{ADDRESS_SPACE, REBUILDING};

/// Length of the area for code and tables, bytes.
pub const AREA_LEN: u64 = 1 << 20;
/// Room behind the area through which the kernel's mappings are moved.
pub(crate) const SPARE_LEN: u64 = 1 << 20;
const _: () = assert!(AREA_LEN + SPARE_LEN == REBUILDING);
/// Kept free below a stack, which may grow while it is filled.
const BELOW_STACK: u64 = 64 << 20;

/// Descriptors, in the new process, of what mappings are made from.
pub trait Backings {
    /// Descriptor of a file (row of [`Image::paths`]), able to write if asked.
    fn file(&self, path: u32, write: bool) -> Result<i32>;
    /// Descriptor of a memory object (row of [`Image::objects`]).
    fn object(&self, object: u32, write: bool) -> Result<i32>;
}

/// Finds room for the area: `AREA_LEN + SPARE_LEN` bytes used neither by us nor by any process of the program.
pub fn find_room(spaces: &[AddressSpace], own: &[Vma]) -> Result<u64> {
    let mut taken: Vec<(u64, u64)> = own.iter().map(|v| (v.start, v.end)).collect();
    taken.extend(spaces.iter().flat_map(|s| &s.mappings).map(|m| {
        let below = if m.flags.contains(MappingFlags::GROWS_DOWN) { BELOW_STACK } else { 0 };
        (m.start.saturating_sub(below), m.end)
    }));
    find_gap(taken, AREA_LEN + SPARE_LEN)
        .ok_or_else(|| Error::Failed("the program leaves no room in its address space to rebuild it".into()))
}

/// Prepares a fresh copy of our process for remote programs: afterwards it has nothing but the area and the kernel's
/// own mappings, where we have them.
pub fn clear<'a>(memory: &'a Memory, thread: Stopped, room: u64) -> Result<Remote<'a>> {
    let own_code =
        Area { code: RemoteAddr(arch::program_loop().as_ptr() as u64), ..Area::new(room, AREA_LEN) };
    let rseq = thread.rseq()?;
    let mut remote = Remote::new(memory, thread, own_code)?;
    if rseq.registered().is_some() {
        // The kernel writes to the registered area at every preemption; it is about to go.
        let args = [rseq.address, rseq.size.into(), RSEQ_FLAG_UNREGISTER, rseq.signature.into(), 0, 0];
        remote.step(libc::SYS_rseq, args)?;
    }
    make_area(&mut remote, arch::step_address(own_code.code), room)?;
    remote.run(&unmap_all_but(&kernels(memory)?, room))?;
    Ok(remote)
}

/// Maps the area for remote programs, with calls at a `syscall` instruction that there is already.
///
/// # Errors
/// [`Error::Failed`] if something else is there.
pub fn make_area(remote: &mut Remote<'_>, gadget: RemoteAddr, room: u64) -> Result<()> {
    let rx = libc::PROT_READ | libc::PROT_EXEC;
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    for (start, len, prot) in [(room, 4096, rx), (room + 4096, AREA_LEN - 4096, rw)] {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let args = [start, len, prot as u64, flags as u64, u64::MAX, 0];
        let r = remote.step_from(gadget, libc::SYS_mmap, args)?;
        if r as u64 != start {
            return Err(Error::Failed(format!(
                "cannot map the area for remote calls at {start:#x}: error {}",
                -r
            )));
        }
    }
    remote.memory().write_forced(RemoteAddr(room), arch::program_loop())?;
    remote.move_to(Area::new(room, AREA_LEN));
    Ok(())
}

/// Moves the kernel's own mappings of a process that was [cleared](clear), or is a copy of one, to where the program had them.
pub fn settle(remote: &mut Remote<'_>, space: &AddressSpace, room: u64) -> Result<()> {
    let kernels = kernels(remote.memory())?;
    move_kernel_mappings(remote, space, &kernels, room + AREA_LEN)
}

/// The kernel's own mappings.
fn kernels(memory: &Memory) -> Result<Vec<Vma>> {
    Ok(Proc::process(memory.pid())?.maps()?.into_iter().filter(is_kernels).collect())
}

fn is_kernels(vma: &Vma) -> bool {
    vma.name.starts_with(b"[v") && vma.name != b"[vsyscall]"
}

fn unmap_all_but(kernels: &[Vma], room: u64) -> Program {
    let mut keep: Vec<(u64, u64)> = kernels.iter().map(|v| (v.start, v.end)).collect();
    keep.push((room, room + AREA_LEN));
    keep.sort_unstable();
    let mut program = Program::new();
    let mut at = 0;
    for (start, end) in keep.into_iter().chain([(ADDRESS_SPACE.1, 0)]) {
        if start > at {
            program.call("munmap", libc::SYS_munmap, [at.into(), (start - at).into()]);
        }
        at = end;
    }
    program
}

/// Moves `[vdso]`, `[vvar]` and their like to where the program had them, through the spare room, since the old and
/// the new places may overlap. Those the program had unmapped are unmapped.
fn move_kernel_mappings(
    remote: &mut Remote<'_>,
    space: &AddressSpace,
    own: &[Vma],
    spare: u64,
) -> Result<()> {
    let wanted: Vec<(&str, &Mapping)> = space.mappings.iter().filter_map(special).collect();
    let mut away = Program::new();
    let mut home = Program::new();
    let fixed = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut at = spare;
    for vma in own {
        let len = vma.end - vma.start;
        let name = String::from_utf8_lossy(&vma.name).into_owned();
        let Some((_, m)) = wanted.iter().find(|(n, m)| *n == name && m.len() == len) else {
            away.call(format!("munmap {name}"), libc::SYS_munmap, [vma.start.into(), len.into()]);
            continue;
        };
        if m.start == vma.start {
            continue;
        }
        let what = format!("move {name}");
        let to = |from: u64, to: u64| [from.into(), len.into(), len.into(), fixed.into(), Arg::Value(to)];
        away.call(what.clone(), libc::SYS_mremap, to(vma.start, at));
        home.call(what, libc::SYS_mremap, to(at, m.start));
        at += len;
    }
    for (name, m) in &wanted {
        let found = own.iter().any(|v| v.name == name.as_bytes() && v.end - v.start == m.len());
        if !found {
            return Err(Error::Refused(vec![format!(
                "this kernel has no {name} of {} bytes, which the program was running with: the checkpoint was taken \
                 on another kernel version",
                m.len()
            )]));
        }
    }
    remote.run(&away)?;
    remote.run(&home)?;
    Ok(())
}

fn special(mapping: &Mapping) -> Option<(&str, &Mapping)> {
    match &mapping.backing {
        Backing::Special(name) => Some((name, mapping)),
        _ => None,
    }
}

/// Makes those of the program's mappings that `which` says, but no System V shared memory, writable as far as they will be filled.
pub fn map(
    remote: &mut Remote<'_>,
    space: &AddressSpace,
    filled: &Filled,
    backings: &dyn Backings,
    which: &dyn Fn(&Mapping) -> bool,
) -> Result<()> {
    let mut program = Program::new();
    let attached = |m: &&Mapping| matches!(m.backing, Backing::Segment { .. });
    for m in space.mappings.iter().filter(|m| special(m).is_none() && !attached(m) && which(m)) {
        let prot =
            if starts_writable(m, filled) { libc::PROT_READ | libc::PROT_WRITE } else { m.prot as i32 };
        let (fd, offset) = match &m.backing {
            Backing::File { path, offset, may_write } => {
                (backings.file(*path, *may_write && m.shared)?, *offset)
            }
            Backing::Device { path, offset } => (backings.file(*path, m.shared)?, *offset),
            Backing::Object { object, offset, may_write } => {
                (backings.object(*object, *may_write || !m.shared)?, *offset)
            }
            _ => (-1, 0),
        };
        let args: [u64; 6] = [m.start, m.len(), prot as u64, map_flags(m) as u64, fd as u64, offset];
        program.call(format!("map {:x}-{:x}", m.start, m.end), libc::SYS_mmap, args.map(Arg::Value));
    }
    remote.run(&program)?;
    Ok(())
}

/// Whether a mapping is made writable first and gets its protection later: to be filled; or because it was writable
/// once, which the kernel remembers in its account of committed memory.
fn starts_writable(m: &Mapping, filled: &Filled) -> bool {
    let was_writable = !m.shared && m.flags.contains(MappingFlags::ACCOUNTED);
    filled.contains(m) || was_writable
}

fn map_flags(m: &Mapping) -> i32 {
    let mut flags = libc::MAP_FIXED_NOREPLACE;
    flags |= if m.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    if m.backing == Backing::Anonymous {
        flags |= libc::MAP_ANONYMOUS;
        if m.huge_page != 0 {
            flags |= libc::MAP_HUGETLB | (m.huge_page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
        }
    }
    for (state, flag) in [
        (MappingFlags::GROWS_DOWN, libc::MAP_GROWSDOWN),
        (MappingFlags::NO_RESERVE, libc::MAP_NORESERVE),
        (MappingFlags::DROPPABLE, MAP_DROPPABLE),
    ] {
        if m.flags.contains(state) {
            flags |= flag;
        }
    }
    if m.flags.contains(MappingFlags::DROPPABLE) {
        flags &= !libc::MAP_PRIVATE; // the type is a number, not a bit
    }
    flags
}

const RSEQ_FLAG_UNREGISTER: u64 = 1;
const MAP_DROPPABLE: i32 = 0x08;
const MADV_GUARD_INSTALL: i32 = 102;
const SYS_MSEAL: i64 = 462;

/// Which mappings have private pages of their own to be filled in.
#[derive(Debug)]
pub struct Filled {
    starts: Vec<(u64, u64)>,
}

impl Filled {
    /// From the page map, for address space `space`.
    pub fn of(pages: &PageMap, space: u32) -> Self {
        let mut starts: Vec<(u64, u64)> = Vec::new();
        for e in pages.of(Owner::Space(space)) {
            match starts.last_mut() {
                Some(last) if last.1 == e.address => last.1 = e.end(),
                _ => starts.push((e.address, e.end())),
            }
        }
        Filled { starts }
    }

    /// All of these mappings, wherever they have pages.
    pub fn whole(mappings: &[Mapping]) -> Self {
        Filled { starts: mappings.iter().filter(|m| !m.shared).map(|m| (m.start, m.end)).collect() }
    }

    fn contains(&self, m: &Mapping) -> bool {
        let i = self.starts.partition_point(|&(_, end)| end <= m.start);
        self.starts.get(i).is_some_and(|&(start, _)| start < m.end)
    }
}

/// What must be in force while those of its mappings that `which` says are filled: huge page hints.
pub fn advise_before(
    remote: &mut Remote<'_>,
    space: &AddressSpace,
    which: &dyn Fn(&Mapping) -> bool,
) -> Result<()> {
    let mut program = Program::new();
    let before =
        [(MappingFlags::HUGE_PAGE, libc::MADV_HUGEPAGE), (MappingFlags::NO_HUGE_PAGE, libc::MADV_NOHUGEPAGE)];
    advise(&mut program, space.mappings.iter().filter(|m| which(m)), &before);
    remote.run(&program)?;
    Ok(())
}

fn advise<'m>(
    program: &mut Program,
    mappings: impl Iterator<Item = &'m Mapping>,
    states: &[(MappingFlags, i32)],
) {
    for m in mappings {
        for &(state, advice) in states.iter().filter(|(state, _)| m.flags.contains(*state)) {
            let what = format!("madvise {:x}-{:x} {state:?}", m.start, m.end);
            program.call(what, libc::SYS_madvise, [m.start.into(), m.len().into(), (advice as u64).into()]);
        }
    }
}

/// Lets the kernel remember of mappings that they were writable once, where they have no pages by which it would: it takes
/// them out of its account of committed memory when they lose that protection without ever having had one.
pub fn keep_accounts(remote: &mut Remote<'_>, space: &AddressSpace, filled: &Filled) -> Result<()> {
    let forgets = |m: &&Mapping| {
        let read_only = m.prot & libc::PROT_WRITE as u32 == 0;
        read_only && m.huge_page == 0 && starts_writable(m, filled) && !filled.contains(m)
    };
    let firsts: Vec<u64> = space.mappings.iter().filter(forgets).map(|m| m.start).collect();
    let zero: Vec<(RemoteAddr, &[u8])> = firsts.iter().map(|&at| (RemoteAddr(at), &[0][..])).collect();
    remote.memory().write_many(&zero)?;
    let mut program = Program::new();
    for at in firsts {
        let args = [at.into(), 4096.into(), (libc::MADV_DONTNEED as u64).into()];
        program.call(format!("madvise {at:x}"), libc::SYS_madvise, args);
    }
    remote.run(&program)?;
    Ok(())
}

/// Gives mappings their final protection and states, once they are filled.
pub fn finish(remote: &mut Remote<'_>, space: &AddressSpace, filled: &Filled) -> Result<()> {
    let mut program = Program::new();
    guard(&mut program, space);
    protect(&mut program, space, filled);
    advise(
        &mut program,
        space.mappings.iter(),
        &[
            (MappingFlags::SEQUENTIAL, libc::MADV_SEQUENTIAL),
            (MappingFlags::RANDOM, libc::MADV_RANDOM),
            (MappingFlags::DONT_FORK, libc::MADV_DONTFORK),
            (MappingFlags::DONT_DUMP, libc::MADV_DONTDUMP),
            (MappingFlags::WIPE_ON_FORK, libc::MADV_WIPEONFORK),
            (MappingFlags::MERGEABLE, libc::MADV_MERGEABLE),
        ],
    );
    name(&mut program, space);
    lock(&mut program, space);
    for m in space.mappings.iter().filter(|m| m.flags.contains(MappingFlags::SEALED) && special(m).is_none())
    {
        let what = format!("seal {:x}-{:x}", m.start, m.end);
        program.call(what, SYS_MSEAL, [m.start.into(), m.len().into(), 0.into()]);
    }
    remote.run(&program)?;
    Ok(())
}

fn guard(program: &mut Program, space: &AddressSpace) {
    for g in space.mappings.iter().flat_map(|m| &m.guards) {
        let what = format!("guard {:x}-{:x}", g.start, g.end());
        let args = [g.start.into(), g.len.into(), (MADV_GUARD_INSTALL as u64).into()];
        program.call(what, libc::SYS_madvise, args);
    }
}

fn protect(program: &mut Program, space: &AddressSpace, filled: &Filled) {
    let keys = space.mappings.iter().map(|m| m.pkey).max().unwrap_or(0);
    // Keys are handed out in ascending order; those that no mapping uses go back.
    let used: Vec<bool> = (0..=keys).map(|k| space.mappings.iter().any(|m| m.pkey == k)).collect();
    for _ in 1..=keys {
        program.call("allocate a protection key", libc::SYS_pkey_alloc, [0.into(), 0.into()]);
    }
    let read_write = (libc::PROT_READ | libc::PROT_WRITE) as u32;
    for m in space.mappings.iter().filter(|m| special(m).is_none()) {
        let what = format!("protect {:x}-{:x}", m.start, m.end);
        if m.pkey != 0 {
            let args = [m.start, m.len(), u64::from(m.prot), u64::from(m.pkey)].map(Arg::Value);
            program.call(what, libc::SYS_pkey_mprotect, args);
        } else if m.prot != read_write && starts_writable(m, filled) {
            let args = [m.start, m.len(), u64::from(m.prot)].map(Arg::Value);
            program.call(what, libc::SYS_mprotect, args);
        }
    }
    for key in (1..=keys).filter(|&k| !used[k as usize]) {
        program.call("free a protection key", libc::SYS_pkey_free, [u64::from(key).into()]);
    }
}

fn name(program: &mut Program, space: &AddressSpace) {
    const PR_SET_VMA: u64 = 0x5356_4d41;
    for m in &space.mappings {
        let Some(name) = &m.name else { continue };
        let text = program.string(&name.0);
        let args = [PR_SET_VMA.into(), 0.into(), m.start.into(), m.len().into(), text];
        // Only for people who read /proc/PID/maps; kernels may be built without it.
        program.attempt("name a mapping", libc::SYS_prctl, args);
    }
}

fn lock(program: &mut Program, space: &AddressSpace) {
    for m in space.mappings.iter().filter(|m| special(m).is_none()) {
        let on_fault = m.flags.contains(MappingFlags::LOCK_ON_FAULT);
        if on_fault || m.flags.contains(MappingFlags::LOCKED) {
            let what = format!("lock {:x}-{:x} in memory", m.start, m.end);
            let args = [m.start, m.len(), u64::from(on_fault)].map(Arg::Value);
            // Pages that nobody may touch cannot be brought in; the mapping is locked all the same, as it was.
            match m.prot & libc::PROT_READ as u32 != 0 && m.guards.is_empty() {
                true => program.call(what, libc::SYS_mlock2, args),
                false => program.attempt(what, libc::SYS_mlock2, args),
            };
        }
    }
    if space.lock_future != 0 {
        let on_fault = if space.lock_future == 2 { libc::MCL_ONFAULT } else { 0 };
        let flags = (libc::MCL_FUTURE | on_fault) as u64;
        program.call("mlockall", libc::SYS_mlockall, [flags.into()]);
    }
}

/// Unmaps the area, from a thread that then has no code to run any more.
pub fn unmap_area(remote: &mut Remote<'_>, room: u64) -> Result<()> {
    match remote.step(libc::SYS_munmap, [room, AREA_LEN, 0, 0, 0, 0])? {
        0 => Ok(()),
        e => Err(Error::Failed(format!("cannot unmap the area for remote calls: error {}", -e))),
    }
}
