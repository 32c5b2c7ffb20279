//! `/proc/PID/timers`: POSIX timers of a process (kernels with `CONFIG_CHECKPOINT_RESTORE`).

use super::{Proc, nonsense, text};
use crate::Result;
use std::path::Path;

/// A POSIX timer, as far as `timers` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PosixTimerInfo {
    /// Kernel id.
    pub id: u32,
    /// Signal it sends.
    pub signal: u32,
    /// Its `sigev_value`.
    pub value: u64,
    /// How it notifies.
    pub notify: TimerNotify,
    /// Whether one thread is notified (`SIGEV_THREAD_ID`).
    pub to_thread: bool,
    /// Process or thread that is notified, in the pid namespace of our `/proc`; 0 if it is gone.
    pub target: u32,
    /// `CLOCK_*`, or negative: the CPU clock of some process or thread (clock_getcpuclockid(3)).
    pub clock: i32,
}

/// How a timer notifies: `SIGEV_*` without the thread flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimerNotify {
    /// `SIGEV_SIGNAL`.
    #[default]
    Signal,
    /// `SIGEV_NONE`.
    None,
    /// `SIGEV_THREAD`, which to the kernel is a signal too.
    Thread,
}

impl Proc {
    /// POSIX timers, in the kernel's order.
    ///
    /// # Errors
    /// [`crate::Error::Gone`], [`crate::Error::Parse`], or [`crate::Error::File`] on a kernel without the file.
    pub fn timers(&self) -> Result<Vec<PosixTimerInfo>> {
        parse(&self.read("timers")?, &self.path.join("timers"))
    }
}

/// Parses the text of `timers`.
///
/// # Errors
/// [`crate::Error::Parse`] with the offending line.
pub fn parse(text: &[u8], path: &Path) -> Result<Vec<PosixTimerInfo>> {
    let mut all: Vec<PosixTimerInfo> = Vec::new();
    for line in text::lines(text) {
        detail(&mut all, line).ok_or_else(|| nonsense(path, line))?;
    }
    Ok(all)
}

fn detail(all: &mut Vec<PosixTimerInfo>, line: &[u8]) -> Option<()> {
    let (key, value) = text::cut(line, b':')?;
    let value = value.trim_ascii();
    if key == b"ID" {
        all.push(PosixTimerInfo { id: text::dec(value)?.try_into().ok()?, ..Default::default() });
        return Some(());
    }
    let timer = all.last_mut()?;
    match key {
        b"signal" => {
            let (signal, data) = text::cut(value, b'/')?;
            timer.signal = text::dec(signal)?.try_into().ok()?;
            timer.value = text::hex(data)?;
        }
        b"notify" => {
            let (how, whom) = text::cut(value, b'/')?;
            let (kind, id) = text::cut(whom, b'.')?;
            timer.notify = match how {
                b"signal" => TimerNotify::Signal,
                b"none" => TimerNotify::None,
                b"thread" => TimerNotify::Thread,
                _ => return None,
            };
            timer.to_thread = kind == b"tid";
            timer.target = text::dec(id)?.try_into().ok()?;
        }
        b"ClockID" => timer.clock = text::signed(value)?.try_into().ok()?,
        _ => {}
    }
    Some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn two_timers() {
        let text = b"ID: 5\nsignal: 34/00007ffd1234\nnotify: signal/tid.77\nClockID: 1\n\
            ID: 0\nsignal: 14/0000000000000000\nnotify: none/pid.0\nClockID: -1210\n";
        let all = parse(text, Path::new("timers")).unwrap();
        assert_eq!((all[0].id, all[0].signal, all[0].value), (5, 34, 0x7ffd1234));
        assert_eq!((all[0].to_thread, all[0].target, all[0].clock), (true, 77, 1));
        assert_eq!((all[1].notify, all[1].to_thread, all[1].clock), (TimerNotify::None, false, -1210));
        assert!(parse(b"signal: 1/2\n", Path::new("timers")).is_err());
    }
}
