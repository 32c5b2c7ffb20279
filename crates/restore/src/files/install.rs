//! Bringing the open files into the new process.

use super::moves::{self, Step as Move, Wanted};
use super::{OpenFiles, locks, missing, standard};
use crate::{Error, Result};
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use stillpoint_image::pids::{Pids, namespace_of};
use stillpoint_image::{
    Descriptor, EpollWatch, FileKind, FileOwner, FileTable, Image, LockKind, OpenFile, TimerFd,
};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program, Run, Step};
use stillpoint_linux::{descriptors, watches};

const CLOEXEC: u64 = libc::O_CLOEXEC as u64;
/// `F_SETLK` and others, whose number is an argument.
fn value(n: i32) -> Arg {
    Arg::Value(n as i64 as u64)
}

fn table_of(image: &Image, table: u32) -> Result<&FileTable> {
    image.tables.get(table as usize).ok_or_else(|| missing("descriptor table", table))
}

impl OpenFiles {
    /// Brings the descriptors to their numbers in the new process, which has a copy of our table, and closes all
    /// others, those that mappings were made from among them. Descriptions that are made later
    /// ([`OpenFiles::finish`]) are `/dev/null` until then.
    ///
    /// The limit on descriptor numbers must still be ours, not the program's.
    pub fn install(&self, image: &Image, table: u32, process: &mut dyn Run) -> Result<()> {
        let table = table_of(image, table)?;
        let mut program = Program::new();
        for step in moves::plan(&self.wanted(table)) {
            add_step(&mut program, step);
        }
        close_others(&mut program, table);
        process.run(&program)?;
        Ok(())
    }

    fn wanted(&self, table: &FileTable) -> Vec<Wanted> {
        let one = |d: &Descriptor| {
            let source = self.sources.get(d.file as usize).and_then(Option::as_ref).unwrap_or(&self.reserve);
            Wanted { source: source.as_raw_fd() as u32, number: d.fd, close_on_exec: d.close_on_exec }
        };
        table.descriptors.iter().map(one).collect()
    }

    /// Makes what belongs to processes themselves, once their threads stand and after [`OpenFiles::install`]: files about
    /// themselves, epoll watches, owners of signals, POSIX locks, timers (last: their time runs from here). `processes`: in
    /// the order of the image's.
    ///
    /// A description that several processes hold is made in the first of them, and fetched from there by the others.
    pub fn finish(&self, image: &Image, processes: &mut [&mut dyn Run]) -> Result<()> {
        let mut work = Finish::new(image)?;
        for (row, home, file) in work.rows()? {
            work.open_late(row, home, file)?;
        }
        work.run(processes)?;
        for (row, home, file) in work.rows()? {
            if is_late(image, row, file) {
                work.share(row, home)?;
            }
        }
        work.run(processes)?;
        for disarmed in [true, false] {
            for (_, home, file) in work.rows()? {
                let FileKind::Epoll(list) = &file.kind else { continue };
                for watch in list.iter().filter(|w| is_disarmed(w) == disarmed) {
                    match disarmed {
                        true => work.disarm(home, watch, processes)?,
                        false => work.watch(home, watch, libc::EPOLL_CTL_ADD, watch.events)?,
                    }
                }
            }
        }
        work.run(processes)?;
        for (row, home, file) in work.rows()? {
            work.owner(home, file)?;
            work.lock(row, home, file)?;
        }
        // Who gets the signals is settled by now.
        for (_, home, file) in work.rows()? {
            work.lease(home, file);
        }
        for (_, home, file) in work.rows()? {
            if let FileKind::Timer(timer) = &file.kind {
                work.timer(home, timer);
            }
        }
        work.run(processes)
    }
}

/// Whether a description can only be made in a process that holds it.
fn is_late(image: &Image, row: u32, file: &OpenFile) -> bool {
    match file.kind {
        FileKind::Pid(_) | FileKind::Proc(_) => true,
        FileKind::ControllingTerminal => standard::opener(image, row).is_some(),
        _ => false,
    }
}

fn add_step(program: &mut Program, step: Move) {
    match step {
        Move::Duplicate { from, to, close_on_exec } => {
            duplicate(program, from.into_arg(), to, close_on_exec);
        }
        Move::Mark { number, close_on_exec } => {
            let args = [number.into_arg(), value(libc::F_SETFD), u64::from(close_on_exec).into()];
            program.call(format!("mark descriptor {number}"), libc::SYS_fcntl, args);
        }
    }
}

trait IntoArg {
    fn into_arg(self) -> Arg;
}

impl IntoArg for u32 {
    fn into_arg(self) -> Arg {
        Arg::Value(self.into())
    }
}

fn duplicate(program: &mut Program, from: Arg, to: u32, close_on_exec: bool) {
    let flags = if close_on_exec { CLOEXEC } else { 0 };
    program.call(
        format!("put descriptor {to} in place"),
        libc::SYS_dup3,
        [from, to.into_arg(), flags.into()],
    );
}

/// Gives an open file that was fetched this number instead of the one it has, which may be the same.
fn move_to(program: &mut Program, fetched: Step, to: u32) {
    let args = [fetched.into(), value(libc::F_DUPFD_CLOEXEC), u64::from(to.saturating_add(1)).into()];
    let above = program.call("put a descriptor aside", libc::SYS_fcntl, args);
    program.call("close", libc::SYS_close, [fetched.into()]);
    duplicate(program, above.into(), to, true);
    program.call("close", libc::SYS_close, [above.into()]);
}

/// Closes every number that the program does not have.
fn close_others(program: &mut Program, table: &FileTable) {
    let mut numbers: Vec<u64> = table.descriptors.iter().map(|d| u64::from(d.fd)).collect();
    numbers.sort_unstable();
    let mut from = 0u64;
    for number in numbers.into_iter().chain([u64::from(u32::MAX) + 1]) {
        if number > from {
            let args = [from.into(), (number - 1).into(), 0.into()];
            program.call("close descriptors", libc::SYS_close_range, args);
        }
        from = number + 1;
    }
}

/// A descriptor of a process, by its place among the image's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Home {
    process: usize,
    fd: u32,
}

/// Whether a watch for one event has fired: the kernel then leaves nothing of its mask but how it is to tell.
fn is_disarmed(watch: &EpollWatch) -> bool {
    const HOW: u32 = (libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;
    watch.events & libc::EPOLLONESHOT as u32 != 0 && watch.events & !HOW == 0
}

/// The work of [`OpenFiles::finish`] in progress.
struct Finish<'a> {
    image: &'a Image,
    /// Descriptor tables of the processes.
    tables: Vec<&'a FileTable>,
    /// The first descriptor of each open file, of a controlling terminal that of who can open it.
    home: HashMap<u32, Home>,
    pids: Pids<'a>,
    /// What the processes are to do next.
    programs: Vec<Program>,
}

impl<'a> Finish<'a> {
    fn new(image: &'a Image) -> Result<Self> {
        let tables = image.processes.iter().map(|p| table_of(image, p.table)).collect::<Result<Vec<_>>>()?;
        let mut home = HashMap::new();
        for (process, table) in tables.iter().enumerate() {
            for d in &table.descriptors {
                let terminal = image.files.get(d.file as usize).map(|file| &file.kind);
                let opener = match terminal {
                    Some(FileKind::ControllingTerminal) => standard::opener(image, d.file),
                    _ => None,
                };
                if opener.is_none_or(|opener| opener == process) {
                    home.entry(d.file).or_insert(Home { process, fd: d.fd });
                }
            }
        }
        let programs = tables.iter().map(|_| Program::new()).collect();
        Ok(Finish { image, tables, home, pids: Pids::of(image), programs })
    }

    /// Open files with the first of their descriptors, in the order of these.
    fn rows(&self) -> Result<Vec<(u32, Home, &'a OpenFile)>> {
        let mut rows = Vec::with_capacity(self.home.len());
        for (&row, &home) in &self.home {
            let file = self.image.files.get(row as usize).ok_or_else(|| missing("open file", row))?;
            rows.push((row, home, file));
        }
        rows.sort_unstable_by_key(|r| r.1);
        Ok(rows)
    }

    /// Lets the processes do what has been put down.
    fn run(&mut self, processes: &mut [&mut dyn Run]) -> Result<()> {
        for (program, process) in self.programs.iter_mut().zip(processes) {
            let program = std::mem::take(program);
            if !program.is_empty() {
                process.run(&program)?;
            }
        }
        Ok(())
    }

    /// Descriptors of an open file in a process.
    fn descriptors(&self, process: usize, row: u32) -> impl Iterator<Item = &'a Descriptor> {
        self.tables[process].descriptors.iter().filter(move |d| d.file == row)
    }

    /// Gets an open file from the process that has it; the result is a descriptor to be closed.
    fn fetch(&mut self, process: usize, from: Home) -> Result<Step> {
        let pid = self.seen_from(process, self.image.processes[from.process].pid)?;
        let program = &mut self.programs[process];
        let handle = program.call(
            format!("open a handle to process {pid}"),
            libc::SYS_pidfd_open,
            [pid.into_arg(), 0.into()],
        );
        let args = [handle.into(), from.fd.into_arg(), 0.into()];
        let fetched = program.call(
            format!("fetch descriptor {} of process {pid}", from.fd),
            libc::SYS_pidfd_getfd,
            args,
        );
        program.call("close", libc::SYS_close, [handle.into()]);
        Ok(fetched)
    }

    /// What an id is called by a process.
    fn seen_from(&self, process: usize, id: u32) -> Result<u32> {
        let namespace = namespace_of(self.image, &self.image.processes[process]);
        let name = self.pids.seen_from(namespace, id);
        name.ok_or_else(|| {
            Error::Failed(format!("{id} has no name in the pid namespace of a process that needs it"))
        })
    }

    /// Gives an open file that was made late to all other processes that hold it.
    fn share(&mut self, row: u32, home: Home) -> Result<()> {
        for process in 0..self.tables.len() {
            // Those that share a table are given it once.
            let (all, own) = (&self.image.processes, self.image.processes[process].table);
            if own == all[home.process].table || all[..process].iter().any(|p| p.table == own) {
                continue;
            }
            let all: Vec<Descriptor> = self.descriptors(process, row).copied().collect();
            if all.is_empty() {
                continue;
            }
            let fetched = self.fetch(process, home)?;
            let program = &mut self.programs[process];
            for d in all {
                duplicate(program, fetched.into(), d.fd, d.close_on_exec);
            }
            program.call("close", libc::SYS_close, [fetched.into()]);
        }
        Ok(())
    }

    /// Opens what can only be opened in the process itself, and puts it in the place kept for it. That place is
    /// taken, so the number the kernel gives is never the one it is to get.
    fn open_late(&mut self, row: u32, home: Home, file: &OpenFile) -> Result<()> {
        if !is_late(self.image, row, file) {
            return Ok(());
        }
        let (flags, fd) = (super::open_flags(file.flags) as u32, home.fd);
        let all: Vec<Descriptor> = self.descriptors(home.process, row).copied().collect();
        let named = match file.kind {
            FileKind::Pid(pid) => self.seen_from(home.process, pid)?,
            _ => 0,
        };
        let program = &mut self.programs[home.process];
        let opened = match file.kind {
            FileKind::Pid(pid) => {
                let flags = file.flags & (libc::O_EXCL | libc::O_NONBLOCK) as u32;
                let what = format!("open a handle to {pid} (descriptor {fd})");
                program.call(what, libc::SYS_pidfd_open, [named.into_arg(), flags.into_arg()])
            }
            FileKind::Proc(path) => {
                let path = &self.image.paths.get(path as usize).ok_or_else(|| missing("file", path))?.path;
                let name = program.string(&path.0);
                let what = format!("open {path} (descriptor {fd})");
                let here = value(libc::AT_FDCWD);
                program.call(what, libc::SYS_openat, [here, name, flags.into_arg()])
            }
            FileKind::ControllingTerminal => {
                let name = program.string(b"/dev/tty");
                let here = value(libc::AT_FDCWD);
                let what = format!("open /dev/tty (descriptor {fd})");
                program.call(what, libc::SYS_openat, [here, name, flags.into_arg()])
            }
            _ => return Ok(()),
        };
        if file.position != 0 && file.flags & libc::O_PATH as u32 == 0 {
            let args = [opened.into(), file.position.into(), value(libc::SEEK_SET)];
            program.call(format!("seek descriptor {fd}"), libc::SYS_lseek, args);
        }
        for d in all {
            duplicate(program, opened.into(), d.fd, d.close_on_exec);
        }
        program.call("close", libc::SYS_close, [opened.into()]);
        Ok(())
    }

    /// Adds a watch that has fired and is not armed again (`EPOLLONESHOT`). One that is just added tells of errors and
    /// hang-ups, whatever it asks for; so it is made to fire, before any other can. If nothing can make it, it is left to
    /// tell of a hang-up once.
    fn disarm(&mut self, epoll: Home, watch: &EpollWatch, processes: &mut [&mut dyn Run]) -> Result<()> {
        let any = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLPRI | libc::EPOLLRDHUP) as u32;
        self.watch(epoll, watch, libc::EPOLL_CTL_ADD, watch.events | any)?;
        let program = &mut self.programs[epoll.process];
        let room = program.room(16);
        let args = [epoll.fd.into_arg(), room, 1.into(), 0.into()];
        let what = format!("let a watch of epoll {} fire", epoll.fd);
        let fired = program.attempt(what, libc::SYS_epoll_wait, args);
        let outcome = processes[epoll.process].run(&std::mem::take(program))?;
        if outcome.result(fired) != 1 {
            self.watch(epoll, watch, libc::EPOLL_CTL_MOD, watch.events)?;
        }
        Ok(())
    }

    /// Adds a watch under the number it was added under, which may be closed or belong to another file by now:
    ///
    /// 1. What has the number is put aside.
    /// 2. The watched description gets the number, and the watch is added. It may be one that the process does not hold.
    /// 3. What had the number gets it back, or it is closed. The watch stays, as it holds on to the description and
    ///    not to the number, and the description has another descriptor.
    fn watch(&mut self, epoll: Home, watch: &EpollWatch, operation: i32, events: u32) -> Result<()> {
        let process = epoll.process;
        let now = self.tables[process].descriptors.iter().find(|d| d.fd == watch.fd);
        let in_place = now.is_some_and(|d| d.file == watch.file);
        let number = watch.fd.into_arg();
        let mut aside = None;
        if !in_place {
            let here = self.descriptors(process, watch.file).next().map(|d| d.fd);
            let elsewhere = *self.home.get(&watch.file).ok_or_else(|| missing("open file", watch.file))?;
            let fetched = here.is_none().then(|| self.fetch(process, elsewhere)).transpose()?;
            let program = &mut self.programs[process];
            if now.is_some() {
                let args = [number, value(libc::F_DUPFD_CLOEXEC), 0.into()];
                aside = Some(program.call("put a descriptor aside", libc::SYS_fcntl, args));
            }
            match (here, fetched) {
                (_, Some(fetched)) => {
                    move_to(program, fetched, watch.fd);
                }
                (Some(here), _) => duplicate(program, here.into_arg(), watch.fd, true),
                (None, None) => return Err(missing("open file", watch.file)),
            }
        }
        let program = &mut self.programs[process];
        let event = program.data(&watches::epoll_event(events, watch.data));
        let what = format!("watch descriptor {} with epoll {}", watch.fd, epoll.fd);
        let args = [epoll.fd.into_arg(), value(operation), number, event];
        program.call(what, libc::SYS_epoll_ctl, args);
        match (aside, now) {
            (Some(aside), Some(d)) => {
                duplicate(program, aside.into(), d.fd, d.close_on_exec);
                program.call("close", libc::SYS_close, [aside.into()]);
            }
            _ if !in_place => {
                program.call("close", libc::SYS_close, [number]);
            }
            _ => {}
        }
        Ok(())
    }

    /// Who gets the signals, and with `O_ASYNC`, that there are any.
    fn owner(&mut self, home: Home, file: &OpenFile) -> Result<()> {
        let named = match file.owner {
            Some(owner) if owner.id != 0 => Some(self.owner_bytes(home.process, &owner)?),
            _ => None,
        };
        let (program, fd) = (&mut self.programs[home.process], home.fd);
        if let Some(owner) = file.owner {
            if let Some(bytes) = named {
                let record = program.data(&bytes);
                let what = format!("set the owner of descriptor {fd}");
                let args = [fd.into_arg(), value(descriptors::F_SETOWN_EX), record];
                program.call(what, libc::SYS_fcntl, args);
            }
            let args = [fd.into_arg(), value(descriptors::F_SETSIG), owner.signal.into_arg()];
            program.call(format!("set the signal of descriptor {fd}"), libc::SYS_fcntl, args);
        }
        if file.flags & libc::O_ASYNC as u32 != 0 && file.flags & libc::O_PATH as u32 == 0 {
            let args = [fd.into_arg(), value(libc::F_SETFL), file.flags.into_arg()];
            program.call(format!("set O_ASYNC of descriptor {fd}"), libc::SYS_fcntl, args);
        }
        Ok(())
    }

    fn owner_bytes(&self, process: usize, owner: &FileOwner) -> Result<Vec<u8>> {
        const PROCESS: u32 = 1;
        const GROUP: u32 = 2;
        // A process that was in a group from outside is in ours now.
        let is_own = self.image.processes.iter().any(|p| p.own_group() == Some(owner.id));
        let (kind, id) = match owner.kind {
            GROUP if !is_own => match our_group() {
                Some(group) => (GROUP, group),
                // Our group has no name in this pid namespace: of its members, the program itself is told.
                None => (PROCESS, self.image.processes.first().map_or(0, |p| p.pid)),
            },
            kind => (kind, owner.id),
        };
        let id = self.seen_from(process, id)?;
        Ok([kind.to_ne_bytes(), id.to_ne_bytes()].concat())
    }

    /// Locks of processes, each taken by its own, through its descriptor. Those of descriptions are taken already; whoever took one of all of
    /// the file is told as its owner, and so the process does that once more.
    fn lock(&mut self, row: u32, home: Home, file: &OpenFile) -> Result<()> {
        for lock in file.locks.iter().filter(|l| l.kind == LockKind::Flock) {
            // Who waits for it does not get in between: it is never given up, where that can be.
            let operations = match lock.exclusive {
                true => [libc::LOCK_SH | libc::LOCK_NB, libc::LOCK_EX | libc::LOCK_NB],
                false => [libc::LOCK_UN, libc::LOCK_SH | libc::LOCK_NB],
            };
            for operation in operations {
                let args = [home.fd.into_arg(), value(operation)];
                let what = format!("lock the file of descriptor {}", home.fd);
                self.programs[home.process].call(what, libc::SYS_flock, args);
            }
        }
        for lock in file.locks.iter().filter(|l| l.kind == LockKind::Posix) {
            let of = |pid| self.image.processes.iter().position(|p| p.pid == pid);
            let process = lock.process.and_then(of).unwrap_or(home.process);
            let fd = self.descriptors(process, row).next().map_or(home.fd, |d| d.fd);
            let program = &mut self.programs[process];
            let record = program.data(&locks::range(lock).to_bytes()?);
            let args = [fd.into_arg(), value(libc::F_SETLK), record];
            program.call(format!("lock the file of descriptor {fd}"), libc::SYS_fcntl, args);
        }
        Ok(())
    }

    /// The lease on a file, taken through the first descriptor: that is the one that signals tell of.
    fn lease(&mut self, home: Home, file: &OpenFile) {
        for lock in file.locks.iter().filter(|l| l.kind == LockKind::Lease) {
            let kind = if lock.exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
            let args = [home.fd.into_arg(), value(libc::F_SETLEASE), value(kind)];
            let what = format!("take the lease on the file of descriptor {}", home.fd);
            self.programs[home.process].call(what, libc::SYS_fcntl, args);
        }
    }

    /// A timer goes on for the time that was left, or until the wall-clock time it was set to. Setting it clears
    /// the count of expirations, which therefore comes after.
    fn timer(&mut self, home: Home, timer: &TimerFd) {
        let (program, fd) = (&mut self.programs[home.process], home.fd);
        let absolute = libc::TFD_TIMER_ABSTIME as u32;
        let (flags, time) = match timer.expires_ns {
            Some(time) => (timer.flags, time),
            // A periodic timer that is due is armed, at the shortest time there is.
            None if timer.remaining_ns == 0 && timer.interval_ns > 0 => (timer.flags & !absolute, 1),
            None => (timer.flags & !absolute, timer.remaining_ns),
        };
        // The kernel wants this flag with absolute times only.
        let flags = if flags & absolute == 0 { 0 } else { flags };
        let record = program.data(&watches::itimerspec(time, timer.interval_ns));
        let args = [fd.into_arg(), flags.into_arg(), record, 0.into()];
        program.call(format!("set timer {fd}"), libc::SYS_timerfd_settime, args);
        if timer.ticks > 0 {
            let ticks = program.data(&timer.ticks.to_ne_bytes());
            let args = [fd.into_arg(), watches::TFD_IOC_SET_TICKS.into(), ticks];
            program.call(format!("set the ticks of timer {fd}"), libc::SYS_ioctl, args);
        }
    }
}

fn our_group() -> Option<u32> {
    let stat = Proc::process(std::process::id()).and_then(|p| p.stat()).ok()?;
    (stat.pgrp != 0).then_some(stat.pgrp)
}
