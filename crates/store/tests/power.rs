//! Power that is cut at any moment of everything that a store does: it opens without repair, all that was committed is whole, and
//! nothing is left behind.
//!
//! `STILLPOINT_POWER_CUTS`: how many disks are looked at (2,000 and what completes a history, unless it is set).

use crate::common::power::{Disk, Loss, Recorder};
use crate::common::*;
use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stillpoint_archive::{Companion, Compression, Import, export};
use stillpoint_image::{
    AddressSpace, Codec, Extent, FileTable, Image, PAGE, PathFile, Place, Process, Range, Thread, Usage,
};
use stillpoint_store::{Result, Rolling, Sources, Store, Working};

/// Disks that are looked at, unless told otherwise.
const CUTS: usize = 2_000;
/// Ways in which each history is cut, one thread each.
const THREADS: u64 = 2;
/// Operations of one history.
const STEPS: u64 = 30;
const JOB: &str = "web";

/// What becomes of a checkpoint, by how much had been recorded.
#[derive(Debug)]
struct Life {
    job: String,
    id: u64,
    memory: Memory,
    /// It may be there from here on,
    begun: usize,
    /// must be,
    committed: Option<usize>,
    /// need not be any more,
    doomed: Option<usize>,
    /// must not be any more.
    gone: Option<usize>,
}

/// What happened to a store, and what is to be there.
struct History {
    root: tempfile::TempDir,
    recorder: Arc<Recorder>,
    /// Whoever keeps the newest checkpoints only, from one act to the next, as long as they live.
    rolling: Option<(Rolling, usize)>,
    /// Where they have pages of the program written, outside of checkpoints.
    working: Option<Working>,
    random: u64,
    lives: Vec<Life>,
    imports: u64,
    /// An archive, and the memory in it.
    archive: (Vec<u8>, Memory),
}

fn next(random: &mut u64, below: u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random % below.max(1)
}

/// Where disks are rebuilt: in memory, if that can be.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("folder")
}

/// A program with an executable, which goes along when it is exported.
fn program(exe: &Path) -> Image {
    let stat = std::fs::metadata(exe).expect("executable");
    use std::os::unix::fs::MetadataExt;
    let file = PathFile {
        path: exe.into(),
        dev: stat.dev(),
        ino: stat.ino(),
        mode: stat.mode(),
        size: stat.len(),
        mtime_ns: stat.mtime() * 1_000_000_000 + stat.mtime_nsec(),
        usage: Usage::Read,
        ..PathFile::default()
    };
    let thread = Thread { tid: 7, regs: vec![1; 216].into(), ..Thread::default() };
    Image {
        processes: vec![Process { pid: 7, threads: vec![thread], ..Process::default() }],
        spaces: vec![AddressSpace::default()],
        tables: vec![FileTable::default()],
        paths: vec![file],
        ..image()
    }
}

/// A checkpoint of such a program that was exported from another store.
fn archive() -> (Vec<u8>, Memory) {
    let folder = scratch();
    let exe = folder.path().join("program");
    std::fs::write(&exe, vec![7; 9000]).expect("write");
    let store = Store::open(&folder.path().join("store")).expect("open");
    let memory = memory(5, 30, 77);
    let mut writer = store.begin("far").expect("begin");
    memory.iter().for_each(|(&page, &seed)| put(&mut writer, page, 1, seed).expect("put"));
    writer.commit(program(&exe)).expect("commit");
    let checkpoint = store.load("far", None).expect("load");
    let companions = Companion::all_of(&store, &checkpoint.image, true).expect("companions");
    assert_eq!(companions.len(), 1);
    let (bytes, _) =
        export(&checkpoint, &companions, Compression::default(), Vec::new(), &()).expect("export");
    (bytes, memory)
}

impl History {
    fn new(seed: u64) -> Self {
        let root = scratch();
        let recorder = Recorder::new(root.path());
        let (random, lives) = (seed | 1, Vec::new());
        let (rolling, working) = (None, None);
        History { root, recorder, rolling, working, random, lives, imports: 0, archive: archive() }
    }

    fn below(&mut self, n: u64) -> u64 {
        next(&mut self.random, n)
    }

    fn open(&self) -> Store {
        Store::open_faulty(&self.root.path().join("store"), self.recorder.clone()).expect("open")
    }

    /// Checkpoints of a job that are there now, as far as is known for certain.
    fn living(&self, job: &str) -> Vec<u64> {
        let there = |life: &&Life| life.job == job && life.committed.is_some() && life.doomed.is_none();
        self.lives.iter().filter(there).map(|life| life.id).collect()
    }

    fn memory_of(&self, job: &str, id: u64) -> Memory {
        let found = self.lives.iter().rfind(|l| (l.job.as_str(), l.id) == (job, id) && l.committed.is_some());
        found.expect("it was committed").memory.clone()
    }

    /// Does something; it may be killed on the way, and then somebody else goes on.
    fn act(&mut self) {
        let dies = self.below(4) == 0;
        let most = self.below(40);
        self.recorder.lives_for(dies.then_some(most));
        let store = self.open();
        let done = match self.below(20) {
            0 | 1 => self.checkpoint(&store, false),
            2..=4 => self.checkpoint(&store, true),
            5 => self.prune(&store, false),
            6 | 7 => self.prune(&store, true),
            8 => self.remove(&store),
            9 => self.import(&store),
            10 => self.remove_job(&store),
            11..=14 => self.roll_on(&store),
            15..=18 => self.page_on(&store),
            _ => self.others(&store),
        };
        assert!(dies || done.is_ok(), "{done:?}");
        drop(store);
        if dies {
            (self.rolling, self.working) = (None, None);
        }
        self.recorder.lives_for(None);
        // Whoever comes next opens the store first.
        drop(self.open());
        self.look_back();
    }

    /// What nobody lived to say is told by the store.
    fn look_back(&mut self) {
        let store = self.open();
        for index in 0..self.lives.len() {
            let Life { job, id, .. } = &self.lives[index];
            let is_last = self.lives[index + 1..].iter().all(|l| (&l.job, l.id) != (job, *id));
            let there = is_last && store.checkpoints(job).is_ok_and(|ids| ids.contains(id));
            let life = &mut self.lives[index];
            if there && life.doomed.is_some() && life.gone.is_none() {
                // It was to be removed, and was not: it may be there on and on, for all we know.
                life.committed = None;
            }
        }
    }

    fn checkpoint(&mut self, store: &Store, incremental: bool) -> Result<()> {
        self.checkpoint_of(store, incremental, None)
    }

    /// With pages that are written already, if there are some.
    fn checkpoint_of(
        &mut self,
        store: &Store,
        incremental: bool,
        written: Option<(&[Extent], &Memory)>,
    ) -> Result<()> {
        let mut writer = store.begin(JOB)?;
        let mut memory = Memory::new();
        let last = self.living(JOB).last().copied().filter(|_| incremental);
        if let Some(last) = last {
            writer.reuse(&store.load(JOB, Some(last))?.pages.extents)?;
            memory = self.memory_of(JOB, last);
        }
        let (pages, seed) = (if last.is_some() { 8 } else { 50 }, 1 + self.below(1 << 20));
        for first in (0..pages).map(|n| if last.is_some() { (n * 13 + seed) % 60 } else { n }) {
            put(&mut writer, first, 1, seed)?;
            memory.insert(first, seed);
        }
        if let Some((extents, changed)) = written {
            writer.share(extents)?;
            memory.extend(changed);
        }
        let (job, id, begun) = (JOB.to_owned(), writer.id(), self.recorder.now());
        self.lives.push(Life { job, id, memory, begun, committed: None, doomed: None, gone: None });
        let mut image = image();
        image.meta.label = Some(format!("with seed {seed}"));
        writer.commit(image)?;
        self.lives.last_mut().expect("just added").committed = Some(self.recorder.now());
        Ok(())
    }

    fn doom(&mut self, job: &str, ids: &[u64]) {
        let now = self.recorder.now();
        let of_these = |l: &&mut Life| l.job == job && ids.contains(&l.id) && l.gone.is_none();
        self.lives.iter_mut().filter(of_these).for_each(|life| life.doomed = life.doomed.or(Some(now)));
    }

    fn bury(&mut self, job: &str, ids: &[u64]) {
        let now = self.recorder.now();
        let of_these = |l: &&mut Life| l.job == job && ids.contains(&l.id) && l.gone.is_none();
        self.lives.iter_mut().filter(of_these).for_each(|life| life.gone = Some(now));
    }

    fn prune(&mut self, store: &Store, rolls: bool) -> Result<()> {
        let mut ids = store.checkpoints(JOB).unwrap_or_default();
        if ids.is_empty() {
            return Ok(());
        }
        let keep = 1 + self.below(3) as usize;
        ids.truncate(ids.len().saturating_sub(keep));
        self.doom(JOB, &ids);
        let freed = if rolls { store.roll(JOB, keep)? } else { store.prune(JOB, keep)? };
        self.bury(JOB, &freed.checkpoints);
        Ok(())
    }

    /// One checkpoint after the other, of which only the newest stay; room is given back now and then.
    fn roll_on(&mut self, store: &Store) -> Result<()> {
        if self.rolling.is_none() {
            let keep = 1 + self.below(3) as usize;
            self.rolling = Some((store.rolling(JOB, keep), keep));
        }
        for _ in 0..1 + self.below(4) {
            self.checkpoint(store, true)?;
            let gives_back = self.below(3) == 0;
            let mut ids = store.checkpoints(JOB)?;
            let Some((_, keep)) = &self.rolling else { continue };
            ids.truncate(ids.len().saturating_sub(*keep));
            self.doom(JOB, &ids);
            let Some((rolling, _)) = &mut self.rolling else { continue };
            assert_eq!(rolling.unlist()?, ids);
            if gives_back {
                rolling.give_back()?;
                // Not before: names that are gone may come back with the power, whole.
                self.bury_doomed(JOB);
            }
        }
        Ok(())
    }

    /// Pages are written to slots that nobody needs, over and over, and a checkpoint points to them there.
    fn page_on(&mut self, store: &Store) -> Result<()> {
        const SLOTS: u64 = 40;
        if self.working.is_none() {
            let working = self.working.insert(store.working(JOB)?);
            working.reserve(0, SLOTS)?;
        }
        let Some(working) = &self.working else { return Ok(()) };
        let permanent = working.permanent()?.expect("nobody else writes");
        let mut free = (0..SLOTS).filter(|slot| !permanent.contains(slot));
        let seed = 1 + next(&mut self.random, 1 << 20);
        let (mut extents, mut changed) = (Vec::new(), Memory::new());
        let mut buffer = vec![0; 2 * PAGE_BYTES];
        let aligned = buffer.as_ptr().align_offset(PAGE_BYTES);
        let page = &mut buffer[aligned..][..PAGE_BYTES];
        for number in (0..5).map(|n| (n * 7 + seed) % 60) {
            let Some(slot) = free.next() else { break };
            fill_page(number, seed, page);
            working.write(slot, page)?;
            let place = Place::Stored {
                segment: working.id(),
                offset: Working::offset(slot),
                length: PAGE as u32,
                block_pages: 1,
                skip: 0,
                codec: Codec::Raw,
                crc: crc32fast::hash(page),
            };
            extents.push(Extent { owner: SPACE, address: number * PAGE, pages: 1, place });
            changed.insert(number, seed);
        }
        self.checkpoint_of(store, true, Some((&extents, &changed)))
    }

    /// What was to go is gone, for all times.
    fn bury_doomed(&mut self, job: &str) {
        let now = self.recorder.now();
        let doomed = |l: &&mut Life| l.job == job && l.doomed.is_some() && l.gone.is_none();
        self.lives.iter_mut().filter(doomed).for_each(|life| life.gone = Some(now));
    }

    fn remove(&mut self, store: &Store) -> Result<()> {
        let ids = store.checkpoints(JOB).unwrap_or_default();
        let index = self.below(ids.len() as u64) as usize;
        let Some(&id) = ids.get(index) else { return Ok(()) };
        self.doom(JOB, &[id]);
        store.remove(JOB, id)?;
        self.bury(JOB, &[id]);
        Ok(())
    }

    fn import(&mut self, store: &Store) -> Result<()> {
        self.imports += 1;
        let (bytes, memory) = self.archive.clone();
        let (job, begun) = (format!("in{}", self.imports), self.recorder.now());
        self.lives.push(Life {
            job: job.clone(),
            id: 1,
            memory,
            begun,
            committed: None,
            doomed: None,
            gone: None,
        });
        let import = Import::open(Cursor::new(bytes)).expect("archive");
        match import.into_store(store, &job, &()) {
            Ok(_) => {
                self.lives.last_mut().expect("just added").committed = Some(self.recorder.now());
                Ok(())
            }
            Err(stillpoint_archive::Error::Store(e)) => Err(e),
            Err(e) => panic!("{e}"),
        }
    }

    fn remove_job(&mut self, store: &Store) -> Result<()> {
        let jobs = store.jobs()?;
        let index = self.below(jobs.len() as u64) as usize;
        let Some(job) = jobs.get(index) else { return Ok(()) };
        let ids = store.checkpoints(job)?;
        self.doom(job, &ids);
        if job == JOB {
            (self.rolling, self.working) = (None, None);
        }
        store.remove_job(job)?;
        self.bury(job, &ids);
        Ok(())
    }

    /// What is no checkpoint: tails, hints, what rolling has left.
    fn others(&mut self, store: &Store) -> Result<()> {
        store.keep_tail(JOB, 1, "/some/file".as_ref(), 5, &mut &b"the tail"[..])?;
        if let Some(&id) = self.living(JOB).last() {
            let checkpoint = store.load(JOB, Some(id))?;
            let wanted = [Range { start: 0, len: 8 * PAGE }];
            store.keep_touch_set(&checkpoint, &wanted, Sources::RESTORES)?;
        }
        store.end_rolling(JOB)
    }

    /// Checks a disk on which so much had been done.
    fn check(&self, path: &Path, at: usize, thorough: bool) {
        let store = Store::open(path).expect("it opens");
        let mut found: BTreeMap<(String, u64), bool> = BTreeMap::new();
        for job in store.jobs().expect("jobs") {
            let ids = store.checkpoints(&job).expect("checkpoints");
            found.extend(ids.into_iter().map(|id| ((job.clone(), id), false)));
        }
        for life in &self.lives {
            let key = (life.job.clone(), life.id);
            let is_past = |moment: Option<usize>| moment.is_some_and(|moment| moment <= at);
            let must = is_past(life.committed) && !is_past(life.doomed);
            let may = life.begun <= at && !is_past(life.gone);
            let known = found.get_mut(&key);
            assert!(known.is_some() || !must, "{}@{} is gone", life.job, life.id);
            if let Some(known) = known.filter(|_| may) {
                let is_this = holds(&store, &life.job, life.id, &life.memory);
                assert!(is_this || !must, "{}@{} is another one", life.job, life.id);
                *known |= is_this;
            }
        }
        let unknown: Vec<_> = found.iter().filter(|(_, known)| !**known).collect();
        assert!(unknown.is_empty(), "nobody has committed these: {unknown:?}");
        for job in store.jobs().expect("jobs") {
            assert_no_leftovers(&store, &job);
        }
        let mut copies = crate::common::names(&path.join("files"));
        copies.retain(|name| name != "lock" && name != "settled");
        let imported = found.keys().any(|(job, _)| job != JOB);
        assert!(copies.len() == usize::from(imported), "copies: {copies:?}, {found:?}");
        if imported {
            let copy = path.join("files").join(&copies[0]).join("program");
            assert_eq!(std::fs::read(copy).expect("copy"), vec![7; 9000]);
        }
        if thorough {
            go_on(&store);
        }
    }
}

/// The next checkpoints succeed, too.
fn go_on(store: &Store) {
    let memory = memory(3, 20, 1234);
    let next = checkpoint(store, JOB, &memory).expect("the next one");
    store.prune(JOB, 2).expect("prune");
    assert_holds(store, JOB, next.id, &memory);
    assert_no_leftovers(store, JOB);
}

/// Whether a checkpoint has exactly this memory.
fn holds(store: &Store, job: &str, id: u64, expected: &Memory) -> bool {
    let checkpoint = store.load(job, Some(id)).unwrap_or_else(|e| panic!("{job}@{id}: {e}"));
    let mut left = expected.len();
    let mut right = vec![0; PAGE_BYTES];
    checkpoint.pages.extents.iter().all(|extent| {
        let mut bytes = vec![0; extent.len() as usize];
        checkpoint.reader.read(extent, &mut bytes).expect("read");
        bytes.chunks_exact(PAGE_BYTES).enumerate().all(|(i, page)| {
            let number = extent.address / PAGE + i as u64;
            left = left.saturating_sub(1);
            expected.get(&number).is_some_and(|seed| {
                fill_page(number, *seed, &mut right);
                page == right
            })
        })
    }) && left == 0
}

/// One history, cut at every moment, in as many ways as there are threads. Returns how many disks were looked at.
fn cut_everywhere(seed: u64) -> usize {
    let mut history = History::new(seed);
    for _ in 0..STEPS {
        history.act();
    }
    let play = |way| play(&history, seed, way);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|way| scope.spawn(move || play(way))).collect();
        threads.into_iter().map(|thread| thread.join().expect("all disks are as they should be")).sum()
    })
}

/// Plays a history back and cuts it at every moment, in one of many ways.
fn play(history: &History, seed: u64, way: u64) -> usize {
    let mut disk = Disk::of(&history.recorder);
    let mut random = (seed ^ (way << 32) ^ 0x9e37_79b9_7f4a_7c15) | 1;
    let mut looked = 0;
    let place = scratch();
    loop {
        let loss = Loss::ALL[next(&mut random, Loss::ALL.len() as u64) as usize];
        let path: PathBuf = place.path().join(looked.to_string());
        disk.rebuild(&path, loss, &mut |n| next(&mut random, n));
        let store = path.join("store");
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            history.check(&store, disk.at(), looked % 40 == 0);
        }));
        if let Err(panic) = outcome {
            eprintln!("seed {seed}, way {way}, cut at {} of {loss:?}", disk.at());
            std::panic::resume_unwind(panic);
        }
        std::fs::remove_dir_all(&path).expect("remove");
        looked += 1;
        if !disk.step() {
            return looked;
        }
    }
}

#[test]
fn power_is_cut_at_any_moment() {
    let wanted = std::env::var("STILLPOINT_POWER_CUTS").ok().and_then(|n| n.parse().ok()).unwrap_or(CUTS);
    let first: u64 = std::env::var("STILLPOINT_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let (mut looked, mut seeds) = (0, 0);
    while looked < wanted {
        looked += cut_everywhere((first + seeds) * 7_919);
        seeds += 1;
        eprintln!("{looked} disks of {seeds} histories");
    }
}
