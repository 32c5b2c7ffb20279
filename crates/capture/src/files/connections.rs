//! TCP connections: their state, which two of them are the ends of one, and what is on its way between those.
//!
//! Nothing is done to a connection whose other end is elsewhere but to look what is unread. It is restored as one that is over,
//! unless it has been kept ([`crate::keeper`]). One that is being made is made once more. Of one with both ends in the program
//! everything is known and restored.

use super::descriptions::Description;
use super::sockets::{CLOSE, address};
use super::{Scan, options::Defaults};
use crate::{Builder, Result};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use stillpoint_image::{Bytes, Connection, Socket};
use stillpoint_linux::descriptors::poll_now;
use stillpoint_linux::fdinfo::Folders;
use stillpoint_linux::sockets::{Endpoint, endpoint};
use stillpoint_linux::tcp::{self, Guard, Info, state};
use stillpoint_linux::{inet_diag, sockets};

const TCP: u32 = libc::IPPROTO_TCP as u32;

/// A connection whose row is complete when all have been found.
#[derive(Debug)]
pub struct Found {
    row: u32,
    /// For people.
    name: String,
    file: OwnedFd,
    sort: (i32, i32, i32),
    failed: bool,
    /// What is unread has been looked at.
    seen: bool,
}

impl Found {
    /// Its row among the sockets of the image.
    pub(crate) fn row(&self) -> u32 {
        self.row
    }

    /// Our duplicate of it.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Refuses sockets that sign what they send, and take nothing that is not signed (BGP): nobody can read the keys back from the program, and a
/// server without them would let in everybody. To be asked while the program runs: all TCP sockets of the machine are gone through.
pub(crate) fn refuse_signed(builder: &mut Builder, pids: &[u32]) {
    let mut own = HashMap::new();
    for &pid in pids {
        // One that has ended meanwhile is no concern, nor is a descriptor that is closed.
        let Ok(folders) = Folders::open(pid) else { continue };
        for fd in folders.list().unwrap_or_default() {
            let link = folders.link(fd).unwrap_or_default();
            let ino = link.strip_prefix(b"socket:[").and_then(|rest| rest.strip_suffix(b"]"));
            let ino = ino.and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u64>().ok());
            own.extend(ino.map(|ino| (ino, (pid, fd))));
        }
    }
    if own.is_empty() {
        return;
    }
    for family in [libc::AF_INET, libc::AF_INET6] {
        // A kernel that does not tell has most often no such sockets, either.
        let signed = inet_diag::signed(family).unwrap_or_default();
        for (pid, fd) in signed.iter().filter_map(|ino| own.get(ino)) {
            let what = format!("descriptor {fd} of process {pid}");
            builder.refuse(what, "it signs its TCP packets (TCP_MD5SIG), and its keys cannot be had", CLOSE);
        }
    }
}

/// Captures a connection as far as it can be told by itself; `None` if refused.
pub(super) fn capture(
    scan: &mut Scan<'_>,
    d: &Description,
    sort: (i32, i32, i32),
    info: Info,
) -> Result<Option<Socket>> {
    let (info, remote, with_data) = connecting(d, sort, info)?;
    let events = poll_now(&d.file, libc::POLLPRI)?;
    let local = sockets::local_address(&d.file)?;
    let name = name(d, &local, &remote);
    let why = if info.state == state::SYN_RECEIVED || info.state == state::SYN_SENT && remote.is_empty() {
        Some(("it is just being connected", "try again when it is"))
    } else if with_data {
        Some(("it is just being connected, with data in the first packet", "try again when it is"))
    } else if sockets::option(&d.file, TCP, libc::TCP_ULP as u32)?.is_some_and(|u| !u.is_empty()) {
        Some(("it has an upper layer protocol (TCP_ULP)", CLOSE))
    } else if sockets::has_filter(&d.file)? {
        Some(("a packet filter is attached to it", CLOSE))
    } else if events & libc::POLLPRI != 0 {
        Some(("it has urgent data that was not yet read", "try again when the program has read it"))
    } else if sockets::int_option(&d.file, libc::SOL_SOCKET as u32, libc::SO_PEEK_OFF as u32)?
        .is_some_and(|at| at >= 0)
    {
        Some(("the program peeks at it by SO_PEEK_OFF", CLOSE))
    } else if !remote.is_empty() && endpoint(&local) == endpoint(&remote) {
        Some(("it is connected to itself", CLOSE))
    } else {
        None
    };
    if let Some((why, hint)) = why {
        scan.builder.refuse(name, why, hint);
        return Ok(None);
    }
    let failed = events & libc::POLLERR != 0;
    let connection = Connection {
        state: info.state,
        remote: Bytes(remote),
        failed: failed && info.state == state::CLOSE,
        ..Connection::default()
    };
    let file = d.file.try_clone().map_err(|e| stillpoint_linux::Error::call("duplicate a socket", e))?;
    let row = scan.builder.image.sockets.len() as u32;
    scan.builder.connections.push(Found { row, name, file, sort, failed, seen: false });
    Ok(Some(Socket {
        family: sort.0 as u32,
        kind: sort.1 as u32,
        protocol: sort.2 as u32,
        local: Bytes(local),
        connection: Some(connection),
        ..Socket::default()
    }))
}

/// The state of a connection, its remote address, and whether data goes with its first packet. One that is being made may have
/// been made, or have failed, a moment later.
fn connecting(d: &Description, sort: (i32, i32, i32), info: Info) -> Result<(Info, Vec<u8>, bool)> {
    let remote = || sockets::peer_address(&d.file).map(Option::unwrap_or_default);
    if info.state != state::SYN_SENT {
        return Ok((info, remote()?, false));
    }
    match inet_diag::connecting(sort.0, d.stat.st_ino)? {
        Some(connecting) => Ok((info, connecting.remote, connecting.with_data)),
        None => Ok((tcp::info(&d.file)?, remote()?, false)),
    }
}

fn name(d: &Description, local: &[u8], remote: &[u8]) -> String {
    let link = String::from_utf8_lossy(&d.link);
    let peer = if remote.is_empty() { String::new() } else { format!(" ↔ {}", address(remote)) };
    format!("descriptor {} ({link}, TCP {}{peer})", d.fd(), address(local))
}

/// Completes the rows of all connections that have been found so far.
pub(super) fn complete(builder: &mut Builder, defaults: &mut Defaults) -> Result<()> {
    let mut found = std::mem::take(&mut builder.connections);
    let done = complete_all(builder, &mut found, defaults);
    builder.connections = found;
    done
}

fn complete_all(builder: &mut Builder, found: &mut [Found], defaults: &mut Defaults) -> Result<()> {
    let pairs = pairs(builder, found);
    let mut guard = None;
    for &(a, b) in &pairs {
        if let Some(failed) = [a, b].into_iter().find(|&i| found[i].failed) {
            let why = "it has an error, or something in its error queue, that the program has not yet read";
            builder.refuse(&found[failed].name, why, "try again when the program has read it");
            continue;
        }
        for (own, other) in [(a, b), (b, a)] {
            let row = found[own].row as usize;
            builder.image.sockets[row].peer = Some(found[other].row);
            builder.image.sockets[row].options = options(defaults, &found[own])?;
            found[own].seen = true;
        }
        for (from, to) in [(a, b), (b, a)] {
            let flow =
                tcp::flow(found[from].file.as_fd(), found[to].file.as_fd(), || watched(&mut guard, found));
            let flow = match flow {
                Err(e) if e.errno() == Some(libc::EPERM) => {
                    let why =
                        "what it has sent and its other end has no room for is shown to CAP_NET_ADMIN alone";
                    let hint = "checkpoint it as root, or when less is on its way";
                    builder.refuse(&found[from].name, why, hint);
                    // To know of another one might take as long.
                    return Ok(());
                }
                flow => flow?,
            };
            let (from, to) = (found[from].row as usize, found[to].row as usize);
            builder.image.sockets[to].queue = queue(flow.unread);
            if let Some(connection) = &mut builder.image.sockets[from].connection {
                connection.unsent = Bytes(flow.unsent);
            }
        }
    }
    for outer in found.iter_mut().filter(|f| !f.seen) {
        let socket = &mut builder.image.sockets[outer.row as usize];
        match is_being_made(socket) {
            true => socket.options = options(defaults, outer)?,
            false => socket.queue = queue(tcp::unread(&outer.file)?),
        }
        outer.seen = true;
    }
    Ok(())
}

fn queue(data: Vec<u8>) -> Vec<Bytes> {
    if data.is_empty() { Vec::new() } else { vec![Bytes(data)] }
}

/// The one guard of all connections, made when it is needed.
fn watched<'g>(guard: &'g mut Option<Guard>, found: &[Found]) -> stillpoint_linux::Result<&'g Guard> {
    if guard.is_none() {
        let files: Vec<_> = found.iter().map(|f| f.file.as_fd()).collect();
        *guard = Some(Guard::new(&files)?);
    }
    guard.as_ref().ok_or_else(|| stillpoint_linux::Error::Other("there is no guard".into()))
}

fn is_being_made(socket: &Socket) -> bool {
    socket.connection.as_ref().is_some_and(|connection| connection.state == state::SYN_SENT)
}

/// Connections both ends of which were found and are not peers yet.
fn pairs(builder: &Builder, found: &[Found]) -> Vec<(usize, usize)> {
    let mut ends: HashMap<(Endpoint, Endpoint), usize> = HashMap::new();
    let mut pairs = Vec::new();
    for (index, one) in found.iter().enumerate() {
        let socket = &builder.image.sockets[one.row as usize];
        if is_being_made(socket) {
            continue;
        }
        let remote = socket.connection.as_ref().and_then(|c| endpoint(&c.remote.0));
        let (Some(local), Some(remote), None) = (endpoint(&socket.local.0), remote, socket.peer) else {
            continue;
        };
        match ends.remove(&(remote, local)) {
            Some(other) => pairs.push((other, index)),
            None => drop(ends.insert((local, remote), index)),
        }
    }
    pairs
}

/// Options of a connection that can be set again. What the two sides have agreed on looks as if it had been set.
fn options(defaults: &mut Defaults, found: &Found) -> Result<Vec<stillpoint_image::SocketOption>> {
    const AGREED: [i32; 2] = [libc::TCP_MAXSEG, libc::TCP_WINDOW_CLAMP];
    let mut options = defaults.differing(&found.file, found.sort)?;
    options.retain(|o| o.level != TCP || !AGREED.contains(&(o.name as i32)));
    Ok(options)
}
