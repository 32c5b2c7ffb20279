//! The protocol of `docs/mirror.md` in a model checker: small programs, all interleavings (loom).
//!
//! The steps are those of `barrier.rs` and `cycle.rs`, with the same names. `membarrier` makes the checkpointer pay for the
//! order of `inside = 1` and the reading of the offset; the model has a fence in both places instead.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst, fence};
use loom::thread;

const ATTACHED: usize = 1;
const DETACHED: usize = 0;
const NONE: u8 = 0;
const MET: u8 = 1;
const SAVED: u8 = 3;

struct Word {
    primary: AtomicU64,
    shadow: AtomicU64,
    state: AtomicU8,
    noted: AtomicU8,
}

impl Word {
    fn new(state: u8) -> Self {
        Word {
            primary: AtomicU64::new(0),
            shadow: AtomicU64::new(0),
            state: AtomicU8::new(state),
            noted: AtomicU8::new(0),
        }
    }
}

struct Memory {
    offset: AtomicUsize,
    watch: AtomicU8,
    inside: [AtomicU8; 2],
    words: [Word; 2],
}

impl Memory {
    fn new(states: [u8; 2], offset: usize) -> Arc<Self> {
        Arc::new(Memory {
            offset: AtomicUsize::new(offset),
            watch: AtomicU8::new(0),
            inside: [AtomicU8::new(0), AtomicU8::new(0)],
            words: states.map(Word::new),
        })
    }

    fn enter(&self, me: usize) -> usize {
        self.inside[me].store(1, SeqCst); // W1
        fence(SeqCst);
        self.offset.load(SeqCst) // W2
    }

    fn leave(&self, me: usize) {
        self.inside[me].store(0, SeqCst); // W5
    }

    fn store(&self, me: usize, word: usize, value: u64) {
        let offset = self.enter(me);
        let w = &self.words[word];
        if offset == DETACHED {
            w.noted.store(1, SeqCst);
            if self.watch.load(SeqCst) != 0 {
                self.save(word);
            }
        }
        w.primary.store(value, SeqCst); // W3
        if offset == ATTACHED {
            w.shadow.store(value, SeqCst); // W4
        }
        self.leave(me);
    }

    /// An atomic increment.
    fn increment(&self, me: usize, word: usize) -> u64 {
        let offset = self.enter(me);
        let w = &self.words[word];
        let saving = offset != ATTACHED && self.watch.load(SeqCst) != 0;
        if w.state.load(SeqCst) == NONE {
            fence(SeqCst);
            let attached = offset == ATTACHED && self.offset.load(SeqCst) == ATTACHED;
            let fresh = if attached || !(saving || offset == ATTACHED) { MET } else { SAVED };
            let _ = w.state.compare_exchange(NONE, fresh, SeqCst, SeqCst);
        }
        if saving {
            self.save(word);
        }
        let before = w.primary.fetch_add(1, SeqCst);
        self.leave(me);
        before
    }

    fn save(&self, word: usize) {
        let w = &self.words[word];
        fence(SeqCst); // S0
        loop {
            if w.state.load(SeqCst) != MET {
                return;
            }
            let value = w.primary.load(SeqCst); // S1
            if w.state.load(SeqCst) != MET {
                return; // S2
            }
            w.shadow.store(value, SeqCst); // S3
            fence(SeqCst);
            if w.primary.load(SeqCst) != value {
                thread::yield_now();
                continue;
            }
            if w.state.compare_exchange(MET, SAVED, SeqCst, SeqCst).is_ok() {
                return; // S4
            }
        }
    }

    fn grace(&self) {
        fence(SeqCst);
        for inside in &self.inside {
            while inside.load(SeqCst) != 0 {
                thread::yield_now();
            }
        }
    }

    /// C1 to C5; what the checkpoint holds.
    fn cut(&self) -> [u64; 2] {
        self.watch.store(1, SeqCst);
        self.offset.store(DETACHED, SeqCst);
        fence(SeqCst); // C3 begins with one; loom takes `SeqCst` accesses for acquire and release
        (0..2).for_each(|w| self.save(w));
        self.watch.store(0, SeqCst);
        self.grace();
        [0, 1].map(|w| self.words[w].shadow.load(SeqCst))
    }

    /// R1 to R3.
    fn resynchronise(&self) {
        self.offset.store(ATTACHED, SeqCst);
        self.grace();
        for w in &self.words {
            if w.noted.load(SeqCst) == 0 {
                continue;
            }
            loop {
                let value = w.primary.load(SeqCst);
                w.shadow.store(value, SeqCst);
                fence(SeqCst);
                if w.primary.load(SeqCst) == value || w.shadow.load(SeqCst) != value {
                    break;
                }
                thread::yield_now();
            }
        }
    }
}

fn bounded(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

/// Data, then an atomic word that says it is there, then what another thread does because of it.
#[test]
fn what_is_published_is_there() {
    bounded(|| {
        let memory = Memory::new([NONE, MET], ATTACHED);
        let other = memory.clone();
        let writer = thread::spawn(move || {
            other.store(0, 0, 7);
            other.increment(0, 1);
        });
        let cut = memory.cut();
        writer.join().expect("the writer");
        assert!(cut[1] == 0 || cut[0] == 7, "{cut:?}");
    });
}

/// Two threads change one atomic word, each after a plain store of its own: a later value never comes without what came
/// before it, and no increment is counted whose thread's earlier store is missing.
#[test]
fn an_atomic_word_is_cut_in_its_own_order() {
    bounded(|| {
        let memory = Memory::new([MET, MET], ATTACHED);
        let other = memory.clone();
        // Word 0 first, then word 1: never is word 1 ahead.
        let writer = thread::spawn(move || {
            other.increment(0, 0);
            other.increment(0, 1);
        });
        let third = memory.clone();
        let second = thread::spawn(move || {
            third.increment(1, 0);
        });
        let cut = memory.cut();
        writer.join().expect("a writer");
        second.join().expect("a writer");
        assert!(cut[1] <= cut[0], "{cut:?}");
        assert_eq!(memory.words[0].primary.load(SeqCst), 2);
    });
}

/// A word that no atomic instruction had met before is met at the moment of the cut.
#[test]
fn a_word_is_met_during_the_cut() {
    bounded(|| {
        let memory = Memory::new([NONE, MET], ATTACHED);
        let other = memory.clone();
        let writer = thread::spawn(move || {
            other.increment(0, 0);
            other.increment(0, 1);
            // Handed over to plain use.
            other.store(0, 0, 9);
        });
        let cut = memory.cut();
        writer.join().expect("the writer");
        assert!(cut[1] == 0 || cut[0] >= 1, "{cut:?}");
        assert!(cut[0] != 9 || cut[1] == 1, "{cut:?}");
    });
}

/// A writer stores at any moment of the resynchronisation, and before it: the shadow is equal in the end.
#[test]
fn no_stale_word_stays() {
    bounded(|| {
        let memory = Memory::new([NONE, NONE], DETACHED);
        let other = memory.clone();
        let writer = thread::spawn(move || {
            other.store(0, 0, 1);
            other.store(0, 0, 2);
            other.store(0, 1, 3);
        });
        memory.resynchronise();
        writer.join().expect("the writer");
        for w in &memory.words {
            assert_eq!(w.primary.load(SeqCst), w.shadow.load(SeqCst));
        }
    });
}
