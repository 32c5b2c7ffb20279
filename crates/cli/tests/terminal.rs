//! `run` in a terminal, under a shell with job control.
#![allow(clippy::unwrap_used)]

use crate::common::{Bench, Outcome, STILLPOINT};
use std::process::Command;

#[test]
fn a_job_in_a_terminal() {
    let bench = Bench::new();
    for tool in ["python3", "bash"] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("skipped: {tool} is not installed");
            return;
        }
    }
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/terminal.py");
    let mut command = Command::new("python3");
    command.args([driver, STILLPOINT]).arg(bench.path("listener.py"));
    let outcome = Outcome::of(command.env("STILLPOINT_STORE", bench.store()).output().unwrap());
    assert_eq!(outcome.code, Some(0), "{}\n{}", outcome.stdout, outcome.stderr);
    assert_eq!(outcome.stdout.lines().count(), 10, "{}", outcome.stdout);
}
