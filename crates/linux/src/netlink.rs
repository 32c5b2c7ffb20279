//! What the kernel tells over netlink, message by message. `netlink(7)`, `sock_diag(7)`.

use crate::descriptors::check;
use crate::sockets::{send, socket};
use crate::{Error, Result};
use std::os::fd::{AsRawFd, OwnedFd};

/// `NETLINK_SOCK_DIAG`.
pub const SOCK_DIAG: i32 = 4;
/// Its request for sockets.
pub const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `NLM_F_ACK`.
pub const ACKNOWLEDGE: u16 = 4;
/// `NLM_F_DUMP`.
pub const DUMP: u16 = 0x300;

const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Which part of the kernel is asked (`NETLINK_*`).
    pub family: i32,
    /// Type of the message.
    pub kind: u16,
    /// Flags besides that it is a request.
    pub flags: u16,
    /// What follows the head.
    pub body: &'a [u8],
    /// For errors.
    pub what: &'a str,
}

impl Request<'_> {
    /// Sends it on a socket of its own.
    pub fn send(&self) -> Result<OwnedFd> {
        let netlink = socket(libc::AF_NETLINK, libc::SOCK_RAW, self.family)?;
        let len = 16 + self.body.len();
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(&(len as u32).to_ne_bytes());
        bytes.extend_from_slice(&self.kind.to_ne_bytes());
        bytes.extend_from_slice(&(NLM_F_REQUEST | self.flags).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]); // sequence, port
        bytes.extend_from_slice(self.body);
        send(&netlink, &bytes).map_err(|e| Error::call(self.what, e))?;
        Ok(netlink)
    }

    /// Adds what `parse` makes of what follows the head of each message of the answer; that is `None` where it makes no sense.
    pub fn answers<T>(
        &self,
        netlink: &OwnedFd,
        found: &mut Vec<T>,
        parse: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<()> {
        // The kernel fills 32 KiB at most.
        let mut buffer = vec![0; 1 << 16];
        loop {
            let n = receive(netlink, &mut buffer)?;
            if !self.parse_all(&buffer[..n], found, &parse)? || self.flags & DUMP != DUMP {
                return Ok(());
            }
        }
    }

    /// Returns whether more messages follow.
    fn parse_all<T>(
        &self,
        mut rest: &[u8],
        found: &mut Vec<T>,
        parse: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<bool> {
        let damaged = || Error::Other("an answer of netlink does not parse".into());
        while !rest.is_empty() {
            let len = u32_at(rest, 0).ok_or_else(damaged)? as usize;
            let kind = u16_at(rest, 4).ok_or_else(damaged)?;
            let body = rest.get(16..len).ok_or_else(damaged)?;
            match kind {
                NLMSG_DONE => return Ok(false),
                NLMSG_ERROR => {
                    let errno = u32_at(body, 0).ok_or_else(damaged)? as i32;
                    return Err(Error::call(self.what, std::io::Error::from_raw_os_error(-errno)));
                }
                _ => found.push(parse(body).ok_or_else(damaged)?),
            }
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        }
        Ok(true)
    }
}

/// Receives messages.
pub fn receive(netlink: &OwnedFd, buffer: &mut [u8]) -> Result<usize> {
    // SAFETY: the kernel writes at most `buffer.len()` bytes.
    let n = unsafe { libc::recv(netlink.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    Ok(check(|| "read an answer of netlink".into(), n as i64)? as usize)
}

/// Attributes one behind the other: kind and value, `None` for one that runs past the end.
pub fn attributes(mut rest: &[u8]) -> impl Iterator<Item = Option<(u16, &[u8])>> {
    std::iter::from_fn(move || {
        let (len, kind) = (usize::from(u16_at(rest, 0)?), u16_at(rest, 2)?);
        let value = rest.get(4..len);
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some(value.map(|value| (kind, value)))
    })
}

/// A number at an offset.
pub fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

/// As [`u16_at`].
pub fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(b.get(at..at + 4)?.try_into().ok()?))
}
