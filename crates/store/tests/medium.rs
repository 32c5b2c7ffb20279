//! A medium that fails, at every operation there is: earlier checkpoints stay whole, no partial one shows, and the
//! next open leaves nothing behind.

use crate::common::*;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use stillpoint_store::{Error, Fault, Op, Result, Store};

/// Fails operation number `at`; all later ones too if the machine is to have stopped there.
struct FailsAt {
    at: usize,
    for_ever: bool,
    count: AtomicUsize,
}

impl Fault for FailsAt {
    fn before(&self, _: Op, _: &Path) -> io::Result<()> {
        let now = self.count.fetch_add(1, Ordering::SeqCst);
        let fails = now == self.at || self.for_ever && now > self.at;
        if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

/// Runs `act` on a store that `prepare` has filled, failing at the first operation, the second, … until nothing fails
/// any more; `check` gets to see the store opened anew each time, and what `act` returned.
fn at_every_operation<T>(
    prepare: impl Fn(&Store),
    act: impl Fn(&Store) -> Result<T>,
    check: impl Fn(&Store, Result<T>),
) {
    for for_ever in [false, true] {
        for at in 0.. {
            assert!(at < 1000, "this never ends");
            let folder = tempfile::tempdir().expect("folder");
            prepare(&Store::open(folder.path()).expect("store"));
            let fault = Arc::new(FailsAt { at, for_ever, count: AtomicUsize::new(0) });
            let faulty = Store::open_faulty(folder.path(), fault.clone()).expect("open");
            let result = act(&faulty);
            drop(faulty);
            let hit = fault.count.load(Ordering::SeqCst) > at;
            if !hit {
                assert!(result.is_ok(), "{:?}", result.err());
            }
            check(&Store::open(folder.path()).expect("open again"), result);
            if !hit {
                break;
            }
        }
    }
}

fn two_checkpoints(store: &Store) {
    checkpoint(store, "web", &memory(0, 200, 1)).expect("first");
    let mut writer = store.begin("web").expect("writer");
    let base = store.load("web", None).expect("load").pages.extents;
    writer.reuse(&base).expect("reuse");
    put(&mut writer, 0, 150, 2).expect("put");
    writer.commit(image()).expect("second");
}

fn second() -> Memory {
    let mut second = memory(0, 200, 1);
    second.extend(memory(0, 150, 2));
    second
}

#[test]
fn while_a_checkpoint_is_written() {
    let write = |store: &Store| {
        let mut writer = store.begin("web")?;
        put(&mut writer, 0, 600, 3)?;
        put(&mut writer, 1000, 600, 3)?;
        writer.commit(image()).map(|done| done.id)
    };
    at_every_operation(two_checkpoints, write, |store, result| {
        assert_holds(store, "web", 1, &memory(0, 200, 1));
        assert_holds(store, "web", 2, &second());
        let ids = store.checkpoints("web").expect("ids");
        match result {
            Ok(id) => assert_eq!((id, ids), (3, vec![1, 2, 3])),
            // Where not even the manifest could be taken back, it is whole.
            Err(_) => assert!(ids.starts_with(&[1, 2])),
        }
        if store.checkpoints("web").expect("ids").len() == 3 {
            let mut third = memory(0, 600, 3);
            third.extend(memory(1000, 600, 3));
            assert_holds(store, "web", 3, &third);
        }
        assert_no_leftovers(store, "web");
        checkpoint(store, "web", &memory(5, 5, 4)).expect("the next one succeeds");
    });
}

#[test]
fn the_first_checkpoint_of_all() {
    let write = |store: &Store| checkpoint(store, "web", &memory(0, 10, 3)).map(|done| done.id);
    at_every_operation(
        |_| {},
        write,
        |store, result| {
            if result.is_ok() {
                assert_holds(store, "web", 1, &memory(0, 10, 3));
            }
            assert_no_leftovers(store, "web");
            checkpoint(store, "web", &memory(5, 5, 4)).expect("the next one succeeds");
        },
    );
}

#[test]
fn while_pruning_and_rewriting() {
    let prune = |store: &Store| store.prune("web", 1);
    at_every_operation(two_checkpoints, prune, |store, result| {
        let ids = store.checkpoints("web").expect("ids");
        assert!(ids.ends_with(&[2]));
        assert_holds(store, "web", 2, &second());
        if ids.contains(&1) {
            assert!(result.is_err());
            assert_holds(store, "web", 1, &memory(0, 200, 1));
        }
        assert_no_leftovers(store, "web");
        let freed = store.prune("web", 1).expect("the next one succeeds");
        assert!(freed.unfinished.is_none());
        assert_holds(store, "web", 2, &second());
        assert_no_leftovers(store, "web");
        assert!(segment_bytes(store, "web") < 210 * 4096, "the first segment was rewritten");
    });
}

#[test]
fn while_one_segment_is_written_after_the_other() {
    let roll = |store: &Store| {
        store.roll("web", 1)?;
        put_all(store, 200, 5)?;
        store.roll("web", 1)?;
        put_all(store, 180, 6)
    };
    let prepare = |store: &Store| {
        checkpoint(store, "web", &memory(0, 200, 1)).expect("first");
        checkpoint(store, "web", &memory(0, 200, 2)).expect("second");
    };
    at_every_operation(prepare, roll, |store, result| {
        let ids = store.checkpoints("web").expect("ids");
        assert!(!ids.is_empty());
        for id in ids {
            let pages = if id == 4 { 180 } else { 200 };
            let seed = if id > 2 { id + 2 } else { id };
            assert_holds(store, "web", id, &memory(0, pages, seed));
        }
        assert_no_leftovers(store, "web");
        store.roll("web", 1).expect("the next one succeeds");
        if result.is_ok() {
            assert_eq!(store.checkpoints("web").expect("ids"), [4]);
        }
        checkpoint(store, "web", &memory(0, 190, 7)).expect("and another checkpoint");
        assert_no_leftovers(store, "web");
        store.prune("web", 1).expect("prune");
        assert_eq!(names(&store.path().join("jobs/web/segments")).len(), 1, "the spare is given back");
    });
}

fn put_all(store: &Store, pages: u64, seed: u64) -> Result<()> {
    let mut writer = store.begin("web")?;
    put(&mut writer, 0, pages, seed)?;
    writer.commit(image()).map(drop)
}

#[test]
fn while_the_newest_is_removed() {
    let remove = |store: &Store| store.remove("web", 2);
    at_every_operation(two_checkpoints, remove, |store, _| {
        assert_holds(store, "web", 1, &memory(0, 200, 1));
        if store.checkpoints("web").expect("ids").contains(&2) {
            assert_holds(store, "web", 2, &second());
        }
        assert_no_leftovers(store, "web");
    });
}

#[test]
fn while_a_job_is_removed() {
    let remove = |store: &Store| store.remove_job("web");
    at_every_operation(two_checkpoints, remove, |store, result| match store.jobs().expect("jobs")[..] {
        [] => assert!(names(&store.path().join("jobs")).is_empty()),
        _ => {
            assert!(result.is_err());
            assert_holds(store, "web", 2, &second());
        }
    });
}

#[test]
fn while_a_tail_is_kept() {
    let tail = vec![7; 3 << 20];
    let keep = |store: &Store| store.keep_tail("web", 2, Path::new("/log"), 9, &mut tail.as_slice());
    at_every_operation(two_checkpoints, keep, |store, result| {
        let tails = store.tails("web").expect("tails");
        assert!(tails.len() <= 1);
        if let Ok(path) = result {
            assert_eq!(tails[0].data, path);
        }
        for tail in &tails {
            assert_eq!(std::fs::read(&tail.data).expect("tail").len(), 3 << 20);
        }
        let files = names(&store.path().join("jobs/web/tails"));
        assert!(files.len() <= 1 + 2 * tails.len(), "{files:?}");
    });
}

#[test]
fn a_failed_writer_refuses_everything() {
    struct FullSegments;
    impl Fault for FullSegments {
        fn before(&self, op: Op, path: &Path) -> io::Result<()> {
            let data = op == Op::Write && path.extension().is_some_and(|e| e == "pages");
            // The header may be written.
            let begun = path.metadata().is_ok_and(|m| m.len() >= 4096);
            if data && begun { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }
    }
    let folder = tempfile::tempdir().expect("folder");
    let store = Store::open_faulty(folder.path(), Arc::new(FullSegments)).expect("open");
    let mut writer = store.begin("web").expect("writer");
    let failed = (0..100).find_map(|i| put(&mut writer, i * 256, 256, 1).err()).expect("the medium is full");
    assert!(matches!(failed, Error::Failed(..)), "{failed}");
    assert!(failed.to_string().contains("make room"), "{failed}");
    assert!(failed.is_full(), "{failed}");
    assert!(matches!(put(&mut writer, 0, 1, 1), Err(Error::Failed(..))));
    assert!(matches!(writer.commit(image()), Err(Error::Failed(..))));
    assert!(store.checkpoints("web").expect("ids").is_empty());
    assert_no_leftovers(&store, "web");
}

/// What a power cut may take is told by the order of operations: everything a name points to is synced before it.
#[test]
fn commits_are_in_order() {
    #[derive(Default)]
    struct Records(Mutex<Vec<(Op, String)>>);
    impl Fault for Records {
        fn before(&self, op: Op, path: &Path) -> io::Result<()> {
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            self.0.lock().expect("records").push((op, name));
            Ok(())
        }
    }
    let folder = tempfile::tempdir().expect("folder");
    let records = Arc::new(Records::default());
    let store = Store::open_faulty(folder.path(), records.clone()).expect("open");
    checkpoint(&store, "web", &memory(0, 1200, 1)).expect("checkpoint");
    let records = records.0.lock().expect("records");
    let last = |op, name: &str| {
        let found = records.iter().rposition(|(o, n)| *o == op && n == name);
        found.unwrap_or_else(|| panic!("{op:?} {name} in {records:?}"))
    };
    let first = |op, name: &str| records.iter().position(|(o, n)| *o == op && n == name);
    let written = last(Op::Truncate, "1.pages").max(last(Op::Write, ".stillpoint-1"));
    let renamed = last(Op::Rename, "1");
    // These at the same time, in any order.
    for (op, name) in [(Op::Sync, "1.pages"), (Op::SyncFolder, "segments"), (Op::Sync, ".stillpoint-1")] {
        let synced = first(op, name).is_some_and(|first| written < first) && last(op, name) < renamed;
        assert!(synced, "{op:?} {name} in {records:?}");
    }
    let order = [
        last(Op::Write, "1.pages"),
        last(Op::Truncate, "1.pages"),
        renamed,
        last(Op::SyncFolder, "checkpoints"),
    ];
    assert!(order.is_sorted(), "{order:?} in {records:?}");
    assert!(first(Op::Sync, ".stillpoint-ledger").is_none(), "it tells no more than the files do");
}

/// A real full disk, where a small one can be mounted.
#[test]
fn a_tiny_disk() {
    let folder = tempfile::tempdir().expect("folder");
    let mounted = rustix::mount::mount(
        "tmpfs",
        folder.path(),
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        Some(c"size=4m"),
    );
    if let Err(e) = mounted {
        eprintln!("skipped: a small tmpfs cannot be mounted here ({e})");
        return;
    }
    let outcome = std::panic::catch_unwind(|| {
        let store = Store::open(folder.path()).expect("open");
        checkpoint(&store, "web", &memory(0, 300, 1)).expect("it fits");
        for _ in 0..3 {
            let error = checkpoint(&store, "web", &memory(0, 3000, 2)).expect_err("it does not fit");
            assert!(error.to_string().contains("make room"), "{error}");
            assert_no_leftovers(&store, "web");
        }
        checkpoint(&store, "web", &memory(0, 400, 3)).expect("it fits");
        // Full to the last byte, room can still be made.
        let rest = std::fs::File::create(folder.path().join("rest")).expect("create");
        let _ = std::io::copy(&mut std::io::repeat(1), &mut &rest);
        let freed = store.prune("web", 1).expect("prune");
        assert_eq!(freed.checkpoints, [1]);
        assert_holds(&store, "web", 2, &memory(0, 400, 3));
        assert_no_leftovers(&store, "web");
    });
    rustix::mount::unmount(folder.path(), rustix::mount::UnmountFlags::DETACH).expect("unmount");
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}
