//! Jobs and whoever takes their checkpoints: one after the other, as time passes, for clients that go away, and when
//! one of the processes involved is killed.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};
use stillpoint_tests::observe::has_mapping_with;
use stillpoint_tests::target::Running;
use stillpoint_tests::{
    Build, Scratch, Stillpoint, Target, kernel, right, skipped, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// A job in the background.
struct Job {
    stillpoint: Stillpoint,
    name: &'static str,
    pid: u32,
    directory: PathBuf,
}

impl Job {
    /// Starts a scenario of `files.c` and waits until it is ready.
    fn start(scratch: &Scratch, name: &'static str, scenario: &str, extra: &[&str]) -> Self {
        Self::start_in(scratch, scratch.stillpoint(), name, scenario, extra)
    }

    fn start_in(
        scratch: &Scratch,
        stillpoint: Stillpoint,
        name: &'static str,
        scenario: &str,
        extra: &[&str],
    ) -> Self {
        let target = Target::new("files", scenario, Build::Dynamic).expect("cc");
        let directory = scratch.directory(name);
        let mut arguments = vec!["run", "--detach", "--json", "--name", name];
        arguments.extend(extra);
        arguments.push("--");
        let mut command = stillpoint.command(&arguments);
        command.arg(&target.program).arg(&target.scenario).arg(&directory);
        let out = fs::File::create(directory.join("out")).expect("out");
        // The answer goes to standard error: the job keeps standard output.
        let output = command.stdout(out).stderr(Stdio::piped()).output().expect("run");
        let answer: serde_json::Value = serde_json::from_slice(&output.stderr).expect("an answer");
        let pid = answer["pid"].as_u64().expect("pid") as u32;
        Running::restored(pid, &directory).await_ready();
        Job { stillpoint, name, pid, directory }
    }

    fn checkpoint(&self, extra: &[&str]) -> serde_json::Value {
        self.stillpoint.run(&[&["checkpoint", self.name, "--json"], extra].concat()).ok().json()
    }

    /// What `ls` tells of it while it runs.
    fn listed(&self) -> serde_json::Value {
        listed(&self.stillpoint, self.name)
    }

    fn supervisor(&self) -> u32 {
        self.listed()["supervisor_pid"].as_u64().expect("supervisor") as u32
    }

    /// The process beside its supervisor, if it has been started.
    fn checkpointer(&self) -> Option<u32> {
        let supervisor = self.supervisor().to_string();
        let is_it = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            kernel::status(*pid, "PPid").as_deref() == Some(&supervisor)
                && line.split(|&b| b == 0).any(|word| word == b"checkpointer")
        };
        kernel::processes().into_iter().find(is_it)
    }

    fn finish(self, what: &str) {
        Running::restored(self.pid, &self.directory).finish(what);
    }

    /// Kills it, brings it back, and lets it check everything.
    fn comes_back(self, what: &str) {
        kernel::kill(self.pid, kernel::SIGKILL);
        kernel::wait_gone(self.pid, PATIENCE);
        let pid = self.stillpoint.restore_detached(self.name, &[]);
        Running::restored(pid, &self.directory).finish(what);
    }
}

fn listed(stillpoint: &Stillpoint, job: &str) -> serde_json::Value {
    let jobs = stillpoint.run(&["ls", "--json"]).ok().json();
    let job = jobs.as_array().expect("array").iter().find(|j| j["job"] == job);
    job.map(|j| j["running"].clone()).unwrap_or_default()
}

/// Whether the kernel notes what a process writes, on behalf of anybody.
fn is_followed(pid: u32) -> bool {
    has_mapping_with(pid, &["uw"])
}

fn process(value: &serde_json::Value) -> u32 {
    u32::try_from(number(value)).expect("a process id")
}

fn number(value: &serde_json::Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("not a number: {value}"))
}

#[test]
fn further_checkpoints_save_what_changed() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let job = Job::start(&scratch, "web", "large", &[]);
    assert!(!is_followed(job.pid), "nobody has asked for a checkpoint");
    let first = job.checkpoint(&[]);
    assert_eq!(first["incremental"], false);
    if !is_followed(job.pid) {
        return skipped("writes cannot be followed here");
    }
    let second = job.checkpoint(&["--incremental", "--label", "again"]);
    assert_eq!((&second["incremental"], &second["label"]), (&true.into(), &"again".into()), "{second}");
    assert!(number(&second["written_bytes"]) < MIB, "{second}");
    assert!(number(&second["bytes"]) > 32 * MIB, "{second}");
    assert!(second["story"].as_array().is_some_and(|s| !s.is_empty()), "{second}");
    // Through the process id it is the same job.
    let by_pid = job.stillpoint.run(&["checkpoint", &job.pid.to_string(), "--json"]).ok().json();
    assert_eq!((&by_pid["job"], &by_pid["incremental"]), (&"web".into(), &true.into()), "{by_pid}");
    let full = job.checkpoint(&["--full"]);
    assert_eq!(full["incremental"], false);
    assert!(number(&full["written_bytes"]) > 32 * MIB, "{full}");
    // One of another job is no base for this one, nor the other way round.
    let other = job.checkpoint(&["--name", "other"]);
    assert!(number(&other["bytes"]) > 32 * MIB, "{other}");
    let back = job.checkpoint(&["--incremental"]);
    assert_eq!(back["bytes"], full["bytes"], "{back}");
    assert_eq!(back["incremental"].as_bool(), Some(back["notes"] == serde_json::json!([])), "{back}");
    let told = job.stillpoint.run(&["checkpoint", "web", "--verbose"]).ok();
    assert!(!told.stderr.is_empty() && told.stdout.lines().count() == 1, "{told}");
    let stop = job.checkpoint(&["--engine", "stop", "--incremental"]);
    assert!(stop["notes"][0].as_str().is_some_and(|n| n.contains("engine stop")), "{stop}");
    job.checkpoint(&["--buffer", "1MiB"]);
    job.stillpoint.verified();
    job.comes_back("incremental");
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_process_that_is_no_job_is_saved_completely_and_the_user_is_told() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = Target::new("files", "simple", Build::Dynamic)
        .expect("cc")
        .start(&scratch.directory("target"), scratch.path());
    let pid = running.pid.to_string();
    let output = stillpoint.run(&["checkpoint", &pid, "--incremental"]).ok();
    assert!(output.stderr.contains(&format!("stillpoint adopt {pid}")), "{output}");
    assert!(!is_followed(running.pid), "nothing stays behind");
    running.finish("after a checkpoint");
}

#[test]
fn many_clients_have_their_turns() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let job = Job::start(&scratch, "web", "large", &[]);
    let mut ids: Vec<u64> = std::thread::scope(|scope| {
        let ask = || number(&job.checkpoint(&[])["id"]);
        let clients: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        clients.into_iter().map(|c| c.join().expect("client")).collect()
    });
    ids.sort_unstable();
    assert_eq!(ids, (1..=8).collect::<Vec<u64>>());
    job.stillpoint.run(&["verify", "web"]).ok();
    job.comes_back("after many clients");
}

/// Connects to the socket of a job, however long its path is.
fn call(job: &Job) -> UnixStream {
    let folder = fs::File::open(job.stillpoint.store().join("jobs").join(job.name)).expect("folder");
    use std::os::fd::AsRawFd;
    UnixStream::connect(format!("/proc/self/fd/{}/control", folder.as_raw_fd())).expect("connect")
}

#[test]
fn clients_that_vanish_hang_or_talk_nonsense() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let job = Job::start(&scratch, "web", "large", &[]);
    // One says nothing, one asks and never listens, one talks nonsense.
    let silent = call(&job);
    let mut deaf = call(&job);
    let question = br#"{"version":1,"checkpoint":{"target":"web","job":"web","label":null,"engine":"auto","buffer":16777216,"full":false,"kill":false}}"#;
    deaf.write_all(question).and_then(|()| deaf.write_all(b"\n")).expect("ask");
    let mut foolish = call(&job);
    foolish.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("say");
    let mut answer = String::new();
    foolish.read_to_string(&mut answer).expect("answer");
    assert!(answer.contains("failed") && answer.contains("another version"), "{answer}");
    let mut endless = call(&job);
    while endless.write_all(&[b'x'; 4096]).is_ok() {}
    for _ in 0..10 {
        let mut client =
            job.stillpoint.command(&["checkpoint", "web"]).stdout(Stdio::null()).spawn().expect("client");
        std::thread::sleep(Duration::from_micros(scratch.random().below(30_000)));
        client.kill().and_then(|()| client.wait()).expect("kill");
    }
    let last = job.checkpoint(&[]);
    assert!(number(&last["id"]) >= 2, "the one who does not listen has its checkpoint too: {last}");
    // The end of the job is told at once, whoever holds the line.
    let began = Instant::now();
    let supervisor = job.supervisor();
    job.finish("after strange clients");
    kernel::wait_gone(supervisor, PATIENCE);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    drop((silent, deaf));
}

#[test]
fn a_supervisor_that_is_killed_leaves_nothing_behind() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let job = Job::start(&scratch, "web", "large", &[]);
    job.checkpoint(&[]);
    let checkpointer = job.checkpointer().expect("it has taken a checkpoint");
    kernel::kill(job.supervisor(), kernel::SIGKILL);
    kernel::wait_gone(checkpointer, PATIENCE);
    assert!(!is_followed(job.pid) && kernel::alive(job.pid));
    // The job goes on, and is still one.
    let next = job.checkpoint(&["--incremental"]);
    assert_eq!((&next["job"], &next["incremental"]), (&"web".into(), &false.into()), "{next}");
    assert!(number(&next["bytes"]) > 32 * MIB, "{next}");
    assert!(next["notes"][0].as_str().is_some_and(|n| n.contains("stillpoint adopt")), "{next}");
    assert!(!is_followed(job.pid), "nothing stays behind");
    // Another takes over.
    let pid = job.pid.to_string();
    let answer = job.stillpoint.run(&["adopt", &pid, "--json"]).ok().json();
    assert_eq!(answer["job"], "web");
    assert_eq!(process(&answer["supervisor_pid"]), job.supervisor());
    job.checkpoint(&[]);
    assert_eq!(job.checkpoint(&["--incremental"])["incremental"], is_followed(job.pid));
    job.comes_back("with another supervisor");
}

#[test]
fn a_checkpointer_that_is_killed_is_replaced_or_done_without() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let job = Job::start(&scratch, "web", "large", &[]);
    for _ in 0..3 {
        job.checkpoint(&[]);
        let Some(checkpointer) = job.checkpointer() else {
            // It had ended soon after its start.
            let listed = job.listed();
            let why = listed["failing"]["what"].as_str().unwrap_or_default();
            assert!(why.contains("ends as soon as it is started (signal: 9 (SIGKILL))"), "{listed}");
            break;
        };
        kernel::kill(checkpointer, kernel::SIGKILL);
        kernel::wait_gone(checkpointer, PATIENCE);
        wait_for("the job to be let go of", PATIENCE, || (!is_followed(job.pid)).then_some(()));
    }
    assert!(number(&job.checkpoint(&[])["bytes"]) > 32 * MIB);
    job.comes_back("after its checkpointer was killed");
}

#[test]
fn a_checkpointer_that_is_stopped_is_not_waited_for() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let job = Job::start(&scratch, "web", "large", &[]);
    job.checkpoint(&[]);
    let checkpointer = job.checkpointer().expect("it has taken a checkpoint");
    kernel::kill(checkpointer, rustix::process::Signal::STOP);
    let without = job.checkpoint(&[]);
    assert!(without["notes"][0].as_str().is_some_and(|n| n.contains("does not answer")), "{without}");
    assert!(number(&without["bytes"]) > 32 * MIB, "complete, whoever follows the job: {without}");
    kernel::kill(checkpointer, kernel::SIGCONT);
    let after = job.checkpoint(&[]);
    assert_eq!(after["notes"], serde_json::json!([]), "{after}");
    assert_eq!(after["bytes"], without["bytes"], "{after}");
    job.comes_back("after its checkpointer was stopped");
}

#[test]
fn a_job_that_ends_in_the_middle() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    for _ in 0..8 {
        let job = Job::start(&scratch, "web", "large", &[]);
        let delay = Duration::from_micros(scratch.random().below(60_000));
        let output = std::thread::scope(|scope| {
            let client = scope.spawn(|| job.stillpoint.run(&["checkpoint", "web"]));
            std::thread::sleep(delay);
            kernel::kill(job.pid, kernel::SIGKILL);
            client.join().expect("client")
        });
        match output.code() {
            0 => {}
            1 => drop(output.fails(1, &["ended", "ending"])),
            _ => {
                drop(output.fails(2, &["ended", "ending", "no process", "zombie", "does not run", "no job"]))
            }
        }
        kernel::wait_gone(job.pid, PATIENCE);
        wait_for("the job to be over", PATIENCE, || job.listed().is_null().then_some(()));
    }
    scratch.nothing_is_left("in the end");
}

#[test]
fn a_store_with_a_long_path() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let store = scratch.path().join("x".repeat(120)).join("y".repeat(120));
    let stillpoint = scratch.stillpoint().with_store(&store);
    let job = Job::start_in(&scratch, stillpoint, "web", "simple", &[]);
    job.checkpoint(&[]);
    assert!(job.checkpointer().is_some(), "it was reached through its socket");
    job.finish("with a long path");
}

/// What is made for the job is not for its checkpoints: limits are raised, or whoever asks takes them.
#[track_caller]
fn narrow_limits(limits: &str, why: Option<&str>) {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("files", "large", Build::Dynamic).expect("cc");
    let directory = scratch.directory("job");
    // Root may raise what is hard, unless it may not.
    let mut command = std::process::Command::new("setpriv");
    command
        .args(["--bounding-set", "-sys_resource", "bash", "-c"])
        .args([&format!("{limits}; exec \"$@\""), "bash"])
        .arg(stillpoint_tests::stillpoint::binary());
    let prepared = stillpoint.command(&["run", "--detach", "--name", "web", "--"]);
    command.args(prepared.get_args()).arg(&target.program).arg("large").arg(&directory);
    command.envs(prepared.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let out = fs::File::create(directory.join("out")).expect("out");
    assert!(command.stdin(Stdio::null()).stdout(out).stderr(Stdio::null()).status().expect("run").success());
    let pid = process(&listed(&stillpoint, "web")["pid"]);
    let running = Running::restored(pid, &directory);
    running.await_ready();
    for _ in 0..2 {
        assert!(number(&stillpoint.checkpoint("web", "web", &[]).json["bytes"]) > 32 * MIB);
    }
    let listed = listed(&stillpoint, "web");
    let told = listed["failing"]["what"].as_str();
    match why {
        Some(why) => assert!(told.is_some_and(|told| told.contains(why)), "{told:?}"),
        None => assert_eq!(told, None),
    }
    running.finish("with narrow limits");
}

#[test]
fn a_job_with_narrow_limits() {
    narrow_limits("ulimit -S -f 100; ulimit -S -n 40", None);
}

#[test]
fn a_job_with_narrow_limits_for_ever() {
    narrow_limits(
        "ulimit -f 100",
        Some("(exit status: 1): the limits of the job are too narrow for its checkpoints"),
    );
}

#[test]
fn as_time_passes() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let job = Job::start(&scratch, "web", "large", &["--every", "150ms", "--keep", "2"]);
    let listed = job.listed();
    assert_eq!((&listed["every_s"], &listed["keep"]), (&0.15.into(), &2.into()), "{listed}");
    let newest = |stillpoint: &Stillpoint| stillpoint.checkpoints("web").last().copied().unwrap_or(0);
    wait_for("some checkpoints", PATIENCE, || (newest(&job.stillpoint) >= 4).then_some(()));
    // Others may ask as well, and older ones go.
    let asked = number(&job.checkpoint(&["--label", "by hand"])["id"]);
    wait_for("more of them", PATIENCE, || (newest(&job.stillpoint) >= asked + 3).then_some(()));
    assert!(job.stillpoint.checkpoints("web").len() <= 3);
    job.stillpoint.run(&["verify", "web"]).ok();
    // One after the other, of both lives, each restored.
    kernel::kill(job.pid, kernel::SIGKILL);
    kernel::wait_gone(job.pid, PATIENCE);
    let before = newest(&job.stillpoint);
    let pid =
        job.stillpoint.restore_detached("web", &["--every", "100ms", "--keep", "3", "--engine", "stop"]);
    wait_for("some more checkpoints", PATIENCE, || (newest(&job.stillpoint) >= before + 3).then_some(()));
    kernel::kill(pid, kernel::SIGKILL);
    kernel::wait_gone(pid, PATIENCE);
    job.comes_back("from a periodic checkpoint");
    scratch.nothing_is_left("in the end");
}

#[test]
fn periodic_checkpoints_that_are_refused_are_tried_again() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let gone = scratch.path().join("gone");
    if kernel::which("python3").is_none() {
        return skipped("needs python3");
    }
    // A userfaultfd stands in the way until it is closed.
    let script = "import ctypes, os, sys, time\n\
        fd = ctypes.CDLL(None).syscall(323, os.O_CLOEXEC | 1)\n\
        while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n\
        os.close(fd)\n\
        while True: time.sleep(100)";
    let mut command = stillpoint
        .command(&["run", "--detach", "--every", "100ms", "--name", "sh", "--", "python3", "-c", script]);
    command.arg(&gone).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(command.status().expect("run").success());
    let failing = || listed(&stillpoint, "sh")["failing"].clone();
    let told = wait_for("a failure", PATIENCE, || Some(failing()).filter(|f| !f.is_null()));
    assert!(told["what"].as_str().is_some_and(|w| w.contains("userfaultfd")), "{told}");
    let list = stillpoint.run(&["ls", "sh"]).ok();
    assert!(list.stderr.contains("fail since"), "{list}");
    fs::write(&gone, "").expect("gone");
    wait_for("a checkpoint", PATIENCE, || (!stillpoint.checkpoints("sh").is_empty()).then_some(()));
    wait_for("the failure to be over", PATIENCE, || failing().is_null().then_some(()));
}

#[test]
fn a_job_in_a_private_pid_namespace() {
    if !kernel::is_root() {
        return skipped("needs a private pid namespace");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = Target::new("files", "large", Build::Dynamic)
        .expect("cc")
        .start(&scratch.directory("target"), scratch.path());
    stillpoint.checkpoint(running.pid, "job", &[]);
    // The original still runs: its id is taken.
    let output = stillpoint.run(&["restore", "job", "--detach", "--json", "--every", "1h"]).ok();
    let pid = process(&output.json()["pid"]);
    assert_eq!(process(&output.json()["private_pid"]), running.pid);
    let first = stillpoint.checkpoint("job", "job", &[]);
    let second = stillpoint.checkpoint("job", "job", &["--incremental"]);
    assert_eq!(second.json["incremental"], is_followed(pid), "{:?}", second.json);
    assert_eq!(process(&second.json["pid"]), pid);
    assert_eq!(first.json["bytes"], second.json["bytes"]);
    let directory = running.directory().to_owned();
    running.kill();
    Running::restored(pid, &directory).finish("beside the original");
    scratch.nothing_is_left("in the end");
}

fn adopt(stillpoint: &Stillpoint, pid: u32, name: &str, extra: &[&str]) -> serde_json::Value {
    let pid = pid.to_string();
    stillpoint.run(&[&["adopt", &pid, "--name", name, "--json"], extra].concat()).ok().json()
}

#[test]
fn adoption() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("files", "large", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("target"), scratch.path());
    let pid = running.pid.to_string();
    let answer = adopt(&stillpoint, running.pid, "old", &[]);
    assert_eq!((&answer["job"], process(&answer["pid"])), (&"old".into(), running.pid), "{answer}");
    let supervisor = process(&answer["supervisor_pid"]);
    assert_eq!(listed(&stillpoint, "old")["adopted"], true);
    stillpoint.run(&["checkpoint", "old"]).ok();
    let second = stillpoint.run(&["checkpoint", &pid, "--json", "--incremental"]).ok().json();
    assert_eq!(second["incremental"], is_followed(running.pid), "{second}");
    assert_eq!(second["job"], "old");

    // What cannot be.
    let other = target.start(&scratch.directory("other"), scratch.path());
    let other_pid = other.pid.to_string();
    let supervisor_pid = supervisor.to_string();
    stillpoint.run(&["adopt", &pid, "--name", "new"]).fails(2, &["job old already"]);
    stillpoint.run(&["adopt", &supervisor_pid]).fails(2, &["job old already"]);
    stillpoint.run(&["adopt", &other_pid, "--name", "old"]).fails(2, &["job old is running"]);
    stillpoint.run(&["adopt", "2"]).fails(2, &["kernel thread", "no process"]);
    stillpoint.run(&["adopt", "4194304"]).fails(2, &["no process"]);
    stillpoint.run(&["adopt", "old"]).fails(2, &["no process id"]);
    stillpoint.run(&["release", "nobody"]).fails(2, &["no job nobody"]);
    let job = Job::start(&scratch, "mine", "simple", &[]);
    stillpoint.run(&["release", "mine"]).fails(2, &["not adopted"]);
    job.finish("not released");

    // Let go of, and taken up again under a name with checkpoints.
    stillpoint.run(&["release", "old"]).ok();
    assert!(listed(&stillpoint, "old").is_null() && !is_followed(running.pid));
    right!(!kernel::alive(supervisor) && kernel::alive(running.pid));
    let answer = adopt(&stillpoint, running.pid, "old", &["--every", "100ms", "--keep", "3"]);
    wait_for("some checkpoints", PATIENCE, || {
        (stillpoint.checkpoints("old").last() >= Some(&5)).then_some(())
    });
    // A signal does the same.
    kernel::kill(process(&answer["supervisor_pid"]), rustix::process::Signal::TERM);
    wait_for("it to be no job", PATIENCE, || listed(&stillpoint, "old").is_null().then_some(()));
    wait_for("it to be let go", PATIENCE, || (!is_followed(running.pid)).then_some(()));
    right!(kernel::alive(running.pid));

    // Its end is noticed.
    let answer = adopt(&stillpoint, running.pid, "old", &[]);
    stillpoint.run(&["checkpoint", "old"]).ok();
    running.finish("adopted");
    kernel::wait_gone(process(&answer["supervisor_pid"]), PATIENCE);
    assert!(listed(&stillpoint, "old").is_null());
    stillpoint.verified();
    let pid = stillpoint.restore_detached("old", &[]);
    Running::restored(pid, &scratch.path().join("target")).finish("restored");
    other.finish("never adopted");
    scratch.nothing_is_left("in the end");
}

/// Somebody else's process, asked for by an ordinary user.
#[test]
fn adoption_of_another_users_process() {
    if !kernel::is_root() || kernel::which("setpriv").is_none() {
        return skipped("needs to be root to become somebody else, and setpriv");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let target = Target::new("files", "simple", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("target"), scratch.path());
    let answer = scratch.stillpoint().run_as_nobody(&["adopt", &running.pid.to_string()]);
    answer.fails(2, &["belongs to user 0"]);
    running.finish("not adopted");
}

/// Writes to 64 of its pages again and again, and to all 16384 of them as soon as there is a file `more`.
const WRITER: &str = "import os, sys, time\n\
    more = os.path.join(sys.argv[1], 'more')\n\
    some = bytearray(64 << 20)\n\
    while True:\n\
    \tstep = 4096 if os.path.exists(more) else 1 << 20\n\
    \tfor i in range(0, len(some), step): some[i] = (some[i] + 1) % 256\n\
    \ttime.sleep(0.01)";

/// The interval of Daly's estimate for what a checkpoint is told to cost, and no shorter than it takes to write one.
fn interval_that_pays(pace: &serde_json::Value) -> f64 {
    let seconds = |key: &str| pace[key].as_f64().unwrap_or_else(|| panic!("{key} is not told: {pace}"));
    let (cost, mtbf) = (seconds("cost_s"), seconds("mtbf_s"));
    let x = cost / (2.0 * mtbf);
    let optimum = (2.0 * cost * mtbf).sqrt() * (1.0 + x.sqrt() / 3.0 + x / 9.0) - cost;
    assert_eq!(pace["bounded_by_write"], optimum < seconds("write_s"), "{pace}");
    optimum.max(seconds("write_s"))
}

/// What `show` tells of how often checkpoints pay, when there is a checkpoint of the job, and it is so.
fn pace(
    stillpoint: &Stillpoint,
    what: &str,
    is_so: impl Fn(&serde_json::Value) -> bool,
) -> serde_json::Value {
    let pace = wait_for(what, Duration::from_secs(120), || {
        // Whoever looks all the time makes it wait for a processor, and checkpoints dear.
        std::thread::sleep(Duration::from_millis(100));
        let shown = stillpoint.run(&["show", "sim", "--json"]);
        Some(shown).filter(|shown| shown.code() == 0).map(|shown| shown.json()["auto"].clone()).filter(&is_so)
    });
    let (told, pays) = (pace["interval_s"].as_f64().expect("an interval"), interval_that_pays(&pace));
    assert!((told - pays).abs() < 0.01 * pays, "{pays} s would pay: {pace}");
    pace
}

#[test]
fn checkpoints_are_taken_as_often_as_pays() {
    if undisturbed_only() {
        return;
    }
    if kernel::which("python3").is_none() {
        return skipped("needs python3");
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("job"));
    let terms = ["run", "--detach", "--name", "sim", "--every", "auto", "--mtbf", "10m", "--keep", "2"];
    let mut command = stillpoint.command(&[&terms[..], &["--", "python3", "-c", WRITER]].concat());
    command.arg(&directory).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(command.status().expect("run").success());
    let begun = Instant::now();
    assert!(listed(&stillpoint, "sim")["auto"].is_null(), "nothing is known of what one costs");
    // After the first one there is a pace, and what it comes from.
    let first = pace(&stillpoint, "a first checkpoint", |pace| !pace.is_null());
    assert!(begun.elapsed() > Duration::from_secs(9), "the first one came at once");
    assert_eq!((&first["mtbf_s"], &first["mtbf_given"]), (&600.0.into(), &true.into()), "{first}");
    assert!(first["pause_s"].as_f64() > Some(0.0) && first["waits_s"] == 0.0, "{first}");
    let text = stillpoint.run(&["show", "sim"]).ok().stdout;
    assert!(text.contains("one costs the program") && text.contains("as --mtbf says"), "{text}");
    let it = wait_for("ls to tell the same", PATIENCE, || {
        let (it, shown) =
            (listed(&stillpoint, "sim"), stillpoint.run(&["show", "sim", "--json"]).ok().json());
        (it["auto"] == shown["auto"]).then_some(it)
    });
    if !is_followed(process(&it["pid"])) {
        return skipped("writes cannot be followed here");
    }
    // Further ones come by themselves, and save what changed, which costs less to fault in than all did.
    let little = pace(&stillpoint, "a checkpoint of little", |pace| {
        pace["faults_s"].as_f64() < first["faults_s"].as_f64().map(|all| all / 4.0)
    });
    fs::write(directory.join("more"), "").expect("writes");
    let much = pace(&stillpoint, "checkpoints of much", |pace| {
        pace["faults_s"].as_f64() > little["faults_s"].as_f64().map(|little| little * 4.0)
    });
    assert_ne!(much["interval_s"], little["interval_s"]);
    let ids = stillpoint.checkpoints("sim");
    assert!(ids.last() > Some(&2) && ids.len() <= 3, "{ids:?}");
    let seen = stillpoint.run(&["top", "--json", "sim"]).ok().json()["jobs"][0].clone();
    assert!(seen["interval_s"].as_f64() > Some(0.0), "{seen}");
}
