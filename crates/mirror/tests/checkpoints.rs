//! Checkpoints are taken, recovered and compared with what they must hold.
#![allow(unsafe_code)]

use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use stillpoint_mirror::{
    Checkpoint, Error, Mirror, Options, PageSize, Phase, Place, Switch, compare_exchange, fetch_update,
    replace, store,
};

/// There is one mirror in a process.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|e| e.into_inner())
}

fn file(size: usize) -> (tempfile::TempDir, Options) {
    let directory = tempfile::tempdir().expect("a directory");
    let place = Place::File(directory.path().join("backing"));
    (directory, Options { size, place, ..Options::default() })
}

#[test]
fn pointers_stay_valid_over_a_recovery() {
    let _alone = alone();
    let (_directory, options) = file(1 << 20);
    // SAFETY: blocks of the region's allocator.
    unsafe {
        let mirror = Mirror::create(&options).expect("create");
        let mut list = 0usize;
        for i in 0..1000u64 {
            list = mirror.put((list, i)).expect("room") as usize;
        }
        mirror.heap().set_root(list);
        mirror.checkpoint_now().expect("a checkpoint");
        // Not part of it.
        store((list + 8) as *mut u64, 77);
        drop(mirror);
        let mirror = Mirror::recover(&options).expect("recover");
        assert_eq!(mirror.recovered(), Some(1));
        let mut at = mirror.heap().root();
        for i in (0..1000u64).rev() {
            let (next, value) = *(at as *const (usize, u64));
            assert_eq!(value, i);
            at = next;
        }
        assert_eq!(at, 0);
        // The allocator goes on where it was.
        let fresh = mirror.put(5u64).expect("room") as usize;
        let mut at = mirror.heap().root();
        while at != 0 {
            assert!(fresh + 8 <= at || fresh >= at + 16, "a block was given away twice");
            at = *(at as *const usize);
        }
    }
}

#[test]
fn bad_input_gets_a_clear_error() {
    let _alone = alone();
    let (directory, options) = file(1 << 20);
    let error = |options: &Options| Mirror::open(options).err().expect("an error").to_string();
    let small = Options { size: 4096, ..options.clone() };
    assert!(error(&small).contains("too small"));
    assert!(matches!(Mirror::recover(&options), Err(Error::Missing(_))));
    let mirror = Mirror::create(&options).expect("create");
    assert!(matches!(Mirror::create(&options), Err(Error::AlreadyOpen)));
    drop(mirror);
    assert!(matches!(Mirror::create(&options), Err(Error::Exists(_))));
    assert!(matches!(Mirror::recover(&options), Err(Error::NoCheckpoint(_))));
    let larger = Options { size: 2 << 20, ..options.clone() };
    assert!(error(&larger).contains("made for another layout"), "{}", error(&larger));
    let elsewhere = Options { base: 0x1234_0000_0000, ..options.clone() };
    assert!(error(&elsewhere).contains("made for another layout"));
    let other = directory.path().join("other");
    std::fs::write(&other, vec![7; 10_000]).expect("write");
    let wrong = Options { place: Place::File(other), ..options.clone() };
    assert!(error(&wrong).contains("not a backing file"));
    let nowhere = Options { place: Place::File("/no/such/place".into()), ..options };
    assert!(error(&nowhere).contains("/no/such/place"));
    // After all of these a mirror can still be made.
    let store = Place::Store { directory: directory.path().into(), name: "a".into() };
    drop(Mirror::create(&Options { place: store, ..Options::default() }).expect("create"));
    assert!(directory.path().join("mirrors/a").exists());
}

#[test]
fn huge_pages_or_a_note() {
    let _alone = alone();
    let mirror =
        Mirror::create(&Options { page_size: PageSize::Huge, ..Options::default() }).expect("create");
    let free = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    if free.trim() == "0" {
        assert!(
            mirror.notes().iter().any(|n| n.contains("no huge pages from the pool")),
            "{:?}",
            mirror.notes()
        );
    }
    mirror.checkpoint_now().expect("a cycle");
}

/// Every byte of a file that matters is covered: one flipped bit is named, or the other image is taken, never wrong data.
#[test]
fn a_flipped_bit_is_never_recovered() {
    let _alone = alone();
    let (directory, options) = file(256 << 10);
    let path = directory.path().join("backing");
    let mirror = Mirror::create(&options).expect("create");
    let value = mirror.put(1u64).expect("room");
    mirror.heap().set_root(value as usize);
    mirror.checkpoint_now().expect("first");
    // SAFETY: our block.
    unsafe { store(value, 2) };
    mirror.checkpoint_now().expect("second");
    drop(mirror);
    let whole = std::fs::read(&path).expect("read");
    let mut outcomes = [0, 0];
    for position in (0..whole.len()).step_by(509) {
        let mut bytes = whole.clone();
        bytes[position] ^= 1 << (position % 8);
        std::fs::write(&path, &bytes).expect("write");
        match Mirror::recover(&options) {
            Ok(mirror) => {
                // SAFETY: recovered.
                let value = unsafe { *(mirror.heap().root() as *const u64) };
                assert_eq!(Some(value), mirror.recovered(), "byte {position}");
                outcomes[0] += 1;
            }
            Err(Error::Damaged { .. } | Error::NotABacking { .. } | Error::OtherLayout { .. }) => {
                outcomes[1] += 1
            }
            Err(other) => panic!("byte {position}: {other}"),
        }
    }
    assert!(outcomes.iter().all(|n| *n > 10), "{outcomes:?}");
}

/// Whatever was written last, a cut in the middle of the next checkpoint's writes leaves the one before.
#[test]
fn a_torn_checkpoint_leaves_the_last_one() {
    let _alone = alone();
    let (directory, options) = file(256 << 10);
    let path = directory.path().join("backing");
    let mirror = Mirror::create(&options).expect("create");
    let block = mirror.heap().alloc(64 << 10, 16).expect("room");
    mirror.heap().set_root(block);
    let fill = |value: u8| {
        // SAFETY: our block.
        unsafe { stillpoint_mirror::fill(block as *mut u8, value, 64 << 10) };
        mirror.checkpoint_now().expect("a checkpoint");
        std::fs::read(&path).expect("read")
    };
    let (before, after) = { (fill(1), fill(2)) };
    let third = fill(3);
    drop(mirror);
    let check = |bytes: &[u8], least: u8| {
        std::fs::write(&path, bytes).expect("write");
        let mirror = Mirror::recover(&options).expect("recover");
        let sequence = mirror.recovered().expect("a checkpoint") as u8;
        assert!(sequence >= least);
        // SAFETY: recovered.
        let block = unsafe { std::slice::from_raw_parts(mirror.heap().root() as *const u8, 64 << 10) };
        assert!(block.iter().all(|b| *b == sequence), "checkpoint {sequence} is not whole");
    };
    // Any part of the blocks of checkpoint 3 has reached the medium, but not its record.
    let mut seed = 1u64;
    for _ in 0..40 {
        let mut torn = after.clone();
        for block in (0..torn.len()).step_by(512) {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11);
            let record = (4096..3 * 4096).contains(&block);
            if seed >> 63 == 1 && !record {
                torn[block..block + 512].copy_from_slice(&third[block..block + 512]);
            }
        }
        check(&torn, 2);
    }
    check(&before, 1);
    check(&third, 3);
}

#[test]
fn only_what_changed_is_written() {
    let _alone = alone();
    let (_directory, options) = file(16 << 20);
    let mirror = Mirror::create(&options).expect("create");
    let block = mirror.heap().alloc(8 << 20, 16).expect("room");
    let full = mirror.checkpoint_now().expect("first");
    assert!(full >= 16 << 20);
    mirror.checkpoint_now().expect("second image");
    assert!(mirror.checkpoint_now().expect("nothing changed") <= 8192);
    // SAFETY: our block.
    unsafe { store((block + (5 << 20)) as *mut u64, 1) };
    // A page, a block of the table, the record; and the same for the other image.
    assert!(mirror.checkpoint_now().expect("one page") <= 3 * 4096);
    assert!(mirror.checkpoint_now().expect("the other image") <= 3 * 4096);
    assert!(mirror.checkpoint_now().expect("nothing changed") <= 4096);
}

/// Writers of several kinds, all at once, while checkpoints follow each other; each is read back and checked.
///
/// * plain data behind a lock: words that are all equal, or follow each other while the lock is held
/// * data published by an atomic word: what it says is there is there
/// * atomic words that are changed one after the other: a later change is never there without the earlier one
/// * words that atomic instructions and plain stores change in turn, handed over by the lock
/// * a thread's own stores over pages: no later one without the earlier ones
#[test]
fn a_cut_is_one_instant_for_all_threads() {
    let _alone = alone();
    torture(Duration::from_secs(5), Switch::Offset);
}

/// One thread stores, and remapping goes on beside it.
#[test]
fn remapping_is_an_instant_for_one_thread() {
    let _alone = alone();
    let (_directory, mut options) = file(2 << 20);
    options.switch = Switch::Remap;
    let mirror = Mirror::create(&options).expect("create");
    let board = Board::new(&mirror);
    // SAFETY: the board's words.
    unsafe {
        let mut n = 0;
        let mut cuts = 0;
        while cuts < 30 {
            board.own(n);
            n += 1;
            match mirror.checkpoint() {
                Ok(_) => cuts += 1,
                Err(Error::InProgress) => (),
                Err(other) => panic!("{other}"),
            }
        }
        drop(mirror);
        let mirror = Mirror::recover(&options).expect("recover");
        board.check(&|at, len| std::slice::from_raw_parts(at as *const u8, len).to_vec());
        assert!(mirror.recovered().is_some_and(|s| s > 10));
    }
}

#[derive(Clone, Copy)]
struct Board {
    lock: *mut u64,
    pair: [*mut u64; 3],
    ring: *mut u64,
    head: *mut u64,
    chain: [*mut u64; 2],
    /// Two halves of one word: plain and atomic.
    halves: *mut u32,
    mixed: [*mut u64; 2],
    pages: *mut u64,
}
// SAFETY: addresses.
unsafe impl Send for Board {}
// SAFETY: addresses.
unsafe impl Sync for Board {}

const RING: u64 = 1024;
const PAGES: u64 = 64;

impl Board {
    fn new(mirror: &Mirror) -> Self {
        let words = |n: usize| mirror.heap().alloc(8 * n, 4096).expect("room") as *mut u64;
        Board {
            lock: words(1),
            pair: [words(1), words(1), words(1)],
            ring: words(RING as usize),
            head: words(1),
            chain: [words(1), words(1)],
            halves: words(1).cast(),
            mixed: [words(1), words(1)],
            pages: words(PAGES as usize * 512),
        }
    }

    /// A producer: fills the ring, then says how far; its pages in order; half of a word.
    ///
    /// # Safety
    /// One thread.
    unsafe fn own(&self, n: u64) {
        // SAFETY: words of the board.
        unsafe {
            store(self.ring.add((n % RING) as usize), n + 1);
            replace(self.head, n + 1);
            store(self.pages.add((n % PAGES) as usize * 512), n + 1);
            store(self.halves.add(1), n as u32);
        }
    }

    /// # Safety
    /// Any number of threads.
    unsafe fn with_lock(&self, plain: bool) {
        // SAFETY: a lock, and what it guards.
        unsafe {
            while compare_exchange(self.lock, 0, 1).is_err() {
                std::thread::yield_now();
            }
            self.pair.iter().for_each(|word| store(*word, **word + 1));
            for word in self.mixed {
                match plain {
                    true => store(word, *word + 1),
                    false => drop(fetch_update(word, |n| n + 1)),
                }
            }
            replace(self.lock, 0);
        }
    }

    /// # Safety
    /// Any number of threads.
    unsafe fn chain(&self) {
        // SAFETY: words of the board.
        unsafe {
            fetch_update(self.chain[0], |n| n + 1);
            fetch_update(self.chain[1], |n| n + 1);
            fetch_update(self.halves, |n| n.wrapping_add(1));
        }
    }

    fn check(&self, bytes: &dyn Fn(usize, usize) -> Vec<u8>) {
        let word = |at: *mut u64| u64::from_le_bytes(bytes(at as usize, 8).try_into().expect("eight"));
        for words in [&self.pair[..], &self.mixed[..]] {
            let values: Vec<u64> = words.iter().map(|w| word(*w)).collect();
            let falling = values.windows(2).all(|w| w[0] >= w[1]);
            let one = values[0] - values[values.len() - 1] <= word(self.lock);
            assert!(falling && one, "under the lock ({}): {values:?}", word(self.lock));
        }
        let head = word(self.head);
        for n in head.saturating_sub(RING - 1)..head {
            let value = word(self.ring.wrapping_add((n % RING) as usize));
            assert!(value == n + 1 || value == n + 1 + RING, "head is {head}, but entry {n} holds {value}");
        }
        let chain = self.chain.map(word);
        assert!(chain[0] >= chain[1], "{chain:?}");
        assert!(chain[0] - chain[1] <= THREADS, "{chain:?}");
        let pages: Vec<u64> = (0..PAGES).map(|p| word(self.pages.wrapping_add(p as usize * 512))).collect();
        let (first, last) =
            (pages.iter().min().copied().unwrap_or(0), pages.iter().max().copied().unwrap_or(0));
        assert!(
            last - first <= PAGES && (last == head || last + 1 == head),
            "{first} to {last}, head is {head}"
        );
    }
}

const THREADS: u64 = 3;

fn torture(time: Duration, switch: Switch) {
    let (directory, mut options) = file(1 << 20);
    options.switch = switch;
    options.nice = 0; // more cuts
    let mirror = Mirror::create(&options).expect("create");
    let board = Board::new(&mirror);
    let path = directory.path().join("backing");
    let (checked, wrong) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(None)));
    let (count, first) = (checked.clone(), wrong.clone());
    mirror.on_complete(move |completed| {
        // On the checkpointer's thread: the next one does not begin before this is over.
        let look = std::panic::AssertUnwindSafe(|| {
            let checkpoint = Checkpoint::read(&path).expect("a complete checkpoint");
            assert_eq!(Some(checkpoint.sequence), completed.result.is_ok().then_some(completed.sequence));
            board.check(&|at, len| checkpoint.bytes(at, len).expect("in the region").to_vec());
        });
        if let Err(why) = std::panic::catch_unwind(look) {
            let text = why.downcast_ref::<String>().cloned().unwrap_or_else(|| "?".into());
            first.lock().expect("wrong").get_or_insert((completed.sequence, text));
        }
        count.fetch_add(1, Ordering::SeqCst);
    });
    let stop = AtomicBool::new(false);
    let stop = &stop;
    mirror.every(Some(Duration::from_nanos(1)));
    std::thread::scope(|scope| {
        // SAFETY: each as the board says.
        unsafe {
            let board = &board;
            // Most of them give their processor away before it is taken from them in the middle of a store: more cuts.
            let turns = || {
                (0u64..).take_while(|n| {
                    if n % 32 == 0 {
                        std::thread::yield_now();
                    }
                    !stop.load(Ordering::Relaxed)
                })
            };
            scope.spawn(move || turns().for_each(|n| board.own(n)));
            scope.spawn(move || turns().for_each(|n| board.with_lock(n % 7 < 3)));
            scope.spawn(move || turns().for_each(|n| board.with_lock(n % 5 < 3)));
            for _ in 0..THREADS {
                scope.spawn(move || turns().for_each(|_| board.chain()));
            }
        }
        let began = Instant::now();
        while began.elapsed() < time && wrong.lock().expect("wrong").is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    mirror.every(None);
    mirror.checkpoint_now().expect("a last one");
    assert_eq!(*wrong.lock().expect("wrong"), None);
    let checked = checked.load(Ordering::SeqCst);
    eprintln!("{checked} checkpoints were read back and checked");
    assert!(checked > 50, "{checked}");
    while mirror.stats().phase != Phase::Attached {
        std::thread::yield_now();
    }
    assert_eq!(mirror.differing(), 0, "stale bytes in the shadow");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Blocks never overlap, keep their contents, and a recovery has exactly those of the instant.
    #[test]
    fn the_allocator_is_recovered_as_it_was(steps in proptest::collection::vec((0u8..3, 0usize..60_000, any::<u8>()), 1..120)) {
        let _alone = alone();
        let (_directory, options) = file(8 << 20);
        let mirror = Mirror::create(&options).expect("create");
        let mut blocks: Vec<(usize, usize, u8)> = Vec::new();
        let mut at_cut = Vec::new();
        let middle = steps.len() / 2;
        for (i, (what, size, value)) in steps.into_iter().enumerate() {
            if i == middle {
                at_cut = blocks.clone();
                mirror.checkpoint_now().expect("a checkpoint");
            }
            if what == 0 && !blocks.is_empty() {
                let (at, size, value) = blocks.swap_remove(size % blocks.len());
                // SAFETY: a block of ours.
                let contents = unsafe { std::slice::from_raw_parts(at as *const u8, size) };
                prop_assert!(contents.iter().all(|b| *b == value));
                prop_assert!(mirror.heap().free(at));
            } else if let Some(at) = mirror.heap().alloc(size, 16) {
                prop_assert!(blocks.iter().all(|(b, s, _)| at + size <= *b || b + s <= at || size == 0 || *s == 0));
                // SAFETY: a block of ours.
                unsafe { stillpoint_mirror::fill(at as *mut u8, value, size) };
                blocks.push((at, size, value));
            }
        }
        prop_assert_eq!(mirror.differing(), 0);
        drop(mirror);
        let mirror = Mirror::recover(&options).expect("recover");
        for (at, size, value) in at_cut {
            // SAFETY: recovered.
            let contents = unsafe { std::slice::from_raw_parts(at as *const u8, size) };
            prop_assert!(contents.iter().all(|b| *b == value));
            prop_assert!(mirror.heap().free(at));
        }
    }
}

#[test]
fn hooks_and_continuous_checkpoints() {
    let _alone = alone();
    let (_directory, options) = file(1 << 20);
    let mirror = Mirror::create(&options).expect("create");
    let last = Arc::new(AtomicU64::new(0));
    let seen = last.clone();
    mirror.on_complete(move |completed| {
        assert!(completed.result.is_ok(), "{completed:?}");
        assert_eq!(completed.sequence, seen.fetch_add(1, Ordering::SeqCst) + 1);
    });
    mirror.every(Some(Duration::from_millis(1)));
    let until = Instant::now() + Duration::from_secs(60);
    while last.load(Ordering::SeqCst) < 20 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    mirror.every(None);
    assert!(last.load(Ordering::SeqCst) >= 20);
    let stats = mirror.stats();
    assert!(
        stats.complete >= 20 && stats.failed == 0 && stats.overhead > 0.0 && stats.last.cycle > 0,
        "{stats:?}"
    );
}
