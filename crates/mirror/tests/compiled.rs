//! Unmodified programs compiled with the barrier pass: killed with SIGKILL at random moments, recovered, checked.
//!
//! Skipped, by name, where clang or LLVM's headers are missing.

mod common;

use common::{here, library, run};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The plugin, built once for all tests; `None` if it cannot be built here.
fn pass() -> Option<PathBuf> {
    let says = |tool: &str| Command::new(tool).arg("--version").stderr(Stdio::null()).output();
    let mut made_of = Vec::new();
    for tool in ["clang", "llvm-config"] {
        let Ok(version) = says(tool) else {
            println!("skipped: {tool} is not installed (packages clang, llvm-dev)");
            return None;
        };
        made_of.extend(version.stdout);
    }
    for source in ["Barrier.cpp", "build.sh"] {
        made_of.extend(std::fs::read(here().join("pass").join(source)).expect("a source"));
    }
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mirror-pass");
    std::fs::create_dir_all(&directory).expect("a directory");
    // Each test has a process of its own.
    let lock = File::create(directory.join("lock")).expect("a file");
    lock.lock().expect("a lock");
    let plugin = directory.join("stillpoint-mirror-pass.so");
    let is_there =
        plugin.exists() && std::fs::read(directory.join("made-of")).is_ok_and(|before| before == made_of);
    if !is_there {
        run(Command::new("sh").arg(here().join("pass/build.sh")).arg(&directory));
        std::fs::write(directory.join("made-of"), made_of).expect("written");
    }
    Some(plugin)
}

/// Where cargo has put a crate that holds C sources.
fn sources(package: &str, folder: &str) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let mut command = Command::new(cargo);
    // Tests have no network; whoever runs them has fetched all there is in Cargo.lock.
    command.args(["metadata", "--format-version", "1", "--offline", "--manifest-path"]);
    command.arg(here().join("Cargo.toml"));
    let text = String::from_utf8(run(&mut command).stdout).expect("text");
    let marker = "\"manifest_path\":\"";
    let mut paths = text.split(marker).skip(1).filter_map(|rest| rest.split('"').next()).map(Path::new);
    let of = |p: &&Path| {
        let name = p.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(&format!("{package}-"))
    };
    let manifest = paths.find(of).unwrap_or_else(|| panic!("{package} is not among the packages"));
    manifest.parent().expect("a directory").join(folder)
}

fn compiler(plugin: &Path) -> Command {
    let mut command = Command::new(here().join("pass/mirror-cc"));
    command.env("MIRROR_PASS", plugin).env("MIRROR_LIBRARY", library());
    command
}

fn build(
    plugin: &Path,
    host: &str,
    folder: &Path,
    files: &[PathBuf],
    more: &[&str],
) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("program");
    let mut command = compiler(plugin);
    command.args(["--globals=all", "-w"]).args(more).arg("-o").arg(&program);
    command.arg("-I").arg(here().join("include")).arg("-I").arg(folder);
    run(command.arg(here().join("tests/c").join(host)).args(files));
    (directory, program)
}

/// Kills and recovers; each life checks what it finds before it goes on.
fn kill_and_recover(directory: &Path, program: &Path) {
    let mut seed = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64);
    eprintln!("seed {seed}");
    let mut steps = Vec::new();
    for life in 0..60 {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11);
        // On a busy machine it takes longer until there is something to recover.
        let time = Duration::from_millis((100 + (seed >> 40) % 300) * (1 + life / 6));
        let mut command = Command::new(program);
        command.env("STILLPOINT_MIRROR", directory.join("backing")).env("STILLPOINT_MIRROR_MIB", "16");
        let (said, running) = common::kill_after(&mut command, time);
        assert!(running, "{said}");
        assert!(said.starts_with("new") || said.starts_with("recovered"), "{said}");
        steps.push(said.split_whitespace().nth(2).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0));
        if life >= 5 && steps.last() > Some(&0) {
            break;
        }
    }
    assert!(steps.windows(2).all(|w| w[0] <= w[1]), "{steps:?}");
    assert!(steps.last() > Some(&0), "{steps:?}");
}

#[test]
fn lua_goes_on_after_sigkill() {
    let Some(plugin) = pass() else { return };
    let folder = sources("lua-src", "lua-5.4.9");
    let entries = std::fs::read_dir(&folder).expect("Lua's sources").flatten().map(|e| e.path());
    let files: Vec<PathBuf> = entries.filter(|p| p.extension().is_some_and(|e| e == "c")).collect();
    let (directory, program) = build(&plugin, "lua_host.c", &folder, &files, &["-O1"]);
    kill_and_recover(directory.path(), &program);
}

#[test]
fn sqlite_goes_on_after_sigkill() {
    let Some(plugin) = pass() else { return };
    let folder = sources("libsqlite3-sys", "sqlite3");
    let file = folder.join("sqlite3.c");
    // Without optimisation, which would take most of the time of all tests; Lua has it.
    let more = ["-O0", "-DSQLITE_THREADSAFE=0", "-DSQLITE_OMIT_LOAD_EXTENSION", "-DSQLITE_OMIT_JSON"];
    let (directory, program) = build(&plugin, "sqlite_host.c", &folder, &[file], &more);
    kill_and_recover(directory.path(), &program);
}

#[test]
fn what_cannot_be_mirrored_is_refused_at_compile_time() {
    let Some(plugin) = pass() else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let cases = [
        ("void f(__int128 *p) { __atomic_store_n(p, 1, 5); }", "16 bytes cannot be mirrored", "-mcx16"),
        ("void f(int *p) { __asm__ volatile(\"movl $1, %0\" : \"=m\"(*p)); }", "inline assembly", "-O2"),
        ("void g(int *); void f(int *p) { g(p); }", "may write mirrored memory unseen", "-O2"),
    ];
    for (source, why, flag) in cases {
        let file = directory.path().join("case.c");
        std::fs::write(&file, source).expect("write");
        let mut command = compiler(&plugin);
        command.args(["--strict", "-O2", flag, "-c", "-o"]).arg(directory.path().join("case.o")).arg(&file);
        let output = command.output().expect("mirror-cc");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{source}: {said}");
    }
}

/// Each kind of store that there is in C, with threads and a signal handler; then the shadow is compared.
#[test]
fn no_kind_of_store_goes_by_the_barrier() {
    let Some(plugin) = pass() else { return };
    for level in ["-O0", "-O2", "-O3"] {
        let (directory, program) = build(&plugin, "stores.c", here(), &[], &[level, "-pthread"]);
        let mut command = Command::new(&program);
        command.env("STILLPOINT_MIRROR", directory.path().join("backing")).env("STILLPOINT_MIRROR_MIB", "4");
        let output = run(&mut command);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "no stale bytes\n", "{level}");
    }
}
