//! Stopping a program for a moment, to do something in it, so that it does not notice.

use crate::Result;
use crate::blocked::{self, Clocks, Earlier};
use crate::freeze::{Frozen, Hurry};
use crate::target::Target;
use std::collections::HashMap;
use std::time::Duration;
use stillpoint_image::BlockedCall;
use stillpoint_linux::proc::Status;
use stillpoint_linux::ptrace::Stopped;

/// Stops all threads, works, and lets them go on; tells how long that took. What the threads were waiting for is kept
/// in `earlier`, for the cut that follows: by then the kernel no longer tells when they began.
pub fn stop_briefly<T>(
    target: &Target,
    earlier: &mut Earlier,
    work: impl FnOnce(&mut Frozen) -> Result<T>,
) -> Result<(T, Duration)> {
    let threads = target.process.threads()?;
    let folders = threads.into_iter().filter_map(|tid| Some((tid, target.process.sibling(tid).ok()?)));
    let waiting = blocked::observe(folders, &mut Clocks::default());
    let _hurry = Hurry::begin();
    let mut frozen = target.freeze()?;
    // As of the moment when the first of them stopped: what was left then is not over.
    let ago = frozen.since.elapsed().as_nanos() as u64;
    let now = target.clocks().0.saturating_sub_unsigned(ago);
    let stopped_ns = blocked::monotonic_ns().saturating_sub(ago);
    let known = earlier.calls_at(now);
    let mut calls: HashMap<u32, BlockedCall> = HashMap::new();
    let mut unbroken = Vec::new();
    for stopped in &frozen.threads {
        let regs = stopped.regs()?;
        let status = || target.process.sibling(stopped.tid()).and_then(|t| t.status());
        if regs.interrupted() == stillpoint_linux::arch::Interrupted::RestartBlock {
            let tid = target.home.tid(&status()?);
            let waiting = waiting.get(&stopped.tid()).cloned().unwrap_or_default();
            let call = blocked::interrupted_call(
                &target.memory,
                &regs,
                &waiting,
                known.get(&tid).copied(),
                stopped_ns,
            );
            calls.extend(call.map(|call| (tid, call)));
        }
        if blocked::unbroken(&regs, false) != regs {
            unbroken.push((stopped.tid(), blocked::unbroken(&regs, deliverable(&status()?))));
        }
    }
    let result = work(&mut frozen);
    let find = |tid| frozen.threads.iter().find(move |t: &&Stopped| t.tid() == tid);
    for (tid, regs) in unbroken {
        find(tid).map(|thread| thread.set_regs(&regs)).transpose()?;
    }
    *earlier = Earlier { at_ns: now, calls };
    let pause = frozen.thaw();
    Ok((result?, pause))
}

/// Whether a signal is about to be delivered to a thread.
pub(crate) fn deliverable(status: &Status) -> bool {
    (status.sig_pending | status.shared_pending) & !status.sig_blocked != 0
}
