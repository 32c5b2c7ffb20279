//! Keeping the sockets and pipes of a program that is killed at its checkpoint, until it is restored: a process of ours holds them.
//!
//! To the other end of a connection the program is one that does not read for a while: the kernel goes on to acknowledge what
//! comes, as far as there is room, sends what was still to be sent, and answers keepalive probes. Nothing about the connection
//! is changed, so nothing has to be put back: the restored program gets the very same one. So with a pipe of which a process outside has
//! an end.
//!
//! 1. The keeper is there, with duplicates of them, before the checkpoint is committed (which tells where to find it).
//! 2. If we fail or die before the program has been killed, the keeper leaves, and the program's own are as they were.
//! 3. The program is killed. They stay open, as they are ours as well.
//! 4. Whoever restores it asks for them over a socket, gets duplicates, and says when the program is complete. Only then the
//!    keeper leaves: a restore that fails can be made once more. If nobody comes, it leaves after a while, and the kernel ends the
//!    connections as it does for any program that ends.

use crate::files::datagrams;
use crate::{Builder, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use stillpoint_image::{Bytes, Image};
use stillpoint_linux::split::{Split, close_all_but, copy, leave};
use stillpoint_linux::tcp::{info, state};
use stillpoint_linux::{Error as Kernel, passing, sockets, supervise};

/// So long sockets are kept: what TCP itself gives a side that does not answer.
const PATIENCE: Duration = Duration::from_secs(15 * 60);
/// So long a restore may take from one word to the next.
const RESTORE: Duration = Duration::from_secs(10 * 60);
/// If we die, so long a program that we may have killed may take to be gone.
const END: Duration = Duration::from_secs(2);
/// Descriptors of one message.
const TOGETHER: usize = 4;

/// The keeper, as whoever takes the checkpoint knows it. If it is dropped before the program was killed, nothing is kept.
#[derive(Debug)]
pub struct Keeper {
    word: Option<PipeWriter>,
    child: supervise::Child,
    /// So many sockets and pipes it keeps.
    count: usize,
}

/// What something that is kept is in the image.
#[derive(Clone, Copy)]
enum Row {
    Socket(u32),
    Pipe(u32),
}

const KILLED: u8 = b'k';
const ALIVE: u8 = b'a';

impl Keeper {
    /// Starts one if there is something to keep, and notes in the image where it is.
    ///
    /// # Errors
    /// That there can be no such process; the image is as before.
    pub fn start(builder: &mut Builder, target: BorrowedFd<'_>) -> Result<Option<Keeper>> {
        let mut kept: Vec<(Row, BorrowedFd<'_>)> =
            builder.outside.iter().map(|(row, file)| (Row::Pipe(*row), file.as_fd())).collect();
        // Sockets of a network namespace of the program's own are made in a new one.
        if builder.image.network.is_none() {
            kept.extend(builder.connections.iter().map(|found| (Row::Socket(found.row()), found.file())));
            for (row, file) in &builder.waiting {
                if has_something(&builder.image, *row, file.as_fd())? {
                    kept.push((Row::Socket(*row), file.as_fd()));
                }
            }
        }
        if kept.is_empty() {
            return Ok(None);
        }
        let name = new_name()?;
        let listener = listen(&name)?;
        let pipe = || std::io::pipe().map_err(|e| Kernel::call("pipe", e));
        let ((hear, word), (mut arrived, arrives)) = (pipe()?, pipe()?);
        let files: Vec<BorrowedFd<'_>> = kept.iter().map(|(_, file)| *file).collect();
        let child = match copy()? {
            Split::Original(child) => child,
            Split::Copy => Work { files, listener, target, hear, arrives }.work(),
        };
        drop(arrives);
        // What is for our group and our terminal is not for it from there on.
        arrived.read_exact(&mut [0]).map_err(|e| Kernel::call("hear of the one who keeps sockets", e))?;
        for (place, (row, _)) in kept.iter().enumerate() {
            *match *row {
                Row::Socket(row) => &mut builder.image.sockets[row as usize].kept,
                Row::Pipe(row) => &mut builder.image.pipes[row as usize].kept,
            } = Some(place as u32);
        }
        builder.image.kept = Some(Bytes(name));
        Ok(Some(Keeper { word: Some(word), child, count: kept.len() }))
    }

    /// The program has been killed: from now on it is for the keeper to say when what it had open ends.
    pub fn take_over(mut self) {
        self.tell(KILLED);
    }

    /// For the user.
    pub fn note(&self) -> String {
        let (count, minutes) = (self.count, PATIENCE.as_secs() / 60);
        let what = if count == 1 { "what leads outside is" } else { "things that lead outside are" };
        format!("{what} kept open for a restore within {minutes} minutes ({count})")
    }

    fn tell(&mut self, word: u8) -> bool {
        self.word.take().is_some_and(|mut pipe| pipe.write_all(&[word]).is_ok())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.tell(ALIVE) {
            let _ = poll(&mut [PollFd::new(&self.child.pidfd, PollFlags::IN)], None);
            let _ = supervise::wait(self.child.pidfd.as_fd());
        }
    }
}

/// Whether there is something in the queue of a socket that has no connection, or it is one to the outside.
fn has_something(image: &Image, row: u32, file: BorrowedFd<'_>) -> Result<bool> {
    let socket = &image.sockets[row as usize];
    match socket.listening {
        _ if socket.outside => Ok(true),
        Some(_) => Ok(info(file).is_ok_and(|info| info.state == state::LISTEN && info.pending > 0)),
        None => datagrams::has_something(file),
    }
}

/// A name that nobody has.
fn new_name() -> Result<Vec<u8>> {
    let mut random = [0; 16];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    read.map_err(|e| Kernel::file("/dev/urandom", e))?;
    let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("stillpoint-kept-{hex}").into_bytes())
}

fn listen(name: &[u8]) -> Result<OwnedFd, Kernel> {
    let failed = |e| Kernel::call("make a socket for the one who keeps sockets", e);
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(failed)?;
    let address = SocketAddrUnix::new_abstract_name(name).map_err(failed)?;
    rustix::net::bind(&socket, &address).map_err(failed)?;
    rustix::net::listen(&socket, 4).map_err(failed)?;
    Ok(socket)
}

/// What the keeper has.
struct Work<'a> {
    files: Vec<BorrowedFd<'a>>,
    listener: OwnedFd,
    target: BorrowedFd<'a>,
    hear: PipeReader,
    /// To say that it is by itself.
    arrives: PipeWriter,
}

impl Work<'_> {
    fn work(mut self) -> ! {
        // Signals for our group and the end of our terminal are not for it.
        let _ = rustix::process::setsid();
        let _ = rustix::process::chdir("/");
        let _ = rustix::thread::set_name(c"stillpoint-keep");
        let own = [&self.listener.as_fd(), &self.target, &self.hear.as_fd(), &self.arrives.as_fd()]
            .map(AsRawFd::as_raw_fd);
        let keep: Vec<i32> = self.files.iter().map(AsRawFd::as_raw_fd).chain(own).collect();
        close_all_but(&keep);
        let _ = self.arrives.write_all(&[ALIVE]);
        if self.is_killed() {
            self.keep();
        }
        leave(0)
    }

    /// Waits for the word that the program has been killed. If there will be none, its end tells.
    fn is_killed(&mut self) -> bool {
        let mut word = [0];
        match self.hear.read_exact(&mut word) {
            Ok(()) => word[0] == KILLED,
            Err(_) => wait(self.target, END),
        }
    }

    /// Until somebody has taken them, or wants them closed, or nobody comes.
    fn keep(&self) {
        let until = Instant::now() + PATIENCE;
        while wait(self.listener.as_fd(), until.saturating_duration_since(Instant::now())) {
            let Ok(client) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) else { continue };
            let user = sockets::peer_user(&client);
            let own = rustix::process::geteuid().as_raw();
            if user.is_ok_and(|user| user == 0 || user == own) && self.serve(&client).unwrap_or(false) {
                return;
            }
        }
    }

    /// Whether there is nothing more to keep.
    fn serve(&self, client: &OwnedFd) -> Result<bool, Kernel> {
        match hear(client)? {
            Some(b't') => {
                for files in self.files.chunks(TOGETHER) {
                    passing::send(client, &[files.len() as u8], files)?;
                }
                passing::send(client, &[0], &[])?;
                // Complete, or failed.
                Ok(hear(client)? == Some(b'd'))
            }
            word => Ok(word == Some(b'c')),
        }
    }
}

/// One word; `None` if the other side is gone or takes too long.
fn hear(client: &OwnedFd) -> Result<Option<u8>, Kernel> {
    if !wait(client.as_fd(), RESTORE) {
        return Ok(None);
    }
    let mut word = [0];
    let read =
        rustix::net::recv(client, &mut word, RecvFlags::empty()).map_err(|e| Kernel::call("recv", e))?;
    Ok((read.1 > 0).then_some(word[0]))
}

/// Whether there is something to read, at last.
fn wait(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], left.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            polled => return polled.is_ok_and(|n| n > 0),
        }
    }
}
