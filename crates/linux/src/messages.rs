//! Messages of unix sockets with all that goes with them: descriptors, credentials, who sent them. `unix(7)`, `cmsg(3)`.

use crate::descriptors::{check, readable};
use crate::sockets::{self, int_option, set_option};
use crate::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const SOL: u32 = libc::SOL_SOCKET as u32;
const PEEK_OFF: u32 = libc::SO_PEEK_OFF as u32;
/// Longest message, bytes.
const LONGEST: usize = 1 << 20;
/// Most descriptors that go with a message (`SCM_MAX_FD`).
const MOST_FILES: usize = 253;
/// Most messages in a queue.
const MOST: usize = 100_000;

/// `struct ucred`: who sent a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Process, in our pid namespace; 0 if nobody said.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A message, or a run of bytes of a stream with which the same things go.
#[derive(Debug, Default)]
pub struct Message {
    /// Its bytes.
    pub data: Vec<u8>,
    /// Our duplicates of the descriptors that go with it.
    pub files: Vec<OwnedFd>,
    /// Who sent it, where the socket asks for that (`SO_PASSCRED`).
    pub credentials: Option<Credentials>,
    /// Name of the socket that sent it: raw `sockaddr`, empty if it had none.
    pub sender: Vec<u8>,
    /// Something goes with it that is not known here.
    pub has_more: bool,
}

impl Message {
    /// Whether there is nothing to it, as to the end of a connection.
    fn is_bare(&self) -> bool {
        self.data.is_empty() && self.files.is_empty() && self.credentials.is_none()
    }
}

/// The unread messages of a unix socket, left where they are; of a stream, runs of bytes.
///
/// `SO_PEEK_OFF` is state of the socket; it is put back to what it was. The owner must stand still meanwhile.
pub fn peek_all(socket: impl AsFd, stream: bool) -> Result<Vec<Message>> {
    let before = int_option(&socket, SOL, PEEK_OFF)?.unwrap_or(-1);
    let messages = if stream { peek_stream(&socket) } else { peek_messages(&socket) };
    set_option(&socket, SOL, PEEK_OFF, &before.to_ne_bytes())?;
    messages
}

fn begin_at(socket: impl AsFd, offset: usize) -> Result<()> {
    let offset = i32::try_from(offset).map_err(|e| Error::Other(e.to_string()))?;
    set_option(socket, SOL, PEEK_OFF, &offset.to_ne_bytes())
}

/// Peeks at an offset pass over empty messages that were peeked at before: by somebody else, or at an earlier look. The
/// first message shows without an offset, whatever it is. For others see [`weight`].
fn peek_messages(socket: impl AsFd) -> Result<Vec<Message>> {
    let mut messages = Vec::new();
    set_option(&socket, SOL, PEEK_OFF, &(-1i32).to_ne_bytes())?;
    let hung_up = crate::descriptors::poll_now(&socket, libc::POLLRDHUP)? & libc::POLLRDHUP != 0;
    let first = peek(&socket, LONGEST, true)?.filter(|m| m.data.is_empty());
    messages.extend(first.filter(|m| !hung_up || !m.is_bare()));
    begin_at(&socket, 0)?;
    while let Some(message) = peek(&socket, LONGEST, true)? {
        if hung_up && message.is_bare() {
            break; // the end of a connection
        }
        messages.push(message);
        if messages.len() > MOST {
            return Err(Error::Other(format!("more than {MOST} messages in the queue of a socket")));
        }
    }
    Ok(messages)
}

/// A peek at a stream goes on over messages to which nothing is attached until one with descriptors, and stops behind it.
/// Where that one begins is not told: see [`weight`].
fn peek_stream(socket: impl AsFd) -> Result<Vec<Message>> {
    let (mut at, end) = (0, readable(&socket)? as usize);
    let mut messages: Vec<Message> = Vec::new();
    begin_at(&socket, 0)?;
    while at < end {
        let Some(message) = peek(&socket, (end - at).min(LONGEST), false)? else { break };
        if message.data.is_empty() || messages.len() > MOST {
            return Err(Error::Other("the queue of a socket cannot be copied".into()));
        }
        at += message.data.len();
        messages.push(message);
    }
    Ok(messages)
}

/// Memory that what a unix socket has sent, and the other end has not read, takes in the kernel (`SIOCOUTQ`), bytes.
pub fn outgoing(socket: impl AsFd) -> Result<u32> {
    let mut bytes = 0i32;
    // SAFETY: the kernel writes one int.
    let r = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    check(|| "look at the queue of a socket".into(), r.into())?;
    Ok(bytes as u32)
}

/// Memory that these messages take in the kernel if each was sent by itself, on a socket of that kind; `None` if they do not
/// fit a new one.
///
/// Each has a head of some hundred bytes, and room for its data in steps that double: two messages never take what
/// their data takes in one. So where the sender's [`outgoing`] is the same, these are the messages that were sent.
pub fn weight(kind: i32, messages: &[Message]) -> Result<Option<u32>> {
    let (a, _b) = sockets::pair(kind)?;
    for message in messages {
        if send(&a, &message.data, &[], None, &[]).ok() != Some(message.data.len()) {
            return Ok(None);
        }
    }
    outgoing(&a).map(Some)
}

/// Room for the control messages that may come: descriptors, credentials, a pidfd, a security label.
#[repr(align(8))]
struct Control([u8; 4096]);

fn peek(socket: impl AsFd, most: usize, whole: bool) -> Result<Option<Message>> {
    let mut data = vec![0u8; most];
    let mut control = Control([0; 4096]);
    let mut sender = vec![0u8; 128];
    let mut part = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() };
    // SAFETY: the structure has pointers and numbers only, for all of which zero is a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = sender.as_mut_ptr().cast();
    header.msg_namelen = sender.len() as libc::socklen_t;
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    let flags = if whole { flags | libc::MSG_TRUNC } else { flags };
    // SAFETY: every pointer of the header leads to a buffer of the length that it states and that outlives the call.
    let n = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut header, flags) };
    if n < 0 {
        let error = std::io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(None),
            _ => Err(Error::call("peek at the queue of a socket", error)),
        };
    }
    let mut message = Message::default();
    // SAFETY: the kernel has filled in the header that these buffers belong to.
    unsafe { read_control(&header, &mut message) };
    if n as usize > data.len() {
        return Err(Error::Other(format!("a message of {n} bytes in the queue of a socket")));
    }
    data.truncate(n as usize);
    // A connection of streams tells no name; the kernel then leaves the length as it is or says 0.
    let named = whole && header.msg_namelen as usize > 2 && header.msg_namelen as usize <= 110;
    sender.truncate(if named { header.msg_namelen as usize } else { 0 });
    message.has_more |= header.msg_flags & libc::MSG_CTRUNC != 0;
    Ok(Some(Message { data, sender, ..message }))
}

/// `SO_PASSPIDFD`: a message comes with a handle to who sent it.
pub const PASS_PIDFD: u32 = 76;
/// `linux/socket.h`
const SCM_PIDFD: i32 = 4;

/// # Safety
/// The header is one that `recvmsg` has just filled in, with its control buffer still there.
unsafe fn read_control(header: &libc::msghdr, message: &mut Message) {
    // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR stay inside the control buffer, and each header states the length of its
    // data; descriptors in it are new ones that nobody owns.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(header);
        while !next.is_null() {
            let c = &*next;
            let len = c.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            let data = libc::CMSG_DATA(next);
            match (c.cmsg_level, c.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for i in 0..len / 4 {
                        let fd = data.cast::<i32>().add(i).read_unaligned();
                        message.files.push(OwnedFd::from_raw_fd(fd));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len == size_of::<libc::ucred>() => {
                    let who = data.cast::<libc::ucred>().read_unaligned();
                    message.credentials =
                        Some(Credentials { pid: who.pid as u32, uid: who.uid, gid: who.gid });
                }
                // A handle to who sent it, if he is there still: the credentials tell who that is.
                (libc::SOL_SOCKET, SCM_PIDFD) if len == size_of::<i32>() => {
                    let fd = data.cast::<i32>().read_unaligned();
                    if fd >= 0 {
                        drop(OwnedFd::from_raw_fd(fd));
                    }
                }
                _ => message.has_more = true,
            }
            next = libc::CMSG_NXTHDR(header, next);
        }
    }
}

/// Sends a message with what goes with it, without waiting and without raising `SIGPIPE`, to the other end or (if it is
/// not empty) to an address; returns the bytes taken.
pub fn send(
    socket: impl AsFd,
    data: &[u8],
    files: &[i32],
    credentials: Option<Credentials>,
    to: &[u8],
) -> Result<usize, std::io::Error> {
    if files.len() > MOST_FILES {
        return Err(std::io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut control = Control([0; 4096]);
    let mut part = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
    // SAFETY: as in `peek`.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = if to.is_empty() { std::ptr::null_mut() } else { to.as_ptr().cast_mut().cast() };
    header.msg_namelen = to.len() as libc::socklen_t;
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    let mut at = 0;
    if !files.is_empty() {
        let bytes: Vec<u8> = files.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
        at += put_control(&mut control.0[at..], libc::SCM_RIGHTS, &bytes);
    }
    if let Some(who) = credentials {
        let bytes = [who.pid, who.uid, who.gid].map(u32::to_ne_bytes).concat();
        at += put_control(&mut control.0[at..], libc::SCM_CREDENTIALS, &bytes);
    }
    if at > 0 {
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = at;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: as in `peek`; the kernel only reads.
    let n = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const header, flags) };
    if n < 0 { Err(std::io::Error::last_os_error()) } else { Ok(n as usize) }
}

/// Writes one control message; returns the room it takes.
fn put_control(room: &mut [u8], kind: i32, data: &[u8]) -> usize {
    let head = size_of::<libc::cmsghdr>();
    room[..8].copy_from_slice(&(head + data.len()).to_ne_bytes());
    room[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    room[12..16].copy_from_slice(&kind.to_ne_bytes());
    room[head..head + data.len()].copy_from_slice(data);
    (head + data.len()).next_multiple_of(8)
}

const _: () = assert!(size_of::<libc::cmsghdr>() == 16);
const _: () = assert!(16 + 4 * MOST_FILES + 8 + 16 + 16 <= 4096);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sockets::pair;

    fn seen(messages: &[Message]) -> Vec<(String, usize)> {
        messages.iter().map(|m| (String::from_utf8_lossy(&m.data).into(), m.files.len())).collect()
    }

    #[test]
    fn descriptors_stay_with_their_bytes() {
        let (a, b) = pair(libc::SOCK_STREAM).unwrap();
        let fd = a.as_raw_fd();
        for (text, files) in [("three", 2), ("4", 1), ("five", 1), ("7", 0)] {
            assert_eq!(send(&a, text.as_bytes(), &[fd; 2][..files], None, &[]).unwrap(), text.len());
        }
        let expected = [("three", 2), ("4", 1), ("five", 1), ("7", 0)];
        for _ in 0..2 {
            let found = peek_all(&b, true).unwrap();
            assert_eq!(seen(&found), expected.map(|(text, files)| (text.to_owned(), files)));
            assert_eq!(weight(libc::SOCK_STREAM, &found).unwrap(), Some(outgoing(&a).unwrap()));
        }
        assert_eq!(int_option(&b, SOL, PEEK_OFF).unwrap(), Some(-1));
    }

    #[test]
    fn what_was_sent_apart_weighs_more() {
        for (first, second) in [(1, 1), (1, 4000), (190, 1610), (3000, 1), (500, 500), (10_000, 20_000)] {
            let (a, b) = pair(libc::SOCK_STREAM).unwrap();
            send(&a, &vec![1; first], &[], None, &[]).unwrap();
            send(&a, &vec![2; second], &[a.as_raw_fd()], None, &[]).unwrap();
            let found = peek_all(&b, true).unwrap();
            assert_eq!(found.len(), 1);
            assert_ne!(
                weight(libc::SOCK_STREAM, &found).unwrap(),
                Some(outgoing(&a).unwrap()),
                "{first} and {second}"
            );
        }
    }

    #[test]
    fn an_empty_message_is_missed_by_its_weight() {
        for (texts, twice) in [([&b""[..], b"x"], 2), ([b"x", b""], 1)] {
            let (a, b) = pair(libc::SOCK_DGRAM).unwrap();
            for text in texts {
                send(&a, text, &[], None, &[]).unwrap();
            }
            let mut found = peek_all(&b, false).unwrap();
            for expected in [2, twice] {
                assert_eq!(found.len(), expected);
                let same = weight(libc::SOCK_DGRAM, &found).unwrap() == Some(outgoing(&a).unwrap());
                assert_eq!(same, expected == 2);
                found = peek_all(&b, false).unwrap();
            }
        }
    }

    #[test]
    fn messages_keep_their_bounds_and_senders() {
        let (a, b) = pair(libc::SOCK_SEQPACKET).unwrap();
        send(&a, b"", &[a.as_raw_fd()], None, &[]).unwrap();
        send(&a, b"x", &[], None, &[]).unwrap();
        drop(a);
        assert_eq!(seen(&peek_all(&b, false).unwrap()), [(String::new(), 1), ("x".into(), 0)]);
        let to = sockets::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
        sockets::bind(&to, &(libc::AF_UNIX as u16).to_ne_bytes()).unwrap(); // a name of the kernel's choice
        let from = sockets::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
        let address = sockets::local_address(&to).unwrap();
        let nameless = sockets::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
        send(&nameless, b"nameless", &[], None, &address).unwrap();
        sockets::bind(&from, &(libc::AF_UNIX as u16).to_ne_bytes()).unwrap();
        send(&from, b"named", &[], None, &address).unwrap();
        let found = peek_all(&to, false).unwrap();
        assert_eq!(found[0].sender, Vec::<u8>::new());
        assert_eq!(found[1].sender, sockets::local_address(&from).unwrap());
    }

    #[test]
    fn credentials_are_those_given() {
        let (a, b) = pair(libc::SOCK_DGRAM).unwrap();
        let us = Credentials { pid: std::process::id(), uid: 0, gid: 0 };
        if send(&a, b"x", &[], Some(us), &[]).is_err() {
            return; // not root
        }
        assert_eq!(peek_all(&b, false).unwrap()[0].credentials, None);
        set_option(&b, SOL, libc::SO_PASSCRED as u32, &1i32.to_ne_bytes()).unwrap();
        assert_eq!(peek_all(&b, false).unwrap()[0].credentials, Some(us));
    }
}
