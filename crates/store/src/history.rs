//! What became of a job: when it was started, checkpointed, brought back, how it ended.
//!
//! ```text
//! {"at_ns":1767225600000000000,"kind":"start","pid":4711,"command":["./simulate"],"every_ns":10000000000}
//! {"at_ns":1767225610003912345,"kind":"checkpoint","id":1,"engine":"precopy","pause_ns":801000,…}
//! {"at_ns":1767225614512345678,"kind":"crash","signal":11}
//! ```
//!
//! A line of JSON for each event, appended when it is over. Nothing depends on it: it is no part of a commit and not made durable,
//! whoever cannot write it goes on without, and a job whose history is lost has lost nothing else. Lines that cannot be read (the
//! last one, where power failed; those of a later version) are passed over, and stay. When it is long, it is [thinned](thin).

mod thin;

use crate::heat::Area;
use crate::lock::Lock;
use crate::running::Paged;
use crate::{Error, Result, Store};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A history that has come to more bytes than this is thinned, to [`THINNED`].
const LONG: u64 = 4 << 20;
/// Bytes that are left of a long history.
const THINNED: usize = 2 << 20;
/// Others hold the lock while they append a line, or thin; longer than this nobody waits.
const PATIENCE: Duration = Duration::from_secs(1);
/// Words of others (commands, labels, reasons) are cut behind so many characters.
const LONGEST_TEXT: usize = 2_000;

/// Something that happened to a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When, nanoseconds since 1970; of what takes time, when it was over.
    pub at_ns: u64,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What happens to a job. Times are nanoseconds; what is not known is missing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum What {
    /// A program was started, or a running one adopted.
    Start(Start),
    /// A checkpoint is in the store.
    Checkpoint(Box<Saved>),
    /// There is no checkpoint though one was wanted.
    Failed(Failed),
    /// The program was brought back because somebody said so.
    Restore(Back),
    /// The program was brought back because it had crashed.
    Restart(Back),
    /// The program was brought back after the machine, or the supervisor, was gone.
    Resume(Back),
    /// A signal ended it.
    Crash {
        /// Its number.
        signal: i32,
    },
    /// It ended by itself.
    End {
        /// Its exit code, if we are its parent.
        #[serde(default)]
        code: Option<i32>,
    },
    /// It is no job any more, and runs on.
    Release,
    /// What older events came to that are left out.
    Earlier(Earlier),
    /// A later version knows what.
    #[serde(other)]
    Unknown,
}

/// A job begins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Start {
    /// Process id.
    pub pid: u32,
    /// Command line.
    pub command: Vec<String>,
    /// It ran before it was a job.
    #[serde(skip_serializing_if = "is_false")]
    pub adopted: bool,
    /// How often a checkpoint is to be taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_ns: Option<u64>,
    /// How many checkpoints are to be kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<u64>,
    /// Further options in force, as on the command line.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// Why a checkpoint was wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Why {
    /// It was time.
    Periodic,
    /// Somebody asked for it.
    Asked,
    /// A signal asked for it.
    Signal,
    /// For a reason that a later version knows.
    #[default]
    #[serde(other)]
    Unknown,
}

/// What a checkpoint was like.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Saved {
    /// Its number.
    pub id: u64,
    /// The instant that it is of.
    pub taken_ns: u64,
    /// Why it was taken.
    pub why: Why,
    /// How its memory was saved.
    pub engine: String,
    /// Only what had changed was saved.
    pub incremental: bool,
    /// The user's words for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// How long the program stood still at the cut.
    pub pause_ns: u64,
    /// How often it stood still besides.
    #[serde(skip_serializing_if = "is_zero")]
    pub other_stops: u64,
    /// For how long in all.
    #[serde(skip_serializing_if = "is_zero")]
    pub other_stops_ns: u64,
    /// How long it all took.
    pub wall_ns: u64,
    /// Processor time that it took whoever took it.
    pub cpu_ns: u64,
    /// Processes that it describes.
    pub processes: u64,
    /// Memory that it describes, in pages that are not zero.
    pub pages: u64,
    /// Pages that it stored, also those that turned out to be stored twice.
    pub written_pages: u64,
    /// Page data that it added to the store, bytes.
    pub written_bytes: u64,
    /// Size of its manifest, bytes.
    pub manifest_bytes: u64,
    /// Pages that had changed since the checkpoint before, of one that is incremental.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_pages: Option<u64>,
    /// How often a checkpoint was taken at that time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval_ns: Option<u64>,
    /// What the paging of its memory had come to, if that is kept within a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paged: Option<Paged>,
    /// The program was killed afterwards.
    #[serde(skip_serializing_if = "is_false")]
    pub killed: bool,
    /// Where in its memory the stored pages are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub heat: Vec<Area>,
    /// What checkpoints before this one came to that are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<Earlier>,
}

/// A checkpoint that there is not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Failed {
    /// Why it was wanted.
    pub wanted: Why,
    /// Why it is not there.
    pub reason: String,
    /// The program holds what cannot be captured: nothing was done to it.
    #[serde(skip_serializing_if = "is_false")]
    pub refused: bool,
    /// For the same reason so many others failed just before.
    #[serde(skip_serializing_if = "is_zero")]
    pub others: u64,
    /// The first of those.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_ns: Option<u64>,
}

/// A program that was brought back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Back {
    /// Process id.
    pub pid: u32,
    /// From this checkpoint.
    pub from: u64,
    /// Of this job, if that is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// From the command to the first instruction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running_ns: Option<u64>,
    /// How often a checkpoint is to be taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_ns: Option<u64>,
    /// How many checkpoints are to be kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<u64>,
    /// After a crash: which one in a row, from 1.
    #[serde(skip_serializing_if = "is_zero")]
    pub attempt: u64,
    /// After a crash: newer checkpoints that were passed over, because the job had crashed again when it was brought back from them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub passed: Vec<u64>,
    /// After a crash: how long was waited.
    #[serde(skip_serializing_if = "is_zero")]
    pub waited_ns: u64,
}

/// What events came to that are left out of a long history.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Earlier {
    /// The first of them.
    pub since_ns: u64,
    /// How many checkpoints there were.
    pub checkpoints: u64,
    /// How many failed.
    #[serde(skip_serializing_if = "is_zero")]
    pub failed: u64,
    /// How many crashes there were.
    #[serde(skip_serializing_if = "is_zero")]
    pub crashes: u64,
    /// Page data that they added to the store, bytes.
    pub written_bytes: u64,
    /// Pages that they found changed.
    pub dirty_pages: u64,
    /// The longest time that the program stood still at a cut.
    pub longest_pause_ns: u64,
    /// For how long it stood still for them, at cuts and besides.
    pub stopped_ns: u64,
}

/// The history of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Oldest first.
    pub events: Vec<Event>,
    /// So many lines could not be read.
    pub unreadable: usize,
}

fn is_false(b: &bool) -> bool {
    !b
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Event {
    /// Something that has happened just now.
    pub fn now(what: What) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { at_ns: now.as_nanos() as u64, what }
    }

    /// Its line, with a newline.
    fn line(&self) -> Vec<u8> {
        let mut event = self.clone();
        event.shorten();
        // Neither maps with keys that are no strings nor anything else that has no JSON is in it.
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        line
    }

    /// Cuts the words of others, which may be of any length.
    fn shorten(&mut self) {
        match &mut self.what {
            What::Start(start) => {
                let mut room = LONGEST_TEXT;
                for argument in &mut start.command {
                    cut(argument, room);
                    room = room.saturating_sub(argument.len() + 1);
                }
                let all = start.command.len();
                start.command.truncate(64);
                if start.command.len() < all {
                    start.command.push("…".into());
                }
            }
            What::Checkpoint(saved) => saved.label.iter_mut().for_each(|label| cut(label, LONGEST_TEXT)),
            What::Failed(failed) => cut(&mut failed.reason, LONGEST_TEXT),
            _ => {}
        }
    }
}

/// Cuts a text behind so many bytes.
fn cut(text: &mut String, longest: usize) {
    if text.len() > longest {
        let end = (0..=longest).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
}

impl Store {
    /// Adds to the history of a job that is there. Afterwards [`Store::thin_history`] is to be called when there is time.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`]; [`Error::Busy`] if somebody else does not come to an end with it.
    pub fn note(&self, job: &str, event: &Event) -> Result<()> {
        let path = self.known(job)?.history();
        let lock = self.history_lock(job, &path)?;
        let file = lock.file();
        let end = file.metadata().map_err(Error::io("look at", &path))?.len();
        let mut line = event.line();
        if !ends_with_newline(file, end) {
            line.insert(0, b'\n'); // the line before was torn
        }
        self.medium.write_at(file, &path, &line, end)
    }

    /// Makes a history shorter that has become long. Of what is left out the sums stay.
    ///
    /// # Errors
    /// As [`Store::note`].
    pub fn thin_history(&self, job: &str) -> Result<()> {
        let path = self.known(job)?.history();
        if std::fs::metadata(&path).map_or(0, |m| m.len()) <= LONG {
            return Ok(());
        }
        let _lock = self.history_lock(job, &path)?;
        let text = std::fs::read(&path).map_err(Error::io("read", &path))?;
        self.medium.replace_for_now(&path, &thin::thin(&text, THINNED))
    }

    /// What became of a job, as far as that is known.
    ///
    /// # Errors
    /// [`Error::NoJob`], [`Error::Name`], [`Error::Io`].
    pub fn history(&self, job: &str) -> Result<History> {
        self.history_from(job, 0)
    }

    /// The end of it: about so many bytes of the file.
    ///
    /// # Errors
    /// As [`Store::history`].
    pub fn recent_history(&self, job: &str, bytes: u64) -> Result<History> {
        let length = std::fs::metadata(self.known(job)?.history()).map_or(0, |m| m.len());
        self.history_from(job, length.saturating_sub(bytes))
    }

    fn history_from(&self, job: &str, start: u64) -> Result<History> {
        let path = self.known(job)?.history();
        let mut file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(History::default()),
            other => other.map_err(Error::io("open", &path))?,
        };
        let read = |e| Error::io("read", &path)(e);
        // From the byte before, so that a line that begins right there is not taken for the rest of another one.
        let skips = start > 0;
        file.seek(SeekFrom::Start(start.saturating_sub(1))).map_err(read)?;
        // Somebody who appends all the while does not keep us here for ever.
        let mut reader = BufReader::new(file.take(4 * LONG));
        if skips {
            reader.skip_until(b'\n').map_err(read)?;
        }
        let mut text = Vec::new();
        reader.read_to_end(&mut text).map_err(read)?;
        Ok(parse(&text))
    }

    /// Held by whoever changes the file.
    fn history_lock(&self, job: &str, path: &Path) -> Result<Lock> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = || Ok(File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?));
        let busy = || Error::Busy { job: job.to_owned() };
        Lock::exclusive_with(path, open, PATIENCE)?.ok_or_else(busy)
    }
}

fn ends_with_newline(file: &File, end: u64) -> bool {
    let mut last = [0];
    end == 0 || file.read_exact_at(&mut last, end - 1).is_ok() && last == *b"\n"
}

fn parse(text: &[u8]) -> History {
    let mut history = History::default();
    for line in text.split(|&b| b == b'\n').filter(|line| !line.is_empty()) {
        match serde_json::from_slice(line) {
            Ok(event) => history.events.push(event),
            Err(_) => history.unreadable += 1,
        }
    }
    history
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(folder.path()).expect("opens");
        store.make("job").expect("a job");
        (folder, store)
    }

    fn checkpoint(id: u64, at_ns: u64) -> Event {
        let saved = Saved { id, taken_ns: at_ns, written_bytes: 4096 * id, pause_ns: id, ..Saved::default() };
        Event { at_ns, what: What::Checkpoint(saved.into()) }
    }

    #[test]
    fn what_is_noted_is_read() {
        let (_folder, store) = store();
        let start = Start { pid: 7, command: vec!["a".into(), "ü\n\0".into()], ..Start::default() };
        let failed = Failed { wanted: Why::Asked, reason: "no room".into(), ..Failed::default() };
        let back = Back { pid: 8, from: 1, attempt: 2, ..Back::default() };
        let all = [
            What::Start(start),
            checkpoint(1, 5).what,
            What::Failed(failed),
            What::Crash { signal: 11 },
            What::Restart(back.clone()),
            What::Restore(back.clone()),
            What::Resume(back),
            What::End { code: Some(3) },
            What::End { code: None },
            What::Release,
        ];
        let events: Vec<Event> = all.into_iter().map(Event::now).collect();
        events.iter().for_each(|event| store.note("job", event).expect("notes"));
        assert_eq!(store.history("job").expect("reads"), History { events, unreadable: 0 });
        assert_eq!(
            store.history("none").map(|_| ()).map_err(|e| e.to_string().contains("no job")),
            Err(true)
        );
    }

    #[test]
    fn it_goes_with_its_job() {
        let (_folder, store) = store();
        store.note("job", &checkpoint(1, 1)).expect("notes");
        store.remove_job("job").expect("removes");
        assert!(matches!(store.note("job", &checkpoint(2, 2)), Err(Error::NoJob { .. })));
        store.make("job").expect("another");
        assert_eq!(store.history("job").expect("reads"), History::default());
    }

    #[test]
    fn later_versions_are_borne() {
        let (_folder, store) = store();
        let path = store.known("job").expect("there").history();
        let text = r#"{"at_ns":1,"kind":"teleport","to":"mars"}
{"at_ns":2,"kind":"checkpoint","id":3,"why":"whim","colour":"red","heat":[{"name":"x","hue":1}]}
{"at_ns":3,"kind":"crash"}
{"at_ns":4,"kind":"end"}
"#;
        std::fs::write(&path, text).expect("writes");
        let history = store.history("job").expect("reads");
        assert_eq!(history.unreadable, 1, "a crash without its signal: {history:?}");
        assert_eq!(history.events[0], Event { at_ns: 1, what: What::Unknown });
        let What::Checkpoint(saved) = &history.events[1].what else { panic!("{history:?}") };
        assert_eq!((saved.id, saved.why), (3, Why::Unknown));
        assert_eq!(history.events[2].what, What::End { code: None });
    }

    #[test]
    fn the_end_of_a_history_begins_with_a_line() {
        let (_folder, store) = store();
        (1..=100).for_each(|id| store.note("job", &checkpoint(id, id)).expect("notes"));
        let path = store.known("job").expect("there").history();
        let length = std::fs::metadata(path).expect("a file").len();
        for bytes in [0, 1, 500, 501, 502, length - 1, length, length + 1] {
            let history = store.recent_history("job", bytes).expect("reads");
            assert_eq!(history.unreadable, 0, "{bytes}");
            let newest = history.events.last().map(|e| e.at_ns);
            assert!(newest == Some(100) || bytes < 500, "{bytes}: {newest:?}");
        }
        assert_eq!(store.recent_history("job", length).expect("reads").events.len(), 100);
    }

    #[test]
    fn words_of_others_are_cut() {
        let start = Start { command: vec!["ä".repeat(50_000); 1_000], ..Start::default() };
        let failed = Failed { reason: "x".repeat(1 << 20), ..Failed::default() };
        for what in [What::Start(start), What::Failed(failed)] {
            let line = Event { at_ns: 1, what }.line();
            assert!(line.len() < 4 * LONGEST_TEXT, "{}", line.len());
            assert_eq!(parse(&line).events.len(), 1);
        }
    }

    #[test]
    fn a_long_history_is_thinned_and_its_sums_stay() {
        let (_folder, store) = store();
        let path = store.known("job").expect("there").history();
        let mut bytes = 0;
        for id in 1..=40_000 {
            bytes += 4096 * id;
            store.note("job", &checkpoint(id, id)).expect("notes");
            store.thin_history("job").expect("thins");
        }
        assert!(std::fs::metadata(&path).expect("a file").len() <= LONG + 1000);
        let history = store.history("job").expect("reads");
        let (mut checkpoints, mut written) = (0, 0);
        for event in &history.events {
            let merged = match &event.what {
                What::Checkpoint(saved) => {
                    checkpoints += 1;
                    written += saved.written_bytes;
                    saved.merged.clone().unwrap_or_default()
                }
                What::Earlier(earlier) => earlier.clone(),
                _ => Earlier::default(),
            };
            checkpoints += merged.checkpoints;
            written += merged.written_bytes;
        }
        assert_eq!((checkpoints, written), (40_000, bytes));
    }

    proptest! {
        /// Power fails in the middle of a line, or leaves zeros behind it: nothing else is lost, and what is noted afterwards is
        /// read.
        #[test]
        fn torn_lines_cost_themselves_only(
            lines in 1_usize..8, cut in any::<prop::sample::Index>(), zeros in 0_usize..5, more in 1_usize..3,
        ) {
            let (_folder, store) = store();
            let path = store.known("job").expect("there").history();
            (1..=lines as u64).for_each(|id| store.note("job", &checkpoint(id, id)).expect("notes"));
            let mut text = std::fs::read(&path).expect("reads");
            text.truncate(cut.index(text.len() + 1));
            let whole = text.iter().filter(|b| **b == b'\n').count();
            let rest_is_whole = parse(&text).events.len() > whole; // only its newline is missing
            text.extend(vec![0; zeros]);
            std::fs::write(&path, &text).expect("writes");
            (0..more as u64).for_each(|id| store.note("job", &checkpoint(id + 100, 100)).expect("notes"));
            let events = store.history("job").expect("reads").events;
            let expected = whole + more + usize::from(rest_is_whole && zeros == 0);
            prop_assert_eq!(events.len(), expected);
            prop_assert!(events[events.len() - more..].iter().all(|e| e.at_ns == 100));
        }

        #[test]
        fn whatever_is_in_the_file_is_borne(text in prop::collection::vec(any::<u8>(), 0..400)) {
            let (_folder, store) = store();
            std::fs::write(store.known("job").expect("there").history(), &text).expect("writes");
            store.history("job").expect("reads");
            store.note("job", &checkpoint(1, 7)).expect("notes");
            prop_assert_eq!(store.history("job").expect("reads").events.last().map(|e| e.at_ns), Some(7));
        }
    }
}
