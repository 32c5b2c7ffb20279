//! Attaching the new process to its System V shared memory.
//!
//! `shmat` maps the whole of a segment. Where the program has given back parts of an attachment, the segment is attached
//! where there is room, the parts that are left are moved to their places, and the rest is unmapped. `shmdt` finds the
//! parts of an attachment by where it began and by their common file: they must come from one `shmat`.

use crate::space::{self, AREA_LEN, SPARE_LEN};
use crate::{Error, Result};
use stillpoint_image::{AddressSpace, Backing, Image, Mapping, MemoryObject, PAGE};
use stillpoint_linux::program::{Arg, Program, Run};
use stillpoint_linux::remote::Remote;

/// What is left of one attachment.
struct Attachment<'a> {
    object: &'a MemoryObject,
    id: i32,
    /// Where it began. Of a part that was moved, where it would have: that may be below zero, and is no place then.
    origin: u64,
    may_write: bool,
    /// Its mappings, in ascending order, with their offsets.
    parts: Vec<(&'a Mapping, u64)>,
}

impl Attachment<'_> {
    /// Length of the segment in whole pages.
    fn whole(&self) -> u64 {
        self.object.size.next_multiple_of(self.object.huge_page.max(PAGE))
    }

    /// Parts are of whole pages, ascending and inside the segment: all of it is there if their lengths say so.
    fn is_whole(&self) -> bool {
        self.parts.iter().map(|(m, _)| m.len()).sum::<u64>() == self.whole()
    }
}

/// Attaches all segments, when all other mappings stand; `room` is the area for remote calls.
pub fn attach(remote: &mut Remote<'_>, image: &Image, space: &AddressSpace, room: u64) -> Result<()> {
    let mut program = Program::new();
    for attachment in attachments(image, space)? {
        if attachment.is_whole() {
            attach_at(&mut program, &attachment, attachment.origin);
        } else {
            attach_parts(&mut program, &attachment, space, room)?;
        }
        protect(&mut program, &attachment);
    }
    remote.run(&program)?;
    Ok(())
}

fn attachments<'a>(image: &'a Image, space: &'a AddressSpace) -> Result<Vec<Attachment<'a>>> {
    let mut all: Vec<Attachment<'a>> = Vec::new();
    for m in &space.mappings {
        let Backing::Segment { object, offset, may_write } = m.backing else { continue };
        let object = image.objects.get(object as usize);
        let known = object.and_then(|o| Some((o, o.segment.as_ref()?.id)));
        let (object, id) =
            known.ok_or_else(|| Error::Failed("the manifest attaches a segment that it lacks".into()))?;
        let origin = m.start.wrapping_sub(offset);
        let same = |a: &&mut Attachment<'_>| (a.id, a.origin, a.may_write) == (id, origin, may_write);
        match all.iter_mut().find(same) {
            Some(known) => known.parts.push((m, offset)),
            None => all.push(Attachment { object, id, origin, may_write, parts: vec![(m, offset)] }),
        }
    }
    Ok(all)
}

fn attach_at(program: &mut Program, a: &Attachment<'_>, address: u64) {
    let flags = if a.may_write { 0 } else { libc::SHM_RDONLY as u64 };
    let args = [Arg::Value(a.id as u64), address.into(), flags.into()];
    program.call(format!("attach shared memory segment {}", a.id), libc::SYS_shmat, args);
}

fn attach_parts(program: &mut Program, a: &Attachment<'_>, space: &AddressSpace, room: u64) -> Result<()> {
    let mut taken: Vec<(u64, u64)> = space.mappings.iter().map(|m| (m.start, m.end)).collect();
    taken.push((room, room + AREA_LEN + SPARE_LEN));
    let step = a.object.huge_page.max(PAGE);
    let gap = space::find_gap(taken, a.whole().saturating_add(step)).map(|at| at.next_multiple_of(step));
    let gap =
        gap.ok_or_else(|| Error::Failed("the program leaves no room to attach its shared memory".into()))?;
    attach_at(program, a, gap);
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut at = gap;
    for &(m, offset) in &a.parts {
        unmap(program, at, gap + offset);
        let args = [gap + offset, m.len(), m.len(), flags, m.start].map(Arg::Value);
        program.call(format!("move a part of shared memory segment {}", a.id), libc::SYS_mremap, args);
        at = gap + offset + m.len();
    }
    unmap(program, at, gap + a.whole());
    Ok(())
}

fn unmap(program: &mut Program, start: u64, end: u64) {
    if start < end {
        let args = [start.into(), (end - start).into()];
        program.call("unmap the rest of a segment", libc::SYS_munmap, args);
    }
}

fn protect(program: &mut Program, a: &Attachment<'_>) {
    let given = if a.may_write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ } as u32;
    for (m, _) in a.parts.iter().filter(|(m, _)| m.prot != given) {
        let args = [m.start, m.len(), u64::from(m.prot)].map(Arg::Value);
        program.call(format!("protect {:x}-{:x}", m.start, m.end), libc::SYS_mprotect, args);
    }
}
