//! The memory engines that the command under test offers.

use crate::scratch::test_name;
use crate::stillpoint::{Output, binary};
use crate::tier;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// All engines there may be.
pub const ENGINES: &[&str] = &["stop", "precopy", "wp", "fork", "auto"];

/// Whether the command knows this engine.
pub fn offered(engine: &str) -> bool {
    static OFFERED: OnceLock<Vec<&'static str>> = OnceLock::new();
    let known =
        |engine: &&str| !said(&["checkpoint", "no-such-job", "--engine", engine]).contains("--engine");
    OFFERED.get_or_init(|| ENGINES.iter().copied().filter(known).collect()).contains(&engine)
}

/// The engine whose turn it is for the running test in this run, or all where there is time (see [`tier`](crate::tier)).
pub fn in_turn() -> Vec<&'static str> {
    tier::turn(&test_name(), ENGINES)
}

/// The engines that the command knows.
pub fn all() -> impl Iterator<Item = &'static str> {
    ENGINES.iter().copied().filter(|e| offered(e))
}

/// Whether a checkpoint failed as the engine that was named is not for such a program, or not at the moment.
pub fn is_impossible(output: &Output) -> bool {
    const WORDS: [&str; 3] = ["auto takes another", "cannot save this program", "is not possible"];
    output.code() == 1 && WORDS.iter().any(|word| output.stderr.contains(word))
}

/// Whether a command mentions an option in its help.
pub fn has_option(command: &str, option: &str) -> bool {
    let help = said(&[command, "--help"]);
    help.split_whitespace().any(|word| word.trim_end_matches([',', ']', '.']) == option)
}

/// Whether the command has a command of this name.
pub fn has_command(name: &str) -> bool {
    !said(&[name, "--help"]).contains("unrecognized subcommand")
}

/// The ways to choose between incremental and full checkpoints.
pub fn kinds() -> &'static [&'static [&'static str]] {
    static HAS: OnceLock<bool> = OnceLock::new();
    match HAS.get_or_init(|| has_option("checkpoint", "--incremental")) {
        true => &[&[], &["--incremental"], &["--full"]],
        false => &[&[]],
    }
}

fn said(arguments: &[&str]) -> String {
    let store = std::env::temp_dir().join(format!("stillpoint-asked.{}", std::process::id()));
    let done =
        Command::new(binary()).args(arguments).arg("--store").arg(&store).stdin(Stdio::null()).output();
    let done = done.unwrap_or_else(|e| panic!("{}: {e}", binary().display()));
    let _ = std::fs::remove_dir_all(store);
    format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
}
