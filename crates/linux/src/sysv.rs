//! System V shared memory: what the kernel tells of a segment, and making one with the id that it had; semaphores, as far
//! as they tell who used them. `shmget(2)`, `shmctl(2)`, `shmat(2)`, `semctl(2)`.

use crate::descriptors::check;
use crate::{Error, Result, spawn};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsRawFd, OwnedFd};

/// The key of segments that nobody finds by a key.
pub const PRIVATE: i32 = libc::IPC_PRIVATE;
/// `SHM_DEST`: it goes with its last attachment.
const MARKED: u32 = 0o1000;
/// `SHM_LOCKED`.
const LOCKED: u32 = 0o2000;
const NEXT_ID: &str = "/proc/sys/kernel/shm_next_id";
const MAKE: &str = "make a System V object";

/// What `IPC_STAT` tells of a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Its key; [`PRIVATE`] for none, also once it is marked for removal.
    pub key: i32,
    /// Size as it was asked for, bytes.
    pub size: u64,
    /// Access mode bits.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// User and group that made it.
    pub creator: (u32, u32),
    /// Its pages are locked in memory (`SHM_LOCK`).
    pub locked: bool,
    /// It is removed with its last attachment (`IPC_RMID`).
    pub marked: bool,
    /// Attachments: one for each mapping of it, in all processes.
    pub attachments: u64,
    /// When it was last attached, and last detached, seconds since the epoch; 0 for never.
    pub attached_s: (i64, i64),
}

/// `shmctl`.
fn control(id: i32, command: i32, buffer: &mut libc::shmid_ds) -> Result<i64> {
    // SAFETY: the buffer is a valid shmid_ds, which is all that the commands used here read or write.
    let r = unsafe { libc::shmctl(id, command, &raw mut *buffer) };
    check(|| format!("shmctl of shared memory segment {id}"), r.into())
}

fn blank() -> libc::shmid_ds {
    // SAFETY: the structure has numbers only, for all of which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Looks at a segment of our IPC namespace; `None` if there is none with this id.
pub fn segment(id: i32) -> Result<Option<Segment>> {
    let mut raw = blank();
    match control(id, libc::IPC_STAT, &mut raw) {
        Err(e) if matches!(e.errno(), Some(libc::EINVAL | libc::EIDRM)) => return Ok(None),
        looked => looked?,
    };
    let mode = u32::from(raw.shm_perm.mode);
    Ok(Some(Segment {
        key: raw.shm_perm.__key,
        size: raw.shm_segsz as u64,
        mode: mode & 0o777,
        owner: (raw.shm_perm.uid, raw.shm_perm.gid),
        creator: (raw.shm_perm.cuid, raw.shm_perm.cgid),
        locked: mode & LOCKED != 0,
        marked: mode & MARKED != 0,
        attachments: raw.shm_nattch,
        attached_s: (raw.shm_atime, raw.shm_dtime),
    }))
}

/// The segment with this key, if there is one that we may look at.
pub fn by_key(key: i32) -> Option<i32> {
    // SAFETY: touches no memory.
    let id = unsafe { libc::shmget(key, 0, 0) };
    (key != PRIVATE && id >= 0).then_some(id)
}

/// Gives a segment this owner, group and mode.
pub fn set_owner(id: i32, owner: (u32, u32), mode: u32) -> Result<()> {
    let mut raw = blank();
    (raw.shm_perm.uid, raw.shm_perm.gid) = owner;
    raw.shm_perm.mode = (mode & 0o777) as _;
    control(id, libc::IPC_SET, &mut raw).map(drop)
}

/// Locks the pages of a segment in memory, or lets go of them.
pub fn set_locked(id: i32, locked: bool) -> Result<()> {
    let command = if locked { libc::SHM_LOCK } else { libc::SHM_UNLOCK };
    control(id, command, &mut blank()).map(drop)
}

/// Marks a segment for removal; without attachments it is gone at once.
pub fn remove(id: i32) -> Result<()> {
    control(id, libc::IPC_RMID, &mut blank()).map(drop)
}

/// An attachment of a segment to our own address space.
#[derive(Debug)]
pub struct Attachment {
    at: usize,
}

impl Attachment {
    /// Attaches a segment for reading and writing.
    pub fn new(id: i32) -> Result<Self> {
        // SAFETY: a new mapping at a place of the kernel's choice, which nothing refers to and that is not accessed.
        let at = unsafe { libc::shmat(id, std::ptr::null(), 0) } as isize;
        if at == -1 {
            let source = std::io::Error::last_os_error();
            return Err(Error::call(format!("attach shared memory segment {id}"), source));
        }
        Ok(Attachment { at: at as usize })
    }

    /// The file behind it, for reading and writing: `size` bytes in pages of `page`. It is no attachment itself.
    pub fn file(&self, size: u64, page: u64) -> Result<OwnedFd> {
        let end = self.at as u64 + size.next_multiple_of(page);
        let path = format!("/proc/self/map_files/{:x}-{end:x}", self.at);
        rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| Error::file(&path, e))
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // SAFETY: exactly the attachment that was made, of which nothing of ours is a reference into.
        unsafe { libc::shmdt(self.at as *const libc::c_void) };
    }
}

/// A segment that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Its id.
    pub id: i32,
    /// Its key.
    pub key: i32,
    /// Its size, bytes.
    pub size: u64,
    /// Size of its pages if they come from the pool of huge pages, bytes; else 0.
    pub huge_page: u64,
    /// Access mode bits.
    pub mode: u32,
    /// User and group that make it.
    pub creator: (u32, u32),
}

/// Why a segment could not be made.
#[derive(Debug)]
pub enum NotMade {
    /// Its id belongs to another one by now, or its place in the kernel's table does.
    IdTaken,
    /// Its key belongs to another one.
    KeyTaken,
    /// We may not choose ids.
    Forbidden,
    /// Anything else.
    Failed(Error),
}

impl From<Error> for NotMade {
    fn from(e: Error) -> Self {
        NotMade::Failed(e)
    }
}

/// Makes a segment, attached to us, with the id that it is to have. The next segment to be made gets the id that
/// `shm_next_id` names; somebody else's may come first, and then it is tried again.
pub fn make(wanted: &Wanted) -> Result<Attachment, NotMade> {
    for _ in 0..5 {
        std::fs::write(NEXT_ID, wanted.id.to_string()).map_err(|e| match e.kind() {
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::NotFound => NotMade::Forbidden,
            _ => NotMade::Failed(Error::file(NEXT_ID, e)),
        })?;
        let (id, attachment) = match get(wanted) {
            Err(e) if e.errno() == Some(libc::EEXIST) => return Err(NotMade::KeyTaken),
            made => made?,
        };
        if id == wanted.id {
            return Ok(attachment);
        }
        remove(id)?;
        drop(attachment);
        if segment(wanted.id)?.is_some() {
            break;
        }
    }
    Err(NotMade::IdTaken)
}

fn get(wanted: &Wanted) -> Result<(i32, Attachment)> {
    let mut flags = libc::IPC_CREAT | libc::IPC_EXCL | (wanted.mode & 0o777) as i32;
    if wanted.huge_page > 0 {
        flags |= libc::SHM_HUGETLB | (wanted.huge_page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
    }
    let call = [libc::SYS_shmget, wanted.key.into(), wanted.size as i64, flags.into()];
    as_creator(wanted.creator, call, |id| attached(id).map(|attachment| (id, attachment)))
}

/// Attaches a new segment, or removes it.
fn attached(id: i32) -> Result<Attachment> {
    Attachment::new(id).inspect_err(|_| drop(remove(id)))
}

/// `shmget`, `semget` or `msgget`: its number and arguments.
fn get_object(call: [i64; 4]) -> i64 {
    let [nr, key, a, b] = call;
    // SAFETY: the calls that are made here touch no memory.
    unsafe { libc::syscall(nr, key, a, b) }
}

/// Makes an object (`shmget`, `semget`, `msgget`: number and arguments) in the name of this user and group, and does
/// something with its id.
///
/// Who made an object cannot be changed: if that is not us, it is done by a process of that user. This lives until the work is done:
/// with `kernel.shm_rmid_forced`, shared memory that nobody is attached to goes with its creator.
pub(crate) fn as_creator<T>(
    creator: (u32, u32),
    call: [i64; 4],
    work: impl FnOnce(i32) -> Result<T>,
) -> Result<T> {
    let ours = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    if ours == creator {
        return work(check(|| MAKE.into(), get_object(call))? as i32);
    }
    let pipe =
        || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| Error::call("pipe", e));
    let (answer, child_answer) = pipe()?;
    let (child_wait, wait) = pipe()?;
    // SAFETY: the child makes only raw system calls until it exits, so locks that other threads of ours held at the
    // time do not matter.
    let pid = check(|| "fork".into(), unsafe { libc::fork() }.into())? as u32;
    if pid == 0 {
        let parents = [answer.as_raw_fd(), wait.as_raw_fd()];
        be_the_creator(creator, call, parents, child_answer.as_raw_fd(), child_wait.as_raw_fd());
    }
    drop((child_answer, child_wait));
    let mut buffer = [0; 8];
    let result = match rustix::io::read(&answer, &mut buffer) {
        Ok(8) => i64::from_ne_bytes(buffer),
        _ => -i64::from(libc::EIO),
    };
    let made = match i32::try_from(result) {
        Ok(id) if id >= 0 => work(id),
        _ => {
            let source = std::io::Error::from_raw_os_error(result.unsigned_abs() as i32);
            Err(Error::call(MAKE, source))
        }
    };
    drop(wait);
    spawn::reap(pid);
    made
}

fn be_the_creator(creator: (u32, u32), call: [i64; 4], parents: [i32; 2], answer: i32, wait: i32) -> ! {
    const SECBIT_NO_SETUID_FIXUP: u64 = 1 << 2;
    let (uid, gid) = creator;
    let keep = u32::MAX;
    // SAFETY: plain system calls; the two that take a pointer get one to a buffer on this stack, and its length.
    unsafe {
        for fd in parents {
            libc::syscall(libc::SYS_close, fd);
        }
        // Capabilities stay, for huge pages; if that is forbidden it goes without.
        libc::syscall(libc::SYS_prctl, libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0);
        let mut result = libc::syscall(libc::SYS_setresgid, keep, gid, keep);
        if result == 0 {
            result = libc::syscall(libc::SYS_setresuid, keep, uid, keep);
        }
        if result == 0 {
            result = get_object(call);
        }
        if result < 0 {
            result = -i64::from(*libc::__errno_location());
        }
        let mut bytes = result.to_ne_bytes();
        libc::syscall(libc::SYS_write, answer, bytes.as_ptr(), bytes.len());
        // Until the parent has closed its end, or is dead.
        libc::syscall(libc::SYS_read, wait, bytes.as_mut_ptr(), 1);
        libc::syscall(libc::SYS_exit_group, 0);
    }
    unreachable!("exit_group does not return")
}

/// A set of System V semaphores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SemaphoreSet {
    /// Its id.
    pub id: i32,
    /// Its key.
    pub key: i32,
    /// Processes that were the last to operate on one of its semaphores, in our pid namespace.
    pub last_users: Vec<u32>,
}

/// The semaphore sets of our IPC namespace. Those that we may not read have no users.
pub fn semaphores() -> Result<Vec<SemaphoreSet>> {
    const LIST: &str = "/proc/sysvipc/sem";
    let text = match std::fs::read_to_string(LIST) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|e| Error::file(LIST, e))?,
    };
    // key, id, mode, number of semaphores, …
    let parse = |line: &str| {
        let mut fields = line.split_whitespace().map(str::parse::<i64>);
        let mut next = || fields.next()?.ok();
        let (key, id, _, count) = (next()?, next()?, next()?, next()?);
        Some((key as i32, i32::try_from(id).ok()?, i32::try_from(count).ok()?))
    };
    Ok(text.lines().skip(1).filter_map(parse).map(|(key, id, count)| set(key, id, count)).collect())
}

fn set(key: i32, id: i32, count: i32) -> SemaphoreSet {
    // SAFETY: GETPID takes no further argument.
    let last = |n: i32| unsafe { libc::semctl(id, n, libc::GETPID) };
    let mut last_users: Vec<u32> = (0..count).filter_map(|n| u32::try_from(last(n)).ok()).collect();
    last_users.sort_unstable();
    last_users.dedup();
    SemaphoreSet { id, key, last_users }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn wanted(id: i32, creator: (u32, u32)) -> Wanted {
        Wanted { id, key: PRIVATE, size: 5000, huge_page: 0, mode: 0o640, creator }
    }

    /// An id that nobody has: that of a segment that was just removed.
    fn free_id() -> Option<i32> {
        let ours = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let (id, attachment) = get(&wanted(0, ours)).ok()?;
        remove(id).unwrap();
        drop(attachment);
        Some(id)
    }

    #[test]
    fn a_segment_is_made_with_the_id_it_had() {
        let Some(id) = free_id() else { return };
        assert_eq!(segment(id).unwrap(), None);
        for creator in [(0, 0), (65534, 65534)] {
            let attachment = match make(&wanted(id, creator)) {
                Err(NotMade::Forbidden) => return,
                made => made.unwrap(),
            };
            let found = segment(id).unwrap().unwrap();
            assert_eq!((found.size, found.mode, found.attachments), (5000, 0o640, 1));
            assert_eq!((found.creator, found.owner, found.marked), (creator, creator, false));
            set_owner(id, (7, 8), 0o604).unwrap();
            let file = attachment.file(5000, PAGE).unwrap();
            crate::memfd::write_at(&file, 4999, b"x", 0).unwrap();
            assert!(matches!(make(&wanted(id, creator)), Err(NotMade::IdTaken)));
            remove(id).unwrap();
            let found = segment(id).unwrap().unwrap();
            assert_eq!((found.owner, found.mode, found.marked), ((7, 8), 0o604, true));
            drop(attachment);
            assert_eq!(segment(id).unwrap(), None);
        }
    }
}
