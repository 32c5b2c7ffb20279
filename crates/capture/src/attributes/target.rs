//! Whether a process can be a target at all, and what about it as a whole cannot be captured. Everything here is done
//! while it runs, before anything is changed; a program that is bent on it can become another case a moment later.

use crate::{Builder, Error, Result};
use std::io::Read;
use stillpoint_linux::proc::{self, NamespaceKind, Proc, Smap, Stat, Status, TaskFlags, VmFlags};
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
         kernel.yama.ptrace_scope forbids it); CAP_SYS_PTRACE is needed"
            .into()
    };
    Err(Error::Target(format!("{name} {why}")))
}

fn check_tracer(target: &Proc, name: &str) -> Result<()> {
    let ours = Proc::process(std::process::id())?.threads()?;
    for tid in target.threads()? {
        let tracer = match target.sibling(tid).and_then(|t| t.status()) {
            Ok(status) => status.tracer,
            Err(Kernel::Gone(_)) => continue,
            Err(e) => return Err(e.into()),
        };
        if tracer != 0 && !ours.contains(&tracer) {
            return Err(Error::Target(format!("{name} is traced by {} already", named(tracer))));
        }
    }
    Ok(())
}

/// 32-bit programs have 32-bit executables. (A 64-bit program that switched its code segment shows in its registers
/// only.)
fn check_class(target: &Proc, name: &str) -> Result<()> {
    let mut head = [0u8; 5];
    let file = target.open_file("exe");
    // An executable that cannot be read was run by somebody with fewer rights than it takes to trace them.
    let Ok(mut file) = file.map(std::fs::File::from) else { return Ok(()) };
    if file.read_exact(&mut head).is_ok() && head == *b"\x7fELF\x01" {
        return Err(Error::Target(format!("{name} is a 32-bit program; only 64-bit ones are supported")));
    }
    Ok(())
}

/// Notes what about the process as a whole cannot be captured.
///
/// # Errors
/// That its files in `/proc` cannot be read, [`Kernel::Gone`] among them.
pub fn examine(builder: &mut Builder, target: &Proc) -> Result<()> {
    let stat = target.stat()?;
    if matches!(stat.state, b'Z' | b'X') {
        builder.refuse(
            "the main thread",
            "it has ended while other threads go on; a process cannot be rebuilt without its main thread",
            "",
        );
        return Ok(());
    }
    children(builder, target)?;
    let own = Proc::process(std::process::id())?;
    namespaces(builder, &own, target)?;
    confinement(builder, &own, target)?;
    threads(builder, target)?;
    sharers(builder, target)?;
    Ok(())
}

fn children(builder: &mut Builder, target: &Proc) -> Result<()> {
    for child in target.children()? {
        let what = format!("child {}", named(child));
        let zombie = Proc::process(child).and_then(|c| c.stat()).is_ok_and(|s| s.state == b'Z');
        if zombie {
            builder.refuse(what, "it has ended and the program has not yet waited for it", "try again later");
        } else {
            let hint = "wait until it has ended, or capture the child instead";
            builder.refuse(what, "programs with child processes cannot be captured yet", hint);
        }
    }
    Ok(())
}

fn namespaces(builder: &mut Builder, own: &Proc, target: &Proc) -> Result<()> {
    let ours = own.namespaces()?;
    let here = |kind| ours.iter().find(|n| n.kind == kind).map(|n| n.id);
    let private = restored_privately(own, target)?;
    for tid in target.threads()? {
        let theirs = match target.sibling(tid).and_then(|t| t.namespaces()) {
            Err(Kernel::Gone(_)) => continue,
            other => other?,
        };
        for space in theirs {
            // Time namespaces only shift clocks, which a restore does anyway.
            let shifts_clocks = matches!(space.kind, NamespaceKind::Time | NamespaceKind::TimeForChildren);
            let is_private = matches!(
                space.kind,
                NamespaceKind::Pid | NamespaceKind::PidForChildren | NamespaceKind::Mount
            );
            if shifts_clocks || here(space.kind) == Some(space.id) || (private && is_private) {
                continue;
            }
            let what = match space.kind {
                NamespaceKind::PidForChildren => "pid namespace of its children".to_string(),
                kind => format!("{} namespace", kind.name()),
            };
            let hint = "run stillpoint inside of it, for example with nsenter(1)";
            builder.refuse(what, "the program is in another one than stillpoint", hint);
        }
    }
    Ok(())
}

/// Whether the program lives in a pid namespace that a restore of ours made because its process ids were taken: one
/// level below us, with a stillpoint as its process 1. Its mounts are ours but for `/proc`.
fn restored_privately(own: &Proc, target: &Proc) -> Result<bool> {
    let (ours, theirs) = (own.status()?, target.status()?);
    if theirs.ns_tgid.len() != ours.ns_tgid.len() + 1 {
        return Ok(false);
    }
    let mut pid = theirs.ppid;
    while pid > 1 {
        let Ok(ancestor) = Proc::process(pid) else { return Ok(false) };
        let status = ancestor.status()?;
        if status.ns_tgid.len() == theirs.ns_tgid.len() && status.own_pid() == 1 {
            let same =
                |a: &Proc, b: &Proc| a.link("exe").ok().zip(b.link("exe").ok()).is_some_and(|(a, b)| a == b);
            let mounts = |p: &Proc| p.link("ns/mnt").ok();
            return Ok(same(own, &ancestor) && mounts(&ancestor) == mounts(target));
        }
        pid = status.ppid;
    }
    Ok(false)
}

/// A security module's label is given at exec; nobody else may give it back.
fn confinement(builder: &mut Builder, own: &Proc, target: &Proc) -> Result<()> {
    let label = |p: &Proc| -> Result<Vec<u8>> {
        let text = p.read_optional("attr/current")?.unwrap_or_default();
        Ok(text.trim_ascii_end().strip_suffix(b"\0").unwrap_or(text.trim_ascii_end()).to_vec())
    };
    let theirs = label(target)?;
    if theirs != label(own)? {
        let what = format!("security label {:?}", String::from_utf8_lossy(&theirs));
        let hint = "run stillpoint with the same label";
        builder.refuse(
            what,
            "a security module confines the program, and stillpoint runs without that",
            hint,
        );
    }
    Ok(())
}

/// What a thread has apart from the others, or that has no place in a checkpoint.
fn threads(builder: &mut Builder, target: &Proc) -> Result<()> {
    for tid in target.threads()? {
        match thread(builder, target, tid) {
            Err(Error::Kernel(Kernel::Gone(_))) => {}
            other => other?,
        }
    }
    Ok(())
}

fn thread(builder: &mut Builder, target: &Proc, tid: u32) -> Result<()> {
    let folder = target.sibling(tid)?;
    let (stat, status) = (folder.stat()?, folder.status()?);
    let what = thread_name(&stat, tid);
    if stat.flags.intersects(TaskFlags::IO_WORKER | TaskFlags::USER_WORKER) {
        let hint = "close the io_uring (or vhost device) first";
        builder.refuse(what, "the kernel made it to work for the program", hint);
        return Ok(());
    }
    if matches!(stat.state, b'Z' | b'X') {
        return Ok(()); // ending: it will be gone when all threads are stopped
    }
    if tid != target.pid() {
        for (object, flag, name) in [
            (Shared::Files, "CLONE_FILES", "descriptors"),
            (Shared::FileSystem, "CLONE_FS", "current directory, root and umask"),
            (Shared::SemaphoreUndo, "CLONE_SYSVSEM", "list of semaphore operations to undo"),
        ] {
            if !sharing::shared(target.pid(), tid, object)? {
                let why = format!("it does not share its {name} with the main thread ({flag})");
                builder.refuse(what.clone(), why, "");
            }
        }
    }
    states(builder, &what, &stat, &status);
    Ok(())
}

/// Rare states of a thread, by their traces in `/proc`.
fn states(builder: &mut Builder, what: &str, stat: &Stat, status: &Status) {
    let words: Vec<&[u8]> = status.x86_features.split(|&b| b == b' ').collect();
    if words.contains(&b"shstk".as_slice()) {
        let hint = "start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off";
        builder.refuse(what, "it uses a shadow stack", hint);
    }
    if status.untag_mask.is_some_and(|mask| mask != u64::MAX) {
        builder.refuse(what, "it uses linear address masking", "");
    }
    if stat.flags.contains(TaskFlags::IO_FLUSHER) {
        builder.refuse(what, "it handles I/O for the kernel (PR_SET_IO_FLUSHER)", "");
    }
    if stat.flags.contains(TaskFlags::MCE_PROCESS) {
        builder.refuse(what, "it has its own policy for memory failures (PR_MCE_KILL)", "");
    }
    // "thread force mitigated" and "thread mitigated" are choices; all other words are the machine's.
    for (text, name) in [
        (&status.store_bypass, "speculative store bypass"),
        (&status.indirect_branch, "indirect branch speculation"),
    ] {
        let chosen: [&[u8]; 4] = [
            b"thread force mitigated",
            b"thread mitigated",
            b"conditional force disabled",
            b"conditional disabled",
        ];
        if chosen.contains(&text.as_slice()) {
            let why = format!("it switched {name} off (PR_SET_SPECULATION_CTRL)");
            builder.refuse(what, why, "");
        }
    }
}

/// Other processes with the same memory, descriptors or current directory: a `vfork` that has not yet executed, or
/// plain clone(2). Processes that we may not look at are taken not to share.
fn sharers(builder: &mut Builder, target: &Proc) -> Result<()> {
    for pid in proc::processes()? {
        if pid == target.pid() {
            continue;
        }
        for (object, name) in [
            (Shared::Memory, "memory"),
            (Shared::Files, "descriptors"),
            (Shared::FileSystem, "current directory"),
        ] {
            if sharing::shared(pid, target.pid(), object).unwrap_or(false) {
                builder.refuse(
                    named(pid),
                    format!("it shares its {name} with the program"),
                    "try again later",
                );
            }
        }
    }
    Ok(())
}

/// Notes mappings that cannot be captured.
pub fn mappings(builder: &mut Builder, target: &Proc, maps: &[Smap]) {
    for map in maps {
        if let Some((why, hint)) = mapping_problem(target, map) {
            let name = String::from_utf8_lossy(&map.vma.name);
            let what = format!("mapping {:x}-{:x} ({name})", map.vma.start, map.vma.end);
            builder.refuse(what, why, hint);
        }
    }
}

fn mapping_problem(target: &Proc, map: &Smap) -> Option<(&'static str, &'static str)> {
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
    if name.starts_with(b"/SYSV") && map.vma.shared {
        return Some(("System V shared memory cannot be captured yet", ""));
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
    if is_device(target, map) {
        return Some(("a device is mapped", ""));
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
pub(super) fn named(pid: u32) -> String {
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
