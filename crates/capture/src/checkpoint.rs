//! Taking a checkpoint, from the first look at the target to the commit.

use crate::blocked::{self, Earlier};
use crate::engine::aftermath::Aftermath;
use crate::engine::fork::Fork;
use crate::engine::precopy::{Behind, Precopy};
use crate::engine::stop::Stop;
use crate::engine::tracking::{Tracking, joined_with};
use crate::engine::wp::{Armed, Wp};
use crate::engine::{self, Cut, Engine, Loading, Log, MemoryEngine, Running, Still};
use crate::files::Moment;
use crate::freeze::{Frozen, Hurry};
use crate::inspect::{Assumed, Known, Ready, inspect};
use crate::keeper::Keeper;
use crate::{Builder, Error, Result, attributes, files};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};
use stillpoint_image::{Image, Meta, Owner, PAGE, PathFile, Range, Usage};
use stillpoint_linux::arch::Gadgets;
use stillpoint_linux::host;
use stillpoint_linux::inject::find_gadgets;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::Proc;
use stillpoint_store::{Checkpoint, Committed, Store, Writer};

/// What is asked of a checkpoint.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the job it belongs to.
    pub job: String,
    /// The user's words for it.
    pub label: Option<String>,
    /// How memory is saved.
    pub engine: Engine,
    /// Memory that a checkpoint may use for pages on their way, bytes: what the cut copies, and what `wp` holds.
    pub buffer: u64,
    /// Save all pages, also those that an earlier checkpoint has.
    pub full: bool,
    /// Kill the program once the checkpoint is committed; it does not run in between.
    pub kill: bool,
    /// Pipes, sockets and terminals besides its standard streams that the program was started with: descriptor, and
    /// what `/proc/PID/fd` called it. Like those they become the ones of whoever restores.
    pub inherited: Vec<(u32, Vec<u8>)>,
}

/// Hears how far a checkpoint or restore is. It may be called while the program stands still.
pub trait Progress {
    /// So many bytes are to be saved or loaded.
    fn start(&self, total_bytes: u64);
    /// So many more have been.
    fn advance(&self, bytes: u64);
}

/// What a checkpoint was like.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of its job.
    pub job: String,
    /// Its number in the job.
    pub id: u64,
    /// Memory it describes, bytes.
    pub bytes: u64,
    /// Memory it describes, pages that are not zero.
    pub pages: u64,
    /// Page data added to the store, bytes.
    pub written_bytes: u64,
    /// How long the program stood still at the cut.
    pub pause: Duration,
    /// Other times at which it stood still, such as to begin to follow its writes.
    pub other_pauses: Vec<Duration>,
    /// How long it all took.
    pub wall: Duration,
    /// Name of the engine that it ended with.
    pub engine: &'static str,
    /// Only what changed since an earlier checkpoint was saved.
    pub incremental: bool,
    /// Why this engine, and what it did, for those who want to know.
    pub story: Vec<String>,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// Takes one checkpoint of a process. Whatever fails, the process runs on unharmed and the store is as before.
pub fn checkpoint(
    pid: u32,
    store: &Store,
    options: &Options,
    progress: &(dyn Progress + Sync),
) -> Result<Report> {
    Session { lasting: false, ..Session::new(pid) }.checkpoint(store, options, progress)
}

/// One process from checkpoint to checkpoint: while the session lives, the kernel notes what the process writes, and
/// each further checkpoint saves only that. When the session ends (or dies), nothing stays behind in the process.
#[derive(Debug)]
pub struct Session {
    pid: u32,
    followed: Followed,
    /// There will be further checkpoints.
    lasting: bool,
}

/// What is followed of a process.
#[derive(Debug, Default)]
struct Followed {
    tracking: Option<Tracking>,
    armed: Option<Armed>,
    /// A claim to a program that is not followed yet, and is still being loaded, or has been since then.
    loading: Option<Loading>,
    loaded: Option<Instant>,
    /// All of it is waited for: it could not be saved before it was loaded.
    waits: bool,
    /// What its threads were waiting for when it was stopped between two checkpoints.
    earlier: Option<Earlier>,
    /// For so many checkpoints, `auto` need not try to copy ahead: the program writes faster.
    outpaced: u32,
    /// What it writes after its last checkpoint is noted for the next restart.
    aftermath: Option<Aftermath>,
    /// Until then that takes too much of the time.
    rests_until: Option<Instant>,
    /// The address space to which all this belongs: a process that executes another program gets a new one.
    space: Option<Pagemap>,
}

impl Session {
    /// A session with a process; nothing is done to it before the first checkpoint.
    pub fn new(pid: u32) -> Self {
        Session { pid, followed: Followed::default(), lasting: true }
    }

    /// Takes a checkpoint. Whatever fails, the process runs on unharmed and the store is as before.
    pub fn checkpoint(
        &mut self,
        store: &Store,
        options: &Options,
        progress: &(dyn Progress + Sync),
    ) -> Result<Report> {
        let pid = self.pid;
        let mut result = self.attempt(store, options, progress);
        let mut programs = 0;
        let began = Instant::now();
        loop {
            match result {
                Err(Error::Loading) => {
                    self.followed.waits = true;
                    std::thread::sleep(LOADING);
                }
                Err(Error::Busy(_)) if began.elapsed() < BUSY => std::thread::sleep(Duration::from_millis(1)),
                Err(Error::Replaced) if programs < MOST_PROGRAMS => {
                    programs += 1;
                    self.followed = Followed::default();
                }
                _ => break,
            }
            result = self.attempt(store, options, progress);
        }
        self.followed.waits = false;
        result.map_err(|e| match e {
            // Whatever could not be read or done, this is why.
            Error::Kernel(_) | Error::Failed(_) | Error::Refused(_) | Error::Replaced
                if attributes::target::has_ended(pid) =>
            {
                Error::Failed(format!("process {pid} ended before its checkpoint was complete"))
            }
            e => e,
        })
    }

    /// Sees to the program between checkpoints: to one that was restored and is still being loaded (when all of its memory is
    /// there, what it has written since its first instruction and what it writes from now on is followed by this session), and
    /// to what it writes after a checkpoint. Whether there will be more to do in a moment.
    pub fn tend(&mut self) -> bool {
        let pid = self.pid;
        let followed = &mut self.followed;
        let tended = std::thread::scope(|scope| scope.spawn(|| tend(pid, followed)).join());
        match tended {
            Ok(Ok(more)) => more,
            // The next checkpoint saves all of it.
            _ => {
                self.followed = Followed { outpaced: self.followed.outpaced, ..Followed::default() };
                false
            }
        }
    }

    fn attempt(
        &mut self,
        store: &Store,
        options: &Options,
        progress: &(dyn Progress + Sync),
    ) -> Result<Report> {
        let (pid, lasting) = (self.pid, self.lasting);
        // On a thread of its own: what it may still trace when it fails is let go of when it ends.
        std::thread::scope(|scope| {
            let tracer = scope.spawn(|| take(pid, store, options, lasting, &mut self.followed, progress));
            let joined = tracer.join();
            joined.unwrap_or_else(|_| Err(Error::Failed("the checkpoint failed inside stillpoint".into())))
        })
    }
}

/// For so many checkpoints it is taken that a program that wrote faster than could be copied still does.
const PACE_KEPT: u32 = 8;
/// For so long, what was learned of a program serves for its freeze.
const FRESH: Duration = Duration::from_millis(30);
/// Files that the program keeps writing are read at the cut, up to this size, bytes.
const READ_AT_THE_CUT: u64 = 4 << 20;
/// To tell what a program writes after its checkpoint may take one in so many parts of the time.
const SPARING: u32 = 100;
/// Between two looks whether the memory of a program that was just restored is all there.
const LOADING: Duration = Duration::from_millis(10);
/// So long a moment is waited for in which the program does not notice that it is stopped, before its first checkpoint.
const UNNOTICED: Duration = Duration::from_secs(30);
/// How long another of us may take who has stopped the program.
const BUSY: Duration = Duration::from_secs(1);
/// How often a process may become another program while it is being checkpointed, before that is given up.
const MOST_PROGRAMS: usize = 20;

/// The target before it is stopped.
#[derive(Debug)]
pub(crate) struct Target {
    pub pid: u32,
    pub pidfd: OwnedFd,
    pub process: Proc,
    pub memory: Memory,
    pub pagemap: Pagemap,
    /// Where in its code a system call can be made.
    pub gadgets: Option<Gadgets>,
    /// What its clocks differ by from ours, nanoseconds.
    clock_shift: (i64, i64),
}

impl Target {
    /// Refuses what cannot be captured, before anything is done to it.
    fn open(pid: u32) -> Result<Self> {
        let gone = || Error::Target(format!("there is no process {pid}"));
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
        let pidfd = pidfd_open(id, PidfdFlags::empty()).map_err(|_| gone())?;
        let process = attributes::target::find(pid)?;
        // A process whose main thread has ended has no memory by its own name.
        let mut builder = Builder::new();
        attributes::target::leader_ended_for_good(&mut builder, &process)?;
        refuse_if_needed(&mut builder)?;
        let (memory, pagemap) = (Memory::open(pid)?, Pagemap::open(pid)?);
        let maps = process.maps()?;
        let code = maps.iter().filter(|v| v.prot & libc::PROT_EXEC as u32 != 0);
        let code: Vec<_> = code.filter(|v| v.name != b"[vsyscall]").map(|v| (v.start, v.end)).collect();
        let gadgets = find_gadgets(&memory, &code);
        let clock_shift = clock_shift(&process);
        Ok(Target { pid, pidfd, process, memory, pagemap, gadgets, clock_shift })
    }

    /// Brings all threads to rest.
    ///
    /// # Errors
    /// [`Error::Replaced`] if what is known of it is of another program than it is now.
    pub fn freeze(&self) -> Result<Frozen> {
        let frozen = Frozen::freeze(&self.process)?;
        match self.is_replaced() {
            true => Err(Error::Replaced),
            false => Ok(frozen),
        }
    }

    /// Whether it has become another program (`execve(2)`) since it was opened: its memory of then is no more.
    fn is_replaced(&self) -> bool {
        self.pagemap.is_of_the_past()
    }

    /// Its monotonic and boot time, nanoseconds.
    pub fn clocks(&self) -> (i64, i64) {
        let now = |clock| {
            let t = clock_gettime(clock);
            t.tv_sec * 1_000_000_000 + t.tv_nsec
        };
        (now(ClockId::Monotonic) + self.clock_shift.0, now(ClockId::Boottime) + self.clock_shift.1)
    }

    /// Notes the moment of the cut.
    fn stamp(&self, meta: &mut Meta) {
        meta.taken_ns = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
        (meta.monotonic_ns, meta.boottime_ns) = self.clocks();
    }
}

fn tend(pid: u32, followed: &mut Followed) -> Result<bool> {
    if let (Some(mut after), Some(tracking), Some(space)) =
        (followed.aftermath.take(), &followed.tracking, &followed.space)
    {
        let began = Instant::now();
        // A hint is worth no failure.
        let goes_on = after.attend(tracking, space).unwrap_or(false);
        if !goes_on {
            followed.rests_until = Some(Instant::now() + SPARING * began.elapsed());
        }
        followed.aftermath = goes_on.then_some(after);
        return Ok(goes_on);
    }
    if followed.tracking.is_none() && followed.armed.is_none() && followed.loading.is_none() {
        followed.loading = Loading::claim(pid);
        followed.space = followed.loading.as_ref().and_then(|_| Pagemap::open(pid).ok());
    }
    let of_tracking = followed.tracking.as_mut().and_then(|t| t.loading.as_mut());
    let Some(loading) = of_tracking.or(followed.loading.as_mut()) else { return Ok(false) };
    if !loading.is_complete()? {
        return Ok(true);
    }
    let target = Target::open(pid)?;
    if followed.space.as_ref().is_some_and(Pagemap::is_of_the_past) {
        return Err(Error::Replaced);
    }
    if followed.tracking.is_none() && blocked::would_be_noticed(&target.process) {
        // Nobody has asked for a checkpoint yet.
        let since = *followed.loaded.get_or_insert_with(Instant::now);
        followed.loading.take_if(|_| since.elapsed() > UNNOTICED);
        return Ok(followed.loading.is_some());
    }
    let mut earlier = followed.earlier.take().unwrap_or_default();
    if let Some(loading) = followed.loading.take() {
        if !loading.is_trusted() {
            return Ok(false);
        }
        let base = loading.source.clone();
        let (tracking, _) = Tracking::open(&target, &mut earlier, Some(loading))?;
        followed.tracking.insert(tracking).base = Some(base);
    }
    if let Some(tracking) = &mut followed.tracking {
        tracking.take_over(&target, &mut earlier)?;
    }
    followed.earlier = Some(earlier);
    followed.space = Some(target.pagemap);
    Ok(false)
}

fn take(
    pid: u32,
    store: &Store,
    options: &Options,
    lasting: bool,
    followed: &mut Followed,
    progress: &(dyn Progress + Sync),
) -> Result<Report> {
    let start = Instant::now();
    let target = Target::open(pid)?;
    if followed.space.take().is_none_or(|space| space.is_of_the_past()) {
        *followed = Followed { outpaced: followed.outpaced, ..Followed::default() };
    }
    followed.aftermath = None;
    let writer = store.begin(&options.job)?;
    let last = store.load(&options.job, None).ok();
    let behind = behind(pid, store, options, last.as_ref(), followed)?;
    let Followed { tracking, armed, earlier, space, outpaced, aftermath, rests_until, .. } = followed;
    let earlier_calls = || last.as_ref().map(|l| earlier_calls(&l.image, &target)).unwrap_or_default();
    let mut work = Work {
        options,
        target: &target,
        earlier: earlier.take().unwrap_or_else(earlier_calls),
        last: last.as_ref().map(|l| &l.image),
        progress,
        exact: options.kill,
        is_loading: false,
        writer: Some(writer),
        stored: Vec::new(),
        learned: None,
        log: Log::default(),
        notes: Vec::new(),
    };
    let done = work.with_some_engine(tracking, armed, behind, lasting, outpaced).map_err(|e| match e {
        // Whatever did not fit together, this is why.
        Error::Kernel(_) | Error::Failed(_) | Error::Lost(_) | Error::Refused(_) if target.is_replaced() => {
            Error::Replaced
        }
        e => e,
    })?;
    if let Some(tracking) = tracking {
        let saved = (options.job.clone(), done.committed.id);
        tracking.loading.iter_mut().for_each(|loading| loading.is_saved_in(saved.clone()));
        tracking.base = Some(saved);
    }
    if let Some(armed) = armed {
        armed.base = Some((options.job.clone(), done.committed.id));
    }
    let Done { committed, pause, engine, incremental } = done;
    let is_followed = tracking.as_ref().is_some_and(|t| t.loading.is_none());
    let rests = rests_until.is_some_and(|until| Instant::now() < until);
    if lasting && is_followed && !rests && !options.kill {
        *aftermath = Aftermath::begin(store, &options.job, &committed, start.elapsed());
    }
    let other_pauses = work.log.pauses;
    let story = work.log.story;
    let notes = work.notes;
    *space = Some(target.pagemap);
    Ok(Report {
        job: options.job.clone(),
        id: committed.id,
        bytes: committed.pages * PAGE,
        pages: committed.pages,
        written_bytes: committed.written_bytes,
        pause,
        other_pauses,
        wall: start.elapsed(),
        engine: engine.name(),
        incremental,
        story,
        notes,
    })
}

/// What the checkpoint is relative to; where nothing is left of that, all that was followed is forgotten. Whatever fails
/// from here on, the next checkpoint starts afresh.
fn behind(
    pid: u32,
    store: &Store,
    options: &Options,
    last: Option<&Checkpoint>,
    followed: &mut Followed,
) -> Result<Behind> {
    let Followed { tracking, armed, loading, waits, .. } = followed;
    let may_copy_ahead = matches!(options.engine, Engine::Auto | Engine::Precopy) && !options.full && !*waits;
    if !may_copy_ahead {
        // Those who load the program need not wait for us.
        tracking.take_if(|t| t.loading.is_some());
        drop(loading.take().or_else(|| Loading::claim(pid)));
    } else if tracking.is_none() && armed.is_none() && loading.is_none() {
        *loading = Loading::claim(pid);
    }
    let pages = |(job, id): &(String, u64)| {
        let of = |checkpoint: &Checkpoint| checkpoint.pages.of(Owner::Space(0)).to_vec();
        match last.filter(|l| l.image.meta.id == *id) {
            _ if *job != options.job => None,
            Some(last) => Some(of(last)),
            None => store.load(job, Some(*id)).ok().as_ref().map(of),
        }
    };
    let noted = tracking.as_mut().and_then(|t| t.base.take());
    let waited = armed.as_mut().and_then(|a| a.base.take());
    let restored = || loading.as_ref().filter(|l| l.is_trusted()).map(|l| l.source.clone());
    let base = noted.or(waited).or_else(restored).filter(|_| !options.full);
    let base = base.as_ref().and_then(pages).unwrap_or_default();
    let mut loading = loading.take().or_else(|| tracking.as_mut()?.loading.take());
    if base.is_empty() {
        // What counts as unwritten is what some checkpoint has; without that one, everything must be saved.
        (*tracking, *armed) = (None, None);
        loading.iter_mut().for_each(Loading::distrust);
    }
    // What is missing can be referred to only while there is what it came from.
    let source = loading.as_ref().map(|l| pages(&l.source).ok_or(Error::Loading)).transpose()?;
    let source = source.unwrap_or_default();
    if let Some(tracking) = tracking {
        tracking.loading = loading.take();
    }
    Ok(Behind { base, source, loading })
}

/// A checkpoint being taken.
struct Work<'a> {
    options: &'a Options,
    target: &'a Target,
    /// What its threads were waiting for when it was stopped before.
    earlier: Earlier,
    /// The job's newest checkpoint.
    last: Option<&'a Image>,
    progress: &'a (dyn Progress + Sync),
    /// Nothing may be assumed in the freeze that has to be confirmed after it.
    exact: bool,
    /// What was learned of the program while it ran, and when.
    learned: Option<(Instant, Learned<'a>)>,
    /// Until the commit.
    writer: Option<Writer>,
    /// Its memory may still be on its way, and the engine knows from where.
    is_loading: bool,
    /// Whose contents the writer has, besides memory's: objects and files by their numbers at one instant.
    stored: Vec<Owner>,
    log: Log,
    /// Remarks for the user.
    notes: Vec<String>,
}

/// A checkpoint that was taken.
struct Done {
    committed: Committed,
    pause: Duration,
    engine: Engine,
    incremental: bool,
}

impl<'a> Work<'a> {
    /// Takes the checkpoint with the first engine that can.
    fn with_some_engine(
        &mut self,
        tracking: &mut Option<Tracking>,
        armed: &mut Option<Armed>,
        mut behind: Behind,
        lasting: bool,
        outpaced: &mut u32,
    ) -> Result<Done> {
        let asked = self.options.engine;
        let mut engines = engine::order(asked);
        if asked == Engine::Auto && *outpaced > 0 {
            *outpaced -= 1;
            self.log.tell("the program wrote faster than could be copied the last time");
            engines.retain(|&engine| engine != Engine::Precopy);
        }
        // Nothing is done to a program that must be refused. Where it is followed already, there is nothing new to do.
        let is_followed = match engines.first() {
            Some(Engine::Precopy) => tracking.is_some(),
            Some(Engine::Wp) => armed.is_some(),
            _ => false,
        };
        self.is_loading = behind.loading.is_some() || tracking.as_ref().is_some_and(|t| t.loading.is_some());
        if !is_followed {
            self.learned = Some((Instant::now(), self.learn()?));
        }
        for engine in engines {
            if engine != Engine::Precopy && self.is_loading {
                // The others read all of it.
                *tracking = None;
                return Err(Error::Loading);
            }
            // Memory is followed in one way only.
            if engine != Engine::Precopy {
                *tracking = None;
            }
            if engine != Engine::Wp {
                *armed = None;
            }
            let behind = match tracking.is_some() || armed.is_some() || behind.loading.is_some() {
                true => std::mem::take(&mut behind),
                false => Behind::default(),
            };
            let mut engine: Box<dyn MemoryEngine> = match engine {
                Engine::Precopy => Box::new(Precopy::new(tracking, behind, self.options.buffer)),
                Engine::Fork => Box::new(Fork::new(self.options.buffer)),
                Engine::Wp => Box::new(Wp::new(armed, behind.base, self.options.buffer, lasting)),
                _ => Box::new(Stop::default()),
            };
            let (name, first) = (engine.engine().name(), engine.engine() == asked);
            if asked == Engine::Auto {
                self.log.tell(format!("auto takes {name}: {}", engine::reason(engine.engine())));
            }
            match self.learn_and_prepare(&mut *engine)? {
                Ok(()) => {}
                Err(e @ (Error::Kernel(_) | Error::Failed(_))) if !first => {
                    self.log.tell(format!("{name} is not possible: {e}"));
                    continue;
                }
                Err(Error::Lost(why)) => {
                    self.log.tell(format!("{name} would not do: {why}"));
                    *outpaced = PACE_KEPT;
                    continue;
                }
                Err(Error::Failed(why)) => return Err(impossible(name, &why)),
                Err(e) => return Err(e),
            }
            if let Some(done) = self.with(&mut *engine)? {
                return Ok(done);
            }
        }
        Err(Error::Failed(format!("the engine {} cannot save this program", asked.name())))
    }

    /// Takes the checkpoint with an engine that is ready; `None` if another must take over.
    fn with(&mut self, engine: &mut dyn MemoryEngine) -> Result<Option<Done>> {
        loop {
            let mut held = self.freeze(engine)?;
            let Some(writer) = &mut self.writer else { return Ok(None) };
            let (target, progress, log) = (self.target, self.progress, &mut self.log);
            let (frozen, builder) = (&mut held.frozen, &held.builder);
            let cut = engine.cut(&mut Still { target, frozen, builder, writer, progress, log })?;
            if cut == Cut::Taken {
                let exact = self.exact;
                let contents: Vec<(Owner, Vec<Range>)> =
                    held.builder.contents.iter().map(|c| (c.owner, c.ranges.clone())).collect();
                match self.complete(engine, held) {
                    Err(Error::Lost(why)) => self.log.tell(format!("an instant was lost: {why}")),
                    done => return done.map(Some),
                }
                // In the next instant they may have other numbers, or not be there.
                if let Some(writer) = &mut self.writer {
                    for (owner, ranges) in contents {
                        ranges.into_iter().for_each(|range| writer.forget(owner, whole_pages(range)));
                    }
                }
                if self.exact && !exact {
                    if !self.prepare_again(engine)? {
                        return Ok(None);
                    }
                    continue;
                }
            } else {
                self.log.pauses.push(held.frozen.thaw());
                self.earlier = earlier_calls(&held.builder.image, self.target);
            }
            let name = engine.engine().name();
            if let Cut::Impossible(why) = cut {
                if self.options.engine != Engine::Auto {
                    return Err(impossible(name, &why));
                }
                self.log.tell(format!("{name} is not possible: {why}"));
                return Ok(None);
            }
            if !engine.try_again() {
                self.log.tell(format!("{name} does not get ahead of the program"));
                return Ok(None);
            }
            if !self.prepare_again(engine)? {
                return Ok(None);
            }
        }
    }

    /// False if another engine must take over.
    fn prepare_again(&mut self, engine: &mut dyn MemoryEngine) -> Result<bool> {
        let name = engine.engine().name();
        match self.prepare(engine) {
            Err(Error::Lost(why)) => {
                self.log.tell(format!("{name} would not do: {why}"));
                Ok(false)
            }
            Err(Error::Failed(why)) if self.options.engine == Engine::Auto => {
                self.log.tell(format!("{name} is not possible any more: {why}"));
                Ok(false)
            }
            prepared => prepared.map(|()| true),
        }
    }

    fn prepare(&mut self, engine: &mut dyn MemoryEngine) -> Result<()> {
        self.running(|running| engine.prepare(running))
    }

    fn running<T>(&mut self, work: impl FnOnce(&mut Running<'_>) -> Result<T>) -> Result<T> {
        let committed = || Error::Failed("the checkpoint is committed already".into());
        let writer = self.writer.as_mut().ok_or_else(committed)?;
        let (target, progress, log) = (self.target, self.progress, &mut self.log);
        work(&mut Running { target, earlier: &mut self.earlier, writer, progress, log })
    }

    fn learn(&self) -> Result<Learned<'a>> {
        learn(self.target, self.options, self.exact, self.is_loading)
    }

    /// [`Work::prepare`], and meanwhile [`Work::learn`] if that has not been done yet: its errors come first.
    fn learn_and_prepare(&mut self, engine: &mut dyn MemoryEngine) -> Result<Result<()>> {
        if self.learned.is_some() {
            return Ok(self.prepare(engine));
        }
        let (target, options, exact, is_loading) = (self.target, self.options, self.exact, self.is_loading);
        let (learned, prepared) = std::thread::scope(|scope| {
            let learned =
                scope.spawn(move || Ok((Instant::now(), learn(target, options, exact, is_loading)?)));
            let prepared = self.prepare(engine);
            let failed = |_| Err(Error::Failed("looking at the program failed inside stillpoint".into()));
            (learned.join().unwrap_or_else(failed), prepared)
        });
        self.learned = Some(learned?);
        Ok(prepared)
    }

    /// Brings the program to rest and describes it.
    fn freeze(&mut self, engine: &mut dyn MemoryEngine) -> Result<Held<'a>> {
        let learned =
            self.learned.take().filter(|(since, (_, known))| since.elapsed() < FRESH && known.holds());
        let (mut builder, mut known) = match learned {
            Some((_, learned)) => learned,
            None => self.learn()?,
        };
        // Files that do not change until the cut need not be read in it.
        reuse_digests(&mut known.rehearsed, self.last);
        files::take_digests_of(&mut known.rehearsed, Usage::Write, Moment::Running);
        self.running(|running| engine.converge(running))?;
        let ready = known.observe();
        let hurry = Hurry::begin();
        let mut frozen = self.target.freeze()?;
        known.stopped(&self.earlier, self.target.clocks().0);
        self.target.stamp(&mut builder.image.meta);
        let (target, maps) = (self.target, self.target.process.maps()?);
        let mut inspect = || inspect(&mut builder, &mut frozen, &known, &maps);
        let assumed = match engine.rest(target, &maps)? {
            Some(work) => std::thread::scope(|scope| {
                let helper = scope.spawn(&work);
                let assumed = inspect();
                let worked = work();
                joined_with(helper.join()).and(worked).and(assumed)
            }),
            None => inspect(),
        }?;
        refuse_if_needed(&mut builder)?;
        Ok(Held { frozen, builder, known, assumed, hurry, ready })
    }

    /// All that is left to do once the instant is recoverable.
    fn complete(&mut self, engine: &mut dyn MemoryEngine, held: Held<'_>) -> Result<Done> {
        let Held { frozen, mut builder, known, assumed, hurry, ready } = held;
        let of_a_lost_instant = std::mem::take(&mut self.stored);
        self.stored = builder.contents.iter().map(|c| c.owner).collect();
        self.running(|running| {
            of_a_lost_instant.into_iter().for_each(|owner| running.writer.keep_only(owner, Vec::new()));
            for content in &builder.contents {
                files::copy_content(content, running.writer, &mut |bytes| running.progress.advance(bytes))?;
                running.writer.keep_only(content.owner, content.ranges.clone());
            }
            Ok(())
        })?;
        reuse_digests(&mut builder, Some(&known.rehearsed.image));
        files::take_digests_of(&mut builder, Usage::Write, Moment::Still(READ_AT_THE_CUT));
        if self.options.kill {
            return self.complete_and_kill(engine, builder, frozen);
        }
        let pause = frozen.thaw();
        builder.forget_sockets();
        drop((hurry, ready));
        self.earlier = earlier_calls(&builder.image, self.target);
        let (finished, holds) = std::thread::scope(|scope| {
            let holds = scope.spawn(|| assumed.holds(&known));
            let finished = self.running(|running| {
                engine.finish(running)?;
                Ok(running.writer.settle()?)
            });
            let failed = |_| Err(Error::Failed("looking at mappings failed inside stillpoint".into()));
            (finished, holds.join().unwrap_or_else(failed))
        });
        finished.inspect_err(|_| self.log.pauses.push(pause))?;
        if !holds? {
            self.exact = true;
            self.log.pauses.push(pause);
            return Err(Error::Lost("the program changed states of its mappings".into()));
        }
        self.commit(engine, builder, pause)
    }

    /// The program is killed once the checkpoint is safe, and does not run in between.
    fn complete_and_kill(
        &mut self,
        engine: &mut dyn MemoryEngine,
        mut builder: Builder,
        frozen: Frozen,
    ) -> Result<Done> {
        self.running(|running| engine.finish(running))?;
        reuse_digests(&mut builder, self.last);
        files::take_digests_of(&mut builder, Usage::Write, Moment::Still(u64::MAX));
        let keeper = self.keep_sockets(&mut builder);
        let done = self.commit(engine, builder, frozen.since.elapsed())?;
        let pid = self.target.pid;
        pidfd_send_signal(&self.target.pidfd, Signal::KILL)
            .map_err(|e| Error::Failed(format!("kill {pid}: {e}")))?;
        let pause = frozen.thaw();
        if let Some(keeper) = keeper {
            keeper.take_over();
        }
        wait_for_end(self.target);
        Ok(Done { pause, ..done })
    }

    /// From here on connections of the program outlive it.
    fn keep_sockets(&mut self, builder: &mut Builder) -> Option<Keeper> {
        match Keeper::start(builder, self.target.pidfd.as_fd()) {
            Ok(keeper) => {
                self.notes.extend(keeper.as_ref().map(Keeper::note));
                keeper
            }
            Err(e) => {
                let why = format!("its connections end with it, as they cannot be kept for a restore: {e}");
                self.notes.push(why);
                None
            }
        }
    }

    fn commit(
        &mut self,
        engine: &mut dyn MemoryEngine,
        mut builder: Builder,
        pause: Duration,
    ) -> Result<Done> {
        reuse_digests(&mut builder, self.last);
        for usage in [Usage::Write, Usage::Read] {
            files::take_digests_of(&mut builder, usage, Moment::Running);
        }
        builder.image.meta.engine = engine.engine().name().into();
        builder.image.meta.pause_ns = pause.as_nanos() as u64;
        let writer = self.writer.take().ok_or_else(|| Error::Failed("there is no writer".into()))?;
        let committed = writer.commit(builder.image)?;
        Ok(Done { committed, pause, engine: engine.engine(), incremental: engine.is_incremental() })
    }
}

/// The program at rest, and described.
struct Held<'a> {
    /// Dropped first.
    frozen: Frozen,
    builder: Builder,
    known: Known<'a>,
    assumed: Assumed,
    hurry: Hurry,
    /// Serves the cut too.
    ready: Ready,
}

/// What is known of a running program, and where it is to be described.
type Learned<'a> = (Builder, Known<'a>);

/// What can be known of a program while it runs; refuses what cannot be captured.
fn learn<'a>(target: &'a Target, options: &'a Options, exact: bool, is_loading: bool) -> Result<Learned<'a>> {
    let mut builder = Builder::new();
    describe(&mut builder.image, options, target)?;
    let known = Known::learn(
        &mut builder,
        &target.process,
        target.pidfd.as_fd(),
        &target.memory,
        &target.pagemap,
        &options.inherited,
        target.gadgets,
        exact,
        is_loading,
    )?;
    refuse_if_needed(&mut builder)?;
    Ok((builder, known))
}

fn impossible(engine: &str, why: &str) -> Error {
    Error::Failed(format!("the engine {engine} is not possible: {why} (auto takes another)"))
}

/// The pages of a range.
fn whole_pages(range: Range) -> Range {
    let start = range.start / PAGE * PAGE;
    Range { start, len: range.end().next_multiple_of(PAGE) - start }
}

/// Waits until a killed process is no more (though its parent may not have noticed yet).
fn wait_for_end(target: &Target) {
    let mut fds = [PollFd::new(&target.pidfd, PollFlags::IN)];
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    let _ = poll(&mut fds, Some(&patience));
}

fn refuse_if_needed(builder: &mut Builder) -> Result<()> {
    match builder.refusals.is_empty() {
        true => Ok(()),
        false => Err(Error::Refused(std::mem::take(&mut builder.refusals))),
    }
}

/// Takes over what an earlier checkpoint told of files that have not changed since. (Through a shared mapping a file
/// can change without a new time.)
fn reuse_digests(builder: &mut Builder, last: Option<&Image>) {
    let Some(last) = last else { return };
    let key = |p: &PathFile| (p.dev, p.ino, p.size, p.mtime_ns, p.ctime_ns);
    let without = |p: &&mut PathFile| p.mapped_ranges.is_empty() && !p.deleted && p.digest.is_none();
    for path in builder.image.paths.iter_mut().filter(without) {
        let same = |p: &&PathFile| p.path == path.path && key(p) == key(path) && p.mapped_ranges.is_empty();
        path.digest = last.paths.iter().find(same).and_then(|p| p.digest.clone());
    }
}

/// The interrupted calls of a checkpoint, if it is of this process.
fn earlier_calls(last: &Image, target: &Target) -> Earlier {
    let (Some(process), Ok(status)) = (last.processes.first(), target.process.status()) else {
        return Earlier::default();
    };
    let same_boot = last.meta.host.boot_id == host::boot_id();
    if !same_boot || process.pid != status.own_pid() {
        return Earlier::default();
    }
    let calls = process.threads.iter().filter_map(|t| Some((t.tid, t.blocked?)));
    Earlier { at_ns: last.meta.monotonic_ns, calls: calls.collect() }
}

/// What the target's monotonic and boot time differ by from ours, nanoseconds.
fn clock_shift(process: &Proc) -> (i64, i64) {
    let theirs = process.time_offsets().ok().flatten().unwrap_or_default();
    let own =
        Proc::process(std::process::id()).and_then(|p| p.time_offsets()).ok().flatten().unwrap_or_default();
    (theirs.0 - own.0, theirs.1 - own.1)
}

/// Describes what is the same at any moment. (The command line is a note for people.)
fn describe(image: &mut Image, options: &Options, target: &Target) -> Result<()> {
    let meta = &mut image.meta;
    meta.job.clone_from(&options.job);
    meta.label.clone_from(&options.label);
    meta.command = target.process.cmdline()?.into_iter().map(Into::into).collect();
    meta.host = stillpoint_image::Host {
        machine: host::machine(),
        kernel: host::kernel(),
        boot_id: host::boot_id(),
        xfeatures: 0,
        vdso: blake3::hash(&host::vdso()?).as_bytes().to_vec().into(),
    };
    Ok(())
}
