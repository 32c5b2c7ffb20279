//! What is never forgiven, and what may be tried again.
//!
//! A wrong restore (contents, registers or other state differ), a target that was harmed, something of ours left in it, a
//! damaged store, a half process: these are reported by [`wrong`], [`right!`](crate::right) and
//! [`right_eq!`](crate::right_eq), into the file `wrong` of the run (`STILLPOINT_RUN` is its folder), and the run fails
//! whatever a later attempt says. All else that a test asserts, time limits above all, is tried again on a busy machine.

use crate::scratch;
use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;

/// The folder of this run, if whoever started the tests has one.
pub fn run() -> Option<PathBuf> {
    std::env::var_os("STILLPOINT_RUN").map(PathBuf::from)
}

/// Adds a line to a file of the run, if there is a run.
pub fn note(file: &str, line: &str) {
    let Some(path) = run().map(|run| run.join(file)) else { return };
    let opened = std::fs::File::options().create(true).append(true).open(&path);
    // One write each: lines of tests that run at the same time are not mixed.
    let written = opened.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|e| eprintln!("{}: {e}", path.display()));
}

/// Reports what is never forgiven, and panics.
#[track_caller]
pub fn wrong(what: impl Display) -> ! {
    let what = format!("WRONG: {what}");
    let at = std::panic::Location::caller();
    let first = what.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    note("wrong", &format!("{first} (test {}, {}:{})", scratch::test_name(), at.file(), at.line()));
    panic!("{what}");
}

/// As `assert!`, of what is never forgiven.
#[macro_export]
macro_rules! right {
    ($holds:expr $(,)?) => {
        if !$holds {
            $crate::verdict::wrong(stringify!($holds));
        }
    };
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            $crate::verdict::wrong(format!($($what)+));
        }
    };
}

/// As `assert_eq!`, of what is never forgiven.
#[macro_export]
macro_rules! right_eq {
    ($is:expr, $should:expr $(,)?) => {
        match (&$is, &$should) {
            (is, should) => if *is != *should {
                $crate::verdict::wrong(format!("{} is {is:?}, not {should:?}", stringify!($is)));
            }
        }
    };
    ($is:expr, $should:expr, $($what:tt)+) => {
        match (&$is, &$should) {
            (is, should) => if *is != *should {
                $crate::verdict::wrong(format!("{}: {} is {is:?}, not {should:?}", format!($($what)+), stringify!($is)));
            }
        }
    };
}

/// How a target program judged itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// All is as it was.
    Right,
    /// All is as it was, but something took longer than it should, as on a busy machine.
    Late,
    /// It found differences, or did not live to say.
    Wrong,
}

impl Judgement {
    /// Of what it has said.
    pub fn of(said: &str) -> Self {
        let is = |word: &str| said.lines().any(|line| line.starts_with(word));
        match (said.lines().any(|line| line == "ok"), is("late: ")) {
            (true, _) => Judgement::Right,
            (false, true) if !is("differs: ") => Judgement::Late,
            _ => Judgement::Wrong,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Judgement;

    #[test]
    fn what_targets_say() {
        for (said, judgement) in [
            ("ready\nok\n", Judgement::Right),
            ("ready\nwoke 1.2 s after\nlate: x.c:1: in time\n", Judgement::Late),
            ("ready\nlate: x.c:1: in time\ndiffers: x.c:2: contents\n", Judgement::Wrong),
            ("ready\nword 3 of 5 differs\n", Judgement::Wrong),
            ("ready\n", Judgement::Wrong),
            ("", Judgement::Wrong),
        ] {
            assert_eq!(Judgement::of(said), judgement, "{said}");
        }
    }
}
