//! Processes and threads.

use crate::Bytes;
use minicbor::{Decode, Encode};

/// One process (thread group).
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Process {
    /// Process id, as the program itself sees it: in the pid namespace that the root was made in, as are all ids here. Those in
    /// namespaces of the program's own are [`Thread::inner`].
    #[n(0)]
    pub pid: u32,
    /// Threads; the first is the leader (`tid == pid`).
    #[n(1)]
    pub threads: Vec<Thread>,
    /// Index into [`crate::Image::spaces`]. Processes that share their memory have the same one.
    #[n(2)]
    pub space: u32,
    /// Index into [`crate::Image::tables`].
    #[n(3)]
    pub table: u32,
    /// Whether it led its session.
    #[n(4)]
    pub leads_session: bool,
    /// Whether it led its process group.
    #[n(5)]
    pub leads_group: bool,
    /// Whether its process group was the foreground one of its terminal.
    #[n(6)]
    pub foreground: bool,
    /// Executable, index into [`crate::Image::paths`].
    #[n(7)]
    pub exe: u32,
    /// Current directory, index into [`crate::Image::paths`].
    #[n(8)]
    pub cwd: u32,
    /// Root directory, index into [`crate::Image::paths`].
    #[n(9)]
    pub root: u32,
    /// File mode creation mask.
    #[n(10)]
    pub umask: u32,
    /// `(resource, soft, hard)`; `u64::MAX` is infinity.
    #[n(11)]
    pub rlimits: Vec<Rlimit>,
    /// `/proc/PID/oom_score_adj`.
    #[n(12)]
    pub oom_score_adj: i32,
    /// `PR_SET_CHILD_SUBREAPER`.
    #[n(13)]
    pub child_subreaper: bool,
    /// Signal actions that are not the default.
    #[n(14)]
    pub actions: Vec<SignalAction>,
    /// Signals pending for the process as a whole: raw `siginfo_t`, in queue order.
    #[n(15)]
    pub pending: Vec<Bytes>,
    /// Interval timers (`setitimer`): real, virtual, prof.
    #[n(16)]
    pub itimers: Vec<IntervalTimer>,
    /// POSIX timers (`timer_create`).
    #[n(17)]
    pub timers: Vec<PosixTimer>,
    /// Stopped by this signal (job control), if it was.
    #[n(18)]
    pub stopped: Option<u32>,
    /// Path of its control group in each hierarchy: lines of `/proc/PID/cgroup`.
    #[n(19)]
    pub cgroup: Vec<String>,
    /// Whether the leader had already exited while other threads went on.
    #[n(20)]
    pub leader_exited: bool,
    /// Features of the extended state that the process asked for (`ARCH_REQ_XCOMP_PERM`): bit mask of XCR0.
    #[n(21)]
    pub xfeatures: u64,
    /// The process that it is a child of, index into [`crate::Image::processes`]; none of the root.
    #[n(22)]
    pub parent: Option<u32>,
    /// Its session, by the id of the leader, if that is (or was) within the tree; none: that of whoever restores.
    #[n(23)]
    pub session: Option<u32>,
    /// Its process group, by the id of the leader, if that is (or was) within the tree; none: that of whoever restores.
    #[n(24)]
    pub group: Option<u32>,
    /// Signal to its parent when it ends; none: `SIGCHLD`.
    #[n(25)]
    pub exit_signal: Option<u32>,
    /// Its children that have ended and for which it has not waited yet.
    #[n(26)]
    pub ended: Option<Vec<Ended>>,
    /// The process with which it shares current directory, root and umask, index into [`crate::Image::processes`]: the
    /// first of all that do, which has none here.
    #[n(27)]
    pub shares_fs: Option<u32>,
    /// The thread of its parent that it is a child of, as the program sees it; none: the main thread.
    #[n(28)]
    pub parent_thread: Option<u32>,
    /// Those it is in of the namespaces that the program made for itself, one of each kind at most: indexes into
    /// [`crate::Image::namespaces`].
    #[n(30)]
    #[cbor(default)]
    pub namespaces: Vec<u32>,
    /// The process with which it shares its signal actions, index into [`crate::Image::processes`]: the first of all that do,
    /// which has none here. They share their memory, too.
    #[n(40)]
    pub shares_actions: Option<u32>,
    /// If it is stopped: whether its parent has been told of that by `wait`; none: not known.
    #[n(41)]
    pub stop_told: Option<bool>,
    /// It goes on after a stop, of which its parent has not been told by `wait` (`WCONTINUED`).
    #[n(42)]
    #[cbor(default)]
    pub continued: bool,
    /// `/proc/PID/loginuid`, where the kernel has it: all bits set if it has none.
    #[n(33)]
    pub login_uid: Option<u32>,
    /// The pid namespace that its further children are to be in, index into [`crate::Image::namespaces`], if that is another one than
    /// its own.
    #[n(31)]
    pub children_in: Option<u32>,
    /// Its next child is to be process 1 of a new pid namespace.
    #[n(32)]
    #[cbor(default)]
    pub children_apart: bool,
}

impl Thread {
    /// Its id, as it sees it itself.
    pub fn own_tid(&self) -> u32 {
        self.inner.last().copied().unwrap_or(self.tid)
    }
}

impl Process {
    /// Its id, as it sees it itself.
    pub fn own_pid(&self) -> u32 {
        self.threads.first().map_or(self.pid, Thread::own_tid)
    }

    /// Its session, if that is within the tree.
    pub fn own_session(&self) -> Option<u32> {
        self.session.or(self.leads_session.then_some(self.pid))
    }

    /// Its process group, if that is within the tree.
    pub fn own_group(&self) -> Option<u32> {
        self.group.or((self.leads_group || self.leads_session).then_some(self.pid))
    }

    /// Children that have ended.
    pub fn ended(&self) -> &[Ended] {
        self.ended.as_deref().unwrap_or_default()
    }
}

/// A control group, and what it limits. cgroups(7).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ControlGroup {
    /// Controllers of its hierarchy, as `/proc/PID/cgroup` tells them; none for version 2.
    #[n(0)]
    pub controllers: String,
    /// Its path in the hierarchy.
    #[n(1)]
    pub path: String,
    /// Files of it and what they had, as far as that limits anything.
    #[n(2)]
    pub settings: Vec<(String, String)>,
    /// Whether whoever took the checkpoint was in it, too: then it is nothing of the program's own.
    #[n(3)]
    pub shared: bool,
}

/// A process that has ended, and of which its parent has not taken notice yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Ended {
    /// Process id.
    #[n(0)]
    pub pid: u32,
    /// How it ended, as wait(2) tells it; that it left a core dump is not part of it.
    #[n(1)]
    pub status: u32,
    /// Its session, as [`Process::session`].
    #[n(2)]
    pub session: Option<u32>,
    /// Its process group, as [`Process::group`].
    #[n(3)]
    pub group: Option<u32>,
    /// Signal to its parent when it ended; none: `SIGCHLD`.
    #[n(4)]
    pub exit_signal: Option<u32>,
    /// The thread of its parent that it is a child of, as [`Process::parent_thread`].
    #[n(5)]
    pub parent_thread: Option<u32>,
    /// The pid namespace of the program's own that it was in, index into [`crate::Image::namespaces`].
    #[n(6)]
    pub namespace: Option<u32>,
    /// Its ids there, as [`Thread::inner`].
    #[n(7)]
    #[cbor(default)]
    pub inner: Vec<u32>,
}

/// Somebody who is no more, and whose id a session or process group still has, if he was in a pid namespace of the program's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct LostLeader {
    /// Process id.
    #[n(0)]
    pub pid: u32,
    /// That namespace, index into [`crate::Image::namespaces`].
    #[n(1)]
    pub namespace: u32,
    /// His ids there, as [`Thread::inner`].
    #[n(2)]
    pub inner: Vec<u32>,
}

/// A resource limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Rlimit {
    /// `RLIMIT_*` number.
    #[n(0)]
    pub resource: u32,
    /// Soft limit; `u64::MAX` is infinity.
    #[n(1)]
    pub soft: u64,
    /// Hard limit; `u64::MAX` is infinity.
    #[n(2)]
    pub hard: u64,
}

/// One thread.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Thread {
    /// Thread id, as the program itself sees it.
    #[n(0)]
    pub tid: u32,
    /// Its name (`comm`).
    #[n(1)]
    pub name: Bytes,
    /// General registers: the kernel's `user_regs_struct` (`NT_PRSTATUS`), including TLS bases.
    #[n(2)]
    pub regs: Bytes,
    /// Extended state in the standard XSAVE format (`NT_X86_XSTATE`).
    #[n(3)]
    pub xstate: Bytes,
    /// Blocked signals (bit `n - 1` is signal `n`).
    #[n(4)]
    pub sigmask: u64,
    /// Signals pending for this thread: raw `siginfo_t`, in queue order.
    #[n(5)]
    pub pending: Vec<Bytes>,
    /// Alternate signal stack as `sigaltstack` reports it.
    #[n(6)]
    pub altstack: AltStack,
    /// Address the kernel clears and wakes when the thread ends (0: none).
    #[n(7)]
    pub clear_child_tid: u64,
    /// Robust futex list: head address and length of the head structure (0, 0: none).
    #[n(8)]
    pub robust_list: Range,
    /// Restartable sequences registration, if any.
    #[n(9)]
    pub rseq: Option<Rseq>,
    /// Credentials.
    #[n(10)]
    pub creds: Credentials,
    /// Scheduling.
    #[n(11)]
    pub sched: Sched,
    /// Parent-death signal (0: none).
    #[n(12)]
    pub pdeath_signal: u32,
    /// Timer slack, nanoseconds.
    #[n(13)]
    pub timer_slack_ns: u64,
    /// Seccomp filters, oldest first: each is an array of 8-byte BPF instructions with its flags.
    #[n(14)]
    pub seccomp: Vec<SeccompFilter>,
    /// Strict seccomp mode.
    #[n(15)]
    pub seccomp_strict: bool,
    /// `PR_SET_NO_NEW_PRIVS`.
    #[n(16)]
    pub no_new_privs: bool,
    /// A system call with a relative timeout that the cut interrupted.
    #[n(17)]
    pub blocked: Option<BlockedCall>,
    /// I/O priority as `ioprio_get` reports it.
    #[n(18)]
    pub ioprio: u32,
    /// `PR_GET_TSC` (0 or 1: `PR_TSC_ENABLE`).
    #[n(19)]
    pub tsc: u32,
    /// Current directory, root and umask, if it does not share those of the main thread.
    #[n(20)]
    pub directories: Option<Directories>,
    /// Its ids in the pid namespaces of the program's own that it is in, the outermost first: the last is what it sees itself.
    #[n(21)]
    #[cbor(default)]
    pub inner: Vec<u32>,
    /// What it has chosen by prctl(2) about failures of memory, speculation and I/O for the kernel: option and two arguments.
    #[n(22)]
    #[cbor(default)]
    pub choices: Vec<[u64; 3]>,
    /// How it dispatches its system calls to itself, if it does.
    #[n(23)]
    pub dispatch: Option<Dispatch>,
    /// Its flags of personality(2); none: [`crate::AddressSpace::personality`].
    #[n(24)]
    pub personality: Option<u32>,
}

/// System calls of a thread that the kernel hands back to it (`PR_SET_SYSCALL_USER_DISPATCH`), as `PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG`
/// tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Dispatch {
    /// First address of the region from which calls go through.
    #[n(0)]
    pub offset: u64,
    /// Its length, bytes; it may go on from the end of all addresses to their beginning.
    #[n(1)]
    pub len: u64,
    /// Address of the byte that switches it (0: none).
    #[n(2)]
    pub selector: u64,
}

/// File-system context of a thread that has one apart from the main thread's (`unshare(CLONE_FS)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Directories {
    /// Current directory, index into [`crate::Image::paths`].
    #[n(0)]
    pub cwd: u32,
    /// Root directory, index into [`crate::Image::paths`].
    #[n(1)]
    pub root: u32,
    /// File mode creation mask.
    #[n(2)]
    pub umask: u32,
    /// Id of the thread with which it shares them: the first of all that do, which has none here.
    #[n(3)]
    pub shares: Option<u32>,
}

/// A system call with a relative timeout whose remaining time the kernel alone knows (`-ERESTART_RESTARTBLOCK`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BlockedCall {
    /// Number of the system call that was first made (never `restart_syscall`).
    #[n(0)]
    pub nr: u64,
    /// Time that was left at the cut, nanoseconds; `None` if unknown (it then starts over).
    #[n(1)]
    pub remaining_ns: Option<u64>,
}

/// A pair of address and length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(array)]
pub struct Range {
    /// First byte.
    #[n(0)]
    pub start: u64,
    /// Length in bytes.
    #[n(1)]
    pub len: u64,
}

impl Range {
    /// First byte behind the range.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }

    /// Ranges in ascending order, as one where they overlap or one begins where another ends.
    pub fn joined(mut ranges: Vec<Range>) -> Vec<Range> {
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let goes_on = next.start <= last.end();
            if goes_on {
                last.len = last.len.max(next.end() - last.start);
            }
            goes_on
        });
        ranges
    }

    /// The parts of some ranges (ascending, apart) that lie in it.
    pub fn parts_of(self, ranges: &[Range]) -> impl Iterator<Item = Range> {
        let first = ranges.partition_point(|range| range.end() <= self.start);
        ranges[first..].iter().take_while(move |range| range.start < self.end()).map(move |range| {
            let (start, end) = (range.start.max(self.start), range.end().min(self.end()));
            Range { start, len: end - start }
        })
    }

    /// What is in ranges and not in others; both ascend and are apart.
    pub fn without(ranges: &[Range], others: &[Range]) -> Vec<Range> {
        let mut left = Vec::new();
        for range in ranges {
            let mut at = range.start;
            for other in range.parts_of(others) {
                if other.start > at {
                    left.push(Range { start: at, len: other.start - at });
                }
                at = other.end();
            }
            if at < range.end() {
                left.push(Range { start: at, len: range.end() - at });
            }
        }
        left
    }

    /// Whether it overlaps one of some ranges that do not overlap each other, in ascending order.
    pub fn overlaps_any(&self, ranges: &[Range]) -> bool {
        let first = ranges.partition_point(|range| range.end() <= self.start);
        ranges.get(first).is_some_and(|range| range.start < self.end())
    }
}

/// `stack_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct AltStack {
    /// Lowest address.
    #[n(0)]
    pub sp: u64,
    /// `SS_*` flags.
    #[n(1)]
    pub flags: u32,
    /// Size in bytes.
    #[n(2)]
    pub size: u64,
}

/// Registration of restartable sequences, `struct ptrace_rseq_configuration`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Rseq {
    /// Address of the thread's `struct rseq`.
    #[n(0)]
    pub address: u64,
    /// Registered length.
    #[n(1)]
    pub size: u32,
    /// Abort signature.
    #[n(2)]
    pub signature: u32,
    /// Registration flags.
    #[n(3)]
    pub flags: u32,
}

/// Credentials of a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Credentials {
    /// Real, effective, saved and file-system user id.
    #[n(0)]
    pub uid: [u32; 4],
    /// Real, effective, saved and file-system group id.
    #[n(1)]
    pub gid: [u32; 4],
    /// Supplementary groups.
    #[n(2)]
    pub groups: Vec<u32>,
    /// Capability sets: inheritable, permitted, effective, bounding, ambient.
    #[n(3)]
    pub caps: [u64; 5],
    /// `PR_GET_SECUREBITS`.
    #[n(4)]
    pub securebits: u32,
}

/// Scheduling of a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Sched {
    /// `SCHED_*`, without flags.
    #[n(0)]
    pub policy: u32,
    /// Nice value.
    #[n(1)]
    pub nice: i32,
    /// Real-time priority.
    #[n(2)]
    pub priority: u32,
    /// `SCHED_FLAG_*`.
    #[n(3)]
    pub flags: u64,
    /// Deadline parameters or custom slice: runtime, deadline, period in nanoseconds.
    #[n(4)]
    pub deadline: [u64; 3],
    /// Allowed CPUs: bit mask, little-endian.
    #[n(5)]
    pub affinity: Bytes,
    /// Utilisation clamps: minimum and maximum.
    #[n(6)]
    pub util: [u32; 2],
}

/// One seccomp filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SeccompFilter {
    /// `struct sock_filter` array.
    #[n(0)]
    pub program: Bytes,
    /// `SECCOMP_FILTER_FLAG_*` that can be read back (log).
    #[n(1)]
    pub flags: u64,
}

/// A signal action, `struct kernel_sigaction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SignalAction {
    /// Signal number.
    #[n(0)]
    pub signal: u32,
    /// Handler address (1: ignore).
    #[n(1)]
    pub handler: u64,
    /// `SA_*` flags.
    #[n(2)]
    pub flags: u64,
    /// `SA_RESTORER` address.
    #[n(3)]
    pub restorer: u64,
    /// Signals blocked while the handler runs.
    #[n(4)]
    pub mask: u64,
}

/// An interval timer; zero value: disarmed, or, if it is the real one, has an interval, and its `SIGALRM` is pending, expired: it goes on
/// when that is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct IntervalTimer {
    /// Time to the next expiry, microseconds.
    #[n(0)]
    pub value_us: u64,
    /// Interval, microseconds.
    #[n(1)]
    pub interval_us: u64,
}

/// A POSIX timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct PosixTimer {
    /// Kernel id.
    #[n(0)]
    pub id: u32,
    /// `CLOCK_*`.
    #[n(1)]
    pub clock: i32,
    /// `SIGEV_*`, without the thread flag.
    #[n(2)]
    pub notify: u32,
    /// Signal number.
    #[n(3)]
    pub signal: u32,
    /// `sigev_value`.
    #[n(4)]
    pub value: u64,
    /// Thread that is notified (`SIGEV_THREAD_ID`), 0 for the process.
    #[n(5)]
    pub tid: u32,
    /// Time to the next expiry, nanoseconds (0: disarmed).
    #[n(6)]
    pub remaining_ns: u64,
    /// Interval, nanoseconds.
    #[n(7)]
    pub interval_ns: u64,
    /// Overrun count as `timer_getoverrun` reports it.
    #[n(8)]
    pub overrun: u32,
}
