//! New processes and threads, signals to them. `clone3(2)`, `pidfd_open(2)`.

use crate::proc::own_time_offsets;
use crate::{Error, Result};
use std::ffi::CStr;
use std::os::fd::{FromRawFd, OwnedFd};

/// `struct clone_args`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CloneArgs {
    /// `CLONE_*`.
    pub flags: u64,
    /// Where to store the pidfd.
    pub pidfd: u64,
    /// Where to store the thread id in the child.
    pub child_tid: u64,
    /// Where to store the thread id in the parent.
    pub parent_tid: u64,
    /// Signal to the parent when the child ends.
    pub exit_signal: u64,
    /// Lowest byte of the stack.
    pub stack: u64,
    /// Its size.
    pub stack_size: u64,
    /// TLS base.
    pub tls: u64,
    /// Array of ids, innermost pid namespace first.
    pub set_tid: u64,
    /// Its length.
    pub set_tid_size: u64,
    /// Control group to start in.
    pub cgroup: u64,
}

const _: () = assert!(size_of::<CloneArgs>() == 88);

impl CloneArgs {
    /// Offset of [`CloneArgs::set_tid`].
    pub const SET_TID_OFFSET: u32 = std::mem::offset_of!(CloneArgs, set_tid) as u32;

    /// The arguments as the kernel's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let w = [self.flags, self.pidfd, self.child_tid, self.parent_tid, self.exit_signal, self.stack];
        let v = [self.stack_size, self.tls, self.set_tid, self.set_tid_size, self.cgroup];
        w.iter().chain(&v).flat_map(|x| x.to_le_bytes()).collect()
    }
}

/// A copy of this process that does nothing but wait to be seized, or to die with the thread that made it.
#[derive(Debug)]
pub struct Shell {
    /// Its process id in our namespace.
    pub pid: u32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
}

/// Makes a [`Shell`] with these process ids (`CAP_CHECKPOINT_RESTORE`), the innermost pid namespace first and ours last, or any
/// if there are none.
///
/// The child shares nothing with us but open files. It never returns into Rust code.
pub fn shell(ids: &[u32], flags: u64) -> Result<Shell> {
    let mut pidfd: i32 = -1;
    let mut args = CloneArgs {
        flags: flags | libc::CLONE_PIDFD as u64,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    if !ids.is_empty() {
        args.set_tid = ids.as_ptr() as u64;
        args.set_tid_size = ids.len() as u64;
    }
    let parent = std::process::id();
    // SAFETY: without CLONE_VM the child has its own copy of everything and its own stack. It makes only raw system
    // calls, so locks that other threads of ours held at the time do not matter.
    let r = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    if r == 0 {
        wait_in_shell(parent, flags);
    }
    if r < 0 {
        let what = match ids.last() {
            Some(p) => format!("make a process with id {p}"),
            None => "make a process".into(),
        };
        return Err(Error::call(what, std::io::Error::last_os_error()));
    }
    // SAFETY: the kernel stored a new descriptor that nobody else owns.
    Ok(Shell { pid: r as u32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

/// A process that has ended, and can be had handles to until it is buried.
#[derive(Debug)]
pub struct Corpse {
    /// Its process id in our namespace.
    pub pid: u32,
}

/// Makes a process that ends so, as `wait(2)` tells it. Nobody hears of it.
///
/// # Errors
/// That no process can be made.
pub fn corpse(status: u32) -> Result<Corpse> {
    let args = CloneArgs::default();
    // SAFETY: as in `shell`.
    let r = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    match r {
        0 => end(status),
        1.. => {
            let corpse = Corpse { pid: r as u32 };
            corpse.wait(libc::WEXITED | libc::WNOWAIT)?;
            Ok(corpse)
        }
        _ => Err(Error::call("make a process that ends", std::io::Error::last_os_error())),
    }
}

impl Corpse {
    fn wait(&self, how: i32) -> Result<()> {
        loop {
            // SAFETY: the kernel is told nowhere to put what it finds out.
            let r =
                unsafe { libc::syscall(libc::SYS_waitid, libc::P_PID, self.pid, 0, how | libc::__WALL, 0) };
            match std::io::Error::last_os_error() {
                _ if r == 0 => return Ok(()),
                e if e.kind() == std::io::ErrorKind::Interrupted => {}
                e => return Err(Error::call("wait for a process that ends", e)),
            }
        }
    }
}

impl Drop for Corpse {
    fn drop(&mut self) {
        let _ = self.wait(libc::WEXITED); // then there is none
    }
}

/// A process that does nothing until this is dropped, when it is ended and buried.
#[derive(Debug)]
pub struct Doomed(Corpse);

/// Makes a process with this id, if it is free and we may ([`shell`]), or any. Nobody hears of it but by `SIGCHLD`.
///
/// # Errors
/// That no process can be made.
pub fn doomed(id: u32) -> Result<Doomed> {
    let made = shell(&[id], 0).or_else(|_| shell(&[], 0))?;
    Ok(Doomed(Corpse { pid: made.pid }))
}

impl Doomed {
    /// Its process id in our namespace.
    pub fn pid(&self) -> u32 {
        self.0.pid
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        // It is a child of ours that nobody has waited for, so the number is its own.
        let _ = kill(self.0.pid, libc::SIGKILL);
    }
}

/// The name that the calling thread has in `/proc/PID/comm`, of at most 15 bytes.
pub fn take_name(name: &CStr) {
    // SAFETY: prctl(PR_SET_NAME) reads a string that ends with a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Ends so, without a core.
fn end(status: u32) -> ! {
    let signal = u64::from(status & 0x7f);
    let (default, none) = ([0u64; 4], 0u64);
    // SAFETY: plain system calls, with pointers to what is on the stack.
    unsafe {
        if signal != 0 {
            libc::syscall(libc::SYS_prctl, libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), 0, 8);
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, 0, 8);
            libc::syscall(libc::SYS_kill, libc::syscall(libc::SYS_getpid), signal);
        }
        loop {
            libc::syscall(libc::SYS_exit_group, u64::from(status >> 8 & 0xff));
        }
    }
}

fn wait_in_shell(parent: u32, flags: u64) -> ! {
    let new_namespace = flags & libc::CLONE_NEWPID as u64 != 0;
    // SAFETY: plain system calls without pointers.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        // 1. our parent died before the line above: nobody will ever come. 2. it died after: the signal comes.
        if !new_namespace && libc::syscall(libc::SYS_getppid) != i64::from(parent) {
            libc::syscall(libc::SYS_exit_group, 1);
        }
        loop {
            libc::syscall(libc::SYS_pause);
        }
    }
}

/// The id that the kernel has given last in our pid namespace. `ns_last_pid`, proc(5).
pub fn last_id() -> Result<u32> {
    let text = std::fs::read_to_string(LAST).map_err(|e| Error::file(LAST, e))?;
    text.trim().parse().map_err(|_| Error::file(LAST, std::io::ErrorKind::InvalidData))
}

/// Lets the kernel go on after this id when it gives one of its own choice in our pid namespace: the next process or thread there has
/// the next id, if it is free and nobody is made in between. `CAP_CHECKPOINT_RESTORE`.
pub fn go_on_after(id: u32) -> Result<()> {
    std::fs::write(LAST, id.to_string()).map_err(|e| Error::file(LAST, e))
}

const LAST: &str = "/proc/sys/kernel/ns_last_pid";

/// Sends a signal to a process.
pub fn kill(pid: u32, signal: i32) -> Result<()> {
    // SAFETY: plain numbers.
    match unsafe { libc::kill(pid as i32, signal) } {
        0.. => Ok(()),
        _ => {
            let what = format!("send signal {signal} to process {pid}");
            Err(Error::call(what, std::io::Error::last_os_error()))
        }
    }
}

/// Sends a signal to one thread.
pub fn tgkill(pid: u32, tid: u32, signal: i32) -> Result<()> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) };
    if r < 0 {
        return Err(Error::call(
            format!("send signal {signal} to thread {tid}"),
            std::io::Error::last_os_error(),
        ));
    }
    Ok(())
}

/// Collects a child of ours that was killed, with the threads of it that we trace: the end of each must be seen by
/// its tracer before that of the main thread can be.
pub fn reap(pid: u32) {
    let threads = crate::proc::Proc::process(pid).and_then(|p| p.threads()).unwrap_or_default();
    for tid in threads.into_iter().filter(|&t| t != pid).chain([pid]) {
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        unsafe { libc::waitpid(tid as libc::pid_t, &mut status, libc::__WALL) };
    }
}

/// As [`reap`], without waiting: as far as can be done by now. Returns the parent of what is left of it, if anything is; none of one
/// that has not ended yet.
pub fn reap_now(pid: u32) -> Option<Option<u32>> {
    let process = crate::proc::Proc::process(pid);
    let threads = process.as_ref().map_or(Vec::new(), |p| p.threads().unwrap_or_default());
    for tid in threads.into_iter().filter(|&t| t != pid).chain([pid]) {
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        unsafe { libc::waitpid(tid as libc::pid_t, &mut status, libc::__WALL | libc::WNOHANG) };
    }
    let stat = process.and_then(|p| p.stat()).ok()?;
    Some((stat.state == b'Z' && stat.num_threads <= 1).then_some(stat.ppid))
}

/// Length of the reserved head of the address space that no mapping may use (`vm.mmap_min_addr`), and its end.
pub const ADDRESS_SPACE: (u64, u64) = (0x10000, 0x7fff_ffff_f000);

/// So much of its address space has to be free for a process to be rebuilt, in one piece.
pub const REBUILDING: u64 = 2 << 20;

/// The lowest address, from 4 GiB on, behind which `len` bytes are free.
pub fn find_gap(mut taken: Vec<(u64, u64)>, len: u64) -> Option<u64> {
    taken.sort_unstable();
    let mut at: u64 = 1 << 32;
    for (start, end) in taken {
        if start >= at.saturating_add(len) {
            break;
        }
        at = at.max(end);
    }
    at.checked_add(len).is_some_and(|end| end <= ADDRESS_SPACE.1).then_some(at)
}

/// Puts future children of this thread into a new time namespace (`CAP_SYS_ADMIN`). `time_namespaces(7)`.
pub fn unshare_time() -> std::io::Result<()> {
    const CLONE_NEWTIME: i32 = 0x80;
    own_time_offsets(); // which it can be asked for only before
    // SAFETY: plain flag; this thread itself stays in its namespace.
    if unsafe { libc::unshare(CLONE_NEWTIME) } < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
