//! A progress bar that does not get in the way: the work only counts, a thread of its own draws.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the work tells.
#[derive(Debug, Default)]
pub struct Counts {
    total: AtomicU64,
    done: AtomicU64,
    end: AtomicBool,
}

/// A bar on standard error, if that is a terminal and the work takes longer than a second.
#[derive(Debug)]
pub struct Bar {
    counts: Arc<Counts>,
    painter: Option<JoinHandle<()>>,
}

/// How long the work may take before the bar appears.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is drawn.
const PERIOD: Duration = Duration::from_millis(100);

impl Bar {
    /// A bar with these words before it. Nothing is drawn where `quiet`.
    pub fn new(words: &'static str, quiet: bool) -> Self {
        let counts = Arc::new(Counts::default());
        let shown = !quiet && std::io::stderr().is_terminal();
        let theirs = counts.clone();
        let painter = shown.then(|| std::thread::spawn(move || paint(words, &theirs)));
        Self { counts, painter }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.counts.end.store(true, Ordering::Release);
        if let Some(painter) = self.painter.take() {
            painter.thread().unpark();
            let _ = painter.join();
        }
    }
}

fn paint(words: &str, counts: &Counts) {
    let begin = Instant::now();
    let style = indicatif::ProgressStyle::with_template(
        "{prefix} [{bar:30}] {bytes} of {total_bytes}  {bytes_per_sec}  {eta} left",
    );
    let style =
        style.map(|s| s.progress_chars("=> ")).unwrap_or_else(|_| indicatif::ProgressStyle::default_bar());
    let bar = indicatif::ProgressBar::hidden().with_style(style).with_prefix(words.to_string());
    let mut visible = false;
    loop {
        std::thread::park_timeout(PERIOD);
        let (total, done) = counts.get();
        // A restored program writes to the terminal as soon as its memory is complete: be gone by then.
        if counts.end.load(Ordering::Acquire) || (visible && done >= total) {
            break;
        }
        if begin.elapsed() >= PATIENCE && total > 0 {
            if !visible {
                visible = true;
                bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
            }
            bar.set_length(total);
            bar.set_position(done);
        }
    }
    bar.finish_and_clear();
}

impl Counts {
    /// How many bytes there are to be moved, and how many have been.
    pub fn get(&self) -> (u64, u64) {
        (self.total.load(Ordering::Relaxed), self.done.load(Ordering::Relaxed))
    }
}

impl stillpoint_capture::Progress for Counts {
    fn start(&self, total_bytes: u64) {
        self.total.store(total_bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl stillpoint_capture::Progress for Bar {
    fn start(&self, total_bytes: u64) {
        stillpoint_capture::Progress::start(&*self.counts, total_bytes);
    }

    fn advance(&self, bytes: u64) {
        stillpoint_capture::Progress::advance(&*self.counts, bytes);
    }
}

impl stillpoint_restore::Progress for Bar {
    fn start(&self, total_bytes: u64) {
        stillpoint_capture::Progress::start(&*self.counts, total_bytes);
    }

    fn advance(&self, bytes: u64) {
        stillpoint_capture::Progress::advance(&*self.counts, bytes);
    }

    fn waits(&self, why: &str) {
        crate::output::note(why);
    }
}

impl stillpoint_archive::Progress for Bar {
    fn start(&self, total_bytes: u64) {
        stillpoint_capture::Progress::start(&*self.counts, total_bytes);
    }

    fn advance(&self, bytes: u64) {
        stillpoint_capture::Progress::advance(&*self.counts, bytes);
    }
}
