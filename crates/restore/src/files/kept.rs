//! Sockets and pipes that a process of ours has kept since the program was killed at its checkpoint (`capture::keeper`).

use super::streams::{Outward, Way};
use crate::{Error, Options, Pipes, Result, TcpPolicy};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use stillpoint_image::{Image, Pipe, Socket};
use stillpoint_linux::{Error as Kernel, passing, sockets};

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const REUSE: u32 = libc::SO_REUSEADDR as u32;
/// So long the keeper may take to answer, seconds: somebody else may be asking just then.
const PATIENCE: i64 = 5;
/// Words that the keeper knows: what it has is to be handed over, or closed.
const TAKE: &[u8] = b"t";
const CLOSE: &[u8] = b"c";

/// The line to the keeper. Until it is told that the program is complete, it keeps everything.
#[derive(Debug)]
pub struct Kept {
    line: OwnedFd,
    /// Sockets that let others have their port meanwhile, and whether they did before.
    lenient: Vec<(OwnedFd, Vec<u8>)>,
    /// Sockets by row, until they are the program's.
    pub(super) sockets: HashMap<usize, OwnedFd>,
    /// Pipes by row: an end of each.
    pub(super) pipes: HashMap<u32, OwnedFd>,
}

/// What something that was kept is in the image.
#[derive(Clone, Copy)]
enum Row {
    Socket(usize),
    Pipe(u32),
}

impl Kept {
    /// Asks for what was kept. Nothing if nobody keeps it any more.
    ///
    /// # Errors
    /// [`Error::Refused`] if connections are to be closed and pipes are not: there is one who keeps both.
    pub(super) fn take(image: &Image, options: &Options) -> Result<Option<Kept>> {
        let closes =
            options.tcp == TcpPolicy::Close && image.sockets.iter().any(|socket| socket.kept.is_some());
        // A FIFO leads where its name does, in any case.
        let goes_on = |(row, pipe): (u32, &Pipe)| match pipe.is_cut_off() {
            true => Outward::Pipe(row).way(image, &options.streams) == Some(Way::Kept),
            false => pipe.kept.is_some() && options.streams.pipes == Pipes::Kept,
        };
        if closes && (0..).zip(&image.pipes).any(goes_on) && is_there(image) {
            let why = "connections are kept together with pipes that lead outside, and cannot be closed alone: say --pipes closed or \
                       --pipes follow, or leave out --tcp close";
            return Err(Error::Refused(vec![why.into()]));
        }
        let Some(line) = image.kept.as_ref().and_then(|name| call(&name.0, TAKE)) else { return Ok(None) };
        let sockets =
            image.sockets.iter().enumerate().filter_map(|(row, s)| Some((s.kept?, Row::Socket(row))));
        let pipes = (0..).zip(&image.pipes).filter_map(|(row, p)| Some((p.kept?, Row::Pipe(row))));
        let rows: HashMap<u32, Row> = sockets.chain(pipes).collect();
        let Some(files) = receive(&line, rows.len())? else { return Ok(None) };
        let mut kept = Kept { line, lenient: Vec::new(), sockets: HashMap::new(), pipes: HashMap::new() };
        for (place, file) in (0..).zip(files) {
            match rows.get(&place) {
                Some(&Row::Socket(row)) if is(&file, &image.sockets[row])? => {
                    kept.lend_port(&file)?;
                    kept.sockets.insert(row, file);
                }
                Some(&Row::Pipe(row)) if is_pipe(&file)? => drop(kept.pipes.insert(row, file)),
                Some(_) => return Ok(None),
                None => {}
            }
        }
        if closes {
            kept.lenient.clear();
            kept.sockets.clear();
            kept.release();
        }
        Ok(Some(kept))
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

    /// The program has it all; nobody else needs to.
    pub(super) fn release(&self) {
        let _ = sockets::send(&self.line, b"d");
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all_bound();
    }
}

/// Whether what was kept of a program is still there to be had.
pub(super) fn is_there(image: &Image) -> bool {
    image.kept.as_ref().is_some_and(|name| connected(&name.0).is_some())
}

/// Whether anybody keeps something for a restore.
pub fn is_anything_kept() -> bool {
    std::fs::read_to_string("/proc/net/unix").is_ok_and(|names| names.contains("@stillpoint-kept-"))
}

/// Nobody will restore this checkpoint: what was kept for that is let go of, and other ends of connections hear of it.
pub fn let_go(image: &Image) {
    drop(image.kept.as_ref().and_then(|name| call(&name.0, CLOSE)));
}

/// A line to the keeper of this name, if it lives, to whom one word has been said.
fn call(name: &[u8], word: &[u8]) -> Option<OwnedFd> {
    let line = connected(name)?;
    sockets::send(&line, word).ok()?;
    Some(line)
}

/// A line to the keeper of this name, if it lives.
fn connected(name: &[u8]) -> Option<OwnedFd> {
    let line = sockets::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).ok()?;
    let address = [&(libc::AF_UNIX as u16).to_ne_bytes(), &[0][..], name].concat();
    sockets::connect(&line, &address).ok()?;
    // Anybody may take a name whose owner is gone.
    let user = sockets::peer_user(&line).ok()?;
    let own = rustix::process::geteuid().as_raw();
    // struct timeval
    let patience: Vec<u8> = [PATIENCE, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
    sockets::set_option(&line, SOL_SOCKET, libc::SO_RCVTIMEO as u32, &patience).ok()?;
    (user == 0 || user == own).then_some(line)
}

/// All that was kept; `None` if the keeper leaves half-way, or has another number of them.
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

fn is_pipe(file: &OwnedFd) -> Result<bool> {
    let stat = rustix::fs::fstat(file).map_err(|e| Kernel::call("fstat", e))?;
    Ok(rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Fifo)
}
