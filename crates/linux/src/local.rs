//! Running programs of system calls in the calling thread itself: for tests, and for helpers that are forked.

use crate::program::{Arg, OnError, Outcome, Program, Run};
use crate::{Error, Result};

/// From now on memory that is freed stays with the allocator, up to so many bytes of it, and larger pieces come from there, too: to ask
/// the kernel for the same again and again, page by page, takes longer than most of what is done with it.
pub fn keep_freed_memory(bytes: i32) {
    // SAFETY: mallopt(3) takes numbers. What it refuses stays as it was.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes);
        libc::mallopt(libc::M_TRIM_THRESHOLD, bytes);
    }
}

/// Gives what was kept so back to the kernel, once; the next that is freed is kept again.
pub fn give_back_freed_memory() {
    // SAFETY: malloc_trim(3) takes a number, and touches only what nobody uses.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Runs programs in the calling process, with the same rules as in another one.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalRun;

impl Run for LocalRun {
    fn run(&mut self, program: &Program) -> Result<Outcome> {
        let mut outcome =
            Outcome { results: Vec::with_capacity(program.calls.len()), data: program.data.clone() };
        let base = outcome.data.as_mut_ptr() as u64;
        for call in &program.calls {
            let value = |arg: &Arg| match *arg {
                Arg::Value(v) => v,
                Arg::Data(at) => base + u64::from(at),
                Arg::Result(step) => outcome.results[step.0 as usize] as u64,
            };
            let [a, b, c, d, e, f] = [0, 1, 2, 3, 4, 5].map(|i| value(&call.args[i]));
            // SAFETY: addresses in a program lie in its own data, which lives on the heap and is not moved; whoever
            // wrote the program vouches that its calls stay within them and do no harm to this process.
            let mut result = unsafe { libc::syscall(call.nr, a, b, c, d, e, f) };
            if result < 0 {
                let source = std::io::Error::last_os_error();
                if call.on_error == OnError::Stop {
                    return Err(Error::Remote { call: call.what.clone(), pid: self.pid(), source });
                }
                result = -i64::from(source.raw_os_error().unwrap_or(libc::EIO));
            }
            outcome.results.push(result);
        }
        Ok(outcome)
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn results_feed_later_calls() {
        let mut p = Program::new();
        let path = p.string(b"/proc/self/comm");
        let at = Arg::Value(libc::AT_FDCWD as u64);
        let fd = p.call("open", libc::SYS_openat, [at, path, 0.into()]);
        let room = p.room(16);
        let n = p.call("read", libc::SYS_read, [fd.into(), room, 16.into()]);
        p.call("close", libc::SYS_close, [fd.into()]);
        let bad = p.attempt("close again", libc::SYS_close, [fd.into()]);
        let outcome = LocalRun.run(&p).unwrap();
        assert!(outcome.result(n) > 0 && outcome.bytes(room, 1)[0] != 0);
        assert_eq!(outcome.result(bad), -i64::from(libc::EBADF));
    }
}
