//! The command under test.

use crate::scratch::MARK;
use crate::{kernel, right, verdict};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// No command in these tests takes longer than this.
const PATIENCE: Duration = Duration::from_secs(120);

/// The `stillpoint` command with a store.
#[derive(Clone, Debug)]
pub struct Stillpoint {
    mark: PathBuf,
    store: PathBuf,
}

/// What one call of the command said.
#[derive(Clone, Debug)]
pub struct Output {
    /// The arguments.
    pub arguments: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Time from start to end.
    pub wall: Duration,
}

/// What `checkpoint --json` reports.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Job.
    pub job: String,
    /// Number within the job.
    pub id: u64,
    /// Everything it said.
    pub json: Value,
}

impl Checkpoint {
    /// What a `checkpoint --json` that succeeded has said.
    #[track_caller]
    pub fn of(output: &Output) -> Self {
        let json = output.json();
        let id = json["id"].as_u64().unwrap_or_else(|| panic!("no id in {json}"));
        let job = json["job"].as_str().unwrap_or_else(|| panic!("no job in {json}")).to_owned();
        for number in ["bytes", "pages", "pause_ms", "wall_ms"] {
            assert!(json[number].is_number(), "no {number} in {json}");
        }
        assert!(json["engine"].is_string(), "no engine in {json}");
        let steps = json["pause_steps"].as_array().into_iter().flatten();
        let told: f64 = steps.filter_map(|step| step["ms"].as_f64()).sum();
        // Of one that is killed the last steps are told by nobody.
        let pause = json["pause_ms"].as_f64().filter(|_| json["killed"] == false).unwrap_or_default();
        assert!(told + 0.1 >= pause, "its steps leave something of the pause out: {json}");
        Checkpoint { job, id, json }
    }

    /// `JOB@ID`.
    pub fn name(&self) -> String {
        format!("{}@{}", self.job, self.id)
    }
}

impl Output {
    /// Exit code; a signal counts as 128 plus its number.
    pub fn code(&self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        self.status.code().unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }

    /// What was asked and what came of it, in three words: the command, its engine, and how it ended.
    fn kind(&self) -> String {
        let mut words = self.arguments.split(' ');
        let command = words.next().unwrap_or_default();
        let engine = match words.skip_while(|word| *word != "--engine").nth(1) {
            Some(engine) => engine,
            None if command == "checkpoint" => "auto",
            None => "-",
        };
        let end = match self.code() {
            0 => "done",
            3 => "refused",
            code if code > 128 => "killed",
            _ => "failed",
        };
        format!("{command} {engine} {end}")
    }

    /// Panics unless it succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.status.success(), "{self}");
        self
    }

    /// Panics unless it ended with this code, printed no stack of errors, and mentions one of the words on stderr.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code(), code, "{self}");
        let said = self.stderr.to_lowercase();
        assert!(
            words.is_empty() || words.iter().any(|w| said.contains(&w.to_lowercase())),
            "none of {words:?}: {self}"
        );
        assert!(!said.contains("panicked"), "{self}");
        assert!(!said.trim().is_empty(), "no message: {self}");
        assert!(said.lines().count() <= 12, "one clear sentence was promised: {self}");
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(self.stdout.trim()).unwrap_or_else(|e| panic!("{e}: {self}"))
    }
}

impl std::fmt::Display for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "stillpoint {} ended with {} after {:?}", self.arguments, self.status, self.wall)?;
        writeln!(f, "--- stdout\n{}\n--- stderr\n{}", self.stdout.trim_end(), self.stderr.trim_end())
    }
}

impl Stillpoint {
    /// The command, for processes marked with `mark`, with this store.
    pub fn new(mark: &Path, store: &Path) -> Self {
        Stillpoint { mark: mark.to_owned(), store: store.to_owned() }
    }

    /// The same with another store.
    pub fn with_store(&self, store: &Path) -> Self {
        Stillpoint { mark: self.mark.clone(), store: store.to_owned() }
    }

    /// The store.
    pub fn store(&self) -> &Path {
        &self.store
    }

    /// Damages a page of the store's largest segment such that a restore still begins: what has to be there before the program runs is
    /// another one's. `restored` is such a restore; returns what it said.
    #[track_caller]
    pub fn damage_a_page(&self, mut restored: impl FnMut() -> Output) -> Output {
        let is_segment = |path: &PathBuf| path.components().any(|c| c.as_os_str() == "segments");
        let len = |path: &PathBuf| std::fs::metadata(path).map_or(0, |m| m.len());
        let path = self.files().into_iter().filter(is_segment).max_by_key(len).expect("a segment");
        let segment = std::fs::File::options().read(true).write(true).open(&path).expect("open");
        for part in [5, 4, 6, 3, 7] {
            let (at, mut byte) = (len(&path) * part / 10, [0]);
            segment.read_exact_at(&mut byte, at).expect("read");
            segment.write_all_at(&[byte[0] ^ 1], at).expect("write");
            let output = restored();
            if output.code() != 1 {
                return output;
            }
            assert!(output.stderr.contains("damaged"), "{output}");
            segment.write_all_at(&byte, at).expect("write");
        }
        panic!("each page of {} that was damaged had to be there first", path.display());
    }

    /// Where a checkpoint's manifest and its job's segments are: all regular files of the store, ascending.
    pub fn files(&self) -> Vec<PathBuf> {
        fn walk(directory: &Path, into: &mut Vec<PathBuf>) {
            let Ok(entries) = std::fs::read_dir(directory) else { return };
            for entry in entries.flatten() {
                match entry.file_type() {
                    Ok(t) if t.is_dir() => walk(&entry.path(), into),
                    Ok(t) if t.is_file() => into.push(entry.path()),
                    _ => {}
                }
            }
        }
        let mut files = Vec::new();
        walk(&self.store, &mut files);
        files.sort();
        files
    }

    /// A command to be started. `STILLPOINT_ENGINE` is the memory engine of checkpoints for which the test asks none, and
    /// `STILLPOINT_RESTORE` has options for every restore (`--eager-below 0`).
    pub fn command<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(binary());
        command.args(arguments);
        let is = |a: &S, word: &str| a.as_ref() == OsStr::new(word);
        let takes_any = arguments.first().is_some_and(|a| is(a, "checkpoint"))
            && !arguments.iter().any(|a| is(a, "--engine"));
        if let (true, Some(engine)) = (takes_any, std::env::var_os("STILLPOINT_ENGINE")) {
            command.arg("--engine").arg(engine);
        }
        if arguments.first().is_some_and(|a| is(a, "restore"))
            && let Ok(options) = std::env::var("STILLPOINT_RESTORE")
        {
            command.args(options.split_whitespace());
        }
        command.env("STILLPOINT_STORE", &self.store).env(MARK, &self.mark).stdin(Stdio::null());
        command
    }

    /// Runs the command to its end. What it starts in the background does not hold the output back: it goes to files.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Output {
        Self::wait(self.command(arguments), &self.mark)
    }

    /// Runs the command to its end as a user without rights, with a store of theirs. Needs `setpriv` and the right to
    /// become somebody else.
    pub fn run_as_nobody(&self, arguments: &[&str]) -> Output {
        self.run_as_nobody_with(None, arguments)
    }

    /// The same with the capabilities of the file that is executed, as `setcap` takes them.
    pub fn run_as_nobody_with(&self, capabilities: Option<&str>, arguments: &[&str]) -> Output {
        const NOBODY: u32 = 65534;
        // The command may stand in a directory that nobody may not enter.
        let home = self.mark.join("nobodys");
        let failed = |e: std::io::Error| panic!("{}: {e}", home.display());
        std::fs::create_dir_all(&home).unwrap_or_else(failed);
        std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap_or_else(failed);
        let copy = home.join(capabilities.map_or("without", |_| "with")).join("stillpoint");
        // What runs of it by now cannot be written.
        if !copy.exists() {
            std::fs::create_dir_all(copy.with_file_name("")).unwrap_or_else(failed);
            std::fs::copy(binary(), &copy).map(drop).unwrap_or_else(failed);
            if let Some(capabilities) = capabilities {
                let set = Command::new("setcap").arg(capabilities).arg(&copy).status();
                assert!(set.is_ok_and(|status| status.success()), "setcap {capabilities} {}", copy.display());
            }
        }
        let mut command = Command::new("setpriv");
        command.env(MARK, &self.mark);
        command.args([&format!("--reuid={NOBODY}"), &format!("--regid={NOBODY}"), "--clear-groups"]);
        // Not by `setpriv` itself, which keeps root's capabilities until it executes something: what has no more than before is not hidden.
        command.arg("env").arg(&copy).args(arguments).arg("--store").arg(home.join("store")).current_dir("/");
        Self::wait(command, &self.mark)
    }

    /// Runs a prepared command to its end.
    pub fn wait(mut command: Command, near: &Path) -> Output {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let [out, err] = ["out", "err"].map(|s| near.join(format!("said.{}.{n}.{s}", std::process::id())));
        let open = |p: &Path| std::fs::File::create(p).unwrap_or_else(|e| panic!("{}: {e}", p.display()));
        command.stdout(open(&out)).stderr(open(&err));
        let began = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{}: {e}", binary().display()));
        let (status, wall) = loop {
            if let Some(status) = child.try_wait().unwrap_or_else(|e| panic!("{e}")) {
                break (status, began.elapsed());
            }
            // A command that hangs is told by name; it is ended with the other processes of its test.
            assert!(
                began.elapsed() < PATIENCE,
                "hangs: {command:?}, said: {:?}",
                std::fs::read_to_string(&err)
            );
            std::thread::sleep(Duration::from_micros(500));
        };
        let read = |p: &Path| String::from_utf8_lossy(&std::fs::read(p).unwrap_or_default()).into_owned();
        let output = Output {
            arguments: command.get_args().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" "),
            status,
            stdout: read(&out),
            stderr: read(&err),
            wall,
        };
        let _ = std::fs::remove_file(out);
        let _ = std::fs::remove_file(err);
        verdict::note("commands", &output.kind());
        output
    }

    /// `verify`: no damage in the store.
    #[track_caller]
    pub fn verified(&self) {
        let output = self.run(&["verify"]);
        right!(output.status.success(), "the store is damaged: {output}");
    }

    /// `checkpoint TARGET --name NAME --json [EXTRA…]`, which must succeed.
    #[track_caller]
    pub fn checkpoint(&self, target: impl ToString, name: &str, extra: &[&str]) -> Checkpoint {
        let target = target.to_string();
        let mut arguments = vec!["checkpoint", &target, "--name", name, "--json"];
        arguments.extend(extra);
        Checkpoint::of(&self.run(&arguments).ok())
    }

    /// `restore NAME --detach --json`, which must succeed; gives the process id.
    #[track_caller]
    pub fn restore_detached(&self, name: &str, extra: &[&str]) -> u32 {
        let mut arguments = vec!["restore", name, "--detach", "--json"];
        arguments.extend(extra);
        let json = self.run(&arguments).ok().json();
        json["pid"].as_u64().unwrap_or_else(|| panic!("no pid in {json}")) as u32
    }

    /// `restore NAME --detach`, which must succeed and returns as soon as the program runs; gives the process id.
    #[track_caller]
    pub fn restore_at_once(&self, name: &str, extra: &[&str]) -> u32 {
        let mut arguments = vec!["restore", name, "--detach"];
        arguments.extend(extra);
        let output = self.run(&arguments).ok();
        let pid =
            output.stdout.split("restored as pid ").nth(1).and_then(|rest| rest.split([' ', '\n']).next());
        pid.and_then(|pid| pid.parse().ok()).unwrap_or_else(|| panic!("no process id: {output}"))
    }

    /// The ids of a job's checkpoints, oldest first.
    #[track_caller]
    pub fn checkpoints(&self, job: &str) -> Vec<u64> {
        let json = self.run(&["ls", job, "--json"]).ok().json();
        let list = json.as_array().cloned().or_else(|| json["checkpoints"].as_array().cloned());
        let list = list.unwrap_or_else(|| panic!("no list of checkpoints: {json}"));
        let mut ids: Vec<_> = list.iter().filter_map(|c| c["id"].as_u64()).collect();
        ids.sort_unstable();
        ids
    }
}

/// Whether a process is the command's: itself, or one that it has made for a moment (for files of procfs, or which is not the program yet).
/// So is one that is not there.
pub fn is_of_the_command(pid: u32) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    let ours = identity(binary());
    let exe = |tid: u32| identity(Path::new(&format!("/proc/{pid}/task/{tid}/exe")));
    kernel::threads(pid).into_iter().find_map(exe).is_none_or(|theirs| Some(theirs) == ours)
}

/// The command: `STILLPOINT_BIN`, or that of this workspace, built now.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("STILLPOINT_BIN") {
            return PathBuf::from(path);
        }
        let exe = std::env::current_exe().unwrap_or_default();
        let profile_directory = exe.ancestors().nth(2).unwrap_or(Path::new(".")).to_owned();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "-p", "stillpoint"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if profile_directory.file_name().is_some_and(|n| n == "release") {
            build.arg("--release");
        }
        assert!(build.status().is_ok_and(|s| s.success()), "stillpoint does not build");
        profile_directory.join("stillpoint")
    })
}
