//! What is told of a job while it runs and afterwards: its history, `top`, `report`.

use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use stillpoint_tests::{Scratch, Stillpoint, Terminal, kernel, skipped, undisturbed_only, wait_for};

const PATIENCE: Duration = Duration::from_secs(60);

/// A name that is no harm as the name of a job, and would be in a page.
const NAME: &str = "a<i>&\"'x";
const LABEL: &str = "</script><b onclick=\"x\"> & more";

/// Cannot be checkpointed until a file `gone` is there (a userfaultfd stands in the way), and crashes when `crash` is.
const SCRIPT: &str = "import ctypes, os, signal, sys, time\n\
    fd = ctypes.CDLL(None).syscall(323, os.O_CLOEXEC | 1)\n\
    is_there = lambda name: os.path.exists(os.path.join(sys.argv[1], name))\n\
    while not is_there('gone'): time.sleep(0.02)\n\
    os.close(fd)\n\
    some = bytearray(4 << 20)\n\
    while not is_there('crash'):\n\
    \tfor i in range(0, len(some), 4096): some[i] = (some[i] + 1) % 256\n\
    \ttime.sleep(0.01)\n\
    os.kill(os.getpid(), signal.SIGSEGV)";

struct Job {
    scratch: Scratch,
    stillpoint: Stillpoint,
    directory: PathBuf,
}

impl Job {
    /// Starts the script as a job with a checkpoint every 200 ms; nothing where there is no Python.
    fn start() -> Option<Self> {
        if undisturbed_only() {
            return None;
        }
        if kernel::which("python3").is_none() {
            skipped("needs python3");
            return None;
        }
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("job"));
        let arguments =
            ["run", "--detach", "--every", "200ms", "--name", NAME, "--", "python3", "-c", SCRIPT];
        let mut command = stillpoint.command(&arguments);
        command.arg(&directory).stdout(Stdio::null()).stderr(Stdio::null());
        assert!(command.status().expect("run").success());
        Some(Job { scratch, stillpoint, directory })
    }

    fn touch(&self, name: &str) {
        fs::write(self.directory.join(name), "").expect("writes");
    }

    /// What `top` sees of it.
    fn seen(&self) -> Value {
        self.stillpoint.run(&["top", "--json", NAME]).ok().json()["jobs"][0].clone()
    }

    #[track_caller]
    fn waits_for(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, PATIENCE, || Some(self.seen()).filter(&is_so))
    }

    fn report(&self, extra: &[&str]) -> (Value, String) {
        let file = self.directory.join("page.html");
        let path = file.to_string_lossy().into_owned();
        let arguments = [&["report", NAME, "--json", "--force", "-o", &path], extra].concat();
        let value = self.stillpoint.run(&arguments).ok().json();
        (value, fs::read_to_string(&file).expect("a page"))
    }
}

/// Panics unless all elements are closed in order, and attributes are in quotes.
#[track_caller]
fn well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("a document");
    while let Some(begin) = rest.find('<') {
        assert!(!rest[..begin].contains('>') || open.last() == Some(&"style"), "{}", &rest[..begin]);
        rest = &rest[begin + 1..];
        let (mut end, mut in_quotes) = (0, false);
        for (i, c) in rest.char_indices() {
            in_quotes ^= c == '"';
            assert!(c != '<', "< within an element: {}", &rest[..i + 1]);
            if c == '>' && !in_quotes {
                end = i;
                break;
            }
        }
        let element = &rest[..end];
        rest = &rest[end + 1..];
        if let Some(name) = element.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "closed in another order than opened");
            continue;
        }
        let name = element.split([' ', '\n']).next().unwrap_or_default();
        assert!(name.bytes().all(|b| b.is_ascii_alphanumeric()) && !name.is_empty(), "{element}");
        if name != "meta" {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "not closed: {open:?}");
}

/// The numbers of an `ls JOB --json` that tells of each checkpoint there ever was.
fn listed(job: &Job) -> (u64, u64, f64) {
    let list = job.stillpoint.run(&["ls", NAME, "--json"]).ok().json();
    let list = list.as_array().expect("a list").clone();
    let written = list.iter().map(|c| c["written_bytes"].as_u64().expect("bytes")).sum();
    let longest = list.iter().map(|c| c["pause_ms"].as_f64().expect("a pause")).fold(0.0, f64::max);
    (list.len() as u64, written, longest)
}

#[test]
fn a_job_is_watched_from_its_begin_to_its_end() {
    let Some(job) = Job::start() else { return };
    let failing = job.waits_for("a failure", |seen| seen["state"] == "failing");
    assert!(failing["why"].as_str().is_some_and(|why| why.contains("userfaultfd")), "{failing}");
    // Where Python takes its time to begin there may be some of before.
    let (before, _, _) = listed(&job);
    assert_eq!(failing["checkpoints"], before, "{failing}");
    assert_eq!(failing["last"].is_null(), before == 0, "{failing}");
    well_formed(&job.report(&[]).1);

    job.touch("gone");
    let seen = job.waits_for("a rate", |seen| seen["dirty_bytes_per_s"].as_f64().is_some_and(|r| r > 1e6));
    assert!(matches!(seen["state"].as_str(), Some("running" | "checkpointing")), "{seen}");
    assert!(seen["memory_bytes"].as_u64().is_some_and(|b| b > 4 << 20), "{seen}");
    assert_eq!((&seen["interval_s"], &seen["processes"]), (&0.2.into(), &1.into()), "{seen}");
    assert!(seen["next_in_s"].as_f64().is_some_and(|s| s <= 0.2), "{seen}");
    job.stillpoint.run(&["checkpoint", NAME, "--label", LABEL]).ok();

    job.touch("crash");
    let seen = job.waits_for("the crash", |seen| seen["state"] == "crashed");
    assert!(seen["why"].as_str().is_some_and(|why| why.contains("SIGSEGV")), "{seen}");
    job.scratch.nothing_is_left("after the crash");
    let (told, page) = job.report(&[]);
    let (checkpoints, written, longest) = listed(&job);
    assert_eq!(told["checkpoints"], checkpoints, "{told}");
    assert_eq!(told["kept"].as_array().map(Vec::len), Some(checkpoints as usize), "{told}");
    assert_eq!(told["written_bytes"], written, "{told}");
    assert_eq!(told["pause_ms"]["max"], longest, "{told}");
    assert_eq!(told["crashes"], 1, "{told}");
    assert!(told["failed"].as_u64().is_some_and(|n| n > 0), "{told}");
    well_formed(&page);
    for word in ["ended by SIGSEGV", "userfaultfd", "[heap]", "asked for", "&lt;/script&gt;&lt;b onclick="] {
        assert!(page.contains(word), "{word} is not told");
    }
    for word in ["</script>", "<b onclick", "<i>&amp;\"", "http://", "https://", "url("] {
        assert!(!page.contains(word), "{word} is in the page");
    }

    fs::remove_file(job.directory.join("crash")).expect("removes");
    job.stillpoint.restore_detached(NAME, &[]);
    let (told, page) = job.report(&[]);
    assert_eq!(told["brought_back"], 1, "{told}");
    assert!(page.contains(&format!("restored from {}@", "a&lt;i&gt;&amp;&quot;'x")));
    job.touch("crash");
    job.waits_for("the second crash", |seen| seen["state"] == "crashed");
    // It is told before whoever looked after it has ended, whose job it is until then.
    job.scratch.nothing_is_left("after the second crash");
    job.stillpoint.run(&["rm", NAME]).ok();
    job.stillpoint.run(&["report", NAME]).fails(2, &["no job"]);
    job.stillpoint.run(&["top", NAME]).fails(2, &["no job"]);
}

#[test]
fn a_page_never_replaces_a_file_unasked() {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    stillpoint.run(&["run", "--name", "short", "--", "true"]).ok();
    let run = |extra: &[&str]| {
        let mut command = stillpoint.command(&[&["report", "short"], extra].concat());
        command.current_dir(scratch.path());
        Stillpoint::wait(command, scratch.path())
    };
    run(&[]).ok();
    let file = scratch.path().join("short.html");
    well_formed(&fs::read_to_string(&file).expect("a page"));
    fs::write(&file, "precious").expect("writes");
    run(&[]).fails(2, &["already"]);
    assert_eq!(fs::read(&file).expect("reads"), b"precious");
    run(&["--force"]).ok();
    assert!(fs::read_to_string(&file).expect("a page").contains("ended with exit code 0"));
    well_formed(run(&["-o", "-"]).ok().stdout.trim_end());
    run(&["-o", "-", "--json"]).fails(2, &["standard output"]);
    run(&["-o", "no/such/folder.html"]).fails(2, &["no/such/folder.html"]);
    // A device is no file that could be lost, but only --force opens what is there.
    run(&["-o", "/dev/full", "--force"]).fails(1, &["space"]);
}

#[test]
fn a_history_that_cannot_be_written_costs_nothing_else() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    fs::create_dir_all(stillpoint.store().join("jobs/job/history")).expect("a folder in its place");
    let mut command = stillpoint.command(&["run", "--detach", "--name", "job", "--", "sleep", "600"]);
    assert!(command.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("run").success());
    stillpoint.run(&["checkpoint", "job"]).ok();
    let told = stillpoint.run(&["top", "--json"]).ok().json();
    assert_eq!(
        (&told["jobs"][0]["job"], &told["jobs"][0]["checkpoints"]),
        (&"job".into(), &1.into()),
        "{told}"
    );
    stillpoint.verified();
}

#[test]
fn the_table_is_shown_until_q_and_the_terminal_is_as_before() {
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut command = stillpoint.command(&["run", "--detach", "--name", "sleeper", "--", "sleep", "600"]);
    assert!(command.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("run").success());
    for (rows, columns) in [(40, 160), (24, 80), (6, 40), (3, 12), (1, 1)] {
        for end in ["q", "\x03", "SIGTERM", "SIGHUP"] {
            let terminal = Terminal::of_size(rows, columns);
            assert!(terminal.is_cooked());
            let mut command = stillpoint.command(&["top", "--interval", "50ms"]);
            command.env("TERM", "xterm");
            let mut top = terminal.start(&command, scratch.path(), scratch.path());
            terminal.shows("\x1b[?1049h", PATIENCE);
            if columns >= 40 {
                terminal.shows("sleeper", PATIENCE);
                terminal.type_keys("m");
                terminal.shows("▾", PATIENCE);
            }
            terminal.resize(rows + 1, columns + 1);
            match end {
                "SIGTERM" => kernel::kill(top.id(), Signal::TERM),
                "SIGHUP" => kernel::kill(top.id(), Signal::HUP),
                keys => terminal.type_keys(keys),
            }
            let status = wait_for("the end of top", PATIENCE, || top.try_wait().expect("wait"));
            assert_eq!(status.success(), !end.starts_with("SIG"), "{status} after {end}");
            terminal.shows("\x1b[?1049l", PATIENCE);
            assert!(terminal.is_cooked(), "after {end}");
        }
    }
    // Where nothing can be drawn, there is one table.
    let terminal = Terminal::of_size(24, 80);
    let mut top = terminal.start(&stillpoint.command(&["top"]), scratch.path(), scratch.path());
    terminal.shows("sleep 600", PATIENCE);
    assert!(wait_for("the end of top", PATIENCE, || top.try_wait().expect("wait")).success());
    assert!(!terminal.shown().contains("\x1b["), "{:?}", terminal.shown());
}
