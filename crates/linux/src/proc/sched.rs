//! `/proc/PID/task/TID/sched`: when a thread last ran (kernels with `CONFIG_SCHED_DEBUG`).

use super::{Proc, text};
use crate::Result;

/// Times of the scheduler, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedStat {
    /// `se.exec_start`: when it last got or gave up a CPU, on the clock of that CPU's run queue, which is close to
    /// `CLOCK_MONOTONIC` of the host (suspended time apart).
    pub exec_start_ns: u64,
    /// `se.sum_exec_runtime`: CPU time so far.
    pub runtime_ns: u64,
}

impl Proc {
    /// Times of the scheduler; `None` where the kernel does not tell.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Parse`].
    pub fn sched(&self) -> Result<Option<SchedStat>> {
        let Some(text) = self.read_optional("sched")? else { return Ok(None) };
        parse(&text).map(Some).ok_or_else(|| self.nonsense("sched", &text))
    }
}

/// Parses the text of `sched`.
pub fn parse(text: &[u8]) -> Option<SchedStat> {
    let mut stat = SchedStat::default();
    let mut found = false;
    for line in text::lines(text) {
        let Some((key, value)) = text::cut(line, b':') else { continue };
        match key.trim_ascii() {
            b"se.exec_start" => (stat.exec_start_ns, found) = (milliseconds(value.trim_ascii())?, true),
            b"se.sum_exec_runtime" => stat.runtime_ns = milliseconds(value.trim_ascii())?,
            _ => {}
        }
    }
    found.then_some(stat)
}

/// `1687526.049986`: milliseconds with six decimals, in nanoseconds.
fn milliseconds(value: &[u8]) -> Option<u64> {
    let (whole, fraction) = text::cut(value, b'.')?;
    if fraction.len() != 6 {
        return None;
    }
    text::dec(whole)?.checked_mul(1_000_000)?.checked_add(text::dec(fraction)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let text = b"a:b (8492, #threads: 1)\n------\nse.exec_start             :       1687526.049986\n\
            se.vruntime : -1.000000\nse.sum_exec_runtime :             0.000001\n";
        assert_eq!(parse(text), Some(SchedStat { exec_start_ns: 1_687_526_049_986, runtime_ns: 1 }));
        assert_eq!(parse(b"x (1, #threads: 1)\n"), None);
    }
}
