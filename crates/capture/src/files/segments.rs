//! System V shared memory that the target is attached to.
//!
//! The kernel tells such a mapping by its file: its name is `/SYSVkkkkkkkk`, with the key that the segment was made
//! with, and its inode number is the segment's id. A segment counts its attachments, one for each mapping of it in any
//! process: if there are more than the captured processes have, somebody else is attached.

use super::memory::internal_device;
use crate::builder::Source;
use crate::{Builder, Content, Result};
use rustix::fs::{AtFlags, statat};
use std::os::fd::OwnedFd;
use stillpoint_image::{Backing, MemoryObject, Owner, PAGE, Segment};
use stillpoint_linux::proc::{self, Proc, Smap, VmFlags, Vma};
use stillpoint_linux::{Error, sysv};

const HUGETLBFS: u64 = 0x9584_58f6;

/// A segment that captured processes are attached to.
#[derive(Debug)]
pub struct Attached {
    row: u32,
    what: String,
    /// Mappings of it in the captured processes.
    here: u64,
    /// Mappings of it in all processes.
    anywhere: u64,
}

/// Whether a mapping is an attachment of a segment, and not one of a deleted file of such a name.
pub fn is_attachment(process: &Proc, vma: &Vma) -> bool {
    let called_so = vma.name.starts_with(b"/SYSV") && vma.shared && vma.deleted;
    called_so
        && statat(process, vma.link_name(), AtFlags::empty()).is_ok_and(|s| {
            // Segments of huge pages are on an internal file system for that size of page.
            s.st_nlink == 0 && (Some(s.st_dev) == internal_device() || s.st_blksize as u64 > PAGE)
        })
}

/// What stands behind an attachment; `None` if it was refused.
pub fn attachment(builder: &mut Builder, process: &Proc, smap: &Smap, what: &str) -> Result<Option<Backing>> {
    let vma = &smap.vma;
    let found = match i32::try_from(vma.ino) {
        Ok(id) => segment_of(builder, process.pid(), id)?.map(|segment| (id, segment)),
        Err(_) => None,
    };
    let name = name_of(&vma.name);
    let (Some((id, segment)), Some(name)) = (found, name) else {
        let why = "it is System V shared memory that has no such segment here";
        builder.refuse(what, why, "it may be in another IPC namespace");
        return Ok(None);
    };
    let file = process.open_file(&vma.link_name())?;
    let namespace = builder.namespaces.ipc_row(process.pid());
    let Some(row) = row(builder, namespace, id, name, &segment, file, what)? else { return Ok(None) };
    let object = &builder.image.objects[row as usize];
    let size = object.size.next_multiple_of(object.huge_page.max(PAGE));
    if vma.offset.checked_add(vma.len()).is_none_or(|end| end > size) {
        builder.refuse(what, "it was made larger than the segment that it is attached to", "");
        return Ok(None);
    }
    let known = builder.segments.iter_mut().find(|s| s.row == row);
    match known {
        Some(known) => (known.here, known.anywhere) = (known.here + 1, segment.attachments),
        None => builder.segments.push(Attached {
            row,
            what: format!("shared memory segment {id} ({})", String::from_utf8_lossy(&vma.name)),
            here: 1,
            anywhere: segment.attachments,
        }),
    }
    let may_write = smap.flags.contains(VmFlags::MAY_WRITE);
    Ok(Some(Backing::Segment { object: row, offset: vma.offset, may_write }))
}

/// A segment of the IPC namespace that a process is in.
fn segment_of(builder: &Builder, pid: u32, id: i32) -> Result<Option<sysv::Segment>> {
    Ok(builder.namespaces.in_ipc_of(pid, || sysv::segment(id))?)
}

/// Captures a segment of one of the program's own namespaces that nobody is attached to.
pub(crate) fn unattached(
    builder: &mut Builder,
    namespace: u32,
    id: i32,
    segment: &sysv::Segment,
    file: OwnedFd,
) -> Result<()> {
    let what = format!("shared memory segment {id} (key {:#x})", segment.key);
    row(builder, Some(namespace), id, segment.key, segment, file, &what).map(drop)
}

/// The key in `/SYSVkkkkkkkk`.
fn name_of(name: &[u8]) -> Option<i32> {
    let digits = std::str::from_utf8(name.strip_prefix(b"/SYSV")?).ok()?;
    u32::from_str_radix(digits, 16).ok().map(|key| key as i32)
}

/// Row of a segment, one for each id; its contents are stored once.
fn row(
    builder: &mut Builder,
    namespace: Option<u32>,
    id: i32,
    name: i32,
    segment: &sysv::Segment,
    file: OwnedFd,
    what: &str,
) -> Result<Option<u32>> {
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call(format!("fstat {what}"), e))?;
    let fs = rustix::fs::fstatfs(&file).map_err(|e| Error::call(format!("fstatfs {what}"), e))?;
    let same = stat.st_ino == id as u64 && (segment.marked || segment.key == name);
    if !same || (stat.st_size as u64) < segment.size || segment.size == 0 {
        builder.refuse(
            what,
            "the segment of its number is another one",
            "it may be in another IPC namespace",
        );
        return Ok(None);
    }
    let huge_page = if fs.f_type as u64 == HUGETLBFS { fs.f_bsize as u64 } else { 0 };
    // Inode numbers of segments are their ids, which may be those of memfds on the same device.
    let device = u64::MAX - namespace.map_or(0, |row| u64::from(row) + 1);
    let (row, new) = builder.object(device, id as u64, || MemoryObject {
        size: stat.st_size as u64,
        huge_page,
        mode: segment.mode,
        uid: segment.owner.0,
        gid: segment.owner.1,
        segment: Some(Segment {
            id,
            key: segment.key,
            name,
            creator_uid: segment.creator.0,
            creator_gid: segment.creator.1,
            locked: segment.locked,
            marked: segment.marked,
            size: segment.size,
            namespace,
        }),
        ..MemoryObject::default()
    });
    if new {
        let (owner, what) = (Owner::Object(row), what.to_owned());
        builder.contents.push(Content { owner, source: Source::File(file), ranges: None, what });
    }
    Ok(Some(row))
}

/// Refuses segments that others are attached to, once the mappings of all captured processes are known.
pub fn refuse_shared(builder: &mut Builder, captured: &[u32]) {
    for attached in std::mem::take(&mut builder.segments) {
        if attached.here > attached.anywhere {
            // One of them attached another one of that id before it entered its namespace.
            let why = "a process of the program is attached to it from another IPC namespace";
            builder.refuse(&attached.what, why, "detach (shmdt) before entering a new IPC namespace");
        }
        if attached.here < attached.anywhere {
            let segment = builder.image.objects[attached.row as usize].segment.as_ref();
            let id = segment.map_or(0, |s| s.id);
            let by = match other(id, captured) {
                Some(pid) => format!("process {pid} ({})", comm(pid)),
                None => "another process".into(),
            };
            let why = format!("it is shared with {by}, which is attached to it as well");
            builder.refuse(&attached.what, why, "end the other process, or let it detach (shmdt)");
        }
        builder.segments.push(attached);
    }
    // A process that was attached when it left the namespace.
    let missing = |(row, id): &(u32, i32)| {
        let segments = builder.image.objects.iter().filter_map(|o| o.segment.as_ref());
        !segments.into_iter().any(|s| s.namespace == Some(*row) && s.id == *id)
    };
    let missing: Vec<(u32, i32)> = builder.namespaces.attached_segments().filter(missing).collect();
    for (_, id) in missing {
        let why = "a process outside of the program is attached to it";
        builder.refuse(format!("shared memory segment {id}"), why, "let that process detach (shmdt)");
    }
}

/// A process besides the captured ones that is attached to a segment.
fn other(id: i32, captured: &[u32]) -> Option<u32> {
    let pids = proc::processes().unwrap_or_default();
    pids.into_iter().filter(|pid| !captured.contains(pid)).find(|pid| {
        let maps = Proc::process(*pid).and_then(|p| p.maps()).unwrap_or_default();
        maps.iter().any(|v| v.ino == id as u64 && v.shared && v.deleted && v.name.starts_with(b"/SYSV"))
    })
}

fn comm(pid: u32) -> String {
    let comm = Proc::process(pid).and_then(|p| p.comm()).unwrap_or_default();
    String::from_utf8_lossy(&comm).escape_debug().to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_keys() {
        assert_eq!(name_of(b"/SYSV00000000"), Some(0));
        assert_eq!(name_of(b"/SYSVdeadbeef"), Some(0xdead_beef_u32 as i32));
        assert_eq!(name_of(b"/SYSV"), None);
        assert_eq!(name_of(b"/SYSVdeadbeef0"), None);
        assert_eq!(name_of(b"/dev/zero"), None);
    }
}
