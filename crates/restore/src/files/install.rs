//! Bringing the open files into the new process.

use super::moves::{self, Step, Wanted};
use super::{OpenFiles, locks, missing, standard};
use crate::Result;
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use stillpoint_image::{
    Descriptor, EpollWatch, FileKind, FileOwner, FileTable, Image, LockKind, OpenFile, TimerFd,
};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::{descriptors, tty, watches};

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
    /// others, those that mappings were made from among them; memfds are sealed. Descriptions that are made later
    /// ([`OpenFiles::finish`]) are `/dev/null` until then.
    ///
    /// The limit on descriptor numbers must still be ours, not the program's.
    pub fn install(&self, image: &Image, table: u32, process: &mut dyn Run) -> Result<()> {
        self.seal(image)?;
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

    /// Makes what belongs to the process itself, once its threads stand and after [`OpenFiles::install`]: files
    /// about itself, epoll watches, owners of signals, POSIX locks, timers (last: their time runs from here).
    pub fn finish(&self, image: &Image, table: u32, process: &mut dyn Run) -> Result<()> {
        let table = table_of(image, table)?;
        let mut work = Finish { image, table, home: HashMap::new(), program: Program::new() };
        for d in &table.descriptors {
            work.home.entry(d.file).or_insert(d.fd);
        }
        let rows: Vec<(u32, u32, &OpenFile)> = work.rows()?;
        for &(_, fd, file) in &rows {
            work.control_terminal(fd, file); // before anybody opens /dev/tty
        }
        for &(row, fd, file) in &rows {
            work.open_late(row, fd, file)?;
        }
        let watches = |disarmed: bool| {
            rows.iter().flat_map(move |&(_, fd, file)| {
                let list = if let FileKind::Epoll(list) = &file.kind { list.as_slice() } else { &[] };
                list.iter().filter(move |w| is_disarmed(w) == disarmed).map(move |w| (fd, w))
            })
        };
        for (fd, watch) in watches(true) {
            work.disarm(fd, watch, process)?;
        }
        for (fd, watch) in watches(false) {
            work.watch(fd, watch, libc::EPOLL_CTL_ADD, watch.events)?;
        }
        for &(_, fd, file) in &rows {
            work.owner(fd, file);
            work.lock(fd, file)?;
        }
        for &(_, fd, file) in &rows {
            if let FileKind::Timer(timer) = &file.kind {
                work.timer(fd, timer);
            }
        }
        process.run(&work.program)?;
        Ok(())
    }
}

fn add_step(program: &mut Program, step: Step) {
    match step {
        Step::Duplicate { from, to, close_on_exec } => {
            duplicate(program, from.into_arg(), to, close_on_exec);
        }
        Step::Mark { number, close_on_exec } => {
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

/// Whether a watch for one event has fired: the kernel then leaves nothing of its mask but how it is to tell.
fn is_disarmed(watch: &EpollWatch) -> bool {
    const HOW: u32 = (libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;
    watch.events & libc::EPOLLONESHOT as u32 != 0 && watch.events & !HOW == 0
}

/// The work of [`OpenFiles::finish`] in progress.
struct Finish<'a> {
    image: &'a Image,
    table: &'a FileTable,
    /// A descriptor of each open file.
    home: HashMap<u32, u32>,
    program: Program,
}

impl<'a> Finish<'a> {
    /// Open files of the table with one of their descriptors, in the order of these.
    fn rows(&self) -> Result<Vec<(u32, u32, &'a OpenFile)>> {
        let mut rows = Vec::with_capacity(self.home.len());
        for (&row, &fd) in &self.home {
            let file = self.image.files.get(row as usize).ok_or_else(|| missing("open file", row))?;
            rows.push((row, fd, file));
        }
        rows.sort_unstable_by_key(|r| r.1);
        Ok(rows)
    }

    /// A slave that was the controlling terminal becomes so again; the process leads its session by now.
    fn control_terminal(&mut self, fd: u32, file: &OpenFile) {
        let FileKind::PtySlave(index) = file.kind else { return };
        if !self.image.ptys.get(index as usize).is_some_and(|p| p.controlling) {
            return;
        }
        let args = [fd.into_arg(), tty::TIOCSCTTY.into(), 0.into()];
        self.program.attempt("take the controlling terminal", libc::SYS_ioctl, args);
        if let Some(process) = self.image.processes.first().filter(|p| p.foreground && p.leads_group) {
            let group = self.program.data(&process.pid.to_ne_bytes());
            let args = [fd.into_arg(), libc::TIOCSPGRP.into(), group];
            self.program.attempt("take the foreground of the terminal", libc::SYS_ioctl, args);
        }
    }

    /// Opens what can only be opened in the process itself, and puts it in the place kept for it. That place is
    /// taken, so the number the kernel gives is never the one it is to get.
    fn open_late(&mut self, row: u32, fd: u32, file: &OpenFile) -> Result<()> {
        let flags = super::open_flags(file.flags) as u32;
        let opened = match file.kind {
            FileKind::Pid(pid) => {
                let flags = file.flags & (libc::O_EXCL | libc::O_NONBLOCK) as u32;
                let what = format!("open a handle to {pid} (descriptor {fd})");
                self.program.call(what, libc::SYS_pidfd_open, [pid.into_arg(), flags.into_arg()])
            }
            FileKind::Proc(path) => {
                let path = &self.image.paths.get(path as usize).ok_or_else(|| missing("file", path))?.path;
                let name = self.program.string(&path.0);
                let what = format!("open {path} (descriptor {fd})");
                let here = value(libc::AT_FDCWD);
                self.program.call(what, libc::SYS_openat, [here, name, flags.into_arg()])
            }
            FileKind::ControllingTerminal if standard::is_inside(self.image) => {
                let name = self.program.string(b"/dev/tty");
                let here = value(libc::AT_FDCWD);
                let what = format!("open /dev/tty (descriptor {fd})");
                self.program.call(what, libc::SYS_openat, [here, name, flags.into_arg()])
            }
            _ => return Ok(()),
        };
        if file.position != 0 && file.flags & libc::O_PATH as u32 == 0 {
            let args = [opened.into(), file.position.into(), value(libc::SEEK_SET)];
            self.program.call(format!("seek descriptor {fd}"), libc::SYS_lseek, args);
        }
        for d in self.table.descriptors.iter().filter(|d| d.file == row) {
            duplicate(&mut self.program, opened.into(), d.fd, d.close_on_exec);
        }
        self.program.call("close", libc::SYS_close, [opened.into()]);
        Ok(())
    }

    /// Adds a watch that has fired and is not armed again (`EPOLLONESHOT`). One that is just added tells of errors and
    /// hang-ups, whatever it asks for; so it is made to fire, before any other can. If nothing can make it, it is left to
    /// tell of a hang-up once.
    fn disarm(&mut self, epoll: u32, watch: &EpollWatch, process: &mut dyn Run) -> Result<()> {
        let any = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLPRI | libc::EPOLLRDHUP) as u32;
        self.watch(epoll, watch, libc::EPOLL_CTL_ADD, watch.events | any)?;
        let room = self.program.room(16);
        let args = [epoll.into_arg(), room, 1.into(), 0.into()];
        let fired =
            self.program.attempt(format!("let a watch of epoll {epoll} fire"), libc::SYS_epoll_wait, args);
        let outcome = process.run(&std::mem::take(&mut self.program))?;
        if outcome.result(fired) != 1 {
            self.watch(epoll, watch, libc::EPOLL_CTL_MOD, watch.events)?;
        }
        Ok(())
    }

    /// Adds a watch under the number it was added under, which may be closed or belong to another file by now:
    ///
    /// 1. What has the number is put aside.
    /// 2. The watched description gets the number, and the watch is added.
    /// 3. What had the number gets it back, or it is closed. The watch stays, as it holds on to the description and
    ///    not to the number, and the description has another descriptor.
    fn watch(&mut self, epoll: u32, watch: &EpollWatch, operation: i32, events: u32) -> Result<()> {
        let now = self.table.descriptors.iter().find(|d| d.fd == watch.fd);
        let in_place = now.is_some_and(|d| d.file == watch.file);
        let home = *self.home.get(&watch.file).ok_or_else(|| missing("open file", watch.file))?;
        let number = watch.fd.into_arg();
        let mut aside = None;
        if !in_place {
            if now.is_some() {
                let args = [number, value(libc::F_DUPFD_CLOEXEC), 0.into()];
                aside = Some(self.program.call("put a descriptor aside", libc::SYS_fcntl, args));
            }
            duplicate(&mut self.program, home.into_arg(), watch.fd, true);
        }
        let event = self.program.data(&watches::epoll_event(events, watch.data));
        let what = format!("watch descriptor {} with epoll {epoll}", watch.fd);
        let args = [epoll.into_arg(), value(operation), number, event];
        self.program.call(what, libc::SYS_epoll_ctl, args);
        match (aside, now) {
            (Some(aside), Some(d)) => {
                duplicate(&mut self.program, aside.into(), d.fd, d.close_on_exec);
                self.program.call("close", libc::SYS_close, [aside.into()]);
            }
            _ if !in_place => {
                self.program.call("close", libc::SYS_close, [number]);
            }
            _ => {}
        }
        Ok(())
    }

    /// Who gets the signals, and with `O_ASYNC`, that there are any.
    fn owner(&mut self, fd: u32, file: &OpenFile) {
        if let Some(owner) = file.owner {
            if owner.id != 0 {
                let record = self.program.data(&owner_bytes(self.image, &owner));
                let what = format!("set the owner of descriptor {fd}");
                let args = [fd.into_arg(), value(descriptors::F_SETOWN_EX), record];
                self.program.call(what, libc::SYS_fcntl, args);
            }
            let args = [fd.into_arg(), value(descriptors::F_SETSIG), owner.signal.into_arg()];
            self.program.call(format!("set the signal of descriptor {fd}"), libc::SYS_fcntl, args);
        }
        if file.flags & libc::O_ASYNC as u32 != 0 && file.flags & libc::O_PATH as u32 == 0 {
            let args = [fd.into_arg(), value(libc::F_SETFL), file.flags.into_arg()];
            self.program.call(format!("set O_ASYNC of descriptor {fd}"), libc::SYS_fcntl, args);
        }
    }

    fn lock(&mut self, fd: u32, file: &OpenFile) -> Result<()> {
        for lock in file.locks.iter().filter(|l| l.kind == LockKind::Posix) {
            let record = self.program.data(&locks::range(lock).to_bytes()?);
            let args = [fd.into_arg(), value(libc::F_SETLK), record];
            self.program.call(format!("lock the file of descriptor {fd}"), libc::SYS_fcntl, args);
        }
        Ok(())
    }

    /// A timer goes on for the time that was left, or until the wall-clock time it was set to. Setting it clears
    /// the count of expirations, which therefore comes after.
    fn timer(&mut self, fd: u32, timer: &TimerFd) {
        let absolute = libc::TFD_TIMER_ABSTIME as u32;
        let (flags, time) = match timer.expires_ns {
            Some(time) => (timer.flags, time),
            // A periodic timer that is due is armed, at the shortest time there is.
            None if timer.remaining_ns == 0 && timer.interval_ns > 0 => (timer.flags & !absolute, 1),
            None => (timer.flags & !absolute, timer.remaining_ns),
        };
        // The kernel wants this flag with absolute times only.
        let flags = if flags & absolute == 0 { 0 } else { flags };
        let record = self.program.data(&watches::itimerspec(time, timer.interval_ns));
        let args = [fd.into_arg(), flags.into_arg(), record, 0.into()];
        self.program.call(format!("set timer {fd}"), libc::SYS_timerfd_settime, args);
        if timer.ticks > 0 {
            let ticks = self.program.data(&timer.ticks.to_ne_bytes());
            let args = [fd.into_arg(), watches::TFD_IOC_SET_TICKS.into(), ticks];
            self.program.call(format!("set the ticks of timer {fd}"), libc::SYS_ioctl, args);
        }
    }
}

fn owner_bytes(image: &Image, owner: &FileOwner) -> Vec<u8> {
    const PROCESS: u32 = 1;
    const GROUP: u32 = 2;
    // A process that did not lead its group is in ours now.
    let leads = image.processes.first().is_some_and(|p| p.leads_group);
    let (kind, id) = match owner.kind {
        GROUP if !leads => match our_group() {
            Some(group) => (GROUP, group),
            // Our group has no name in this pid namespace: of its members, the program itself is told.
            None => (PROCESS, image.processes.first().map_or(0, |p| p.pid)),
        },
        kind => (kind, owner.id),
    };
    [kind.to_ne_bytes(), id.to_ne_bytes()].concat()
}

fn our_group() -> Option<u32> {
    let stat = Proc::process(std::process::id()).and_then(|p| p.stat()).ok()?;
    (stat.pgrp != 0).then_some(stat.pgrp)
}
