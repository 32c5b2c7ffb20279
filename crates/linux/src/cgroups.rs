//! Control groups: where a process is, what limits it there, and making groups again. cgroups(7).

use crate::{Error, Result};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Files of a group that say how much it may have, in the order in which they can be written.
const SETTINGS: [&str; 24] = [
    // Of version 2.
    "cpuset.cpus",
    "cpuset.mems",
    "cpu.weight",
    "cpu.max",
    "cpu.idle",
    "io.weight",
    "io.max",
    "memory.min",
    "memory.low",
    "memory.high",
    "memory.max",
    "memory.swap.max",
    "memory.zswap.max",
    "memory.oom.group",
    "pids.max",
    // Of version 1.
    "cpuset.cpu_exclusive",
    "cpuset.mem_exclusive",
    "cpu.shares",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.soft_limit_in_bytes",
    "net_cls.classid",
];

/// Whether it is the name of a file that a group may be given back.
pub fn is_setting(name: &str) -> bool {
    SETTINGS.contains(&name)
}

/// A line of `/proc/PID/cgroup`: a hierarchy by its controllers (none: version 2), and the path of a group in it.
pub fn parse(line: &str) -> Option<(&str, &str)> {
    let (_, rest) = line.split_once(':')?;
    rest.split_once(':').filter(|(_, path)| path.starts_with('/'))
}

/// A group's path and those of the groups that it lies in, the longest first.
pub fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    Path::new(path).ancestors().filter_map(Path::to_str)
}

/// Lines of `/proc/self/mountinfo`.
///
/// # Errors
/// [`Error::File`].
pub fn mounts() -> Result<String> {
    let path = Path::new("/proc/self/mountinfo");
    fs::read_to_string(path).map_err(|e| Error::file(path, e))
}

/// A group, whether it is there or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Where its hierarchy is mounted.
    pub top: PathBuf,
    /// Its folder.
    pub folder: PathBuf,
}

impl Group {
    /// The group at a path of the hierarchy with these controllers, if that is mounted here and shows it.
    pub fn find(controllers: &str, path: &str, mounts: &str) -> Option<Self> {
        let path = Path::new(path);
        if !path.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_))) {
            return None;
        }
        mounts.lines().find_map(|mount| {
            let (own, kind) = mount.split_once(" - ")?;
            let mut kind = kind.split(' ');
            let (name, options) = (kind.next()?, kind.nth(1)?);
            let fits = match controllers {
                "" => name == "cgroup2",
                _ => name == "cgroup" && controllers.split(',').all(|c| options.split(',').any(|o| o == c)),
            };
            let mut own = own.split(' ').skip(3);
            let (root, top) = (own.next()?, PathBuf::from(own.next()?));
            let inside = path.strip_prefix(root).or_else(|_| path.strip_prefix("/")).ok()?;
            fits.then(|| Group { folder: top.join(inside), top })
        })
    }

    /// Whether it is there.
    pub fn exists(&self) -> bool {
        self.folder.is_dir()
    }

    /// Whether a process can be in it that is not otherwise limited: it is the top of its hierarchy.
    pub fn is_top(&self) -> bool {
        self.folder == self.top
    }

    /// Whether what joins it stops there, until it is thawed.
    pub fn is_frozen(&self) -> bool {
        let tells = |name: &str, line: &str| {
            fs::read_to_string(self.folder.join(name)).is_ok_and(|text| text.lines().any(|l| l == line))
        };
        tells("freezer.state", "FROZEN")
            || tells("freezer.state", "FREEZING")
            || tells("cgroup.events", "frozen 1")
            || tells("cgroup.freeze", "1")
    }

    /// The file to which whoever joins it writes his number, or 0.
    pub fn members(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    /// What it is set to, by file, where that can be read and limits it more than a new group, or than the one above it.
    pub fn settings(&self) -> Vec<(String, String)> {
        let of = |folder: &Path, name: &str| {
            Some(fs::read_to_string(folder.join(name)).ok()?.trim_end().to_owned())
        };
        let read = |name: &&str| {
            let value = of(&self.folder, name)?;
            let is_set = !value.is_empty() && !is_default(name, &value);
            let is_inherited =
                name.starts_with("cpuset.") && of(self.folder.parent()?, name).as_ref() == Some(&value);
            (is_set && !is_inherited).then(|| ((*name).to_owned(), value))
        };
        SETTINGS.iter().filter_map(read).collect()
    }

    /// Makes it, below a group that is there; of a version 2 hierarchy with the controllers that the settings need.
    ///
    /// # Errors
    /// [`Error::File`]: what was not allowed, or is not there. Then the group is not there either.
    pub fn make(&self, settings: &[(String, String)]) -> Result<()> {
        let parent = self.folder.parent().unwrap_or(&self.top);
        let failed = |path: &Path, e| Error::file(path, e);
        if self.is_unified() {
            for (name, _) in settings {
                let controller = name.split('.').next().unwrap_or_default();
                // Without it there is no file to be written, which is told below.
                let _ = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
        fs::create_dir(&self.folder).map_err(|e| failed(&self.folder, e))?;
        let set = || -> Result<()> {
            self.inherit(settings, parent)?;
            for (name, value) in settings.iter().filter(|(name, _)| is_setting(name)) {
                let path = self.folder.join(name);
                for line in value.lines() {
                    fs::write(&path, line).map_err(|e| failed(&path, e))?;
                }
            }
            Ok(())
        };
        set().inspect_err(|_| drop(fs::remove_dir(&self.folder)))
    }

    /// A new group of version 1 has no processors and no memory nodes, and nobody may be in it.
    fn inherit(&self, settings: &[(String, String)], parent: &Path) -> Result<()> {
        for name in ["cpuset.cpus", "cpuset.mems"] {
            let path = self.folder.join(name);
            let is_set = settings.iter().any(|(set, _)| set == name);
            if is_set || self.is_unified() || !path.exists() {
                continue;
            }
            let value =
                fs::read_to_string(parent.join(name)).map_err(|e| Error::file(parent.join(name), e))?;
            fs::write(&path, value.trim_end()).map_err(|e| Error::file(&path, e))?;
        }
        Ok(())
    }

    fn is_unified(&self) -> bool {
        self.top.join("cgroup.controllers").exists()
    }

    /// Puts a process into it, by its id in our pid namespace.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn join(&self, pid: u32) -> Result<()> {
        let path = self.members();
        fs::write(&path, pid.to_string()).map_err(|e| Error::file(&path, e))
    }
}

/// Whether a new group has this value.
fn is_default(name: &str, value: &str) -> bool {
    let unlimited = |v: &str| v.parse::<u64>().is_ok_and(|v| v >= i64::MAX as u64 / 4096 * 4096);
    match name {
        "cpu.weight" | "io.weight" => ["100", "default 100"].contains(&value),
        "cpu.max" => value == "max 100000",
        "cpu.shares" => value == "1024",
        "cpu.cfs_period_us" => value == "100000",
        "cpu.cfs_quota_us" => value == "-1",
        "memory.high" | "memory.max" | "memory.swap.max" | "memory.zswap.max" | "pids.max" => value == "max",
        "memory.limit_in_bytes" | "memory.memsw.limit_in_bytes" | "memory.soft_limit_in_bytes" => {
            unlimited(value)
        }
        _ => value == "0",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:4 - cgroup cgroup rw,memory\n\
        36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
        37 31 0:34 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd\n\
        41 31 0:38 /box /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn groups_are_found_where_their_hierarchy_is_mounted() {
        let found = |line| {
            let (controllers, path) = parse(line)?;
            Group::find(controllers, path, MOUNTS).map(|g| g.folder.to_string_lossy().into_owned())
        };
        assert_eq!(found("4:memory:/a/b").as_deref(), Some("/sys/fs/cgroup/memory/a/b"));
        assert_eq!(found("2:cpu,cpuacct:/a").as_deref(), Some("/sys/fs/cgroup/cpu,cpuacct/a"));
        assert_eq!(found("9:name=systemd:/a:b").as_deref(), Some("/sys/fs/cgroup/systemd/a:b"));
        assert_eq!(found("0::/box/a").as_deref(), Some("/sys/fs/cgroup/unified/a"));
        assert_eq!(found("8:pids:/a"), None);
        assert_eq!(found("4:memory:/../../etc"), None);
        assert_eq!(found("4:memory:a"), None);
        assert_eq!(found("nonsense"), None);
    }

    #[test]
    fn only_what_limits_counts() {
        assert!(is_default("memory.limit_in_bytes", "9223372036854771712"));
        assert!(!is_default("memory.limit_in_bytes", "1073741824"));
        assert!(is_default("pids.max", "max") && !is_default("pids.max", "50"));
        assert!(is_default("cpu.max", "max 100000") && !is_default("cpu.max", "50000 100000"));
        assert!(!is_default("cpuset.cpus", "0-1"));
    }
}
