//! Everything about a frozen process except the contents of its memory.

use crate::attributes;
use crate::attributes::inside::{ProcessQuery, ThreadQuery};
use crate::attributes::target::{self, Examined};
use crate::attributes::thread::{Look, ThreadFiles};
use crate::blocked::{self, Earlier, Waiting};
use crate::brief::deliverable;
use crate::files::{self, Outsiders};
use crate::freeze::Frozen;
use crate::mappings::capture_mappings;
use crate::{Builder, Error, Result};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use stillpoint_image::{BlockedCall, PAGE, Process, Thread, Usage};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::{self, Gadgets, Regs};
use stillpoint_linux::bpf::{self, FilteredCall};
use stillpoint_linux::descriptors::raise_descriptor_limit;
use stillpoint_linux::inject::{Planted, Site, Stack, Visit, outside_critical_section};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::{Category, Pagemap, Query};
use stillpoint_linux::proc::{Proc, Status};
use stillpoint_linux::program::Program;
use stillpoint_linux::ptrace::Stopped;

/// Threads visited at a time.
const SLOTS: usize = 1;
/// Room for the data of injected programs, bytes.
const DATA_LEN: usize = 16 << 10;

/// What is known of the target before it is stopped.
pub struct Known<'a> {
    /// Its `/proc` folder.
    process: &'a Proc,
    /// Its pidfd.
    pidfd: BorrowedFd<'a>,
    /// Its memory.
    memory: &'a Memory,
    /// Its page map.
    pagemap: &'a Pagemap,
    /// Streams from outside that it was started with, besides the standard ones.
    inherited: &'a [(u32, Vec<u8>)],
    /// What about it as a whole was looked at.
    examined: Examined,
    /// The files of its threads in `/proc`.
    threads: HashMap<u32, ThreadFiles>,
    /// Who else holds descriptors of what.
    outsiders: Outsiders,
    /// Where in its code its threads can make system calls, if there is such a place.
    gadgets: Option<Gadgets>,
    /// What its threads were waiting for.
    waiting: HashMap<u32, Waiting>,
    /// Calls that an earlier checkpoint found interrupted, by thread, with the time left now.
    earlier: HashMap<u32, BlockedCall>,
}

impl<'a> Known<'a> {
    /// Learns what can be learned while the program runs; called right before it is stopped. What cannot be captured
    /// is among the refusals.
    ///
    /// # Errors
    /// That something cannot be read, or the process is gone.
    pub fn learn(
        builder: &mut Builder,
        process: &'a Proc,
        pidfd: BorrowedFd<'a>,
        memory: &'a Memory,
        pagemap: &'a Pagemap,
        inherited: &'a [(u32, Vec<u8>)],
        gadgets: Option<Gadgets>,
    ) -> Result<Self> {
        let pid = process.pid();
        let maps = process.maps()?;
        let mut outsiders = Outsiders::scan(&[pid]);
        let nameless: Vec<u64> = maps.iter().filter(|v| v.shared && v.deleted).map(|v| v.ino).collect();
        outsiders.scan_memory(&[pid], &nameless);
        raise_descriptor_limit()?;
        let mut threads = HashMap::new();
        for tid in process.threads()? {
            // A thread that ends meanwhile, or for which we have no descriptors left, is none of those known.
            if let Ok(files) = process.sibling(tid).map_err(Error::from).and_then(ThreadFiles::open) {
                threads.insert(tid, files);
            }
        }
        let examined = target::examine(builder, process)?;
        let (waiting, earlier) = Default::default();
        #[rustfmt::skip]
        let known = Known {
            process, pidfd, memory, pagemap, inherited, examined, threads, outsiders, gadgets, waiting, earlier,
        };
        Ok(known)
    }

    /// What was found at an earlier stop, as it is at `now_ns` of the program's monotonic clock.
    pub fn set_earlier(&mut self, earlier: &Earlier, now_ns: i64) {
        self.earlier = earlier.calls_at(now_ns);
    }

    /// Looks what the threads are waiting for; called right before they are stopped.
    pub fn observe(&mut self) -> Result<()> {
        self.waiting =
            self.threads.iter().map(|(&tid, files)| (tid, blocked::observe(&files.folder))).collect();
        Ok(())
    }
}

/// Describes the frozen process in the builder.
pub fn inspect(builder: &mut Builder, frozen: &mut Frozen, known: &Known<'_>) -> Result<()> {
    let new = open_new(frozen, known)?;
    let files = frozen.threads.iter().map(|t| known.threads.get(&t.tid()).or_else(|| new.get(&t.tid())));
    let files: Vec<&ThreadFiles> = files.flatten().collect();
    let looks = files.iter().map(|f| f.look()).collect::<Result<Vec<Look>>>()?;
    let threads: Vec<(&ThreadFiles, &Look)> = files.iter().copied().zip(&looks).collect();
    target::examine_again(builder, known.process, &known.examined, &threads)?;
    let main = &looks[0];
    let mut process = attributes::process::process(known.process, &main.stat, &main.status)?;
    let mut space = attributes::process::space(known.process, &main.stat)?;
    process.stopped = frozen.stopped_by();
    for (stopped, look) in frozen.threads.iter().zip(&looks) {
        process.threads.push(thread(builder, known, stopped, look)?);
    }
    process.pending = pending(&frozen.threads[0], true)?;
    attributes::thread::complete_pending(main.status.shared_pending, &mut process.pending);
    if builder.refusals.is_empty() {
        visit_all(builder, frozen, known, &looks, &mut process, &mut space)?;
    }
    if !builder.refusals.is_empty() {
        return Ok(());
    }
    let target = files::Target {
        pid: frozen.pid,
        pidfd: known.pidfd,
        frozen: true,
        inherited: known.inherited,
        outsiders: &known.outsiders,
    };
    space.mappings = capture_mappings(builder, &target, known.process, known.pagemap)?;
    process.table = files::capture_files(builder, &target)?;
    process.exe = link(builder, known.process, "exe", Usage::Read)?;
    process.cwd = link(builder, known.process, "cwd", Usage::Path)?;
    process.root = link(builder, known.process, "root", Usage::Path)?;
    builder.image.meta.host.xfeatures = arch::xstate_features(&process.threads[0].xstate.0);
    builder.image.spaces.push(space);
    builder.image.processes.push(process);
    Ok(())
}

/// The files of threads that began after the others were looked at.
fn open_new(frozen: &Frozen, known: &Known<'_>) -> Result<HashMap<u32, ThreadFiles>> {
    let mut new = HashMap::new();
    for tid in frozen.threads.iter().map(Stopped::tid).filter(|tid| !known.threads.contains_key(tid)) {
        new.insert(tid, ThreadFiles::open(known.process.sibling(tid)?)?);
    }
    Ok(new)
}

/// Row of what a link of the process's folder leads to.
fn link(builder: &mut Builder, process: &Proc, name: &str, usage: Usage) -> Result<u32> {
    let path = process.link(name)?;
    let what = match name {
        "exe" => "executable",
        "cwd" => "current directory",
        _ => "root directory",
    };
    let file = process.open_handle(name)?;
    Ok(files::path_file(builder, &path, file, usage, what)?.unwrap_or(0))
}

/// What ptrace and `/proc` tell of one thread.
fn thread(builder: &mut Builder, known: &Known<'_>, stopped: &Stopped, look: &Look) -> Result<Thread> {
    let mut thread = attributes::thread::thread(stopped.tid(), look)?;
    attributes::thread::stopped(builder, stopped, look.status.seccomp, &mut thread)?;
    let regs = stopped.regs()?;
    if !regs.is_64_bit() {
        return Err(Error::Target(format!(
            "thread {} runs 32-bit code, which is not supported",
            stopped.tid()
        )));
    }
    let waiting = known.waiting.get(&stopped.tid()).cloned().unwrap_or_default();
    let earlier = known.earlier.get(&thread.tid).copied();
    thread.blocked = blocked::interrupted_call(known.memory, &regs, &waiting, earlier);
    let status = &look.status;
    thread.regs = correct(known, status, stopped, regs)?.to_bytes().into();
    thread.xstate = stopped.xstate()?.into();
    thread.sigmask = stopped.sigmask()?;
    thread.pending = pending(stopped, false)?;
    attributes::thread::complete_pending(status.sig_pending, &mut thread.pending);
    thread.rseq = stopped.rseq().ok().and_then(|c| {
        let address = c.registered()?.0;
        Some(stillpoint_image::Rseq { address, size: c.size, signature: c.signature, flags: c.flags })
    });
    Ok(thread)
}

/// The registers with which a thread goes on, here and in the image: outside of restartable sequences, and without
/// an `EINTR` that only our stop caused.
fn correct(known: &Known<'_>, status: &Status, stopped: &Stopped, regs: Regs) -> Result<Regs> {
    let regs = outside_critical_section(known.memory, stopped, regs)?;
    Ok(blocked::unbroken(&regs, deliverable(status)))
}

fn pending(stopped: &Stopped, of_process: bool) -> Result<Vec<stillpoint_image::Bytes>> {
    Ok(stopped.pending(of_process)?.into_iter().map(|info| info.to_vec().into()).collect())
}

/// Runs in the threads themselves what only they can be asked, some threads at a time.
fn visit_all(
    builder: &mut Builder,
    frozen: &mut Frozen,
    known: &Known<'_>,
    looks: &[Look],
    process: &mut Process,
    space: &mut stillpoint_image::AddressSpace,
) -> Result<()> {
    let leader = &frozen.threads[0];
    let (sp, xstate_len) = (leader.regs()?.sp(), leader.xstate()?.len());
    let maps = known.process.maps()?;
    let find = |name: &[u8]| maps.iter().find(|v| v.name == name);
    let planted = match (known.gadgets, find(b"[vdso]")) {
        (None, Some(vdso)) => Planted::plant(known.memory, (vdso.start, vdso.end))?,
        _ => None,
    };
    let Some(gadgets) = known.gadgets.or(planted.as_ref().map(|p| p.gadgets)) else {
        builder.refuse("its code", "it has no way to make a system call and return from it, and no vdso", "");
        return Ok(());
    };
    let Some(vma) = find(b"[stack]") else {
        let hint = "only programs with their original main stack can be asked about their threads";
        builder.refuse("main stack", "the program has unmapped it", hint);
        return Ok(());
    };
    let stack = Stack { start: vma.start, end: vma.end, sp };
    let site = Site::choose(known.memory, gadgets, stack, xstate_len, SLOTS, DATA_LEN)?;
    let result = visit_in(&site, builder, frozen, known, looks, process, space);
    site.clean()?;
    result
}

fn visit_in(
    site: &Site<'_>,
    builder: &mut Builder,
    frozen: &mut Frozen,
    known: &Known<'_>,
    looks: &[Look],
    process: &mut Process,
    space: &mut stillpoint_image::AddressSpace,
) -> Result<()> {
    let ids: Vec<u32> = frozen.threads.iter().map(Stopped::tid).collect();
    let of_thread = ThreadQuery::new();
    let of_process = ProcessQuery::new(&looks[0].status, &known.process.timers()?);
    for thread in &process.threads {
        check_filters(builder, thread, of_thread.program(), site.gadgets());
    }
    check_filters(builder, &process.threads[0], of_process.program(), site.gadgets());
    if !builder.refusals.is_empty() {
        return Ok(());
    }
    for i in 0..ids.len() {
        // A visited thread is put back in its place, so that the order stays that of the image.
        let mut visit = site.visit(0, frozen.threads.remove(i))?;
        let outcome = site.run(&mut visit, of_thread.program())?;
        of_thread.decode(&outcome, &mut process.threads[i]);
        if i == 0 {
            let outcome = site.run(&mut visit, of_process.program())?;
            of_process.decode(&outcome, &ids, builder, process, space);
            space.lock_future = lock_future(&mut visit, known)?;
        }
        let stopped = visit.leave()?;
        // From here on the thread goes on as the image says.
        if let Some(regs) = Regs::from_bytes(&process.threads[i].regs.0) {
            stopped.set_regs(&regs)?;
        }
        frozen.threads.insert(i, stopped);
    }
    Ok(())
}

/// Whether future mappings are locked in memory (`mlockall(MCL_FUTURE)`: 1, on fault: 2), which only a new mapping
/// shows: one is made, looked at, and unmapped.
fn lock_future(visit: &mut Visit<'_>, known: &Known<'_>) -> Result<u32> {
    let maps = known.process.maps()?;
    let first = maps.first().map_or(0, |v| v.start);
    // Just below the lowest mapping, or in the first gap that is large enough to leave its neighbours alone.
    let gap = maps.windows(2).find(|w| w[1].start - w[0].end > 1 << 20).map(|w| w[0].end + (1 << 19));
    let Some(at) = (if first > 1 << 20 { Some(first - (1 << 19)) } else { gap }) else { return Ok(0) };
    let locked = || Ok::<_, Error>(known.process.status()?.locked);
    let before = locked()?;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    let map = [at, PAGE, (libc::PROT_READ | libc::PROT_WRITE) as u64, flags, u64::MAX, 0];
    let unmap = (libc::SYS_munmap, [at, PAGE, 0, 0, 0, 0]);
    if visit.call_with_undo(libc::SYS_mmap, map, unmap)? as u64 != at {
        return Ok(0); // no mapping more is allowed, let alone a locked one
    }
    let (after, mut present) = (locked()?, Vec::new());
    let query = Query { any: Category::PRESENT, ..Query::default() };
    known.pagemap.scan(RemoteAddr(at), RemoteAddr(at + PAGE), query, &mut present)?;
    visit.call(unmap.0, unmap.1)?;
    Ok(if after <= before {
        0
    } else if present.is_empty() {
        2
    } else {
        1
    })
}

/// Refuses a thread whose seccomp filters would not let it make these calls and come home: if we died while it is
/// lent to us, its filter would kill it.
fn check_filters(builder: &mut Builder, thread: &Thread, program: &Program, gadgets: Gadgets) {
    let what = || format!("thread {} ({})", thread.tid, thread.name);
    if thread.seccomp_strict {
        builder.refuse(what(), "it is in strict seccomp mode and cannot be asked about its state", "");
        return;
    }
    let ip = gadgets.call.0 + 2;
    let home =
        ("rt_sigreturn", FilteredCall { nr: libc::SYS_rt_sigreturn, ip: gadgets.sigreturn.0, args: [0; 6] });
    let calls = program.calls().map(|(what, nr, args)| (what, FilteredCall { nr, ip, args }));
    for (name, call) in calls.chain([home]) {
        if !thread.seccomp.iter().all(|f| bpf::allows(&f.program.0, &call)) {
            let why = format!("its seccomp filter forbids {name}, by which its state is asked");
            builder.refuse(what(), why, "allow that call in the filter");
            return;
        }
    }
}
