//! Unread messages of unix sockets with what goes with them, put back when the processes whose ids they tell are there.

use super::{OpenFiles, missing, options, sockets as files};
use crate::{Error, Result};
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use stillpoint_image::{Image, Message, Socket};
use stillpoint_linux::messages::{self, Credentials, PASS_PIDFD};
use stillpoint_linux::{Error as Kernel, sockets};

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;

/// A socket whose messages come later.
#[derive(Debug)]
pub(super) struct Laden {
    /// Row of the socket.
    row: usize,
    own: OwnedFd,
    /// The other end, if it was connected.
    via: Option<OwnedFd>,
    /// Sockets of the program that have sent something, by their names.
    senders: HashMap<Vec<u8>, OwnedFd>,
}

/// Whether what is left to do to a socket is done when its messages are there, or those of its other end.
pub(super) fn is_laden(image: &Image, socket: &Socket) -> bool {
    let other = socket.peer.and_then(|row| image.sockets.get(row as usize));
    !socket.messages.is_empty() || other.is_some_and(|other| !other.messages.is_empty())
}

/// What is needed to put the messages of a socket back. `via` is its other end.
pub(super) fn later(
    image: &Image,
    row: usize,
    made: &HashMap<usize, OwnedFd>,
    via: Option<&OwnedFd>,
) -> Result<Laden> {
    let copy = |fd: &OwnedFd| fd.try_clone().map_err(|e| Kernel::call("duplicate a socket", e));
    let own = copy(made.get(&row).ok_or_else(|| missing("socket", row as u32))?)?;
    let mut senders = HashMap::new();
    for message in image.sockets[row].messages.iter().filter(|m| !m.sender.0.is_empty()) {
        let of_name =
            |(_, s): &(usize, &Socket)| s.local == message.sender && s.kind == image.sockets[row].kind;
        let found = image.sockets.iter().enumerate().find(of_name).and_then(|(index, _)| made.get(&index));
        if let Some(found) = found {
            senders.insert(message.sender.0.clone(), copy(found)?);
        }
    }
    Ok(Laden { row, own, via: via.map(copy).transpose()?, senders })
}

impl OpenFiles {
    /// Puts messages with descriptors, credentials or names of senders back into the queues of their sockets. Once all
    /// processes are there, and before [`OpenFiles::install`].
    pub fn deliver(&mut self, image: &Image) -> Result<()> {
        for laden in std::mem::take(&mut self.laden) {
            let socket = &image.sockets[laden.row];
            let what = files::name(image, socket);
            // Else the kernel would add our own.
            for fd in [Some(&laden.own), laden.via.as_ref()].into_iter().flatten() {
                for name in [libc::SO_PASSCRED as u32, PASS_PIDFD] {
                    if sockets::int_option(fd, SOL_SOCKET, name)?.is_some_and(|is_set| is_set != 0) {
                        sockets::set_option(fd, SOL_SOCKET, name, &0i32.to_ne_bytes())?;
                    }
                }
            }
            self.fill(image, socket, &laden, &what)?;
            options::apply(&laden.own, socket, &what)?;
            if laden.via.is_some() {
                files::shut_down(&laden.own, socket)?;
            }
            let peer = socket.peer.and_then(|row| image.sockets.get(row as usize));
            if let (Some(peer), Some(via)) = (peer, &laden.via) {
                // Its filter is for what comes when its own messages are there.
                let now = |level, name| peer.messages.is_empty() || !options::filters(level, name);
                options::apply_some(via, peer, &files::name(image, peer), now)?;
                if peer.messages.is_empty() {
                    files::shut_down(via, peer)?;
                }
            }
        }
        for (row, fd) in std::mem::take(&mut self.to_shut_down) {
            files::shut_down(fd, &image.sockets[row])?;
        }
        Ok(())
    }

    fn fill(&self, image: &Image, socket: &Socket, laden: &Laden, what: &str) -> Result<()> {
        let bytes = socket.messages.iter().map(|m| m.data.0.len()).sum();
        for message in &socket.messages {
            let mut files = Vec::with_capacity(message.files.len());
            for &row in &message.files {
                let source = self.sources.get(row as usize).and_then(Option::as_ref);
                files.push(source.ok_or_else(|| missing("open file", row))?.as_raw_fd());
            }
            match &laden.via {
                Some(via) => {
                    options::make_room(via, bytes, socket.messages.len())?;
                    send(via, message, &files, &[], what)?;
                }
                None => {
                    let (address, _directory) = self.way_to(image, laden.row as u32)?;
                    let sender = laden.senders.get(&message.sender.0);
                    match sender {
                        Some(sender) => send(sender, message, &files, &address, what)?,
                        None => send(&stand_in(message, what)?, message, &files, &address, what)?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// A socket to send a message by whose sender is no more: with its name, if it had one.
fn stand_in(message: &Message, what: &str) -> Result<OwnedFd> {
    let socket = sockets::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0)?;
    if !message.sender.0.is_empty() {
        let refused = |e| Error::Refused(vec![format!("{what}: the name of who sent a message to it: {e}")]);
        sockets::bind(&socket, &message.sender.0).map_err(refused)?;
        if message.sender.0.get(2) == Some(&b'/') {
            let path = &message.sender.0[2..];
            let end = path.iter().position(|b| *b == 0).unwrap_or(path.len());
            rustix::fs::unlink(&path[..end]).map_err(|e| Kernel::call("remove the name of a sender", e))?;
        }
    }
    Ok(socket)
}

fn send(by: impl AsFd, message: &Message, files: &[i32], to: &[u8], what: &str) -> Result<()> {
    let credentials = message.credentials.map(|c| Credentials { pid: c.pid, uid: c.uid, gid: c.gid });
    let (mut rest, mut files) = (message.data.0.as_slice(), files);
    loop {
        let sent = messages::send(&by, rest, files, credentials, to);
        let n = sent.map_err(|e| Kernel::call(format!("fill the queue of {what}"), e))?;
        (rest, files) = (&rest[n..], &[]);
        if rest.is_empty() {
            return Ok(());
        }
    }
}
