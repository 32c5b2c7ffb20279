//! Any sequence of checkpoints and removals, against a model that keeps whole memories.

use crate::common::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use stillpoint_image::{Owner, PAGE, Range};
use stillpoint_store::Store;

/// Pages of the model's memory.
const PAGES: u64 = 300;
/// Whose pages are somebody else's in the end.
const ASIDE: Owner = Owner::Object(u32::MAX);

#[derive(Clone, Debug)]
enum Change {
    /// A run of pages gets new contents (or zeros, for seed 0).
    Put { first: u64, pages: u64, seed: u64 },
    /// A run of pages is put for an owner that is nobody in the end, or another one.
    Aside { first: u64, pages: u64, seed: u64 },
    /// What was done so far is worked out ahead.
    Settle,
}

/// Runs of pages, in ascending order and apart: first page and length.
type Kept = Vec<(u64, u64)>;

#[derive(Clone, Debug)]
enum Action {
    /// A checkpoint from nothing, or on top of the newest.
    Checkpoint {
        incremental: bool,
        changes: Vec<Change>,
        /// In the end, only these pages are part of it.
        kept: Option<Kept>,
        commits: bool,
    },
    Remove(prop::sample::Index),
    /// So many are kept; whether one goes on writing.
    Prune(usize, bool),
    Reopen,
}

fn change() -> impl Strategy<Value = Change> {
    let run = (0..PAGES, 1_u64..100);
    prop_oneof![
        4 => (run.clone(), 0_u64..50).prop_map(|((first, pages), seed)| Change::Put { first, pages, seed }),
        1 => (run, 0_u64..50).prop_map(|((first, pages), seed)| Change::Aside { first, pages, seed }),
        1 => Just(Change::Settle),
    ]
}

fn kept() -> impl Strategy<Value = Kept> {
    prop::collection::vec((1_u64..40, 1_u64..60), 0..6).prop_map(|gaps| {
        let mut next = 0;
        gaps.into_iter()
            .map(|(gap, pages)| {
                let first = next + gap;
                next = first + pages;
                (first, pages)
            })
            .collect()
    })
}

fn action() -> impl Strategy<Value = Action> {
    let changes = prop::collection::vec(change(), 0..12);
    prop_oneof![
        6 => (prop::bool::weighted(0.8), changes, prop::option::weighted(0.3, kept()), prop::bool::weighted(0.9))
            .prop_map(|(incremental, changes, kept, commits)| {
                Action::Checkpoint { incremental, changes, kept, commits }
            }),
        1 => any::<prop::sample::Index>().prop_map(Action::Remove),
        2 => (1_usize..4, any::<bool>()).prop_map(|(keep, rolls)| Action::Prune(keep, rolls)),
        1 => Just(Action::Reopen),
    ]
}

/// The checkpoints there should be.
#[derive(Default)]
struct Model {
    checkpoints: BTreeMap<u64, Memory>,
    last: u64,
}

impl Model {
    fn checkpoint(
        &mut self,
        store: &Store,
        incremental: bool,
        changes: &[Change],
        kept: Option<&Kept>,
        commits: bool,
    ) {
        let mut writer = store.begin("job").expect("begin");
        let mut memory = Memory::new();
        if incremental && let Some((id, newest)) = self.checkpoints.last_key_value() {
            memory = newest.clone();
            let pages = store.load("job", Some(*id)).expect("load").pages;
            writer.reuse(&pages.extents).expect("reuse");
        }
        let mut aside = Memory::new();
        for change in changes {
            match *change {
                Change::Put { first, pages, seed } => {
                    put(&mut writer, first, pages, seed).expect("put");
                    memory.extend((first..first + pages).map(|page| (page, seed)));
                }
                Change::Settle => writer.settle().expect("settle"),
                Change::Aside { first, pages, seed } => {
                    put_for(ASIDE, &mut writer, first, pages, seed).expect("put");
                    aside.extend((first..first + pages).map(|page| (page, seed)));
                }
            }
        }
        // What was put aside takes the place of all else, or is forgotten.
        match kept.is_some() && !aside.is_empty() {
            true => {
                writer.give(ASIDE, SPACE);
                memory = aside;
            }
            false => writer.keep_only(ASIDE, Vec::new()),
        }
        if let Some(kept) = kept {
            let ranges = kept.iter().map(|&(first, pages)| Range { start: first * PAGE, len: pages * PAGE });
            writer.keep_only(SPACE, ranges.collect());
            memory.retain(|page, _| kept.iter().any(|&(first, pages)| (first..first + pages).contains(page)));
        }
        if commits {
            let done = writer.commit(image()).expect("commit");
            assert!(done.id > self.last, "ids are never used again");
            self.last = done.id;
            self.checkpoints.insert(done.id, memory);
        }
    }

    /// Bytes that the checkpoints need at most: all pages that differ between any two of them.
    fn needed(&self) -> u64 {
        let mut pages: Vec<(u64, u64)> =
            self.checkpoints.values().flatten().map(|(p, s)| (*p, *s)).filter(|(_, s)| *s != 0).collect();
        pages.sort_unstable();
        pages.len() as u64 * PAGE
    }

    fn check(&self, store: &Store) {
        let ids: Vec<u64> = self.checkpoints.keys().copied().collect();
        assert_eq!(store.checkpoints("job").unwrap_or_default(), ids);
        for (id, memory) in &self.checkpoints {
            assert_holds(store, "job", *id, memory);
        }
        assert_no_leftovers(store, "job");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence(actions in prop::collection::vec(action(), 1..24)) {
        let shm = std::path::Path::new("/dev/shm"); // much faster, where there is one
        let folder = tempfile::tempdir_in(shm).or_else(|_| tempfile::tempdir()).expect("folder");
        let mut store = Store::open(folder.path()).expect("open");
        let mut model = Model::default();
        for action in actions {
            match action {
                Action::Checkpoint { incremental, changes, kept, commits } => {
                    model.checkpoint(&store, incremental, &changes, kept.as_ref(), commits);
                }
                Action::Remove(which) if !model.checkpoints.is_empty() => {
                    let id = *model.checkpoints.keys().nth(which.index(model.checkpoints.len())).expect("one");
                    model.checkpoints.remove(&id);
                    store.remove("job", id).expect("remove");
                }
                Action::Prune(keep, rolls) if !model.checkpoints.is_empty() => {
                    while model.checkpoints.len() > keep {
                        model.checkpoints.pop_first();
                    }
                    let freed = if rolls { store.roll("job", keep) } else { store.prune("job", keep) };
                    let freed = freed.expect("prune");
                    assert!(freed.unfinished.is_none());
                    let headers = 64 * PAGE;
                    // The spare, and what was written into a former one.
                    let bound = model.needed() * if rolls { 7 } else { 3 } + headers;
                    assert!(segment_bytes(&store, "job") <= bound, "the store is bounded");
                }
                Action::Reopen => store = Store::open(folder.path()).expect("open"),
                Action::Remove(_) | Action::Prune(..) => {}
            }
            model.check(&store);
        }
    }
}

/// More segments than a reader wants to hold open are joined.
#[test]
fn many_small_checkpoints() {
    let shm = std::path::Path::new("/dev/shm");
    let folder = tempfile::tempdir_in(shm).or_else(|_| tempfile::tempdir()).expect("folder");
    let store = Store::open(folder.path()).expect("open");
    let mut model = Model::default();
    for i in 0..200 {
        let changes = [Change::Put { first: i, pages: 1, seed: i + 1 }];
        model.checkpoint(&store, true, &changes, None, true);
    }
    let (last, newest) = model.checkpoints.pop_last().expect("newest");
    model.checkpoints = [(last, newest)].into();
    store.prune("job", 1).expect("prune");
    model.check(&store);
    let segments = names(&folder.path().join("jobs/job/segments")).len();
    assert!(segments <= 128, "{segments} segments");
}
