//! Touch sets: what is kept comes back in its order; what is damaged, stale or of something that was removed is not there.

use crate::common::*;
use std::path::PathBuf;
use stillpoint_image::{PAGE, Range};
use stillpoint_store::{Error, Sources, Store};

fn pages(first: u64, pages: u64) -> Range {
    Range { start: first * PAGE, len: pages * PAGE }
}

struct Kept {
    folder: tempfile::TempDir,
    store: Store,
}

impl Kept {
    /// A checkpoint of pages 10 to 209, with one that follows it, and a touch set of the first.
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let store = Store::open(folder.path()).expect("store");
        checkpoint(&store, "web", &memory(10, 200, 1)).expect("first");
        checkpoint(&store, "web", &memory(10, 200, 2)).expect("second");
        let kept = Kept { folder, store };
        // Over the borders of blocks, of what there is, and where there is nothing.
        kept.keep(1, &[pages(70, 10), pages(0, 13), pages(300, 5), pages(205, 20), pages(12, 1)]);
        kept
    }

    fn keep(&self, id: u64, wanted: &[Range]) {
        let checkpoint = self.store.load("web", Some(id)).expect("load");
        self.store.keep_touch_set(&checkpoint, wanted, Sources::WRITES).expect("keep");
    }

    fn file(&self, id: u64) -> PathBuf {
        self.folder.path().join(format!("jobs/web/touch/{id}"))
    }

    /// Numbers of the pages of a touch set, if there is one whose contents are right.
    fn found(&self, id: u64, seed: u64) -> Option<Vec<u64>> {
        let checkpoint = self.store.load("web", Some(id)).expect("load");
        let touch = checkpoint.touch?;
        let (mut bytes, mut found, mut right) = (Vec::new(), Vec::new(), vec![0; PAGE_BYTES]);
        touch.read(0..touch.len(), &mut bytes).ok()?;
        assert_eq!(bytes.len() as u64, touch.bytes());
        assert_eq!(touch.sources(), Sources::WRITES);
        for run in (0..touch.len()).map(|run| touch.run(run)) {
            found.extend((run.start..run.end()).step_by(PAGE_BYTES).map(|address| address / PAGE));
        }
        for (page, bytes) in found.iter().zip(bytes.chunks_exact(PAGE_BYTES)) {
            fill_page(*page, seed, &mut right);
            assert!(bytes == right, "page {page}");
        }
        for run in 0..touch.len() {
            touch.read(run..run + 1, &mut bytes).ok()?;
            assert_eq!(bytes.len() as u64, touch.run(run).len);
        }
        Some(found)
    }
}

#[test]
fn it_comes_back_in_its_order() {
    let kept = Kept::new();
    let expected: Vec<u64> = (70..80).chain(10..13).chain(205..210).chain([12]).collect();
    assert_eq!(kept.found(1, 1), Some(expected));
    assert_eq!(kept.found(2, 2), None);
    kept.keep(1, &[pages(11, 2)]);
    assert_eq!(kept.found(1, 1), Some(vec![11, 12]));
    kept.keep(1, &[]);
    assert_eq!(kept.found(1, 1), Some(vec![]));
    assert_no_leftovers(&kept.store, "web");
}

#[test]
fn what_is_damaged_is_not_used() {
    let kept = Kept::new();
    let whole = std::fs::read(kept.file(1)).expect("read");
    for at in (0..whole.len()).step_by(37) {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        std::fs::write(kept.file(1), &bytes).expect("write");
        assert_eq!(kept.found(1, 1), None, "byte {at}");
    }
    for len in [0, 7, 39, 40, 100, whole.len() - 1] {
        std::fs::write(kept.file(1), &whole[..len]).expect("write");
        assert_eq!(kept.found(1, 1), None, "{len} bytes");
    }
    // Another checkpoint's.
    std::fs::write(kept.file(2), &whole).expect("write");
    assert_eq!(kept.found(2, 2), None);
}

#[test]
fn it_goes_with_its_checkpoint() {
    let kept = Kept::new();
    let first = kept.store.load("web", Some(1)).expect("load");
    kept.store.remove("web", 1).expect("remove");
    assert!(!kept.file(1).exists());
    let late = kept.store.keep_touch_set(&first, &[pages(10, 1)], Sources::WRITES);
    assert!(matches!(late, Err(Error::NoCheckpoint { id: 1, .. })), "{late:?}");
    assert!(!kept.file(1).exists());
}
