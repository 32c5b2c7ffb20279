//! What a figure was measured on.

use anyhow::Result;
use std::path::Path;

/// Processors, memory, kernel, and the file system of a directory.
pub fn machine(directory: &Path) -> Result<String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": ").map(|p| p.1));
    let cpus = std::thread::available_parallelism()?;
    let meminfo = read("/proc/meminfo");
    let memory = meminfo.split_whitespace().nth(1).and_then(|k| k.parse::<u64>().ok()).unwrap_or(0) >> 20;
    let kernel = read("/proc/sys/kernel/osrelease");
    let mounts = read("/proc/self/mounts");
    let holds = |l: &&str| l.split(' ').nth(1).is_some_and(|at| directory.starts_with(at));
    let mount = mounts.lines().filter(holds).max_by_key(|l| l.split(' ').nth(1).map_or(0, str::len));
    let system = mount.and_then(|l| l.split(' ').nth(2)).unwrap_or("?").to_owned();
    let model = model.unwrap_or("unknown processor").trim();
    Ok(format!("{cpus} × {model}, {memory} GiB, Linux {}, {system}", kernel.trim()))
}
