//! Stores that cannot be written, are full, are damaged: one clear sentence each, nothing half done.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_tests::target::Running;
use stillpoint_tests::tmpfs::Tmpfs;
use stillpoint_tests::{Build, Scratch, Target, kernel, right, right_eq, skipped, undisturbed_only};

fn start(scratch: &Scratch, scenario: &str) -> Running {
    let target = Target::new("files", scenario, Build::Dynamic).expect("cc");
    target.start(&scratch.directory("job"), scratch.path())
}

#[test]
fn a_store_in_memory_works() {
    let scratch = Scratch::new();
    let Some(tmpfs) = Tmpfs::new(scratch.directory("memory"), "128m") else {
        return skipped("not permitted to mount a file system");
    };
    if undisturbed_only() {
        return;
    }
    let stillpoint = scratch.stillpoint().with_store(&tmpfs.0.join("store"));
    let mut running = start(&scratch, "large");
    stillpoint.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    stillpoint.verified();
    let pid = stillpoint.restore_detached("job", &[]);
    Running::restored(pid, running.directory()).finish("restored");
}

#[test]
fn a_full_disk_leaves_the_earlier_checkpoints_and_the_program() {
    let scratch = Scratch::new();
    let Some(tmpfs) = Tmpfs::new(scratch.directory("small"), "100m") else {
        return skipped("not permitted to mount a file system");
    };
    if undisturbed_only() {
        return;
    }
    let stillpoint = scratch.stillpoint().with_store(&tmpfs.0.join("store"));
    let running = start(&scratch, "large");
    let first = stillpoint.checkpoint(running.pid, "job", &[]);
    // 32 MiB each: the third or fourth no longer fits.
    let mut ids = vec![first.id];
    let full = loop {
        assert!(ids.len() < 10, "100 MB hold no 10 checkpoints of 32 MB");
        let output = stillpoint.run(&["checkpoint", &running.pid.to_string(), "--name", "job", "--json"]);
        if !output.status.success() {
            break output;
        }
        ids.push(output.json()["id"].as_u64().expect("id"));
    };
    full.fails(1, &["space", "full"]);
    right!(kernel::alive(running.pid));
    right_eq!(stillpoint.checkpoints("job"), ids, "no partial checkpoint is visible");
    stillpoint.verified();
    // With --kill a failure must not kill.
    stillpoint
        .run(&["checkpoint", &running.pid.to_string(), "--name", "job", "--kill"])
        .fails(1, &["space", "full"]);
    right!(kernel::alive(running.pid), "killed without a checkpoint");
    // Room again: it works again.
    stillpoint.run(&["rm", &first.name()]).ok();
    let last = stillpoint.checkpoint(running.pid, "job", &["--kill"]);
    let directory = running.directory().to_owned();
    running.kill();
    let pid = stillpoint.restore_detached(&last.name(), &[]);
    Running::restored(pid, &directory).finish("restored");
}

#[test]
fn a_store_that_cannot_be_written() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let running = start(&scratch, "simple");
    let pid = running.pid.to_string();
    let try_store = |store: &Path, words: &[&str]| {
        let output = scratch.stillpoint().with_store(store).run(&["checkpoint", &pid, "--name", "job"]);
        assert!(matches!(output.code(), 1 | 2), "{output}");
        let code = output.code();
        output.fails(code, words);
        right!(kernel::alive(running.pid));
    };
    let file = scratch.path().join("file");
    fs::write(&file, "not a directory").expect("write");
    try_store(&file, &["file", "directory"]);
    try_store(&file.join("below"), &["directory"]);
    try_store(Path::new("/proc/stillpoint"), &["/proc/stillpoint"]);
    try_store(Path::new("/dev/null"), &["/dev/null"]);
    if kernel::is_root() {
        let at = scratch.directory("read-only");
        if let Some(tmpfs) = Tmpfs::new(at.clone(), "8m") {
            let remounted = Command::new("mount").args(["-o", "remount,ro"]).arg(&tmpfs.0).status();
            if remounted.is_ok_and(|s| s.success()) {
                try_store(&at.join("store"), &["read-only", "read only"]);
            }
        }
    }
    running.finish("after failures");
}

#[test]
fn a_store_that_belongs_to_somebody_else() {
    if !kernel::is_root() || kernel::which("setpriv").is_none() {
        return skipped("needs to be root to become somebody else, and setpriv");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let store = scratch.directory("private");
    fs::set_permissions(&store, fs::Permissions::from_mode(0o700)).expect("chmod");
    let shared = scratch.directory("shared");
    let copy = shared.join("stillpoint");
    fs::copy(stillpoint_tests::stillpoint::binary(), &copy).expect("copy");
    let done = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["ls", "--store"])
        .arg(&store)
        .current_dir("/")
        .output()
        .expect("setpriv");
    let said = String::from_utf8_lossy(&done.stderr).to_lowercase();
    assert!(matches!(done.status.code(), Some(1 | 2)), "{} {said}", done.status);
    assert!(said.contains("permission denied") && said.contains("private"), "{said}");
}

#[test]
fn an_empty_store_and_unknown_names() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    stillpoint.run(&["ls"]).ok();
    stillpoint.verified();
    for arguments in
        [&["restore", "nothing"][..], &["show", "nothing"], &["rm", "nothing"], &["verify", "nothing@3"]]
    {
        let output = stillpoint.run(arguments);
        assert!(matches!(output.code(), 1 | 2), "{output}");
        let code = output.code();
        output.fails(code, &["nothing"]);
    }
    for arguments in
        [&["restore"][..], &["checkpoint"], &["prune", "x"], &["fly"], &["restore", "a@b"], &["ls", "--no"]]
    {
        let output = stillpoint.run(arguments);
        assert_eq!(output.code(), 2, "{output}");
    }
}

/// Flips a byte at one place after the other of everything a checkpoint consists of. Each time the damage must be found
/// and named, and nothing must run; a byte that no checksum covers must not matter.
#[test]
fn one_flipped_bit_anywhere_is_found() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut running = start(&scratch, "simple");
    stillpoint.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    let files: Vec<_> =
        stillpoint.files().into_iter().filter(|f| fs::metadata(f).is_ok_and(|m| m.len() > 0)).collect();
    assert!(!files.is_empty());
    let mut found = 0;
    for path in &files {
        let size = fs::metadata(path).expect("stat").len();
        let file = fs::File::options().read(true).write(true).open(path).expect("open");
        let manifest = path.to_string_lossy().contains("checkpoints");
        let mut places: Vec<u64> = vec![0, 8, 16, size / 2, size - 1];
        places.extend((0..if manifest { 25 } else { 10 }).map(|_| scratch.random().below(size)));
        for place in places.into_iter().filter(|&p| p < size) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, place).expect("read");
            let flipped = [byte[0] ^ (1 << scratch.random().below(8))];
            file.write_all_at(&flipped, place).expect("write");
            let verify = stillpoint.run(&["verify", "job"]);
            let restore = stillpoint.run(&["restore", "job", "--detach", "--json"]);
            let context = format!("byte {place} of {}:\n{verify}{restore}", path.display());
            assert!(!restore.stderr.contains("panicked") && !verify.stderr.contains("panicked"), "{context}");
            if restore.status.success() {
                // Nothing that counts. Then the program must be right, and verify must agree.
                right!(verify.status.success(), "verify and restore differ: {context}");
                let pid = restore.json()["pid"].as_u64().expect("pid") as u32;
                Running::restored(pid, running.directory()).finish(&context);
                fs::remove_file(running.directory().join("go")).expect("go");
                let out = fs::File::options().write(true).open(running.directory().join("out")).expect("out");
                out.set_len("ready\n".len() as u64).expect("out");
            } else {
                found += 1;
                assert_eq!(restore.code(), 1, "{context}");
                assert!(!verify.status.success(), "verify did not see it: {context}");
                scratch.nothing_is_left(&context);
            }
            file.write_all_at(&byte, place).expect("write");
        }
    }
    assert!(found > 20, "hardly any of the flipped bits mattered: {found}");
    stillpoint.run(&["verify", "job"]).ok();
    let pid = stillpoint.restore_detached("job", &[]);
    Running::restored(pid, running.directory()).finish("with all bits back");
}

#[test]
fn truncated_and_missing_files_are_named() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut running = start(&scratch, "simple");
    stillpoint.checkpoint(running.pid, "job", &["--kill"]);
    running.reap();
    let essential = |p: &&PathBuf| {
        let name = p.to_string_lossy();
        (name.contains("checkpoints") || name.contains("segments"))
            && fs::metadata(p).is_ok_and(|m| m.len() > 0)
    };
    let files = stillpoint.files();
    let whole: Vec<_> = files.iter().map(|p| (p, fs::read(p).expect("read"))).collect();
    let put_back = || {
        for (path, bytes) in &whole {
            fs::write(path, bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    };
    for path in files.iter().filter(essential) {
        let size = fs::metadata(path).expect("stat").len();
        let is_segment = path.to_string_lossy().contains("segments");
        for length in [0, 1, 7, size / 2, size - 1] {
            if is_segment && length == size - 1 {
                continue; // the end of a segment may be padding
            }
            fs::File::options().write(true).open(path).and_then(|f| f.set_len(length)).expect("truncate");
            let output = stillpoint.run(&["restore", "job", "--detach"]);
            assert!(matches!(output.code(), 1 | 2), "{} cut to {length}: {output}", path.display());
            assert!(!output.stderr.contains("panicked"), "{output}");
            // Damage is no reason to clean up: somebody may put the file right.
            let gone: Vec<_> = files.iter().filter(essential).filter(|f| !f.exists()).collect();
            assert!(gone.is_empty(), "{} cut to {length}: then {gone:?} went: {output}", path.display());
            put_back();
        }
        fs::remove_file(path).expect("remove");
        let output = stillpoint.run(&["restore", "job", "--detach"]);
        assert!(matches!(output.code(), 1 | 2), "without {}: {output}", path.display());
        assert!(!output.stderr.contains("panicked"), "{output}");
        put_back();
    }
    let pid = stillpoint.restore_detached("job", &[]);
    Running::restored(pid, running.directory()).finish("with all files back");
}

#[test]
fn only_the_newest_are_kept() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = start(&scratch, "simple");
    let mut last = Vec::new();
    for _ in 0..5 {
        last.push(stillpoint.checkpoint(running.pid, "job", &["--keep", "2"]).id);
        last.drain(..last.len().saturating_sub(2));
        right_eq!(stillpoint.checkpoints("job"), last);
        stillpoint.verified();
    }
    stillpoint.run(&["checkpoint", "job", "--keep", "0"]).fails(2, &["--keep"]);
    // The next one would have been written into it.
    let spare = stillpoint.store().join("jobs/job/segments/spare");
    assert!(spare.exists());
    stillpoint.run(&["prune", "job", "--keep", "1"]).ok();
    assert!(!spare.exists());
    let directory = running.directory().to_owned();
    running.kill();
    let pid = stillpoint.restore_detached("job", &[]);
    Running::restored(pid, &directory).finish("restored");
}

#[test]
fn prune_and_rm_keep_what_is_left_whole() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = start(&scratch, "simple");
    for _ in 0..6 {
        stillpoint.checkpoint(running.pid, "job", &["--label", "a note"]);
    }
    let ids = stillpoint.checkpoints("job");
    assert_eq!(ids.len(), 6);
    stillpoint.run(&["rm", &format!("job@{}", ids[4])]).ok();
    stillpoint.run(&["prune", "job", "--keep", "2"]).ok();
    assert_eq!(stillpoint.checkpoints("job"), [ids[3], ids[5]]);
    stillpoint.verified();
    assert!(stillpoint.run(&["show", &format!("job@{}", ids[3])]).ok().stdout.contains("a note"));
    let directory = running.directory().to_owned();
    running.kill();
    let pid = stillpoint.restore_detached(&format!("job@{}", ids[3]), &[]);
    Running::restored(pid, &directory).finish("restored");
    scratch.nothing_is_left("after the job");
    stillpoint.run(&["rm", "job"]).ok();
    assert_eq!(stillpoint.run(&["ls", "--json"]).ok().stdout.matches("\"job\"").count(), 0);
}
