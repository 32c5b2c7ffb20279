//! Sockets of whole packets (`packet(7)`): what `sock_diag(7)` tells of them.

use crate::Result;
use crate::netlink::{self, attributes, u32_at};

/// `SOL_PACKET`.
pub const LEVEL: u32 = 263;
/// `PACKET_ADD_MEMBERSHIP`: `struct packet_mreq_max`.
pub const ADD_MEMBERSHIP: u32 = 1;
/// `PACKET_FANOUT`.
pub const FANOUT: u32 = 18;

/// Memberships, rings.
const SHOW: u32 = 2 | 4;
/// Length of `struct packet_diag_mclist` and of `struct packet_mreq_max`.
const MEMBERSHIP: usize = 44;
const REQUEST: usize = 40;

/// What is known of a packet socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PacketSocket {
    /// Inode number.
    pub ino: u32,
    /// Packets go through memory that it shares with the kernel (`PACKET_RX_RING`, `PACKET_TX_RING`).
    pub has_ring: bool,
    /// What it has asked interfaces for, as [`ADD_MEMBERSHIP`] takes it, each as often as it did.
    pub memberships: Vec<Vec<u8>>,
}

/// All packet sockets of our network namespace.
///
/// # Errors
/// That the kernel does not tell (`CONFIG_PACKET_DIAG`).
pub fn all() -> Result<Vec<PacketSocket>> {
    let mut body = vec![libc::AF_PACKET as u8, 0, 0, 0]; // struct packet_diag_req
    body.extend_from_slice(&0u32.to_ne_bytes()); // inode
    body.extend_from_slice(&SHOW.to_ne_bytes());
    body.extend_from_slice(&[0; 8]); // cookie
    let (kind, flags, what) =
        (netlink::SOCK_DIAG_BY_FAMILY, netlink::DUMP, "ask sock_diag for packet sockets");
    let request = netlink::Request { family: netlink::SOCK_DIAG, kind, flags, body: &body, what };
    let mut found = Vec::new();
    request.answers(&request.send()?, &mut found, parse)?;
    Ok(found)
}

/// `struct packet_diag_msg` and its attributes.
fn parse(body: &[u8]) -> Option<PacketSocket> {
    let mut socket = PacketSocket { ino: u32_at(body, 4)?, ..PacketSocket::default() };
    for attribute in attributes(body.get(16..)?) {
        let (kind, value) = attribute?;
        match kind {
            1 => {
                for one in value.chunks_exact(MEMBERSHIP) {
                    let times = u32_at(one, 4)?.min(1000);
                    // Index of the interface; type and length of the address, and that.
                    let mut request = one[..4].to_vec();
                    request.extend_from_slice(&one[8..]);
                    debug_assert_eq!(request.len(), REQUEST);
                    socket.memberships.extend((0..times).map(|_| request.clone()));
                }
            }
            2 | 3 => socket.has_ring = true,
            _ => {}
        }
    }
    Some(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memberships_and_rings_are_told() {
        let attribute = |kind: u16, value: &[u8]| {
            let mut all = (4 + value.len() as u16).to_ne_bytes().to_vec();
            all.extend_from_slice(&kind.to_ne_bytes());
            all.extend_from_slice(value);
            all
        };
        let mut one = [1u32.to_ne_bytes(), 2u32.to_ne_bytes()].concat();
        one.extend_from_slice(&[1, 0, 6, 0]);
        one.extend_from_slice(&[7; 32]);
        let mut body = vec![17, 3, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        body.extend(attribute(1, &one));
        let found = parse(&body).expect("it parses");
        assert_eq!((found.ino, found.has_ring, found.memberships.len()), (5, false, 2));
        assert_eq!(found.memberships[0][..8], [1, 0, 0, 0, 1, 0, 6, 0]);
        body.extend(attribute(2, &[0; 28]));
        assert!(parse(&body).expect("it parses").has_ring);
    }
}
