//! Mappings of files on overlays that show what is there no more.
//!
//! A file of an overlay that is opened for writing for the first time is copied up, and from then on it is another file that is behind its
//! name, and behind descriptors, but not behind mappings that were made before. Nothing tells that of a mapping; so what it shows is
//! compared with what the file holds, if the file has changed since the program began.

use super::noticed::WATCHED;
use crate::{Builder, Result};
use rustix::fs::{OFlags, major};
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::OwnedFd;
use stillpoint_image::PAGE;
use stillpoint_linux::memory::Memory;
use stillpoint_linux::pagemap::{Category, Pagemap, Query};
use stillpoint_linux::proc::{Proc, Vma};
use stillpoint_linux::{RemoteAddr, silent};

/// `OVERLAYFS_SUPER_MAGIC`
const OVERLAY: rustix::fs::FsWord = 0x794c_7630;
/// Times of files and of processes are not told by the same clock.
const MARGIN: i64 = 1_000_000_000;
/// So much is compared at once, bytes.
const STEP: u64 = 1 << 20;

/// Refuses a mapping of a file that shows what the file held before it was copied up, and holds no more; `what` is its name.
pub(crate) fn refuse_what_was(
    builder: &mut Builder,
    process: &Proc,
    vma: &Vma,
    path: u32,
    what: String,
) -> Result<()> {
    let file = &builder.image.paths[path as usize];
    // Overlays have no device of their own. Most files have not changed for long.
    if major(file.dev) != 0 || file.deleted || file.ctime_ns < began(process)? - MARGIN {
        return Ok(());
    }
    let link = format!("/proc/{}/{}", process.pid(), vma.link_name());
    let is_overlay = |stat: rustix::fs::StatFs| stat.f_type == OVERLAY;
    match rustix::fs::statfs(&*link) {
        // What is mapped is for the privileged alone to open.
        Err(rustix::io::Errno::PERM) => {
            let place = builder.views.reach(file.namespace, &file.path.0);
            if rustix::fs::statfs(&place).is_ok_and(is_overlay) {
                let why = "its file has changed in its overlay, and only the privileged can tell what is mapped of it";
                builder.refuse(what, why, "do it as root, or let the program map it anew");
            }
            return Ok(());
        }
        stat if !stat.is_ok_and(is_overlay) => return Ok(()),
        _ => {}
    }
    if builder.noticed.is(&builder.views.reach(file.namespace, &file.path.0), (file.dev, file.ino)) {
        builder.refuse(what, WATCHED.0, WATCHED.1);
        return Ok(());
    }
    let Ok(file) = silent::open(&link, OFlags::NONBLOCK) else { return Ok(()) };
    if differs(process.pid(), vma, &file)? {
        let why = "the file was copied up in its overlay after it was mapped, and changed: the program sees there what it was before";
        builder.refuse(what, why, "let the program map it anew");
    }
    Ok(())
}

/// When a process began, nanoseconds since 1970.
fn began(process: &Proc) -> Result<i64> {
    let ns = |clock| {
        let time = clock_gettime(clock);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second() as i64;
    Ok(ns(ClockId::Realtime) - ns(ClockId::Boottime) + process.stat()?.start_time as i64 * tick)
}

/// Whether pages of a mapping that are not the process's own hold something else than the file.
fn differs(pid: u32, vma: &Vma, file: &OwnedFd) -> Result<bool> {
    let (pagemap, memory) = (Pagemap::open(pid)?, Memory::open(pid)?);
    let own = Query { any: Category::PRESENT | Category::SWAPPED, none: Category::FILE, ..Query::default() };
    let mut runs = Vec::new();
    pagemap.scan(RemoteAddr(vma.start), RemoteAddr(vma.end), own, &mut runs)?;
    let mut at = vma.start;
    for (start, end) in runs.iter().map(|run| (run.start, run.end)).chain([(vma.end, vma.end)]) {
        while at < start {
            let len = STEP.min(start - at);
            if !is_same(&memory, at, len, file, vma.offset + (at - vma.start))? {
                return Ok(true);
            }
            at += len;
        }
        at = end;
    }
    Ok(false)
}

fn is_same(memory: &Memory, at: u64, len: u64, file: &OwnedFd, offset: u64) -> Result<bool> {
    const TRIES: usize = 100;
    for _ in 0..TRIES {
        let before = shown(memory, at, len);
        if before == held(file, offset, len)? {
            return Ok(true);
        }
        // If somebody has just written to it, the mapping shows that, too.
        if before == shown(memory, at, len) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whole pages up to the first that cannot be read.
fn shown(memory: &Memory, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    if memory.read(RemoteAddr(at), &mut bytes).is_ok() {
        return bytes;
    }
    let pages = bytes.chunks_mut(PAGE as usize).zip(0..);
    let read = pages
        .map_while(|(page, n)| memory.read(RemoteAddr(at + n * PAGE), page).is_ok().then_some(()))
        .count();
    bytes.truncate(read * PAGE as usize);
    bytes
}

/// Whole pages up to the end of a file, behind which there are zeros.
fn held(file: &OwnedFd, offset: u64, len: u64) -> Result<Vec<u8>> {
    let (mut bytes, mut filled) = (vec![0; len as usize], 0);
    while filled < bytes.len() {
        match rustix::io::pread(file, &mut bytes[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(stillpoint_linux::Error::call("read a file that is mapped", e).into()),
        }
    }
    bytes.truncate(filled.next_multiple_of(PAGE as usize));
    Ok(bytes)
}
