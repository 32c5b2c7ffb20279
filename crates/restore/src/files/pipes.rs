//! Pipes and FIFOs with the data in them.

use super::streams::{GONE, Outward, Way};
use super::{Opening, missing, open_flags, paths};
use crate::{Error, Result};
use rustix::fs::{FileType, Mode};
use std::collections::HashSet;
use std::os::fd::AsFd;
use stillpoint_image::{Bytes, FileKind, OpenFile, PathFile, Pipe};
use stillpoint_linux::{Error as Kernel, descriptors, pipes};

/// Makes all pipes that are not standard streams.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    for (index, pipe) in opening.image.pipes.iter().enumerate() {
        if pipe.stdio.is_some() {
            continue;
        }
        let of_pipe = |f: &OpenFile| match f.kind {
            FileKind::Pipe(p) if p as usize == index => Some(()),
            _ => None,
        };
        let rows: Vec<(usize, &OpenFile)> =
            opening.rows(of_pipe).into_iter().map(|(row, f, ())| (row, f)).collect();
        if leads_elsewhere(opening, index as u32) {
            opening.files.elsewhere.insert(index as u32);
            if is_kept(opening, index as u32) {
                open_kept(opening, index as u32, &rows)?;
            }
            continue;
        }
        match pipe.fifo {
            Some(path) => open_fifo(opening, pipe, path, &rows)?,
            None => open_pipe(opening, pipe, &rows)?,
        }
    }
    let cut_off = opening.image.pipes_cut_off().filter(|(row, _)| !leads_elsewhere(opening, *row));
    let notes: Vec<String> = cut_off.map(|(_, told)| format!("{told} is cut off")).collect();
    opening.files.notes.extend(notes);
    Ok(())
}

/// Whether it is no pipe that is made for the program.
fn leads_elsewhere(opening: &Opening<'_>, row: u32) -> bool {
    let way = Outward::Pipe(row).way(opening.image, opening.streams);
    is_kept(opening, row) || opening.image.pipes[row as usize].is_cut_off() && way != Some(Way::Left)
}

/// Whether it is a pipe that was kept, or a FIFO that was.
fn is_kept(opening: &Opening<'_>, row: u32) -> bool {
    let pipe = &opening.image.pipes[row as usize];
    match pipe.is_cut_off() {
        true => Outward::Pipe(row).way(opening.image, opening.streams) == Some(Way::Kept),
        false => opening.files.kept.as_ref().is_some_and(|kept| kept.pipes.contains_key(&row)),
    }
}

/// The very same pipe goes on, with what is in it.
fn open_kept(opening: &mut Opening<'_>, index: u32, rows: &[(usize, &OpenFile)]) -> Result<()> {
    let kept = opening.files.kept.as_mut().and_then(|kept| kept.pipes.remove(&index));
    let kept = kept.ok_or_else(|| Error::Refused(vec![GONE.into()]))?;
    // It was kept by the first of its descriptions.
    for (row, file) in rows.iter().skip(1) {
        opening.put(*row, descriptors::reopen(&kept, pipe_flags(file.flags))?)?;
    }
    rows.first().map_or(Ok(()), |(row, _)| opening.put(*row, kept))
}

fn open_pipe(opening: &mut Opening<'_>, pipe: &Pipe, rows: &[(usize, &OpenFile)]) -> Result<()> {
    let (read, write) = pipes::pipe(0)?;
    resize(opening, &write, pipe)?;
    fill(&write, &pipe.data)?;
    let another = read.try_clone().map_err(|e| Kernel::call("duplicate a pipe", e))?;
    let (mut read, mut write) = (Some(read), Some(write));
    for (row, file) in rows {
        let own = match file.flags as i32 & libc::O_ACCMODE {
            libc::O_RDONLY => read.take(),
            libc::O_WRONLY => write.take(),
            _ => None,
        };
        // A second description of the same end was made by opening the first one again. Opening does not wait.
        let fd = match own {
            Some(fd) => fd,
            None => descriptors::reopen(&another, pipe_flags(file.flags))?,
        };
        opening.put(*row, fd)?;
    }
    Ok(())
}

/// Flags to open a pipe with: whether it is in packets or waits is set afterwards.
fn pipe_flags(flags: u32) -> i32 {
    (open_flags(flags) & !libc::O_DIRECT) | libc::O_NONBLOCK
}

/// A reader that never saw a writer polls differently from one whose writers have left. So one that is not to know of any is opened when
/// nobody can write any more: then what it compares with the writers that came is what it finds.
fn open_fifo(opening: &mut Opening<'_>, pipe: &Pipe, path: u32, rows: &[(usize, &OpenFile)]) -> Result<()> {
    let file = opening.image.paths.get(path as usize).ok_or_else(|| missing("file", path))?;
    if !file.deleted {
        make_fifo(opening, file)?;
    }
    let has_writer = rows.iter().any(|(_, f)| f.flags as i32 & libc::O_ACCMODE != libc::O_RDONLY);
    let hung_up: Option<HashSet<u32>> = pipe.hung_up.as_ref().map(|rows| rows.iter().copied().collect());
    let saw_writer = |row: usize| match &hung_up {
        _ if has_writer => true,
        Some(rows) => rows.contains(&(row as u32)),
        None => !pipe.data.is_empty(),
    };
    // What is in it stays there while ends come and go.
    let held = paths::open_row(opening, path, (libc::O_RDONLY | libc::O_NONBLOCK) as u32)?;
    if pipe.outside.is_some() && !pipe.data.is_empty() && descriptors::readable(&held)? > 0 {
        let name = &opening.image.paths[path as usize].path;
        let why =
            "somebody still has it open, and what is in it is not what was: end who that is, or read it";
        return Err(Error::Refused(vec![format!("{name}: {why}")]));
    }
    resize(opening, &held, pipe)?;
    let (first, last): (Vec<_>, Vec<_>) = rows.iter().partition(|(row, _)| saw_writer(*row));
    if !first.is_empty() || !pipe.data.is_empty() {
        let both = paths::open_row(opening, path, (libc::O_RDWR | libc::O_NONBLOCK) as u32)?;
        open_ends(opening, path, &first)?;
        fill(&both, &pipe.data)?;
    }
    open_ends(opening, path, &last)
}

fn open_ends(opening: &mut Opening<'_>, path: u32, rows: &[&(usize, &OpenFile)]) -> Result<()> {
    for (row, file) in rows {
        let fd = paths::open_row(opening, path, pipe_flags(file.flags) as u32)?;
        opening.put(*row, fd)?;
    }
    Ok(())
}

/// A FIFO that is gone is made anew; another kind of file in its place is in the way.
fn make_fifo(opening: &mut Opening<'_>, file: &PathFile) -> Result<()> {
    let name = file.path.as_path();
    match rustix::fs::lstat(name) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Fifo => Ok(()),
        Ok(_) => Err(Error::Refused(vec![format!("{}: is not a FIFO any more", file.path)])),
        Err(_) => {
            let mode = Mode::from_raw_mode(file.mode & 0o7777);
            rustix::fs::mknodat(rustix::fs::CWD, name, FileType::Fifo, mode, 0)
                .map_err(|e| Kernel::file(name, e))?;
            opening.files.created.note(name);
            rustix::fs::chmod(name, mode).map_err(|e| Kernel::file(name, e))?;
            Ok(())
        }
    }
}

fn resize(opening: &mut Opening<'_>, end: impl AsFd, pipe: &Pipe) -> Result<()> {
    if pipe.capacity == 0 || pipes::capacity(&end)? == pipe.capacity {
        return Ok(());
    }
    if let Err(e) = pipes::set_capacity(&end, pipe.capacity) {
        let held: usize = pipe.data.iter().map(|d| d.0.len()).sum();
        if held as u64 > pipes::capacity(&end)? {
            return Err(e.into());
        }
        opening.files.notes.push(format!("a pipe keeps its default capacity: {e}"));
    }
    Ok(())
}

/// Puts unread data back; `write` can write.
pub(super) fn fill(write: impl AsFd, data: &[Bytes]) -> Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    // Whoever fills it does not wait, and sets packet mode for each part.
    let end = descriptors::reopen(&write, libc::O_WRONLY | libc::O_NONBLOCK)?;
    Ok(pipes::fill(&end, data)?)
}
