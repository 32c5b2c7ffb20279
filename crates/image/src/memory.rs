//! Address spaces, mappings, memory objects.

use crate::{Bytes, Range, Times};
use bitflags::bitflags;
use minicbor::{Decode, Encode};

/// One address space (`mm_struct`).
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct AddressSpace {
    /// Mappings in ascending order of address, not overlapping.
    #[n(0)]
    pub mappings: Vec<Mapping>,
    /// Addresses that the kernel keeps about the program's layout.
    #[n(1)]
    pub layout: Layout,
    /// Auxiliary vector: `/proc/PID/auxv`.
    #[n(2)]
    pub auxv: Bytes,
    /// `mlockall(MCL_FUTURE)` in force: 0 no, 1 yes, 2 on fault.
    #[n(3)]
    pub lock_future: u32,
    /// `PR_GET_THP_DISABLE`: 0, 1, or (since 6.18) 1 with flags.
    #[n(4)]
    pub thp_disable: u32,
    /// `PR_GET_DUMPABLE`.
    #[n(5)]
    pub dumpable: u32,
    /// `PR_GET_MDWE` bits.
    #[n(6)]
    pub mdwe: u32,
    /// Personality flags.
    #[n(7)]
    pub personality: u32,
    /// `/proc/PID/coredump_filter`.
    #[n(8)]
    pub coredump_filter: u32,
    /// `PR_SET_MEMORY_MERGE`.
    #[n(9)]
    pub memory_merge: bool,
    /// `MEMBARRIER_CMD_REGISTER_*` commands that were given.
    #[n(10)]
    pub membarrier: u32,
}

/// `struct prctl_mm_map` without its pointers to buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
#[allow(missing_docs)] // the kernel's own names say it
pub struct Layout {
    #[n(0)]
    pub start_code: u64,
    #[n(1)]
    pub end_code: u64,
    #[n(2)]
    pub start_data: u64,
    #[n(3)]
    pub end_data: u64,
    #[n(4)]
    pub start_brk: u64,
    #[n(5)]
    pub brk: u64,
    #[n(6)]
    pub start_stack: u64,
    #[n(7)]
    pub arg_start: u64,
    #[n(8)]
    pub arg_end: u64,
    #[n(9)]
    pub env_start: u64,
    #[n(10)]
    pub env_end: u64,
}

/// One mapping (`vm_area_struct`).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Mapping {
    /// First address.
    #[n(0)]
    pub start: u64,
    /// First address behind it.
    #[n(1)]
    pub end: u64,
    /// `PROT_*`.
    #[n(2)]
    pub prot: u32,
    /// Whether it is shared (`MAP_SHARED`).
    #[n(3)]
    pub shared: bool,
    /// What stands behind it.
    #[n(4)]
    pub backing: Backing,
    /// States that `mmap`, `madvise`, `mlock` and friends gave it.
    #[n(5)]
    pub flags: MappingFlags,
    /// Protection key.
    #[n(6)]
    pub pkey: u32,
    /// Huge page size in bytes of a hugetlb mapping, 0 for any other.
    #[n(7)]
    pub huge_page: u64,
    /// Guard regions within it (`MADV_GUARD_INSTALL`).
    #[n(8)]
    pub guards: Vec<Range>,
    /// Name given by `PR_SET_VMA_ANON_NAME`.
    #[n(9)]
    pub name: Option<Bytes>,
}

impl Mapping {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Whether it has no pages; never true for a mapping of a running program.
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }
}

/// What stands behind a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Backing {
    /// Anonymous private memory.
    #[n(0)]
    Anonymous,
    /// A file in the file system.
    #[n(1)]
    File {
        /// Index into [`crate::Image::paths`].
        #[n(0)]
        path: u32,
        /// Offset in bytes.
        #[n(1)]
        offset: u64,
        /// Whether the description it was mapped from could write (`VM_MAYWRITE` of a shared mapping).
        #[n(2)]
        may_write: bool,
    },
    /// Shared anonymous memory or a memfd.
    #[n(2)]
    Object {
        /// Index into [`crate::Image::objects`].
        #[n(0)]
        object: u32,
        /// Offset in bytes.
        #[n(1)]
        offset: u64,
        /// As in `File`.
        #[n(2)]
        may_write: bool,
    },
    /// A mapping that the kernel itself makes, by its name (`[vdso]`, `[vvar]`, `[vvar_vclock]`).
    #[n(3)]
    Special(#[n(0)] String),
    /// A character device that can be mapped again (`/dev/zero` privately).
    #[n(4)]
    Device {
        /// Index into [`crate::Image::paths`].
        #[n(0)]
        path: u32,
        /// Offset in bytes.
        #[n(1)]
        offset: u64,
    },
    /// System V shared memory: an attachment (`shmat`), or a part of one.
    #[n(20)]
    Segment {
        /// Index into [`crate::Image::objects`], of one that has a [`MemoryObject::segment`].
        #[n(0)]
        object: u32,
        /// Offset in bytes.
        #[n(1)]
        offset: u64,
        /// Whether it was attached for writing (without `SHM_RDONLY`).
        #[n(2)]
        may_write: bool,
    },
}

bitflags! {
    /// States of a mapping, mostly `VmFlags` of `/proc/PID/smaps`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MappingFlags: u64 {
        /// Grows downwards on a fault below it (`gd`).
        const GROWS_DOWN = 1 << 0;
        /// `mlock` (`lo`).
        const LOCKED = 1 << 1;
        /// `mlock2(MLOCK_ONFAULT)` (`lf`).
        const LOCK_ON_FAULT = 1 << 2;
        /// `MADV_SEQUENTIAL` (`sr`).
        const SEQUENTIAL = 1 << 3;
        /// `MADV_RANDOM` (`rr`).
        const RANDOM = 1 << 4;
        /// `MADV_DONTFORK` (`dc`).
        const DONT_FORK = 1 << 5;
        /// `MADV_DONTDUMP` (`dd`).
        const DONT_DUMP = 1 << 6;
        /// `MADV_WIPEONFORK` (`wf`).
        const WIPE_ON_FORK = 1 << 7;
        /// `MADV_MERGEABLE` (`mg`).
        const MERGEABLE = 1 << 8;
        /// `MADV_HUGEPAGE` (`hg`).
        const HUGE_PAGE = 1 << 9;
        /// `MADV_NOHUGEPAGE` (`nh`).
        const NO_HUGE_PAGE = 1 << 10;
        /// `MAP_NORESERVE` (`nr`).
        const NO_RESERVE = 1 << 11;
        /// `mseal` (`sl`).
        const SEALED = 1 << 12;
        /// Accounted against the commit limit (`ac`).
        const ACCOUNTED = 1 << 13;
        /// The program's heap (`[heap]`).
        const HEAP = 1 << 14;
        /// The main thread's stack (`[stack]`).
        const STACK = 1 << 15;
        /// `MAP_DROPPABLE` (`dp`).
        const DROPPABLE = 1 << 16;
    }
}

impl<C> Encode<C> for MappingFlags {
    fn encode<W: minicbor::encode::Write>(
        &self,
        e: &mut minicbor::Encoder<W>,
        _: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        e.u64(self.bits())?;
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for MappingFlags {
    fn decode(d: &mut minicbor::Decoder<'b>, _: &mut C) -> Result<Self, minicbor::decode::Error> {
        Self::from_bits(d.u64()?).ok_or_else(|| minicbor::decode::Error::message("unknown mapping flag"))
    }
}

/// Memory that several mappings or descriptors share and that is not a file in the file system.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct MemoryObject {
    /// Size in bytes.
    #[n(0)]
    pub size: u64,
    /// Name given to `memfd_create`; `None` for shared anonymous memory.
    #[n(1)]
    pub memfd: Option<Bytes>,
    /// `F_GET_SEALS`.
    #[n(2)]
    pub seals: u32,
    /// Huge page size in bytes, 0 for ordinary pages.
    #[n(3)]
    pub huge_page: u64,
    /// Access mode bits of a memfd.
    #[n(4)]
    pub mode: u32,
    /// Owner of a memfd.
    #[n(5)]
    pub uid: u32,
    /// Group of a memfd.
    #[n(6)]
    pub gid: u32,
    /// It is System V shared memory; mode and owner are those of the segment.
    #[n(20)]
    pub segment: Option<Segment>,
    /// Its times, as who has a descriptor of it is told of them.
    #[n(21)]
    pub times: Option<Times>,
    /// Extended attributes of a memfd: names and values.
    #[n(22)]
    #[cbor(default)]
    pub attributes: Vec<(Bytes, Bytes)>,
}

/// A System V shared memory segment (`shmget`). It outlives the programs that are attached to it, unless it is marked for
/// removal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Segment {
    /// Its id, which programs remember.
    #[n(0)]
    pub id: i32,
    /// Its key; 0 (`IPC_PRIVATE`) for none, also once it is marked for removal.
    #[n(1)]
    pub key: i32,
    /// The key that it was made with: `maps` calls it by that (`/SYSVkkkkkkkk`).
    #[n(2)]
    pub name: i32,
    /// User that made it.
    #[n(3)]
    pub creator_uid: u32,
    /// Group that made it.
    #[n(4)]
    pub creator_gid: u32,
    /// Its pages are locked in memory (`SHM_LOCK`).
    #[n(5)]
    pub locked: bool,
    /// Marked for removal (`IPC_RMID`): it goes with its last attachment.
    #[n(6)]
    pub marked: bool,
    /// Size as it was asked for, bytes: that of the object may be rounded up.
    #[n(7)]
    pub size: u64,
    /// The program's own IPC namespace that it is in, index into [`crate::Image::namespaces`]; none: that of whoever restores.
    #[n(8)]
    pub namespace: Option<u32>,
}
