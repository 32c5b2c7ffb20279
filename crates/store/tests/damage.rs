//! Flipped bits, cut and swapped files: each gives an error that names it, none gives wrong pages.

use crate::common::*;
use std::path::PathBuf;
use stillpoint_image::wire::WireError;
use stillpoint_store::{Error, Store};

struct Damaged {
    folder: tempfile::TempDir,
    store: Store,
}

impl Damaged {
    /// Two checkpoints of three blocks each.
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let store = Store::open(folder.path()).expect("store");
        checkpoint(&store, "web", &memory(0, 150, 1)).expect("first");
        checkpoint(&store, "web", &memory(0, 150, 2)).expect("second");
        Damaged { folder, store }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join("jobs/web").join(name)
    }

    fn flip(&self, name: &str, bit: usize) {
        let mut bytes = std::fs::read(self.file(name)).expect("read");
        bytes[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(self.file(name), bytes).expect("write");
    }
}

#[test]
fn flipped_bits_of_a_manifest_are_named() {
    let damaged = Damaged::new();
    let bits = damaged.file("checkpoints/2").metadata().expect("manifest").len() as usize * 8;
    for bit in (0..bits).step_by(13) {
        damaged.flip("checkpoints/2", bit);
        let error = damaged.store.load("web", None).expect_err("damaged");
        assert!(matches!(error, Error::Manifest { id: 2, .. }), "bit {bit}: {error}");
        assert!(error.to_string().starts_with("checkpoint web@2: "), "{error}");
        damaged.flip("checkpoints/2", bit);
    }
    assert_holds(&damaged.store, "web", 2, &memory(0, 150, 2));
}

#[test]
fn flipped_bits_of_a_segment_are_named() {
    let damaged = Damaged::new();
    let bits = damaged.file("segments/2.pages").metadata().expect("segment").len() as usize * 8;
    for bit in (0..4096 * 8).step_by(1009) {
        damaged.flip("segments/2.pages", bit);
        let error = damaged.store.load("web", None).expect_err("damaged");
        assert!(matches!(error, Error::Segment { .. }), "bit {bit}: {error}");
        damaged.flip("segments/2.pages", bit);
    }
    for bit in (4096 * 8..bits).step_by(4096 * 8 * 7 + 11) {
        damaged.flip("segments/2.pages", bit);
        let report = damaged.store.verify("web", None).expect("report");
        let [Error::Damaged { id: 2, offset, address, pages, .. }] = &report.problems[..] else {
            panic!("bit {bit}: {:?}", report.problems);
        };
        let byte = bit as u64 / 8;
        assert!((*offset..offset + u64::from(*pages) * 4096).contains(&byte), "bit {bit}");
        assert_eq!(*address, offset - 4096);
        assert!(damaged.store.verify("web", Some(1)).expect("report").problems.is_empty());
        damaged.flip("segments/2.pages", bit);
    }
    assert_holds(&damaged.store, "web", 2, &memory(0, 150, 2));
}

#[test]
fn cut_missing_and_foreign_files_are_named() {
    let damaged = Damaged::new();
    let segment = damaged.file("segments/2.pages");
    let whole = std::fs::read(&segment).expect("read");
    for len in [whole.len() - 1, 5000, 4096, 4095, 10, 0] {
        std::fs::write(&segment, &whole[..len]).expect("cut");
        let error = damaged.store.load("web", None).expect_err("cut");
        assert!(error.to_string().contains("has been cut"), "{len}: {error}");
    }
    std::fs::copy(damaged.file("segments/1.pages"), &segment).expect("swap");
    let error = damaged.store.load("web", None).expect_err("swapped");
    assert!(error.to_string().contains("another segment"), "{error}");
    std::fs::remove_file(&segment).expect("remove");
    assert!(matches!(damaged.store.load("web", None), Err(Error::SegmentMissing { .. })));

    std::fs::copy(damaged.file("checkpoints/1"), damaged.file("checkpoints/2")).expect("swap");
    let error = damaged.store.load("web", None).expect_err("swapped");
    assert!(matches!(&error, Error::Misplaced { found, .. } if found == "web@1"), "{error}");
    std::fs::write(damaged.file("checkpoints/2"), "hello").expect("write");
    let error = damaged.store.load("web", None).expect_err("foreign");
    assert!(matches!(error, Error::Manifest { source: WireError::Foreign, .. }), "{error}");
    assert_holds(&damaged.store, "web", 1, &memory(0, 150, 1));
}

#[test]
fn a_damaged_manifest_keeps_all_segments() {
    let damaged = Damaged::new();
    checkpoint(&damaged.store, "web", &memory(0, 10, 3)).expect("third");
    let in_map = (damaged.file("checkpoints/2").metadata().expect("manifest").len() as usize - 9) * 8;
    damaged.flip("checkpoints/2", in_map);
    let freed = damaged.store.remove("web", 1).expect("remove");
    assert!(matches!(freed.unfinished, Some(Error::Manifest { id: 2, .. })), "{freed:?}");
    damaged.flip("checkpoints/2", in_map);
    assert_holds(&damaged.store, "web", 2, &memory(0, 150, 2));
    damaged.flip("checkpoints/2", in_map);
    damaged.store.remove("web", 2).expect("a damaged one can be removed");
    assert_no_leftovers(&damaged.store, "web");
    assert_holds(&damaged.store, "web", 3, &memory(0, 10, 3));
}

#[test]
fn a_damaged_ledger_loses_nothing() {
    let damaged = Damaged::new();
    damaged.flip("ledger", 100);
    let store = Store::open(damaged.folder.path()).expect("open");
    assert_eq!(checkpoint(&store, "web", &memory(0, 10, 3)).expect("third").id, 3);
    assert_holds(&store, "web", 2, &memory(0, 150, 2));
}
