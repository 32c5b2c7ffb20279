//! The program's clocks: `CLOCK_MONOTONIC` and `CLOCK_BOOTTIME` go on from where they were at the checkpoint.
//!
//! Programs wait for points in time of the monotonic clock. Restored later they would find all of them past, and
//! after a reboot, which starts the clock from zero, infinitely far away. A time namespace (`time_namespaces(7)`)
//! gives the new process its own offsets.

use crate::{Error, Result};
use rustix::time::{ClockId, clock_gettime};
use stillpoint_image::Meta;
use stillpoint_linux::proc::own_time_offsets;

/// Makes children of this thread live in a time namespace whose clocks go on from the checkpoint. Returns a remark
/// for the user where privileges do not allow it but the program can do without.
pub fn continue_clocks(meta: &Meta) -> Result<Option<String>> {
    let now = now_ns(ClockId::Monotonic);
    match enter(meta) {
        Ok(()) => Ok(None),
        Err(e) if now >= meta.monotonic_ns => Ok(Some(format!(
            "its monotonic clock has jumped ahead by the time it was away: no time namespace (that takes CAP_SYS_ADMIN and CAP_SYS_TIME, or \
             root: {e})"
        ))),
        Err(e) => Err(Error::Failed(format!(
            "the machine was restarted since the checkpoint and its monotonic clock would run backwards: \
             a time namespace is needed ({e}); restore as root, or with CAP_SYS_ADMIN and CAP_SYS_TIME"
        ))),
    }
}

fn enter(meta: &Meta) -> std::io::Result<()> {
    let own = own_time_offsets();
    stillpoint_linux::spawn::unshare_time()?;
    // Offsets are told relative to the initial namespace, which we may not be in ourselves.
    let offset = |clock, then: i64, own: i64| then.saturating_sub(now_ns(clock).saturating_sub(own));
    let monotonic = offset(ClockId::Monotonic, meta.monotonic_ns, own.0);
    let boottime = offset(ClockId::Boottime, meta.boottime_ns, own.1);
    let line =
        |name, ns: i64| format!("{name} {} {}\n", ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000));
    std::fs::write("/proc/self/timens_offsets", line("monotonic", monotonic) + &line("boottime", boottime))
}

fn now_ns(clock: ClockId) -> i64 {
    let t = clock_gettime(clock);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}
