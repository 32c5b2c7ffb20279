//! What led outside is opened: standard streams are those of whoever restores, others lead where [`super::streams`] tells.

use super::streams::{self, Led, Outward, Way};
use super::{Opening, pipes};
use crate::{Pump, Result, Stdio, To};
use rustix::fs::{FileType, OFlags};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use stillpoint_image::{Bytes, FileKind, Image, OpenFile, Process, Pty};
use stillpoint_linux::{Error as Kernel, descriptors, pipes as kernel_pipes, tty};

/// Opens the rows that led outside, and the controlling terminal.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    let (image, streams) = (opening.image, opening.streams);
    let (mut inputs, mut files) = (HashMap::<Outward, OwnedFd>::new(), HashMap::<Outward, OwnedFd>::new());
    let (mut is_silent, mut is_ended) = (false, false);
    let rows = opening.rows(|f| {
        let outward = Outward::of(image, f)?;
        Some((outward, outward.way(image, streams).filter(|way| !matches!(way, Way::Left | Way::Kept))?))
    });
    let watched = streams::watched(image);
    for (row, file, (outward, way)) in rows {
        let is_watched = watched.contains(&(row as u32));
        let fd = match (inputs.get(&outward).filter(|_| reads(file)), files.get(&outward)) {
            (Some(input), _) => reopened(input, file)?,
            (_, Some(same)) if reads(file) => same.try_clone().map_err(|e| Kernel::call("dup", e))?,
            _ => match streams::open(opening, outward, &way, file.flags, is_watched)? {
                Led::Directly(fd) => {
                    // Who opened the pipe once more read on where others were, which of a file is so of one description.
                    if matches!(way, Way::To(To::File(_))) && reads(file) {
                        files.insert(outward, fd.try_clone().map_err(|e| Kernel::call("dup", e))?);
                    }
                    fd
                }
                Led::Through(first, from) => {
                    let input = feed(opening, outward, first, from)?;
                    let fd = reopened(&input, file)?;
                    inputs.insert(outward, input);
                    fd
                }
            },
        };
        let writes = file.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        let is_null = opening.stdio == Stdio::Null && matches!(way, Way::Ours(number) if number != 0);
        is_silent |= is_null && writes;
        is_ended |= is_null && !writes && !matches!(way, Way::Ours(1 | 2));
        // Not `put`: the status flags were seen to, as far as they are not somebody else's.
        opening.files.sources[row] = Some(fd);
    }
    if is_silent {
        let note = "what it writes to standard streams from outside goes to /dev/null (restore it without --detach to see it, or \
                    connect them: --fd 1=PATH)";
        opening.files.notes.push(note.into());
    }
    if is_ended {
        let note = "what it reads from streams from outside other than standard input has come to its end (restore it without --detach \
                    to go on, or connect them: --fd 6=PATH)";
        opening.files.notes.push(note.into());
    }
    open_controlling_terminal(opening)
}

fn reads(file: &OpenFile) -> bool {
    file.flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
}

/// A description of its own of a pipe that the program reads.
fn reopened(input: &OwnedFd, file: &OpenFile) -> Result<OwnedFd> {
    Ok(descriptors::reopen(input, libc::O_RDONLY | file.flags as i32 & libc::O_NONBLOCK)?)
}

/// A pipe of our own with what was not yet read, behind which somebody has to bring what comes next, if anything does.
fn feed(
    opening: &mut Opening<'_>,
    outward: Outward,
    first: Vec<Bytes>,
    from: Option<OwnedFd>,
) -> Result<OwnedFd> {
    let (read, to) = kernel_pipes::pipe(0)?;
    let unread = outward.unread(opening.image);
    let room = kernel_pipes::room(first.iter().map(|part| part.0.len()));
    let capacity = unread.iter().map(|pipe| pipe.capacity).fold(room, u64::max);
    if let Err(e) = kernel_pipes::enlarge(&to, capacity)
        && kernel_pipes::capacity(&to)? < room
    {
        return Err(e.into());
    }
    pipes::fill(&to, &first)?;
    if let Some(from) = from {
        opening.files.pumps.push(Pump { number: outward.number(opening.image), from, to });
    }
    Ok(read)
}

/// Whether the terminal of whoever restores has another size than the one that the program was on.
pub(crate) fn window_differs(image: &Image, stdio: Stdio) -> bool {
    let (Some(before), Stdio::Current) = (&image.terminal, stdio) else { return false };
    let streams = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let now = streams.iter().find_map(|stream| tty::window(stream).ok());
    now.is_some_and(|now| now != before.window)
}

pub(super) fn null(flags: u32) -> Result<OwnedFd> {
    let flags =
        OFlags::from_bits_retain(flags & (libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_APPEND) as u32);
    let fd = rustix::fs::open("/dev/null", flags | OFlags::CLOEXEC, rustix::fs::Mode::empty());
    Ok(fd.map_err(|e| Kernel::file("/dev/null", e))?)
}

/// The descriptor of this number that we were started with, or `/dev/null` if there is none.
///
/// Whether it blocks is a property of the description, which we share with whoever started us: where it must change,
/// a terminal or pipe is opened once more, so that only the program sees it.
pub(super) fn current(number: u32, flags: u32) -> Result<OwnedFd> {
    let Some(own) = descriptors::inherited(number) else { return null(flags) };
    let Ok(now) = rustix::fs::fcntl_getfl(&own) else { return null(flags) };
    if (now.bits() ^ flags) & libc::O_NONBLOCK as u32 == 0 {
        return Ok(own);
    }
    if let Some(fd) = opened_again(own.as_fd(), now, flags) {
        return Ok(fd);
    }
    super::set_status_flags(&own, now.bits() & !(libc::O_NONBLOCK as u32) | flags & libc::O_NONBLOCK as u32)?;
    Ok(own)
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
