//! The Python package as `pip install` makes it from the tree, in an environment with nothing else in it: it brings its library and its command.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_tests::programs::installed;
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::alone;
use stillpoint_tests::{Scratch, Stillpoint, right_eq, skipped, undisturbed_only};

/// A new environment with the package in it, and whatever else this Python has.
fn environment(scratch: &Scratch) -> Option<PathBuf> {
    let python = installed(&["python3"], "python3")?;
    let folder = scratch.path().join("environment");
    let mut make = Command::new(python);
    make.args(["-m", "venv", "--system-site-packages"]).arg(&folder);
    let made = make.output().expect("python");
    if !made.status.success() {
        skipped("this Python makes no environments (Debian package python3-venv)");
        return None;
    }
    // The sources are taken as they are, and nothing is left beside them.
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let copy = scratch.path().join("tree");
    std::fs::create_dir(&copy).expect("a folder");
    for name in ["Cargo.toml", "Cargo.lock", "crates", "examples", "tests", "bench"] {
        std::os::unix::fs::symlink(tree.join(name), copy.join(name)).expect("a link");
    }
    let copied = Command::new("cp").arg("-r").arg(tree.join("python")).arg(&copy).status();
    assert!(copied.is_ok_and(|status| status.success()), "no copy");
    let target =
        std::env::current_exe().expect("a path").ancestors().nth(3).map(Path::to_owned).expect("a folder");
    let mut install = Command::new(folder.join("bin/pip"));
    install.arg("install").arg(copy.join("python")).current_dir(scratch.path());
    install.env("STILLPOINT_PROFILE", "dev").env("CARGO_TARGET_DIR", target);
    install.envs(std::env::var_os("CARGO").map(|cargo| ("CARGO", cargo)));
    let done = install.output().expect("pip");
    let said = [done.stdout, done.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    if said.contains("No matching distribution") || said.contains("No module named 'setuptools'") {
        skipped("pip has no setuptools to build with: the package index is out of reach");
        return None;
    }
    assert!(done.status.success(), "{said}");
    Some(folder)
}

#[test]
fn installed_by_pip() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let Some(environment) = environment(&scratch) else { return };
    let (python, programs) =
        (environment.join("bin/python"), Path::new(env!("CARGO_MANIFEST_DIR")).join("programs"));
    let run = |arguments: &[&Path]| {
        let mut command = alone(&python);
        command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").env(MARK, scratch.path());
        command.env("STILLPOINT_STORE", scratch.path().join("store")).env("HOME", scratch.path());
        command.stdin(Stdio::null()).current_dir(scratch.path());
        Stillpoint::wait(command, scratch.path())
    };
    let simple = scratch.path().join("simple.py");
    let script = r"
import os, stillpoint, threading
here = stillpoint.snapshot()
if here.value < 5:
    here.rollback(here.value + 1)
here.commit()
assert here.value == 5 and stillpoint.__file__.startswith(os.environ['HOME'])
twin = stillpoint.fork_all()
if twin == 0:
    os._exit(0)
assert twin > 0
print('ok')
";
    std::fs::write(&simple, script).expect("a script");
    right_eq!(run(&[&simple]).ok().stdout, "ok\n");
    // The command came with it.
    let mut command = Command::new(environment.join("bin/stillpoint"));
    command.arg("--version").env_clear();
    let told = Stillpoint::wait(command, scratch.path()).ok().stdout;
    assert!(told.starts_with("stillpoint "), "{told}");
    let has = |module: &str| {
        let import = format!("import {module}");
        let tried = Command::new(&python).args(["-c", &import]).stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    if has("numpy") {
        right_eq!(run(&[&programs.join("branching.py"), Path::new("8")]).ok().stdout, "ok\n");
    }
    if has("ipykernel") && has("jupyter_client") {
        let undo = programs.join("../../crates/library/examples/undo.ipynb");
        right_eq!(run(&[&programs.join("notebook.py"), scratch.path(), &undo]).ok().stdout, "ok\n");
    }
    scratch.nothing_is_left("in the end");
}
