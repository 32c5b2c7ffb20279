//! Writers that are killed at random moments.

use crate::common::*;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_store::{Rolling, Store};

/// Rounds of killing.
const ROUNDS: u64 = 60;
/// Tells the test binary, started again, to be the victim.
const VICTIM: &str = "STILLPOINT_TEST_VICTIM_STORE";

/// Memory of checkpoint `id`: half of it is that of the one before.
fn memory_of(id: u64) -> Memory {
    let mut memory = Memory::new();
    for page in 0..400 {
        memory.insert(page, id - (page + id) % id.min(2));
    }
    memory
}

/// There once a victim has begun.
fn begun(store: &Path) -> PathBuf {
    store.with_extension("begun")
}

/// Not a test of its own: what the victim does, until it is killed.
#[test]
fn victim() {
    let Ok(path) = std::env::var(VICTIM) else { return };
    std::fs::write(begun(path.as_ref()), "").expect("begun");
    let mut rolling = None::<Rolling>;
    loop {
        let store = Store::open(path.as_ref()).expect("open");
        let mut writer = store.begin("job").expect("begin");
        let id = writer.id();
        if let Some(last) = store.checkpoints("job").expect("ids").last()
            && last + 1 == id
        {
            let base = store.load("job", Some(*last)).expect("load").pages.extents;
            writer.reuse(&base).expect("reuse");
        }
        for (page, seed) in memory_of(id) {
            put(&mut writer, page, 1, seed).expect("put");
        }
        writer.commit(image()).expect("commit");
        if id.is_multiple_of(3) {
            if id.is_multiple_of(2) {
                store.roll("job", 2).map(drop)
            } else {
                store.prune("job", 2).map(drop)
            }
            .expect("prune");
        }
        if id % 3 == 1 {
            rolling.get_or_insert_with(|| store.rolling("job", 3)).roll().expect("roll");
        }
        if id.is_multiple_of(7) {
            store.remove("job", id).expect("remove");
        }
    }
}

#[test]
fn killed_at_random_moments() {
    let folder = tempfile::tempdir().expect("folder");
    let mut random = u64::from(std::process::id()) | 1;
    let (mut highest, mut rounds) = (0, 0);
    let path = folder.path().join("store");
    // Where the machine is busy with other things, victims may die before they have done anything.
    while rounds < ROUNDS || highest <= ROUNDS / 2 {
        rounds += 1;
        assert!(rounds < 50 * ROUNDS, "{rounds} victims got as far as checkpoint {highest}");
        let _ = std::fs::remove_file(begun(&path));
        let mut victim = Command::new(std::env::current_exe().expect("myself"))
            .args(["--exact", "kill::victim", "--test-threads=1"])
            .env(VICTIM, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("victim");
        let until = Instant::now() + Duration::from_secs(60);
        while !begun(&path).exists() {
            assert!(Instant::now() < until, "round {rounds}: the victim does not begin");
            std::thread::sleep(Duration::from_micros(500));
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        std::thread::sleep(Duration::from_micros(random % 60_000));
        assert!(victim.try_wait().expect("wait").is_none(), "round {rounds}: the victim failed by itself");
        victim.kill().expect("kill");
        victim.wait().expect("wait");

        let store = Store::open(&path).expect("open");
        for id in store.checkpoints("job").unwrap_or_default() {
            assert_holds(&store, "job", id, &memory_of(id));
            highest = highest.max(id);
        }
        assert_no_leftovers(&store, "job");
    }
    eprintln!("{rounds} victims got as far as checkpoint {highest}");
}
