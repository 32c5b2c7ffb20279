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
/// Buffer sizes, each with its bit in that.
const BUFFERS: [(i32, u32); 2] = [(1, libc::SO_SNDBUF as u32), (2, libc::SO_RCVBUF as u32)];

/// `SO_TIMESTAMPING_NEW`
const TIMESTAMPING_NEW: u32 = 65;

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
    libc::SO_SELECT_ERR_QUEUE,
    69, // SO_PREFER_BUSY_POLL
    70, // SO_BUSY_POLL_BUDGET
    74, // SO_TXREHASH
    libc::SO_TXTIME,
    libc::SO_DEBUG,
    41, // SO_WIFI_STATUS
    43, // SO_NOFCS
    63, // SO_TIMESTAMP_NEW
    64, // SO_TIMESTAMPNS_NEW
    libc::SO_TIMESTAMPING,
    TIMESTAMPING_NEW as i32,
    libc::SO_INCOMING_CPU,
    75, // SO_RCVMARK
    82, // SO_RCVPRIORITY
    83, // SO_PASSRIGHTS
    84, // SO_INQ
];

/// Options that others change: `IP_TOS` sets the priority that goes with it, a congestion control may set a pace.
const LAST: &[i32] = &[libc::SO_PRIORITY, libc::SO_MAX_PACING_RATE];

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
    libc::IP_OPTIONS,
    libc::IP_RETOPTS,
    libc::IP_PASSSEC,
    libc::IP_CHECKSUM,
    libc::IP_RECVFRAGSIZE,
    26, // IP_RECVERR_RFC4884
];

/// The same about groups, and of sockets that send to them.
const GROUPS: &[i32] = &[libc::IP_MULTICAST_LOOP, libc::IP_MULTICAST_ALL];
const SENDING: &[i32] = &[libc::IP_MULTICAST_IF, libc::IP_MULTICAST_TTL];
const GROUPS6: &[i32] = &[libc::IPV6_MULTICAST_LOOP, 29 /* IPV6_MULTICAST_ALL */];
const SENDING6: &[i32] = &[libc::IPV6_MULTICAST_HOPS, libc::IPV6_MULTICAST_IF];

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
    libc::IPV6_RECVPATHMTU,
    libc::IPV6_RECVFRAGSIZE,
    libc::IPV6_RECVORIGDSTADDR,
    libc::IPV6_MINHOPCOUNT,
    libc::IPV6_ADDR_PREFERENCES,
    30, // IPV6_ROUTER_ALERT_ISOLATE
    31, // IPV6_RECVERR_RFC4884
    33, // IPV6_FLOWINFO_SEND
    2,  // IPV6_2292PKTINFO
    3,  // IPV6_2292HOPOPTS
    4,  // IPV6_2292DSTOPTS
    5,  // IPV6_2292RTHDR
    8,  // IPV6_2292HOPLIMIT
    11, // IPV6_FLOWINFO
];

/// `TCP_RTO_MIN_US`, `TCP_DELACK_MAX_US`
const RTO_MIN: i32 = 45;
const DELACK_MAX: i32 = 46;

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
    libc::TCP_FASTOPEN_KEY,
    libc::TCP_FASTOPEN_CONNECT,
    libc::TCP_FASTOPEN_NO_COOKIE,
    libc::TCP_INQ,
    37, // TCP_TX_DELAY
    44, // TCP_RTO_MAX_MS
    RTO_MIN,
    DELACK_MAX,
];

/// Options of UDP: cork, no checksums sent or expected over IPv6, segment size, receive offload.
const DATAGRAM: &[i32] = &[1, 101, 102, 103, 104];

/// Options of netlink: packet information, broadcast errors, no `ENOBUFS`, all namespaces, short and long acknowledgements, strict checks.
const NETLINK: &[i32] = &[3, 4, 5, 8, 10, 11, 12];
const SOL_NETLINK: u32 = 270;

/// Options of packet sockets: least length to be copied, auxiliary data, original device, version, room in front, losses, time
/// stamps, offsets, no queueing, no outgoing packets, headers of virtual devices.
const PACKETS: &[i32] = &[7, 8, 9, 10, 12, 14, 17, 19, 20, 23, 24];

/// Options of raw sockets: headers by the program, packets for routers, filters of ICMP, checksums.
const RAW: &[(u32, u32)] = &[
    (IP, libc::IP_HDRINCL as u32),
    (IP, 5 /* IP_ROUTER_ALERT */),
    (255, 1),
    (58, 1),
    (255, 7),
    (IPV6, 36 /* IPV6_HDRINCL */),
];

fn known((family, kind, protocol): Sort) -> impl Iterator<Item = (u32, u32)> {
    let internet = matches!(family, libc::AF_INET | libc::AF_INET6);
    // The protocol of a raw socket is that of the packets that it sees.
    let is_tcp = kind == libc::SOCK_STREAM && matches!(protocol, libc::IPPROTO_TCP | libc::IPPROTO_MPTCP);
    let is_udp = kind == libc::SOCK_DGRAM && protocol == libc::IPPROTO_UDP;
    let list = |level: u32, names: &'static [i32], here: bool| {
        let names = if here { names } else { &[] };
        names.iter().map(move |&n| (level, n as u32))
    };
    list(SOL_SOCKET, SOCKET, true)
        .chain(list(IPV6, INTERNET6, family == libc::AF_INET6))
        .chain(list(IP, INTERNET, internet))
        .chain(list(IP, GROUPS, internet))
        .chain(list(IPV6, GROUPS6, family == libc::AF_INET6))
        .chain(list(IP, SENDING, internet && !is_tcp))
        .chain(list(IPV6, SENDING6, family == libc::AF_INET6 && !is_tcp))
        .chain(list(TCP, TRANSMISSION, internet && is_tcp))
        .chain(list(SOL_NETLINK, NETLINK, family == libc::AF_NETLINK))
        .chain(list(packets::LEVEL, PACKETS, family == libc::AF_PACKET))
        .chain(RAW.iter().copied().filter(move |_| internet && !is_tcp && !is_udp))
        .chain(list(UDP, DATAGRAM, internet && is_udp))
        .chain(list(SOL_SOCKET, LAST, true))
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
        let fresh = self.of(sort)?;
        let mut options = buffers(&socket, sort, fresh)?;
        for (level, name) in known(sort) {
            let Some(value) = sockets::option(&socket, level, name)? else { continue };
            let is_default = fresh.get(&(level, name)).is_some_and(|default| *default == value);
            if !is_default && can_be_set(level, name, &value) && !is_passing(&socket, sort, level, name)? {
                let value = Bytes(settable(&socket, sort, (level, name), value)?);
                options.push(SocketOption { level, name, value });
            }
        }
        // It follows from the type of service when that is set.
        let sets = |level, name: i32| options.iter().any(|o| (o.level, o.name) == (level, name as u32));
        if sets(IP, libc::IP_TOS) && !sets(SOL_SOCKET, libc::SO_PRIORITY) {
            let name = libc::SO_PRIORITY as u32;
            let value = sockets::option(&socket, SOL_SOCKET, name)?;
            options.extend(value.map(|value| SocketOption { level: SOL_SOCKET, name, value: Bytes(value) }));
        }
        Ok(options)
    }
}

/// Whether an option tells of the moment: of a connection which processor received the last packet.
fn is_passing(socket: impl AsFd, (family, ..): Sort, level: u32, name: u32) -> Result<bool> {
    let is_internet = matches!(family, libc::AF_INET | libc::AF_INET6);
    let tells = is_internet && (level, name) == (SOL_SOCKET, libc::SO_INCOMING_CPU as u32);
    Ok(tells && sockets::peer_address(socket)?.is_some())
}

/// A value as it can be set: a TCP socket that is not connected (any more) cannot be asked for time stamps by number.
fn settable(socket: impl AsFd, sort: Sort, option: (u32, u32), mut value: Vec<u8>) -> Result<Vec<u8>> {
    /// `SOF_TIMESTAMPING_OPT_ID` and `SOF_TIMESTAMPING_OPT_ID_TCP`
    const NUMBERED: u32 = 1 << 7 | 1 << 16;
    let stamps = [libc::SO_TIMESTAMPING as u32, TIMESTAMPING_NEW].map(|name| (SOL_SOCKET, name));
    if stamps.contains(&option)
        && sort.1 == libc::SOCK_STREAM
        && sockets::peer_address(socket)?.is_none()
        && let Some(flags) = value.first_chunk_mut::<4>()
    {
        *flags = (u32::from_ne_bytes(*flags) & !NUMBERED).to_ne_bytes();
    }
    Ok(value)
}

/// Whether a socket may have been given a value, which else is one of the machine's (`net.ipv4.tcp_rto_min_us`) at the time when it was made,
/// and might not be taken back.
fn can_be_set(level: u32, name: u32, value: &[u8]) -> bool {
    let number = value.try_into().map_or(0, u32::from_ne_bytes);
    match (level, name as i32) {
        (TCP, RTO_MIN | DELACK_MAX) => (2_000..=200_000).contains(&number),
        // Less than may be asked for is what options of the packets have left of the default.
        (TCP, libc::TCP_MAXSEG) => (88..=32_767).contains(&number),
        _ => true,
    }
}

fn read(socket: &OwnedFd, sort: Sort) -> Result<HashMap<(u32, u32), Vec<u8>>> {
    let mut values = HashMap::new();
    let sizes = BUFFERS.map(|(_, name)| (SOL_SOCKET, name));
    for (level, name) in known(sort).chain(sizes) {
        if let Some(value) = sockets::option(socket, level, name)? {
            values.insert((level, name), value);
        }
    }
    Ok(values)
}

/// Buffer sizes that were set by hand. That locks them, and a program may unlock them again: then the kernel chooses and changes those of
/// TCP, and leaves others as they are.
fn buffers(socket: impl AsFd, sort: Sort, fresh: &HashMap<(u32, u32), Vec<u8>>) -> Result<Vec<SocketOption>> {
    let locked = sockets::int_option(&socket, SOL_SOCKET, SO_BUF_LOCK)?;
    let is_tuned = sort.0 != libc::AF_UNIX && sort.1 == libc::SOCK_STREAM;
    let option = |name, value| SocketOption { level: SOL_SOCKET, name, value: Bytes(value) };
    let (mut options, mut locks) = (Vec::new(), 0);
    for (bit, name) in BUFFERS {
        let Some(value) = sockets::option(&socket, SOL_SOCKET, name)? else { continue };
        let is_default = fresh.get(&(SOL_SOCKET, name)) == Some(&value);
        if locked.unwrap_or(0) & bit != 0 || !is_tuned && !is_default {
            locks |= bit;
            options.push(option(name, value));
        }
    }
    let unlocked = locked.filter(|locked| *locked != locks);
    options.extend(unlocked.map(|locked| option(SO_BUF_LOCK, locked.to_ne_bytes().to_vec())));
    Ok(options)
}
