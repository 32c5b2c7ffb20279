//! Processes of ours that go where no thread of several can go, into user and pid namespaces, do something there, and wait: what they
//! have opened and entered can be fetched from them as long as they are there. `user_namespaces(7)`

use crate::descriptors::{check, duplicate_from, pidfd_open};
use crate::local::LocalRun;
use crate::namespaces::open;
use crate::proc::NamespaceKind;
use crate::program::{Arg, Program, Run, Step};
use crate::{Error, Result};
use std::io::{Error as IoError, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// `SECBIT_NO_SETUID_FIXUP`: changing user ids leaves capabilities alone.
const NO_SETUID_FIXUP: u64 = 1 << 2;

/// A copy of this process that has run a program, and is there until this is dropped.
#[derive(Debug)]
pub struct Messenger {
    pid: u32,
    pidfd: OwnedFd,
    results: Vec<i64>,
}

impl Messenger {
    /// Sends one to run a program.
    ///
    /// # Errors
    /// That a call in it failed that must not.
    pub fn send(program: &Program) -> Result<Self> {
        Self::go(program, None)
    }

    /// The same, in the pid namespace that this process is in. It gets a number there.
    ///
    /// # Errors
    /// As [`Messenger::send`].
    pub fn send_to(process: BorrowedFd<'_>, program: &Program) -> Result<Self> {
        Self::go(program, Some(process))
    }

    fn go(program: &Program, into: Option<BorrowedFd<'_>>) -> Result<Self> {
        let pipe = || std::io::pipe().map_err(|e| Error::call("make a pipe", e));
        // Who has been made tells how it went, and whoever made him in another namespace who that is: in whatever order.
        let ((mut reading, writing), (mut whose, who)) = (pipe()?, pipe()?);
        // SAFETY: the child is a process of its own with a copy of everything; the C library has seen to its own locks, and no other
        // lock is taken in it. It never returns from here.
        let made = unsafe { libc::fork() };
        let first = check(|| "make a process".into(), made.into())? as u32;
        if first == 0 {
            deliver(program, into, writing.as_raw_fd(), who.as_raw_fd());
        }
        drop((writing, who));
        let mut made = [0; 8];
        let pid = whose.read_exact(&mut made).map_or(first, |()| u64::from_le_bytes(made) as u32);
        let mut answer = Vec::new();
        let read = reading.read_to_end(&mut answer);
        let (words, _) = answer.as_chunks::<8>();
        let mut words = words.iter().map(|word| i64::from_le_bytes(*word));
        if pid != first {
            // Whoever led the way has ended by now.
            crate::spawn::reap(first);
        }
        let pidfd = pidfd_open(pid, 0).inspect_err(|_| end(pid))?;
        let error = words.next().unwrap_or(i64::from(libc::ESRCH));
        let messenger = Messenger { pid, pidfd, results: words.collect() };
        read.map_err(|e| Error::call("hear of a process", e))?;
        if error != 0 {
            let what = String::from_utf8_lossy(answer.get(8..).unwrap_or_default());
            return Err(Error::call(what, IoError::from_raw_os_error(error as i32)));
        }
        Ok(messenger)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Fetches the descriptor that a call has returned.
    ///
    /// # Errors
    /// That it cannot be had.
    pub fn file(&self, step: Step) -> Result<OwnedFd> {
        let number = self.results.get(step.0 as usize).copied().unwrap_or(-1);
        duplicate_from(self.pidfd.as_fd(), number as u32)
    }
}

impl Drop for Messenger {
    fn drop(&mut self) {
        end(self.pid);
    }
}

fn end(pid: u32) {
    let _ = crate::spawn::tgkill(pid, pid, libc::SIGKILL);
    crate::spawn::reap(pid);
}

/// Runs the program and tells how that went: error, and all results or the call that failed; and who runs it, if that is another one.
fn deliver(program: &Program, into: Option<BorrowedFd<'_>>, answer: i32, who: i32) -> ! {
    // SAFETY: plain system calls without pointers; this process has one thread, and nobody here uses the descriptor any more.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        if let Some(into) = into {
            // A child of our parent, which is the one to bury it, and not process 1 there.
            let flags = libc::CLONE_PARENT | libc::SIGCHLD;
            let made = match libc::setns(into.as_raw_fd(), libc::CLONE_NEWPID) {
                0 => libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0),
                _ => -1,
            };
            if made < 0 {
                let error = IoError::last_os_error().raw_os_error().unwrap_or(libc::EIO);
                say(answer, &[error.into()], "enter a pid namespace");
            }
            if made != 0 {
                say(who, if made > 0 { std::slice::from_ref(&made) } else { &[] }, "");
                libc::_exit(0);
            }
            libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        }
        libc::close(who);
    }
    match LocalRun.run(program) {
        Ok(outcome) => say(answer, &[&[0], &outcome.results[..]].concat(), ""),
        Err(Error::Remote { call, source, .. }) => {
            say(answer, &[source.raw_os_error().unwrap_or(libc::EIO).into()], &call);
        }
        Err(e) => say(answer, &[libc::EIO.into()], &e.to_string()),
    }
    // SAFETY: plain system calls; nobody here uses the descriptor any more.
    unsafe {
        libc::close(answer);
        loop {
            libc::syscall(libc::SYS_pause);
        }
    }
}

fn say(answer: i32, words: &[i64], text: &str) {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(text.as_bytes());
    // SAFETY: the bytes are readable for their length.
    unsafe { libc::write(answer, bytes.as_ptr().cast(), bytes.len()) };
}

/// Makes a namespace that belongs to a user namespace. It is there as long as anybody has it open or is in it.
///
/// # Errors
/// That it cannot be made.
pub fn make_in(users: impl AsFd, kind: NamespaceKind) -> Result<OwnedFd> {
    make_by(Some(users.as_fd()), kind, &[])
}

/// Makes a namespace, which belongs to a user namespace if one is given, by somebody who first joins the control groups with these lists of
/// members, where he can.
///
/// # Errors
/// That it cannot be made.
pub fn make_by(users: Option<BorrowedFd<'_>>, kind: NamespaceKind, groups: &[PathBuf]) -> Result<OwnedFd> {
    let mut program = Program::new();
    for members in groups {
        try_to_write(&mut program, members.as_os_str().as_bytes(), b"0");
    }
    if let Some(users) = users {
        enter(&mut program, NamespaceKind::User, users);
    }
    begin(&mut program, kind);
    let maker = Messenger::send(&program)?;
    Ok(open(&format!("/proc/{}", maker.pid()), kind)?.0)
}

/// Adds the call after which changing user ids leaves capabilities alone. Who may not do this has nothing that he could lose.
pub fn keep_capabilities(program: &mut Program) {
    let securebits = [(libc::PR_SET_SECUREBITS as u64).into(), NO_SETUID_FIXUP.into()];
    program.attempt("keep capabilities", libc::SYS_prctl, securebits);
}

/// Adds the calls by which whoever runs them becomes another user, without giving up a privilege.
pub fn become_user(program: &mut Program, uid: u64, gid: u64) {
    keep_capabilities(program);
    program.call("setresgid", libc::SYS_setresgid, [gid.into(), gid.into(), gid.into()]);
    program.call("setresuid", libc::SYS_setresuid, [uid.into(), uid.into(), uid.into()]);
}

/// Adds the call by which whoever runs it, or his children, enter a namespace.
pub fn enter(program: &mut Program, kind: NamespaceKind, namespace: impl AsFd) {
    let number = namespace.as_fd().as_raw_fd() as u64;
    let what = format!("enter a {} namespace", kind.name());
    program.call(what, libc::SYS_setns, [number.into(), (kind.flag() as u64).into()]);
}

/// Adds the call by which whoever runs it begins a namespace.
pub fn begin(program: &mut Program, kind: NamespaceKind) {
    let what = format!("make a {} namespace", kind.name());
    program.call(what, libc::SYS_unshare, [(kind.flag() as u64).into()]);
}

/// Adds the calls that write a file.
pub fn write(program: &mut Program, path: &str, contents: &[u8]) {
    let (name, text) = (program.string(path.as_bytes()), program.data(contents));
    let at = Arg::Value(libc::AT_FDCWD as u64);
    let flags = Arg::Value((libc::O_WRONLY | libc::O_CLOEXEC) as u64);
    let file = program.call(format!("open {path}"), libc::SYS_openat, [at, name, flags]);
    program.call(
        format!("write {path}"),
        libc::SYS_write,
        [file.into(), text, (contents.len() as u64).into()],
    );
    program.call("close", libc::SYS_close, [file.into()]);
}

/// Adds calls that write a file, if that can be done.
pub fn try_to_write(program: &mut Program, path: &[u8], contents: &[u8]) {
    let (name, text) = (program.string(path), program.data(contents));
    let at = Arg::Value(libc::AT_FDCWD as u64);
    let flags = Arg::Value((libc::O_WRONLY | libc::O_CLOEXEC) as u64);
    let file = program.attempt("open a file", libc::SYS_openat, [at, name, flags]);
    program.attempt("write a file", libc::SYS_write, [file.into(), text, (contents.len() as u64).into()]);
    program.attempt("close a file", libc::SYS_close, [file.into()]);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::namespaces::{owner, owner_uid, parent};

    #[test]
    fn a_user_namespace_has_the_names_that_it_is_given() {
        let mut there = Program::new();
        begin(&mut there, NamespaceKind::User);
        let Ok(inhabitant) = Messenger::send(&there) else { return }; // not permitted
        let folder = format!("/proc/{}", inhabitant.pid());
        let (file, space) = open(&folder, NamespaceKind::User).unwrap();
        let home = open("/proc/self", NamespaceKind::User).unwrap().1;
        assert_eq!(parent(&file).unwrap().map(|(_, id)| id), Some(home.id));
        assert_eq!(owner_uid(&file).unwrap(), rustix::process::geteuid().as_raw());
        let own = rustix::process::geteuid().as_raw();
        let mut names = Program::new();
        write(&mut names, &format!("{folder}/setgroups"), b"deny");
        write(&mut names, &format!("{folder}/uid_map"), format!("7 {own} 1\n").as_bytes());
        Messenger::send(&names).unwrap();
        let map = std::fs::read_to_string(format!("{folder}/uid_map")).unwrap();
        assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["7", &own.to_string(), "1"]);
        let made = make_in(&file, NamespaceKind::Uts).unwrap();
        assert_eq!(owner(&made).unwrap(), Some(space.id));
    }

    #[test]
    fn what_fails_is_told() {
        let mut program = Program::new();
        write(&mut program, "/proc/self/no_such_file", b"");
        let failed = Messenger::send(&program).unwrap_err();
        assert_eq!(failed.errno(), Some(libc::ENOENT));
        assert!(failed.to_string().contains("open /proc/self/no_such_file"), "{failed}");
    }
}
