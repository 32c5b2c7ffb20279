//! Overlays: which directories they lie over, and whether those are in use. Linux, `Documentation/filesystems/overlayfs.rst`

use crate::descriptors::check;
use crate::mounts::{handle, make};
use crate::proc::mounts::unescaped;
use crate::{Error, Result};
use rustix::fs::{FileType, Mode, OFlags};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `AT_HANDLE_FID`: what tells one file from others, which need not be enough to open it.
const FILE_ID: libc::c_int = 0x200;
/// `OVL_FILEID_V1`: what an overlay tells of a file of its own.
const OF_OVERLAY: i32 = 0xf8;
/// So many names of a directory are compared.
const MOST_NAMES: usize = 2_000;

/// What a file is told from all others of its file system by: device nodes of the same number, or files of the same contents, have
/// others, and one that is made in the place of another, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileId {
    kind: i32,
    bytes: Vec<u8>,
}

impl FileId {
    /// That of a file.
    ///
    /// # Errors
    /// That its file system, or this kernel, does not tell.
    pub fn of(file: impl AsFd) -> Result<Self> {
        const MOST: usize = 128;
        let mut raw = [0u8; 8 + MOST];
        raw[..4].copy_from_slice(&(MOST as u32).to_ne_bytes());
        let mut mount = 0i32;
        // SAFETY: a `struct file_handle` with room for as many bytes as it says; the kernel writes no more than that, and a number.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                file.as_fd().as_raw_fd(),
                c"".as_ptr(),
                raw.as_mut_ptr(),
                &raw mut mount,
                FILE_ID | libc::AT_EMPTY_PATH,
            )
        };
        check(|| "ask what a file is told from others by".into(), done)?;
        let word = |at: usize| [raw[at], raw[at + 1], raw[at + 2], raw[at + 3]];
        let len = (u32::from_ne_bytes(word(0)) as usize).min(MOST);
        Ok(FileId { kind: i32::from_ne_bytes(word(4)), bytes: raw[8..8 + len].to_vec() })
    }

    /// As bytes, to be kept.
    pub fn told(&self) -> Vec<u8> {
        [&self.kind.to_le_bytes(), &self.bytes[..]].concat()
    }

    /// That of the file that lies below one of an overlay (`struct ovl_fh`): that in the upper directory, or in the topmost of the
    /// others.
    fn below(&self) -> Option<Self> {
        const PADDING: usize = 3;
        const HEAD: usize = 5 + 16;
        let bytes = self.bytes.get(PADDING..).filter(|_| self.kind == OF_OVERLAY)?;
        let (&len, &kind) = (bytes.get(2)?, bytes.get(4)?);
        Some(FileId { kind: kind.into(), bytes: bytes.get(HEAD..usize::from(len))?.to_vec() })
    }
}

/// The directories that an overlay lies over, as its options call them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// The lower ones, the topmost first.
    pub lower: Vec<Vec<u8>>,
    /// The upper one.
    pub upper: Option<Vec<u8>>,
    /// That in which files are prepared.
    pub work: Option<Vec<u8>>,
}

impl Names {
    /// Those that options name as `mountinfo` tells them; nothing if there are some of data only.
    pub fn of(settings: &[u8]) -> Option<Self> {
        let mut all = Names::default();
        for (name, value) in self::settings(settings) {
            let value = value.unwrap_or_default();
            match &name[..] {
                b"lowerdir" => all.lower.extend(parted(&value)),
                b"lowerdir+" => all.lower.push(value),
                b"datadir+" => return None,
                b"upperdir" => all.upper = Some(literal(&value)),
                b"workdir" => all.work = Some(literal(&value)),
                _ => {}
            }
        }
        let is_whole = all.lower.iter().all(|name| !name.is_empty()) && !all.lower.is_empty();
        is_whole.then_some(all)
    }
}

/// A name that stands for itself.
type Name = Vec<u8>;

/// Options as `mountinfo` tells them, as they are set.
pub fn settings(told: &[u8]) -> impl Iterator<Item = (Name, Option<Name>)> {
    let all = told.split(|b| *b == b',').filter(|setting| !setting.is_empty());
    all.map(|setting| match setting.iter().position(|b| *b == b'=') {
        Some(at) => (setting[..at].to_vec(), Some(unescaped(&setting[at + 1..]))),
        None => (setting.to_vec(), None),
    })
}

/// A name in which `\` stands before what would mean something else.
fn literal(name: &[u8]) -> Name {
    let mut escaped = false;
    let is_meant = |b: &&u8| {
        escaped = **b == b'\\' && !escaped;
        !escaped
    };
    name.iter().filter(is_meant).copied().collect()
}

/// Names with colons between them.
fn parted(names: &[u8]) -> Vec<Name> {
    let (mut all, mut begin, mut escaped) = (Vec::new(), 0, false);
    for (at, &byte) in names.iter().enumerate() {
        if byte == b':' && !escaped {
            all.push(literal(&names[begin..at]));
            begin = at + 1;
        }
        escaped = byte == b'\\' && !escaped;
    }
    all.push(literal(&names[begin..]));
    all
}

/// Finds out whether an overlay lies over certain directories, by what is in its root: the kernel does not tell.
#[derive(Debug)]
pub struct Proof<'a> {
    /// Its root, with nothing mounted in it.
    overlay: &'a OwnedFd,
    /// What lies directly below its root.
    below: FileId,
    /// Names that are those of directories further up.
    covered: HashSet<Name>,
}

impl<'a> Proof<'a> {
    /// Begins one of the overlay with this root, on which nothing else is mounted.
    ///
    /// # Errors
    /// That this kernel tells too little of it.
    pub fn begin(overlay: &'a OwnedFd) -> Result<Self> {
        let below = FileId::of(overlay)?.below();
        let below = below.ok_or_else(|| Error::Other("the kernel does not tell what it lies over".into()))?;
        Ok(Proof { overlay, below, covered: HashSet::new() })
    }

    /// Whether this is its topmost directory.
    ///
    /// # Errors
    /// That it cannot be looked at.
    pub fn is_top(&self, folder: &OwnedFd) -> Result<bool> {
        Ok(FileId::of(folder)? == self.below)
    }

    /// Takes what is in a directory as seen: it covers what is in those further down.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn cover(&mut self, folder: &OwnedFd) -> Result<()> {
        self.covered.extend(names(folder)?);
        Ok(())
    }

    /// How much the overlay shows of a directory, if that may be the next one of its own: all in it that nothing above covers is shown.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn shown_by(&self, folder: &OwnedFd) -> Result<Option<usize>> {
        let names = names(folder)?.into_iter();
        let mut count = 0;
        for name in names.filter(|name| !self.covered.contains(name)).take(MOST_NAMES) {
            let path = Path::new(OsStr::from_bytes(&name));
            let file = handle(folder, path)?;
            let stat = rustix::fs::fstat(&file).map_err(|e| Error::file(path, e))?;
            let is_hidden =
                FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0;
            match handle(self.overlay, path) {
                Err(_) if is_hidden => {}
                Ok(shown) if !is_hidden && FileId::of(&shown)?.below() == Some(FileId::of(&file)?) => {
                    count += 1
                }
                _ => return Ok(None),
            }
        }
        Ok(Some(count))
    }

    /// Whether that is all: nothing else is in the overlay.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn ends(&self) -> Result<bool> {
        Ok(names(self.overlay)?.iter().all(|name| self.covered.contains(name)))
    }
}

/// Names in a directory, without a trace.
fn names(folder: &OwnedFd) -> Result<Vec<Name>> {
    let failed = |e| Error::call("read a directory of an overlay", e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOATIME;
    let open = rustix::fs::openat(folder, ".", flags, Mode::empty()).map_err(failed)?;
    let mut all = Vec::new();
    for entry in rustix::fs::Dir::new(open).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_bytes().to_vec();
        all.push(name);
    }
    all.retain(|name| name != b"." && name != b"..");
    Ok(all)
}

/// Whether a directory is one in which an overlay prepares files: it empties what it finds there.
///
/// # Errors
/// That it cannot be read.
pub fn is_for_work(folder: &OwnedFd) -> Result<bool> {
    let known = names(folder)?.iter().all(|name| name == b"work" || name == b"index");
    let work = rustix::fs::statat(folder, "work", rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
    Ok(known && work.is_ok_and(|stat| stat.st_mode == libc::S_IFDIR))
}

/// Whether an overlay writes to a directory, or prepares files in it.
///
/// Linux, `ovl_get_upper()`: whether it is in use is looked at first, and only then that it is to be upper directory and that for work,
/// which cannot be: nothing is changed in it. (An answer that it is not may have other reasons: so whoever then uses it asks again.)
///
/// # Errors
/// That the kernel says something else.
pub fn is_in_use(folder: &OwnedFd) -> Result<bool> {
    let path = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let path = path.as_bytes();
    let options: [(&[u8], &[u8]); 4] =
        [(b"lowerdir", b"/"), (b"upperdir", path), (b"workdir", path), (b"index", b"on")];
    let options = options.map(|(name, value)| (name, Some(value)));
    match make("overlay", b"", &options).map_err(|e| e.errno().ok_or(e)) {
        Err(Ok(libc::EBUSY)) => Ok(true),
        Err(Ok(libc::EINVAL)) => Ok(false),
        Err(Ok(errno)) => Err(Error::call(
            "ask whether an overlay writes to a directory",
            std::io::Error::from_raw_os_error(errno),
        )),
        Err(Err(e)) => Err(e),
        Ok(_) => Err(Error::Other("an overlay came about that cannot be".into())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_are_parted_and_unescaped() {
        let told = br"rw,lowerdir=/a:low\040er\134\054b\134:2:/c,upperdir=/u\134:p,workdir=w,uuid=on";
        let names = |all: &[&[u8]]| -> Vec<Vec<u8>> { all.iter().map(|name| name.to_vec()).collect() };
        let expected = Names {
            lower: names(&[b"/a", b"low er,b:2", b"/c"]),
            upper: Some(b"/u:p".to_vec()),
            work: Some(b"w".to_vec()),
        };
        assert_eq!(Names::of(told), Some(expected));
        let added = Names { lower: names(&[b"/a:b", b"c"]), ..Names::default() };
        assert_eq!(Names::of(b"ro,lowerdir+=/a:b,lowerdir+=c"), Some(added));
        for of_data in [&b"lowerdir=/a::/data"[..], b"lowerdir+=/a,datadir+=/data", b"rw"] {
            assert_eq!(Names::of(of_data), None);
        }
    }

    #[test]
    fn files_are_told_apart_by_more_than_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| FileId::of(std::fs::File::open(folder.path().join(name)).unwrap());
        for name in ["one", "two"] {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let Ok(one) = of("one") else { return };
        assert!(one == of("one").unwrap() && one != of("two").unwrap() && one.below().is_none());
        std::fs::remove_file(folder.path().join("one")).unwrap();
        std::fs::write(folder.path().join("one"), "one").unwrap();
        assert_ne!(one, of("one").unwrap());
        assert_eq!(FileId::told(&one)[..4], one.kind.to_le_bytes());
    }

    #[test]
    fn what_an_overlay_tells_of_its_files_is_what_lies_below() {
        let told =
            [&[0, 0, 0, 0, 0xfb, 0x1d, 4, 1][..], &[9; 16], &[1, 2, 3, 4, 5, 6, 7, 8], &[0; 3]].concat();
        let id = |kind, bytes: &[u8]| FileId { kind, bytes: bytes.to_vec() };
        assert_eq!(id(OF_OVERLAY, &told).below(), Some(id(1, &[1, 2, 3, 4, 5, 6, 7, 8])));
        for (kind, bytes) in
            [(1, &told[..]), (OF_OVERLAY, &told[..20]), (OF_OVERLAY, &[]), (OF_OVERLAY, &[255; 6])]
        {
            assert_eq!(id(kind, bytes).below(), None);
        }
    }
}
