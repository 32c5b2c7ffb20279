//! What is put comes back, in full and incremental checkpoints.

use crate::common::*;
use std::convert::Infallible;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;
use stillpoint_image::{Owner, PAGE, Place, Range};
use stillpoint_store::{Error, PutError, Store, Writer, Zeros};

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().expect("folder");
    let store = Store::open(&folder.path().join("store")).expect("store");
    (folder, store)
}

#[test]
fn an_absent_store_is_empty() {
    let (folder, store) = store();
    assert!(store.jobs().expect("jobs").is_empty());
    assert!(matches!(store.load("web", None), Err(Error::NoJob { .. })));
    assert!(!folder.path().join("store").exists(), "reading has written");
    drop(store.begin("web").expect("writer"));
    assert!(matches!(store.load("web", None), Err(Error::NoneYet { .. })));
    assert!(matches!(store.load("web", Some(1)), Err(Error::NoCheckpoint { .. })));
}

#[test]
fn a_full_checkpoint_comes_back() {
    let (_folder, store) = store();
    // More than all buffers together, with zero pages at odd places.
    let mut full = memory(3, 9000, 7);
    full.extend((0..9000).step_by(37).map(|page| (page, 0)));
    let mut writer = store.begin("web").expect("writer");
    let range = Range { start: 0, len: 9010 * PAGE };
    let mut calls = 0;
    let fill = |address: u64, buffer: &mut [u8]| {
        calls += 1;
        assert!(buffer.as_ptr().addr().is_multiple_of(PAGE_BYTES));
        for (i, page) in buffer.chunks_exact_mut(PAGE_BYTES).enumerate() {
            let number = address / PAGE + i as u64;
            fill_page(number, full.get(&number).copied().unwrap_or(0), page);
        }
        Ok::<_, Infallible>(())
    };
    writer.put(SPACE, range, Zeros::Omit, fill).expect("put");
    assert!(calls < 80, "{calls} calls");
    let done = writer.commit(image()).expect("commit");
    let pages = full.values().filter(|seed| **seed != 0).count() as u64;
    assert_eq!((done.id, done.pages, done.stored_pages), (1, pages, pages));
    assert_eq!(done.written_bytes, pages * PAGE);
    assert_eq!(segment_bytes(&store, "web"), (1 + pages) * PAGE);
    assert_holds(&store, "web", 1, &full);
    assert_no_leftovers(&store, "web");
    let summary = store.summary("web", None).expect("summary");
    assert_eq!(
        (summary.meta.id, summary.meta.pages, summary.manifest_bytes),
        (1, pages, done.manifest_bytes)
    );
    let report = store.verify("web", None).expect("verify");
    assert_eq!((report.id, report.pages, report.problems.len()), (1, pages, 0));
}

#[test]
fn blocks_are_as_large_as_may_be() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    (0..64).for_each(|page| put(&mut writer, page, 1, 5).expect("put"));
    put(&mut writer, 64, 64, 5).expect("put");
    writer.commit(image()).expect("commit");
    let pages: Vec<u32> =
        store.load("web", None).expect("load").pages.extents.iter().map(|e| e.pages).collect();
    assert_eq!(pages, [64, 64]);
}

#[test]
fn many_ranges_at_once() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    let ranges: Vec<Range> = (0..500).map(|i| Range { start: i * 10 * PAGE, len: (i % 4) * PAGE }).collect();
    let fill = |batch: &[Range], buffer: &mut [u8]| {
        let mut rest = buffer;
        for range in batch {
            for page in (range.start / PAGE)..(range.end() / PAGE) {
                let (now, later) = rest.split_at_mut(PAGE_BYTES);
                fill_page(page, 3, now);
                rest = later;
            }
        }
        assert!(rest.is_empty());
        Ok::<_, Infallible>(())
    };
    writer.put_ranges(SPACE, &ranges, Zeros::Omit, fill).expect("put");
    writer.commit(image()).expect("commit");
    let expected = ranges.iter().flat_map(|r| r.start / PAGE..r.end() / PAGE).map(|page| (page, 3)).collect();
    assert_holds(&store, "web", 1, &expected);
}

#[test]
fn zero_pages_are_recorded_on_demand() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    let range = Range { start: PAGE, len: 600 * PAGE };
    let zeros = |_: u64, buffer: &mut [u8]| {
        buffer.fill(0);
        Ok::<_, Infallible>(())
    };
    writer.put(SPACE, range, Zeros::Record, zeros).expect("put");
    writer.put(Owner::Object(0), range, Zeros::Omit, zeros).expect("put");
    let done = writer.commit(image()).expect("commit");
    assert_eq!((done.pages, done.written_bytes), (0, 0));
    let checkpoint = store.load("web", None).expect("load");
    let [extent] = checkpoint.pages.extents[..] else { panic!("{:?}", checkpoint.pages) };
    assert_eq!((extent.owner, extent.address, extent.pages, extent.place), (SPACE, PAGE, 600, Place::Zero));
    let mut bytes = vec![1; extent.len() as usize];
    checkpoint.reader.read(&extent, &mut bytes).expect("read");
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert_no_leftovers(&store, "web"); // no segment for nothing
}

#[test]
fn later_pages_cover_earlier_ones() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    put(&mut writer, 0, 100, 1).expect("put");
    put(&mut writer, 40, 1, 2).expect("put");
    put(&mut writer, 50, 2, 0).expect("put");
    put(&mut writer, 40, 1, 3).expect("put");
    writer.commit(image()).expect("commit");
    let mut expected = memory(0, 100, 1);
    expected.insert(40, 3);
    expected.insert(50, 0);
    expected.insert(51, 0);
    assert_holds(&store, "web", 1, &expected);
}

/// Whether the one segment of a job takes room for so many pages, and for what the file system notes of it.
fn takes(store: &Store, pages: u64) -> bool {
    let taken = store.path().join("jobs/web/segments/1.pages").metadata().expect("segment").blocks() * 512;
    (pages * PAGE..(pages + 16) * PAGE).contains(&taken)
}

/// Puts pages as several threads do.
fn put_by_many(owner: Owner, writer: &mut Writer, pages: u64, seed: u64) {
    let fill = |batch: &[Range], buffer: &mut [u8]| {
        let pages = batch.iter().flat_map(|range| range.start / PAGE..range.end() / PAGE);
        pages.zip(buffer.chunks_exact_mut(PAGE_BYTES)).for_each(|(page, bytes)| fill_page(page, seed, bytes));
        Ok::<_, Infallible>(())
    };
    writer.put_parallel(owner, &[Range { start: 0, len: pages * PAGE }], Zeros::Omit, &fill).expect("put");
}

#[test]
fn what_is_forgotten_takes_no_room() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    for seed in 1..4 {
        put_by_many(SPACE, &mut writer, 3000, seed);
        put(&mut writer, 3000, 500, seed).expect("put");
        writer.forget(SPACE);
    }
    assert_eq!(writer.written_bytes(), 0);
    put_by_many(SPACE, &mut writer, 2000, 4);
    put(&mut writer, 2500, 10, 4).expect("put");
    let done = writer.commit(image()).expect("commit");
    assert_eq!((done.stored_pages, done.written_bytes), (2010, 2010 * PAGE));
    assert_eq!(segment_bytes(&store, "web"), 2011 * PAGE);
    let mut expected = memory(0, 2000, 4);
    expected.extend(memory(2500, 10, 4));
    assert_holds(&store, "web", 1, &expected);
}

#[test]
fn what_is_forgotten_between_others_takes_no_room() {
    let (_folder, store) = store();
    let object = Owner::Object(0);
    let mut writer = store.begin("web").expect("writer");
    put_by_many(SPACE, &mut writer, 3000, 1);
    put_by_many(object, &mut writer, 4000, 2);
    put_by_many(SPACE, &mut writer, 3000, 3);
    writer.forget(SPACE);
    put_by_many(SPACE, &mut writer, 1000, 4);
    let done = writer.commit(image()).expect("commit");
    assert_eq!(done.stored_pages, 5000);
    assert!(takes(&store, 5000));
    let loaded = store.load("web", None).expect("load");
    assert_eq!((loaded.image.meta.written_bytes, loaded.pages.stored_pages()), (5000 * PAGE, 5000));
    assert!(store.verify("web", None).expect("verify").problems.is_empty());
    // It is not worth another rewrite: nothing that it holds is dead.
    checkpoint(&store, "web", &memory(0, 1, 9)).expect("another");
    store.remove("web", 2).expect("removed");
    assert_eq!(names(&store.path().join("jobs/web/segments")), ["1.pages"]);
    assert!(store.verify("web", None).expect("verify").problems.is_empty());
}

#[test]
fn of_what_is_put_again_and_again_the_last_is_kept() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    put_by_many(SPACE, &mut writer, 3000, 1);
    put(&mut writer, 0, 1, 2).expect("put");
    (3..6).for_each(|seed| put_by_many(SPACE, &mut writer, 3000, seed));
    put(&mut writer, 7, 3, 6).expect("put");
    let done = writer.commit(image()).expect("commit");
    assert!(takes(&store, done.stored_pages));
    // Of blocks that are needed in part, the rest stays.
    assert!((3000 * PAGE..3100 * PAGE).contains(&done.written_bytes), "{}", done.written_bytes / PAGE);
    let mut expected = memory(0, 3000, 5);
    expected.extend(memory(7, 3, 6));
    assert_holds(&store, "web", 1, &expected);
}

#[test]
fn an_incremental_checkpoint_points_to_older_ones() {
    let (_folder, store) = store();
    checkpoint(&store, "web", &memory(0, 300, 1)).expect("full");
    let mut writer = store.begin("web").expect("writer");
    let base = store.load("web", None).expect("load").pages.extents;
    writer.reuse(&base).expect("reuse");
    put(&mut writer, 10, 5, 2).expect("put");
    let done = writer.commit(image()).expect("commit");
    assert_eq!((done.pages, done.stored_pages), (300, 5));
    let mut expected = memory(0, 300, 1);
    expected.extend(memory(10, 5, 2));
    assert_holds(&store, "web", 2, &expected);
    assert_holds(&store, "web", 1, &memory(0, 300, 1));
}

#[test]
fn pages_that_are_gone_are_not_reused() {
    let (_folder, store) = store();
    checkpoint(&store, "web", &memory(0, 3, 1)).expect("full");
    let old = store.load("web", None).expect("load");
    store.remove("web", 1).expect("remove");
    let mut writer = store.begin("web").expect("writer");
    assert!(matches!(writer.reuse(&old.pages.extents[..1]), Err(Error::Stale { .. })));
    put(&mut writer, 0, 3, 2).expect("the writer can go on");
    assert_eq!(writer.commit(image()).expect("commit").id, 2, "ids are not used again");
    let mut bytes = vec![0; old.pages.extents[0].len() as usize];
    old.reader.read(&old.pages.extents[0], &mut bytes).expect("a loaded checkpoint stays readable");
}

/// What nobody points to any more is written anew, unless somebody still reads it.
#[test]
fn one_segment_after_the_other() {
    use std::os::unix::fs::MetadataExt;
    let (_folder, store) = store();
    let segments = store.path().join("jobs/web/segments");
    let inode = |name: &str| segments.join(name).metadata().expect("segment").ino();
    checkpoint(&store, "web", &memory(0, 300, 1)).expect("first");
    let read = store.load("web", Some(1)).expect("load");
    checkpoint(&store, "web", &memory(0, 310, 2)).expect("second");
    let (first, second) = (inode("1.pages"), inode("2.pages"));
    store.roll("web", 1).expect("roll");
    assert_eq!(names(&segments), ["2.pages"], "the first one is being read");
    checkpoint(&store, "web", &memory(0, 305, 3)).expect("third");
    assert_ne!(inode("3.pages"), second);
    store.roll("web", 1).expect("roll");
    assert_eq!((inode("spare"), inode("3.pages") == first), (second, false), "it is kept");
    checkpoint(&store, "web", &memory(0, 308, 4)).expect("fourth");
    assert_eq!(inode("4.pages"), second, "it is written anew");
    assert_holds(&store, "web", 3, &memory(0, 305, 3));
    assert_holds(&store, "web", 4, &memory(0, 308, 4));
    for extent in &read.pages.extents {
        let mut bytes = vec![0; extent.len() as usize];
        read.reader.read(extent, &mut bytes).expect("a loaded checkpoint stays readable");
    }
    // What is much larger or smaller than what is written is not kept.
    store.roll("web", 1).expect("roll");
    checkpoint(&store, "web", &memory(0, 20, 5)).expect("a small one");
    assert!(inode("5.pages") > 0);
    let small = segments.join("5.pages").metadata().expect("segment").len();
    assert!(small < 30 * PAGE, "it is cut");
    store.roll("web", 1).expect("roll");
    assert_eq!(names(&segments), ["5.pages"]);
    checkpoint(&store, "web", &memory(0, 21, 6)).expect("one more");
    store.roll("web", 1).expect("roll");
    assert_eq!(names(&segments), ["6.pages", "spare"]);
    store.end_rolling("web").expect("end");
    assert_eq!(names(&segments), ["6.pages"]);
    assert_holds(&store, "web", 6, &memory(0, 21, 6));
}

/// Older checkpoints go at once, what they took later; whoever dies meanwhile leaves that to the next.
#[test]
fn room_is_owed_for_a_while() {
    let (_folder, store) = store();
    let job = store.path().join("jobs/web");
    let segments = job.join("segments");
    let add = |seed| checkpoint(&store, "web", &memory(0, 40, seed)).expect("checkpoint").id;
    let mut rolling = store.rolling("web", 2);
    assert_eq!((add(1), add(2), add(3), add(4)), (1, 2, 3, 4));
    assert_eq!(rolling.unlist().expect("unlist"), [1, 2]);
    assert_eq!(store.checkpoints("web").expect("ids"), [3, 4]);
    assert!(store.load("web", Some(2)).is_err());
    // Others see that somebody sees to it.
    drop(Store::open(store.path()).expect("open"));
    assert_eq!(names(&segments), ["1.pages", "2.pages", "3.pages", "4.pages"]);
    assert_eq!((add(5), names(&segments).len()), (5, 5));
    assert_eq!(rolling.roll().expect("roll").checkpoints, [3]);
    assert_eq!(names(&segments), ["2.spare", "3.spare", "4.pages", "5.pages", "spare"], "as many as went");
    assert!(!job.join("owes-room").exists());
    // So soon after that it is owed. What is written next is written over what was kept.
    add(6);
    assert_eq!(names(&segments), ["2.spare", "4.pages", "5.pages", "6.pages", "spare"]);
    assert_eq!(rolling.roll().expect("roll").checkpoints, [4]);
    assert!(job.join("owes-room").exists() && segments.join("4.pages").exists());
    drop(rolling);
    drop(Store::open(store.path()).expect("open"));
    assert_eq!(names(&segments), ["5.pages", "6.pages"]);
    assert_no_leftovers(&store, "web");
    // The end of a job gives all of it back.
    let mut rolling = store.rolling("web", 1);
    assert_eq!(rolling.unlist().expect("unlist"), [5]);
    store.end_rolling("web").expect("end");
    assert_eq!(names(&segments), ["6.pages"]);
    assert_no_leftovers(&store, "web");
    // Whoever owed goes on.
    add(7);
    assert_eq!(rolling.unlist().expect("unlist"), [6]);
    assert!(job.join("owes-room").exists());
    store.prune("web", 1).expect("prune");
    assert_no_leftovers(&store, "web");
    assert_holds(&store, "web", 7, &memory(0, 40, 7));
    // The newest is never just unlisted: its number would come again.
    let mut all = store.rolling("web", 0);
    assert_eq!(all.unlist().expect("unlist"), [7]);
    assert_no_leftovers(&store, "web");
    assert_eq!(add(8), 8);
}

/// Segments of which the newest checkpoint needs many are joined, also where none is removed.
#[test]
fn nobody_needs_too_many_segments() {
    for keep in [1000, usize::MAX] {
        let (_folder, store) = store();
        let mut rolling = store.rolling("web", keep);
        let mut all = Memory::new();
        for page in 0..200 {
            let mut writer = store.begin("web").expect("begin");
            if page > 0 {
                let base = store.load("web", None).expect("load").pages.extents;
                writer.reuse(&base).expect("reuse");
            }
            put(&mut writer, page, 1, page + 1).expect("put");
            all.insert(page, page + 1);
            writer.commit(image()).expect("commit");
            assert!(rolling.roll().expect("roll").checkpoints.is_empty());
        }
        std::thread::sleep(Duration::from_millis(260));
        rolling.roll().expect("roll");
        let segments = names(&store.path().join("jobs/web/segments")).len();
        assert!(segments <= 130, "{segments} segments");
        assert_eq!(store.checkpoints("web").expect("ids").len(), 200);
        assert_holds(&store, "web", 200, &all);
        assert_holds(&store, "web", 100, &all.into_iter().filter(|(page, _)| *page < 100).collect());
        assert_no_leftovers(&store, "web");
    }
}

/// Where something does not fit, all that is owed or kept is given back at once.
#[test]
fn room_is_made_at_once() {
    let (_folder, store) = store();
    let job = store.path().join("jobs/web");
    let add = |seed| checkpoint(&store, "web", &memory(0, 40, seed)).expect("checkpoint").id;
    let mut rolling = store.rolling("web", 1);
    assert_eq!((add(1), add(2), add(3)), (1, 2, 3));
    rolling.roll().expect("roll");
    assert!(job.join("segments/spare").exists());
    assert_eq!(rolling.due(), None, "nothing is owed");
    add(4);
    assert_eq!(rolling.unlist().expect("unlist"), [3]);
    assert!(rolling.due().is_some() && job.join("owes-room").exists());
    let freed = rolling.make_room().expect("room");
    assert!(freed.bytes > 40 * PAGE, "{freed:?}");
    assert_eq!(names(&job.join("segments")), ["4.pages"]);
    assert_eq!(rolling.due(), None);
    assert_no_leftovers(&store, "web");
}

/// What keeps room from being given back is told for as long as it does.
#[test]
fn what_holds_room_up_is_told() {
    let (_folder, store) = store();
    let add = |seed| checkpoint(&store, "web", &memory(0, 40, seed)).expect("checkpoint").id;
    let mut rolling = store.rolling("web", 2);
    assert_eq!((add(1), add(2), add(3)), (1, 2, 3));
    let path = store.path().join("jobs/web/checkpoints/2");
    let manifest = std::fs::read(&path).expect("manifest");
    std::fs::write(&path, &manifest[..manifest.len() / 2]).expect("damage");
    assert!(rolling.roll().expect("roll").unfinished.is_some());
    add(4);
    let freed = rolling.roll().expect("roll");
    assert_eq!((freed.checkpoints, freed.unfinished.is_none()), (vec![2], true), "not tried again so soon");
    assert!(rolling.held_up().is_some_and(|why| why.contains("web@2")), "{:?}", rolling.held_up());
    rolling.give_back().expect("the damaged one is gone");
    assert_eq!((rolling.held_up(), rolling.due()), (None, None));
    assert_holds(&store, "web", 4, &memory(0, 40, 4));
}

#[test]
fn a_failing_fill_leaves_the_writer_usable() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    put(&mut writer, 0, 5, 1).expect("put");
    let range = Range { start: 100 * PAGE, len: 4 * PAGE };
    let failed = writer.put(SPACE, range, Zeros::Omit, |_, buffer| {
        buffer.fill(9);
        Err("gone")
    });
    assert!(matches!(failed, Err(PutError::Fill("gone"))));
    put(&mut writer, 5, 5, 1).expect("put");
    writer.commit(image()).expect("commit");
    assert_holds(&store, "web", 1, &memory(0, 10, 1));
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let (_folder, store) = store();
    checkpoint(&store, "web", &memory(0, 3, 1)).expect("full");
    let mut writer = store.begin("web").expect("writer");
    put(&mut writer, 0, 5000, 1).expect("put");
    drop(writer);
    assert_eq!(store.checkpoints("web").expect("ids"), [1]);
    assert_no_leftovers(&store, "web");
    assert_eq!(checkpoint(&store, "web", &memory(0, 3, 1)).expect("next").id, 2);
}

#[test]
fn inconsistent_images_are_not_committed() {
    let (_folder, store) = store();
    let mut writer = store.begin("web").expect("writer");
    put(&mut writer, 0, 1, 1).expect("put");
    let mut wrong = image();
    wrong.spaces.clear();
    assert!(matches!(writer.commit(wrong), Err(Error::Image(_))));
    assert!(store.checkpoints("web").expect("ids").is_empty());
    assert_no_leftovers(&store, "web");
}

/// The newest one needs none of it.
#[test]
fn nothing_is_kept_for_who_writes_nothing() {
    let (_folder, store) = store();
    let segments = store.path().join("jobs/web/segments");
    checkpoint(&store, "web", &memory(0, 64, 1)).expect("first");
    checkpoint(&store, "web", &Memory::new()).expect("an empty one");
    store.roll("web", 1).expect("roll");
    assert!(names(&segments).is_empty());
    for pages in [64, 60, 62, 4] {
        checkpoint(&store, "web", &memory(0, pages, 2)).expect("more");
        store.roll("web", 2).expect("roll");
    }
    assert_eq!(names(&segments).len(), 2, "and what is too large goes");
}
