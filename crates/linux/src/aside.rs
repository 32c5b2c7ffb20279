//! Starting a process that is nobody's child: whoever starts it may be a program whose own waiting for children is not to be
//! disturbed.

use crate::{Error, Result};
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};

/// Room for a process that is on its way to another program, bytes.
const STACK: usize = 64 << 10;

/// What the process is to do that becomes another program.
struct Orders {
    program: *const libc::c_char,
    argv: *const *const libc::c_char,
    input: i32,
    null: i32,
    /// End of the stack of the one that executes the program.
    stack: *mut libc::c_void,
    /// Its id, or less than 1.
    started: i32,
}

/// Starts a program with an open file as its standard input, and nothing else of ours open; returns its process id. It becomes the
/// child of whoever adopts orphans. No `SIGCHLD` comes of it, and nobody who waits for children hears of it.
///
/// Both processes on the way to it share our memory, for which the calling thread waits: the page tables of a large program are not
/// copied.
///
/// A program that cannot be executed ends at once, with exit code 127.
///
/// # Errors
/// That no process can be made.
pub fn start(program: &CStr, arguments: &[&CStr], input: impl AsFd) -> Result<u32> {
    let null = crate::descriptors::null()?;
    let mut argv: Vec<*const libc::c_char> = arguments.iter().map(|a| a.as_ptr()).collect();
    argv.insert(0, program.as_ptr());
    argv.push(std::ptr::null());
    let mut stacks = vec![0u128; 2 * STACK / size_of::<u128>()];
    let ends = stacks.as_mut_ptr_range();
    let (input, null) = (input.as_fd().as_raw_fd(), null.as_raw_fd());
    let (program, argv) = (program.as_ptr(), argv.as_ptr());
    let middle = ends.start.wrapping_byte_add(STACK).cast();
    let mut orders = Orders { program, argv, input, null, stack: middle, started: 0 };
    let (all, mut before) = (u64::MAX, 0u64);
    // SAFETY: whoever is made here has a stack of its own, and this thread, whose memory and thread block they use, waits until both
    // have ended or become other programs (CLONE_VFORK). No signal comes to them meanwhile, so no handler of the program runs
    // there. What they are given lives longer than they do. Without an exit signal the first is none of those that wait(2) tells of.
    let (made, error) = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const all, &raw mut before, 8);
        let flags = libc::CLONE_VM | libc::CLONE_VFORK;
        let made = libc::clone(pass_on, ends.end.cast(), flags, (&raw mut orders).cast());
        let error = std::io::Error::last_os_error();
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const before, 0, 8);
        (made, error)
    };
    if made < 0 {
        return Err(Error::call("make a process", error));
    }
    loop {
        // SAFETY: the kernel writes nothing.
        let r = unsafe { libc::syscall(libc::SYS_wait4, made, 0, libc::__WALL, 0) };
        if r >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            break;
        }
    }
    match orders.started {
        pid if pid > 0 => Ok(pid as u32),
        _ => Err(Error::Other("no process could be made".into())),
    }
}

/// Makes the process that executes the program, and ends, so that it is nobody's child.
extern "C" fn pass_on(orders: *mut libc::c_void) -> libc::c_int {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: `start` hands over its orders, which nobody else uses before this has ended; as there, for the one made here.
    unsafe {
        let ours = orders.cast::<Orders>();
        (*ours).started = libc::clone(execute, (*ours).stack, flags, orders);
    }
    0
}

/// Executes the program. Only plain system calls: locks that other threads hold do not matter.
extern "C" fn execute(orders: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the orders are `start`'s, and live until this has become another program; the numbers are of files open here. Actions
    // of signals are this process's own, in the layout of the kernel.
    unsafe {
        let orders = &*orders.cast::<Orders>();
        for signal in 1..=64 {
            let (mut action, default) = ([0u64; 4], [0u64; 4]);
            libc::syscall(libc::SYS_rt_sigaction, signal, 0, &raw mut action, 8);
            if action[0] > libc::SIG_IGN as u64 {
                libc::syscall(libc::SYS_rt_sigaction, signal, &raw const default, 0, 8);
            }
        }
        let none: u64 = 0;
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, 0, 8);
        libc::syscall(libc::SYS_setsid);
        libc::syscall(libc::SYS_dup2, orders.input, 0);
        libc::syscall(libc::SYS_dup2, orders.null, 1);
        libc::syscall(libc::SYS_dup2, orders.null, 2);
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        libc::syscall(libc::SYS_execve, orders.program, orders.argv, environ());
    }
    127
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
