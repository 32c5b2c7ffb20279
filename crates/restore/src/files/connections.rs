//! TCP connections: those between two sockets of the program are made anew, with all that was on its way; of the others the
//! ones that were kept come in [`super::kept`], and what is left is over.

use super::sockets::{address, bind_address, forget, name, refusal};
use super::{Opening, missing, options};
use crate::{Error, Result, TcpPolicy};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use stillpoint_image::{Connection, Socket};
use stillpoint_linux::sockets;
use stillpoint_linux::tcp::{self, End, Over, connect_pair, make_ended};
use stillpoint_linux::tcp::{has_ended_ours, has_ended_theirs, state};

/// The kernel remembers for a moment which addresses were connected (longer if they are not of the loopback device).
const PATIENCE: Duration = Duration::from_secs(4);
/// Connections that are over are named up to this number.
const NAMED: usize = 4;
const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;

/// Makes all connections that are not there yet.
pub(super) fn open(opening: &mut Opening<'_>, made: &mut HashMap<usize, OwnedFd>) -> Result<()> {
    let image = opening.image;
    let (mut over, mut notes) = (Vec::new(), Vec::new());
    for (index, socket) in image.sockets.iter().enumerate() {
        let Some(connection) = socket.connection.as_ref().filter(|_| !made.contains_key(&index)) else {
            continue;
        };
        let peer = socket.peer.map(|p| p as usize).filter(|p| !made.contains_key(p));
        if let Some(peer) = peer {
            let other = image.sockets.get(peer).ok_or_else(|| missing("socket", peer as u32))?;
            let [own, its] = pair(opening, socket, other)?;
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

/// Makes the two ends of a connection within the program.
fn pair(opening: &Opening<'_>, a: &Socket, b: &Socket) -> Result<[OwnedFd; 2]> {
    let began = Instant::now();
    loop {
        match try_pair(opening, a, b) {
            Err(Error::Kernel(e)) if is_remembered(&e) && began.elapsed() < PATIENCE => {
                if ![a, b].into_iter().any(forget) {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            Err(Error::Kernel(stillpoint_linux::Error::Call { source, .. })) => {
                let what = format!("{} ↔ {}", name(opening.image, a), address(&b.local.0));
                return Err(refusal(&what, &source));
            }
            made => return made,
        }
    }
}

fn is_remembered(e: &stillpoint_linux::Error) -> bool {
    matches!(e.errno(), Some(libc::EADDRNOTAVAIL | libc::EADDRINUSE))
}

fn try_pair(opening: &Opening<'_>, a: &Socket, b: &Socket) -> Result<[OwnedFd; 2]> {
    let both = [new(a)?, new(b)?];
    for (fd, socket) in both.iter().zip([a, b]) {
        apply_early(fd, socket, &name(opening.image, socket))?;
    }
    connect_pair(&end(&both[0], a), &end(&both[1], b))?;
    for (fd, socket) in both.iter().zip([a, b]) {
        options::apply_some(fd, socket, &name(opening.image, socket), is_late)?;
    }
    Ok(both)
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
