//! One process of a program that goes back: its memory since the first snapshot, and what leads from now to then.

use crate::history::{History, Id, Origin, Page, addresses, parts, union};
use crate::still::{self, Followed, Guest, Recalled, Still, lock, place, process, space};
use crate::{Error, Result, attributes, descriptors, layout};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stillpoint_capture::Refusal;
use stillpoint_capture::engine::Tracking;
use stillpoint_capture::engine::fork::{is_left_out, why_no_lasting_twin};
use stillpoint_capture::engine::tracking::{Found, Look};
use stillpoint_capture::inspect::lowest_stack;
use stillpoint_capture::lend::Lender;
use stillpoint_capture::regions::{spans, spans_of_maps};
use stillpoint_capture::target::Target;
use stillpoint_image::pids::Pids;
use stillpoint_image::{AddressSpace, Backing, Image, Mapping, MappingFlags, PAGE, PathFile, Range, Rlimit};
use stillpoint_linux::headroom::{headroom, in_groups};
use stillpoint_linux::proc::{Proc, descendants};
use stillpoint_linux::program::{Arg, Program as Calls, Run};
use stillpoint_linux::ptrace::{Stopped, options};
use stillpoint_linux::remote::{Area, Remote};
use stillpoint_linux::twin::{self, Twin};
use stillpoint_linux::{RemoteAddr, descriptors as numbers, host, limits};
use stillpoint_restore::attributes::outside;
use stillpoint_restore::{family, rebuild, space as rebuilding};

/// Pages are read from a twin so many at a time, bytes.
const PIECE: u64 = 16 << 20;

/// A process of which there are snapshots, or will be one.
#[derive(Debug)]
pub struct Member {
    /// Tells it from all others there ever were.
    pub who: u64,
    /// The process.
    pub target: Arc<Target>,
    /// What is known of it.
    pub recalled: Recalled,
    /// Where it writes.
    pub tracking: Followed,
    /// Its memory; none before its first snapshot.
    pub history: Option<History<First>>,
}

/// What was noted of a process at a snapshot beside memory.
#[derive(Debug)]
pub struct Part {
    /// Which process.
    pub who: u64,
    /// Its id.
    pub pid: u32,
    /// It, but for its descriptors and the contents of its memory.
    pub image: Image,
    /// What it had open.
    pub table: descriptors::Table,
    /// Contents of shared memory.
    shared: Vec<(Range, Vec<u8>)>,
    children: Vec<u32>,
    /// Process group and session.
    groups: (i64, i64),
}

/// Memory as it was at the first snapshot.
#[derive(Debug)]
pub struct First(Option<Twin>);

impl Origin for First {
    fn read(&self, ranges: &[Range], buf: &mut [u8]) -> Result<()> {
        let twin = self.0.as_ref().ok_or_else(|| Error::Failed("a page is missing".into()))?;
        let ranges: Vec<(u64, u64)> = ranges.iter().map(|r| (r.start, r.len)).collect();
        Ok(twin.memory().read_many(&ranges, buf)?)
    }
}

impl Member {
    /// Follows the writes of a process from now on.
    ///
    /// # Errors
    /// That it cannot be followed.
    pub fn follow(who: u64, target: &Arc<Target>, mut recalled: Recalled) -> Result<Self> {
        let (mut tracking, _) = Tracking::begin_with(target, &mut recalled.earlier).map_err(|e| match e {
            stillpoint_capture::Error::Incapable(refusal) => Error::Refused(vec![refusal]),
            e => Error::Capture(e),
        })?;
        let maps = target.process.maps()?;
        tracking.look(target, || Ok(spans_of_maps(&maps)), Look::Ahead)?;
        let tracking = Arc::new(Mutex::new(tracking));
        Ok(Member { who, target: target.clone(), recalled, tracking, history: None })
    }

    /// It is to come to rest; its memory is looked at meanwhile if it is known of.
    pub fn guest(&mut self, look: Look) -> Guest<'_> {
        let Member { target, recalled, tracking, history, .. } = self;
        Guest { target, memory: recalled, look: history.is_some().then_some((&*tracking, look)) }
    }

    /// It is to come to rest, and nothing more.
    pub fn guest_unseen(&mut self) -> Guest<'_> {
        Guest { target: &self.target, memory: &mut self.recalled, look: None }
    }

    /// Whether it has ended, or become another program.
    pub fn is_over(&self) -> bool {
        let ended = numbers::poll_now(&self.target.pidfd, libc::POLLIN).is_ok_and(|events| events != 0);
        ended || self.target.is_replaced()
    }

    /// Has its memory remembered at a snapshot; how many pages were copied. `twin`: whether it may have one.
    ///
    /// # Errors
    /// That pages cannot be read. What is known of its memory may have been changed.
    pub fn remember(&mut self, id: Id, still: &mut Still, found: Option<Found>, twin: bool) -> Result<u64> {
        let Some(history) = &mut self.history else { return self.remember_first(id, still, twin) };
        let Found { own, dirty, .. } = found.unwrap_or_default();
        let dirty = Range::joined(dirty.into_iter().map(|(range, _)| range).collect());
        let advanced = history.advance(id, own, &dirty, |ranges, buf| read(&self.target, ranges, buf));
        // What was written since the last snapshot is not marked any more.
        advanced.inspect_err(|_| dirty.iter().for_each(|range| lock(&self.tracking).owe(*range)))?;
        Ok(dirty.iter().map(|r| r.len / PAGE).sum())
    }

    fn remember_first(&mut self, id: Id, still: &mut Still, may_have_twin: bool) -> Result<u64> {
        let target = &self.target;
        // What the program writes from now on it has twice. Where its control groups have no room for that, all is copied to us.
        let status = target.process.status()?;
        let size = status.own_memory();
        let is_short = size > in_groups(&target.process)?;
        if is_short {
            check_own_memory(size)?;
        }
        let may_have_twin = may_have_twin && !is_short;
        let (twin, aside) = if may_have_twin { twin(target, still)? } else { (None, Vec::new()) };
        let private = spans(space(&still.image)?);
        let found = lock(&self.tracking).look(target, || Ok(private), Look::Protect)?;
        let has_twin = twin.is_some();
        let mut history = History::new(First(twin), id, found.own.clone());
        let copied = if has_twin { parts(&aside, &found.own) } else { found.own };
        for piece in pieces(&copied) {
            let mut bytes = vec![0; piece.iter().map(|r| r.len as usize).sum()];
            read(target, &piece, &mut bytes)?;
            let pages = bytes.chunks_exact(PAGE as usize);
            addresses(&piece).zip(pages).for_each(|(at, page)| history.put(at, Page::from(page)));
        }
        self.history = Some(history);
        Ok(copied.iter().map(|r| r.len / PAGE).sum())
    }

    /// Forgets a snapshot, if it has that; what differs from the one that takes its place counts as written.
    ///
    /// # Errors
    /// That pages cannot be read.
    pub fn forget(&mut self, id: Id) -> Result<()> {
        let Some(history) = self.history.as_mut().filter(|history| history.has(id)) else { return Ok(()) };
        let differs = history.remove(id)?;
        differs.into_iter().for_each(|range| lock(&self.tracking).owe(range));
        if history.ids().next().is_none() {
            self.history = None;
        }
        Ok(())
    }

    /// Whether what is known of its memory is still there.
    ///
    /// # Errors
    /// That its twin has been killed.
    pub fn check(&mut self) -> Result<()> {
        let twin = self.history.as_mut().and_then(|history| history.origin_mut().0.as_mut());
        Ok(twin.map_or(Ok(()), Twin::check)?)
    }

    /// What can be done when the program runs again after the first snapshot; `shared`: its shared memory.
    ///
    /// # Errors
    /// That its twin has been killed.
    pub fn settle(&mut self, shared: &[Range]) -> Result<()> {
        let Some(history) = &mut self.history else { return Ok(()) };
        let Some(twin) = &mut history.origin_mut().0 else { return Ok(()) };
        twin.settle()?;
        for range in shared {
            // A sealed one stays.
            let _ = twin.unmap(RemoteAddr(range.start), range.len);
        }
        Ok(())
    }
}

impl Part {
    /// Takes out of what stands still what is to be remembered of it.
    ///
    /// # Errors
    /// That shared memory cannot be read.
    pub fn of(who: u64, target: &Target, still: &mut Still) -> Result<Self> {
        Ok(Part {
            who,
            pid: target.pid,
            image: std::mem::take(&mut still.image),
            table: std::mem::take(&mut still.table),
            shared: still
                .shared
                .iter()
                .map(|range| Ok((*range, whole(target, *range)?)))
                .collect::<Result<_>>()?,
            children: std::mem::take(&mut still.children),
            groups: still.groups,
        })
    }
}

/// What is in shared memory; zeros behind the end of what is mapped.
pub fn whole(target: &Target, range: Range) -> Result<Vec<u8>> {
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

pub fn read(target: &Target, ranges: &[Range], buf: &mut [u8]) -> Result<()> {
    let ranges: Vec<(u64, u64)> = ranges.iter().map(|r| (r.start, r.len)).collect();
    Ok(target.memory.read_many(&ranges, buf)?)
}

/// Ranges in lists of so many bytes at most.
pub fn pieces(ranges: &[Range]) -> Vec<Vec<Range>> {
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

/// Refuses what would make the kernel kill somebody for want of memory. `size`: of a program that is to be copied, bytes.
fn check_own_memory(size: u64) -> Result<()> {
    let left = headroom(&Proc::process(std::process::id())?)?;
    if size <= left {
        return Ok(());
    }
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
    Err(Error::Refused(vec![Refusal {
        what: "its memory".into(),
        why: format!(
            "to remember it may take {} MiB, and only {} MiB can be had",
            mebibytes(size),
            mebibytes(left)
        ),
        hint: "give its control group more memory (memory.max)".into(),
    }]))
}

/// A twin of a program at rest, and what is not in it. There is none where it would come to the wrong place when it ends.
pub fn twin(target: &Target, still: &mut Still) -> Result<(Option<Twin>, Vec<Range>)> {
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
            | stillpoint_capture::Error::Incapable(_)
            | stillpoint_capture::Error::Kernel(stillpoint_linux::Error::Remote { .. }),
        ) => Ok((None, Vec::new())),
        Err(e) => Err(e.into()),
    }
}

/// What leads back.
pub struct Way {
    mappings: layout::Plan,
    /// What is unmapped by that, or by where the heap ends.
    gone: Vec<Range>,
    /// Where the heap ends, if that has changed.
    brk: Option<u64>,
    /// What is open.
    pub descriptors: descriptors::Plan,
    /// Children to be killed.
    pub children: Vec<u32>,
    /// What will not be as it was.
    pub notes: Vec<String>,
    /// Where programs can run meanwhile.
    room: u64,
}

/// Mappings that are there only while a process goes back: the area for remote calls, and what is cut in two.
const FEW: usize = 16;

impl Way {
    /// `killing`: children that were made since are to be killed; `alone`: what becomes of others is no matter of this program.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no way; nothing has been done then.
    pub fn plan(target: &Target, part: &Part, still: &Still, killing: bool, alone: bool) -> Result<Self> {
        let (then, now) = (&part.image, &still.image);
        let (process_then, process_now) = (process(then)?, process(now)?);
        let (space_then, space_now) = (space(then)?, space(now)?);
        let mut refused =
            attributes::refused((process_then, space_then), (process_now, space_now), (then, now));
        let mut notes = Vec::new();
        if part.groups != still.groups {
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
        let mut descriptors = descriptors::plan(&part.table, &still.table, &root);
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
            // In a pid namespace that a restore made for it, ids are told by the /proc of its process 1.
            let is_taken = match target.home.first {
                Some(first) => Path::new(&format!("/proc/{first}/root/proc/{}", thread.tid)).exists(),
                None => Proc::thread_by_tid(thread.tid).is_ok(),
            };
            let why = if is_taken {
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
            still.children.iter().copied().filter(|child| !part.children.contains(child)).collect();
        if !killing {
            refused.extend(children.iter().map(|child| Refusal {
                what: format!("process {child}"),
                why: "it is a child that was made since".into(),
                hint: "--kill-children ends it".into(),
            }));
        }
        for child in part.children.iter().filter(|child| !still.children.contains(child)) {
            match alone {
                true => notes.push(format!("its child {child} has ended since, and does not come back")),
                false => refused.push(Refusal {
                    what: format!("process {child}"),
                    why: "it is a child that has ended since, and does not come back".into(),
                    hint: String::new(),
                }),
            }
        }
        let (most, present) = (host::most_mappings(), space_now.mappings.len());
        if present + mappings.map.len() + gone.len() + FEW > most {
            refused.push(Refusal {
                what: format!("its {present} mappings"),
                why: format!("a process may have {most}, and while it goes back it has some more"),
                hint: "raise vm.max_map_count (sysctl)".into(),
            });
        }
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
        let room = room.ok_or_else(|| {
            let why = "there is no room left in it to work in".into();
            Error::Refused(vec![Refusal { what: "its address space".into(), why, hint: String::new() }])
        })?;
        Ok(Way { mappings, gone, brk, descriptors, children, notes, room })
    }
}

impl Way {
    /// Whether mappings come, go or change.
    fn changes_mappings(&self) -> bool {
        let layout::Plan { unmap, map, protect, .. } = &self.mappings;
        self.brk.is_some()
            || !(unmap.is_empty() && map.is_empty() && protect.is_empty() && self.gone.is_empty())
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
pub fn get_ready(target: &Target, part: &Part, still: &Still, way: &Way) -> Result<()> {
    let (then, now) = (process(&part.image)?, process(&still.image)?);
    let refuse = |e: &dyn std::fmt::Display| {
        Error::Refused(vec![Refusal { what: "the process".into(), why: e.to_string(), hint: String::new() }])
    };
    let mut wide = then.clone();
    for limit in &mut wide.rlimits {
        if let Some(now) = now.rlimits.iter().find(|n| n.resource == limit.resource) {
            (limit.soft, limit.hard) = (limit.soft.max(now.soft), limit.hard.max(now.hard));
        }
    }
    lift(target, space(&still.image)?, way, &mut wide.rlimits)?;
    if attributes::limits(&wide, space(&part.image)?) != attributes::limits(now, space(&still.image)?) {
        outside::process(target.pid, &wide, space(&part.image)?, false).map_err(|e| refuse(&e))?;
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

const CAP_IPC_LOCK: u64 = 1 << 14;

/// Lifts limits within which there is no memory for going back: for the area from which it is done, and for what is mapped again.
fn lift(target: &Target, now: &AddressSpace, way: &Way, rlimits: &mut [Rlimit]) -> Result<()> {
    // Proc(5), in pages.
    let sizes = target.process.read("statm")?;
    let sizes = String::from_utf8_lossy(&sizes);
    let size = |field: usize| sizes.split(' ').nth(field)?.trim_end().parse::<u64>().ok();
    let is_locked =
        now.lock_future != 0 || way.mappings.map.iter().any(|m| m.flags.contains(MappingFlags::LOCKED));
    let status = target.process.status()?;
    let is_bound = is_locked && status.caps[2] & CAP_IPC_LOCK == 0;
    let used = |resource: u32| match resource {
        libc::RLIMIT_AS => Some(size(0).unwrap_or(0) * PAGE),
        libc::RLIMIT_DATA => Some(size(5).unwrap_or(0) * PAGE),
        libc::RLIMIT_MEMLOCK => is_bound.then_some(status.locked),
        _ => None,
    };
    let more = rebuilding::AREA_LEN + way.mappings.map.iter().map(Mapping::len).sum::<u64>();
    for limit in rlimits {
        let Some(used) = used(limit.resource) else { continue };
        if used.saturating_add(more) <= limit.soft {
            continue;
        }
        match limits::set(target.pid, limit.resource, u64::MAX, u64::MAX) {
            Ok(()) => (limit.soft, limit.hard) = (u64::MAX, u64::MAX),
            Err(_) if used.saturating_add(more) <= limit.hard => limit.soft = limit.hard,
            Err(e) => {
                let name = limits::NAMES[limit.resource as usize];
                return Err(Error::Refused(vec![Refusal {
                    what: format!("its limit RLIMIT_{name}"),
                    why: format!("leaves no memory for going back, and cannot be lifted meanwhile: {e}"),
                    hint: "CAP_SYS_RESOURCE permits that".into(),
                }]));
            }
        }
    }
    Ok(())
}

/// Sets back what [`get_ready`] has changed, of a program that does not go back after all.
///
/// # Errors
/// That something cannot be set.
pub fn set_back(target: &Target, still: &Still) -> Result<()> {
    let now = process(&still.image)?;
    outside::process(target.pid, now, space(&still.image)?, false)?;
    Ok(now.threads.iter().try_for_each(|thread| outside::thread(thread.tid, thread))?)
}

/// From now on a process is killed with us: what is changed of it is neither then nor now. So its calls, which are ours now, need not be
/// dispatched to it until it is whole.
pub fn bind(still: &Still) -> Result<()> {
    let threads = &process(&still.image)?.threads;
    let is_confined = threads.iter().any(|t| !t.seccomp.is_empty());
    let suspended = if is_confined { options::SUSPEND_SECCOMP } else { 0 };
    let flags = options::SYSCALL_GOOD | options::TRACE_CLONE | options::EXIT_KILL | suspended;
    still.frozen.threads.iter().try_for_each(|thread| thread.set_options(flags))?;
    match threads.iter().any(|t| t.dispatch.is_some()) {
        true => Ok(still.frozen.threads.iter().try_for_each(|thread| thread.set_dispatch(None))?),
        false => Ok(()),
    }
}

/// It is whole again.
pub fn unbind(still: &Still) -> Result<()> {
    Ok(still.frozen.threads.iter().try_for_each(|thread| thread.set_options(options::SYSCALL_GOOD))?)
}

/// A process on its way back: its memory, threads and descriptors are what they were.
pub struct Returning<'a> {
    member: &'a Member,
    part: &'a Part,
    way: &'a Way,
    threads: Vec<Remote<'a>>,
    /// Threads that were made once more.
    made: Vec<u32>,
    /// Children that were made since, as the process calls them: they are no more.
    killed: Vec<u32>,
    has_ended: bool,
    pages: Pages,
    shared: u64,
}

impl<'a> Returning<'a> {
    /// Makes a process at rest what it was, but for what it shares with others and what is pending. If it fails, or we die, the program
    /// is killed.
    pub fn begin(
        member: &'a Member,
        history: &mut History<First>,
        (id, part): (Id, &'a Part),
        still: &mut Still,
        found: &Found,
        way: &'a Way,
    ) -> Result<Self> {
        let (target, mut tracking) = (&*member.target, lock(&member.tracking));
        let (then, now) = (&part.image, &still.image);
        let process_then = process(then)?;
        let space_then = space(then)?;
        let memory = &target.memory;
        let gadget =
            target.gadgets.ok_or_else(|| Error::Failed("there is no system call in its code".into()))?.call;
        let area = Area::new(way.room, rebuilding::AREA_LEN);
        let wanted = still::threads_of(process_then);
        // What they are called in an image, which may be told in another pid namespace than ours: in the same order.
        let ids: Vec<u32> = process(now)?.threads.iter().map(|thread| thread.tid).collect();
        if ids.len() != still.frozen.threads.len() {
            return Err(Error::Failed("not all of its threads were described".into()));
        }
        let own = ids.first().copied().unwrap_or_default();
        let mut all = ids.into_iter().zip(std::mem::take(&mut still.frozen.threads));
        let (_, leader) = all.next().ok_or_else(|| Error::Failed("it has no threads".into()))?;
        let mut leader = Remote::new(memory, leader, area)?;
        rebuilding::make_area(&mut leader, gadget, way.room)?;
        let (mut others, mut has_ended): (BTreeMap<u32, Stopped>, bool) = (BTreeMap::new(), false);
        for (tid, thread) in all {
            match wanted.contains_key(&tid) {
                true => drop(others.insert(tid, thread)),
                // The kernel tells others of its end, in memory that is put back below.
                false => {
                    family::see_end(Remote::new(memory, thread, area)?.leave_by(libc::SYS_exit, 0)?)?;
                    has_ended = true;
                }
            }
        }
        let killed = match way.children.is_empty() {
            true => Vec::new(),
            false => end_children(&mut leader, target, &part.children)?,
        };
        // What the kernel has written at the end of threads, it has written since the look.
        let found = match has_ended {
            true => {
                found.dirty.iter().for_each(|(range, _)| tracking.owe(*range));
                let spans = spans(space(now)?);
                &tracking.look(target, || Ok(spans), Look::Protect)?
            }
            false => found,
        };
        let pages = Pages::differing(history, id, found, way, space_then)?;
        let processors = processors(target, process_then, &others, own)?;
        map(&mut leader, way, then, &pages.empty)?;
        pages.put(history, memory, space_then)?;
        let shared = put_shared(target, &part.shared)?;
        memory
            .write_many(&processors.iter().map(|(at, bytes)| (*at, bytes.as_slice())).collect::<Vec<_>>())?;
        finish_mappings(&mut leader, way)?;
        let (mut threads, made) = threads(memory, leader, then, others)?;
        let directories = ((then, process_then.cwd), (now, process(now)?.cwd));
        attributes::current_directory(&mut threads[0], directories.0, directories.1)?;
        descriptors::put_back(
            &way.descriptors,
            &part.table,
            &still.table,
            &mut threads[0],
            target.pidfd.as_fd(),
        )?;
        Ok(Returning { member, part, way, threads, made, killed, has_ended, pages, shared })
    }

    /// Does what is left, when all that others have to do with it is what it was; how many pages were put back. `others`: those that go
    /// back with it, as it calls them.
    pub fn finish(mut self, still: &mut Still, others: &[u32]) -> Result<u64> {
        let (then, now) = (&self.part.image, &still.image);
        let (process_then, space_then) = (process(then)?, space(then)?);
        let undone = attributes::Undone { killed: &self.killed, others };
        let (of_then, of_now) = ((process_then, space_then), (process(now)?, space(now)?));
        attributes::put_back(&mut self.threads, of_then, of_now, &self.made, &undone)?;
        still.frozen.threads = rebuild::finish_threads(self.threads, process_then, Some(self.way.room))?;
        // What was put back counts as it was.
        let (target, mut tracking) = (&*self.member.target, lock(&self.member.tracking));
        match self.way.changes_mappings() || self.has_ended {
            true => drop(tracking.look(target, || Ok(spans(space_then)), Look::Protect)?),
            false => tracking.settle(target, || Ok(spans(space_then)), &self.pages.put)?,
        }
        Ok(self.pages.count() + self.shared)
    }
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

/// Kills all children of a process but these, with all their descendants, and has it bury them; what it called them.
///
/// Orphans may come to it (`PR_SET_CHILD_SUBREAPER`), so it is looked again until there are none.
fn end_children(leader: &mut Remote<'_>, target: &Target, but: &[u32]) -> Result<Vec<u32>> {
    let (began, mut buried) = (Instant::now(), Vec::new());
    loop {
        let mut children = target.process.children()?;
        children.retain(|child| !but.contains(child));
        if children.is_empty() {
            return Ok(buried);
        }
        if began.elapsed() > Duration::from_secs(5) {
            return Err(Error::Failed(format!("its child {} does not end", children[0])));
        }
        kill_all(&children.iter().copied().chain(descendants(&children)).collect::<Vec<_>>());
        let status = |pid: u32| Proc::process(pid).and_then(|p| p.status()).ok();
        let ended = children.iter().filter_map(|&pid| status(pid)).filter(|s| matches!(s.state, b'Z' | b'X'));
        let ended: Vec<u32> = ended.map(|status| target.home.pid(&status)).collect();
        attributes::bury(leader, &ended)?;
        if ended.is_empty() {
            std::thread::sleep(Duration::from_micros(100));
        }
        buried.extend(ended);
    }
}

/// Kills processes; they may just have ended.
pub fn kill_all(pids: &[u32]) {
    for &pid in pids {
        let _ = numbers::pidfd_open(pid, 0)
            .map(|fd| rustix::process::pidfd_send_signal(&fd, rustix::process::Signal::KILL));
    }
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

    fn object(&self, _object: u32, _write: bool) -> stillpoint_restore::Result<i32> {
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
    let mut born = family::make_threads(then, memory, leader, &ended, &Pids::of(then), None)?.into_iter();
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
