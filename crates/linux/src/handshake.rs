//! TCP connections made as everybody may make them: one end connects to a socket that listens for a moment, and accepts it.
//! `tcp(7)`, `ip(7)`.

use crate::descriptors::readable;
use crate::sockets::{self, bind_to_loopback, endpoint, set_option};
use crate::tcp::{CONNECT, End, Flow, PATIENCE, end_half, info, make_room, replace, state, too_late};
use crate::{Error, Result, inet_diag};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

const TCP: i32 = libc::IPPROTO_TCP;
const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const REUSE: u32 = libc::SO_REUSEADDR as u32;
const IP: u32 = libc::IPPROTO_IP as u32;
const ADDRESS_ALONE: u32 = libc::IP_BIND_ADDRESS_NO_PORT as u32;
/// `IP_LOCAL_PORT_RANGE` (Linux 6.3): the ports that one is picked from, the first in the lower half.
const PORT_RANGE: u32 = 51;
const MOMENT: Duration = Duration::from_micros(50);

/// Connects two ends that have addresses: a new socket, the client, and one that the server's accepts, which is new as well and listens until
/// it is closed; gives the accepted one. All of them let others have their port (`SO_REUSEADDR`) until they are told otherwise. How the client
/// picks a port (`IP_LOCAL_PORT_RANGE`, `IP_BIND_ADDRESS_NO_PORT`) is as with any new socket.
///
/// Somebody else may connect meanwhile, and is turned away.
///
/// # Errors
/// As `bind(2)` and `connect(2)`; `EADDRINUSE` and `EADDRNOTAVAIL` also while the kernel remembers an earlier connection of these
/// addresses.
pub fn connect(client: &End<'_>, server: &End<'_>) -> Result<OwnedFd> {
    // What is received waits in a buffer whose size the handshake tells of, once and for all.
    for end in [client, server] {
        make_room(end)?;
        set_option(end.socket, SOL_SOCKET, REUSE, &1i32.to_ne_bytes())?;
    }
    let door = server.socket;
    if sockets::local_address(door)? != server.address {
        bind(door, server.address)?;
    }
    rustix::net::listen(door, 1).map_err(|e| Error::call("listen", e))?;
    take_address(client)?;
    let blocks =
        |fd: &OwnedFd, is: bool| rustix::io::ioctl_fionbio(fd, !is).map_err(|e| Error::call("FIONBIO", e));
    blocks(door, false)?;
    blocks(client.socket, false)?;
    let connect = || match sockets::connect(client.socket, client.remote) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(Error::call(CONNECT, e)),
        _ => Ok(()),
    };
    match connect() {
        // A port that is reserved, or that other sockets share, is had by asking for it.
        Err(e) if e.errno() == Some(libc::EADDRNOTAVAIL) && is_free(client)? => {
            bind(client.socket, client.address)?;
            connect()?;
        }
        connected => connected?,
    }
    if endpoint(&sockets::local_address(client.socket)?) != endpoint(client.address) {
        let not_that = std::io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
        return Err(Error::call(CONNECT, not_that));
    }
    let accepted = accept(door, client)?;
    blocks(client.socket, true)?;
    for name in [ADDRESS_ALONE, PORT_RANGE] {
        if sockets::int_option(client.socket, IP, name)?.is_some_and(|value| value != 0) {
            set_option(client.socket, IP, name, &0i32.to_ne_bytes())?;
        }
    }
    Ok(accepted)
}

/// The one that is connected to the client. It is known by its address, which nobody else has.
fn accept(door: &OwnedFd, client: &End<'_>) -> Result<OwnedFd> {
    let since = Instant::now();
    loop {
        match rustix::net::accept_with(door, rustix::net::SocketFlags::CLOEXEC) {
            Ok(fd) => {
                let peer = sockets::peer_address(&fd)?;
                if peer.is_some_and(|peer| endpoint(&peer) == endpoint(client.address)) {
                    return Ok(fd);
                }
            }
            Err(rustix::io::Errno::AGAIN) => {
                let mut both = [PollFd::new(door, PollFlags::IN), PollFd::new(client.socket, PollFlags::HUP)];
                let moment = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                let _ = poll(&mut both, Some(&moment));
                if let Err(e) = rustix::net::sockopt::socket_error(client.socket)
                    .map_err(|e| Error::call("SO_ERROR", e))?
                {
                    return Err(Error::call(CONNECT, e));
                }
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
            Err(e) => return Err(Error::call("accept", e)),
        }
        if since.elapsed() > PATIENCE {
            return Err(too_late("accept a connection"));
        }
    }
}

/// Has a socket connect from an address. A port that the kernel picks itself, when it knows the other end, may be that of a connection
/// that is over (a second ago, on the loopback device); one that it is told may not, for a minute.
fn take_address(client: &End<'_>) -> Result<()> {
    let (socket, address) = (client.socket, client.address);
    if sockets::local_address(socket)? == address {
        return Ok(());
    }
    let port = address.get(2..4).map_or(0, |port| u16::from_be_bytes([port[0], port[1]]));
    let only = (u32::from(port) << 16 | u32::from(port)).to_ne_bytes();
    let is_picked = picked_from().is_some_and(|(first, last)| (first..=last).contains(&port));
    if !is_picked || set_option(socket, IP, PORT_RANGE, &only).is_err() {
        return bind(socket, address);
    }
    set_option(socket, IP, ADDRESS_ALONE, &1i32.to_ne_bytes())?;
    let mut alone = address.to_vec();
    alone[2..4].fill(0);
    bind(socket, &alone)
}

fn bind(socket: &OwnedFd, address: &[u8]) -> Result<()> {
    sockets::bind(socket, address).map_err(|e| Error::call("bind a connection", e))
}

/// Whether nothing of the port of a socket is remembered, which has none yet.
fn is_free(client: &End<'_>) -> Result<bool> {
    let has_none = sockets::local_address(client.socket)?.get(2..4) == Some(&[0, 0]);
    let port = client.address.get(2..4).map(|port| [port[0], port[1]]);
    Ok(has_none && !port.is_some_and(|port| inet_diag::is_remembered(port).unwrap_or(true)))
}

/// Ports from which the kernel picks; a program may narrow them, and not choose others.
fn picked_from() -> Option<(u16, u16)> {
    let told = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut ports = told.split_whitespace().map_while(|word| word.parse().ok());
    Some((ports.next()?, ports.next()?))
}

/// Has on its way between two ends that have just been connected what is to be so, and ends the halves that have ended.
///
/// # Errors
/// That it does not fit.
pub fn complete(a: &End<'_>, b: &End<'_>) -> Result<()> {
    for (from, to) in [(a, b), (b, a)] {
        let flow = Flow { unread: to.unread.to_vec(), unsent: from.unsent.to_vec() };
        if flow != Flow::default() {
            replace(from.socket.as_fd(), to.socket.as_fd(), &flow)?;
        }
    }
    for end in [a, b] {
        end.settle()?;
    }
    Ok(())
}

/// Makes a new socket one whose connection is over: what was unread is there to be read, and then the end of it, or, if the
/// other side had not ended, the news that the connection was reset. It has an address of the loopback device.
pub fn make_ended(socket: &OwnedFd, family: i32, unread: &[u8], how: Over) -> Result<()> {
    let door = sockets::socket(family, libc::SOCK_STREAM, TCP)?;
    let (own, its) = (bind_to_loopback(socket, family)?, bind_to_loopback(&door, family)?);
    let end = End { socket, address: &own, remote: &its, unread, unsent: &[], ended: false };
    let door = End { socket: &door, address: &its, remote: &own, unread: &[], ..end };
    let other = connect(&end, &door)?;
    complete(&end, &End { socket: &other, ..door })?;
    // Who is reset, or whose other end is gone, gets no more than what has arrived.
    wait_until("send what was unread", || Ok(readable(socket)? as usize == unread.len()))?;
    set_option(socket, SOL_SOCKET, REUSE, &0i32.to_ne_bytes())?;
    if how == Over::Reset {
        let_forget(&other)?;
    }
    drop(other);
    let is_over = |wanted| wait_until("end a connection", || Ok(info(socket)?.state == wanted));
    is_over(if how == Over::Reset { state::CLOSE } else { state::CLOSE_WAIT })?;
    if how == Over::BothEnded {
        end_half(socket)?;
        is_over(state::CLOSE)?;
    }
    Ok(())
}

/// Has a connection be over, and forgotten, as soon as it is closed (struct linger: with no time to linger, close(2) resets).
pub fn let_forget(socket: &OwnedFd) -> Result<()> {
    let linger: Vec<u8> = [1i32, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
    set_option(socket, SOL_SOCKET, libc::SO_LINGER as u32, &linger)
}

/// Waits until something is so: on a busy machine even the loopback device takes its time.
fn wait_until(what: &str, is_so: impl Fn() -> Result<bool>) -> Result<()> {
    let since = Instant::now();
    while !is_so()? {
        if since.elapsed() > PATIENCE {
            return Err(too_late(what));
        }
        std::thread::sleep(MOMENT);
    }
    Ok(())
}

/// How a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// It was reset.
    Reset,
    /// The other side has ended its half and is gone.
    Ended,
    /// So have we.
    BothEnded,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::descriptors::poll_now;
    use crate::sockets::{BUFFER_LOCK, int_option};
    use crate::tcp::tests::{drain, tcp};

    /// What is on its way, with an end behind it; again at once, when the kernel still remembers the first connection.
    #[test]
    fn a_connection_is_made_with_all_that_was_on_its_way() {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let addresses = [tcp(family), tcp(family)].map(|fd| bind_to_loopback(&fd, family).unwrap());
            for life in 0..2 {
                let (unread, unsent) = (vec![7; 60_000], vec![8; 90_000]);
                let since = Instant::now();
                let (client, server) = loop {
                    let ends = [tcp(family), tcp(family)];
                    let end = |at: usize| End {
                        socket: &ends[at],
                        address: &addresses[at],
                        remote: &addresses[1 - at],
                        unread: if at == 0 { b"for the client" } else { &unread },
                        unsent: if at == 0 { &unsent } else { &[] },
                        ended: at == 0,
                    };
                    match connect(&end(0), &end(1)) {
                        Ok(accepted) => {
                            complete(&end(0), &End { socket: &accepted, ..end(1) }).unwrap();
                            let [client, _] = ends;
                            break (client, accepted);
                        }
                        Err(e) if since.elapsed() > PATIENCE => panic!("life {life}: {e}"),
                        Err(_) => std::thread::sleep(Duration::from_millis(20)),
                    }
                };
                assert_eq!(sockets::local_address(&client).unwrap(), addresses[0]);
                assert_eq!(sockets::peer_address(&client).unwrap().unwrap(), addresses[1]);
                assert_eq!(drain(&server, 150_000), [unread, unsent].concat());
                assert_eq!(rustix::io::read(&server, &mut [0u8; 1]).unwrap(), 0);
                sockets::send(&server, b" and more").unwrap();
                assert_eq!(drain(&client, 23), b"for the client and more");
                for name in [ADDRESS_ALONE, PORT_RANGE] {
                    assert_eq!(int_option(&client, IP, name).unwrap().unwrap_or(0), 0);
                }
                for end in [&client, &server] {
                    assert_eq!(int_option(end, SOL_SOCKET, BUFFER_LOCK).unwrap(), Some(0));
                }
            }
        }
    }

    #[test]
    fn a_connection_that_is_over_says_so_when_all_is_read() {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let data = vec![9; 200_000];
            let socket = tcp(family);
            make_ended(&socket, family, &data, Over::Reset).unwrap();
            assert_eq!(info(&socket).unwrap().state, state::CLOSE);
            assert_eq!(drain(&socket, data.len()), data);
            let e = rustix::io::read(&socket, &mut [0u8; 1]).unwrap_err();
            assert_eq!(e, rustix::io::Errno::CONNRESET);
            for (how, state) in [(Over::Ended, state::CLOSE_WAIT), (Over::BothEnded, state::CLOSE)] {
                let socket = tcp(family);
                make_ended(&socket, family, &data, how).unwrap();
                assert_eq!(info(&socket).unwrap().state, state);
                assert_eq!(drain(&socket, data.len()), data);
                assert_eq!(rustix::io::read(&socket, &mut [0u8; 1]).unwrap(), 0);
                assert_eq!(poll_now(&socket, libc::POLLERR).unwrap() & libc::POLLERR, 0);
            }
        }
    }
}
