//! Bringing files back to what they were at a snapshot, where nothing has happened to them but that they grew.
//!
//! 1. All reasons against it are found before anything is changed ([`Plan::make`]). Only if there is none files are opened for writing, as
//!    who watches them hears of that.
//! 2. A name may lead elsewhere by now, and others run on: what was opened must be the file that was compared, with the same size and times.
//! 3. What is to be cut off is kept ([`Plan::keep`]), and the same is asked once more: who opens a file, appends and closes it meanwhile is
//!    among no writers. Whatever fails until then, nothing has happened.
//! 4. When the program is what it was, and before any of it can run, the files are cut ([`Plan::bring_back`]). What fails then is told:
//!    the file is as `--files keep` leaves it.

use super::changes::{Changed, Difference, Fate, differences};
use super::seen::{Seen, Stamp};
use super::{Digests, Files, Holder, Kept, Noted, Systems, Writable, noticed};
use crate::{Error, Result};
use rustix::fs::OFlags;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stillpoint_capture::Refusal;
use stillpoint_capture::files::Noticed;
use stillpoint_image::Range;
use stillpoint_linux::Error as Kernel;
use stillpoint_restore::FilesPolicy;
use stillpoint_restore::files::{Inode, Writer, keep_behind, mapped, shorten, writers};

/// What can be done about a refusal.
const LEFT: &str = "--files keep leaves it as it is";
/// Why a file is not cut that others have changed just now.
const MEANWHILE: &str = "another program has just written to it, and what it wrote would be cut off";

/// Takes what stands behind an offset of a file, durably, before it is cut off; where it is then.
pub type Keep<'a> = dyn FnMut(&Path, u64, &mut dyn Read) -> stillpoint_restore::Result<PathBuf> + 'a;

/// What becomes of files in a rollback.
#[derive(Debug, Default)]
pub struct Plan {
    /// Files that are not as they were.
    pub changed: Vec<Changed>,
    /// Why the rollback is not to be done.
    pub refused: Vec<Refusal>,
    returns: Vec<Return>,
    /// What is back, as it was then.
    back: Vec<Seen>,
}

/// A file that is brought back.
#[derive(Debug)]
struct Return {
    /// Its place among those that have changed.
    place: usize,
    file: File,
    path: PathBuf,
    /// It, when it was compared.
    before: Seen,
    then: Stamp,
    /// What was where it could be written through mappings.
    kept: Arc<Kept>,
}

impl Plan {
    /// For processes at rest; `ending`: processes that the rollback ends.
    pub fn make(
        then: &Files,
        holders: &[Holder<'_>],
        ending: &[u32],
        systems: &Systems,
        policy: FilesPolicy,
    ) -> Self {
        let all = differences(then, holders, systems, Files::most_to_be_read(policy != FilesPolicy::Keep));
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
        plan
    }

    fn with_returns(mut self, all: Vec<Difference<'_>>, own: &[u32], noticed: &Noticed) -> Self {
        let inode = |one: &Difference<'_>| one.now.as_ref().map(|now| now.seen.identity.inode);
        let wanted: HashSet<Inode> = all.iter().filter(|one| one.can_come_back).filter_map(inode).collect();
        let mut others: HashMap<Inode, Writer> = mapped(&wanted, own);
        others.extend(writers(&wanted, false, own));
        let mut goals = Vec::new();
        for (place, mut one) in all.into_iter().enumerate() {
            let writer = inode(&one).filter(|_| one.can_come_back).and_then(|inode| others.get(&inode));
            match writer {
                Some(writer) => one.changed.fate = Fate::IsLeft(writer.to_string()),
                None => match Goal::of(&one, noticed) {
                    Ok(goal) => goals.push((place, goal)),
                    Err(why) => self.refuse(&one.changed, why),
                },
            }
            self.changed.push(one.changed);
        }
        if self.refused.is_empty() {
            for (place, goal) in goals {
                let Some(changed) = self.changed.get(place).cloned() else { continue };
                match goal.open(place) {
                    Ok(back) => self.returns.push(back),
                    Err(why) => self.refuse(&changed, &why),
                }
            }
        }
        self
    }

    fn refuse(&mut self, changed: &Changed, why: &str) {
        self.refused.push(refusal(changed, &format!("{}, {why}", changed.told())));
    }

    /// Has everything kept that is to be cut off.
    ///
    /// # Errors
    /// That this cannot be done; no file has been changed.
    pub fn keep(&mut self, keep: &mut Keep<'_>) -> Result<()> {
        for back in &self.returns {
            back.check()?;
            let mut tail = None;
            let mut note = |path: &Path, at: u64, source: &mut dyn Read| {
                tail = Some(keep(path, at, source)?);
                Ok(())
            };
            keep_behind(&back.file, &back.path, back.then.size, &mut note)?;
            if let Some(changed) = self.changed.get_mut(back.place) {
                changed.tail = tail;
            }
            back.check()?;
        }
        Ok(())
    }

    /// Brings them back. When the program runs nobody else has them open for writing any more.
    pub fn bring_back(&mut self) {
        for back in std::mem::take(&mut self.returns) {
            let fate = back.bring();
            if fate == Fate::Back {
                self.back.extend(back.before.again_of(&back.file));
            }
            if let Some(changed) = self.changed.get_mut(back.place) {
                changed.fate = fate;
            }
        }
    }

    /// Notes at the snapshot that what is back is what it was, though it has other times.
    pub fn note(&self, then: &mut Files, digests: &mut Digests) {
        for &seen in &self.back {
            let noted = then.all.iter_mut().find(|noted| noted.file.seen.identity == seen.identity);
            noted.into_iter().for_each(|noted| digests.note_return(noted, seen));
        }
    }
}

fn refusal(changed: &Changed, why: &str) -> Refusal {
    Refusal { what: changed.file.clone(), why: why.to_owned(), hint: LEFT.to_owned() }
}

/// A file that can be brought back, as it was and as it is.
struct Goal<'a>(&'a Noted, Writable);

impl<'a> Goal<'a> {
    /// Of a file that has changed, or why not.
    fn of(one: &Difference<'a>, noticed: &Noticed) -> Result<Self, &'static str> {
        let (Some(was), Some(is), true) = (one.then, &one.now, one.can_come_back) else {
            return Err("and cannot be brought back");
        };
        if noticed.is(&was.file.path(), was.file.seen.identity.inode) {
            return Err("and the program watches it, and would see that somebody else opens it");
        }
        Ok(Goal(was, is.clone()))
    }

    /// Opens it for writing.
    fn open(&self, place: usize) -> Result<Return, String> {
        let Goal(was, is) = self;
        let file = is.open(OFlags::RDWR).map_err(|e| format!("and cannot be opened for writing: {e}"))?;
        let back = Return {
            place,
            file: file.into(),
            path: PathBuf::from(OsStr::from_bytes(&was.file.name)),
            before: is.seen,
            then: was.file.seen.stamp,
            kept: was.kept.clone().unwrap_or_default(),
        };
        if back.is_as_compared().map_err(|e| e.to_string())? { Ok(back) } else { Err(MEANWHILE.into()) }
    }
}

impl Return {
    /// Whether nobody has changed it since it was compared.
    fn is_as_compared(&self) -> Result<bool> {
        Ok(self.before.again_of(&self.file)?.stamp == self.before.stamp)
    }

    fn check(&self) -> Result<()> {
        match self.is_as_compared()? {
            true => Ok(()),
            false => Err(Error::Refused(vec![Refusal {
                what: self.path.display().to_string(),
                why: MEANWHILE.to_owned(),
                hint: LEFT.to_owned(),
            }])),
        }
    }

    fn bring(&self) -> Fate {
        let size = self.before.stamp.size;
        if !self.file.metadata().is_ok_and(|now| now.len() == size) {
            return Fate::IsLeft(MEANWHILE.to_owned());
        }
        let cut = || shorten(&self.file, &self.path, (size, self.then.size), self.then.mtime_ns);
        match self.write_back().and_then(|()| Ok(cut()?)) {
            Ok(_) => Fate::Back,
            Err(e) if self.kept.is_empty() => Fate::IsLeft(e.to_string()),
            Err(e) => Fate::InPart(e.to_string()),
        }
    }

    /// Writes what could be written through mappings.
    fn write_back(&self) -> Result<()> {
        let write = |(range, bytes): &(Range, Vec<u8>)| self.file.write_all_at(bytes, range.start);
        Ok(self.kept.iter().try_for_each(write).map_err(|e| Kernel::file(&self.path, e))?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::changes::How;
    use super::*;
    use rustix::fs::Mode;
    use std::fs::{read, write};

    /// A file that has grown by `more` since it was noted.
    struct Case {
        _folder: tempfile::TempDir,
        path: PathBuf,
        was: Noted,
        is: Writable,
    }

    impl Case {
        fn new(then: &str, more: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            write(&path, then).unwrap();
            let name = path.to_str().unwrap().as_bytes().to_vec();
            let seen = || Writable::new(&name, Path::new("/"), path.clone(), &Systems::default()).unwrap();
            let all = Digests::default().note_all(vec![seen()], &Noticed::default()).all;
            let was = all.into_iter().next().unwrap();
            append(&path, more);
            let is = seen();
            Case { _folder: folder, path, was, is }
        }

        fn changed(&self) -> Changed {
            let file = self.path.display().to_string();
            let (then, now) = (self.was.file.seen.stamp.size, self.is.seen.stamp.size);
            Changed {
                file,
                size_then: Some(then),
                size_now: Some(now),
                how: vec![How::Grew],
                fate: Fate::Stays,
                tail: None,
            }
        }

        fn open(&self) -> Result<Return, String> {
            Goal(&self.was, self.is.clone()).open(0)
        }

        fn plan(&self) -> Plan {
            Plan {
                changed: vec![self.changed()],
                refused: Vec::new(),
                returns: vec![self.open().unwrap()],
                back: Vec::new(),
            }
        }
    }

    fn append(path: &Path, more: &str) {
        let mut file = File::options().append(true).open(path).unwrap();
        std::io::Write::write_all(&mut file, more.as_bytes()).unwrap();
    }

    #[test]
    fn what_only_grew_is_cut() {
        let case = Case::new("then", "more");
        let (mut plan, mut tail) = (case.plan(), Vec::new());
        let mut keep = |_: &Path, at: u64, source: &mut dyn Read| {
            assert_eq!(at, 4);
            source.read_to_end(&mut tail).unwrap();
            Ok(PathBuf::from("kept"))
        };
        plan.keep(&mut keep).unwrap();
        plan.bring_back();
        assert_eq!(plan.changed[0].fate, Fate::Back);
        assert_eq!(plan.changed[0].tail, Some("kept".into()));
        assert_eq!((read(&case.path).unwrap(), tail), (b"then".to_vec(), b"more".to_vec()));
    }

    /// A name that leads elsewhere when the file is opened: to one that was empty at no snapshot, or to what blocks who opens it.
    #[test]
    fn only_the_file_that_was_compared_is_opened() {
        let case = Case::new("", "more");
        let other = case.path.with_extension("other");
        write(&other, "others").unwrap();
        let away = case.path.with_extension("1");
        std::fs::rename(&case.path, &away).unwrap();
        std::os::unix::fs::symlink(&other, &case.path).unwrap();
        assert!(case.open().is_err());
        std::fs::remove_file(&case.path).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &case.path,
            rustix::fs::FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(case.open().is_err());
        std::fs::remove_file(&case.path).unwrap();
        assert!(case.open().is_err());
        assert_eq!((read(&other).unwrap(), read(&away).unwrap()), (b"others".to_vec(), b"more".to_vec()));
    }

    /// Who may write to a file need not own it.
    #[test]
    fn a_file_of_somebody_else_is_cut() {
        let case = Case::new("then", "more");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        let mut plan = case.plan();
        std::fs::set_permissions(&case.path, mode).unwrap();
        // A thread has credentials of its own: nobody's.
        let plan = std::thread::spawn(move || {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).map(|()| {
                plan.bring_back();
                plan
            })
        });
        let Ok(plan) = plan.join().unwrap() else { return };
        assert_eq!(plan.changed[0].fate, Fate::Back);
        assert_eq!(read(&case.path).unwrap(), b"then");
    }

    #[test]
    fn nothing_is_written_to_a_file_that_has_another_size_by_now() {
        let case = Case::new("then", "more");
        let mut plan = case.plan();
        plan.returns[0].kept = Arc::new(vec![(Range { start: 0, len: 2 }, b"TH".to_vec())]);
        append(&case.path, "other");
        plan.bring_back();
        assert!(matches!(&plan.changed[0].fate, Fate::IsLeft(_)), "{:?}", plan.changed);
        assert_eq!(read(&case.path).unwrap(), b"thenmoreother");
        let case = Case::new("then", "more");
        let mut plan = case.plan();
        plan.returns[0].kept = Arc::new(vec![(Range { start: 0, len: 2 }, b"TH".to_vec())]);
        plan.returns[0].file = File::open(&case.path).unwrap();
        plan.bring_back();
        assert!(matches!(&plan.changed[0].fate, Fate::InPart(_)), "{:?}", plan.changed);
    }

    #[test]
    fn what_others_write_meanwhile_is_not_cut() {
        let case = Case::new("then", "more");
        append(&case.path, "other");
        assert!(case.open().is_err());
        let case = Case::new("then", "more");
        let mut plan = case.plan();
        append(&case.path, "other");
        let mut none = |_: &Path, _: u64, _: &mut dyn Read| panic!("nothing is to be kept");
        assert!(matches!(plan.keep(&mut none), Err(Error::Refused(_))));
        let case = Case::new("then", "more");
        let mut plan = case.plan();
        let mut meanwhile = |_: &Path, _: u64, _: &mut dyn Read| {
            append(&case.path, "other");
            Ok(PathBuf::from("kept"))
        };
        assert!(matches!(plan.keep(&mut meanwhile), Err(Error::Refused(_))));
        assert_eq!(read(&case.path).unwrap(), b"thenmoreother");
    }
}
