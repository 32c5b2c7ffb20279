//! Attributes of processes and threads: what can be read from outside, what must be asked inside, and what makes a
//! process one that cannot be captured.
//!
//! | when | what |
//! | --- | --- |
//! | before the freeze | [`target::find`], [`target::examine`] |
//! | frozen | [`process::process`], [`process::space`], [`thread::thread`], [`thread::stopped`]: from outside |
//! | frozen | [`inside::ProcessQuery`], [`inside::ThreadQuery`]: programs to run in the target |
//! | frozen | [`hidden`]: what these ask, too, as nobody is told of it |
//! | frozen | [`expiries::add`]: what came between these |
//!
//! Not visible by any of these, and therefore neither captured nor refused: System V semaphore operations
//! to be undone (`SEM_UNDO`; [`semaphores`] refuses where there may be any), Landlock domains where the program may not look at us, session keyrings, speculation controls that `/proc/PID/status` does not name,
//! NUMA policies of threads, a default timer slack that differs from the current one, and whether two threads share
//! their I/O context (`CLONE_IO`).

pub mod directories;
pub mod expiries;
pub mod hidden;
pub mod inside;
pub mod process;
pub mod semaphores;
pub mod target;
pub mod thread;
