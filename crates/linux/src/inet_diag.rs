//! Connections that no program has any more, as `sock_diag(7)` tells them, and making the kernel forget them (`SOCK_DESTROY`).

use crate::netlink::{self, Request, receive, u32_at};
use crate::{Error, Result};

const SOCK_DESTROY: u16 = 21;
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

/// `struct inet_diag_req_v2`
fn about(family: i32, id: &[u8]) -> Vec<u8> {
    let mut body = vec![family as u8, libc::IPPROTO_TCP as u8, 0, 0];
    body.extend_from_slice(&OVER.to_ne_bytes());
    body.extend_from_slice(id);
    body
}

fn request(kind: u16, flags: u16, body: &[u8]) -> Request<'_> {
    Request { family: netlink::SOCK_DIAG, kind, flags, body, what: "ask sock_diag for connections" }
}

/// Connections of a port that are over and belong to nobody: `struct inet_diag_sockid` each.
fn remembered(family: i32, port: [u8; 2]) -> Result<Vec<Vec<u8>>> {
    // In `struct inet_diag_msg`, behind the head of 16 bytes.
    const INODE: usize = 4 + ID + 16;
    let mut id = vec![0; ID];
    id[..2].copy_from_slice(&port);
    let body = about(family, &id);
    let request = request(netlink::SOCK_DIAG_BY_FAMILY, netlink::DUMP, &body);
    let mut found = Vec::new();
    request.answers(&request.send()?, &mut found, |body| {
        let id = body.get(4..4 + ID)?;
        Some((u32_at(body, INODE) == Some(0) && id[..2] == port).then(|| id.to_vec()))
    })?;
    Ok(found.into_iter().flatten().collect())
}

fn refused(body: &[u8]) -> Error {
    let errno = u32_at(body, 0).map_or(0, |n| n as i32);
    Error::call("sock_diag", std::io::Error::from_raw_os_error(-errno))
}

fn destroy(family: i32, id: &[u8]) -> Result<()> {
    let netlink = request(SOCK_DESTROY, netlink::ACKNOWLEDGE, &about(family, id)).send()?;
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
