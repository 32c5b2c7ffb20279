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

/// The same of connections, within the program and with clients outside.
const CONNECTIONS: [&str; 4] = [
    "kept::pair4 kept::pair6 kept::pair_mapped kept::two_families kept::no_door kept::half_closed kept::other_end_closed \
     kept::with_options kept::corked kept::watched kept::busy kept::blocked kept::many",
    "made_anew::pair4 made_anew::pair6 made_anew::pair_mapped made_anew::two_families made_anew::no_door made_anew::corked",
    "made_anew::half_closed made_anew::other_end_closed made_anew::with_options made_anew::watched made_anew::busy \
     made_anew::blocked made_anew::many",
    "connections_that_ended_with_the_program_are_over clients_keep_their_connections_over_a_restore redis_keeps_its_client \
     clients_come_back_to_a_server_whose_connections_were_closed a_connection_that_waits_to_be_accepted_is_kept \
     memcached_keeps_its_client",
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

/// What has its turn of some lines of tests in a file.
fn turns(file: &str, lines: &[&str]) -> Vec<String> {
    let turn = |line: &&str| {
        let all: Vec<&str> = line.split_whitespace().collect();
        tier::turn(line, &all).into_iter().map(|name| format!("{file}::{name}")).collect::<Vec<_>>()
    };
    lines.iter().flat_map(turn).collect()
}

#[test]
fn processes() {
    if !done_as_nobody(&turns("features", &FEATURES[..4])) {
        skipped("the scenarios are tests of their own");
    }
}

#[test]
fn trees() {
    if !done_as_nobody(&turns("features", &FEATURES[4..])) {
        skipped("the scenarios are tests of their own");
    }
}

#[test]
fn connections() {
    if !done_as_nobody(&turns("connections", &CONNECTIONS)) {
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
about = ['/proc/self/stat', f'/proc/self/task/{os.getpid()}/stat', f'/proc/{children[1].pid}/stat']
about = [os.open(file, os.O_RDONLY) for file in about]
tids = lambda: sorted(os.listdir('/proc/self/task'))
seen = lambda: [os.pread(file, 99, 0).split()[0] for file in about]
ids = [os.getpid(), os.getppid() and 1, os.getuid(), os.getgid(), [c.pid for c in children], tids(), seen()]
round = 0
while not os.path.exists('end'):
    if os.path.exists('quiet'):
        open('is_quiet', 'w').close(); time.sleep(0.02); continue
    round += 1
    now = [os.getpid(), os.getppid() and 1, os.getuid(), os.getgid(), [c.pid for c in children], tids(), seen()]
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
    // Twins have what it has, by themselves; and so have clones of a checkpoint. They would write to the same file as it does.
    let quiet = directory.join("quiet");
    fs::write(&quiet, "").expect("a file");
    wait_for("it to be quiet", PATIENCE, || directory.join("is_quiet").exists().then_some(()));
    let twins = stillpoint.run(&["fork", "job", "--count", "2", "--json"]).ok().json();
    right_eq!(twins["twins"].as_array().map(Vec::len), Some(2));
    assert!(twins["twins"][0]["notes"].to_string().contains("--isolated"), "{twins}");
    for twin in twins["twins"].as_array().expect("twins") {
        let pid = twin["pid"].as_u64().expect("pid") as u32;
        right_eq!(kernel::id_within(pid).map(u64::from), twin["private_pid"].as_u64());
        kernel::kill(pid, kernel::SIGKILL);
        kernel::wait_gone(pid, PATIENCE);
    }
    fs::remove_file(&quiet).expect("the file");
    so_far = told(&directory, so_far);
    // A crash is seen from outside, and so is the end.
    fs::write(directory.join("end"), "").expect("a file");
    right_eq!(supervisor.wait().expect("restore").code(), Some(7), "{so_far:?}");
}

/// A program for Python that is a job, with a directory of its own.
struct Job {
    stillpoint: Stillpoint,
    directory: PathBuf,
    /// Where that is, as long as it is needed.
    _scratch: Scratch,
}

impl Job {
    /// Started with these options of `run`; nothing where there is no Python.
    fn start(options: &[&str], program: &str) -> Option<Self> {
        let python = installed(&["/usr/bin/python3"], "python3")?;
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("program"));
        let mut run = stillpoint.command(&["run", "--detach", "--name", "job"]);
        run.args(options).arg("--").arg(python).args(["-c", program]).current_dir(&directory);
        Stillpoint::wait(run, scratch.path()).ok();
        Some(Job { stillpoint, directory, _scratch: scratch })
    }

    /// Its process, while it has been neither killed nor restored.
    fn pid(&self) -> u32 {
        let jobs = self.stillpoint.run(&["ls", "--json"]).ok().json();
        jobs[0]["running"]["pid"].as_u64().unwrap_or_else(|| panic!("no process in {jobs}")) as u32
    }

    /// Waits for a file that it writes; gives what is in it.
    fn file(&self, name: &str) -> String {
        wait_for("the program", PATIENCE, || fs::read_to_string(self.directory.join(name)).ok())
    }
}

fn kill(pid: u32) {
    kernel::kill(pid, kernel::SIGKILL);
    kernel::wait_gone(pid, PATIENCE);
}

/// Where Yama would keep its user from it, a job begins in a user namespace, and all is done to it as to any other.
#[test]
fn a_job_in_a_user_namespace_of_its_own() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    let Some(job) = Job::start(&["--user-namespace", "always"], COUNTER) else { return };
    let (stillpoint, pid) = (&job.stillpoint, job.pid());
    let counter = Counter::of(&job.directory);
    counter.goes_on();
    let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).expect("uid_map");
    let map: Vec<u32> = map.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let user = rustix::process::geteuid().as_raw();
    right_eq!(map, [user, user, 1]);
    let has_none = |pid: u32| right_eq!(kernel::status(pid, "CapPrm").as_deref(), Some("0000000000000000"));
    has_none(pid);
    stillpoint.run(&["checkpoint", "job"]).ok();
    stillpoint.run(&["snapshot", "job"]).ok();
    counter.sees();
    stillpoint.run(&["rollback", "job"]).ok();
    right!(!counter.goes_on(), "it knows after its rollback what it has seen since the snapshot");
    stillpoint.run(&["forget", "job"]).ok();
    let twin = stillpoint.run(&["fork", "job", "--json"]).ok().json();
    let twin = twin["twins"][0]["pid"].as_u64().expect("a twin") as u32;
    kill(twin);
    counter.goes_on();
    stillpoint.run(&["checkpoint", "job", "--kill"]).ok();
    let pid = stillpoint.restore_detached("job", &[]);
    counter.goes_on();
    has_none(pid);
    kill(pid);
}

/// Of a large piece of shared memory that is hardly used, the checkpoint has what somebody has written, and the program no more than before.
#[test]
fn what_nobody_has_written_is_nowhere() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    /// The child's pages are in no page table when it has ended.
    const PROGRAM: &str = "import mmap, os, time
m = mmap.mmap(-1, 256 << 20)
m[0:5] = b'first'
if os.fork() == 0: m[100 << 20:(100 << 20) + 5] = b'child'; m[-5:] = b'last.'; os._exit(0)
os.wait()
n = 0
while True:
    n += 1; open('new', 'w').write(f'{n} {m[0:5] + m[100 << 20:(100 << 20) + 5] + m[-5:]}\\n' if os.path.exists('tell') else '')
    os.rename('new', 'n'); time.sleep(0.01)
";
    let Some(job) = Job::start(&[], PROGRAM) else { return };
    let (stillpoint, pid) = (&job.stillpoint, job.pid());
    job.file("n");
    let resident = || {
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("smaps");
        let of_it = smaps.split_once("/dev/zero (deleted)").expect("its memory").1;
        let rss = of_it.lines().find_map(|line| line.strip_prefix("Rss:")).expect("Rss");
        rss.trim_end_matches("kB").trim().parse::<u64>().expect("kB")
    };
    let before = resident();
    if kernel::status_in("/proc/meminfo", "SwapTotal") != kernel::status_in("/proc/meminfo", "SwapFree") {
        return skipped("something is swapped out");
    }
    stillpoint.run(&["checkpoint", "job"]).ok();
    let after = resident();
    right!(after < before + 64, "{before} KiB of it were there, and {after} are after a checkpoint");
    stillpoint.run(&["checkpoint", "job", "--kill"]).ok();
    let stored = stillpoint.run(&["ls", "--json"]).ok().json()[0]["stored_bytes"].as_u64().expect("bytes");
    assert!(stored < 64 << 20, "{stored} bytes are stored");
    let pid = stillpoint.restore_detached("job", &[]);
    fs::write(job.directory.join("tell"), "").expect("a file");
    let told = wait_for("the program", PATIENCE, || {
        fs::read_to_string(job.directory.join("n")).ok()?.split_once(' ').map(|(_, told)| told.to_owned())
    });
    right_eq!(told, "b'firstchildlast.'\n");
    kill(pid);
}

/// Of a removed file, pages that are not in memory are on its disk.
#[test]
fn a_removed_file_is_captured_from_its_disk() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    const PROGRAM: &str = "import mmap, os, time
at = lambda n: n.to_bytes(4, 'little') * 1024
f = os.open('removed', os.O_RDWR | os.O_CREAT, 0o600)
for n in range(2048): os.write(f, at(n))
os.fsync(f); os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)
m = mmap.mmap(f, 8 << 20); os.unlink('removed'); os.close(f)
m[0:4096] = at(7777)
open('ready', 'w').close()
while not os.path.exists('tell'): time.sleep(0.01)
same = m[0:4096] == at(7777) and all(m[n * 4096:(n + 1) * 4096] == at(n) for n in range(1, 2048))
open('told.new', 'w').write(str(same)); os.rename('told.new', 'told')
";
    let Some(job) = Job::start(&[], PROGRAM) else { return };
    job.file("ready");
    job.stillpoint.run(&["checkpoint", "job", "--kill"]).ok();
    let pid = job.stillpoint.restore_detached("job", &[]);
    fs::write(job.directory.join("tell"), "").expect("a file");
    right_eq!(job.file("told"), "True");
    kernel::wait_gone(pid, PATIENCE);
}

/// What a client has sent, and a server was far from reading, is there when their connection has ended with the server.
#[test]
fn megabytes_that_were_not_read_are_there_when_a_connection_is_over() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    const PROGRAM: &str = "import os, socket, time
door = socket.create_server(('127.0.0.1', 0))
open('port.new', 'w').write(str(door.getsockname()[1])); os.rename('port.new', 'port')
c, _ = door.accept(); done = 0
while done < 64 << 20: done += len(c.recv(1 << 20))
open('ready', 'w').write(str(done))
while not os.path.exists('tell'): time.sleep(0.01)
more, how = 0, 'ended'
try:
    while data := c.recv(1 << 20): more += len(data)
except ConnectionResetError: how = 'reset'
open('told.new', 'w').write(f'{more} {how}'); os.rename('told.new', 'told')
";
    let Some(job) = Job::start(&[], PROGRAM) else { return };
    let pid = job.pid();
    let port: u16 = job.file("port").parse().expect("a port");
    let mut client = std::net::TcpStream::connect(("127.0.0.1", port)).expect("a server");
    client.set_write_timeout(Some(Duration::from_secs(1))).expect("a limit");
    // It is read at first, so that the kernel gives it room, and then no more.
    let piece = vec![7; 1 << 20];
    while std::io::Write::write(&mut client, &piece).is_ok() {}
    job.file("ready");
    job.stillpoint.run(&["checkpoint", "job"]).ok();
    kill(pid);
    let pid = job.stillpoint.restore_detached("job", &[]);
    fs::write(job.directory.join("tell"), "").expect("a file");
    let told = job.file("told");
    let more = told.strip_suffix(" reset").and_then(|more| more.parse::<u64>().ok());
    right!(more.is_some_and(|more| more > 256 << 10), "{told}");
    kernel::wait_gone(pid, PATIENCE);
}

/// Of a program that was restored, threads are found again at a rollback as whoever looks from outside calls them.
#[test]
fn a_restored_program_is_rolled_back() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    let Some(job) = Job::start(&[], COUNTER) else { return };
    let stillpoint = &job.stillpoint;
    let counter = Counter::of(&job.directory);
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
    kill(pid);
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
    const LIBC: &str = "import ctypes, os, time\n\
                        libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n\
                        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]\n";
    let cases = [
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

/// What lies in the queue of a sender is shown to the privileged alone: nothing of it may be lost.
#[test]
fn a_connection_that_is_full_is_refused() {
    if done_as_nobody(&[test_name()]) {
        return;
    }
    const PROGRAM: &str = "import socket, time
door = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(door.getsockname()); server, _ = door.accept()
client.setblocking(False)
try:
    while True: client.send(b'x' * 65536)
except BlockingIOError: pass
open('ready', 'w').close()
time.sleep(1000)
";
    let Some(job) = Job::start(&[], PROGRAM) else { return };
    let pid = job.pid();
    job.file("ready");
    for what in [&["checkpoint", "job"][..], &["checkpoint", "job", "--kill"], &["snapshot", "job"]] {
        job.stillpoint.run(what).fails(3, &["when less is on its way"]);
    }
    right!(kernel::alive(pid), "it was killed");
    kill(pid);
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
