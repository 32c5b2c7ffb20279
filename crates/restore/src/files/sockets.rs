//! Sockets: listening and unconnected ones, unix pairs with the data in them.

use super::addresses::{stays, when_free};
use super::detour::Detour;
use super::{OpenFiles, Opening, clones, connections, datagrams, messages, missing, objects, options, peers};
use crate::{Error, Result, TcpPolicy};
use rustix::fs::{FileType, Gid, Mode, Uid};
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;
use stillpoint_image::{Bytes, FileKind, Image, PathFile, Socket};
use stillpoint_linux::{Error as Kernel, sockets};

pub(super) const UNIX: u32 = libc::AF_UNIX as u32;
pub(super) const STREAM: u32 = libc::SOCK_STREAM as u32;
pub(super) const DATAGRAM: u32 = libc::SOCK_DGRAM as u32;
const UDP: u32 = libc::IPPROTO_UDP as u32;
pub(super) const REUSE_PORT: (u32, u32) = (libc::SOL_SOCKET as u32, libc::SO_REUSEPORT as u32);
pub(super) const REUSE_ADDRESS: (u32, u32) = (libc::SOL_SOCKET as u32, libc::SO_REUSEADDR as u32);
const FREE_BIND: (u32, u32) = (libc::IPPROTO_IP as u32, libc::IP_FREEBIND as u32);
const FREE_BIND6: (u32, u32) = (libc::IPPROTO_IPV6 as u32, libc::IPV6_FREEBIND as u32);
const NO_PORT: (u32, u32) = (libc::IPPROTO_IP as u32, libc::IP_BIND_ADDRESS_NO_PORT as u32);
const IN_USE: &str = "another program uses this address";
/// Longest `sun_path`, with its end.
const SUN_PATH: usize = 108;
/// The extended attribute that is a list of who may do what (`acl(5)`).
const ACCESS_LIST: &str = "system.posix_acl_access";

/// Refuses where names of unix sockets are in use. A name that is left over from a socket nobody listens on is not.
pub(super) fn check(image: &Image, refusals: &mut Vec<String>) {
    let began = Instant::now();
    peers::check(image, refusals);
    for socket in &image.sockets {
        let Some(file) = file_of(image, socket.path) else { continue };
        if let Some(file) = file_of(image, socket.renamed_from).filter(|file| file.path.as_path().exists()) {
            refusals.push(format!("{}: is in the way of a socket that was made under that name", file.path));
        }
        let path = file.path.as_path();
        let Ok(stat) = rustix::fs::lstat(path) else {
            if !file.deleted && !path.parent().is_some_and(Path::is_dir) {
                refusals.push(format!("{}: the directory of this socket is gone", file.path));
            }
            continue;
        };
        if file.deleted || FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            refusals.push(format!("{}: is in the way of a socket of that name", file.path));
        } else if stays(began, || !is_stale(path, socket.kind)) {
            refusals.push(format!("{}: another program uses this socket", file.path));
        }
    }
}

fn file_of(image: &Image, row: Option<u32>) -> Option<&PathFile> {
    row.and_then(|row| image.paths.get(row as usize))
}

/// Nobody is behind a socket's name if a connection is refused. It is asked for with another type than the socket's: whoever is there
/// cannot be meant by that, and hears nothing of it. (A server may well fail for a client that says nothing.)
fn is_stale(path: &Path, kind: u32) -> bool {
    let other = if kind == DATAGRAM { STREAM } else { DATAGRAM };
    let Ok(probe) = sockets::socket(libc::AF_UNIX, other as i32 | libc::SOCK_NONBLOCK, 0) else {
        return false;
    };
    let Ok((address, _directory)) = unix_address(path) else { return false };
    sockets::connect(&probe, &address).is_err_and(|e| e.raw_os_error() == Some(libc::ECONNREFUSED))
}

/// Makes all sockets.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    let mut made =
        opening.files.kept.as_mut().map(|kept| std::mem::take(&mut kept.sockets)).unwrap_or_default();
    let kept: HashSet<usize> = made.keys().copied().collect();
    peers::note(opening, &kept);
    // Connections that were accepted under a name need the name while it is still free.
    accept_connections(opening, &mut made)?;
    let connected = connections::open_without_repair(opening, &mut made)?;
    bind_all(opening, &mut made)?;
    connections::settle(opening.image, &made, &connected)?;
    connections::open(opening, &mut made)?;
    if let Some(kept) = &mut opening.files.kept {
        kept.all_bound();
    }
    for (index, socket) in opening.image.sockets.iter().enumerate() {
        if made.contains_key(&index) {
            continue;
        }
        let (own, other) = peers::pair(opening, index)?;
        made.insert(index, own);
        match socket.peer {
            Some(peer) => {
                made.insert(peer as usize, other);
            }
            None => leave(opening, &made, index, &other)?, // its peer is gone, and goes
        }
    }
    for (index, socket) in opening.image.sockets.iter().enumerate() {
        if let Some(peer) = socket.peer.filter(|_| socket.connection.is_none()) {
            let other = made.get(&(peer as usize)).ok_or_else(|| missing("socket", peer))?;
            match socket.messages.is_empty() {
                true => fill(other, socket)?,
                false => {
                    let laden = messages::later(opening.image, index, &made, Some(other))?;
                    opening.files.laden.push(laden);
                }
            }
        }
    }
    for (index, socket) in opening.image.sockets.iter().enumerate() {
        if socket.peer.is_none() && !socket.orphan && !socket.messages.is_empty() {
            let laden = messages::later(opening.image, index, &made, None)?;
            opening.files.laden.push(laden);
        }
    }
    finish(opening, &made, &kept)?;
    tell_of_those_that_are_over(opening, &kept);
    datagrams::send_again(opening, &made);
    // What was sent so far is nothing for time stamps.
    let unstamped = |socket: &Socket| socket.peer.is_none() && !socket.orphan && socket.connection.is_none();
    for (index, socket) in opening.image.sockets.iter().enumerate().filter(|(_, s)| unstamped(s)) {
        let Some(fd) = made.get(&index).filter(|_| !kept.contains(&index)) else { continue };
        options::apply_some(fd, socket, &name(opening.image, socket), options::stamps)?;
    }
    for (index, socket) in opening.image.sockets.iter().enumerate().filter(|(_, s)| s.protocol == UDP) {
        made.get(&index).map_or(Ok(()), |fd| shut_down(fd, socket))?;
    }
    keep_to_shut_down(opening, &made, &kept)?;
    let rows = opening.rows(|f| match f.kind {
        FileKind::Socket(index) => Some(index),
        _ => None,
    });
    for (row, _, index) in rows {
        let fd = made.get(&(index as usize)).ok_or_else(|| missing("socket", index))?;
        let fd = fd.try_clone().map_err(|e| Kernel::call("duplicate a socket", e))?;
        opening.put(row, fd)?;
    }
    Ok(())
}

/// Fills the queue of a socket whose other end goes.
fn leave(
    opening: &mut Opening<'_>,
    made: &HashMap<usize, OwnedFd>,
    index: usize,
    other: &OwnedFd,
) -> Result<()> {
    let socket = &opening.image.sockets[index];
    if socket.messages.is_empty() {
        return fill(other, socket);
    }
    let laden = messages::later(opening.image, index, made, Some(other))?;
    opening.files.laden.push(laden);
    Ok(())
}

/// Connections that wait to be accepted, in their order.
fn connect_waiting(opening: &mut Opening<'_>, made: &mut HashMap<usize, OwnedFd>) -> Result<()> {
    let image = opening.image;
    for (index, listener) in image.sockets.iter().enumerate().filter(|(_, s)| !s.pending.is_empty()) {
        let what = name(image, listener);
        let (address, _directory) = opening.files.way_to(image, index as u32)?;
        let door = made.get(&index).ok_or_else(|| missing("socket", index as u32))?;
        let door = door.try_clone().map_err(|e| Kernel::call("duplicate a socket", e))?;
        let backlog = listener.listening.unwrap_or_default();
        for &row in &listener.pending {
            let client = image.sockets.get(row as usize).ok_or_else(|| missing("socket", row))?;
            let kind = client.kind | libc::SOCK_NONBLOCK as u32;
            let fd = peers::socket_of(client.waits_as.as_ref(), kind, &what)?;
            options::apply(&fd, client, &name(image, client))?;
            if !client.local.0.is_empty() {
                bind_name(opening, client, &fd)?;
            }
            // Somebody else may have made it listen since.
            let is_other = client.told.is_some() && client.told != listener.told;
            if is_other {
                peers::listen_as(&door, client.told.as_ref(), backlog, &what)?;
            }
            peers::connect_as(&fd, client.waits_as.as_ref(), &address, &what)?;
            if is_other {
                peers::listen_as(&door, listener.told.as_ref(), backlog, &what)?;
            }
            shut_down(&fd, client)?;
            made.insert(row as usize, fd);
        }
    }
    Ok(())
}

/// The address by which a unix socket is reached; the descriptor is to be kept meanwhile.
fn address_of(image: &Image, socket: &Socket) -> Result<(Vec<u8>, Option<OwnedFd>)> {
    match file_of(image, socket.path) {
        Some(file) => unix_address(file.path.as_path()),
        None => Ok((socket.local.0.clone(), None)),
    }
}

impl OpenFiles {
    /// Where a unix socket that has no name any more is reached, by its row.
    fn way_to_nameless(&self, row: u32) -> Option<Vec<u8>> {
        let handle = self.nameless.get(&row)?;
        let way = format!("/proc/self/fd/{}\0", handle.as_raw_fd());
        Some([&(libc::AF_UNIX as u16).to_ne_bytes()[..], way.as_bytes()].concat())
    }

    /// The address by which a unix socket of the program is reached by us, whether it has a name still or not, by its row; the descriptor is
    /// to be kept meanwhile.
    pub(super) fn way_to(&self, image: &Image, row: u32) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        match self.way_to_nameless(row) {
            Some(address) => Ok((address, None)),
            None => address_of(image, image.sockets.get(row as usize).ok_or_else(|| missing("socket", row))?),
        }
    }
}

/// Where a datagram socket that sends to one of the program's reaches it, if that has another name than it tells.
fn renamed_to(opening: &Opening<'_>, socket: &Socket) -> Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
    let (image, namespaces) = (opening.image, &opening.files.namespaces);
    let called = |file: &'_ PathFile| namespaces.called(file.namespace, file.path.as_path()).to_owned();
    let Some(told) = name_in(&socket.remote) else { return Ok(None) };
    let is_it = |other: &&Socket| {
        let from = file_of(image, other.renamed_from);
        from.is_some_and(|file| file.namespace == socket.mounts && called(file) == told)
    };
    let other = image.sockets.iter().filter(|_| socket.family == UNIX).find(is_it);
    let file = other.and_then(|other| file_of(image, other.path));
    file.map(|file| unix_address(&called(file))).transpose()
}

/// Sockets with neither a peer nor a lost one: made, bound, set to listen. All that cannot be are told together.
fn bind_all(opening: &mut Opening<'_>, made: &mut HashMap<usize, OwnedFd>) -> Result<()> {
    let mut refusals = Vec::new();
    let waiting: Vec<u32> = opening.image.sockets.iter().flat_map(|s| s.pending.clone()).collect();
    for (index, socket) in opening.image.sockets.iter().enumerate() {
        let waits = waiting.contains(&(index as u32));
        let apart = socket.peer.is_some() || socket.orphan || socket.connection.is_some() || waits;
        if apart || made.contains_key(&index) {
            continue;
        }
        let fd = sockets::socket(socket.family as i32, socket.kind as i32, socket.protocol as i32)?;
        // What is in its queue has passed its filter.
        let is_laden = socket.family == UNIX && !socket.messages.is_empty();
        let later = |l, n| options::stamps(l, n) || is_laden && options::filters(l, n);
        options::apply_some(&fd, socket, &name(opening.image, socket), |l, n| !later(l, n))?;
        match bind(opening, socket, &fd) {
            Ok(()) => {}
            Err(Error::Refused(lines)) => refusals.extend(lines),
            Err(e) => return Err(e),
        }
        if let Some(pending) = socket.unaccepted {
            let what = name(opening.image, socket);
            let note = format!("{what}: connections that waited to be accepted are gone ({pending})");
            opening.files.notes.push(note);
        }
        made.insert(index, fd);
    }
    for (index, socket) in
        opening.image.sockets.iter().enumerate().filter(|(_, s)| needs_sharing(opening.image, s))
    {
        let allowed = socket.option(REUSE_PORT);
        let allowed = allowed.map_or(0i32.to_ne_bytes().to_vec(), |option| option.value.0.clone());
        made.get(&index)
            .map_or(Ok(()), |fd| sockets::set_option(fd, REUSE_PORT.0, REUSE_PORT.1, &allowed))?;
    }
    // Some may send to others of them.
    for (index, socket) in opening.image.sockets.iter().enumerate().filter(|(_, s)| !s.remote.0.is_empty()) {
        let Some(fd) = made.get(&index).filter(|_| refusals.is_empty()) else { continue };
        let elsewhere = match socket.sends_to.and_then(|row| opening.files.way_to_nameless(row)) {
            Some(address) => Some((address, None)),
            None => renamed_to(opening, socket)?,
        };
        let to = elsewhere.as_ref().map_or(&socket.remote.0, |(address, _)| address);
        let connect = || Ok(sockets::connect(fd, to));
        let connected = match socket.mounts {
            Some(row) => opening.files.namespaces.within(row, connect)?,
            None => connect()?,
        };
        if let Err(e) = connected {
            let what = name(opening.image, socket);
            let remote = &socket.remote.0;
            let to = match socket.family {
                UNIX => String::from_utf8_lossy(remote.get(2..).unwrap_or_default()).replace('\0', "@"),
                _ => address(remote),
            };
            refusals.push(format!("{what}: cannot be connected to {} again: {e}", to.trim_end_matches('@')));
        }
    }
    if refusals.is_empty() {
        connect_waiting(opening, made)?;
    }
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// Whether an internet socket is bound to a port; it may be bound to an address only.
pub(super) fn has_port(socket: &Socket) -> bool {
    socket.local.0.get(2..4).is_some_and(|port| port != [0, 0])
}

/// The sockets without connections that are bound to the internet address of one of them, which is among them; none of any other.
fn sharers<'i>(image: &'i Image, socket: &'i Socket) -> impl Iterator<Item = &'i Socket> {
    let is_internet = [libc::AF_INET as u32, libc::AF_INET6 as u32].contains(&socket.family);
    let is_bound = is_internet && has_port(socket) && socket.connection.is_none();
    let at = |s: &'i Socket| (s.family, s.kind, s.protocol, &s.local);
    image
        .sockets
        .iter()
        .filter(move |other| is_bound && other.connection.is_none() && at(other) == at(socket))
}

/// Whether several sockets of the program are bound to one address by `SO_REUSEPORT`, of which some may say otherwise by now.
pub(super) fn needs_sharing(image: &Image, socket: &Socket) -> bool {
    let by_port = sharers(image, socket).any(|s| s.is_set(REUSE_PORT));
    // Datagrams sockets may share one by `SO_REUSEADDR`.
    let by_address = sharers(image, socket).all(|s| s.kind == DATAGRAM && s.is_set(REUSE_ADDRESS));
    sharers(image, socket).nth(1).is_some() && (by_port || !by_address)
}

fn bind(opening: &mut Opening<'_>, socket: &Socket, fd: &OwnedFd) -> Result<()> {
    let internet_stream = socket.family != UNIX && socket.kind == STREAM;
    if needs_sharing(opening.image, socket) {
        // That would let us in beside anybody who has allowed it once.
        let first = sharers(opening.image, socket).next();
        if first.is_some_and(|first| std::ptr::eq(first, socket)) && !socket.is_set(REUSE_PORT) {
            when_free(opening, socket, || match clones::is_taken(socket) {
                true => Err(Error::Refused(vec![format!("{}: {IN_USE}", name(opening.image, socket))])),
                false => Ok(()),
            })?;
        }
        sockets::set_option(fd, REUSE_PORT.0, REUSE_PORT.1, &1i32.to_ne_bytes())?;
    }
    if !socket.local.0.is_empty() {
        // Connections of the old process may linger in TIME_WAIT: with SO_REUSEADDR they do not matter, while a
        // socket that listens still does.
        let reuse = REUSE_ADDRESS;
        let before = sockets::option(fd, reuse.0, reuse.1)?;
        if internet_stream {
            sockets::set_option(fd, reuse.0, reuse.1, &1i32.to_ne_bytes())?;
        }
        bind_name(opening, socket, fd)?;
        when_free(opening, socket, || listen(socket, fd, &name(opening.image, socket)))?;
        if let Some(before) = before.filter(|_| internet_stream) {
            sockets::set_option(fd, reuse.0, reuse.1, &before)?;
        }
    } else {
        listen(socket, fd, &name(opening.image, socket))?;
    }
    Ok(())
}

fn listen(socket: &Socket, fd: &OwnedFd, what: &str) -> Result<()> {
    socket.listening.map_or(Ok(()), |backlog| peers::listen_as(fd, socket.told.as_ref(), backlog, what))
}

pub(super) fn bind_name(opening: &mut Opening<'_>, socket: &Socket, fd: &OwnedFd) -> Result<()> {
    let what = name(opening.image, socket);
    let Some(row) = socket.path else {
        return when_free(opening, socket, || bind_address(socket, fd).map_err(|e| refusal(&what, &e)));
    };
    let file = opening.image.paths.get(row as usize).ok_or_else(|| missing("file", row))?;
    let told = name_in(&socket.local);
    let is_it = |other: &Socket| std::ptr::eq(other, socket);
    let own = opening.image.sockets.iter().position(is_it).map(|row| row as u32);
    bind_path(opening, file, file_of(opening.image, socket.renamed_from), fd, socket.kind, told, own)
}

/// The name in the file system in a `sockaddr_un`: from wherever the program was, or its root, when it was used.
fn name_in(address: &Bytes) -> Option<&Path> {
    let name = address.0.get(2..)?.split(|byte| *byte == 0).next()?;
    Some(Path::new(OsStr::from_bytes(name))).filter(|_| !name.is_empty())
}

/// Binds to an address, also to one that was not the machine's when the program was there, or that goes without a port.
pub(super) fn bind_address(socket: &Socket, fd: &OwnedFd) -> std::io::Result<()> {
    let is_internet = [libc::AF_INET as u32, libc::AF_INET6 as u32].contains(&socket.family);
    let free = if socket.family == libc::AF_INET6 as u32 { FREE_BIND6 } else { FREE_BIND };
    // One that was connected meanwhile may have lost its port without having set that.
    let goes_without_port = is_internet && !has_port(socket);
    let needed = [(socket.foreign, free), (goes_without_port, NO_PORT)];
    let set = |(level, option): (u32, u32), value: &[u8]| {
        let set = sockets::set_option(fd, level, option, value);
        set.map_err(|e| std::io::Error::from_raw_os_error(e.errno().unwrap_or(libc::EIO)))
    };
    let mut before = Vec::new();
    for (_, option) in needed.into_iter().filter(|(is_needed, _)| *is_needed) {
        let is = sockets::option(fd, option.0, option.1).ok().flatten();
        before.push((option, is.unwrap_or(0i32.to_ne_bytes().to_vec())));
        set(option, &1i32.to_ne_bytes())?;
    }
    let bound = sockets::bind(fd, &socket.local.0);
    for (option, value) in before {
        set(option, &value)?;
    }
    bound
}

/// Binds to a name in the file system, which it had before; a stale one is removed. With `renamed_from` to that one, which then
/// becomes the other.
fn bind_path(
    opening: &mut Opening<'_>,
    file: &PathFile,
    renamed_from: Option<&PathFile>,
    fd: &OwnedFd,
    kind: u32,
    told: Option<&Path>,
    row: Option<u32>,
) -> Result<()> {
    let path = file.path.as_path();
    let first = renamed_from.unwrap_or(file);
    let _detour = if first.deleted { Detour::to(first.path.as_path())? } else { Detour::default() };
    if rustix::fs::lstat(path).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Socket)
        && is_stale(path, kind)
    {
        std::fs::remove_file(path).map_err(|e| Kernel::file(path, e))?;
    }
    bind_where_it_was(opening, first, fd, told)?;
    if renamed_from.is_some() {
        let first = first.path.as_path();
        rustix::fs::rename(first, path).map_err(|e| {
            let _ = std::fs::remove_file(first);
            Kernel::file(path, e)
        })?;
    }
    opening.files.created.note(path);
    if file.deleted {
        // Sockets of the program may send to it all the same: its file is reached as long as somebody has a handle to it.
        let handle = stillpoint_linux::mounts::handle(rustix::fs::CWD, path)?;
        opening.files.nameless.extend(row.map(|row| (row, handle)));
        return Ok(std::fs::remove_file(path).map_err(|e| Kernel::file(path, e))?);
    }
    let named = |e| Kernel::file(path, e);
    let has_list = file.attributes.iter().any(|(name, _)| name.0 == ACCESS_LIST.as_bytes());
    if !has_list {
        // It may just have been given one by its directory.
        let _ = rustix::fs::lremovexattr(path, ACCESS_LIST);
    }
    rustix::fs::chmod(path, Mode::from_raw_mode(file.mode & 0o7777)).map_err(named)?;
    let stat = rustix::fs::lstat(path).map_err(named)?;
    if (stat.st_uid, stat.st_gid) != (file.uid, file.gid) {
        let (uid, gid) = (Uid::from_raw(file.uid), Gid::from_raw(file.gid));
        rustix::fs::chown(path, Some(uid), Some(gid)).map_err(named)?;
    }
    let handle = stillpoint_linux::mounts::handle(rustix::fs::CWD, path)?;
    let what = format!("socket {}", file.path);
    opening.files.notes.extend(objects::give_attributes(handle, &file.attributes, &what));
    Ok(())
}

/// Binds to a path as it is called where the program is: that is what it tells as its name, which may be a relative one.
fn bind_where_it_was(
    opening: &Opening<'_>,
    file: &PathFile,
    fd: &OwnedFd,
    told: Option<&Path>,
) -> Result<()> {
    let (way, namespaces) = (file.path.as_path(), &opening.files.namespaces);
    // A path that is told as such is bound as such. One that is relative, or below another root, is bound from there.
    let told = told.filter(|told| file.namespace.is_none() && *told != way);
    let plain = |told: &'_ Path| told.strip_prefix("/").or(told.strip_prefix(".")).unwrap_or(told).to_owned();
    if let Some((told, plain)) =
        told.map(|told| (told, plain(told))).filter(|(_, plain)| way.ends_with(plain))
    {
        let above = plain.components().count();
        let folder = way.ancestors().nth(above).unwrap_or(Path::new("/"));
        let (address, _) = unix_address(told)?;
        return sockets::bind_in(folder, fd, &address).map_err(|e| refusal(&way.display().to_string(), &e));
    }
    let path = namespaces.called(file.namespace, way);
    let failed = |e| refusal(&path.display().to_string(), &e);
    match file.namespace {
        Some(row) if path.as_os_str().len() < SUN_PATH => {
            let (address, _) = unix_address(path)?;
            namespaces.within(row, || sockets::bind(fd, &address).map_err(failed))
        }
        _ => {
            let (address, _directory) = unix_address(way)?;
            sockets::bind(fd, &address).map_err(failed)
        }
    }
}

pub(super) fn is_in_use(e: &Error) -> bool {
    matches!(e, Error::Refused(lines) if lines.iter().any(|line| line.ends_with(IN_USE)))
}

pub(super) fn refusal(what: &str, e: &std::io::Error) -> Error {
    let why = match e.raw_os_error() {
        Some(libc::EADDRINUSE) => IN_USE.to_owned(),
        Some(libc::ENODEV) => "this machine does not have this interface".to_owned(),
        Some(libc::EADDRNOTAVAIL) => "this machine does not have this address".to_owned(),
        Some(libc::EACCES) => "we are not permitted to use this address".to_owned(),
        _ => e.to_string(),
    };
    Error::Refused(vec![format!("{what}: {why}")])
}

/// A `sockaddr_un` for a path; a long one goes through a descriptor of its directory, to be kept meanwhile.
fn unix_address(path: &Path) -> Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut address = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() < SUN_PATH {
        address.extend_from_slice(bytes);
        address.push(0);
        return Ok((address, None));
    }
    let (directory, file) = (path.parent().unwrap_or(Path::new("/")), path.file_name().unwrap_or_default());
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(|e| Kernel::file(directory, e))?;
    address.extend_from_slice(format!("/proc/self/fd/{}/", fd.as_raw_fd()).as_bytes());
    address.extend_from_slice(file.as_bytes());
    address.push(0);
    Ok((address, Some(fd)))
}

/// Connections between an unnamed socket and one that a listening socket accepted: made through a listening socket
/// of that name, which is closed again before the program's own is bound.
///
/// Somebody else may connect to the name meanwhile; such a connection is told by its process id, and closed.
fn accept_connections(opening: &mut Opening<'_>, made: &mut HashMap<usize, OwnedFd>) -> Result<()> {
    let image = opening.image;
    for (index, accepted) in image.sockets.iter().enumerate() {
        let named = accepted.family == UNIX && accepted.kind != DATAGRAM && !accepted.local.0.is_empty();
        if !named || (accepted.peer.is_none() && !accepted.orphan) || made.contains_key(&index) {
            continue;
        }
        let listener = image.sockets.iter().find(|s| s.listening.is_some() && s.local == accepted.local);
        // If that is closed, the connection itself tells the name.
        let (listener, is_closed) = (listener.unwrap_or(accepted), listener.is_none());
        let door = sockets::socket(libc::AF_UNIX, accepted.kind as i32, 0)?;
        // What it tells as its name is what the listening socket was bound to.
        let path = file_of(image, listener.renamed_from.or(listener.path));
        let _detour = match path.filter(|file| file.deleted) {
            Some(file) => Detour::to(file.path.as_path())?,
            None => Detour::default(),
        };
        let (address, _directory) = match path {
            Some(file) => unix_address(file.path.as_path())?,
            None => (listener.local.0.clone(), None),
        };
        match path {
            Some(file) => {
                let file = PathFile { deleted: false, ..file.clone() };
                bind_path(opening, &file, None, &door, accepted.kind, name_in(&listener.local), None)?
            }
            None => {
                let bind = || sockets::bind(&door, &address).map_err(|e| refusal(&name(image, listener), &e));
                when_free(opening, accepted, bind)?;
            }
        }
        let what = name(image, accepted);
        let told = accepted.peer.and_then(|peer| image.sockets.get(peer as usize)?.told.as_ref());
        peers::listen_as(&door, told, 16, &what)?;
        let maker = peers::told(opening, accepted);
        let client = peers::socket_of(maker, accepted.kind, &what)?;
        peers::connect_as(&client, maker, &address, &what)?;
        let server = accept_own(&door)?;
        // A name that was left over is so again.
        if let Some(file) = path.filter(|file| !is_closed || file.deleted) {
            std::fs::remove_file(file.path.as_path()).map_err(|e| Kernel::file(file.path.as_path(), e))?;
        }
        made.insert(index, server);
        match accepted.peer {
            Some(peer) => {
                made.insert(peer as usize, client);
            }
            None => leave(opening, made, index, &client)?,
        }
    }
    Ok(())
}

fn accept_own(door: &OwnedFd) -> Result<OwnedFd> {
    loop {
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let fd = rustix::net::accept_with(door, flags).map_err(|e| Kernel::call("accept", e))?;
        let peer =
            sockets::option(&fd, libc::SOL_SOCKET as u32, libc::SO_PEERCRED as u32)?.unwrap_or_default();
        if peer.get(..4) == Some(&std::process::id().to_ne_bytes()) {
            return Ok(fd);
        }
    }
}

/// Puts unread messages back, through the other end.
fn fill(other: &OwnedFd, socket: &Socket) -> Result<()> {
    if socket.queue.is_empty() {
        return Ok(());
    }
    let bytes = socket.queue.iter().map(|m| m.0.len()).sum();
    options::make_room(other, bytes, socket.queue.len())?;
    for message in &socket.queue {
        let mut rest = message.0.as_slice();
        loop {
            let n = sockets::send(other, rest).map_err(|e| Kernel::call("fill the queue of a socket", e))?;
            rest = &rest[n..];
            if rest.is_empty() {
                break;
            }
        }
    }
    Ok(())
}

/// Names, options and shutdown of connected sockets.
fn finish(opening: &mut Opening<'_>, made: &HashMap<usize, OwnedFd>, kept: &HashSet<usize>) -> Result<()> {
    for (index, socket) in opening.image.sockets.iter().enumerate() {
        let connected = (socket.peer.is_some() || socket.orphan) && socket.connection.is_none();
        let Some(fd) = made.get(&index).filter(|_| connected && !kept.contains(&index)) else { continue };
        let is_bound = || Ok::<_, Kernel>(sockets::local_address(fd)?.len() > 2);
        if socket.kind == DATAGRAM && !socket.local.0.is_empty() && !is_bound()? {
            bind_name(opening, socket, fd)?;
        }
        if messages::is_laden(opening.image, socket) {
            continue; // when they are there
        }
        options::apply(fd, socket, &name(opening.image, socket))?;
        shut_down(fd, socket)?;
    }
    Ok(())
}

/// Unix sockets without a connection of which a half was ended: until all have their messages, others are to send to them, and by them.
fn keep_to_shut_down(
    opening: &mut Opening<'_>,
    made: &HashMap<usize, OwnedFd>,
    kept: &HashSet<usize>,
) -> Result<()> {
    for (index, socket) in opening.image.sockets.iter().enumerate() {
        let is_connected = socket.peer.is_some() || socket.orphan;
        let is_it = socket.family == UNIX && socket.shutdown != 0 && !is_connected && !kept.contains(&index);
        if let Some(fd) = made.get(&index).filter(|_| is_it) {
            let fd = fd.try_clone().map_err(|e| Kernel::call("duplicate a socket", e))?;
            opening.files.to_shut_down.push((index, fd));
        }
    }
    Ok(())
}

/// Connections to the outside that nobody has kept.
fn tell_of_those_that_are_over(opening: &mut Opening<'_>, kept: &HashSet<usize>) {
    let sockets = opening.image.sockets.iter().enumerate();
    let over = sockets.filter(|(index, socket)| socket.outside && !kept.contains(index)).count();
    if over > 0 {
        let what = if over == 1 { "a unix connection" } else { "unix connections" };
        let are = if over == 1 { "is" } else { "are" };
        let why = match opening.tcp {
            TcpPolicy::Established => "over, as the program was not there for the other end",
            TcpPolicy::Close => "closed, as asked for",
        };
        opening.files.notes.push(format!("{what} with other processes {are} {why} ({over})"));
    }
}

pub(super) fn shut_down(fd: impl AsFd, socket: &Socket) -> Result<()> {
    use rustix::net::Shutdown;
    let how = match socket.shutdown & 3 {
        1 => Shutdown::Read,
        2 => Shutdown::Write,
        3 if !socket.orphan => Shutdown::Both,
        _ => return Ok(()), // a lost peer shut it down by leaving
    };
    match rustix::net::shutdown(fd, how) {
        // The kernel does it all the same.
        Err(rustix::io::Errno::NOTCONN) if socket.protocol == UDP => Ok(()),
        done => Ok(done.map_err(|e| Kernel::call("shut a socket down", e))?),
    }
}

/// A socket for people.
pub(super) fn name(image: &Image, socket: &Socket) -> String {
    if let Some(file) = file_of(image, socket.path) {
        return format!("socket {}", file.path);
    }
    let local = &socket.local.0;
    let kind = match socket.protocol as i32 {
        libc::IPPROTO_TCP => "TCP",
        libc::IPPROTO_MPTCP => "Multipath TCP",
        libc::IPPROTO_UDP => "UDP",
        _ => "an internet socket",
    };
    match socket.family as i32 {
        libc::AF_UNIX if local.len() > 3 => format!("socket @{}", local[3..].escape_ascii()),
        libc::AF_UNIX => "an unnamed socket".into(),
        libc::AF_NETLINK => format!("a netlink socket of protocol {}", socket.protocol),
        libc::AF_PACKET => {
            let index =
                local.get(4..8).and_then(|b| <[u8; 4]>::try_from(b).ok()).map_or(0, u32::from_ne_bytes);
            format!("a packet socket of interface {index}")
        }
        _ => format!("{kind} {}", address(local)),
    }
}

pub(super) fn address(raw: &[u8]) -> String {
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
    let port = raw.get(2..4).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
    let v4 = raw.get(4..8).and_then(|b| <[u8; 4]>::try_from(b).ok());
    let v6 = raw.get(8..24).and_then(|b| <[u8; 16]>::try_from(b).ok());
    match (raw.len(), v4, v6) {
        (28, _, Some(v6)) => SocketAddr::from((Ipv6Addr::from(v6), port)).to_string(),
        (_, Some(v4), _) => SocketAddr::from((Ipv4Addr::from(v4), port)).to_string(),
        _ => "unbound".into(),
    }
}
