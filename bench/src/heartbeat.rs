//! A program that feels its own pauses: one thread looks at the clock all the time and keeps the longest gap, another
//! writes random pages at a given rate, and at the end every word of its memory is checked.
//!
//! It is controlled by files in its directory: `ask` makes it write `answer` (the longest gap since the last time, in
//! nanoseconds), `stop` makes it check its memory, write `verdict`, and end.

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const WORDS: usize = 512;
/// The word of each page that the writer counts in.
const COUNTED: usize = 7;

fn expected(word: usize) -> u64 {
    let x = (word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)) | 1
}

struct State {
    memory: Vec<AtomicU64>,
    gap: AtomicU64,
    writes: AtomicU64,
    stop: AtomicBool,
}

/// The program itself: `heartbeat DIRECTORY MEBIBYTES WRITES_PER_SECOND`.
pub fn run(arguments: &[String]) -> Result<()> {
    let [directory, mebibytes, writes] = arguments else {
        bail!("heartbeat DIRECTORY MEBIBYTES WRITES_PER_SECOND")
    };
    let directory = PathBuf::from(directory);
    let words = (mebibytes.parse::<usize>()? << 20) / 8;
    let value = |w: usize| AtomicU64::new(if w % WORDS == COUNTED { 0 } else { expected(w) });
    let state = Arc::new(State {
        memory: (0..words).map(value).collect(),
        gap: AtomicU64::new(0),
        writes: AtomicU64::new(0),
        stop: AtomicBool::new(false),
    });
    let rate: u64 = writes.parse()?;
    let threads = [
        std::thread::Builder::new().name("heartbeat".into()).spawn({
            let state = state.clone();
            move || beat(&state)
        })?,
        std::thread::Builder::new().name("writer".into()).spawn({
            let state = state.clone();
            move || write_pages(&state, rate)
        })?,
    ];
    fs::write(directory.join("ready"), "")?;
    while !directory.join("stop").exists() {
        if directory.join("ask").exists() {
            fs::remove_file(directory.join("ask"))?;
            let gap = state.gap.swap(0, Relaxed);
            fs::write(directory.join("answer.new"), gap.to_string())?;
            fs::rename(directory.join("answer.new"), directory.join("answer"))?;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    state.stop.store(true, Relaxed);
    for thread in threads {
        let _ = thread.join();
    }
    let mut counted = 0;
    let mut wrong = 0;
    for (w, word) in state.memory.iter().enumerate() {
        let value = word.load(Relaxed);
        if w % WORDS == COUNTED {
            counted += value;
        } else if value != expected(w) {
            wrong += 1;
        }
    }
    let writes = state.writes.load(Relaxed);
    let verdict = if wrong == 0 && counted == writes { "intact" } else { "corrupt" };
    fs::write(
        directory.join("verdict"),
        format!("{verdict}: {wrong} words wrong, {counted} of {writes} writes\n"),
    )?;
    Ok(())
}

fn beat(state: &State) {
    let mut last = Instant::now();
    while !state.stop.load(Relaxed) {
        let now = Instant::now();
        state.gap.fetch_max((now - last).as_nanos() as u64, Relaxed);
        last = now;
    }
}

fn write_pages(state: &State, rate: u64) {
    let pages = state.memory.len() / WORDS;
    let mut x = 88_172_645_463_325_252u64;
    while !state.stop.load(Relaxed) {
        let began = Instant::now();
        for _ in 0..rate / 1000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            state.memory[(x as usize % pages) * WORDS + COUNTED].fetch_add(1, Relaxed);
            state.writes.fetch_add(1, Relaxed);
        }
        std::thread::sleep(Duration::from_millis(1).saturating_sub(began.elapsed()));
    }
}

/// A running heartbeat program, seen from outside.
pub struct Heartbeat {
    /// Process id.
    pub pid: u32,
    directory: PathBuf,
    child: Option<Child>,
}

impl Heartbeat {
    /// Starts it in a new directory, through a launcher (`dmtcp_launch …`) if there is one, and waits until it runs.
    pub fn start(directory: &Path, mebibytes: u64, writes: u64, launcher: &[String]) -> Result<Self> {
        let _ = fs::remove_dir_all(directory);
        fs::create_dir_all(directory)?;
        // Nothing of what this process was started with may be open in it: bash can close descriptors above 9.
        const CLOSE: &str = r#"for f in /proc/self/fd/*; do n=${f##*/}; [ "$n" -gt 2 ] && eval "exec $n>&-"; done; exec "$@""#;
        let mut command = Command::new("bash");
        command
            .args(["-c", CLOSE, "bash", "setsid"])
            .args(launcher)
            .arg(std::env::current_exe()?)
            .arg("heartbeat");
        command.arg(directory).arg(mebibytes.to_string()).arg(writes.to_string()).current_dir(directory);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("bash, setsid")?;
        let heartbeat = Heartbeat { pid: child.id(), directory: directory.to_owned(), child: Some(child) };
        heartbeat.wait_for("ready", Duration::from_secs(120))?;
        Ok(heartbeat)
    }

    fn wait_for(&self, name: &str, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        while !self.directory.join(name).exists() {
            if Instant::now() > until {
                bail!("no {name} from process {} in {}", self.pid, self.directory.display());
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }

    /// The longest gap since the last call.
    pub fn longest_gap(&mut self) -> Result<Duration> {
        fs::write(self.directory.join("ask"), "")?;
        self.wait_for("answer", Duration::from_secs(120))?;
        let answer = fs::read_to_string(self.directory.join("answer"))?;
        fs::remove_file(self.directory.join("answer"))?;
        Ok(Duration::from_nanos(answer.parse()?))
    }

    /// After something else killed it: frees the process id.
    pub fn reap(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }

    /// Ends it; an error unless all of its memory is right.
    pub fn finish(mut self) -> Result<()> {
        fs::write(self.directory.join("stop"), "")?;
        self.wait_for("verdict", Duration::from_secs(120))?;
        self.reap();
        // Not our child after a restore: its id must be free before the next one starts.
        while Path::new(&format!("/proc/{}", self.pid)).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let verdict = fs::read_to_string(self.directory.join("verdict"))?;
        if !verdict.starts_with("intact") {
            bail!("the program's memory is {verdict}");
        }
        Ok(())
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
