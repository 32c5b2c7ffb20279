//! A checkpoint as one file that travels: through a pipe, to another machine, into another store.
//!
//! ```text
//! header                          64 bytes: magic, version, how much there is of what
//! description, page map           as in a manifest; pages are told by their place in the stream
//! file, contents … (any number)   what a portable checkpoint brings along: executable, libraries, other mapped files
//! pages …                         memory
//! end                             number of blocks, BLAKE3 of everything in front of it
//! ```
//!
//! All behind the header is in blocks of at most 1 MiB, each with a header of its own. [`export`] and [`Import`] go through
//! it once, from front to back, in memory that does not grow with it; blocks are compressed one by one, on all
//! processors. A checksum is compared before anything is decoded, a length before anything is allocated, and nothing
//! shows in the store before the end has been read. `docs/format.md` tells the bytes.
#![forbid(unsafe_code)]

mod codec;
mod error;
mod export;
mod frame;
mod import;
mod layout;
mod order;

pub use codec::Compression;
pub use error::{Error, Result};
pub use export::{Companion, Exported, export, make_portable};
pub use import::{Import, Imported};

/// Hears how far it is.
pub trait Progress: Sync {
    /// There are so many bytes of memory and files to come.
    fn start(&self, total_bytes: u64);

    /// So many more have been written or read.
    fn advance(&self, bytes: u64);
}

impl Progress for () {
    fn start(&self, _: u64) {}
    fn advance(&self, _: u64) {}
}
