//! Making the processes of a tree: who is whose child, in which session and process group, and who has ended already.
//!
//! All descend from the root, each made by its parent with its old id, as a copy of a process that has nothing but the area
//! for remote programs. What the kernel lets nobody change later is right from birth:
//!
//! 1. Children in a session whose leader has ended are made by somebody who begins that session for the moment, as children
//!    of the stand-in's parent.
//! 2. A process that began a session makes those of its children first that are in the session it was in before.
//! 3. It begins its session, and takes its controlling terminal, which children inherit.
//! 4. It makes its other children. Those that share its descriptors or directories are made sharing them; if it does not
//!    share them itself in the end, it leaves them to its children ([`tree::steps`] has the order).
//!    Those that share memory are made sharing it, by one of them, while there is nothing in it but that area: it lies at the
//!    same place in all, and one of us at a time works with it.
//! 5. When all are there, process groups are joined. A group whose leader has ended gets one for the moment.
//! 6. Children that had ended end.
//!
//! Children of a thread that is not the main one are made by that thread, which therefore is there before all else.
//!
//! Whoever is in pid namespaces of the program's own is made with an id in each. Process 1 of one is made with the namespace; for
//! others their parent lets its children be in it for the moment (`setns`). Groups that have no id there are joined before, and
//! inherited. Where more ids are to be chosen than `clone3` takes, the outermost is left to the kernel, which gives the next that is
//! free: it is told where to go on, and whoever gets another one is buried.
//!
//! All are traced from birth, and killed with us.
//!
//! Where the program is to run beside itself in one pid namespace ([`Pids::anew`]), whoever is made gets whatever id the kernel gives him.
//! Who is called what is told in the end, and all threads are made for it; until then names are looked up one by one.

use crate::attributes::process as of_process;
use crate::files::OpenFiles;
use crate::groups::Joining;
use crate::heritage::Heritage;
use crate::{Error, Result, burial};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use stillpoint_image::anew::{Renamed, renamed};
use stillpoint_image::pids::{DEEPEST, Pids, namespace_of};
use stillpoint_image::tree::{self, Child, Context, Memory as Begins, Step};
use stillpoint_image::users::{born_in, chosen, first_in, users_of};
use stillpoint_image::{Ended, Image, Namespace, Process, Thread};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::messenger;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::ptrace::{Seized, Stopped, Waited, options as trace};
use stillpoint_linux::remote::{Area, Remote};
use stillpoint_linux::spawn::{self, CloneArgs, Shell};
use stillpoint_linux::{layout, tty};

/// Processes that are killed and reaped unless they get to live.
pub(crate) struct Nursery {
    root: Option<Shell>,
    /// Its descendants, in our pid namespace, in the order in which they were made.
    others: RefCell<Vec<u32>>,
    /// Their seccomp filters do not apply while we live.
    pub seccomp_suspended: bool,
}

impl Nursery {
    /// Makes the root, a copy of ours with its ids.
    pub fn open(image: &Image, pids: &Pids<'_>) -> Result<Self> {
        let pid = image.processes[0].pid;
        let flags = if pids.is_first(pid) { libc::CLONE_NEWPID as u64 } else { 0 };
        let ids = pids.all(pid);
        let made = burial::until_free(|| pid, || spawn::shell(&ids, flags), is_taken, pids.are_deepest());
        let root = Some(made.map_err(|e| refused(pid, e))?);
        Ok(Nursery { root, others: RefCell::default(), seccomp_suspended: true })
    }

    /// The root's id in our pid namespace.
    pub fn pid(&self) -> u32 {
        self.root.as_ref().map_or(0, |s| s.pid)
    }

    /// Brings the root to rest, ours and with us to die, as will be all that it makes.
    pub fn seize(&mut self) -> Result<Stopped> {
        let options = trace::SYSCALL_GOOD | trace::TRACE_CLONE | trace::TRACE_FORK | trace::EXIT_KILL;
        let seized = match Seized::seize(self.pid(), options | trace::SUSPEND_SECCOMP) {
            Ok(seized) => seized,
            Err(_) => {
                self.seccomp_suspended = false;
                Seized::seize(self.pid(), options)?
            }
        };
        seized.interrupt()?;
        Ok(seized.wait()?.stopped(self.pid())?)
    }

    /// They get to live.
    pub fn leave(&mut self) -> Option<Shell> {
        self.others.borrow_mut().clear();
        self.root.take()
    }
}

impl Drop for Nursery {
    fn drop(&mut self) {
        let Some(root) = self.root.take() else { return };
        let others = std::mem::take(&mut *self.others.borrow_mut());
        for &pid in others.iter().rev() {
            let _ = spawn::tgkill(pid, pid, libc::SIGKILL);
        }
        let _ = rustix::process::pidfd_send_signal(&root.pidfd, rustix::process::Signal::KILL);
        // Those whose parent has gone first are buried by whoever buries orphans, once we have seen their ends. If that is us, process
        // 1 of a pid namespace in which they were may wait for it.
        let all: Vec<u32> = others.iter().rev().chain([&root.pid, &std::process::id()]).copied().collect();
        let mut left = all[..all.len() - 1].to_vec();
        let start = Instant::now();
        while !left.is_empty() && start.elapsed() < PATIENCE {
            let ours = |parent: Option<u32>| parent.is_none_or(|parent| all.contains(&parent));
            left.retain(|&pid| spawn::reap_now(pid).is_some_and(ours));
            if !left.is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// How long processes that were killed may take to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whether an id was not to be had.
pub(crate) fn is_taken(e: &stillpoint_linux::Error) -> bool {
    e.errno() == Some(libc::EEXIST)
}

/// The kernel came to another id than this one.
fn passed_over(id: u32) -> stillpoint_linux::Error {
    stillpoint_linux::Error::call(format!("come to id {id}"), std::io::Error::from_raw_os_error(libc::EEXIST))
}

/// Ids are lower than this, as far as that is told.
fn highest() -> u32 {
    let told = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok();
    told.and_then(|told| told.trim().parse().ok()).unwrap_or(u32::MAX)
}

fn refused(pid: u32, e: stillpoint_linux::Error) -> Error {
    match e.errno() {
        Some(libc::EEXIST) => Error::PidTaken(pid),
        Some(libc::EINVAL) if pid >= highest() => Error::PidTooHigh(pid),
        Some(libc::EPERM) => Error::NoPidPrivilege(pid),
        Some(libc::ENOSPC) => Error::TooDeep(pid),
        _ => e.into(),
    }
}

/// Making a tree.
pub(crate) struct Family<'a, 'i, 't> {
    image: &'i Image,
    nursery: &'a Nursery,
    /// Room for the memories of all: those of the image's processes by row, then the others.
    memories: &'a [OnceCell<Memory>],
    used: usize,
    /// Main threads, by row.
    members: Vec<Option<Remote<'a>>>,
    /// The other threads of those processes in which others than the main thread have children, by row.
    threads: HashMap<usize, Vec<Remote<'a>>>,
    ended: Vec<(usize, Ended, Remote<'a>)>,
    /// Those that lead a session or process group for the moment, by their parents' rows.
    stand_ins: Vec<StandIn<'a>>,
    /// Slaves of pseudo-terminals that control a session, by row, and namespaces.
    open: &'t OpenFiles,
    /// What children have in common with their parents.
    heritage: &'t Heritage<'t>,
    groups: Joining<'i>,
    notes: Vec<String>,
    pids: &'t Pids<'i>,
    /// Who has got another id.
    renamed: Renamed,
    /// Groups that are led as soon as their leaders are there.
    from_birth: BTreeSet<u32>,
}

/// A leader who has ended, for as long as members are made.
struct StandIn<'a> {
    parent: usize,
    id: u32,
    exit_signal: Option<u32>,
    remote: Remote<'a>,
}

/// The processes of a tree, made.
pub(crate) struct Made<'a> {
    /// Their main threads, by row.
    pub main: Vec<Remote<'a>>,
    /// The other threads of those that have them already, by row.
    pub threads: HashMap<usize, Vec<Remote<'a>>>,
    /// What could not be done about them.
    pub notes: Vec<String>,
    /// Their new ids, if they have others than they had.
    pub renamed: Option<Renamed>,
}

/// How many memories a tree needs room for.
pub(crate) fn room_for(image: &Image) -> usize {
    let ended: usize = image.processes.iter().map(|p| p.ended().len()).sum();
    image.processes.len() + ended + tree::lost_leaders(image).len() + leading_in(image).count()
}

/// Pid namespaces that belong to user namespaces: whoever makes process 1 of one is there for that alone.
fn leading_in(image: &Image) -> impl Iterator<Item = u32> {
    let rows = 0..image.namespaces.len() as u32;
    rows.filter(|row| {
        matches!(image.namespaces[*row as usize], Namespace::Pid { .. })
            && born_in(image, Some(*row)).is_some()
    })
}

/// All ids that a tree needs.
pub(crate) fn ids(image: &Image) -> Vec<u32> {
    let threads = image.processes.iter().flat_map(|p| p.threads.iter().map(|t| t.tid));
    let ended = image.processes.iter().flat_map(|p| p.ended().iter().map(|e| e.pid));
    threads.chain(ended).chain(tree::lost_leaders(image)).collect()
}

impl<'a, 'i, 't> Family<'a, 'i, 't> {
    /// Makes all processes; returns their main threads, by row, and the other threads of those that had to have them by now.
    /// `root` is that of the root, which has nothing but the area of
    /// remote programs; `open`: descriptors of our own table, of which all have copies.
    pub fn make(
        image: &'i Image,
        nursery: &'a Nursery,
        memories: &'a [OnceCell<Memory>],
        root: Remote<'a>,
        open: &'t OpenFiles,
        heritage: &'t Heritage<'t>,
        pids: &'t Pids<'i>,
    ) -> Result<Made<'a>> {
        let members = image.processes.iter().map(|_| None).collect();
        let not_inherited = |tree::NotInherited { row, what }| {
            let pid = image.processes[row].pid;
            Error::Failed(format!("the children of process {pid} cannot have their {} from it", what.name()))
        };
        let steps = tree::steps(image).map_err(not_inherited)?;
        let (threads, ended, stand_ins) = (HashMap::new(), Vec::new(), Vec::new());
        let (from_birth, mut renamed) = (tree::groups_from_birth(image), Renamed::new());
        if pids.are_new() {
            renamed.insert(image.processes[0].pid, root.tid());
        }
        #[rustfmt::skip]
        let mut family = Family {
            image, nursery, memories, used: 1, members, threads, ended, stand_ins, open, heritage,
            groups: Joining::new(image), notes: Vec::new(), pids, renamed, from_birth,
        };
        let mut root = root;
        if heritage.is_any() {
            root.run(&of_process::huge_pages(1))?; // all that are made of it have this, too
        }
        family.raise(&steps, 0, root)?;
        family.group()?;
        family.bring_to_foreground()?;
        family.end()?;
        if pids.are_new() {
            family.complete()?;
        }
        let main = family.members.into_iter().collect::<Option<Vec<_>>>();
        let main = main.ok_or_else(|| Error::Failed("a process has no parent".into()))?;
        let renamed = pids.are_new().then_some(family.renamed);
        let notes = family.groups.notes.into_iter().chain(family.notes).collect();
        Ok(Made { main, threads: family.threads, notes, renamed })
    }

    /// Makes all threads that there are not yet, so that all are known by their new ids.
    fn complete(&mut self) -> Result<()> {
        for (row, process) in self.image.processes.iter().enumerate() {
            if self.threads.contains_key(&row) || process.threads.len() == 1 {
                continue;
            }
            let Some(mut leader) = self.members[row].take() else { continue };
            let made = others(self.image, leader.memory(), &mut leader, process, self.pids);
            self.members[row] = Some(leader);
            let made = made?;
            self.rename_threads(process, &made);
            self.threads.insert(row, made);
        }
        Ok(())
    }

    fn rename_threads(&mut self, process: &Process, made: &[Remote<'_>]) {
        if self.pids.are_new() {
            let ids = process.threads.iter().skip(1).map(|thread| thread.tid);
            self.renamed.extend(ids.zip(made.iter().map(Remote::tid)));
        }
    }

    /// What one of the program is called by now, who is called `name` where it is wanted.
    fn now(&self, name: u32) -> u32 {
        renamed(&self.renamed, name)
    }

    /// Makes the descendants of a process.
    fn raise(&mut self, steps: &[Vec<Step>], row: usize, mut remote: Remote<'a>) -> Result<()> {
        let process = &self.image.processes[row];
        // What it takes from here on counts there.
        self.groups.join(row, remote.tid());
        // All that are made of it have the same.
        let note = self.log_in(process, &mut remote)?;
        let note = note.filter(|note| !self.notes.contains(note));
        self.notes.extend(note);
        self.heritage.leave(row, &mut remote)?;
        let own = namespace_of(self.image, process);
        let mut born = Vec::new();
        let mut threads = match has_children_of_threads(self.image, row) {
            true => others(self.image, remote.memory(), &mut remote, process, self.pids)?,
            false => Vec::new(),
        };
        self.rename_threads(process, &threads);
        if row == 0 {
            self.lead_at_once(process.pid, process.own_group(), process.own_session(), &mut remote)?;
        }
        for step in &steps[row] {
            match *step {
                Step::BeginSession => self.begin_session(process, &mut remote)?,
                Step::JoinGroup => {
                    if let Some(group) = process.own_group() {
                        self.join(own, group, &mut remote)?;
                    }
                }
                Step::Leave(context) => leave(&mut remote, context)?,
                Step::StandIn { session, ended, exit_signal } => {
                    let mut made = self.bear(&mut remote, own, session, 0, exit_signal)?;
                    made.run(&begin_session())?;
                    match ended {
                        Some(place) => self.ended.push((row, process.ended()[place].clone(), made)),
                        None => self.stand_ins.push(StandIn {
                            parent: row,
                            id: session,
                            exit_signal,
                            remote: made,
                        }),
                    }
                }
                Step::Bear { child, shares, memory, sibling, by } => {
                    let (pid, exit_signal, thread) = match child {
                        Child::Living(child) => {
                            let child = &self.image.processes[child];
                            (child.pid, child.exit_signal, child.parent_thread)
                        }
                        Child::Ended(place) => {
                            let ended = &process.ended()[place];
                            (ended.pid, ended.exit_signal, ended.parent_thread)
                        }
                    };
                    let place = process.threads.iter().skip(1).position(|t| Some(t.tid) == thread);
                    let parent = place.and_then(|place| threads.get_mut(place)).unwrap_or(&mut remote);
                    let mut made = match by {
                        None if sibling => {
                            let flags = sharing(shares, memory) | libc::CLONE_PARENT as u64;
                            self.bear(parent, own, pid, flags, Some(0))?
                        }
                        None => self.bear(parent, own, pid, sharing(shares, memory), exit_signal)?,
                        Some(session) => self.bear_by(session, pid)?,
                    };
                    match child {
                        Child::Living(child) => {
                            self.heritage.renounce(child, &mut made)?;
                            let of = &self.image.processes[child];
                            self.lead_at_once(pid, of.own_group(), of.own_session(), &mut made)?;
                            born.push((child, made));
                        }
                        Child::Ended(place) => {
                            let of = &process.ended()[place];
                            self.lead_at_once(pid, of.group, of.session, &mut made)?;
                            self.keep_ended(row, of.clone(), made)?;
                        }
                    }
                }
            }
        }
        self.members[row] = Some(remote);
        if !threads.is_empty() {
            self.threads.insert(row, threads);
        }
        for (child, remote) in born {
            self.raise(steps, child, remote)?;
        }
        Ok(())
    }

    /// Lets a process belong to the login that it was of; with a remark if that cannot be.
    fn log_in(&self, process: &Process, remote: &mut Remote<'a>) -> Result<Option<String>> {
        let Some(wanted) = process.login_uid else { return Ok(None) };
        let folder = Proc::process(remote.tid())?;
        if folder.login_uid()?.is_none_or(|now| now == wanted) {
            return Ok(None);
        }
        // In a user namespace of its own it would be told by another number.
        if born_in(self.image, namespace_of(self.image, process)).is_none() {
            let mut program = Program::new();
            messenger::try_to_write(&mut program, b"/proc/self/loginuid", wanted.to_string().as_bytes());
            remote.run(&program)?;
        }
        let called = |uid: u32| if uid == u32::MAX { "none".into() } else { uid.to_string() };
        let remark = |now: u32| {
            format!("its login uid was {}, and is {} now (CAP_AUDIT_CONTROL)", called(wanted), called(now))
        };
        Ok(folder.login_uid()?.filter(|now| *now != wanted).map(remark))
    }

    fn keep_ended(&mut self, row: usize, ended: Ended, mut made: Remote<'a>) -> Result<()> {
        if ended.session == Some(ended.pid) {
            made.run(&begin_session())?;
        }
        self.ended.push((row, ended, made));
        Ok(())
    }

    /// Makes a process in the session of somebody who began it for the moment, as a child of that one's parent; the signal to the
    /// parent is the same.
    fn bear_by(&mut self, session: u32, pid: u32) -> Result<Remote<'a>> {
        let (mut stand_ins, mut ended) =
            (std::mem::take(&mut self.stand_ins), std::mem::take(&mut self.ended));
        let leads = stand_ins.iter_mut().find(|s| s.id == session).map(|s| &mut s.remote);
        let leads =
            leads.or_else(|| ended.iter_mut().find(|(_, e, _)| e.pid == session).map(|(.., remote)| remote));
        let made = match leads {
            Some(leader) => {
                let maker = self.pids.namespace(session);
                self.bear(leader, maker, pid, libc::CLONE_PARENT as u64, Some(0))
            }
            None => Err(Error::Failed(format!("session {session} has not begun"))),
        };
        (self.stand_ins, self.ended) = (stand_ins, ended);
        made
    }

    /// Lets somebody lead a process group from birth, if others are to be born in it.
    fn lead_at_once(
        &self,
        pid: u32,
        group: Option<u32>,
        session: Option<u32>,
        remote: &mut Remote<'a>,
    ) -> Result<()> {
        match group == Some(pid) && session != Some(pid) && self.from_birth.contains(&pid) {
            true => self.join(self.pids.namespace(pid), pid, remote),
            false => Ok(()),
        }
    }

    /// Joins a process group, if it has a name in the pid namespace of whoever does; otherwise he was born in it.
    fn join(&self, namespace: Option<u32>, group: u32, remote: &mut Remote<'a>) -> Result<()> {
        match self.pids.seen_from(namespace, group) {
            Some(group) => join(remote, self.now(group)),
            None => Ok(()),
        }
    }

    /// Makes a child with this id; `maker`: the pid namespace of the program's own that the parent is in.
    ///
    /// A process that is to be in another one than its parent is made while the parent's children are to be there.
    fn bear(
        &mut self,
        parent: &mut Remote<'a>,
        maker: Option<u32>,
        pid: u32,
        flags: u64,
        exit_signal: Option<u32>,
    ) -> Result<Remote<'a>> {
        let (own, is_first) = (self.pids.namespace(pid), self.pids.is_first(pid));
        let (from, born) = (born_in(self.image, maker), born_in(self.image, own));
        if let Some(users) = born.filter(|_| is_first && from != born) {
            return self.bear_in(users, parent, maker, pid, flags, exit_signal);
        }
        let inside = if is_first { own.and_then(|own| self.pids.parent(own)) } else { own };
        let flags = if is_first { flags | libc::CLONE_NEWPID as u64 } else { flags };
        let signal = exit_signal.unwrap_or(libc::SIGCHLD as u32);
        let clone_args = CloneArgs { flags, exit_signal: signal.into(), ..CloneArgs::default() };
        let most = chosen(self.image, self.pids, own, from).min(DEEPEST);
        let what = format!("make process {pid}");
        let (program, left) = self.while_children_go_to(inside, maker, |program| {
            clone_with(program, &what, &self.pids.all(pid), most, clone_args)
        })?;
        // Who came to another id is buried by his parent, which is another one than his maker then.
        let others_child = flags & libc::CLONE_PARENT as u64 != 0;
        let name = |tid| if maker.is_none() { Some(tid) } else { self.pids.seen_from(maker, pid) };
        let make = || {
            as_next(left.then_some(pid), || parent.run(&program))?;
            let born = parent.take_born();
            self.nursery.others.borrow_mut().extend(&born);
            let is_wrong = |tid: &u32| *tid != pid && !self.pids.are_new();
            if let Some(tid) = born.iter().copied().find(is_wrong) {
                if let Some(name) = name(tid).filter(|_| !others_child) {
                    spawn::tgkill(tid, tid, libc::SIGKILL)?;
                    see_end(Seized::born(tid))?;
                    parent.run(&bury(name))?;
                    self.nursery.others.borrow_mut().retain(|&other| other != tid);
                }
                return Err(passed_over(pid));
            }
            Ok(born)
        };
        let born = burial::until_free(|| pid, make, is_taken, left || self.pids.are_deepest())
            .map_err(|e| refused(pid, e))?;
        let &[tid] = born.as_slice() else {
            return Err(Error::Failed(format!("process {pid} was not made")));
        };
        if self.pids.are_new() {
            self.renamed.insert(pid, tid);
        }
        self.take_over(tid, parent.area())
    }

    /// What a process of the pid namespace `maker` runs so that what `make` adds makes its child in `inside`.
    fn while_children_go_to<T>(
        &self,
        inside: Option<u32>,
        maker: Option<u32>,
        make: impl FnOnce(&mut Program) -> T,
    ) -> Result<(Program, T)> {
        let mut program = Program::new();
        if inside != maker {
            enter_for_children(&mut program, self.pids, maker, inside)?;
        }
        let made = make(&mut program);
        if inside != maker {
            let own = program.call("getpid", libc::SYS_getpid, []);
            let_children_be_with(&mut program, own.into());
        }
        Ok((program, made))
    }

    /// Takes over a new process.
    fn take_over(&mut self, tid: u32, area: Area) -> Result<Remote<'a>> {
        let stopped = Seized::born(tid).wait()?.stopped(tid)?;
        let memory =
            self.memories.get(self.used).ok_or_else(|| Error::Failed("too many processes".into()))?;
        self.used += 1;
        let opened = Memory::open(tid)?;
        let memory = memory.get_or_init(|| opened);
        Ok(Remote::new(memory, stopped, area)?)
    }

    /// Makes process 1 of a pid namespace that belongs to a user namespace in which its parent is not: a brother whom it has for the
    /// moment goes there, and makes it.
    fn bear_in(
        &mut self,
        users: u32,
        parent: &mut Remote<'a>,
        maker: Option<u32>,
        pid: u32,
        flags: u64,
        exit_signal: Option<u32>,
    ) -> Result<Remote<'a>> {
        if flags & libc::CLONE_PARENT as u64 != 0 || self.pids.are_new() {
            return Err(Error::Failed(format!(
                "process {pid} cannot be made by another process than its parent"
            )));
        }
        let own = self.pids.namespace(pid);
        let inside = own.and_then(|own| self.pids.parent(own));
        let signal = exit_signal.unwrap_or(libc::SIGCHLD as u32);
        let args = CloneArgs { flags, exit_signal: signal.into(), ..CloneArgs::default() };
        let make = |program: &mut Program| clone_with(program, "make a process", &[], 0, args);
        let (program, _) = self.while_children_go_to(inside, maker, make)?;
        // His own id must be none that is wanted.
        let above = ids(self.image).into_iter().max().map(|id| id.saturating_add(1));
        as_next(above, || parent.run(&program))?;
        let &[tid] = parent.take_born().as_slice() else {
            return Err(Error::Failed(format!("nobody could be made to make process {pid}")));
        };
        self.nursery.others.borrow_mut().push(tid);
        let mut brother = self.take_over(tid, parent.area())?;
        let first = first_in(self.image, own).filter(|first| first.pid == pid);
        self.open.namespaces().begin(self.image, users, born_in(self.image, maker), first, &mut brother)?;
        // If its signal were ignored, the kernel would bury whoever ends by itself.
        parent.run(&disposition(signal, libc::SIG_DFL as u64))?;
        let made = self.bear_first(&mut brother, parent, maker, pid, flags);
        let name = of_process_in(tid, self.pids.depth(maker))?;
        kill(brother)?;
        self.nursery.others.borrow_mut().retain(|&other| other != tid);
        let mut program = bury(name);
        program.append(disposition(signal, libc::SIG_IGN as u64));
        parent.run(&program)?;
        made
    }

    /// Makes process 1 of a new pid namespace of the brother's, as a child of their parent.
    fn bear_first(
        &mut self,
        brother: &mut Remote<'a>,
        parent: &mut Remote<'a>,
        maker: Option<u32>,
        pid: u32,
        flags: u64,
    ) -> Result<Remote<'a>> {
        let own = self.pids.namespace(pid);
        let flags = flags | (libc::CLONE_NEWPID | libc::CLONE_PARENT) as u64;
        let most = chosen(self.image, self.pids, own, born_in(self.image, own)).min(DEEPEST);
        let mut program = Program::new();
        let args = CloneArgs { flags, ..CloneArgs::default() };
        let what = format!("make process {pid}");
        let left = clone_with(&mut program, &what, &self.pids.all(pid), most, args);
        let depth = self.pids.depth(maker);
        let make = || {
            as_next(left.then_some(pid), || brother.run(&program))?;
            let born = brother.take_born();
            self.nursery.others.borrow_mut().extend(&born);
            if let Some(&tid) = born.iter().find(|tid| **tid != pid) {
                let name = of_process_in(tid, depth)?;
                spawn::tgkill(tid, tid, libc::SIGKILL)?;
                see_end(Seized::born(tid))?;
                parent.run(&bury(name))?;
                self.nursery.others.borrow_mut().retain(|&other| other != tid);
                return Err(passed_over(pid));
            }
            Ok(())
        };
        let for_the_living = left || self.pids.are_deepest();
        burial::until_free(|| pid, make, is_taken, for_the_living).map_err(|e| refused(pid, e))?;
        self.take_over(pid, brother.area())
    }

    /// Begins a session, with its controlling terminal if that is one of the tree's own.
    fn begin_session(&self, process: &Process, remote: &mut Remote<'a>) -> Result<()> {
        let mut program = begin_session();
        for (row, pty) in self.image.ptys.iter().enumerate().filter(|(_, pty)| pty.controlling) {
            let of_session = pty.session.unwrap_or(self.image.processes[0].pid) == process.pid;
            if let Some(slave) = self.open.terminals().get(&(row as u32)).filter(|_| of_session) {
                let args = [number(slave), tty::TIOCSCTTY.into(), 0.into()];
                program.attempt("take the controlling terminal", libc::SYS_ioctl, args);
            }
        }
        remote.run(&program)?;
        Ok(())
    }

    /// Joins all process groups: first those who lead one, then the others.
    fn group(&mut self) -> Result<()> {
        self.stand_in()?;
        let now = |name| renamed(&self.renamed, name);
        for leading in [true, false] {
            for (process, member) in self.image.processes.iter().zip(&mut self.members) {
                let (Some(group), Some(member)) = (process.own_group(), member) else { continue };
                let leads_session = process.own_session() == Some(process.pid);
                let name = self.pids.seen_from(namespace_of(self.image, process), group);
                if let Some(name) = name.filter(|_| (group == process.pid) == leading && !leads_session) {
                    join(member, now(name))?;
                }
            }
            for (_, ended, remote) in &mut self.ended {
                let Some(group) = ended.group.filter(|_| ended.session != Some(ended.pid)) else { continue };
                let name = self.pids.seen_from(ended.namespace, group);
                if let Some(name) = name.filter(|_| (group == ended.pid) == leading) {
                    join(remote, now(name))?;
                }
            }
        }
        for StandIn { parent, id, exit_signal, remote } in std::mem::take(&mut self.stand_ins) {
            let signal = exit_signal.unwrap_or(libc::SIGCHLD as u32);
            self.member(parent)?.run(&disposition(signal, libc::SIG_DFL as u64))?;
            let tid = remote.tid();
            kill(remote)?;
            self.nursery.others.borrow_mut().retain(|&other| other != tid);
            let name = self.pids.seen_from(namespace_of(self.image, &self.image.processes[parent]), id);
            let name = name.ok_or_else(|| Error::Failed(format!("{id} has no name where its parent is")))?;
            let mut program = bury(self.now(name));
            program.append(disposition(signal, libc::SIG_IGN as u64));
            self.member(parent)?.run(&program)?;
        }
        Ok(())
    }

    /// Makes leaders of groups that have lost theirs, as children of one of the members, in its session. (Who began a session
    /// leads a group as well.)
    fn stand_in(&mut self) -> Result<()> {
        for id in tree::lost_leaders(self.image) {
            if self.stand_ins.iter().any(|s| s.id == id) {
                continue;
            }
            let parent = tree::stand_in_parent(self.image, self.pids, id);
            let parent = parent
                .ok_or_else(|| Error::Failed(format!("process group {id} has no member that lives")))?;
            let Some(mut member) = self.members[parent].take() else { continue };
            let maker = namespace_of(self.image, &self.image.processes[parent]);
            let made = self.bear(&mut member, maker, id, 0, Some(0));
            self.members[parent] = Some(member);
            let mut made = made?;
            self.join(self.pids.namespace(id), id, &mut made)?;
            self.stand_ins.push(StandIn { parent, id, exit_signal: Some(0), remote: made });
        }
        Ok(())
    }

    /// Gives the foreground of the tree's own terminals to those who had it.
    fn bring_to_foreground(&mut self) -> Result<()> {
        for (row, pty) in self.image.ptys.iter().enumerate() {
            let (Some(group), Some(slave)) = (pty.foreground, self.open.terminals().get(&(row as u32)))
            else {
                continue;
            };
            let session = pty.session.unwrap_or(self.image.processes[0].pid);
            let name = |p: &Process| self.pids.seen_from(namespace_of(self.image, p), group);
            let can = |p: &Process| p.own_session() == Some(session) && name(p).is_some();
            let Some(member) = self.image.processes.iter().position(can) else { continue };
            let mut program = Program::new();
            let group = self.now(name(&self.image.processes[member]).unwrap_or(group));
            let group = program.data(&group.to_ne_bytes());
            let args = [number(slave), libc::TIOCSPGRP.into(), group];
            program.attempt("take the foreground of the terminal", libc::SYS_ioctl, args);
            self.member(member)?.run(&program)?;
        }
        Ok(())
    }

    /// Those that had ended end in the same way. Their parents, which had been told, are not told once more.
    fn end(&mut self) -> Result<()> {
        for (parent, ended, remote) in std::mem::take(&mut self.ended) {
            let member = self.member(parent)?;
            let signal = ended.exit_signal.unwrap_or(libc::SIGCHLD as u32);
            // If its signal were ignored, the kernel would bury it by itself.
            member.run(&disposition(signal, libc::SIG_DFL as u64))?;
            let tid = remote.tid();
            end_as(remote, ended.status)?;
            self.nursery.others.borrow_mut().retain(|&other| other != tid);
            let member = self.member(parent)?;
            // That drops what is pending; the program's own comes later.
            member.run(&disposition(signal, libc::SIG_IGN as u64))?;
        }
        Ok(())
    }

    fn member(&mut self, row: usize) -> Result<&mut Remote<'a>> {
        let member = self.members[row].as_mut();
        member.ok_or_else(|| Error::Failed("a process has not been made".into()))
    }
}

/// Makes a process or thread with these ids, the innermost first; with any, if there are none. True if there are more than can be chosen
/// (`most`): the last is left to the kernel.
fn clone_with(program: &mut Program, what: &str, ids: &[u32], most: usize, args: CloneArgs) -> bool {
    let left = ids.len() > most;
    let ids = &ids[..ids.len().min(most)];
    let record = program.data(&CloneArgs { set_tid_size: ids.len() as u64, ..args }.to_bytes());
    if !ids.is_empty() {
        let list = program.data(&ids.iter().flat_map(|id| id.to_ne_bytes()).collect::<Vec<_>>());
        program.link(record, CloneArgs::SET_TID_OFFSET, list);
    }
    program.call(what, libc::SYS_clone3, [record, Arg::Value(size_of::<CloneArgs>() as u64)]);
    left
}

/// Makes something that is to have this id by the kernel's choice, if there is such. Others go on where they were: the ids after
/// it may be wanted.
fn as_next<T>(
    id: Option<u32>,
    make: impl FnOnce() -> stillpoint_linux::Result<T>,
) -> stillpoint_linux::Result<T> {
    let Some(id) = id else { return make() };
    let before = spawn::last_id()?;
    spawn::go_on_after(id.saturating_sub(1))?;
    let made = make();
    spawn::go_on_after(before)?;
    made
}

/// What a process is called so many pid namespaces within ours.
fn of_process_in(pid: u32, depth: usize) -> stillpoint_linux::Result<u32> {
    let names = Proc::process(pid)?.status()?.ns_tgid;
    let ours = Proc::process(std::process::id())?.status()?.ns_tgid.len();
    let name = names.get(ours.saturating_sub(1) + depth).or(names.last());
    name.copied().ok_or(stillpoint_linux::Error::Gone(pid))
}

/// Takes note of the end of a child.
fn bury(name: u32) -> Program {
    let mut program = Program::new();
    let all = Arg::Value(libc::__WALL as u32 as u64);
    program.call("bury a child", libc::SYS_wait4, [u64::from(name).into(), 0.into(), all, 0.into()]);
    program
}

/// From here on children of whoever is in one pid namespace are to be in another one.
fn enter_for_children(
    program: &mut Program,
    pids: &Pids<'_>,
    from: Option<u32>,
    to: Option<u32>,
) -> Result<()> {
    let first = to.and_then(|to| pids.seen_from(from, pids.first_of(to)?));
    let first = first
        .ok_or_else(|| Error::Failed("a pid namespace cannot be entered from where a process is".into()))?;
    let_children_be_with(program, u64::from(first).into());
    Ok(())
}

/// From here on its children are to be in the pid namespace of this process.
fn let_children_be_with(program: &mut Program, pid: Arg) {
    let handle = program.call("open a handle to a process", libc::SYS_pidfd_open, [pid, 0.into()]);
    let what = Arg::Value(libc::CLONE_NEWPID as u64);
    program.call("enter a pid namespace", libc::SYS_setns, [handle.into(), what]);
    program.call("close", libc::SYS_close, [handle.into()]);
}

/// Lets its further children be in another pid namespace than itself, if they were to be.
pub(crate) fn part_from_children(
    pids: &Pids<'_>,
    own: Option<u32>,
    process: &Process,
    remote: &mut dyn Run,
) -> Result<()> {
    let mut program = Program::new();
    if process.children_in.is_some() {
        enter_for_children(&mut program, pids, own, process.children_in)?;
    }
    if process.children_apart {
        program.call("unshare", libc::SYS_unshare, [(libc::CLONE_NEWPID as u64).into()]);
    }
    if !program.is_empty() {
        remote.run(&program)?;
    }
    Ok(())
}

fn number(fd: &OwnedFd) -> Arg {
    use std::os::fd::AsRawFd;
    Arg::Value(fd.as_raw_fd() as u64)
}

/// What `clone3` is told of a child that shares descriptors, directories, memory.
fn sharing(shares: [bool; 2], memory: Begins) -> u64 {
    let flags = [libc::CLONE_FILES, libc::CLONE_FS].into_iter().zip(shares);
    let contexts: u64 = flags.filter(|(_, shares)| *shares).map(|(flag, _)| flag as u64).sum();
    contexts
        | match memory {
            Begins::Copied => 0,
            Begins::Shared => libc::CLONE_VM as u64,
            Begins::SharedWithActions => (libc::CLONE_VM | libc::CLONE_SIGHAND) as u64,
        }
}

/// Lets it have a copy of its own of what it shares.
fn leave(remote: &mut Remote<'_>, context: Context) -> Result<()> {
    let flag = match context {
        Context::Files => libc::CLONE_FILES,
        Context::FileSystem => libc::CLONE_FS,
    };
    let mut program = Program::new();
    program.call("unshare", libc::SYS_unshare, [(flag as u64).into()]);
    remote.run(&program)?;
    Ok(())
}

fn begin_session() -> Program {
    let mut program = Program::new();
    program.call("setsid", libc::SYS_setsid, []);
    program
}

fn join(remote: &mut Remote<'_>, group: u32) -> Result<()> {
    let mut program = Program::new();
    program.call(
        format!("join process group {group}"),
        libc::SYS_setpgid,
        [0.into(), u64::from(group).into()],
    );
    remote.run(&program)?;
    Ok(())
}

/// Sets what becomes of a signal, if it is one.
fn disposition(signal: u32, handler: u64) -> Program {
    let mut program = Program::new();
    if (1..=64).contains(&signal) {
        let action = program.data(&layout::words(&[handler, 0, 0, 0]));
        let args = [u64::from(signal).into(), action, 0.into(), 8.into()];
        program.attempt(format!("rt_sigaction {signal}"), libc::SYS_rt_sigaction, args);
    }
    program
}

/// Lets a process end as wait(2) is to tell it.
fn end_as(mut remote: Remote<'_>, status: u32) -> Result<()> {
    let signal = (status & 0x7f) as i32;
    if signal == libc::SIGKILL {
        return kill(remote);
    }
    let pid = remote.tid();
    let mut program = Program::new();
    if signal == 0 {
        let stopped = remote.leave_by(libc::SYS_exit_group, u64::from(status >> 8 & 0xff))?;
        return Ok(see_end(stopped)?);
    }
    // It had left a core dump then, if any.
    let args = [u64::from(linux_raw_sys::prctl::PR_SET_DUMPABLE).into(), 0.into()];
    program.call("prctl PR_SET_DUMPABLE", libc::SYS_prctl, args);
    program.append(disposition(signal as u32, libc::SIG_DFL as u64));
    remote.run(&program)?;
    let stopped = remote.release()?;
    spawn::tgkill(pid, pid, signal)?;
    stopped.set_sigmask(0)?;
    Ok(see_end(stopped.resume(0)?)?)
}

fn kill(remote: Remote<'_>) -> Result<()> {
    let tid = remote.tid();
    spawn::tgkill(tid, tid, libc::SIGKILL)?;
    drop(remote);
    Ok(see_end(Seized::born(tid))?)
}

/// Waits for the end of a process, delivering what it is sent.
pub fn see_end(mut running: Seized) -> stillpoint_linux::Result<()> {
    loop {
        match running.wait()? {
            Waited::Ended(_) => return Ok(()),
            Waited::Stopped(stopped) => {
                let signal = match stopped.stop() {
                    stillpoint_linux::ptrace::Stop::Signal(signal) => signal,
                    _ => 0,
                };
                running = stopped.resume(signal)?;
            }
        }
    }
}

/// Whether other threads of a process than the main one have children.
fn has_children_of_threads(image: &Image, row: usize) -> bool {
    image.processes[row].ended().iter().any(|e| e.parent_thread.is_some())
        || tree::children(image, row).any(|child| image.processes[child].parent_thread.is_some())
}

/// All threads of a process, the leader first: those that there are not yet are made, and start stopped, in the middle of the
/// leader's program.
pub fn make_threads<'a>(
    image: &Image,
    memory: &'a Memory,
    mut leader: Remote<'a>,
    process: &Process,
    pids: &Pids<'_>,
    made: Option<Vec<Remote<'a>>>,
) -> Result<Vec<Remote<'a>>> {
    let made = match made {
        Some(made) => made,
        None => others(image, memory, &mut leader, process, pids)?,
    };
    let mut threads = vec![leader];
    threads.extend(made);
    if threads.len() != process.threads.len() {
        return Err(Error::Failed(format!(
            "{} of {} threads were made",
            threads.len(),
            process.threads.len()
        )));
    }
    Ok(threads)
}

/// Makes the other threads of a process. Those that share directories apart from the main thread's are made by the first of
/// them.
fn others<'a>(
    image: &Image,
    memory: &'a Memory,
    leader: &mut Remote<'a>,
    process: &Process,
    pids: &Pids<'_>,
) -> Result<Vec<Remote<'a>>> {
    let of = |thread: &Thread| thread.directories.and_then(|d| d.shares);
    // It has gone into its user namespace by now.
    let most = chosen(image, pids, namespace_of(image, process), users_of(image, process)).min(DEEPEST);
    let mut made: HashMap<u32, Remote<'a>> = HashMap::new();
    let mut makers: Vec<Option<u32>> = process.threads.iter().skip(1).map(of).collect();
    makers.sort_unstable();
    makers.dedup();
    for maker in makers {
        let threads: Vec<&Thread> = process.threads.iter().skip(1).filter(|t| of(t) == maker).collect();
        let born = match maker {
            None => beget(memory, leader, process.pid, &threads, pids, most)?,
            Some(first) => {
                let first = made.get_mut(&first);
                let first = first.ok_or_else(|| Error::Failed("a thread has not been made".into()))?;
                beget(memory, first, process.pid, &threads, pids, most)?
            }
        };
        made.extend(threads.iter().map(|t| t.tid).zip(born));
    }
    let in_order = process.threads.iter().skip(1).map(|t| made.remove(&t.tid));
    in_order.collect::<Option<Vec<_>>>().ok_or_else(|| Error::Failed("a thread was not made".into()))
}

/// Makes threads of the maker's process, in their order.
fn beget<'a>(
    memory: &'a Memory,
    maker: &mut Remote<'a>,
    pid: u32,
    threads: &[&Thread],
    pids: &Pids<'_>,
    most: usize,
) -> Result<Vec<Remote<'a>>> {
    let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_SIGHAND;
    let flags = flags | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
    let area: Area = maker.area();
    let (mut all, made) = (Vec::with_capacity(threads.len()), Cell::new(0));
    let mut make = || {
        let (mut program, mut left) = (Program::new(), None);
        for thread in &threads[made.get()..] {
            let is_apart = thread.directories.is_some_and(|d| d.shares.is_none());
            let flags = if is_apart { flags } else { flags | libc::CLONE_FS };
            let args = CloneArgs { flags: flags as u64, ..CloneArgs::default() };
            let what = format!("make thread {}", thread.tid);
            if clone_with(&mut program, &what, &pids.all(thread.tid), most, args) {
                left = Some(thread.tid);
                break;
            }
        }
        let done = as_next(left, || maker.run(&program));
        for tid in maker.take_born() {
            let thread = Remote::new(memory, Seized::born(tid).wait()?.stopped(tid)?, area)?;
            if let Some(wanted) = left.filter(|&wanted| wanted != tid) {
                see_end(thread.leave_by(libc::SYS_exit, 0)?)?;
                return Err(passed_over(wanted));
            }
            all.push(thread);
            made.set(all.len());
        }
        done
    };
    let next = || threads.get(made.get()).map_or(0, |thread| thread.tid);
    while made.get() < threads.len() {
        let may_be_passed_over = pids.are_deepest() || pids.all(next()).len() > most;
        burial::until_free(next, &mut make, is_taken, may_be_passed_over).map_err(|e| {
            match is_taken(&e) {
                true => Error::PidTaken(pid),
                false => e.into(),
            }
        })?;
    }
    Ok(all)
}
