//! The program at rest for a moment, and described.

use crate::descriptors::Table;
use crate::{Error, Result};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_capture::blocked::Earlier;
use stillpoint_capture::files::Outsiders;
use stillpoint_capture::freeze::{Frozen, Hurry};
use stillpoint_capture::inspect::{Known, Ready, inspect};
use stillpoint_capture::mappings::Mappings;
use stillpoint_capture::target::Target;
use stillpoint_capture::{Builder, relations};
use stillpoint_image::{AddressSpace, Backing, Image, Mapping, Process, Range};
use stillpoint_linux::host;
use stillpoint_linux::proc::Vma;

/// So much shared memory is copied at each snapshot, bytes.
const MOST_SHARED: u64 = 256 << 20;

/// Shared memory, numbered by what the kernel knows it by, so that the same number always means the same one.
#[derive(Debug, Default)]
struct Objects(HashMap<(u64, u64), u32>);

impl Objects {
    /// Numbers that of all mappings; returns where it can be written.
    fn number(&mut self, mappings: &mut [Mapping], maps: &[Vma]) -> Vec<Range> {
        let mut written = Vec::new();
        for mapping in mappings {
            let writes = mapping.shared && mapping.prot & libc::PROT_WRITE as u32 != 0;
            let (Backing::Object { object, .. } | Backing::Segment { object, .. }) = &mut mapping.backing
            else {
                continue;
            };
            let vma = maps.iter().find(|v| v.start <= mapping.start && mapping.start < v.end);
            let next = self.0.len() as u32;
            *object = vma.map_or(u32::MAX, |v| *self.0.entry((v.dev, v.ino)).or_insert(next));
            if writes {
                written.push(Range { start: mapping.start, len: mapping.len() });
            }
        }
        written
    }
}

/// What is known of a program from one time that it was at rest to the next.
#[derive(Debug, Default)]
pub struct Recalled {
    /// Calls that were interrupted.
    pub earlier: Earlier,
    objects: Objects,
    /// Its mappings, with states that only a walk through all pages tells.
    mappings: Option<Mappings>,
}

/// A program at rest. When this is dropped, it runs on.
#[derive(Debug)]
pub struct Still {
    /// Its threads.
    pub frozen: Frozen,
    /// It, but for its descriptors and the contents of its memory.
    pub image: Image,
    /// Its mappings.
    pub maps: Vec<Vma>,
    /// Shared memory that it can write to.
    pub shared: Vec<Range>,
    /// What it has open.
    pub table: Table,
    /// Its children.
    pub children: Vec<u32>,
    _hurry: Hurry,
    _ready: Ready,
}

impl Still {
    /// Brings a program to rest.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is something that nobody can put back; the program runs on.
    pub fn take(target: &Arc<Target>, memory: &mut Recalled) -> Result<Self> {
        let Recalled { earlier, objects, mappings } = memory;
        let mut builder = Builder::at(&target.home);
        let children = target.process.children()?;
        let mut known = Known::new(&mut builder, target, &children)?;
        relations::refuse_sharers(&mut builder, &[target.pid], false);
        builder.refuse_if_needed()?;
        let before = match mappings.take() {
            Some(before) => before,
            None => Mappings::read(&target.process, &target.pagemap)?,
        };
        // Without a key, who may write where shows in the mappings themselves.
        if !before.have_keys() {
            known.recall(before);
        }
        // Who else has it would matter where memory is shared, which is not rolled back at all.
        let outsiders = Outsiders::default();
        known.observe();
        let ready = Ready::new(known.threads(), 64);
        let hurry = Hurry::begin();
        let frozen = target.freeze()?;
        known.stopped(earlier, target.clocks().0);
        target.stamp(&mut builder.image.meta);
        builder.image.meta.host.boot_id = host::boot_id();
        let maps = target.process.maps()?;
        let mut frozen = [frozen];
        let described =
            inspect(&mut builder, &mut frozen, &[known], &outsiders, std::slice::from_ref(&maps))?;
        *mappings = described.into_iter().next().and_then(|(assumed, _)| assumed.into_mappings());
        let [frozen] = frozen;
        let table = Table::read(target.pid, target.pidfd.as_fd())?;
        builder.image.spaces.resize_with(1, AddressSpace::default);
        let shared = objects.number(&mut builder.image.spaces[0].mappings, &maps);
        let bytes: u64 = shared.iter().map(|r| r.len).sum();
        if bytes > MOST_SHARED {
            let why = format!(
                "of shared memory each snapshot is a copy, and of more than {} MiB none is made",
                MOST_SHARED >> 20
            );
            builder.refuse(format!("{} MiB of shared memory", bytes >> 20), why, "");
        }
        builder.refuse_if_needed()?;
        *earlier = stillpoint_capture::earlier_calls(&builder.image, target);
        let image = builder.image;
        let children = target.process.children()?;
        Ok(Still { frozen, image, maps, shared, table, children, _hurry: hurry, _ready: ready })
    }

    /// Lets it run on; for how long it stood still.
    pub fn thaw(self) -> Duration {
        self.frozen.thaw()
    }
}

/// The one process of an image.
pub fn process(image: &Image) -> Result<&Process> {
    image.processes.first().ok_or_else(|| Error::Failed("the program was not described".into()))
}

/// Its address space.
pub fn space(image: &Image) -> Result<&AddressSpace> {
    image.spaces.first().ok_or_else(|| Error::Failed("its memory was not described".into()))
}

/// Device and inode number of a file of an image.
pub fn place(image: &Image, path: u32) -> Option<(u64, u64)> {
    image.paths.get(path as usize).map(|p| (p.dev, p.ino))
}

/// Threads by their ids.
pub fn threads_of(process: &Process) -> HashMap<u32, usize> {
    process.threads.iter().enumerate().map(|(place, thread)| (thread.tid, place)).collect()
}
