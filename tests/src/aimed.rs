//! The command under test is killed as it makes a certain system call: what only a kill in one moment of a million shows.

use crate::{Build, Stillpoint};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The system calls by which the command does something to others.
pub const DEEDS: &str = "ptrace,process_vm_writev,pwrite64,pidfd_send_signal,tgkill,kill,ioctl,sendmsg";

/// The command on its way to its end, or to be killed.
#[derive(Debug)]
pub struct Aimed {
    child: Child,
    report: PathBuf,
}

/// How it came out.
#[derive(Clone, Debug)]
pub struct Shot {
    /// How many of the calls it made.
    pub calls: u64,
    /// The last of them, which was not made if it was killed at that.
    pub last: String,
    /// It was killed.
    pub hit: bool,
}

impl Aimed {
    /// Starts the command, to be killed as it makes the `nth` of these system calls (or at none: 0), all of its threads taken together.
    /// `directory`: where there is room for a report. None where there is no C compiler.
    pub fn start(
        stillpoint: &Stillpoint,
        directory: &Path,
        nth: u64,
        calls: &str,
        arguments: &[&str],
    ) -> Option<Self> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/kill_at.c");
        let inner = stillpoint.command(arguments);
        let report = directory.join("report");
        let _ = std::fs::remove_file(&report);
        let mut command = Command::new(Build::Dynamic.of(&source)?);
        command.arg(&report).arg(nth.to_string()).arg(calls).arg("env");
        for (name, value) in inner.get_envs() {
            // It is not one of those that are counted, or swept away.
            let mut variable = name.to_owned();
            variable.push("=");
            variable.push(value.unwrap_or_default());
            command.arg(variable);
        }
        command.arg(inner.get_program()).args(inner.get_args());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Some(Aimed { child: child.expect("kill_at"), report })
    }

    /// Waits for its end, or for what makes it wait itself. Returns whether it has ended.
    pub fn wait_or(&mut self, mut done: impl FnMut() -> bool) -> bool {
        crate::wait_for("an end of the command", Duration::from_secs(120), || {
            let has_ended = self.child.try_wait().expect("wait").is_some();
            (has_ended || done()).then_some(has_ended)
        })
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Shot {
        let status = self.child.wait().expect("wait");
        let report = std::fs::read_to_string(&self.report).expect("what kill_at reports");
        let (calls, last) = report.trim().split_once(' ').expect("a number and a name");
        Shot {
            calls: calls.parse().expect("a number"),
            last: last.to_owned(),
            hit: status.code() == Some(137),
        }
    }
}
