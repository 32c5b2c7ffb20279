//! What lies within a program, between its processes or between threads of one: open files that several processes have, pipes and
//! connections from one end to another with what is in them.
//!
//! [`crate::descriptors`] sees to one table at a time. What it cannot tell is whether what is open in two of them is one and the same: a
//! description that several had is to be had by all of them again, under the numbers of then, and by nobody else. Whoever has let go of his
//! part of one cannot be given it again, so that is a reason to refuse.

use crate::connections::{Connections, Reason};
use crate::descriptors::{Contents, Plan, Table, name, refill};
use crate::still::of;
use crate::{Error, Result};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use stillpoint_capture::Refusal;
use stillpoint_linux::descriptors::{compare, duplicate_from, poll_now};
use stillpoint_linux::fdinfo::Detail;
use stillpoint_linux::proc::NamespaceKind;
use stillpoint_linux::sockets::{self, UnixSocket, unix_sockets};
use stillpoint_linux::{messages, namespaces, pipes, tcp};

/// A process at rest, and what it has open.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// By what it is known here.
    pub who: u64,
    /// Its id.
    pub pid: u32,
    /// Its pidfd.
    pub pidfd: BorrowedFd<'a>,
    /// Its descriptors.
    pub table: &'a Table,
}

/// A number in the table of a process.
pub type End = (u64, u32);

/// A description of a process, as its table numbers them.
type Part = (u64, usize);

/// What there is.
#[derive(Debug, Default)]
pub struct Between {
    /// Descriptions that several processes have: who, and as which of theirs.
    common: Vec<Vec<Part>>,
    /// Pipes that lead from one process to another, and FIFOs.
    pipes: BTreeMap<(u64, u64), Pipe>,
    /// Unix sockets, by their inode numbers.
    sockets: BTreeMap<u32, Socket>,
    /// Connections over the network.
    connections: Connections,
}

#[derive(Debug)]
struct Pipe {
    read: End,
    write: End,
    contents: Contents,
}

/// A socket, and what it has not read.
#[derive(Debug)]
struct Socket {
    own: End,
    /// Its other end, if that is in the program; 0: it is gone.
    peer: Option<u32>,
    kind: i32,
    state: u8,
    shutdown: u8,
    /// Nothing where others may send to it.
    unread: Vec<Vec<u8>>,
}

const SEND_SHUTDOWN: u8 = 2;

impl Socket {
    /// Whether nothing can come any more from its other end.
    fn is_ended(&self, all: &BTreeMap<u32, Socket>) -> bool {
        self.peer == Some(0)
            || self
                .peer
                .and_then(|peer| all.get(&peer))
                .is_some_and(|peer| peer.shutdown & SEND_SHUTDOWN != 0)
    }

    fn is_stream(&self) -> bool {
        self.kind == libc::SOCK_STREAM
    }

    /// Why what is now cannot become this, which was one of these.
    fn why_not(&self, all: &BTreeMap<u32, Socket>, now: &Socket) -> Option<&'static str> {
        let listens = |socket: &Socket| socket.state == tcp::state::LISTEN;
        if self.peer.is_some() && now.shutdown != self.shutdown {
            Some("it has been shut down since (shutdown(2))")
        } else if listens(self) != listens(now) {
            Some("it listens since then, or does not any more")
        } else if self.kind != libc::SOCK_DGRAM && self.state != now.state
            || self.peer.is_some_and(|peer| now.peer != Some(peer))
        {
            Some("it has been connected otherwise since, or its other end was closed")
        } else if self.is_ended(all) && now.unread != self.unread {
            Some("its other end is shut down, and cannot send again what was in it")
        } else {
            None
        }
    }
}

impl Between {
    /// Of processes that stand still, to be put back (`then`), or to be replaced.
    ///
    /// # Errors
    /// [`Error::Refused`] for what nobody could put back.
    pub fn read(views: &[View<'_>], then: bool) -> Result<Self> {
        let (mut refused, mut reasons) = (Vec::new(), Vec::new());
        let between = Between {
            common: common(views)?,
            pipes: pipes_of(views)?,
            sockets: sockets_of(views, &mut reasons)?,
            connections: Connections::read(views, then, &mut reasons)?,
        };
        refused.extend(refusals(views, reasons));
        match refused.is_empty() {
            true => Ok(between),
            false => Err(Error::Refused(refused)),
        }
    }

    /// What cannot be had again, given what leads each table back to what it was; that is told to leave alone what another one sees
    /// to. `views`: of now; `tables`: of then, in the same order.
    pub fn plan(
        &self,
        now: &Between,
        views: &[View<'_>],
        tables: &[&Table],
        plans: &mut [Plan],
    ) -> Vec<Refusal> {
        let place = |who: u64| views.iter().position(|view| view.who == who);
        let mut refused = Vec::new();
        let mut refuse = |at: usize, description: usize, why: &str| {
            let held = tables[at].held.iter().find(|(_, held)| held.description == description);
            let what = held.map_or_else(|| "a descriptor".into(), |(fd, held)| name(*fd, &held.link));
            let refusal = Refusal { what, why: why.into(), hint: String::new() };
            refused.extend(of(views[at].pid, vec![refusal]));
        };
        // Which of the common ones each description is, then and now; alone, it is its own.
        let which = |common: &[Vec<Part>], part: Part| common.iter().position(|all| all.contains(&part));
        for all in &self.common {
            let mut first: Option<(usize, Part)> = None;
            for &(who, description) in all {
                let Some(at) = place(who) else { continue };
                let Some(&kept) = plans[at].kept.get(&description) else {
                    refuse(at, description, "it has been closed since, and other processes have it too");
                    continue;
                };
                let part = (who, kept);
                match first {
                    None => first = Some((at, part)),
                    Some((_, other)) => {
                        let same = which(&now.common, part);
                        if same.is_none() || same != which(&now.common, other) {
                            refuse(at, description, "it is not what other processes have any more");
                        }
                        // The first one sees to it.
                        plans[at].leave(tables[at], description);
                    }
                }
            }
        }
        for all in &now.common {
            let mut then: HashSet<Option<usize>> = HashSet::new();
            let mut members = 0;
            for (at, view) in views.iter().enumerate() {
                let mine: Vec<usize> = plans[at]
                    .kept
                    .iter()
                    .filter(|(_, now)| all.contains(&(view.who, **now)))
                    .map(|(&t, _)| t)
                    .collect();
                for description in mine {
                    members += 1;
                    then.insert(which(&self.common, (view.who, description)));
                    if members > 1 && (then.len() > 1 || then.contains(&None)) {
                        refuse(at, description, "it is what another process has, which it was not");
                    }
                }
            }
        }
        let mut reasons = self.connections.plan(&now.connections);
        for (ino, socket) in &self.sockets {
            // One that was closed since is a reason by itself.
            let Some(now) = now.sockets.get(ino) else { continue };
            let why = match socket.why_not(&self.sockets, now) {
                None if now.unread != socket.unread && !socket.is_stream() && !may_be_filled(views, now) => {
                    Some("what was in it cannot pass the packet filter that is attached to it")
                }
                why => why,
            };
            reasons.extend(why.map(|why| (socket.own, u64::from(*ino), why.into(), "")));
        }
        refused.extend(refusals(views, reasons));
        refused
    }

    /// Puts what was in pipes and sockets there again, when all tables are what they were. `views`: processes, by what they are known.
    ///
    /// # Errors
    /// That something does not fit.
    pub fn put_back(&self, now: &Between, views: &[View<'_>]) -> Result<()> {
        let end = |(who, fd): End| -> Result<OwnedFd> {
            let view = views.iter().find(|view| view.who == who);
            let view = view.ok_or_else(|| Error::Failed("a process is missing".into()))?;
            Ok(duplicate_from(view.pidfd, fd)?)
        };
        for (which, pipe) in &self.pipes {
            if now.pipes.get(which).is_some_and(|now| now.contents == pipe.contents) {
                continue;
            }
            let (capacity, packets) = &pipe.contents;
            refill(end(pipe.read)?, end(pipe.write)?, *capacity, packets)?;
        }
        for (ino, socket) in &self.sockets {
            if now.sockets.get(ino).is_some_and(|now| now.unread == socket.unread) {
                continue;
            }
            let Some(peer) = socket.peer.and_then(|peer| self.sockets.get(&peer)) else { continue };
            replace(&end(socket.own)?, &end(peer.own)?, &socket.unread, socket.is_stream())?;
        }
        self.connections.put_back(&now.connections, end)
    }
}

/// Reasons as they are told.
fn refusals(views: &[View<'_>], reasons: Vec<Reason>) -> impl Iterator<Item = Refusal> {
    reasons.into_iter().flat_map(move |((who, fd), ino, why, hint)| {
        let refusal = Refusal { what: format!("descriptor {fd} (socket:[{ino}])"), why, hint: hint.into() };
        let pid = views.iter().find(|view| view.who == who).filter(|_| views.len() > 1).map(|view| view.pid);
        match pid {
            Some(pid) => of(pid, vec![refusal]).collect::<Vec<_>>(),
            None => vec![refusal],
        }
    })
}

/// Whether a mode is of this kind.
pub fn is(kind: FileType, mode: u32) -> bool {
    FileType::from_raw_mode(mode) == kind
}

/// Descriptions that several processes have.
fn common(views: &[View<'_>]) -> Result<Vec<Vec<Part>>> {
    // Only what has the same inode, and is called the same where all have one, can be the same.
    type Named<'a> = ((u64, u64), &'a [u8]);
    let mut named: BTreeMap<Named<'_>, Vec<(usize, u32, usize)>> = BTreeMap::new();
    for (place, view) in views.iter().enumerate() {
        let mut seen = HashSet::new();
        for (&fd, held) in view.table.held.iter().filter(|(_, held)| seen.insert(held.description)) {
            let link = if held.link.starts_with(b"anon_inode:") { held.link.as_slice() } else { b"" };
            named.entry((held.identity, link)).or_default().push((place, fd, held.description));
        }
    }
    let mut all = Vec::new();
    for found in named.into_values() {
        if found.iter().all(|(place, ..)| *place == found[0].0) {
            continue;
        }
        // In the kernel's order.
        let mut order: Vec<((u32, u32), Vec<Part>)> = Vec::new();
        for (place, fd, description) in found {
            let (view, part) = (&views[place], (views[place].who, description));
            let (mut low, mut high) = (0, order.len());
            let mut same = None;
            while low < high {
                let middle = usize::midpoint(low, high);
                match compare(order[middle].0, (view.pid, fd))? {
                    Ordering::Equal => {
                        same = Some(middle);
                        break;
                    }
                    Ordering::Less => low = middle + 1,
                    Ordering::Greater => high = middle,
                }
            }
            match same {
                Some(at) => order[at].1.push(part),
                None => order.insert(low, ((view.pid, fd), vec![part])),
            }
        }
        all.extend(order.into_iter().map(|(_, parts)| parts).filter(|parts| parts.len() > 1));
    }
    Ok(all)
}

/// Pipes, with names or without, of which both ends are here, but for those that lie within one table ([`Table::pipes`]).
fn pipes_of(views: &[View<'_>]) -> Result<BTreeMap<(u64, u64), Pipe>> {
    #[derive(Default)]
    struct Ends(Option<End>, Option<End>);
    let mut ends: BTreeMap<(u64, u64), Ends> = BTreeMap::new();
    let mut seen_to: HashSet<(u64, u64)> = HashSet::new();
    for view in views {
        for (&fd, held) in &view.table.held {
            let is_open = held.info.flags & libc::O_PATH as u32 == 0;
            if !is(FileType::Fifo, held.mode) || !is_open {
                continue;
            }
            if view.table.pipes.contains_key(&held.link) {
                seen_to.insert(held.identity);
            }
            let Ends(read, write) = ends.entry(held.identity).or_default();
            *read = read.or(held.reads().then_some((view.who, fd)));
            *write = write.or(held.writes().then_some((view.who, fd)));
        }
    }
    let mut all = BTreeMap::new();
    for (which, Ends(read, write)) in ends.into_iter().filter(|(which, _)| !seen_to.contains(which)) {
        let Some((read, write)) = read.zip(write) else { continue };
        let end = duplicate(views, read)?;
        all.insert(which, Pipe { read, write, contents: (pipes::capacity(&end)?, pipes::contents(&end)?) });
    }
    Ok(all)
}

/// A duplicate of what a process has under a number.
pub fn duplicate(views: &[View<'_>], (who, fd): End) -> Result<OwnedFd> {
    let view = views.iter().find(|view| view.who == who);
    let view = view.ok_or_else(|| Error::Failed("a process is missing".into()))?;
    Ok(duplicate_from(view.pidfd, fd)?)
}

/// Unix sockets of the network namespace that a process is in; none if it cannot be entered.
fn unix_sockets_around(pid: u32) -> Vec<UnixSocket> {
    let network = namespaces::open(&format!("/proc/{pid}"), NamespaceKind::Network);
    let network = network.map(|(network, _)| network);
    let told = network
        .and_then(|network| namespaces::inside(&[(NamespaceKind::Network, network.as_fd())], unix_sockets));
    told.unwrap_or_default()
}

/// Unix sockets, and what is in those of which both ends are here, or the other end is gone.
fn sockets_of(views: &[View<'_>], refuse: &mut Vec<Reason>) -> Result<BTreeMap<u32, Socket>> {
    const AGAIN: &str = "try again";
    let mut own: BTreeMap<u32, (End, u32)> = BTreeMap::new();
    for view in views {
        let unix = view.table.held.iter().filter(|(_, held)| {
            is(FileType::Socket, held.mode) && matches!(held.info.detail, Detail::Unix { .. })
        });
        for (&fd, held) in unix {
            let Detail::Unix { descriptors_in_queue } = held.info.detail else { continue };
            own.entry(held.identity.1 as u32).or_insert(((view.who, fd), descriptors_in_queue));
        }
    }
    if own.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut told: HashMap<u32, UnixSocket> = unix_sockets()?.into_iter().map(|s| (s.ino, s)).collect();
    if own.keys().any(|ino| !told.contains_key(ino)) {
        views
            .iter()
            .for_each(|view| told.extend(unix_sockets_around(view.pid).into_iter().map(|s| (s.ino, s))));
    }
    let waiting: HashSet<u32> = told.values().flat_map(|s| s.pending.iter().copied()).collect();
    let mut all = BTreeMap::new();
    for (&ino, &(end, in_flight)) in &own {
        let mut refuse = |why: &str, hint| refuse.push((end, u64::from(ino), why.to_owned(), hint));
        let Some(socket) = told.get(&ino) else {
            let why = "it is in another network namespace than stillpoint and its process, where nothing tells what it is connected with";
            refuse(why, "");
            continue;
        };
        if socket.pending.iter().any(|other| own.contains_key(other)) {
            refuse("a connection of the program with itself waits there to be accepted", AGAIN);
        }
        let (kind, is_stream) = (i32::from(socket.kind), i32::from(socket.kind) == libc::SOCK_STREAM);
        // A datagram socket may be connected with one that is not with it. Of one that was not yet accepted the other end has no number.
        let is_mutual = |peer: &u32| told.get(peer).is_some_and(|peer| peer.peer == Some(ino));
        let is_within = |peer: &u32| own.contains_key(peer) && is_mutual(peer);
        let peer = socket.peer.filter(|peer| is_within(peer) || *peer == 0 && !waiting.contains(&ino));
        let has_unread = socket.receive_queue > 0 || in_flight > 0;
        let mut unread = Vec::new();
        if peer.is_some_and(|peer| peer != 0 || kind != libc::SOCK_DGRAM) {
            let duplicate = duplicate(views, end)?;
            if is_stream && poll_now(&duplicate, libc::POLLPRI)? & libc::POLLPRI != 0 {
                refuse("it has unread out-of-band data (MSG_OOB)", AGAIN);
            }
            // An empty message shows in no length.
            if has_unread || !is_stream {
                unread = messages::peek_all(&duplicate, is_stream)?;
            }
        }
        let why = if peer.is_none_or(|peer| peer == 0) {
            None // nobody sends it again
        } else if in_flight > 0 || unread.iter().any(|m| !m.files.is_empty()) {
            Some("descriptors are on their way in it, which cannot be put back")
        } else if unread.iter().any(|m| m.credentials.is_some() || m.has_more) {
            Some("credentials go with what is in it, which cannot be put back")
        } else if !is_stream && unread.iter().any(|m| m.data.is_empty()) {
            Some("an empty message is in it, which may have been followed by others")
        } else {
            None
        };
        why.into_iter().for_each(|why| refuse(why, AGAIN));
        let unread = unread.into_iter().map(|message| message.data).collect();
        let (state, shutdown) = (socket.state, socket.shutdown);
        all.insert(ino, Socket { own: end, peer, kind, state, shutdown, unread });
    }
    Ok(all)
}

/// Whether a filter of a socket lets us put messages into it.
fn may_be_filled(views: &[View<'_>], socket: &Socket) -> bool {
    duplicate(views, socket.own).is_ok_and(|fd| sockets::may_be_without_filter(fd).unwrap_or(false))
}

/// Has a socket have these unread, and nothing else.
fn replace(socket: &OwnedFd, peer: &OwnedFd, unread: &[Vec<u8>], is_stream: bool) -> Result<()> {
    drain(socket, is_stream)?;
    match is_stream {
        true => send_again(peer, unread, is_stream),
        false => sockets::without_filter(socket, || send_again(peer, unread, is_stream))?,
    }
}

/// Throws away what a socket has not read.
fn drain(socket: &OwnedFd, is_stream: bool) -> Result<()> {
    let mut buf = vec![0u8; 64 << 10];
    loop {
        match rustix::net::recv(socket, &mut *buf, RecvFlags::DONTWAIT) {
            // Or an empty message.
            Ok((0, _)) if is_stream || poll_now(socket, libc::POLLRDHUP)? & libc::POLLRDHUP != 0 => {
                return Ok(());
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(e) => return Err(Error::Failed(format!("empty a socket: {e}"))),
        }
    }
}

/// Sends once more what was sent, from the end that had sent it. A full socket may have taken more than it takes in other pieces.
fn send_again(peer: &OwnedFd, messages: &[Vec<u8>], is_stream: bool) -> Result<()> {
    /// What a message takes beside its bytes, and as much again as those at most.
    const HEAD: usize = 4096;
    let bytes = messages.iter().map(|message| 2 * message.len() + HEAD).sum();
    sockets::with_room(peer, bytes, || {
        messages.iter().try_for_each(|message| resend(peer, message, is_stream))
    })?
}

fn resend(peer: &OwnedFd, message: &[u8], is_stream: bool) -> Result<()> {
    let mut rest = message;
    loop {
        let sent = messages::send(peer, rest, &[], None, &[]);
        let sent = sent.map_err(|e| Error::Failed(format!("fill a socket: {e}")))?;
        rest = rest.get(sent..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        if !is_stream {
            return Err(Error::Failed("fill a socket: a message was cut".into()));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn a_filter_takes_nothing_of_what_is_put_back() {
        /// `BPF_RET` with no bytes: nothing passes. (`struct sock_filter`)
        const NOTHING: [u8; 8] = [6, 0, 0, 0, 0, 0, 0, 0];
        let (from, to) = UnixDatagram::pair().unwrap();
        from.send(b"later").unwrap();
        sockets::attach_filter(&to, &NOTHING).unwrap();
        assert!(sockets::may_be_without_filter(&to).unwrap());
        let (from, to) = (OwnedFd::from(from), OwnedFd::from(to));
        replace(&to, &from, &[b"one".to_vec(), b"three".to_vec()], false).unwrap();
        let unread = messages::peek_all(&to, false).unwrap();
        let unread: Vec<&[u8]> = unread.iter().map(|message| &*message.data).collect();
        assert_eq!(unread, [&b"one"[..], b"three"]);
        assert!(sockets::has_filter(&to).unwrap());
        let locked = 1i32.to_ne_bytes();
        sockets::set_option(&to, libc::SOL_SOCKET as u32, libc::SO_LOCK_FILTER as u32, &locked).unwrap();
        assert!(!sockets::may_be_without_filter(&to).unwrap());
    }
}
