//! Datagrams in a queue with their senders, left where they are, and the groups that a socket has joined. `ip(7)`, `socket(7)`,
//! RFC 3678.

use crate::descriptors::{check, ioctl_int};
use crate::sockets::{int_option, set_option};
use crate::{Error, Result};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const PEEK_OFF: u32 = libc::SO_PEEK_OFF as u32;
/// More than any queue holds.
const MOST: usize = 100_000;
/// Of `sockaddr_storage`.
const ADDRESS: usize = 128;
/// `MCAST_JOIN_GROUP`: `struct group_req`.
pub const JOIN_GROUP: u32 = 42;
/// `MCAST_MSFILTER`: `struct group_filter`.
pub const SOURCE_FILTER: u32 = 48;

/// A datagram and the raw `sockaddr` of who sent it.
pub type Datagram = (Vec<u8>, Vec<u8>);

/// The unread datagrams of a socket, left where they are. `SO_PEEK_OFF` makes successive peeks walk along the queue; it is put
/// back to what it was, and the owner must stand still meanwhile. A pending error would be taken by the first peek: callers
/// look for one first.
pub fn peek_all(socket: impl AsFd) -> Result<Vec<Datagram>> {
    let before = int_option(&socket, SOL_SOCKET, PEEK_OFF)?.unwrap_or(-1);
    set_option(&socket, SOL_SOCKET, PEEK_OFF, &0i32.to_ne_bytes())?;
    let datagrams = walk(&socket);
    set_option(&socket, SOL_SOCKET, PEEK_OFF, &before.to_ne_bytes())?;
    datagrams
}

fn walk(socket: &impl AsFd) -> Result<Vec<Datagram>> {
    let mut datagrams = Vec::new();
    let mut buffer = vec![0u8; 1 << 16];
    while datagrams.len() < MOST {
        let mut address = vec![0u8; ADDRESS];
        let mut len = ADDRESS as libc::socklen_t;
        // SAFETY: the kernel writes at most `buffer.len()` bytes there, and at most `len` into the address.
        let n = unsafe {
            let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
            let fd = socket.as_fd().as_raw_fd();
            let (data, room) = (buffer.as_mut_ptr().cast(), buffer.len());
            libc::recvfrom(fd, data, room, flags, address.as_mut_ptr().cast(), &raw mut len)
        };
        match check(|| "peek at datagrams".into(), n as i64) {
            Ok(n) => {
                address.truncate(len as usize);
                datagrams.push((buffer[..n as usize].to_vec(), address));
            }
            Err(e) if e.errno() == Some(libc::EAGAIN) => return Ok(datagrams),
            Err(e) => return Err(e),
        }
    }
    Err(Error::Other(format!("more than {MOST} datagrams in the queue of a socket")))
}

/// Bytes that wait to be sent, such as those of a corked datagram.
pub fn unsent(socket: impl AsFd) -> Result<usize> {
    Ok(ioctl_int(socket, 0x5411, "SIOCOUTQ")?.max(0) as usize)
}

/// Whether a UDP socket has begun a datagram that is not complete (`UDP_CORK`, `MSG_MORE`).
///
/// Its bytes are unsent ones, and so are those that wait for a device. To which a socket's belong is told by sending it nothing, and that only
/// for a try (`MSG_PROBE`), to an address that nobody can have: a datagram that was begun has an address, and the kernel does not look
/// at another one (`udp_sendmsg`); one that would begin is refused for it. One that has no unsent bytes, or no port, is not asked, as that would bind it.
pub fn is_incomplete(socket: impl AsFd, family: i32) -> Result<bool> {
    let has_port = rustix::net::getsockname(&socket).ok().and_then(|own| SocketAddr::try_from(own).ok());
    if unsent(&socket)? == 0 || has_port.is_none_or(|own| own.port() == 0) {
        return Ok(false);
    }
    let mut nowhere = vec![0u8; if family == libc::AF_INET6 { 28 } else { 16 }];
    nowhere[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    if let Some(last) = nowhere.get_mut(23) {
        *last = 1; // of an IPv6 address: that of the loopback device
    }
    const PROBE: i32 = 0x10;
    // SAFETY: the kernel reads no data, and the address, as long as it is.
    let n = unsafe {
        let flags = PROBE | libc::MSG_MORE | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let (fd, len) = (socket.as_fd().as_raw_fd(), nowhere.len() as libc::socklen_t);
        libc::sendto(fd, std::ptr::null(), 0, flags, nowhere.as_ptr().cast(), len)
    };
    Ok(n == 0)
}

/// Sends a datagram to a raw `sockaddr`.
pub fn send_to(socket: impl AsFd, data: &[u8], to: &[u8]) -> Result<(), std::io::Error> {
    // SAFETY: the kernel reads the data and the address, each as long as it is.
    let n = unsafe {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let fd = socket.as_fd().as_raw_fd();
        let (address, len) = (to.as_ptr().cast(), to.len() as libc::socklen_t);
        libc::sendto(fd, data.as_ptr().cast(), data.len(), flags, address, len)
    };
    if n < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// A group that somebody on this machine has joined: index of the interface, and a raw `sockaddr`.
pub type Group = (u32, Vec<u8>);

/// All groups that sockets of this network namespace have joined, of IPv4 or IPv6.
pub fn groups(family: i32) -> Vec<Group> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    match family {
        libc::AF_INET => parse_groups4(&read("/proc/thread-self/net/igmp")),
        _ => parse_groups6(&read("/proc/thread-self/net/igmp6")),
    }
}

/// A line for each interface, which begins with its index, then indented ones for its groups: eight digits, as the word
/// lies in memory.
fn parse_groups4(text: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut interface = 0;
    for line in text.lines().skip(1) {
        let Some(first) = line.split_whitespace().next() else { continue };
        if !line.starts_with(char::is_whitespace) {
            interface = first.parse().unwrap_or(0);
        } else if let Ok(group) = u32::from_str_radix(first, 16) {
            let mut address = (libc::AF_INET as u16).to_ne_bytes().to_vec();
            address.extend_from_slice(&[0; 2]);
            address.extend_from_slice(&group.to_ne_bytes());
            address.resize(16, 0);
            groups.push((interface, address));
        }
    }
    groups
}

/// A line for each group: index of the interface, its name, 32 digits.
fn parse_groups6(text: &str) -> Vec<Group> {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let interface = words.next()?.parse().ok()?;
        let group = u128::from_str_radix(words.nth(1)?, 16).ok()?;
        let mut address = (libc::AF_INET6 as u16).to_ne_bytes().to_vec();
        address.extend_from_slice(&[0; 6]);
        address.extend_from_slice(&group.to_be_bytes());
        address.resize(28, 0);
        Some((interface, address))
    };
    text.lines().filter_map(parse).collect()
}

/// Values of [`JOIN_GROUP`], and of [`SOURCE_FILTER`] if there is one.
pub type Membership = (Vec<u8>, Option<Vec<u8>>);

/// Length of `struct group_filter` in front of its sources.
const FILTER_HEAD: usize = 8 + ADDRESS + 8;
/// Sources of one filter that are asked for.
const SOURCES: usize = 64;

/// Whether a socket has joined a group: the value of [`JOIN_GROUP`] that does so, and if it takes only some sources, that of
/// [`SOURCE_FILTER`].
///
/// # Errors
/// That it takes more than 64 sources.
pub fn membership(socket: impl AsFd, level: i32, group: &Group) -> Result<Option<Membership>> {
    let mut request = group.0.to_ne_bytes().to_vec();
    request.resize(8, 0);
    request.extend_from_slice(&group.1);
    request.resize(8 + ADDRESS, 0);
    let mut filter = request.clone();
    filter.extend_from_slice(&0u32.to_ne_bytes());
    filter.extend_from_slice(&(SOURCES as u32).to_ne_bytes());
    filter.resize(FILTER_HEAD + SOURCES * ADDRESS, 0);
    let mut len = filter.len() as libc::socklen_t;
    // SAFETY: the kernel reads the head, and writes at most so many sources as that says there is room for.
    let r = unsafe {
        let fd = socket.as_fd().as_raw_fd();
        libc::getsockopt(fd, level, SOURCE_FILTER as i32, filter.as_mut_ptr().cast(), &raw mut len)
    };
    match check(|| "ask for a group".into(), r.into()) {
        Ok(_) => {}
        // It has not, or (as raw sockets of IPv6 with groups of IPv4) cannot.
        Err(e) if matches!(e.errno(), Some(libc::EADDRNOTAVAIL | libc::ENOPROTOOPT)) => return Ok(None),
        Err(e) => return Err(e),
    }
    let word = |at: usize| u32::from_ne_bytes([filter[at], filter[at + 1], filter[at + 2], filter[at + 3]]);
    let (mode, sources) = (word(8 + ADDRESS), word(12 + ADDRESS) as usize);
    if sources > SOURCES {
        return Err(Error::Other(format!("a group of which a socket takes {sources} sources")));
    }
    const EXCLUDE: u32 = 0;
    let all = mode == EXCLUDE && sources == 0;
    let filter = (!all).then(|| filter[..FILTER_HEAD + sources * ADDRESS].to_vec());
    Ok(Some((request, filter)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, UdpSocket};

    #[test]
    fn datagrams_are_peeked_with_their_senders_and_stay() {
        let to = UdpSocket::bind("127.0.0.1:0").unwrap();
        let from = [0; 2].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        for (i, data) in [&b"one"[..], b"", b"three"].into_iter().enumerate() {
            from[i % 2].send_to(data, to.local_addr().unwrap()).unwrap();
        }
        let seen = peek_all(&to).unwrap();
        let data: Vec<_> = seen.iter().map(|d| &d.0[..]).collect();
        assert_eq!(data, [&b"one"[..], b"", b"three"]);
        assert_eq!(seen[0].1, seen[2].1);
        assert_eq!(seen[1].1[2..4], from[1].local_addr().unwrap().port().to_be_bytes());
        let mut buffer = [0; 8];
        assert_eq!(to.recv(&mut buffer).unwrap(), 3);
    }

    #[test]
    fn incomplete_datagrams_are_told_and_stay() {
        for host in ["127.0.0.1", "[::1]"] {
            let Ok(to) = UdpSocket::bind(format!("{host}:0")) else { continue };
            let (from, address) = (UdpSocket::bind(format!("{host}:0")).unwrap(), to.local_addr().unwrap());
            let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
            from.connect(address).unwrap();
            let send = |data: &[u8], flags: i32| {
                // SAFETY: the kernel reads the data, as long as it is.
                let n = unsafe { libc::send(from.as_raw_fd(), data.as_ptr().cast(), data.len(), flags) };
                assert_eq!(n, data.len() as isize);
            };
            assert!(!is_incomplete(&from, family).unwrap());
            for rest in [&b"def"[..], b""] {
                send(b"abc", libc::MSG_MORE);
                assert!(is_incomplete(&from, family).unwrap());
                assert!(is_incomplete(&from, family).unwrap());
                send(rest, 0);
                let mut buffer = [0; 8];
                assert_eq!(to.recv(&mut buffer).unwrap(), 3 + rest.len());
                assert!(!is_incomplete(&from, family).unwrap());
            }
        }
    }

    #[test]
    fn lists_of_groups_are_parsed() {
        let text = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                    1\tlo        :     1      V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n\
                    2\teth0      :     2      V3\n\t\t\t\tFB0000E0     1 0:00000000\t\t0\n";
        let groups = parse_groups4(text);
        assert_eq!(groups.len(), 2);
        assert_eq!((groups[1].0, &groups[1].1[4..8]), (2, &[224, 0, 0, 251][..]));
        let groups =
            parse_groups6("2    eth0            ff0200000000000000000000000000fb     1 0000000C 0\nx\n");
        assert_eq!((groups[0].0, groups[0].1[8], groups[0].1[23]), (2, 0xff, 0xfb));
    }

    #[test]
    fn groups_that_were_joined_are_told() {
        let (own, other) = (UdpSocket::bind("0.0.0.0:0").unwrap(), UdpSocket::bind("0.0.0.0:0").unwrap());
        let group = Ipv4Addr::new(239, 7, 8, 9);
        if own.join_multicast_v4(&group, &Ipv4Addr::LOCALHOST).is_err() {
            return; // the loopback device takes no part here
        }
        let all = groups(libc::AF_INET);
        let found = all.iter().find(|g| g.1[4..8] == group.octets()).unwrap();
        let (request, filter) = membership(&own, libc::IPPROTO_IP, found).unwrap().unwrap();
        assert_eq!(filter, None);
        assert_eq!(membership(&other, libc::IPPROTO_IP, found).unwrap(), None);
        set_option(&other, libc::IPPROTO_IP as u32, JOIN_GROUP, &request).unwrap();
        assert!(membership(&other, libc::IPPROTO_IP, found).unwrap().is_some());
    }
}
