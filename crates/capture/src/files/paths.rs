//! Files in the file system: by path and identity, or with their contents where the name is gone.

use super::Scan;
use super::descriptions::Description;
use super::locks::is_broken_by_opening;
use super::noticed;
use super::queues;
use crate::builder::{FOREIGN, Source};
use crate::{Builder, Content, Result};
use rustix::fs::{FileType, Stat};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirEntryExt;
use std::path::Path;
use stillpoint_image::{
    Bytes, FileKind, Owner, PathFile, Status, Times, Usage, is_memory_device, nanoseconds,
};
use stillpoint_linux::Error;
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::mounts;

const PROC: u64 = 0x9fa0;
const MQUEUE: u64 = 0x1980_0202;
const FUSE: u64 = 0x6573_5546;
const CGROUP2: u64 = 0x6367_7270;
const NAMESPACES: u64 = 0x6e73_6673;

/// File systems whose files are views of the kernel: a path is all there is to them.
const VIEWS: [u64; 5] = [
    0x6265_6572, // sysfs
    CGROUP2,
    0x0027_e0eb, // cgroup
    0x7363_6673, // securityfs
    0x6462_6720, // debugfs
];

/// Whether files of a file system, by its magic number, are views of the kernel, or queues, rather than files with contents of their own.
pub fn is_view(magic: u64) -> bool {
    let is_other = STATEFUL.iter().any(|(stateful, _)| *stateful == magic && magic != FUSE);
    magic == PROC || magic == MQUEUE || VIEWS.contains(&magic) || is_other
}

/// File systems whose files hold state that cannot be given back, with their names.
const STATEFUL: [(u64, &str); 6] = [
    (NAMESPACES, "a handle to a namespace that none of its processes is in"),
    (0x7472_6163, "a file of tracefs"),
    (0xcafe_4a11, "an object of bpffs"),
    (0x5345_434d, "secret memory (memfd_secret)"),
    (0x4249_4e4d, "a file of binfmt_misc"),
    (FUSE, "a file that another program serves (FUSE)"),
];

/// Captures a regular file or directory.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    let fs = rustix::fs::fstatfs(&d.file).map_err(|e| Error::call(format!("fstatfs {}", d.name()), e))?;
    let magic = fs.f_type as u64 & 0xffff_ffff;
    if magic == PROC {
        return proc_file(scan, d);
    }
    if magic == MQUEUE {
        return queues::capture(scan, d);
    }
    if magic == NAMESPACES
        && let Some(path) = own_namespace(scan, d)
    {
        let row = describe(path.as_bytes(), &d.stat, Usage::Path);
        return Ok(Some(FileKind::Proc(scan.builder.path(row).0)));
    }
    if let Some((_, what)) = STATEFUL.iter().find(|s| s.0 == magic) {
        return scan.refuse(d, format!("it is {what}"), "close it before the checkpoint");
    }
    if magic == CGROUP2 && d.link.ends_with(b".pressure") && d.can_write() {
        return refuse_trigger(scan, d);
    }
    let usage = usage(&d.stat, magic, d.can_write());
    let row = path_file(scan.builder, &d.link, &d.file, usage, &d.name())?;
    Ok(row.map(FileKind::Path))
}

/// A file of pressure that was opened for writing: what was written to it is when its reader is to be woken.
fn refuse_trigger(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    let why = "it may have been told of which pressure to tell (PSI trigger), which nobody can read";
    scan.refuse(d, why, "close it before the checkpoint")
}

/// The name below `/proc`, as who has it open finds it there, of a namespace that a process of the program is in.
fn own_namespace(scan: &Scan<'_>, d: &Description) -> Option<String> {
    // Who opens it again may be in a root without a procfs.
    std::fs::symlink_metadata(format!("/proc/{}/root/proc/self", d.pid())).ok()?;
    let link = String::from_utf8_lossy(&d.link);
    let (kind, _) = link.split_once(':')?;
    let names = [kind.to_owned(), format!("{kind}_for_children")];
    let others = scan.target.holders.iter().map(|holder| holder.pid).filter(|pid| *pid != d.pid());
    for pid in std::iter::once(d.pid()).chain(others) {
        let is_it = |name: &&String| {
            let found = rustix::fs::stat(format!("/proc/{pid}/ns/{name}"));
            found.is_ok_and(|found| (found.st_dev, found.st_ino) == (d.stat.st_dev, d.stat.st_ino))
        };
        let Some(name) = names.iter().find(is_it) else { continue };
        let whose = if pid == d.pid() { "self".into() } else { scan.inner_pid(pid)?.to_string() };
        return Some(format!("/proc/{whose}/ns/{name}"));
    }
    None
}

/// What a file or directory is to be looked at for.
fn usage(stat: &Stat, magic: u64, can_write: bool) -> Usage {
    match FileType::from_raw_mode(stat.st_mode) {
        _ if VIEWS.contains(&magic) => Usage::Path,
        FileType::Directory => Usage::Path,
        _ if can_write => Usage::Write,
        _ => Usage::Read,
    }
}

/// Notes the files that have names and that a running process has open, for what can be found out about them ahead. By
/// handles to their places, not duplicates: what it closes meanwhile is closed. Tells whether it has anything else that others
/// might hold too, such as a pipe.
///
/// # Errors
/// That the process has ended.
pub fn note_open(builder: &mut Builder, pid: u32) -> stillpoint_linux::Result<bool> {
    let (folders, mut may_be_held) = (Folders::open(pid)?, false);
    for fd in folders.list()? {
        // One that is closed meanwhile is no concern.
        may_be_held |= note(builder, &folders, fd).unwrap_or_default();
    }
    Ok(may_be_held)
}

fn note(builder: &mut Builder, folders: &Folders, fd: u32) -> stillpoint_linux::Result<bool> {
    let link = folders.link(fd)?;
    if noticed::is_of_watches(&link) {
        builder.noticed.add(&folders.read(fd)?.detail);
        return Ok(false);
    }
    let file = folders.handle(fd)?;
    let failed = |e| Error::call(format!("look at descriptor {fd}"), e);
    let stat = rustix::fs::fstat(&file).map_err(failed)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if leads_to(&link, &stat) => {}
        FileType::RegularFile | FileType::Fifo | FileType::Socket => return Ok(true),
        FileType::CharacterDevice => return Ok(!is_memory_device(stat.st_rdev)),
        _ => return Ok(false),
    }
    let magic = rustix::fs::fstatfs(&file).map_err(failed)?.f_type as u64 & 0xffff_ffff;
    if ![PROC, MQUEUE].contains(&magic) && !STATEFUL.iter().any(|s| s.0 == magic) {
        let info = folders.read(fd)?;
        if info.locks.iter().any(is_broken_by_opening) {
            builder.noticed.add_lease((stat.st_dev, stat.st_ino));
        }
        let can_write = info.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        builder.path(describe(&link, &stat, usage(&stat, magic, can_write)));
    }
    Ok(false)
}

/// Captures an `O_PATH` descriptor.
pub(crate) fn path_handle(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    if !d.link.starts_with(b"/") {
        return scan.refuse(d, "it is a handle (O_PATH) to an object without a path", "");
    }
    let fs = rustix::fs::fstatfs(&d.file).map_err(|e| Error::call(format!("fstatfs {}", d.name()), e))?;
    if fs.f_type as u64 == PROC {
        return proc_file(scan, d);
    }
    Ok(path_file(scan.builder, &d.link, &d.file, Usage::Path, &d.name())?.map(FileKind::Path))
}

/// Row of a file that the target holds: open, mapped, as its executable, current or root directory. `link` is the
/// kernel's name for it (`/proc/PID/fd/N`, `/proc/PID/exe`, `/proc/PID/map_files/…`), `file` any descriptor of it,
/// `what` is for messages. `None` if it was refused.
///
/// A file without a name is saved whole.
pub fn path_file(
    builder: &mut Builder,
    link: &[u8],
    file: impl AsFd,
    usage: Usage,
    what: &str,
) -> Result<Option<u32>> {
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call(format!("fstat {what}"), e))?;
    let namespace = builder.views.of_file(&file)?;
    let found = |builder: &mut Builder, link: &[u8]| {
        let made_anew = builder.views.is_made_anew(stat.st_dev);
        builder.path(PathFile { namespace, made_anew, ..describe(link, &stat, usage) }).0
    };
    let lies_at = |builder: &Builder, path: &[u8]| {
        path.first() == Some(&b'/')
            && leads_to(builder.views.reach(namespace, path).as_os_str().as_bytes(), &stat)
    };
    if lies_at(builder, link) {
        return Ok(Some(found(builder, link)));
    }
    if stat.st_nlink == 0 {
        return deleted_content(builder, link, file, usage, what);
    }
    if !link.starts_with(b"/") || link.starts_with(b"(unreachable)") {
        builder.refuse(what, "its path cannot be reached from here", "it may be in another mount namespace");
        return Ok(None);
    }
    if let Some(name) = other_name(builder, namespace, link, &stat) {
        return Ok(Some(found(builder, &name)));
    }
    let (why, hint) = if link.ends_with(b" (deleted)") {
        let why = "its name was removed or replaced, but the file has another name that is not known";
        (why, "let the program open it anew, or remove the other name (a hard link)")
    } else if rustix::fs::stat(builder.views.reach(namespace, link)).err() == Some(rustix::io::Errno::ACCESS)
    {
        ("you may not enter a directory above it", "ask for it as root, or as somebody who may")
    } else if is_mounted_nowhere(builder, &file)? {
        let why =
            "it lies in a mount that is attached nowhere (open_tree(2), fsmount(2), or unmounted since)";
        (why, "let the program close it, or attach the mount")
    } else {
        let why = "its path leads to another file now, or to none";
        (why, "it may be in another mount namespace, or hidden below a mount")
    };
    builder.refuse(what, why, hint);
    Ok(None)
}

/// Whether the mount of a file is neither one of ours nor of the program's.
fn is_mounted_nowhere(builder: &Builder, file: impl AsFd) -> Result<bool> {
    if builder.views.of_file(&file)?.is_some() {
        return Ok(false);
    }
    let mount = mounts::number(&file)?;
    Ok(builder.views.ours()?.iter().all(|one| one.id != mount))
}

/// Another name of a file whose name is gone, in the directory where that was: what is made under a name of its own and then linked
/// to the one it is to have, as semaphores are (`sem_open(3)`), has it there.
fn other_name(builder: &Builder, namespace: Option<u32>, link: &[u8], stat: &Stat) -> Option<Vec<u8>> {
    const MOST: usize = 10_000;
    let folder = Path::new(OsStr::from_bytes(link.strip_suffix(b" (deleted)")?)).parent()?;
    let reached = |path: &[u8]| builder.views.reach(namespace, path).into_os_string().into_vec();
    let place = builder.views.reach(namespace, folder.as_os_str().as_bytes());
    let its = rustix::fs::stat(&place).ok()?;
    if builder.noticed.is_folder(&place, (its.st_dev, its.st_ino)) {
        return None;
    }
    let entries = std::fs::read_dir(OsStr::from_bytes(&reached(folder.as_os_str().as_bytes()))).ok()?;
    let same = entries.take(MOST).flatten().filter(|e| e.ino() == stat.st_ino);
    let mut names = same.map(|e| folder.join(e.file_name()).into_os_string().into_vec());
    names.find(|name| leads_to(&reached(name), stat))
}

/// Extended attributes, names and values, by calls that list names and read a value; none where there are no such things.
pub(crate) fn attributes(
    list: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
    get: impl Fn(&OsStr, &mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Vec<(Bytes, Bytes)>> {
    /// `XATTR_SIZE_MAX` and `XATTR_LIST_MAX`.
    const MOST: usize = 64 << 10;
    // Most have none: one has no room for more.
    if matches!(list(&mut [0]), Ok(0) | Err(rustix::io::Errno::OPNOTSUPP)) {
        return Ok(Vec::new());
    }
    let mut names = vec![0; MOST];
    let len = list(&mut names)?;
    names.truncate(len);
    let mut all = Vec::new();
    for name in names.split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; MOST];
        // Somebody has just removed it; or it is listed, and not for us to know.
        use rustix::io::Errno;
        let len = match get(OsStr::from_bytes(name), &mut value) {
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::ACCESS | Errno::PERM) => continue,
            got => got?,
        };
        value.truncate(len);
        all.push((Bytes(name.to_vec()), Bytes(value)));
    }
    Ok(all)
}

/// Extended attributes of a file, names and values; `file` may be only a handle to it.
pub(crate) fn attributes_of(file: impl AsFd, what: &str) -> Result<Vec<(Bytes, Bytes)>> {
    let way = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let list = |names: &mut [u8]| rustix::fs::listxattr(&way, names);
    let all = attributes(list, |name, value| rustix::fs::getxattr(&way, name, value));
    Ok(all.map_err(|e| Error::call(format!("read attributes of {what}"), e))?)
}

/// Row of a file that has no name any more, with its contents; `link` is the kernel's name for it.
pub fn deleted_content(
    builder: &mut Builder,
    link: &[u8],
    file: impl AsFd,
    usage: Usage,
    what: &str,
) -> Result<Option<u32>> {
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call(format!("fstat {what}"), e))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let can_be_made = match kind {
        FileType::CharacterDevice => is_memory_device(stat.st_rdev),
        kind => matches!(kind, FileType::RegularFile | FileType::Directory | FileType::Fifo),
    };
    if !can_be_made {
        builder.refuse(what, "its name was removed", "let the program close it");
        return Ok(None);
    }
    let name = link.strip_suffix(b" (deleted)").unwrap_or(link);
    let namespace = builder.views.of_file(&file)?;
    let (row, new) = builder.path(PathFile { deleted: true, namespace, ..describe(name, &stat, usage) });
    if new && matches!(kind, FileType::RegularFile | FileType::Directory) {
        builder.image.paths[row as usize].attributes = attributes_of(&file, what)?;
    }
    if new && kind == FileType::RegularFile {
        // The duplicate may be write-only, and its offset is the target's: read through a description of our own, if nobody is told.
        let is_noticed =
            builder.noticed.is(&builder.views.reach(namespace, name), (stat.st_dev, stat.st_ino));
        let Some(source) = Source::of(builder, &file, is_noticed, what)? else { return Ok(None) };
        let (owner, what) = (Owner::File(row), what.to_owned());
        builder.contents.push(Content { owner, source, ranges: None, what });
    }
    Ok(Some(row))
}

/// Whether a path, as we see it, leads to this very file.
pub(crate) fn leads_to(path: &[u8], stat: &Stat) -> bool {
    let path = Path::new(OsStr::from_bytes(path));
    path.is_absolute()
        && rustix::fs::lstat(path).is_ok_and(|s| (s.st_dev, s.st_ino) == (stat.st_dev, stat.st_ino))
}

/// A row from a path and a `stat`.
pub(crate) fn describe(path: &[u8], stat: &Stat, usage: Usage) -> PathFile {
    let Times { atime_ns, mtime_ns } = times(stat);
    PathFile {
        path: Bytes(path.to_vec()),
        dev: stat.st_dev,
        ino: stat.st_ino,
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev,
        size: stat.st_size as u64,
        mtime_ns,
        ctime_ns: nanoseconds((stat.st_ctime, stat.st_ctime_nsec)),
        atime_ns,
        usage,
        ..PathFile::default()
    }
}

/// The times that a `stat` tells and that can be given back.
pub(crate) fn times(stat: &Stat) -> Times {
    Times::of((stat.st_atime, stat.st_atime_nsec), (stat.st_mtime, stat.st_mtime_nsec))
}

/// What a `stat` tells of a pipe or socket.
pub(crate) fn status(stat: &Stat) -> Status {
    Status { mode: stat.st_mode & 0o7777, uid: stat.st_uid, gid: stat.st_gid, times: times(stat) }
}

/// A file of procfs: global ones, those about the target's own processes, and those about processes that have ended.
fn proc_file(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    const CLOSE: &str = "close it before the checkpoint";
    const NOT_REACHED: &str = "it is a file of procfs that cannot be reached by its path";
    if scan.builder.foreign.contains(&d.stat.st_dev) {
        return scan.refuse(d, FOREIGN.0, FOREIGN.1);
    }
    let link = String::from_utf8_lossy(&d.link).into_owned();
    let (name, deleted) = match link.strip_suffix(" (deleted)") {
        Some(name) => (name, true),
        None => (link.as_str(), false),
    };
    let described = |path: &str| describe(path.as_bytes(), &d.stat, Usage::Path);
    let file = described(name);
    let Some((pid, below)) = file.of_process() else {
        if !name.starts_with("/proc") || deleted {
            return scan.refuse(d, NOT_REACHED, CLOSE);
        }
        if name.starts_with("/proc/pressure/") && d.can_write() {
            return refuse_trigger(scan, d);
        }
        return Ok(Some(FileKind::Proc(scan.builder.path(file).0)));
    };
    // A name in `net` leads nowhere any more as soon as somebody looks it up, to the same file once more.
    let is_of_network = below.iter().any(|part| part == "net");
    let Some(view) = ProcView::of(scan, &d.stat) else {
        return scan.refuse(d, NOT_REACHED, CLOSE);
    };
    let own = view.outer_pid(scan, pid);
    let is = match is_of_network {
        true if own.is_some() => Of::Living,
        true => Of::Another,
        false => what_it_is_of(&view, pid, name, deleted, &d.stat),
    };
    let path = match (is, own) {
        (Of::Living, Some(own)) => described(&own_proc_path(scan, &view, d, own, below)),
        (Of::Living, None) => {
            let why = format!("it is about process {pid}, which is not part of the program");
            return scan.refuse(d, why, CLOSE);
        }
        (Of::Ended, _) if !is_dead(d, below) => {
            return scan.refuse(
                d,
                "it is about a process (or thread) that has ended, and tells of it still",
                CLOSE,
            );
        }
        // Some of what it was read from may lie in the kernel, to be read on.
        (Of::Ended, _) if d.info.pos != 0 && is_regular(&d.stat) && !below.ends_with("mem") => {
            return scan.refuse(d, "it is about a process that has ended, and was read in part", CLOSE);
        }
        (Of::Ended, _) => return Ok(Some(FileKind::EndedProc(scan.builder.path(file).0))),
        (Of::Another, _) => {
            return scan.refuse(d, NOT_REACHED, CLOSE);
        }
    };
    Ok(Some(FileKind::Proc(scan.builder.path(path).0)))
}

/// A procfs, and by what its files are reached.
struct ProcView {
    /// The root in which it is on `/proc`; nothing: ours.
    root: String,
}

impl ProcView {
    /// The one that a file is of: ours, or that of the pid namespace that a restore made for the program. `None` for any other.
    fn of(scan: &Scan<'_>, stat: &Stat) -> Option<Self> {
        let first = scan.builder.home.first.map(|first| format!("/proc/{first}/root"));
        let mut roots = [Some(String::new()), first].into_iter().flatten();
        let is_it = |root: &String| {
            rustix::fs::stat(format!("{root}/proc")).is_ok_and(|there| there.st_dev == stat.st_dev)
        };
        roots.find(is_it).map(|root| ProcView { root })
    }

    fn is_ours(&self) -> bool {
        self.root.is_empty()
    }

    /// What we call the process of the program that is called so there.
    fn outer_pid(&self, scan: &Scan<'_>, pid: u32) -> Option<u32> {
        match self.is_ours() {
            true => scan.inner_pid(pid).map(|_| pid),
            false => scan.outer_pid(pid),
        }
    }
}

/// Whom a file of procfs is about.
enum Of {
    Living,
    Ended,
    /// It is one of another procfs than that on our `/proc`, or whoever it is about may not be seen.
    Another,
}

/// Whom a file of procfs with the number of a process in its name is about: of one that has ended there is nothing by that name any more,
/// or another file.
fn what_it_is_of(view: &ProcView, pid: u32, name: &str, deleted: bool, stat: &Stat) -> Of {
    let is_there = || {
        view.is_ours()
            && rustix::process::Pid::from_raw(pid as i32)
                .is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
    };
    match rustix::fs::lstat(format!("{}{name}", view.root)) {
        Ok(found) if found.st_dev != stat.st_dev => Of::Another,
        Ok(found) if found.st_ino == stat.st_ino && !deleted => Of::Living,
        Ok(_) => Of::Ended,
        // Whoever may not see a process finds nothing either.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::SRCH)
            if !is_there() || Path::new(&format!("{}/proc/{pid}", view.root)).exists() =>
        {
            Of::Ended
        }
        Err(_) => Of::Another,
    }
}

/// Whether nothing can be learnt by it any more, as by one of any other process that has ended. What lies in the memory of somebody who
/// lives on can, and what a process had open, mapped or mounted is not there of another.
fn is_dead(d: &Description, below: &Path) -> bool {
    const OF_TASKS: [&str; 29] = [
        "autogroup",
        "cgroup",
        "cmdline",
        "comm",
        "coredump_filter",
        "cpuset",
        "io",
        "limits",
        "loginuid",
        "maps",
        "numa_maps",
        "oom_adj",
        "oom_score",
        "oom_score_adj",
        "personality",
        "sched",
        "schedstat",
        "sessionid",
        "smaps",
        "smaps_rollup",
        "stack",
        "stat",
        "statm",
        "status",
        "syscall",
        "timens_offsets",
        "timerslack_ns",
        "wchan",
        "clear_refs",
    ];
    const FOLDERS: [&str; 5] = ["attr", "fd", "fdinfo", "ns", "task"];
    let mut parts = below.iter().filter_map(OsStr::to_str);
    let mut name = parts.next().unwrap_or_default();
    if name == "task"
        && let Some(_thread) = parts.next()
    {
        name = parts.next().unwrap_or_default();
    }
    if parts.next().is_some() {
        return false;
    }
    match name {
        "" => true,
        // Of memory that nobody has any more there is nothing.
        "mem" | "environ" | "pagemap" => matches!(rustix::io::pread(&d.file, &mut [0; 8], 0), Ok(0)),
        name => OF_TASKS.contains(&name) || FOLDERS.contains(&name),
    }
}

fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// `/proc/PID/task/TID/…` with the ids as the program sees them, of the process that we call so; `/proc/self/…` is about the first process
/// that holds the description, which opens it again.
fn own_proc_path(scan: &Scan<'_>, view: &ProcView, d: &Description, pid: u32, below: &Path) -> String {
    let mut path = match scan.inner_pid(pid).filter(|_| pid != d.pid()) {
        Some(pid) => format!("/proc/{pid}"),
        None => String::from("/proc/self"),
    };
    let mut after_task = false;
    for part in below.iter().filter_map(OsStr::to_str) {
        // In a procfs of the program's own they are told so already.
        let outer = part.parse().ok().filter(|_| view.is_ours());
        let inner = outer.and_then(|tid| scan.inner_id(tid));
        match inner {
            Some(tid) if after_task => path.push_str(&format!("/{tid}")),
            _ => path.push_str(&format!("/{part}")),
        }
        after_task = part == "task";
    }
    path
}
