//! System V shared memory that the target is attached to.
//!
//! The kernel tells such a mapping by its file: its name is `/SYSVkkkkkkkk`, with the key that the segment was made
//! with, and its inode number is the segment's id. A segment counts its attachments, one for each mapping of it in any
//! process: if there are more than the captured processes have, somebody else is attached.

use super::memory::{data_ranges, internal_device};
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
        Ok(id) => sysv::segment(id)?.map(|segment| (id, segment)),
        Err(_) => None,
    };
    let name = name_of(&vma.name);
    let (Some((id, segment)), Some(name)) = (found, name) else {
        let why = "it is System V shared memory that has no such segment here";
        builder.refuse(what, why, "it may be in another IPC namespace");
        return Ok(None);
    };
    let file = process.open_file(&vma.link_name())?;
    let Some(row) = row(builder, id, name, &segment, file, what)? else { return Ok(None) };
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

/// The key in `/SYSVkkkkkkkk`.
fn name_of(name: &[u8]) -> Option<i32> {
    let digits = std::str::from_utf8(name.strip_prefix(b"/SYSV")?).ok()?;
    u32::from_str_radix(digits, 16).ok().map(|key| key as i32)
}

/// Row of a segment, one for each id; its contents are stored once.
fn row(
    builder: &mut Builder,
    id: i32,
    name: i32,
    segment: &sysv::Segment,
    file: OwnedFd,
    what: &str,
) -> Result<Option<u32>> {
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call(format!("fstat {what}"), e))?;
    let fs = rustix::fs::fstatfs(&file).map_err(|e| Error::call(format!("fstatfs {what}"), e))?;
    if stat.st_ino != id as u64 || (stat.st_size as u64) < segment.size || segment.size == 0 {
        builder.refuse(
            what,
            "the segment of its number is another one",
            "it may be in another IPC namespace",
        );
        return Ok(None);
    }
    let huge_page = if fs.f_type as u64 == HUGETLBFS { fs.f_bsize as u64 } else { 0 };
    // Inode numbers of segments are their ids, which may be those of memfds on the same device.
    let (row, new) = builder.object(u64::MAX, id as u64, || MemoryObject {
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
        }),
        ..MemoryObject::default()
    });
    if new {
        let ranges = data_ranges(&file, &stat, huge_page)?;
        let what = what.to_owned();
        builder.contents.push(Content { owner: Owner::Object(row), source: file, ranges, what });
    }
    Ok(Some(row))
}

/// Refuses segments that others are attached to, once the mappings of all captured processes are known.
pub fn refuse_shared(builder: &mut Builder, captured: &[u32]) {
    for attached in std::mem::take(&mut builder.segments) {
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
