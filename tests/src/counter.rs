//! A program that counts, and remembers whether it has ever seen a file: so it tells what it knows after it has gone back.

use crate::wait_for;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// For Python: some threads, and some memory that is written all the time.
pub const COUNTER: &str = "import os, threading, time
for _ in range(3): threading.Thread(target=lambda: [time.sleep(1) for _ in range(10**6)]).start()
n, seen, memory = 0, False, bytearray(b'x' * (8 << 20))
while True:
    n += 1; seen = seen or os.path.exists('mark'); memory[n * 4097 % len(memory)] = n % 256
    open('n', 'w').write(f'{n} {seen}\\n'); time.sleep(0.01)
";

/// What [`COUNTER`] tells in the directory where it was started.
#[derive(Debug)]
pub struct Counter {
    directory: PathBuf,
}

impl Counter {
    /// In this directory.
    pub fn of(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    fn told(&self) -> Option<(u64, bool)> {
        let text = fs::read_to_string(self.directory.join("n")).ok()?;
        let (number, seen) = text.strip_suffix('\n')?.split_once(' ')?;
        Some((number.parse().ok()?, seen == "True"))
    }

    /// Waits until it has gone on; whether it has seen the file.
    #[track_caller]
    pub fn goes_on(&self) -> bool {
        // What it told before is there until it tells again.
        let _ = fs::remove_file(self.directory.join("n"));
        let (from, _) = wait_for("it to count", PATIENCE, || self.told());
        wait_for("it to count", PATIENCE, || self.told().filter(|(number, _)| *number > from + 2)).1
    }

    /// Shows it the file, and takes that away again.
    #[track_caller]
    pub fn sees(&self) {
        let mark = self.directory.join("mark");
        fs::write(&mark, "").expect("a file");
        wait_for("it to see the file", PATIENCE, || self.told().filter(|(_, seen)| *seen));
        fs::remove_file(&mark).expect("the file");
    }
}
