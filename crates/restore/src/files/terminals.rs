//! Pseudo-terminals whose master the program holds.

use super::{Opening, open_flags};
use crate::Result;
use rustix::fs::{Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::Path;
use stillpoint_image::{FileKind, Pty};
use stillpoint_linux::{Error as Kernel, tty};

/// Makes all pseudo-terminals.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    for (index, pty) in opening.image.ptys.iter().enumerate() {
        let index = index as u32;
        let master = master_of(pty)?;
        if tty::number(&master)? != pty.number {
            let now = tty::number(&master)?;
            opening
                .files
                .notes
                .push(format!("/dev/pts/{} is taken: its terminal is /dev/pts/{now} now", pty.number));
        }
        tty::set_locked(&master, false)?;
        let slaves = opening.rows(|f| (f.kind == FileKind::PtySlave(index)).then_some(()));
        // Closing the last slave hangs the master up, so one is opened only where there were some.
        let first = (!slaves.is_empty() || pty.hung_up || pty.controlling)
            .then(|| tty::open_slave(&master, libc::O_RDWR))
            .transpose()?;
        tty::set_settings(&master, &pty.terminal.termios.0)?;
        tty::set_window(&master, pty.terminal.window)?;
        let exclusive = pty.exclusive.unwrap_or(0);
        let mut last = None;
        for (row, file, ()) in slaves {
            let fd = tty::open_slave(&master, open_flags(file.flags))?;
            last = Some(fd.try_clone().map_err(|e| Kernel::call("duplicate a pty", e))?);
            opening.put(row, fd)?;
        }
        // Once all are open.
        if let Some(slave) = last.as_ref().or(first.as_ref()).filter(|_| exclusive & 2 != 0) {
            tty::set_exclusive(slave)?;
        }
        if exclusive & 1 != 0 {
            tty::set_exclusive(&master)?;
        }
        if let Some(first) = first.filter(|_| pty.controlling) {
            opening.files.terminals.insert(index, first);
        }
        tty::set_packet_mode(&master, pty.packet_mode)?;
        tty::set_locked(&master, pty.locked)?;
        for (row, ..) in opening.rows(|f| (f.kind == FileKind::PtyMaster(index)).then_some(())) {
            let fd = master.try_clone().map_err(|e| Kernel::call("duplicate a pty", e))?;
            opening.put(row, fd)?;
        }
    }
    Ok(())
}

/// A new master, with the old number if that is free: numbers are given out from the lowest free one.
fn master_of(pty: &Pty) -> Result<OwnedFd> {
    let first = new_master()?;
    if tty::number(&first)? == pty.number || Path::new(&format!("/dev/pts/{}", pty.number)).exists() {
        return Ok(first);
    }
    let mut passed = vec![first];
    for _ in 0..=pty.number {
        let next = new_master()?;
        let number = tty::number(&next)?;
        if number == pty.number {
            return Ok(next);
        }
        passed.push(next);
        if number > pty.number {
            break;
        }
    }
    Ok(passed.swap_remove(0))
}

fn new_master() -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = rustix::fs::open("/dev/ptmx", flags, Mode::empty());
    Ok(fd.map_err(|e| Kernel::file("/dev/ptmx", e))?)
}
