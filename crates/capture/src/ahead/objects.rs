//! Objects of shared memory, who has them mapped, and how they are copied.

use super::Member;
use crate::engine::{Copied, politely, put_error};
use crate::files::memory::internal_device;
use crate::files::segments::is_attachment;
use crate::mappings::is_shared_anonymous;
use crate::{Builder, Error, Progress, Result};
use rustix::fs::{Stat, fstat};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};
use stillpoint_image::{Backing, Image, Owner, PAGE, Range};
use stillpoint_linux::{Error as Kernel, digest, sysv};
use stillpoint_store::{Writer, Zeros};

/// Less than this, bytes, is copied in the cut: that takes about as long as to begin to follow a process.
const LITTLE: u64 = 1 << 20;
/// Page tables that following may cost, in all processes: an eighth of what is copied, and so many bytes more.
const TABLES: u64 = 16 << 20;
/// The times of a System V segment are in seconds: after a younger change another one may have the same time.
const SECOND: Duration = Duration::from_secs(2);

/// Device and inode of an object, or the number that stands for System V segments and an id, as in [`Builder::object`].
pub(super) type Key = (u64, u64);

/// A mapping of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mapping {
    pub pid: u32,
    pub start: u64,
    pub end: u64,
    /// Where in the object it begins, bytes.
    pub offset: u64,
}

impl Mapping {
    /// Where it lies in memory.
    pub fn span(&self) -> Range {
        Range { start: self.start, len: self.end - self.start }
    }
}

/// What an object was like at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    size: i64,
    /// Of a segment: when it was attached and detached last.
    attached: Option<(i64, i64)>,
}

/// An object that is copied ahead.
#[derive(Debug)]
pub(super) struct Object {
    /// Under which its pages are stored until it has a row.
    pub owner: Owner,
    pub source: OwnedFd,
    pub stamp: Stamp,
    pub mappings: Vec<Mapping>,
    /// All that may write it are followed.
    pub is_followed: bool,
    /// All that is no hole of it, and perhaps more, where in the object.
    pub data: Vec<Range>,
    /// Of that, what was written since it was copied.
    pub left: Vec<Range>,
    /// What the cut has copied.
    pub copied: Copied,
    /// The cut has seen all that was written: what it did not copy is as it was copied before.
    pub row: Option<u32>,
}

impl Object {
    pub fn is_of(&self, pid: u32) -> bool {
        self.mappings.iter().any(|m| m.pid == pid)
    }

    /// What is known of one; `None` if it would take too many page tables to follow it, or something is just being done to it.
    pub fn open(members: &[Member], key: Key, mappings: Vec<Mapping>, number: u32) -> Result<Option<Self>> {
        let Some(first) = mappings.first() else { return Ok(None) };
        let Some(member) = members.iter().find(|m| m.target.pid == first.pid) else { return Ok(None) };
        let link = format!("map_files/{:x}-{:x}", first.start, first.end);
        let Ok(source) = member.target.process.open_file(&link) else { return Ok(None) };
        let (stat, stamp) = (stat_of(&source)?, stamp(&source, key)?);
        let is_it = stat.st_ino == key.1 && stat.st_nlink == 0;
        let mapped: u64 = mappings.iter().map(|m| m.end - m.start).sum();
        let data = stat.st_blocks as u64 * 512;
        let pays = data >= LITTLE && mapped / 512 <= TABLES + data / 8;
        Ok((is_it && pays && stamp.is_old()).then_some(Object {
            owner: Owner::Object(u32::MAX - number),
            source,
            stamp,
            mappings,
            is_followed: true,
            data: Vec::new(),
            left: Vec::new(),
            copied: Copied::default(),
            row: None,
        }))
    }

    /// Whether it has been resized, or attached elsewhere.
    pub fn changed_since(&self, key: Key) -> Result<bool> {
        Ok(stamp(&self.source, key)? != self.stamp)
    }

    /// Copies what is left.
    pub fn copy(&mut self, writer: &mut Writer, progress: &(dyn Progress + Sync)) -> Result<()> {
        let left = std::mem::take(&mut self.left);
        let fill = |batch: &[Range], buffer: &mut [u8]| {
            progress.advance(buffer.len() as u64);
            read_one_by_one(&self.source, batch, buffer)
        };
        politely(|| writer.put_parallel(self.owner, &left, Zeros::Omit, &fill)).map_err(put_error)
    }

    /// Copies what is left in the cut, at most so many bytes, for row `row`. Tells how many pages.
    pub fn copy_the_rest(&mut self, row: u32, most: u64) -> Result<Option<u64>> {
        let bytes: u64 = self.left.iter().map(|r| r.len).sum();
        if bytes > most {
            return Ok(None);
        }
        let left: Vec<(Range, bool)> = self.left.iter().map(|range| (*range, false)).collect();
        let (source, ranges) = (&self.source, &self.left);
        self.copied.copy_with(&left, |bytes| read_one_by_one(source, ranges, bytes))?;
        self.row = Some(row);
        Ok(Some(bytes / PAGE))
    }

    /// Brings what the cut copied to the store.
    pub fn put(&self, writer: &mut Writer) -> Result<()> {
        self.copied.put(self.owner, writer)
    }
}

impl Stamp {
    /// Whether any later change tells itself.
    fn is_old(&self) -> bool {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let since = |second: i64| now.saturating_sub(Duration::from_secs(second.max(0) as u64));
        self.attached.is_none_or(|(on, off)| since(on.max(off)) > SECOND)
    }
}

/// Shared memory without a name that these processes have mapped, and where.
pub(super) fn objects(members: &[Member], builder: &Builder) -> Result<BTreeMap<Key, Vec<Mapping>>> {
    let mut found: BTreeMap<Key, Vec<Mapping>> = BTreeMap::new();
    for member in members {
        let (pid, process) = (member.target.pid, &member.target.process);
        for vma in process.maps()?.iter().filter(|v| v.shared && v.deleted) {
            let key = match () {
                () if is_shared_anonymous(vma) && Some(vma.dev) == internal_device() => (vma.dev, vma.ino),
                () if vma.name.starts_with(b"/SYSV")
                    && !builder.namespaces.has_ipc_of(pid)
                    && is_attachment(process, vma) =>
                {
                    (u64::MAX, vma.ino)
                }
                () => continue,
            };
            let mapping = Mapping { pid, start: vma.start, end: vma.end, offset: vma.offset };
            found.entry(key).or_default().push(mapping);
        }
    }
    // Of memory that several have it would take more to know who writes.
    let is_theirs = |m: &Mapping| {
        let space =
            members.iter().find(|member| member.target.pid == m.pid).map(|member| member.target.space);
        members.iter().filter(|member| Some(member.target.space) == space).count() > 1
    };
    found.retain(|_, mappings| !mappings.iter().any(is_theirs));
    found.values_mut().for_each(|mappings| mappings.sort_unstable());
    Ok(found)
}

/// Where memory objects are mapped, by their rows.
pub(super) fn mappings_by_row(members: &[Member], image: &Image) -> HashMap<u32, Vec<Mapping>> {
    let mut all: HashMap<u32, Vec<Mapping>> = HashMap::new();
    for member in members {
        let pid = member.target.pid;
        for m in &image.spaces[member.target.space as usize].mappings {
            if let Backing::Object { object, offset, .. } | Backing::Segment { object, offset, .. } =
                m.backing
            {
                let mapping = Mapping { pid, start: m.start, end: m.end, offset };
                all.entry(object).or_default().push(mapping);
            }
        }
    }
    all.values_mut().for_each(|mappings| mappings.sort_unstable());
    all
}

/// Reads ranges, one behind the other.
fn read_one_by_one(source: &OwnedFd, ranges: &[Range], buffer: &mut [u8]) -> Result<(), Kernel> {
    let mut rest = buffer;
    for range in ranges {
        let (now, later) = rest.split_at_mut(range.len as usize);
        digest::read_at(source, range.start, now)?;
        rest = later;
    }
    Ok(())
}

fn stat_of(source: &OwnedFd) -> Result<Stat> {
    Ok(fstat(source).map_err(|e| Kernel::call("fstat shared memory", e))?)
}

pub(super) fn stamp(source: &OwnedFd, key: Key) -> Result<Stamp> {
    let stat = stat_of(source)?;
    let attached = match key {
        (u64::MAX, id) => {
            let segment = i32::try_from(id).ok().map(sysv::segment).transpose()?.flatten();
            let gone = || Error::Failed(format!("there is no shared memory segment {id}"));
            Some(segment.ok_or_else(gone)?.attached_s)
        }
        _ => None,
    };
    Ok(Stamp { size: stat.st_size, attached })
}
