//! `/proc/PID/task`: the threads of a process and the children of each.

use super::{Proc, text};
use crate::Result;
use rustix::fs::{RawDir, SeekFrom};
use std::mem::MaybeUninit;

impl Proc {
    /// Thread ids, ascending, the leader first; a leader that ended while others go on is among them.
    ///
    /// # Errors
    /// [`crate::Error::Gone`].
    pub fn threads(&self) -> Result<Vec<u32>> {
        let tid = |name: &[u8]| text::dec(name).and_then(|n| u32::try_from(n).ok());
        let mut tids: Vec<u32> = match self.tasks.get() {
            Some(folder) => {
                let error = |e| self.error("task", e);
                rustix::fs::seek(folder, SeekFrom::Start(0)).map_err(error)?;
                let mut room = [MaybeUninit::uninit(); 4096];
                let (mut entries, mut tids) = (RawDir::new(folder, &mut room), Vec::new());
                while let Some(entry) = entries.next() {
                    tids.extend(tid(entry.map_err(error)?.file_name().to_bytes()));
                }
                tids
            }
            None => {
                let folder = if self.is_thread() { ".." } else { "task" };
                self.list(folder)?.iter().filter_map(|name| tid(name)).collect()
            }
        };
        tids.sort_unstable_by_key(|&tid| (tid != self.pid, tid));
        // An ended process may still show an empty folder.
        if tids.is_empty() { Err(crate::Error::Gone(self.pid)) } else { Ok(tids) }
    }

    /// Child processes of all threads, ascending, zombies included.
    ///
    /// # Errors
    /// [`crate::Error::Gone`], or [`crate::Error::File`] on a kernel without `CONFIG_PROC_CHILDREN`.
    pub fn children(&self) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for tid in self.threads()? {
            match self.sibling(tid).and_then(|thread| thread.children_of_thread()) {
                Ok(children) => all.extend(children),
                // A thread that ends hands its children to another one, which a second look would find; callers that
                // must be sure look when the process is frozen.
                Err(crate::Error::Gone(_)) => {}
                Err(e) => return Err(e),
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Child processes that this thread made, or inherited from one that ended.
    ///
    /// # Errors
    /// As [`Proc::children`].
    pub fn children_of_thread(&self) -> Result<Vec<u32>> {
        let list = self.read("children")?;
        super::pids(&list).ok_or_else(|| self.nonsense("children", &list))
    }
}

/// Children of processes, and theirs, and so on, as far as they can be found while they run: none of the given ones.
pub fn descendants(of: &[u32]) -> Vec<u32> {
    let mut all = of.to_vec();
    let mut next = 0;
    while let Some(&pid) = all.get(next) {
        let children = Proc::process(pid).and_then(|p| p.children()).unwrap_or_default();
        let new: Vec<u32> = children.into_iter().filter(|child| !all.contains(child)).collect();
        all.extend(new);
        next += 1;
    }
    all.split_off(of.len())
}
