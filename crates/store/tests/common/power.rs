//! A disk whose power may be cut: what a store does to it is recorded, and what can be left of it at any instant is rebuilt.
//!
//! Durable is what was synced, and nothing else: contents of files by their own sync, names by that of their folder. Of all that was
//! begun and not synced, anything may be there or not, in any order; a write sector by sector. Only what has one name in common is
//! in order, and a rename is there as a whole or not at all.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use stillpoint_store::{Change, Fault, Op};

const PAGE: u64 = 4096;
const SECTOR: usize = 512;

/// What a store does, as it begins and ends.
pub struct Recorder {
    root: PathBuf,
    log: Mutex<Vec<Entry>>,
    /// Changes that are still let through, before all fail.
    left: Mutex<Option<u64>>,
}

#[derive(Clone, Debug)]
enum Entry {
    Begins(u64, Kept),
    Ended(u64, bool),
}

/// A change, with paths from the root on.
#[derive(Clone, Debug)]
enum Kept {
    MakeFolder(PathBuf),
    Create(PathBuf),
    Write(PathBuf, u64, Arc<Vec<u8>>),
    /// At least so long.
    Extend(PathBuf, u64),
    Truncate(PathBuf, u64),
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Recorder {
    pub fn new(root: &Path) -> Arc<Self> {
        Arc::new(Recorder { root: root.to_owned(), log: Mutex::default(), left: Mutex::default() })
    }

    /// How much has been recorded.
    pub fn now(&self) -> usize {
        self.log.lock().expect("log").len()
    }

    /// From now on only so many changes are made, and then none any more: whoever makes them has been killed. Or all again.
    pub fn lives_for(&self, changes: Option<u64>) {
        *self.left.lock().expect("left") = changes;
    }

    fn within(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root).unwrap_or_else(|_| panic!("{} is outside", path.display())).to_owned()
    }
}

impl Fault for Recorder {
    fn before(&self, _: Op, _: &Path) -> io::Result<()> {
        match &mut *self.left.lock().expect("left") {
            Some(0) => Err(io::ErrorKind::StorageFull.into()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn begins(&self, change: Change<'_>) -> u64 {
        let path = |path: &Path| self.within(path);
        let kept = match change {
            Change::MakeFolder(p) => Kept::MakeFolder(path(p)),
            Change::Create(p) => Kept::Create(path(p)),
            Change::Write { path: p, offset, bytes } => {
                Kept::Write(path(p), offset, Arc::new(bytes.to_vec()))
            }
            Change::Preallocate { path: p, end } => Kept::Extend(path(p), end),
            Change::Free { path: p, from, len } => {
                Kept::Write(path(p), from, Arc::new(vec![0; len as usize]))
            }
            Change::Truncate { path: p, len } => Kept::Truncate(path(p), len),
            Change::Sync(p) | Change::SyncFolder(p) => Kept::Sync(path(p)),
            Change::Rename { from, to } => Kept::Rename(path(from), path(to)),
            Change::Remove(p) | Change::RemoveTree(p) => Kept::Remove(path(p)),
        };
        let mut log = self.log.lock().expect("log");
        let number = log.len() as u64;
        log.push(Entry::Begins(number, kept));
        number
    }

    fn boot(&self) -> Option<String> {
        Some("the boot before the power cut".into())
    }

    fn has_ended(&self, number: u64, done: bool) {
        self.log.lock().expect("log").push(Entry::Ended(number, done));
    }
}

/// Contents of a file.
#[derive(Clone, Default)]
struct Contents {
    pages: BTreeMap<u64, Arc<Vec<u8>>>,
    len: u64,
}

impl Contents {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let (page, within) = (at / PAGE, (at % PAGE) as usize);
            let n = (PAGE as usize - within).min(bytes.len() - done);
            let whole = self.pages.entry(page).or_insert_with(|| Arc::new(vec![0; PAGE as usize]));
            Arc::make_mut(whole)[within..within + n].copy_from_slice(&bytes[done..done + n]);
            done += n;
        }
        self.len = self.len.max(offset + bytes.len() as u64);
    }

    fn truncate(&mut self, len: u64) {
        if len < self.len {
            self.pages.retain(|page, _| page * PAGE < len);
            if let Some(last) = self.pages.get_mut(&(len / PAGE)) {
                Arc::make_mut(last)[(len % PAGE) as usize..].fill(0);
            }
        }
        self.len = len;
    }

    fn apply(&mut self, change: &Data) {
        match change {
            Data::Write(offset, bytes) => self.write(*offset, bytes),
            Data::Extend(end) => self.len = self.len.max(*end),
            Data::Truncate(len) => self.truncate(*len),
        }
    }
}

#[derive(Clone)]
enum Data {
    Write(u64, Arc<Vec<u8>>),
    Extend(u64),
    Truncate(u64),
}

#[derive(Clone)]
enum Name {
    Set(String, usize),
    Unset(String),
    Rename(String, String, usize),
}

impl Name {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Name::Set(name, node) => drop(names.insert(name.clone(), *node)),
            Name::Unset(name) => drop(names.remove(name)),
            Name::Rename(from, to, node) => {
                names.remove(from);
                names.insert(to.clone(), *node);
            }
        }
    }

    fn touches(&self) -> Vec<&String> {
        match self {
            Name::Set(name, _) | Name::Unset(name) => vec![name],
            Name::Rename(from, to, _) => vec![from, to],
        }
    }
}

/// A change that is not durable yet.
#[derive(Clone)]
struct Pending<T> {
    number: u64,
    ended: bool,
    what: T,
}

enum Node {
    File { durable: Contents, pending: Vec<Pending<Data>> },
    Folder { now: BTreeMap<String, usize>, durable: BTreeMap<String, usize>, pending: Vec<Pending<Name>> },
}

/// How much of what was not synced is there.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    /// All: the processes were killed, the machine was not.
    Nothing,
    /// None of it.
    Everything,
    /// All that was begun before some moment.
    Late,
    /// Names are, contents are not.
    Contents,
    /// Contents are, names are not.
    Names,
    /// Anything.
    Anything,
}

impl Loss {
    pub const ALL: [Loss; 6] =
        [Loss::Nothing, Loss::Everything, Loss::Late, Loss::Contents, Loss::Names, Loss::Anything];
}

/// The disk, as far as a record of it was played back.
pub struct Disk {
    log: Vec<Entry>,
    /// Changes that did nothing.
    vain: BTreeSet<u64>,
    at: usize,
    nodes: Vec<Node>,
    /// What a sync that is under way makes durable: node, and changes.
    syncs: HashMap<u64, (usize, Vec<u64>)>,
    /// Where a change that is under way is pending.
    under_way: HashMap<u64, Vec<usize>>,
}

impl Disk {
    pub fn of(recorder: &Recorder) -> Self {
        let log = recorder.log.lock().expect("log").clone();
        let vain = log.iter().filter_map(|e| match e {
            Entry::Ended(number, false) => Some(*number),
            _ => None,
        });
        let root = Node::Folder { now: BTreeMap::new(), durable: BTreeMap::new(), pending: Vec::new() };
        Disk {
            vain: vain.collect(),
            log,
            at: 0,
            nodes: vec![root],
            syncs: HashMap::new(),
            under_way: HashMap::new(),
        }
    }

    /// Plays back one more entry; `false` if there is none.
    pub fn step(&mut self) -> bool {
        let Some(entry) = self.log.get(self.at).cloned() else { return false };
        self.at += 1;
        match entry {
            Entry::Begins(number, kept) if !self.vain.contains(&number) => self.begin(number, kept),
            Entry::Ended(number, true) => self.end(number),
            _ => {}
        }
        true
    }

    /// How much was played back.
    pub fn at(&self) -> usize {
        self.at
    }

    fn find(&self, path: &Path) -> usize {
        path.components().fold(0, |node, part| match (&self.nodes[node], part) {
            (Node::Folder { now, .. }, Component::Normal(name)) => *now
                .get(name.to_str().expect("name"))
                .unwrap_or_else(|| panic!("{} is not there", path.display())),
            _ => node,
        })
    }

    fn data(&mut self, number: u64, path: &Path, what: Data) {
        let node = self.find(path);
        if let Node::File { pending, .. } = &mut self.nodes[node] {
            pending.push(Pending { number, ended: false, what });
            self.under_way.entry(number).or_default().push(node);
        }
    }

    fn name(&mut self, number: u64, folder: usize, what: Name) {
        if let Node::Folder { now, pending, .. } = &mut self.nodes[folder] {
            what.apply(now);
            pending.push(Pending { number, ended: false, what });
            self.under_way.entry(number).or_default().push(folder);
        }
    }

    fn begin(&mut self, number: u64, kept: Kept) {
        let parent = |disk: &Self, path: &Path| disk.find(path.parent().expect("parent"));
        let name = |path: &Path| path.file_name().and_then(|n| n.to_str()).expect("name").to_owned();
        match kept {
            Kept::MakeFolder(path) => {
                let folder = parent(self, &path);
                let new =
                    Node::Folder { now: BTreeMap::new(), durable: BTreeMap::new(), pending: Vec::new() };
                self.nodes.push(new);
                self.name(number, folder, Name::Set(name(&path), self.nodes.len() - 1));
            }
            Kept::Create(path) => {
                let folder = parent(self, &path);
                self.nodes.push(Node::File { durable: Contents::default(), pending: Vec::new() });
                self.name(number, folder, Name::Set(name(&path), self.nodes.len() - 1));
            }
            Kept::Write(path, offset, bytes) => self.data(number, &path, Data::Write(offset, bytes)),
            Kept::Extend(path, end) => self.data(number, &path, Data::Extend(end)),
            Kept::Truncate(path, len) => self.data(number, &path, Data::Truncate(len)),
            Kept::Rename(from, to) => {
                let (folder, node) = (parent(self, &from), self.find(&from));
                if from.parent() == to.parent() {
                    return self.name(number, folder, Name::Rename(name(&from), name(&to), node));
                }
                // From one folder to another: one may know and the other not.
                let there = parent(self, &to);
                self.name(number, there, Name::Set(name(&to), node));
                self.name(number, folder, Name::Unset(name(&from)));
            }
            Kept::Remove(path) => {
                let (folder, node) = (parent(self, &path), self.find(&path));
                self.remove_within(number, node);
                self.name(number, folder, Name::Unset(name(&path)));
            }
            Kept::Sync(path) => {
                let node = self.find(&path);
                let ended = match &self.nodes[node] {
                    Node::File { pending, .. } => ended(pending),
                    Node::Folder { pending, .. } => ended(pending),
                };
                self.syncs.insert(number, (node, ended));
            }
        }
    }

    fn remove_within(&mut self, number: u64, node: usize) {
        let Node::Folder { now, .. } = &self.nodes[node] else { return };
        for (name, inner) in now.clone() {
            self.remove_within(number, inner);
            self.name(number, node, Name::Unset(name));
        }
    }

    fn end(&mut self, number: u64) {
        if let Some((node, synced)) = self.syncs.remove(&number) {
            match &mut self.nodes[node] {
                Node::File { durable, pending } => settle(pending, &synced, |data| durable.apply(data)),
                Node::Folder { durable, pending, .. } => settle(pending, &synced, |name| name.apply(durable)),
            }
        }
        for node in self.under_way.remove(&number).unwrap_or_default() {
            match &mut self.nodes[node] {
                Node::File { pending, .. } => mark(pending, number),
                Node::Folder { pending, .. } => mark(pending, number),
            }
        }
    }

    /// Rebuilds in an empty folder what may be left if the power is cut now.
    pub fn rebuild(&self, at: &Path, loss: Loss, random: &mut impl FnMut(u64) -> u64) {
        let before = random(self.at as u64 + 1);
        let mut is_there = |number: u64, is_name: bool| match loss {
            Loss::Nothing => true,
            Loss::Everything => false,
            Loss::Late => number < before,
            Loss::Contents => is_name,
            Loss::Names => !is_name,
            Loss::Anything => random(2) == 0,
        };
        let mut left = vec![(0, at.to_owned())];
        let mut files = Vec::new();
        while let Some((node, path)) = left.pop() {
            match &self.nodes[node] {
                Node::File { .. } => files.push((node, path)),
                Node::Folder { durable, pending, .. } => {
                    fs::create_dir_all(&path).expect("folder");
                    let names = names_left(durable, pending, &mut is_there);
                    left.extend(names.into_iter().map(|(name, node)| (node, path.join(name))));
                }
            }
        }
        for (node, path) in files {
            let Node::File { durable, pending } = &self.nodes[node] else { continue };
            let mut contents = durable.clone();
            for change in pending {
                match loss {
                    Loss::Anything | Loss::Contents => tear(&mut contents, &change.what, loss, random),
                    Loss::Late if change.number == before => {
                        tear(&mut contents, &change.what, Loss::Anything, random)
                    }
                    Loss::Late if change.number < before => contents.apply(&change.what),
                    Loss::Nothing | Loss::Names => contents.apply(&change.what),
                    Loss::Late | Loss::Everything => {}
                }
            }
            let file = File::create(&path).expect("file");
            file.set_len(contents.len).expect("length");
            for (page, bytes) in &contents.pages {
                let n = (contents.len.saturating_sub(page * PAGE)).min(PAGE) as usize;
                file.write_all_at(&bytes[..n], page * PAGE).expect("write");
            }
        }
    }
}

fn ended<T>(pending: &[Pending<T>]) -> Vec<u64> {
    pending.iter().filter(|p| p.ended).map(|p| p.number).collect()
}

fn mark<T>(pending: &mut [Pending<T>], number: u64) {
    pending.iter_mut().filter(|p| p.number == number).for_each(|p| p.ended = true);
}

fn settle<T>(pending: &mut Vec<Pending<T>>, synced: &[u64], mut apply: impl FnMut(&T)) {
    pending.retain(|p| {
        let is_synced = synced.contains(&p.number);
        if is_synced {
            apply(&p.what);
        }
        !is_synced
    });
}

/// Names after some of the changes; what follows one that is not there, and has a name in common with it, is not there either.
fn names_left(
    durable: &BTreeMap<String, usize>,
    pending: &[Pending<Name>],
    is_there: &mut impl FnMut(u64, bool) -> bool,
) -> BTreeMap<String, usize> {
    let mut names = durable.clone();
    let mut lost: BTreeSet<&String> = BTreeSet::new();
    for change in pending {
        let touched = change.what.touches();
        if touched.iter().any(|name| lost.contains(name)) || !is_there(change.number, true) {
            lost.extend(touched);
        } else {
            change.what.apply(&mut names);
        }
    }
    names
}

/// Some sectors of a write, the new length or the old one.
fn tear(contents: &mut Contents, change: &Data, loss: Loss, random: &mut impl FnMut(u64) -> u64) {
    let is_lost = matches!(loss, Loss::Contents);
    match change {
        Data::Write(offset, bytes) => {
            let how = if is_lost { 0 } else { random(4) };
            for (i, sector) in bytes.chunks(SECTOR).enumerate() {
                if how == 1 || how > 1 && random(2) == 0 {
                    contents.write(offset + (i * SECTOR) as u64, sector);
                }
            }
            if random(2) == 0 {
                contents.len = contents.len.max(offset + bytes.len() as u64);
            }
        }
        other if random(2) == 0 => contents.apply(other),
        _ => {}
    }
}
