//! Memory whose checkpoints never delay a real-time writer: every store is doubled into a mirror, a checkpoint detaches it.
//!
//! After Cunei and Vitek, "A New Approach to Real-Time Checkpointing", VEE 2006. The switch is one store to an offset instead
//! of a remapping, and any number of threads may write: `docs/mirror.md` has the protocol and why it holds.
//!
//! ```
//! use stillpoint_mirror::{Mirror, Options, store};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mirror = Mirror::create(&Options { size: 1 << 20, ..Options::default() })?;
//! let counter = mirror.put(0u64).ok_or("no room")?;
//! // SAFETY: a block of the region's allocator.
//! unsafe { store(counter, 1) };
//! let number = mirror.checkpoint()?; // returns at once
//! mirror.wait(number)?;
//! # Ok(())
//! # }
//! ```

mod backing;
mod barrier;
mod capi;
mod cycle;
mod error;
mod heap;
mod layout;
mod mirror;
mod ring;
mod threads;
mod words;

pub use backing::Checkpoint;
pub use barrier::{change, store, written};
pub use cycle::{Completed, Phase, Stats, Switch, Times};
pub use error::Error;
pub use heap::Heap;
pub use mirror::{Mirror, Options, PageSize, Place};
pub use words::{compare_exchange, copy, fetch_update, fill, replace};
