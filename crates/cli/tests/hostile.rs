//! Checkpoints that somebody hostile has made: they are refused, and leave neither a process nor a file behind.
//!
//! A real checkpoint is spoilt in one place after the other, and stored again with all its checksums right.
#![allow(clippy::unwrap_used)]

use crate::common::{Bench, is_alive};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use stillpoint_image::*;
use stillpoint_store::Store;

/// What is made wrong, and how.
type Spoiler = (&'static str, fn(&mut Image));

/// A program that has opened something, checkpointed and killed: its process id.
fn checkpointed(bench: &Bench) -> u32 {
    let script = "trap '' USR1; exec 5<>\"$1\"; echo kept >&5; exec 6<\"$1\"; exec sleep 1000";
    let file = bench.path("file");
    // Nothing of ours may be open in it but the standard streams.
    let close =
        r#"for f in /proc/self/fd/*; do n=${f##*/}; [ "$n" -gt 2 ] && eval "exec $n>&-"; done; exec "$@""#;
    let mut child = Command::new("bash")
        .args(["-c", close, "bash", "setsid", "bash", "-c", script, "bash"])
        .arg(file)
        .current_dir(bench.dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id();
    let comm = || std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    crate::common::eventually("the program sleeps", || comm() == "sleep\n");
    let outcome = bench.run(&["checkpoint", &pid.to_string(), "--name", "hostile", "--kill"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    child.wait().unwrap();
    pid
}

/// Stores the first checkpoint again, spoilt; `None` if the store itself does not take it.
fn spoilt(store: &Store, spoil: fn(&mut Image)) -> Option<u64> {
    let mut writer = store.begin("hostile").unwrap();
    let mut checkpoint = store.load("hostile", Some(1)).unwrap();
    writer.reuse(&checkpoint.pages.extents).unwrap();
    spoil(&mut checkpoint.image);
    writer.commit(checkpoint.image).ok().map(|committed| committed.id)
}

fn refused(spoilers: &[Spoiler]) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs to be root to restore");
        return;
    }
    let bench = Bench::new();
    let pid = checkpointed(&bench);
    let store = Store::open(&bench.store()).unwrap();
    let names = || {
        let list = std::fs::read_dir(bench.dir.path()).unwrap();
        list.map(|e| e.unwrap().file_name()).collect::<BTreeSet<_>>()
    };
    let before = names();
    let mut came_back = Vec::new();
    for (what, spoil) in spoilers {
        let Some(id) = spoilt(&store, *spoil) else { continue };
        let outcome = bench.run(&["restore", &format!("hostile@{id}"), "--detach", "--pid", "same"]);
        if outcome.code == Some(0) {
            came_back.push((what, outcome));
            let pid = bench.pid_of("hostile").unwrap();
            crate::common::kill(pid, rustix::process::Signal::KILL);
            crate::common::eventually("it ends", || !is_alive(pid));
            continue;
        }
        assert!(matches!(outcome.code, Some(1 | 3)), "{what}: {outcome:?}");
        assert!(!outcome.stderr.contains("panicked"), "{what}: {outcome:?}");
        assert!(outcome.stderr.starts_with("stillpoint: "), "{what}: {outcome:?}");
        assert!(!is_alive(pid), "{what}: a process is left");
        assert_eq!(names(), before, "{what}");
        for command in [&["show", &format!("hostile@{id}")][..], &["ls", "hostile"]] {
            let shown = bench.run(command);
            assert!(!shown.stderr.contains("panicked"), "{what}: {shown:?}");
        }
        assert_eq!(bench.run(&["rm", &format!("hostile@{id}")]).code, Some(0), "{what}");
    }
    assert!(came_back.is_empty(), "{came_back:#?}");
    assert_eq!(crate::common::read(&bench.path("file")), "kept\n");
    // What was not spoilt still comes back.
    assert_eq!(bench.run(&["restore", "hostile@1", "--detach", "--pid", "same"]).code, Some(0));
    assert!(is_alive(pid));
    crate::common::kill(pid, rustix::process::Signal::KILL);
}

/// Row of the file that the program has open.
fn file(image: &Image) -> usize {
    image.paths.iter().position(|p| p.path.0.ends_with(b"/file")).unwrap()
}

fn open_file(image: &mut Image) -> &mut OpenFile {
    let row = file(image) as u32;
    image.files.iter_mut().find(|f| f.kind == FileKind::Path(row)).unwrap()
}

#[test]
fn processes_and_threads() {
    refused(&[
        ("process 0", |i| i.processes[0].pid = 0),
        ("no such process id", |i| i.processes[0].pid = u32::MAX),
        ("another process id than that of the main thread", |i| i.processes[0].pid += 1),
        ("two threads of one id", |i| {
            let twin = i.processes[0].threads[0].clone();
            i.processes[0].threads.push(twin);
        }),
        ("a thread of no id", |i| {
            let twin = Thread { tid: u32::MAX, ..i.processes[0].threads[0].clone() };
            i.processes[0].threads.push(twin);
        }),
        ("short registers", |i| i.processes[0].threads[0].regs.0.truncate(3)),
        ("no extended state", |i| i.processes[0].threads[0].xstate.0.clear()),
        ("a segment register of the kernel", |i| {
            let regs = &mut i.processes[0].threads[0].regs.0;
            let at = regs.len() - 8 * 10; // cs
            regs[at..at + 8].copy_from_slice(&0x10_u64.to_le_bytes());
        }),
        ("a limit of nothing", |i| {
            i.processes[0].rlimits.push(Rlimit { resource: 999, soft: 1, hard: 1 });
        }),
        ("a signal of no number", |i| {
            i.processes[0].actions.push(SignalAction { signal: 900, ..SignalAction::default() });
        }),
        ("a pending signal of three bytes", |i| i.processes[0].pending.push(vec![1, 2, 3].into())),
        ("a timer on no clock", |i| {
            i.processes[0].timers.push(PosixTimer {
                clock: 99,
                remaining_ns: u64::MAX,
                ..PosixTimer::default()
            });
        }),
        ("a filter of no instructions", |i| {
            i.processes[0].threads[0].seccomp.push(SeccompFilter { program: vec![7; 3].into(), flags: 0 });
        }),
        ("a scheduler that is none", |i| i.processes[0].threads[0].sched.policy = 77),
        ("groups without end", |i| i.processes[0].threads[0].creds.groups = vec![1; 100_000]),
        ("a directory for a program", |i| i.processes[0].exe = i.processes[0].cwd),
        ("a file for a directory", |i| i.processes[0].cwd = i.processes[0].exe),
        ("a process of no memory", |i| i.spaces[0].mappings.clear()),
        ("two processes that are one", |i| {
            let twin = i.processes[0].clone();
            i.processes.push(twin);
        }),
        ("a clock before time", |i| {
            (i.meta.monotonic_ns, i.meta.boottime_ns, i.meta.taken_ns) = (i64::MIN, i64::MIN, u64::MAX);
            i.processes[0].threads[0].regs.0.clear();
        }),
        ("another machine", |i| i.meta.host.machine = "pdp11".into()),
        ("another kernel", |i| i.meta.host.vdso.0.clear()),
        ("another processor", |i| i.meta.host.instructions.push("avx1024".into())),
        ("registers that there are not", |i| i.meta.host.xfeatures |= 1 << 60),
        ("copies that there are not", |i| {
            for file in &mut i.paths {
                (file.ino, file.digest, file.copy) = (1, None, Some(vec![7; 3].into()));
            }
        }),
    ]);
}

/// Makes the program have another process, a child of that row with that address space; returns its row.
fn add_child(image: &mut Image, parent: u32, space: u32) -> usize {
    let row = image.processes.len();
    let mut process = image.processes[0].clone();
    process.pid += row as u32;
    process.threads.truncate(1);
    process.threads[0].tid = process.pid;
    (process.parent, process.space, process.leads_session) = (Some(parent), space, false);
    (process.session, process.group, process.leads_group) = (None, None, false);
    while image.spaces.len() <= space as usize {
        image.spaces.push(image.spaces[0].clone());
    }
    image.processes.push(process);
    row
}

#[test]
fn processes_that_share_memory() {
    refused(&[
        ("memory of a grandparent", |i| {
            let child = add_child(i, 0, 1);
            add_child(i, child as u32, 0);
        }),
        ("siblings that send signals of their own", |i| {
            add_child(i, 0, 1);
            let second = add_child(i, 0, 1);
            i.processes[second].exit_signal = Some(0);
        }),
        ("children of two in one memory", |i| {
            let (first, second) = (add_child(i, 0, 1), add_child(i, 0, 2));
            add_child(i, first as u32, 3);
            add_child(i, second as u32, 3);
        }),
        ("another program in the same memory", |i| {
            let child = add_child(i, 0, 0);
            i.processes[child].exe = file(i) as u32;
        }),
        ("signal actions of other memory", |i| {
            let child = add_child(i, 0, 1);
            i.processes[child].shares_actions = Some(0);
        }),
        ("signal actions of a sibling's child", |i| {
            let first = add_child(i, 0, 0);
            add_child(i, 0, 0);
            let grandchild = add_child(i, first as u32, 0);
            i.processes[grandchild].shares_actions = Some(2);
        }),
        ("signal actions that differ", |i| {
            let child = add_child(i, 0, 0);
            i.processes[child].shares_actions = Some(0);
            i.processes[child].actions.clear();
        }),
    ]);
}

#[test]
fn memory() {
    refused(&[
        ("a mapping in the kernel", |i| {
            let mut last = i.spaces[0].mappings.last().unwrap().clone();
            (last.start, last.end) = (0xffff_8000_0000_0000, 0xffff_8000_0000_1000);
            last.backing = Backing::Anonymous;
            i.spaces[0].mappings.push(last);
        }),
        ("a mapping at the end of all", |i| {
            let mut last = i.spaces[0].mappings.last().unwrap().clone();
            (last.start, last.end) = (0xffff_ffff_ffff_e000, 0xffff_ffff_ffff_f000);
            last.flags = MappingFlags::GROWS_DOWN;
            last.backing = Backing::Anonymous;
            i.spaces[0].mappings.push(last);
        }),
        ("a mapping of everything", |i| {
            let mut last = i.spaces[0].mappings.last().unwrap().clone();
            (last.start, last.end) = (last.end, 0xffff_ffff_ffff_f000);
            last.backing = Backing::Anonymous;
            i.spaces[0].mappings.push(last);
        }),
        ("a page of three bytes", |i| i.spaces[0].mappings[0].huge_page = 3),
        ("a key that nobody has", |i| i.spaces[0].mappings[0].pkey = u32::MAX),
        ("a mapping of the kernel that it does not make", |i| {
            i.spaces[0].mappings[0].backing = Backing::Special("[vdso2]".into());
        }),
        ("a layout of nonsense", |i| i.spaces[0].layout.start_stack = u64::MAX),
        ("memory without end", |i| {
            i.objects.push(MemoryObject { size: u64::MAX / 2, ..MemoryObject::default() });
        }),
        ("a memfd of too long a name", |i| {
            let memfd = Some(vec![b'x'; 5000].into());
            i.objects.push(MemoryObject { size: 4096, memfd, ..MemoryObject::default() });
        }),
        ("shared memory of huge pages that are none", |i| {
            i.objects.push(MemoryObject { size: 4096, huge_page: 1 << 63, ..MemoryObject::default() });
        }),
        ("a segment without end", |i| {
            let size = i64::MAX as u64 - 4095;
            let segment = Some(Segment { id: 1 << 30, size, ..Segment::default() });
            i.objects.push(MemoryObject { size, segment, ..MemoryObject::default() });
        }),
    ]);
}

/// Puts the program into this namespace.
fn into(image: &mut Image, namespace: Namespace) {
    image.namespaces.push(namespace);
    image.processes[0].namespaces.push(image.namespaces.len() as u32 - 1);
}

/// Puts the program into an IPC namespace with this in it.
fn into_ipc(image: &mut Image, change: fn(&mut Ipc)) {
    let mut ipc = Ipc::default();
    change(&mut ipc);
    into(image, Namespace::Ipc(ipc));
}

/// A network namespace with a request.
fn into_network_by(image: &mut Image, kind: u16, body: &[u8]) {
    into(
        image,
        Namespace::Network {
            up: true,
            steps: vec![NetworkStep::Request { kind, body: body.to_vec().into() }],
        },
    );
}

/// A network namespace with settings.
fn network(settings: &[(&str, &str)]) -> Namespace {
    let step = |(name, value): &(&str, &str)| NetworkStep::Setting {
        name: (*name).into(),
        value: value.as_bytes().to_vec().into(),
    };
    Namespace::Network { up: false, steps: settings.iter().map(step).collect() }
}

fn into_network(image: &mut Image, settings: &[(&str, &str)]) {
    into(image, network(settings));
}

fn set(id: i32, key: i32) -> SemaphoreSet {
    SemaphoreSet { common: SystemV { id, key, ..SystemV::default() }, values: vec![1] }
}

#[test]
fn namespaces() {
    refused(&[
        ("a host name with an end inside", |i| {
            i.namespaces.push(Namespace::Uts { host: b"a\0b".to_vec().into(), domain: Vec::new().into() });
            i.processes[0].namespaces.push(0);
        }),
        ("namespaces without end", |i| i.namespaces = vec![network(&[]); 100_000]),
        ("a namespace twice", |i| {
            i.namespaces.push(Namespace::Cgroup);
            i.processes[0].namespaces = vec![0; 100_000];
        }),
        ("a setting of the machine's", |i| {
            let name = "kernel/core_pattern".into();
            into_ipc(i, |_| ());
            let Some(Namespace::Ipc(ipc)) = i.namespaces.last_mut() else { return };
            ipc.settings.push(Setting { name, value: "1".into() });
        }),
        ("a setting of another folder", |i| {
            into_network(i, &[("../kernel/core_pattern", "|/bin/sh")]);
        }),
        ("a setting by another way", |i| {
            into_network(i, &[("ipv4/../../kernel/core_pattern", "|/bin/sh")]);
        }),
        ("a network setting of the machine's", |i| {
            into_network(i, &[("ipv4/ip_forward", "1\n"), ("netfilter/nf_hooks_lwtunnel", "1\n")]);
        }),
        ("a network setting of no value", |i| into_network(i, &[("ipv4/ip_forward", "yes\n")])),
        ("an interface that is new", |i| into_network_by(i, 16, &[0; 16])),
        ("an interface that goes elsewhere", |i| {
            // IFLA_NET_NS_PID
            let to_init = [8, 0, 19, 0, 1, 0, 0, 0];
            into_network_by(
                i,
                19,
                &[&[0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &to_init[..]].concat(),
            );
        }),
        ("a request that ends early", |i| into_network_by(i, 20, &[2, 8])),
        ("a route by a program", |i| {
            // RTA_ENCAP_TYPE
            let by = [6, 0, 21, 0, 6, 0, 0, 0];
            into_network_by(i, 24, &[&[2, 0, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0], &by[..]].concat());
        }),
        ("a route by a program of one of its ways", |i| {
            // RTA_MULTIPATH, struct rtnexthop, RTA_ENCAP_TYPE
            let by = [20, 0, 9, 0, 16, 0, 0, 0, 1, 0, 0, 0, 6, 0, 21, 0, 6, 0, 0, 0];
            into_network_by(i, 24, &[&[2, 0, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0], &by[..]].concat());
        }),
        ("a setting too high", |i| {
            into_ipc(i, |ipc| {
                let value = "9".repeat(60);
                ipc.settings.push(Setting { name: "kernel/msgmni".into(), value });
            });
        }),
        ("a set with a negative id", |i| into_ipc(i, |ipc| ipc.semaphores.push(set(-1, 0)))),
        ("sets with one key", |i| into_ipc(i, |ipc| ipc.semaphores.extend([set(0, 5), set(1, 5)]))),
        ("a message too long for its queue", |i| {
            into_ipc(i, |ipc| {
                let message = SystemVMessage { kind: -1, text: vec![b'x'; 1 << 20].into() };
                ipc.queues.push(SystemVQueue { messages: vec![message], ..SystemVQueue::default() });
            });
        }),
        ("a segment in no namespace", |i| {
            let segment = Some(Segment { size: 4096, namespace: Some(7), ..Segment::default() });
            i.objects.push(MemoryObject { size: 4096, segment, ..MemoryObject::default() });
        }),
    ]);
}

#[test]
fn files() {
    refused(&[
        ("a path with an end inside", |i| {
            let row = file(i);
            i.paths[row].path.0.push(0);
        }),
        ("no path", |i| {
            let row = file(i);
            i.paths[row].path.0.clear();
        }),
        ("a path that leads elsewhere", |i| {
            let row = file(i);
            i.paths[row].path.0.extend_from_slice(b"/../../../../etc/passwd");
        }),
        ("a path without end", |i| {
            let row = file(i);
            i.paths[row].path.0.extend_from_slice(&[b'x'; 10_000]);
        }),
        ("a deleted file without end", |i| {
            let row = file(i);
            (i.paths[row].deleted, i.paths[row].size) = (true, u64::MAX);
        }),
        ("a deleted socket", |i| {
            let row = file(i);
            (i.paths[row].deleted, i.paths[row].mode) = (true, 0o140_777);
        }),
        ("a deleted device that keeps something", |i| {
            let row = file(i);
            (i.paths[row].deleted, i.paths[row].mode, i.paths[row].rdev) = (true, 0o020_600, 0x0a82);
        }),
        ("a deleted disk", |i| {
            let row = file(i);
            (i.paths[row].deleted, i.paths[row].mode, i.paths[row].rdev) = (true, 0o060_600, 0x0103);
        }),
        ("a reader of a FIFO that is none", |i| {
            open_file(i).kind = FileKind::Pipe(i.pipes.len() as u32);
            i.pipes.push(Pipe { capacity: 4096, hung_up: Some(vec![u32::MAX]), ..Pipe::default() });
        }),
        ("a reader of a FIFO, of a pipe that is none", |i| {
            open_file(i).kind = FileKind::Pipe(i.pipes.len() as u32);
            i.pipes.push(Pipe { capacity: 4096, hung_up: Some(vec![0]), ..Pipe::default() });
        }),
        ("a socket that listens and has lost its peer", |i| {
            open_file(i).kind = FileKind::Socket(i.sockets.len() as u32);
            i.sockets.push(Socket {
                family: 1,
                kind: 1,
                listening: Some(5),
                orphan: true,
                ..Socket::default()
            });
        }),
        ("an offset below zero", |i| open_file(i).position = u64::MAX),
        ("a descriptor of no number", |i| i.tables[0].descriptors.last_mut().unwrap().fd = u32::MAX),
        ("a lock without a beginning", |i| {
            let lock =
                Lock { kind: LockKind::Ofd, exclusive: true, start: u64::MAX, end: Some(0), process: None };
            open_file(i).locks.push(lock);
        }),
        ("a pipe with more than it holds", |i| {
            open_file(i).kind = FileKind::Pipe(i.pipes.len() as u32);
            i.pipes.push(Pipe { capacity: 4096, data: vec![vec![1; 9000].into()], ..Pipe::default() });
        }),
        ("a socket of no family", |i| {
            open_file(i).kind = FileKind::Socket(i.sockets.len() as u32);
            i.sockets.push(Socket { family: 9999, kind: 9999, ..Socket::default() });
        }),
        ("a socket with too long a name", |i| {
            open_file(i).kind = FileKind::Socket(i.sockets.len() as u32);
            let local = vec![1; 4000].into();
            i.sockets.push(Socket {
                family: 1,
                kind: 1,
                local,
                listening: Some(u32::MAX),
                ..Socket::default()
            });
        }),
        ("a socket with options that are none", |i| {
            open_file(i).kind = FileKind::Socket(i.sockets.len() as u32);
            let options = vec![SocketOption { level: u32::MAX, name: u32::MAX, value: vec![].into() }];
            i.sockets.push(Socket { family: 2, kind: 1, options, ..Socket::default() });
        }),
        ("a message that nobody can send", |i| {
            open_file(i).kind = FileKind::Socket(i.sockets.len() as u32);
            let messages = vec![Message { sender: vec![9; 3000].into(), ..Message::default() }];
            i.sockets.push(Socket { family: 1, kind: 2, messages, ..Socket::default() });
        }),
        ("messages to itself alone", |i| {
            let own = i.sockets.len() as u32;
            open_file(i).kind = FileKind::Socket(own);
            let messages = vec![Message { files: vec![0; 253], ..Message::default() }];
            i.sockets.push(Socket { family: 1, kind: 1, peer: Some(own), messages, ..Socket::default() });
        }),
        ("a socket that waits for itself", |i| {
            let own = i.sockets.len() as u32;
            open_file(i).kind = FileKind::Socket(own);
            let pending = vec![own];
            i.sockets.push(Socket { family: 1, kind: 1, listening: Some(1), pending, ..Socket::default() });
        }),
        ("a watch of itself", |i| {
            let row = i.files.iter().position(|f| matches!(f.kind, FileKind::Path(_))).unwrap();
            let watch = EpollWatch { fd: 5, file: row as u32, ..EpollWatch::default() };
            i.files[row].kind = FileKind::Epoll(vec![watch; 3]);
        }),
        ("a watch of a number without end", |i| {
            open_file(i).kind =
                FileKind::Inotify(vec![InotifyWatch { wd: i32::MAX, mask: 2, path: i.processes[0].cwd }]);
        }),
        ("a watch of a number below zero", |i| {
            open_file(i).kind =
                FileKind::Inotify(vec![InotifyWatch { wd: -5, mask: 2, path: i.processes[0].cwd }]);
        }),
        ("a group of no kind", |i| {
            open_file(i).kind =
                FileKind::Fanotify(Fanotify { flags: !0, event_flags: !0, ..Fanotify::default() });
        }),
        ("a say in whether files are opened", |i| {
            let path = i.processes[0].cwd;
            let on = FanotifyPlace::FileSystem;
            let mark = FanotifyMark { on, path, mask: 0x1_0000, ..FanotifyMark::default() };
            open_file(i).kind =
                FileKind::Fanotify(Fanotify { flags: 4, marks: vec![mark], ..Fanotify::default() });
        }),
        ("a mark of a mount that is none", |i| {
            let path = i.processes[0].exe;
            let mark = FanotifyMark { on: FanotifyPlace::Mount, path, mask: !0, ..FanotifyMark::default() };
            open_file(i).kind = FileKind::Fanotify(Fanotify { marks: vec![mark], ..Fanotify::default() });
        }),
        ("a timer on no clock", |i| {
            open_file(i).kind = FileKind::Timer(TimerFd { clock: -77, ..TimerFd::default() });
        }),
        ("a timer of no time", |i| {
            let timer = TimerFd {
                clock: 1,
                remaining_ns: u64::MAX,
                interval_ns: u64::MAX,
                flags: !0,
                ..TimerFd::default()
            };
            open_file(i).kind = FileKind::Timer(TimerFd { expires_ns: Some(u64::MAX), ..timer });
            i.processes[0].threads[0].regs.0.clear();
        }),
        ("a process that is not there", |i| open_file(i).kind = FileKind::Pid(u32::MAX)),
        ("a queue without end", |i| {
            open_file(i).kind = FileKind::Queue(0);
            let name = format!("stillpoint-hostile-{}", i.processes[0].pid).into_bytes().into();
            i.queues.push(MessageQueue {
                name,
                maximum: u64::MAX,
                size: u64::MAX,
                ..MessageQueue::default()
            });
        }),
        ("a terminal of no number", |i| {
            open_file(i).kind = FileKind::PtySlave(0);
            i.ptys.push(Pty { number: u32::MAX, ..Pty::default() });
        }),
    ]);
}
