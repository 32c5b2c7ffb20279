//! `/proc/PID/task/TID/syscall`: the system call a sleeping thread is in.

use super::{Proc, text};
use crate::Result;

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurrentCall {
    /// It runs (or could run); nothing more is known.
    Running,
    /// It sleeps outside of a system call (in a page fault, in a stop).
    Outside {
        /// Stack pointer.
        sp: u64,
        /// Instruction pointer.
        pc: u64,
    },
    /// It sleeps in a system call.
    Inside {
        /// Number.
        nr: u64,
        /// Arguments.
        args: [u64; 6],
        /// Stack pointer.
        sp: u64,
        /// Instruction pointer.
        pc: u64,
    },
}

impl Proc {
    /// The system call the thread is in.
    ///
    /// # Errors
    /// [`crate::Error::Gone`], [`crate::Error::Parse`], or [`crate::Error::File`] if we may not trace it.
    pub fn syscall(&self) -> Result<CurrentCall> {
        let text = self.read("syscall")?;
        parse(&text).ok_or_else(|| self.nonsense("syscall", &text))
    }
}

/// Parses the text of `syscall`.
pub fn parse(text: &[u8]) -> Option<CurrentCall> {
    let words: Vec<&[u8]> = text::words(text.trim_ascii()).collect();
    match words.as_slice() {
        [b"running"] => Some(CurrentCall::Running),
        [b"-1", sp, pc] => Some(CurrentCall::Outside { sp: text::hex(sp)?, pc: text::hex(pc)? }),
        [nr, given @ .., sp, pc] if given.len() == 6 => {
            let mut args = [0; 6];
            for (arg, word) in args.iter_mut().zip(given) {
                *arg = text::hex(word)?;
            }
            Some(CurrentCall::Inside { nr: text::dec(nr)?, args, sp: text::hex(sp)?, pc: text::hex(pc)? })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_three() {
        assert_eq!(parse(b"running\n"), Some(CurrentCall::Running));
        assert_eq!(parse(b"-1 0x10 0x20\n"), Some(CurrentCall::Outside { sp: 16, pc: 32 }));
        let call = CurrentCall::Inside { nr: 230, args: [1, 2, 3, 4, 5, 6], sp: 16, pc: 32 };
        assert_eq!(parse(b"230 0x1 0x2 0x3 0x4 0x5 0x6 0x10 0x20\n"), Some(call));
        assert_eq!(parse(b"230 0x1 0x2\n"), None);
    }
}
