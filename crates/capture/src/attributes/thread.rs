//! Threads, from outside. They should be frozen.

use crate::home::Home;
use crate::{Builder, Result};
use linux_raw_sys::prctl::{
    PR_MCE_KILL, PR_MCE_KILL_EARLY, PR_MCE_KILL_LATE, PR_MCE_KILL_SET, PR_SET_IO_FLUSHER,
    PR_SET_SPECULATION_CTRL, PR_SPEC_DISABLE, PR_SPEC_FORCE_DISABLE, PR_SPEC_INDIRECT_BRANCH,
    PR_SPEC_STORE_BYPASS,
};
use stillpoint_image::{Bytes, Credentials, Dispatch, Range, Sched, SeccompFilter, Thread};
use stillpoint_linux::proc::{
    self, Held, HeldNamespaces, Namespace, NamespaceKind, Proc, Stat, Status, TaskFlags,
};
use stillpoint_linux::ptrace::Stopped;
use stillpoint_linux::{layout, sched, seccomp};

/// The files in which `/proc` tells of a thread, held open: to open them takes longer than to read them.
#[derive(Debug)]
pub struct ThreadFiles {
    /// The thread's folder.
    pub folder: Proc,
    stat: Held,
    status: Held,
    children: Held,
    personality: Held,
    namespaces: Option<HeldNamespaces>,
}

/// What its files tell of a thread at one moment.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// `stat`.
    pub stat: Stat,
    /// `status`.
    pub status: Status,
    /// Child processes that this thread made, or inherited from one that ended.
    pub children: Vec<u32>,
    /// `personality`.
    pub personality: u32,
}

impl ThreadFiles {
    /// Opens them. `folder` is the thread's own ([`Proc::thread`], [`Proc::sibling`]).
    ///
    /// # Errors
    /// [`stillpoint_linux::Error::Gone`], or that a file cannot be opened.
    pub fn open(folder: Proc) -> Result<Self> {
        Ok(ThreadFiles {
            stat: folder.hold("stat")?,
            status: folder.hold("status")?,
            children: folder.hold("children")?,
            personality: folder.hold("personality")?,
            namespaces: None,
            folder,
        })
    }

    /// Opens also what tells its namespaces of these kinds.
    ///
    /// # Errors
    /// As [`ThreadFiles::open`].
    pub fn hold_namespaces(&mut self, kinds: &[NamespaceKind]) -> Result<()> {
        self.namespaces = Some(self.folder.hold_namespaces(kinds)?);
        Ok(())
    }

    /// Child processes of the thread; an error if what is held open is of an earlier one with its id.
    ///
    /// # Errors
    /// As [`ThreadFiles::look`].
    pub fn children(&self) -> Result<Vec<u32>> {
        Ok(self.children.parse(proc::pids)?)
    }

    /// Its namespaces of these kinds, or of those that are held.
    ///
    /// # Errors
    /// As [`ThreadFiles::look`].
    pub fn namespaces(&self, kinds: &[NamespaceKind]) -> Result<Vec<Namespace>> {
        Ok(match &self.namespaces {
            Some(held) => held.read()?,
            None => self.folder.namespaces_of(kinds)?,
        })
    }

    /// Thread id in our pid namespace.
    pub fn tid(&self) -> u32 {
        self.folder.tid()
    }

    /// Reads them all.
    ///
    /// # Errors
    /// [`stillpoint_linux::Error::Gone`], or that a file cannot be read.
    pub fn look(&self) -> Result<Look> {
        Ok(Look {
            stat: self.stat.with(|text| proc::stat::parse(text, self.stat.path()))?,
            status: self.status.with(|text| proc::status::parse(text, self.status.path()))?,
            children: self.children()?,
            personality: self.personality.parse(proc::flags)?,
        })
    }
}

/// Everything of a [`Thread`] that can be read without running code in it and without tracing it. `tid` is its id in
/// our pid namespace.
///
/// Left at its default: registers, signal mask, pending signals and rseq (ptrace); dispatch of calls, seccomp filters ([`stopped`]);
/// alternate stack, `clear_child_tid`, `pdeath_signal`, `tsc`, timer slack, securebits ([`super::inside::ThreadQuery`]); `blocked`.
///
/// # Errors
/// [`stillpoint_linux::Error::Gone`], or that something cannot be read.
pub fn thread(tid: u32, home: &Home, look: &Look) -> Result<Thread> {
    let (head, len) = sched::robust_list(tid)?;
    Ok(Thread {
        tid: home.tid(&look.status),
        inner: home.inner(&look.status.ns_pid),
        name: Bytes(look.stat.comm.clone()),
        robust_list: Range { start: head.0, len },
        creds: credentials(&look.status),
        sched: scheduling(tid, &look.stat)?,
        seccomp_strict: look.status.seccomp == 1,
        no_new_privs: look.status.no_new_privs,
        ioprio: sched::io_priority(tid)?,
        choices: choices(&look.stat, &look.status),
        personality: Some(look.personality),
        ..Thread::default()
    })
}

/// What a thread has chosen by prctl(2), as its traces in `/proc` tell.
fn choices(stat: &Stat, status: &Status) -> Vec<[u64; 3]> {
    let mut all = Vec::new();
    if stat.flags.contains(TaskFlags::MCE_PROCESS) {
        let when = match stat.flags.contains(TaskFlags::MCE_EARLY) {
            true => PR_MCE_KILL_EARLY,
            false => PR_MCE_KILL_LATE,
        };
        all.push([PR_MCE_KILL, PR_MCE_KILL_SET, when]);
    }
    if stat.flags.contains(TaskFlags::IO_FLUSHER) {
        all.push([PR_SET_IO_FLUSHER, 1, 0]);
    }
    // Only these are choices; all other words are the machine's.
    for (text, of) in
        [(&status.store_bypass, PR_SPEC_STORE_BYPASS), (&status.indirect_branch, PR_SPEC_INDIRECT_BRANCH)]
    {
        let chosen = match text.as_slice() {
            b"thread force mitigated" | b"conditional force disabled" => PR_SPEC_FORCE_DISABLE,
            b"thread mitigated" | b"conditional disabled" => PR_SPEC_DISABLE,
            _ => continue,
        };
        all.push([PR_SET_SPECULATION_CTRL, of, chosen]);
    }
    all.into_iter().map(|choice| choice.map(u64::from)).collect()
}

fn credentials(status: &Status) -> Credentials {
    Credentials {
        uid: status.uid,
        gid: status.gid,
        groups: status.groups.clone(),
        caps: status.caps,
        securebits: 0,
    }
}

fn scheduling(tid: u32, stat: &Stat) -> Result<Sched> {
    let attr = sched::attributes(tid)?;
    Ok(Sched {
        policy: attr.policy,
        // The system call tells it for fair policies only, but a real-time thread keeps one.
        nice: stat.nice,
        priority: attr.priority,
        flags: attr.flags & sched::KEPT_FLAGS,
        deadline: [attr.runtime, attr.deadline, attr.period],
        affinity: Bytes(sched::affinity(tid)?),
        util: [attr.util_min, attr.util_max],
    })
}

/// What can be read of a thread only while it is traced and stopped: how it dispatches its system calls to itself, and seccomp filters.
/// `seccomp` is the mode that its status tells.
///
/// # Errors
/// [`stillpoint_linux::Error::Gone`].
pub fn stopped(builder: &mut Builder, stopped: &Stopped, seccomp: u32, thread: &mut Thread) -> Result<()> {
    let name =
        || format!("thread {} ({})", stopped.tid(), String::from_utf8_lossy(&thread.name.0).escape_debug());
    let dispatch = stopped.dispatch()?;
    thread.dispatch = dispatch.map(|d| Dispatch { offset: d.offset, len: d.len, selector: d.selector });
    // Without this look every ordinary thread would need CAP_SYS_ADMIN for the answer "none".
    let filters = if seccomp == 2 { filters(stopped) } else { Ok(Vec::new()) };
    match filters {
        Ok(filters) => thread.seccomp = filters,
        Err(e @ stillpoint_linux::Error::Gone(_)) => return Err(e.into()),
        Err(e) => {
            let hint = "run stillpoint with CAP_SYS_ADMIN, without a seccomp filter of its own";
            builder.refuse(name(), format!("its seccomp filters cannot be read ({e})"), hint);
        }
    }
    Ok(())
}

fn filters(stopped: &Stopped) -> Result<Vec<SeccompFilter>, stillpoint_linux::Error> {
    let mut filters = Vec::new();
    while let Some(program) = stopped.seccomp_filter(filters.len())? {
        let flags = seccomp::filter_flags(stopped, filters.len() as u64)?;
        filters.push(SeccompFilter { program: Bytes(program), flags });
    }
    Ok(filters)
}

/// Adds signals that are pending without an entry in the queue, which the kernel does when it is out of entries:
/// plain ones from nobody. `mask` is [`Status::sig_pending`] or [`Status::shared_pending`].
pub fn complete_pending(mask: u64, pending: &mut Vec<Bytes>) {
    for signal in (1..=64u32).filter(|s| mask & 1 << (s - 1) != 0) {
        if !pending.iter().any(|info| layout::half(&info.0, 0) == signal) {
            let mut info = vec![0; layout::SIGINFO];
            info[..4].copy_from_slice(&signal.to_le_bytes());
            pending.push(Bytes(info));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_told_by_flags_and_words() {
        let chosen = |flags, store: &str, branch: &str| {
            let stat = Stat { flags: TaskFlags::from_bits_retain(flags), ..Stat::default() };
            let status =
                Status { store_bypass: store.into(), indirect_branch: branch.into(), ..Status::default() };
            choices(&stat, &status)
        };
        assert!(chosen(0x40_0000, "thread vulnerable", "conditional enabled").is_empty());
        assert!(chosen(0x40_0000, "globally mitigated", "always disabled").is_empty());
        assert_eq!(chosen(0x80, "vulnerable", ""), [[33, 1, 0]]);
        assert_eq!(chosen(0x800_0080, "not vulnerable", ""), [[33, 1, 1]]);
        assert_eq!(
            chosen(0x18_0000, "thread mitigated", "conditional force disabled"),
            [[57, 1, 0], [53, 0, 4], [53, 1, 8]]
        );
    }
}
