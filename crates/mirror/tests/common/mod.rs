//! Builds C programs against the static library.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The crate's directory.
pub fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The static library that cargo has built beside this test.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    // `cargo test` makes it among the dependencies; `cargo build` above them.
    let directories = test.ancestors().skip(1).take(2);
    let files =
        directories.flat_map(|d| std::fs::read_dir(d).into_iter().flatten().flatten().map(|e| e.path()));
    let named = |p: &PathBuf| {
        let name = p.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libstillpoint_mirror") && name.ends_with(".a")
    };
    let newest = files.filter(named).max_by_key(|p| p.metadata().and_then(|m| m.modified()).ok());
    newest.expect("libstillpoint_mirror.a")
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Builds a program of one file with warnings as errors.
pub fn compile(compiler: &str, source: &str, program: &Path) {
    let mut command = Command::new(compiler);
    command.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(program);
    command.arg(here().join("tests/c").join(source)).arg("-I").arg(here().join("include"));
    run(command.arg(library()).args(["-lpthread", "-ldl", "-lm"]));
}

/// Runs a program until it has said a line, and for some time more; then kills it with SIGKILL. What it has said, and
/// whether it still ran.
pub fn kill_after(command: &mut Command, time: Duration) -> (String, bool) {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawn");
    let mut text = String::new();
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    stdout.read_line(&mut text).expect("its first line");
    std::thread::sleep(time);
    let running = child.try_wait().expect("wait").is_none();
    child.kill().expect("kill");
    let output = child.wait_with_output().expect("output");
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    (text, running)
}
