//! What cannot be captured is refused by name, before anything is changed; bad targets get one clear sentence.

use rustix::fs::OFlags;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_tests::observe::Facts;
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Scratch, Target, kernel, right, right_eq, skipped, undisturbed_only, wait_for,
};

/// The checkpoint is refused with exit code 3 and one of the words; the program sees nothing of it.
#[track_caller]
fn refused(scenario: &str, words: &[&str]) {
    refused_of("refusals", scenario, words);
}

/// As [`refused`], of another program.
#[track_caller]
fn refused_of(program: &'static str, scenario: &str, words: &[&str]) {
    let scratch = Scratch::new();
    let target = Target::new(program, scenario, Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("held"), scratch.path());
    if let Some(why) = running.skip() {
        return skipped(&why);
    }
    if !undisturbed_only() {
        let stillpoint = scratch.stillpoint();
        let before = Facts::settled(running.pid);
        let output =
            stillpoint.run(&["checkpoint", &running.pid.to_string(), "--name", "held"]).fails(3, words);
        let differences = before.differences(&Facts::settled(running.pid));
        right!(differences.is_empty(), "a refusal changes nothing:\n{differences}{output}");
        right!(kernel::alive(running.pid));
        // Not with --kill either.
        stillpoint.run(&["checkpoint", &running.pid.to_string(), "--name", "held", "--kill"]).fails(3, words);
        right!(kernel::alive(running.pid), "a refusal kills nothing");
        assert_eq!(stillpoint.run(&["ls", "held", "--json"]).stdout.matches("\"id\"").count(), 0);
    }
    running.finish("after a refusal");
}

/// A program that is to be captured; nothing if there is nothing to do here.
fn held(scenario: &str) -> Option<(Scratch, Running)> {
    let scratch = Scratch::new();
    let target = Target::new("refusals", scenario, Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("held"), scratch.path());
    if let Some(why) = running.skip() {
        skipped(&why);
        return None;
    }
    if undisturbed_only() {
        running.finish("undisturbed");
        return None;
    }
    Some((scratch, running))
}

/// Either refused as above, or captured and right.
#[track_caller]
fn refused_or_right(scenario: &str) {
    let Some((scratch, mut running)) = held(scenario) else { return };
    let stillpoint = scratch.stillpoint();
    let output = stillpoint.run(&["checkpoint", &running.pid.to_string(), "--name", "held", "--kill"]);
    if output.code() == 3 {
        output.fails(3, &[]);
        running.finish("after a refusal");
        return;
    }
    output.ok();
    running.reap();
    let output = stillpoint.run(&["restore", "held", "--detach", "--json"]);
    if output.code() == 3 {
        output.fails(3, &[]);
        return;
    }
    let pid = output.ok().json()["pid"].as_u64().expect("pid") as u32;
    Running::restored(pid, running.directory()).finish("after restore");
}

macro_rules! refused {
    ($($name:ident: $($word:literal)*,)*) => {
        $(
            #[test]
            fn $name() {
                refused(stringify!($name), &[$($word),*]);
            }
        )*
    };
}

refused! {
    watched_mapping: "watches it",
    watched_and_gone: "watches it",
    connecting: "tcp" "data in the first packet",
    packet_ring: "PACKET_RX_RING",
    io_uring: "io_uring",
    foreign_table: "shares its descriptors",
    foreign_directory: "shares its current directory",
    foreign_segment: "segment" "shared with",
    foreign_pipe: "pipe" "is shared with process",
    bound_through_proc: "for the program alone",
    foreign_socket: "socket",
    foreign_terminal: "its slave /dev/pts/" "is open in process",
    foreign_memory: "shared memory" "shared with" "another process" "shares",
    foreign_memfd: "memfd" "shared with" "another process" "shares",
    foreign_pidfd: "pidfd",
    userfaultfd: "userfaultfd",
    no_room: "address space" "no room",
    perf_event: "perf",
    asked_for_permission: "fanotify" "asked for permission",
    unread_fanotify: "fanotify" "not yet read",
    fanotify_of_mounts: "fanotify" "FAN_REPORT_MNT",
    bpf: "bpf",
    told_queue: "mq_notify",
    full_queue: "holds 1 messages",
    semaphore_undo: "undone",
    out_of_band: "out-of-band",
    sent_ahead: "sent already",
    epoll_in_flight: "in a message",
    broken_lease: "lease",
    directory_notes: "F_NOTIFY",
    signed_tcp: "TCP_MD5SIG",
    half_a_datagram: "not complete",
    half_a_datagram6: "not complete",
    router_alert: "packets for routers",
    pressure_trigger: "PSI trigger",
    pressure_of_a_group: "PSI trigger",
    line_discipline: "line discipline",
    local_descriptors: "modify_ldt",
    own_segment: "set_thread_area",
    terminal_by_path: "O_PATH",
    watched_terminal: "inotify",
    process_keyring: "keyring of its own",
    thread_keyring: "thread" "keyring of its own",
    landlock: "Landlock domain",
    landlock_of_a_thread: "thread" "Landlock domain",
    two_names: "another one beside it",
}

/// A thread that can make no system call at all can make none for us either.
#[test]
fn calls_dispatched_from_everywhere() {
    refused_of("dispatch", "nowhere", &["PR_SET_SYSCALL_USER_DISPATCH"]);
}

#[test]
fn returns_dispatched_from_everywhere() {
    refused_of("dispatch", "no_way_home", &["PR_SET_SYSCALL_USER_DISPATCH"]);
}

/// What is asked about a descriptor is asked of somebody, also where nobody has it.
#[test]
fn watch_in_flight() {
    refused_of("unix", "watch_in_flight", &["in a message"]);
}

/// A FIFO that others have open is in nobody's way, as long as the program has itself what can be seen of them.
#[test]
fn fifos_that_others_have_open() {
    if undisturbed_only() {
        return;
    }
    let open = |name: &Path, reads: bool, writes: bool| {
        let mut options = OpenOptions::new();
        options
            .read(reads)
            .write(writes)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(name)
            .expect("the FIFO")
    };
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("descriptors", "fifo_in_common", Build::Dynamic).expect("cc");
    let directory = scratch.directory("held");
    let mut running = target.start(&directory, scratch.path());
    let pid = running.pid.to_string();
    let mut other = open(&directory.join("fifo"), true, true);
    // Who is to have what is in it?
    other.write_all(b"unread").expect("written");
    for kill in [&[][..], &["--kill"]] {
        let arguments = [&["checkpoint", &pid, "--name", "held"], kill].concat();
        stillpoint.run(&arguments).fails(3, &["either of them may read"]);
    }
    right!(kernel::alive(running.pid));
    other.read_exact(&mut [0; 6]).expect("read");
    stillpoint.checkpoint(running.pid, "held", &[]);
    stillpoint.checkpoint(running.pid, "held", &["--kill"]);
    running.reap();
    Running::restored(stillpoint.restore_detached("held", &[]), &directory)
        .finish("beside who has its FIFO open");
    drop(other);

    let (running, name) = {
        let target = Target::new("refusals", "fifo_reader", Build::Dynamic).expect("cc");
        let directory = scratch.directory("one end");
        (target.start(&directory, scratch.path()), directory.join("fifo"))
    };
    let checkpoint = ["checkpoint", &running.pid.to_string(), "--name", "end"];
    let reader = open(&name, true, false);
    stillpoint.run(&checkpoint).ok();
    let writer = open(&name, false, true);
    stillpoint.run(&checkpoint).ok();
    drop((reader, writer));
    running.finish("after a refusal");
}

/// What a program finds of a pipe whose other end was outside when that is said to be closed.
#[test]
fn pipes_to_processes_outside() {
    for (scenario, without_him) in [("outside_reader", "EPIPE"), ("outside_writer", "end")] {
        let Some((scratch, running)) = held(scenario) else { return };
        let (stillpoint, directory) = (scratch.stillpoint(), running.directory().to_owned());
        let seen = || std::fs::read_to_string(directory.join("seen")).unwrap_or_default();
        let pid = running.pid.to_string();
        let checkpoint = ["checkpoint", &pid, "--name", "held"];
        stillpoint.run(&checkpoint).ok();
        running.finish("after a checkpoint");
        for name in ["seen", "go"] {
            let _ = std::fs::remove_file(directory.join(name));
        }
        let restore = ["restore", "held", "--detach", "--json", "--pipes", "closed"];
        let told = stillpoint.run(&restore).ok().json();
        let pid = told["pid"].as_u64().expect("pid") as u32;
        Running::restored(pid, &directory).finish("restored");
        right_eq!(seen(), without_him, "{scenario}, restored");
    }
}

/// Nobody could open a file while it stands still, whatever that is for.
#[test]
fn a_program_that_is_asked_for_permission() {
    let scratch = Scratch::new();
    let target = Target::new("refusals", "asked_for_permission", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("asked"), scratch.path());
    if let Some(why) = running.skip() {
        return skipped(&why);
    }
    if !undisturbed_only() {
        let pid = running.pid.to_string();
        for command in ["snapshot", "fork"] {
            scratch.stillpoint().run(&[command, &pid]).fails(3, &["asked for permission"]);
        }
    }
    running.finish("after refusals");
}

/// It may be by then that it is brought back.
#[test]
fn a_program_that_is_asked_for_permission_later() {
    let scratch = Scratch::new();
    let target = Target::new("refusals", "asked_later", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("asked"), scratch.path());
    if !undisturbed_only() {
        let (pid, directory) = (running.pid.to_string(), running.directory().to_owned());
        scratch.stillpoint().run(&["snapshot", &pid]).ok();
        std::fs::write(directory.join("ask"), "").expect("ask");
        let answers = || ["asks", "cannot"].into_iter().find(|name| directory.join(name).exists());
        if wait_for("a group", Duration::from_secs(10), answers) == "cannot" {
            running.finish("undisturbed");
            return skipped("this kernel asks nobody");
        }
        for command in ["rollback", "snapshot"] {
            scratch.stillpoint().run(&[command, &pid]).fails(3, &["asked for permission"]);
        }
    }
    running.finish("after refusals");
}

/// Terminals have the same numbers, and names, in each devpts: somebody who has such a one has not that of the program.
#[test]
fn a_terminal_of_the_same_number_elsewhere() {
    let Some((scratch, mut running)) = held("terminal_elsewhere") else { return };
    let stillpoint = scratch.stillpoint();
    stillpoint.checkpoint(running.pid, "held", &["--kill"]);
    running.reap();
    let pid = stillpoint.restore_detached("held", &[]);
    Running::restored(pid, running.directory()).finish("after restore");
}

#[test]
fn a_namespace_that_somebody_outside_is_in() {
    refused_of("namespaces", "shared_outside", &["UTS namespace", "is not part of the program", "nsenter"]);
}

#[test]
fn memory_that_is_shared_and_cannot_be_again() {
    refused_of("sharers", "outside", &["shares its memory with the program"]);
    refused_of("sharers", "skipped", &["descendants whose memory they cannot have inherited"]);
    refused_of("sharers", "clocks", &["shares its memory", "time namespace"]);
}

#[test]
fn objects_of_another_ipc_namespace() {
    refused_of("namespaces", "full_queue", &["message queue /full", "holds 1 messages"]);
    refused_of("namespaces", "semaphore_undo", &["SEM_UNDO"]);
    refused_of("namespaces", "attached_before", &["from another IPC namespace"]);
}

#[test]
fn a_network_with_more_than_a_loopback_interface() {
    refused_of("namespaces", "sockets_of_two_networks", &["socket", "in another network namespace"]);
    refused_of("namespaces", "network_with_a_bridge", &["network namespace", "interface across"]);
}

#[test]
fn clocks_that_only_children_will_have() {
    refused_of("namespaces", "later_children", &["another time namespace"]);
}

#[test]
fn threads_in_different_namespaces() {
    refused_of("namespaces", "parted_threads", &["another uts namespace than the main thread"]);
}

#[test]
fn pid_namespaces_that_cannot_be_had_again() {
    let program = "pid_namespaces";
    refused_of(
        program,
        "somebody_else_is_in_it",
        &["pid namespace", "is not part of the program", "nsenter"],
    );
    refused_of(program, "can_have_no_children", &["whose process 1 has ended"]);
    refused_of(program, "thread_apart", &["another pid namespace than those of the main thread"]);
    refused_of(program, "handle_to_outside", &["a handle to a process outside of its pid namespace"]);
}

#[test]
fn mounts_that_cannot_be_made_again() {
    let program = "mount_namespaces";
    let why =
        ["mount namespace", "tmpfs on", "hidden by another mount", "ramfs on", "nowhere around the program"];
    refused_of(program, "hidden", &why);
    refused_of(program, "large", &["tmpfs on", "1024 MiB are in it"]);
    refused_of(program, "lent", &["mount namespace", "is not part of the program, has files open"]);
    refused_of(program, "in_two", &["tmpfs on", "mount namespace of process"]);
    refused_of(program, "in_its_own_proc", &["the file /proc/1", "mounted for itself"]);
    refused_of(program, "holds_another_proc", &["a file of another procfs"]);
    refused_of(program, "volatile_overlay", &["overlay on", "volatile nobody can mount it again"]);
    refused_of(program, "shows_what_was", &["merged/copied", "copied up in its overlay after it was mapped"]);
    // Whoever has mounted it may not open files by handles, so it has none.
    refused_of(program, "over_users", &["overlay on", "does not tell what it lies over"]);
    refused_of(program, "moved_overlay", &["overlay on", "there is more in it than in the directories"]);
}

macro_rules! refused_or_right {
    ($($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                refused_or_right(stringify!($name));
            }
        )*
    };
}

refused_or_right! {
    child_process,
    dead_child,
    established_tcp,
    pending_connection,
    netlink,
    aio,
    message_queue,
    own_descriptor_table,
    own_directory,
    in_flight,
    lease,
    unread_inotify,
    bound_udp,
    connected_udp,
    unbound_tcp,
    sealed_memory,
    droppable_memory,
    own_mounts,
    own_host_name,
}

// --- targets that are none

#[track_caller]
fn bad_target(target: &str, codes: &[i32], words: &[&str]) {
    let scratch = Scratch::new();
    let output = scratch.stillpoint().run(&["checkpoint", target, "--name", "bad"]);
    assert!(codes.contains(&output.code()), "expected one of {codes:?}: {output}");
    let code = output.code();
    output.fails(code, words);
}

#[test]
fn a_process_that_does_not_exist() {
    if undisturbed_only() {
        return;
    }
    bad_target("4194303", &[1, 2], &["4194303"]);
    bad_target("no-such-job", &[1, 2], &["no-such-job"]);
    bad_target("0", &[1, 2], &[]);
    bad_target("-1", &[1, 2], &[]);
    bad_target("99999999999999999999", &[1, 2], &[]);
    bad_target("../../etc", &[1, 2], &[]);
    bad_target("", &[1, 2], &[]);
}

#[test]
fn the_init_process() {
    if !undisturbed_only() {
        bad_target("1", &[1, 2, 3], &[]);
    }
}

#[test]
fn a_kernel_thread() {
    let thread =
        kernel::processes().into_iter().find(|&p| kernel::status(p, "Kthread").is_some_and(|k| k == "1"));
    let Some(thread) = thread else { return skipped("no kernel thread can be seen") };
    if !undisturbed_only() {
        bad_target(&thread.to_string(), &[1, 2], &["kernel thread"]);
    }
}

#[test]
fn a_zombie() {
    if undisturbed_only() {
        return;
    }
    let mut child = Command::new("true").spawn().expect("true");
    wait_for("a zombie", Duration::from_secs(60), || (kernel::state(child.id()) == Some('Z')).then_some(()));
    bad_target(&child.id().to_string(), &[1, 2], &["zombie", "ended", "exited"]);
    let scratch = Scratch::new();
    let snapshot = scratch.stillpoint().run(&["snapshot", &child.id().to_string()]);
    snapshot.fails(2, &["has ended"]);
    child.wait().expect("a zombie can still be waited for");
}

#[test]
fn ourselves() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    // The shell's exec makes $$ the process id of the command itself.
    let binary = stillpoint_tests::stillpoint::binary().display().to_string();
    let script =
        format!("exec {binary} checkpoint $$ --name self --store {}", scratch.path().join("s").display());
    let done = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).output().expect("sh");
    let said = String::from_utf8_lossy(&done.stderr).to_lowercase();
    assert!(matches!(done.status.code(), Some(1 | 2)), "{} {said}", done.status);
    assert!(said.contains("itself") || said.contains("ourselves") || said.contains("own process"), "{said}");
}

#[test]
fn a_32_bit_program() {
    let Some(target) = Target::new("files", "simple", Build::Bits32) else {
        return skipped("no 32-bit C library to build against (gcc-multilib)");
    };
    let scratch = Scratch::new();
    let running = target.start(&scratch.directory("small"), scratch.path());
    if !undisturbed_only() {
        let output = scratch.stillpoint().run(&["checkpoint", &running.pid.to_string(), "--name", "small"]);
        assert!(matches!(output.code(), 1..=3), "{output}");
        let code = output.code();
        output.fails(code, &["32-bit", "32 bit"]);
    }
    running.finish("after a refusal");
}

/// Something else traces the target already.
#[track_caller]
fn traced_by(tracer: &str, arguments: &[&str]) {
    if kernel::which(tracer).is_none() {
        return skipped(&format!("{tracer} is not installed"));
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let target = Target::new("files", "simple", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("traced"), scratch.path());
    let mut command = alone(tracer);
    command.args(arguments).arg("-p").arg(running.pid.to_string());
    let mut debugger = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a debugger");
    wait_for("the debugger to attach", Duration::from_secs(60), || {
        kernel::status(running.pid, "TracerPid").filter(|t| t != "0")
    });
    let output = scratch.stillpoint().run(&["checkpoint", &running.pid.to_string(), "--name", "traced"]);
    assert!(matches!(output.code(), 1 | 2), "{output}");
    let code = output.code();
    output.fails(code, &["trace", "debug"]);
    let _ = debugger.kill();
    let _ = debugger.wait();
    kernel::kill(running.pid, kernel::SIGCONT);
    running.finish("after a refusal");
}

#[test]
fn traced_by_strace() {
    traced_by("strace", &["-qq", "-o", "/dev/null"]);
}

#[test]
fn traced_by_gdb() {
    traced_by("gdb", &["-q", "-nx", "-ex", "continue"]);
}

#[test]
fn another_users_process() {
    if !kernel::is_root() || kernel::which("setpriv").is_none() {
        return skipped("needs to be root to become somebody else, and setpriv");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let target = Target::new("files", "simple", Build::Dynamic).expect("cc");
    let running = target.start(&scratch.directory("roots"), scratch.path());
    let arguments = ["checkpoint", &running.pid.to_string(), "--name", "roots"];
    let answer = scratch.stillpoint().run_as_nobody(&arguments);
    let code = answer.code();
    assert!(matches!(code, 1 | 2), "{answer}");
    answer.fails(code, &["permi", "privilege", "user"]);
    running.finish("after a refusal");
}

/// A program that job control stopped is captured as it is, and stays stopped until somebody lets it go on.
#[test]
fn a_stopped_program_stays_stopped() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("threads", "many", Build::Dynamic).expect("cc");
    let mut running = target.start(&scratch.directory("stopped"), scratch.path());
    kernel::kill(running.pid, rustix::process::Signal::STOP);
    kernel::stays_stopped(running.pid);
    stillpoint.checkpoint(running.pid, "stopped", &[]);
    kernel::stays_stopped(running.pid);
    stillpoint.checkpoint(running.pid, "stopped", &["--kill"]);
    running.reap();
    let pid = stillpoint.restore_detached("stopped", &[]);
    kernel::stays_stopped(pid);
    kernel::kill(pid, kernel::SIGCONT);
    Running::restored(pid, running.directory()).finish("after SIGCONT");
}
