//! The program's own namespaces: made and filled by threads of ours before there is a process, which then enters them by
//! our descriptors of them. If the restore fails, they go with those.

use crate::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use stillpoint_image::{Image, Ipc, Namespace, Process, Propagation, Setting, SystemV};
use stillpoint_linux::namespaces::{self, Visit, inside};
use stillpoint_linux::proc::{NamespaceKind, Proc};
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::{Error as Kernel, Result as KernelResult, ipc, network};

/// The program's own namespaces, by row of [`Image::namespaces`].
#[derive(Debug, Default)]
pub struct Namespaces {
    made: Vec<(NamespaceKind, Option<OwnedFd>)>,
}

impl Namespaces {
    /// Makes them, with what is in them.
    pub fn make(image: &Image) -> Result<Self> {
        let made = image.namespaces.iter().map(|namespace| {
            let kind = kind(namespace);
            // Those of process ids are made with their process 1.
            if kind == NamespaceKind::Pid {
                return Ok((kind, None));
            }
            let file = namespaces::make(kind, || fill(namespace)).map_err(|e| not_permitted(kind, e))?;
            Ok((kind, Some(file)))
        });
        Ok(Namespaces { made: made.collect::<Result<_>>()? })
    }

    /// Mounts procfs of pid namespaces where it was, by a process that is in both namespaces.
    pub fn mount_procs(&self, image: &Image, members: &mut [&mut dyn Run]) -> Result<()> {
        for (row, namespace) in image.namespaces.iter().enumerate() {
            let Namespace::Mount { proc: Some(of), .. } = namespace else { continue };
            let is_in = |p: &Process| p.namespaces.contains(of) && p.namespaces.contains(&(row as u32));
            let member = image.processes.iter().position(is_in).and_then(|at| members.get_mut(at));
            let member = member.ok_or_else(|| Error::Failed("procfs is that of nobody".into()))?;
            let mut program = Program::new();
            let (kind, place) = (program.string(b"proc"), program.string(b"/proc"));
            let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
            let args = [kind, place, kind, Arg::Value(flags), Arg::Value(0)];
            program.call("mount procfs", libc::SYS_mount, args);
            member.run(&program)?;
        }
        Ok(())
    }

    /// Makes settings what they were, when there is nothing left to be made that they might not allow.
    pub fn settle(&self, image: &Image) -> Result<()> {
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

    /// Lets a new process, which has copies of our descriptors, enter those that it was in.
    pub fn enter(&self, process: &Process, remote: &mut dyn Run) -> Result<()> {
        let mut program = Program::new();
        for &row in &process.namespaces {
            if self.made.get(row as usize).is_some_and(|(kind, _)| *kind == NamespaceKind::Pid) {
                continue;
            }
            let (kind, file) = self.row(row)?;
            let args = [Arg::Value(file.as_raw_fd() as u64), Arg::Value(kind.flag() as u64)];
            program.call(format!("enter a {} namespace", kind.name()), libc::SYS_setns, args);
        }
        if !program.is_empty() {
            remote.run(&program)?;
        }
        Ok(())
    }

    /// Does something in one of them, on a thread that is made for it.
    pub fn within<T: Send>(&self, row: u32, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let (kind, file) = self.row(row)?;
        inside(&[(kind, file.as_fd())], work)
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
    }
}

fn fill(namespace: &Namespace) -> KernelResult<()> {
    match namespace {
        Namespace::Uts { host, domain } => namespaces::set_host_names(&host.0, &domain.0),
        Namespace::Ipc(ipc) => fill_ipc(ipc),
        Namespace::Time { monotonic_ns, boottime_ns } => shift_clocks(*monotonic_ns, *boottime_ns),
        Namespace::Network { up: true } => network::bring_up(),
        Namespace::Network { up: false } | Namespace::Cgroup | Namespace::Pid { .. } => Ok(()),
        Namespace::Mount { propagation: Propagation::Unchanged, .. } => Ok(()),
        Namespace::Mount { propagation: Propagation::Private, .. } => namespaces::set_propagation(false),
        Namespace::Mount { propagation: Propagation::Slave, .. } => namespaces::set_propagation(true),
    }
}

/// The children of our main thread have the root's clocks.
fn shift_clocks(monotonic_ns: i64, boottime_ns: i64) -> KernelResult<()> {
    let of_root = Proc::process(std::process::id())?.time_offsets()?.unwrap_or_default();
    namespaces::set_clocks(of_root.0.saturating_add(monotonic_ns), of_root.1.saturating_add(boottime_ns))
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
