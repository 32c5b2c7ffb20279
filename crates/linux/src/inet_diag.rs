//! TCP connections as `sock_diag(7)` tells them: those that are being made, and those that no program has any more, which the
//! kernel can be made to forget (`SOCK_DESTROY`).

use crate::netlink::{self, Request, receive, u32_at};
use crate::{Error, Result};
use std::collections::{HashMap, HashSet};

const SOCK_DESTROY: u16 = 21;
/// `FIN_WAIT2` and `TIME_WAIT`: all data has been acknowledged.
const OVER: u32 = 1 << 5 | 1 << 6;
const SYN_SENT: u32 = 1 << 2;
/// Length of `struct inet_diag_sockid`.
const ID: usize = 48;
// In `struct inet_diag_msg`: bytes to be sent (the beginning of the connection is one), and the inode number.
const TO_BE_SENT: usize = 4 + ID + 8;
const INODE: usize = 4 + ID + 16;

/// A connection that is being made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connecting {
    /// Where to: a raw `sockaddr`. (`getpeername(2)` does not tell it yet.)
    pub remote: Vec<u8>,
    /// Whether data goes with the first packet (`TCP_FASTOPEN_CONNECT`, `MSG_FASTOPEN`).
    pub with_data: bool,
}

/// The connection that the socket with this inode number is making, in the network namespace of this thread; `None` if it is
/// not, or not any more.
pub fn connecting(family: i32, ino: u64) -> Result<Option<Connecting>> {
    let body = about(family, SYN_SENT, &[0; ID]);
    let request = request(netlink::SOCK_DIAG_BY_FAMILY, netlink::DUMP, &body);
    let mut found = Vec::new();
    request.answers(&request.send()?, &mut found, |body| {
        let (inode, to_be_sent) = (u32_at(body, INODE)?, u32_at(body, TO_BE_SENT)?);
        let remote = remote(body[0], body.get(4..4 + ID)?)?;
        Some((u64::from(inode) == ino).then_some(Connecting { remote, with_data: to_be_sent > 1 }))
    })?;
    Ok(found.into_iter().flatten().next())
}

/// The remote address in a `struct inet_diag_sockid`, as a raw `sockaddr`.
fn remote(family: u8, id: &[u8]) -> Option<Vec<u8>> {
    let (port, address, interface) = (id.get(2..4)?, id.get(20..36)?, id.get(36..40)?);
    let head = [&u16::from(family).to_ne_bytes(), port].concat();
    match i32::from(family) {
        libc::AF_INET => Some([&head[..], &address[..4], &[0; 8]].concat()),
        libc::AF_INET6 => {
            let is_link_local = address[0] == 0xfe && address[1] & 0xc0 == 0x80;
            let scope = if is_link_local { interface } else { &[0; 4] };
            Some([&head[..], &[0; 4], address, scope].concat())
        }
        _ => None,
    }
}

/// Makes the kernel forget the connections of a local port (in network order, as in a raw `sockaddr`) that are over, and that it
/// remembers only so that late packets of them are not taken for those of new ones. Returns how many there were.
///
/// # Errors
/// That the kernel does not do this (`CONFIG_INET_DIAG_DESTROY`), or not for us (`CAP_NET_ADMIN`).
pub fn forget(port: [u8; 2]) -> Result<usize> {
    let mut forgotten = 0;
    for family in [libc::AF_INET, libc::AF_INET6] {
        for id in remembered(family, port)? {
            destroy(family, &id)?;
            forgotten += 1;
        }
    }
    Ok(forgotten)
}

/// Whether there are such, which everybody may ask.
///
/// # Errors
/// That the kernel does not tell.
pub fn is_remembered(port: [u8; 2]) -> Result<bool> {
    is_any(|family| remembered(family, port))
}

/// Whether a socket of whoever it may be waits for connections at a local port.
///
/// # Errors
/// That the kernel does not tell.
pub fn is_listened_to(port: [u8; 2]) -> Result<bool> {
    const LISTEN: u32 = 1 << 10;
    is_any(|family| at_port(family, LISTEN, port, |_| true))
}

fn is_any(found: impl Fn(i32) -> Result<Vec<Vec<u8>>>) -> Result<bool> {
    Ok(!found(libc::AF_INET)?.is_empty() || !found(libc::AF_INET6)?.is_empty())
}

/// `struct inet_diag_req_v2`
fn about(family: i32, states: u32, id: &[u8]) -> Vec<u8> {
    let mut body = vec![family as u8, libc::IPPROTO_TCP as u8, 0, 0];
    body.extend_from_slice(&states.to_ne_bytes());
    body.extend_from_slice(id);
    body
}

/// Which directions of the UDP sockets of a family that have a port have been shut down (`shutdown(2)`), by inode number: `RCV_SHUTDOWN` 1,
/// `SEND_SHUTDOWN` 2. Nothing of those that have not.
///
/// # Errors
/// That the kernel does not tell (`CONFIG_INET_UDP_DIAG`).
pub fn shut_down(family: i32) -> Result<HashMap<u64, u8>> {
    const SHUTDOWN: u16 = 8;
    let mut body = about(family, u32::MAX, &[0; ID]);
    body[1] = libc::IPPROTO_UDP as u8;
    let found = with_attribute(&body, SHUTDOWN, |value| value.first().copied().unwrap_or(0))?;
    Ok(found.into_iter().filter(|(_, directions)| *directions != 0).collect())
}

/// TCP sockets of a family that sign what they send (`TCP_MD5SIG`, RFC 2385), by inode number, in the network namespace of this thread.
/// Whoever may not ask for keys (`CAP_NET_ADMIN`) is told of none.
///
/// # Errors
/// That the kernel does not tell (`CONFIG_INET_TCP_DIAG`).
pub fn signed(family: i32) -> Result<HashSet<u64>> {
    const MD5: u16 = 18;
    const INFO: u8 = 2;
    /// `TIME_WAIT` and `NEW_SYN_RECV`, of which there may be many: they are no sockets of anybody.
    const NOBODYS: u32 = 1 << 6 | 1 << 12;
    let mut body = about(family, !NOBODYS, &[0; ID]);
    // It goes with what is told at length.
    body[2] = 1 << (INFO - 1);
    Ok(with_attribute(&body, MD5, |_| ())?.into_iter().map(|(ino, ())| ino).collect())
}

/// The sockets that a request (`struct inet_diag_req_v2`) is about and that have an attribute: inode numbers, and what the value of that says.
fn with_attribute<T>(body: &[u8], kind: u16, says: impl Fn(&[u8]) -> T) -> Result<Vec<(u64, T)>> {
    let request = request(netlink::SOCK_DIAG_BY_FAMILY, netlink::DUMP, body);
    let mut found = Vec::new();
    request.answers(&request.send()?, &mut found, |body| {
        let ino = u64::from(u32_at(body, INODE)?);
        let mut attributes = netlink::attributes(body.get(INODE + 4..)?).flatten();
        Some(attributes.find(|(found, _)| *found == kind).map(|(_, value)| (ino, says(value))))
    })?;
    Ok(found.into_iter().flatten().collect())
}

fn request(kind: u16, flags: u16, body: &[u8]) -> Request<'_> {
    Request { family: netlink::SOCK_DIAG, kind, flags, body, what: "ask sock_diag for connections" }
}

/// Connections of a port that are over and belong to nobody: `struct inet_diag_sockid` each.
fn remembered(family: i32, port: [u8; 2]) -> Result<Vec<Vec<u8>>> {
    at_port(family, OVER, port, |body| u32_at(body, INODE) == Some(0))
}

/// Ids of the sockets in these states at a local port that `pick` picks by their `struct inet_diag_msg`.
fn at_port(family: i32, states: u32, port: [u8; 2], pick: impl Fn(&[u8]) -> bool) -> Result<Vec<Vec<u8>>> {
    let mut id = vec![0; ID];
    id[..2].copy_from_slice(&port);
    let body = about(family, states, &id);
    let request = request(netlink::SOCK_DIAG_BY_FAMILY, netlink::DUMP, &body);
    let mut found = Vec::new();
    request.answers(&request.send()?, &mut found, |body| {
        let id = body.get(4..4 + ID)?;
        Some((pick(body) && id[..2] == port).then(|| id.to_vec()))
    })?;
    Ok(found.into_iter().flatten().collect())
}

fn refused(body: &[u8]) -> Error {
    let errno = u32_at(body, 0).map_or(0, |n| n as i32);
    Error::call("sock_diag", std::io::Error::from_raw_os_error(-errno))
}

fn destroy(family: i32, id: &[u8]) -> Result<()> {
    let netlink = request(SOCK_DESTROY, netlink::ACKNOWLEDGE, &about(family, OVER, id)).send()?;
    let mut buffer = [0; 512];
    let n = receive(&netlink, &mut buffer)?;
    match buffer[..n].get(16..).and_then(|body| u32_at(body, 0)) {
        Some(0) => Ok(()),
        // It has gone by itself.
        Some(errno) if -(errno as i32) == libc::ENOENT => Ok(()),
        _ => Err(refused(buffer.get(16..n).unwrap_or(&[]))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sockets;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;

    fn listens(port: u16) -> bool {
        let socket = sockets::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        let address = [&2u16.to_ne_bytes()[..], &port.to_be_bytes(), &[127, 0, 0, 1], &[0; 8]].concat();
        sockets::bind(&socket, &address).is_ok() && rustix::net::listen(&socket, 1).is_ok()
    }

    #[test]
    fn what_is_shut_down_of_udp_is_told() {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let ino = |socket: &OwnedFd| rustix::fs::fstat(socket).unwrap().st_ino;
            let text = if family == libc::AF_INET { "127.0.0.1:0" } else { "[::1]:0" };
            let all: Vec<OwnedFd> = (0..4).map(|_| std::net::UdpSocket::bind(text).unwrap().into()).collect();
            use rustix::net::Shutdown::{Both, Read, Write};
            for (socket, how) in all[1..].iter().zip([Read, Write, Both]) {
                // It is not connected, which the kernel says, and does it all the same.
                assert!(rustix::net::shutdown(socket, how).is_err());
            }
            let told = shut_down(family).unwrap();
            let told: Vec<_> = all.iter().map(|socket| told.get(&ino(socket)).copied()).collect();
            assert_eq!(told, [None, Some(1), Some(2), Some(3)]);
        }
    }

    #[test]
    fn what_is_being_connected_has_another_end() {
        for (family, text) in [(libc::AF_INET, "127.0.0.1"), (libc::AF_INET6, "::1")] {
            let ip: std::net::IpAddr = text.parse().unwrap();
            let door = TcpListener::bind((ip, 0)).unwrap();
            let address = sockets::local_address(&door).unwrap();
            rustix::net::listen(&door, 0).unwrap();
            // As long as nobody accepts, there is room for one.
            let sockets: Vec<_> = (0..3)
                .map(|_| {
                    let socket = sockets::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0).unwrap();
                    let _ = sockets::connect(&socket, &address);
                    socket
                })
                .collect();
            let of = |socket: &std::os::fd::OwnedFd| {
                let ino = rustix::fs::fstat(socket).unwrap().st_ino;
                connecting(family, ino).unwrap()
            };
            assert_eq!(of(&sockets[0]), None);
            assert_eq!(of(&sockets[2]), Some(Connecting { remote: address, with_data: false }));
        }
    }

    #[test]
    fn only_what_is_over_is_forgotten() {
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = door.local_addr().unwrap().port();
        let mut clients: Vec<_> = (0..3).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        let mut servers: Vec<_> = (0..3).map(|_| door.accept().unwrap().0).collect();
        drop(door);
        // The second is over, the third only on one side: its other half may still be used.
        drop((servers.remove(2), clients.remove(2)));
        let mut half = servers.remove(1);
        half.shutdown(std::net::Shutdown::Write).unwrap();
        let mut end = [0];
        assert_eq!(clients[1].read(&mut end).unwrap(), 0);
        assert!(is_remembered(port.to_be_bytes()).unwrap());
        assert_eq!(forget(port.to_be_bytes()).unwrap(), 1);
        assert!(!is_remembered(port.to_be_bytes()).unwrap());
        assert_eq!(forget(port.to_be_bytes()).unwrap(), 0);
        std::io::Write::write_all(&mut clients[1], b"x").unwrap();
        assert_eq!(half.read(&mut end).unwrap(), 1);
        std::io::Write::write_all(&mut clients[0], b"y").unwrap();
        assert_eq!(servers[0].read(&mut end).unwrap(), 1);
        drop((half, servers, clients));
        assert!(!listens(port));
        // The last packets may still be on their way, on a busy machine: until they are there, a connection is not over.
        let mut forgotten = 0;
        while !listens(port) {
            forgotten += forget(port.to_be_bytes()).unwrap();
            std::thread::yield_now();
        }
        assert!(forgotten > 0);
    }
}
