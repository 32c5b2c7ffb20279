//! Many restores of one checkpoint at once, and twins of a running program: they all come to the right end beside each other and
//! beside the original, whoever is killed meanwhile, and where one cannot be brought back there is none.

use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_tests::programs::{installed, source};
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Checkpoint, Scratch, Stillpoint, Target, kernel, right, right_eq, skipped, tier, undisturbed_only,
    wait_for,
};

const PATIENCE: Duration = Duration::from_secs(240);

/// Nothing is too small to come later.
const LAZY: [&str; 2] = ["--eager-below", "0"];

/// How often a test kills.
fn kills() -> u64 {
    tier::times("STILLPOINT_KILLS", 15, 300)
}

/// A target of which there is a checkpoint.
struct Saved {
    scratch: Scratch,
    stillpoint: Stillpoint,
    checkpoint: Checkpoint,
    directory: PathBuf,
    original: Running,
}

impl Saved {
    /// Nothing where clones cannot be had, or only undisturbed runs are asked for.
    fn new(scenario: &str) -> Option<Self> {
        let target = Target::new("clones", scenario, Build::Dynamic).expect("cc");
        let scratch = Scratch::new();
        let directory = scratch.directory("target");
        let mut command = target.command(&directory, scratch.path());
        // Its input comes from outside.
        let child = command.stdin(Stdio::piped()).spawn().expect("setsid");
        let original = Running::new(child, &directory);
        original.await_ready();
        if undisturbed_only() {
            original.finish("undisturbed");
            return None;
        }
        if !kernel::is_root() {
            skipped("needs private pid namespaces");
            return None;
        }
        let stillpoint = scratch.stillpoint();
        let checkpoint = stillpoint.checkpoint(original.pid, "job", &[]);
        Some(Saved { scratch, stillpoint, checkpoint, directory, original })
    }

    /// The original is no more.
    fn killed(self) -> Killed {
        let Saved { scratch, stillpoint, checkpoint, directory, original } = self;
        let pid = original.pid;
        original.kill();
        Killed { scratch, stillpoint, checkpoint, directory, pid }
    }
}

/// The same, without the original.
struct Killed {
    scratch: Scratch,
    stillpoint: Stillpoint,
    checkpoint: Checkpoint,
    directory: PathBuf,
    pid: u32,
}

fn arguments<'a>(checkpoint: &'a str, count: &'a str, extra: &[&'a str]) -> Vec<&'a str> {
    [&["restore", checkpoint, "--clone", "--count", count], &LAZY[..], extra].concat()
}

/// Restores so many clones in the background; gives their process ids as soon as they run.
#[track_caller]
fn clones(stillpoint: &Stillpoint, checkpoint: &Checkpoint, count: usize, extra: &[&str]) -> Vec<u32> {
    let (name, count_text) = (checkpoint.name(), count.to_string());
    let output = stillpoint.run(&arguments(&name, &count_text, &[&["--detach"], extra].concat())).ok();
    let pid = |line: &str| line.split("restored as pid ").nth(1)?.split(' ').next()?.parse().ok();
    let pids: Vec<u32> = output.stdout.lines().filter_map(pid).collect();
    assert_eq!(pids.len(), count, "{output}");
    right!(pids.iter().all(|&pid| kernel::alive(pid)), "{output}");
    pids
}

/// What is noted of results, once there are so many.
#[track_caller]
fn results(directory: &Path, count: usize) -> Vec<String> {
    let read = || fs::read_to_string(directory.join("results")).unwrap_or_default();
    let lines = || read().lines().map(str::to_owned).collect::<Vec<_>>();
    wait_for(&format!("{count} results"), PATIENCE, || (lines().len() >= count).then_some(()));
    lines()
}

#[track_caller]
fn all_are_good(directory: &Path, count: usize) {
    let lines = results(directory, count);
    right_eq!(lines.len(), count, "{lines:?}");
    right!(lines.iter().all(|line| line.starts_with("good") && *line == lines[0]), "{lines:?}");
    for file in ["results", "go"] {
        let _ = fs::remove_file(directory.join(file));
    }
}

fn go(directory: &Path) {
    fs::write(directory.join("go"), "").expect("go");
}

fn is_server(pid: &u32) -> bool {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    ["stillpoint page", "page keeper"].contains(&name.trim()) && kernel::alive(*pid)
}

/// The page servers of this test.
fn servers_near(scratch: &Scratch) -> Vec<u32> {
    scratch.processes().into_iter().filter(is_server).collect()
}

/// The page servers of a process.
fn servers_of(pid: u32) -> Vec<u32> {
    let line = format!("Pid:\t{pid}");
    let serves = |server: &u32| {
        let folder = fs::read_dir(format!("/proc/{server}/fdinfo"));
        let mut entries = folder.into_iter().flatten().flatten();
        entries.any(|e| fs::read_to_string(e.path()).is_ok_and(|text| text.lines().any(|l| l == line)))
    };
    kernel::processes().into_iter().filter(is_server).filter(serves).collect()
}

fn parent(pid: u32) -> u32 {
    kernel::status(pid, "PPid").and_then(|p| p.parse().ok()).unwrap_or_default()
}

/// The names of the jobs that run.
fn running(stillpoint: &Stillpoint) -> Vec<String> {
    let list = stillpoint.run(&["ls", "--json"]).ok().json();
    let jobs = list.as_array().expect("a list").iter().filter(|job| !job["running"].is_null());
    jobs.map(|job| job["job"].as_str().expect("a name").to_owned()).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn beside_the_original() {
    let Some(saved) = Saved::new("compute") else { return };
    let Saved { scratch, stillpoint, checkpoint, directory, original } = saved;
    let (name, pid) = (checkpoint.name(), original.pid);
    let output = stillpoint.run(&arguments(&name, "5", &["--detach", "--json"])).ok();
    let json = output.json();
    let all = json["clones"].as_array().expect("clones").clone();
    assert_eq!(all.len(), 5, "{json}");
    let (mut pids, mut jobs) = (Vec::new(), Vec::new());
    for clone in &all {
        let outside = number(&clone["pid"]) as u32;
        let inside = kernel::status(outside, "NSpid").unwrap_or_default();
        assert_eq!(inside.split_whitespace().last(), Some(pid.to_string().as_str()), "{clone}");
        assert_eq!(number(&clone["private_pid"]), u64::from(pid), "{clone}");
        assert_eq!((clone["from"].as_str(), number(&clone["id"])), (Some("job"), checkpoint.id), "{clone}");
        assert_eq!(clone["lazy"], true, "{clone}");
        assert_eq!(clone["failed"], Value::Null, "{clone}");
        // All pages came, for each of them.
        let came = ["demand_pages", "prefetched_pages", "touch_set_pages"].map(|key| number(&clone[key]));
        assert_eq!(came.iter().sum::<u64>(), number(&clone["pages"]), "{clone}");
        assert!(clone["loaded_ms"].as_f64() >= clone["running_ms"].as_f64(), "{clone}");
        pids.push(outside);
        jobs.push(clone["job"].as_str().expect("a name").to_owned());
        assert!(servers_of(outside).is_empty(), "{clone}");
    }
    pids.sort_unstable();
    pids.dedup();
    jobs.sort_unstable();
    jobs.dedup();
    assert_eq!((pids.len(), jobs.len()), (5, 5), "{json}");
    let mut listed = running(&stillpoint);
    listed.sort_unstable();
    assert_eq!(listed, jobs);
    go(&directory);
    all_are_good(&directory, 6);
    original.finish("the original");
    scratch.nothing_is_left("in the end");
    assert!(running(&stillpoint).is_empty());
}

/// With a store that is fast, one that is slow, and all loaded before.
#[test]
fn beside_each_other() {
    let Some(saved) = Saved::new("compute") else { return };
    let Killed { scratch, stillpoint, checkpoint, directory, .. } = saved.killed();
    let ways = [&[][..], &["--limit-bandwidth", "30MB/s"], &["--eager"], &["--files", "keep"]];
    for extra in tier::turn("beside_each_other", &ways) {
        clones(&stillpoint, &checkpoint, 3, extra);
        go(&directory);
        all_are_good(&directory, 3);
        scratch.nothing_is_left(&format!("{extra:?}"));
    }
    // One alone is a clone, too: it does not have the process id to itself.
    let pids = clones(&stillpoint, &checkpoint, 1, &[]);
    assert_ne!(parent(parent(pids[0])), 0);
    go(&directory);
    all_are_good(&directory, 1);
    scratch.nothing_is_left("in the end");
}

/// The servers of all clones are killed at random moments, one at a time.
#[test]
fn killed_servers() {
    let Some(saved) = Saved::new("compute") else { return };
    let Killed { scratch, stillpoint, checkpoint, directory, .. } = saved.killed();
    let mut killed = 0;
    while killed < kills() / 6 {
        let pids = clones(&stillpoint, &checkpoint, 3, &["--limit-bandwidth", "30MB/s"]);
        if scratch.random().below(2) == 0 {
            go(&directory);
        }
        let until = Instant::now() + Duration::from_millis(800);
        while Instant::now() < until {
            let whose = pids[scratch.random().below(3) as usize];
            let servers = servers_of(whose);
            if servers.is_empty() {
                break;
            }
            // Alone, it is about to start another one.
            if servers.len() > 1 {
                let any = servers[scratch.random().below(servers.len() as u64) as usize];
                kernel::kill(any, kernel::SIGKILL);
                killed += 1;
                wait_for("another server", Duration::from_secs(60), || {
                    let now = servers_of(whose);
                    (now.is_empty() || (now.len() > 1 && !now.contains(&any))).then_some(())
                });
            }
            std::thread::sleep(Duration::from_micros(scratch.random().below(8_000)));
        }
        go(&directory);
        all_are_good(&directory, 3);
        scratch.nothing_is_left(&format!("after {killed} kills"));
    }
}

/// A clone, and the first process of the namespace of another one, are killed while they are loaded, and later.
#[test]
fn one_is_killed() {
    let Some(saved) = Saved::new("compute") else { return };
    let Killed { scratch, stillpoint, checkpoint, directory, .. } = saved.killed();
    for extra in [&[][..], &["--limit-bandwidth", "30MB/s"]] {
        let pids = clones(&stillpoint, &checkpoint, 4, extra);
        kernel::kill(pids[1], kernel::SIGKILL);
        kernel::kill(parent(pids[2]), kernel::SIGKILL);
        for pid in &pids[1..3] {
            kernel::wait_gone(*pid, PATIENCE);
        }
        wait_for("two jobs", PATIENCE, || (running(&stillpoint).len() == 2).then_some(()));
        right!(kernel::alive(pids[0]) && kernel::alive(pids[3]));
        go(&directory);
        all_are_good(&directory, 2);
        scratch.nothing_is_left("in the end");
    }
}

/// A checkpoint of a clone is one like any other, also of one that is still being loaded.
#[test]
fn a_checkpoint_of_a_clone() {
    let Some(saved) = Saved::new("compute") else { return };
    let Killed { scratch, stillpoint, mut checkpoint, directory, pid } = saved.killed();
    let pids = clones(&stillpoint, &checkpoint, 3, &["--limit-bandwidth", "60MB/s"]);
    wait_for("what serves it", PATIENCE, || (!servers_of(pids[2]).is_empty()).then_some(()));
    let jobs = running(&stillpoint);
    assert_eq!(jobs.len(), 3);
    let first = stillpoint.checkpoint(&jobs[0], &jobs[0], &[]);
    let second = stillpoint.checkpoint(&jobs[0], &jobs[0], &["--incremental"]);
    assert_eq!(first.json["bytes"], second.json["bytes"]);
    assert_eq!(second.json["incremental"], true, "{}", second.json);
    // By its process id out here, too.
    let other = stillpoint.checkpoint(number(&first.json["pid"]), "other", &[]);
    // All of them have one supervisor: it does not tell which is meant.
    let supervisor = parent(parent(pids[0])).to_string();
    stillpoint.run(&["checkpoint", &supervisor]).fails(2, &["several"]);
    go(&directory);
    all_are_good(&directory, 3);
    scratch.nothing_is_left("the clones");
    for next in [second, other] {
        checkpoint = next;
        // Under its old process id, then as clones of a clone.
        kernel::wait_free(pid);
        let restored = stillpoint.restore_at_once(&checkpoint.name(), &LAZY);
        assert_eq!(restored, pid);
        clones(&stillpoint, &checkpoint, 2, &[]);
        go(&directory);
        all_are_good(&directory, 3);
        scratch.nothing_is_left("the clones of a clone");
    }
}

/// Starts the command in the foreground, with its output in files.
fn in_front(scratch: &Scratch, stillpoint: &Stillpoint, arguments: &[&str]) -> std::process::Child {
    let open = |name: &str| fs::File::create(scratch.path().join(name)).expect("open");
    let mut command = alone(stillpoint_tests::stillpoint::binary());
    command
        .args(arguments)
        .envs(stillpoint.command::<&str>(&[]).get_envs().filter_map(|(k, v)| Some((k, v?))));
    command.stdin(Stdio::piped()).stdout(open("front.out")).stderr(open("front.err"));
    command.spawn().expect("spawn")
}

#[test]
fn in_the_foreground() {
    let Some(saved) = Saved::new("listens") else { return };
    let Killed { scratch, stillpoint, checkpoint, directory, .. } = saved.killed();
    let name = checkpoint.name();
    for json in [false, true] {
        let options = if json { vec!["--json"] } else { vec![] };
        let mut front = in_front(&scratch, &stillpoint, &arguments(&name, "3", &options));
        let said = || fs::read_to_string(scratch.path().join("front.err")).unwrap_or_default();
        wait_for("the report", PATIENCE, || said().ends_with('\n').then_some(()));
        match json {
            false => assert_eq!(said().matches("restored as pid").count(), 3, "{}", said()),
            true => {
                let json: Value = serde_json::from_str(said().trim()).expect("json");
                assert_eq!(json["clones"].as_array().map(Vec::len), Some(3), "{json}");
            }
        }
        // Their input has ended, though ours has not.
        go(&directory);
        all_are_good(&directory, 3);
        assert!(front.wait().expect("wait").success());
        scratch.nothing_is_left("in the end");
    }
    // The first that does not end well tells.
    let mut front = in_front(&scratch, &stillpoint, &arguments(&name, "3", &[]));
    let pids = wait_for("the clones", PATIENCE, || {
        let list = stillpoint.run(&["ls", "--json"]).ok().json();
        let pids: Vec<u64> =
            list.as_array()?.iter().filter_map(|job| job["running"]["pid"].as_u64()).collect();
        (pids.len() == 3).then_some(pids)
    });
    // All or none: before the report, the end of one is the end of all.
    let said = || fs::read_to_string(scratch.path().join("front.err")).unwrap_or_default();
    wait_for("the report", PATIENCE, || said().ends_with('\n').then_some(()));
    kernel::kill(pids[1] as u32, kernel::SIGKILL);
    kernel::wait_gone(pids[1] as u32, PATIENCE);
    go(&directory);
    all_are_good(&directory, 2);
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(front.wait().expect("wait").signal(), Some(9));
    // A signal for the command is one for all of them.
    let mut front = in_front(&scratch, &stillpoint, &arguments(&name, "3", &[]));
    wait_for("the clones", PATIENCE, || (running(&stillpoint).len() == 3).then_some(()));
    kernel::kill(front.id(), rustix::process::Signal::TERM);
    assert_eq!(front.wait().expect("wait").signal(), Some(15));
    scratch.nothing_is_left("in the end");
}

/// All are brought back, or none, and no name is left taken.
#[test]
fn all_or_none() {
    let Some(saved) = Saved::new("locked") else { return };
    let Saved { scratch, stillpoint, checkpoint, directory, original } = saved;
    // The original has the lock.
    let name = checkpoint.name();
    for count in ["1", "3"] {
        let refused = stillpoint.run(&arguments(&name, count, &["--detach"]));
        let code = refused.code();
        assert!(matches!(code, 1 | 3), "{refused}");
        refused.fails(code, &["lock"]);
    }
    original.kill();
    // One of several has it.
    for options in [&["--detach"][..], &["--detach", "--json"], &[]] {
        let refused = stillpoint.run(&arguments(&name, "3", options));
        let code = refused.code();
        assert!(matches!(code, 1 | 3), "{refused}");
        refused.fails(code, &["lock"]);
        scratch.nothing_is_left("where there is no clone");
        assert!(running(&stillpoint).is_empty());
    }
    clones(&stillpoint, &checkpoint, 1, &[]);
    assert_eq!(running(&stillpoint), ["job-2"]);
    go(&directory);
    all_are_good(&directory, 1);
    scratch.nothing_is_left("in the end");
}

/// The command is killed at a random moment: then all of the clones run, or none.
#[test]
fn the_command_is_killed() {
    let Some(saved) = Saved::new("listens") else { return };
    let Killed { scratch, stillpoint, checkpoint, directory, .. } = saved.killed();
    let name = checkpoint.name();
    let (mut none, mut all) = (0, 0);
    for turn in 0..kills() / 10 {
        let mut front =
            in_front(&scratch, &stillpoint, &arguments(&name, "3", &["--limit-bandwidth", "60MB/s"]));
        std::thread::sleep(Duration::from_micros(scratch.random().below(120_000)));
        front.kill().and_then(|()| front.wait()).expect("kill");
        // What is not complete ends soon.
        let is_clone = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("clones"))
        };
        let left = || scratch.processes().into_iter().filter(is_clone).count();
        let mut seen = Vec::new();
        wait_for("all or none", Duration::from_secs(60), || {
            std::thread::sleep(Duration::from_millis(20));
            seen.push(left());
            let steady = seen.len() > 5 && seen[seen.len() - 5..].iter().all(|&n| n == seen[seen.len() - 1]);
            (steady && matches!(seen.last(), Some(0 | 3))).then_some(())
        });
        match seen.last() {
            Some(0) => none += 1,
            _ => {
                all += 1;
                let jobs = running(&stillpoint);
                assert_eq!(jobs.len(), 3, "turn {turn}");
                if all == 1 {
                    stillpoint.checkpoint(&jobs[1], &jobs[1], &[]);
                }
                go(&directory);
                all_are_good(&directory, 3);
            }
        }
        scratch.nothing_is_left(&format!("turn {turn}"));
        let _ = fs::remove_file(directory.join("go"));
    }
    println!("{none} times none, {all} times all");
}

/// A page that cannot be had ends whoever waits for it, and is told of once.
#[test]
fn a_damaged_page() {
    let Some(saved) = Saved::new("compute") else { return };
    let Killed { scratch, stillpoint, checkpoint, directory, .. } = saved.killed();
    go(&directory);
    let output = stillpoint.damage_a_page(|| stillpoint.run(&arguments(&checkpoint.name(), "3", &[])));
    assert_eq!(output.stderr.matches("checksum").count(), 1, "{output}");
    output.fails(137, &["checksum"]);
    assert!(!directory.join("results").exists());
    scratch.nothing_is_left("in the end");
}

#[test]
fn refusals() {
    let Some(saved) = Saved::new("listens") else { return };
    let Killed { scratch, stillpoint, checkpoint, .. } = saved.killed();
    let name = checkpoint.name();
    for (options, words) in [
        (&["--clone", "--count", "0"][..], &["1..=200"][..]),
        (&["--clone", "--count", "201"], &["1..=200"]),
        (&["--clone", "--count", "many"], &["invalid"]),
        (&["--count", "2"], &["--clone"]),
        (&["--clone", "--pid", "same"], &["--pid"]),
        (&["--clone", "--files", "rollback"], &["keep"]),
        (&["--clone", "--files", "refuse"], &["keep"]),
    ] {
        stillpoint.run(&[&["restore", &name], options].concat()).fails(2, words);
    }
    stillpoint.run(&["restore", "nobody", "--clone"]).fails(2, &["nobody"]);
    scratch.nothing_is_left("in the end");
    // Somebody else's checkpoint, and no rights.
    if kernel::which("setpriv").is_none() {
        return skipped("setpriv is not installed");
    }
    let theirs = scratch.path().join("nobodys/store");
    fs::create_dir_all(theirs.parent().expect("a folder")).expect("mkdir");
    let copied = Command::new("cp").arg("-r").arg(stillpoint.store()).arg(&theirs).status();
    assert!(copied.is_ok_and(|s| s.success()));
    let given =
        Command::new("chown").args(["-R", "65534:65534"]).arg(theirs.parent().expect("a folder")).status();
    assert!(given.is_ok_and(|s| s.success()));
    stillpoint.run_as_nobody(&["restore", &name, "--clone", "--detach"]).fails(3, &["ran as user 0"]);
}

/// Before the machine runs out of memory.
#[test]
fn too_many() {
    let Some(saved) = Saved::new("large") else { return };
    let Killed { scratch, stillpoint, checkpoint, .. } = saved.killed();
    stillpoint.run(&arguments(&checkpoint.name(), "200", &["--detach"])).fails(3, &["memory"]);
    scratch.nothing_is_left("in the end");
}

/// Every way to touch memory that is missing, by several programs at once; copies that they make of themselves, too.
#[test]
fn touching_what_is_missing() {
    if undisturbed_only() {
        return;
    }
    if !kernel::is_root() {
        return skipped("needs private pid namespaces");
    }
    for scenario in ["whole", "calls", "changes", "children"] {
        let scratch = Scratch::new();
        let directory = scratch.directory("target");
        let target = Target::new("lazy", scenario, Build::Dynamic).expect("cc");
        let original = target.start(&directory, scratch.path());
        let stillpoint = scratch.stillpoint();
        let checkpoint = stillpoint.checkpoint(original.pid, "job", &[]);
        original.kill();
        go(&directory);
        stillpoint.run(&arguments(&checkpoint.name(), "3", &[])).ok();
        // With servers that are killed again and again.
        let limit = ["--limit-bandwidth", "60MB/s"];
        let mut front = in_front(&scratch, &stillpoint, &arguments(&checkpoint.name(), "3", &limit));
        let mut killed = 0;
        let status = loop {
            if let Some(status) = front.try_wait().expect("wait") {
                break status;
            }
            let servers = servers_near(&scratch);
            if servers.len() > 2 && killed < kills() / 3 {
                let any = servers[scratch.random().below(servers.len() as u64) as usize];
                kernel::kill(any, kernel::SIGKILL);
                kernel::wait_gone(any, PATIENCE);
                killed += 1;
            }
            std::thread::sleep(Duration::from_micros(scratch.random().below(6_000)));
        };
        let said = fs::read_to_string(directory.join("out")).unwrap_or_default();
        right!(status.success(), "{scenario}: {status} after {killed} kills: {said}");
        scratch.nothing_is_left(scenario);
    }
}

/// Files are nobody's own: a clone leaves those of the others as they are.
#[test]
fn files_stay_as_they_are() {
    let Some(saved) = Saved::new("compute") else { return };
    let Saved { scratch, stillpoint, checkpoint, directory, original } = saved;
    // What the original has written since: alone, it would be cut back.
    let grown = "said by the original since\n".repeat(100);
    let before = fs::read(directory.join("out")).expect("read");
    fs::write(directory.join("out"), [&before, grown.as_bytes()].concat()).expect("write");
    clones(&stillpoint, &checkpoint, 2, &[]);
    let after = fs::read(directory.join("out")).expect("read");
    right_eq!(after, [&before, grown.as_bytes()].concat());
    // No less where it is not asked to be a clone.
    let out = directory.join("out").display().to_string();
    stillpoint
        .run(&["restore", &checkpoint.name(), "--detach"])
        .fails(3, &["still runs", &original.pid.to_string(), &out, "--clone"]);
    right_eq!(fs::read(directory.join("out")).expect("read"), after);
    go(&directory);
    all_are_good(&directory, 3);
    let after = fs::metadata(directory.join("out")).expect("metadata").len() as usize;
    right_eq!(after, before.len() + grown.len());
    drop(original);
    scratch.nothing_is_left("in the end");
}

/// What a program writes its data to is not written by itself from another time; that both write what people read is told.
#[test]
fn beside_a_running_program() {
    let Some(python) = installed(&["/usr/bin/python3", "python3"], "python3") else { return };
    if undisturbed_only() || !kernel::is_root() {
        return skipped("needs private pid namespaces");
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("program"));
    for (text, is_data) in [("data = open('data', 'w')", true), ("data = open(1, 'w', closefd=False)", false)]
    {
        let text = format!(
            "import time\n{text}\nopen('ready', 'w').close()\nwhile True: data.write('x'); data.flush(); time.sleep(1000)\n"
        );
        let mut program = alone(&python);
        program.args(["-c", &text]).current_dir(&directory).env(MARK, scratch.path()).stdin(Stdio::null());
        let out = fs::File::create(directory.join("out")).expect("a file");
        program.stdout(if is_data { Stdio::null() } else { out.into() }).stderr(Stdio::null());
        let program = Running::new(program.spawn().expect("python"), scratch.path());
        wait_for("the program", PATIENCE, || fs::remove_file(directory.join("ready")).ok());
        let own = stillpoint.checkpoint(program.pid, "own", &[]).name();
        let restore = ["restore", &own, "--detach", "--json"];
        let output = match is_data {
            true => {
                let words =
                    ["still runs", &program.pid.to_string(), "/data: would be written by both", "--clone"];
                stillpoint.run(&restore).fails(3, &words);
                stillpoint.run(&[&restore[..], &["--files", "keep"]].concat()).ok()
            }
            false => stillpoint.run(&restore).ok(),
        };
        right_eq!(output.stdout.contains("/out: the program, which still runs"), !is_data, "{output}");
        let restored = output.json()["pid"].as_u64().expect("it runs") as u32;
        kernel::kill(restored, kernel::SIGKILL);
        kernel::wait_gone(restored, PATIENCE);
        program.kill();
    }
    scratch.nothing_is_left("in the end");
}

/// Python with threads, whose clones say what it would have said.
#[test]
fn python_with_threads() {
    let Some(python) = installed(&["/usr/bin/python3", "python3"], "python3") else { return };
    if !kernel::is_root() {
        return skipped("needs private pid namespaces");
    }
    let scratch = Scratch::new();
    let start = || {
        let mut command = alone(&python);
        command.arg(source("clones.py")).arg(tier::size(1500).to_string()).env(MARK, scratch.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("python")
    };
    let expected = start().wait_with_output().expect("wait");
    assert!(expected.status.success());
    if undisturbed_only() {
        return;
    }
    let mut original = start();
    let mut ready = [0; 6];
    std::io::Read::read_exact(original.stderr.as_mut().expect("stderr"), &mut ready).expect("ready");
    let stillpoint = scratch.stillpoint();
    let checkpoint = stillpoint.checkpoint(original.id(), "job", &[]);
    let output = stillpoint.run(&arguments(&checkpoint.name(), "5", &[])).ok();
    let line = String::from_utf8_lossy(&expected.stdout).into_owned();
    right_eq!(output.stdout, line.repeat(5), "{output}");
    let original = original.wait_with_output().expect("wait");
    right_eq!(String::from_utf8_lossy(&original.stdout), line);
    scratch.nothing_is_left("in the end");
}

/// Makes so many twins; gives what is told of each.
#[track_caller]
fn twins(stillpoint: &Stillpoint, target: &str, count: usize) -> Vec<Value> {
    let count_text = count.to_string();
    let output = stillpoint.run(&["fork", target, "--isolated", "--count", &count_text, "--json"]).ok();
    let all = output.json()["twins"].as_array().expect("twins").clone();
    assert_eq!(all.len(), count, "{output}");
    // Nothing is kept of the instant.
    assert!(!stillpoint.store().join("forks").exists(), "{output}");
    for twin in &all {
        let ours = format!("stillpoint-fork-{}-", twin["supervisor_pid"]);
        let mut in_memory = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        assert!(!in_memory.any(|entry| entry.file_name().to_string_lossy().starts_with(&ours)), "{output}");
    }
    all
}

/// A target that runs, of which there is no checkpoint. Nothing where there can be no twins, or only undisturbed runs are asked for.
fn living(scenario: &str) -> Option<(Scratch, Stillpoint, PathBuf, Running)> {
    let Saved { scratch, stillpoint, checkpoint, directory, original } = Saved::new(scenario)?;
    stillpoint.run(&["rm", &checkpoint.job]).ok();
    Some((scratch, stillpoint, directory, original))
}

#[test]
fn twins_of_a_process() {
    let Some((scratch, stillpoint, directory, original)) = living("compute") else { return };
    let (pid, name) = (original.pid, format!("clones-dynamic-{}", original.pid));
    let all = twins(&stillpoint, &pid.to_string(), 3);
    let mut jobs = Vec::new();
    for twin in &all {
        let outside = number(&twin["pid"]) as u32;
        let inside = kernel::status(outside, "NSpid").unwrap_or_default();
        assert_eq!(inside.split_whitespace().last(), Some(pid.to_string().as_str()), "{twin}");
        assert_eq!(number(&twin["private_pid"]), u64::from(pid), "{twin}");
        assert_eq!(twin["of"].as_str(), Some(name.as_str()), "{twin}");
        assert!(twin["pause_ms"].as_f64().is_some_and(|pause| pause > 0.0), "{twin}");
        jobs.push(twin["job"].as_str().expect("a name").to_owned());
    }
    assert_eq!(jobs, ["", "-2", "-3"].map(|number| format!("{name}-twin{number}")));
    let mut listed = running(&stillpoint);
    listed.sort_unstable();
    assert_eq!(listed, jobs);
    // A twin of a twin.
    let next = twins(&stillpoint, &jobs[0], 1);
    assert_eq!(
        (next[0]["of"].as_str(), number(&next[0]["private_pid"])),
        (Some(jobs[0].as_str()), pid.into())
    );
    go(&directory);
    all_are_good(&directory, 5);
    original.finish("the original");
    scratch.nothing_is_left("in the end");
}

/// A job that is checkpointed all the time, by a supervisor that follows what it writes.
#[test]
fn twins_of_a_job() {
    let Some((scratch, stillpoint, directory, original)) = living("compute") else { return };
    let (pid, job) = (original.pid.to_string(), "job");
    let adopt = ["adopt", &pid, "--name", job, "--every", "100ms", "--keep", "2"];
    stillpoint.run(&adopt).ok();
    let checkpoints = || stillpoint.checkpoints(job).last().copied().unwrap_or_default();
    wait_for("checkpoints", PATIENCE, || (checkpoints() > 2).then_some(()));
    let all = twins(&stillpoint, job, 2);
    let before = checkpoints();
    wait_for("more checkpoints", PATIENCE, || (checkpoints() > before + 1).then_some(()));
    // A checkpoint of a twin is its own, also under a name that has others, and while it is being loaded.
    let twin = all[0]["job"].as_str().expect("a name");
    let of_twin = stillpoint.checkpoint(twin, "of-twin", &[]);
    let also = stillpoint.checkpoint(twin, twin, &["--engine", "fork"]);
    assert_eq!(of_twin.json["bytes"], also.json["bytes"]);
    stillpoint.run(&["release", job]).ok();
    go(&directory);
    all_are_good(&directory, 3);
    original.finish("the original");
    scratch.nothing_is_left("the twins");
    for name in [of_twin.name(), also.name(), job.into()] {
        stillpoint.restore_at_once(&name, &LAZY);
        go(&directory);
        all_are_good(&directory, 1);
        scratch.nothing_is_left(&name);
    }
}

/// What twins say goes where the program's words go, and they have no input.
#[test]
fn twins_of_python() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() || !kernel::is_root() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("target");
    let script = r"
import hashlib, os, sys, threading, time
found = [None] * 3
def work(n):
    digest = b'%d' % n
    for _ in range(100000):
        digest = hashlib.sha256(digest).digest()
    found[n] = digest
    while not os.path.exists('go'):
        time.sleep(0.001)
threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
for thread in threads: thread.start()
open('ready', 'w').close()
for thread in threads: thread.join()
# In one piece: the others say it at the same moment.
os.write(1, (b''.join(found).hex() + ' ' + repr(sys.stdin.read()) + '\n').encode())
";
    let mut command = alone(python);
    command
        .args(["-c", script])
        .current_dir(&directory)
        .env(MARK, scratch.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("python");
    wait_for("the threads", PATIENCE, || directory.join("ready").exists().then_some(()));
    twins(&stillpoint, &child.id().to_string(), 3);
    drop(child.stdin.take());
    go(&directory);
    let mut said = String::new();
    // It ends when all who could say something have ended.
    child.stdout.take().expect("a pipe").read_to_string(&mut said).expect("what they said");
    right!(child.wait().expect("wait").success());
    let lines: Vec<&str> = said.lines().collect();
    right!(lines.len() == 4 && lines.iter().all(|line| *line == lines[0]), "{said}");
    right!(lines[0].ends_with(" ''"), "{said}");
    scratch.nothing_is_left("in the end");
}

/// Processes with pipes between them.
#[test]
fn twins_and_clones_of_a_tree() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() || !kernel::is_root() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("target");
    let script = r"
import hashlib, os, time
pipes = []
for n in range(3):
    reader, writer = os.pipe()
    if os.fork() == 0:
        digest = b'%d' % n
        for _ in range(200000):
            digest = hashlib.sha256(digest).digest()
        while not os.path.exists('go'):
            time.sleep(0.001)
        os.write(writer, digest)
        os._exit(0)
    os.close(writer)
    pipes.append(reader)
open('ready', 'w').close()
found = b''.join(os.read(reader, 32) for reader in pipes)
assert all(os.wait()[1] == 0 for _ in pipes)
with open('results', 'ab', 0) as file:
    file.write(b'good %s\n' % found.hex().encode())
";
    let mut command = alone(python);
    let mut child = command
        .args(["-c", script])
        .current_dir(&directory)
        .env(MARK, scratch.path())
        .spawn()
        .expect("python");
    wait_for("its children", PATIENCE, || directory.join("ready").exists().then_some(()));
    let all = twins(&stillpoint, &child.id().to_string(), 2);
    for twin in &all {
        assert_eq!(kernel::children(number(&twin["pid"]) as u32).len(), 3, "{twin}");
    }
    let job = all[0]["job"].as_str().expect("a name");
    let checkpoint = stillpoint.checkpoint(job, job, &[]);
    clones(&stillpoint, &checkpoint, 2, &[]);
    go(&directory);
    all_are_good(&directory, 5);
    right!(child.wait().expect("wait").success());
    scratch.nothing_is_left("in the end");
}

#[test]
fn no_twins() {
    let Some((scratch, stillpoint, _, original)) = living("locked") else { return };
    let pid = original.pid.to_string();
    stillpoint.run(&["fork", "4000000"]).fails(2, &["no process 4000000"]);
    stillpoint.run(&["fork", "4000000", "--isolated"]).fails(2, &["no process 4000000"]);
    stillpoint.run(&["fork", "nobody", "--isolated"]).fails(2, &["no job nobody"]);
    stillpoint.run(&["fork", &pid, "--isolated", "--count", "0"]).fails(2, &["count"]);
    // It has a lock, which there is only one of.
    for how in [&["--isolated"][..], &[]] {
        let refused = stillpoint.run(&[&["fork", &pid], how].concat());
        let code = refused.code();
        assert!(matches!(code, 1 | 3), "{refused}");
        refused.fails(code, &["twin of clones", "lock"]);
    }
    wait_for("the end of its twins", PATIENCE, || (scratch.processes() == [original.pid]).then_some(()));
    original.kill();
}

/// All of ours are killed at a random moment while twins are made: the program goes on, and what twins there are, too.
#[test]
fn killed_while_twins_are_made() {
    let Some((scratch, stillpoint, directory, original)) = living("compute") else { return };
    let pid = original.pid.to_string();
    let is_ours = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.starts_with("stillpoint") && kernel::alive(*pid)
    };
    let mut whole = 0;
    for _ in 0..kills() / 15 {
        let mut front = in_front(&scratch, &stillpoint, &["fork", &pid, "--isolated", "--count", "2"]);
        std::thread::sleep(Duration::from_micros(scratch.random().below(250_000)));
        for ours in scratch.processes().into_iter().filter(is_ours) {
            kernel::kill(ours, kernel::SIGKILL);
        }
        let _ = front.wait();
        right!(kernel::alive(original.pid));
        // Those that stood already run, and some of them have lost whoever loads their memory.
        let is_twin = |twin: &u32| {
            let name = fs::read_to_string(format!("/proc/{twin}/comm")).unwrap_or_default();
            name.starts_with("clones") && *twin != original.pid
        };
        let left: Vec<u32> = scratch.processes().into_iter().filter(is_twin).collect();
        whole += usize::from(left.len() == 2);
        wait_for("the end of all others", PATIENCE, || {
            let others: Vec<u32> =
                scratch.processes().into_iter().filter(|&pid| pid != original.pid).collect();
            others.iter().for_each(|&other| kernel::kill(other, kernel::SIGKILL));
            others.is_empty().then_some(())
        });
    }
    println!("{whole} times there were both");
    go(&directory);
    let lines = results(&directory, 1);
    right!(lines[0].starts_with("good"), "{lines:?}");
    original.finish("the original");
}
