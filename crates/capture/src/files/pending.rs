//! Connections that wait to be accepted by a listening unix socket. The accepting end has no descriptor yet: all that
//! can be seen is who waits, in which order, and how much they have sent.

use super::Scan;
use super::descriptions::Description;
use super::messages::is_socket;
use crate::Result;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use stillpoint_image::Identity;
use stillpoint_linux::messages::outgoing;
use stillpoint_linux::sockets::UnixSocket;

/// `TCP_LISTEN`.
const LISTENS: u8 = 10;

/// What to do while one waits.
pub(super) const ACCEPT: &str = "try again when the program has accepted it";

/// Why the connections that wait at a listening socket cannot be made again, if they cannot; and what to do.
pub(crate) fn problem(scan: &mut Scan<'_>, diag: &UnixSocket) -> Result<Option<(String, &'static str)>> {
    if diag.pending.len() != diag.receive_queue as usize {
        let why = format!("{} connections wait to be accepted", diag.receive_queue);
        return Ok(Some((why, "try again when the program has accepted them")));
    }
    for &ino in &diag.pending {
        let Some(client) = scan.socket(ino) else {
            let link = format!("socket:[{ino}]");
            let why = match scan.target.outsiders.holder(link.as_bytes()) {
                Some(holder) => format!("a connection from {holder} waits to be accepted"),
                None => "a connection from another process waits to be accepted".to_owned(),
            };
            return Ok(Some((why, ACCEPT)));
        };
        if outgoing(&client.file)? > 0 {
            let why =
                "a connection waits to be accepted on which something was sent already, which cannot be seen";
            return Ok(Some((why.into(), ACCEPT)));
        }
    }
    Ok(None)
}

/// Whether a socket waits to be accepted by one of the target.
pub(crate) fn is_waiting(scan: &mut Scan<'_>, ino: u32) -> Result<bool> {
    for d in scan.all.iter().filter(|d| is_socket(d)) {
        let found = scan.unix_socket(d.stat.st_ino as u32)?;
        if found.is_some_and(|s| s.state == LISTENS && s.pending.contains(&ino)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Fills in who waits at which listening socket, when all rows are there.
pub(crate) fn resolve(scan: &mut Scan<'_>) -> Result<()> {
    let mut known = HashMap::new();
    let rows: Vec<(u64, u32)> = scan.sockets.iter().map(|(&ino, &row)| (ino, row)).collect();
    for (ino, row) in rows {
        if scan.builder.image.sockets[row as usize].listening.is_none() {
            continue;
        }
        let pending = scan.unix_socket(ino as u32)?.map(|s| s.pending).unwrap_or_default();
        let mut clients = Vec::with_capacity(pending.len());
        for ino in pending {
            let Some(&client) = scan.sockets.get(&u64::from(ino)) else { continue };
            clients.push(client);
            if let Some(d) = scan.socket(ino) {
                scan.builder.image.sockets[client as usize].waits_as = maker(scan, d, &mut known)?;
            }
        }
        scan.builder.image.sockets[row as usize].pending = clients;
    }
    Ok(())
}

/// Who has made a connection that waits, of whom the other side is told that nobody can ask yet; `None` if refused. It is whose the socket is, and
/// whose the processes are that have it, if these are the same. `known`: who processes are, by their ids, as far as that was read.
fn maker(
    scan: &mut Scan<'_>,
    d: &Description,
    known: &mut HashMap<u32, Identity>,
) -> Result<Option<Identity>> {
    let mut who: Vec<Identity> = Vec::new();
    // One in a message can have been connected by any.
    let has_it = |pid: u32| d.held.is_empty() || d.held.iter().any(|held| held.pid == pid);
    for holder in scan.target.holders.iter().filter(|holder| has_it(holder.pid)) {
        let one = match known.entry(holder.pid) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let status = holder.process.status()?;
                let mut groups = status.groups;
                groups.sort_unstable();
                unknown.insert(Identity { uid: status.uid[1], gid: status.gid[1], groups })
            }
        };
        if !who.contains(one) {
            who.push(one.clone());
        }
    }
    match who.as_slice() {
        [one] if (one.uid, one.gid) == (d.stat.st_uid, d.stat.st_gid) => Ok(who.pop()),
        _ => {
            let why = "it waits to be accepted, and which user the other side is to be told of cannot be seen: whose it is \
                       has changed since it was made";
            scan.refuse(d, why, "try again when it was accepted")
        }
    }
}

impl<'a> Scan<'a> {
    /// The description of the target's socket with this inode number.
    pub(crate) fn socket(&self, ino: u32) -> Option<&'a Description> {
        self.all.iter().find(|d| is_socket(d) && d.stat.st_ino == u64::from(ino))
    }
}
