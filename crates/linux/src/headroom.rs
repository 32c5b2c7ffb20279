//! How much more memory a process may take before the kernel is short of it: that of the machine, and of the control
//! groups that the process is in. cgroups(7), proc_meminfo(5).

use crate::cgroups::{self, Group};
use crate::proc::Proc;
use crate::{Error, Result};
use std::path::Path;

/// Names of files of a control group: limit and use, bytes.
const VERSION_1: [&str; 2] = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
const VERSION_2: [&str; 2] = ["memory.max", "memory.current"];

/// Bytes that a process may still take, as far as anybody can tell.
///
/// # Errors
/// [`Error::File`], [`Error::Gone`]: `/proc` does not tell.
pub fn headroom(process: &Proc) -> Result<u64> {
    let text = read(Path::new("/proc/meminfo"))?;
    Ok(of_machine(&text).min(in_groups(process)?))
}

/// Bytes that a process may still take within the limits of its control groups; all that can be told where there are none.
///
/// # Errors
/// As [`headroom`].
pub fn in_groups(process: &Proc) -> Result<u64> {
    let mut left = u64::MAX;
    let mounts = cgroups::mounts()?;
    for line in process.cgroup()? {
        let Some((controllers, path)) = cgroups::parse(&line) else { continue };
        let names = match controllers {
            "" => VERSION_2,
            _ if controllers.split(',').any(|c| c == "memory") => VERSION_1,
            _ => continue,
        };
        let Some(Group { top, folder }) = Group::find(controllers, path, &mounts) else { continue };
        for folder in folder.ancestors().take_while(|f| f.starts_with(&top)) {
            left = left.min(of_group(folder, names).unwrap_or(u64::MAX));
        }
    }
    Ok(left)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Error::file(path, e))
}

/// What can be had without harm, and swap.
fn of_machine(meminfo: &str) -> u64 {
    let kilobytes = |name: &str| {
        let value = meminfo.lines().find_map(|l| l.strip_prefix(name));
        value.and_then(|v| v.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0)
    };
    (kilobytes("MemAvailable:") + kilobytes("SwapFree:")) << 10
}

/// Bytes that a group may still take; pages of files that nobody has used lately are given up first.
fn of_group(folder: &Path, [limit, used]: [&str; 2]) -> Option<u64> {
    let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number(limit)?, number(used)?);
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let idle = stat.lines().find_map(|l| l.strip_prefix("inactive_file ")?.parse::<u64>().ok());
    Some(limit.saturating_sub(used.saturating_sub(idle.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_and_what_can_be_freed_counts() {
        let text = "MemTotal: 100 kB\nMemAvailable:   40 kB\nSwapFree:  2 kB\n";
        assert_eq!(of_machine(text), 42 << 10);
    }

    #[test]
    fn we_have_some_ourselves() {
        let left = Proc::process(std::process::id()).and_then(|own| headroom(&own));
        assert!(left.as_ref().is_ok_and(|&left| left > 1 << 20), "{left:?}");
    }
}
