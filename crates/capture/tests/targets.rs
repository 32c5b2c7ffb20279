//! What cannot be a target is told in one clear sentence, what cannot be captured by name.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use stillpoint_capture::attributes::target;
use stillpoint_capture::{Builder, Error};
use stillpoint_linux::proc::Proc;

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Starts a program and waits for its first line.
    fn start(command: &mut Command) -> (Running, String) {
        let mut child = Running(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (child, line)
    }
}

fn python(code: &str) -> (Running, u32) {
    let (child, line) = Running::start(Command::new("python3").args(["-c", code]));
    (child, line.trim().parse().unwrap())
}

fn sentence(pid: u32) -> String {
    match target::find(pid) {
        Err(Error::Target(sentence)) => sentence,
        other => panic!("{other:?}"),
    }
}

/// Refusals of a process as lines.
fn refusals(pid: u32) -> Vec<String> {
    let folder = target::find(pid).unwrap();
    let mut builder = Builder::new();
    target::examine(&mut builder, &folder, target::Others::All).unwrap();
    target::mappings(&mut builder, &folder, &folder.smaps().unwrap());
    builder.refusals.iter().map(ToString::to_string).collect()
}

#[test]
fn what_cannot_be_a_target() {
    assert!(sentence(std::process::id()).contains("is stillpoint itself"));
    assert!(sentence(0).contains("there is no process 0"));
    assert!(sentence(u32::MAX).contains("there is no process"));
    let kthread = Proc::process(2).and_then(|p| p.status());
    if kthread.is_ok_and(|s| s.kthread) {
        assert!(sentence(2).contains("is a kernel thread"));
    }
    let (_z, zombie) = python(
        "import os,time\np=os.fork()\nif p==0: os._exit(3)\nos.waitid(os.P_PID,p,os.WEXITED|os.WNOWAIT)\nprint(p,flush=True)\ntime.sleep(99)",
    );
    assert!(sentence(zombie).contains("zombie"), "{}", sentence(zombie));
    let code = "import threading,time\nt=threading.Thread(target=lambda:time.sleep(99))\nt.start()\nprint(t.native_id,flush=True)\ntime.sleep(99)";
    let (_t, tid) = python(code);
    assert!(sentence(tid).contains("is a thread of process"), "{}", sentence(tid));
    let code = "import ctypes,os,time\np=os.fork()\nif p==0: time.sleep(99)\nassert ctypes.CDLL(None).ptrace(0x4206,p,0,0)==0\nprint(p,flush=True)\ntime.sleep(99)";
    let (tracer, traced) = python(code);
    let expected = format!("is traced by process {} (python3) already", tracer.0.id());
    assert!(sentence(traced).contains(&expected), "{}", sentence(traced));
    let _ = Command::new("kill").args(["-9", &traced.to_string()]).status();
}

#[test]
fn a_32_bit_program() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("p.s"), folder.path().join("p"));
    std::fs::write(&source, ".globl _start\n_start: mov $29, %eax\n int $0x80\n jmp _start\n").unwrap();
    let built =
        Command::new("cc").args(["-m32", "-nostdlib", "-static", "-o"]).arg(&program).arg(&source).status();
    let Ok(child) = Command::new(&program).spawn() else {
        eprintln!("skipped: no 32-bit programs here ({built:?})");
        return;
    };
    let child = Running(child);
    assert!(sentence(child.0.id()).contains("is a 32-bit program"), "{}", sentence(child.0.id()));
}

#[test]
fn an_ordinary_program_is_not_refused() {
    let code = "import threading,time,os\nthreading.Thread(target=lambda:time.sleep(99)).start()\nprint(os.getpid(),flush=True)\ntime.sleep(99)";
    let (_child, pid) = python(code);
    assert_eq!(refusals(pid), Vec::<String>::new());
}

#[test]
fn another_namespace() {
    let (child, line) =
        Running::start(Command::new("unshare").args(["-u", "sh", "-c", "echo ready; exec sleep 99"]));
    if line.is_empty() {
        eprintln!("skipped: no unshare here");
        return;
    }
    let all = refusals(child.0.id());
    assert!(all.len() == 1 && all[0].starts_with("uts namespace: the program is in another one"), "{all:?}");
}

#[test]
fn an_odd_program_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("odd");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/odd.c");
    assert!(
        Command::new("cc").args(["-pthread", "-o"]).arg(&program).arg(source).status().unwrap().success()
    );
    let (child, line) = Running::start(&mut Command::new(&program));
    let all = refusals(child.0.id());
    let has =
        |a: &str, b: &str| assert!(all.iter().any(|r| r.contains(a) && r.contains(b)), "{a}, {b}: {all:#?}");
    has("(apart)", "does not share its descriptors");
    assert!(!all.iter().any(|r| r.contains("CLONE_FS")), "its directories are its own: {all:#?}");
    has("mapping", "userfaultfd");
    if line.contains("secret") {
        has("secretmem", "memfd_secret");
    }
    if line.contains("mem ") {
        has("/dev/mem", "memory of a device");
    }
    assert!(
        !all.iter().any(|r| r.contains("a child")
            || r.contains("/dev/zero")
            || r.contains("/SYSV")
            || r.contains("vvar")),
        "{all:#?}"
    );
    eprintln!("{line}{all:#?}");
}

/// A main thread that ended alone is refused; one that ended with all the others is the end of the process.
#[test]
fn a_main_thread_that_ended() {
    let code = "import ctypes,os,threading,time\nthreading.Thread(target=time.sleep,args=(99,)).start()\n\
                print(os.getpid(),flush=True)\nctypes.CDLL(None).pthread_exit(None)";
    let (mut child, pid) = python(code);
    let process = Proc::process(pid).unwrap();
    while process.stat().unwrap().state != b'Z' {
        std::thread::yield_now();
    }
    let mut builder = Builder::new();
    target::leader_ended_for_good(&mut builder, &process).unwrap();
    assert!(builder.refusals[0].to_string().contains("other threads go on"), "{:?}", builder.refusals);
    assert!(!target::has_ended(pid));
    child.0.kill().unwrap();
    assert!(target::has_ended(pid));
    let ended = target::leader_ended_for_good(&mut Builder::new(), &process).unwrap_err();
    assert!(ended.to_string().contains("ended"), "{ended}");
}

/// A process of the tree is traced by somebody else when all are to be stopped: nobody stays stopped, while the thread that tried lives.
#[test]
fn who_cannot_be_stopped_together_runs_on() {
    let (_child, other) = python("import os,sys\np=os.fork()\nif p: print(p,flush=True)\nwhile True: pass");
    let root = Proc::process(other).unwrap().stat().unwrap().ppid;
    let found = stillpoint_capture::herd::find(root).unwrap();
    assert_eq!(found.len(), 2);
    let (say, hear) = std::sync::mpsc::channel::<()>();
    let (said, heard) = std::sync::mpsc::channel::<()>();
    let tracer = std::thread::spawn(move || {
        let _traced = stillpoint_linux::ptrace::Seized::seize(other, 0).unwrap();
        said.send(()).unwrap();
        let _ = hear.recv();
    });
    heard.recv().unwrap();
    assert!(stillpoint_capture::herd::FrozenTree::freeze(&found, 2, &[]).is_err());
    let folder = Proc::process(root).unwrap();
    assert_eq!((folder.status().unwrap().tracer, folder.stat().unwrap().state), (0, b'R'));
    drop(say);
    tracer.join().unwrap();
    // And so it can be stopped.
    drop(stillpoint_capture::herd::FrozenTree::freeze(&found, 2, &[]).unwrap());
    std::process::Command::new("kill").args(["-9", &other.to_string()]).status().unwrap();
}
