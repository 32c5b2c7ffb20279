//! Streams that lead outside: pipes of a process that is not part of the program, and where they lead when it is restored.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;
use stillpoint_tests::kernel::Life;
use stillpoint_tests::target::alone;
use stillpoint_tests::{
    Build, Scratch, Stillpoint, Terminal, kernel, right, right_eq, skipped, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// Gives a command our ends of pipes as descriptors 6 and 7.
const AS_6_AND_7: &str = r#"exec "$@" 6<&0 7>&1 </dev/null >/dev/null 2>&1"#;

/// `lines.c`, and where its lines come from and go to.
struct Lines {
    directory: PathBuf,
    pid: u32,
    started: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Lines {
    /// Starts it by a command that has 6 and 7, which has it as process `pid_of`.
    fn start(command: Command, directory: &Path, pid_of: impl FnOnce(u32) -> u32) -> Self {
        Self::start_reading(command, directory, Stdio::piped(), pid_of)
    }

    /// The same with this for 6.
    fn start_reading(
        mut command: Command,
        directory: &Path,
        input: impl Into<Stdio>,
        pid_of: impl FnOnce(u32) -> u32,
    ) -> Self {
        command.current_dir(directory).stdin(input).stdout(Stdio::piped());
        let mut started = command.spawn().expect("sh");
        let (input, output) = (started.stdin.take(), started.stdout.take().map(BufReader::new));
        let pid = pid_of(started.id());
        Lines { directory: directory.to_owned(), pid, started, input, output }
    }

    /// Writes something for it to read.
    fn give(&mut self, text: &str) {
        self.input.as_mut().expect("input").write_all(text.as_bytes()).expect("a reader");
    }

    /// What has arrived: one line.
    fn get(&mut self) -> String {
        let mut line = String::new();
        self.output.as_mut().expect("output").read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// Lets it take a line; what became of that.
    fn turn(&self, number: u32) -> String {
        turn(&self.directory, number)
    }

    /// Kills it; nobody is at its other ends any more, and its turns are forgotten.
    fn kill(mut self, from: u32) {
        (self.input, self.output) = (None, None);
        kill(self.pid);
        let _ = self.started.wait();
        forget_turns(&self.directory, from);
    }
}

/// Writes as many long lines as find room, from that one on. How many.
fn fill(pipe: impl AsFd, from: usize) -> usize {
    fill_with(pipe, from, usize::MAX, long_line)
}

/// The same with such lines, and no more than that.
fn fill_with(pipe: impl AsFd, from: usize, most: usize, line: impl Fn(usize) -> String) -> usize {
    let flags = rustix::fs::fcntl_getfl(&pipe).expect("flags");
    rustix::fs::fcntl_setfl(&pipe, flags | rustix::fs::OFlags::NONBLOCK).expect("flags");
    let mut given = 0;
    // What is brought on makes room once more.
    for _ in 0..20 {
        while given < most && rustix::io::write(&pipe, format!("{}\n", line(from + given)).as_bytes()).is_ok()
        {
            given += 1;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    given
}

/// A line with its number, as long as a page nearly: it is written as a whole or not at all.
fn long_line(number: usize) -> String {
    format!("{number:03999}")
}

fn turn(directory: &Path, number: u32) -> String {
    fs::write(directory.join(format!("turn.{number}")), "").expect("a file");
    let done = directory.join(format!("done.{number}"));
    wait_for(&format!("line {number}"), PATIENCE, || fs::read_to_string(&done).ok())
}

fn forget_turns(directory: &Path, from: u32) {
    for number in from..from + 10 {
        for kind in ["turn", "done"] {
            let _ = fs::remove_file(directory.join(format!("{kind}.{number}")));
        }
    }
}

fn kill(pid: u32) {
    let life = Life::of(pid);
    kernel::kill(pid, kernel::SIGKILL);
    life.wait_over(PATIENCE);
}

/// A command as it is run by a shell with this text, in which it is `"$@"`.
fn in_shell(text: &str, command: &Command) -> Command {
    let mut shell = alone("sh");
    shell.args(["-c", text, "sh"]).arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell
}

/// A shell that gives a command 6 and 7.
fn with_6_and_7(command: &Command) -> Command {
    in_shell(AS_6_AND_7, command)
}

/// A command that runs it as the job `lines`.
fn run(stillpoint: &Stillpoint, program: &Path) -> Command {
    let mut run = stillpoint.command(&["run", "--name", "lines", "--"]);
    run.arg(program);
    run
}

/// A stillpoint that has pipes for its input and its output.
fn fed(stillpoint: &Stillpoint, arguments: &[&str], directory: &Path) -> Child {
    let mut command = stillpoint.command(arguments);
    command.current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().expect("stillpoint")
}

/// The only job of a store, as soon as it runs.
fn job(stillpoint: &Stillpoint) -> u32 {
    wait_for("the job", PATIENCE, || running(stillpoint))
}

/// Kills a job at its checkpoint, and waits until its process is gone. Somebody may have restored it by then.
fn kill_at_checkpoint(stillpoint: &Stillpoint, name: &str, pid: u32) {
    let life = Life::of(pid);
    stillpoint.run(&["checkpoint", name, "--kill"]).ok();
    life.wait_over(PATIENCE);
}

fn lines() -> Option<PathBuf> {
    let program = Build::Dynamic.of(&stillpoint_tests::programs::source("lines.c"));
    if program.is_none() {
        skipped("no compiler for it");
    }
    program.filter(|_| !undisturbed_only())
}

fn restore(stillpoint: &Stillpoint, extra: &[&str]) -> stillpoint_tests::stillpoint::Output {
    stillpoint.run(&[&["restore", "lines", "--detach", "--json"], extra].concat())
}

/// The only job of a store, if it runs.
fn running(stillpoint: &Stillpoint) -> Option<u32> {
    let listed = stillpoint.run(&["ls", "--json"]).ok().json();
    listed[0]["running"]["pid"].as_u64().map(|pid| pid as u32)
}

/// A checkpoint of a program that goes on is no concern of who is at the other ends. Where they lead then is told to the restore,
/// and nothing that was unread is lost.
#[test]
fn pipes_to_others_lead_where_they_are_told() {
    let Some(program) = lines() else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
    let mut plain = Command::new(&program);
    plain.env(stillpoint_tests::scratch::MARK, scratch.path());
    let mut lines = Lines::start(with_6_and_7(&plain), &directory, |pid| pid);
    lines.give("one\n");
    right_eq!(lines.turn(0), "one, written");
    right_eq!(lines.get(), "0: one");
    lines.give("two\nthree\n");
    let pid = lines.pid.to_string();
    for _ in 0..2 {
        let told = stillpoint.run(&["checkpoint", &pid, "--name", "lines", "--json"]).ok().json();
        let notes = told["notes"].to_string();
        assert!(
            notes.contains("descriptor 6 (a pipe from process")
                && notes.contains("descriptor 7 (a pipe to process"),
            "{notes}"
        );
    }
    let shown = stillpoint.run(&["show", "lines"]).ok().stdout;
    assert!(shown.contains("whose other end process"), "{shown}");
    right_eq!(lines.turn(1), "two, written");
    right_eq!(lines.get(), "1: two");
    lines.kill(1);

    // Nobody has said where they lead.
    restore(&stillpoint, &[]).fails(3, &["led outside"]);
    restore(&stillpoint, &["--pipes", "follow"]).fails(3, &["descriptor 6 of this command is not open"]);
    restore(&stillpoint, &["--fd", "6=more"]).fails(3, &["descriptor 7 (a pipe to process"]);
    restore(&stillpoint, &["--fd", "1=more"]).fails(2, &["these descriptors did: 6, 7"]);
    restore(&stillpoint, &["--fd", "six=more"]).fails(2, &["n=path"]);
    restore(&stillpoint, &["--fd", "6=missing", "--pipes", "closed"]).fails(3, &["missing: no such file"]);

    // Who was there has left; and so it is in each of its lives.
    let told = restore(&stillpoint, &["--pipes", "closed", "--restart", "on-crash"]).ok().json();
    assert!(told["notes"].to_string().contains("is cut off"), "{told}");
    right_eq!(turn(&directory, 1), "two, Broken pipe");
    let before = told["pid"].as_u64().expect("pid") as u32;
    kernel::kill(before, kernel::SIGKILL);
    fs::remove_file(directory.join("done.1")).expect("a file");
    right_eq!(turn(&directory, 1), "two, Broken pipe");
    let told = serde_json::json!({"pid": running(&stillpoint).expect("it runs")});
    for (number, outcome) in [(1, "two, Broken pipe"), (2, "three, Broken pipe"), (3, "end, Broken pipe")] {
        right_eq!(turn(&directory, number), outcome);
    }
    kill_at_checkpoint(&stillpoint, "lines", told["pid"].as_u64().expect("pid") as u32);
    stillpoint.run(&["rm", "lines@3"]).ok();
    forget_turns(&directory, 1);

    // Files: behind what was unread comes what is in the one, and the other grows.
    let (more, log) = (directory.join("more"), directory.join("log"));
    fs::write(&more, "four\n").expect("a file");
    fs::write(&log, "before\n").expect("a file");
    let status = || {
        let stat = fs::metadata(&log).expect("log");
        (stat.mode(), stat.uid(), stat.ino())
    };
    let before = status();
    let (from, to) = (format!("6={}", more.display()), format!("7={}", log.display()));
    restore(&stillpoint, &["--fd", &from, "--fd", &to]).fails(3, &["a file cannot come behind it"]);
    let fifo = directory.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let from = format!("6={}", fifo.display());
    let options = ["--fd", &from, "--fd", &to];
    let restart = [&options[..], &["--restart", "on-crash"]].concat();
    restore(&stillpoint, &restart).fails(3, &["what it has read of it cannot be read again"]);
    restore(&stillpoint, &options).ok();
    for (number, line) in [(1, "two"), (2, "three")] {
        right_eq!(turn(&directory, number), format!("{line}, written"));
    }
    // Nobody has had the FIFO open for writing so far.
    fs::write(&fifo, "four\n").expect("a reader");
    for (number, line) in [(3, "four"), (4, "end")] {
        right_eq!(turn(&directory, number), format!("{line}, written"));
    }
    right_eq!(fs::read_to_string(&log).expect("log"), "before\n1: two\n2: three\n3: four\n4: end\n");
    right_eq!(status(), before, "it is not the program's");
    // Now the one is a file, and the other one has ended.
    kill_at_checkpoint(&stillpoint, "lines", running(&stillpoint).expect("it runs"));
    let told = restore(&stillpoint, &[]).ok().json();
    right_eq!(turn(&directory, 5), "end, written");
    right!(fs::read_to_string(&log).expect("log").ends_with("4: end\n5: end\n"), "it goes on in its file");
    kill(told["pid"].as_u64().expect("pid") as u32);
    forget_turns(&directory, 1);

    // Those of whoever restores, in the background, too.
    let first = ["restore", "lines@2", "--detach", "--json"];
    let followed = stillpoint.command(&[&first[..], &["--pipes", "follow"]].concat());
    let by_hand = stillpoint.command(&[&first[..], &["--fd", "6=fd:6", "--fd", "7=fd:7"]].concat());
    for command in [followed, by_hand] {
        let mut lines = Lines::start(with_6_and_7(&command), &directory, |_| 0);
        assert!(lines.started.wait().expect("restore").success());
        lines.pid = running(&stillpoint).expect("it runs");
        lines.give("five\n");
        for (number, line) in [(1, "two"), (2, "three"), (3, "five")] {
            right_eq!(lines.turn(number), format!("{line}, written"));
            right_eq!(lines.get(), format!("{number}: {line}"));
        }
        lines.input = None;
        right_eq!(lines.turn(4), "end, written");
        lines.kill(1);
    }
}

/// What a job was started with follows whoever restores it, with what was not yet read of it.
#[test]
fn unread_input_of_other_streams_comes_first() {
    let Some(program) = lines() else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
    let pid_of = |_| job(&stillpoint);
    let mut lines = Lines::start(with_6_and_7(&run(&stillpoint, &program)), &directory, pid_of);
    lines.give("one\n");
    right_eq!(lines.turn(0), "one, written");
    right_eq!(lines.get(), "0: one");
    lines.give("two\n");
    stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
    lines.kill(1);
    let restore = stillpoint.command(&["restore", "lines"]);
    let mut lines = Lines::start(with_6_and_7(&restore), &directory, pid_of);
    lines.give("three\n");
    for (number, line) in [(1, "two"), (2, "three")] {
        right_eq!(lines.turn(number), format!("{line}, written"));
        right_eq!(lines.get(), format!("{number}: {line}"));
    }
    // And once more: what is brought to it came from outside, too.
    lines.give("four\n");
    wait_for("the line to be brought", PATIENCE, || {
        stillpoint.run(&["checkpoint", "lines"]).ok();
        let shown = stillpoint.run(&["show", "lines"]).ok().stdout;
        right!(!shown.contains("whose other end"), "{shown}");
        Some(())
    });
    lines.kill(3);
    let mut lines = Lines::start(with_6_and_7(&restore), &directory, pid_of);
    lines.give("five\n");
    let next = lines.turn(3);
    right!(["four, written", "five, written"].contains(&next.as_str()), "{next}");
    lines.kill(3);
}

/// While a shell redirects what a loop writes, its own standard output has another number; and so has its input where it is put aside.
#[test]
fn standard_streams_that_are_put_aside_are_still_standard() {
    if undisturbed_only() {
        return;
    }
    let script = r#"
        exec 3<&0 </dev/null
        echo first
        { echo ready; until [ -e go ]; do sleep 0.02; done; } >aside
        echo second
        read -r line <&3 && echo "$line"
        read -r line <&3 && echo "$line"
    "#;
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("aside"));
    let start = |arguments: &[&str]| fed(&stillpoint, arguments, &directory);
    let mut run = start(&["run", "--name", "aside", "--", "bash", "-c", script]);
    let mut input = run.stdin.take().expect("input");
    input.write_all(b"unread\n").expect("a reader");
    let is_ready = || fs::read_to_string(directory.join("aside")).ok().filter(|text| text == "ready\n");
    wait_for("the loop", PATIENCE, is_ready);
    let told = stillpoint.run(&["checkpoint", "aside", "--kill", "--json"]).ok().json();
    right!(!told["notes"].to_string().contains("leads outside"), "{told}");
    drop(input);
    let mut said = String::new();
    run.stdout.take().expect("output").read_to_string(&mut said).expect("text");
    right_eq!(said, "first\n");
    let _ = run.wait();
    let mut again = start(&["restore", "aside"]);
    again.stdin.take().expect("input").write_all(b"later\n").expect("a reader");
    fs::write(directory.join("go"), "").expect("a file");
    let mut said = String::new();
    again.stdout.take().expect("output").read_to_string(&mut said).expect("text");
    right_eq!(said, "second\nunread\nlater\n");
    assert!(again.wait().expect("restore").success());
}

/// Whose standard output it is makes no difference where the program has it under another number: a shell that runs `command >&7`.
#[test]
fn what_a_child_has_as_its_output_is_no_standard_stream() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("child"));
    let mut shell = alone("bash");
    shell
        .args(["-c", "exec 7>&1 >/dev/null; sh -c 'echo >ready; exec sleep 1000' >&7; :"])
        .current_dir(&directory);
    shell.env(stillpoint_tests::scratch::MARK, scratch.path());
    let mut started =
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("bash");
    wait_for("the child", PATIENCE, || directory.join("ready").exists().then_some(()));
    let pid = started.id().to_string();
    let told = stillpoint.run(&["checkpoint", &pid, "--name", "child", "--json"]).ok().json();
    let notes = told["notes"].to_string();
    right!(notes.contains("descriptor 7 (a pipe to process"), "{told}");
    for child in kernel::children(started.id()) {
        kernel::kill(child, kernel::SIGKILL);
    }
    let _ = started.kill();
    let _ = started.wait();
}

/// What cannot be told from something else is refused: a FIFO that has lost its name, and data that somebody else may read as well.
#[test]
fn pipes_of_which_it_is_not_clear_what_is_whose_are_refused() {
    let Some(program) = lines() else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
    let fifo = directory.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let script = r#"exec 5<>fifo 6<fifo; rm fifo; "$1" 5<&- 7>out & echo $! >pid; read -r _; kill $!"#;
    let mut shell = alone("sh");
    shell.args(["-c", script, "sh"]).arg(&program).current_dir(&directory);
    shell.env(stillpoint_tests::scratch::MARK, scratch.path());
    let mut started =
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("sh");
    let pid = wait_for("the program", PATIENCE, || {
        let text = fs::read_to_string(directory.join("pid")).ok()?;
        text.trim_end().parse::<u32>().ok().filter(|_| !fifo.exists())
    });
    stillpoint.run(&["checkpoint", &pid.to_string()]).fails(3, &["is shared with process"]);
    drop(started.stdin.take());
    let _ = started.wait();
    kill(pid);
    forget_turns(&directory, 0);

    // This process keeps the end that the program reads.
    let (ours, theirs) = std::io::pipe().expect("pipe");
    let mut reading = alone("sh");
    reading.args(["-c", r#"exec "$1" watched 6<&0 7>/dev/null </dev/null"#, "sh"]).arg(&program);
    reading.stdin(ours.try_clone().expect("a duplicate")).stdout(Stdio::null()).stderr(Stdio::null());
    reading.current_dir(&directory).env(stillpoint_tests::scratch::MARK, scratch.path());
    let mut started = reading.spawn().expect("sh");
    let pid = started.id().to_string();
    wait_for("it reads", PATIENCE, || {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        (exe == fs::canonicalize(&program).ok()?).then_some(())
    });
    (&theirs).write_all(b"whose\n").expect("room");
    stillpoint.run(&["checkpoint", &pid]).fails(3, &["either of them may read"]);
    drop((ours, reading));
    (&theirs).write_all(b"its\n").expect("room");
    stillpoint.run(&["checkpoint", &pid, "--name", "lines"]).ok();
    let _ = started.kill();
    let _ = started.wait();
    // A file cannot be watched, and a FIFO can.
    fs::write(directory.join("more"), "more\n").expect("a file");
    let file = format!("6={}", directory.join("more").display());
    restore(&stillpoint, &["--fd", &file]).fails(3, &["a file cannot"]);
    restore(&stillpoint, &["--fd", "6=fd:0"])
        .fails(3, &["descriptor 0 of this command: the program watches it"]);
    let as_input = |file: fs::File| {
        let command = &mut stillpoint.command(&["restore", "lines", "--detach", "--fd", "6=fd:0"]);
        let output = command.stdin(file).output().expect("stillpoint");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = as_input(fs::File::open(directory.join("more")).expect("a file"));
    assert!(code == Some(3) && said.contains("what was not yet read comes first"), "{said}");
    let told = restore(&stillpoint, &["--pipes", "closed"]).ok().json();
    for (number, line) in [(0, "whose"), (1, "its"), (2, "end")] {
        right_eq!(turn(&directory, number), format!("{line}, written"));
    }
    kill(told["pid"].as_u64().expect("pid") as u32);
}

/// What somebody else has kept of what a job was reading comes once: he has it still, and what was read since the checkpoint comes
/// before it.
#[test]
fn what_is_still_there_does_not_come_twice() {
    let Some(program) = lines() else { return };
    for as_input in ["6<&0 </dev/null", "6<&0"] {
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
        // As a shell that runs one command after the other with the same input.
        let (ours, mut theirs) = std::io::pipe().expect("pipe");
        let start = |arguments: &[&str]| {
            let text = format!(r#"exec "$@" {as_input} 7>/dev/null"#);
            let mut shell = in_shell(&text, &stillpoint.command(arguments));
            shell.current_dir(&directory).stdin(ours.try_clone().expect("a duplicate"));
            shell.stdout(Stdio::null()).stderr(Stdio::null());
            let started = shell.spawn().expect("sh");
            (started, job(&stillpoint))
        };
        let runs = |numbers: &[(u32, &str)]| {
            for (number, line) in numbers {
                right_eq!(turn(&directory, *number), format!("{line}, written"), "{as_input}");
            }
        };
        let program = program.to_str().expect("a name");
        let (mut first, _) = start(&["run", "--name", "lines", "--", program]);
        theirs.write_all(b"one\ntwo\nthree\n").expect("room");
        runs(&[(0, "one")]);
        stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
        let _ = first.wait();
        let (mut second, pid) = start(&["restore", "lines"]);
        theirs.write_all(b"four\n").expect("room");
        stillpoint.run(&["checkpoint", "lines"]).ok();
        runs(&[(1, "two"), (2, "three")]);
        kill(pid);
        let _ = second.wait();
        forget_turns(&directory, 1);
        let (mut third, pid) = start(&["restore", "lines"]);
        runs(&[(1, "two"), (2, "three"), (3, "four")]);
        // And when nobody writes any more.
        theirs.write_all(b"five\n").expect("room");
        drop(theirs);
        stillpoint.run(&["checkpoint", "lines"]).ok();
        kill_at_checkpoint(&stillpoint, "lines", pid);
        let _ = third.wait();
        let (mut fourth, pid) = start(&["restore", "lines"]);
        runs(&[(4, "five"), (5, "end")]);
        kill(pid);
        let _ = fourth.wait();
    }
}

/// What a supervisor has still to bring when a program is killed at its checkpoint is in that; and what it had not yet taken does not come
/// twice from where it still is.
#[test]
fn what_is_on_its_way_is_not_lost() {
    let Some(program) = lines() else { return };
    for is_kept in [false, true] {
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
        let pid_of = |_| job(&stillpoint);
        let lines = Lines::start(with_6_and_7(&run(&stillpoint, &program)), &directory, pid_of);
        let mut given = fill(lines.input.as_ref().expect("input"), 0);
        let restore = stillpoint.command(&["restore", "lines"]);
        stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
        lines.kill(0);
        let (ours, theirs) = std::io::pipe().expect("pipe");
        let same = || ours.try_clone().expect("a duplicate");
        let mut again = Lines::start_reading(with_6_and_7(&restore), &directory, same(), pid_of);
        right_eq!(again.turn(0), format!("{}, written", long_line(0)));
        right_eq!(again.get(), format!("0: {}", long_line(0)));
        given += fill(&theirs, given);
        stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
        again.kill(0);
        let mut lines = match is_kept {
            true => Lines::start_reading(with_6_and_7(&restore), &directory, same(), pid_of),
            false => Lines::start(with_6_and_7(&restore), &directory, pid_of),
        };
        (lines.input, _) = (None, theirs);
        for number in 1..given {
            right_eq!(lines.turn(number as u32), format!("{}, written", long_line(number)));
            right_eq!(lines.get(), format!("{number}: {}", long_line(number)));
            forget_turns(&directory, number as u32);
        }
        right_eq!(lines.turn(given as u32), "end, written");
        lines.kill(0);
    }
}

/// Whoever writes and never rests finds each line read once, however often the program is killed at a checkpoint meanwhile.
#[test]
fn a_writer_that_never_rests_loses_nothing() {
    const ALL: usize = 150;
    let Some(program) = lines() else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
    let pid_of = |_| job(&stillpoint);
    let lines = Lines::start(with_6_and_7(&run(&stillpoint, &program)), &directory, pid_of);
    let given = fill(lines.input.as_ref().expect("input"), 0);
    stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
    lines.kill(0);
    let (ours, mut theirs) = std::io::pipe().expect("pipe");
    let writer = std::thread::spawn(move || {
        for number in given..ALL {
            theirs.write_all(format!("{}\n", long_line(number)).as_bytes()).expect("a reader");
        }
    });
    let restore = stillpoint.command(&["restore", "lines"]);
    let mut number = 0;
    while number < ALL {
        let same = ours.try_clone().expect("a duplicate");
        let mut lines = Lines::start_reading(with_6_and_7(&restore), &directory, same, pid_of);
        let turns = 1 + scratch.random().below(30) as usize;
        for _ in 0..turns.min(ALL - number) {
            right_eq!(lines.turn(number as u32), format!("{}, written", long_line(number)));
            right_eq!(lines.get(), format!("{number}: {}", long_line(number)));
            forget_turns(&directory, number as u32);
            number += 1;
        }
        stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
        lines.kill(0);
    }
    writer.join().expect("it writes all");
}

/// What is connected by hand with a descriptor of the command is recorded as what the program has.
#[test]
fn what_is_connected_by_hand_is_known_by_its_own_number() {
    let Some(program) = lines() else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
    let pid_of = |_| job(&stillpoint);
    let mut lines = Lines::start(with_6_and_7(&run(&stillpoint, &program)), &directory, pid_of);
    lines.give("one\n");
    right_eq!(lines.turn(0), "one, written");
    stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
    lines.kill(0);
    let by_hand = stillpoint.command(&["restore", "lines", "--fd", "6=fd:9", "--fd", "7=fd:5"]);
    let shell = in_shell(r#"exec "$@" 9<&0 5>&1 </dev/null >/dev/null 2>&1"#, &by_hand);
    let mut lines = Lines::start(shell, &directory, pid_of);
    lines.give("two\nthree\n");
    right_eq!(lines.turn(1), "two, written");
    right_eq!(lines.get(), "1: two");
    stillpoint.run(&["checkpoint", "lines", "--kill"]).ok();
    lines.kill(1);
    let shown = stillpoint.run(&["show", "lines"]).ok().stdout;
    right!(shown.contains("stream 6 from outside") && shown.contains("stream 7 from outside"), "{shown}");
    let restore = stillpoint.command(&["restore", "lines"]);
    let mut lines = Lines::start(with_6_and_7(&restore), &directory, pid_of);
    lines.give("four\n");
    for (number, line) in [(2, "three"), (3, "four")] {
        right_eq!(lines.turn(number), format!("{line}, written"));
        right_eq!(lines.get(), format!("{number}: {line}"));
    }
    lines.kill(2);
}

/// A shell on a terminal puts its output aside while a loop writes to a file; it finds the terminal again.
#[test]
fn a_terminal_that_is_put_aside_is_still_written_to() {
    if undisturbed_only() {
        return;
    }
    for shell in ["bash", "dash"] {
        let script = r#"
            echo first
            { echo ready; echo beside >&2; until [ -e go ]; do sleep 0.02; done; } >aside
            echo second
            echo third >&2
            read -r line && echo "read $line"
        "#;
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("aside"));
        let terminal = Terminal::new();
        let run = stillpoint.command(&["run", "--name", "aside", "--", shell, "-c", script]);
        let mut started = terminal.start(&run, scratch.path(), &directory);
        let is_ready = || fs::read_to_string(directory.join("aside")).ok().filter(|text| text == "ready\n");
        wait_for("the loop", PATIENCE, is_ready);
        terminal.shows("beside", PATIENCE);
        stillpoint.run(&["checkpoint", "aside", "--kill"]).ok();
        let _ = started.wait();
        let (terminal, errors) = (Terminal::new(), directory.join("errors"));
        let restore = stillpoint.command(&["restore", "aside"]);
        let mut started = terminal.start(&restore, scratch.path(), &directory);
        fs::write(directory.join("go"), "").expect("a file");
        terminal.shows("third", PATIENCE);
        terminal.type_line("typed");
        terminal.shows("read typed", PATIENCE);
        assert!(started.wait().expect("restore").success(), "{shell}");
        // And where only errors go to the terminal, and input comes from it.
        let _ = (fs::remove_file(directory.join("go")), fs::remove_file(directory.join("aside")));
        let terminal = Terminal::new();
        let files =
            format!("exec {} run --name files -- {shell} -c '{script}' >out", run.get_program().display());
        let mut by_shell = Command::new("sh");
        by_shell.args(["-c", &files]).envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut started = terminal.start(&by_shell, scratch.path(), &directory);
        terminal.shows("beside", PATIENCE);
        stillpoint.run(&["checkpoint", "files", "--kill"]).ok();
        let _ = started.wait();
        let terminal = Terminal::new();
        let restore = stillpoint.command(&["restore", "files"]);
        let mut started = terminal.start(&restore, scratch.path(), &directory);
        fs::write(directory.join("go"), "").expect("a file");
        terminal.shows("third", PATIENCE);
        terminal.type_line("typed");
        assert!(started.wait().expect("restore").success(), "{shell}");
        let said = fs::read_to_string(directory.join("out")).expect("a file");
        right_eq!(said, "first\nsecond\nread typed\n", "{shell} {errors:?}");
        let _ = (fs::remove_file(directory.join("go")), fs::remove_file(directory.join("aside")));
    }
}

/// A job that is brought back while nobody can be asked goes on from the newest checkpoint for which nobody has to be asked.
#[test]
fn a_job_is_resumed_from_where_nobody_has_to_be_asked() {
    if undisturbed_only() {
        return;
    }
    // `tee` is nobody's child soon, and not part of the job.
    let script = r#"
        echo first >step
        until [ -e go ]; do sleep 0.02; done
        exec 7> >( (exec tee log <&0 >/dev/null & ) )
        sleep 0.3
        echo second >step
        until [ -e end ]; do sleep 0.02; done
        echo done >&7
    "#;
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("steps"));
    let mut run = stillpoint.command(&["run", "--detach", "--name", "job", "--", "bash", "-c", script]);
    assert!(run.current_dir(&directory).status().expect("run").success());
    let step = |wanted: &str| {
        let step =
            || fs::read_to_string(directory.join("step")).ok().filter(|step| step.trim_end() == wanted);
        wait_for(wanted, PATIENCE, step);
    };
    step("first");
    stillpoint.run(&["checkpoint", "job"]).ok();
    fs::write(directory.join("go"), "").expect("a file");
    step("second");
    let told = stillpoint.run(&["checkpoint", "job", "--json"]).ok().json();
    right!(told["notes"].to_string().contains("descriptor 7 (a pipe to process"), "{told}");
    assert!(crate::outlive::cut(&scratch, &stillpoint));
    fs::write(directory.join("step"), "none").expect("a file");
    let told = stillpoint.run(&["resume", "job"]).ok();
    let said = told.stdout + &told.stderr;
    right!(said.contains("job@2 is passed over: descriptor 7"), "{said}");
    step("second");
    fs::write(directory.join("end"), "").expect("a file");
    wait_for("its end", PATIENCE, || {
        fs::read_to_string(directory.join("log")).ok().filter(|text| text == "done\n")
    });
}

/// Whoever is at the other ends of a program that is killed at its checkpoint sees nothing of it: it comes back to the same pipes.
#[test]
fn pipes_to_others_are_kept() {
    let Some(program) = lines() else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("lines"));
    let mut plain = Command::new(&program);
    plain.env(stillpoint_tests::scratch::MARK, scratch.path());
    // By name, and another process has the other end; and without one.
    let fifo = directory.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let by_name = format!(r#"exec "$@" 7>&1 6<"{}" </dev/null >/dev/null 2>&1"#, fifo.display());
    let shell = in_shell(&by_name, &plain);
    for (command, is_named) in [(with_6_and_7(&plain), false), (shell, true)] {
        let mut lines = Lines::start(command, &directory, |pid| pid);
        let mut by_name = is_named.then(|| fs::File::options().write(true).open(&fifo).expect("a reader"));
        let mut give = |text: &str, lines: &mut Lines| match &mut by_name {
            Some(file) => file.write_all(text.as_bytes()).expect("a reader"),
            None => lines.give(text),
        };
        give("one\n", &mut lines);
        right_eq!(lines.turn(0), "one, written");
        right_eq!(lines.get(), "0: one");
        for (at, text) in [(1, "two"), (3, "four")] {
            give(&format!("{text}\n"), &mut lines);
            let pid = match at {
                1 => lines.pid.to_string(),
                _ => "lines".into(),
            };
            let told = stillpoint.run(&["checkpoint", &pid, "--name", "lines", "--kill", "--json"]);
            let told = told.ok().json()["notes"].to_string();
            right!(told.contains("kept open for a restore") && !told.contains("is to be told"), "{told}");
            kernel::wait_gone(lines.pid, PATIENCE);
            let _ = lines.started.wait();
            // Meanwhile the others go on.
            give(&format!("{text} and more\n"), &mut lines);
            // A restore that fails takes nothing.
            restore(&stillpoint, &["--fd", "7=/"]).fails(3, &["it is a directory"]);
            restore(&stillpoint, &["--restart", "on-crash"]).fails(3, &["must be there for later lives"]);
            let told = restore(&stillpoint, &[]).ok().json();
            lines.pid = told["pid"].as_u64().expect("pid") as u32;
            for (number, line) in [(at, text.to_owned()), (at + 1, format!("{text} and more"))] {
                right_eq!(lines.turn(number), format!("{line}, written"));
                right_eq!(lines.get(), format!("{number}: {line}"));
            }
        }
        drop(by_name);
        lines.input = None;
        right_eq!(lines.turn(5), "end, written");
        right_eq!(lines.get(), "5: end");
        // Nobody has an end of it any more but the program.
        kill(lines.pid);
        let mut rest = String::new();
        lines.output.as_mut().expect("output").read_to_string(&mut rest).expect("its end");
        right_eq!(rest, "");
        forget_turns(&directory, 0);
        // With the checkpoint goes what was kept; and after it is gone it has to be said where it leads.
        stillpoint.run(&["rm", "lines@1"]).ok();
        let said = ["led outside: say where it leads now"];
        match is_named {
            false => drop(restore(&stillpoint, &[]).fails(3, &said)),
            true => drop(restore(&stillpoint, &[]).fails(3, &["descriptor 7"])),
        }
        let told = restore(&stillpoint, &["--pipes", "closed"]).ok().json();
        right_eq!(turn(&directory, 3), "four, Broken pipe");
        kill(told["pid"].as_u64().expect("pid") as u32);
        forget_turns(&directory, 0);
        // Whoever supervised it may still be writing down that it has ended.
        wait_for("its end", PATIENCE, || stillpoint.run(&["rm", "lines"]).status.success().then_some(()));
    }
}

/// A script of a shell, which has what is said to `$S` done by stillpoint.
fn script(stillpoint: &Stillpoint, directory: &Path, text: &str) -> Child {
    let command = stillpoint.command::<&str>(&[]);
    let mut shell = alone("sh");
    shell.args(["-c", text]).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.env("S", command.get_program()).current_dir(directory);
    shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("sh")
}

/// A shell that runs one command after the other with the same files goes on where a restored program ends, as with any other command.
#[test]
fn files_of_a_shell_are_still_its_own() {
    if undisturbed_only() {
        return;
    }
    const LOOP: &str = "for i in 1 2 3 4 5 6; do echo $i; until [ -e step.$i ]; do sleep 0.02; done; done";
    let said = |directory: &Path, wanted: &str| {
        let lines = wanted.replace(' ', "\n") + "\n";
        let is_there = || fs::read_to_string(directory.join("out")).ok().filter(|text| *text == lines);
        wait_for(wanted, PATIENCE, is_there);
    };
    let step = |directory: &Path, number: u32| {
        fs::write(directory.join(format!("step.{number}")), "").expect("a file");
    };
    for is_killed in [true, false] {
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("shell"));
        let text = match is_killed {
            true => {
                format!(r#"{{ "$S" run --name job -- sh -c '{LOOP}'; "$S" restore job; echo after; }} >out"#)
            }
            false => {
                format!(r#"{{ "$S" run --name job --restart on-crash -- sh -c '{LOOP}'; echo after; }} >out"#)
            }
        };
        let mut shell = script(&stillpoint, &directory, &text);
        said(&directory, "1");
        step(&directory, 1);
        said(&directory, "1 2");
        let pid = running(&stillpoint).expect("it runs");
        let mut all = "1 2 3 4 5 6 after";
        let life = Life::of(pid);
        match is_killed {
            true => drop(stillpoint.run(&["checkpoint", "job", "--kill"]).ok()),
            false => {
                stillpoint.run(&["checkpoint", "job"]).ok();
                step(&directory, 2);
                said(&directory, "1 2 3");
                // What it had written since stays, as the shell may have written it.
                all = "1 2 3 3 4 5 6 after";
                kernel::kill(pid, kernel::SIGKILL);
            }
        }
        life.wait_over(PATIENCE);
        for number in 2..=6 {
            step(&directory, number);
        }
        assert!(shell.wait().expect("sh").success());
        let out = fs::read_to_string(directory.join("out")).expect("a file");
        right_eq!(out, all.replace(' ', "\n") + "\n");
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("shell"));
    fs::write(directory.join("lines"), "one\ntwo\nthree\nfour\nfive\n").expect("a file");
    let reads = "read -r a; read -r b; echo $a >out; echo $b >>out; until [ -e step.1 ]; do sleep 0.02; done; read -r c; echo $c >out";
    let text =
        format!(r#"{{ "$S" run --name job -- sh -c '{reads}'; "$S" restore job; cat >rest; }} <lines"#);
    let mut shell = script(&stillpoint, &directory, &text);
    said(&directory, "one two");
    kill_at_checkpoint(&stillpoint, "job", running(&stillpoint).expect("it runs"));
    step(&directory, 1);
    assert!(shell.wait().expect("sh").success());
    said(&directory, "three");
    right_eq!(fs::read_to_string(directory.join("rest")).expect("a file"), "four\nfive\n");
}

/// A shell that reads its commands from the file that a program has as its input does not read them again.
#[test]
fn a_shell_goes_on_in_its_script() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("shell"));
    let commands = "\"$S\" run --name job -- sh -c 'until [ -e go ]; do sleep 0.02; done'\n\"$S\" restore job\necho end >>ends\n";
    fs::write(directory.join("commands"), commands).expect("a file");
    let mut shell = script(&stillpoint, &directory, "exec bash <commands");
    kill_at_checkpoint(&stillpoint, "job", job(&stillpoint));
    fs::write(directory.join("go"), "").expect("a file");
    assert!(shell.wait().expect("bash").success());
    right_eq!(fs::read_to_string(directory.join("ends")).expect("a file"), "end\n");
}

/// A program that locks its input, as workers do that take turns in reading, is fed and saved as any other.
#[test]
fn input_that_is_locked_is_fed() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("locked"));
    let text = "flock 0; echo ready >said; until [ -e go ]; do sleep 0.02; done; while read -r line; do echo $line >>said; done";
    let start = |arguments: &[&str]| fed(&stillpoint, arguments, &directory);
    let said = |wanted: &str| {
        let said = || fs::read_to_string(directory.join("said")).ok().filter(|text| text == wanted);
        wait_for(wanted, PATIENCE, said);
    };
    let mut run = start(&["run", "--name", "locked", "--", "bash", "-c", text]);
    run.stdin.as_mut().expect("input").write_all(b"one\n").expect("room");
    said("ready\n");
    stillpoint.run(&["checkpoint", "locked", "--kill"]).ok();
    let _ = run.wait();
    let mut again = start(&["restore", "locked"]);
    fs::write(directory.join("go"), "").expect("a file");
    said("ready\none\n");
    again.stdin.as_mut().expect("input").write_all(b"two\n").expect("room");
    said("ready\none\ntwo\n");
    stillpoint.run(&["checkpoint", "locked"]).ok();
    again.stdin.as_mut().expect("input").write_all(b"three\n").expect("room");
    said("ready\none\ntwo\nthree\n");
    drop(again.stdin.take());
    assert!(again.wait().expect("restore").success());
}

/// Two pipes that were one number in two processes cannot follow to one descriptor; each leads where it is told.
#[test]
fn pipes_of_one_number_lead_to_different_places() {
    if undisturbed_only() {
        return;
    }
    let script = r#"
        exec 7>&1 8>&2 >/dev/null 2>&1
        sh -c 'echo >ready; until [ -e go ]; do sleep 0.02; done; echo child >&7' 7>&8 8>&- &
        exec 8>&-
        until [ -e go ]; do sleep 0.02; done
        echo parent >&7
        wait
    "#;
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("two"));
    let mut shell = alone("sh");
    shell.args(["-c", script]).current_dir(&directory).env(stillpoint_tests::scratch::MARK, scratch.path());
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut started = shell.spawn().expect("sh");
    wait_for("the child", PATIENCE, || directory.join("ready").exists().then_some(()));
    let pid = started.id().to_string();
    let told = stillpoint.run(&["checkpoint", &pid, "--name", "lines", "--kill", "--json"]).ok().json();
    let notes = told["notes"].to_string();
    right!(notes.contains("kept open for a restore within 15 minutes (2)"), "{notes}");
    let _ = started.wait();
    let follow = |shell: &str, extra: &[&str]| {
        let arguments = [&["restore", "lines", "--detach", "--pipes", "follow"], extra].concat();
        in_shell(shell, &stillpoint.command(&arguments))
    };
    Stillpoint::wait(follow(r#"exec "$@" 7>/dev/null"#, &[]), scratch.path())
        .fails(3, &["would both lead to descriptor 7 of this command"]);
    let mut lines = Lines::start(follow(AS_6_AND_7, &["--fd", "7=file"]), &directory, |pid| pid);
    assert!(lines.started.wait().expect("restore").success());
    fs::write(directory.join("go"), "").expect("a file");
    let mut followed = String::new();
    lines.output.as_mut().expect("output").read_to_string(&mut followed).expect("text");
    right_eq!(followed, "child\n");
    let is_there = || fs::read_to_string(directory.join("file")).ok().filter(|text| !text.is_empty());
    right_eq!(wait_for("the parent", PATIENCE, is_there), "parent\n");
}

/// Several clones are not led to what they would take from each other; of files each has its own.
#[test]
fn clones_take_nothing_from_each_other() {
    if undisturbed_only() {
        return;
    }
    if !kernel::is_root() {
        return skipped("needs private pid namespaces");
    }
    let script = r#"
        echo >ready
        until [ -e go ]; do sleep 0.02; done
        while read -r line <&6; do echo "$line" >&7; done
    "#;
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("clones"));
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).env(stillpoint_tests::scratch::MARK, scratch.path());
    let mut lines = Lines::start(with_6_and_7(&shell), &directory, |pid| pid);
    wait_for("it", PATIENCE, || directory.join("ready").exists().then_some(()));
    let pid = lines.pid.to_string();
    stillpoint.run(&["checkpoint", &pid, "--name", "lines", "--kill"]).ok();
    let _ = lines.started.wait();
    let fifo = directory.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let (own, log) = (directory.join("own"), directory.join("log"));
    fs::write(&own, "one\ntwo\n").expect("a file");
    let [fifo, own, to] =
        [format!("6={}", fifo.display()), format!("6={}", own.display()), format!("7={}", log.display())];
    let clones = |extra: &[&str]| {
        stillpoint.run(&[&["restore", "lines", "--detach", "--clone", "--count", "2"], extra].concat())
    };
    let said = "would take from each other";
    clones(&[]).fails(3, &[&format!("descriptor 6, descriptor 7: several clones {said}")]);
    clones(&["--fd", &fifo, "--fd", &to]).fails(3, &[&format!("descriptor 6: several clones {said}")]);
    clones(&["--fd", "6=fd:0", "--pipes", "closed"]).fails(3, &[said]);
    clones(&["--fd", &own, "--fd", &to]).ok();
    fs::write(directory.join("go"), "").expect("a file");
    let lines = || {
        let mut lines: Vec<String> = fs::read_to_string(&log).ok()?.lines().map(str::to_owned).collect();
        lines.sort();
        (lines.len() >= 4).then_some(lines)
    };
    right_eq!(wait_for("the clones", PATIENCE, lines), ["one", "one", "two", "two"]);
}

/// A job in the background has nothing of the streams of whoever restored it but what it was connected with.
#[test]
fn a_job_in_the_background_has_no_standard_output_of_ours() {
    if undisturbed_only() {
        return;
    }
    let script = "exec 8>&7; echo >ready; until [ -e go ]; do sleep 0.02; done; echo text >&8";
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("job"));
    let mut run = stillpoint.command(&["run", "--name", "lines", "--", "sh", "-c"]);
    run.arg(script);
    let mut lines = Lines::start(with_6_and_7(&run), &directory, |_| job(&stillpoint));
    wait_for("it", PATIENCE, || directory.join("ready").exists().then_some(()));
    kill_at_checkpoint(&stillpoint, "lines", lines.pid);
    lines.kill(0);
    // What is standard output to the restore is 7 to the job.
    let restore = stillpoint.command(&["restore", "lines", "--detach", "--fd", "7=fd:7"]);
    let both = in_shell(r#"exec "$@" 7>&1 </dev/null 2>/dev/null"#, &restore);
    lines = Lines::start(both, &directory, |_| 0);
    assert!(lines.started.wait().expect("restore").success());
    kill_at_checkpoint(&stillpoint, "lines", running(&stillpoint).expect("it runs"));
    let shown = stillpoint.run(&["show", "lines"]).ok().stdout;
    right!(shown.contains("8  stream 7 from outside") && !shown.contains("standard output"), "{shown}");
    // So it is where these are not the same.
    let restore = stillpoint.command(&["restore", "lines"]);
    lines = Lines::start(with_6_and_7(&restore), &directory, |_| job(&stillpoint));
    fs::write(directory.join("go"), "").expect("a file");
    right_eq!(lines.get(), "text");
}

/// Packets that were not yet read stay packets, one or as many as find room, also where more of them wait behind a full pipe.
#[test]
fn packets_come_one_by_one() {
    if undisturbed_only() {
        return;
    }
    let script = r#"
        n=0
        while :; do
            until [ -e turn.$n ]; do sleep 0.01; done
            dd bs=64 count=1 status=none <&6 >done
            mv done done.$n
            n=$((n + 1))
        done
    "#;
    let packet = |number: usize| format!("packet {number}");
    const ALL: usize = usize::MAX;
    for (taken, given_each) in [(0, [ALL, ALL]), (1, [ALL, ALL]), (0, [1, 0]), (1, [2, 0])] {
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("packets"));
        let mut run = stillpoint.command(&["run", "--name", "lines", "--", "sh", "-c"]);
        run.arg(script);
        let restore = stillpoint.command(&["restore", "lines"]);
        let start = |command: &Command| {
            let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::DIRECT).expect("pipe");
            let lines = Lines::start_reading(with_6_and_7(command), &directory, ours, |_| job(&stillpoint));
            (lines, theirs)
        };
        let (mut given, mut number) = (0, 0);
        let mut read_until = |lines: &Lines, end: usize| {
            while number < end {
                right_eq!(lines.turn(number as u32), format!("{}\n", packet(number)), "{given_each:?}");
                forget_turns(&directory, number as u32);
                number += 1;
            }
        };
        for (command, most) in [&run, &restore].into_iter().zip(given_each) {
            let (lines, theirs) = start(command);
            given += fill_with(&theirs, given, most, packet);
            read_until(&lines, taken);
            kill_at_checkpoint(&stillpoint, "lines", lines.pid);
            lines.kill(0);
        }
        let (lines, theirs) = start(&restore);
        given += fill_with(&theirs, given, 1, packet);
        drop(theirs);
        read_until(&lines, given);
        right_eq!(lines.turn(given as u32), "", "its end");
    }
}

/// Connections that were kept together with pipes are closed by `--tcp close` only where it is said what becomes of the pipes.
#[test]
fn connections_are_closed_and_pipes_are_not() {
    if undisturbed_only() {
        return;
    }
    let script = r#"
        trap '' PIPE
        exec 5<>/dev/tcp/127.0.0.1/$0
        echo >ready
        until [ -e go ]; do sleep 0.02; done
        read -r line <&5 || line=over
        echo "$line" >&7 && echo "$line" >said || echo "$line, cut off" >said
    "#;
    let cases: [(&[&str], &str); 4] = [
        (&[], "word"),
        (&["--pipes", "closed"], "word, cut off"),
        (&["--pipes", "closed", "--tcp", "close"], "over, cut off"),
        (&["--fd", "6=/dev/null", "--fd", "7=log", "--tcp", "close"], "over"),
    ];
    for (options, outcome) in cases {
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("connected"));
        let door = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut shell = Command::new("bash");
        shell.args(["-c", script, &door.local_addr().expect("address").port().to_string()]);
        shell.env(stillpoint_tests::scratch::MARK, scratch.path());
        let mut lines = Lines::start(with_6_and_7(&shell), &directory, |pid| pid);
        let (mut guest, _) = door.accept().expect("a guest");
        guest.set_read_timeout(Some(PATIENCE)).expect("patience");
        wait_for("it", PATIENCE, || directory.join("ready").exists().then_some(()));
        let pid = lines.pid.to_string();
        stillpoint.run(&["checkpoint", &pid, "--name", "lines", "--kill"]).ok();
        let _ = lines.started.wait();
        restore(&stillpoint, &["--tcp", "close"]).fails(3, &["cannot be closed alone"]);
        restore(&stillpoint, &["--tcp", "close", "--fd", "7=/dev/null"])
            .fails(3, &["cannot be closed alone"]);
        let mut again = stillpoint.command(&[&["restore", "lines", "--detach"], options].concat());
        assert!(again.current_dir(&directory).stdout(Stdio::null()).status().expect("restore").success());
        let is_over = outcome.starts_with("over");
        match is_over {
            true => right_eq!(guest.read(&mut [0; 10]).expect("its end"), 0),
            false => guest.write_all(b"word\n").expect("a reader"),
        }
        fs::write(directory.join("go"), "").expect("a file");
        let said = || fs::read_to_string(directory.join("said")).ok().filter(|said| said.ends_with('\n'));
        right_eq!(wait_for("its end", PATIENCE, said), format!("{outcome}\n"), "{options:?}");
        let mut rest = String::new();
        lines.output.as_mut().expect("output").read_to_string(&mut rest).expect("its end");
        let is_kept = options.is_empty();
        right_eq!(rest, if is_kept { "word\n" } else { "" }, "{options:?}");
    }
}
