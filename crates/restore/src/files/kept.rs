//! Sockets that a process of ours has kept since the program was killed at its checkpoint (`capture::keeper`).

use crate::{Result, TcpPolicy};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use stillpoint_image::{Image, Socket};
use stillpoint_linux::{Error as Kernel, passing, sockets};

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const REUSE: u32 = libc::SO_REUSEADDR as u32;
/// So long the keeper may take to answer, seconds: somebody else may be asking just then.
const PATIENCE: i64 = 5;
/// Words that the keeper knows: its sockets are to be handed over, or closed.
const TAKE: &[u8] = b"t";
const CLOSE: &[u8] = b"c";

/// The line to the keeper. Until it is told that the program is complete, it keeps everything.
#[derive(Debug)]
pub struct Kept {
    line: OwnedFd,
    /// Sockets that let others have their port meanwhile, and whether they did before.
    lenient: Vec<(OwnedFd, Vec<u8>)>,
}

impl Kept {
    /// Asks for what was kept: rows of sockets. Nothing if nobody keeps it any more.
    pub(super) fn take(image: &Image, policy: TcpPolicy) -> Result<Option<(Kept, HashMap<usize, OwnedFd>)>> {
        let Some(line) = image.kept.as_ref().and_then(|name| call(&name.0, TAKE)) else { return Ok(None) };
        let rows: HashMap<u32, usize> =
            image.sockets.iter().enumerate().filter_map(|(row, s)| Some((s.kept?, row))).collect();
        let Some(files) = receive(&line, rows.len())? else { return Ok(None) };
        let mut kept = Kept { line, lenient: Vec::new() };
        let mut made = HashMap::new();
        for (place, file) in (0..).zip(files) {
            let Some(&row) = rows.get(&place) else { continue };
            if !is(&file, &image.sockets[row])? {
                return Ok(None);
            }
            kept.lend_port(&file)?;
            made.insert(row, file);
        }
        if policy == TcpPolicy::Close {
            kept.lenient.clear();
            made.clear();
            kept.release();
        }
        Ok(Some((kept, made)))
    }

    /// A listening socket of the program can be bound to the same port beside it.
    fn lend_port(&mut self, file: &OwnedFd) -> Result<()> {
        if let Some(before) = sockets::option(file, SOL_SOCKET, REUSE)? {
            let own = file.try_clone().map_err(|e| Kernel::call("duplicate a socket", e))?;
            sockets::set_option(&own, SOL_SOCKET, REUSE, &1i32.to_ne_bytes())?;
            self.lenient.push((own, before));
        }
        Ok(())
    }

    /// All of the program's sockets are bound.
    pub(super) fn all_bound(&mut self) {
        for (socket, before) in self.lenient.drain(..) {
            // It was possible to set it a moment ago.
            let _ = sockets::set_option(&socket, SOL_SOCKET, REUSE, &before);
        }
    }

    /// The program has them; nobody else needs to.
    pub(super) fn release(&self) {
        let _ = sockets::send(&self.line, b"d");
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all_bound();
    }
}

/// Whether anybody keeps sockets for a restore.
pub fn is_anything_kept() -> bool {
    std::fs::read_to_string("/proc/net/unix").is_ok_and(|names| names.contains("@stillpoint-kept-"))
}

/// Nobody will restore this checkpoint: what was kept for that is let go of, and other ends of connections hear of it.
pub fn let_go(image: &Image) {
    drop(image.kept.as_ref().and_then(|name| call(&name.0, CLOSE)));
}

/// A line to the keeper of this name, if it lives, to whom one word has been said.
fn call(name: &[u8], word: &[u8]) -> Option<OwnedFd> {
    let line = sockets::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).ok()?;
    let address = [&(libc::AF_UNIX as u16).to_ne_bytes(), &[0][..], name].concat();
    sockets::connect(&line, &address).ok()?;
    // Anybody may take a name whose owner is gone.
    let user = sockets::peer_user(&line).ok()?;
    let own = rustix::process::geteuid().as_raw();
    // struct timeval
    let patience: Vec<u8> = [PATIENCE, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
    sockets::set_option(&line, SOL_SOCKET, libc::SO_RCVTIMEO as u32, &patience).ok()?;
    if user != 0 && user != own {
        return None;
    }
    sockets::send(&line, word).ok()?;
    Some(line)
}

/// All that was kept; `None` if the keeper leaves half-way, or has another number of sockets.
fn receive(line: &OwnedFd, count: usize) -> Result<Option<Vec<OwnedFd>>> {
    let mut files = Vec::new();
    let mut more = [0];
    loop {
        match passing::receive(line, &mut more, &mut files) {
            Ok(1) if more[0] > 0 => {}
            Ok(1) => return Ok((files.len() == count).then_some(files)),
            Ok(_) => return Ok(None),
            Err(e) if matches!(e.errno(), Some(libc::EAGAIN | libc::ECONNRESET)) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Whether it is of the kind that the checkpoint tells of.
fn is(file: &OwnedFd, socket: &Socket) -> Result<bool> {
    let option = |name: i32| sockets::int_option(file, SOL_SOCKET, name as u32);
    Ok(option(libc::SO_DOMAIN)? == Some(socket.family as i32)
        && option(libc::SO_TYPE)? == Some(socket.kind as i32)
        && option(libc::SO_PROTOCOL)? == Some(socket.protocol as i32))
}
