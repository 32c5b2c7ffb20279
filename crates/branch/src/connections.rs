//! Connections over the network of which both ends are in the program.
//!
//! They lie within it as pipes do: what one end has sent and the other one has not read is part of what is remembered, and is on its way again
//! after a rollback. Both ends stay what they are: one is read until nothing is left, and the other one sends once more. So both have to
//! be there still, and neither may have ended its half (`shutdown(2)`) since.

use crate::Result;
use crate::between::{End, View, duplicate, is};
use rustix::fs::FileType;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use stillpoint_linux::descriptors::poll_now;
use stillpoint_linux::fdinfo::Detail;
use stillpoint_linux::sockets::{Endpoint, endpoint};
use stillpoint_linux::tcp::{self, Flow, Guard, state};
use stillpoint_linux::{inet_diag, sockets};

const TCP: u32 = libc::IPPROTO_TCP as u32;
const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;

/// They, and what they could become.
#[derive(Debug, Default)]
pub struct Connections {
    /// Those within the program, by the inode number of the end that receives.
    incoming: BTreeMap<u64, Incoming>,
    /// All sockets that are not part of one, and what is unread in those of which the other end, on this machine, is gone.
    others: BTreeMap<u64, Other>,
}

/// One direction of a connection.
#[derive(Debug)]
struct Incoming {
    own: End,
    peer: u64,
    /// Whether each half has ended, the own one first.
    ended: (bool, bool),
    /// None: more than can be told without further ado.
    flow: Option<Flow>,
}

#[derive(Debug)]
struct Other {
    own: End,
    state: u8,
    rest: Vec<u8>,
}

/// A socket as it was found.
struct Found {
    own: End,
    ino: u64,
    protocol: i32,
    socket: OwnedFd,
    info: tcp::Info,
    addresses: Option<(Endpoint, Endpoint)>,
}

/// A reason to refuse, of the descriptor with this number.
pub type Reason = (End, u64, String, &'static str);

impl Connections {
    /// Of processes that stand still. `then`: to be put back, and not to be replaced.
    ///
    /// # Errors
    /// That a socket cannot be looked at.
    pub fn read(views: &[View<'_>], then: bool, refuse: &mut Vec<Reason>) -> Result<Self> {
        let found = find(views)?;
        let mut all = Connections::default();
        let mut by_addresses: HashMap<(Endpoint, Endpoint), Vec<usize>> = HashMap::new();
        for (at, one) in found.iter().enumerate() {
            if let Some(addresses) = one.addresses {
                by_addresses.entry(addresses).or_default().push(at);
            }
        }
        let (mut guard, mut may_see) = (None, true);
        for one in &found {
            let others = one.addresses.and_then(|(local, peer)| by_addresses.get(&(peer, local)));
            let peer = others.into_iter().flatten().map(|&at| &found[at]);
            // Namespaces of the program's own may have the same addresses.
            let mut peers = peer.filter(|peer| network(&one.socket) == network(&peer.socket));
            let Some(peer) = peers.next() else {
                if waits(&found, one) {
                    let why = "it is a connection of the program with itself that was not yet accepted";
                    refuse.push((one.own, one.ino, why.into(), AGAIN));
                }
                let rest = match is_over(one) {
                    true => tcp::unread(&one.socket),
                    false => Ok(Vec::new()),
                };
                let rest = rest.unwrap_or_else(|e| {
                    let why = format!("what was not yet read from it cannot be told: {e}");
                    refuse.push((one.own, one.ino, why, AGAIN));
                    Vec::new()
                });
                all.others.insert(one.ino, Other { own: one.own, state: one.info.state, rest });
                continue;
            };
            if then && let Some((why, hint)) = why_not(one)? {
                refuse.push((one.own, one.ino, why.into(), hint));
                continue;
            }
            let ended = [one, peer].map(|end| tcp::has_ended_ours(end.info.state));
            let (from, to) = (peer.socket.as_fd(), one.socket.as_fd());
            // What is replaced need not be known, but for whether it has to be.
            let is_asked = may_see && (then || ended[1] || tcp::has_arrived(from, to).unwrap_or(false));
            let flow = is_asked.then(|| tcp::flow(from, to, || watched(&mut guard, &found)));
            if let Some(Err(e)) = &flow {
                // For those without CAP_NET_ADMIN, who have waited for it. To know of another one might take as long.
                may_see = e.errno() != Some(libc::EPERM);
                let why = format!("what is on its way in it, within the program, cannot be told: {e}");
                let hint = if may_see { AGAIN } else { "do it as root, or when less is on its way" };
                refuse.extend(then.then_some((one.own, one.ino, why, hint)));
            }
            let flow = flow.and_then(Result::ok);
            let incoming = Incoming { own: one.own, peer: peer.ino, ended: ended.into(), flow };
            all.incoming.insert(one.ino, incoming);
        }
        Ok(all)
    }

    /// Why what is now cannot become this.
    pub fn plan(&self, now: &Connections) -> Vec<Reason> {
        let mut refused = Vec::new();
        for (ino, then) in &self.incoming {
            let why = match now.incoming.get(ino) {
                // If a descriptor was closed since, that is a reason by itself.
                None if now.others.contains_key(ino) => {
                    "its other end, in the program as well, was closed since"
                }
                None => continue,
                Some(now) if now.peer != then.peer => "it has been connected with another socket since",
                Some(now) if now.ended != then.ended => "it has been shut down since (shutdown(2))",
                Some(now) if then.ended.1 && now.flow != then.flow => {
                    "its other end is shut down, and cannot send again what was in it"
                }
                Some(_) => continue,
            };
            refused.push((then.own, *ino, why.into(), ""));
        }
        for (ino, then) in &self.others {
            let was = then.state;
            let (state, rest) = match (now.others.get(ino), now.incoming.contains_key(ino)) {
                (Some(now), _) => (now.state, Some(&now.rest)),
                (None, true) => (state::ESTABLISHED, None),
                (None, false) => continue,
            };
            let why = if was == state::CLOSE && state == state::LISTEN {
                "it listens since then"
            } else if was == state::CLOSE && state != state::CLOSE {
                "it has been connected since"
            } else if was == state::LISTEN && state != state::LISTEN {
                "it does not listen any more"
            } else if !then.rest.is_empty() && rest != Some(&then.rest) {
                "its other end is gone, and cannot send again what was in it"
            } else {
                continue;
            };
            refused.push((then.own, *ino, why.into(), ""));
        }
        refused
    }

    /// Has on its way what was on its way.
    ///
    /// # Errors
    /// That it does not fit.
    pub fn put_back(&self, now: &Connections, end: impl Fn(End) -> Result<OwnedFd>) -> Result<()> {
        for (ino, incoming) in &self.incoming {
            let Some(flow) = &incoming.flow else { continue };
            let is = now.incoming.get(ino).and_then(|now| now.flow.as_ref());
            if is == Some(flow) {
                continue;
            }
            let Some(peer) = self.incoming.get(&incoming.peer) else { continue };
            tcp::replace(end(peer.own)?.as_fd(), end(incoming.own)?.as_fd(), flow)?;
        }
        Ok(())
    }
}

/// For what passes.
const AGAIN: &str = "try again";

/// All TCP sockets, once each.
fn find(views: &[View<'_>]) -> Result<Vec<Found>> {
    let mut found: BTreeMap<u64, Found> = BTreeMap::new();
    for view in views {
        for (&fd, held) in &view.table.held {
            let is_unix = matches!(held.info.detail, Detail::Unix { .. });
            let is_open = held.info.flags & libc::O_PATH as u32 == 0;
            if !is(FileType::Socket, held.mode) || !is_open || is_unix || found.contains_key(&held.identity.1)
            {
                continue;
            }
            let own = (view.who, fd);
            let socket = duplicate(views, own)?;
            let option = |name: i32| sockets::int_option(&socket, SOL_SOCKET, name as u32);
            let Some(protocol @ (libc::IPPROTO_TCP | libc::IPPROTO_MPTCP)) = option(libc::SO_PROTOCOL)?
            else {
                continue;
            };
            // Others number their protocols otherwise.
            if !matches!(option(libc::SO_DOMAIN)?, Some(libc::AF_INET | libc::AF_INET6)) {
                continue;
            }
            let info = tcp::info(&socket)?;
            let local = sockets::local_address(&socket)?;
            let peer = match info.state {
                state::SYN_SENT => {
                    let family = i32::from(u16::from_ne_bytes([local[0], local[1]]));
                    inet_diag::connecting(family, held.identity.1)?.map(|connecting| connecting.remote)
                }
                _ => sockets::peer_address(&socket)?,
            };
            let addresses = endpoint(&local).zip(peer.as_deref().and_then(endpoint));
            let ino = held.identity.1;
            found.insert(ino, Found { own, ino, protocol, socket, info, addresses });
        }
    }
    Ok(found.into_values().collect())
}

/// In which network namespace a socket is (`SO_NETNS_COOKIE`).
fn network(socket: &OwnedFd) -> Option<Vec<u8>> {
    const NETNS_COOKIE: u32 = 71;
    sockets::option(socket, SOL_SOCKET, NETNS_COOKIE).ok().flatten()
}

/// Whether a connection waits to be accepted by another socket of the program.
fn waits(found: &[Found], one: &Found) -> bool {
    let is_young = matches!(
        one.info.state,
        state::ESTABLISHED | state::SYN_SENT | state::SYN_RECEIVED | state::FIN_WAIT1 | state::FIN_WAIT2
    );
    let Some((_, (address, port))) = one.addresses.filter(|_| is_young) else { return false };
    let mut doors = found.iter().filter(|door| door.info.state == state::LISTEN);
    doors.any(|door| {
        let local = sockets::local_address(&door.socket).ok().as_deref().and_then(endpoint);
        let is_it = |(a, p): Endpoint| p == port && (a == address || is_any(a));
        local.is_some_and(is_it)
            && (door.info.pending > 0 || one.info.state == state::SYN_SENT)
            && network(&one.socket) == network(&door.socket)
    })
}

/// Whether its other end, on this machine, is gone: nothing more will come.
fn is_over(one: &Found) -> bool {
    match one.info.state {
        state::CLOSE => true,
        state::CLOSE_WAIT | state::LAST_ACK | state::CLOSING => {
            one.addresses.is_some_and(|((own, _), (other, _))| own == other)
        }
        _ => false,
    }
}

/// Why what is on its way in a connection cannot be sent once more.
fn why_not(one: &Found) -> Result<Option<(&'static str, &'static str)>> {
    let events = poll_now(&one.socket, libc::POLLPRI)?;
    let option = |level, name: i32| sockets::int_option(&one.socket, level, name as u32);
    Ok(if one.protocol == libc::IPPROTO_MPTCP {
        Some(("it is a connection of Multipath TCP within the program, which cannot be put back", ""))
    } else if sockets::option(&one.socket, TCP, libc::TCP_ULP as u32)?.is_some_and(|name| !name.is_empty()) {
        Some((
            "it is a connection within the program with an upper layer protocol (TCP_ULP), which cannot be put back",
            "",
        ))
    } else if events & libc::POLLPRI != 0 {
        Some(("it has urgent data that was not yet read", AGAIN))
    } else if events & libc::POLLERR != 0 {
        Some(("it has an error, or something in its error queue, that the program has not yet read", AGAIN))
    } else if option(SOL_SOCKET, libc::SO_PEEK_OFF)?.is_some_and(|at| at >= 0) {
        Some(("the program peeks at it by SO_PEEK_OFF", ""))
    } else {
        None
    })
}

/// The one that looks after all connections, made when it is needed.
fn watched<'g>(guard: &'g mut Option<Guard>, found: &[Found]) -> stillpoint_linux::Result<&'g Guard> {
    if guard.is_none() {
        let connected = found.iter().filter(|one| one.addresses.is_some());
        *guard = Some(Guard::new(&connected.map(|one| one.socket.as_fd()).collect::<Vec<_>>())?);
    }
    guard.as_ref().ok_or_else(|| stillpoint_linux::Error::Other("there is no guard".into()))
}

fn is_any(address: [u8; 16]) -> bool {
    address == [0; 16] || address == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0]
}
