//! What a program's memory says of its ids where the kernel and the C library go by it, told anew for a program under other ids.
//!
//! What is changed is only what is known to be such an id, by where it stands and by what it is:
//!
//! * The word that the kernel clears when a thread ends (`set_tid_address(2)`). In glibc, that is the id in the thread's own block; in musl, the
//!   lock around the list of threads, which says who holds it.
//! * musl's id of a thread, behind the head of its block. It is its block if that says so: it begins with its own address, and the blocks
//!   before and after it in the ring of all threads point back to it.
//! * Locks that a thread holds and that are in its robust list (`get_robust_list(2)`), or that it is about to take or to release; of glibc the
//!   owner beside them. musl keeps all locks in such a list that are to know their owners, also if the kernel has not been told of
//!   it, and streams that are locked in another one.
//! * The id by which Go sends its threads the signals that interrupt them, in what it knows of the thread (`m`): found by way of what runs
//!   there (`g`), which is in a word just before the thread's block, and which it names as what runs in it first, and that it names.
//!
//! What else remembers an id cannot be told from any other number ([`crate::owners`] looks for locks of glibc that do).

use crate::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeSet;
use stillpoint_image::anew::{Renamed, renamed, renamed_clock};
use stillpoint_image::{AddressSpace, Backing, Mapping, Process, Thread};
use stillpoint_linux::RemoteAddr;
use stillpoint_linux::arch::{Interrupted, Regs};
use stillpoint_linux::memory::Memory;

/// Of a word that says who holds a lock, the part that is the id. futex(2)
const OWNER: u32 = 0x3fff_ffff;
/// Entries of a robust list that the kernel looks at. `ROBUST_LIST_LIMIT`
const MOST: usize = 2048;

/// From a link of the robust list to the word of the lock, and from there to the owner, in glibc.
const GLIBC_WORD: i64 = -32;
const GLIBC_OWNER: u64 = 8;
/// Where glibc before 2.25 had the id of the process, behind that of the thread.
const GLIBC_PROCESS: u64 = 4;

/// The same as [`GLIBC_WORD`] in musl.
const MUSL_WORD: i64 = -28;
/// Where musl has, in the block of a thread: the blocks before and after it, its id (before 1.2.2, one word more lies before that), the head
/// of its list of locks, and of that of its streams.
const MUSL_BEFORE: u64 = 16;
const MUSL_ID: [u64; 2] = [48, 56];
const MUSL_LOCKS: u64 = 136;
const MUSL_STREAMS: u64 = 192;
/// How far before its block a thread of Go has the address of its `g`; where that has the address of its `m`, as does the `g0` with whose
/// address that begins; and where that has the id (since 1.25, and before).
const GO_WORDS: usize = 16;
const GO_M: u64 = 48;
const GO_ID: [u64; 2] = [64, 72];

/// In a stream of musl: its lock, and the next one.
const MUSL_STREAM_LOCK: u64 = 140;
const MUSL_STREAM_NEXT: u64 = 216;

/// Tells a process, whose threads have new ids, what these are. All of its memory can be had.
pub(crate) fn tell(memory: &Memory, process: &Process, space: &AddressSpace, ids: &Renamed) -> Result<()> {
    let telling = Telling { memory, space, ids, told: RefCell::default() };
    process.threads.iter().try_for_each(|thread| telling.thread(process, thread))
}

struct Telling<'a> {
    memory: &'a Memory,
    space: &'a AddressSpace,
    ids: &'a Renamed,
    /// Words that have been told: a new id may be what another thread was called.
    told: RefCell<BTreeSet<u64>>,
}

impl Telling<'_> {
    fn thread(&self, process: &Process, thread: &Thread) -> Result<()> {
        let tid = thread.own_tid();
        if let Some(cleared) = self.half(thread.clear_child_tid) {
            let is_own = process.threads.iter().any(|t| t.own_tid() == cleared);
            if is_own {
                self.set(thread.clear_child_tid, cleared)?;
            }
            let beside = thread.clear_child_tid + GLIBC_PROCESS;
            if cleared == tid && self.half(beside) == Some(process.own_pid()) {
                self.set(beside, process.own_pid())?;
            }
        }
        let of_kernel = thread.robust_list.start;
        let block = Regs::from_bytes(&thread.regs.0).map_or(0, |regs| regs.fs_base);
        let mut of_musl = 0;
        if let Some(id) = self.id_in_musl(block, tid) {
            self.set(id, tid)?;
            of_musl = block + MUSL_LOCKS;
            self.streams(block, tid)?;
        }
        if let Some(id) = self.id_in_go(block, tid) {
            self.set(id, tid)?;
        }
        let lists = [of_kernel, of_musl];
        for head in lists.into_iter().enumerate().filter(|(at, head)| !lists[..*at].contains(head)) {
            self.locks(head.1, tid)?;
        }
        Ok(())
    }

    /// Where musl has the id of the thread with this block, if it is one of musl's.
    fn id_in_musl(&self, block: u64, tid: u32) -> Option<u64> {
        let (before, after) = (self.word(block + MUSL_BEFORE)?, self.word(block + MUSL_BEFORE + 8)?);
        let is_block = self.word(block)? == block
            && self.word(before + MUSL_BEFORE + 8)? == block
            && self.word(after + MUSL_BEFORE)? == block;
        let id = MUSL_ID.into_iter().map(|at| block + at).find(|at| self.half(*at) == Some(tid))?;
        is_block.then_some(id)
    }

    /// Where Go has the id of the thread with this block, if it is one of Go's.
    fn id_in_go(&self, block: u64, tid: u32) -> Option<u64> {
        let words: [u8; GO_WORDS * 8] = self.word_of(block.checked_sub(GO_WORDS as u64 * 8)?)?;
        let words =
            words.chunks_exact(8).rev().filter_map(|word| word.try_into().ok().map(u64::from_le_bytes));
        let m_of = |g: u64| self.word(g.checked_add(GO_M)?);
        let m = words.filter_map(m_of).find(|&m| self.word(m).and_then(m_of) == Some(m))?;
        let has_id = |at: &u64| self.word(*at) == Some(tid.into());
        GO_ID.into_iter().filter_map(|at| m.checked_add(at)).find(has_id)
    }

    /// Locks of a list, and the one that is being taken or released.
    fn locks(&self, head: u64, tid: u32) -> Result<()> {
        let part = |at: u64| self.word(head.checked_add(at)?);
        let (Some(first), Some(word), Some(pending)) = (part(0), part(8), part(16)) else { return Ok(()) };
        // musl tells where the word is when it tells the kernel of the list.
        let word = if word == 0 { MUSL_WORD } else { word as i64 };
        let mut link = first & !1;
        for _ in 0..MOST {
            if link == head || link == 0 {
                break;
            }
            self.lock(link, word, tid)?;
            let Some(next) = self.word(link) else { break };
            link = next & !1;
        }
        match pending & !1 {
            0 => Ok(()),
            pending => self.lock(pending, word, tid),
        }
    }

    fn lock(&self, link: u64, word: i64, tid: u32) -> Result<()> {
        let at = link.wrapping_add_signed(word);
        if let Some(held) = self.half(at).filter(|held| held & OWNER == tid) {
            self.set(at, held)?;
        }
        let owner = at + GLIBC_OWNER;
        if word == GLIBC_WORD && self.half(owner) == Some(tid) {
            self.set(owner, tid)?;
        }
        Ok(())
    }

    /// Streams of musl that a thread has locked (`flockfile`).
    fn streams(&self, block: u64, tid: u32) -> Result<()> {
        let mut stream = self.word(block + MUSL_STREAMS).unwrap_or(0);
        for _ in 0..MOST {
            let Some(held) = self.half(stream + MUSL_STREAM_LOCK).filter(|held| held & OWNER == tid) else {
                break;
            };
            self.set(stream + MUSL_STREAM_LOCK, held)?;
            stream = self.word(stream + MUSL_STREAM_NEXT).unwrap_or(0);
        }
        Ok(())
    }

    /// Puts the new id into a word that had the old one.
    fn set(&self, at: u64, old: u32) -> Result<()> {
        if !self.told.borrow_mut().insert(at) {
            return Ok(());
        }
        let new = (old & !OWNER) | renamed(self.ids, old & OWNER);
        let mapping = self.mapping(at);
        let is_own = |m: &Mapping| !m.shared || matches!(m.backing, Backing::Object { .. });
        if !mapping.is_some_and(is_own) {
            return Err(Error::Refused(vec![format!(
                "thread {} holds a lock at {at:#x}, in a file that its twin would share with it, by its id",
                old & OWNER
            )]));
        }
        Ok(self.memory.write(RemoteAddr(at), &new.to_le_bytes())?)
    }

    fn mapping(&self, at: u64) -> Option<&Mapping> {
        let first = self.space.mappings.partition_point(|m| m.end <= at);
        self.space.mappings.get(first).filter(|m| m.start <= at && at + 4 <= m.end)
    }

    /// What is at an address, if anything is.
    fn half(&self, at: u64) -> Option<u32> {
        self.word_of(at).map(u32::from_le_bytes)
    }

    fn word(&self, at: u64) -> Option<u64> {
        self.word_of(at).map(u64::from_le_bytes)
    }

    fn word_of<const SIZE: usize>(&self, at: u64) -> Option<[u8; SIZE]> {
        // (All of these are aligned.)
        let mapping = self.mapping(at).filter(|m| at != 0 && at.is_multiple_of(4) && m.prot & 1 != 0)?;
        let mut bytes = [0; SIZE];
        let fits = at.checked_add(SIZE as u64)? <= mapping.end;
        (fits && self.memory.read(RemoteAddr(at), &mut bytes).is_ok()).then_some(bytes)
    }
}

/// The registers of a thread that was interrupted in a call which names one of the program's own, and is to be made again.
pub(crate) fn registers(thread: &Thread, ids: &Renamed) -> Option<Regs> {
    const GROUPS: [u64; 2] = [libc::P_PID as u64, libc::P_PGID as u64];
    let mut regs = Regs::from_bytes(&thread.regs.0)?;
    if regs.interrupted() == Interrupted::No {
        return Some(regs);
    }
    let name = |id: u64| u64::from(renamed(ids, id as u32));
    match thread.blocked.map_or(regs.orig_rax, |call| call.nr) as i64 {
        libc::SYS_wait4 => {
            regs.rdi = match regs.rdi as i32 {
                pid @ 1.. => name(pid as u64),
                group if group < -1 => -(name(u64::from(group.unsigned_abs())) as i64) as u64,
                _ => regs.rdi,
            };
        }
        libc::SYS_waitid if GROUPS.contains(&regs.rdi) => regs.rsi = name(regs.rsi),
        libc::SYS_clock_nanosleep => regs.rdi = renamed_clock(regs.rdi as i32, ids) as i64 as u64,
        _ => {}
    }
    Some(regs)
}
