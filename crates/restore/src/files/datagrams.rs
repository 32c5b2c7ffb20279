//! Datagrams that were in the queue of a UDP socket.

use super::Opening;
use super::sockets::name;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use stillpoint_image::{Image, Socket};
use stillpoint_linux::datagrams::send_to;

const UDP: u32 = libc::IPPROTO_UDP as u32;

/// Has them sent once more by the sockets of the program that sent them. Those from elsewhere are lost, as they may be on any
/// way, and told of. Sockets that were kept have their queues.
pub(super) fn send_again(opening: &mut Opening<'_>, made: &HashMap<usize, OwnedFd>) {
    let image = opening.image;
    let is_kept = opening.files.kept.is_some();
    for (index, socket) in image.sockets.iter().enumerate() {
        let Some(senders) = socket.senders.as_ref().filter(|_| !(is_kept && socket.kept.is_some())) else {
            continue;
        };
        let sent = socket.queue.iter().zip(senders).filter(|(data, sender)| {
            let from = bound_to(image, &sender.0).and_then(|row| made.get(&row));
            from.is_some_and(|from| {
                made.contains_key(&index) && send_to(from, &data.0, &destination(socket)).is_ok()
            })
        });
        let lost = socket.queue.len() - sent.count();
        if lost > 0 {
            let what = name(image, socket);
            opening.files.notes.push(format!("{what}: datagrams that were not yet read are lost ({lost})"));
        }
    }
}

/// The socket of the program that is bound to an address.
fn bound_to(image: &Image, address: &[u8]) -> Option<usize> {
    image.sockets.iter().position(|s| s.protocol == UDP && !address.is_empty() && s.local.0 == address)
}

/// Where a socket can be sent to from within: by the address of the loopback device, if it is bound to any.
fn destination(socket: &Socket) -> Vec<u8> {
    let mut to = socket.local.0.clone();
    match socket.family as i32 {
        libc::AF_INET if to.get(4..8) == Some(&[0; 4]) => to[4..8].copy_from_slice(&[127, 0, 0, 1]),
        libc::AF_INET6 if to.get(8..24) == Some(&[0; 16]) => to[23] = 1,
        _ => {}
    }
    to
}
