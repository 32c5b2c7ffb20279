//! Threads with a current directory, root and umask of their own (`unshare(CLONE_FS)`).

use super::target::Seen;
use crate::inspect::link;
use crate::{Builder, Result};
use stillpoint_image::{Directories, Thread, Usage};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::sharing::{Shared, shared};

/// Notes the directories of those threads of a frozen process that have some apart from the main thread's.
pub fn of_threads(
    builder: &mut Builder,
    process: &Proc,
    seen: &[Seen],
    threads: &mut [Thread],
) -> Result<()> {
    let mut first: Vec<(u32, usize)> = Vec::new();
    for (place, seen) in seen.iter().enumerate().skip(1) {
        let tid = seen.tid;
        if !builder.apart.contains(&(process.pid(), tid)) || shared(process.pid(), tid, Shared::FileSystem)? {
            continue;
        }
        let mut same = None;
        for &(other, place) in &first {
            if shared(other, tid, Shared::FileSystem)? {
                same =
                    threads[place].directories.map(|d| Directories { shares: Some(threads[place].tid), ..d });
            }
        }
        if same.is_none() {
            first.push((tid, place));
            same = Some(of_thread(builder, &process.sibling(tid)?, seen)?);
        }
        threads[place].directories = same;
    }
    Ok(())
}

fn of_thread(builder: &mut Builder, folder: &Proc, seen: &Seen) -> Result<Directories> {
    let (cwd, root) =
        (link(builder, folder, "cwd", Usage::Path)?, link(builder, folder, "root", Usage::Path)?);
    if builder.image.paths.get(cwd as usize).is_some_and(|path| path.deleted) {
        let why = "its current directory has been removed, and is not that of the main thread";
        builder.refuse(format!("thread {}", seen.tid), why, "");
    }
    Ok(Directories { cwd, root, umask: seen.look.status.umask.unwrap_or(0o022), shares: None })
}
