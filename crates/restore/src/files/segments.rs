//! System V shared memory: made again with the id it had, or the one that is still there set back.
//!
//! A segment outlives the programs that are attached to it. One with the recorded id, key, size and owner to which nobody
//! is attached was left by the program itself: it gets the contents of the checkpoint, as the very last step before the
//! program runs. One to which anybody is attached is not touched.

use super::{Contents, OpenFiles, called, objects};
use crate::namespaces::Namespaces;
use crate::{Error, Result};
use rustix::fs::FallocateFlags;
use std::os::fd::OwnedFd;
use stillpoint_image::{Backing, Image, MemoryObject, PAGE, Segment};
use stillpoint_linux::proc::{self, Proc};
use stillpoint_linux::sysv::{self, Attachment, NotMade, Wanted};
use stillpoint_linux::{Error as Kernel, host};

/// The segments of the program to be. Those that were made are removed when this is dropped, unless they are kept.
#[derive(Debug, Default)]
pub(super) struct Segments {
    all: Vec<Made>,
}

#[derive(Debug)]
struct Made {
    /// Row of its object.
    row: usize,
    id: i32,
    /// It was not there, and must go if the restore fails.
    is_new: bool,
    /// It is in a namespace of the program's own.
    elsewhere: bool,
    /// Keeps one that is marked for removal until the program is attached.
    attachment: Option<Attachment>,
}

impl Drop for Segments {
    fn drop(&mut self) {
        for made in self.all.iter().filter(|m| m.is_new) {
            let _ = sysv::remove(made.id);
        }
    }
}

fn segments(image: &Image) -> impl Iterator<Item = (&MemoryObject, &Segment)> {
    image.objects.iter().filter_map(|o| Some((o, o.segment.as_ref()?)))
}

/// Refuses where an id or key belongs to another segment by now, or somebody is attached.
pub(super) fn check(image: &Image, refusals: &mut Vec<String>) -> Result<()> {
    for (object, segment) in segments(image).filter(|(_, segment)| segment.namespace.is_none()) {
        let why = match sysv::segment(segment.id)? {
            Some(found) => in_the_way(image, object, segment, &found),
            None => key_taken(segment),
        };
        refusals.extend(why.map(|why| format!("{}: {why}", name(segment))));
    }
    Ok(())
}

fn in_the_way(
    image: &Image,
    object: &MemoryObject,
    segment: &Segment,
    found: &sysv::Segment,
) -> Option<String> {
    let creator = (segment.creator_uid, segment.creator_gid);
    let same = found.key == segment.key && found.size == segment.size && found.creator == creator;
    let remedy = format!("if nobody needs it, remove it (ipcrm -m {})", segment.id);
    if found.attachments > 0 {
        return Some(format!("{} is attached to it", who(segment.id)));
    }
    if !same || found.marked || segment.marked {
        return Some(format!("another segment has this id now; {remedy}"));
    }
    if found.owner != (object.uid, object.gid) {
        return Some(format!("it has another owner now; {remedy}"));
    }
    // Ids begin anew when the machine does, and nothing else tells this one from any other.
    let rebooted = host::boot_id() != image.meta.host.boot_id;
    if segment.key == sysv::PRIVATE && rebooted {
        return Some(format!("it may be another program's, made since the machine was started; {remedy}"));
    }
    None
}

fn key_taken(segment: &Segment) -> Option<String> {
    let taken = (!segment.marked).then(|| sysv::by_key(segment.key)).flatten()?;
    Some(format!("its key belongs to segment {taken} now (ipcrm -m {taken} removes that)"))
}

fn name(segment: &Segment) -> String {
    format!("shared memory segment {} (key {:#x})", segment.id, segment.key)
}

/// Who is attached to a segment.
fn who(id: i32) -> String {
    let is_attached = |process: &Proc| {
        let maps = process.maps().unwrap_or_default();
        maps.iter().any(|v| v.ino == id as u64 && v.shared && v.name.starts_with(b"/SYSV"))
    };
    let pids = proc::processes().unwrap_or_default();
    let found = pids.into_iter().filter_map(|pid| Proc::process(pid).ok()).find(is_attached);
    found.map_or_else(|| "another process".into(), |process| called(&process))
}

impl Segments {
    /// Makes the segment of an object, with its contents, or finds the one that is there. Returns the file behind it.
    pub fn make(
        &mut self,
        namespaces: &Namespaces,
        image: &Image,
        row: usize,
        object: &MemoryObject,
        segment: &Segment,
        contents: &dyn Contents,
    ) -> Result<OwnedFd> {
        if let Some(row_of_space) = segment.namespace {
            let attachment = namespaces.within(row_of_space, || make(object, segment))?;
            let file = attachment.file(object.size, object.huge_page.max(PAGE))?;
            let (id, attachment) = (segment.id, Some(attachment));
            self.all.push(Made { row, id, is_new: false, elsewhere: true, attachment });
            objects::fill_object(&file, row as u32, object, contents)?;
            namespaces.within(row_of_space, || complete(object, segment))?;
            return Ok(file);
        }
        let found = sysv::segment(segment.id)?;
        let is_new = found.is_none();
        if let Some(why) = found.and_then(|found| in_the_way(image, object, segment, &found)) {
            return Err(Error::Refused(vec![format!("{}: {why}", name(segment))]));
        }
        let attachment = if is_new { make(object, segment)? } else { Attachment::new(segment.id)? };
        let file = attachment.file(object.size, object.huge_page.max(PAGE));
        let (id, attachment) = (segment.id, Some(attachment));
        self.all.push(Made { row, id, is_new, elsewhere: false, attachment });
        let file = file?;
        if is_new {
            objects::fill_object(&file, row as u32, object, contents)?;
            complete(object, segment)?;
        }
        Ok(file)
    }
}

fn make(object: &MemoryObject, segment: &Segment) -> Result<Attachment> {
    let mut wanted = Wanted {
        id: segment.id,
        key: if segment.marked { segment.name } else { segment.key },
        size: segment.size,
        huge_page: object.huge_page,
        mode: object.mode,
        creator: (segment.creator_uid, segment.creator_gid),
    };
    let made = match sysv::make(&wanted) {
        // The key is only its name by now, and that is given to another one.
        Err(NotMade::KeyTaken) if segment.marked => {
            wanted.key = sysv::PRIVATE;
            sysv::make(&wanted)
        }
        made => made,
    };
    let refused = |why: &str| Err(Error::Refused(vec![format!("{}: {why}", name(segment))]));
    match made {
        Ok(attachment) => Ok(attachment),
        Err(NotMade::KeyTaken) => refused("its key belongs to another segment now"),
        Err(NotMade::IdTaken) => {
            refused("its place belongs to another segment now, and the program knows it by its id")
        }
        Err(NotMade::Forbidden) => refused(
            "it is gone, and to make it with the same id needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE \
             (kernel.shm_next_id)",
        ),
        Err(NotMade::Failed(e)) => Err(e.into()),
    }
}

/// Gives a segment that was made and filled its owner and states.
fn complete(object: &MemoryObject, segment: &Segment) -> Result<()> {
    set_states(object, segment)?;
    if segment.marked {
        sysv::remove(segment.id)?;
    }
    Ok(())
}

fn set_states(object: &MemoryObject, segment: &Segment) -> Result<()> {
    sysv::set_owner(segment.id, (object.uid, object.gid), object.mode)?;
    Ok(sysv::set_locked(segment.id, segment.locked)?)
}

impl OpenFiles {
    /// Lets go of shared memory segments, when the program is attached to them.
    pub fn detach(&mut self) {
        self.segments.all.iter_mut().for_each(|made| made.attachment = None);
    }

    /// Gives segments that were still there the contents they had. Nobody else may be attached by now.
    pub(super) fn set_segments_back(&self, image: &Image, contents: &dyn Contents) -> Result<()> {
        for made in self.segments.all.iter().filter(|m| !m.is_new && !m.elsewhere) {
            let (object, file) = (&image.objects[made.row], &self.objects[made.row]);
            let Some(segment) = &object.segment else { continue };
            let is_ours =
                |b: &Backing| matches!(b, Backing::Segment { object, .. } if *object as usize == made.row);
            let mappings = image.spaces.iter().flat_map(|s| &s.mappings);
            let ours = mappings.filter(|m| is_ours(&m.backing)).count() as u64;
            if sysv::segment(made.id)?.is_none_or(|s| s.attachments != ours) {
                let why = format!("{}: another process has attached to it meanwhile", name(segment));
                return Err(Error::Refused(vec![why]));
            }
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let whole = object.size.next_multiple_of(object.huge_page.max(PAGE));
            rustix::fs::fallocate(file, flags, 0, whole)
                .map_err(|e| Kernel::call(format!("empty {}", name(segment)), e))?;
            objects::fill_object(file, made.row as u32, object, contents)?;
            set_states(object, segment)?;
        }
        Ok(())
    }

    /// Segments that were made stay.
    pub(super) fn keep_segments(&mut self) {
        self.segments.all.iter_mut().for_each(|made| made.is_new = false);
    }
}
