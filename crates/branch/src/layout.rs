//! What has to be done to mappings, so that they are as they were.
//!
//! Both lists are cut at all their boundaries. A piece that is the same in both keeps its pages, of which those that have changed are
//! put back later; a piece that differs in more than its protection is unmapped and made anew, as is one that is missing.

use stillpoint_image::{Backing, Image, Mapping, MappingFlags, Range};

/// What has to be done, piece by piece, ascending.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// Unmapped first.
    pub unmap: Vec<Range>,
    /// Made then; without pages.
    pub map: Vec<Mapping>,
    /// Given another protection (`PROT_*`).
    pub protect: Vec<(Range, u32)>,
    /// What cannot be done: where, and why not.
    pub impossible: Vec<(Range, &'static str)>,
}

/// Sees to it that mappings that are `now` become those of `then`. What the main stack has grown by stays.
pub fn plan(then: &Image, now: &Image) -> Plan {
    let of = |image: &Image| image.spaces.first().map(|space| space.mappings.clone()).unwrap_or_default();
    let (wanted, present) = (of(then), of(now));
    let mut cuts: Vec<u64> = wanted.iter().chain(&present).flat_map(|m| [m.start, m.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut plan = Plan::default();
    let (mut w, mut p) = (wanted.iter().peekable(), present.iter().peekable());
    for two in cuts.windows(2) {
        let (start, end) = (two[0], two[1]);
        while w.next_if(|m| m.end <= start).is_some() {}
        while p.next_if(|m| m.end <= start).is_some() {}
        let at = |m: Option<&&Mapping>| m.filter(|m| m.start <= start).map(|m| piece(m, start, end));
        plan.add(then, now, at(w.peek().copied().as_ref()), at(p.peek().copied().as_ref()));
    }
    plan.join();
    plan
}

impl Plan {
    fn add(&mut self, then: &Image, now: &Image, wanted: Option<Mapping>, present: Option<Mapping>) {
        let range = |m: &Mapping| Range { start: m.start, len: m.len() };
        match (wanted, present) {
            (None, None) => {}
            // It grows by itself, and nobody asks it to shrink.
            (None, Some(present)) if present.flags.contains(MappingFlags::STACK) => {}
            (None, Some(present)) => match why_not_unmapped(&present) {
                Some(why) => self.impossible.push((range(&present), why)),
                None => self.unmap.push(range(&present)),
            },
            (Some(wanted), None) => match why_not_mapped(&wanted) {
                Some(why) => self.impossible.push((range(&wanted), why)),
                None => self.map.push(wanted),
            },
            (Some(wanted), Some(present)) => {
                if is_same(then, &wanted, now, &present) {
                    if wanted.prot != present.prot {
                        self.protect.push((range(&wanted), wanted.prot));
                    }
                    return;
                }
                match why_not_unmapped(&present).or_else(|| why_not_mapped(&wanted)) {
                    Some(why) => self.impossible.push((range(&wanted), why)),
                    None => {
                        self.unmap.push(range(&present));
                        self.map.push(wanted);
                    }
                }
            }
        }
    }

    /// Neighbours that are alike, as one.
    fn join(&mut self) {
        self.unmap = Range::joined(std::mem::take(&mut self.unmap));
        self.map.dedup_by(|next, last| {
            let goes_on =
                last.end == next.start && piece(next, next.start, next.end) == after(last, next.end);
            if goes_on {
                last.end = next.end;
            }
            goes_on
        });
        self.protect.dedup_by(|next, last| {
            let goes_on = last.0.end() == next.0.start && last.1 == next.1;
            if goes_on {
                last.0.len += next.0.len;
            }
            goes_on
        });
    }
}

/// What a mapping would be that goes on behind another one, up to `end`.
fn after(last: &Mapping, end: u64) -> Mapping {
    let whole = Mapping { end, ..last.clone() };
    piece(&whole, last.end, end)
}

/// A part of a mapping.
pub fn piece(mapping: &Mapping, start: u64, end: u64) -> Mapping {
    let further = start - mapping.start;
    let mut part = Mapping { start, end, ..mapping.clone() };
    match &mut part.backing {
        Backing::File { offset, .. }
        | Backing::Object { offset, .. }
        | Backing::Device { offset, .. }
        | Backing::Segment { offset, .. } => *offset += further,
        Backing::Anonymous | Backing::Special(_) => {}
    }
    part.guards = Range { start, len: end - start }.parts_of(&mapping.guards).collect();
    part
}

/// Flags that say how a mapping came about, or that the kernel changes by itself.
const SAID: MappingFlags = MappingFlags::ACCOUNTED.union(MappingFlags::HEAP).union(MappingFlags::STACK);

/// Whether two mappings of the same range, of two images, are the same but for their protection.
fn is_same(of_a: &Image, a: &Mapping, of_b: &Image, b: &Mapping) -> bool {
    let plain = |m: &Mapping| m.flags.difference(SAID);
    (a.shared, a.pkey, a.huge_page, plain(a), &a.guards)
        == (b.shared, b.pkey, b.huge_page, plain(b), &b.guards)
        && is_same_backing(of_a, &a.backing, of_b, &b.backing)
}

/// Objects have numbers that mean the same ones in both ([`crate::still::Objects`]).
fn is_same_backing(of_a: &Image, a: &Backing, of_b: &Image, b: &Backing) -> bool {
    let path =
        |image: &Image, row: u32| image.paths.get(row as usize).map(|p| (p.dev, p.ino, p.path.clone()));
    match (a, b) {
        (Backing::Anonymous, Backing::Anonymous) => true,
        (Backing::Special(a), Backing::Special(b)) => a == b,
        (
            Backing::File { path: a, offset: at_a, may_write: w_a },
            Backing::File { path: b, offset: at_b, may_write: w_b },
        ) => at_a == at_b && w_a == w_b && path(of_a, *a) == path(of_b, *b),
        (Backing::Device { path: a, offset: at_a }, Backing::Device { path: b, offset: at_b }) => {
            at_a == at_b && path(of_a, *a) == path(of_b, *b)
        }
        (
            Backing::Object { object: a, offset: at_a, .. }
            | Backing::Segment { object: a, offset: at_a, .. },
            Backing::Object { object: b, offset: at_b, .. }
            | Backing::Segment { object: b, offset: at_b, .. },
        ) => at_a == at_b && a == b,
        _ => false,
    }
}

fn why_not_mapped(mapping: &Mapping) -> Option<&'static str> {
    match &mapping.backing {
        Backing::Special(_) => Some("the kernel's own mapping has been unmapped or moved since"),
        Backing::Object { .. } | Backing::Segment { .. } => Some("shared memory has been unmapped since"),
        _ if mapping.pkey != 0 => Some("a mapping with a protection key has been unmapped or changed since"),
        _ if mapping.huge_page != 0 => Some("a mapping of huge pages has been unmapped since"),
        _ if mapping.flags.contains(MappingFlags::SEALED) => Some("it has been sealed then"),
        _ => None,
    }
}

fn why_not_unmapped(mapping: &Mapping) -> Option<&'static str> {
    match &mapping.backing {
        Backing::Special(_) => Some("the kernel's own mapping has been moved since"),
        _ if mapping.flags.contains(MappingFlags::SEALED) => Some("a mapping has been sealed since (mseal)"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use stillpoint_image::{AddressSpace, PAGE, PathFile};

    /// A page of a list of mappings: who is there, with which protection, at which offset.
    type Pages = BTreeMap<u64, (Backing, u32)>;

    fn image(pages: &[Option<(bool, u32)>]) -> Image {
        let mut mappings: Vec<Mapping> = Vec::new();
        for (start, page) in (0..).map(|n| n * PAGE).zip(pages) {
            let Some((file, prot)) = *page else { continue };
            let backing = match file {
                true => Backing::File { path: 0, offset: start, may_write: false },
                false => Backing::Anonymous,
            };
            let one = Mapping {
                start,
                end: start + PAGE,
                prot,
                shared: false,
                backing,
                flags: MappingFlags::empty(),
                pkey: 0,
                huge_page: 0,
                guards: Vec::new(),
                name: None,
            };
            match mappings.last_mut() {
                Some(last) if last.end == start && after(last, start + PAGE) == one => last.end += PAGE,
                _ => mappings.push(one),
            }
        }
        let spaces = vec![AddressSpace { mappings, ..AddressSpace::default() }];
        Image { spaces, paths: vec![PathFile::default()], ..Image::default() }
    }

    fn pages(mappings: &[Mapping]) -> Pages {
        let each = |m: &Mapping| {
            (m.start..m.end)
                .step_by(PAGE as usize)
                .map(|at| {
                    let one = piece(m, at, at + PAGE);
                    (at, (one.backing, one.prot))
                })
                .collect::<Vec<_>>()
        };
        mappings.iter().flat_map(each).collect()
    }

    proptest! {
        /// Done page by page, the plan makes one list of the other.
        #[test]
        fn the_plan_leads_back(
            then in prop::collection::vec(prop::option::of((any::<bool>(), 1u32..4)), 20),
            now in prop::collection::vec(prop::option::of((any::<bool>(), 1u32..4)), 20),
        ) {
            let (then, now) = (image(&then), image(&now));
            let plan = plan(&then, &now);
            prop_assert!(plan.impossible.is_empty());
            let mut result = pages(&now.spaces[0].mappings);
            for at in crate::history::addresses(&plan.unmap) {
                prop_assert!(result.remove(&at).is_some());
            }
            for (at, page) in pages(&plan.map) {
                prop_assert!(result.insert(at, page).is_none());
            }
            for (range, prot) in &plan.protect {
                crate::history::addresses(&[*range]).for_each(|at| result.get_mut(&at).expect("a page").1 = *prot);
            }
            prop_assert_eq!(result, pages(&then.spaces[0].mappings));
        }
    }
}
