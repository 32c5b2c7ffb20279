//! Users without any privilege: what they can do, and what is refused. As root, a test does itself once more as such a user.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_tests::counter::{COUNTER, Counter};
use stillpoint_tests::programs::installed;
use stillpoint_tests::scratch::test_name;
use stillpoint_tests::{
    Scratch, Stillpoint, kernel, right, right_eq, skipped, tier, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(60);
const NOBODY: u32 = 65534;
/// What is run in a mount namespace of its own: where the user may not enter a directory around the workspace, something that he may enter
/// lies there in its place, with the workspace in it.
const AS_NOBODY: &str = r#"
    if [ -n "$2" ]; then
        exec 9<"$1"
        mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$1" && mount --no-canonicalize --bind /proc/self/fd/9 "$1" || exit 111
        exec 9<&-
    fi
    shift 2
    exec setpriv --reuid=65534 --regid=65534 --groups=7,65534 --inh-caps=-all env -u STILLPOINT_RUN "$@"
"#;

/// Scenarios that an ordinary user's programs go through as those of root do; each of these lines has its turn with one of its own.
const FEATURES: [&str; 8] = [
    "attributes::clocks attributes::directories attributes::identity attributes::limits attributes::no_new_privileges attributes::renamed",
    "descriptors::deleted descriptors::epolls descriptors::eventfds descriptors::inotifys descriptors::listening_tcp4 descriptors::locks \
     descriptors::pipes descriptors::stream_pair descriptors::signalfds descriptors::duplicates",
    "memory::shared_anonymous memory::shared_file memory::memfd_closed memory::sparse memory::guards memory::private_file",
    "sharers::memory sharers::threaded sharers::brothers sharers::actions sharers::one_stack",
    "trees::shared_memory trees::pair trees::pipes trees::sessions trees::handles trees::objects trees::locks trees::orphans",
    "trees::many trees::groups trees::leaderless trees::socket_pairs trees::told_stops trees::shared_offset trees::waits",
    "threads::many threads::locks threads::robust_mutex threads::rseq signals::masks signals::queued_realtime_order timers::posix_timers",
    "unix::pending unix::in_flight unix::peers unix::clients waits::poll_timeout waits::futex_relative waits::epoll_endless",
];

/// Whether this is root, who has done a test as an ordinary user instead. (Names are short: a socket's has room for 108 bytes.)
fn done_as_nobody(tests: &[String]) -> bool {
    if !kernel::is_root() {
        return false;
    }
    if undisturbed_only() {
        return true;
    }
    if ["setpriv", "unshare", "nsenter"].iter().any(|tool| kernel::which(tool).is_none()) {
        skipped("setpriv, unshare or nsenter is missing (Debian package util-linux)");
        return true;
    }
    let scratch = Scratch::new();
    let home = scratch.directory("h");
    std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).expect("chown");
    let program = std::env::current_exe().expect("this program");
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    if !program.starts_with(workspace) {
        skipped("what is built lies elsewhere");
        return true;
    }
    let is_closed = |folder: &&Path| fs::metadata(folder).is_ok_and(|m| m.mode() & 1 == 0);
    let closed: Vec<&Path> = workspace.ancestors().skip(1).filter(is_closed).collect();
    for test in tests {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", AS_NOBODY, "sh"]).arg(workspace);
        command.arg(closed.last().copied().unwrap_or(Path::new("")));
        command.arg(&program).args(["--exact", test, "--nocapture"]);
        command.env("TMPDIR", &home).env("HOME", &home).stdin(Stdio::null()).process_group(0);
        command.current_dir(workspace.join("tests"));
        let output = Stillpoint::wait(command, scratch.path());
        let said = [&*output.stdout, &output.stderr].concat();
        let wrong = said.lines().find(|line| line.starts_with("WRONG"));
        right!(wrong.is_none(), "{test}: {}", said);
        if said.contains("skipped: ") {
            skipped(&format!("{test}, as an ordinary user: {said}"));
        }
        assert!(output.status.success() && said.contains("1 passed"), "{test}, as an ordinary user: {said}");
    }
    true
}

/// What has its turn of some lines of features.
fn turns(lines: &[&str]) -> Vec<String> {
    let turn = |line: &&str| {
        let all: Vec<&str> = line.split_whitespace().collect();
        tier::turn(line, &all).into_iter().map(|name| format!("features::{name}")).collect::<Vec<_>>()
    };
    lines.iter().flat_map(turn).collect()
}

#[test]
fn processes() {
    if !done_as_nobody(&turns(&FEATURES[..4])) {
        skipped("the scenarios are tests of their own");
    }
}

#[test]
fn trees() {
    if !done_as_nobody(&turns(&FEATURES[4..])) {
        skipped("the scenarios are tests of their own");
    }
}

/// Processes with shared memory and a lock in it, and a thread, which tell of themselves.
const PROGRAM: &str = r#"
import multiprocessing, os, threading, time
def count(lock, number):
    while True:
        with lock: number.value += 1
        time.sleep(0.01)
lock, number = multiprocessing.Lock(), multiprocessing.Value('i', 0)
children = [multiprocessing.Process(target=count, args=(lock, number)) for _ in range(2)]
for child in children: child.start()
threading.Thread(target=lambda: [time.sleep(1) for _ in range(10**6)], daemon=True).start()
tids = lambda: sorted(os.listdir('/proc/self/task'))
ids = [os.getpid(), os.getppid() and 1, os.getuid(), os.getgid(), [c.pid for c in children], tids()]
round = 0
while not os.path.exists('end'):
    round += 1
    now = [os.getpid(), os.getppid() and 1, os.getuid(), os.getgid(), [c.pid for c in children], tids()]
    caps = [l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapPrm', 'CapEff', 'CapAmb'))]
    with open('told.new', 'w') as told:
        print(round, number.value, 'same' if now == ids else now, set(caps), all(c.is_alive() for c in children), file=told)
    os.rename('told.new', 'told')
    time.sleep(0.02)
for child in children: child.terminate()
for child in children: child.join()
os._exit(7)
"#;

/// Waits until the program has told something new; the round, and how far its children have counted.
fn told(directory: &Path, after: (u64, u64)) -> (u64, u64) {
    let line = wait_for("the program to go on", PATIENCE, || {
        let line = fs::read_to_string(directory.join("told")).ok()?;
        let mut numbers = line.split(' ').map_while(|word| word.parse::<u64>().ok());
        let (round, count) = (numbers.next()?, numbers.next()?);
        (round > after.0 && count > after.1).then_some((round, count, line))
    });
    right!(line.2.ends_with(" same {'0000000000000000'} True\n"), "{}", line.2);
    (line.0, line.1)
}

/// A program of processes and threads goes through all that there is: its next life is its last one's, with nothing that its user has not.
#[test]
fn a_program_goes_through_all_that_there_is() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    let Some(python) = installed(&["/usr/bin/python3"], "python3") else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("program"));
    stillpoint.run(&["doctor"]).ok();
    let run = |arguments: &[&str]| {
        let mut command = stillpoint.command(arguments);
        command.current_dir(&directory).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("stillpoint")
    };
    let python = python.to_str().expect("a path");
    let mut supervisor = run(&["run", "--name", "job", "--", python, "-c", PROGRAM]);
    let mut so_far = told(&directory, (0, 0));
    for life in 0..3 {
        stillpoint.run(&["checkpoint", "job"]).ok();
        told(&directory, so_far);
        stillpoint.run(&["checkpoint", "job", "--kill"]).ok();
        let _ = supervisor.wait();
        // It goes on behind what it told last.
        let last = fs::read_to_string(directory.join("told")).expect("told");
        let numbers: Vec<u64> = last.split(' ').map_while(|word| word.parse().ok()).collect();
        supervisor = run(&["restore", "job"]);
        let now = told(&directory, (numbers[0], numbers[1]));
        right!(now.0 < numbers[0] + 1000, "life {life}: {now:?} after {numbers:?}");
        so_far = now;
    }
    // Twins have what it has, by themselves; and so have clones of a checkpoint.
    let twins = wait_for("twins", PATIENCE, || {
        let output = stillpoint.run(&["fork", "job", "--isolated", "--count", "2", "--json"]);
        // It had the file open that it has renamed since.
        let passes = output.status.code() == Some(3) && output.stderr.contains("told.new: is gone");
        (!passes).then(|| output.ok().json())
    });
    right_eq!(twins["twins"].as_array().map(Vec::len), Some(2));
    stillpoint.run(&["fork", "job"]).fails(3, &["--isolated"]);
    for twin in twins["twins"].as_array().expect("twins") {
        let pid = twin["pid"].as_u64().expect("pid") as u32;
        right_eq!(kernel::id_within(pid).map(u64::from), twin["private_pid"].as_u64());
        kernel::kill(pid, kernel::SIGKILL);
    }
    so_far = told(&directory, so_far);
    // A crash is seen from outside, and so is the end.
    fs::write(directory.join("end"), "").expect("a file");
    right_eq!(supervisor.wait().expect("restore").code(), Some(7), "{so_far:?}");
}

/// Of a program that was restored, threads are found again at a rollback as whoever looks from outside calls them.
#[test]
fn a_restored_program_is_rolled_back() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    let Some(python) = installed(&["/usr/bin/python3"], "python3") else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("program"));
    let mut run =
        stillpoint.command(&["run", "--detach", "--name", "job", "--", python.to_str().expect("a path")]);
    run.args(["-c", COUNTER]).current_dir(&directory).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(run.status().expect("run").success());
    let counter = Counter::of(&directory);
    counter.goes_on();
    stillpoint.run(&["checkpoint", "job", "--kill"]).ok();
    let pid = stillpoint.restore_detached("job", &[]);
    right_eq!(kernel::status(pid, "Groups"), kernel::status(std::process::id(), "Groups"));
    counter.goes_on();
    stillpoint.run(&["snapshot", "job"]).ok();
    let tids = kernel::threads(pid);
    counter.sees();
    stillpoint.run(&["rollback", "job"]).ok();
    right!(!counter.goes_on(), "it knows after its rollback what it has seen since the snapshot");
    right_eq!(kernel::threads(pid), tids, "none was made anew");
    counter.goes_on();
    kernel::kill(pid, kernel::SIGKILL);
    kernel::wait_gone(pid, PATIENCE);
}

/// Where nobody may have a user namespace, no program is killed that could not be had back, and a restore says what is missing.
#[test]
fn without_user_namespaces_it_is_refused() {
    if !kernel::is_root() || kernel::which("setpriv").is_none() {
        return skipped("needs to be root, and setpriv");
    }
    if undisturbed_only() {
        return;
    }
    // Root of a namespace in which there may be no more of them, and without privileges there.
    const NO_MORE: &str = "echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all \"$@\"";
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let without = |arguments: &[&str]| {
        let command = stillpoint.command(arguments);
        let mut within = Command::new("unshare");
        within.args(["--user", "--map-root-user", "sh", "-c", NO_MORE, "sh"]).arg(command.get_program());
        within.args(command.get_args()).stdin(Stdio::null());
        within.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Stillpoint::wait(within, scratch.path())
    };
    if without(&["ls"]).status.code() != Some(0) {
        return skipped("not permitted to make user namespaces");
    }
    let doctor = without(&["doctor"]);
    right_eq!(doctor.status.code(), Some(1));
    right!(doctor.stdout.contains("user.max_user_namespaces"), "{doctor}");
    let mut program = Command::new("unshare");
    let script = format!("{NO_MORE}; exit 1");
    let commands: PathBuf = stillpoint.command(&["ls"]).get_program().into();
    let inner =
        "sleep 1000 & \"$1\" checkpoint $! --name own --kill; echo $?; kill -0 $! && echo alive; kill $!";
    program
        .args(["--user", "--map-root-user", "sh", "-c", &script, "sh", "sh", "-c", inner, "sh"])
        .arg(commands);
    let command = stillpoint.command(&["ls"]);
    program.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = Stillpoint::wait(program, scratch.path());
    right!(output.stdout.ends_with("3\nalive\n"), "{output}");
    right!(output.stderr.contains("in a user namespace of his own, which is not to be had"), "{output}");
}

/// A job of a shell that was restored stops and goes on as any other, although process 1 of its namespace cannot stop with it.
#[test]
fn a_restored_program_stops_with_its_shell() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("program"));
    let text = "n=0; while [ ! -e end ]; do n=$((n + 1)); echo $n >n; sleep 0.02; done; exit 5";
    let run = |arguments: &[&str]| {
        let mut command = stillpoint.command(arguments);
        command.current_dir(&directory).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        command.spawn().expect("stillpoint")
    };
    let number = || fs::read_to_string(directory.join("n")).ok()?.trim().parse::<u64>().ok();
    let passes = |least| wait_for("it to count", PATIENCE, || number().filter(|n| *n > least));
    let mut supervisor = run(&["run", "--name", "job", "--", "sh", "-c", text]);
    passes(2);
    stillpoint.run(&["checkpoint", "job", "--kill"]).ok();
    let _ = supervisor.wait();
    let mut supervisor = run(&["restore", "job"]);
    let mut so_far = passes(number().unwrap_or_default());
    let pid =
        stillpoint.run(&["ls", "--json"]).ok().json()[0]["running"]["pid"].as_u64().expect("it runs") as u32;
    for _ in 0..2 {
        kernel::kill(supervisor.id(), kernel::SIGTSTP);
        for who in [pid, supervisor.id()] {
            wait_for("a stop", PATIENCE, || (kernel::state(who) == Some('T')).then_some(()));
        }
        kernel::kill(supervisor.id(), kernel::SIGCONT);
        so_far = passes(number().unwrap_or(so_far));
    }
    fs::write(directory.join("end"), "").expect("a file");
    right_eq!(supervisor.wait().expect("restore").code(), Some(5));
}

/// What only the privileged could capture as it is is refused, and nothing is made of it on the way.
#[test]
fn what_only_the_privileged_can_look_at_is_refused() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    let Some(python) = installed(&["/usr/bin/python3"], "python3") else { return };
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("program"));
    const LIBC: &str = "import ctypes, mmap, os, time\n\
                        libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n\
                        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]\n";
    let cases = [
        ("m = mmap.mmap(-1, 256 << 20); m[0] = 1\n", "may be empty"),
        (
            "f = os.memfd_create('both'); os.ftruncate(f, 4096)\n\
             shared = libc.mmap(None, 4096, 3, 1, f, 0); own = libc.mmap(None, 4096, 3, 2, f, 0); os.close(f)\n\
             ctypes.memset(own, 1, 8)\n",
            "a private mapping",
        ),
        (
            "f = os.memfd_create('short'); os.ftruncate(f, 4096)\n\
             both = libc.mmap(None, 8192, 3, 1, f, 0); os.close(f)\n",
            "beyond its end",
        ),
    ];
    for (text, why) in cases {
        let text = format!("{LIBC}{text}open('ready', 'w').close()\ntime.sleep(1000)\n");
        let mut program = Command::new(&python);
        program.args(["-c", &text]).current_dir(&directory).stdin(Stdio::null()).stdout(Stdio::null());
        program.env(stillpoint_tests::scratch::MARK, scratch.path()).stderr(Stdio::null());
        let mut program = program.spawn().expect("python");
        wait_for("the program", PATIENCE, || fs::remove_file(directory.join("ready")).ok());
        let shared = || kernel::status(program.id(), "RssShmem");
        let before = shared();
        for kill in [&["--kill"][..], &[]] {
            let pid = program.id().to_string();
            stillpoint.run(&[&["checkpoint", &pid, "--name", "own"], kill].concat()).fails(3, &[why]);
        }
        right!(kernel::alive(program.id()), "{why}");
        // One page, of the last of its mapping.
        let kilobytes = |text: Option<String>| {
            text.and_then(|text| text.split(' ').next()?.parse::<u64>().ok()).unwrap_or_default()
        };
        let (before, after) = (kilobytes(before), kilobytes(shared()));
        right!(after <= before + 4, "{why}: {after} kB of shared memory, and {before} before");
        let _ = program.kill();
        let _ = program.wait();
    }
}

/// A job in the store that is another user's (made by `sudo`, say) is told of, and keeps nobody from his own.
#[test]
fn jobs_of_others_are_left_aside() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    for job in ["closed", "own"] {
        let mut run = stillpoint.command(&["run", "--detach", "--name", job, "--", "sleep", "1000"]);
        run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        assert!(run.status().expect("run").success());
    }
    stillpoint.run(&["checkpoint", "closed"]).ok();
    let own =
        stillpoint.run(&["ls", "--json"]).ok().json()[1]["running"]["pid"].as_u64().expect("it runs") as u32;
    let folder = stillpoint.store().join("jobs/closed");
    let open = fs::metadata(&folder).expect("the folder").permissions();
    fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o000)).expect("chmod");
    let list = stillpoint.run(&["ls"]).ok();
    right!(list.stdout.contains("own") && !list.stdout.contains("closed"), "{list}");
    right!(list.stderr.contains("closed: is another user's"), "{list}");
    stillpoint.run(&["snapshot", &own.to_string()]).ok();
    stillpoint.run(&["checkpoint", &own.to_string()]).ok();
    stillpoint.run(&["resume", "--all"]).ok();
    let verified = stillpoint.run(&["verify"]);
    right_eq!(verified.status.code(), Some(1), "what cannot be read is not known to be whole");
    right!(
        verified.stdout.contains("own@1  ok") && verified.stderr.contains("closed: not checked"),
        "{verified}"
    );
    stillpoint.run(&["checkpoint", "closed"]).fails(1, &["Permission denied"]);
    kernel::kill(own, kernel::SIGKILL);
    kernel::wait_gone(own, PATIENCE);
    // Its supervisor may still be writing that down.
    wait_for("the job to be removed", PATIENCE, || {
        let output = stillpoint.run(&["rm", "own"]);
        (!output.stderr.contains("already running")).then(|| output.ok())
    });
    fs::set_permissions(&folder, open).expect("chmod");
    let list = stillpoint.run(&["ls", "--json"]).ok().json();
    let left = list[0]["running"]["pid"].as_u64().expect("it runs") as u32;
    kernel::kill(left, kernel::SIGKILL);
    kernel::wait_gone(left, PATIENCE);
}

/// What only writes are noted for needs no privileges, and a limit that will not be kept is told of at once.
#[test]
fn page_faults_are_told_of_as_they_are() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    if fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|told| told.trim() == "1") {
        return skipped("every user may let memory wait here");
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let doctor = stillpoint.run(&["doctor"]).ok();
    let line = |name: &str| doctor.stdout.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    right!(line("userfaultfd, noting writes").contains(" ok "), "{doctor}");
    right!(line("userfaultfd, holding writes").contains("vm.unprivileged_userfaultfd"), "{doctor}");
    let limited = stillpoint.run(&["run", "--memory-limit", "64MiB", "--", "true"]).ok();
    right!(limited.stderr.contains("will not be kept within the limit"), "{limited}");
}
