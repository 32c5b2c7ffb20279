//! Giving back attributes of processes and threads, by programs to run inside the restored process and by calls on it
//! from outside.
//!
//! The order matters; each step says why. All signals stay blocked until the program's own masks are set at the end.
//!
//! | when | in the main thread | in each thread | from outside |
//! | --- | --- | --- | --- |
//! | before anything | | | [`outside::missing`] |
//! | before memory is built | [`process::early`] | | |
//! | memory and threads are there | [`process::layout`], [`process::settled`], [`process::Timers`] | [`thread::thread`] | [`outside::thread`] |
//! | at the very end | [`process::start_timers`], then [`last::program`] | [`last::program`] | [`outside::process`], [`last::verify`] |
//!
//! In the end phase, other threads go before the main thread. What is left to the caller: registers, signal masks,
//! [`last::late_signals`], and job control (`stopped`, `foreground`).
//!
//! Not given back, because no interface sets it: CPU time used so far; overrun counts of POSIX timers
//! (`timer_getoverrun` starts again at 0; an expiry that was pending keeps the count in its siginfo); `dumpable` 2,
//! which becomes 0, the stricter; the parent's exit signal.

pub mod credentials;
pub mod last;
pub mod outside;
pub mod process;
pub mod thread;
