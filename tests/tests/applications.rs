//! Applications that people sit in front of, or start by others: editors, viewers, shells with jobs, an MPI program. They are
//! checkpointed, killed and restored, and what they do then is what they would have done.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use stillpoint_tests::programs::{Program, installed, source};
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::alone;
use stillpoint_tests::{
    Scratch, Stillpoint, Terminal, kernel, right, right_eq, skipped, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(60);
/// How often each is killed and restored.
const LIVES: u16 = 3;

/// A job in a terminal, with another one for each of its lives.
struct Job {
    scratch: Scratch,
    stillpoint: Stillpoint,
    directory: PathBuf,
    terminal: Terminal,
    front: Child,
    lives: u16,
}

impl Job {
    fn start(scratch: Scratch, command: &[&str]) -> Self {
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("job"));
        let terminal = Terminal::of_size(24, 80);
        let arguments = [&["run", "--name", "job", "--"], command].concat();
        let front = Self::front(&stillpoint, &terminal, &scratch, &directory, &arguments);
        Job { scratch, stillpoint, directory, terminal, front, lives: 0 }
    }

    fn front(
        stillpoint: &Stillpoint,
        terminal: &Terminal,
        scratch: &Scratch,
        directory: &Path,
        arguments: &[&str],
    ) -> Child {
        let mut command = stillpoint.command(arguments);
        command.env("TERM", "xterm").env("HOME", directory).env("LC_ALL", "C");
        terminal.start(&command, scratch.path(), directory)
    }

    #[track_caller]
    fn shows(&self, text: &str) {
        self.terminal.shows(text, PATIENCE);
    }

    /// Types something, and waits until a text is shown.
    #[track_caller]
    fn says(&self, keys: &str, text: &str) {
        self.terminal.type_keys(keys);
        self.shows(text);
    }

    /// A checkpoint with these options. Something is refused that passes: a program that looks at other processes may have
    /// their files open just then.
    #[track_caller]
    fn checkpoint(&self, extra: &[&str]) {
        let arguments = [&["checkpoint", "job", "--json"], extra].concat();
        let what = format!("checkpoint {extra:?}");
        wait_for(&what, PATIENCE, || {
            let output = self.stillpoint.run(&arguments);
            let passes = output.code() == 3 && output.stderr.contains("not part of the program");
            (!passes).then(|| output.ok())
        });
    }

    /// Checkpoints it while it goes on, kills it at another checkpoint, and restores it in a new terminal of another size.
    #[track_caller]
    fn live_again(&mut self) {
        self.checkpoint(&[]);
        self.checkpoint(&["--kill"]);
        self.front.wait().expect("wait");
        self.lives += 1;
        self.terminal = Terminal::of_size(24 + self.lives, 80 + self.lives);
        self.front = Self::front(
            &self.stillpoint,
            &self.terminal,
            &self.scratch,
            &self.directory,
            &["restore", "job"],
        );
        self.shows("restored as pid");
    }

    /// Waits for its end.
    #[track_caller]
    fn ends_with(mut self, code: i32) {
        let status = wait_for("the job to end", PATIENCE, || self.front.try_wait().expect("wait"));
        right_eq!(status.code(), Some(code), "{status}: {:?}", self.terminal.shown());
        self.scratch.nothing_is_left("in the end");
    }
}

/// What is typed before a checkpoint and after a restore comes together in the file; the screen has the size of the terminal.
#[test]
fn vim() {
    let Some(vim) = installed(&["vim"], "vim") else { return };
    if undisturbed_only() {
        return;
    }
    let vim = vim.to_str().expect("path");
    let mut job = Job::start(Scratch::new(), &[vim, "-u", "NONE", "-i", "NONE", "-N", "text"]);
    let text = job.directory.join("text");
    let has = |expected: &str| {
        wait_for(&format!("{} to be {expected:?}", text.display()), PATIENCE, || {
            (fs::read_to_string(&text).unwrap_or_default() == expected).then_some(())
        });
    };
    // A register, then typed text, in the middle of which it is written.
    job.terminal.type_keys("ifirst line\x1byyosecond\x0f:w\r");
    let mut expected = String::from("first line\nsecond");
    has(&format!("{expected}\n"));
    for life in 1..=LIVES {
        job.live_again();
        // It is in the middle of the line still, and in insert mode.
        job.terminal.type_keys(&format!(" goes on in life {life}\x0f:w\r"));
        expected += &format!(" goes on in life {life}");
        has(&format!("{expected}\n"));
    }
    job.terminal.type_keys("\x1bp:w\r");
    has(&format!("{expected}\nfirst line\n"));
    // It looks at the size of its window when it has nothing else to do.
    let size = job.directory.join("size");
    wait_for("the size of the terminal", PATIENCE, || {
        job.terminal.type_keys(":call writefile([&lines . ' ' . &columns], 'size')\r");
        std::thread::sleep(Duration::from_millis(100));
        let told = fs::read_to_string(&size).unwrap_or_default();
        (told == format!("{} {}\n", 24 + LIVES, 80 + LIVES)).then_some(())
    });
    job.terminal.type_keys(":q\r");
    job.ends_with(0);
}

/// Who leads the session in the terminal has it open by its general name, as editors have that run shells in terminals of their own.
#[test]
fn a_program_with_a_shell_in_a_terminal_of_its_own() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let script = r#"
import os, pty
screen = os.open("/dev/tty", os.O_RDWR)
child, inner = pty.fork()
if child == 0:
    own = os.open("/dev/tty", os.O_RDWR)
    while True:
        os.write(own, b"inner heard " + os.read(own, 100).strip() + b"\n")
os.write(screen, b"ready\r\n")
while True:
    said = os.read(screen, 100)
    if said.strip() == b"end":
        os.kill(child, 9)
        os.waitpid(child, 0)
        os._exit(0)
    os.write(inner, said)
    got = b""
    while got.count(b"\n") < 2: got += os.read(inner, 100)
    os.write(screen, got.splitlines()[1] + b"\r\n")
"#;
    let mut job = Job::start(Scratch::new(), &[python.to_str().expect("path"), "-c", script]);
    job.shows("ready");
    job.says("one\r", "inner heard one");
    for life in 1..=LIVES {
        job.live_again();
        job.says(&format!("life {life}\r"), &format!("inner heard life {life}"));
    }
    job.terminal.type_keys("end\r");
    job.ends_with(0);
}

/// It goes on to draw, and listens to its keys.
#[test]
fn htop() {
    let Some(htop) = installed(&["htop"], "htop") else { return };
    if undisturbed_only() {
        return;
    }
    let mut job = Job::start(Scratch::new(), &[htop.to_str().expect("path"), "-d", "3"]);
    let draws = |job: &Job, what: &str| {
        for n in 0..3 {
            let before = job.terminal.shown().len();
            wait_for(&format!("it to draw {what}, {n}"), PATIENCE, || {
                (job.terminal.shown().len() > before + 20).then_some(())
            });
        }
    };
    draws(&job, "undisturbed");
    for life in 1..=LIVES {
        job.live_again();
        draws(&job, &format!("in life {life}"));
    }
    // Its help, which it draws only if asked.
    job.says("h", "Hisham Muhammad");
    job.terminal.type_keys(" ");
    draws(&job, "again");
    job.terminal.type_keys("q");
    job.ends_with(0);
}

/// Jobs that stand, run, and are in front come back as such, and the shell has its terminal.
#[test]
fn bash_with_jobs() {
    let Some(bash) = installed(&["bash"], "bash") else { return };
    if undisturbed_only() {
        return;
    }
    let shell = [bash.to_str().expect("path"), "--norc", "--noprofile", "-i"];
    let mut job = Job::start(Scratch::new(), &shell);
    job.says("known=5; echo it-is-$known\n", "it-is-5");
    job.says("sleep 10000 & echo in-the-back-$?\n", "in-the-back-0");
    job.says("sed -u 's/^/heard: /'\nword\n", "heard: word");
    job.says("\x1a", "Stopped");
    for life in 1..=LIVES {
        // It waits for a command, and a job of it is stopped.
        job.live_again();
        job.says(
            &format!("echo life-{life}-$known $(jobs -r | grep -c sleep)\n"),
            &format!("life-{life}-5 1"),
        );
        job.says("jobs\n", "Stopped");
        job.says(&format!("fg %2\nagain {life}\n"), &format!("heard: again {life}"));
        // That job is in front, and waits for a line.
        job.live_again();
        job.says(&format!("once more {life}\n"), &format!("heard: once more {life}"));
        job.says("\x1a", "Stopped");
    }
    job.says("fg %2\nthe last\n", "heard: the last");
    job.says("\x04kill %1; wait; echo over-$known\n", "over-5");
    job.terminal.type_keys("exit 7\n");
    job.ends_with(7);
}

/// Where its ids are taken, it lives in a pid namespace of its own, and has its terminal there, too.
#[test]
fn bash_whose_ids_are_taken() {
    let Some(bash) = installed(&["bash"], "bash") else { return };
    if !kernel::is_root() {
        return skipped("a pid namespace takes root");
    }
    if undisturbed_only() {
        return;
    }
    let shell = [bash.to_str().expect("path"), "--norc", "--noprofile", "-i"];
    let job = Job::start(Scratch::new(), &shell);
    job.says("known=5; echo it-is-$known\n", "it-is-5");
    job.says("sed -u 's/^/heard: /'\nword\n", "heard: word");
    job.checkpoint(&[]);
    // That one goes on, and has the ids.
    let terminal = Terminal::of_size(30, 90);
    let restore = ["restore", "job@1"];
    let mut other = Job::front(&job.stillpoint, &terminal, &job.scratch, &job.directory, &restore);
    terminal.shows("it sees itself as", PATIENCE);
    let says = |keys: &str, text: &str| {
        terminal.type_keys(keys);
        terminal.shows(text, PATIENCE);
    };
    says("another\n", "heard: another");
    says("\x1a", "Stopped");
    says("echo life-$known\n", "life-5");
    says("fg\nand on\n", "heard: and on");
    terminal.type_keys("\x04exit 4\n");
    let status = wait_for("the shell to end", PATIENCE, || other.try_wait().expect("wait"));
    right_eq!(status.code(), Some(4), "{:?}", terminal.shown());
    job.says("here\n", "heard: here");
    job.says("\x04echo over-$known\n", "over-5");
    job.terminal.type_keys("exit 3\n");
    job.ends_with(3);
}

/// It goes on to show pages, from a file and from a pipe that is still being written.
fn pages(command: &[&str], line: impl Fn(u32) -> String) {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let text: String = (1..=20_000).map(|n| format!("{}\n", line(n))).collect();
    fs::write(scratch.directory("job").join("long"), text).expect("text");
    let mut job = Job::start(scratch, command);
    job.shows(&line(5));
    job.says("500g", &line(510));
    for life in 1..=u32::from(LIVES) {
        job.live_again();
        let at = 3000 * life;
        job.says(&format!("/{}$\r", line(at)), &line(at + 10));
        job.says("b", &line(at - 10));
    }
    job.terminal.type_keys("q");
    job.ends_with(0);
}

#[test]
fn less() {
    let Some(less) = installed(&["less"], "less") else { return };
    pages(&[less.to_str().expect("path"), "long"], |n| format!("line {n}"));
}

#[test]
fn less_behind_a_pipe() {
    if installed(&["less"], "less").is_some() {
        pages(&["bash", "-c", "seq 1 1000000 | less"], |n| n.to_string());
    }
}

/// Ranks that pass a token and add up what they have, by memory that they share; what each has in the end is in a file.
#[test]
fn mpi() {
    let Some(compiler) = installed(&["mpicc.openmpi", "mpicc"], "libopenmpi-dev") else { return };
    let Some(run) = installed(&["mpirun.openmpi", "mpirun"], "openmpi-bin") else { return };
    let scratch = Scratch::new();
    let binary = scratch.path().join("ring");
    let built = Command::new(compiler).args(["-O1", "-o"]).arg(&binary).arg(source("ring.c")).output();
    let built = built.expect("mpicc");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let [run, binary] = [&run, &binary].map(|p| p.to_str().expect("path"));
    let mut program = Program::new(&[run, "--oversubscribe", "-n", "4", binary, "2500"]);
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        program.environment.push((name.into(), "1".into()));
    }
    program.environment.push(("TMPDIR".into(), scratch.directory("tmp").display().to_string()));
    program.outputs = vec!["rank.0", "rank.1", "rank.2", "rank.3"];
    // The ranks' memory is files, which they write in place.
    program.appends = false;
    program.survives();
}

/// A file system in user space that is unmounted in the end.
struct Mount<'a>(&'a Path);

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0).output();
    }
}

/// Who has a file open that another program serves is told so by the file's name, and goes on.
#[test]
fn files_on_fuse() {
    let Some(bindfs) = installed(&["bindfs"], "bindfs") else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let [behind, mount] = ["behind", "mount"].map(|name| scratch.directory(name));
    fs::write(behind.join("file"), "served\n").expect("file");
    let mounted = Command::new(bindfs).arg(&behind).arg(&mount).env(MARK, scratch.path()).output();
    let mounted = mounted.expect("bindfs");
    if !mounted.status.success() {
        let why = String::from_utf8_lossy(&mounted.stderr);
        return skipped(&format!("FUSE cannot be mounted here: {}", why.trim()));
    }
    let _unmounted_in_the_end = Mount(&mount);
    // One that reads it and one that does not: neither is stopped.
    let script = "exec 7< mount/file; sleep 1000 7<&- & read -r line <&7; echo $line > ready; wait";
    let mut command = alone("bash");
    command.args(["-c", script]).current_dir(scratch.path()).env(MARK, scratch.path());
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("bash");
    let ready = scratch.path().join("ready");
    wait_for("the program", PATIENCE, || {
        (fs::read_to_string(&ready).unwrap_or_default() == "served\n").then_some(())
    });
    let all = || [vec![child.id()], kernel::children(child.id())].concat();
    wait_for("its child", PATIENCE, || (all().len() == 2).then_some(()));
    let file = mount.join("file");
    let output = scratch.stillpoint().run(&["checkpoint", &child.id().to_string(), "--name", "held"]);
    let output = output.fails(3, &["FUSE", file.to_str().expect("path"), "descriptor 7"]);
    for pid in all() {
        right!(kernel::alive(pid), "{output}");
        right_eq!(kernel::status(pid, "TracerPid").as_deref(), Some("0"), "{output}");
    }
    scratch.sweep();
    child.wait().expect("wait");
}
