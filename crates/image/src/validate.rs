//! Whether a description is consistent in itself: every row it refers to exists, everything ordered is in order.
//!
//! A decoded image may come from anywhere. Whoever uses one that passed [`image`] and [`page_map`] can index its
//! tables and subtract its addresses without looking again.

use crate::pids::{DEEPEST, Pids, namespace_of};
use crate::{
    Backing, Bytes, Codec, Directories, Dispatch, Entry, FileKind, IPC_SETTINGS, IdRange, Image, Ipc,
    MADE_ANEW, MAX_BLOCK_PAGES, Mapping, MemoryObject, Mounted, Mounts, NETWORK_STEPS, NETWORK_VALUE,
    Namespace, NetworkStep, OF_THE_MACHINE, OVERLAY, OpenFile, Owner, PAGE, PageMap, Place, Process,
    Propagation, Receives, Role, Setting, Socket, SystemV, are_within_each_other, is_memory_device, tree,
    users,
};
use std::collections::{HashMap, HashSet};

/// What of `st_mode` is the type of a file, and that of a folder.
const FILE_TYPE: u32 = 0o170_000;
const FOLDER: u32 = 0o040_000;
/// Those of devices.
const CHARACTER_DEVICE: u32 = 0o020_000;
const BLOCK_DEVICE: u32 = 0o060_000;
/// Length of a `siginfo_t`, bytes.
const SIGINFO: usize = 128;
/// Most ranges of ids in a user namespace (`UID_GID_MAP_MAX_EXTENTS`).
const MOST_RANGES: usize = 340;
/// Longest host and domain name, bytes.
const HOST_NAME: usize = 64;
/// Longest description of a process outside, bytes: its number, and its name with each character told in ASCII.
const LONGEST_NAME: usize = 512;

/// What is wrong with a description.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// A row refers to a row that is not there.
    #[error("{what} {row} refers to {target} {index}, of which there are {count}")]
    Index {
        /// Table of the row.
        what: &'static str,
        /// The row.
        row: usize,
        /// Table it refers to.
        target: &'static str,
        /// Index it gives.
        index: u32,
        /// Rows that table has.
        count: usize,
    },
    /// A row contradicts itself or its neighbour.
    #[error("{what} {row}: {why}")]
    Row {
        /// Table of the row.
        what: &'static str,
        /// The row.
        row: usize,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// One row whose references are being looked up.
struct Row {
    what: &'static str,
    row: usize,
}

impl Row {
    fn refers(&self, target: &'static str, index: u32, count: usize) -> Result<(), Invalid> {
        if (index as usize) < count {
            return Ok(());
        }
        Err(Invalid::Index { what: self.what, row: self.row, target, index, count })
    }

    fn must(&self, holds: bool, why: &'static str) -> Result<(), Invalid> {
        if holds { Ok(()) } else { Err(Invalid::Row { what: self.what, row: self.row, why }) }
    }
}

fn rows<'t, T>(what: &'static str, table: &'t [T]) -> impl Iterator<Item = (Row, &'t T)> {
    table.iter().enumerate().map(move |(row, item)| (Row { what, row }, item))
}

/// Checks all cross references of an image and the order of its mappings and descriptors.
pub fn image(image: &Image) -> Result<(), Invalid> {
    check_tree(image)?;
    check_pids(image)?;
    for (row, process) in rows("process", &image.processes) {
        check_process(&row, process, image)?;
    }
    check_shared_memory(image)?;
    for (row, space) in rows("address space", &image.spaces) {
        let mut end = 0;
        for mapping in &space.mappings {
            row.must(mapping.start >= end, "its mappings are out of order or overlap")?;
            check_mapping(&row, mapping, image)?;
            end = mapping.end;
        }
    }
    for (row, object) in rows("memory object", &image.objects) {
        check_object(&row, object)?;
        check_is_ipc(&row, object.segment.as_ref().and_then(|s| s.namespace), image)?;
    }
    for (row, table) in rows("descriptor table", &image.tables) {
        let ordered = table.descriptors.is_sorted_by(|a, b| a.fd < b.fd);
        row.must(ordered, "its descriptors are out of order")?;
        for descriptor in &table.descriptors {
            row.refers("open file", descriptor.file, image.files.len())?;
        }
    }
    for (row, file) in rows("open file", &image.files) {
        check_open_file(&row, file, image)?;
    }
    for (row, path) in rows("file", &image.paths) {
        let sound = path.mapped_ranges.iter().all(|r| r.start.checked_add(r.len).is_some());
        row.must(sound, "a mapped range runs past the end of the address space")?;
        check_is_mount(&row, path.namespace, image)?;
        // It would be made, wherever that is.
        let is_device = path.deleted && matches!(path.mode & FILE_TYPE, CHARACTER_DEVICE | BLOCK_DEVICE);
        let is_harmless = path.mode & FILE_TYPE == CHARACTER_DEVICE && is_memory_device(path.rdev);
        row.must(!is_device || is_harmless, "it is a device that is not there any more")?;
    }
    for (row, pipe) in rows("pipe", &image.pipes) {
        if let Some(fifo) = pipe.fifo {
            row.refers("file", fifo, image.paths.len())?;
        }
        let readers = pipe.hung_up.as_ref().map_or(0, Vec::len);
        row.must(readers == 0 || pipe.fifo.is_some(), "it is no FIFO, and has readers of one")?;
        row.must(readers <= image.files.len(), "it has more readers than there are open files")?;
        for &file in pipe.hung_up.iter().flatten() {
            row.refers("open file", file, image.files.len())?;
        }
        let is_name = |who: &String| who.len() <= LONGEST_NAME && !who.contains(char::is_control);
        row.must(pipe.outside.as_ref().is_none_or(is_name), "who has its other end has no such name")?;
        let can_be_kept = image.kept.is_some() && pipe.outside.is_some();
        row.must(pipe.kept.is_none() || can_be_kept, "it is kept by nobody")?;
    }
    for (row, pty) in rows("pty", &image.ptys) {
        pty.multiplexer.map_or(Ok(()), |i| row.refers("file", i, image.paths.len()))?;
        let mut controls = pty.controls.iter().flatten();
        controls.try_for_each(|&file| row.refers("open file", file, image.files.len()))?;
    }
    for (row, queue) in rows("message queue", &image.queues) {
        let name = &queue.name.0;
        row.must(!name.is_empty() && !name.contains(&0) && !name.contains(&b'/'), "its name is none")?;
        check_is_ipc(&row, queue.namespace, image)?;
    }
    if let Some(network) = image.network {
        let row = Row { what: "image", row: 0 };
        row.refers("namespace", network, image.namespaces.len())?;
        let is_network = matches!(image.namespaces[network as usize], Namespace::Network { .. });
        row.must(is_network, "its sockets are in a namespace of another kind")?;
        let is_kept = image.sockets.iter().any(|socket| socket.kept.is_some());
        row.must(!is_kept, "sockets of a namespace of its own are kept")?;
    }
    let of_living = image.processes.iter().flat_map(|p| p.namespaces.iter().copied());
    let of_ended = image.processes.iter().flat_map(|p| p.ended().iter().filter_map(|e| e.namespace));
    for (row, namespace) in rows("namespace", &image.namespaces) {
        let &Namespace::Mount { proc, propagation, ref mounts } = namespace else { continue };
        if let Some(mounts) = mounts {
            row.must(proc.is_none(), "a procfs is told of twice")?;
            check_mounts(&row, mounts, image)?;
        }
        let Some(of) = proc else { continue };
        // It would be mounted around the program as well.
        row.must(
            propagation != Propagation::Unchanged,
            "it passes on what is mounted in it, and has a procfs",
        )?;
        let is_before = (of as usize) < row.row;
        let is_pid = matches!(image.namespaces.get(of as usize), Some(Namespace::Pid { .. }));
        row.must(is_before && is_pid, "its procfs is that of no pid namespace before it")?;
        let is_in = |p: &&Process| p.namespaces.contains(&of) && p.namespaces.contains(&(row.row as u32));
        row.must(
            image.processes.iter().any(|p| is_in(&p)),
            "nobody in it is in the pid namespace of its procfs",
        )?;
    }
    check_owners(image)?;
    let mut used: HashSet<u32> = of_living.chain(of_ended).collect();
    // A user namespace is held by what belongs to it, and by those that lie in it, all of which stand behind it.
    for row in (0..image.namespaces.len() as u32).rev() {
        if used.contains(&row) {
            used.extend(users::owner(image, row));
        }
    }
    for (row, namespace) in rows("namespace", &image.namespaces) {
        row.must(used.contains(&(row.row as u32)), "nobody is in it")?;
        check_namespace(&row, namespace)?;
    }
    for (row, group) in rows("control group", &image.groups) {
        let mut steps = group.path.split('/');
        let sound = steps.next() == Some("") && !steps.any(|step| step == ".." || step == ".");
        row.must(sound && !group.path.contains('\0'), "its path is none")?;
        let files = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        row.must(group.settings.iter().all(|(name, _)| files(name)), "a file of it is none")?;
    }
    for (row, socket) in rows("socket", &image.sockets) {
        if let Some(peer) = socket.peer {
            row.refers("socket", peer, image.sockets.len())?;
        }
        for message in &socket.messages {
            row.must(message.files.len() <= 253, "a message in it carries more descriptors than one can")?;
            message.files.iter().try_for_each(|f| row.refers("open file", *f, image.files.len()))?;
        }
        row.must(!socket.outside || socket.orphan, "its peer is outside, and yet it has one")?;
        row.must(socket.pending.is_empty() || socket.listening.is_some(), "it does not listen")?;
        // It would be made as one that is connected, and what waits be connected to whoever has its name.
        let is_connected = socket.peer.is_some() || socket.orphan || !socket.remote.0.is_empty();
        row.must(socket.listening.is_none() || !is_connected, "it listens, and is connected")?;
        socket.pending.iter().try_for_each(|s| row.refers("socket", *s, image.sockets.len()))?;
        if let Some(other) = socket.sends_to {
            row.refers("socket", other, image.sockets.len())?;
        }
        for path in socket.path.iter().chain(&socket.renamed_from) {
            row.refers("file", *path, image.paths.len())?;
        }
        row.must(
            socket.renamed_from.is_none() || socket.path.is_some(),
            "its file was renamed, and yet it has none",
        )?;
        for who in socket.told.iter().chain(&socket.waits_as) {
            let is_named = ![who.uid, who.gid].contains(&u32::MAX) && !who.groups.contains(&u32::MAX);
            row.must(is_named && who.groups.len() <= 65_536, "its other end is nobody's")?;
        }
        check_is_mount(&row, socket.mounts, image)?;
        check_connection(&row, socket, image)?;
    }
    let of_sockets = image.sockets.iter().filter_map(|socket| socket.kept);
    let mut kept: Vec<u32> = of_sockets.chain(image.pipes.iter().filter_map(|pipe| pipe.kept)).collect();
    kept.sort_unstable();
    let row = Row { what: "image", row: 0 };
    row.must(kept.iter().zip(0..).all(|(&place, n)| place == n), "what is kept is not in order")?;
    Ok(())
}

/// The first process is the root, all others stand behind their parents, and no id is there twice.
fn check_tree(image: &Image) -> Result<(), Invalid> {
    let mut ids = HashSet::new();
    for (row, process) in rows("process", &image.processes) {
        let is_root = row.row == 0;
        row.must(process.parent.is_none() == is_root, "it has no parent, or is the root and has one")?;
        let behind = process.parent.is_none_or(|parent| (parent as usize) < row.row);
        row.must(behind, "it stands before its parent")?;
        let leader = process.threads.first().is_none_or(|t| t.tid == process.pid);
        row.must(leader, "its first thread is not its main thread")?;
        let all = process.threads.iter().map(|t| t.tid).chain(process.ended().iter().map(|e| e.pid));
        for id in all {
            row.must(id > 0 && i32::try_from(id).is_ok(), "an id of it is none")?;
            row.must(ids.insert(id), "an id of it is there twice")?;
        }
    }
    Ok(())
}

/// What belongs to an address space is the same for all that have it.
fn check_shared_memory(image: &Image) -> Result<(), Invalid> {
    let mut firsts: HashMap<u32, (usize, bool)> = HashMap::new();
    for (row, process) in rows("process", &image.processes) {
        if let Some(other) = process.shares_actions {
            row.must((other as usize) < row.row, "it shares the signal actions of a later one")?;
            let other = &image.processes[other as usize];
            row.must(
                other.space == process.space,
                "it shares signal actions without the memory they are in",
            )?;
            let same = other.actions == process.actions && other.shares_actions.is_none();
            row.must(same, "it shares signal actions that are not its own")?;
        }
        let is_time = |row: &u32| matches!(image.namespaces[*row as usize], Namespace::Time { .. });
        let has_clocks = process.namespaces.iter().any(is_time);
        let Some(&(first, clocks)) = firsts.get(&process.space) else {
            firsts.insert(process.space, (row.row, has_clocks));
            continue;
        };
        row.must(!has_clocks && !clocks, "it shares its memory, and has clocks of its own")?;
        row.must(
            image.processes[first].exe == process.exe,
            "it executes another program in the same memory",
        )?;
    }
    Ok(())
}

/// Pid namespaces lie in each other without a circle. Whoever is in one has an id in it and in each around it, which nobody else has
/// there; each has one process 1, and is empty besides if that has ended.
fn check_pids(image: &Image) -> Result<(), Invalid> {
    let depths = depths(image)?;
    let pids = Pids::of(image);
    let mut ids = Ids { depths: &depths, pids: &pids, taken: HashSet::new(), first: HashSet::new() };
    let (mut living, mut dead) = (HashSet::new(), HashSet::new());
    for (row, process) in rows("process", &image.processes) {
        let namespace = namespace_of(image, process);
        living.extend(namespace);
        for (place, thread) in process.threads.iter().enumerate() {
            ids.take(&row, namespace, &thread.inner, place == 0)?;
        }
        for ended in process.ended() {
            ids.take(&row, ended.namespace, &ended.inner, true)?;
            dead.extend(ended.namespace.filter(|_| ended.inner.last() == Some(&1)));
        }
    }
    for (row, process) in rows("process", &image.processes) {
        let apart = process.children_in.is_some() || process.children_apart;
        row.must(
            !apart || process.threads.len() == 1,
            "its children are elsewhere, and it has several threads",
        )?;
        let Some(namespace) = process.children_in else { continue };
        row.refers("namespace", namespace, image.namespaces.len())?;
        row.must(depths[namespace as usize].is_some(), "its children are in a namespace of another kind")?;
        let inside = pids.lies_in(Some(namespace), namespace_of(image, process));
        row.must(inside && !process.children_apart, "its children cannot be in that pid namespace")?;
        row.must(!dead.contains(&namespace), "its children are to be where process 1 has ended")?;
    }
    let lost = tree::lost_leaders(image);
    for (row, leader) in rows("leader", &image.leaders) {
        row.refers("namespace", leader.namespace, image.namespaces.len())?;
        ids.take(&row, Some(leader.namespace), &leader.inner, false)?;
        row.must(lost.contains(&leader.pid), "it leads nobody, or is there")?;
    }
    let first = ids.first;
    for (row, _) in rows("namespace", &image.namespaces).filter(|(row, _)| depths[row.row].is_some()) {
        let number = row.row as u32;
        row.must(first.contains(&number), "there is no process 1 in it")?;
        row.must(
            !dead.contains(&number) || !living.contains(&number),
            "its process 1 has ended, others have not",
        )?;
    }
    Ok(())
}

/// How many pid namespaces of the program's own each lies in, with itself; none of those of other kinds.
fn depths(image: &Image) -> Result<Vec<Option<usize>>, Invalid> {
    let mut depths: Vec<Option<usize>> = Vec::with_capacity(image.namespaces.len());
    for (row, namespace) in rows("namespace", &image.namespaces) {
        let Namespace::Pid { parent } = namespace else {
            depths.push(None);
            continue;
        };
        let depth = match parent {
            None => Some(1),
            Some(parent) => depths.get(*parent as usize).copied().flatten().map(|depth| depth + 1),
        };
        row.must(depth.is_some(), "it lies in a namespace that is none for process ids before it")?;
        row.must(depth.is_some_and(|depth| depth <= DEEPEST), "it lies too deep")?;
        depths.push(depth);
    }
    Ok(depths)
}

/// Who has which ids in pid namespaces, as far as was looked.
struct Ids<'a> {
    depths: &'a [Option<usize>],
    pids: &'a Pids<'a>,
    taken: HashSet<(u32, u32)>,
    /// Namespaces that have a process 1.
    first: HashSet<u32>,
}

impl Ids<'_> {
    fn take(
        &mut self,
        row: &Row,
        namespace: Option<u32>,
        inner: &[u32],
        can_be_first: bool,
    ) -> Result<(), Invalid> {
        let depth = match namespace {
            None => Some(0),
            Some(namespace) => self.depths.get(namespace as usize).copied().flatten(),
        };
        row.must(depth == Some(inner.len()), "it has not one id for each pid namespace that it is in")?;
        let mut at = namespace;
        for (level, &id) in inner.iter().rev().enumerate() {
            row.must(id > 0 && i32::try_from(id).is_ok(), "an id of it in a pid namespace is none")?;
            let Some(here) = at else { break };
            row.must(self.taken.insert((here, id)), "an id of it is there twice in a pid namespace")?;
            if id == 1 {
                row.must(level == 0 && can_be_first, "it cannot be process 1 of a pid namespace")?;
                self.first.insert(here);
            }
            at = self.pids.parent(here);
        }
        Ok(())
    }
}

/// The ends of a connection are each other's peers; datagrams have one sender each.
fn check_connection(row: &Row, socket: &Socket, image: &Image) -> Result<(), Invalid> {
    let senders = socket.senders.as_ref().is_none_or(|s| s.len() == socket.queue.len());
    row.must(senders, "its datagrams and their senders are not as many")?;
    row.must(socket.kept.is_none() || image.kept.is_some(), "it is kept by nobody")?;
    let Some(connection) = &socket.connection else { return Ok(()) };
    row.must(socket.queue.len() <= 1, "the queue of a connection is in pieces")?;
    row.must(socket.listening.is_none(), "a connection cannot listen")?;
    let Some(peer) = socket.peer.and_then(|p| image.sockets.get(p as usize)) else { return Ok(()) };
    row.must(peer.peer == Some(row.row as u32), "its peer has another peer")?;
    row.must(socket.peer != Some(row.row as u32), "it is its own peer")?;
    let other = peer.connection.as_ref();
    row.must(other.is_some() && !connection.remote.0.is_empty(), "its peer is no connection")?;
    row.must(!socket.local.0.is_empty(), "a connection has no address")
}

/// Options of prctl(2) that may be among [`crate::Thread::choices`]: `PR_MCE_KILL`, `PR_SET_SPECULATION_CTRL`, `PR_SET_IO_FLUSHER`.
const CHOICES: [u64; 3] = [33, 53, 57];

/// Behind all addresses that a program can have (`TASK_SIZE_MAX` with five levels of page tables).
const ADDRESSES: u64 = 1 << 56;

fn check_process(row: &Row, process: &Process, image: &Image) -> Result<(), Invalid> {
    row.must(!process.threads.is_empty(), "it has no thread")?;
    row.must(process.threads[0].tid == process.pid, "its first thread is not its main one")?;
    let id_is_one = |id: u32| id > 0 && i32::try_from(id).is_ok();
    row.must(process.threads.iter().all(|t| id_is_one(t.tid)), "a thread in it has no id that there can be")?;
    let is_choice = |choice: &[u64; 3]| CHOICES.contains(&choice[0]);
    row.must(
        process.threads.iter().flat_map(|t| &t.choices).all(is_choice),
        "a thread in it has chosen what cannot be",
    )?;
    let is_dispatch = |d: &Dispatch| (d.offset == 0 || d.len > 0) && d.selector < ADDRESSES;
    row.must(
        process.threads.iter().flat_map(|t| &t.dispatch).all(is_dispatch),
        "a thread in it dispatches its system calls as none can",
    )?;
    row.refers("address space", process.space, image.spaces.len())?;
    row.refers("descriptor table", process.table, image.tables.len())?;
    if let Some(other) = process.shares_fs {
        row.must((other as usize) < row.row, "it shares its current directory with a later one")?;
        let other = &image.processes[other as usize];
        let same = (other.cwd, other.root, other.umask) == (process.cwd, process.root, process.umask);
        row.must(other.shares_fs.is_none() && same, "it shares a current directory that is not its own")?;
    }
    let all_pending = process.threads.iter().flat_map(|t| &t.pending).chain(&process.pending);
    row.must(all_pending.into_iter().all(|p| p.0.len() == SIGINFO), "a signal that waits for it is cut off")?;
    let is_signal = |signal: u32| (1..=64).contains(&signal);
    row.must(process.actions.iter().all(|a| is_signal(a.signal)), "it handles a signal that there is not")?;
    for path in [process.exe, process.cwd, process.root] {
        row.refers("file", path, image.paths.len())?;
    }
    check_directories(row, process, image)?;
    // (Its parent's row is before it.)
    let parent = process.parent.and_then(|parent| image.processes.get(parent as usize));
    let is_thread = |of: Option<&Process>, tid: Option<u32>| {
        tid.is_none_or(|tid| of.is_some_and(|p| p.threads.iter().skip(1).any(|t| t.tid == tid)))
    };
    row.must(is_thread(parent, process.parent_thread), "it is the child of a thread that there is not")?;
    let of_ended = process.ended().iter().all(|e| is_thread(Some(process), e.parent_thread));
    row.must(of_ended, "an ended child of it is that of a thread that there is not")?;
    check_namespaces(row, process, image)
}

fn check_directories(row: &Row, process: &Process, image: &Image) -> Result<(), Invalid> {
    for (place, thread) in process.threads.iter().enumerate() {
        let Some(own) = thread.directories else { continue };
        row.must(place > 0, "its main thread has directories apart from its own")?;
        row.refers("file", own.cwd, image.paths.len())?;
        row.refers("file", own.root, image.paths.len())?;
        let Some(first) = own.shares else { continue };
        let first = process.threads[..place].iter().find(|t| t.tid == first).and_then(|t| t.directories);
        let same = first.is_some_and(|first| first == Directories { shares: None, ..own });
        row.must(same, "a thread in it shares directories that are not its own")?;
    }
    Ok(())
}

/// At most one of each kind.
fn check_namespaces(row: &Row, process: &Process, image: &Image) -> Result<(), Invalid> {
    let mut kinds = HashSet::new();
    for &namespace in &process.namespaces {
        row.refers("namespace", namespace, image.namespaces.len())?;
        let kind = image.namespaces[namespace as usize].kind();
        row.must(kinds.insert(kind), "it is in two namespaces of a kind")?;
        row.must(row.row > 0 || kind != "time", "the clocks of the root differ from its own")?;
    }
    // It attaches what is in its own namespace.
    let is_ipc = |row: &&u32| matches!(image.namespaces[**row as usize], Namespace::Ipc(_));
    let own = process.namespaces.iter().find(is_ipc).copied();
    let mappings = image.spaces.get(process.space as usize).map(|s| s.mappings.as_slice());
    for mapping in mappings.unwrap_or_default() {
        let Backing::Segment { object, .. } = mapping.backing else { continue };
        let segment = image.objects.get(object as usize).and_then(|o| o.segment.as_ref());
        let inside = segment.is_none_or(|s| s.namespace == own);
        row.must(inside, "it is attached to shared memory of another IPC namespace")?;
    }
    Ok(())
}

/// A namespace that an object is in.
fn check_is_ipc(row: &Row, namespace: Option<u32>, image: &Image) -> Result<(), Invalid> {
    let Some(namespace) = namespace else { return Ok(()) };
    row.refers("namespace", namespace, image.namespaces.len())?;
    let is_ipc = matches!(image.namespaces[namespace as usize], Namespace::Ipc(_));
    row.must(is_ipc, "it is in a namespace of another kind")
}

fn check_ipc(row: &Row, ipc: &Ipc) -> Result<(), Invalid> {
    const MOST_SEMAPHORES: usize = 32000;
    const HIGHEST: u16 = 32767;
    for Setting { name, value } in &ipc.settings {
        row.must(IPC_SETTINGS.contains(&name.as_str()), "a setting of it is none")?;
        let numbers = value.bytes().all(|b| b.is_ascii_digit() || b == b' ' || b == b'\t');
        row.must(numbers && value.len() <= 100, "a setting of it is no number")?;
    }
    let is_one = |common: &SystemV| common.id >= 0 && common.mode <= 0o777;
    for set in &ipc.semaphores {
        row.must(is_one(&set.common), "a set of semaphores in it has no id or mode that there can be")?;
        row.must(
            (1..=MOST_SEMAPHORES).contains(&set.values.len()),
            "a set in it has no semaphores, or too many",
        )?;
        row.must(set.values.iter().all(|v| *v <= HIGHEST), "a semaphore in it is higher than any can be")?;
    }
    for queue in &ipc.queues {
        row.must(is_one(&queue.common), "a message queue in it has no id or mode that there can be")?;
        row.must(queue.messages.iter().all(|m| m.kind > 0), "a message in it has no type")?;
    }
    let mut ids = HashSet::new();
    let sets = ipc.semaphores.iter().map(|s| (false, s.common.id));
    let all = sets.chain(ipc.queues.iter().map(|q| (true, q.common.id)));
    row.must(all.into_iter().all(|id| ids.insert(id)), "two objects in it have one id")
}

/// What belongs to a user namespace stands behind it; ids in it have one name each.
fn check_owners(image: &Image) -> Result<(), Invalid> {
    let row = Row { what: "image", row: 0 };
    row.must(image.owners.len() <= image.namespaces.len(), "namespaces are owned that are not there")?;
    for (row, namespace) in rows("namespace", &image.namespaces) {
        let told = image.owners.get(row.row).copied().flatten();
        let users = match namespace {
            Namespace::User(users) => Some(users),
            _ => None,
        };
        row.must(told.is_none() || users.is_none(), "a user namespace is told to belong to another one")?;
        if let Some(owner) = users.map_or(told, |users| users.parent) {
            let is_one = (owner as usize) < row.row && users::users(image, Some(owner)).is_some();
            row.must(is_one, "it belongs to no user namespace before it")?;
        }
        for ranges in users.into_iter().flat_map(|users| [&users.uids, &users.gids]) {
            row.must(ranges.len() <= MOST_RANGES, "there are more ranges of ids than there can be")?;
            for side in [|range: &IdRange| range.inside, |range: &IdRange| range.outside] {
                let mut all: Vec<(u32, u32)> =
                    ranges.iter().map(|range| (side(range), range.count)).collect();
                all.sort_unstable();
                let ends = |(first, count): &(u32, u32)| first.checked_add(*count).filter(|_| *count > 0);
                row.must(
                    all.iter().all(|range| ends(range).is_some()),
                    "a range of ids has no end, or is empty",
                )?;
                let apart = all.windows(2).all(|pair| ends(&pair[0]).is_some_and(|end| end <= pair[1].0));
                row.must(apart, "an id has two names in it")?;
            }
        }
    }
    Ok(())
}

fn check_namespace(row: &Row, namespace: &Namespace) -> Result<(), Invalid> {
    match namespace {
        Namespace::Uts { host, domain } => {
            let is_name = |name: &[u8]| name.len() <= HOST_NAME && !name.contains(&0);
            row.must(is_name(&host.0) && is_name(&domain.0), "its name is none")
        }
        Namespace::Ipc(ipc) => check_ipc(row, ipc),
        // Pid namespaces with the processes in them ([`check_pids`]).
        Namespace::Time { .. } | Namespace::Cgroup => Ok(()),
        Namespace::Network { steps, .. } => check_network(row, steps),
        Namespace::Pid { .. } | Namespace::Mount { .. } => Ok(()),
        // With what belongs to them ([`check_owners`]).
        Namespace::User(_) => Ok(()),
    }
}

/// Which settings and requests there are, the program that makes the namespace knows.
fn check_network(row: &Row, steps: &[NetworkStep]) -> Result<(), Invalid> {
    row.must(steps.len() <= NETWORK_STEPS, "more is changed in it than any image has")?;
    for step in steps {
        let (name, value) = match step {
            NetworkStep::Setting { name, value } => (name, value),
            NetworkStep::Request { body, .. } => {
                row.must(body.0.len() <= NETWORK_VALUE, "a change of it is longer than any can be")?;
                continue;
            }
        };
        let is_path = name.split('/').all(|part| !matches!(part, "" | "." | "..")) && !name.contains('\0');
        row.must(is_path && name.len() <= 200, "a setting of it is none")?;
        row.must(value.0.len() <= NETWORK_VALUE, "a setting of it is longer than any can be")?;
    }
    Ok(())
}

fn check_is_mount(row: &Row, namespace: Option<u32>, image: &Image) -> Result<(), Invalid> {
    let Some(namespace) = namespace else { return Ok(()) };
    row.refers("namespace", namespace, image.namespaces.len())?;
    let is_mount = matches!(image.namespaces[namespace as usize], Namespace::Mount { .. });
    row.must(is_mount, "its path is told in a namespace of another kind")
}

/// Whether a path cannot lead out of where it begins.
fn is_plain(path: &[u8]) -> bool {
    let mut steps = path.split(|b| *b == b'/').filter(|step| !step.is_empty());
    !path.contains(&0) && steps.all(|step| step != b".." && step != b".")
}

fn is_absolute(path: &Bytes) -> bool {
    path.0.first() == Some(&b'/') && is_plain(&path.0)
}

fn check_mounts(row: &Row, mounts: &Mounts, image: &Image) -> Result<(), Invalid> {
    row.must(mounts.gone.iter().all(is_absolute), "a mount point of it is no path")?;
    for (number, system) in mounts.systems.iter().enumerate() {
        let kind = system.kind.as_str();
        let is_of_machine = OF_THE_MACHINE.contains(&kind);
        row.must(is_of_machine || MADE_ANEW.contains(&kind), "a file system of it cannot be made anew")?;
        row.must(
            !is_of_machine || system.settings.0.is_empty(),
            "a file system of it that the machine has once is to be had with options",
        )?;
        row.must(
            !system.settings.0.contains(&0) && !system.source.0.contains(&0),
            "an option of it is none",
        )?;
        if let Some(of) = system.namespace {
            row.must((of as usize) < row.row, "a file system of it shows a later namespace")?;
            let of_kind = match &image.namespaces[of as usize] {
                Namespace::Pid { .. } => "proc",
                Namespace::Network { .. } => "sysfs",
                Namespace::Ipc(_) => "mqueue",
                _ => "",
            };
            row.must(system.kind == of_kind, "a file system of it shows a namespace of another kind")?;
            let is_in = |p: &&Process| p.namespaces.contains(&of) && p.namespaces.contains(&(row.row as u32));
            let is_there = of_kind != "proc" || image.processes.iter().any(|p| is_in(&p));
            row.must(is_there, "nobody in it is in the pid namespace of its procfs")?;
        }
        row.must(system.entries.is_empty() || system.kind == "tmpfs", "a file system has files of its own")?;
        check_layers(row, number, mounts)?;
        let is_folder = |entry: &&Entry| entry.mode & FILE_TYPE == FOLDER;
        let folders: HashSet<&[u8]> =
            system.entries.iter().filter(is_folder).map(|e| &e.path.0[..]).collect();
        // A link in the way would lead out of it.
        let lies_in_folder = |name: &Bytes| {
            let parent = name.0.iter().rposition(|b| *b == b'/').map_or(&b""[..], |end| &name.0[..end]);
            folders.contains(parent)
        };
        for entry in &system.entries {
            row.must(
                std::iter::once(&entry.path).chain(&entry.also).all(lies_in_folder),
                "a file in it is in no folder",
            )?;
            let mut names = std::iter::once(&entry.path).chain(&entry.also);
            let is_name = |name: &Bytes| name.0.first() != Some(&b'/') && is_plain(&name.0);
            row.must(names.all(is_name), "the name of a file in it is none")?;
            row.must(!entry.target.0.contains(&0), "a symbolic link in it leads nowhere")?;
            let named = |(name, _): &(Bytes, Bytes)| !name.0.is_empty() && !name.0.contains(&0);
            row.must(entry.attributes.iter().all(named), "an attribute in it has no name")?;
            if let Some(content) = entry.content {
                row.refers("file", content, image.paths.len())?;
            }
        }
        row.must(system.entries.is_sorted_by(|a, b| a.path < b.path), "files in it are out of order")?;
    }
    let is_rooted = mounts.all.first().is_some_and(|root| root.parent.is_none() && root.point.0 == b"/");
    row.must(is_rooted || !mounts.is_apart, "it has no root")?;
    for (number, mount) in mounts.all.iter().enumerate() {
        row.must(is_absolute(&mount.point), "a mount point of it is no path")?;
        let is_root = mounts.is_apart && number == 0;
        let is_kept = mount.what == Mounted::Kept;
        row.must(!(is_kept && mounts.is_apart), "a mount of it is not there")?;
        row.must(mount.parent.is_none() == (is_kept || is_root), "a mount of it is on none")?;
        if let Some(parent) = mount.parent {
            row.must((parent as usize) < number, "a mount of it stands before that on which it is")?;
            let below = &mounts.all[parent as usize].point.0;
            let is_below = below == b"/"
                || mount
                    .point
                    .0
                    .strip_prefix(&below[..])
                    .is_some_and(|rest| rest.is_empty() || rest.first() == Some(&b'/'));
            row.must(is_below, "a mount of it is not on that on which it is said to be")?;
        }
        match &mount.what {
            Mounted::Kept => {}
            Mounted::Around(path) => row.must(is_absolute(path), "what is mounted in it is no path")?,
            Mounted::System { row: system, root } => {
                row.must((*system as usize) < mounts.systems.len(), "a mount of it is of no file system")?;
                row.must(is_absolute(root), "what is mounted in it is no path")?;
            }
        }
        if let Some(Receives::Around(path)) = mount.sharing.as_ref().and_then(|s| s.receives.as_ref()) {
            row.must(is_absolute(path), "a mount of it receives from no path")?;
        }
    }
    Ok(())
}

/// An overlay lies over directories around the namespace, or in file systems that are made before it.
fn check_layers(row: &Row, number: usize, mounts: &Mounts) -> Result<(), Invalid> {
    let system = &mounts.systems[number];
    let is_overlay = system.kind == OVERLAY;
    row.must(is_overlay != system.layers.is_empty(), "an overlay of it lies over nothing")?;
    let count = |role| system.layers.iter().filter(|layer| layer.role == role).count();
    let is_whole =
        count(Role::Lower) > 0 && count(Role::Upper) == count(Role::Work) && count(Role::Upper) < 2;
    row.must(is_whole || !is_overlay, "an overlay of it lacks a directory, or has too many")?;
    row.must(
        system.layers.is_sorted_by_key(|layer| layer.role),
        "directories of an overlay are out of order",
    )?;
    let names = system.layers.iter().map(|layer| (layer.role, &layer.name.0[..]));
    row.must(!are_within_each_other(names), "directories of an overlay are within each other")?;
    for layer in &system.layers {
        row.must(!layer.name.0.is_empty() && !layer.name.0.contains(&0), "a directory has no name")?;
        let (path, is_there) = match &layer.at {
            Mounted::Kept => return row.must(false, "a directory of an overlay is nowhere"),
            Mounted::Around(path) => (path, !layer.id.0.is_empty()),
            Mounted::System { row: of, root } => {
                let of = *of as usize;
                let is_there = mounts
                    .systems
                    .get(of)
                    .is_some_and(|on| on.kind == "tmpfs" || on.kind == OVERLAY && of < number);
                (root, is_there)
            }
        };
        row.must(is_absolute(path), "a directory of an overlay has no path")?;
        row.must(is_there, "a directory of an overlay is not told from others, or is in no file system that is made before it")?;
    }
    Ok(())
}

fn check_mapping(row: &Row, mapping: &Mapping, image: &Image) -> Result<(), Invalid> {
    let aligned = mapping.start.is_multiple_of(PAGE) && mapping.end.is_multiple_of(PAGE);
    row.must(aligned && mapping.start < mapping.end, "a mapping is empty or not of whole pages")?;
    for guard in &mapping.guards {
        let inside = guard.start >= mapping.start
            && guard.start.checked_add(guard.len).is_some_and(|end| end <= mapping.end);
        row.must(inside, "a guard region lies outside its mapping")?;
    }
    row.must(mapping.pkey < 16, "its protection key is none")?;
    row.must(is_page_size(mapping.huge_page), "a page size of it is none")?;
    match &mapping.backing {
        Backing::Anonymous | Backing::Special(_) => Ok(()),
        Backing::File { path, .. } | Backing::Device { path, .. } => {
            row.refers("file", *path, image.paths.len())
        }
        Backing::Object { object, .. } => check_memory(row, *object, image),
        Backing::Segment { object, offset, .. } => {
            row.refers("memory object", *object, image.objects.len())?;
            let object = &image.objects[*object as usize];
            row.must(object.segment.is_some(), "it attaches memory that is no segment")?;
            row.must(mapping.shared, "an attachment of a segment is not shared")?;
            let step = object.huge_page.max(PAGE);
            let size = object.size.checked_next_multiple_of(step);
            let inside = offset.checked_add(mapping.len()).is_some_and(|end| size.is_some_and(|s| end <= s));
            row.must(inside && offset.is_multiple_of(PAGE), "it attaches more than the segment has")
        }
    }
}

/// Whether this is the size of huge pages, or 0 for ordinary ones.
fn is_page_size(bytes: u64) -> bool {
    bytes == 0 || bytes.is_power_of_two() && bytes > PAGE
}

/// Memory that is opened or mapped, as no segment is.
fn check_memory(row: &Row, object: u32, image: &Image) -> Result<(), Invalid> {
    row.refers("memory object", object, image.objects.len())?;
    let segment = image.objects[object as usize].segment.is_some();
    row.must(!segment, "it uses shared memory without being attached to it")
}

fn check_object(row: &Row, object: &MemoryObject) -> Result<(), Invalid> {
    row.must(is_page_size(object.huge_page), "its page size is none")?;
    let whole = object.size.checked_next_multiple_of(object.huge_page.max(PAGE));
    row.must(whole.is_some(), "it runs past the end of the address space")?;
    let Some(segment) = &object.segment else { return Ok(()) };
    row.must(object.memfd.is_none(), "it is a segment and a memfd")?;
    row.must(segment.id >= 0, "its id is negative")?;
    row.must(segment.size > 0 && segment.size <= object.size, "it is larger than its memory")
}

fn check_open_file(row: &Row, file: &OpenFile, image: &Image) -> Result<(), Invalid> {
    match &file.kind {
        FileKind::Path(i) | FileKind::Proc(i) => row.refers("file", *i, image.paths.len()),
        FileKind::EndedProc(i) => {
            row.refers("file", *i, image.paths.len())?;
            let names_one = image.paths[*i as usize].of_process().is_some();
            row.must(names_one, "it is about no process")
        }
        FileKind::Pipe(i) => row.refers("pipe", *i, image.pipes.len()),
        FileKind::Socket(i) => row.refers("socket", *i, image.sockets.len()),
        FileKind::Queue(i) => row.refers("message queue", *i, image.queues.len()),
        FileKind::PtyMaster(i) | FileKind::PtySlave(i) => row.refers("pty", *i, image.ptys.len()),
        FileKind::Memory(i) => check_memory(row, *i, image),
        FileKind::Epoll(watches) => {
            watches.iter().try_for_each(|w| row.refers("open file", w.file, image.files.len()))
        }
        FileKind::Inotify(watches) => {
            row.must(watches.iter().all(|w| w.wd > 0), "a watch in it has no number")?;
            watches.iter().try_for_each(|w| row.refers("file", w.path, image.paths.len()))
        }
        FileKind::Fanotify(group) => {
            /// `FAN_CLASS_CONTENT` and `FAN_CLASS_PRE_CONTENT`: who makes it would have to answer before it could open a file.
            const ASKED: u32 = 0xc;
            row.must(group.flags & ASKED == 0, "it is asked for permission")?;
            group.marks.iter().try_for_each(|m| row.refers("file", m.path, image.paths.len()))
        }
        FileKind::Ended { status, .. } => {
            // SIGSTOP, SIGTSTP, SIGTTIN and SIGTTOU end nobody.
            let is_end = *status <= 0xffff && !(19..=22).contains(&(status & 0x7f));
            row.must(is_end, "its process ended in no way")
        }
        FileKind::Stdio(number) => row.must(i32::try_from(*number).is_ok(), "no stream has such a number"),
        FileKind::ControllingTerminal
        | FileKind::HungUp
        | FileKind::Event { .. }
        | FileKind::Timer(_)
        | FileKind::Signal(_)
        | FileKind::Pid(_) => Ok(()),
    }
}

/// Checks a page map by itself: order, overlap, alignment, and that every extent fits its block.
pub fn page_map(map: &PageMap) -> Result<(), Invalid> {
    let mut last: Option<(Owner, u64)> = None;
    for (row, extent) in rows("extent", &map.extents) {
        row.must(extent.pages > 0, "it has no pages")?;
        row.must(extent.address.is_multiple_of(PAGE), "its address is not at a page boundary")?;
        let end = extent.address.checked_add(extent.len());
        row.must(end.is_some(), "it runs past the end of the address space")?;
        let behind = last.is_none_or(|(owner, end)| {
            owner < extent.owner || owner == extent.owner && end <= extent.address
        });
        row.must(behind, "it is out of order or overlaps the one before")?;
        last = Some((extent.owner, extent.end()));
        check_place(&row, extent.pages, &extent.place)?;
    }
    Ok(())
}

fn check_place(row: &Row, pages: u32, place: &Place) -> Result<(), Invalid> {
    let Place::Stored { offset, length, block_pages, skip, codec, .. } = *place else { return Ok(()) };
    row.must(block_pages <= MAX_BLOCK_PAGES, "its block is too large")?;
    let fits = u32::from(skip).checked_add(pages).is_some_and(|last| last <= u32::from(block_pages));
    row.must(fits, "it does not fit its block")?;
    row.must(length > 0, "its block has no bytes")?;
    let bytes = u64::from(block_pages) * PAGE;
    row.must(u64::from(length) <= bytes, "its block is stored longer than it is")?;
    row.must(offset.checked_add(u64::from(length)).is_some(), "its block runs past the end of any file")?;
    if codec == Codec::Raw {
        row.must(u64::from(length) == bytes, "its block is not as long as its pages")?;
        row.must(offset.is_multiple_of(PAGE), "its block is not at a page boundary")?;
    }
    Ok(())
}

/// Checks that every owner named by a page map is a row of the image.
pub fn owners(image: &Image, map: &PageMap) -> Result<(), Invalid> {
    for (row, extent) in rows("extent", &map.extents) {
        match extent.owner {
            Owner::Space(i) => row.refers("address space", i, image.spaces.len())?,
            Owner::Object(i) => row.refers("memory object", i, image.objects.len())?,
            Owner::File(i) => row.refers("file", i, image.paths.len())?,
        }
    }
    Ok(())
}
