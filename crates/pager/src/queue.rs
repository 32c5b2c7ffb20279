//! What leaves memory first: S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, *FIFO Queues are All You Need for Cache Eviction*, SOSP
//! 2023), over units of [`UNIT`] pages.
//!
//! What is new goes to a small queue, a tenth of all. Whoever leaves that without having been used again is taken out, and
//! remembered as a ghost for as long as as many others as there are in memory have followed it. What comes back while it is
//! remembered goes to the main queue, from which it is taken out in turn.
//!
//! Which pages in memory are used a pager is not told. What counts as use is that a unit is asked for: that it has come back, or that
//! another page of it has.

use std::collections::{HashMap, HashSet, VecDeque};

/// Pages of a unit.
pub const UNIT: u64 = 16;
/// The small queue has one part in so many of all.
const SMALL: usize = 10;
/// Units that are used more often count as used so often.
const MOST: u8 = 3;

/// Which queue a unit is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Small,
    Main,
}

/// The queues. Units are known by number: their address divided by their length.
#[derive(Debug, Default)]
pub struct Queues {
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghosts: VecDeque<u64>,
    is_ghost: HashSet<u64>,
    /// Those that are in memory, where, and how often they were used since.
    known: HashMap<u64, (Place, u8)>,
}

impl Queues {
    /// How many units are in memory.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// A unit is in memory, or some of it; if it was before, it has been used.
    pub fn admit(&mut self, unit: u64) {
        if let Some((_, uses)) = self.known.get_mut(&unit) {
            *uses = (*uses + 1).min(MOST);
            return;
        }
        let place = if self.is_ghost.remove(&unit) { Place::Main } else { Place::Small };
        self.known.insert(unit, (place, 0));
        self.queue(place).push_back(unit);
    }

    /// A unit is in memory, as far as it is known at all: that says nothing of its use.
    pub fn discover(&mut self, unit: u64) {
        if !self.known.contains_key(&unit) {
            self.admit(unit);
        }
    }

    /// A unit that was to be taken out stays.
    pub fn keep(&mut self, unit: u64) {
        self.known.insert(unit, (Place::Main, 0));
        self.main.push_back(unit);
    }

    /// The unit that is to be taken out next, which is not known any more.
    pub fn take(&mut self) -> Option<u64> {
        loop {
            let is_small_due = self.small.len() * SMALL >= self.known.len() || self.main.is_empty();
            let place = if is_small_due && !self.small.is_empty() { Place::Small } else { Place::Main };
            let unit = self.queue(place).pop_front()?;
            let uses = self.known.get(&unit).map_or(0, |(_, uses)| *uses);
            match (place, uses) {
                (Place::Small, 2..) => {
                    self.known.insert(unit, (Place::Main, 0));
                    self.main.push_back(unit);
                }
                (Place::Main, 1..) => {
                    self.known.insert(unit, (Place::Main, uses - 1));
                    self.main.push_back(unit);
                }
                _ => {
                    self.known.remove(&unit);
                    if place == Place::Small {
                        self.remember(unit);
                    }
                    return Some(unit);
                }
            }
        }
    }

    fn remember(&mut self, unit: u64) {
        if self.is_ghost.insert(unit) {
            self.ghosts.push_back(unit);
        }
        while self.ghosts.len() > self.known.len().max(SMALL) {
            let oldest = self.ghosts.pop_front();
            oldest.iter().for_each(|unit| _ = self.is_ghost.remove(unit));
        }
    }

    fn queue(&mut self, place: Place) -> &mut VecDeque<u64> {
        match place {
            Place::Small => &mut self.small,
            Place::Main => &mut self.main,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Units that have to be brought in for these uses, with room for so many.
    fn misses(uses: impl Iterator<Item = u64>, room: usize) -> usize {
        let (mut queues, mut misses) = (Queues::default(), 0);
        for unit in uses {
            if queues.known.contains_key(&unit) {
                continue; // nobody tells
            }
            misses += 1;
            while queues.len() >= room {
                queues.take();
            }
            queues.admit(unit);
        }
        misses
    }

    #[test]
    fn what_is_used_once_does_not_drive_out_the_rest() {
        let hot = || (0..50).chain(0..50);
        let uses = (0..200u64).flat_map(|round| hot().chain(1000 * (round + 1)..1000 * (round + 1) + 20));
        let missed = misses(uses, 100);
        assert!(missed < 200 * 20 + 1000, "{missed}");
    }

    proptest! {
        /// Whatever is admitted is taken out once, and nothing else is.
        #[test]
        fn none_is_lost(steps in prop::collection::vec((0u64..40, 0u8..4), 0..300)) {
            let (mut queues, mut model) = (Queues::default(), HashSet::new());
            for (unit, step) in steps {
                match step {
                    0 => {
                        let taken = queues.take();
                        prop_assert_eq!(taken.is_none(), model.is_empty());
                        taken.iter().for_each(|unit| assert!(model.remove(unit)));
                    }
                    1 if !model.contains(&unit) => {
                        queues.keep(unit);
                        model.insert(unit);
                    }
                    2 => {
                        queues.discover(unit);
                        model.insert(unit);
                    }
                    _ => {
                        queues.admit(unit);
                        model.insert(unit);
                    }
                }
                prop_assert_eq!(queues.len(), model.len());
            }
            while let Some(unit) = queues.take() {
                prop_assert!(model.remove(&unit));
            }
            prop_assert!(model.is_empty());
        }
    }
}
