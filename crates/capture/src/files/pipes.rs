//! Pipes and FIFOs with the data in them.

use super::descriptions::Description;
use super::noticed::WATCHED;
use super::outsiders::End;
use super::{Scan, paths, pending};
use crate::Result;
use rustix::fs::FileType;
use stillpoint_image::{Bytes, FileKind, Pipe, Usage};
use stillpoint_linux::Error as Kernel;
use stillpoint_linux::descriptors::{poll_now, readable, reopen};
use stillpoint_linux::pipes::{capacity, contents};

/// The descriptions of the target on the same pipe that can read, and those that can write.
fn ends<'a>(scan: &Scan<'a>, d: &Description) -> (Vec<&'a Description>, Vec<&'a Description>) {
    let is_fifo = |e: &&Description| FileType::from_raw_mode(e.stat.st_mode) == FileType::Fifo;
    let same = |e: &&Description| is_fifo(e) && e.inode() == d.inode() && !e.is_path_handle();
    let of = |wanted: fn(&Description) -> bool| scan.all.iter().filter(same).filter(|e| wanted(e)).collect();
    (of(Description::can_read), of(Description::can_write))
}

/// Whether a pipe that is a standard stream leads outside the target.
///
/// Input whose writers are all gone is an ordinary pipe: the program will read its end, also after a restore. Output
/// whose readers are gone still follows whoever restores.
pub(crate) fn is_stream_from_outside(scan: &Scan<'_>, d: &Description) -> Result<bool> {
    let (readers, writers) = ends(scan, d);
    if !readers.is_empty() && !writers.is_empty() {
        // Both ends are here; an outsider at one of them makes it an ordinary pipe that is refused.
        return Ok(false);
    }
    let at_end = writers.is_empty() && poll_now(&d.file, libc::POLLIN)? & libc::POLLHUP != 0;
    if !at_end {
        return Ok(true);
    }
    // What is still in it is somebody else's, too, such as the shell's that began several commands with the same input.
    let has_data =
        readers.first().map_or(Ok(false), |reader| readable(&reader.file).map(|bytes| bytes > 0))?;
    Ok(has_data && scan.target.outsiders.ends(&d.link, d.inode()).iter().any(|end| end.reads))
}

/// Captures one end of a pipe.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    if let Some(&row) = scan.pipes.get(&d.inode()) {
        return Ok(Some(FileKind::Pipe(row)));
    }
    if d.info.flags & libc::O_EXCL as u32 != 0 {
        return scan.refuse(d, "it is a notification pipe (O_NOTIFICATION_PIPE)", "");
    }
    let (readers, writers) = ends(scan, d);
    let outside = match shared(scan, d, &readers, &writers)? {
        Shared::Strangely(why, hint) => return scan.refuse(d, why, hint),
        Shared::With(holder) => Some(holder),
        Shared::Not if is_open_elsewhere(d, &readers, &writers)? => {
            // Or on its way.
            if scan.in_flight.unaccepted {
                let why = "its other end is in a connection that waits to be accepted";
                return scan.refuse(d, why, pending::ACCEPT);
            }
            Some("another process".into())
        }
        Shared::Not => None,
    };
    let named = d.link.starts_with(b"/");
    let fifo = match named {
        false => None,
        true => match paths::path_file(scan.builder, &d.link, &d.file, Usage::Path, &d.name())? {
            None => return Ok(None),
            row => row,
        },
    };
    // Those outside have left, then.
    let have_left = outside.is_some() && writers.is_empty();
    let hung_up = named.then(|| hung_up(scan, &readers, have_left)).transpose()?;
    // To look at what is in it (`tee(2)`), or to open it for that, is an event.
    let has_data =
        || readers.first().map_or(Ok(true), |reader| readable(&reader.file).map(|bytes| bytes > 0));
    if named && has_data()? {
        let views = &scan.builder.views;
        let place = views.reach(views.of_file(&d.file)?, &d.link);
        if scan.builder.noticed.is(&place, d.inode()) {
            return scan.refuse(d, WATCHED.0, WATCHED.1);
        }
    }
    // What nobody but they can read has left the program.
    let is_theirs = outside.is_some() && readers.is_empty();
    let data = if is_theirs { Vec::new() } else { unread(&readers, &writers, named)? };
    let data = data.into_iter().map(Bytes).collect();
    let row = scan.builder.image.pipes.len() as u32;
    // Whoever is at its other end is not to see the program leave.
    if outside.is_some() && scan.builder.kills {
        let own = d.file.try_clone().map_err(|e| Kernel::call("duplicate a pipe", e))?;
        scan.builder.outside.push((row, own));
    }
    let status = (!named).then(|| paths::status(&d.stat));
    let capacity = capacity(&d.file)?;
    scan.builder.image.pipes.push(Pipe { capacity, data, fifo, hung_up, status, outside, ..Pipe::default() });
    scan.pipes.insert(d.inode(), row);
    Ok(Some(FileKind::Pipe(row)))
}

/// Whether a pipe is open outside as well.
enum Shared {
    /// It is not, or that makes no difference to the program.
    Not,
    /// This process has an end that the program does not have.
    With(String),
    /// It is such that a restored program would be the other's no more, and not be told; and what can be done.
    Strangely(String, &'static str),
}

/// Whether a pipe is open outside as well.
///
/// A FIFO is found by its name again, by whoever wants to talk with the program then. Those that have it open now are no part of what the
/// program sees of it as long as each kind of end that is open at all is open in the program, too: its readers have a writer and its writers a
/// reader, or not, whether the others are there or not. What is in it at the moment is another matter: it might be theirs to
/// read, and might still be there when it is put in once more.
fn shared(
    scan: &Scan<'_>,
    d: &Description,
    readers: &[&Description],
    writers: &[&Description],
) -> Result<Shared> {
    let Some(holder) = scan.target.outsiders.holder(&d.link) else { return Ok(Shared::Not) };
    let is_fifo = d.link.starts_with(b"/");
    if is_fifo && !has_name(d) {
        // Nobody can find it, and nothing tells who has which end of it.
        return Ok(Shared::Strangely(format!("it is shared with {holder}"), ELSEWHERE));
    }
    let has_both = !readers.is_empty() && !writers.is_empty();
    if !is_fifo && has_both {
        // Nothing would tell the program that nobody is at the other end.
        return Ok(Shared::Strangely(format!("it is shared with {holder}"), ELSEWHERE));
    }
    let ends = scan.target.outsiders.ends(&d.link, d.inode());
    if is_fifo && ends.is_empty() {
        return Ok(Shared::Not);
    }
    let lacks = |end: &&End| readers.is_empty() && end.reads || writers.is_empty() && end.writes;
    let lacking = ends.iter().find(lacks);
    let another_reader = ends.iter().find(|end| end.reads);
    let data = match readers.first() {
        Some(reader) if is_fifo && lacking.is_none() || another_reader.is_some() => {
            readable(&reader.file)? > 0
        }
        Some(_) => false,
        // Nobody can have read yet what is in it, or it is for others.
        None => {
            is_fifo
                && lacking.is_none()
                && unread(readers, writers, true)?.iter().any(|part| !part.is_empty())
        }
    };
    if data {
        let who = another_reader.or(ends.first()).map_or(holder, |end| &end.holder);
        return Ok(Shared::Strangely(
            format!("it is shared with {who}, and has data in it that either of them may read"),
            "try again when the program has read it, or end the other process",
        ));
    }
    Ok(match lacking {
        Some(end) => Shared::With(end.holder.to_string()),
        None => Shared::Not,
    })
}

/// Which readers of a FIFO are told that its writers have left, as rows of open files. Who opened it when there was no writer is not, as
/// long as none has come. `have_left`: all writers there were are outside.
fn hung_up(scan: &Scan<'_>, readers: &[&Description], have_left: bool) -> Result<Vec<u32>> {
    let mut rows = Vec::new();
    for (index, d) in scan.all.iter().enumerate() {
        let is_reader = readers.iter().any(|reader| std::ptr::eq(*reader, d));
        if is_reader && (have_left || poll_now(&d.file, libc::POLLIN)? & libc::POLLHUP != 0) {
            rows.push(scan.row(index));
        }
    }
    Ok(rows)
}

/// Whether it is a FIFO that others can find by its name.
fn has_name(d: &Description) -> bool {
    d.link.starts_with(b"/") && d.stat.st_nlink > 0
}

const ELSEWHERE: &str = "end or detach the other process, or start the program without the pipe";

/// Whether an end of a pipe is open where we do not see it.
fn is_open_elsewhere(d: &Description, readers: &[&Description], writers: &[&Description]) -> Result<bool> {
    if d.link.starts_with(b"/") {
        // A FIFO without a writer does not tell whether it ever had one: for FIFOs the look around must do.
        return Ok(false);
    }
    // The kernel itself tells whether an end is open somewhere, even where we may not look.
    Ok(match (readers.is_empty(), writers.is_empty()) {
        (false, true) => poll_now(&d.file, libc::POLLIN)? & libc::POLLHUP == 0,
        (true, false) => poll_now(&d.file, libc::POLLOUT)? & libc::POLLERR == 0,
        _ => false,
    })
}

fn unread(readers: &[&Description], writers: &[&Description], named: bool) -> Result<Vec<Vec<u8>>> {
    match (readers.first(), writers.first()) {
        (Some(reader), _) => Ok(contents(&reader.file)?),
        // Nobody reads at the moment, but who opens the FIFO next will find the data.
        (None, Some(writer)) if named => {
            Ok(contents(reopen(&writer.file, libc::O_RDONLY | libc::O_NONBLOCK)?)?)
        }
        _ => Ok(Vec::new()),
    }
}
