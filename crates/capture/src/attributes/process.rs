//! A process as a whole and its address space, from outside. The process should be frozen.

use crate::Result;
use crate::home::Home;
use stillpoint_image::{AddressSpace, Bytes, Layout, Process, Rlimit};
use stillpoint_linux::limits;
use stillpoint_linux::proc::{Proc, Stat, Status};

/// Files that are read to describe it, to be kept open ([`Proc::keep_open`]).
pub const FILES: [&str; 11] = [
    "stat",
    "status",
    "limits",
    "cgroup",
    "loginuid",
    "oom_score_adj",
    "auxv",
    "personality",
    "coredump_filter",
    "timers",
    "maps",
];

/// Everything of a [`Process`] that can be read without running code in it; `stat` and `status` are those of its main
/// thread or its own.
///
/// Left at its default: threads, tables and paths, which other rooms fill; signal actions, timers, `child_subreaper`
/// and `xfeatures` ([`super::inside::ProcessQuery`]); `pending` (ptrace). `stopped` is told as `SIGSTOP` if job control
/// had stopped it; once it is traced, only the tracer knows that, and the signal.
///
/// # Errors
/// [`stillpoint_linux::Error::Gone`], or that a file or limit cannot be read.
pub fn process(target: &Proc, home: &Home, stat: &Stat, status: &Status) -> Result<Process> {
    let pid = home.pid(status);
    let limits = limits::all(target)?.into_iter().enumerate();
    let rlimits =
        limits.map(|(resource, (soft, hard))| Rlimit { resource: resource as u32, soft, hard }).collect();
    Ok(Process {
        pid,
        // In a private pid namespace, session and group may lie outside: 0 there.
        leads_session: home.id(&status.ns_sid, stat.session) == pid,
        leads_group: home.id(&status.ns_pgid, stat.pgrp) == pid,
        foreground: stat.tty != 0 && stat.tpgid > 0 && stat.tpgid as u32 == stat.pgrp,
        umask: status.umask.unwrap_or(0o022),
        rlimits,
        oom_score_adj: target.oom_score_adj()?,
        stopped: (stat.state == b'T').then_some(libc::SIGSTOP as u32),
        cgroup: target.cgroup()?,
        login_uid: target.login_uid()?,
        ..Process::default()
    })
}

/// Everything of an [`AddressSpace`] that can be read without running code in it, mappings apart.
///
/// Left at its default: `layout.brk`, `dumpable`, `mdwe`, `thp_disable`, `memory_merge`, `membarrier`
/// ([`super::inside::ProcessQuery`]), and `lock_future`, which only a new mapping shows.
///
/// # Errors
/// [`stillpoint_linux::Error::Gone`], or that a file cannot be read.
pub fn space(target: &Proc, stat: &Stat) -> Result<AddressSpace> {
    Ok(AddressSpace {
        layout: Layout {
            start_code: stat.start_code,
            end_code: stat.end_code,
            start_data: stat.start_data,
            end_data: stat.end_data,
            start_brk: stat.start_brk,
            brk: 0,
            start_stack: stat.start_stack,
            arg_start: stat.arg_start,
            arg_end: stat.arg_end,
            env_start: stat.env_start,
            env_end: stat.env_end,
        },
        auxv: Bytes(target.read("auxv")?),
        personality: target.personality()?,
        coredump_filter: target.coredump_filter()?,
        ..AddressSpace::default()
    })
}
