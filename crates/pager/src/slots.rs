//! The slots of the working segment: which are free, and the checksums of the others.

use crate::Result;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_linux::shared::SharedWords;
use stillpoint_store::Working;

/// Most slots: 256 GiB.
const MOST: usize = 1 << 26;
/// The segment grows by so many slots at a time, or by a part of what it has …
const GROWS: u64 = 4096;
/// … which is one in so many.
const PART: u64 = 8;
/// Where the segment cannot grow, it is looked for free slots again after so long.
const LOOKS: Duration = Duration::from_millis(200);

/// What is known of slots in memory that outlives each process that serves: how many there are, then their checksums.
#[derive(Debug)]
pub struct Sums(SharedWords);

impl Sums {
    /// Of no slots.
    pub fn new() -> Result<Self> {
        Ok(Sums(SharedWords::new(1 + MOST)?))
    }

    fn count(&self) -> &AtomicU64 {
        &self.0[0]
    }

    /// The checksum of a slot's contents.
    pub fn get(&self, slot: u64) -> u32 {
        self.0[1 + slot as usize].load(Ordering::Acquire) as u32
    }

    /// Notes the checksum of what is about to be written to a slot of which nobody knows anything.
    pub fn set(&self, slot: u64, sum: u32) {
        self.0[1 + slot as usize].store(sum.into(), Ordering::Release);
    }
}

/// Which slots are free.
#[derive(Debug)]
pub struct Slots<'a> {
    working: &'a Working,
    sums: &'a Sums,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A bit for each slot: something may know of it.
    used: Vec<u64>,
    /// A bit for each slot: a manifest may point to it.
    permanent: Vec<u64>,
    free: u64,
    /// Where free ones are looked for next.
    next: u64,
    /// Slots that became used since it was found out which are not.
    since: u64,
    /// When that was.
    looked: Option<Instant>,
}

fn is_set(bits: &[u64], n: u64) -> bool {
    bits.get((n / 64) as usize).is_some_and(|word| word >> (n % 64) & 1 != 0)
}

fn set(bits: &mut Vec<u64>, n: u64, on: bool) {
    let word = (n / 64) as usize;
    if bits.len() <= word {
        bits.resize(word + 1, 0);
    }
    let bit = 1 << (n % 64);
    bits[word] = if on { bits[word] | bit } else { bits[word] & !bit };
}

impl<'a> Slots<'a> {
    /// All are taken for used, until it is found out which are not.
    pub fn new(working: &'a Working, sums: &'a Sums) -> Self {
        let slots = Slots { working, sums, state: Mutex::default() };
        let count = sums.count().load(Ordering::Acquire);
        {
            let mut state = slots.state();
            state.used = vec![u64::MAX; count.div_ceil(64) as usize];
            state.permanent = state.used.clone();
            state.since = count;
        }
        slots
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many slots there are.
    pub fn count(&self) -> u64 {
        self.sums.count().load(Ordering::Acquire)
    }

    /// Sees to it that so many are free. `known` tells all slots that the table knows, with what keeps that as it is.
    ///
    /// # Errors
    /// That there is no room for more.
    pub fn make_room<K>(&self, slots: u64, known: impl Fn() -> (Vec<u64>, K)) -> Result<()> {
        if self.state().free >= slots {
            return Ok(());
        }
        // It is worth to find out what is not used any more before the segment grows.
        let is_due = {
            let state = self.state();
            state.since >= (self.count() / PART).max(GROWS / 2)
        };
        if is_due {
            self.find_free(&known)?;
        }
        while self.state().free < slots {
            match self.grow(slots) {
                // Checkpoints may have been removed since, for the very reason that there is no room.
                Err(e) if e.is_full() && self.may_look() => {
                    self.find_free(&known)?;
                    if self.state().free < slots {
                        return Err(e);
                    }
                }
                grown => grown?,
            }
        }
        Ok(())
    }

    /// Whether it is long enough since it was looked for free ones.
    fn may_look(&self) -> bool {
        self.state().looked.is_none_or(|at| at.elapsed() >= LOOKS)
    }

    /// Finds out which are free, unless a checkpoint is being written.
    fn find_free<K>(&self, known: &impl Fn() -> (Vec<u64>, K)) -> Result<()> {
        self.state().looked = Some(Instant::now());
        let Some(permanent) = self.working.permanent()? else { return Ok(()) };
        let count = self.count();
        let (known, _kept) = known();
        let mut state = self.state();
        (state.used, state.permanent) = (Vec::new(), Vec::new());
        for slot in permanent {
            set(&mut state.permanent, slot, true);
            set(&mut state.used, slot, true);
        }
        known.into_iter().for_each(|slot| set(&mut state.used, slot, true));
        let used: u64 = state.used.iter().map(|word| u64::from(word.count_ones())).sum();
        (state.free, state.since) = (count.saturating_sub(used), 0);
        Ok(())
    }

    /// Adds slots to the segment: many, or so few if there is no room for more.
    fn grow(&self, slots: u64) -> Result<()> {
        let count = self.count();
        let more = (count / PART).clamp(GROWS, 16 * GROWS);
        if count + more > MOST as u64 {
            return Err(crate::Error::Failed("more is paged out than there may be slots".into()));
        }
        let reserved = self.working.reserve(count, count + more).map(|()| more);
        let more = match reserved {
            Err(e) if e.is_full() => self.working.reserve(count, count + slots).map(|()| slots)?,
            other => other?,
        };
        self.sums.count().store(count + more, Ordering::Release);
        self.state().free += more;
        Ok(())
    }

    /// Takes free ones, for which there is room: runs of them, first and how many.
    pub fn take(&self, slots: u64) -> Vec<(u64, u64)> {
        let count = self.count();
        let mut state = self.state();
        let (mut runs, mut left, mut seen): (Vec<(u64, u64)>, u64, u64) = (Vec::new(), slots, 0);
        while left > 0 && seen < 2 * count {
            let slot = state.next % count.max(1);
            (state.next, seen) = (slot + 1, seen + 1);
            if is_set(&state.used, slot) {
                continue;
            }
            set(&mut state.used, slot, true);
            left -= 1;
            match runs.last_mut().filter(|(first, len)| first + len == slot) {
                Some((_, len)) => *len += 1,
                None => runs.push((slot, 1)),
            }
        }
        state.free = state.free.saturating_sub(slots - left);
        state.since += slots - left;
        runs
    }

    /// Nobody knows these any more, but perhaps a manifest.
    pub fn give_back(&self, slots: &[u64]) {
        let mut state = self.state();
        for &slot in slots {
            if is_set(&state.used, slot) && !is_set(&state.permanent, slot) {
                set(&mut state.used, slot, false);
                state.free += 1;
            }
        }
    }

    /// A manifest may point to these from now on.
    pub fn make_permanent(&self, slots: impl Iterator<Item = u64>) {
        let mut state = self.state();
        slots.for_each(|slot| set(&mut state.permanent, slot, true));
    }
}
