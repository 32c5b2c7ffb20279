//! Connections that no program has any more, as `sock_diag(7)` tells them, and making the kernel forget them (`SOCK_DESTROY`).

use crate::sockets::{self, receive, u32_at};
use crate::{Error, Result};
use std::os::fd::OwnedFd;

const NETLINK_SOCK_DIAG: i32 = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `FIN_WAIT2` and `TIME_WAIT`: all data has been acknowledged.
const OVER: u32 = 1 << 5 | 1 << 6;
/// Length of `struct inet_diag_sockid`.
const ID: usize = 48;

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

fn request(kind: u16, flags: u16, family: i32, states: u32, id: &[u8]) -> Result<OwnedFd> {
    let netlink = sockets::socket(libc::AF_NETLINK, libc::SOCK_RAW, NETLINK_SOCK_DIAG)?;
    let head = 16 + 8 + ID as u32;
    let mut bytes = Vec::with_capacity(head as usize);
    bytes.extend_from_slice(&head.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(&(REQUEST | flags).to_ne_bytes());
    bytes.extend_from_slice(&[0; 8]); // sequence, port
    bytes.extend_from_slice(&[family as u8, libc::IPPROTO_TCP as u8, 0, 0]); // struct inet_diag_req_v2
    bytes.extend_from_slice(&states.to_ne_bytes());
    bytes.extend_from_slice(id);
    sockets::send(&netlink, &bytes).map_err(|e| Error::call("ask sock_diag for connections", e))?;
    Ok(netlink)
}

/// Connections of a port that are over and belong to nobody: `struct inet_diag_sockid` each.
fn remembered(family: i32, port: [u8; 2]) -> Result<Vec<Vec<u8>>> {
    let mut id = vec![0; ID];
    id[..2].copy_from_slice(&port);
    let netlink = request(SOCK_DIAG_BY_FAMILY, DUMP, family, OVER, &id)?;
    let (mut found, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let n = receive(&netlink, &mut buffer)?;
        if !parse(&buffer[..n], port, &mut found)? {
            return Ok(found);
        }
    }
}

/// Returns whether more messages follow.
fn parse(mut rest: &[u8], port: [u8; 2], found: &mut Vec<Vec<u8>>) -> Result<bool> {
    let damaged = || Error::Other("an answer of sock_diag does not parse".into());
    // In `struct inet_diag_msg`, behind the head of 16 bytes.
    const INODE: usize = 4 + ID + 16;
    while !rest.is_empty() {
        let len = u32_at(rest, 0).ok_or_else(damaged)? as usize;
        let kind = rest.get(4..6).map(|k| u16::from_ne_bytes([k[0], k[1]])).ok_or_else(damaged)?;
        let body = rest.get(16..len).ok_or_else(damaged)?;
        match kind {
            DONE => return Ok(false),
            ERROR => return Err(refused(body)),
            _ => {
                let id = body.get(4..4 + ID).ok_or_else(damaged)?;
                if u32_at(body, INODE) == Some(0) && id[..2] == port {
                    found.push(id.to_vec());
                }
            }
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Ok(true)
}

fn refused(body: &[u8]) -> Error {
    let errno = u32_at(body, 0).map_or(0, |n| n as i32);
    Error::call("sock_diag", std::io::Error::from_raw_os_error(-errno))
}

fn destroy(family: i32, id: &[u8]) -> Result<()> {
    let netlink = request(SOCK_DESTROY, ACKNOWLEDGE, family, OVER, id)?;
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
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    fn listens(port: u16) -> bool {
        let socket = sockets::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        let address = [&2u16.to_ne_bytes()[..], &port.to_be_bytes(), &[127, 0, 0, 1], &[0; 8]].concat();
        sockets::bind(&socket, &address).is_ok() && rustix::net::listen(&socket, 1).is_ok()
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
        assert_eq!(forget(port.to_be_bytes()).unwrap(), 1);
        assert_eq!(forget(port.to_be_bytes()).unwrap(), 0);
        std::io::Write::write_all(&mut clients[1], b"x").unwrap();
        assert_eq!(half.read(&mut end).unwrap(), 1);
        std::io::Write::write_all(&mut clients[0], b"y").unwrap();
        assert_eq!(servers[0].read(&mut end).unwrap(), 1);
        drop((half, servers, clients));
        assert!(!listens(port));
        assert!(forget(port.to_be_bytes()).unwrap() > 0);
        assert!(listens(port));
    }
}
