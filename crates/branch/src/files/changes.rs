//! What has become of a file since a snapshot, as far as that can be told.

use super::seen::{Clock, Instant};
use super::{
    Files, Found, Holder, Noted, READ_AT_REST, Systems, Writable, below, noticed, ranges, way_to, writable,
};
use std::fmt;
use std::path::PathBuf;
use stillpoint_capture::files::Noticed;

/// In which way a file is not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// It is longer.
    Grew,
    /// It is shorter.
    Shortened,
    /// What is in it, as far as it goes back to the snapshot, is not the same.
    Written,
    /// By its times it has been modified; what is in it cannot be compared.
    Modified,
    /// Whether what is in it is the same, as far as it goes back to the snapshot, cannot be told.
    MayBeWritten,
    /// Its name leads to another file, or to none.
    Removed,
    /// It has another name.
    Renamed(String),
    /// It was not open for writing at the snapshot.
    Opened,
    /// It was not there at the snapshot.
    Made,
    /// It cannot be looked at, or could not be at the snapshot.
    Unseen,
}

impl How {
    /// A word for it.
    pub fn word(&self) -> &'static str {
        match self {
            How::Grew => "grew",
            How::Shortened => "shortened",
            How::Written => "written",
            How::Modified => "modified",
            How::MayBeWritten => "perhaps written",
            How::Removed => "removed",
            How::Renamed(_) => "renamed",
            How::Opened => "opened",
            How::Made => "made",
            How::Unseen => "not comparable",
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            How::Grew => f.write_str("it has grown"),
            How::Shortened => f.write_str("it has been shortened"),
            How::Written => f.write_str("it has been written in place"),
            How::Modified => f.write_str("it has been modified, in a way that cannot be told"),
            How::MayBeWritten => f.write_str("it may have been written in place"),
            How::Removed => f.write_str("it has been removed or renamed"),
            How::Renamed(name) => write!(f, "it has been renamed to {name}"),
            How::Opened => f.write_str("it was opened since"),
            How::Made => f.write_str("it was made since"),
            How::Unseen => f.write_str("it cannot be looked at, or could not be at the snapshot, so what happened to it cannot be told"),
        }
    }
}

/// What a rollback does about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It stays as it is.
    Stays,
    /// It stays as it is, though it could have been brought back: why.
    IsLeft(String),
    /// Some of it may be as it was, as bringing it back failed half-way: why.
    InPart(String),
    /// It is as it was again.
    Back,
}

/// A file that is not as it was at a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Its name at the snapshot; of one that was not there, its name now.
    pub file: String,
    /// Bytes at the snapshot; none if it was not open for writing then.
    pub size_then: Option<u64>,
    /// Bytes before the rollback; none if it cannot be reached any more.
    pub size_now: Option<u64>,
    /// In which ways.
    pub how: Vec<How>,
    /// What became of it.
    pub fate: Fate,
    /// Where there is what stood behind its size at the snapshot, if that was to be cut off.
    pub tail: Option<PathBuf>,
}

impl Changed {
    /// In which ways, in words, with its sizes.
    pub fn told(&self) -> String {
        let sizes = match (self.size_then, self.size_now) {
            (Some(then), Some(now)) => format!("{now} bytes, {then} at the snapshot: "),
            (Some(then), None) => format!("{then} bytes at the snapshot: "),
            (None, Some(now)) => format!("{now} bytes: "),
            (None, None) => String::new(),
        };
        let how: Vec<String> = self.how.iter().map(How::to_string).collect();
        format!("{sizes}{}", how.join(", "))
    }
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.told())?;
        match &self.fate {
            Fate::Stays => Ok(()),
            Fate::IsLeft(why) => write!(f, "; left as it is, as {why}"),
            Fate::InPart(why) => write!(f, "; it is back in part only, as {why}"),
            Fate::Back => f.write_str("; it is as it was again"),
        }
    }
}

/// A file that has changed, as it was and as it is.
#[derive(Debug)]
pub(super) struct Difference<'a> {
    pub changed: Changed,
    /// As it was; none if it was not open for writing then.
    pub then: Option<&'a Noted>,
    /// As it is; none if it cannot be reached any more.
    pub now: Option<Writable>,
    /// Whether nothing has happened to it but that it grew, and what can be written back: this is certain.
    pub can_come_back: bool,
}

/// All files that are not as they were. `most`: so much is read at most to tell what has happened to them, bytes.
pub(super) fn differences<'a>(
    then: &'a Files,
    holders: &[Holder<'_>],
    systems: &Systems,
    mut most: u64,
) -> Vec<Difference<'a>> {
    let (Found { all: now, unseen }, noticed) = (writable(holders, systems), noticed(holders));
    let mut all = Vec::new();
    let is_seen = |name: &Vec<u8>| !unseen.contains(name) && !then.unseen.contains(name);
    for was in then.all.iter().filter(|was| is_seen(&was.file.name)) {
        let is = find(was, &now, holders);
        // The name of one that is served from elsewhere is not looked for.
        let is_known = is.is_some() || was.file.seen.clock != Clock::Foreign;
        match is_known {
            true => all.extend(difference(was, is, &noticed, &mut most)),
            false => all.push(Difference::unseen(&was.file.name)),
        }
    }
    let is_new = |file: &&Writable| {
        is_seen(&file.name) && then.all.iter().all(|was| was.file.seen.identity != file.seen.identity)
    };
    let news = now.iter().filter(is_new);
    let earliest_ns = then.at.earliest_since(Instant::now());
    all.extend(news.filter_map(|file| {
        let how = since(file, then.at.at_ns, earliest_ns)?;
        let (size_now, file_name) = (Some(file.seen.stamp.size), lossy(&file.name));
        let changed =
            Changed { file: file_name, size_then: None, size_now, how, fate: Fate::Stays, tail: None };
        Some(Difference { changed, then: None, now: Some(file.clone()), can_come_back: false })
    }));
    all.extend(then.unseen.iter().map(|name| Difference::unseen(name)));
    let more = unseen.iter().filter(|name| !then.unseen.contains(name));
    all.extend(more.map(|name| Difference::unseen(name)));
    all
}

impl Difference<'_> {
    /// Of a file that cannot be compared with anything.
    fn unseen(name: &[u8]) -> Self {
        let how = vec![How::Unseen];
        let changed = Changed {
            file: lossy(name),
            size_then: None,
            size_now: None,
            how,
            fate: Fate::Stays,
            tail: None,
        };
        Difference { changed, then: None, now: None, can_come_back: false }
    }
}

impl Files {
    /// So much may be read to tell what has become of them while the program stands still, bytes; `all`: that it is told matters
    /// more than for how long.
    pub(super) fn most_to_be_read(all: bool) -> u64 {
        if all { u64::MAX } else { READ_AT_REST }
    }
}

fn lossy(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// A file of a snapshot as it is now: where the program has it open, or else by its name.
fn find(was: &Noted, now: &[Writable], holders: &[Holder<'_>]) -> Option<Writable> {
    let identity = was.file.seen.identity;
    if let Some(same) = now.iter().find(|file| file.seen.identity == identity) {
        return Some(same.clone());
    }
    let held =
        holders.iter().flat_map(|holder| holder.table.held.iter().map(|(fd, held)| (holder.pid, *fd, held)));
    let mut same = held.filter(|(.., held)| held.identity == identity.inode);
    let (name, way) = match same.next() {
        Some((pid, fd, held)) => (held.link.clone(), way_to(pid, fd)),
        None => (was.file.name.clone(), was.file.path()),
    };
    if way == was.file.path() && was.file.seen.clock == Clock::Foreign {
        // To follow a name there asks who serves it.
        return None;
    }
    let seen = was.file.seen.again(&way).ok().filter(|seen| seen.identity == identity)?;
    Some(Writable { name, way, seen, ..was.file.clone() })
}

/// How a file differs from what it was, if it does.
fn difference<'a>(
    was: &'a Noted,
    is: Option<Writable>,
    noticed: &Noticed,
    most: &mut u64,
) -> Option<Difference<'a>> {
    let (mut how, mut can_come_back) = (Vec::new(), true);
    match &is {
        None => how.push(How::Removed),
        Some(is) => {
            let content = Content::of(was, is, noticed, most);
            how = content.how(was.file.seen.stamp.size, is.seen.stamp.size);
            // Another machine may have changed it, and its size of now may be one of long ago.
            can_come_back = content.can_come_back() && is.seen.clock != Clock::Foreign;
            how.extend(another_name(&was.file, is));
        }
    }
    let is_longer_or_written = |how: &How| matches!(how, How::Grew | How::Written);
    can_come_back &= how.iter().all(is_longer_or_written);
    let changed = Changed {
        file: lossy(&was.file.name),
        size_then: Some(was.file.seen.stamp.size),
        size_now: is.as_ref().map(|is| is.seen.stamp.size),
        how,
        fate: Fate::Stays,
        tail: None,
    };
    (!changed.how.is_empty()).then_some(Difference { changed, then: Some(was), now: is, can_come_back })
}

/// What has become of a file's name.
fn another_name(was: &Writable, is: &Writable) -> Option<How> {
    if is.name == was.name {
        // It is told of descriptors; one that was found by its name has it.
        return (is.seen.links == 0 && was.seen.links > 0).then_some(How::Removed);
    }
    let leads_there = |name: &[u8]| {
        let now = || is.seen.again(&below(&is.root, name));
        is.seen.clock != Clock::Foreign && now().is_ok_and(|seen| seen.identity == is.seen.identity)
    };
    match is.name.ends_with(b" (deleted)") && !leads_there(&is.name) {
        true => Some(How::Removed),
        false => Some(How::Renamed(lossy(&is.name))),
    }
}

/// What has happened to a file that was not open for writing at a snapshot, if anything may have. `earliest_ns`: what happened since may
/// have a time from then on.
fn since(file: &Writable, moment_ns: i64, earliest_ns: i64) -> Option<Vec<How>> {
    let seen = &file.seen;
    if file.is_memory() {
        return None;
    }
    if seen.is_made_since(moment_ns) {
        // One without a name goes with its descriptors.
        return (seen.links > 0).then(|| vec![How::Made]);
    }
    let is_written = seen.may_be_written_since(earliest_ns) || !file.mapped.is_empty();
    let is_certain = seen.is_modified_since(moment_ns);
    is_written.then(|| vec![How::Opened, if is_certain { How::Modified } else { How::MayBeWritten }])
}

/// What is in a file now, as far as it goes back to a snapshot, compared with what was in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Same,
    /// It differs only where what was there is remembered.
    WrittenWhereKept,
    Written,
    /// It has been modified, and cannot be compared.
    Modified,
    Unknown,
}

impl Content {
    fn of(was: &Noted, is: &Writable, noticed: &Noticed, most: &mut u64) -> Self {
        let (then, now) = (&was.file.seen.stamp, &is.seen.stamp);
        let would_show = was.file.would_show_changes() && is.mapped.is_empty();
        if was.file.is_memory() || then.size == 0 || then == now && would_show {
            return Content::Same;
        }
        if now.size < then.size {
            return Content::Unknown;
        }
        let is_little = most.checked_sub(then.size).map(|left| *most = left).is_some();
        let places = ranges(&was.kept);
        let outside = was.digest.filter(|_| is_little);
        let outside = outside.and_then(|digest| Some(digest == is.digest(then.size, &places, noticed)?));
        // Where nothing is kept the digest is of all.
        let inside = match &was.kept {
            Some(kept) if !kept.is_empty() && is_little => {
                is.contents(&places, noticed).map(|contents| contents == **kept)
            }
            Some(kept) if !kept.is_empty() => None,
            _ => Some(true),
        };
        Content::told(outside, inside, then.mtime_ns != now.mtime_ns)
    }

    /// Whether what was not kept is the same, whether what was kept is, as far as either is known, and whether the modification time is
    /// another one.
    fn told(outside: Option<bool>, inside: Option<bool>, is_modified: bool) -> Self {
        match (outside, inside) {
            (Some(true), Some(true)) => Content::Same,
            (Some(true), Some(false)) => Content::WrittenWhereKept,
            (Some(false), _) | (_, Some(false)) => Content::Written,
            _ if is_modified => Content::Modified,
            _ => Content::Unknown,
        }
    }

    /// In which ways a file of these sizes has changed.
    fn how(self, then: u64, now: u64) -> Vec<How> {
        let size = match now.cmp(&then) {
            std::cmp::Ordering::Greater => Some(How::Grew),
            std::cmp::Ordering::Less => Some(How::Shortened),
            std::cmp::Ordering::Equal => None,
        };
        let content = match (self, now.cmp(&then)) {
            (Content::Same, _) | (_, std::cmp::Ordering::Less) => None,
            (Content::WrittenWhereKept | Content::Written, _) => Some(How::Written),
            // Whoever appends modifies it, too.
            (Content::Modified, std::cmp::Ordering::Equal) => Some(How::Modified),
            (Content::Modified | Content::Unknown, _) => Some(How::MayBeWritten),
        };
        size.into_iter().chain(content).collect()
    }

    fn can_come_back(self) -> bool {
        matches!(self, Content::Same | Content::WrittenWhereKept)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Digests;
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::Arc;
    use stillpoint_image::Range;

    /// A file with contents, and what is noted of it.
    struct Case {
        _folder: tempfile::TempDir,
        path: PathBuf,
        file: std::fs::File,
    }

    impl Case {
        fn new(contents: &[u8]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            std::fs::write(&path, contents).unwrap();
            let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
            Case { _folder: folder, path, file }
        }

        fn writable(&self, mapped: &[Range]) -> Writable {
            let name = self.path.to_str().unwrap().as_bytes();
            let file = Writable::new(name, Path::new("/"), self.path.clone(), &Systems::default()).unwrap();
            Writable { mapped: mapped.to_vec(), ..file }
        }

        fn note(&self, mapped: &[Range]) -> Noted {
            let files = Digests::default().note_all(vec![self.writable(mapped)], &Noticed::default());
            files.all.into_iter().next().unwrap()
        }

        /// How it differs, and whether it can come back.
        fn differs(&self, was: &Noted) -> (Vec<How>, bool) {
            let (is, mut most) = (find(was, &[], &[]), READ_AT_REST);
            let found = difference(was, is, &Noticed::default(), &mut most);
            found.map_or((Vec::new(), false), |found| (found.changed.how, found.can_come_back))
        }
    }

    #[test]
    fn what_happened_is_told() {
        let written =
            |bytes: &'static [u8], at: u64| move |case: &Case| case.file.write_all_at(bytes, at).unwrap();
        let cut = |size: u64| move |case: &Case| case.file.set_len(size).unwrap();
        let gone = |case: &Case| std::fs::remove_file(&case.path).unwrap();
        let touched = |case: &Case| case.file.set_modified(std::time::SystemTime::now()).unwrap();
        let replaced = |case: &Case| {
            std::fs::write(case.path.with_extension("new"), "contents").unwrap();
            std::fs::rename(case.path.with_extension("new"), &case.path).unwrap();
        };
        type Act = Box<dyn Fn(&Case)>;
        let all: [(Act, Vec<How>, bool); 9] = [
            (Box::new(|_: &Case| ()), vec![], false),
            (Box::new(touched), vec![], false),
            (Box::new(written(b"contents", 0)), vec![], false),
            (Box::new(written(b"more", 8)), vec![How::Grew], true),
            (Box::new(written(b"other contents", 0)), vec![How::Grew, How::Written], false),
            (Box::new(written(b"C", 0)), vec![How::Written], false),
            (Box::new(cut(5)), vec![How::Shortened], false),
            (Box::new(gone), vec![How::Removed], false),
            (Box::new(replaced), vec![How::Removed], false),
        ];
        for (place, (act, how, can_come_back)) in all.into_iter().enumerate() {
            let case = Case::new(b"contents");
            let was = case.note(&[]);
            act(&case);
            assert_eq!(case.differs(&was), (how, can_come_back), "case {place}");
        }
    }

    /// Who serves it is no more; what else there is is told all the same.
    #[test]
    fn what_cannot_be_looked_at_is_told() {
        let case = Case::new(b"contents");
        let name = |name: &str| name.as_bytes().to_vec();
        let all = vec![case.note(&[])];
        let then = Files { all, unseen: vec![name("/far")], ..Files::default() };
        case.file.write_all_at(b"more", 8).unwrap();
        let told = |then: &Files| -> Vec<Vec<How>> {
            let all = differences(then, &[], &Systems::default(), READ_AT_REST);
            all.into_iter().map(|one| one.changed.how).collect()
        };
        assert_eq!(told(&then), [vec![How::Grew], vec![How::Unseen]]);
        let mut then = then;
        then.all[0].file.seen.clock = Clock::Foreign;
        assert_eq!(told(&then), [vec![How::Unseen], vec![How::Unseen]], "its name is not followed");
    }

    #[test]
    fn what_cannot_be_compared_is_not_claimed() {
        let case = Case::new(b"contents");
        let was = Noted { digest: None, ..case.note(&[]) };
        case.file.write_all_at(b"more", 8).unwrap();
        assert_eq!(case.differs(&was), (vec![How::Grew, How::MayBeWritten], false));
        case.file.set_len(8).unwrap();
        assert_eq!(case.differs(&was), (vec![How::Modified], false));
        let ns = was.file.seen.stamp.mtime_ns as u64;
        case.file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_nanos(ns)).unwrap();
        assert_eq!(case.differs(&was), (vec![How::MayBeWritten], false));
        let empty = Case::new(b"");
        let was = Noted { digest: None, ..empty.note(&[]) };
        empty.file.write_all_at(b"more", 0).unwrap();
        assert_eq!(empty.differs(&was), (vec![How::Grew], true));
    }

    #[test]
    fn what_is_served_from_elsewhere_is_not_brought_back() {
        for contents in [&b""[..], b"contents"] {
            let case = Case::new(contents);
            let was = case.note(&[]);
            case.file.write_all_at(b"more", contents.len() as u64).unwrap();
            let mut is = case.writable(&[]);
            is.seen.clock = Clock::Foreign;
            let found = difference(&was, Some(is), &Noticed::default(), &mut 0).unwrap();
            assert!(!found.can_come_back && found.changed.how.contains(&How::Grew), "{found:?}");
        }
    }

    #[test]
    fn what_is_mapped_is_remembered_once() {
        let case = Case::new(&[1; 10_000]);
        let mut digests = Digests::default();
        let mut note = || {
            let file = case.writable(&[Range { start: 0, len: 4096 }]);
            digests.note_all(vec![file], &Noticed::default()).all.remove(0).kept.unwrap()
        };
        let (first, second) = (note(), note());
        assert!(Arc::ptr_eq(&first, &second));
        case.file.write_all_at(b"other", 0).unwrap();
        let third = note();
        assert_ne!(first, third);
        assert!(Arc::ptr_eq(&third, &note()));
    }

    /// Their times may show nothing, so contents are compared.
    #[test]
    fn what_is_written_through_mappings_comes_back() {
        let case = Case::new(&[1; 10_000]);
        let was = case.note(&[Range { start: 4096, len: 8192 }]);
        assert_eq!(case.differs(&was), (vec![], false));
        case.file.write_all_at(b"other", 5000).unwrap();
        assert_eq!(case.differs(&was), (vec![How::Written], true));
        case.file.write_all_at(b"more", 10_000).unwrap();
        assert_eq!(case.differs(&was), (vec![How::Grew, How::Written], true));
        case.file.write_all_at(b"other", 0).unwrap();
        assert_eq!(case.differs(&was), (vec![How::Grew, How::Written], false));
        let same_times = |was: &Noted| Noted { file: case.writable(&was.file.mapped), ..was.clone() };
        let was = same_times(&case.note(&[Range { start: 0, len: 20_000 }]));
        assert_eq!(case.differs(&was), (vec![], false));
        let unknown = Noted { kept: None, digest: None, ..was };
        assert_eq!(case.differs(&unknown), (vec![How::MayBeWritten], false));
    }
}
