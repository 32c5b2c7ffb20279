//! Descriptors of the target and the objects behind them.
//!
//! Every descriptor is duplicated into our process (`pidfd_getfd`) while the target stands still, and looked at there, with calls
//! that neither consume data nor move offsets. What is found becomes rows of the image, or is refused by name.
//!
//! | file | what it knows |
//! | --- | --- |
//! | [`descriptions`] | which descriptors share an open file description |
//! | [`outsiders`] | which other processes hold the same pipes, sockets, terminals |
//! | [`standard`] | which objects are standard streams from outside |
//! | [`behind`] | what waits behind a pipe that a supervisor fills |
//! | [`paths`] | files in the file system, deleted ones, procfs |
//! | [`mapped`] | files behind mappings |
//! | [`contents`] | storing contents, digests |
//! | [`noticed`] | what the program would be told of if we opened it |
//! | [`connections`] | TCP connections, and which two are the ends of one |
//! | [`datagrams`] | UDP, ICMP, raw and netlink sockets |
//! | [`segments`] | System V shared memory |
//! | [`messages`] | unread messages of unix sockets with more than bytes |
//! | [`pending`] | connections that wait to be accepted |
//! | [`queues`] | POSIX message queues |
//! | [`fanotify`] | groups of fanotify |
//! | [`devices`] | devices that keep nothing |
//! | [`pipes`], [`sockets`], [`terminals`], [`events`], [`memory`], [`locks`] | one kind of object each |

mod behind;
pub mod connections;
pub mod contents;
pub(crate) mod copied_up;
pub mod datagrams;
pub mod descriptions;
pub(crate) mod devices;
pub mod events;
pub mod fanotify;
pub mod locks;
pub mod mapped;
pub mod memory;
pub mod messages;
pub(crate) mod noticed;
pub mod options;
pub mod outsiders;
pub mod paths;
pub mod pending;
pub mod pipes;
pub mod queues;
pub mod segments;
pub mod sockets;
pub mod standard;
pub mod terminals;

use crate::builder::FOREIGN;
use crate::{Builder, Result};
use descriptions::{Description, Held};
use rustix::fs::FileType;
use standard::Standard;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::BorrowedFd;
use stillpoint_image::{Descriptor, FileKind, FileTable, OpenFile};
use stillpoint_linux::datagrams::Group;
use stillpoint_linux::descriptors::raise_descriptor_limit;
use stillpoint_linux::namespaces::{self, Visit};
use stillpoint_linux::network;
use stillpoint_linux::proc::{NamespaceKind, Proc, Stat};
use stillpoint_linux::sockets::UnixSocket;

pub(crate) use connections::refuse_signed;
pub use contents::{Moment, copy_content, take_digests_of};
pub(crate) use fanotify::{note_watches, refuse_questions, refuse_unread};
pub use mapped::{Mapped, mapped_file};
pub use memory::memory_object;
pub use noticed::Noticed;
pub use outsiders::Outsiders;
pub(crate) use paths::describe;
pub use paths::{deleted_content, is_view, note_open, path_file};

/// A process whose descriptors are captured.
#[derive(Clone, Copy, Debug)]
pub struct Holder<'a> {
    /// Its id in our pid namespace.
    pub pid: u32,
    /// A handle to it.
    pub pidfd: BorrowedFd<'a>,
    /// Its folder of `/proc`.
    pub process: &'a Proc,
}

/// The processes whose descriptors are captured. They stand still.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// All of them, the root first.
    pub holders: &'a [Holder<'a>],
    /// For each holder the first one that has the same descriptor table, by its place: itself if there is none before it.
    pub tables: &'a [usize],
    /// Streams from outside besides the standard ones that the root was started with, as far as that is known:
    /// descriptor and what `/proc/PID/fd` called it.
    pub inherited: &'a [(u32, Vec<u8>)],
    /// Who else holds what, looked up before they were frozen: this takes longer than all the rest.
    pub outsiders: &'a Outsiders,
}

/// Captures the descriptor tables of the target and everything behind them; returns the rows of the tables, in the order
/// of the holders.
///
/// What cannot be captured is among [`Builder::refusals`] afterwards; the rows that belong to it make no sense.
pub fn capture_files(builder: &mut Builder, target: &Target<'_>) -> Result<Vec<u32>> {
    // Each description of the target is one more descriptor of ours.
    raise_descriptor_limit()?;
    let mut all = descriptions::read(target)?;
    all.iter().for_each(|d| builder.noticed.add(&d.info.detail));
    let in_flight = messages::in_flight(&mut all)?;
    let mut scan = Scan::new(builder, target, &all)?;
    scan.in_flight = in_flight;
    let standard = Standard::find(&mut scan)?;
    let _visit = scan.enter_network(&standard)?;
    // Those that share a table have that of the first of them.
    let of_its_own: Vec<usize> =
        (0..target.holders.len()).filter(|&h| target.shares_table_of(h) == h).collect();
    let place = |holder: usize| of_its_own.partition_point(|&h| h < target.shares_table_of(holder));
    let mut tables = vec![FileTable::default(); of_its_own.len()];
    // Rows of descriptions come first and in order, so that epoll watches can refer to them before they are filled.
    let base = scan.base;
    scan.builder.image.files.resize(base as usize + all.len(), placeholder());
    for (index, description) in all.iter().enumerate() {
        let row = base + index as u32;
        if let Some(number) = standard.number(description) {
            let main = scan.open_file(description, FileKind::Stdio(number))?;
            scan.builder.image.files[row as usize] = main;
        } else if let Some(kind) = scan.kind(description, &standard)? {
            let file = scan.open_file(description, kind)?;
            if description.held.is_empty() && !messages::can_be_in_flight(&file) {
                let why = "it is in a message that was not yet read";
                scan.refuse::<()>(description, why, "try again when the program has read it")?;
            }
            scan.builder.image.files[row as usize] = file;
        }
        for &Held { process, fd, close_on_exec, .. } in &description.held {
            let file = scan.row_of_descriptor(&standard, index, fd)?;
            tables[place(process)].descriptors.push(Descriptor { fd, file, close_on_exec });
        }
    }
    terminals::refuse_strange(&mut scan);
    terminals::refuse_named(&mut scan);
    terminals::resolve(&mut scan)?;
    pending::resolve(&mut scan)?;
    sockets::resolve_senders(&mut scan);
    standard.capture_terminal(&mut scan)?;
    connections::complete(scan.builder, &mut scan.options)?;
    let first = builder.image.tables.len() as u32;
    tables.iter_mut().for_each(|table| table.descriptors.sort_by_key(|d| d.fd));
    builder.image.tables.extend(tables);
    Ok((0..target.holders.len()).map(|holder| first + place(holder) as u32).collect())
}

impl Target<'_> {
    /// The first holder that has the same descriptor table, by its place.
    fn shares_table_of(&self, holder: usize) -> usize {
        self.tables.get(holder).copied().unwrap_or(holder)
    }
}

fn placeholder() -> OpenFile {
    let kind = FileKind::Event { count: 0, semaphore: false };
    OpenFile { flags: 0, position: 0, kind, owner: None, locks: Vec::new() }
}

/// What is known while one table is captured.
pub struct Scan<'a> {
    pub(crate) builder: &'a mut Builder,
    pub(crate) target: &'a Target<'a>,
    pub(crate) all: &'a [Description],
    /// Row of the first description.
    base: u32,
    /// Extra rows: standard streams that share a description but may lead to different places after a restore.
    standard_rows: HashMap<(usize, u32), u32>,
    pub(crate) pipes: HashMap<(u64, u64), u32>,
    pub(crate) sockets: HashMap<u64, u32>,
    /// Datagram sockets that send to others of the program's by a name: inode numbers of both.
    pub(crate) senders: Vec<(u64, u64)>,
    /// By devpts, if it is one of the program's own, and number.
    pub(crate) ptys: HashMap<(u64, u32), u32>,
    pub(crate) unix: Option<HashMap<u32, UnixSocket>>,
    /// What has been shut down of UDP sockets, by family and inode number.
    shut_down: HashMap<i32, HashMap<u64, u8>>,
    /// Groups of IPv4 and IPv6 that somebody has joined.
    groups: HashMap<i32, Vec<Group>>,
    /// Messages with descriptors in them.
    pub(crate) in_flight: messages::InFlight,
    pub(crate) options: options::Defaults,
    /// The first holder is in our network namespace.
    same_network: bool,
    /// The network namespace that all sockets are in, or else ours, by its inode number.
    network: u64,
    /// What `stat` tells of the holders, and their process groups as they see them; looked up when that is first asked.
    stats: OnceCell<Vec<(Stat, u32)>>,
}

impl<'a> Scan<'a> {
    fn new(builder: &'a mut Builder, target: &'a Target<'a>, all: &'a [Description]) -> Result<Self> {
        let network = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        Ok(Scan {
            base: builder.image.files.len() as u32,
            builder,
            target,
            all,
            standard_rows: HashMap::new(),
            pipes: HashMap::new(),
            sockets: HashMap::new(),
            senders: Vec::new(),
            ptys: HashMap::new(),
            unix: None,
            shut_down: HashMap::new(),
            groups: HashMap::new(),
            in_flight: messages::InFlight::default(),
            options: options::Defaults::default(),
            same_network: network(&target.holders[0].pid.to_string()) == network("self"),
            network: namespaces::open("/proc/self", NamespaceKind::Network)?.1.id,
            stats: OnceCell::new(),
        })
    }

    /// Whether a socket is in the network namespace that all are in: in which it was made, wherever its process is by now.
    pub(crate) fn in_one_network(&self, d: &Description) -> Result<bool> {
        match self.builder.namespaces.have_networks() {
            true => Ok(network::namespace_of(&d.file)? == self.network),
            false => Ok(self.same_network),
        }
    }

    /// Whether a socket is in a network namespace of the program's own, where nobody else is.
    pub(crate) fn in_own_network(&self, d: &Description) -> Result<bool> {
        let spaces = &self.builder.namespaces;
        Ok(spaces.have_networks() && spaces.network(network::namespace_of(&d.file)?).is_some())
    }

    /// If all sockets are in one network namespace of the program's own, goes there for as long as what is returned lives.
    fn enter_network(&mut self, standard: &Standard) -> Result<Option<Visit>> {
        if !self.builder.namespaces.have_networks() {
            return Ok(None);
        }
        let mut all = Vec::new();
        for d in self.all.iter().filter(|d| messages::is_socket(d) && standard.number(d).is_none()) {
            all.push(network::namespace_of(&d.file)?);
        }
        let (Some(&first), true) = (all.first(), all.windows(2).all(|two| two[0] == two[1])) else {
            return Ok(None);
        };
        let Some((file, row)) = self.builder.namespaces.network(first) else { return Ok(None) };
        self.network = first;
        self.builder.image.network = row;
        // What was told of those here.
        self.unix = None;
        self.shut_down.clear();
        Ok(Some(Visit::enter(NamespaceKind::Network, &file)?))
    }

    /// Refuses a description for a reason; returns `None` for convenience.
    pub fn refuse<T>(&mut self, d: &Description, why: impl Into<String>, hint: &str) -> Result<Option<T>> {
        self.builder.refuse(d.name(), why, hint);
        Ok(None)
    }

    /// Row of a description in the image.
    pub fn row(&self, index: usize) -> u32 {
        self.base + index as u32
    }

    /// A process that sees what a description tells of, in our pid namespace: one that has it, or the first of all if it is only in an
    /// unread message.
    pub fn whose(&self, d: &Description) -> u32 {
        match d.pid() {
            0 => self.target.holders.first().map_or(0, |holder| holder.pid),
            pid => pid,
        }
    }

    /// Id of a thread of the target (or of one of its processes) as it sees it; `None` if it is none of the target's.
    pub fn inner_id(&self, tid: u32) -> Option<u32> {
        let of = |holder: &Holder<'_>| {
            Some(self.builder.home.tid(&holder.process.sibling(tid).ok()?.status().ok()?))
        };
        self.target.holders.iter().find_map(of)
    }

    /// Id of a process of the target as it sees it.
    pub fn inner_pid(&self, pid: u32) -> Option<u32> {
        let holder = self.target.holders.iter().find(|h| h.pid == pid)?;
        Some(self.builder.home.pid(&holder.process.status().ok()?))
    }

    /// What we call the process of the target that calls itself so.
    pub fn outer_pid(&self, inner: u32) -> Option<u32> {
        let is_it = |holder: &&Holder<'_>| {
            holder.process.status().is_ok_and(|status| self.builder.home.pid(&status) == inner)
        };
        self.target.holders.iter().find(is_it).map(|holder| holder.pid)
    }

    /// Whether a terminal is the controlling one of some process of the target, by device number. In a devpts of the program's own
    /// there may be one of the same number, which is another one.
    pub fn controls(&self, device: u64) -> bool {
        let own = terminals::own_sessions(self);
        self.stats().iter().any(|(stat, _)| u64::from(stat.tty) == device && !own.contains(&stat.session))
    }

    /// What `stat` tells of the holders, in their order, and their process groups as they see them; nothing of one that has
    /// ended.
    pub(crate) fn stats(&self) -> &[(Stat, u32)] {
        self.stats.get_or_init(|| {
            let of = |holder: &Holder<'_>| -> stillpoint_linux::Result<(Stat, u32)> {
                let (stat, status) = (holder.process.stat()?, holder.process.status()?);
                let group = self.builder.home.id(&status.ns_pgid, stat.pgrp);
                Ok((stat, group))
            };
            self.target.holders.iter().map(|holder| of(holder).unwrap_or_default()).collect()
        })
    }

    /// What `sock_diag` says about a unix socket.
    pub fn unix_socket(&mut self, ino: u32) -> Result<Option<UnixSocket>> {
        if self.unix.is_none() {
            let all = stillpoint_linux::sockets::unix_sockets()?;
            self.unix = Some(all.into_iter().map(|s| (s.ino, s)).collect());
        }
        Ok(self.unix.as_ref().and_then(|all| all.get(&ino)).cloned())
    }

    /// Which directions of a UDP socket have been shut down, as [`stillpoint_linux::inet_diag::shut_down`] tells.
    pub(crate) fn udp_shut_down(&mut self, family: i32, ino: u64) -> Result<u8> {
        if let Entry::Vacant(unknown) = self.shut_down.entry(family) {
            unknown.insert(stillpoint_linux::inet_diag::shut_down(family)?);
        }
        Ok(self.shut_down[&family].get(&ino).copied().unwrap_or(0))
    }

    /// Groups that sockets of this machine have joined.
    pub(crate) fn groups(&mut self, family: i32) -> Vec<Group> {
        self.groups.entry(family).or_insert_with(|| stillpoint_linux::datagrams::groups(family)).clone()
    }

    /// Whether a socket of the target has this name (`sun_path`).
    pub(crate) fn has_unix_name(&mut self, name: &[u8]) -> Result<bool> {
        for d in self.all.iter().filter(|d| messages::is_socket(d)) {
            let found = self.unix_socket(d.stat.st_ino as u32)?;
            if found.is_some_and(|s| messages::trimmed(&s.name) == name) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether any process listens on a unix socket of this name.
    pub(crate) fn is_listened_to(&mut self, name: &[u8]) -> Result<bool> {
        const LISTENS: u8 = 10;
        self.unix_socket(0)?; // looks at all
        let mut all = self.unix.iter().flat_map(|all| all.values());
        Ok(all.any(|s| s.state == LISTENS && s.name == name))
    }

    /// Whether any socket has this name.
    pub(crate) fn is_unix_name_taken(&mut self, name: &[u8]) -> Result<bool> {
        self.unix_socket(0)?; // looks at all
        let mut all = self.unix.iter().flat_map(|all| all.values());
        Ok(all.any(|s| messages::trimmed(&s.name) == name))
    }

    fn open_file(&mut self, d: &Description, kind: FileKind) -> Result<OpenFile> {
        let owner = locks::signal_owner(self, d)?;
        let locks = locks::locks(self, d)?;
        let flags = d.info.flags & !(libc::O_CLOEXEC as u32);
        Ok(OpenFile { flags, position: d.info.pos, kind, owner, locks })
    }

    /// The row a descriptor refers to: that of its description, except that each standard stream that it may be under its numbers has
    /// a row for itself, as they may lead to different places after a restore.
    pub fn row_of_descriptor(&mut self, standard: &Standard, index: usize, fd: u32) -> Result<u32> {
        let d = &self.all[index];
        match (standard.number(d), standard.number_of(d, fd)) {
            (Some(main), Some(number)) if number != main => {
                if let Some(&row) = self.standard_rows.get(&(index, number)) {
                    return Ok(row);
                }
                let file = self.open_file(d, FileKind::Stdio(number))?;
                let row = self.builder.image.files.len() as u32;
                self.builder.image.files.push(file);
                self.standard_rows.insert((index, number), row);
                Ok(row)
            }
            _ => Ok(self.row(index)),
        }
    }

    /// What a description refers to; `None` if it was refused.
    fn kind(&mut self, d: &Description, standard: &Standard) -> Result<Option<FileKind>> {
        let is_terminal = self.builder.terminals.contains_key(&d.stat.st_dev)
            && FileType::from_raw_mode(d.stat.st_mode) == FileType::CharacterDevice
            && !d.is_path_handle();
        if self.builder.foreign.contains(&d.stat.st_dev) && !is_terminal {
            return self.refuse(d, FOREIGN.0, FOREIGN.1);
        }
        if d.info.flags & libc::O_PATH as u32 != 0 {
            return paths::path_handle(self, d);
        }
        match FileType::from_raw_mode(d.stat.st_mode) {
            FileType::Fifo => pipes::capture(self, d),
            FileType::Socket => sockets::capture(self, d),
            FileType::CharacterDevice => terminals::device(self, d),
            FileType::RegularFile | FileType::Directory if !d.is_anonymous() => self.file(d),
            FileType::BlockDevice => {
                let why = "it is a block device, whose contents are not part of a checkpoint";
                self.refuse(d, why, "close it before the checkpoint")
            }
            _ => events::capture(self, d, standard),
        }
    }

    fn file(&mut self, d: &Description) -> Result<Option<FileKind>> {
        // What has no name is opened once more to be saved, which would break it.
        if d.stat.st_nlink == 0 && d.locks.iter().any(|(_, line)| locks::is_broken_by_opening(line)) {
            let why = "it holds a lease for writing on a file that has no name any more";
            return self.refuse(d, why, "give up the lease (fcntl F_SETLEASE) before the checkpoint");
        }
        match memory::is_memfd(d)? || memory::is_nameless(d) {
            true => memory::capture(self, d),
            false => paths::capture(self, d),
        }
    }
}
