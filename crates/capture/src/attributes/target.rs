//! Whether a process can be a target at all, and what about it as a whole cannot be captured. Everything here is done
//! while it runs, before anything is changed; a program that is bent on it can become another case a moment later.

use super::thread::{Look, ThreadFiles};
use crate::builder::Sharing;
use crate::home::Home;
use crate::{Builder, Error, Result};
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_image::Thread;
use stillpoint_linux::proc::{
    self, CurrentCall, Namespace, NamespaceKind, Proc, Smap, Stat, Status, TaskFlags, VmFlags,
};
use stillpoint_linux::sharing::{self, Shared};
use stillpoint_linux::{Error as Kernel, proc::stat};

/// Finds a process and checks that it can be a target.
///
/// # Errors
/// [`Error::Target`] in one clear sentence: it does not exist, is a thread, a kernel thread, a zombie, ending, dumping
/// core, ourselves, a 32-bit program, traced by somebody else, or not ours to trace.
pub fn find(pid: u32) -> Result<Proc> {
    let no_such = || Error::Target(format!("there is no process {pid}"));
    if pid == 0 {
        return Err(no_such());
    }
    if pid == std::process::id() {
        return Err(Error::Target(format!("process {pid} is stillpoint itself")));
    }
    let target = match Proc::process(pid) {
        Err(Kernel::Gone(_)) => return Err(no_such()),
        other => other?,
    };
    match check(&target) {
        Err(Error::Kernel(Kernel::Gone(_))) => Err(Error::Target(format!("process {pid} ended"))),
        other => other.map(|()| target),
    }
}

fn check(target: &Proc) -> Result<()> {
    let (stat, status) = (target.stat()?, target.status()?);
    let (pid, name) = (target.pid(), describe(target.pid(), &stat.comm));
    let target_error = |why: &str| Err(Error::Target(format!("{name} {why}")));
    if status.tgid != pid {
        // `/proc/TID` leads to threads too, though it does not list them.
        let whose = status.tgid;
        return target_error(&format!("is a thread of process {whose}, which can only be taken as a whole"));
    }
    if stat.flags.contains(TaskFlags::KTHREAD) || status.kthread {
        return target_error("is a kernel thread");
    }
    if stat.flags.contains(TaskFlags::USER_WORKER) {
        return target_error("is a thread of the kernel");
    }
    if stat.flags.contains(TaskFlags::DUMPCORE) || status.core_dumping {
        return target_error("is dumping core");
    }
    if matches!(stat.state, b'Z' | b'X') && stat.num_threads <= 1 {
        return target_error("has ended and waits for its parent (a zombie)");
    }
    if stat.flags.contains(TaskFlags::EXITING) && stat.num_threads <= 1 {
        return target_error("is ending");
    }
    if matches!(stat.state, b'Z' | b'X') {
        return Ok(()); // its main thread has ended, others go on: refused as such, its files tell nothing
    }
    check_access(target, &name, &status)?;
    check_tracer(target, &name)?;
    check_class(target, &name)
}

/// Attaching asks for the same rights as opening `mem` (`PTRACE_MODE_ATTACH`, ptrace(2)), which harms nobody.
fn check_access(target: &Proc, name: &str, status: &Status) -> Result<()> {
    match target.open_file("mem") {
        Ok(_) => return Ok(()),
        Err(e) if matches!(e.errno(), Some(libc::EACCES | libc::EPERM)) => {}
        Err(e) => return Err(e.into()),
    }
    let own = rustix::process::geteuid().as_raw();
    let why = if status.uid.iter().any(|&uid| uid != own) {
        format!("belongs to user {}; only that user or one with CAP_SYS_PTRACE may capture it", status.uid[1])
    } else {
        "does not let itself be traced (it is not dumpable, has more capabilities than we have, or Yama's \
         kernel.yama.ptrace_scope forbids it, as it does not of what `stillpoint run` starts); CAP_SYS_PTRACE is needed"
            .into()
    };
    Err(Error::Target(format!("{name} {why}")))
}

fn check_tracer(target: &Proc, name: &str) -> Result<()> {
    /// How long one that is ending may take to let go: that of many threads, on a busy machine, takes its time.
    const PATIENCE: Duration = Duration::from_secs(10);
    let ours = Proc::process(std::process::id())?.threads()?;
    let began = Instant::now();
    for tid in target.threads()? {
        loop {
            let tracer = match target.sibling(tid).and_then(|t| t.status()) {
                Ok(status) => status.tracer,
                Err(Kernel::Gone(_)) => break,
                Err(e) => return Err(e.into()),
            };
            if tracer == 0 || ours.contains(&tracer) {
                break;
            }
            if began.elapsed() > PATIENCE || !has_ended(tracer) {
                return Err(traced(name, tracer));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Whether somebody has killed a thread or its process, of which it has not heard yet.
pub fn is_killed(status: &Status) -> bool {
    (status.sig_pending | status.shared_pending) & 1 << (libc::SIGKILL - 1) != 0
}

/// By whom a thread is traced, if it is.
pub fn tracer(target: &Proc, tid: u32) -> Option<Error> {
    let tracer = target.sibling(tid).and_then(|t| t.status()).ok()?.tracer;
    let name = describe(target.pid(), &target.stat().ok()?.comm);
    (tracer != 0).then(|| traced(&name, tracer))
}

fn traced(name: &str, tracer: u32) -> Error {
    let what = format!("{name} is traced by {} already", named(tracer));
    // Its threads have names of their own.
    let program = |pid| {
        let stat = std::fs::metadata(format!("/proc/{pid}/exe")).ok()?;
        Some((stat.dev(), stat.ino()))
    };
    match program(tracer).is_some_and(|file| Some(file) == program(std::process::id())) {
        true => Error::Busy(what),
        false => Error::Target(what),
    }
}

/// 32-bit programs have pairs of 32 bits in their auxiliary vector, in which the value behind a first type is not zero. (A 64-bit program
/// that switched its code segment shows in its registers only.) The executable is not opened for that: somebody may be told of it.
fn check_class(target: &Proc, name: &str) -> Result<()> {
    /// How long a vector may be empty, as it is in the midst of `execve`: a program can empty its own (`PR_SET_MM_AUXV`).
    const PATIENCE: Duration = Duration::from_millis(500);
    let began = Instant::now();
    loop {
        let mut head = [0u8; 8];
        let file = target.open_file("auxv");
        // What cannot be read belongs to somebody with fewer rights than it takes to trace them.
        let Ok(mut file) = file.map(std::fs::File::from) else { return Ok(()) };
        let told = file.read_exact(&mut head).is_ok() && head != [0; 8];
        match told {
            true if head[4..] != [0; 4] => {
                return Err(Error::Target(format!(
                    "{name} is a 32-bit program; only 64-bit ones are supported"
                )));
            }
            false if began.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(1)),
            _ => return Ok(()),
        }
    }
}

/// What [`examine`] found, for [`examine_again`].
#[derive(Debug)]
pub struct Examined {
    /// Our own namespaces.
    ours: Vec<Namespace>,
    /// Those of the target's main thread.
    theirs: Vec<Namespace>,
    /// Where ids are told.
    home: Arc<Home>,
    /// Its threads, and whether each could have changed its namespaces.
    threads: HashMap<u32, bool>,
    /// Whether a security module confines programs here.
    confines: bool,
    /// The newest process there was before the others were looked at, and when that was.
    last_pid: Option<u32>,
    since: Instant,
    /// Who was found to share something with it.
    sharing: Vec<Sharing>,
}

/// Which processes might share something with one that is examined.
#[derive(Clone, Copy, Debug)]
pub enum Others<'a> {
    /// All that there are.
    All,
    /// Those made since it was examined the last time; what was found then is noted still.
    Since(&'a Examined),
    /// It stands still, and these are all.
    These(&'a [u32]),
}

/// Notes what about the process as a whole cannot be captured. It may be running: [`examine_again`] then tells whether
/// what was found still holds.
///
/// # Errors
/// That its files in `/proc` cannot be read, [`Kernel::Gone`] among them.
pub fn examine(builder: &mut Builder, target: &Proc, others: Others<'_>) -> Result<Examined> {
    let own = Proc::process(std::process::id())?;
    let mut examined = Examined {
        ours: own.namespaces()?,
        theirs: Vec::new(),
        home: builder.home.clone(),
        threads: HashMap::new(),
        confines: false,
        last_pid: None,
        since: Instant::now(),
        sharing: Vec::new(),
    };
    if leader_ended(builder, target)? {
        return Ok(examined);
    }
    examined.theirs = target.namespaces()?;
    examined.confines = confinement(builder, &own, target)?;
    for tid in target.threads()? {
        match examine_thread(builder, target, tid, &mut examined) {
            Err(Error::Kernel(Kernel::Gone(_))) => {}
            other => other?,
        }
    }
    // As late as possible: this is what takes long where there are many processes.
    examined.last_pid = proc::last_pid();
    examined.since = Instant::now();
    match others {
        Others::All => sharers(builder, target, &proc::processes()?, true),
        Others::Since(before) => sharers(builder, target, &made_since([before])?, true),
        Others::These(others) => sharers(builder, target, others, false),
    }
    examined.sharing.clone_from(&builder.sharing);
    Ok(examined)
}

/// Refuses a process whose main thread has ended, and of which its files tell nothing.
///
/// # Errors
/// That all of it has ended; as [`examine`].
pub fn leader_ended(builder: &mut Builder, target: &Proc) -> Result<bool> {
    let ended = matches!(target.stat()?.state, b'Z' | b'X');
    if ended && has_ended(target.pid()) {
        return Err(Error::Target(format!("process {} ended", target.pid())));
    }
    if ended {
        let why =
            "it has ended while other threads go on; a process cannot be rebuilt without its main thread";
        builder.refuse("the main thread", why, "");
    }
    Ok(ended)
}

/// As [`leader_ended`], of a process that may just be ending, or becoming another program (`execve(2)`).
///
/// # Errors
/// That it ended; as [`examine`].
pub fn leader_ended_for_good(builder: &mut Builder, target: &Proc) -> Result<()> {
    const PATIENCE: Duration = Duration::from_millis(500);
    let start = Instant::now();
    while matches!(target.stat()?.state, b'Z' | b'X') && start.elapsed() < PATIENCE {
        if has_ended(target.pid()) {
            return Err(Error::Target(format!("process {} ended", target.pid())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    leader_ended(builder, target).map(drop)
}

/// Whether a process has ended, is ending, or has been killed: all of its threads are or have.
pub fn has_ended(pid: u32) -> bool {
    let has = |thread: Proc| {
        let (Ok(stat), Ok(status)) = (thread.stat(), thread.status()) else { return true };
        is_killed(&status) || stat.ends()
    };
    let Ok(process) = Proc::process(pid) else { return true };
    process.threads().unwrap_or_default().into_iter().all(|tid| process.sibling(tid).map_or(true, has))
}

fn examine_thread(builder: &mut Builder, target: &Proc, tid: u32, examined: &mut Examined) -> Result<()> {
    let folder = target.sibling(tid)?;
    let (stat, status) = (folder.stat()?, folder.status()?);
    namespaces(builder, target, tid, examined, false, &folder.namespaces()?)?;
    examined.threads.insert(tid, may_change_namespaces(&status));
    thread(builder, target, tid, &stat, &status)
}

/// How long the numbers of processes are sure not to have come round since the last look: making one takes more than
/// 10 µs, and there are at least 2^15 numbers (`PID_MAX_LIMIT` aside, `kernel.pid_max` is rarely less).
const NO_ROUND: Duration = Duration::from_millis(300);

/// Looks again at everything that [`examine`] found, now that the process stands still; `threads` are all of its own, `newer`
/// the [`newer`] processes.
///
/// Facts that cannot have changed are not asked for a second time:
///
/// * *Namespaces of a thread* are changed only by itself, by `setns` and `unshare`. Both want `CAP_SYS_ADMIN`, except
///   for a new user namespace, which only a process of one thread can enter, and for what is behind it. So those of
///   the main thread are read again; those of another one that existed and did not have this capability, then and
///   now, are as they were: permitted capabilities only ever become fewer, except by `execve`, which ends all
///   threads but one. A mount namespace comes with a file-system context that is not shared any more, a new user, pid
///   or time namespace with a new process: neither is possible in one thread of several.
/// * *Other processes that share something with it*: sharing begins when a process is made (`clone`) and at no other
///   moment. Processes that existed at the first look, after which it cannot have begun, and newer ones have newer
///   numbers, which the kernel hands out in turn: only those are looked at. (A number of one's choice, `set_tid`, wants
///   a privilege and would have to be used in this very moment.)
/// * *Whether a security module confines programs here* does not change while the system runs; labels, where there
///   are any, are read again.
///
/// # Errors
/// As [`examine`].
pub fn examine_again(
    builder: &mut Builder,
    target: &Proc,
    examined: &Examined,
    threads: &[Seen],
    newer: &[u32],
) -> Result<()> {
    if examined.confines {
        confinement(builder, &Proc::process(std::process::id())?, target)?;
    }
    for seen in threads {
        // What is as it was in the main thread has been judged.
        let has_all = seen.namespaces.is_empty() || seen.tid == target.pid() || {
            children_of(&seen.namespaces) == children_of(&examined.theirs)
        };
        if !has_all || !seen.namespaces.iter().all(|n| examined.theirs.contains(n)) {
            namespaces(builder, target, seen.tid, examined, threads.len() == 1, &seen.namespaces)?;
        }
        thread(builder, target, seen.tid, &seen.look.stat, &seen.look.status)?;
    }
    let own = |pid: &u32| threads.iter().any(|t| t.tid == *pid);
    let others: Vec<u32> = newer.iter().copied().filter(|pid| !own(pid)).collect();
    sharers(builder, target, &others, false);
    Ok(())
}

/// Looks once more, right before the freeze, who of those made since the last look shares something with processes of a tree, so
/// that little is left to look at in it. Each other process is looked up among those of the tree in the kernel's order of their objects.
///
/// Where somebody does, the freeze is to find it out.
pub fn refresh<'a>(all: impl Iterator<Item = (&'a Proc, &'a mut Examined)>) {
    let (last_pid, since) = (proc::last_pid(), Instant::now());
    let mut all: Vec<_> = all.collect();
    let Ok(others) = made_since(all.iter().map(|(_, examined)| &**examined)) else { return };
    let pids: Vec<u32> = all.iter().map(|(target, _)| target.pid()).collect();
    if !shared_by_any(&pids, &others) {
        for (_, examined) in &mut all {
            (examined.last_pid, examined.since) = (last_pid, since);
        }
        return;
    }
    // Perhaps only until one of them executes another program.
    all.into_iter().for_each(|(target, examined)| examined.refresh(target));
}

/// Whether any of these processes shares something with another of them, or with one of the others.
fn shared_by_any(pids: &[u32], others: &[u32]) -> bool {
    let us = std::process::id();
    [Shared::Memory, Shared::Files, Shared::FileSystem].into_iter().any(|object| {
        let place = |order: &[u32], pid: u32| {
            order.binary_search_by(|other| sharing::compare(*other, pid, object).unwrap_or(Ordering::Less))
        };
        let mut order: Vec<u32> = Vec::with_capacity(pids.len());
        for &pid in pids {
            match place(&order, pid) {
                Ok(_) => return true,
                Err(at) => order.insert(at, pid),
            }
        }
        others.iter().any(|pid| *pid != us && !pids.contains(pid) && place(&order, *pid).is_ok())
    })
}

impl Examined {
    /// Looks once more, right before the freeze, who shares something with the process, so that little is left to look
    /// at in it. If somebody does, the freeze is to find it out.
    fn refresh(&mut self, target: &Proc) {
        let (last_pid, since) = (proc::last_pid(), Instant::now());
        let mut builder = Builder::new();
        if let Ok(others) = made_since([&*self]) {
            sharers(&mut builder, target, &others, true);
            let is_known = |sharing: &Sharing| self.sharing.contains(sharing);
            if builder.refusals.is_empty() && builder.sharing.iter().all(is_known) {
                (self.last_pid, self.since) = (last_pid, since);
            }
        }
    }

    /// Forgets what was known of threads that are no more, or whose ids others have now.
    pub fn forget(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.threads.retain(|tid, _| !is_gone(*tid));
    }

    /// What was found holds at this moment, `others` being the processes that might share something with it now.
    pub fn renew(&mut self, builder: &mut Builder, target: &Proc, others: &[u32]) {
        (self.last_pid, self.since) = (proc::last_pid(), Instant::now());
        sharers(builder, target, others, false);
        self.sharing.clone_from(&builder.sharing);
    }

    /// Gets a thread's files ready to be looked at.
    ///
    /// # Errors
    /// As [`examine`].
    pub fn get_ready(&self, files: &mut ThreadFiles) -> Result<()> {
        let kinds = kinds(files, self.threads.get(&files.tid()) != Some(&false));
        if kinds.is_empty() { Ok(()) } else { files.hold_namespaces(kinds) }
    }

    /// Looks at a thread of the frozen process.
    ///
    /// # Errors
    /// As [`examine`].
    pub fn see(&self, files: &ThreadFiles) -> Result<Seen> {
        let tid = files.tid();
        match self.see_by(files, self.threads.get(&tid) != Some(&false)) {
            // It has ended, and another one got its number.
            Err(Error::Kernel(Kernel::Gone(_))) => {
                let folder = Proc::thread(files.folder.pid(), tid)?;
                self.see_by(&ThreadFiles::open(folder)?, true)
            }
            seen => seen,
        }
    }

    /// `free`: it may have been able to change its namespaces.
    fn see_by(&self, files: &ThreadFiles, free: bool) -> Result<Seen> {
        let (tid, look) = (files.tid(), files.look()?);
        let kinds = kinds(files, free || may_change_namespaces(&look.status));
        let namespaces = if kinds.is_empty() { Vec::new() } else { files.namespaces(kinds)? };
        let thread = super::thread::thread(tid, &self.home, &look)?;
        Ok(Seen { tid, look, namespaces, thread })
    }
}

/// What can be seen of a thread from outside without tracing it.
#[derive(Debug)]
pub struct Seen {
    /// Thread id in our pid namespace.
    pub tid: u32,
    /// What its files tell.
    pub look: Look,
    /// Its namespaces, those that it could have changed.
    pub namespaces: Vec<Namespace>,
    /// The thread, as far as [`super::thread::thread`] tells.
    pub thread: Thread,
}

/// Namespaces to ask of a thread. `free`: it may have been able to change its own.
fn kinds(files: &ThreadFiles, free: bool) -> &'static [NamespaceKind] {
    match (files.tid() == files.folder.pid(), free) {
        (true, _) => &NamespaceKind::ALL,
        (false, true) => &NamespaceKind::OF_THREADS,
        (false, false) => &[],
    }
}

/// Whether a thread has, or may yet have had, what it takes to change its namespaces.
fn may_change_namespaces(status: &Status) -> bool {
    is_administrator(status)
}

/// Whether a thread is permitted `CAP_SYS_ADMIN`.
pub(crate) fn is_administrator(status: &Status) -> bool {
    const CAP_SYS_ADMIN: u64 = 1 << 21;
    const PERMITTED: usize = 1;
    status.caps[PERMITTED] & CAP_SYS_ADMIN != 0
}

/// Processes and threads that were made since the last look at any of these processes and are still there, and perhaps more.
///
/// # Errors
/// That `/proc` cannot be read.
pub fn newer<'a>(examined: impl IntoIterator<Item = &'a Examined>) -> Result<Vec<u32>> {
    Ok(made_since(examined)?.into_iter().filter(|pid| Proc::thread_by_tid(*pid).is_ok()).collect())
}

/// As [`newer`], with numbers that nobody has.
fn made_since<'a>(examined: impl IntoIterator<Item = &'a Examined>) -> Result<Vec<u32>> {
    let looks = examined.into_iter().map(|e| e.last_pid.filter(|_| e.since.elapsed() < NO_ROUND));
    Ok(proc::made_since(looks)?)
}

/// The pid namespace that children of a thread are to be in; none if that is still to be begun.
fn children_of(theirs: &[Namespace]) -> Option<Namespace> {
    theirs.iter().find(|space| space.kind == NamespaceKind::PidForChildren).copied()
}

/// Judges the namespaces of a thread; `alone`: it stands still, and the process has no other.
fn namespaces(
    builder: &mut Builder,
    target: &Proc,
    tid: u32,
    examined: &Examined,
    alone: bool,
    theirs: &[Namespace],
) -> Result<()> {
    if tid != target.pid() && !theirs.is_empty() && children_of(theirs) != children_of(&examined.theirs) {
        let why = "its children are to be in another pid namespace than those of the main thread";
        builder.refuse(
            format!("thread {tid}"),
            why,
            "let all threads of the process have theirs in the same",
        );
    }
    for space in theirs {
        // What its children are to be in is seen to where that is described.
        if space.kind == NamespaceKind::PidForChildren {
            continue;
        }
        let has_moved = builder.namespaces.would_know(space.kind) && !examined.theirs.contains(space);
        // Nobody has been judged by where a thread was that is alone.
        if has_moved && !alone {
            let kind = space.kind.name();
            if tid == target.pid() {
                return Err(Error::Passing(format!(
                    "{} has just entered another {kind} namespace",
                    named(tid)
                )));
            }
            let why = format!("it is in another {kind} namespace than the main thread");
            builder.refuse(format!("thread {tid}"), why, "let all threads of the process be in the same");
            continue;
        }
        // Time namespaces only shift clocks, which a restore does anyway.
        let shifts_clocks = matches!(space.kind, NamespaceKind::Time | NamespaceKind::TimeForChildren);
        let is_around = examined.ours.contains(space) || examined.home.private.contains(space);
        if shifts_clocks || is_around || builder.namespaces.has(space) {
            continue;
        }
        if builder.namespaces.would_know(space.kind) {
            let what = format!("{} has just entered a {} namespace", named(tid), space.kind.name());
            return Err(Error::Passing(what));
        }
        let hint = "run stillpoint inside of it, for example with nsenter(1)";
        builder.refuse(
            format!("{} namespace", space.kind.name()),
            "the program is in another one than stillpoint",
            hint,
        );
    }
    Ok(())
}

/// A security module's label is given at exec; nobody else may give it back. Returns whether there are labels at all.
fn confinement(builder: &mut Builder, own: &Proc, target: &Proc) -> Result<bool> {
    let label = |p: &Proc| -> Result<Option<Vec<u8>>> {
        let Some(text) = p.read_optional("attr/current")? else { return Ok(None) };
        Ok(Some(text.trim_ascii_end().strip_suffix(b"\0").unwrap_or(text.trim_ascii_end()).to_vec()))
    };
    let (theirs, ours) = (label(target)?, label(own)?);
    let confines = theirs.is_some() || ours.is_some();
    let (theirs, ours) = (theirs.unwrap_or_default(), ours.unwrap_or_default());
    if theirs != ours {
        let what = format!("security label {:?}", String::from_utf8_lossy(&theirs));
        let hint = "run stillpoint with the same label";
        builder.refuse(
            what,
            "a security module confines the program, and stillpoint runs without that",
            hint,
        );
    }
    Ok(confines)
}

/// What a thread has apart from the others, or that has no place in a checkpoint.
fn thread(builder: &mut Builder, target: &Proc, tid: u32, stat: &Stat, status: &Status) -> Result<()> {
    let what = || thread_name(stat, tid);
    if let Some(most) = builder.home.most {
        let [inheritable, permitted, effective, bounding, ambient] = status.caps;
        if inheritable | permitted | effective | ambient | bounding & !most != 0 {
            let why = "it has capabilities in the user namespace that was made for it, which would be others elsewhere";
            builder.refuse(what(), why, "let it give them up");
        }
    }
    if stat.flags.intersects(TaskFlags::IO_WORKER | TaskFlags::USER_WORKER) {
        let hint = "close the io_uring (or vhost device) first";
        builder.refuse(what(), "the kernel made it to work for the program", hint);
        return Ok(());
    }
    if stat.ends() {
        return Ok(()); // it will be gone when all threads are stopped
    }
    if tid != target.pid() {
        for (object, flag, name) in [
            (Shared::Files, "CLONE_FILES", "descriptors"),
            (Shared::FileSystem, "CLONE_FS", "current directory, root and umask"),
            (Shared::SemaphoreUndo, "CLONE_SYSVSEM", "list of semaphore operations to undo"),
        ] {
            // One that has begun to end meanwhile has given up what it shared.
            let still_there = || target.sibling(tid).and_then(|t| t.stat()).is_ok_and(|s| !s.ends());
            if !sharing::shared(target.pid(), tid, object)? && still_there() {
                if object == Shared::FileSystem {
                    if !builder.apart.contains(&(target.pid(), tid)) {
                        builder.apart.push((target.pid(), tid));
                    }
                    continue;
                }
                let why = format!("it does not share its {name} with the main thread ({flag})");
                builder.refuse(what(), why, "");
            }
        }
    }
    states(builder, &what, status);
    Ok(())
}

/// Rare states of a thread, by their traces in `/proc`.
fn states(builder: &mut Builder, what: &dyn Fn() -> String, status: &Status) {
    if status.x86_features.split(|&b| b == b' ').any(|word| word == b"shstk") {
        let hint = "start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off";
        builder.refuse(what(), "it uses a shadow stack", hint);
    }
    if status.untag_mask.is_some_and(|mask| mask != u64::MAX) {
        builder.refuse(what(), "it uses linear address masking", "");
    }
}

/// How long a process may have the memory of the one that made it until it executes another program (`vfork(2)`), while that
/// one or others stand still for it.
pub(crate) const VFORK: Duration = Duration::from_millis(200);
/// The same, while nobody does: on a busy machine it may wait long for a processor.
const VFORK_RUNNING: Duration = Duration::from_secs(10);

/// Whether a process has the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Has {
    /// It has its own.
    Not,
    /// Until it executes another program (`vfork(2)`), which it takes long to.
    ForAMoment,
    /// For good (`clone(2)` with `CLONE_VM`), as far as one can see.
    Always,
}

/// Whether a process has the memory of another; waits for the end of that if it is for a moment only. Whoever waits for a child
/// is asleep in the call that has made it before the child is old; if nobody is, nobody is going to.
pub(crate) fn of_another(pid: u32, other: u32) -> Has {
    let start = Instant::now();
    while sharing::shared(pid, other, Shared::Memory).unwrap_or(false) {
        let is_waited_for = waits_for_child(pid) || waits_for_child(other);
        match is_waited_for {
            true if start.elapsed() > VFORK_RUNNING => return Has::ForAMoment,
            false if age(pid).min(age(other)) > VFORK || start.elapsed() > VFORK => return Has::Always,
            _ => std::thread::sleep(Duration::from_micros(500)),
        }
    }
    Has::Not
}

/// How old a process is; nothing if that cannot be told.
fn age(pid: u32) -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec.max(0) as u32);
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let started = Proc::process(pid).and_then(|p| p.stat()).map(|stat| stat.start_time);
    let started = started.map(|t| Duration::from_nanos(t.saturating_mul(1_000_000_000 / ticks)));
    started.map_or(Duration::ZERO, |started| now.saturating_sub(started))
}

/// Whether a thread of a process waits until the process that it is making executes another program or ends.
pub(crate) fn waits_for_child(pid: u32) -> bool {
    let waits = |thread: Proc| {
        let calls = [libc::SYS_vfork, libc::SYS_clone, libc::SYS_clone3];
        let makes =
            matches!(thread.syscall(), Ok(CurrentCall::Inside { nr, .. }) if calls.contains(&(nr as i64)));
        makes && thread.stat().is_ok_and(|stat| stat.state == b'D')
    };
    let Ok(process) = Proc::process(pid) else { return false };
    process.threads().unwrap_or_default().into_iter().any(|tid| process.sibling(tid).is_ok_and(waits))
}

/// Other processes with the same memory, descriptors or current directory, by plain clone(2); refuses, if the target `runs`, a
/// `vfork` that does not end. Processes that we may not look at are taken not to share.
fn sharers(builder: &mut Builder, target: &Proc, others: &[u32], runs: bool) {
    // A thread of the program that has just ended still has what it shared.
    let is_own =
        |pid| Proc::thread_by_tid(pid).and_then(|t| t.status()).map_or(true, |s| s.tgid == target.pid());
    let us = std::process::id();
    for &pid in others {
        if pid == target.pid() || pid == us {
            continue;
        }
        for (object, name) in [
            (Shared::Memory, "memory"),
            (Shared::Files, "descriptors"),
            (Shared::FileSystem, "current directory"),
        ] {
            if !sharing::shared(pid, target.pid(), object).unwrap_or(false) || is_own(pid) {
                continue;
            }
            let has = match object {
                Shared::Memory if runs => of_another(pid, target.pid()),
                _ => Has::Always,
            };
            match has {
                Has::Not => {}
                Has::ForAMoment => refuse_sharer(builder, pid, name),
                Has::Always => {
                    // Whether it is of the tree is known when that is.
                    let sharing = Sharing { process: target.pid(), other: pid, object };
                    if !builder.sharing.contains(&sharing) {
                        builder.sharing.push(sharing);
                    }
                }
            }
        }
    }
}

/// Refuses the program for a process that has something in common with it.
pub(crate) fn refuse_sharer(builder: &mut Builder, pid: u32, name: &str) {
    // The twin of another checkpoint, while it is being made.
    let twin = Proc::process(pid).ok().and_then(|p| tracer(&p, pid)).is_some();
    let of = if twin { ", for another checkpoint it seems" } else { "" };
    let why = format!("it shares its {name} with the program{of}");
    builder.refuse(named(pid), why, "try again later");
}

/// Notes mappings that cannot be captured.
pub fn mappings(builder: &mut Builder, target: &Proc, maps: &[Smap]) {
    for map in maps {
        if let Some((why, hint)) = mapping_problem(target, map, &mut builder.no_devices) {
            let name = String::from_utf8_lossy(&map.vma.name);
            let what = format!("mapping {:x}-{:x} ({name})", map.vma.start, map.vma.end);
            builder.refuse(what, why, hint);
        }
    }
}

fn mapping_problem(
    target: &Proc,
    map: &Smap,
    no_devices: &mut HashSet<(u64, u64)>,
) -> Option<(&'static str, &'static str)> {
    let (name, flags) = (map.vma.name.as_slice(), map.flags);
    if name == b"[uprobes]" {
        return Some((
            "a tracer has planted probes in the program",
            "end perf, bpftrace or whatever uses uprobes",
        ));
    }
    let kernels_own = [&b"[vdso]"[..], b"[vsyscall]"].contains(&name) || name.starts_with(b"[vvar");
    if kernels_own {
        return None;
    }
    if name == b"/secretmem" || name == b"secretmem" {
        return Some(("it is secret memory (memfd_secret), which nobody else can read", ""));
    }
    if name.starts_with(b"anon_inode:") || name.starts_with(b"/anon_inode:") {
        return Some((
            "it belongs to a descriptor of the kernel's own",
            "close what it belongs to, such as an io_uring",
        ));
    }
    if name.starts_with(b"/[aio]") {
        return Some(("it is a ring of asynchronous I/O (io_setup)", "end it with io_destroy first"));
    }
    if name.starts_with(b"socket:") {
        return Some(("it is memory of a socket", ""));
    }
    if flags.intersects(VmFlags::IO | VmFlags::PFN_MAP | VmFlags::MIXED_MAP)
        && !flags.contains(VmFlags::HUGETLB)
    {
        return Some(("it is memory of a device", ""));
    }
    if !no_devices.contains(&(map.vma.dev, map.vma.ino)) {
        if is_device(target, map) {
            return Some(("a device is mapped", ""));
        }
        no_devices.insert((map.vma.dev, map.vma.ino));
    }
    if flags.contains(VmFlags::SHADOW_STACK) {
        return Some(("it is a shadow stack", "start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"));
    }
    if flags.contains(VmFlags::SYNC) {
        return Some(("it is mapped with MAP_SYNC", ""));
    }
    if flags.contains(VmFlags::UNKNOWN) {
        return Some((
            "it has a state that this version does not know",
            "look for a newer version of stillpoint",
        ));
    }
    // Where only writes are followed, it is we who do it, or another of us: a program that did it itself would have a
    // descriptor for it, and those are refused.
    if flags.intersects(VmFlags::UFFD_MISSING | VmFlags::UFFD_MINOR) {
        return Some(("the program handles page faults there itself (userfaultfd)", ""));
    }
    None
}

/// Whether a mapping is of a device other than `/dev/zero`, which, mapped privately, is plain memory.
fn is_device(target: &Proc, map: &Smap) -> bool {
    use rustix::fs::{AtFlags, FileType, makedev, statat};
    if map.vma.ino == 0 || !map.vma.name.starts_with(b"/") {
        return false;
    }
    // The link leads to the very file. It needs CAP_CHECKPOINT_RESTORE; without that, the name must do.
    let file = statat(target, map.vma.link_name(), AtFlags::empty());
    let (mode, rdev) = match file {
        Ok(file) => (file.st_mode, file.st_rdev),
        Err(_) if map.vma.deleted => return false,
        Err(_) => {
            let path = [b"root".as_slice(), &map.vma.name].concat();
            match statat(target, path.as_slice(), AtFlags::empty()) {
                Ok(file) if file.st_ino == map.vma.ino => (file.st_mode, file.st_rdev),
                _ => return false,
            }
        }
    };
    let is_zero = rdev == makedev(1, 5) && !map.vma.shared;
    matches!(FileType::from_raw_mode(mode), FileType::CharacterDevice | FileType::BlockDevice) && !is_zero
}

/// `process 123 (name)`
pub fn named(pid: u32) -> String {
    match Proc::process(pid).and_then(|p| p.comm()) {
        Ok(comm) => describe(pid, &comm),
        Err(_) => format!("process {pid}"),
    }
}

fn describe(pid: u32, comm: &[u8]) -> String {
    format!("process {pid} ({})", String::from_utf8_lossy(comm).escape_debug())
}

fn thread_name(stat: &stat::Stat, tid: u32) -> String {
    format!("thread {tid} ({})", String::from_utf8_lossy(&stat.comm).escape_debug())
}
