//! How much more memory a process may take before the kernel is short of it: that of the machine, and of the control
//! groups that the process is in. cgroups(7), proc_meminfo(5).

use crate::proc::Proc;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Names of files of a control group: limit and use, bytes.
const VERSION_1: [&str; 2] = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
const VERSION_2: [&str; 2] = ["memory.max", "memory.current"];

/// Bytes that a process may still take, as far as anybody can tell.
///
/// # Errors
/// [`Error::File`], [`Error::Gone`]: `/proc` does not tell.
pub fn headroom(process: &Proc) -> Result<u64> {
    let text = read(Path::new("/proc/meminfo"))?;
    let mut left = of_machine(&text);
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    for line in process.cgroup()? {
        let line = String::from_utf8_lossy(&line).into_owned();
        let Some((top, group, names)) = group(&line, &mounts) else { continue };
        for folder in group.ancestors().take_while(|f| f.starts_with(&top)) {
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

/// The folder where the hierarchy of a line of `/proc/PID/cgroup` is mounted, that of the group in it, and the names
/// of the files there, if the hierarchy limits memory.
fn group(line: &str, mounts: &str) -> Option<(PathBuf, PathBuf, [&'static str; 2])> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let unified = controllers.is_empty();
    if !unified && !controllers.split(',').any(|c| c == "memory") {
        return None;
    }
    let mount = mounts.lines().find_map(|mount| {
        let (own, kind) = mount.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1)?);
        let fits = if unified {
            name == "cgroup2"
        } else {
            name == "cgroup" && options.split(',').any(|o| o == "memory")
        };
        let mut own = own.split(' ').skip(3);
        fits.then_some((own.next()?, own.next()?))
    });
    let (root, top) = mount?;
    let path = Path::new(path);
    let inside = path.strip_prefix(root).or_else(|_| path.strip_prefix("/")).ok()?;
    let names = if unified { VERSION_2 } else { VERSION_1 };
    Some((PathBuf::from(top), Path::new(top).join(inside), names))
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

    const MOUNTS: &str = "\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:4 - cgroup cgroup rw,memory\n\
        41 31 0:38 /box /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn groups_are_found_where_their_hierarchy_is_mounted() {
        let found = |line| group(line, MOUNTS).map(|(_, folder, names)| (folder, names[1]));
        let memory = PathBuf::from("/sys/fs/cgroup/memory/a/b");
        assert_eq!(found("4:memory:/a/b"), Some((memory, "memory.usage_in_bytes")));
        let unified = PathBuf::from("/sys/fs/cgroup/unified/a");
        assert_eq!(found("0::/box/a"), Some((unified, "memory.current")));
        assert_eq!(found("8:pids:/a"), None);
        assert_eq!(found("nonsense"), None);
    }

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
