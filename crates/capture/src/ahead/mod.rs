//! Shared memory that is copied while the program runs, and of which the cut copies only what was written since.
//!
//! Every process that has an object mapped is followed: Linux notes the first write to a page of shared memory as it does for
//! private memory, in each process by itself, and a page that one of them has written counts as written. That tells all
//! writes to an object only if those processes are all that can write it. So an object is copied in the cut, whole, unless
//!
//! * it has no name, and nobody has a descriptor of it: it is written through mappings alone;
//! * the same processes have the same mappings of it as when they began to be followed, and all of those still are;
//! * nobody has dropped pages of it, or made a second mapping of one of these (`madvise`, `mremap`): whoever does waits until we
//!   have heard of it;
//! * no process of the tree has got a child, or lost one, which might have written through what it inherited (page faults of one
//!   that has ended are added to its parent's when that waits for it; until then it is among the parent's children);
//! * if it is a System V segment, nobody has attached or detached it.

mod followers;
mod objects;

use crate::attributes::target::has_ended;
use crate::brief::stop_briefly;
use crate::engine::tracking::{open_inside, writes_unnoticed};
use crate::engine::{AtRest, Log};
use crate::files::memory::data_ranges;
use crate::freeze::Frozen;
use crate::work::Member;
use crate::{Builder, Progress, Result};
use followers::{Follower, Looking, Watch};
use objects::{Key, Mapping, Object, mappings_by_row, objects};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use stillpoint_image::{FileKind, Owner, PAGE, Range, SignalAction};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::proc::Vma;
use stillpoint_linux::userfault::Mode;
use stillpoint_store::Writer;

/// Rounds of copying before a cut.
const ROUNDS: usize = 5;
/// So few written pages are left for the cut, bytes, that another round would not be worth it.
const FEW: u64 = 256 << 10;

/// Objects that are copied ahead. When it is dropped, nothing of it stays behind.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    objects: BTreeMap<Key, Object>,
    followers: HashMap<u32, Follower>,
    /// A look since the program came to rest.
    resting: Option<Looking>,
    /// Dropped after those.
    watch: Option<Watch>,
    /// Where a look may have taken marks that were not ours: see [`Ahead::taken`].
    taken: Vec<(u32, Range)>,
    /// Page faults of children that have ended, of all processes.
    child_faults: HashMap<u32, u64>,
    /// Children that had ended when following began, and were not waited for: they have written nothing since.
    unburied: HashSet<u32>,
}

impl Ahead {
    /// Begins to follow the processes that share memory worth it, and copies it. What cannot be followed is left to the cut, and
    /// all of it if that fails.
    pub fn begin(
        &mut self,
        members: &mut [Member],
        builder: &Builder,
        writer: &mut Writer,
        progress: &(dyn Progress + Sync),
        log: &mut Log,
    ) -> Result<()> {
        for member in members.iter() {
            // Before its mappings are listed: a child that it has by then and that ends counts.
            let stat = member.target.process.stat()?;
            self.child_faults.insert(member.target.pid, stat.child_faults);
            let children = member.target.process.children()?;
            self.unburied.extend(children.into_iter().filter(|child| has_ended(*child)));
        }
        for (number, (key, mappings)) in (0..).zip(objects(members, builder)?) {
            if let Some(object) = Object::open(members, key, mappings, number)? {
                self.objects.insert(key, object);
            }
        }
        if self.objects.is_empty() {
            return Ok(());
        }
        for member in members.iter_mut() {
            self.open(member, log)?;
        }
        let all = self.followers.iter().map(|(pid, follower)| (*pid, follower.userfault.clone())).collect();
        self.watch = Some(Watch::begin(all)?);
        for member in members.iter_mut() {
            let followed = self.follow(member, log);
            self.check(member.target.pid);
            if !followed? {
                self.followers.remove(&member.target.pid);
            }
        }
        let followers = &self.followers;
        self.objects.retain(|_, object| object.mappings.iter().all(|m| followers.contains_key(&m.pid)));
        for object in self.objects.values_mut().filter(|o| o.is_followed) {
            object.data = data_ranges(&object.source)?;
            object.left.clone_from(&object.data);
        }
        progress.start(self.left());
        self.rounds(writer, progress, log)
    }

    /// Leaves all to the cut.
    pub fn give_up(&mut self) {
        self.objects.values_mut().for_each(|object| object.is_followed = false);
    }

    /// Makes what follows a process, if it has any of these objects.
    fn open(&mut self, member: &mut Member, log: &mut Log) -> Result<()> {
        let pid = member.target.pid;
        if !self.objects.values().any(|o| o.is_of(pid)) || writes_unnoticed(pid)? {
            return Ok(());
        }
        let target = member.target.clone();
        let open = |frozen: &mut Frozen| open_inside(&target, frozen, Mode::Told);
        let (userfault, pause) = stop_briefly(&target, &mut member.earlier, open)?;
        log.pauses.push(pause);
        let userfault = Arc::new(userfault);
        self.followers.insert(pid, Follower { target, userfault, followed: Vec::new() });
        Ok(())
    }

    /// Follows what a process has of these objects; false if that cannot be. Mappings are listed and registered within one stop: one that
    /// grows in between would be registered in part, and the program could not move it as one any more.
    fn follow(&mut self, member: &mut Member, log: &mut Log) -> Result<bool> {
        let target = member.target.clone();
        let Some(follower) = self.followers.get_mut(&target.pid) else { return Ok(false) };
        let mut spans = Vec::new();
        let register = |_: &mut Frozen| {
            let maps = target.process.maps()?;
            for (key, object) in &self.objects {
                for mapping in object.mappings.iter().filter(|m| m.pid == target.pid) {
                    let (start, end) = (RemoteAddr(mapping.start), RemoteAddr(mapping.end));
                    if !is_there(&maps, mapping, *key) || follower.userfault.register(start, end).is_err() {
                        return Ok(false);
                    }
                    spans.push(mapping.span());
                }
            }
            Ok(true)
        };
        let (registered, pause) = stop_briefly(&target, &mut member.earlier, register)?;
        log.pauses.push(pause);
        follower.followed.extend(&spans);
        for span in spans {
            if follower.written(span, true)?.is_none() {
                return Ok(false);
            }
        }
        Ok(registered)
    }

    /// Copies until little is left.
    pub fn rounds(
        &mut self,
        writer: &mut Writer,
        progress: &(dyn Progress + Sync),
        log: &mut Log,
    ) -> Result<()> {
        let mut before = u64::MAX;
        for _ in 0..ROUNDS {
            let left = self.left();
            if left == 0 {
                break;
            }
            log.tell(format!("copied {} pages of shared memory while it ran", left / PAGE));
            for object in self.objects.values_mut() {
                object.copy(writer, progress)?;
            }
            self.look()?;
            if left <= FEW || left > before / 4 * 3 {
                break;
            }
            before = left;
        }
        Ok(())
    }

    /// A last round before the cut.
    pub fn converge(
        &mut self,
        writer: &mut Writer,
        progress: &(dyn Progress + Sync),
        log: &mut Log,
    ) -> Result<()> {
        self.look()?;
        self.rounds(writer, progress, log)?;
        // More than the last round found will hardly be left.
        let room = 2 * self.left().max(FEW);
        self.objects.values_mut().for_each(|object| object.copied.reserve(room));
        Ok(())
    }

    /// What is to be copied, bytes.
    fn left(&self) -> u64 {
        self.objects.values().flat_map(|o| &o.left).map(|r| r.len).sum()
    }

    /// Adds what was written since the last look, and begins a new one.
    fn look(&mut self) -> Result<()> {
        let looking = self.looking(true);
        looking.work(&self.followers);
        self.add(looking);
        let pids: Vec<u32> = self.followers.keys().copied().collect();
        pids.into_iter().for_each(|pid| self.check(pid));
        // Looked at after pages were protected and before they are copied: see there.
        for (pid, _) in self.followers.iter().filter(|(pid, _)| writes_unnoticed(**pid).unwrap_or(true)) {
            self.objects.values_mut().filter(|o| o.is_of(*pid)).for_each(|o| o.is_followed = false);
        }
        Ok(())
    }

    /// Makes sure, after a look at what a process has mapped, that it still has it there. If something else is there by now, which
    /// is followed by whoever saves it, the look has protected that.
    fn check(&mut self, pid: u32) {
        let Some(follower) = self.followers.get(&pid) else { return };
        let maps = follower.target.process.maps().unwrap_or_default();
        for (key, object) in &mut self.objects {
            for mapping in object.mappings.iter().filter(|m| m.pid == pid) {
                if !is_there(&maps, mapping, *key) {
                    object.is_followed = false;
                    self.taken.push((pid, mapping.span()));
                }
            }
        }
    }

    /// Where in processes a look has protected what was not shared memory any more: who follows that would not find what was
    /// written there before.
    pub fn taken(&mut self) -> Vec<(u32, Range)> {
        std::mem::take(&mut self.taken)
    }

    /// A look at all that is followed.
    fn looking(&self, protect: bool) -> Looking {
        let followed = self.objects.values().filter(|o| o.is_followed);
        Looking::new(followed.flat_map(|o| o.mappings.iter().copied()).collect(), protect)
    }

    /// Adds what a look has found.
    fn add(&mut self, looking: Looking) {
        for (mapping, written) in looking.end() {
            for object in self.objects.values_mut().filter(|o| o.mappings.contains(&mapping)) {
                let Some(written) = &written else {
                    object.is_followed = false;
                    continue;
                };
                let inside =
                    |r: &Range| Range { start: r.start - mapping.start + mapping.offset, len: r.len };
                object.left.extend(written.iter().map(inside));
            }
        }
        for object in self.objects.values_mut() {
            if !object.is_followed {
                object.left.clear();
            }
            object.left = Range::joined(std::mem::take(&mut object.left));
            object.data = Range::joined([object.data.as_slice(), &object.left].concat());
        }
    }

    /// The program has just come to rest: looks for what was written, while all else is described.
    pub fn rest(&mut self) -> Option<AtRest<'_>> {
        if self.objects.values().all(|object| !object.is_followed) {
            return None;
        }
        let looking = self.looking(false);
        let (looking, followers) = (&*self.resting.insert(looking), &self.followers);
        Some(Box::new(|| {
            looking.work(followers);
            Ok(())
        }))
    }

    /// The program stands still and is described: copies what was written last. From here on [`Ahead::has`] tells the objects of
    /// which nothing else need be copied. At most `most` bytes.
    pub fn cut(&mut self, builder: &Builder, members: &[Member], most: u64, log: &mut Log) -> Result<()> {
        self.objects.values_mut().for_each(|object| object.row = None);
        if self.objects.values().all(|object| !object.is_followed) {
            return Ok(());
        }
        if let Some(why) = self.children_may_have_written(builder, members)? {
            log.tell(format!("shared memory is copied in the cut: {why}"));
            return Ok(());
        }
        let looking = self.resting.take().unwrap_or_else(|| self.looking(false));
        looking.work(&self.followers);
        self.add(looking);
        let mappings = mappings_by_row(members, &builder.image);
        let disturbed = self.watch.as_ref().map(Watch::disturbed).unwrap_or_default();
        let opened = |row: u32| builder.image.files.iter().any(|f| f.kind == FileKind::Memory(row));
        for (key, object) in &mut self.objects {
            let Some(row) = builder.object_row(*key) else { continue };
            let why = match () {
                () if !object.is_followed => "not all who have it mapped are followed",
                () if mappings.get(&row) != Some(&object.mappings) => {
                    "others have it mapped now, or elsewhere"
                }
                () if opened(row) => "somebody has a descriptor of it",
                () if disturbed.iter().any(|pid| object.is_of(*pid)) => {
                    "somebody has dropped or moved pages of it"
                }
                () if object.changed_since(*key)? => "it has been resized, or attached elsewhere",
                () => "",
            };
            if !why.is_empty() {
                log.tell(format!("shared memory is copied in the cut: {why}"));
                continue;
            }
            log.tell(match object.copy_the_rest(row, most)? {
                Some(pages) => format!("the cut copied {pages} pages of shared memory"),
                None => "shared memory is copied in the cut: too much of it has been written".into(),
            });
        }
        Ok(())
    }

    /// Whether a child might have written through what it inherited, and has it no more.
    fn children_may_have_written(&self, builder: &Builder, members: &[Member]) -> Result<Option<String>> {
        for pid in self.child_faults.keys() {
            if !members.iter().any(|m| m.target.pid == *pid) {
                return Ok(Some(format!("process {pid} has ended")));
            }
        }
        for member in members {
            let pid = member.target.pid;
            // It may have been another program when it was made.
            let Some(before) = self.child_faults.get(&pid) else {
                return Ok(Some(format!("process {pid} is new")));
            };
            let described = member.target.described(&builder.image)?;
            // Nobody is told of the end of such children, and their page faults are not added.
            let ignores = |a: &SignalAction| {
                a.signal == libc::SIGCHLD as u32
                    && (a.handler == libc::SIG_IGN as u64 || a.flags & libc::SA_NOCLDWAIT as u64 != 0)
            };
            if described.actions.iter().any(ignores) {
                return Ok(Some(format!("process {pid} ignores the ends of its children")));
            }
            if member.target.process.stat()?.child_faults != *before {
                return Ok(Some(format!("a child of process {pid} has ended meanwhile")));
            }
            // Not waited for, it is in no count yet.
            let is_known =
                |child: &u32| self.unburied.contains(child) || members.iter().any(|m| m.target.pid == *child);
            if !described.ended().is_empty() && !member.target.process.children()?.iter().all(is_known) {
                return Ok(Some(format!("a child of process {pid} has ended, and was not waited for")));
            }
        }
        Ok(None)
    }

    /// Whether the cut need not copy an object.
    pub fn has(&self, owner: Owner) -> bool {
        self.objects.values().any(|o| o.row.is_some_and(|row| Owner::Object(row) == owner))
    }

    /// Brings what the cut copied to the store.
    pub fn put(&mut self, writer: &mut Writer) -> Result<()> {
        for object in self.objects.values_mut().filter(|o| o.row.is_some()) {
            object.put(writer)?;
        }
        Ok(())
    }

    /// Makes what was copied the contents of the objects that the cut has seen, and forgets the others.
    pub fn settle(&mut self, writer: &mut Writer) {
        for object in self.objects.values_mut() {
            match object.row.take() {
                Some(row) => {
                    let own = Owner::Object(row);
                    writer.give(object.owner, own);
                    writer.keep_only(own, std::mem::take(&mut object.data));
                }
                None => writer.keep_only(object.owner, Vec::new()),
            }
        }
    }
}

/// Whether a process still has a mapping of an object where it had it.
fn is_there(maps: &[Vma], mapping: &Mapping, (_, number): Key) -> bool {
    let place = (mapping.start, mapping.end, mapping.offset);
    maps.iter().any(|v| (v.start, v.end, v.offset) == place && v.shared && v.deleted && v.ino == number)
}
