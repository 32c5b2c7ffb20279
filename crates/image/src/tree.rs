//! How a tree of processes can come about: what each process does, and in which order, to make its children.
//!
//! A child inherits its parent's session, and a copy of its parent's descriptor table and file-system context (current
//! directory, root, umask), or these themselves. Afterwards a process can only leave them for new ones. So what several
//! processes have in common is had from birth, by way of their common ancestors.
//!
//! Memory cannot even be left, but by executing another program. So of those that share theirs, one is made by its parent, and
//! the others each by one of them: its parent, or one of its siblings. The same goes for signal actions, which only those that
//! share their memory can share.

use crate::pids::{Pids, namespace_of};
use crate::{Image, Process};
use std::collections::{BTreeSet, HashMap, HashSet};

/// What descendants can only have inherited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inherited {
    /// Their sessions.
    Session,
    /// Their process groups.
    Group,
    /// The descriptor tables that they share.
    Files,
    /// The current directory, root and umask that they share.
    FileSystem,
    /// The memory that they share.
    Memory,
    /// The signal actions that they share.
    Actions,
    /// The pid namespaces that they are in.
    Namespace,
}

impl Inherited {
    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Inherited::Session => "sessions",
            Inherited::Group => "process groups",
            Inherited::Files => "descriptor tables",
            Inherited::FileSystem => "current directories",
            Inherited::Memory => "memory",
            Inherited::Actions => "signal actions",
            Inherited::Namespace => "pid namespaces",
        }
    }
}

/// That a process (row) has descendants with something that they cannot have inherited from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotInherited {
    /// The process.
    pub row: usize,
    /// What that is.
    pub what: Inherited,
}

/// What a process may share with others without sharing its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// Descriptor table.
    Files,
    /// Current directory, root, umask.
    FileSystem,
}

const CONTEXTS: [Context; 2] = [Context::Files, Context::FileSystem];

impl Context {
    fn inherited(self) -> Inherited {
        match self {
            Context::Files => Inherited::Files,
            Context::FileSystem => Inherited::FileSystem,
        }
    }
}

/// Whose memory a process begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// A copy of its maker's.
    #[default]
    Copied,
    /// That of its maker.
    Shared,
    /// That of its maker, and its signal actions.
    SharedWithActions,
}

/// A child that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Child {
    /// One that lives, by its row.
    Living(usize),
    /// One that has ended, by its place among those of its parent.
    Ended(usize),
}

/// What a process does on the way to what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It makes a process that begins this session, whose leader has ended, and makes members of it.
    StandIn {
        /// The session, and the id of its leader.
        session: u32,
        /// The leader's place among the children that have ended and were not waited for, if it is one of these.
        ended: Option<usize>,
        /// Signal to the parent when it ends, as of the children that it makes; none: `SIGCHLD`.
        exit_signal: Option<u32>,
    },
    /// It makes a child.
    Bear {
        /// Which one.
        child: Child,
        /// Whether it shares its descriptor table, and its file-system context, with it.
        shares: [bool; 2],
        /// Whose memory it has.
        memory: Memory,
        /// Whether it becomes a child of its maker's parent, and not of its maker.
        sibling: bool,
        /// The session whose stand-in makes it, as a child of the stand-in's parent.
        by: Option<u32>,
    },
    /// It begins a session.
    BeginSession,
    /// It joins its process group, in which some of its children are to be born.
    JoinGroup,
    /// From here on it shares this with nobody.
    Leave(Context),
}

/// What a process must be born with, so that it and all its descendants come to have theirs. None: anything will do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Birth {
    /// Session by its leader (none: that of whoever restores).
    session: Option<Option<u32>>,
    /// Descriptor table and file-system context, by [`Tree::context`].
    contexts: [Option<u32>; 2],
}

/// The process group that was in the foreground of the terminal outside, if it is one of the tree's own.
pub fn in_front(image: &Image) -> Option<u32> {
    let process = image.processes.iter().find(|p| p.foreground && p.own_session().is_none())?;
    process.own_group()
}

/// What each process does to make its children, by row.
///
/// # Errors
/// [`NotInherited`]: there is no such way, or none that is known.
pub fn steps(image: &Image) -> Result<Vec<Vec<Step>>, NotInherited> {
    let tree = Tree::of(image)?;
    let mut births = vec![Birth::default(); image.processes.len()];
    let mut all = vec![Vec::new(); image.processes.len()];
    for row in (0..image.processes.len()).rev() {
        let mut making = Making::of(&tree, row, &births)?;
        births[row] = making.birth;
        all[row] = making.steps()?;
    }
    if births.first().is_some_and(|root| !matches!(root.session, None | Some(None))) {
        return Err(NotInherited { row: 0, what: Inherited::Session });
    }
    tree.check_groups()?;
    if !tree.pids.are_plain() {
        let mut play = Play::new(&tree);
        let mut next = vec![0];
        while let Some(row) = next.pop() {
            let born = play.process(row, &all)?;
            next.extend(born.into_iter().rev());
        }
        for row in play.joins {
            all[row].insert(0, Step::JoinGroup);
        }
    }
    Ok(all)
}

/// Process groups that somebody within a pid namespace is in and that have no id there. He cannot join them by himself: they are
/// joined while processes are made, so that he is born in them.
pub fn groups_from_birth(image: &Image) -> BTreeSet<u32> {
    let pids = Pids::of(image);
    if pids.are_plain() {
        return BTreeSet::new();
    }
    let living = image.processes.iter().map(|p| (namespace_of(image, p), p.own_group()));
    let ended = image.processes.iter().flat_map(|p| p.ended().iter().map(|e| (e.namespace, e.group)));
    let all = living.chain(ended).filter_map(|(namespace, group)| Some((namespace, group?)));
    all.filter(|(namespace, group)| pids.seen_from(*namespace, *group).is_none()).map(|(_, g)| g).collect()
}

/// Rows of a process's children that live.
pub fn children(image: &Image, row: usize) -> impl Iterator<Item = usize> {
    let is_child = move |(_, parent): &(usize, Option<u32>)| *parent == u32::try_from(row).ok();
    image.processes.iter().map(|p| p.parent).enumerate().filter(is_child).map(|(child, _)| child)
}

/// Ids of sessions and process groups of the tree whose leaders are not in it any more, not even as ended ones.
pub fn lost_leaders(image: &Image) -> BTreeSet<u32> {
    let leads: HashSet<u32> =
        image.processes.iter().flat_map(|p| p.ended().iter().map(|e| e.pid).chain([p.pid])).collect();
    let of_ended = image.processes.iter().flat_map(Process::ended).flat_map(|e| [e.session, e.group]);
    let of_living = image.processes.iter().flat_map(|p| [p.own_session(), p.own_group()]);
    of_ended.chain(of_living).flatten().filter(|id| !leads.contains(id)).collect()
}

/// Who makes a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Maker {
    /// Its parent, or a sibling that comes before it.
    row: Option<usize>,
    sibling: bool,
    memory: Memory,
}

/// Who makes each process.
///
/// # Errors
/// [`NotInherited`]: some that share memory, or signal actions, cannot be made by each other.
fn makers(image: &Image) -> Result<Vec<Maker>, NotInherited> {
    let parent = |row: usize| image.processes[row].parent.map(|parent| parent as usize).filter(|&p| p < row);
    let actions = |row: usize| image.processes[row].shares_actions.map_or(row, |first| first as usize);
    let mut spaces: HashMap<u32, Vec<usize>> = HashMap::new();
    for (row, process) in image.processes.iter().enumerate() {
        spaces.entry(process.space).or_default().push(row);
    }
    let mut makers = Vec::with_capacity(image.processes.len());
    for (row, process) in image.processes.iter().enumerate() {
        let before = |other: &&usize| **other < row;
        let same_memory: Vec<usize> = spaces[&process.space].iter().take_while(before).copied().collect();
        let same_actions: Vec<usize> =
            same_memory.iter().copied().filter(|&other| actions(other) == actions(row)).collect();
        let is_sibling = |other: &usize| {
            let its = &image.processes[*other];
            its.parent.is_some() && (its.parent, its.parent_thread) == (process.parent, process.parent_thread)
        };
        let among = |all: &[usize]| {
            let parent = parent(row).filter(|parent| all.contains(parent)).map(|parent| (parent, false));
            parent.or_else(|| Some((all.iter().copied().find(is_sibling)?, true)))
        };
        let not_inherited = |what| {
            let first = same_actions.first().or(same_memory.first()).copied().unwrap_or(row);
            NotInherited { row: common_ancestor(image, first, row), what }
        };
        let (made, memory) = match (same_actions.is_empty(), same_memory.is_empty()) {
            (false, _) => (among(&same_actions), Memory::SharedWithActions),
            (true, false) => (among(&same_memory), Memory::Shared),
            (true, true) => (parent(row).map(|parent| (parent, false)), Memory::Copied),
        };
        let what = if same_actions.is_empty() { Inherited::Memory } else { Inherited::Actions };
        if made.is_none() && memory != Memory::Copied {
            return Err(not_inherited(what));
        }
        let (maker, sibling) = made.map_or((None, false), |(maker, sibling)| (Some(maker), sibling));
        // Who is made by a sibling sends its parent the signal that the sibling sends.
        let signal = |row: usize| image.processes[row].exit_signal;
        if sibling && maker.is_some_and(|maker| signal(maker) != signal(row)) {
            return Err(not_inherited(what));
        }
        makers.push(Maker { row: maker, sibling, memory });
    }
    Ok(makers)
}

/// The nearest process that two are descendants of, or are.
fn common_ancestor(image: &Image, mut one: usize, mut other: usize) -> usize {
    let above = |row: usize| image.processes[row].parent.map_or(0, |parent| (parent as usize).min(row));
    while one != other {
        let lower = if one > other { &mut one } else { &mut other };
        match above(*lower) {
            parent if parent < *lower => *lower = parent,
            _ => return 0,
        }
    }
    one
}

/// Which processes of a tree belong together.
struct Tree<'a> {
    image: &'a Image,
    makers: Vec<Maker>,
    /// Those that each makes.
    children: Vec<Vec<usize>>,
    /// Members of each session of the tree's own, those that have ended by their parents.
    sessions: HashMap<u32, Vec<usize>>,
    /// Members of each context.
    contexts: [HashMap<u32, Vec<usize>>; 2],
    rows: HashMap<u32, usize>,
    pids: Pids<'a>,
}

impl<'a> Tree<'a> {
    fn of(image: &'a Image) -> Result<Self, NotInherited> {
        let mut tree = Tree {
            image,
            makers: makers(image)?,
            children: vec![Vec::new(); image.processes.len()],
            sessions: HashMap::new(),
            contexts: Default::default(),
            rows: image.processes.iter().enumerate().map(|(row, p)| (p.pid, row)).collect(),
            pids: Pids::of(image),
        };
        for (row, process) in image.processes.iter().enumerate() {
            if let Some(maker) = tree.makers[row].row {
                tree.children[maker].push(row);
            }
            let of_ended = process.ended().iter().filter_map(|e| e.session);
            for session in of_ended.chain(process.own_session()) {
                tree.sessions.entry(session).or_default().push(row);
            }
            tree.contexts[0].entry(process.table).or_default().push(row);
            tree.contexts[1].entry(process.shares_fs.unwrap_or(row as u32)).or_default().push(row);
        }
        Ok(tree)
    }

    /// The context that a process shares with others.
    fn context(&self, row: usize, context: usize) -> Option<u32> {
        let process = &self.image.processes[row];
        let number = [process.table, process.shares_fs.unwrap_or(row as u32)][context];
        Some(number).filter(|number| self.contexts[context].get(number).is_some_and(|all| all.len() > 1))
    }

    fn is_inside(&self, ancestor: usize, mut row: usize) -> bool {
        while row > ancestor {
            match self.makers[row].row {
                Some(maker) => row = maker,
                None => return false,
            }
        }
        row == ancestor
    }

    fn are_inside(&self, ancestor: usize, rows: Option<&Vec<usize>>) -> bool {
        rows.into_iter().flatten().all(|&row| self.is_inside(ancestor, row))
    }

    /// Whether nobody who lives leads this session.
    fn has_lost_leader(&self, session: u32) -> bool {
        !self.rows.contains_key(&session)
    }

    /// A group whose leader has ended can be joined by those in the session of one of its members who lives.
    fn check_groups(&self) -> Result<(), NotInherited> {
        let lost = lost_leaders(self.image);
        for (row, process) in self.image.processes.iter().enumerate() {
            for ended in process.ended() {
                let Some(group) = ended.group.filter(|g| lost.contains(g) && ended.session != Some(*g))
                else {
                    continue;
                };
                if stand_in_parent(self.image, &self.pids, group).is_none() {
                    return Err(NotInherited { row, what: Inherited::Group });
                }
            }
            // (Who leads a session leads a group of this id, too.)
            let group = process.own_group().filter(|g| lost.contains(g) && !self.sessions.contains_key(g));
            if group.is_some_and(|group| stand_in_parent(self.image, &self.pids, group).is_none()) {
                return Err(NotInherited { row, what: Inherited::Group });
            }
        }
        Ok(())
    }
}

/// The process that can make somebody who leads this group for the moment, in the session of the group.
pub fn stand_in_parent(image: &Image, pids: &Pids<'_>, group: u32) -> Option<usize> {
    let of_group = pids.namespace(group);
    let is_member = |p: &Process| {
        p.own_group() == Some(group)
            || p.ended().iter().any(|e| e.group == Some(group) && e.session == p.own_session())
    };
    let can_make = |p: &Process| pids.lies_in(of_group, namespace_of(image, p));
    image.processes.iter().position(|p| is_member(p) && can_make(p))
}

/// All processes of a tree being made, in the order in which a restore makes them: each makes its children, and then these do.
struct Play<'a> {
    tree: &'a Tree<'a>,
    /// Groups that are joined at once, [`groups_from_birth`].
    from_birth: BTreeSet<u32>,
    /// Namespaces whose process 1 is there.
    begun: HashSet<u32>,
    /// Groups that can be joined by now.
    led: HashSet<u32>,
    /// Who is in which group by now, by row.
    groups: Vec<Option<u32>>,
    /// Who joins his before he makes anybody.
    joins: Vec<usize>,
}

impl<'a> Play<'a> {
    fn new(tree: &'a Tree<'a>) -> Self {
        let groups = vec![None; tree.image.processes.len()];
        let from_birth = groups_from_birth(tree.image);
        Play { tree, from_birth, begun: HashSet::new(), led: HashSet::new(), groups, joins: Vec::new() }
    }

    /// Whether all that a process makes can be where it was; returns the rows of those who live, in their order.
    fn process(&mut self, row: usize, steps: &[Vec<Step>]) -> Result<Vec<usize>, NotInherited> {
        let (image, pids) = (self.tree.image, &self.tree.pids);
        let Some(process) = image.processes.get(row) else { return Ok(Vec::new()) };
        let own = namespace_of(image, process);
        if row == 0 {
            // It is made by whoever restores, outside of all.
            self.is_born(0, None, own, process.pid)?;
            self.takes_group(0, process.own_group(), own, process.pid, None, Some(0))?;
        }
        let group = process.own_group().filter(|g| self.from_birth.contains(g) && self.led.contains(g));
        let can_join = |g| process.own_session() != Some(process.pid) && pids.seen_from(own, g).is_some();
        if group != self.groups[row] && group.is_some_and(can_join) {
            self.groups[row] = group;
            self.joins.push(row);
        }
        let mut born = Vec::new();
        for step in &steps[row] {
            match *step {
                Step::BeginSession => {
                    self.groups[row] = Some(process.pid);
                    self.led.insert(process.pid);
                }
                Step::Leave(_) | Step::JoinGroup => {}
                Step::StandIn { session, .. } => {
                    self.is_born(row, own, pids.namespace(session), session)?;
                    self.led.insert(session);
                }
                Step::Bear { child, by, .. } => {
                    let (maker, group) = match by {
                        Some(session) => (pids.namespace(session), Some(session)),
                        None => (own, self.groups[row]),
                    };
                    let (id, theirs, wanted, place) = match child {
                        Child::Living(child) => {
                            let of = &image.processes[child];
                            born.push(child);
                            (of.pid, namespace_of(image, of), of.own_group(), Some(child))
                        }
                        Child::Ended(place) => {
                            let of = &process.ended()[place];
                            (of.pid, of.namespace, of.group, None)
                        }
                    };
                    self.is_born(row, maker, theirs, id)?;
                    self.takes_group(row, wanted, theirs, id, group, place)?;
                }
            }
        }
        Ok(born)
    }

    /// Somebody is made by a process in a namespace that is `maker`.
    fn is_born(
        &mut self,
        row: usize,
        maker: Option<u32>,
        own: Option<u32>,
        id: u32,
    ) -> Result<(), NotInherited> {
        let pids = &self.tree.pids;
        let is_first = pids.is_first(id);
        // That in which he is made, or with which he makes a new one.
        let inside = if is_first { own.and_then(|own| pids.parent(own)) } else { own };
        let is_begun = inside == maker || inside.is_some_and(|inside| self.begun.contains(&inside));
        if !is_begun || !pids.lies_in(inside, maker) {
            return Err(NotInherited { row, what: Inherited::Namespace });
        }
        if let Some(own) = own.filter(|_| is_first) {
            self.begun.insert(own);
        }
        Ok(())
    }

    /// Somebody is born in a group, and has to get into his own.
    fn takes_group(
        &mut self,
        row: usize,
        wanted: Option<u32>,
        own: Option<u32>,
        id: u32,
        inherited: Option<u32>,
        place: Option<usize>,
    ) -> Result<(), NotInherited> {
        let leads_session =
            place.is_some_and(|place| self.tree.image.processes[place].own_session() == Some(id));
        let leads = wanted == Some(id) && !leads_session && self.from_birth.contains(&id);
        if leads {
            self.led.insert(id);
        }
        let now = if leads { Some(id) } else { inherited };
        if let Some(place) = place {
            self.groups[place] = now;
        }
        let can_join = wanted.is_some_and(|group| self.tree.pids.seen_from(own, group).is_some());
        match can_join || now == wanted {
            true => Ok(()),
            false => Err(NotInherited { row, what: Inherited::Group }),
        }
    }
}

/// One process that is about to make its children.
struct Making<'a> {
    tree: &'a Tree<'a>,
    row: usize,
    birth: Birth,
    own: Birth,
    leads: bool,
    /// Sessions of some of its children whose leaders have ended.
    lost: Vec<u32>,
    /// Children with what they must be born with.
    children: Vec<(Child, Birth)>,
}

impl<'a> Making<'a> {
    fn of(tree: &'a Tree<'a>, row: usize, births: &[Birth]) -> Result<Self, NotInherited> {
        let process = &tree.image.processes[row];
        let session = process.own_session();
        let living = tree.children[row].iter().map(|&child| (Child::Living(child), births[child]));
        let ended = process.ended().iter().enumerate().map(|(place, ended)| {
            let session = (ended.session != Some(ended.pid)).then_some(ended.session);
            (Child::Ended(place), Birth { session, ..Birth::default() })
        });
        let own = Birth { session: Some(session), contexts: [tree.context(row, 0), tree.context(row, 1)] };
        let mut children: Vec<(Child, Birth)> = living.chain(ended).collect();
        // Others in a pid namespace are made behind its process 1.
        let is_first = |child: &Child| match *child {
            Child::Living(row) => tree.pids.is_first(tree.image.processes[row].pid),
            Child::Ended(_) => false,
        };
        children.sort_by_key(|(child, _)| !is_first(child));
        let leads = session == Some(process.pid);
        let mut making =
            Making { tree, row, birth: Birth::default(), own, leads, lost: Vec::new(), children };
        making.birth.session = making.session_at_birth()?;
        for context in [0, 1] {
            making.birth.contexts[context] = making.context_at_birth(context)?;
        }
        Ok(making)
    }

    fn not_inherited(&self, what: Inherited) -> NotInherited {
        NotInherited { row: self.row, what }
    }

    /// A process can only inherit a session or begin one; one that begins one has been in another before, in which some of its
    /// children may have remained. Sessions whose leaders have ended are begun for its children by somebody else.
    fn session_at_birth(&mut self) -> Result<Option<Option<u32>>, NotInherited> {
        let mut wanted: Vec<Option<u32>> = self.children.iter().filter_map(|(_, b)| b.session).collect();
        wanted.retain(|session| Some(*session) != self.own.session);
        wanted.sort_unstable();
        wanted.dedup();
        let (tree, row) = (self.tree, self.row);
        let begun_here = |session: &Option<u32>| {
            session.is_some_and(|s| tree.has_lost_leader(s) && tree.are_inside(row, tree.sessions.get(&s)))
        };
        self.lost = wanted.iter().filter(|s| begun_here(s)).filter_map(|s| *s).collect();
        wanted.retain(|session| !begun_here(session));
        match (self.leads, wanted.as_slice()) {
            (false, []) => Ok(self.own.session),
            (true, []) => Ok(None),
            (true, [one]) => Ok(Some(*one)),
            _ => Err(self.not_inherited(Inherited::Session)),
        }
    }

    /// A table that others besides its descendants have, too, comes from its parent.
    fn context_at_birth(&self, context: usize) -> Result<Option<u32>, NotInherited> {
        let of_children = self.children.iter().filter_map(|(_, birth)| birth.contexts[context]);
        let wanted: BTreeSet<u32> = of_children.chain(self.own.contexts[context]).collect();
        let members = |number| self.tree.contexts[context].get(number);
        let mut outside = wanted.iter().filter(|n| !self.tree.are_inside(self.row, members(n)));
        let first = outside.next().copied();
        let stays = first.is_some() && first == self.own.contexts[context];
        if outside.next().is_some() || stays && wanted.len() > 1 {
            return Err(self.not_inherited(CONTEXTS[context].inherited()));
        }
        Ok(first)
    }

    /// In each state it makes the children that are to have what it has, and leaves what none of the others are to have.
    fn steps(&mut self) -> Result<Vec<Step>, NotInherited> {
        let mut steps = Vec::new();
        for session in std::mem::take(&mut self.lost) {
            self.stand_in(session, &mut steps)?;
        }
        // What the main thread leaves, the threads that are there by then keep.
        let by_thread = self.children.iter().any(|(child, _)| self.is_of_thread(*child));
        let crosses =
            |(child, birth): &(Child, Birth)| birth.contexts[1].is_some() && self.is_of_thread_apart(*child);
        if self.children.iter().any(crosses) {
            return Err(self.not_inherited(Inherited::FileSystem));
        }
        let mut begun = !self.leads;
        let mut has = self.birth.contexts;
        while !self.children.is_empty() {
            if let Some(next) = (0..self.children.len()).find(|&i| self.fits(i, begun, &has)) {
                let (child, birth) = self.children.remove(next);
                for (has, wanted) in has.iter_mut().zip(birth.contexts) {
                    *has = has.or(wanted);
                }
                let Maker { memory, sibling, .. } = self.maker_of(child);
                let shares = birth.contexts.map(|c| c.is_some());
                steps.push(Step::Bear { child, shares, memory, sibling, by: None });
            } else if !begun && self.children.iter().all(|(_, b)| self.is_after(b)) {
                steps.push(Step::BeginSession);
                begun = true;
            } else if let Some(context) = (0..2).find(|&c| self.is_done_with(c, has[c])) {
                steps.push(Step::Leave(CONTEXTS[context]));
                has[context] = None;
            } else {
                let open = (0..2).find(|&c| has[c].is_some());
                let what = open.map_or(Inherited::Session, |c| CONTEXTS[c].inherited());
                return Err(self.not_inherited(what));
            }
        }
        if !begun {
            steps.push(Step::BeginSession);
        }
        for context in (0..2).filter(|&c| self.is_done_with(c, has[c])) {
            steps.push(Step::Leave(CONTEXTS[context]));
        }
        let leaves = |step: &Step| matches!(step, Step::Leave(_));
        if by_thread && steps.iter().any(leaves) {
            return Err(self.not_inherited(Inherited::FileSystem));
        }
        Ok(steps)
    }

    /// Makes the children that are in a session whose leader has ended.
    fn stand_in(&mut self, session: u32, steps: &mut Vec<Step>) -> Result<(), NotInherited> {
        let process = &self.tree.image.processes[self.row];
        let ended = process.ended().iter().position(|e| e.pid == session);
        let elsewhere =
            || self.tree.image.processes.iter().any(|p| p.ended().iter().any(|e| e.pid == session));
        let (members, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.children)
            .into_iter()
            .partition(|(_, birth)| birth.session == Some(Some(session)));
        self.children = others;
        let signal = |child: &Child| match *child {
            Child::Living(row) => self.tree.image.processes[row].exit_signal,
            Child::Ended(place) => process.ended()[place].exit_signal,
        };
        let mut signals: Vec<_> = members.iter().map(|(child, _)| signal(child)).collect();
        signals.extend(ended.map(|place| process.ended()[place].exit_signal));
        signals.dedup();
        let shares = members.iter().any(|(child, birth)| {
            let Maker { memory, sibling, .. } = self.maker_of(*child);
            birth.contexts != [None; 2] || memory != Memory::Copied || sibling
        });
        let by_thread = members.iter().any(|(child, _)| self.is_of_thread(*child));
        let &[exit_signal] = signals.as_slice() else { return Err(self.not_inherited(Inherited::Session)) };
        if shares || by_thread || ended.is_none() && elsewhere() {
            return Err(self.not_inherited(Inherited::Session));
        }
        self.children.retain(|(child, _)| ended.is_none_or(|place| *child != Child::Ended(place)));
        steps.push(Step::StandIn { session, ended, exit_signal });
        steps.extend(members.iter().map(|&(child, _)| Step::Bear {
            child,
            shares: [false; 2],
            memory: Memory::Copied,
            sibling: false,
            by: Some(session),
        }));
        Ok(())
    }

    fn maker_of(&self, child: Child) -> Maker {
        match child {
            Child::Living(row) => self.tree.makers[row],
            Child::Ended(_) => Maker::default(),
        }
    }

    /// The thread that makes this child, if it is not the main one.
    fn thread_of(&self, child: Child) -> Option<u32> {
        match child {
            Child::Living(row) if self.tree.makers[row].sibling => None,
            Child::Living(row) => self.tree.image.processes[row].parent_thread,
            Child::Ended(place) => self.tree.image.processes[self.row].ended()[place].parent_thread,
        }
    }

    fn is_of_thread(&self, child: Child) -> bool {
        self.thread_of(child).is_some()
    }

    /// Whether the thread that has this child has directories apart from the main thread's.
    fn is_of_thread_apart(&self, child: Child) -> bool {
        let thread = self.thread_of(child);
        let threads = &self.tree.image.processes[self.row].threads;
        threads.iter().any(|t| Some(t.tid) == thread && t.directories.is_some())
    }

    /// Whether a child may be made after its parent has begun its session.
    fn is_after(&self, birth: &Birth) -> bool {
        birth.session.is_none() || birth.session == self.own.session
    }

    fn fits(&self, child: usize, begun: bool, has: &[Option<u32>; 2]) -> bool {
        let birth = &self.children[child].1;
        let in_session = match begun {
            true => self.is_after(birth),
            // Process 1 of the pid namespace of such a one may have to be made after.
            false if birth.session.is_none() => !self.is_elsewhere(self.children[child].0),
            false => birth.session != self.own.session,
        };
        // What it is to have in the end it does not take before it has made those that are to have something else.
        let is_free = |c: usize, wanted: u32| {
            let others = self.children.iter().filter_map(|(_, b)| b.contexts[c]);
            self.own.contexts[c] != Some(wanted) || others.into_iter().all(|other| other == wanted)
        };
        in_session
            && (0..2).all(|c| match (birth.contexts[c], has[c]) {
                (None, _) => true,
                (Some(wanted), Some(has)) => wanted == has,
                (Some(wanted), None) => is_free(c, wanted),
            })
    }

    /// Whether a child is in another pid namespace, and not the first there.
    fn is_elsewhere(&self, child: Child) -> bool {
        let image = self.tree.image;
        let (id, namespace) = match child {
            Child::Living(row) => (image.processes[row].pid, namespace_of(image, &image.processes[row])),
            Child::Ended(place) => {
                let ended = &image.processes[self.row].ended()[place];
                (ended.pid, ended.namespace)
            }
        };
        namespace != namespace_of(image, &image.processes[self.row]) && !self.tree.pids.is_first(id)
    }

    /// Whether it has a context that is neither its own nor one for a child that is still to be made.
    fn is_done_with(&self, context: usize, has: Option<u32>) -> bool {
        has.is_some_and(|has| {
            self.own.contexts[context] != Some(has)
                && self.children.iter().all(|(_, b)| b.contexts[context] != Some(has))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ended, Namespace, Thread};

    fn image(rows: &[(u32, Option<u32>, Option<u32>)]) -> Image {
        let process = |(row, &(pid, parent, session)): (usize, &(u32, Option<u32>, Option<u32>))| Process {
            pid,
            parent,
            session,
            space: row as u32,
            table: row as u32,
            ..Process::default()
        };
        Image { processes: rows.iter().enumerate().map(process).collect(), ..Image::default() }
    }

    fn bear(row: usize) -> Step {
        sharing(row, false, false)
    }

    fn sharing(row: usize, files: bool, fs: bool) -> Step {
        let (child, memory) = (Child::Living(row), Memory::Copied);
        Step::Bear { child, shares: [files, fs], memory, sibling: false, by: None }
    }

    #[test]
    fn sessions_are_inherited_or_begun() {
        let daemon =
            image(&[(1, None, None), (2, Some(0), Some(2)), (3, Some(1), Some(2)), (4, Some(1), None)]);
        let steps_of = steps(&daemon).expect("there is a way");
        assert_eq!(
            steps_of[1],
            [bear(3), Step::BeginSession, bear(2)],
            "4 was born before 2 began its session"
        );
        let leader = image(&[(1, None, Some(1)), (2, Some(0), Some(2))]);
        assert_eq!(
            steps(&leader).expect("there is a way"),
            [vec![bear(1), Step::BeginSession], vec![Step::BeginSession]]
        );
        let strange = image(&[(1, None, None), (2, Some(0), Some(2)), (3, Some(0), Some(2))]);
        assert_eq!(steps(&strange), Err(NotInherited { row: 0, what: Inherited::Session }));
    }

    #[test]
    fn sessions_outlive_their_leaders() {
        let by = |child, session| {
            let (shares, memory) = ([false; 2], Memory::Copied);
            Step::Bear { child, shares, memory, sibling: false, by: Some(session) }
        };
        let stand_in = |ended| Step::StandIn { session: 9, ended, exit_signal: None };
        let mut daemon =
            image(&[(1, None, None), (2, Some(0), Some(9)), (3, Some(0), Some(9)), (4, Some(1), Some(9))]);
        let all = steps(&daemon).expect("there is a way");
        let two = [by(Child::Living(1), 9), by(Child::Living(2), 9)];
        assert_eq!(all[0], [stand_in(None), two[0], two[1]]);
        assert_eq!(all[1], [bear(3)]);
        assert_eq!(lost_leaders(&daemon), BTreeSet::from([9]));
        daemon.processes[0].ended = Some(vec![Ended { pid: 9, session: Some(9), ..Ended::default() }]);
        assert_eq!(steps(&daemon).expect("there is a way")[0], [stand_in(Some(0)), two[0], two[1]]);
        daemon.processes[2].exit_signal = Some(10);
        assert!(steps(&daemon).is_err(), "the two cannot have one maker");
        let apart =
            image(&[(1, None, None), (2, Some(0), Some(9)), (3, Some(0), Some(3)), (4, Some(2), Some(9))]);
        assert_eq!(
            steps(&apart).expect("there is a way"),
            [
                vec![stand_in(None), by(Child::Living(1), 9), by(Child::Living(2), 9)],
                vec![],
                vec![bear(3), Step::BeginSession],
                vec![]
            ],
            "3 was in that session when it made 4"
        );
    }

    /// What a process has, as a model of the kernel sees it; contexts by numbers that mean nothing.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Has {
        pid: u32,
        parent: usize,
        session: Option<u32>,
        contexts: [u32; 2],
        memory: u32,
        actions: u32,
    }

    const FIRST: Has = Has { pid: 1, parent: 0, session: None, contexts: [0, 1], memory: 0, actions: 0 };

    /// A tree that has come about by chance: processes made, sharing or not, sessions begun, contexts left, other programs
    /// executed, ends, of which orphans come to the root. Tells whether there were orphans, or children made for others, or
    /// somebody has left memory that is shared.
    fn by_chance(mut seed: u64) -> (Vec<Has>, bool) {
        let mut next = move |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % below
        };
        let mut all = vec![FIRST];
        let (mut fresh, mut orphans) = (2, false);
        for pid in 2..2 + 4 + next(20) as u32 {
            let who = next(all.len() as u64) as usize;
            match next(12) {
                0 if who > 0 => all[who].session = Some(all[who].pid),
                10 => {
                    orphans |= all.iter().filter(|p| p.memory == all[who].memory).count() > 1;
                    (all[who].memory, all[who].actions) = (fresh, fresh);
                    fresh += 1;
                }
                1 | 2 => {
                    all[who].contexts[next(2) as usize] = fresh;
                    fresh += 1;
                }
                3 if who > 0 => {
                    orphans |= all.iter().skip(1).any(|p| p.parent == who);
                    all.remove(who);
                    for other in all.iter_mut().skip(1) {
                        other.parent = match other.parent.cmp(&who) {
                            std::cmp::Ordering::Less => other.parent,
                            std::cmp::Ordering::Equal => 0,
                            std::cmp::Ordering::Greater => other.parent - 1,
                        };
                    }
                }
                _ => {
                    let mut child = Has { pid, parent: who, ..all[who] };
                    for context in 0..2 {
                        if next(2) == 0 {
                            child.contexts[context] = fresh;
                            fresh += 1;
                        }
                    }
                    let shares = next(6);
                    if shares > 0 {
                        child.actions = fresh;
                    }
                    if shares > 1 {
                        child.memory = fresh;
                    }
                    fresh += 1;
                    if who > 0 && next(6) == 0 {
                        child.parent = all[who].parent; // CLONE_PARENT
                        orphans = true;
                    }
                    all.push(child);
                }
            }
        }
        (all, orphans)
    }

    fn described(all: &[Has]) -> Image {
        let first = |row: usize, context: usize| {
            all.iter().position(|other| other.contexts[context] == all[row].contexts[context])
        };
        let first_of = |of: fn(&Has) -> u32, row: usize| all.iter().position(|p| of(p) == of(&all[row]));
        let process = |(row, has): (usize, &Has)| Process {
            space: first_of(|p| p.memory, row).unwrap_or(row) as u32,
            shares_actions: first_of(|p| p.actions, row).filter(|&first| first != row).map(|f| f as u32),
            pid: has.pid,
            parent: (row > 0).then_some(has.parent as u32),
            session: has.session,
            table: first(row, 0).unwrap_or(row) as u32,
            shares_fs: first(row, 1).filter(|&first| first != row).map(|first| first as u32),
            ..Process::default()
        };
        Image { processes: all.iter().enumerate().map(process).collect(), ..Image::default() }
    }

    /// Does what the steps say.
    fn replayed(image: &Image, steps: &[Vec<Step>]) -> Vec<Has> {
        let mut all: Vec<Option<Has>> = vec![None; image.processes.len()];
        all[0] = Some(Has { pid: image.processes[0].pid, ..FIRST });
        let mut fresh = 2;
        for row in 0..all.len() {
            let mut stand_ins = HashSet::new();
            for step in &steps[row] {
                let own = all[row].as_mut().expect("its parent has made it");
                match *step {
                    Step::BeginSession => own.session = Some(own.pid),
                    Step::JoinGroup => unreachable!("there are no namespaces"),
                    Step::Leave(context) => {
                        own.contexts[usize::from(context == Context::FileSystem)] = fresh;
                        fresh += 1;
                    }
                    Step::StandIn { session, .. } => assert!(stand_ins.insert(session)),
                    Step::Bear { child: Child::Living(child), shares, memory, sibling, by } => {
                        let parent = if sibling { own.parent } else { row };
                        assert!(row > 0 || !sibling, "nobody is a sibling of the root");
                        let mut born = Has { pid: image.processes[child].pid, parent, ..*own };
                        if memory != Memory::SharedWithActions {
                            born.actions = fresh;
                        }
                        if memory == Memory::Copied {
                            born.memory = fresh;
                        }
                        fresh += 1;
                        for context in (0..2).filter(|&c| !shares[c]) {
                            born.contexts[context] = fresh;
                            fresh += 1;
                        }
                        if let Some(session) = by {
                            assert!(stand_ins.contains(&session) && shares == [false; 2]);
                            assert!(memory == Memory::Copied && !sibling);
                            born.session = Some(session);
                        }
                        assert!(all[child].replace(born).is_none());
                    }
                    Step::Bear { .. } => unreachable!("nobody has ended"),
                }
            }
        }
        all.into_iter().map(|has| has.expect("all are made")).collect()
    }

    #[test]
    fn what_came_about_comes_about_again() {
        let (mut made, mut refused) = (0, 0);
        for seed in 0..20_000 {
            let (mut all, orphans) = by_chance(seed);
            // Rows stand behind their parents'.
            let mut order: Vec<usize> = vec![0];
            let mut at = 0;
            while at < order.len() {
                let parent = order[at];
                order.extend((1..all.len()).filter(|&row| all[row].parent == parent));
                at += 1;
            }
            let place = |row: usize| order.iter().position(|&o| o == row).expect("all are there");
            all = order.iter().map(|&row| Has { parent: place(all[row].parent), ..all[row] }).collect();
            let image = described(&all);
            let Ok(steps) = steps(&image) else {
                refused += 1;
                assert!(orphans, "seed {seed}: {all:?}");
                continue;
            };
            made += 1;
            assert_eq!(described(&replayed(&image, &steps)), image, "seed {seed}: {steps:?}");
        }
        println!("{made} made, {refused} refused");
        assert!(made > refused * 5);
    }

    #[test]
    fn memory_is_that_of_a_parent_or_a_sibling() {
        let with = |row, memory, sibling| Step::Bear {
            child: Child::Living(row),
            shares: [false; 2],
            memory,
            sibling,
            by: None,
        };
        let family = || image(&[(1, None, None), (2, Some(0), None), (3, Some(0), None), (4, Some(1), None)]);
        let shared = |rows: &[usize]| {
            let mut image = family();
            rows.iter().for_each(|&row| image.processes[row].space = rows[0] as u32);
            image
        };
        let all = steps(&shared(&[0, 1, 2, 3])).expect("there is a way");
        let [first, second, third] = [1, 2, 3].map(|row| with(row, Memory::Shared, false));
        assert_eq!(all, [vec![first, second], vec![third], vec![], vec![]]);
        let siblings = steps(&shared(&[1, 2])).expect("there is a way");
        assert_eq!(siblings, [vec![bear(1)], vec![with(2, Memory::Shared, true), bear(3)], vec![], vec![]]);

        let mut actions = shared(&[1, 2, 3]);
        actions.processes[2].shares_actions = Some(1);
        let found = steps(&actions).expect("there is a way");
        assert_eq!(found[1], [with(2, Memory::SharedWithActions, true), third]);
        actions.processes[3].shares_actions = Some(1);
        actions.processes[2].shares_actions = None;
        let found = steps(&actions).expect("there is a way");
        assert_eq!(found[1], [with(2, Memory::Shared, true), with(3, Memory::SharedWithActions, false)]);
        // 3 and 4 share actions that their common ancestor has not.
        (actions.processes[2].shares_actions, actions.processes[3].shares_actions) = (None, Some(2));
        assert_eq!(steps(&actions), Err(NotInherited { row: 0, what: Inherited::Actions }));

        // 2 has executed another program since it made 4.
        let memory = |row| Err(NotInherited { row, what: Inherited::Memory });
        assert_eq!(steps(&shared(&[0, 3])), memory(0));
        assert_eq!(steps(&shared(&[2, 3])), memory(0));
        let mut signals = shared(&[1, 2]);
        signals.processes[2].exit_signal = Some(0);
        assert_eq!(steps(&signals), memory(0), "the one that makes it sends another signal");
    }

    /// Processes as [`image`] makes them, each in the pid namespace of this row, with these ids there. Each namespace lies in the one
    /// before it.
    fn in_namespaces(
        namespaces: u32,
        rows: &[(u32, Option<u32>, Option<u32>)],
        inside: &[(usize, u32, &[u32])],
    ) -> Image {
        let mut image = image(rows);
        let parents = (0..namespaces).map(|row| row.checked_sub(1));
        image.namespaces = parents.map(|parent| Namespace::Pid { parent }).collect();
        for process in &mut image.processes {
            process.threads = vec![Thread { tid: process.pid, ..Thread::default() }];
        }
        for &(row, namespace, inner) in inside {
            image.processes[row].namespaces = vec![namespace];
            image.processes[row].threads[0].inner = inner.to_vec();
        }
        image
    }

    #[test]
    fn process_1_comes_first() {
        // Who is inside is older than process 1 is among the rows, and would be made before the root begins its session.
        let rows = [(10, None, Some(10)), (11, Some(0), Some(11)), (12, Some(0), Some(10))];
        let mut image = in_namespaces(1, &rows, &[(1, 0, &[2]), (2, 0, &[1])]);
        image.processes.iter_mut().for_each(|p| p.group = p.session);
        assert_eq!(steps(&image).expect("there is a way")[0], [Step::BeginSession, bear(2), bear(1)]);
        // It is made by a cousin who comes later.
        let rows = [
            (10, None, None),
            (11, Some(0), None),
            (12, Some(0), None),
            (13, Some(1), None),
            (14, Some(2), None),
        ];
        let inside: [(usize, u32, &[u32]); 2] = [(3, 0, &[2]), (4, 0, &[1])];
        let failed = NotInherited { row: 1, what: Inherited::Namespace };
        assert_eq!(steps(&in_namespaces(1, &rows, &inside)), Err(failed));
        let inside: [(usize, u32, &[u32]); 2] = [(3, 0, &[1]), (4, 0, &[2])];
        assert!(steps(&in_namespaces(1, &rows, &inside)).is_ok());
        // From within nobody can be made outside.
        let rows = [(10, None, None), (11, Some(0), None), (12, Some(1), None)];
        assert!(steps(&in_namespaces(1, &rows, &[(1, 0, &[1])])).is_err());
        // Two namespaces at once; then without the one between.
        assert!(steps(&in_namespaces(2, &rows, &[(1, 0, &[1]), (2, 1, &[2, 1])])).is_ok());
        assert!(steps(&in_namespaces(2, &rows, &[(2, 1, &[2, 1])])).is_err());
    }

    #[test]
    fn groups_without_a_name_are_inherited() {
        let rows = [
            (10, None, None),
            (11, Some(0), None),
            (12, Some(0), None),
            (13, Some(2), None),
            (14, Some(3), None),
        ];
        let inside: [(usize, u32, &[u32]); 2] = [(3, 0, &[1]), (4, 0, &[2])];
        let mut image = in_namespaces(1, &rows, &inside);
        for (row, group) in [(1, 11), (2, 11), (3, 11), (4, 11)] {
            image.processes[row].group = Some(group);
        }
        let all = steps(&image).expect("there is a way");
        assert_eq!(groups_from_birth(&image), BTreeSet::from([11]));
        assert_eq!(all[2], [Step::JoinGroup, bear(3)]);
        assert_eq!(all[3], [bear(4)], "it was born in it");
        // One that its parent is not in, or that has lost its leader, it cannot be born in.
        image.processes[2].group = Some(12);
        assert_eq!(steps(&image), Err(NotInherited { row: 2, what: Inherited::Group }));
        for row in 1..5 {
            image.processes[row].group = Some(9);
        }
        assert_eq!(steps(&image), Err(NotInherited { row: 2, what: Inherited::Group }));
        // Its own it joins by itself.
        image.processes[1].group = None;
        image.processes[2].group = None;
        image.processes[3].group = Some(13);
        image.processes[4].group = Some(13);
        assert!(steps(&image).is_ok());
    }

    #[test]
    fn contexts_are_inherited_or_left() {
        let family = || image(&[(1, None, None), (2, Some(0), None), (3, Some(0), None), (4, Some(1), None)]);
        let mut all = family();
        for process in &mut all.processes {
            process.table = 0;
            process.shares_fs = (process.pid > 1).then_some(0);
        }
        let both = |row| sharing(row, true, true);
        assert_eq!(
            steps(&all).expect("there is a way"),
            [vec![both(1), both(2)], vec![both(3)], vec![], vec![]]
        );

        let mut siblings = family();
        siblings.processes[2].table = 1;
        let made = [sharing(1, true, false), sharing(2, true, false), Step::Leave(Context::Files)];
        assert_eq!(steps(&siblings).expect("there is a way")[0], made);

        let mut skipped = family(); // 1 and 4 share what 2 has left
        skipped.processes[3].shares_fs = Some(0);
        let made = steps(&skipped).expect("there is a way");
        assert_eq!(made[0], [sharing(1, false, true), bear(2)]);
        assert_eq!(made[1], [sharing(3, false, true), Step::Leave(Context::FileSystem)]);

        let mut crossed = image(&[
            (1, None, None),
            (2, Some(0), None),
            (3, Some(0), None),
            (4, Some(1), None),
            (5, Some(1), None),
            (6, Some(2), None),
            (7, Some(2), None),
        ]);
        (crossed.processes[3].table, crossed.processes[5].table) = (10, 10);
        assert!(steps(&crossed).is_ok());
        (crossed.processes[4].table, crossed.processes[6].table) = (11, 11);
        assert_eq!(steps(&crossed), Err(NotInherited { row: 2, what: Inherited::Files }));
    }
}
