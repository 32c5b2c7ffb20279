//! Memfds.

use super::descriptions::Description;
use super::{Scan, paths};
use crate::builder::{AS_PRIVILEGED, Source, Span};
use crate::{Builder, Content, Refusal, Result};
use rustix::fs::SeekFrom;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use stillpoint_image::{Bytes, FileKind, MemoryObject, Owner, PAGE, Range};
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::{Category, Pagemap, Query, Run};
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::{Error, RemoteAddr, memfd};

const HUGETLBFS: u64 = 0x9584_58f6;
const TMPFS: u64 = 0x0102_1994;

/// Whether a description is a memfd: a nameless file of that name on a file system in memory.
pub(crate) fn is_memfd(d: &Description) -> Result<bool> {
    if !d.link.starts_with(b"/memfd:") || d.stat.st_nlink != 0 {
        return Ok(false);
    }
    let fs = rustix::fs::fstatfs(&d.file).map_err(|e| Error::call("fstatfs", e))?;
    Ok(matches!(fs.f_type as u64, TMPFS | HUGETLBFS))
}

/// The file system of memfds, shared anonymous memory and System V shared memory, by its device number.
pub(crate) fn internal_device() -> Option<u64> {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    let look = || rustix::fs::fstat(memfd::create(b"", 0).ok()?).ok().map(|s| s.st_dev);
    *DEVICE.get_or_init(look)
}

/// Whether a description is of shared memory that has no name: it was opened by way of a mapping
/// (`/proc/self/map_files`).
pub(crate) fn is_nameless(d: &Description) -> bool {
    d.stat.st_nlink == 0 && Some(d.stat.st_dev) == internal_device()
}

/// Captures a memfd, or a handle to shared anonymous memory.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    if let Some(holder) = scan.target.outsiders.memory(d.stat.st_ino) {
        let why = format!("its memory is shared with {holder}");
        return scan.refuse(d, why, "end the other process");
    }
    if d.link.starts_with(b"/SYSV") {
        return scan.refuse(
            d,
            "it is a descriptor of System V shared memory",
            "close it before the checkpoint",
        );
    }
    let name = d.link.starts_with(b"/memfd:").then(|| memfd_name(&d.link));
    let row = memory_object(scan.builder, name, d.file.as_fd(), &d.name())?;
    Ok(Some(FileKind::Memory(row)))
}

/// The name given to `memfd_create`, from `/memfd:NAME (deleted)`.
pub fn memfd_name(link: &[u8]) -> &[u8] {
    let name = link.strip_prefix(b"/memfd:").unwrap_or(link);
    name.strip_suffix(b" (deleted)").unwrap_or(name)
}

/// Row of a memory object: a memfd (with its name), or shared anonymous memory (reached through
/// `/proc/PID/map_files`). `file` may be any descriptor of it; contents are read from a description of our own.
pub fn memory_object(
    builder: &mut Builder,
    memfd_name: Option<&[u8]>,
    file: BorrowedFd<'_>,
    what: &str,
) -> Result<u32> {
    let stat = rustix::fs::fstat(file).map_err(|e| Error::call(format!("fstat {what}"), e))?;
    let fs = rustix::fs::fstatfs(file).map_err(|e| Error::call(format!("fstatfs {what}"), e))?;
    let huge_page = if fs.f_type as u64 == HUGETLBFS { fs.f_bsize as u64 } else { 0 };
    let seals = memfd::seals(file)?.unwrap_or(memfd::SEAL_SEAL);
    let object = MemoryObject {
        size: stat.st_size as u64,
        memfd: memfd_name.map(|n| Bytes(n.to_vec())),
        seals,
        huge_page,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        segment: None,
        times: Some(paths::times(&stat)),
        attributes: paths::attributes_of(file, what)?,
    };
    let (row, mut new) = builder.object(stat.st_dev, stat.st_ino, || object.clone());
    let owner = Owner::Object(row);
    let is_mapped = |content: &Content| content.owner == owner && matches!(content.source, Source::Mapped(_));
    if builder.contents.iter().any(is_mapped) {
        // It seemed to be reached by mappings alone.
        builder.image.objects[row as usize] = object;
        builder.contents.retain(|content| !is_mapped(content));
        new = true;
    }
    if new {
        // It is in no folder.
        let is_noticed = builder.noticed.is(Path::new(""), (stat.st_dev, stat.st_ino));
        let Some(source) = Source::of(builder, file, is_noticed, what)? else { return Ok(row) };
        builder.contents.push(Content { owner, source, ranges: None, what: what.to_owned() });
    }
    Ok(row)
}

/// Whether what is behind a mapping can be opened by the privileged alone.
pub(crate) fn is_hidden(process: &Proc, vma: &Vma) -> bool {
    process.open_handle(&vma.link_name()).is_err_and(|e| e.errno() == Some(libc::EPERM))
}

/// The same for an object that only mappings lead to, where the kernel opens it for the privileged alone: it is as much as is mapped of it,
/// and is read there. `None` if it was refused.
pub(crate) fn mapped_object(
    builder: &mut Builder,
    process: &Proc,
    vma: &Vma,
    memfd_name: Option<&[u8]>,
    what: &str,
) -> Result<Option<u32>> {
    if [b"/anon_hugepage".as_slice(), b"/SYSV"].iter().any(|name| vma.name.starts_with(name)) {
        builder.refuse(
            what,
            "what it is, and all that is in it, only the privileged are told",
            AS_PRIVILEGED,
        );
        return Ok(None);
    }
    if !vma.shared {
        let why = "it is a private mapping of memory that only the privileged can open";
        builder.refuse(what, why, AS_PRIVILEGED);
        return Ok(None);
    }
    let memory = Memory::open(process.pid())?;
    if memory.read(RemoteAddr(vma.end - 1), &mut [0]).is_err() {
        let why = "it is mapped beyond its end, and where that is only the privileged are told";
        builder.refuse(what, why, AS_PRIVILEGED);
        return Ok(None);
    }
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (row, new) = builder.object(vma.dev, vma.ino, || MemoryObject {
        size: 0,
        memfd: memfd_name.map(|name| Bytes(name.to_vec())),
        seals: memfd::SEAL_SEAL,
        huge_page: 0,
        mode: 0o777,
        uid,
        gid,
        segment: None,
        times: None,
        attributes: Vec::new(),
    });
    let range = Range { start: vma.offset, len: vma.len() };
    // Huge pages are on a device of their own, and asked of in a process's tables alone.
    let is_memory = Some(vma.dev) == internal_device();
    let (memory, present) = (Arc::new(memory), present(process, vma)?);
    let span = Span { range, address: vma.start, memory, present, is_memory };
    let owner = Owner::Object(row);
    let known = builder.contents.iter_mut().find(|content| content.owner == owner);
    match known.map(|content| &mut content.source) {
        Some(Source::Mapped(spans)) => Arc::make_mut(spans).push(span),
        // A descriptor leads to it, too.
        Some(_) => return Ok(Some(row)),
        None if !new => return Ok(Some(row)),
        None => {
            let source = Source::Mapped(Arc::new(vec![span]));
            builder.contents.push(Content { owner, source, ranges: None, what: what.to_owned() });
        }
    }
    let size = &mut builder.image.objects[row as usize].size;
    *size = (*size).max(range.end());
    Ok(Some(row))
}

/// What of an object a process has in its page tables.
fn present(process: &Proc, vma: &Vma) -> Result<Vec<Range>> {
    let mut runs = Vec::new();
    let query = Query { any: Category::PRESENT, ..Query::default() };
    let pagemap = Pagemap::open(process.pid())?;
    pagemap.scan(RemoteAddr(vma.start), RemoteAddr(vma.end), query, &mut runs)?;
    let in_object = |run: &Run| Range { start: run.start - vma.start + vma.offset, len: run.end - run.start };
    Ok(Range::joined(runs.iter().map(in_object).collect()))
}

/// Of what is read where processes have it mapped, as much as this may be nowhere yet, bytes: to read it makes it.
const EMPTY: u64 = 16 << 20;

/// Where the program could not be asked what there is: refuses what cannot be read without making a lot of memory that the program has not.
pub(super) fn check_empty(spans: &[Span], what: &str) -> Result<()> {
    let sum = |ranges: Vec<Range>| Range::joined(ranges).iter().map(|range| range.len).sum::<u64>();
    let all = sum(spans.iter().map(|span| span.range).collect());
    let there = sum(spans.iter().flat_map(|span| span.present.iter().copied()).collect());
    if all.saturating_sub(there) <= EMPTY {
        return Ok(());
    }
    let why = format!(
        "{} MiB of it may be empty, and only the privileged can look without filling them",
        (all - there) >> 20
    );
    Err(crate::Error::Refused(vec![Refusal { what: what.into(), why, hint: AS_PRIVILEGED.into() }]))
}

/// All of a file, rounded up to pages.
pub(crate) fn whole(file: &OwnedFd) -> Result<Vec<Range>> {
    let size = rustix::fs::fstat(file).map_err(|e| Error::call("fstat", e))?.st_size as u64;
    Ok(if size > 0 { vec![Range { start: 0, len: size.next_multiple_of(PAGE) }] } else { Vec::new() })
}

/// Ranges of a file that are not holes, rounded outwards to pages.
pub(crate) fn data_ranges(file: &OwnedFd) -> Result<Vec<Range>> {
    let size = rustix::fs::fstat(file).map_err(|e| Error::call("fstat", e))?.st_size as u64;
    let fs = rustix::fs::fstatfs(file).map_err(|e| Error::call("fstatfs", e))?;
    let end = size.next_multiple_of(PAGE);
    if fs.f_type as u64 == HUGETLBFS {
        // hugetlbfs does not tell its holes.
        return whole(file);
    }
    let mut ranges: Vec<Range> = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(rustix::io::Errno::INVAL) => 0,
            Err(e) => return Err(Error::call("look for data", e).into()),
        };
        let stop = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap_or(size).max(start + 1);
        let (from, to) = (start / PAGE * PAGE, stop.next_multiple_of(PAGE).min(end));
        match ranges.last_mut() {
            Some(last) if last.end() >= from => last.len = to - last.start,
            _ => ranges.push(Range { start: from, len: to - from }),
        }
        at = stop;
    }
    Ok(ranges)
}
