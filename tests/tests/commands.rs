//! `run`, `restore` and the jobs in the store, as a user meets them.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use stillpoint_tests::observe::Facts;
use stillpoint_tests::programs::installed;
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::stillpoint::binary;
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Scratch, Stillpoint, Target, kernel, right, right_eq, skipped, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(60);

fn target(scenario: &str) -> String {
    Target::new("files", scenario, Build::Dynamic).expect("cc").program.display().to_string()
}

/// Starts the command with pipes for its standard streams.
fn piped(stillpoint: &Stillpoint, arguments: &[&str]) -> Child {
    let mut command = alone_like(&stillpoint.command(arguments), binary());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("setsid")
}

/// Another program with the arguments and the environment of `command`, by itself.
fn alone_like(command: &Command, program: &Path) -> Command {
    let mut alone = alone(program);
    alone.args(command.get_args());
    alone.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    alone
}

/// Waits until a job can be named: a program may answer before the command has entered it among the jobs that run.
fn known(stillpoint: &Stillpoint, job: &str) {
    wait_for("the job to be known", PATIENCE, || {
        stillpoint.run(&["checkpoint", job]).status.success().then_some(())
    });
}

fn said(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[test]
fn run_ends_as_the_program_ends() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    assert_eq!(stillpoint.run(&["run", "--", "true"]).code(), 0);
    assert_eq!(stillpoint.run(&["run", "--", "sh", "-c", "exit 7"]).code(), 7);
    let killed = stillpoint.run(&["run", "--", "sh", "-c", "kill -TERM $$"]);
    assert!(killed.code() == 128 + 15, "ends by SIGTERM, or as a shell tells it: {killed}");
    let output = stillpoint.run(&["run", "--", "sh", "-c", "echo out; echo err >&2"]).ok();
    assert_eq!(output.stdout, "out\n");
    assert!(output.stderr.contains("err\n"));
    let missing = stillpoint.run(&["run", "--", "no-such-program-anywhere"]);
    assert!(matches!(missing.code(), 1 | 2 | 127), "{missing}");
    assert!(missing.stderr.contains("no-such-program-anywhere"), "{missing}");
}

#[test]
fn run_passes_input_output_and_signals() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("job");
    let mut child = piped(
        &stillpoint,
        &["run", "--name", "echo", "--", &target("echoes"), "echoes", directory.to_str().expect("path")],
    );
    let mut input = child.stdin.take().expect("pipe");
    let mut output = BufReader::new(child.stdout.take().expect("pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("read");
    right_eq!(line, "ready\n");
    writeln!(input, "hello").expect("write");
    line.clear();
    output.read_line(&mut line).expect("read");
    right_eq!(line, "echo hello\n");
    drop(input);
    assert!(child.wait().expect("wait").success());

    let child = piped(
        &stillpoint,
        &["run", "--name", "term", "--", &target("killed_by_term"), "killed_by_term", "/tmp"],
    );
    let pid = child.id();
    wait_for("the job to run", PATIENCE, || {
        stillpoint.run(&["ls", "--json"]).stdout.contains("\"term\"").then_some(())
    });
    std::thread::sleep(Duration::from_millis(200));
    kernel::kill(pid, rustix::process::Signal::TERM);
    let status = child.wait_with_output().expect("wait").status;
    assert!(status.signal() == Some(15) || status.code() == Some(128 + 15), "{status}");
}

/// The pipes of the first life are gone; the second has those of whoever restores.
#[test]
fn stdio_follows_whoever_restores() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("job");
    let mut first = piped(
        &stillpoint,
        &["run", "--name", "echo", "--", &target("echoes"), "echoes", directory.to_str().expect("path")],
    );
    let mut input = first.stdin.take().expect("pipe");
    let mut output = BufReader::new(first.stdout.take().expect("pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("read");
    writeln!(input, "one").expect("write");
    line.clear();
    output.read_line(&mut line).expect("read");
    right_eq!(line, "echo one\n");
    known(&stillpoint, "echo");
    stillpoint.checkpoint("echo", "echo", &["--kill"]);
    let status = first.wait().expect("wait");
    assert!(!status.success(), "killed, and says so: {status}");

    for generation in 0..2 {
        let mut again = piped(&stillpoint, &["restore", "echo"]);
        let mut input = again.stdin.take().expect("pipe");
        let mut output = BufReader::new(again.stdout.take().expect("pipe"));
        writeln!(input, "two {generation}").expect("write");
        line.clear();
        output.read_line(&mut line).expect("read");
        right_eq!(line, format!("echo two {generation}\n"));
        if generation == 0 {
            known(&stillpoint, "echo");
            stillpoint.checkpoint("echo", "echo", &["--kill"]);
            again.wait().expect("wait");
        } else {
            writeln!(input, "end").expect("write");
            line.clear();
            output.read_line(&mut line).expect("read");
            right_eq!(line, "echo end\n");
            assert_eq!(again.wait().expect("wait").code(), Some(0));
        }
    }
}

#[test]
fn a_detached_job_by_name() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("job");
    let out = fs::File::create(directory.join("out")).expect("out");
    let mut command =
        stillpoint.command(&["run", "--name", "web", "--detach", "--json", "--", &target("large"), "large"]);
    command.arg(&directory).stdout(out);
    assert!(command.status().expect("run").success());
    wait_for("the job to be ready", PATIENCE, || {
        said(&directory.join("out")).contains("ready").then_some(())
    });
    let list = stillpoint.run(&["ls", "--json"]).ok();
    assert!(list.stdout.contains("\"web\""), "{list}");
    let first = stillpoint.checkpoint("web", "web", &["--label", "before lunch"]);
    let second = stillpoint.checkpoint("web", "web", &[]);
    assert_eq!((first.job.as_str(), second.id), ("web", first.id + 1));
    // For people, one line.
    let line = stillpoint.run(&["checkpoint", "web"]).ok();
    assert_eq!(line.stdout.trim().lines().count(), 1, "{line}");
    assert!(
        line.stdout.contains(&format!("web@{}", second.id + 1)) && line.stdout.contains("pause"),
        "{line}"
    );
    let show = stillpoint.run(&["show", &first.name()]).ok();
    assert!(show.stdout.contains("before lunch"), "{show}");
    stillpoint.run(&["show", &first.name(), "--json"]).ok().json();
    stillpoint.run(&["verify", "web", "--json"]).ok().json();
    let last = stillpoint.checkpoint("web", "web", &["--kill"]);
    let pid = stillpoint.restore_detached("web", &[]);
    let json = stillpoint.run(&["ls", "web", "--json"]).ok();
    assert!(json.stdout.contains(&format!("{}", last.id)), "{json}");
    // The job is the job again: by its name.
    stillpoint.checkpoint("web", "web", &[]);
    fs::write(directory.join("go"), "").expect("go");
    kernel::wait_gone(pid, PATIENCE);
    scratch.nothing_is_left("in the end");
}

#[test]
fn an_engine_that_does_not_exist_and_one_that_does() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = Target::new("files", "simple", Build::Dynamic)
        .expect("cc")
        .start(&scratch.directory("job"), scratch.path());
    let pid = running.pid.to_string();
    assert_eq!(stillpoint.run(&["checkpoint", &pid, "--engine", "warp"]).code(), 2);
    let checkpoint = stillpoint.checkpoint(&pid, "job", &["--engine", "stop"]);
    assert_eq!(checkpoint.json["engine"], "stop");
    running.finish("after checkpoints");
}

/// In a container that was entered without a process group of its own, ours has no number there.
#[test]
fn a_process_group_from_outside_the_namespace() {
    let script = r#"
        "$0" run --name inside -- "$1" many "$2" >"$2/out" &
        until grep -q ready "$2/out"; do sleep 0.01; done
        "$0" checkpoint inside --kill || exit
        wait
        touch "$2/go"
        "$0" restore inside && grep ok "$2/out"
    "#;
    if !kernel::is_root() || kernel::which("unshare").is_none() {
        return skipped("needs root and unshare");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let directory = scratch.directory("job");
    let target = Target::new("threads", "many", Build::Dynamic).expect("cc");
    let mut command = scratch.stillpoint().command(&["--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["sh", "-c", script]).args([binary(), &target.program, &directory]);
    let output = Stillpoint::wait(alone_like(&command, Path::new("unshare")), scratch.path()).ok();
    assert!(output.stdout.contains("ok"), "{output}");
}

#[test]
fn a_process_id_that_is_taken() {
    if !kernel::is_root() {
        return skipped("needs a private pid namespace");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let running = Target::new("threads", "many", Build::Dynamic)
        .expect("cc")
        .start(&scratch.directory("job"), scratch.path());
    stillpoint.checkpoint(running.pid, "job", &[]);
    // The original still runs: its ids are taken.
    let output = stillpoint.run(&["restore", "job", "--pid", "same", "--detach"]);
    assert!(matches!(output.code(), 1 | 3), "{output}");
    let code = output.code();
    output.fails(code, &[&running.pid.to_string()]);
    // The files of both would be the same: let the first end, in peace, and restore while its id is taken by another.
    let original = running.pid;
    let directory = running.directory().to_owned();
    stillpoint.checkpoint(original, "job", &["--kill"]);
    let mut running = running;
    running.reap();
    let Some(blocker) = occupy(original) else { return skipped("could not occupy a process id") };
    let output = stillpoint.run(&["restore", "job", "--detach", "--json"]).ok();
    let json = output.json();
    let outside = json["pid"].as_u64().expect("pid") as u32;
    assert_ne!(outside, original);
    assert!(
        format!("{json}{}", output.stderr).contains("namespace")
            || json["private_pid"].as_u64() == Some(original.into()),
        "the user is told: {output}"
    );
    let inside = kernel::status(outside, "NSpid").unwrap_or_default();
    assert!(
        inside.split_whitespace().last() == Some(&original.to_string()),
        "inside it is {original}: {inside}"
    );
    Running::restored(outside, &directory).finish("in a pid namespace of its own");
    kernel::kill(blocker, kernel::SIGKILL);
}

/// Makes another process have this id.
fn occupy(pid: u32) -> Option<u32> {
    for _ in 0..100 {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
        let child = alone("sleep").arg("100").stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        if child.id() == pid {
            return Some(pid);
        }
        kernel::kill(child.id(), kernel::SIGKILL);
        let _ = child.wait_with_output();
    }
    None
}

#[test]
fn doctor_and_help() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let doctor = stillpoint.run(&["doctor"]);
    assert!(!doctor.stdout.trim().is_empty(), "{doctor}");
    stillpoint.run(&["doctor", "--json"]).json();
    for arguments in [&["--help"][..], &["--version"], &["checkpoint", "--help"], &["restore", "--help"]] {
        stillpoint.run(arguments).ok();
    }
}

/// Without rights, `doctor` says what is missing instead of failing somewhere later.
#[test]
fn doctor_without_rights() {
    if !kernel::is_root() || kernel::which("setpriv").is_none() {
        return skipped("needs to be root to become somebody else, and setpriv");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let copy = scratch.path().join("stillpoint");
    fs::copy(stillpoint_tests::stillpoint::binary(), &copy).expect("copy");
    let done = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["doctor", "--store", "/tmp"])
        .current_dir("/")
        .output()
        .expect("setpriv");
    let said = String::from_utf8_lossy(&done.stdout).to_lowercase();
    assert!(said.contains("cap_") || said.contains("privilege"), "{said}");
}

/// Whether files can be given capabilities here, and users without any be had; otherwise says what is skipped.
fn can_set_capabilities() -> bool {
    let can = kernel::is_root() && ["setpriv", "setcap"].iter().all(|tool| kernel::which(tool).is_some());
    if !can {
        skipped("needs to be root to become somebody else, setpriv, and setcap (Debian package libcap2-bin)");
    }
    can
}

/// A program is not killed for a checkpoint from which whoever asks could not have it back.
#[test]
fn what_its_user_may_not_restore_is_not_killed() {
    if !kernel::is_root() || kernel::which("setpriv").is_none() {
        return skipped("needs to be root to become somebody else, and setpriv");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let mut program = alone("setpriv");
    program.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "1000"]).current_dir("/");
    program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut program = program.spawn().expect("setpriv");
    let pid = program.id().to_string();
    let is_sleeping =
        || fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"sleep\n").then_some(());
    wait_for("sleep", PATIENCE, is_sleeping);
    stillpoint.run(&["checkpoint", &pid, "--check"]).ok();
    assert!(stillpoint.run(&["checkpoint", &pid, "--check", "--json"]).json()["ok"] == true);
    stillpoint.run(&["ls"]).ok();
    assert!(!scratch.path().join("store/jobs").exists(), "something was written");
    stillpoint.run_as_nobody(&["checkpoint", &pid, "--check"]).ok();
    assert!(kernel::alive(program.id()));
    stillpoint.run_as_nobody(&["ls"]).ok();
    stillpoint.run_as_nobody(&["checkpoint", &pid, "--name", "own"]).ok();
    let theirs = scratch.path().join("nobodys/store");
    let theirs = theirs.to_str().expect("a path");
    stillpoint.run(&["checkpoint", &pid, "--name", "own", "--store", theirs]).ok();
    let verify = stillpoint.run_as_nobody(&["verify", "own"]);
    let said = [&*verify.stdout, &verify.stderr].concat();
    assert!(verify.code() == 1 && said.contains("belongs to user 0"), "{verify}");
    assert!(said.contains("own@2  not checked") && !said.contains("DAMAGED"), "{verify}");
    program.kill().and_then(|()| program.wait()).expect("killed");
}

/// Of a tree in which there are processes of ours, those are told by the job that they are at work on, whatever they hold.
#[test]
fn processes_of_ours_in_a_tree_are_told_by_their_job() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let own: [&[&str]; 2] = [&["run", "--name", "followed", "--every", "200ms"], &["run", "--name", "plain"]];
    for arguments in own {
        let job = arguments[2];
        let run = stillpoint.command(&[arguments, &["--", "sleep", "1000"]].concat());
        let mut script = alone("sh");
        script.args(["-c", "\"$@\" & wait; true", "sh"]).arg(binary()).args(run.get_args());
        script.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
        script.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut script = script.spawn().expect("sh");
        known(&stillpoint, job);
        let pid = script.id().to_string();
        for kill in [&[][..], &["--kill"]] {
            let checkpoint = [&["checkpoint", &pid, "--name", "tree"], kill].concat();
            let hint = format!("stillpoint checkpoint {job}");
            let refused = stillpoint.run(&checkpoint).fails(3, &[&hint]);
            right!(!refused.stderr.contains("the program handles page faults itself"), "{refused}");
        }
        let ended = stillpoint.run(&["checkpoint", job, "--kill"]).ok();
        right!(script.wait().expect("sh").success(), "{ended}");
    }
}

/// What `setcap` gives the command, its user has of it, and no more: the kernel hides such a process from itself, too.
#[test]
fn with_capabilities_of_its_own_the_command_serves_those_who_are_not_root() {
    const CAPABILITIES: &str = "cap_checkpoint_restore,cap_sys_ptrace,cap_sys_admin+ep";
    if !can_set_capabilities() || undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let run = |arguments: &[&str]| stillpoint.run_as_nobody_with(Some(CAPABILITIES), arguments).ok();
    run(&["doctor"]);
    let as_nobody = |program: &[&str]| {
        let mut command = alone("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).args(program).current_dir("/");
        command.env(MARK, scratch.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut program = as_nobody(&["sleep", "1000"]).spawn().expect("setpriv");
    let pid = program.id().to_string();
    let is_sleeping =
        || fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"sleep\n").then_some(());
    wait_for("sleep", PATIENCE, is_sleeping);
    run(&["checkpoint", &pid, "--name", "own"]);
    run(&["snapshot", &pid]);
    run(&["rollback", &pid]);
    run(&["forget", &pid]);
    let fork = run(&["fork", &pid, "--count", "2"]);
    right_eq!(fork.stdout.matches("runs as pid").count(), 2, "{fork}");
    run(&["checkpoint", &pid, "--name", "own", "--kill"]);
    program.wait().expect("killed");
    run(&["restore", "own", "--detach"]);
    is_sleeping().expect("it sleeps again");
    // What it is now is its user's; what has brought it back is not, though that runs as the same user.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let supervisor =
        stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)).expect("its parent");
    let may_look =
        |at: &str| as_nobody(&["cat", &format!("/proc/{at}/maps")]).status().expect("cat").success();
    right!(may_look(&pid) && !may_look(supervisor), "process {supervisor} has made {pid}");
    for name in ["mem", "environ"] {
        right!(
            !as_nobody(&["head", "-c", "1", &format!("/proc/{supervisor}/{name}")])
                .status()
                .expect("head")
                .success()
        );
    }
}

/// Starts a program, and waits until it calls itself `prepared`.
fn prepared(program: &mut Command) -> Child {
    let program = program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let program = program.expect("a program");
    let comm = format!("/proc/{}/comm", program.id());
    wait_for("the program", PATIENCE, || {
        fs::read(&comm).is_ok_and(|name| name == b"prepared\n").then_some(())
    });
    program
}

/// What a program has from when it had more rights is no reason to kill it: files, ports and sockets that its user cannot have again.
#[test]
fn what_its_user_could_not_make_again_is_not_killed() {
    const RIGHT: Option<&str> = Some("cap_checkpoint_restore+ep");
    // One that everybody may run.
    let Some(python) = installed(&["/usr/bin/python3"], "python3") else { return };
    if !can_set_capabilities() || undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let begin = |more: &str| {
        let directory = scratch.directory("target");
        fs::write(directory.join("private"), "x").expect("a file");
        fs::set_permissions(directory.join("private"), fs::Permissions::from_mode(0o600)).expect("a file");
        fs::create_dir_all(directory.join("narrow")).expect("a folder");
        let text = format!(
            "import ctypes, os, socket, time\n{more}\nos.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n\
             assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0\nopen('/proc/self/comm', 'w').write('prepared')\nwhile True: time.sleep(1)\n"
        );
        let mut program = alone(&python);
        prepared(program.args(["-c", &text]).current_dir(&directory))
    };
    let cases = [
        ("f = open('private')", "private: we may not open it"),
        ("f = open('private', 'a')", "private: we may not open it"),
        ("s = socket.socket(); s.bind(('127.0.0.3', 7)); s.listen()", "127.0.0.3:7: we are not permitted"),
        ("s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "not permitted"),
        ("s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 7)", "not permitted"),
        ("s = socket.socket(socket.AF_UNIX); s.bind('narrow/name')", "narrow/name: we may not make"),
        ("import fcntl; f = open('/etc/passwd'); fcntl.fcntl(f, fcntl.F_SETFL, os.O_NOATIME)", "CAP_FOWNER"),
        ("m = os.memfd_create('mine')", "memfd mine cannot be made"),
        ("a, b = socket.socketpair()", "tells of user 0"),
        (
            "s = socket.socket(socket.AF_UNIX); s.bind('\\0root' + str(os.getpid())); s.listen()",
            "tells of user 0",
        ),
        (
            "os.setgroups([]); os.setegid(65534); os.seteuid(65534); a, b = socket.socketpair(type=socket.SOCK_DGRAM)\n\
             os.seteuid(0); os.setegid(0); b.setsockopt(socket.SOL_SOCKET, 16, 1); a.send(b'x')",
            "user 0, group 0, and sending it again needs",
        ),
    ];
    for (more, why) in cases {
        let mut program = begin(more);
        let pid = program.id().to_string();
        let kill = ["checkpoint", &pid, "--name", "own", "--kill"];
        stillpoint.run_as_nobody_with(RIGHT, &kill).fails(3, &[why]);
        stillpoint.run_as_nobody_with(RIGHT, &["checkpoint", &pid, "--check"]).fails(3, &[why]);
        right!(kernel::alive(program.id()), "{more}");
        // Who may all that is not kept from it.
        stillpoint.run(&["checkpoint", &pid, "--check"]).ok();
        program.kill().and_then(|()| program.wait()).expect("killed");
    }
    // Who was at the other end of a connection that is over is told by us as well as not.
    let more = "f = open('/etc/passwd'); s = socket.socket(); s.bind(('127.0.0.3', 0)); s.listen()\na, b = socket.socketpair(); b.close()";
    let mut program = begin(more);
    let pid = program.id().to_string();
    stillpoint.run_as_nobody_with(RIGHT, &["checkpoint", &pid, "--name", "own", "--kill"]).ok();
    program.wait().expect("killed");
    let restored = stillpoint.run_as_nobody_with(RIGHT, &["restore", "own", "--detach"]).ok();
    right!(restored.stderr.contains("tells of user 0"), "{restored}");
    right!(kernel::alive(program.id()));
    kernel::kill(program.id(), kernel::SIGKILL);
    kernel::wait_gone(program.id(), PATIENCE);
}

/// A program with more of something than whoever looks at it may have descriptors by default: the privileged may have more.
#[test]
fn more_shared_memory_than_descriptors() {
    let Some(python) = installed(&["/usr/bin/python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let text = "import mmap, time\nall = [mmap.mmap(-1, 4096) for n in range(700)]\nfor n, m in enumerate(all): m[0] = n % 251\n\
                open('/proc/self/comm', 'w').write('prepared')\nwhile True: time.sleep(1)\n";
    let mut program = alone(&python);
    let mut program = prepared(program.args(["-c", text]).env(MARK, scratch.path()));
    let pid = program.id();
    let limited = |arguments: &[&str]| {
        let inner = stillpoint.command(arguments);
        let mut command = Command::new("sh");
        command
            .args(["-c", "ulimit -n 400; exec \"$@\"", "sh"])
            .arg(inner.get_program())
            .args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.stdin(Stdio::null()).output().expect("sh")
    };
    let taken = limited(&["checkpoint", &pid.to_string(), "--name", "job", "--kill"]);
    // Where there are namespaces around this, a capability does not tell.
    let raise =
        Command::new("sh").args(["-c", "ulimit -n 400; ulimit -n 500"]).stderr(Stdio::null()).status();
    if !raise.is_ok_and(|status| status.success()) {
        // It may not, and says so; the program runs on.
        let said = String::from_utf8_lossy(&taken.stderr);
        assert!(taken.status.code() == Some(1) && said.contains("than the 400 that"), "{taken:?}");
        right!(kernel::alive(pid));
        program.kill().and_then(|()| program.wait()).expect("killed");
        return skipped("only with CAP_SYS_RESOURCE may limits be raised");
    }
    assert!(taken.status.success(), "{taken:?}");
    program.wait().expect("killed");
    let restored = limited(&["restore", "job", "--detach"]);
    assert!(restored.status.success(), "{restored:?}");
    let limit = fs::read_to_string(format!("/proc/{pid}/limits")).expect("limits");
    let own = fs::read_to_string("/proc/self/limits").expect("limits");
    let files = |limits: &str| limits.lines().find(|l| l.starts_with("Max open files")).map(str::to_owned);
    right_eq!(files(&limit), files(&own), "its own limit");
    kernel::kill(pid, kernel::SIGKILL);
    kernel::wait_gone(pid, PATIENCE);
}

/// Where the command line and the environment of ours were there is room for a stack to grow, as one does for whoever reads there.
#[test]
fn whoever_looks_at_a_program_that_is_being_restored_changes_nothing() {
    if kernel::which("setarch").is_none() {
        return skipped("setarch is not installed (Debian package util-linux)");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("target");
    // Both at the same places, and ours with an environment that reaches further down than the program's stack.
    let mut command = alone("setarch");
    command.args(["-R", &target("large"), "large"]).arg(&directory).current_dir(&directory);
    command.env(stillpoint_tests::scratch::MARK, scratch.path()).stdin(Stdio::null());
    command.stdout(fs::File::create(directory.join("out")).expect("a file")).stderr(Stdio::null());
    let mut running = Running::new(command.spawn().expect("setarch"), &directory);
    running.await_ready();
    let pid = running.pid;
    let before = Facts::settled(pid);
    stillpoint.checkpoint(pid, "job", &["--kill"]);
    running.reap();
    let restore =
        stillpoint.command(&["restore", "job", "--detach", "--eager", "--limit-bandwidth", "40MB/s"]);
    let mut command = Command::new("setarch");
    command.arg("-R").arg(binary()).args(restore.get_args()).stdin(Stdio::null());
    command.envs(restore.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.envs((0..15).map(|n| (format!("FILLED{n}"), "x".repeat(100_000))));
    let near = scratch.path().to_owned();
    let restored = std::thread::spawn(move || Stillpoint::wait(command, &near));
    while !restored.is_finished() {
        for name in ["cmdline", "environ"] {
            let _ = fs::read(format!("/proc/{pid}/{name}"));
        }
    }
    restored.join().expect("restore").ok();
    let running = Running::restored(pid, &directory);
    right_eq!(before.differences(&Facts::settled(pid)), "");
    running.finish("after restore");
}
