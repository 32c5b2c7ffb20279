//! What every experiment needs.

use crate::plan::Plan;
use crate::programs::Programs;
use crate::report::Section;
use crate::tools::{self, Cut, Engine, Stillpoint, Tool};
use anyhow::{Result, bail};
use std::path::Path;

/// The programs, the command with the engines that it has, and the other tools.
pub struct Bench {
    /// The choices of this run.
    pub plan: Plan,
    /// The programs to be checkpointed.
    pub programs: Programs,
    /// The command.
    pub stillpoint: Stillpoint,
    /// Its engines.
    pub engines: Vec<Engine>,
    /// Other tools that work here.
    pub peers: Vec<Box<dyn Tool>>,
    /// Names of other tools that are not here, or do not work.
    pub absent_peers: Vec<&'static str>,
    /// What is left out, and why.
    missing: Vec<String>,
}

impl Bench {
    /// Builds the programs, looks for the tools, asks the command what it can do.
    pub fn new(plan: Plan) -> Result<Self> {
        let programs = Programs::build(&plan.directory.join("programs"))?;
        let stillpoint = Stillpoint::find()?;
        let wanted = |e: &&Engine| plan.engines.is_empty() || plan.engines.iter().any(|name| name == e.name);
        let (engines, absent): (Vec<_>, Vec<_>) =
            Engine::ALL.iter().filter(wanted).copied().partition(|&e| stillpoint.has(e));
        if engines.is_empty() {
            bail!("none of these engines exists: {}", plan.engines.join(", "));
        }
        let (peers, absent_peers) = tools::peers();
        let (absent_peers, mut missing): (Vec<_>, Vec<_>) = absent_peers.into_iter().unzip();
        if !absent.is_empty() {
            let names: Vec<_> = absent.iter().map(|e| e.name).collect();
            missing
                .push(format!("Engines that this command does not have are skipped: {}", names.join(", ")));
        }
        for text in &missing {
            eprintln!("{text}");
        }
        Ok(Bench { plan, programs, stillpoint, engines, peers, absent_peers, missing })
    }

    /// An empty section that names what is left out everywhere.
    pub fn section(&self, name: &'static str, about: &str) -> Section {
        let mut section = Section::new(name, about);
        section.notes.extend(self.missing.iter().cloned());
        section
    }

    /// The engine that users get unless they ask for another; before there is `auto`, the last of those that there are.
    pub fn default_engine(&self) -> Engine {
        self.engines
            .iter()
            .rev()
            .copied()
            .find(|e| e.name == "auto")
            .unwrap_or(self.engines[self.engines.len() - 1])
    }

    /// Engines for experiments on incremental checkpoints: those whose business it is, else the default one.
    pub fn tracking_engines(&self) -> Vec<Engine> {
        let tracks = |e: &&Engine| matches!(e.name, "precopy" | "wp");
        let engines: Vec<_> = self.engines.iter().filter(tracks).copied().collect();
        if engines.is_empty() { vec![self.default_engine()] } else { engines }
    }

    /// The size at which single figures are promised: 1 GiB, or the nearest of those that are measured.
    pub fn base_size(&self) -> u64 {
        self.plan.sizes.iter().copied().min_by_key(|s| s.abs_diff(1024)).unwrap_or(1024)
    }
}

/// Engines that failed in an experiment, with the first reason of each. The experiment goes on without them.
#[derive(Default)]
pub struct Failures(Vec<(&'static str, String)>);

impl Failures {
    /// Whether an engine has failed.
    pub fn has(&self, engine: Engine) -> bool {
        self.0.iter().any(|(name, _)| *name == engine.name)
    }

    /// Takes a full checkpoint of a process; `None` if the engine fails now, or has failed before.
    pub fn checkpoint(&mut self, bench: &Bench, pid: u32, store: &Path, engine: Engine) -> Option<Cut> {
        if self.has(engine) {
            return None;
        }
        let why = match bench.stillpoint.checkpoint_process(pid, store, engine) {
            Ok(Some(cut)) => return Some(cut),
            Ok(None) => "the command does not have this variant".to_owned(),
            Err(why) => format!("{why:#}"),
        };
        self.0.push((engine.name, why));
        None
    }

    /// Names the engines and their reasons.
    pub fn tell(&self, section: &mut Section) {
        for (name, why) in &self.0 {
            section.note(format!("{name} failed: {why}"));
        }
    }
}

/// A size in MiB as people write it.
pub fn size_name(mebibytes: u64) -> String {
    match mebibytes {
        m if m >= 1024 && m % 1024 == 0 => format!("{} GiB", m / 1024),
        m => format!("{m} MiB"),
    }
}
