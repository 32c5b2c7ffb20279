//! What is open in a program, and how it is made so again.
//!
//! Of a running program nothing is kept open here: what it closes is closed, and whoever is at the other end hears of it. So what
//! has a name, or lies within the program, is opened or made again, and what has neither cannot come back once it was closed.
//! What stands behind a descriptor of the outside world (bytes of files, sockets, terminals) is as it is now.

use crate::{Error, Result};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;
use stillpoint_capture::Refusal;
use stillpoint_linux::descriptors::{
    F_SETOWN_EX, F_SETSIG, SignalOwner, compare, duplicate_from, readable, signal_owner,
};
use stillpoint_linux::fdinfo::{Detail, EpollLine, FdInfo, Folders, Info, TimerLine};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::{fanotify, layout, pipes, watches};

/// What is open under a number.
#[derive(Clone, Debug)]
pub struct Held {
    /// What the kernel calls it.
    pub link: Vec<u8>,
    /// What `/proc` tells of it.
    pub info: FdInfo,
    /// Device and inode number.
    pub identity: (u64, u64),
    /// `st_mode`, and the device's number if it is one.
    pub mode: u32,
    device: u64,
    /// When a timer expires that was set to a time of the day, nanoseconds since 1970.
    expires_ns: Option<u64>,
    /// Numbers with the same open file description have the same.
    pub description: usize,
    /// Of a pipe: who gets its signals, by an id in the pid namespace of the process.
    owner: Option<SignalOwner>,
}

/// A descriptor table, and what is in the pipes that lie within the program.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// By their numbers.
    pub held: BTreeMap<u32, Held>,
    /// By what the kernel calls them: capacity, and unread data in packets.
    pub pipes: HashMap<Vec<u8>, Contents>,
}

/// Capacity of a pipe, and unread data in packets.
pub type Contents = (u64, Vec<Vec<u8>>);

/// What a descriptor leads to, by `stat(2)`.
#[derive(Clone, Copy, Debug)]
struct Place {
    identity: (u64, u64),
    mode: u32,
    device: u64,
}

impl Place {
    fn of(stat: &rustix::fs::Stat) -> Self {
        Place { identity: (stat.st_dev, stat.st_ino), mode: stat.st_mode, device: stat.st_rdev }
    }
}

/// What was told of the descriptors of a program when it stood still before, and files of `/proc` that tell it anew. They hold
/// nothing of the program open: what is asked of one is answered for what has its number at that moment.
#[derive(Debug, Default)]
pub struct Told {
    folders: Option<Folders>,
    infos: HashMap<u32, (Info, Vec<u8>, Held)>,
}

impl Told {
    /// So many files stay open.
    const MOST: usize = 256;

    fn folders(&mut self, pid: u32) -> Result<Folders> {
        Ok(match self.folders.take() {
            Some(folders) => folders,
            None => Folders::open(pid)?,
        })
    }

    /// What is told of a number now; what was found there when the very same was told.
    fn text(&self, folders: &Folders, fd: u32) -> Result<(Vec<u8>, Option<&Held>)> {
        let Some((info, before, held)) = self.infos.get(&fd) else { return Ok((folders.text(fd)?, None)) };
        let text = info.text()?;
        let same = (text == *before).then_some(held);
        Ok((text, same))
    }

    fn note(&mut self, folders: &Folders, fd: u32, text: Vec<u8>, held: &Held) {
        if let Some((_, before, then)) = self.infos.get_mut(&fd) {
            if *before != text || then.link != held.link || then.identity != held.identity {
                (*before, *then) = (text, held.clone());
            }
            return;
        }
        // Without it, or where the kernel does not tell inode numbers, all is looked at each time.
        let tells_inode = text.windows(5).any(|w| w == b"\nino:");
        if self.infos.len() < Self::MOST
            && tells_inode
            && let Ok(info) = folders.hold(fd)
        {
            self.infos.insert(fd, (info, text, held.clone()));
        }
    }
}

/// Kinds of descriptors that can be had again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file with this name.
    Path,
    Pipe,
    Event,
    Timer,
    Signal,
    Epoll,
    /// What it stands for lies outside of the program: it stays as it is, and is gone when it is closed.
    Outside,
}

const SETTABLE: u32 =
    (libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME | libc::O_ASYNC) as u32;
const CLOSE_ON_EXEC: u32 = libc::O_CLOEXEC as u32;
/// What an epoll is called.
const EPOLL: &[u8] = b"anon_inode:[eventpoll]";
const TFD_IOC_SET_TICKS: u64 = 0x4008_5400;
/// An eventfd that counts down by one with each read is not read more often.
const MOST_READS: u64 = 100_000;

impl Held {
    fn kind(&self) -> Kind {
        let link = self.link.as_slice();
        match link {
            b"anon_inode:[eventfd]" => Kind::Event,
            b"anon_inode:[timerfd]" => Kind::Timer,
            b"anon_inode:[signalfd]" => Kind::Signal,
            EPOLL => Kind::Epoll,
            _ if link.starts_with(b"pipe:[") => Kind::Pipe,
            _ if self.can_be_opened_again() && link.starts_with(b"/") && !link.ends_with(b" (deleted)") => {
                Kind::Path
            }
            _ => Kind::Outside,
        }
    }

    /// Whether what is told of it, with its inode and mount number among it, is told of nothing else: pipes and sockets lie on mounts of
    /// the kernel's own, which are never made anew, and are called by their inode numbers.
    fn is_told_by_its_text(&self) -> bool {
        let kind = FileType::from_raw_mode(self.mode);
        self.link.starts_with(b"pipe:[") && kind == FileType::Fifo
            || self.link.starts_with(b"socket:[") && kind == FileType::Socket
    }

    /// Whether it has a place in a file system: a name, which somebody may change, and an inode on a mount, whose number another one
    /// may have by now.
    fn is_named(&self) -> bool {
        self.link.starts_with(b"/")
    }

    /// What is told of it, if nothing has changed.
    fn again(&self) -> (Vec<u8>, FdInfo, Place) {
        let place = Place { identity: self.identity, mode: self.mode, device: self.device };
        (self.link.clone(), self.info.clone(), place)
    }

    /// Whether who opens it once more has the same: not so with FIFOs, terminals and most devices.
    fn can_be_opened_again(&self) -> bool {
        const MEMORY: u32 = 1; // /dev/null and its like
        const CONTROLLING_TERMINAL: (u32, u32) = (5, 0);
        let number = (rustix::fs::major(self.device), rustix::fs::minor(self.device));
        match FileType::from_raw_mode(self.mode) {
            FileType::CharacterDevice => number.0 == MEMORY || number == CONTROLLING_TERMINAL,
            _ => self.has_an_offset(),
        }
    }

    fn has_an_offset(&self) -> bool {
        matches!(FileType::from_raw_mode(self.mode), FileType::RegularFile | FileType::Directory)
    }

    /// Whether it is a regular file with a place in a file system.
    pub fn is_file(&self) -> bool {
        self.is_named() && FileType::from_raw_mode(self.mode) == FileType::RegularFile
    }

    fn closes_on_exec(&self) -> bool {
        self.info.flags & CLOSE_ON_EXEC != 0
    }

    /// Whether it can be read from.
    pub fn reads(&self) -> bool {
        self.info.flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
    }

    /// Whether it can be written to.
    pub fn writes(&self) -> bool {
        self.info.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32
    }
}

impl Table {
    /// Of a process that stands still.
    ///
    /// # Errors
    /// [`Error::Refused`] if the program holds what it could use to do things that nobody here knows of.
    pub fn read(pid: u32, pidfd: BorrowedFd<'_>, told: &mut Told) -> Result<Self> {
        let folders = told.folders(pid)?;
        let (mut held, mut refused) = (BTreeMap::<u32, Held>::new(), Vec::new());
        // Only what the kernel calls the same can be the same.
        let mut named: HashMap<Vec<u8>, Vec<u32>> = HashMap::new();
        let fds = folders.list()?;
        told.infos.retain(|fd, _| fds.binary_search(fd).is_ok());
        for fd in fds {
            let (text, same) = told.text(&folders, fd)?;
            let (link, mut info, stat) = match same {
                Some(before) if before.is_told_by_its_text() => before.again(),
                Some(before) if before.is_named() => {
                    (folders.link(fd)?, before.info.clone(), Place::of(&folders.stat(fd)?))
                }
                _ => {
                    let info = folders.parse(fd, &text)?;
                    (folders.link(fd)?, info, Place::of(&folders.stat(fd)?))
                }
            };
            if matches!(&info.detail, Detail::Timer(t) if t.value_ns == 0 && t.interval_ns > 0 && t.ticks > 0)
            {
                // A periodic timer stands still after its first unread expiry.
                watches::settle_timerfd(&duplicate_from(pidfd, fd)?)?;
                info = folders.read(fd)?;
            }
            if link == EPOLL && info.detail == Detail::None {
                // One that watches nothing says nothing.
                info.detail = Detail::Epoll(Vec::new());
            }
            let expires_ns = expiry(&info.detail);
            if let Some(why) = why_not(&link).or_else(|| why_not_at_rest(&info.detail)) {
                refused.push(Refusal { what: name(fd, &link), why: why.into(), hint: String::new() });
            }
            let others = named.entry(link.clone()).or_default();
            let mut description = fd as usize;
            for &other in others.iter() {
                if compare((pid, fd), (pid, other))?.is_eq() {
                    description = held[&other].description;
                    break;
                }
            }
            others.push(fd);
            let Place { identity, mode, device } = stat;
            let is_pipe = link.starts_with(b"pipe:[") && info.flags & libc::O_PATH as u32 == 0;
            let owner = if is_pipe { Some(owner_of(pid, pidfd, fd)?) } else { None };
            let one = Held { link, info, identity, mode, device, expires_ns, description, owner };
            told.note(&folders, fd, text, &one);
            held.insert(fd, one);
        }
        told.folders = Some(folders);
        if !refused.is_empty() {
            return Err(Error::Refused(refused));
        }
        let mut table = Table { held, pipes: HashMap::new() };
        for (link, read_end) in table.inner_pipes() {
            let end = duplicate_from(pidfd, read_end)?;
            table.pipes.insert(link, (pipes::capacity(&end)?, pipes::contents(&end)?));
        }
        Ok(table)
    }

    /// Numbers of both ends of a pipe, where it is read and where it is written.
    fn ends(&self, link: &[u8]) -> Option<(u32, u32)> {
        let end = |writes| self.held.iter().find(|(_, h)| h.link == link && h.writes() == writes);
        Some((*end(false)?.0, *end(true)?.0))
    }

    /// Pipes of which both ends are open here, with a number to read from.
    fn inner_pipes(&self) -> Vec<(Vec<u8>, u32)> {
        let pipes = || self.held.iter().filter(|(_, held)| held.kind() == Kind::Pipe);
        let written: HashSet<&[u8]> =
            pipes().filter(|(_, h)| h.writes()).map(|(_, h)| h.link.as_slice()).collect();
        let mut found: Vec<(Vec<u8>, u32)> = Vec::new();
        for (&fd, held) in pipes().filter(|(_, h)| h.reads() && written.contains(h.link.as_slice())) {
            if found.iter().all(|(link, _)| *link != held.link) {
                found.push((held.link.clone(), fd));
            }
        }
        found
    }
}

/// Who gets the signals of a description, by an id as the process calls it; nobody if it has no name for him.
fn owner_of(pid: u32, pidfd: BorrowedFd<'_>, fd: u32) -> Result<SignalOwner> {
    let owner = signal_owner(&duplicate_from(pidfd, fd)?)?;
    let nobody = SignalOwner { kind: 0, id: 0, ..owner };
    if owner.id == 0 {
        return Ok(nobody);
    }
    const GROUP: i32 = 2;
    let level = Proc::process(pid)?.status()?.ns_pid.len().saturating_sub(1);
    // He may end in this moment.
    let Ok(status) = Proc::process(owner.id as u32).and_then(|who| who.status()) else { return Ok(nobody) };
    let ids = if owner.kind == GROUP { status.ns_pgid } else { status.ns_pid };
    Ok(ids.get(level).map_or(nobody, |id| SignalOwner { id: *id as i32, ..owner }))
}

/// When a timer expires that was set to a time of the day.
fn expiry(detail: &Detail) -> Option<u64> {
    let Detail::Timer(timer) = detail else { return None };
    let is_of_day = matches!(timer.clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_ALARM);
    let is_set_so = is_of_day && timer.flags & libc::TFD_TIMER_ABSTIME as u32 != 0 && timer.value_ns > 0;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
    is_set_so.then(|| now.saturating_add(timer.value_ns))
}

/// What nobody can put back, and which changes by itself or by memory that we know nothing of.
fn why_not(link: &[u8]) -> Option<&'static str> {
    let known: [&[u8]; 8] = [
        b"[eventfd]",
        b"[timerfd]",
        b"[signalfd]",
        b"[eventpoll]",
        b"[pidfd]",
        b"inotify",
        b"[fanotify]",
        b"[pidfs]",
    ];
    match link.strip_prefix(b"anon_inode:") {
        Some(kind) if !known.contains(&kind) => {
            Some("what it does with the program's memory cannot be undone")
        }
        _ => None,
    }
}

/// What others wait for while it stands still, who may be those that do it.
fn why_not_at_rest(detail: &Detail) -> Option<&'static str> {
    match detail {
        Detail::Fanotify { flags, .. } if flags & fanotify::CLASS != 0 => {
            Some("it is asked for permission (fanotify): while it stands still, nobody could open files")
        }
        _ => None,
    }
}

/// `descriptor 5 (pipe:[1234])`
pub fn name(fd: u32, link: &[u8]) -> String {
    format!("descriptor {fd} ({})", String::from_utf8_lossy(link))
}

/// What is to be done, in this order.
#[derive(Debug, Default)]
pub struct Plan {
    acts: Vec<Act>,
    /// Descriptions of then that still are there, and which ones of now they are.
    pub kept: HashMap<usize, usize>,
    /// Descriptions of then that somebody else sees to.
    left: HashSet<usize>,
    /// Why it cannot be done.
    pub refused: Vec<Refusal>,
    /// What stays as it is now.
    pub notes: Vec<String>,
}

#[derive(Debug)]
enum Act {
    Close(u32),
    /// Opens the file that was open under this number.
    Open(u32),
    /// Makes both ends of a pipe: number of the read end, of the write end.
    Pipe(u32, u32),
    /// Opens the end of a pipe by the way of its other end, which is open under the second number.
    End(u32, u32),
    /// Makes an eventfd, timerfd, signalfd or epoll.
    Make(u32),
    /// The second number is another one of the first.
    Share(u32, u32),
    /// Sets what was told of a description, given what it was now, by one of its numbers.
    Adjust(u32, Option<Box<Held>>),
    /// Sets whether it is closed by `execve(2)`.
    CloseOnExec(u32, bool),
}

/// What leads from a table to another one. `root`: path of the program's root directory, as seen from here.
pub fn plan(then: &Table, now: &Table, root: &str) -> Plan {
    let mut plan = Plan::default();
    // Which number has each description of then; and which of now's it is.
    let mut first_of: HashMap<usize, u32> = HashMap::new();
    let mut taken: HashSet<usize> = HashSet::new();
    let mut kept: HashMap<u32, usize> = HashMap::new();
    for (&fd, held) in &then.held {
        let same = now.held.get(&fd).filter(|other| is_same(held, other));
        // One of now is one of then, and no other's.
        if let Some(same) =
            same.filter(|s| !first_of.contains_key(&held.description) && !taken.contains(&s.description))
        {
            first_of.insert(held.description, fd);
            taken.insert(same.description);
            kept.insert(fd, same.description);
            plan.kept.insert(held.description, same.description);
        }
    }
    // They may be all that the program can have.
    plan.acts.extend(now.held.keys().filter(|fd| !then.held.contains_key(fd)).map(|fd| Act::Close(*fd)));
    let mut made_pipes: HashSet<&[u8]> = HashSet::new();
    for (&fd, held) in &then.held {
        if kept.contains_key(&fd) {
            continue;
        }
        match first_of.get(&held.description) {
            Some(&first) => {
                let is_there =
                    kept.get(&first).zip(now.held.get(&fd)).is_some_and(|(d, h)| h.description == *d);
                if !is_there {
                    plan.acts.push(Act::Share(first, fd));
                }
            }
            None => {
                if made_pipes.contains(held.link.as_slice()) {
                    // With its other end, above.
                    first_of.insert(held.description, fd);
                    continue;
                }
                if let Some(act) = plan.again(then, now, &kept, fd, held, root) {
                    if matches!(act, Act::Pipe(..)) {
                        made_pipes.insert(&held.link);
                    }
                    plan.acts.push(act);
                }
                first_of.insert(held.description, fd);
            }
        }
    }
    for (&fd, held) in &then.held {
        // One that is given its number anew is as it is to be, and stays so.
        let closes = held.closes_on_exec();
        if now.held.get(&fd).is_some_and(|now| now.closes_on_exec() != closes) {
            plan.acts.push(Act::CloseOnExec(fd, closes));
        }
        if first_of.get(&held.description) != Some(&fd) {
            continue;
        }
        let before = kept.contains_key(&fd).then(|| now.held.get(&fd).cloned().map(Box::new)).flatten();
        if before.as_ref().is_some_and(|b| b.info.locks != held.info.locks) {
            plan.notes.push(format!("{}: its locks are those of now", name(fd, &held.link)));
        }
        if let Some(Detail::Event { count, semaphore: true }) = before.as_ref().map(|b| &b.info.detail)
            && *count > MOST_READS
        {
            let why = format!("it counts to {count} by now, and down by one with each read");
            plan.refused.push(Refusal { what: name(fd, &held.link), why, hint: String::new() });
        }
        plan.acts.push(Act::Adjust(fd, before));
    }
    plan
}

fn is_same(a: &Held, b: &Held) -> bool {
    let mode = |h: &Held| h.info.flags & (libc::O_ACCMODE | libc::O_PATH) as u32;
    let is_one_kind = match (&a.info.detail, &b.info.detail) {
        (Detail::Event { semaphore: a, .. }, Detail::Event { semaphore: b, .. }) => a == b,
        (Detail::Timer(a), Detail::Timer(b)) => a.clock == b.clock,
        (Detail::Signal(_), Detail::Signal(_)) | (Detail::Epoll(_), Detail::Epoll(_)) => true,
        (Detail::Unix { .. }, Detail::Unix { .. }) => true,
        // All of them have the same inode: what they are of is all that tells them apart.
        (a, b) => a == b,
    };
    // A file may have another name by now.
    let is_named_so = a.link == b.link || a.has_an_offset();
    is_named_so && a.identity == b.identity && mode(a) == mode(b) && is_one_kind
}

impl Plan {
    /// Leaves a description as others have set it.
    pub fn leave(&mut self, then: &Table, description: usize) {
        let is_it = |fd: &u32| then.held.get(fd).is_some_and(|held| held.description == description);
        self.acts.retain(|act| !matches!(act, Act::Adjust(fd, _) if is_it(fd)));
        self.left.insert(description);
    }

    /// How something that was closed is to be had again.
    fn again(
        &mut self,
        then: &Table,
        now: &Table,
        kept: &HashMap<u32, usize>,
        fd: u32,
        held: &Held,
        root: &str,
    ) -> Option<Act> {
        let why = match held.kind() {
            Kind::Event | Kind::Timer | Kind::Signal | Kind::Epoll => return Some(Act::Make(fd)),
            Kind::Path => {
                let path = Path::new(root).join(Path::new(std::ffi::OsStr::from_bytes(&held.link[1..])));
                match rustix::fs::stat(&path) {
                    Ok(stat) if (stat.st_dev, stat.st_ino) == held.identity => return Some(Act::Open(fd)),
                    Ok(_) => "it has been closed since, and there is another file of this name",
                    Err(_) => "it has been closed since, and there is no file of this name",
                }
            }
            Kind::Pipe if then.pipes.contains_key(&held.link) => {
                let other = kept.keys().find(|fd| now.held.get(fd).is_some_and(|h| h.link == held.link));
                if let Some(&other) = other {
                    return Some(Act::End(fd, other));
                }
                match then.ends(&held.link) {
                    Some((read, write)) => return Some(Act::Pipe(read, write)),
                    None => "it has been closed since",
                }
            }
            Kind::Pipe => "it has been closed since, and its other end is in another process",
            Kind::Outside => "it has been closed or changed since, and cannot be had again",
        };
        self.refused.push(Refusal { what: name(fd, &held.link), why: why.into(), hint: String::new() });
        None
    }
}

/// Does what is planned, by calls in a thread of the process.
pub fn put_back(
    plan: &Plan,
    then: &Table,
    now: &Table,
    thread: &mut dyn Run,
    pidfd: BorrowedFd<'_>,
) -> Result<()> {
    let pid = thread.pid();
    for act in &plan.acts {
        match act {
            Act::Close(fd) => {
                call(thread, &name(*fd, b"close"), libc::SYS_close, [u64::from(*fd)]).map(drop)?
            }
            Act::Share(from, to) => place(thread, *from, *to, &then.held[to], false)?,
            Act::Open(fd) => open(thread, *fd, &then.held[fd], &then.held[fd].link)?,
            Act::End(fd, other) => {
                open(thread, *fd, &then.held[fd], format!("/proc/self/fd/{other}").as_bytes())?;
            }
            Act::Pipe(read, write) => make_pipe(thread, then, *read, *write)?,
            Act::Make(fd) => make(thread, *fd, &then.held[fd])?,
            Act::CloseOnExec(fd, closes) => set_close_on_exec(thread, *fd, *closes)?,
            Act::Adjust(fd, before) => adjust(thread, *fd, &then.held[fd], before.as_deref())?,
        }
    }
    // When all is open that they watch.
    let folders = Folders::open(pid)?;
    let mut done = plan.left.clone();
    for (&fd, held) in then.held.iter().filter(|(_, h)| h.kind() == Kind::Epoll) {
        if let (true, Detail::Epoll(wanted)) = (done.insert(held.description), &held.info.detail) {
            let present = match folders.read(fd)?.detail {
                Detail::Epoll(present) => present,
                _ => Vec::new(),
            };
            watch(thread, fd, wanted, &present)?;
        }
    }
    for (link, contents @ (capacity, packets)) in &then.pipes {
        let is_new = |fd: &u32| now.held.get(fd).is_none_or(|h| h.link != *link);
        let Some((read, write)) = then.ends(link) else { continue };
        if now.pipes.get(link) == Some(contents) && !is_new(&read) {
            continue;
        }
        refill(duplicate_from(pidfd, read)?, duplicate_from(pidfd, write)?, *capacity, packets)?;
    }
    Ok(())
}

/// Empties a pipe and fills it again. What was in it was in it.
pub fn refill(
    read: std::os::fd::OwnedFd,
    write: std::os::fd::OwnedFd,
    capacity: u64,
    packets: &[Vec<u8>],
) -> Result<()> {
    let failed = |e: Errno| Error::Failed(format!("fill a pipe: {e}"));
    let mut buf = vec![0; 64 << 10];
    while readable(&read)? > 0 {
        rustix::io::read(&read, &mut buf).map_err(failed)?;
    }
    if pipes::capacity(&write)? != capacity {
        pipes::set_capacity(&write, capacity)?;
    }
    Ok(pipes::fill(&write, packets)?)
}

fn call<const N: usize>(thread: &mut dyn Run, what: &str, nr: i64, args: [u64; N]) -> Result<i64> {
    let mut p = Program::new();
    let step = p.call(what, nr, args.map(Arg::Value));
    Ok(thread.run(&p)?.result(step))
}

fn set_close_on_exec(thread: &mut dyn Run, fd: u32, closes: bool) -> Result<()> {
    let flag = if closes { libc::FD_CLOEXEC as u64 } else { 0 };
    call(thread, "fcntl F_SETFD", libc::SYS_fcntl, [fd.into(), libc::F_SETFD as u64, flag]).map(drop)
}

/// Opens what was open under a number, by a path.
fn open(thread: &mut dyn Run, fd: u32, held: &Held, path: &[u8]) -> Result<()> {
    let mut p = Program::new();
    let path = p.string(path);
    let flags = u64::from(held.info.flags & !CLOSE_ON_EXEC);
    let at = Arg::Value(libc::AT_FDCWD as u64);
    let step = p.call(name(fd, &held.link), libc::SYS_openat, [at, path, flags.into()]);
    let new = thread.run(&p)?.result(step) as u32;
    place(thread, new, fd, held, true)
}

/// Gives a descriptor its number; `new`: it was just opened, and is not to have the one it has.
fn place(thread: &mut dyn Run, from: u32, to: u32, held: &Held, new: bool) -> Result<()> {
    let flags = if held.closes_on_exec() { libc::O_CLOEXEC as u64 } else { 0 };
    if from == to {
        return set_close_on_exec(thread, to, held.closes_on_exec());
    }
    call(thread, "dup3", libc::SYS_dup3, [from.into(), to.into(), flags])?;
    if new {
        call(thread, "close", libc::SYS_close, [from.into()])?;
    }
    Ok(())
}

fn make_pipe(thread: &mut dyn Run, then: &Table, read: u32, write: u32) -> Result<()> {
    let mut p = Program::new();
    let ends = p.room(8);
    p.call("pipe2", libc::SYS_pipe2, [ends, 0.into()]);
    let outcome = thread.run(&p)?;
    let bytes = outcome.bytes(ends, 8);
    let (mut from, mut to) = (layout::half(bytes, 0), layout::half(bytes, 1));
    // Neither may be in the way of the other.
    if to == read || from == write {
        let above = [u64::from(to), libc::F_DUPFD as u64, u64::from(read.max(write)) + 1];
        let moved = call(thread, "fcntl F_DUPFD", libc::SYS_fcntl, above)? as u32;
        call(thread, "close", libc::SYS_close, [to.into()])?;
        to = moved;
        let above = [u64::from(from), libc::F_DUPFD as u64, u64::from(read.max(write)) + 1];
        let moved = call(thread, "fcntl F_DUPFD", libc::SYS_fcntl, above)? as u32;
        call(thread, "close", libc::SYS_close, [from.into()])?;
        from = moved;
    }
    place(thread, from, read, &then.held[&read], true)?;
    place(thread, to, write, &then.held[&write], true)
}

fn make(thread: &mut dyn Run, fd: u32, held: &Held) -> Result<()> {
    let mut p = Program::new();
    let what = name(fd, &held.link);
    let step = match &held.info.detail {
        Detail::Event { semaphore, .. } => {
            let flags = if *semaphore { libc::EFD_SEMAPHORE } else { 0 };
            p.call(what, libc::SYS_eventfd2, [0.into(), (flags as u64).into()])
        }
        Detail::Timer(timer) => {
            p.call(what, libc::SYS_timerfd_create, [(timer.clock as u64).into(), 0.into()])
        }
        Detail::Signal(mask) => {
            let mask = p.data(&mask.to_le_bytes());
            p.call(what, libc::SYS_signalfd4, [Arg::Value(u64::MAX), mask, 8.into(), 0.into()])
        }
        Detail::Epoll(_) => p.call(what, libc::SYS_epoll_create1, [0.into()]),
        _ => return Err(Error::Failed(format!("{what}: it is not known how to make it"))),
    };
    let new = thread.run(&p)?.result(step) as u32;
    place(thread, new, fd, held, true)
}

/// Who got its signals.
fn owner_before(held: &Held) -> SignalOwner {
    held.owner.unwrap_or_default()
}

/// Sets what was told of a descriptor that is open, `before` being what was there before the rollback began.
fn adjust(thread: &mut dyn Run, fd: u32, held: &Held, before: Option<&Held>) -> Result<()> {
    let what = name(fd, &held.link);
    let mut p = Program::new();
    let number = Arg::Value(fd.into());
    let settable = held.info.flags & SETTABLE;
    if before.is_none_or(|b| b.info.flags & SETTABLE != settable)
        && held.info.flags & libc::O_PATH as u32 == 0
    {
        let flags = u64::from(settable);
        p.attempt(
            format!("{what}: flags"),
            libc::SYS_fcntl,
            [number, (libc::F_SETFL as u64).into(), flags.into()],
        );
    }
    let owner = held.owner.filter(|owner| before.map_or(SignalOwner::default(), owner_before) != *owner);
    if let Some(SignalOwner { kind, id, signal }) = owner {
        let who = p.data(&[kind.to_le_bytes(), id.to_le_bytes()].concat());
        let args = [number, (F_SETOWN_EX as u64).into(), who];
        p.attempt(format!("{what}: owner"), libc::SYS_fcntl, args);
        let args = [number, (F_SETSIG as u64).into(), (signal as u64).into()];
        p.attempt(format!("{what}: signal"), libc::SYS_fcntl, args);
    }
    let bits = |held: &Held| held.mode & 0o7777;
    if held.link.starts_with(b"/memfd:") && before.is_some_and(|now| bits(now) != bits(held)) {
        let args = [number, u64::from(bits(held)).into()];
        p.attempt(format!("{what}: mode"), libc::SYS_fchmod, args);
    }
    if held.has_an_offset() && before.map_or(0, |b| b.info.pos) != held.info.pos {
        let args = [number, held.info.pos.into(), (libc::SEEK_SET as u64).into()];
        p.attempt(format!("{what}: offset"), libc::SYS_lseek, args);
    }
    match (&held.info.detail, before.map(|b| &b.info.detail)) {
        (Detail::Event { count, semaphore }, before) => {
            let now = match before {
                Some(Detail::Event { count, .. }) => *count,
                _ => 0,
            };
            if now != *count {
                let reads = if *semaphore { now } else { now.min(1) };
                let word = p.data(&count.to_le_bytes());
                let room = p.room(8);
                for _ in 0..reads {
                    p.call(what.clone(), libc::SYS_read, [number, room, 8.into()]);
                }
                if *count > 0 {
                    p.call(what, libc::SYS_write, [number, word, 8.into()]);
                }
            }
        }
        (Detail::Timer(timer), before) => {
            let idle = |t: &TimerLine| t.value_ns == 0 && t.interval_ns == 0 && t.ticks == 0;
            let was_idle = matches!(before, Some(Detail::Timer(now)) if idle(now)) || before.is_none();
            if !(idle(timer) && was_idle) {
                const NS: u64 = 1_000_000_000;
                let interval = timer.interval_ns;
                let (value, flags) = match held.expires_ns {
                    Some(at) => (at, timer.flags),
                    None => (timer.value_ns, 0),
                };
                let words = [interval / NS, interval % NS, value / NS, value % NS];
                let words = p.data(&layout::words(&words));
                p.call(what.clone(), libc::SYS_timerfd_settime, [number, u64::from(flags).into(), words]);
                if timer.ticks > 0 {
                    let ticks = p.data(&timer.ticks.to_le_bytes());
                    p.call(what, libc::SYS_ioctl, [number, TFD_IOC_SET_TICKS.into(), ticks]);
                }
            }
        }
        (Detail::Signal(mask), Some(Detail::Signal(now))) if mask != now => {
            let mask = p.data(&mask.to_le_bytes());
            p.call(what, libc::SYS_signalfd4, [number, mask, 8.into(), 0.into()]);
        }
        _ => {}
    }
    if !p.is_empty() {
        thread.run(&p)?;
    }
    Ok(())
}

/// Gives an epoll the watches that it had.
fn watch(thread: &mut dyn Run, epoll: u32, wanted: &[EpollLine], present: &[EpollLine]) -> Result<()> {
    let mut p = Program::new();
    let mut control = |what: &str, operation: i32, line: &EpollLine| {
        let mut event = line.events.to_le_bytes().to_vec();
        event.extend(line.data.to_le_bytes());
        let event = p.data(&event);
        let args = [u64::from(epoll).into(), (operation as u64).into(), u64::from(line.fd).into(), event];
        p.attempt(format!("{what} descriptor {} in epoll {epoll}", line.fd), libc::SYS_epoll_ctl, args);
    };
    for line in present.iter().filter(|line| !wanted.iter().any(|w| w.fd == line.fd)) {
        control("forget", libc::EPOLL_CTL_DEL, line);
    }
    for line in wanted {
        match present.iter().find(|p| p.fd == line.fd) {
            // An event that was to be told once is told once more, perhaps in vain.
            Some(now) if now == line && line.events & libc::EPOLLET as u32 == 0 => {}
            Some(_) => control("watch otherwise", libc::EPOLL_CTL_MOD, line),
            None => control("watch", libc::EPOLL_CTL_ADD, line),
        }
    }
    if !p.is_empty() {
        thread.run(&p)?;
    }
    Ok(())
}
