//! The program at rest for a moment, and described.

use crate::descriptors::{Table, Told};
use crate::history::union;
use crate::{Error, Result};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stillpoint_capture::attributes::target::{Seen, named};
use stillpoint_capture::blocked::Earlier;
use stillpoint_capture::engine::Tracking;
use stillpoint_capture::engine::tracking::{Found, Look};
use stillpoint_capture::files::Outsiders;
use stillpoint_capture::freeze::{Frozen, Hurry};
use stillpoint_capture::herd::FrozenTree;
use stillpoint_capture::inspect::{Guards, Known, Ready, inspect};
use stillpoint_capture::mappings::{Mappings, guards_in, put_guards};
use stillpoint_capture::regions::spans_of_maps;
use stillpoint_capture::target::Target;
use stillpoint_capture::{Builder, Refusal, calls_of, relations};
use stillpoint_image::{AddressSpace, Backing, Image, Mapping, PathFile, Process, Range, Thread};
use stillpoint_linux::arch::Regs;
use stillpoint_linux::host;
use stillpoint_linux::proc::Vma;

/// So much shared memory is copied at each snapshot, bytes.
pub const MOST_SHARED: u64 = 256 << 20;

/// Shared memory, numbered by what the kernel knows it by, so that the same number always means the same one.
#[derive(Debug, Default)]
struct Objects(HashMap<(u64, u64), u32>);

impl Objects {
    /// Numbers that of all mappings; returns where it can be written.
    fn number(&mut self, mappings: &mut [Mapping], paths: &[PathFile], maps: &[Vma]) -> Vec<Range> {
        let mut written = Vec::new();
        for mapping in mappings {
            let writes = mapping.shared && mapping.prot & libc::PROT_WRITE as u32 != 0;
            match &mut mapping.backing {
                Backing::Object { object, .. } | Backing::Segment { object, .. } => {
                    let vma = maps.iter().find(|v| v.start <= mapping.start && mapping.start < v.end);
                    let next = self.0.len() as u32;
                    *object = vma.map_or(u32::MAX, |v| *self.0.entry((v.dev, v.ino)).or_insert(next));
                }
                Backing::File { path, .. } if paths.get(*path as usize).is_some_and(PathFile::is_memory) => {}
                _ => continue,
            }
            if writes {
                written.push(Range { start: mapping.start, len: mapping.len() });
            }
        }
        written
    }
}

/// What is known of a program from one time that it was at rest to the next.
#[derive(Debug, Default)]
pub struct Recalled {
    /// Calls that were interrupted.
    pub earlier: Earlier,
    objects: Objects,
    /// Its mappings, with states that only a walk through all pages tells.
    mappings: Option<Mappings>,
    /// What need not be learned each time.
    known: Option<Known>,
    /// Memory of ours that is there already, and for how many threads it is enough.
    ready: Option<(Ready, usize)>,
    /// What was told of its descriptors.
    descriptors: Told,
    /// Who looks at memory meanwhile; none where that gains nothing.
    looker: Option<Option<Looker>>,
    /// Mappings of memory that nobody looks at meanwhile.
    unseen: Vec<Vma>,
}

impl Recalled {
    fn looker(&mut self, target: &Arc<Target>, tracking: &Followed) -> Option<&Looker> {
        let start = || {
            let processors = host::processors();
            (processors > 1).then(|| Looker::start(target, tracking).ok()).flatten()
        };
        self.looker.get_or_insert_with(start).as_ref()
    }
}

/// A program at rest. When this is dropped, it runs on.
#[derive(Debug)]
pub struct Still {
    /// Its threads.
    pub frozen: Frozen,
    /// It, but for its descriptors and the contents of its memory.
    pub image: Image,
    /// Its mappings.
    pub maps: Vec<Vma>,
    /// Shared memory that it can write to.
    pub shared: Vec<Range>,
    /// What it has open.
    pub table: Table,
    /// Its children.
    pub children: Vec<u32>,
    /// Its process group and session.
    pub groups: (i64, i64),
    _hurry: Option<Hurry>,
}

/// What a look at memory, while the rest of the program was described, has found.
#[derive(Debug, Default)]
pub struct Looked {
    /// Pages.
    pub found: Found,
    /// Guard regions.
    guards: Vec<Range>,
}

impl Looked {
    /// Looks at the memory of a program that stands still.
    fn look(target: &Target, maps: &[Vma], tracking: &mut Tracking, how: Look) -> Result<Self> {
        let found = tracking.look(target, || Ok(spans_of_maps(maps)), how)?;
        let places = match how {
            Look::Ahead | Look::Protect => found.guards.clone(),
            // A page that was the program's own may have become one.
            Look::AtRest => {
                union(&found.guards, &found.dirty.iter().map(|(range, _)| *range).collect::<Vec<_>>())
            }
        };
        let end = maps.iter().filter(|v| v.name != b"[vsyscall]").map(|v| v.end).max().unwrap_or(0);
        let guards = guards_in(&target.pagemap, end, &places);
        guards.map(|guards| Looked { found, guards }).map_err(Error::from)
    }
}

impl Looked {
    /// What was found is to be found once more: what was written since the last look is not marked any more.
    fn owe(&self, tracking: &Followed) {
        let mut tracking = lock(tracking);
        self.found.dirty.iter().for_each(|(range, _)| tracking.owe(*range));
    }
}

/// What follows the writes of a program, for the two threads that have to do with it.
pub type Followed = Arc<Mutex<Tracking>>;

/// It, for the calling thread alone.
pub fn lock(followed: &Followed) -> MutexGuard<'_, Tracking> {
    followed.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process was there, and is no more.
pub fn just_ended(pid: u32) -> Error {
    Error::Capture(stillpoint_capture::Error::Target(format!("process {pid} has just ended")))
}

fn not_seen() -> Error {
    Error::Failed("looking at memory failed inside stillpoint".into())
}

/// A thread of ours that looks at memory while another one asks about all else, of a program that leaves a processor idle. It stays, as
/// those who come anew would have to be told from threads of the program.
#[derive(Debug)]
struct Looker {
    /// None when it is to end.
    asks: Option<Sender<(Vec<Vma>, Look)>>,
    answers: Receiver<Result<Looked>>,
    thread: Option<JoinHandle<()>>,
}

impl Looker {
    fn start(target: &Arc<Target>, tracking: &Followed) -> std::io::Result<Self> {
        let (asks, asked) = channel::<(Vec<Vma>, Look)>();
        let (answer, answers) = channel();
        let (target, tracking) = (target.clone(), tracking.clone());
        let work = move || {
            for (maps, how) in asked {
                if answer.send(Looked::look(&target, &maps, &mut lock(&tracking), how)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("looker".into()).spawn(work)?;
        Ok(Looker { asks: Some(asks), answers, thread: Some(thread) })
    }

    /// Sets it to work; if it is no more, there will be no answer.
    fn ask(&self, maps: Vec<Vma>, how: Look) {
        let _ = self.asks.as_ref().map(|asks| asks.send((maps, how)));
    }

    fn answer(&self) -> Result<Looked> {
        self.answers.recv().unwrap_or_else(|_| Err(not_seen()))
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        self.asks = None;
        // What follows the writes is let go of by whoever began to.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Still {
    /// Brings a program to rest.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is something that nobody can put back; the program runs on.
    pub fn take(target: &Arc<Target>, memory: &mut Recalled) -> Result<Self> {
        Ok(Self::take_with(target, memory, None)?.0)
    }

    /// Brings a program to rest, and looks at its memory meanwhile.
    ///
    /// # Errors
    /// As [`Still::take`]; then the next look finds what this one has found.
    pub fn take_and_look(
        target: &Arc<Target>,
        memory: &mut Recalled,
        tracking: &Followed,
        how: Look,
    ) -> Result<(Self, Found)> {
        let (mut still, looked) = Self::take_with(target, memory, Some((tracking, how)))?;
        let looked = looked.unwrap_or_default();
        put_guards(&mut space_mut(&mut still.image)?.mappings, &looked.guards);
        Ok((still, looked.found))
    }

    fn take_with(
        target: &Arc<Target>,
        memory: &mut Recalled,
        look: Option<(&Followed, Look)>,
    ) -> Result<(Self, Option<Looked>)> {
        if let Some(mut known) = memory.known.take() {
            let mut builder = Builder::at(&target.home);
            let renewed = known.renew(&mut builder).map_err(Error::from);
            if let Ok(still) = renewed.and_then(|()| Self::take_known(target, memory, builder, known, look)) {
                return Ok(still);
            }
        }
        let mut builder = Builder::at(&target.home);
        let children = target.process.children()?;
        let mut known = Known::new(&mut builder, target, &children)?;
        known.keep_open();
        Self::take_known(target, memory, builder, known, look)
    }

    fn take_known(
        target: &Arc<Target>,
        memory: &mut Recalled,
        mut builder: Builder,
        mut known: Known,
        look: Option<(&Followed, Look)>,
    ) -> Result<(Self, Option<Looked>)> {
        Self::get_ready(target, memory, &mut builder, &mut known, look.is_some())?;
        let hurry = Hurry::begin();
        let frozen = target.freeze()?;
        let maps = Self::stopped(target, memory, &mut builder, &mut known, frozen.since)?;
        if let Some((tracking, how)) = look {
            Self::ask(target, memory, tracking, &maps, how);
        }
        let described = Self::describe(target, memory, builder, known, frozen, maps);
        let described = described.map(|still| Still { _hurry: Some(hurry), ..still });
        let Some((tracking, how)) = look else { return Ok((described?, None)) };
        let looked = Self::answer(target, memory, tracking, how);
        match (described, looked) {
            (Ok(still), Ok(looked)) => Ok((still, Some(looked))),
            (Err(e), Ok(looked)) => {
                looked.owe(tracking);
                Err(e)
            }
            (_, Err(e)) => Err(e),
        }
    }

    /// What is to be done before the stop.
    fn get_ready(
        target: &Arc<Target>,
        memory: &mut Recalled,
        builder: &mut Builder,
        known: &mut Known,
        looks: bool,
    ) -> Result<()> {
        builder.stays = true;
        relations::refuse_sharers(builder, &[target.pid], false);
        builder.refuse_if_needed()?;
        let before = match memory.mappings.take() {
            Some(before) => before,
            None => Mappings::read(&target.process, &target.pagemap)?,
        };
        // Without a key, who may write where shows in the mappings themselves.
        if !before.have_keys() {
            known.recall(before, if looks { Guards::Later } else { Guards::Now });
        }
        known.observe_calls();
        let threads = known.threads();
        if memory.ready.as_ref().is_none_or(|(_, enough)| *enough < threads) {
            memory.ready = Some((Ready::new(threads, 64), threads));
        }
        Ok(())
    }

    /// What is to be noted right after it; returns its mappings.
    fn stopped(
        target: &Arc<Target>,
        memory: &Recalled,
        builder: &mut Builder,
        known: &mut Known,
        since: Instant,
    ) -> Result<Vec<Vma>> {
        known.stopped(&memory.earlier, target.clocks().0, since.elapsed());
        target.stamp(&mut builder.image.meta);
        builder.image.meta.host.boot_id = host::boot_id();
        Ok(target.process.maps()?)
    }

    /// Has somebody look at its memory meanwhile. Where there is one processor, nothing is gained by another thread.
    fn ask(target: &Arc<Target>, memory: &mut Recalled, tracking: &Followed, maps: &[Vma], how: Look) {
        match memory.looker(target, tracking) {
            Some(looker) => looker.ask(maps.to_vec(), how),
            None => memory.unseen = maps.to_vec(),
        }
    }

    fn answer(target: &Arc<Target>, memory: &mut Recalled, tracking: &Followed, how: Look) -> Result<Looked> {
        if let Some(looker) = memory.looker(target, tracking) {
            return looker.answer();
        }
        let maps = std::mem::take(&mut memory.unseen);
        Looked::look(target, &maps, &mut lock(tracking), how)
    }

    /// Describes a program that stands still.
    fn describe(
        target: &Arc<Target>,
        memory: &mut Recalled,
        mut builder: Builder,
        known: Known,
        frozen: Frozen,
        maps: Vec<Vma>,
    ) -> Result<Self> {
        let Recalled { earlier, objects, mappings, known: kept, descriptors, .. } = memory;
        // Who else has it would matter where memory is shared, which is not rolled back at all.
        let outsiders = Outsiders::none();
        let table = Table::read(target.pid, target.pidfd.as_fd(), descriptors)?;
        let mut frozen = [frozen];
        let described = inspect(
            &mut builder,
            &mut frozen,
            std::slice::from_ref(&known),
            &outsiders,
            std::slice::from_ref(&maps),
        )?;
        let (mut children, mut groups) = (Vec::new(), (0, 0));
        for (assumed, seen) in described {
            *mappings = assumed.into_mappings();
            let of = |main: &Seen| (main.look.stat.pgrp.into(), main.look.stat.session.into());
            groups = seen.first().map_or(groups, of);
            children.extend(seen.into_iter().flat_map(|thread| thread.look.children));
        }
        children.sort_unstable();
        let [frozen] = frozen;
        builder.image.spaces.resize_with(1, AddressSpace::default);
        let Image { spaces, paths, .. } = &mut builder.image;
        let shared = objects.number(&mut spaces[0].mappings, paths, &maps);
        let bytes: u64 = shared.iter().map(|r| r.len).sum();
        if bytes > MOST_SHARED {
            let why = format!(
                "of shared memory each snapshot is a copy, and of more than {} MiB none is made",
                MOST_SHARED >> 20
            );
            builder.refuse(format!("{} MiB of shared memory", bytes >> 20), why, "");
        }
        builder.refuse_if_needed()?;
        let calls = |process| calls_of(&builder.image, process);
        *earlier = builder.image.processes.first().map_or_else(Earlier::default, calls);
        let image = builder.image;
        *kept = Some(known);
        Ok(Still { frozen, image, maps, shared, table, children, groups, _hurry: None })
    }

    /// Threads that wait for an answer, as they are described, are the first ones to run on.
    pub fn let_waiting_go_first(&mut self, image: &Image) {
        let waits = |thread: &&Thread| {
            let regs = Regs::from_bytes(&thread.regs.0);
            regs.is_some_and(|regs| regs.orig_rax as i64 == libc::SYS_recvfrom)
        };
        let threads = image.processes.iter().flat_map(|process| &process.threads);
        let waiting: Vec<u32> = threads.filter(waits).map(|thread| thread.tid).collect();
        self.frozen.let_go_first(&waiting);
    }

    /// Its shared mappings.
    pub fn all_shared(&self) -> Vec<Range> {
        let shared = self.maps.iter().filter(|v| v.shared);
        shared.map(|v| Range { start: v.start, len: v.len() }).collect()
    }

    /// Lets it run on; for how long it stood still.
    pub fn thaw(self) -> Duration {
        self.frozen.thaw()
    }
}

/// Who is to come to rest, with what is known of it, and how its memory is looked at meanwhile.
#[derive(Debug)]
pub struct Guest<'a> {
    /// The process.
    pub target: &'a Arc<Target>,
    /// What is known of it.
    pub memory: &'a mut Recalled,
    /// None: it is not.
    pub look: Option<(&'a Followed, Look)>,
}

/// All processes of a program at rest, at one instant. When this is dropped, they run on.
#[derive(Debug, Default)]
pub struct Together {
    /// Those that were asked for, in their order, with what was found in their memory.
    pub all: Vec<(Still, Option<Found>)>,
    /// Descendants of the first one which were not asked for.
    pub others: Vec<Frozen>,
    _hurry: Option<Hurry>,
}

impl Together {
    /// Brings a whole tree to rest; `found`: its processes as [`herd::find`] has found them, the guests and perhaps others. The
    /// first guest is the root.
    ///
    /// # Errors
    /// [`Error::Refused`] for what nobody can put back; that somebody has just ended. All run on.
    pub fn take(found: &[Arc<Target>], guests: &mut [Guest<'_>]) -> Result<Self> {
        let have_all = guests.iter().all(|guest| guest.memory.known.is_some());
        if have_all && let Ok(together) = Self::take_known(found, guests) {
            return Ok(together);
        }
        // What was learned before may be the reason.
        guests.iter_mut().for_each(|guest| guest.memory.known = None);
        Self::take_known(found, guests)
    }

    fn take_known(found: &[Arc<Target>], guests: &mut [Guest<'_>]) -> Result<Self> {
        let pids: Vec<u32> = found.iter().map(|target| target.pid).collect();
        let (mut ready, mut refused) = (Vec::with_capacity(guests.len()), Vec::new());
        for guest in guests.iter_mut() {
            let mut builder = Builder::at(&guest.target.home);
            let known = match guest.memory.known.take() {
                Some(mut known) => known.renew(&mut builder).map(|()| known),
                None => Known::new(&mut builder, guest.target, &pids),
            };
            let mut known = known?;
            known.keep_open();
            match Still::get_ready(guest.target, guest.memory, &mut builder, &mut known, guest.look.is_some())
            {
                Err(Error::Refused(why) | Error::Capture(stillpoint_capture::Error::Refused(why))) => {
                    refused.extend(of(guest.target.pid, why));
                }
                other => other?,
            }
            ready.push((builder, known));
        }
        if !refused.is_empty() {
            return Err(Error::Refused(refused));
        }
        let hurry = Hurry::begin();
        let looked_at: Vec<&Known> = ready.iter().map(|(_, known)| known).collect();
        let mut tree = FrozenTree::freeze(found, found.len() as u32, &looked_at)?;
        let mut frozen: HashMap<u32, Frozen> =
            std::mem::take(&mut tree.processes).into_iter().map(|frozen| (frozen.pid, frozen)).collect();
        let mut at_rest = Vec::with_capacity(guests.len());
        for (guest, (mut builder, mut known)) in guests.iter_mut().zip(ready) {
            let (target, pid) = (guest.target, guest.target.pid);
            let own = frozen.remove(&pid).filter(|_| !target.is_replaced());
            let own = own.ok_or_else(|| just_ended(pid))?;
            let maps = Still::stopped(target, guest.memory, &mut builder, &mut known, own.since)?;
            at_rest.push((builder, known, own, maps));
        }
        for (guest, (.., maps)) in guests.iter_mut().zip(&at_rest) {
            if let Some((tracking, how)) = guest.look {
                Still::ask(guest.target, guest.memory, tracking, maps, how);
            }
        }
        let (mut described, mut failed) = (Vec::with_capacity(guests.len()), None);
        for (guest, (builder, known, own, maps)) in guests.iter_mut().zip(at_rest) {
            let still = Still::describe(guest.target, guest.memory, builder, known, own, maps);
            match still {
                Ok(still) => described.push(still),
                Err(Error::Refused(why) | Error::Capture(stillpoint_capture::Error::Refused(why))) => {
                    refused.extend(of(guest.target.pid, why));
                }
                Err(e) => failed = failed.or(Some(e)),
            }
        }
        let mut looked = Vec::with_capacity(guests.len());
        for guest in guests.iter_mut() {
            let Some((tracking, how)) = guest.look else {
                looked.push(None);
                continue;
            };
            match Still::answer(guest.target, guest.memory, tracking, how) {
                Ok(found) => looked.push(Some(found)),
                Err(e) => {
                    looked.push(None);
                    failed = failed.or(Some(e));
                }
            }
        }
        if failed.is_some() || !refused.is_empty() {
            for (guest, looked) in guests.iter().zip(&looked) {
                let _ = guest.look.zip(looked.as_ref()).map(|((tracking, _), looked)| looked.owe(tracking));
            }
            return Err(failed.unwrap_or(Error::Refused(refused)));
        }
        let mut all = Vec::with_capacity(guests.len());
        for (mut still, looked) in described.into_iter().zip(looked) {
            if let Some(looked) = &looked {
                put_guards(&mut space_mut(&mut still.image)?.mappings, &looked.guards);
            }
            all.push((still, looked.map(|looked| looked.found)));
        }
        Ok(Together { all, others: frozen.into_values().collect(), _hurry: Some(hurry) })
    }

    /// Brings one process to rest, whatever others it has made.
    ///
    /// # Errors
    /// As [`Still::take`] and [`Still::take_and_look`].
    pub fn of_one(guest: Guest<'_>) -> Result<Self> {
        let Guest { target, memory, look } = guest;
        let one = match look {
            None => (Still::take(target, memory)?, None),
            Some((tracking, how)) => {
                let (still, found) = Still::take_and_look(target, memory, tracking, how)?;
                (still, Some(found))
            }
        };
        Ok(Together { all: vec![one], others: Vec::new(), _hurry: None })
    }

    /// Since when they have been stopped.
    pub fn since(&self) -> Instant {
        self.all.iter().map(|(still, _)| still.frozen.since).min().unwrap_or_else(Instant::now)
    }

    /// Lets all of them run on; for how long they stood still.
    pub fn thaw(mut self) -> Duration {
        if let (true, [_]) = (self.others.is_empty(), &self.all[..])
            && let Some((still, _)) = self.all.pop()
        {
            return still.thaw();
        }
        let since = self.since();
        let own = self.all.into_iter().map(|(still, _)| still.frozen);
        FrozenTree { processes: own.chain(self.others).collect(), newcomers: Vec::new(), since }.thaw()
    }
}

/// Refusals of one process among others.
pub fn of(pid: u32, why: Vec<Refusal>) -> impl Iterator<Item = Refusal> {
    why.into_iter().map(move |refusal| {
        let own = named(pid);
        match refusal.what.contains(&format!("process {pid}")) || refusal.what == own {
            true => refusal,
            false => Refusal { what: format!("{own}: {}", refusal.what), ..refusal },
        }
    })
}

/// The one process of an image.
pub fn process(image: &Image) -> Result<&Process> {
    image.processes.first().ok_or_else(|| Error::Failed("the program was not described".into()))
}

/// Its address space, to be changed.
pub fn space_mut(image: &mut Image) -> Result<&mut AddressSpace> {
    image.spaces.first_mut().ok_or_else(|| Error::Failed("its memory was not described".into()))
}

/// Its address space.
pub fn space(image: &Image) -> Result<&AddressSpace> {
    image.spaces.first().ok_or_else(|| Error::Failed("its memory was not described".into()))
}

/// Device and inode number of a file of an image.
pub fn place(image: &Image, path: u32) -> Option<(u64, u64)> {
    image.paths.get(path as usize).map(|p| (p.dev, p.ino))
}

/// Threads by their ids.
pub fn threads_of(process: &Process) -> HashMap<u32, usize> {
    process.threads.iter().enumerate().map(|(place, thread)| (thread.tid, place)).collect()
}
