//! Waiting for addresses that a program which has ended has left in use.

use super::Opening;
use super::sockets::{UNIX, is_in_use};
use crate::Result;
use std::time::{Duration, Instant};
use stillpoint_image::Socket;
use stillpoint_linux::{inet_diag, sockets};

/// How long the addresses of a program that was killed may take to be free: its last files are closed behind its back.
const RELEASED_LATE: Duration = Duration::from_secs(2);
/// How long the kernel remembers connections that are over (`TCP_TIMEWAIT_LEN`, 60 s, and some more as its timers are coarse).
const REMEMBERED: Duration = Duration::from_secs(70);

/// Waits for the addresses of some sockets, for some time after the files are begun to be opened.
pub(super) struct Wait<'a> {
    opening: &'a Opening<'a>,
    /// Of TCP, in network order.
    ports: Vec<[u8; 2]>,
    may_forget: bool,
    is_told: bool,
}

impl<'a> Wait<'a> {
    pub fn new(opening: &'a Opening<'_>, sockets: &[&Socket]) -> Self {
        let streams = sockets.iter().filter(|s| s.family != UNIX && s.kind == libc::SOCK_STREAM as u32);
        let ports = streams.filter_map(|socket| Some(sockets::endpoint(&socket.local.0)?.1));
        let ports = ports.filter(|port| *port != [0; 2]).collect();
        Wait { opening, ports, may_forget: true, is_told: false }
    }

    /// A moment after an attempt that failed as an address is in use: whether another one may not. Connections that are over keep others from
    /// their port for a minute, unless the program has allowed it; with `CAP_NET_ADMIN` they are forgotten.
    pub fn goes_on(&mut self) -> Result<bool> {
        let ports = self.ports.iter().filter(|_| self.may_forget);
        for port in ports.copied().collect::<Vec<_>>() {
            match inet_diag::forget(port) {
                Ok(0) => {}
                Ok(_) => return Ok(true),
                Err(_) => self.may_forget = false,
            }
        }
        let waited = self.opening.began.elapsed();
        if waited > RELEASED_LATE {
            // Where somebody listens it is not for these.
            let is_worth_it = |port: &[u8; 2]| {
                inet_diag::is_remembered(*port).unwrap_or(false)
                    && !inet_diag::is_listened_to(*port).unwrap_or(true)
            };
            if waited > REMEMBERED || !self.ports.iter().any(is_worth_it) {
                return Ok(false);
            }
            if !std::mem::replace(&mut self.is_told, true) {
                let ports: Vec<String> =
                    self.ports.iter().map(|port| u16::from_be_bytes(*port).to_string()).collect();
                let ports = ports.join(" or ");
                (self.opening.waits)(&format!(
                    "the kernel remembers connections of port {ports} that are over: waiting for it, a minute at most"
                ));
            }
        }
        let_go_of_circles()?;
        Ok(true)
    }
}

/// Tries what needs an address until others have let go of it.
pub(super) fn when_free(
    opening: &Opening<'_>,
    socket: &Socket,
    attempt: impl Fn() -> Result<()>,
) -> Result<()> {
    let mut wait = Wait::new(opening, &[socket]);
    loop {
        match attempt() {
            Err(e) if is_in_use(&e) => {
                if !wait.goes_on()? {
                    return Err(e);
                }
            }
            other => return other,
        }
    }
}

/// Whether something is there, also some time after `began`.
pub(super) fn stays(began: Instant, is_there: impl Fn() -> bool) -> bool {
    while is_there() {
        if began.elapsed() > RELEASED_LATE || let_go_of_circles().is_err() {
            return true;
        }
    }
    false
}

/// Sockets that lie in messages of one another go when the next one is closed; that, and all else, takes a moment.
fn let_go_of_circles() -> Result<()> {
    drop(sockets::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0)?);
    std::thread::sleep(Duration::from_millis(10));
    Ok(())
}
