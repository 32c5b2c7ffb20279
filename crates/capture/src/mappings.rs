//! The mappings of an address space, as rows of the image.

use crate::attributes;
use crate::files;
use crate::regions;
use crate::{Builder, Result};
use std::os::fd::AsFd;
use stillpoint_image::{Backing, Mapping, MappingFlags, Range, Usage};
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::{Proc, Smap, VmFlags};

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
    attributes::target::mappings(builder, process, &smaps);
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
    let memfd = name.strip_prefix(b"/memfd:").map(files::memory::memfd_name);
    let shared_anonymous = vma.shared && (name == SHARED_ANONYMOUS || name.starts_with(b"[anon_shmem:"));
    if memfd.is_some() || (shared_anonymous && vma.deleted) || name.starts_with(b"/anon_hugepage") {
        let what = describe(smap);
        if let Some(holder) = target.outsiders.memory(vma.ino) {
            builder.refuse(what, format!("its memory is shared with {holder}"), "end the other process");
            return Ok(None);
        }
        let file = process.open_file(&vma.link_name())?;
        let object = files::memory_object(builder, memfd, file.as_fd(), &what)?;
        return Ok(Some(Backing::Object { object, offset, may_write }));
    }
    let written = vma.shared && may_write;
    let usage = if written { Usage::Write } else { Usage::Read };
    let range = written.then_some(Range { start: offset, len: vma.len() });
    let Some(file) = files::mapped_file(builder, target, vma, usage, range)? else { return Ok(None) };
    if !file.is_device {
        return Ok(Some(Backing::File { path: file.path, offset, may_write }));
    }
    Ok(Some(Backing::Device { path: file.path, offset }))
}
