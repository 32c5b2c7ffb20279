//! `run`: a job under supervision behaves, and ends, as it would without.
#![allow(clippy::unwrap_used)]

use crate::common::{Bench, Outcome, eventually, is_alive, kill, read};
use rustix::process::Signal;
use std::process::Stdio;

#[test]
fn the_exit_code_is_that_of_the_job() {
    let bench = Bench::new();
    for code in [0, 1, 2, 3, 42, 255] {
        assert_eq!(bench.run(&["run", "--", "sh", "-c", &format!("exit {code}")]).code, Some(code));
    }
}

#[test]
fn the_signal_that_ends_the_job_ends_the_supervisor() {
    let bench = Bench::new();
    for signal in [1, 2, 3, 6, 9, 11, 13, 15, 34] {
        let outcome = bench.run(&["run", "--", "sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!(outcome.signal, Some(signal), "{outcome:?}");
    }
}

#[test]
fn output_and_input_pass_through() {
    use std::io::Write;
    let bench = Bench::new();
    let mut command = bench.command(&["run", "--", "sh", "-c", "cat; echo to stderr >&2"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"line\n").unwrap();
    let outcome = Outcome::of(child.wait_with_output().unwrap());
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("line\n", "to stderr\n"));
}

#[test]
fn the_job_finds_what_it_would_find_without_supervisor() {
    let bench = Bench::new();
    // Signal mask and actions, descriptors (the listing's own among them), group, session, limits, directory.
    let look = "grep -E '^(Sig(Blk|Ign|Cgt)|NSsid|NSpgid|Umask)' /proc/self/status | sed 's/NSpgid.*//'; \
                ls -l /proc/self/fd | awk '{print $9}'; ulimit -a; pwd; env | grep -v STILLPOINT";
    for outer in ["", "trap '' PIPE HUP USR1; exec 7</etc/passwd; ulimit -n 333; cd /;"] {
        let shell = |command: &str| {
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", &format!("{outer} {command}"), "sh", look, crate::common::STILLPOINT]);
            shell.env("STILLPOINT_STORE", bench.store()).stdin(Stdio::null()).env_remove("_");
            Outcome::of(shell.output().unwrap()).stdout
        };
        let (plain, supervised) = (shell("sh -c \"$1\""), shell("\"$2\" run -- sh -c \"$1\""));
        assert_eq!(plain, supervised);
        assert!(plain.contains("SigIgn"), "{plain}");
    }
}

#[test]
fn the_job_is_in_the_group_and_session_of_the_supervisor() {
    let bench = Bench::new();
    let script = "read -r _ _ _ parent group session _ </proc/self/stat; \
                  read -r _ _ _ _ group2 session2 _ </proc/$PPID/stat; echo $((group == group2)) $((session == session2))";
    assert_eq!(bench.run(&["run", "--", "sh", "-c", script]).stdout, "1 1\n");
}

#[test]
fn a_pipe_that_the_job_closes_is_closed() {
    let bench = Bench::new();
    let mut command =
        bench.command(&["run", "--name", "quiet", "--", "sh", "-c", "exec >&- 2>&- <&-; sleep 60"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    // Returns at once: the supervisor does not hold the pipe.
    std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut text).unwrap();
    assert_eq!(text, "");
    assert!(child.try_wait().unwrap().is_none());
    kill(bench.pid_of("quiet").unwrap(), Signal::KILL);
    child.wait().unwrap();
}

/// A job that writes a line for every signal it gets and ends at SIGTERM.
const LISTENER: &str = "for s in HUP INT QUIT USR1 USR2 WINCH; do trap \"echo $s\" $s; done; trap 'echo TERM; exit 5' TERM; \
                        echo ready; while :; do sleep 0.02; done";

#[test]
fn signals_to_the_supervisor_reach_the_job_once() {
    let bench = Bench::new();
    let log = std::fs::File::create(bench.path("log")).unwrap();
    let mut child = bench.command(&["run", "--", "sh", "-c", LISTENER]).stdout(log).spawn().unwrap();
    let log = bench.path("log");
    eventually("the job is ready", || read(&log).contains("ready"));
    for (signal, name) in [
        (Signal::HUP, "HUP"),
        (Signal::INT, "INT"),
        (Signal::QUIT, "QUIT"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::WINCH, "WINCH"),
    ] {
        kill(child.id(), signal);
        eventually(name, || read(&log).contains(name));
    }
    kill(child.id(), Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert_eq!(read(&log), "ready\nHUP\nINT\nQUIT\nUSR1\nUSR2\nWINCH\nTERM\n");
}

#[test]
fn a_job_outlives_its_supervisor() {
    let bench = Bench::new();
    let mut child = bench.command(&["run", "--name", "orphan", "--", "sleep", "60"]).spawn().unwrap();
    eventually("the job runs", || bench.pid_of("orphan").is_some());
    let pid = bench.pid_of("orphan").unwrap();
    // Until then it does not begin without its supervisor.
    eventually("it is the job", || read(format!("/proc/{pid}/comm").as_ref()) == "sleep\n");
    child.kill().unwrap();
    child.wait().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(is_alive(pid));
    assert_eq!(bench.pid_of("orphan"), Some(pid), "and is still a job");
    bench.run(&["run", "--name", "orphan", "--", "true"]).assert_fails(2, &["orphan is running"]);
    kill(pid, Signal::KILL);
    eventually("it is gone", || bench.pid_of("orphan").is_none());
    assert_eq!(bench.run(&["run", "--name", "orphan", "--", "true"]).code, Some(0));
}

#[test]
fn a_stopped_job_does_not_stop_its_supervisor() {
    let bench = Bench::new();
    let mut child = bench.command(&["run", "--name", "napper", "--", "sleep", "3"]).spawn().unwrap();
    eventually("the job runs", || bench.pid_of("napper").is_some());
    let pid = bench.pid_of("napper").unwrap();
    // Until then nobody passes signals on.
    eventually("it is the job", || read(format!("/proc/{pid}/comm").as_ref()) == "sleep\n");
    kill(pid, Signal::STOP);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(child.try_wait().unwrap().is_none());
    kill(child.id(), Signal::CONT); // goes on to the job
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn detached_jobs_return_at_once_and_go_on() {
    let bench = Bench::new();
    // Captured through pipes: they would never end if the job held them.
    let script = format!(
        "exec 7</etc/passwd; {} --json run --detach -- sh -c 'read x; sleep 60'",
        crate::common::STILLPOINT
    );
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", &script]).env("STILLPOINT_STORE", bench.store()).output().unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["job"], "sh");
    let pid = answer["pid"].as_u64().unwrap() as u32;
    eventually("the job is a sleep by now", || read(format!("/proc/{pid}/stat").as_ref()).contains("sh"));
    let (supervisor, session) =
        (answer["supervisor_pid"].as_u64().unwrap(), read(format!("/proc/{pid}/stat").as_ref()));
    let session: u64 = session.split_whitespace().nth(5).unwrap().parse().unwrap();
    assert_eq!(session, supervisor, "the supervisor leads a session of its own");
    for fd in 0..3 {
        let target = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap();
        assert_eq!(target.to_str(), Some("/dev/null"));
    }
    let has = |fd: u32| std::path::Path::new(&format!("/proc/{pid}/fd/{fd}")).exists();
    // (As it starts, it opens its libraries for a moment.)
    eventually("nothing of ours is open in it", || !has(3));
    eventually("nor what we inherited", || !has(7));
    let text = bench.run(&["run", "--detach", "--", "sleep", "60"]);
    let line = text.stdout.trim_end().to_string();
    assert!(line.starts_with("sleep runs as process "), "{line}");
    assert!(text.stderr.contains("standard output and standard error"), "{text:?}");
    let other: u32 = line.rsplit(' ').next().unwrap().parse().unwrap();
    for pid in [pid, other] {
        kill(pid, Signal::TERM);
    }
    eventually("no job runs", || bench.json(&["ls"]) == serde_json::json!([]));
    eventually("no supervisor runs", || !is_alive(supervisor as u32));
}

#[test]
fn a_detached_job_keeps_files_and_the_report_does_not_go_into_them() {
    let bench = Bench::new();
    let out = std::fs::File::create(bench.path("out")).unwrap();
    let command = &["run", "--detach", "--json", "--", "sh", "-c", "echo words; echo more >&2"];
    let outcome = Outcome::of(bench.command(command).stdout(out).output().unwrap());
    eventually("the job wrote", || read(&bench.path("out")) == "words\n");
    let answer: serde_json::Value = serde_json::from_str(&outcome.stderr).unwrap();
    assert_eq!(answer["job"], "sh");
}

#[test]
fn names_are_the_commands_and_never_those_of_other_jobs() {
    let bench = Bench::new();
    let start = |arguments: &[&str]| bench.json(&[&["run", "--detach"], arguments].concat());
    let first = start(&["--", "/bin/sleep", "60"]);
    let second = start(&["--", "sleep", "60"]);
    assert_eq!([&first["job"], &second["job"]], ["sleep", "sleep-2"]);
    let named = start(&["--name", "mine", "--", "sleep", "60"]);
    assert_eq!(named["job"], "mine");
    bench.run(&["run", "--detach", "--name", "mine", "--", "true"]).assert_fails(2, &["job mine is running"]);
    let pids: Vec<u64> = [&first, &second, &named].iter().map(|a| a["pid"].as_u64().unwrap()).collect();
    let listed = bench.json(&["ls"]);
    let listed: Vec<u64> =
        listed.as_array().unwrap().iter().map(|j| j["running"]["pid"].as_u64().unwrap()).collect();
    assert_eq!(listed.len(), 3);
    bench.run(&["rm", "mine"]).assert_fails(2, &["running", "--force"]);
    pids.iter().for_each(|&pid| kill(pid as u32, Signal::KILL));
    // The name is free when the process is gone.
    eventually("the processes are gone", || pids.iter().all(|&pid| !is_alive(pid as u32)));
    assert_eq!(bench.run(&["run", "--name", "mine", "--", "true"]).code, Some(0));
}

#[test]
fn a_supervisors_pid_means_its_job() {
    let bench = Bench::new();
    let answer = bench.json(&["run", "--detach", "--", "sleep", "60"]);
    let target = answer["supervisor_pid"].to_string();
    // Whatever comes of it, it is about the job: the supervisor itself is not for checkpointing.
    let outcome = bench.run(&["checkpoint", &target]);
    assert!(!outcome.stderr.contains("no process"), "{outcome:?}");
    kill(answer["pid"].as_u64().unwrap() as u32, Signal::KILL);
}

#[test]
fn a_record_is_written_whoever_else_opens_the_store() {
    let bench = Bench::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            // Each opening of a store clears up behind the dead, but not behind the living.
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    stillpoint_store::Store::open(&bench.store()).unwrap();
                }
            });
        }
        let failed: Vec<Outcome> = (0..60)
            .map(|_| bench.run(&["run", "--name", "short", "--", "true"]))
            .filter(|outcome| outcome.code != Some(0) || !outcome.stderr.is_empty())
            .collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(failed.is_empty(), "{failed:?}");
    });
}
