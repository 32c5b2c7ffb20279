//! Objects of the kernel without a place in the file system: eventfd, timerfd, signalfd, epoll, inotify, pidfd.

use super::descriptions::Description;
use super::noticed::kernel_device;
use super::standard::Standard;
use super::{Scan, fanotify, paths};
use crate::Result;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use stillpoint_image::{EpollWatch, FileKind, InotifyWatch, PathFile, TimerFd, Usage};
use stillpoint_linux::descriptors::{exit_status, is_watched, readable};
use stillpoint_linux::fdinfo::{self, Detail, EpollLine, Inode, InotifyLine};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::proc::mounts::unescaped;
use stillpoint_linux::{Error, watches};

/// Objects that are known and cannot be captured: the kernel's name, what it is, what to do.
const REFUSED: [(&str, &str, &str); 10] = [
    (
        "[io_uring]",
        "it is an io_uring, whose requests in flight cannot be captured",
        "start the program without io_uring",
    ),
    ("[userfaultfd]", "it is a userfaultfd: the program handles page faults itself", ""),
    ("[perf_event]", "it is a performance counter", "stop profiling before the checkpoint"),
    ("bpf-prog", "it is a BPF program", "unload it before the checkpoint"),
    ("bpf-map", "it is a BPF map", "unload it before the checkpoint"),
    ("bpf_link", "it is a BPF link", "unload it before the checkpoint"),
    ("[landlock-ruleset]", "it is a Landlock rule set", ""),
    ("[fscontext]", "it is a file system being set up", ""),
    ("seccomp notify", "it supervises the system calls of another process", ""),
    ("kvm", "it is a virtual machine", ""),
];

/// Captures an object by what its fdinfo says.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description, standard: &Standard) -> Result<Option<FileKind>> {
    let kind = d.link.strip_prefix(b"anon_inode:").unwrap_or(&d.link);
    match (&d.info.detail, kind) {
        (&Detail::Event { count, semaphore }, _) => Ok(Some(FileKind::Event { count, semaphore })),
        (Detail::Timer(_), _) => timer(d).map(|t| Some(FileKind::Timer(t))),
        (&Detail::Signal(mask), _) => Ok(Some(FileKind::Signal(mask))),
        (Detail::Epoll(lines), _) => epoll(scan, d, lines, standard),
        (_, b"[eventpoll]") => Ok(Some(FileKind::Epoll(Vec::new()))),
        (Detail::Inotify(lines), _) => inotify(scan, d, lines),
        (_, b"inotify") => inotify(scan, d, &[]),
        (Detail::Fanotify { .. }, _) => fanotify::capture(scan, d),
        (&Detail::Pid { pid, inner }, _) => pid_handle(scan, d, pid, inner),
        _ => refuse_unknown(scan, d),
    }
}

fn refuse_unknown<T>(scan: &mut Scan<'_>, d: &Description) -> Result<Option<T>> {
    let link = String::from_utf8_lossy(&d.link).into_owned();
    match REFUSED.iter().find(|r| link.contains(r.0)) {
        Some((_, why, hint)) => scan.refuse(d, *why, hint),
        None => {
            scan.refuse(d, "it is a kind of object that cannot be captured", "close it before the checkpoint")
        }
    }
}

fn timer(d: &Description) -> Result<TimerFd> {
    let Detail::Timer(mut line) = d.info.detail.clone() else { unreachable!("called for timers") };
    if line.value_ns == 0 && line.interval_ns > 0 && line.ticks > 0 {
        // A periodic timer stands still after its first unread expiry; see `settle_timerfd`.
        watches::settle_timerfd(&d.file)?;
        let info = fdinfo::read(std::process::id(), d.file.as_raw_fd() as u32)?;
        if let Detail::Timer(settled) = info.detail {
            line = settled;
        }
    }
    let wall = matches!(line.clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_ALARM);
    let absolute = wall && line.flags & libc::TFD_TIMER_ABSTIME as u32 != 0 && line.value_ns > 0;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    Ok(TimerFd {
        clock: line.clock,
        ticks: line.ticks,
        flags: line.flags,
        remaining_ns: line.value_ns,
        interval_ns: line.interval_ns,
        expires_ns: absolute.then(|| now.saturating_add(line.value_ns)),
    })
}

fn epoll(
    scan: &mut Scan<'_>,
    d: &Description,
    lines: &[EpollLine],
    standard: &Standard,
) -> Result<Option<FileKind>> {
    let mut watches = Vec::with_capacity(lines.len());
    let mut seen: HashMap<u32, u32> = HashMap::new();
    for line in lines {
        let nth = seen.entry(line.fd).or_default();
        let found = watched(scan, d, line.fd, *nth)?;
        *nth += 1;
        let Some(index) = found else {
            let why = format!("it watches a file that was descriptor {} and is open elsewhere now", line.fd);
            return scan.refuse(d, why, "");
        };
        let file = match scan.all[index].numbers().any(|fd| fd == line.fd) {
            true => scan.row_of_descriptor(standard, index, line.fd)?,
            false => scan.row(index),
        };
        watches.push(EpollWatch { fd: line.fd, events: line.events, data: line.data, file });
    }
    Ok(Some(FileKind::Epoll(watches)))
}

/// The description that an epoll watches under a number: most often the one that still has this number, but the
/// number may have been closed or reused while another descriptor keeps the description alive.
fn watched(scan: &Scan<'_>, epoll: &Description, number: u32, nth: u32) -> Result<Option<usize>> {
    let has_it =
        |process, index: usize| scan.all[index].held.iter().any(|h| h.process == process && h.fd == number);
    let beside = |index: &usize| epoll.held.iter().any(|h| has_it(h.process, *index));
    let first: Vec<usize> = (0..scan.all.len()).filter(beside).collect();
    let others = (0..scan.all.len()).filter(|i| !first.contains(i) && !scan.all[*i].held.is_empty());
    // It may be in nothing but a message: we have it in any case.
    let ours = (std::process::id(), epoll.file.as_raw_fd() as u32);
    for index in first.iter().copied().chain(others) {
        if is_watched(scan.all[index].first(), ours, number, nth)? {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

fn pid_handle(scan: &mut Scan<'_>, d: &Description, pid: i64, inner: i64) -> Result<Option<FileKind>> {
    let of_thread = d.info.flags & libc::O_EXCL as u32 != 0;
    let own = u32::try_from(pid).ok();
    let inner_id = |pid| {
        let living = if of_thread { scan.inner_id(pid) } else { scan.inner_pid(pid) };
        living.or_else(|| ended_child(scan, pid))
    };
    match own.and_then(inner_id) {
        Some(id) => Ok(Some(FileKind::Pid(id))),
        _ if pid < 0 => {
            let process = rustix::fs::fstat(&d.file).map_err(|e| Error::call("fstat", e))?.st_ino;
            Ok(Some(FileKind::Ended { process, status: exit_status(&d.file)?.unwrap_or(0) }))
        }
        _ if pid == 0 => {
            let why = "it is a handle to a process that cannot be seen from here";
            scan.refuse(d, why, "close it before the checkpoint")
        }
        _ => {
            let why = format!("it is a handle to process {inner}, which is not part of the program");
            scan.refuse(d, why, "close it before the checkpoint")
        }
    }
}

/// Id, as the program sees it, of a child of its processes that has ended and for which they have not waited yet.
fn ended_child(scan: &Scan<'_>, pid: u32) -> Option<u32> {
    let id = scan.builder.home.pid(&Proc::process(pid).ok()?.status().ok()?);
    let mut ended = scan.builder.image.processes.iter().flat_map(|process| process.ended());
    ended.any(|child| child.pid == id).then_some(id)
}

fn inotify(scan: &mut Scan<'_>, d: &Description, lines: &[InotifyLine]) -> Result<Option<FileKind>> {
    if readable(&d.file)? > 0 {
        return scan.refuse(d, UNREAD.0, UNREAD.1);
    }
    let mut watches = Vec::with_capacity(lines.len());
    for line in lines {
        let file = match located(scan, d, &line.inode, &format!("watch {}", line.wd))? {
            Ok(file) => file,
            Err((why, hint)) => return scan.refuse(d, why, hint),
        };
        let path = scan.builder.path(file).0;
        watches.push(InotifyWatch { wd: line.wd, mask: line.mask, path });
    }
    watches.sort_by_key(|w| w.wd);
    Ok(Some(FileKind::Inotify(watches)))
}

/// Why unread events are refused, and what to do.
pub(super) const UNREAD: (&str, &str) =
    ("it has events that were not yet read", "try again when the program has read them");

/// The file that an inotify or a fanotify group watches, by its name; or why it has none, and what to do. `watch`: what that is
/// called.
pub(super) fn located(
    scan: &Scan<'_>,
    d: &Description,
    inode: &Inode,
    watch: &str,
) -> Result<Result<PathFile, (String, &'static str)>> {
    let Some((path, file)) = locate(scan, scan.whose(d), inode)? else {
        let why = format!("{watch}: the path of inode {} cannot be found", inode.ino);
        let hint = match scan.builder.views.of_process(scan.whose(d)) {
            None => "CAP_DAC_READ_SEARCH is needed to look it up",
            Some(_) => "let the program remove it, as files on overlays of its own cannot be looked up",
        };
        return Ok(Err((why, hint)));
    };
    let link = path.as_os_str().as_bytes();
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call(format!("fstat {} {watch}", d.name()), e))?;
    let namespace = scan.builder.views.of_file(&file)?;
    let reached = scan.builder.views.reach(namespace, link);
    if !paths::leads_to(reached.as_os_str().as_bytes(), &stat) {
        let why = format!("the file of {watch} has no name any more");
        return Ok(Err((why, "let the program remove it")));
    }
    let made_anew = scan.builder.views.is_made_anew(stat.st_dev);
    Ok(Ok(PathFile { namespace, made_anew, ..paths::describe(link, &stat, Usage::Path) }))
}

/// The file that is watched: by its handle on one of the mounts of its file system, or else (some file
/// systems have no handles, and looking them up needs a capability) by a search below the usual places.
fn locate(scan: &Scan<'_>, pid: u32, inode: &Inode) -> Result<Option<(PathBuf, OwnedFd)>> {
    let views = &scan.builder.views;
    let namespace = views.of_process(pid);
    let all = match namespace {
        Some(row) => views.mounts(row).to_vec(),
        None => Proc::process(pid)?.mounts()?,
    };
    let device = ((inode.sdev >> 20) as u32, (inode.sdev & 0xf_ffff) as u32);
    for mount in all.iter().filter(|mount| mount.device == device) {
        let mount = views.reach(namespace, &unescaped(&mount.point));
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        let Ok(mount) = rustix::fs::open(&mount, flags, rustix::fs::Mode::empty()) else { continue };
        let Ok(file) = watches::open_by_handle(&mount, inode.handle.0, &inode.handle.1) else { continue };
        let link = fdinfo::link(std::process::id(), file.as_raw_fd() as u32)?;
        return Ok(Some((PathBuf::from(std::ffi::OsStr::from_bytes(&link)), file)));
    }
    Ok(if namespace.is_none() { search(scan, pid, inode) } else { None })
}

/// Looks for an inode among the files that the program has open, below its current directory and some usual places, not for ever.
/// Folders that it watches for being read are not read.
fn search(scan: &Scan<'_>, pid: u32, inode: &Inode) -> Option<(PathBuf, OwnedFd)> {
    use std::os::unix::fs::MetadataExt;
    let here = std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
    let open = scan.all.iter().map(|d| PathBuf::from(std::ffi::OsStr::from_bytes(&d.link)));
    let usual = ["/etc", "/run", "/tmp", "/home", "/"].map(PathBuf::from);
    let open = open.filter(|path| path.is_absolute());
    let mut todo: std::collections::VecDeque<PathBuf> = open.chain(here).chain(usual).collect();
    let mut budget = 20_000;
    while let Some(path) = todo.pop_front() {
        let Ok(meta) = std::fs::symlink_metadata(&path) else { continue };
        if (kernel_device(meta.dev()), meta.ino()) == (inode.sdev, inode.ino) {
            return open_path(&path).map(|file| (path, file));
        }
        budget -= 1;
        if budget == 0 {
            return None;
        }
        let is_noticed = || scan.builder.noticed.is_folder(&path, (meta.dev(), meta.ino()));
        if meta.is_dir() && path != Path::new("/proc") && path != Path::new("/sys") && !is_noticed() {
            todo.extend(std::fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()));
        }
    }
    None
}

fn open_path(path: &Path) -> Option<OwnedFd> {
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC | rustix::fs::OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok()
}
