//! Where checkpoints live: segments, manifests, commit, verify, prune.
//!
//! ```text
//! STORE/jobs/JOB/segments/ID.pages     page data, written once with direct I/O
//! STORE/jobs/JOB/segments/ID.pin       locked while the job's memory is paged to that segment
//! STORE/jobs/JOB/segments/spare        a file to be written anew as the next segment; more of them are ID.spare
//! STORE/jobs/JOB/checkpoints/ID        manifest: description of the program and page map; its rename commits
//! STORE/jobs/JOB/tails/                cut tails of files, kept until the whole job is removed
//! STORE/jobs/JOB/owes-room             room of removed checkpoints is given back later, by who has it locked
//! STORE/jobs/JOB/running               who runs the job now
//! STORE/jobs/JOB/terms                 on which terms it runs, until somebody sees its end
//! STORE/jobs/JOB/pace                  how often its checkpoints pay, and why
//! STORE/jobs/JOB/trouble               what is wrong with its periodic checkpoints, if anything is
//! STORE/jobs/JOB/history                what became of the job, for people: no part of any commit
//! STORE/jobs/JOB/control               socket of whoever takes its checkpoints
//! STORE/branches/tails/                cut tails of files, of programs that went back to a snapshot in memory
//! STORE/files/DIGEST/NAME              copies of files that portable checkpoints bring along
//! ```
//!
//! A checkpoint is visible once its manifest has its name, and by then everything it points to is durable; a crash, a
//! full or a failing disk at any point leaves the earlier checkpoints whole. Every byte read back is checked against a
//! checksum before it is used. `docs/format.md` tells the bytes, the order of commits, and what is assumed of the
//! medium.
//!
//! Who may do what at the same time is settled by two `flock`s of each job:
//!
//! * `writer.lock` is held exclusively by whoever adds or removes anything: a [`Writer`] from [`Store::begin`] to its
//!   end, [`Store::remove`], [`Store::prune`]. When it can be taken, no writer lives and leftovers are leftovers.
//! * `reader.lock` is shared by a [`Store::load`] while it reads the manifest and opens the segments, and exclusive
//!   while segments are deleted. A loaded checkpoint holds its segments open, and the kernel keeps a file for as long as anyone
//!   has it open; and it holds a shared `flock` of each, so that none is written anew meanwhile.
#![forbid(unsafe_code)]

mod alike;
mod buffer;
mod codec;
mod copies;
mod error;
mod folder;
mod heat;
pub mod history;
mod layers;
mod ledger;
mod lock;
mod medium;
mod name;
mod parallel;
mod pipeline;
mod reader;
mod record;
mod rewrite;
mod rolling;
mod running;
mod segment;
mod spare;
mod store;
mod sweep;
mod tails;
mod terms;
mod touch;
mod verify;
mod working;
mod writer;

pub use alike::Hint;
pub use copies::{Copies, Copy, content_digest};
pub use error::{Error, PutError, Result};
pub use heat::Area;
#[doc(hidden)]
pub use medium::{Change, Fault, Op};
pub use name::check_name;
pub use parallel::Source;
pub use pipeline::Fill;
pub use reader::{Checkpoint, Reader, page_sums};
pub use rolling::Rolling;
pub use running::{Claim, Pace, Paged, Paging, Running, Trouble};
pub use store::{Store, Summary};
pub use sweep::Freed;
pub use tails::Tail;
pub use terms::{Every, Terms};
pub use touch::{Sources, TouchSet};
pub use verify::Report;
pub use working::{Pinned, Working};
pub use writer::{Committed, Writer, Zeros};
