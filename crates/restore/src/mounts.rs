//! Making the mounts that only the program had, in a mount namespace of its own.
//!
//! | when | where | what |
//! | --- | --- | --- |
//! | first | here | [`Systems`]: file systems are made, and filled |
//! | then | in the new namespace, a copy of ours, before there is a process | [`build`]: copies of all mounts are taken while all paths lead where they lead for us; what is gone is taken away; overlays are mounted over their directories ([`overlays`]); then each is put on the one it is on, from the root on |
//! | when all processes are there | there | [`Building::complete`]: procfs of their pid namespaces, and what is on it; and last what mounts share with each other, as nothing may be passed on before |

use crate::files::Contents;
use crate::overlays::{self, Anew};
use crate::{Error, Result, tmpfs};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use stillpoint_image::{
    Bytes, FileSystem, Image, Mounted, Mounts, Namespace, OVERLAY, Process, Propagation, Receives, Users,
};
use stillpoint_linux::descriptors::{duplicate_from, pidfd_open};
use stillpoint_linux::messenger::{self, Messenger};
use stillpoint_linux::mounts::{self, Propagation as Passes};
use stillpoint_linux::namespaces::{self, inside, inside_as};
use stillpoint_linux::proc::NamespaceKind;
use stillpoint_linux::program::{Arg, Program, Run, Step};
use stillpoint_linux::{Error as Kernel, Result as KernelResult};

/// The user namespace to which a mount namespace belongs.
///
/// Such a namespace is made as a copy of ours by somebody in there. Nobody can take away from it, or change, what is a copy of ours, nor
/// what comes along when a directory of those is mounted elsewhere; so it was in the program's, and so it has to be again. Therefore
/// the same is done in there as ever, but with all that is mounted in a directory; and file systems are made by somebody who is in
/// the user namespace, to which they belong then.
#[derive(Clone, Copy)]
pub(crate) struct Within<'a> {
    pub users: &'a Users,
    pub file: &'a OwnedFd,
    /// Who has the first names in it: nobody without one can make anything in a file system that belongs to it.
    pub root: (u32, u32),
}

/// File systems of a mount namespace, by row; none where it is that of a pid namespace, which is made with its processes, or lies over others.
pub(crate) struct Systems(Vec<Option<OwnedFd>>);

impl Systems {
    /// Makes them, with what is in them. `within` does something in another namespace of the program's.
    pub fn make(
        mounts: &Mounts,
        contents: &dyn Contents,
        space: &dyn Fn(u32) -> Result<(NamespaceKind, OwnedFd)>,
        within: Option<Within<'_>>,
    ) -> Result<Self> {
        let mut made = Vec::new();
        for system in &mounts.systems {
            let settings = tmpfs::settings(system);
            let make = || mounts::make(&system.kind, &system.source.0, &settings);
            let mount = match (system.kind.as_str(), system.namespace) {
                ("proc", Some(_)) | (OVERLAY, None) => None,
                (_, Some(row)) => {
                    let (kind, file) = space(row)?;
                    Some(inside(&[(kind, file.as_fd())], make)?)
                }
                ("tmpfs" | "devpts", None) => Some(match within {
                    None => make()?,
                    Some(within) => make_within(system, within)?,
                }),
                (_, None) => Some(make()?),
            };
            if let Some(mount) = mount.as_ref().filter(|_| system.kind == "tmpfs") {
                match within {
                    None => tmpfs::refill(system, mount, contents)?,
                    Some(within) => inside_as(within.root, &[], || tmpfs::refill(system, mount, contents))?,
                }
            }
            if let Some(mount) = mount.as_ref().filter(|_| tmpfs::is_read_only(system)) {
                mounts::make_read_only(mount)?;
            }
            made.push(mount);
        }
        Ok(Systems(made))
    }
}

/// A mount of a file system that belongs to a user namespace.
fn make_within(system: &FileSystem, within: Within<'_>) -> Result<OwnedFd> {
    let mut program = Program::new();
    // What has no other owner is that of whoever makes it.
    messenger::become_user(&mut program, within.root.0.into(), within.root.1.into());
    messenger::enter(&mut program, NamespaceKind::User, within.file);
    messenger::begin(&mut program, NamespaceKind::Mount);
    let (_, mount) = make_anew(&mut program, system, Some(within.users));
    Ok(Messenger::send(&program)?.file(mount)?)
}

/// A mount namespace that is being built.
#[derive(Debug)]
pub(crate) struct Building {
    /// Its root.
    pub root: OwnedFd,
    /// Its mounts, as far as they are there.
    made: Vec<Option<OwnedFd>>,
    /// Those that are on procfs, and are nowhere until that is there.
    waiting: Vec<Option<OwnedFd>>,
    /// File systems, each in a mount that is nowhere.
    views: Vec<Option<OwnedFd>>,
    /// Mounts of overlays by their numbers: what of them is made anew.
    overlays: HashMap<u64, Anew>,
    /// Mounts around it that others receive from.
    around: HashMap<Bytes, OwnedFd>,
    /// It belongs to a user namespace of the program's own.
    is_owned: bool,
}

/// Builds the namespace that this thread is in, a copy of ours.
pub(crate) fn build(
    mounts: &Mounts,
    propagation: Propagation,
    systems: Systems,
    around: HashMap<Bytes, OwnedFd>,
    within: Option<Within<'_>>,
) -> Result<Building> {
    let is_owned = within.is_some();
    namespaces::set_propagation(propagation == Propagation::Slave)?;
    let mut gone = Vec::new();
    let mut copies: Vec<Option<OwnedFd>> = mounts.all.iter().map(|_| None).collect();
    for (row, mount) in mounts.all.iter().enumerate() {
        let from = match &mount.what {
            Mounted::Kept => &mount.point,
            Mounted::Around(path) => path,
            Mounted::System { .. } => continue,
        };
        let found = mounts::handle(rustix::fs::CWD, from.as_path());
        copies[row] = match (&mount.what, found) {
            (Mounted::Kept, Ok(found)) => Some(found),
            (_, Ok(found)) if is_owned => Some(mounts::copy_all(&found)?),
            (_, Ok(found)) => Some(apart(&found)?),
            (_, Err(e)) => {
                let is_needed = mounts.all.iter().any(|other| other.parent == Some(row as u32));
                if is_needed || mount.what != Mounted::Kept {
                    gone.push(format!(
                        "{from}: the program had it mounted on {}, and it is gone: {e}",
                        mount.point
                    ));
                }
                None
            }
        };
    }
    if !gone.is_empty() {
        return Err(Error::Refused(gone));
    }
    let views = systems.0.iter().enumerate().map(|(row, system)| {
        system.as_ref().map(|system| lend(mounts, row as u32, system, &mut copies)).transpose()
    });
    let mut views = views.collect::<Result<Vec<_>>>()?;
    for (row, system) in mounts.systems.iter().enumerate().filter(|(_, system)| system.kind == OVERLAY) {
        let made = overlays::make(system, &mut views, within)?;
        views[row] = Some(lend(mounts, row as u32, &made, &mut copies)?);
    }
    if let Some(point) = mounts.gone.first().filter(|_| is_owned) {
        return Err(Error::Refused(vec![format!(
            "{point}: nothing was mounted there in a mount namespace that belongs to a user namespace, and what is mounted there now \
             cannot be taken away in one"
        )]));
    }
    for point in &mounts.gone {
        mounts::take_away(point.as_path())?;
    }
    let mut made: Vec<Option<OwnedFd>> = mounts.all.iter().map(|_| None).collect();
    put_all(mounts, &mut copies, &mut made, is_owned)?;
    let root = mounts::handle(rustix::fs::CWD, Path::new("/"))?;
    let mut overlays = HashMap::new();
    for (mount, made) in mounts.all.iter().zip(&made) {
        if let (Mounted::System { row, .. }, Some(made)) = (&mount.what, made)
            && mounts.systems[*row as usize].kind == OVERLAY
        {
            overlays.insert(mounts::number(made)?, overlays::anew(&mounts.systems, *row));
        }
    }
    Ok(Building { root, made, waiting: copies, views, overlays, around, is_owned })
}

/// A mount of its own of what is found at a path, which passes nothing on.
pub(crate) fn apart(found: &OwnedFd) -> KernelResult<OwnedFd> {
    let copy = mounts::copy(found)?;
    mounts::set_propagation(&copy, Passes::Private)?;
    Ok(copy)
}

/// Takes copies of a file system's mounts, for which it has to be mounted somewhere for a moment; one more is returned.
fn lend(mounts: &Mounts, number: u32, system: &OwnedFd, copies: &mut [Option<OwnedFd>]) -> Result<OwnedFd> {
    let root = mounts::handle(rustix::fs::CWD, Path::new("/"))?;
    mounts::place(system, &root)?;
    for (row, mount) in mounts.all.iter().enumerate() {
        let Mounted::System { row: of, root } = &mount.what else { continue };
        if *of == number {
            let below = root.as_path().strip_prefix("/").unwrap_or(root.as_path());
            copies[row] = Some(apart(&mounts::handle(system, below)?)?);
        }
    }
    let view = apart(system)?;
    mounts::take_away_from(system)?;
    rustix::process::fchdir(&root).map_err(|e| Kernel::call("go back", e))?;
    Ok(view)
}

/// Puts those where they belong whose parents are there.
fn put_all(
    mounts: &Mounts,
    copies: &mut [Option<OwnedFd>],
    made: &mut [Option<OwnedFd>],
    is_owned: bool,
) -> Result<()> {
    for (row, mount) in mounts.all.iter().enumerate() {
        let waits = mount.parent.is_some_and(|parent| made[parent as usize].is_none());
        if let Some(copy) = copies[row].take_if(|_| !waits) {
            let there = if is_owned { come_along(mounts, row, &copy, made)? } else { None };
            let mount = match there {
                None => {
                    put(mounts, row, &copy, made)?;
                    copy
                }
                Some(there) => there,
            };
            if let Some(options) = mounts.all[row].options {
                mounts::set_options(&mount, options)?;
            }
            made[row] = Some(mount);
        }
    }
    Ok(())
}

fn put(mounts: &Mounts, row: usize, copy: &OwnedFd, made: &[Option<OwnedFd>]) -> Result<()> {
    let mount = &mounts.all[row];
    let refused =
        |e| Error::Refused(vec![format!("{}: the program had something mounted there: {e}", mount.point)]);
    if mount.what == Mounted::Kept {
        // Its options are set as those of any other.
    } else if let Some(parent) = mount.parent {
        let on = made[parent as usize].as_ref();
        let on = on.ok_or_else(|| Error::Failed(format!("{} cannot be mounted", mount.point)))?;
        let below = &mounts.all[parent as usize].point;
        let path = mount.point.as_path().strip_prefix(below.as_path()).unwrap_or(Path::new(""));
        let target =
            if path.as_os_str().is_empty() { None } else { Some(mounts::handle(on, path).map_err(refused)?) };
        mounts::place(copy, target.as_ref().unwrap_or(on)).map_err(refused)?;
    } else if mounts.is_apart && row == 0 {
        let old = mounts::handle(rustix::fs::CWD, Path::new("/"))?;
        mounts::place(copy, &old)?;
        mounts::take_root(copy)?;
    }
    Ok(())
}

/// A mount that is there with the directory on which it is, because all that was mounted in that has come along.
fn come_along(
    mounts: &Mounts,
    row: usize,
    copy: &OwnedFd,
    made: &[Option<OwnedFd>],
) -> Result<Option<OwnedFd>> {
    let (mount, Some(parent)) = (&mounts.all[row], mounts.all[row].parent) else { return Ok(None) };
    let (Mounted::Around(_), Some(on)) = (&mount.what, made[parent as usize].as_ref()) else {
        return Ok(None);
    };
    let below = &mounts.all[parent as usize].point;
    let path = mount.point.as_path().strip_prefix(below.as_path()).unwrap_or(Path::new(""));
    let Ok(there) = mounts::handle(on, path) else { return Ok(None) };
    let file = |of: &OwnedFd| rustix::fs::fstat(of).map(|stat| (stat.st_dev, stat.st_ino)).ok();
    let is_it = mounts::number(&there)? != mounts::number(on)? && file(&there) == file(copy);
    Ok(is_it.then_some(there))
}

/// The file system of its own that a path of a namespace leads to, and the path there.
fn on(mounts: &Mounts, path: &Path) -> Option<(u32, PathBuf)> {
    let around = mounts.all.iter().filter(|mount| path.starts_with(mount.point.as_path()));
    // Of two in the same place, the later one covers the other.
    let mount = around.max_by_key(|mount| mount.point.as_path().components().count())?;
    let Mounted::System { row, root } = &mount.what else { return None };
    let rest = path.strip_prefix(mount.point.as_path()).ok()?;
    Some((*row, root.as_path().strip_prefix("/").ok()?.join(rest)))
}

impl Building {
    /// If a path leads to an overlay, what of that is made anew.
    pub fn overlay_at(&self, path: &Path) -> Option<Anew> {
        if self.overlays.is_empty() {
            return None;
        }
        let number = mounts::number(mounts::handle(rustix::fs::CWD, path).ok()?).ok()?;
        self.overlays.get(&number).copied()
    }

    /// Lets directories that the program holds have the inode numbers that they had, where an overlay gives them out: before anybody else
    /// comes to one. `held`: paths in the namespace, and numbers.
    pub fn number(&self, mounts: &Mounts, held: &[(&Path, u64)]) {
        let is_overlay = |row: &usize| mounts.systems[*row].kind == OVERLAY;
        for row in (0..mounts.systems.len()).filter(is_overlay) {
            let on_it = held.iter().filter_map(|(path, ino)| {
                let (of, path) = on(mounts, path)?;
                (of as usize == row).then_some((path, *ino))
            });
            if let Some(view) = &self.views[row] {
                overlays::number(view, on_it.collect());
            }
        }
    }

    /// Makes what shows processes, and what is on it, and lets mounts share what they shared.
    pub fn complete(
        &mut self,
        image: &Image,
        row: u32,
        namespace: BorrowedFd<'_>,
        members: &mut [&mut dyn Run],
    ) -> Result<()> {
        let Namespace::Mount { mounts: Some(mounts), .. } = &image.namespaces[row as usize] else {
            return Ok(());
        };
        let mut shown = HashMap::new();
        for (number, system) in mounts.systems.iter().enumerate().filter(|(_, system)| system.kind == "proc")
        {
            let Some(of) = system.namespace else { continue };
            let is_in = |p: &Process| p.namespaces.contains(&of) && p.namespaces.contains(&row);
            let member = image.processes.iter().position(is_in).and_then(|at| members.get_mut(at));
            let member = member.ok_or_else(|| Error::Failed("procfs is that of nobody".into()))?;
            let made = match self.is_owned {
                true => procfs_of(member.pid(), system)?,
                false => procfs(*member, system)?,
            };
            shown.insert(number as u32, made);
        }
        inside(&[(NamespaceKind::Mount, namespace)], || {
            for (number, system) in &shown {
                lend(mounts, *number, system, &mut self.waiting)?;
            }
            put_all(mounts, &mut self.waiting, &mut self.made, self.is_owned)?;
            self.share(mounts)
        })
    }

    /// Lets mounts share what they shared.
    fn share(&self, mounts: &Mounts) -> Result<()> {
        let mut first: HashMap<u32, usize> = HashMap::new();
        let width = |row: &usize| match &mounts.all[*row].what {
            Mounted::System { root, .. } => root.0.len(),
            Mounted::Kept => 0,
            Mounted::Around(path) => path.0.len(),
        };
        let has = |row: usize| mounts.all[row].sharing.as_ref().filter(|_| self.made[row].is_some());
        let mut rows: Vec<usize> = (0..mounts.all.len()).filter(|row| has(*row).is_some()).collect();
        rows.sort_by_key(width);
        for &row in &rows {
            if let Some(group) = has(row).and_then(|sharing| sharing.shares) {
                first.entry(group).or_insert(row);
            }
            self.set(row, Passes::Private)?;
        }
        // Those that receive from a group come after it is there.
        let (mut left, mut there) = (rows, Vec::new());
        while !left.is_empty() {
            let before = left.len();
            let mut later = Vec::new();
            for row in left {
                let Some(sharing) = has(row) else { continue };
                let leads = sharing.shares.is_some_and(|group| first.get(&group) == Some(&row));
                let waits_for = match (&sharing.receives, sharing.shares) {
                    (_, Some(group)) if !leads => Some(group),
                    (Some(Receives::Own(group)), _) => Some(*group),
                    _ => None,
                };
                if waits_for.is_some_and(|group| !there.contains(&group)) {
                    later.push(row);
                    continue;
                }
                let leader = waits_for.and_then(|group| self.made[*first.get(&group)?].as_ref());
                self.share_one(row, mounts, leader, leads)?;
                there.extend(sharing.shares.filter(|_| leads));
            }
            if later.len() == before {
                return Err(Error::Failed("mounts receive from each other".into()));
            }
            left = later;
        }
        Ok(())
    }

    fn share_one(&self, row: usize, mounts: &Mounts, leader: Option<&OwnedFd>, leads: bool) -> Result<()> {
        let (Some(mount), Some(sharing)) = (&self.made[row], &mounts.all[row].sharing) else { return Ok(()) };
        if let (Some(_), Some(leader)) = (sharing.shares.filter(|_| !leads), leader) {
            return Ok(mounts::join(mount, leader)?);
        }
        let from = match &sharing.receives {
            Some(Receives::Around(path)) => self.around.get(path),
            Some(Receives::Own(_)) => leader,
            None => None,
        };
        if let Some(from) = from {
            // Around us it may be private by now: then there is nothing to be received.
            match mounts::join(mount, from) {
                Err(e) if e.errno() == Some(libc::EINVAL) => {}
                joined => {
                    joined?;
                    self.set(row, Passes::Receiving)?;
                }
            }
        }
        if leads {
            self.set(row, Passes::Shared)?;
        }
        if sharing.is_unbindable {
            self.set(row, Passes::Unbindable)?;
        }
        Ok(())
    }

    fn set(&self, row: usize, passes: Passes) -> Result<()> {
        match &self.made[row] {
            Some(mount) => Ok(mounts::set_propagation(mount, passes)?),
            None => Ok(()),
        }
    }

    /// Gives files in file systems in memory the times that they had, when nothing is changed in them any more.
    pub fn settle(&self, mounts: &Mounts) -> Result<()> {
        for (system, view) in mounts.systems.iter().zip(&self.views) {
            if let Some(view) = view.as_ref().filter(|_| !tmpfs::is_read_only(system)) {
                tmpfs::set_times(system, view)?;
            }
        }
        Ok(())
    }
}

/// A mount of procfs, made by a process that is in the pid namespace that it is to show.
fn procfs(member: &mut dyn Run, system: &FileSystem) -> Result<OwnedFd> {
    let mut program = Program::new();
    let (context, mount) = make_anew(&mut program, system, None);
    let outcome = member.run(&program)?;
    let found = duplicate_from(pidfd_open(member.pid(), 0)?.as_fd(), outcome.result(mount) as u32)?;
    let mut program = Program::new();
    program.call("close", libc::SYS_close, [Arg::Value(outcome.result(context) as u64)]);
    program.call("close", libc::SYS_close, [Arg::Value(outcome.result(mount) as u64)]);
    member.run(&program)?;
    Ok(found)
}

/// The same by a process of ours that goes to the pid namespace of this one. (Where a user namespace has no procfs that shows all,
/// nobody in it can make one.)
pub(crate) fn procfs_of(pid: u32, system: &FileSystem) -> Result<OwnedFd> {
    let system = FileSystem { kind: "proc".into(), ..system.clone() };
    let mut program = Program::new();
    let (_, mount) = make_anew(&mut program, &system, None);
    Ok(Messenger::send_to(pidfd_open(pid, 0)?.as_fd(), &program)?.file(mount)?)
}

/// Adds the calls that make a file system, and a mount of it that is nowhere yet; `users`: whoever runs them is in that user namespace.
fn make_anew(program: &mut Program, system: &FileSystem, users: Option<&Users>) -> (Step, Step) {
    let making = Making::begin(program, system);
    for (name, value) in tmpfs::settings(system) {
        let called = users.and_then(|users| tmpfs::called(users, name, value?));
        making.set(program, name, called.as_deref().or(value));
    }
    let mount = making.end(program);
    (making.context, mount)
}

/// A file system that is being made by calls of a program. `fsopen(2)`
pub(crate) struct Making {
    kind: String,
    context: Step,
}

impl Making {
    const CLOEXEC: Arg = Arg::Value(1);
    const SET_FLAG: Arg = Arg::Value(0);
    const SET_STRING: Arg = Arg::Value(1);
    const CREATE: Arg = Arg::Value(6);
    const NONE: Arg = Arg::Value(0);

    /// Adds the calls with which it begins.
    pub fn begin(program: &mut Program, system: &FileSystem) -> Self {
        let kind = system.kind.clone();
        let name = program.string(kind.as_bytes());
        let context = program.call(format!("make {kind}"), libc::SYS_fsopen, [name, Self::CLOEXEC]);
        let making = Making { kind, context };
        if !system.source.0.is_empty() {
            making.set(program, b"source", Some(&system.source.0));
        }
        making
    }

    /// Adds the call that sets an option.
    pub fn set(&self, program: &mut Program, name: &[u8], value: Option<&[u8]>) {
        let key = program.string(name);
        let (how, value) = match value {
            Some(value) => (Self::SET_STRING, program.string(value)),
            None => (Self::SET_FLAG, Self::NONE),
        };
        let what = format!("set {} of {}", name.escape_ascii(), self.kind);
        program.call(what, libc::SYS_fsconfig, [self.context.into(), how, key, value, Self::NONE]);
    }

    /// Adds the calls that make a mount of it.
    pub fn end(&self, program: &mut Program) -> Step {
        let args = [self.context.into(), Self::CREATE, Self::NONE, Self::NONE, Self::NONE];
        program.call(format!("make {}", self.kind), libc::SYS_fsconfig, args);
        let args = [self.context.into(), Self::CLOEXEC, Self::NONE];
        program.call(format!("mount {}", self.kind), libc::SYS_fsmount, args)
    }
}

/// Handles to mounts around us that those of the program received from.
pub(crate) fn received_from(mounts: &Mounts) -> HashMap<Bytes, OwnedFd> {
    let all = mounts.all.iter().filter_map(|mount| mount.sharing.as_ref()?.receives.as_ref());
    let paths = all.filter_map(|receives| match receives {
        Receives::Around(path) => Some(path),
        Receives::Own(_) => None,
    });
    // From what is not there any more nothing is received.
    let found = |path: &Bytes| Some((path.clone(), mounts::handle(rustix::fs::CWD, path.as_path()).ok()?));
    paths.filter_map(found).collect()
}
