//! Rebuilding a program from a checkpoint, up to the moment it is let go.
//!
//! Until that moment the new process is traced with `PTRACE_O_EXITKILL`: if we fail or are killed, it is killed too,
//! and nothing is left. Files are cut back as the very last step before it runs.

use crate::attributes::{credentials, last, outside, process as of_process, thread as of_thread};
use crate::family::{Family, Nursery};
use crate::files::{Contents, OpenFiles};
use crate::heritage::Heritage;
use crate::lazy::{Coming, Later, Pager, Parted, Place, Steward, Template};
use crate::pace::Pace;
use crate::space::{self, Backings, Filled};
use crate::users::inside;
use crate::{
    Error, FilesPolicy, Pump, Result, Stdio, Streams, TcpPolicy, attach, burial, clock, family, files,
    job_control, loader, remembered,
};
use std::borrow::Cow;
use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use stillpoint_image::anew::Renamed;
use stillpoint_image::pids::{Pids, namespace_of};
use stillpoint_image::users::{self, users_of};
use stillpoint_image::{
    AddressSpace, Dispatch, Extent, Image, Mapping, Namespace, Owner, Process, Range, Thread, Users,
};
use stillpoint_linux::arch::{self, Interrupted, Regs};
use stillpoint_linux::descriptors::pidfd_open;
use stillpoint_linux::guard::Guard;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::ptrace::{Seized, Stopped};
use stillpoint_linux::remote::Remote;
use stillpoint_linux::spawn;
use stillpoint_linux::{RemoteAddr, dispatch, host, limits, rootless};
use stillpoint_store::Checkpoint;

/// What is asked of a restore.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What to do about files that changed.
    pub files: FilesPolicy,
    /// What becomes of its connections.
    pub tcp: TcpPolicy,
    /// Where standard streams from outside lead.
    pub stdio: Stdio,
    /// Where what led outside besides leads, and what is connected by hand.
    pub streams: Streams,
    /// Whether files that we were started with are the program's under the same numbers, so that who started us goes on where it ends.
    pub joins: bool,
    /// Whether our standard output is ours to write to: where the program's own went to the same file, nothing is cut off there.
    pub own_output: bool,
    /// If less than this would come later, bytes, all comes first.
    pub eager_below: u64,
    /// Memory is read from the store at so many bytes a second at most.
    pub limit: Option<u64>,
    /// Whether somebody is going to follow what the program writes, when all of its memory is there.
    pub is_followed: bool,
    /// Whether it is worth some time to learn what the program wants first: it may be restored from there once more.
    pub learns: bool,
    /// Which ids its processes and threads have.
    pub ids: Ids,
}

/// Which ids the processes and threads of a restored program have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ids {
    /// Those that they had.
    #[default]
    Same,
    /// Whatever ids the kernel gives them, beside those who have the old ones.
    New,
}

/// A restored program, which runs.
#[derive(Debug)]
pub struct Restored {
    /// Its process id in our namespace; it is our child.
    pub pid: u32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
    /// What must be brought to it, where it was reading from outside and there was something unread.
    pub pumps: Vec<Pump>,
    /// Time until everything but its memory stood.
    pub skeleton: Duration,
    /// Time until it ran.
    pub running: Duration,
    /// What loads the rest of its memory, if that was not all there by then.
    pub pager: Option<Pager>,
    /// Pages of its memory.
    pub pages: u64,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// Whether memory may come when the program runs already, and who brings it.
pub enum Lazily<'a> {
    /// All of it comes first.
    Not,
    /// Processes of its own.
    Alone(Heard<'a>),
    /// Those that serve all clones of the template; it is the one with this number.
    Clone(&'a Template, usize, &'a dyn Place),
    /// Those who page it from then on.
    Paged(&'a dyn Steward),
}

/// Who hears of what happens while memory comes later. They are called in another process, a copy of this one, with nothing
/// open but standard error.
pub struct Heard<'a> {
    /// Why a page cannot be had, once.
    pub failed: &'a (dyn Fn(&str) + Sync),
    /// What the program wanted first, in order, when all is there.
    pub wanted: &'a (dyn Fn(&[Range]) + Sync),
}

/// Hears how far a restore is.
pub trait Progress: Sync {
    /// So many bytes are to be loaded.
    fn start(&self, total_bytes: u64);
    /// So many more have been.
    fn advance(&self, bytes: u64);
    /// It waits for something, which takes long.
    fn waits(&self, _why: &str) {}
}

/// Whether there can be as many mappings as the program has, and what it is made from beside them.
pub(crate) fn has_room(image: &Image) -> Result<()> {
    const FEW: usize = 16;
    let wanted = image.spaces.iter().map(|space| space.mappings.len()).max().unwrap_or(0);
    let most = host::most_mappings();
    if wanted + FEW <= most {
        return Ok(());
    }
    let why = format!(
        "it has {wanted} mappings, and a process here may have {most}, some of which a restore needs"
    );
    Err(Error::Refused(vec![format!("{why}: raise vm.max_map_count (sysctl) to {}", wanted + FEW)]))
}

/// Rebuilds the program of a checkpoint and lets it run, as a child of this process. To be called from the main
/// thread, which must live on until the program is waited for. `ready` hears its process id just before it runs; if it
/// fails, there is no program.
pub fn restore(
    checkpoint: &Checkpoint,
    options: &Options,
    lazily: Lazily<'_>,
    cut_tail: &mut files::KeepTail<'_>,
    ready: &mut dyn FnMut(u32) -> Result<()>,
    progress: &dyn Progress,
) -> Result<Restored> {
    let image = &checkpoint.image;
    check_host(image)?;
    check_privileges(image)?;
    if options.ids == Ids::Same && rootless::is_ordinary()? {
        return Err(Error::NoPidPrivilege(image.processes.first().map_or(0, |root| root.pid)));
    }
    let pids = match options.ids {
        Ids::Same => Pids::of(image),
        Ids::New => Pids::anew(image),
    };
    // Nobody waits for what is refused.
    has_room(image)?;
    files::check_streams(image, options)?;
    match options.ids {
        Ids::Same => burial::wait(family::ids(image), |why| progress.waits(why)),
        Ids::New => check_namespaces(image)?,
    }
    let start = Instant::now();
    let pace = Pace::new(options.limit);
    let contents = Stored { checkpoint, pace: &pace };
    // Before namespaces are made: other clocks are told by what they differ from these.
    let mut notes = Vec::from_iter(clock::continue_clocks(&image.meta)?);
    let mut open = files::open(image, &contents, options, &|why| progress.waits(why))?;
    let own = Proc::process(std::process::id())?.maps()?;
    let room = space::find_room(&image.spaces, &own)?;
    let memories: Vec<OnceCell<Memory>> = (0..family::room_for(image)).map(|_| OnceCell::new()).collect();
    let renamed_image = OnceCell::new();
    let mut nursery = Nursery::open(image, &pids)?;
    let leader = nursery.seize()?;
    if image.namespaces.iter().any(|n| matches!(n, Namespace::User(_))) {
        // What all our privileges allow is limited where those are given up. The program's own limits come last.
        for limit in [libc::RLIMIT_MEMLOCK, libc::RLIMIT_NPROC] {
            let _ = limits::set(nursery.pid(), limit, u64::MAX, u64::MAX);
        }
    }
    check_processor(image, &leader)?;
    let opened = Memory::open(nursery.pid())?;
    let mut root = space::clear(memories[0].get_or_init(|| opened), leader, room)?;
    // The others are copies of it.
    root.run(&of_process::wordless_layout(space_of(image, &image.processes[0])?))?;
    let heritage = Heritage::of(checkpoint, &pace, room);
    let family::Made { main: mut members, threads: mut others, notes: of_groups, renamed } =
        Family::make(image, &nursery, &memories, root, &open, &heritage, &pids)?;
    notes.extend(of_groups);
    for line in image.processes.iter().flat_map(outside::forgone) {
        if !notes.contains(&line) {
            notes.push(line);
        }
    }
    if renamed.is_some() && image.processes.iter().any(|p| p.parent.is_some() || !p.ended().is_empty()) {
        notes.push(
            "where it remembers the process ids of its children, those are still the ones of the program's children, whom its \
             signals would reach; with --isolated they are its own"
                .into(),
        );
    }
    // From here on it is the same program under its new ids.
    let before = image;
    let image = match &renamed {
        Some(ids) => renamed_image.get_or_init(|| anew(before, ids)),
        None => before,
    };
    let mut rows: Vec<Row<'_>> = image
        .processes
        .iter()
        .enumerate()
        .map(|(i, p)| Row::of(checkpoint, image, &heritage, i, p))
        .collect::<Result<_>>()?;
    for (row, remote) in rows.iter().zip(&mut members) {
        row.lay_out(image, remote, &open, &heritage, room)?;
    }
    let mut all: Vec<&mut dyn Run> = members.iter_mut().map(|remote| remote as &mut dyn Run).collect();
    open.complete_mounts(image, &mut all)?;
    open.detach();
    let skeleton = start.elapsed();
    let processes: Vec<_> = rows.iter().map(|row| (row.process, row.space, &*row.extents)).collect();
    let (later, hasty) = Later::begin(checkpoint, &processes, &mut members, options, lazily)?;
    notes.extend(hasty);
    // Where pages are to come later nothing else comes now.
    for (row, remote) in rows.iter().zip(&mut members).filter(|_| heritage.is_any()) {
        remote.run(&of_process::huge_pages(row.space.thp_disable))?;
    }
    load(checkpoint, &rows, &members, later.as_ref(), &pace, progress)?;
    let visit = open.namespaces().visit_network(image)?;
    open.deliver(image)?;
    drop(visit);
    open.seal(image)?;
    let mut all = Vec::with_capacity(members.len());
    for (row, mut remote) in rows.iter().zip(members) {
        row.complete(image, &mut remote, &open)?;
        let others = others.remove(&row.row);
        let mut threads = family::make_threads(image, remote.memory(), remote, row.process, &pids, others)?;
        family::part_from_children(&pids, namespace_of(image, row.process), row.process, &mut threads[0])?;
        row.take_places(image, &mut threads)?;
        all.push(threads);
    }
    // Its processes have ids too, which are not to be those of the program's threads.
    let begun = later.map(|later| {
        let processes = all.iter().zip(&rows).map(|(threads, row)| (threads[0].memory(), row.process));
        later.start(&processes.collect::<Vec<_>>(), start)
    });
    let (coming, begun) = begun.transpose()?.unzip();
    let (pager, parted) = begun.unwrap_or_default();
    if let Some(ids) = &renamed {
        for ((row, threads), old) in rows.iter().zip(&all).zip(&before.processes) {
            remembered::tell(threads[0].memory(), old, row.space, ids)?;
        }
    }
    open.finish(
        image,
        &mut all.iter_mut().map(|threads| &mut threads[0] as &mut dyn Run).collect::<Vec<_>>(),
    )?;
    let mut ready_to_run = Vec::with_capacity(all.len());
    for (row, threads) in rows.iter_mut().zip(&all) {
        row.pid = threads[0].pid();
    }
    // Children come before their parents, who hear of their stops as long as that is nothing to them.
    for (row, mut threads) in rows.iter().zip(all).rev() {
        let children = rows.iter().filter(|child| child.process.parent == Some(row.row as u32));
        let hears = job_control::hear(row.pid, children.map(|child| (child.process, child.pid)))?;
        if !hears.is_empty() {
            threads[0].run(&hears)?;
        }
        let users = users::users(image, users_of(image, row.process));
        let threads = give_attributes(threads, row.process, row.space, users, nursery.seccomp_suspended)?;
        let threads = finish_threads(threads, row.process, row.is_first.then_some(room))?;
        ready_to_run.push(job_control::stop(image, row.process, row.pid, threads)?);
    }
    ready_to_run.reverse();
    // What may fail comes before files are changed.
    let guard = guarded(&ready_to_run)?;
    open.write_back(image, &contents)?;
    open.cut_back(cut_tail)?;
    open.settle(image)?;
    // From now on what it has open is its own: what it closes is closed.
    parted.into_iter().for_each(Parted::wait);
    ready(nursery.pid())?;
    open.release_kept();
    notes.extend(open.notes());
    let pumps = open.take_pumps();
    drop(open);
    for row in &rows {
        for (tid, signal) in last::late_signals(row.process) {
            match tid {
                Some(tid) => spawn::tgkill(row.pid, tid, signal as i32)?,
                None => spawn::kill(row.pid, signal as i32)?,
            }
        }
    }
    if files::window_differs(image, options.stdio) {
        // As the kernel tells those in front that a window has another size. They know before they go on.
        for row in rows.iter().filter(|r| r.process.foreground && r.process.own_session().is_none()) {
            let _ = spawn::tgkill(row.pid, row.pid, libc::SIGWINCH); // it goes on without
        }
    }
    let_go(ready_to_run, guard)?;
    let running = start.elapsed();
    coming.iter().for_each(|coming: &Coming| coming.runs(running));
    let shell = nursery.leave().ok_or_else(|| Error::Failed("the process has been let go".into()))?;
    Ok(Restored {
        pid: shell.pid,
        pidfd: shell.pidfd,
        pumps,
        skeleton,
        running,
        pager,
        pages: image.meta.pages,
        notes,
    })
}

fn space_of<'a>(image: &'a Image, process: &Process) -> Result<&'a AddressSpace> {
    let space = image.spaces.get(process.space as usize);
    space.ok_or_else(|| Error::Failed("the manifest names no address space".into()))
}

/// One process that is being built.
struct Row<'a> {
    /// Its place in the image.
    row: usize,
    process: &'a Process,
    space: &'a AddressSpace,
    /// Its private pages that are not there yet, if it is the one to see to that.
    extents: Cow<'a, [Extent]>,
    filled: Filled,
    /// It is the first of those that share its memory, which rebuilds it. It is complete last; until then programs run in it.
    is_first: bool,
    /// Its id in our pid namespace.
    pid: u32,
}

impl<'a> Row<'a> {
    fn of(
        checkpoint: &'a Checkpoint,
        image: &'a Image,
        heritage: &Heritage<'a>,
        row: usize,
        process: &'a Process,
    ) -> Result<Self> {
        let space = space_of(image, process)?;
        let filled = Filled::of(&checkpoint.pages, process.space);
        let shares = |other: &Process| other.space == process.space;
        let is_first = !image.processes.iter().take(row).any(shares);
        let extents = if is_first { heritage.rest(row) } else { Cow::default() };
        Ok(Row { row, process, space, extents, filled, is_first, pid: 0 })
    }

    /// Makes its mappings that are not there yet.
    fn lay_out(
        &self,
        image: &Image,
        remote: &mut Remote<'_>,
        open: &OpenFiles,
        heritage: &Heritage<'_>,
        room: u64,
    ) -> Result<()> {
        let is_new = |m: &Mapping| !heritage.has(self.row, m);
        open.namespaces().enter(image, self.process, remote)?;
        if self.is_first {
            space::settle(remote, self.space, room)?;
        }
        let mut early = of_process::early(self.process, self.space);
        if !heritage.is_any() {
            early.append(of_process::huge_pages(self.space.thp_disable));
        }
        remote.run(&early)?;
        if !self.is_first {
            return Ok(());
        }
        space::map(remote, self.space, &self.filled, &Sources { open }, &is_new)?;
        attach::attach(remote, image, self.space, room)?;
        space::advise_before(remote, self.space, &|_| true)
    }

    /// What comes when its memory is filled, or will be. What it shares with other processes is seen to by the last of them,
    /// as the others need what was there before.
    fn complete(&self, image: &Image, remote: &mut Remote<'_>, open: &OpenFiles) -> Result<()> {
        if self.is_first {
            space::keep_accounts(remote, self.space, &self.filled)?;
            space::finish(remote, self.space, &self.filled)?;
            let exe = open.mapping_source(self.process.exe, false)?;
            remote.run(&of_process::layout(self.space, Some(exe as u32)))?;
        }
        if self.stands_in_removed(image) {
            // It was made anew, and has no path by now; or its path leads elsewhere.
            let here = open.mapping_source(self.process.cwd, false)?;
            let mut p = Program::new();
            p.call("fchdir to a directory that has no path", libc::SYS_fchdir, [Arg::Value(here as u64)]);
            remote.run(&p)?;
        }
        // By a descriptor of ours, which it does not have much longer.
        self.go_inside(image, remote, open)?;
        let mut later = image.processes[self.row + 1..].iter();
        if !later.any(|p| p.table == self.process.table) {
            open.install(image, self.process.table, remote)?;
        }
        Ok(())
    }

    /// Current directories and roots, once all threads are there: they start in those of the main thread.
    fn take_places(&self, image: &Image, threads: &mut [Remote<'_>]) -> Result<()> {
        for (remote, thread) in threads.iter_mut().zip(&self.process.threads) {
            let Some(own) = thread.directories.filter(|d| d.shares.is_none()) else { continue };
            let mut program = places(image, own.cwd, own.root);
            program.call("umask", libc::SYS_umask, [u64::from(own.umask).into()]);
            remote.run(&program)?;
        }
        let shares_fs = self.process.shares_fs.unwrap_or(self.row as u32);
        let mut later = image.processes[self.row + 1..].iter();
        let is_there = self.stands_in_removed(image) || users_of(image, self.process).is_some();
        if !is_there && !later.any(|p| p.shares_fs == Some(shares_fs)) {
            threads[0].run(&places(image, self.process.cwd, self.process.root))?;
        }
        Ok(())
    }

    /// Goes into its user namespace. From there on it may find less than before: it takes its place first.
    fn go_inside(&self, image: &Image, remote: &mut Remote<'_>, open: &OpenFiles) -> Result<()> {
        let Some(own) = users_of(image, self.process) else { return Ok(()) };
        if !self.stands_in_removed(image) {
            remote.run(&places(image, self.process.cwd, self.process.root))?;
        }
        let born = users::born_in(image, namespace_of(image, self.process));
        open.namespaces().go_inside(image, born, own, &self.process.threads[0].creds, remote)
    }

    /// Whether its current directory cannot be found by its path: it was removed, or is in another mount namespace than it is (that
    /// around it, or in a mount that was taken away).
    fn stands_in_removed(&self, image: &Image) -> bool {
        let is_mount =
            |row: &u32| matches!(image.namespaces.get(*row as usize), Some(Namespace::Mount { .. }));
        let own = self.process.namespaces.iter().copied().find(is_mount);
        let here = &image.paths[self.process.cwd as usize];
        (here.deleted || here.namespace != own) && image.paths[self.process.root as usize].path.0 == b"/"
    }
}

/// Loads all private pages of all processes, but not those that come later.
fn load(
    checkpoint: &Checkpoint,
    rows: &[Row<'_>],
    members: &[Remote<'_>],
    later: Option<&Later<'_>>,
    pace: &Pace,
    progress: &dyn Progress,
) -> Result<()> {
    let waits = |number: usize| later.filter(|later| later.has(number));
    let bytes = |(number, row): (usize, &Row<'_>)| match waits(number) {
        Some(later) => later.first_bytes(number),
        None => row.extents.iter().map(Extent::len).sum(),
    };
    progress.start(rows.iter().enumerate().map(bytes).sum());
    let done = |bytes| progress.advance(bytes);
    for (number, (row, remote)) in rows.iter().zip(members).enumerate() {
        match waits(number) {
            Some(later) => later.load_first(number, remote.memory(), &done)?,
            None => loader::load(&checkpoint.reader, &row.extents, remote.memory(), pace, &done)?,
        }
    }
    Ok(())
}

/// Refuses what cannot be had under other ids.
fn check_namespaces(image: &Image) -> Result<()> {
    let stands_against = |n: &&Namespace| {
        matches!(
            n,
            Namespace::Pid { .. } | Namespace::Time { .. } | Namespace::Mount { .. } | Namespace::User(_)
        )
    };
    let mut kinds: Vec<&str> = image.namespaces.iter().filter(stands_against).map(Namespace::kind).collect();
    kinds.dedup();
    match kinds.as_slice() {
        [] => Ok(()),
        kinds => Err(Error::Refused(vec![format!(
            "it has made namespaces of its own ({}), in which nobody can be under another process id",
            kinds.join(", ")
        )])),
    }
}

/// The program under its new ids.
fn anew(image: &Image, ids: &Renamed) -> Image {
    let mut image = image.renamed(ids);
    for thread in image.processes.iter_mut().flat_map(|process| &mut process.threads) {
        let regs = remembered::registers(thread, ids);
        regs.iter().for_each(|regs| thread.regs = regs.to_bytes().into());
    }
    image
}

/// Refuses what our privileges, or this machine, do not allow.
pub(crate) fn check_privileges(image: &Image) -> Result<()> {
    let mut all: Vec<String> = Vec::new();
    for process in &image.processes {
        for why in outside::missing(process, users_of(image, process).is_some())? {
            if !all.contains(&why) {
                all.push(why);
            }
        }
    }
    let against = users::standing_against(image).into_iter();
    all.extend(against.map(|(row, why)| format!("process {}: {why}", image.processes[row].pid)));
    match all.is_empty() {
        true => Ok(()),
        false => Err(Error::Refused(all)),
    }
}

/// The process and its address space, where there may be only one.
pub(crate) fn only_process(image: &Image) -> Result<(&Process, &AddressSpace)> {
    let [process] = image.processes.as_slice() else {
        return Err(Error::Refused(vec![format!(
            "it is a tree of {} processes, and the memory of clones of one comes before they run",
            image.processes.len()
        )]));
    };
    let space = image.spaces.get(process.space as usize);
    Ok((process, space.ok_or_else(|| Error::Failed("the manifest names no address space".into()))?))
}

fn check_host(image: &Image) -> Result<()> {
    let then = &image.meta.host;
    let machine = host::machine();
    if then.machine != machine {
        return Err(Error::Refused(vec![format!(
            "it was taken on {}, this machine is {machine}",
            then.machine
        )]));
    }
    let now = host::instructions();
    let lacking: Vec<&str> =
        then.instructions.iter().filter(|name| !now.contains(name)).map(String::as_str).collect();
    if !lacking.is_empty() {
        return Err(Error::Refused(vec![format!(
            "this processor lacks instructions that the one it was taken on has, and that the program may use: {}",
            lacking.join(", ")
        )]));
    }
    if then.vdso.0 != blake3::hash(&host::vdso()?).as_bytes() {
        return Err(Error::Refused(vec![format!(
            "the code that the kernel maps into programs (vdso) differs: the checkpoint was taken on kernel {}, this \
             is {}; restore it on the kernel it was taken on",
            then.kernel,
            host::kernel()
        )]));
    }
    Ok(())
}

/// The registers of the checkpoint must fit this processor.
fn check_processor(image: &Image, thread: &Stopped) -> Result<()> {
    let (then, now) = (image.meta.host.xfeatures, arch::xstate_features(&thread.xstate()?));
    if then & !now != 0 {
        return Err(Error::Refused(vec![format!(
            "this processor (or its kernel) lacks registers that the program was running with: {} (XCR0 {:#x} of {then:#x})",
            registers(then & !now),
            then & !now
        )]));
    }
    Ok(())
}

/// Names of components of the extended state (Intel SDM 1, 13.1).
fn registers(components: u64) -> String {
    const NAMES: [(u64, &str); 6] = [
        (0x4, "AVX"),
        (0x18, "MPX"),
        (0xe0, "AVX-512"),
        (0x200, "protection keys"),
        (0x60000, "AMX"),
        (0x80000, "APX"),
    ];
    let named = NAMES.iter().filter(|(mask, _)| components & mask != 0).map(|(_, name)| *name);
    let known = NAMES.iter().fold(0, |all, (mask, _)| all | mask);
    let other = (components & !known != 0).then_some("others");
    named.chain(other).collect::<Vec<_>>().join(", ")
}

/// Contents of objects and files, from the store.
struct Stored<'a> {
    checkpoint: &'a Checkpoint,
    pace: &'a Pace,
}

impl Contents for Stored<'_> {
    fn read(&self, owner: Owner, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.pace.travel(buf.len() as u64);
        loader::read(&self.checkpoint.reader, self.checkpoint.pages.of(owner), offset, buf)
    }

    fn stored(&self, owner: Owner, size: u64) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for extent in self.checkpoint.pages.of(owner).iter().filter(|e| e.address < size) {
            let end = extent.end().min(size);
            match ranges.last_mut() {
                Some(last) if last.end() == extent.address => last.len = end - last.start,
                _ => ranges.push(Range { start: extent.address, len: end - extent.address }),
            }
        }
        ranges
    }
}

/// Descriptors that mappings are made from.
struct Sources<'a> {
    open: &'a OpenFiles,
}

impl Backings for Sources<'_> {
    fn file(&self, path: u32, write: bool) -> Result<i32> {
        self.open.mapping_source(path, write)
    }

    fn object(&self, object: u32, write: bool) -> Result<i32> {
        self.open.object(object, write)
    }
}

/// Current directory and root, while all paths still lead where they did for us.
fn places(image: &Image, cwd: u32, root: u32) -> Program {
    let mut p = Program::new();
    let path = |p: &mut Program, row: u32| p.string(&image.paths[row as usize].path.0);
    let at = Arg::Value(libc::AT_FDCWD as u64);
    let what = format!("open the current directory {}", image.paths[cwd as usize].path);
    let changes_root = image.paths[root as usize].path.0 != b"/";
    let (cwd, root) = (path(&mut p, cwd), path(&mut p, root));
    let flags = Arg::Value((libc::O_PATH | libc::O_DIRECTORY) as u64);
    let here = p.call(what, libc::SYS_openat, [at, cwd, flags]);
    if changes_root {
        p.call("chroot", libc::SYS_chroot, [root]);
    }
    p.call("fchdir", libc::SYS_fchdir, [here.into()]);
    p.call("close", libc::SYS_close, [here.into()]);
    p
}

/// Everything that threads and the process have of their own; what takes privileges away comes last, and the leader
/// last of all.
fn give_attributes<'a>(
    mut threads: Vec<Remote<'a>>,
    process: &Process,
    space: &AddressSpace,
    users: Option<&Users>,
    seccomp_suspended: bool,
) -> Result<Vec<Remote<'a>>> {
    for (remote, thread) in threads.iter_mut().zip(&process.threads) {
        remote.run(&of_thread::thread(thread, space))?;
        outside::thread(remote.tid(), thread)?;
    }
    let leader = &mut threads[0];
    leader.run(&of_process::settled(process, space))?;
    let timers = of_process::Timers::new(process)?;
    timers.check(&leader.run(timers.program())?)?;
    let left = outside::process(leader.pid(), process, space, users.is_some())?;
    if !left.is_empty() {
        leader.run(&left)?;
    }
    for (index, remote) in threads.iter_mut().enumerate().rev() {
        if index == 0 {
            of_process::start_timers(process, |program| remote.run(program))?;
        }
        let want = &process.threads[index].creds;
        let (now, want) = match users {
            None => (credentials::current(remote.tid())?, want.clone()),
            Some(users) => inside(users, &credentials::current_inside(remote.tid())?, want)?,
        };
        let conditions = last::Conditions { now, want, seccomp_suspended };
        remote.run(&last::program(process, space, index, &conditions))?;
        last::verify(remote.tid(), &process.threads[index].creds)?;
    }
    Ok(threads)
}

/// Who sees to it that all of several processes are left, or none ([`unbind`]). The threads of one process end together anyway.
fn guarded(processes: &[Vec<Stopped>]) -> Result<Option<Guard>> {
    let [_, _, ..] = processes else { return Ok(None) };
    let pidfds = processes.iter().map(|threads| pidfd_open(threads[0].tid(), 0));
    let pidfds = pidfds.collect::<stillpoint_linux::Result<Vec<_>>>()?;
    Ok(Some(Guard::over(&pidfds.iter().map(|pidfd| pidfd.as_fd()).collect::<Vec<_>>())?))
}

/// Lets all threads run, the root's first one first. If we are killed, none of them is left, or all are: until all are unbound they die
/// with us, and from then on the kernel lets go of whatever its tracer leaves behind.
///
/// What runs already may end the others, by `execve(2)` or as a whole: then it is for us, their tracer, to see their ends, which
/// `execve` waits for.
fn let_go(processes: Vec<Vec<Stopped>>, guard: Option<Guard>) -> Result<()> {
    unbind(&processes, guard.as_ref())?;
    let mut first = true;
    for thread in processes.into_iter().flatten() {
        let tid = thread.tid();
        match thread.detach() {
            Err(stillpoint_linux::Error::Gone(_)) if !first => {
                Seized::born(tid).wait()?;
            }
            detached => detached?,
        }
        first = false;
    }
    drop(guard); // which waits for it
    Ok(())
}

/// From now on they do not die with us any more: all at once, as seen by whoever kills us.
fn unbind(processes: &[Vec<Stopped>], guard: Option<&Guard>) -> Result<()> {
    if let Some(guard) = guard {
        let _ = guard.begin(); // somebody may have killed it
    }
    for thread in processes.iter().flatten() {
        match thread.set_options(0) {
            Err(stillpoint_linux::Error::Gone(_)) => {} // somebody has killed it; its end will be seen
            done => done?,
        }
    }
    if let Some(guard) = guard {
        guard.end();
    }
    Ok(())
}

/// Gives every thread its own registers, and its calls back to it if it dispatches them; they are ready to run, and make no calls for us
/// any more. Removes the code of remote calls from where it is told.
pub fn finish_threads(
    mut threads: Vec<Remote<'_>>,
    process: &Process,
    room: Option<u64>,
) -> Result<Vec<Stopped>> {
    /// So many are on their way at a time.
    const TOGETHER: usize = 64;
    let mut registers = Vec::with_capacity(threads.len());
    for (remotes, rows) in threads.chunks_mut(TOGETHER).zip(process.threads.chunks(TOGETHER)) {
        registers.extend(all_blocked_again(remotes, rows)?);
    }
    for (remote, _) in
        threads.iter_mut().zip(&process.threads).filter(|(_, row)| arch::has_tiles(&row.xstate.0))
    {
        remote.make_room_for_tiles()?;
    }
    if let Some(room) = room {
        space::unmap_area(&mut threads[0], room)?;
    }
    threads.iter_mut().try_for_each(Remote::settle)?;
    let mut ready = Vec::with_capacity(threads.len());
    for ((mut remote, thread), regs) in threads.into_iter().zip(&process.threads).zip(registers) {
        remote.settled()?;
        let stopped = remote.release()?;
        stopped.set_xstate(&thread.xstate.0)?;
        stopped.set_regs(&regs)?;
        stopped.set_sigmask(thread.sigmask)?;
        if let Some(Dispatch { offset, len, selector }) = thread.dispatch {
            stopped.set_dispatch(Some(dispatch::Dispatch::new(offset, len, selector)))?;
        }
        ready.push(stopped);
    }
    Ok(ready)
}

/// The registers threads go on with. Calls with a relative timeout are made again for the time that was left, all at the same time.
fn all_blocked_again(remotes: &mut [Remote<'_>], rows: &[Thread]) -> Result<Vec<Regs>> {
    let mut resumptions = Vec::with_capacity(remotes.len());
    for (place, (remote, thread)) in remotes.iter_mut().zip(rows).enumerate() {
        resumptions.push(Resumption::begin(remote, thread, place)?);
    }
    for (remote, _) in remotes.iter_mut().zip(&resumptions).filter(|(_, r)| r.call.is_some()) {
        remote.interrupt_call()?;
    }
    remotes.iter_mut().zip(resumptions).map(|(remote, resumption)| resumption.end(remote)).collect()
}

/// How a thread goes on.
struct Resumption {
    regs: Regs,
    /// The call that it is being interrupted in.
    call: Option<u64>,
}

impl Resumption {
    /// A call with a relative timeout is made again for the time that was left,
    /// and interrupted at once: the kernel then holds the state by which `restart_syscall` goes on with it, as it did
    /// for the original thread. `place`: among those that are on their way at the same time.
    fn begin(remote: &mut Remote<'_>, thread: &Thread, place: usize) -> Result<Self> {
        let regs = Regs::from_bytes(&thread.regs.0);
        let regs =
            regs.ok_or_else(|| Error::Failed(format!("thread {}: its registers are damaged", thread.tid)))?;
        if regs.interrupted() != Interrupted::RestartBlock {
            return Ok(Resumption { regs, call: None });
        }
        let Some(call) = thread.blocked else {
            // It is not known which call this was: the kernel itself answers so when it has lost the state.
            let regs = Regs { rax: (-i64::from(libc::EINTR)) as u64, orig_rax: arch::NO_SYSCALL, ..regs };
            return Ok(Resumption { regs, call: None });
        };
        let original = Regs { orig_rax: call.nr, ..regs };
        let mut again = original.reissue();
        if let Some(left) = call.remaining_ns {
            shorten(remote, &mut again, call.nr, left, place)?;
        }
        remote.begin_call(&again)?;
        Ok(Resumption { regs, call: Some(call.nr) })
    }

    fn end(self, remote: &mut Remote<'_>) -> Result<Regs> {
        let Resumption { regs, call: Some(nr) } = self else { return Ok(self.regs) };
        let after = remote.interrupted()?;
        Ok(match after.interrupted() {
            Interrupted::No => Regs { rax: after.rax, orig_rax: arch::NO_SYSCALL, ..regs },
            // As the original stood: with its own arguments, on its way to `restart_syscall`.
            _ => Regs { rax: after.rax, orig_rax: nr, ..regs },
        })
    }
}

/// Changes the timeout of a call that is about to be made.
fn shorten(remote: &mut Remote<'_>, regs: &mut Regs, nr: u64, left_ns: u64, place: usize) -> Result<()> {
    let at = remote.scratch(place);
    let words = [left_ns / 1_000_000_000, left_ns % 1_000_000_000];
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    match nr as i64 {
        libc::SYS_poll => {
            // Rounded up: a wait may be longer than asked, never shorter.
            regs.rdx = left_ns.div_ceil(1_000_000);
            return Ok(());
        }
        libc::SYS_nanosleep => regs.rdi = at.0,
        libc::SYS_clock_nanosleep => regs.rdx = at.0,
        libc::SYS_futex => regs.r10 = at.0,
        _ => return Ok(()),
    }
    remote.memory().write(RemoteAddr(at.0), &bytes)?;
    Ok(())
}
