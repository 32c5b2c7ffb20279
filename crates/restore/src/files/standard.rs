//! Standard streams from outside: they become those of whoever restores.

use super::{Opening, pipes};
use crate::{Result, Stdio};
use rustix::fs::{FileType, OFlags};
use std::os::fd::{BorrowedFd, OwnedFd};
use stillpoint_image::{FileKind, Image, OpenFile, Process, Pty};
use stillpoint_linux::{Error as Kernel, descriptors, pipes as kernel_pipes, tty};

/// Opens the rows that are standard streams or the controlling terminal.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    let input = unread_input(opening)?;
    let mut is_silent = false;
    let rows = opening.rows(|f| match f.kind {
        FileKind::Stdio(n) => Some(n),
        _ => None,
    });
    for (row, file, number) in rows {
        let reads = file.flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32;
        let fd = match (&input, number, opening.stdio) {
            (Some(input), 0, _) if reads => descriptors::reopen(input, libc::O_RDONLY)?,
            (_, _, Stdio::Null) => null(file.flags)?,
            (_, n @ 0..=2, Stdio::Current) => current(n, file.flags)?,
            (_, n, Stdio::Current) => match descriptors::inherited(n) {
                Some(fd) => fd,
                None => {
                    let note = format!(
                        "descriptor {n} led outside and is /dev/null now: restore was started without one"
                    );
                    opening.files.notes.push(note);
                    null(file.flags)?
                }
            },
        };
        let writes = file.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        is_silent |= opening.stdio == Stdio::Null && writes && number != 0;
        // Not `put`: the status flags were seen to, as far as they are not somebody else's.
        opening.files.sources[row] = Some(fd);
    }
    if is_silent {
        let note = "what it writes to standard streams from outside goes to /dev/null (restore it without --detach to see it)";
        opening.files.notes.push(note.into());
    }
    open_controlling_terminal(opening)
}

/// Unread standard input goes first: a pipe of our own, into which the supervisor writes what comes next.
fn unread_input(opening: &mut Opening<'_>) -> Result<Option<OwnedFd>> {
    let Some(pipe) = opening.image.pipes.iter().find(|p| p.stdio == Some(0) && !p.data.is_empty()) else {
        return Ok(None);
    };
    let (read, write) = kernel_pipes::pipe(0)?;
    let held: usize = pipe.data.iter().map(|d| d.0.len()).sum();
    let capacity = pipe.capacity.max((held as u64).next_multiple_of(4096) + 4096);
    if kernel_pipes::capacity(&write)? < capacity {
        kernel_pipes::set_capacity(&write, capacity)?;
    }
    pipes::fill(&write, pipe, false)?;
    if opening.stdio == Stdio::Current {
        opening.files.stdin_pump = Some(write);
    }
    Ok(Some(read))
}

/// Whether the terminal of whoever restores has another size than the one that the program was on.
pub(crate) fn window_differs(image: &Image, stdio: Stdio) -> bool {
    let (Some(before), Stdio::Current) = (&image.terminal, stdio) else { return false };
    let streams = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let now = streams.iter().find_map(|stream| tty::window(stream).ok());
    now.is_some_and(|now| now != before.window)
}

fn null(flags: u32) -> Result<OwnedFd> {
    let flags =
        OFlags::from_bits_retain(flags & (libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_APPEND) as u32);
    let fd = rustix::fs::open("/dev/null", flags | OFlags::CLOEXEC, rustix::fs::Mode::empty());
    Ok(fd.map_err(|e| Kernel::file("/dev/null", e))?)
}

/// Our own standard stream of this number, or `/dev/null` if we have none.
///
/// Whether it blocks is a property of the description, which we share with whoever started us: where it must change,
/// a terminal or pipe is opened once more, so that only the program sees it.
fn current(number: u32, flags: u32) -> Result<OwnedFd> {
    let own = match number {
        0 => rustix::stdio::stdin(),
        1 => rustix::stdio::stdout(),
        _ => rustix::stdio::stderr(),
    };
    let Ok(now) = rustix::fs::fcntl_getfl(own) else { return null(flags) };
    if (now.bits() ^ flags) & libc::O_NONBLOCK as u32 == 0 {
        return Ok(descriptors::duplicate_above(own, 3)?);
    }
    if let Some(fd) = opened_again(own, now, flags) {
        return Ok(fd);
    }
    let fd = descriptors::duplicate_above(own, 3)?;
    super::set_status_flags(&fd, now.bits() & !(libc::O_NONBLOCK as u32) | flags & libc::O_NONBLOCK as u32)?;
    Ok(fd)
}

fn opened_again(own: BorrowedFd<'_>, now: OFlags, flags: u32) -> Option<OwnedFd> {
    let stat = rustix::fs::fstat(own).ok()?;
    if !matches!(FileType::from_raw_mode(stat.st_mode), FileType::CharacterDevice | FileType::Fifo) {
        return None;
    }
    let access = now.bits() as i32 & libc::O_ACCMODE;
    // Opening a pipe could wait for its other end; without waiting, it may fail, and then there is another way.
    let fd = descriptors::reopen(own, access | libc::O_NOCTTY | libc::O_NONBLOCK).ok()?;
    super::set_status_flags(&fd, flags & !(libc::O_APPEND as u32)).ok()?;
    Some(fd)
}

/// `/dev/tty` is ours, but for whoever has a pseudo-terminal of the program's own as controlling terminal.
fn open_controlling_terminal(opening: &mut Opening<'_>) -> Result<()> {
    for (row, file, ()) in opening.rows(is_controlling) {
        if opener(opening.image, row as u32).is_some() {
            continue;
        }
        let flags = super::open_flags(file.flags);
        let tty = (opening.stdio == Stdio::Current).then(|| open_tty(flags)).flatten();
        let fd = match tty {
            Some(fd) => fd,
            None => {
                opening.files.notes.push("its terminal is /dev/null now".into());
                null(file.flags)?
            }
        };
        opening.put(row, fd)?;
    }
    Ok(())
}

/// The first process with an open file, its controlling terminal, in whose session that is a pseudo-terminal of the program itself.
pub(super) fn opener(image: &Image, row: u32) -> Option<usize> {
    let has_it = |process: &Process| {
        let table = image.tables.get(process.table as usize);
        table.is_some_and(|table| table.descriptors.iter().any(|d| d.file == row))
    };
    let is_of = |controls: &Option<Vec<u32>>| controls.as_ref().is_none_or(|rows| rows.contains(&row));
    let is_inside = |process: &Process| {
        // One that tells no session is of the root's.
        let session = |pty: &Pty| pty.session.or(image.processes.first().map(|root| root.pid));
        let mut own =
            image.ptys.iter().filter(|pty| pty.controlling && session(pty) == process.own_session());
        own.any(|pty| is_of(&pty.controls))
    };
    image.processes.iter().position(|process| is_inside(process) && has_it(process))
}

/// Whether an open file is the controlling terminal.
fn is_controlling(file: &OpenFile) -> Option<()> {
    (file.kind == FileKind::ControllingTerminal).then_some(())
}

fn open_tty(flags: i32) -> Option<OwnedFd> {
    let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC;
    rustix::fs::open("/dev/tty", flags, rustix::fs::Mode::empty()).ok()
}
