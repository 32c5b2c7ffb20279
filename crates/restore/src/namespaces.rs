//! The program's own namespaces: made and filled by threads of ours before there is a process, which then enters them by
//! our descriptors of them. If the restore fails, they go with those.

use crate::attributes::credentials;
use crate::files::Contents;
use crate::mounts::{Building, Systems, Within, build, procfs_of, received_from};
use crate::overlays::Anew;
use crate::{Error, Result, groups};
use rustix::fs::FileType;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use stillpoint_image::pids::namespace_of;
use stillpoint_image::users::{born_in, inherited, owner, users};
use stillpoint_image::{
    Credentials, FileSystem, IdRange, Image, Ipc, Mounts, Namespace, NetworkStep, PathFile, Process,
    Propagation, Setting, Socket, SystemV, Usage,
};
use stillpoint_linux::cgroups::Group;
use stillpoint_linux::messenger::{self, make_by, make_in};
use stillpoint_linux::mounts::{self, handle};
use stillpoint_linux::namespaces::{self, Visit, inside, inside_as};
use stillpoint_linux::proc::{NamespaceKind, Proc};
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::{Error as Kernel, Result as KernelResult, ipc, network};

/// The program's own namespaces, by row of [`Image::namespaces`].
#[derive(Debug, Default)]
pub struct Namespaces {
    made: Vec<(NamespaceKind, Option<OwnedFd>)>,
    /// Roots of mount namespaces, by row.
    roots: HashMap<u32, OwnedFd>,
    /// Mount namespaces with mounts that are not around them, by row.
    building: HashMap<u32, Building>,
    /// How settings of the network that sockets are in become what they were, when those are made.
    later: Vec<network::Step>,
}

/// Directories that the program holds in a mount namespace of its own, with their inode numbers.
fn directories(image: &Image, row: u32) -> Vec<(&Path, u64)> {
    let is_held = |file: &&PathFile| {
        let is_directory = FileType::from_raw_mode(file.mode) == FileType::Directory;
        file.namespace == Some(row) && is_directory && !file.deleted
    };
    image.paths.iter().filter(is_held).map(|file| (file.path.as_path(), file.ino)).collect()
}

impl Namespaces {
    /// Makes them, with what is in them.
    pub fn make(image: &Image, contents: &dyn Contents) -> Result<Self> {
        let mut all = Namespaces::default();
        for (row, namespace) in image.namespaces.iter().enumerate() {
            let kind = kind(namespace);
            let owner = owner(image, row as u32);
            let belongs_to = owner.map(|owner| all.row(owner)).transpose()?.map(|(_, file)| file);
            let file = match namespace {
                Namespace::User(users) => {
                    let made = crate::users::make(image, users, belongs_to);
                    Some(made.map_err(|e| match e {
                        Error::Kernel(e) => not_permitted(kind, e),
                        e => e,
                    })?)
                }
                // Those of process ids are made with their process 1.
                Namespace::Pid { .. } => None,
                Namespace::Mount { propagation, mounts, .. } => {
                    Some(all.make_mounts(image, row as u32, *propagation, mounts.as_ref(), contents)?)
                }
                // Its root is where who makes it is, and groups are made last.
                Namespace::Cgroup => None,
                _ => match belongs_to {
                    None => {
                        Some(namespaces::make(kind, || fill(namespace)).map_err(|e| not_permitted(kind, e))?)
                    }
                    Some(users) => {
                        let made = make_in(users, kind).map_err(|e| not_permitted(kind, e))?;
                        inside_as(root_of(image, owner), &[(kind, made.as_fd())], || fill(namespace))?;
                        Some(made)
                    }
                },
            };
            all.made.push((kind, file));
        }
        if let Some(row) = image.network {
            let (longest, pings) = (longest_queue(image), image.sockets.iter().any(is_ping));
            let owner = owner(image, row);
            all.later = all.within_as(image, row, owner, || Ok(network::open_wide(longest, pings)?))?;
        }
        Ok(all)
    }

    /// Makes those of control groups, with the groups where they begin: when nothing is known any more that stands against a restore.
    pub fn make_of_groups(&mut self, image: &Image) -> Result<()> {
        for row in 0..self.made.len() {
            let kind = self.made[row].0;
            if kind != NamespaceKind::Cgroup {
                continue;
            }
            let belongs_to = owner(image, row as u32).map(|owner| self.row(owner)).transpose()?;
            let users = belongs_to.map(|(_, file)| file.as_fd());
            let places: Vec<_> = groups::roots(image, row as u32).iter().map(Group::members).collect();
            let made = make_by(users, kind, &places).map_err(|e| not_permitted(kind, e))?;
            self.made[row].1 = Some(made);
        }
        Ok(())
    }

    fn make_mounts(
        &mut self,
        image: &Image,
        row: u32,
        propagation: Propagation,
        mounts: Option<&Mounts>,
        contents: &dyn Contents,
    ) -> Result<OwnedFd> {
        let space = |row| {
            let (kind, file) = self.row(row)?;
            let file = file.try_clone().map_err(|e| Kernel::call("duplicate a namespace", e))?;
            Ok((kind, file))
        };
        let owning = owner(image, row);
        let of = owning.map(|owning| self.row(owning)).transpose()?.map(|(_, file)| file);
        let within = users(image, owning).zip(of);
        let within = within.map(|(users, file)| Within { users, file, root: root_of(image, owning) });
        let systems = mounts.map(|mounts| Systems::make(mounts, contents, &space, within)).transpose()?;
        // What is around it is not what will be in it.
        let around = mounts.map(received_from).unwrap_or_default();
        let (mut building, mut root) = (None, None);
        let fill = || {
            match (mounts, systems) {
                (Some(mounts), Some(systems)) => {
                    let made = build(mounts, propagation, systems, around, within)?;
                    made.number(mounts, &directories(image, row));
                    building = Some(made);
                }
                _ => {
                    fill_mounts(propagation)?;
                    root = Some(handle(rustix::fs::CWD, Path::new("/"))?);
                }
            }
            Ok::<_, Error>(())
        };
        let file = match of {
            None => namespaces::make(NamespaceKind::Mount, fill),
            Some(users) => make_in(users, NamespaceKind::Mount).map_err(Error::from).and_then(|made| {
                inside(&[(NamespaceKind::Mount, made.as_fd())], fill)?;
                Ok(made)
            }),
        };
        let file = file.map_err(|e| match e {
            Error::Kernel(e) => not_permitted(NamespaceKind::Mount, e),
            e => e,
        })?;
        self.roots.extend(root.map(|root| (row, root)));
        self.building.extend(building.map(|building| (row, building)));
        Ok(file)
    }

    /// Whether there are namespaces in which paths may lead elsewhere.
    pub fn have_mounts(&self) -> bool {
        !self.roots.is_empty() || !self.building.is_empty()
    }

    fn root(&self, row: u32) -> Option<&OwnedFd> {
        self.roots.get(&row).or_else(|| Some(&self.building.get(&row)?.root))
    }

    /// An image with paths of files as we find them. Files on overlays are on devices of other numbers by now, and what is in memory only
    /// is as it was.
    pub fn reached(&self, image: &Image) -> Image {
        let mut image = image.clone();
        for file in &mut image.paths {
            if let Some(root) = file.namespace.and_then(|row| self.root(row)) {
                file.path.0.splice(0..0, way(root).into_bytes());
            }
            let building = file.namespace.and_then(|row| self.building.get(&row));
            if let Some(anew) = building.and_then(|building| building.overlay_at(file.path.as_path()))
                && let Ok(stat) = rustix::fs::lstat(file.path.as_path())
            {
                file.dev = stat.st_dev;
                file.made_anew |= match anew {
                    Anew::Everything => true,
                    Anew::Written => file.usage == Usage::Write,
                    Anew::Nothing => false,
                };
            }
        }
        image
    }

    /// A path of [`Namespaces::reached`] as it is called in the namespace.
    pub fn called<'p>(&self, namespace: Option<u32>, path: &'p Path) -> &'p Path {
        let way = namespace.and_then(|row| self.root(row)).map(way);
        let bytes = path.as_os_str().as_bytes();
        let rest = way.and_then(|way| bytes.strip_prefix(way.as_bytes()));
        rest.map_or(path, |rest| Path::new(OsStr::from_bytes(rest)))
    }

    /// A message with paths as they are called in their namespaces.
    pub fn told(&self, line: &str) -> String {
        let roots = self.roots.values().chain(self.building.values().map(|building| &building.root));
        roots.fold(line.to_owned(), |line, root| line.replace(&format!("{}/", way(root)), "/"))
    }

    /// Mounts procfs of pid namespaces where it was, by a process that is in both namespaces, and lets mounts share what they shared.
    pub fn complete_mounts(&mut self, image: &Image, members: &mut [&mut dyn Run]) -> Result<()> {
        for (&row, building) in &mut self.building {
            let file = self.made.get(row as usize).and_then(|(_, file)| file.as_ref());
            let file = file.ok_or_else(|| Error::Failed("a mount namespace is not there".into()))?;
            building.complete(image, row, file.as_fd(), members)?;
        }
        for (row, namespace) in image.namespaces.iter().enumerate() {
            let Namespace::Mount { proc: Some(of), .. } = namespace else { continue };
            let is_in = |p: &Process| p.namespaces.contains(of) && p.namespaces.contains(&(row as u32));
            let member = image.processes.iter().position(is_in).and_then(|at| members.get_mut(at));
            let member = member.ok_or_else(|| Error::Failed("procfs is that of nobody".into()))?;
            if owner(image, row as u32).is_some() {
                let (kind, file) = self.row(row as u32)?;
                let mount = procfs_of(member.pid(), &FileSystem::default())?;
                inside(&[(kind, file.as_fd())], || {
                    mounts::set_options(
                        &mount,
                        mounts::NO_SET_ID | mounts::NO_DEVICES | mounts::NO_EXECUTION,
                    )?;
                    mounts::place(&mount, handle(rustix::fs::CWD, Path::new("/proc"))?)
                })?;
                continue;
            }
            let mut program = Program::new();
            let (kind, place) = (program.string(b"proc"), program.string(b"/proc"));
            let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
            let args = [kind, place, kind, Arg::Value(flags), Arg::Value(0)];
            program.call("mount procfs", libc::SYS_mount, args);
            member.run(&program)?;
        }
        Ok(())
    }

    /// Gives files in file systems of the program's own the times that they had. When nothing is changed in them any more.
    pub fn settle_mounts(&self, image: &Image) -> Result<()> {
        for (row, building) in &self.building {
            if let Some(Namespace::Mount { mounts: Some(mounts), .. }) = image.namespaces.get(*row as usize) {
                building.settle(mounts)?;
            }
        }
        Ok(())
    }

    /// Makes settings what they were, when there is nothing left to be made that they might not allow.
    pub fn settle(&self, image: &Image) -> Result<()> {
        if let Some(row) = image.network {
            self.within_as(image, row, owner(image, row), || Ok(network::perform(&self.later)?))?;
        }
        for (row, namespace) in image.namespaces.iter().enumerate() {
            let Namespace::Ipc(of) = namespace else { continue };
            self.within(row as u32, || {
                for Setting { name, value } in &of.settings {
                    // One that this kernel does not have was never asked for by name.
                    let now = ipc::get(name)?;
                    if now.is_some_and(|now| now != value.as_bytes()) {
                        ipc::set(name, value.as_bytes())?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Lets a new process, which has copies of our descriptors, enter those that it was in, but for that of users, and those that it
    /// has from birth.
    pub fn enter(&self, image: &Image, process: &Process, remote: &mut dyn Run) -> Result<()> {
        let born = born_in(image, namespace_of(image, process));
        let has = if born.is_some() { inherited(image, process) } else { Vec::new() };
        let rows = process.namespaces.iter().filter(|row| !has.contains(row));
        let mut program = Program::new();
        self.enter_all(&mut program, rows)?;
        if !program.is_empty() {
            remote.run(&program)?;
        }
        Ok(())
    }

    fn enter_all<'r>(&self, program: &mut Program, rows: impl Iterator<Item = &'r u32>) -> Result<()> {
        for &row in rows {
            let kind = self.made.get(row as usize).map(|(kind, _)| *kind);
            if matches!(kind, Some(NamespaceKind::Pid | NamespaceKind::User)) {
                continue;
            }
            let (kind, file) = self.row(row)?;
            messenger::enter(program, kind, file);
        }
        Ok(())
    }

    /// Lets somebody who is to make process 1 of a pid namespace go into the user namespace to which that belongs, with all that `first`
    /// has from birth.
    pub fn begin(
        &self,
        image: &Image,
        users: u32,
        from: Option<u32>,
        first: Option<&Process>,
        remote: &mut dyn Run,
    ) -> Result<()> {
        let mut program = Program::new();
        if let Some(first) = first {
            self.enter_all(&mut program, inherited(image, first).iter())?;
            self.take_on(image, from, &first.threads[0].creds, &mut program, remote)?;
        }
        crate::users::enter(&mut program, self.row(users)?.1);
        remote.run(&program)?;
        Ok(())
    }

    /// Lets a process that was made in the user namespace `born` go into its own, with the users and groups that it has there.
    pub fn go_inside(
        &self,
        image: &Image,
        born: Option<u32>,
        own: u32,
        creds: &Credentials,
        remote: &mut dyn Run,
    ) -> Result<()> {
        let mut program = Program::new();
        self.take_on(image, born, creds, &mut program, remote)?;
        let (_, file) = self.row(own)?;
        if born != Some(own) {
            crate::users::enter(&mut program, file);
        } else if !program.is_empty() {
            credentials::keep_nothing(&mut program);
        }
        if !program.is_empty() {
            remote.run(&program)?;
        }
        // With what it is allowed elsewhere it must not run.
        let is_there = namespaces::open(&format!("/proc/{}", remote.pid()), NamespaceKind::User)?.1.id;
        let there = rustix::fs::fstat(file).map_err(|e| Kernel::call("look at a user namespace", e))?.st_ino;
        match is_there == there {
            true => Ok(()),
            false => Err(Error::Failed("a process is not in the user namespace in which it was".into())),
        }
    }

    /// Adds the calls by which who is in the user namespace `of` takes on users and groups.
    fn take_on(
        &self,
        image: &Image,
        of: Option<u32>,
        creds: &Credentials,
        program: &mut Program,
        remote: &dyn Run,
    ) -> Result<()> {
        let now = credentials::current(remote.pid())?;
        if (now.uid, now.gid, &now.groups) == (creds.uid, creds.gid, &creds.groups) {
            return Ok(());
        }
        match users(image, of) {
            None => crate::users::take_on(program, &now, creds),
            Some(users) => {
                let (now, want) = crate::users::inside(users, &now, creds)?;
                crate::users::take_on(program, &now, &want);
            }
        }
        Ok(())
    }

    /// Does something in one of them, on a thread that is made for it.
    pub fn within<T: Send>(&self, row: u32, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let (kind, file) = self.row(row)?;
        inside(&[(kind, file.as_fd())], work)
    }

    /// As [`Namespaces::within`], as the root of the user namespace to which it belongs, if that is the program's own.
    fn within_as<T: Send>(
        &self,
        image: &Image,
        row: u32,
        owner: Option<u32>,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        let (kind, file) = self.row(row)?;
        match owner {
            None => inside(&[(kind, file.as_fd())], work),
            Some(_) => inside_as(root_of(image, owner), &[(kind, file.as_fd())], work),
        }
    }

    /// Goes to the one that all sockets are in, if there is one, for as long as what is returned lives.
    pub fn visit_network(&self, image: &Image) -> Result<Option<Visit>> {
        let Some(row) = image.network else { return Ok(None) };
        let (kind, file) = self.row(row)?;
        Ok(Some(Visit::enter(kind, file)?))
    }

    fn row(&self, row: u32) -> Result<(NamespaceKind, &OwnedFd)> {
        let missing = || Error::Failed(format!("the manifest names namespace {row}, which is not there"));
        let found = self.made.get(row as usize).and_then(|(kind, file)| Some((*kind, file.as_ref()?)));
        found.ok_or_else(missing)
    }
}

fn kind(namespace: &Namespace) -> NamespaceKind {
    match namespace {
        Namespace::Uts { .. } => NamespaceKind::Uts,
        Namespace::Ipc(_) => NamespaceKind::Ipc,
        // No thread can enter one by itself.
        Namespace::Time { .. } => NamespaceKind::TimeForChildren,
        Namespace::Cgroup => NamespaceKind::Cgroup,
        Namespace::Network { .. } => NamespaceKind::Network,
        Namespace::Pid { .. } => NamespaceKind::Pid,
        Namespace::Mount { .. } => NamespaceKind::Mount,
        Namespace::User(_) => NamespaceKind::User,
    }
}

/// Whoever has the first names in a user namespace, its own superuser if there is one: what is made there is to be somebody's.
pub(crate) fn root_of(image: &Image, row: Option<u32>) -> (u32, u32) {
    let first = |ranges: &[IdRange]| {
        let root = ranges.iter().find(|range| range.inside == 0).or(ranges.first());
        root.map_or(0, |range| range.outside)
    };
    users(image, row).map_or((0, 0), |users| (first(&users.uids), first(&users.gids)))
}

fn fill(namespace: &Namespace) -> KernelResult<()> {
    match namespace {
        Namespace::Uts { host, domain } => namespaces::set_host_names(&host.0, &domain.0),
        Namespace::Ipc(ipc) => fill_ipc(ipc),
        Namespace::Time { monotonic_ns, boottime_ns } => shift_clocks(*monotonic_ns, *boottime_ns),
        Namespace::Network { up, steps } => fill_network(*up, steps),
        Namespace::Cgroup => Ok(()),
        Namespace::Pid { .. } | Namespace::Mount { .. } | Namespace::User(_) => Ok(()),
    }
}

fn fill_mounts(propagation: Propagation) -> KernelResult<()> {
    match propagation {
        Propagation::Unchanged => Ok(()),
        Propagation::Private => namespaces::set_propagation(false),
        Propagation::Slave => namespaces::set_propagation(true),
    }
}

/// How we come to a directory that we have open.
fn way(root: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", root.as_raw_fd())
}

/// The children of our main thread have the root's clocks.
fn shift_clocks(monotonic_ns: i64, boottime_ns: i64) -> KernelResult<()> {
    let of_root = Proc::process(std::process::id())?.time_offsets()?.unwrap_or_default();
    namespaces::set_clocks(of_root.0.saturating_add(monotonic_ns), of_root.1.saturating_add(boottime_ns))
}

fn fill_network(up: bool, steps: &[NetworkStep]) -> KernelResult<()> {
    if up {
        network::bring_up()?;
    }
    let step = |step: &NetworkStep| match step {
        NetworkStep::Setting { name, value } => {
            network::Step::Setting { name: name.clone(), value: value.0.clone() }
        }
        NetworkStep::Request { kind, body } => network::Step::Request { kind: *kind, body: body.0.clone() },
    };
    network::perform(&steps.iter().map(step).collect::<Vec<_>>())
}

/// An ICMP socket of datagrams, which only some groups may make.
fn is_ping(socket: &Socket) -> bool {
    let is_icmp = [libc::IPPROTO_ICMP as u32, libc::IPPROTO_ICMPV6 as u32].contains(&socket.protocol);
    let is_internet = [libc::AF_INET as u32, libc::AF_INET6 as u32].contains(&socket.family);
    is_internet && is_icmp && socket.kind == libc::SOCK_DGRAM as u32
}

/// So many datagrams wait in one of its unix sockets.
fn longest_queue(image: &Image) -> usize {
    let unix = image.sockets.iter().filter(|socket| socket.family == libc::AF_UNIX as u32);
    unix.map(|socket| socket.queue.len().max(socket.messages.len())).max().unwrap_or(0)
}

fn fill_ipc(of: &Ipc) -> KernelResult<()> {
    // Settings may have been changed since an object was made that they would not allow: for now they allow either.
    for Setting { name, value } in &of.settings {
        let wanted: Option<u64> = value.parse().ok();
        let now = ipc::get(name)?.and_then(|now| String::from_utf8_lossy(&now).parse().ok());
        if let (Some(wanted), Some(now)) = (wanted, now)
            && wanted > now
        {
            ipc::set(name, value.as_bytes())?;
        }
    }
    let longest = of.queues.iter().flat_map(|q| &q.messages).map(|m| m.text.0.len()).max().unwrap_or(0);
    let now = ipc::get("kernel/msgmax")?.and_then(|now| String::from_utf8_lossy(&now).parse().ok());
    if now.is_some_and(|now: usize| longest > now) {
        ipc::set("kernel/msgmax", longest.to_string().as_bytes())?;
    }
    for set in &of.semaphores {
        ipc::make_semaphores(&ipc::Semaphores { common: common(&set.common), values: set.values.clone() })?;
    }
    for queue in &of.queues {
        let messages = queue.messages.iter().map(|m| (m.kind, m.text.0.clone())).collect();
        ipc::make_queue(&ipc::Queue { common: common(&queue.common), capacity: queue.capacity, messages })?;
    }
    Ok(())
}

fn common(of: &SystemV) -> ipc::Common {
    ipc::Common {
        id: of.id,
        key: of.key,
        mode: of.mode,
        owner: (of.uid, of.gid),
        creator: (of.creator_uid, of.creator_gid),
    }
}

fn not_permitted(kind: NamespaceKind, e: Kernel) -> Error {
    match e.errno() {
        Some(libc::EPERM) => {
            let why = format!(
                "the program was in a {} namespace of its own; making one needs CAP_SYS_ADMIN",
                kind.name()
            );
            Error::Refused(vec![why])
        }
        _ => e.into(),
    }
}
