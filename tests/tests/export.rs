//! Checkpoints that travel: through pipes and files into other stores, to where executables, libraries and files are others.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_tests::programs::{Program, input, installed};
use stillpoint_tests::{
    Scratch, Stillpoint, kernel, right, right_eq, skipped, tier, undisturbed_only, wait_for,
};

/// Export and import in one pipeline, as through ssh.
#[track_caller]
pub(crate) fn send(from: &Stillpoint, checkpoint: &str, options: &[&str], to: &Stillpoint, job: &str) {
    let mut export = from.command(&[&["export", checkpoint, "-"], options].concat());
    let mut export = export.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("export");
    let mut import = to.command(&["import", "-", "--name", job, "--json"]);
    import.stdin(export.stdout.take().expect("stdout"));
    let imported = import.output().expect("import");
    let exported = export.wait_with_output().expect("export");
    let said = format!(
        "{}{}{}",
        String::from_utf8_lossy(&exported.stderr),
        String::from_utf8_lossy(&imported.stdout),
        String::from_utf8_lossy(&imported.stderr)
    );
    assert!(exported.status.success() && imported.status.success(), "{said}");
    let answer: serde_json::Value = serde_json::from_slice(&imported.stdout).expect(&said);
    assert_eq!(answer["job"], job, "{said}");
}

/// A program, what it writes undisturbed, and how long that takes.
struct Undisturbed {
    scratch: Scratch,
    program: Program,
    expected: Vec<(String, Vec<u8>)>,
    typical: Duration,
}

impl Undisturbed {
    fn of(program: Program) -> Self {
        let scratch = Scratch::new();
        let directory = scratch.directory("undisturbed");
        (program.prepare)(&directory);
        let began = Instant::now();
        let status = program.start(&directory, scratch.path()).wait().expect("wait");
        assert!(status.success(), "undisturbed, it ended with {status}");
        let (expected, typical) = (program.results(&directory), began.elapsed());
        Undisturbed { scratch, program, expected, typical }
    }

    /// Runs it for a part of its life, and kills it with a checkpoint of job `job`. Returns its directory and process id.
    #[track_caller]
    fn killed(&self, stillpoint: &Stillpoint, part: f64) -> (PathBuf, u32) {
        self.killed_with(stillpoint, part, &[])
    }

    #[track_caller]
    fn killed_with(&self, stillpoint: &Stillpoint, part: f64, options: &[&str]) -> (PathBuf, u32) {
        // How long it took alone says little on a busy machine: less and less of its life is waited for.
        for attempt in 0..8 {
            let directory = self.scratch.directory(&format!("disturbed.{attempt}"));
            (self.program.prepare)(&directory);
            let mut child = self.program.start(&directory, self.scratch.path());
            let pid = child.id();
            std::thread::sleep(self.typical.mul_f64(part * 0.6f64.powi(attempt)));
            let pid_text = pid.to_string();
            let arguments = ["checkpoint", &pid_text, "--name", "job", "--kill", "--json"];
            let output = stillpoint.run(&[&arguments, options].concat());
            let _ = child.wait();
            if output.status.success() {
                return (directory, pid);
            }
        }
        panic!("it ends too early");
    }

    #[track_caller]
    fn ends_the_same(&self, directory: &Path, pid: u32) {
        kernel::wait_gone(pid, self.typical * 10 + Duration::from_secs(60));
        for ((name, want), (_, got)) in self.expected.iter().zip(self.program.results(directory)) {
            right!(*want == got, "{name} differs: {} bytes, expected {}", got.len(), want.len());
        }
        self.scratch.nothing_is_left("in the end");
    }
}

/// Through a pipe into another store, under another name; the job is removed where it was.
#[track_caller]
fn travels(program: Program) {
    let undisturbed = Undisturbed::of(program);
    if undisturbed_only() {
        return;
    }
    let here = undisturbed.scratch.stillpoint();
    let there = here.with_store(&undisturbed.scratch.path().join("there"));
    let (directory, pid) = undisturbed.killed(&here, 0.4);
    send(&here, "job", &[], &there, "far");
    here.run(&["rm", "job"]).ok();
    there.run(&["verify", "far"]).ok();
    assert_eq!(there.restore_at_once("far", &["--eager-below", "0"]), pid);
    undisturbed.ends_the_same(&directory, pid);
}

#[test]
fn python_with_threads() {
    let Some(python) = installed(&["/usr/bin/python3", "python3"], "python3") else { return };
    let script = "import threading, hashlib\n\
        sums = {}\n\
        def work(n):\n\
        \x20   h = hashlib.sha256(str(n).encode())\n\
        \x20   for _ in range(250000): h.update(h.digest())\n\
        \x20   sums[n] = h.hexdigest()\n\
        threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]\n\
        for t in threads: t.start()\n\
        for t in threads: t.join()\n\
        print(sorted(sums.items()))\n";
    travels(Program::new(&[python.to_str().expect("path"), "-c", script]));
}

#[test]
fn xz_with_threads() {
    let Some(xz) = installed(&["xz"], "xz-utils") else { return };
    let mut program =
        Program::new(&[xz.to_str().expect("path"), "-T2", "-4", "--block-size=1MiB", "-k", "-c", "input"]);
    program.prepare = input(tier::size(16 << 20));
    travels(program);
}

#[test]
fn sqlite_with_a_file() {
    let Some(sqlite) = installed(&["sqlite3"], "sqlite3") else { return };
    let mut program =
        Program::new(&[sqlite.to_str().expect("path"), "-batch", "data.db", ".read script.sql"]);
    program.prepare = Box::new(|directory| {
        let mut script = String::from("create table t (n integer primary key, sum integer);\n");
        for n in 0..600 {
            script += &format!(
                "insert into t values ({n}, (with recursive c(i) as \
                 (select 0 union all select i + 1 from c where i < 4000) select sum(i * {n}) from c));\n"
            );
        }
        script += "select count(*), sum(sum) from t;\npragma integrity_check;\n";
        fs::write(directory.join("script.sql"), script).expect("script");
    });
    program.outputs = vec!["data.db"];
    travels(program);
}

/// A program of which executable and libraries are in a folder of its own, so that they can be another machine's.
fn moved_xz(scratch: &Scratch) -> Option<(Program, PathBuf)> {
    let xz = installed(&["xz"], "xz-utils")?;
    let own = scratch.directory("own");
    let binary = own.join("xz");
    fs::copy(&xz, &binary).expect("copy");
    let needed = Command::new("ldd").arg(&xz).output().expect("ldd");
    for line in String::from_utf8_lossy(&needed.stdout).lines() {
        let path = line.split("=> ").nth(1).and_then(|rest| rest.split(' ').next());
        if let Some(path) = path.map(Path::new).filter(|path| path.is_absolute()) {
            fs::copy(path, own.join(path.file_name().expect("name"))).expect("copy");
        }
    }
    let mut program = Program::new(&[
        binary.to_str().expect("path"),
        "-T2",
        "-4",
        "--block-size=1MiB",
        "-k",
        "-c",
        "input",
    ]);
    program.environment.push(("LD_LIBRARY_PATH".into(), own.display().to_string()));
    program.prepare = input(tier::size(30 << 20));
    Some((program, own))
}

/// What is there of a library on another machine: another version of it, or nothing.
fn become_another_machine(own: &Path) {
    for entry in fs::read_dir(own).expect("folder").flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let mut bytes = fs::read(&path).expect("read");
        fs::remove_file(&path).expect("remove");
        if name.starts_with("libc.so") {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&path, bytes).expect("write");
        }
    }
}

#[test]
fn a_portable_one_brings_its_executable_and_libraries() {
    let folder = Scratch::new();
    let Some((program, own)) = moved_xz(&folder) else { return };
    let undisturbed = Undisturbed::of(program);
    if undisturbed_only() {
        return;
    }
    let here = undisturbed.scratch.stillpoint();
    let there = here.with_store(&undisturbed.scratch.path().join("there"));
    let (directory, pid) = undisturbed.killed(&here, 0.1);
    send(&here, "job", &[], &there, "bare");
    send(&here, "job", &["--portable", "--compress", "lz4"], &there, "whole");
    become_another_machine(&own);
    let refused = here.run(&["export", "job", "-", "--portable"]);
    refused.fails(3, &["libc.so"]);
    here.run(&["rm", "job"]).ok();
    let refused = there.run(&["restore", "bare", "--detach"]).fails(3, &["libc.so"]);
    assert!(refused.stderr.contains("own/xz: is gone"), "{refused}");
    assert_eq!(there.restore_detached("whole", &[]), pid);
    let files = there.store().join("files").canonicalize().expect("files");
    let exe = fs::read_link(format!("/proc/{pid}/exe")).expect("exe");
    assert!(exe.starts_with(&files) && exe.ends_with("xz"), "{}", exe.display());
    // It is an ordinary one from here on: checkpoints of it know the copies, also when the first one is gone.
    let second = there.checkpoint("whole", "whole", &[]);
    let third = there.checkpoint("whole", "whole", &["--kill"]);
    assert_eq!((second.id, third.id), (2, 3));
    kernel::wait_gone(pid, Duration::from_secs(60));
    there.run(&["prune", "whole", "--keep", "1"]).ok();
    there.verified();
    // And it travels on, with what it brought.
    let beyond = here.with_store(&undisturbed.scratch.path().join("beyond"));
    send(&there, "whole", &["--portable"], &beyond, "whole");
    there.run(&["rm", "whole"]).ok();
    there.run(&["rm", "bare"]).ok();
    let left = fs::read_dir(&files).expect("files").flatten().filter(|e| e.path().is_dir()).count();
    assert_eq!(left, 0, "copies that nobody knows any more");
    assert_eq!(beyond.restore_detached("whole", &[]), pid);
    undisturbed.ends_the_same(&directory, pid);
}

/// Where it was taken, an upgrade is no obstacle either.
#[test]
fn a_checkpoint_keeps_its_files() {
    let folder = Scratch::new();
    let Some((program, own)) = moved_xz(&folder) else { return };
    let undisturbed = Undisturbed::of(program);
    if undisturbed_only() {
        return;
    }
    let here = undisturbed.scratch.stillpoint();
    let (directory, pid) = undisturbed.killed_with(&here, 0.1, &["--portable"]);
    let copies = here.run(&["show", "job"]).ok();
    assert!(copies.stdout.contains("in the store"), "{copies}");
    become_another_machine(&own);
    here.verified();
    assert_eq!(here.restore_detached("job", &[]), pid);
    undisturbed.ends_the_same(&directory, pid);
}

/// A copy that was damaged in the store is no better than none.
#[test]
fn a_damaged_copy_is_not_used() {
    let folder = Scratch::new();
    let Some((program, own)) = moved_xz(&folder) else { return };
    let undisturbed = Undisturbed::of(program);
    if undisturbed_only() {
        return;
    }
    let here = undisturbed.scratch.stillpoint();
    let there = here.with_store(&undisturbed.scratch.path().join("there"));
    undisturbed.killed(&here, 0.4);
    send(&here, "job", &["--portable"], &there, "job");
    become_another_machine(&own);
    let copy = there.files().into_iter().find(|path| path.ends_with("xz")).expect("copy");
    let mut bytes = fs::read(&copy).expect("read");
    bytes[1000] ^= 1;
    fs::remove_file(&copy).expect("remove");
    fs::write(&copy, bytes).expect("write");
    there.run(&["restore", "job", "--detach"]).fails(3, &["own copy is damaged"]);
    undisturbed.scratch.nothing_is_left("after a refusal");
}

/// Counts to a file, slowly.
fn counter(until: u32) -> Option<Program> {
    counts(&format!("range({until})"))
}

/// Counts to a file, slowly, those numbers.
fn counts(numbers: &str) -> Option<Program> {
    let python = installed(&["/usr/bin/python3", "python3"], "python3")?;
    let script = format!(
        "import itertools, os, time\nwith open('log', 'w') as log:\n for n in {numbers}: print(n, file=log, flush=True); time.sleep(.01)"
    );
    let mut program = Program::new(&[python.to_str().expect("path"), "-c", &script]);
    program.outputs = vec!["log"];
    Some(program)
}

#[test]
fn files_that_it_writes_are_to_be_there() {
    let Some(program) = counter(150) else { return };
    let undisturbed = Undisturbed::of(program);
    if undisturbed_only() {
        return;
    }
    let here = undisturbed.scratch.stillpoint();
    let there = here.with_store(&undisturbed.scratch.path().join("there"));
    let (directory, pid) = undisturbed.killed(&here, 0.4);
    send(&here, "job", &[], &there, "job");
    let (log, away) = (directory.join("log"), directory.join("away"));
    fs::rename(&log, &away).expect("rename");
    for policy in ["rollback", "keep", "refuse"] {
        there.run(&["restore", "job", "--files", policy]).fails(3, &["log: is gone"]);
    }
    // A copy of it is another file, and the same contents. Where it was written it has to be the same file.
    fs::copy(&away, &log).expect("copy");
    here.run(&["restore", "job"]).fails(3, &["log: was replaced"]);
    fs::OpenOptions::new().append(true).open(&log).expect("log").write_all(b"more\n").expect("write");
    assert_eq!(there.restore_at_once("job", &[]), pid);
    undisturbed.ends_the_same(&directory, pid);
}

#[test]
fn a_file_is_not_overwritten_and_a_damaged_one_not_imported() {
    let Some(program) = counter(150) else { return };
    let undisturbed = Undisturbed::of(program);
    if undisturbed_only() {
        return;
    }
    let here = undisturbed.scratch.stillpoint();
    let there = here.with_store(&undisturbed.scratch.path().join("there"));
    undisturbed.killed(&here, 0.4);
    let folder = undisturbed.scratch.directory("archives");
    let file = folder.join("job.sp");
    let name = file.to_str().expect("path");
    let answer = here.run(&["export", "job@1", name, "--json"]).ok().json();
    let bytes = fs::read(&file).expect("read");
    assert_eq!(answer["archive_bytes"], bytes.len());
    here.run(&["export", "job", name]).fails(2, &["exists"]);
    here.run(&["export", "job@7", name, "--force"]).fails(2, &["no checkpoint"]);
    right_eq!(fs::read(&file).expect("read"), bytes, "untouched");
    here.run(&["export", "job", name, "--force", "--compress", "none"]).ok();
    assert!(fs::read(&file).expect("read").len() > bytes.len());
    here.run(&["export", "job", name, "--compress", "zstd:99"]).fails(2, &["levels"]);
    here.run(&["export", "job", "/dev/full"]).fails(1, &["space"]);
    here.run(&["export", "job", folder.to_str().expect("path")]).fails(2, &["directory"]);
    assert_eq!(fs::read_dir(&folder).expect("folder").count(), 1, "no temporary file is left");

    let nothing_is_there = |why: &str| {
        assert_eq!(there.run(&["ls", "--json"]).ok().json().as_array().map(Vec::len), Some(0), "{why}");
        let jobs = fs::read_dir(there.store().join("jobs")).map_or(0, |jobs| jobs.count());
        assert_eq!(jobs, 0, "{why}");
    };
    let broken = folder.join("broken.sp");
    let broken_name = broken.to_str().expect("path");
    for (at, words) in
        [(3, "not a checkpoint"), (40, "damaged"), (80, "damaged"), (bytes.len() / 2, "damaged")]
    {
        let mut flipped = bytes.clone();
        flipped[at] ^= 0x10;
        fs::write(&broken, flipped).expect("write");
        there.run(&["import", broken_name]).fails(2, &[words]);
        nothing_is_there(words);
    }
    fs::write(&broken, &bytes[..bytes.len() - 5]).expect("write");
    there.run(&["import", broken_name]).fails(2, &["before its end mark"]);
    nothing_is_there("cut");
    there.run(&["import", "/nowhere"]).fails(2, &["no such file"]);

    // One that is killed in the middle.
    let mut import =
        there.command(&["import", "-", "--name", "killed"]).stdin(Stdio::piped()).spawn().expect("import");
    import.stdin.as_mut().expect("stdin").write_all(&bytes[..bytes.len() - 100]).expect("write");
    wait_for("the import to begin", Duration::from_secs(60), || {
        there.store().join("jobs/killed/segments/1.pages").exists().then_some(())
    });
    assert_eq!(
        there.run(&["ls", "--json"]).ok().json().as_array().map(Vec::len),
        Some(0),
        "it is not whole yet"
    );
    import.kill().expect("kill");
    import.wait().expect("wait");
    assert_eq!(there.run(&["ls", "--json"]).ok().json().as_array().map(Vec::len), Some(0));
    assert!(!there.store().join("jobs/killed/segments/1.pages").exists(), "what it left is swept");

    // Twice without a name makes two jobs; with one, a second checkpoint.
    let jobs: Vec<serde_json::Value> =
        (0..2).map(|_| there.run(&["import", name, "--json"]).ok().json()["job"].clone()).collect();
    assert_eq!(jobs, ["job", "job-2"]);
    let answer = there.run(&["import", name, "--name", "job", "--json"]).ok().json();
    assert_eq!((&answer["job"], &answer["id"]), (&"job".into(), &2.into()));
    assert_eq!((&answer["from_job"], &answer["from_id"]), (&"job".into(), &1.into()));
    there.verified();
    assert!(there.run(&["show", "job@2"]).ok().stdout.contains("imported"));
}

/// Each further checkpoint is told by pages of those before it; an exported one has all of them.
#[test]
fn an_incremental_one_is_whole() {
    let Some(python) = installed(&["/usr/bin/python3", "python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let (here, directory) = (scratch.stillpoint(), scratch.directory("job"));
    let there = here.with_store(&scratch.path().join("there"));
    let script = "import os, time, hashlib\nblock = bytearray(8 << 20)\nfor n in range(200):\n \
        block[n * 40000 : n * 40000 + 9] = b'%09d' % n\n time.sleep(.01)\n\
        while not os.path.exists('end'): time.sleep(.01)\n\
        print(hashlib.sha256(block).hexdigest())";
    let end = directory.join("end");
    fs::write(&end, "").expect("write");
    let expected = {
        let output =
            Command::new(&python).args(["-c", script]).current_dir(&directory).output().expect("python");
        output.stdout
    };
    fs::remove_file(&end).expect("remove");
    let out = fs::File::create(directory.join("out")).expect("out");
    let mut run = here.command(&["run", "--detach", "--name", "job", "--json", "--"]);
    run.arg(&python).args(["-c", script]).current_dir(&directory).stdout(out);
    assert!(run.status().expect("run").success());
    let taken: Vec<_> = (0..4).map(|_| here.checkpoint("job", "job", &[])).collect();
    assert_eq!(taken[3].json["incremental"], true);
    let killed = here.checkpoint("job", "job", &["--kill"]);
    send(&here, &killed.name(), &[], &there, "far");
    here.run(&["rm", "--force", "job"]).ok();
    there.verified();
    let pid = there.restore_at_once("far", &[]);
    fs::write(&end, "").expect("write");
    kernel::wait_gone(pid, Duration::from_secs(60));
    let found = fs::read(directory.join("out")).expect("out");
    right!(found.ends_with(&expected), "{}", String::from_utf8_lossy(&found));
}

/// A real block device: what it holds at any moment, as after a power cut, is mounted and restored.
#[test]
fn power_is_cut_under_a_file_system() {
    if undisturbed_only() {
        return;
    }
    let tools = ["losetup", "mkfs.ext4", "fsfreeze", "mount", "umount"];
    if let Some(missing) = tools.into_iter().find(|tool| kernel::which(tool).is_none()) {
        return skipped(&format!("{missing} is not installed"));
    }
    // Until it is told: nobody knows how long so many cuts take.
    let told = "itertools.takewhile(lambda _: not os.path.exists('enough'), itertools.count())";
    let Some(program) = counts(told) else { return };
    let scratch = Scratch::new();
    // A file system in a file in a file system: freezing the outer one stops the inner one's disk in one instant, and nobody tells
    // the inner one.
    let Some(outer) = Disk::mount(&scratch, "outer", scratch.path(), 400) else {
        return skipped("not permitted to mount file systems in files");
    };
    let Some(disk) = Disk::mount(&scratch, "inner", &outer.at, 150) else {
        return skipped("not permitted to mount file systems in files");
    };
    let here = scratch.stillpoint().with_store(&disk.at.join("store"));
    let directory = scratch.directory("job");
    let mut child = program.start(&directory, scratch.path());
    let pid = child.id().to_string();
    let mut committed = 0;
    for cut in 0..STEPS {
        // Checkpoints go on while the disk is stopped and copied.
        let mut taking = here.command(&["checkpoint", &pid, "--name", "job", "--keep", "3", "--json"]);
        let mut taking = taking.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("checkpoint");
        let longest = scratch.random().below(60_000);
        std::thread::sleep(Duration::from_micros(longest));
        let copy = scratch.path().join(format!("copy.{cut}"));
        outer.still(|| fs::copy(outer.at.join("inner"), &copy)).expect("copy");
        let done = taking.wait().expect("checkpoint").success();
        // Its journal is replayed.
        let after =
            Disk::attach(&scratch, &copy, &format!("after.{cut}")).expect("what was left can be mounted");
        let there = here.with_store(&after.at.join("store"));
        there.run(&["ls"]).ok();
        let entries = fs::read_dir(after.at.join("store/jobs/job/checkpoints"));
        let is_any = entries.is_ok_and(|entries| entries.count() > 0);
        let ids = if is_any { there.checkpoints("job") } else { Vec::new() };
        let newest = ids.last().copied().unwrap_or(0);
        right!(newest >= committed, "cut {cut}: {ids:?}, and {committed} was committed");
        there.verified();
        drop(after);
        fs::remove_file(&copy).expect("remove");
        committed = if done { here.checkpoints("job").last().copied().unwrap_or(0) } else { committed };
    }
    eprintln!("as far as checkpoint {committed}");
    assert!(committed > 3, "no checkpoints were taken");
    // What is left of a last cut runs.
    let copy = scratch.path().join("copy");
    outer.still(|| fs::copy(outer.at.join("inner"), &copy)).expect("copy");
    let _ = child.kill();
    let _ = child.wait();
    let after = Disk::attach(&scratch, &copy, "after").expect("mount");
    let there = here.with_store(&after.at.join("store"));
    let pid = there.restore_at_once("job", &[]);
    let log = || fs::read_to_string(directory.join("log")).expect("log");
    let then = log().lines().count();
    wait_for("it to count on", Duration::from_secs(60), || (log().lines().count() > then + 10).then_some(()));
    fs::write(directory.join("enough"), "").expect("write");
    kernel::wait_gone(pid, Duration::from_secs(60));
    let counted = log().lines().count();
    right!(log().lines().map(str::to_owned).eq((0..counted).map(|n| n.to_string())), "{}", log());
}

/// How often the power is cut.
const STEPS: u32 = 15;

/// A file system in a file, mounted.
struct Disk {
    at: PathBuf,
}

impl Disk {
    /// A new one of so many megabytes.
    fn mount(scratch: &Scratch, name: &str, folder: &Path, megabytes: u64) -> Option<Self> {
        let file = folder.join(name);
        fs::File::create(&file).ok()?.set_len(megabytes << 20).ok()?;
        let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&file).status().ok()?;
        made.success().then(|| Disk::attach(scratch, &file, &format!("{name}.mounted"))).flatten()
    }

    fn attach(scratch: &Scratch, file: &Path, name: &str) -> Option<Self> {
        let at = scratch.directory(name);
        let done = Command::new("mount").args(["-o", "loop"]).arg(file).arg(&at).output().ok()?;
        done.status.success().then_some(Disk { at })
    }

    /// Does something while nothing on it changes.
    fn still<T>(&self, act: impl FnOnce() -> T) -> T {
        let freeze = |how: &str| Command::new("fsfreeze").arg(how).arg(&self.at).status().expect("fsfreeze");
        assert!(freeze("--freeze").success());
        let done = act();
        assert!(freeze("--unfreeze").success());
        done
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}
