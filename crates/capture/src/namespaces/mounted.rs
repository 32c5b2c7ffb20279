//! Mounts that only the program has, those around it that it has taken away or changed, and another root: mount by mount.
//!
//! What is the same as around the namespace is not told, so that a restore has what is there then. Of all else it is told how to
//! make it: bind mounts by a path around the namespace that leads to the same file, file systems in memory with what is in them,
//! views of the kernel (procfs, sysfs and the like) by the namespace that they show. What cannot be made is refused by name.
//!
//! Whoever opens something on a mount, or follows a path through it, keeps it from being unmounted meanwhile (`EBUSY`). So while
//! the program runs nothing is looked at but the text of `mountinfo`: what is in its mounts is looked at in the freeze, where it
//! unmounts nothing. What stands against a checkpoint there is refused then.

use super::mounts::text;
use super::tmpfs::{MOST_BYTES, Walk};
use super::views::reach;
use super::{Other, Own, When, name, overlays};
use crate::files::noticed::WATCHED;
use crate::{Builder, Result};
use rustix::fs::{CWD, Stat, makedev};
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use stillpoint_image as image;
use stillpoint_image::{
    Bytes, FileSystem, Mounted, Mounts, OF_THE_MACHINE, OVERLAY, Propagation, Receives, Sharing,
};
use stillpoint_linux::mounts::{self, handle};
use stillpoint_linux::namespaces::{self, inside};
use stillpoint_linux::proc::mounts::{Mount, unescaped};
use stillpoint_linux::proc::{self, Namespace, NamespaceKind, Proc};

/// Options of file systems that are made again with them. Others are refused.
const SETTINGS: [&str; 21] = [
    "rw",
    "ro",
    "size",
    "nr_blocks",
    "nr_inodes",
    "mode",
    "uid",
    "gid",
    "huge",
    "noswap",
    "inode32",
    "inode64",
    "mpol",
    "hidepid",
    "subset",
    "ptmxmode",
    "max",
    "sync",
    "dirsync",
    "lazytime",
    "seclabel",
];

/// A namespace to be looked at.
pub(super) struct Look<'a> {
    /// Mounts around it.
    pub around: &'a [Mount],
    /// Its own.
    pub within: &'a [Mount],
    /// Its root.
    pub root: &'a Arc<OwnedFd>,
    pub own: &'a Own,
    pub others: &'a [Other],
    pub row: u32,
    pub when: When,
}

/// Its mounts in the order in which they can be made, and which of them are around it, too.
struct Order<'a> {
    mounts: Vec<&'a Mount>,
    kept: HashMap<u64, &'a Mount>,
    gone: Vec<&'a Mount>,
    is_apart: bool,
}

/// What has been described of it.
struct Work<'a, 'b> {
    look: &'a Look<'a>,
    builder: &'b mut Builder,
    order: Order<'a>,
    /// What its mounts that are around it receive, as a rule.
    receives: bool,
    done: Mounts,
    /// Rows of those that are told, by their numbers.
    rows: HashMap<u64, u32>,
    /// Rows of file systems, by device.
    systems: HashMap<(u32, u32), u32>,
    /// Peer groups of its own, by the kernel's numbers.
    groups: HashMap<u64, u32>,
}

impl Look<'_> {
    /// Describes it.
    pub fn describe(&self, builder: &mut Builder) -> Result<(Propagation, Mounts)> {
        let Some(order) = self.order() else {
            builder.refuse(name(NamespaceKind::Mount), "its root cannot be found", "");
            return Ok((Propagation::Private, Mounts::default()));
        };
        let around = groups(self.around);
        let receives = |(id, kept): (&u64, &&Mount)| {
            let mount = self.within.iter().find(|mount| mount.id == *id);
            mount.is_some_and(|m| m.master.is_some() && m.master == kept.shared.or(kept.master))
        };
        let receives = order.kept.iter().any(receives);
        let own = groups(self.within);
        let own = own.difference(&around).zip(0..).map(|(group, row)| (*group, row)).collect();
        let done = Mounts { is_apart: order.is_apart, ..Mounts::default() };
        let (rows, systems) = (HashMap::new(), HashMap::new());
        let mut work = Work { look: self, builder, order, receives, done, rows, systems, groups: own };
        work.describe_all()?;
        let propagation = if receives { Propagation::Slave } else { Propagation::Private };
        Ok((propagation, work.done))
    }

    /// Goes through its mounts from the root, beside those around it.
    fn order(&self) -> Option<Order<'_>> {
        let ids: HashSet<u64> = self.within.iter().map(|mount| mount.id).collect();
        let root =
            self.within.iter().find(|mount| !ids.contains(&mount.parent) || mount.parent == mount.id)?;
        let outer: HashSet<u64> = self.around.iter().map(|mount| mount.id).collect();
        let beside =
            self.around.iter().find(|mount| !outer.contains(&mount.parent) || mount.parent == mount.id);
        let beside = beside.filter(|beside| is_same(beside, root));
        let (mut kept, mut gone) = (HashMap::new(), Vec::new());
        kept.extend(beside.map(|beside| (root.id, beside)));
        let (mut mounts, mut at) = (vec![root], 0);
        while let Some(&mount) = mounts.get(at) {
            let mut children = below(self.within, mount);
            if let Some(&beside) = kept.get(&mount.id) {
                let mut left = below(self.around, beside);
                for child in &children {
                    if let Some(place) = left.iter().position(|other| is_same(other, child)) {
                        kept.insert(child.id, left.swap_remove(place));
                    }
                }
                let mut all = left;
                while let Some(lost) = all.pop() {
                    gone.push(lost);
                    all.extend(below(self.around, lost));
                }
            }
            // What is deeper would be hidden by what is mounted above it.
            children.sort_by_key(|child| std::cmp::Reverse(child.point.len()));
            mounts.extend(children);
            at += 1;
        }
        Some(Order { mounts, kept, gone, is_apart: beside.is_none() })
    }

    /// What is found at a mount point, if it is this mount.
    fn visible(&self, mount: &Mount) -> Option<OwnedFd> {
        let path = reach(self.root, &unescaped(&mount.point));
        let path = if mount.point == b"/" { path.join(".") } else { path };
        let found = handle(CWD, &path).ok()?;
        mounts::number(&found).is_ok_and(|number| number == mount.id).then_some(found)
    }

    /// Whether something else hides a mount.
    fn is_hidden(&self, mount: &Mount) -> bool {
        match self.when {
            When::Running => !is_reached(self.within, mount),
            _ => self.visible(mount).is_none(),
        }
    }

    /// A path around the namespace that leads to a file or directory of what is mounted there: to this one, if that may be looked at.
    pub(super) fn source(&self, mount: &Mount, root: &[u8], found: Option<&Stat>) -> Option<Vec<u8>> {
        let same = self.around.iter().filter(|a| a.device == mount.device && a.kind == mount.kind);
        let mut paths = same.filter_map(|a| {
            let rest = below_path(&unescaped(&a.root), root)?;
            let mut path = unescaped(&a.point);
            if !rest.is_empty() {
                path = [path.strip_suffix(b"/").unwrap_or(&path), b"/", &rest[..]].concat();
            }
            Some((a.id, path))
        });
        let leads_there = |(id, path): &(u64, Vec<u8>)| {
            let file = handle(CWD, Path::new(OsStr::from_bytes(path)));
            file.is_ok_and(|file| {
                let is_it = rustix::fs::fstat(&file).is_ok_and(|s| match found {
                    Some(found) => (s.st_dev, s.st_ino) == (found.st_dev, found.st_ino),
                    // Other file systems may tell a device that is not that of the mount.
                    None => mount.kind != b"tmpfs" || s.st_dev == makedev(mount.device.0, mount.device.1),
                });
                is_it && (mounts::number(&file).is_ok_and(|n| n == *id) || self.is_seen_by_another())
            })
        };
        paths.find(leads_there).map(|(_, path)| path)
    }

    /// Mounts around it may be told by a process whose mount namespace is a copy of ours.
    fn is_seen_by_another(&self) -> bool {
        let ours = Proc::process(std::process::id()).and_then(|p| p.mounts()).unwrap_or_default();
        !self.around.iter().any(|mount| ours.iter().any(|our| our.id == mount.id))
    }
}

/// Whether the path of a mount leads to it: each mount on the way is the last one that is on its place.
fn is_reached(all: &[Mount], mount: &Mount) -> bool {
    let ids: HashSet<u64> = all.iter().map(|mount| mount.id).collect();
    let mut at = all.iter().find(|mount| !ids.contains(&mount.parent) || mount.parent == mount.id);
    let mut last = None;
    while let Some(on) = at {
        last = Some(on.id);
        let on_the_way = |other: &&Mount| {
            other.parent == on.id && other.id != on.id && below_path(&other.point, &mount.point).is_some()
        };
        at = all.iter().filter(on_the_way).min_by_key(|other| other.point.len());
    }
    last == Some(mount.id)
}

fn groups(mounts: &[Mount]) -> HashSet<u64> {
    mounts.iter().filter_map(|mount| mount.shared).collect()
}

/// Whether the machine has one file system of a kind.
fn is_of_machine(kind: &str) -> bool {
    OF_THE_MACHINE.contains(&kind)
}

/// Whether what is mounted anew of the kind of a mount, here, is its file system.
fn is_made(mount: &Mount) -> stillpoint_linux::Result<bool> {
    let made = mounts::make(&text(&mount.kind), b"", &[])?;
    let stat = rustix::fs::fstat(&made).map_err(|e| stillpoint_linux::Error::call("fstat a mount", e))?;
    Ok(stat.st_dev == makedev(mount.device.0, mount.device.1))
}

/// Those that are on this one.
fn below<'m>(all: &'m [Mount], mount: &Mount) -> Vec<&'m Mount> {
    all.iter().filter(|other| other.parent == mount.id && other.id != mount.id).collect()
}

/// Whether two mounts are of the same, at the same place.
fn is_same(a: &Mount, b: &Mount) -> bool {
    (a.device, &a.root, &a.point, &a.kind) == (b.device, &b.root, &b.point, &b.kind)
}

/// What is left of an absolute path that begins with another one.
pub(super) fn below_path(above: &[u8], path: &[u8]) -> Option<Vec<u8>> {
    let above = above.strip_suffix(b"/").unwrap_or(above);
    let rest = path.strip_prefix(above)?;
    match rest.first() {
        None | Some(b'/') => Some(rest.strip_prefix(b"/").unwrap_or(rest).to_vec()),
        Some(_) => None,
    }
}

impl<'a> Work<'a, '_> {
    fn describe_all(&mut self) -> Result<()> {
        self.done.gone = self.order.gone.iter().rev().map(|mount| Bytes(unescaped(&mount.point))).collect();
        if !groups(self.look.around).is_disjoint(&groups(self.look.within)) {
            let why = "its mounts differ from those around it, and yet pass on to them what is mounted there";
            self.refuse(why, "let them not be shared (mount --make-rprivate, or --make-rslave)");
            return Ok(());
        }
        self.refuse_where_two_are_on_one_place();
        for mount in self.order.mounts.clone() {
            match self.order.kept.get(&mount.id).copied() {
                Some(beside) => self.kept(mount, beside),
                None => self.own(mount)?,
            }
        }
        if !self.is_running() {
            self.fill()?;
            self.find_layers()?;
        }
        self.check_groups();
        Ok(())
    }

    fn is_running(&self) -> bool {
        self.look.when == When::Running
    }

    fn refuse(&mut self, why: impl Into<String>, hint: &str) {
        self.builder.refuse(name(NamespaceKind::Mount), why, hint);
    }

    fn refuse_mount(&mut self, mount: &Mount, why: &str, hint: &str) {
        self.refuse(format!("{} on {}: {why}", text(&mount.kind), text(&mount.point)), hint);
    }

    fn refuse_where_two_are_on_one_place(&mut self) {
        let mut seen = HashSet::new();
        for mount in self.look.within {
            if !seen.insert((mount.parent, &mount.point)) {
                self.refuse_mount(mount, "another one is mounted at the same place below it", "");
            }
        }
    }

    fn push(&mut self, mount: &Mount, told: image::Mount) -> u32 {
        let row = self.done.all.len() as u32;
        self.done.all.push(told);
        self.rows.insert(mount.id, row);
        row
    }

    /// One that is around the namespace: what is different.
    fn kept(&mut self, mount: &Mount, beside: &Mount) {
        let anyway = (None, if self.receives { beside.shared.or(beside.master) } else { None });
        let shares_the_same = (mount.shared, mount.master) == anyway && !mount.is_unbindable;
        let same_options = mount.options == beside.options;
        if shares_the_same && same_options {
            return;
        }
        // What nobody can see passes nothing on that anybody could see.
        if self.look.is_hidden(mount) {
            if !same_options {
                self.refuse_mount(
                    mount,
                    "it is hidden by another mount, and has other options than around it",
                    "",
                );
            }
            return;
        }
        let options = if same_options { None } else { self.options(mount) };
        let sharing = if shares_the_same { None } else { self.sharing(mount, Some(beside)) };
        let point = Bytes(unescaped(&mount.point));
        self.push(mount, image::Mount { point, options, sharing, ..image::Mount::default() });
    }

    /// One that only the namespace has.
    fn own(&mut self, mount: &'a Mount) -> Result<()> {
        if self.look.is_hidden(mount) {
            let why = "only the program has it, and it is hidden by another mount";
            self.refuse_mount(mount, why, "take away what hides it");
            return Ok(());
        }
        let stat = |found: OwnedFd| {
            let failed = |e| stillpoint_linux::Error::file(Path::new(OsStr::from_bytes(&mount.point)), e);
            rustix::fs::fstat(&found).map_err(failed)
        };
        let found = if self.is_running() { None } else { self.look.visible(mount) };
        let found = found.map(stat).transpose()?;
        let parent = self.parent(mount);
        let around = self.look.source(mount, &unescaped(&mount.root), found.as_ref());
        let what = match around.filter(|_| !self.is_called_otherwise(mount)) {
            Some(path) => Some(Mounted::Around(Bytes(path))),
            None => {
                let row = self.system(mount)?;
                row.map(|row| Mounted::System { row, root: Bytes(unescaped(&mount.root)) })
            }
        };
        let (options, sharing) = (self.options(mount), self.sharing(mount, None));
        if let Some(what) = what {
            let point = Bytes(unescaped(&mount.point));
            self.push(mount, image::Mount { point, parent, what, options, sharing });
        }
        Ok(())
    }

    /// Whether it is a file system that the machine has one of, and nobody around the namespace has mounted it under this name: a mount of
    /// theirs would be called otherwise.
    fn is_called_otherwise(&self, mount: &Mount) -> bool {
        let is_called_so = |other: &Mount| (other.device, &other.source) == (mount.device, &mount.source);
        is_of_machine(&text(&mount.kind))
            && mount.root == b"/"
            && !self.look.around.iter().any(is_called_so)
            && (self.is_running() || is_made(mount).unwrap_or(false))
    }

    /// The row of the mount on which one is.
    fn parent(&mut self, mount: &Mount) -> Option<u32> {
        if let Some(row) = self.rows.get(&mount.parent) {
            return Some(*row);
        }
        let below = self.look.within.iter().find(|other| other.id == mount.parent && other.id != mount.id)?;
        if !self.order.kept.contains_key(&below.id) {
            return None; // it has been refused
        }
        if self.look.is_hidden(below) && !hides(mount, below) {
            self.refuse_mount(mount, "what it is mounted on is hidden by another mount", "");
        }
        let point = Bytes(unescaped(&below.point));
        Some(self.push(below, image::Mount { point, ..image::Mount::default() }))
    }

    fn options(&mut self, mount: &Mount) -> Option<u64> {
        let options = mounts::options(&mount.options);
        if options.is_none() {
            let why = format!("its options ({}) are not all known", text(&mount.options));
            self.refuse_mount(mount, &why, "");
        }
        options
    }

    /// What a mount passes on and receives; `beside`: the same around the namespace.
    fn sharing(&mut self, mount: &Mount, beside: Option<&Mount>) -> Option<Sharing> {
        let shares = mount.shared.and_then(|group| self.groups.get(&group).copied());
        let receives = match mount.master {
            None => None,
            Some(group) => match self.groups.get(&group) {
                Some(&own) => Some(Receives::Own(own)),
                None => {
                    let is_wider = |a: &&Mount| {
                        a.shared == Some(group)
                            && a.device == mount.device
                            && below_path(&unescaped(&a.root), &unescaped(&mount.root)).is_some()
                    };
                    let found = beside.filter(is_wider).or_else(|| self.look.around.iter().find(is_wider));
                    if found.is_none() {
                        let why = "it receives what is mounted in a place that is neither in the namespace nor around it";
                        self.refuse_mount(mount, why, "let it receive nothing (mount --make-private)");
                    }
                    Some(Receives::Around(Bytes(unescaped(&found?.point))))
                }
            },
        };
        Some(Sharing { shares, receives, is_unbindable: mount.is_unbindable })
    }

    /// The row of the file system of a mount, which is around it nowhere.
    fn system(&mut self, mount: &'a Mount) -> Result<Option<u32>> {
        if mount.kind == b"devpts" && ![&b"/"[..], b"/ptmx"].contains(&mount.root.as_slice()) {
            self.refuse_mount(
                mount,
                "it is a terminal of a devpts that is nowhere around the program",
                "take the mount away",
            );
            return Ok(None);
        }
        if let Some(row) = self.systems.get(&mount.device) {
            return Ok(Some(*row));
        }
        if mount.root.ends_with(b"//deleted") {
            let why = "what is mounted there has been removed";
            self.refuse_mount(mount, why, "take the mount away");
            return Ok(None);
        }
        let kind = text(&mount.kind);
        let namespace = match kind.as_str() {
            "tmpfs" => Ok(None),
            "proc" | "devpts" if self.is_running() => Ok(None),
            "proc" => self.shown_by_proc(mount),
            "sysfs" => self.shown(mount, NamespaceKind::Network),
            "mqueue" => self.shown(mount, NamespaceKind::Ipc),
            "devpts" => self.note_terminals(mount),
            OVERLAY => overlays::refused(&mount.settings).map_or(Ok(None), Err),
            kind if is_of_machine(kind) && self.is_running() => Ok(None),
            kind if is_of_machine(kind) => match is_made(mount) {
                Ok(true) => Ok(None),
                _ => Err("it is another one than that which the machine has"),
            },
            "fuse" | "fuseblk" => Err("another program serves it"),
            "nsfs" => Err("it keeps a namespace"),
            _ => Err("what is mounted there is nowhere around the program"),
        };
        let namespace = match namespace {
            Ok(namespace) => namespace,
            Err(why) => {
                let hint = "take the mount away, or mount it around the program as well";
                self.refuse_mount(mount, why, hint);
                return Ok(None);
            }
        };
        let unknown = |setting: &&[u8]| {
            let name = setting.split(|b| *b == b'=').next().unwrap_or_default();
            match kind == OVERLAY {
                true => !overlays::is_known(name),
                false => !SETTINGS.iter().any(|known| known.as_bytes() == name),
            }
        };
        // Those that the machine has are left as they are.
        let all_settings: &[u8] = if is_of_machine(&kind) { b"" } else { &mount.settings[..] };
        let mut told = all_settings.split(|b| *b == b',').filter(|_| !all_settings.is_empty());
        if let Some(setting) = told.find(unknown) {
            let why = format!("it has an option that is not known ({})", text(setting));
            self.refuse_mount(mount, &why, "");
        }
        let row = self.done.systems.len() as u32;
        let (source, settings) = (Bytes(unescaped(&mount.source)), Bytes(all_settings.to_vec()));
        self.done.systems.push(FileSystem { kind, source, settings, namespace, ..FileSystem::default() });
        self.systems.insert(mount.device, row);
        let device = makedev(mount.device.0, mount.device.1);
        match &mount.kind[..] {
            b"tmpfs" | b"overlay" => {
                let is_saved = mount.kind == b"tmpfs";
                if !self.builder.views.add_mounted_anew(device, is_saved) {
                    let why = "it is in another mount namespace of the program, too";
                    self.refuse_mount(mount, why, "take it away there");
                }
                if is_saved {
                    self.refuse_large(mount);
                }
                self.refuse_elsewhere(mount);
            }
            b"devpts" => {
                self.builder.foreign.insert(device);
                self.builder.terminals.entry(device).or_default();
            }
            b"proc" => drop(self.builder.foreign.insert(device)),
            _ => {}
        }
        Ok(Some(row))
    }

    /// Refuses a file system in memory that is too large.
    fn refuse_large(&mut self, mount: &Mount) {
        let used = match self.is_running() {
            true => 0,
            false => rustix::fs::statfs(reach(self.look.root, &unescaped(&mount.point)).join("."))
                .map_or(0, |s| (s.f_blocks - s.f_bfree).saturating_mul(s.f_bsize as u64)),
        };
        if used > MOST_BYTES {
            let why = format!(
                "{} MiB are in it; no more than {} MiB are saved, as the program stands still meanwhile",
                used >> 20,
                MOST_BYTES >> 20
            );
            self.refuse_mount(mount, &why, "let the program keep it in a file system that stays");
        }
    }

    /// Refuses a file system that others have, too.
    fn refuse_elsewhere(&mut self, mount: &Mount) {
        if !self.is_running() {
            return; // whoever has it by now has it from the program
        }
        let ours = Proc::process(std::process::id()).and_then(|p| p.namespaces_of(&[NamespaceKind::Mount]));
        let mut known: HashSet<u64> = ours.unwrap_or_default().iter().map(|space| space.id).collect();
        known.insert(self.look.own.space.id);
        for pid in proc::processes().unwrap_or_default() {
            let Ok(process) = Proc::process(pid) else { continue };
            let space = process.namespaces_of(&[NamespaceKind::Mount]).unwrap_or_default();
            if !space.iter().any(|space| known.insert(space.id)) {
                continue;
            }
            if process.mounts().is_ok_and(|all| all.iter().any(|other| other.device == mount.device)) {
                let why = format!("it is mounted in the mount namespace of process {pid}, too");
                self.refuse_mount(mount, &why, "take it away there");
            }
        }
    }

    /// The row of the pid namespace that a procfs shows, if that is one of the program's own.
    fn shown_by_proc(&self, mount: &Mount) -> Result<Option<u32>, &'static str> {
        let Some(id) = self.pids_in(mount) else {
            return Err("it shows no process 1, or only a part of it is mounted");
        };
        let space = Namespace { kind: NamespaceKind::Pid, id };
        if self.home_pid() == Some(id) {
            return Ok(None);
        }
        let own = self.look.others.iter().find(|other| other.space == space);
        let own = own.ok_or("it shows processes of a pid namespace that is not the program's own")?;
        match own.pids.iter().any(|pid| self.look.own.pids.contains(pid)) {
            true => Ok(Some(own.row.unwrap_or(0))),
            false => Err("it shows processes of a pid namespace that nobody in this namespace is in"),
        }
    }

    /// The pid namespace that a procfs shows: that of process 1 in it. Where we may not look at that, ours, if it shows us under the
    /// only name that we have from there on.
    fn pids_in(&self, mount: &Mount) -> Option<u64> {
        let path = reach(self.look.root, &unescaped(&mount.point));
        if let Ok(link) = std::fs::read_link(path.join("1/ns/pid")) {
            return link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok();
        }
        let status = std::fs::read_to_string(path.join("self/status")).ok()?;
        let names = status.lines().find_map(|line| line.strip_prefix("NStgid:"))?;
        let is_ours = names.split_whitespace().count() == 1;
        is_ours.then(|| Some(namespaces::open("/proc/self", NamespaceKind::Pid).ok()?.1.id)).flatten()
    }

    /// The pid namespace around the program.
    fn home_pid(&self) -> Option<u64> {
        let private = self.builder.home.private.iter().find(|space| space.kind == NamespaceKind::Pid);
        let ours = || Some(namespaces::open("/proc/self", NamespaceKind::Pid).ok()?.1.id);
        private.map(|space| space.id).or_else(ours)
    }

    /// The row of the namespace that a view of the kernel shows: where it is mounted anew, it is the same file system.
    fn shown(&self, mount: &Mount, kind: NamespaceKind) -> Result<Option<u32>, &'static str> {
        let is_it = || is_made(mount);
        if is_it().unwrap_or(false) {
            return Ok(None);
        }
        let own = self.look.others.iter().filter(|other| other.space.kind == kind);
        let mut own = own.filter(|other| inside(&[(kind, other.file.as_fd())], is_it).unwrap_or(false));
        let own =
            own.next().ok_or("it shows a namespace that is neither the program's own nor that around it")?;
        Ok(Some(own.row.unwrap_or(0)))
    }

    /// Notes what terminals there are in a devpts: whether all are the program's tell its descriptors.
    fn note_terminals(&mut self, mount: &Mount) -> Result<Option<u32>, &'static str> {
        let whole = self.look.within.iter().find(|m| m.device == mount.device && m.root == b"/");
        let whole = whole.ok_or("only a part of it is mounted")?;
        let path = reach(self.look.root, &unescaped(&whole.point)).join(".");
        let its = rustix::fs::stat(&path).map_err(|_| "it cannot be read")?;
        if self.builder.noticed.is_folder(&path, (its.st_dev, its.st_ino)) {
            return Err(WATCHED.0);
        }
        let all = std::fs::read_dir(path).map_err(|_| "it cannot be read")?;
        let numbers = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        self.builder.terminals.insert(makedev(mount.device.0, mount.device.1), numbers);
        Ok(None)
    }

    /// Describes what is in file systems in memory.
    fn fill(&mut self) -> Result<()> {
        let all = self.systems.clone();
        for (device, row) in all {
            if self.done.systems[row as usize].kind != "tmpfs" {
                continue;
            }
            let told = |mount: &&Mount| mount.device == device && self.rows.contains_key(&mount.id);
            let mut mounts: Vec<&Mount> = self.look.within.iter().filter(told).collect();
            mounts.sort_by_key(|mount| mount.root.len());
            let mut widest: Vec<&Mount> = Vec::new();
            for mount in mounts {
                if !widest.iter().any(|w| below_path(&unescaped(&w.root), &unescaped(&mount.root)).is_some())
                {
                    widest.push(mount);
                }
            }
            for mount in widest {
                let entries = self.walk(mount)?;
                let known = &mut self.done.systems[row as usize].entries;
                known.extend(entries);
                known.sort_by(|a, b| a.path.cmp(&b.path));
                known.dedup_by(|a, b| a.path == b.path);
            }
        }
        Ok(())
    }

    /// Finds the directories that overlays lie over.
    fn find_layers(&mut self) -> Result<()> {
        for (device, row) in self.systems.clone() {
            if self.done.systems[row as usize].kind != OVERLAY {
                continue;
            }
            let told = |mount: &&Mount| mount.device == device && self.rows.contains_key(&mount.id);
            let all: Vec<&Mount> = self.look.within.iter().filter(told).collect();
            let root = all.iter().find(|mount| mount.root == b"/" && !mount.is_unbindable);
            let Some((mount, root)) = root.and_then(|mount| Some((*mount, self.look.visible(mount)?))) else {
                let why = "its root is not mounted, or cannot be mounted elsewhere, so it cannot be told what it lies over";
                all.iter().for_each(|mount| self.refuse_mount(mount, why, ""));
                continue;
            };
            let space = (NamespaceKind::Mount, self.look.own.file.as_fd());
            let copy = inside(&[space], || quiet_copy(&root))?;
            let search = overlays::Search { look: self.look, systems: &self.systems, mount };
            match search.layers(&copy)? {
                Ok(layers) => {
                    let lies_over = |layer: &image::Layer| match layer.at {
                        Mounted::System { row, .. } => Some(row),
                        _ => None,
                    };
                    let is_later = |of: u32| of >= row && self.done.systems[of as usize].kind == OVERLAY;
                    if layers.iter().filter_map(lies_over).any(is_later) {
                        self.refuse_mount(mount, "it lies over an overlay that would be made after it", "");
                    }
                    self.done.systems[row as usize].layers = layers;
                }
                Err(why) => self.refuse_mount(mount, &why, "take the mount away"),
            }
        }
        Ok(())
    }

    fn walk(&mut self, mount: &Mount) -> Result<Vec<image::Entry>> {
        let Some(found) = self.look.visible(mount) else { return Ok(Vec::new()) };
        // Of one that cannot be mounted elsewhere there is no copy.
        let is_covered = !below(self.look.within, mount).is_empty();
        if mount.is_unbindable && is_covered {
            let why = "it is unbindable, and something is mounted on it, which hides what is in it";
            self.refuse_mount(mount, why, "make it private (mount --make-private)");
            return Ok(Vec::new());
        }
        let space = (NamespaceKind::Mount, self.look.own.file.as_fd());
        let copy = if mount.is_unbindable { found } else { inside(&[space], || quiet_copy(&found))? };
        let (root, point) = (unescaped(&mount.root), unescaped(&mount.point));
        let what = format!("the file system on {}", text(&mount.point));
        let walk = Walk::new(self.builder, what, point, self.look.row);
        let root = root.strip_prefix(b"/").unwrap_or(&root);
        if rustix::fs::fstat(&copy).is_ok_and(|s| s.st_mode & libc::S_IFMT != libc::S_IFDIR) {
            self.refuse_mount(
                mount,
                "only a file of it is mounted, and what is around that file cannot be seen",
                "",
            );
            return Ok(Vec::new());
        }
        walk.describe(root, &Arc::new(copy))
    }

    /// Refuses peer groups of the namespace that the others cannot have from the widest mount in them.
    fn check_groups(&mut self) {
        let mut wrong = Vec::new();
        for &group in self.groups.keys() {
            let told = |mount: &&Mount| self.rows.contains_key(&mount.id);
            let has_to_do = |mount: &&Mount| mount.shared == Some(group) || mount.master == Some(group);
            let all: Vec<&Mount> = self.look.within.iter().filter(told).filter(has_to_do).collect();
            let widest = all.iter().filter(|m| m.shared == Some(group)).min_by_key(|m| m.root.len());
            let has_it = |m: &Mount| {
                widest.is_some_and(|widest| {
                    let is_below = below_path(&unescaped(&widest.root), &unescaped(&m.root)).is_some();
                    widest.device == m.device && is_below
                })
            };
            wrong.extend(all.iter().find(|mount| !has_it(mount)).map(|mount| mount.id));
        }
        for mount in self.look.within.iter().filter(|mount| wrong.contains(&mount.id)) {
            let why = "what it shares mounts with is not in the namespace any more";
            self.refuse_mount(mount, why, "let it share nothing (mount --make-private)");
        }
    }
}

/// A mount of what is found somewhere, without what is mounted on it, in which nothing changes when it is looked at.
pub(super) fn quiet_copy(found: &OwnedFd) -> stillpoint_linux::Result<OwnedFd> {
    let copy = mounts::copy(found)?;
    mounts::set_options(&copy, mounts::READ_ONLY | mounts::NO_ATIME)?;
    Ok(copy)
}

/// Whether a mount lies on all of what another one shows.
fn hides(mount: &Mount, below: &Mount) -> bool {
    mount.point == below.point
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_below_others() {
        let below = |above: &str, path: &str| below_path(above.as_bytes(), path.as_bytes());
        assert_eq!(below("/", "/a/b"), Some(b"a/b".to_vec()));
        assert_eq!(below("/a", "/a/b"), Some(b"b".to_vec()));
        assert_eq!(below("/a", "/a"), Some(Vec::new()));
        assert_eq!(below("/", "/"), Some(Vec::new()));
        assert_eq!(below("/a", "/ab"), None);
        assert_eq!(below("/a/b", "/a"), None);
    }

    #[test]
    fn what_hides_a_mount_is_told_by_their_list() {
        let mount = |id, parent, point: &str| Mount { id, parent, point: point.into(), ..Mount::default() };
        let mut all = vec![mount(1, 0, "/"), mount(2, 1, "/a/b"), mount(3, 2, "/a/b/c"), mount(4, 1, "/ab")];
        let seen = |all: &[Mount]| -> Vec<u64> {
            all.iter().filter(|mount| is_reached(all, mount)).map(|mount| mount.id).collect()
        };
        assert_eq!(seen(&all), [1, 2, 3, 4]);
        // Above two of them, and on the same place as one.
        all.push(mount(5, 1, "/a"));
        all.push(mount(6, 4, "/ab"));
        assert_eq!(seen(&all), [1, 5, 6]);
    }

    #[test]
    fn mounts_are_the_same_wherever_they_are_numbered() {
        let mount = |id, device| Mount { id, device, point: b"/x".to_vec(), ..Mount::default() };
        assert!(is_same(&mount(1, (0, 5)), &mount(2, (0, 5))));
        assert!(!is_same(&mount(1, (0, 5)), &mount(1, (0, 6))));
    }
}
