//! What is given back by calls from outside, and what this machine or our privileges do not allow.

use super::credentials;
use crate::{Error, Result};
use linux_raw_sys::prctl::{PR_SET_IO_FLUSHER, PR_SET_SPECULATION_CTRL};
use stillpoint_image::{AddressSpace, Process, Thread};
use stillpoint_linux::layout::words;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::Program;
use stillpoint_linux::sched::SchedAttr;
use stillpoint_linux::{Error as Kernel, features, limits, sched};

const CAP_SYS_NICE: u64 = 1 << 23;
const CAP_SYS_RESOURCE: u64 = 1 << 24;
const SCHED_DEADLINE: u32 = 6;

/// What cannot be given back here, one sentence each; empty if everything can. The restored process starts out with
/// our own attributes, so ours are what the wanted ones are compared with. `in_users`: it is in
/// a user namespace of the program's own. Changes nothing.
///
/// # Errors
/// That our own attributes cannot be read.
pub fn missing(process: &Process, in_users: bool) -> Result<Vec<String>> {
    let own = Proc::process(std::process::id())?;
    let now = credentials::own()?;
    let mut all = Vec::new();
    if now.caps[2] & CAP_SYS_RESOURCE == 0 {
        for limit in &process.rlimits {
            let (_, hard) = limits::get(own.pid(), limit.resource)?;
            if limit.hard > hard {
                let name = limits::NAMES.get(limit.resource as usize).unwrap_or(&"?");
                all.push(format!(
                    "hard limit of RLIMIT_{name} was {}, here it is {}; raising it needs CAP_SYS_RESOURCE",
                    number(limit.hard),
                    number(hard)
                ));
            }
        }
        let here = own.oom_score_adj()?;
        if process.oom_score_adj < here {
            let was = process.oom_score_adj;
            all.push(format!(
                "oom_score_adj was {was}, here it is {here}; lowering it needs CAP_SYS_RESOURCE"
            ));
        }
    }
    let is_flusher = |thread: &Thread| thread.choices.iter().any(|c| c[0] == u64::from(PR_SET_IO_FLUSHER));
    if process.threads.iter().any(is_flusher) {
        // It is asked for from inside.
        if in_users {
            all.push(
                "it handles I/O for the kernel (PR_SET_IO_FLUSHER) in a user namespace of its own".into(),
            );
        } else if now.caps[2] & CAP_SYS_RESOURCE == 0 {
            all.push(
                "it handles I/O for the kernel (PR_SET_IO_FLUSHER), which needs CAP_SYS_RESOURCE".into(),
            );
        }
    }
    if now.caps[2] & CAP_SYS_NICE == 0 {
        all.extend(
            process
                .threads
                .iter()
                .filter_map(|thread| above(own.pid(), thread).transpose())
                .collect::<Result<Vec<_>>>()?,
        );
    }
    for thread in &process.threads {
        let lacking = match in_users {
            true => credentials::missing_inside(&now, &thread.creds),
            false => credentials::missing(&now, &thread.creds),
        };
        for why in lacking {
            if !all.contains(&why) {
                all.push(why);
            }
        }
    }
    if process.xfeatures & !features::xfeatures_on_demand() & 1 << 18 != 0 {
        all.push("the program uses AMX registers, which this machine does not have".into());
    }
    Ok(all)
}

/// What a thread was preferred by more than limits of ours allow; nothing if it was not.
fn above(own: u32, thread: &Thread) -> Result<Option<String>> {
    const RLIMIT_NICE: u32 = 13;
    const RLIMIT_RTPRIO: u32 = 14;
    const REAL_TIME: u32 = 1;
    let want = &thread.sched;
    let allowed = |limit| Ok::<_, Kernel>(limits::get(own, limit)?.0);
    let here = Proc::process(own)?.stat()?.nice;
    let what = if want.policy == SCHED_DEADLINE {
        "the deadline policy".to_string()
    } else if want.priority > 0 && u64::from(want.priority) > allowed(RLIMIT_RTPRIO)? {
        format!("scheduling policy {} priority {}", want.policy, want.priority)
    } else if want.nice < here && ((20 - want.nice) as u64) > allowed(RLIMIT_NICE)? {
        format!("nice value {}", want.nice)
    } else if thread.ioprio >> 13 == REAL_TIME {
        format!("I/O priority {:#x}", thread.ioprio)
    } else {
        return Ok(None);
    };
    let whose = format!("thread {} ({})", thread.tid, thread.name);
    Ok(Some(format!("{whose} had {what}; that needs CAP_SYS_NICE, or a higher RLIMIT_NICE or RLIMIT_RTPRIO")))
}

fn number(limit: u64) -> String {
    if limit == u64::MAX { "unlimited".into() } else { limit.to_string() }
}

/// CPUs, nice value, policy and I/O priority of a thread; `tid` is its id in our pid namespace.
///
/// CPUs come first: the kernel admits a deadline only to a thread that may use them all. Then the nice value, which a
/// real-time thread keeps for later, then the policy.
///
/// # Errors
/// [`Error::Failed`] naming what was not allowed and the privilege it needs.
pub fn thread(tid: u32, thread: &Thread) -> Result<()> {
    let want = &thread.sched;
    let whose = |what: &str| format!("{what} of thread {} ({})", thread.tid, thread.name);
    if sched::affinity(tid)? != want.affinity.0 && !want.affinity.0.is_empty() {
        let help = "none of its CPUs exists or is allowed here";
        explain(sched::set_affinity(tid, &want.affinity.0), libc::EINVAL, || whose("CPUs"), help)?;
    }
    if Proc::thread_by_tid(tid)?.stat()?.nice != want.nice {
        let help = "CAP_SYS_NICE or a higher RLIMIT_NICE is needed";
        let what = || whose(&format!("nice value {}", want.nice));
        explain(sched::set_nice(tid, want.nice), libc::EACCES, what, help)?;
    }
    let now = sched::attributes(tid)?;
    if let Some(attr) = policy(&now, thread) {
        let help = "CAP_SYS_NICE or a higher RLIMIT_RTPRIO is needed";
        let what = || whose(&format!("scheduling policy {} priority {}", want.policy, want.priority));
        explain(sched::set_attributes(tid, &attr), libc::EPERM, what, help)?;
    }
    if sched::io_priority(tid)? != thread.ioprio {
        let help = "CAP_SYS_NICE or CAP_SYS_ADMIN is needed";
        let what = || whose(&format!("I/O priority {:#x}", thread.ioprio));
        explain(sched::set_io_priority(tid, thread.ioprio), libc::EPERM, what, help)?;
    }
    Ok(())
}

/// What threads have chosen that nobody can choose here: a remark for each kind.
pub fn forgone(process: &Process) -> Vec<String> {
    const KINDS: [&str; 2] = ["stores that are bypassed", "indirect branches"];
    let choices = process.threads.iter().flat_map(|thread| &thread.choices);
    let mut all: Vec<String> = choices
        .filter(|choice| {
            choice[0] == u64::from(PR_SET_SPECULATION_CTRL) && !features::may_choose_speculation(choice[1])
        })
        .filter_map(|choice| KINDS.get(choice[1] as usize))
        .map(|kind| {
            format!("it had switched speculation about {kind} off, which this machine lets nobody choose")
        })
        .collect();
    all.dedup();
    all
}

/// The call that makes `now` what the thread had; `None` if it is so already.
fn policy(now: &SchedAttr, thread: &Thread) -> Option<SchedAttr> {
    let want = &thread.sched;
    let [runtime, deadline, period] = want.deadline;
    let fair = want.policy != SCHED_DEADLINE;
    let mut attr = SchedAttr {
        policy: want.policy,
        flags: want.flags & sched::KEPT_FLAGS,
        nice: want.nice,
        priority: want.priority,
        // A fair thread's time slice. Where it is what a thread here has anyway, it was no choice of the program's.
        runtime: if fair && runtime == now.runtime { 0 } else { runtime },
        deadline,
        period,
        ..SchedAttr::default()
    };
    let clamps = want.util != [now.util_min, now.util_max] && want.util != [0, 0];
    if clamps {
        attr.flags |= sched::SET_UTIL;
        [attr.util_min, attr.util_max] = want.util;
    }
    let kept = now.flags & sched::KEPT_FLAGS;
    let same = (attr.policy, attr.priority, attr.flags) == (now.policy, now.priority, kept)
        && want.deadline == [now.runtime, now.deadline, now.period];
    (!same).then_some(attr)
}

/// Limits, OOM score and core dump filter of the process; `pid` is its id in our pid namespace. At the very end,
/// because limits would hinder the rebuilding itself. Returns what is left for it to do itself: where it is in a user namespace of the
/// program's own (`in_users`), its limits may be its own affair, and it may lower them.
///
/// # Errors
/// [`Error::Failed`] naming what was not allowed and the privilege it needs.
pub fn process(pid: u32, process: &Process, space: &AddressSpace, in_users: bool) -> Result<Program> {
    let folder = Proc::process(pid)?;
    if folder.oom_score_adj()? != process.oom_score_adj {
        let set = folder.write("oom_score_adj", process.oom_score_adj.to_string().as_bytes());
        let what = || format!("oom_score_adj {} of process {pid}", process.oom_score_adj);
        explain(set, libc::EACCES, what, "CAP_SYS_RESOURCE is needed")?;
    }
    if folder.coredump_filter()? != space.coredump_filter {
        folder.write("coredump_filter", format!("{:#x}", space.coredump_filter).as_bytes())?;
    }
    let (now, mut left) = (limits::all(&folder)?, Program::new());
    for limit in &process.rlimits {
        if now.get(limit.resource as usize) == Some(&(limit.soft, limit.hard)) {
            continue;
        }
        let set = limits::set(pid, limit.resource, limit.soft, limit.hard);
        let name = limits::NAMES.get(limit.resource as usize).unwrap_or(&"?");
        if in_users && set.as_ref().is_err_and(|e| e.errno() == Some(libc::EPERM)) {
            let both = left.data(&words(&[limit.soft, limit.hard]));
            let args = [0.into(), u64::from(limit.resource).into(), both];
            left.call(format!("set RLIMIT_{name}"), libc::SYS_prlimit64, args);
            continue;
        }
        let what = || format!("RLIMIT_{name} {} of process {pid}", number(limit.hard));
        explain(set, libc::EPERM, what, "CAP_SYS_RESOURCE is needed to raise a hard limit")?;
    }
    Ok(left)
}

/// Adds to an expected refusal of the kernel what it takes.
fn explain(result: Result<(), Kernel>, errno: i32, what: impl FnOnce() -> String, help: &str) -> Result<()> {
    match result {
        Err(e) if e.errno() == Some(errno) => Err(Error::Failed(format!("{}: {help}", what()))),
        other => Ok(other?),
    }
}
