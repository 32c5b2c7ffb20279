//! One scenario of a target, through everything that can happen to it.

use crate::observe::Facts;
use crate::scratch::test_name;
use crate::stillpoint::{Checkpoint, is_of_the_command};
use crate::target::{Build, Running, Target, judge};
use crate::turn::Turn;
use crate::{Output, Scratch, Stillpoint, engine, fault, kernel, right, tier, verdict};
use std::path::Path;
use std::time::{Duration, Instant};

/// A scenario and what is special about it.
#[derive(Clone, Debug)]
pub struct Feature {
    program: &'static str,
    scenario: &'static str,
    build: Build,
    delay: Duration,
    jitter: bool,
    ignored: Vec<&'static str>,
    restarts: bool,
    refusal: Option<&'static str>,
    turn: Option<&'static str>,
}

impl Feature {
    /// A scenario of `targets/PROGRAM.c`.
    pub fn new(program: &'static str, scenario: &'static str) -> Self {
        Feature {
            program,
            scenario,
            build: Build::Dynamic,
            delay: Duration::ZERO,
            jitter: true,
            ignored: Vec::new(),
            restarts: true,
            refusal: None,
            turn: None,
        }
    }

    /// Not beside others that take this thing of the machine (see [`crate::turn`]).
    pub fn in_turn(mut self, thing: &'static str) -> Self {
        self.turn = Some(thing);
        self
    }

    /// Built in another way.
    pub fn built(mut self, build: Build) -> Self {
        self.build = build;
        self
    }

    /// The cut comes this long after the target is ready.
    pub fn cut_after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self.jitter = false;
        self
    }

    /// What can be seen from outside under these names may differ: the target is busy changing it.
    pub fn ignoring(mut self, prefixes: &[&'static str]) -> Self {
        self.ignored.extend(prefixes);
        self
    }

    /// It may also be refused, with this word in the reason.
    pub fn or_refused(mut self, word: &'static str) -> Self {
        self.refusal = Some(word);
        self
    }

    /// Only one cut in each life: a second would come too late.
    pub fn one_life(mut self) -> Self {
        self.restarts = false;
        self
    }

    /// Runs the scenario undisturbed; through checkpoints while it goes on; killed and restored in the foreground;
    /// and, if it is its turn (see [`tier`]), restored, checkpointed again, killed and restored once more. Each time it must find everything unchanged,
    /// and so must whoever looks from outside.
    #[track_caller]
    pub fn survives(&self) {
        let _turn = self.turn.map(Turn::of);
        let scratch = Scratch::new();
        let Some(target) = Target::new(self.program, self.scenario, self.build) else {
            return crate::skipped(&format!("no compiler for {:?}", self.build));
        };
        if let Some(why) = self.undisturbed(&scratch, &target) {
            return crate::skipped(&why);
        }
        if crate::undisturbed_only() {
            return;
        }
        let stillpoint = scratch.stillpoint();
        if self.is_refused(&scratch, &target, &stillpoint) {
            return;
        }
        self.goes_on(&scratch, &target, &stillpoint);
        self.comes_back(&scratch, &target, &stillpoint);
        if self.restarts && tier::is_turn_of(&test_name(), 4) {
            self.comes_back_twice(&scratch, &target, &stillpoint);
        }
        scratch.nothing_is_left("in the end");
    }

    /// Whether it does not wait to be told, after a cut that has its time.
    fn ends_by_itself(&self) -> bool {
        !self.delay.is_zero()
    }

    /// Until the cut is to come, of a target that was ready then.
    fn pause(&self, scratch: &Scratch, ready: Instant) {
        let jitter = if self.jitter { scratch.random().below(40) } else { 0 };
        let rest = self.delay.saturating_sub(ready.elapsed());
        std::thread::sleep(rest + Duration::from_millis(jitter));
    }

    fn facts(&self, pid: u32) -> Facts {
        Facts::settled(pid).without(&self.ignored)
    }

    #[track_caller]
    fn same(&self, before: &Facts, pid: u32, what: &str) {
        let patience = Instant::now() + Duration::from_secs(60); // a command in the foreground may not be through yet
        loop {
            let now = Facts::where_it_lives(pid).without(&self.ignored);
            let differences = before.differences(&now);
            if differences.is_empty() {
                return;
            }
            if !kernel::alive(pid) {
                right!(self.ends_by_itself(), "{what}: the process has ended");
                return;
            }
            if Instant::now() >= patience {
                let why = format!("{what}: seen from outside, these differ:\n{differences}");
                match what {
                    "undisturbed" => panic!("{why}"),
                    _ => verdict::wrong(why),
                }
            }
        }
    }

    /// Starts the target in a directory of its own; nothing if it has nothing to do here.
    fn start(&self, scratch: &Scratch, target: &Target, way: &str) -> Result<Running, String> {
        let running = target.start(&scratch.directory(way), scratch.path());
        match running.skip() {
            Some(why) => Err(why),
            None => Ok(running),
        }
    }

    fn undisturbed(&self, scratch: &Scratch, target: &Target) -> Option<String> {
        let running = match self.start(scratch, target, "undisturbed") {
            Ok(running) => running,
            Err(why) => return Some(why),
        };
        if self.ignored.is_empty() && !self.ends_by_itself() {
            let before = self.facts(running.pid);
            self.same(&before, running.pid, "undisturbed");
        }
        running.finish("undisturbed");
        None
    }

    /// Whether the command refuses it, as it may; if so the program must go on unharmed.
    #[track_caller]
    fn is_refused(&self, scratch: &Scratch, target: &Target, stillpoint: &Stillpoint) -> bool {
        let Some(word) = self.refusal else { return false };
        let Ok(running) = self.start(scratch, target, "refused") else { return false };
        let output = stillpoint.run(&["checkpoint", &running.pid.to_string(), "--name", "refused"]);
        running.finish("after a refusal");
        if output.code() == 3 {
            output.fails(3, &[word]);
            return true;
        }
        output.ok();
        false
    }

    /// Starts it, and takes a checkpoint of it when that is to come: what it was then, and its checkpoint; nothing if it has nothing
    /// to do here. On a busy machine a program that ends by itself may have ended before: then it is started once more.
    #[track_caller]
    fn cut_once(
        &self,
        scratch: &Scratch,
        target: &Target,
        stillpoint: &Stillpoint,
        way: &str,
        extra: &[&str],
    ) -> Option<(Running, Facts, Checkpoint)> {
        let mut tries = 20;
        loop {
            let running = self.start(scratch, target, way).ok()?;
            let ready = Instant::now();
            let before = self.facts(running.pid);
            self.pause(scratch, ready);
            let pid = running.pid.to_string();
            let output = stillpoint.run(&[&["checkpoint", &pid, "--name", way, "--json"], extra].concat());
            let too_late = self.ends_by_itself() && !output.status.success() && !kernel::alive(running.pid);
            tries -= 1;
            if !too_late || tries == 0 {
                return Some((running, before, Checkpoint::of(&output.ok())));
            }
            let go = running.directory().join("go");
            running.finish("undisturbed, as the cut came too late");
            std::fs::remove_file(&go).unwrap_or_else(|e| panic!("{}: {e}", go.display()));
        }
    }

    #[track_caller]
    fn goes_on(&self, scratch: &Scratch, target: &Target, stillpoint: &Stillpoint) {
        let Some((running, before, _)) = self.cut_once(scratch, target, stillpoint, "goes-on", &[]) else {
            return;
        };
        fault::checkpointed(running.pid);
        self.same(&before, running.pid, "after a checkpoint");
        for engine in if self.restarts { engine::in_turn() } else { Vec::new() } {
            self.pause(scratch, Instant::now());
            let pid = running.pid.to_string();
            let output =
                stillpoint.run(&["checkpoint", &pid, "--name", "goes-on", "--engine", engine, "--json"]);
            if !engine::is_impossible(&output) {
                Checkpoint::of(&output.ok());
            }
            self.same(&before, running.pid, &format!("after a checkpoint by {engine}"));
        }
        running.finish("after checkpoints");
    }

    #[track_caller]
    fn comes_back(&self, scratch: &Scratch, target: &Target, stillpoint: &Stillpoint) {
        let Some((mut running, before, checkpoint)) =
            self.cut_once(scratch, target, stillpoint, "comes-back", &["--kill"])
        else {
            return;
        };
        running.reap();
        // In the foreground: the command ends as the program ends.
        let restore = Foreground::restore(stillpoint, &checkpoint.name(), running.directory());
        let pid = restore.await_process(running.pid, scratch);
        if restore.has_ended() && !kernel::alive(pid) && !self.ends_by_itself() {
            panic!("no process after restore: {}{}", restore.wait(), running.said());
        }
        if !self.ends_by_itself() {
            self.same(&before, pid, "after restore");
        }
        fault::restored(pid);
        running.go();
        let output = restore.wait();
        let said = running.said();
        eprintln!("{output}");
        judge(&said, "after restore");
        assert_eq!(output.code(), 0, "the command ends as the program did: {output}");
    }

    #[track_caller]
    fn comes_back_twice(&self, scratch: &Scratch, target: &Target, stillpoint: &Stillpoint) {
        let Ok(mut running) = self.start(scratch, target, "twice") else { return };
        let ready = Instant::now();
        let (before, had) = (self.facts(running.pid), running.pid);
        self.pause(scratch, ready);
        for generation in 1..=2 {
            let checkpoint = stillpoint.checkpoint(running.pid, "twice", &["--kill"]);
            running.reap();
            let pid = stillpoint.restore_detached(&checkpoint.name(), &[]);
            let own = kernel::id_within(pid).unwrap_or(pid);
            assert_eq!(own, had, "generation {generation} has its old process id");
            running = Running::restored(pid, &scratch.path().join("twice"));
            if !self.ends_by_itself() {
                self.same(&before, pid, &format!("in generation {generation}"));
            }
            self.pause(scratch, ready);
        }
        running.finish("in generation 2");
    }
}

/// A `restore` in the foreground.
#[derive(Debug)]
pub struct Foreground {
    thread: std::thread::JoinHandle<Output>,
}

impl Foreground {
    /// Starts it.
    pub fn restore(stillpoint: &Stillpoint, checkpoint: &str, near: &Path) -> Self {
        let command = stillpoint.command(&["restore", checkpoint]);
        let near = near.to_owned();
        Foreground { thread: std::thread::spawn(move || Stillpoint::wait(command, &near)) }
    }

    /// Waits until the process that had this id lives and nobody traces it (or until the command has ended). What it is called now.
    pub fn await_process(&self, had: u32, scratch: &Scratch) -> u32 {
        let mark = scratch.path().display().to_string();
        crate::wait_for(&format!("process {had} to be back"), Duration::from_secs(60), || {
            let Some(pid) = kernel::restored(had, &mark) else {
                return self.thread.is_finished().then_some(had);
            };
            let runs = kernel::alive(pid)
                && kernel::threads(pid)
                    .iter()
                    .all(|&t| kernel::thread_state(pid, t).is_some_and(|s| s != 't'))
                && kernel::status(pid, "TracerPid").is_some_and(|t| t == "0")
                && !is_of_the_command(pid);
            (runs || self.thread.is_finished()).then_some(pid)
        })
    }

    /// Whether the command has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its end.
    pub fn wait(self) -> Output {
        crate::wait_for("restore to end", Duration::from_secs(90), || {
            self.thread.is_finished().then_some(())
        });
        match self.thread.join() {
            Ok(output) => output,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}
