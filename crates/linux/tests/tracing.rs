//! What a tracer is told of threads that it holds.
#![allow(missing_docs, clippy::unwrap_used)]

use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::ptrace::{Seized, Stopped, Waited, on_a_thread_of_its_own, options};

fn stop(tid: u32) -> Stopped {
    let thread = Seized::seize(tid, options::SYSCALL_GOOD).unwrap();
    thread.interrupt().unwrap();
    match thread.wait().unwrap() {
        Waited::Stopped(stopped) => stopped,
        Waited::Ended(how) => panic!("thread {tid} has ended: {how:?}"),
    }
}

#[test]
fn the_end_of_a_main_thread_is_heard_of_while_another_one_is_held() {
    let script =
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start(); time.sleep(60)";
    let program = Command::new("python3").args(["-c", script]).stdin(Stdio::null()).spawn();
    let Ok(mut program) = program else { return eprintln!("skipped: there is no python3") };
    let pid = program.id();
    let began = Instant::now();
    while Proc::process(pid).and_then(|p| p.threads()).unwrap().len() < 2 {
        assert!(began.elapsed() < Duration::from_secs(60), "it has one thread only");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (tell, heard) = channel();
    std::thread::spawn(move || {
        let threads = Proc::process(pid).unwrap().threads().unwrap();
        let mut stopped: Vec<Stopped> = threads.into_iter().map(stop).collect();
        let main = stopped.swap_remove(stopped.iter().position(|s| s.tid() == pid).unwrap());
        let main = main.resume(0).unwrap();
        let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        let has_ended = matches!(main.wait().unwrap(), Waited::Ended(_));
        tell.send(has_ended).unwrap();
    });
    assert!(heard.recv_timeout(Duration::from_secs(60)).expect("it is heard of"));
    // The kernel lets go of all that a thread has traced when that ends.
    program.wait().unwrap();
}

#[test]
fn what_a_thread_held_can_be_held_by_the_next_one() {
    let mut program = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
    let pid = program.id();
    for _ in 0..500 {
        // It is let go of by nobody but the kernel.
        on_a_thread_of_its_own(|| stop(pid).tid()).expect("nobody else holds it");
    }
    program.kill().unwrap();
    program.wait().unwrap();
}
