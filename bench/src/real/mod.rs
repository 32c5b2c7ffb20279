//! Programs that nobody here wrote, with large heaps, each with a unit of work that can be seen from outside: an answer at
//! a socket, or a line of output.

mod catalog;
mod client;
mod saved;
mod ways;

pub use catalog::ALL;
pub use saved::{Restart, Saved};
pub use ways::{Measured, Ways};

use anyhow::{Context, Result, bail};
use client::{Client, is_hung_up};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program.
pub struct Real {
    /// Its name in the tables.
    pub name: &'static str,
    /// Its heap, and its unit of work.
    pub about: &'static str,
    /// What must be installed.
    needs: &'static [Need],
    /// Arguments; the first is a command.
    command: fn(&Setting) -> Vec<String>,
    /// Puts into its directory what it reads.
    prepare: fn(&Setting) -> Result<()>,
    talk: Talk,
}

/// Something that must be installed.
#[derive(Clone, Copy)]
enum Need {
    Command(&'static str),
    /// A Python that has it.
    Numpy,
}

/// How units of work are seen.
enum Talk {
    /// It answers at a socket. `fill` fills its heap, unless it does that by itself; `work` is a unit, whose result is told.
    Answers {
        fill: fn(&mut Client, &Setting) -> Result<()>,
        work: fn(&mut Client, &Setting) -> Result<String>,
    },
    /// It goes on by itself and writes a line for each unit. The first that comes may be nearly done at a checkpoint: two are
    /// waited for.
    Writes,
}

/// How a program is run.
pub struct Setting {
    /// Its directory.
    place: PathBuf,
    /// About the size of its heap, MiB.
    pub mebibytes: u64,
    /// Lookups of a unit of work, where it makes any.
    pub lookups: u64,
}

impl Setting {
    /// In a directory that is there.
    pub fn new(place: &Path, mebibytes: u64, lookups: u64) -> Self {
        Setting { place: place.to_owned(), mebibytes, lookups }
    }

    fn socket(&self) -> PathBuf {
        self.place.join("socket")
    }

    fn output(&self) -> PathBuf {
        self.place.join("out")
    }
}

impl Real {
    /// The one of a name.
    pub fn named(name: &str) -> Result<&'static Self> {
        ALL.iter().find(|real| real.name == name).with_context(|| format!("there is no program {name}"))
    }

    /// What of it is not installed.
    pub fn lacks(&self) -> Option<String> {
        self.needs.iter().find_map(|need| match need {
            Need::Command(name) => (!is_installed(name)).then(|| format!("{name} is not installed")),
            Need::Numpy => python_with_numpy().is_none().then(|| "no python3 here has numpy".to_owned()),
        })
    }

    /// Starts it, with a process group and descriptors of its own.
    fn start(&self, setting: &Setting) -> Result<Started> {
        (self.prepare)(setting)?;
        let command = (self.command)(setting);
        let mut setsid = Command::new("bash");
        setsid.args(["-c", crate::programs::CLOSE, "bash", "setsid"]).args(&command);
        let input = setting.place.join("in");
        let input = if input.exists() { std::fs::File::open(input)?.into() } else { Stdio::null() };
        let output = std::fs::File::create(setting.output())?;
        setsid.current_dir(&setting.place).stdin(input).stdout(output).stderr(Stdio::null());
        Ok(Started(setsid.spawn().context("bash, setsid")?))
    }
}

/// Whether a command is on `PATH`.
pub fn is_installed(program: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|p| p.join(program).is_file())
}

/// One of them may have been installed with the system, and numpy for that one.
fn python_with_numpy() -> Option<&'static str> {
    let has_it = |python: &&str| {
        let mut command = Command::new(python);
        command.args(["-c", "import numpy"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|s| s.success())
    };
    ["python3", "/usr/bin/python3"].into_iter().find(has_it)
}

/// A program that runs. It is killed when this is dropped.
struct Started(std::process::Child);

impl Started {
    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// An error if it has ended.
    fn check(&mut self) -> Result<()> {
        match self.0.try_wait()? {
            Some(status) => bail!("it has ended: {status}"),
            None => Ok(()),
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
