//! The parsers against the live `/proc` of children of ours.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::{CurrentCall, NamespaceKind, Proc, TimerNotify, VmFlags};
use stillpoint_linux::{Error, RemoteAddr};

/// A child that is killed when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn proc(&self) -> Proc {
        Proc::process(self.0.id()).unwrap()
    }

    fn lines(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.0.stdout.take().unwrap())
    }
}

/// Waits until a child has done what it was started for. (spawn() returns in the middle of exec, when the old memory is
/// gone and the new program's arguments are not yet known.)
fn asleep(proc: &Proc) {
    while proc.stat().unwrap().state != b'S' || proc.cmdline().unwrap().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Starts a C program and waits until it has printed a line.
fn c_program(source: &str) -> (Running, tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("p.c"), folder.path().join("p"));
    std::fs::write(&file, source).unwrap();
    let built = Command::new("cc").args(["-O1", "-pthread", "-o"]).arg(&program).arg(&file).status().unwrap();
    assert!(built.success());
    let mut child = Running(Command::new(&program).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    child.lines().read_line(&mut line).unwrap();
    (child, folder, line)
}

const ODD: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void *sleeper(void *x) {
    prctl(PR_SET_NAME, "a) R 1\n(b");
    for (;;) pause();
    return x;
}

int main(void) {
    char dir[] = "/tmp/odd maps\nXXXXXX", path[100];
    if (!mkdtemp(dir)) return 1;
    snprintf(path, sizeof path, "%s/gone file", dir);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (ftruncate(fd, 8192)) return 1;
    char *file = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 4096);
    unlink(path);
    rmdir(dir);
    char *anon = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(anon, 8192, MADV_DONTFORK);
    *anon = 1;
    prctl(PR_SET_NAME, ") Z (\n)");
    pthread_t t;
    pthread_create(&t, 0, sleeper, 0);
    struct sigevent ev = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1, .sigev_value.sival_ptr = (void *)0x1234};
    timer_t timer;
    timer_create(CLOCK_BOOTTIME, &ev, &timer);
    umask(027);
    signal(SIGUSR1, SIG_IGN);
    usleep(50000);
    printf("%lx %lx\n", (long)file, (long)anon);
    fflush(stdout);
    for (;;) pause();
}
"#;

#[test]
fn an_odd_program() {
    let (child, _folder, line) = c_program(ODD);
    asleep(&child.proc());
    let addresses: Vec<u64> = line.split_whitespace().map(|a| u64::from_str_radix(a, 16).unwrap()).collect();
    let proc = child.proc();

    let maps = proc.maps().unwrap();
    let file = maps.iter().find(|v| v.start == addresses[0]).unwrap();
    assert!(file.shared && file.deleted && file.offset == 4096 && file.ino != 0, "{file:?}");
    assert!(file.name.starts_with(b"/tmp/odd maps\n") && file.name.ends_with(b"/gone file"), "{file:?}");
    let smaps = proc.smaps().unwrap();
    assert!(smaps.iter().map(|s| &s.vma).eq(maps.iter()));
    let anon = smaps.iter().find(|s| s.vma.start <= addresses[1] && addresses[1] < s.vma.end).unwrap();
    assert!(anon.flags.contains(VmFlags::DONT_FORK | VmFlags::WRITE) && anon.rss >= 4096, "{anon:?}");
    assert!(smaps.iter().all(|s| s.unknown.is_empty() && s.kernel_page_size == 4096));

    let stat = proc.stat().unwrap();
    assert_eq!(stat.comm, b") Z (\n)");
    assert_eq!(stat.comm, proc.comm().unwrap());
    assert_eq!((stat.pid, stat.ppid, stat.num_threads), (child.0.id(), std::process::id(), 2));
    assert!(maps.iter().any(|v| v.start <= stat.start_code && stat.end_code <= v.end));
    assert!(maps.iter().any(|v| v.start <= stat.arg_start && stat.env_end <= v.end && v.name == b"[stack]"));

    let status = proc.status().unwrap();
    assert_eq!((status.state, status.umask, status.own_pid()), (b'S', Some(0o27), child.0.id()));
    assert_eq!(status.sig_ignored & 1 << (libc::SIGUSR1 - 1), 1 << (libc::SIGUSR1 - 1));
    assert_eq!(status.thp_enabled, Some(true));

    let threads = proc.threads().unwrap();
    assert_eq!((threads.len(), threads[0]), (2, child.0.id()));
    let second = proc.sibling(threads[1]).unwrap();
    assert_eq!(second.comm().unwrap(), b"a) R 1\n(b");
    assert_eq!(second.stat().unwrap().comm, b"a) R 1\n(b");
    assert_eq!(second.threads().unwrap(), threads);
    assert_eq!(second.status().unwrap().tgid, child.0.id());
    assert!(
        matches!(second.syscall().unwrap(), CurrentCall::Inside { nr, .. } if nr == libc::SYS_pause as u64)
    );
    assert!(second.sched().unwrap().is_none_or(|s| s.exec_start_ns > 0));

    let timers = proc.timers().unwrap();
    assert_eq!(timers.len(), 1);
    let t = timers[0];
    assert_eq!((t.id, t.signal, t.value, t.clock), (0, libc::SIGUSR1 as u32, 0x1234, libc::CLOCK_BOOTTIME));
    assert_eq!((t.notify, t.to_thread, t.target), (TimerNotify::Signal, false, child.0.id()));
}

#[test]
fn small_files() {
    let child = Running(Command::new("sleep").arg("100").spawn().unwrap());
    let proc = child.proc();
    asleep(&proc);
    assert_eq!(proc.cmdline().unwrap(), [b"sleep".to_vec(), b"100".to_vec()]);
    let auxv = proc.auxv().unwrap();
    assert!(auxv.contains(&(libc::AT_PAGESZ, 4096)), "{auxv:?}");
    assert_eq!(
        proc.personality().unwrap(),
        Proc::process(std::process::id()).unwrap().personality().unwrap()
    );
    assert!(proc.coredump_filter().unwrap() > 0);
    assert!((-1000..=1000).contains(&proc.oom_score_adj().unwrap()));
    assert!(!proc.cgroup().unwrap().is_empty());
    assert_eq!(proc.time_offsets().unwrap(), Some((0, 0)));
    let spaces = proc.namespaces().unwrap();
    assert_eq!(spaces, Proc::process(std::process::id()).unwrap().namespaces().unwrap());
    assert!(spaces.iter().any(|n| n.kind == NamespaceKind::Pid && n.id != 0));
    let ours = Proc::process(std::process::id()).unwrap();
    assert!(ours.children().unwrap().contains(&child.0.id()));
    assert!(stillpoint_linux::proc::processes().unwrap().contains(&child.0.id()));
}

#[test]
fn an_ended_process_is_gone() {
    let mut child = Running(Command::new("sleep").arg("100").spawn().unwrap());
    let proc = child.proc();
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let pid = child.0.id();
    for result in [
        proc.maps().map(drop),
        proc.stat().map(drop),
        proc.status().map(drop),
        proc.threads().map(drop),
        proc.children().map(drop),
        proc.link("exe").map(drop),
        proc.namespaces().map(drop),
        Proc::process(pid).map(drop),
    ] {
        assert!(matches!(result, Err(Error::Gone(p)) if p == pid), "{result:?}");
    }
    let ours = Proc::process(std::process::id()).unwrap();
    assert_eq!(ours.read("no such file").unwrap_err().errno(), Some(libc::ENOENT));
    assert!(ours.read_optional("no such file").unwrap().is_none());
}

/// Whose memory lives on in a child that shares it, as it executes itself where addresses are not random.
const REPLACED: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <unistd.h>
static char stack[65536];
static volatile int called;
static void call(int signal) { called = signal; }
static int stay(void *unused) {
  (void)unused;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (;;)
    pause();
}
static int again(char **argv, char *name) {
  char *const next[] = {argv[0], name, 0};
  execv("/proc/self/exe", next);
  return 1;
}
int main(int argc, char **argv) {
  if (argc < 2)
    return personality(ADDR_NO_RANDOMIZE) < 0 ? 1 : again(argv, "a");
  if (argv[1][0] == 'b')
    for (;;)
      pause();
  signal(SIGUSR1, call);
  if (clone(stay, stack + sizeof stack, CLONE_VM | SIGCHLD, 0) < 0)
    return 1;
  puts("ready");
  fflush(stdout);
  while (!called)
    usleep(1000);
  return again(argv, "b");
}
"#;

#[test]
fn another_program_has_other_random_bytes() {
    let (child, _folder, line) = c_program(REPLACED);
    assert_eq!(line, "ready\n");
    let (proc, pid) = (child.proc(), child.0.id());
    let random = || {
        let auxv = proc.auxv().unwrap();
        RemoteAddr(auxv.iter().find(|(kind, _)| *kind == libc::AT_RANDOM).unwrap().1)
    };
    let (at, memory, pagemap) = (random(), Memory::open(pid).unwrap(), Pagemap::open(pid).unwrap());
    assert!(memory.is_still_its_own(at) && pagemap.has_page(at));
    stillpoint_linux::spawn::tgkill(pid, pid, libc::SIGUSR1).unwrap();
    while proc.cmdline().unwrap().get(1).is_none_or(|name| name != b"b") {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    asleep(&proc);
    assert_eq!(random(), at, "its addresses are random");
    assert!(!pagemap.is_of_the_past() && pagemap.has_page(at), "the child has that memory");
    assert!(!memory.is_still_its_own(at));
    assert!(Memory::open(pid).unwrap().is_still_its_own(at));
}

#[test]
fn of_an_ended_process_it_is_said_that_it_ended() {
    use stillpoint_linux::fdinfo::Folders;
    let (mut child, _folder, _line) =
        c_program("#include <stdio.h>\nint main() { puts(\"ready\"); return 0; }");
    let pid = child.0.id();
    let gone = |error: Option<stillpoint_linux::Error>| matches!(error, Some(stillpoint_linux::Error::Gone(of)) if of == pid);
    while child.proc().stat().unwrap().state != b'Z' {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(gone(Pagemap::open(pid).err()), "one that is not waited for has no memory any more");
    let folders = Folders::open(pid).unwrap();
    child.0.wait().unwrap();
    assert!(gone(Memory::open(pid).err()));
    assert!(gone(Pagemap::open(pid).err()));
    assert!(gone(Folders::open(pid).err()));
    assert!(gone(folders.list().err()) && gone(folders.link(0).err()) && gone(folders.text(0).err()));
}
