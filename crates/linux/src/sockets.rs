//! Sockets: addresses and options as raw bytes, queued messages without consuming them, `sock_diag(7)` for unix
//! sockets.

use crate::descriptors::check;
use crate::netlink::{self, attributes, u32_at};
use crate::seeming::Identity;
use crate::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// A new socket, close-on-exec.
pub fn socket(family: i32, kind: i32, protocol: i32) -> Result<OwnedFd> {
    // SAFETY: touches no memory; the result is a new descriptor nobody owns.
    unsafe {
        let r = libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol);
        Ok(OwnedFd::from_raw_fd(check(|| "make a socket".into(), r.into())? as i32))
    }
}

/// Two connected unix sockets, close-on-exec.
pub fn pair(kind: i32) -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0i32; 2];
    // SAFETY: socketpair writes two descriptors that nobody owns yet.
    unsafe {
        let r = libc::socketpair(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr());
        check(|| "make a pair of sockets".into(), r.into())?;
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

/// Value of an option as raw bytes; `None` where the socket does not have the option. Not for `SO_GET_FILTER`, whose
/// length is not in bytes ([`has_filter`]).
pub fn option(socket: impl AsFd, level: u32, name: u32) -> Result<Option<Vec<u8>>> {
    option_of(socket, level, name, 256)
}

/// Value of an option of at most so many bytes; the kernel wants to be asked for some by their very size.
pub(crate) fn option_of(socket: impl AsFd, level: u32, name: u32, bytes: usize) -> Result<Option<Vec<u8>>> {
    let mut value = vec![0u8; bytes];
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into the buffer.
    let r = unsafe {
        let at = value.as_mut_ptr().cast();
        libc::getsockopt(socket.as_fd().as_raw_fd(), level as i32, name as i32, at, &raw mut len)
    };
    match check(|| format!("read socket option {level}/{name}"), r.into()) {
        Ok(_) => {
            value.truncate(len as usize);
            Ok(Some(value))
        }
        Err(e) if matches!(e.errno(), Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EINVAL)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Value of an integer option.
pub fn int_option(socket: impl AsFd, level: u32, name: u32) -> Result<Option<i32>> {
    let value = option(socket, level, name)?;
    Ok(value.and_then(|v| v.get(..4).map(|b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]))))
}

/// User id of whoever is at the other end of a unix socket (`SO_PEERCRED`, unix(7)), also where their process has no id
/// in our pid namespace.
pub fn peer_user(socket: impl AsFd) -> Result<u32> {
    let who = peer_identity(socket)?;
    who.map(|who| who.uid).ok_or_else(|| Error::Other("the socket has no other end".into()))
}

/// What a unix socket tells of who made its other end, or listens on it (`SO_PEERCRED`, `SO_PEERGROUPS`); `None` where it tells of nobody,
/// as one that was never connected.
pub fn peer_identity(socket: impl AsFd) -> Result<Option<Identity>> {
    const SOL: u32 = libc::SOL_SOCKET as u32;
    const WORD: usize = size_of::<libc::gid_t>();
    /// `NGROUPS_MAX`
    const MOST: usize = 65_536;
    let word = |bytes: &[u8]| bytes.try_into().map_or(u32::MAX, u32::from_ne_bytes);
    let told = |bytes| option_of(&socket, SOL, libc::SO_PEERGROUPS as u32, bytes);
    let groups = match told(64 * WORD) {
        Err(e) if e.errno() == Some(libc::ERANGE) => told(MOST * WORD),
        groups => groups,
    };
    let groups = match groups {
        Err(e) if e.errno() == Some(libc::ENODATA) => return Ok(None),
        groups => groups?.unwrap_or_default(),
    };
    // struct ucred: process, user and group id.
    let told =
        option_of(&socket, SOL, libc::SO_PEERCRED as u32, size_of::<libc::ucred>())?.unwrap_or_default();
    let (Some(uid), Some(gid)) = (told.get(4..8).map(word), told.get(8..12).map(word)) else {
        return Ok(None);
    };
    let mut groups: Vec<u32> = groups.chunks_exact(WORD).map(word).collect();
    // The kernel sorts by numbers that are not those of our user namespace.
    groups.sort_unstable();
    Ok(Some(Identity { uid, gid, groups }).filter(|who| who.uid != u32::MAX))
}

/// Whether a packet filter is attached (`SO_GET_FILTER`).
pub fn has_filter(socket: impl AsFd) -> Result<bool> {
    let mut len: libc::socklen_t = 0;
    // SAFETY: the length of this option counts instructions; for none of them the kernel writes nothing but how many
    // there are.
    let r = unsafe {
        let fd = socket.as_fd().as_raw_fd();
        let nothing = std::ptr::null_mut();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_GET_FILTER, nothing, &raw mut len)
    };
    match check(|| "look for a packet filter".into(), r.into()) {
        Ok(_) => Ok(len > 0),
        Err(e) if e.errno() == Some(libc::EACCES) => Ok(true), // not a classic one
        Err(e) => Err(e),
    }
}

/// The packet filter of a socket: its instructions, 8 bytes each. `None` if it has none that can be read: there is none, or
/// it is not a classic one.
pub fn filter(socket: impl AsFd) -> Result<Option<Vec<u8>>> {
    const MOST: usize = 4096; // BPF_MAXINSNS
    let mut program = vec![0u8; MOST * 8];
    let mut len = MOST as libc::socklen_t;
    // SAFETY: the length counts instructions of 8 bytes, for as many of which there is room.
    let r = unsafe {
        let (fd, at) = (socket.as_fd().as_raw_fd(), program.as_mut_ptr().cast());
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_GET_FILTER, at, &raw mut len)
    };
    match check(|| "read a packet filter".into(), r.into()) {
        Ok(_) => {
            program.truncate(len as usize * 8);
            Ok(Some(program).filter(|p| !p.is_empty()))
        }
        Err(e) if e.errno() == Some(libc::EACCES) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Attaches a packet filter as [`filter`] returned it.
pub fn attach_filter(socket: impl AsFd, program: &[u8]) -> Result<()> {
    let instructions: Vec<libc::sock_filter> = program
        .chunks_exact(8)
        .map(|i| libc::sock_filter {
            code: u16::from_ne_bytes([i[0], i[1]]),
            jt: i[2],
            jf: i[3],
            k: u32::from_ne_bytes([i[4], i[5], i[6], i[7]]),
        })
        .collect();
    let len = u16::try_from(instructions.len());
    let len = len.map_err(|_| Error::Other("a packet filter is too long".into()))?;
    let filter = libc::sock_fprog { len, filter: instructions.as_ptr().cast_mut() };
    // SAFETY: the kernel reads the record, and as many instructions as it tells, which live until then.
    let r = unsafe {
        let (fd, at) = (socket.as_fd().as_raw_fd(), (&raw const filter).cast());
        let size = size_of::<libc::sock_fprog>() as libc::socklen_t;
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, at, size)
    };
    check(|| "attach a packet filter".into(), r.into()).map(drop)
}

/// Has what is sent to a socket pass its packet filter, while `act` sends it: what lies in its queue has passed it, or came before it was there.
///
/// # Errors
/// That the filter cannot be put by: it is locked (`SO_LOCK_FILTER`), or not a classic one.
pub fn without_filter<T>(socket: impl AsFd, act: impl FnOnce() -> T) -> Result<T> {
    if !has_filter(&socket)? {
        return Ok(act());
    }
    let program = filter(&socket)?;
    let program = program.ok_or_else(|| Error::Other("its packet filter cannot be read".into()))?;
    let nothing = 0i32.to_ne_bytes();
    set_option(&socket, libc::SOL_SOCKET as u32, libc::SO_DETACH_FILTER as u32, &nothing)?;
    let done = act();
    attach_filter(&socket, &program)?;
    Ok(done)
}

/// Whether a packet filter can be put by for a moment ([`without_filter`]), or there is none.
pub fn may_be_without_filter(socket: impl AsFd) -> Result<bool> {
    let locked = || int_option(&socket, libc::SOL_SOCKET as u32, libc::SO_LOCK_FILTER as u32);
    Ok(!has_filter(&socket)? || filter(&socket)?.is_some() && locked()? != Some(1))
}

/// Sets an option.
pub fn set_option(socket: impl AsFd, level: u32, name: u32, value: &[u8]) -> Result<()> {
    // SAFETY: the kernel reads `value.len()` bytes.
    let r = unsafe {
        let fd = socket.as_fd().as_raw_fd();
        libc::setsockopt(fd, level as i32, name as i32, value.as_ptr().cast(), value.len() as libc::socklen_t)
    };
    check(|| format!("set socket option {level}/{name}"), r.into()).map(drop)
}

fn address(
    fd: i32,
    call: unsafe extern "C" fn(i32, *mut libc::sockaddr, *mut libc::socklen_t) -> i32,
) -> Result<Vec<u8>, std::io::Error> {
    let mut raw = vec![0u8; 128];
    let mut len = raw.len() as libc::socklen_t;
    // SAFETY: getsockname and getpeername write at most `len` bytes into the buffer.
    let r = unsafe { call(fd, raw.as_mut_ptr().cast(), &raw mut len) };
    if r < 0 {
        return Err(std::io::Error::last_os_error());
    }
    raw.truncate(len as usize);
    Ok(raw)
}

/// Address and port of an internet address, of IPv4 as IPv6 writes it.
pub type Endpoint = ([u8; 16], [u8; 2]);

/// Address and port in a raw `sockaddr`, the same in both families for the same; none of other families.
pub fn endpoint(raw: &[u8]) -> Option<Endpoint> {
    let family = i32::from(u16::from_ne_bytes(raw.get(..2)?.try_into().ok()?));
    let port = raw.get(2..4)?.try_into().ok()?;
    let mut ip = [0; 16];
    match family {
        libc::AF_INET => {
            ip[10..12].copy_from_slice(&[0xff; 2]);
            ip[12..].copy_from_slice(raw.get(4..8)?);
        }
        libc::AF_INET6 => ip.copy_from_slice(raw.get(8..24)?),
        _ => return None,
    }
    Some((ip, port))
}

/// Local address: raw `sockaddr`.
pub fn local_address(socket: impl AsFd) -> Result<Vec<u8>> {
    address(socket.as_fd().as_raw_fd(), libc::getsockname).map_err(|e| Error::call("getsockname", e))
}

/// Address of the peer, raw `sockaddr`; `None` if not connected.
pub fn peer_address(socket: impl AsFd) -> Result<Option<Vec<u8>>> {
    match address(socket.as_fd().as_raw_fd(), libc::getpeername) {
        Ok(a) => Ok(Some(a)),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTCONN | libc::EINVAL)) => Ok(None),
        Err(e) => Err(Error::call("getpeername", e)),
    }
}

/// Binds to a raw `sockaddr`.
pub fn bind(socket: impl AsFd, address: &[u8]) -> Result<(), std::io::Error> {
    // SAFETY: the kernel reads `address.len()` bytes.
    let r = unsafe {
        let len = address.len() as libc::socklen_t;
        libc::bind(socket.as_fd().as_raw_fd(), address.as_ptr().cast(), len)
    };
    if r < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Connects to a raw `sockaddr`.
pub fn connect(socket: impl AsFd, address: &[u8]) -> Result<(), std::io::Error> {
    // SAFETY: the kernel reads `address.len()` bytes.
    let r = unsafe {
        let len = address.len() as libc::socklen_t;
        libc::connect(socket.as_fd().as_raw_fd(), address.as_ptr().cast(), len)
    };
    if r < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Binds a socket to an address of the loopback device, with any port; gives it.
pub fn bind_to_loopback(socket: impl AsFd, family: i32) -> Result<Vec<u8>> {
    let mut last = None;
    for address in loopback(family) {
        match bind(&socket, &address) {
            Ok(()) => return local_address(&socket),
            Err(e) => last = Some(e),
        }
    }
    Err(Error::call("bind to the loopback device", last.unwrap_or(std::io::ErrorKind::Unsupported.into())))
}

/// Addresses of the loopback device with any port: `sockaddr_in`, or `sockaddr_in6` of IPv6 and of IPv4.
fn loopback(family: i32) -> Vec<Vec<u8>> {
    const V4: [u8; 4] = [127, 0, 0, 1];
    let head = (family as u16).to_ne_bytes();
    if family == libc::AF_INET {
        return vec![[&head[..], &[0; 2], &V4, &[0; 8]].concat()];
    }
    let (mut v6, mut mapped) = ([0; 16], [0; 16]);
    v6[15] = 1;
    mapped[10..12].copy_from_slice(&[0xff; 2]);
    mapped[12..].copy_from_slice(&V4);
    [v6, mapped].iter().map(|ip| [&head[..], &[0; 6], ip, &[0; 4]].concat()).collect()
}

/// Sends one message without waiting and without raising `SIGPIPE`; returns the bytes taken.
pub fn send(socket: impl AsFd, message: &[u8]) -> Result<usize, std::io::Error> {
    // SAFETY: the kernel reads `message.len()` bytes.
    let r = unsafe {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        libc::send(socket.as_fd().as_raw_fd(), message.as_ptr().cast(), message.len(), flags)
    };
    if r < 0 { Err(std::io::Error::last_os_error()) } else { Ok(r as usize) }
}

/// `SO_BUF_LOCK`: which buffer sizes were set by hand.
pub(crate) const BUFFER_LOCK: u32 = 72;

/// Has a socket take so many bytes more than it would, while `act` sends them; then its buffer is as large as it was.
pub fn with_room<T>(socket: impl AsFd, bytes: usize, act: impl FnOnce() -> T) -> Result<T> {
    let before = send_buffer(&socket)?;
    enlarge(&socket, bytes)?;
    let done = act();
    set_send_buffer(&socket, before / 2)?;
    Ok(done)
}

/// Makes room for so many bytes more among those that were sent, or as many as it may have; gives how much there is.
pub fn enlarge(socket: impl AsFd, bytes: usize) -> Result<i32> {
    const SPARE: i32 = 1 << 16;
    let more = i32::try_from(bytes).unwrap_or(i32::MAX / 4) + SPARE;
    let before = send_buffer(&socket)?;
    let wanted = (before / 2).saturating_add(more);
    // What the kernel has given may be more than what those without `CAP_NET_ADMIN` get by asking.
    let probe = self::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0)?;
    set_send_buffer(&probe, wanted)?;
    if send_buffer(&probe)? > before {
        set_send_buffer(&socket, wanted)?;
    }
    send_buffer(socket)
}

fn send_buffer(socket: impl AsFd) -> Result<i32> {
    Ok(int_option(socket, libc::SOL_SOCKET as u32, libc::SO_SNDBUF as u32)?.unwrap_or(0))
}

/// The kernel doubles what it is told, and caps it for those without `CAP_NET_ADMIN`. It goes on choosing the size where it did.
fn set_send_buffer(socket: impl AsFd, half: i32) -> Result<()> {
    const SOL: u32 = libc::SOL_SOCKET as u32;
    let locked = int_option(&socket, SOL, BUFFER_LOCK)?;
    let half = half.to_ne_bytes();
    set_option(&socket, SOL, libc::SO_SNDBUFFORCE as u32, &half)
        .or_else(|_| set_option(&socket, SOL, libc::SO_SNDBUF as u32, &half))?;
    locked.map_or(Ok(()), |locked| set_option(&socket, SOL, BUFFER_LOCK, &locked.to_ne_bytes()))
}

/// The unread messages of a unix socket, left where they are: one entry a message, or one in all for a stream.
///
/// `SO_PEEK_OFF` makes successive peeks walk along the queue. It is state of the socket, so it is put back to what
/// it was; the owner must stand still meanwhile. A pending error (`POLLERR`) would be taken by the first peek: callers
/// look for one first.
pub fn peek_all(socket: impl AsFd, stream: bool) -> Result<Vec<Vec<u8>>> {
    let sol = libc::SOL_SOCKET as u32;
    let before = int_option(&socket, sol, libc::SO_PEEK_OFF as u32)?.unwrap_or(-1);
    set_option(&socket, sol, libc::SO_PEEK_OFF as u32, &0i32.to_ne_bytes())?;
    let messages = peek_walk(&socket, stream);
    set_option(&socket, sol, libc::SO_PEEK_OFF as u32, &before.to_ne_bytes())?;
    let messages = messages?;
    if stream && !messages.is_empty() { Ok(vec![messages.concat()]) } else { Ok(messages) }
}

fn peek_walk(socket: impl AsFd, stream: bool) -> Result<Vec<Vec<u8>>> {
    let fd = socket.as_fd().as_raw_fd();
    let mut messages = Vec::new();
    // A stream is read just to its last byte: asking for more would take a pending error.
    let mut left = if stream { crate::descriptors::readable(&socket)? as usize } else { usize::MAX };
    let mut buffer = vec![0u8; 1 << 18];
    while left > 0 {
        // SAFETY: the kernel writes at most `buffer.len()` bytes. MSG_TRUNC makes it return the length of the whole
        // message; streams do without, as there it has another meaning.
        let n = unsafe {
            let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | if stream { 0 } else { libc::MSG_TRUNC };
            libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), flags)
        };
        if n < 0 {
            let error = std::io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN) => return Ok(messages),
                _ => return Err(Error::call("peek at the queue of a socket", error)),
            }
        }
        let n = n as usize;
        if n > buffer.len() {
            return Err(Error::Other(format!("a message of {n} bytes in the queue of a socket")));
        }
        // Nothing on a stream, or on a socket that was shut down, is its end.
        if n == 0 && (stream || !has_message(fd)?) {
            return Ok(messages);
        }
        messages.push(buffer[..n].to_vec());
        left = if stream { left.saturating_sub(n) } else { left };
        if messages.len() > 100_000 {
            return Err(Error::Other("more than 100,000 messages in the queue of a socket".into()));
        }
    }
    Ok(messages)
}

/// Tells an empty message from the end of a sequenced-packet connection: only a message has a sender's length.
fn has_message(fd: i32) -> Result<bool> {
    let mut events = libc::pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid pollfd; returns at once.
    let r = unsafe { libc::poll(&raw mut events, 1, 0) };
    check(|| "poll a socket".into(), r.into())?;
    Ok(events.revents & libc::POLLRDHUP == 0)
}

/// A handle (`O_PATH`) to the file that a unix socket was bound to, wherever that is by now.
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN` where the socket is.
pub fn bound_file(socket: impl AsFd) -> Result<OwnedFd> {
    const SIOCUNIXFILE: libc::Ioctl = 0x89e0;
    // SAFETY: touches no memory; the result is a new descriptor nobody owns, close-on-exec.
    unsafe {
        let r = libc::ioctl(socket.as_fd().as_raw_fd(), SIOCUNIXFILE, 0);
        Ok(OwnedFd::from_raw_fd(check(|| "open the file of a unix socket".into(), r.into())? as i32))
    }
}

/// As [`bind`], by a name that is relative to a folder, or absolute with that as the root: by a thread that has folders of its own.
///
/// # Errors
/// That the folder cannot be entered, or made the root (`CAP_SYS_CHROOT`), or as [`bind`].
pub fn bind_in(folder: &Path, socket: impl AsFd + Sync, address: &[u8]) -> std::io::Result<()> {
    let work = || {
        // SAFETY: file descriptors stay shared; whoever else could rely on the folder of this thread has just been parted from it.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) }?;
        rustix::process::chdir(folder)?;
        if address.get(2) == Some(&b'/') {
            rustix::process::chroot(".")?;
        }
        bind(&socket, address)
    };
    let failed = |_| Err(std::io::Error::other("binding a socket failed inside stillpoint"));
    std::thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(failed))
}

/// What `sock_diag(7)` tells about a unix socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnixSocket {
    /// Inode number of the socket.
    pub ino: u32,
    /// `SOCK_*`.
    pub kind: u8,
    /// `TCP_LISTEN` (10), `TCP_ESTABLISHED` (1), `TCP_CLOSE` (7).
    pub state: u8,
    /// `sun_path` as bound; empty if unnamed. Abstract names begin with a zero byte.
    pub name: Vec<u8>,
    /// Inode and device (kernel encoding, `major << 20 | minor`) of its name in the file system.
    pub vfs: Option<(u32, u32)>,
    /// Inode number of the peer; 0: it is gone.
    pub peer: Option<u32>,
    /// Bytes to read, or connections to accept.
    pub receive_queue: u32,
    /// Bytes sent and not read, or the backlog.
    pub send_queue: u32,
    /// `RCV_SHUTDOWN` 1, `SEND_SHUTDOWN` 2.
    pub shutdown: u8,
    /// Inode numbers of the other ends of connections that wait to be accepted, in their order; 0: it is gone.
    pub pending: Vec<u32>,
}

/// Name, file, peer, waiting connections, queue lengths.
const UDIAG_SHOW: u32 = 1 | 2 | 4 | 8 | 16;

/// All unix sockets of our network namespace.
pub fn unix_sockets() -> Result<Vec<UnixSocket>> {
    let mut body = vec![libc::AF_UNIX as u8, 0, 0, 0]; // struct unix_diag_req
    body.extend_from_slice(&u32::MAX.to_ne_bytes()); // states
    body.extend_from_slice(&0u32.to_ne_bytes()); // inode
    body.extend_from_slice(&UDIAG_SHOW.to_ne_bytes());
    body.extend_from_slice(&[0; 8]); // cookie
    let (kind, flags, what) = (netlink::SOCK_DIAG_BY_FAMILY, netlink::DUMP, "ask sock_diag for unix sockets");
    let request = netlink::Request { family: netlink::SOCK_DIAG, kind, flags, body: &body, what };
    let mut found = Vec::new();
    request.answers(&request.send()?, &mut found, parse_unix)?;
    Ok(found)
}

/// `struct unix_diag_msg` and its attributes.
fn parse_unix(body: &[u8]) -> Option<UnixSocket> {
    let mut socket =
        UnixSocket { kind: *body.get(1)?, state: *body.get(2)?, ino: u32_at(body, 4)?, ..Default::default() };
    for attribute in attributes(body.get(16..)?) {
        let (kind, value) = attribute?;
        match kind {
            0 => socket.name = value.to_vec(),
            1 => socket.vfs = Some((u32_at(value, 0)?, u32_at(value, 4)?)),
            2 => socket.peer = Some(u32_at(value, 0)?),
            3 => {
                let words = value.chunks_exact(4);
                socket.pending = words.map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
            }
            4 => (socket.receive_queue, socket.send_queue) = (u32_at(value, 0)?, u32_at(value, 4)?),
            6 => socket.shutdown = *value.first()?,
            _ => {}
        }
    }
    Some(socket)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_the_same_in_both_families() {
        let v4 = [&2u16.to_ne_bytes()[..], &[0x1f, 0x90], &[10, 0, 0, 1], &[0; 8]].concat();
        let mut v6 = [&10u16.to_ne_bytes()[..], &[0x1f, 0x90], &[0; 4], &[0; 20]].concat();
        v6[18..24].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
        assert_eq!(endpoint(&v4).unwrap(), endpoint(&v6).unwrap());
        assert_eq!(endpoint(&v4[..6]), None);
        assert_eq!(endpoint(&[0, 0]), None);
        assert_eq!(endpoint(&[]), None);
    }

    fn ino(fd: &OwnedFd) -> u32 {
        rustix::fs::fstat(fd).unwrap().st_ino as u32
    }

    #[test]
    fn datagrams_are_peeked_one_by_one_and_stay() {
        let (a, b) = pair(libc::SOCK_DGRAM).unwrap();
        for m in [&b"one"[..], b"", b"three"] {
            send(&a, m).unwrap();
        }
        let expected = vec![b"one".to_vec(), vec![], b"three".to_vec()];
        assert_eq!(peek_all(&b, false).unwrap(), expected);
        assert_eq!(int_option(&b, libc::SOL_SOCKET as u32, libc::SO_PEEK_OFF as u32).unwrap(), Some(-1));
        let mut buffer = [0u8; 8];
        assert_eq!(rustix::io::read(&b, &mut buffer).unwrap(), 3);
    }

    /// The last piece may go beyond the size of the buffer, so that what it holds does not fit it in other pieces.
    #[test]
    fn what_was_in_a_full_socket_fits_it_in_other_pieces() {
        const PIECES: [usize; 7] = [36_544, 36_544, 36_544, 36_544, 36_544, 24_000, 36_544];
        let all = vec![7u8; PIECES.iter().sum()];
        let again = |a: &OwnedFd| {
            let mut rest = &all[..];
            while !rest.is_empty() {
                rest = &rest[send(a, rest)?..];
            }
            std::io::Result::Ok(())
        };
        let size = |a: &OwnedFd| {
            (send_buffer(a).unwrap(), int_option(a, libc::SOL_SOCKET as u32, BUFFER_LOCK).unwrap())
        };
        let (a, b) = pair(libc::SOCK_STREAM).unwrap();
        PIECES.into_iter().for_each(|piece| assert_eq!(send(&a, &all[..piece]).unwrap(), piece));
        let (before, mut buffer) = (size(&a), vec![0; all.len()]);
        assert_eq!(rustix::io::read(&b, &mut buffer).unwrap(), all.len());
        assert_eq!(again(&a).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        while rustix::net::recv(&b, &mut *buffer, rustix::net::RecvFlags::DONTWAIT).is_ok() {}
        with_room(&a, all.len(), || again(&a)).unwrap().unwrap();
        assert_eq!(rustix::io::read(&b, &mut buffer).unwrap(), all.len());
        assert_eq!(size(&a), before);
    }

    #[test]
    fn a_stream_is_peeked_whole() {
        let (a, b) = pair(libc::SOCK_STREAM).unwrap();
        for _ in 0..50 {
            send(&a, &[9; 1000]).unwrap();
        }
        assert_eq!(peek_all(&b, true).unwrap(), vec![vec![9; 50_000]]);
        assert_eq!(crate::descriptors::readable(&b).unwrap(), 50_000);
        drop(a);
        assert_eq!(peek_all(&b, true).unwrap().concat().len(), 50_000);
    }

    #[test]
    fn seqpackets_end_where_the_peer_left() {
        let (a, b) = pair(libc::SOCK_SEQPACKET).unwrap();
        send(&a, b"x").unwrap();
        send(&a, b"yy").unwrap();
        drop(a);
        assert_eq!(peek_all(&b, false).unwrap(), vec![b"x".to_vec(), b"yy".to_vec()]);
    }

    #[test]
    fn sock_diag_finds_peers_and_shutdown() {
        let (a, b) = pair(libc::SOCK_STREAM).unwrap();
        send(&a, b"abc").unwrap();
        rustix::net::shutdown(&a, rustix::net::Shutdown::Write).unwrap();
        let all = unix_sockets().unwrap();
        let of = |fd: &OwnedFd| all.iter().find(|s| s.ino == ino(fd)).unwrap().clone();
        assert_eq!(of(&a).peer, Some(ino(&b)));
        assert_eq!((of(&a).shutdown, of(&b).shutdown), (2, 1));
        assert_eq!(of(&b).receive_queue, 3);
    }
}
