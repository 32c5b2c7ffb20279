//! Expiries of timers that come between two looks.
//!
//! Time goes on in a freeze. A timer that expires after the signals that wait were read, and before it is asked what it has left, would have
//! neither a signal nor any time left, and nobody would ever hear of it. So signals are looked at a second time, after the timers.

use crate::Result;
use stillpoint_image::{Bytes, Process};
use stillpoint_linux::layout;
use stillpoint_linux::ptrace::Stopped;

/// Adds to the signals that wait those of timers which have expired since they were read, and before the timers were asked.
/// `threads` are those of the process, in its order.
///
/// (An expiry after that is in what the timer had left. Those of the CPU clocks, which only our own calls can have moved on
/// meanwhile, are not looked for.)
///
/// # Errors
/// That signals cannot be read.
pub fn add(threads: &[Stopped], process: &mut Process) -> Result<()> {
    let alarm_is_known = process.pending.iter().any(|info| layout::half(&info.0, 0) == libc::SIGALRM as u32);
    let has_time_left = process.itimers.first().is_some_and(|timer| timer.value_us != 0);
    if !alarm_is_known && !has_time_left {
        let is_alarm = |info: &[u8; layout::SIGINFO]| {
            let [signal, code] = [0, 2].map(|i| layout::half(info, i) as i32);
            signal == libc::SIGALRM && code == layout::SI_KERNEL
        };
        let alarm = threads[0].pending(true)?.into_iter().find(is_alarm);
        process.pending.extend(alarm.map(|info| Bytes(info.to_vec())));
    }
    for timer in &process.timers {
        // One that is periodic has always some time left: to its next expiry, and not to the one whose signal waits.
        if timer.remaining_ns != 0 && timer.interval_ns == 0 {
            continue;
        }
        let place = process.threads.iter().position(|thread| thread.tid == timer.tid);
        let (stopped, pending) = match place {
            Some(place) => (&threads[place], &mut process.threads[place].pending),
            None => (&threads[0], &mut process.pending),
        };
        let is_of_it = |info: &[u8]| layout::expiry(info) == Some((timer.signal, timer.id));
        if !pending.iter().any(|info| is_of_it(&info.0)) {
            let expiry = stopped.pending(place.is_none())?.into_iter().find(|info| is_of_it(info));
            pending.extend(expiry.map(|info| Bytes(info.to_vec())));
        }
    }
    Ok(())
}
