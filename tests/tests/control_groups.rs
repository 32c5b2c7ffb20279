//! Control groups: a program is in its own again after a restore, and is limited as it was.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Scratch, Target, kernel, right, right_eq, skipped, undisturbed_only, wait_for,
};

/// A group of a hierarchy of version 1 with a child, gone when this is.
struct Group(PathBuf);

impl Group {
    /// `None`, and said so, where no groups can be made.
    fn new(controller: &str, name: &str, setting: (&str, &str)) -> Option<Self> {
        let top = Path::new("/sys/fs/cgroup").join(controller);
        let group = Group(top.join(format!("stillpoint-{name}-{}", std::process::id())));
        let made = fs::create_dir(&group.0)
            .and_then(|()| fs::write(group.0.join(setting.0), setting.1))
            .and_then(|()| fs::create_dir(group.0.join("inner")));
        if let Err(e) = made {
            skipped(&format!("no control group can be made in {}: {e}", top.display()));
            return None;
        }
        Some(group)
    }

    fn inner(&self) -> PathBuf {
        self.0.join("inner")
    }

    /// Its path in the hierarchy, for whoever is in the inner one.
    fn line(&self) -> String {
        format!("/{}/inner", self.0.file_name().expect("name").to_string_lossy())
    }

    /// Removes both; a process that has just ended may still be in them.
    fn remove(&self) {
        wait_for("the groups to be empty", Duration::from_secs(60), || {
            let gone = |path: &Path| fs::remove_dir(path).is_ok() || !path.exists();
            (gone(&self.inner()) && gone(&self.0)).then_some(())
        });
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.inner()).and_then(|()| fs::remove_dir(&self.0));
    }
}

fn groups_of(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default()
}

fn tree_in(group: &Group, scratch: &Scratch) -> Option<Running> {
    let target = Target::new("tree", "turns", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("target"), scratch.path());
    for pid in [vec![running.pid], kernel::children(running.pid)].concat() {
        if let Err(e) = fs::write(group.inner().join("cgroup.procs"), pid.to_string()) {
            skipped(&format!("no process can be put into a control group: {e}"));
            return None;
        }
    }
    Some(running)
}

/// A file that is written once more when this goes, whatever comes of a test: what is frozen cannot be killed.
struct Thaw(PathBuf, &'static str);

impl Drop for Thaw {
    fn drop(&mut self) {
        let _ = fs::write(&self.0, self.1);
    }
}

/// Nobody waits for what is paused, and it goes on where it was when it is thawed.
#[test]
fn what_is_frozen_is_told_to_be() {
    if undisturbed_only() {
        return;
    }
    let kinds =
        [("freezer", "freezer.state", ["FROZEN", "THAWED"]), ("unified", "cgroup.freeze", ["1", "0"])];
    for (hierarchy, file, [frozen, thawed]) in kinds {
        let Some(group) = Group::new(hierarchy, "frozen", (file, thawed)) else { continue };
        let scratch = Scratch::new();
        let Some(running) = tree_in(&group, &scratch) else { return };
        let (stillpoint, pid) = (scratch.stillpoint(), running.pid.to_string());
        let thaw = Thaw(group.0.join(file), thawed);
        fs::write(&thaw.0, frozen).expect("frozen");
        for command in ["checkpoint", "snapshot", "fork"] {
            stillpoint.run(&[command, &pid]).fails(3, &["is frozen", "thaw it first"]);
        }
        drop(thaw);
        stillpoint.run(&["checkpoint", &pid]).ok();
        running.finish("thawed");
        group.remove();
        scratch.nothing_is_left("in the end");
    }
}

#[test]
fn a_group_that_is_gone_is_made_again_with_its_limits() {
    if undisturbed_only() {
        return;
    }
    let Some(group) = Group::new("pids", "limits", ("pids.max", "77")) else { return };
    let scratch = Scratch::new();
    let Some(mut running) = tree_in(&group, &scratch) else { return };
    let stillpoint = scratch.stillpoint();
    stillpoint.checkpoint(running.pid, "limited", &["--kill"]);
    let (pid, directory) = (running.pid, running.directory().to_owned());
    running.reap();
    group.remove();
    assert_eq!(stillpoint.restore_detached("limited", &[]), pid);
    for pid in [vec![pid], kernel::children(pid)].concat() {
        right!(groups_of(pid).contains(&group.line()), "process {pid} is in {}", groups_of(pid));
    }
    right_eq!(fs::read_to_string(group.0.join("pids.max")).expect("pids.max").trim(), "77");
    Running::restored(pid, &directory).finish("in its group");
    group.remove();
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_group_that_is_there_is_joined_and_one_without_limits_is_not_missed() {
    if undisturbed_only() {
        return;
    }
    let Some(group) = Group::new("cpu", "plain", ("notify_on_release", "0")) else { return };
    let scratch = Scratch::new();
    let Some(mut running) = tree_in(&group, &scratch) else { return };
    let stillpoint = scratch.stillpoint();
    stillpoint.checkpoint(running.pid, "plain", &["--kill"]);
    let (pid, directory) = (running.pid, running.directory().to_owned());
    running.reap();
    assert_eq!(stillpoint.restore_detached("plain", &[]), pid);
    assert!(groups_of(pid).contains(&group.line()), "it is in {}", groups_of(pid));
    Running::restored(pid, &directory).kill();
    group.remove();
    assert_eq!(stillpoint.restore_detached("plain", &[]), pid);
    assert!(!groups_of(pid).contains(&group.line()), "it is in {}", groups_of(pid));
    assert!(!group.0.exists());
    Running::restored(pid, &directory).finish("without a group");
    scratch.nothing_is_left("in the end");
}

/// The root of a namespace is where its processes are, and not where whoever restores happens to be.
#[test]
fn a_namespace_begins_at_the_group_that_its_processes_are_in() {
    if undisturbed_only() {
        return;
    }
    if !kernel::can_unshare(&["-C"]) {
        return skipped("not permitted to make namespaces");
    }
    let Some(group) = Group::new("cpu", "root", ("notify_on_release", "0")) else { return };
    let scratch = Scratch::new();
    let told = scratch.path().join("told");
    let script = format!(
        "echo $$ >{}/cgroup.procs && exec unshare -C sh -c \
         'while sleep 0.05; do cat /proc/self/cgroup >{told}.new; mv {told}.new {told}; done'",
        group.inner().display(),
        told = told.display(),
    );
    let mut program = alone("sh");
    program.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut program = program.spawn().expect("sh");
    let lines = || {
        let _ = fs::remove_file(&told);
        wait_for("its own view", Duration::from_secs(60), || fs::read_to_string(&told).ok())
    };
    let view = lines();
    if !view.lines().any(|line| line.ends_with("cpu:/") || line.ends_with("cpu,cpuacct:/")) {
        let _ = program.kill().and_then(|()| program.wait());
        return skipped(&format!("no process can be put into a control group: {view}"));
    }
    let stillpoint = scratch.stillpoint();
    stillpoint.checkpoint(program.id(), "rooted", &["--kill"]);
    let pid = program.id();
    program.wait().expect("its end");
    assert_eq!(stillpoint.restore_detached("rooted", &[]), pid);
    right!(groups_of(pid).contains(&group.line()), "it is in {}", groups_of(pid));
    right_eq!(lines(), view);
    kernel::kill(pid, kernel::SIGKILL);
    group.remove();
    scratch.nothing_is_left("in the end");
}
