//! What differs between processors: registers, signal frames, the code that runs programs of system calls.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("only x86-64 is supported so far");
