//! POSIX message queues: opened by their names, or made anew. They were empty, and must be.

use super::{Opening, missing};
use crate::{Error, Result};
use rustix::fs::{Gid, Mode, Uid};
use std::os::fd::OwnedFd;
use stillpoint_image::{FileKind, Image, MessageQueue};
use stillpoint_linux::Error as Kernel;
use stillpoint_linux::mqueue::{self, Attributes};

/// Names of queues that were made, to be removed when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Queues {
    made: Vec<Vec<u8>>,
}

impl Queues {
    /// They stay.
    pub fn keep(&mut self) {
        self.made.clear();
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        for name in &self.made {
            let _ = mqueue::unlink(name);
        }
    }
}

fn attributes(queue: &MessageQueue) -> Attributes {
    Attributes { maximum: queue.maximum, size: queue.size }
}

/// Opens a queue that is there.
fn find(name: &[u8], flags: i32) -> Result<Option<OwnedFd>> {
    match mqueue::open(name, flags, 0, Attributes::default()) {
        Ok(queue) => Ok(Some(queue)),
        Err(e) if e.errno() == Some(libc::ENOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// What stat(2) tells of a queue, if it is there.
pub(super) fn stat(queue: &MessageQueue) -> Result<Option<rustix::fs::Stat>> {
    let Some(found) = find(&queue.name.0, libc::O_RDONLY | libc::O_NONBLOCK)? else { return Ok(None) };
    let stat = rustix::fs::fstat(&found);
    Ok(Some(stat.map_err(|e| Kernel::call(format!("look at message queue /{}", queue.name), e))?))
}

/// Refuses queues that are not as the program left them.
pub(super) fn check(image: &Image, refusals: &mut Vec<String>) -> Result<()> {
    for queue in image.queues.iter().filter(|q| !q.unlinked && q.namespace.is_none()) {
        let Some(found) = find(&queue.name.0, libc::O_RDONLY | libc::O_NONBLOCK)? else { continue };
        let (now, messages) = mqueue::attributes(&found)?;
        if now != attributes(queue) {
            refusals.push(format!("message queue /{}: is another one now", queue.name));
        } else if messages > 0 {
            let why = format!("holds {messages} messages, it was empty at the checkpoint");
            refusals.push(format!("message queue /{}: {why}", queue.name));
        }
    }
    Ok(())
}

/// Opens all descriptions of queues.
pub(super) fn open(opening: &mut Opening<'_>) -> Result<()> {
    let rows = opening.rows(|f| match f.kind {
        FileKind::Queue(row) => Some(row),
        _ => None,
    });
    for (index, queue) in opening.image.queues.iter().enumerate() {
        let rows: Vec<_> = rows.iter().filter(|r| r.2 as usize == index).collect();
        let all_flags: Vec<i32> = rows
            .iter()
            .map(|(_, file, _)| file.flags as i32 & (libc::O_ACCMODE | libc::O_NONBLOCK))
            .collect();
        let made = &mut opening.files.queues.made;
        let opened = match queue.namespace {
            None => open_all(made, index, queue, &all_flags)?,
            // What is made there goes with the namespace.
            Some(row) => opening
                .files
                .namespaces
                .within(row, || open_all(&mut Vec::new(), index, queue, &all_flags))?,
        };
        for (&&(row, ..), fd) in rows.iter().zip(opened) {
            opening.put(row, fd)?;
        }
    }
    Ok(())
}

/// Opens all descriptions of a queue, which is made if it is not there. Names of those that were made are added to `made`.
fn open_all(
    made: &mut Vec<Vec<u8>>,
    index: usize,
    queue: &MessageQueue,
    all_flags: &[i32],
) -> Result<Vec<OwnedFd>> {
    let name = find_or_make(made, queue)?;
    let mut opened = Vec::with_capacity(all_flags.len());
    for flags in all_flags {
        opened.push(find(&name, *flags)?.ok_or_else(|| missing("message queue", index as u32))?);
    }
    if queue.unlinked {
        mqueue::unlink(&name)?;
        made.retain(|made| *made != name);
    }
    Ok(opened)
}

/// Returns the name by which a queue can be opened: of one without a name, that it gets for a moment.
fn find_or_make(all_made: &mut Vec<Vec<u8>>, queue: &MessageQueue) -> Result<Vec<u8>> {
    let name = queue.name.0.clone();
    if !queue.unlinked && find(&name, libc::O_RDONLY | libc::O_NONBLOCK)?.is_some() {
        return Ok(name);
    }
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    let others = (0..100).map(|i| format!("stillpoint-{}-{i}", std::process::id()).into_bytes());
    for name in std::iter::once(name).chain(others.filter(|_| queue.unlinked)) {
        let made = match mqueue::open(&name, flags, 0o600, attributes(queue)) {
            Err(e) if e.errno() == Some(libc::EEXIST) => continue,
            made => made?,
        };
        all_made.push(name.clone());
        let named = |e| Kernel::call(format!("set the owner of message queue /{}", queue.name), e);
        let (uid, gid) = (Uid::from_raw(queue.uid), Gid::from_raw(queue.gid));
        rustix::fs::fchown(&made, Some(uid), Some(gid)).map_err(named)?;
        rustix::fs::fchmod(&made, Mode::from_raw_mode(queue.mode & 0o7777)).map_err(named)?;
        return Ok(name);
    }
    Err(Error::Failed(format!("message queue /{}: no name could be had for it", queue.name)))
}
