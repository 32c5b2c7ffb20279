//! The mappings of an address space, as rows of the image.

use crate::attributes;
use crate::builder::AS_PRIVILEGED;
use crate::files::{self, Outsiders};
use crate::regions;
use crate::{Builder, Result};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use stillpoint_image::{Backing, Mapping, MappingFlags, Range, Usage};
use stillpoint_linux::memfd::IN_PLACE_OF_SHARED;
use stillpoint_linux::pagemap::Pagemap;
use stillpoint_linux::proc::{Proc, Smap, VmFlags, Vma};
use stillpoint_linux::spawn::{REBUILDING, find_gap};

/// What the kernel calls shared anonymous memory.
const SHARED_ANONYMOUS: &[u8] = b"/dev/zero";

/// Above this, reading the states of all mappings is too long for the freeze: it walks all pages, 5 ms for each GiB.
const CHEAP: Duration = Duration::from_micros(200);
/// States that are of no interest here, or ours: tracking of writes.
const PASSING: VmFlags =
    VmFlags::SOFT_DIRTY.union(VmFlags::UFFD_WP).union(VmFlags::UFFD_MISSING).union(VmFlags::UFFD_MINOR);

/// The mappings of a process with their states, as they were at some moment.
#[derive(Clone, Debug, Default)]
pub struct Mappings {
    smaps: Vec<Smap>,
    guards: Vec<Range>,
    /// How long it took to read them.
    took: Duration,
}

impl Mappings {
    /// Reads them all.
    ///
    /// # Errors
    /// That they cannot be read.
    pub fn read(process: &Proc, pagemap: &Pagemap) -> Result<Self> {
        let start = Instant::now();
        let mappings = Mappings { smaps: process.smaps()?, ..Mappings::default() };
        let mappings = mappings.with_guards_of_now(pagemap)?;
        Ok(Mappings { took: start.elapsed(), ..mappings })
    }

    /// Each of them.
    pub fn smaps(&self) -> &[Smap] {
        &self.smaps
    }

    /// Whether they can be read in the freeze.
    pub fn are_cheap(&self) -> bool {
        self.took < CHEAP
    }

    /// Whether pages are put into some of them by somebody else, who is waited for.
    pub fn wait_for_pages(&self) -> bool {
        self.smaps.iter().any(|s| s.flags.contains(VmFlags::UFFD_MISSING))
    }

    /// It is known who puts pages into them.
    pub fn with_known_pages(mut self) -> Self {
        self.smaps.iter_mut().for_each(|s| s.flags -= VmFlags::UFFD_MISSING);
        self
    }

    /// The mappings `now`, with the states of these, which were read earlier. `None` if that cannot be told: a mapping
    /// is new or has become another one.
    ///
    /// What two mappings that touch have in common makes them one in the kernel only if all their states are the same,
    /// and a part that is cut off keeps them: one that has grown or shrunk at one end has the states it had.
    pub fn carried_over(&self, now: &[Vma]) -> Option<Mappings> {
        let mut smaps = Vec::with_capacity(now.len());
        let mut before = self.smaps.iter().peekable();
        for vma in now {
            while before.next_if(|s| s.vma.end <= vma.start).is_some() {}
            // Each is carried over once: where one has become two, their states differ.
            let smap = before.next().filter(|s| is_same(&s.vma, vma))?;
            smaps.push(Smap { vma: vma.clone(), ..smap.clone() });
        }
        Some(Mappings { smaps, guards: self.guards.clone(), took: self.took })
    }

    /// These, with the guard regions of now.
    ///
    /// # Errors
    /// That they cannot be looked up.
    pub fn with_guards_of_now(mut self, pagemap: &Pagemap) -> Result<Self> {
        let end =
            self.smaps.iter().filter(|s| s.vma.name != b"[vsyscall]").map(|s| s.vma.end).max().unwrap_or(0);
        self.guards = regions::guards(pagemap, &[Range { start: 0, len: end }])?;
        Ok(self)
    }

    /// These, as if there were no guard regions ([`put_guards`]).
    pub fn without_guards(mut self) -> Self {
        self.guards.clear();
        self
    }

    /// Whether there are guard regions in them.
    pub fn have_guards(&self) -> bool {
        !self.guards.is_empty()
    }

    /// Whether some of them have protection keys.
    pub fn have_keys(&self) -> bool {
        self.smaps.iter().any(|s| s.pkey != 0)
    }

    /// Whether nothing that is there in both has other states in `later`.
    pub fn agree_with(&self, later: &Mappings) -> bool {
        let states = |s: &Smap| (s.flags - PASSING, s.pkey, s.kernel_page_size);
        self.smaps.iter().all(|s| {
            let from = later.smaps.partition_point(|l| l.vma.end <= s.vma.start);
            let mut touching = later.smaps[from..].iter().take_while(|l| l.vma.start < s.vma.end);
            let guards = |of: &Mappings| regions::within(&of.guards, s.vma.start, s.vma.end);
            let same_guards = guards(self) == guards(later);
            let mut any = false;
            let same = touching.all(|l| {
                any = true;
                states(l) == states(s)
            });
            same && (same_guards || !any)
        })
    }
}

/// Whether a mapping is still the same one, except that it may have grown or shrunk at one end.
fn is_same(before: &Vma, now: &Vma) -> bool {
    let kind = |v: &Vma| (v.prot, v.shared, v.dev, v.ino, v.deleted);
    let origin = |v: &Vma| v.start.wrapping_sub(v.offset);
    let one_end = before.start == now.start || before.end == now.end;
    let same_file = now.ino == 0 || origin(before) == origin(now);
    one_end && same_file && kind(before) == kind(now) && before.name == now.name
}

/// Captures all mappings of a process.
pub fn capture_mappings(
    builder: &mut Builder,
    outsiders: &Outsiders,
    process: &Proc,
    all: &Mappings,
) -> Result<Vec<Mapping>> {
    let mut mappings = Vec::with_capacity(all.smaps.len());
    let refused = builder.refusals.len();
    attributes::target::mappings(builder, process, &all.smaps);
    if builder.refusals.len() > refused {
        return Ok(mappings);
    }
    for smap in &all.smaps {
        let Some(backing) = backing(builder, outsiders, process, smap)? else { continue };
        let guards = match smap.vma.name.starts_with(b"[v") {
            true => Vec::new(),
            false => regions::within(&all.guards, smap.vma.start, smap.vma.end),
        };
        mappings.push(Mapping {
            start: smap.vma.start,
            end: smap.vma.end,
            prot: smap.vma.prot,
            shared: smap.vma.shared,
            backing,
            flags: flags(smap),
            pkey: smap.pkey,
            huge_page: if smap.flags.contains(VmFlags::HUGETLB) { smap.kernel_page_size } else { 0 },
            guards,
            name: anonymous_name(&smap.vma.name),
        });
    }
    let taken = all.smaps.iter().map(|smap| (smap.vma.start, smap.vma.end)).collect();
    if find_gap(taken, REBUILDING).is_none() {
        let why = "there is no room left in it to rebuild the program (2 MiB in one piece)";
        builder.refuse("address space", why, "let the program unmap what it has only reserved");
    }
    Ok(mappings)
}

/// The guard regions of now below an address. There are none but in these `places`, ascending.
///
/// # Errors
/// That they cannot be looked up.
pub fn guards_in(pagemap: &Pagemap, end: u64, places: &[Range]) -> Result<Vec<Range>> {
    let all = Range { start: 0, len: end };
    regions::guards(pagemap, &all.parts_of(places).collect::<Vec<_>>())
}

/// Notes guard regions in mappings that were described without them.
pub fn put_guards(mappings: &mut [Mapping], guards: &[Range]) {
    for mapping in mappings.iter_mut().filter(|m| !matches!(m.backing, Backing::Special(_))) {
        mapping.guards = regions::within(guards, mapping.start, mapping.end);
    }
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

/// Whether a mapping is of shared anonymous memory, by its name.
pub(crate) fn is_shared_anonymous(vma: &Vma) -> bool {
    vma.shared && (vma.name == SHARED_ANONYMOUS || vma.name.starts_with(b"[anon_shmem:"))
}

/// What stands behind a mapping; `None` if it need not be recreated.
fn backing(
    builder: &mut Builder,
    outsiders: &Outsiders,
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
    // The first segment of all has the number 0, which otherwise means that there is no file.
    if files::segments::is_attachment(process, vma) {
        return files::segments::attachment(builder, process, smap, &describe(smap));
    }
    let private_huge = name.starts_with(b"/anon_hugepage") && !vma.shared;
    if vma.ino == 0 || private_huge {
        return Ok(Some(Backing::Anonymous));
    }
    let memfd = name.strip_prefix(b"/memfd:").map(files::memory::memfd_name);
    let is_in_place = memfd == Some(IN_PLACE_OF_SHARED);
    let memfd = memfd.filter(|_| !is_in_place);
    // Of shared anonymous memory there may be private mappings, too, by way of /proc/PID/map_files.
    let is_private_of_shared =
        || !vma.shared && name == SHARED_ANONYMOUS && Some(vma.dev) == files::memory::internal_device();
    let is_shared = is_in_place || vma.deleted && (is_shared_anonymous(vma) || is_private_of_shared());
    if memfd.is_some() || is_shared || name.starts_with(b"/anon_hugepage") {
        let what = describe(smap);
        if let Some(holder) = outsiders.memory(vma.ino) {
            builder.refuse(what, format!("its memory is shared with {holder}"), "end the other process");
            return Ok(None);
        }
        let object = match process.open_file(&vma.link_name()) {
            Err(e) if e.errno() == Some(libc::EPERM) => {
                files::memory::mapped_object(builder, process, vma, memfd, &what)?
            }
            file => Some(files::memory_object(builder, memfd, file?.as_fd(), &what)?),
        };
        return Ok(object.map(|object| Backing::Object { object, offset, may_write }));
    }
    if vma.deleted && files::memory::is_hidden(process, vma) {
        let what = describe(smap);
        if !vma.shared {
            let why = "its file was removed, and only the privileged can open it";
            builder.refuse(what, why, AS_PRIVILEGED);
            return Ok(None);
        }
        let object = files::memory::mapped_object(builder, process, vma, None, &what)?;
        return Ok(object.map(|object| Backing::Object { object, offset, may_write }));
    }
    let written = vma.shared && may_write;
    let usage = if written { Usage::Write } else { Usage::Read };
    let range = written.then_some(Range { start: offset, len: vma.len() });
    let Some(file) = files::mapped_file(builder, process.pid(), vma, usage, range)? else { return Ok(None) };
    if !file.is_device {
        if !written {
            files::copied_up::refuse_what_was(builder, process, vma, file.path, describe(smap))?;
        }
        return Ok(Some(Backing::File { path: file.path, offset, may_write }));
    }
    Ok(Some(Backing::Device { path: file.path, offset }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn smap(start: u64, end: u64, flags: VmFlags) -> Smap {
        Smap { vma: Vma { start, end, ..Vma::default() }, flags, ..Smap::default() }
    }

    fn all(smaps: &[Smap]) -> Mappings {
        Mappings { smaps: smaps.to_vec(), ..Mappings::default() }
    }

    fn vmas(ranges: &[(u64, u64)]) -> Vec<Vma> {
        ranges.iter().map(|&(start, end)| Vma { start, end, ..Vma::default() }).collect()
    }

    #[test]
    fn states_are_carried_over_to_what_is_the_same() {
        let before = all(&[smap(1, 4, VmFlags::DONT_FORK), smap(6, 8, VmFlags::LOCKED)]);
        let flags = |m: Mappings| m.smaps.iter().map(|s| s.flags).collect::<Vec<_>>();
        let both = [VmFlags::DONT_FORK, VmFlags::LOCKED];
        assert_eq!(flags(before.carried_over(&vmas(&[(1, 4), (6, 8)])).unwrap()), both);
        assert_eq!(flags(before.carried_over(&vmas(&[(1, 5), (5, 8)])).unwrap()), both);
        assert_eq!(flags(before.carried_over(&vmas(&[(6, 7)])).unwrap()), [VmFlags::LOCKED]);
        for other in [[(1, 4), (9, 10)], [(2, 5), (6, 8)], [(1, 2), (2, 4)]] {
            assert!(before.carried_over(&vmas(&other)).is_none(), "{other:?}");
        }
    }

    #[test]
    fn a_change_of_states_is_seen_afterwards() {
        let cut = all(&[smap(1, 4, VmFlags::DONT_FORK), smap(6, 8, VmFlags::LOCKED)]);
        assert!(cut.agree_with(&all(&[smap(1, 4, VmFlags::DONT_FORK | VmFlags::UFFD_WP)])));
        assert!(!cut.agree_with(&all(&[smap(1, 2, VmFlags::DONT_FORK), smap(2, 4, VmFlags::empty())])));
        let guarded = Mappings { guards: vec![Range { start: 2, len: 1 }], ..cut.clone() };
        assert!(!cut.agree_with(&guarded));
        assert!(guarded.agree_with(&guarded));
    }
}
