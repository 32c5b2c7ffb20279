//! Whatever a program does meanwhile, a checkpoint holds one exact instant of it. Its threads keep invariants across
//! pages at every moment; they are looked for in what was stored.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use stillpoint_capture::{Engine, Options, Progress, Report, Session, checkpoint};
use stillpoint_image::{Owner, PAGE, Place};
use stillpoint_store::{Fault, Op, Store};
use stillpoint_tests::tier;

struct Quiet;

impl Progress for Quiet {
    fn start(&self, _: u64) {}
    fn advance(&self, _: u64) {}
}

struct Target {
    child: Child,
    notes: u64,
    folder: tempfile::TempDir,
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Target {
    fn start(storms: &str) -> Target {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("instants");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/instants.c");
        let mut cc = Command::new("cc");
        let built = cc.args(["-O2", "-pthread", "-o"]).arg(&program).arg(source).status().unwrap();
        assert!(built.success());
        // Nothing of what this process was started with may be open in it.
        const CLOSE: &str = r#"for f in /proc/self/fd/*; do n=${f##*/}; [ "$n" -gt 2 ] && eval "exec $n>&-"; done; exec "$@""#;
        let mut bash = Command::new("bash");
        bash.args(["-c", CLOSE, "bash"]).arg(&program).arg(storms);
        bash.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = bash.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Target { child, notes: line.trim().parse().unwrap(), folder }
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

fn options(engine: Engine, buffer: u64) -> Options {
    let (job, inherited) = ("instants".to_string(), Vec::new());
    Options { job, label: None, engine, buffer, full: false, kill: false, inherited }
}

/// The memory of a stored checkpoint, page by page.
struct Memory(HashMap<u64, Vec<u8>>);

impl Memory {
    fn load(store: &Path) -> Memory {
        let checkpoint = Store::open(store).unwrap().load("instants", None).unwrap();
        let mut pages = HashMap::new();
        for extent in checkpoint.pages.extents.iter().filter(|e| e.owner == Owner::Space(0)) {
            let mut bytes = vec![0; extent.len() as usize];
            if extent.place != Place::Zero {
                checkpoint.reader.read(extent, &mut bytes).unwrap();
            }
            for (n, page) in bytes.chunks(PAGE as usize).enumerate() {
                pages.insert(extent.address + n as u64 * PAGE, page.to_vec());
            }
        }
        Memory(pages)
    }

    fn word(&self, address: u64) -> u64 {
        let Some(page) = self.0.get(&(address / PAGE * PAGE)) else { return 0 };
        let at = (address % PAGE) as usize;
        u64::from_le_bytes(page[at..at + 8].try_into().unwrap())
    }

    /// Panics unless all invariants hold.
    fn check(&self, notes: u64) {
        let note = |n: u64| self.word(notes + 8 * n);
        self.check_counters(note(0), note(1), note(2));
        self.check_counters(note(3), note(4), 1);
        for region in 0..4 {
            let at = |n: u64| note(5 + 4 * region + n);
            let (whole, value, address, pages) = (at(0) == 1, at(1), at(2), at(3));
            for page in (0..pages).filter(|_| whole) {
                let found = self.word(address + page * PAGE);
                assert_eq!(found, value, "page {page} of region {region} at {address:#x}");
            }
        }
    }

    fn check_counters(&self, address: u64, count: u64, stride: u64) {
        assert!(count > 0);
        let of = |i: u64| self.word(address + i * stride % count * PAGE);
        for i in 1..count {
            let (before, here) = (of(i - 1), of(i));
            assert!(here <= before && of(0) <= here + 1, "{i}: {before}, {here}, first {}", of(0));
        }
    }
}

/// Takes checkpoints one after the other, each of which must hold an instant. `lossy`: it may also come to nothing.
fn hold_instants(storms: &str, engine: Engine, buffer: u64, lasting: bool, lossy: bool) -> Vec<Report> {
    let mut target = Target::start(storms);
    let store = Store::open(&target.store()).unwrap();
    let pid = target.child.id();
    let mut session = Session::new(pid);
    let mut reports = Vec::new();
    for n in 0..tier::times("STILLPOINT_CUTS", 4, 12) {
        let options = options(engine, buffer);
        let report = match lasting {
            true => session.checkpoint(&store, &options, &Quiet),
            false => checkpoint(pid, &store, &options, &Quiet),
        };
        match report {
            Ok(report) => {
                eprintln!("{n}: {} KiB, {:?}, {:?}", report.written_bytes >> 10, report.pause, report.wall);
                eprintln!("   {:?}", report.story);
                Memory::load(&target.store()).check(target.notes);
                reports.push(report);
            }
            Err(e) if lossy => eprintln!("{n}: {e}"),
            Err(e) => panic!("{n}: {e}"),
        }
        assert!(target.is_alive());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(session);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    assert!(!maps.lines().any(|l| l.starts_with("VmFlags") && l.contains(" uw")), "still followed");
    assert!(target.is_alive());
    reports
}

#[test]
fn wp_alone() {
    hold_instants("", Engine::Wp, 16 << 20, false, false);
}

#[test]
fn wp_with_a_tiny_buffer() {
    hold_instants("", Engine::Wp, 4096, false, false);
}

#[test]
fn wp_while_threads_come_and_go() {
    hold_instants("t", Engine::Wp, 16 << 20, false, false);
}

#[test]
fn wp_in_storms() {
    for storms in tier::turn("storms", &["d", "m", "r", "dmrt"]) {
        let done = hold_instants(storms, Engine::Wp, 16 << 20, false, true);
        eprintln!("{storms}: {} reports", done.len());
    }
}

#[test]
fn wp_incremental() {
    let reports = hold_instants("t", Engine::Wp, 16 << 20, true, false);
    // The first is full; what is never written is not saved again.
    assert!(reports[0].written_bytes > 32 << 20);
    let is_lost = |r: &&Report| r.story.iter().any(|s| s.contains("an instant was lost"));
    for report in reports[1..].iter().filter(|r| !is_lost(r)) {
        assert!(report.incremental && report.written_bytes < 24 << 20, "{report:?}");
    }
    assert!(reports[1..].iter().any(|r| !is_lost(&r)));
}

#[test]
fn wp_incremental_in_storms() {
    let done = hold_instants("dmrt", Engine::Wp, 16 << 20, true, true);
    eprintln!("{} reports", done.len());
}

/// A medium that is slow, and fails after some writes.
struct Failing(AtomicU32);

impl Fault for Failing {
    fn before(&self, op: Op, _: &Path) -> std::io::Result<()> {
        if op != Op::Write {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
        match self.0.fetch_sub(1, Ordering::Relaxed) {
            0 => Err(std::io::Error::other("the medium fails")),
            _ => Ok(()),
        }
    }
}

/// Writers that wait for room go on when the medium fails; and with the next checkpoint all is well.
#[test]
fn wp_on_a_failing_medium() {
    let mut target = Target::start("t");
    let pid = target.child.id();
    let mut session = Session::new(pid);
    for writes in [3, 10, 25] {
        let failing = Arc::new(Failing(AtomicU32::new(writes)));
        let store = Store::open_faulty(&target.store(), failing).unwrap();
        let failed = session.checkpoint(&store, &options(Engine::Wp, 4096), &Quiet);
        assert!(failed.unwrap_err().to_string().contains("the medium fails"));
        assert!(target.is_alive());
    }
    let store = Store::open(&target.store()).unwrap();
    session.checkpoint(&store, &options(Engine::Wp, 4096), &Quiet).unwrap();
    Memory::load(&target.store()).check(target.notes);
}
