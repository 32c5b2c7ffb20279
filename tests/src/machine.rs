//! Things of the whole machine that some tests need: a swap device, huge pages, pages that are merged. Each is put in
//! place while a test holds it, if that is permitted, and taken away with the last holder.

use crate::kernel;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, Weak};

/// Something that is taken away when it is dropped.
pub struct Held {
    undo: Vec<Box<dyn Fn() + Send + Sync>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        for undo in self.undo.iter().rev() {
            undo();
        }
    }
}

/// What is held now, if anything is, else what `make` puts in place.
fn shared(slot: &Mutex<Weak<Held>>, make: impl FnOnce() -> Option<Held>) -> Option<Arc<Held>> {
    let mut slot = slot.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(held) = slot.upgrade() {
        return Some(held);
    }
    let held = Arc::new(make()?);
    *slot = Arc::downgrade(&held);
    Some(held)
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|s| s.success())
}

/// A small swap device in memory (zram), unless the machine swaps already.
pub fn swap() -> Option<Arc<Held>> {
    static SLOT: Mutex<Weak<Held>> = Mutex::new(Weak::new());
    shared(&SLOT, || {
        let swaps = fs::read_to_string("/proc/swaps").ok()?;
        if swaps.lines().count() > 1 {
            return Some(Held { undo: Vec::new() });
        }
        let numbers = (0..8).map(|n| PathBuf::from(format!("/sys/block/zram{n}")));
        let unused = |p: &PathBuf| fs::read_to_string(p.join("disksize")).is_ok_and(|s| s.trim() == "0");
        let zram = numbers.into_iter().find(unused).filter(|_| kernel::is_root())?;
        let device = format!("/dev/{}", zram.file_name()?.to_str()?);
        fs::write(zram.join("disksize"), "256M").ok()?;
        let held = Held { undo: vec![Box::new(move || drop(fs::write(zram.join("reset"), "1")))] };
        (runs("mkswap", &[&device]) && runs("swapon", &[&device])).then_some(())?;
        let mut held = held;
        held.undo.push(Box::new(move || {
            runs("swapoff", &[&device]);
        }));
        Some(held)
    })
}

/// Sixteen huge pages more than there were.
pub fn huge_pages() -> Option<Arc<Held>> {
    static SLOT: Mutex<Weak<Held>> = Mutex::new(Weak::new());
    shared(&SLOT, || {
        let number = Path::new("/proc/sys/vm/nr_hugepages");
        let before: u64 = fs::read_to_string(number).ok()?.trim().parse().ok()?;
        setting(number, &(before + 16).to_string())
    })
}

/// The kernel looks for pages that are the same.
pub fn merging() -> Option<Arc<Held>> {
    static SLOT: Mutex<Weak<Held>> = Mutex::new(Weak::new());
    shared(&SLOT, || {
        let mut held = setting(Path::new("/sys/kernel/mm/ksm/pages_to_scan"), "2000")?;
        held.undo.append(&mut setting(Path::new("/sys/kernel/mm/ksm/run"), "1")?.undo);
        Some(held)
    })
}

/// Writes a setting, and what it was in the end.
fn setting(file: &'static Path, value: &str) -> Option<Held> {
    let before = fs::read_to_string(file).ok()?;
    fs::write(file, value).ok()?;
    Some(Held { undo: vec![Box::new(move || drop(fs::write(file, before.trim())))] })
}
