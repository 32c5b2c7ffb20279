//! What private memory was at each snapshot of a program.
//!
//! Snapshots are the nodes of a tree. The program has gone on from one of them, the *current* one, whose pages can be had as
//! they are ([`History::read`]). Every other one keeps the pages in which it differs from its neighbour on the way to the current
//! one, so a page that two snapshots have in common is kept once, and what a snapshot costs is what changed since the one before.
//! To make another one the current one, the differences on the way there are turned round one after the other: versions of a
//! persistent array, as in Baker, "Shallow binding makes functional arrays fast" (SIGPLAN Notices 26:8, 1991).

use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_image::{PAGE, Range};

/// Names a snapshot of one program; never used again.
pub type Id = u64;

/// Contents of a page.
pub type Page = Box<[u8]>;

/// So much of the room that pages are read to is kept for the next ones, bytes.
const MOST_ROOM: usize = 4 << 20;

/// Where pages come from as they were at the first snapshot.
pub trait Origin {
    /// Reads ranges, one after the other, which were there at the first snapshot.
    fn read(&self, ranges: &[Range], buf: &mut [u8]) -> Result<()>;
}

/// What a snapshot knows of memory.
#[derive(Debug)]
struct Node {
    parent: Option<Id>,
    /// Its neighbour on the way to the current one; none if it is that.
    toward: Option<Id>,
    /// Pages that were the program's own, ascending. All others were as their mapping gives them by itself.
    own: Vec<Range>,
    /// Those of them that the neighbour has not, or has otherwise, by address; none where they were as at the first snapshot.
    pages: Kept,
}

/// Pages by address; none where they are the origin's.
type Kept = BTreeMap<u64, Option<Page>>;

/// All snapshots of a program.
#[derive(Debug)]
pub struct History<O> {
    origin: O,
    /// Pages of the current one that are not as they were at the first snapshot.
    changed: BTreeMap<u64, Page>,
    nodes: BTreeMap<Id, Node>,
    current: Id,
    /// Room to read pages to.
    room: Vec<u8>,
}

impl<O: Origin> History<O> {
    /// With one snapshot of this id, whose own pages are the origin's.
    pub fn new(origin: O, id: Id, own: Vec<Range>) -> Self {
        let first = Node { parent: None, toward: None, own, pages: BTreeMap::new() };
        History {
            origin,
            changed: BTreeMap::new(),
            nodes: [(id, first)].into(),
            current: id,
            room: Vec::new(),
        }
    }

    /// Where pages come from.
    pub fn origin_mut(&mut self) -> &mut O {
        &mut self.origin
    }

    /// The snapshot that the program has gone on from.
    pub fn current(&self) -> Id {
        self.current
    }

    /// Whether there is such a snapshot.
    pub fn has(&self, id: Id) -> bool {
        self.nodes.contains_key(&id)
    }

    /// Its ids, oldest first.
    pub fn ids(&self) -> impl Iterator<Item = Id> {
        self.nodes.keys().copied()
    }

    /// The snapshot that one was taken after.
    pub fn parent(&self, id: Id) -> Option<Id> {
        self.nodes.get(&id)?.parent
    }

    /// Own pages of a snapshot.
    pub fn own(&self, id: Id) -> &[Range] {
        self.nodes.get(&id).map_or(&[], |node| &node.own)
    }

    /// Notes a page that the origin has not.
    pub fn put(&mut self, address: u64, page: Page) {
        self.changed.insert(address, page);
    }

    /// Reads own pages of the current snapshot, range after range.
    pub fn read(&self, ranges: &[Range], buf: &mut [u8]) -> Result<()> {
        let mut missing: Vec<(Range, usize)> = Vec::new();
        let mut at = 0;
        for range in ranges {
            // Ranges are short; what changed may be much.
            for address in (range.start..range.end()).step_by(PAGE as usize) {
                match self.changed.get(&address) {
                    Some(page) => buf[at..at + PAGE as usize].copy_from_slice(page),
                    None => match missing.last_mut() {
                        Some((last, from)) if last.end() == address && *from + last.len as usize == at => {
                            last.len += PAGE;
                        }
                        _ => missing.push((Range { start: address, len: PAGE }, at)),
                    },
                }
                at += PAGE as usize;
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let ranges: Vec<Range> = missing.iter().map(|(range, _)| *range).collect();
        let mut read = vec![0; ranges.iter().map(|r| r.len as usize).sum()];
        self.origin.read(&ranges, &mut read)?;
        let mut from = 0;
        for (range, at) in missing {
            let len = range.len as usize;
            buf[at..at + len].copy_from_slice(&read[from..from + len]);
            from += len;
        }
        Ok(())
    }

    /// Notes a new snapshot, with a new id, which the program has come to from the current one: what is its own now, and of that what
    /// was written since, with contents as `read` gives them.
    pub fn advance(
        &mut self,
        id: Id,
        own: Vec<Range>,
        dirty: &[Range],
        read: impl FnOnce(&[Range], &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let parent = self.current;
        let before = self.own(parent).to_vec();
        // Also what came by going on from a snapshot that was forgotten.
        let dirty = &union(dirty, &Range::without(&own, &before));
        let len = dirty.iter().map(|r| r.len as usize).sum();
        let mut now = std::mem::take(&mut self.room);
        now.resize(len, 0);
        read(dirty, &mut now)?;
        let gone = Range::without(&before, &own);
        let differs = union(&parts(dirty, &before), &gone);
        let pages = self.take(&differs);
        for (page, address) in now.chunks_exact(PAGE as usize).zip(addresses(dirty)) {
            self.changed.insert(address, page.into());
        }
        let new = Node { parent: Some(parent), toward: None, own, pages: BTreeMap::new() };
        self.nodes.insert(id, new);
        self.turn(parent, id, pages);
        self.room = if len <= MOST_ROOM { now } else { Vec::new() };
        Ok(())
    }

    /// Makes a snapshot the current one. Returns where pages are in which it differs from the one before, as far as they are its
    /// own.
    pub fn go_to(&mut self, id: Id) -> Result<Vec<Range>> {
        let unknown = |id| Error::Failed(format!("there is no snapshot {id}"));
        let mut way = vec![id];
        while let Some(next) = self.nodes.get(&way[way.len() - 1]).ok_or_else(|| unknown(id))?.toward {
            way.push(next);
        }
        let mut touched: BTreeSet<u64> = BTreeSet::new();
        for step in way.windows(2).rev() {
            let (to, from) = (step[0], step[1]);
            let pages = std::mem::take(&mut self.nodes.get_mut(&to).ok_or_else(|| unknown(to))?.pages);
            let own = self.own(to).to_vec();
            let gone = Range::without(self.own(from), &own);
            let there: Vec<Range> = joined(pages.keys().copied());
            let differs = union(&parts(&there, self.own(from)), &gone);
            let kept = self.take(&differs);
            touched.extend(pages.keys());
            touched.extend(kept.keys());
            self.changed.extend(pages.into_iter().filter_map(|(address, page)| Some((address, page?))));
            self.turn(from, to, kept);
        }
        Ok(parts(&joined(touched.into_iter()), self.own(id)))
    }

    /// Forgets a snapshot. If it is the current one, another one is from now on: then it is told where pages are in which that
    /// differs. Nothing is left when the last one is forgotten.
    pub fn remove(&mut self, id: Id) -> Result<Vec<Range>> {
        let mut touched = Vec::new();
        if id == self.current {
            let parent = self.parent(id);
            let any =
                parent.or_else(|| self.nodes.iter().find(|(_, n)| n.toward == Some(id)).map(|(&i, _)| i));
            match any {
                Some(other) => touched = self.go_to(other)?,
                None => {
                    self.nodes.clear();
                    return Ok(touched);
                }
            }
        }
        let Some(gone) = self.nodes.remove(&id) else { return Ok(touched) };
        for node in self.nodes.values_mut() {
            if node.parent == Some(id) {
                node.parent = gone.parent;
            }
            if node.toward != Some(id) {
                continue;
            }
            node.toward = gone.toward;
            for (&address, page) in &gone.pages {
                if holds(&node.own, address) {
                    node.pages.entry(address).or_insert_with(|| page.clone());
                }
            }
        }
        Ok(touched)
    }

    /// The current one is `to`, no more `from`, which differs from it in these pages.
    fn turn(&mut self, from: Id, to: Id, pages: Kept) {
        if let Some(node) = self.nodes.get_mut(&from) {
            (node.toward, node.pages) = (Some(to), pages);
        }
        if let Some(node) = self.nodes.get_mut(&to) {
            node.toward = None;
        }
        self.current = to;
    }

    /// Pages of the current snapshot, which are not its own any more, or not as they were.
    fn take(&mut self, ranges: &[Range]) -> Kept {
        addresses(ranges).map(|address| (address, self.changed.remove(&address))).collect()
    }
}

/// Addresses of pages in ranges.
pub fn addresses(ranges: &[Range]) -> impl Iterator<Item = u64> {
    ranges.iter().flat_map(|range| (range.start..range.end()).step_by(PAGE as usize))
}

/// Ascending pages, as ranges.
fn joined(pages: impl Iterator<Item = u64>) -> Vec<Range> {
    let mut all: Vec<Range> = Vec::new();
    for address in pages {
        match all.last_mut() {
            Some(last) if last.end() == address => last.len += PAGE,
            _ => all.push(Range { start: address, len: PAGE }),
        }
    }
    all
}

/// What is in both; each ascends and is apart.
pub fn parts(ranges: &[Range], others: &[Range]) -> Vec<Range> {
    ranges.iter().flat_map(|range| range.parts_of(others)).collect()
}

/// What is in one of them.
pub fn union(a: &[Range], b: &[Range]) -> Vec<Range> {
    Range::joined([a, b].concat())
}

fn holds(ranges: &[Range], address: u64) -> bool {
    let first = ranges.partition_point(|range| range.end() <= address);
    ranges.get(first).is_some_and(|range| range.start <= address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Memory as a map, whole at each snapshot.
    type Memory = BTreeMap<u64, u8>;

    const PAGES: u64 = 12;

    struct First(Memory);

    impl Origin for First {
        fn read(&self, ranges: &[Range], buf: &mut [u8]) -> Result<()> {
            for (address, page) in addresses(ranges).zip(buf.chunks_exact_mut(PAGE as usize)) {
                page.fill(*self.0.get(&address).expect("a page of the first snapshot"));
            }
            Ok(())
        }
    }

    #[derive(Clone, Debug)]
    enum Act {
        Write(u64, u8),
        Drop(u64),
        Snapshot,
        GoBack(usize),
        Remove(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => (0..PAGES, any::<u8>()).prop_map(|(page, value)| Act::Write(page * PAGE, value)),
            2 => (0..PAGES).prop_map(|page| Act::Drop(page * PAGE)),
            3 => Just(Act::Snapshot),
            2 => any::<usize>().prop_map(Act::GoBack),
            1 => any::<usize>().prop_map(Act::Remove),
        ]
    }

    fn own(memory: &Memory) -> Vec<Range> {
        joined(memory.keys().copied())
    }

    fn all_of(history: &History<First>) -> Memory {
        let own = history.own(history.current()).to_vec();
        let mut bytes = vec![0; own.iter().map(|r| r.len as usize).sum()];
        history.read(&own, &mut bytes).expect("read");
        addresses(&own).zip(bytes.chunks_exact(PAGE as usize).map(|page| page[0])).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        /// Against whole copies of memory.
        #[test]
        fn every_snapshot_is_as_it_was(acts in prop::collection::vec(act(), 1..60)) {
            let mut now: Memory = (0..PAGES / 2).map(|page| (page * PAGE, page as u8)).collect();
            let mut history = History::new(First(now.clone()), 1, own(&now));
            let mut last = 1;
            let mut copies: BTreeMap<Id, Memory> = [(1, now.clone())].into();
            // What was written since the current one was, as whoever follows writes would tell.
            let mut dirty: BTreeSet<u64> = BTreeSet::new();
            for act in acts {
                match act {
                    Act::Write(page, value) => {
                        now.insert(page, value);
                        dirty.insert(page);
                    }
                    Act::Drop(page) => {
                        now.remove(&page);
                    }
                    Act::Snapshot => {
                        let written = joined(dirty.iter().copied().filter(|page| now.contains_key(page)));
                        let id = last + 1;
                        last = id;
                        history.advance(id, own(&now), &written, |ranges, buf| {
                            First(now.clone()).read(ranges, buf)
                        }).expect("advance");
                        copies.insert(id, now.clone());
                        dirty.clear();
                    }
                    Act::GoBack(which) => {
                        let id = *copies.keys().nth(which % copies.len()).expect("one");
                        let differs = history.go_to(id).expect("go back");
                        let wanted = &copies[&id];
                        let before = std::mem::take(&mut now);
                        // What a rollback does, page by page.
                        let own_then = history.own(id).to_vec();
                        let dropped = Range::without(&own_then, &own(&before));
                        let written: Vec<Range> = joined(dirty.iter().copied());
                        let all = union(&union(&differs, &dropped), &parts(&written, &own_then));
                        let mut bytes = vec![0; all.iter().map(|r| r.len as usize).sum()];
                        history.read(&all, &mut bytes).expect("read");
                        now = before.into_iter().filter(|(page, _)| holds(&own_then, *page)).collect();
                        now.extend(addresses(&all).zip(bytes.chunks_exact(PAGE as usize).map(|page| page[0])));
                        prop_assert_eq!(&now, wanted);
                        dirty.clear();
                    }
                    Act::Remove(which) if copies.len() > 1 => {
                        let id = *copies.keys().nth(which % copies.len()).expect("one");
                        let differs = history.remove(id).expect("remove");
                        dirty.extend(addresses(&differs));
                        copies.remove(&id);
                    }
                    Act::Remove(_) => {}
                }
                prop_assert_eq!(all_of(&history), copies[&history.current()].clone());
                prop_assert_eq!(history.ids().collect::<Vec<_>>(), copies.keys().copied().collect::<Vec<_>>());
            }
        }
    }
}
