//! fanotify: groups and their marks.
//!
//! A group that is asked whether something may be done (`FAN_CLASS_CONTENT`) keeps everybody waiting while it stands still, us
//! among them when we open a file: so a program that has one is not stopped at all ([`refuse_questions`]). What `/proc` tells can
//! always be read, as the kernel lets nobody ask for a say in that.
//!
//! Others go on meanwhile, whose events are of the time after the cut; so what counts is whether anything is unread when the program
//! has just come to rest ([`refuse_unread`]). We make none ourselves (see `noticed`).

use super::descriptions::Description;
use super::events::{UNREAD, located};
use super::noticed::is_of_watches;
use super::paths;
use super::{Holder, Scan};
use crate::attributes::target::is_administrator;
use crate::{Builder, Result};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use stillpoint_image::{Fanotify, FanotifyMark, FanotifyPlace, FileKind, PathFile, Usage};
use stillpoint_linux::descriptors::{duplicate_from, readable};
use stillpoint_linux::fanotify::{CLASS, is_for_all};
use stillpoint_linux::fdinfo::{Detail, FanotifyLine, Folders, Marked};
use stillpoint_linux::proc::mounts::{Mount, unescaped};
use stillpoint_linux::proc::{NamespaceKind, Proc};
use stillpoint_linux::{Error, mounts};

/// Refuses a process that others have to ask before they open or read files, by all that is known without opening any.
///
/// # Errors
/// That the process has ended.
pub fn refuse_questions(builder: &mut Builder, pid: u32) -> Result<()> {
    for (fd, flags) in groups(builder, pid)? {
        if flags & CLASS != 0 {
            builder.refuse(name(pid, fd), QUESTIONS, CLOSE);
        }
    }
    Ok(())
}

/// The same of a process that has just come to rest, before anything else is done to it; and those with events that it has not
/// read. Notes what it watches.
///
/// # Errors
/// As [`refuse_questions`].
pub fn refuse_unread(builder: &mut Builder, pid: u32, pidfd: BorrowedFd<'_>) -> Result<()> {
    for (fd, flags) in groups(builder, pid)? {
        if flags & CLASS != 0 {
            builder.refuse(name(pid, fd), QUESTIONS, CLOSE);
        } else if readable(duplicate_from(pidfd, fd)?)? > 0 {
            builder.refuse(name(pid, fd), UNREAD.0, UNREAD.1);
        }
    }
    Ok(())
}

/// Notes what a process watches, before anything of it is opened.
///
/// # Errors
/// That the process has ended.
pub fn note_watches(builder: &mut Builder, pid: u32) -> Result<()> {
    groups(builder, pid).map(drop)
}

/// Numbers and flags of the groups that a process has; what it watches, by these or by inotify, is noted.
fn groups(builder: &mut Builder, pid: u32) -> Result<Vec<(u32, u32)>> {
    let (folders, mut found) = (Folders::open(pid)?, Vec::new());
    for fd in folders.list()? {
        // One that is closed meanwhile is no concern.
        if folders.link(fd).is_ok_and(|link| is_of_watches(&link))
            && let Ok(info) = folders.read(fd)
        {
            builder.noticed.add(&info.detail);
            if let Detail::Fanotify { flags, .. } = info.detail {
                found.push((fd, flags));
            }
        }
    }
    Ok(found)
}

fn name(pid: u32, fd: u32) -> String {
    format!("descriptor {fd} of process {pid} (anon_inode:[fanotify])")
}

const CLOSE: &str = "close it before the checkpoint";
const QUESTIONS: &str = "it is a fanotify group that is asked for permission (FAN_CLASS_CONTENT, FAN_CLASS_PRE_CONTENT): while the \
                         program stands still, nobody could open files";

/// Captures a group.
pub(super) fn capture(scan: &mut Scan<'_>, d: &Description) -> Result<Option<FileKind>> {
    let Detail::Fanotify { flags, event_flags, marks } = &d.info.detail else {
        unreachable!("called for fanotify groups")
    };
    if flags & CLASS != 0 {
        return scan.refuse(d, QUESTIONS, CLOSE);
    }
    if !is_of_our_users(scan, d)? {
        let why = "it is a fanotify group in a user namespace of the program's own";
        return scan.refuse(d, why, CLOSE);
    }
    let mut all = Vec::with_capacity(marks.len());
    for line in marks {
        // What was ignored until a file changed, which it has.
        if line.mask == 0 && line.ignored == 0 {
            continue;
        }
        match mark(scan, d, line)? {
            Ok(mark) => all.push(mark),
            Err((why, hint)) => return scan.refuse(d, why, hint),
        }
    }
    let unprivileged = is_for_all(*flags) && !could_be_privileged(scan, d)?;
    Ok(Some(FileKind::Fanotify(Fanotify {
        flags: *flags,
        event_flags: *event_flags,
        unprivileged,
        marks: all,
    })))
}

type Why = (String, &'static str);

fn mark(scan: &mut Scan<'_>, d: &Description, line: &FanotifyLine) -> Result<Result<FanotifyMark, Why>> {
    let (on, path) = match &line.on {
        Marked::Inode(inode) => match located(scan, d, inode, &format!("the mark of inode {}", inode.ino))? {
            Ok(path) => (FanotifyPlace::Inode, path),
            Err(why) => return Ok(Err(why)),
        },
        Marked::Mount(id) => match mounted(scan, scan.whose(d), |mount| mount.id == *id)? {
            Some(path) => (FanotifyPlace::Mount, path),
            None => {
                let why = format!(
                    "it marks mount {id}, which the program does not see, or which is hidden by another one"
                );
                return Ok(Err((why, "let the program remove the mark")));
            }
        },
        Marked::FileSystem(device) => {
            let device = ((device >> 20) as u32, (device & 0xf_ffff) as u32);
            match mounted(scan, scan.whose(d), |mount| mount.device == device)? {
                Some(path) => (FanotifyPlace::FileSystem, path),
                None => {
                    let why = format!(
                        "it marks file system {}:{}, of which the program sees no mount",
                        device.0, device.1
                    );
                    return Ok(Err((why, "let the program remove the mark")));
                }
            }
        }
        Marked::Unknown => {
            let why = "it watches what is mounted (FAN_REPORT_MNT), or something that is not known";
            return Ok(Err((why.into(), CLOSE)));
        }
    };
    let path = scan.builder.path(path).0;
    Ok(Ok(FanotifyMark { on, path, flags: line.flags, mask: line.mask, ignored: line.ignored }))
}

/// The mount point of a mount that a process sees, and that is not hidden by another one.
fn mounted(scan: &Scan<'_>, pid: u32, is_it: impl Fn(&Mount) -> bool) -> Result<Option<PathFile>> {
    let views = &scan.builder.views;
    let namespace = views.of_process(pid);
    let all = match namespace {
        Some(row) => views.mounts(row).to_vec(),
        None => Proc::process(pid)?.mounts()?,
    };
    for mount in all.iter().filter(|mount| is_it(mount)) {
        let point = unescaped(&mount.point);
        let reached: PathBuf = views.reach(namespace, &point);
        let Ok(place) = mounts::handle(rustix::fs::CWD, &reached) else { continue };
        if mounts::number(&place)? != mount.id {
            continue;
        }
        let stat =
            rustix::fs::fstat(&place).map_err(|e| Error::call(format!("fstat {}", reached.display()), e))?;
        let made_anew = views.is_made_anew(stat.st_dev);
        return Ok(Some(PathFile { namespace, made_anew, ..paths::describe(&point, &stat, Usage::Path) }));
    }
    Ok(None)
}

/// Who has it; of one that is only in an unread message, whoever may get it.
fn holders<'s>(scan: &'s Scan<'_>, d: &'s Description) -> impl Iterator<Item = &'s Holder<'s>> {
    let has_it = move |h: &&Holder<'_>| d.held.is_empty() || d.held.iter().any(|held| held.pid == h.pid);
    scan.target.holders.iter().filter(has_it)
}

fn is_of_our_users(scan: &Scan<'_>, d: &Description) -> Result<bool> {
    let users = |process: &Proc| process.namespaces_of(&[NamespaceKind::User]);
    let own = users(&Proc::process(std::process::id())?)?;
    for holder in holders(scan, d) {
        if users(holder.process)? != own {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether who made a group may have had the privilege to be told of other processes, which nothing tells: not if all who have it
/// have no privilege now, and had none when they became the program that they are (`execve(2)`).
fn could_be_privileged(scan: &Scan<'_>, d: &Description) -> Result<bool> {
    for holder in holders(scan, d) {
        let auxv = holder.process.auxv()?;
        let began = |kind| auxv.iter().find(|(k, _)| *k == kind).map_or(0, |(_, value)| *value);
        let began_so = began(libc::AT_EUID) == 0 || began(libc::AT_SECURE) != 0;
        if began_so || is_administrator(&holder.process.status()?) {
            return Ok(true);
        }
    }
    Ok(false)
}
