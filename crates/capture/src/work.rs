//! A checkpoint being taken: of every process of a tree its memory engine, and of all of them one instant.

use crate::ahead::Ahead;
use crate::blocked::Earlier;
use crate::engine::elsewhere::Elsewhere;
use crate::engine::fork::Fork;
use crate::engine::precopy::{Behind, PACE_KEPT, Precopy};
use crate::engine::stop::Stop;
use crate::engine::tracking::joined_with;
use crate::engine::wp::Wp;
use crate::engine::{self, Cut, Engine, Kept, Log, MemoryEngine, Running, Still, politely};
use crate::files::{Holder, Moment, Outsiders};
use crate::freeze::{BURIAL, Hurry, waits_for_burials};
use crate::herd::FrozenTree;
use crate::inspect::{Assumed, Known, Ready, Regard, inspect};
use crate::keeper::Keeper;
use crate::relations::{self, Relative};
use crate::target::Target;
use crate::{
    Builder, Error, Options, Progress, Refusal, Result, attributes, files, groups, holes, kin, names,
    namespaces,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_image::{AddressSpace, Image, Namespace, Owner, PathFile, Process, Usage};
use stillpoint_linux::guard::Guard;
use stillpoint_linux::proc::{self, Proc, Vma};
use stillpoint_linux::ptrace::options;
use stillpoint_linux::sharing::Shared;
use stillpoint_linux::{host, spawn};
use stillpoint_store::{Committed, Writer};

/// For so long, what was learned of a program serves for its freeze.
const FRESH: Duration = Duration::from_millis(30);
/// Of files that the program keeps writing so much is read at the cut, bytes.
const READ_AT_THE_CUT: u64 = 4 << 20;
/// Of a process that has just been made, so much is copied in the cut rather than read from a twin, bytes.
const SMALL: u64 = 4 << 20;

/// To look at the memory of so many processes is worth another thread.
const MANY: usize = 4;

/// One process of the tree, with the engine that saves its memory.
pub(crate) struct Member {
    pub target: Arc<Target>,
    /// What its threads were waiting for when it was stopped before.
    pub earlier: Earlier,
    /// For so many checkpoints, `auto` need not try to copy ahead: the program writes faster.
    pub outpaced: u32,
    behind: Behind,
    /// What is followed of it, while no engine has that.
    kept: Kept,
    engine: Option<Box<dyn MemoryEngine>>,
    /// Engines to be tried if that one does not do.
    left: VecDeque<Engine>,
    /// Its memory may still be on its way, and the engine knows from where.
    is_loading: bool,
    /// It was found when it stood still already, or its memory was last to be saved by another's engine.
    is_new: bool,
    /// It shares its memory with another member, whose engine saves it.
    is_elsewhere: bool,
}

impl Member {
    /// A process of which so much is followed, for the first engine that can.
    pub fn new(target: Arc<Target>, earlier: Earlier, outpaced: u32, kept: Kept, behind: Behind) -> Self {
        let is_loading =
            behind.loading.is_some() || kept.tracking.as_ref().is_some_and(|t| t.loading.is_some());
        let (engine, left) = (None, VecDeque::new());
        let (is_new, is_elsewhere) = (false, false);
        Member { target, earlier, outpaced, behind, kept, engine, left, is_loading, is_new, is_elsewhere }
    }

    /// One that was found when it stood still already.
    fn newcomer(target: Arc<Target>, asked: Engine, most: u64) -> Result<Self> {
        let mut member = Self::new(target, Earlier::default(), 0, Kept::default(), Behind::default());
        member.begin_anew(asked, most)?;
        Ok(member)
    }

    /// Gives it an engine that needs nothing to be prepared. What is followed of it is kept for later.
    fn begin_anew(&mut self, asked: Engine, most: u64) -> Result<()> {
        self.kept = self.kept();
        let status = self.target.process.status()?;
        // No twin is made in a pid namespace of the program's own.
        let is_inside = !self.target.home.inner(&status.ns_tgid).is_empty();
        let small = status.rss <= SMALL || asked == Engine::Stop || is_inside;
        (self.is_new, self.is_elsewhere) = (true, false);
        self.left.clear();
        self.engine = Some(match small {
            true => Box::new(Stop::default()),
            false => {
                self.left = VecDeque::from([Engine::Stop]);
                Box::new(Fork::new(most))
            }
        });
        Ok(())
    }

    /// Leaves its memory to the engine of another member.
    fn leave_it_to_another(&mut self) {
        self.kept = self.kept();
        self.left.clear();
        self.is_elsewhere = true;
        self.engine = Some(Box::new(Elsewhere));
    }

    /// Takes back what is followed from the engine, which is done.
    pub fn kept(&mut self) -> Kept {
        match self.engine.take() {
            Some(engine) => engine.kept(),
            None => std::mem::take(&mut self.kept),
        }
    }

    fn engine(&mut self) -> Result<&mut (dyn MemoryEngine + 'static)> {
        self.engine.as_deref_mut().ok_or_else(|| Error::Failed("there is no engine".into()))
    }
}

/// A checkpoint being taken.
pub(crate) struct Work<'a> {
    pub options: &'a Options,
    /// There will be further checkpoints.
    pub lasting: bool,
    /// The job's newest checkpoint.
    pub last: Option<&'a Image>,
    pub progress: &'a (dyn Progress + Sync),
    /// All processes, the root first.
    pub members: Vec<Member>,
    pub log: Log,
    /// Remarks for the user.
    pub notes: Vec<String>,
    /// Nothing may be assumed in the freeze that has to be confirmed after it.
    exact: bool,
    /// What was learned of the program while it ran, and when.
    learned: Option<(Instant, Learned)>,
    /// Until the commit.
    writer: Option<Writer>,
    /// Shared memory that is copied while the program runs.
    ahead: Ahead,
    /// Whose contents the writer has, besides memory's: objects and files by their numbers at one instant.
    stored: Vec<Owner>,
    /// So many processes have been numbered, also those that have ended since: the writer may have pages of them.
    rows: u32,
}

/// A checkpoint that was taken.
pub(crate) struct Done {
    pub committed: Committed,
    pub pause: Duration,
    /// What that was spent on.
    pub steps: Vec<(&'static str, Duration)>,
    /// Name of the engine that saved the root.
    pub engine: &'static str,
    pub incremental: bool,
    pub processes: usize,
}

/// What can be known of a program while it runs.
struct Learned {
    /// Where it is to be described.
    builder: Builder,
    /// Who else holds what.
    outsiders: Outsiders,
    /// The newest process there was before that was looked at.
    last_pid: Option<u32>,
    /// Its processes, the root first.
    known: Vec<Known>,
    /// What a rehearsal found, which may be wrong.
    rehearsed: Builder,
}

/// The program at rest, and described.
struct Held {
    /// Dropped first.
    tree: FrozenTree,
    builder: Builder,
    known: Vec<Known>,
    assumed: Vec<Assumed>,
    rehearsed: Builder,
    hurry: Hurry,
    /// Serves the cut too.
    ready: Ready,
}

/// A member whose cut was not taken, and why.
struct NotTaken {
    member: usize,
    cut: Cut,
}

impl<'a> Work<'a> {
    pub fn new(
        options: &'a Options,
        lasting: bool,
        last: Option<&'a Image>,
        progress: &'a (dyn Progress + Sync),
        members: Vec<Member>,
        writer: Writer,
    ) -> Self {
        let rows = members.iter().map(|m| m.target.space + 1).max().unwrap_or(0);
        Work {
            options,
            lasting,
            last,
            progress,
            members,
            log: Log::default(),
            notes: Vec::new(),
            exact: options.kill,
            learned: None,
            writer: Some(writer),
            ahead: Ahead::default(),
            stored: Vec::new(),
            rows,
        }
    }

    /// Takes the checkpoint, of each process with the first engine that can.
    pub fn take(&mut self) -> Result<Done> {
        kin::keep_in_common(self.members.iter().map(|m| &m.target))?;
        kin::relate(writer(&mut self.writer)?, self.members.iter().map(|m| &m.target));
        for member in &mut self.members {
            member.left = engine::order(self.options.engine).into();
            if self.options.engine == Engine::Auto && member.outpaced > 0 && !member.is_loading {
                member.outpaced -= 1;
                self.log.tell("the program wrote faster than could be copied the last time");
                member.left.retain(|&engine| engine != Engine::Precopy);
            }
        }
        self.share();
        // Nothing is done to a program that must be refused. Where it is followed already, there is nothing new to do.
        let is_followed = |member: &Member| match member.left.front() {
            Some(Engine::Precopy) => member.kept.tracking.is_some(),
            Some(Engine::Wp) => member.kept.armed.is_some(),
            _ => false,
        };
        if self.members.iter().all(is_followed) {
            self.learn_and_prepare()?;
        } else {
            self.learned = Some((Instant::now(), self.learn()?));
            self.prepare_all()?;
        }
        if let Some((_, learned)) = &self.learned {
            self.rehearse(&learned.rehearsed.image, false)?;
        }
        self.copy_ahead()?;
        loop {
            let mut held = self.freeze()?;
            if let Some(not_taken) = self.cut(&mut held)? {
                self.after_no_cut(held, not_taken)?;
                continue;
            }
            self.still_there()?;
            let exact = self.exact;
            let lost = match self.complete(held) {
                Err((member, Error::Lost(why))) => {
                    self.log.tell(format!("an instant was lost: {why}"));
                    member
                }
                Err((_, e)) => return Err(e),
                Ok(done) => return Ok(done),
            };
            // What was only assumed wrongly is no reason for another engine.
            self.again(lost.filter(|_| self.exact == exact))?;
        }
    }

    /// Looks whether it could be taken, and restored. Returns how long the program stood still.
    pub fn check(&mut self) -> Result<Duration> {
        for member in &mut self.members {
            member.left = engine::order(self.options.engine).into();
        }
        self.share();
        self.learned = Some((Instant::now(), self.learn()?));
        self.prepare_all()?;
        let Held { tree, builder, .. } = self.freeze()?;
        self.still_there()?;
        // What is refused lets it run on as well.
        self.rehearse(&builder.image, true)?;
        Ok(tree.thaw())
    }

    /// Memory that several members share is saved by the engine of the first of them.
    fn share(&mut self) {
        for first in 0..self.members.len() {
            let sharers = self.sharers(first);
            if sharers.len() == 1 || sharers[0] != first {
                continue;
            }
            self.members[first].left.retain(|engine| engine::can_share(*engine));
            let pid = self.members[first].target.pid;
            for &other in &sharers[1..] {
                self.members[other].leave_it_to_another();
                self.tell(other, format!("its memory is that of process {pid}"));
            }
        }
    }

    /// Members with the memory of this one, which is one of them.
    fn sharers(&self, member: usize) -> Vec<usize> {
        let space = self.members[member].target.space;
        (0..self.members.len()).filter(|&other| self.members[other].target.space == space).collect()
    }

    /// Sees to it, now that all members are known, that each memory is saved by one engine, which can.
    fn share_at_rest(&mut self) -> Result<()> {
        let (asked, most) = (self.options.engine, self.options.buffer);
        for first in 0..self.members.len() {
            let sharers = self.sharers(first);
            if sharers[0] != first || sharers.len() == 1 && !self.members[first].is_elsewhere {
                continue;
            }
            let saves = sharers.iter().copied().find(|&index| !self.members[index].is_elsewhere);
            let saves = saves.unwrap_or(first);
            let is_fit = match &self.members[saves].engine {
                Some(engine) => !self.members[saves].is_elsewhere && engine::can_share(engine.engine()),
                None => false,
            };
            if !is_fit {
                self.tell(saves, "it shares its memory with another process by now");
                self.members[saves].begin_anew(asked, most)?;
            }
            for other in sharers.into_iter().filter(|other| *other != saves) {
                if !self.members[other].is_elsewhere {
                    self.members[other].leave_it_to_another();
                }
            }
        }
        Ok(())
    }

    /// Makes sure that nobody was killed while it stood still: files in `/proc` then end where they are read at that moment, and
    /// page maps are empty.
    fn still_there(&self) -> Result<()> {
        match self.members.iter().find(|m| m.target.has_no_memory()) {
            Some(member) => {
                let pid = member.target.pid;
                Err(Error::Passing(format!("process {pid} was killed while it stood still")))
            }
            None => Ok(()),
        }
    }

    /// Copies shared memory while the program runs, if its processes have enough of it.
    fn copy_ahead(&mut self) -> Result<()> {
        let Some((_, learned)) = self.learned.as_ref().filter(|_| self.options.engine != Engine::Stop) else {
            return Ok(());
        };
        let (writer, members) = (writer(&mut self.writer)?, &mut self.members);
        match self.ahead.begin(members, &learned.builder, writer, self.progress, &mut self.log) {
            Err(Error::Store(e)) => Err(Error::Store(e)),
            // A process of it may just have ended. The cut copies what there is.
            Err(e) => {
                self.log.tell(format!("shared memory is not copied ahead: {e}"));
                self.ahead.give_up();
                self.give_back_marks()
            }
            Ok(()) => self.give_back_marks(),
        }
    }

    /// Tells engines where shared memory was followed that is none any more.
    fn give_back_marks(&mut self) -> Result<()> {
        for (pid, range) in self.ahead.taken() {
            if let Some(member) = self.members.iter_mut().find(|m| m.target.pid == pid) {
                member.engine()?.marks_are_gone(range);
            }
        }
        Ok(())
    }

    /// Lets the program go on after an engine could not take its cut, and gets ready for the next instant.
    fn after_no_cut(&mut self, held: Held, NotTaken { member, cut }: NotTaken) -> Result<()> {
        self.log.pauses.push(held.tree.thaw());
        self.note_calls(&held.builder.image);
        let name = self.members[member].engine()?.engine().name();
        if let Cut::Impossible(why) = cut {
            if self.options.engine != Engine::Auto {
                return Err(impossible(name, &why));
            }
            self.tell(member, format!("{name} is not possible: {why}"));
            self.choose_or_leave_out(member)?;
            return self.again(None);
        }
        self.again(Some(member))
    }

    /// Gets ready for another instant; the engine of this member could not do with the last one.
    fn again(&mut self, failed: Option<usize>) -> Result<()> {
        for index in (0..self.members.len()).rev() {
            let engine = self.members[index].engine()?;
            let (kind, tries) = (engine.engine(), failed != Some(index) || engine.try_again());
            if !tries {
                self.tell(index, format!("{} does not get ahead of the program", kind.name()));
                self.choose_or_leave_out(index)?;
            } else if kind == Engine::Wp && failed != Some(index) && self.members.len() > 1 {
                // Its writers wait for what nobody is going to save: it begins once more.
                self.members[index].left.push_front(kind);
                self.choose_or_leave_out(index)?;
            } else if !self.prepare_again(index)? {
                self.choose_or_leave_out(index)?;
            }
        }
        Ok(())
    }

    /// Prepares the first engine that can for every member. One that has ended meanwhile is left out.
    fn prepare_all(&mut self) -> Result<()> {
        let mut index = 0;
        while let Some(pid) = self.members.get(index).map(|m| m.target.pid) {
            self.choose_or_leave_out(index)?;
            index += usize::from(self.members.get(index).is_some_and(|m| m.target.pid == pid));
        }
        Ok(())
    }

    /// Gives a member the next engine that can be prepared. One that has ended meanwhile is no member any more.
    fn choose_or_leave_out(&mut self, index: usize) -> Result<()> {
        match self.choose(index) {
            Err(_) if index > 0 && self.has_left(index) => {
                self.members.remove(index);
                Ok(())
            }
            chosen => chosen,
        }
    }

    /// Whether a process has ended, or become another program: the freeze will find what there is.
    fn has_left(&self, index: usize) -> bool {
        let target = &self.members[index].target;
        crate::attributes::target::has_ended(target.pid) || target.is_replaced()
    }

    fn tell(&mut self, index: usize, sentence: impl std::fmt::Display) {
        match index {
            0 => self.log.tell(sentence.to_string()),
            _ => self.log.tell(format!("process {}: {sentence}", self.members[index].target.pid)),
        }
    }

    /// Gives a member the next engine that can be prepared.
    fn choose(&mut self, index: usize) -> Result<()> {
        let asked = self.options.engine;
        if self.members[index].is_elsewhere {
            self.members[index].engine = Some(Box::new(Elsewhere));
            return Ok(());
        }
        while let Some(next) = self.members[index].left.pop_front() {
            let member = &mut self.members[index];
            let mut kept = member.kept();
            // Memory is followed in one way only.
            if next != Engine::Precopy {
                kept.tracking = None;
            }
            if next != Engine::Wp {
                kept.armed = None;
            }
            if next != Engine::Precopy && member.is_loading {
                // The others read all of it.
                return Err(Error::Loading);
            }
            let is_followed =
                kept.tracking.is_some() || kept.armed.is_some() || member.behind.loading.is_some();
            let behind = match is_followed {
                true => std::mem::take(&mut member.behind),
                false => Behind::default(),
            };
            member.engine = Some(match next {
                Engine::Precopy => Box::new(Precopy::new(kept.tracking, behind, self.options.buffer)),
                Engine::Fork => Box::new(Fork::new(self.options.buffer)),
                Engine::Wp => Box::new(Wp::new(kept.armed, behind.base, self.options.buffer, self.lasting)),
                _ => Box::new(Stop::default()),
            });
            let (name, first) = (next.name(), next == asked);
            if asked == Engine::Auto && index == 0 {
                self.log.tell(format!("auto takes {name}: {}", engine::reason(next)));
            }
            match self.prepare(index) {
                Ok(()) => return Ok(()),
                Err(e @ (Error::Kernel(_) | Error::Failed(_) | Error::Followed(_) | Error::Incapable(_)))
                    if !first =>
                {
                    self.tell(index, format!("{name} is not possible: {e}"));
                }
                Err(Error::Lost(why)) => {
                    self.tell(index, format!("{name} would not do: {why}"));
                    self.members[index].outpaced = PACE_KEPT;
                }
                Err(e @ (Error::Failed(_) | Error::Followed(_))) => {
                    return Err(impossible(name, &e.to_string()));
                }
                Err(Error::Incapable(refusal)) => {
                    let hint = format!("the engine {name} is not possible; auto takes another");
                    return Err(Error::Incapable(Refusal { hint, ..refusal }));
                }
                Err(e) => return Err(e),
            }
        }
        Err(Error::Failed(format!("the engine {} cannot save this program", asked.name())))
    }

    /// False if another engine must take over.
    fn prepare_again(&mut self, index: usize) -> Result<bool> {
        let name = self.members[index].engine()?.engine().name();
        match self.prepare(index) {
            Err(Error::Lost(why)) => {
                self.tell(index, format!("{name} would not do: {why}"));
                Ok(false)
            }
            Err(e @ (Error::Failed(_) | Error::Followed(_) | Error::Incapable(_)))
                if self.options.engine == Engine::Auto =>
            {
                self.tell(index, format!("{name} is not possible any more: {e}"));
                Ok(false)
            }
            Err(_) if index > 0 && self.has_left(index) => Ok(true),
            prepared => prepared.map(|()| true),
        }
    }

    fn prepare(&mut self, index: usize) -> Result<()> {
        self.running(index, |engine, running| engine.prepare(running))
    }

    /// Lets the engine of a member work while the program runs.
    fn running<T>(
        &mut self,
        index: usize,
        work: impl FnOnce(&mut dyn MemoryEngine, &mut Running<'_>) -> Result<T>,
    ) -> Result<T> {
        let writer = writer(&mut self.writer)?;
        let Member { target, earlier, engine, .. } = &mut self.members[index];
        let engine = engine.as_deref_mut().ok_or_else(|| Error::Failed("there is no engine".into()))?;
        let (progress, log) = (self.progress, &mut self.log);
        work(engine, &mut Running { target, earlier, writer, progress, log })
    }

    fn learn(&self) -> Result<Learned> {
        let members: Vec<_> = self.members.iter().map(|m| (m.target.clone(), m.is_loading)).collect();
        let (options, exact) = (self.options, self.exact);
        politely(|| learn(&members, options, exact))
    }

    /// Prepares and meanwhile learns, whose errors come first.
    fn learn_and_prepare(&mut self) -> Result<()> {
        let members: Vec<_> = self.members.iter().map(|m| (m.target.clone(), m.is_loading)).collect();
        let (options, exact) = (self.options, self.exact);
        let (learned, prepared) = std::thread::scope(|scope| {
            let learn = move || politely(|| Ok((Instant::now(), learn(&members, options, exact)?)));
            let learned = scope.spawn(learn);
            let prepared = self.prepare_all();
            let failed = |_| Err(Error::Failed("looking at the program failed inside stillpoint".into()));
            (learned.join().unwrap_or_else(failed), prepared)
        });
        self.learned = Some(learned?);
        prepared
    }

    /// Brings the program to rest and describes it.
    fn freeze(&mut self) -> Result<Held> {
        let holds = |learned: &Learned| learned.known.iter().all(Known::holds);
        let learned = self.learned.take().filter(|(since, l)| since.elapsed() < FRESH && holds(l));
        let mut learned = match learned {
            Some((_, learned)) => learned,
            None => self.learn()?,
        };
        // Files that do not change until the cut need not be read in it.
        reuse_digests(&mut learned.rehearsed, self.last);
        politely(|| files::take_digests_of(&mut learned.rehearsed, Usage::Write, Moment::Running));
        for index in 0..self.members.len() {
            match self.running(index, |engine, running| engine.converge(running)) {
                Err(_) if index > 0 && self.has_left(index) => {}
                converged => converged?,
            }
        }
        let converged = self.ahead.converge(writer(&mut self.writer)?, self.progress, &mut self.log);
        self.give_back_marks()?;
        converged?;
        // Following memory may have taken long.
        Known::refresh(&mut learned.known);
        learned.known.iter_mut().for_each(Known::observe);
        let sum = |of: fn(&Known) -> usize| learned.known.iter().map(of).sum();
        let ready = Ready::new(sum(Known::threads), sum(Known::mapped));
        let hurry = Hurry::begin();
        let targets: Vec<Arc<Target>> = self.members.iter().map(|m| m.target.clone()).collect();
        let looked_at: Vec<&Known> = learned.known.iter().collect();
        let mut tree = FrozenTree::freeze(&targets, self.rows, &looked_at)?;
        let since = tree.since;
        self.rows += tree.newcomers.len() as u32;
        let Learned { mut builder, outsiders, last_pid, known, rehearsed } = learned;
        builder.laps.begin(since);
        builder.laps.end("its threads come to rest");
        let pids: Vec<u32> = tree.processes.iter().map(|p| p.pid).collect();
        let newcomers: Vec<u32> = tree.newcomers.iter().map(|t| t.pid).collect();
        namespaces::learn_more(&mut builder, &pids, &newcomers)?;
        let known = self.gather(&mut builder, &tree, known)?;
        let outsiders = with_newer(outsiders, last_pid, &tree);
        targets[0].stamp(&mut builder.image.meta);
        builder.laps.end("what is new in it is learned");
        let assumed = self.describe(&mut builder, &mut tree, &known, &outsiders)?;
        builder.refuse_if_needed()?;
        Ok(Held { tree, builder, known, assumed, rehearsed, hurry, ready })
    }

    /// Makes the members those that rest, in their order; returns what is known of them.
    fn gather(&mut self, builder: &mut Builder, tree: &FrozenTree, known: Vec<Known>) -> Result<Vec<Known>> {
        let mut members: HashMap<u32, Member> =
            std::mem::take(&mut self.members).into_iter().map(|m| (m.target.pid, m)).collect();
        let mut known: HashMap<u32, Known> = known.into_iter().map(|k| (k.target.pid, k)).collect();
        let pids: Vec<u32> = tree.processes.iter().map(|p| p.pid).collect();
        let mut in_order = Vec::with_capacity(pids.len());
        for &pid in &pids {
            let newcomer = tree.newcomers.iter().find(|t| t.pid == pid);
            let (member, of_it) = match (newcomer, members.remove(&pid), known.remove(&pid)) {
                (None, Some(member), Some(known)) => (member, known),
                (None, Some(member), None) => {
                    let known = Known::new(builder, &member.target, &pids)?;
                    (member, known)
                }
                (newcomer, ..) => {
                    let gone = || Error::Failed(format!("process {pid} is not known"));
                    let target = newcomer.ok_or_else(gone)?;
                    let member = Member::newcomer(target.clone(), self.options.engine, self.options.buffer)?;
                    (member, Known::new(builder, target, &pids)?)
                }
            };
            self.members.push(member);
            in_order.push(of_it);
        }
        self.share_at_rest()?;
        for (member, known) in self.members.iter().zip(&mut in_order) {
            known.stopped(&member.earlier, member.target.clocks().0, tree.since.elapsed());
        }
        Ok(in_order)
    }

    /// Describes everything but the contents of memory.
    fn describe(
        &mut self,
        builder: &mut Builder,
        tree: &mut FrozenTree,
        known: &[Known],
        outsiders: &Outsiders,
    ) -> Result<Vec<Assumed>> {
        let pids: Vec<u32> = tree.processes.iter().map(|p| p.pid).collect();
        // Before any file is opened.
        for Member { target, .. } in &self.members {
            files::refuse_unread(builder, target.pid, target.pidfd.as_fd())?;
        }
        if !builder.refusals.is_empty() {
            return Ok(Vec::new());
        }
        builder.laps.end("what is on its way");
        let spaces = namespaces::describe(builder, &pids, self.exact)?;
        builder.laps.end("namespaces");
        let many = pids.len() >= MANY;
        let maps = maps_of(&self.members.iter().map(|m| &*m.target).collect::<Vec<_>>())?;
        builder.laps.end("lists of mappings");
        let mut works = Vec::new();
        works.extend(self.ahead.rest());
        for (member, of_it) in self.members.iter_mut().zip(&maps) {
            let Member { target, engine, .. } = member;
            let engine = engine.as_deref_mut().ok_or_else(|| Error::Failed("there is no engine".into()))?;
            works.extend(engine.rest(&*target, of_it, many)?);
        }
        builder.laps.end("memory is looked at");
        let mut describe = || inspect(builder, &mut tree.processes, known, outsiders, &maps);
        let all = match works.is_empty() {
            true => describe(),
            false => std::thread::scope(|scope| {
                let work = || works.iter().try_for_each(|work| work());
                let helper = scope.spawn(work);
                let described = describe();
                let worked = work();
                joined_with(helper.join()).and(worked).and(described)
            }),
        }?;
        drop(works);
        builder.laps.end("memory is looked at");
        relations::refuse_sharers(builder, &pids, false);
        if !builder.refusals.is_empty() {
            return Ok(Vec::new());
        }
        let (assumed, threads): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let targets: Vec<&Target> = self.members.iter().map(|m| &*m.target).collect();
        relations::check_memory(builder, &targets)?;
        relations::describe_actions(builder, &pids)?;
        let relatives: Vec<Relative> =
            pids.iter().zip(threads).map(|(&pid, threads)| Relative { pid, threads }).collect();
        attributes::semaphores::refuse_undo(builder, &pids)?;
        files::segments::refuse_shared(builder, &pids);
        builder.image.processes.iter_mut().zip(spaces).for_each(|(p, spaces)| p.namespaces = spaces);
        relations::describe(builder, &relatives)?;
        builder.laps.end("relations");
        let holders: Vec<Holder<'_>> = self.members.iter().map(|m| holder(&m.target)).collect();
        let inherited = self.options.inherited.as_slice();
        let tables = relations::sharing(builder, &pids, Shared::Files);
        let target = files::Target { holders: &holders, tables: &tables, inherited, outsiders };
        let tables = files::capture_files(builder, &target)?;
        builder.laps.end("descriptors");
        let directories = relations::sharing(builder, &pids, Shared::FileSystem);
        for (row, process) in builder.image.processes.iter_mut().enumerate() {
            process.table = tables[row];
            process.shares_fs =
                Some(directories[row]).filter(|&first| first != row).map(|first| first as u32);
        }
        relations::check(builder, &pids);
        let theirs: Vec<_> = relatives.iter().map(|r| (r.pid, r.threads[0].namespaces.as_slice())).collect();
        namespaces::describe_clocks(builder, &theirs)?;
        relations::check_clocks(builder, &pids);
        namespaces::describe_children(builder, &theirs)?;
        names::check(builder, &pids);
        namespaces::mounts::check(builder, &pids);
        namespaces::users::check(builder, &pids);
        // Of processes that have ended since they were numbered nothing is there.
        builder.image.spaces.resize(self.rows as usize, AddressSpace::default());
        builder.laps.end("checks");
        Ok(assumed)
    }

    /// Makes the instant recoverable; tells who could not.
    fn cut(&mut self, held: &mut Held) -> Result<Option<NotTaken>> {
        let (progress, log, options) = (self.progress, &mut self.log, self.options);
        let writer = writer(&mut self.writer)?;
        let builder = &held.builder;
        for (index, (member, frozen)) in self.members.iter_mut().zip(&mut held.tree.processes).enumerate() {
            let target = member.target.clone();
            loop {
                let still = &mut Still { target: &target, frozen, builder, writer, progress, log };
                let cut = member.engine()?.cut(still)?;
                let may_change = member.left.front() == Some(&Engine::Stop) && member.is_new;
                match cut {
                    Cut::Taken => break,
                    Cut::Impossible(_) if may_change && options.engine == Engine::Auto => {
                        member.left.clear();
                        member.engine = Some(Box::new(Stop::default()));
                    }
                    cut => return Ok(Some(NotTaken { member: index, cut })),
                }
            }
        }
        Ok(None)
    }

    /// All that is left to do once the instant is recoverable. An error tells which member could not, if it was one.
    fn complete(&mut self, held: Held) -> Result<Done, (Option<usize>, Error)> {
        let whole = |e| (None, e);
        let Held { mut tree, mut builder, known, assumed, rehearsed, hurry, ready } = held;
        builder.laps.end("memory is cut");
        let targets = self.members.iter().map(|member| &*member.target);
        let mut frozen: Vec<_> = targets.zip(&mut tree.processes).collect();
        holes::find(&mut builder.contents, &builder.image, &mut frozen).map_err(whole)?;
        self.store_contents(&mut builder).map_err(whole)?;
        builder.laps.end("what descriptors hold");
        reuse_digests(&mut builder, Some(&rehearsed.image));
        files::take_digests_of(&mut builder, Usage::Write, Moment::Still(READ_AT_THE_CUT));
        if self.options.kill {
            return self.complete_and_kill(builder, tree);
        }
        // What the program closes from now on is closed.
        builder.forget_duplicates();
        builder.laps.end("digests of files");
        let pause = tree.thaw();
        builder.laps.end("it is let go");
        let spaces = std::mem::take(&mut builder.namespaces);
        drop((hurry, ready));
        self.note_calls(&builder.image);
        let (finished, holds) = std::thread::scope(|scope| {
            let holds = || politely(|| Ok(all_hold(&assumed, &known)? && namespaces::hold(&spaces)?));
            let holds = scope.spawn(holds);
            let finished = self.finish();
            let failed = |_| Err(Error::Failed("looking at mappings failed inside stillpoint".into()));
            (finished, holds.join().unwrap_or_else(failed))
        });
        finished.inspect_err(|_| self.log.pauses.push(pause))?;
        if !holds.map_err(whole)? {
            self.exact = true;
            self.log.pauses.push(pause);
            return Err((
                None,
                Error::Lost("the program changed states of its mappings, or settings of its network".into()),
            ));
        }
        self.commit(builder, pause).map_err(whole)
    }

    /// Stores what is behind descriptors and shared mappings; forgets what was stored of an instant that was lost.
    fn store_contents(&mut self, builder: &mut Builder) -> Result<()> {
        let of_a_lost_instant = std::mem::take(&mut self.stored);
        self.ahead.cut(builder, &self.members, self.options.buffer, &mut self.log)?;
        builder.contents.retain(|content| !self.ahead.has(content.owner));
        self.stored = builder.contents.iter().map(|c| c.owner).collect();
        let (writer, progress) = (writer(&mut self.writer)?, self.progress);
        of_a_lost_instant.into_iter().for_each(|owner| writer.keep_only(owner, Vec::new()));
        for content in &builder.contents {
            let ranges = files::copy_content(content, writer, &mut |bytes| progress.advance(bytes))?;
            writer.keep_only(content.owner, ranges);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), (Option<usize>, Error)> {
        if self.members.iter().any(|m| m.is_new) {
            let of_all = |writer: &mut Writer| kin::relate(writer, self.members.iter().map(|m| &m.target));
            writer(&mut self.writer).map(of_all).map_err(|e| (None, e))?;
        }
        for index in 0..self.members.len() {
            let finished = self.running(index, |engine, running| engine.finish(running));
            finished.map_err(|e| (Some(index), e))?;
        }
        let settle = |writer: &mut Writer| {
            self.ahead.put(writer)?;
            Ok(writer.settle()?)
        };
        writer(&mut self.writer).and_then(settle).map_err(|e| (None, e))
    }

    /// Refuses to kill what could not be restored.
    fn rehearse(&self, image: &Image, is_still: bool) -> Result<()> {
        let against = if self.options.kill { self.progress.rehearse(image, is_still) } else { Vec::new() };
        let refusal = |why| Refusal {
            what: "to kill it".into(),
            why: format!("it could not be restored: {why}"),
            hint: "without --kill the checkpoint is taken".into(),
        };
        match against.is_empty() {
            true => Ok(()),
            false => Err(Error::Refused(against.into_iter().map(refusal).collect())),
        }
    }

    /// The program is killed once the checkpoint is safe, and does not run in between.
    fn complete_and_kill(
        &mut self,
        mut builder: Builder,
        tree: FrozenTree,
    ) -> Result<Done, (Option<usize>, Error)> {
        let whole = |e| (None, e);
        let _stopped = std::mem::take(&mut builder.stopped);
        self.finish()?;
        reuse_digests(&mut builder, self.last);
        files::take_digests_of(&mut builder, Usage::Write, Moment::Still(u64::MAX));
        self.rehearse(&builder.image, true).map_err(whole)?;
        let keeper = self.keep_open(&mut builder);
        let guard = self.guarded().map_err(whole)?;
        let done = self.commit(builder, tree.since.elapsed()).map_err(whole)?;
        self.progress.kills();
        // Whoever kills us in the middle of it kills all of them, not some: they end with us from here on.
        if let Some(guard) = &guard {
            let _ = guard.begin(); // somebody may have killed it
            let threads = tree.processes.iter().flat_map(|process| &process.threads);
            threads.for_each(|thread| drop(thread.set_options(options::SYSCALL_GOOD | options::EXIT_KILL)));
        }
        // Children first: nobody is to be told of an end that it did not see.
        for member in self.members.iter().rev() {
            let pid = member.target.pid;
            match pidfd_send_signal(&member.target.pidfd, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(e) => return Err(whole(Error::Failed(format!("kill {pid}: {e}")))),
            }
        }
        if let Some(guard) = guard {
            guard.end();
        }
        let pause = tree.thaw();
        if let Some(keeper) = keeper {
            keeper.take_over();
        }
        wait_for_ends(self.members.iter().rev().map(|member| &*member.target).collect());
        Ok(Done { pause, ..done })
    }

    /// Who sees to it that all of several processes end together.
    fn guarded(&self) -> Result<Option<Guard>> {
        if self.members.len() == 1 {
            return Ok(None);
        }
        let pidfds: Vec<_> = self.members.iter().map(|member| member.target.pidfd.as_fd()).collect();
        Ok(Some(Guard::over(&pidfds)?))
    }

    /// From here on what leads from the program to others outlives it.
    fn keep_open(&mut self, builder: &mut Builder) -> Option<Keeper> {
        match Keeper::start(builder, self.members[0].target.pidfd.as_fd()) {
            Ok(keeper) => {
                self.notes.extend(keeper.as_ref().map(Keeper::note));
                keeper
            }
            Err(e) => {
                let why = format!(
                    "its connections and pipes to others end with it, as they cannot be kept for a restore: {e}"
                );
                self.notes.push(why);
                None
            }
        }
    }

    fn commit(&mut self, mut builder: Builder, pause: Duration) -> Result<Done> {
        reuse_digests(&mut builder, self.last);
        for usage in [Usage::Write, Usage::Read] {
            politely(|| files::take_digests_of(&mut builder, usage, Moment::Running));
        }
        let root = self.members[0].engine()?;
        let (engine, incremental) = (root.name(), root.is_incremental());
        builder.image.meta.engine = engine.into();
        groups::record(&mut builder.image);
        let outside = builder.image.pipes_cut_off();
        let outside = outside.filter(|(row, _)| builder.image.pipes[*row as usize].kept.is_none());
        self.notes.extend(outside.map(|(_, told)| {
            format!("{told} leads outside: a restore is to be told where it leads then (--fd, --pipes)")
        }));
        builder.image.meta.pause_ns = pause.as_nanos() as u64;
        let mut writer = self.writer.take().ok_or_else(|| Error::Failed("there is no writer".into()))?;
        self.ahead.settle(&mut writer);
        for gone in (0..self.rows).filter(|row| self.members.iter().all(|m| m.target.space != *row)) {
            writer.keep_only(Owner::Space(gone), Vec::new());
        }
        let processes = builder.image.processes.len();
        let steps = std::mem::take(&mut builder.laps).into_steps();
        let committed = writer.commit(builder.image)?;
        Ok(Done { committed, pause, steps, engine, incremental, processes })
    }

    /// Keeps what the threads were found waiting for.
    fn note_calls(&mut self, image: &Image) {
        for member in &mut self.members {
            member.earlier = earlier_calls(image, &member.target);
        }
    }
}

fn writer(writer: &mut Option<Writer>) -> Result<&mut Writer> {
    writer.as_mut().ok_or_else(|| Error::Failed("the checkpoint is committed already".into()))
}

fn holder(target: &Target) -> Holder<'_> {
    Holder { pid: target.pid, pidfd: target.pidfd.as_fd(), process: &target.process }
}

fn all_hold(assumed: &[Assumed], known: &[Known]) -> Result<bool> {
    for (assumed, known) in assumed.iter().zip(known) {
        if !assumed.holds(known)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Outsiders, without those that were made by the program since they were looked for, and with all others that were.
fn with_newer(mut outsiders: Outsiders, last_pid: Option<u32>, tree: &FrozenTree) -> Outsiders {
    let inside: Vec<u32> = tree.processes.iter().map(|p| p.pid).collect();
    let whose = |pid: u32| Proc::process(pid).and_then(|p| p.status()).map(|s| s.tgid).ok();
    outsiders.update(&inside, || {
        let mut newer = proc::made_since([last_pid]).unwrap_or_default();
        newer.retain(|pid| !inside.contains(pid) && whose(*pid) == Some(*pid));
        newer
    });
    outsiders
}

/// What can be known of a program while it runs; refuses what cannot be captured. With each process, whether its memory may
/// still be on its way.
fn learn(members: &[(Arc<Target>, bool)], options: &Options, exact: bool) -> Result<Learned> {
    let home = &members[0].0.home;
    let (mut builder, mut rehearsed) = (Builder::at(home), Builder::at(home));
    describe(&mut builder.image, options, &members[0].0)?;
    builder.kills = options.kill;
    let targets: Vec<_> = members.iter().map(|(target, _)| target.clone()).collect();
    let pids: Vec<u32> = members.iter().map(|(target, _)| target.pid).collect();
    // One that has ended meanwhile is no concern.
    pids.iter().for_each(|&pid| drop(files::note_watches(&mut builder, pid)));
    rehearsed.noticed.clone_from(&builder.noticed);
    namespaces::learn(&mut builder, &targets)?;
    let last_pid = proc::last_pid();
    let maps = members.iter().flat_map(|(target, _)| target.process.maps().unwrap_or_default());
    let nameless = maps.filter(|v| v.shared && v.deleted).map(|v| v.ino).collect();
    let outsiders = Outsiders::of(&pids, nameless);
    let mut known = Vec::with_capacity(members.len());
    for (index, (target, is_loading)) in members.iter().enumerate() {
        let regard = Regard { exact, is_loading: *is_loading, tree: &pids };
        match Known::learn(&mut builder, target, &outsiders, regard, &mut rehearsed) {
            // The freeze finds what there is.
            Err(_) if index > 0 && crate::attributes::target::has_ended(target.pid) => {}
            learned => known.push(learned?),
        }
    }
    relations::refuse_sharers(&mut builder, &pids, true);
    pids.iter().for_each(|&pid| drop(files::refuse_questions(&mut builder, pid)));
    files::refuse_signed(&mut builder, &pids);
    builder.refuse_if_needed()?;
    let note = |pid: &u32| files::note_open(&mut rehearsed, *pid).unwrap_or_default();
    if pids.iter().map(note).fold(false, |any, may_be_held| any | may_be_held) {
        outsiders.look();
    }
    Ok(Learned { builder, outsiders, last_pid, known, rehearsed })
}

/// The mappings of processes, which half of them are read by another thread where there are many.
fn maps_of(targets: &[&Target]) -> Result<Vec<Vec<Vma>>> {
    let read = |targets: &[&Target]| {
        targets.iter().map(|target| Ok(target.process.maps()?)).collect::<Result<Vec<Vec<Vma>>>>()
    };
    if targets.len() < MANY {
        return read(targets);
    }
    let (first, second) = targets.split_at(targets.len() / 2);
    std::thread::scope(|scope| {
        let helper = scope.spawn(|| read(second));
        let mut maps = read(first)?;
        let failed = |_| Err(Error::Failed("reading mappings failed inside stillpoint".into()));
        maps.extend(helper.join().unwrap_or_else(failed)?);
        Ok(maps)
    })
}

fn impossible(engine: &str, why: &str) -> Error {
    Error::Failed(format!("the engine {engine} is not possible: {why} (auto takes another)"))
}

/// Waits until killed processes are no more (though their parents may not have noticed yet).
///
/// Process 1 of a pid namespace ends when all others in it are buried, which they can be when we, who trace them, have seen their
/// ends.
fn wait_for_ends(mut targets: Vec<&Target>) {
    const PATIENCE: Duration = Duration::from_secs(10);
    const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let (start, us) = (Instant::now(), std::process::id());
    let (mut last, mut before) = (start, targets.len());
    while let Some(target) = targets.first().filter(|_| start.elapsed() < PATIENCE) {
        if targets.len() < before {
            (last, before) = (Instant::now(), targets.len());
        } else if last.elapsed() > BURIAL && targets.iter().all(|target| waits_for_burials(target.pid)) {
            return;
        }
        let mut fds = [PollFd::new(&target.pidfd, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&PAUSE));
        targets.retain(|target| {
            let mut fds = [PollFd::new(&target.pidfd, PollFlags::IN)];
            let has_ended = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0);
            // A child of ours is not for us to bury here.
            if target.process.stat().is_ok_and(|stat| stat.ppid != us) {
                spawn::reap_now(target.pid);
            }
            !has_ended
        });
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

/// The interrupted calls of a checkpoint, if a process of it is this one.
pub fn earlier_calls(last: &Image, target: &Target) -> Earlier {
    let Ok(status) = target.process.status() else { return Earlier::default() };
    let same_boot = last.meta.host.boot_id == host::boot_id();
    let process = last.processes.iter().find(|p| same_boot && p.pid == target.home.pid(&status));
    process.map_or_else(Earlier::default, |process| calls_of(last, process))
}

/// The interrupted calls of a process of a checkpoint.
pub fn calls_of(last: &Image, process: &Process) -> Earlier {
    let calls = process.threads.iter().filter_map(|t| Some((t.tid, t.blocked?)));
    // By its own clock.
    let shift = |row: &u32| match last.namespaces.get(*row as usize) {
        Some(Namespace::Time { monotonic_ns, .. }) => *monotonic_ns,
        _ => 0,
    };
    let shift: i64 = process.namespaces.iter().map(shift).sum();
    Earlier { at_ns: last.meta.monotonic_ns.saturating_add(shift), calls: calls.collect() }
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
        instructions: host::instructions(),
    };
    Ok(())
}
