//! Giving socket options back.

use crate::{Error, Result};
use std::os::fd::AsFd;
use stillpoint_image::{Socket, SocketOption};
use stillpoint_linux::sockets;

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
const SNDBUF: u32 = libc::SO_SNDBUF as u32;
const RCVBUF: u32 = libc::SO_RCVBUF as u32;
const BUF_LOCK: u32 = libc::SO_BUF_LOCK as u32;
const FILTER: u32 = libc::SO_ATTACH_FILTER as u32;

/// Whether an option asks for time stamps, which a TCP socket may be asked for by number (`SOF_TIMESTAMPING_OPT_ID`) only when it is being
/// connected.
pub(super) fn stamps(level: u32, name: u32) -> bool {
    /// `SO_TIMESTAMPING_NEW`
    const NEW: u32 = 65;
    level == SOL_SOCKET && [libc::SO_TIMESTAMPING as u32, NEW].contains(&name)
}

/// Whether an option is a packet filter, or keeps it from being changed: on a unix socket they would be in the way of what is put into its queue.
pub(super) fn filters(level: u32, name: u32) -> bool {
    level == SOL_SOCKET && [FILTER, libc::SO_LOCK_FILTER as u32].contains(&name)
}

/// Sets all options of a socket.
pub(super) fn apply(fd: impl AsFd, socket: &Socket, what: &str) -> Result<()> {
    apply_some(fd, socket, what, |_, _| true)
}

/// Sets those options of a socket that `pick` picks by their level and name.
pub(super) fn apply_some(
    fd: impl AsFd,
    socket: &Socket,
    what: &str,
    pick: impl Fn(u32, u32) -> bool,
) -> Result<()> {
    for option in socket.options.iter().filter(|o| pick(o.level, o.name)) {
        let set = match (option.level, option.name) {
            (SOL_SOCKET, SNDBUF) => set_buffer(&fd, option, libc::SO_SNDBUFFORCE as u32),
            (SOL_SOCKET, RCVBUF) => set_buffer(&fd, option, libc::SO_RCVBUFFORCE as u32),
            // Before Linux 5.15 nobody locks or unlocks sizes.
            (SOL_SOCKET, BUF_LOCK) => {
                let _ = sockets::set_option(&fd, option.level, option.name, &option.value.0);
                Ok(())
            }
            (SOL_SOCKET, FILTER) => sockets::attach_filter(&fd, &option.value.0),
            _ => sockets::set_option(&fd, option.level, option.name, &option.value.0),
        };
        // A size that the kernel may change as well is what it can be.
        let is_size = matches!(option.name, SNDBUF | RCVBUF) && option.level == SOL_SOCKET;
        let set = set.or_else(|e| match is_size && socket.option((SOL_SOCKET, BUF_LOCK)).is_some() {
            true => Ok(()),
            false => Err(e),
        });
        set.map_err(|e| Error::Failed(format!("{what}: {e}")))?;
    }
    Ok(())
}

/// Sets those options of a socket that `pick` picks and that are not as they are to be.
pub(super) fn apply_differing(
    fd: impl AsFd,
    socket: &Socket,
    what: &str,
    pick: impl Fn(u32, u32) -> bool,
) -> Result<()> {
    let is_so = |option: &SocketOption| {
        sockets::option(&fd, option.level, option.name).is_ok_and(|is| is.as_ref() == Some(&option.value.0))
    };
    apply_some(&fd, socket, what, |level, name| {
        pick(level, name) && !socket.option((level, name)).is_some_and(is_so)
    })
}

/// The kernel doubles the size it is given, and caps it for those without `CAP_NET_ADMIN`.
fn set_buffer(fd: impl AsFd, option: &SocketOption, force: u32) -> stillpoint_linux::Result<()> {
    let bytes = option.value.0.get(..4).and_then(|b| b.try_into().ok()).map_or(0, i32::from_ne_bytes);
    let half = (bytes / 2).to_ne_bytes();
    sockets::set_option(&fd, option.level, option.name, &half)?;
    if sockets::int_option(&fd, option.level, option.name)? == Some(bytes) {
        return Ok(());
    }
    sockets::set_option(&fd, option.level, force, &half)
}

/// Makes room for `bytes` in `messages` unread messages; returns what undoes it.
pub(super) fn make_room(fd: impl AsFd, bytes: usize, messages: usize) -> Result<()> {
    let wanted = i32::try_from(bytes * 2 + messages * 4096).unwrap_or(i32::MAX / 2);
    let now = sockets::int_option(&fd, SOL_SOCKET, SNDBUF)?.unwrap_or(0);
    if now < wanted {
        let value = wanted.to_ne_bytes();
        if sockets::set_option(&fd, SOL_SOCKET, libc::SO_SNDBUFFORCE as u32, &value).is_err() {
            sockets::set_option(&fd, SOL_SOCKET, SNDBUF, &value)?;
        }
    }
    Ok(())
}
