//! Round trips on real kernel objects: a Python program makes them, they are captured, the program is killed, they
//! are made anew in a helper process, captured there once more, and both captures must tell the same.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio as Io};
use stillpoint_capture::files::{Holder, Outsiders, Target, capture_files, note_open};
use stillpoint_capture::{Builder, Refusal};
use stillpoint_image::{FileKind, Image, Owner, Process};
use stillpoint_linux::descriptors::pidfd_open;
use stillpoint_linux::local::LocalRun;
use stillpoint_restore::files::{self, Contents};
use stillpoint_restore::{Error, FilesPolicy, Options, Result, Stdio};

const PRELUDE: &str = r#"
import os, sys, errno, socket, select, fcntl, struct, ctypes, termios, signal, tempfile, time, tty
libc = ctypes.CDLL(None, use_errno=True)
os.closerange(3, 1024)  # whatever the test runner leaked to us
"#;

/// A program that made its objects and stands still.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As the restore does, and nobody hears what takes long.
fn open_files(
    image: &Image,
    contents: &dyn files::Contents,
    options: &Options,
) -> stillpoint_restore::Result<files::OpenFiles> {
    files::open(image, contents, options, &|_| {})
}

fn take_digests(builder: &mut stillpoint_capture::Builder) {
    use stillpoint_capture::files::{Moment, take_digests_of};
    for usage in [stillpoint_image::Usage::Write, stillpoint_image::Usage::Read] {
        take_digests_of(builder, usage, Moment::Still(u64::MAX));
    }
}

impl Program {
    /// It says so itself.
    #[track_caller]
    fn is_undisturbed(&mut self) {
        let target = rustix::process::Pid::from_raw(self.0.id() as i32).unwrap();
        rustix::process::kill_process(target, rustix::process::Signal::USR1).unwrap();
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "undisturbed\n");
    }
}

fn start(dir: &Path, script: &str) -> Program {
    let script = format!("{PRELUDE}{script}\nprint('ready', flush=True)\nsignal.pause()\n");
    let mut child = Command::new("python3")
        .args(["-c", &script])
        .current_dir(dir)
        .stdin(Io::null())
        .stdout(Io::piped())
        .stderr(Io::inherit())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    Program(child)
}

fn capture(pid: u32) -> Builder {
    let mut builder = Builder::new();
    let pidfd = pidfd_open(pid, 0).unwrap();
    let outsiders = Outsiders::of(&[pid], Vec::new());
    let process = stillpoint_linux::proc::Proc::process(pid).unwrap();
    let holders = [Holder { pid, pidfd: std::os::fd::AsFd::as_fd(&pidfd), process: &process }];
    let target = Target { holders: &holders, tables: &[], inherited: &[], outsiders: &outsiders };
    capture_files(&mut builder, &target).unwrap();
    builder.forget_duplicates();
    take_digests(&mut builder);
    builder
}

fn refusals(script: &str) -> Vec<Refusal> {
    let dir = tempfile::tempdir().unwrap();
    let program = start(dir.path(), script);
    capture(program.0.id()).refusals
}

#[track_caller]
fn assert_refused(script: &str, why: &str) {
    let found = refusals(script);
    assert!(found.iter().any(|r| r.to_string().contains(why)), "{found:#?}");
}

/// Contents as files in a folder.
struct Folder(PathBuf);

impl Folder {
    fn file(&self, owner: Owner) -> PathBuf {
        self.0.join(format!("{owner:?}"))
    }

    fn fill(&self, builder: &Builder) {
        for content in &builder.contents {
            let out = File::create(self.file(content.owner)).unwrap();
            let source = content.source.open().unwrap();
            for range in content.to_be_read(&source).unwrap() {
                let mut bytes = vec![0; range.len as usize];
                source.read_at(range.start, &mut bytes).unwrap();
                out.write_all_at(&bytes, range.start).unwrap();
            }
        }
    }
}

impl Contents for Folder {
    fn read(&self, owner: Owner, offset: u64, buffer: &mut [u8]) -> Result<()> {
        buffer.fill(0);
        if let Ok(file) = File::open(self.file(owner)) {
            stillpoint_linux::digest::read_at(&file, offset, buffer)?;
        }
        Ok(())
    }
}

/// The helper process: makes everything in itself.
#[test]
#[ignore = "run by the other tests"]
fn helper() {
    let dir = PathBuf::from(std::env::var_os("STILLPOINT_TEST_DIR").unwrap());
    let mut image: Image = minicbor::decode(&fs::read(dir.join("image")).unwrap()).unwrap();
    for file in &mut image.files {
        if let FileKind::Pid(pid) = &mut file.kind {
            *pid = std::process::id();
        }
        if let Some(owner) = file.owner.as_mut().filter(|o| o.id != 0 && o.kind == 1) {
            owner.id = std::process::id();
        }
    }
    let session = image.ptys.iter().find_map(|pty| pty.session);
    let process = Process { pid: std::process::id(), session, ..Process::default() };
    image.processes.push(process);
    let _ = rustix::process::setsid(); // as a program that had a terminal of its own did
    let open =
        open_files(&image, &Folder(dir.clone()), &options(FilesPolicy::Refuse, Stdio::Current)).unwrap();
    let mut open = std::mem::ManuallyDrop::new(open); // install closes its descriptors: we are both sides
    open.cut_back(&mut |_, _, _| Ok(())).unwrap();
    open.settle(&image).unwrap();
    open.terminals().values().for_each(|slave| rustix::process::ioctl_tiocsctty(slave).unwrap());
    open.seal(&image).unwrap();
    open.install(&image, 0, &mut LocalRun).unwrap();
    open.finish(&image, &mut [&mut LocalRun]).unwrap();
    // It is there at once: nobody sees it while it is open.
    fs::create_dir(dir.join("ready")).unwrap();
    loop {
        std::thread::park();
    }
}

fn restore(dir: &Path, image: &Image) -> Program {
    fs::write(dir.join("image"), minicbor::to_vec(image).unwrap()).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "helper", "--nocapture", "--test-threads=1"])
        .env("STILLPOINT_TEST_DIR", dir)
        .stdin(Io::null())
        .stdout(Io::piped())
        .spawn()
        .unwrap();
    let mut program = Program(child);
    for _ in 0..6000 {
        if dir.join("ready").exists() {
            return program;
        }
        if let Some(status) = program.0.try_wait().unwrap() {
            panic!("the helper failed: {status}");
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the helper does not get ready");
}

/// One line a descriptor, with everything that must be the same afterwards.
fn tell(image: &Image, pid: u32) -> Vec<String> {
    let table = &image.tables[0];
    let first = |row: u32| table.descriptors.iter().find(|d| d.file == row).map(|d| d.fd);
    let path = |row: u32| {
        let p = &image.paths[row as usize];
        let times = if p.deleted { p.mtime_ns } else { 0 };
        // One that was made without a name is called after its inode number.
        let name = p.path.to_string();
        let name = name.rsplit_once("/#").map_or(&*name, |(folder, _)| folder);
        format!("{name} {:o} {} {:?} deleted={} size={} {times}", p.mode, p.uid, p.usage, p.deleted, p.size)
    };
    let kind = |kind: &FileKind| match kind {
        FileKind::Path(p) | FileKind::Proc(p) => path(*p),
        FileKind::Pipe(p) => {
            let pipe = &image.pipes[*p as usize];
            format!("pipe {p} {} {:?} {:?}", pipe.capacity, pipe.data, pipe.fifo.map(path))
        }
        FileKind::Socket(s) => {
            let mut socket = image.sockets[*s as usize].clone();
            let named = socket.path.take().map(path);
            let peer = socket.peer.take().map(|p| {
                let row = image.files.iter().position(|f| f.kind == FileKind::Socket(p)).unwrap();
                first(row as u32)
            });
            format!("{socket:?} {named:?} {peer:?}")
        }
        FileKind::Memory(o) => format!("{:?}", image.objects[*o as usize]),
        FileKind::PtyMaster(p) | FileKind::PtySlave(p) => {
            let mut pty = image.ptys[*p as usize].clone();
            // Ids are those of another process afterwards.
            pty.session = pty.session.map(|session| u32::from(session == pid));
            pty.foreground = pty.foreground.map(|group| u32::from(group == pid));
            // Somebody else may have taken its number meanwhile.
            pty.number = 0;
            format!("{kind:?} {pty:?}")
        }
        FileKind::Epoll(list) => {
            let mut list: Vec<_> = list.iter().map(|w| (w.fd, w.events, w.data, first(w.file))).collect();
            list.sort_unstable();
            format!("epoll {list:x?}")
        }
        FileKind::Inotify(list) => {
            let list: Vec<_> = list.iter().map(|w| (w.wd, w.mask, path(w.path))).collect();
            format!("inotify {list:?}")
        }
        FileKind::Timer(t) => {
            // A moment passes in between.
            let left = t.remaining_ns.div_ceil(20_000_000_000);
            format!("timer {} {} {} {left} {}", t.clock, t.flags, t.interval_ns, t.expires_ns.is_some())
        }
        FileKind::Pid(p) => format!("pid {}", *p == pid),
        other => format!("{other:?}"),
    };
    let line = |d: &stillpoint_image::Descriptor| {
        let f = &image.files[d.file as usize];
        let owner = f.owner.map(|o| (o.kind, o.id == pid, o.signal));
        let lock = |l: &stillpoint_image::Lock| {
            format!("{:?} {}", (l.kind, l.exclusive, l.start, l.end), l.process == Some(pid))
        };
        let locks: Vec<String> = f.locks.iter().map(lock).collect();
        let shared = first(d.file);
        format!(
            "{} shares={shared:?} cloexec={} flags={:o} pos={} {owner:?} {locks:?} {}",
            d.fd,
            d.close_on_exec,
            if f.flags & 0o20_000_000 != 0 { f.flags & !0o20_200_000 } else { f.flags },
            f.position,
            kind(&f.kind)
        )
    };
    table.descriptors.iter().map(line).collect()
}

/// Makes, captures, kills, makes anew, captures again; returns what the first capture told.
#[track_caller]
fn round_trip(script: &str) -> Image {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().join("work");
    fs::create_dir(&work).unwrap();
    let program = start(&work, script);
    let builder = capture(program.0.id());
    assert_eq!(builder.refusals, []);
    Folder(dir.path().to_owned()).fill(&builder);
    let before = tell(&builder.image, program.0.id());
    drop(program);
    let restored = restore(dir.path(), &builder.image);
    let again = capture(restored.0.id());
    assert_eq!(again.refusals, []);
    let after = tell(&again.image, restored.0.id());
    assert_eq!(before, after, "before (left) and after (right)");
    for (a, b) in builder.contents.iter().zip(&again.contents) {
        let read = |c: &stillpoint_capture::Content| {
            let source = c.source.open().unwrap();
            let mut bytes = vec![0; c.to_be_read(&source).unwrap().last().map_or(0, |r| r.end()) as usize];
            source.read_at(0, &mut bytes).unwrap();
            bytes
        };
        assert!(read(a) == read(b), "{} has other contents", a.what);
    }
    builder.image
}

#[test]
fn regular_files_directories_and_handles() {
    round_trip(
        r#"
f = open("data", "w+b"); f.write(b"x" * 5000); f.flush(); f.seek(1234)
a = os.open("data", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
d = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
p = os.open("data", os.O_PATH)
os.symlink("data", "link"); l = os.open("link", os.O_PATH | os.O_NOFOLLOW)
n = [os.open("/dev/" + n, os.O_RDWR) for n in ("null", "zero", "full", "random", "urandom")]
os.dup2(f.fileno(), 40); os.dup2(a, 41, inheritable=False); os.dup2(a, 60)
s = os.open("/sys/kernel/mm/transparent_hugepage/enabled", os.O_RDONLY) if os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled") else -1
"#,
    );
}

#[test]
fn deleted_files_come_back_deleted() {
    let image = round_trip(
        r#"
f = open("gone", "w+b"); f.write(b"head"); f.seek(300000); f.write(b"tail"); f.flush(); os.chmod("gone", 0o640)
w = os.open("gone", os.O_WRONLY | os.O_APPEND); os.unlink("gone")
t = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600); os.write(t, b"nameless")
os.mkdir("dir"); d = os.open("dir", os.O_RDONLY); os.rmdir("dir")
q = open("taken", "w+b"); q.write(b"old"); q.flush(); os.unlink("taken")
"#,
    );
    assert_eq!(image.paths.iter().filter(|p| p.deleted).count(), 4);
}

#[test]
fn a_file_whose_name_was_replaced_is_refused_if_it_has_another_elsewhere() {
    assert_refused(
        r#"
os.mkdir("d"); f = open("a", "w+b"); os.link("a", "d/b"); os.unlink("a")
"#,
        "has another name that is not known",
    );
}

#[test]
fn a_file_whose_name_was_replaced_has_its_other_one() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
f = open("a", "w+b"); os.link("a", "b"); os.unlink("a"); g = open("a", "w")
"#;
    let program = start(dir.path(), script);
    let Builder { image, refusals, .. } = capture(program.0.id());
    assert_eq!(refusals, []);
    let ino = std::fs::metadata(dir.path().join("b")).unwrap().ino();
    let path = image.paths.iter().find(|p| p.ino == ino).unwrap();
    assert!(path.path.0.ends_with(b"/b") && !path.deleted, "{path:?}");
}

#[test]
fn pipes_with_data_packets_and_ends_that_are_closed() {
    round_trip(
        r#"
r, w = os.pipe(); os.write(w, b"y" * 30000)
r2, w2 = os.pipe2(os.O_DIRECT | os.O_NONBLOCK); os.write(w2, b"one"); os.write(w2, b"two")
r3, w3 = os.pipe(); os.write(w3, b"rest"); os.close(w3)
r4, w4 = os.pipe(); os.close(r4)
r5, w5 = os.pipe(); fcntl.fcntl(w5, 1031, 1 << 20); os.write(w5, b"z" * 200000)
again = os.open(f"/proc/self/fd/{r}", os.O_RDONLY | os.O_NONBLOCK)
"#,
    );
}

#[test]
fn fifos() {
    round_trip(
        r#"
os.mkfifo("fifo", 0o600); b = os.open("fifo", os.O_RDWR); os.write(b, b"queued")
r = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK); w = os.open("fifo", os.O_WRONLY)
os.mkfifo("alone"); l = os.open("alone", os.O_RDONLY | os.O_NONBLOCK)
"#,
    );
}

#[test]
fn a_pipe_to_another_process_keeps_one_end() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import subprocess
p = subprocess.Popen(["sleep", "5"], stdin=subprocess.PIPE)
"#;
    let program = start(dir.path(), script);
    let Builder { image, refusals, .. } = capture(program.0.id());
    assert_eq!(refusals, []);
    let told: Vec<_> = image.pipes.iter().filter_map(|pipe| pipe.outside.as_deref()).collect();
    assert!(
        matches!(told[..], [who] if who.starts_with("process ") && who.ends_with(" (sleep)")),
        "{told:?}"
    );
}

#[test]
fn unix_pairs_with_queues() {
    round_trip(
        r#"
a, b = socket.socketpair(); a.send(b"s" * 50000); b.send(b"back"); a.shutdown(socket.SHUT_WR)
c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); c.send(b"one"); c.send(b""); c.send(b"three")
e, f = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); e.send(b"1"); e.send(b"22"); f.setblocking(False)
g, h = socket.socketpair(); g.send(b"last"); g.close()
i, j = socket.socketpair(); i.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1); i.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100000)
k = socket.socket(socket.AF_UNIX); x = os.dup(b.fileno())
"#,
    );
}

#[test]
fn listening_and_accepted_unix_sockets() {
    round_trip(
        r#"
l = socket.socket(socket.AF_UNIX); l.bind("sock"); os.chmod("sock", 0o700); l.listen(7)
c = socket.socket(socket.AF_UNIX); c.connect("sock"); s, _ = l.accept(); c.send(b"hello")
t = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); t.bind(b"\0stillpoint-test-%d" % os.getpid()); t.listen(3)
g = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); g.bind(os.getcwd() + "/dgram")
h = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); h.bind("lost"); os.unlink("lost")
"#
        .replace("l.bind(\"sock\")", "l.bind(os.getcwd() + '/sock')")
        .replace("c.connect(\"sock\")", "c.connect(os.getcwd() + '/sock')")
        .replace("h.bind(\"lost\")", "h.bind(os.getcwd() + '/lost')")
        .as_str(),
    );
}

#[test]
fn internet_sockets_with_options() {
    round_trip(
        r#"
l = socket.socket(); l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); l.bind(("127.0.0.1", 0)); l.listen(33)
l.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5)); l.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 50000)
l.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3, 500000))
l.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); l.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
l.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 3); l.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4321)
l.setsockopt(socket.IPPROTO_TCP, 23, 16); l.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 16); l.setblocking(False)
v = socket.socket(socket.AF_INET6); v.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1); v.bind(("::1", 0)); v.listen(5)
p = [socket.socket() for _ in range(2)]
for q in p: q.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
p[0].bind(("127.0.0.1", 0)); p[1].bind(p[0].getsockname()); p[0].listen(1); p[1].listen(2)
fresh = socket.socket(); bound = socket.socket(); bound.bind(("127.0.0.1", 0))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 0)); u.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
w = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); w.connect(("127.0.0.1", 9))
"#,
    );
}

#[test]
fn connections_within_the_program() {
    round_trip(
        r#"
l = socket.socket(); l.bind(("127.0.0.1", 0)); l.listen(33)
c = socket.socket(); c.connect(l.getsockname()); s, _ = l.accept(); c.send(b"x" * 5000); s.send(b"back")
n = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); n.bind((0, 1))
"#,
    );
}

#[test]
fn sockets_that_cannot_be_restored_are_refused_by_name() {
    assert_refused(
        r#"
l = socket.socket(); l.bind(("127.0.0.1", 0)); l.listen(33)
c = socket.socket(); c.connect(l.getsockname()); s, _ = l.accept(); c.send(b"!", socket.MSG_OOB)
"#,
        "it has urgent data that was not yet read",
    );
    assert_refused(
        "p = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); p.setsockopt(263, 5, struct.pack('IIII', 4096, 1, 2048, 2))",
        "PACKET_RX_RING",
    );
}

#[test]
fn event_sources() {
    round_trip(
        r#"
e = libc.eventfd(5, 0o4000); s = libc.eventfd(0, 1); big = libc.eventfd(0, 0); os.write(big, struct.pack("Q", 1 << 40))
class ts(ctypes.Structure): _fields_ = [(n, ctypes.c_long) for n in "abcd"]
t = libc.timerfd_create(1, 0o4000); libc.timerfd_settime(t, 0, ctypes.byref(ts(10, 0, 100, 5)), None)
o = libc.timerfd_create(7, 0); libc.timerfd_settime(o, 0, ctypes.byref(ts(0, 0, 100, 0)), None)
w = libc.timerfd_create(0, 0); libc.timerfd_settime(w, 3, ctypes.byref(ts(0, 0, int(time.time()) + 100, 0)), None)
off = libc.timerfd_create(1, 0)
m = ctypes.c_uint64(0x200); g = libc.signalfd(-1, ctypes.byref(m), 0)
p = os.pidfd_open(os.getpid())
os.mkdir("watched"); open("watched/file", "w").close()
i = libc.inotify_init1(0o4000)
for n in range(3): x = libc.inotify_add_watch(i, b"watched/file", 2); libc.inotify_rm_watch(i, x)
while True:
    try: os.read(i, 4096)
    except BlockingIOError: break
libc.inotify_add_watch(i, b"watched", 0x100 | 0x200); libc.inotify_add_watch(i, b"watched/file", 2)
"#,
    );
}

#[test]
fn epolls_nested_and_with_numbers_used_again() {
    round_trip(
        r#"
r, w = os.pipe(); a, b = os.pipe()
ep = select.epoll(); ep.register(r, select.EPOLLIN | select.EPOLLET)
x = os.dup(r); ep.register(x, 1); os.close(x)           # closed, but its description lives on
y = os.dup(b); os.dup2(y, 50); ep.register(50, 4 | 1 << 30); os.dup2(a, 50)   # used again
outer = select.epoll(); outer.register(ep.fileno(), 1); outer.register(0 + w, 4)
empty = select.epoll()
"#,
    );
}

#[test]
fn memfds_with_seals() {
    round_trip(
        r#"
m = os.memfd_create("mem", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC); os.write(m, b"m" * 10000); os.ftruncate(m, 1 << 20); os.lseek(m, 77, 0)
fcntl.fcntl(m, 1033, 2 | 4)
r = os.open(f"/proc/self/fd/{m}", os.O_RDONLY)
n = os.memfd_create("unsealable"); os.write(n, b"n"); os.fchmod(n, 0o600); d = os.dup(n)
"#,
    );
}

#[test]
fn pseudo_terminals() {
    round_trip(
        r#"
m, s = os.openpty(); tty.setraw(s); fcntl.ioctl(s, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 1, 2))
again = os.open(os.ttyname(s), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
alone = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
h, c = os.openpty(); os.close(c); fcntl.ioctl(h, termios.TIOCPKT, struct.pack("i", 1))
"#,
    );
}

#[test]
fn locks_and_signal_owners() {
    let image = round_trip(
        r#"
f = open("lock", "w+b"); f.write(b"x" * 100); f.flush(); fcntl.lockf(f, fcntl.LOCK_EX, 5, 3)
g = open("lock2", "w+b"); fcntl.flock(g, fcntl.LOCK_SH)
h = open("lock3", "w+b"); fcntl.fcntl(h, 37, struct.pack("hhqqi4x", 1, 0, 10, 0, 0))
r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(r, 10, signal.SIGUSR1)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
"#,
    );
    assert_eq!(image.files.iter().map(|f| f.locks.len()).sum::<usize>(), 3);
    assert_refused("d = os.open('.', 0); fcntl.fcntl(d, fcntl.F_NOTIFY, fcntl.DN_RENAME)", "F_NOTIFY");
}

#[test]
fn files_of_procfs() {
    round_trip("f = os.open('/proc/self/limits', 0); os.read(f, 10); m = os.open('/proc/meminfo', 0)");
    round_trip("u = os.open('/proc/self/ns/net', 0)");
    assert_refused("f = os.open('/proc/1/status', 0)", "it is about process 1");
}

#[test]
fn what_cannot_be_captured_is_named() {
    assert_refused("u = libc.syscall(425, 8, ctypes.create_string_buffer(200)); assert u >= 0", "io_uring");
    assert_refused("u = libc.syscall(323, 1)", "userfaultfd");
    assert_refused("u = libc.syscall(300, 4, 0)", "fanotify");
    assert_refused(
        "u = os.open('/proc/self/ns/uts', 0); assert libc.unshare(0x04000000) == 0",
        "a handle to a namespace that none of its processes is in",
    );
    assert_refused("u = os.pidfd_open(1)", "a handle to process 1");
    assert_refused("u = os.open('/dev/kmsg', 0)", "messages of the kernel that were not yet read");
    assert_refused("u = os.open('/dev/fuse', 2)", "it is the device 10:229");
    assert_refused(
        "u = os.open('/dev/ptmx', 2); libc.unlockpt(u); v = os.open(os.ptsname(u) if hasattr(os, 'ptsname') else '/dev/pts/%d' % struct.unpack('i', fcntl.ioctl(u, 0x80045430, b'0000'))[0], 2 | os.O_NOCTTY); os.write(v, b'x'); select.select([u], [], [])",
        "not yet read",
    );
}

/// Captures a program that has `data` open for writing and `read` for reading, changes things, and opens again.
fn after(change: impl Fn(&Path), policy: FilesPolicy) -> (Result<files::OpenFiles>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("read"), b"constant").unwrap();
    let script = "f = open('data', 'wb'); f.write(b'x' * 1000); f.flush(); r = open('read')";
    let program = start(dir.path(), script);
    let builder = capture(program.0.id());
    assert_eq!(builder.refusals, []);
    drop(program);
    change(dir.path());
    (open_files(&builder.image, &Folder(dir.path().into()), &options(policy, Stdio::Null)), dir)
}

fn options(files: FilesPolicy, stdio: Stdio) -> Options {
    Options { files, stdio, ..Options::default() }
}

fn append(path: PathBuf, bytes: &[u8]) {
    use std::io::Write;
    File::options().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

#[track_caller]
fn assert_says(result: Result<files::OpenFiles>, words: &str) {
    match result {
        Err(Error::Refused(lines)) => assert!(lines.iter().any(|l| l.contains(words)), "{lines:?}"),
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("was not refused: {words}"),
    }
}

#[test]
fn a_file_that_grew_is_cut_back_and_its_tail_is_kept() {
    let (open, dir) = after(|d| append(d.join("data"), b"tail"), FilesPolicy::Rollback);
    let mut open = open.unwrap();
    assert_eq!(fs::metadata(dir.path().join("data")).unwrap().len(), 1004);
    let mut kept = Vec::new();
    open.cut_back(&mut |path, offset, tail| {
        assert!(path.ends_with("data") && offset == 1000);
        tail.read_to_end(&mut kept).unwrap();
        Ok(())
    })
    .unwrap();
    assert_eq!(kept, b"tail");
    assert_eq!(fs::read(dir.path().join("data")).unwrap(), vec![b'x'; 1000]);
}

#[test]
fn a_tail_that_cannot_be_kept_is_not_cut() {
    let (open, dir) = after(|d| append(d.join("data"), b"tail"), FilesPolicy::Rollback);
    let refuse = open.unwrap().cut_back(&mut |_, _, _| Err(Error::Failed("disk full".into())));
    assert!(refuse.is_err());
    assert_eq!(fs::metadata(dir.path().join("data")).unwrap().len(), 1004);
}

#[test]
fn files_that_changed_are_refused_by_name() {
    use FilesPolicy::{Keep, Refuse, Rollback};
    let grow = |d: &Path| append(d.join("data"), b"tail");
    let cut = |d: &Path| File::options().write(true).open(d.join("data")).unwrap().set_len(990).unwrap();
    let touch = |d: &Path| {
        let file = File::options().write(true).open(d.join("data")).unwrap();
        file.write_all_at(b"y", 500).unwrap();
    };
    let replace = |d: &Path| {
        fs::write(d.join("new"), vec![b'x'; 1000]).unwrap();
        fs::rename(d.join("new"), d.join("data")).unwrap();
    };
    let gone = |d: &Path| fs::remove_file(d.join("data")).unwrap();
    let edit = |d: &Path| fs::write(d.join("read"), b"CONSTANT").unwrap();
    assert_says(after(grow, Refuse).0, "is 4 bytes longer than at the checkpoint");
    assert_says(after(cut, Rollback).0, "is 10 bytes shorter than at the checkpoint");
    assert_says(after(touch, Rollback).0, "its contents changed");
    assert_says(after(replace, Rollback).0, "was replaced by another file");
    assert_says(after(gone, Keep).0, "is gone");
    assert_says(after(edit, Rollback).0, "read: its contents changed");
    for change in [grow, cut, touch, replace, edit] as [fn(&Path); 5] {
        assert!(after(change, Keep).0.unwrap().cuts().is_empty());
    }
    // Only the times changed, or only what is read grew, or was replaced by the same.
    let rewrite =
        |d: &Path| File::options().write(true).open(d.join("data")).unwrap().write_all_at(b"x", 5).unwrap();
    let grow_read = |d: &Path| append(d.join("read"), b"tail");
    let same = |d: &Path| {
        fs::write(d.join("new"), b"constant").unwrap();
        fs::rename(d.join("new"), d.join("read")).unwrap();
    };
    for change in [rewrite, grow_read, same] as [fn(&Path); 3] {
        after(change, Refuse).0.unwrap();
    }
}

#[test]
fn an_address_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
l = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen(1)
u = socket.socket(socket.AF_UNIX); u.bind(os.getcwd() + '/s'); u.listen(1)
def check(*_):
    # Nobody has connected.
    assert select.select([u], [], [], 0) == ([], [], [])
    print("undisturbed", flush=True)
    signal.pause()
signal.signal(signal.SIGUSR1, check)
"#;
    let mut program = start(dir.path(), script);
    let builder = capture(program.0.id());
    assert_eq!(builder.refusals, []);
    let open = || {
        open_files(&builder.image, &Folder(dir.path().into()), &options(FilesPolicy::Rollback, Stdio::Null))
    };
    assert_says(open(), "another program uses this socket");
    program.is_undisturbed();
    fs::rename(dir.path().join("s"), dir.path().join("moved")).unwrap();
    assert_says(open(), "TCP 127.0.0.1:");
    assert!(!dir.path().join("s").exists(), "a restore that failed leaves no socket behind");
    drop(program);
    fs::rename(dir.path().join("moved"), dir.path().join("s")).unwrap();
    drop(open().unwrap());
}

#[test]
fn unread_standard_input_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("{PRELUDE}print('ready', flush=True)\nsignal.pause()\n");
    let mut child = Command::new("python3");
    child.args(["-c", &script]).stdin(Io::piped()).stdout(Io::piped()).current_dir(dir.path());
    let mut program = Program(child.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(program.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    std::io::Write::write_all(program.0.stdin.as_mut().unwrap(), b"unread").unwrap();
    let builder = capture(program.0.id());
    assert_eq!(builder.refusals, []);
    assert_eq!(builder.image.files[0].kind, FileKind::Stdio(0));
    assert_eq!(builder.image.pipes[0].data[0].0, b"unread");
    let mut open = open_files(
        &builder.image,
        &Folder(dir.path().into()),
        &options(FilesPolicy::Rollback, Stdio::Current),
    )
    .unwrap();
    assert_eq!(open.take_pumps().len(), 1);
}

#[test]
fn a_terminal_outside_is_followed_by_all_its_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
m, s = os.openpty()
pid = os.fork()
if pid == 0:
    os.setsid(); fcntl.ioctl(s, termios.TIOCSCTTY, 0)
    for n in range(3): os.dup2(s, n)
    os.closerange(3, 100); os.dup2(0, 255); own = os.open(os.ttyname(0), os.O_WRONLY); t = os.open("/dev/tty", os.O_RDWR)
    os.write(1, b"up"); signal.pause()
os.read(m, 2); open("pid", "w").write(str(pid))
"#;
    let _outer = start(dir.path(), script);
    let pid: u32 = fs::read_to_string(dir.path().join("pid")).unwrap().parse().unwrap();
    let builder = capture(pid);
    assert_eq!(builder.refusals, []);
    let image = &builder.image;
    let kind = |fd: u32| {
        let d = image.tables[0].descriptors.iter().find(|d| d.fd == fd).unwrap();
        image.files[d.file as usize].kind.clone()
    };
    let expected = [0, 1, 2].map(FileKind::Stdio);
    assert_eq!([kind(0), kind(1), kind(2)], expected);
    assert_eq!((kind(255), kind(3)), (FileKind::Stdio(0), FileKind::Stdio(1)));
    assert_eq!(kind(4), FileKind::ControllingTerminal);
    assert_eq!(image.terminal.as_ref().unwrap().termios.0.len(), 44);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid as i32).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
}

#[test]
fn a_terminal_of_its_own_comes_back_as_the_controlling_one() {
    let image = round_trip(
        r#"
os.setsid(); m, s = os.openpty(); fcntl.ioctl(s, termios.TIOCSCTTY, 0); t = os.open("/dev/tty", os.O_RDWR)
"#,
    );
    assert!(image.ptys[0].controlling);
}

#[test]
fn memfds_of_huge_pages() {
    if fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default().trim() == "0" {
        eprintln!("skipped: no huge pages are reserved (vm.nr_hugepages)");
        return;
    }
    let image = round_trip(
        r#"
import mmap
h = os.memfd_create("huge", os.MFD_HUGETLB | (21 << 26)); os.ftruncate(h, 4 << 20)
p = mmap.mmap(h, 4 << 20); p[0:4] = b"head"; p[(2 << 20) + 5] = 7; p.close()
"#,
    );
    assert_eq!(image.objects[0].huge_page, 2 << 20);
}

#[test]
fn files_behind_mappings() {
    use stillpoint_capture::files::mapped_file;
    use stillpoint_image::{Range, Usage};
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import mmap
f = open("shared", "w+b"); f.write(b"s" * 10000); f.flush(); a = mmap.mmap(f.fileno(), 10000); a[1] = 88
g = open("gone", "w+b"); g.write(b"g" * 5000); g.flush(); b = mmap.mmap(g.fileno(), 5000); os.unlink("gone"); g.close()
"#;
    let program = start(dir.path(), script);
    let mut builder = capture(program.0.id());
    let pid = program.0.id();
    let vmas = stillpoint_linux::proc::Proc::process(pid).unwrap().maps().unwrap();
    for vma in vmas.iter().filter(|v| v.ino != 0) {
        let written = vma.shared.then_some(Range { start: vma.offset, len: vma.len() });
        let usage = if vma.shared { Usage::Write } else { Usage::Read };
        assert!(mapped_file(&mut builder, pid, vma, usage, written).unwrap().is_some());
    }
    assert_eq!(builder.refusals, []);
    take_digests(&mut builder);
    Folder(dir.path().to_owned()).fill(&builder);
    drop(program);
    let shared = dir.path().join("shared");
    // What the program wrote through its mapping after the cut is taken back, and is no reason to refuse.
    File::options().write(true).open(&shared).unwrap().write_all_at(b"later", 4000).unwrap();
    let contents = Folder(dir.path().into());
    let mut open =
        open_files(&builder.image, &contents, &options(FilesPolicy::Rollback, Stdio::Null)).unwrap();
    open.write_back(&builder.image, &contents).unwrap();
    open.cut_back(&mut |_, _, _| Ok(())).unwrap();
    let mut expected = vec![b's'; 10000];
    expected[1] = 88;
    assert!(fs::read(&shared).unwrap() == expected);
}

#[test]
fn a_thousand_descriptors_take_milliseconds() {
    let dir = tempfile::tempdir().unwrap();
    let program = start(
        dir.path(),
        "e = [libc.eventfd(n, 0) for n in range(400)]; d = [os.dup(n) for n in e[:300]]; f = [open('x', 'wb') for n in range(300)]",
    );
    let before = std::time::Instant::now();
    let builder = capture(program.0.id());
    eprintln!("captured {} descriptors in {:?}", builder.image.tables[0].descriptors.len(), before.elapsed());
    assert_eq!(builder.image.files.len(), 3 + 700);
}

#[test]
fn the_target_sees_nothing_of_being_captured() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
r, w = os.pipe(); os.write(w, b"p" * 5000)
r2, w2 = os.pipe2(os.O_DIRECT); os.write(w2, b"one"); os.write(w2, b"two")
a, b = socket.socketpair(); a.send(b"s" * 3000)
c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); c.send(b"x"); c.send(b"yy")
e = libc.eventfd(5, 0o4000)
class ts(ctypes.Structure): _fields_ = [(n, ctypes.c_long) for n in "abcd"]
began = time.monotonic() # it may wait for a processor between any two looks
t = libc.timerfd_create(1, 0); libc.timerfd_settime(t, 0, ctypes.byref(ts(0, 50_000_000, 0, 50_000_000)), None); begun = time.monotonic()
f = open("f", "w+b", buffering=0); f.write(b"0123456789"); f.seek(4); u = open("u", "w+b", buffering=0); u.write(b"gone"); os.unlink("u")
m = os.memfd_create("m"); os.write(m, b"mem"); os.lseek(m, 1, 0)
fcntl.lockf(f, fcntl.LOCK_EX); n, s = os.openpty()
before = {fd: open(f"/proc/self/fdinfo/{fd}").read() for fd in (r, w, f.fileno(), u.fileno(), m, e, s)}
def check(*_):
    after = {fd: open(f"/proc/self/fdinfo/{fd}").read() for fd in before}
    assert before == after
    assert d.getsockopt(socket.SOL_SOCKET, 42) == -1 and fcntl.fcntl(r, fcntl.F_GETFL) == 0
    assert os.read(r, 9999) == b"p" * 5000 and os.read(r2, 9999) == b"one" and os.read(r2, 9999) == b"two"
    assert b.recv(9999) == b"s" * 3000 and d.recv(99) == b"x" and d.recv(99) == b"yy"
    assert struct.unpack("Q", os.read(e, 8)) == (5,) and f.read() == b"456789" and os.read(m, 9) == b"em"
    least = (time.monotonic() - begun) / 0.05; ticks, = struct.unpack("Q", os.read(t, 8)); most = (time.monotonic() - began) / 0.05
    assert least - 1 <= ticks <= most + 1, (least, ticks, most)
    print("undisturbed", flush=True)
signal.signal(signal.SIGUSR1, check)
"#;
    let mut program = start(dir.path(), script);
    let pid = program.0.id();
    for _ in 0..3 {
        assert_eq!(capture(pid).refusals, []);
    }
    program.is_undisturbed();
}

#[test]
fn a_running_program_can_be_looked_at_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import threading
# Who reads the links of /proc/PID/fd has each file open for an instant, by the kernel's own doing: it happens that something is
# closed that instant later, which must be rare; a duplicate of ours that is kept would be there for ever.
late = 0
def comes_true(condition):
    global late
    for n in range(5000):
        if condition():
            late += n > 0
            return
        time.sleep(0.001)
    raise TimeoutError
def is_heard_of(end):
    try: return end.recv(1) == b""
    except BlockingIOError: return False
def can_be_executed(path):
    try: return os.waitpid(os.posix_spawn(path, [path], {}), 0)
    except OSError as e: assert e.errno == errno.ETXTBSY; return False
def work():
    for n in range(300):
        f = open("x", "wb"); e = select.epoll(); r, w = os.pipe(); e.register(r); os.write(w, b"x"); a, b = socket.socketpair()
        f.write(b"\x23!/bin/true\n"); os.fchmod(f.fileno(), 0o700); b.setblocking(False)
        os.close(r); f.close(); a.close()
        # All that was closed is: it is not told of, the other end hears of it, it can be executed.
        comes_true(lambda: e.poll(0) == []); comes_true(lambda: is_heard_of(b)); comes_true(lambda: can_be_executed("./x"))
        os.close(w); e.close(); b.close(); os.unlink("x")
    print("undisturbed" if late < 10 else f"late {late} times", flush=True)
def tell():
    try: work()
    except BaseException as e: print(repr(e), flush=True)
threading.Thread(target=tell, daemon=True).start()
"#;
    let mut program = start(dir.path(), script);
    let pid = program.0.id();
    let said = program.0.stdout.take().unwrap();
    let said = std::thread::spawn(|| {
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line).unwrap();
        line
    });
    while !said.is_finished() {
        note_open(&mut Builder::new(), pid).unwrap();
    }
    assert_eq!(said.join().unwrap(), "undisturbed\n");
}
