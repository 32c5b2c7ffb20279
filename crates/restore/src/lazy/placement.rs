//! Where pages of the checkpoint are by now: the program moves and unmaps its memory while they are still missing.

pub use stillpoint_linux::line::Piece;

/// All pieces of one address space. What is in none has been unmapped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Ascending by where they are now.
    by_now: Vec<Piece>,
    /// Ascending by where they were.
    by_then: Vec<Piece>,
}

impl Placement {
    /// Pieces that do not overlap.
    pub fn new(pieces: impl IntoIterator<Item = Piece>) -> Self {
        let mut placement = Placement { by_now: pieces.into_iter().collect(), by_then: Vec::new() };
        placement.settle();
        placement
    }

    /// The pieces.
    pub fn pieces(&self) -> &[Piece] {
        &self.by_now
    }

    fn settle(&mut self) {
        self.by_now.sort_unstable_by_key(|p| p.now);
        self.by_now.dedup_by(|next, last| {
            let goes_on = last.now_end() == next.now && last.then_end() == next.then;
            if goes_on {
                last.len += next.len;
            }
            goes_on
        });
        self.by_then.clone_from(&self.by_now);
        self.by_then.sort_unstable_by_key(|p| p.then);
    }

    /// Which address of the checkpoint is at this one now.
    pub fn then(&self, now: u64) -> Option<u64> {
        let piece = self.by_now.partition_point(|p| p.now <= now).checked_sub(1)?;
        self.by_now[piece].within(now, now + 1).map(|p| p.then)
    }

    /// Where the parts of `[from, to)` of the checkpoint are now.
    pub fn parts(&self, from: u64, to: u64) -> impl Iterator<Item = Piece> {
        let first = self.by_then.partition_point(|p| p.then_end() <= from);
        self.by_then[first..].iter().take_while(move |p| p.then < to).filter_map(move |p| {
            let (start, end) = (p.then.max(from), p.then_end().min(to));
            (start < end).then(|| Piece { then: start, now: p.now + (start - p.then), len: end - start })
        })
    }

    /// What of the checkpoint is within `[from, to)` now.
    pub fn inside(&self, from: u64, to: u64) -> Vec<Piece> {
        self.by_now.iter().filter_map(|p| p.within(from, to)).collect()
    }

    /// `[from, to)` has been unmapped.
    pub fn unmap(&mut self, from: u64, to: u64) {
        let all = std::mem::take(&mut self.by_now);
        self.by_now =
            all.iter().flat_map(|p| [p.within(0, from), p.within(to, u64::MAX)]).flatten().collect();
        self.settle();
    }

    /// What is within `len` bytes from `from` now has been moved to `to`.
    pub fn move_to(&mut self, from: u64, to: u64, len: u64) {
        let moved = self.inside(from, from + len);
        self.unmap(from, from + len);
        // Whatever was there has been unmapped, of which the kernel tells, but perhaps not in this order.
        self.unmap(to, to + len);
        self.by_now.extend(moved.into_iter().map(|p| Piece { now: to + (p.now - from), ..p }));
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against an array that says what is where.
        #[test]
        fn pieces_follow_their_memory(
            start in prop::collection::vec(any::<bool>(), 32),
            steps in prop::collection::vec((any::<bool>(), 0usize..60, 0usize..60, 1usize..12), 0..12),
        ) {
            let mut model = vec![None; 80];
            let mut pieces = Vec::new();
            for at in (0..32).filter(|&at| start[at]) {
                model[at] = Some(at as u64);
                pieces.push(Piece { then: at as u64, now: at as u64, len: 1 });
            }
            let mut placement = Placement::new(pieces);
            for (moves, from, to, len) in steps {
                if !moves || from.abs_diff(to) < len {
                    placement.unmap(from as u64, (from + len) as u64);
                    model[from..from + len].fill(None);
                } else {
                    placement.move_to(from as u64, to as u64, len as u64);
                    let moved = model[from..from + len].to_vec();
                    model[from..from + len].fill(None);
                    model[to..to + len].copy_from_slice(&moved);
                }
            }
            for (now, then) in model.iter().enumerate() {
                prop_assert_eq!(placement.then(now as u64), *then);
            }
            for then in 0..32u64 {
                let now: Vec<u64> = placement.parts(then, then + 1).map(|p| p.now).collect();
                let expected: Vec<u64> = (0..80).filter(|&at| model[at as usize] == Some(then)).collect();
                prop_assert_eq!(now, expected);
            }
            let parts: u64 = placement.parts(0, 32).map(|p| p.len).sum();
            prop_assert_eq!(parts, model.iter().flatten().count() as u64);
        }
    }
}
