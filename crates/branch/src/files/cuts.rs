//! Bringing files back to what they were at a snapshot, where nothing has happened to them but that they grew.
//!
//! 1. All reasons against it are found before anything is changed ([`Plan::make`]).
//! 2. What is to be cut off is kept ([`Plan::keep`]). Whatever fails until then, nothing has happened.
//! 3. When the program is what it was, and before any of it can run, the files are cut ([`Plan::bring_back`]). What fails then is told:
//!    the file is as `--files keep` leaves it.

use super::changes::{Changed, Difference, Fate, differences};
use super::seen::{Seen, Stamp};
use super::{Digests, Files, Holder, noticed};
use crate::Result;
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use stillpoint_capture::Refusal;
use stillpoint_capture::files::Noticed;
use stillpoint_image::Range;
use stillpoint_linux::Error as Kernel;
use stillpoint_restore::FilesPolicy;
use stillpoint_restore::files::{Inode, KeepTail, Writer, keep_behind, shorten, writers};

/// What becomes of files in a rollback.
#[derive(Debug, Default)]
pub struct Plan {
    /// Files that are not as they were.
    pub changed: Vec<Changed>,
    /// Why the rollback is not to be done.
    pub refused: Vec<Refusal>,
    returns: Vec<Return>,
}

/// A file that is brought back.
#[derive(Debug)]
struct Return {
    /// Its place among those that have changed.
    place: usize,
    file: File,
    path: PathBuf,
    before: u64,
    then: Stamp,
    /// What was where it could be written through mappings.
    kept: Vec<(Range, Vec<u8>)>,
    /// It, when it was back.
    back: Option<Seen>,
}

impl Plan {
    /// For processes at rest; `ending`: processes that the rollback ends.
    ///
    /// # Errors
    /// That a file cannot be looked at.
    pub fn make(then: &Files, holders: &[Holder<'_>], ending: &[u32], policy: FilesPolicy) -> Result<Self> {
        let all = differences(then, holders, Files::most_to_be_read(policy != FilesPolicy::Keep))?;
        let mut plan = Plan::default();
        match policy {
            FilesPolicy::Keep => {}
            FilesPolicy::Refuse => {
                plan.refused.extend(all.iter().map(|one| refusal(&one.changed, &one.changed.told())));
            }
            FilesPolicy::Rollback => {
                let pids: Vec<u32> = holders.iter().map(|h| h.pid).chain(ending.iter().copied()).collect();
                return plan.with_returns(all, &pids, &noticed(holders));
            }
        }
        plan.changed.extend(all.into_iter().map(|one| one.changed));
        Ok(plan)
    }

    fn with_returns(mut self, all: Vec<Difference<'_>>, own: &[u32], noticed: &Noticed) -> Result<Self> {
        let inode = |one: &Difference<'_>| one.now.as_ref().map(|now| now.seen.identity.inode);
        let wanted: HashSet<Inode> = all.iter().filter(|one| one.can_come_back).filter_map(inode).collect();
        let others: HashMap<Inode, Writer> = writers(&wanted, false, own);
        for (place, mut one) in all.into_iter().enumerate() {
            let writer = inode(&one).filter(|_| one.can_come_back).and_then(|inode| others.get(&inode));
            match writer {
                Some(writer) => one.changed.fate = Fate::IsLeft(writer.to_string()),
                None => match Return::of(place, &one, noticed) {
                    Ok(back) => self.returns.push(back),
                    Err(why) => {
                        let why = format!("{}, {why}", one.changed.told());
                        self.refused.push(refusal(&one.changed, &why));
                    }
                },
            }
            self.changed.push(one.changed);
        }
        Ok(self)
    }

    /// Has everything kept that is to be cut off.
    ///
    /// # Errors
    /// That this cannot be done; no file has been changed.
    pub fn keep(&mut self, keep: &mut KeepTail<'_>) -> Result<()> {
        for back in &mut self.returns {
            back.before = keep_behind(&back.file, &back.path, back.then.size, keep)?;
        }
        Ok(())
    }

    /// Brings them back.
    pub fn bring_back(&mut self) {
        for back in &mut self.returns {
            let done = back.bring();
            back.back = done.is_ok().then(|| Seen::of(&back.file).ok()).flatten();
            if let Some(changed) = self.changed.get_mut(back.place) {
                changed.fate = done.map_or_else(|e| Fate::IsLeft(e.to_string()), |()| Fate::Back);
            }
        }
    }

    /// Notes at the snapshot that what is back is what it was, though it has other times.
    pub fn note(&self, then: &mut Files, digests: &mut Digests) {
        for seen in self.returns.iter().filter_map(|back| back.back) {
            let noted = then.all.iter_mut().find(|noted| noted.file.seen.identity == seen.identity);
            noted.into_iter().for_each(|noted| digests.note_return(noted, seen));
        }
    }
}

fn refusal(changed: &Changed, why: &str) -> Refusal {
    let hint = "--files keep leaves it as it is".to_owned();
    Refusal { what: changed.file.clone(), why: why.to_owned(), hint }
}

impl Return {
    /// Of a file that has changed, or why not.
    fn of(place: usize, one: &Difference<'_>, noticed: &Noticed) -> Result<Self, String> {
        let (Some(was), Some(is), true) = (one.then, &one.now, one.can_come_back) else {
            return Err("and cannot be brought back".into());
        };
        if noticed.is(&was.file.path(), was.file.seen.identity.inode) {
            return Err("and the program watches it, and would see that somebody else opens it".into());
        }
        let opened = OpenOptions::new().read(true).write(true).open(&is.way);
        let file = opened.map_err(|e| format!("and cannot be opened for writing: {e}"))?;
        Ok(Return {
            place,
            file,
            path: PathBuf::from(&one.changed.file),
            before: is.seen.stamp.size,
            then: was.file.seen.stamp,
            kept: was.kept.clone().unwrap_or_default(),
            back: None,
        })
    }

    fn bring(&self) -> Result<()> {
        for (range, bytes) in &self.kept {
            self.file.write_all_at(bytes, range.start).map_err(|e| Kernel::file(&self.path, e))?;
        }
        Ok(shorten(&self.file, &self.path, (self.before, self.then.size), self.then.mtime_ns)?)
    }
}
