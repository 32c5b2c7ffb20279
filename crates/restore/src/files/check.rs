//! Whether the files in the file system still are as the program left them.

use crate::{Error, FilesPolicy, Result};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use stillpoint_image::{Bytes, FileKind, Image, PathFile, Usage};
use stillpoint_linux::digest;

/// How a file compares to the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// As it was.
    Unchanged,
    /// Longer by so many bytes; what was there is unchanged.
    Grew(u64),
    /// Longer by so many bytes; whether what was there is unchanged cannot be told.
    GrewUnknown(u64),
    /// Shorter by so many bytes.
    Shrank(u64),
    /// Its contents are others.
    Changed,
    /// Another file has its name.
    Replaced,
    /// Another kind of file has its name.
    OtherKind,
    /// Nothing has its name.
    Gone,
}

/// What the check found: files to be cut back at the end, and what cannot be restored.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Rows of files that only grew.
    pub grown: Vec<u32>,
    /// Rows of files that are gone and will be made anew: their contents are part of the program's memory.
    pub lost: Vec<u32>,
    /// One line for each file that is not as it must be.
    pub refusals: Vec<String>,
}

/// The rows of files that are compared with the checkpoint.
pub(super) fn checked(image: &Image) -> impl Iterator<Item = (u32, &PathFile)> {
    let elsewhere = checked_elsewhere(image);
    let rows = image.paths.iter().enumerate().map(|(row, file)| (row as u32, file));
    rows.filter(move |(row, file)| !file.deleted && !file.made_anew && !elsewhere.contains(row))
}

/// Why a file cannot be the one that the program has, whatever is in it; nothing if it can. It is not opened.
pub(super) fn misplaced(file: &PathFile) -> Option<String> {
    let state = match rustix::fs::lstat(file.path.as_path()) {
        Err(_) => State::Gone,
        Ok(stat) if is_other_kind(file, &stat) => State::OtherKind,
        Ok(_) => return None,
    };
    Some(format!("{}: {}", file.path, sentence(state)))
}

fn is_other_kind(file: &PathFile, stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) != FileType::from_raw_mode(file.mode) || stat.st_rdev != file.rdev
}

/// Compares all files with the checkpoint; changes nothing.
pub(super) fn check(image: &Image, policy: FilesPolicy) -> Result<Findings> {
    let mut findings = Findings::default();
    for (row, file) in checked(image) {
        let state = state(file, image.meta.imported.is_some())?;
        match verdict(file, state, policy) {
            Verdict::Fine => {}
            Verdict::CutBack => findings.grown.push(row),
            Verdict::Remake => findings.lost.push(row),
            Verdict::Refuse => findings.refusals.push(format!("{}: {}", file.path, sentence(state))),
        }
    }
    Ok(findings)
}

/// Lets the checkpoint's own copies stand in for files that are not here as they were: from then on, they are what the image names.
/// `copy_of` tells where there is one. Returns what these files were called.
///
/// # Errors
/// [`Error::Refused`] names each of which the copy is gone or damaged.
pub fn stand_in(image: &mut Image, copy_of: impl Fn(&PathFile) -> Option<PathBuf>) -> Result<Vec<Bytes>> {
    let elsewhere = image.meta.imported.is_some();
    let (mut replaced, mut wrong) = (Vec::new(), Vec::new());
    for file in image.paths.iter_mut().filter(|file| !file.deleted && file.namespace.is_none()) {
        let Some(digest) = &file.copy else { continue };
        let state = state(file, elsewhere)?;
        if matches!(state, State::Unchanged | State::Grew(_)) {
            continue;
        }
        let name = file.path.clone();
        match copy_of(file)
            .ok_or("is not in the store")
            .and_then(|path| own_copy(&path, &digest.0, file.size))
        {
            Ok((path, stat)) => {
                (file.path, file.dev, file.ino) = (path.as_path().into(), stat.st_dev, stat.st_ino);
                (file.mtime_ns, file.ctime_ns) = times(&stat);
                replaced.push(name);
            }
            Err(why) => {
                wrong.push(format!("{name}: {}, and the checkpoint's own copy {why}", sentence(state)))
            }
        }
    }
    if wrong.is_empty() { Ok(replaced) } else { Err(Error::Refused(wrong)) }
}

/// The path and identity of a copy, if it is whole.
fn own_copy(path: &Path, digest: &[u8], size: u64) -> Result<(PathBuf, Stat), &'static str> {
    let open = || {
        let path = path.canonicalize()?;
        let mut file = File::open(&path)?;
        let found = stillpoint_store::content_digest(&mut file, size)?;
        let stat = rustix::fs::fstat(&file)?;
        Ok::<_, std::io::Error>((path, stat, found))
    };
    let (path, stat, found) = open().map_err(|_| "cannot be read")?;
    if stat.st_size as u64 == size && found == digest { Ok((path, stat)) } else { Err("is damaged") }
}

/// Files of procfs, FIFOs and names of sockets have rules of their own.
fn checked_elsewhere(image: &Image) -> HashSet<u32> {
    let proc = image.files.iter().filter_map(|f| match f.kind {
        FileKind::Proc(row) | FileKind::EndedProc(row) => Some(row),
        _ => None,
    });
    let fifos = image.pipes.iter().filter_map(|p| p.fifo);
    proc.chain(fifos)
        .chain(image.sockets.iter().flat_map(|s| s.path.into_iter().chain(s.renamed_from)))
        .collect()
}

enum Verdict {
    Fine,
    CutBack,
    Remake,
    Refuse,
}

fn verdict(file: &PathFile, state: State, policy: FilesPolicy) -> Verdict {
    match (state, file.usage, policy) {
        (State::Unchanged, ..) => Verdict::Fine,
        (State::Gone, Usage::Write, FilesPolicy::Rollback) if file.is_wholly_mapped() => Verdict::Remake,
        (State::Gone | State::OtherKind, ..) => Verdict::Refuse,
        (_, Usage::Path, _) | (_, _, FilesPolicy::Keep) => Verdict::Fine,
        (State::Grew(_) | State::GrewUnknown(_), Usage::Read, _) => Verdict::Fine,
        (State::Grew(_), Usage::Write, FilesPolicy::Rollback) => Verdict::CutBack,
        _ => Verdict::Refuse,
    }
}

fn sentence(state: State) -> String {
    match state {
        State::Unchanged => "is unchanged".into(),
        State::Grew(n) => format!("is {n} bytes longer than at the checkpoint"),
        State::GrewUnknown(n) => {
            format!("is {n} bytes longer than at the checkpoint, and may have changed otherwise")
        }
        State::Shrank(n) => format!("is {n} bytes shorter than at the checkpoint"),
        State::Changed => "its contents changed since the checkpoint".into(),
        State::Replaced => "was replaced by another file since the checkpoint".into(),
        State::OtherKind => "is another kind of file than at the checkpoint".into(),
        State::Gone => "is gone".into(),
    }
}

/// Elsewhere than where the checkpoint was taken, inode numbers tell nothing: there the contents decide.
fn state(file: &PathFile, elsewhere: bool) -> Result<State> {
    let Ok(stat) = rustix::fs::lstat(file.path.as_path()) else { return Ok(State::Gone) };
    if is_other_kind(file, &stat) {
        return Ok(State::OtherKind);
    }
    if file.usage == Usage::Path {
        return Ok(State::Unchanged);
    }
    let size = stat.st_size as u64;
    let same_file = stat.st_ino == file.ino && stat.st_dev == file.dev;
    if same_file && size == file.size && times(&stat) == (file.mtime_ns, file.ctime_ns) {
        return Ok(State::Unchanged);
    }
    if stat.st_ino != file.ino && file.usage == Usage::Write && !elsewhere {
        return Ok(State::Replaced);
    }
    if let Some(by) = file.size.checked_sub(size).filter(|by| *by > 0) {
        return Ok(if same_file { State::Shrank(by) } else { State::Replaced });
    }
    compare_contents(file, &stat)
}

/// The file is at least as long as it was: its beginning decides. A file on a device with another number, or (if it
/// is only read) another file with the same contents, is as good.
fn compare_contents(file: &PathFile, stat: &Stat) -> Result<State> {
    let longer = stat.st_size as u64 - file.size;
    let same_file = stat.st_ino == file.ino && stat.st_dev == file.dev;
    let known = file.digest.as_ref().and_then(|d| Some((&d.blake3.0, prefix_digest(file)?)));
    Ok(match known {
        Some((then, now)) if **then == now => match longer {
            0 => State::Unchanged,
            n => State::Grew(n),
        },
        Some(_) if same_file => State::Changed,
        None if same_file && longer > 0 => State::GrewUnknown(longer),
        None if same_file && times(stat).0 == file.mtime_ns => State::Unchanged,
        None if same_file => State::Changed,
        _ => State::Replaced,
    })
}

fn prefix_digest(file: &PathFile) -> Option<[u8; 32]> {
    let open = open_to_read(file)?;
    digest_of(file, &open)
}

fn open_to_read(file: &PathFile) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::open(file.path.as_path(), flags, Mode::empty()).ok()
}

fn digest_of(file: &PathFile, open: impl AsFd) -> Option<[u8; 32]> {
    let skip: Vec<(u64, u64)> = file.mapped_ranges.iter().map(|r| (r.start, r.len)).collect();
    digest::digest(open, file.size, &skip).ok().map(|d| d.0)
}

fn times(stat: &Stat) -> (i64, i64) {
    let ns = |s: i64, ns: u64| s.saturating_mul(1_000_000_000).saturating_add(ns as i64);
    (ns(stat.st_mtime, stat.st_mtime_nsec), ns(stat.st_ctime, stat.st_ctime_nsec))
}
