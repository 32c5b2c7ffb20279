//! Starting a process that is nobody's child: whoever starts it may be a program whose own waiting for children is not to be
//! disturbed.

use crate::{Error, Result};
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};

/// Starts a program with an open file as its standard input, and nothing else of ours open; returns its process id. It becomes the
/// child of whoever adopts orphans. No `SIGCHLD` comes of it, and nobody who waits for children hears of it.
///
/// A program that cannot be executed ends at once, with exit code 127.
///
/// # Errors
/// That no process can be made.
pub fn start(program: &CStr, arguments: &[&CStr], input: impl AsFd) -> Result<u32> {
    let null = crate::descriptors::null()?;
    let (told, tell) = crate::pipes::pipe(libc::O_CLOEXEC)?;
    let mut argv: Vec<*const libc::c_char> = arguments.iter().map(|a| a.as_ptr()).collect();
    argv.insert(0, program.as_ptr());
    argv.push(std::ptr::null());
    let (input, null, tell_to) = (input.as_fd().as_raw_fd(), null.as_raw_fd(), tell.as_raw_fd());
    // SAFETY: without CLONE_VM the child has its own copy of everything and its own stack. It makes only raw system calls, so locks
    // that other threads of ours held at the time do not matter. Without an exit signal it is none of those that wait(2) tells of.
    let between = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
    if between == 0 {
        // SAFETY: as above; the pointers are to memory that both copies have, and the numbers are of files open in both.
        unsafe {
            let started = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
            if started == 0 {
                let none: u64 = 0;
                libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, 0, 8);
                libc::syscall(libc::SYS_setsid);
                libc::syscall(libc::SYS_dup2, input, 0);
                libc::syscall(libc::SYS_dup2, null, 1);
                libc::syscall(libc::SYS_dup2, null, 2);
                libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
                libc::syscall(libc::SYS_execve, program.as_ptr(), argv.as_ptr(), environ());
                libc::syscall(libc::SYS_exit_group, 127);
            }
            let pid = started as i32;
            libc::syscall(libc::SYS_write, tell_to, &raw const pid, size_of::<i32>());
            libc::syscall(libc::SYS_exit_group, 0);
        }
    }
    if between < 0 {
        return Err(Error::call("make a process", std::io::Error::last_os_error()));
    }
    drop(tell);
    let mut pid = [0; 4];
    let read = rustix::io::read(&told, &mut pid);
    loop {
        // SAFETY: the kernel writes nothing.
        let r = unsafe { libc::syscall(libc::SYS_wait4, between, 0, libc::__WALL, 0) };
        if r >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            break;
        }
    }
    match (read, i32::from_ne_bytes(pid)) {
        (Ok(4), pid) if pid > 0 => Ok(pid as u32),
        _ => Err(Error::Other("no process could be made".into())),
    }
}

fn environ() -> *const *const libc::c_char {
    unsafe extern "C" {
        static environ: *const *const libc::c_char;
    }
    // SAFETY: the C library keeps it valid; nobody changes it in the copy of the process that asks.
    unsafe { environ }
}

/// Whether this process has more rights than who has executed it (set-user-id and the like).
pub fn is_privileged() -> bool {
    // SAFETY: reads the process's own auxiliary vector.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Lets a process look into this one as a debugger does, where the system asks for that (Yama).
pub fn let_look(pid: u32) {
    // SAFETY: plain numbers. Where there is no Yama the call fails, and nothing is asked.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, u64::from(pid), 0, 0, 0) };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn nobody_waits_for_it() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let pid = start(c"/bin/sh", &[c"-c", c"ls -l /proc/$$/fd >&0; echo $$ >&0"], &theirs).unwrap();
        drop(theirs);
        let mut said = String::new();
        ours.read_to_string(&mut said).unwrap();
        assert!(said.trim_end().ends_with(&pid.to_string()), "{said}");
        // (The shell keeps one of its own from 10 on.)
        assert!((3..10).all(|fd| !said.contains(&format!(" {fd} -> "))), "{said}");
        // SAFETY: the kernel writes nothing.
        let r = unsafe { libc::waitpid(pid as i32, std::ptr::null_mut(), libc::WNOHANG) };
        assert!(r < 0);
    }
}
