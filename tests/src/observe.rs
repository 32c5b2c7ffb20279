//! What can be seen of a process from outside, as a table of facts to be compared before and after.

use crate::kernel;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Facts by name. Facts that change by themselves (times, counters, inode numbers of objects without a name) are left
/// out or told apart only by what is the same as what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts(pub BTreeMap<String, String>);

/// Fields of `/proc/PID/task/TID/status` that must stay.
const STATUS: &[&str] = &[
    "Name",
    "Umask",
    "Tgid",
    "Pid",
    "Uid",
    "Gid",
    "Groups",
    "Kthread",
    "Threads",
    "SigPnd",
    "ShdPnd",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Cpus_allowed",
    "Mems_allowed",
    "TracerPid",
    "THP_enabled",
];

/// A mapping.
struct Seen {
    start: String,
    end: String,
    is: String,
    flags: String,
    /// Private memory without a name.
    is_plain: bool,
}

impl Facts {
    /// Looks at a process and its descendants.
    pub fn of(pid: u32) -> Self {
        let mut facts = Self::of_one(pid);
        for child in kernel::children(pid) {
            let about = if kernel::alive(child) { Self::of(child) } else { Self::of_ended(child) };
            facts.0.extend(about.0.into_iter().map(|(name, value)| (format!("child {child} {name}"), value)));
            facts.0.insert(format!("child {child} is of"), pid.to_string());
        }
        facts
    }

    /// What is left of a process that has ended: its relations, and how it ended.
    fn of_ended(pid: u32) -> Self {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |s| s.1).split(' ').collect();
        let mut facts = Facts::default();
        for (name, index) in [("is", 0), ("group", 2), ("session", 3), ("exit signal", 35), ("status", 49)] {
            facts.0.insert(name.into(), fields.get(index).unwrap_or(&"").trim().to_string());
        }
        facts
    }

    /// The same, as those see it who are in its pid namespace, if that is not ours: an ordinary user's restore has made one, in which it has
    /// its old ids. Nothing if it cannot be looked at.
    pub fn where_it_lives(pid: u32) -> Self {
        let Some(own) = kernel::id_within(pid) else { return Self::of(pid) };
        let facts = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.join("facts")));
        let mut look = std::process::Command::new("nsenter");
        look.args(["--user", "--preserve-credentials", "--mount", "--pid", "--target", &pid.to_string()]);
        look.arg(facts.unwrap_or_default()).arg(own.to_string());
        let told = look.output().ok().and_then(|told| serde_json::from_slice(&told.stdout).ok());
        let mut told: BTreeMap<String, String> = told.unwrap_or_default();
        // What stands for shared memory has another name.
        for name in told.values_mut() {
            *name = name.replace("/memfd:dev/zero", "/dev/zero");
        }
        Facts(told)
    }

    fn of_one(pid: u32) -> Self {
        let mut facts = Facts::default();
        let base = format!("/proc/{pid}");
        for tid in kernel::threads(pid) {
            facts.thread(&format!("{base}/task/{tid}"), tid);
        }
        facts.mappings(&base);
        facts.descriptors(&base);
        for name in [
            "cmdline",
            "auxv",
            "environ",
            "limits",
            "oom_score_adj",
            "personality",
            "coredump_filter",
            "timers",
        ] {
            let bytes = fs::read(format!("{base}/{name}")).unwrap_or_default();
            facts.0.insert(name.into(), bytes.escape_ascii().to_string());
        }
        for link in ["exe", "cwd", "root"] {
            let to = fs::read_link(format!("{base}/{link}")).unwrap_or_default();
            facts.0.insert(link.into(), to.display().to_string());
        }
        // pgrp, session and terminal, as far as this process leads them
        let stat = fs::read_to_string(format!("{base}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |s| s.1).split(' ').collect();
        for (name, index) in [("group", 2), ("session", 3)] {
            facts.0.insert(name.into(), fields.get(index).unwrap_or(&"").to_string());
        }
        facts
    }

    /// Looks at a process until a few looks in a row agree: a thread that only begins, or something that is just being
    /// put back, has had its time.
    pub fn settled(pid: u32) -> Self {
        let mut last = Facts::of(pid);
        let mut agreed = 0;
        for _ in 0..200 {
            std::thread::sleep(std::time::Duration::from_millis(6));
            let next = Facts::of(pid);
            agreed = if next == last && !next.is_starting() { agreed + 1 } else { 0 };
            if agreed == 4 {
                break;
            }
            last = next;
        }
        last
    }

    /// Whether a thread is in the few instructions at its start (or that of another it makes) in which the C library
    /// blocks all signals but its own two.
    fn is_starting(&self) -> bool {
        const ALL: [&str; 3] = ["fffffffffffbfeff", "fffffffe7ffbfeff", "fffffffc7ffbfeff"];
        self.0.iter().any(|(name, value)| name.ends_with("SigBlk") && ALL.contains(&value.as_str()))
    }

    fn thread(&mut self, base: &str, tid: u32) {
        let status = fs::read_to_string(format!("{base}/status")).unwrap_or_default();
        for line in status.lines() {
            if let Some((name, value)) = line.split_once(':')
                && STATUS.contains(&name)
            {
                self.0.insert(format!("thread {tid} {name}"), value.trim().to_owned());
            }
        }
        let stat = fs::read_to_string(format!("{base}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |s| s.1).split(' ').collect();
        let state = match fields.first() {
            Some(&"T") => "stopped",
            Some(&"t") => "traced",
            Some(&"Z") => "ended",
            _ => "alive",
        };
        self.0.insert(format!("thread {tid} is"), state.to_owned());
        for (name, index) in [("nice", 16), ("real-time priority", 37), ("policy", 38)] {
            self.0.insert(format!("thread {tid} {name}"), fields.get(index).unwrap_or(&"").to_string());
        }
    }

    fn mappings(&mut self, base: &str) {
        let mut same = Numbering::default();
        let mut found: Vec<Seen> = Vec::new();
        for (line, flags) in mappings(base) {
            let mut fields = line.splitn(6, ' ');
            let mut next = || fields.next().unwrap_or_default();
            let (range, access, offset, device, inode) = (next(), next(), next(), next(), next());
            let name = next().trim();
            let nameless = name.ends_with("(deleted)") || name.starts_with("/memfd:");
            // What only the program has mounted has another device number the next time.
            let is_here = || fs::metadata(name).is_ok_and(|m| m.ino().to_string() == inode);
            let mut object = || same.of(&format!("{device} {inode}"));
            let identity = match (inode, nameless) {
                ("0", _) => String::new(),
                (_, true) => format!("object {}", object()),
                (_, false) if is_here() => format!("{device} {inode}"),
                (_, false) => format!("{inode}, object {}", object()),
            };
            let (start, end) = range.split_once('-').unwrap_or_default();
            let is = format!("{access} {offset} {name} {identity}");
            let is_plain = name.is_empty() && identity.is_empty();
            // A program that was restored is followed from then on.
            let own: Vec<&str> = flags.split_whitespace().filter(|flag| !WATCHED.contains(flag)).collect();
            found.push(Seen { start: start.into(), end: end.into(), is, flags: own.join(" "), is_plain });
        }
        // Whether two that are alike and lie side by side are one is for the kernel to say, and makes no difference.
        found.dedup_by(|next, last| {
            let joins =
                last.is_plain && next.start == last.end && (&next.is, &next.flags) == (&last.is, &last.flags);
            if joins {
                last.end = std::mem::take(&mut next.end);
            }
            joins
        });
        for Seen { start, end, is, flags, .. } in found {
            self.0.insert(format!("map {start}-{end}"), is);
            self.0.insert(format!("map {start}-{end} flags"), flags);
        }
    }

    fn descriptors(&mut self, base: &str) {
        let mut same = Numbering::default();
        let mut fds = kernel::numbers(std::path::Path::new(&format!("{base}/fd")));
        fds.sort_unstable();
        for fd in fds {
            let link = fs::read_link(format!("{base}/fd/{fd}")).unwrap_or_default().display().to_string();
            // pipe:[1234] and the like: only whether two are the same can be compared
            let link = match link.split_once(":[") {
                Some((kind, id)) => format!("{kind} object {}", same.of(id)),
                // A file that was made without a name is called after its inode number.
                None => match link.rsplit_once("/#") {
                    Some((folder, id)) => format!("{folder}/# {}", same.of(id)),
                    None => link,
                },
            };
            self.0.insert(format!("fd {fd}"), link.clone());
            let info = fs::read_to_string(format!("{base}/fdinfo/{fd}")).unwrap_or_default();
            for line in info.lines() {
                let Some((name, value)) = line.split_once(':') else { continue };
                let stays = matches!(
                    name,
                    "pos"
                        | "flags"
                        | "eventfd-count"
                        | "eventfd-semaphore"
                        | "sigmask"
                        | "clockid"
                        | "settime flags"
                        | "Pid"
                );
                if stays {
                    self.0.insert(format!("fd {fd} {name}"), value.trim().to_owned());
                }
                // A file that never had a name shows how it was made: O_TMPFILE is no state of an open file.
                if name == "flags" && link.ends_with("(deleted)") {
                    let flags = u64::from_str_radix(value.trim(), 8).unwrap_or_default() & !0o20200000;
                    self.0.insert(format!("fd {fd} {name}"), format!("{flags:o}"));
                }
            }
        }
    }

    /// The facts that differ, one a line.
    pub fn differences(&self, after: &Facts) -> String {
        let mut lines = String::new();
        for (name, value) in &self.0 {
            match after.0.get(name) {
                None => lines += &format!("  {name}: {value:?} is missing\n"),
                Some(now) if now != value => lines += &format!("  {name}: {now:?}, before {value:?}\n"),
                Some(_) => {}
            }
        }
        for (name, value) in &after.0 {
            if !self.0.contains_key(name) {
                lines += &format!("  {name}: {value:?} is new\n");
            }
        }
        lines
    }

    /// Without the facts whose name begins with one of these.
    pub fn without(mut self, prefixes: &[&str]) -> Self {
        // In an ordinary user's namespace, groups have other names, and how a child has ended that has had privileges there is not told.
        let is_hidden =
            |name: &str| name.ends_with(" Groups") || name.starts_with("child ") && name.ends_with(" status");
        let is_told = |name: &str| kernel::is_root() || !is_hidden(name);
        self.0.retain(|name, _| is_told(name) && !prefixes.iter().any(|p| name.starts_with(p)));
        self
    }
}

/// What a checkpoint may leave behind in a process: memory that is watched, a descriptor of ours, a tracer, a child (unless
/// the process has children of its own).
pub fn traces_of_us(pid: u32, has_children: bool) -> Vec<String> {
    let mut traces = Vec::new();
    for (mapping, flags) in mappings(&format!("/proc/{pid}")) {
        if has_one(&flags, &WATCHED) {
            traces.push(format!("watched: {mapping} {flags}"));
        }
    }
    for fd in kernel::numbers(std::path::Path::new(&format!("/proc/{pid}/fd"))) {
        let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap_or_default().display().to_string();
        if link.contains("userfaultfd") {
            traces.push(format!("descriptor {fd}: {link}"));
        }
    }
    for tid in kernel::threads(pid) {
        let base = format!("/proc/{pid}/task/{tid}");
        match kernel::status_in(&format!("{base}/status"), "TracerPid") {
            Some(tracer) if tracer != "0" => traces.push(format!("thread {tid} is traced by {tracer}")),
            _ => {}
        }
    }
    let children = kernel::children(pid);
    if !has_children && !children.is_empty() {
        traces.push(format!("children: {}", kernel::describe(&children)));
    }
    traces
}

/// Whether a mapping of a process has one of these flags (`VmFlags`).
pub fn has_mapping_with(pid: u32, wanted: &[&str]) -> bool {
    mappings(&format!("/proc/{pid}")).iter().any(|(_, flags)| has_one(flags, wanted))
}

fn has_one(flags: &str, wanted: &[&str]) -> bool {
    flags.split_whitespace().any(|flag| wanted.contains(&flag))
}

/// The mappings of a process, of which this is the folder: of each what `maps` tells, and its flags.
///
/// This is looked at again and again, and most of what there is, two dozen counters of each, is passed over as it is.
fn mappings(base: &str) -> Vec<(String, String)> {
    let smaps = fs::read(format!("{base}/smaps")).unwrap_or_default();
    let text = |line: &[u8]| String::from_utf8_lossy(line).into_owned();
    let mut found: Vec<(String, String)> = Vec::new();
    let mut rest = smaps.as_slice();
    while !rest.is_empty() {
        let (line, next) = rest.split_at(memchr::memchr(b'\n', rest).unwrap_or(rest.len()));
        rest = next.get(1..).unwrap_or_default();
        match line.first() {
            // Names of counters are capitalized, addresses are not.
            Some(b'0'..=b'9' | b'a'..=b'f') => found.push((text(line), String::new())),
            Some(b'V') => {
                if let (Some(flags), Some((_, of_it))) = (line.strip_prefix(b"VmFlags:"), found.last_mut()) {
                    *of_it = text(flags);
                }
            }
            _ => {}
        }
    }
    found
}

/// Flags of mappings that are registered with a userfaultfd: missing pages, write-protection, minor faults.
const WATCHED: [&str; 3] = ["um", "uw", "ui"];

/// Gives ids numbers in the order of their first sight.
#[derive(Default)]
struct Numbering(HashMap<String, usize>);

impl Numbering {
    fn of(&mut self, id: &str) -> usize {
        let next = self.0.len();
        *self.0.entry(id.to_owned()).or_insert(next)
    }
}
