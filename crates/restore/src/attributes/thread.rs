//! What each thread tells the kernel about itself: a program to run in it.

use super::process::prctl;
use linux_raw_sys::prctl::{PR_SET_NAME, PR_SET_SPECULATION_CTRL, PR_SET_TIMERSLACK, PR_SET_TSC};
use stillpoint_image::{AddressSpace, Thread};
use stillpoint_linux::layout;
use stillpoint_linux::program::Program;

/// Name, alternate stack, robust list, clear-child-tid, restartable sequences, `rdtsc`, timer slack, choices, personality: when
/// memory is final and all threads exist.
///
/// Memory must be final because the kernel writes to the thread's `struct rseq` from now on, whenever the thread
/// returns to user mode; it also forgets a critical section that `rseq_cs` pointed to, so a thread within one must have
/// had its instruction pointer moved to the abort handler. Personality comes after memory because
/// `READ_IMPLIES_EXEC` changes what mmap(2) does.
pub fn thread(thread: &Thread, space: &AddressSpace) -> Program {
    let mut p = Program::new();
    let name = p.string(&thread.name.0);
    prctl(&mut p, "PR_SET_NAME", PR_SET_NAME, [name]);
    let stack = &thread.altstack;
    let stack = p.data(&layout::words(&[stack.sp, u64::from(stack.flags), stack.size]));
    p.call("sigaltstack", libc::SYS_sigaltstack, [stack, 0.into()]);
    if thread.robust_list.start != 0 {
        let args = [thread.robust_list.start.into(), thread.robust_list.len.into()];
        p.call("set_robust_list", libc::SYS_set_robust_list, args);
    }
    p.call("set_tid_address", libc::SYS_set_tid_address, [thread.clear_child_tid.into()]);
    if let Some(r) = &thread.rseq {
        let args = [r.address, u64::from(r.size), u64::from(r.flags), u64::from(r.signature)];
        p.call("rseq", libc::SYS_rseq, args.map(Into::into));
    }
    if thread.tsc > 1 {
        prctl(&mut p, "PR_SET_TSC", PR_SET_TSC, [u64::from(thread.tsc).into()]);
    }
    // Real-time threads have none, and cannot be given any; a policy set later takes it away by itself.
    if thread.timer_slack_ns != 0 {
        prctl(&mut p, "PR_SET_TIMERSLACK", PR_SET_TIMERSLACK, [thread.timer_slack_ns.into()]);
    }
    for &[option, what, value] in &thread.choices {
        let args = [option, what, value, 0, 0].map(Into::into);
        // Where the processor or the machine's settings leave no choice, [`super::outside::forgone`] tells.
        match option as u32 {
            PR_SET_SPECULATION_CTRL => p.attempt("prctl PR_SET_SPECULATION_CTRL", libc::SYS_prctl, args),
            _ => p.call(format!("prctl {option}"), libc::SYS_prctl, args),
        };
    }
    let personality = thread.personality.unwrap_or(space.personality);
    p.call("personality", libc::SYS_personality, [u64::from(personality).into()]);
    p
}
