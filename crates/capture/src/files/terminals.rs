//! Character devices: memory devices, terminals, pseudo-terminals.
//!
//! In each devpts terminals are numbered anew, and they have the same device numbers. So a terminal is told by its number only
//! together with its devpts, where that is one of the program's own ([`home`]).

use super::descriptions::Description;
use super::{Scan, devices, paths};
use crate::Result;
use rustix::fs::{FileType, major, minor};
use std::collections::HashSet;
use std::os::fd::AsFd;
use stillpoint_image::{Bytes, FileKind, PathFile, Pty, Terminal, TerminalOwner, Usage, is_memory_device};
use stillpoint_linux::descriptors::{poll_now, readable};
use stillpoint_linux::proc::Stat;
use stillpoint_linux::tty;

/// Device number of memory devices.
const MEMORY: u32 = 1;

/// Captures a character device that is not a standard stream.
pub(crate) fn device(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    let (major, minor) = (major(d.stat.st_rdev), minor(d.stat.st_rdev));
    if is_memory_device(d.stat.st_rdev) {
        let row = paths::path_file(scan.builder, &d.link, &d.file, Usage::Path, &d.name())?;
        return Ok(row.map(FileKind::Path));
    }
    if let Some(device) = devices::known(d) {
        return devices::capture(scan, d, device);
    }
    if tty::discipline(&d.file).is_ok_and(|number| number != 0) {
        let why = "it is a terminal with another line discipline (TIOCSETD), whose state cannot be captured";
        return scan.refuse(d, why, "close it before the checkpoint");
    }
    if (major, minor) == (5, 0) {
        return controlling(scan, d);
    }
    if is_hung_up(d) {
        return Ok(Some(FileKind::HungUp));
    }
    if is_master(d) {
        return master(scan, d);
    }
    if !is_terminal(d) {
        let why = format!("it is the device {major}:{minor}, whose state cannot be captured");
        return scan.refuse(d, why, "close it before the checkpoint");
    }
    if has_master(scan, d) {
        return slave(scan, d);
    }
    if scan.controls(d.stat.st_rdev) {
        return controlling(scan, d);
    }
    let why = "it is a terminal that is neither a standard stream nor the controlling terminal";
    scan.refuse(d, why, "close it before the checkpoint")
}

/// `/dev/tty`, or the controlling terminal by its own name.
fn controlling(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    // The terminal may be gone while the descriptor is not: then there are no settings to keep.
    if scan.builder.image.terminal.is_none()
        && let Ok(settings) = settings(&d.file)
    {
        scan.builder.image.terminal = Some(settings);
    }
    Ok(Some(FileKind::ControllingTerminal))
}

/// Notes which descriptors of controlling terminals are of pseudo-terminals of the program's: who is in the session of one opens
/// them again. One of a terminal that is gone may be anybody's.
pub(crate) fn resolve(scan: &mut Scan<'_>) -> Result<()> {
    // In another devpts a terminal of the same number is another one: what it controls tells which.
    let of_master = |m: &Description| {
        let number = number(m)?;
        let row = scan.ptys.get(&(home(scan, m), number)).copied()?;
        Some((number, row, tty::session(&m.file).ok().flatten()))
    };
    let own: Vec<(u32, u32, Option<u32>)> = masters(scan).filter_map(of_master).collect();
    for (index, d) in scan.all.iter().enumerate() {
        let row = scan.base + index as u32;
        if scan.builder.image.files[row as usize].kind != FileKind::ControllingTerminal {
            continue;
        }
        let Some(number) = tty::device(&d.file).ok().and_then(tty::slave_number) else { continue };
        if !own.iter().any(|(of, ..)| *of == number) {
            continue;
        }
        let holders = d.held.iter().filter_map(|held| scan.stats().get(held.process));
        let on_it = holders.filter(|(stat, _)| tty::slave_number(u64::from(stat.tty)) == Some(number));
        let sessions: Vec<u32> = on_it.map(|(stat, _)| stat.session).collect();
        let is_its =
            |of: u32, session: Option<u32>| of == number && session.is_some_and(|s| sessions.contains(&s));
        match own.iter().find(|(of, _, session)| is_its(*of, *session)) {
            Some(&(_, pty, _)) => {
                let pty = &mut scan.builder.image.ptys[pty as usize];
                pty.controls.get_or_insert_default().push(row);
            }
            // One from outside that has the same number.
            None if !scan.builder.terminals.is_empty() && !sessions.is_empty() => {}
            None => {
                let why = "it is the terminal of another session than those of whoever has it";
                scan.refuse::<()>(d, why, "close it before the checkpoint")?;
            }
        }
    }
    Ok(())
}

/// Settings of a terminal.
pub(crate) fn settings(file: impl AsFd) -> Result<Terminal> {
    Ok(Terminal { termios: Bytes(tty::settings(&file)?), window: tty::window(&file)? })
}

/// Whether a description is a terminal other than a pty master.
pub(crate) fn is_terminal(d: &Description) -> bool {
    FileType::from_raw_mode(d.stat.st_mode) == FileType::CharacterDevice
        && major(d.stat.st_rdev) != MEMORY
        && !is_master(d)
        && (5, 0) != (major(d.stat.st_rdev), minor(d.stat.st_rdev))
        && (tty::slave_number(d.stat.st_rdev).is_some() || tty::window(&d.file).is_ok())
}

/// Whether a slave leads to no terminal any more: its master is closed, or its session has ended.
pub(crate) fn is_hung_up(d: &Description) -> bool {
    let is_gone = |e: stillpoint_linux::Error| e.errno() == Some(libc::EIO);
    tty::slave_number(d.stat.st_rdev).is_some() && tty::settings(&d.file).err().is_some_and(is_gone)
}

fn is_master(d: &Description) -> bool {
    (major(d.stat.st_rdev), minor(d.stat.st_rdev)) == (5, 2)
}

/// The file system that tells a terminal from those of the same number: the devpts that its slave is in.
pub(crate) fn system(d: &Description) -> u64 {
    if tty::slave_number(d.stat.st_rdev).is_some() { d.stat.st_dev } else { 0 }
}

/// The devpts of the program's own that a master or a slave belongs to, by device number; 0 if it is none of these.
fn home(scan: &Scan<'_>, d: &Description) -> u64 {
    let own = &scan.builder.terminals;
    if own.is_empty() || own.contains_key(&d.stat.st_dev) || !is_master(d) {
        return if own.contains_key(&d.stat.st_dev) { d.stat.st_dev } else { 0 };
    }
    // A multiplexer elsewhere leads to what is mounted beside it on `pts` (`devpts_ptmx_path` of the kernel).
    let beside = || {
        let views = &scan.builder.views;
        let path = views.reach(views.of_file(&d.file).ok()?, &d.link);
        Some(rustix::fs::stat(path.parent()?.join("pts")).ok()?.st_dev)
    };
    beside().filter(|device| own.contains_key(device)).unwrap_or(0)
}

/// Sessions that terminals in a devpts of the program's own control.
pub(crate) fn own_sessions(scan: &Scan<'_>) -> Vec<u32> {
    if scan.builder.terminals.is_empty() {
        return Vec::new();
    }
    let own = masters(scan).filter(|m| home(scan, m) != 0);
    own.filter_map(|m| tty::session(&m.file).ok().flatten()).collect()
}

/// Refuses terminals in a devpts of the program's own whose masters are elsewhere.
pub(crate) fn refuse_strange(scan: &mut Scan<'_>) {
    if !scan.builder.refusals.is_empty() {
        return; // one of them may be of such a terminal
    }
    let all = scan.builder.terminals.iter().flat_map(|(home, all)| all.iter().map(|n| (*home, *n)));
    let strange: Vec<_> = all.filter(|pty| !scan.ptys.contains_key(pty)).collect();
    for (_, number) in strange {
        let what = format!("terminal {number} in a devpts of the program's own");
        scan.builder.refuse(
            what,
            "its master is outside the program",
            "end who holds it before the checkpoint",
        );
    }
}

/// Refuses handles to terminals of the program, and watches on them: what has a name goes when its master does, and there is none to begin
/// from when the terminal is made anew.
pub(crate) fn refuse_named(scan: &mut Scan<'_>) {
    let image = &scan.builder.image;
    let own: HashSet<u32> = image.ptys.iter().map(|pty| pty.number).collect();
    let is_own = |file: &&PathFile| {
        FileType::from_raw_mode(file.mode) == FileType::CharacterDevice
            && tty::slave_number(file.rdev).is_some_and(|number| own.contains(&number))
    };
    let named: Vec<String> = image.paths.iter().filter(is_own).map(|file| file.path.to_string()).collect();
    for path in named {
        let what = "the program has a handle to a terminal of its own (O_PATH), or watches it (inotify)";
        scan.builder.refuse(path, what, "");
    }
}

/// Number of the pseudo-terminal a description belongs to.
fn number(d: &Description) -> Option<u32> {
    match major(d.stat.st_rdev) {
        5 => tty::number(&d.file).ok(),
        _ => tty::slave_number(d.stat.st_rdev),
    }
}

fn masters<'a>(scan: &Scan<'a>) -> impl Iterator<Item = &'a Description> {
    let is_device = |d: &&Description| {
        FileType::from_raw_mode(d.stat.st_mode) == FileType::CharacterDevice && !d.is_path_handle()
    };
    scan.all.iter().filter(is_device).filter(|d| is_master(d))
}

/// Whether the master of a slave is inside the target.
pub(crate) fn has_master(scan: &Scan<'_>, slave: &Description) -> bool {
    !is_master(slave) && master_of(scan, slave).is_some()
}

fn master_of<'a>(scan: &Scan<'a>, slave: &Description) -> Option<&'a Description> {
    let number = number(slave)?;
    masters(scan).find(|m| self::number(m) == Some(number) && home(scan, m) == home(scan, slave))
}

fn master(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    Ok(pty(scan, d)?.map(FileKind::PtyMaster))
}

fn slave(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    if readable(&d.file)? > 0 {
        return scan.refuse(
            d,
            "it has input that was not yet read",
            "try again when the program has read it",
        );
    }
    let Some(master) = master_of(scan, d) else {
        return scan.refuse(d, "its master is outside the program", "");
    };
    Ok(pty(scan, master)?.map(FileKind::PtySlave))
}

/// The devpts that the slave of a master is in, by device number. A handle to its place does not open it.
fn slaves_system(master: impl AsFd) -> Option<u64> {
    let place = tty::open_slave(master, libc::O_PATH).ok()?;
    Some(rustix::fs::fstat(place).ok()?.st_dev)
}

/// Row of a pseudo-terminal, from its master.
fn pty(scan: &mut Scan<'_>, master: &Description) -> Result<Option<u32>> {
    let (home, number) = (home(scan, master), tty::number(&master.file)?);
    if let Some(&row) = scan.ptys.get(&(home, number)) {
        return Ok(Some(row));
    }
    let device = tty::slave_device(number);
    if let Some(holder) = scan.target.outsiders.terminal(slaves_system(&master.file), device) {
        let why = format!("its slave /dev/pts/{number} is open in {holder}");
        return scan.refuse(master, why, "end that process before the checkpoint");
    }
    if readable(&master.file)? > 0 {
        let why = "it has output of its slave that was not yet read";
        return scan.refuse(master, why, "try again when the program has read it");
    }
    if poll_now(&master.file, libc::POLLPRI)? & libc::POLLPRI != 0 {
        let why = "a change of its state was not yet read (packet mode)";
        return scan.refuse(master, why, "try again when the program has read it");
    }
    let is_slave = |d: &&Description| {
        is_terminal(d)
            && !d.is_path_handle()
            && self::number(d) == Some(number)
            && self::home(scan, d) == home
    };
    let slave = scan.all.iter().find(is_slave);
    let is_exclusive = |d: Option<&Description>| d.map_or(Ok(false), |d| tty::exclusive(&d.file));
    let exclusive = u32::from(is_exclusive(Some(master))?) | u32::from(is_exclusive(slave)?) << 1;
    let row = scan.builder.image.ptys.len() as u32;
    let on = on(scan, master, device)?;
    let (session, foreground) = session_on(scan, on)?;
    let multiplexer = (home != 0).then(|| multiplexer(scan, master)).transpose()?;
    scan.builder.image.ptys.push(Pty {
        number,
        terminal: settings(&master.file)?,
        locked: tty::locked(&master.file)?,
        packet_mode: tty::packet_mode(&master.file)?,
        hung_up: poll_now(&master.file, libc::POLLIN)? & libc::POLLHUP != 0,
        controlling: on.is_some(),
        session,
        foreground,
        exclusive: Some(exclusive).filter(|&sides| sides != 0),
        multiplexer,
        controls: Some(Vec::new()),
        owner: slave.map(|d| TerminalOwner {
            uid: d.stat.st_uid,
            gid: d.stat.st_gid,
            mode: d.stat.st_mode & 0o7777,
        }),
    });
    scan.ptys.insert((home, number), row);
    Ok(Some(row))
}

/// Row of the file that was opened to make a pseudo-terminal.
fn multiplexer(scan: &mut Scan<'_>, master: &Description) -> Result<u32> {
    let namespace = scan.builder.views.of_file(&master.file)?;
    let file = paths::describe(&master.link, &master.stat, Usage::Path);
    Ok(scan.builder.path(PathFile { namespace, made_anew: true, ..file }).0)
}

/// A process of the target whose controlling terminal it is, by its place among the holders.
fn on(scan: &Scan<'_>, master: &Description, device: u64) -> Result<Option<usize>> {
    let is_on = |stat: &Stat| u64::from(stat.tty) == device;
    if scan.builder.terminals.is_empty() {
        return Ok(scan.stats().iter().position(|(stat, _)| is_on(stat)));
    }
    let session = tty::session(&master.file)?;
    Ok(scan.stats().iter().position(|(stat, _)| is_on(stat) && Some(stat.session) == session))
}

/// The session of which a terminal is the controlling one, and the process group in its foreground, if they are the target's;
/// `on`: one of its processes there.
fn session_on(scan: &Scan<'_>, on: Option<usize>) -> Result<(Option<u32>, Option<u32>)> {
    let Some(process) = on else { return Ok((None, None)) };
    let (stat, status) = (&scan.stats()[process].0, scan.target.holders[process].process.status()?);
    let session = scan.builder.home.id(&status.ns_sid, stat.session);
    let in_front = |(s, _): &&(Stat, u32)| i64::from(s.pgrp) == i64::from(stat.tpgid);
    let foreground = scan.stats().iter().find(in_front).map(|(_, group)| *group);
    Ok((Some(session).filter(|s| *s != 0), foreground.filter(|g| *g != 0)))
}
