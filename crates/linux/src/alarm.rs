//! A limit to how long the calling thread waits in the kernel. `timer_create(2)`.
//!
//! To wait for a tracee by looking again and again takes the processor from the very thread that is waited for; to sleep
//! in between takes longer than it needs. A wait that blocks can be ended by a signal only.

use crate::{Error, Result};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// How often a wait is interrupted once its time is over: a signal that comes just before it begins is lost.
const AGAIN: Duration = Duration::from_millis(50);

/// From its deadline on it interrupts whatever the thread that made it waits for (`EINTR`).
#[derive(Debug)]
pub struct Alarm {
    timer: libc::timer_t,
    deadline: Instant,
}

/// Rarely used by anyone; nobody else sends it to the threads that have an alarm.
fn signal() -> i32 {
    libc::SIGRTMAX() - 3
}

extern "C" fn nothing(_: i32) {}

impl Alarm {
    /// Sets an alarm for the calling thread.
    ///
    /// # Errors
    /// [`Error::Call`]: no more timers are allowed.
    pub fn after(patience: Duration) -> Result<Self> {
        let failed = || Error::call("set an alarm", std::io::Error::last_os_error());
        let mut timer: libc::timer_t = std::ptr::null_mut();
        // SAFETY: all structures are plain data, zero where nothing is set, and outlive the calls that read them; the
        // handler does nothing, which is safe at any moment.
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            let handler: extern "C" fn(i32) = nothing;
            action.sa_sigaction = handler as usize;
            if libc::sigaction(signal(), &raw const action, std::ptr::null_mut()) != 0 {
                return Err(failed());
            }
            let mut event: libc::sigevent = MaybeUninit::zeroed().assume_init();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal();
            event.sigev_notify_thread_id = libc::gettid();
            if libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) != 0 {
                return Err(failed());
            }
            let time = |d: Duration| libc::timespec {
                tv_sec: d.as_secs() as libc::time_t,
                tv_nsec: d.subsec_nanos().into(),
            };
            let times = libc::itimerspec { it_value: time(patience), it_interval: time(AGAIN) };
            let alarm = Alarm { timer, deadline: Instant::now() + patience };
            if libc::timer_settime(timer, 0, &raw const times, std::ptr::null_mut()) != 0 {
                return Err(failed());
            }
            Ok(alarm)
        }
    }

    /// Whether its time has come.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer is ours and used nowhere else.
        unsafe { libc::timer_delete(self.timer) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_a_wait() {
        let alarm = Alarm::after(Duration::from_millis(20)).unwrap();
        assert!(!alarm.is_over());
        // SAFETY: without descriptors, poll only waits.
        let r = unsafe { libc::poll(std::ptr::null_mut(), 0, 10_000) };
        assert_eq!((r, alarm.is_over()), (-1, true));
    }
}
