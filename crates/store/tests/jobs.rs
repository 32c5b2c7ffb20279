//! Names, locks, tails, and the record of who runs.

use crate::common::*;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;
use stillpoint_store::{Error, Pace, Paged, Paging, Running, Store, Terms, Trouble, check_name};

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().expect("folder");
    let mut store = Store::open(folder.path()).expect("store");
    store.set_patience(Duration::from_millis(20));
    (folder, store)
}

#[test]
fn names_are_checked() {
    let long = "x".repeat(129);
    for wrong in ["", ".", "..", ".a", "-a", "a/b", "a@1", "a b", "a\n", "a\u{7f}", long.as_str()] {
        let error = check_name(wrong).expect_err(wrong);
        assert!(error.is_usage());
    }
    for right in ["a", "web-1", "Größe", "a.b", "x_y", &long[1..]] {
        check_name(right).expect(right);
    }
    let (_folder, store) = store();
    assert!(matches!(store.begin("../x"), Err(Error::Name { .. })));
    assert!(matches!(store.load("../x", None), Err(Error::Name { .. })));
}

#[test]
fn one_writer_at_a_time() {
    let (_folder, store) = store();
    checkpoint(&store, "web", &memory(0, 3, 1)).expect("first");
    let mut writer = store.begin("web").expect("writer");
    put(&mut writer, 0, 3, 2).expect("put");
    assert!(matches!(store.begin("web"), Err(Error::Busy { .. })));
    assert!(matches!(store.remove("web", 1), Err(Error::Busy { .. })));
    assert!(matches!(store.prune("web", 0), Err(Error::Busy { .. })));
    assert!(matches!(store.remove_job("web"), Err(Error::Busy { .. })));
    Store::open(store.path()).expect("open cleans up, but not behind the living");
    assert_holds(&store, "web", 1, &memory(0, 3, 1));
    store.begin("other").expect("another job is another matter");
    writer.commit(image()).expect("commit");
    assert_holds(&store, "web", 2, &memory(0, 3, 2));
}

#[test]
fn names_are_claimed_once() {
    let (_folder, store) = store();
    let claim = store.claim("web").expect("claim");
    assert!(matches!(store.claim("web"), Err(Error::NameTaken { .. })));
    assert!(matches!(store.remove_job("web"), Err(Error::NameTaken { .. })));
    assert_eq!(store.claim_new("web").expect("next").job(), "web-2");
    drop(claim);
    let claim = store.claim_new("web").expect("free again, and never used");
    assert_eq!(claim.job(), "web");
    checkpoint(&store, "web", &memory(0, 3, 1)).expect("checkpoint");
    drop(claim);
    assert_eq!(store.claim_new("web").expect("used").job(), "web-2");
    assert_eq!(store.claim("web").expect("known").job(), "web");
}

#[test]
fn who_runs_is_remembered() {
    let (_folder, store) = store();
    assert!(matches!(store.running("web"), Err(Error::NoJob { .. })));
    let running = Running {
        pid: 4711,
        start_time: 99,
        boot_id: "b-o-o-t".into(),
        supervisor_pid: 4710,
        command: vec![b"./prog".to_vec().into(), b"a b\n\xff%".to_vec().into(), b"".to_vec().into()],
        ..Running::default()
    };
    store.set_running("web", &running).expect("set");
    assert_eq!(store.running("web").expect("get"), Some(running.clone()));
    let next = Running {
        restored_from: Some(3),
        adopted: true,
        every_ns: Some(10_000_000_000),
        keep: Some(5),
        inherited: vec![(7, b"pipe:[12]".to_vec().into())],
        crashes: 2,
        crash: Some((5, "SIGSEGV".into())),
        ..running
    };
    store.set_running("web", &next).expect("set");
    assert_eq!(store.running("web").expect("get"), Some(next));
    store.clear_running("web").expect("clear");
    assert_eq!(store.running("web").expect("get"), None);
    store.clear_running("web").expect("twice");
    std::fs::write(store.path().join("jobs/web/running"), "pid 1\n").expect("write");
    assert!(matches!(store.running("web"), Err(Error::Record { .. })));
}

#[test]
fn trouble_is_remembered_until_it_is_over() {
    let (_folder, store) = store();
    assert!(matches!(store.trouble("web"), Err(Error::NoJob { .. })));
    let _claim = store.claim("web").expect("new");
    assert_eq!(store.trouble("web").expect("none"), Trouble::default());
    let trouble =
        Trouble { failing: Some((17, "no room\nat all".into())), slow: Some("slow".into()), paging: None };
    store.set_trouble("web", &trouble).expect("set");
    assert_eq!(store.trouble("web").expect("get"), trouble);
    let half = Trouble { failing: None, ..trouble };
    store.set_trouble("web", &half).expect("set");
    assert_eq!(store.trouble("web").expect("get"), half);
    store.set_trouble("web", &Trouble::default()).expect("over");
    assert_eq!(store.trouble("web").expect("none"), Trouble::default());
    assert!(!store.control("web").expect("path").exists());
}

#[test]
fn what_paging_came_to_is_remembered() {
    let (_folder, store) = store();
    assert!(matches!(store.set_paging("web", &Paging::default()), Err(Error::NoJob { .. })));
    let _claim = store.claim("web").expect("new");
    assert_eq!(store.paging("web").expect("none"), None);
    let paged = Paged { out: 7, written: 5, back: 3, stops: 2, stopped_ns: 11, waited_ns: 13 };
    let well = Paging { limit: Some(1 << 30), paged, out_rate: 17, in_rate: 19, trouble: None };
    store.set_paging("web", &well).expect("set");
    assert_eq!(store.paging("web").expect("get"), Some(well.clone()));
    assert_eq!(store.trouble("web").expect("get"), Trouble::default());
    let badly = Paging { trouble: Some("no room\nat all".into()), ..well };
    store.set_paging("web", &badly).expect("set");
    assert_eq!(store.paging("web").expect("get").as_ref(), Some(&badly));
    assert_eq!(store.trouble("web").expect("get").paging, badly.trouble);
    store.clear_paging("web").expect("clear");
    store.clear_paging("web").expect("twice");
    assert_eq!(store.paging("web").expect("none"), None);
    // Records of an earlier version tell what is wrong, and nothing else.
    let record = |what: &str| {
        let text = format!("stillpoint paging 1\nwhat {what}\n");
        std::fs::write(store.path().join("jobs/web/paging"), sealed(&text)).expect("write");
        store.paging("web").expect("get")
    };
    assert_eq!(record(""), Some(Paging::default()));
    assert_eq!(record("full"), Some(Paging { trouble: Some("full".into()), ..Paging::default() }));
}

#[test]
fn a_pace_of_an_earlier_version_is_read() {
    let (_folder, store) = store();
    let _claim = store.claim("web").expect("new");
    let numbers = ["interval", "pause", "faults", "delay", "waits", "write", "mtbf", "observed"];
    let keys = numbers.iter().zip(1..).map(|(key, n)| format!("{key}-ns {n}\n"));
    let text = format!("stillpoint pace 1\n{}bounded 0\ngiven 1\nfailures 9\n", keys.collect::<String>());
    let read = |text: &str| {
        std::fs::write(store.path().join("jobs/web/pace"), sealed(text)).expect("write");
        store.pace("web").expect("get").expect("a pace")
    };
    let pace = read(&text);
    assert_eq!((pace.waits_ns, pace.cost_ns(), pace.failures), (5, 2 + 3 + 4 + 5, 9));
    assert_eq!(read(&text.replace("waits-ns 5\n", "")), Pace { waits_ns: 0, ..pace });
    store.set_pace("web", Some(&pace)).expect("set");
    assert_eq!(store.pace("web").expect("get"), Some(pace));
}

/// A record with its checksum.
fn sealed(text: &str) -> String {
    format!("{text}crc {:08x}\n", crc32fast::hash(text.as_bytes()))
}

#[test]
fn tails_stay_with_the_job() {
    let (_folder, store) = store();
    checkpoint(&store, "web", &memory(0, 3, 1)).expect("first");
    let tail: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
    let file = Path::new("/var/log/a b.log");
    let kept = store.keep_tail("web", 1, file, 4096, &mut tail.as_slice()).expect("kept");
    assert_eq!(std::fs::read(&kept).expect("read"), tail);
    store.keep_tail("web", 1, file, 5, &mut &b"second"[..]).expect("kept");
    store.remove("web", 1).expect("remove");
    std::fs::write(store.path().join("jobs/web/tails/3.data"), "never cut").expect("write");
    let store = Store::open(store.path()).expect("open");
    let tails = store.tails("web").expect("tails");
    assert_eq!(tails.len(), 2);
    assert_eq!((&tails[0].data, tails[0].offset, tails[0].length), (&kept, 4096, 3_000_000));
    assert_eq!((tails[0].file.as_path(), tails[0].crc), (file, crc32fast::hash(&tail)));
    assert_eq!((tails[1].checkpoint, tails[1].length), (1, 6));
    assert!(!store.path().join("jobs/web/tails/3.data").exists());
    store.remove_job("web").expect("remove all");
    assert!(store.jobs().expect("jobs").is_empty());
    assert!(names(&store.path().join("jobs")).is_empty());
}

#[test]
fn an_unreadable_tail_is_not_kept() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("broken"))
        }
    }
    let (_folder, store) = store();
    let error = store.keep_tail("web", 1, Path::new("/log"), 0, &mut Broken).expect_err("broken");
    assert_eq!(error.to_string(), "read /log: broken");
    assert!(store.tails("web").expect("tails").is_empty());
    assert_eq!(names(&store.path().join("jobs/web/tails")), ["lock"]);
}

#[test]
fn files_are_private() {
    let (_folder, store) = store();
    checkpoint(&store, "web", &memory(0, 3, 1)).expect("first");
    for name in ["segments/1.pages", "checkpoints/1", "ledger"] {
        let mode = store.path().join("jobs/web").join(name).metadata().expect(name).permissions().mode();
        assert_eq!(mode & 0o77, 0, "{name} holds a program's memory");
    }
}

#[test]
fn other_peoples_files_are_left_alone() {
    let (_folder, store) = store();
    let files = ["jobs/.git/config", "jobs/x/.env", "jobs/x/tails/1.data", "jobs/x/checkpoints/.keep"];
    for file in files {
        let path = store.path().join(file);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, "mine").expect("write");
    }
    let store = Store::open(store.path()).expect("open");
    checkpoint(&store, "x", &memory(0, 3, 1)).expect("checkpoint");
    store.prune("x", 0).expect("prune");
    Store::open(store.path()).expect("open");
    for file in files {
        assert!(store.path().join(file).exists(), "{file}");
    }
}

#[test]
fn terms_of_a_job_that_was_ended_do_not_come_back() {
    let (_folder, store) = store();
    let terms = |since_ns| Terms { since_ns, restart: Some(3), ..Terms::default() };
    store.set_terms("job", &terms(1)).expect("set");
    assert_eq!(store.terms("job").expect("there"), Some(terms(1)));
    store.settle_terms("job").expect("settled");
    store.set_terms("job", &terms(2)).expect("set in place of others");
    assert_eq!(store.terms("job").expect("there"), Some(terms(2)));
    // Somebody ends it in the moment after it began.
    store.clear_terms("job").expect("ended");
    store.settle_terms("job").expect("nothing to be settled");
    assert_eq!(store.terms("job").expect("none"), None);
}
