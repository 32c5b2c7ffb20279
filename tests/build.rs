//! Builds the C programs of `targets` and `programs` once, before any test runs: a program that others run from is never
//! replaced under them. What cannot be built here leaves its reason in `NAME-BUILD.missing`, for the test to skip itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Sources that are needed in another way than against shared glibc.
const OTHERS: [(&str, &[&str]); 3] = [
    (
        "static",
        &[
            "attributes",
            "descriptors",
            "memory",
            "registers",
            "sieve",
            "signals",
            "sleeps",
            "threads",
            "timers",
            "twins",
        ],
    ),
    ("musl", &["heap", "memory", "registers", "sieve", "signals", "sleeps", "threads", "timers", "twins"]),
    ("bits32", &["files"]),
];

/// Programs that need more than a C library are built by their tests, each for itself.
const NEEDS_MORE: [&str; 2] = ["stillpoint.h", "mpi.h"];

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says where to"));
    let mut sources = Vec::new();
    let mut headers = Vec::new();
    for folder in ["targets", "programs"] {
        println!("cargo:rerun-if-changed={folder}");
        fs::create_dir_all(out.join(folder)).expect("a folder of programs");
        for entry in fs::read_dir(folder).expect("a folder of sources").flatten() {
            let path = entry.path();
            match path.extension().and_then(|e| e.to_str()) {
                Some("h") => headers.push(path),
                Some("c") => sources.push(path),
                _ => {}
            }
        }
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=PATH");
    let newest_header = headers.iter().filter_map(|h| h.metadata().ok()?.modified().ok()).max();

    let mut wanted = Vec::new();
    for source in sources {
        let text = fs::read_to_string(&source).expect("a source");
        if NEEDS_MORE.iter().any(|header| text.contains(header)) {
            continue;
        }
        let stem = source.file_stem().and_then(|s| s.to_str()).expect("a name").to_owned();
        wanted.push((source.clone(), "dynamic"));
        let others = OTHERS.iter().filter(|(_, stems)| stems.contains(&stem.as_str()));
        wanted.extend(others.map(|(build, _)| (source.clone(), *build)));
    }

    // As many at a time as there are processors.
    let queue = Mutex::new(wanted);
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().expect("no worker panics with it").pop();
                    let Some((source, build)) = next else { return };
                    compile(&source, build, &out, newest_header);
                }
            });
        }
    });
}

/// Compiles one source, unless what is there is newer than it and all headers.
fn compile(source: &Path, build: &str, out: &Path, newest_header: Option<std::time::SystemTime>) {
    // targets/NAME.c becomes targets/NAME-BUILD.
    let program = out.join(format!("{}-{build}", source.with_extension("").display()));
    let missing = program.with_extension("missing");
    let modified = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    let is_newer = |built| modified(source).max(newest_header) < Some(built);
    if modified(&program).is_some_and(is_newer) {
        return;
    }
    let (compiler, flags): (&str, &[&str]) = match build {
        "static" => ("cc", &["-static", "-no-pie"]),
        "musl" => ("musl-gcc", &["-static"]),
        "bits32" => ("cc", &["-m32"]),
        _ => ("cc", &[]),
    };
    let temporary = program.with_extension("new");
    let mut command = Command::new(compiler);
    command.args(["-O1", "-g", "-pthread", "-o"]).arg(&temporary).args(flags).arg(source).arg("-lm");
    let _ = fs::remove_file(&missing);
    match command.output() {
        Ok(done) if done.status.success() => {
            fs::rename(&temporary, &program).unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        }
        // A compiler for 32 bits that is there may lack its libraries.
        Ok(done) if build == "bits32" => {
            fs::write(&missing, done.stderr).expect("a place for the reason");
        }
        Ok(done) => panic!("{} ({build}): {}", source.display(), String::from_utf8_lossy(&done.stderr)),
        Err(why) => fs::write(&missing, format!("{compiler}: {why}")).expect("a place for the reason"),
    }
}
