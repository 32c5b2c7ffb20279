//! Somebody who sees to it that nothing is left of a program if we are killed while only some of its processes end with us.
//!
//! Threads that are traced with `PTRACE_O_EXITKILL` end with their tracer. To ask for that, or to ask no more, takes a call for each of
//! them: whoever kills us in between would kill a part of the program. So another process of ours, which does nothing else, has the
//! pidfds of all meanwhile, and kills all of them when we are gone.
//!
//! 1. It is given a pidfd of each process. If we end now, it does nothing.
//! 2. It is told that it begins. If we end now, it kills them.
//! 3. It is told that it is over, and lets go of them.

use crate::passing::{MOST, receive, send};
use crate::spawn;
use crate::split::{Split, close_all_but, copy, leave};
use crate::{Error, Result};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::setsid;

const SOME: u8 = b'p';
const BEGINS: u8 = b'b';
const OVER: u8 = b'o';

/// It, as we see it.
#[derive(Debug)]
pub struct Guard {
    /// None when it is to end.
    line: Option<OwnedFd>,
    pid: u32,
}

impl Guard {
    /// Makes one ([`copy`] says what other threads of ours may do meanwhile).
    ///
    /// # Errors
    /// That no process can be made.
    pub fn start() -> Result<Self> {
        let (ours, its) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| Error::call("socketpair", e))?;
        match copy()? {
            Split::Original(child) => Ok(Guard { line: Some(ours), pid: child.pid }),
            Split::Copy => {
                close_all_but(&[its.as_raw_fd()]);
                // Signals for our group and the end of our terminal are not for it.
                let _ = setsid();
                spawn::take_name(c"tree keeper");
                watch(&its);
                leave(0)
            }
        }
    }

    /// Makes one that knows these processes.
    ///
    /// # Errors
    /// As [`Guard::start`] and [`Guard::know`].
    pub fn over(pidfds: &[BorrowedFd<'_>]) -> Result<Self> {
        let guard = Self::start()?;
        guard.know(pidfds)?;
        Ok(guard)
    }

    /// Gives it handles of these processes, too.
    ///
    /// # Errors
    /// That it has been killed.
    pub fn know(&self, pidfds: &[BorrowedFd<'_>]) -> Result<()> {
        pidfds.chunks(MOST).try_for_each(|some| self.say(SOME, some))
    }

    /// From now on those that it knows end with us, the last of them first.
    ///
    /// # Errors
    /// That it has been killed.
    pub fn begin(&self) -> Result<()> {
        self.say(BEGINS, &[])
    }

    /// They do not any more, and are not known any more. (Who has been killed needs not be told.)
    pub fn end(&self) {
        let _ = self.say(OVER, &[]);
    }

    fn say(&self, word: u8, pidfds: &[BorrowedFd<'_>]) -> Result<()> {
        let line = self.line.as_ref().ok_or_else(|| Error::Other("nobody watches".into()))?;
        send(line, &[word], pidfds)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.line = None;
        spawn::reap(self.pid);
    }
}

/// What the other process does until we are gone.
fn watch(line: &OwnedFd) {
    let (mut pidfds, mut begun): (Vec<OwnedFd>, bool) = (Vec::new(), false);
    let mut word = [0];
    while receive(line, &mut word, &mut pidfds).is_ok_and(|n| n == 1) {
        match word[0] {
            BEGINS => begun = true,
            OVER => {
                begun = false;
                pidfds.clear();
            }
            _ => {}
        }
    }
    if begun {
        for pidfd in pidfds.iter().rev() {
            let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::descriptors::pidfd_open;
    use rustix::fd::AsFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    /// Whether a process is killed by the end of a guard's line after this.
    fn is_killed(after: impl FnOnce(&Guard, BorrowedFd<'_>)) -> bool {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pidfd = pidfd_open(child.id(), 0).unwrap();
        let guard = Guard::start().unwrap();
        after(&guard, pidfd.as_fd());
        drop(guard); // waits for it
        // The first signal that ends it is the one that it ends by.
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        match child.wait().unwrap().signal() {
            Some(libc::SIGKILL) => true,
            Some(libc::SIGTERM) => false,
            other => panic!("ended by {other:?}"),
        }
    }

    #[test]
    fn they_end_with_us_only_in_between() {
        assert!(!is_killed(|guard, pidfd| guard.know(&[pidfd]).unwrap()));
        assert!(is_killed(|guard, pidfd| guard.know(&[pidfd]).and_then(|()| guard.begin()).unwrap()));
        assert!(!is_killed(|guard, pidfd| {
            guard.know(&[pidfd]).and_then(|()| guard.begin()).unwrap();
            guard.end();
        }));
    }
}
