//! What is measured, how often, and where: from the environment.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The choices of one run.
pub struct Plan {
    /// Sizes of the programs whose pauses are measured, MiB.
    pub sizes: Vec<u64>,
    /// Random page writes per second.
    pub writes: Vec<u64>,
    /// Measurements of each kind, after one that does not count.
    pub runs: usize,
    /// Experiments by name; empty: all.
    only: Vec<String>,
    /// Engines by name; empty: all that the command has.
    pub engines: Vec<String>,
    /// By how much the papers' intervals of 10 and 20 s are shortened.
    pub time_scale: u64,
    /// Rate of a slow store, as the command takes it.
    pub bandwidth: String,
    /// Where stores and raw files go; removed at the end.
    pub directory: PathBuf,
    /// Where results go.
    pub results: PathBuf,
}

fn variable(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

fn list<T: FromStr>(name: &str, default: &str) -> Result<Vec<T>> {
    let text = variable(name, default);
    let one = |s: &str| s.parse().ok().with_context(|| format!("{name}: `{s}` is no value for it"));
    text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(one).collect()
}

fn number<T: FromStr>(name: &str, default: &str) -> Result<T> {
    let text = variable(name, default);
    text.parse().ok().with_context(|| format!("{name}: `{text}` is no value for it"))
}

impl Plan {
    /// From the environment; an error if it makes no sense.
    pub fn from_environment(experiments: &[&str]) -> Result<Self> {
        let only: Vec<String> = list("BENCH_ONLY", "")?;
        if let Some(unknown) = only.iter().find(|name| !experiments.contains(&name.as_str())) {
            bail!("BENCH_ONLY: there is no experiment `{unknown}`; there are {}", experiments.join(", "));
        }
        let sizes: Vec<u64> = list("BENCH_SIZES", "1024,4096,8192")?;
        let writes: Vec<u64> = list("BENCH_WRITES", "0,20000,200000")?;
        let runs = number("BENCH_RUNS", "5")?;
        let time_scale = number("BENCH_TIME_SCALE", "10")?;
        if sizes.is_empty() || sizes.contains(&0) || writes.is_empty() || runs == 0 || time_scale == 0 {
            bail!("BENCH_SIZES, BENCH_WRITES, BENCH_RUNS and BENCH_TIME_SCALE are positive numbers");
        }
        // Beside this program: the build directory is on a disk, where /tmp may be memory.
        let beside = std::env::current_exe()?.parent().unwrap_or(Path::new(".")).to_owned();
        let base = std::env::var_os("BENCH_DIRECTORY").map_or(beside, PathBuf::from);
        let base = base.canonicalize().with_context(|| base.display().to_string())?;
        let directory = base.join(format!(".bench.{}", std::process::id()));
        std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        let results = std::env::var_os("BENCH_RESULTS").map_or("bench/results".into(), PathBuf::from);
        let (engines, bandwidth) = (list("BENCH_ENGINES", "")?, variable("BENCH_BANDWIDTH", "100MB/s"));
        Ok(Plan { sizes, writes, runs, only, engines, time_scale, bandwidth, directory, results })
    }

    /// Whether an experiment is wanted.
    pub fn wants(&self, experiment: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == experiment)
    }

    /// A new, empty directory for one experiment or one program.
    pub fn place(&self, name: &str) -> Result<PathBuf> {
        let place = self.directory.join(name);
        if place.exists() {
            std::fs::remove_dir_all(&place).with_context(|| place.display().to_string())?;
        }
        std::fs::create_dir_all(&place).with_context(|| place.display().to_string())?;
        Ok(place)
    }

    /// Memory of this machine that programs can have, MiB.
    pub fn memory(&self) -> u64 {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
        let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
        kib.map_or(u64::MAX, |k| k >> 10)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
