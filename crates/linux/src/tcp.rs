//! TCP connections: their state, what is on its way between two of them, and making them anew without a handshake.
//! `tcp(7)`, `TCP_INFO`, `TCP_REPAIR` (Linux's Documentation/networking, and LWN 495304).
//!
//! Looking at a connection changes nothing about it, with one exception: data that has been sent and not received can be read in
//! repair mode alone, which takes `SO_REUSEADDR` away as well. [`Guard`] sees to it that both are as before, also if we die.

use crate::descriptors::{check, ioctl_int, readable};
use crate::sockets::{self, BUFFER_LOCK, int_option, option, option_of, set_option};
use crate::split::{Split, close_all_but, copy, leave};
use crate::supervise::{self, Child};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const TCP: u32 = libc::IPPROTO_TCP as u32;
const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const REUSE: u32 = libc::SO_REUSEADDR as u32;
const REPAIR: u32 = libc::TCP_REPAIR as u32;
const REPAIR_QUEUE: u32 = libc::TCP_REPAIR_QUEUE as u32;
const QUEUE_SEQ: u32 = libc::TCP_QUEUE_SEQ as u32;
const REPAIR_OPTIONS: u32 = libc::TCP_REPAIR_OPTIONS as u32;
/// Leaves repair mode and sends nothing (`TCP_REPAIR_OFF_NO_WP`).
const OFF_IN_SILENCE: i32 = -1;
const REPAIR_WINDOW: u32 = 29; // TCP_REPAIR_WINDOW
const NEITHER: i32 = 0; // TCP_NO_QUEUE
const RECEIVED: i32 = 1; // TCP_RECV_QUEUE
const SENT: i32 = 2; // TCP_SEND_QUEUE
/// Bytes sent and not acknowledged (`SIOCOUTQ`).
const SIOCOUTQ: u64 = 0x5411;

/// States of `TCP_INFO`.
pub mod state {
    /// Data flows both ways.
    pub const ESTABLISHED: u8 = 1;
    /// It is being connected.
    pub const SYN_SENT: u8 = 2;
    /// As [`SYN_SENT`], from the other side.
    pub const SYN_RECEIVED: u8 = 3;
    /// We have ended our half, and that was not acknowledged yet.
    pub const FIN_WAIT1: u8 = 4;
    /// We have ended our half.
    pub const FIN_WAIT2: u8 = 5;
    /// Not connected, or not any more.
    pub const CLOSE: u8 = 7;
    /// The other side has ended its half.
    pub const CLOSE_WAIT: u8 = 8;
    /// Both have, the other side first.
    pub const LAST_ACK: u8 = 9;
    /// It waits for connections.
    pub const LISTEN: u8 = 10;
    /// Both have at once.
    pub const CLOSING: u8 = 11;
}

/// Whether we have ended our half in this state.
pub fn has_ended_ours(state: u8) -> bool {
    use state::*;
    matches!(state, FIN_WAIT1 | FIN_WAIT2 | LAST_ACK | CLOSING)
}

/// Whether the other side has ended its half in this state.
pub fn has_ended_theirs(state: u8) -> bool {
    use state::*;
    matches!(state, CLOSE_WAIT | LAST_ACK | CLOSING)
}

/// What `TCP_INFO` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// One of [`state`].
    pub state: u8,
    /// Connections that wait to be accepted, of a listening socket.
    pub pending: u32,
    /// How many may wait.
    pub backlog: u32,
}

/// Looks at a TCP socket.
pub fn info(socket: impl AsFd) -> Result<Info> {
    let raw = option(socket, TCP, libc::TCP_INFO as u32)?.unwrap_or_default();
    let word = |at: usize| raw.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    // Of a listening socket: tcpi_unacked and tcpi_sacked.
    Ok(Info { state: raw.first().copied().unwrap_or(0), pending: word(24), backlog: word(28) })
}

/// Bytes sent and not acknowledged; the end of our half counts as one.
pub fn unacknowledged(socket: impl AsFd) -> Result<usize> {
    Ok(ioctl_int(socket, SIOCOUTQ, "SIOCOUTQ")?.max(0) as usize)
}

/// The unread data of a connection, left where it is.
///
/// # Errors
/// That it cannot be had as one piece (urgent data lies between).
pub fn unread(socket: impl AsFd) -> Result<Vec<u8>> {
    let there = readable(&socket)? as usize;
    let data = peek(socket, there)?;
    if data.len() < there {
        let n = data.len();
        return Err(Error::Other(format!("of {there} bytes in the queue of a connection {n} can be read")));
    }
    Ok(data)
}

/// What lies in a queue, at most so many bytes.
fn peek(socket: impl AsFd, bytes: usize) -> Result<Vec<u8>> {
    let mut data = vec![0; bytes];
    if bytes == 0 {
        return Ok(data);
    }
    // SAFETY: the kernel writes at most `bytes` bytes.
    let n = unsafe {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        libc::recv(socket.as_fd().as_raw_fd(), data.as_mut_ptr().cast(), bytes, flags)
    };
    let n = check(|| "peek at a queue of a connection".into(), n as i64)? as usize;
    data.truncate(n);
    Ok(data)
}

fn set(socket: impl AsFd, name: u32, value: i32) -> Result<()> {
    set_option(socket, TCP, name, &value.to_ne_bytes())
}

fn sequence(socket: impl AsFd, queue: i32) -> Result<u32> {
    set(&socket, REPAIR_QUEUE, queue)?;
    int_option(&socket, TCP, QUEUE_SEQ)?
        .map(|n| n as u32)
        .ok_or_else(|| Error::Other("no TCP_QUEUE_SEQ".into()))
}

/// A process beside us that brings connections back from repair mode should we die meanwhile.
///
/// 1. It is there, with duplicates of all of them, before any is put into that mode.
/// 2. If the pipe to it closes before it was told that all is well, it takes each that is in that mode out of it, and gives all
///    of them back the `SO_REUSEADDR` that they had: we may have died between the two.
#[derive(Debug)]
pub struct Guard {
    child: Child,
    word: Option<PipeWriter>,
    reuse: Vec<(i32, i32)>,
}

impl Guard {
    /// Looks after these connections.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_ADMIN`.
    pub fn new(sockets: &[BorrowedFd<'_>]) -> Result<Self> {
        may_repair(&sockets::socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_TCP)?)?;
        let mut reuse = Vec::with_capacity(sockets.len());
        for socket in sockets {
            reuse.push((socket.as_raw_fd(), int_option(socket, SOL_SOCKET, REUSE)?.unwrap_or(0)));
        }
        let (hear, word) = std::io::pipe().map_err(|e| Error::call("pipe", e))?;
        match copy()? {
            Split::Original(child) => Ok(Guard { child, word: Some(word), reuse }),
            Split::Copy => watch_over(hear, sockets, &reuse),
        }
    }

    /// Puts one of them into repair mode while `act` looks at it.
    fn repaired<T>(&self, socket: BorrowedFd<'_>, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let reuse = self.reuse.iter().find(|(fd, _)| *fd == socket.as_raw_fd());
        let (_, reuse) = *reuse.ok_or_else(|| Error::Other("nobody looks after a connection".into()))?;
        set(socket, REPAIR, 1)?;
        let result = act();
        bring_back(socket, reuse)?;
        result
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // A word that does not arrive, as the guard is dead, is not missed.
        let _ = self.word.take().map(|mut word| word.write_all(b"."));
        let _ = poll(&mut [PollFd::new(&self.child.pidfd, PollFlags::IN)], None);
        let _ = supervise::wait(self.child.pidfd.as_fd());
    }
}

fn watch_over(mut hear: std::io::PipeReader, sockets: &[BorrowedFd<'_>], reuse: &[(i32, i32)]) -> ! {
    // Signals for our group and the end of our terminal are not for it.
    let _ = rustix::process::setsid();
    let mut keep: Vec<i32> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
    keep.push(hear.as_raw_fd());
    close_all_but(&keep);
    if hear.read_exact(&mut [0]).is_err() {
        for (socket, (_, reuse)) in sockets.iter().zip(reuse) {
            if int_option(socket, TCP, REPAIR).ok().flatten().is_some_and(|mode| mode != 0) {
                let _ = set(socket, REPAIR, OFF_IN_SILENCE);
            }
            let _ = set_option(socket, SOL_SOCKET, REUSE, &reuse.to_ne_bytes());
        }
    }
    leave(0)
}

fn bring_back(socket: BorrowedFd<'_>, reuse: i32) -> Result<()> {
    set(socket, REPAIR, OFF_IN_SILENCE)?;
    set_option(socket, SOL_SOCKET, REUSE, &reuse.to_ne_bytes())
}

/// What is on its way in one direction of a connection whose both ends we have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Received and not read.
    pub unread: Vec<u8>,
    /// Sent and not received.
    pub unsent: Vec<u8>,
}

/// Whether all that was sent is known to have been received. Who receives says so late; who has read all is asked to say it now.
pub fn has_arrived(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<bool> {
    if unacknowledged(from)? == 0 {
        return Ok(true);
    }
    acknowledge(to)?;
    Ok(unacknowledged(from)? == 0)
}

/// Whether all that was sent is acknowledged within the time in which that is done at the latest (`TCP_DELACK_MAX`, 200 ms).
fn is_acknowledged(from: BorrowedFd<'_>) -> Result<bool> {
    const LATEST: Duration = Duration::from_millis(300);
    let since = Instant::now();
    while unacknowledged(from)? > 0 {
        if since.elapsed() > LATEST {
            return Ok(false);
        }
        std::thread::sleep(MOMENT);
    }
    Ok(true)
}

/// Sends the acknowledgement that is due, and leaves it as it is how soon others are sent (`TCP_QUICKACK`, where an even number is for
/// this time only).
fn acknowledge(socket: BorrowedFd<'_>) -> Result<()> {
    let is_quick = int_option(socket, TCP, libc::TCP_QUICKACK as u32)? == Some(1);
    set(socket, libc::TCP_QUICKACK as u32, if is_quick { 1 } else { 2 })
}

/// What is on its way from one end to the other, whose owners stand still. `guard` is asked for if it takes repair mode to see, and may
/// tell that this is not permitted: then what has arrived is known a moment later.
///
/// # Errors
/// `EPERM` if something has not arrived, and only those with `CAP_NET_ADMIN` could see it.
pub fn flow<'g>(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    guard: impl FnOnce() -> Result<&'g Guard>,
) -> Result<Flow> {
    // What was acknowledged lies in the other queue.
    if has_arrived(from, to)? {
        return Ok(Flow { unread: unread(to)?, unsent: Vec::new() });
    }
    const TRIES: usize = 100;
    let guard = match guard() {
        Err(e) if e.errno() == Some(libc::EPERM) && is_acknowledged(from)? => {
            return Ok(Flow { unread: unread(to)?, unsent: Vec::new() });
        }
        guard => guard?,
    };
    for _ in 0..TRIES {
        if let Some(flow) = guard.repaired(to, || guard.repaired(from, || look(from, to)))? {
            return Ok(flow);
        }
    }
    Err(Error::Other("the two ends of a connection do not agree about what is on its way".into()))
}

/// Both ends in repair mode; `None` if something arrived meanwhile.
///
/// 1. What lies in the queue of the sender, who stands still, ends where it did, and begins later with each acknowledgement, which
///    may come at any moment: it is looked at as it is, and its end is what counts.
/// 2. Nothing arrives between two looks at how much the receiver has: else all is looked at again.
fn look(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<Option<Flow>> {
    let states = || -> Result<_> { Ok((info(from)?.state, info(to)?.state)) };
    let before = states()?;
    let received = sequence(to, RECEIVED)?;
    let unread = unread(to)?;
    let most = unacknowledged(from)?;
    let sent = sequence(from, SENT)?;
    let queue = peek(from, most)?;
    let is_still = sequence(from, SENT)? == sent;
    // An acknowledgement that comes while this is the queue of choice has what was not yet sent count as sent (tcp_write_xmit).
    set(from, REPAIR_QUEUE, NEITHER)?;
    if !is_still || states()? != before || sequence(to, RECEIVED)? != received {
        return Ok(None);
    }
    // The end of a half counts as one byte, of which there is nothing to read.
    let (ended, known) = (has_ended_ours(before.0), has_ended_theirs(before.1));
    let missing = sent.wrapping_sub(u32::from(ended)).wrapping_sub(received.wrapping_sub(u32::from(known)));
    match queue.len().checked_sub(missing as usize) {
        Some(received) => Ok(Some(Flow { unread, unsent: queue[received..].to_vec() })),
        None => Ok(None),
    }
}

/// Makes what is on its way from one end to the other something else: all that is there is received, and thrown away, and this is
/// sent. Neither half may have ended.
///
/// # Errors
/// That it does not fit, or does not arrive.
pub fn replace(from: BorrowedFd<'_>, to: BorrowedFd<'_>, flow: &Flow) -> Result<()> {
    const NO_DELAY: u32 = libc::TCP_NODELAY as u32;
    let waits = int_option(from, TCP, NO_DELAY)? == Some(0);
    // Setting it pushes what is held back, whatever holds it.
    let push = || set(from, NO_DELAY, 1);
    push()?;
    receive_all(from, to)?;
    send_all(from, &flow.unread)?;
    push()?;
    // It fits there as it did before; where that has less room by now, the rest stays with the sender.
    let since = Instant::now();
    while (readable(to)? as usize) < flow.unread.len() && since.elapsed() < ARRIVAL {
        std::thread::sleep(MOMENT);
    }
    if waits {
        set(from, NO_DELAY, 0)?;
    }
    send_all(from, &flow.unsent)
}

/// What fails where addresses are remembered.
pub(crate) const CONNECT: &str = "connect two sockets";
/// For so long something may be on its way over the loopback device of a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// For so long it is waited for what need not arrive.
const ARRIVAL: Duration = Duration::from_millis(200);
const MOMENT: Duration = Duration::from_micros(50);

pub(crate) fn too_late(what: &str) -> Error {
    Error::call(what, std::io::Error::from(std::io::ErrorKind::TimedOut))
}

/// Throws away all that was sent to one end.
fn receive_all(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<()> {
    let mut buffer = vec![0; 1 << 16];
    let since = Instant::now();
    loop {
        let n = match rustix::net::recv(to, &mut *buffer, rustix::net::RecvFlags::DONTWAIT) {
            Ok((n, _)) => n,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(e) => return Err(Error::call("empty a queue of a connection", e)),
        };
        // What has arrived before it was acknowledged is there to be read.
        if n == 0 && has_arrived(from, to)? && readable(to)? == 0 {
            return Ok(());
        }
        if since.elapsed() > PATIENCE {
            return Err(too_late("empty a queue of a connection"));
        }
        if n == 0 {
            std::thread::sleep(MOMENT);
        }
    }
}

/// Sends all of it; buffers grow if they have to.
fn send_all(from: BorrowedFd<'_>, mut data: &[u8]) -> Result<()> {
    let since = Instant::now();
    let mut most = None;
    while !data.is_empty() {
        match sockets::send(from, data) {
            Ok(n) => data = &data[n..],
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && since.elapsed() < PATIENCE => {
                if since.elapsed() > ARRIVAL {
                    let now = sockets::enlarge(from, data.len())?;
                    // It is as large as we may make it, and full.
                    if most == Some(now) && since.elapsed() > 2 * ARRIVAL {
                        return Err(Error::call("fill a queue of a connection", e));
                    }
                    most = Some(now);
                }
                std::thread::sleep(MOMENT);
            }
            Err(e) => return Err(Error::call("fill a queue of a connection", e)),
        }
    }
    Ok(())
}

/// Whether a connection could not be made since its addresses are in use, or the kernel remembers an earlier one.
pub fn is_in_use(e: &Error) -> bool {
    match e {
        Error::Call { what, source } if source.raw_os_error() == Some(libc::EADDRNOTAVAIL) => what == CONNECT,
        e => e.errno() == Some(libc::EADDRINUSE),
    }
}

/// One end of a connection that is made anew.
#[derive(Debug)]
pub struct End<'a> {
    /// A new socket, bound or not.
    pub socket: &'a OwnedFd,
    /// Its address, raw `sockaddr`; its own if it is bound already.
    pub address: &'a [u8],
    /// The address of the other end, as this one's family writes it.
    pub remote: &'a [u8],
    /// Data that it has received and not read.
    pub unread: &'a [u8],
    /// Data that it has sent and the other end has not received.
    pub unsent: &'a [u8],
    /// Its half has ended.
    pub ended: bool,
}

/// Connects two new sockets of ours with each other. Nobody listens, nobody else can come between, and no packet is sent but
/// from one to the other.
///
/// # Errors
/// As `bind(2)`; `EADDRNOTAVAIL` while the kernel remembers an earlier connection of these addresses.
pub fn connect_pair(a: &End<'_>, b: &End<'_>) -> Result<()> {
    // Any will do: nobody has seen an earlier one.
    const FIRST: u32 = 1 << 20;
    for end in [a, b] {
        make_room(end)?;
        set(end.socket, REPAIR, 1)?;
        if sockets::local_address(end.socket)? != end.address {
            sockets::bind(end.socket, end.address).map_err(|e| Error::call("bind a connection", e))?;
        }
        set_sequence(end.socket, SENT, FIRST)?;
        set_sequence(end.socket, RECEIVED, FIRST.wrapping_sub(end.unread.len() as u32))?;
    }
    for end in [a, b] {
        sockets::connect(end.socket, end.remote).map_err(|e| Error::call(CONNECT, e))?;
        agree(end.socket)?;
        set(end.socket, REPAIR_QUEUE, RECEIVED)?;
        put(end.socket, end.unread)?;
    }
    let (of_a, of_b) = (window(a.socket)?, window(b.socket)?);
    open_window(a.socket, of_a, of_b)?;
    open_window(b.socket, of_b, of_a)?;
    for end in [a, b] {
        set(end.socket, REPAIR, OFF_IN_SILENCE)?;
    }
    for end in [a, b] {
        put(end.socket, end.unsent)?;
        end.settle()?;
    }
    Ok(())
}

impl End<'_> {
    /// Has it ended, if it has, behind all that was sent; and the kernel choose the sizes of its buffers again.
    pub(crate) fn settle(&self) -> Result<()> {
        if self.ended {
            end_half(self.socket)?;
        }
        set_option(self.socket, SOL_SOCKET, BUFFER_LOCK, &0i32.to_ne_bytes())
    }
}

/// Ends our half of a connection.
pub(crate) fn end_half(socket: &OwnedFd) -> Result<()> {
    rustix::net::shutdown(socket, rustix::net::Shutdown::Write)
        .map_err(|e| Error::call("end one half of a connection", e))
}

/// Whether connections of such a socket may be made by repair.
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN`.
pub fn may_repair(socket: &OwnedFd) -> Result<()> {
    set(socket, REPAIR, 1)?;
    set(socket, REPAIR, OFF_IN_SILENCE)
}

fn set_sequence(socket: &OwnedFd, queue: i32, number: u32) -> Result<()> {
    set(socket, REPAIR_QUEUE, queue)?;
    set_option(socket, TCP, QUEUE_SEQ, &number.to_ne_bytes())
}

/// Options that a handshake over the loopback device would settle on (`struct tcp_repair_opt`: code, value).
fn agree(socket: &OwnedFd) -> Result<()> {
    const SCALE: u32 = 8;
    const SEGMENT: u32 = 65_483;
    let options: [[u32; 2]; 4] = [[2, SEGMENT], [3, SCALE | SCALE << 16], [4, 0], [8, 0]];
    let raw: Vec<u8> = options.as_flattened().iter().flat_map(|word| word.to_ne_bytes()).collect();
    set_option(socket, TCP, REPAIR_OPTIONS, &raw)
}

/// `struct tcp_repair_window`: what the last segment that told of a window was, how much may be sent, how much at most ever,
/// how much may be received, and from where on.
type Window = [u32; 5];

fn window(socket: &OwnedFd) -> Result<Window> {
    let raw = option_of(socket, TCP, REPAIR_WINDOW, size_of::<Window>())?.unwrap_or_default();
    let words = raw.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    let words: Vec<u32> = words.collect();
    words.try_into().map_err(|_| Error::Other("no TCP_REPAIR_WINDOW".into()))
}

/// Tells one end what the other has room for, as if that had just said so. Without, it would have to ask, and wait.
fn open_window(socket: &OwnedFd, own: Window, other: Window) -> Result<()> {
    let received = sequence(socket, RECEIVED)?;
    let window = [received, other[3], own[2].max(other[3]), own[3], received];
    let raw: Vec<u8> = window.iter().flat_map(|word| word.to_ne_bytes()).collect();
    set_option(socket, TCP, REPAIR_WINDOW, &raw)
}

/// Buffers that take what is to be put into them; as much of it as may be, for those without `CAP_NET_ADMIN`.
pub(crate) fn make_room(end: &End<'_>) -> Result<()> {
    const SPARE: usize = 1 << 16;
    let sizes = [
        (libc::SO_RCVBUFFORCE, end.unread, libc::SO_RCVBUF),
        (libc::SO_SNDBUFFORCE, end.unsent, libc::SO_SNDBUF),
    ];
    for (force, data, name) in sizes {
        let wanted = i32::try_from(data.len() * 2 + SPARE).unwrap_or(i32::MAX / 2);
        let is = int_option(end.socket, SOL_SOCKET, name as u32)?.unwrap_or(0);
        if !data.is_empty() && is / 2 < wanted {
            let wanted = wanted.to_ne_bytes();
            match set_option(end.socket, SOL_SOCKET, force as u32, &wanted) {
                Err(e) if e.errno() == Some(libc::EPERM) && name == libc::SO_RCVBUF => {
                    expect(end.socket, data.len() + SPARE)?;
                }
                // What is sent has more room if the kernel chooses it.
                Err(e) if e.errno() == Some(libc::EPERM) => {}
                set => set?,
            }
        }
    }
    Ok(())
}

/// Has a socket receive so many bytes before somebody reads, as far as the kernel gives everybody room (`tcp_rmem`): who waits for that many
/// gets it, and keeps it.
fn expect(socket: &OwnedFd, bytes: usize) -> Result<()> {
    const LEAST: u32 = libc::SO_RCVLOWAT as u32;
    let before = int_option(socket, SOL_SOCKET, LEAST)?.unwrap_or(1);
    for least in [i32::try_from(bytes).unwrap_or(i32::MAX), before] {
        set_option(socket, SOL_SOCKET, LEAST, &least.to_ne_bytes())?;
    }
    Ok(())
}

fn put(socket: &OwnedFd, mut data: &[u8]) -> Result<()> {
    const PIECE: usize = 1 << 15;
    while !data.is_empty() {
        let piece = &data[..data.len().min(PIECE)];
        let n = sockets::send(socket, piece).map_err(|e| Error::call("fill a queue of a connection", e))?;
        data = &data[n..];
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::sockets::bind_to_loopback;

    pub(crate) fn tcp(family: i32) -> OwnedFd {
        sockets::socket(family, libc::SOCK_STREAM, libc::IPPROTO_TCP).unwrap()
    }

    /// Two ends of a connection by the usual way.
    fn connected() -> (OwnedFd, OwnedFd) {
        let door = tcp(libc::AF_INET);
        let address = bind_to_loopback(&door, libc::AF_INET).unwrap();
        rustix::net::listen(&door, 4).unwrap();
        let client = tcp(libc::AF_INET);
        sockets::connect(&client, &address).unwrap();
        let server = rustix::net::accept_with(&door, rustix::net::SocketFlags::CLOEXEC).unwrap();
        (client, server)
    }

    fn fill(socket: &OwnedFd) -> Vec<u8> {
        let mut sent = Vec::new();
        loop {
            let piece: Vec<u8> = (0..10_007u32).map(|i| (i as usize + sent.len() / 7) as u8).collect();
            match sockets::send(socket, &piece) {
                Ok(n) => sent.extend_from_slice(&piece[..n]),
                Err(_) => return sent,
            }
        }
    }

    pub(crate) fn drain(socket: &OwnedFd, bytes: usize) -> Vec<u8> {
        let mut got = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        while got.len() < bytes {
            let n = rustix::io::read(socket, &mut buffer).unwrap();
            assert!(n > 0, "it ends after {} of {bytes} bytes", got.len());
            got.extend_from_slice(&buffer[..n]);
        }
        got
    }

    fn mode(socket: &OwnedFd) -> i32 {
        int_option(socket, TCP, REPAIR).unwrap().unwrap()
    }

    /// How long it could not send because the other end had no room, microseconds: tcpi_rwnd_limited.
    fn waited_for_room(socket: &OwnedFd) -> u64 {
        let raw = option(socket, TCP, libc::TCP_INFO as u32).unwrap().unwrap();
        u64::from_ne_bytes(raw[176..184].try_into().unwrap())
    }

    fn reuse(socket: &OwnedFd) -> i32 {
        int_option(socket, SOL_SOCKET, REUSE).unwrap().unwrap()
    }

    fn seen(from: &OwnedFd, to: &OwnedFd) -> Flow {
        let guard = Guard::new(&[from.as_fd(), to.as_fd()]).unwrap();
        flow(from.as_fd(), to.as_fd(), || Ok(&guard)).unwrap()
    }

    #[test]
    fn a_full_connection_is_seen_whole_and_goes_on() {
        let (client, server) = connected();
        set_option(&client, SOL_SOCKET, REUSE, &1i32.to_ne_bytes()).unwrap();
        let sent = fill(&client);
        let flow = seen(&client, &server);
        assert!(!flow.unsent.is_empty(), "the queue of the sender is not empty");
        assert_eq!([flow.unread, flow.unsent].concat(), sent);
        assert_eq!((mode(&client), mode(&server)), (0, 0));
        assert_eq!((reuse(&client), reuse(&server)), (1, 0));
        assert_eq!(drain(&server, sent.len()), sent);
        sockets::send(&server, b"back").unwrap();
        assert_eq!(drain(&client, 4), b"back");
    }

    /// Whatever was on its way before, and however the sender waits to send more at once.
    #[test]
    fn what_is_on_its_way_is_replaced() {
        for option in [None, Some(libc::TCP_NODELAY), Some(libc::TCP_CORK)] {
            let (client, server) = connected();
            let (from, to) = (client.as_fd(), server.as_fd());
            let sent = fill(&client);
            let full = seen(&client, &server);
            if let Some(name) = option {
                set(&client, name as u32, 1).unwrap();
            }
            let little = Flow { unread: b"little".to_vec(), unsent: Vec::new() };
            for flow in [&little, &full, &full, &little, &Flow::default(), &full] {
                replace(from, to, flow).unwrap();
                let now = seen(&client, &server);
                assert_eq!([now.unread, now.unsent].concat(), [&*flow.unread, &flow.unsent].concat());
                assert!(readable(&server).unwrap() as usize >= flow.unread.len().min(6));
            }
            let is_set = |name: i32| int_option(&client, TCP, name as u32).unwrap().unwrap();
            for name in [libc::TCP_NODELAY, libc::TCP_CORK] {
                assert_eq!(is_set(name), i32::from(option == Some(name)));
            }
            assert_eq!(drain(&server, sent.len()), sent);
            sockets::send(&server, b"back").unwrap();
            assert_eq!(drain(&client, 4), b"back");
        }
    }

    #[test]
    fn what_was_read_is_known_to_have_arrived() {
        let (client, server) = connected();
        for turn in 0..50 {
            for (from, to) in [(&client, &server), (&server, &client)] {
                sockets::send(from, &[turn; 1000]).unwrap();
                drain(to, 1000);
                assert!(has_arrived(from.as_fd(), to.as_fd()).unwrap());
            }
        }
        fill(&client);
        assert!(!has_arrived(client.as_fd(), server.as_fd()).unwrap());
    }

    /// What lies unread is acknowledged some 40 ms after it was received, at whatever moment of a look that may be.
    #[test]
    fn an_acknowledgement_may_come_while_it_is_looked_at() {
        for turn in 0..60u8 {
            let (client, server) = connected();
            let sent = vec![turn; 60_000];
            let guard = Guard::new(&[client.as_fd(), server.as_fd()]).unwrap();
            assert_eq!(sockets::send(&client, &sent).unwrap(), sent.len());
            while unacknowledged(&client).unwrap() > 0 {
                let flow = flow(client.as_fd(), server.as_fd(), || Ok(&guard)).unwrap();
                assert_eq!([flow.unread, flow.unsent].concat(), sent);
            }
        }
    }

    #[test]
    fn an_end_behind_unsent_data_is_no_byte() {
        let (client, server) = connected();
        let sent = fill(&client);
        rustix::net::shutdown(&client, rustix::net::Shutdown::Write).unwrap();
        assert_eq!(info(&client).unwrap().state, state::FIN_WAIT1);
        let flow = seen(&client, &server);
        assert_eq!([flow.unread, flow.unsent].concat(), sent);
        assert_eq!(drain(&server, sent.len()), sent);
        assert_eq!(rustix::io::read(&server, &mut [0u8; 1]).unwrap(), 0);
    }

    #[test]
    fn the_guard_brings_connections_back_if_we_are_killed() {
        for moment in 0..40u64 {
            let (client, server) = connected();
            set_option(&client, SOL_SOCKET, REUSE, &1i32.to_ne_bytes()).unwrap();
            let sent = fill(&client);
            let Split::Original(child) = copy().unwrap() else {
                let guard = Guard::new(&[client.as_fd(), server.as_fd()]);
                while let Ok(guard) = &guard {
                    let _ = flow(client.as_fd(), server.as_fd(), || Ok(guard));
                }
                leave(1)
            };
            std::thread::sleep(std::time::Duration::from_micros(2000 + 37 * moment));
            rustix::process::pidfd_send_signal(&child.pidfd, rustix::process::Signal::KILL).unwrap();
            poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], None).unwrap();
            supervise::wait(child.pidfd.as_fd()).unwrap();
            let patience = std::time::Instant::now();
            while (mode(&client), mode(&server), reuse(&client), reuse(&server)) != (0, 0, 1, 0) {
                assert!(patience.elapsed().as_secs() < 60, "a connection was left in repair mode");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            assert_eq!(drain(&server, sent.len()), sent);
        }
    }

    #[test]
    fn a_pair_is_made_with_all_that_was_on_its_way() {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let (a, b) = (tcp(family), tcp(family));
            let address = [bind_to_loopback(&a, family).unwrap(), bind_to_loopback(&b, family).unwrap()];
            let (unread, unsent) = (vec![7; 3_000_000], vec![8; 900_000]);
            connect_pair(
                &End {
                    socket: &a,
                    address: &address[0],
                    remote: &address[1],
                    unread: b"for a",
                    unsent: &unsent,
                    ended: true,
                },
                &End {
                    socket: &b,
                    address: &address[1],
                    remote: &address[0],
                    unread: &unread,
                    unsent: &[],
                    ended: false,
                },
            )
            .unwrap();
            assert!(readable(&b).unwrap() as usize >= unread.len());
            assert_eq!(sockets::peer_address(&a).unwrap().unwrap(), address[1]);
            assert_eq!(drain(&b, 3_900_000), [unread, unsent].concat());
            assert_eq!(rustix::io::read(&b, &mut [0u8; 1]).unwrap(), 0);
            sockets::send(&b, b" and more").unwrap();
            assert_eq!(drain(&a, 14), b"for a and more");
            assert_eq!(waited_for_room(&b), 0, "it had to ask for room");
            assert_eq!((mode(&a), mode(&b)), (0, 0));
            assert_eq!(int_option(&a, SOL_SOCKET, BUFFER_LOCK).unwrap(), Some(0));
        }
    }
}
