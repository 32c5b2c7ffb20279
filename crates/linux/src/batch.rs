//! Many system calls inside a stopped thread with a single stop, in many threads at once.
//!
//! Tables of several threads are written with one call, and read with one ([`Site::send`], [`Site::outcomes`]).
//!
//! As in [`crate::inject`] the thread must find home by itself if we die. It runs a small loop over a table of calls
//! ([`arch::batch_loop`]), which lies in the unused end of the vdso while the program stands still
//! ([`crate::inject::Planted`]); table and frame home lie far below everything that the main thread's stack holds. The
//! loop ends by returning through the frame, whether we live or not, and whatever the calls returned.
//!
//! With us alive it does not come so far: the last call of each table sends the thread a signal that it ignores. To a
//! thread that is traced the kernel delivers even that, by a stop, from which the thread is sent home by putting its
//! registers back. There the kernel looks at interrupted calls, so that a sleep goes on; and if we die in the meantime
//! the signal is what it would have been without us: nothing.
//!
//! The order of setting registers and mask matters as in [`crate::inject`]: registers first when leaving, mask first
//! when coming home, so that at each moment the frame repairs the other.

use crate::arch::{self, BATCH_WORDS, Regs};
use crate::inject::{Planted, Site, failed, remote_error};
use crate::program::{Arg, Call, OnError, Outcome, Program};
use crate::ptrace::{Seized, Stop, Stopped};
use crate::{Error, RemoteAddr, Result};

/// Bytes of an entry of the table.
pub const ENTRY: usize = BATCH_WORDS * 8;

/// What a thread came with and goes home to.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// Its registers, outside of restartable sequences ([`crate::inject::outside_critical_section`]).
    pub regs: &'a Regs,
    /// Its extended state.
    pub xstate: &'a [u8],
    /// Its blocked signals.
    pub mask: u64,
}

/// How a thread tells that it has come to the end of its table.
#[derive(Clone, Copy, Debug)]
pub struct Signal {
    /// A signal that it ignores and does not block, and that is not pending.
    pub number: i32,
    /// Process id, as it sees it itself.
    pub pid: u32,
    /// Thread id, as it sees it itself.
    pub tid: u32,
}

impl Signal {
    /// A signal for a thread, by what its status tells; `None` if it handles or blocks all that would do.
    pub fn choose(status: &crate::proc::Status, mask: u64) -> Option<Self> {
        let bit = |s: i32| 1u64 << (s - 1);
        // Those that do nothing by default, and those that it chose to ignore. Signals of job control also do something
        // when they are sent; SIGCHLD is for others to send.
        let special = [libc::SIGKILL, libc::SIGSTOP, libc::SIGCONT, libc::SIGTSTP, libc::SIGTTIN];
        let special = special.into_iter().chain([libc::SIGTTOU, libc::SIGCHLD]).fold(0, |m, s| m | bit(s));
        let plain = (1u64 << 31) - 1;
        let ignored = (status.sig_ignored & plain & !special) | bit(libc::SIGWINCH) | bit(libc::SIGURG);
        let taken = status.sig_caught | mask | status.sig_pending | status.shared_pending;
        let free = ignored & !taken;
        let number = free.trailing_zeros() as i32 + 1;
        (free != 0).then(|| Signal { number, pid: status.own_pid(), tid: status.own_tid() })
    }

    /// The call that sends it.
    pub fn call(self) -> (i64, [u64; 6]) {
        (libc::SYS_tgkill, [self.pid.into(), self.tid.into(), self.number as u64, 0, 0, 0])
    }
}

/// Where the frame home and the table of a thread lie.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// Both in this slot.
    Slot(usize),
    /// The frame in this slot, the table in the data area, for one thread at a time.
    SlotAndData(usize),
}

/// Whether the batch loop can run a program: no call takes more than four arguments, the others being zero, and results
/// are used as first ones only.
pub fn can_run(program: &Program) -> bool {
    program.calls.iter().all(|call| {
        let [_, middle @ .., a4, a5] = &call.args;
        let zero = Arg::Value(0);
        *a4 == zero && *a5 == zero && !middle.iter().any(|arg| matches!(arg, Arg::Result(_)))
    })
}

/// Bytes that the table and the data of a program take.
pub fn room_for(program: &Program) -> usize {
    (program.calls.len() + 1) * ENTRY + program.data.len().next_multiple_of(16)
}

/// A thread that is to be sent through a table.
#[derive(Debug)]
pub struct Departure<'a, 'p> {
    /// The thread.
    pub thread: Stopped,
    /// Where it comes from.
    pub origin: Origin<'a>,
    /// Where its frame and table go. The slot must not be in use by another thread.
    pub place: Place,
    /// How it tells its return.
    pub signal: Signal,
    /// What it is to do.
    pub program: &'p Program,
}

/// Where a thread that has come home left its answers, until its place is used again.
#[derive(Clone, Copy, Debug)]
pub struct Answers<'a> {
    program: &'a Program,
    table: u64,
}

/// A thread on its way through a table. Dropping it waits for its return and lets it go; [`Away::wait`] gives it back.
#[derive(Debug)]
pub struct Away<'a> {
    pid: u32,
    program: &'a Program,
    running: Option<Seized>,
    origin: (Regs, u64),
    signal: Signal,
    table: u64,
    /// A stop signal that arrived meanwhile and is sent again afterwards.
    held: i32,
}

impl Site<'_> {
    /// Sets stopped threads off through their programs. With an error, those that were to be sent stay as
    /// they stand, and the kernel lets them go with their tracer, the calling thread.
    pub fn send<'p>(&self, planted: &Planted<'_>, all: Vec<Departure<'_, 'p>>) -> Result<Vec<Away<'p>>> {
        let mut written = Vec::with_capacity(2 * all.len());
        for one in &all {
            debug_assert!(can_run(one.program));
            let (base, frame_len, table) = self.place(one.place);
            let room = if table == self.data().0 { self.data_len() } else { frame_len as usize };
            if room_for(one.program) > room {
                return Err(Error::Other(format!("a program of {} calls does not fit", one.program.len())));
            }
            let Origin { regs, xstate, mask } = one.origin;
            let frame = arch::home_frame(base, &regs.reissue(), xstate, mask, self.gadgets().sigreturn);
            let table_bytes = placed(one.program, one.signal, table);
            written.extend([(RemoteAddr(base), frame), (RemoteAddr(table), table_bytes)]);
        }
        let written: Vec<_> = written.iter().map(|(to, bytes)| (*to, bytes.as_slice())).collect();
        self.memory().write_many(&written)?;
        let mut away = Vec::with_capacity(all.len());
        for Departure { thread, origin, place, signal, program } in all {
            let (base, _, table) = self.place(place);
            let end = table + ((program.calls.len() + 1) * ENTRY) as u64;
            thread.set_regs(&arch::batch_regs(origin.regs, planted.batch_loop(), table, end, base))?;
            thread.set_sigmask(!(1 << (signal.number - 1)))?;
            let running = Some(thread.resume(0)?);
            let origin = (*origin.regs, origin.mask);
            away.push(Away { pid: self.memory().pid(), program, running, origin, signal, table, held: 0 });
        }
        Ok(away)
    }

    /// Address and room of the frame, and address of the table.
    fn place(&self, place: Place) -> (u64, u64, u64) {
        match place {
            Place::Slot(slot) => {
                let (base, frame_len) = self.slot(slot);
                (base, frame_len, base + frame_len)
            }
            Place::SlotAndData(slot) => {
                let (base, frame_len) = self.slot(slot);
                (base, frame_len, self.data().0)
            }
        }
    }

    /// What the calls of threads that have come home returned.
    pub fn outcomes(&self, answers: &[Answers<'_>]) -> Result<Vec<Outcome>> {
        let len = |a: &Answers<'_>| (a.program.calls.len() + 1) * ENTRY + a.program.data.len();
        let places: Vec<(u64, u64)> = answers.iter().map(|a| (a.table, len(a) as u64)).collect();
        let mut bytes = vec![0; answers.iter().map(len).sum()];
        self.memory().read_pinning(&places, &mut bytes)?;
        let mut rest = bytes.as_slice();
        let mut outcomes = Vec::with_capacity(answers.len());
        for answer in answers {
            let calls = &answer.program.calls;
            let (now, later) = rest.split_at(len(answer));
            rest = later;
            let (table, data) = now.split_at((calls.len() + 1) * ENTRY);
            let result = |entry: &[u8]| i64::from_le_bytes(entry[..8].try_into().unwrap_or_default());
            let results: Vec<i64> = table.chunks_exact(ENTRY).take(calls.len()).map(result).collect();
            for (call, &result) in calls.iter().zip(&results) {
                if failed(result) && call.on_error == OnError::Stop {
                    return Err(remote_error(&call.what, self.memory().pid(), result));
                }
            }
            outcomes.push(Outcome { results, data: data.to_vec() });
        }
        Ok(outcomes)
    }
}

/// Table and data of a program at an address, the sending of the signal last.
fn placed(program: &Program, signal: Signal, table: u64) -> Vec<u8> {
    let data_at = table + ((program.calls.len() + 1) * ENTRY) as u64;
    let entry_at = |step: usize| table + (step * ENTRY) as u64;
    let value = |arg: Arg| match arg {
        Arg::Value(v) => v,
        Arg::Data(at) => data_at + u64::from(at),
        Arg::Result(_) => 0, // only the first argument can be one, through its address
    };
    let (nr, args) = signal.call();
    let last = Call { what: String::new(), nr, args: args.map(Arg::Value), on_error: OnError::Continue };
    let mut bytes = Vec::with_capacity(room_for(program));
    for (i, call) in program.calls.iter().chain([&last]).enumerate() {
        let first = match call.args[0] {
            Arg::Result(step) => entry_at(step.0 as usize),
            _ => entry_at(i) + 40,
        };
        let [a0, a1, a2, a3, ..] = call.args.map(value);
        for word in [call.nr as u64, first, a1, a2, a3, a0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }
    bytes.extend_from_slice(&program.placed(data_at));
    bytes
}

impl<'a> Away<'a> {
    /// Waits until the thread has made its calls, and brings it home: it stands as it came, with the registers `regs`.
    pub fn wait(mut self, regs: &Regs) -> Result<(Stopped, Answers<'a>)> {
        let thread = self.home(regs)?;
        Ok((thread, Answers { program: self.program, table: self.table }))
    }

    fn home(&mut self, regs: &Regs) -> Result<Stopped> {
        let mut running = self.running.take().ok_or(Error::Gone(self.signal.tid))?;
        let last = self.table + (self.program.calls.len() * ENTRY) as u64;
        let thread = loop {
            let tid = running.tid();
            let stopped = running.wait()?.stopped(tid)?;
            match stopped.stop() {
                Stop::Signal(s) if s == self.signal.number => {
                    // One that somebody else sends it before the end means as little to it.
                    let at_end = stopped.regs()?.rbx == last;
                    if at_end {
                        break stopped.without_signal();
                    }
                }
                Stop::Signal(s @ (libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU)) => {
                    self.held = s
                }
                Stop::Signal(s) => {
                    // All that could be sent are blocked, and the loop makes none.
                    let thread = stopped.without_signal();
                    thread.set_sigmask(self.origin.1)?;
                    thread.set_regs(&self.origin.0)?;
                    thread.detach()?;
                    return Err(Error::Other(format!("thread {tid} got signal {s} while it was asked")));
                }
                _ => {}
            }
            running = stopped.resume(0)?;
        };
        thread.set_sigmask(self.origin.1)?;
        thread.set_regs(regs)?;
        if self.held != 0 {
            crate::spawn::tgkill(self.pid, thread.tid(), self.held)?;
            self.held = 0;
        }
        Ok(thread)
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        let original = self.origin.0;
        // An error here means that the thread is gone, or that it finds home through its frame when we let it go.
        if self.running.is_some()
            && let Ok(thread) = self.home(&original)
        {
            let _ = thread.detach();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::Status;

    #[test]
    fn a_signal_is_chosen_that_means_nothing() {
        let bit = |s: i32| 1u64 << (s - 1);
        let plain = Status { ns_tgid: vec![7, 1], ns_pid: vec![8, 2], ..Status::default() };
        let signal = Signal::choose(&plain, 0).map(|s| (s.number, s.pid, s.tid));
        assert_eq!(signal, Some((libc::SIGURG, 1, 2)));
        let handler = Status { sig_caught: bit(libc::SIGURG), ..plain.clone() };
        assert_eq!(Signal::choose(&handler, 0).map(|s| s.number), Some(libc::SIGWINCH));
        assert!(Signal::choose(&handler, bit(libc::SIGWINCH)).is_none());
        let ignored = bit(libc::SIGPIPE) | bit(libc::SIGTSTP) | bit(libc::SIGCHLD);
        let go =
            Status { sig_caught: bit(libc::SIGURG) | bit(libc::SIGWINCH), sig_ignored: ignored, ..plain };
        assert_eq!(Signal::choose(&go, 0).map(|s| s.number), Some(libc::SIGPIPE));
        let pending = Status { sig_pending: bit(libc::SIGPIPE), ..go };
        assert!(Signal::choose(&pending, 0).is_none());
    }
}
