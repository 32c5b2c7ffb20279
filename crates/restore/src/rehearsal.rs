//! What can be known of a restore before there is one: a program is not killed at its checkpoint if it could not be had back.

use crate::files;
use crate::rebuild::{check_privileges, has_room};
use crate::{Error, Result};
use stillpoint_image::Image;
use stillpoint_linux::ptrace::{Seized, options};
use stillpoint_linux::{arch, probe, rootless, spawn};

/// Why whoever asks could not restore a program here: nothing if he could, as far as that is known by now. Nothing is changed.
/// `is_still`: the program does not run, and its files are as the image tells.
pub fn rehearse(image: &Image, is_still: bool) -> Vec<String> {
    let lines = |outcome: Result<()>| match outcome {
        Ok(()) => Vec::new(),
        Err(Error::Refused(lines)) => lines,
        Err(e) => vec![e.to_string()],
    };
    [
        makes_processes(),
        check_privileges(image),
        has_room(image),
        registers(image),
        files::rehearse(image, is_still),
    ]
    .into_iter()
    .flat_map(lines)
    .collect()
}

/// Whether a process can be made with its old id and executable.
fn makes_processes() -> Result<()> {
    if rootless::is_ordinary()? {
        return rootless::probe().map_err(|e| {
            let why = "an ordinary user restores in a user namespace of his own, which is not to be had";
            Error::Refused(vec![format!("{why}: {e} (stillpoint doctor tells more)")])
        });
    }
    let may = |what: &str, tried: stillpoint_linux::Result<()>| match tried {
        Err(e) if matches!(e.errno(), Some(libc::EPERM | libc::EACCES)) => {
            Some(format!("{what} needs CAP_CHECKPOINT_RESTORE or root"))
        }
        _ => None,
    };
    let against: Vec<String> = [
        may("making a process with its old id", probe::set_tid()),
        may("giving a process its executable", probe::set_executable()),
    ]
    .into_iter()
    .flatten()
    .collect();
    if against.is_empty() { Ok(()) } else { Err(Error::Refused(against)) }
}

/// Gives the registers of each thread to a process that is made for it.
fn registers(image: &Image) -> Result<()> {
    let shell = spawn::shell(&[], 0)?;
    let tried = match give_registers(image, shell.pid) {
        // A restore has the privilege in its user namespace.
        Err(Error::Kernel(e)) if e.errno() == Some(libc::EPERM) && rootless::is_kept_off()? => Ok(()),
        tried => tried,
    };
    let ended = spawn::tgkill(shell.pid, shell.pid, libc::SIGKILL);
    if ended.is_ok() {
        spawn::reap(shell.pid);
    }
    tried
}

fn give_registers(image: &Image, pid: u32) -> Result<()> {
    let seized = Seized::seize(pid, options::EXIT_KILL)?;
    seized.interrupt()?;
    let stopped = seized.wait()?.stopped(pid)?;
    // Those of tiles take room that a thread makes by itself.
    let threads = image.processes.iter().flat_map(|process| &process.threads);
    for thread in threads.filter(|thread| !arch::has_tiles(&thread.xstate.0)) {
        stopped.set_xstate(&thread.xstate.0).map_err(|e| {
            Error::Refused(vec![format!(
                "registers of thread {} ({}) cannot be put back: {e}",
                thread.tid, thread.name
            )])
        })?;
    }
    Ok(())
}
