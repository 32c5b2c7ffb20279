//! The command. What it can do is asked of it, so that an older or newer one can be measured, too.

use super::run;
use crate::programs::Program;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A memory engine, in the way in which it is to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Name in the tables.
    pub name: &'static str,
    /// Value of `--engine`.
    argument: &'static str,
    /// Environment that makes it this variant.
    variant: Option<(&'static str, &'static str)>,
}

const fn engine(name: &'static str) -> Engine {
    Engine { name, argument: name, variant: None }
}

impl Engine {
    /// The program stands still while its memory is copied.
    pub const STOP: Engine = engine("stop");
    /// All engines that there may be.
    pub const ALL: [Engine; 5] =
        [Self::STOP, engine("precopy"), engine("wp"), engine("fork"), engine("auto")];
    /// Write-protect in the cut instead of before it, one page for each fault: as Li, Naughton and Plank (1990) did it.
    pub const CLL: Engine = Engine { name: "CLL", argument: "wp", variant: Some(("STILLPOINT_WP", "plain")) };
}

/// What is asked for.
#[derive(Clone, Copy, Default)]
pub struct Request<'a> {
    /// Which engine; the command's own choice if none.
    pub engine: Option<Engine>,
    /// Job that the checkpoint belongs to; the target's own if none.
    pub job: Option<&'a str>,
    /// `--full` or `--incremental`, where the command has them.
    pub mode: Option<&'static str>,
    /// How many of the newest checkpoints are kept, if not all.
    pub keep: Option<&'static str>,
}

/// A checkpoint of ours.
pub struct Cut {
    /// Time of the whole command.
    pub wall: Duration,
    /// What the command reported.
    report: Value,
}

impl Cut {
    /// A number of the report.
    fn number(&self, key: &str) -> Option<f64> {
        self.report[key].as_f64()
    }

    /// Pause by the command's own stopwatch, milliseconds.
    pub fn own_pause_ms(&self) -> f64 {
        self.number("pause_ms").unwrap_or(f64::NAN)
    }

    /// What the pause was spent on: step, milliseconds.
    pub fn pause_steps(&self) -> Vec<(String, f64)> {
        let step = |value: &Value| Some((value["step"].as_str()?.to_owned(), value["ms"].as_f64()?));
        self.report["pause_steps"].as_array().into_iter().flatten().filter_map(step).collect()
    }

    /// Pages that the checkpoint describes.
    pub fn pages(&self) -> f64 {
        self.number("pages").unwrap_or(f64::NAN)
    }

    /// Bytes that were written for it.
    pub fn written(&self) -> f64 {
        self.number("written_bytes").or(self.number("bytes")).unwrap_or(f64::NAN)
    }

    /// Milliseconds for which the program stood still in all, the cut and what prepared it.
    pub fn downtime_ms(&self) -> f64 {
        let others = self.report["other_pauses_ms"].as_array();
        let others: f64 = others.into_iter().flatten().filter_map(Value::as_f64).sum();
        self.own_pause_ms() + others
    }

    /// Memory that copies waiting for the disk took at most, KiB; the engine that makes such copies tells it.
    pub fn buffer_kib(&self) -> Option<f64> {
        let before = self.story().find_map(|line| line.strip_suffix(" KiB at a time"))?;
        before.rsplit(' ').next()?.parse().ok()
    }

    /// Writes that waited for a copy or for room; told by the engine that makes them wait.
    pub fn writes_that_waited(&self) -> Option<f64> {
        let count = self.story().find_map(|line| Some(line.split_once(" writes waited")?.0))?;
        count.parse().ok()
    }

    /// What the engine told of its work.
    fn story(&self) -> impl Iterator<Item = &str> {
        self.report["story"].as_array().into_iter().flatten().filter_map(Value::as_str)
    }

    /// An error unless it saved only what had changed.
    pub fn must_be_incremental(self) -> Result<Self> {
        if self.report["incremental"] == Value::Bool(false) {
            bail!("the checkpoint was a complete one ({})", self.report["notes"]);
        }
        Ok(self)
    }

    /// Number of the checkpoint in its job.
    pub fn id(&self) -> Option<u64> {
        self.report["id"].as_u64()
    }

    /// Whether it was made in this way: a variant has to be confirmed, so that nothing is shown under a wrong name.
    fn is_by(&self, engine: Engine) -> bool {
        engine.variant.is_none_or(|(_, value)| self.story().any(|line| line.starts_with(value)))
    }
}

/// A twin of ours, which is no more.
pub struct Twin {
    /// Time until it ran, on which the command returned.
    pub runs: Duration,
    /// The program's pause by the command's own stopwatch, milliseconds.
    pub pause_ms: f64,
}

/// A job in the background.
pub struct Job {
    /// Process id of the program.
    pub pid: u32,
    supervisor: u32,
}

impl Job {
    fn from(report: &Value) -> Result<Self> {
        let number = |key: &str| {
            let id = report[key].as_u64().and_then(|n| u32::try_from(n).ok());
            id.with_context(|| format!("no {key} in {report}"))
        };
        Ok(Job { pid: number("pid")?, supervisor: number("supervisor_pid")? })
    }

    /// Ends the program with all that is ours, by what nobody hears of; returns when all are gone.
    pub fn cut_off(&self) -> Result<()> {
        let children = format!("/proc/{0}/task/{0}/children", self.supervisor);
        let children = std::fs::read_to_string(children).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        for pid in children.chain([self.supervisor, self.pid]) {
            let id = i32::try_from(pid).ok().and_then(Pid::from_raw).context("process id")?;
            match kill_process(id, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let until = Instant::now() + Duration::from_secs(30);
        while std::path::Path::new(&format!("/proc/{}", self.pid)).exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.wait()
    }

    /// Waits until the supervisor is gone, after which the job may be removed.
    pub fn wait(&self) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(30);
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", self.supervisor)).unwrap_or_default();
        while stat().rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X'])) {
            if Instant::now() > until {
                bail!("supervisor {} does not end", self.supervisor);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// The command.
pub struct Stillpoint {
    binary: PathBuf,
    /// What starts it, if anything does (`setpriv …`).
    launcher: Vec<String>,
}

impl Stillpoint {
    /// The command.
    pub fn path(&self) -> &std::path::Path {
        &self.binary
    }

    /// `STILLPOINT_BIN`, or the one beside this program.
    pub fn find() -> Result<Self> {
        let beside = || Some(std::env::current_exe().ok()?.with_file_name("stillpoint"));
        let binary =
            std::env::var_os("STILLPOINT_BIN").map(PathBuf::from).or_else(beside).context("no stillpoint")?;
        if !binary.is_file() {
            bail!("{} is missing: build the workspace first", binary.display());
        }
        Ok(Stillpoint { binary: binary.canonicalize()?, launcher: Vec::new() })
    }

    /// The same, started by something.
    pub fn by(&self, launcher: &[String]) -> Self {
        Stillpoint { binary: self.binary.clone(), launcher: launcher.to_vec() }
    }

    fn command(&self) -> Command {
        let Some((first, rest)) = self.launcher.split_first() else { return Command::new(&self.binary) };
        let mut command = Command::new(first);
        command.args(rest).arg(&self.binary);
        command
    }

    /// Whether it knows these arguments of a command: those it does not know it refuses before it gives the help.
    fn knows(&self, arguments: &[&str]) -> bool {
        let mut command = self.command();
        command.args(arguments).arg("--help").stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null()).status().is_ok_and(|s| s.success())
    }

    /// Whether it has an engine.
    pub fn has(&self, engine: Engine) -> bool {
        self.knows(&["checkpoint", "--engine", engine.argument])
    }

    /// Whether it can make checkpoints that hold only what changed.
    pub fn is_incremental(&self) -> bool {
        self.knows(&["checkpoint", "--incremental"])
    }

    fn json(
        &self,
        store: &Path,
        variant: Option<(&str, &str)>,
        arguments: &[&str],
    ) -> Result<(Value, Duration)> {
        let mut command = self.command();
        command.args(arguments).env("STILLPOINT_STORE", store).envs(variant);
        let (out, took) = run(&mut command)?;
        Ok((serde_json::from_str(&out).with_context(|| out.clone())?, took))
    }

    /// Checkpoints a process (or job) that goes on. `None` if the command does not have this variant of the engine.
    pub fn try_checkpoint(&self, target: &str, store: &Path, request: Request<'_>) -> Result<Option<Cut>> {
        let mut arguments = vec!["checkpoint", target, "--json"];
        arguments.extend(request.job.into_iter().flat_map(|job| ["--name", job]));
        arguments.extend(request.engine.into_iter().flat_map(|engine| ["--engine", engine.argument]));
        arguments.extend(request.keep.into_iter().flat_map(|keep| ["--keep", keep]));
        arguments.extend(request.mode.filter(|mode| self.knows(&["checkpoint", mode])));
        let variant = request.engine.and_then(|e| e.variant);
        let (report, wall) = self.json(store, variant, &arguments)?;
        let cut = Cut { wall, report };
        Ok(request.engine.is_none_or(|e| cut.is_by(e)).then_some(cut))
    }

    /// Checkpoints a process (or job) that goes on.
    pub fn checkpoint(&self, target: &str, store: &Path, request: Request<'_>) -> Result<Cut> {
        let cut = self.try_checkpoint(target, store, request)?;
        cut.with_context(|| format!("not made by {}", request.engine.map_or("any engine", |e| e.name)))
    }

    /// A full checkpoint of a process that belongs to no job before; only the newest is kept.
    pub fn checkpoint_process(&self, pid: u32, store: &Path, engine: Engine) -> Result<Option<Cut>> {
        let (job, mode, keep) = (Some("bench"), Some("--full"), Some("1"));
        self.try_checkpoint(&pid.to_string(), store, Request { engine: Some(engine), job, mode, keep })
    }

    /// Removes all but the newest checkpoints of a job.
    pub fn keep(&self, store: &Path, job: &str, checkpoints: u64) -> Result<()> {
        self.json(store, None, &["prune", job, "--keep", &checkpoints.to_string(), "--json"])?;
        Ok(())
    }

    /// Starts a program as a job in the background.
    pub fn run(&self, store: &Path, job: &str, place: &Path, command_line: &[String]) -> Result<Job> {
        self.run_with(store, job, place, &[], command_line)
    }

    /// The same with further options.
    pub fn run_with(
        &self,
        store: &Path,
        job: &str,
        place: &Path,
        options: &[&str],
        command_line: &[String],
    ) -> Result<Job> {
        let mut command = self.command();
        command.args(["run", "--detach", "--json", "--name", job]).args(options).arg("--").args(command_line);
        let (out, _) = run(command.env("STILLPOINT_STORE", store).current_dir(place))?;
        Job::from(&serde_json::from_str(&out).with_context(|| out.clone())?)
    }

    /// Makes a live twin of a process, and ends it when all of its memory is there.
    pub fn twin(&self, pid: u32, store: &Path) -> Result<Twin> {
        let (report, _) = self.json(store, None, &["fork", &pid.to_string(), "--isolated", "--json"])?;
        let twin = &report["twins"][0];
        let job = Job::from(twin)?;
        let number = |key: &str| twin[key].as_f64().with_context(|| format!("no {key} in {report}"));
        let figures =
            Twin { runs: Duration::from_secs_f64(number("made_ms")? / 1e3), pause_ms: number("pause_ms")? };
        let id = i32::try_from(job.pid).ok().and_then(Pid::from_raw).context("process id")?;
        kill_process(id, Signal::KILL)?;
        job.wait()?;
        Ok(figures)
    }

    /// Continues a job that was cut off; returns when it runs.
    pub fn resume(&self, store: &Path, job: &str) -> Result<Job> {
        let (report, _) = self.json(store, None, &["resume", job, "--json"])?;
        Job::from(&report["resumed"][0])
    }

    /// Restores a checkpoint into the background.
    pub fn restore(&self, store: &Path, checkpoint: &str) -> Result<Job> {
        let (report, _) = self.json(store, None, &["restore", checkpoint, "--detach", "--json"])?;
        Job::from(&report)
    }

    /// The same, which may leave memory to come later; and how long it took until the program ran.
    pub fn restore_at_once(&self, store: &Path, job: &str, options: &[&str]) -> Result<(Duration, Job)> {
        let mut command = self.command();
        command.args(["restore", job, "--detach"]).args(options).env("STILLPOINT_STORE", store);
        let (_, runs) = run(&mut command)?;
        let (list, _) = self.json(store, None, &["ls", "--json"])?;
        let of_job = |row: &&Value| row["job"] == job;
        let row = list.as_array().into_iter().flatten().find(of_job).context("the job is not listed")?;
        Ok((runs, Job::from(&row["running"])?))
    }

    /// Checkpoints and kills a program, and reads the checkpoint once, so that it is in memory.
    pub fn kill(&self, program: &mut Program, store: &Path) -> Result<()> {
        let pid = program.pid.to_string();
        self.json(store, None, &["checkpoint", &pid, "--name", "restore", "--kill", "--json"])?;
        self.verify(store, "restore")?;
        program.reap();
        self.keep(store, "restore", 1)
    }

    /// Reads a checkpoint once, so that it is in memory.
    pub fn verify(&self, store: &Path, job: &str) -> Result<()> {
        self.json(store, None, &["verify", job, "--json"]).map(drop)
    }

    /// What is known of a job's newest checkpoint.
    pub fn show(&self, store: &Path, job: &str) -> Result<Value> {
        Ok(self.json(store, None, &["show", job, "--json"])?.0)
    }

    /// Begins to restore a job; the command returns when all of its memory is there, and reports.
    pub fn restore_in_background(&self, store: &Path, job: &str, options: &[&str]) -> Result<Child> {
        let mut command = self.command();
        command.args(["restore", job, "--detach", "--json"]).args(options).env("STILLPOINT_STORE", store);
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        piped.spawn().with_context(|| self.binary.display().to_string())
    }

    /// Forgets what programs waited for after earlier restores, and what they wrote after their checkpoints.
    pub fn forget_touch_sets(&self, store: &Path) -> Result<()> {
        for job in fs::read_dir(store.join("jobs"))? {
            let sets = job?.path().join("touch");
            if sets.exists() {
                fs::remove_dir_all(sets).context("touch sets")?;
            }
        }
        Ok(())
    }

    /// Waits until no program's memory is being loaded by this command any more.
    pub fn await_pagers(&self) -> Result<()> {
        let is_pager = |entry: std::fs::DirEntry| {
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let state = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let is_ours = std::fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == self.binary);
            is_ours && name.trim() == "stillpoint page" && !state.contains(") Z ")
        };
        let until = Instant::now() + Duration::from_secs(60);
        while std::fs::read_dir("/proc")?.flatten().any(is_pager) {
            if Instant::now() > until {
                bail!("loading does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Restores a program that was killed; time until it runs, which is when the command returns, and until it answers.
    pub fn bring_back(&self, program: &Program, store: &Path, way: &[&str]) -> Result<(Duration, Duration)> {
        let began = Instant::now();
        let mut command = self.command();
        command.args(["restore", "restore", "--detach"]).args(way).env("STILLPOINT_STORE", store);
        let (_, runs) = run(&mut command)?;
        program.ask()?;
        Ok((runs, began.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::Cut;
    use serde_json::json;
    use std::time::Duration;

    #[test]
    fn the_story_is_understood() {
        let story = [
            "plain: all is protected in the cut, and a fault copies one page",
            "12 writes waited, 11 of them for a copy, 1 for room; 11 pages were copied for them, 44 KiB at a time",
        ];
        let report = json!({"pause_ms": 1.5, "other_pauses_ms": [0.25, 0.5], "story": story});
        let cut = Cut { wall: Duration::ZERO, report };
        assert_eq!(cut.downtime_ms(), 2.25);
        assert_eq!(cut.writes_that_waited(), Some(12.0));
        assert_eq!(cut.buffer_kib(), Some(44.0));
        assert!(cut.is_by(super::Engine::CLL));
        let other = Cut { wall: Duration::ZERO, report: json!({"pause_ms": 1.5, "engine": "wp"}) };
        assert_eq!(other.downtime_ms(), 1.5);
        assert_eq!(other.buffer_kib(), None);
        assert!(!other.is_by(super::Engine::CLL));
    }
}
