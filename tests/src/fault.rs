//! Faults on purpose, to see that a run notices them: `STILLPOINT_FAULT=byte` changes a byte of the memory of a program that
//! was restored, `STILLPOINT_FAULT=kill` ends a program that a checkpoint was taken of. Only the first attempt of a test
//! has one: the run must fail, although the next attempt passes.

use crate::kernel;
use std::fs;
use std::os::unix::fs::FileExt;

fn is_asked(fault: &str) -> bool {
    let is_first = std::env::var("NEXTEST_ATTEMPT").map_or(true, |attempt| attempt == "1");
    is_first && std::env::var_os("STILLPOINT_FAULT").is_some_and(|asked| asked == fault)
}

/// After a restore of a process.
pub fn restored(pid: u32) {
    if is_asked("byte") {
        let place =
            middle_of_its_memory(pid).unwrap_or_else(|| panic!("process {pid} has no memory to spoil"));
        let memory = fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.unwrap_or_else(|e| panic!("memory of process {pid}: {e}"));
        let mut byte = [0];
        memory.read_exact_at(&mut byte, place).unwrap_or_else(|e| panic!("{place:#x}: {e}"));
        memory.write_all_at(&[!byte[0]], place).unwrap_or_else(|e| panic!("{place:#x}: {e}"));
    }
}

/// After a checkpoint of a process that is to go on.
pub fn checkpointed(pid: u32) {
    if is_asked("kill") {
        kernel::kill(pid, kernel::SIGKILL);
        kernel::wait_gone(pid, std::time::Duration::from_secs(60));
    }
}

/// An address in the largest mapping of private memory without a name that can be written.
fn middle_of_its_memory(pid: u32) -> Option<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let range = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (start, end) = fields[0].split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (fields.len() == 5 && fields[1] == "rw-p").then_some((end - start, start))
    };
    let (length, start) = maps.lines().filter_map(range).max()?;
    Some(start + length / 2)
}
