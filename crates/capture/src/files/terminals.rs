//! Character devices: memory devices, terminals, pseudo-terminals.

use super::descriptions::Description;
use super::{Scan, paths};
use crate::Result;
use rustix::fs::{FileType, major, minor};
use std::os::fd::AsFd;
use stillpoint_image::{Bytes, FileKind, Pty, Terminal, Usage};
use stillpoint_linux::descriptors::{poll_now, readable};
use stillpoint_linux::proc::Stat;
use stillpoint_linux::tty;

/// Device number of memory devices.
const MEMORY: u32 = 1;
/// `null`, `zero`, `full`, `random`, `urandom`.
const MEMORY_DEVICES: [u32; 5] = [3, 5, 7, 8, 9];

/// Captures a character device that is not a standard stream.
pub(crate) fn device(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    let (major, minor) = (major(d.stat.st_rdev), minor(d.stat.st_rdev));
    if major == MEMORY && MEMORY_DEVICES.contains(&minor) {
        let row = paths::path_file(scan.builder, &d.link, &d.file, Usage::Path, &d.name())?;
        return Ok(row.map(FileKind::Path));
    }
    if (major, minor) == (5, 0) {
        return controlling(scan, d);
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
        && ((136..=143).contains(&major(d.stat.st_rdev)) || tty::window(&d.file).is_ok())
}

fn is_master(d: &Description) -> bool {
    (major(d.stat.st_rdev), minor(d.stat.st_rdev)) == (5, 2)
}

/// Number of the pseudo-terminal a description belongs to.
fn number(d: &Description) -> Option<u32> {
    match major(d.stat.st_rdev) {
        5 => tty::number(&d.file).ok(),
        m @ 136..=143 => Some((m - 136) * 256 + minor(d.stat.st_rdev)),
        _ => None,
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
    !is_master(slave) && number(slave).is_some_and(|n| masters(scan).any(|m| number(m) == Some(n)))
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
    let master = masters(scan).find(|m| number(m) == number(d));
    let Some(master) = master else {
        return scan.refuse(d, "its master is outside the program", "");
    };
    Ok(pty(scan, master)?.map(FileKind::PtySlave))
}

/// Row of a pseudo-terminal, from its master.
fn pty(scan: &mut Scan<'_>, master: &Description) -> Result<Option<u32>> {
    let number = tty::number(&master.file)?;
    if let Some(&row) = scan.ptys.get(&number) {
        return Ok(Some(row));
    }
    let slave = format!("/dev/pts/{number}");
    if let Some(holder) = scan.target.outsiders.holder(slave.as_bytes()) {
        let why = format!("its slave {slave} is open in {holder}");
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
    let slave =
        scan.all.iter().find(|d| is_terminal(d) && !d.is_path_handle() && self::number(d) == Some(number));
    let is_exclusive = |d: Option<&Description>| d.map_or(Ok(false), |d| tty::exclusive(&d.file));
    let exclusive = u32::from(is_exclusive(Some(master))?) | u32::from(is_exclusive(slave)?) << 1;
    let row = scan.builder.image.ptys.len() as u32;
    let device = rustix::fs::makedev(136 + number / 256, number % 256);
    let (session, foreground) = session_on(scan, device)?;
    scan.builder.image.ptys.push(Pty {
        number,
        terminal: settings(&master.file)?,
        locked: tty::locked(&master.file)?,
        packet_mode: tty::packet_mode(&master.file)?,
        hung_up: poll_now(&master.file, libc::POLLIN)? & libc::POLLHUP != 0,
        controlling: scan.controls(device),
        session,
        foreground,
        exclusive: Some(exclusive).filter(|&sides| sides != 0),
    });
    scan.ptys.insert(number, row);
    Ok(Some(row))
}

/// The session of which a terminal is the controlling one, and the process group in its foreground, if they are the target's.
fn session_on(scan: &Scan<'_>, device: u64) -> Result<(Option<u32>, Option<u32>)> {
    let on = scan.stats().iter().position(|(stat, _)| u64::from(stat.tty) == device);
    let Some(process) = on else { return Ok((None, None)) };
    let (stat, status) = (&scan.stats()[process].0, scan.target.holders[process].process.status()?);
    let session = scan.builder.home.id(&status.ns_sid, stat.session);
    let in_front = |(s, _): &&(Stat, u32)| i64::from(s.pgrp) == i64::from(stat.tpgid);
    let foreground = scan.stats().iter().find(in_front).map(|(_, group)| *group);
    Ok((Some(session).filter(|s| *s != 0), foreground.filter(|g| *g != 0)))
}
