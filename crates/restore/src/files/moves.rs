//! Bringing descriptors to their numbers: a parallel move in which sources and destinations may overlap.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A descriptor to be put in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Where the description is now.
    pub source: u32,
    /// Number it gets; each number is wanted once.
    pub number: u32,
    /// Whether it closes on exec.
    pub close_on_exec: bool,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// `dup3(from, to, …)`.
    Duplicate {
        /// Source.
        from: u32,
        /// Destination; whatever was there is closed.
        to: u32,
        /// `O_CLOEXEC`.
        close_on_exec: bool,
    },
    /// `fcntl(number, F_SETFD, …)`: it is in place already.
    Mark {
        /// The descriptor.
        number: u32,
        /// `FD_CLOEXEC`.
        close_on_exec: bool,
    },
}

/// Steps that put all descriptors in place, none of which overwrites a source that is still needed.
///
/// 1. A number that no pending move reads from can be overwritten: do so. That may free the number it came from.
/// 2. What then is left are cycles, in which every number is read exactly once: park one of them at a number that
///    is neither source nor destination, and go on with 1.
pub fn plan(wanted: &[Wanted]) -> Vec<Step> {
    let mut steps = Vec::with_capacity(wanted.len() + 1);
    let mut pending: BTreeMap<u32, Wanted> = BTreeMap::new();
    let mut readers: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for w in wanted {
        if w.source == w.number {
            steps.push(Step::Mark { number: w.number, close_on_exec: w.close_on_exec });
        } else {
            pending.insert(w.number, *w);
            readers.entry(w.source).or_default().insert(w.number);
        }
    }
    let is_free = |number: &u32, readers: &BTreeMap<u32, BTreeSet<u32>>| {
        readers.get(number).is_none_or(|r| r.is_empty())
    };
    let mut free: VecDeque<u32> = pending.keys().copied().filter(|n| is_free(n, &readers)).collect();
    let spare = spare(wanted);
    while !pending.is_empty() {
        while let Some(number) = free.pop_front() {
            let Some(w) = pending.remove(&number) else { continue };
            steps.push(Step::Duplicate { from: w.source, to: number, close_on_exec: w.close_on_exec });
            if let Some(rest) = readers.get_mut(&w.source) {
                rest.remove(&number);
            }
            if is_free(&w.source, &readers) && pending.contains_key(&w.source) {
                free.push_back(w.source);
            }
        }
        let Some(&stuck) = pending.keys().next() else { break };
        steps.push(Step::Duplicate { from: stuck, to: spare, close_on_exec: true });
        for number in readers.remove(&stuck).unwrap_or_default() {
            if let Some(w) = pending.get_mut(&number) {
                w.source = spare;
            }
            readers.entry(spare).or_default().insert(number);
        }
        free.push_back(stuck);
    }
    steps
}

/// The lowest number that is neither source nor destination.
fn spare(wanted: &[Wanted]) -> u32 {
    let used: BTreeSet<u32> = wanted.iter().flat_map(|w| [w.source, w.number]).collect();
    (0..).find(|n| !used.contains(n)).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// The kernel's table: number to (what, close on exec).
    fn run(steps: &[Step], table: &mut HashMap<u32, (u32, bool)>) {
        for step in steps {
            match *step {
                Step::Duplicate { from, to, close_on_exec } => {
                    assert_ne!(from, to, "dup3 refuses that");
                    let what = table[&from].0;
                    table.insert(to, (what, close_on_exec));
                }
                Step::Mark { number, close_on_exec } => {
                    table.get_mut(&number).expect("is open").1 = close_on_exec;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_description_gets_to_its_number(
            moves in proptest::collection::btree_map(0u32..24, (0u32..24, any::<bool>()), 0..24)
        ) {
            let wanted: Vec<Wanted> = moves
                .iter()
                .map(|(&number, &(source, close_on_exec))| Wanted { source, number, close_on_exec })
                .collect();
            // Description n is at number n to begin with.
            let mut table: HashMap<u32, (u32, bool)> = (0..24).map(|n| (n, (n, true))).collect();
            let steps = plan(&wanted);
            run(&steps, &mut table);
            for w in &wanted {
                prop_assert_eq!(table[&w.number], (w.source, w.close_on_exec));
            }
            prop_assert!(steps.len() <= wanted.len() + wanted.len() / 2);
        }
    }

    #[test]
    fn a_swap_goes_through_a_spare_number() {
        let swap = [(3, 4), (4, 3)].map(|(source, number)| Wanted { source, number, close_on_exec: false });
        assert_eq!(plan(&swap).len(), 3);
    }
}
