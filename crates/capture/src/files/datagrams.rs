//! UDP, ICMP, raw, packet and netlink sockets: what they are bound to, which groups they have joined, datagrams in their queues.

use super::Scan;
use super::descriptions::Description;
use super::sockets::{CLOSE, WAIT, add, bound, common, may_wait};
use crate::Result;
use std::os::fd::AsFd;
use stillpoint_image::{Bytes, Socket, SocketOption};
use stillpoint_linux::datagrams::{self, JOIN_GROUP, SOURCE_FILTER};
use stillpoint_linux::descriptors::poll_now;
use stillpoint_linux::{packets, sockets};

/// `SOL_NETLINK`
const NETLINK: u32 = 270;
const IPV6: u32 = libc::IPPROTO_IPV6 as u32;
const ROUTER_ALERT: u32 = 22;
const COMPLETE: &str = "try again when the program has sent the rest";

type Sort = (i32, i32, i32);

/// A UDP socket. Datagrams that nobody has read are kept with their senders.
pub(super) fn udp(scan: &mut Scan<'_>, d: &Description, sort: Sort) -> Result<Option<u32>> {
    let int = |name: u32| sockets::int_option(&d.file, sort.2 as u32, name).map(|v| v.unwrap_or(0));
    if int(100 /* UDP_ENCAP */)? != 0 {
        return scan.refuse(d, "it is a UDP tunnel", CLOSE);
    }
    if datagrams::is_incomplete(&d.file, sort.0)? {
        return scan.refuse(d, "it has a datagram that is not complete (UDP_CORK, MSG_MORE)", COMPLETE);
    }
    let Some(mut socket) = common(scan, d, sort)? else { return Ok(None) };
    if !groups(scan, d, sort, &mut socket)? {
        return Ok(None);
    }
    socket.local = bound(sockets::local_address(&d.file)?);
    socket.remote = Bytes(sockets::peer_address(&d.file)?.unwrap_or_default());
    // Of one without a port, or where the kernel has no sock_diag for UDP, it can be seen of reading only.
    let of_reading = u32::from(poll_now(&d.file, libc::POLLRDHUP)? & libc::POLLRDHUP != 0);
    socket.shutdown = of_reading | u32::from(scan.udp_shut_down(sort.0, d.stat.st_ino).unwrap_or(0));
    if has_something(&d.file)? {
        let unread = datagrams::peek_all(&d.file)?;
        let (queue, senders): (Vec<_>, Vec<_>) =
            unread.into_iter().map(|(data, sender)| (Bytes(data), Bytes(sender))).unzip();
        (socket.queue, socket.senders) = (queue, Some(senders));
    }
    let row = add(scan, d, socket);
    may_wait(scan, d, row)?;
    Ok(Some(row))
}

/// A socket of ICMP or of whole packets of IP.
pub(super) fn raw(scan: &mut Scan<'_>, d: &Description, sort: Sort) -> Result<Option<u32>> {
    if has_something(&d.file)? {
        return scan.refuse(d, "it has packets that were not yet read", WAIT);
    }
    if sort.0 == libc::AF_INET6 && sockets::int_option(&d.file, IPV6, ROUTER_ALERT)?.unwrap_or(0) != 0 {
        let why = "it takes packets for routers (IPV6_ROUTER_ALERT), and which is not told";
        return scan.refuse(d, why, CLOSE);
    }
    let Some(mut socket) = common(scan, d, sort)? else { return Ok(None) };
    if !groups(scan, d, sort, &mut socket)? {
        return Ok(None);
    }
    let local = sockets::local_address(&d.file)?;
    // The port of a raw socket is its protocol; it is bound if it has an address.
    let any = local.get(4..).is_none_or(|rest| rest.iter().all(|&byte| byte == 0));
    socket.local = if sort.1 == libc::SOCK_RAW && any { Bytes::default() } else { bound(local) };
    socket.remote = Bytes(sockets::peer_address(&d.file)?.unwrap_or_default());
    Ok(Some(add(scan, d, socket)))
}

/// A socket of whole packets of an interface, or all. What comes while the program does not run is lost in any case, and so is
/// what it has not read.
pub(super) fn packets(scan: &mut Scan<'_>, d: &Description, sort: Sort) -> Result<Option<u32>> {
    let Some(found) = packets::all()?.into_iter().find(|s| u64::from(s.ino) == d.stat.st_ino) else {
        return scan.refuse(d, "sock_diag does not know it", CLOSE);
    };
    if found.has_ring {
        return scan.refuse(d, "it is a packet socket with memory for packets (PACKET_RX_RING)", CLOSE);
    }
    if sockets::int_option(&d.file, packets::LEVEL, packets::FANOUT)?.is_some_and(|group| group != 0) {
        return scan.refuse(d, "it is a packet socket of a group (PACKET_FANOUT)", CLOSE);
    }
    let Some(mut socket) = common(scan, d, sort)? else { return Ok(None) };
    // It receives from the moment on at which it has a protocol, which it gets as it is bound.
    socket.protocol = 0;
    let memberships = found.memberships.into_iter().map(|value| SocketOption {
        level: packets::LEVEL,
        name: packets::ADD_MEMBERSHIP,
        value: Bytes(value),
    });
    socket.options.extend(memberships);
    // struct sockaddr_ll: family, protocol, interface; the rest is not for binding.
    let mut local = sockets::local_address(&d.file)?;
    local.truncate(8);
    if local.iter().skip(2).any(|&byte| byte != 0) {
        local.resize(20, 0);
        socket.local = Bytes(local);
    }
    Ok(Some(add(scan, d, socket)))
}

/// A netlink socket with the groups that it listens to.
pub(super) fn netlink(scan: &mut Scan<'_>, d: &Description, sort: Sort) -> Result<Option<u32>> {
    if has_something(&d.file)? {
        return scan.refuse(d, "it has messages that were not yet read", WAIT);
    }
    let local = sockets::local_address(&d.file)?;
    // struct sockaddr_nl: family, padding, port, groups.
    let word = |raw: &[u8], at: usize| {
        raw.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
    };
    let remote = sockets::peer_address(&d.file)?.unwrap_or_default();
    if word(&remote, 4) != 0 || word(&remote, 8) != 0 {
        return scan.refuse(d, "it is a netlink socket that is connected to another one", CLOSE);
    }
    let Some(mut socket) = common(scan, d, sort)? else { return Ok(None) };
    const LIST_MEMBERSHIPS: u32 = 9;
    const ADD_MEMBERSHIP: u32 = 1;
    let bits = sockets::option(&d.file, NETLINK, LIST_MEMBERSHIPS)?.unwrap_or_default();
    // Those in the address are joined as it is bound.
    for group in (33..=bits.len() as u32 * 8).filter(|g| bits[(g - 1) as usize / 8] >> ((g - 1) % 8) & 1 != 0)
    {
        let value = Bytes(group.to_ne_bytes().to_vec());
        socket.options.push(SocketOption { level: NETLINK, name: ADD_MEMBERSHIP, value });
    }
    if word(&local, 4) != 0 {
        socket.local = Bytes(local);
    }
    Ok(Some(add(scan, d, socket)))
}

/// Whether something can be read from a socket.
pub(crate) fn has_something(file: impl AsFd) -> Result<bool> {
    Ok(poll_now(file, libc::POLLIN)? & libc::POLLIN != 0)
}

/// Adds the groups that a socket has joined to its options; `false` if refused.
fn groups(scan: &mut Scan<'_>, d: &Description, sort: Sort, socket: &mut Socket) -> Result<bool> {
    let families: &[(i32, i32)] = match sort.0 {
        libc::AF_INET => &[(libc::AF_INET, libc::IPPROTO_IP)],
        _ => &[(libc::AF_INET, libc::IPPROTO_IP), (libc::AF_INET6, libc::IPPROTO_IPV6)],
    };
    for &(family, level) in families {
        for group in scan.groups(family) {
            let (join, filter) = match datagrams::membership(&d.file, level, &group) {
                Ok(None) => continue,
                Ok(Some(joined)) => joined,
                Err(e) => {
                    let why = format!("groups that it has joined cannot be told: {e}");
                    return scan.refuse::<()>(d, why, CLOSE).map(|_| false);
                }
            };
            let settings = [(JOIN_GROUP, Some(join)), (SOURCE_FILTER, filter)];
            socket.options.extend(settings.into_iter().filter_map(|(name, value)| {
                Some(SocketOption { level: level as u32, name, value: Bytes(value?) })
            }));
        }
    }
    Ok(true)
}
