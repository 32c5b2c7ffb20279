//! A directory for each test, random moments that can be repeated, and no process left behind.

use crate::{Stillpoint, kernel, right};
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Environment variable that marks every process of a test.
pub const MARK: &str = "STILLPOINT_TEST_DIRECTORY";

/// Directory, seed and store of one test. When the test fails, the directory is kept and the command to run it again is
/// printed; when it passes, it is removed. Either way every process that was started in it is ended.
#[derive(Debug)]
pub struct Scratch {
    root: PathBuf,
    rng: RefCell<Rng>,
}

impl Scratch {
    /// A new directory, named after the running test.
    pub fn new() -> Self {
        thread_local!(static COUNT: Cell<u64> = const { Cell::new(0) });
        let n = COUNT.replace(COUNT.get() + 1);
        let name = test_name();
        if n == 0 {
            end_earlier_attempts(&name);
        }
        // Another attempt of the same test in the same run has the same random numbers.
        let seed =
            name.bytes().fold(run_seed() ^ n, |seed, byte| Rng::new(seed ^ u64::from(byte)).next_u64());
        let root = std::env::temp_dir().join(format!("{}{}.{n}", prefix(&name), std::process::id()));
        std::fs::create_dir_all(&root).unwrap_or_else(|e| panic!("{}: {e}", root.display()));
        Scratch { root, rng: RefCell::new(Rng::new(seed)) }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// A new directory inside it.
    pub fn directory(&self, name: &str) -> PathBuf {
        let path = self.root.join(name);
        std::fs::create_dir_all(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        path
    }

    /// The command, with the store `store` of this directory.
    pub fn stillpoint(&self) -> Stillpoint {
        Stillpoint::new(&self.root, &self.root.join("store"))
    }

    /// The random numbers of this test.
    pub fn random(&self) -> std::cell::RefMut<'_, Rng> {
        self.rng.borrow_mut()
    }

    /// Processes of this test that are alive (zombies are not).
    pub fn processes(&self) -> Vec<u32> {
        marked(&format!("{MARK}={}\0", self.root.display()))
    }

    /// Panics unless every process of this test ends by itself, soon. What is there for minutes does not end.
    #[track_caller]
    pub fn nothing_is_left(&self, what: &str) {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(120);
        loop {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            right!(
                std::time::Instant::now() < until,
                "{what}: processes are left behind: {}",
                kernel::describe(&left)
            );
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// Ends every process of this test.
    pub fn sweep(&self) {
        sweep(|| self.processes());
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprint!("{}", kernel::whereabouts(&self.processes()));
        }
        self.sweep();
        if std::thread::panicking() {
            eprintln!("kept: {}", self.root.display());
            eprintln!(
                "run again: STILLPOINT_SEED={} cargo test -p stillpoint-tests --test end_to_end -- --exact {}",
                run_seed(),
                test_name()
            );
        } else if std::env::var_os("STILLPOINT_KEEP").is_none() {
            let _ = std::fs::remove_dir_all(&self.root);
        } else {
            eprintln!("kept: {}", self.root.display());
        }
    }
}

/// The seed of this run, from which each test has its own: `STILLPOINT_SEED`, or one for each run of the tests.
pub fn run_seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| {
        let asked = std::env::var("STILLPOINT_SEED").ok().and_then(|seed| seed.parse().ok());
        // All attempts of a run have the same id of it, where there is one.
        let of_run = || {
            let id = std::env::var("NEXTEST_RUN_ID").ok()?;
            Some(id.bytes().fold(0, |seed, byte| Rng::new(seed ^ u64::from(byte)).next_u64()) % 1_000_000_007)
        };
        let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        asked.or_else(of_run).unwrap_or_else(|| now().map_or(1, |d| d.as_nanos() as u64 % 1_000_000_007))
    })
}

/// How the names of the directories of a test begin.
fn prefix(test: &str) -> String {
    format!("sp-{}.", test.replace("::", "-"))
}

/// An attempt that took too long was killed, and has left processes.
fn end_earlier_attempts(test: &str) {
    let is_first = std::env::var("NEXTEST_ATTEMPT").map_or(true, |attempt| attempt == "1");
    if !is_first {
        sweep(|| marked(&format!("{MARK}={}", std::env::temp_dir().join(prefix(test)).display())));
    }
}

/// Processes that are alive (zombies are not) and have these bytes in their environment.
fn marked(mark: &str) -> Vec<u32> {
    let is_marked = |&pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(mark.len()).any(|w| w == mark.as_bytes()) && kernel::alive(pid)
    };
    kernel::processes().into_iter().filter(is_marked).collect()
}

/// Ends processes until there are none, or they do not end.
fn sweep(processes: impl Fn() -> Vec<u32>) {
    for _ in 0..50 {
        let left = processes();
        if left.is_empty() {
            return;
        }
        for pid in left {
            kernel::kill(pid, kernel::SIGKILL);
            kernel::kill(pid, kernel::SIGCONT);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Name of the running test.
pub fn test_name() -> String {
    std::thread::current().name().unwrap_or("test").to_owned()
}

/// SplitMix64: small, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Numbers that depend on the seed alone.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Below `n` (0 if `n` is).
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n.max(1)
    }

    /// In `[0, 1)`.
    pub fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}
