//! TCP connections: those between two sockets of the program are made anew, with all that was on its way; of the others the
//! ones that were kept come in [`super::kept`], and what is left is over.
//!
//! By repair (`TCP_REPAIR`, with `CAP_NET_ADMIN`) two ends become a connection in whatever state they were. Without, one connects to the
//! other and sends what was on its way; that is done before anything of the program listens, since it takes its addresses.

use super::addresses::Wait;
use super::sockets::{REUSE_ADDRESS, REUSE_PORT, address, bind_address, name, refusal};
use super::{Opening, missing, options};
use crate::{Error, Result, TcpPolicy};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use stillpoint_image::{Bytes, Connection, Image, Socket};
use stillpoint_linux::handshake::{self, Over, make_ended};
use stillpoint_linux::tcp::{self, End, connect_pair, has_ended_ours, has_ended_theirs, state};
use stillpoint_linux::{Error as Kernel, sockets};

/// Connections that are over are named up to this number.
const NAMED: usize = 4;
const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const IN_USE: &str = "another program uses its addresses";

/// Makes all connections that are not there yet.
pub(super) fn open(opening: &mut Opening<'_>, made: &mut HashMap<usize, OwnedFd>) -> Result<()> {
    let image = opening.image;
    let (mut over, mut notes) = (Vec::new(), Vec::new());
    for (index, socket) in image.sockets.iter().enumerate() {
        let Some(connection) = socket.connection.as_ref().filter(|_| !made.contains_key(&index)) else {
            continue;
        };
        if let Some(peer) = peer(socket, made) {
            let other = image.sockets.get(peer).ok_or_else(|| missing("socket", peer as u32))?;
            let [own, its] = pair(opening, socket, other, || repair(image, socket, other))?;
            made.insert(index, own);
            made.insert(peer, its);
            continue;
        }
        if connection.state == state::SYN_SENT && opening.tcp == TcpPolicy::Established {
            let (fd, moved) = begin(opening, socket, connection)?;
            made.insert(index, fd);
            notes.extend(moved);
            continue;
        }
        let fd = new(socket)?;
        let data = socket.queue.first().map_or(&[][..], |data| &data.0);
        make_ended(&fd, socket.family as i32, data, how_it_ended(connection))?;
        made.insert(index, fd);
        if connection.state != state::CLOSE {
            over.push(format!("{} ↔ {}", address(&socket.local.0), address(&connection.remote.0)));
        }
    }
    let why = match opening.tcp {
        TcpPolicy::Established => "over, as the program was not there for the other end",
        TcpPolicy::Close => "closed, as asked for",
    };
    opening.files.notes.extend(note(&over, why).into_iter().chain(notes));
    Ok(())
}

/// The row of the other end, if it is to be made as well.
fn peer(socket: &Socket, made: &HashMap<usize, OwnedFd>) -> Option<usize> {
    socket.connection.as_ref()?;
    socket.peer.map(|row| row as usize).filter(|row| !made.contains_key(row))
}

/// Makes the connections within the program, if we may not do it by repair. Gives their rows, for [`settle`].
pub(super) fn open_without_repair(
    opening: &Opening<'_>,
    made: &mut HashMap<usize, OwnedFd>,
) -> Result<Vec<usize>> {
    let image = opening.image;
    let mut rows = Vec::new();
    for (index, socket) in image.sockets.iter().enumerate() {
        let Some(row) = peer(socket, made).filter(|_| !made.contains_key(&index)) else { continue };
        if rows.is_empty() && tcp::may_repair(&new(socket)?).is_ok() {
            return Ok(rows);
        }
        let other = image.sockets.get(row).ok_or_else(|| missing("socket", row as u32))?;
        let [own, its] = match is_accepted(image, socket) {
            true => pair(opening, other, socket, || shake_hands(image, other, socket))
                .map(|[client, server]| [server, client]),
            false => pair(opening, socket, other, || shake_hands(image, socket, other)),
        }?;
        made.insert(index, own);
        made.insert(row, its);
        rows.extend([index, row]);
    }
    Ok(rows)
}

/// All of the program's sockets are bound: what was [made without repair](open_without_repair) need not let others have its ports any more.
pub(super) fn settle(image: &Image, made: &HashMap<usize, OwnedFd>, rows: &[usize]) -> Result<()> {
    for (fd, socket) in rows.iter().filter_map(|row| Some((made.get(row)?, image.sockets.get(*row)?))) {
        sockets::set_option(fd, REUSE_ADDRESS.0, REUSE_ADDRESS.1, &0i32.to_ne_bytes())?;
        options::apply_some(fd, socket, &name(image, socket), is_late)?;
    }
    Ok(())
}

/// Whether a socket that listens has accepted this one.
fn is_accepted(image: &Image, socket: &Socket) -> bool {
    let port = |socket: &Socket| sockets::endpoint(&socket.local.0).map(|(_, port)| port);
    image.sockets.iter().any(|other| other.listening.is_some() && port(other) == port(socket))
}

/// Begins once more to make a connection that was being made; with a remark if it has another local address now. What listens in
/// the program does so already.
fn begin(
    opening: &Opening<'_>,
    socket: &Socket,
    connection: &Connection,
) -> Result<(OwnedFd, Option<String>)> {
    let (fd, name) = (new(socket)?, name(opening.image, socket));
    options::apply_some(&fd, socket, &name, |level, name| !options::stamps(level, name))?;
    let moved = match bind_address(socket, &fd) {
        Ok(()) => None,
        // It is most often the kernel that has chosen it.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL)) => {
            let to = address(&connection.remote.0);
            Some(format!(
                "a connection to {to} that was being made is made from another address: {name} is not free"
            ))
        }
        Err(e) => return Err(refusal(&name, &e)),
    };
    // It becomes as it was when all others are there.
    rustix::io::ioctl_fionbio(&fd, true).map_err(|e| stillpoint_linux::Error::call("FIONBIO", e))?;
    match sockets::connect(&fd, &connection.remote.0) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => {
            let fd = new(socket)?;
            make_ended(&fd, socket.family as i32, &[], Over::Reset)?;
            Ok((fd, moved))
        }
        _ => {
            // If it has been refused already nothing is sent any more.
            let _ = options::apply_some(&fd, socket, &name, options::stamps);
            Ok((fd, moved))
        }
    }
}

fn note(over: &[String], why: &str) -> Option<String> {
    let named = over.get(..NAMED).unwrap_or(over).join(", ");
    let more = match over.len().checked_sub(NAMED).filter(|&n| n > 0) {
        Some(n) => format!(" and {n} more"),
        None => String::new(),
    };
    let word = if over.len() == 1 { "a TCP connection is" } else { "TCP connections are" };
    (!over.is_empty()).then(|| format!("{word} {why}: {named}{more}"))
}

fn how_it_ended(connection: &Connection) -> Over {
    let theirs = has_ended_theirs(connection.state) || connection.state == state::CLOSE;
    match theirs && !connection.failed {
        true if connection.state == state::CLOSE || has_ended_ours(connection.state) => Over::BothEnded,
        true => Over::Ended,
        false => Over::Reset,
    }
}

/// A socket of the same kind.
pub(super) fn new(socket: &Socket) -> Result<OwnedFd> {
    Ok(sockets::socket(socket.family as i32, socket.kind as i32, socket.protocol as i32)?)
}

/// Makes the two ends of a connection within the program, which are those that `make` gives.
fn pair(
    opening: &Opening<'_>,
    a: &Socket,
    b: &Socket,
    make: impl Fn() -> Result<[OwnedFd; 2]>,
) -> Result<[OwnedFd; 2]> {
    let mut wait = Wait::new(opening, &[a, b]);
    loop {
        match make() {
            Err(Error::Kernel(e)) => {
                if tcp::is_in_use(&e) && wait.goes_on()? {
                    continue;
                }
                let what = format!("{} ↔ {}", name(opening.image, a), address(&b.local.0));
                return Err(match (tcp::is_in_use(&e), e) {
                    (true, _) => Error::Refused(vec![format!("{what}: {IN_USE}")]),
                    (false, Kernel::Call { source, .. }) => refusal(&what, &source),
                    (false, e) => e.into(),
                });
            }
            made => return made,
        }
    }
}

fn repair(image: &Image, a: &Socket, b: &Socket) -> Result<[OwnedFd; 2]> {
    let both = [new(a)?, new(b)?];
    for (fd, socket) in both.iter().zip([a, b]) {
        apply_early(fd, socket, &name(image, socket))?;
    }
    connect_pair(&end(&both[0], a), &end(&both[1], b))?;
    for (fd, socket) in both.iter().zip([a, b]) {
        options::apply_some(fd, socket, &name(image, socket), is_late)?;
    }
    Ok(both)
}

/// The client, and what is accepted of it. [Late options](is_late) are still to come.
fn shake_hands(image: &Image, client: &Socket, server: &Socket) -> Result<[OwnedFd; 2]> {
    let (fd, door) = (new(client)?, new(server)?);
    for (fd, socket) in [(&fd, client), (&door, server)] {
        let what = name(image, socket);
        options::apply_some(fd, socket, &what, |level, name| !is_late(level, name) && !hinders(level, name))?;
    }
    let accepted = handshake::connect(&end(&fd, client), &end(&door, server))?;
    for (fd, socket) in [(&fd, client), (&accepted, server)] {
        // What has come from the one that accepted it may only be set before it is connected.
        options::apply_differing(fd, socket, &name(image, socket), |level, name| !is_late(level, name))?;
    }
    handshake::complete(&end(&fd, client), &end(&accepted, server))?;
    Ok([fd, accepted])
}

/// Options with which a connection is not made at once, but with the first data, or may be somebody else's.
fn hinders(level: u32, name: u32) -> bool {
    const DEFER: [i32; 2] = [libc::TCP_DEFER_ACCEPT, libc::TCP_FASTOPEN_CONNECT];
    let defers = level == libc::IPPROTO_TCP as u32 && DEFER.contains(&(name as i32));
    defers || (level, name) == REUSE_PORT
}

/// Tries to make a connection that is over, with what was not yet read of it, where that may have less room than it had.
pub(super) fn rehearse_ended(socket: &Socket, what: &str) -> Result<()> {
    let fd = new(socket)?;
    let data = socket.queue.first().map_or(&[][..], |data| &data.0);
    let Some(connection) = socket.connection.as_ref().filter(|_| !data.is_empty()) else { return Ok(()) };
    if connection.state == state::SYN_SENT || tcp::may_repair(&fd).is_ok() {
        return Ok(());
    }
    let made = make_ended(&fd, socket.family as i32, data, how_it_ended(connection));
    made.and_then(|()| handshake::let_forget(&fd)).map_err(|e| {
        Error::Refused(vec![format!("{what}: what was not yet read of it cannot be had again: {e}")])
    })
}

/// Tries what is needed for one end of a connection within the program, at another address and without its other end.
pub(super) fn rehearse(image: &Image, socket: &Socket, what: &str) -> Result<()> {
    let fd = new(socket)?;
    if tcp::may_repair(&fd).is_ok() {
        return apply_early(&fd, socket, what);
    }
    let row = socket.peer.unwrap_or_default();
    let peer = image.sockets.get(row as usize).ok_or_else(|| missing("socket", row))?;
    let is_accepted = is_accepted(image, socket);
    // They are free as soon as they are told.
    let free = || Ok::<_, Error>(sockets::bind_to_loopback(new(socket)?, socket.family as i32)?);
    let (own, its) = (free()?, free()?);
    let placed = |socket: &Socket, local: &[u8], remote: &[u8]| Socket {
        local: Bytes(local.to_vec()),
        connection: socket.connection.clone().map(|c| Connection { remote: Bytes(remote.to_vec()), ..c }),
        ..socket.clone()
    };
    let mut other = placed(peer, &its, &own);
    if other.family != socket.family {
        other = Socket { family: socket.family, options: Vec::new(), ..other };
    }
    let socket = &placed(socket, &own, &its);
    let made = match is_accepted {
        true => shake_hands(image, &other, socket),
        false => shake_hands(image, socket, &other),
    };
    // Nothing is to be remembered of it.
    let made = made.and_then(|ends| Ok(ends.iter().try_for_each(handshake::let_forget)?));
    made.map_err(|e| Error::Refused(vec![format!("{what}: its connection cannot be made anew: {e}")]))
}

/// Sets those options of an end that it has before it is connected.
pub(super) fn apply_early(fd: &OwnedFd, socket: &Socket, what: &str) -> Result<()> {
    options::apply_some(fd, socket, what, |level, name| !is_late(level, name))
}

/// Options that making the connection changes, or that would change how it is made.
fn is_late(level: u32, name: u32) -> bool {
    const LATE: [i32; 3] = [libc::SO_SNDBUF, libc::SO_RCVBUF, libc::SO_REUSEADDR];
    let cork = (libc::IPPROTO_TCP as u32, libc::TCP_CORK as u32);
    (level == SOL_SOCKET && LATE.contains(&(name as i32)))
        || (level, name) == cork
        || options::stamps(level, name)
}

fn end<'a>(fd: &'a OwnedFd, socket: &'a Socket) -> End<'a> {
    let connection = socket.connection.as_ref();
    End {
        socket: fd,
        address: &socket.local.0,
        remote: connection.map_or(&[], |c| &c.remote.0),
        unread: socket.queue.first().map_or(&[], |data| &data.0),
        unsent: connection.map_or(&[], |c| &c.unsent.0),
        ended: connection.is_some_and(|c| tcp::has_ended_ours(c.state)),
    }
}
