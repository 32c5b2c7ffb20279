//! What is in an IPC namespace of the program's own. All of it goes with the program, and is part of the checkpoint: also
//! shared memory that nobody is attached to, and message queues that nobody has open.

use super::{Own, When};
use crate::files::segments;
use crate::{Builder, Error, Result};
use std::os::fd::{AsFd, OwnedFd};
use stillpoint_image::{
    IPC_SETTINGS, Ipc, MessageQueue, SemaphoreSet, Setting, SystemV, SystemVMessage, SystemVQueue,
};
use stillpoint_linux::namespaces::inside;
use stillpoint_linux::{Result as KernelResult, ipc, mqueue, sysv};

/// What was found in a namespace.
struct Found {
    contents: Ipc,
    segments: Vec<(i32, sysv::Segment)>,
    /// Files of those that nobody is attached to.
    unattached: Vec<(i32, OwnedFd)>,
    queues: Vec<Queue>,
    /// Device number of their folder.
    device: u64,
    /// Nameless queues cannot be found there.
    refusals: Vec<(String, String, &'static str)>,
}

struct Queue {
    queue: MessageQueue,
    messages: u64,
    told: bool,
}

/// Describes a namespace, of which the row will be this one.
pub(super) fn describe(builder: &mut Builder, own: &mut Own, row: u32, when: When) -> Result<Ipc> {
    let found = inside(&[(own.space.kind, own.file.as_fd())], || look(when))?;
    for (what, why, hint) in found.refusals {
        builder.refuse(what, why, hint);
    }
    for Queue { queue, messages, told } in found.queues {
        let what = format!("message queue /{}", queue.name);
        if messages > 0 {
            let why = format!("it holds {messages} messages, which cannot be seen without taking them");
            builder.refuse(what, why, "try again when they have been received");
        } else if told {
            let why = "a program waits to be told of a message in it (mq_notify)";
            builder.refuse(
                what,
                why,
                "let the program call mq_notify after the checkpoint, or block instead",
            );
        }
        builder.image.queues.push(MessageQueue { namespace: Some(row), ..queue });
    }
    own.queues = Some(found.device);
    own.segments = found.segments;
    for (id, file) in found.unattached {
        if let Some((_, segment)) = own.segments.iter().find(|(known, _)| *known == id) {
            segments::unattached(builder, row, id, segment, file)?;
        }
    }
    Ok(found.contents)
}

/// Looks at the namespace that this thread is in.
fn look(when: When) -> Result<Found> {
    let mut refusals = Vec::new();
    let forced = ipc::get("kernel/shm_rmid_forced")?.is_some_and(|value| value != b"0");
    if forced {
        let why =
            "shared memory in it goes with the last process that is attached to it (kernel.shm_rmid_forced)";
        refusals.push(("IPC namespace".into(), why.into(), "set kernel.shm_rmid_forced to 0 in it"));
    }
    let (mut segments, mut unattached) = (Vec::new(), Vec::new());
    for id in ipc::segments()? {
        let Some(segment) = sysv::segment(id)? else { continue };
        if when != When::Running && segment.attachments == 0 && !forced {
            unattached.push((id, file_of(id, &segment)?));
        }
        segments.push((id, segment));
    }
    let folder = ipc::posix_queues()?;
    let stat = |file: &OwnedFd| {
        rustix::fs::fstat(file).map_err(|e| stillpoint_linux::Error::call("look at a message queue", e))
    };
    let mut queues = Vec::new();
    for name in ipc::names(&folder)? {
        let file = ipc::open_in(&folder, &name)?;
        let (stat, (attributes, messages)) = (stat(&file)?, mqueue::attributes(&file)?);
        let queue = MessageQueue {
            name: name.into(),
            unlinked: false,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            maximum: attributes.maximum,
            size: attributes.size,
            ino: stat.st_ino,
            namespace: None,
        };
        queues.push(Queue { queue, messages, told: mqueue::told(&file)?.is_some() });
    }
    let contents = contents()?;
    Ok(Found { contents, segments, unattached, queues, device: stat(&folder)?.st_dev, refusals })
}

fn contents() -> KernelResult<Ipc> {
    let mut settings = Vec::new();
    for name in IPC_SETTINGS {
        if let Some(value) = ipc::get(name)? {
            settings.push(Setting { name: name.into(), value: String::from_utf8_lossy(&value).into_owned() });
        }
    }
    let sets = ipc::semaphores()?.into_iter();
    let queues = ipc::queues()?.into_iter();
    let message = |(kind, text): (i64, Vec<u8>)| SystemVMessage { kind, text: text.into() };
    Ok(Ipc {
        settings,
        semaphores: sets.map(|s| SemaphoreSet { common: common(&s.common), values: s.values }).collect(),
        queues: queues
            .map(|q| SystemVQueue {
                common: common(&q.common),
                capacity: q.capacity,
                messages: q.messages.into_iter().map(message).collect(),
            })
            .collect(),
    })
}

fn common(of: &ipc::Common) -> SystemV {
    SystemV {
        id: of.id,
        key: of.key,
        mode: of.mode,
        uid: of.owner.0,
        gid: of.owner.1,
        creator_uid: of.creator.0,
        creator_gid: of.creator.1,
    }
}

/// The file behind a segment that nobody is attached to, for which we are for a moment.
fn file_of(id: i32, segment: &sysv::Segment) -> Result<OwnedFd> {
    const PAGES: [u64; 3] = [4 << 10, 2 << 20, 1 << 30];
    let attachment = sysv::Attachment::new(id)?;
    let file = PAGES.into_iter().find_map(|page| attachment.file(segment.size, page).ok());
    file.ok_or_else(|| Error::Failed(format!("shared memory segment {id}: its file cannot be opened")))
}
