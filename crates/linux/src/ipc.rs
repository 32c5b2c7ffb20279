//! What is in an IPC namespace besides shared memory: System V semaphores and message queues, POSIX message queues, and its
//! settings. All of it is about the namespace that the calling thread is in. `sysvipc(7)`, `msgop(2)` (`MSG_COPY`).

use crate::descriptors::check;
use crate::sysv::as_creator;
use crate::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What the two kinds of System V objects have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Common {
    /// Its id.
    pub id: i32,
    /// Its key.
    pub key: i32,
    /// Access mode bits.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// User and group that made it.
    pub creator: (u32, u32),
}

/// A set of semaphores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Semaphores {
    /// What it has in common with others.
    pub common: Common,
    /// Their values.
    pub values: Vec<u16>,
}

/// A message queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Queue {
    /// What it has in common with others.
    pub common: Common,
    /// Most bytes in it (`msg_qbytes`).
    pub capacity: u64,
    /// Types and texts of the messages in it, the oldest first.
    pub messages: Vec<(i64, Vec<u8>)>,
}

/// Rows of a list in `/proc/sysvipc`, by the names in its first line. (Modes are octal.)
fn list(name: &str) -> Result<Vec<Vec<(String, i64)>>> {
    let path = format!("/proc/sysvipc/{name}");
    let text = match std::fs::read_to_string(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|e| Error::file(&path, e))?,
    };
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    let nonsense = |line: &str| Error::Parse { path: PathBuf::from(&path), line: line.into() };
    let parse = |line: &str| {
        let field = |(name, word): (&&str, &str)| {
            let radix = if *name == "perms" { 8 } else { 10 };
            Some(((*name).to_owned(), i64::from_str_radix(word, radix).ok()?))
        };
        let fields: Option<Vec<_>> = names.iter().zip(line.split_whitespace()).map(field).collect();
        fields.filter(|fields| fields.len() == names.len()).ok_or_else(|| nonsense(line))
    };
    lines.map(parse).collect()
}

fn field(row: &[(String, i64)], name: &str) -> Result<i64> {
    let found = row.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| *value).ok_or_else(|| Error::Other(format!("/proc/sysvipc tells no {name}")))
}

fn common(row: &[(String, i64)], id: &str) -> Result<Common> {
    let get = |name| field(row, name);
    Ok(Common {
        id: get(id)? as i32,
        key: get("key")? as i32,
        mode: get("perms")? as u32 & 0o777,
        owner: (get("uid")? as u32, get("gid")? as u32),
        creator: (get("cuid")? as u32, get("cgid")? as u32),
    })
}

/// Ids of all shared memory segments.
pub fn segments() -> Result<Vec<i32>> {
    list("shm")?.iter().map(|row| Ok(field(row, "shmid")? as i32)).collect()
}

/// All sets of semaphores with their values.
pub fn semaphores() -> Result<Vec<Semaphores>> {
    let mut all = Vec::new();
    for row in list("sem")? {
        let common = common(&row, "semid")?;
        let mut values = vec![0_u16; usize::try_from(field(&row, "nsems")?).unwrap_or_default()];
        // SAFETY: GETALL writes one u16 for each semaphore of the set, whose number never changes.
        let r = unsafe { libc::semctl(common.id, 0, libc::GETALL, values.as_mut_ptr()) };
        check(|| format!("read semaphore set {}", common.id), r.into())?;
        all.push(Semaphores { common, values });
    }
    Ok(all)
}

/// All message queues with the messages in them, which stay there.
pub fn queues() -> Result<Vec<Queue>> {
    let mut all = Vec::new();
    for row in list("msg")? {
        let common = common(&row, "msqid")?;
        let count = field(&row, "qnum")?;
        let most = usize::try_from(field(&row, "cbytes")?).unwrap_or_default();
        let mut raw = blank();
        control(common.id, libc::IPC_STAT, &mut raw)?;
        let messages = (0..count).map(|n| message(common.id, n, most)).collect::<Result<_>>()?;
        all.push(Queue { common, capacity: raw.msg_qbytes, messages });
    }
    Ok(all)
}

/// Message `n` of a queue, of `most` bytes at most: a copy.
fn message(id: i32, n: i64, most: usize) -> Result<(i64, Vec<u8>)> {
    const MSG_COPY: i32 = 0o40000;
    let mut buffer = vec![0_u64; 1 + most.div_ceil(8)];
    // SAFETY: the buffer has room for the type and `most` bytes.
    let r = unsafe {
        libc::syscall(libc::SYS_msgrcv, id, buffer.as_mut_ptr(), most, n, MSG_COPY | libc::IPC_NOWAIT)
    };
    let length = check(|| format!("look at message {n} of message queue {id}"), r)? as usize;
    let text = buffer[1..].iter().flat_map(|word| word.to_ne_bytes()).take(length).collect();
    Ok((buffer[0] as i64, text))
}

fn blank() -> libc::msqid_ds {
    // SAFETY: the structure has numbers only, for all of which zero is a value.
    unsafe { std::mem::zeroed() }
}

fn control(id: i32, command: i32, buffer: &mut libc::msqid_ds) -> Result<()> {
    // SAFETY: the buffer is a valid msqid_ds, which is all that the commands used here read or write.
    let r = unsafe { libc::msgctl(id, command, &raw mut *buffer) };
    check(|| format!("msgctl of message queue {id}"), r.into()).map(drop)
}

/// Makes an object of these with the id that it is to have, in a namespace that nobody else uses.
fn make(kind: &str, common: &Common, call: [i64; 4]) -> Result<()> {
    set(&format!("kernel/{kind}_next_id"), common.id.to_string().as_bytes())?;
    let made = as_creator(common.creator, call, Ok)?;
    match made == common.id {
        true => Ok(()),
        false => Err(Error::Other(format!("{kind} {} was made with id {made}", common.id))),
    }
}

fn flags(common: &Common) -> i64 {
    i64::from(libc::IPC_CREAT | libc::IPC_EXCL) | i64::from(common.mode & 0o777)
}

/// Makes a set of semaphores.
pub fn make_semaphores(wanted: &Semaphores) -> Result<()> {
    let (common, count) = (&wanted.common, wanted.values.len() as i64);
    make("sem", common, [libc::SYS_semget, common.key.into(), count, flags(common)])?;
    // SAFETY: SETALL reads one u16 for each semaphore of the set, which was made with as many.
    let r = unsafe { libc::semctl(common.id, 0, libc::SETALL, wanted.values.as_ptr()) };
    check(|| format!("set semaphore set {}", common.id), r.into())?;
    // SAFETY: the structure has numbers only, for all of which zero is a value.
    let mut raw: libc::semid_ds = unsafe { std::mem::zeroed() };
    (raw.sem_perm.uid, raw.sem_perm.gid) = common.owner;
    raw.sem_perm.mode = (common.mode & 0o777) as _;
    // SAFETY: IPC_SET reads one semid_ds.
    let r = unsafe { libc::semctl(common.id, 0, libc::IPC_SET, &raw const raw) };
    check(|| format!("give semaphore set {} its owner", common.id), r.into()).map(drop)
}

/// Makes a message queue, with the messages in it.
pub fn make_queue(wanted: &Queue) -> Result<()> {
    let common = &wanted.common;
    make("msg", common, [libc::SYS_msgget, common.key.into(), flags(common), 0])?;
    let bytes: u64 = wanted.messages.iter().map(|(_, text)| text.len() as u64).sum();
    let count = wanted.messages.len() as u64;
    let mut raw = blank();
    raw.msg_perm.mode = 0o600;
    // It may hold more than it may be given.
    raw.msg_qbytes = wanted.capacity.max(bytes).max(count);
    control(common.id, libc::IPC_SET, &mut raw)?;
    for (kind, text) in &wanted.messages {
        let words = text.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        let buffer: Vec<u64> = std::iter::once(*kind as u64).chain(words).collect();
        // SAFETY: the buffer has the type and the text.
        let r = unsafe {
            libc::syscall(libc::SYS_msgsnd, common.id, buffer.as_ptr(), text.len(), libc::IPC_NOWAIT)
        };
        check(|| format!("fill message queue {}", common.id), r)?;
    }
    (raw.msg_perm.uid, raw.msg_perm.gid) = common.owner;
    raw.msg_perm.mode = (common.mode & 0o777) as _;
    raw.msg_qbytes = wanted.capacity;
    control(common.id, libc::IPC_SET, &mut raw)
}

/// Reads a setting, such as `kernel/shmmax`; `None` if the kernel does not have it.
pub fn get(setting: &str) -> Result<Option<Vec<u8>>> {
    let path = format!("/proc/sys/{setting}");
    match crate::proc::setting(Path::new(&path)) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        text => Ok(Some(text.map_err(|e| Error::file(&path, e))?.trim_ascii_end().to_vec())),
    }
}

/// Changes a setting.
pub fn set(setting: &str, value: &[u8]) -> Result<()> {
    let path = format!("/proc/sys/{setting}");
    std::fs::write(&path, value).map_err(|e| Error::file(&path, e))
}

/// The folder of POSIX message queues.
pub fn posix_queues() -> Result<OwnedFd> {
    let failed = |e| Error::call("look at message queues", e);
    let context = fsopen("mqueue", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed)?;
    fsconfig_create(&context).map_err(failed)?;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).map_err(failed)?;
    // That is only a place.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(&mount, ".", flags, Mode::empty()).map_err(failed)
}

/// Names in that folder.
pub fn names(folder: &OwnedFd) -> Result<Vec<Vec<u8>>> {
    let failed = |e| Error::call("list message queues", e);
    let mut all = Vec::new();
    for entry in rustix::fs::Dir::read_from(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            all.push(name);
        }
    }
    Ok(all)
}

/// Opens a queue in that folder, to look at it.
pub fn open_in(folder: &OwnedFd, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::openat(folder, name, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::call(format!("open message queue /{}", String::from_utf8_lossy(name)), e))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mqueue::{self, Attributes};
    use crate::namespaces;
    use crate::proc::NamespaceKind;

    fn some(id: i32, key: i32) -> Common {
        Common { id, key, mode: 0o640, owner: (7, 8), creator: (65534, 65534) }
    }

    #[test]
    fn a_setting_of_several_numbers_is_read_whole() {
        const LONG: &[u8] = b"1000000000\t1024000000\t1000000000\t32000";
        let made = namespaces::make(NamespaceKind::Ipc, || {
            set("kernel/sem", LONG)?;
            assert_eq!(get("kernel/sem")?.as_deref(), Some(LONG));
            Ok::<_, Error>(())
        });
        assert!(made.is_ok() || !rustix::process::geteuid().is_root());
    }

    #[test]
    fn objects_are_made_as_they_were_told() {
        let made = namespaces::make(NamespaceKind::Ipc, || {
            let sets = [
                Semaphores { common: some(3, 5), values: vec![1, 0, 32767] },
                Semaphores { common: Common { creator: (0, 0), ..some(32768 * 4 + 9, 0) }, values: vec![4] },
            ];
            let mut full = vec![(1_i64, vec![b'x'; 100]); 5];
            full.push((i64::MAX, Vec::new()));
            full.push((2, b"seven b".to_vec()));
            let queues = [
                Queue { common: some(2, 0), capacity: 16384, messages: Vec::new() },
                Queue { common: some(7, 9), capacity: 50, messages: full },
            ];
            sets.iter().try_for_each(make_semaphores)?;
            queues.iter().try_for_each(make_queue)?;
            for _ in 0..2 {
                assert_eq!(semaphores()?, sets);
                assert_eq!(super::queues()?, queues);
            }
            assert_eq!(segments()?, []);
            set("kernel/msgmax", b"4711")?;
            assert_eq!(get("kernel/msgmax")?.unwrap(), b"4711");
            let wanted = Attributes { maximum: 3, size: 40 };
            drop(mqueue::open(b"one", libc::O_RDWR | libc::O_CREAT, 0o600, wanted)?);
            let folder = posix_queues()?;
            assert_eq!(names(&folder)?, [b"one"]);
            assert_eq!(mqueue::attributes(open_in(&folder, b"one")?)?, (wanted, 0));
            Ok::<_, Error>(())
        });
        match made {
            Err(e) if e.errno() == Some(libc::EPERM) => {} // not permitted
            made => drop(made.unwrap()),
        }
        assert_ne!(get("kernel/msgmax").unwrap().unwrap(), b"4711");
    }
}
