//! Mounting overlays as the program had mounted them.
//!
//! Options name directories by paths of whoever mounted them, which lead nowhere by now, or elsewhere: the root was another one, or the
//! current directory. So there is a stage, a file system in memory on which each directory is where its name says, and they are mounted by
//! somebody who has that for a root. What the program is told of its mounts is then what it was.

use crate::mounts::{Making, Within, apart};
use crate::{Error, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Timespec, Timestamps};
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_image::{FileSystem, Layer, Mounted, OVERLAY, Role, named_by};
use stillpoint_linux::messenger::{self, Messenger};
use stillpoint_linux::mounts::{self, handle};
use stillpoint_linux::overlay::{self, FileId};
use stillpoint_linux::proc::NamespaceKind;
use stillpoint_linux::program::Program;
use stillpoint_linux::{Error as Kernel, Result as KernelResult};

/// So long is waited for the kernel to take away the overlay of a program that has just ended.
const PATIENCE: Duration = Duration::from_secs(2);

/// Mounts one in the mount namespace that this thread is in, a copy of ours; it is nowhere yet. `views`: file systems of the namespace.
pub(crate) fn make(
    system: &FileSystem,
    views: &mut [Option<OwnedFd>],
    within: Option<Within<'_>>,
) -> Result<OwnedFd> {
    let home = handle(CWD, Path::new("/"))?;
    for layer in &system.layers {
        check(layer)?;
    }
    let floor = mounts::make("tmpfs", b"", &[])?;
    mounts::place(&floor, &home)?;
    let mut stage =
        Stage { floor, views, is_owned: within.is_some(), taken: free(system), on_it: HashMap::new() };
    let made = stage.set(system).and_then(|()| stage.mount(system, within));
    mounts::take_away_from(&stage.floor)?;
    rustix::process::fchdir(&home).map_err(|e| Kernel::call("go back", e))?;
    let made = made?;
    // If it cannot be seen that this one writes there, it could not be seen of others before.
    for layer in own(system) {
        if let Mounted::Around(path) = &layer.at
            && !overlay::is_in_use(&handle(CWD, path.as_path())?)?
        {
            return Err(Error::Refused(vec![format!(
                "{path}: this kernel does not tell whether an overlay writes to it"
            )]));
        }
    }
    Ok(made)
}

/// What of an overlay is made anew with the namespace, and so is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anew {
    Nothing,
    /// What has been written: its upper directory is in memory. A file is in that as soon as somebody has opened it for writing.
    Written,
    Everything,
}

/// What of one is made anew.
pub(crate) fn anew(systems: &[FileSystem], row: u32) -> Anew {
    let is_in_memory = |layer: &Layer| match layer.at {
        Mounted::System { row, .. } => systems.get(row as usize).is_some_and(|on| on.kind != OVERLAY),
        _ => false,
    };
    match systems.get(row as usize) {
        Some(_) if is_anew(systems, row) => Anew::Everything,
        Some(system) if own(system).any(is_in_memory) => Anew::Written,
        _ => Anew::Nothing,
    }
}

/// Whether all that one lies over is made anew with the namespace.
fn is_anew(systems: &[FileSystem], row: u32) -> bool {
    let Some(system) = systems.get(row as usize) else { return false };
    system.layers.iter().all(|layer| match layer.at {
        Mounted::System { row: of, .. } => {
            of < row && is_anew(systems, of) || systems[of as usize].kind != OVERLAY
        }
        _ => false,
    })
}

/// The directories that only one overlay can have.
fn own(system: &FileSystem) -> impl Iterator<Item = &Layer> {
    system.layers.iter().filter(|layer| layer.role != Role::Lower)
}

/// Whether a directory around the namespace is the one that it was, and nobody else writes to it.
fn check(layer: &Layer) -> Result<()> {
    let Mounted::Around(path) = &layer.at else { return Ok(()) };
    let refused = |why: &str| Err(Error::Refused(vec![format!("{path}: {why}")]));
    let found = match handle(CWD, path.as_path()) {
        Ok(found) => found,
        Err(e) => return refused(&format!("an overlay of the program's lay over it, and it is gone: {e}")),
    };
    if FileId::of(&found)?.told() != layer.id.0 {
        return refused("an overlay of the program's lay over it, and it is another directory by now");
    }
    if layer.role == Role::Work && !overlay::is_for_work(&found)? {
        return refused("an overlay of the program's prepared files in it, and others are there by now");
    }
    let begun = Instant::now();
    while layer.role != Role::Lower && overlay::is_in_use(&found)? {
        if begun.elapsed() > PATIENCE {
            return refused(
                "an overlay that is mounted writes to it, perhaps that of the program, which is still there",
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// What names of ours on the stage begin with, so that none is that of a directory.
fn free(system: &FileSystem) -> String {
    let is_taken = |name: &String| {
        let begins =
            |layer: &Layer| named_by(&layer.name.0).to_string_lossy().starts_with(&format!("/{name}"));
        system.layers.iter().any(begins)
    };
    (0..).map(|n| format!(".stillpoint-{n}-")).find(|name| !is_taken(name)).unwrap_or_default()
}

/// A file system in memory with directories where their names say.
struct Stage<'a> {
    floor: OwnedFd,
    views: &'a mut [Option<OwnedFd>],
    is_owned: bool,
    /// What our names begin with.
    taken: String,
    /// What is on it under our names: by path around the namespace, or file system of it.
    on_it: HashMap<(Option<u32>, PathBuf), (String, OwnedFd)>,
}

impl Stage<'_> {
    fn set(&mut self, system: &FileSystem) -> Result<()> {
        let around = own(system).filter_map(|layer| match &layer.at {
            Mounted::Around(path) => Some(path.as_path()),
            _ => None,
        });
        // Both have to be on one mount.
        let common = around.map(Path::to_owned).reduce(|a, b| shared(&a, &b));
        for layer in &system.layers {
            let (key, rest) = match &layer.at {
                Mounted::System { row, root } => {
                    ((Some(*row), PathBuf::new()), relative(root.as_path(), Path::new("/")))
                }
                Mounted::Around(path) => {
                    let from =
                        common.as_deref().filter(|_| layer.role != Role::Lower).unwrap_or(path.as_path());
                    ((None, from.to_owned()), relative(path.as_path(), from))
                }
                Mounted::Kept => return Err(Error::Failed("a directory of an overlay is nowhere".into())),
            };
            if !self.on_it.contains_key(&key) {
                let placed = self.place(&key.0, &key.1)?;
                self.on_it.insert(key.clone(), placed);
            }
            let (name, mount) = &self.on_it[&key];
            let found = beneath(mount, &rest)?;
            if !layer.id.0.is_empty() && FileId::of(&found)?.told() != layer.id.0 {
                return Err(Error::Failed(format!(
                    "{} is not on one mount with what belongs to it",
                    layer.name
                )));
            }
            self.link(layer, &Path::new("/").join(name).join(rest))?;
        }
        Ok(())
    }

    /// Puts a mount on the stage: of a directory around the namespace, or of a file system of it.
    fn place(&mut self, row: &Option<u32>, from: &Path) -> Result<(String, OwnedFd)> {
        let name = format!("{}{}", self.taken, self.on_it.len());
        self.folder(Path::new(&name))?;
        let on = handle(&self.floor, Path::new(&name))?;
        let mount = match row {
            Some(row) => {
                let view = self.views.get_mut(*row as usize).and_then(Option::take);
                view.ok_or_else(|| {
                    Error::Failed("an overlay lies over a file system that is not there".into())
                })?
            }
            None if self.is_owned => mounts::copy_all(handle(CWD, from)?)?,
            None => apart(&handle(CWD, from)?)?,
        };
        mounts::place(&mount, &on)?;
        if let Some(row) = row {
            self.views[*row as usize] = Some(apart(&mount)?);
        }
        Ok((name, mount))
    }

    /// Makes a directory that everybody can go through, if it is not there.
    fn folder(&self, path: &Path) -> Result<()> {
        let mode = Mode::RWXU | Mode::XGRP | Mode::XOTH;
        match rustix::fs::mkdirat(&self.floor, path, mode) {
            Err(rustix::io::Errno::EXIST) => return Ok(()),
            // Whatever our umask is.
            made => made.and_then(|()| rustix::fs::chmodat(&self.floor, path, mode, AtFlags::empty())),
        }
        .map_err(|e| Kernel::file(path, e).into())
    }

    /// Lets the name of a directory lead to it.
    fn link(&self, layer: &Layer, to: &Path) -> Result<()> {
        let path = named_by(&layer.name.0);
        let path = path.strip_prefix("/").unwrap_or(&path);
        let Some(folder) = path.parent() else { return Ok(()) }; // the root, which cannot be a link
        let mut on_the_way = PathBuf::new();
        for part in folder {
            on_the_way.push(part);
            self.folder(&on_the_way)?;
        }
        let failed = |e| Kernel::file(path, e);
        rustix::fs::symlinkat(to, &self.floor, path).map_err(failed)?;
        Ok(())
    }

    fn mount(&self, system: &FileSystem, within: Option<Within<'_>>) -> Result<OwnedFd> {
        let mut program = Program::new();
        if let Some(within) = within {
            messenger::become_user(&mut program, within.root.0.into(), within.root.1.into());
            messenger::enter(&mut program, NamespaceKind::User, within.file);
        }
        take_for_root(&mut program, &self.floor);
        let making = Making::begin(&mut program, system);
        let root = self.root(system);
        for (name, value) in overlay::settings(&system.settings.0) {
            if matches!(&name[..], b"rw" | b"seclabel") {
                continue;
            }
            let on = root.filter(|_| name.starts_with(b"lowerdir"));
            if let Some(root) = on {
                take_for_root(&mut program, root);
            }
            making.set(&mut program, &name, value.as_deref());
            if on.is_some() {
                take_for_root(&mut program, &self.floor);
            }
        }
        let mount = making.end(&mut program);
        Ok(Messenger::send(&program)?.file(mount)?)
    }

    /// The directory that is read under the name of the root.
    fn root(&self, system: &FileSystem) -> Option<&OwnedFd> {
        let layer = system.layers.iter().find(|layer| named_by(&layer.name.0) == Path::new("/"))?;
        let (row, path) = match &layer.at {
            Mounted::System { row, root } if root.0 == b"/" => (Some(*row), PathBuf::new()),
            Mounted::Around(path) => (None, path.as_path().to_owned()),
            _ => return None,
        };
        self.on_it.get(&(row, path)).map(|(_, mount)| mount)
    }
}

/// An overlay over several file systems gives its directories inode numbers of its own, in ascending order, as somebody first comes to
/// them; its root has one of the first. Those of one file system have the numbers that they have there.
const FIRST: u64 = 8;
/// So many numbers are passed over at most.
const PASSED_OVER: u64 = 20_000;

/// Lets directories of an overlay have the inode numbers that they had, as far as it gives them out itself: a program that knows some of
/// them tells them apart by these. (`fts(3)` of `find` takes a directory with the number of one around it for a loop, and aborts.)
/// Those that were nobody's are given to a directory that is made and removed. One that was moved into a later one gets a number that
/// was nobody's. What is not written to cannot pass any over, and begins anew. `view`: a mount of the overlay to which nobody has come yet;
/// `held`: paths in it, and numbers.
pub(crate) fn number(view: &OwnedFd, mut held: Vec<(PathBuf, u64)>) {
    held.retain(|(path, _)| !path.as_os_str().is_empty());
    let numbers: HashMap<PathBuf, u64> = held.iter().cloned().collect();
    held.sort_by_key(|(path, _)| {
        (path.ancestors().filter_map(|part| numbers.get(part)).max().copied(), path.components().count())
    });
    let stat = |path: &Path| rustix::fs::statat(view, path, AtFlags::SYMLINK_NOFOLLOW);
    let Ok(root) = stat(Path::new(".")) else { return };
    let Some(mut passed) = held.first().filter(|_| root.st_ino < FIRST).and_then(|_| pass_over(view)) else {
        return;
    };
    let (mut known, mut left) = (HashSet::new(), PASSED_OVER);
    for (path, ino) in &held {
        // Who comes to it comes to those around it first.
        let mut way: Vec<&Path> = path.ancestors().filter(|part| !part.as_os_str().is_empty()).collect();
        way.retain(|part| !known.contains(*part));
        // What cannot be reached is not begun.
        let is_near = *ino <= passed + way.len() as u64 + left;
        while is_near && passed + (way.len() as u64) < *ino && left > 0 {
            let Some(next) = pass_over(view).filter(|next| *next == passed + 1) else { break };
            (passed, left) = (next, left - 1);
        }
        for part in way.into_iter().rev() {
            passed = stat(part).map_or(passed, |found| found.st_ino.max(passed));
            known.insert(part);
        }
    }
    let time = |sec, nsec| Timespec { tv_sec: sec, tv_nsec: nsec as _ };
    let times = Timestamps {
        last_access: time(root.st_atime, root.st_atime_nsec),
        last_modification: time(root.st_mtime, root.st_mtime_nsec),
    };
    // Who may make a directory there may not always do this.
    let _ = rustix::fs::utimensat(view, ".", &times, AtFlags::empty());
}

/// Lets a number of an overlay be that of a directory which is no more; none if nobody may make one.
fn pass_over(view: &OwnedFd) -> Option<u64> {
    let (name, made) = (0..).find_map(|n| {
        let name = format!(".stillpoint-{n}");
        match rustix::fs::mkdirat(view, &name, Mode::RWXU) {
            Err(rustix::io::Errno::EXIST) => None,
            made => Some((name, made)),
        }
    })?;
    made.ok()?;
    let number = rustix::fs::statat(view, &name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| stat.st_ino);
    rustix::fs::unlinkat(view, &name, AtFlags::REMOVEDIR).ok()?;
    number.ok()
}

/// Adds the calls by which whoever runs them has another root, and is there.
fn take_for_root(program: &mut Program, root: &OwnedFd) {
    program.call("go to a stage", libc::SYS_fchdir, [(root.as_raw_fd() as u64).into()]);
    let here = program.string(b".");
    program.call("have a stage for a root", libc::SYS_chroot, [here]);
}

/// What leads from a directory to one in it.
fn relative(path: &Path, from: &Path) -> PathBuf {
    path.strip_prefix(from).unwrap_or(path).to_owned()
}

/// The directory in which both are.
fn shared(one: &Path, other: &Path) -> PathBuf {
    let both = one.components().zip(other.components()).take_while(|(a, b)| a == b);
    both.map(|(part, _)| part).collect()
}

/// A directory on a mount, to which no link leads.
fn beneath(mount: impl AsFd, path: &Path) -> KernelResult<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(mount, path, flags, Mode::empty(), resolve).map_err(|e| Kernel::file(path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_in_one() {
        let both = |a: &str, b: &str| shared(Path::new(a), Path::new(b));
        assert_eq!(both("/a/b/upper", "/a/b/work"), Path::new("/a/b"));
        assert_eq!(both("/a/bc", "/a/b"), Path::new("/a"));
        assert_eq!(both("/a", "/b"), Path::new("/"));
        assert_eq!(relative(Path::new("/a/b"), Path::new("/a/b")), Path::new(""));
        assert_eq!(relative(Path::new("/a/b"), Path::new("/")), Path::new("a/b"));
    }

    #[test]
    fn our_names_are_those_of_no_directory() {
        let layer = |name: &str| Layer { name: name.as_bytes().to_vec().into(), ..Layer::default() };
        let system = |names: &[&str]| FileSystem {
            layers: names.iter().map(|name| layer(name)).collect(),
            ..FileSystem::default()
        };
        assert_eq!(free(&system(&["/a", "b"])), ".stillpoint-0-");
        assert_eq!(free(&system(&["/a/../.stillpoint-0-7/b"])), ".stillpoint-1-");
    }
}
