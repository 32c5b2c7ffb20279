//! Namespaces of others, entered by threads of ours that are made for it, and new ones. `namespaces(7)`, `setns(2)`,
//! `unshare(2)`, `ioctl_nsfs(2)`.

use crate::descriptors::check;
use crate::local::LocalRun;
use crate::messenger;
use crate::proc::{Namespace, NamespaceKind};
use crate::program::{Program, Run};
use crate::{Error, Result};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Longest host and domain name, bytes (`__NEW_UTS_LEN`).
pub const LONGEST_NAME: usize = 64;
/// `NS_GET_USERNS`.
const GET_OWNER: libc::c_ulong = 0xb701;
/// `NS_GET_PARENT`.
const GET_PARENT: libc::c_ulong = 0xb702;
/// `NS_GET_OWNER_UID`.
const GET_OWNER_UID: libc::c_ulong = 0xb704;

impl NamespaceKind {
    /// Its `CLONE_NEW*`.
    pub fn flag(self) -> i32 {
        const NEWTIME: i32 = 0x80;
        match self {
            NamespaceKind::Cgroup => libc::CLONE_NEWCGROUP,
            NamespaceKind::Ipc => libc::CLONE_NEWIPC,
            NamespaceKind::Mount => libc::CLONE_NEWNS,
            NamespaceKind::Network => libc::CLONE_NEWNET,
            NamespaceKind::Pid | NamespaceKind::PidForChildren => libc::CLONE_NEWPID,
            NamespaceKind::Time | NamespaceKind::TimeForChildren => NEWTIME,
            NamespaceKind::User => libc::CLONE_NEWUSER,
            NamespaceKind::Uts => libc::CLONE_NEWUTS,
        }
    }
}

/// Opens the namespace of this kind that a process is in (or a thread, by a `path` such as `/proc/self/task/7`), and
/// tells which it is.
pub fn open(path: &str, kind: NamespaceKind) -> Result<(OwnedFd, Namespace)> {
    let path = format!("{path}/ns/{}", kind.name());
    let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::file(&path, e))?;
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::file(&path, e))?;
    Ok((file, Namespace { kind, id: stat.st_ino }))
}

/// The user namespace whose privileges count in a namespace, by its inode number; `None` if that is none of those
/// below ours.
pub fn owner(namespace: impl AsFd) -> Result<Option<u64>> {
    Ok(related(namespace, GET_OWNER)?.map(|(_, id)| id))
}

/// The pid (or user) namespace that one was made in, with its inode number; `None` if that is none of those below ours.
pub fn parent(namespace: impl AsFd) -> Result<Option<(OwnedFd, u64)>> {
    related(namespace, GET_PARENT)
}

/// The user who made a user namespace.
pub fn owner_uid(namespace: impl AsFd) -> Result<u32> {
    let mut uid = 0u32;
    // SAFETY: the kernel writes one id.
    let r = unsafe { libc::ioctl(namespace.as_fd().as_raw_fd(), GET_OWNER_UID, &raw mut uid) };
    check(|| "look who made a user namespace".into(), r.into()).map(|_| uid)
}

/// The user namespace whose privileges count in a namespace, with its inode number; `None` as of [`owner`].
pub fn owner_of(namespace: impl AsFd) -> Result<Option<(OwnedFd, u64)>> {
    related(namespace, GET_OWNER)
}

fn related(namespace: impl AsFd, which: libc::c_ulong) -> Result<Option<(OwnedFd, u64)>> {
    // SAFETY: takes no argument; the result is a new descriptor nobody owns.
    let found = unsafe {
        let r = libc::ioctl(namespace.as_fd().as_raw_fd(), which);
        match check(|| "look for what a namespace belongs to".into(), r.into()) {
            Err(e) if e.errno() == Some(libc::EPERM) => return Ok(None),
            r => OwnedFd::from_raw_fd(r? as i32),
        }
    };
    let stat =
        rustix::fs::fstat(&found).map_err(|e| Error::call("look at what a namespace belongs to", e))?;
    Ok(Some((found, stat.st_ino)))
}

/// Does something in namespaces of others, on a thread that is made for it: it must not keep to itself what it does
/// there, and cannot enter user and pid namespaces, which a thread of several has in common with others.
pub fn inside<T: Send, E: From<Error> + Send>(
    namespaces: &[(NamespaceKind, BorrowedFd<'_>)],
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    on_a_thread(|| {
        for (kind, file) in namespaces {
            enter(*kind, file)?;
        }
        work()
    })
}

/// As [`inside`], as another user, who has our privileges.
pub fn inside_as<T: Send, E: From<Error> + Send>(
    (uid, gid): (u32, u32),
    namespaces: &[(NamespaceKind, BorrowedFd<'_>)],
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    // That others cannot look at us any more is set for all threads.
    let dumpable = rustix::process::dumpable_behavior();
    let done = inside(namespaces, || {
        let mut program = Program::new();
        messenger::become_user(&mut program, uid.into(), gid.into());
        LocalRun.run(&program)?;
        work()
    });
    if let Ok(dumpable) = dumpable {
        let _ = rustix::process::set_dumpable_behavior(dumpable);
    }
    done
}

/// Makes a namespace, which is there as long as anybody has it open or is in it, and does something in it first.
pub fn make<E: From<Error> + Send>(
    kind: NamespaceKind,
    work: impl FnOnce() -> Result<(), E> + Send,
) -> Result<OwnedFd, E> {
    on_a_thread(|| {
        // SAFETY: plain number; only this thread, which ends soon, is then elsewhere.
        let r = unsafe { libc::unshare(kind.flag()) };
        check(|| format!("make a {} namespace", kind.name()), r.into())?;
        // What is done there may be that no `/proc` is where it was.
        let made = open("/proc/thread-self", kind)?.0;
        work()?;
        Ok(made)
    })
}

/// The calling thread is in another namespace while this lives.
#[derive(Debug)]
pub struct Visit {
    kind: NamespaceKind,
    home: OwnedFd,
    // It is this thread that must go back.
    here: std::marker::PhantomData<*const ()>,
}

impl Visit {
    /// Enters a namespace of which each thread can be in one of its own.
    pub fn enter(kind: NamespaceKind, namespace: impl AsFd) -> Result<Self> {
        let home = open("/proc/thread-self", kind)?.0;
        enter(kind, &namespace)?;
        Ok(Visit { kind, home, here: std::marker::PhantomData })
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        // Whoever could leave can come back; whatever else was done from there would be wrong.
        if enter(self.kind, &self.home).is_err() {
            std::process::abort();
        }
    }
}

/// Lets this thread enter a namespace. It parts with the directories of the others where it must.
pub(crate) fn enter(kind: NamespaceKind, namespace: &impl AsFd) -> Result<()> {
    // SAFETY: plain numbers.
    let r = unsafe {
        match kind {
            NamespaceKind::Mount if libc::unshare(libc::CLONE_FS) < 0 => -1,
            _ => libc::setns(namespace.as_fd().as_raw_fd(), kind.flag()),
        }
    };
    check(|| format!("enter a {} namespace", kind.name()), r.into()).map(drop)
}

pub(crate) fn on_a_thread<T: Send, E: From<Error> + Send>(
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, work);
        let thread = thread.map_err(|e| E::from(Error::call("make a thread", e)))?;
        thread.join().unwrap_or_else(|_| {
            Err(Error::Other("work in a namespace failed inside stillpoint".into()).into())
        })
    })
}

/// Lets the mounts of this thread's mount namespace share nothing with others; or, if they `receive`, what is mounted there.
pub fn set_propagation(receive: bool) -> Result<()> {
    let flags = libc::MS_REC | if receive { libc::MS_SLAVE } else { libc::MS_PRIVATE };
    // SAFETY: the path is a string, and the other pointers may be null.
    let r =
        unsafe { libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()) };
    check(|| "set what mounts share".into(), r.into()).map(drop)
}

/// Host name and domain name of the UTS namespace that this thread is in.
pub fn host_names() -> (Vec<u8>, Vec<u8>) {
    let names = rustix::system::uname();
    (names.nodename().to_bytes().to_vec(), names.domainname().to_bytes().to_vec())
}

/// Sets host name and domain name of the UTS namespace that this thread is in.
pub fn set_host_names(host: &[u8], domain: &[u8]) -> Result<()> {
    // SAFETY: both are readable for the length that is given.
    let (of_host, of_domain) = unsafe {
        (
            libc::sethostname(host.as_ptr().cast(), host.len()),
            libc::setdomainname(domain.as_ptr().cast(), domain.len()),
        )
    };
    check(|| "set the host name".into(), of_host.into())?;
    check(|| "set the domain name".into(), of_domain.into()).map(drop)
}

/// Sets the clocks of the time namespace that children of this thread will live in, to which nobody belongs yet: what they differ
/// by from those of the machine, nanoseconds.
pub fn set_clocks(monotonic_ns: i64, boottime_ns: i64) -> Result<()> {
    const SECOND: i64 = 1_000_000_000;
    // A thread is found there by its id, though it is not listed.
    let path = format!("/proc/{}/timens_offsets", rustix::thread::gettid().as_raw_nonzero());
    let line = |name, ns: i64| format!("{name} {} {}\n", ns.div_euclid(SECOND), ns.rem_euclid(SECOND));
    let lines = line("monotonic", monotonic_ns) + &line("boottime", boottime_ns);
    std::fs::write(&path, lines).map_err(|e| Error::file(path, e))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_the_namespace_that_they_are_given_to() {
        let ours = host_names();
        let made = make(NamespaceKind::Uts, || set_host_names(b"still", b"point"));
        let Ok(made) = made else { return }; // not permitted
        {
            let _visit = Visit::enter(NamespaceKind::Uts, &made).unwrap();
            assert_eq!(host_names().0, b"still");
        }
        let within = inside(&[(NamespaceKind::Uts, made.as_fd())], || Ok::<_, Error>(host_names()));
        assert_eq!(within.unwrap(), (b"still".to_vec(), b"point".to_vec()));
        assert_eq!(host_names(), ours);
        let own = open("/proc/self", NamespaceKind::User).unwrap().1;
        assert_eq!(owner(&made).unwrap(), Some(own.id));
        assert_ne!(
            open("/proc/self", NamespaceKind::Uts).unwrap().1.id,
            rustix::fs::fstat(&made).unwrap().st_ino
        );
    }
}
