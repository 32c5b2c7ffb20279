//! Core dumps of programs that die while some of their memory is still to come.
//!
//! The kernel does not wait for a page when it writes one (`core(5)`): what is missing becomes a hole in the file. So the file
//! is looked for when the program has ended, and its holes are filled. What goes to a program instead of a file is lost.

use crate::{Error, Result};
use object::elf::{ET_CORE, FileHeader64, NT_PRPSINFO, PT_LOAD};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, ReadCache};
use rustix::fs::{SeekFrom, seek};
use std::ffi::OsStr;
use std::fs::{File, read_dir};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use stillpoint_image::PAGE;
use stillpoint_linux::proc::Proc;

/// Between two looks at a program's current directory, in which it would leave a core dump.
const LOOK: Duration = Duration::from_millis(10);
/// Files may seem to be a little older than they are.
const EARLIER: Duration = Duration::from_secs(1);
/// Where a process id is in `struct elf_prpsinfo`, bytes.
const PID_AT: usize = 24;

/// A program that is about to run, and may leave a core dump.
#[derive(Debug)]
pub struct Origin {
    /// Its id as we see it.
    pid: u32,
    /// Its id as it sees itself.
    own: u32,
    /// Its current directory.
    directory: PathBuf,
    since: SystemTime,
}

impl Origin {
    /// It, by these ids.
    pub fn new(pid: u32, own: u32) -> Self {
        let directory = Proc::process(pid).and_then(|process| process.link("cwd")).unwrap_or_default();
        let directory = PathBuf::from(OsStr::from_bytes(&directory));
        Origin { pid, own, directory, since: SystemTime::now() - EARLIER }
    }
}

/// Where a program would leave a core dump.
#[derive(Debug)]
pub struct Cores {
    /// It, unless it has ended.
    process: Option<Proc>,
    /// Its id as it sees itself.
    own: u32,
    /// `/proc/sys/kernel/core_pattern`.
    pattern: Vec<u8>,
    /// With its id behind that name, whether or not that has it.
    uses_pid: bool,
    /// Its current directory, and when that was looked at.
    directory: PathBuf,
    looked: Option<Instant>,
    since: SystemTime,
}

/// A core dump in a file.
#[derive(Debug)]
pub struct Core {
    file: File,
    len: u64,
    /// What it has of the program's memory: address, length, and place in the file, bytes.
    pub segments: Vec<(u64, u64, u64)>,
}

impl Cores {
    /// Those of a program, if they would be files.
    pub fn of(origin: &Origin) -> Option<Self> {
        let setting =
            |name: &str| std::fs::read(Path::new("/proc/sys/kernel").join(name)).unwrap_or_default();
        let pattern = setting("core_pattern").trim_ascii().to_vec();
        let is_file = !matches!(pattern.first(), None | Some(b'|' | b'@'));
        let uses_pid = setting("core_uses_pid").trim_ascii() != b"0";
        let process = Proc::process(origin.pid).ok();
        let Origin { own, since, .. } = *origin;
        let (directory, looked) = (origin.directory.clone(), None);
        is_file.then_some(Cores { process, own, pattern, uses_pid, directory, looked, since })
    }

    /// Sees where the program is, while it lives.
    pub fn look(&mut self) {
        if self.looked.is_some_and(|at| at.elapsed() < LOOK) {
            return;
        }
        self.looked = Some(Instant::now());
        if let Some(Ok(directory)) = self.process.as_ref().map(|process| process.link("cwd")) {
            self.directory = PathBuf::from(OsStr::from_bytes(&directory));
        }
    }

    /// Whether one is being written.
    pub fn is_being_written(&self) -> bool {
        let status =
            self.process.as_ref().and_then(|process| process.read("status").ok()).unwrap_or_default();
        status.split(|&b| b == b'\n').any(|line| line == b"CoreDumping:\t1")
    }

    /// The one that the program has left, if it did.
    pub fn find(&self) -> Option<Core> {
        let (folder, name) = match self.pattern.iter().rposition(|&b| b == b'/') {
            Some(at) => (&self.pattern[..=at], &self.pattern[at + 1..]),
            None => (&[][..], &self.pattern[..]),
        };
        let folder = self.directory.join(OsStr::from_bytes(folder));
        let entries = read_dir(folder).ok()?.flatten();
        let named = entries.filter(|e| is_named(e.file_name().as_bytes(), name, self.uses_pid));
        let is_new = |path: &PathBuf| {
            let metadata = std::fs::symlink_metadata(path).ok();
            let written = metadata.filter(std::fs::Metadata::is_file).and_then(|m| m.modified().ok());
            written.is_some_and(|written| written >= self.since)
        };
        named.map(|e| e.path()).filter(is_new).find_map(|path| Core::open(&path, self.own))
    }
}

impl Core {
    /// Opens a file, if it is a core dump of a process of this id.
    fn open(path: &Path, own: u32) -> Option<Self> {
        let file = File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path).ok()?;
        let len = file.metadata().ok()?.len();
        let data = ReadCache::new(&file);
        let header = FileHeader64::<Endianness>::parse(&data).ok()?;
        let endian = header.endian().ok().filter(|&endian| header.e_type(endian) == ET_CORE)?;
        let parts = header.program_headers(endian, &data).ok()?;
        let pid = parts.iter().find_map(|part| {
            let mut notes = part.notes(endian, &data).ok()??;
            while let Ok(Some(note)) = notes.next() {
                if note.n_type(endian) == NT_PRPSINFO {
                    let bytes = note.desc().get(PID_AT..PID_AT + 4)?;
                    return Some(u32::from_le_bytes(bytes.try_into().ok()?));
                }
            }
            None
        });
        let loaded = parts.iter().filter(|part| part.p_type(endian) == PT_LOAD);
        let segment = |part: &<FileHeader64<Endianness> as object::read::elf::FileHeader>::ProgramHeader| {
            (part.p_vaddr(endian), part.p_filesz(endian), part.p_offset(endian))
        };
        // It may be any file that the program has made.
        let is_sound = |&(start, len, at): &(u64, u64, u64)| {
            len > 0
                && start.checked_add(len).is_some()
                && at.checked_add(len).is_some_and(|end| end <= i64::MAX as u64)
        };
        let segments = loaded.map(segment).filter(is_sound).collect();
        (pid == Some(own)).then_some(Core { file, len, segments })
    }

    /// Whether a page of it, at this place in the file, was not written: there was none.
    pub fn lacks(&self, at: u64) -> bool {
        match seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) => data >= at + PAGE,
            // No data behind it; or holes cannot be told.
            Err(e) => e == rustix::io::Errno::NXIO && at < self.len,
        }
    }

    /// Writes a page, if the file goes that far (`RLIMIT_CORE`).
    pub fn write(&self, at: u64, page: &[u8]) -> Result<()> {
        if at + PAGE > self.len {
            return Ok(());
        }
        self.file.write_all_at(page, at).map_err(|e| Error::Failed(format!("write a core dump: {e}")))
    }
}

/// Whether a file may have got its name from a pattern of `core(5)`, in which `%` and a letter stand for anything.
fn is_named(name: &[u8], pattern: &[u8], uses_pid: bool) -> bool {
    match pattern {
        [] => name.is_empty() || uses_pid && name[0] == b'.' && name[1..].iter().all(u8::is_ascii_digit),
        [b'%', b'%', rest @ ..] => name.first() == Some(&b'%') && is_named(&name[1..], rest, uses_pid),
        [b'%', _, rest @ ..] => (0..=name.len()).any(|at| is_named(&name[at..], rest, uses_pid)),
        [b'%'] => is_named(name, &[], uses_pid),
        [letter, rest @ ..] => name.first() == Some(letter) && is_named(&name[1..], rest, uses_pid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_patterns() {
        let is = |name: &str, pattern: &str| is_named(name.as_bytes(), pattern.as_bytes(), false);
        assert!(is("core", "core") && !is("core", "cor") && !is("cor", "core"));
        assert!(is("core.12.bash", "core.%p.%e") && !is("core.12", "core.%p.%e"));
        assert!(is("5%", "%p%%") && !is("5", "%p%%") && is("core", "core%"));
        assert!(
            !is("core.12", "core") && is_named(b"core.12", b"core", true) && is_named(b"core", b"core", true)
        );
        assert!(!is_named(b"core.12.x", b"core", true));
    }
}
