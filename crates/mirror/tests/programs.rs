//! Programs in C and C++ that use the headers: built, killed with SIGKILL at random moments, recovered.

mod common;

use std::process::Command;
use std::time::Duration;

#[test]
fn a_killed_program_finds_its_list_whole() {
    let directory = tempfile::tempdir().expect("a directory");
    let (program, file) = (directory.path().join("list"), directory.path().join("backing"));
    common::compile("cc", "list.c", &program);
    let mut seed = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64);
    eprintln!("seed {seed}");
    let mut counts = Vec::new();
    for _ in 0..25 {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11);
        let time = Duration::from_micros(1_000 + (seed >> 40) % 60_000);
        let (said, running) = common::kill_after(Command::new(&program).arg(&file).arg("grow"), time);
        assert!(running && said.contains("items"), "{said}");
        counts.push(said.split_whitespace().nth(2).and_then(|n| n.parse::<u64>().ok()).expect("a count"));
    }
    assert!(counts.windows(2).all(|w| w[0] <= w[1]), "a later checkpoint holds less: {counts:?}");
    assert!(counts.iter().any(|c| *c > 0) && counts.len() > 5, "{counts:?}");
}

#[test]
fn plain_assignments_in_cpp() {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("assign");
    common::compile("c++", "assign.cpp", &program);
    let output = common::run(Command::new(&program).arg(directory.path().join("backing")));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "good\n");
}
