//! Programs that run while most of their memory is still to come: every way to touch what is missing, page servers that are
//! killed, stores that break, checkpoints and removals meanwhile.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stillpoint_tests::target::Running;
use stillpoint_tests::{
    Build, Checkpoint, Scratch, Stillpoint, Target, engine, kernel, right, right_eq, skipped, tier,
    undisturbed_only, wait_for,
};

/// Nothing is too small to come later.
const LAZY: [&str; 2] = ["--eager-below", "0"];

/// How often a test kills page servers.
fn kills() -> u64 {
    tier::times("STILLPOINT_KILLS", 20, 300)
}

/// A target that was checkpointed and killed.
struct Saved {
    scratch: Scratch,
    stillpoint: Stillpoint,
    checkpoint: Checkpoint,
    directory: PathBuf,
    pid: u32,
    /// Its other processes.
    others: Vec<u32>,
}

impl Saved {
    /// Nothing where only undisturbed runs are asked for.
    fn new(scenario: &str) -> Option<Self> {
        Self::of("lazy", scenario)
    }

    fn of(program: &str, scenario: &str) -> Option<Self> {
        let scratch = Scratch::new();
        let target = Target::new(program, scenario, Build::Dynamic).expect("cc");
        let directory = scratch.directory("target");
        let mut running = target.start(&directory, scratch.path());
        if undisturbed_only() {
            running.finish("undisturbed");
            return None;
        }
        let stillpoint = scratch.stillpoint();
        let others = below(running.pid);
        let checkpoint = stillpoint.checkpoint(running.pid, "job", &["--kill"]);
        running.reap();
        let pid = running.pid;
        Some(Saved { scratch, stillpoint, checkpoint, directory, pid, others })
    }

    #[track_caller]
    fn restore(&self, extra: &[&str]) -> Running {
        self.wait_free();
        let _ = fs::remove_file(self.directory.join("go"));
        let options: Vec<&str> = LAZY.iter().chain(extra).copied().collect();
        let pid = self.stillpoint.restore_at_once(&self.checkpoint.name(), &options);
        Running::restored(pid, &self.directory)
    }

    /// Restores it and lets it end; all of its memory has been loaded then.
    #[track_caller]
    fn runs_once_more(&self, extra: &[&str], what: &str) {
        let running = self.restore(extra);
        let pid = running.pid;
        running.finish(what);
        all_is_loaded(pid);
    }

    /// Those who loaded its memory have told what it wanted, and ended.
    #[track_caller]
    fn no_server_is_left(&self) {
        let none = || servers_near(&self.scratch).is_empty().then_some(());
        wait_for("no server", Duration::from_secs(60), none);
    }

    fn wait_free(&self) {
        self.others.iter().chain([&self.pid]).for_each(|pid| kernel::wait_free(*pid));
    }
}

/// All descendants of a process.
fn below(pid: u32) -> Vec<u32> {
    let children = kernel::children(pid);
    let more: Vec<u32> = children.iter().flat_map(|&child| below(child)).collect();
    [children, more].concat()
}

/// The page servers there are.
fn servers() -> Vec<u32> {
    let is_server = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        ["stillpoint page", "page keeper"].contains(&name.trim()) && kernel::alive(*pid)
    };
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(is_server).collect()
}

/// The page servers of a process.
fn servers_of(pid: u32) -> Vec<u32> {
    let serves = |server: &u32| {
        let folder = fs::read_dir(format!("/proc/{server}/fdinfo"));
        let line = format!("Pid:\t{pid}");
        folder
            .into_iter()
            .flatten()
            .flatten()
            .any(|e| fs::read_to_string(e.path()).is_ok_and(|text| text.lines().any(|l| l == line)))
    };
    servers().into_iter().filter(serves).collect()
}

/// Those page servers of this test that have not ended, whoever they serve.
fn servers_near(scratch: &Scratch) -> Vec<u32> {
    let mark = scratch.path().to_string_lossy().into_owned();
    let is_ours = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(mark.len()).any(|w| w == mark.as_bytes())
    };
    servers().into_iter().filter(is_ours).collect()
}

#[track_caller]
fn all_is_loaded(pid: u32) {
    wait_for("all memory to be there", Duration::from_secs(60), || servers_of(pid).is_empty().then_some(()));
}

/// What the target does is right while pages are missing, with a store that is fast, one that is slow, and none at all.
#[track_caller]
fn touches(scenario: &str) {
    let Some(saved) = Saved::new(scenario) else { return };
    for extra in [&[][..], &["--limit-bandwidth", "40MB/s"]] {
        saved.runs_once_more(extra, &format!("restored with {extra:?}"));
    }
    let running = saved.restore(&[]);
    all_is_loaded(running.pid);
    running.finish("when all is there");
    saved.scratch.nothing_is_left("in the end");
}

#[test]
fn whole() {
    touches("whole");
}

/// Children are found in the freeze whose memory is still on its way, as that of who has made them.
#[test]
fn checkpoints_of_children_that_are_made_meanwhile() {
    let Some(saved) = Saved::new("brood") else { return };
    for _ in 0..4 {
        let running = saved.restore(&["--limit-bandwidth", "40MB/s"]);
        let pid = running.pid;
        for _ in 0..2 {
            saved.stillpoint.checkpoint(pid, "meanwhile", &[]);
        }
        running.finish("after checkpoints");
        all_is_loaded(pid);
    }
    saved.scratch.nothing_is_left("in the end");
}

/// Who has loaded it leaves soon, however much is reserved of which nothing is there.
#[test]
fn reserved() {
    touches("reserved");
}

#[test]
fn calls() {
    touches("calls");
}

#[test]
fn changes() {
    touches("changes");
}

#[test]
fn children() {
    touches("children");
}

/// While a thread waits for the memory that events go to, nobody else may so much as look at its epoll, or be the last to
/// close what it watches: those least of all who bring that memory.
#[test]
fn watches() {
    let Some(saved) = Saved::new("watches") else { return };
    for turn in 0..tier::times("STILLPOINT_TURNS", 3, 10) {
        saved.wait_free();
        let _ = fs::remove_file(saved.directory.join("go"));
        let pid = saved.stillpoint.restore_detached(&saved.checkpoint.name(), &LAZY);
        // Nor does it notice by them that it is looked at.
        for engine in engine::all().filter(|_| turn % 3 == 0) {
            for _ in 0..3 {
                let checkpoint = saved.stillpoint.checkpoint(pid, "job", &["--engine", engine]);
                // Each is all of its memory.
                saved.stillpoint.run(&["rm", &checkpoint.name()]).ok();
            }
        }
        Running::restored(pid, &saved.directory).finish(&format!("turn {turn}"));
    }
    saved.scratch.nothing_is_left("in the end");
}

/// A tree of processes, each of which has memory of its own to come.
#[test]
fn a_tree() {
    touches("tree");
}

/// All but the smallest processes of a tree wait for their memory, without being told to.
#[test]
fn a_tree_comes_later() {
    let Some(saved) = Saved::new("tree") else { return };
    saved.wait_free();
    let arguments = ["restore", &saved.checkpoint.name(), "--detach", "--json"];
    let told = saved.stillpoint.run(&arguments).ok().json();
    let bytes = saved.checkpoint.json["bytes"].as_u64().expect("bytes");
    assert_eq!(told["lazy"], true, "{told}");
    assert!(told["touch_set_pages"].as_u64().expect("pages") * 4096 < bytes / 4, "{told}");
    assert!(told["loaded_ms"].as_f64() >= told["running_ms"].as_f64(), "{told}");
    assert_eq!(told["notes"].as_array().map(Vec::len), Some(0), "{told}");
    Running::restored(saved.pid, &saved.directory).finish("restored as usual");
    saved.scratch.nothing_is_left("in the end");
}

/// The servers of a program are killed at random moments, one at a time: those that are left start others.
#[test]
fn killed_servers() {
    for scenario in ["whole", "changes", "children", "tree"] {
        let Some(saved) = Saved::new(scenario) else { return };
        let mut killed = 0;
        while killed < kills() / 4 {
            let running = saved.restore(&["--limit-bandwidth", "60MB/s"]);
            let pid = running.pid;
            // Half of them while the program goes on, half of them before.
            let early = saved.scratch.random().below(2) == 0;
            if early {
                running.go();
            }
            let until = Instant::now() + Duration::from_millis(800);
            while Instant::now() < until {
                let servers = servers_of(pid);
                if servers.is_empty() {
                    break;
                }
                // Alone, it is about to start another one.
                if servers.len() > 1 {
                    let any = saved.scratch.random().below(servers.len() as u64) as usize;
                    kernel::kill(servers[any], kernel::SIGKILL);
                    killed += 1;
                    wait_for("another server", Duration::from_secs(60), || {
                        let now = servers_of(pid);
                        (now.is_empty() || (now.len() > 1 && !now.contains(&servers[any]))).then_some(())
                    });
                }
                std::thread::sleep(Duration::from_micros(saved.scratch.random().below(8_000)));
            }
            running.finish(&format!("{scenario}, after {killed} kills"));
            all_is_loaded(pid);
        }
        // Of those that were killed before they told who they are, each is waited for a little.
        saved.no_server_is_left();
        saved.scratch.nothing_is_left("in the end");
    }
}

/// A program that moves its memory about just when those who have loaded it are relieved by whoever takes its checkpoints.
#[test]
fn taken_over_meanwhile() {
    let Some(saved) = Saved::new("grows") else { return };
    for turn in 0..tier::times("STILLPOINT_TURNS", 4, 12) {
        let running = saved.restore(&["--limit-bandwidth", "200MB/s"]);
        let pid = running.pid;
        let there = || kernel::status(pid, "RssAnon")?.strip_suffix(" kB")?.trim().parse::<u64>().ok();
        let all = saved.checkpoint.json["bytes"].as_u64().unwrap_or(0) / 1024 * 95 / 100;
        while there().is_some_and(|kib| kib < all) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let lasts = Duration::from_micros(saved.scratch.random().below(20_000));
        std::thread::sleep(lasts);
        running.finish(&format!("turn {turn}, {lasts:?} after all was there"));
        all_is_loaded(pid);
    }
    saved.scratch.nothing_is_left("in the end");
}

/// Kills all servers of a program: none has the time to start another one.
fn kill_all_servers(pid: u32) {
    let mut all = Vec::new();
    loop {
        let new: Vec<u32> = servers_of(pid).into_iter().filter(|server| !all.contains(server)).collect();
        if new.is_empty() {
            break;
        }
        new.iter().for_each(|server| kernel::kill(*server, kernel::SIGSTOP));
        all.extend(new);
    }
    all.into_iter().for_each(|server| kernel::kill(server, kernel::SIGKILL));
}

/// Where all servers are killed at the same moment, the program waits instead of going on with zeros; if somebody looks after
/// it, it is ended, and they say why.
#[test]
fn killed_all_at_once() {
    for scenario in ["whole", "changes", "children", "tree"] {
        let Some(saved) = Saved::new(scenario) else { return };
        let slowly = ["--limit-bandwidth", "3MB/s"];
        let said = || fs::read_to_string(saved.directory.join("out")).unwrap_or_default();
        let is_wrong = |said: &str| said.contains("differs") || said.lines().any(|l| l == "ok");
        // Nobody looks after it.
        let running = saved.restore(&slowly);
        let pid = running.pid;
        let parent = kernel::status(pid, "PPid").and_then(|p| p.parse().ok()).expect("its supervisor");
        kernel::kill(parent, kernel::SIGKILL);
        running.go();
        std::thread::sleep(Duration::from_millis(100));
        kill_all_servers(pid);
        std::thread::sleep(Duration::from_millis(700));
        right!(kernel::alive(pid), "{}", said());
        right!(!is_wrong(&said()), "it went on: {}", said());
        if scenario != "children" {
            let refused = saved.stillpoint.run(&["checkpoint", "job"]);
            refused.fails(1, &["those who loaded it have been killed"]);
        }
        kernel::kill(pid, kernel::SIGKILL);
        drop(running);
        saved.scratch.sweep();
        // Somebody does.
        saved.wait_free();
        let mut command = saved.stillpoint.command(&["restore", &saved.checkpoint.name(), LAZY[0], LAZY[1]]);
        command.args(slowly).stdin(std::process::Stdio::null());
        let killer = std::thread::spawn(move || {
            wait_for("servers", Duration::from_secs(60), || (servers_of(pid).len() > 2).then_some(()));
            std::thread::sleep(Duration::from_millis(100));
            kill_all_servers(pid);
        });
        let output = Stillpoint::wait(command, saved.scratch.path());
        killer.join().expect("servers were killed");
        output.fails(137, &["those who load the memory of the program have been killed"]);
        right!(!is_wrong(&said()), "it went on: {}", said());
        saved.scratch.sweep();
        // And the checkpoint is as good as before.
        saved.restore(&[]).finish("after all");
        all_is_loaded(pid);
        saved.scratch.nothing_is_left("in the end");
    }
}

/// A program whose page cannot be had is ended, and somebody says why.
#[test]
fn a_damaged_page() {
    let Some(saved) = Saved::new("whole") else { return };
    // Nobody waits for what may never come.
    let arguments = ["restore", &saved.checkpoint.name(), LAZY[0], LAZY[1], "--detach", "--json"];
    let _ = fs::remove_file(saved.directory.join("go"));
    let told = saved.stillpoint.damage_a_page(|| saved.stillpoint.run(&arguments)).ok().json();
    assert!(told["failed"].as_str().is_some_and(|why| why.contains("checksum")), "{told}");
    Running::restored(saved.pid, &saved.directory).kill();
    saved.wait_free();
    // In the foreground, to hear what is said.
    let mut command = saved.stillpoint.command(&["restore", &saved.checkpoint.name(), LAZY[0], LAZY[1]]);
    command.stdin(std::process::Stdio::null());
    let _ = fs::write(saved.directory.join("go"), "");
    let output = Stillpoint::wait(command, saved.scratch.path());
    output.fails(137, &["checksum"]);
    let said = fs::read_to_string(saved.directory.join("out")).unwrap_or_default();
    right!(!said.contains("differs") && !said.lines().any(|l| l == "ok"), "it went on: {said}");
    saved.scratch.nothing_is_left("in the end");
}

/// What is recorded of a restore is used by the next one, and is a hint and nothing else.
#[test]
fn a_touch_set() {
    let Some(saved) = Saved::new("whole") else { return };
    let path = saved.stillpoint.store().join("jobs/job/touch").join(saved.checkpoint.id.to_string());
    assert!(!path.exists());
    saved.runs_once_more(&[], "restored for the first time");
    // A process that has ended is nobody's any more, while it is still being written what it wanted.
    wait_for("a touch set", Duration::from_secs(60), || path.exists().then_some(()));
    let shown = saved.stillpoint.run(&["show", &saved.checkpoint.name(), "--json"]).ok().json();
    assert!(shown["touch_set"]["bytes"].as_u64() > Some(0), "{shown}");
    let whole = fs::read(&path).expect("a touch set");
    for turn in 0..6 {
        let mut bytes = whole.clone();
        match turn {
            0 => {}
            1 => bytes.truncate(whole.len() / 2),
            _ => {
                let at = saved.scratch.random().below(whole.len() as u64) as usize;
                bytes[at] ^= 1 << saved.scratch.random().below(8);
            }
        }
        fs::write(&path, bytes).expect("write");
        saved.runs_once_more(&[], &format!("with a touch set, turn {turn}"));
        saved.no_server_is_left();
    }
    saved.scratch.nothing_is_left("in the end");
}

/// What a program is known to wait for is all there before it runs, unless it would take long to get.
#[test]
fn what_was_learnt_comes_first() {
    let Some(saved) = Saved::new("whole") else { return };
    let mut bytes = 0;
    // Each time something is added.
    for turn in 0..10 {
        saved.runs_once_more(&[], &format!("restored, turn {turn}"));
        saved.no_server_is_left();
        let shown = saved.stillpoint.run(&["show", &saved.checkpoint.name(), "--json"]).ok().json();
        bytes = shown["touch_set"]["bytes"].as_u64().unwrap_or(0);
        if bytes > 4 << 20 {
            break;
        }
    }
    assert!(bytes > 4 << 20, "{bytes}");
    let first = |options: &[&str]| {
        saved.wait_free();
        let _ = fs::remove_file(saved.directory.join("go"));
        let name = saved.checkpoint.name();
        let arguments = [&["restore", &name, LAZY[0], LAZY[1], "--detach", "--json"], options].concat();
        let told = saved.stillpoint.run(&arguments).ok().json();
        Running::restored(saved.pid, &saved.directory).finish(&format!("restored with {options:?}"));
        4096 * told["touch_set_pages"].as_u64().expect("pages")
    };
    let (quickly, slowly) = (first(&[]), first(&["--limit-bandwidth", "20MB/s"]));
    // Some pages of it may be of two runs.
    assert!(quickly > bytes / 16 * 15 && slowly < bytes / 4 * 3, "{quickly} and {slowly} of {bytes}");
    saved.scratch.nothing_is_left("in the end");
}

/// The largest piece of memory in the core dump that a program has left in its directory.
fn dumped(directory: &std::path::Path) -> Vec<u8> {
    let files = fs::read_dir(directory).expect("directory").flatten();
    let core = files
        .map(|e| e.path())
        .find(|p| p.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"core")));
    let path = core.expect("a core dump");
    let core = fs::read(&path).expect("core dump");
    fs::remove_file(&path).expect("remove");
    let word = |at: usize| u64::from_le_bytes(core[at..at + 8].try_into().expect("a word")) as usize;
    let heads = (0..word(56) & 0xffff).map(|n| word(32) + 56 * n);
    // PT_LOAD: its place in the file, and its length.
    let parts = heads.filter(|&at| word(at) as u32 == 1).map(|at| (word(at + 8), word(at + 32)));
    let (at, len) = parts.max_by_key(|(_, len)| *len).expect("memory");
    core[at..at + len].to_vec()
}

/// What is missing when a program dumps core is in the file in the end.
#[test]
fn core_dumps() {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if undisturbed_only() {
        return;
    }
    if !pattern.starts_with("core") {
        return skipped(&format!("core dumps go elsewhere: {pattern}"));
    }
    let scratch = Scratch::new();
    let target = Target::new("lazy", "whole", Build::Dynamic).expect("cc");
    let directory = scratch.directory("target");
    let mut running = target.start(&directory, scratch.path());
    let pid = running.pid;
    let unlimited = rustix::process::Rlimit { current: None, maximum: None };
    let id = rustix::process::Pid::from_raw(pid as i32);
    if rustix::process::prlimit(id, rustix::process::Resource::Core, unlimited).is_err() {
        return skipped("core dumps may not be had");
    }
    let stillpoint = scratch.stillpoint();
    let checkpoint = stillpoint.checkpoint(pid, "job", &["--kill"]);
    running.reap();
    let others = Vec::new();
    let saved = Saved { scratch, stillpoint, checkpoint, directory, pid, others };
    let abort = |extra: &[&str], after: Duration| {
        kernel::wait_free(pid);
        let mut command = saved.stillpoint.command(&["restore", &saved.checkpoint.name()]);
        command.args(extra).stdin(std::process::Stdio::null());
        let killer = std::thread::spawn(move || {
            wait_for("the program", Duration::from_secs(60), || kernel::alive(pid).then_some(()));
            // Whoever restores it has let it go when nobody traces it.
            wait_for("it runs", Duration::from_secs(60), || {
                let is_named = kernel::status(pid, "Name").is_some_and(|name| name.starts_with("lazy"));
                (is_named && kernel::status(pid, "TracerPid")? == "0").then_some(())
            });
            std::thread::sleep(after);
            kernel::kill(pid, kernel::SIGABRT);
        });
        let output = Stillpoint::wait(command, saved.scratch.path());
        killer.join().expect("it was killed");
        assert!(!output.stderr.contains("stillpoint:"), "{}", output.stderr);
        dumped(&saved.directory)
    };
    let whole = abort(&["--eager"], Duration::ZERO);
    assert!(whole.len() > 40 << 20);
    for rate in ["10MB/s", "100MB/s", "400MB/s", "400MB/s", "1GB/s", "1GB/s"] {
        let after = Duration::from_micros(saved.scratch.random().below(60_000));
        let now = abort(&["--eager-below", "0", "--limit-bandwidth", rate], after);
        right_eq!(now.len(), whole.len());
        let pages = now.chunks(4096).zip(whole.chunks(4096));
        let differing = pages.filter(|(now, then)| now != then).count();
        right_eq!(differing, 0, "of {} pages, killed after {after:?} at {rate}", whole.len() / 4096);
    }
    saved.scratch.nothing_is_left("in the end");
}

/// What a job writes after a checkpoint is there before it runs the next time, also the first one.
#[test]
fn a_touch_set_of_writes() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let target = Target::new("lazy", "writes", Build::Dynamic).expect("cc");
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("target");
    let job = target.start_job(&stillpoint, "job", &directory);
    let shown = || stillpoint.run(&["show", "job@1", "--json"]).ok().json()["touch_set"].clone();
    let taken = stillpoint.run(&["checkpoint", "job", "--engine", "precopy", "--json"]).ok().json();
    assert_eq!(taken["id"], 1);
    let touch = wait_for("a touch set", Duration::from_secs(60), || Some(shown()).filter(|t| !t.is_null()));
    assert_eq!(touch["source"], "written after the checkpoint");
    let bytes = touch["bytes"].as_u64().expect("bytes");
    // The part that it writes to, its stack, and little else.
    assert!((4 << 20..6 << 20).contains(&bytes), "{touch}");
    let pid = job.running.pid;
    kernel::kill(pid, kernel::SIGKILL);
    kernel::wait_gone(pid, Duration::from_secs(60));
    kernel::wait_free(pid);
    let arguments = ["restore", "job@1", "--json", "--detach", LAZY[0], LAZY[1]];
    let told = stillpoint.run(&arguments).ok().json();
    let number = |key: &str| told[key].as_u64().unwrap_or_else(|| panic!("no {key} in {told}"));
    assert!(number("touch_set_pages") >= 512, "{told}");
    assert!(number("prefetched_in_vain") < number("touch_set_pages") / 2, "{told}");
    let running = Running::restored(pid, &directory);
    running.finish("restored with what it had written");
    let now = wait_for("its record", Duration::from_secs(60), || {
        Some(shown()).filter(|t| t["source"] != "written after the checkpoint")
    });
    assert_eq!(now["source"], "written after the checkpoint and waited for after earlier restores");
    drop(job);
    scratch.nothing_is_left("in the end");
}

/// What is removed while it is loaded stays as long as it is needed.
#[test]
fn removed_meanwhile() {
    let Some(saved) = Saved::new("whole") else { return };
    let running = saved.restore(&["--limit-bandwidth", "40MB/s"]);
    saved.stillpoint.run(&["rm", &saved.checkpoint.name()]).ok();
    let pid = running.pid;
    running.finish("its checkpoint was removed");
    all_is_loaded(pid);
    saved.scratch.nothing_is_left("in the end");
}

/// A checkpoint of a program that is still being loaded is one like any other.
#[test]
fn checkpoint_meanwhile() {
    let Some(mut saved) = Saved::new("whole") else { return };
    for target in ["job", "pid"] {
        let running = saved.restore(&["--limit-bandwidth", "60MB/s"]);
        let pid = running.pid.to_string();
        let target = if target == "pid" { &pid } else { target };
        let checkpoint = saved.stillpoint.checkpoint(target, "job", &[]);
        running.kill();
        saved.checkpoint = checkpoint;
        saved.restore(&[]).finish("restored once more");
    }
    saved.scratch.nothing_is_left("in the end");
}

/// A checkpoint of a tree waits until all of its memory is there.
#[test]
fn checkpoint_of_a_tree_meanwhile() {
    let Some(mut saved) = Saved::new("tree") else { return };
    for target in ["job", "pid"] {
        let running = saved.restore(&["--limit-bandwidth", "60MB/s"]);
        let pid = running.pid.to_string();
        let target = if target == "pid" { &pid } else { target };
        let checkpoint = saved.stillpoint.checkpoint(target, "job", &[]);
        running.kill();
        saved.checkpoint = checkpoint;
        saved.restore(&[]).finish("restored once more");
    }
    saved.scratch.nothing_is_left("in the end");
}

/// For programs of a few megabytes.
const SLOW: [&str; 4] = ["1MB/s", "4MB/s", "16MB/s", "100MB/s"];

/// Checkpoints of a program that changes its memory in every way while it is still being loaded, each restored before it is
/// all there: what is missing is referred to, again and again, wherever it has been moved to.
#[track_caller]
fn generations(scenario: &str, limits: [&str; 4]) {
    let Some(mut saved) = Saved::of("mappings", scenario) else { return };
    let random = |most: u64| saved.scratch.random().below(most);
    let (mut referring, mut relative) = (0, 0);
    let (mut known, mut stories) = (saved.checkpoint.id, HashMap::new());
    for generation in 0..24 {
        // A machine that is busy with other things may take its checkpoints late.
        let limit = limits[if generation < 8 { random(4) as usize } else { 0 }];
        let running = saved.restore(&["--limit-bandwidth", limit]);
        for _ in 0..1 + random(3) {
            std::thread::sleep(Duration::from_millis(random(150)));
            saved.checkpoint = saved.stillpoint.checkpoint("job", "job", &["-v"]);
            let json = &saved.checkpoint.json;
            let told = json["story"].to_string();
            stories.insert(saved.checkpoint.id, told.clone());
            referring += usize::from(told.contains("still to be loaded") && !told.contains("\"0 pages are"));
            relative += usize::from(json["incremental"] == true);
        }
        if random(3) == 0 {
            // Also while nobody takes checkpoints, or while others do.
            saved.checkpoint = saved.stillpoint.checkpoint(running.pid, "job", &[]);
        }
        if generation >= 7 && referring > 0 && relative > 0 {
            running.finish("in the last generation");
            break;
        }
        running.kill();
        let last = saved.checkpoint;
        for id in known + 1..=last.id {
            saved.checkpoint = Checkpoint { id, job: "job".into(), json: last.json.clone() };
            let running = saved.restore(&["--eager"]);
            let story = stories.get(&id).cloned().unwrap_or_default();
            running
                .finish(&format!("restored from {id}, taken in generation {generation} ({limit}): {story}"));
        }
        known = last.id;
        saved.checkpoint = last;
    }
    assert!(referring > 0, "{scenario}: no checkpoint was taken while memory was missing");
    assert!(relative > 0, "{scenario}: no checkpoint was relative to the one it was restored from");
    saved.restore(&[]).finish("restored in the end");
    saved.scratch.nothing_is_left("in the end");
}

#[test]
fn generations_that_move() {
    generations("moves", SLOW);
}

#[test]
fn generations_that_drop() {
    generations("drops", SLOW);
}

#[test]
fn generations_that_do_everything() {
    generations("everything", SLOW);
}

#[test]
fn generations_that_write() {
    generations("wide", ["30MB/s", "60MB/s", "100MB/s", "200MB/s"]);
}

/// A program that changes its memory in every way while it comes, and looks at all of it in the end.
#[track_caller]
fn changing(scenario: &str) {
    let Some(saved) = Saved::of("mappings", scenario) else { return };
    for _ in 0..12 {
        let random = |most: u64| saved.scratch.random().below(most);
        let limit = ["2MB/s", "8MB/s", "16MB/s", "32MB/s"][random(4) as usize];
        let running = saved.restore(&["--limit-bandwidth", limit]);
        std::thread::sleep(Duration::from_millis(random(300)));
        let pid = running.pid;
        running.finish(&format!("with {limit}"));
        all_is_loaded(pid);
    }
    saved.scratch.nothing_is_left("in the end");
}

#[test]
fn changing_places() {
    changing("moves");
}

#[test]
fn changing_everything() {
    changing("everything");
}

/// What is missing is looked for in the checkpoint that it is from, not in one of the same name and number elsewhere.
#[test]
fn checkpoints_of_the_same_name_in_another_store() {
    let Some(saved) = Saved::new("whole") else { return };
    let elsewhere = saved.stillpoint.with_store(&saved.scratch.path().join("elsewhere"));
    let mut running = saved.restore(&[]);
    all_is_loaded(running.pid);
    let (start, _) = largest_mapping(running.pid);
    let memory = fs::OpenOptions::new().write(true).open(format!("/proc/{}/mem", running.pid)).expect("mem");
    for page in 0..1000 {
        memory.write_all_at(b"another program's", start + page * 4096).expect("written");
    }
    let other = elsewhere.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    assert_eq!(other.name(), saved.checkpoint.name());
    let mut running = saved.restore(&["--limit-bandwidth", "20MB/s"]);
    let again = elsewhere.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    saved.wait_free();
    let pid = elsewhere.restore_at_once(&again.name(), &LAZY);
    Running::restored(pid, &saved.directory).finish("restored from the other store");
    saved.scratch.nothing_is_left("in the end");
}

/// Where the largest mapping of a process is that can be written, and its length.
fn largest_mapping(pid: u32) -> (u64, u64) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
    let writable = maps.lines().filter(|line| line.contains(" rw-p "));
    let range = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
        Some((start?, end? - start?))
    };
    writable.filter_map(range).max_by_key(|(_, len)| *len).expect("a mapping")
}
