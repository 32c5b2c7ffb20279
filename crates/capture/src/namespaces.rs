//! Namespaces that the program made for itself: which there are, who is in them, and what is in them.
//!
//! They are looked for before the freeze. Where there are none, which is the rule, nothing of this is in it. A namespace is
//! the program's own if nobody outside the tree is in it; who made it cannot be told, and does not matter.

mod ipc;
mod mounted;
pub(crate) mod mounts;
mod overlays;
pub(crate) mod tmpfs;
pub(crate) mod users;
pub(crate) mod views;

use crate::attributes::target::{has_ended, named};
use crate::relations::descends;
use crate::target::Target;
use crate::{Builder, Error, Result};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use stillpoint_image as image;
use stillpoint_linux::namespaces::{self, host_names, inside};
use stillpoint_linux::proc::{self, Namespace, NamespaceKind, Proc};
use stillpoint_linux::{Error as Kernel, Result as KernelResult, messenger, network, sysv};

/// Kinds that can be captured, but time, of which there is nothing in a namespace that anybody could change.
const KINDS: [NamespaceKind; 7] = [
    NamespaceKind::Uts,
    NamespaceKind::Ipc,
    NamespaceKind::Cgroup,
    NamespaceKind::Network,
    NamespaceKind::Pid,
    NamespaceKind::Mount,
    NamespaceKind::User,
];

/// The namespaces of the program's own.
#[derive(Clone, Debug, Default)]
pub struct Namespaces {
    own: Vec<Own>,
    /// The newest process there was before it was looked who else is in them.
    last_pid: Option<u32>,
    /// They have been looked for.
    settled: bool,
}

/// A namespace of the program's own.
#[derive(Clone, Debug)]
struct Own {
    space: Namespace,
    /// By this it can be entered.
    file: Arc<OwnedFd>,
    /// Processes of the tree that are in it.
    pids: Vec<u32>,
    /// Its row in the image, when it is described.
    row: Option<u32>,
    /// Its shared memory, of System V.
    segments: Vec<(i32, sysv::Segment)>,
    /// Device number of its message queues.
    queues: Option<u64>,
    /// A new network namespace that was made the same as this one.
    remade: Option<Arc<network::Remade>>,
    /// The pid namespaces around it, or those of users, by their inode numbers: its own first, without that in which ids are told.
    around: Vec<u64>,
    /// The user namespace of the program's own to which it belongs.
    owner: Option<Owner>,
    /// What ids are called in it.
    names: Option<image::Users>,
}

/// A user namespace of the program's own, by its inode number and by what it can be entered.
type Owner = (u64, Arc<OwnedFd>);

/// What a mount namespace may show of another namespace of the program's own.
struct Other {
    space: Namespace,
    row: Option<u32>,
    file: Arc<OwnedFd>,
    pids: Vec<u32>,
}

/// What is told of a network namespace.
#[derive(Debug)]
struct Network {
    /// Its loopback interface is up.
    up: bool,
    tables: network::Tables,
    settings: network::State,
}

/// When a namespace is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// The program runs: only what stands against it counts.
    Running,
    /// It stands still; what takes long is looked at afterwards.
    Still,
    /// It stands still, and is not to be looked at again.
    Exactly,
}

impl Own {
    fn new(space: Namespace, file: OwnedFd, around: Vec<u64>, owner: Option<Owner>) -> Self {
        let (file, pids, segments) = (Arc::new(file), Vec::new(), Vec::new());
        let (row, queues, remade, names) = (None, None, None, None);
        Own { space, file, pids, row, segments, queues, remade, around, owner, names }
    }
}

impl Namespaces {
    /// Whether there are any.
    pub fn is_empty(&self) -> bool {
        self.own.is_empty()
    }

    /// Whether one is described, or will be.
    pub fn has(&self, space: &Namespace) -> bool {
        self.own.iter().any(|own| own.space == *space)
    }

    /// Does something in the IPC namespace of a process: here, if that is not one of the program's own.
    pub fn in_ipc_of<T: Send>(
        &self,
        pid: u32,
        work: impl FnOnce() -> KernelResult<T> + Send,
    ) -> KernelResult<T> {
        match self.ipc_of(pid) {
            Some(own) => inside(&[(own.space.kind, own.file.as_fd())], work),
            None => work(),
        }
    }

    /// Whether a process is in an IPC namespace of the program's own.
    pub fn has_ipc_of(&self, pid: u32) -> bool {
        self.ipc_of(pid).is_some()
    }

    /// The row of the IPC namespace of a process, if that is one of the program's own and is described.
    pub fn ipc_row(&self, pid: u32) -> Option<u32> {
        self.ipc_of(pid)?.row
    }

    /// The row of the IPC namespace whose message queues have this device number.
    pub fn row_of_queues(&self, device: u64) -> Option<u32> {
        self.own.iter().find(|own| own.queues == Some(device))?.row
    }

    /// Shared memory of all of the program's own namespaces that somebody is attached to, with their rows.
    pub fn attached_segments(&self) -> impl Iterator<Item = (u32, i32)> {
        let attached =
            |own: &Own| own.segments.iter().filter(|(_, s)| s.attachments > 0).map(|(id, _)| *id).collect();
        let all = self.own.iter().filter_map(move |own| Some((own.row?, attached(own))));
        all.flat_map(|(row, ids): (u32, Vec<i32>)| ids.into_iter().map(move |id| (row, id)))
    }

    /// Whether there are network namespaces among them.
    pub fn have_networks(&self) -> bool {
        self.own.iter().any(|own| own.space.kind == NamespaceKind::Network)
    }

    /// The file and the row of a network namespace, by its inode number; it has no row as long as the program runs.
    pub fn network(&self, id: u64) -> Option<(Arc<OwnedFd>, Option<u32>)> {
        let own = self.own.iter().find(|own| own.space == Namespace { kind: NamespaceKind::Network, id })?;
        Some((own.file.clone(), own.row))
    }

    fn ipc_of(&self, pid: u32) -> Option<&Own> {
        self.own.iter().find(|own| own.space.kind == NamespaceKind::Ipc && own.pids.contains(&pid))
    }

    /// What one of them may have to know of the others.
    fn others(&self) -> Vec<Other> {
        let other = |own: &Own| Other {
            space: own.space,
            row: own.row,
            file: own.file.clone(),
            pids: own.pids.clone(),
        };
        self.own.iter().map(other).collect()
    }

    fn pids_of(&self, id: u64) -> Option<&Own> {
        self.own.iter().find(|own| own.space == Namespace { kind: NamespaceKind::Pid, id })
    }

    fn users_of(&self, id: u64) -> Option<&Own> {
        self.own.iter().find(|own| own.space == Namespace { kind: NamespaceKind::User, id })
    }

    /// Whether a process that is found in an unknown namespace of this kind must have entered it after all were looked for.
    pub fn would_know(&self, kind: NamespaceKind) -> bool {
        self.settled && KINDS.contains(&kind)
    }
}

/// Finds the program's own namespaces, while it runs, and refuses those that are not its own alone.
pub(crate) fn learn(builder: &mut Builder, targets: &[Arc<Target>]) -> Result<()> {
    let mut found = Namespaces { last_pid: proc::last_pid(), settled: true, ..Namespaces::default() };
    let members: Vec<u32> = targets.iter().map(|t| t.pid).collect();
    find(builder, &mut found, &members)?;
    for target in targets {
        let kinds = [NamespaceKind::Time, NamespaceKind::TimeForChildren];
        if let Ok(theirs) = target.process.namespaces_of(&kinds) {
            refuse_other_clocks_for_children(builder, target.pid, &theirs);
        }
        if let Ok(theirs) = target.process.namespaces_of(&[NamespaceKind::Pid, NamespaceKind::PidForChildren])
            && let Children::Nowhere = children(&found, &theirs)
        {
            refuse_children_nowhere(builder, target.pid);
        }
    }
    if !found.is_empty() {
        refuse_shared(builder, &found, &members, proc::processes()?);
    }
    // What stands against it now will stand against it in the freeze. What is just changing cannot be read.
    let (others, mut devices) = (found.others(), HashSet::new());
    for own in &mut found.own {
        let mut rehearsed = Builder::at(&builder.home);
        rehearsed.noticed.clone_from(&builder.noticed);
        if !matches!(own.space.kind, NamespaceKind::Pid | NamespaceKind::User)
            && contents(&mut rehearsed, own, 0, &others, When::Running).is_ok()
        {
            builder.refusals.extend(rehearsed.refusals);
            devices.extend(rehearsed.views.mounted_anew());
            devices.extend(rehearsed.terminals.keys());
        }
    }
    if !devices.is_empty() {
        refuse_holders(builder, &devices, &members);
    }
    builder.namespaces = found;
    Ok(())
}

/// Finds those that were made since, of processes that stand still: of newcomers, and of all if the program makes namespaces at
/// all. A program that makes new ones all the time could never be captured otherwise.
pub(crate) fn learn_more(builder: &mut Builder, tree: &[u32], newcomers: &[u32]) -> Result<()> {
    let mut found = std::mem::take(&mut builder.namespaces);
    let before = found.own.len();
    let pids = if found.is_empty() { newcomers } else { tree };
    find(builder, &mut found, pids)?;
    if found.own.len() > before {
        refuse_shared(builder, &found, tree, proc::processes()?);
    }
    builder.namespaces = found;
    Ok(())
}

/// Adds the namespaces of these processes that are not ours.
fn find(builder: &mut Builder, found: &mut Namespaces, pids: &[u32]) -> Result<()> {
    if pids.is_empty() {
        return Ok(());
    }
    let mut ours = Proc::process(std::process::id())?.namespaces_of(&KINDS)?;
    ours.extend(&builder.home.private);
    for &pid in pids {
        let theirs = match Proc::process(pid).and_then(|p| p.namespaces_of(&KINDS)) {
            Err(Kernel::Gone(_)) => continue,
            theirs => theirs?,
        };
        for space in theirs.into_iter().filter(|space| !ours.contains(space)) {
            if let Some(own) = found.own.iter_mut().find(|own| own.space == space) {
                own.pids.push(pid);
                continue;
            }
            // It may have gone on to another one meanwhile, which the freeze finds.
            let Ok((file, space)) = namespaces::open(&format!("/proc/{pid}"), space.kind) else { continue };
            let (around, owner) = belongings(builder, found, &file, space)?;
            found.own.push(Own { pids: vec![pid], ..Own::new(space, file, around, owner) });
        }
    }
    Ok(())
}

/// Those that a namespace lies in, and the user namespace to which it belongs, where that is one of the program's own.
fn belongings(
    builder: &mut Builder,
    found: &mut Namespaces,
    file: &OwnedFd,
    space: Namespace,
) -> Result<(Vec<u64>, Option<Owner>)> {
    if space.kind == NamespaceKind::User {
        return Ok((users::lying_in(builder, found, file, space)?, None));
    }
    let owner = users::owner(builder, found, file, space)?;
    let around = match space.kind {
        NamespaceKind::Pid => around(builder, file, space)?,
        _ => Vec::new(),
    };
    Ok((around, owner))
}

/// A pid (or user) namespace and those that it lies in, by their inode numbers, up to that in which ids are told; one that lies
/// elsewhere is refused.
fn around(builder: &mut Builder, file: &OwnedFd, space: Namespace) -> Result<Vec<u64>> {
    let home = match builder.home.private.iter().find(|s| s.kind == space.kind) {
        Some(space) => space.id,
        None => namespaces::open("/proc/self", space.kind)?.1.id,
    };
    let mut all = vec![space.id];
    let mut next = namespaces::parent(file)?;
    while let Some((file, id)) = next.filter(|(_, id)| *id != home) {
        all.push(id);
        next = namespaces::parent(&file)?;
        if next.is_none() {
            builder.refuse(name(space.kind), "it lies in one that stillpoint is not in", HINT);
        }
    }
    Ok(all)
}

/// So many differences are told.
const FEW: usize = 5;
const HINT: &str = "run stillpoint inside of it, for example with nsenter(1)";

fn name(kind: NamespaceKind) -> String {
    match kind {
        NamespaceKind::Uts => "UTS namespace".into(),
        NamespaceKind::Ipc => "IPC namespace".into(),
        NamespaceKind::Network => "network namespace".into(),
        NamespaceKind::Mount => "mount namespace".into(),
        kind => format!("{} namespace", kind.name()),
    }
}

/// Refuses namespaces in which one of these processes is and that is not of the tree.
fn refuse_shared(builder: &mut Builder, own: &Namespaces, members: &[u32], processes: Vec<u32>) {
    let kinds: Vec<NamespaceKind> =
        KINDS.into_iter().filter(|kind| own.own.iter().any(|o| o.space.kind == *kind)).collect();
    for pid in processes {
        if members.contains(&pid) || pid == std::process::id() {
            continue;
        }
        for space in of_threads(pid, &kinds).unwrap_or_default() {
            // A child that the program has made meanwhile is found in the freeze.
            if own.has(&space) && !descends(pid, members) && !has_ended(pid) {
                let why = format!("{}, which is not part of the program, is in it too", named(pid));
                builder.refuse(name(space.kind), why, HINT);
            } else if space.kind == NamespaceKind::Pid
                && is_below(own, pid)
                && !descends(pid, members)
                && !has_ended(pid)
            {
                let why =
                    format!("{}, which is not part of the program, is in one that lies in it", named(pid));
                builder.refuse(name(space.kind), why, HINT);
            }
        }
    }
}

/// Refuses processes that are not of the tree and have files open, or mapped, in file systems that are made anew, or terminals in such a
/// one: they would go on with the old ones.
fn refuse_holders(builder: &mut Builder, devices: &HashSet<u64>, members: &[u32]) {
    let holds = |pid: u32| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        // Of what is known: whoever serves a file system may never answer.
        let known = |path| rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok();
        let mut of_open = open.filter_map(|fd| {
            let stat = known(fd.path())?;
            Some(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
        });
        let mapped = || Proc::process(pid).and_then(|process| process.maps()).unwrap_or_default();
        of_open.any(|device| devices.contains(&device)) || mapped().iter().any(|m| devices.contains(&m.dev))
    };
    for pid in proc::processes().unwrap_or_default() {
        let is_outside = !members.contains(&pid) && pid != std::process::id();
        if is_outside && holds(pid) && !descends(pid, members) && !has_ended(pid) {
            let why = format!(
                "{}, which is not part of the program, has files open in a file system that only the program has mounted",
                named(pid)
            );
            builder.refuse(name(NamespaceKind::Mount), why, "end that process, or let it close them");
        }
    }
}

/// Whether a process is in a pid namespace that lies in one of these, and is none of them.
fn is_below(own: &Namespaces, pid: u32) -> bool {
    let Ok((file, space)) = namespaces::open(&format!("/proc/{pid}"), NamespaceKind::Pid) else {
        return false;
    };
    let mut next = if own.has(&space) { None } else { namespaces::parent(&file).ok().flatten() };
    while let Some((file, id)) = next {
        if own.pids_of(id).is_some() {
            return true;
        }
        next = namespaces::parent(&file).ok().flatten();
    }
    false
}

/// Namespaces of all threads of a process.
fn of_threads(pid: u32, kinds: &[NamespaceKind]) -> KernelResult<Vec<Namespace>> {
    let process = Proc::process(pid)?;
    let mut all = Vec::new();
    for tid in process.threads()? {
        for space in process.sibling(tid)?.namespaces_of(kinds)? {
            if !all.contains(&space) {
                all.push(space);
            }
        }
    }
    Ok(all)
}

/// Describes the namespaces of the tree, which stands still; `pids` are all of its processes, of which the rows are
/// returned in their order.
pub(crate) fn describe(builder: &mut Builder, pids: &[u32], exact: bool) -> Result<Vec<Vec<u32>>> {
    let when = if exact { When::Exactly } else { When::Still };
    if builder.namespaces.is_empty() {
        return Ok(vec![Vec::new(); pids.len()]);
    }
    let mut found = std::mem::take(&mut builder.namespaces);
    // Those that were made since it was looked who else is in them.
    let newer = proc::made_since([found.last_pid]).unwrap_or_default();
    refuse_shared(builder, &found, pids, newer);
    found.own.iter_mut().for_each(|own| own.pids.clear());
    for &pid in pids {
        for space in Proc::process(pid)?.namespaces_of(&KINDS)? {
            found.own.iter_mut().filter(|own| own.space == space).for_each(|own| own.pids.push(pid));
        }
    }
    // A pid namespace stands behind that in which it lies, one of mounts behind all that can be seen in it.
    // And what belongs to a user namespace, behind that.
    let place = |own: &Own| match own.space.kind {
        NamespaceKind::User => 0,
        NamespaceKind::Pid => 1,
        NamespaceKind::Mount => 3,
        _ => 2,
    };
    found.own.sort_by_key(|own| (place(own), own.around.len()));
    let held = users::held(&found);
    for at in 0..found.own.len() {
        let parent = found.own[at].around.get(1).copied();
        let parent = parent.and_then(|id| found.pids_of(id)?.row);
        let others = if place(&found.own[at]) == 3 { found.others() } else { Vec::new() };
        if found.own[at].space.kind == NamespaceKind::User {
            if held.contains(&found.own[at].space.id) {
                users::describe(builder, &mut found, at)?;
            }
            continue;
        }
        let owner = found.own[at].owner.as_ref().and_then(|(id, _)| found.users_of(*id)?.row);
        let own = &mut found.own[at];
        if own.pids.is_empty() {
            continue;
        }
        tell_owner(builder, owner);
        if own.space.kind == NamespaceKind::Pid {
            if parent.is_none() && own.around.len() > 1 {
                let what =
                    "a process in a pid namespace, in another one that nobody is in any more, is just ending";
                return Err(Error::Passing(what.into()));
            }
            own.row = Some(builder.image.namespaces.len() as u32);
            builder.image.namespaces.push(image::Namespace::Pid { parent });
            continue;
        }
        let row = builder.image.namespaces.len() as u32;
        let contents = contents(builder, own, row, &others, when)?;
        builder.image.namespaces.push(contents);
        own.row = Some(row);
    }
    let of_process =
        |pid| found.own.iter().filter(|own| own.pids.contains(pid)).filter_map(|own| own.row).collect();
    let rows = pids.iter().map(of_process).collect();
    builder.namespaces = found;
    Ok(rows)
}

/// Tells to which user namespace the next row belongs.
fn tell_owner(builder: &mut Builder, owner: Option<u32>) {
    let row = builder.image.namespaces.len();
    if owner.is_some() {
        builder.image.owners.resize(row, None);
        builder.image.owners.push(owner);
    }
}

/// The row of the pid namespace of a process that has ended: if it was process 1, there may be nobody else who tells of it.
pub(crate) fn of_ended(builder: &mut Builder, pid: u32) -> Result<Option<u32>> {
    let (file, space) = namespaces::open(&format!("/proc/{pid}"), NamespaceKind::Pid)?;
    let mut found = std::mem::take(&mut builder.namespaces);
    let belongings = belongings(builder, &mut found, &file, space);
    builder.namespaces = found;
    let (around, owner) = belongings?;
    if let Some(own) = builder.namespaces.pids_of(space.id).filter(|own| own.row.is_some()) {
        return Ok(own.row);
    }
    let parent = around.get(1).and_then(|id| builder.namespaces.pids_of(*id)?.row);
    let owning = owner.as_ref().and_then(|(id, _)| builder.namespaces.users_of(*id)?.row);
    if owner.is_some() && owning.is_none() {
        let why = "it was in a pid namespace that belongs to a user namespace that nobody is in any more";
        builder.refuse(named(pid), why, "try again when the program has waited for it");
    }
    if parent.is_none() && around.len() > 1 {
        let why = "it was in a pid namespace that lies in one that nobody is in any more";
        builder.refuse(named(pid), why, "try again when the program has waited for it");
    }
    tell_owner(builder, owning);
    let row = builder.image.namespaces.len() as u32;
    builder.image.namespaces.push(image::Namespace::Pid { parent });
    let own = &mut builder.namespaces.own;
    own.retain(|own| own.space != space);
    own.push(Own::new(space, file, around, owner));
    own.iter_mut().filter(|own| own.space == space).for_each(|own| own.row = Some(row));
    Ok(Some(row))
}

/// Where further children of a process are to be.
enum Children {
    /// In its own pid namespace, or in one whose process 1 is still to be made.
    Here,
    Apart,
    /// In this one.
    In(u64),
    /// In one whose process 1 has ended: it can have none.
    Nowhere,
}

fn children(found: &Namespaces, theirs: &[Namespace]) -> Children {
    let of = |kind| theirs.iter().find(|s| s.kind == kind).map(|s| s.id);
    match (of(NamespaceKind::Pid), of(NamespaceKind::PidForChildren)) {
        (None, _) => Children::Here,
        (Some(_), None) => Children::Apart,
        (Some(own), Some(of_children)) if own == of_children => Children::Here,
        (_, Some(of_children)) => match found.pids_of(of_children).is_some_and(|own| !own.pids.is_empty()) {
            true => Children::In(of_children),
            false => Children::Nowhere,
        },
    }
}

fn refuse_children_nowhere(builder: &mut Builder, pid: u32) {
    let why = "its children are to be in a pid namespace whose process 1 has ended: it cannot have any";
    builder.refuse(
        named(pid),
        why,
        "try again when the program has waited for that process, and ended or begun another namespace",
    );
}

/// Describes where further children are to be, of processes that have said so. `theirs`: as for [`describe_clocks`].
pub(crate) fn describe_children(builder: &mut Builder, theirs: &[(u32, &[Namespace])]) -> Result<()> {
    for (row, &(pid, spaces)) in theirs.iter().enumerate() {
        let found = children(&builder.namespaces, spaces);
        let process = &mut builder.image.processes[row];
        match found {
            Children::Here => continue,
            Children::Apart => process.children_apart = true,
            Children::In(id) => {
                process.children_in = builder.namespaces.pids_of(id).and_then(|own| own.row);
            }
            Children::Nowhere => refuse_children_nowhere(builder, pid),
        }
        if builder.image.processes[row].threads.len() > 1 {
            let why = "its children are to be in another pid namespace, and it has several threads";
            builder.refuse(named(pid), why, "");
        }
    }
    Ok(())
}

/// What is in a namespace.
fn contents(
    builder: &mut Builder,
    own: &mut Own,
    row: u32,
    others: &[Other],
    when: When,
) -> Result<image::Namespace> {
    match own.space.kind {
        NamespaceKind::Mount => mounts::describe(builder, own, row, others, when),
        NamespaceKind::Uts => {
            let (host, domain) =
                inside(&[(own.space.kind, own.file.as_fd())], || Ok::<_, Error>(host_names()))?;
            Ok(image::Namespace::Uts { host: host.into(), domain: domain.into() })
        }
        NamespaceKind::Ipc => Ok(image::Namespace::Ipc(ipc::describe(builder, own, row, when)?)),
        NamespaceKind::Cgroup => {
            refuse_below(builder, own)?;
            Ok(image::Namespace::Cgroup)
        }
        NamespaceKind::Network => describe_network(builder, own, when),
        kind => Err(Error::Failed(format!("a {} namespace cannot be described", kind.name()))),
    }
}

/// Refuses processes that are not in the control group that is the root of their namespace: whoever restores may be in
/// another one.
fn refuse_below(builder: &mut Builder, own: &Own) -> Result<()> {
    let pids = own.pids.clone();
    let lines = inside(&[(own.space.kind, own.file.as_fd())], move || {
        let mut all = Vec::new();
        for pid in pids {
            all.extend(Proc::process(pid)?.cgroup()?.into_iter().map(|line| (pid, line)));
        }
        Ok::<_, Error>(all)
    })?;
    for (pid, line) in lines.iter().filter(|(_, line)| !line.ends_with(":/")) {
        let why = format!(
            "it is in another control group ({line}) than that which is the root of its cgroup namespace"
        );
        builder.refuse(named(*pid), why, "move it to that one, or begin the namespace where it is");
    }
    Ok(())
}

/// Describes a network namespace by what was done to a new one to make it the same, and refuses what else is in it.
fn describe_network(builder: &mut Builder, own: &mut Own, when: When) -> Result<image::Namespace> {
    let inside =
        |work: &(dyn Fn() -> Result<Network> + Sync)| inside(&[(own.space.kind, own.file.as_fd())], work);
    let look = |settings: bool| {
        if !(if when == When::Running { network::settle()? } else { network::is_settled()? }) {
            let what = "it is still asked whether an address of its network namespace is somebody else's";
            return Err(Error::Passing(what.into()));
        }
        let settings = if settings { network::settings() } else { network::State::new() };
        Ok(Network { up: network::is_up()?, tables: network::tables()?, settings })
    };
    let found = inside(&|| look(when != When::Still))?;
    let is_same = |remade: &&Arc<network::Remade>| {
        let settings = when == When::Still || remade.settings == found.settings;
        settings && remade.up == found.up && remade.tables == found.tables
    };
    let remade = match own.remade.as_ref().filter(is_same) {
        Some(remade) => remade.clone(),
        None if when == When::Running => Arc::new(found.remake(own.owner.as_ref())?),
        // To make one takes long, and addresses of it are waited for.
        None => {
            let what = "its network namespace has changed since it was looked at";
            return Err(Error::Passing(what.into()));
        }
    };
    let mut differences = found.tables.differences(&remade.tables);
    if !found.settings.is_empty() {
        let mut settings = network::differences(&found.settings, &remade.settings);
        // Those of another interface come with it.
        let interfaces: Vec<_> =
            differences.iter().filter_map(|told| told.strip_prefix("interface ")).collect();
        settings.retain(|name| !name.split('/').any(|part| part != "lo" && interfaces.contains(&part)));
        differences.extend(settings.into_iter().map(|name| format!("setting net/{name}")));
    }
    own.remade = Some(remade.clone());
    if !differences.is_empty() {
        let more = differences.len().saturating_sub(FEW);
        differences.truncate(FEW);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let why = format!("it has what cannot be made again in a new one: {}{more}", differences.join(", "));
        let what_to_do = "only a loopback interface with addresses and routes, rules, and settings (/proc/sys/net) are made again";
        builder.refuse(name(own.space.kind), why, what_to_do);
    } else if remade.steps.len() > image::NETWORK_STEPS {
        builder.refuse(name(own.space.kind), "more is set in it than an image has room for", "");
    }
    let step = |step: &network::Step| match step {
        network::Step::Setting { name, value } => {
            image::NetworkStep::Setting { name: name.clone(), value: value.clone().into() }
        }
        network::Step::Request { kind, body } => {
            image::NetworkStep::Request { kind: *kind, body: body.clone().into() }
        }
    };
    Ok(image::Namespace::Network { up: found.up, steps: remade.steps.iter().map(step).collect() })
}

impl Network {
    /// A new one that is made the same. It belongs to the same user namespace: not all settings are everybody's.
    fn remake(&self, owner: Option<&Owner>) -> Result<network::Remade> {
        let remake = || network::remake(self.up, (&self.tables, &self.settings));
        match owner {
            None => {
                let mut remade = None;
                drop(namespaces::make(NamespaceKind::Network, || {
                    remade = Some(remake()?);
                    Ok::<_, Error>(())
                })?);
                remade.ok_or_else(|| Error::Failed("a network namespace was not made".into()))
            }
            Some((_, users)) => {
                let made = messenger::make_in(users, NamespaceKind::Network)?;
                inside(&[(NamespaceKind::Network, made.as_fd())], || Ok(remake()?))
            }
        }
    }
}

/// Whether what was not looked at in the freeze ([`When::Still`]) has turned out to be as it was before.
pub(crate) fn hold(found: &Namespaces) -> Result<bool> {
    for own in found.own.iter().filter(|own| own.row.is_some()) {
        let Some(remade) = &own.remade else { continue };
        let settings = inside(&[(own.space.kind, own.file.as_fd())], || Ok::<_, Error>(network::settings()))?;
        if settings != remade.settings {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Describes time namespaces in which processes are whose clocks are not those of the root. `theirs`: the namespaces of each
/// process, in the order of the rows.
pub(crate) fn describe_clocks(builder: &mut Builder, theirs: &[(u32, &[Namespace])]) -> Result<()> {
    let of = |spaces: &[Namespace]| spaces.iter().find(|s| s.kind == NamespaceKind::Time).map(|s| s.id);
    let Some(&(root, spaces)) = theirs.first() else { return Ok(()) };
    let of_root = of(spaces);
    let mut rows: Vec<(u64, u32)> = Vec::new();
    for (row, &(pid, spaces)) in theirs.iter().enumerate() {
        refuse_other_clocks_for_children(builder, pid, spaces);
        let Some(id) = of(spaces).filter(|id| Some(*id) != of_root) else { continue };
        let known = rows.iter().find(|(known, _)| *known == id).map(|(_, row)| *row);
        let namespace = match known {
            Some(namespace) => namespace,
            None => {
                let offsets = |pid| Ok::<_, Error>(Proc::process(pid)?.time_offsets()?.unwrap_or_default());
                let (here, there) = (offsets(root)?, offsets(pid)?);
                let namespace = builder.image.namespaces.len() as u32;
                builder.image.namespaces.push(image::Namespace::Time {
                    monotonic_ns: there.0.saturating_sub(here.0),
                    boottime_ns: there.1.saturating_sub(here.1),
                });
                rows.push((id, namespace));
                namespace
            }
        };
        builder.image.processes[row].namespaces.push(namespace);
    }
    Ok(())
}

/// What the kernel tells of its clocks is what its children have.
fn refuse_other_clocks_for_children(builder: &mut Builder, pid: u32, spaces: &[Namespace]) {
    let of = |kind| spaces.iter().find(|s| s.kind == kind).map(|s| s.id);
    // One that ends between the two looks has none any more.
    let both = of(NamespaceKind::Time).zip(of(NamespaceKind::TimeForChildren));
    if both.is_some_and(|(own, of_children)| own != of_children) {
        let why = "its children are to be in another time namespace than it is";
        builder.refuse(
            named(pid),
            why,
            "let it execute a program, which enters that namespace (unshare without --fork)",
        );
    }
}
