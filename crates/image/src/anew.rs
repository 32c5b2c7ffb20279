//! Another process that is to be what a program was, under other ids: everything in an image that names one of its own processes or
//! threads is told by the new ids.
//!
//! What is outside of the program keeps its name. What the program itself remembers is in its memory, which is not here.

use crate::{Bytes, Ended, FileKind, Image, Process};
use std::collections::HashMap;

/// Old ids of processes, threads, and leaders that are no more, with their new ones.
pub type Renamed = HashMap<u32, u32>;

/// `si_code` of signals that tell who sent them: kill, sigqueue, tkill, message queues. `SI_*`
const SENT: [i32; 4] = [0, -1, -6, -3];
const SIGCHLD: u32 = 17;

impl Image {
    /// The same program under other ids. It is in no pid namespaces of its own.
    pub fn renamed(&self, ids: &Renamed) -> Image {
        let mut image = self.clone();
        let name = |id: &mut u32| *id = renamed(ids, *id);
        image.processes.iter_mut().for_each(|process| process.rename(ids));
        for file in &mut image.files {
            file.owner.iter_mut().for_each(|owner| name(&mut owner.id));
            file.locks.iter_mut().filter_map(|lock| lock.process.as_mut()).for_each(name);
            if let FileKind::Pid(pid) = &mut file.kind {
                name(pid);
            }
        }
        for message in image.sockets.iter_mut().flat_map(|socket| &mut socket.messages) {
            message.credentials.iter_mut().for_each(|sender| name(&mut sender.pid));
        }
        for pty in &mut image.ptys {
            [&mut pty.session, &mut pty.foreground].into_iter().flatten().for_each(name);
        }
        for file in &mut image.paths {
            if let Some(path) = in_proc(&file.path.0, ids) {
                file.path = Bytes(path);
            }
        }
        image
    }
}

impl Process {
    fn rename(&mut self, ids: &Renamed) {
        let name = |id: &mut u32| *id = renamed(ids, *id);
        // Who leads is told without a number.
        name(&mut self.pid);
        [&mut self.session, &mut self.group, &mut self.parent_thread].into_iter().flatten().for_each(name);
        self.pending.iter_mut().for_each(|info| rename_sender(info, ids));
        for timer in &mut self.timers {
            name(&mut timer.tid);
            timer.clock = renamed_clock(timer.clock, ids);
        }
        for thread in &mut self.threads {
            name(&mut thread.tid);
            thread.directories.iter_mut().filter_map(|d| d.shares.as_mut()).for_each(name);
            thread.pending.iter_mut().for_each(|info| rename_sender(info, ids));
        }
        for Ended { pid, session, group, parent_thread, .. } in self.ended.iter_mut().flatten() {
            name(pid);
            [session, group, parent_thread].into_iter().flatten().for_each(name);
        }
    }
}

/// The new id, if it is one of the program's own.
pub fn renamed(ids: &Renamed, id: u32) -> u32 {
    ids.get(&id).copied().unwrap_or(id)
}

/// A clock: one that tells the processor time of a process or thread names it. clock_getcpuclockid(3)
pub fn renamed_clock(clock: i32, ids: &Renamed) -> i32 {
    // Three bits say which it is; that of a descriptor is the 3 of those without the fourth.
    const KIND: i32 = 7;
    const OF_DESCRIPTOR: i32 = 3;
    if clock >= 0 || clock & KIND == OF_DESCRIPTOR {
        return clock;
    }
    let id = !(clock >> 3) as u32;
    (!(renamed(ids, id) as i32) << 3) | (clock & KIND)
}

/// Who sent a signal, in its `siginfo_t`.
fn rename_sender(info: &mut Bytes, ids: &Renamed) {
    let half = |at: usize| info.0.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let (Some(signal), Some(code), Some(pid)) = (half(0), half(8), half(16)) else { return };
    let code = code as i32;
    if SENT.contains(&code) || (signal == SIGCHLD && code > 0) {
        info.0[16..20].copy_from_slice(&renamed(ids, pid).to_le_bytes());
    }
}

/// A path to what procfs tells of a process or thread, by its new id.
fn in_proc(path: &[u8], ids: &Renamed) -> Option<Vec<u8>> {
    let path = std::str::from_utf8(path).ok()?;
    let mut parts: Vec<String> = path.strip_prefix("/proc/")?.split('/').map(str::to_owned).collect();
    let is_of_thread = parts.get(1).is_some_and(|part| part == "task");
    for at in [Some(0), is_of_thread.then_some(2)].into_iter().flatten() {
        let Some(part) = parts.get_mut(at) else { continue };
        let id = part.parse::<u32>().ok().and_then(|id| ids.get(&id));
        id.iter().for_each(|id| *part = id.to_string());
    }
    Some(format!("/proc/{}", parts.join("/")).into_bytes())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Directories, FileOwner, Lock, LockKind, Message, OpenFile, PathFile, PosixTimer};
    use crate::{Pty, Sender, Socket, Thread};

    fn ids() -> Renamed {
        // One has the old id of another.
        HashMap::from([(10, 20), (11, 10), (12, 22), (13, 23)])
    }

    fn info(signal: u32, code: i32, pid: u32) -> Bytes {
        let mut bytes = vec![0; 128];
        bytes[..4].copy_from_slice(&signal.to_le_bytes());
        bytes[8..12].copy_from_slice(&code.to_le_bytes());
        bytes[16..20].copy_from_slice(&pid.to_le_bytes());
        Bytes(bytes)
    }

    #[test]
    fn all_that_names_its_own_is_told_anew() {
        let thread = |tid, shares| Thread {
            tid,
            directories: Some(Directories { shares, ..Default::default() }),
            pending: vec![info(10, 0, 12), info(10, -2, 12)],
            ..Default::default()
        };
        let ended = Ended {
            pid: 13,
            session: Some(10),
            group: Some(99),
            parent_thread: Some(11),
            ..Default::default()
        };
        let process = Process {
            pid: 10,
            threads: vec![thread(10, None), thread(11, Some(10))],
            session: Some(12),
            group: Some(13),
            parent_thread: Some(11),
            ended: Some(vec![ended]),
            timers: vec![PosixTimer { tid: 11, clock: !11 << 3 | 6, ..Default::default() }],
            pending: vec![info(17, 1, 13), info(11, 1, 13)],
            ..Default::default()
        };
        let lock = Lock { kind: LockKind::Posix, exclusive: true, start: 0, end: None, process: Some(12) };
        let file = OpenFile {
            flags: 0,
            position: 0,
            kind: FileKind::Pid(12),
            owner: Some(FileOwner { kind: 1, id: 11, signal: 0 }),
            locks: vec![lock],
        };
        let message = Message { credentials: Some(Sender { pid: 10, uid: 1, gid: 1 }), ..Default::default() };
        let path = |path: &str| PathFile { path: path.as_bytes().to_vec().into(), ..Default::default() };
        let image = Image {
            processes: vec![process],
            files: vec![file],
            sockets: vec![Socket { messages: vec![message], ..Default::default() }],
            ptys: vec![Pty { session: Some(10), foreground: Some(99), ..Default::default() }],
            paths: ["/proc/10/task/11/stat", "/proc/10/11", "/proc/self/10", "/home/10"].map(path).into(),
            ..Default::default()
        };
        let new = image.renamed(&ids());
        let process = &new.processes[0];
        assert_eq!((process.pid, process.session, process.group), (20, Some(22), Some(23)));
        assert_eq!(process.parent_thread, Some(10));
        assert_eq!(process.threads.iter().map(|t| t.tid).collect::<Vec<_>>(), [20, 10]);
        assert_eq!(process.threads[1].directories.unwrap().shares, Some(20));
        assert_eq!(process.threads[0].pending, [info(10, 0, 22), info(10, -2, 12)]);
        assert_eq!(process.pending, [info(17, 1, 23), info(11, 1, 13)]);
        let ended = &process.ended()[0];
        assert_eq!((ended.pid, ended.session, ended.group), (23, Some(20), Some(99)));
        assert_eq!(ended.parent_thread, Some(10));
        assert_eq!((process.timers[0].tid, process.timers[0].clock), (10, !10 << 3 | 6));
        let file = &new.files[0];
        assert_eq!((&file.kind, file.owner.unwrap().id), (&FileKind::Pid(22), 10));
        assert_eq!(file.locks[0].process, Some(22));
        assert_eq!(new.sockets[0].messages[0].credentials.unwrap().pid, 20);
        assert_eq!((new.ptys[0].session, new.ptys[0].foreground), (Some(20), Some(99)));
        let paths: Vec<String> = new.paths.iter().map(|p| p.path.to_string()).collect();
        assert_eq!(paths, ["/proc/20/task/10/stat", "/proc/20/11", "/proc/self/10", "/home/10"]);
    }

    #[test]
    fn clocks() {
        for clock in [0, 1, -5, !0 << 3 | 2, !99 << 3 | 2] {
            assert_eq!(renamed_clock(clock, &ids()), clock);
        }
        assert_eq!(renamed_clock(!10 << 3 | 2, &ids()), !20 << 3 | 2);
    }
}
