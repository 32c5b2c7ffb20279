//! Twins beside a running program, under other process ids: what the kernel and the C library know of ids is of the twin's own; where that
//! cannot be, there are none.

use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_tests::programs::{built_by_go, installed, source};
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Scratch, Stillpoint, Target, kernel, right, right_eq, skipped, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(120);

/// A program that is going to have twins.
struct Original {
    scratch: Scratch,
    stillpoint: Stillpoint,
    directory: PathBuf,
    running: Running,
}

impl Original {
    /// Nothing where it cannot be built, or only undisturbed runs are asked for.
    fn start(program: &str, scenario: &str, build: Build) -> Option<Self> {
        let Some(target) = Target::new(program, scenario, build) else {
            skipped("no compiler for it");
            return None;
        };
        let scratch = Scratch::new();
        let directory = scratch.directory("target");
        let running = target.start(&directory, scratch.path());
        if undisturbed_only() {
            running.finish("undisturbed");
            return None;
        }
        if !kernel::is_root() {
            skipped("needs CAP_CHECKPOINT_RESTORE");
            return None;
        }
        let stillpoint = scratch.stillpoint();
        Some(Original { scratch, stillpoint, directory, running })
    }

    #[track_caller]
    fn twins(&self, count: usize) -> Vec<u32> {
        let all = twins(&self.stillpoint, &self.running.pid.to_string(), count);
        all.iter().map(|twin| twin["pid"].as_u64().expect("a process id") as u32).collect()
    }

    /// All of them, and the program itself, go on and find all as it should be.
    #[track_caller]
    fn all_are_good(self, twins: &[u32]) {
        let Original { scratch, directory, running, .. } = self;
        fs::write(directory.join("go"), "").expect("go");
        let mut expected: Vec<String> =
            twins.iter().chain([&running.pid]).map(|pid| format!("good {pid}")).collect();
        expected.sort_unstable();
        let mut lines = results(&directory, expected.len());
        lines.sort_unstable();
        right_eq!(lines, expected, "{}", running.said());
        running.finish("the original");
        scratch.nothing_is_left("in the end");
    }
}

#[track_caller]
fn twins(stillpoint: &Stillpoint, target: &str, count: usize) -> Vec<Value> {
    let count_text = count.to_string();
    let output = stillpoint.run(&["fork", target, "--count", &count_text, "--json"]).ok();
    let all = output.json()["twins"].as_array().expect("twins").clone();
    assert_eq!(all.len(), count, "{output}");
    assert!(all.iter().all(|twin| twin["private_pid"].is_null()), "{output}");
    all
}

#[track_caller]
fn results(directory: &Path, count: usize) -> Vec<String> {
    let read = || fs::read_to_string(directory.join("results")).unwrap_or_default();
    let lines = || read().lines().map(str::to_owned).collect::<Vec<_>>();
    let said = || fs::read_to_string(directory.join("out")).unwrap_or_default();
    wait_for(&format!("{count} results; {}", said()), PATIENCE, || (lines().len() >= count).then_some(()));
    lines()
}

#[track_caller]
fn find_all_right(scenario: &str, build: Build, count: usize) {
    let Some(original) = Original::start("twins", scenario, build) else { return };
    let twins = original.twins(count);
    original.all_are_good(&twins);
}

#[test]
fn threads_and_locks() {
    find_all_right("locks", Build::Dynamic, 3);
}

#[test]
fn threads_and_locks_of_a_static_program() {
    find_all_right("locks", Build::Static, 2);
}

#[test]
fn threads_and_locks_of_musl() {
    find_all_right("locks", Build::Musl, 3);
}

#[test]
fn a_tree() {
    for build in [Build::Dynamic, Build::Static, Build::Musl] {
        find_all_right("tree", build, 2);
    }
}

/// Shared memory and semaphores that have names: each twin has those of the instant for itself, and the program keeps its own.
#[test]
fn shared_memory_with_a_name() {
    for scenario in ["named", "named_tree"] {
        find_all_right(scenario, Build::Dynamic, 3);
    }
}

/// The same where twins have the program's ids; and whoever has them is told of a file that they have in common.
#[test]
fn shared_memory_of_isolated_twins() {
    let Some(original) = Original::start("twins", "named", Build::Dynamic) else { return };
    let Original { scratch, stillpoint, directory, running } = original;
    let output = stillpoint.run(&["fork", &running.pid.to_string(), "--count", "2", "--isolated"]).ok();
    let common = directory.join("common");
    assert!(output.stderr.contains(&format!("{} is mapped shared", common.display())), "{output}");
    fs::write(directory.join("go"), "").expect("go");
    let lines = results(&directory, 3);
    assert!(
        lines.iter().all(|line| *line == format!("good {}", running.pid)),
        "{lines:?} {}",
        running.said()
    );
    running.finish("the original");
    scratch.nothing_is_left("in the end");
}

/// What each would take from the other, all of it named at once; and the program still has what is its own.
#[test]
fn what_there_is_only_once() {
    let Some(original) = Original::start("twins", "only_once", Build::Dynamic) else { return };
    let Original { stillpoint, running, .. } = &original;
    let pid = running.pid.to_string();
    let ours = &format!("process {pid} (twins-dynamic) has it open");
    for how in [&[][..], &["--isolated"]] {
        let refused = stillpoint.run(&[&["fork", &pid], how].concat());
        refused.fails(
            3,
            &[
                "twin of twins",
                "FIFO",
                ours,
                "message queue /stillpoint-twins-",
                "TCP 0.0.0.0:",
                "UDP 0.0.0.0:",
            ],
        );
    }
    stillpoint.run(&["fork", &pid, "--count", "2"]).fails(3, &["FIFO", "only one of 2 can have it"]);
    original.all_are_good(&[]);
}

/// Programs that compute beside each other, with memory that comes later; and twins of twins, as jobs.
#[test]
fn jobs_of_their_own() {
    let Some(original) = Original::start("clones", "compute", Build::Dynamic) else { return };
    let Original { scratch, stillpoint, directory, running } = original;
    let name = format!("clones-dynamic-{}", running.pid);
    let all = twins(&stillpoint, &running.pid.to_string(), 2);
    let jobs: Vec<&str> = all.iter().filter_map(|twin| twin["job"].as_str()).collect();
    assert_eq!(jobs, ["", "-2"].map(|number| format!("{name}-twin{number}")));
    let next = twins(&stillpoint, jobs[0], 1);
    assert_eq!(next[0]["of"].as_str(), Some(jobs[0]));
    // Isolated twins of one beside the program have its ids, as it sees them.
    let isolated = stillpoint.run(&["fork", jobs[1], "--isolated", "--json"]).ok().json();
    assert_eq!(isolated["twins"][0]["private_pid"], all[1]["pid"]);
    let listed = stillpoint.run(&["ls"]).ok().stdout;
    assert!(jobs.iter().all(|job| listed.contains(job)), "{listed}");
    let checkpoint = stillpoint.checkpoint(jobs[1], jobs[1], &[]);
    fs::write(directory.join("go"), "").expect("go");
    let lines = results(&directory, 5);
    right!(lines.iter().all(|line| line.starts_with("good")), "{lines:?}");
    running.finish("the original");
    scratch.nothing_is_left("the twins");
    for file in ["results", "go"] {
        fs::remove_file(directory.join(file)).expect("a file");
    }
    stillpoint.restore_at_once(&checkpoint.name(), &[]);
    fs::write(directory.join("go"), "").expect("go");
    right!(results(&directory, 1)[0].starts_with("good"));
    scratch.nothing_is_left("in the end");
}

/// musl knows of all locks who holds them. glibc does not: then there is no such twin, and all is told; an isolated one is.
#[test]
fn held_locks() {
    let scenarios = [
        ("held_recursive", "a recursive mutex"),
        ("held_checking", "an error-checking mutex"),
        ("held_inherits", "a mutex that inherits priorities"),
        ("held_for_writing", "a lock for writing"),
        ("waited_for", "waits for a lock"),
    ];
    for (scenario, what) in scenarios {
        find_all_right(scenario, Build::Musl, 1);
        for build in [Build::Dynamic, Build::Static] {
            let Some(original) = Original::start("twins", scenario, build) else { return };
            let pid = original.running.pid.to_string();
            let thread = format!("thread {pid}");
            let words = if scenario == "waited_for" { "thread" } else { &thread };
            original
                .stillpoint
                .run(&["fork", &pid])
                .fails(3, &["which runs on unharmed", words, what, "--isolated"]);
            let is_alone = || original.scratch.processes() == [original.running.pid];
            wait_for("the end of those who looked", PATIENCE, || is_alone().then_some(()));
            original.stillpoint.run(&["fork", &pid, "--isolated"]).ok();
            let Original { scratch, directory, running, .. } = original;
            fs::write(directory.join("go"), "").expect("go");
            let lines = results(&directory, 2);
            right!(lines.iter().all(|line| *line == format!("good {}", running.pid)), "{lines:?}");
            running.finish("the original");
            scratch.nothing_is_left("in the end");
        }
    }
    for build in [Build::Dynamic, Build::Musl] {
        find_all_right("held_stream", build, 1);
    }
}

/// Where a lock is held for a moment, another moment is waited for.
#[test]
fn a_lock_that_is_held_at_times() {
    let Some(original) = Original::start("twins", "held_at_times", Build::Dynamic) else { return };
    let twins: Vec<u32> = (0..10).flat_map(|_| original.twins(1)).collect();
    original.all_are_good(&twins);
}

/// One privilege is enough, that which is made for it; those to make namespaces and to look into others are not needed.
#[test]
fn who_may_have_twins() {
    let Some(target) = Target::new("twins", "locks", Build::Dynamic) else { return };
    let Some(setpriv) = installed(&["setpriv"], "util-linux").filter(|_| kernel::is_root()) else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("target"));
    // What is theirs, and a command and a program that they may reach.
    let [own, program] = ["stillpoint", "twins"].map(|name| directory.join(name));
    fs::copy(stillpoint_tests::stillpoint::binary(), &own)
        .and(fs::copy(&target.program, &program))
        .expect("copies");
    let output = File::create(directory.join("out")).expect("a file");
    const NOBODY: u32 = 65534;
    for theirs in [&directory, &directory.join("out")] {
        std::os::unix::fs::chown(theirs, Some(NOBODY), Some(NOBODY)).expect("chown");
    }
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let mut command = alone(&setpriv);
    command.args(nobody).arg(&program).arg("locks").arg(&directory).current_dir(&directory);
    command.env(MARK, scratch.path()).stdin(Stdio::null()).stdout(output);
    let running = Running::new(command.spawn().expect("setpriv"), &directory);
    running.await_ready();
    let (pid, store) = (running.pid.to_string(), directory.join("store"));
    let fork = |capabilities: &[&str]| {
        let mut command = Command::new(&setpriv);
        command.args(nobody).args(capabilities).arg(&own).args(["fork", &pid, "--json"]);
        command.current_dir(&directory).env("STILLPOINT_STORE", &store).env(MARK, scratch.path());
        Stillpoint::wait(command, scratch.path())
    };
    // Without, a twin is an isolated one.
    let told = fork(&[]).ok().json();
    right_eq!(told["twins"][0]["private_pid"].as_u64(), Some(u64::from(running.pid)), "{told}");
    let isolated = told["twins"][0]["pid"].as_u64().expect("a process id") as u32;
    kernel::kill(isolated, kernel::SIGKILL);
    kernel::wait_gone(isolated, PATIENCE);
    let told = fork(&["--inh-caps=+checkpoint_restore", "--ambient-caps=+checkpoint_restore"]).ok().json();
    let twin = told["twins"][0]["pid"].as_u64().expect("a process id") as u32;
    Original { scratch, stillpoint, directory, running }.all_are_good(&[twin]);
}

/// The command, and all of ours, are killed at a random moment: the program goes on, and so do what twins there are.
#[test]
fn killed_meanwhile() {
    let Some(original) = Original::start("clones", "compute", Build::Dynamic) else { return };
    let Original { scratch, stillpoint, directory, running } = original;
    let (pid, own) = (running.pid.to_string(), running.pid);
    let is_ours = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.starts_with("stillpoint") && kernel::alive(*pid)
    };
    for _ in 0..12 {
        let mut front = stillpoint.command(&["fork", &pid, "--count", "2"]);
        let output = File::create(scratch.path().join("front")).expect("a file");
        front.stdin(Stdio::null()).stdout(output.try_clone().expect("a file")).stderr(output);
        let mut front = front.spawn().expect("fork");
        std::thread::sleep(Duration::from_micros(scratch.random().below(400_000)));
        for ours in scratch.processes().into_iter().filter(is_ours) {
            kernel::kill(ours, kernel::SIGKILL);
        }
        let _ = front.wait();
        right!(kernel::alive(own));
        wait_for("the end of all others", PATIENCE, || {
            let others: Vec<u32> = scratch.processes().into_iter().filter(|&other| other != own).collect();
            others.iter().for_each(|&other| kernel::kill(other, kernel::SIGKILL));
            others.is_empty().then_some(())
        });
    }
    fs::write(directory.join("go"), "").expect("go");
    let lines = results(&directory, 1);
    right!(lines[0].starts_with("good"), "{lines:?}");
    running.finish("the original");
}

/// A program that checks itself and says so has twins; the original ends, and they go on.
#[track_caller]
fn go_on(scratch: Scratch, command: &[&str]) {
    if undisturbed_only() || !kernel::is_root() {
        return;
    }
    let path = scratch.path().join("said");
    let said = || fs::read_to_string(&path).expect("what they said");
    let output = File::options().append(true).create(true).open(&path).expect("a file");
    let mut run = alone(command[0]);
    run.args(&command[1..]).stdin(Stdio::null()).stdout(output.try_clone().expect("a file")).stderr(output);
    run.current_dir(scratch.path()).env(MARK, scratch.path());
    let mut child = run.spawn().expect("the program");
    let goes_on = |of: &str, until: usize| {
        wait_for(&format!("{of} to count"), PATIENCE, || {
            right!(!said().contains("wrong"), "{}", said());
            (said().lines().count() > until).then_some(())
        });
    };
    goes_on("the program", 3);
    let stillpoint = scratch.stillpoint();
    let all = twins(&stillpoint, &child.id().to_string(), 2);
    child.kill().and_then(|()| child.wait()).expect("killed");
    for twin in &all {
        goes_on("twins", said().lines().count() + 60);
        let pid = twin["pid"].as_u64().expect("a process id") as u32;
        right!(kernel::alive(pid), "{}", said());
        kernel::kill(pid, kernel::SIGKILL);
        kernel::wait_gone(pid, PATIENCE);
    }
    scratch.nothing_is_left("in the end");
}

#[test]
fn jvms() {
    let Some(java) = installed(&["java"], "default-jdk-headless") else { return };
    let Some(javac) = installed(&["javac"], "default-jdk-headless") else { return };
    let scratch = Scratch::new();
    let built = Command::new(javac).arg("-d").arg(scratch.path()).arg(source("Churn.java")).status();
    assert!(built.expect("javac").success(), "Churn.java does not build");
    go_on(scratch, &[java.to_str().expect("path"), "-Xmx96m", "Churn"]);
}

#[test]
fn node() {
    let Some(node) = installed(&["node"], "nodejs") else { return };
    go_on(Scratch::new(), &[&node.to_string_lossy(), &source("churn.js").to_string_lossy()]);
}

#[test]
fn go() {
    // The second is stopped for its collector by signals to its threads.
    for program in ["churn.go", "preempt.go"] {
        let scratch = Scratch::new();
        let Some(binary) = built_by_go(program, &scratch) else { return };
        go_on(scratch, &[&binary.to_string_lossy()]);
    }
}

#[test]
fn python() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    // It has children, too.
    go_on(Scratch::new(), &[&python.to_string_lossy(), &source("churn.py").to_string_lossy(), "children"]);
}
