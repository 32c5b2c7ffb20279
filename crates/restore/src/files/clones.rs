//! What copies of a program that run beside each other and beside it have for themselves, what in common, and what only one can have.

use super::check::check;
use super::sockets::{DATAGRAM, REUSE_ADDRESS, REUSE_PORT, STREAM, UNIX, has_port, name, needs_sharing};
use super::{called, queues};
use crate::{Error, FilesPolicy, Result};
use rustix::fs::{FileType, Stat};
use std::collections::{HashMap, HashSet};
use stillpoint_image::{Bytes, FileKind, Image, Lock, LockKind, OpenFile, PathFile, Socket};
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::proc::{self, Proc};
use stillpoint_linux::{locks, sockets};

/// Gives a clone shared memory of its own where that has a name in `/dev/shm`: what is found there by now is the program's, or
/// has gone with it, and is not as it was at the checkpoint. Like memory whose name was removed, it is made anew.
///
/// # Errors
/// [`Error::Refused`] names each of which only a part was mapped, and so saved.
pub fn set_apart(image: &mut Image) -> Result<()> {
    let memory = image.paths.iter_mut().filter(|file| is_common(file) && file.is_memory());
    let (whole, parts): (Vec<_>, Vec<_>) = memory.partition(|file| file.is_wholly_mapped());
    if !parts.is_empty() {
        let why = "a clone needs shared memory of its own, and the checkpoint has only the part of it that was mapped";
        return Err(Error::Refused(parts.iter().map(|file| format!("{}: {why}", file.path)).collect()));
    }
    for file in whole {
        file.deleted = true;
        file.mapped_ranges.clear();
    }
    Ok(())
}

/// Files that all who map them have in common, be they clones or the program itself: what one writes the others read.
pub fn in_common(image: &Image) -> Vec<&Bytes> {
    image.paths.iter().filter(|file| is_common(file)).map(|file| &file.path).collect()
}

/// Whether a file has a name, and is mapped so that what the program writes is written to it.
fn is_common(file: &PathFile) -> bool {
    !file.deleted && !file.made_anew && !file.mapped_ranges.is_empty()
}

/// Regular files with a name that the program has open for writing: those that are only standard streams of it, and others.
fn written(image: &Image) -> [HashSet<u32>; 2] {
    let is_written = |file: &&OpenFile| {
        let flags = file.flags as i32;
        flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_RDONLY
    };
    let descriptors = || image.tables.iter().flat_map(|table| &table.descriptors);
    let numbers = |of: u32| descriptors().filter(move |one| one.file == of).map(|one| one.fd);
    let is_standard = |of: u32| numbers(of).next().is_some() && numbers(of).all(|fd| fd <= 2);
    let is_file = |row: &u32| {
        let file = image.paths.get(*row as usize);
        file.is_some_and(|file| {
            FileType::from_raw_mode(file.mode) == FileType::RegularFile && !file.deleted && !file.made_anew
        })
    };
    [true, false].map(|standard| {
        let files =
            (0..).zip(&image.files).filter(|(of, file)| is_written(file) && is_standard(*of) == standard);
        files.filter_map(|(_, file)| row(file)).filter(is_file).collect()
    })
}

/// The row of what an open file is, where that has a path.
fn row(file: &OpenFile) -> Option<u32> {
    match file.kind {
        FileKind::Path(row) => Some(row),
        _ => None,
    }
}

/// What is so of clones, for a program that is brought back while it still runs; and no file is changed under its feet. Gives the files to
/// which both write what people read: their standard streams.
///
/// # Errors
/// [`Error::Refused`] names what cannot be had twice, and each file that would be changed.
pub fn stay_apart(image: &mut Image, policy: FilesPolicy) -> Result<Vec<Bytes>> {
    check_alone(image, 1)?;
    set_apart(image)?;
    let [streams, written] = written(image);
    let streams = streams.into_iter().filter(|row| !written.contains(row));
    let streams = streams.filter_map(|row| Some(image.paths.get(row as usize)?.path.clone())).collect();
    if policy == FilesPolicy::Keep {
        return Ok(streams);
    }
    let grown = check(image, policy)?.grown;
    let why = |row: &u32, file: &PathFile| {
        let is_changed = is_common(file) || grown.contains(row);
        let changed = is_changed.then_some("would become what it was at the checkpoint");
        changed.or_else(|| written.contains(row).then_some("would be written by both"))
    };
    let files = (0..).zip(&image.paths);
    let refusals: Vec<String> =
        files.filter_map(|(row, file)| why(&row, file).map(|why| format!("{}: {why}", file.path))).collect();
    if refusals.is_empty() { Ok(streams) } else { Err(Error::Refused(refusals)) }
}

/// Refuses what several programs may have at once and yet only one can use, since each takes from the others what was meant for
/// them: FIFOs, POSIX message queues, and addresses that sockets share (`SO_REUSEPORT`; `SO_REUSEADDR` of datagrams). And leases for writing:
/// who opens such a file, as each would, takes it from the other.
///
/// # Errors
/// [`Error::Refused`] names each that more than one would have.
pub fn check_alone(image: &Image, count: usize) -> Result<()> {
    let objects = Objects::of(image)?;
    let addresses = image
        .sockets
        .iter()
        .filter(|socket| image.network.is_none() && (shares_address(socket) || needs_sharing(image, socket)));
    let leases = leases(image);
    let refusals: Vec<String> = if count > 1 {
        let all = objects.names.values().cloned().chain(addresses.map(|socket| name(image, socket)));
        let all = all.chain(leases.into_iter().map(|(_, name)| name));
        all.map(|what| format!("{what}: only one of {count} can have it")).collect()
    } else {
        let taken = addresses.filter(|socket| is_taken(socket)).map(|socket| name(image, socket));
        let taken =
            taken.map(|what| format!("{what}: another program uses this address, and would share it"));
        let held = if leases.is_empty() { Vec::new() } else { locks::leased()? };
        let held = leases.into_iter().filter(|(inode, _)| held.iter().any(|lease| lease.inode == *inode));
        let held = held.map(|(_, name)| format!("{name}: another program has it, and would lose it"));
        objects.in_use().into_iter().chain(taken).chain(held).collect()
    };
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// The leases for writing that a program has, by inode number, with what they are called.
fn leases(image: &Image) -> Vec<(u64, String)> {
    let is_held = |lock: &Lock| lock.kind == LockKind::Lease && lock.exclusive;
    let files = image.files.iter().filter(|file| file.locks.iter().any(is_held));
    let paths = files.filter_map(row).filter_map(|row| image.paths.get(row as usize));
    let paths = paths.filter(|file| !file.deleted);
    paths.map(|file| (file.ino, format!("the lease on {}", file.path))).collect()
}

/// FIFOs and message queues of a program that are there, by device and inode number.
#[derive(Default)]
struct Objects {
    names: HashMap<(u64, u64), String>,
    /// What the kernel calls them.
    links: Vec<Vec<u8>>,
}

impl Objects {
    fn of(image: &Image) -> Result<Self> {
        let mut objects = Objects::default();
        let fifos = image.pipes.iter().filter(|pipe| pipe.stdio.is_none()).filter_map(|pipe| pipe.fifo);
        let files = fifos.filter_map(|row| image.paths.get(row as usize));
        for file in files.filter(|file| !file.deleted) {
            let stat = rustix::fs::lstat(file.path.as_path()).ok();
            let is_fifo = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
            if let Some(stat) = stat.filter(|stat| file.namespace.is_none() && is_fifo(stat)) {
                objects.add(&stat, format!("FIFO {}", file.path), file.path.0.clone());
            }
        }
        for queue in image.queues.iter().filter(|queue| !queue.unlinked && queue.namespace.is_none()) {
            if let Some(stat) = queues::stat(queue)? {
                let link = [b"/", queue.name.0.as_slice()].concat();
                objects.add(&stat, format!("message queue /{}", queue.name), link);
            }
        }
        Ok(objects)
    }

    fn add(&mut self, stat: &Stat, name: String, link: Vec<u8>) {
        self.names.insert((stat.st_dev, stat.st_ino), name);
        self.links.push(link);
    }

    /// One line for each that a process has open. To open them oneself would show on the other side.
    fn in_use(mut self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.names.is_empty() {
            return lines;
        }
        for pid in proc::processes().unwrap_or_default() {
            // It has ended, or is none of ours.
            let Ok(folders) = Folders::open(pid) else { continue };
            for fd in folders.list().unwrap_or_default() {
                if !folders.link(fd).is_ok_and(|link| self.links.contains(&link)) {
                    continue;
                }
                let stat = folders.stat(fd).ok();
                if let Some(what) = stat.and_then(|stat| self.names.remove(&(stat.st_dev, stat.st_ino))) {
                    // It may have ended just now.
                    let who = Proc::process(pid).map_or_else(|_| format!("process {pid}"), |p| called(&p));
                    lines.push(format!(
                        "{what}: {who} has it open, and each would take what is meant for the other"
                    ));
                }
            }
        }
        lines
    }
}

/// Whether others can be bound to the address of a socket, too.
fn shares_address(socket: &Socket) -> bool {
    let is_bound = socket.family != UNIX && has_port(socket) && socket.connection.is_none();
    match socket.kind {
        STREAM => is_bound && socket.is_set(REUSE_PORT),
        DATAGRAM => is_bound && (socket.is_set(REUSE_PORT) || socket.is_set(REUSE_ADDRESS)),
        _ => false,
    }
}

/// Whether a socket that does not share cannot be bound to an address. One that lingers after a connection is in nobody's way.
pub(super) fn is_taken(socket: &Socket) -> bool {
    let Ok(probe) = sockets::socket(socket.family as i32, socket.kind as i32, socket.protocol as i32) else {
        return false;
    };
    let only_v6 = (libc::IPPROTO_IPV6 as u32, libc::IPV6_V6ONLY as u32);
    if let Some(option) = socket.option(only_v6) {
        let _ = sockets::set_option(&probe, option.level, option.name, &option.value.0);
    }
    if socket.kind == STREAM {
        let reuse = libc::SO_REUSEADDR as u32;
        let _ = sockets::set_option(&probe, libc::SOL_SOCKET as u32, reuse, &1i32.to_ne_bytes());
    }
    sockets::bind(&probe, &socket.local.0).is_err_and(|e| e.raw_os_error() == Some(libc::EADDRINUSE))
}
