//! Turns of tests that cannot run beside each other: each takes something that this machine has once.
//!
//! A turn is a lock of a file (flock(2)), so that it holds between processes: every test has one of its own, and two runs
//! may go on at once.

use rustix::fs::{FlockOperation, flock};
use std::fs::File;

/// Something that is taken by one test at a time; given back when it is dropped, or when the process ends.
#[derive(Debug)]
pub struct Turn {
    _locked: File,
}

/// Numbers of pseudo-terminals: a restored one has its number again only while nobody else takes that.
pub const TERMINALS: &str = "terminals";
/// Ids of System V objects: programs that run at the same time take each other's.
pub const SYSTEM_V: &str = "system-v";
/// Huge pages of the machine.
pub const HUGE_PAGES: &str = "huge-pages";
/// Its swap device.
pub const SWAP: &str = "swap";
/// Its merging of equal pages.
pub const MERGING: &str = "merging";

impl Turn {
    /// Waits until nobody else has the thing.
    pub fn of(thing: &str) -> Self {
        let path = std::env::temp_dir().join(format!("stillpoint-turn.{thing}"));
        let open = File::options().create(true).append(true).open(&path);
        let file = open.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        // Nobody who is started inherits it: files are opened with O_CLOEXEC.
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Turn { _locked: file },
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => panic!("{}: {e}", path.display()),
            }
        }
    }
}
