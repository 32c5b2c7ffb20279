//! POSIX message queues: looking at one without receiving from it, opening and making them by name. `mq_overview(7)`.

use crate::descriptors::check;
use crate::{Error, Result};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `struct mq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Raw {
    flags: i64,
    maximum: i64,
    size: i64,
    messages: i64,
    reserved: [i64; 4],
}

const _: () = assert!(size_of::<Raw>() == 64);

/// What a queue is made with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Most messages it holds.
    pub maximum: u64,
    /// Longest message, bytes.
    pub size: u64,
}

/// Attributes of a queue, and how many messages it holds.
pub fn attributes(queue: impl AsFd) -> Result<(Attributes, u64)> {
    let mut raw = Raw::default();
    // SAFETY: without new attributes the call only writes one mq_attr.
    let r = unsafe {
        let none = std::ptr::null::<Raw>();
        libc::syscall(libc::SYS_mq_getsetattr, queue.as_fd().as_raw_fd(), none, &raw mut raw)
    };
    check(|| "read the attributes of a message queue".into(), r)?;
    let attributes = Attributes { maximum: raw.maximum as u64, size: raw.size as u64 };
    Ok((attributes, raw.messages as u64))
}

/// The process that is to be told of the next message (`mq_notify(3)`), in our pid namespace; `None` if none is, or none
/// that we can see.
pub fn told(queue: impl AsFd) -> Result<Option<u32>> {
    let mut text = [0; 256];
    // By a description of our own: that of the owner may be for writing only.
    let own = crate::descriptors::reopen(&queue, libc::O_RDONLY)?;
    let n = rustix::io::pread(own, &mut text, 0).map_err(|e| Error::call("read a message queue", e))?;
    let text = String::from_utf8_lossy(&text[..n]);
    let pid = text.split_whitespace().find_map(|word| word.strip_prefix("NOTIFY_PID:"));
    Ok(pid.and_then(|pid| pid.parse().ok()).filter(|pid| *pid != 0))
}

/// Opens a queue by its name (without the leading slash), or makes it (`O_CREAT`) with these attributes.
pub fn open(name: &[u8], flags: i32, mode: u32, attributes: Attributes) -> Result<OwnedFd> {
    let c = CString::new(name).map_err(|e| Error::Other(e.to_string()))?;
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let raw = Raw { maximum: number(attributes.maximum), size: number(attributes.size), ..Raw::default() };
    // SAFETY: a valid C string and mq_attr, both only read; the result is a new descriptor nobody owns.
    unsafe {
        let r = libc::syscall(libc::SYS_mq_open, c.as_ptr(), flags | libc::O_CLOEXEC, mode, &raw const raw);
        let what = || format!("open message queue /{}", String::from_utf8_lossy(name));
        Ok(OwnedFd::from_raw_fd(check(what, r)? as i32))
    }
}

/// Takes the name away from a queue.
pub fn unlink(name: &[u8]) -> Result<()> {
    let c = CString::new(name).map_err(|e| Error::Other(e.to_string()))?;
    // SAFETY: a valid C string.
    let r = unsafe { libc::syscall(libc::SYS_mq_unlink, c.as_ptr()) };
    check(|| format!("remove message queue /{}", String::from_utf8_lossy(name)), r).map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_tells_what_it_is() {
        let name = format!("stillpoint-unit-{}", std::process::id());
        let wanted = Attributes { maximum: 3, size: 40 };
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let Ok(queue) = open(name.as_bytes(), flags, 0o600, wanted) else { return };
        assert_eq!(attributes(&queue).unwrap(), (wanted, 0));
        assert_eq!(told(&queue).unwrap(), None);
        assert!(open(name.as_bytes(), flags, 0o600, wanted).is_err());
        unlink(name.as_bytes()).unwrap();
        assert!(open(name.as_bytes(), libc::O_RDONLY, 0, wanted).is_err());
    }
}
