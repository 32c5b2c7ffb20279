//! Locks of glibc that know their owners by thread ids and are in no list of held ones: recursive and error-checking mutexes, those that
//! inherit priorities, and locks for reading and writing. Under new ids their owners would not be known any more.
//!
//! They are looked for in all memory of a checkpoint, by all of their bytes: their state, an id that one of the program's threads has, and
//! what is zero. What is found may still be something else; so it is not changed, but told, and whoever wants a program under new ids takes
//! another instant, at which there is none. A thread that is about to take one has its own id at hand already: it sleeps in such a lock, or
//! it is running and has it in a register.

use crate::{Result, loader};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use stillpoint_image::{Extent, Image, Owner, PAGE, Process, Thread};
use stillpoint_linux::arch::{Interrupted, Regs};
use stillpoint_linux::host;
use stillpoint_store::{Checkpoint, Reader};

/// What stands against new ids at an instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    /// Locks that know their owners, or whoever waits for them: one line for each.
    pub locks: Vec<String>,
    /// A running thread may be about to take one; or its id is at hand for another reason.
    pub may_be_taken: bool,
}

/// Looks for what would not know its owner under new ids.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn look(checkpoint: &Checkpoint) -> Result<Owners> {
    let image = &checkpoint.image;
    let mut found = Owners::default();
    let mut all = BTreeSet::new();
    let mut spaces: Vec<(u32, BTreeSet<u32>)> = Vec::new();
    for process in &image.processes {
        let tids: BTreeSet<u32> = process.threads.iter().map(|t| t.tid).collect();
        let space =
            Space { reader: &checkpoint.reader, extents: checkpoint.pages.of(Owner::Space(process.space)) };
        if !process.threads.iter().any(|thread| space.is_of_glibc(thread)) {
            continue;
        }
        for thread in &process.threads {
            found.may_be_taken |= has_id_at_hand(thread);
            if let Some(at) = space.waits_for(thread, &tids) {
                found.locks.push(format!(
                    "thread {} waits for a lock at {at:#x} that is going to know its owner by the id of the thread",
                    thread.tid
                ));
            }
        }
        all.extend(&tids);
        match spaces.iter_mut().find(|(number, _)| *number == process.space) {
            Some((_, of_space)) => of_space.extend(tids),
            None => spaces.push((process.space, tids)),
        }
    }
    if all.is_empty() {
        return Ok(found);
    }
    let objects = (0..image.objects.len() as u32).map(|number| (Owner::Object(number), all.clone()));
    let spaces = spaces.into_iter().map(|(number, tids)| (Owner::Space(number), tids));
    for (owner, tids) in spaces.chain(objects) {
        for (at, tid, what) in scan(&checkpoint.reader, checkpoint.pages.of(owner), &tids)? {
            let place = place(image, owner, at);
            found.locks.push(format!("thread {tid} holds {what} at {place}, which knows it by its id"));
        }
    }
    Ok(found)
}

fn place(image: &Image, owner: Owner, at: u64) -> String {
    match owner {
        Owner::Space(_) if image.processes.len() == 1 => format!("{at:#x}"),
        Owner::Space(number) => {
            let of = |p: &&Process| p.space == number;
            let pid = image.processes.iter().find(of).map_or(0, |p| p.pid);
            format!("{at:#x} of process {pid}")
        }
        _ => format!("{at:#x} of shared memory"),
    }
}

/// Whether a thread that is in no system call has its own id in a register.
fn has_id_at_hand(thread: &Thread) -> bool {
    let Some(r) = Regs::from_bytes(&thread.regs.0) else { return false };
    let all = [
        r.rax, r.rbx, r.rcx, r.rdx, r.rsi, r.rdi, r.rbp, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15,
    ];
    r.interrupted() == Interrupted::No && all.contains(&thread.tid.into())
}

/// Private memory of a process.
struct Space<'a> {
    reader: &'a Reader,
    extents: &'a [Extent],
}

impl Space<'_> {
    fn read<const SIZE: usize>(&self, at: u64) -> Option<[u8; SIZE]> {
        let mut bytes = [0; SIZE];
        // (What is not stored is zero, and no lock.)
        at.checked_add(SIZE as u64)?;
        loader::read(self.reader, self.extents, at, &mut bytes).ok().map(|()| bytes)
    }

    /// Whether a thread has a block of glibc's: it names itself twice there, and musl's blocks are linked in a ring.
    fn is_of_glibc(&self, thread: &Thread) -> bool {
        let block = Regs::from_bytes(&thread.regs.0).map_or(0, |regs| regs.fs_base);
        let Some(head) = self.read::<32>(block).filter(|_| block != 0) else { return false };
        word(&head, 0) == block && word(&head, 16) == block && word(&head, 24) != block
    }

    /// The lock that a thread sleeps in, if it is going to know its owner by what the thread remembers of its id.
    fn waits_for(&self, thread: &Thread, tids: &BTreeSet<u32>) -> Option<u64> {
        const COMMAND: u64 = 0x7f;
        let regs = Regs::from_bytes(&thread.regs.0)?;
        let call = thread.blocked.map_or(regs.orig_rax, |call| call.nr);
        if regs.interrupted() == Interrupted::No || call != libc::SYS_futex as u64 {
            return None;
        }
        let bytes = self.read::<MUTEX>(regs.rdi)?;
        let (owner, kind) = (half(&bytes, 8), half(&bytes, 16));
        let is_owner = owner == 0 || tids.contains(&owner) || owner as i32 == NOT_RECOVERED;
        let knows_owner = matches!(kind & TYPE, RECURSIVE | CHECKING);
        let takes_id = match (regs.rsi & COMMAND) as i32 {
            // (One that is free bears no other mark than its kind: the thread has to sleep as one does there.)
            libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => {
                kind & ROBUST != 0 || knows_owner && (regs.rdx as u32 == 2 || kind & PROTECTS != 0)
            }
            // It is the kernel that puts the id into the lock.
            libc::FUTEX_LOCK_PI | libc::FUTEX_LOCK_PI2 => knows_owner,
            _ => false,
        };
        (is_owner && takes_id && is_shape_of_mutex(&bytes)).then_some(regs.rdi)
    }
}

/// Bytes of a mutex: its word, how often it is held, owner, users, kind, two halves for other kinds, and a list for robust ones.
const MUTEX: usize = 40;
/// Bytes of a lock for reading and writing.
const RWLOCK: usize = 56;

/// Of the kind of a mutex, the type.
const TYPE: u32 = 3;
const RECURSIVE: u32 = 1;
const CHECKING: u32 = 2;
const ROBUST: u32 = 16;
const INHERITS: u32 = 32;
const PROTECTS: u32 = 64;
/// All that there is: type, these three, shared between processes, and two about elision.
const KINDS: u32 = TYPE | ROBUST | INHERITS | PROTECTS | 128 | 256 | 512;
/// More than so many do not use a lock at a time.
const MANY: u32 = 1 << 16;
/// The owner of a robust mutex whose owner has ended.
const NOT_RECOVERED: i32 = i32::MAX - 1;

fn takes_owner(kind: u32) -> bool {
    matches!(kind & TYPE, RECURSIVE | CHECKING) || kind & INHERITS != 0
}

fn is_shape_of_mutex(bytes: &[u8]) -> bool {
    let kind = half(bytes, 16);
    let list = word(bytes, 24) == 0 && word(bytes, 32) == 0;
    kind & !KINDS == 0
        && half(bytes, 4) < MANY
        && half(bytes, 12) < MANY
        && half(bytes, 20) == 0
        && (list || kind & ROBUST != 0)
}

/// What a mutex is called, if these are the bytes of one that its owner holds and that is in no list.
fn held_mutex(bytes: &[u8]) -> Option<&'static str> {
    let (state, count, owner, kind) = (half(bytes, 0), half(bytes, 4), half(bytes, 8), half(bytes, 16));
    let is_held = match kind {
        kind if kind & INHERITS != 0 => state & 0x3fff_ffff == owner,
        kind if kind & PROTECTS != 0 => state != 0,
        _ => matches!(state, 1 | 2),
    };
    let counts = match kind & TYPE {
        RECURSIVE => count > 0,
        CHECKING if kind & INHERITS == 0 => count == 0,
        _ => true,
    };
    let is_one = is_held && counts && half(bytes, 12) > 0 && takes_owner(kind) && kind & ROBUST == 0;
    (is_one && is_shape_of_mutex(bytes)).then_some(match kind & TYPE {
        RECURSIVE => "a recursive mutex",
        CHECKING => "an error-checking mutex",
        _ => "a mutex that inherits priorities",
    })
}

/// Whether these are the bytes of a lock that is held for writing.
fn is_held_for_writing(bytes: &[u8]) -> bool {
    const WRITING: u32 = 3;
    const HANDED_OVER: u32 = 1 << 31;
    half(bytes, 0) & 3 == WRITING
        && half(bytes, 0) >> 3 < MANY
        && half(bytes, 4) & !HANDED_OVER < MANY
        && half(bytes, 8) < 4
        && half(bytes, 12) < 4
        && word(bytes, 16) == 0
        && half(bytes, 28) < 2
        && word(bytes, 32) == 0
        && word(bytes, 40) == 0
        && word(bytes, 48) < 3
}

fn half(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

type Lock = (u64, u32, &'static str);

/// Extents that are looked through by one thread of ours in one go.
const SOME: usize = 64;
/// Locks that are told of; there is no need for more.
const ENOUGH: usize = 4;

/// Locks that are held by these threads: where, by whom, and what they are.
fn scan(reader: &Reader, extents: &[Extent], tids: &BTreeSet<u32>) -> Result<Vec<Lock>> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<Lock>> {
        let (mut locks, mut memory) = (Vec::new(), Vec::new());
        loop {
            let first = next.fetch_add(SOME, Ordering::Relaxed);
            if first >= extents.len() || locks.len() >= ENOUGH {
                return Ok(locks);
            }
            // A lock may begin in one and end in the next.
            let last = (first + SOME).min(extents.len());
            let more = extents.get(last).map(|e| e.part(e.address, e.address + PAGE));
            let (mut start, mut end) = (0, 0);
            memory.clear();
            for extent in extents[first..last].iter().copied().chain(more) {
                if extent.address != end {
                    find(&memory, start, tids, &mut locks);
                    memory.clear();
                    start = extent.address;
                }
                let before = memory.len();
                memory.resize(before + extent.len() as usize, 0);
                reader.read(&extent, &mut memory[before..])?;
                end = extent.end();
            }
            find(&memory, start, tids, &mut locks);
        }
    };
    let count = host::processors().min(extents.len() / SOME + 1);
    let mut locks = std::thread::scope(|scope| {
        let others: Vec<_> = (1..count).map(|_| scope.spawn(work)).collect();
        let mut all = work();
        for other in others {
            let theirs = other.join().unwrap_or_else(|_| Err(crate::Error::Failed("a reader failed".into())));
            all = all.and_then(|mut all| {
                all.extend(theirs?);
                Ok(all)
            });
        }
        all
    })?;
    // Where two looked at the same page.
    locks.sort_unstable();
    locks.dedup();
    locks.truncate(ENOUGH);
    Ok(locks)
}

/// Finds locks in memory that begins at an address, by the word that has the owner in its lower half.
fn find(memory: &[u8], start: u64, tids: &BTreeSet<u32>, locks: &mut Vec<Lock>) {
    const OWNER: usize = 8;
    const WRITER: usize = 24;
    let (Some(&least), Some(&most)) = (tids.first(), tids.last()) else { return };
    for (number, bytes) in memory.chunks_exact(8).enumerate() {
        let word = word(bytes, 0);
        let (id, beside) = (word as u32, (word >> 32) as u32);
        if id < least || id > most || beside >= MANY || !tids.contains(&id) {
            continue;
        }
        let around = |before: usize, len: usize| {
            let at = (number * 8).checked_sub(before)?;
            Some((start + at as u64, memory.get(at..at + len)?))
        };
        if let Some((at, what)) = around(OWNER, MUTEX).and_then(|(at, bytes)| Some((at, held_mutex(bytes)?)))
        {
            locks.push((at, id, what));
        }
        if let Some((at, _)) = around(WRITER, RWLOCK).filter(|(_, bytes)| is_held_for_writing(bytes)) {
            locks.push((at, id, "a lock for writing"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutex(state: u32, count: u32, owner: u32, kind: u32) -> Vec<u8> {
        let words = [state, count, owner, 1, kind, 0, 0, 0, 0, 0];
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    fn rwlock(state: u32, writer: u32) -> Vec<u8> {
        let words = [state, 0, 1, 1, 0, 0, writer, 0, 0, 0, 0, 0, 0, 0];
        words.iter().flat_map(|w: &u32| w.to_le_bytes()).collect()
    }

    #[test]
    fn held_locks_are_found_and_others_are_not() {
        let all = [
            (mutex(1, 2, 4711, 1), Some("a recursive mutex")),
            (mutex(2, 0, 4711, 2), Some("an error-checking mutex")),
            (mutex(4711, 0, 4711, INHERITS), Some("a mutex that inherits priorities")),
            (mutex(1 << 19 | 1, 1, 4712, PROTECTS | 1), Some("a recursive mutex")),
            (rwlock(3, 4711), Some("a lock for writing")),
            // They know no owner, are not held, are in a list, or somebody else's; and numbers that are no lock.
            (mutex(1, 0, 4711, 0), None),
            (mutex(1, 0, 4711, 3), None),
            (mutex(0, 0, 4711, 1), None),
            (mutex(4711, 1, 4711, ROBUST | 1), None),
            (mutex(1, 1, 4713, 1), None),
            (mutex(4713, 0, 4711, INHERITS), None),
            (mutex(1, 1, 4711, 1025), None),
            (rwlock(2, 4711), None),
            (rwlock(3, 4713), None),
        ];
        let tids = BTreeSet::from([4711, 4712]);
        let mut memory = vec![0xff; 16];
        let mut expected = Vec::new();
        for (bytes, what) in &all {
            expected.extend(what.map(|what| (0x1000 + memory.len() as u64, what)));
            memory.extend(bytes);
            memory.extend([0xff; 24]);
        }
        let mut found = Vec::new();
        find(&memory, 0x1000, &tids, &mut found);
        let found: Vec<_> = found.into_iter().map(|(at, _, what)| (at, what)).collect();
        assert_eq!(found, expected);
        // Cut off at either end there is none.
        let mut found = Vec::new();
        find(&mutex(1, 2, 4711, 1)[..32], 0, &tids, &mut found);
        find(&mutex(1, 2, 4711, 1)[8..], 0, &tids, &mut found);
        assert_eq!(found, []);
    }
}
