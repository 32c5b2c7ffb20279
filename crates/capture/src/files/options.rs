//! Socket options that can be set again.

use crate::Result;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, OwnedFd};
use stillpoint_image::{Bytes, SocketOption};
use stillpoint_linux::{packets, sockets};

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const IP: u32 = libc::IPPROTO_IP as u32;
const IPV6: u32 = libc::IPPROTO_IPV6 as u32;
const TCP: u32 = libc::IPPROTO_TCP as u32;
const UDP: u32 = libc::IPPROTO_UDP as u32;
/// `SO_BUF_LOCK`: which buffer sizes were set by hand.
const SO_BUF_LOCK: u32 = 72;

/// Options of `SOL_SOCKET`, in the order to set them.
const SOCKET: &[i32] = &[
    libc::SO_REUSEADDR,
    libc::SO_REUSEPORT,
    libc::SO_MARK,
    libc::SO_BINDTODEVICE,
    libc::SO_KEEPALIVE,
    libc::SO_BROADCAST,
    libc::SO_DONTROUTE,
    libc::SO_OOBINLINE,
    libc::SO_LINGER,
    libc::SO_RCVLOWAT,
    libc::SO_RCVTIMEO,
    libc::SO_SNDTIMEO,
    libc::SO_PRIORITY,
    libc::SO_PASSCRED,
    libc::SO_PASSSEC,
    76, // SO_PASSPIDFD
    libc::SO_NO_CHECK,
    libc::SO_TIMESTAMP,
    libc::SO_TIMESTAMPNS,
    libc::SO_RXQ_OVFL,
    libc::SO_BUSY_POLL,
    libc::SO_PEEK_OFF,
    libc::SO_ZEROCOPY,
    libc::SO_MAX_PACING_RATE,
    libc::SO_SELECT_ERR_QUEUE,
    82, // SO_RCVMARK
    83, // SO_PASSRIGHTS
];

/// Options of IPv4, which IPv6 sockets have as well.
const INTERNET: &[i32] = &[
    libc::IP_FREEBIND,
    libc::IP_TRANSPARENT,
    libc::IP_BIND_ADDRESS_NO_PORT,
    51, // IP_LOCAL_PORT_RANGE
    libc::IP_TOS,
    libc::IP_TTL,
    libc::IP_MINTTL,
    libc::IP_MTU_DISCOVER,
    libc::IP_RECVERR,
    libc::IP_RECVTTL,
    libc::IP_RECVTOS,
    libc::IP_RECVOPTS,
    libc::IP_PKTINFO,
    libc::IP_RECVORIGDSTADDR,
    libc::IP_NODEFRAG,
    libc::IP_UNICAST_IF,
];

/// The same of sockets that send to groups.
const GROUPS: &[i32] =
    &[libc::IP_MULTICAST_IF, libc::IP_MULTICAST_TTL, libc::IP_MULTICAST_LOOP, libc::IP_MULTICAST_ALL];
const GROUPS6: &[i32] = &[
    libc::IPV6_MULTICAST_HOPS,
    libc::IPV6_MULTICAST_LOOP,
    libc::IPV6_MULTICAST_IF,
    29, // IPV6_MULTICAST_ALL
];

/// Options of IPv6.
const INTERNET6: &[i32] = &[
    libc::IPV6_V6ONLY,
    libc::IPV6_FREEBIND,
    libc::IPV6_TRANSPARENT,
    libc::IPV6_UNICAST_HOPS,
    libc::IPV6_TCLASS,
    libc::IPV6_MTU_DISCOVER,
    libc::IPV6_RECVERR,
    libc::IPV6_RECVPKTINFO,
    libc::IPV6_RECVHOPLIMIT,
    libc::IPV6_RECVTCLASS,
    libc::IPV6_RECVRTHDR,
    libc::IPV6_RECVHOPOPTS,
    libc::IPV6_RECVDSTOPTS,
    libc::IPV6_DONTFRAG,
    libc::IPV6_AUTOFLOWLABEL,
    libc::IPV6_UNICAST_IF,
];

/// Options of TCP.
const TRANSMISSION: &[i32] = &[
    libc::TCP_NODELAY,
    libc::TCP_MAXSEG,
    libc::TCP_CORK,
    libc::TCP_KEEPIDLE,
    libc::TCP_KEEPINTVL,
    libc::TCP_KEEPCNT,
    libc::TCP_SYNCNT,
    libc::TCP_LINGER2,
    libc::TCP_DEFER_ACCEPT,
    libc::TCP_WINDOW_CLAMP,
    libc::TCP_CONGESTION,
    libc::TCP_USER_TIMEOUT,
    libc::TCP_THIN_LINEAR_TIMEOUTS,
    libc::TCP_THIN_DUPACK,
    libc::TCP_NOTSENT_LOWAT,
    libc::TCP_SAVE_SYN,
    libc::TCP_FASTOPEN,
    libc::TCP_FASTOPEN_CONNECT,
    libc::TCP_FASTOPEN_NO_COOKIE,
    libc::TCP_INQ,
    37, // TCP_TX_DELAY
];

/// Options of UDP: cork, segment size, receive offload.
const DATAGRAM: &[i32] = &[1, 103, 104];

/// Options of netlink: packet information, broadcast errors, no `ENOBUFS`, all namespaces, short and long acknowledgements, strict checks.
const NETLINK: &[i32] = &[3, 4, 5, 8, 10, 11, 12];
const SOL_NETLINK: u32 = 270;

/// Options of packet sockets: least length to be copied, auxiliary data, original device, version, room in front, losses, time
/// stamps, offsets, no queueing, no outgoing packets, headers of virtual devices.
const PACKETS: &[i32] = &[7, 8, 9, 10, 12, 14, 17, 19, 20, 23, 24];

/// Options of raw sockets: headers by the program, filters of ICMP, checksums.
const RAW: &[(u32, u32)] =
    &[(IP, libc::IP_HDRINCL as u32), (255, 1), (58, 1), (255, 7), (IPV6, 36 /* IPV6_HDRINCL */)];

fn known(family: i32, protocol: i32) -> impl Iterator<Item = (u32, u32)> {
    let internet = matches!(family, libc::AF_INET | libc::AF_INET6);
    let is_tcp = matches!(protocol, libc::IPPROTO_TCP | libc::IPPROTO_MPTCP);
    let list = |level: u32, names: &'static [i32], here: bool| {
        let names = if here { names } else { &[] };
        names.iter().map(move |&n| (level, n as u32))
    };
    list(SOL_SOCKET, SOCKET, true)
        .chain(list(IPV6, INTERNET6, family == libc::AF_INET6))
        .chain(list(IP, INTERNET, internet))
        .chain(list(IP, GROUPS, internet && !is_tcp))
        .chain(list(IPV6, GROUPS6, family == libc::AF_INET6 && !is_tcp))
        .chain(list(TCP, TRANSMISSION, internet && is_tcp))
        .chain(list(SOL_NETLINK, NETLINK, family == libc::AF_NETLINK))
        .chain(list(packets::LEVEL, PACKETS, family == libc::AF_PACKET))
        .chain(RAW.iter().copied().filter(move |_| internet && !is_tcp && protocol != libc::IPPROTO_UDP))
        .chain(list(UDP, DATAGRAM, internet && protocol == libc::IPPROTO_UDP))
}

/// Family, kind, protocol.
type Sort = (i32, i32, i32);

/// Values that a new socket of each sort has.
#[derive(Debug, Default)]
pub struct Defaults {
    fresh: HashMap<Sort, HashMap<(u32, u32), Vec<u8>>>,
}

impl Defaults {
    fn of(&mut self, sort: Sort) -> Result<&HashMap<(u32, u32), Vec<u8>>> {
        if let Entry::Vacant(unknown) = self.fresh.entry(sort) {
            let fresh = sockets::socket(sort.0, sort.1, sort.2)?;
            unknown.insert(read(&fresh, sort)?);
        }
        Ok(&self.fresh[&sort])
    }

    /// Options of a socket that a new one does not have by itself, in the order to set them.
    pub fn differing(&mut self, socket: impl AsFd, sort: Sort) -> Result<Vec<SocketOption>> {
        let mut options = buffers(&socket)?;
        let fresh = self.of(sort)?;
        for (level, name) in known(sort.0, sort.2) {
            let Some(value) = sockets::option(&socket, level, name)? else { continue };
            if fresh.get(&(level, name)).is_none_or(|default| *default != value) {
                options.push(SocketOption { level, name, value: Bytes(value) });
            }
        }
        Ok(options)
    }
}

fn read(socket: &OwnedFd, sort: Sort) -> Result<HashMap<(u32, u32), Vec<u8>>> {
    let mut values = HashMap::new();
    for (level, name) in known(sort.0, sort.2) {
        if let Some(value) = sockets::option(socket, level, name)? {
            values.insert((level, name), value);
        }
    }
    Ok(values)
}

/// Buffer sizes that were set by hand; the kernel chooses and changes all others.
fn buffers(socket: impl AsFd) -> Result<Vec<SocketOption>> {
    let locked = sockets::int_option(&socket, SOL_SOCKET, SO_BUF_LOCK)?.unwrap_or(0);
    let mut options = Vec::new();
    for (bit, name) in [(1, libc::SO_SNDBUF as u32), (2, libc::SO_RCVBUF as u32)] {
        if locked & bit != 0
            && let Some(value) = sockets::option(&socket, SOL_SOCKET, name)?
        {
            options.push(SocketOption { level: SOL_SOCKET, name, value: Bytes(value) });
        }
    }
    Ok(options)
}
