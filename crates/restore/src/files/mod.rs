//! Opening and installing the descriptors of the restored program.
//!
//! | when | what |
//! | --- | --- |
//! | in the controller, before the new process exists | [`open`]: checks all files, then opens or makes every description that can be made outside of it |
//! | in each new process, a copy of ours with a copy of our descriptors, once its memory stands | [`OpenFiles::install`]: brings them to their numbers and closes all others |
//! | when all threads stand | [`OpenFiles::finish`]: what belongs to processes: epoll watches, POSIX locks, owners of signals, timers, files about themselves |
//! | at the very end | [`OpenFiles::write_back`], [`OpenFiles::cut_back`], [`OpenFiles::settle`]; then drop it |

mod addresses;
mod check;
mod clones;
mod connections;
mod created;
mod cutback;
mod datagrams;
mod detour;
mod ended;
mod events;
mod install;
mod kept;
mod locks;
mod messages;
pub mod moves;
mod objects;
mod options;
mod paths;
mod peers;
mod pipes;
mod queues;
mod rehearsal;
mod segments;
mod sockets;
mod standard;
mod streams;
mod terminals;
mod writers;

pub(crate) use objects::fill;
pub(crate) use rehearsal::rehearse;
pub(crate) use standard::window_differs;

use crate::namespaces::Namespaces;
use crate::{Error, FilesPolicy, Options, Pump, Result, Stdio, Streams, TcpPolicy};
use created::Created;
use detour::Detour;
use kept::Kept;
use objects::Recreated;
use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Instant;
use stillpoint_image::{Backing, FileKind, Image, Mapping, OpenFile, Owner, Range, Times};
use stillpoint_linux::proc::Proc;
use stillpoint_linux::program::Run;
use stillpoint_linux::{Error as Kernel, descriptors, memfd};

pub use check::stand_in;
pub use clones::{check_alone, in_common, set_apart, stay_apart};
pub use cutback::{Cut, keep_behind, shorten};
pub use kept::{is_anything_kept, let_go};
pub use streams::{connectable, read_once, shared_inputs, untold};
pub use writers::{Inode, Writer, mapped, writers};

/// A process, as people are told of it.
fn called(process: &Proc) -> String {
    let comm = process.comm().unwrap_or_default();
    format!("process {} ({})", process.pid(), String::from_utf8_lossy(&comm).escape_debug())
}

/// Where contents of objects and files come from.
pub trait Contents: Sync {
    /// Reads at an offset; zeros where nothing is stored.
    fn read(&self, owner: Owner, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// Ranges below `size` outside which there are only zeros. Whoever knows better spares reading holes.
    fn stored(&self, _owner: Owner, size: u64) -> Vec<Range> {
        vec![Range { start: 0, len: size }]
    }
}

/// Takes the tail that is cut off a file: its path, where the tail begins, and its bytes. They must be durable when
/// it returns.
pub type KeepTail<'a> = dyn FnMut(&Path, u64, &mut dyn Read) -> Result<()> + 'a;

/// The open files of the program to be, in our own process.
///
/// Dropping it closes them; until [`OpenFiles::cut_back`] it also removes the names of sockets and FIFOs that were
/// made.
#[derive(Debug)]
pub struct OpenFiles {
    /// The program's own namespaces, in which some of the others are.
    namespaces: Namespaces,
    /// For each row of [`Image::files`]; `None` for what is made in the new process.
    sources: Vec<Option<OwnedFd>>,
    /// For each row of [`Image::objects`].
    objects: Vec<OwnedFd>,
    /// The same of objects with mappings that may never be written, by row; for reading only.
    read_only: HashMap<u32, OwnedFd>,
    segments: segments::Segments,
    queues: queues::Queues,
    /// Files of unix sockets that have no names any more, by row of the socket: handles.
    nameless: HashMap<u32, OwnedFd>,
    /// Sockets whose messages come when all processes are there.
    laden: Vec<messages::Laden>,
    /// Sockets without a connection, by row, that a half of is ended when that is done.
    to_shut_down: Vec<(usize, OwnedFd)>,
    /// What mappings are made from and the process stands in: row of [`Image::paths`], and whether for writing.
    mapped: HashMap<(u32, bool), OwnedFd>,
    /// Holds numbers of descriptions that are made later.
    reserve: OwnedFd,
    cuts: Vec<Cut>,
    /// Descriptions (rows of [`Image::files`]) that stood at the end of a file to which others have written since, and is not cut.
    shared: Vec<usize>,
    write_backs: Vec<cutback::WriteBack>,
    created: Created,
    notes: Vec<String>,
    pumps: Vec<Pump>,
    /// Pipes (rows of [`Image::pipes`]) that lead elsewhere now.
    elsewhere: HashSet<u32>,
    /// Slaves of pseudo-terminals that control a session, by row of [`Image::ptys`].
    terminals: HashMap<u32, OwnedFd>,
    /// Deleted files that were made anew, by handles, with the times that they are given at the end.
    timed: Vec<(OwnedFd, Times)>,
    /// What somebody has kept for the program.
    kept: Option<Kept>,
}

/// Whether what led outside can lead where it is to lead.
///
/// # Errors
/// [`Error::Refused`] with all reasons against it.
pub fn check_streams(image: &Image, options: &Options) -> Result<()> {
    let mut refusals = Vec::new();
    streams::check(image, options, &mut refusals);
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// Opens everything, after [`check_streams`]. Nothing that exists is changed, and all reasons against it are found before anything is made.
/// `waits` hears what takes long.
pub fn open(
    image: &Image,
    contents: &dyn Contents,
    options: &Options,
    waits: &dyn Fn(&str),
) -> Result<OpenFiles> {
    let policy = options.files;
    let mut namespaces = Namespaces::make(image, contents)?;
    let (called, reached) = (image, namespaces.have_mounts().then(|| namespaces.reached(image)));
    let image = reached.as_ref().unwrap_or(called);
    let findings = check::check(image, policy)?;
    let mut refusals = findings.refusals;
    sockets::check(image, &mut refusals);
    segments::check(image, &mut refusals)?;
    queues::check(image, &mut refusals)?;
    if !refusals.is_empty() {
        return Err(Error::Refused(refusals.iter().map(|line| namespaces.told(line)).collect()));
    }
    namespaces.make_of_groups(image)?;
    descriptors::raise_descriptor_limit()?;
    let mut opening = Opening::new(image, namespaces, contents, options, waits)?;
    let (shared, cut) = cutback::shared(image, &findings.grown, options.own_output);
    opening.files.cuts = cutback::cuts(called, image, &cut);
    opening.files.shared = cutback::moved_on(image, &shared);
    opening
        .files
        .notes
        .extend(shared.iter().filter_map(|(row, writer)| cutback::told(called, image, *row, writer)));
    if policy != FilesPolicy::Keep {
        opening.files.write_backs = cutback::write_backs(image);
    }
    paths::remake(&mut opening, &findings.lost)?;
    paths::open(&mut opening)?;
    locks::check(&opening)?;
    opening.files.kept = Kept::take(image, options)?;
    let visit = opening.files.namespaces.visit_network(image)?;
    sockets::open(&mut opening)?;
    drop(visit);
    paths::open_sockets(&mut opening)?;
    opening.make_objects()?;
    pipes::open(&mut opening)?;
    queues::open(&mut opening)?;
    standard::open(&mut opening)?;
    terminals::open(&mut opening)?;
    events::open(&mut opening)?;
    ended::open_handles(&mut opening)?;
    ended::open_files(&mut opening)?;
    paths::open_for_mappings(&mut opening)?;
    opening.finish_objects()?;
    opening.files.namespaces.settle(image)?;
    locks::take(&opening)?;
    // Last: all that was done so far would be events for it.
    events::open_inotify(&mut opening)?;
    events::open_fanotify(&mut opening)?;
    Ok(opening.files)
}

/// The work of [`open`] in progress.
struct Opening<'a> {
    image: &'a Image,
    contents: &'a dyn Contents,
    tcp: TcpPolicy,
    stdio: Stdio,
    streams: &'a Streams,
    joins: bool,
    waits: &'a dyn Fn(&str),
    /// Deleted files, by row; they lose their names when this is dropped.
    deleted: HashMap<u32, Recreated>,
    began: Instant,
    /// What they lie in, where that is gone; goes after them.
    detour: Detour,
    files: OpenFiles,
}

impl<'a> Opening<'a> {
    fn new(
        image: &'a Image,
        namespaces: Namespaces,
        contents: &'a dyn Contents,
        options: &'a Options,
        waits: &'a dyn Fn(&str),
    ) -> Result<Self> {
        let files = OpenFiles {
            namespaces,
            sources: image.files.iter().map(|_| None).collect(),
            objects: Vec::new(),
            read_only: HashMap::new(),
            segments: segments::Segments::default(),
            queues: queues::Queues::default(),
            nameless: HashMap::new(),
            laden: Vec::new(),
            to_shut_down: Vec::new(),
            mapped: HashMap::new(),
            reserve: descriptors::null()?,
            cuts: Vec::new(),
            shared: Vec::new(),
            write_backs: Vec::new(),
            created: Created::default(),
            notes: Vec::new(),
            pumps: Vec::new(),
            elsewhere: HashSet::new(),
            terminals: HashMap::new(),
            timed: Vec::new(),
            kept: None,
        };
        let began = Instant::now();
        let (deleted, detour) = (HashMap::new(), Detour::default());
        let Options { tcp, stdio, ref streams, joins, .. } = *options;
        Ok(Opening { image, contents, tcp, stdio, streams, joins, waits, deleted, began, detour, files })
    }

    /// Rows of open files for which `pick` gives something.
    fn rows<T>(&self, pick: impl Fn(&'a OpenFile) -> Option<T>) -> Vec<(usize, &'a OpenFile, T)> {
        self.image.files.iter().enumerate().filter_map(|(row, f)| Some((row, f, pick(f)?))).collect()
    }

    /// Records the description of a row, with its status flags.
    fn put(&mut self, row: usize, fd: OwnedFd) -> Result<()> {
        set_status_flags(&fd, self.image.files[row].flags)?;
        self.files.sources[row] = Some(fd);
        Ok(())
    }

    fn make_objects(&mut self) -> Result<()> {
        for (row, object) in self.image.objects.iter().enumerate() {
            let made = match &object.segment {
                Some(segment) => {
                    let OpenFiles { segments, namespaces, .. } = &mut self.files;
                    segments.make(namespaces, self.image, row, object, segment, self.contents)?
                }
                None => objects::memory(row as u32, object, self.contents)?,
            };
            // While a mapping could be made writable this seal is not to be had; such as come later cannot be.
            if object.memfd.is_some() && object.seals & memfd::SEAL_WRITE != 0 {
                memfd::add_seals(&made, memfd::SEAL_WRITE)?;
            }
            self.files.objects.push(made);
        }
        for row in never_written(self.image) {
            let object = self.files.objects.get(row as usize).ok_or_else(|| missing("memory object", row))?;
            self.files.read_only.insert(row, descriptors::reopen(object, libc::O_RDONLY)?);
        }
        let of_object = |f: &OpenFile| match f.kind {
            FileKind::Memory(object) => Some(object),
            _ => None,
        };
        let mut given = HashSet::new();
        for (row, file, object) in self.rows(of_object) {
            let source =
                self.files.objects.get(object as usize).ok_or_else(|| missing("memory object", object))?;
            // The description that a memfd is made with does not count as one for writing: it can be executed all the same.
            let is_first = self.image.objects[object as usize].memfd.is_some() && given.insert(object);
            let fd = match is_first && file.flags & libc::O_ACCMODE as u32 == libc::O_RDWR as u32 {
                true => source.try_clone().map_err(|e| Kernel::call("duplicate a descriptor", e))?,
                false => descriptors::reopen(source, open_flags(file.flags))?,
            };
            seek(&fd, file.position)?;
            self.put(row, fd)?;
        }
        Ok(())
    }

    /// Owners, once everything was opened.
    fn finish_objects(&mut self) -> Result<()> {
        for (object, fd) in self.image.objects.iter().zip(&self.files.objects) {
            objects::finish_memory(object, fd)?;
            if let Some(name) = &object.memfd {
                let what = format!("memfd {}", String::from_utf8_lossy(&name.0));
                self.files.notes.extend(objects::give_attributes(fd, &object.attributes, &what));
            }
        }
        for (row, made) in self.deleted.drain() {
            let file = &self.image.paths[row as usize];
            if made.is_the_machines() {
                continue;
            }
            self.files.notes.extend(made.finish(file)?);
            let times = Times { atime_ns: file.atime_ns, mtime_ns: file.mtime_ns };
            self.files.timed.push((made.handle()?, times));
        }
        self.detour = Detour::default();
        Ok(())
    }
}

impl OpenFiles {
    /// The program's own namespaces, which new processes have descriptors of until [`OpenFiles::install`].
    pub fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    /// Mounts what takes processes ([`Namespaces::complete_mounts`]).
    pub fn complete_mounts(&mut self, image: &Image, members: &mut [&mut dyn Run]) -> Result<()> {
        self.namespaces.complete_mounts(image, members)
    }

    /// Descriptor of a file (row of [`Image::paths`]) that mappings are made from, or that the process executes or
    /// stands in; able to write if asked. It has the same number in the new process until [`OpenFiles::install`].
    pub fn mapping_source(&self, path: u32, write: bool) -> Result<i32> {
        let found = self.mapped.get(&(path, write)).or_else(|| self.mapped.get(&(path, true)));
        Ok(found.ok_or_else(|| missing("file", path))?.as_raw_fd())
    }

    /// Descriptor of a memory object (row of [`Image::objects`]) that mappings are made from, able to write if asked.
    pub fn object(&self, object: u32, write: bool) -> Result<i32> {
        if let Some(fd) = self.read_only.get(&object).filter(|_| !write) {
            return Ok(fd.as_raw_fd());
        }
        Ok(self.objects.get(object as usize).ok_or_else(|| missing("memory object", object))?.as_raw_fd())
    }

    /// Slaves of pseudo-terminals that control a session of the program, by row of [`Image::ptys`]. They have the same numbers
    /// in new processes until [`OpenFiles::install`].
    pub fn terminals(&self) -> &HashMap<u32, OwnedFd> {
        &self.terminals
    }

    /// Seals memfds as they were. Once all mappings of them stand: some seals forbid making more.
    pub fn seal(&self, image: &Image) -> Result<()> {
        for (object, fd) in image.objects.iter().zip(&self.objects) {
            if object.memfd.is_some() && object.seals != 0 {
                memfd::add_seals(fd, object.seals)?;
            }
        }
        Ok(())
    }

    /// Gives files times that they had, and forgets the events of inotify and fanotify that the restore itself caused. Right before the program
    /// runs.
    pub fn settle(&mut self, image: &Image) -> Result<()> {
        self.namespaces.settle_mounts(image)?;
        self.settle_pipes_and_sockets(image);
        // Not before all is mapped and filled, which counts as reading and writing.
        let objects = self.objects.iter().zip(&image.objects);
        let objects = objects.filter_map(|(fd, object)| Some((fd, object.times.as_ref()?)));
        for (fd, times) in objects.chain(self.timed.iter().map(|(fd, times)| (fd, times))) {
            if let Err(e) = objects::give_times(fd, times) {
                let note = format!("a memory or deleted file has not the times that it had: {e}");
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
            }
        }
        for (file, source) in image.files.iter().zip(&self.sources) {
            if let (FileKind::Inotify(_) | FileKind::Fanotify(_), Some(fd)) = (&file.kind, source) {
                events::forget_events(fd, file)?;
            }
        }
        Ok(())
    }

    /// Gives pipes and sockets owners, modes and times; where we may not, a note tells.
    fn settle_pipes_and_sockets(&mut self, image: &Image) {
        for (file, source) in image.files.iter().zip(&self.sources) {
            let (what, status) = match file.kind {
                // What leads elsewhere is somebody else's.
                FileKind::Pipe(row) if self.elsewhere.contains(&row) => continue,
                FileKind::Pipe(row) => ("a pipe", image.pipes.get(row as usize).and_then(|p| p.status)),
                FileKind::Socket(row) => ("a socket", image.sockets.get(row as usize).and_then(|s| s.status)),
                _ => continue,
            };
            let (Some(status), Some(fd)) = (status, source) else { continue };
            if let Err(e) = objects::give_status(fd, &status) {
                let note =
                    format!("{what} has not the owner ({}), mode or times that it had: {e}", status.uid);
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
            }
        }
    }

    /// The program is complete: from now on what was kept for it is its own. Right before it runs.
    pub fn release_kept(&mut self) {
        if let Some(kept) = self.kept.take() {
            kept.release();
        }
    }

    /// Files that will be cut back.
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    /// Remarks for the user: what could not be made exactly as it was.
    pub fn notes(&self) -> Vec<String> {
        self.notes.iter().map(|note| self.namespaces.told(note)).collect()
    }

    /// What must be brought to the program, where it was reading from outside and there was something unread.
    pub fn take_pumps(&mut self) -> Vec<Pump> {
        std::mem::take(&mut self.pumps)
    }
}

fn missing(what: &str, row: u32) -> Error {
    Error::Failed(format!("the manifest names {what} {row}, which is not there"))
}

/// `__O_TMPFILE` without what goes with it: the file was made without a name.
const TMPFILE: u32 = 0o20_000_000;

/// Flags for `open(2)` from those that fdinfo shows.
fn open_flags(flags: u32) -> i32 {
    let mut flags = flags as i32;
    if flags as u32 & TMPFILE != 0 {
        flags &= !(TMPFILE as i32 | libc::O_DIRECTORY);
    }
    flags &= !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_ASYNC);
    flags | libc::O_NOCTTY | libc::O_CLOEXEC
}

/// Status flags that `F_SETFL` sets, but `O_ASYNC`, which needs an owner first.
const STATUS: u32 = (libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME) as u32;

fn set_status_flags(fd: impl AsFd, wanted: u32) -> Result<()> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    if wanted & libc::O_PATH as u32 != 0 {
        return Ok(());
    }
    let now = fcntl_getfl(&fd).map_err(|e| Kernel::call("F_GETFL", e))?;
    if now.bits() & STATUS != wanted & STATUS {
        let flags = OFlags::from_bits_retain(now.bits() & !STATUS | wanted & STATUS);
        fcntl_setfl(&fd, flags).map_err(|e| Kernel::call("F_SETFL", e))?;
    }
    Ok(())
}

fn seek(fd: impl AsFd, position: u64) -> Result<()> {
    if position != 0 {
        let to = rustix::fs::SeekFrom::Start(position);
        rustix::fs::seek(fd, to).map_err(|e| Kernel::call(format!("seek to {position}"), e))?;
    }
    Ok(())
}

/// Rows of memory objects of which there are shared mappings that may not be made writable, for they were mapped from descriptors for
/// reading. (Where a seal forbids it already, those that are made again cannot be, either.)
fn never_written(image: &Image) -> HashSet<u32> {
    let mappings = image.spaces.iter().flat_map(|s| &s.mappings).filter(|m| m.shared);
    let row = |m: &Mapping| match m.backing {
        Backing::Object { object, may_write: false, .. } => Some(object),
        _ => None,
    };
    let is_sealed = |row: &u32| {
        let object = image.objects.get(*row as usize);
        object.is_some_and(|object| object.memfd.is_some() && object.seals & memfd::SEAL_WRITE != 0)
    };
    mappings.filter_map(row).filter(|row| !is_sealed(row)).collect()
}

/// Rows of files that mappings of the program need, and whether for writing.
fn mapped_rows(image: &Image) -> Vec<(u32, bool)> {
    let mappings = image.spaces.iter().flat_map(|s| &s.mappings);
    let mut rows: Vec<(u32, bool)> = mappings
        .filter_map(|m| match m.backing {
            Backing::File { path, may_write, .. } => Some((path, may_write && m.shared)),
            Backing::Device { path, .. } => Some((path, m.shared)),
            _ => None,
        })
        .collect();
    rows.extend(image.processes.iter().flat_map(|p| [(p.exe, false), (p.cwd, false), (p.root, false)]));
    rows.sort_unstable();
    rows.dedup();
    rows
}
