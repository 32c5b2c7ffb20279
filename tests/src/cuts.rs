//! One writer, cut by one engine again and again: every checkpoint must be one exact instant.

use crate::machine::Held;
use crate::observe::traces_of_us;
use crate::target::{Build, Running, Target};
use crate::{
    Checkpoint, Scratch, Stillpoint, engine, kernel, right, right_eq, skipped, tier, undisturbed_only,
};
use std::path::Path;
use std::time::Duration;

/// How many checkpoints each life of a writer has.
fn cuts() -> u64 {
    tier::times("STILLPOINT_CUTS", 2, 4)
}

/// A scenario that writes all the time, and an engine.
#[derive(Clone)]
pub struct Cuts {
    program: &'static str,
    scenario: &'static str,
    engine: &'static str,
    retried: &'static [&'static str],
    has_children: bool,
    exact: bool,
    unfit: &'static [&'static str],
    buffers: &'static [&'static str],
    eager: bool,
    needs: fn() -> Option<Held>,
}

/// Checkpoints, in the order they were taken.
type History = Vec<Checkpoint>;

impl Cuts {
    /// A scenario of `targets/PROGRAM.c`.
    pub fn new(program: &'static str, scenario: &'static str, engine: &'static str) -> Self {
        Cuts {
            program,
            scenario,
            engine,
            retried: &[],
            has_children: false,
            exact: false,
            unfit: &[],
            buffers: &[],
            eager: false,
            needs: || None,
        }
    }

    /// It is refused with one of these words now and then; then another attempt is made.
    pub fn until_not_refused(mut self, words: &'static [&'static str]) -> Self {
        self.retried = words;
        self
    }

    /// It makes children, which are not ours.
    pub fn with_children(mut self) -> Self {
        self.has_children = true;
        self
    }

    /// What it says must be what it says undisturbed, byte for byte.
    pub fn says_the_same(mut self) -> Self {
        self.exact = true;
        self
    }

    /// These engines are known not to be for such programs.
    pub fn unfit_for(mut self, engines: &'static [&'static str]) -> Self {
        self.unfit = engines;
        self
    }

    /// Each checkpoint may use one of these sizes for pages on their way.
    pub fn within(mut self, buffers: &'static [&'static str]) -> Self {
        self.buffers = buffers;
        self
    }

    /// It goes on only when all of its memory is there.
    pub fn eagerly(mut self) -> Self {
        self.eager = true;
        self
    }

    /// It needs something of the machine. Where that cannot be had, the scenario says what it lacks.
    pub fn with(mut self, needs: fn() -> Option<Held>) -> Self {
        self.needs = needs;
        self
    }

    /// The writer goes through checkpoints unharmed; a random one of them is restored and goes through more, as a job
    /// this time; the last one and a random one of all are restored and run to their ends. Whatever the writer checks
    /// must hold in every life.
    #[track_caller]
    pub fn hold(&self) {
        if !undisturbed_only() && !engine::offered(self.engine) {
            return skipped(&format!("the command has no engine {}", self.engine));
        }
        if self.unfit.contains(&self.engine) {
            return skipped(&format!("the engine {} is not for it", self.engine));
        }
        let scratch = Scratch::new();
        let _held = (self.needs)();
        let target = Target::new(self.program, self.scenario, Build::Dynamic).expect("cc");
        let expected = self.exact.then(|| self.undisturbed(&scratch, &target));
        let running = target.start(&scratch.directory("writer"), scratch.path());
        if let Some(why) = running.skip() {
            return skipped(&why);
        }
        let (pid, directory) = (running.pid, running.directory().to_owned());
        let stillpoint = scratch.stillpoint();
        let life =
            Life { cuts: self, scratch: &scratch, stillpoint: &stillpoint, pid, directory: &directory };
        life.pause();
        if undisturbed_only() {
            return life.ends(running, expected.as_deref(), "undisturbed");
        }

        let mut history = match life.through(&pid.to_string(), false) {
            Ok(history) => history,
            Err(why) => {
                life.ends(running, expected.as_deref(), "after a checkpoint that was not possible");
                return skipped(&why);
            }
        };
        life.ends(running, expected.as_deref(), "after checkpoints");

        let any = scratch.random().below(history.len() as u64) as usize;
        let running = life.restore(&history[any]);
        let more = life.through("job", true);
        running.kill();
        match more {
            Ok(more) => history.extend(more),
            Err(why) => return skipped(&why),
        }

        let any = scratch.random().below(history.len() as u64) as usize;
        for n in [history.len() - 1, any] {
            let running = life.restore(&history[n]);
            life.pause();
            life.ends(running, expected.as_deref(), &format!("restored from {}", history[n].json));
        }
        scratch.nothing_is_left("in the end");
    }

    fn undisturbed(&self, scratch: &Scratch, target: &Target) -> String {
        target.start(&scratch.directory("undisturbed"), scratch.path()).finish("undisturbed")
    }
}

/// The lives of one writer.
struct Life<'a> {
    cuts: &'a Cuts,
    scratch: &'a Scratch,
    stillpoint: &'a Stillpoint,
    pid: u32,
    directory: &'a Path,
}

impl Life<'_> {
    fn pause(&self) {
        let most = 40;
        std::thread::sleep(Duration::from_millis(self.scratch.random().below(most)));
    }

    /// Takes checkpoints at random moments, of a process or of a job; or tells why this engine cannot.
    #[track_caller]
    fn through(&self, target: &str, job: bool) -> Result<History, String> {
        let mut history = Vec::new();
        for _ in 0..cuts() {
            self.pause();
            history.push(self.checkpoint(target)?);
            if !job {
                let traces = traces_of_us(self.pid, self.cuts.has_children);
                right!(traces.is_empty(), "left behind after a checkpoint: {traces:#?}");
            }
        }
        Ok(history)
    }

    #[track_caller]
    fn checkpoint(&self, target: &str) -> Result<Checkpoint, String> {
        let kinds = engine::kinds();
        let kind = kinds[self.scratch.random().below(kinds.len() as u64) as usize];
        let mut arguments =
            vec!["checkpoint", target, "--name", "job", "--json", "--engine", self.cuts.engine];
        arguments.extend(kind);
        let buffers = self.cuts.buffers;
        if !buffers.is_empty() {
            arguments
                .extend(["--buffer", buffers[self.scratch.random().below(buffers.len() as u64) as usize]]);
        }
        for attempt in 0.. {
            let output = self.stillpoint.run(&arguments);
            if self.cuts.engine != "auto" && engine::is_impossible(&output) {
                // The user named the engine: it may not be the one for such a program, and says so.
                if attempt == 5 {
                    return Err(format!("not by {}: {}", self.cuts.engine, output.stderr.trim()));
                }
            } else if self.cuts.retried.is_empty() || output.status.success() {
                return Ok(Checkpoint::of(&output.ok()));
            } else {
                assert!(attempt < 400, "always refused: {output}");
                let code = output.code();
                output.fails(code, self.cuts.retried);
            }
            self.pause();
        }
        unreachable!("attempts are counted")
    }

    #[track_caller]
    fn restore(&self, checkpoint: &Checkpoint) -> Running {
        kernel::wait_free(self.pid);
        let _ = std::fs::remove_file(self.directory.join("go"));
        let name = checkpoint.name();
        // Whatever the program does must also be right while its memory is still to come.
        let ways: [&[&str]; 3] =
            [&["--eager"], &["--eager-below", "0"], &["--eager-below", "0", "--limit-bandwidth", "50MB/s"]];
        let way = ways[if self.cuts.eager { 0 } else { self.scratch.random().below(3) as usize }];
        let pid = self.stillpoint.restore_at_once(&name, way);
        if pid != self.pid {
            // In the meantime somebody else may have it, and is not ours to judge.
            eprintln!("note: it has another process id");
        }
        Running::restored(pid, self.directory)
    }

    #[track_caller]
    fn ends(&self, running: Running, expected: Option<&str>, what: &str) {
        right!(kernel::alive(running.pid), "{what}: it has ended:\n{}", running.said());
        let said = running.finish(what);
        if let Some(expected) = expected {
            right_eq!(said, expected, "{what}: not what it says undisturbed");
        }
    }
}
