//! Programs that were not written here: run undisturbed, then through checkpoints, kills and restores, and compared.

use crate::scratch::MARK;
use crate::target::alone;
use crate::{Output, Scratch, Stillpoint, kernel, skipped, undisturbed_only, verdict};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A program that computes something and writes files; its standard output goes to the file `out`.
pub struct Program {
    /// Command and arguments, run in a directory of its own.
    pub command: Vec<String>,
    /// More environment.
    pub environment: Vec<(String, String)>,
    /// Puts its input into the directory.
    pub prepare: Box<dyn Fn(&Path)>,
    /// Files that must be the same as without any checkpoint, byte for byte, besides `out`.
    pub outputs: Vec<&'static str>,
    /// Whether it only appends to files, so that it may be killed some time after a checkpoint. A program that changes
    /// files in place is killed by the checkpoint itself.
    pub appends: bool,
    /// What a refusal says that is right at some moment of its life only, and then soon is not any more.
    pub refused_meanwhile: Option<&'static str>,
}

impl Program {
    /// A program without input.
    pub fn new<S: ToString>(command: &[S]) -> Self {
        Program {
            command: command.iter().map(S::to_string).collect(),
            environment: Vec::new(),
            prepare: Box::new(|_| {}),
            outputs: Vec::new(),
            appends: true,
            refused_meanwhile: None,
        }
    }

    /// Takes a checkpoint of it, when it can be had. `None`: it has ended instead.
    #[track_caller]
    fn checkpointed(&self, stillpoint: &Stillpoint, pid: u32, more: &[&str]) -> Option<Output> {
        let patience = Instant::now() + Duration::from_secs(60);
        let mut arguments = vec!["checkpoint".to_owned(), pid.to_string()];
        arguments.extend(["--name", "job", "--json"].iter().chain(more).map(ToString::to_string));
        loop {
            let output = stillpoint.run(&arguments);
            if output.status.success() {
                return Some(output);
            }
            let passes = self.refused_meanwhile.is_some_and(|words| output.stderr.contains(words));
            if ends(pid, Duration::from_secs(if passes { 0 } else { 2 })) {
                return None;
            }
            if !passes || Instant::now() >= patience {
                return Some(output.ok());
            }
        }
    }

    /// Starts it; gives its process id and what reaps it.
    pub fn start(&self, directory: &Path, mark: &Path) -> std::process::Child {
        let open =
            |name: &str| fs::File::create(directory.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut command = alone(&self.command[0]);
        command.args(&self.command[1..]).current_dir(directory).env(MARK, mark);
        command.envs(self.environment.iter().map(|(n, v)| (n, v)));
        command.stdin(Stdio::null()).stdout(open("out")).stderr(open("errors"));
        command.spawn().unwrap_or_else(|e| panic!("{}: {e}", self.command[0]))
    }

    /// What it has written.
    pub fn results(&self, directory: &Path) -> Vec<(String, Vec<u8>)> {
        let names = self.outputs.iter().copied().chain(["out", "errors"]);
        names.map(|n| (n.to_owned(), fs::read(directory.join(n)).unwrap_or_default())).collect()
    }

    /// Runs it undisturbed, then with checkpoints at random moments, killed and restored at least twice if it lasts long
    /// enough, and compares everything it wrote.
    #[track_caller]
    pub fn survives(&self) {
        let scratch = Scratch::new();
        let undisturbed = scratch.directory("undisturbed");
        (self.prepare)(&undisturbed);
        let began = Instant::now();
        let status = self.start(&undisturbed, scratch.path()).wait().unwrap_or_else(|e| panic!("{e}"));
        let typical = began.elapsed();
        let expected = self.results(&undisturbed);
        let errors = String::from_utf8_lossy(&expected[expected.len() - 1].1).into_owned();
        assert!(status.success(), "undisturbed, it ended with {status}: {errors}");
        if undisturbed_only() {
            return;
        }

        // On a shared machine a run may be much faster than the one before: then it ends before all is done to it, and the
        // next attempt does less before the first kill, and waits for less.
        for attempt in 1i32.. {
            match self.disturbed(
                &scratch,
                &scratch.directory(&format!("disturbed.{attempt}")),
                typical.mul_f64(0.7f64.powi(attempt - 1)),
                &expected,
                3 - attempt.min(3) as usize,
            ) {
                Ok(()) => break,
                Err(history) => assert!(
                    attempt < 14,
                    "it ended too early to be killed and restored; typical {typical:?}; {history:#?}"
                ),
            }
        }
        scratch.nothing_is_left("in the end");
    }

    /// Runs it through checkpoints, kills and restores, and compares its results. `Err` tells what was done if it ended
    /// before it was killed once. `checkpoints` are taken in each of its lives before the one that it is restored from.
    #[track_caller]
    fn disturbed(
        &self,
        scratch: &Scratch,
        directory: &Path,
        typical: Duration,
        expected: &[(String, Vec<u8>)],
        checkpoints: usize,
    ) -> Result<(), Vec<String>> {
        (self.prepare)(directory);
        let stillpoint = scratch.stillpoint();
        let child = self.start(directory, scratch.path());
        let mut pid = child.id();
        let mut child = Some(child);
        let pause = |scratch: &Scratch, most: f64| {
            // Short against the run, also where this run is much faster than the undisturbed one was.
            let longest = typical.mul_f64(most).min(Duration::from_millis(400));
            std::thread::sleep(
                typical.mul_f64(0.01).min(longest) + longest.mul_f64(scratch.random().fraction()),
            );
        };
        let mut history = Vec::new();
        let lives = 3;
        'lives: for life in 0..lives {
            for _ in 0..checkpoints {
                pause(scratch, 0.12);
                if !kernel::alive(pid) {
                    break 'lives;
                }
                let Some(output) = self.checkpointed(&stillpoint, pid, &[]) else { break 'lives };
                history.push(format!("life {life}: {}", output.stdout.trim()));
            }
            pause(scratch, 0.12);
            let killing = !self.appends || scratch.random().below(2) == 0;
            let kill: &[&str] = if killing { &["--kill"] } else { &[] };
            let Some(output) = self.checkpointed(&stillpoint, pid, kill) else { break };
            let json = output.json();
            if !killing {
                pause(scratch, 0.1); // this much work is lost, and rolled back
                if !kernel::alive(pid) {
                    break;
                }
                // What its children have open is not cut back as long as they have it.
                kernel::kill(pid, kernel::SIGSTOP);
                let orphans = kernel::children(pid);
                kernel::kill(pid, kernel::SIGKILL);
                for orphan in orphans {
                    kernel::kill(orphan, kernel::SIGKILL);
                    kernel::wait_gone(orphan, Duration::from_secs(60));
                }
            }
            match child.take() {
                Some(mut child) => drop(child.wait()),
                None => kernel::wait_gone(pid, Duration::from_secs(60)),
            }
            history
                .push(format!("killed{}", if killing { " by the checkpoint" } else { " some time later" }));
            // Some of them go on while their memory is still to come, however little it is.
            let ways: [&[&str]; 2] = [&[], &["--eager-below", "0"]];
            let way = ways[scratch.random().below(2) as usize];
            let restored = stillpoint.restore_at_once(&format!("job@{}", json["id"]), way);
            if restored != pid {
                // Another test may have begun a process that has its number now.
                history.push(format!("restored under another process id, {restored}"));
                pid = restored;
            }
        }
        if let Some(mut child) = child {
            let _ = child.wait();
            return Err(history);
        }
        kernel::wait_gone(pid, typical * 10 + Duration::from_secs(60));
        for ((name, want), (_, got)) in expected.iter().zip(self.results(directory)) {
            if *want != got {
                let at = want.iter().zip(&got).position(|(a, b)| a != b).unwrap_or(want.len().min(got.len()));
                let tail = String::from_utf8_lossy(&got[got.len().saturating_sub(600)..]).into_owned();
                verdict::wrong(format!(
                    "{name} differs from byte {at} on ({} bytes, expected {}), ends with:\n{tail}\n{history:#?}",
                    got.len(),
                    want.len()
                ));
            }
        }
        Ok(())
    }
}

/// Whether a process has ended, or is just about to: it may take a while to give its memory back.
fn ends(pid: u32, soon: Duration) -> bool {
    let until = Instant::now() + soon;
    while kernel::alive(pid) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    !kernel::alive(pid)
}

/// A file of `tests/programs`.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}

/// A program in Go of `tests/programs`; otherwise says what is skipped.
pub fn built_by_go(name: &str, scratch: &Scratch) -> Option<PathBuf> {
    let go = installed(&["go", "/usr/local/go/bin/go"], "golang-go")?;
    let binary = scratch.path().join(name.trim_end_matches(".go"));
    let built = Command::new(go)
        .args(["build", "-o"])
        .arg(&binary)
        .arg(source(name))
        .current_dir(scratch.path())
        .envs([
            ("GO111MODULE", "off"),
            ("GOTOOLCHAIN", "local"),
            ("CGO_ENABLED", "0"),
            ("GOPROXY", "off"),
            ("GOFLAGS", ""),
        ])
        .status()
        .expect("go");
    assert!(built.success(), "{name} does not build");
    Some(binary)
}

/// The first of these commands that is installed; otherwise says what is skipped.
pub fn installed(names: &[&str], package: &str) -> Option<PathBuf> {
    let found = names.iter().find_map(|n| {
        let path = Path::new(n);
        if path.is_absolute() { path.is_file().then(|| path.to_owned()) } else { kernel::which(n) }
    });
    if found.is_none() {
        skipped(&format!("{} is not installed (Debian package {package})", names[0]));
    }
    found
}

/// Puts so much text into the directory of a program, as `input`.
pub fn input(bytes: u64) -> Box<dyn Fn(&Path)> {
    Box::new(move |directory| fs::write(directory.join("input"), text(bytes as usize)).expect("input"))
}

/// Text that compresses, but not at once: the same for the same size.
pub fn text(bytes: usize) -> Vec<u8> {
    let words = [
        "at the still point",
        "of the turning world",
        "neither flesh nor fleshless",
        "neither from nor towards",
    ];
    let mut rng = crate::Rng::new(5);
    let mut text = Vec::with_capacity(bytes + 64);
    while text.len() < bytes {
        let r = rng.next_u64();
        text.extend(words[(r % 4) as usize].as_bytes());
        text.extend(format!(" {:x}\n", r >> (8 + r % 48)).as_bytes());
    }
    text.truncate(bytes);
    text
}
