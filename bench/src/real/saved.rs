//! A program that was checkpointed in the middle of its work and killed, and is restored again and again.

use super::{Client, Real, Setting, Talk, is_hung_up};
use crate::bench::Bench;
use crate::series::ms;
use crate::tools::Request;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

const JOB: &str = "restart";
/// How long a program may take for anything.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often a client that is turned away tries again.
const TRIES: usize = 100;
/// Between two looks at what a program has written.
const PERIOD: Duration = Duration::from_micros(200);
/// Until a server has noticed that a client has gone.
const QUIET: Duration = Duration::from_millis(300);

/// A saved program.
pub struct Saved<'a> {
    bench: &'a Bench,
    real: &'a Real,
    setting: Setting,
    store: PathBuf,
    pid: u32,
    /// What an undisturbed unit of work results in; of one that writes, what it went on to write.
    expected: String,
    /// Length of what it had written at the checkpoint, bytes.
    written: u64,
    /// Bytes of the checkpoint's pages.
    pub bytes: u64,
    /// How long a unit of work takes when nothing was done to the program, milliseconds; not a number where nobody asks for it.
    pub undisturbed_ms: f64,
}

/// What was seen of one restore.
pub struct Restart {
    /// From the start of the command to the end of the unit of work, milliseconds.
    pub latency_ms: f64,
    /// The command's report.
    report: Value,
}

impl Restart {
    /// A number of the report; not a number if there is none.
    pub fn number(&self, key: &str) -> f64 {
        self.report[key].as_f64().unwrap_or(f64::NAN)
    }

    /// From the program's first instruction to the end of the unit of work, milliseconds.
    pub fn work_ms(&self) -> f64 {
        self.latency_ms - self.number("running_ms")
    }

    /// When the program waited for pages, milliseconds since its first instruction, and how often since the time before.
    pub fn fault_times(&self) -> Vec<(f64, f64)> {
        let times = self.report["fault_times"].as_array().into_iter().flatten();
        times.filter_map(|pair| Some((pair[0].as_f64()?, pair[1].as_f64()?))).collect()
    }
}

impl<'a> Saved<'a> {
    /// Starts a program, fills it, checkpoints it, sees how it goes on, and kills it.
    pub fn make(bench: &'a Bench, real: &'a Real, setting: Setting) -> Result<Self> {
        let store = setting.place.join("store");
        let mut started = real.start(&setting)?;
        let pid = started.pid();
        let (mut expected, mut undisturbed_ms) = (String::new(), f64::NAN);
        match &real.talk {
            Talk::Answers { fill, work } => {
                let mut client = Client::connect(&setting.socket(), PATIENCE, &mut || started.check())?;
                fill(&mut client, &setting)?;
                for _ in 0..3 {
                    let began = Instant::now();
                    expected = work(&mut client, &setting)?;
                    undisturbed_ms = ms(began.elapsed());
                }
            }
            Talk::Writes => drop(lines(&setting.output(), 0, 3, &mut || started.check())?),
        }
        std::thread::sleep(QUIET);
        let request = Request { job: Some(JOB), ..Request::default() };
        let cut = bench.stillpoint.checkpoint(&pid.to_string(), &store, request)?;
        let mut written = 0;
        if matches!(real.talk, Talk::Writes) {
            let shown = bench.stillpoint.show(&store, JOB)?;
            written = size_of(&shown, &setting.output())?;
            // Long enough for all lines that a restored one writes until it is killed to be compared with these.
            lines(&setting.output(), written, 2, &mut || started.check())?;
            std::thread::sleep(QUIET);
        }
        drop(started);
        if matches!(real.talk, Talk::Writes) {
            expected = behind(&setting.output(), written)?;
        }
        bench.stillpoint.verify(&store, JOB)?;
        let bytes = cut.pages() as u64 * 4096;
        Ok(Saved { bench, real, setting, store, pid, expected, written, bytes, undisturbed_ms })
    }

    /// Forgets what it waited for after earlier restores.
    pub fn forget(&self) -> Result<()> {
        self.bench.stillpoint.forget_touch_sets(&self.store)
    }

    /// Bytes of what it waited for after earlier restores.
    pub fn touch_set(&self) -> Result<u64> {
        let shown = self.bench.stillpoint.show(&self.store, JOB)?;
        Ok(shown["touch_set"]["bytes"].as_u64().unwrap_or(0))
    }

    /// Restores it, sees a unit of its work, and kills it when all of its memory is there. An error if that unit's result is
    /// not that of the undisturbed program.
    pub fn restore(&self, options: &[&str]) -> Result<Restart> {
        if matches!(self.real.talk, Talk::Writes) {
            File::options().write(true).open(self.setting.output())?.set_len(self.written)?;
        }
        let began = Instant::now();
        let mut restore = self.bench.stillpoint.restore_in_background(&self.store, JOB, options)?;
        let unit = self.unit(&mut restore);
        let latency_ms = ms(began.elapsed());
        let report = finish(restore)?;
        self.kill()?;
        let unit = unit?;
        self.bench.stillpoint.await_pagers()?;
        let is_right = match self.real.talk {
            Talk::Answers { .. } => unit == self.expected,
            Talk::Writes => self.expected.starts_with(&unit),
        };
        if !is_right {
            bail!("it says {unit:?} after a restore, and undisturbed {:?}", self.expected);
        }
        Ok(Restart { latency_ms, report })
    }

    /// Sees a unit of work of the program that is being restored.
    fn unit(&self, restore: &mut Child) -> Result<String> {
        let mut check = || match restore.try_wait()? {
            Some(status) if !status.success() => bail!("restore: {status}"),
            _ => Ok(()),
        };
        match &self.real.talk {
            // The socket is there as soon as the program runs.
            // While connections are made again that the program had accepted, others are turned away.
            Talk::Answers { work, .. } => {
                for _ in 0..TRIES {
                    let mut client = Client::connect(&self.setting.socket(), PATIENCE, &mut check)?;
                    match work(&mut client, &self.setting) {
                        Err(why) if is_hung_up(&why) => {}
                        other => return other,
                    }
                }
                bail!("it hangs up");
            }
            Talk::Writes => lines(&self.setting.output(), self.written, 2, &mut check),
        }
    }

    fn kill(&self) -> Result<()> {
        kill_process(Pid::from_raw(self.pid as i32).context("process id")?, Signal::KILL)?;
        let until = Instant::now() + PATIENCE;
        while PathBuf::from(format!("/proc/{}", self.pid)).exists() {
            if Instant::now() > until {
                bail!("process {} does not end", self.pid);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn finish(restore: Child) -> Result<Value> {
    let output = restore.wait_with_output()?;
    if !output.status.success() {
        bail!("restore: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Recorded size of a file.
fn size_of(shown: &Value, file: &Path) -> Result<u64> {
    let file = file.display().to_string();
    let files = shown["files"].as_array().into_iter().flatten();
    let found = files.filter(|f| f["path"] == file.as_str()).find_map(|f| f["size"].as_u64());
    found.with_context(|| format!("the checkpoint does not name {file}"))
}

/// What a file holds from an offset on.
fn behind(file: &Path, offset: u64) -> Result<String> {
    let bytes = fs::read(file)?;
    Ok(String::from_utf8_lossy(bytes.get(offset as usize..).unwrap_or_default()).into_owned())
}

/// Waits until so many whole lines are written behind an offset, and reads them; gives up when `check` fails.
fn lines(file: &Path, offset: u64, count: usize, check: &mut dyn FnMut() -> Result<()>) -> Result<String> {
    let until = Instant::now() + PATIENCE;
    let mut seen = offset;
    loop {
        let len = fs::metadata(file)?.len();
        if len > seen {
            seen = len;
            let text = behind(file, offset)?;
            let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at + 1).take(count).collect();
            if ends.len() == count {
                return Ok(text[..ends[count - 1]].to_owned());
            }
        }
        if Instant::now() > until {
            bail!("nothing is written");
        }
        check()?;
        std::thread::sleep(PERIOD);
    }
}
