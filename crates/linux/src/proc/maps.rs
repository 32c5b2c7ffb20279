//! `/proc/PID/maps`: the mappings of an address space.

use super::{Proc, nonsense, text};
use crate::Result;
use std::path::Path;

/// One mapping, as `maps` and the heads of `smaps` tell it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vma {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// `PROT_*`.
    pub prot: u32,
    /// Whether it is shared.
    pub shared: bool,
    /// Offset in its file, bytes.
    pub offset: u64,
    /// Device of its file as `st_dev` has it, 0 for none.
    ///
    /// On file systems with several devices (btrfs, overlayfs) it may differ from `st_dev` of the same file.
    pub dev: u64,
    /// Inode number, 0 for no file.
    pub ino: u64,
    /// Path or `[name]`, newlines unescaped, without ` (deleted)`.
    ///
    /// The kernel escapes newlines (as `\012`) but not backslashes: where a path holds a literal `\012`, only the
    /// link in `map_files` tells.
    pub name: Vec<u8>,
    /// Whether the kernel said ` (deleted)`. (A file may be named so: compare its device and inode to be sure.)
    pub deleted: bool,
}

impl Vma {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Whether it has no pages; the kernel has no such mapping.
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }

    /// Name of its link in `map_files`.
    pub fn link_name(&self) -> String {
        format!("map_files/{:x}-{:x}", self.start, self.end)
    }
}

impl Proc {
    /// Mappings in ascending order. Empty for kernel threads and zombies.
    ///
    /// # Errors
    /// [`crate::Error::Gone`], [`crate::Error::Parse`] with the offending line, or that reading is forbidden.
    pub fn maps(&self) -> Result<Vec<Vma>> {
        parse(&self.read("maps")?, &self.path.join("maps"))
    }
}

/// Parses the text of `maps`.
///
/// # Errors
/// [`crate::Error::Parse`] with the offending line.
pub fn parse(text: &[u8], path: &Path) -> Result<Vec<Vma>> {
    let mut all = Vec::with_capacity(text.len() / 64);
    for line in text::lines(text) {
        let vma = parse_line(line).ok_or_else(|| nonsense(path, line))?;
        give_way(&mut all, vma.start, |vma| vma);
        all.push(vma);
    }
    Ok(all)
}

/// Cuts off what mappings told so far have from `start` on, where the next one begins. The kernel tells a list in pieces, between which the program
/// may have changed its mappings: two can overlap then, and the later one is as it is now.
pub(super) fn give_way<T>(told: &mut Vec<T>, start: u64, vma: impl Fn(&mut T) -> &mut Vma) {
    while let Some(last) = told.last_mut().map(&vma).filter(|last| last.end > start) {
        if last.start < start {
            last.end = start;
            return;
        }
        told.pop();
    }
}

/// `START-END rwxp OFFSET MAJOR:MINOR INODE      NAME`
pub(super) fn parse_line(line: &[u8]) -> Option<Vma> {
    let (range, rest) = text::cut(line, b' ')?;
    let (start, end) = text::cut(range, b'-')?;
    let (perms, rest) = text::cut(rest, b' ')?;
    let (offset, rest) = text::cut(rest, b' ')?;
    let (dev, rest) = text::cut(rest, b' ')?;
    let (ino, name) = text::cut(rest, b' ').unwrap_or((rest, b""));
    let (major, minor) = text::cut(dev, b':')?;
    let &[r, w, x, s] = perms else { return None };
    let mut vma = Vma {
        start: text::hex(start)?,
        end: text::hex(end)?,
        prot: bit(r, b'r', libc::PROT_READ)?
            | bit(w, b'w', libc::PROT_WRITE)?
            | bit(x, b'x', libc::PROT_EXEC)?,
        shared: matches!(s, b's' | b'S'),
        offset: text::hex(offset)?,
        dev: libc::makedev(text::hex(major)?.try_into().ok()?, text::hex(minor)?.try_into().ok()?),
        ino: text::dec(ino)?,
        ..Vma::default()
    };
    let name = name.trim_ascii_start();
    let plain = name.strip_suffix(b" (deleted)");
    vma.deleted = plain.is_some();
    vma.name = unescape(plain.unwrap_or(name));
    (vma.start <= vma.end && matches!(s, b's' | b'S' | b'p')).then_some(vma)
}

fn bit(have: u8, want: u8, value: i32) -> Option<u32> {
    match have {
        b'-' => Some(0),
        c if c == want => Some(value as u32),
        _ => None,
    }
}

/// Newlines are the only bytes that the kernel escapes here (`seq_file_path(m, file, "\n")`).
fn unescape(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, tail)) = rest.split_first() {
        if let Some(tail) = rest.strip_prefix(b"\\012") {
            out.push(b'\n');
            rest = tail;
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"\
55d0c1a00000-55d0c1a02000 r-xp 00001000 fe:01 247741                     /usr/bin/a b
7f0000000000-7f0000001000 rw-s 00000000 00:01 1025                       /memfd:two\\012lines (deleted)
7f0000001000-7f0000002000 ---p 00000000 00:00 0 \n\
7f0000002000-7f0000003000 rw-p 00000000 00:00 0                          [anon:my heap]
7f0000003000-7f0000004000 rw-s 7fffff000 103:01 18446744073709551615       /x (deleted) (deleted)
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    #[test]
    fn odd_names() {
        let all = parse(TEXT, Path::new("maps")).unwrap();
        let names: Vec<_> = all.iter().map(|v| (v.name.as_slice(), v.deleted)).collect();
        let expected: &[(&[u8], bool)] = &[
            (b"/usr/bin/a b", false),
            (b"/memfd:two\nlines", true),
            (b"", false),
            (b"[anon:my heap]", false),
            (b"/x (deleted)", true),
            (b"[vsyscall]", false),
        ];
        assert_eq!(names, expected);
        assert_eq!(all[0].prot, (libc::PROT_READ | libc::PROT_EXEC) as u32);
        assert_eq!((all[0].offset, all[0].dev), (0x1000, libc::makedev(0xfe, 1)));
        assert!(all[1].shared && !all[0].shared);
        assert_eq!((all[4].ino, all[4].offset), (u64::MAX, 0x7_ffff_f000));
    }

    #[test]
    fn what_overlaps_is_as_the_later_one_tells() {
        let told = |lists: &[(u64, u64)]| {
            let text: String = lists
                .iter()
                .map(|(start, end)| format!("{start:x}-{end:x} rw-p 00000000 00:00 0\n"))
                .collect();
            let all = parse(text.as_bytes(), Path::new("maps")).unwrap();
            all.iter().map(|vma| (vma.start, vma.end)).collect::<Vec<_>>()
        };
        assert_eq!(told(&[(1, 5), (5, 6)]), [(1, 5), (5, 6)]);
        assert_eq!(told(&[(1, 5), (3, 6)]), [(1, 3), (3, 6)]);
        assert_eq!(told(&[(1, 9), (3, 4), (5, 6)]), [(1, 3), (3, 4), (5, 6)]);
        assert_eq!(told(&[(1, 2), (3, 5), (3, 4)]), [(1, 2), (3, 4)]);
        assert_eq!(told(&[(1, 2), (4, 8), (5, 9), (3, 6)]), [(1, 2), (3, 6)]);
    }

    #[test]
    fn nonsense_is_named() {
        for line in
            ["", "x", "1-2", "1-2 rwxp 0 0:0 x", "2-1 rwxp 0 0:0 0", "1-2 qwxp 0 0:0 0", "1-2 rwx? 0 0:0 0"]
        {
            let text = format!("{line}\n");
            match parse(text.as_bytes(), Path::new("/proc/1/maps")) {
                Ok(all) => assert!(line.is_empty() && all.is_empty(), "{line}"),
                Err(e) => assert!(e.to_string().contains(line), "{e}"),
            }
        }
    }
}
