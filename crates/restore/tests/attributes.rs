//! What a program made of itself is read from it, given to another one, and read again: it is the same.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use stillpoint_capture::Builder;
use stillpoint_capture::attributes::hidden::Hidden;
use stillpoint_capture::attributes::inside::{Asks, ProcessQuery, ThreadQuery};
use stillpoint_capture::attributes::thread::ThreadFiles;
use stillpoint_capture::attributes::{expiries, process as read_process, target, thread as read_thread};
use stillpoint_capture::home::Home;
use stillpoint_image::{AddressSpace, Bytes, Process, SeccompFilter};
use stillpoint_linux::inject::{Site, Stack, find_gadgets};
use stillpoint_linux::layout;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Outcome, Program};
use stillpoint_linux::ptrace::{Seized, Stopped, options};
use stillpoint_restore::attributes::{credentials, last, outside, process, thread};

struct Subject {
    child: Child,
    tids: Vec<u32>,
    _folder: tempfile::TempDir,
}

impl Drop for Subject {
    fn drop(&mut self) {
        // Not waited for: its threads are still traced by us, and would have to be waited for each on its own.
        let _ = self.child.kill();
    }
}

fn start(kind: &str) -> Subject {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("rich");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/rich.c");
    assert!(
        Command::new("cc").args(["-pthread", "-o"]).arg(&program).arg(source).status().unwrap().success()
    );
    let mut child = Command::new(&program).arg(kind).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let tids: Vec<u32> = line.split_whitespace().map(|t| t.parse().unwrap()).collect();
    assert_eq!(tids.len(), 3, "{line}");
    Subject { child, tids, _folder: folder }
}

/// All threads of a program, stopped, in which programs can be run.
struct Still {
    memory: &'static Memory,
    site: Site<'static>,
    threads: Vec<Option<Stopped>>,
    tids: Vec<u32>,
}

impl Still {
    fn new(subject: &Subject) -> Still {
        let pid = subject.child.id();
        let flags = options::SYSCALL_GOOD | options::SUSPEND_SECCOMP;
        let seized: Vec<_> = subject.tids.iter().map(|&t| Seized::seize(t, flags).unwrap()).collect();
        seized.iter().for_each(|s| s.interrupt().unwrap());
        let stop = |s: Seized| {
            let tid = s.tid();
            s.wait().unwrap().stopped(tid).unwrap()
        };
        let threads: Vec<Stopped> = seized.into_iter().map(stop).collect();
        let memory: &'static Memory = Box::leak(Box::new(Memory::open(pid).unwrap()));
        let maps = Proc::process(pid).unwrap().maps().unwrap();
        let code: Vec<_> = maps.iter().filter(|m| m.prot & 4 != 0).map(|m| (m.start, m.end)).collect();
        let gadgets = find_gadgets(memory, &code).unwrap();
        let stack = maps.iter().find(|m| m.name == b"[stack]").unwrap();
        let (sp, xstate) = (threads[0].regs().unwrap().sp(), threads[0].xstate().unwrap().len());
        let stack = Stack { start: stack.start, end: stack.end, sp };
        let site = Site::choose(memory, gadgets, stack, xstate, 1, 32768).unwrap();
        Still { memory, site, threads: threads.into_iter().map(Some).collect(), tids: subject.tids.clone() }
    }

    fn run(&mut self, index: usize, program: &Program) -> Outcome {
        assert_eq!(self.memory.pid(), self.tids[0]);
        // The site outlives each visit; it is only borrowed for it.
        let mut visit = self.site.visit(0, self.threads[index].take().unwrap()).unwrap();
        let outcome = self.site.run(&mut visit, program);
        self.threads[index] = Some(visit.leave().unwrap());
        outcome.unwrap()
    }

    fn thread(&self, index: usize) -> &Stopped {
        self.threads[index].as_ref().unwrap()
    }
}

/// Everything of a stopped program that attributes are.
fn read(still: &mut Still) -> (Process, AddressSpace) {
    let folder = Proc::process(still.tids[0]).unwrap();
    let (mut builder, home) = (Builder::new(), Home::default());
    let (stat, status) = (folder.stat().unwrap(), folder.status().unwrap());
    let mut p = read_process::process(&folder, &home, &stat, &status).unwrap();
    let mut space = read_process::space(&folder, &stat).unwrap();
    let timers = folder.timers().unwrap();
    let query = ProcessQuery::new(&folder.status().unwrap(), &timers, None, Asks::default());
    let outcome = still.run(0, query.program());
    query.decode(&outcome, &still.tids, &mut builder, &mut p, &mut space);
    let query = ThreadQuery::new(Hidden::default());
    for (i, tid) in still.tids.clone().into_iter().enumerate() {
        let look = ThreadFiles::open(folder.sibling(tid).unwrap()).unwrap().look().unwrap();
        let mut t = read_thread::thread(tid, &home, &look).unwrap();
        read_thread::stopped(&mut builder, still.thread(i), look.status.seccomp, &mut t).unwrap();
        let outcome = still.run(i, query.program());
        query.decode(&outcome, &mut t, &mut builder);
        t.pending = still.thread(i).pending(false).unwrap().into_iter().map(|s| Bytes(s.to_vec())).collect();
        p.threads.push(t);
    }
    p.pending = still.thread(0).pending(true).unwrap().into_iter().map(|s| Bytes(s.to_vec())).collect();
    let pending = folder.status().unwrap().shared_pending;
    let before = p.pending.len();
    read_thread::complete_pending(pending, &mut p.pending);
    assert_eq!(p.pending.len(), before);
    assert_eq!(builder.refusals, []);
    (p, space)
}

/// Gives the first program's description the second one's ids.
fn adopt(p: &mut Process, tids: &[u32]) {
    let old: Vec<u32> = p.threads.iter().map(|t| t.tid).collect();
    let new = |tid: u32| old.iter().position(|&t| t == tid).map_or(tid, |i| tids[i]);
    for timer in &mut p.timers {
        timer.tid = new(timer.tid);
        if timer.clock < 0 {
            let whose = !(timer.clock >> 3) as u32;
            timer.clock = !(new(whose) as i32) << 3 | timer.clock & 7;
        }
    }
    for (thread, tid) in p.threads.iter_mut().zip(tids) {
        thread.tid = *tid;
    }
    p.pid = tids[0];
    // Sessions and groups are for the one who makes the process.
    (p.leads_session, p.leads_group) = (false, false);
}

fn give(still: &mut Still, p: &Process, space: &AddressSpace) {
    assert_eq!(outside::missing(p, false).unwrap(), Vec::<String>::new());
    still.run(0, &process::huge_pages(space.thp_disable));
    still.run(0, &process::early(p, space));
    still.run(0, &process::layout(space, None));
    still.run(0, &process::settled(p, space));
    let timers = process::Timers::new(p).unwrap();
    let outcome = still.run(0, timers.program());
    timers.check(&outcome).unwrap();
    for i in 0..p.threads.len() {
        still.run(i, &thread::thread(&p.threads[i], space));
        outside::thread(still.tids[i], &p.threads[i]).unwrap();
    }
    for i in (0..p.threads.len()).rev() {
        let now = credentials::current(still.tids[i]).unwrap();
        if i == 0 {
            process::start_timers(p, |program| Ok::<_, std::convert::Infallible>(still.run(0, program)))
                .unwrap();
        }
        let conditions = last::Conditions { now, want: p.threads[i].creds.clone(), seccomp_suspended: true };
        still.run(i, &last::program(p, space, i, &conditions));
        last::verify(still.tids[i], &p.threads[i].creds).unwrap();
    }
    assert!(outside::process(still.tids[0], p, space, false).unwrap().is_empty());
}

/// Times go on while we look; within a minute they count as the same.
fn without_times(mut p: Process) -> Process {
    for t in &mut p.timers {
        t.remaining_ns = t.remaining_ns.next_multiple_of(60_000_000_000);
    }
    for t in &mut p.itimers {
        t.value_us = t.value_us.next_multiple_of(60_000_000);
    }
    p
}

#[test]
fn a_rich_programs_attributes_are_given_to_a_blank_one() {
    let rich = start("rich");
    let folder = target::find(rich.tids[0]).unwrap();
    let mut builder = Builder::new();
    target::examine(&mut builder, &folder, target::Others::All).unwrap();
    target::mappings(&mut builder, &folder, &folder.smaps().unwrap());
    assert_eq!(builder.refusals, []);
    let (mut p, space) = read(&mut Still::new(&rich));
    is_rich(&p, &space);

    let blank = start("blank");
    let mut still = Still::new(&blank);
    adopt(&mut p, &blank.tids);
    give(&mut still, &p, &space);
    let (again, space_again) = read(&mut still);
    assert_eq!(space_again, space);
    let (p, again) = (without_times(p), without_times(again));
    for (a, b) in p.threads.iter().zip(&again.threads) {
        assert_eq!(a, b);
    }
    assert_eq!(again, p);
}

/// As if timers had expired after the signals were read, and before the timers were.
#[test]
fn expiries_between_two_looks_are_found() {
    let ringing = start("ringing");
    let mut still = Still::new(&ringing);
    let (all, _) = read(&mut still);
    assert_eq!((all.pending.len(), all.threads[1].pending.len()), (3, 1), "{all:?}");
    let threads: Vec<Stopped> = still.threads.iter_mut().map(|thread| thread.take().unwrap()).collect();
    let in_any_order = |p: &Process| {
        let mut of_process: Vec<Vec<u8>> = p.pending.iter().map(|info| info.0.clone()).collect();
        of_process.sort();
        (of_process, p.threads[1].pending.clone())
    };
    let mut p = all.clone();
    p.pending.clear();
    p.threads[1].pending.clear();
    let before = p.clone();
    expiries::add(&threads, &mut p).unwrap();
    assert_eq!(in_any_order(&p), in_any_order(&all));
    // Nothing twice.
    expiries::add(&threads, &mut p).unwrap();
    assert_eq!(in_any_order(&p), in_any_order(&all));
    // What has time left has expired later; a periodic one has always.
    p = before;
    p.itimers[0].value_us = 1;
    p.timers.iter_mut().for_each(|timer| timer.remaining_ns = 1);
    expiries::add(&threads, &mut p).unwrap();
    let periodic = p.timers.iter().find(|timer| timer.interval_ns != 0).unwrap();
    assert_eq!((p.pending.len(), p.threads[1].pending.len()), (1, 0));
    assert_eq!(layout::expiry(&p.pending[0].0), Some((periodic.signal, periodic.id)));
}

#[test]
fn filters_of_all_threads_stay_one_chain() {
    // `ret ALLOW`, once plain and once logged.
    let allow = Bytes(
        [0x06u16, 0].iter().flat_map(|w| w.to_le_bytes()).chain(0x7fff_0000u32.to_le_bytes()).collect(),
    );
    let filters = [0, 2].map(|flags| SeccompFilter { program: allow.clone(), flags });
    let (mut p, space) = read(&mut Still::new(&start("blank")));
    for thread in &mut p.threads {
        thread.no_new_privs = true;
        thread.seccomp = filters.to_vec();
    }
    let blank = start("blank");
    let mut still = Still::new(&blank);
    adopt(&mut p, &blank.tids);
    give(&mut still, &p, &space);
    let (again, _) = read(&mut still);
    assert_eq!(again, p);
    // The program itself may go on to filter all its threads at once.
    let mut more = Program::new();
    let code = more.data(&allow.0);
    let head = more.data(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    more.link(head, 8, code);
    let step = more.call("seccomp for all threads", libc::SYS_seccomp, [1.into(), 1.into(), head]);
    assert_eq!(still.run(0, &more).result(step), 0);
    assert!(read(&mut still).0.threads.iter().all(|t| t.seccomp.len() == 3));
}

/// The reading is not empty-handed.
fn is_rich(p: &Process, space: &AddressSpace) {
    assert!(p.leads_session && p.leads_group && p.child_subreaper && !p.foreground);
    assert_eq!((p.umask, p.oom_score_adj, space.coredump_filter), (0o27, 100, 7));
    assert_eq!((space.personality, space.thp_disable, space.mdwe, space.dumpable), (0x40000, 1, 1, 0));
    assert!(space.memory_merge && space.membarrier == 16 && space.layout.brk > space.layout.start_brk);
    let signals: Vec<_> = p.actions.iter().map(|a| a.signal as i32).collect();
    assert!(signals.starts_with(&[libc::SIGUSR1, libc::SIGPIPE, libc::SIGCHLD]), "{signals:?}");
    assert_eq!(p.pending.len(), 3);
    let files = p.rlimits.iter().find(|l| l.resource == 7).unwrap();
    assert_eq!((files.soft, files.hard), (500, 900));
    assert_eq!(p.timers.iter().map(|t| t.id).collect::<Vec<_>>(), [12, 25, 38, 40, 41, 42]);
    assert!(p.timers.iter().any(|t| t.clock < 0) && p.timers.iter().any(|t| t.tid == p.threads[1].tid));
    let armed = p.timers.iter().filter(|t| t.interval_ns == 7_000_000_008 && t.remaining_ns > 0).count();
    assert_eq!((armed, p.itimers[0].interval_us, p.itimers[1].value_us), (3, 5_000_006, 0));

    let [_, one, two] = &p.threads[..] else { panic!() };
    assert_eq!(
        (one.name.0.as_slice(), one.sched.nice, one.ioprio),
        (b") Z 1 \n(".as_slice(), 5, 2 << 13 | 6)
    );
    assert_eq!((one.timer_slack_ns, one.tsc, one.pdeath_signal), (12345, 2, libc::SIGUSR2 as u32));
    assert_eq!((one.altstack.size, one.altstack.flags, one.sched.affinity.0[0]), (1 << 16, 0, 1));
    assert_eq!((one.creds.uid, one.creds.gid), ([1004, 1005, 1006, 1004], [1001, 1002, 1003, 1002]));
    assert_eq!(one.creds.groups, [5, 7, 70000]);
    assert_eq!(one.creds.caps[..3], [1 << 13 | 1 << 22, 1 << 13 | 1, 1]);
    assert_eq!((one.creds.caps[4], one.creds.caps[3] & 1 << 22), (1 << 13, 0));
    assert_eq!(one.creds.securebits, 1 | 2 | 1 << 6);
    assert!(one.no_new_privs && one.seccomp.len() == 2 && one.seccomp[0].program.0.len() == 32);
    assert_eq!((one.seccomp[0].flags, one.pending.len()), (2, 2));
    assert_eq!((two.sched.policy, two.sched.priority, two.sched.nice), (1, 10, 3));
    assert_eq!((two.sched.flags, two.timer_slack_ns), (1, 0));
    assert!(two.seccomp.is_empty() && !two.no_new_privs && two.robust_list.len == 24);
    assert!(two.clear_child_tid != 0);
}
