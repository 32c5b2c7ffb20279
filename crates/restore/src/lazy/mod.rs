//! Memory that comes while the program runs already.
//!
//! What the program is about to touch is there when it starts. Whoever touches another page waits until it has been put
//! in; all the others follow in a row. Everything in here is made so that there are never zeros instead of pages: it is
//! the kernel that makes the program wait, for as long as a descriptor is open, and that is held by several processes that
//! stand in for each other.

pub mod board;
pub mod claim;
mod cores;
pub mod keepers;
mod later;
pub mod placement;
pub mod plan;
mod rhythm;
mod server;
mod sums;
mod template;
pub mod turns;
mod wanted;
mod work;

pub use keepers::Parted;
pub(crate) use later::Later;
pub use later::{Coming, Pager};
pub use server::Served;
pub use template::{Place, Steward, Template, Waiting};
