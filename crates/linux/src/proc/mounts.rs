//! `/proc/PID/mountinfo`: the mounts of a process's mount namespace, as far as they lie below its root.

use super::{Proc, text};
use crate::Result;

/// A mount. Names are as the kernel writes them, with blanks as `\040`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// Its number.
    pub id: u64,
    /// That of the mount that it is on.
    pub parent: u64,
    /// Device number of its file system.
    pub device: (u32, u32),
    /// What of the file system is mounted.
    pub root: Vec<u8>,
    /// Where.
    pub point: Vec<u8>,
    /// Options of the mount.
    pub options: Vec<u8>,
    /// The peer group that it shares events with.
    pub shared: Option<u64>,
    /// The peer group that it receives events from.
    pub master: Option<u64>,
    /// Whether it cannot be mounted elsewhere.
    pub is_unbindable: bool,
    /// Whether more is told of what it receives and passes on.
    pub is_special: bool,
    /// Kind of file system.
    pub kind: Vec<u8>,
    /// Where the file system is from, which may be anything.
    pub source: Vec<u8>,
    /// Options of the file system.
    pub settings: Vec<u8>,
}

impl Proc {
    /// The mounts that it sees.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Parse`].
    pub fn mounts(&self) -> Result<Vec<Mount>> {
        let text = self.read("mountinfo")?;
        let all: Option<Vec<Mount>> = text::lines(&text).map(parse).collect();
        all.ok_or_else(|| self.nonsense("mountinfo", &text))
    }
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse(line: &[u8]) -> Option<Mount> {
    let mut words = text::words(line);
    let (id, parent) = (text::dec(words.next()?)?, text::dec(words.next()?)?);
    let (major, minor) = text::cut(words.next()?, b':')?;
    let device = (u32::try_from(text::dec(major)?).ok()?, u32::try_from(text::dec(minor)?).ok()?);
    let mut next = || words.next().map(<[u8]>::to_vec);
    let (root, point, options) = (next()?, next()?, next()?);
    let mut mount = Mount { id, parent, device, root, point, options, ..Mount::default() };
    loop {
        let word = words.next()?;
        match text::cut(word, b':') {
            _ if word == b"-" => break,
            Some((b"shared", group)) => mount.shared = Some(text::dec(group)?),
            Some((b"master", group)) => mount.master = Some(text::dec(group)?),
            _ if word == b"unbindable" => mount.is_unbindable = true,
            _ => mount.is_special = true,
        }
    }
    mount.kind = words.next()?.to_vec();
    // Between them is the source, which may be empty.
    let rest: Vec<&[u8]> = words.collect();
    mount.settings = rest.last().copied().unwrap_or_default().to_vec();
    mount.source = if rest.len() > 1 { rest[0].to_vec() } else { Vec::new() };
    Some(mount)
}

/// Undoes `\040` and the like in a name.
pub fn unescaped(name: &[u8]) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::with_capacity(name.len()), name);
    while let Some((&first, tail)) = rest.split_first() {
        let code = tail.get(..3).and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        match code {
            Some(byte) if first == b'\\' => {
                out.push(byte);
                rest = &tail[3..];
            }
            _ => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let mount =
            parse(b"36 35 98:0 /mnt1 /mnt2 rw,noatime shared:3 master:1 - ext3 /dev/root rw,errors=continue");
        let expected = Mount {
            id: 36,
            parent: 35,
            device: (98, 0),
            root: b"/mnt1".to_vec(),
            point: b"/mnt2".to_vec(),
            options: b"rw,noatime".to_vec(),
            shared: Some(3),
            master: Some(1),
            is_unbindable: false,
            is_special: false,
            kind: b"ext3".to_vec(),
            source: b"/dev/root".to_vec(),
            settings: b"rw,errors=continue".to_vec(),
        };
        assert_eq!(mount, Some(expected));
        let plain = parse(b"1 0 0:2 / / rw unbindable - rootfs none rw").expect("a mount");
        assert!(plain.is_unbindable && !plain.is_special && plain.shared.is_none());
        let far = parse(b"1 0 0:2 / / rw master:3 propagate_from:2 - tmpfs  rw").expect("a mount");
        assert!(far.is_special && far.master == Some(3) && far.source.is_empty() && far.settings == b"rw");
        assert_eq!(parse(b"1 0 0:2 / / rw"), None);
        assert_eq!(parse(b"1 0 0 / / rw - rootfs none rw"), None);
    }

    #[test]
    fn octal_escapes_are_undone() {
        assert_eq!(unescaped(b"/a\\040b\\134c"), b"/a b\\c");
        assert_eq!(unescaped(b"/a\\04"), b"/a\\04");
    }
}
