//! Who is inside a barrier: a word of each thread, written by plain stores, read by the checkpointer alone.
//!
//! A thread says that it is inside (`inside = 1`) before it reads the offset, and that it is out again after its last store.
//! Between the two it executes no fence; `membarrier(2)` makes the checkpointer pay for it: when the call returns, every
//! thread has either made `inside = 1` visible, or has not read the offset yet and will read the new one.
#![allow(unsafe_code)]

use crate::error::Error;
use std::arch::{asm, global_asm};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

global_asm!(
    ".section .tbss.stillpoint_mirror_inside,\"awT\",@nobits",
    ".globl stillpoint_mirror_inside",
    ".type stillpoint_mirror_inside, @object",
    ".size stillpoint_mirror_inside, 8",
    ".balign 8",
    "stillpoint_mirror_inside:",
    ".zero 8",
    ".text",
);

/// What a thread tells of itself; `stillpoint_mirror_inside` is the first byte.
#[repr(C)]
pub struct Words {
    /// 1 from before the offset is read until after the last store that depends on it.
    pub inside: AtomicU8,
    /// Whether the checkpointer knows this thread.
    pub registered: AtomicU8,
    reserved: [u8; 2],
    /// Signal handlers that interrupted this thread inside a barrier and have not returned.
    pub pinned: AtomicU32,
}
const _: () = assert!(size_of::<Words>() == 8);

/// The words of the calling thread.
#[inline(always)]
pub fn words() -> &'static Words {
    let address: usize;
    // SAFETY: fs:0 holds the thread pointer (x86-64 TLS ABI), and the words are in the static block of every thread. They
    // live as long as the thread, which is the only one to have this reference.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + stillpoint_mirror_inside@GOTTPOFF]",
            "add {0}, qword ptr fs:[0]",
            out(reg) address,
            options(pure, readonly, nostack)
        );
        &*(address as *const Words)
    }
}

struct Known {
    thread: i32,
    words: *const Words,
}
// SAFETY: the words are atomics; an entry is removed, under the lock, before its thread's memory goes away.
unsafe impl Send for Known {}

static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
static COMPILED: AtomicBool = AtomicBool::new(false);

/// Says that there is code with barriers of the compiler, which do not ask whether their thread is known.
pub fn expect_unknown_threads() {
    COMPILED.store(true, Ordering::SeqCst);
}

struct Leave;
impl Drop for Leave {
    fn drop(&mut self) {
        let words = words();
        known().retain(|k| !std::ptr::eq(k.words, words));
        words.registered.store(0, Ordering::Relaxed);
    }
}
thread_local!(static LEAVE: Leave = const { Leave });

fn known() -> std::sync::MutexGuard<'static, Vec<Known>> {
    KNOWN.lock().unwrap_or_else(|e| e.into_inner())
}

/// Threads that have stored, or were announced.
pub fn count() -> usize {
    known().len()
}

fn own_id() -> i32 {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

/// Makes the calling thread known.
#[cold]
#[inline(never)]
pub fn register() {
    let words = words();
    if words.registered.load(Ordering::Relaxed) == 0 {
        known().push(Known { thread: own_id(), words });
        words.registered.store(1, Ordering::Relaxed);
        // At its end the thread leaves by itself; one that is past that point already stays unknown, and is looked at as such.
        if LEAVE.try_with(|_| ()).is_err() {
            known().retain(|k| !std::ptr::eq(k.words, words));
        }
    }
}

/// Registers this process for expedited barriers.
pub fn prepare() -> Result<(), Error> {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
}

fn membarrier(command: i32) -> Result<(), Error> {
    // SAFETY: membarrier(2) takes no pointers.
    match unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } {
        0 => Ok(()),
        _ => Err(Error::Membarrier(std::io::Error::last_os_error())),
    }
}

/// How long a thread may stay inside before the wait is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until every section that had begun has ended. Only the checkpointer calls this, after it has stored what sections
/// that begin from now on shall read.
pub fn grace() -> Result<(), Error> {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)?;
    let mut waiting: Vec<i32> = known().iter().map(|k| k.thread).collect();
    let begin = Instant::now();
    let mut turns = 0u32;
    loop {
        {
            // The lock is not held while somebody is waited for: a thread that begins or ends takes it.
            let known = known();
            waiting.retain(|thread| known.iter().any(|k| k.thread == *thread && is_inside(k)));
        }
        if waiting.is_empty() {
            break;
        }
        pause(&mut turns, begin, waiting[0])?;
    }
    if COMPILED.load(Ordering::SeqCst) {
        wait_for_unknown(begin)?;
    }
    fence(Ordering::SeqCst);
    Ok(())
}

fn is_inside(known: &Known) -> bool {
    // SAFETY: entries leave the list, whose lock is held, before their words do.
    let words = unsafe { &*known.words };
    words.inside.load(Ordering::Acquire) != 0 || words.pinned.load(Ordering::Acquire) != 0
}

fn pause(turns: &mut u32, begin: Instant, thread: i32) -> Result<(), Error> {
    *turns += 1;
    match *turns {
        // Sections are short. Looking again and again would take the word's cache line from its thread.
        0..64 => (0..*turns * 4).for_each(|_| std::hint::spin_loop()),
        _ => std::thread::sleep(Duration::from_micros(50)),
    }
    match begin.elapsed() > PATIENCE {
        true => Err(Error::Stuck { thread, seconds: PATIENCE.as_secs() }),
        false => Ok(()),
    }
}

/// Threads that nobody announced may run compiled barriers all the same. One that is blocked in a system call is in none,
/// for barriers make no calls; one that runs is waited for until it blocks, ends or is announced.
fn wait_for_unknown(begin: Instant) -> Result<(), Error> {
    let own = own_id();
    let Ok(entries) = std::fs::read_dir("/proc/self/task") else { return Ok(()) };
    let ids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let mut unknown: Vec<i32> = {
        let known = known();
        ids.filter(|id| *id != own && !known.iter().any(|k| k.thread == *id)).collect()
    };
    let mut turns = 60;
    loop {
        unknown.retain(|id| !is_blocked(*id));
        let Some(first) = unknown.first() else { return Ok(()) };
        pause(&mut turns, begin, *first)?;
    }
}

/// Whether a thread is asleep in a system call, or gone (proc_pid_syscall(5)).
fn is_blocked(thread: i32) -> bool {
    match std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")) {
        Ok(text) => text.starts_with(|c: char| c.is_ascii_digit()),
        Err(_) => !std::path::Path::new(&format!("/proc/self/task/{thread}")).exists(),
    }
}
