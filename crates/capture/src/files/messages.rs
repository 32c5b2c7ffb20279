//! Unread messages of unix sockets with what goes with them: descriptors, credentials, the name of who sent them.
//!
//! A peek at a message gives duplicates of the descriptors in it: each is an open file description like any other, only
//! that no table has it.

use super::Scan;
use super::descriptions::Description;
use crate::Result;
use rustix::fs::FileType;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use stillpoint_image::{Bytes, FileKind, LockKind, Message, OpenFile, Sender, Socket};
use stillpoint_linux::descriptors::compare;
use stillpoint_linux::fdinfo::{self, Detail};
use stillpoint_linux::messages::{self, Credentials, PASS_PIDFD};
use stillpoint_linux::sockets::UnixSocket;
use stillpoint_linux::{Error, sockets};

const WAIT: &str = "try again when the program has read it";
const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;

/// A message that was peeked at.
#[derive(Debug)]
pub struct Peeked {
    message: messages::Message,
    /// Its descriptors, as indices into all descriptions.
    files: Vec<usize>,
}

/// Unread messages with descriptors in them.
#[derive(Debug, Default)]
pub struct InFlight {
    /// By the inode number of their socket.
    pub queues: HashMap<u64, Vec<Peeked>>,
    /// There are others, in connections that wait to be accepted, which cannot be seen.
    pub unaccepted: bool,
}

/// Adds the descriptions that are only in messages, and in messages of sockets that are in messages, to all others.
pub fn in_flight(all: &mut Vec<Description>) -> Result<InFlight> {
    let InFlight { mut queues, mut unaccepted } = InFlight::default();
    let mut next = 0;
    while next < all.len() {
        let d = &all[next];
        next += 1;
        let laden =
            matches!(d.info.detail, Detail::Unix { descriptors_in_queue } if descriptors_in_queue > 0);
        if !laden || queues.contains_key(&d.stat.st_ino) {
            continue;
        }
        if sockets::int_option(&d.file, SOL_SOCKET, libc::SO_ACCEPTCONN as u32)? == Some(1) {
            unaccepted = true;
            continue;
        }
        let ino = d.stat.st_ino;
        let kind = sockets::int_option(&d.file, SOL_SOCKET, libc::SO_TYPE as u32)?;
        let mut peeked = Vec::new();
        for mut message in messages::peek_all(&d.file, kind == Some(libc::SOCK_STREAM))? {
            let mut files = Vec::new();
            for file in std::mem::take(&mut message.files) {
                files.push(index_of(all, file)?);
            }
            peeked.push(Peeked { message, files });
        }
        queues.insert(ino, peeked);
    }
    Ok(InFlight { queues, unaccepted })
}

/// Index of the description that a duplicate of ours is of.
fn index_of(all: &mut Vec<Description>, file: OwnedFd) -> Result<usize> {
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call("fstat a descriptor in a message", e))?;
    let (us, number) = (std::process::id(), file.as_raw_fd() as u32);
    let candidates = all.iter().enumerate().filter(|(_, d)| d.inode() == (stat.st_dev, stat.st_ino));
    for (index, d) in candidates {
        if compare((us, d.file.as_raw_fd() as u32), (us, number))?.is_eq() {
            return Ok(index);
        }
    }
    let (link, mut info) = (fdinfo::link(us, number)?, fdinfo::read(us, number)?);
    // Those that go with the description are shown by our duplicate, too; none is of a process.
    let locks = std::mem::take(&mut info.locks).into_iter().map(|line| (0, line)).collect();
    all.push(Description { held: Vec::new(), file, stat, link, info, locks });
    Ok(all.len() - 1)
}

/// Whether a description that no table has can be made without one. A lease is taken, and an owner of signals set, by a process that has it.
pub fn can_be_in_flight(file: &OpenFile) -> bool {
    let takes_process = file.owner.is_some() || file.locks.iter().any(|lock| lock.kind == LockKind::Lease);
    !takes_process
        && matches!(
            file.kind,
            FileKind::Path(_)
                | FileKind::Pipe(_)
                | FileKind::Socket(_)
                | FileKind::Memory(_)
                | FileKind::Event { .. }
                | FileKind::Queue(_)
        )
}

/// Unread messages of a socket, with what goes with them; `None` if they were refused. `peer` is the other end.
pub(crate) fn capture(
    scan: &mut Scan<'_>,
    d: &Description,
    socket: &Socket,
    peer: Option<(&Description, &UnixSocket)>,
) -> Result<Option<Vec<Message>>> {
    let stream = socket.kind == libc::SOCK_STREAM as u32;
    let known = scan.in_flight.queues.remove(&d.stat.st_ino);
    let is_known = known.is_some();
    let peeked = match known {
        Some(peeked) => peeked,
        None => {
            let all = messages::peek_all(&d.file, stream)?;
            all.into_iter().map(|message| Peeked { message, files: Vec::new() }).collect()
        }
    };
    let passes = |name: u32| socket.options.iter().any(|o| o.level == SOL_SOCKET && o.name == name);
    let strange = peeked.iter().any(|p| p.message.has_more || !p.message.files.is_empty());
    if strange {
        return scan.refuse(d, "it has unread messages with more than descriptors and process ids", WAIT);
    }
    if !peeked.is_empty() && passes(PASS_PIDFD) && !passes(libc::SO_PASSCRED as u32) {
        let why = "it has unread messages with handles to who sent them (SO_PASSPIDFD), and does not ask for their users \
                   (SO_PASSCRED)";
        return scan.refuse(d, why, WAIT);
    }
    let files: usize = peeked.iter().map(|p| p.files.len()).sum();
    let expected = match d.info.detail {
        Detail::Unix { descriptors_in_queue } => descriptors_in_queue as usize,
        _ => 0,
    };
    if stream && is_known && !is_as_sent(socket, &peeked, peer)? {
        let why = "it has unread bytes beside a message that carries descriptors, which cannot be told apart";
        return scan.refuse(d, why, WAIT);
    }
    if files != expected || !stream && peer.is_some() && !is_as_sent(socket, &peeked, peer)? {
        let why = "it has unread messages that cannot be copied, such as an empty one behind others, which shows only \
                   once: an earlier checkpoint may have seen it";
        return scan.refuse(d, why, WAIT);
    }
    let mut out = Vec::with_capacity(peeked.len());
    for Peeked { message, files } in peeked {
        let Some(sender) = sender(scan, d, &message.sender, peer)? else { return Ok(None) };
        let Some(credentials) = credentials(scan, d, message.credentials)? else { return Ok(None) };
        let files = files.into_iter().map(|index| scan.row(index)).collect();
        out.push(Message { data: Bytes(message.data), files, credentials, sender: Bytes(sender) });
    }
    Ok(Some(out))
}

/// Whether these are the messages that were sent, all of them and one by one.
fn is_as_sent(socket: &Socket, peeked: &[Peeked], peer: Option<(&Description, &UnixSocket)>) -> Result<bool> {
    let Some((peer, _)) = peer else { return Ok(false) };
    let of_data = |p: &Peeked| messages::Message { data: p.message.data.clone(), ..Default::default() };
    let copies: Vec<_> = peeked.iter().map(of_data).collect();
    Ok(messages::weight(socket.kind as i32, &copies)? == Some(messages::outgoing(&peer.file)?))
}

/// The name of the sender, if a restore can send by it: that of a socket of the program, or one that nobody has.
fn sender(
    scan: &mut Scan<'_>,
    d: &Description,
    raw: &[u8],
    peer: Option<(&Description, &UnixSocket)>,
) -> Result<Option<Vec<u8>>> {
    let name = path_of(raw);
    if name.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let is_peer = peer.is_some_and(|(_, peer)| trimmed(&peer.name) == name);
    if is_peer || scan.has_unix_name(name)? {
        return Ok(Some(raw.to_vec()));
    }
    let free = match name.first() {
        Some(0) => !scan.is_unix_name_taken(name)?,
        _ => name.starts_with(b"/") && rustix::fs::lstat(name).is_err(),
    };
    if free && peer.is_none() {
        return Ok(Some(raw.to_vec()));
    }
    let why = format!("it has an unread datagram from {}, which is not the program's", name.escape_ascii());
    scan.refuse(d, why, WAIT)
}

/// `sun_path` of a raw address, without the zeros behind a path.
pub(crate) fn path_of(raw: &[u8]) -> &[u8] {
    trimmed(raw.get(2..).unwrap_or_default())
}

/// A name without the zeros behind a path; those of an abstract name are part of it.
pub(crate) fn trimmed(name: &[u8]) -> &[u8] {
    match name.first() {
        Some(0) | None => name,
        _ => &name[..name.iter().position(|b| *b == 0).unwrap_or(name.len())],
    }
}

/// Who sent a message, with the process id as the program sees it; `None` if that is not of the program.
fn credentials(
    scan: &mut Scan<'_>,
    d: &Description,
    who: Option<Credentials>,
) -> Result<Option<Option<Sender>>> {
    let Some(who) = who.filter(|who| who.pid != 0) else { return Ok(Some(None)) };
    match scan.inner_pid(who.pid) {
        Some(pid) => Ok(Some(Some(Sender { pid, uid: who.uid, gid: who.gid }))),
        None => {
            let why = format!("it has an unread message with the credentials of process {}", who.pid);
            scan.refuse(d, why, WAIT)
        }
    }
}

/// Whether a description is a socket.
pub(crate) fn is_socket(d: &Description) -> bool {
    FileType::from_raw_mode(d.stat.st_mode) == FileType::Socket
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_without_their_ends() {
        assert_eq!(path_of(b"\x01\x00/run/x\0\0"), b"/run/x");
        assert_eq!(path_of(b"\x01\x00\0abstract\0"), b"\0abstract\0");
        assert_eq!(path_of(b"\x01\x00"), b"");
        assert_eq!(path_of(b""), b"");
    }
}
