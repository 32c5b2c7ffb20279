//! A program and its snapshots.
//!
//! The first snapshot is a copy-on-write twin that stands still ([`stillpoint_linux::twin`]), from which pages are read as they
//! were; the kernel notes what the program writes from then on, and each further snapshot copies that only
//! ([`crate::history`]). A rollback puts back the pages that differ, and whatever else does: mappings, threads, descriptors, what
//! the kernel knows of them. The process stays the same one.

use crate::history::{History, Id, Origin, Page, addresses, parts, union};
use crate::still::{self, Recalled, Still, place, process, space};
use crate::{Error, Result, attributes, descriptors, layout};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use stillpoint_capture::Refusal;
use stillpoint_capture::engine::Tracking;
use stillpoint_capture::engine::fork::{is_left_out, why_no_lasting_twin};
use stillpoint_capture::engine::tracking::{Found, Look};
use stillpoint_capture::inspect::lowest_stack;
use stillpoint_capture::lend::Lender;
use stillpoint_capture::regions::{Span, spans, spans_of_maps};
use stillpoint_capture::target::Target;
use stillpoint_image::pids::Pids;
use stillpoint_image::{AddressSpace, Backing, Image, Mapping, MappingFlags, PAGE, PathFile, Range};
use stillpoint_linux::proc::{Proc, descendants};
use stillpoint_linux::program::{Arg, Program as Calls, Run};
use stillpoint_linux::ptrace::{Stopped, options};
use stillpoint_linux::remote::{Area, Remote};
use stillpoint_linux::twin::{self, Twin};
use stillpoint_linux::{RemoteAddr, descriptors as numbers, spawn};
use stillpoint_restore::attributes::outside;
use stillpoint_restore::{family, rebuild, space as rebuilding};

/// Pages are read from a twin so many at a time, bytes.
const PIECE: u64 = 16 << 20;

/// A program of which there are snapshots. All of it has to be done in the thread that began it.
#[derive(Debug)]
pub struct Program {
    target: Arc<Target>,
    recalled: Recalled,
    tracking: Tracking,
    history: History<First>,
    states: BTreeMap<Id, State>,
}

/// What was noted at a snapshot beside memory.
#[derive(Debug)]
pub struct State {
    /// The user's name for it.
    pub name: Option<String>,
    /// When it was taken.
    pub at: SystemTime,
    image: Image,
    table: descriptors::Table,
    /// Contents of shared memory.
    shared: Vec<(Range, Vec<u8>)>,
    children: Vec<u32>,
    /// Process group and session.
    groups: (i64, i64),
}

/// A snapshot that was taken.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Its number.
    pub id: Id,
    /// How long the program stood still.
    pub pause: Duration,
    /// So many pages were copied.
    pub pages: u64,
}

/// A rollback that was done.
#[derive(Clone, Debug)]
pub struct Rolled {
    /// How long the program stood still.
    pub pause: Duration,
    /// So many pages were put back.
    pub pages: u64,
    /// What is not as it was.
    pub notes: Vec<String>,
}

/// Memory as it was at the first snapshot.
#[derive(Debug)]
struct First(Option<Twin>);

impl Origin for First {
    fn read(&self, ranges: &[Range], buf: &mut [u8]) -> Result<()> {
        let twin = self.0.as_ref().ok_or_else(|| Error::Failed("a page is missing".into()))?;
        let ranges: Vec<(u64, u64)> = ranges.iter().map(|r| (r.start, r.len)).collect();
        Ok(twin.memory().read_many(&ranges, buf)?)
    }
}

impl Program {
    /// Takes the first snapshot of a program.
    ///
    /// # Errors
    /// [`Error::Refused`] if it holds what cannot be put back, and others if it cannot be followed. It runs on.
    pub fn begin(pid: u32, name: Option<String>) -> Result<(Self, Taken)> {
        let target = Arc::new(Target::open(pid, 0, None)?);
        if target.gadgets.is_none() {
            return Err(Error::Failed(
                "there is no place in its code where a system call can be made".into(),
            ));
        }
        // A refusal comes before anything is done to it.
        let mut recalled = Recalled::default();
        Still::take(&target, &mut recalled)?.thaw();
        let (mut tracking, _) = Tracking::begin_with(&target, &mut recalled.earlier)?;
        let maps = target.process.maps()?;
        tracking.look(&target, || Ok(spans_of_maps(&maps)), Look::Protect)?;
        let mut still = Still::take(&target, &mut recalled)?;
        let (twin, aside) = twin(&target, &mut still)?;
        let private = spans(space(&still.image)?);
        let found = tracking.look(&target, || Ok(private), Look::Protect)?;
        let has_twin = twin.is_some();
        let mut history = History::new(First(twin), found.own.clone());
        let copied = if has_twin { parts(&aside, &found.own) } else { found.own };
        for piece in pieces(&copied) {
            let mut bytes = vec![0; piece.iter().map(|r| r.len as usize).sum()];
            read(&target, &piece, &mut bytes)?;
            let pages = bytes.chunks_exact(PAGE as usize);
            addresses(&piece).zip(pages).for_each(|(at, page)| history.put(at, Page::from(page)));
        }
        let id = history.current();
        let states = [(id, State::of(&target, &still, name)?)].into();
        let shared: Vec<Range> =
            still.maps.iter().filter(|v| v.shared).map(|v| Range { start: v.start, len: v.len() }).collect();
        let pause = still.thaw();
        let mut program = Program { target, recalled, tracking, history, states };
        program.settle(&shared)?;
        let pages = copied.iter().map(|r| r.len / PAGE).sum();
        Ok((program, Taken { id, pause, pages }))
    }

    /// Whether its process has become another program (`execve(2)`), of which there are no snapshots.
    pub fn is_over(&self) -> bool {
        self.target.is_replaced()
    }

    /// Its snapshots, oldest first.
    pub fn snapshots(&self) -> impl Iterator<Item = (Id, &State)> {
        self.states.iter().map(|(id, state)| (*id, state))
    }

    /// The snapshot that it has gone on from.
    pub fn current(&self) -> Id {
        self.history.current()
    }

    /// The snapshot that one was taken after.
    pub fn parent(&self, id: Id) -> Option<Id> {
        self.history.parent(id)
    }

    /// Takes another snapshot.
    ///
    /// # Errors
    /// As [`Program::begin`]; the snapshots that there are stay.
    pub fn snapshot(&mut self, name: Option<String>) -> Result<Taken> {
        let still = Still::take(&self.target, &mut self.recalled)?;
        let private = spans(space(&still.image)?);
        let state = State::of(&self.target, &still, name)?;
        let Found { own, dirty } = self.tracking.look(&self.target, || Ok(private), Look::Protect)?;
        let dirty = Range::joined(dirty.into_iter().map(|(range, _)| range).collect());
        let advanced = self.history.advance(own, &dirty, |ranges, buf| read(&self.target, ranges, buf));
        // What was written since the last snapshot is not marked any more.
        let id = advanced.inspect_err(|_| dirty.iter().for_each(|range| self.tracking.owe(*range)))?;
        let pause = still.thaw();
        self.states.insert(id, state);
        Ok(Taken { id, pause, pages: dirty.iter().map(|r| r.len / PAGE).sum() })
    }

    /// Forgets a snapshot; whether it was the last one, after which there is nothing more to do here.
    ///
    /// # Errors
    /// [`Error::Unknown`], and that pages cannot be read.
    pub fn forget(&mut self, id: Id) -> Result<bool> {
        if !self.history.has(id) {
            return Err(Error::Unknown(id.to_string()));
        }
        let differs = self.history.remove(id)?;
        differs.into_iter().for_each(|range| self.tracking.owe(range));
        self.states.remove(&id);
        Ok(self.states.is_empty())
    }

    /// Brings the program back to a snapshot. Children that were made since are a reason not to, unless they are to be killed.
    ///
    /// # Errors
    /// [`Error::Refused`] and others, after which it runs on as it was; [`Error::Killed`] if that was not possible any more.
    pub fn rollback(&mut self, id: Id, kill_children: bool) -> Result<Rolled> {
        let state = self.states.get(&id).ok_or_else(|| Error::Unknown(id.to_string()))?;
        if let Some(twin) = &mut self.history.origin_mut().0 {
            twin.check()?;
        }
        let mut still = Still::take(&self.target, &mut self.recalled)?;
        let way = Way::plan(&self.target, state, &still, kill_children)?;
        get_ready(&self.target, state, &still)?;
        let began = still.frozen.since;
        let Self { target, tracking, history, .. } = self;
        let done = go_back(target, tracking, history, id, state, &mut still, &way);
        let pages = match done {
            Ok(pages) => pages,
            Err(e) => {
                // What is left is neither then nor now.
                let _ = spawn::tgkill(target.pid, target.pid, libc::SIGKILL);
                return Err(Error::Killed(e.to_string()));
            }
        };
        still.thaw();
        self.recalled.earlier = stillpoint_capture::earlier_calls(&state.image, target);
        self.recalled.earlier.at_ns = target.clocks().0;
        Ok(Rolled { pause: began.elapsed(), pages, notes: way.notes })
    }

    /// What can be done when the program runs again.
    fn settle(&mut self, shared: &[Range]) -> Result<()> {
        let Some(twin) = &mut self.history.origin_mut().0 else { return Ok(()) };
        twin.settle()?;
        for range in shared {
            // A sealed one stays.
            let _ = twin.unmap(RemoteAddr(range.start), range.len);
        }
        Ok(())
    }
}

impl State {
    fn of(target: &Target, still: &Still, name: Option<String>) -> Result<Self> {
        Ok(State {
            name,
            at: SystemTime::now(),
            image: still.image.clone(),
            table: still.table.clone(),
            shared: still
                .shared
                .iter()
                .map(|range| Ok((*range, whole(target, *range)?)))
                .collect::<Result<_>>()?,
            children: still.children.clone(),
            groups: groups(target)?,
        })
    }
}

/// What is in shared memory; zeros behind the end of what is mapped.
fn whole(target: &Target, range: Range) -> Result<Vec<u8>> {
    let mut bytes = vec![0; range.len as usize];
    if target.memory.read_many(&[(range.start, range.len)], &mut bytes).is_err() {
        for (page, at) in bytes.chunks_exact_mut(PAGE as usize).zip(addresses(&[range])) {
            let _ = target.memory.read(RemoteAddr(at), page); // nothing is there
        }
    }
    Ok(bytes)
}

/// Puts back what was in shared memory; how many pages that were.
fn put_shared(target: &Target, shared: &[(Range, Vec<u8>)]) -> Result<u64> {
    let mut put = 0;
    for (range, then) in shared {
        let now = whole(target, *range)?;
        let at = (range.start..range.end()).step_by(PAGE as usize);
        let pages = then.chunks_exact(PAGE as usize).zip(now.chunks_exact(PAGE as usize)).zip(at);
        for ((then, _), at) in pages.filter(|((then, now), _)| then != now) {
            target.memory.write(RemoteAddr(at), then)?;
            put += 1;
        }
    }
    Ok(put)
}

fn groups(target: &Target) -> Result<(i64, i64)> {
    let stat = target.process.stat()?;
    Ok((stat.pgrp.into(), stat.session.into()))
}

fn read(target: &Target, ranges: &[Range], buf: &mut [u8]) -> Result<()> {
    let ranges: Vec<(u64, u64)> = ranges.iter().map(|r| (r.start, r.len)).collect();
    Ok(target.memory.read_many(&ranges, buf)?)
}

/// Ranges in lists of so many bytes at most.
fn pieces(ranges: &[Range]) -> Vec<Vec<Range>> {
    let mut all: Vec<Vec<Range>> = Vec::new();
    let mut room = 0;
    for range in ranges {
        let mut rest = *range;
        while rest.len > 0 {
            if room == 0 {
                all.push(Vec::new());
                room = PIECE;
            }
            let now = Range { start: rest.start, len: rest.len.min(room) };
            if let Some(last) = all.last_mut() {
                last.push(now);
            }
            room -= now.len;
            rest = Range { start: now.end(), len: rest.len - now.len };
        }
    }
    all
}

/// A twin of a program at rest, and what is not in it. There is none where it would come to the wrong place when it ends.
fn twin(target: &Target, still: &mut Still) -> Result<(Option<Twin>, Vec<Range>)> {
    if why_no_lasting_twin(&still.image, target)?.is_some() {
        return Ok((None, Vec::new()));
    }
    let mappings = &space(&still.image)?.mappings;
    let apart = mappings.iter().filter(|m| !m.shared && is_left_out(m));
    let apart = apart.map(|m| Range { start: m.start, len: m.len() }).collect();
    let lowest = Some(lowest_stack(&still.image, 0));
    let lender = Lender { process: &target.process, memory: &target.memory, gadgets: target.gadgets, lowest };
    let forked =
        lender.main_thread(&mut still.frozen, &twin::calls(), |site, visit| Ok(Twin::fork(site, visit)?));
    match forked {
        Ok(mut twin) => {
            for m in mappings.iter().filter(|m| !m.shared && m.huge_page != 0) {
                // The program's first write to it would take another one from the pool.
                twin.unmap(RemoteAddr(m.start), m.len())?;
            }
            Ok((Some(twin), apart))
        }
        // Its filters may forbid it, or memory may be short: then all is copied.
        Err(
            stillpoint_capture::Error::Failed(_)
            | stillpoint_capture::Error::Kernel(stillpoint_linux::Error::Remote { .. }),
        ) => Ok((None, Vec::new())),
        Err(e) => Err(e.into()),
    }
}

/// What leads back.
struct Way {
    mappings: layout::Plan,
    /// What is unmapped by that, or by where the heap ends.
    gone: Vec<Range>,
    /// Where the heap ends, if that has changed.
    brk: Option<u64>,
    descriptors: descriptors::Plan,
    /// Children to be killed.
    children: Vec<u32>,
    notes: Vec<String>,
    /// Where programs can run meanwhile.
    room: u64,
}

impl Way {
    /// # Errors
    /// [`Error::Refused`] if there is no way; nothing has been done then.
    fn plan(target: &Target, state: &State, still: &Still, kill_children: bool) -> Result<Self> {
        let (then, now) = (&state.image, &still.image);
        let (process_then, process_now) = (process(then)?, process(now)?);
        let (space_then, space_now) = (space(then)?, space(now)?);
        let mut refused =
            attributes::refused((process_then, space_then), (process_now, space_now), (then, now));
        let mut notes = Vec::new();
        if state.groups != groups(target)? {
            let (what, why) =
                ("the process".into(), "it has gone to another session or process group since".into());
            refused.push(Refusal { what, why, hint: String::new() });
        }
        let (mut adjusted, mut unmap, mut shrunk) = (now.clone(), Vec::new(), Vec::new());
        let brk = (space_then.layout.brk != space_now.layout.brk).then_some(space_then.layout.brk);
        if brk.is_some() {
            (unmap, shrunk) = with_heap(&mut adjusted.spaces[0], space_then);
        }
        let mut mappings = layout::plan(then, &adjusted);
        mappings.unmap = union(&mappings.unmap, &unmap);
        let gone = union(&mappings.unmap, &shrunk);
        refused.extend(mappings.impossible.iter().map(|(range, why)| Refusal {
            what: format!("memory {:x}-{:x}", range.start, range.end()),
            why: (*why).into(),
            hint: String::new(),
        }));
        let root = format!("/proc/{}/root", target.pid);
        let mut descriptors = descriptors::plan(&state.table, &still.table, &root);
        refused.append(&mut descriptors.refused);
        notes.append(&mut descriptors.notes);
        let paths = mappings.map.iter().filter_map(|m| match m.backing {
            Backing::File { path, .. } | Backing::Device { path, .. } => Some(path),
            _ => None,
        });
        let moved = place(then, process_then.cwd) != place(now, process_now.cwd);
        for path in paths.chain(moved.then_some(process_then.cwd)) {
            refused.extend(then.paths.get(path as usize).and_then(|file| not_there(&root, file)));
        }
        let live = still::threads_of(process_now);
        for thread in process_then.threads.iter().filter(|t| !live.contains_key(&t.tid)) {
            let what = format!("thread {} ({})", thread.tid, thread.name);
            let why = if Proc::thread_by_tid(thread.tid).is_ok() {
                "it has ended since, and its id is taken"
            } else if process_now
                .threads
                .first()
                .is_none_or(|leader| leader.creds.caps[2] & MAY_CHOOSE_IDS == 0)
            {
                "it has ended since, and the program may not make one with its id (CAP_CHECKPOINT_RESTORE)"
            } else {
                continue;
            };
            refused.push(Refusal { what, why: why.into(), hint: String::new() });
        }
        let children: Vec<u32> =
            still.children.iter().copied().filter(|child| !state.children.contains(child)).collect();
        if !kill_children {
            refused.extend(children.iter().map(|child| Refusal {
                what: format!("process {child}"),
                why: "it is a child that was made since".into(),
                hint: "--kill-children ends it".into(),
            }));
        }
        let ended = state.children.iter().filter(|child| !still.children.contains(child));
        notes.extend(ended.map(|child| format!("its child {child} has ended since, and does not come back")));
        if !refused.is_empty() {
            return Err(Error::Refused(refused));
        }
        let taken = |space: &AddressSpace| {
            space
                .mappings
                .iter()
                .map(|m| {
                    let below = if m.flags.contains(MappingFlags::GROWS_DOWN) { 64 << 20 } else { 0 };
                    (m.start.saturating_sub(below), m.end)
                })
                .collect::<Vec<_>>()
        };
        let taken = [taken(space_then), taken(space_now)].concat();
        let room = rebuilding::find_gap(taken, rebuilding::AREA_LEN);
        let room = room.ok_or_else(|| Error::Failed("its address space has no room to work in".into()))?;
        Ok(Way { mappings, gone, brk, descriptors, children, notes, room })
    }
}

/// Capabilities by which ids can be chosen: `CAP_SYS_ADMIN`, `CAP_CHECKPOINT_RESTORE`.
const MAY_CHOOSE_IDS: u64 = 1 << 21 | 1 << 40;

/// Why a file or directory cannot be had again by its name, seen from a root directory.
fn not_there(root: &str, file: &PathFile) -> Option<Refusal> {
    let name = Path::new(OsStr::from_bytes(file.path.0.strip_prefix(b"/").unwrap_or(&file.path.0)));
    let stat = rustix::fs::stat(Path::new(root).join(name));
    let is_same = stat.is_ok_and(|s| s.st_ino == file.ino);
    (!is_same).then(|| Refusal {
        what: file.path.to_string(),
        why: "there is no such file any more, or another one".into(),
        hint: String::new(),
    })
}

/// Describes the heap as `brk(2)` will leave it; returns what has to make way for that, and what it is shortened by.
fn with_heap(now: &mut AddressSpace, then: &AddressSpace) -> (Vec<Range>, Vec<Range>) {
    let page = |at: u64| at.next_multiple_of(PAGE);
    let (from, to) = (page(now.layout.brk.min(then.layout.brk)), page(now.layout.brk.max(then.layout.brk)));
    if from == to {
        return (Vec::new(), Vec::new());
    }
    let grows = then.layout.brk > now.layout.brk;
    let range = Range { start: from, len: to - from };
    let mut rest = Vec::new();
    let mut in_the_way = Vec::new();
    for mapping in std::mem::take(&mut now.mappings) {
        let cut = Range { start: mapping.start, len: mapping.len() };
        if !cut.overlaps_any(&[range]) {
            rest.push(mapping);
            continue;
        }
        if grows {
            in_the_way.extend(range.parts_of(&[cut]));
        }
        for part in Range::without(&[cut], &[range]) {
            rest.push(layout::piece(&mapping, part.start, part.end()));
        }
    }
    if grows {
        let heap = then.mappings.iter().find(|m| m.flags.contains(MappingFlags::HEAP));
        let flags = heap.map_or(MappingFlags::empty(), |m| m.flags);
        rest.push(Mapping {
            start: range.start,
            end: range.end(),
            prot: (libc::PROT_READ | libc::PROT_WRITE) as u32,
            shared: false,
            backing: Backing::Anonymous,
            flags,
            pkey: 0,
            huge_page: 0,
            guards: Vec::new(),
            name: None,
        });
        rest.sort_by_key(|m| m.start);
    }
    now.mappings = rest;
    (in_the_way, if grows { Vec::new() } else { vec![range] })
}

/// Sets from outside what might not be allowed, or would be in the way: limits, as wide as they were or are, and priorities.
///
/// # Errors
/// [`Error::Refused`]; the program goes on, with some of that.
fn get_ready(target: &Target, state: &State, still: &Still) -> Result<()> {
    let (then, now) = (process(&state.image)?, process(&still.image)?);
    let refuse = |e: &dyn std::fmt::Display| {
        Error::Refused(vec![Refusal { what: "the process".into(), why: e.to_string(), hint: String::new() }])
    };
    let mut wide = then.clone();
    for limit in &mut wide.rlimits {
        if let Some(now) = now.rlimits.iter().find(|n| n.resource == limit.resource) {
            (limit.soft, limit.hard) = (limit.soft.max(now.soft), limit.hard.max(now.hard));
        }
    }
    if attributes::limits(then, space(&state.image)?) != attributes::limits(now, space(&still.image)?) {
        outside::process(target.pid, &wide, space(&state.image)?).map_err(|e| refuse(&e))?;
    }
    for thread in &then.threads {
        let was = now.threads.iter().find(|t| t.tid == thread.tid);
        if was.is_some_and(|was| (&was.sched, was.ioprio) != (&thread.sched, thread.ioprio)) {
            outside::thread(thread.tid, thread).map_err(|e| refuse(&e))?;
        }
    }
    if now.threads.iter().any(|t| !t.seccomp.is_empty()) {
        let any = still.frozen.threads.first();
        let suspended = any.map(|t| t.set_options(options::SYSCALL_GOOD | options::SUSPEND_SECCOMP));
        suspended
            .transpose()
            .map_err(|e| refuse(&format!("its seccomp filters cannot be suspended: {e}")))?;
    }
    Ok(())
}

/// Makes a program at rest what it was. If it fails, or we die, the program is killed; how many pages were put back.
fn go_back(
    target: &Target,
    tracking: &mut Tracking,
    history: &mut History<First>,
    id: Id,
    state: &State,
    still: &mut Still,
    way: &Way,
) -> Result<u64> {
    let (then, now) = (&state.image, &still.image);
    let (process_then, process_now) = (process(then)?, process(now)?);
    let space_then = space(then)?;
    let memory = &target.memory;
    let is_confined = process_now.threads.iter().any(|t| !t.seccomp.is_empty());
    let suspended = if is_confined { options::SUSPEND_SECCOMP } else { 0 };
    let flags = options::SYSCALL_GOOD | options::TRACE_CLONE | options::EXIT_KILL | suspended;
    still.frozen.threads.iter().try_for_each(|thread| thread.set_options(flags))?;
    let gadget =
        target.gadgets.ok_or_else(|| Error::Failed("there is no system call in its code".into()))?.call;
    let area = Area::new(way.room, rebuilding::AREA_LEN);
    let wanted = still::threads_of(process_then);
    let mut all = std::mem::take(&mut still.frozen.threads).into_iter();
    let leader = all.next().ok_or_else(|| Error::Failed("it has no threads".into()))?;
    let mut leader = Remote::new(memory, leader, area)?;
    rebuilding::make_area(&mut leader, gadget, way.room)?;
    let mut others: BTreeMap<u32, Stopped> = BTreeMap::new();
    for thread in all {
        match wanted.contains_key(&thread.tid()) {
            true => drop(others.insert(thread.tid(), thread)),
            // The kernel tells others of its end, in memory that is put back below.
            false => family::see_end(Remote::new(memory, thread, area)?.leave_by(libc::SYS_exit, 0)?)?,
        }
    }
    end_children(&mut leader, &way.children)?;
    let spans: Vec<Span> = spans(space(now)?);
    let found = tracking.look(target, || Ok(spans), Look::Protect)?;
    let pages = Pages::differing(history, id, &found, way, space_then)?;
    let processors = processors(target, process_then, &others, leader.tid())?;
    map(&mut leader, way, then, &pages.empty)?;
    pages.put(history, memory, space_then)?;
    let shared = put_shared(target, &state.shared)?;
    memory.write_many(&processors.iter().map(|(at, bytes)| (*at, bytes.as_slice())).collect::<Vec<_>>())?;
    finish_mappings(&mut leader, way)?;
    let (mut threads, made) = threads(memory, leader, then, others)?;
    attributes::current_directory(&mut threads[0], (then, process_then.cwd), (now, process_now.cwd))?;
    descriptors::put_back(
        &way.descriptors,
        &state.table,
        &still.table,
        &mut threads[0],
        target.pidfd.as_fd(),
    )?;
    let (then, now) = ((process_then, space_then), (process_now, space(now)?));
    attributes::put_back(&mut threads, then, now, &made, &way.children)?;
    still.frozen.threads = rebuild::finish_threads(threads, process_then, Some(way.room))?;
    // What was put back counts as it was.
    tracking.look(target, || Ok(stillpoint_capture::regions::spans(space_then)), Look::Protect)?;
    still.frozen.threads.iter().try_for_each(|thread| thread.set_options(options::SYSCALL_GOOD))?;
    Ok(pages.count() + shared)
}

/// Which pages are to be put back, and which are to be as their mapping gives them.
struct Pages {
    put: Vec<Range>,
    empty: Vec<Range>,
}

impl Pages {
    fn differing(
        history: &mut History<First>,
        id: Id,
        found: &Found,
        way: &Way,
        space: &AddressSpace,
    ) -> Result<Self> {
        let differs = history.go_to(id)?;
        let own = history.own(id);
        let written = Range::joined(found.dirty.iter().map(|(range, _)| *range).collect());
        let dropped = Range::without(own, &found.own);
        let anew: Vec<Range> =
            way.mappings.map.iter().map(|m| Range { start: m.start, len: m.len() }).collect();
        let anew = Range::joined(anew);
        let put = union(&union(&differs, &dropped), &union(&parts(&written, own), &parts(&anew, own)));
        let empty = Range::without(&Range::without(&found.own, own), &way.gone);
        // What the kernel may drop at any time is random state, which is not to be had twice.
        let droppable = space.mappings.iter().filter(|m| m.flags.contains(MappingFlags::DROPPABLE));
        let droppable: Vec<Range> = droppable.map(|m| Range { start: m.start, len: m.len() }).collect();
        let put = Range::without(&put, &droppable);
        let empty = union(&empty, &Range::without(&parts(&found.own, &droppable), &way.gone));
        Ok(Pages { put, empty })
    }

    fn count(&self) -> u64 {
        self.put.iter().chain(&self.empty).map(|r| r.len / PAGE).sum()
    }

    fn put(
        &self,
        history: &History<First>,
        memory: &stillpoint_linux::memory::Memory,
        space: &AddressSpace,
    ) -> Result<()> {
        let writable = |m: &&Mapping| m.prot & libc::PROT_WRITE as u32 != 0;
        let writable = space.mappings.iter().filter(writable).map(|m| Range { start: m.start, len: m.len() });
        let writable = Range::joined(writable.collect());
        for piece in pieces(&self.put) {
            let mut bytes = vec![0; piece.iter().map(|r| r.len as usize).sum()];
            history.read(&piece, &mut bytes)?;
            let (mut rest, mut plain) = (bytes.as_slice(), Vec::with_capacity(piece.len()));
            for range in piece {
                let (now, later) = rest.split_at(range.len as usize);
                rest = later;
                // A range may go across mappings.
                if range.parts_of(&writable).map(|r| r.len).sum::<u64>() == range.len {
                    plain.push((RemoteAddr(range.start), now));
                } else {
                    for (page, at) in now.chunks_exact(PAGE as usize).zip(addresses(&[range])) {
                        memory.write_forced(RemoteAddr(at), page)?;
                    }
                }
            }
            memory.write_many(&plain)?;
        }
        Ok(())
    }
}

/// What the kernel tells threads of the processor they run on, which is of now (`struct rseq`): where, and what.
fn processors(
    target: &Target,
    then: &stillpoint_image::Process,
    others: &BTreeMap<u32, Stopped>,
    leader: u32,
) -> Result<Vec<(RemoteAddr, Vec<u8>)>> {
    let mut all = Vec::new();
    for thread in then.threads.iter().filter(|t| t.tid == leader || others.contains_key(&t.tid)) {
        let Some(rseq) = &thread.rseq else { continue };
        // Between the two lies the pointer to what the thread is in the middle of.
        for (offset, len) in [(0, 8), (16, 16)] {
            let at = RemoteAddr(rseq.address + offset);
            let mut bytes = vec![0; len];
            target.memory.read(at, &mut bytes)?;
            all.push((at, bytes));
        }
    }
    Ok(all)
}

/// Kills processes with all their descendants, and buries the program's own children among them.
fn end_children(leader: &mut Remote<'_>, children: &[u32]) -> Result<()> {
    if children.is_empty() {
        return Ok(());
    }
    for pid in children.iter().copied().chain(descendants(children)) {
        // It may just have ended.
        let _ = numbers::pidfd_open(pid, 0)
            .map(|fd| rustix::process::pidfd_send_signal(&fd, rustix::process::Signal::KILL));
    }
    let began = Instant::now();
    let ended =
        |pid: u32| Proc::process(pid).and_then(|p| p.stat()).map_or(true, |s| matches!(s.state, b'Z' | b'X'));
    while !children.iter().all(|&pid| ended(pid)) && began.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_micros(100));
    }
    attributes::bury(leader, children)
}

/// Makes mappings what they were, as far as that comes before their pages; gives pages up that were none.
fn map(leader: &mut Remote<'_>, way: &Way, then: &Image, empty: &[Range]) -> Result<()> {
    let mut calls = Calls::new();
    let plan = &way.mappings;
    for range in &plan.unmap {
        calls.call(
            format!("munmap {:x}", range.start),
            libc::SYS_munmap,
            [range.start.into(), range.len.into()],
        );
    }
    let brk = way.brk.map(|end| (end, calls.call("brk", libc::SYS_brk, [end.into()])));
    for (range, prot) in &plan.protect {
        let args = [range.start, range.len, u64::from(*prot)].map(Arg::Value);
        calls.call(format!("mprotect {:x}", range.start), libc::SYS_mprotect, args);
    }
    let dropped: Vec<_> = empty
        .iter()
        .map(|range| (range, calls.attempt("madvise", libc::SYS_madvise, drop_of(range))))
        .collect();
    if !calls.is_empty() {
        let outcome = leader.run(&calls)?;
        // What is locked in memory is not given up.
        let mut locked = Calls::new();
        for (range, _) in dropped.iter().filter(|(_, step)| outcome.result(*step) != 0) {
            let whole = [range.start.into(), range.len.into()];
            locked.call(format!("munlock {:x}", range.start), libc::SYS_munlock, whole);
            locked.call(format!("madvise {:x}", range.start), libc::SYS_madvise, drop_of(range));
            locked.attempt("mlock", libc::SYS_mlock, whole);
        }
        if !locked.is_empty() {
            leader.run(&locked)?;
        }
        if let Some((end, step)) = brk
            && outcome.result(step) as u64 != end
        {
            return Err(Error::Failed(format!("its heap cannot end at {end:x} again")));
        }
    }
    if plan.map.is_empty() {
        return Ok(());
    }
    let mut files = Files::default();
    files.open(leader, then, &plan.map)?;
    let (space, filled) = anew(plan);
    rebuilding::map(leader, &space, &filled, &files, &|_| true)?;
    files.close(leader)?;
    Ok(rebuilding::advise_before(leader, &space, &|_| true)?)
}

/// Arguments of a call that gives pages up.
fn drop_of(range: &Range) -> [Arg; 3] {
    [range.start, range.len, libc::MADV_DONTNEED as u64].map(Arg::Value)
}

/// What is mapped anew, as the only mappings of an address space, all of which are to be filled.
fn anew(plan: &layout::Plan) -> (AddressSpace, rebuilding::Filled) {
    let space = AddressSpace { mappings: plan.map.clone(), ..AddressSpace::default() };
    let filled = rebuilding::Filled::whole(&space.mappings);
    (space, filled)
}

fn finish_mappings(leader: &mut Remote<'_>, way: &Way) -> Result<()> {
    if way.mappings.map.is_empty() {
        return Ok(());
    }
    let (space, filled) = anew(&way.mappings);
    Ok(rebuilding::finish(leader, &space, &filled)?)
}

/// Files that mappings are made from, open in the program for a moment.
#[derive(Debug, Default)]
struct Files(BTreeMap<(u32, bool), i32>);

impl Files {
    fn open(&mut self, leader: &mut Remote<'_>, image: &Image, mappings: &[Mapping]) -> Result<()> {
        for m in mappings {
            let (path, write) = match &m.backing {
                Backing::File { path, may_write, .. } => (*path, *may_write && m.shared),
                Backing::Device { path, .. } => (*path, m.shared),
                _ => continue,
            };
            if self.0.contains_key(&(path, write)) {
                continue;
            }
            let row = image.paths.get(path as usize);
            let row = row.ok_or_else(|| Error::Failed("a mapping has no file".into()))?;
            let mut calls = Calls::new();
            let name = calls.string(&row.path.0);
            let flags = if write { libc::O_RDWR } else { libc::O_RDONLY } | libc::O_CLOEXEC;
            let at = Arg::Value(libc::AT_FDCWD as u64);
            let step =
                calls.call(format!("open {}", row.path), libc::SYS_openat, [at, name, (flags as u64).into()]);
            let fd = leader.run(&calls)?.result(step) as i32;
            self.0.insert((path, write), fd);
            let stat = rustix::fs::stat(format!("/proc/{}/fd/{fd}", leader.pid()));
            if !stat.is_ok_and(|s| s.st_ino == row.ino) {
                return Err(Error::Failed(format!(
                    "{} is another file than the one that was mapped",
                    row.path
                )));
            }
        }
        Ok(())
    }

    fn close(self, leader: &mut Remote<'_>) -> Result<()> {
        let mut calls = Calls::new();
        for fd in self.0.into_values() {
            calls.call("close", libc::SYS_close, [(fd as u64).into()]);
        }
        leader.run(&calls)?;
        Ok(())
    }
}

impl rebuilding::Backings for Files {
    fn file(&self, path: u32, write: bool) -> stillpoint_restore::Result<i32> {
        let missing = || stillpoint_restore::Error::Failed("a mapping has no file".into());
        self.0.get(&(path, write)).copied().ok_or_else(missing)
    }

    fn object(&self, _object: u32) -> stillpoint_restore::Result<i32> {
        Err(stillpoint_restore::Error::Failed("shared memory is not mapped again".into()))
    }
}

/// All threads, in their order of then; those that have ended are made once more, and named.
fn threads<'a>(
    memory: &'a stillpoint_linux::memory::Memory,
    leader: Remote<'a>,
    then: &Image,
    mut others: BTreeMap<u32, Stopped>,
) -> Result<(Vec<Remote<'a>>, Vec<u32>)> {
    let (process, area) = (process(then)?, leader.area());
    let mut ended = process.clone();
    ended.threads.retain(|t| t.tid == process.pid || !others.contains_key(&t.tid));
    let made: Vec<u32> = ended.threads.iter().skip(1).map(|t| t.tid).collect();
    let mut born = family::make_threads(memory, leader, &ended, &Pids::of(then), None)?.into_iter();
    let mut all = Vec::with_capacity(process.threads.len());
    all.extend(born.next());
    for thread in process.threads.iter().skip(1) {
        match others.remove(&thread.tid) {
            Some(stopped) => all.push(Remote::new(memory, stopped, area)?),
            None => all.extend(born.next()),
        }
    }
    Ok((all, made))
}
