//! `/proc/PID/stat`: one line about a process or thread.

use super::{Proc, nonsense, text};
use crate::Result;
use bitflags::bitflags;
use std::path::Path;

bitflags! {
    /// Kernel flags of a task (`PF_*` of `include/linux/sched.h`), those of interest.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct TaskFlags: u32 {
        /// `PF_EXITING`: it is ending.
        const EXITING = 0x4;
        /// `PF_IO_WORKER`: thread of io_uring.
        const IO_WORKER = 0x10;
        /// `PF_MCE_PROCESS`: it chose a policy for memory failures (`PR_MCE_KILL`).
        const MCE_PROCESS = 0x80;
        /// `PF_DUMPCORE`: it dumps core.
        const DUMPCORE = 0x200;
        /// `PF_SIGNALED`: a signal killed it.
        const SIGNALED = 0x400;
        /// `PF_USER_WORKER`: kernel-made thread of a user process (vhost, io_uring).
        const USER_WORKER = 0x4000;
        /// `PF_MEMALLOC_NOIO | PF_LOCAL_THROTTLE` come together from `PR_SET_IO_FLUSHER`.
        const IO_FLUSHER = 0x80000;
        /// `PF_KTHREAD`: kernel thread.
        const KTHREAD = 0x200000;
        /// `PF_MCE_EARLY`: with that policy it is told of failures before it touches them.
        const MCE_EARLY = 0x800_0000;
        /// The rest, of no interest.
        const _ = !0;
    }
}

/// What `stat` tells. Addresses are 0 where we may not trace the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Process or thread id.
    pub pid: u32,
    /// Name, as it is.
    pub comm: Vec<u8>,
    /// State: `R`, `S`, `D`, `T` (stopped), `t` (traced), `Z`, `X`, `I`.
    pub state: u8,
    /// Parent process.
    pub ppid: u32,
    /// Process group.
    pub pgrp: u32,
    /// Session.
    pub session: u32,
    /// Device of the controlling terminal, 0 for none.
    pub tty: u32,
    /// Foreground process group of that terminal, -1 for none.
    pub tpgid: i32,
    /// Kernel flags.
    pub flags: TaskFlags,
    /// Page faults, minor and major, of children that have ended and been waited for.
    pub child_faults: u64,
    /// CPU time in user mode, clock ticks.
    pub utime: u64,
    /// CPU time in the kernel, clock ticks.
    pub stime: u64,
    /// Nice value.
    pub nice: i32,
    /// Number of threads.
    pub num_threads: u32,
    /// Start, clock ticks after boot: with the id, the identity of a process.
    pub start_time: u64,
    /// Resident pages.
    pub rss_pages: u64,
    /// Start of program text.
    pub start_code: u64,
    /// End of program text.
    pub end_code: u64,
    /// Bottom (highest address) of the main stack.
    pub start_stack: u64,
    /// Signal to the parent when it ends.
    pub exit_signal: i32,
    /// CPU it last ran on.
    pub processor: u32,
    /// Real-time priority, 0 otherwise.
    pub rt_priority: u32,
    /// `SCHED_*`.
    pub policy: u32,
    /// Start of data.
    pub start_data: u64,
    /// End of data.
    pub end_data: u64,
    /// Start of the heap.
    pub start_brk: u64,
    /// Start of the command line.
    pub arg_start: u64,
    /// End of the command line.
    pub arg_end: u64,
    /// Start of the environment.
    pub env_start: u64,
    /// End of the environment.
    pub env_end: u64,
    /// How it ended, as wait(2) tells it; 0 where we may not trace it.
    pub exit_code: u32,
}

impl Stat {
    /// Whether the thread has ended, or is ending.
    pub fn ends(&self) -> bool {
        matches!(self.state, b'Z' | b'X') || self.flags.contains(TaskFlags::EXITING)
    }
}

impl Proc {
    /// Reads `stat`.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Parse`].
    pub fn stat(&self) -> Result<Stat> {
        parse(&self.read("stat")?, &self.path.join("stat"))
    }
}

/// Parses the text of `stat`.
///
/// # Errors
/// [`crate::Error::Parse`] with the text.
pub fn parse(text: &[u8], path: &Path) -> Result<Stat> {
    parse_line(text).ok_or_else(|| nonsense(path, text))
}

fn parse_line(text: &[u8]) -> Option<Stat> {
    // The name is not escaped and may hold `) R 1 (` and newlines: only the first and the last parenthesis count.
    let open = text.iter().position(|&b| b == b'(')?;
    let close = text.iter().rposition(|&b| b == b')')?;
    let comm = text.get(open + 1..close)?.to_vec();
    // `field(3)` is the state: numbers are those of proc_pid_stat(5).
    let mut fields = [None; 53];
    for (field, word) in fields[3..].iter_mut().zip(text::words(text[close + 1..].trim_ascii())) {
        *field = Some(word);
    }
    let field = |n: usize| fields[n];
    let unsigned = |n| text::dec(field(n)?);
    let small = |n| u32::try_from(text::dec(field(n)?)?).ok();
    let signed = |n| i32::try_from(text::signed(field(n)?)?).ok();
    let &[state] = field(3)? else { return None };
    Some(Stat {
        pid: text::dec(text[..open].trim_ascii())?.try_into().ok()?,
        comm,
        state,
        ppid: small(4)?,
        // Group and session are -1 or 0 in a task that is almost gone.
        pgrp: signed(5)?.max(0) as u32,
        session: signed(6)?.max(0) as u32,
        tty: signed(7)? as u32,
        tpgid: signed(8)?,
        flags: TaskFlags::from_bits_retain(small(9)?),
        child_faults: unsigned(11)?.saturating_add(unsigned(13)?),
        utime: unsigned(14)?,
        stime: unsigned(15)?,
        nice: signed(19)?,
        num_threads: small(20)?,
        start_time: unsigned(22)?,
        rss_pages: unsigned(24)?,
        start_code: unsigned(26)?,
        end_code: unsigned(27)?,
        start_stack: unsigned(28)?,
        exit_signal: signed(38)?,
        processor: small(39)?,
        rt_priority: small(40)?,
        policy: small(41)?,
        start_data: unsigned(45)?,
        end_data: unsigned(46)?,
        start_brk: unsigned(47)?,
        arg_start: unsigned(48)?,
        arg_end: unsigned(49)?,
        env_start: unsigned(50)?,
        env_end: unsigned(51)?,
        exit_code: small(52)?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TAIL: &str = " S 8486 8487 4514 34817 -1 4194304 102 0 0 0 7 8 0 0 20 -5 3 0 168758 3133440 388 \
        18446744073709551615 11 12 13 0 0 0 0 0 0 0 0 0 17 1 50 2 0 0 0 21 22 23 24 25 26 27 0\n";

    #[test]
    fn names_do_not_confuse() {
        for comm in ["cat", ") R 1 2 (", "a b\nc", "((", "))", "", "x) Z 0 0"] {
            let stat = parse(format!("8488 ({comm}){TAIL}").as_bytes(), Path::new("stat")).unwrap();
            assert_eq!(stat.comm, comm.as_bytes());
            assert_eq!((stat.pid, stat.state, stat.ppid, stat.pgrp), (8488, b'S', 8486, 8487));
            assert_eq!((stat.nice, stat.num_threads, stat.start_time), (-5, 3, 168758));
            assert_eq!((stat.start_code, stat.start_stack, stat.exit_signal), (11, 13, 17));
            assert_eq!((stat.rt_priority, stat.policy, stat.env_end), (50, 2, 27));
            assert_eq!(stat.exit_code, 0);
        }
    }

    #[test]
    fn nonsense_is_named() {
        for text in ["", "1", "1 (", "1 )(", "1 (a) S", "x (a) S 1"] {
            assert!(parse(text.as_bytes(), Path::new("stat")).is_err(), "{text}");
        }
    }
}
