//! Files that changed between checkpoint and restore.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use stillpoint_tests::target::Running;
use stillpoint_tests::{
    Build, Output, Scratch, Stillpoint, Target, kernel, right, right_eq, undisturbed_only, wait_for,
};

/// A program with `data` open that was checkpointed and killed.
struct Killed {
    scratch: Scratch,
    stillpoint: Stillpoint,
    directory: PathBuf,
    data: PathBuf,
    at_the_cut: Vec<u8>,
}

impl Killed {
    fn new(scenario: &str) -> Option<Self> {
        Self::of("files", scenario, "data")
    }

    /// Of another target program, with another name for its data.
    fn of(program: &'static str, scenario: &str, data: &str) -> Option<Self> {
        if undisturbed_only() {
            return None;
        }
        let scratch = Scratch::new();
        let stillpoint = scratch.stillpoint();
        let directory = scratch.directory("job");
        fs::write(directory.join("input"), "0123456789").expect("input");
        let target = Target::new(program, scenario, Build::Dynamic).expect("cc");
        let mut running = target.start(&directory, scratch.path());
        stillpoint.checkpoint(running.pid, "job", &["--kill"]);
        running.reap();
        let data = directory.join(data);
        let at_the_cut = fs::read(&data).unwrap_or_default();
        Some(Killed { scratch, stillpoint, directory, data, at_the_cut })
    }

    fn restore(&self, extra: &[&str]) -> Output {
        let mut arguments = vec!["restore", "job", "--detach", "--json"];
        arguments.extend(extra);
        self.stillpoint.run(&arguments)
    }

    #[track_caller]
    fn refuses(&self, extra: &[&str], name: &str) {
        self.restore(extra).fails(3, &[name]);
        self.scratch.nothing_is_left("a refused restore");
    }

    #[track_caller]
    fn comes_back(&self, extra: &[&str]) -> Running {
        let json = self.restore(extra).ok().json();
        Running::restored(json["pid"].as_u64().expect("pid") as u32, &self.directory)
    }
}

fn lines(n: usize) -> Vec<u8> {
    (0..n).flat_map(|i| format!("line {i}\n").into_bytes()).collect()
}

#[test]
fn an_untouched_file_is_written_on() {
    let Some(job) = Killed::new("writer") else { return };
    job.comes_back(&[]).finish("restored");
    right_eq!(fs::read(&job.data).expect("data"), lines(2000));
}

fn grown(scenario: &str) {
    let Some(job) = Killed::new(scenario) else { return };
    let tail = b"what was written after the checkpoint\n".repeat(3000);
    let mut longer = job.at_the_cut.clone();
    longer.extend(&tail);
    fs::write(job.data.with_extension("new"), &longer).expect("write");
    // In place: the same inode, as the program itself would have done.
    fs::copy(job.data.with_extension("new"), &job.data).expect("copy");
    let json = job.restore(&[]).ok().json();
    let (told, sizes) = (json["notes"].to_string(), [longer.len(), job.at_the_cut.len()]);
    let said = format!("cut back from {} bytes to {}", sizes[0], sizes[1]);
    right!(told.contains("/data") && told.contains(&said), "nothing is cut without a word: {json}");
    let tails = job.stillpoint.run(&["show", "job", "--json"]).ok().json()["tails"].clone();
    assert_eq!((&tails[0]["offset"], &tails[0]["bytes"]), (&sizes[1].into(), &tail.len().into()), "{tails}");
    right_eq!(fs::read(tails[0]["data"].as_str().expect("a path")).expect("a tail"), tail);
    Running::restored(json["pid"].as_u64().expect("pid") as u32, &job.directory).finish("restored");
    right_eq!(fs::read(&job.data).expect("data"), lines(2000), "cut back, and written on");
    let kept = job.stillpoint.files().into_iter().any(|f| {
        let bytes = fs::read(f).unwrap_or_default();
        bytes.windows(tail.len()).any(|w| w == tail)
    });
    assert!(kept, "the tail that was cut off is kept in the store");
}

#[test]
fn a_file_that_only_grew_is_cut_back_and_its_tail_kept() {
    grown("writer");
}

#[test]
fn a_file_for_appending_that_only_grew_is_cut_back() {
    grown("appender");
}

/// As a script and a program that it runs write to one log: `script.sh >log`.
#[test]
fn a_file_that_others_write_to_is_not_cut() {
    for scenario in ["writer", "appender"] {
        let Some(job) = Killed::new(scenario) else { return };
        let line = b"from somebody else\n";
        let mut others = fs::OpenOptions::new().append(true).open(&job.data).expect("open");
        others.write_all(line).expect("write");
        let json = job.restore(&[]).ok().json();
        let told = json["notes"].to_string();
        let who = format!("not cut back, as process {} (", std::process::id());
        right!(told.contains("/data") && told.contains(&who), "{json}");
        Running::restored(json["pid"].as_u64().expect("pid") as u32, &job.directory).finish("restored");
        // The program goes on behind what was written meanwhile.
        let all = lines(2000);
        let (before, after) = all.split_at(job.at_the_cut.len());
        right_eq!(fs::read(&job.data).expect("data"), [before, line, after].concat(), "{scenario}");
    }
}

/// A restore whose own output goes to the log of the program does not cut it.
#[test]
fn the_output_of_the_restore_is_not_cut() {
    let Some(job) = Killed::new("appender") else { return };
    fs::OpenOptions::new()
        .append(true)
        .open(&job.data)
        .expect("open")
        .write_all(b"and then\n")
        .expect("write");
    let open = || fs::OpenOptions::new().append(true).open(&job.data).expect("open");
    let mut restore = job.stillpoint.command(&["restore", "job"]);
    fs::write(job.directory.join("go"), "").expect("go");
    let done = restore.stdin(Stdio::null()).stdout(open()).stderr(Stdio::piped()).output().expect("it runs");
    let told = String::from_utf8_lossy(&done.stderr);
    right!(told.contains("not cut back, as it is the output of this command"), "{told}");
    let all = lines(2000);
    let (before, after) = all.split_at(job.at_the_cut.len());
    right_eq!(fs::read(&job.data).expect("data"), [before, b"and then\n", after].concat(), "{told}");
}

#[test]
fn refuse_means_also_files_that_only_grew() {
    let Some(job) = Killed::new("writer") else { return };
    let mut longer = job.at_the_cut.clone();
    longer.extend(b"more");
    fs::write(&job.data, &longer).expect("write");
    job.refuses(&["--files", "refuse"], "data");
    right_eq!(fs::read(&job.data).expect("data"), longer, "a refusal touches no file");
    job.comes_back(&["--files", "rollback"]).finish("restored");
}

#[test]
fn keep_takes_a_file_as_it_is() {
    let Some(job) = Killed::new("writer") else { return };
    let mut longer = job.at_the_cut.clone();
    longer.extend(b"kept\n");
    fs::write(&job.data, &longer).expect("write");
    job.comes_back(&["--files", "keep"]).finish("restored");
    let now = fs::read(&job.data).expect("data");
    right_eq!(now, lines(2000), "the program writes on from where it was, over what was there");
}

#[test]
fn a_file_changed_in_place_is_named() {
    let Some(job) = Killed::new("writer") else { return };
    let mut changed = job.at_the_cut.clone();
    changed[100] ^= 1;
    fs::write(&job.data, &changed).expect("write");
    job.refuses(&[], "data");
    right_eq!(fs::read(&job.data).expect("data"), changed, "a refusal touches no file");
    job.comes_back(&["--files", "keep"]).finish("restored");
}

#[test]
fn a_file_changed_in_place_that_also_grew_is_named() {
    let Some(job) = Killed::new("writer") else { return };
    let mut changed = job.at_the_cut.clone();
    changed[100] ^= 1;
    changed.extend(b"and more");
    fs::write(&job.data, &changed).expect("write");
    job.refuses(&[], "data");
}

#[test]
fn a_file_that_shrank_is_named() {
    let Some(job) = Killed::new("writer") else { return };
    fs::write(&job.data, &job.at_the_cut[..500]).expect("write");
    job.refuses(&[], "data");
}

#[test]
fn a_file_that_is_gone_is_named() {
    let Some(job) = Killed::new("writer") else { return };
    fs::remove_file(&job.data).expect("remove");
    job.refuses(&[], "data");
    job.refuses(&["--files", "keep"], "data");
    assert!(!job.data.exists(), "a refusal makes no file");
}

#[test]
fn a_file_mapped_whole_is_as_it_was_mapped_even_if_it_changed_or_is_gone() {
    let Some(killed) = Killed::of("memory", "shared_file", "shared") else { return };
    let mut changed = killed.at_the_cut.clone();
    changed[5000..9000].fill(1);
    fs::write(&killed.data, changed).expect("write");
    killed.comes_back(&[]).finish("after the file changed");

    let Some(killed) = Killed::of("memory", "shared_file", "shared") else { return };
    fs::remove_file(&killed.data).expect("remove");
    killed.refuses(&["--files", "keep"], "shared");
    killed.comes_back(&[]).finish("after the file was gone");
    assert_eq!(fs::metadata(&killed.data).expect("made anew").len(), killed.at_the_cut.len() as u64);
}

#[test]
fn a_file_that_was_replaced_is_named() {
    let Some(job) = Killed::new("writer") else { return };
    let other = job.data.with_extension("other");
    fs::write(&other, b"another file altogether").expect("write");
    fs::rename(&other, &job.data).expect("rename");
    job.refuses(&[], "data");
}

#[test]
fn a_file_that_became_a_directory_is_named() {
    let Some(job) = Killed::new("writer") else { return };
    fs::remove_file(&job.data).expect("remove");
    fs::create_dir(&job.data).expect("mkdir");
    job.refuses(&[], "data");
    job.refuses(&["--files", "keep"], "data");
}

#[test]
fn a_file_open_for_reading_that_changed_is_named() {
    let Some(job) = Killed::new("reader") else { return };
    fs::write(job.directory.join("input"), "9876543210").expect("write");
    job.refuses(&[], "input");
}

#[test]
fn a_changed_program_is_named() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let original = Target::new("files", "simple", Build::Dynamic).expect("cc");
    let program = scratch.path().join("program");
    fs::copy(&original.program, &program).expect("copy");
    let target = Target { program: program.clone(), scenario: "simple".into() };
    let mut running = target.start(&scratch.directory("job"), scratch.path());
    stillpoint.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    // Another build under the same name: same size, one byte of code differs.
    let mut bytes = fs::read(&program).expect("read");
    let middle = bytes.len() / 4;
    bytes[middle] ^= 0x40;
    fs::remove_file(&program).expect("remove");
    fs::write(&program, bytes).expect("write");
    fs::set_permissions(&program, fs::metadata(&original.program).expect("stat").permissions())
        .expect("chmod");
    stillpoint.run(&["restore", "job", "--detach"]).fails(3, &["program"]);
    // The very same contents in a new file are the same program.
    fs::copy(&original.program, &program).expect("copy");
    let pid = stillpoint.restore_detached("job", &[]);
    Running::restored(pid, running.directory()).finish("restored");
}

/// The program goes on after the checkpoint, is killed at a random moment, and its file is rolled back with it. `written` tells how
/// much of it is written.
fn crashes_long_after_the_checkpoint(scenario: &str, written: impl Fn(&Path) -> u64) {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("job");
    let target = Target::new("files", scenario, Build::Dynamic).expect("cc");
    let mut running = target.start(&directory, scratch.path());
    for _ in 0..8 {
        let moment = scratch.random().below(150);
        std::thread::sleep(Duration::from_millis(20 + moment));
        let checkpoint = stillpoint.checkpoint(running.pid, "job", &[]);
        let written = || written(&directory.join("data"));
        let then = written();
        wait_for("the file to be written", Duration::from_secs(60), || {
            (written() > then + 100).then_some(())
        });
        running.kill();
        let pid = stillpoint.restore_detached(&checkpoint.name(), &[]);
        running = Running::restored(pid, &directory);
    }
    right!(kernel::alive(running.pid));
    running.finish("restored");
}

#[test]
fn a_crash_long_after_the_checkpoint() {
    crashes_long_after_the_checkpoint("busy_writer", |data| fs::metadata(data).map_or(0, |m| m.len()));
}

/// What is written through the mapping changes the file's times, and nothing that a restore would not write back.
#[test]
fn a_crash_long_after_the_checkpoint_of_a_file_mapped_whole() {
    crashes_long_after_the_checkpoint("busy_mapper", |data| {
        let mut count = [0; 8];
        let file = fs::File::open(data).expect("data");
        file.read_exact_at(&mut count, 8).expect("a count");
        u64::from_le_bytes(count)
    });
}
