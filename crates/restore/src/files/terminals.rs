//! Pseudo-terminals whose master the program holds, and those that were hung up.

use super::{Opening, missing, open_flags};
use crate::{Error, Result};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use std::os::fd::OwnedFd;
use std::path::Path;
use stillpoint_image::{FileKind, Pty, TerminalOwner};
use stillpoint_linux::{Error as Kernel, tty};

/// Makes slaves that were hung up, as those of any master are when it is closed.
fn open_hung_up(opening: &mut Opening<'_>) -> Result<()> {
    let rows = opening.rows(|f| (f.kind == FileKind::HungUp).then_some(()));
    if rows.is_empty() {
        return Ok(());
    }
    let master = new_master(None)?;
    tty::set_locked(&master, false)?;
    for (row, file, ()) in rows {
        let slave = tty::open_slave(&master, open_flags(file.flags))?;
        opening.put(row, slave)?;
    }
    Ok(())
}

/// Makes all pseudo-terminals.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    open_hung_up(opening)?;
    for (index, pty) in opening.image.ptys.iter().enumerate() {
        let index = index as u32;
        let own = pty
            .multiplexer
            .map(|row| opening.image.paths.get(row as usize).ok_or_else(|| missing("file", row)));
        let own = own.transpose()?.map(|file| file.path.as_path().to_owned());
        let master = master_of(pty, own.as_deref())?;
        let now = tty::number(&master)?;
        if now != pty.number {
            let note = format!("/dev/pts/{} is taken: its terminal is /dev/pts/{now} now", pty.number);
            if own.is_some() {
                return Err(Error::Failed(note));
            }
            opening.files.notes.push(note);
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
        if let (Some(slave), Some(owner)) = (last.as_ref().or(first.as_ref()), pty.owner)
            && let Err(e) = give(slave, owner)
        {
            let uid = owner.uid;
            opening.files.notes.push(format!("/dev/pts/{now} is not given to user {uid}, whose it was: {e}"));
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

/// Gives a terminal to whom it belonged.
fn give(slave: &OwnedFd, owner: TerminalOwner) -> Result<(), Kernel> {
    let failed = |e| Kernel::call("change the owner", e);
    let now = rustix::fs::fstat(slave).map_err(failed)?;
    if (now.st_uid, now.st_gid) != (owner.uid, owner.gid) {
        let (user, group) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
        rustix::fs::fchown(slave, Some(user), Some(group)).map_err(failed)?;
    }
    rustix::fs::fchmod(slave, Mode::from_raw_mode(owner.mode)).map_err(failed)
}

/// A new master, with the old number if that is free: numbers are given out from the lowest free one. `own`: what is opened to
/// make it in a devpts of the program's own, where nobody else makes any.
fn master_of(pty: &Pty, own: Option<&Path>) -> Result<OwnedFd> {
    let first = new_master(own)?;
    let is_taken = own.is_none() && Path::new(&format!("/dev/pts/{}", pty.number)).exists();
    if tty::number(&first)? == pty.number || is_taken {
        return Ok(first);
    }
    let mut passed = vec![first];
    for _ in 0..=pty.number {
        let next = new_master(own)?;
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

fn new_master(own: Option<&Path>) -> Result<OwnedFd> {
    let path = own.unwrap_or(Path::new("/dev/ptmx"));
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty());
    Ok(fd.map_err(|e| Kernel::file(path, e))?)
}
