//! Things of the whole machine that some tests need: a swap device, huge pages, pages that are merged. Each is put in
//! place while a test holds it, if that is permitted, and then taken away; one test after another.

use crate::kernel;
use crate::turn::{self, Turn};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Something that is taken away when it is dropped; the next test has its turn then.
pub struct Held {
    undo: Vec<Box<dyn Fn()>>,
    _turn: Turn,
}

impl Drop for Held {
    fn drop(&mut self) {
        for undo in self.undo.iter().rev() {
            undo();
        }
    }
}

impl Held {
    fn nothing(turn: Turn) -> Self {
        Held { undo: Vec::new(), _turn: turn }
    }

    /// Writes a setting; what it was is written in the end.
    fn setting(&mut self, file: &'static Path, value: &str) -> Option<()> {
        let before = fs::read_to_string(file).ok()?;
        fs::write(file, value).ok()?;
        self.undo.push(Box::new(move || drop(fs::write(file, before.trim()))));
        Some(())
    }
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|s| s.success())
}

/// A small swap device in memory (zram), unless the machine swaps already.
pub fn swap() -> Option<Held> {
    let mut held = Held::nothing(Turn::of(turn::SWAP));
    let swaps = fs::read_to_string("/proc/swaps").ok()?;
    if swaps.lines().count() > 1 {
        return Some(held);
    }
    let numbers = (0..8).map(|n| PathBuf::from(format!("/sys/block/zram{n}")));
    let unused = |p: &PathBuf| fs::read_to_string(p.join("disksize")).is_ok_and(|s| s.trim() == "0");
    let zram = numbers.into_iter().find(unused).filter(|_| kernel::is_root())?;
    let device = format!("/dev/{}", zram.file_name()?.to_str()?);
    fs::write(zram.join("disksize"), "256M").ok()?;
    held.undo.push(Box::new(move || drop(fs::write(zram.join("reset"), "1"))));
    (runs("mkswap", &[&device]) && runs("swapon", &[&device])).then_some(())?;
    held.undo.push(Box::new(move || {
        runs("swapoff", &[&device]);
    }));
    Some(held)
}

/// Sixteen huge pages more than there were.
pub fn huge_pages() -> Option<Held> {
    let mut held = Held::nothing(Turn::of(turn::HUGE_PAGES));
    let number = Path::new("/proc/sys/vm/nr_hugepages");
    let before: u64 = fs::read_to_string(number).ok()?.trim().parse().ok()?;
    held.setting(number, &(before + 16).to_string())?;
    Some(held)
}

/// The kernel looks for pages that are the same.
pub fn merging() -> Option<Held> {
    let mut held = Held::nothing(Turn::of(turn::MERGING));
    held.setting(Path::new("/sys/kernel/mm/ksm/pages_to_scan"), "2000")?;
    held.setting(Path::new("/sys/kernel/mm/ksm/run"), "1")?;
    Some(held)
}
