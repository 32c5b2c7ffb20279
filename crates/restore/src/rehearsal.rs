//! What can be known of a restore before there is one: a program is not killed at its checkpoint if it could not be had back.

use crate::rebuild::{check_privileges, has_room};
use crate::{Error, Result};
use stillpoint_image::Image;
use stillpoint_linux::probe;

/// Why whoever asks could not restore a program here: nothing if he could, as far as that is known by now. Nothing is changed.
pub fn rehearse(image: &Image) -> Vec<String> {
    let lines = |outcome: Result<()>| match outcome {
        Ok(()) => Vec::new(),
        Err(Error::Refused(lines)) => lines,
        Err(e) => vec![e.to_string()],
    };
    let may = |what: &str, tried: stillpoint_linux::Result<()>| match tried {
        Err(e) if matches!(e.errno(), Some(libc::EPERM | libc::EACCES)) => {
            Err(Error::Refused(vec![format!("{what} needs CAP_CHECKPOINT_RESTORE or root")]))
        }
        _ => Ok(()),
    };
    [
        may("making a process with its old id", probe::set_tid()),
        may("giving a process its executable", probe::set_executable()),
        check_privileges(image),
        has_room(image),
    ]
    .into_iter()
    .flat_map(lines)
    .collect()
}
