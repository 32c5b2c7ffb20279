//! The mappings of an address space, as rows of the image.

use crate::attributes;
use crate::files;
use crate::regions;
use crate::{Builder, Content, Result};
use rustix::fs::FileType;
use std::os::fd::AsFd;
use stillpoint_image::{Backing, Mapping, MappingFlags, Owner, PAGE, Range, Usage};
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::{Proc, Smap, VmFlags};

/// `/dev/zero` (1:5): mapped privately it is anonymous memory.
const ZERO_DEVICE: u64 = 0x105;
/// What the kernel calls shared anonymous memory.
const SHARED_ANONYMOUS: &[u8] = b"/dev/zero";

/// Captures all mappings of a process.
pub fn capture_mappings(
    builder: &mut Builder,
    target: &files::Target<'_>,
    process: &Proc,
    pagemap: &Pagemap,
) -> Result<Vec<Mapping>> {
    let mut mappings = Vec::new();
    let smaps = process.smaps()?;
    let refused = builder.refusals.len();
    attributes::target::mappings(builder, process, &smaps, false);
    if builder.refusals.len() > refused {
        return Ok(mappings);
    }
    for smap in smaps {
        let Some(backing) = backing(builder, target, process, &smap)? else { continue };
        let guards = match smap.vma.name.starts_with(b"[v") {
            true => Vec::new(),
            false => regions::guards(pagemap, smap.vma.start, smap.vma.end)?,
        };
        mappings.push(Mapping {
            start: smap.vma.start,
            end: smap.vma.end,
            prot: smap.vma.prot,
            shared: smap.vma.shared,
            backing,
            flags: flags(&smap),
            pkey: smap.pkey,
            huge_page: if smap.flags.contains(VmFlags::HUGETLB) { smap.kernel_page_size } else { 0 },
            guards,
            name: anonymous_name(&smap.vma.name),
        });
    }
    Ok(mappings)
}

fn describe(smap: &Smap) -> String {
    let name = String::from_utf8_lossy(&smap.vma.name);
    let name = if name.is_empty() { "anonymous".into() } else { name };
    format!("mapping {:x}-{:x} ({name})", smap.vma.start, smap.vma.end)
}

/// Name given by `PR_SET_VMA_ANON_NAME`, from `[anon:NAME]` or `[anon_shmem:NAME]`.
fn anonymous_name(name: &[u8]) -> Option<stillpoint_image::Bytes> {
    let name = name.strip_prefix(b"[anon:").or_else(|| name.strip_prefix(b"[anon_shmem:"))?;
    Some(name.strip_suffix(b"]")?.to_vec().into())
}

fn flags(smap: &Smap) -> MappingFlags {
    let pairs = [
        (VmFlags::GROWS_DOWN, MappingFlags::GROWS_DOWN),
        (VmFlags::LOCKED, MappingFlags::LOCKED),
        (VmFlags::LOCK_ON_FAULT, MappingFlags::LOCK_ON_FAULT),
        (VmFlags::SEQUENTIAL, MappingFlags::SEQUENTIAL),
        (VmFlags::RANDOM, MappingFlags::RANDOM),
        (VmFlags::DONT_FORK, MappingFlags::DONT_FORK),
        (VmFlags::DONT_DUMP, MappingFlags::DONT_DUMP),
        (VmFlags::WIPE_ON_FORK, MappingFlags::WIPE_ON_FORK),
        (VmFlags::MERGEABLE, MappingFlags::MERGEABLE),
        (VmFlags::HUGE_PAGE, MappingFlags::HUGE_PAGE),
        (VmFlags::NO_HUGE_PAGE, MappingFlags::NO_HUGE_PAGE),
        (VmFlags::NO_RESERVE, MappingFlags::NO_RESERVE),
        (VmFlags::SEALED, MappingFlags::SEALED),
        (VmFlags::ACCOUNT, MappingFlags::ACCOUNTED),
        (VmFlags::DROPPABLE, MappingFlags::DROPPABLE),
    ];
    let mut flags = MappingFlags::empty();
    for (theirs, ours) in pairs {
        flags.set(ours, smap.flags.contains(theirs));
    }
    flags.set(MappingFlags::HEAP, smap.vma.name == b"[heap]");
    flags.set(MappingFlags::STACK, smap.vma.name == b"[stack]");
    flags
}

/// What stands behind a mapping; `None` if it need not be recreated.
fn backing(
    builder: &mut Builder,
    target: &files::Target<'_>,
    process: &Proc,
    smap: &Smap,
) -> Result<Option<Backing>> {
    let vma = &smap.vma;
    let name = vma.name.as_slice();
    let offset = vma.offset;
    let may_write = smap.flags.contains(VmFlags::MAY_WRITE);
    if name == b"[vsyscall]" {
        return Ok(None);
    }
    if name.starts_with(b"[v") {
        return Ok(Some(Backing::Special(String::from_utf8_lossy(name).into_owned())));
    }
    let private_huge = name.starts_with(b"/anon_hugepage") && !vma.shared;
    if vma.ino == 0 || private_huge {
        return Ok(Some(Backing::Anonymous));
    }
    let what = describe(smap);
    let link = process.link(&vma.link_name())?;
    let file = process.open_file(&vma.link_name())?;
    let memfd = link.strip_prefix(b"/memfd:").map(|_| files::memory::memfd_name(&link));
    let shared_anonymous = vma.shared && (name == SHARED_ANONYMOUS || name.starts_with(b"[anon_shmem:"));
    if memfd.is_some() || (shared_anonymous && vma.deleted) || name.starts_with(b"/anon_hugepage") {
        if let Some(holder) = target.outsiders.memory(vma.ino) {
            builder.refuse(what, format!("its memory is shared with {holder}"), "end the other process");
            return Ok(None);
        }
        let object = files::memory::memory_object(builder, memfd, file.as_fd(), &what)?;
        return Ok(Some(Backing::Object { object, offset, may_write }));
    }
    let written = vma.shared && may_write;
    let usage = if written { Usage::Write } else { Usage::Read };
    let Some(path) = files::path_file(builder, &link, &file, usage, &what)? else { return Ok(None) };
    let row = &mut builder.image.paths[path as usize];
    if FileType::from_raw_mode(row.mode) == FileType::CharacterDevice {
        return Ok(Some(match row.rdev == ZERO_DEVICE && !vma.shared {
            true => Backing::Anonymous,
            false => Backing::Device { path, offset },
        }));
    }
    if written && !row.deleted {
        note_range(&mut row.mapped_ranges, offset, vma.len());
    }
    Ok(Some(Backing::File { path, offset, may_write }))
}

/// Adds a range to a list of ranges that do not overlap.
fn note_range(ranges: &mut Vec<Range>, start: u64, len: u64) {
    let mut new = Range { start, len };
    ranges.retain(|r| {
        let apart = r.end() < new.start || r.start > new.end();
        if !apart {
            let end = r.end().max(new.end());
            new.start = r.start.min(new.start);
            new.len = end - new.start;
        }
        apart
    });
    let at = ranges.partition_point(|r| r.start < new.start);
    ranges.insert(at, new);
}

/// Contents of the files that are written through shared mappings: they are part of the program's memory.
pub fn mapped_contents(builder: &mut Builder, process: &Proc, mappings: &[Mapping]) -> Result<()> {
    let mut seen = Vec::new();
    for m in mappings {
        let Backing::File { path, .. } = m.backing else { continue };
        let row = &builder.image.paths[path as usize];
        if row.mapped_ranges.is_empty() || seen.contains(&path) {
            continue;
        }
        seen.push(path);
        let end = row.size.next_multiple_of(PAGE);
        let within = |r: &Range| Range { start: r.start, len: end.saturating_sub(r.start).min(r.len) };
        let ranges = row.mapped_ranges.iter().map(within).filter(|r| r.len > 0).collect();
        let source = process.open_file(&format!("map_files/{:x}-{:x}", m.start, m.end))?;
        let what = format!("shared mapping of {}", row.path);
        builder.contents.push(Content { owner: Owner::File(path), source, ranges, what });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut ranges = Vec::new();
        for (start, len) in [(100, 10), (0, 10), (50, 10), (60, 5), (5, 20), (58, 50)] {
            note_range(&mut ranges, start, len);
        }
        let expected = [(0, 25), (50, 60)].map(|(start, len)| Range { start, len });
        assert_eq!(ranges, expected);
    }
}
