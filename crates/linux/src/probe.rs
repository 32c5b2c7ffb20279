//! What this kernel and these privileges allow, found by trying each thing on a process made for it.

use crate::rootless::Apart;
use crate::supervise::check;
use crate::{Error, Result};
use linux_raw_sys::general::{clone_args, pm_scan_arg};
use linux_raw_sys::prctl::prctl_mm_map;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ffi::CStr;
use std::io::{Read, Write};
use std::mem::{size_of, zeroed};

/// A process that only waits, and that is not a descendant of ours: the kernel treats it like any other program of
/// this user. It is killed on drop.
#[derive(Debug)]
pub struct Subject {
    pid: i32,
    pidfd: OwnedFd,
}

/// Seconds after which a subject ends by itself, should we be killed before we can end it.
const LIFE: u32 = 30;

impl Subject {
    /// Starts one; `apart`, in a user namespace of its own. To be called while this process has one thread.
    pub fn start(apart: Option<&Apart>) -> Result<Self> {
        let (mut reader, writer) = std::io::pipe().map_err(|e| Error::call("pipe", e))?;
        // SAFETY: the children only make calls that are safe after fork and leave by _exit or a signal.
        unsafe {
            let middle = libc::fork();
            check("fork", middle)?;
            if middle == 0 {
                if let Some(Err(errno)) = apart.map(|apart| apart.enter()) {
                    let _ = (&writer).write_all(&(-errno).to_ne_bytes());
                    libc::_exit(1);
                }
                let pid = libc::fork();
                if pid == 0 {
                    libc::alarm(LIFE);
                    loop {
                        libc::pause();
                    }
                }
                let _ = (&writer).write_all(&pid.to_ne_bytes());
                libc::_exit(0);
            }
            libc::waitpid(middle, std::ptr::null_mut(), 0);
        }
        drop(writer);
        let mut pid = [0; 4];
        reader.read_exact(&mut pid).map_err(|e| Error::call("fork", e))?;
        let pid = i32::from_ne_bytes(pid);
        if pid < 0 {
            return Err(Error::call("start a process", std::io::Error::from_raw_os_error(-pid)));
        }
        // SAFETY: pidfd_open(2) takes no pointers and returns a descriptor that nobody else owns.
        let pidfd = unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32;
            check("pidfd_open", fd)?;
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Self { pid, pidfd })
    }

    /// `pidfd_getfd`: descriptors can be taken out of a program.
    pub fn pidfd_getfd(&self) -> Result<()> {
        // SAFETY: pidfd_getfd(2) takes no pointers; the new descriptor is ours alone and closed at once.
        unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_getfd, self.pidfd.as_raw_fd(), 2, 0) as i32;
            check("pidfd_getfd", fd)?;
            drop(OwnedFd::from_raw_fd(fd));
        }
        Ok(())
    }

    /// `process_vm_readv`: memory of a program can be read.
    pub fn process_vm_readv(&self) -> Result<()> {
        static WORD: u64 = 0x005e_ed0f_5711;
        let mut word = 0u64;
        let local = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
        let remote = libc::iovec { iov_base: (&raw const WORD).cast_mut().cast(), iov_len: 8 };
        // SAFETY: the kernel writes 8 bytes to `word`; the remote address is only read, in the other process, which is
        // a copy of this one.
        let done = unsafe { libc::process_vm_readv(self.pid, &local, 1, &remote, 1, 0) };
        check("process_vm_readv", done as i32)?;
        if word == WORD { Ok(()) } else { Err(Error::Other("process_vm_readv read something else".into())) }
    }

    /// `kcmp`: shared objects of two processes can be told from copies.
    pub fn kcmp(&self) -> Result<()> {
        const KCMP_FILE: i32 = 0;
        // SAFETY: kcmp(2) takes no pointers for this type.
        let order = unsafe { libc::syscall(libc::SYS_kcmp, libc::getpid(), self.pid, KCMP_FILE, 2, 2) };
        check("kcmp", order as i32)
    }

    /// `PAGEMAP_SCAN` (Linux 6.7): the pages that a program wrote can be listed.
    pub fn pagemap_scan(&self) -> Result<()> {
        const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610; // _IOWR('f', 16, struct pm_scan_arg)
        const { assert!(size_of::<pm_scan_arg>() == 96) };
        let path = format!("/proc/{}/pagemap", self.pid);
        let pagemap = std::fs::File::open(&path).map_err(|e| Error::file(&path, e))?;
        // SAFETY: zero is a valid `pm_scan_arg`: an empty range and no room for answers, so that no pointer is followed.
        unsafe {
            let mut arg: pm_scan_arg = zeroed();
            arg.size = size_of::<pm_scan_arg>() as u64;
            check("PAGEMAP_SCAN", libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg))
        }
    }

    /// `/proc/PID/map_files`: the very file behind a mapping can be opened, also when it was deleted or replaced.
    pub fn map_files(&self) -> Result<()> {
        let path = format!("/proc/{}/map_files", self.pid);
        let mut entries = std::fs::read_dir(&path).map_err(|e| Error::file(&path, e))?;
        let entry = entries.next().ok_or_else(|| Error::Other(format!("{path} is empty")))?;
        let file = entry.map_err(|e| Error::file(&path, e))?.path();
        std::fs::File::open(&file).map(drop).map_err(|e| Error::file(&file, e))
    }

    /// Attaches with ptrace and asks what only a tracer can ask.
    pub fn ptrace(&self) -> Result<Traced> {
        self.call("PTRACE_SEIZE", libc::PTRACE_SEIZE, 0, std::ptr::null_mut())?;
        self.call("PTRACE_INTERRUPT", libc::PTRACE_INTERRUPT, 0, std::ptr::null_mut())?;
        // SAFETY: waits for a process that we trace.
        check("wait4", unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), libc::__WALL) })?;
        let mut buffer = [0u64; 32];
        let room = size_of_val(&buffer);
        let data: *mut libc::c_void = buffer.as_mut_ptr().cast();
        let syscall_info = self.call("PTRACE_GET_SYSCALL_INFO", libc::PTRACE_GET_SYSCALL_INFO, room, data);
        const PTRACE_GET_RSEQ_CONFIGURATION: u32 = 0x420f;
        let rseq = self.call("PTRACE_GET_RSEQ_CONFIGURATION", PTRACE_GET_RSEQ_CONFIGURATION, 24, data);
        const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;
        let filter =
            self.call("PTRACE_SECCOMP_GET_FILTER", PTRACE_SECCOMP_GET_FILTER, 0, std::ptr::null_mut());
        // It has no filter: past the check of privileges, the kernel says so.
        let filter = match filter {
            Err(e) if matches!(e.errno(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
            other => other,
        };
        self.call("PTRACE_DETACH", libc::PTRACE_DETACH, 0, std::ptr::null_mut())?;
        Ok(Traced { syscall_info, rseq, filter })
    }

    fn call(&self, name: &str, request: u32, addr: usize, data: *mut libc::c_void) -> Result<()> {
        // SAFETY: `data` is null, or has room for the size that goes in `addr` (24 for the rseq configuration).
        check(name, unsafe { libc::ptrace(request, self.pid, addr, data) } as i32)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let (pidfd, kill) = (self.pidfd.as_raw_fd(), libc::SIGKILL);
        // SAFETY: a null siginfo is that of kill(2).
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd, kill, std::ptr::null::<u8>(), 0) };
    }
}

/// What the kernel tells a tracer.
#[derive(Debug)]
pub struct Traced {
    /// `PTRACE_GET_SYSCALL_INFO`.
    pub syscall_info: Result<()>,
    /// `PTRACE_GET_RSEQ_CONFIGURATION`.
    pub rseq: Result<()>,
    /// `PTRACE_SECCOMP_GET_FILTER`.
    pub filter: Result<()>,
}

/// Runs `action` in a child. It returns an error number (0: it worked) and may only make system calls.
pub(crate) fn in_child(call: &str, action: impl FnOnce() -> i32) -> Result<()> {
    // SAFETY: the child runs the action, of which the callers in this file see to it that it is safe after fork, and
    // leaves by _exit.
    let pid = unsafe { libc::fork() };
    check("fork", pid)?;
    if pid == 0 {
        let errno = action();
        // SAFETY: leaves at once.
        unsafe { libc::_exit(errno) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child; the pointer is to a live value.
    check("wait4", unsafe { libc::waitpid(pid, &mut status, 0) })?;
    match libc::WEXITSTATUS(status) {
        _ if !libc::WIFEXITED(status) => Err(Error::Other(format!("{call} killed its caller"))),
        0 => Ok(()),
        errno => Err(Error::call(call, std::io::Error::from_raw_os_error(errno))),
    }
}

fn errno() -> i32 {
    // SAFETY: glibc's and musl's way to the thread's errno.
    unsafe { *libc::__errno_location() }
}

fn unshare(call: &str, flag: i32) -> Result<()> {
    // SAFETY: unshare(2) takes no pointers.
    in_child(call, || if unsafe { libc::unshare(flag) } == 0 { 0 } else { errno() })
}

/// A private pid namespace.
pub fn pid_namespace() -> Result<()> {
    unshare("unshare(CLONE_NEWPID)", libc::CLONE_NEWPID)
}

/// A time namespace with clocks that are set.
pub fn time_namespace() -> Result<()> {
    const CLONE_NEWTIME: i32 = 0x80;
    const OFFSETS: &CStr = c"monotonic 1 0\n";
    in_child("a time namespace with other clocks", || {
        // SAFETY: unshare(2) takes no pointers; the path and what is written are literals.
        let written = unsafe {
            if libc::unshare(CLONE_NEWTIME) != 0 {
                return errno();
            }
            let file = libc::open(c"/proc/self/timens_offsets".as_ptr(), libc::O_WRONLY);
            if file < 0 {
                return errno();
            }
            libc::write(file, OFFSETS.as_ptr().cast(), OFFSETS.count_bytes())
        };
        if written < 0 { errno() } else { 0 }
    })
}

/// `clone3` with a chosen process id.
pub fn set_tid() -> Result<()> {
    let mut result = Ok(());
    for _ in 0..16 {
        let pid = free_pid()?;
        result = in_child("clone3 with set_tid", || clone_as(pid));
        // Somebody was faster to take the id: try another.
        if !matches!(&result, Err(e) if e.errno() == Some(libc::EEXIST)) {
            break;
        }
    }
    result
}

/// A process id that was free a moment ago: that of a child that has been reaped.
fn free_pid() -> Result<i32> {
    // SAFETY: the child leaves at once; the parent reaps it.
    unsafe {
        let pid = libc::fork();
        check("fork", pid)?;
        if pid == 0 {
            libc::_exit(0);
        }
        check("wait4", libc::waitpid(pid, std::ptr::null_mut(), 0))?;
        Ok(pid)
    }
}

/// Makes a child with this process id and waits for its end; returns an error number.
fn clone_as(pid: i32) -> i32 {
    // SAFETY: zero is a valid `clone_args`; without CLONE_VM and a stack clone3 is a fork, and the child leaves at once.
    unsafe {
        let mut args: clone_args = zeroed();
        args.exit_signal = libc::SIGCHLD as u64;
        args.set_tid = (&raw const pid) as u64;
        args.set_tid_size = 1;
        let child = libc::syscall(libc::SYS_clone3, &raw const args, size_of::<clone_args>());
        match child {
            0 => libc::_exit(0),
            1.. => {
                libc::waitpid(child as i32, std::ptr::null_mut(), libc::__WALL);
                0
            }
            _ => errno(),
        }
    }
}

/// `PR_SET_MM_MAP`: the kernel's record of a program's layout (its command line, heap, …) can be set.
pub fn set_mm_map() -> Result<()> {
    let layout = own_layout()?;
    const PR_SET_MM: i32 = 35;
    const PR_SET_MM_MAP: usize = 14;
    // SAFETY: prctl(2) reads a live structure, which holds what the child already has, no auxv and no exe_fd.
    in_child("prctl(PR_SET_MM_MAP)", || unsafe {
        let done =
            libc::prctl(PR_SET_MM, PR_SET_MM_MAP, &raw const layout, size_of::<prctl_mm_map>(), 0usize);
        if done == 0 { 0 } else { errno() }
    })
}

/// `PR_SET_MM_MAP` with an executable, which takes a privilege: a process can be told to be of another program.
pub fn set_executable() -> Result<()> {
    let path = "/proc/self/exe";
    let executable = std::fs::File::open(path).map_err(|e| Error::file(path, e))?;
    let layout = prctl_mm_map { exe_fd: executable.as_raw_fd() as u32, ..own_layout()? };
    const PR_SET_MM: i32 = 35;
    const PR_SET_MM_MAP: usize = 14;
    // SAFETY: as in `set_mm_map`.
    in_child("prctl(PR_SET_MM_MAP) with an executable", || unsafe {
        let done =
            libc::prctl(PR_SET_MM, PR_SET_MM_MAP, &raw const layout, size_of::<prctl_mm_map>(), 0usize);
        // That would be allowed if what it is now were not mapped.
        if done == 0 || errno() == libc::EBUSY { 0 } else { errno() }
    })
}

/// Our own layout, as `/proc/self/stat` tells it (proc_pid_stat(5); fields are counted from 1).
fn own_layout() -> Result<prctl_mm_map> {
    let path = "/proc/self/stat";
    let stat = std::fs::read_to_string(path).map_err(|e| Error::file(path, e))?;
    let behind = stat.rsplit_once(") ").map_or("", |(_, rest)| rest); // starts with field 3
    let fields: Vec<u64> = behind.split_whitespace().map(|f| f.parse().unwrap_or(0)).collect();
    let field = |n: usize| fields.get(n - 3).copied().unwrap_or(0);
    if fields.len() < 49 {
        return Err(Error::Parse { path: path.into(), line: stat });
    }
    // SAFETY: zero is a valid `prctl_mm_map`, and brk(0) only asks.
    let (mut layout, brk) = unsafe { (zeroed::<prctl_mm_map>(), libc::syscall(libc::SYS_brk, 0) as u64) };
    layout.start_code = field(26);
    layout.end_code = field(27);
    layout.start_stack = field(28);
    layout.start_data = field(45);
    layout.end_data = field(46);
    layout.start_brk = field(47);
    layout.brk = brk;
    layout.arg_start = field(48);
    layout.arg_end = field(49);
    layout.env_start = field(50);
    layout.env_end = field(51);
    layout.exe_fd = u32::MAX;
    Ok(layout)
}

/// What becomes of the first write to a protected page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// The kernel notes it and lets it pass (Linux 6.7).
    Noted,
    /// It waits until somebody lets it pass.
    Waits,
}

/// userfaultfd with write-protection. Who only notes writes need not hear of the kernel's own, which waits for nobody then: so everybody
/// may.
pub fn userfaultfd(protection: Protection) -> Result<()> {
    const USER_MODE_ONLY: i32 = 1;
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const PAGEFAULT_FLAG_WP: u64 = 1;
    const WP_UNPOPULATED: u64 = 1 << 13;
    const WP_ASYNC: u64 = 1 << 15;
    let (features, only) = match protection {
        Protection::Noted => (PAGEFAULT_FLAG_WP | WP_UNPOPULATED | WP_ASYNC, USER_MODE_ONLY),
        Protection::Waits => (PAGEFAULT_FLAG_WP, 0),
    };
    // SAFETY: userfaultfd(2) takes no pointers and returns a descriptor that nobody else owns; UFFDIO_API reads and
    // writes the three words of `struct uffdio_api`.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | only) as i32;
        check("userfaultfd", fd)?;
        let fd = OwnedFd::from_raw_fd(fd);
        let mut api = [0xaau64, features, 0];
        check("UFFDIO_API", libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()))
    }
}
