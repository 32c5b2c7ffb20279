//! `/proc/PID/ns`: the namespaces a process or thread is in (namespaces(7)).

use super::{Proc, nonsense, text};
use crate::{Error, Result};
use rustix::fs::OFlags;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// A kind of namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // the kernel's own names say it
pub enum NamespaceKind {
    Cgroup,
    Ipc,
    Mount,
    Network,
    Pid,
    PidForChildren,
    Time,
    TimeForChildren,
    User,
    Uts,
}

impl NamespaceKind {
    /// All kinds.
    pub const ALL: [NamespaceKind; 10] = [
        NamespaceKind::Cgroup,
        NamespaceKind::Ipc,
        NamespaceKind::Mount,
        NamespaceKind::Network,
        NamespaceKind::Pid,
        NamespaceKind::PidForChildren,
        NamespaceKind::Time,
        NamespaceKind::TimeForChildren,
        NamespaceKind::User,
        NamespaceKind::Uts,
    ];

    /// Those that one thread of several can change for itself (`setns`, `unshare`), as long as it shares its current
    /// directory with the others (which it must give up for a mount namespace) and makes no new process.
    pub const OF_THREADS: [NamespaceKind; 6] = [
        NamespaceKind::Cgroup,
        NamespaceKind::Ipc,
        NamespaceKind::Network,
        NamespaceKind::PidForChildren,
        NamespaceKind::TimeForChildren,
        NamespaceKind::Uts,
    ];

    /// Name of its link.
    pub fn name(self) -> &'static str {
        match self {
            NamespaceKind::Cgroup => "cgroup",
            NamespaceKind::Ipc => "ipc",
            NamespaceKind::Mount => "mnt",
            NamespaceKind::Network => "net",
            NamespaceKind::Pid => "pid",
            NamespaceKind::PidForChildren => "pid_for_children",
            NamespaceKind::Time => "time",
            NamespaceKind::TimeForChildren => "time_for_children",
            NamespaceKind::User => "user",
            NamespaceKind::Uts => "uts",
        }
    }
}

/// A namespace, by the inode number that is its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its kind.
    pub kind: NamespaceKind,
    /// Its identity.
    pub id: u64,
}

/// The links of some namespaces of a process or thread, held open: their paths take longer than they do.
#[derive(Debug)]
pub struct HeldNamespaces {
    tid: u32,
    links: Vec<(NamespaceKind, OwnedFd)>,
}

impl HeldNamespaces {
    /// The namespaces as they are now.
    ///
    /// # Errors
    /// [`Error::Gone`], or that the kernel does not tell.
    pub fn read(&self) -> Result<Vec<Namespace>> {
        let mut all = Vec::with_capacity(self.links.len());
        for (kind, link) in &self.links {
            let mut room = [0; 64];
            let len = match rustix::fs::readlinkat_raw(link, "", &mut room[..]) {
                Ok(len) => len,
                // Until its first process is there, a pid namespace is not shown.
                Err(rustix::io::Errno::NOENT) if *kind == NamespaceKind::PidForChildren => continue,
                // A namespace is always there until its thread is not.
                Err(_) => return Err(Error::Gone(self.tid)),
            };
            let path = || PathBuf::from(format!("/proc/{}/ns/{}", self.tid, kind.name()));
            let id = parse(&room[..len]).ok_or_else(|| nonsense(&path(), &room[..len]))?;
            all.push(Namespace { kind: *kind, id });
        }
        Ok(all)
    }
}

impl Proc {
    /// Opens the links of some namespaces, to be read later; kinds that the kernel does not have are left out.
    ///
    /// # Errors
    /// As [`Proc::namespaces`].
    pub fn hold_namespaces(&self, kinds: &[NamespaceKind]) -> Result<HeldNamespaces> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut links = Vec::with_capacity(kinds.len());
        for &kind in kinds {
            match self.open_with(&format!("ns/{}", kind.name()), flags) {
                Ok(link) => links.push((kind, link)),
                Err(Error::File { source, .. }) if source.raw_os_error() == Some(libc::ENOENT) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(HeldNamespaces { tid: self.tid(), links })
    }

    /// Namespaces it is in; kinds that the kernel does not have are left out, and the pid namespace of its children if no process
    /// has been made in it yet.
    ///
    /// # Errors
    /// [`Error::Gone`], or [`Error::File`] if we may not trace the process.
    pub fn namespaces(&self) -> Result<Vec<Namespace>> {
        self.namespaces_of(&NamespaceKind::ALL)
    }

    /// As [`Proc::namespaces`], some kinds only.
    ///
    /// # Errors
    /// As [`Proc::namespaces`].
    pub fn namespaces_of(&self, kinds: &[NamespaceKind]) -> Result<Vec<Namespace>> {
        let mut all = Vec::new();
        for &kind in kinds {
            let name = format!("ns/{}", kind.name());
            match self.link(&name) {
                Ok(link) => {
                    let id = parse(&link).ok_or_else(|| nonsense(&self.path().join(&name), &link))?;
                    all.push(Namespace { kind, id });
                }
                Err(Error::File { source, .. }) if source.raw_os_error() == Some(libc::ENOENT) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(all)
    }

    /// Offsets of the time namespace of its children in nanoseconds: `CLOCK_MONOTONIC`, `CLOCK_BOOTTIME`; `None` on
    /// a kernel without time namespaces.
    ///
    /// # Errors
    /// [`Error::Gone`] or [`Error::Parse`].
    pub fn time_offsets(&self) -> Result<Option<(i64, i64)>> {
        let Some(text) = self.read_optional("timens_offsets")? else { return Ok(None) };
        parse_offsets(&text).map(Some).ok_or_else(|| self.nonsense("timens_offsets", &text))
    }
}

/// Offsets of the clocks that our own process has, nanoseconds: `CLOCK_MONOTONIC`, `CLOCK_BOOTTIME`.
///
/// The kernel tells those of children only. Who has made other clocks for these ([`crate::spawn::unshare_time`]) knows its own from
/// before; whoever was forked since has the others, and is told.
pub fn own_time_offsets() -> (i64, i64) {
    static BEFORE: Mutex<Option<(u64, (i64, i64))>> = Mutex::new(None);
    let ask = || {
        let own = Proc::process(std::process::id())?;
        let told = own.time_offsets()?.unwrap_or_default();
        Ok::<_, Error>((told, own.namespaces_of(&[NamespaceKind::Time, NamespaceKind::TimeForChildren])?))
    };
    let Ok((told, ids)) = ask() else { return (0, 0) };
    let [Namespace { id, .. }, Namespace { id: of_children, .. }] = ids[..] else { return told };
    let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    if id == of_children {
        *before = Some((id, told));
    }
    before.filter(|(known, _)| *known == id).map_or(told, |(_, offsets)| offsets)
}

/// `net:[4026531833]`
fn parse(link: &[u8]) -> Option<u64> {
    let (_, id) = text::cut(link, b'[')?;
    text::dec(id.strip_suffix(b"]")?)
}

/// Lines of clock, seconds, nanoseconds. The clock is a name, or (before 5.7) a number.
fn parse_offsets(text: &[u8]) -> Option<(i64, i64)> {
    let (mut monotonic, mut boottime) = (0, 0);
    for line in text::lines(text) {
        let mut words = text::words(line);
        let clock = words.next()?;
        let seconds = text::signed(words.next()?)?;
        let ns = seconds.checked_mul(1_000_000_000)?.checked_add(text::signed(words.next()?)?)?;
        match clock {
            b"monotonic" | b"1" => monotonic = ns,
            b"boottime" | b"7" => boottime = ns,
            _ => {}
        }
    }
    Some((monotonic, boottime))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_offsets() {
        assert_eq!(parse(b"net:[4026531833]"), Some(4026531833));
        assert_eq!(parse(b"net:4026531833"), None);
        let text = b"monotonic          -1  500000000\nboottime           2         1\n";
        assert_eq!(parse_offsets(text), Some((-500_000_000, 2_000_000_001)));
        assert_eq!(parse_offsets(b"monotonic 9223372036854775807 0\n"), None);
    }
}
