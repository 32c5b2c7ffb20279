//! Bad input: one clear sentence, exit code 2 (or 1 where the world is at fault), and no backtrace.
#![allow(clippy::unwrap_used)]

use crate::common::{Bench, Outcome, STILLPOINT};
use std::process::{Command, Stdio};

#[test]
fn mistakes_in_the_arguments() {
    let bench = Bench::new();
    let cases: &[(&[&str], &[&str])] = &[
        (&["frobnicate"], &["unrecognized subcommand"]),
        (&["run"], &["COMMAND"]),
        (&["run", "--"], &["COMMAND"]),
        (&["run", "--name", "a/b", "--", "true"], &["a/b"]),
        (&["run", "--name", "42", "--", "true"], &["process id"]),
        (&["checkpoint"], &["TARGET"]),
        (&["checkpoint", "web", "--engine", "warp"], &["warp", "stop"]),
        (&["checkpoint", "web", "--name", ".x"], &[".x"]),
        (&["checkpoint", "web", "--buffer", "16 apples"], &["apples", "MiB"]),
        (&["checkpoint", "web", "--buffer", "1k"], &["64KiB"]),
        (&["checkpoint", "web", "--incremental", "--full"], &["--incremental", "--full"]),
        (&["run", "--every", "10", "--", "true"], &["unit", "10s"]),
        (&["run", "--every", "0s", "--", "true"], &["nothing"]),
        (&["run", "--every", "soon", "--", "true"], &["10s"]),
        (&["run", "--every", "1s", "--keep", "0", "--", "true"], &["--keep"]),
        (&["run", "--keep", "3", "--", "true"], &["--every"]),
        (&["run", "--engine", "wp", "--", "true"], &["--every"]),
        (&["restore", "web", "--buffer", "1MiB"], &["--every"]),
        (&["adopt"], &["PID"]),
        (&["adopt", "web"], &["no process id"]),
        (&["adopt", "-1"], &[]),
        (&["adopt", "1", "--name", "1"], &["process id"]),
        (&["release"], &["JOB"]),
        (&["release", "12"], &["process id"]),
        (&["checkpointer", "web", "--process", "1", "--supervisor", "1"], &["supervisor of a job"]),
        (&["restore"], &["JOB"]),
        (&["restore", "web@0"], &["from 1"]),
        (&["restore", "web", "--files", "maybe"], &["rollback", "keep", "refuse"]),
        (&["restore", "web", "--pid", "other"], &["same"]),
        (&["prune", "web"], &["--keep"]),
        (&["prune", "web", "--keep", "0"], &["--keep"]),
        (&["prune", "web", "--keep", "-1"], &[]),
        (&["rm"], &["JOB"]),
        (&["ls", "--json", "--json"], &[]),
        (&["ls", "--store"], &["--store"]),
    ];
    for (arguments, words) in cases {
        bench.run(arguments).assert_fails(2, words);
    }
}

#[test]
fn things_that_do_not_exist() {
    let bench = Bench::new();
    for arguments in [
        &["ls", "web"] as &[&str],
        &["show", "web"],
        &["show", "web@3"],
        &["verify", "web"],
        &["verify", "web@3"],
        &["rm", "web"],
        &["rm", "web@3"],
        &["prune", "web", "--keep", "1"],
        &["restore", "web"],
        &["restore", "web@3", "--detach"],
        &["checkpoint", "web"],
        &["release", "web"],
    ] {
        bench.run(arguments).assert_fails(2, &["no job web"]);
    }
    for pid in ["0", "4194305", "99999999999999999999"] {
        bench.run(&["checkpoint", pid]).assert_fails(2, &["there is no process"]);
        bench.run(&["adopt", pid]).assert_fails(2, &["there is no process"]);
    }
    for detach in [&[] as &[&str], &["--detach"]] {
        let missing = [&["run"], detach, &["--", "/does/not/exist", "x"]].concat();
        bench.run(&missing).assert_fails(2, &["/does/not/exist", "No such file"]);
        let forbidden = [&["run"], detach, &["--", "/etc/passwd"]].concat();
        bench.run(&forbidden).assert_fails(2, &["/etc/passwd", "Permission denied"]);
    }
    assert_eq!(bench.json(&["ls"]), serde_json::json!([]), "a command that did not start leaves no job");
}

#[test]
fn no_command_prints_the_help() {
    let outcome = Bench::new().run(&[]);
    assert_eq!(outcome.code, Some(2));
    assert!(outcome.stderr.contains("Usage: stillpoint"), "{outcome:?}");
}

#[test]
fn help_and_version_are_answers() {
    let bench = Bench::new();
    for arguments in
        [&["--help"] as &[&str], &["help", "restore"], &["run", "--help"], &["--version"], &["man"]]
    {
        let outcome = bench.run(arguments);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(outcome.stdout.contains("stillpoint"), "{outcome:?}");
    }
    assert!(bench.run(&["completions", "bash"]).stdout.contains("_stillpoint"));
}

#[test]
fn a_store_that_cannot_be() {
    let bench = Bench::new();
    std::fs::write(bench.path("file"), "x").unwrap();
    let file = bench.path("file");
    let file = file.to_str().unwrap();
    bench.run(&["ls", "--store", file]).assert_fails(1, &[file]);
    bench.run(&["run", "--store", file, "--", "true"]).assert_fails(1, &[file]);
    bench.run(&["run", "--detach", "--store", file, "--", "true"]).assert_fails(1, &[file]);
}

#[test]
fn the_store_comes_from_option_environment_or_home() {
    let bench = Bench::new();
    let with = |variables: &[(&str, &str)], option: &[&str]| {
        let mut command = Command::new(STILLPOINT);
        command.args(option).arg("ls").env_clear();
        variables.iter().for_each(|(name, value)| {
            command.env(name, value);
        });
        Outcome::of(command.output().unwrap())
    };
    let all = [("STILLPOINT_STORE", "/tmp/no/a"), ("XDG_DATA_HOME", "/tmp/no/b"), ("HOME", "/tmp/no/c")];
    assert!(with(&all, &["--store", "/tmp/no/d"]).stderr.contains("no jobs in /tmp/no/d\n"));
    assert!(with(&all, &[]).stderr.contains("no jobs in /tmp/no/a\n"));
    assert!(with(&all[1..], &[]).stderr.contains("no jobs in /tmp/no/b/stillpoint\n"));
    assert!(with(&all[2..], &[]).stderr.contains("no jobs in /tmp/no/c/.local/share/stillpoint\n"));
    assert!(with(&[("STILLPOINT_STORE", ""), all[2]], &[]).stderr.contains("/tmp/no/c/"));
    with(&[], &[]).assert_fails(2, &["--store"]);
    drop(bench);
}

#[test]
fn standard_output_that_is_closed_or_full() {
    let bench = Bench::new();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let outcome = Outcome::of(bench.command(&["--help"]).stdout(full).output().unwrap());
    outcome.assert_fails(1, &["standard output", "No space left"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let outcome = Outcome::of(bench.command(&["--help"]).stdout(Stdio::from(writer)).output().unwrap());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "a reader that has gone is no error");
}

#[test]
fn doctor_tells_every_feature_and_a_verdict() {
    let bench = Bench::new();
    let outcome = bench.run(&["doctor", "--json"]);
    let answer: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let works = answer["works"].as_bool().unwrap();
    assert_eq!(outcome.code, Some(if works { 0 } else { 1 }));
    let features = answer["features"].as_array().unwrap();
    assert!(features.len() > 15);
    for feature in features {
        let state = feature["state"].as_str().unwrap();
        assert!(["ok", "missing", "optional"].contains(&state), "{feature}");
        assert_eq!(feature["remedy"].is_string(), state != "ok", "{feature}");
    }
    assert_eq!(works, features.iter().all(|f| f["state"] != "missing"));
    let text = bench.run(&["doctor"]).stdout;
    assert!(text.contains("pidfd_getfd") && text.contains("Checkpoint and restore"), "{text}");
}
