//! Taking checkpoints of a program, from the first look at it to the commit.

use crate::blocked::{self, Earlier};
use crate::engine::aftermath::Aftermath;
use crate::engine::precopy::Behind;
use crate::engine::tracking::Tracking;
use crate::engine::{Base, Engine, Kept, Loading};
use crate::target::Target;
use crate::work::{Done, Member, Work, earlier_calls};
use crate::{Error, Refusal, Result, attributes, herd, ours};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_image::{Image, Owner, PAGE};
use stillpoint_linux::ptrace;
use stillpoint_store::{Checkpoint, Committed, Store};

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
    /// Why the program, which is to be killed, could not be restored from that; nothing if it could. `is_still`: it does not run meanwhile.
    fn rehearse(&self, _image: &Image, _is_still: bool) -> Vec<String> {
        Vec::new()
    }
    /// The checkpoint is safe, and the program, which stands still, is about to be killed as was asked.
    fn kills(&self) {}
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
    /// All that was added to the store.
    pub committed: Committed,
    /// Processes that it describes.
    pub processes: usize,
    /// How long the program stood still at the cut.
    pub pause: Duration,
    /// What that was spent on, step by step.
    pub steps: Vec<(&'static str, Duration)>,
    /// Other times at which it stood still, such as to begin to follow its writes.
    pub other_pauses: Vec<Duration>,
    /// For how long its threads, all together, waited for pages that were held back until it was taken, within a memory limit.
    pub waited: Duration,
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

/// Takes one checkpoint of a process and all its descendants. Whatever fails, they run on unharmed and the store is as
/// before.
pub fn checkpoint(
    pid: u32,
    store: &Store,
    options: &Options,
    progress: &(dyn Progress + Sync),
) -> Result<Report> {
    Session { lasting: false, ..Session::new(pid) }.checkpoint(store, options, progress)
}

/// Whether a process and all its descendants could be checkpointed and killed now: they stand still for a moment, and run on. Nothing is
/// committed to the store. Returns how long they stood still.
///
/// # Errors
/// As [`checkpoint`] with [`Options::kill`].
pub fn check(
    pid: u32,
    store: &Store,
    options: &Options,
    progress: &(dyn Progress + Sync),
) -> Result<Duration> {
    let options = Options { engine: Engine::Stop, kill: true, ..options.clone() };
    let mut session = Session { lasting: false, ..Session::new(pid) };
    session.again_and_again(|session| session.look(store, &options, progress))
}

/// A program from checkpoint to checkpoint: while the session lives, the kernel notes what its processes write, and each
/// further checkpoint saves only that. When the session ends (or dies), nothing stays behind in them.
#[derive(Debug)]
pub struct Session {
    pid: u32,
    /// Its processes, by id.
    followed: HashMap<u32, Followed>,
    /// There will be further checkpoints.
    lasting: bool,
    /// All of its memory is waited for: it could not be saved before it was loaded.
    waits: bool,
}

/// What is followed of a process.
#[derive(Debug, Default)]
struct Followed {
    kept: Kept,
    /// A claim to a program that is not followed yet, and is still being loaded, or has been since then.
    loading: Option<Loading>,
    loaded: Option<Instant>,
    /// What its threads were waiting for when it was stopped between two checkpoints.
    earlier: Option<Earlier>,
    /// For so many checkpoints, `auto` need not try to copy ahead: the program writes faster.
    outpaced: u32,
    /// What it writes after its last checkpoint is noted for the next restart.
    aftermath: Option<Aftermath>,
    /// Until then that takes too much of the time.
    rests_until: Option<Instant>,
    /// The address space to which all this belongs: a process that executes another program gets a new one.
    target: Option<Arc<Target>>,
}

impl Followed {
    /// The claim to a program whose memory is loaded or paged by others.
    fn loading(&mut self) -> Option<&mut Loading> {
        let of_tracking = self.kept.tracking.as_mut().and_then(|tracking| tracking.loading.as_mut());
        of_tracking.or(self.loading.as_mut())
    }

    /// Whose memory a claim is to, that has just been made.
    fn know(&mut self, pid: u32) -> Result<()> {
        if self.loading.is_some() && self.target.is_none() {
            self.target = Some(Arc::new(Target::open_quickly(pid, 0, None)?));
        }
        Ok(())
    }

    /// Nothing but what is known of its pace.
    fn afresh(&self) -> Self {
        Followed { outpaced: self.outpaced, ..Followed::default() }
    }
}

impl Session {
    /// A session with a process and its descendants; nothing is done to them before the first checkpoint.
    pub fn new(pid: u32) -> Self {
        Session { pid, followed: HashMap::new(), lasting: true, waits: false }
    }

    /// Whether the program is kept within a memory limit.
    fn is_paged(&mut self) -> bool {
        self.followed.get_mut(&self.pid).and_then(Followed::loading).is_some_and(|l| l.is_paged())
    }

    /// Takes a checkpoint. Whatever fails, the program runs on unharmed and the store is as before.
    pub fn checkpoint(
        &mut self,
        store: &Store,
        options: &Options,
        progress: &(dyn Progress + Sync),
    ) -> Result<Report> {
        self.again_and_again(|session| session.take(store, options, progress))
    }

    /// Tries something as long as what stands against it passes.
    fn again_and_again<T: Send>(&mut self, work: impl Fn(&mut Self) -> Result<T> + Sync) -> Result<T> {
        let pid = self.pid;
        let mut result = self.attempt(&work);
        let (mut programs, mut changes, mut waits) = (0, 0, 0);
        let began = Instant::now();
        loop {
            match &result {
                // Within a memory limit there is no end of that: it is a child that came in the freeze.
                Err(Error::Loading) if began.elapsed() > BUSY && self.is_paged() => {
                    let why = "it makes processes all the time, whose memory is not all there; try again";
                    result = Err(Error::Failed(why.into()));
                    break;
                }
                Err(Error::Loading) => {
                    self.waits = true;
                    std::thread::sleep(LOADING);
                }
                Err(Error::Busy(_)) if began.elapsed() < BUSY => std::thread::sleep(Duration::from_millis(1)),
                Err(Error::Passing(_)) if changes < MOST_CHANGES => {
                    changes += 1;
                    std::thread::sleep(PASSING);
                }
                // Something that the program is just about to read, it may be.
                Err(Error::Refused(all)) if waits < MOST_WAITS && all.iter().all(Refusal::will_pass) => {
                    std::thread::sleep(PASSING * (1 << waits));
                    waits += 1;
                }
                Err(Error::Replaced) if programs < MOST_PROGRAMS => {
                    programs += 1;
                    self.followed.clear();
                }
                // A process of it ended when it was looked at.
                Err(Error::Kernel(stillpoint_linux::Error::Gone(_)) | Error::Target(_))
                    if changes < MOST_CHANGES && !attributes::target::has_ended(pid) =>
                {
                    changes += 1;
                }
                _ => break,
            }
            result = self.attempt(&work);
        }
        self.waits = false;
        if result.is_err()
            && let Some(paged) =
                self.followed.get_mut(&pid).and_then(Followed::loading).filter(|l| l.is_paged())
        {
            // Who does not hear it hears that we hang up.
            let _ = paged.goes_on();
        }
        result.map_err(|e| match e {
            // Whatever could not be read or done, this is why.
            Error::Kernel(_)
            | Error::Failed(_)
            | Error::Followed(_)
            | Error::Refused(_)
            | Error::Incapable(_)
            | Error::Replaced
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
        let followed = self.followed.entry(pid).or_default();
        match ptrace::on_a_thread_of_its_own(|| tend(pid, followed)) {
            Ok(Ok(more)) => more,
            // The next checkpoint saves all of it.
            _ => {
                *followed = followed.afresh();
                false
            }
        }
    }

    /// Follows nobody any more, so that somebody else can: the next checkpoint saves all, and follows again if it may. Whether anybody was:
    /// where memory is loaded or paged by others, these follow it.
    pub fn give_way(&mut self) -> bool {
        let mut any = false;
        for followed in self.followed.values_mut().filter(|followed| !followed.kept.is_empty()) {
            if followed.loading().is_none() {
                *followed = followed.afresh();
                any = true;
            }
        }
        any
    }

    fn attempt<T: Send>(&mut self, work: &(impl Fn(&mut Self) -> Result<T> + Sync)) -> Result<T> {
        // What it may still trace when it fails is let go of when the thread ends.
        let done = ptrace::on_a_thread_of_its_own(|| work(self));
        done.unwrap_or_else(|_| Err(Error::Failed("the checkpoint failed inside stillpoint".into())))
    }

    /// Those who page its memory stop it now and then, as others do that trace it; from now on they do not.
    fn hold_back(&mut self) -> Result<()> {
        let pid = self.pid;
        let followed = self.followed.entry(pid).or_default();
        if followed.kept.is_empty() && followed.loading.is_none() {
            followed.loading = Loading::claim(pid);
        }
        let Some(paged) = followed.loading().filter(|loading| loading.is_paged()) else {
            return followed.know(pid);
        };
        match paged.rest(pid) {
            Ok(()) => followed.know(pid),
            Err(e) => {
                *followed = followed.afresh();
                Err(e)
            }
        }
    }

    /// Looks whether a checkpoint could be taken.
    fn look(
        &mut self,
        store: &Store,
        options: &Options,
        progress: &(dyn Progress + Sync),
    ) -> Result<Duration> {
        let targets = herd::find(self.pid)?;
        ours::refuse(&targets, store)?;
        let mut members = Vec::with_capacity(targets.len());
        for target in &targets {
            let behind = behind(target, store, options, None, &mut Followed::default(), self.waits)?;
            members.push(Member::new(target.clone(), Earlier::default(), 0, Kept::default(), behind));
        }
        let writer = store.begin(&options.job)?;
        Work::new(options, false, None, progress, members, writer).check()
    }

    fn take(&mut self, store: &Store, options: &Options, progress: &(dyn Progress + Sync)) -> Result<Report> {
        let start = Instant::now();
        self.hold_back()?;
        let targets = herd::find(self.pid)?;
        ours::refuse(&targets, store)?;
        let mut before = std::mem::take(&mut self.followed);
        let mut all: Vec<Followed> =
            targets.iter().map(|t| before.remove(&t.pid).unwrap_or_default()).collect();
        drop(before); // of those that have ended
        for followed in &mut all {
            if followed.target.take().is_none_or(|target| target.is_replaced()) {
                *followed = followed.afresh();
            }
            followed.aftermath = None;
        }
        // Whatever fails from here on, the next checkpoint starts afresh.
        self.followed = targets.iter().zip(&all).map(|(t, f)| (t.pid, f.afresh())).collect();
        let writer = store.begin(&options.job)?;
        let last = store.load(&options.job, None).ok();
        let mut members = Vec::with_capacity(targets.len());
        for (target, followed) in targets.iter().zip(&mut all) {
            let behind = behind(target, store, options, last.as_ref(), followed, self.waits)?;
            let earlier_calls = || last.as_ref().map(|l| earlier_calls(&l.image, target)).unwrap_or_default();
            let earlier = followed.earlier.take().unwrap_or_else(earlier_calls);
            let kept = std::mem::take(&mut followed.kept);
            members.push(Member::new(target.clone(), earlier, followed.outpaced, kept, behind));
        }
        let last = last.as_ref().map(|l| &l.image);
        let mut work = Work::new(options, self.lasting, last, progress, members, writer);
        let result = work.take();
        for member in &work.members {
            self.followed.entry(member.target.pid).or_default().outpaced = member.outpaced;
        }
        let done = result.map_err(|e| match e {
            // Whatever did not fit together, this is why.
            Error::Kernel(_)
            | Error::Failed(_)
            | Error::Followed(_)
            | Error::Lost(_)
            | Error::Refused(_)
            | Error::Incapable(_)
                if targets[0].is_replaced() =>
            {
                Error::Replaced
            }
            e => e,
        })?;
        let rests_until = all[0].rests_until;
        Ok(self.after(store, options, work, done, start, rests_until))
    }

    /// Keeps what is followed for the next checkpoint, and reports on this one.
    fn after(
        &mut self,
        store: &Store,
        options: &Options,
        work: Work<'_>,
        done: Done,
        start: Instant,
        rests_until: Option<Instant>,
    ) -> Report {
        let Done { committed, pause, steps, engine, incremental, processes } = done;
        let Work { members, log, notes, .. } = work;
        let single = members.len() == 1;
        let mut waited = Duration::ZERO;
        for mut member in members {
            let mut kept = member.kept();
            let space = member.target.space;
            let (id, taken_ns) = (committed.id, committed.taken_ns);
            let base = || Base { job: options.job.clone(), id, taken_ns, space };
            if let Some(tracking) = &mut kept.tracking {
                let saved = (options.job.clone(), id, taken_ns);
                let loading = tracking.loading.iter_mut();
                waited += loading.map(|loading| loading.is_saved_in(saved.clone())).sum::<Duration>();
                tracking.base = Some(base());
            }
            if let Some(armed) = &mut kept.armed {
                armed.base = Some(base());
            }
            let is_followed = kept.tracking.as_ref().is_some_and(|t| t.loading.is_none());
            let rests = rests_until.is_some_and(|until| Instant::now() < until);
            let attends = single && self.lasting && is_followed && !rests && !options.kill;
            let followed = Followed {
                kept,
                earlier: Some(member.earlier),
                outpaced: member.outpaced,
                aftermath: attends
                    .then(|| Aftermath::begin(store, &options.job, &committed, start.elapsed()))
                    .flatten(),
                rests_until,
                target: Some(member.target.clone()),
                ..Followed::default()
            };
            self.followed.insert(member.target.pid, followed);
        }
        Report {
            job: options.job.clone(),
            id: committed.id,
            bytes: committed.pages * PAGE,
            pages: committed.pages,
            written_bytes: committed.written_bytes,
            committed,
            processes,
            pause,
            steps,
            other_pauses: log.pauses,
            waited,
            wall: start.elapsed(),
            engine,
            incremental,
            story: log.story,
            notes,
        }
    }
}

/// To tell what a program writes after its checkpoint may take one in so many parts of the time.
const SPARING: u32 = 100;
/// Between two looks whether the memory of a program that was just restored is all there.
const LOADING: Duration = Duration::from_millis(10);
/// So long a moment is waited for in which the program does not notice that it is stopped, before its first checkpoint.
const UNNOTICED: Duration = Duration::from_secs(30);
/// How long another of us may take who has stopped the program.
const BUSY: Duration = Duration::from_secs(10);
/// How often a process may become another program while it is being checkpointed, before that is given up.
const MOST_PROGRAMS: usize = 20;
/// How often the tree may be in a state that passes, and for how long it is waited then.
const MOST_CHANGES: usize = 20;
/// As often it is tried again where the program has something to read first, after twice as long each time.
const MOST_WAITS: u32 = 5;
const PASSING: Duration = Duration::from_millis(10);

fn tend(pid: u32, followed: &mut Followed) -> Result<bool> {
    if let (Some(mut after), Some(tracking), Some(known)) =
        (followed.aftermath.take(), &followed.kept.tracking, &followed.target)
    {
        let began = Instant::now();
        // A hint is worth no failure.
        let goes_on = after.attend(tracking, &known.pagemap).unwrap_or(false);
        if !goes_on {
            followed.rests_until = Some(Instant::now() + SPARING * began.elapsed());
        }
        followed.aftermath = goes_on.then_some(after);
        return Ok(goes_on);
    }
    if followed.kept.is_empty() && followed.loading.is_none() {
        followed.loading = Loading::claim(pid);
        let open = |_: &Loading| Target::open_quickly(pid, 0, None).ok().map(Arc::new);
        followed.target = followed.loading.as_ref().and_then(open);
    }
    let Some(loading) = followed.loading() else { return Ok(false) };
    if loading.is_paged() {
        return Ok(false);
    }
    if !loading.is_complete()? {
        return Ok(true);
    }
    let target = Target::open(pid, 0, None)?;
    if followed.target.as_ref().is_some_and(|target| target.is_replaced()) {
        return Err(Error::Replaced);
    }
    if followed.kept.tracking.is_none() && blocked::would_be_noticed(&target.process) {
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
        let (job, id, taken_ns) = loading.source.clone();
        let (tracking, _) = Tracking::open(&target, &mut earlier, Some(loading))?;
        followed.kept.tracking.insert(tracking).base = Some(Base { job, id, taken_ns, space: 0 });
    }
    if let Some(tracking) = &mut followed.kept.tracking {
        tracking.take_over(&target, &mut earlier)?;
    }
    followed.earlier = Some(earlier);
    followed.target = Some(Arc::new(target));
    Ok(false)
}

/// What is not in memory is in the segments of one job, to which no checkpoint of another can refer.
fn paged_elsewhere(pid: u32, job: &str) -> Refusal {
    Refusal {
        what: attributes::target::named(pid),
        why: format!(
            "its memory is kept within a limit (--memory-limit), and the rest of it is with job {job}"
        ),
        hint: format!("checkpoint it as that job, by its name: stillpoint checkpoint {job}"),
    }
}

/// What the checkpoint of a process is relative to; where nothing is left of that, all that was followed is forgotten.
fn behind(
    target: &Target,
    store: &Store,
    options: &Options,
    last: Option<&Checkpoint>,
    followed: &mut Followed,
    waits: bool,
) -> Result<Behind> {
    let Followed { kept: Kept { tracking, armed }, loading, .. } = followed;
    let may_copy_ahead = matches!(options.engine, Engine::Auto | Engine::Precopy) && !options.full;
    if waits && may_copy_ahead && tracking.is_none() && loading.is_none() {
        *loading = Loading::claim(target.pid);
    }
    let of_tracking = tracking.as_ref().and_then(|t| t.loading.as_ref());
    let paged = of_tracking.or(loading.as_ref()).filter(|loading| loading.is_paged());
    let is_paged = paged.is_some();
    if let Some(elsewhere) = paged.filter(|paged| !paged.is_paged_to(store, &options.job)) {
        return Err(Error::Refused(vec![paged_elsewhere(target.pid, &elsewhere.source.0)]));
    }
    if !may_copy_ahead || waits && !is_paged {
        // Those who load the program need not wait for us.
        tracking.take_if(|t| t.loading.is_some());
        drop(loading.take().or_else(|| Loading::claim(target.pid)));
    } else if tracking.is_none() && armed.is_none() && loading.is_none() {
        *loading = Loading::claim(target.pid);
    }
    let pages = |Base { job, id, taken_ns, space }: &Base| {
        let of = |checkpoint: &Checkpoint| checkpoint.pages.of(Owner::Space(*space)).to_vec();
        let is_that = |checkpoint: &&Checkpoint| checkpoint.image.meta.taken_ns == *taken_ns;
        let extents = match last.filter(|l| l.image.meta.id == *id) {
            _ if *job != options.job => None,
            Some(last) => Some(last).filter(is_that).map(of),
            None => store.load(job, Some(*id)).ok().as_ref().filter(is_that).map(of),
        };
        // They may have been those of another row.
        extents.map(|mut extents| {
            extents.iter_mut().for_each(|extent| extent.owner = target.owner());
            extents
        })
    };
    let noted = tracking.as_mut().and_then(|t| t.base.take());
    let waited = armed.as_mut().and_then(|a| a.base.take());
    let source = |loading: &Loading| {
        let (job, id, taken_ns) = loading.source.clone();
        Base { job, id, taken_ns, space: 0 }
    };
    let restored = || loading.as_ref().filter(|l| l.is_trusted()).map(source);
    let base = noted.or(waited).or_else(restored).filter(|_| !options.full);
    let base = base.as_ref().and_then(pages).unwrap_or_default();
    let mut loading = loading.take().or_else(|| tracking.as_mut()?.loading.take());
    if base.is_empty() {
        // What counts as unwritten is what some checkpoint has; without that one, everything must be saved.
        (*tracking, *armed) = (None, None);
        loading.iter_mut().for_each(Loading::distrust);
    }
    // What is missing can be referred to only while there is what it came from.
    let of_source = loading.as_ref().filter(|l| !l.is_paged());
    let missing_from = of_source.map(|l| pages(&source(l)).ok_or(Error::Loading)).transpose()?;
    let source = missing_from.unwrap_or_default();
    if let Some(tracking) = tracking {
        tracking.loading = loading.take();
    }
    Ok(Behind { base, source, loading })
}
