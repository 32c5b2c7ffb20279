//! Descriptors on their way from one process of ours to another. `unix(7)`, `SCM_RIGHTS`.

use crate::{Error, Result};
use rustix::cmsg_space;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Most descriptors of one message.
pub const MOST: usize = 4;

/// Sends bytes and, with the first of them, duplicates of descriptors.
///
/// # Errors
/// As `sendmsg(2)`; that there are more than four descriptors.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let mut room = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    // There may be room for one more, as it happens to be aligned.
    let mut push = || ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    if !descriptors.is_empty() && (descriptors.len() > MOST || !push()) {
        return Err(Error::Other(format!("{} descriptors are too many for a message", descriptors.len())));
    }
    let mut rest = bytes;
    while !rest.is_empty() {
        match sendmsg(&socket, &[IoSlice::new(rest)], &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(sent) => {
                rest = &rest[sent..];
                ancillary.clear();
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(Error::call("sendmsg", e)),
        }
    }
    Ok(())
}

/// Receives bytes, and appends the descriptors that came with them, close-on-exec. Returns the number of bytes: none when
/// the other side has hung up.
///
/// # Errors
/// As `recvmsg(2)`; that descriptors are lost because there may be no more.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<usize> {
    let mut room = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other.map_err(|e| Error::call("recvmsg", e))?,
        }
    };
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(rustix::net::ReturnFlags::CTRUNC) {
        return Err(Error::Other("a descriptor that was sent could not be received".into()));
    }
    Ok(received.bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_come_with_their_bytes() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        send(&ours, b"two\n", &[reader.as_fd(), writer.as_fd()]).unwrap();
        send(&ours, b"none\n", &[]).unwrap();
        drop(ours);
        let (mut said, mut descriptors, mut room) = (Vec::new(), Vec::new(), [0; 3]);
        loop {
            let n = receive(&theirs, &mut room, &mut descriptors).unwrap();
            if n == 0 {
                break;
            }
            assert_eq!(descriptors.len(), 2);
            said.extend_from_slice(&room[..n]);
        }
        assert_eq!(said, b"two\nnone\n");
        let mut sent = std::fs::File::from(descriptors.pop().unwrap());
        sent.write_all(b"x").unwrap();
        drop(sent);
        let mut here = [0];
        reader.read_exact(&mut here).unwrap();
        assert_eq!(&here, b"x");
        writer.write_all(b"y").unwrap();
        let mut there = std::fs::File::from(descriptors.pop().unwrap());
        there.read_exact(&mut here).unwrap();
        assert_eq!(&here, b"y");
    }

    #[test]
    fn too_many_are_refused() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(send(&ours, b"x", &[ours.as_fd(); MOST + 1]).is_err());
    }
}
