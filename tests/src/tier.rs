//! How much the tests do: once each (`make test`), or as much as there is time for (`make soak`).
//!
//! What is left out of one run of `make test` is chosen by its seed: days of runs do all of it.

use crate::scratch::{Rng, run_seed};

/// Whether there is time for all.
pub fn soaks() -> bool {
    std::env::var_os("STILLPOINT_TIER").is_some_and(|tier| tier == "soak")
}

/// How often something is done: `once` in a test, `all` in a soak, and as often as the variable `name` says where it is set.
pub fn times(name: &str, once: u64, all: u64) -> u64 {
    let asked = std::env::var(name).ok().and_then(|value| value.parse().ok());
    asked.unwrap_or(if soaks() { all } else { once })
}

/// How large something is that a test computes: all of it in a soak. What it takes is mostly the machine's time, of which others
/// want some too.
pub fn size(all: u64) -> u64 {
    if soaks() { all } else { all * 2 / 5 }
}

/// What of `all` has its turn for `whom` in this run: all of it in a soak, else one, by the run's seed.
pub fn turn<T: Copy>(whom: &str, all: &[T]) -> Vec<T> {
    if soaks() || all.is_empty() {
        return all.to_vec();
    }
    vec![all[rotation(run_seed(), whom, all.len())]]
}

/// Whether it is the turn of `whom` for something that one in `so_many` does in a run, and all in a soak.
pub fn is_turn_of(whom: &str, so_many: usize) -> bool {
    soaks() || rotation(run_seed(), whom, so_many) == 0
}

/// Seeds that follow each other give one place after the other, and different tests begin at different ones.
fn rotation(seed: u64, whom: &str, places: usize) -> usize {
    let begins = whom.bytes().fold(0, |hash, byte| Rng::new(hash ^ u64::from(byte)).next_u64());
    (seed.wrapping_add(begins) % places as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::rotation;
    use std::collections::BTreeSet;

    #[test]
    fn all_have_their_turn() {
        for whom in ["a", "b", "descriptors::ptys"] {
            let places: BTreeSet<_> = (0..5).map(|seed| rotation(seed, whom, 5)).collect();
            assert_eq!(places.len(), 5, "{whom}");
        }
        let beginnings: BTreeSet<_> = ["a", "b", "c", "d"].map(|whom| rotation(7, whom, 5)).into();
        assert!(beginnings.len() > 1, "all tests have the same place");
    }
}
