//! The C programs of `bench/programs`: built, started, spoken to by files in their directory (see `program.h`).

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::HashMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a program may take for anything it is asked.
const PATIENCE: Duration = Duration::from_secs(180);

/// Closes every descriptor that is not a standard stream: a checkpoint holds what is open, and what this process was
/// started with is not the program's. Bash can close descriptors above 9.
pub const CLOSE: &str =
    r#"for f in /proc/self/fd/*; do n=${f##*/}; [ "$n" -gt 2 ] && eval "exec $n>&-"; done; exec "$@""#;

/// The longest gap in the time of a thread of a program that looks at the clock.
#[derive(Clone, Copy)]
pub struct Gap {
    /// As the thread saw it.
    pub seen: Duration,
    /// Without the time for which the thread could have run and waited for a processor.
    pub stopped: Duration,
}

/// The built programs.
pub struct Programs {
    directory: PathBuf,
}

impl Programs {
    /// Builds all of them into a directory, with `cc`.
    pub fn build(directory: &Path) -> Result<Self> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
        fs::create_dir_all(directory)?;
        for entry in fs::read_dir(&source).with_context(|| source.display().to_string())? {
            let file = entry?.path();
            if file.extension().is_some_and(|e| e == "c") {
                compile(&file, &directory.join(file.file_stem().unwrap_or_default()))?;
            }
        }
        Ok(Programs { directory: directory.to_owned() })
    }

    /// The command line that runs a program in a directory.
    pub fn command_line(&self, name: &str, place: &Path, arguments: &[String]) -> Vec<String> {
        let program = self.directory.join(name).display().to_string();
        [&[program, place.display().to_string()], arguments].concat()
    }

    /// Starts a program in a new directory, through a launcher (`dmtcp_launch …`) if there is one, and waits until its
    /// data is set up.
    pub fn start(
        &self,
        name: &str,
        place: &Path,
        arguments: &[String],
        launcher: &[String],
    ) -> Result<Program> {
        clear(place)?;
        let mut command = Command::new("bash");
        command.args(["-c", CLOSE, "bash", "setsid"]).args(launcher);
        command.args(self.command_line(name, place, arguments)).current_dir(place);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("bash, setsid")?;
        let program =
            Program { pid: child.id(), directory: place.to_owned(), process: Process::Child(child) };
        program.wait_for("ready")?;
        Ok(program)
    }
}

/// A new, empty directory.
pub fn clear(place: &Path) -> Result<()> {
    if place.exists() {
        fs::remove_dir_all(place).with_context(|| place.display().to_string())?;
    }
    fs::create_dir_all(place).with_context(|| place.display().to_string())
}

fn compile(source: &Path, program: &Path) -> Result<()> {
    let mut command = Command::new("cc");
    command.args(["-O3", "-pthread", "-o"]).arg(program).arg(source).arg("-lm");
    let output = command.output().context("cc")?;
    if !output.status.success() {
        bail!("{}: {}", source.display(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// A running program. It is killed when this is dropped.
pub struct Program {
    /// Process id.
    pub pid: u32,
    directory: PathBuf,
    process: Process,
}

/// How a program that is to be killed is reached.
enum Process {
    /// It is our child.
    Child(Child),
    /// Something else started it.
    Other(OwnedFd),
    /// It is not there any more, or another one has its id.
    Gone,
}

/// What a program said at its end.
pub struct Outcome(HashMap<String, String>);

impl Outcome {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Result<&str> {
        self.0.get(key).map(String::as_str).with_context(|| format!("no {key} in the result"))
    }

    /// How long the computation took by the program's own clock.
    pub fn seconds(&self) -> Result<f64> {
        self.get("seconds")?.parse().context("seconds")
    }
}

impl Program {
    /// A program that something else started in a directory, such as a job.
    pub fn adopt(pid: u32, place: &Path) -> Result<Self> {
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw).context("process id")?;
        let process = Process::Other(pidfd_open(id, PidfdFlags::empty())?);
        let program = Program { pid, directory: place.to_owned(), process };
        program.wait_for("ready")?;
        Ok(program)
    }

    fn wait_for(&self, name: &str) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let file = self.directory.join(name);
        while !file.exists() {
            if Instant::now() > until {
                bail!("no {name} from process {} in {}", self.pid, self.directory.display());
            }
            if self.ended() && !file.exists() {
                bail!("process {} ended without a {name} in {}", self.pid, self.directory.display());
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }

    /// Whether the process is gone, or dead and unburied.
    pub fn ended(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
    }

    /// Asks for the numbers that the program has measured since the last time.
    pub fn ask(&self) -> Result<Vec<u64>> {
        fs::write(self.directory.join("ask"), "")?;
        self.numbers("answer")
    }

    /// The longest gap since the last call, of a program that tells it (`struct gaps`).
    pub fn longest_gap(&self) -> Result<Gap> {
        let [seen, stopped] = self.ask()?.try_into().ok().context("two numbers were expected")?;
        Ok(Gap { seen: Duration::from_nanos(seen), stopped: Duration::from_nanos(stopped) })
    }

    /// Waits for a file of numbers, and removes it.
    pub fn numbers(&self, name: &str) -> Result<Vec<u64>> {
        self.wait_for(name)?;
        let answer = fs::read_to_string(self.directory.join(name))?;
        fs::remove_file(self.directory.join(name))?;
        answer.split_whitespace().map(|n| n.parse().with_context(|| answer.clone())).collect()
    }

    /// Asks for something to be done, by a file that the program removes when it is.
    pub fn request(&self, name: &str, text: &str) -> Result<()> {
        let (part, file) = (self.directory.join(format!("{name}.part")), self.directory.join(name));
        fs::write(&part, text)?;
        fs::rename(&part, &file)?;
        let until = Instant::now() + PATIENCE;
        while file.exists() {
            if Instant::now() > until {
                bail!("process {} does not answer in {}", self.pid, self.directory.display());
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }

    /// After something else killed it: frees the process id.
    pub fn reap(&mut self) {
        if let Process::Child(mut child) = std::mem::replace(&mut self.process, Process::Gone) {
            let _ = child.wait();
        }
    }

    /// Kills it after it was restored, and waits until its process id is free.
    pub fn kill_restored(&self) -> Result<()> {
        let id = i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("process id")?;
        pidfd_send_signal(pidfd_open(id, PidfdFlags::empty())?, Signal::KILL)?;
        let until = Instant::now() + PATIENCE;
        while Path::new(&format!("/proc/{}", self.pid)).exists() {
            if Instant::now() > until {
                bail!("process {} does not end", self.pid);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits for its end; an error unless its own check is satisfied.
    pub fn outcome(mut self) -> Result<Outcome> {
        self.wait_for("result")?;
        self.reap();
        // Not our child after a restore: its id must be free before the next one starts.
        let until = Instant::now() + PATIENCE;
        while !self.ended() {
            if Instant::now() > until {
                bail!("process {} does not end", self.pid);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let text = fs::read_to_string(self.directory.join("result"))?;
        let pair = |l: &str| l.split_once(' ').map(|(k, v)| (k.to_owned(), v.to_owned()));
        let outcome = Outcome(text.lines().filter_map(pair).collect());
        if outcome.get("verdict")? != "intact" {
            bail!("the program's own check failed: {}", text.replace('\n', "; "));
        }
        Ok(outcome)
    }

    /// Ends it; an error unless its own check is satisfied.
    pub fn finish(self) -> Result<Outcome> {
        fs::write(self.directory.join("stop"), "")?;
        self.outcome()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        match &mut self.process {
            Process::Child(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Process::Other(process) => {
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
            Process::Gone => {}
        }
    }
}
