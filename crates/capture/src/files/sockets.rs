//! Sockets: unix pairs with the data in them, listening ones. The others are in [`super::connections`] and
//! [`super::datagrams`].

use super::descriptions::Description;
use super::{Scan, connections, datagrams, messages, paths, pending};
use crate::{Error, Result};
use rustix::fs::{FileType, Stat, major, minor};
use std::ffi::OsStr;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use stillpoint_image::{Bytes, FileKind, Identity, PathFile, Socket, SocketOption, Usage};
use stillpoint_linux::Error as Kernel;
use stillpoint_linux::descriptors::{poll_now, readable};
use stillpoint_linux::fdinfo::Detail;
use stillpoint_linux::proc::mounts::Mount;
use stillpoint_linux::sockets::{self, UnixSocket};
use stillpoint_linux::tcp::{self, state};

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const TCP_LISTEN: u8 = 10;
pub(super) const WAIT: &str = "try again when the program has read it";
pub(super) const CLOSE: &str = "close it before the checkpoint";

/// Family, kind and protocol of a socket.
fn sort(d: &Description) -> Result<(i32, i32, i32)> {
    let option = |name: i32| sockets::int_option(&d.file, SOL_SOCKET, name as u32).map(|v| v.unwrap_or(-1));
    Ok((option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?, option(libc::SO_PROTOCOL)?))
}

fn find<'a>(scan: &Scan<'a>, ino: u32) -> Option<(usize, &'a Description)> {
    let is_socket = |d: &Description| FileType::from_raw_mode(d.stat.st_mode) == FileType::Socket;
    scan.all.iter().enumerate().find(|(_, d)| is_socket(d) && d.stat.st_ino == u64::from(ino))
}

/// Whether a socket that is a standard stream is a unix socket whose peer is outside the target and alive.
pub(crate) fn is_stream_from_outside(scan: &mut Scan<'_>, d: &Description) -> Result<bool> {
    if sort(d)?.0 != libc::AF_UNIX {
        return Ok(false);
    }
    if !scan.in_one_network(d)? {
        return Ok(!scan.in_own_network(d)?);
    }
    let peer = scan.unix_socket(d.stat.st_ino as u32)?.and_then(|s| s.peer).unwrap_or(0);
    Ok(peer != 0 && find(scan, peer).is_none())
}

/// Unread standard input from a socket.
pub(crate) fn standard_input(scan: &mut Scan<'_>, d: &Description) -> Result<Vec<Vec<u8>>> {
    let stream = sort(d)?.1 == libc::SOCK_STREAM;
    Ok(unread(scan, d, stream)?.unwrap_or_default())
}

/// Captures a socket.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    if let Some(&row) = scan.sockets.get(&d.stat.st_ino) {
        return Ok(Some(FileKind::Socket(row)));
    }
    let sort = sort(d)?;
    if let Some(holder) = scan.target.outsiders.holder(&d.link) {
        return scan.refuse(
            d,
            format!("it is shared with {holder}"),
            "end that process before the checkpoint",
        );
    }
    if !scan.in_one_network(d)? {
        return scan.refuse(d, "it is in another network namespace than others, or than stillpoint", CLOSE);
    }
    let row = match sort {
        (libc::AF_UNIX, ..) => unix(scan, d, sort)?,
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM, libc::IPPROTO_TCP | libc::IPPROTO_MPTCP) => {
            tcp(scan, d, sort)?
        }
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_UDP) => {
            datagrams::udp(scan, d, sort)?
        }
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_RAW, _)
        | (libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP)
        | (libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_ICMPV6) => datagrams::raw(scan, d, sort)?,
        (libc::AF_NETLINK, ..) => datagrams::netlink(scan, d, sort)?,
        (libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_DGRAM, _) => datagrams::packets(scan, d, sort)?,
        other => {
            let why = format!("it is {}, which cannot be captured", name_of_sort(other));
            return scan.refuse(d, why, CLOSE);
        }
    };
    Ok(row.map(FileKind::Socket))
}

fn name_of_sort((family, kind, protocol): (i32, i32, i32)) -> String {
    let family = match family {
        libc::AF_INET => "an IPv4 socket",
        libc::AF_INET6 => "an IPv6 socket",
        libc::AF_NETLINK => "a netlink socket",
        libc::AF_PACKET => "a packet socket",
        libc::AF_VSOCK => "a vsock socket",
        libc::AF_ALG => "a socket of the kernel's cryptography",
        libc::AF_BLUETOOTH => "a Bluetooth socket",
        libc::AF_CAN => "a CAN socket",
        libc::AF_XDP => "an XDP socket",
        _ => return format!("a socket of family {family}"),
    };
    let kind = match kind {
        libc::SOCK_RAW => " (raw)",
        libc::SOCK_SEQPACKET => " (seqpacket)",
        _ => "",
    };
    format!("{family}{kind} of protocol {protocol}")
}

/// A row with what all sockets have; `None` if refused.
pub(super) fn common(scan: &mut Scan<'_>, d: &Description, sort: (i32, i32, i32)) -> Result<Option<Socket>> {
    if poll_now(&d.file, libc::POLLIN)? & libc::POLLERR != 0 {
        return scan.refuse(
            d,
            "it has an error, or something in its error queue, that the program has not yet read",
            WAIT,
        );
    }
    let mut options = match scan.options.differing(&d.file, sort) {
        // What is special about it is told by one that is new.
        Err(Error::Kernel(e)) if matches!(e.errno(), Some(libc::EPERM | libc::EACCES)) => {
            return scan.refuse(
                d,
                "you are not permitted to make a socket of its kind",
                "ask for it as root, or with CAP_NET_RAW",
            );
        }
        options => options?,
    };
    if sockets::has_filter(&d.file)? {
        let Some(program) = sockets::filter(&d.file)?.filter(|_| is_of_packets(sort)) else {
            return scan.refuse(d, "a packet filter is attached to it", CLOSE);
        };
        let option = |name: i32, value| SocketOption { level: SOL_SOCKET, name: name as u32, value };
        options.push(option(libc::SO_ATTACH_FILTER, Bytes(program)));
        let is_locked = sockets::int_option(&d.file, SOL_SOCKET, libc::SO_LOCK_FILTER as u32)? == Some(1);
        options.extend(is_locked.then(|| option(libc::SO_LOCK_FILTER, Bytes(1i32.to_ne_bytes().to_vec()))));
    }
    Ok(Some(Socket {
        family: sort.0 as u32,
        kind: sort.1 as u32,
        protocol: sort.2 as u32,
        foreign: is_foreign(d, sort)?,
        options,
        ..Socket::default()
    }))
}

/// Whether a socket is bound to an internet address that nobody could bind to here without being allowed to.
fn is_foreign(d: &Description, (family, ..): (i32, i32, i32)) -> Result<bool> {
    if !matches!(family, libc::AF_INET | libc::AF_INET6) {
        return Ok(false);
    }
    let mut address = sockets::local_address(&d.file)?;
    if let Some(port) = address.get_mut(2..4) {
        port.fill(0);
    }
    if address.iter().skip(2).all(|byte| *byte == 0) {
        return Ok(false);
    }
    let probe = sockets::socket(family, libc::SOCK_DGRAM, 0)?;
    Ok(sockets::bind(&probe, &address).is_err_and(|e| e.raw_os_error() == Some(libc::EADDRNOTAVAIL)))
}

/// Whether what a socket receives comes packet by packet, of which a filter takes some.
fn is_of_packets((family, kind, _): (i32, i32, i32)) -> bool {
    let internet = matches!(family, libc::AF_INET | libc::AF_INET6);
    // A netlink socket's are looked at when they are sent to it: what is in its queue has passed.
    // So are those of a unix socket, where there are packets; it is attached behind them.
    matches!(family, libc::AF_PACKET | libc::AF_NETLINK | libc::AF_UNIX)
        || internet && matches!(kind, libc::SOCK_DGRAM | libc::SOCK_RAW)
}

pub(super) fn add(scan: &mut Scan<'_>, d: &Description, socket: Socket) -> u32 {
    let row = scan.builder.image.sockets.len() as u32;
    scan.builder.image.sockets.push(Socket { status: Some(paths::status(&d.stat)), ..socket });
    scan.sockets.insert(d.stat.st_ino, row);
    row
}

fn tcp(scan: &mut Scan<'_>, d: &Description, sort: (i32, i32, i32)) -> Result<Option<u32>> {
    let info = tcp::info(&d.file)?;
    let used = poll_now(&d.file, libc::POLLIN | libc::POLLRDHUP)? & (libc::POLLIN | libc::POLLRDHUP) != 0;
    let is_multipath = sort.2 == libc::IPPROTO_MPTCP;
    if info.state != state::LISTEN && (info.state != state::CLOSE || used) {
        if is_multipath {
            let why = "it is a connection of Multipath TCP, whose parts cannot be captured";
            return scan.refuse(d, why, CLOSE);
        }
        let connection = connections::capture(scan, d, sort, info)?;
        return Ok(connection.map(|socket| add(scan, d, socket)));
    }
    let protocol = sockets::option(&d.file, libc::IPPROTO_TCP as u32, libc::TCP_ULP as u32)?;
    // Of Multipath TCP it is that itself.
    if protocol.is_some_and(|name| !name.is_empty()) && !is_multipath {
        return scan.refuse(d, "it has an upper layer protocol (TCP_ULP)", CLOSE);
    }
    let Some(mut socket) = common(scan, d, sort)? else { return Ok(None) };
    socket.local = bound(sockets::local_address(&d.file)?);
    let listens = info.state == state::LISTEN;
    socket.listening = listens.then_some(info.backlog);
    socket.unaccepted = Some(info.pending).filter(|&n| listens && n > 0);
    let row = add(scan, d, socket);
    if listens {
        may_wait(scan, d, row)?;
    }
    Ok(Some(row))
}

/// Something may wait in the queue of this socket, or somebody at its other end.
pub(super) fn may_wait(scan: &mut Scan<'_>, d: &Description, row: u32) -> Result<()> {
    let file = d.file.try_clone().map_err(|e| stillpoint_linux::Error::call("duplicate a socket", e))?;
    scan.builder.waiting.push((row, file));
    Ok(())
}

/// An internet address, or nothing if the socket is bound to none. One that is bound may still have no port (`IP_BIND_ADDRESS_NO_PORT`).
pub(super) fn bound(address: Vec<u8>) -> Bytes {
    let has = |at: Range<usize>| address.get(at).is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0));
    let (port, v4, v6) = (2..4, 4..8, 8..24);
    let is_v6 = address.len() > 24;
    Bytes(if has(port) || has(if is_v6 { v6 } else { v4 }) { address } else { Vec::new() })
}

/// A raw internet address for people.
pub fn address(raw: &[u8]) -> String {
    let family = raw.get(..2).map_or(0, |b| i32::from(u16::from_ne_bytes([b[0], b[1]])));
    let port = raw.get(2..4).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
    let v4 = raw.get(4..8).and_then(|b| <[u8; 4]>::try_from(b).ok());
    let v6 = raw.get(8..24).and_then(|b| <[u8; 16]>::try_from(b).ok());
    match (family, v4, v6) {
        (libc::AF_INET, Some(v4), _) => SocketAddr::from((Ipv4Addr::from(v4), port)).to_string(),
        (libc::AF_INET6, _, Some(v6)) => SocketAddr::from((Ipv6Addr::from(v6), port)).to_string(),
        _ => "?".into(),
    }
}

fn unix(scan: &mut Scan<'_>, d: &Description, sort: (i32, i32, i32)) -> Result<Option<u32>> {
    let Some(diag) = scan.unix_socket(d.stat.st_ino as u32)? else {
        return scan.refuse(d, "sock_diag does not know it", "");
    };
    let waited_for = diag.state == TCP_LISTEN && diag.receive_queue > 0;
    if waited_for && let Some((why, hint)) = pending::problem(scan, &diag)? {
        return scan.refuse(d, why, hint);
    }
    let Some(mut socket) = common(scan, d, sort)? else { return Ok(None) };
    let local = sockets::local_address(&d.file)?;
    socket.local = Bytes(if local.len() > 2 { local } else { Vec::new() });
    socket.listening = (diag.state == TCP_LISTEN).then_some(diag.send_queue);
    socket.shutdown = u32::from(diag.shutdown);
    let told = sockets::peer_identity(&d.file)?;
    socket.told = told.map(|who| Identity { uid: who.uid, gid: who.gid, groups: who.groups });
    let Some(peer) = peer(scan, d, sort.1, &diag, &mut socket)? else { return Ok(None) };
    if !name(scan, d, &diag, peer, &mut socket)? {
        return Ok(None);
    }
    if let Some(row) = socket.path {
        note_attributes(scan, row)?;
    }
    // One that is not connected can have been sent datagrams only.
    let is_reached = sort.1 == libc::SOCK_DGRAM || peer.is_some() || socket.orphan;
    let has_queue = socket.listening.is_none() && is_reached;
    if has_queue && !queue(scan, d, sort.1, peer, &mut socket)? {
        return Ok(None);
    }
    let is_outside = socket.outside;
    let row = add(scan, d, socket);
    if let Some((_, other)) = peer {
        link(scan, row, other)?;
    }
    if is_outside {
        may_wait(scan, d, row)?;
    }
    Ok(Some(row))
}

type Peer<'a> = Option<(usize, &'a Description)>;

/// The peer inside the target, if there is one; `None` if the connection is refused.
fn peer<'a>(
    scan: &mut Scan<'a>,
    d: &Description,
    kind: i32,
    diag: &UnixSocket,
    socket: &mut Socket,
) -> Result<Option<Peer<'a>>> {
    match diag.peer {
        None => Ok(Some(None)),
        Some(0) if kind != libc::SOCK_DGRAM && pending::is_waiting(scan, diag.ino)? => Ok(Some(None)),
        Some(0) if kind == libc::SOCK_DGRAM || diag.shutdown == 3 => {
            socket.orphan = true;
            Ok(Some(None))
        }
        Some(0) => scan.refuse(d, "the other side has not yet accepted its connection", CLOSE),
        // To itself it sends by its name, too.
        Some(ino) if ino == diag.ino && kind == libc::SOCK_DGRAM => {
            named_peer(scan, d, kind, ino, false, socket)
        }
        Some(ino) => {
            let back = scan.unix_socket(ino)?;
            let mutual = back.as_ref().and_then(|b| b.peer) == Some(diag.ino);
            match find(scan, ino) {
                Some(found) if mutual => Ok(Some(Some(found))),
                _ => named_peer(scan, d, kind, ino, mutual, socket),
            }
        }
    }
}

/// Fills in which of the program's sockets others send to, when all have rows.
pub(super) fn resolve_senders(scan: &mut Scan<'_>) {
    for (from, to) in std::mem::take(&mut scan.senders) {
        if let (Some(&row), Some(&other)) = (scan.sockets.get(&from), scan.sockets.get(&to)) {
            scan.builder.image.sockets[row as usize].sends_to = Some(other);
        }
    }
}

/// A datagram socket that sends to a name is connected again. To any other connection to the outside happens what happens to those
/// of TCP: it goes on if it is kept, and is over otherwise.
fn named_peer<'a>(
    scan: &mut Scan<'a>,
    d: &Description,
    kind: i32,
    ino: u32,
    mutual: bool,
    socket: &mut Socket,
) -> Result<Option<Peer<'a>>> {
    let remote = sockets::peer_address(&d.file)?.unwrap_or_default();
    if kind == libc::SOCK_DGRAM && !mutual && remote.len() > 2 {
        socket.remote = Bytes(remote);
        scan.senders.push((d.stat.st_ino, u64::from(ino)));
        socket.mounts = scan.builder.views.of_process(d.pid());
        let name = messages::path_of(&socket.remote.0).to_owned();
        let file = scan.unix_socket(ino)?.and_then(|peer| peer.vfs);
        // One of the program's knows best where that is.
        let peer = find(scan, ino).map(|(_, peer)| (scan.whose(peer), place_of(peer)));
        let path = match (name.first(), peer) {
            (None | Some(0), _) => None,
            (Some(b'/'), _) | (_, None) => Some(located(scan, scan.whose(d), &name, file)),
            (_, Some((_, Some(place)))) => Some(place),
            (_, Some((pid, None))) => Some(located(scan, pid, &name, file)),
        };
        if let Some(path) = path.filter(|path| path.as_os_str().as_bytes() != name) {
            socket.remote.0.truncate(2);
            socket.remote.0.extend_from_slice(path.as_os_str().as_bytes());
            socket.remote.0.push(0);
        }
        if socket.remote.0.len() > 110 {
            return scan.refuse(d, "it sends to a socket by a relative name, whose path is too long", CLOSE);
        }
        return Ok(Some(None));
    }
    if mutual {
        (socket.orphan, socket.outside) = (true, true);
        return Ok(Some(None));
    }
    let link = format!("socket:[{ino}]");
    let why = match scan.target.outsiders.holder(link.as_bytes()) {
        Some(holder) => format!("it is a unix socket connected to {holder}"),
        None => "it is a unix socket connected to another process".to_owned(),
    };
    let hint = "close the connection before the checkpoint; the other end would not go back in time with it";
    scan.refuse(d, why, hint)
}

/// Fills in the row of a bound socket's name; `false` if refused.
fn name(
    scan: &mut Scan<'_>,
    d: &Description,
    diag: &UnixSocket,
    peer: Peer<'_>,
    socket: &mut Socket,
) -> Result<bool> {
    if socket.local.0.is_empty() {
        return Ok(true);
    }
    let stream = socket.kind != libc::SOCK_DGRAM as u32;
    if stream && (peer.is_some() || socket.orphan) {
        // An accepted socket carries the name of the socket that accepted it.
        if accepted_here(scan, diag)? {
            return Ok(true);
        }
        let other = match peer {
            Some((_, other)) => scan.unix_socket(other.stat.st_ino as u32)?,
            None => None,
        };
        if other.is_some_and(|other| !other.name.is_empty()) {
            let why = "it is a connection both ends of which have names";
            return scan.refuse::<()>(d, why, CLOSE).map(|_| false);
        }
        // Who accepted it is closed: for a moment, the name must be free.
        if scan.is_listened_to(&diag.name)? {
            let why = "it is a connection by a name, and another process listens on that";
            return scan.refuse::<()>(d, why, CLOSE).map(|_| false);
        }
    }
    if diag.name.first().is_none_or(|b| *b == 0) {
        return Ok(true); // an abstract name
    }
    let path = located(scan, scan.whose(d), &diag.name, diag.vfs);
    if ["/proc", "/dev/fd"].iter().any(|folder| path.starts_with(folder)) {
        let why = format!("its name {} leads to its file for the program alone", path.display());
        return scan.refuse::<()>(d, why, CLOSE).map(|_| false);
    }
    let namespace = scan.builder.views.of_process(scan.whose(d));
    socket.mounts = namespace;
    let found = rustix::fs::lstat(scan.builder.views.reach(namespace, path.as_os_str().as_bytes()));
    match found {
        Ok(stat) if diag.vfs.is_some_and(|(ino, _)| ino == stat.st_ino as u32) => {
            if stat.st_nlink > 1 {
                let why = format!(
                    "its name {} has another one beside it (link(2)), which would lead nowhere after a restore",
                    path.display()
                );
                return scan.refuse::<()>(d, why, "remove the other name").map(|_| false);
            }
            if let Some(point) = mounted_at(scan, namespace, &stat)? {
                let why = format!(
                    "its name {} is mounted at {} as well, which would lead nowhere after a restore",
                    path.display(),
                    point.display()
                );
                return scan.refuse::<()>(d, why, "unmount that, or mount the directory").map(|_| false);
            }
            let made_anew = scan.builder.views.is_made_anew(stat.st_dev);
            let row = paths::describe(path.as_os_str().as_bytes(), &stat, Usage::Path);
            socket.path = Some(scan.builder.path(PathFile { namespace, made_anew, ..row }).0);
        }
        found => {
            let why = format!("its name {} belongs to another file now", path.display());
            let (is_taken, path) = (found.is_ok(), Bytes::from(path.as_path()));
            let gone =
                PathFile { path, namespace, deleted: true, mode: libc::S_IFSOCK, ..PathFile::default() };
            // Where a relative name leads is a guess from where the program is.
            match whereabouts(scan, d)? {
                Whereabouts::Gone if !is_taken => socket.path = Some(scan.builder.path(gone).0),
                Whereabouts::Renamed(row)
                    if is_below(&scan.builder.image.paths[row as usize], &diag.name) =>
                {
                    socket.path = Some(row);
                }
                Whereabouts::Renamed(row) if !is_taken => {
                    (socket.path, socket.renamed_from) = (Some(row), Some(scan.builder.path(gone).0));
                }
                Whereabouts::Refused => return Ok(false),
                Whereabouts::Gone | Whereabouts::Renamed(_) => {
                    return scan.refuse::<()>(d, why, CLOSE).map(|_| false);
                }
            }
        }
    }
    Ok(true)
}

/// Fills in the extended attributes of the file that a socket is bound to, lists of who may connect among them.
fn note_attributes(scan: &mut Scan<'_>, row: u32) -> Result<()> {
    let file = &scan.builder.image.paths[row as usize];
    if file.deleted {
        return Ok(());
    }
    let place = scan.builder.views.reach(file.namespace, &file.path.0);
    let list = |names: &mut [u8]| rustix::fs::llistxattr(&place, names);
    let found = paths::attributes(list, |name, value| rustix::fs::lgetxattr(&place, name, value));
    scan.builder.image.paths[row as usize].attributes = match found {
        // Somebody has just removed it.
        Err(rustix::io::Errno::NOENT) => Vec::new(),
        found => found.map_err(|e| Kernel::file(&place, e))?,
    };
    Ok(())
}

/// Where the file of a socket is mounted by itself (`mount --bind`), as seen from a mount namespace of the program's.
fn mounted_at(scan: &Scan<'_>, namespace: Option<u32>, file: &Stat) -> Result<Option<PathBuf>> {
    let views = &scan.builder.views;
    let all = match namespace {
        Some(row) => views.mounts(row),
        None => views.ours()?,
    };
    let device = (major(file.st_dev), minor(file.st_dev));
    // Files of an overlay may have the device number of what is below it.
    let may_be = |mount: &&Mount| mount.root != b"/" && (mount.device == device || mount.kind == b"overlay");
    let is_it = |mount: &&Mount| {
        let found = rustix::fs::lstat(views.reach(namespace, &mount.point));
        found.is_ok_and(|found| (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino))
    };
    let found = all.iter().filter(may_be).find(is_it);
    Ok(found.map(|mount| PathBuf::from(OsStr::from_bytes(&mount.point))))
}

/// What became of the file that a socket was bound to, if it is not where it was.
enum Whereabouts {
    /// It was removed.
    Gone,
    /// It has another name, by which the socket is reached: servers bind to a name of their own and rename it when they are ready.
    Renamed(u32),
    Refused,
}

fn whereabouts(scan: &mut Scan<'_>, d: &Description) -> Result<Whereabouts> {
    let file = match sockets::bound_file(&d.file) {
        Ok(file) => file,
        Err(e) if e.errno() == Some(libc::EPERM) => {
            let why = "its name was removed, or the file renamed: which of both, only CAP_NET_ADMIN is told";
            return scan.refuse::<()>(d, why, "do it as root").map(|_| Whereabouts::Refused);
        }
        Err(e) => return Err(e.into()),
    };
    let failed = |e| Kernel::call(format!("look at the file of {}", d.name()), e);
    if rustix::fs::fstat(&file).map_err(failed)?.st_nlink == 0 {
        return Ok(Whereabouts::Gone);
    }
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let link = link.map_err(|e| Kernel::file("/proc/self/fd", e))?;
    let row = paths::path_file(scan.builder, link.as_os_str().as_bytes(), &file, Usage::Path, &d.name())?;
    Ok(row.map_or(Whereabouts::Refused, Whereabouts::Renamed))
}

/// Whether a file has a relative name somewhere.
fn is_below(file: &PathFile, name: &[u8]) -> bool {
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    !name.starts_with(b"/") && file.path.as_path().ends_with(Path::new(std::ffi::OsStr::from_bytes(name)))
}

/// Where the file is that a socket is bound to, if we are told, and it has a name.
fn place_of(d: &Description) -> Option<PathBuf> {
    let file = sockets::bound_file(&d.file).ok()?;
    let has_name = rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_nlink > 0);
    has_name.then(|| std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok())?
}

/// Whether a listening socket of the same name is inside the target.
fn accepted_here(scan: &mut Scan<'_>, diag: &UnixSocket) -> Result<bool> {
    for d in scan.all.iter().filter(|d| FileType::from_raw_mode(d.stat.st_mode) == FileType::Socket) {
        if let Some(other) = scan.unix_socket(d.stat.st_ino as u32)?
            && other.state == TCP_LISTEN
            && other.name == diag.name
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where a bound name leads: a relative one from the folder in which the program stood, most often the one in which it still stands;
/// an absolute one from the root that it had, which may be another one now. `file`: inode number of the file, by which that is told.
fn located(scan: &Scan<'_>, pid: u32, name: &[u8], file: Option<(u32, u32)>) -> PathBuf {
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    let path = Path::new(std::ffi::OsStr::from_bytes(&name[..end]));
    let link = |what: &str| std::fs::read_link(format!("/proc/{pid}/{what}"));
    if !path.is_absolute() {
        return link("cwd").unwrap_or_default().join(path);
    }
    let root = link("root").unwrap_or_else(|_| "/".into());
    let below = root.join(path.strip_prefix("/").unwrap_or(path));
    let namespace = scan.builder.views.of_process(pid);
    let reached = |path: &Path| scan.builder.views.reach(namespace, path.as_os_str().as_bytes());
    let is_it = |path: &Path| {
        let stat = rustix::fs::lstat(reached(path));
        stat.is_ok_and(|stat| file.is_some_and(|(ino, _)| ino == stat.st_ino as u32))
    };
    let could_be = |path: &Path| path.parent().is_some_and(|folder| reached(folder).is_dir());
    match (is_it(path), is_it(&below)) {
        (true, _) => path.to_owned(),
        (_, true) => below,
        _ if could_be(&below) => below,
        _ => path.to_owned(),
    }
}

/// Fills in the unread messages; `false` if refused.
fn queue(
    scan: &mut Scan<'_>,
    d: &Description,
    kind: i32,
    peer: Peer<'_>,
    socket: &mut Socket,
) -> Result<bool> {
    if kind == libc::SOCK_STREAM && poll_now(&d.file, libc::POLLPRI)? & libc::POLLPRI != 0 {
        return scan.refuse::<()>(d, "it has unread out-of-band data (MSG_OOB)", WAIT).map(|_| false);
    }
    let passes = |name: u32| socket.options.iter().any(|o| o.level == SOL_SOCKET && o.name == name);
    let connected = peer.is_some() || socket.orphan;
    let credentials = passes(libc::SO_PASSCRED as u32) || passes(libc::SO_PASSSEC as u32) || passes(76);
    if scan.in_flight.queues.contains_key(&d.stat.st_ino) || kind != libc::SOCK_STREAM || credentials {
        let diag = match peer {
            Some((_, other)) => scan.unix_socket(other.stat.st_ino as u32)?,
            None => None,
        };
        let other = peer.and_then(|(_, other)| Some((other, diag.as_ref()?)));
        let Some(found) = messages::capture(scan, d, socket, other)? else { return Ok(false) };
        if !found.is_empty() && !connected && socket.local.0.is_empty() {
            let why = "it has unread datagrams, and no name to send them to";
            return scan.refuse::<()>(d, why, WAIT).map(|_| false);
        }
        let plain =
            found.iter().all(|m| m.files.is_empty() && m.credentials.is_none() && m.sender.0.is_empty());
        match plain && connected {
            true => socket.queue = found.into_iter().map(|m| m.data).collect(),
            false => socket.messages = found,
        }
        return Ok(true);
    }
    let Some(plain) = unread(scan, d, kind == libc::SOCK_STREAM)? else { return Ok(false) };
    socket.queue = plain.into_iter().map(Bytes).collect();
    Ok(true)
}

fn unread(scan: &mut Scan<'_>, d: &Description, stream: bool) -> Result<Option<Vec<Vec<u8>>>> {
    if matches!(d.info.detail, Detail::Unix { descriptors_in_queue } if descriptors_in_queue > 0) {
        return scan.refuse(d, "it has unread messages that carry descriptors", WAIT);
    }
    let events = poll_now(&d.file, libc::POLLIN | libc::POLLRDHUP)?;
    if events & libc::POLLIN == 0 || (stream && readable(&d.file)? == 0) {
        return Ok(Some(Vec::new()));
    }
    let messages = sockets::peek_all(&d.file, stream)?;
    // Empty datagrams that somebody peeked at before are passed over by later peeks.
    if messages.is_empty() && events & libc::POLLRDHUP == 0 {
        return scan.refuse(d, "it has unread messages that cannot be copied", WAIT);
    }
    Ok(Some(messages))
}

/// Makes two rows each other's peers, once both are there.
fn link(scan: &mut Scan<'_>, row: u32, other: &Description) -> Result<()> {
    if let Some(&peer) = scan.sockets.get(&other.stat.st_ino) {
        scan.builder.image.sockets[row as usize].peer = Some(peer);
        scan.builder.image.sockets[peer as usize].peer = Some(row);
    }
    Ok(())
}
