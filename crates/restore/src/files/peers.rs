//! What unix sockets tell of who is at their other end (`SO_PEERCRED`, `SO_PEERGROUPS`): they are made by a thread of ours that seems to be
//! that user. The process id they tell is ours.

use super::Opening;
use super::sockets::{DATAGRAM, bind_name, name, refusal};
use crate::{Error, Result};
use rustix::net::listen;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use stillpoint_image::{Identity, Image, Sender, Socket};
use stillpoint_linux::messages::{self, Credentials};
use stillpoint_linux::seeming::{self, seeming_to_be};
use stillpoint_linux::{Error as Kernel, sockets};

/// Whom the kernel tells of where somebody has no number in our user namespace (`/proc/sys/kernel/overflowuid`, unless it was changed).
const OVERFLOW: u32 = 65_534;

/// Adds why we cannot seem to be those whom the program's sockets tell of, or who sent what is unread in them.
pub(super) fn check(image: &Image, refusals: &mut Vec<String>) {
    let mut tried = HashSet::new();
    for socket in image.sockets.iter().filter(|socket| !may_forget(socket)) {
        for who in socket.told.iter().chain(&socket.waits_as).filter(|who| tried.insert((*who).clone())) {
            if let Err(e) = seeming_to_be(&of_image(who), || ())
                && !are_we_as_good(who)
            {
                refusals.push(why_not(&name(image, socket), who, &e));
            }
        }
    }
    let mut sent = HashSet::new();
    for (socket, message) in image.sockets.iter().flat_map(|s| s.messages.iter().map(move |m| (s, m))) {
        let Some(sender) = message.credentials.filter(|sender| sent.insert(*sender)) else { continue };
        if let Err(e) = sign(sender) {
            let Sender { pid, uid, gid } = sender;
            let what = name(image, socket);
            let needs = "sending it again needs CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID";
            refusals.push(format!(
                "{what}: it has an unread message with the credentials of process {pid}, user {uid}, group {gid}, and {needs}: {e}"
            ));
        }
    }
}

/// Tries to send a message with the credentials of somebody, over a pair of ours. The process need not be there yet: whether we may is looked
/// at before.
fn sign(sender: Sender) -> Result<()> {
    let (one, _other) = sockets::pair(libc::SOCK_DGRAM)?;
    let credentials = Credentials { pid: sender.pid, uid: sender.uid, gid: sender.gid };
    match messages::send(one, b"x", &[], Some(credentials), &[]) {
        Err(e) if e.raw_os_error() != Some(libc::ESRCH) => Err(Kernel::call("sendmsg", e).into()),
        _ => Ok(()),
    }
}

/// A connection that is over anyway, and in which nothing is unread: who was at its other end matters to nobody who asks for what it says.
fn may_forget(socket: &Socket) -> bool {
    let is_over = socket.orphan && socket.queue.is_empty() && socket.messages.is_empty();
    socket.outside || is_over
}

fn why_not(what: &str, who: &Identity, e: &Kernel) -> String {
    let why = match e.errno() {
        Some(libc::EPERM) => "being them for a moment needs CAP_SETUID and CAP_SETGID".to_owned(),
        Some(libc::EINVAL) => "there is no such user or group in this user namespace".to_owned(),
        _ => e.to_string(),
    };
    format!("{what}: it tells of user {}, group {} (SO_PEERCRED), and {why}", who.uid, who.gid)
}

fn of_image(who: &Identity) -> seeming::Identity {
    seeming::Identity { uid: who.uid, gid: who.gid, groups: who.groups.clone() }
}

/// Whether sockets may tell of us instead of somebody whom we cannot be: only further groups differ, or they told of nobody that has a number.
fn are_we_as_good(who: &Identity) -> bool {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    (who.uid, who.gid) == (uid, gid) || who.uid == OVERFLOW
}

/// Tells of sockets that are made, and will tell of us instead of whom they told of.
pub(super) fn note(opening: &mut Opening<'_>, kept: &HashSet<usize>) {
    let image = opening.image;
    for (_, socket) in image.sockets.iter().enumerate().filter(|(row, _)| !kept.contains(row)) {
        for who in socket.told.iter().chain(&socket.waits_as).filter(|who| are_we_as_good(who)) {
            if let Err(e) = seeming_to_be(&of_image(who), || ()) {
                let why = why_not(&name(image, socket), who, &e);
                opening.files.notes.push(format!("{why}: it tells of us, or of our further groups, instead"));
            }
        }
    }
}

/// Does what makes the other end of a unix socket as who did it; where nobody is told of, or we are as good, as we.
fn made_by<T: Send>(what: &str, who: Option<&Identity>, work: impl FnOnce() -> T + Send) -> Result<T> {
    let Some(who) = who else { return Ok(work()) };
    if are_we_as_good(who) && seeming_to_be(&of_image(who), || ()).is_err() {
        return Ok(work());
    }
    seeming_to_be(&of_image(who), work).map_err(|e| Error::Refused(vec![why_not(what, who, &e)]))
}

/// Whom a socket tells of. Where that does not matter and we cannot be them, it tells of us, and so does a note.
pub(super) fn told<'a>(opening: &mut Opening<'a>, socket: &'a Socket) -> Option<&'a Identity> {
    let who = socket.told.as_ref()?;
    if let Some(e) = seeming_to_be(&of_image(who), || ()).err().filter(|_| may_forget(socket)) {
        if are_we_as_good(who) {
            return None; // told already
        }
        opening.files.notes.push(why_not(&name(opening.image, socket), who, &e));
        return None;
    }
    Some(who)
}

/// Before version 9 of the format, when sockets had no status, nobody had looked.
fn tells_of_nobody(socket: &Socket) -> bool {
    socket.told.is_none() && socket.status.is_some()
}

/// A pair of sockets, as whoever made that of the program's; or two with names that were connected to each other, which tell of nobody.
pub(super) fn pair(opening: &mut Opening<'_>, row: usize) -> Result<(OwnedFd, OwnedFd)> {
    let image = opening.image;
    let socket = &image.sockets[row];
    if let Some((peer, other)) = socket.peer.and_then(|peer| Some((peer, image.sockets.get(peer as usize)?)))
        && [socket, other].iter().all(|s| s.kind == DATAGRAM && tells_of_nobody(s) && !s.local.0.is_empty())
    {
        let mut make = |socket: &Socket| {
            let fd = sockets::socket(socket.family as i32, socket.kind as i32, 0)?;
            bind_name(opening, socket, &fd)?;
            Ok::<_, Error>(fd)
        };
        let (own, its) = (make(socket)?, make(other)?);
        for (fd, to) in [(&own, peer), (&its, row as u32)] {
            let (address, _directory) = opening.files.way_to(image, to)?;
            sockets::connect(fd, &address).map_err(|e| refusal(&name(image, socket), &e))?;
        }
        return Ok((own, its));
    }
    let who = told(opening, socket);
    Ok(made_by(&name(image, socket), who, || sockets::pair(socket.kind as i32))??)
}

/// Has a socket listen as whoever made it do so, of whom those are told who connect to it.
pub(super) fn listen_as(fd: &OwnedFd, who: Option<&Identity>, backlog: u32, what: &str) -> Result<()> {
    let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
    let listened = made_by(what, who, || listen(fd, backlog))?;
    listened.map_err(|e| refusal(what, &e.into()))
}

/// A new unix socket that belongs to whoever is to connect it: of a connection that waits, that is how the next checkpoint knows who it is.
pub(super) fn socket_of(who: Option<&Identity>, kind: u32, what: &str) -> Result<OwnedFd> {
    Ok(made_by(what, who, || sockets::socket(libc::AF_UNIX, kind as i32, 0))??)
}

/// Connects to a socket that listens, as whoever did it.
pub(super) fn connect_as(fd: &OwnedFd, who: Option<&Identity>, address: &[u8], what: &str) -> Result<()> {
    let connected = made_by(what, who, || sockets::connect(fd, address))?;
    Ok(connected.map_err(|e| Kernel::call(format!("connect to {what}"), e))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_are_as_good_as_who_has_no_number_and_as_ourselves_with_other_groups() {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let groups = vec![4_000_000_001];
        assert!(are_we_as_good(&Identity { uid, gid, groups: groups.clone() }));
        assert!(are_we_as_good(&Identity { uid: OVERFLOW, gid: OVERFLOW, groups: groups.clone() }));
        assert!(!are_we_as_good(&Identity { uid: uid + 1, gid, groups }));
        assert!(!are_we_as_good(&Identity { uid, gid: gid + 1, groups: Vec::new() }));
    }

    #[test]
    fn of_a_socket_without_status_nobody_has_looked_of_whom_it_tells() {
        assert!(!tells_of_nobody(&Socket::default()));
        assert!(tells_of_nobody(&Socket { status: Some(Default::default()), ..Socket::default() }));
    }
}
