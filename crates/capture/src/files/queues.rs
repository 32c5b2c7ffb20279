//! POSIX message queues: by name and attributes. Messages in them cannot be seen without taking them.

use super::Scan;
use super::descriptions::Description;
use super::noticed::WATCHED;
use crate::Result;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use stillpoint_image::{Bytes, FileKind, MessageQueue};
use stillpoint_linux::mqueue;

/// Captures a descriptor of a queue.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    let unlinked = d.stat.st_nlink == 0;
    let link = if unlinked { d.link.strip_suffix(b" (deleted)").unwrap_or(&d.link) } else { &d.link };
    let Some(name) = link.strip_prefix(b"/").filter(|name| !name.is_empty() && !name.contains(&b'/')) else {
        return scan.refuse(
            d,
            "it is no message queue, but the folder of them",
            "close it before the checkpoint",
        );
    };
    if unlinked && let Some(holder) = scan.target.outsiders.holder(&d.link) {
        let why = format!("it is a message queue without a name, shared with {holder}");
        return scan.refuse(d, why, "end that process before the checkpoint");
    }
    let (attributes, messages) = mqueue::attributes(&d.file)?;
    if messages > 0 {
        let why = format!(
            "it is a message queue that holds {messages} messages, which cannot be seen without taking them"
        );
        return scan.refuse(d, why, "try again when they have been received");
    }
    let folder = match scan.builder.namespaces.row_of_queues(d.stat.st_dev) {
        None => Path::new("/dev/mqueue"),
        Some(_) => Path::new(""),
    };
    if scan.builder.noticed.is(&folder.join(OsStr::from_bytes(name)), d.inode()) {
        return scan.refuse(d, WATCHED.0, WATCHED.1);
    }
    if mqueue::told(&d.file)?.is_some_and(|pid| scan.inner_pid(pid).is_some()) {
        let why = "the program waits to be told of a message in it (mq_notify)";
        return scan.refuse(d, why, "let the program call mq_notify after the checkpoint, or block instead");
    }
    let queue = MessageQueue {
        name: Bytes(name.to_vec()),
        unlinked,
        mode: d.stat.st_mode & 0o7777,
        uid: d.stat.st_uid,
        gid: d.stat.st_gid,
        maximum: attributes.maximum,
        size: attributes.size,
        ino: d.stat.st_ino,
        namespace: scan.builder.namespaces.row_of_queues(d.stat.st_dev),
    };
    let same = |q: &MessageQueue| (q.ino, q.namespace) == (queue.ino, queue.namespace);
    let known = scan.builder.image.queues.iter().position(same);
    let row = known.unwrap_or_else(|| {
        scan.builder.image.queues.push(queue);
        scan.builder.image.queues.len() - 1
    });
    Ok(Some(FileKind::Queue(row as u32)))
}
