//! Everything about a frozen process except the contents of its memory.

use crate::attributes;
use crate::attributes::hidden;
use crate::attributes::target::{self, Examined, Others, Seen};
use crate::attributes::thread::{Look, ThreadFiles};
use crate::blocked::{self, Clocks, Earlier, Waiting};
use crate::brief::deliverable;
use crate::files::noticed::Noticed;
use crate::files::{self, Outsiders};
use crate::freeze::Frozen;
use crate::mappings::{Mappings, capture_mappings};
use crate::target::Target;
use crate::visits::{self, Visits};
use crate::{Builder, Error, Refusal, Result};
use rustix::fs::AtFlags;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hint::black_box;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stillpoint_image::{
    AddressSpace, Backing, BlockedCall, Bytes, Image, Mapping, MappingFlags, PathFile, Process, Rseq, Thread,
    Usage,
};
use stillpoint_linux::arch::{self, Regs};
use stillpoint_linux::descriptors::{make_room, raise_descriptor_limit};
use stillpoint_linux::fdinfo;
use stillpoint_linux::inject::outside;
use stillpoint_linux::layout;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pager::{self, Role};
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::ptrace::{RseqConfiguration, Stop, Stopped};

/// Whether all files of so many threads may stay open from one time that they are looked at to the next.
fn may_stay_open(threads: usize) -> bool {
    const MOST: usize = 256;
    const EACH: u64 = 20;
    let enough = |(_, most)| threads as u64 * EACH < most / 2;
    threads <= MOST && raise_descriptor_limit().is_ok_and(enough)
}

/// What is known of a process before it is stopped.
#[derive(Debug)]
pub struct Known {
    /// The process.
    pub(crate) target: Arc<Target>,
    /// What about it as a whole was looked at.
    examined: Examined,
    /// The files of its threads in `/proc`.
    threads: HashMap<u32, ThreadFiles>,
    /// Its mappings; `None` if they must be read in the freeze.
    mappings: Option<Mappings>,
    /// What its threads were waiting for.
    waiting: HashMap<u32, Waiting>,
    /// Calls that an earlier checkpoint found interrupted, by thread, with the time left now.
    earlier: HashMap<u32, BlockedCall>,
    /// Of the states of its mappings only what changes contents is of interest, if the mappings are those of before.
    recalled: Option<Guards>,
    /// For how long its threads have been waiting is told by these.
    clocks: Clocks,
    /// When it was stopped, on our monotonic clock.
    stopped_ns: u64,
    /// Its memory is on its way, and whoever takes the checkpoint knows from where.
    is_loading: bool,
    /// What was described of it when it stood still before, if that is to be kept.
    described: Option<Mutex<Described>>,
    /// What it would have noticed when it was looked at first.
    noticed: Noticed,
    /// Whether it may be asked whether it is in a Landlock domain ([`hidden::is_near`]).
    pub(crate) is_near: bool,
}

/// What was described of a process at one stop, to be taken over at the next as long as the kernel tells the very same of it.
#[derive(Debug, Default)]
struct Described {
    /// Where its links led.
    links: HashMap<&'static str, Linked>,
    /// Its mappings, if all of them can be taken over.
    mappings: Option<DescribedMappings>,
}

/// Mappings as they were described.
#[derive(Debug)]
struct DescribedMappings {
    /// What `maps` told.
    told: Vec<Vma>,
    all: Vec<Mapping>,
    /// The files behind them, each with its row of then.
    files: Vec<(u32, PathFile)>,
}

/// Where a link of the process's folder led, by what is told of it.
#[derive(Debug)]
struct Linked {
    path: Vec<u8>,
    place: (u64, u64),
    file: PathFile,
}

/// Whether guard regions are looked up, which takes a walk through all pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guards {
    /// They are.
    Now,
    /// Whoever asks sees to them ([`crate::mappings::put_guards`]), where the mappings are those of before.
    Later,
}

/// How a process is to be looked at.
#[derive(Clone, Copy, Debug)]
pub struct Regard<'a> {
    /// Nothing that is assumed in the freeze may have to be confirmed after it.
    pub exact: bool,
    /// Its memory may still be on its way.
    pub is_loading: bool,
    /// All processes of its tree.
    pub tree: &'a [u32],
}

impl Known {
    /// Learns what can be learned while the program runs; called right before it is stopped. What cannot be captured
    /// is among the refusals; what a rehearsal finds is noted in `rehearsed`.
    ///
    /// # Errors
    /// That something cannot be read, or the process is gone.
    pub fn learn(
        builder: &mut Builder,
        target: &Arc<Target>,
        outsiders: &Outsiders,
        regard: Regard<'_>,
        rehearsed: &mut Builder,
    ) -> Result<Self> {
        let (process, pagemap, pid) = (&target.process, &target.pagemap, target.pid);
        // One for each descriptor of the program, two for each socket, several for each thread.
        let (fds, tids) = (process.list("fd")?.len(), process.threads()?.len());
        make_room(2 * fds + 16 * tids + 64);
        process.keep_open(&attributes::process::FILES);
        let mut known = Self::open(target, target::examine(builder, process, Others::All)?)?;
        attributes::semaphores::refuse_undo(builder, &[pid])?;
        // Without them it takes longer in the freeze.
        known.threads.values_mut().for_each(|files| drop(known.examined.get_ready(files)));
        if builder.refusals.is_empty() {
            let mut mappings = Mappings::read(process, pagemap)?;
            if mappings.wait_for_pages() {
                let mut servers = pager::servers_of(pid);
                if servers.is_empty() {
                    // Of a process that was made meanwhile those who serve it know nothing but its memory.
                    servers = regard.tree.iter().flat_map(|&member| pager::servers_of(member)).collect();
                }
                known.is_loading = regard.is_loading;
                if servers.contains(&Role::Lacks) {
                    let why =
                        "some of its memory cannot be loaded from the checkpoint that it was restored from";
                    return Err(Error::Failed(why.into()));
                }
                if servers.contains(&Role::Pages) && !regard.is_loading {
                    return Err(Error::Refused(vec![Refusal {
                        what: target::named(pid),
                        why: "its memory is kept within a limit (--memory-limit), and only checkpoints of its job have what is not in memory"
                            .into(),
                        hint: "take one by the name of the job, without --engine and --full".into(),
                    }]));
                }
                if !servers.is_empty() && !regard.is_loading {
                    return Err(Error::Loading);
                }
                // It was about to be all there, or may be.
                mappings = known.read_mappings()?;
                if mappings.wait_for_pages() && servers.is_empty() && !handles_page_faults(pid) {
                    let why = "some of its memory is still to come from the checkpoint that it was restored from, and those \
                               who loaded it have been killed: it waits for ever; kill it, and restore it once more";
                    return Err(Error::Failed(why.into()));
                }
            }
            known.rehearse(&mappings, outsiders, rehearsed);
            known.mappings = (!regard.exact && !mappings.are_cheap()).then_some(mappings);
            // The rehearsal may have taken a while.
            known.examined = target::examine(builder, process, Others::Since(&known.examined))?;
        }
        Ok(known)
    }

    /// A process that was found when it stood still already: `others` are those that might share something with it.
    ///
    /// # Errors
    /// As [`Known::learn`].
    pub fn new(builder: &mut Builder, target: &Arc<Target>, others: &[u32]) -> Result<Self> {
        files::note_watches(builder, target.pid)?;
        let known = Self::open(target, target::examine(builder, &target.process, Others::These(others))?)?;
        Ok(Known { noticed: builder.noticed.clone(), ..known })
    }

    fn open(target: &Arc<Target>, examined: Examined) -> Result<Self> {
        let mut threads = HashMap::new();
        for tid in target.process.threads()? {
            // A thread that ends meanwhile, or for which we have no descriptors left, is none of those known.
            if let Ok(files) = target.process.sibling(tid).map_err(Error::from).and_then(ThreadFiles::open) {
                threads.insert(tid, files);
            }
        }
        let is_near = hidden::is_near(&target.process);
        let (waiting, earlier, target) = (HashMap::new(), HashMap::new(), target.clone());
        #[rustfmt::skip]
        let known = Known {
            target, examined, threads, waiting, earlier, mappings: None, recalled: None, stopped_ns: 0, is_loading: false,
            clocks: Clocks::default(), described: None, noticed: Noticed::default(), is_near,
        };
        Ok(known)
    }

    /// Of a process that was described, and has run on since: what has to be learned anew for it to be described again. What was
    /// learned before and is not true any more makes that fail, and not be wrong: then all is to be learned anew.
    ///
    /// # Errors
    /// As [`Known::learn`].
    pub fn renew(&mut self, builder: &mut Builder) -> Result<()> {
        builder.noticed.clone_from(&self.noticed);
        let process = &self.target.process;
        let tids = process.threads()?;
        let mut threads = std::mem::take(&mut self.threads);
        let mut children = Vec::new();
        // One that is held open for a thread that is no more, whose id another one may have by now, tells nothing.
        threads.retain(|tid, files| match files.children() {
            Ok(found) if tids.contains(tid) => {
                children.extend(found);
                true
            }
            _ => false,
        });
        self.examined.forget(|tid| !threads.contains_key(&tid));
        let may_stay = threads.len() == tids.len() || may_stay_open(tids.len());
        for tid in tids {
            if let Entry::Vacant(place) = threads.entry(tid)
                && let Ok(mut files) = process.sibling(tid).map_err(Error::from).and_then(ThreadFiles::open)
            {
                if may_stay && self.examined.get_ready(&mut files).is_ok() {
                    files.folder.keep_open(&blocked::FILES);
                }
                children.extend(files.children().unwrap_or_default());
                place.insert(files);
            }
        }
        self.threads = threads;
        (self.mappings, self.recalled, self.is_loading) = (None, None, false);
        self.examined.renew(builder, process, &children);
        Ok(())
    }

    /// Keeps open what [`Known::renew`] would.
    pub fn keep_open(&mut self) {
        self.target.process.keep_open(&attributes::process::FILES);
        self.target.process.keep_threads_open();
        self.described = Some(Mutex::default());
        if !may_stay_open(self.threads.len()) {
            return;
        }
        for files in self.threads.values_mut() {
            // Without them it takes longer.
            let _ = self.examined.get_ready(files);
            files.folder.keep_open(&blocked::FILES);
        }
    }

    /// Takes it that its mappings have the states that they had at some time before, but for guard regions: as long as `maps` tells
    /// the same ones.
    pub fn recall(&mut self, mappings: Mappings, guards: Guards) {
        (self.mappings, self.recalled) = (Some(mappings), Some(guards));
    }

    /// Whether the mappings still are such that their states need not be read in the freeze, if they were.
    pub fn holds(&self) -> bool {
        let Some(mappings) = &self.mappings else { return true };
        self.target.process.maps().is_ok_and(|now| mappings.carried_over(&now).is_some())
    }

    /// The program has been stopped; the first of its threads so long ago. `earlier` is what was found at an earlier stop; `now_ns` the
    /// time on the program's own monotonic clock.
    ///
    /// A thread may have stopped right then, and what was left of its sleep have passed since: on a busy machine a stop takes long.
    pub fn stopped(&mut self, earlier: &Earlier, now_ns: i64, ago: Duration) {
        let ago = ago.as_nanos() as u64;
        self.stopped_ns = blocked::monotonic_ns().saturating_sub(ago);
        self.earlier = earlier.calls_at(now_ns.saturating_sub_unsigned(ago));
    }

    /// Looks again who shares something with processes.
    pub fn refresh(all: &mut [Known]) {
        target::refresh(all.iter_mut().map(|known| (&*known.target.process, &mut known.examined)));
    }

    /// Goes over all threads as the freeze will, right before it does so again, with caches warm. Looks what they are
    /// waiting for last of all, so that it is the same sleep that the freeze interrupts.
    pub fn observe(&mut self) {
        for files in self.threads.values() {
            let _ = self.examined.see(files);
        }
        self.observe_calls();
    }

    /// Looks what its threads are waiting for, right before the freeze.
    pub fn observe_calls(&mut self) {
        let threads = self.threads.iter().map(|(&tid, files)| (tid, &files.folder));
        self.waiting = blocked::observe(threads, &mut self.clocks);
    }

    /// Its id in our pid namespace.
    pub fn pid(&self) -> u32 {
        self.target.pid
    }

    /// The children of threads of it, which are at rest.
    ///
    /// # Errors
    /// That one of them cannot be asked.
    pub fn children(&self, tids: &[u32]) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for tid in tids {
            match self.threads.get(tid).map(ThreadFiles::children) {
                Some(Ok(children)) => all.extend(children),
                // A new one, or one that has the number of one that ended.
                _ => {
                    let folder = self.target.process.sibling(*tid)?;
                    all.extend(folder.children_of_thread()?);
                }
            }
        }
        Ok(all)
    }

    /// How many threads it had.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// How many mappings it had.
    pub fn mapped(&self) -> usize {
        self.mappings.as_ref().map_or(0, |mappings| mappings.smaps().len())
    }

    /// Goes through most of [`inspect`] while the program runs: what is then done in the freeze is done for the second
    /// time, with code, memory and the kernel's tables of names at hand. Returns what it found, which may be wrong.
    fn rehearse(&self, mappings: &Mappings, outsiders: &Outsiders, builder: &mut Builder) {
        let process = &self.target.process;
        if let (Ok(stat), Ok(status)) = (process.stat(), process.status()) {
            let _ = attributes::process::process(process, &self.target.home, &stat, &status);
            let _ = attributes::process::space(process, &stat);
        }
        let _ = capture_mappings(builder, outsiders, process, mappings);
        for (name, usage) in [("exe", Usage::Read), ("cwd", Usage::Path), ("root", Usage::Path)] {
            let _ = link(builder, process, name, usage);
        }
    }

    /// The mappings at the cut; whether their states are assumed to be those of before. `now`: as `maps` tells them.
    fn mappings(&self, now: &[Vma]) -> Result<(Mappings, bool)> {
        let Some(mappings) = self.mappings.as_ref().and_then(|before| before.carried_over(now)) else {
            let mappings = self.read_mappings()?;
            // Those of a child that was made meanwhile, by a process whose memory is still on its way.
            if mappings.wait_for_pages() && !handles_page_faults(self.target.pid) {
                return Err(Error::Loading);
            }
            return Ok((mappings, false));
        };
        let mappings = match self.recalled {
            Some(Guards::Now) => mappings.with_guards_of_now(&self.target.pagemap)?,
            Some(Guards::Later) => mappings.without_guards(),
            None => mappings,
        };
        Ok((mappings, true))
    }

    /// As [`link`], of the process.
    fn link(&self, builder: &mut Builder, name: &'static str, usage: Usage) -> Result<u32> {
        let process = &self.target.process;
        let Some(described) = &self.described else { return link(builder, process, name, usage) };
        let mut described = described.lock().unwrap_or_else(PoisonError::into_inner);
        let path = process.link(name)?;
        let stat = rustix::fs::statat(process, name, AtFlags::empty());
        let place = stat.ok().map(|stat| (stat.st_dev, stat.st_ino));
        let before = described.links.get(name);
        if let Some(same) = before.filter(|before| before.path == path && Some(before.place) == place) {
            return Ok(builder.path(same.file.clone()).0);
        }
        let row = link(builder, process, name, usage)?;
        let file = builder.image.paths.get(row as usize).filter(|_| builder.refusals.is_empty());
        match place.zip(file.filter(|file| !file.deleted).cloned()) {
            Some((place, file)) => drop(described.links.insert(name, Linked { path, place, file })),
            None => drop(described.links.remove(name)),
        }
        Ok(row)
    }

    /// Describes the mappings, which `maps` tells as `now`. Where they are `assumed` to have the states that they had, and all else
    /// of them is told as it was, they are as they were described then.
    fn describe_mappings(
        &self,
        builder: &mut Builder,
        outsiders: &Outsiders,
        mappings: &Mappings,
        now: &[Vma],
        assumed: bool,
    ) -> Result<Vec<Mapping>> {
        let process = &self.target.process;
        let Some(described) = &self.described else {
            return capture_mappings(builder, outsiders, process, mappings);
        };
        let mut described = described.lock().unwrap_or_else(PoisonError::into_inner);
        if !assumed || mappings.have_guards() {
            described.mappings = None;
            return capture_mappings(builder, outsiders, process, mappings);
        }
        if let Some(same) = described.mappings.as_ref().filter(|before| before.told == now) {
            let row = |(row, file): &(u32, PathFile)| (*row, builder.path(file.clone()).0);
            let rows: HashMap<u32, u32> = same.files.iter().map(row).collect();
            let mut all = same.all.clone();
            for row in all.iter_mut().filter_map(|m| path_of(&mut m.backing)) {
                *row = rows.get(row).copied().unwrap_or(*row);
            }
            return Ok(all);
        }
        let (contents, refusals) = (builder.contents.len(), builder.refusals.len());
        let mut all = capture_mappings(builder, outsiders, process, mappings)?;
        let is_plain = |m: &Mapping| {
            use Backing::{Anonymous, Device, File, Special};
            matches!(m.backing, Anonymous | File { .. } | Device { .. } | Special(_))
        };
        let is_all = (contents, refusals) == (builder.contents.len(), builder.refusals.len());
        described.mappings = (is_all && all.iter().all(is_plain)).then(|| {
            let mut rows: Vec<u32> =
                all.iter_mut().filter_map(|m| path_of(&mut m.backing).copied()).collect();
            rows.sort_unstable();
            rows.dedup();
            let file = |row: u32| Some((row, builder.image.paths.get(row as usize)?.clone()));
            let files = rows.into_iter().filter_map(file).collect();
            DescribedMappings { told: now.to_vec(), all: all.clone(), files }
        });
        Ok(all)
    }

    fn read_mappings(&self) -> Result<Mappings> {
        let mappings = Mappings::read(&self.target.process, &self.target.pagemap)?;
        Ok(if self.is_loading { mappings.with_known_pages() } else { mappings })
    }
}

/// Row of the file behind a mapping.
fn path_of(backing: &mut Backing) -> Option<&mut u32> {
    match backing {
        Backing::File { path, .. } | Backing::Device { path, .. } => Some(path),
        _ => None,
    }
}

/// Whether a process has a userfaultfd of its own.
pub(crate) fn handles_page_faults(pid: u32) -> bool {
    let link = |fd: u32| fdinfo::link(pid, fd).unwrap_or_default();
    fdinfo::list(pid).unwrap_or_default().into_iter().any(|fd| link(fd) == b"anon_inode:[userfaultfd]")
}

/// Memory of ours that is there already: an allocator that grows has to ask the kernel for every few pages, and then each
/// of them for its first write.
#[derive(Debug)]
pub struct Ready {
    /// Lies behind what was given back to the allocator, which therefore keeps it.
    _end: Vec<u8>,
}

impl Ready {
    /// Enough for what is noted of so many threads and mappings.
    pub fn new(threads: usize, mappings: usize) -> Self {
        const BLOCK: usize = 64 << 10;
        const EACH_THREAD: usize = 16 << 10;
        const EACH_MAPPING: usize = 1 << 10;
        let blocks = 4 + (threads * EACH_THREAD + mappings * EACH_MAPPING).div_ceil(BLOCK).min(1024);
        let room: Vec<Vec<u8>> = (0..blocks).map(|_| black_box(vec![1; BLOCK])).collect();
        let end = black_box(vec![1; 4096]);
        drop(room);
        Ready { _end: end }
    }
}

/// What a checkpoint rests on that the freeze left no time to read.
///
/// States of mappings (advice, locks, protection keys, guard regions) do not show in `maps`, and to read them takes 5 ms
/// for each GiB. They are read before the freeze and after it; between the two, in the freeze, `maps` must tell the
/// same mappings. Where both readings agree, the states were the same all along; a program that changed some of them
/// and changed them back, within these few milliseconds and with the cut in between, is the one thing not seen.
#[derive(Debug)]
#[must_use]
pub struct Assumed(Option<Mappings>);

impl Assumed {
    /// The mappings whose states were assumed; none if they were read.
    pub fn into_mappings(self) -> Option<Mappings> {
        self.0
    }

    /// Whether it has turned out to be right; asked when the program runs again. If not, the checkpoint is to be taken
    /// anew, with [`Known::learn`] told to be exact.
    ///
    /// # Errors
    /// That the mappings cannot be read.
    pub fn holds(&self, known: &Known) -> Result<bool> {
        let Some(mappings) = &self.0 else { return Ok(true) };
        match Mappings::read(&known.target.process, &known.target.pagemap) {
            Ok(later) => Ok(mappings.agree_with(&later)),
            // It has ended since, and had time to change anything.
            Err(_) => Ok(false),
        }
    }
}

/// What has been found out about a process so far.
pub(crate) struct Portrait {
    pub process: Process,
    pub space: AddressSpace,
    /// What `/proc` tells of its threads, in the order in which they were frozen.
    pub threads: Vec<Seen>,
    /// Its children that are captured with it and run.
    pub children: Vec<Child>,
    /// Whether a child of it goes on after a stop of which it has not been told.
    pub has_continued_child: bool,
    /// The places of those that do.
    pub continued: Vec<usize>,
}

/// A child of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Child {
    /// Its place among those that are captured.
    pub place: usize,
    /// Its id, as its parent sees it.
    pub pid: u32,
}

/// Describes frozen processes, of these mappings, in the builder; not yet their descriptors and relatives. Returns for each what
/// was assumed, and what `/proc` tells of its threads; nothing if something cannot be captured.
pub fn inspect(
    builder: &mut Builder,
    frozen: &mut [Frozen],
    known: &[Known],
    outsiders: &Outsiders,
    maps: &[Vec<Vma>],
) -> Result<Vec<(Assumed, Vec<Seen>)>> {
    let mut portraits = Vec::with_capacity(known.len());
    let newer = target::newer(known.iter().map(|known| &known.examined))?;
    for (frozen, known) in frozen.iter().zip(known) {
        portraits.push(look(builder, frozen, known, &newer)?);
    }
    builder.laps.end("threads");
    note_children(&mut portraits);
    // Those that share memory are asked one after the other: frames and tables of all of them lie at the same place.
    let mut asked: HashMap<u32, usize> = HashMap::new();
    let turn_of = |k: &Known| {
        let before = asked.entry(k.target.space).or_default();
        *before += 1;
        *before - 1
    };
    let turns: Vec<usize> = known.iter().map(turn_of).collect();
    for turn in 0..=turns.iter().copied().max().unwrap_or(0) {
        let mut visits = Vec::with_capacity(known.len());
        for ((place, of_it), maps) in
            known.iter().enumerate().zip(maps).filter(|((p, _), _)| turns[*p] == turn)
        {
            if !builder.refusals.is_empty() {
                break;
            }
            let space = of_it.target.space;
            let sharers = portraits.iter().zip(known).filter(|(_, k)| k.target.space == space);
            let sharers: Vec<&Process> = sharers.map(|(portrait, _)| &portrait.process).collect();
            let planned = Visits::plan(builder, of_it, maps, &portraits[place], &sharers)?;
            visits.extend(planned.map(|planned| (place, planned)));
        }
        builder.laps.end("calls are prepared");
        if !builder.refusals.is_empty() {
            return Ok(Vec::new());
        }
        visits::make(&visits, builder, frozen, &mut portraits, |builder, portraits| {
            if turn > 0 {
                return Ok(());
            }
            for (portrait, known) in portraits.iter_mut().zip(known) {
                look_around(builder, portrait, known)?;
            }
            Ok(())
        })?;
    }
    builder.laps.end("calls are cleared up");
    note_continued(&mut portraits);
    let mut all = Vec::with_capacity(known.len());
    for (((place, portrait), known), maps) in portraits.into_iter().enumerate().zip(known).zip(maps) {
        let Portrait { process, mut space, threads, .. } = portrait;
        let row = process.space as usize;
        if turns[place] > 0 {
            // Its memory has been described.
            builder.image.processes.push(process);
            all.push((Assumed(None), threads));
            continue;
        }
        let (mappings, assumed) = known.mappings(maps)?;
        space.mappings = known.describe_mappings(builder, outsiders, &mappings, maps, assumed)?;
        if builder.image.spaces.len() <= row {
            builder.image.spaces.resize(row + 1, AddressSpace::default());
        }
        builder.image.spaces[row] = space;
        builder.image.processes.push(process);
        all.push((Assumed(assumed.then_some(mappings)), threads));
    }
    builder.laps.end("mappings");
    Ok(all)
}

/// The lowest stack pointer in the main stack of an address space of an image ([`lowest_pointer`]).
pub fn lowest_stack(image: &Image, space: u32) -> u64 {
    let mappings = &image.spaces[space as usize].mappings;
    let stack = mappings.iter().find(|m| m.flags.contains(MappingFlags::STACK));
    let sharers: Vec<&Process> = image.processes.iter().filter(|p| p.space == space).collect();
    stack.map_or(0, |stack| lowest_pointer(&sharers, stack.start..stack.end))
}

/// The lowest stack pointer in the main stack, which is this range, of all threads of some processes, which share it; 0 if the
/// first one's main thread is on another stack: then nobody knows what that holds.
pub(crate) fn lowest_pointer(sharers: &[&Process], range: std::ops::Range<u64>) -> u64 {
    let pointer = |thread: &Thread| Regs::from_bytes(&thread.regs.0).map_or(0, |regs| regs.sp());
    let main = sharers.first().and_then(|p| p.threads.first()).map_or(0, pointer);
    if !range.contains(&main) {
        return 0;
    }
    let all = sharers.iter().flat_map(|p| &p.threads).map(pointer);
    all.filter(|sp| range.contains(sp)).min().unwrap_or(0)
}

/// Looks at the threads of a frozen process, and what it is waiting for.
fn look(builder: &mut Builder, frozen: &Frozen, known: &Known, newer: &[u32]) -> Result<Portrait> {
    let new = open_new(frozen, known)?;
    let files = frozen.threads.iter().map(|t| known.threads.get(&t.tid()).or_else(|| new.get(&t.tid())));
    let files: Vec<&ThreadFiles> = files.flatten().collect();
    // By one of us alone: the kernel lets only one at a time ask about threads of the same process.
    let mut threads = files.iter().map(|f| known.examined.see(f)).collect::<Result<Vec<_>>>()?;
    builder.laps.end("threads: what /proc tells");
    target::examine_again(builder, &known.target.process, &known.examined, &threads, newer)?;
    builder.laps.end("threads: what may be");
    let mut process = Process::default();
    let asked = ask(frozen, &known.target.memory)?;
    builder.laps.end("threads: registers");
    for ((stopped, asked), seen) in frozen.threads.iter().zip(asked).zip(&mut threads) {
        let from_outside = std::mem::take(&mut seen.thread);
        process.threads.push(thread(builder, known, stopped, asked, &seen.look, from_outside)?);
    }
    builder.laps.end("threads: what ptrace tells");
    process.stopped = frozen.stopped_by();
    if process.stopped.is_some() {
        // What wait(2) tells of a stop is no more there afterwards. It is shown for the process as a whole, and not for its threads.
        // As long as not all of its threads have stopped, nobody can have been told.
        let have_all = frozen.threads.iter().all(|thread| matches!(thread.stop(), Stop::Group(_)));
        process.stop_told = Some(have_all && known.target.process.stat()?.exit_code == 0);
    }
    process.pending = pending(&frozen.threads[0], true)?;
    attributes::thread::complete_pending(threads[0].look.status.shared_pending, &mut process.pending);
    let (children, continued, has_continued_child) = (Vec::new(), Vec::new(), false);
    Ok(Portrait {
        process,
        space: AddressSpace::default(),
        threads,
        children,
        continued,
        has_continued_child,
    })
}

/// Notes of each process which of the others are its children, and run.
fn note_children(portraits: &mut [Portrait]) {
    let stat = |portrait: &Portrait| (portrait.threads[0].look.stat.pid, portrait.threads[0].look.stat.ppid);
    let places: HashMap<u32, usize> = portraits.iter().enumerate().map(|(i, p)| (stat(p).0, i)).collect();
    for place in 0..portraits.len() {
        let child = &portraits[place];
        let parent = places.get(&stat(child).1).filter(|_| child.process.stopped.is_none());
        let Some(&parent) = parent else { continue };
        let level = portraits[parent].threads[0].look.status.ns_tgid.len().saturating_sub(1);
        let pid = child.threads[0].look.status.pid_at(level);
        portraits[parent].children.push(Child { place, pid });
    }
}

/// Notes of each process whether its parent is still to be told that it goes on.
fn note_continued(portraits: &mut [Portrait]) {
    let continued = portraits.iter_mut().flat_map(|parent| std::mem::take(&mut parent.continued));
    for child in continued.collect::<Vec<_>>() {
        portraits[child].process.continued = true;
    }
}

/// Looks at what does not change while the threads answer.
fn look_around(builder: &mut Builder, portrait: &mut Portrait, known: &Known) -> Result<()> {
    let (folder, main) = (&known.target.process, &portrait.threads[0].look);
    let found = attributes::process::process(folder, &known.target.home, &main.stat, &main.status)?;
    let seen = std::mem::take(&mut portrait.process);
    portrait.process = Process {
        threads: seen.threads,
        stopped: seen.stopped,
        stop_told: seen.stop_told,
        pending: seen.pending,
        exe: known.link(builder, "exe", Usage::Read)?,
        cwd: known.link(builder, "cwd", Usage::Path)?,
        root: known.link(builder, "root", Usage::Path)?,
        space: known.target.space,
        ..found
    };
    portrait.space = attributes::process::space(folder, &main.stat)?;
    attributes::directories::of_threads(builder, folder, &portrait.threads, &mut portrait.process.threads)?;
    builder.image.meta.host.xfeatures |= arch::xstate_features(&portrait.process.threads[0].xstate.0);
    Ok(())
}

/// The files of threads that began after the others were looked at.
fn open_new(frozen: &Frozen, known: &Known) -> Result<HashMap<u32, ThreadFiles>> {
    let mut new = HashMap::new();
    for tid in frozen.threads.iter().map(Stopped::tid).filter(|tid| !known.threads.contains_key(tid)) {
        new.insert(tid, ThreadFiles::open(known.target.process.sibling(tid)?)?);
    }
    Ok(new)
}

/// Row of what a link of the process's folder leads to.
pub(crate) fn link(builder: &mut Builder, process: &Proc, name: &str, usage: Usage) -> Result<u32> {
    let path = process.link(name)?;
    if builder.views.of_process(process.pid()).is_none()
        && let Ok(stat) = rustix::fs::statat(process, name, AtFlags::empty())
        && let Some(row) = builder.known_path(stat.st_dev, stat.st_ino, &path, usage)
    {
        return Ok(row);
    }
    let what = match name {
        "exe" => "executable",
        "cwd" => "current directory",
        _ => "root directory",
    };
    let file = process.open_handle(name)?;
    Ok(files::path_file(builder, &path, file, usage, what)?.unwrap_or(0))
}

/// Registers of a thread as they were found, and its restartable sequences.
struct Asked {
    regs: Regs,
    rseq: Option<RseqConfiguration>,
    /// Where the sequence is described that it may be in; 0: nowhere.
    section: u64,
}

/// Asks all threads, and their memory with one call.
fn ask(frozen: &Frozen, memory: &Memory) -> Result<Vec<Asked>> {
    let mut all = Vec::with_capacity(frozen.threads.len());
    for stopped in &frozen.threads {
        all.push(Asked { regs: stopped.regs()?, rseq: stopped.rseq().ok(), section: 0 });
    }
    let mut registered: Vec<&mut Asked> = all.iter_mut().filter(|a| section(a).is_some()).collect();
    let words: Vec<(u64, u64)> = registered.iter().filter_map(|a| Some((section(a)?, 8))).collect();
    let mut bytes = vec![0; 8 * words.len()];
    memory.read_pinning(&words, &mut bytes)?;
    for (i, asked) in registered.iter_mut().enumerate() {
        asked.section = layout::word(&bytes, i);
    }
    Ok(all)
}

fn section(asked: &Asked) -> Option<u64> {
    asked.rseq.as_ref()?.section()
}

/// A thread, of what ptrace and `/proc` tell of it.
fn thread(
    builder: &mut Builder,
    known: &Known,
    stopped: &Stopped,
    asked: Asked,
    look: &Look,
    mut thread: Thread,
) -> Result<Thread> {
    let Asked { regs, rseq, section } = asked;
    attributes::thread::stopped(builder, stopped, look.status.seccomp, &mut thread)?;
    if !regs.is_64_bit() {
        return Err(Error::Target(format!(
            "thread {} runs 32-bit code, which is not supported",
            stopped.tid()
        )));
    }
    if regs.has_own_segment() {
        let why = "it has a segment of its own (set_thread_area), which is not given back";
        builder.refuse(format!("thread {}", stopped.tid()), why, "");
    }
    let waiting = known.waiting.get(&stopped.tid()).cloned().unwrap_or_default();
    let earlier = known.earlier.get(&thread.tid).copied();
    thread.blocked =
        blocked::interrupted_call(&known.target.memory, &regs, &waiting, earlier, known.stopped_ns);
    let status = &look.status;
    // Outside of restartable sequences, and without an `EINTR` that only our stop caused.
    let regs = blocked::unbroken(&outside(&known.target.memory, section, regs)?, deliverable(status));
    thread.regs = regs.to_bytes().into();
    thread.xstate = stopped.xstate()?.into();
    thread.sigmask = stopped.sigmask()?;
    if status.sig_pending != 0 {
        thread.pending = pending(stopped, false)?;
    }
    attributes::thread::complete_pending(status.sig_pending, &mut thread.pending);
    thread.rseq = rseq.and_then(|c| {
        let address = c.registered()?.0;
        Some(Rseq { address, size: c.size, signature: c.signature, flags: c.flags })
    });
    Ok(thread)
}

fn pending(stopped: &Stopped, of_process: bool) -> Result<Vec<Bytes>> {
    Ok(stopped.pending(of_process)?.into_iter().map(|info| info.to_vec().into()).collect())
}
