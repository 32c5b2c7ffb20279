//! `ls`, `show`, `verify`, `rm` and `prune` on a store that was made for the purpose.
#![allow(clippy::unwrap_used)]

use crate::common::Bench;
use serde_json::json;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use stillpoint_image::{AddressSpace, Bytes, Descriptor, FileKind, FileTable, Image, Meta, OpenFile, Owner};
use stillpoint_image::{Backing, Mapping, PAGE, PathFile, Process, Range, Thread};
use stillpoint_store::{Store, Zeros};

const START: u64 = 0x7000_0000_0000;
const PAGES: u64 = 300;

fn program() -> Image {
    let text = |t: &str| Bytes(t.as_bytes().to_vec());
    let thread = |tid, name| Thread { tid, name: text(name), ..Default::default() };
    let path = |p: &str| PathFile { path: text(p), ..Default::default() };
    let mapping = Mapping {
        start: START,
        end: START + PAGES * PAGE,
        prot: 3,
        shared: false,
        backing: Backing::Anonymous,
        flags: Default::default(),
        pkey: 0,
        huge_page: 0,
        guards: Vec::new(),
        name: None,
    };
    let file = OpenFile { flags: 1, position: 0, kind: FileKind::Path(3), owner: None, locks: Vec::new() };
    Image {
        meta: Meta {
            label: Some("before lunch".into()),
            taken_ns: 1_767_225_599_000_000_000,
            engine: "stop".into(),
            pause_ns: 800_000,
            command: vec![text("./simulate"), text("two words")],
            ..Default::default()
        },
        processes: vec![Process {
            pid: 4711,
            threads: vec![thread(4711, "simulate"), thread(4712, "worker"), thread(4713, "worker")],
            exe: 1,
            cwd: 2,
            ..Default::default()
        }],
        spaces: vec![AddressSpace { mappings: vec![mapping], ..Default::default() }],
        tables: vec![FileTable { descriptors: vec![Descriptor { fd: 5, file: 0, close_on_exec: false }] }],
        files: vec![file],
        paths: vec![path("/"), path("/opt/simulate"), path("/home/u"), path("/home/u/out.dat")],
        ..Default::default()
    }
}

/// Adds a checkpoint; the pages hold `fill`.
fn add(store: &Path, job: &str, fill: u8) -> u64 {
    let mut writer = Store::open(store).unwrap().begin(job).unwrap();
    let range = Range { start: START, len: PAGES * PAGE };
    writer
        .put(Owner::Space(0), range, Zeros::Omit, |_, buffer| {
            buffer.fill(fill);
            Ok::<(), Infallible>(())
        })
        .unwrap();
    writer.commit(program()).unwrap().id
}

fn only_segment(store: &Path, job: &str) -> PathBuf {
    let folder = store.join("jobs").join(job).join("segments");
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    names.pop().unwrap()
}

/// Flips a bit in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn jobs_and_checkpoints_are_listed() {
    let bench = Bench::new();
    for fill in 1..=3 {
        assert_eq!(add(&bench.store(), "web", fill), u64::from(fill));
    }
    add(&bench.store(), "db", 1);
    let jobs = bench.json(&["ls"]);
    let names: Vec<&str> = jobs.as_array().unwrap().iter().map(|j| j["job"].as_str().unwrap()).collect();
    assert_eq!(names, ["db", "web"]);
    assert_eq!(jobs[1]["checkpoints"], 3);
    assert_eq!(jobs[1]["running"], json!(null));
    assert_eq!(jobs[1]["command"], json!(["./simulate", "two words"]));
    assert!(jobs[1]["stored_bytes"].as_u64().unwrap() >= 3 * PAGES * PAGE);
    assert_eq!(jobs[1]["stored_bytes"], bench.json(&["top", "web"])["jobs"][0]["stored_bytes"]);
    let list = bench.json(&["ls", "web"]);
    assert_eq!(list.as_array().unwrap().len(), 3);
    assert_eq!(list[2]["id"], 3);
    assert_eq!(list[2]["bytes"], PAGES * PAGE);
    assert_eq!(list[2]["pause_ms"], 0.8);
    assert_eq!(list[2]["taken"], "2025-12-31T23:59:59Z");
    let text = bench.run(&["ls"]).stdout;
    assert!(text.contains("./simulate \"two words\""), "{text}");
    let text = bench.run(&["ls", "web"]).stdout;
    assert!(text.contains("web@2") && text.contains("1.2 MiB") && text.contains("before lunch"), "{text}");
}

#[test]
fn a_checkpoint_is_shown() {
    let bench = Bench::new();
    add(&bench.store(), "web", 1);
    add(&bench.store(), "web", 2);
    let text = bench.run(&["show", "web"]).stdout;
    for words in ["web@2", "process 4711", "3 (simulate, worker ×2)", "/opt/simulate", "5  /home/u/out.dat"]
    {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
    let value = bench.json(&["show", "web@1"]);
    assert_eq!([&value["job"], &value["label"]], ["web", "before lunch"]);
    assert_eq!(value["processes"][0]["threads"][2], json!({"tid": 4713, "name": "worker"}));
    assert_eq!(value["processes"][0]["memory"]["anonymous_bytes"], PAGES * PAGE);
    bench.run(&["show", "web@7"]).assert_fails(2, &["web@7", "stillpoint ls web"]);
}

#[test]
fn damage_is_found_and_named() {
    let bench = Bench::new();
    add(&bench.store(), "db", 1);
    add(&bench.store(), "web", 1);
    let whole = bench.run(&["verify"]);
    assert_eq!(whole.code, Some(0), "{whole:?}");
    assert!(whole.stdout.contains("db@1  ok") && whole.stdout.contains("web@1  ok"), "{whole:?}");
    damage(&only_segment(&bench.store(), "web"));
    let outcome = bench.run(&["verify"]);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stdout.contains("db@1  ok") && outcome.stdout.contains("web@1  DAMAGED"), "{outcome:?}");
    assert_eq!(bench.run(&["verify", "db"]).code, Some(0));
    let value = bench.json(&["verify", "web@1"]);
    assert_eq!(value[0]["ok"], false);
    assert!(value[0]["problems"][0].as_str().unwrap().contains("web@1"), "{value}");
}

#[test]
fn a_damaged_manifest_does_not_hide_the_rest() {
    let bench = Bench::new();
    add(&bench.store(), "web", 1);
    add(&bench.store(), "web", 2);
    damage(&bench.store().join("jobs/web/checkpoints/2"));
    let list = bench.json(&["ls", "web"]);
    assert_eq!(list[0]["id"], 1);
    assert!(list[1]["error"].is_string(), "{list}");
    assert!(bench.run(&["ls", "web"]).stdout.contains("damaged"));
    assert_eq!(bench.json(&["ls"])[0]["newest"]["id"], 1);
    bench.run(&["show", "web"]).assert_fails(1, &["web@2", "stillpoint verify"]);
    bench.run(&["restore", "web"]).assert_fails(1, &["web@2"]);
    bench.run(&["restore", "web", "--detach"]).assert_fails(1, &["web@2"]);
    assert_eq!(bench.run(&["verify", "web"]).code, Some(1));
}

#[test]
fn checkpoints_and_jobs_are_removed() {
    let bench = Bench::new();
    for fill in 1..=5 {
        add(&bench.store(), "web", fill);
    }
    add(&bench.store(), "db", 1);
    assert_eq!(bench.json(&["rm", "web@2"])["removed"], json!([2]));
    bench.run(&["rm", "web@2"]).assert_fails(2, &["web@2"]);
    assert_eq!(bench.json(&["prune", "web", "--keep", "2"])["removed"], json!([1, 3]));
    assert_eq!(bench.run(&["prune", "web", "--keep", "9"]).code, Some(0));
    assert_eq!(bench.json(&["ls", "web"]).as_array().unwrap().len(), 2);
    assert_eq!(bench.json(&["rm", "web"])["removed"], json!([4, 5]));
    bench.run(&["ls", "web"]).assert_fails(2, &["no job web"]);
    let text = bench.run(&["rm", "db"]).stdout;
    assert_eq!(text, "db: removed with 1 checkpoint\n");
    assert_eq!(bench.json(&["ls"]), json!([]));
}

#[test]
fn the_name_of_a_job_with_checkpoints_is_not_taken_by_another() {
    let bench = Bench::new();
    add(&bench.store(), "true", 1);
    let answer = bench.json(&["run", "--detach", "--", "true"]);
    assert_eq!(answer["job"], "true-2");
    // By name it is meant.
    assert_eq!(bench.json(&["run", "--detach", "--name", "true", "--", "true"])["job"], "true");
}

#[test]
fn a_job_that_ended_is_told_from_one_that_never_was() {
    let bench = Bench::new();
    add(&bench.store(), "web", 1);
    bench.run(&["checkpoint", "web"]).assert_fails(2, &["does not run", "stillpoint restore web"]);
    bench.run(&["checkpoint", "other"]).assert_fails(2, &["no job other runs"]);
}
